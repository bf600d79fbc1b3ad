/* Products with 256-element blocks for AVX2.
 *
 * As in gemm_avx2.c, but what widens the 16-bit sums of a sub-block is its scale:
 * vpmaddwd by i16 lanes (sc, sc) of each row gives the sub-block's share of S at
 * once. How many vpmaddubsw results fit 16 bits before that:
 *   2, 3 bits   4 x 2*7*127 = 7112 (a sub-block of 16)
 *   4 bits      8 x 2*15*127 = 30480 (a sub-block of 32)
 *   5 bits      4 x 2*31*127 = 31496
 *   6 bits      2 x 2*63*127 = 32004
 *   IQ4_XS      1, by |w| and sign(q, w)
 * Minima (M) and biases (B = sum sc_j*bsum_j, then S - bias*B, the same integer)
 * take two sub-blocks at a time: vpmaddwd of (m_2j, m_2j+1) with (bsum_2j,
 * bsum_2j+1). */
#include "kern/x86/gemm_avx2.h"

#include "quant/panel.h"

KVD__INLINE int bias_shift(const kvd_dtype f) { return f == KVD_Q3_K ? 2 : f == KVD_Q6_K ? 5 : 0; } /* bias 4 or 32 */

/* ---- scales --------------------------------------------------------------- */

/* A block's scales and minima as bytes, [sub-block][row]. */
typedef struct scales {
    _Alignas(32) int8_t sc[16][16];
    _Alignas(32) int8_t mins[16][16];
} scales;

/* low | bits n, n+1 of high as bits 4, 5 */
KVD__INLINE __m256i with_high(__m256i low, __m256i high, const int n)
{
    const __m256i moved = n >= 4 ? _mm256_srli_epi16(high, n - 4) : _mm256_slli_epi16(high, 4 - n);
    return _mm256_or_si256(low, _mm256_and_si256(moved, _mm256_set1_epi8(0x30)));
}

KVD__INLINE void put(int8_t *to, __m256i two_subs) { _mm256_store_si256((void *)to, two_subs); }

static void scales_q2_k(scales *o, const uint8_t *p)
{
    for (int j = 0; j < 16; j += 2) {
        const __m256i x = kvd__load(p + KVD__Q2_K_SCALES + 16 * j);
        put(o->sc[j], kvd__bits(x, 0, 15));
        put(o->mins[j], kvd__bits(x, 4, 15));
    }
}

static void scales_q3_k(scales *o, const uint8_t *p)
{
    const __m256i centre = _mm256_set1_epi8(32);
    for (int j = 0; j < 4; j += 2) {
        const uint8_t *s = p + KVD__Q3_K_SCALES + 16 * j;
        const __m256i a = kvd__load(s), b = kvd__load(s + 64), h = kvd__load(s + 128);
        put(o->sc[j], _mm256_sub_epi8(with_high(kvd__bits(a, 0, 15), h, 0), centre));
        put(o->sc[j + 4], _mm256_sub_epi8(with_high(kvd__bits(b, 0, 15), h, 2), centre));
        put(o->sc[j + 8], _mm256_sub_epi8(with_high(kvd__bits(a, 4, 15), h, 4), centre));
        put(o->sc[j + 12], _mm256_sub_epi8(with_high(kvd__bits(b, 4, 15), h, 6), centre));
    }
}

/* Q4_K and Q5_K. s: [12][16]. */
static void scales_6(scales *o, const uint8_t *s)
{
    for (int j = 0; j < 4; j += 2) {
        const __m256i a = kvd__load(s + 16 * j), b = kvd__load(s + 16 * j + 64), c = kvd__load(s + 16 * j + 128);
        put(o->sc[j], kvd__bits(a, 0, 63));
        put(o->sc[j + 4], with_high(kvd__bits(c, 0, 15), a, 6));
        put(o->mins[j], kvd__bits(b, 0, 63));
        put(o->mins[j + 4], with_high(kvd__bits(c, 4, 15), b, 6));
    }
}

static void scales_q6_k(scales *o, const uint8_t *p) { memcpy(o->sc, p + KVD__Q6_K_SCALES, sizeof o->sc); }

static void scales_iq4_xs(scales *o, const uint8_t *p)
{
    const __m128i nibble = _mm_set1_epi8(15), two_bits = _mm_set1_epi8(0x30), centre = _mm_set1_epi8(32);
    const __m256i h = kvd__load(p + KVD__IQ4_XS_SCALES_H), byte = _mm256_set1_epi16(255);
    /* the u16 of 16 rows as their low bytes (scales 0-3) and high bytes (4-7) */
    const __m256i low_bytes = _mm256_and_si256(h, byte), high_bytes = _mm256_srli_epi16(h, 8);
    const __m128i of_rows[2] = {
        _mm_packus_epi16(_mm256_castsi256_si128(low_bytes), _mm256_extracti128_si256(low_bytes, 1)),
        _mm_packus_epi16(_mm256_castsi256_si128(high_bytes), _mm256_extracti128_si256(high_bytes, 1)),
    };
    for (int i = 0; i < 4; i++) {
        const __m128i l = _mm_loadu_si128((const void *)(p + KVD__IQ4_XS_SCALES_L + 16 * i));
        /* bits 0 to 3 or 4 to 7 of these bytes are the high bits of scales 2i and 2i + 1 */
        const __m128i high = of_rows[i / 2];
        const __m128i even = i % 2 ? high : _mm_slli_epi16(high, 4);
        const __m128i odd = i % 2 ? _mm_srli_epi16(high, 2) : _mm_slli_epi16(high, 2);
        const __m128i a = _mm_or_si128(_mm_and_si128(l, nibble), _mm_and_si128(even, two_bits));
        const __m128i b = _mm_or_si128(_mm_and_si128(_mm_srli_epi16(l, 4), nibble), _mm_and_si128(odd, two_bits));
        _mm_store_si128((void *)o->sc[2 * i], _mm_sub_epi8(a, centre));
        _mm_store_si128((void *)o->sc[2 * i + 1], _mm_sub_epi8(b, centre));
    }
}

KVD__INLINE void unpack_scales(const kvd_dtype f, scales *o, const uint8_t *p)
{
    switch (f) {
    case KVD_Q2_K:
        scales_q2_k(o, p);
        break;
    case KVD_Q3_K:
        scales_q3_k(o, p);
        break;
    case KVD_Q4_K:
        scales_6(o, p + KVD__Q4_K_SCALES);
        break;
    case KVD_Q5_K:
        scales_6(o, p + KVD__Q5_K_SCALES);
        break;
    case KVD_Q6_K:
        scales_q6_k(o, p);
        break;
    default: /* IQ4_XS */
        scales_iq4_xs(o, p);
        break;
    }
}

/* i16 lanes (even[r], odd[r]) of rows 0-7 or 8-15. */
KVD__INLINE __m256i row_pairs(const int8_t even[16], const int8_t odd[16], const int half)
{
    const __m128i e = _mm_load_si128((const void *)even), o = _mm_load_si128((const void *)odd);
    return _mm256_cvtepi8_epi16(half ? _mm_unpackhi_epi8(e, o) : _mm_unpacklo_epi8(e, o));
}

/* ---- weights -------------------------------------------------------------- */

/* Where sub-block j's k-vectors are: `low` ones, shifted right; for some `high`
 * ones, shifted right or left. See the diagrams in panel.h. */
typedef struct sub_block {
    const uint8_t *low, *high;
    __m128i shift, right, left;
} sub_block;

KVD__INLINE sub_block find(const kvd_dtype f, const uint8_t *p, int j)
{
    sub_block s = {.low = p, .high = p};
    const int h = j / 8, part = j / 2 % 4, v = 4 * (j % 2); /* of 16 sub-blocks */
    int shift = 0, right = 0;
    switch (f) {
    case KVD_Q5_K:
        s.high = p + KVD__Q5_K_QH;
        right = j - 4;
        /* fall through */
    case KVD_Q4_K:
        s.low = p + 512 * (j / 2);
        shift = 4 * (j % 2);
        break;
    case KVD_Q6_K:
        s.low = p + 64 * (16 * h + 8 * (part % 2) + v);
        shift = 4 * (part / 2);
        s.high = p + KVD__Q6_K_QH + 64 * (8 * h + v);
        right = 2 * part - 4;
        break;
    case KVD_Q3_K:
        s.high = p + KVD__Q3_K_HMASK + 64 * v;
        right = 4 * h + part - 2;
        /* fall through */
    case KVD_Q2_K:
        s.low = p + 64 * (8 * h + v);
        shift = 2 * part;
        break;
    default: /* IQ4_XS */
        s.low = p + 256 * j;
        break;
    }
    s.shift = _mm_cvtsi32_si128(shift);
    s.right = _mm_cvtsi32_si128(right > 0 ? right : 0);
    s.left = _mm_cvtsi32_si128(right < 0 ? -right : 0);
    return s;
}

/* Eight rows (from byte 32*half of the k-vectors on) of a sub-block's k-group g:
 * u8, of IQ4_XS s8. */
KVD__INLINE __m256i weights(const kvd_dtype f, const sub_block *s, const int g, const int half)
{
    if (f == KVD_IQ4_XS) {
        const __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)kvd__iq4_table));
        const __m256i x = kvd__load(s->low + 64 * (g % 4) + 32 * half);
        return _mm256_shuffle_epi8(table, kvd__bits(x, g < 4 ? 0 : 4, 15));
    }
    const int mask = f == KVD_Q2_K || f == KVD_Q3_K ? 3 : 15;
    const __m256i low = _mm256_and_si256(_mm256_srl_epi16(kvd__load(s->low + 64 * g + 32 * half), s->shift),
                                         _mm256_set1_epi8((char)mask));
    if (f == KVD_Q2_K || f == KVD_Q4_K)
        return low;
    const int bits = f == KVD_Q3_K ? 4 : f == KVD_Q5_K ? 16 : 48;
    const __m256i high = kvd__load(s->high + 64 * g + 32 * half);
    const __m256i moved = _mm256_sll_epi16(_mm256_srl_epi16(high, s->right), s->left);
    return _mm256_or_si256(low, _mm256_and_si256(moved, _mm256_set1_epi8((char)bits)));
}

/* ---- products ------------------------------------------------------------- */

/* S += a sub-block's share; sc: its scales as row pairs. */
KVD__INLINE void add_sub_block(const kvd_dtype f, const sub_block *sub, __m256i sc0, __m256i sc1,
                               const int8_t *const q[2], int64_t ld, __m256i S0[], __m256i S1[], const int T)
{
    const int groups = 64 / kvd__n_subs(f);
    const int run = f == KVD_Q6_K ? 2 : f == KVD_Q5_K ? 4 : groups; /* groups that fit 16 bits */
    __m256i sum0[KVD__AVX2_TOKENS], sum1[KVD__AVX2_TOKENS];
#define GROUP(g)                                                               \
    do {                                                                       \
        if (g >= groups)                                                       \
            break;                                                             \
        const __m256i w0 = weights(f, sub, g, 0), w1 = weights(f, sub, g, 1);  \
        if (f == KVD_IQ4_XS) {                                                 \
            kvd__dot_signed(S0, S1, w0, w1, sc0, sc1, q, ld, 4 * g, T);        \
            break;                                                             \
        }                                                                      \
        kvd__dot(sum0, sum1, w0, w1, q, ld, 4 * g, g % run == 0, T);           \
        if (g % run == run - 1)                                                \
            EACH_TOKEN(T, WIDEN);                                              \
    } while (0)
#define WIDEN(t)                                                               \
    (S0[t] = kvd__add_32(S0[t], _mm256_madd_epi16(sum0[t], sc0)),              \
     S1[t] = kvd__add_32(S1[t], _mm256_madd_epi16(sum1[t], sc1)))
    GROUP(0);
    GROUP(1);
    GROUP(2);
    GROUP(3);
    GROUP(4);
    GROUP(5);
    GROUP(6);
    GROUP(7);
#undef WIDEN
#undef GROUP
}

/* o = sum over sub-blocks of v[j][row]*bsum_j. pairs: [n/2][T]. */
KVD__INLINE void dot_sums(const int8_t v[][16], const int n, const int32_t *pairs, __m256i o0[], __m256i o1[],
                          const int T)
{
#define M(t) o0[t] = o1[t] = _mm256_setzero_si256()
    EACH_TOKEN(T, M);
#undef M
    for (int j = 0; j < n; j += 2, pairs += T) {
        const __m256i v0 = row_pairs(v[j], v[j + 1], 0), v1 = row_pairs(v[j], v[j + 1], 1);
#define M(t)                                                                   \
    do {                                                                       \
        const __m256i s = kvd__bcast(pairs + t);                               \
        o0[t] = kvd__add_32(o0[t], _mm256_madd_epi16(v0, s));                  \
        o1[t] = kvd__add_32(o1[t], _mm256_madd_epi16(v1, s));                  \
    } while (0)
        EACH_TOKEN(T, M);
#undef M
    }
}

/* One block's step for T tokens; q: their rows, at the block. side: [word][T]. */
KVD__INLINE void step_256(const kvd_dtype f, const uint8_t *p, const int8_t *const q_block[2], int64_t ld,
                          const int32_t *side, float *chains, const int T)
{
    const kvd__layout o = kvd__layout_of(f);
    const int subs = kvd__n_subs(f);
    const int8_t *q[2] = {q_block[0], q_block[1]};
    scales s;
    unpack_scales(f, &s, p);
    __m256i S0[KVD__AVX2_TOKENS], S1[KVD__AVX2_TOKENS], B0[KVD__AVX2_TOKENS], B1[KVD__AVX2_TOKENS];
#define M(t) S0[t] = S1[t] = _mm256_setzero_si256()
    EACH_TOKEN(T, M);
#undef M
    for (int j = 0; j < subs; j++) {
        const sub_block sub = find(f, p, j);
        add_sub_block(f, &sub, row_pairs(s.sc[j], s.sc[j], 0), row_pairs(s.sc[j], s.sc[j], 1), q, ld, S0, S1, T);
        KVD__ROWS_NEXT(q, 256 / subs);
        if (T == 1)
            kvd__prefetch_block(p, o, j, subs);
    }
    if (f != KVD_IQ4_XS)
        dot_sums(kvd__has_min(f) ? s.mins : s.sc, subs, side + T, B0, B1, T);
    if (bias_shift(f)) {
#define M(t)                                                                   \
    (S0[t] = _mm256_sub_epi32(S0[t], _mm256_slli_epi32(B0[t], bias_shift(f))), \
     S1[t] = _mm256_sub_epi32(S1[t], _mm256_slli_epi32(B1[t], bias_shift(f))))
        EACH_TOKEN(T, M);
#undef M
    }
    const __m256 d0 = kvd__load_8_f16(p + o.d), d1 = kvd__load_8_f16(p + o.d + 16);
    const __m256 m0 = kvd__has_min(f) ? kvd__load_8_f16(p + o.m) : d0;
    const __m256 m1 = kvd__has_min(f) ? kvd__load_8_f16(p + o.m + 16) : d1;
#define M(t)                                                                                   \
    do {                                                                                       \
        const __m256 da = kvd__bcast_f32(side + t);                                            \
        __m256 v0 = _mm256_load_ps(chains + 16 * t), v1 = _mm256_load_ps(chains + 16 * t + 8); \
        v0 = _mm256_fmadd_ps(_mm256_mul_ps(d0, da), _mm256_cvtepi32_ps(S0[t]), v0);            \
        v1 = _mm256_fmadd_ps(_mm256_mul_ps(d1, da), _mm256_cvtepi32_ps(S1[t]), v1);            \
        if (kvd__has_min(f)) {                                                                 \
            v0 = _mm256_fnmadd_ps(_mm256_mul_ps(m0, da), _mm256_cvtepi32_ps(B0[t]), v0);       \
            v1 = _mm256_fnmadd_ps(_mm256_mul_ps(m1, da), _mm256_cvtepi32_ps(B1[t]), v1);       \
        }                                                                                      \
        _mm256_store_ps(chains + 16 * t, v0);                                                  \
        _mm256_store_ps(chains + 16 * t + 8, v1);                                              \
    } while (0)
    EACH_TOKEN(T, M);
#undef M
}

KVD__INLINE void tile_256(const kvd_dtype f, const kvd__tile *c, const int T)
{
    const int words = f == KVD_IQ4_XS ? 2 : 1 + kvd__n_subs(f) / 2;
    for (int64_t i = 0; i < c->n_panels; i++) {
        const uint8_t *p = c->panels + i * c->panel_bytes;
        const int32_t *side = c->side;
        KVD__ROWS(int8_t, q, c->q, c->ld, T);
        kvd__chains stack;
        float *chains = kvd__start(c, i, T, &stack);
        for (int64_t b = 0; b < c->n_blocks; b++) {
            step_256(f, p, q, c->ld, side, chains, T);
            p += kvd__layout_of(f).stride;
            side += words * T;
            KVD__ROWS_NEXT(q, 256);
        }
        kvd__finish(c, i, T, chains);
    }
}

#define DEFINE_TILE(TYPE, stem, T)                                             \
    static void tile_##stem##_##T(const kvd__tile *c) { tile_256(KVD_##TYPE, c, T); }

/* X(format, stem, side) */
#define FORMATS(X)                                                             \
    X(Q2_K, q2_k, KVD__SIDE_PAIRS_16)                                          \
    X(Q3_K, q3_k, KVD__SIDE_PAIRS_16)                                          \
    X(Q4_K, q4_k, KVD__SIDE_PAIRS_32)                                          \
    X(Q5_K, q5_k, KVD__SIDE_PAIRS_32)                                          \
    X(Q6_K, q6_k, KVD__SIDE_PAIRS_16)                                          \
    X(IQ4_XS, iq4_xs, KVD__SIDE_BIAS)

#define DEFINE(TYPE, stem, side)                                                                     \
    KVD__1_TO_5(DEFINE_TILE, TYPE, stem)                                                             \
    static kvd__tile_fn *const tiles_##stem[] = KVD__TILES_5(stem);                                  \
    static const kvd__walk walk_##stem = {tiles_##stem, 5, KVD__##TYPE##_STRIDE, 256, side, 0};      \
    static void gemm_##stem(float *y, int64_t ld_y, const void *panels, int64_t n_panels, int64_t K, \
                            const kvd_acts *a, int64_t T)                                            \
    {                                                                                                \
        kvd__gemm_walk(&walk_##stem, y, ld_y, panels, n_panels, K, a, T);                            \
    }
FORMATS(DEFINE)

void kvd__kern_fill_gemm_k_avx2(kvd_kern *k)
{
#define FILL(TYPE, stem, ...) k->gemm[KVD_##TYPE] = gemm_##stem;
    FORMATS(FILL)
}
