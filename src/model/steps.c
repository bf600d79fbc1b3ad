#include "model/steps.h"

#include <string.h>

#include "base/clock.h"
#include "base/half.h"

kvd_row kvd__row_at(const kvd_pass *p, int64_t row)
{
    int i = 0;
    const kvd_span *s = p->spans;
    for (; row >= s->recompute + s->n_new; s++, i++)
        row -= s->recompute + s->n_new;
    int64_t pos = row < s->recompute ? row : s->n_before + (row - s->recompute);
    return (kvd_row){.span = i, .pos = pos, .id = s->ids[pos], .want_logits = row >= s->recompute + s->n_new - s->n_logits};
}

void kvd__fail_run(kvd_run *r, int layer, int64_t row)
{
    int64_t pos = r->p ? kvd__row_at(r->p, row).pos : r->positions[row], mark = ((int64_t)layer << 40 | pos) + 1;
    int64_t old = atomic_load(&r->failed);
    while ((!old || mark < old) && !atomic_compare_exchange_weak(&r->failed, &old, mark))
        ;
}

void kvd__stage_end(kvd_worker *w, kvd_stage stage)
{
    if (w->tid || !w->m->profile)
        return;
    uint64_t now = (uint64_t)kvd__now_ns();
    if (w->mark_ns)
        w->m->stage_ns[stage] += now - w->mark_ns;
    w->mark_ns = now;
}

static void share(const kvd_worker *w, int64_t n, int64_t *begin, int64_t *end)
{
    kvd__pool_share(n, w->tid, w->n_threads, begin, end);
}

/* ---- chunks and the stream -------------------------------------------------- */

void kvd__chunk_begin(kvd_worker *w, const kvd_chunk *ch)
{
    if (w->tid)
        return;
    kvd_run *r = w->run;
    const kvd_pass *p = r->p;
    atomic_store_explicit(&r->next_unit, 0, memory_order_relaxed);
    if (p->on_progress && p->on_progress(p->ctx, ch->layer * r->n_rows + ch->row0, w->c->n_layers * r->n_rows))
        r->cancelled = true;
    r->stop = r->cancelled || r->io_code || atomic_load(&r->failed) != 0;
}

static void *stream_row(const kvd_worker *w, int64_t row)
{
    return (char *)w->run->p->stream + row * w->c->d_model * kvd__kvtype_bytes(w->run->p->stream_type);
}

static void fetch_row(const kvd_worker *w, int64_t row, float *h)
{
    int64_t d = w->c->d_model;
    const uint16_t *p = stream_row(w, row);
    switch (w->run->p->stream_type) {
    case KVD_KV_F16:
        for (int64_t i = 0; i < d; i++)
            h[i] = kvd__f16_to_f32(p[i]);
        break;
    case KVD_KV_BF16:
        for (int64_t i = 0; i < d; i++)
            h[i] = kvd__bf16_to_f32(p[i]);
        break;
    default:
        memcpy(h, p, (size_t)d * sizeof(float));
    }
}

/* Round a row to the stream's type and put it there. */
static void return_row(const kvd_worker *w, int layer, int64_t row, float *h)
{
    int64_t d = w->c->d_model;
    kvd_kvtype t = w->run->p->stream_type;
    uint16_t *p = stream_row(w, row);
    if (w->k->round_to(h, t, d))
        kvd__fail_run(w->run, layer, row);
    if (t == KVD_KV_F16)
        for (int64_t i = 0; i < d; i++)
            p[i] = kvd__f16_from_f32(h[i]);
    else if (t == KVD_KV_BF16)
        for (int64_t i = 0; i < d; i++)
            p[i] = kvd__bf16_from_f32(h[i]);
    else if ((void *)p != (void *)h)
        memcpy(p, h, (size_t)d * sizeof(float));
}

void kvd__chunk_fetch(kvd_worker *w, kvd_chunk *ch)
{
    if (w->run->p->stream_type == KVD_KV_F32) { /* computed in place */
        ch->h = stream_row(w, ch->row0);
        return;
    }
    int64_t a, b, d = w->c->d_model;
    ch->h = w->s->h;
    share(w, ch->n, &a, &b);
    for (; a < b; a++)
        fetch_row(w, ch->row0 + a, ch->h + a * d);
    kvd__barrier(w);
}

void kvd__chunk_return(kvd_worker *w, const kvd_chunk *ch)
{
    if (w->run->p->stream_type == KVD_KV_F32)
        return;
    int64_t a, b;
    share(w, ch->n, &a, &b);
    for (; a < b; a++)
        return_row(w, ch->layer, ch->row0 + a, ch->h + a * w->c->d_model);
    kvd__barrier(w);
}

kvd_chunk kvd__chunk_wanted(const kvd_pass *p, kvd_chunk ch, int64_t d_model)
{
    int a = 0, b = ch.n;
    while (a < b && !kvd__row_at(p, ch.row0 + a).want_logits)
        a++;
    while (b > a && !kvd__row_at(p, ch.row0 + b - 1).want_logits)
        b--;
    ch.row0 += a;
    ch.first = a;
    ch.n = b - a;
    ch.h += a * d_model;
    return ch;
}

void kvd__embed(kvd_worker *w)
{
    const kvd_linear *e = &w->m->embd;
    int64_t a, b, d = w->c->d_model;
    share(w, w->run->n_rows, &a, &b);
    for (; a < b; a++) {
        int32_t id = kvd__row_at(w->run->p, a).id;
        float *h = w->lane->row;
        kvd__panel_dequant_row(e->type, e->panels + id / 16 * e->panel_bytes, id % 16, d, h);
        if (w->c->embd_scale != 1)
            w->k->scale(h, w->c->embd_scale, d);
        return_row(w, 0, a, h);
    }
}

/* ---- products --------------------------------------------------------------- */

static kvd_act_kind act_of(const kvd_worker *w, const kvd_linear *weight)
{
    return w->m->activations_f32 ? KVD_ACT_F32 : kvd__dtype_act(weight->type);
}

kvd_inputs kvd__inputs(kvd_worker *w, const kvd_chunk *ch, const float *x, int64_t ld_x, int64_t K, const float *norm,
                       const kvd_linear *const *weights, int n_w)
{
    bool q32 = false, q256 = false, alone = ch->n == 1;
    for (int i = 0; i < n_w; i++) {
        q32 |= act_of(w, weights[i]) == KVD_ACT_Q8_32;
        q256 |= act_of(w, weights[i]) == KVD_ACT_Q8_256;
    }
    const kvd_act_buffer *b = &w->s->acts[alone ? 1 + w->tid : 0];
    int64_t i = 0, end = 1;
    if (!alone)
        share(w, ch->n, &i, &end);
    for (; i < end; i++) {
        const float *row = x + i * ld_x;
        int bad = 0;
        if (norm) {
            bad = w->k->rmsnorm(b->x + i * b->ld_x, row, norm, w->c->norm_eps, K);
            row = b->x + i * b->ld_x;
        }
        if (q32)
            bad |= w->k->quant_q8_32(row, K, b->q32 + i * b->ld_q, b->d32 + i * b->ld_d, b->s32 + i * b->ld_d, b->b32 + i * b->ld_b);
        if (q256)
            bad |= w->k->quant_q8_256(row, K, b->q256 + i * b->ld_q, b->d256 + i * b->ld_d, b->b256 + i * b->ld_b);
        if (bad)
            kvd__fail_run(w->run, ch->layer, ch->row0 + i);
    }
    if (!alone)
        kvd__barrier(w);
    return (kvd_inputs){.x = norm ? b->x : x, .ld_x = norm ? b->ld_x : ld_x, .b = b, .n = ch->n};
}

static void product(kvd_worker *w, const kvd_inputs *in, const kvd_linear *a, float *y, int64_t ld, int64_t p0, int64_t p1)
{
    const kvd_act_buffer *b = in->b;
    kvd_acts acts = {.x = in->x, .ld_x = in->ld_x, .ld_q = b->ld_q, .ld_d = b->ld_d, .ld_b = b->ld_b};
    const char *panels = a->panels + p0 * a->panel_bytes;
    switch (act_of(w, a)) {
    case KVD_ACT_Q8_32:
        acts.q = b->q32, acts.d = b->d32, acts.s = b->s32, acts.bsum = b->b32;
        break;
    case KVD_ACT_Q8_256:
        acts.q = b->q256, acts.d = b->d256, acts.bsum = b->b256;
        break;
    case KVD_ACT_F32:
        break;
    }
    if (w->m->activations_f32 && a->type != KVD_F32) {
        for (int64_t p = p0; p < p1; p++, panels += a->panel_bytes) {
            w->k->dequant_panel[a->type](w->lane->panel, panels, a->k);
            w->k->gemm[KVD_F32](y + 16 * p, ld, w->lane->panel, 1, a->k, &acts, in->n);
        }
    } else
        w->k->gemm[a->type](y + 16 * p0, ld, panels, p1 - p0, a->k, &acts, in->n);
    if (a->bias)
        for (int t = 0; t < in->n; t++)
            w->k->add(y + t * ld + 16 * p0, a->bias + 16 * p0, 16 * (p1 - p0));
}

void kvd__products(kvd_worker *w, const kvd_inputs *in, const kvd_linear *const *weights, float *const *y,
                   const int64_t *ld, int n_w)
{
    for (int i = 0; i < n_w; i++) {
        int64_t p0, p1;
        share(w, weights[i]->n_panels, &p0, &p1);
        if (p1 > p0)
            product(w, in, weights[i], y[i], ld[i], p0, p1);
    }
}

void kvd__gate_columns(kvd_worker *w, const kvd_layer *y, int n)
{
    int64_t p0, p1, ld = w->s->ld_ffn;
    share(w, y->gate.n_panels, &p0, &p1);
    for (int t = 0; t < n && p1 > p0; t++) {
        float *g = w->s->gate + t * ld + 16 * p0;
        const float *u = w->s->up + t * ld + 16 * p0;
        (w->c->gelu ? w->k->gelu_mul : w->k->silu_mul)(g, g, u, 16 * (p1 - p0));
    }
}

void kvd__add_columns(kvd_worker *w, const kvd_linear *weight, const kvd_chunk *ch)
{
    int64_t p0, p1, d = w->c->d_model;
    share(w, weight->n_panels, &p0, &p1);
    for (int t = 0; t < ch->n && p1 > p0; t++)
        w->k->add(ch->h + t * d + 16 * p0, w->s->y + t * d + 16 * p0, 16 * (p1 - p0));
}

void kvd__add_normed(kvd_worker *w, const kvd_chunk *ch, const float *norm)
{
    int64_t a, b, d = w->c->d_model;
    share(w, ch->n, &a, &b);
    for (; a < b; a++) {
        float *y = w->s->y + a * d;
        if (w->k->rmsnorm(y, y, norm, w->c->norm_eps, d))
            kvd__fail_run(w->run, ch->layer, ch->row0 + a);
        w->k->add(ch->h + a * d, y, d);
    }
}

/* ---- output head -------------------------------------------------------------- */

static void head_rows(kvd_worker *w, kvd_chunk ch)
{
    kvd_run *r = w->run;
    struct kvd_model *m = w->m;
    int64_t a, b, d = w->c->d_model, ld = w->s->ld_vocab;
    ch.h = w->s->h;
    share(w, ch.n, &a, &b);
    for (; a < b; a++)
        fetch_row(w, ch.row0 + a, ch.h + a * d);
    kvd__barrier(w);
    if (r->p->taps)
        kvd__tap_residual(w, &ch);
    const kvd_linear *head[] = {&m->head};
    kvd_inputs in = kvd__inputs(w, &ch, ch.h, d, d, m->out_norm, head, 1);
    kvd__products(w, &in, head, &w->s->logits, &ld, 1);
    kvd__barrier(w);
    if (w->tid == 0) {
        for (int i = 0; i < ch.n && !r->stop; i++) {
            float *y = w->s->logits + i * ld;
            if (atomic_load(&r->failed) || w->k->round_to(y, KVD_KV_F32, w->c->n_vocab)) {
                kvd__fail_run(r, ch.layer, ch.row0 + i);
                r->stop = true;
                break;
            }
            kvd_row at = kvd__row_at(r->p, ch.row0 + i);
            if (r->p->on_logits && r->p->on_logits(r->p->ctx, at.span, at.pos, y))
                r->cancelled = r->stop = true;
        }
    }
    kvd__barrier(w);
}

void kvd__head(kvd_worker *w)
{
    const kvd_pass *p = w->run->p;
    int64_t row = 0;
    for (int i = 0; i < p->n_spans; i++) {
        const kvd_span *s = &p->spans[i];
        int64_t end = row + s->recompute + s->n_new;
        for (int64_t from = end - s->n_logits; from < end; from += KVD__HEAD_ROWS) {
            kvd_chunk ch = {.layer = w->c->n_layers, .row0 = from,
                            .n = end - from < KVD__HEAD_ROWS ? (int)(end - from) : KVD__HEAD_ROWS};
            head_rows(w, ch);
            if (w->run->stop)
                return;
        }
        row = end;
    }
}
