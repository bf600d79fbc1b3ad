/* Products with float weights and 32-element blocks, and the quantisers, for
 * AVX2 with FMA and F16C.
 *
 * vpmaddubsw takes weights as u8 and a token's 4 broadcast activations as s8 and
 * gives pair sums of 16 bits per row. They are added up in 16 bits as long as
 * that is exact, whatever the data, and then widened by one vpmaddwd:
 *   4-bit weights   8 x 2*15*127 = 30480: a whole block
 *   5-bit weights   4 x 2*31*127 = 31496: half a block
 *   signed weights  2*128*127 = 32512: nothing; |w| and sign(q, w)
 * With more than 5 tokens a tile the sums would not stay in 16 registers. */
#include "kern/x86/gemm_avx2.h"

#include "quant/panel.h"

/* ---- 32-element blocks ---------------------------------------------------- */

/* Eight rows of k-group g + 4*high; p: at the rows. */
KVD__INLINE __m256i weights(const kvd_dtype f, const uint8_t *p, const int g, const int high)
{
    if (f == KVD_Q8_0)
        return kvd__load(p + 64 * (g + 4 * high));
    const __m256i q = kvd__bits(kvd__load(p + 64 * g), 4 * high, 15);
    if (f == KVD_IQ4_NL)
        return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)kvd__iq4_table)), q);
    if (f == KVD_Q5_0 || f == KVD_Q5_1) { /* bit g + 4*high to bit 4 */
        const __m256i qh = kvd__load(p + kvd__layout_of(f).qh);
        const __m256i moved = high ? _mm256_srli_epi16(qh, g) : _mm256_slli_epi16(qh, 4 - g);
        return _mm256_or_si256(q, _mm256_and_si256(moved, _mm256_set1_epi8(16)));
    }
    return q;
}

/* The integer sums of a block, without bias. */
KVD__INLINE void sum_block(const kvd_dtype f, const uint8_t *p, const int8_t *const q[2], int64_t ld, __m256i sum0[],
                           __m256i sum1[], const int T)
{
    const __m256i one = _mm256_set1_epi16(1);
    const bool is_signed = f == KVD_Q8_0 || f == KVD_IQ4_NL, five_bits = f == KVD_Q5_0 || f == KVD_Q5_1;
    __m256i low0[KVD__AVX2_TOKENS], low1[KVD__AVX2_TOKENS]; /* of the first half, if it is summed apart */
    if (is_signed) {
#define M(t) sum0[t] = sum1[t] = _mm256_setzero_si256()
        EACH_TOKEN(T, M);
#undef M
    }
#define GROUP(g, high)                                                                      \
    do {                                                                                    \
        const __m256i w0 = weights(f, p, g, high), w1 = weights(f, p + 32, g, high);        \
        const int at = 4 * g + 16 * high;                                                   \
        if (is_signed)                                                                      \
            kvd__dot_signed(sum0, sum1, w0, w1, one, one, q, ld, at, T);                    \
        else                                                                                \
            kvd__dot(sum0, sum1, w0, w1, q, ld, at, g == 0 && (high == 0 || five_bits), T); \
    } while (0)
    GROUP(0, 0);
    GROUP(1, 0);
    GROUP(2, 0);
    GROUP(3, 0);
    if (five_bits) {
#define M(t) (low0[t] = _mm256_madd_epi16(sum0[t], one), low1[t] = _mm256_madd_epi16(sum1[t], one))
        EACH_TOKEN(T, M);
#undef M
    }
    p = kvd__reread(p);
    GROUP(0, 1);
    GROUP(1, 1);
    GROUP(2, 1);
    GROUP(3, 1);
#undef GROUP
    if (!is_signed) {
#define M(t) (sum0[t] = _mm256_madd_epi16(sum0[t], one), sum1[t] = _mm256_madd_epi16(sum1[t], one))
        EACH_TOKEN(T, M);
#undef M
    }
    if (five_bits) {
#define M(t) (sum0[t] = _mm256_add_epi32(sum0[t], low0[t]), sum1[t] = _mm256_add_epi32(sum1[t], low1[t]))
        EACH_TOKEN(T, M);
#undef M
    }
}

/* One block's step for T tokens. side: da [T], then s or -bias*bsum [T]. */
KVD__INLINE void step_32(const kvd_dtype f, const uint8_t *p, const int8_t *const q[2], int64_t ld, const int32_t *side,
                         float *chains, const int T)
{
    const kvd__layout o = kvd__layout_of(f);
    __m256i sum0[KVD__AVX2_TOKENS], sum1[KVD__AVX2_TOKENS];
    sum_block(f, p, q, ld, sum0, sum1, T);
    if (f == KVD_Q4_0 || f == KVD_Q5_0) {
#define M(t)                                                                   \
    do {                                                                       \
        const __m256i bias = kvd__bcast(side + T + t);                         \
        sum0[t] = _mm256_add_epi32(sum0[t], bias);                             \
        sum1[t] = _mm256_add_epi32(sum1[t], bias);                             \
    } while (0)
        EACH_TOKEN(T, M);
#undef M
    }
    const __m256 d0 = kvd__load_8_f16(p + o.d), d1 = kvd__load_8_f16(p + o.d + 16);
    const __m256 m0 = o.m >= 0 ? kvd__load_8_f16(p + o.m) : d0, m1 = o.m >= 0 ? kvd__load_8_f16(p + o.m + 16) : d1;
#define M(t)                                                                                   \
    do {                                                                                       \
        const __m256 da = kvd__bcast_f32(side + t);                                            \
        __m256 v0 = _mm256_load_ps(chains + 16 * t), v1 = _mm256_load_ps(chains + 16 * t + 8); \
        v0 = _mm256_fmadd_ps(_mm256_mul_ps(d0, da), _mm256_cvtepi32_ps(sum0[t]), v0);          \
        v1 = _mm256_fmadd_ps(_mm256_mul_ps(d1, da), _mm256_cvtepi32_ps(sum1[t]), v1);          \
        if (o.m >= 0) {                                                                        \
            const __m256 s = kvd__bcast_f32(side + T + t);                                     \
            v0 = _mm256_fmadd_ps(m0, s, v0);                                                   \
            v1 = _mm256_fmadd_ps(m1, s, v1);                                                   \
        }                                                                                      \
        _mm256_store_ps(chains + 16 * t, v0);                                                  \
        _mm256_store_ps(chains + 16 * t + 8, v1);                                              \
    } while (0)
    EACH_TOKEN(T, M);
#undef M
}

KVD__INLINE void tile_32(const kvd_dtype f, const kvd__tile *c, const int T)
{
    const int stride = kvd__layout_of(f).stride;
    for (int64_t i = 0; i < c->n_panels; i++) {
        const uint8_t *p = c->panels + i * c->panel_bytes;
        const int32_t *side = c->side;
        KVD__ROWS(int8_t, q, c->q, c->ld, T);
        kvd__chains stack;
        float *chains = kvd__start(c, i, T, &stack);
        for (int64_t b = 0; b < c->n_blocks; b++) {
            if (T == 1)
                kvd__prefetch(p, stride);
            step_32(f, p, q, c->ld, side, chains, T);
            p += stride;
            side += 2 * T;
            KVD__ROWS_NEXT(q, 32);
        }
        kvd__finish(c, i, T, chains);
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

#define DEFINE(TYPE, stem, side, bias)                                                               \
    KVD__1_TO_5(DEFINE_TILE, TYPE, stem)                                                             \
    static kvd__tile_fn *const tiles_##stem[] = KVD__TILES_5(stem);                                  \
    static const kvd__walk walk_##stem = {tiles_##stem, 5, KVD__##TYPE##_STRIDE, 32, side, bias};    \
    static void gemm_##stem(float *y, int64_t ld_y, const void *panels, int64_t n_panels, int64_t K, \
                            const kvd_acts *a, int64_t T)                                            \
    {                                                                                                \
        kvd__gemm_walk(&walk_##stem, y, ld_y, panels, n_panels, K, a, T);                            \
    }
FORMATS(DEFINE)

/* ---- float weights -------------------------------------------------------- */

KVD__INLINE int float_bytes(const kvd_dtype f) { return f == KVD_F32 ? 4 : 2; }

/* 8 weights of one k, widened. */
KVD__INLINE __m256 widen(const kvd_dtype f, const uint8_t *p)
{
    if (f == KVD_F32)
        return _mm256_loadu_ps((const void *)p);
    if (f == KVD_F16)
        return kvd__load_8_f16(p);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)p)), 16));
}

KVD__INLINE void load_chains(const kvd__tile *c, int64_t i, const int T, __m256 acc0[], __m256 acc1[])
{
    const float *y = c->y + KVD__PANEL_ROWS * i;
    if (c->carry) {
#define M(t) (acc0[t] = _mm256_loadu_ps(y + t * c->ld_y), acc1[t] = _mm256_loadu_ps(y + t * c->ld_y + 8))
        EACH_TOKEN(T, M);
#undef M
    } else {
#define M(t) acc0[t] = acc1[t] = _mm256_setzero_ps()
        EACH_TOKEN(T, M);
#undef M
    }
}

KVD__INLINE void store_chains(const kvd__tile *c, int64_t i, const int T, const __m256 acc0[], const __m256 acc1[])
{
    float *y = c->y + KVD__PANEL_ROWS * i;
#define M(t) (_mm256_storeu_ps(y + t * c->ld_y, acc0[t]), _mm256_storeu_ps(y + t * c->ld_y + 8, acc1[t]))
    EACH_TOKEN(T, M);
#undef M
}

KVD__INLINE void step_float(const kvd_dtype f, const uint8_t *p, const float *const x[2], int64_t ld, int at,
                            __m256 acc0[], __m256 acc1[], const int T)
{
    const __m256 w0 = widen(f, p), w1 = widen(f, p + 8 * float_bytes(f));
#define M(t)                                                                   \
    do {                                                                       \
        const __m256 v = kvd__bcast_f32(TOKEN_ROW(x, ld, t) + at);             \
        acc0[t] = _mm256_fmadd_ps(w0, v, acc0[t]);                             \
        acc1[t] = _mm256_fmadd_ps(w1, v, acc1[t]);                             \
    } while (0)
    EACH_TOKEN(T, M);
#undef M
}

/* One panel, or two (a constant): below 3 tokens one does not fill the pipes. */
KVD__INLINE void panels_float(const kvd_dtype f, const kvd__tile *c, int64_t i, const bool two, const int T)
{
    const int stride = KVD__PANEL_ROWS * float_bytes(f);
    const uint8_t *p = c->panels + i * c->panel_bytes;
    const int64_t next = c->panel_bytes;
    KVD__ROWS(float, x, c->x, c->ld, T);
    __m256 a0[KVD__AVX2_TOKENS], a1[KVD__AVX2_TOKENS], b0[KVD__AVX2_TOKENS], b1[KVD__AVX2_TOKENS];
    load_chains(c, i, T, a0, a1);
    if (two)
        load_chains(c, i + 1, T, b0, b1);
    for (int64_t k = 0; k < c->n_blocks; k++) {
        if (T == 1) {
            kvd__prefetch(p, 64);
            if (two)
                kvd__prefetch(p + next, 64);
        }
        step_float(f, p, x, c->ld, 0, a0, a1, T);
        if (two)
            step_float(f, p + next, x, c->ld, 0, b0, b1, T);
        p += stride;
        KVD__ROWS_NEXT(x, 1);
    }
    store_chains(c, i, T, a0, a1);
    if (two)
        store_chains(c, i + 1, T, b0, b1);
}

KVD__INLINE void tile_float(const kvd_dtype f, const kvd__tile *c, const int T)
{
    int64_t i = 0;
    if (T <= 2)
        for (; i + 2 <= c->n_panels; i += 2)
            panels_float(f, c, i, true, T);
    for (; i < c->n_panels; i++)
        panels_float(f, c, i, false, T);
}

#define DEFINE_FLOAT_TILE(TYPE, stem, T)                                       \
    static void tile_##stem##_##T(const kvd__tile *c) { tile_float(KVD_##TYPE, c, T); }

#define FLOAT_FORMATS(X) X(F32, f32) X(F16, f16) X(BF16, bf16)

#define DEFINE_FLOAT(TYPE, stem)                                                                            \
    KVD__1_TO_5(DEFINE_FLOAT_TILE, TYPE, stem)                                                              \
    static kvd__tile_fn *const tiles_##stem[] = KVD__TILES_5(stem);                                         \
    static void gemm_##stem(float *y, int64_t ld_y, const void *panels, int64_t n_panels, int64_t K,        \
                            const kvd_acts *a, int64_t T)                                                   \
    {                                                                                                       \
        kvd__gemm_walk_float(tiles_##stem, 5, float_bytes(KVD_##TYPE), y, ld_y, panels, n_panels, K, a, T); \
    }
FLOAT_FORMATS(DEFINE_FLOAT)

/* ---- quantised activations ------------------------------------------------ */

KVD__INLINE int32_t add_lanes(__m256i v)
{
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1));
    return _mm_cvtsi128_si32(s);
}

KVD__INLINE uint32_t max_lanes(__m256i v)
{
    __m128i s = _mm_max_epu32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    s = _mm_max_epu32(s, _mm_shuffle_epi32(s, 0x4e));
    s = _mm_max_epu32(s, _mm_shuffle_epi32(s, 0xb1));
    return (uint32_t)_mm_cvtsi128_si32(s);
}

/* n (a multiple of 32) elements to q, their scale, and bsum of each n_sum (16 or
 * n). -1 if the largest magnitude is not finite: as integers, magnitudes of NaN
 * are above that of infinity. */
KVD__INLINE int quant_block(const float *x, const int n, int8_t *q, float *d, int32_t *bsum, const int n_sum)
{
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    __m256i max = _mm256_setzero_si256();
    for (int i = 0; i < n; i += 8)
        max = _mm256_max_epu32(max, _mm256_and_si256(kvd__load(x + i), magnitude));
    const uint32_t top = max_lanes(max);
    float amax;
    if (top >= 0x7f800000u)
        return -1;
    memcpy(&amax, &top, 4);
    const bool tiny = amax < 0x1p-100f;
    *d = tiny ? 0 : amax / 127;
    const __m256 inverse = _mm256_set1_ps(tiny ? 0 : 127 / amax);
    __m256i sum = _mm256_setzero_si256();
    for (int i = 0; i < n; i += 16) {
        const __m256i a = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i), inverse));
        const __m256i b = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i + 8), inverse));
        const __m256i ab = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8);
        _mm_storeu_si128((void *)(q + i), _mm_packs_epi16(_mm256_castsi256_si128(ab), _mm256_extracti128_si256(ab, 1)));
        const __m256i both = _mm256_add_epi32(a, b);
        if (n_sum == 16)
            bsum[i / 16] = add_lanes(both);
        else
            sum = _mm256_add_epi32(sum, both);
    }
    if (n_sum != 16)
        *bsum = add_lanes(sum);
    return 0;
}

KVD__DEFINE_QUANTISERS

/* ---- the table ------------------------------------------------------------ */

void kvd__kern_fill_gemm_avx2(kvd_kern *k)
{
#define FILL(TYPE, stem, ...) k->gemm[KVD_##TYPE] = gemm_##stem;
    FLOAT_FORMATS(FILL)
    FORMATS(FILL)
    k->quant_q8_32 = quant_q8_32;
    k->quant_q8_256 = quant_q8_256;
    kvd__kern_fill_gemm_k_avx2(k);
}
