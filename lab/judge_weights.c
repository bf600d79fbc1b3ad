/* What the weights are: effective ranks (Fig. 5) and truncated projections (Fig. 6). */
#include "lab/judge.h"

#include <math.h>
#include <string.h>

/* ---- Fig. 5 ------------------------------------------------------------------------------------- */

enum { NEAR_ONE = 10 };

static const char bilinear[] = "W_q^T W_k (d x d)", product[] = "W_q W_k^T (d_head x d_head)";

static lab_line summary(const lab_judged *j, const char *form, const char *which)
{
    lab_line r;
    LAB_EACH_LINE(j, "summary", r)
        if (!strcmp(lab_word(r, "form"), form) && !strcmp(lab_word(r, "which"), which))
            break;
    return r;
}

static void judge_mean(const lab_judged *j, const char *form, const char *paper, double theirs, const char *other)
{
    static const char why_bilinear[] =
        "the paper's number is that of W_q W_k^T, d_head x d_head: the arrays multiplied as they lie in memory. The form that its "
        "equations define and that attention scores come from is W_q^T W_k, d x d";
    lab_line all = summary(j, form, "all"), one = summary(j, form, "one per KV head");
    double mean = lab_value(one, "mean"), mean_all = lab_value(all, "mean"), d_head = lab_number_at(json_object_get(j->result, "model"), "d_head");
    char what[96], ours[128];
    if (isnan(mean) || isnan(mean_all))
        return;
    bool near = mean > 0.98 * theirs && mean < 1.02 * theirs;
    snprintf(what, sizeof what, "mean effective rank of %s", form);
    snprintf(ours, sizeof ours, "%.1f (one query head per KV head), %.1f (all) of %.0f (%.0f %%)", mean, mean_all, d_head, 100 * mean_all / d_head);
    lab_paper(j->result, what, paper, ours, other ? "not comparable" : near ? "reproduced" : "differs",
              other ? other : near ? "within 2 %" : form == bilinear ? why_bilinear : "the same product, on the weights of this file");
}

void lab_judge_rank(const lab_judged *j)
{
    bool gemma = !strcmp(j->architecture, "gemma3");
    const char *paper = NULL, *other = j->other, *size = "another size of the same family";
    double theirs = 0, least_here = INFINITY;
    char ours[96];
    lab_line r;
    if (j->model == LAB_PAPER_SMOLLM2_135M)
        paper = "21.2 of 64 (33 %)", theirs = 21.2;
    else if (j->model == LAB_PAPER_QWEN25_05B)
        paper = "20.0 of 64 (31 %)", theirs = 20.0;
    else if (j->model == LAB_PAPER_GEMMA3_4B)
        paper = "70.2 of 256 (27 %)", theirs = 70.2;
    else if (gemma)
        paper = "70.2 of 256 (27 %), Gemma 3 4B", other = size;
    if (paper) {
        judge_mean(j, product, paper, theirs, other);
        judge_mean(j, bilinear, paper, theirs, other);
    }
    if (j->model == LAB_PAPER_NONE && !gemma)
        return;
    other = j->model == LAB_PAPER_NONE ? size : NULL;
    if (gemma) {
        r = summary(j, product, "one per KV head");
        bool same = lab_value(r, "at_most_10") == 3;
        snprintf(ours, sizeof ours, "%.0f of %.0f", lab_value(r, "at_most_10"), lab_value(r, "heads"));
        if (r.cells)
            lab_paper(j->result, "heads of rank <= 10, W_q W_k^T", "3 of 136, Gemma 3 4B", ours, other ? "not comparable" : same ? "reproduced" : "differs",
                      other ? other : "");
    }
    LAB_EACH_LINE(j, "heads", r)
        if (lab_value(r, "layer") == 0)
            least_here = fmin(least_here, lab_value(r, "rank_product"));
    if (!isfinite(least_here))
        return;
    bool near = least_here <= NEAR_ONE;
    snprintf(ours, sizeof ours, "least rank in layer 0: %.0f; of all layers: %.0f", least_here, lab_value(summary(j, product, "all"), "least"));
    lab_paper(j->result, "near-rank-1 heads in layer 0, W_q W_k^T", "in all three models", ours, near ? "reproduced" : other ? "not comparable" : "differs",
              near ? "a head of rank 10 or less" : other ? other : "no head of layer 0 has rank 10 or less here");
}

/* ---- Fig. 6 ------------------------------------------------------------------------------------- */

static lab_line cut_to(const lab_judged *j, double rank)
{
    lab_line r;
    LAB_EACH_LINE(j, "truncate", r)
        if (!strcmp(lab_word(r, "what"), "K and V") && lab_value(r, "rank") == rank)
            break;
    return r;
}

/* K and V together, as the paper has it: its match in percent, of its two models, and KL. */
static void judge_cut(const lab_judged *j, double rank, const char *paper, double least, double most, double theirs)
{
    lab_line r = cut_to(j, rank);
    double match = lab_value(r, "match"), kl = log(2) * lab_value(r, "kl_free");
    bool full = rank == lab_number_at(json_object_get(j->result, "model"), "d_head");
    bool near = full ? json_is_true(lab_get(r, "exact")) && match == 100 : match >= least - 5 && match <= most + 5 && fabs(kl / theirs - 1) <= 0.25;
    const char *other = full ? NULL : j->other;
    char what[64], ours[128];
    if (isnan(match))
        return;
    snprintf(what, sizeof what, "token match and KL at rank %.0f", rank);
    snprintf(ours, sizeof ours, "%.1f %%, KL %.3g nats free, %.3g teacher-forced", match, kl, log(2) * lab_value(r, "kl_forced"));
    lab_paper(j->result, what, paper, ours, other ? "not comparable" : near ? "reproduced" : "differs",
              other  ? other
              : near ? full ? "exactly 0 and the same bits here, since at full rank nothing is taken away" : "within 5 points, and the free KL within a quarter"
                     : full ? "truncation to full rank changed a bit: a fault" : "in degree; the paper does not name its prompts");
}

void lab_judge_truncate(const lab_judged *j)
{
    if (j->model != LAB_PAPER_SMOLLM2_135M && j->model != LAB_PAPER_QWEN25_05B)
        return;
    judge_cut(j, 64, "100 %, KL 5e-4", 100, 100, 5e-4);
    judge_cut(j, 32, "5 to 15 % on two models, KL 10.9 (unit not said; read as nats)", 5, 15, 10.9);
    judge_cut(j, 8, "5 to 10 %, KL > 11 (ranks below 15; read as nats)", 5, 10, 11);
    lab_line r = cut_to(j, 32);
    double k = lab_value(r, "energy_k"), v = lab_value(r, "energy_v");
    char ours[64];
    bool near = k > 95 && v > 95;
    if (isnan(k) || isnan(v))
        return;
    snprintf(ours, sizeof ours, "W_k %.1f %%, W_v %.1f %%", k, v);
    lab_paper(j->result, "energy kept at rank 32 of 64", "> 95 %", ours, j->other ? "not comparable" : near ? "reproduced" : "differs",
              j->other ? j->other : near ? "" : "of W_k and W_v, which are what is cut here; the paper does not say of which matrix");
}
