#include "gen/disk.h"

#include <string.h>

#include "base/error.h"

bool kvd__disk_wanted(const kvd_session *s)
{
    return s->o.policy == KVD_POLICY_KV_DIRECT && s->evict_to == KVD_EVICT_DISK && !s->disk_off;
}

/* Buffers as large as is useful, but a small part of the budget. */
kvd_spill_options kvd__disk_options(const struct kvd_model *m, const kvd_kv_shape *shape, const char *dir, int64_t n_tokens,
                                    int64_t budget_bytes)
{
    kvd_spill_options o;
    kvd__spill_defaults(&o);
    o.dir = dir;
    int64_t n = n_tokens + n_tokens / 2; /* a chat grows: room for more than asked */
    n = n < m->config.n_ctx ? n : m->config.n_ctx;
    o.max_blocks = (n + KVD__BLOCK - 1) / KVD__BLOCK;
    while (o.segment_blocks > KVD__TILE_BLOCKS && kvd__spill_bytes(shape, &o) > budget_bytes / 6)
        o.segment_blocks /= 2;
    if (kvd__spill_bytes(shape, &o) > budget_bytes / 6) {
        o.n_slots = 3;
        o.write_blocks = 1;
    }
    return o;
}

static kvd_spill_options spill_options(const kvd_session *s, int64_t n_tokens)
{
    return kvd__disk_options(s->m, &s->shape, s->spill_dir, n_tokens, s->m->ledger->budget_bytes);
}

int64_t kvd__disk_spill_bytes(const kvd_session *s, int64_t n_tokens)
{
    kvd_spill_options o = spill_options(s, n_tokens);
    return kvd__spill_bytes(&s->shape, &o);
}

void kvd__disk_off(kvd_session *s, const kvd_error *err)
{
    kvd__spill_destroy(&s->spill);
    s->disk_end = 0;
    s->disk_off = true;
    if (err)
        s->disk_error = *err;
}

void kvd__disk_cut(kvd_session *s, int64_t n)
{
    int64_t end = n / KVD__BLOCK * KVD__BLOCK;
    if (!s->spill || end >= s->disk_end)
        return;
    kvd__spill_drop(s->spill, end / KVD__BLOCK);
    s->disk_end = end;
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

/* From where the session can go on towards more than `at` tokens: at itself if
 * what is not resident is on disk, else where the disk's part ends, else 0. */
static int64_t resume(const kvd_session *s, int64_t at)
{
    const kvd_kv *kv = s->kv;
    bool whole = kv->start % KVD__BLOCK == 0 && kv->start <= s->disk_end && kv->end == at;
    if (whole && (kv->start == 0 || local_covered(s, at, kv->start / KVD__BLOCK)))
        return at;
    int64_t p = (at < s->disk_end ? at : s->disk_end) / KVD__BLOCK * KVD__BLOCK;
    return p > 0 && local_covered(s, p, p / KVD__BLOCK) ? p : 0;
}

/* A spill with room for total tokens. */
static int make_ready(kvd_session *s, int64_t total, kvd_error *err)
{
    int64_t want = total > s->reserve_tokens ? total : s->reserve_tokens;
    if (s->spill && total <= s->spill_tokens)
        return 0;
    kvd__spill_destroy(&s->spill); /* outgrown: begin again */
    s->disk_end = 0;
    kvd_spill_options o = spill_options(s, want);
    int rc = kvd__spill_create(&s->spill, &s->shape, &o, s->m->ledger, err);
    if (!rc)
        s->spill_tokens = o.max_blocks * KVD__BLOCK;
    return rc;
}

int kvd__disk_next(kvd_session *s, int64_t at, int64_t total, kvd_pass_plan *plan, kvd_error *err)
{
    int rc = make_ready(s, total, err);
    if (rc)
        return rc;
    int64_t from = resume(s, at);
    kvd_limits lim = kvd__session_limits(s);
    if (from < at) /* what is resident will be dropped */
        return kvd__disk_plan(&s->shape, &lim, from, from, total - from, plan, err);
    return kvd__disk_plan(&s->shape, &lim, at, s->kv->start, total - at, plan, err);
}

static const char *get_block(void *ctx, int layer, int64_t block)
{
    return kvd__kv_block(ctx, layer, block);
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
        int rc = first < to ? kvd__spill_write_layer(s->spill, l, first, to, get_block, kv, err) : 0;
        if (rc)
            return rc;
    }
    s->disk_end = plan->start;
    return 0;
}
