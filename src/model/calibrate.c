/* Calibration: the rates that the planner works with, measured on this machine
 * with this model's own shapes and formats, in a second or two. Passes run without
 * resident blocks over a few hundred rows; what they take does not grow with any
 * context and is not the budget's, so it has a ledger of its own. */
#include <string.h>

#include "base/clock.h"
#include "kv/plan.h"
#include "model/pass.h"
#include "model/steps.h"

/* Seconds of a pass over n new rows of an empty session that keeps nothing. */
static int pass_seconds(struct kvd_model *m, const kvd_kv_shape *s, int64_t n, int64_t n_logits, double *out, kvd_error *err)
{
    kvd_pass_plan plan;
    kvd_kv *kv = NULL;
    kvd__pass_cost(s, 0, 0, n, n, &plan);
    kvd_ledger *own = kvd__ledger_create(0, err);
    if (!own)
        return KVD_E_NOMEM;
    int32_t *ids = kvd__alloc_array(m->ledger, KVD_ACC_HOST, (size_t)n, sizeof *ids, err);
    void *stream = kvd__alloc(m->ledger, KVD_ACC_COMPUTE, (size_t)plan.stream_bytes, err);
    int rc = !ids || !stream ? KVD_E_NOMEM : kvd__kv_create(&kv, s, own, err);
    if (!rc && !(rc = kvd__kv_begin(kv, &plan, err))) {
        kvd_span span = {.kv = kv, .ids = ids, .n_new = n, .n_logits = n_logits};
        kvd_pass pass = {.spans = &span, .n_spans = 1, .stream = stream, .stream_type = KVD_KV_F32};
        for (int64_t i = 0; i < n; i++)
            ids[i] = (int32_t)(i * 7919 % m->config.n_vocab);
        double t0 = kvd__seconds();
        rc = kvd__model_pass(m, &pass, err);
        *out = kvd__seconds() - t0;
        kvd__kv_end(kv, &plan, false);
    }
    kvd__kv_destroy(&kv);
    kvd__ledger_destroy(&own);
    kvd__free(stream);
    kvd__free(ids);
    return rc;
}

/* The median of a few runs: on a busy machine the least would promise a calm one. */
static int typical_seconds(struct kvd_model *m, const kvd_kv_shape *s, int64_t n, int64_t n_logits, double *out, kvd_error *err)
{
    enum { MOST = 9 };
    double t[MOST], total = 0;
    int i = 0;
    while (i < MOST && (i < 3 || total < 0.1) && !(i && total > 1)) {
        int rc = pass_seconds(m, s, n, n_logits, &t[i], err);
        if (rc)
            return rc;
        total += t[i++];
    }
    *out = kvd__median(t, i);
    return 0;
}

/* Attention of one row, the steps of the pass itself over a made-up cache that is
 * resident and too large for the processor's. Some milliseconds a round. */
enum { ALONE_ROUNDS = 9 };

typedef struct {
    struct kvd_model *m;
    kvd_run run;
    double seconds[ALONE_ROUNDS];
} alone;

static void alone_job(void *ctx, int tid, int n_threads)
{
    alone *j = ctx;
    struct kvd_model *m = j->m;
    kvd_worker w = {.run = &j->run, .m = m, .c = &m->config, .k = &m->kern, .s = &m->scratch, .lane = &m->scratch.lanes[tid],
                    .tid = tid, .n_threads = n_threads};
    for (int round = 0; round < ALONE_ROUNDS; round++) {
        double t0 = kvd__seconds();
        for (int l = 0; l < m->config.n_layers; l++) {
            kvd_chunk ch = {.layer = l, .n = 1};
            if (tid == 0)
                atomic_store(&j->run.next_unit, 0);
            kvd__barrier(&w);
            kvd__attention(&w, &ch);
            kvd__barrier(&w);
        }
        if (tid == 0)
            j->seconds[round] = kvd__seconds() - t0;
    }
}

static int alone_seconds(struct kvd_model *m, const kvd_kv_shape *s, double *out, kvd_error *err)
{
    const kvd_config *c = &m->config;
    int64_t n = ((int64_t)48 << 20) / (kvd__kv_block_bytes(s) / KVD__BLOCK * c->n_layers);
    n = n < 1 ? 1 : n < c->n_ctx ? n : c->n_ctx - 1;
    kvd_kv *kv = NULL;
    kvd_pass_plan plan;
    kvd__pass_cost(s, 0, 0, n + 1, 0, &plan);
    kvd_ledger *own = kvd__ledger_create(0, err);
    if (!own)
        return KVD_E_NOMEM;
    int32_t *ids = kvd__alloc_array(own, KVD_ACC_HOST, (size_t)n + 1, sizeof *ids, err);
    int rc = ids ? kvd__kv_create(&kv, s, own, err) : KVD_E_NOMEM;
    if (!rc && !(rc = kvd__kv_begin(kv, &plan, err))) {
        double seen = 0;
        for (int l = 0; l < c->n_layers; l++) {
            int64_t from = kvd__first_seen(c, l, n) / KVD__TILE * KVD__TILE_BLOCKS;
            seen += (double)(n + 1 - kvd__first_seen(c, l, n)) / c->n_layers;
            for (int64_t b = from; b < kvd__blocks(n + 1); b++)
                for (int head = 0; head < c->n_kv_heads; head++) {
                    memset(kvd__kv_k(kv, l, b, head), 0x11, (size_t)kv->head_bytes / 2);
                    memset(kvd__kv_v(kv, l, b, head), 0x11, (size_t)kv->head_bytes / 2);
                }
        }
        kvd_span span = {.kv = kv, .ids = ids, .n_before = n, .n_new = 1};
        kvd_pass pass = {.spans = &span, .n_spans = 1};
        alone j = {.m = m, .run = {.m = m, .p = &pass, .n_rows = 1}};
        memset(m->scratch.qkv, 0, (size_t)m->scratch.ld_qkv * sizeof(float));
        kvd__pool_run(m->pool, alone_job, &j);
        *out = kvd__median(j.seconds, ALONE_ROUNDS) / seen;
        kvd__kv_end(kv, &plan, false);
    }
    kvd__kv_destroy(&kv);
    kvd__free(ids);
    kvd__ledger_destroy(&own);
    return rc;
}

/* Attention tiles of many rows over made-up blocks. */
typedef struct {
    struct kvd_model *m;
    kvd_kvtype kv_type;
    char *blocks;
    int64_t n_tiles, tile_bytes;
    int n_rows;
    double best_s; /* of a thread's tile, on thread 0 */
} tiles;

static void tiles_job(void *ctx, int tid, int n_threads)
{
    tiles *j = ctx;
    const kvd_config *c = &j->m->config;
    kvd_scratch *s = &j->m->scratch;
    kvd_lane *lane = &s->lanes[tid];
    int group = c->n_heads / c->n_kv_heads;
    kvd_attn_tile t = {.kvtype = j->kv_type, .d_head = c->d_head, .scale = c->attn_scale, .n_rows = j->n_rows, .n_heads = group,
                       .q = s->qkv, .ld_q = s->ld_qkv, .lo = lane->lo, .hi = lane->hi};
    for (int i = 0; i < j->n_rows; i++) {
        lane->lo[i] = 0;
        lane->hi[i] = KVD__TILE;
    }
    for (int round = 0; round < 3; round++) {
        kvd__pool_barrier(j->m->pool);
        double t0 = kvd__seconds();
        for (int64_t tile = tid; tile < j->n_tiles; tile += n_threads) {
            const char *k = j->blocks + tile * j->tile_bytes, *v = k + j->tile_bytes / 2;
            for (int b = 0; b < KVD__TILE_BLOCKS; b++) {
                t.k[b] = k + b * (j->tile_bytes / 8);
                t.v[b] = v + b * (j->tile_bytes / 8);
            }
            for (int i = 0; i < j->n_rows * group; i++)
                lane->M[i] = -__builtin_inff();
            j->m->kern.attn_tile(&t, lane->M, lane->L, lane->O, lane->attn);
        }
        kvd__pool_barrier(j->m->pool);
        double d = (kvd__seconds() - t0) / (double)j->n_tiles;
        if (tid == 0 && (round == 0 || d < j->best_s))
            j->best_s = d;
    }
}

static int pair_seconds(struct kvd_model *m, kvd_kvtype kv_type, int n_rows, double *out, kvd_error *err)
{
    const kvd_config *c = &m->config;
    tiles j = {.m = m, .kv_type = kv_type, .n_rows = n_rows};
    j.tile_bytes = (int64_t)2 * KVD__TILE * c->d_head * kvd__kvtype_bytes(kv_type);
    j.n_tiles = ((int64_t)6 << 20) / j.tile_bytes;
    j.blocks = kvd__alloc(m->ledger, KVD_ACC_COMPUTE, (size_t)(j.n_tiles * j.tile_bytes), err);
    if (!j.blocks)
        return KVD_E_NOMEM;
    memset(j.blocks, 0x11, (size_t)(j.n_tiles * j.tile_bytes));
    memset(m->scratch.qkv, 0, (size_t)n_rows * (size_t)m->scratch.ld_qkv * sizeof(float));
    kvd__pool_run(m->pool, tiles_job, &j);
    kvd__free(j.blocks);
    *out = j.best_s / KVD__TILE / n_rows * c->n_kv_heads * c->n_layers;
    return 0;
}

/* Attention aside. On small models the estimate of it may eat the measurement; more
 * rows take no less time. */
static void rows_alone(kvd_plan_rates *r, int i)
{
    double n = (double)r->rows[i], t = r->rows_s[i], least = i && r->rows_s[i - 1] > t / 4 ? r->rows_s[i - 1] : t / 4;
    t -= r->pair_chunk_s * n * n / 2;
    r->rows_s[i] = t > least ? t : least;
}

/* One row, without and with the head: most of what decoding takes, and bound by memory,
 * whose bandwidth others share and which changes within tenths of a second. So it is
 * measured at several times, unless it takes long enough to have seen that. */
enum { VISITS = 3 };
#define LONG_SECONDS 0.05

typedef struct {
    double bare[VISITS], with_head[VISITS];
    int n;
} one_row;

static int visit(struct kvd_model *m, const kvd_kv_shape *s, one_row *one, kvd_error *err)
{
    if (one->n && (one->n == VISITS || one->bare[0] > LONG_SECONDS))
        return 0;
    int rc = typical_seconds(m, s, 1, 0, &one->bare[one->n], err);
    rc = rc ? rc : typical_seconds(m, s, 1, 1, &one->with_head[one->n], err);
    one->n += !rc;
    return rc;
}

int kvd__calibrate(struct kvd_model *m, kvd_kvtype kv_type, kvd_plan_rates *r, kvd_error *err)
{
    static const int64_t points[KVD__RATE_POINTS] = {1, 4, 16, 64, 256};
    kvd_kv_shape s;
    one_row one = {.n = 0};
    int chunk = m->scratch.chunk < KVD__UNIT_ROWS ? m->scratch.chunk : KVD__UNIT_ROWS;
    kvd__model_kv_shape(m, kv_type, KVD_KV_F32, &s);
    int rc = kvd__pool_check(m->pool, err);
    rc = rc ? rc : visit(m, &s, &one, err);
    rc = rc ? rc : alone_seconds(m, &s, &r->pair_alone_s, err);
    rc = rc ? rc : pair_seconds(m, kv_type, chunk, &r->pair_chunk_s, err);
    for (int i = 0; !rc && i < KVD__RATE_POINTS; i++) {
        r->rows[i] = points[i];
        if (i > 1 && r->rows_s[i - 1] > 0.3) /* a large model: more rows cost in proportion */
            r->rows_s[i] = r->rows_s[i - 1] * (double)points[i] / (double)points[i - 1];
        else if (i)
            rc = typical_seconds(m, &s, points[i], 0, &r->rows_s[i], err);
        if (!rc && i % 2)
            rc = visit(m, &s, &one, err);
    }
    if (rc)
        return rc;
    r->rows_s[0] = kvd__median(one.bare, one.n);
    double with_head = kvd__median(one.with_head, one.n);
    for (int i = 0; i < KVD__RATE_POINTS; i++)
        rows_alone(r, i);
    r->head_s = with_head > r->rows_s[0] ? with_head - r->rows_s[0] : 0;
    return 0;
}
