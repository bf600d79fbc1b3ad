/* Products with float weights and 32-element blocks, and the quantisers, for
 * AVX-512 with VNNI.
 *
 * A k-vector of a panel is one register of 16 rows; vpdpbusd takes it as u8 and
 * the activations of one token, 4 bytes broadcast from memory, as s8. So weights
 * are made u8: centred formats stay as they are stored (0 .. 15, 0 .. 31), signed
 * ones get +128, and the sum starts at -bias*bsum instead of 0, which the side
 * array holds. The integer is the same one: nothing saturates in vpdpbusd.
 *
 * One step of a token on a block of 32 is 8 vpdpbusd, and a multiplication and
 * one or two fma, all on pipes that take one such instruction a cycle on Zen 4:
 * at most 512/11 = 46.5 (with a minimum) or 512/10 = 51.2 MAC a core cycle, of
 * which `checkasm --bench` shows 45 and 49 from 6 tokens on (EPYC, gcc 12).
 *
 * A single token is bound by memory: it takes two panels at a time, so that two
 * streams and twice the chains are in flight. */
#include "kern/x86/gemm_avx512.h"

#include "quant/panel.h"

/* ---- 32-element blocks ---------------------------------------------------- */

/* k-groups g and g + 4 of a block as u8. */
KVD__INLINE void unpack(const kvd_dtype f, const uint8_t *p, const int g, __m512i *lo, __m512i *hi)
{
    if (f == KVD_Q8_0) {
        const __m512i flip = _mm512_set1_epi8((char)0x80);
        *lo = _mm512_xor_si512(kvd__load(p + 64 * g), flip);
        *hi = _mm512_xor_si512(kvd__load(p + 64 * (g + 4)), flip);
        return;
    }
    const __m512i nibble = _mm512_set1_epi8(15), x = kvd__load(p + 64 * g);
    *lo = _mm512_and_si512(x, nibble);
    *hi = _mm512_and_si512(_mm512_srli_epi16(x, 4), nibble);
    if (f == KVD_Q5_0 || f == KVD_Q5_1) {
        const __m512i bit = _mm512_set1_epi8(16), qh = kvd__load(p + kvd__layout_of(f).qh);
        /* bit g to bit 4, bit g + 4 to bit 4; then or the masked bit in */
        *lo = _mm512_ternarylogic_epi32(*lo, _mm512_slli_epi16(qh, (unsigned)(4 - g)), bit, 0xf8);
        *hi = _mm512_ternarylogic_epi32(*hi, _mm512_srli_epi16(qh, (unsigned)g), bit, 0xf8);
    }
    if (f == KVD_IQ4_NL) {
        const __m512i table = _mm512_xor_si512(_mm512_broadcast_i32x4(_mm_loadu_si128((const void *)kvd__iq4_table)),
                                               _mm512_set1_epi8((char)0x80));
        *lo = _mm512_shuffle_epi8(table, *lo);
        *hi = _mm512_shuffle_epi8(table, *hi);
    }
}

/* One block's step for T tokens. side: da [T], then s or -bias*bsum [T]. */
KVD__INLINE void step_32(const kvd_dtype f, const uint8_t *p, const int8_t *const q[4], int64_t ld, const int32_t *side,
                         __m512 acc[], const int T)
{
    const kvd__layout o = kvd__layout_of(f);
    __m512i sum[KVD__AVX512_TOKENS];
    if (o.m >= 0) {
#define M(t) sum[t] = _mm512_setzero_si512()
        EACH_TOKEN(T, M);
#undef M
    } else {
#define M(t) sum[t] = kvd__bcast(side + T + t)
        EACH_TOKEN(T, M);
#undef M
    }
#define GROUP(g)                                                               \
    do {                                                                       \
        __m512i lo, hi;                                                        \
        unpack(f, p, g, &lo, &hi);                                             \
        kvd__dot(sum, lo, q, ld, 4 * g, T);                                    \
        kvd__dot(sum, hi, q, ld, 4 * g + 16, T);                               \
    } while (0)
    GROUP(0);
    GROUP(1);
    GROUP(2);
    GROUP(3);
#undef GROUP
    const __m512 d = kvd__load_16_f16(p + o.d);
#define M(t)                                                                   \
    acc[t] = _mm512_fmadd_ps(_mm512_mul_ps(d, kvd__bcast_f32(side + t)), _mm512_cvtepi32_ps(sum[t]), acc[t])
    EACH_TOKEN(T, M);
#undef M
    if (o.m >= 0) {
        const __m512 m = kvd__load_16_f16(p + o.m);
#define M(t) acc[t] = _mm512_fmadd_ps(m, kvd__bcast_f32(side + T + t), acc[t])
        EACH_TOKEN(T, M);
#undef M
    }
}

KVD__INLINE void tile_32(const kvd_dtype f, const kvd__tile *c, const int T)
{
    const int stride = kvd__layout_of(f).stride;
    for (int64_t i = 0; i < c->n_panels; i++) {
        const uint8_t *p = c->panels + i * c->panel_bytes;
        const int32_t *side = c->side;
        KVD__ROWS(int8_t, q, c->q, c->ld, T);
        __m512 acc[KVD__AVX512_TOKENS];
        kvd__start(c, i, T, acc);
        for (int64_t b = 0; b < c->n_blocks; b++) {
            if (T == 1)
                kvd__prefetch(p, stride);
            step_32(f, p, q, c->ld, side, acc, T);
            p += stride;
            side += 2 * T;
            KVD__ROWS_NEXT(q, 32);
        }
        kvd__finish(c, i, T, acc);
    }
}

#define DEFINE_TILE(TYPE, stem, T)                                             \
    static void tile_##stem##_##T(const kvd__tile *c)                          \
    {                                                                          \
        tile_32(KVD_##TYPE, c, T);                                             \
    }

/* X(format, stem, side, bias) */
#define FORMATS(X)                                                             \
    X(Q4_0, q4_0, KVD__SIDE_BIAS, 8)                                           \
    X(Q4_1, q4_1, KVD__SIDE_S, 0)                                              \
    X(Q5_0, q5_0, KVD__SIDE_BIAS, 16)                                          \
    X(Q5_1, q5_1, KVD__SIDE_S, 0)                                              \
    X(Q8_0, q8_0, KVD__SIDE_BIAS, 128)                                         \
    X(IQ4_NL, iq4_nl, KVD__SIDE_BIAS, 128)

#define DEFINE(TYPE, stem, side, bias)                                                               \
    KVD__1_TO_12(DEFINE_TILE, TYPE, stem)                                                            \
    static kvd__tile_fn *const tiles_##stem[] = KVD__TILES_12(stem);                                 \
    static const kvd__walk walk_##stem = {tiles_##stem, 12, KVD__##TYPE##_STRIDE, 32, side, bias};   \
    static void gemm_##stem(float *y, int64_t ld_y, const void *panels, int64_t n_panels, int64_t K, \
                            const kvd_acts *a, int64_t T)                                            \
    {                                                                                                \
        kvd__gemm_walk(&walk_##stem, y, ld_y, panels, n_panels, K, a, T);                            \
    }
FORMATS(DEFINE)

/* ---- float weights -------------------------------------------------------- */

KVD__INLINE int float_bytes(const kvd_dtype f) { return f == KVD_F32 ? 4 : 2; }

/* 16 weights of one k, widened. */
KVD__INLINE __m512 widen(const kvd_dtype f, const uint8_t *p)
{
    if (f == KVD_F32)
        return _mm512_loadu_ps(p);
    if (f == KVD_F16)
        return kvd__load_16_f16(p);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)p)), 16));
}

/* A step of two panels: below 7 tokens one panel's chains do not fill the fma
 * pipes. two: a constant. */
KVD__INLINE void step_float(const kvd_dtype f, const uint8_t *p0, const uint8_t *p1, const bool two,
                            const float *const x[4], int64_t ld, int at, __m512 acc0[], __m512 acc1[], const int T)
{
    const __m512 w0 = widen(f, p0), w1 = two ? widen(f, p1) : w0;
#define M(t)                                                                   \
    do {                                                                       \
        const __m512 v = kvd__bcast_f32(TOKEN_ROW(x, ld, t) + at);             \
        acc0[t] = _mm512_fmadd_ps(w0, v, acc0[t]);                             \
        if (two)                                                               \
            acc1[t] = _mm512_fmadd_ps(w1, v, acc1[t]);                         \
    } while (0)
    EACH_TOKEN(T, M);
#undef M
}

KVD__INLINE void panels_float(const kvd_dtype f, const kvd__tile *c, int64_t i, const bool two, const int T)
{
    const int stride = KVD__PANEL_ROWS * float_bytes(f);
    const uint8_t *p0 = c->panels + i * c->panel_bytes, *p1 = two ? p0 + c->panel_bytes : p0;
    KVD__ROWS(float, x, c->x, c->ld, T);
    __m512 acc0[KVD__AVX512_TOKENS], acc1[KVD__AVX512_TOKENS];
    kvd__start(c, i, T, acc0);
    if (two)
        kvd__start(c, i + 1, T, acc1);
    int64_t k = 0;
    for (; k + 4 <= c->n_blocks; k += 4) {
        if (T == 1) {
            kvd__prefetch(p0, 4 * stride);
            if (two)
                kvd__prefetch(p1, 4 * stride);
        }
        step_float(f, p0, p1, two, x, c->ld, 0, acc0, acc1, T);
        step_float(f, p0 + stride, p1 + stride, two, x, c->ld, 1, acc0, acc1, T);
        step_float(f, p0 + 2 * stride, p1 + 2 * stride, two, x, c->ld, 2, acc0, acc1, T);
        step_float(f, p0 + 3 * stride, p1 + 3 * stride, two, x, c->ld, 3, acc0, acc1, T);
        p0 += 4 * stride;
        p1 += 4 * stride;
        KVD__ROWS_NEXT(x, 4);
    }
    for (; k < c->n_blocks; k++) {
        step_float(f, p0, p1, two, x, c->ld, 0, acc0, acc1, T);
        p0 += stride;
        p1 += stride;
        KVD__ROWS_NEXT(x, 1);
    }
    kvd__finish(c, i, T, acc0);
    if (two)
        kvd__finish(c, i + 1, T, acc1);
}

KVD__INLINE void tile_float(const kvd_dtype f, const kvd__tile *c, const int T)
{
    int64_t i = 0;
    if (T <= 6)
        for (; i + 2 <= c->n_panels; i += 2)
            panels_float(f, c, i, true, T);
    for (; i < c->n_panels; i++)
        panels_float(f, c, i, false, T);
}

#define DEFINE_FLOAT_TILE(TYPE, stem, T)                                       \
    static void tile_##stem##_##T(const kvd__tile *c) { tile_float(KVD_##TYPE, c, T); }

#define FLOAT_FORMATS(X) X(F32, f32) X(F16, f16) X(BF16, bf16)

#define DEFINE_FLOAT(TYPE, stem)                                                                             \
    KVD__1_TO_12(DEFINE_FLOAT_TILE, TYPE, stem)                                                              \
    static kvd__tile_fn *const tiles_##stem[] = KVD__TILES_12(stem);                                         \
    static void gemm_##stem(float *y, int64_t ld_y, const void *panels, int64_t n_panels, int64_t K,         \
                            const kvd_acts *a, int64_t T)                                                    \
    {                                                                                                        \
        kvd__gemm_walk_float(tiles_##stem, 12, float_bytes(KVD_##TYPE), y, ld_y, panels, n_panels, K, a, T); \
    }
FLOAT_FORMATS(DEFINE_FLOAT)

/* ---- quantised activations ------------------------------------------------ */

/* n (a multiple of 32) elements to q, their scale, and bsum of each n_sum. -1 if
 * the largest magnitude is not finite: as integers, magnitudes of NaN are above
 * that of infinity. */
KVD__INLINE int quant_block(const float *x, const int n, int8_t *q, float *d, int32_t *bsum, const int n_sum)
{
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    __m512i max = _mm512_setzero_si512();
    for (int i = 0; i < n; i += 16)
        max = _mm512_max_epu32(max, _mm512_and_si512(kvd__load(x + i), magnitude));
    const uint32_t top = _mm512_reduce_max_epu32(max);
    float amax;
    if (top >= 0x7f800000u)
        return -1;
    memcpy(&amax, &top, 4);
    const bool tiny = amax < 0x1p-100f;
    *d = tiny ? 0 : amax / 127;
    const __m512 inverse = _mm512_set1_ps(tiny ? 0 : 127 / amax);
    __m512i sum = _mm512_setzero_si512();
    for (int i = 0; i < n; i += 16) {
        const __m512i v = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + i), inverse));
        _mm_storeu_si128((void *)(q + i), _mm512_cvtepi32_epi8(v));
        sum = n_sum == 16 ? v : _mm512_add_epi32(sum, v);
        if (n_sum == 16)
            bsum[i / 16] = _mm512_reduce_add_epi32(sum);
    }
    if (n_sum != 16)
        *bsum = _mm512_reduce_add_epi32(sum);
    return 0;
}

KVD__DEFINE_QUANTISERS

/* ---- the table ------------------------------------------------------------ */

void kvd__kern_fill_gemm_avx512(kvd_kern *k)
{
#define FILL(TYPE, stem, ...) k->gemm[KVD_##TYPE] = gemm_##stem;
    FLOAT_FORMATS(FILL)
    FORMATS(FILL)
    k->quant_q8_32 = quant_q8_32;
    k->quant_q8_256 = quant_q8_256;
    kvd__kern_fill_gemm_k_avx512(k);
}
