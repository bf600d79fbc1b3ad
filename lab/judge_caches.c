/* What is kept, and what it costs to make it again: Figures 4 and 7, the window sweep. */
#include "lab/judge.h"

#include <math.h>
#include <string.h>

static bool exact(const char *method) { return !strncmp(method, "kv-direct", 9); }

/* ---- Fig. 4 --------------------------------------------------------------------------------- */

enum { RETAIN_75 = 384 }; /* of 512 tokens */

/* From the worst to the best of some methods: match in percent, KL in bits. */
typedef struct {
    int n;
    double match_least, match_most, kl_least, kl_most, forced_match_least, forced_match_most, forced_kl_least, forced_kl_most;
} range;

static void widen(double *least, double *most, double x)
{
    *least = fmin(*least, x);
    *most = fmax(*most, x);
}

/* Of kv-direct or of what forgets; budget 0: of all budgets. */
static range range_of(const lab_judged *j, bool of_exact, double budget)
{
    range r = {0, INFINITY, -INFINITY, INFINITY, -INFINITY, INFINITY, -INFINITY, INFINITY, -INFINITY};
    lab_line x;
    LAB_EACH_LINE(j, "matrix", x) {
        const char *method = lab_word(x, "method");
        if (!strcmp(method, "full") || exact(method) != of_exact || (budget > 0 && lab_value(x, "budget") != budget) || isnan(lab_value(x, "match_free")))
            continue;
        r.n++;
        widen(&r.match_least, &r.match_most, lab_value(x, "match_free"));
        widen(&r.kl_least, &r.kl_most, lab_value(x, "kl_free"));
        widen(&r.forced_match_least, &r.forced_match_most, lab_value(x, "match_forced"));
        widen(&r.forced_kl_least, &r.forced_kl_most, lab_value(x, "kl_forced"));
    }
    return r;
}

static void judge_lossy(const lab_judged *j, const char *what, double budget, double match_least, double match_most, double kl_least, double kl_most)
{
    char name[96], paper[96], ours[160], why[256];
    range r = range_of(j, false, budget);
    if (!r.n)
        return;
    bool comparable = !j->other && (j->model == LAB_PAPER_QWEN25_05B || j->model == LAB_PAPER_QWEN25_15B);
    bool match_same = r.match_least >= match_least - 5 && r.match_most <= match_most + 5;
    double nat = log(2), least = r.kl_least * nat, most = r.kl_most * nat;
    bool kl_same = least >= kl_least * 0.8 && most <= kl_most * 1.2;
    const char *elsewhere = j->other ? j->other : "the paper measured Qwen2.5-0.5B and 1.5B only";
    snprintf(name, sizeof name, "token match of what forgets, %s", what);
    snprintf(paper, sizeof paper, "%.0f to %.0f %%", match_least, match_most);
    snprintf(ours, sizeof ours, "%.0f to %.0f %%", r.match_least, r.match_most);
    snprintf(why, sizeof why, "%s; on the same text (forced) %.0f to %.0f %% of the next tokens agree",
             !comparable  ? elsewhere
             : match_same ? "within 5 points"
                          : "the prompts decide how soon two texts part, and the paper does not give its own",
             r.forced_match_least, r.forced_match_most);
    lab_paper(j->result, name, paper, ours, !comparable ? "not comparable" : match_same ? "reproduced" : "differs", why);
    snprintf(name, sizeof name, "KL of what forgets, %s", what);
    snprintf(paper, sizeof paper, "%.1f to %.1f (unit not said; read as nats)", kl_least, kl_most);
    snprintf(ours, sizeof ours, "%.1f to %.1f nats (%.1f to %.1f bits)", least, most, r.kl_least, r.kl_most);
    snprintf(why, sizeof why, "%s; on the same text (forced) it is %.2f to %.2f nats",
             !comparable ? elsewhere
             : kl_same   ? "within 20 %"
                         : "free-running KL says how soon two texts part, not how much was forgotten, and the prompts are others",
             r.forced_kl_least * nat, r.forced_kl_most * nat);
    lab_paper(j->result, name, paper, ours, !comparable ? "not comparable" : kl_same ? "reproduced" : "differs", why);
}

void lab_judge_baselines(const lab_judged *j)
{
    char ours[96];
    range r = range_of(j, true, 0);
    if (r.n) {
        bool all = r.match_least == 100, zero = r.kl_most == 0 && r.forced_kl_most == 0;
        snprintf(ours, sizeof ours, "%s%.4g %%", all ? "" : "down to ", r.match_least);
        lab_paper(j->result, "token match of kv-direct and full, every budget", "100 %", ours, all ? "reproduced" : "differs", all ? "" : lab_fault);
        snprintf(ours, sizeof ours, zero ? "exactly 0 bits" : "up to %.3g bits", fmax(r.kl_most, r.forced_kl_most));
        lab_paper(j->result, "KL of kv-direct and full, every budget", "below 1e-5", ours, zero ? "reproduced" : "differs", zero ? "" : lab_fault);
    }
    judge_lossy(j, "B = 384", RETAIN_75, 6, 28, 7.5, 14.1);
    judge_lossy(j, "all budgets", 0, 5, 28, 7, 14);
}

/* ---- 5.6, windows ------------------------------------------------------------------------------ */

enum { LARGEST = 256, SMALLEST = 8, THEIR_NEW = 250 };

static void judge_window(const lab_judged *j, double b, const char *paper, double most_of_paper)
{
    lab_line r;
    char what[64], ours[96], why[256], must[96] = "";
    LAB_EACH_LINE(j, "windows", r)
        if (!strcmp(lab_word(r, "method"), "window") && lab_value(r, "window") == b)
            break;
    double match = lab_value(r, "match"), new_tokens = lab_judged_number(j, "new_tokens"), n_prompt = lab_judged_number(j, "prompt_tokens");
    if (isnan(match) || isnan(new_tokens))
        return;
    double within = b == SMALLEST ? 4 : 10;
    bool same = fabs(match - most_of_paper) <= within;
    snprintf(what, sizeof what, "token match of a window of %.0f", b);
    snprintf(ours, sizeof ours, "%.0f %% of %.0f tokens", match, new_tokens);
    /* What is predicted before anything is forgotten agrees: a match below that says how
     * long the paper's prompts must have been at least, if its window is a window. */
    double longer = b + 1 - floor(most_of_paper * THEIR_NEW / 100);
    if (same)
        snprintf(why, sizeof why, "within %.0f points", within);
    else {
        if (longer > n_prompt)
            snprintf(must, sizeof must, ", which for such a match must have %.0f tokens or more", longer);
        snprintf(why, sizeof why, "%.0f of the %.0f tokens are predicted before a window of %.0f forgets anything; the paper does not tell its prompts%s",
                 lab_value(r, "free"), new_tokens, b, must);
    }
    /* Where the prompts' length decides and the paper does not give it, another number
     * contradicts nothing. */
    bool fewer = new_tokens != THEIR_NEW, unsaid = fewer || j->other || (!same && longer > n_prompt);
    lab_paper(j->result, what, paper, ours, unsaid ? "not comparable" : same ? "reproduced" : "differs",
              fewer ? "fewer new tokens than the paper's 250" : j->other ? j->other : why);
}

void lab_judge_sweep(const lab_judged *j)
{
    double least = INFINITY;
    bool bits = true;
    lab_line r;
    LAB_EACH_LINE(j, "windows", r)
        if (exact(lab_word(r, "method"))) {
            least = fmin(least, lab_value(r, "match"));
            bits &= lab_value(r, "same_bits") == lab_value(r, "steps");
        }
    if (isfinite(least)) {
        char ours[64];
        bool all = least == 100.0 && bits;
        snprintf(ours, sizeof ours, "%s%.4g %%", all ? "" : "down to ", least);
        lab_paper(j->result, "token match of kv-direct at every B", "100 %", ours, all ? "reproduced" : "differs", all ? "" : lab_fault);
    }
    if (j->model == LAB_PAPER_QWEN25_05B)
        judge_window(j, LARGEST, "88 % (Qwen2.5-0.5B)", 88);
    else if (j->model == LAB_PAPER_SMOLLM2_135M)
        judge_window(j, LARGEST, "34 % (SmolLM2-135M)", 34);
    if (j->model == LAB_PAPER_QWEN25_05B || j->model == LAB_PAPER_SMOLLM2_135M)
        judge_window(j, SMALLEST, "0 to 2 %", 2);
}

/* ---- Fig. 7 --------------------------------------------------------------------------------------- */

/* Recomputing over reading, with the residuals at hand. */
static double ratio_of(const lab_judged *j, double tokens, const char *reading)
{
    lab_line r;
    LAB_EACH_LINE(j, "ratios", r)
        if (lab_value(r, "tokens") == tokens && !strcmp(lab_word(r, "reading"), reading))
            break;
    return lab_value(r, "at_hand");
}

/* The least N from which on recomputing is always the faster; 0: none. */
static double parity(const lab_judged *j, double *greatest)
{
    double from = 0;
    lab_line r;
    *greatest = 0;
    LAB_EACH_LINE(j, "ratios", r) { /* N ascending */
        if (strcmp(lab_word(r, "reading"), "RAM, cold"))
            continue;
        *greatest = lab_value(r, "tokens");
        from = !(lab_value(r, "at_hand") < 1) ? 0 : from > 0 ? from : *greatest;
    }
    return from;
}

void lab_judge_latency(const lab_judged *j)
{
    static const struct {
        double n;
        const char *paper;
        double most; /* what still agrees */
    } rows[] = {{1, "1.1", 1.3}, {100, "0.46 to 0.68 (SmolLM2 0.68)", 1}, {500, "0.17 to 0.3", 0.5}};
    const json_t *model = json_object_get(j->result, "model");
    char why[128], what[96], ours[128];
    /* The paper's cost of recomputing over its bytes per token. */
    double operations = 4 * lab_number_at(model, "n_layers") * lab_number_at(model, "n_kv_heads") * lab_number_at(model, "d_head") *
                        lab_number_at(model, "d_model") / lab_judged_number(j, "kv_bytes_per_token");
    snprintf(why, sizeof why, "it takes %.0f operations to rebuild a byte of K and V; see the notes", operations);
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        double cold = ratio_of(j, rows[i].n, "RAM, cold");
        if (isnan(cold))
            continue;
        bool near = cold <= rows[i].most;
        snprintf(what, sizeof what, "recomputing over reading from RAM, N = %.0f", rows[i].n);
        snprintf(ours, sizeof ours, "%.1f (cold), %.1f (warm)", cold, ratio_of(j, rows[i].n, "RAM, warm"));
        lab_paper(j->result, what, rows[i].paper, ours, near ? "reproduced" : "differs", near ? "no more than that" : why);
    }
    double greatest, from = parity(j, &greatest);
    if (greatest > 0) {
        bool near = from > 0 && from <= 50;
        if (from > 0)
            snprintf(ours, sizeof ours, "from N = %.0f (RAM, cold)", from);
        else
            snprintf(ours, sizeof ours, "never up to N = %.0f", greatest);
        lab_paper(j->result, "recomputing is faster than reading from RAM", "all models, by N = 50", ours, near ? "reproduced" : "differs", near ? "" : why);
    }
    lab_line r, last = {NULL, NULL};
    LAB_EACH_LINE(j, "break_even", r)
        last = r;
    if (!last.cells)
        return;
    snprintf(ours, sizeof ours, "below %.0f MB/s (residuals at hand), %.0f MB/s (in the pass), N = %.0f", lab_value(last, "at_hand"), lab_value(last, "in_pass"),
             lab_value(last, "tokens"));
    lab_paper(j->result, "bandwidth at which recomputing breaks even", "not measured", ours, "not comparable", "the paper has no such number");
}
