/* quant: the block formats. One file per format holds its scalar truth: what a
 * block's bytes mean, and how 16 rows are laid out as an R16 panel.
 *
 * Layer: above base, below kern. Pure functions of their arguments; any thread.
 *
 * Panels. A matrix [N][K] (N outputs, K inputs, rows as in GGUF) is kept as
 * ceil(N/16) panels of 16 rows; missing rows of the last panel are zero bytes.
 * A panel has exactly 16 * row bytes, so that a packed matrix is as large as the
 * file's (padding apart). Inside, for each block of the row, ascending:
 * "[k-group of 4][16 rows][4 k]" and then the scales of 16 rows, field by field,
 * so that one vector register holds 16 outputs (docs/numerics.md, Panels). */
#ifndef KVD_QUANT_QUANT_H
#define KVD_QUANT_QUANT_H

#include <stdint.h>

#include "base/dtype.h"

enum { KVD__PANEL_ROWS = 16 };

/* Dequantise a row of k elements, one rounding per operation in the order of the
 * format's formula. src: row bytes as in GGUF. dst: [k] f32. */
void kvd__dequant_row(kvd_dtype t, const void *src, float *dst, int64_t k);

/* Bytes of one panel: 16 * kvd__row_bytes. */
static inline int64_t kvd__panel_bytes(kvd_dtype t, int64_t k)
{
    return KVD__PANEL_ROWS * kvd__row_bytes(t, k);
}

/* Lay out n_rows (1..16) consecutive GGUF rows as one panel. rows: [n_rows][row
 * bytes]; panel: [kvd__panel_bytes]. */
void kvd__panel_pack(kvd_dtype t, const void *rows, int n_rows, int64_t k, void *panel);

/* The inverse for one row r (0..15): GGUF row bytes out of a panel. */
void kvd__panel_unpack_row(kvd_dtype t, const void *panel, int r, int64_t k, void *row);

/* Dequantise row r of a panel: the same bits as kvd__dequant_row of the GGUF row.
 * This is how an embedding row is read from a tied head. */
void kvd__panel_dequant_row(kvd_dtype t, const void *panel, int r, int64_t k, float *dst);

/* Which activations a product with weights of this type reads. */
typedef enum kvd_act_kind {
    KVD_ACT_F32,   /* float weights: the f32 activations themselves */
    KVD_ACT_Q8_32, /* 32-element weight blocks: 8 bit, a scale per 32 */
    KVD_ACT_Q8_256 /* 256-element weight blocks: 8 bit, a scale per 256 */
} kvd_act_kind;

kvd_act_kind kvd__dtype_act(kvd_dtype t);

#endif
