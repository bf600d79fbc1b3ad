/* The laboratory's view of a pass: what pass.h calls taps.
 *
 * All callbacks run on thread 0, at places of layer_forward where the value they are
 * shown is complete and nobody else reads or writes it; what they leave there is what
 * the pass goes on with. A tap that is not set costs a test of a pointer per layer and
 * chunk, and without taps there is not even that. A pass that has failed already
 * shows no more: it would be garbage, and is thrown away.
 *
 * Attention weights exist nowhere in the engine: its kernels fold tile after tile into
 * running sums. They are computed here a second time, from the query as attention uses
 * it and K as stored, by plain loops in f64 that share nothing with the kernels. K of
 * the layer is gathered as f32 rows for that: from the blocks after attention, and of
 * the disk tier's blocks while attention goes through them, since each segment is
 * there for a moment only. */
#include "model/steps.h"

#include "base/error.h"
#include "base/math64.h"

int kvd__tap_begin(kvd_run *r, kvd_error *err)
{
    const kvd_pass *p = r->p;
    const kvd_config *c = &r->m->config;
    if (!p->taps || !p->taps->weights || p->compact)
        return 0;
    size_t n = 0, row = (size_t)c->n_kv_heads * (size_t)c->d_head;
    for (int i = 0; i < p->n_spans; i++) { /* whole blocks are gathered */
        size_t tokens = (size_t)kvd__blocks(p->spans[i].n_before + p->spans[i].n_new) * KVD__BLOCK;
        n = tokens > n ? tokens : n;
    }
    r->probe.k = kvd__alloc_array(r->m->ledger, KVD_ACC_COMPUTE, n, row * sizeof *r->probe.k, err);
    r->probe.p = kvd__alloc_array(r->m->ledger, KVD_ACC_COMPUTE, n, sizeof *r->probe.p, err);
    r->probe.score = kvd__alloc_array(r->m->ledger, KVD_ACC_COMPUTE, n, sizeof *r->probe.score, err);
    if (r->probe.k && r->probe.p && r->probe.score)
        return 0;
    kvd__tap_end(r);
    return KVD_E_NOMEM;
}

void kvd__tap_end(kvd_run *r)
{
    kvd__free(r->probe.k);
    kvd__free(r->probe.p);
    kvd__free(r->probe.score);
    r->probe = (kvd_probe){0};
}

/* The next row of a chunk to be shown, from *i + 1 on; false: there is none, or not on
 * this thread. */
static bool next_row(const kvd_worker *w, const kvd_chunk *ch, int *i, kvd_row *at)
{
    kvd_run *r = w->run;
    if (w->tid || r->io_code || atomic_load_explicit(&r->failed, memory_order_relaxed))
        return false;
    while (++*i < ch->n) {
        *at = kvd__row_at(r->p, ch->row0 + *i);
        if (at->pos >= r->p->taps->from_pos)
            return true;
    }
    return false;
}

void kvd__tap_residual(kvd_worker *w, const kvd_chunk *ch)
{
    const kvd_taps *t = w->run->p->taps;
    kvd_row at;
    if (!t->residual)
        return;
    for (int i = -1; next_row(w, ch, &i, &at);)
        t->residual(t->ctx, at.span, ch->layer, at.pos, ch->h + (int64_t)i * w->c->d_model);
    kvd__barrier(w);
}

static float *qkv_row(const kvd_worker *w, const kvd_chunk *ch, int i)
{
    return w->s->qkv + (int64_t)(ch->first + i) * w->s->ld_qkv;
}

void kvd__tap_projected(kvd_worker *w, const kvd_chunk *ch)
{
    const kvd_taps *t = w->run->p->taps;
    kvd_row at;
    if (!t->projected)
        return;
    for (int i = -1; next_row(w, ch, &i, &at);) {
        float *q = qkv_row(w, ch, i);
        t->projected(t->ctx, at.span, ch->layer, at.pos, q, q + w->s->k_column, q + w->s->v_column);
    }
    kvd__barrier(w);
}

void kvd__tap_kv_made(kvd_worker *w, const kvd_chunk *ch)
{
    const kvd_taps *t = w->run->p->taps;
    kvd_row at;
    if (!t->kv_made)
        return;
    kvd__barrier(w); /* rows are rotated by their owners */
    for (int i = -1; next_row(w, ch, &i, &at);) {
        float *q = qkv_row(w, ch, i);
        t->kv_made(t->ctx, at.span, ch->layer, at.pos, q + w->s->k_column, q + w->s->v_column);
    }
    kvd__barrier(w);
}

void kvd__tap_kv_read(kvd_worker *w, const kvd_chunk *ch)
{
    const kvd_taps *t = w->run->p->taps;
    kvd_row at;
    if (!t->kv_read)
        return;
    for (int i = -1; next_row(w, ch, &i, &at);) {
        float *k = w->s->gate, *v = w->s->up; /* free at this point */
        kvd__kv_read(w->run->p->spans[at.span].kv, ch->layer, at.pos, k, v);
        t->kv_read(t->ctx, at.span, ch->layer, at.pos, k, v);
    }
    kvd__barrier(w); /* attention may keep its states in gate */
}

/* ---- weights --------------------------------------------------------------------- */

/* K of blocks [from, to) of a layer, all heads, as rows of f32 by position. */
static void gather(const kvd_worker *w, const kvd_kv *kv, int layer, int64_t from, int64_t to)
{
    int dh = kv->shape.d_head;
    int64_t ld = (int64_t)kv->shape.n_kv_heads * dh;
    for (; from < to; from++)
        for (int head = 0; head < kv->shape.n_kv_heads; head++) {
            const void *k, *v;
            float *row = w->run->probe.k + from * KVD__BLOCK * ld + head * dh;
            kvd__find_block(w, kv, layer, from, head, &k, &v);
            for (int j = 0; j < dh; j++)
                for (int slot = 0; slot < KVD__BLOCK; slot++)
                    row[slot * ld + j] = kvd__kv_value(k, kv->shape.type, (int64_t)j * KVD__BLOCK + slot);
        }
}

void kvd__tap_segment(kvd_worker *w, const kvd_chunk *ch)
{
    const kvd_spill_segment *seg = &w->run->segment;
    if (w->run->probe.k)
        gather(w, w->run->p->spans[0].kv, ch->layer, seg->from_block, seg->from_block + seg->n_blocks);
}

/* Softmax of scale * q.k over n rows of k, ld apart. */
static void weigh(kvd_probe *b, const float *q, const float *k, int64_t ld, int64_t n, int dh, double scale)
{
    double max = 0, sum = 0;
    for (int64_t j = 0; j < n; j++) {
        double s = 0;
        for (int d = 0; d < dh; d++)
            s += (double)q[d] * (double)k[j * ld + d];
        b->score[j] = s * scale;
        max = j == 0 || b->score[j] > max ? b->score[j] : max;
    }
    for (int64_t j = 0; j < n; j++)
        sum += b->score[j] = kvd__exp64(b->score[j] - max);
    for (int64_t j = 0; j < n; j++)
        b->p[j] = (float)(b->score[j] / sum);
}

/* The weights of one row, all heads. *end: blocks below it that a later row of this span
 * sees are gathered. */
static void show_weights(const kvd_worker *w, const kvd_chunk *ch, int i, kvd_row at, int64_t *end)
{
    const kvd_taps *t = w->run->p->taps;
    const kvd_config *c = w->c;
    kvd_probe *b = &w->run->probe;
    int dh = c->d_head, group = c->n_heads / c->n_kv_heads;
    int64_t ld = (int64_t)c->n_kv_heads * dh, first = kvd__first_seen(c, ch->layer, at.pos), n = at.pos - first + 1;
    /* Between the rebuilt rows and the new ones blocks may be missing that no row sees. */
    *end = *end > first / KVD__BLOCK ? *end : first / KVD__BLOCK;
    if (*end < kvd__blocks(at.pos + 1)) {
        gather(w, w->run->p->spans[at.span].kv, ch->layer, *end, kvd__blocks(at.pos + 1));
        *end = kvd__blocks(at.pos + 1);
    }
    for (int head = 0; head < c->n_heads; head++) {
        weigh(b, qkv_row(w, ch, i) + head * dh, b->k + first * ld + head / group * dh, ld, n, dh, (double)c->attn_scale);
        t->weights(t->ctx, at.span, ch->layer, at.pos, head, first, n, b->p);
    }
}

void kvd__tap_attention(kvd_worker *w, const kvd_chunk *ch)
{
    const kvd_taps *t = w->run->p->taps;
    int span = -1;
    int64_t end = 0;
    kvd_row at;
    if (!t->attention && !w->run->probe.k)
        return;
    for (int i = -1; next_row(w, ch, &i, &at);) {
        if (ch->layer == w->c->n_layers - 1 && !at.want_logits)
            continue;
        if (at.span != span)
            end = w->run->p->spans[at.span].disk_blocks; /* what a row sees of those came by in segments */
        span = at.span;
        if (w->run->probe.k)
            show_weights(w, ch, i, at, &end);
        if (t->attention)
            t->attention(t->ctx, at.span, ch->layer, at.pos, w->s->attn + (int64_t)i * w->c->n_heads * w->c->d_head);
    }
    kvd__barrier(w);
}
