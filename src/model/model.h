/* model: a loaded model, bound to tensors whose type and shape were checked, and
 * the forward pass over it.
 *
 * Layer: above base, gguf, quant, kern, token and kv; gen plans a pass, model
 * runs it. A kvd_model is immutable after loading but for its ledger and its
 * compute scratch, which one pass at a time may use. */
#ifndef KVD_MODEL_MODEL_H
#define KVD_MODEL_MODEL_H

#include "base/pool.h"
#include "gguf/gguf.h"
#include "kern/kern.h"
#include "kv/kv.h"
#include "kv/plan.h"
#include "model/config.h"
#include "token/chat.h"
#include "token/token.h"

/* y[n] = W[n][k] x[k] (+ bias[n]); W as R16 panels. */
typedef struct kvd_linear {
    const char *panels; /* [n_panels][panel_bytes] */
    const float *bias;  /* [16*n_panels] f32, or NULL */
    kvd_dtype type;
    int64_t n, k, n_panels, panel_bytes;
} kvd_linear;

typedef struct kvd_layer {
    const float *attn_norm, *ffn_norm;           /* [d_model] */
    const float *attn_post_norm, *ffn_post_norm; /* [d_model] or NULL */
    const float *q_norm, *k_norm;                /* [d_head] or NULL */
    kvd_linear q, k, v, o, gate, up, down;
} kvd_layer;

/* cos and sin of p*f_i = (64*(p/64))*f_i + (p%64)*f_i, in f64 (docs/numerics.md). */
typedef struct kvd_rope {
    int n_pairs;
    const double *coarse; /* [ceil(n_ctx/64)][n_pairs][2] cos, sin of 64*j*f_i */
    const double *fine;   /* [64][n_pairs][2] */
} kvd_rope;

/* Buffers of a pass that grow with the chunk and not with context. One per
 * model. C = chunk rows. */
typedef struct kvd_scratch {
    int chunk;
    int64_t max_k;                     /* the widest input of a product */
    int64_t ld_qkv, ld_ffn, ld_vocab;  /* row lengths, multiples of 16 */
    int64_t k_column, v_column;        /* where k and v begin in a qkv row */
    float *qkv;                        /* [C][ld_qkv]: q heads, k heads, v heads */
    float *attn;                       /* [C][n_heads*d_head] */
    float *gate, *up;                  /* [C][ld_ffn] */
    float *y;                          /* [C][d_model]: a product's output before it joins the stream */
    float *h;                          /* [C][d_model]: the stream's rows as f32, for 2-byte streams */
    float *logits;                     /* [KVD__HEAD_ROWS][ld_vocab] */
    struct kvd_act_buffer *acts;       /* [1 + n_threads]: shared one, then one row each */
    struct kvd_lane *lanes;            /* [n_threads] */
    float *part_m, *part_l, *part_o;   /* decode: partial tiles, [KVD__WAVE_TILES][n_heads](d_head) */
    float *state_m, *state_l;          /* [n_kv_heads][C][group]: softmax states between segments of the disk tier */
} kvd_scratch;

enum {
    KVD__HEAD_ROWS = 8,   /* rows whose logits are computed together */
    KVD__WAVE_TILES = 64  /* tiles between two ordered merges in decode */
};

/* What a pass spends its time on (--profile): X(id, name) */
#define KVD_STAGES(X)                                                          \
    X(EMBED, "embed")                                                          \
    X(QKV, "norm, q k v")                                                      \
    X(STORE, "rotate, store")                                                  \
    X(ATTENTION, "attention")                                                  \
    X(OUTPUT, "attention output")                                              \
    X(FFN, "norm, gate up")                                                    \
    X(DOWN, "down")                                                            \
    X(HEAD, "output head")

typedef enum kvd_stage {
#define KVD_X(id, name) KVD_STAGE_##id,
    KVD_STAGES(KVD_X)
#undef KVD_X
    KVD_STAGE_COUNT
} kvd_stage;

typedef struct kvd_share {
    kvd_dtype type;
    int64_t n_tensors, bytes;
} kvd_share;

struct kvd_model {
    kvd_config config;
    kvd_ledger *ledger; /* owned */
    kvd_pool *pool;
    kvd_kern kern;
    kvd_cpu cpu;
    bool has_weights, activations_f32, tied_head;
    char *name;
    uint8_t fingerprint[16];
    int64_t n_params, weight_bytes, file_bytes;
    kvd_share share[KVD_DTYPE_COUNT];

    kvd_linear embd, head;    /* [n_vocab][d_model]; the same panels if tied */
    const float *out_norm;
    kvd_layer *layers;
    kvd_rope rope, rope_local;
    void *weights;            /* one allocation that everything above points into */
    kvd_scratch scratch;

    kvd_tokenizer *tokenizer; /* NULL: the file has no vocabulary */
    char *tokenizer_model, *tokenizer_pre; /* as the file names them, "" if it does not */
    kvd_chat chat;
    char *chat_template;      /* the file's own text, or NULL */

    atomic_bool computing;    /* its threads and scratch are taken: kvd__model_claim */
    bool profile;             /* measure stages, on thread 0 */
    uint64_t stage_ns[KVD_STAGE_COUNT];

    bool keep_windows;        /* test builds: storage does not know of windows */
    int inject_layer;         /* test builds: flip a bit of K here; -1: off */
    int64_t inject_pos;
};

typedef struct kvd_load_options {
    int n_threads;
    kvd_cpu cpu;
    int chunk;
    bool activations_f32, vocab_only;
    bool synthetic;  /* made-up weights of the file's shapes and formats */
    int64_t budget_bytes;
    int64_t fail_at; /* fault injection, see base/ledger.h */
} kvd_load_options;

int kvd__model_load(struct kvd_model **out, const char *path, const kvd_load_options *o, kvd_error *err);
void kvd__model_free(struct kvd_model **m);

/* Measure how long passes and attention take (calibrate.c). The disk is not its
 * business: those two rates are left as they are. */
int kvd__calibrate(struct kvd_model *m, kvd_kvtype kv_type, kvd_plan_rates *r, kvd_error *err);

/* KV shape of a session over m. */
void kvd__model_kv_shape(const struct kvd_model *m, kvd_kvtype kv_type, kvd_kvtype stream, kvd_kv_shape *s);

int kvd__rope_create(struct kvd_model *m, const kvd_gguf *g, kvd_error *err);
void kvd__rope_destroy(struct kvd_model *m);
/* cos, sin of position p: cs [n_pairs][2], rounded once from f64. */
void kvd__rope_at(const kvd_rope *r, int64_t p, float *cs);

int kvd__scratch_create(struct kvd_model *m, int chunk, kvd_error *err);
void kvd__scratch_destroy(struct kvd_model *m);

#endif
