/* Lossy policies in the pass: what stands in for rotating, storing and attention
 * where K and V live in a compacted arena (kv/compact.h), and the probe that shows a
 * policy the attention weights. Steps of pass.c like those of steps.c and
 * attention.c; the exact ones do not know of these.
 *
 * Heads belong to threads here, since their sets differ; rows are shared out for
 * what is per row. */
#include <string.h>

#include "model/steps.h"

static void share(const kvd_worker *w, int64_t n, int64_t *a, int64_t *b) { kvd__pool_share(n, w->tid, w->n_threads, a, b); }

static int group_of(const kvd_worker *w) { return w->c->n_heads / w->c->n_kv_heads; }

static float *row_of(const kvd_worker *w, int64_t i) { return w->s->qkv + i * w->s->ld_qkv; }

/* cos and sin of a place, into this thread's lane. */
static const float *turn(kvd_worker *w, int layer, int64_t place)
{
    kvd__rope_at(w->c->local[layer] ? &w->m->rope_local : &w->m->rope, place, w->lane->cs);
    return w->lane->cs;
}

static void turn_heads(kvd_worker *w, const float *cs, float *x, int n)
{
    w->k->rope(x, n, w->c->d_head, w->c->n_rot, cs, w->c->rope_interleaved);
}

/* Put K of a head into a slot. */
static int store_k(kvd_worker *w, char *block, int64_t slot, const float *k)
{
    return w->k->store_k(block, w->run->p->compact->shape.type, (int)(slot % KVD__BLOCK), 1, k, w->c->d_head, w->c->d_head);
}

/* The slot that row i of the feed has in what it attends to. */
static int64_t slot_of(const kvd_compact *c, int head, int64_t i) { return c->feed[head].slot[kvd__compact_rank(c, head, i)]; }

/* Norm, rotate and store row i of the chunk, row `at` of the feed. */
static void store_row(kvd_worker *w, const kvd_chunk *ch, int i, int64_t at)
{
    const kvd_compact *c = w->run->p->compact;
    const kvd_layer *y = &w->m->layers[ch->layer];
    int dh = w->c->d_head, group = group_of(w), bad = 0;
    float *q = row_of(w, i), *k = q + w->s->k_column;
    const float *v = q + w->s->v_column, *cs = NULL;
    for (int h = 0; y->q_norm && h < w->c->n_heads; h++)
        w->k->rmsnorm(q + h * dh, q + h * dh, y->q_norm, w->c->norm_eps, dh);
    for (int h = 0; y->k_norm && h < w->c->n_kv_heads; h++)
        w->k->rmsnorm(k + h * dh, k + h * dh, y->k_norm, w->c->norm_eps, dh);
    if (!c->renumber)
        cs = turn(w, ch->layer, c->n_tokens + at);
    for (int h = 0; h < w->c->n_kv_heads; h++) {
        int64_t slot = slot_of(c, h, at);
        char *pk, *pv, *raw;
        kvd__compact_block(c, ch->layer, h, slot / KVD__BLOCK, &pk, &pv, &raw);
        if (c->renumber) { /* stored as it is, and once more as it stands among the kept */
            bad |= store_k(w, raw, slot, k + h * dh);
            cs = turn(w, ch->layer, kvd__compact_rank(c, h, at));
        }
        turn_heads(w, cs, q + h * group * dh, group);
        turn_heads(w, cs, k + h * dh, 1);
        bad |= store_k(w, pk, slot, k + h * dh);
        bad |= w->k->store_v(pv, c->shape.type, (int)(slot % KVD__BLOCK), 1, v + h * dh, dh, dh);
    }
    if (bad)
        kvd__fail_run(w->run, ch->layer, ch->row0 + i);
}

/* Rotate what a head had kept before this feed to its ranks. */
static void rotate_kept(kvd_worker *w, int layer, int head)
{
    const kvd_compact *c = w->run->p->compact;
    const kvd_set *f = &c->feed[head];
    int dh = w->c->d_head;
    float *k = w->lane->attn; /* free at this point, and longer than a head */
    for (int64_t rank = 0; rank < f->n - c->n_new; rank++) {
        char *pk, *pv, *raw;
        kvd__compact_block(c, layer, head, f->slot[rank] / KVD__BLOCK, &pk, &pv, &raw);
        for (int i = 0; i < dh; i++)
            k[i] = kvd__kv_value(raw, c->shape.type, (int64_t)i * KVD__BLOCK + f->slot[rank] % KVD__BLOCK);
        turn_heads(w, turn(w, layer, rank), k, 1);
        store_k(w, pk, f->slot[rank], k);
    }
}

/* ---- the probe -------------------------------------------------------------------------- */

/* The ranks [*lo, *hi) that row `at` of the feed sees. */
static void seen(const kvd_compact *c, int layer, int head, int64_t at, int64_t *lo, int64_t *hi)
{
    int64_t first = kvd__compact_first_seen(c, layer, c->n_tokens + at);
    *lo = 0;
    *hi = kvd__compact_rank(c, head, at) + 1;
    while (*lo < *hi && c->feed[head].pos[*lo] < first)
        ++*lo;
}

/* Add the softmax of one row's scores, by slot, to the weights, by rank. */
static void add_softmax(kvd_worker *w, const kvd_set *f, const float *score, int64_t lo, int64_t hi, double *weights)
{
    float *e = w->lane->attn; /* free at this point, and longer than a step */
    enum { STEP = KVD__TILE };
    double sum = 0;
    float max = score[f->slot[lo]];
    for (int64_t j = lo; j < hi; j++)
        max = score[f->slot[j]] > max ? score[f->slot[j]] : max;
    for (int pass = 0; pass < 2; pass++)
        for (int64_t j = lo; j < hi; j += STEP) {
            int64_t n = hi - j < STEP ? hi - j : STEP;
            for (int64_t i = 0; i < n; i++)
                e[i] = score[f->slot[j + i]] - max;
            w->k->exp(e, e, n);
            for (int64_t i = 0; i < n; i++)
                if (pass == 0)
                    sum += (double)e[i];
                else
                    weights[j + i] += (double)e[i] / sum;
        }
}

/* Weights that rows [i, i + n) of the chunk (from row `at` of the feed on) give a
 * head's slots. A block of K is a panel of weights as the product takes it: 16 rows,
 * one a slot, of d_head elements. */
static void probe(kvd_worker *w, const kvd_chunk *ch, int head, int i, int n, int64_t at)
{
    const kvd_compact *c = w->run->p->compact;
    const kvd_set *f = &c->feed[head];
    int dh = w->c->d_head, group = group_of(w);
    static const int dtype[KVD_KV_COUNT] = {[KVD_KV_F16] = KVD_F16, [KVD_KV_BF16] = KVD_BF16, [KVD_KV_F32] = KVD_F32};
    kvd_gemm_fn *product = w->k->gemm[dtype[c->shape.type]];
    float *y = c->rows + w->tid * c->probe_rows * c->slots;
    double *weights = c->weights + head * c->slots;
    int64_t n_blocks = kvd__blocks(f->n);
    for (int g = 0; g < group; g++) {
        kvd_acts a = {.x = row_of(w, i) + (head * group + g) * dh, .ld_x = w->s->ld_qkv};
        for (int64_t block = 0; block < n_blocks; block++) {
            char *pk, *pv, *raw;
            kvd__compact_block(c, ch->layer, head, block, &pk, &pv, &raw);
            product(y + block * KVD__BLOCK, c->slots, pk, 1, dh, &a, n);
        }
        for (int r = 0; r < n; r++) {
            int64_t lo, hi;
            seen(c, ch->layer, head, at + r, &lo, &hi);
            w->k->scale(y + r * c->slots, w->c->attn_scale, n_blocks * KVD__BLOCK);
            add_softmax(w, f, y + r * c->slots, lo, hi, weights);
        }
    }
}

/* Show the policy the rows of this chunk that it wants to see. */
static void observe(kvd_worker *w, const kvd_chunk *ch)
{
    const kvd_compact *c = w->run->p->compact;
    int64_t from = c->n_new - c->n_observed - ch->row0;
    for (int head = w->tid; head < w->c->n_kv_heads; head += w->n_threads)
        for (int64_t i = from > 0 ? from : 0; i < ch->n; i += c->probe_rows) {
            int64_t n = ch->n - i < c->probe_rows ? ch->n - i : c->probe_rows;
            probe(w, ch, head, (int)i, (int)n, ch->row0 + i);
        }
}

/* ---- the steps ---------------------------------------------------------------------------- */

void kvd__compact_store(kvd_worker *w, const kvd_chunk *ch)
{
    kvd_compact *c = w->run->p->compact;
    int64_t a, b;
    int n_heads = w->c->n_kv_heads;
    if (ch->row0 == 0) {
        for (int head = w->tid; head < n_heads; head += w->n_threads) {
            kvd__compact_open(c, ch->layer, head);
            if (c->renumber)
                rotate_kept(w, ch->layer, head);
        }
        kvd__barrier(w);
    }
    share(w, ch->n, &a, &b);
    for (; a < b; a++)
        store_row(w, ch, (int)a, ch->row0 + a);
    kvd__barrier(w);
    if (c->n_observed) {
        observe(w, ch);
        kvd__barrier(w);
    }
    if (ch->row0 + ch->n < c->n_new)
        return;
    if (c->keeper->per_layer) {
        if (w->tid == 0)
            kvd__compact_close(c, ch->layer, 0, n_heads, group_of(w));
    } else
        for (int head = w->tid; head < n_heads; head += w->n_threads)
            kvd__compact_close(c, ch->layer, head, head + 1, group_of(w));
}

/* Rows [i, i + n) of the chunk against a head's slots. */
static void attend(kvd_worker *w, const kvd_chunk *ch, int head, int i, int n)
{
    const kvd_compact *c = w->run->p->compact;
    int dh = w->c->d_head, group = group_of(w);
    int64_t d_attn = (int64_t)w->c->n_heads * dh, lo[KVD__UNIT_ROWS], hi[KVD__UNIT_ROWS]; /* ranks; slots too, unless all are seen */
    kvd_attn_tile t = {.kvtype = c->shape.type, .d_head = dh, .scale = w->c->attn_scale, .n_heads = group, .n_rows = n,
                       .q = row_of(w, ch->first + i) + head * group * dh, .ld_q = w->s->ld_qkv, .lo = w->lane->lo, .hi = w->lane->hi};
    for (int r = 0; r < n; r++)
        seen(c, ch->layer, head, ch->row0 + i + r, &lo[r], &hi[r]);
    for (int j = 0; j < n * group; j++)
        w->lane->M[j] = -__builtin_inff();
    for (int64_t base = lo[0] / KVD__TILE * KVD__TILE; base < hi[n - 1]; base += KVD__TILE) {
        for (int r = 0; r < n; r++) {
            w->lane->lo[r] = (int32_t)(lo[r] < base ? 0 : lo[r] - base < KVD__TILE ? lo[r] - base : KVD__TILE);
            w->lane->hi[r] = (int32_t)(hi[r] < base ? 0 : hi[r] - base < KVD__TILE ? hi[r] - base : KVD__TILE);
        }
        for (int b = 0; b < KVD__TILE_BLOCKS; b++) {
            char *k, *v, *raw;
            kvd__compact_block(c, ch->layer, head, base / KVD__BLOCK + b, &k, &v, &raw);
            t.k[b] = k;
            t.v[b] = v;
        }
        w->k->attn_tile(&t, w->lane->M, w->lane->L, w->lane->O, w->lane->attn);
    }
    for (int r = 0; r < n; r++)
        for (int g = 0; g < group; g++)
            w->k->attn_finish(w->s->attn + (i + r) * d_attn + (head * group + g) * dh, w->lane->O + (int64_t)(r * group + g) * dh,
                              w->lane->L[r * group + g], dh);
}

void kvd__compact_attention(kvd_worker *w, const kvd_chunk *ch)
{
    int64_t n_units = (ch->n + KVD__UNIT_ROWS - 1) / KVD__UNIT_ROWS, u;
    while ((u = atomic_fetch_add_explicit(&w->run->next_unit, 1, memory_order_relaxed)) < n_units * w->c->n_kv_heads) {
        int64_t i = (n_units - 1 - u / w->c->n_kv_heads) * KVD__UNIT_ROWS, left = ch->n - i; /* the longest first */
        attend(w, ch, (int)(u % w->c->n_kv_heads), (int)i, (int)(left < KVD__UNIT_ROWS ? left : KVD__UNIT_ROWS));
    }
}
