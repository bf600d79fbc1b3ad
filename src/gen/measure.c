/* Calibration behind the public API: what model/calibrate.c measures of passes and
 * attention, what choosing a token costs besides, and the disk.
 *
 * The disk is measured where it is used: by passes of one row over a file that holds
 * made-up blocks of this model's shapes. A plain read of the file would say too much,
 * for the threads that read compete with those that compute, and each segment costs
 * a turn of all of them, which small segments (a small budget) pay more often. And
 * what a pass does before its first segment is there and after its last hides behind
 * no reading. So two files with segments of the largest and the smallest size that
 * sessions use are read in turn, the first also in part, and from the three times come
 *
 *   time of a pass = base + bytes / rate + segments * cost of a segment
 *
 * Writing is measured as decoding does it, a column at a time. */
#include "base/clock.h"
#include "base/error.h"
#include "base/fpenv.h"
#include "base/rng.h"
#include "gen/disk.h"
#include "gen/receipt.h"
#include "gen/sampler.h"
#include "model/steps.h"

/* So much is written at most, and for so long; a slow disk is known sooner, and where there
 * is no room for it a part of it will do. */
enum { DISK_BYTES = 24 << 20, LEAST_BYTES = 3 << 20, MOST_ROUNDS = 24 };
#define WRITE_SECONDS 0.2
#define READ_SECONDS 0.8

/* ---- the disk --------------------------------------------------------------------- */

typedef struct {
    kvd_model *m;
    const kvd_kv_shape *shape;
    kvd_kvtype stream_type;
    kvd_ledger *own; /* calibration is not the budget's */
    kvd_spill *sp;
    kvd_kv *kv;
    int32_t *ids;
    char *block;
    int64_t n; /* blocks of each layer that were written */
    double write_s;
} disk;

/* Any numbers that are finite in each type; not zeros, which disks know how to store
 * for nothing. */
static char *make_block(kvd_ledger *l, int64_t bytes)
{
    char *p = kvd__alloc(l, KVD_ACC_COMPUTE, (size_t)bytes, NULL);
    uint64_t x = 1;
    for (int64_t i = 0; p && i < bytes; i++)
        p[i] = (char)(kvd__splitmix64(&x) & 0x3f);
    return p;
}

static const char *same_block(void *ctx, int layer, int64_t block)
{
    (void)layer, (void)block;
    return ctx;
}

static void close_disk(disk *d)
{
    kvd__kv_destroy(&d->kv);
    kvd__spill_destroy(&d->sp);
    kvd__free(d->ids);
    kvd__free(d->block);
    kvd__ledger_destroy(&d->own);
}

/* A file of so many bytes of blocks, column by column. False: there is no disk to be had. */
static bool open_disk(disk *d, const char *dir, int64_t bytes, int64_t segment_blocks)
{
    const kvd_kv_shape *shape = d->shape;
    int64_t block = kvd__kv_block_bytes(shape), most = (d->m->config.n_ctx - 1) / KVD__BLOCK;
    kvd_spill_options o;
    d->own = kvd__ledger_create(0, NULL);
    kvd__spill_defaults(&o);
    o.dir = dir;
    o.segment_blocks = segment_blocks;
    o.max_blocks = bytes / (block * shape->n_layers) + 4;
    o.max_blocks = o.max_blocks < most ? o.max_blocks : most;
    if (!d->own || !(d->block = make_block(d->own, block)) ||
        !(d->ids = kvd__alloc_array(d->own, KVD_ACC_HOST, (size_t)(o.max_blocks * KVD__BLOCK + 1), sizeof *d->ids, NULL)) ||
        kvd__kv_create(&d->kv, shape, d->own, NULL) || kvd__spill_create(&d->sp, shape, &o, d->own, NULL))
        return false;
    double t0 = kvd__seconds();
    while (d->n < o.max_blocks && (d->n < 2 || kvd__seconds() - t0 < WRITE_SECONDS)) {
        if (kvd__spill_write(d->sp, d->n, d->n + 1, same_block, d->block, NULL))
            return false;
        d->n++;
    }
    d->write_s = kvd__seconds() - t0;
    return d->n > 0;
}

/* A pass of one row behind the first n_blocks of what was written. */
static bool disk_pass(disk *d, int64_t n_blocks, double *seconds)
{
    int64_t n = n_blocks * KVD__BLOCK;
    kvd_pass_plan plan;
    kvd__disk_cost(d->shape, n + 1, n, 1, n, &plan);
    kvd__kv_reset(d->kv, n);
    if (kvd__kv_begin(d->kv, &plan, NULL))
        return false;
    void *stream = kvd__alloc(d->own, KVD_ACC_STREAM, (size_t)plan.stream_bytes, NULL);
    kvd_span span = {.kv = d->kv, .ids = d->ids, .n_before = n, .n_new = 1, .n_logits = 1, .spill = d->sp, .disk_blocks = n_blocks};
    kvd_pass pass = {.spans = &span, .n_spans = 1, .stream = stream, .stream_type = d->stream_type};
    double t0 = kvd__seconds();
    int rc = stream ? kvd__model_pass(d->m, &pass, NULL) : KVD_E_NOMEM;
    *seconds = kvd__seconds() - t0;
    kvd__free(stream);
    kvd__kv_end(d->kv, &plan, false);
    return !rc;
}

/* A kind of pass: its file, how much of it is read, what that moves, and how long it took. */
typedef struct {
    disk *d;
    int64_t n_blocks; /* 0: there is no such pass */
    double bytes, segments;
    double seconds;
} reading;

static bool prepare(reading *x, disk *d, int64_t n_blocks, int64_t segment_blocks)
{
    double seconds;
    kvd_spill_stats before, after;
    *x = (reading){.d = d, .n_blocks = n_blocks};
    if (n_blocks == 0)
        return true;
    for (int l = 0; l < d->shape->n_layers; l++) {
        int64_t from = kvd__first_seen(&d->m->config, l, n_blocks * KVD__BLOCK) / KVD__BLOCK / segment_blocks;
        x->segments += (double)((n_blocks + segment_blocks - 1) / segment_blocks - from);
    }
    kvd__spill_stats(d->sp, &before);
    if (!disk_pass(d, n_blocks, &seconds)) /* not counted: the first one wakes disk and threads */
        return false;
    kvd__spill_stats(d->sp, &after);
    x->bytes = (double)(after.read_bytes - before.read_bytes);
    return true;
}

/* Each kind in turn, so that all see the same ups and downs of the disk. The mean, since
 * a session will see the slow passes too. */
static bool measure_reads(reading *x, int n_kinds)
{
    int n = 0;
    for (double t, t0 = kvd__seconds(); n < 3 || (n < MOST_ROUNDS && kvd__seconds() - t0 < READ_SECONDS); n++)
        for (int i = 0; i < n_kinds; i++) {
            if (x[i].n_blocks && !disk_pass(x[i].d, x[i].n_blocks, &t))
                return false;
            x[i].seconds += x[i].n_blocks ? t : 0;
        }
    for (int i = 0; i < n_kinds; i++)
        x[i].seconds /= n;
    return true;
}

/* seconds = base + bytes * b + segments * a, of three kinds. Noise may say otherwise, but
 * a base is no less than nothing and no more than half, a segment costs no less than
 * nothing, and bytes a good part of the time. */
static void solve(const reading *x, kvd_rates *r)
{
    const reading *large = &x[0], *small = &x[1], *part = &x[2];
    double base = 0;
    if (part->bytes > 0 && part->bytes < large->bytes)
        base = large->seconds - large->bytes * (large->seconds - part->seconds) / (large->bytes - part->bytes);
    base = base < 0 ? 0 : base > large->seconds / 2 ? large->seconds / 2 : base;
    double large_s = large->seconds - base, small_s = small->seconds - base, per_byte = large_s / large->bytes;
    double wider = small->segments / small->bytes - large->segments / large->bytes;
    double a = wider > 0 ? (small_s / small->bytes - per_byte) / wider : 0, most = 0.75 * large_s / large->segments;
    a = a < 0 ? 0 : a > most ? most : a;
    r->disk_pass_s = base > r->head_s ? base - r->head_s : 0; /* the head is counted apart */
    r->disk_segment_s = a;
    r->disk_read_bytes_s = large->bytes / (large_s - a * large->segments);
}

static bool measure_files(disk *large, disk *small, const char *dir, int64_t bytes, kvd_rates *r)
{
    const int64_t most = kvd__disk_largest_segment(large->shape), least = KVD__TILE_BLOCKS;
    reading kinds[3];
    if (!open_disk(large, dir, bytes, most) || !open_disk(small, dir, bytes, least))
        return false;
    int64_t part = large->n / 2 / most * most;
    part = part ? part : most <= large->n * 3 / 4 ? most : 0;
    if (!prepare(&kinds[0], large, large->n, most) || !prepare(&kinds[1], small, small->n, least) || !prepare(&kinds[2], large, part, most) ||
        !measure_reads(kinds, 3))
        return false;
    solve(kinds, r);
    r->disk_write_bytes_s = (double)((large->n + small->n) * kvd__kv_block_bytes(large->shape) * large->shape->n_layers) / (large->write_s + small->write_s);
    return true;
}

/* A folder that does not serve gives rates of 0, not an error: there is no disk tier. */
static void measure_disk(kvd_model *m, const kvd_kv_shape *shape, kvd_kvtype stream_type, const char *dir, kvd_rates *r)
{
    bool done = false;
    for (int64_t bytes = DISK_BYTES; !done && bytes >= LEAST_BYTES; bytes /= 2) {
        disk large = {.m = m, .shape = shape, .stream_type = stream_type}, small = large;
        done = measure_files(&large, &small, dir, bytes, r);
        close_disk(&large);
        close_disk(&small);
    }
}

/* ---- all of it ------------------------------------------------------------------------ */

/* Choosing a token and hashing its logits, once a token: greedy, as is the default. */
static int choice_seconds(kvd_model *m, const kvd_session_options *o, double *out, kvd_error *err)
{
    kvd_session *s = NULL;
    kvd_sampling greedy;
    kvd_session_options plain = *o;
    kvd_sampling_defaults(&greedy);
    plain.evict_to = KVD_EVICT_RECOMPUTE;
    int rc = kvd_session_create(&s, m, &plain, err);
    if (rc)
        return rc;
    kvd_receipt *receipt = kvd__receipt_begin(s, err);
    if (receipt) {
        char hex[33];
        for (int i = 0; i < 3; i++) {
            double t0 = kvd__seconds();
            int32_t id = kvd__sample(&greedy, s->logits, m->config.n_vocab, NULL, 0, s->candidates);
            kvd__receipt_add(receipt, id, s->logits, m->config.n_vocab);
            t0 = kvd__seconds() - t0;
            *out = i == 0 || t0 < *out ? t0 : *out;
        }
        kvd__receipt_end(&receipt, hex);
    } else
        rc = KVD_E_NOMEM;
    kvd_session_free(&s);
    return rc;
}

int kvd_calibrate(kvd_model *m, const kvd_session_options *options, kvd_rates *rates, kvd_error *err)
{
    kvd_session_options o;
    kvd_session_options_defaults(&o);
    if (options)
        o = *options;
    if (!m->has_weights)
        return kvd__fail(err, KVD_E_ARG, "the model was loaded without weights");
    kvd_rates r = {0};
    kvd_kvtype type = kvd__kvtype_of(o.kv_type);
    double choice_s = 0;
    int rc = kvd__model_claim(m, err);
    if (rc)
        return rc;
    kvd_fpenv env = kvd__fpenv_enter();
    rc = kvd__calibrate(m, type, (kvd_plan_rates *)(void *)&r, err);
    if (!rc)
        rc = choice_seconds(m, &o, &choice_s, err);
    if (!rc && o.spill_dir) {
        kvd_kv_shape shape;
        kvd__model_kv_shape(m, type, kvd__kvtype_of(o.stream), &shape);
        measure_disk(m, &shape, kvd__kvtype_of(o.stream), o.spill_dir, &r);
    }
    kvd__fpenv_leave(env);
    kvd__model_release(m);
    if (rc)
        return rc;
    r.head_s += choice_s;
    *rates = r;
    return 0;
}
