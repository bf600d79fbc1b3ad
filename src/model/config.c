#include "model/config.h"

#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "base/math64.h"

static const struct {
    const char *arch;
    int (*fill)(kvd_config *, const kvd_gguf *, kvd_error *);
} families[] = {
    {"llama", kvd__family_llama},
    {"qwen2", kvd__family_qwen2},
    {"qwen3", kvd__family_qwen3},
    {"gemma3", kvd__family_gemma3},
};

enum { REQUIRED = -1 }; /* as `absent`: the key must be there */

int kvd__config_int(const kvd_config *c, const kvd_gguf *g, const char *suffix, int64_t min, int64_t max,
                    int64_t absent, int *out, kvd_error *err)
{
    char key[96];
    snprintf(key, sizeof key, "%s.%s", c->arch, suffix);
    uint64_t v = 0;
    if (!kvd__gguf_has(g, key)) {
        if (absent == REQUIRED)
            return kvd__fail(err, KVD_E_GGUF_MISSING, "missing key %s", key);
        v = (uint64_t)absent;
    } else {
        int rc = kvd__gguf_u64(g, key, &v, err);
        if (rc)
            return rc;
    }
    if (v < (uint64_t)min || v > (uint64_t)max)
        return kvd__fail(err, KVD_E_GGUF_BOUNDS, "%s = %llu is not in %lld..%lld", key, (unsigned long long)v,
                         (long long)min, (long long)max);
    *out = (int)v;
    return 0;
}

int kvd__config_real(const kvd_config *c, const kvd_gguf *g, const char *suffix, double min, double max,
                     double absent, double *out, kvd_error *err)
{
    char key[96];
    snprintf(key, sizeof key, "%s.%s", c->arch, suffix);
    double v = absent;
    if (kvd__gguf_has(g, key)) {
        int rc = kvd__gguf_f64(g, key, &v, err);
        if (rc)
            return rc;
    }
    if (!(v >= min && v <= max))
        return kvd__fail(err, KVD_E_GGUF_BOUNDS, "%s = %g is not in %g..%g", key, v, min, max);
    *out = v;
    return 0;
}

/* f32 of 1/sqrt(n) in f64; sqrt is correctly rounded and no libm call. */
float kvd__inv_sqrt(int n) { return (float)(1.0 / __builtin_sqrt((double)n)); }

static int read_shape(kvd_config *c, const kvd_gguf *g, kvd_error *err)
{
    int rc;
    double eps = 0;
    if ((rc = kvd__config_int(c, g, "block_count", 1, KVD__MAX_LAYERS, REQUIRED, &c->n_layers, err)) ||
        (rc = kvd__config_int(c, g, "embedding_length", 32, 65536, REQUIRED, &c->d_model, err)) ||
        (rc = kvd__config_int(c, g, "attention.head_count", 1, 512, REQUIRED, &c->n_heads, err)) ||
        (rc = kvd__config_int(c, g, "attention.head_count_kv", 1, 512, c->n_heads, &c->n_kv_heads, err)) ||
        (rc = kvd__config_int(c, g, "feed_forward_length", 32, 1 << 20, REQUIRED, &c->d_ffn, err)) ||
        (rc = kvd__config_int(c, g, "context_length", 1, 1 << 24, REQUIRED, &c->n_ctx, err)) ||
        (rc = kvd__config_int(c, g, "attention.key_length", 1, KVD__MAX_D_HEAD, c->d_model / c->n_heads, &c->d_head,
                              err)) ||
        (rc = kvd__config_int(c, g, "rope.dimension_count", 2, c->d_head, c->d_head, &c->n_rot, err)) ||
        (rc = kvd__config_real(c, g, "attention.layer_norm_rms_epsilon", 0, 1, 1e-5, &eps, err)) ||
        (rc = kvd__config_real(c, g, "rope.freq_base", 1, 1e12, 10000, &c->rope_base, err)))
        return rc;
    c->norm_eps = (float)eps;
    int d_value = c->d_head;
    if ((rc = kvd__config_int(c, g, "attention.value_length", 1, KVD__MAX_D_HEAD, c->d_head, &d_value, err)))
        return rc;
    if (d_value != c->d_head)
        return kvd__fail(err, KVD_E_UNSUPPORTED, "value heads of another size (%d) than key heads (%d) are not supported",
                         d_value, c->d_head);
    if (c->n_heads % c->n_kv_heads)
        return kvd__fail(err, KVD_E_GGUF_BOUNDS, "%d query heads are no multiple of %d KV heads", c->n_heads, c->n_kv_heads);
    if (c->d_head % 8 || c->n_rot % 2 || c->d_model % 32 || c->d_ffn % 32 || c->n_heads * c->d_head % 32)
        return kvd__fail(err, KVD_E_UNSUPPORTED,
                         "sizes must be multiples of 32 and head sizes of 8: d %d, ffn %d, heads %d x %d", c->d_model,
                         c->d_ffn, c->n_heads, c->d_head);
    return 0;
}

/* Refuse, by name, what would silently change the arithmetic. */
static int refuse_unknown(const kvd_config *c, const kvd_gguf *g, kvd_error *err)
{
    int n = 0, rc;
    if ((rc = kvd__config_int(c, g, "expert_count", 0, INT32_MAX, 0, &n, err)))
        return rc;
    if (n)
        return kvd__fail(err, KVD_E_UNSUPPORTED, "mixture-of-experts models are not supported (%s.expert_count = %d)", c->arch, n);
    char key[96];
    snprintf(key, sizeof key, "%s.rope.scaling.type", c->arch);
    kvd_str s;
    if (kvd__gguf_has(g, key)) {
        if ((rc = kvd__gguf_str(g, key, &s, err)))
            return rc;
        bool known = (s.n == 4 && !memcmp(s.data, "none", 4)) || (s.n == 6 && !memcmp(s.data, "linear", 6));
        if (!known)
            return kvd__fail(err, KVD_E_UNSUPPORTED, "RoPE scaling \"%.*s\" is not supported", (int)(s.n < 32 ? s.n : 32), s.data);
    }
    static const char *const refused[] = {"attn_logit_softcapping", "final_logit_softcapping", "ssm.state_size",
                                          "attention.clamp_kqv", "pooling_type", "logit_scale", "residual_scale",
                                          "attention.scale"};
    for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++) {
        snprintf(key, sizeof key, "%s.%s", c->arch, refused[i]);
        double v = 0;
        if (kvd__gguf_has(g, key) && (kvd__gguf_f64(g, key, &v, NULL) || v != 0))
            return kvd__fail(err, KVD_E_UNSUPPORTED, "%s is not supported", key);
    }
    bool causal = true;
    snprintf(key, sizeof key, "%s.attention.causal", c->arch);
    if (kvd__gguf_has(g, key) && (rc = kvd__gguf_bool(g, key, &causal, err)))
        return rc;
    return causal ? 0 : kvd__fail(err, KVD_E_UNSUPPORTED, "%s = false is not supported", key);
}

/* The divisor of positions on global layers. A factor without a type is linear;
 * old files say rope.scale_linear. 0 and other types than linear: none. */
static int read_rope_scaling(kvd_config *c, const kvd_gguf *g, kvd_error *err)
{
    char key[96];
    kvd_str type = {0};
    double old = 1;
    int rc;
    if ((rc = kvd__config_real(c, g, "rope.scale_linear", 0, 1e6, 1, &old, err)) ||
        (rc = kvd__config_real(c, g, "rope.scaling.factor", 0, 1e6, old, &c->rope_linear, err)))
        return rc;
    snprintf(key, sizeof key, "%s.rope.scaling.type", c->arch);
    kvd__gguf_str(g, key, &type, NULL);
    if ((type.n && type.n != 6) || c->rope_linear == 0) /* refuse_unknown has seen it: "none" */
        c->rope_linear = 1;
    return 0;
}

int kvd__config_read(kvd_config *c, const kvd_gguf *g, kvd_error *err)
{
    *c = (kvd_config){.rope_linear = 1, .embd_scale = 1};
    kvd_str arch;
    int rc = kvd__gguf_str(g, "general.architecture", &arch, err);
    if (rc)
        return rc;
    size_t f = 0, n = sizeof families / sizeof families[0];
    while (f < n && !(arch.n == strlen(families[f].arch) && !memcmp(arch.data, families[f].arch, arch.n)))
        f++;
    if (f == n)
        return kvd__fail(err, KVD_E_UNSUPPORTED,
                         "architecture \"%.*s\" is not supported (known: llama, qwen2, qwen3, gemma3)",
                         (int)(arch.n < 64 ? arch.n : 64), arch.data);
    memcpy(c->arch, arch.data, arch.n);
    if ((rc = read_shape(c, g, err)) || (rc = refuse_unknown(c, g, err)))
        return rc;
    c->attn_scale = kvd__inv_sqrt(c->d_head);
    if ((rc = read_rope_scaling(c, g, err)))
        return rc;
    c->rope_base_local = c->rope_base;
    return families[f].fill(c, g, err);
}
