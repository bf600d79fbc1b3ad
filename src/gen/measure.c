/* Calibration behind the public API: what model/calibrate.c measures of passes and
 * attention, what choosing a token costs besides, and the disk.
 *
 * The disk is measured where it is used: by passes of one row over a file that holds
 * made-up blocks of this model's shapes. A plain read of the file would say too much,
 * for the threads that read compete with those that compute, and each segment costs
 * a turn of all of them, which small segments (a small budget) pay more often. And
 * what a pass does before its first segment is there and after its last hides behind
 * no reading. So two files with segments of the largest and the smallest size that
 * sessions use are read, the first also in part, and from the three times come
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

/* So much is written and read at most, and for so long; a slow disk is known sooner. */
enum { DISK_BYTES = 24 << 20 };
#define WRITE_SECONDS 0.2
#define READ_SECONDS 0.25

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

/* A file with blocks in it, column by column. False: there is no disk to be had. */
static bool open_disk(disk *d, const char *dir, int64_t segment_blocks)
{
    const kvd_kv_shape *shape = d->shape;
    int64_t block = kvd__kv_block_bytes(shape), most = (d->m->config.n_ctx - 1) / KVD__BLOCK;
    kvd_spill_options o;
    d->own = kvd__ledger_create(0, NULL);
    kvd__spill_defaults(&o);
    o.dir = dir;
    o.segment_blocks = segment_blocks;
    o.max_blocks = DISK_BYTES / (block * shape->n_layers) + 4;
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

/* What a pass moved, and how long it took. */
typedef struct {
    double seconds, bytes, segments;
} moved;

/* The median of a few passes: less than that would promise a calm machine. */
static bool measure_reads(disk *d, int64_t n_blocks, int64_t segment_blocks, moved *x)
{
    enum { MOST = 9 };
    double t[MOST], total = 0;
    int n = 0;
    kvd_spill_stats before, after;
    kvd__spill_stats(d->sp, &before);
    while (n < MOST && (n < 3 || total < READ_SECONDS)) {
        if (!disk_pass(d, n_blocks, &t[n]))
            return false;
        total += t[n++];
    }
    kvd__spill_stats(d->sp, &after);
    *x = (moved){.seconds = kvd__median(t, n), .bytes = (double)(after.read_bytes - before.read_bytes) / n};
    for (int l = 0; l < d->shape->n_layers; l++) {
        int64_t from = kvd__first_seen(&d->m->config, l, n_blocks * KVD__BLOCK) / KVD__BLOCK / segment_blocks;
        x->segments += (double)((n_blocks + segment_blocks - 1) / segment_blocks - from);
    }
    return true;
}

/* A folder that does not serve gives rates of 0, not an error: there is no disk tier. */
static void measure_disk(kvd_model *m, const kvd_kv_shape *shape, kvd_kvtype stream_type, const char *dir, kvd_rates *r)
{
    const int64_t segment_blocks[2] = {kvd__disk_largest_segment(shape), KVD__TILE_BLOCKS};
    moved x[2], part = {0};
    double write = 0;
    for (int i = 0; i < 2; i++) {
        disk d = {.m = m, .shape = shape, .stream_type = stream_type};
        bool ok = open_disk(&d, dir, segment_blocks[i]) && measure_reads(&d, d.n, segment_blocks[i], &x[i]);
        if (ok && i == 0) {
            int64_t few = d.n / 2 / segment_blocks[0] * segment_blocks[0];
            few = few ? few : segment_blocks[0] <= d.n * 3 / 4 ? segment_blocks[0] : 0;
            write = (double)(d.n * kvd__kv_block_bytes(shape) * shape->n_layers) / d.write_s;
            ok = few == 0 || measure_reads(&d, few, segment_blocks[0], &part);
        }
        close_disk(&d);
        if (!ok)
            return;
    }
    /* seconds = base + bytes * b + segments * a, three times. Noise may say otherwise, but
     * a base is no less than nothing and no more than half, a segment costs no less than
     * nothing, and bytes a good part of the time. */
    double base = 0;
    if (part.bytes > 0 && part.bytes < x[0].bytes)
        base = x[0].seconds - x[0].bytes * (x[0].seconds - part.seconds) / (x[0].bytes - part.bytes);
    base = base < 0 ? 0 : base > x[0].seconds / 2 ? x[0].seconds / 2 : base;
    double large = x[0].seconds - base, small = x[1].seconds - base, per_byte = large / x[0].bytes;
    double wider = x[1].segments / x[1].bytes - x[0].segments / x[0].bytes;
    double a = wider > 0 ? (small / x[1].bytes - per_byte) / wider : 0, most = 0.75 * large / x[0].segments;
    a = a < 0 ? 0 : a > most ? most : a;
    r->disk_pass_s = base > r->head_s ? base - r->head_s : 0; /* the head is counted apart */
    r->disk_segment_s = a;
    r->disk_read_bytes_s = x[0].bytes / (large - a * x[0].segments);
    r->disk_write_bytes_s = write;
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
