/* model: the pass, the one mechanism behind prefill, decode, recomputation and
 * verification (docs/memory.md, "The pass").
 *
 * A pass takes spans; each is a session's block tables and its rows: the evicted
 * prefix [0, recompute) and the new tokens [n_before, n_before + n_new), in
 * ascending position. It is layer-major: all rows go through layer l before any
 * goes through l + 1, so that one layer of scratch serves what is stored nowhere. */
#ifndef KVD_MODEL_PASS_H
#define KVD_MODEL_PASS_H

#include "kv/compact.h"
#include "kv/spill.h"
#include "model/model.h"

typedef struct kvd_span {
    kvd_kv *kv;         /* after kvd__kv_begin */
    const int32_t *ids; /* [n_before + n_new], by position */
    int64_t recompute, n_before, n_new;
    int64_t n_logits;   /* logits are wanted for the last n_logits rows */
    /* Disk tier: blocks [0, disk_blocks) are read back from spill; then recompute is
     * 0, the rows fit one chunk, and the pass has no other span. NULL: none. */
    kvd_spill *spill;
    int64_t disk_blocks;
} kvd_span;

/* Callbacks for the laboratory, on the calling thread, rows ascending within a
 * chunk; each may be NULL. What is not const they may change, and the pass goes on
 * with it. q: [n_heads*d_head]; k, v: [n_kv_heads*d_head]. */
typedef struct kvd_taps {
    void *ctx;
    int64_t from_pos; /* rows of positions below are not shown */
    /* The residual entering a layer (layer == n_layers: leaving the last one;
     * only rows whose logits are wanted get there). h: [d_model]. */
    void (*residual)(void *ctx, int span, int layer, int64_t pos, float *h);
    /* q, K and V as the products leave them, before QK-norm and rotation. */
    void (*projected)(void *ctx, int span, int layer, int64_t pos, float *q, float *k, float *v);
    /* K (rotated) and V as computed, before they are rounded and stored. */
    void (*kv_made)(void *ctx, int span, int layer, int64_t pos, float *k, float *v);
    /* K and V as attention reads them: read back from the blocks. */
    void (*kv_read)(void *ctx, int span, int layer, int64_t pos, const float *k, const float *v);
    /* Attention's output before W_o, [n_heads*d_head]. At the last layer, as weights,
     * for rows whose logits are wanted only. */
    void (*attention)(void *ctx, int span, int layer, int64_t pos, float *out);
    /* Softmax weights of a query head over positions [first, first + n). The pass then
     * takes K of a layer as f32 from the COMPUTE account. */
    void (*weights)(void *ctx, int span, int layer, int64_t pos, int head, int64_t first, int64_t n, const float *p);
} kvd_taps;

typedef struct kvd_pass {
    kvd_span *spans;
    int n_spans;
    void *stream; /* [rows of all spans][d_model] of stream_type */
    kvd_kvtype stream_type;
    const kvd_taps *taps; /* or NULL */
    kvd_compact *compact; /* a lossy policy's K and V, in place of the span's; one span then, nothing to recompute. NULL: exact */
    void *ctx;            /* of the two callbacks below; non-zero result cancels */
    int (*on_logits)(void *ctx, int span, int64_t pos, const float *logits);
    int (*on_progress)(void *ctx, int64_t done, int64_t total); /* in rows x layers */
} kvd_pass;

/* Run it. 0, KVD_E_NUMERIC (names layer and position), KVD_E_CANCELLED, with the tap
 * weights KVD_E_NOMEM, and with a spill what reading it gives (KVD_E_IO, KVD_E_CHECK;
 * kvd__spill_broken tells). */
int kvd__model_pass(struct kvd_model *m, const kvd_pass *p, kvd_error *err);

/* K and V of n positions at one layer from the residuals entering it, by the same
 * kernels in the same order, rounded to kv_type as if stored: what the paper calls
 * reconstruction (arXiv 2603.19664, Eq. 13-14). The bits do not depend on n. Uses the
 * model's scratch like a pass (reconstruct.c). residuals: [n][d_model]; k, v:
 * [n][n_kv_heads*d_head] f32, unspecified on failure. */
int kvd__model_reconstruct(struct kvd_model *m, int layer, int64_t n, const int64_t *positions, const float *residuals,
                           kvd_kvtype kv_type, float *k, float *v, kvd_error *err);

/* Value i of a row of stored values. */
float kvd__kv_value(const void *values, kvd_kvtype t, int64_t i);
/* Read back what is stored at a position. */
void kvd__kv_read(const kvd_kv *kv, int layer, int64_t pos, float *k, float *v);

#endif
