/* The laboratory's calls (include/kvd/kvd_lab.h) that are not part of a pass: what
 * is set on a session for its passes to obey, K and V rebuilt on their own, and the
 * weights as numbers. The taps themselves are called from the pass (model/taps.c). */
#include "base/error.h"
#include "base/fpenv.h"
#include "gen/session.h"

void kvd_lab_set_taps(kvd_session *s, const kvd_lab_taps *taps)
{
    s->has_lab = taps != NULL;
    s->lab = taps ? *taps : (kvd_lab_taps){0};
}

/* A pass numbers its spans; a session's pass has one. */

static void tap_residual(void *ctx, int span, int layer, int64_t pos, float *h)
{
    const kvd_lab_taps *t = ctx;
    (void)span;
    t->residual(t->ctx, layer, pos, h);
}

static void tap_projected(void *ctx, int span, int layer, int64_t pos, float *q, float *k, float *v)
{
    const kvd_lab_taps *t = ctx;
    (void)span;
    t->projected(t->ctx, layer, pos, q, k, v);
}

static void tap_kv_made(void *ctx, int span, int layer, int64_t pos, float *k, float *v)
{
    const kvd_lab_taps *t = ctx;
    (void)span;
    t->kv_made(t->ctx, layer, pos, k, v);
}

static void tap_kv_read(void *ctx, int span, int layer, int64_t pos, const float *k, const float *v)
{
    const kvd_lab_taps *t = ctx;
    (void)span;
    t->kv_read(t->ctx, layer, pos, k, v);
}

static void tap_attention(void *ctx, int span, int layer, int64_t pos, float *out)
{
    const kvd_lab_taps *t = ctx;
    (void)span;
    t->attention(t->ctx, layer, pos, out);
}

static void tap_weights(void *ctx, int span, int layer, int64_t pos, int head, int64_t first, int64_t n, const float *p)
{
    const kvd_lab_taps *t = ctx;
    (void)span;
    t->weights(t->ctx, layer, pos, head, first, n, p);
}

const kvd_taps *kvd__lab_taps(const kvd_session *s, kvd_lab_taps *t, kvd_taps *taps)
{
    if (!s->has_lab)
        return NULL;
    *t = s->lab;
    *taps = (kvd_taps){
        .ctx = t,
        .from_pos = t->from_pos,
        .residual = t->residual ? tap_residual : NULL,
        .projected = t->projected ? tap_projected : NULL,
        .kv_made = t->kv_made ? tap_kv_made : NULL,
        .kv_read = t->kv_read ? tap_kv_read : NULL,
        .attention = t->attention ? tap_attention : NULL,
        .weights = t->weights ? tap_weights : NULL,
    };
    return taps;
}

int kvd_lab_reconstruct_rows(kvd_session *s, int layer, int64_t n, const int64_t *pos, const float *residuals, float *k,
                             float *v, kvd_error *err)
{
    const kvd_config *c = &s->m->config;
    if (layer < 0 || layer >= c->n_layers)
        return kvd__fail(err, KVD_E_RANGE, "layer %d is not in 0..%d", layer, c->n_layers - 1);
    if (n < 0)
        return kvd__fail(err, KVD_E_RANGE, "%lld rows", (long long)n);
    for (int64_t i = 0; i < n; i++)
        if (pos[i] < 0 || pos[i] >= c->n_ctx)
            return kvd__fail(err, KVD_E_RANGE, "position %lld is not in 0..%d", (long long)pos[i], c->n_ctx - 1);
    int rc = n ? kvd__model_claim(s->m, err) : 0;
    if (rc || !n)
        return rc;
    rc = kvd__model_reconstruct(s->m, layer, n, pos, residuals, s->shape.type, k, v, err);
    kvd__model_release(s->m);
    return rc;
}

int kvd_lab_reconstruct(kvd_session *s, int layer, int64_t pos, const float *residual, float *k, float *v, kvd_error *err)
{
    return kvd_lab_reconstruct_rows(s, layer, 1, &pos, residual, k, v, err);
}

int64_t kvd_lab_kept(const kvd_session *s, int layer, int kv_head, const int64_t **pos)
{
    if (!s->compact || layer < 0 || layer >= s->shape.n_layers || kv_head < 0 || kv_head >= s->shape.n_kv_heads)
        return -1;
    const kvd_set *set = &s->compact->sets[layer * s->shape.n_kv_heads + kv_head];
    *pos = set->pos;
    return set->n;
}

/* ---- weights ------------------------------------------------------------------ */

static const kvd_linear *linear_of(const kvd_layer *y, kvd_lab_matrix which)
{
    switch (which) {
    case KVD_LAB_WQ: return &y->q;
    case KVD_LAB_WK: return &y->k;
    case KVD_LAB_WV: return &y->v;
    case KVD_LAB_WO: return &y->o;
    case KVD_LAB_GATE: return &y->gate;
    case KVD_LAB_UP: return &y->up;
    case KVD_LAB_DOWN: return &y->down;
    }
    return NULL;
}

int kvd_lab_get_matrix(const kvd_model *m, int layer, kvd_lab_matrix which, int64_t *n_rows, int64_t *n_columns, float *w,
                       float *bias, kvd_error *err)
{
    if (!m->has_weights)
        return kvd__fail(err, KVD_E_ARG, "the model was loaded without weights");
    if (layer < 0 || layer >= m->config.n_layers)
        return kvd__fail(err, KVD_E_RANGE, "layer %d is not in 0..%d", layer, m->config.n_layers - 1);
    const kvd_linear *a = linear_of(&m->layers[layer], which);
    if (!a)
        return kvd__fail(err, KVD_E_RANGE, "matrix %d: there is none", (int)which);
    kvd_fpenv env = kvd__fpenv_enter();
    for (int64_t r = 0; w && r < a->n; r++)
        kvd__panel_dequant_row(a->type, a->panels + r / KVD__PANEL_ROWS * a->panel_bytes, (int)(r % KVD__PANEL_ROWS), a->k,
                               w + r * a->k);
    kvd__fpenv_leave(env);
    for (int64_t r = 0; bias && r < a->n; r++)
        bias[r] = a->bias ? a->bias[r] : 0;
    *n_rows = a->n;
    *n_columns = a->k;
    return 0;
}

/* ---- test builds ---------------------------------------------------------------- */

int kvd_lab_keep_windows(kvd_model *m, bool on, kvd_error *err)
{
#ifdef KVD_TEST_HOOKS
    m->keep_windows = on;
    return 0;
#else
    (void)m, (void)on;
    return kvd__fail(err, KVD_E_UNSUPPORTED, "this is no test build (-Dtest_hooks=true)");
#endif
}

int kvd_lab_inject(kvd_model *m, int layer, int64_t pos, kvd_error *err)
{
#ifdef KVD_TEST_HOOKS
    if (layer < 0 || layer >= m->config.n_layers || pos < 0)
        return kvd__fail(err, KVD_E_RANGE, "inject: layer %d, position %lld", layer, (long long)pos);
    m->inject_layer = layer;
    m->inject_pos = pos;
    return 0;
#else
    (void)m, (void)layer, (void)pos;
    return kvd__fail(err, KVD_E_UNSUPPORTED, "this is no test build (-Dtest_hooks=true)");
#endif
}
