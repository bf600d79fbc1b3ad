/* quant: the R16 panel layouts, byte by byte. Kernels read panels through these
 * offsets; quant.c makes them from the field lists of the formats.
 *
 * A panel is the blocks of 16 rows, block after block of K ascending; below is
 * one such panel block, offsets in bytes. "[n][16][4]" is a *k-vector*: 64 bytes,
 * 4 consecutive bytes of each of 16 rows, byte (row, j) at 4*row + j. One
 * k-vector is one zmm, two ymm or four NEON registers whose 32-bit lane is a
 * row, which is what vpdpbusd, vpmaddubsw + vpmaddwd and sdot reduce. k-group g
 * is elements 4g .. 4g+3 of the block; element 4g + j sits in byte j.
 *
 * F32, F16, BF16   [k][16] elements, 64 or 32 bytes for each k.
 *
 *   Q4_0, IQ4_NL (288)                       Q4_1 (320)
 *     0  qs [4][16][4]  vector g:              0  qs as Q4_0
 *        low nibbles k-group g, high g+4     256  d  [16] f16
 *   256  d  [16] f16                         288  m  [16] f16
 *
 *   Q5_0 (352)                               Q5_1 (384)
 *     0  qs as Q4_0                            0  qs, 256 qh as Q5_0
 *   256  qh [1][16][4]  bit g: fifth bit     320  d  [16] f16
 *        of k-group g                        352  m  [16] f16
 *   320  d  [16] f16
 *
 *   Q8_0 (544)
 *     0  qs [8][16][4] i8  vector g: k-group g
 *   512  d  [16] f16
 *
 *   Q2_K (1344)
 *     0  qs [16][16][4]  vector 8h + v, bits 2g, 2g+1: k-group 32h + 8g + v
 *  1024  scales [16][16]  sub-block j: low nibble scale, high nibble minimum
 *  1280  d [16] f16   1312  dmin [16] f16
 *
 *   Q3_K (1760)
 *     0  qs [16][16][4]  as Q2_K
 *  1024  hmask [8][16][4]  vector v, bit 4h + g: high bit of k-group 32h + 8g + v
 *  1536  scales [12][16]  6 bits each, see q3_k.c
 *  1728  d [16] f16
 *
 *   Q4_K (2304)                              Q5_K (2816)
 *     0  qs [32][16][4]  vector 8c + v:        0  qs as Q4_K
 *        low nibbles k-group 16c + v,       2048  qh [8][16][4]  vector v, bit s:
 *        high 16c + 8 + v                         fifth bit of k-group 8s + v
 *  2048  scales [12][16], see q45_k.c       2560  scales [12][16]
 *  2240  d [16] f16   2272  dmin [16] f16   2752  d [16] f16   2784  dmin [16] f16
 *
 *   Q6_K (3360)
 *     0  ql [32][16][4]  vector 16h + 8u + v: low nibbles k-group 32h + 8u + v,
 *        high 32h + 16 + 8u + v
 *  2048  qh [16][16][4]  vector 8h + v, bits 2p, 2p+1: k-group 32h + 8p + v
 *  3072  scales [16][16] i8
 *  3328  d [16] f16
 *
 *   IQ4_XS (2176)
 *     0  qs [32][16][4]  vector 4s + g: low nibbles k-group 8s + g, high 8s + 4 + g
 *  2048  scales_l [4][16]   2112  scales_h [16] u16   2144  d [16] f16
 */
#ifndef KVD_QUANT_PANEL_H
#define KVD_QUANT_PANEL_H

#include <stdint.h>

/* KVD__<type>_<field>: offset in a panel block; _STRIDE: its bytes. */
enum {
    KVD__Q4_0_D = 256, KVD__Q4_0_STRIDE = 288, KVD__IQ4_NL_D = 256, KVD__IQ4_NL_STRIDE = 288,
    KVD__Q4_1_D = 256, KVD__Q4_1_M = 288, KVD__Q4_1_STRIDE = 320,
    KVD__Q5_0_QH = 256, KVD__Q5_0_D = 320, KVD__Q5_0_STRIDE = 352,
    KVD__Q5_1_QH = 256, KVD__Q5_1_D = 320, KVD__Q5_1_M = 352, KVD__Q5_1_STRIDE = 384,
    KVD__Q8_0_D = 512, KVD__Q8_0_STRIDE = 544,
    KVD__Q2_K_SCALES = 1024, KVD__Q2_K_D = 1280, KVD__Q2_K_DMIN = 1312, KVD__Q2_K_STRIDE = 1344,
    KVD__Q3_K_HMASK = 1024, KVD__Q3_K_SCALES = 1536, KVD__Q3_K_D = 1728, KVD__Q3_K_STRIDE = 1760,
    KVD__Q4_K_SCALES = 2048, KVD__Q4_K_D = 2240, KVD__Q4_K_DMIN = 2272, KVD__Q4_K_STRIDE = 2304,
    KVD__Q5_K_QH = 2048, KVD__Q5_K_SCALES = 2560, KVD__Q5_K_D = 2752, KVD__Q5_K_DMIN = 2784, KVD__Q5_K_STRIDE = 2816,
    KVD__Q6_K_QH = 2048, KVD__Q6_K_SCALES = 3072, KVD__Q6_K_D = 3328, KVD__Q6_K_STRIDE = 3360,
    KVD__IQ4_XS_SCALES_L = 2048, KVD__IQ4_XS_SCALES_H = 2112, KVD__IQ4_XS_D = 2144, KVD__IQ4_XS_STRIDE = 2176
};

/* The values of IQ4_NL and IQ4_XS (iq4.c). */
extern const int8_t kvd__iq4_table[16];

#endif
