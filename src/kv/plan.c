#include "base/minmax.h"
#include "kv/plan.h"

static const char *const names[KVD_TIER_COUNT] = {"full", "recompute", "disk"};

const char *kvd__tier_name(kvd_tier t) { return t < KVD_TIER_COUNT ? names[t] : "none"; }

double kvd__median(double *t, int n)
{
    for (int i = 1; i < n; i++)
        for (int k = i; k > 0 && t[k] < t[k - 1]; k--) {
            double swap = t[k];
            t[k] = t[k - 1];
            t[k - 1] = swap;
        }
    return t[n / 2];
}

double kvd__rows_seconds(const kvd_plan_rates *r, int64_t n_rows)
{
    int i = 0;
    if (n_rows <= 0)
        return 0;
    while (i < KVD__RATE_POINTS - 2 && r->rows[i + 1] < n_rows)
        i++;
    /* Past the last point the slope is that of a whole last chunk. */
    if (n_rows >= r->rows[KVD__RATE_POINTS - 1])
        return r->rows_s[KVD__RATE_POINTS - 1] * (double)n_rows / (double)r->rows[KVD__RATE_POINTS - 1];
    double part = (double)(n_rows - r->rows[i]) / (double)(r->rows[i + 1] - r->rows[i]);
    return r->rows_s[i] + part * (r->rows_s[i + 1] - r->rows_s[i]);
}

/* Query-key pairs that local layers spare: the mean over layers of what position n
 * sees, as a part of n. */
static double seen(const kvd_kv_shape *s, double n)
{
    double local = s->window && n > (double)s->window ? (double)s->window : n, l = kvd__kv_layers(s, true);
    return (l * local + (s->n_layers - l) * n) / s->n_layers;
}

static double alone(const kvd_kv_shape *s, const kvd_plan_rates *r, int64_t n) { return r->pair_alone_s * seen(s, (double)n); }

/* Rows of positions [from, to) in chunks, each against all before it. */
static double chunked(const kvd_kv_shape *s, const kvd_plan_rates *r, int64_t from, int64_t to)
{
    double mid = (double)(from + to) / 2;
    return kvd__rows_seconds(r, to - from) + r->pair_chunk_s * (double)(to - from) * seen(s, mid);
}

/* Reading back what queries from position `at` on see of [0, start). */
static double read_seconds(const kvd_kv_shape *s, const kvd_plan_rates *r, const kvd_spill_options *o, int64_t at, int64_t start)
{
    double blocks = 0, segments = 0;
    for (int kind = 0; kind < 2; kind++) {
        int64_t from = kind && at >= s->window ? (at - s->window + 1) / KVD__BLOCK : 0, to = start / KVD__BLOCK;
        if (from >= to)
            continue;
        double layers = kvd__kv_layers(s, kind == 1);
        blocks += layers * (double)(to - from);
        segments += layers * (double)((to - 1) / o->segment_blocks - from / o->segment_blocks + 1);
    }
    if (segments <= 0)
        return 0;
    return r->disk_pass_s + blocks * (double)kvd__kv_block_bytes(s) / r->disk_read_bytes_s + segments * r->disk_segment_s;
}

/* Tokens of which the mean over decode is taken. */
enum { SAMPLES = 9 };

static int64_t sample(int64_t n_prompt, int64_t n_new, int i) { return n_prompt + n_new * i / (SAMPLES - 1); }

static void plan_full(const kvd_kv_shape *s, const kvd_limits *lim, const kvd_plan_rates *r, int64_t n_prompt, int64_t n_new,
                      kvd_plan_of_tier *p)
{
    double t = 0;
    p->need_bytes = kvd__full_bytes(s, n_prompt + n_new);
    p->fits = lim->kv_tokens < 0 && p->need_bytes <= lim->budget_bytes;
    p->resident_tokens = n_prompt + n_new;
    p->prefill_s = chunked(s, r, 0, n_prompt) + r->head_s;
    for (int i = 0; i < SAMPLES; i++)
        t += kvd__rows_seconds(r, 1) + r->head_s + alone(s, r, sample(n_prompt, n_new, i));
    p->decode_tokens_per_s = SAMPLES / t;
}

static void plan_recompute(const kvd_kv_shape *s, const kvd_limits *lim, const kvd_plan_rates *r, int64_t n_prompt, int64_t n_new,
                           kvd_plan_of_tier *p)
{
    double t = 0;
    p->need_bytes = kvd__least_bytes(s, lim, n_prompt + n_new);
    p->fits = !lim->full && p->need_bytes <= lim->budget_bytes;
    if (!p->fits)
        return;
    p->prefill_s = chunked(s, r, 0, n_prompt) + r->head_s;
    for (int i = 0; i < SAMPLES; i++) {
        /* What a session that decodes one by one has dropped by then. */
        int64_t at = sample(n_prompt, n_new, i);
        kvd_pass_plan pass = {0};
        if (kvd__pass_plan(s, lim, at - 1, at - 1, 1, &pass, NULL))
            pass.start = at - 1;
        kvd_pass_plan settled;
        int64_t e = pass.start;
        if (!kvd__pass_plan(s, lim, at - 1, e, 1, &settled, NULL))
            e = settled.recompute;
        t += (e > 0 ? chunked(s, r, 0, e) + kvd__rows_seconds(r, 1) / 8 : kvd__rows_seconds(r, 1)) + r->head_s + alone(s, r, at);
        p->resident_tokens = at - e;
    }
    p->decode_tokens_per_s = SAMPLES / t;
}

static void plan_disk(const kvd_kv_shape *s, const kvd_limits *lim, const kvd_plan_rates *r, const kvd_spill_options *spill,
                      int64_t n_prompt, int64_t n_new, kvd_plan_of_tier *p)
{
    int64_t buffers = kvd__spill_bytes(s, spill), at = 0, start = 0;
    double t = 0, column = (double)kvd__kv_block_bytes(s) * s->n_layers / KVD__BLOCK;
    p->need_bytes = kvd__disk_least_bytes(s, n_prompt + n_new) + buffers;
    p->fits = !lim->full && r->disk_read_bytes_s > 0 && r->disk_write_bytes_s > 0 && p->need_bytes <= lim->budget_bytes;
    if (!p->fits)
        return;
    kvd_limits left = *lim;
    left.budget_bytes = lim->budget_bytes == INT64_MAX ? INT64_MAX : lim->budget_bytes - buffers;
    while (at < n_prompt) { /* piece by piece, as the session will */
        kvd_pass_plan pass;
        if (kvd__disk_plan(s, &left, at, start, n_prompt - at, &pass, NULL))
            break;
        double compute = chunked(s, r, at, at + pass.n_new), read = read_seconds(s, r, spill, at, pass.start);
        p->prefill_s += (compute > read ? compute : read) + (double)(pass.start - start) * column / r->disk_write_bytes_s;
        at += pass.n_new;
        start = pass.start;
    }
    for (int i = 0; i < SAMPLES; i++) {
        at = sample(n_prompt, n_new, i);
        kvd_pass_plan pass;
        if (!kvd__disk_plan(s, &left, at - 1, start, 1, &pass, NULL))
            start = pass.start;
        double compute = kvd__rows_seconds(r, 1) + alone(s, r, at), read = read_seconds(s, r, spill, at, start);
        t += (compute > read ? compute : read) + column / r->disk_write_bytes_s + r->head_s;
        p->resident_tokens = at - start;
    }
    p->decode_tokens_per_s = SAMPLES / t;
}

void kvd__plan_tiers(const kvd_kv_shape *s, const kvd_limits *lim, const kvd_plan_rates *r, const kvd_spill_options *spill,
                     int64_t n_prompt, int64_t n_new, kvd_plan_of_tier plans[KVD_TIER_COUNT])
{
    for (int i = 0; i < KVD_TIER_COUNT; i++)
        plans[i] = (kvd_plan_of_tier){0};
    n_prompt = n_prompt > 0 ? n_prompt : 1;
    plan_full(s, lim, r, n_prompt, n_new, &plans[KVD_TIER_FULL]);
    plan_recompute(s, lim, r, n_prompt, n_new, &plans[KVD_TIER_RECOMPUTE]);
    if (spill)
        plan_disk(s, lim, r, spill, n_prompt, n_new, &plans[KVD_TIER_DISK]);
}

kvd_tier kvd__plan_choose(const kvd_plan_of_tier plans[KVD_TIER_COUNT], int64_t n_new)
{
    kvd_tier best = KVD_TIER_COUNT;
    double least = 0;
    if (plans[KVD_TIER_FULL].fits) /* nothing is evicted, whatever noise says */
        return KVD_TIER_FULL;
    for (int i = KVD_TIER_FULL + 1; i < KVD_TIER_COUNT; i++) {
        if (!plans[i].fits)
            continue;
        double t = plans[i].prefill_s + (double)n_new / plans[i].decode_tokens_per_s;
        if (best == KVD_TIER_COUNT || t < least) {
            best = (kvd_tier)i;
            least = t;
        }
    }
    return best;
}
