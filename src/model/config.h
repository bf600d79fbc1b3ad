/* model: the hyperparameters of a decoder-only transformer, as one flat record
 * that the layer loop (pass.c) reads. A family (llama.c, qwen2.c, ...) fills what
 * differs; config.c reads and bounds what all share. */
#ifndef KVD_MODEL_CONFIG_H
#define KVD_MODEL_CONFIG_H

#include <stdbool.h>
#include <stdint.h>

#include "gguf/gguf.h"
#include "kv/kv.h"

typedef struct kvd_config {
    char arch[16];
    int n_layers, d_model, n_heads, n_kv_heads, d_head, d_ffn, n_vocab;
    int n_ctx;            /* trained context, in positions */
    int n_rot;            /* values of a head that RoPE turns */
    float norm_eps;
    float attn_scale;     /* of q.k */
    float embd_scale;     /* Gemma: sqrt(d_model); 1: none */
    double rope_base, rope_base_local;
    double rope_linear;   /* positions of global layers are divided by it; 1: none */
    bool rope_interleaved;
    bool qk_norm;         /* RMSNorm of each q and k head before RoPE */
    bool post_norms;      /* RMSNorm of the attention's and FFN's output before the add */
    bool gelu;            /* else SiLU */
    int window;           /* sliding window of local layers, in positions; 0: none */
    uint8_t local[KVD__MAX_LAYERS];
} kvd_config;

/* Read "<arch>.*", bound every number before it enters arithmetic, and let the
 * family fill the rest. KVD_E_UNSUPPORTED names an unknown architecture or
 * feature; KVD_E_GGUF_BOUNDS a number that no such model can have. */
int kvd__config_read(kvd_config *c, const kvd_gguf *g, kvd_error *err);

/* The families. Each sets what differs from the defaults of config.c. */
int kvd__family_llama(kvd_config *c, const kvd_gguf *g, kvd_error *err);
int kvd__family_qwen2(kvd_config *c, const kvd_gguf *g, kvd_error *err);
int kvd__family_qwen3(kvd_config *c, const kvd_gguf *g, kvd_error *err);
int kvd__family_gemma3(kvd_config *c, const kvd_gguf *g, kvd_error *err);

/* For families: "<arch>.<suffix>", with a default when the key is absent. */
int kvd__config_int(const kvd_config *c, const kvd_gguf *g, const char *suffix, int64_t min, int64_t max,
                    int64_t absent, int *out, kvd_error *err);
int kvd__config_real(const kvd_config *c, const kvd_gguf *g, const char *suffix, double min, double max,
                     double absent, double *out, kvd_error *err);

/* f32 of 1/sqrt(n), computed in f64. */
float kvd__inv_sqrt(int n);

#endif
