#include "kv/kv.h"

#include <string.h>

#include "base/error.h"

int kvd__kv_create(kvd_kv **out, const kvd_kv_shape *s, kvd_ledger *l, kvd_error *err)
{
    kvd_kv *kv = kvd__alloc(l, KVD_ACC_HOST, sizeof *kv, err);
    if (!kv)
        return KVD_E_NOMEM;
    kv->shape = *s;
    kv->ledger = l;
    kv->block_bytes = kvd__kv_block_bytes(s);
    kv->head_bytes = kv->block_bytes / s->n_kv_heads;
    kv->extent_blocks = l->budget_bytes / (kv->block_bytes * s->n_layers) >= KVD__EXTENT_COLUMNS ? KVD__TILE_BLOCKS : 1;
    int32_t n[2] = {0, 0};
    for (int i = 0; i < s->n_layers; i++)
        kv->index[i] = n[s->local[i]]++;
    *out = kv;
    return 0;
}

void kvd__kv_destroy(kvd_kv **pkv)
{
    kvd_kv *kv = *pkv;
    *pkv = NULL;
    if (!kv)
        return;
    kvd__kv_clear(kv);
    kvd__free(kv->column[0]);
    kvd__free(kv->column[1]);
    kvd__free(kv);
}

static int64_t column_bytes(const kvd_kv *kv, int kind)
{
    return kv->block_bytes * kvd__kv_layers(&kv->shape, kind == 1);
}

/* Where the mapping begins that block b shares, or NULL. */
static char *extent_of(const kvd_kv *kv, int kind, int64_t b)
{
    int64_t first = b / kv->extent_blocks * kv->extent_blocks;
    for (int64_t i = first; i < first + kv->extent_blocks && i < kv->n_slots; i++)
        if (kv->column[kind][i])
            return kv->column[kind][i] - (i - first) * (kv->head_bytes / 2);
    return NULL;
}

/* Drop one column that is there. The last one of an extent takes it along. */
static void drop_column(kvd_kv *kv, int kind, int64_t b)
{
    char *c = kv->column[kind][b], *extent = extent_of(kv, kind, b);
    kv->column[kind][b] = NULL;
    if (kv->extent_blocks == 1) {
        kvd__free(c);
        return;
    }
    kvd__uncharge(kv->ledger, KVD_ACC_KV, column_bytes(kv, kind));
    if (!extent_of(kv, kind, b))
        kvd__unmap(extent, (size_t)(kv->extent_blocks * column_bytes(kv, kind)));
}

static void drop(kvd_kv *kv, int kind, int64_t from, int64_t to)
{
    for (int64_t b = from; kv->column[kind] && b < to && b < kv->n_slots; b++)
        if (kv->column[kind][b])
            drop_column(kv, kind, b);
}

static int keep_column(kvd_kv *kv, int kind, int64_t b, kvd_error *err)
{
    int64_t bytes = column_bytes(kv, kind);
    if (kv->extent_blocks == 1) {
        kv->column[kind][b] = kvd__alloc(kv->ledger, KVD_ACC_KV, (size_t)bytes, err);
        return kv->column[kind][b] ? 0 : err->code;
    }
    char *extent = extent_of(kv, kind, b);
    if (kvd__charge(kv->ledger, KVD_ACC_KV, bytes, err))
        return err->code;
    if (!extent && !(extent = kvd__map(kv->ledger, KVD_ACC_KV, (size_t)(kv->extent_blocks * bytes), err))) {
        kvd__uncharge(kv->ledger, KVD_ACC_KV, bytes);
        return err->code;
    }
    kv->column[kind][b] = extent + b % kv->extent_blocks * (kv->head_bytes / 2);
    return 0;
}

static int keep(kvd_kv *kv, int kind, int64_t from, int64_t to, kvd_error *err)
{
    for (int64_t b = from; b < to && kvd__kv_layers(&kv->shape, kind == 1); b++)
        if (!kv->column[kind][b] && keep_column(kv, kind, b, err))
            return err->code;
    return 0;
}

/* Tables for n tokens, in steps. Shrinking does not fail. */
static int fit_tables(kvd_kv *kv, int64_t n_tokens, kvd_error *err)
{
    int64_t want = kvd__checkpoint_capacity(n_tokens) / KVD__BLOCK;
    if (want == kv->n_slots)
        return 0;
    for (int kind = 0; kind < (kv->shape.window ? 2 : 1); kind++) {
        char **t = kvd__realloc(kv->ledger, KVD_ACC_CHECKPOINT, kv->column[kind], (size_t)want * sizeof *t, err);
        if (!t) {
            if (kind) /* both or none */
                kv->column[0] = kvd__realloc(kv->ledger, KVD_ACC_CHECKPOINT, kv->column[0], (size_t)kv->n_slots * sizeof *t, NULL);
            return err ? err->code : KVD_E_NOMEM;
        }
        kv->column[kind] = t;
    }
    kv->n_slots = want;
    return 0;
}

/* First block that stays on global layers; the one after the last: none does. */
static int64_t first_block(const kvd_pass_plan *p)
{
    int64_t n = p->n_before + p->n_new;
    return p->start < n ? p->start / KVD__BLOCK : kvd__blocks(n);
}

void kvd__kv_evict(kvd_kv *kv, const kvd_pass_plan *p)
{
    if (p->start <= kv->start)
        return;
    drop(kv, 0, kv->start / KVD__BLOCK, first_block(p));
    drop(kv, 1, 0, first_block(p));
    kv->start = p->start < p->n_before ? p->start : p->n_before;
    if (kv->local_start < kv->start)
        kv->local_start = kv->start;
}

int kvd__kv_begin(kvd_kv *kv, const kvd_pass_plan *p, kvd_error *err)
{
    kvd_error local_error, *e = err ? err : &local_error; /* the code is needed either way */
    int64_t first = first_block(p), end = kvd__blocks(p->n_before + p->n_new);
    kvd__kv_evict(kv, p);
    int rc = fit_tables(kv, p->n_tokens, e);
    if (!rc)
        rc = keep(kv, 0, first, end, e);
    if (!rc && kv->shape.window)
        rc = keep(kv, 1, p->keep_block, end, e);
    if (!rc && p->layer_bytes) {
        kv->scratch = kvd__alloc(kv->ledger, KVD_ACC_LAYER, (size_t)p->layer_bytes, e);
        if (!kv->scratch)
            rc = e->code;
    }
    kv->scratch_block = p->scratch_block;
    if (rc)
        kvd__kv_end(kv, p, false);
    return rc;
}

void kvd__kv_end(kvd_kv *kv, const kvd_pass_plan *p, bool done)
{
    kvd__free(kv->scratch);
    kv->scratch = NULL;
    if (!done) {
        /* Positions [kv->start, n_before) are whole as before; the rest is not. */
        drop(kv, 0, 0, kv->start / KVD__BLOCK);
        drop(kv, 0, kvd__blocks(p->n_before), kv->n_slots);
        drop(kv, 1, 0, kv->local_start / KVD__BLOCK);
        drop(kv, 1, kvd__blocks(p->n_before), kv->n_slots);
        if (kv->start >= p->n_before)
            kvd__kv_clear(kv);
        fit_tables(kv, kv->end, NULL);
        return;
    }
    int64_t n = p->n_before + p->n_new;
    kv->start = p->start;
    kv->end = n;
    kv->local_start = p->start;
    if (kv->shape.window) {
        kv->local_start = p->keep_block * KVD__BLOCK < n ? p->keep_block * KVD__BLOCK : n;
        drop(kv, 1, 0, p->keep_block);
    }
}

void kvd__kv_truncate(kvd_kv *kv, int64_t n)
{
    if (n >= kv->end)
        return;
    /* A local layer may have dropped what a query at n would see. */
    int64_t sees = n - kv->shape.window + 1;
    if (n <= kv->start || (kv->shape.window && kv->local_start > kv->start && sees < kv->local_start)) {
        kvd__kv_reset(kv, n);
        return;
    }
    drop(kv, 0, kvd__blocks(n), kv->n_slots);
    drop(kv, 1, kvd__blocks(n), kv->n_slots);
    kv->end = n;
    fit_tables(kv, n, NULL);
}

void kvd__kv_clear(kvd_kv *kv)
{
    drop(kv, 0, 0, kv->n_slots);
    drop(kv, 1, 0, kv->n_slots);
    kv->start = kv->local_start = kv->end;
}

void kvd__kv_reset(kvd_kv *kv, int64_t n)
{
    kvd__kv_clear(kv);
    kv->start = kv->local_start = kv->end = n;
    if (kvd__blocks(n) < kv->n_slots)
        fit_tables(kv, n, NULL);
}

int64_t kvd__kv_context_bytes(const kvd_kv *kv)
{
    int64_t bytes = 0;
    for (int kind = 0; kind < 2; kind++) {
        if (!kv->column[kind])
            continue;
        int64_t column = column_bytes(kv, kind);
        bytes += kv->n_slots * (int64_t)sizeof *kv->column[kind];
        for (int64_t b = 0; b < kv->n_slots; b++)
            bytes += kv->column[kind][b] ? column : 0;
    }
    return bytes;
}
