#include "base/minmax.h"
#include "gen/disk.h"

#include <string.h>

#include "base/error.h"

bool kvd__disk_wanted(const kvd_session *s)
{
    return s->o.policy == KVD_POLICY_KV_DIRECT && s->evict_to == KVD_EVICT_DISK && !s->disk_off;
}

/* The size of segments (docs/memory.md). A segment costs about as much time as so many
 * more bytes of it, so large ones read faster; but their ring takes room from blocks,
 * which are then read in every pass. The file grows in steps of 256 tokens. */
enum { SEGMENT_COST_BYTES = 56 << 10, SEGMENT_BYTES = 512 << 10, GROW_BLOCKS = 16 };

int64_t kvd__disk_largest_segment(const kvd_kv_shape *s)
{
    int64_t blocks = KVD__TILE_BLOCKS;
    while (2 * blocks * kvd__spill_record_bytes(s) <= SEGMENT_BYTES)
        blocks *= 2;
    return blocks;
}

/* Bytes that reading in these segments is worth, when `evicted` would be read without any
 * buffers. */
static double read_bytes(const kvd_kv_shape *s, const kvd_spill_options *o, int64_t record, int64_t evicted)
{
    return (double)(evicted + kvd__spill_bytes(s, o)) * (1 + (double)SEGMENT_COST_BYTES / (double)(o->segment_blocks * record));
}

kvd_spill_options kvd__disk_options(const struct kvd_model *m, const kvd_kv_shape *shape, const char *dir, int64_t n_tokens,
                                    int64_t budget_bytes)
{
    kvd_spill_options o;
    kvd__spill_defaults(&o);
    o.dir = dir;
    /* A chat grows: room for more than asked, and whole tiles, so that it can. */
    int64_t column = kvd__kv_block_bytes(shape) * shape->n_layers, record = kvd__spill_record_bytes(shape), step = GROW_BLOCKS;
    o.max_blocks = kvd__min64((kvd__blocks(n_tokens + n_tokens / 2) / step + 1) * step, kvd__blocks(m->config.n_ctx));
    /* What is left lets a piece of a prompt have 32 tokens. */
    int64_t most = budget_bytes - kvd__disk_least_bytes(shape, n_tokens) - 2 * (column + KVD__BLOCK * shape->stream_row_bytes);
    int64_t full = kvd__full_bytes(shape, n_tokens), evicted = full > budget_bytes ? full - budget_bytes : full;
    kvd_spill_options best = o;
    best.segment_blocks = o.segment_blocks = KVD__TILE_BLOCKS;
    if (kvd__spill_bytes(shape, &o) > most) {
        best.n_slots = 3;
        best.write_blocks = 1;
        return best;
    }
    int64_t largest = kvd__disk_largest_segment(shape);
    while ((o.segment_blocks *= 2) <= largest && kvd__spill_bytes(shape, &o) <= most)
        if (read_bytes(shape, &o, record, evicted) < read_bytes(shape, &best, record, evicted))
            best = o;
    return best;
}

int64_t kvd__disk_need(const struct kvd_model *m, const kvd_kv_shape *shape, int64_t n_tokens)
{
    if (n_tokens < 1)
        return 0;
    kvd_spill_options smallest = kvd__disk_options(m, shape, NULL, n_tokens, 0);
    return kvd__disk_least_bytes(shape, n_tokens) + kvd__spill_bytes(shape, &smallest);
}

int64_t kvd__disk_least(const struct kvd_model *m, const kvd_kv_shape *shape, const kvd_limits *lim, int64_t n_tokens)
{
    int64_t disk = kvd__disk_need(m, shape, n_tokens);
    return lim->kv_tokens < 0 ? kvd__min64(kvd__full_bytes(shape, n_tokens), disk) : disk;
}

typedef struct {
    const struct kvd_model *m;
    const kvd_kv_shape *shape;
    const kvd_limits *lim;
} limited;

static int64_t least_of(const void *ctx, int64_t n)
{
    const limited *x = ctx;
    return kvd__disk_least(x->m, x->shape, x->lim, n);
}

int64_t kvd__disk_max_tokens(const struct kvd_model *m, const kvd_kv_shape *shape, const kvd_limits *lim)
{
    return kvd__longest(least_of, &(limited){m, shape, lim}, lim->budget_bytes, m->config.n_ctx);
}

void kvd__disk_add_stats(const kvd_session *s, kvd_session_stats *st)
{
    kvd_spill_stats d;
    if (!s->spill)
        return;
    kvd__spill_stats(s->spill, &d);
    st->disk_read_bytes += d.read_bytes;
    st->disk_written_bytes += d.written_bytes;
    st->disk_wait_s += 1e-9 * (double)d.wait_ns;
}

void kvd__disk_drop(kvd_session *s)
{
    kvd__disk_add_stats(s, &s->stats);
    kvd__spill_destroy(&s->spill);
    s->spill_bytes = s->spill_tokens = s->disk_end = 0;
}

void kvd__disk_off(kvd_session *s, const kvd_error *err)
{
    kvd__disk_drop(s);
    s->disk_off = true;
    if (err)
        s->disk_error = *err;
}

void kvd__disk_cut(kvd_session *s, int64_t n)
{
    int64_t end = n / KVD__BLOCK * KVD__BLOCK;
    if (!s->spill)
        return;
    kvd__spill_drop(s->spill, end / KVD__BLOCK); /* also past disk_end: a file may hold more than is counted on */
    s->disk_end = kvd__min64(s->disk_end, end);
}

/* Is what local layers read at position p, below block end, on disk? */
static bool local_covered(const kvd_session *s, int64_t p, int64_t end)
{
    const kvd_config *c = &s->m->config;
    int64_t from = (p >= c->window ? p - c->window + 1 : 0) / KVD__BLOCK;
    for (int l = 0; c->window && l < c->n_layers; l++)
        for (int64_t b = from; c->local[l] && b < end; b++)
            if (!kvd__spill_has_layer(s->spill, l, b))
                return false;
    return true;
}

/* From where the session can go on, with [0, *start) on disk: from kv->end if what is
 * not resident is there, else from where the disk's part ends, else from 0. */
static int64_t resume(const kvd_session *s, int64_t *start)
{
    const kvd_kv *kv = s->kv;
    *start = kv->start;
    bool whole = kv->start % KVD__BLOCK == 0 && kv->start <= s->disk_end;
    if (whole && (kv->start == 0 || local_covered(s, kv->end, kv->start / KVD__BLOCK)))
        return kv->end;
    int64_t p = kvd__min64(kv->end, s->disk_end) / KVD__BLOCK * KVD__BLOCK;
    return *start = p > 0 && local_covered(s, p, p / KVD__BLOCK) ? p : 0;
}

/* What is resident may fill the budget. The oldest blocks are to be written, so it is
 * the newest ones that make room, and are made again. */
static void make_room(kvd_session *s, int64_t bytes)
{
    while (kvd__ledger_room(s->m->ledger) < bytes && s->kv->end > s->kv->start)
        kvd__kv_truncate(s->kv, (s->kv->end - 1) / KVD__BLOCK * KVD__BLOCK);
}

/* Let the spill grow to the size of o. 1: it can not with buffers as large as it has,
 * and nothing is changed. */
static int grow(kvd_session *s, const kvd_spill_options *o, int64_t room, kvd_error *err)
{
    int64_t more = o->max_blocks - s->spill_tokens / KVD__BLOCK, bytes = more * kvd__spill_bytes_per_block(&s->shape);
    if (more < 1 || bytes > room)
        return 1;
    make_room(s, bytes);
    int rc = kvd__spill_grow(s->spill, o->max_blocks, err);
    if (rc)
        return rc == KVD_E_RANGE ? 1 : rc;
    s->spill_tokens = o->max_blocks * KVD__BLOCK;
    s->spill_bytes += bytes;
    return 0;
}

/* A spill with room for total tokens, that leaves room for what they need besides. */
static int make_ready(kvd_session *s, const kvd_limits *lim, int64_t total, kvd_error *err)
{
    int64_t budget = lim->budget_bytes, least = kvd__disk_least_bytes(&s->shape, total);
    if (s->spill && !kvd__spill_is_ours(s->spill)) /* after fork: one of our own */
        kvd__disk_drop(s);
    if (s->spill && total <= s->spill_tokens && least <= budget - s->spill_bytes)
        return 0;
    int64_t need = kvd__disk_need(s->m, &s->shape, total), want = total;
    if (need > budget) {
        int rc = kvd__fail(err, KVD_E_BUDGET, "context memory: %lld tokens with the rest on disk need %lld bytes, the budget is %lld",
                           (long long)total, (long long)need, (long long)budget);
        if (err)
            err->need_bytes = need;
        return rc;
    }
    if (s->reserve_tokens > total && kvd__disk_need(s->m, &s->shape, s->reserve_tokens) <= budget)
        want = s->reserve_tokens;
    kvd_spill_options o = kvd__disk_options(s->m, &s->shape, s->spill_dir, want, budget);
    int64_t bytes = kvd__spill_bytes(&s->shape, &o);
    int rc = s->spill && total > s->spill_tokens ? grow(s, &o, budget - s->spill_bytes - kvd__disk_least_bytes(&s->shape, want), err) : 1;
    if (rc != 1)
        return rc;
    kvd__disk_drop(s); /* other buffers: begin again */
    o.ops = s->spill_ops;
    o.ops_ctx = s->spill_ops_ctx;
    make_room(s, bytes);
    if (!s->disk_block && !(s->disk_block = kvd__alloc(s->m->ledger, KVD_ACC_COMPUTE, (size_t)s->kv->block_bytes, err)))
        return KVD_E_NOMEM;
    rc = kvd__spill_create(&s->spill, &s->shape, &o, s->m->ledger, err);
    if (!rc) {
        s->spill_tokens = o.max_blocks * KVD__BLOCK;
        s->spill_bytes = bytes;
    }
    return rc;
}

int kvd__disk_next(kvd_session *s, const kvd_limits *lim, int64_t total, kvd_pass_plan *plan, kvd_error *err)
{
    int rc = make_ready(s, lim, total, err);
    if (rc)
        return rc;
    kvd_limits left = *lim;
    if (left.budget_bytes != INT64_MAX)
        left.budget_bytes -= s->spill_bytes;
    int64_t start, from = resume(s, &start);
    return kvd__disk_plan(&s->shape, &left, from, start, total - from, plan, err);
}

/* A layer's block in one piece: as the file and the layer scratch have it. */
static const char *get_block(void *ctx, int layer, int64_t block)
{
    kvd_session *s = ctx;
    size_t half = (size_t)s->kv->head_bytes / 2;
    for (int head = 0; head < s->shape.n_kv_heads; head++) {
        char *k, *v, *to = s->disk_block + head * s->kv->head_bytes;
        kvd__kv_find(s->kv, layer, block, head, &k, &v);
        memcpy(to, k, half);
        memcpy(to + half, v, half);
    }
    return s->disk_block;
}

int kvd__disk_write(kvd_session *s, const kvd_pass_plan *plan, kvd_error *err)
{
    kvd_kv *kv = s->kv;
    int64_t from = kv->start / KVD__BLOCK, to = plan->start / KVD__BLOCK, local = kv->local_start / KVD__BLOCK;
    if (plan->start <= kv->start)
        return 0;
    for (int l = 0; l < s->shape.n_layers; l++) {
        /* What left a local layer's window is read by nobody any more. */
        int64_t first = s->shape.local[l] && local > from ? local : from;
        int rc = first < to ? kvd__spill_write_layer(s->spill, l, first, to, get_block, s, err) : 0;
        if (rc)
            return rc;
    }
    if (plan->start > s->disk_end)
        s->disk_end = plan->start;
    return 0;
}
