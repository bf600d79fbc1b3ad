/* Windows of 8 to 256 tokens (paper: 5.6, "KV budget sweep"): how long a continuation
 * of 250 tokens stays that of the full cache.
 *
 * A continuation only begins to forget when prompt and new tokens exceed the window,
 * so part of each match is free: with a prompt of 32 tokens, 225 of 250 at B = 256.
 * The tables give that number beside the match, and the match by length, because after
 * the first other token two greedy texts seldom meet again and the mean over 250 tokens
 * mostly says when they parted. The paper does not tell its prompts.
 *
 * kv-direct is compared by a digest of every step's logits. It recomputes the whole
 * context for most tokens, so it runs on the first prompt only. */
#include "lab/compare.h"

enum { N_PROMPTS = 5, EXACT_PROMPTS = 1, PROMPT = 32, N_NEW = 250, QUICK_NEW = 40, MOST_NEW = 4096, N_LENGTHS = 8 };

static const int windows[] = {8, 16, 32, 64, 128, 256};
enum { N_WINDOWS = sizeof windows / sizeof windows[0] };

/* What a cell comes to. */
typedef struct {
    const lab_compare_cell *cell;
    char label[64];            /* its name without the number */
    int64_t same_bits, steps;  /* of exact ones */
    double match[N_LENGTHS];   /* sums over prompts */
} score;

typedef struct {
    lab_comparison cmp;
    score scores[LAB_MOST_CELLS]; /* of cmp.cells */
    int n_lengths;
    int64_t lengths[N_LENGTHS];   /* at which matches are taken; the last is n */
} sweep;

typedef struct {
    const sweep *w;
    score *score;
} run;

static void seen(void *ctx, int64_t t, const float *logits)
{
    run *r = ctx;
    if (!r->score->cell->exact)
        return;
    r->score->same_bits += lab_trace_same(&r->w->cmp.full, t, logits);
    r->score->steps++;
}

static int run_cell(void *ctx, int i, int64_t prompt, kvd_error *err)
{
    sweep *w = ctx;
    score *c = &w->scores[i];
    if (c->cell->exact && prompt >= EXACT_PROMPTS)
        return 0;
    run own = {.w = w, .score = c};
    lab_compare_run r = {.c = &w->cmp, .cell = &w->cmp.cells[i], .prompt = prompt, .seen = seen, .ctx = &own};
    int rc = lab_compare_begin(&r, err);
    for (int k = 0; !rc && k < w->n_lengths; k++)
        c->match[k] += lab_match(r.own.tokens, w->cmp.full.tokens, w->lengths[k]);
    lab_compare_end(&r, rc == 0);
    return rc;
}

/* ---- which cells -------------------------------------------------------------------- */

static void own_list(char *list, size_t size)
{
    static const char *const formats[] = {"kv-direct:%d:recompute", "window:%d", "streaming-llm:%d"};
    size_t n = 0;
    list[0] = 0;
    for (int f = 0; f < 3; f++)
        for (int i = 0; i < N_WINDOWS; i++) {
            char item[64];
            snprintf(item, sizeof item, formats[f], windows[i]);
            n += (size_t)snprintf(list + n, n < size ? size - n : 0, "%s%s", n ? "," : "", item);
        }
}

static int make_cells(sweep *w, json_t *result, kvd_error *err)
{
    char own[1024];
    own_list(own, sizeof own);
    int rc = lab_compare_make(&w->cmp, result, own, LAB_KEEP_DIGESTS, err);
    for (int i = 0; !rc && i < w->cmp.n_cells; i++) {
        score *c = &w->scores[i];
        const kvd_session_options *o = &w->cmp.cells[i].o;
        c->cell = &w->cmp.cells[i];
        snprintf(c->label, sizeof c->label, "%s%s%s", kvd_policy_name(o->policy), o->positions == KVD_POSITIONS_RENUMBER ? " renumbered" : "",
                 o->policy == KVD_POLICY_KV_DIRECT && o->evict_to == KVD_EVICT_DISK ? " disk" : "");
    }
    return rc;
}

static void choose_lengths(sweep *w)
{
    static const int64_t lengths[N_LENGTHS - 1] = {10, 25, 50, 100, 150, 200, 250};
    for (int i = 0; i < N_LENGTHS - 1; i++)
        if (lengths[i] < w->cmp.n)
            w->lengths[w->n_lengths++] = lengths[i];
    w->lengths[w->n_lengths++] = w->cmp.n;
}

/* ---- the result --------------------------------------------------------------------- */

/* New tokens that are predicted before anything is forgotten: the first one that is
 * fed to a full window is one too many for it. */
static int64_t before_forgetting(const sweep *w, const score *c)
{
    int64_t room = c->cell->o.kv_tokens - w->cmp.n_prompt + 1;
    return c->cell->exact || room > w->cmp.n ? w->cmp.n : room < 1 ? 1 : room;
}

static double match_of(const sweep *w, const score *c)
{
    return 100 * c->match[w->n_lengths - 1] / (double)c->cell->n_prompts;
}

static void add_tables(const sweep *w, json_t *result)
{
    static const lab_column columns[] = {{"method", "method", 0},
                                         {"window", "B, tokens", 0},
                                         {"prompts", "prompts", 0},
                                         {"match", "token match, %", 1},
                                         {"free", "tokens before anything is forgotten", 0},
                                         {"first_different", "tokens before the first difference", 1},
                                         {"same_bits", "steps with full's very logits", 0},
                                         {"steps", "of steps compared", 0},
                                         {"ms", "ms per token", 2},
                                         {NULL, NULL, 0}};
    static const lab_column by_length[] = {{"policy", "policy", 0}, {"method", "method", 0}, {"window", "B, tokens", 0},
                                           {"length", "new tokens", 0}, {"match", "token match, %", 1}, {NULL, NULL, 0}};
    char title[96];
    snprintf(title, sizeof title, "Token match with the full cache over %lld new tokens", (long long)w->cmp.n);
    json_t *table = lab_table(result, "windows", title, columns);
    for (int i = 0; i < w->cmp.n_cells; i++) {
        const score *c = &w->scores[i];
        double n = (double)c->cell->n_prompts;
        lab_row(table, json_pack("[s, o, I, f, I, f, o, o, f]", c->label,
                                 c->cell->o.kv_tokens < 0 ? json_null() : json_integer(c->cell->o.kv_tokens), (json_int_t)c->cell->n_prompts, match_of(w, c),
                                 (json_int_t)before_forgetting(w, c), c->cell->first_different / n,
                                 c->cell->exact ? json_integer(c->same_bits) : json_null(), c->cell->exact ? json_integer(c->steps) : json_null(),
                                 1e3 * c->cell->decode_s / (n * (double)(w->cmp.n - 1))));
    }
    table = lab_table(result, "lengths", "The same by the number of new tokens", by_length);
    for (int i = 0; i < w->cmp.n_cells; i++)
        for (int k = 0; k < w->n_lengths; k++) {
            const score *c = &w->scores[i];
            lab_row(table, json_pack("[s, s, o, I, f]", c->cell->name, c->label,
                                     c->cell->o.kv_tokens < 0 ? json_null() : json_integer(c->cell->o.kv_tokens), (json_int_t)w->lengths[k],
                                     100 * c->match[k] / (double)c->cell->n_prompts));
        }
    lab_plot(result, "windows", title, "lines", "windows", "window", "match", "method", NULL, LAB_LOG_X);
    lab_plot(result, "lengths", "Token match by length", "lines", "lengths", "length", "match", "policy", NULL, 0);
}

static void check_exact(const sweep *w, json_t *result)
{
    for (int i = 0; i < w->cmp.n_cells; i++) {
        const score *c = &w->scores[i];
        if (c->cell->exact && (c->same_bits != c->steps || match_of(w, c) < 100))
            lab_check_failed(result, "%s is not exactly full: %.2f %% of the tokens, %lld of %lld logits.", c->cell->name, match_of(w, c),
                             (long long)c->same_bits, (long long)c->steps);
    }
}

static int run_all(sweep *w, json_t *result, kvd_error *err)
{
    int rc = make_cells(w, result, err);
    rc = rc ? rc : lab_compare_all(&w->cmp, run_cell, w, err);
    if (rc)
        return rc;
    add_tables(w, result);
    check_exact(w, result);
    return 0;
}

int lab_sweep(const lab *l, json_t *result, kvd_error *err)
{
    sweep w = {.cmp = {.l = l, .n = l->n_new ? l->n_new : l->quick ? QUICK_NEW : N_NEW, .n_prompts = l->quick ? 1 : N_PROMPTS,
                     .n_prompt = PROMPT}};
    if (w.cmp.n < 2 || w.cmp.n > MOST_NEW)
        return lab_fail(err, KVD_E_RANGE, "%lld new tokens are not in 2..%d", (long long)w.cmp.n, MOST_NEW);
    choose_lengths(&w);
    lab_setting(result, "new_tokens", json_integer(w.cmp.n));
    if (w.cmp.n_prompts > EXACT_PROMPTS)
        lab_note(result, "kv-direct recomputes nearly everything for each token: it runs on the first of the %lld prompts.",
                 (long long)w.cmp.n_prompts);
    int rc = run_all(&w, result, err);
    lab_compare_free(&w.cmp);
    return rc;
}
