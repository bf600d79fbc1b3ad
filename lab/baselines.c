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
#include "lab/compare.h"

#include <math.h>
#include <stdlib.h>

enum { N_PROMPTS = 5, PROMPT = 512, N_NEW = 50, QUICK_NEW = 16, MOST_NEW = 256 };

/* One way of running: match in 0..1 and KL in bits, means over steps and prompts. */
typedef struct {
    double match, kl;
} fidelity;

/* What a cell comes to. */
typedef struct {
    const lab_compare_cell *cell;
    char label[64];
    fidelity free, forced; /* sums over prompts until the end */
    int64_t same_bits, steps, held_bytes;
    bool refused;          /* there is no disk tier here */
    bool first_only;       /* the first prompt will do, if the disk tier runs on all */
} score;

typedef struct {
    lab_comparison cmp;
    score scores[LAB_MOST_CELLS]; /* of cmp.cells */
    json_t *details, *result;
} baselines;

/* Sums over the steps of a run under way. */
typedef struct {
    baselines *b;
    score *score;
    double kl;
    int64_t same_bits;
} sums;

static void seen(void *ctx, int64_t t, const float *logits)
{
    sums *r = ctx;
    const lab_trace *full = &r->b->cmp.full;
    int64_t held = lab_gauge_look(&r->b->cmp.gauge);
    r->score->held_bytes = held > r->score->held_bytes ? held : r->score->held_bytes;
    r->kl += lab_kl_bits(full->logits + t * full->n_vocab, logits, full->n_vocab);
    r->same_bits += lab_trace_same(full, t, logits);
}

static fidelity fidelity_of(const lab_compare_run *r, const sums *all)
{
    return (fidelity){lab_match(r->own.tokens, r->c->full.tokens, r->c->n), all->kl / (double)r->c->n};
}

static int run_cell(baselines *b, int i, int64_t prompt, kvd_error *err)
{
    score *c = &b->scores[i];
    sums all = {.b = b, .score = c};
    lab_compare_run r = {.c = &b->cmp, .cell = &b->cmp.cells[i], .prompt = prompt, .seen = seen, .ctx = &all};
    fidelity free_run = {0}, forced = {0};
    int rc = lab_compare_begin(&r, err);
    if (!rc)
        free_run = forced = fidelity_of(&r, &all);
    if (!rc && r.first_different + 1 < b->cmp.n) { /* the last token is fed to nobody */
        all.kl = 0;
        all.same_bits = 0;
        rc = lab_compare_forced(&r, err);
        forced = rc ? forced : fidelity_of(&r, &all);
    }
    if (!rc) {
        c->free.match += free_run.match, c->free.kl += free_run.kl;
        c->forced.match += forced.match, c->forced.kl += forced.kl;
        c->same_bits += all.same_bits;
        c->steps += b->cmp.n;
        lab_row(b->details, json_pack("[s, I, f, o, f, o, I]", c->cell->name, (json_int_t)prompt + 1, 100 * free_run.match,
                                      lab_number(free_run.kl), 100 * forced.match, lab_number(forced.kl),
                                      (json_int_t)r.first_different));
    }
    lab_compare_end(&r, rc == 0);
    return rc;
}

static bool has_disk(const baselines *b)
{
    for (int i = 0; i < b->cmp.n_cells; i++) {
        const kvd_session_options *o = &b->cmp.cells[i].o;
        if (o->policy == KVD_POLICY_KV_DIRECT && o->evict_to == KVD_EVICT_DISK && !b->scores[i].refused)
            return true;
    }
    return false;
}

/* The disk tier is in the list of its own accord: where it can not be had, those rows
 * are missing and nothing else. */
static int run_or_refuse(void *ctx, int i, int64_t prompt, kvd_error *err)
{
    baselines *b = ctx;
    score *c = &b->scores[i];
    if (c->refused || (prompt && c->first_only && has_disk(b)))
        return 0;
    int rc = run_cell(b, i, prompt, err);
    if (rc != KVD_E_IO || b->cmp.l->policies || c->cell->o.evict_to != KVD_EVICT_DISK || prompt)
        return rc;
    c->refused = true;
    lab_note(b->result, "%s was refused: %s", c->cell->name, err->message);
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

static void make_label(score *c)
{
    const kvd_session_options *o = &c->cell->o;
    bool direct = o->policy == KVD_POLICY_KV_DIRECT;
    const char *more = direct && o->evict_to == KVD_EVICT_DISK   ? " disk"
                       : direct                                  ? " recompute"
                       : o->positions == KVD_POSITIONS_RENUMBER ? " renumbered"
                                                                 : "";
    snprintf(c->label, sizeof c->label, "%s%s", kvd_policy_name(o->policy), more);
}

static int make_cells(baselines *b, kvd_error *err)
{
    const lab *l = b->cmp.l;
    char *own = l->policies ? NULL : own_list(l, err);
    if (!l->policies && !own)
        return KVD_E_NOMEM;
    int rc = lab_compare_make(&b->cmp, b->result, own, LAB_KEEP_LOGITS, err);
    free(own);
    for (int i = 0; !rc && i < b->cmp.n_cells; i++) {
        const kvd_session_options *o = &b->cmp.cells[i].o;
        b->scores[i].cell = &b->cmp.cells[i];
        b->scores[i].first_only = !l->policies && o->policy == KVD_POLICY_KV_DIRECT && o->evict_to != KVD_EVICT_DISK;
        make_label(&b->scores[i]);
    }
    return rc;
}

/* ---- the result --------------------------------------------------------------------- */

static void add_cell(const baselines *b, json_t *table, const score *c, int64_t budget)
{
    double n = (double)c->cell->n_prompts, decoded = n * (double)(b->cmp.n - 1);
    lab_row(table, json_pack("[s, s, I, I, f, o, f, o, I, I, f, f, f]", c->label,
                             c->cell->o.positions == KVD_POSITIONS_RENUMBER ? "renumbered" : "original", (json_int_t)budget,
                             (json_int_t)c->cell->n_prompts, 100 * c->free.match / n, lab_number(c->free.kl / n), 100 * c->forced.match / n,
                             lab_number(c->forced.kl / n), (json_int_t)c->same_bits, (json_int_t)c->steps, c->cell->first_different / n,
                             (double)c->held_bytes / 1e6, decoded > 0 ? 1e3 * c->cell->decode_s / decoded : 0));
}

/* Full keeps everything at every budget: its one run stands in each column, as in the
 * paper's figure. */
static void add_full(const baselines *b, json_t *table, const score *full)
{
    bool any = false;
    for (int i = 0; i < b->cmp.n_cells; i++) {
        int64_t budget = b->cmp.cells[i].o.kv_tokens;
        bool is_new = budget >= 0;
        for (int j = 0; j < i; j++)
            is_new &= b->cmp.cells[j].o.kv_tokens != budget;
        if (is_new)
            add_cell(b, table, full, budget);
        any |= is_new;
    }
    if (!any)
        add_cell(b, table, full, b->cmp.n_prompt);
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
    for (int i = 0; i < b->cmp.n_cells; i++)
        if (b->cmp.cells[i].o.policy == KVD_POLICY_FULL)
            add_full(b, table, &b->scores[i]);
        else if (!b->scores[i].refused)
            add_cell(b, table, &b->scores[i], b->cmp.cells[i].o.kv_tokens);
    lab_plot(result, "match", "Token match with the full cache, each going its own way, %", "heat", "matrix", "budget", "method", NULL,
             "match_free", 0);
    lab_plot(result, "match-forced", "Next token agreed on, both on the full cache's text, %", "heat", "matrix", "budget", "method", NULL,
             "match_forced", 0);
    lab_plot(result, "kl", "KL from the full cache, each going its own way, bits", "heat", "matrix", "budget", "method", NULL, "kl_free", 0);
    lab_plot(result, "kl-forced", "KL from the full cache, both on the full cache's text, bits", "heat", "matrix", "budget", "method",
             NULL, "kl_forced", 0);
}

static void check_exact(const baselines *b, json_t *result)
{
    for (int i = 0; i < b->cmp.n_cells; i++) {
        const score *c = &b->scores[i];
        double n = (double)c->cell->n_prompts;
        if (c->cell->exact && !c->refused && (c->same_bits != c->steps || c->free.kl != 0 || c->forced.kl != 0 || c->free.match < n))
            lab_check_failed(result, "%s is not exactly full: %.2f %% of the tokens, %lld of %lld logits, KL %.3g bits.", c->cell->name,
                             100 * c->free.match / n, (long long)c->same_bits, (long long)c->steps, fmax(c->free.kl, c->forced.kl) / n);
    }
}

static int run_all(baselines *b, kvd_error *err)
{
    json_t *result = b->result;
    static const lab_column columns[] = {{"policy", "policy", 0},
                                         {"prompt", "prompt", 0},
                                         {"match_free", "token match, free, %", 1},
                                         {"kl_free", "KL, free, bits", 4},
                                         {"match_forced", "token match, forced, %", 1},
                                         {"kl_forced", "KL, forced, bits", 4},
                                         {"first_different", "tokens before the first difference", 0},
                                         {NULL, NULL, 0}};
    int rc = make_cells(b, err);
    if (rc)
        return rc;
    json_t *details = b->details = lab_table(result, "prompts", "Each prompt", columns);
    json_incref(details); /* to stand behind the matrix */
    json_array_remove(json_object_get(result, "tables"), json_array_size(json_object_get(result, "tables")) - 1);
    rc = lab_compare_all(&b->cmp, run_or_refuse, b, err);
    if (!rc) {
        add_tables(b, result);
        json_array_append(json_object_get(result, "tables"), details);
        check_exact(b, result);
    }
    json_decref(details);
    return rc;
}

int lab_baselines(const lab *l, json_t *result, kvd_error *err)
{
    int64_t n = l->n_new ? l->n_new : l->quick ? QUICK_NEW : N_NEW, room = l->info.trained_context_tokens - n;
    baselines b = {.result = result,
                   .cmp = {.l = l, .n = n, .n_prompts = l->quick ? 1 : N_PROMPTS, .n_prompt = PROMPT < room ? PROMPT : room}};
    if (n < 2 || n > MOST_NEW)
        return lab_fail(err, KVD_E_RANGE, "%lld new tokens are not in 2..%d", (long long)n, MOST_NEW);
    lab_setting(result, "new_tokens", json_integer(n));
    lab_note(result, "Free: each method goes on with its own tokens. Forced: all are fed the full cache's tokens, so that both distributions "
                     "are about the same text. KL is from the full cache to the method, in bits.");
    lab_note(result, "The first of the %lld tokens comes from the prompt's own pass, which attends to everything whatever the method: it "
                     "always agrees.", (long long)n);
    int rc = run_all(&b, err);
    lab_compare_free(&b.cmp);
    return rc;
}
