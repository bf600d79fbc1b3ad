/* Products with float weights and 32-element blocks, and the quantisers, for
 * NEON with the dot product extension.
 *
 * SDOT is signed and adds in 32 bits: nothing saturates, and a weight of 4, 5 or 8
 * bits is used as it comes out of its nibble; the bias of centred formats is in
 * the side array (-bias*bsum), from which the sums start. */
#include "kern/arm/gemm_neon.h"

/* ---- 32-element blocks ---------------------------------------------------- */

/* Four rows of k-group g + 4*high; p: at the rows. */
INLINE int8x16_t weights(const kvd_dtype f, const uint8_t *p, const int g, const int high)
{
    if (f == KVD_Q8_0)
        return vreinterpretq_s8_u8(vld1q_u8(p + 64 * (g + 4 * high)));
    const uint8x16_t v = vld1q_u8(p + 64 * g), q = high ? vshrq_n_u8(v, 4) : vandq_u8(v, vdupq_n_u8(15));
    if (f == KVD_IQ4_NL)
        return vqtbl1q_s8(vld1q_s8(kvd__iq4_table), q);
    if (f != KVD_Q5_0 && f != KVD_Q5_1)
        return vreinterpretq_s8_u8(q);
    /* bit g + 4*high to bit 4 */
    const uint8x16_t qh = vshlq_u8(vld1q_u8(p + kvd__layout_of(f).qh), vdupq_n_s8((int8_t)(4 - g - 4 * high)));
    return vreinterpretq_s8_u8(vorrq_u8(q, vandq_u8(qh, vdupq_n_u8(16))));
}

/* The integer sums of half a block added to sum. q: at the half. */
INLINE void sum_half(const kvd_dtype f, const uint8_t *p, const int8_t *q, int64_t ld, const int high,
                     int32x4_t sum[][4], const int R, const int T)
{
    int8x16_t a[KVD__NEON_TOKENS], w[4];
    UNROLL(8) for (int t = 0; t < T; t++)
        a[t] = vld1q_s8(q + t * ld);
#define GROUP(g)                                                               \
    do {                                                                       \
        UNROLL(4) for (int r = 0; r < R; r++)                                  \
            w[r] = weights(f, p + 16 * r, g, high);                            \
        KVD__DOT(sum, w, a, g, R, T);                                          \
    } while (0)
    GROUP(0);
    GROUP(1);
    GROUP(2);
    GROUP(3);
#undef GROUP
}

/* One block's step of the rows from `row` on. side: da [T], then s or -bias*bsum
 * [T]. */
INLINE void step_32(const kvd_dtype f, const uint8_t *p, const int8_t *q, int64_t ld, const int32_t *side, int row,
                    float *chains, const int R, const int T)
{
    const kvd__layout o = kvd__layout_of(f);
    int32x4_t sum[KVD__NEON_TOKENS][4];
    UNROLL(8) for (int t = 0; t < T; t++)
        UNROLL(4) for (int r = 0; r < R; r++)
            sum[t][r] = vdupq_n_s32(f == KVD_Q4_0 || f == KVD_Q5_0 ? side[T + t] : 0);
    sum_half(f, p + 4 * row, q, ld, 0, sum, R, T);
    sum_half(f, p + 4 * row, q + 16, ld, 1, sum, R, T);
    UNROLL(4) for (int r = 0; r < R; r++) {
        const float32x4_t d = kvd__load_4_f16(p + o.d + 2 * row + 8 * r);
        const float32x4_t m = o.m >= 0 ? kvd__load_4_f16(p + o.m + 2 * row + 8 * r) : d;
        UNROLL(8) for (int t = 0; t < T; t++) {
            float *chain = chains + 16 * t + row + 4 * r;
            const float32x4_t scale = vmulq_n_f32(d, kvd__side_f32(side + t));
            float32x4_t v = vfmaq_f32(vld1q_f32(chain), scale, vcvtq_f32_s32(sum[t][r]));
            if (o.m >= 0)
                v = vfmaq_n_f32(v, m, kvd__side_f32(side + T + t));
            vst1q_f32(chain, v);
        }
    }
}

INLINE void tile_32(const kvd_dtype f, const kvd__tile *c, const int T)
{
    const int R = T <= 2 ? 4 : 2; /* with 4 for 3 and 4 tokens gcc 12 spills */
    for (int64_t i = 0; i < c->n_panels; i++) {
        const uint8_t *p = c->panels + i * c->panel_bytes;
        const int32_t *side = c->side;
        const int8_t *q = c->q;
        float chains[16 * KVD__NEON_TOKENS];
        kvd__start_chains(c, i, chains, T);
        for (int64_t b = 0; b < c->n_blocks; b++) {
            for (int row = 0; row < KVD__PANEL_ROWS; row += 4 * R)
                step_32(f, p, q, c->ld, side, row, chains, R, T);
            p += kvd__layout_of(f).stride;
            side += 2 * T;
            q += 32;
        }
        kvd__finish_chains(c, i, chains, T);
    }
}

#define DEFINE_TILE(TYPE, stem, T)                                             \
    static void tile_##stem##_##T(const kvd__tile *c) { tile_32(KVD_##TYPE, c, T); }

/* X(format, stem, side, bias) */
#define FORMATS(X)                                                             \
    X(Q4_0, q4_0, KVD__SIDE_BIAS, 8)                                           \
    X(Q4_1, q4_1, KVD__SIDE_S, 0)                                              \
    X(Q5_0, q5_0, KVD__SIDE_BIAS, 16)                                          \
    X(Q5_1, q5_1, KVD__SIDE_S, 0)                                              \
    X(Q8_0, q8_0, KVD__SIDE_BIAS, 0)                                           \
    X(IQ4_NL, iq4_nl, KVD__SIDE_BIAS, 0)

#define DEFINE(TYPE, stem, side, bias)                                                                              \
    KVD__1_TO_8(DEFINE_TILE, TYPE, stem)                                                                            \
    static kvd__tile_fn *const tiles_##stem[] = KVD__TILES_8(stem);                                                 \
    static const kvd__walk walk_##stem = {tiles_##stem, KVD__NEON_TOKENS, KVD__##TYPE##_STRIDE, 32, side, bias};    \
    static void gemm_##stem(float *y, int64_t ld_y, const void *panels, int64_t n_panels, int64_t K,                \
                            const kvd_acts *a, int64_t T)                                                           \
    {                                                                                                               \
        kvd__gemm_walk(&walk_##stem, y, ld_y, panels, n_panels, K, a, T);                                           \
    }
FORMATS(DEFINE)

/* ---- float weights -------------------------------------------------------- */

INLINE int float_bytes(const kvd_dtype f) { return f == KVD_F32 ? 4 : 2; }

/* 4 weights of one k, widened. */
INLINE float32x4_t widen(const kvd_dtype f, const uint8_t *p)
{
    if (f == KVD_F32)
        return vld1q_f32((const void *)p);
    const uint16x4_t h = vld1_u16((const void *)p);
    return f == KVD_F16 ? kvd__f16x4(h) : kvd__bf16x4(h);
}

/* A slice of R vectors of rows of one panel, from `row` on: all of the chunk. */
INLINE void slice_float(const kvd_dtype f, const kvd__tile *c, int64_t i, int row, const int R, const int T)
{
    const int bytes = float_bytes(f), stride = KVD__PANEL_ROWS * bytes;
    const uint8_t *p = c->panels + i * c->panel_bytes + row * bytes;
    const float *x = c->x;
    float *y = c->y + KVD__PANEL_ROWS * i + row;
    float32x4_t acc[KVD__NEON_TOKENS][4];
    UNROLL(8) for (int t = 0; t < T; t++)
        UNROLL(4) for (int r = 0; r < R; r++)
            acc[t][r] = c->carry ? vld1q_f32(y + t * c->ld_y + 4 * r) : vdupq_n_f32(0);
    int64_t k = 0;
    for (; k + 4 <= c->n_blocks; k += 4, x += 4, p += 4 * stride) {
        float32x4_t v[KVD__NEON_TOKENS];
        UNROLL(8) for (int t = 0; t < T; t++)
            v[t] = vld1q_f32(x + t * c->ld);
#define STEP(lane)                                                             \
    UNROLL(4) for (int r = 0; r < R; r++) {                                    \
        const float32x4_t w = widen(f, p + lane * stride + 4 * r * bytes);     \
        UNROLL(8) for (int t = 0; t < T; t++)                                  \
            acc[t][r] = vfmaq_laneq_f32(acc[t][r], w, v[t], lane);             \
    }
        STEP(0)
        STEP(1)
        STEP(2)
        STEP(3)
#undef STEP
    }
    for (; k < c->n_blocks; k++, x++, p += stride)
        UNROLL(4) for (int r = 0; r < R; r++) {
            const float32x4_t w = widen(f, p + 4 * r * bytes);
            UNROLL(8) for (int t = 0; t < T; t++)
                acc[t][r] = vfmaq_n_f32(acc[t][r], w, x[t * c->ld]);
        }
    UNROLL(8) for (int t = 0; t < T; t++)
        UNROLL(4) for (int r = 0; r < R; r++)
            vst1q_f32(y + t * c->ld_y + 4 * r, acc[t][r]);
}

INLINE void tile_float(const kvd_dtype f, const kvd__tile *c, const int T)
{
    const int R = T <= 4 ? 4 : 2;
    for (int64_t i = 0; i < c->n_panels; i++)
        for (int row = 0; row < KVD__PANEL_ROWS; row += 4 * R)
            slice_float(f, c, i, row, R, T);
}

#define DEFINE_FLOAT_TILE(TYPE, stem, T)                                       \
    static void tile_##stem##_##T(const kvd__tile *c) { tile_float(KVD_##TYPE, c, T); }

#define FLOAT_FORMATS(X) X(F32, f32) X(F16, f16) X(BF16, bf16)

#define DEFINE_FLOAT(TYPE, stem)                                                                                    \
    KVD__1_TO_8(DEFINE_FLOAT_TILE, TYPE, stem)                                                                      \
    static kvd__tile_fn *const tiles_##stem[] = KVD__TILES_8(stem);                                                 \
    static void gemm_##stem(float *y, int64_t ld_y, const void *panels, int64_t n_panels, int64_t K,                \
                            const kvd_acts *a, int64_t T)                                                           \
    {                                                                                                               \
        kvd__gemm_walk_float(tiles_##stem, KVD__NEON_TOKENS, float_bytes(KVD_##TYPE), y, ld_y, panels, n_panels, K, \
                             a, T);                                                                                 \
    }
FLOAT_FORMATS(DEFINE_FLOAT)

/* ---- quantised activations ------------------------------------------------ */

/* n (a multiple of 16) elements to q, their scale, and bsum of each n_sum (16 or
 * n). -1 if the largest magnitude is not finite: as integers, magnitudes of NaN
 * are above that of infinity. */
INLINE int quant_block(const float *x, const int n, int8_t *q, float *d, int32_t *bsum, const int n_sum)
{
    uint32x4_t max = vdupq_n_u32(0);
    for (int i = 0; i < n; i += 4)
        max = vmaxq_u32(max, vreinterpretq_u32_f32(vabsq_f32(vld1q_f32(x + i))));
    const uint32_t top = vmaxvq_u32(max);
    if (top >= 0x7f800000u)
        return -1;
    const float amax = kvd__f32_from_bits(top);
    const bool tiny = amax < 0x1p-100f;
    *d = tiny ? 0 : amax / 127;
    const float inverse = tiny ? 0 : 127 / amax;
    int32_t sum = 0;
    for (int i = 0; i < n; i += 16) {
        int16x4_t v[4];
        UNROLL(4) for (int l = 0; l < 4; l++) /* to nearest even */
            v[l] = vmovn_s32(vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x + i + 4 * l), inverse)));
        const int8x8_t low = vmovn_s16(vcombine_s16(v[0], v[1])), high = vmovn_s16(vcombine_s16(v[2], v[3]));
        const int8x16_t bytes = vcombine_s8(low, high);
        vst1q_s8(q + i, bytes);
        const int32_t s = vaddlvq_s8(bytes);
        if (n_sum == 16)
            bsum[i / 16] = s;
        else
            sum += s;
    }
    if (n_sum != 16)
        *bsum = sum;
    return 0;
}

KVD__DEFINE_QUANTISERS

/* ---- the table ------------------------------------------------------------ */

void kvd__kern_fill_gemm_neon(kvd_kern *k)
{
#define FILL(TYPE, stem, ...) k->gemm[KVD_##TYPE] = gemm_##stem;
    FLOAT_FORMATS(FILL)
    FORMATS(FILL)
    k->quant_q8_32 = quant_q8_32;
    k->quant_q8_256 = quant_q8_256;
    kvd__kern_fill_gemm_k_neon(k);
}
