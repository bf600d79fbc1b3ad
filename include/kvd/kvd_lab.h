/* KV-Direct laboratory: read and change what flows through a pass, and rebuild
 * K and V from a residual. For researchers; on quantised files, cached or not,
 * with the bits of ordinary runs.
 *
 * Same conventions as kvd.h. Shapes: a residual is [d_model] f32; K and V of a
 * position are [n_kv_heads][d_head] f32, K rotated to its absolute position. */
#ifndef KVD_LAB_H
#define KVD_LAB_H

#include "kvd/kvd.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Called during kvd_session_feed and kvd_generate on the calling thread, for
 * every row of the pass from position from_pos on, recomputed positions included.
 * Within a layer rows ascend in each tap; a row's weights come before its attention.
 * Pointers are valid for the call; what is not const may be changed, and the pass goes
 * on with it. Any may be NULL. Watching costs barriers in each layer; nothing when no
 * taps are set. q: [n_heads][d_head].
 * A change stays in the cache as long as what was made of it does. A position that is
 * rebuilt later is shown again: taps that stay set and go by (layer, position) give the
 * same bits under any budget. Under a lossy policy kv_made, kv_read and weights are not
 * called: what is kept there has no row per position. */
typedef struct kvd_lab_taps {
    void *ctx;
    int64_t from_pos; /* rows of positions below are not shown; 0: all are */
    /* Residual entering layer (0 .. n_layers - 1), or, as layer n_layers, the one
     * leaving the last layer (only for rows whose logits are wanted). */
    void (*residual)(void *ctx, int layer, int64_t pos, float *h);
    /* q, K and V as their products leave them (bias included), before QK-norm and
     * rotation. */
    void (*projected)(void *ctx, int layer, int64_t pos, float *q, float *k, float *v);
    /* K and V as computed, before rounding to the KV type. */
    void (*kv_made)(void *ctx, int layer, int64_t pos, float *k, float *v);
    /* K and V as attention reads them, after rounding. */
    void (*kv_read)(void *ctx, int layer, int64_t pos, const float *k, const float *v);
    /* What attention gives each query head, before W_o. out: [n_heads][d_head]. At the
     * last layer only rows whose logits are wanted get here and to weights. */
    void (*attention)(void *ctx, int layer, int64_t pos, float *out);
    /* Softmax weights of a query head over positions first .. first + n - 1, computed
     * apart from the engine's by plain loops: equal to them but for the last bits. Slow
     * (one thread), and a pass then takes a copy of one layer's K as f32 from the compute
     * account, beside the budget; KVD_E_NOMEM where that fails. */
    void (*weights)(void *ctx, int layer, int64_t pos, int head, int64_t first, int64_t n, const float *p);
} kvd_lab_taps;

/* Copies *taps; NULL removes them. A pass that is under way, when a callback sets them,
 * goes on with those that it began with. */
KVD_API void kvd_lab_set_taps(kvd_session *s, const kvd_lab_taps *taps);

/* K and V of position pos at a layer from the residual entering it (paper: Eq.
 * 13-14), rounded to the session's KV type: the bits that attention reads if
 * residual is the bits that entered the layer.
 * 0, KVD_E_RANGE, KVD_E_NUMERIC. A computing call, of which there is one at a time per
 * model: KVD_E_ARG from a tap. */
KVD_API int kvd_lab_reconstruct(kvd_session *s, int layer, int64_t pos, const float *residual, float *k, float *v,
                                kvd_error *err);

/* The same for n positions at once, on the model's threads: what recomputing costs
 * when the residual of each layer is at hand. pos: [n], in any order; residuals:
 * [n][d_model]; k, v: [n][n_kv_heads][d_head], unspecified after KVD_E_NUMERIC. The
 * same bits as one by one. */
KVD_API int kvd_lab_reconstruct_rows(kvd_session *s, int layer, int64_t n, const int64_t *pos, const float *residuals,
                                     float *k, float *v, kvd_error *err);

/* Matrices of a layer as the file holds them, y = W x + b. */
typedef enum kvd_lab_matrix { KVD_LAB_WQ, KVD_LAB_WK, KVD_LAB_WV, KVD_LAB_WO, KVD_LAB_GATE, KVD_LAB_UP, KVD_LAB_DOWN } kvd_lab_matrix;
/* Dequantised: w [n_rows][n_columns] (NULL: the shape only), bias [n_rows] (may be
 * NULL; zeros where there is none). A query head's rows in WQ, a KV head's in WK and
 * WV lie together; WK and WQ of `llama` files have the rows of a head permuted
 * alike. KVD_E_RANGE; KVD_E_ARG: the model was loaded without weights. Any thread. */
KVD_API int kvd_lab_get_matrix(const kvd_model *m, int layer, kvd_lab_matrix which, int64_t *n_rows, int64_t *n_columns,
                               float *w, float *bias, kvd_error *err);

/* A lossy policy: positions that a KV head has kept at a layer, *pos: [result]
 * ascending, borrowed until the next call on s. -1: an exact session (which keeps what
 * it likes), or no such layer or head. */
KVD_API int64_t kvd_lab_kept(const kvd_session *s, int layer, int kv_head, const int64_t **pos);

/* Test builds (-Dtest_hooks=true): change the stored K of (layer, pos) by one unit
 * in the last place, in every later pass. KVD_E_UNSUPPORTED in other builds. */
KVD_API int kvd_lab_inject(kvd_model *m, int layer, int64_t pos, kvd_error *err);

/* Test builds: sessions made from now on keep K and V of sliding-window layers
 * beyond the window. No bit of the output may depend on it. */
KVD_API int kvd_lab_keep_windows(kvd_model *m, bool on, kvd_error *err);

#ifdef __cplusplus
}
#endif
#endif
