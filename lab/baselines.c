/* Lossy caches against the exact one (paper: 5.6, Fig. 4): token match and KL for each
 * method and budget, after a prompt of 512 tokens.
 *
 * What is compared with full, greedily, in two ways:
 *
 *   free    the method goes on with its own tokens. At step t its distribution is held
 *           against full's at step t, which soon follows another text: that is how the
 *           paper's numbers seem to be made, and after the first difference they say
 *           how far two texts are apart, not how much a cache has forgotten
 *   forced  the method is fed full's tokens. Both distributions are then about the same
 *           text, and what differs is what was forgotten
 *
 * The first token comes from the prompt's own pass, whose attention is full for every
 * method: it always agrees, and one part in 50 of each match is its gift.
 *
 * A free run whose every fed token is full's is the forced run as well, and is not run
 * twice; that is always so for kv-direct. Its logits are compared with full's bit for
 * bit, and so are those of a second run of full. Where there is a disk tier, that runs
 * on all prompts at each budget, and recomputing, which rebuilds most of the context
 * for each token, on the first. */
#include "lab/runs.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { N_PROMPTS = 5, PROMPT = 512, N_NEW = 50, QUICK_NEW = 16, MOST_NEW = 256, MOST_CELLS = 128, RETAIN_75 = 384 };

/* One way of running: match in 0..1 and KL in bits, means over steps and prompts. */
typedef struct {
    double match, kl;
} fidelity;

typedef struct {
    char name[64], label[64];
    kvd_session_options o;
    fidelity free, forced; /* sums over prompts until the end */
    int64_t n_prompts;     /* of which so many were run */
    int64_t same_bits, steps, held_bytes;
    double first_different, decode_s; /* sums over prompts */
    bool refused;          /* there is no disk tier here */
    bool first_only;       /* the first prompt will do, if the disk tier runs on all */
} cell;

typedef struct {
    const lab *l;
    int64_t n, n_prompts, n_prompt;
    int32_t *prompts; /* [n_prompts][n_prompt] */
    cell *cells;
    int n_cells;
    lab_trace full;
    lab_gauge gauge;
    json_t *details;
    int64_t done;     /* runs, for the progress bar */
} baselines;

/* A run under way. */
typedef struct {
    baselines *b;
    cell *c;
    lab_trace own;
    double kl;        /* sum over steps */
    int64_t same_bits;
} run;

static int step(void *ctx, int64_t t, const float *logits, int32_t token, kvd_error *err)
{
    run *r = ctx;
    baselines *b = r->b;
    lab_trace_step(&r->own, t, logits, token, err);
    double begun = lab_seconds();
    int64_t held = lab_gauge_look(&b->gauge);
    r->c->held_bytes = held > r->c->held_bytes ? held : r->c->held_bytes;
    r->kl += lab_kl_bits(b->full.logits + t * b->full.n_vocab, logits, b->full.n_vocab);
    r->same_bits += lab_trace_same(&b->full, t, logits);
    r->own.begun += lab_seconds() - begun;
    return lab_tick(b->l, r->c->name, b->done, (int64_t)b->n_cells * b->n_prompts, err);
}

static fidelity fidelity_of(const run *r)
{
    const baselines *b = r->b;
    return (fidelity){lab_match(r->own.tokens, b->full.tokens, b->n), r->kl / (double)b->n};
}

static int run_cell(baselines *b, cell *c, int64_t prompt, kvd_error *err)
{
    const int32_t *ids = b->prompts + prompt * b->n_prompt;
    kvd_session *s = NULL;
    run r = {.b = b, .c = c};
    int rc = lab_trace_make(&r.own, b->n, b->l->info.n_vocab, LAB_KEEP_TOKENS, err);
    rc = rc ? rc : kvd_session_create(&s, b->l->m, &c->o, err);
    if (!rc) {
        lab_gauge_watch(&b->gauge, s);
        r.own.begun = lab_seconds();
        rc = lab_decode(b->l, s, ids, b->n_prompt, NULL, b->n, step, &r, err);
    }
    fidelity free_run = fidelity_of(&r), forced = free_run;
    int64_t first = rc ? 0 : lab_first_difference(r.own.tokens, b->full.tokens, b->n);
    double decode_s = rc ? 0 : r.own.seconds[b->n - 1] - r.own.seconds[0];
    if (!rc && first + 1 < b->n) { /* the last token is fed to nobody */
        r.kl = 0;
        r.same_bits = 0;
        rc = kvd_session_rewind(s, 0, err);
        rc = rc ? rc : lab_decode(b->l, s, ids, b->n_prompt, b->full.tokens, b->n, step, &r, err);
        forced = fidelity_of(&r);
    }
    kvd_session_free(&s);
    if (!rc) {
        c->free.match += free_run.match, c->free.kl += free_run.kl;
        c->forced.match += forced.match, c->forced.kl += forced.kl;
        c->same_bits += r.same_bits;
        c->steps += b->n;
        c->n_prompts++;
        c->first_different += (double)first;
        c->decode_s += decode_s;
        lab_row(b->details, json_pack("[s, I, f, o, f, o, I]", c->name, (json_int_t)prompt + 1, 100 * free_run.match,
                                      lab_number(free_run.kl), 100 * forced.match, lab_number(forced.kl), (json_int_t)first));
    }
    lab_trace_free(&r.own);
    b->done++;
    return rc;
}

static bool has_disk(const baselines *b)
{
    for (int i = 0; i < b->n_cells; i++)
        if (b->cells[i].o.policy == KVD_POLICY_KV_DIRECT && b->cells[i].o.evict_to == KVD_EVICT_DISK && !b->cells[i].refused)
            return true;
    return false;
}

/* The disk tier is in the list of its own accord: where it can not be had, those rows
 * are missing and nothing else. */
static int run_or_refuse(baselines *b, cell *c, int64_t prompt, json_t *result, kvd_error *err)
{
    if (c->refused || (prompt && c->first_only && has_disk(b))) {
        b->done++;
        return 0;
    }
    int rc = run_cell(b, c, prompt, err);
    if (rc != KVD_E_IO || b->l->policies || c->o.evict_to != KVD_EVICT_DISK || prompt)
        return rc;
    c->refused = true;
    lab_note(result, "%s was refused: %s", c->name, err->message);
    return 0;
}

/* ---- which cells -------------------------------------------------------------------- */

static char *own_list(const lab *l, kvd_error *err)
{
    static const int budgets[] = {32, 64, 128, 256, 384};
    static const char *const lossy[] = {"window", "streaming-llm", "h2o", "snapkv", "tova"};
    size_t size = 4096, n;
    char *list = lab_alloc((int64_t)size, 1, err);
    if (!list)
        return NULL;
    n = (size_t)snprintf(list, size, "full");
    for (int i = 0; i < 5; i++)
        n += (size_t)snprintf(list + n, size - n, ",kv-direct:%d:recompute", budgets[i]);
    for (int i = 0; l->so.spill_dir && *l->so.spill_dir && i < 5; i++)
        n += (size_t)snprintf(list + n, size - n, ",kv-direct:%d:disk", budgets[i]);
    for (int m = 0; m < 5; m++)
        for (int renumber = 0; renumber < 2; renumber++)
            for (int i = 0; i < 5; i++)
                n += (size_t)snprintf(list + n, size - n, ",%s:%d%s", lossy[m], budgets[i], renumber ? ":renumber" : "");
    return list;
}

static void make_label(cell *c)
{
    bool exact = c->o.policy == KVD_POLICY_KV_DIRECT;
    const char *more = exact && c->o.evict_to == KVD_EVICT_DISK           ? " disk"
                       : exact                                            ? " recompute"
                       : c->o.positions == KVD_POSITIONS_RENUMBER ? " renumbered"
                                                                          : "";
    snprintf(c->label, sizeof c->label, "%s%s", kvd_policy_name(c->o.policy), more);
}

static int make_cells(baselines *b, kvd_error *err)
{
    int rc = 0;
    char *own = b->l->policies ? NULL : own_list(b->l, err);
    const char *list = b->l->policies ? b->l->policies : own;
    if (!list || !(b->cells = lab_alloc(MOST_CELLS, sizeof *b->cells, err))) {
        free(own);
        return KVD_E_NOMEM;
    }
    for (;;) {
        kvd_session_options o;
        char name[64];
        if (!lab_next_policy(b->l, &list, &o, name, &rc, err))
            break;
        if (b->n_cells == MOST_CELLS) {
            rc = lab_fail(err, KVD_E_RANGE, "more than %d policies", MOST_CELLS);
            break;
        }
        cell *c = &b->cells[b->n_cells++];
        memcpy(c->name, name, sizeof name);
        c->o = o;
        c->first_only = own && o.policy == KVD_POLICY_KV_DIRECT && o.evict_to != KVD_EVICT_DISK;
        make_label(c);
    }
    free(own);
    if (!rc && b->n_cells == 0)
        rc = lab_fail(err, KVD_E_ARG, "no policies");
    return rc;
}

static bool is_exact(const cell *c)
{
    return c->o.policy == KVD_POLICY_KV_DIRECT || c->o.policy == KVD_POLICY_FULL;
}

/* ---- the result --------------------------------------------------------------------- */

static void add_cell(const baselines *b, json_t *table, const cell *c, int64_t budget)
{
    double n = (double)c->n_prompts, decoded = n * (double)(b->n - 1);
    lab_row(table, json_pack("[s, s, I, I, f, o, f, o, I, I, f, f, f]", c->label,
                             c->o.positions == KVD_POSITIONS_RENUMBER ? "renumbered" : "original", (json_int_t)budget,
                             (json_int_t)c->n_prompts, 100 * c->free.match / n, lab_number(c->free.kl / n), 100 * c->forced.match / n,
                             lab_number(c->forced.kl / n), (json_int_t)c->same_bits, (json_int_t)c->steps, c->first_different / n,
                             (double)c->held_bytes / 1e6, decoded > 0 ? 1e3 * c->decode_s / decoded : 0));
}

/* Full keeps everything at every budget: its one run stands in each column, as in the
 * paper's figure. */
static void add_full(const baselines *b, json_t *table, const cell *full)
{
    bool any = false;
    for (int i = 0; i < b->n_cells; i++) {
        int64_t budget = b->cells[i].o.kv_tokens;
        bool is_new = budget >= 0;
        for (int j = 0; j < i; j++)
            is_new &= b->cells[j].o.kv_tokens != budget;
        if (is_new)
            add_cell(b, table, full, budget);
        any |= is_new;
    }
    if (!any)
        add_cell(b, table, full, b->n_prompt);
}

static void add_tables(const baselines *b, json_t *result)
{
    static const lab_column columns[] = {{"method", "method", 0},
                                         {"positions", "positions", 0},
                                         {"budget", "budget, tokens", 0},
                                         {"prompts", "prompts", 0},
                                         {"match_free", "token match, free, %", 1},
                                         {"kl_free", "KL, free, bits", 4},
                                         {"match_forced", "token match, forced, %", 1},
                                         {"kl_forced", "KL, forced, bits", 4},
                                         {"same_bits", "steps with full's very logits", 0},
                                         {"steps", "of steps", 0},
                                         {"first_different", "tokens before the first difference", 1},
                                         {"held_mb", "context memory held, MB", 3},
                                         {"ms", "ms per token", 2},
                                         {NULL, NULL, 0}};
    json_t *table = lab_table(result, "matrix", "Methods and budgets, means over prompts and steps", columns);
    for (int i = 0; i < b->n_cells; i++)
        if (b->cells[i].o.policy == KVD_POLICY_FULL)
            add_full(b, table, &b->cells[i]);
        else if (!b->cells[i].refused)
            add_cell(b, table, &b->cells[i], b->cells[i].o.kv_tokens);
    lab_plot(result, "match", "Token match with the full cache, each going its own way, %", "heat", "matrix", "budget", "method", NULL,
             "match_free", 0);
    lab_plot(result, "match-forced", "Next token agreed on, both on the full cache's text, %", "heat", "matrix", "budget", "method", NULL,
             "match_forced", 0);
    lab_plot(result, "kl", "KL from the full cache, each going its own way, bits", "heat", "matrix", "budget", "method", NULL, "kl_free", 0);
    lab_plot(result, "kl-forced", "KL from the full cache, both on the full cache's text, bits", "heat", "matrix", "budget", "method",
             NULL, "kl_forced", 0);
}

typedef struct {
    int n;
    fidelity free_least, free_most, forced_least, forced_most;
} range;

static void widen(fidelity *least, fidelity *most, fidelity sum, double n)
{
    least->match = fmin(least->match, 100 * sum.match / n);
    most->match = fmax(most->match, 100 * sum.match / n);
    least->kl = fmin(least->kl, sum.kl / n);
    most->kl = fmax(most->kl, sum.kl / n);
}

/* Of the cells that forget, at a budget (0: any). */
static range range_of(const baselines *b, bool exact, int64_t budget)
{
    const fidelity high = {INFINITY, INFINITY}, low = {-INFINITY, -INFINITY};
    range r = {0, high, low, high, low};
    for (int i = 0; i < b->n_cells; i++) {
        const cell *c = &b->cells[i];
        if (c->refused || is_exact(c) != exact || (budget && c->o.kv_tokens != budget))
            continue;
        r.n++;
        widen(&r.free_least, &r.free_most, c->free, (double)c->n_prompts);
        widen(&r.forced_least, &r.forced_most, c->forced, (double)c->n_prompts);
    }
    return r;
}

/* The paper does not say in what its KL is; an implementation takes the natural
 * logarithm unless somebody asks for another, so its numbers are read as nats. */
static void compare_lossy(const baselines *b, json_t *result, const char *what, int64_t budget, double match_least, double match_most,
                          double kl_least, double kl_most)
{
    char name[96], paper[96], ours[160], why[256];
    range r = range_of(b, false, budget);
    if (!r.n)
        return;
    lab_paper_model m = lab_paper_model_of(&b->l->info);
    bool comparable = m == LAB_PAPER_QWEN25_05B || m == LAB_PAPER_QWEN25_15B;
    bool match_same = r.free_least.match >= match_least - 5 && r.free_most.match <= match_most + 5;
    double nat = log(2), least = r.free_least.kl * nat, most = r.free_most.kl * nat;
    bool kl_same = least >= kl_least * 0.8 && most <= kl_most * 1.2;
    static const char elsewhere[] = "the paper measured Qwen2.5-0.5B and 1.5B only";
    snprintf(name, sizeof name, "token match of what forgets, %s", what);
    snprintf(paper, sizeof paper, "%.0f to %.0f %%", match_least, match_most);
    snprintf(ours, sizeof ours, "%.0f to %.0f %%", r.free_least.match, r.free_most.match);
    snprintf(why, sizeof why, "the prompts decide how soon two texts part, and the paper does not give its own; on the same text (forced) %.0f to "
                              "%.0f %% of the next tokens agree", r.forced_least.match, r.forced_most.match);
    lab_paper(result, name, paper, ours, !comparable ? "not comparable" : match_same ? "reproduced" : "differs",
              !comparable ? elsewhere : match_same ? "" : why);
    snprintf(name, sizeof name, "KL of what forgets, %s", what);
    snprintf(paper, sizeof paper, "%.1f to %.1f (unit not said; read as nats)", kl_least, kl_most);
    snprintf(ours, sizeof ours, "%.1f to %.1f nats (%.1f to %.1f bits)", least, most, r.free_least.kl, r.free_most.kl);
    snprintf(why, sizeof why, "free-running KL says how soon two texts part, not how much was forgotten, and the prompts are others; on the same "
                              "text (forced) it is %.2f to %.2f nats", r.forced_least.kl * nat, r.forced_most.kl * nat);
    lab_paper(result, name, paper, ours, !comparable ? "not comparable" : kl_same ? "reproduced" : "differs",
              !comparable ? elsewhere : kl_same ? "" : why);
}

static void compare_with_paper(const baselines *b, json_t *result)
{
    char ours[96];
    range r = range_of(b, true, 0);
    if (r.n) {
        bool all = r.free_least.match == 100.0;
        snprintf(ours, sizeof ours, "%s%.4g %%", all ? "" : "down to ", r.free_least.match);
        lab_paper(result, "token match of kv-direct and full, every budget", "100 %", ours, all ? "reproduced" : "differs",
                  all ? "" : "a guarantee of the engine does not hold");
        bool zero = r.free_most.kl == 0.0 && r.forced_most.kl == 0.0;
        snprintf(ours, sizeof ours, zero ? "exactly 0 bits" : "up to %.3g bits", fmax(r.free_most.kl, r.forced_most.kl));
        lab_paper(result, "KL of kv-direct and full, every budget", "below 1e-5", ours, zero ? "reproduced" : "differs",
                  zero ? "" : "a guarantee of the engine does not hold");
    }
    compare_lossy(b, result, "B = 384", RETAIN_75, 6, 28, 7.5, 14.1);
    compare_lossy(b, result, "all budgets", 0, 5, 28, 7, 14);
}

static void check_exact(const baselines *b, json_t *result)
{
    for (int i = 0; i < b->n_cells; i++) {
        const cell *c = &b->cells[i];
        double n = (double)c->n_prompts;
        if (is_exact(c) && !c->refused && (c->same_bits != c->steps || c->free.kl != 0 || c->forced.kl != 0 || c->free.match < n))
            lab_check_failed(result, "%s is not exactly full: %.2f %% of the tokens, %lld of %lld logits, KL %.3g bits.", c->name,
                             100 * c->free.match / n, (long long)c->same_bits, (long long)c->steps, fmax(c->free.kl, c->forced.kl) / n);
    }
}

static int run_all(baselines *b, json_t *result, kvd_error *err)
{
    static const lab_column columns[] = {{"policy", "policy", 0},
                                         {"prompt", "prompt", 0},
                                         {"match_free", "token match, free, %", 1},
                                         {"kl_free", "KL, free, bits", 4},
                                         {"match_forced", "token match, forced, %", 1},
                                         {"kl_forced", "KL, forced, bits", 4},
                                         {"first_different", "tokens before the first difference", 0},
                                         {NULL, NULL, 0}};
    int rc = make_cells(b, err);
    rc = rc ? rc : lab_prompts(b->l, result, b->n_prompts, b->n_prompt, &b->prompts, err);
    rc = rc ? rc : lab_trace_make(&b->full, b->n, b->l->info.n_vocab, LAB_KEEP_LOGITS, err);
    if (rc)
        return rc;
    json_t *details = b->details = lab_table(result, "prompts", "Each prompt", columns);
    json_incref(details); /* to stand behind the matrix */
    json_array_remove(json_object_get(result, "tables"), json_array_size(json_object_get(result, "tables")) - 1);
    for (int64_t p = 0; !rc && p < b->n_prompts; p++) {
        rc = lab_run_full(b->l, b->prompts + p * b->n_prompt, b->n_prompt, b->n, &b->gauge, &b->full, err);
        for (int i = 0; !rc && i < b->n_cells; i++)
            rc = run_or_refuse(b, &b->cells[i], p, result, err);
    }
    if (!rc) {
        add_tables(b, result);
        json_array_append(json_object_get(result, "tables"), details);
        compare_with_paper(b, result);
        check_exact(b, result);
    }
    json_decref(details);
    return rc;
}

int lab_baselines(const lab *l, json_t *result, kvd_error *err)
{
    int64_t n = l->n_new ? l->n_new : l->quick ? QUICK_NEW : N_NEW, room = l->info.trained_context_tokens - n;
    baselines b = {.l = l, .n = n, .n_prompts = l->quick ? 1 : N_PROMPTS, .n_prompt = PROMPT < room ? PROMPT : room, .gauge = {.l = l}};
    if (n < 2 || n > MOST_NEW)
        return lab_fail(err, KVD_E_RANGE, "baselines: %lld new tokens are not in 2..%d", (long long)n, MOST_NEW);
    lab_setting(result, "new_tokens", json_integer(n));
    lab_note(result, "Free: each method goes on with its own tokens. Forced: all are fed the full cache's tokens, so that both distributions "
                     "are about the same text. KL is from the full cache to the method, in bits.");
    lab_note(result, "The first of the %lld tokens comes from the prompt's own pass, which attends to everything whatever the method: it "
                     "always agrees.", (long long)n);
    int rc = run_all(&b, result, err);
    lab_trace_free(&b.full);
    free(b.cells);
    free(b.prompts);
    return rc;
}
