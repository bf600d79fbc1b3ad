/* A conversation of 20 turns (paper: 5.5, Fig. 3): memory and time of each turn.
 *
 * The paper bounds its cache to 150 MB, which its conversations never reach: 103 MB
 * unbounded, 42 MB bounded, and no difference in time. Here the budget is made for the
 * conversation, about 40 % of what keeping everything takes at the end (103 to 42 is
 * 41 %), so that every way of staying inside it has to show its price:
 *
 *   full                 keeps everything; sets the measure
 *   kv-direct recompute  inside the budget, what is dropped is recomputed in each pass
 *   kv-direct disk       inside the budget, what is dropped is read back in each pass
 *   kv-direct parked     drops everything between turns and rebuilds it in the next
 *                        turn's prompt: small while nobody speaks, full-sized within a
 *                        turn. For a machine that holds one active conversation of many
 *   window               as many tokens as the budget has room for, the rest forgotten
 *
 * The budget is the model's own (kvd_memory_set_budget), put back afterwards. Memory is
 * the ledger's: at its highest within a turn, and between turns. Replies end where the
 * model ends them, after 30 tokens at the latest. The conversation is continued with
 * the very tokens that were generated, so the exact ways see equal prompts. */
#include "lab/runs.h"

#include <stdlib.h>
#include <string.h>

#include "lab/texts.h"

enum { FULL, RECOMPUTE, DISK, PARKED, WINDOW, N_WAYS };
enum { N_NEW = 30, MOST_NEW = 256, QUICK_TURNS = 8, QUICK_NEW = 16, LEAST_WINDOW = 8, PERCENT = 40 };

static const char *const ways[N_WAYS] = {"full", "kv-direct recompute", "kv-direct disk", "kv-direct parked", "window"};

typedef struct {
    int64_t context, prompt, n_new; /* tokens: behind it in all, fed, generated */
    int64_t peak_bytes, after_bytes, recomputed;
    double prefill_s, decode_s;
    int32_t tokens[MOST_NEW];
    char receipt[33];
    json_t *text; /* owned */
    bool equal;   /* to full's turn */
} turn;

typedef struct {
    const lab *l;
    int n_turns;       /* that full could do */
    int64_t n_new, budget_bytes, window_tokens, most_context;
    turn *turns;       /* [N_WAYS][LAB_TURNS] */
    int done[N_WAYS];  /* turns; 0: the way was not gone */
    lab_gauge gauge;
} talk;

static turn *turn_of(const talk *k, int way, int i)
{
    return &k->turns[way * LAB_TURNS + i];
}

/* The turn's tokens: what is still to be fed of the last answer, then the question. */
static int next_prompt(const talk *k, int i, int32_t last, int32_t **out, int64_t *n, kvd_error *err)
{
    int32_t *ids;
    int64_t n_ids, carry = i && !kvd_token_is_end(k->l->m, last);
    int rc = i ? lab_chat_next(k->l, lab_talk[i], &ids, &n_ids, err) : lab_chat_open(k->l, lab_talk_system, lab_talk[i], &ids, &n_ids, err);
    if (rc)
        return rc;
    if ((*out = lab_alloc(n_ids + carry, sizeof **out, err))) {
        (*out)[0] = last;
        memcpy(*out + carry, ids, (size_t)n_ids * sizeof *ids);
        *n = n_ids + carry;
    }
    kvd_ids_free(ids);
    return *out ? 0 : KVD_E_NOMEM;
}

static int on_token(void *ctx, int32_t id, const char *text, size_t n_text)
{
    (void)id, (void)text, (void)n_text;
    lab_gauge_look(ctx);
    return 0;
}

static int speak(talk *k, int way, kvd_session *s, const int32_t *ids, int64_t n, turn *t, kvd_error *err)
{
    kvd_generate_options o;
    kvd_result r;
    kvd_session_stats before, after;
    kvd_generate_options_defaults(&o);
    o.max_tokens = k->n_new;
    o.on_token = on_token;
    o.ctx = &k->gauge;
    k->gauge.peak_bytes = 0;
    kvd_session_get_stats(s, &before);
    int rc = kvd_generate(s, ids, n, &o, &r, err);
    if (!rc) {
        kvd_session_get_stats(s, &after);
        t->prompt = n;
        t->n_new = r.n_tokens;
        t->context = before.n_tokens + n + r.n_tokens;
        t->recomputed = after.recomputed_tokens - before.recomputed_tokens;
        t->prefill_s = r.prefill_s;
        t->decode_s = r.decode_s;
        t->text = lab_text(r.text, r.n_text);
        memcpy(t->tokens, r.tokens, (size_t)r.n_tokens * sizeof *r.tokens);
        memcpy(t->receipt, r.receipt, sizeof t->receipt);
        t->peak_bytes = k->gauge.peak_bytes;
        if (way == PARKED)
            kvd_session_park(s);
        t->after_bytes = lab_gauge_look(&k->gauge);
    }
    kvd_result_free(&r);
    return rc;
}

static kvd_session_options options_of(const talk *k, int way)
{
    kvd_session_options o = k->l->so;
    o.policy = way == FULL ? KVD_POLICY_FULL : way == WINDOW ? KVD_POLICY_WINDOW : KVD_POLICY_KV_DIRECT;
    o.positions = KVD_POSITIONS_ORIGINAL;
    o.evict_to = way == DISK ? KVD_EVICT_DISK : KVD_EVICT_RECOMPUTE;
    o.spill_dir = way == DISK ? k->l->so.spill_dir : NULL;
    o.rates = NULL;
    o.kv_tokens = way == WINDOW ? k->window_tokens : -1;
    return o;
}

static int converse(talk *k, int way, kvd_error *err)
{
    kvd_session_options o = options_of(k, way);
    kvd_session *s = NULL;
    int32_t last = 0;
    int most = way == FULL ? k->l->quick ? QUICK_TURNS : LAB_TURNS : k->n_turns;
    int rc = kvd_session_create(&s, k->l->m, &o, err);
    if (rc)
        return rc;
    lab_gauge_watch(&k->gauge, s);
    for (int i = 0; !rc && i < most; i++) {
        int32_t *ids;
        int64_t n, had = kvd_session_tokens(s, NULL);
        turn *t = turn_of(k, way, i);
        if ((rc = next_prompt(k, i, last, &ids, &n, err)))
            break;
        if (had + n + k->n_new > k->l->info.trained_context_tokens) {
            free(ids);
            break;
        }
        if (had + n + k->n_new > k->most_context)
            k->most_context = had + n + k->n_new;
        rc = speak(k, way, s, ids, n, t, err);
        free(ids);
        if (rc)
            break;
        last = t->tokens[t->n_new - 1];
        const turn *f = turn_of(k, FULL, i);
        t->equal = t->n_new == f->n_new && !memcmp(t->tokens, f->tokens, (size_t)t->n_new * sizeof *t->tokens) &&
                   (way == WINDOW || !strcmp(t->receipt, f->receipt));
        k->done[way] = i + 1;
        rc = lab_tick(k->l, ways[way], i + 1, most, err);
    }
    kvd_session_free(&s);
    return rc;
}

/* ---- the budget --------------------------------------------------------------------- */

/* About PERCENT of what full takes; more where recomputing could not reach the end of
 * the conversation with that. */
static void choose_budget(talk *k, json_t *result)
{
    kvd_session_options o = options_of(k, RECOMPUTE);
    kvd_plan plan;
    kvd_plan_session(k->l->m, &o, k->most_context, k->most_context, 0, &plan);
    k->budget_bytes = plan.full_bytes * PERCENT / 100;
    if (k->budget_bytes < plan.least_bytes) {
        k->budget_bytes = plan.least_bytes + plan.least_bytes / 50;
        lab_note(result, "%d %% of full (%.2f MB) is less than recomputing needs for %lld tokens (%.2f MB): the budget is %.2f MB.",
                 PERCENT, (double)plan.full_bytes * PERCENT / 1e8, (long long)k->most_context, (double)plan.least_bytes / 1e6,
                 (double)k->budget_bytes / 1e6);
    }
    k->window_tokens = k->budget_bytes / plan.kv_bytes_per_token;
    if (k->window_tokens < LEAST_WINDOW)
        k->window_tokens = LEAST_WINDOW;
    lab_setting(result, "budget_bytes", json_integer(k->budget_bytes));
    lab_setting(result, "full_bytes", json_integer(plan.full_bytes));
    lab_setting(result, "window_tokens", json_integer(k->window_tokens));
}

/* One way inside the budget. That the tier does not fit or has no disk is a finding,
 * not a failure. */
static int converse_within(talk *k, int way, json_t *result, kvd_error *err)
{
    int64_t now, peak, own;
    kvd_error e;
    kvd_memory_context(k->l->m, &now, &peak, &own);
    int rc = kvd_memory_set_budget(k->l->m, own && own < k->budget_bytes ? own : k->budget_bytes, err);
    if (rc)
        return rc;
    rc = converse(k, way, &e);
    kvd_memory_set_budget(k->l->m, own, NULL); /* what is in use is less than before */
    if (rc == KVD_E_BUDGET || (rc == KVD_E_IO && way == DISK)) {
        lab_note(result, "%s was refused in turn %d: %s", ways[way], k->done[way] + 1, e.message);
        return 0;
    }
    if (rc)
        *err = e;
    return rc;
}

static int run_all(talk *k, json_t *result, kvd_error *err)
{
    int rc = converse(k, FULL, err);
    if (rc)
        return rc;
    k->n_turns = k->done[FULL];
    if (k->n_turns == 0)
        return lab_fail(err, KVD_E_RANGE, "no turn fits the trained context of %lld tokens",
                        (long long)k->l->info.trained_context_tokens);
    choose_budget(k, result);
    rc = converse_within(k, RECOMPUTE, result, err);
    if (!rc && k->l->so.spill_dir && *k->l->so.spill_dir)
        rc = converse_within(k, DISK, result, err);
    else if (!rc)
        lab_note(result, "No disk tier: no folder was given for it.");
    rc = rc ? rc : converse(k, PARKED, err);
    return rc ? rc : converse(k, WINDOW, err);
}

/* ---- the result --------------------------------------------------------------------- */

typedef struct {
    double peak_mb, after_mb, seconds;
    int64_t recomputed, equal, first_different; /* turns, from 1; 0: none */
} summary;

static summary sum_up(const talk *k, int way)
{
    summary s = {0};
    for (int i = 0; i < k->done[way]; i++) {
        const turn *t = turn_of(k, way, i);
        s.peak_mb = (double)t->peak_bytes / 1e6 > s.peak_mb ? (double)t->peak_bytes / 1e6 : s.peak_mb;
        s.after_mb = (double)t->after_bytes / 1e6;
        s.seconds += t->prefill_s + t->decode_s;
        s.recomputed += t->recomputed;
        s.equal += t->equal;
        if (!t->equal && !s.first_different)
            s.first_different = i + 1;
    }
    return s;
}

static void add_methods(const talk *k, json_t *result)
{
    static const lab_column columns[] = {{"way", "way", 0},
                                         {"turns", "turns", 0},
                                         {"budget_mb", "budget, MB", 3},
                                         {"peak_mb", "peak, MB", 3},
                                         {"after_mb", "at rest after the last turn, MB", 3},
                                         {"seconds", "seconds", 2},
                                         {"ratio", "times full", 2},
                                         {"recomputed", "positions recomputed", 0},
                                         {"equal", "turns equal to full's", 0},
                                         {"first_different", "first that differs", 0},
                                         {NULL, NULL, 0}};
    json_t *table = lab_table(result, "ways", "The whole conversation", columns);
    double full_s = sum_up(k, FULL).seconds;
    for (int w = 0; w < N_WAYS; w++) {
        if (!k->done[w])
            continue;
        summary s = sum_up(k, w);
        bool bounded = w == RECOMPUTE || w == DISK;
        bool whole = k->done[w] == k->n_turns;
        lab_row(table, json_pack("[s, i, o, f, f, f, o, I, I, o]", ways[w], k->done[w],
                                 bounded ? json_real((double)k->budget_bytes / 1e6) : json_null(), s.peak_mb, s.after_mb, s.seconds,
                                 whole ? lab_number(s.seconds / full_s) : json_null(), (json_int_t)s.recomputed,
                                 (json_int_t)s.equal, s.first_different ? json_integer(s.first_different) : json_null()));
    }
}

static void add_turns(const talk *k, json_t *result)
{
    static const lab_column columns[] = {{"way", "way", 0},
                                         {"turn", "turn", 0},
                                         {"context", "tokens so far", 0},
                                         {"prompt", "of these fed in the turn", 0},
                                         {"new", "generated in the turn", 0},
                                         {"peak_mb", "context memory, peak MB", 3},
                                         {"after_mb", "at rest, MB", 3},
                                         {"prefill_s", "seconds to the first token", 3},
                                         {"decode_s", "seconds of decoding", 3},
                                         {"seconds", "seconds per turn", 3},
                                         {"recomputed", "positions recomputed", 0},
                                         {"equal", "equal to full's", 0},
                                         {NULL, NULL, 0}};
    json_t *table = lab_table(result, "turns", "Turn by turn", columns);
    for (int w = 0; w < N_WAYS; w++)
        for (int i = 0; i < k->done[w]; i++) {
            const turn *t = turn_of(k, w, i);
            lab_row(table, json_pack("[s, i, I, I, I, f, f, f, f, f, I, b]", ways[w], i + 1, (json_int_t)t->context,
                                     (json_int_t)t->prompt, (json_int_t)t->n_new, (double)t->peak_bytes / 1e6,
                                     (double)t->after_bytes / 1e6, t->prefill_s, t->decode_s, t->prefill_s + t->decode_s,
                                     (json_int_t)t->recomputed, t->equal));
        }
    lab_plot(result, "memory", "Context memory in each turn, at its highest", "lines", "turns", "turn", "peak_mb", "way", NULL, 0);
    lab_plot(result, "latency", "Time of each turn", "lines", "turns", "turn", "seconds", "way", NULL, LAB_LOG_Y);
}

static void add_replies(const talk *k, json_t *result)
{
    static const lab_column columns[] = {{"turn", "turn", 0},
                                         {"question", "question", 0},
                                         {"full", "full and kv-direct", 0},
                                         {"window", "window", 0},
                                         {NULL, NULL, 0}};
    json_t *table = lab_table(result, "replies", "What was said", columns);
    for (int i = 0; i < k->n_turns; i++)
        lab_row(table, json_pack("[i, s, O, O]", i + 1, lab_talk[i], turn_of(k, FULL, i)->text,
                                 i < k->done[WINDOW] ? turn_of(k, WINDOW, i)->text : json_null()));
}

static void report(const talk *k, json_t *result)
{
    add_methods(k, result);
    add_turns(k, result);
    add_replies(k, result);
    lab_note(result, "Times are of one run.");
    lab_note(result, "Equal means: every token and, for kv-direct, the hash of every logit (the receipt).");
    if (k->n_turns < (k->l->quick ? QUICK_TURNS : LAB_TURNS))
        lab_note(result, "The trained context of %lld tokens ends the conversation after turn %d.",
                 (long long)k->l->info.trained_context_tokens, k->n_turns);
    summary w = sum_up(k, WINDOW);
    if (w.first_different)
        lab_note(result, "The window of %lld tokens answers otherwise from turn %lld on; later turns then have other prompts.",
                 (long long)k->window_tokens, (long long)w.first_different);
    if (w.peak_mb > (double)k->budget_bytes / 1e6)
        lab_note(result, "The window's K and V alone would fit the budget: its storage is rounded up to tiles of 64 tokens, and a prompt's "
                         "pass comes on top.");
    for (int way = RECOMPUTE; way <= PARKED; way++) {
        summary s = sum_up(k, way);
        if (s.first_different)
            lab_check_failed(result, "%s is not exactly full: %lld of %d turns are equal, turn %lld is the first that differs.", ways[way],
                             (long long)s.equal, k->done[way], (long long)s.first_different);
    }
}

int lab_multiturn(const lab *l, json_t *result, kvd_error *err)
{
    talk k = {.l = l, .n_new = l->n_new ? l->n_new : l->quick ? QUICK_NEW : N_NEW, .gauge = {.l = l}};
    if (k.n_new < 1 || k.n_new > MOST_NEW)
        return lab_fail(err, KVD_E_RANGE, "%lld tokens a turn are not in 1..%d", (long long)k.n_new, MOST_NEW);
    if (!(k.turns = lab_alloc(N_WAYS * LAB_TURNS, sizeof *k.turns, err)))
        return KVD_E_NOMEM;
    lab_setting(result, "turns", json_integer(l->quick ? QUICK_TURNS : LAB_TURNS));
    lab_setting(result, "new_tokens_per_turn", json_integer(k.n_new));
    lab_setting(result, "system", json_string(lab_talk_system));
    lab_note_chat(l, result);
    int rc = run_all(&k, result, err);
    if (!rc)
        report(&k, result);
    for (int i = 0; i < N_WAYS * LAB_TURNS; i++)
        json_decref(k.turns[i].text);
    free(k.turns);
    return rc;
}
