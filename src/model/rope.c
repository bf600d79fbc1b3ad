/* RoPE tables. The angle of position p and pair i is p*f_i. Splitting p = 64a + b
 * keeps the tables small (their size follows the trained context, not the
 * session) and their entries exact to f64; a pair's cos and sin come from one
 * complex product in f64, rounded once to f32. */
#include "base/error.h"
#include "base/math64.h"
#include "model/model.h"

static int make(struct kvd_model *m, double base, double divide, const float *factors, kvd_rope *r, kvd_error *err)
{
    int n = m->config.n_rot / 2;
    int64_t coarse = m->config.n_ctx / 64 + 1;
    double *t = kvd__alloc_array(m->ledger, KVD_ACC_WEIGHTS, (size_t)((coarse + 64) * n), 2 * sizeof *t, err);
    if (!t)
        return KVD_E_NOMEM;
    double *fine = t + coarse * n * 2;
    for (int i = 0; i < n; i++) {
        double f = kvd__pow64(base, -(2.0 * i) / m->config.n_rot);
        if (factors)
            f /= (double)factors[i];
        f /= divide;
        for (int64_t j = 0; j < coarse; j++)
            kvd__sincos64((double)(64 * j) * f, &t[(j * n + i) * 2 + 1], &t[(j * n + i) * 2]);
        for (int64_t j = 0; j < 64; j++)
            kvd__sincos64((double)j * f, &fine[(j * n + i) * 2 + 1], &fine[(j * n + i) * 2]);
    }
    *r = (kvd_rope){.n_pairs = n, .coarse = t, .fine = fine};
    return 0;
}

/* rope_freqs.weight: Llama 3's factors, one per pair, f32. */
static int read_factors(struct kvd_model *m, const kvd_gguf *g, float **out, kvd_error *err)
{
    const kvd_gguf_tensor *t = kvd__gguf_tensor(g, "rope_freqs.weight");
    *out = NULL;
    if (!t)
        return 0;
    int n = m->config.n_rot / 2;
    if (t->type != KVD_F32 || t->n_dims != 1 || t->ne[0] != n)
        return kvd__fail_at(err, KVD_E_GGUF_SHAPE, t->offset, "rope_freqs.weight: expected F32 [%d]", n);
    float *f = kvd__alloc_array(m->ledger, KVD_ACC_HOST, (size_t)n, sizeof *f, err);
    if (!f)
        return KVD_E_NOMEM;
    int rc = kvd__gguf_read(g, t, 0, f, (size_t)n * sizeof *f, err);
    for (int i = 0; !rc && i < n; i++)
        if (!(f[i] >= 1e-6f && f[i] <= 1e6f))
            rc = kvd__fail_at(err, KVD_E_GGUF_BOUNDS, t->offset, "rope_freqs.weight[%d] = %g is not in 1e-6..1e6", i, (double)f[i]);
    if (rc) {
        kvd__free(f);
        return rc;
    }
    *out = f;
    return 0;
}

int kvd__rope_create(struct kvd_model *m, const kvd_gguf *g, kvd_error *err)
{
    float *factors;
    int rc = read_factors(m, g, &factors, err);
    if (rc)
        return rc;
    rc = make(m, m->config.rope_base, m->config.rope_linear, factors, &m->rope, err);
    bool own = m->config.window && m->config.rope_base_local != m->config.rope_base;
    if (!rc && own)
        rc = make(m, m->config.rope_base_local, 1, NULL, &m->rope_local, err);
    else if (!rc)
        m->rope_local = m->rope;
    kvd__free(factors);
    return rc;
}

void kvd__rope_destroy(struct kvd_model *m)
{
    if (m->rope_local.coarse != m->rope.coarse)
        kvd__free((void *)(uintptr_t)m->rope_local.coarse);
    kvd__free((void *)(uintptr_t)m->rope.coarse);
}

void kvd__rope_at(const kvd_rope *r, int64_t p, float *cs)
{
    const double *a = r->coarse + (p / 64) * r->n_pairs * 2, *b = r->fine + (p % 64) * r->n_pairs * 2;
    for (int i = 0; i < r->n_pairs; i++) {
        double ca = a[2 * i], sa = a[2 * i + 1], cb = b[2 * i], sb = b[2 * i + 1];
        cs[2 * i] = (float)(ca * cb - sa * sb);
        cs[2 * i + 1] = (float)(sa * cb + ca * sb);
    }
}
