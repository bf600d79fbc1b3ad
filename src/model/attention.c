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

/* First position that a query sees. */
static int64_t first_seen(const kvd_config *c, int layer, int64_t pos)
{
    return c->local[layer] && pos >= c->window ? pos - c->window + 1 : 0;
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
    for (; i < n && first_seen(w->c, layer, pos[i]) < base + KVD__TILE; i++) {
        int64_t lo = first_seen(w->c, layer, pos[i]) - base, hi = pos[i] - base + 1;
        w->lane->lo[i] = lo > 0 ? (int32_t)lo : 0;
        w->lane->hi[i] = hi < KVD__TILE ? (int32_t)hi : KVD__TILE;
        min_lo = w->lane->lo[i] < min_lo ? w->lane->lo[i] : min_lo;
        max_hi = w->lane->hi[i] > max_hi ? w->lane->hi[i] : max_hi;
    }
    *b = i;
    for (int j = 0; j < KVD__TILE_BLOCKS; j++) {
        bool seen = (j + 1) * KVD__BLOCK > min_lo && j * KVD__BLOCK < max_hi;
        t->k[j] = seen ? kvd__kv_k(kv, layer, tile * KVD__TILE_BLOCKS + j, head) : NULL;
        t->v[j] = seen ? kvd__kv_v(kv, layer, tile * KVD__TILE_BLOCKS + j, head) : NULL;
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

/* Rows [i, i + n) of the chunk, of one span, and one KV head, over all tiles. */
static void unit(kvd_worker *w, const kvd_chunk *ch, int i, int n, int head)
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
    kvd_lane *s = w->lane;
    for (int j = 0; j < n * group; j++)
        s->M[j] = empty_max;
    int64_t tile = first_seen(c, ch->layer, pos[0]) / KVD__TILE, last = pos[n - 1] / KVD__TILE;
    for (; tile <= last; tile++) {
        int a, b;
        describe(w, kv, ch->layer, head, tile, pos, n, &t, &a, &b);
        if (a == b)
            continue;
        t.q = q + a * t.ld_q;
        w->k->attn_tile(&t, s->M + a * group, s->L + a * group, s->O + (int64_t)a * group * dh, s->attn);
    }
    int64_t d_attn = (int64_t)c->n_heads * dh;
    for (int r = 0; r < n; r++)
        for (int g = 0; g < group; g++)
            w->k->attn_finish(w->s->attn + (i + r) * d_attn + (head * group + g) * dh, s->O + (int64_t)(r * group + g) * dh,
                              s->L[r * group + g], dh);
}

/* One row, tiles shared out; waves of KVD__WAVE_TILES bound the partials. */
static void decode(kvd_worker *w, const kvd_chunk *ch, kvd_row at, int64_t tile0, int64_t n_tiles)
{
    const kvd_config *c = w->c;
    kvd_scratch *s = w->s;
    const kvd_kv *kv = w->run->p->spans[at.span].kv;
    int dh = c->d_head, H = c->n_heads, group = H / c->n_kv_heads;
    int64_t h0, h1;
    kvd__pool_share(H, w->tid, w->n_threads, &h0, &h1);
    float *M = s->part_m + KVD__WAVE_TILES * H, *L = s->part_l + KVD__WAVE_TILES * H, *O = s->part_o + (int64_t)KVD__WAVE_TILES * H * dh;
    for (int64_t h = h0; h < h1; h++)
        M[h] = empty_max;
    for (int64_t wave = 0; wave < n_tiles; wave += KVD__WAVE_TILES) {
        int64_t n = n_tiles - wave < KVD__WAVE_TILES ? n_tiles - wave : KVD__WAVE_TILES, u, end;
        kvd__pool_share(n * c->n_kv_heads, w->tid, w->n_threads, &u, &end);
        for (; u < end; u++) {
            int64_t tile = u / c->n_kv_heads;
            int head = (int)(u % c->n_kv_heads), a, b;
            int64_t part = tile * H + head * group;
            kvd_attn_tile t = tile_of(w, kv);
            describe(w, kv, ch->layer, head, tile0 + wave + tile, &at.pos, 1, &t, &a, &b);
            t.q = s->qkv + ch->first * s->ld_qkv + head * group * dh;
            for (int g = 0; g < group; g++)
                s->part_m[part + g] = empty_max;
            w->k->attn_tile(&t, s->part_m + part, s->part_l + part, s->part_o + part * dh, w->lane->attn);
        }
        kvd__barrier(w);
        for (int64_t h = h0; h < h1; h++)
            for (int64_t tile = 0; tile < n; tile++)
                w->k->attn_merge(&M[h], &L[h], O + h * dh, s->part_m[tile * H + h], s->part_l[tile * H + h], s->part_o + (tile * H + h) * dh, dh);
        if (wave + KVD__WAVE_TILES < n_tiles)
            kvd__barrier(w);
    }
    for (int64_t h = h0; h < h1; h++)
        w->k->attn_finish(s->attn + h * dh, O + h * dh, L[h], dh);
}

/* Rows per unit: enough queries to fill registers, few enough to stay in L1. */
static int unit_rows(const kvd_config *c)
{
    int n = 96 / (c->n_heads / c->n_kv_heads);
    return n < 1 ? 1 : n > KVD__UNIT_ROWS ? KVD__UNIT_ROWS : n;
}

void kvd__attention(kvd_worker *w, const kvd_chunk *ch)
{
    const kvd_pass *p = w->run->p;
    int R = unit_rows(w->c), n_kv = w->c->n_kv_heads;
    if (ch->n == 1 && w->n_threads > 1) {
        kvd_row at = kvd__row_at(p, ch->row0);
        int64_t tile0 = first_seen(w->c, ch->layer, at.pos) / KVD__TILE, n_tiles = at.pos / KVD__TILE - tile0 + 1;
        decode(w, ch, at, tile0, n_tiles);
        return;
    }
    /* Units from the last rows to the first: the longest come first. */
    for (;;) {
        int64_t u = atomic_fetch_add_explicit(&w->run->next_unit, 1, memory_order_relaxed);
        int head = (int)(u % n_kv), end = ch->n;
        for (int64_t skip = u / n_kv; end > 0; skip--) {
            int span = kvd__row_at(p, ch->row0 + end - 1).span, begin = end - 1;
            while (begin > 0 && end - begin < R && kvd__row_at(p, ch->row0 + begin - 1).span == span)
                begin--;
            if (skip == 0) {
                unit(w, ch, begin, end - begin, head);
                break;
            }
            end = begin;
        }
        if (end <= 0)
            return;
    }
}
