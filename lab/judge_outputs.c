/* What comes out, with everything kept or rebuilt: Tables 3 and 4, patching, twenty turns. */
#include "lab/judge.h"
#include "lab/texts.h"

#include <math.h>
#include <string.h>

/* ---- Table 3 ------------------------------------------------------------------------------ */

void lab_judge_generation(const lab_judged *j)
{
    /* In the order of lab_paper_model. */
    static const struct {
        const char *name;
        double cached_s, scratch_s;
        const char *ratio;
    } table3[] = {{"SmolLM2-135M", 0.11, 0.19, "1.7"}, {"Qwen2.5-0.5B", 0.18, 0.34, "1.9"}, {"Qwen3-0.6B", 0.20, 0.40, "2.0"},
                  {"DS-R1-1.5B", 0.41, 0.70, "1.7"},   {"Qwen2.5-1.5B", 0.20, 0.70, "3.5"}, {"Gemma 3-4B", 0.82, 3.14, "3.8"}};
    lab_line cached = lab_line_where(j, "generation", "way", "cached"), direct = lab_line_where(j, "generation", "way", "kv-direct"),
             scratch = lab_line_where(j, "generation", "way", "from scratch");
    char ours[128], paper[128];
    double n = lab_value(cached, "tokens"), both = lab_value(scratch, "seconds"), one = lab_value(cached, "seconds");
    if (!scratch.cells || !direct.cells || isnan(n))
        return;
    bool tokens = lab_value(scratch, "equal_tokens") == n && lab_value(direct, "equal_tokens") == n;
    bool bits = lab_value(scratch, "equal_bits") == n && lab_value(direct, "equal_bits") == n;
    snprintf(ours, sizeof ours, "%.0f/%.0f from scratch, %.0f/%.0f kv-direct", lab_value(scratch, "equal_tokens"), n, lab_value(direct, "equal_tokens"), n);
    lab_paper(j->result, "equal tokens", "30/30 on all six models", ours, tokens ? "reproduced" : "differs", tokens ? "" : lab_fault);
    snprintf(ours, sizeof ours, "%.0f/%.0f from scratch, %.0f/%.0f kv-direct", lab_value(scratch, "equal_bits"), n, lab_value(direct, "equal_bits"), n);
    lab_paper(j->result, "steps with equal logits", "\"the same logit values\", no number", ours, bits ? "reproduced" : "differs", bits ? "" : lab_fault);
    snprintf(ours, sizeof ours, "%.1f (%.2f s / %.2f s)", both / one, both, one);
    if (j->model == LAB_PAPER_NONE) {
        lab_paper(j->result, "time, from scratch / cached", "1.7 to 3.8 on its six models", ours, "not comparable", "not a model of the paper");
        return;
    }
    snprintf(paper, sizeof paper, "%s (%.2f s / %.2f s, %s)", table3[j->model].ratio, table3[j->model].scratch_s, table3[j->model].cached_s,
             table3[j->model].name);
    double theirs = table3[j->model].scratch_s / table3[j->model].cached_s;
    bool near = both / one > theirs / 1.25 && both / one < theirs * 1.25;
    lab_paper(j->result, "time, from scratch / cached", paper, ours, near ? "reproduced" : "not comparable",
              near ? "within a quarter"
                   : "another machine (the paper's: Apple M3 Max, MLX): what a pass over the whole sequence costs beside one over a single "
                     "token depends on it");
}

/* ---- 5.3 ----------------------------------------------------------------------------------- */

/* Over the entries of all layers; the row of the greatest layer stands behind the last. */
typedef struct {
    int rows, zeros, same_next, same_all;
    bool zero_after;
    double least, most;
} patched;

static patched sum_up(const lab_judged *j)
{
    lab_line donor = lab_line_where(j, "prompts", "prompt", "donor"), r;
    double n_layers = lab_number_at(json_object_get(j->result, "model"), "n_layers");
    patched s = {.least = INFINITY, .most = -INFINITY};
    LAB_EACH_LINE(j, "layers", r) {
        double kl = lab_value(r, "kl_donor");
        bool same = json_is_true(lab_get(r, "same_bits"));
        if (lab_value(r, "layer") == n_layers) {
            s.zero_after = same;
            continue;
        }
        s.rows++;
        s.zeros += same;
        s.same_next += !strcmp(lab_word(r, "next"), lab_word(donor, "next"));
        s.same_all += !strcmp(lab_word(r, "continuation"), lab_word(donor, "continuation"));
        s.least = fmin(s.least, kl);
        s.most = fmax(s.most, kl);
    }
    return s;
}

void lab_judge_patch(const lab_judged *j)
{
    char kl[160], next[160];
    bool all = !strcmp(lab_judged_text(j, "at"), "all");
    if (strcmp(lab_judged_text(j, "what"), "residual") || strcmp(lab_judged_text(j, "layer"), "all") || strcmp(lab_judged_text(j, "donor"), lab_patch_donor) ||
        strcmp(lab_judged_text(j, "recipient"), lab_patch_recipient))
        return;
    patched s = sum_up(j);
    if (!s.rows)
        return;
    snprintf(next, sizeof next, "the donor's next token at %d of %d layers, its next %.0f tokens at %d", s.same_next, s.rows, lab_judged_number(j, "new_tokens"),
             s.same_all);
    if (all) {
        snprintf(kl, sizeof kl, "exactly 0 at %d of %d layers", s.zeros, s.rows);
        lab_paper(j->result, "KL(patched || donor), all positions replaced", "0.0 at every layer", kl, s.zeros == s.rows ? "reproduced" : "differs",
                  s.zeros == s.rows ? "" : "the same residuals gave other logits: a fault of the engine");
    } else {
        snprintf(kl, sizeof kl, "%.2g to %.2g bits at the layers' entries, %s behind the last", s.least, s.most, s.zero_after ? "exactly 0" : "not 0");
        lab_paper(j->result, "KL(patched || donor), last position replaced", "0.0 at every layer", kl, s.most == 0 ? "reproduced" : "differs",
                  "the recipient's earlier keys and values remain; the paper's zero needs all positions to be replaced");
    }
    lab_paper(j->result, "what the patched run says", "the donor's answer (\"Canberra\") at every layer", next, s.same_all == s.rows ? "reproduced" : "differs",
              s.same_all == s.rows ? ""
              : all                ? "the first token's distribution is the donor's, but what follows attends to the recipient's keys and values below the patch"
                                   : "the recipient's keys and values remain, and what follows attends to them");
}

/* ---- Table 4 -------------------------------------------------------------------------------- */

static const struct {
    lab_paper_model model;
    const char *policy; /* as named here */
    double perplexity;
} perplexities[] = {
    {LAB_PAPER_SMOLLM2_135M, "full", 26.46},     {LAB_PAPER_SMOLLM2_135M, "window:128", 38.2}, {LAB_PAPER_SMOLLM2_135M, "window:64", 65.3},
    {LAB_PAPER_SMOLLM2_135M, "window:32", 135.4}, {LAB_PAPER_QWEN25_05B, "full", 24.63},        {LAB_PAPER_QWEN3_06B, "full", 18.63},
    {LAB_PAPER_DS_R1_15B, "full", 50.37},        {LAB_PAPER_QWEN25_15B, "full", 17.04},
};
enum { N_PERPLEXITIES = sizeof perplexities / sizeof perplexities[0] };

static double paper_perplexity(lab_paper_model model, const char *policy)
{
    for (size_t i = 0; i < N_PERPLEXITIES; i++)
        if (perplexities[i].model == model && !strcmp(perplexities[i].policy, policy))
            return perplexities[i].perplexity;
    return NAN;
}

/* Of windows the paper's sizes are compared as multiples of its full perplexity: the
 * absolute ones depend on chunks and scored tokens, which it does not state. */
static void judge_one_perplexity(const lab_judged *j, lab_line r, double full)
{
    const char *name = lab_word(r, "policy");
    double ours = lab_value(r, "perplexity"), theirs = paper_perplexity(j->model, name), ratio = ours / full;
    char what[128], paper[64], mine[96];
    bool same = json_is_true(lab_get(r, "same_as_full"));
    snprintf(what, sizeof what, "WikiText-2 perplexity, %s", name);
    if (!strncmp(name, "kv-direct", 9)) {
        if (isnan(full))
            return;
        snprintf(mine, sizeof mine, "%.4f, %s", ours, same ? "each token's probability the same bits as of full" : "not that of full");
        if (j->local)
            lab_paper(j->result, what, "diverges by orders of magnitude (Gemma 3 4B)", mine, same ? "differs" : "not comparable",
                      same ? "with absolute positions and a mask, sliding-window layers are exact too" : lab_fault);
        else
            lab_paper(j->result, what, "that of full", mine, same ? "reproduced" : "differs", same ? "" : lab_fault);
        return;
    }
    if (isnan(theirs) || isnan(ours))
        return;
    if (!strcmp(name, "full")) {
        snprintf(paper, sizeof paper, "%.2f", theirs);
        snprintf(mine, sizeof mine, "%.2f", ours);
        lab_paper(j->result, what, paper, mine, "not comparable",
                  "the paper states neither chunks nor scored tokens, and its weights are not these; ours follow llama.cpp's rule");
    } else if (!isnan(full)) {
        snprintf(paper, sizeof paper, "%.1f, %.2f times full", theirs, theirs / paper_perplexity(j->model, "full"));
        snprintf(mine, sizeof mine, "%.1f, %.2f times full", ours, ratio);
        bool near = fabs(log(ratio / theirs * paper_perplexity(j->model, "full"))) < log(1.2);
        lab_paper(j->result, what, paper, mine, near ? "reproduced" : "not comparable",
                  near ? "within 20 %" : "the paper states neither chunks nor scored tokens, nor whether a window moves with each token; and a few first tokens that "
                                         "happen to be in it change the size several times (streaming-llm in the table)");
    }
}

void lab_judge_perplexity(const lab_judged *j)
{
    lab_line r;
    double full = lab_value(lab_line_where(j, "perplexity", "policy", "full"), "perplexity");
    LAB_EACH_LINE(j, "perplexity", r)
        judge_one_perplexity(j, r, full);
}

/* acc_norm of full, of KV-Direct and of a window of 64, which Table 4 gives as equal. */
static const struct {
    lab_paper_model model;
    double percent;
} accuracies[] = {{LAB_PAPER_SMOLLM2_135M, 39.4}, {LAB_PAPER_QWEN25_05B, 41.0}, {LAB_PAPER_QWEN3_06B, 44.0}, {LAB_PAPER_DS_R1_15B, 42.0}, {LAB_PAPER_QWEN25_15B, 47.5}};
enum { N_ACCURACIES = sizeof accuracies / sizeof accuracies[0], FEW_TASKS = 100, THEIR_TASKS = 500 };

static void judge_agreement(const lab_judged *j, lab_line r)
{
    char what[128], mine[128];
    bool same = json_is_true(lab_get(r, "same_as_full"));
    snprintf(what, sizeof what, "HellaSwag, agreement of %s with full", lab_word(r, "policy"));
    snprintf(mine, sizeof mine, "%.4g %% of predictions%s", lab_value(r, "agree_acc_norm"), same ? ", all log probabilities the same bits" : "");
    lab_paper(j->result, what, j->local ? "49.2 % -> 25.0 % right (Gemma 3 4B)" : "100 % of predictions", mine, same && !j->local ? "reproduced" : "differs",
              !same ? lab_fault : j->local ? "with absolute positions and a mask, sliding-window layers are exact too" : "");
}

static void judge_accuracy(const lab_judged *j, lab_line r)
{
    double ours = lab_value(r, "acc_norm"), error = lab_value(r, "acc_norm_error"), n = lab_value(r, "tasks");
    char what[128], paper[64], mine[128];
    for (size_t i = 0; i < N_ACCURACIES; i++) {
        double p = accuracies[i].percent, both = sqrt(error * error + p * (100 - p) / (THEIR_TASKS - 1));
        if (accuracies[i].model != j->model || isnan(ours) || isnan(both) || isnan(n))
            continue;
        bool near = fabs(ours - p) <= 2 * both, few = n < FEW_TASKS;
        snprintf(what, sizeof what, "HellaSwag, %s, acc_norm", lab_word(r, "policy"));
        snprintf(paper, sizeof paper, "%.1f %% (N = %d)", p, THEIR_TASKS);
        snprintf(mine, sizeof mine, "%.1f +- %.1f %% (N = %.0f)", ours, error, n);
        lab_paper(j->result, what, paper, mine, few || j->other ? "not comparable" : near ? "reproduced" : "differs",
                  few        ? "too few tasks to tell"
                  : j->other ? j->other
                  : near     ? "within two standard errors of the difference; the paper names neither its tasks nor its rule"
                             : "more than two standard errors apart: other weights, other tasks or another rule, which the paper does not state");
    }
}

void lab_judge_hellaswag(const lab_judged *j)
{
    lab_line r;
    bool has_full = lab_line_where(j, "hellaswag", "policy", "full").cells;
    LAB_EACH_LINE(j, "hellaswag", r) {
        const char *name = lab_word(r, "policy");
        if (!strncmp(name, "kv-direct", 9) && has_full)
            judge_agreement(j, r);
        else if (!strcmp(name, "full") || !strcmp(name, "window:64"))
            judge_accuracy(j, r);
    }
}

/* ---- 5.5 ------------------------------------------------------------------------------------- */

void lab_judge_multiturn(const lab_judged *j)
{
    lab_line full = lab_line_where(j, "ways", "way", "full"), direct = lab_line_where(j, "ways", "way", "kv-direct recompute"), r;
    double turns = lab_judged_number(j, "turns"), most = 0, unbounded = lab_value(full, "peak_mb"), peak = lab_value(direct, "peak_mb");
    char ours[160] = "-", what[96];
    size_t n = 0;
    bool equal = true;
    if (!full.cells || !direct.cells)
        return;
    LAB_EACH_LINE(j, "ways", r) {
        const char *way = lab_word(r, "way");
        double ratio = lab_value(r, "ratio");
        if (strncmp(way, "kv-direct ", 10) || lab_value(r, "turns") != turns || isnan(ratio) || n + 32 > sizeof ours)
            continue;
        equal &= lab_value(r, "equal") == turns;
        most = fmax(most, ratio);
        n += (size_t)snprintf(ours + n, sizeof ours - n, "%s%.16s %.2f", n ? ", " : "", way + 10, ratio);
    }
    snprintf(what, sizeof what, "time of %.0f turns, times the unbounded cache's", turns);
    lab_paper(j->result, what, "1.00 (\"without sacrificing latency\")", ours, most < 1.1 ? "reproduced" : "differs",
              most < 1.1 ? "within a tenth"
                         : "the paper's unbounded cache ends at 103 MB, below its budget of 150 MB: nothing had to be recomputed. Here the budget is "
                           "outgrown, and this is the price");
    bool held = lab_value(direct, "turns") == turns && peak <= lab_judged_number(j, "budget_bytes") / 1e6;
    snprintf(ours, sizeof ours, "%.2f MB -> %.2f MB (%.0f %%)", unbounded, peak, 100 * peak / unbounded);
    lab_paper(j->result, "peak context memory, unbounded -> kv-direct", "103 MB -> 42 MB (41 %) on Gemma 3-4B", ours,
              !held ? "differs" : j->model == LAB_PAPER_GEMMA3_4B ? "reproduced" : "not comparable",
              !held ? "recomputing did not stay inside the budget to the end, see the notes"
                    : "the budget is given, not found: a share like the paper's, here obeyed after it was outgrown");
    lab_paper(j->result, "replies of kv-direct equal to the unbounded cache's", "claimed for every budget", equal ? "all, in every logit" : "not all",
              equal ? "reproduced" : "differs", equal ? "" : lab_fault);
}
