/* Rotation, storing, and attention through the block tables.
 *
 * Two ways to share the work, the same bits: with many rows a unit is up to
 * KVD__UNIT_ROWS rows of one KV head over all their tiles; with one row (decode)
 * a unit is one tile of one KV head, and the partials are then merged in
 * ascending tile order, as the other way does on the fly. */
#include <string.h>

#include "model/steps.h"

static const float empty_max = -__builtin_inff(); /* marks an empty softmax state */

void kvd__rotate_row(kvd_worker *w, int layer, int64_t pos, float *q, float *k)
{
    const kvd_config *c = w->c;
    const kvd_layer *y = &w->m->layers[layer];
    int dh = c->d_head;
    if (y->q_norm && q)
        for (int i = 0; i < c->n_heads; i++)
            w->k->rmsnorm(q + i * dh, q + i * dh, y->q_norm, c->norm_eps, dh);
    if (y->k_norm)
        for (int i = 0; i < c->n_kv_heads; i++)
            w->k->rmsnorm(k + i * dh, k + i * dh, y->k_norm, c->norm_eps, dh);
    kvd__rope_at(c->local[layer] ? &w->m->rope_local : &w->m->rope, pos, w->lane->cs);
    if (q)
        w->k->rope(q, c->n_heads, dh, c->n_rot, w->lane->cs, c->rope_interleaved);
    w->k->rope(k, c->n_kv_heads, dh, c->n_rot, w->lane->cs, c->rope_interleaved);
}

void kvd__rotate(kvd_worker *w, const kvd_chunk *ch)
{
    int64_t a, b;
    kvd__pool_share(ch->n, w->tid, w->n_threads, &a, &b);
    for (; a < b; a++) {
        float *row = w->s->qkv + a * w->s->ld_qkv;
        kvd__rotate_row(w, ch->layer, kvd__row_at(w->run->p, ch->row0 + a).pos, row, row + w->s->k_column);
    }
}

#ifdef KVD_TEST_HOOKS
/* One unit in the last place of one stored value: what `verify` must notice. */
static void inject(kvd_worker *w, const kvd_kv *kv, int layer, int64_t pos)
{
    if (layer != w->m->inject_layer || pos != w->m->inject_pos)
        return;
    char *k = kvd__kv_k(kv, layer, pos / KVD__BLOCK, 0);
    k[pos % KVD__BLOCK * kvd__kvtype_bytes(kv->shape.type)] ^= 1;
}
#endif

void kvd__store(kvd_worker *w, const kvd_chunk *ch)
{
    const kvd_pass *p = w->run->p;
    int64_t a, b, ld = w->s->ld_qkv;
    int dh = w->c->d_head;
    kvd__pool_share(ch->n, w->tid, w->n_threads, &a, &b);
    while (a < b) { /* a run of rows that fall into one block */
        kvd_row at = kvd__row_at(p, ch->row0 + a);
        const kvd_kv *kv = p->spans[at.span].kv;
        int slot = (int)(at.pos % KVD__BLOCK), n = 1;
        while (a + n < b && slot + n < KVD__BLOCK) {
            kvd_row next = kvd__row_at(p, ch->row0 + a + n);
            if (next.span != at.span || next.pos != at.pos + n)
                break;
            n++;
        }
        int bad = 0;
        for (int head = 0; head < w->c->n_kv_heads; head++) {
            const float *row = w->s->qkv + a * ld + head * dh;
            bad |= w->k->store_k(kvd__kv_k(kv, ch->layer, at.pos / KVD__BLOCK, head), kv->shape.type, slot, n, row + w->s->k_column, ld, dh);
            bad |= w->k->store_v(kvd__kv_v(kv, ch->layer, at.pos / KVD__BLOCK, head), kv->shape.type, slot, n, row + w->s->v_column, ld, dh);
        }
        if (bad)
            kvd__fail_run(w->run, ch->layer, ch->row0 + a);
#ifdef KVD_TEST_HOOKS
        for (int i = 0; i < n; i++)
            inject(w, kv, ch->layer, at.pos + i);
#endif
        a += n;
    }
}

int64_t kvd__first_seen(const kvd_config *c, int layer, int64_t pos)
{
    return c->local[layer] && pos >= c->window ? pos - c->window + 1 : 0;
}

void kvd__find_block(const kvd_worker *w, const kvd_kv *kv, int layer, int64_t block, int head, const void **k,
                     const void **v)
{
    const kvd_spill_segment *seg = &w->run->segment;
    int64_t i = block - seg->from_block;
    char *pk, *pv;
    if (i >= 0 && i < seg->n_blocks) {
        *k = seg->blocks + i * seg->stride_bytes + head * kv->head_bytes;
        *v = (const char *)*k + kv->head_bytes / 2;
        return;
    }
    kvd__kv_find(kv, layer, block, head, &pk, &pv);
    *k = pk;
    *v = pv;
}

/* Describe tile `tile` of a KV head for rows at pos[0..n) (ascending): which of
 * them see it ([*a, *b)), what they see, and where the blocks are. */
static void describe(kvd_worker *w, const kvd_kv *kv, int layer, int head, int64_t tile, const int64_t *pos, int n,
                     kvd_attn_tile *t, int *a, int *b)
{
    int64_t base = tile * KVD__TILE;
    int i = 0, min_lo = KVD__TILE, max_hi = 0;
    while (i < n && pos[i] < base)
        i++;
    *a = i;
    for (; i < n && kvd__first_seen(w->c, layer, pos[i]) < base + KVD__TILE; i++) {
        int64_t lo = kvd__first_seen(w->c, layer, pos[i]) - base, hi = pos[i] - base + 1;
        w->lane->lo[i] = lo > 0 ? (int32_t)lo : 0;
        w->lane->hi[i] = hi < KVD__TILE ? (int32_t)hi : KVD__TILE;
        min_lo = w->lane->lo[i] < min_lo ? w->lane->lo[i] : min_lo;
        max_hi = w->lane->hi[i] > max_hi ? w->lane->hi[i] : max_hi;
    }
    *b = i;
    for (int j = 0; j < KVD__TILE_BLOCKS; j++) {
        bool seen = (j + 1) * KVD__BLOCK > min_lo && j * KVD__BLOCK < max_hi;
        t->k[j] = t->v[j] = NULL;
        if (seen)
            kvd__find_block(w, kv, layer, tile * KVD__TILE_BLOCKS + j, head, &t->k[j], &t->v[j]);
    }
    t->lo = w->lane->lo + *a;
    t->hi = w->lane->hi + *a;
    t->n_rows = *b - *a;
}

static kvd_attn_tile tile_of(const kvd_worker *w, const kvd_kv *kv)
{
    const kvd_config *c = w->c;
    return (kvd_attn_tile){.kvtype = kv->shape.type, .d_head = c->d_head, .scale = c->attn_scale,
                           .n_heads = c->n_heads / c->n_kv_heads, .ld_q = w->s->ld_qkv};
}

/* Softmax states of a unit's queries: [n*group], O [n*group][d_head]. */
typedef struct {
    float *M, *L, *O;
} states;

/* Fold tiles [tile, end) into the states of rows [i, i + n) of the chunk, of one
 * span, and one KV head. */
static void fold(kvd_worker *w, const kvd_chunk *ch, int i, int n, int head, int64_t tile, int64_t end, states s)
{
    const kvd_config *c = w->c;
    kvd_row first = kvd__row_at(w->run->p, ch->row0 + i);
    const kvd_kv *kv = w->run->p->spans[first.span].kv;
    kvd_attn_tile t = tile_of(w, kv);
    int dh = c->d_head, group = t.n_heads;
    int64_t pos[KVD__UNIT_ROWS];
    for (int r = 0; r < n; r++)
        pos[r] = kvd__row_at(w->run->p, ch->row0 + i + r).pos;
    const float *q = w->s->qkv + (ch->first + i) * w->s->ld_qkv + head * group * dh;
    int64_t lowest = kvd__first_seen(c, ch->layer, pos[0]) / KVD__TILE, last = pos[n - 1] / KVD__TILE;
    for (tile = tile > lowest ? tile : lowest; tile < end && tile <= last; tile++) {
        int a, b;
        describe(w, kv, ch->layer, head, tile, pos, n, &t, &a, &b);
        if (a == b)
            continue;
        t.q = q + a * t.ld_q;
        w->k->attn_tile(&t, s.M + a * group, s.L + a * group, s.O + (int64_t)a * group * dh, w->lane->attn);
    }
}

static void empty(states s, int n)
{
    for (int j = 0; j < n; j++)
        s.M[j] = empty_max;
}

static void finish(kvd_worker *w, int i, int n, int head, states s)
{
    int dh = w->c->d_head, group = w->c->n_heads / w->c->n_kv_heads;
    int64_t d_attn = (int64_t)w->c->n_heads * dh;
    for (int r = 0; r < n; r++)
        for (int g = 0; g < group; g++)
            w->k->attn_finish(w->s->attn + (i + r) * d_attn + (head * group + g) * dh, s.O + (int64_t)(r * group + g) * dh,
                              s.L[r * group + g], dh);
}

/* ---- one row: tiles shared out, partials merged in order ------------------------- */

/* The states of all heads, behind the partials. */
static states decode_states(const kvd_worker *w)
{
    int64_t at = (int64_t)KVD__WAVE_TILES * w->c->n_heads;
    return (states){w->s->part_m + at, w->s->part_l + at, w->s->part_o + at * w->c->d_head};
}

/* Fold tiles [tile0, end) of row `at`; waves of KVD__WAVE_TILES bound the partials.
 * Each thread merges its own heads; ends without a barrier. */
static void decode(kvd_worker *w, const kvd_chunk *ch, kvd_row at, int64_t tile0, int64_t end_tile)
{
    const kvd_config *c = w->c;
    kvd_scratch *s = w->s;
    const kvd_kv *kv = w->run->p->spans[at.span].kv;
    int dh = c->d_head, H = c->n_heads, group = H / c->n_kv_heads;
    int64_t h0, h1;
    states all = decode_states(w);
    kvd__pool_share(H, w->tid, w->n_threads, &h0, &h1);
    for (; tile0 < end_tile; tile0 += KVD__WAVE_TILES) {
        int64_t n = end_tile - tile0 < KVD__WAVE_TILES ? end_tile - tile0 : KVD__WAVE_TILES, u, end;
        kvd__pool_share(n * c->n_kv_heads, w->tid, w->n_threads, &u, &end);
        for (; u < end; u++) {
            int64_t tile = u / c->n_kv_heads;
            int head = (int)(u % c->n_kv_heads), a, b;
            int64_t part = tile * H + head * group;
            kvd_attn_tile t = tile_of(w, kv);
            describe(w, kv, ch->layer, head, tile0 + tile, &at.pos, 1, &t, &a, &b);
            t.q = s->qkv + ch->first * s->ld_qkv + head * group * dh;
            empty((states){s->part_m + part, NULL, NULL}, group);
            w->k->attn_tile(&t, s->part_m + part, s->part_l + part, s->part_o + part * dh, w->lane->attn);
        }
        kvd__barrier(w);
        for (int64_t h = h0; h < h1; h++)
            for (int64_t tile = 0; tile < n; tile++)
                w->k->attn_merge(&all.M[h], &all.L[h], all.O + h * dh, s->part_m[tile * H + h], s->part_l[tile * H + h], s->part_o + (tile * H + h) * dh, dh);
        if (tile0 + KVD__WAVE_TILES < end_tile)
            kvd__barrier(w);
    }
}

static void decode_begin(kvd_worker *w)
{
    int64_t h0, h1;
    kvd__pool_share(w->c->n_heads, w->tid, w->n_threads, &h0, &h1);
    for (; h0 < h1; h0++)
        decode_states(w).M[h0] = empty_max;
}

static void decode_finish(kvd_worker *w)
{
    int dh = w->c->d_head;
    int64_t h0, h1;
    states all = decode_states(w);
    kvd__pool_share(w->c->n_heads, w->tid, w->n_threads, &h0, &h1);
    for (; h0 < h1; h0++)
        w->k->attn_finish(w->s->attn + h0 * dh, all.O + h0 * dh, all.L[h0], dh);
}

/* ---- many rows: units ------------------------------------------------------------- */

/* Rows per unit: enough queries to fill registers, few enough to stay in L1. */
static int unit_rows(const kvd_config *c)
{
    int n = 96 / (c->n_heads / c->n_kv_heads);
    return n < 1 ? 1 : n > KVD__UNIT_ROWS ? KVD__UNIT_ROWS : n;
}

/* Take the next unit: rows [*begin, *end) of the chunk and a KV head. From the last
 * rows to the first, since the longest come last. False: none is left. */
static bool next_unit(kvd_worker *w, const kvd_chunk *ch, int R, int *begin, int *end, int *head)
{
    const kvd_pass *p = w->run->p;
    int64_t u = atomic_fetch_add_explicit(&w->run->next_unit, 1, memory_order_relaxed);
    *head = (int)(u % w->c->n_kv_heads);
    *end = ch->n;
    for (int64_t skip = u / w->c->n_kv_heads; *end > 0; skip--) {
        int span = kvd__row_at(p, ch->row0 + *end - 1).span;
        *begin = *end - 1;
        while (*begin > 0 && *end - *begin < R && kvd__row_at(p, ch->row0 + *begin - 1).span == span)
            --*begin;
        if (skip == 0)
            return true;
        *end = *begin;
    }
    return false;
}

/* ---- the disk tier: attention goes through the context segment by segment ----------- */

/* Thread 0: the next segment, and which tiles can be done with it. The last step
 * holds the rest: tiles that begin on disk and end in memory, and the resident ones. */
static void next_step(kvd_worker *w, const kvd_chunk *ch, int64_t disk_blocks)
{
    kvd_run *r = w->run;
    kvd_spill *spill = r->p->spans[0].spill;
    int64_t last_tile = kvd__row_at(r->p, ch->row0 + ch->n - 1).pos / KVD__TILE;
    if (r->segment.n_blocks)
        kvd__spill_release(spill);
    r->segment = (kvd_spill_segment){0};
    r->io_code = kvd__spill_next(spill, &r->segment, &r->io_error);
    if (r->io_code) {
        r->segment = (kvd_spill_segment){0};
        r->stop = true; /* nothing of this pass may be handed out */
    }
    int64_t end = r->segment.from_block + r->segment.n_blocks;
    r->step_last = r->io_code || end >= disk_blocks;
    r->step_end_tile = r->step_last ? last_tile + 1 : end / KVD__TILE_BLOCKS;
    atomic_store_explicit(&r->next_unit, 0, memory_order_relaxed);
}

static states unit_states(const kvd_worker *w, const kvd_chunk *ch, int i, int head)
{
    int group = w->c->n_heads / w->c->n_kv_heads;
    int64_t at = ((int64_t)head * ch->n + i) * group;
    return (states){w->s->state_m + at, w->s->state_l + at, w->s->gate + at * w->c->d_head};
}

static void attention_from_disk(kvd_worker *w, const kvd_chunk *ch, int64_t disk_blocks)
{
    kvd_run *r = w->run;
    kvd_row first = kvd__row_at(r->p, ch->row0);
    int R = unit_rows(w->c), begin, end, head;
    int64_t tile = kvd__first_seen(w->c, ch->layer, first.pos) / KVD__TILE;
    bool single = ch->n == 1, last;
    if (single)
        decode_begin(w);
    else
        for (int64_t j = w->tid; j < (int64_t)ch->n * w->c->n_heads; j += w->n_threads)
            w->s->state_m[j] = empty_max;
    do {
        if (w->tid == 0) {
            next_step(w, ch, disk_blocks);
            kvd__tap_segment(w, ch);
        }
        kvd__barrier(w);
        if (r->io_code)
            return;
        last = r->step_last;
        int64_t end_tile = r->step_end_tile;
        if (single)
            decode(w, ch, first, tile, end_tile);
        else
            while (next_unit(w, ch, R, &begin, &end, &head))
                fold(w, ch, begin, end - begin, head, tile, end_tile, unit_states(w, ch, begin, head));
        tile = tile > end_tile ? tile : end_tile;
        kvd__barrier(w);
    } while (!last);
    if (w->tid == 0) {
        kvd__spill_release(r->p->spans[0].spill);
        r->segment = (kvd_spill_segment){0};
        atomic_store_explicit(&r->next_unit, 0, memory_order_relaxed);
    }
    kvd__barrier(w);
    if (single)
        decode_finish(w);
    else
        while (next_unit(w, ch, R, &begin, &end, &head))
            finish(w, begin, end - begin, head, unit_states(w, ch, begin, head));
}

void kvd__attention(kvd_worker *w, const kvd_chunk *ch)
{
    kvd_row first = kvd__row_at(w->run->p, ch->row0);
    const kvd_span *span = &w->run->p->spans[first.span];
    int64_t seen = kvd__first_seen(w->c, ch->layer, first.pos);
    if (span->disk_blocks && kvd__first_seen(w->c, ch->layer, span->n_before) / KVD__BLOCK < span->disk_blocks) {
        attention_from_disk(w, ch, span->disk_blocks);
        return;
    }
    if (ch->n == 1 && w->n_threads > 1) {
        decode_begin(w);
        decode(w, ch, first, seen / KVD__TILE, first.pos / KVD__TILE + 1);
        decode_finish(w);
        return;
    }
    int R = unit_rows(w->c), begin, end, head, group = w->c->n_heads / w->c->n_kv_heads;
    states s = {w->lane->M, w->lane->L, w->lane->O};
    while (next_unit(w, ch, R, &begin, &end, &head)) {
        empty(s, (end - begin) * group);
        fold(w, ch, begin, end - begin, head, 0, INT64_MAX, s);
        finish(w, begin, end - begin, head, s);
    }
}
