/* kern/arm, internal: what the NEON products share. They walk their operands as
 * the x86 ones do (gemm_tiles.h: groups of panels, tiles of tokens, chunks of K,
 * a side array of scales and sums), with tiles of up to 8 tokens.
 *
 * A k-vector of a panel is four registers of four rows. A tile function works on
 * a *slice* of R of them: with more tokens fewer rows, so that 16 sums (R * T),
 * the activations of T tokens and the weights stay in 32 registers. SDOT by lane
 * takes 4 bytes of each of 4 rows and 4 activations of one token, broadcast from
 * the 16 that a register holds: no activation is ever loaded twice for a slice. */
#ifndef KVD_KERN_ARM_GEMM_NEON_H
#define KVD_KERN_ARM_GEMM_NEON_H

#include <string.h>

#include "kern/arm/neon.h"
#include "kern/gemm_tiles.h"

enum { KVD__NEON_TOKENS = 8 };

/* M(a, b, 1) .. M(a, b, 8), and the table of what they defined. */
#define KVD__1_TO_8(M, a, b) M(a, b, 1) M(a, b, 2) M(a, b, 3) M(a, b, 4) M(a, b, 5) M(a, b, 6) M(a, b, 7) M(a, b, 8)
#define KVD__TILES_8(s)                                                                                   \
    {0, tile_##s##_1, tile_##s##_2, tile_##s##_3, tile_##s##_4, tile_##s##_5, tile_##s##_6, tile_##s##_7, \
     tile_##s##_8}

INLINE float kvd__side_f32(const int32_t *p)
{
    float f;
    memcpy(&f, p, 4);
    return f;
}

INLINE float32x4_t kvd__load_4_f16(const uint8_t *p) { return kvd__f16x4(vld1_u16((const void *)p)); }

/* sum[t][r] += weights of k-group `lane` (literal) of 16 . activations a[t]. */
#define KVD__DOT(sum, w, a, lane, R, T)                                        \
    UNROLL(8) for (int t_ = 0; t_ < (T); t_++)                                 \
        UNROLL(4) for (int r_ = 0; r_ < (R); r_++)                             \
            (sum)[t_][r_] = vdotq_laneq_s32((sum)[t_][r_], (w)[r_], (a)[t_], lane)

/* The chains of a tile, [T][16]: from y or from +0, and back. */
INLINE void kvd__start_chains(const kvd__tile *c, int64_t i, float *v, const int T)
{
    const float *y = c->y + KVD__PANEL_ROWS * i;
    for (int t = 0; t < T; t++)
        if (c->carry)
            memcpy(v + 16 * t, y + t * c->ld_y, 16 * sizeof *v);
        else
            memset(v + 16 * t, 0, 16 * sizeof *v);
}

INLINE void kvd__finish_chains(const kvd__tile *c, int64_t i, const float *v, const int T)
{
    float *y = c->y + KVD__PANEL_ROWS * i;
    for (int t = 0; t < T; t++)
        memcpy(y + t * c->ld_y, v + 16 * t, 16 * sizeof *v);
}

#endif
