/* The forward pass. forward() below is the whole transformer; the steps it is
 * written in are in steps.c and attention.c, their arithmetic in kern/.
 *
 * Every thread runs forward() from top to bottom on its share of each step;
 * barrier() is where all wait for each other. */
#include "model/pass.h"

#include <string.h>

#include "base/error.h"
#include "base/half.h"
#include "model/steps.h"

#define barrier kvd__barrier

/* K and V of the chunk's rows to their blocks, and q made ready. */
static void rotate_and_store(kvd_worker *w, const kvd_chunk *ch)
{
    kvd__rotate(w, ch);
    if (w->run->p->taps)
        kvd__tap_kv_made(w, ch);
    kvd__store(w, ch);
    barrier(w);
    if (w->run->p->taps)
        kvd__tap_kv_read(w, ch);
}

/* One layer for one chunk of rows: h is read and rewritten in place.
 * Returns false when the run is to stop. */
static bool layer_forward(kvd_worker *w, kvd_chunk ch)
{
    const kvd_layer *y = &w->m->layers[ch.layer];
    const kvd_config *c = w->c;
    kvd_scratch *s = w->s;
    const int64_t d = c->d_model, d_attn = (int64_t)c->n_heads * c->d_head;
    bool last = ch.layer == c->n_layers - 1;

    kvd__chunk_begin(w, &ch);
    kvd__chunk_fetch(w, &ch);
    if (w->run->p->taps)
        kvd__tap_residual(w, &ch);

    /* q, k, v = norm(h) W_q, W_k, W_v */
    const kvd_linear *qkv[] = {&y->q, &y->k, &y->v};
    float *qkv_out[] = {s->qkv, s->qkv + s->k_column, s->qkv + s->v_column};
    kvd_inputs in = kvd__inputs(w, &ch, ch.h, d, d, y->attn_norm, qkv, 3);
    kvd__products(w, &in, qkv, qkv_out, (int64_t[]){s->ld_qkv, s->ld_qkv, s->ld_qkv}, 3);
    barrier(w);
    if (w->run->stop)
        return false;
    kvd__stage_end(w, KVD_STAGE_QKV);
    if (w->run->p->taps)
        kvd__tap_projected(w, &ch);
    if (w->run->p->compact)
        kvd__compact_store(w, &ch);
    else
        rotate_and_store(w, &ch);
    kvd__stage_end(w, KVD_STAGE_STORE);

    /* At the last layer only rows whose logits are wanted go on. */
    if (last && !(ch = kvd__chunk_wanted(w->run->p, ch, d)).n)
        return true;

    /* h += attention(q, K, V) W_o */
    if (w->run->p->compact)
        kvd__compact_attention(w, &ch);
    else
        kvd__attention(w, &ch);
    barrier(w);
    kvd__stage_end(w, KVD_STAGE_ATTENTION);
    if (w->run->p->taps)
        kvd__tap_attention(w, &ch);
    in = kvd__inputs(w, &ch, s->attn, d_attn, d_attn, NULL, (const kvd_linear *[]){&y->o}, 1);
    kvd__products(w, &in, (const kvd_linear *[]){&y->o}, &s->y, &d, 1);
    if (y->attn_post_norm) {
        barrier(w);
        kvd__add_normed(w, &ch, y->attn_post_norm);
    } else
        kvd__add_columns(w, &y->o, &ch);
    barrier(w);
    kvd__stage_end(w, KVD_STAGE_OUTPUT);

    /* h += (act(norm(h) W_gate) * norm(h) W_up) W_down */
    const kvd_linear *gate_up[] = {&y->gate, &y->up};
    in = kvd__inputs(w, &ch, ch.h, d, d, y->ffn_norm, gate_up, 2);
    kvd__products(w, &in, gate_up, (float *[]){s->gate, s->up}, (int64_t[]){s->ld_ffn, s->ld_ffn}, 2);
    kvd__gate_columns(w, y, ch.n);
    barrier(w);
    kvd__stage_end(w, KVD_STAGE_FFN);
    in = kvd__inputs(w, &ch, s->gate, s->ld_ffn, c->d_ffn, NULL, (const kvd_linear *[]){&y->down}, 1);
    kvd__products(w, &in, (const kvd_linear *[]){&y->down}, &s->y, &d, 1);
    if (y->ffn_post_norm) {
        barrier(w);
        kvd__add_normed(w, &ch, y->ffn_post_norm);
    } else
        kvd__add_columns(w, &y->down, &ch);
    barrier(w);
    kvd__stage_end(w, KVD_STAGE_DOWN);

    kvd__chunk_return(w, &ch);
    return true;
}

static void forward(void *ctx, int tid, int n_threads)
{
    kvd_run *run = ctx;
    struct kvd_model *m = run->m;
    kvd_worker w = {.run = run, .m = m, .c = &m->config, .k = &m->kern, .s = &m->scratch,
                    .lane = &m->scratch.lanes[tid], .tid = tid, .n_threads = n_threads};
    kvd__stage_end(&w, KVD_STAGE_EMBED); /* the clock starts */
    kvd__embed(&w);
    barrier(&w);
    kvd__stage_end(&w, KVD_STAGE_EMBED);
    for (int l = 0; l < m->config.n_layers; l++)
        for (int64_t row = 0; row < run->n_rows; row += m->scratch.chunk) {
            int64_t left = run->n_rows - row;
            kvd_chunk ch = {.layer = l, .row0 = row, .n = left < m->scratch.chunk ? (int)left : m->scratch.chunk};
            if (!layer_forward(&w, ch))
                return;
        }
    barrier(&w);
    if (run->stop) /* the last layer's attention failed */
        return;
    kvd__head(&w);
    kvd__stage_end(&w, KVD_STAGE_HEAD);
}

/* Read ahead what each layer will see of the blocks on disk, in this order. */
static int begin_reading(struct kvd_model *m, const kvd_span *s, kvd_spill_range *ranges, kvd_error *err)
{
    for (int l = 0; l < m->config.n_layers; l++) {
        int64_t from = kvd__first_seen(&m->config, l, s->n_before) / KVD__BLOCK;
        if (l == m->config.n_layers - 1 && s->n_logits == 0) /* no row gets to its attention */
            from = s->disk_blocks;
        ranges[l] = (kvd_spill_range){l, from < s->disk_blocks ? from : s->disk_blocks, s->disk_blocks};
    }
    return kvd__spill_read_begin(s->spill, ranges, m->config.n_layers, err);
}

int kvd__model_pass(struct kvd_model *m, const kvd_pass *p, kvd_error *err)
{
    kvd_run run = {.m = m, .p = p};
    kvd_spill_range ranges[KVD__MAX_LAYERS];
    kvd_spill *spill = p->spans[0].disk_blocks ? p->spans[0].spill : NULL;
    int rc = kvd__tap_begin(&run, err);
    if (!rc && spill)
        rc = begin_reading(m, &p->spans[0], ranges, err);
    if (rc) {
        kvd__tap_end(&run);
        return rc;
    }
    for (int i = 0; i < p->n_spans; i++)
        run.n_rows += p->spans[i].recompute + p->spans[i].n_new;
    kvd__pool_run(m->pool, forward, &run);
    if (spill)
        kvd__spill_read_end(spill);
    kvd__tap_end(&run);
    if (run.io_code) {
        if (err)
            *err = run.io_error;
        return run.io_code;
    }
    int64_t failed = atomic_load(&run.failed);
    if (failed) {
        long long layer = (failed - 1) >> 40, pos = (failed - 1) & (((int64_t)1 << 40) - 1);
        if (layer == m->config.n_layers)
            return kvd__fail(err, KVD_E_NUMERIC, "the logits of position %lld are not finite", pos);
        return kvd__fail(err, KVD_E_NUMERIC, "a value of layer %lld at position %lld is not finite", layer, pos);
    }
    if (run.cancelled)
        return kvd__fail(err, KVD_E_CANCELLED, "cancelled");
    return 0;
}

float kvd__kv_value(const void *values, kvd_kvtype t, int64_t i)
{
    const char *p = values;
    float f;
    uint16_t h;
    if (t == KVD_KV_F32) {
        memcpy(&f, p + 4 * i, 4);
        return f;
    }
    memcpy(&h, p + 2 * i, 2);
    return t == KVD_KV_F16 ? kvd__f16_to_f32(h) : kvd__bf16_to_f32(h);
}

void kvd__kv_read(const kvd_kv *kv, int layer, int64_t pos, float *k, float *v)
{
    int dh = kv->shape.d_head, slot = (int)(pos % KVD__BLOCK);
    for (int head = 0; head < kv->shape.n_kv_heads; head++) {
        const char *pk = kvd__kv_k(kv, layer, pos / KVD__BLOCK, head), *pv = kvd__kv_v(kv, layer, pos / KVD__BLOCK, head);
        for (int i = 0; i < dh; i++) {
            k[head * dh + i] = kvd__kv_value(pk, kv->shape.type, (int64_t)i * KVD__BLOCK + slot);
            v[head * dh + i] = kvd__kv_value(pv, kv->shape.type, (int64_t)slot * dh + i);
        }
    }
}
