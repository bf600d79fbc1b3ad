/* model: the steps that the forward pass (pass.c) is written in. Each is called
 * by every thread of the pool and does its share; where all must have finished
 * before the next may begin, pass.c says barrier().
 *
 * Who owns what: a product's output columns belong to the thread that owns the
 * panels; what is per row (norms, quantisation, rotation) belongs to the thread
 * that owns the row; attention units go to whoever is free, since no bit depends
 * on who computes them. With a single row (decode) per-row work is so small that
 * every thread does it for itself, which saves a barrier. */
#ifndef KVD_MODEL_STEPS_H
#define KVD_MODEL_STEPS_H

#include "model/pass.h"

/* Quantised forms of up to `rows` input rows of a product. */
typedef struct kvd_act_buffer {
    float *x;                /* [rows][ld_x]: a normed row */
    int8_t *q32, *q256;      /* [rows][ld_q] */
    float *d32, *s32, *d256; /* [rows][ld_d] */
    int32_t *b32, *b256;     /* [rows][ld_b] */
    int64_t ld_x, ld_q, ld_d, ld_b;
} kvd_act_buffer;

/* One thread's own buffers. */
typedef struct kvd_lane {
    float *attn;       /* scratch of attn_tile */
    float *M, *L, *O;  /* running softmax of a unit: [queries], [queries][d_head] */
    float *panel;      /* [max_k][16]: a dequantised panel (--activations f32) */
    float *row;        /* [d_model] */
    float *cs;         /* [n_rot/2][2]: cos, sin of a row */
    int32_t *lo, *hi;  /* [KVD__UNIT_ROWS] */
} kvd_lane;

enum { KVD__UNIT_ROWS = 32 }; /* rows of an attention unit, at most */

/* Thread 0's, for the tap `weights`; all NULL without it. n: tokens of the longest
 * span, in whole blocks. */
typedef struct kvd_probe {
    float *k;      /* [n][n_kv_heads*d_head]: K of the layer by position */
    float *p;      /* [n] */
    double *score; /* [n] */
} kvd_probe;

/* The state of a pass that all threads share. */
typedef struct kvd_run {
    struct kvd_model *m;
    const kvd_pass *p;
    const int64_t *positions; /* of the rows, where there is no pass (reconstruct.c) */
    int64_t n_rows;
    bool stop;                  /* written by thread 0 at the start of a chunk */
    bool cancelled;
    _Atomic int64_t failed;     /* least (layer << 40 | position) + 1 that was not finite; 0: none */
    _Atomic int64_t next_unit;
    /* Disk tier: the segment that attention reads now, on all threads; and what
     * went wrong with it. Written by thread 0 before a barrier. */
    kvd_spill_segment segment;
    int64_t step_tile, step_end_tile; /* tiles that are complete with it */
    bool step_last;
    int io_code;
    kvd_error io_error;
    kvd_probe probe;
} kvd_run;

/* A run as one thread sees it. */
typedef struct kvd_worker {
    kvd_run *run;
    struct kvd_model *m;
    const kvd_config *c;
    const kvd_kern *k;
    kvd_scratch *s;
    kvd_lane *lane;
    int tid, n_threads;
    uint64_t mark_ns; /* thread 0, when profiling: end of the stage before */
} kvd_worker;

/* Rows [row0, row0 + n) of the pass at one layer. */
typedef struct kvd_chunk {
    int layer;
    int64_t row0;
    int n;
    int first; /* index of row0 in the scratch's qkv rows: 0 but at the last layer */
    float *h;  /* [n][d_model]: the stream's rows as f32 */
} kvd_chunk;

/* A row's place. */
typedef struct kvd_row {
    int span;
    int64_t pos;
    int32_t id;
    bool want_logits;
} kvd_row;
kvd_row kvd__row_at(const kvd_pass *p, int64_t row);

/* Input rows made ready for products: f32 and the quantised forms asked for. */
typedef struct kvd_inputs {
    const float *x;
    int64_t ld_x;
    const kvd_act_buffer *b;
    int n;
} kvd_inputs;

/* A stage ends here; call it after the barrier. Costs nothing unless profiling. */
void kvd__stage_end(kvd_worker *w, kvd_stage stage);

/* Note that a value of a layer at a row's position is not finite. */
void kvd__fail_run(kvd_run *r, int layer, int64_t row);

/* Thread 0: ask for progress and cancellation, decide whether to stop. */
void kvd__chunk_begin(kvd_worker *w, const kvd_chunk *ch);
/* The f32 rows of a chunk, fetched from the stream; written back at the end. */
void kvd__chunk_fetch(kvd_worker *w, kvd_chunk *ch);
void kvd__chunk_return(kvd_worker *w, const kvd_chunk *ch);
/* Only the rows of a chunk whose logits are wanted (and what lies between). */
kvd_chunk kvd__chunk_wanted(const kvd_pass *p, kvd_chunk ch, int64_t d_model);

void kvd__embed(kvd_worker *w);

/* Norm (or not: norm NULL) and quantise ch->n rows of x for the products with
 * the given weights (n_w of them). Ends with a barrier if there is more than one
 * row. */
kvd_inputs kvd__inputs(kvd_worker *w, const kvd_chunk *ch, const float *x, int64_t ld_x, int64_t K, const float *norm,
                       const kvd_linear *const *weights, int n_w);

/* This thread's share of n_w products side by side: output columns of weight i
 * begin at y[i], rows ld[i] apart. */
void kvd__products(kvd_worker *w, const kvd_inputs *in, const kvd_linear *const *weights, float *const *y,
                   const int64_t *ld, int n_w);

/* QK-norm and RoPE of this thread's rows. _row: of one row (q may be NULL). */
void kvd__rotate(kvd_worker *w, const kvd_chunk *ch);
void kvd__rotate_row(kvd_worker *w, int layer, int64_t pos, float *q, float *k);
/* Store K and V of this thread's rows (the same rows as kvd__rotate). */
void kvd__store(kvd_worker *w, const kvd_chunk *ch);
/* Softmax attention of the chunk's rows into s->attn. May hold barriers. */
void kvd__attention(kvd_worker *w, const kvd_chunk *ch);
/* The K part and the V part of a block for one head: from the segment of the disk tier
 * that is there now, or through the block tables. */
void kvd__find_block(const kvd_worker *w, const kvd_kv *kv, int layer, int64_t block, int head, const void **k,
                     const void **v);
/* With a lossy policy (compacted.c): rotate, store, show the policy what it wants to
 * see, and at the feed's end let it choose; then attention over what was kept. */
void kvd__compact_store(kvd_worker *w, const kvd_chunk *ch);
void kvd__compact_attention(kvd_worker *w, const kvd_chunk *ch);
/* First position that a query at pos sees at a layer. */
int64_t kvd__first_seen(const kvd_config *c, int layer, int64_t pos);

/* y = act(gate) * up on the columns this thread has computed. */
void kvd__gate_columns(kvd_worker *w, const kvd_layer *y, int n);
/* h += y on the columns this thread has computed. */
void kvd__add_columns(kvd_worker *w, const kvd_linear *weight, const kvd_chunk *ch);
/* Post-norm variant: whole rows, by row owner. */
void kvd__add_normed(kvd_worker *w, const kvd_chunk *ch, const float *norm);

/* Final norm, output head and callback for the rows that want logits. */
void kvd__head(kvd_worker *w);

/* The laboratory's callbacks of a chunk (taps.c), called by all threads of a pass with
 * taps: what they show is complete before, and no thread goes on before they are done. */
void kvd__tap_residual(kvd_worker *w, const kvd_chunk *ch);
void kvd__tap_projected(kvd_worker *w, const kvd_chunk *ch);
void kvd__tap_kv_made(kvd_worker *w, const kvd_chunk *ch);
void kvd__tap_kv_read(kvd_worker *w, const kvd_chunk *ch);
void kvd__tap_attention(kvd_worker *w, const kvd_chunk *ch); /* weights and attention, row by row */
/* Thread 0: a segment of the disk tier is there (run->segment), for the weights. */
void kvd__tap_segment(kvd_worker *w, const kvd_chunk *ch);
/* What the taps of a pass need, before and after it. KVD_E_NOMEM. */
int kvd__tap_begin(kvd_run *r, kvd_error *err);
void kvd__tap_end(kvd_run *r);

static inline void kvd__barrier(kvd_worker *w) { kvd__pool_barrier(w->m->pool); }

#endif
