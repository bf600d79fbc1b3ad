/* The matrix products and the activation quantisers: the specification.
 *
 * Every output element is one chain, ascending in k (docs/numerics.md, Matrix
 * product). What a chain's step does is written out in float_step, step_32 and
 * step_256 below; all else here is unpacking, and loops whose order cannot show:
 * over panels, over tokens, and over the 16 rows of a panel.
 *
 * Integer sums are exact, so a block is first unpacked to small integers (the
 * bias of centred formats taken off: isum - bias*bsum is the same integer), and
 * the loops over rows are written so that a compiler can vectorise them.
 *
 * Compiled twice: with the software fma, and with KVD_FMA_HW. */
#include <string.h>

#include "base/fma.h"
#include "base/half.h"
#include "kern/kern.h"
#include "quant/panel.h"

enum { ROWS = KVD__PANEL_ROWS, TOKENS = 8 /* per unpacked block */ };

/* The rows of a panel. gcc 12 would unroll the loop first and then fail to see
 * vectors in the pieces. */
#define EACH_ROW _Pragma("GCC unroll 1") for (int r = 0; r < ROWS; r++)

/* ---- unpacking ------------------------------------------------------------ */

static void load_f16(const uint8_t *p, float out[ROWS])
{
    uint16_t h[ROWS];
    memcpy(h, p, sizeof h);
    EACH_ROW
        out[r] = kvd__f16_to_f32(h[r]);
}

/* n_bits bits, from bit `from` on, of the bytes of k-vector v, into w[0..3] at
 * bit `to`. */
static inline void put_bits(int16_t w[][ROWS], const uint8_t *v, int from, int n_bits, int to)
{
    const int mask = (1 << n_bits) - 1;
    for (int j = 0; j < 4; j++)
        EACH_ROW
            w[j][r] = (int16_t)(w[j][r] | (v[4 * r + j] >> from & mask) << to);
}

static inline void add_all(int16_t w[][ROWS], int n, int c)
{
    for (int k = 0; k < n; k++)
        EACH_ROW
            w[k][r] = (int16_t)(w[k][r] + c);
}

static inline void look_up(int16_t w[][ROWS], int n)
{
    for (int k = 0; k < n; k++)
        EACH_ROW
            w[k][r] = kvd__iq4_table[w[k][r]];
}

/* Nibbles of n_vectors k-vectors: vector g holds k-group g low and k-group
 * n_vectors + g high. */
static inline void put_nibbles(int16_t w[][ROWS], const uint8_t *v, int n_vectors)
{
    for (int g = 0; g < n_vectors; g++) {
        put_bits(w + 4 * g, v + 64 * g, 0, 4, 0);
        put_bits(w + 4 * (n_vectors + g), v + 64 * g, 4, 4, 0);
    }
}

static inline void put_fifth_bits(int16_t w[][ROWS], const uint8_t *qh)
{
    for (int g = 0; g < 8; g++)
        put_bits(w + 4 * g, qh, g, 1, 4);
}

/* A block of 32 k of 16 rows. w: zero on entry. m is left alone where the format
 * has none. */
typedef struct block_32 {
    int16_t w[32][ROWS];
    float d[ROWS], m[ROWS];
} block_32;

typedef void unpack_32_fn(block_32 *o, const uint8_t *p);

static void unpack_q4_0(block_32 *o, const uint8_t *p)
{
    put_nibbles(o->w, p, 4);
    add_all(o->w, 32, -8);
    load_f16(p + KVD__Q4_0_D, o->d);
}

static void unpack_q4_1(block_32 *o, const uint8_t *p)
{
    put_nibbles(o->w, p, 4);
    load_f16(p + KVD__Q4_1_D, o->d);
    load_f16(p + KVD__Q4_1_M, o->m);
}

static void unpack_q5_0(block_32 *o, const uint8_t *p)
{
    put_nibbles(o->w, p, 4);
    put_fifth_bits(o->w, p + KVD__Q5_0_QH);
    add_all(o->w, 32, -16);
    load_f16(p + KVD__Q5_0_D, o->d);
}

static void unpack_q5_1(block_32 *o, const uint8_t *p)
{
    put_nibbles(o->w, p, 4);
    put_fifth_bits(o->w, p + KVD__Q5_1_QH);
    load_f16(p + KVD__Q5_1_D, o->d);
    load_f16(p + KVD__Q5_1_M, o->m);
}

static void unpack_q8_0(block_32 *o, const uint8_t *p)
{
    for (int k = 0; k < 32; k++)
        EACH_ROW
            o->w[k][r] = (int8_t)p[64 * (k / 4) + 4 * r + k % 4];
    load_f16(p + KVD__Q8_0_D, o->d);
}

static void unpack_iq4_nl(block_32 *o, const uint8_t *p)
{
    put_nibbles(o->w, p, 4);
    look_up(o->w, 32);
    load_f16(p + KVD__Q4_0_D, o->d);
}

/* A block of 256 k of 16 rows. Scales and minima are per 16 k; formats that have
 * them per 32 name each twice. */
typedef struct block_256 {
    int16_t w[256][ROWS];
    int sc[16][ROWS], mn[16][ROWS];
    float d[ROWS], dmin[ROWS];
} block_256;

typedef void unpack_256_fn(block_256 *o, const uint8_t *p);

/* 2 bits of each of 64 k-groups, from the 16 k-vectors of Q2_K, Q3_K and Q6_K. */
static inline void put_pairs(int16_t w[][ROWS], const uint8_t *qs, int to)
{
    for (int g = 0; g < 64; g++)
        put_bits(w + 4 * g, qs + 64 * (8 * (g / 32) + g % 8), 2 * (g / 8 % 4), 2, to);
}

static void unpack_q2_k(block_256 *o, const uint8_t *p)
{
    put_pairs(o->w, p, 0);
    for (int j = 0; j < 16; j++)
        EACH_ROW {
            int s = p[KVD__Q2_K_SCALES + 16 * j + r];
            o->sc[j][r] = s & 15;
            o->mn[j][r] = s >> 4;
        }
    load_f16(p + KVD__Q2_K_D, o->d);
    load_f16(p + KVD__Q2_K_DMIN, o->dmin);
}

static void unpack_q3_k(block_256 *o, const uint8_t *p)
{
    const uint8_t *s = p + KVD__Q3_K_SCALES;
    put_pairs(o->w, p, 0);
    for (int g = 0; g < 64; g++)
        put_bits(o->w + 4 * g, p + KVD__Q3_K_HMASK + 64 * (g % 8), g / 8, 1, 2);
    add_all(o->w, 256, -4);
    for (int j = 0; j < 16; j++)
        EACH_ROW {
            int low = s[16 * (j % 8) + r] >> (4 * (j / 8)) & 15;
            int high = s[16 * (8 + j % 4) + r] >> (2 * (j / 4)) & 3;
            o->sc[j][r] = (low | high << 4) - 32;
        }
    load_f16(p + KVD__Q3_K_D, o->d);
}

/* The 6-bit scales and minima of Q4_K and Q5_K (q45_k.c). s: [12][16]. */
static void unpack_scales_6(block_256 *o, const uint8_t *s)
{
    for (int j = 0; j < 8; j++)
        EACH_ROW {
            int sc, m;
            if (j < 4) {
                sc = s[16 * j + r] & 63;
                m = s[16 * (j + 4) + r] & 63;
            } else {
                int low = s[16 * (j + 4) + r];
                sc = (low & 15) | (s[16 * (j - 4) + r] >> 6) << 4;
                m = low >> 4 | (s[16 * j + r] >> 6) << 4;
            }
            o->sc[2 * j][r] = o->sc[2 * j + 1][r] = sc;
            o->mn[2 * j][r] = o->mn[2 * j + 1][r] = m;
        }
}

static void unpack_q4_k(block_256 *o, const uint8_t *p)
{
    for (int c = 0; c < 4; c++)
        put_nibbles(o->w + 64 * c, p + 512 * c, 8);
    unpack_scales_6(o, p + KVD__Q4_K_SCALES);
    load_f16(p + KVD__Q4_K_D, o->d);
    load_f16(p + KVD__Q4_K_DMIN, o->dmin);
}

static void unpack_q5_k(block_256 *o, const uint8_t *p)
{
    for (int c = 0; c < 4; c++)
        put_nibbles(o->w + 64 * c, p + 512 * c, 8);
    for (int g = 0; g < 64; g++)
        put_bits(o->w + 4 * g, p + KVD__Q5_K_QH + 64 * (g % 8), g / 8, 1, 4);
    unpack_scales_6(o, p + KVD__Q5_K_SCALES);
    load_f16(p + KVD__Q5_K_D, o->d);
    load_f16(p + KVD__Q5_K_DMIN, o->dmin);
}

static void unpack_q6_k(block_256 *o, const uint8_t *p)
{
    for (int h = 0; h < 2; h++)
        put_nibbles(o->w + 128 * h, p + 1024 * h, 16);
    put_pairs(o->w, p + KVD__Q6_K_QH, 4);
    add_all(o->w, 256, -32);
    for (int j = 0; j < 16; j++)
        EACH_ROW
            o->sc[j][r] = (int8_t)p[KVD__Q6_K_SCALES + 16 * j + r];
    load_f16(p + KVD__Q6_K_D, o->d);
}

static void unpack_iq4_xs(block_256 *o, const uint8_t *p)
{
    for (int s = 0; s < 8; s++)
        put_nibbles(o->w + 32 * s, p + 256 * s, 4);
    look_up(o->w, 256);
    for (int j = 0; j < 8; j++)
        EACH_ROW {
            const uint8_t *high = p + KVD__IQ4_XS_SCALES_H + 2 * r;
            int low = p[KVD__IQ4_XS_SCALES_L + 16 * (j / 2) + r] >> (4 * (j % 2)) & 15;
            int ls = low | ((high[0] | high[1] << 8) >> (2 * j) & 3) << 4;
            o->sc[2 * j][r] = o->sc[2 * j + 1][r] = ls - 32;
        }
    load_f16(p + KVD__IQ4_XS_D, o->d);
}

/* ---- chains --------------------------------------------------------------- */

/* acc[r] = fma(w[r], x, acc[r]): one k. */
static inline void float_step(float acc[ROWS], const float w[ROWS], float x)
{
    EACH_ROW
        acc[r] = kvd__fmaf(w[r], x, acc[r]);
}

/* One block of 32 k with activations q, da, s. */
static void step_32(float acc[ROWS], const block_32 *b, bool has_min, const int8_t *q, float da, float s)
{
    int32_t isum[ROWS] = {0};
    for (int k = 0; k < 32; k++)
        EACH_ROW
            isum[r] += b->w[k][r] * q[k];
    EACH_ROW {
        acc[r] = kvd__fmaf(b->d[r] * da, (float)isum[r], acc[r]);
        if (has_min)
            acc[r] = kvd__fmaf(b->m[r], s, acc[r]);
    }
}

/* One block of 256 k. bsum: [16]. */
static void step_256(float acc[ROWS], const block_256 *b, bool has_min, const int8_t *q, float da,
                     const int32_t *bsum)
{
    int32_t S[ROWS] = {0}, M[ROWS] = {0};
    for (int j = 0; j < 16; j++) {
        int32_t isum[ROWS] = {0};
        for (int k = 16 * j; k < 16 * j + 16; k++)
            EACH_ROW
                isum[r] += b->w[k][r] * q[k];
        EACH_ROW
            S[r] += b->sc[j][r] * isum[r];
        if (has_min)
            EACH_ROW
                M[r] += b->mn[j][r] * bsum[j];
    }
    EACH_ROW {
        acc[r] = kvd__fmaf(b->d[r] * da, (float)S[r], acc[r]);
        if (has_min)
            acc[r] = kvd__fmaf(-(b->dmin[r] * da), (float)M[r], acc[r]);
    }
}

/* ---- products ------------------------------------------------------------- */

/* 16 weights of one k, widened. */
typedef void widen_fn(const uint8_t *p, float w[ROWS]);

static void widen_f32(const uint8_t *p, float w[ROWS]) { memcpy(w, p, ROWS * sizeof *w); }
static void widen_f16(const uint8_t *p, float w[ROWS]) { load_f16(p, w); }
static void widen_bf16(const uint8_t *p, float w[ROWS])
{
    uint16_t h[ROWS];
    memcpy(h, p, sizeof h);
    EACH_ROW
        w[r] = kvd__bf16_to_f32(h[r]);
}

static inline void put_tile(float *y, int64_t ld_y, float acc[][ROWS], int n)
{
    for (int t = 0; t < n; t++)
        memcpy(y + t * ld_y, acc[t], sizeof acc[t]);
}

static void gemm_float(widen_fn *widen, int elem_bytes, float *y, int64_t ld_y, const void *panels, int64_t n_panels,
                       int64_t K, const kvd_acts *a, int64_t T)
{
    const int64_t stride = (int64_t)ROWS * elem_bytes;
    for (int64_t i = 0; i < n_panels; i++)
        for (int64_t t0 = 0; t0 < T; t0 += TOKENS) {
            const int n = T - t0 < TOKENS ? (int)(T - t0) : TOKENS;
            float acc[TOKENS][ROWS] = {{0}};
            for (int64_t k = 0; k < K; k++) {
                float w[ROWS];
                widen((const uint8_t *)panels + (i * K + k) * stride, w);
                for (int t = 0; t < n; t++)
                    float_step(acc[t], w, a->x[(t0 + t) * a->ld_x + k]);
            }
            put_tile(y + t0 * ld_y + ROWS * i, ld_y, acc, n);
        }
}

static void gemm_32(unpack_32_fn *unpack, int64_t stride, bool has_min, float *y, int64_t ld_y,
                    const void *panels, int64_t n_panels, int64_t K, const kvd_acts *a, int64_t T)
{
    const int64_t n_blocks = K / 32;
    for (int64_t i = 0; i < n_panels; i++)
        for (int64_t t0 = 0; t0 < T; t0 += TOKENS) {
            const int n = T - t0 < TOKENS ? (int)(T - t0) : TOKENS;
            float acc[TOKENS][ROWS] = {{0}};
            for (int64_t b = 0; b < n_blocks; b++) {
                block_32 block = {0};
                unpack(&block, (const uint8_t *)panels + (i * n_blocks + b) * stride);
                for (int64_t t = t0; t < t0 + n; t++)
                    step_32(acc[t - t0], &block, has_min, a->q + t * a->ld_q + 32 * b, a->d[t * a->ld_d + b],
                            has_min ? a->s[t * a->ld_d + b] : 0);
            }
            put_tile(y + t0 * ld_y + ROWS * i, ld_y, acc, n);
        }
}

static void gemm_256(unpack_256_fn *unpack, int64_t stride, bool has_min, float *y,
                     int64_t ld_y, const void *panels, int64_t n_panels, int64_t K, const kvd_acts *a, int64_t T)
{
    const int64_t n_blocks = K / 256;
    for (int64_t i = 0; i < n_panels; i++)
        for (int64_t t0 = 0; t0 < T; t0 += TOKENS) {
            const int n = T - t0 < TOKENS ? (int)(T - t0) : TOKENS;
            float acc[TOKENS][ROWS] = {{0}};
            for (int64_t b = 0; b < n_blocks; b++) {
                block_256 block;
                memset(block.w, 0, sizeof block.w);
                unpack(&block, (const uint8_t *)panels + (i * n_blocks + b) * stride);
                for (int64_t t = t0; t < t0 + n; t++)
                    step_256(acc[t - t0], &block, has_min, a->q + t * a->ld_q + 256 * b, a->d[t * a->ld_d + b],
                             a->bsum + t * a->ld_b + 16 * b);
            }
            put_tile(y + t0 * ld_y + ROWS * i, ld_y, acc, n);
        }
}

/* ---- a panel as f32 ------------------------------------------------------- */

static void dequant_float(widen_fn *widen, int elem_bytes, float *dst, const void *panel, int64_t K)
{
    for (int64_t k = 0; k < K; k++)
        widen((const uint8_t *)panel + k * ROWS * elem_bytes, dst + k * ROWS);
}

static void dequant_32(unpack_32_fn *unpack, int64_t stride, bool has_min, float *dst, const void *panel, int64_t K)
{
    for (int64_t b = 0; b < K / 32; b++) {
        block_32 block = {0};
        unpack(&block, (const uint8_t *)panel + b * stride);
        for (int k = 0; k < 32; k++, dst += ROWS)
            EACH_ROW {
                const float q = (float)block.w[k][r];
                dst[r] = has_min ? kvd__fmaf(block.d[r], q, block.m[r]) : block.d[r] * q;
            }
    }
}

static void dequant_256(unpack_256_fn *unpack, int64_t stride, bool has_min, float *dst, const void *panel, int64_t K)
{
    for (int64_t b = 0; b < K / 256; b++) {
        block_256 block;
        memset(block.w, 0, sizeof block.w);
        unpack(&block, (const uint8_t *)panel + b * stride);
        for (int k = 0; k < 256; k++, dst += ROWS)
            EACH_ROW {
                const float q = (float)block.w[k][r], dl = block.d[r] * (float)block.sc[k / 16][r];
                dst[r] = has_min ? kvd__fmaf(dl, q, -(block.dmin[r] * (float)block.mn[k / 16][r])) : dl * q;
            }
    }
}

/* ---- quantised activations ------------------------------------------------ */

/* n elements to q, and their scale. -1 if the largest magnitude is infinite or
 * NaN: magnitudes compare as integers, so that a NaN is never lost. */
static int quant_block(const float *x, int n, int8_t *q, float *d)
{
    uint32_t max = 0;
    for (int i = 0; i < n; i++) {
        uint32_t u = kvd__f32_bits(x[i]) & 0x7fffffff;
        max = u > max ? u : max;
    }
    if (max >= 0x7f800000u)
        return -1;
    const float amax = kvd__f32_from_bits(max);
    if (amax < 0x1p-100f) {
        memset(q, 0, (size_t)n);
        *d = 0;
        return 0;
    }
    *d = amax / 127;
    const float inverse = 127 / amax;
    for (int i = 0; i < n; i++) {
        /* Adding 1.5 * 2^23 rounds to nearest even and leaves the integer in the
         * low bits: no libm, and the same on every machine. */
        float v = x[i] * inverse + 0x1.8p23f;
        q[i] = (int8_t)(kvd__f32_bits(v) - 0x4b400000u);
    }
    return 0;
}

static int32_t sum_bytes(const int8_t *q, int n)
{
    int32_t sum = 0;
    for (int i = 0; i < n; i++)
        sum += q[i];
    return sum;
}

static int quant_q8_32(const float *x, int64_t K, int8_t *q, float *d, float *s, int32_t *bsum)
{
    for (int64_t b = 0; b < K / 32; b++) {
        if (quant_block(x + 32 * b, 32, q + 32 * b, d + b))
            return -1;
        bsum[b] = sum_bytes(q + 32 * b, 32);
        s[b] = d[b] * (float)bsum[b];
    }
    return 0;
}

static int quant_q8_256(const float *x, int64_t K, int8_t *q, float *d, int32_t *bsum)
{
    for (int64_t b = 0; b < K / 256; b++)
        if (quant_block(x + 256 * b, 256, q + 256 * b, d + b))
            return -1;
    for (int64_t j = 0; j < K / 16; j++)
        bsum[j] = sum_bytes(q + 16 * j, 16);
    return 0;
}

/* ---- the table ------------------------------------------------------------ */

/* X(TYPE, stem, family, leading arguments of the family's functions) */
#define TYPES(X)                                                               \
    X(F32, f32, float, widen_f32, 4)                                           \
    X(F16, f16, float, widen_f16, 2)                                           \
    X(BF16, bf16, float, widen_bf16, 2)                                        \
    X(Q4_0, q4_0, 32, unpack_q4_0, KVD__Q4_0_STRIDE, false)                    \
    X(Q4_1, q4_1, 32, unpack_q4_1, KVD__Q4_1_STRIDE, true)                     \
    X(Q5_0, q5_0, 32, unpack_q5_0, KVD__Q5_0_STRIDE, false)                    \
    X(Q5_1, q5_1, 32, unpack_q5_1, KVD__Q5_1_STRIDE, true)                     \
    X(Q8_0, q8_0, 32, unpack_q8_0, KVD__Q8_0_STRIDE, false)                    \
    X(IQ4_NL, iq4_nl, 32, unpack_iq4_nl, KVD__Q4_0_STRIDE, false)              \
    X(Q2_K, q2_k, 256, unpack_q2_k, KVD__Q2_K_STRIDE, true)                    \
    X(Q3_K, q3_k, 256, unpack_q3_k, KVD__Q3_K_STRIDE, false)                   \
    X(Q4_K, q4_k, 256, unpack_q4_k, KVD__Q4_K_STRIDE, true)                    \
    X(Q5_K, q5_k, 256, unpack_q5_k, KVD__Q5_K_STRIDE, true)                    \
    X(Q6_K, q6_k, 256, unpack_q6_k, KVD__Q6_K_STRIDE, false)                   \
    X(IQ4_XS, iq4_xs, 256, unpack_iq4_xs, KVD__IQ4_XS_STRIDE, false)

#define DEFINE(TYPE, stem, family, ...)                                                                       \
    static void gemm_##stem(float *y, int64_t ld_y, const void *panels, int64_t n_panels, int64_t K,          \
                            const kvd_acts *a, int64_t T)                                                     \
    {                                                                                                         \
        gemm_##family(__VA_ARGS__, y, ld_y, panels, n_panels, K, a, T);                                       \
    }                                                                                                         \
    static void dequant_panel_##stem(float *dst, const void *panel, int64_t K)                                \
    {                                                                                                         \
        dequant_##family(__VA_ARGS__, dst, panel, K);                                                         \
    }
TYPES(DEFINE)

#ifdef KVD_FMA_HW
void kvd__kern_fill_gemm_scalar_fma(kvd_kern *k)
#else
void kvd__kern_fill_gemm_scalar(kvd_kern *k)
#endif
{
#define FILL(TYPE, stem, ...)                                                  \
    k->gemm[KVD_##TYPE] = gemm_##stem;                                         \
    k->dequant_panel[KVD_##TYPE] = dequant_panel_##stem;
    TYPES(FILL)
    k->quant_q8_32 = quant_q8_32;
    k->quant_q8_256 = quant_q8_256;
}
