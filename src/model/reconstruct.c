/* K and V rebuilt from residuals alone, outside of any pass: norm, two products,
 * rotation, rounding, by the steps and kernels of the pass and so with its bits. One
 * row is done on the calling thread, since waking the pool costs more than that;
 * more than one on all threads, a chunk of the model's scratch at a time. */
#include <string.h>

#include "base/error.h"
#include "base/fpenv.h"
#include "model/steps.h"

typedef struct {
    kvd_run run;
    int layer;
    int64_t n;
    const float *residuals;
    kvd_kvtype kv_type;
    float *k, *v;
} reconstruction;

/* QK-norm of K, RoPE, rounding and the way out, for this thread's rows of a chunk. */
static void finish_rows(kvd_worker *w, const reconstruction *r, const kvd_chunk *ch)
{
    const kvd_scratch *s = w->s;
    int64_t a, b, n_kv = (int64_t)w->c->n_kv_heads * w->c->d_head;
    kvd__pool_share(ch->n, w->tid, w->n_threads, &a, &b);
    for (; a < b; a++) {
        int64_t row = ch->row0 + a;
        float *k = s->qkv + a * s->ld_qkv + s->k_column, *v = s->qkv + a * s->ld_qkv + s->v_column;
        kvd__rotate_row(w, r->layer, w->run->positions[row], NULL, k);
        int bad = w->k->round_to(k, r->kv_type, n_kv);
        bad |= w->k->round_to(v, r->kv_type, n_kv);
        if (bad)
            kvd__fail_run(w->run, r->layer, row);
        memcpy(r->k + row * n_kv, k, (size_t)n_kv * sizeof *k);
        memcpy(r->v + row * n_kv, v, (size_t)n_kv * sizeof *v);
    }
}

/* On every thread of the pool, or (a single row) on the caller's alone: then there is
 * nobody to wait for. */
static void reconstruct(void *ctx, int tid, int n_threads)
{
    reconstruction *r = ctx;
    struct kvd_model *m = r->run.m;
    const kvd_layer *y = &m->layers[r->layer];
    kvd_scratch *s = &m->scratch;
    int64_t d = m->config.d_model;
    kvd_worker w = {.run = &r->run, .m = m, .c = &m->config, .k = &m->kern, .s = s, .lane = &s->lanes[tid], .tid = tid,
                    .n_threads = n_threads};
    const kvd_linear *kv[] = {&y->k, &y->v};
    float *out[] = {s->qkv + s->k_column, s->qkv + s->v_column};
    for (int64_t row = 0; row < r->n; row += s->chunk) {
        int64_t left = r->n - row;
        kvd_chunk ch = {.layer = r->layer, .row0 = row, .n = left < s->chunk ? (int)left : s->chunk};
        kvd_inputs in = kvd__inputs(&w, &ch, r->residuals + row * d, d, d, y->attn_norm, kv, 2);
        kvd__products(&w, &in, kv, out, (int64_t[]){s->ld_qkv, s->ld_qkv}, 2);
        if (n_threads > 1)
            kvd__barrier(&w);
        finish_rows(&w, r, &ch);
        if (n_threads > 1) /* the next chunk takes the same rows */
            kvd__barrier(&w);
    }
}

int kvd__model_reconstruct(struct kvd_model *m, int layer, int64_t n, const int64_t *positions, const float *residuals,
                           kvd_kvtype kv_type, float *k, float *v, kvd_error *err)
{
    reconstruction r = {.run = {.m = m, .positions = positions}, .layer = layer, .n = n, .residuals = residuals,
                        .kv_type = kv_type, .k = k, .v = v};
    if (n > 1)
        kvd__pool_run(m->pool, reconstruct, &r);
    else {
        kvd_fpenv env = kvd__fpenv_enter();
        reconstruct(&r, 0, 1);
        kvd__fpenv_leave(env);
    }
    int64_t failed = atomic_load(&r.run.failed);
    if (failed)
        return kvd__fail(err, KVD_E_NUMERIC, "a value of layer %d at position %lld is not finite", layer,
                         (long long)((failed - 1) & (((int64_t)1 << 40) - 1)));
    return 0;
}
