/* The laboratory's calls (include/kvd/kvd_lab.h) that are not part of a pass: what
 * is set on a session for its passes to obey, and K and V rebuilt on their own. The
 * taps themselves are called from the pass (model/steps.c). */
#include "base/error.h"
#include "gen/session.h"

void kvd_lab_set_taps(kvd_session *s, const kvd_lab_taps *taps)
{
    s->has_lab = taps != NULL;
    s->lab = taps ? *taps : (kvd_lab_taps){0};
}

int kvd_lab_reconstruct(kvd_session *s, int layer, int64_t pos, const float *residual, float *k, float *v, kvd_error *err)
{
    if (layer < 0 || layer >= s->m->config.n_layers || pos < 0 || pos >= s->m->config.n_ctx)
        return kvd__fail(err, KVD_E_RANGE, "layer %d, position %lld", layer, (long long)pos);
    return kvd__model_reconstruct(s->m, layer, pos, residual, s->shape.type, k, v, err);
}

int64_t kvd_lab_kept(const kvd_session *s, int layer, int kv_head, const int64_t **pos)
{
    if (!s->compact || layer < 0 || layer >= s->shape.n_layers || kv_head < 0 || kv_head >= s->shape.n_kv_heads)
        return -1;
    const kvd_set *set = &s->compact->sets[layer * s->shape.n_kv_heads + kv_head];
    *pos = set->pos;
    return set->n;
}

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
