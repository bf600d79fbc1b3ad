/* Generation with a cache, without one, and from scratch (paper: 5.2, Table 3).
 *
 * Three ways to the same tokens, greedily:
 *
 *   cached        K and V of everything stay (policy full)
 *   kv-direct     none stay (kv_tokens 0): each pass recomputes all of them, through
 *                 the engine's own path, in which evicted positions ride along
 *   from scratch  an empty session is fed the whole sequence for every new token
 *
 * The paper compares the first with the last and says "the same logit values"; here
 * the logits of every step are compared bit for bit. Times hold the whole run, prompt
 * included; making a session is in none of them. End tokens are ordinary ones here, or
 * a model that stops early would be compared over fewer steps. */
#include "lab/runs.h"

#include <stdlib.h>

#include "lab/texts.h"

enum { N_NEW = 30, MOST_NEW = 256, N_WAYS = 3 };

static const char *const ways[N_WAYS] = {"cached", "kv-direct", "from scratch"};

typedef struct {
    const lab *l;
    int32_t *prompt;
    int64_t n_prompt, n;
    int way; /* the one that runs */
    lab_gauge gauge[N_WAYS];
    lab_trace trace[N_WAYS]; /* logits of the first only */
    int64_t same_bits[N_WAYS], recomputed[N_WAYS];
} generation;

static int step(void *ctx, int64_t t, const float *logits, int32_t token, kvd_error *err)
{
    generation *g = ctx;
    int rc = lab_trace_step(&g->trace[g->way], t, logits, token, err);
    double begun = lab_seconds();
    g->same_bits[g->way] += lab_trace_same(&g->trace[0], t, logits);
    g->trace[g->way].begun += lab_seconds() - begun;
    return rc ? rc : lab_tick(g->l, ways[g->way], t + 1, g->n, err);
}

/* The sequence grows by the run's own tokens, not by the cached run's. */
static int from_scratch(generation *g, kvd_session *s, kvd_error *err)
{
    int32_t *ids = lab_alloc(g->n_prompt + g->n, sizeof *ids, err);
    if (!ids)
        return KVD_E_NOMEM;
    for (int64_t i = 0; i < g->n_prompt; i++)
        ids[i] = g->prompt[i];
    const float *logits;
    int rc = 0;
    for (int64_t t = 0; !rc && t < g->n; t++) {
        rc = kvd_session_rewind(s, 0, err);
        rc = rc ? rc : kvd_session_feed(s, ids, g->n_prompt + t, &logits, err);
        if (rc)
            break;
        ids[g->n_prompt + t] = lab_argmax(logits, g->l->info.n_vocab);
        rc = step(g, t, logits, ids[g->n_prompt + t], err);
    }
    free(ids);
    return rc;
}

static int run_way(generation *g, int way, kvd_error *err)
{
    kvd_session_options o = g->l->so;
    kvd_session *s = NULL;
    o.policy = way == 1 ? KVD_POLICY_KV_DIRECT : KVD_POLICY_FULL;
    o.positions = KVD_POSITIONS_ORIGINAL;
    o.evict_to = KVD_EVICT_RECOMPUTE;
    o.kv_tokens = way == 1 ? 0 : -1;
    g->way = way;
    int rc = lab_trace_make(&g->trace[way], g->n, g->l->info.n_vocab, way == 0 ? LAB_KEEP_LOGITS : LAB_KEEP_TOKENS, err);
    rc = rc ? rc : kvd_session_create(&s, g->l->m, &o, err);
    if (rc)
        return rc;
    g->gauge[way].l = g->l;
    lab_gauge_watch(&g->gauge[way], s);
    g->trace[way].begun = lab_seconds();
    rc = way == 2 ? from_scratch(g, s, err) : lab_decode(g->l, s, g->prompt, g->n_prompt, NULL, g->n, step, g, err);
    kvd_session_stats st;
    kvd_session_get_stats(s, &st);
    g->recomputed[way] = st.recomputed_tokens;
    kvd_session_free(&s);
    return rc;
}

static double total_seconds(const generation *g, int way)
{
    return g->trace[way].seconds[g->n - 1];
}

static int64_t equal_tokens(const generation *g, int way)
{
    int64_t n = 0;
    for (int64_t t = 0; t < g->n; t++)
        n += g->trace[way].tokens[t] == g->trace[0].tokens[t];
    return n;
}

static void add_tables(const generation *g, json_t *result)
{
    static const lab_column columns[] = {{"way", "way", 0},
                                         {"tokens", "new tokens", 0},
                                         {"equal_tokens", "equal to cached", 0},
                                         {"equal_bits", "steps with equal logit bits", 0},
                                         {"seconds", "seconds", 3},
                                         {"first_s", "of these, the first token", 3},
                                         {"ratio", "times cached", 2},
                                         {"recomputed", "positions recomputed", 0},
                                         {"peak_mb", "context memory, peak MB", 3},
                                         {NULL, NULL, 0}};
    static const lab_column steps[] = {{"way", "way", 0}, {"context", "tokens before", 0}, {"ms", "ms per new token", 3}, {NULL, NULL, 0}};
    json_t *table = lab_table(result, "generation", "Greedy generation", columns);
    for (int w = 0; w < N_WAYS; w++)
        lab_row(table, json_pack("[s, I, I, I, f, f, f, I, f]", ways[w], (json_int_t)g->n, (json_int_t)equal_tokens(g, w),
                                 (json_int_t)g->same_bits[w], total_seconds(g, w), g->trace[w].seconds[0],
                                 total_seconds(g, w) / total_seconds(g, 0), (json_int_t)g->recomputed[w],
                                 (double)g->gauge[w].peak_bytes / 1e6));
    table = lab_table(result, "steps", "Time of each new token", steps);
    for (int w = 0; w < N_WAYS; w++)
        for (int64_t t = 1; t < g->n; t++)
            lab_row(table, json_pack("[s, I, f]", ways[w], (json_int_t)(g->n_prompt + t),
                                     1e3 * (g->trace[w].seconds[t] - g->trace[w].seconds[t - 1])));
    lab_plot(result, "steps", "Time per new token", "lines", "steps", "context", "ms", "way", NULL, 0);
}

static void add_text(const generation *g, json_t *result)
{
    char text[4096];
    size_t n = 0;
    for (int64_t t = 0; t < g->n; t++) {
        size_t len;
        const char *p = kvd_token_text(g->l->m, g->trace[0].tokens[t], true, &len);
        if (n + len > sizeof text)
            break;
        for (size_t i = 0; i < len; i++)
            text[n++] = p[i];
    }
    lab_setting(result, "text", lab_text(text, n));
}

int lab_generation(const lab *l, json_t *result, kvd_error *err)
{
    generation g = {.l = l, .n = l->n_new ? l->n_new : N_NEW};
    if (g.n < 2 || g.n > MOST_NEW)
        return lab_fail(err, KVD_E_RANGE, "%lld new tokens are not in 2..%d", (long long)g.n, MOST_NEW);
    int rc = lab_chat_open(l, NULL, lab_generation_prompt, &g.prompt, &g.n_prompt, err);
    if (rc)
        return rc;
    lab_setting(result, "prompt", json_string(lab_generation_prompt));
    lab_setting(result, "prompt_tokens", json_integer(g.n_prompt));
    lab_setting(result, "new_tokens", json_integer(g.n));
    lab_note_chat(l, result);
    lab_note(result, "Times are of one run of each way.");
    for (int w = 0; !rc && w < N_WAYS; w++)
        rc = run_way(&g, w, err);
    if (!rc) {
        add_tables(&g, result);
        add_text(&g, result);
        for (int w = 1; w < N_WAYS; w++)
            if (equal_tokens(&g, w) != g.n || g.same_bits[w] != g.n)
                lab_check_failed(result, "%s is not exactly the cached run: %lld of %lld tokens, %lld of %lld logits are equal.", ways[w],
                                 (long long)equal_tokens(&g, w), (long long)g.n, (long long)g.same_bits[w], (long long)g.n);
    }
    for (int w = 0; w < N_WAYS; w++)
        lab_trace_free(&g.trace[w]);
    kvd_ids_free(g.prompt);
    return rc;
}
