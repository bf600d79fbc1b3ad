/* quant, internal: how a format describes itself to quant.c.
 *
 * A panel block is the 16 rows' GGUF blocks with their bytes permuted, nothing
 * else: each field of the block is cut into units of 1, 2 or 4 bytes, and unit u
 * of row r lies at [u][r]. So a format is a list of fields in panel order plus a
 * function that says what a block's bytes mean, and packing, unpacking and
 * reading a row out of a panel are written once, for all formats. The resulting
 * layouts are drawn in panel.h, which is what kernels read. */
#ifndef KVD_QUANT_FORMAT_H
#define KVD_QUANT_FORMAT_H

#include <stdint.h>
#include <string.h>

#include "base/dtype.h"
#include "base/fma.h"
#include "base/half.h"

typedef struct kvd__field {
    int offset; /* in the GGUF block */
    int unit;   /* bytes that stay together: 1, 2 or 4; or KVD__UNIT_QH */
    int count;  /* units; 0 ends the list */
} kvd__field;

/* One u32 of fifth bits, bit i for element i. In the panel, element 4g + j has
 * bit g of byte j, so that a shift and a mask serve a whole k-group. */
enum { KVD__UNIT_QH = 0, KVD__MAX_FIELDS = 5, KVD__MAX_BLOCK_BYTES = 210 };

typedef struct kvd__format {
    /* n_blocks GGUF blocks -> f32, in the order of the format's formula. */
    void (*dequant)(const uint8_t *src, float *dst, int64_t n_blocks);
    kvd__field fields[KVD__MAX_FIELDS + 1]; /* together: each byte once */
} kvd__format;

extern const kvd__format kvd__format_f32, kvd__format_f16, kvd__format_bf16; /* float.c */
extern const kvd__format kvd__format_q4_0, kvd__format_q4_1;                 /* q4.c */
extern const kvd__format kvd__format_q5_0, kvd__format_q5_1;                 /* q5.c */
extern const kvd__format kvd__format_q8_0;                                   /* q8.c */
extern const kvd__format kvd__format_iq4_nl, kvd__format_iq4_xs;             /* iq4.c */
extern const kvd__format kvd__format_q2_k;                                   /* q2_k.c */
extern const kvd__format kvd__format_q3_k;                                   /* q3_k.c */
extern const kvd__format kvd__format_q4_k, kvd__format_q5_k;                 /* q45_k.c */
extern const kvd__format kvd__format_q6_k;                                   /* q6_k.c */

/* Blocks are packed without padding: their fields are read by memcpy. */
static inline uint16_t kvd__load_u16(const void *p)
{
    uint16_t v;
    memcpy(&v, p, 2);
    return v;
}

static inline uint32_t kvd__load_u32(const void *p)
{
    uint32_t v;
    memcpy(&v, p, 4);
    return v;
}

static inline float kvd__load_f16(const void *p) { return kvd__f16_to_f32(kvd__load_u16(p)); }

#endif
