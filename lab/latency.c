/* Recomputing keys and values against reading them (5.8, Fig. 7), for N tokens at once.
 *
 * Recomputing, twice:
 *   residuals at hand  K and V of all layers from the residuals entering each of them,
 *                      layer by layer: what the paper's accounting counts. It supposes
 *                      that the residual of *every* layer is there, which is more bytes
 *                      than K and V themselves wherever d > 2 n_kv d_head.
 *   in the pass        as this engine does it: N evicted positions ride along in the
 *                      pass of the next token, from their ids, through all that a layer
 *                      does. Its time is that of the pass less the same pass with
 *                      everything resident.
 * Reading the same bytes of K and V (in the session's KV type): lab/reading.h.
 *
 * Samples of all kinds and sizes take turns, round by round, so that what disturbs the
 * machine disturbs them alike; each figure is the median of the rounds, with its
 * quartiles.
 *
 * What to expect without measuring: K and V of a token at a layer cost 4 n_kv d_head d
 * operations and are 2 n_kv d_head b bytes, which is 2 d / b operations for each byte,
 * or d at two bytes a value. Recomputing is faster than reading where the processor does
 * d operations in the time in which a byte arrives. */
#include "lab/reading.h"
#include "lab/runs.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const int64_t sizes[] = {1, 2, 5, 10, 20, 50, 100, 200, 500};
enum { N_SIZES = sizeof sizes / sizeof sizes[0], MAX_ROUNDS = 15, QUICK_ROUNDS = 5 };
static const double least_sample_s = 1e-3, least_passes_s = 10e-3; /* passes are taken from each other */

/* What is measured: the readings first. */
enum { RECOMPUTE = LAB_N_READINGS, PASS, RESIDENT, N_MEASURED, ADDED = N_MEASURED, N_KINDS };

static const char *name_of(int kind)
{
    static const char *const names[] = {"residuals at hand", "pass with N evicted", "pass with all resident", "in the pass"};
    return kind < LAB_N_READINGS ? lab_reading_name((lab_reading)kind) : names[kind - LAB_N_READINGS];
}

typedef struct {
    double median, low, high; /* seconds, quartiles */
    int n;                    /* samples; 0: not measured */
} timing;

typedef struct {
    const lab *l;
    int64_t n_layers, d, n_kv, n_rows; /* n_kv = n_kv_heads*d_head; rows of residuals and positions at most */
    int64_t kv_bytes;                  /* of K and V of a token, all layers */
    int32_t *ids;                      /* [n_rows + 1] */
    float *residuals;                  /* [n_layers][n_rows][d] */
    float *k_read, *v_read;            /* [n_layers][n_rows][n_kv]: what attention reads */
    float *k, *v;                      /* [n_rows][n_kv]: rebuilt */
    int64_t *positions;                /* [n_rows] */
    int64_t turn;                      /* of recomputing: which rows are next */
    bool equal;                        /* rebuilt rows are the bits that attention reads */
    kvd_session *resident, *evicted;   /* policy full; kv-direct that keeps nothing */
    lab_reader *reader;
    int n_sizes;
    int64_t n[N_SIZES];
    double samples[N_SIZES][N_KINDS][MAX_ROUNDS];
    timing times[N_SIZES][N_KINDS];
} rig;

/* ---- set-up ---------------------------------------------------------------------- */

static void on_residual(void *ctx, int layer, int64_t pos, float *h)
{
    rig *g = ctx;
    if (layer < g->n_layers)
        memcpy(g->residuals + (layer * g->n_rows + pos) * g->d, h, (size_t)g->d * sizeof *h);
}

static void on_read(void *ctx, int layer, int64_t pos, const float *k, const float *v)
{
    rig *g = ctx;
    int64_t at = (layer * g->n_rows + pos) * g->n_kv;
    memcpy(g->k_read + at, k, (size_t)g->n_kv * sizeof *k);
    memcpy(g->v_read + at, v, (size_t)g->n_kv * sizeof *v);
}

static int recompute(rig *g, int64_t layer, int64_t row, int64_t n, kvd_error *err)
{
    return kvd_lab_reconstruct_rows(g->resident, (int)layer, n, g->positions + row,
                                    g->residuals + (layer * g->n_rows + row) * g->d, g->k, g->v, err);
}

/* The residuals of a text, and whether K and V come out of them with the bits they have
 * in the cache: otherwise the times would be of something else. */
static int capture(rig *g, kvd_error *err)
{
    kvd_lab_set_taps(g->resident, &(kvd_lab_taps){.ctx = g, .residual = on_residual, .kv_read = on_read});
    int rc = kvd_session_feed(g->resident, g->ids, g->n_rows, NULL, err);
    kvd_lab_set_taps(g->resident, NULL);
    rc = rc ? rc : kvd_session_rewind(g->resident, 0, err);
    g->equal = true;
    size_t bytes = (size_t)(g->n_rows * g->n_kv) * sizeof(float);
    for (int64_t layer = 0; !rc && layer < g->n_layers; layer++) {
        int64_t at = layer * g->n_rows * g->n_kv;
        rc = recompute(g, layer, 0, g->n_rows, err);
        g->equal &= !rc && !memcmp(g->k, g->k_read + at, bytes) && !memcmp(g->v, g->v_read + at, bytes);
    }
    return rc;
}

static int make_sessions(rig *g, kvd_error *err)
{
    kvd_session_options so = g->l->so;
    so.evict_to = KVD_EVICT_RECOMPUTE;
    so.spill_dir = NULL;
    so.policy = KVD_POLICY_FULL;
    so.kv_tokens = -1;
    int rc = kvd_session_create(&g->resident, g->l->m, &so, err);
    so.policy = KVD_POLICY_KV_DIRECT;
    so.kv_tokens = 0;
    rc = rc ? rc : kvd_session_create(&g->evicted, g->l->m, &so, err);
    if (!rc) {
        lab_watch(g->l, g->resident);
        lab_watch(g->l, g->evicted);
    }
    return rc;
}

static void free_rig(rig *g)
{
    void *all[] = {g->ids, g->residuals, g->k_read, g->v_read, g->k, g->v, g->positions};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        free(all[i]);
    kvd_session_free(&g->resident);
    kvd_session_free(&g->evicted);
    lab_reader_free(&g->reader);
}

static int make_rig(rig *g, const lab *l, json_t *result, kvd_error *err)
{
    const kvd_model_info *info = &l->info;
    *g = (rig){.l = l, .n_layers = info->n_layers, .d = info->d_model, .n_kv = info->n_kv_heads * info->d_head};
    int64_t most = info->trained_context_tokens - 1;
    for (int i = 0; i < N_SIZES; i++)
        if (sizes[i] <= most)
            g->n[g->n_sizes++] = sizes[i];
    if (!g->n_sizes)
        return lab_fail(err, KVD_E_UNSUPPORTED, "the trained context is one token");
    g->n_rows = g->n[g->n_sizes - 1];
    kvd_plan plan;
    kvd_plan_session(l->m, &l->so, 1, g->n_rows, 0, &plan);
    g->kv_bytes = plan.kv_bytes_per_token;
    int rc = lab_prompts(l, result, 1, g->n_rows + 1, &g->ids, err);
    if (rc)
        return rc;
    g->residuals = lab_alloc(g->n_layers * g->n_rows * g->d, sizeof(float), err);
    g->k_read = lab_alloc(g->n_layers * g->n_rows * g->n_kv, sizeof(float), err);
    g->v_read = lab_alloc(g->n_layers * g->n_rows * g->n_kv, sizeof(float), err);
    g->k = lab_alloc(g->n_rows * g->n_kv, sizeof(float), err);
    g->v = lab_alloc(g->n_rows * g->n_kv, sizeof(float), err);
    g->positions = lab_alloc(g->n_rows, sizeof *g->positions, err);
    if (!g->residuals || !g->k_read || !g->v_read || !g->k || !g->v || !g->positions)
        return KVD_E_NOMEM;
    for (int64_t i = 0; i < g->n_rows; i++)
        g->positions[i] = i;
    if ((rc = make_sessions(g, err)) || (rc = capture(g, err)))
        return rc;
    free(g->k_read);
    free(g->v_read);
    g->k_read = g->v_read = NULL;
    return lab_reader_create(&g->reader, g->n_rows * g->kv_bytes, info->n_threads, l->so.spill_dir, err);
}

/* ---- samples --------------------------------------------------------------------- */

/* N rows of all layers, from other rows every time, so that a small N does not find its
 * residuals in the cache. */
static int time_recompute(rig *g, int64_t n, double *seconds, kvd_error *err)
{
    int rc = 0;
    int64_t reps = 0;
    double t0 = lab_seconds(), t = 0;
    while (!rc && t < least_sample_s) {
        int64_t row = g->turn++ % (g->n_rows / n) * n;
        for (int64_t layer = 0; !rc && layer < g->n_layers; layer++)
            rc = recompute(g, layer, row, n, err);
        reps++;
        t = lab_seconds() - t0;
    }
    *seconds = t / (double)reps;
    return rc;
}

/* The pass of token N after N others, which the session has. */
static int time_pass(kvd_session *s, const int32_t *ids, int64_t n, double *seconds, kvd_error *err)
{
    int rc = 0;
    int64_t reps = 0;
    double t = 0;
    while (!rc && t < least_passes_s) {
        double t0 = lab_seconds();
        rc = kvd_session_feed(s, ids + n, 1, NULL, err);
        t += lab_seconds() - t0;
        reps++;
        rc = rc ? rc : kvd_session_rewind(s, n, err);
    }
    *seconds = t / (double)reps;
    return rc;
}

static int sample(rig *g, int kind, int64_t n, double *seconds, kvd_error *err)
{
    switch (kind) {
    case RECOMPUTE: return time_recompute(g, n, seconds, err);
    case PASS: return time_pass(g->evicted, g->ids, n, seconds, err);
    case RESIDENT: return time_pass(g->resident, g->ids, n, seconds, err);
    default: return lab_reader_time(g->reader, (lab_reading)kind, n * g->kv_bytes, seconds, err);
    }
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static timing timing_of(double *s, int n)
{
    qsort(s, (size_t)n, sizeof *s, ascending);
    return (timing){.median = 0.5 * (s[(n - 1) / 2] + s[n / 2]), .low = s[n / 4], .high = s[n - 1 - n / 4], .n = n};
}

static bool measured(const rig *g, int kind)
{
    return kind != LAB_DISK || !lab_reader_no_disk(g->reader);
}

/* Bring a session to n tokens. */
static int bring_to(kvd_session *s, const int32_t *ids, int64_t n, kvd_error *err)
{
    int64_t have = kvd_session_tokens(s, NULL);
    return n > have ? kvd_session_feed(s, ids + have, n - have, NULL, err) : kvd_session_rewind(s, n, err);
}

/* One sample of each kind and size; the largest size first, since going back in a
 * session is free and going on is not. round < 0: to warm up. */
static int measure_round(rig *g, int round, int rounds, kvd_error *err)
{
    int rc = 0;
    for (int i = g->n_sizes - 1; !rc && i >= 0; i--) {
        rc = lab_tick(g->l, "latency: rounds", (round + 2) * g->n_sizes - 1 - i, (rounds + 1) * g->n_sizes, err);
        rc = rc ? rc : bring_to(g->resident, g->ids, g->n[i], err);
        rc = rc ? rc : bring_to(g->evicted, g->ids, g->n[i], err);
        double last[N_KINDS] = {0};
        for (int kind = 0; !rc && kind < N_MEASURED; kind++)
            rc = measured(g, kind) ? sample(g, kind, g->n[i], &last[kind], err) : 0;
        last[ADDED] = last[PASS] - last[RESIDENT]; /* of neighbours in time */
        for (int kind = 0; round >= 0 && kind < N_KINDS; kind++)
            g->samples[i][kind][round] = last[kind];
    }
    return rc;
}

static int measure(rig *g, int rounds, kvd_error *err)
{
    int rc = 0;
    for (int round = -1; !rc && round < rounds; round++)
        rc = measure_round(g, round, rounds, err);
    for (int i = 0; !rc && i < g->n_sizes; i++)
        for (int kind = 0; kind < N_KINDS; kind++)
            if (measured(g, kind))
                g->times[i][kind] = timing_of(g->samples[i][kind], rounds);
    return rc;
}

/* ---- tables ---------------------------------------------------------------------- */

/* Recomputing over reading; method RECOMPUTE or ADDED. NaN: not measured, or a
 * difference lost in the noise. */
static double ratio(const rig *g, int i, int method, int reading)
{
    const timing *r = &g->times[i][reading];
    double t = g->times[i][method].median;
    return r->n && t > 0 ? t / r->median : (double)NAN;
}

/* The bandwidth that does the same: of a reading what it is, of recomputing where it
 * breaks even. */
static double mb_s(const rig *g, int i, int kind)
{
    double t = g->times[i][kind].median;
    return t > 0 ? 1e-6 * (double)(g->n[i] * g->kv_bytes) / t : (double)NAN;
}

static void times_table(const rig *g, json_t *result)
{
    static const lab_column columns[] = {
        {"tokens", "tokens", 0}, {"what", "what", 0}, {"ms", "ms, median", 4}, {"low", "ms, lower quartile", 4},
        {"high", "ms, upper quartile", 4}, {"rounds", "rounds", 0}, {"mb_s", "MB/s of K and V", 0}, {NULL, NULL, 0}};
    json_t *t = lab_table(result, "times", "Times for K and V of N tokens, all layers", columns);
    json_t *passes = lab_table(result, "passes", "Passes of one new token: \"in the pass\" is the difference", columns);
    for (int kind = 0; kind < N_KINDS; kind++)
        for (int i = 0; i < g->n_sizes; i++) {
            const timing *x = &g->times[i][kind];
            bool pass = kind == PASS || kind == RESIDENT;
            if (x->n)
                lab_row(pass ? passes : t, json_pack("[I, s, f, f, f, i, o]", (json_int_t)g->n[i], name_of(kind), 1e3 * x->median,
                                                     1e3 * x->low, 1e3 * x->high, x->n, pass ? json_null() : lab_number(mb_s(g, i, kind))));
        }
    lab_plot(result, "times", "Time for K and V of N tokens, ms", "lines", "times", "tokens", "ms", "what", NULL, LAB_LOG_X | LAB_LOG_Y);
}

static void ratios_table(const rig *g, json_t *result)
{
    static const lab_column columns[] = {
        {"tokens", "tokens", 0}, {"reading", "read from", 0}, {"at_hand", "residuals at hand / reading", 2},
        {"in_pass", "in the pass / reading", 2}, {NULL, NULL, 0}};
    json_t *t = lab_table(result, "ratios", "Recomputing over reading (below 1: recomputing is faster)", columns);
    for (int reading = 0; reading < LAB_N_READINGS; reading++)
        for (int i = 0; i < g->n_sizes; i++)
            if (g->times[i][reading].n)
                lab_row(t, json_pack("[I, s, o, o]", (json_int_t)g->n[i], name_of(reading), lab_number(ratio(g, i, RECOMPUTE, reading)),
                                     lab_number(ratio(g, i, ADDED, reading))));
    lab_plot(result, "ratios-at-hand", "Recomputing from residuals at hand over reading", "lines", "ratios", "tokens", "at_hand", "reading",
             NULL, LAB_LOG_X | LAB_LOG_Y);
    lab_plot(result, "ratios-in-pass", "Recomputing in the pass over reading", "lines", "ratios", "tokens", "in_pass", "reading", NULL,
             LAB_LOG_X | LAB_LOG_Y);
}

static void break_even_table(const rig *g, json_t *result)
{
    static const lab_column columns[] = {
        {"tokens", "tokens", 0}, {"kv_kb", "K and V, KB", 1}, {"residuals_kb", "residuals of all layers, KB", 1},
        {"at_hand_ms", "residuals at hand, ms", 4}, {"in_pass_ms", "in the pass, ms", 4}, {"at_hand", "break-even, residuals at hand, MB/s", 1},
        {"in_pass", "break-even, in the pass, MB/s", 1}, {NULL, NULL, 0}};
    json_t *t = lab_table(result, "break_even", "Below which bandwidth recomputing is faster than reading", columns);
    for (int i = 0; i < g->n_sizes; i++)
        lab_row(t, json_pack("[I, f, f, f, f, o, o]", (json_int_t)g->n[i], 1e-3 * (double)(g->n[i] * g->kv_bytes),
                             4e-3 * (double)(g->n[i] * g->n_layers * g->d), 1e3 * g->times[i][RECOMPUTE].median, 1e3 * g->times[i][ADDED].median,
                             lab_number(mb_s(g, i, RECOMPUTE)), lab_number(mb_s(g, i, ADDED))));
    lab_plot(result, "break-even", "Break-even bandwidth in the pass, MB/s", "lines", "break_even", "tokens", "in_pass", NULL, NULL, LAB_LOG_X);
}

/* ---- the paper ------------------------------------------------------------------- */

/* The paper's cost of recomputing over its bytes per token. */
static double operations_per_byte(const rig *g)
{
    return 4 * (double)(g->n_layers * g->n_kv * g->d) / (double)g->kv_bytes;
}

static void describe(const rig *g, json_t *result, int rounds)
{
    lab_setting(result, "rounds", json_integer(rounds));
    lab_setting(result, "kv_bytes_per_token", json_integer(g->kv_bytes));
    lab_setting(result, "cold_buffer_bytes", json_integer(lab_reader_arena_bytes(g->reader)));
    lab_setting(result, "same_bits", json_boolean(g->equal));
    if (g->equal)
        lab_note(result, "K and V rebuilt from the residuals are the bits that attention reads, at every layer and position measured.");
    else
        lab_check_failed(result, "K and V rebuilt from the residuals are not the bits that attention reads.");
    lab_note(result, "Rebuilding a byte of K and V takes %.0f operations (4 n_kv d_head d for 2 n_kv d_head values), whatever N is. It is "
                     "faster than reading the byte where a processor does that many in the time in which one arrives: at 20 GB/s, %.0f "
                     "TFLOP/s.", operations_per_byte(g), 0.02 * operations_per_byte(g));
    lab_note(result, "Residuals at hand: the residual entering every layer is there, in f32. Held for N tokens they are larger than K and V "
                     "themselves (%lld against %lld bytes a token), so nothing is saved; the paper keeps one residual a token, from which only "
                     "one layer's K and V follow by a product.", (long long)(4 * g->n_layers * g->d), (long long)g->kv_bytes);
    lab_note(result, "In the pass: a pass that rebuilds N evicted positions from their ids, less the same pass with everything resident "
                     "(the median of the rounds' differences).");
    lab_note(result, "Reading and recomputing use the same threads (%d); the rated streams are copied by one, as pieces come in by the clock.",
             g->l->info.n_threads);
    double spread = 1;
    for (int kind = 0; kind < ADDED; kind++) {
        const timing *x = &g->times[g->n_sizes - 1][kind];
        if (x->n && x->high > spread * x->low)
            spread = x->high / x->low;
    }
    if (spread > 1.5)
        lab_note(result, "The machine was not calm: at N = %lld the quartiles of a time are up to a factor of %.1f apart.",
                 (long long)g->n_rows, spread);
    const char *why = lab_reader_no_disk(g->reader);
    if (why)
        lab_note(result, "The disk was not measured: %s.", why);
    else
        lab_note(result, "The disk is read %s; what a host or a drive caches below that is not seen.",
                 lab_reader_direct(g->reader) ? "with O_DIRECT" : "after dropping its pages from the cache");
}

int lab_latency(const lab *l, json_t *result, kvd_error *err)
{
    rig *g = lab_alloc(1, sizeof *g, err);
    if (!g)
        return KVD_E_NOMEM;
    int rounds = l->quick ? QUICK_ROUNDS : MAX_ROUNDS;
    int rc = make_rig(g, l, result, err);
    rc = rc ? rc : measure(g, rounds, err);
    if (!rc) {
        break_even_table(g, result);
        ratios_table(g, result);
        times_table(g, result);
        describe(g, result, rounds);
    }
    free_rig(g);
    free(g);
    return rc;
}
