/* Products with 256-element blocks for AVX-512 with VNNI.
 *
 * Weights become u8 and meet broadcast activations in vpdpbusd as in
 * gemm_avx512.c; after each sub-block its sum is multiplied by the sub-block's
 * scale and added to S, in i32. Formats with a bias start a sub-block's sum at
 * -bias*bsum; formats with minima form M = sum m_j*bsum_j by vpdpwssd, two
 * sub-blocks at a time, from bsums that fit 16 bits (32*127).
 *
 * The f32 chains are touched once in 256 k, so they may live in memory; the
 * registers hold a sub-block's sums and S of up to 12 tokens. */
#include "kern/x86/gemm_avx512.h"

#include "quant/panel.h"

/* Words of the side array before a block's next token set: after the scale, one
 * for each sub-block or for each two. */
KVD__INLINE int n_words(const kvd_dtype f) { return 1 + (kvd__has_min(f) ? kvd__n_subs(f) / 2 : kvd__n_subs(f)); }

/* ---- scales --------------------------------------------------------------- */

/* A block's scales and minima, unpacked. */
typedef struct scales {
    _Alignas(64) int8_t sc[16][16];
    __m512i mins[8]; /* i16 lanes (m_2j, m_2j+1) of each row */
} scales;

/* (x >> n) & mask of bytes. */
KVD__INLINE __m512i bits(__m512i x, const unsigned n, const int mask)
{
    return _mm512_and_si512(_mm512_srli_epi16(x, n), _mm512_set1_epi8((char)mask));
}

/* low | bits n, n+1 of high as bits 4, 5 */
KVD__INLINE __m512i with_high(__m512i low, __m512i high, const unsigned n)
{
    const __m512i moved = n >= 4 ? _mm512_srli_epi16(high, n - 4) : _mm512_slli_epi16(high, 4 - n);
    return _mm512_ternarylogic_epi32(low, moved, _mm512_set1_epi8(0x30), 0xf8);
}

KVD__INLINE void put(scales *o, const int j, __m512i four_subs) { _mm512_store_si512(o->sc[j], four_subs); }

/* m: [n][16] bytes to pairs. */
KVD__INLINE void put_mins(scales *o, const uint8_t *m, const int n)
{
    for (int j = 0; j < n / 2; j++) {
        const __m128i even = _mm_load_si128((const void *)(m + 32 * j));
        const __m128i odd = _mm_load_si128((const void *)(m + 32 * j + 16));
        o->mins[j] = _mm512_cvtepu8_epi16(_mm256_set_m128i(_mm_unpackhi_epi8(even, odd), _mm_unpacklo_epi8(even, odd)));
    }
}

static void scales_q2_k(scales *o, const uint8_t *p)
{
    _Alignas(64) uint8_t m[256];
    for (int i = 0; i < 4; i++) {
        const __m512i x = kvd__load(p + KVD__Q2_K_SCALES + 64 * i);
        put(o, 4 * i, bits(x, 0, 15));
        _mm512_store_si512(m + 64 * i, bits(x, 4, 15));
    }
    put_mins(o, m, 16);
}

static void scales_q3_k(scales *o, const uint8_t *p)
{
    const uint8_t *s = p + KVD__Q3_K_SCALES;
    const __m512i a = kvd__load(s), b = kvd__load(s + 64), h = kvd__load(s + 128), centre = _mm512_set1_epi8(32);
    put(o, 0, _mm512_sub_epi8(with_high(bits(a, 0, 15), h, 0), centre));
    put(o, 4, _mm512_sub_epi8(with_high(bits(b, 0, 15), h, 2), centre));
    put(o, 8, _mm512_sub_epi8(with_high(bits(a, 4, 15), h, 4), centre));
    put(o, 12, _mm512_sub_epi8(with_high(bits(b, 4, 15), h, 6), centre));
}

/* Q4_K and Q5_K. s: [12][16]. */
static void scales_6(scales *o, const uint8_t *s)
{
    _Alignas(64) uint8_t m[128];
    const __m512i a = kvd__load(s), b = kvd__load(s + 64), c = kvd__load(s + 128);
    put(o, 0, bits(a, 0, 63));
    put(o, 4, with_high(bits(c, 0, 15), a, 6));
    _mm512_store_si512(m, bits(b, 0, 63));
    _mm512_store_si512(m + 64, with_high(bits(c, 4, 15), b, 6));
    put_mins(o, m, 8);
}

static void scales_q6_k(scales *o, const uint8_t *p)
{
    for (int i = 0; i < 4; i++)
        put(o, 4 * i, kvd__load(p + KVD__Q6_K_SCALES + 64 * i));
}

static void scales_iq4_xs(scales *o, const uint8_t *p)
{
    const __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)(p + KVD__IQ4_XS_SCALES_H)));
    for (int j = 0; j < 8; j++) {
        const uint8_t *l = p + KVD__IQ4_XS_SCALES_L + 16 * (j / 2);
        const __m512i low = _mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)l));
        const __m512i two_bits = _mm512_srli_epi32(high, (unsigned)(2 * j));
        const __m512i ls = with_high(bits(low, (unsigned)(4 * (j % 2)), 15), two_bits, 0);
        const __m128i bytes = _mm512_cvtepi32_epi8(_mm512_and_si512(ls, _mm512_set1_epi32(63)));
        _mm_store_si128((void *)o->sc[j], _mm_sub_epi8(bytes, _mm_set1_epi8(32)));
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

/* ---- weights -------------------------------------------------------------- */

/* Where sub-block j's k-vectors are: `low` k-vectors, shifted right; for some
 * `high` ones, rotated left. See the diagrams in panel.h. */
typedef struct sub_block {
    const uint8_t *low, *high;
    __m128i shift;
    __m512i rotate;
} sub_block;

KVD__INLINE sub_block find(const kvd_dtype f, const uint8_t *p, int j)
{
    sub_block s = {p, p, _mm_setzero_si128(), _mm512_setzero_si512()};
    const int h = j / 8, part = j / 2 % 4, v = 4 * (j % 2); /* of 16 sub-blocks */
    int shift = 0, rotate = 0;
    switch (f) {
    case KVD_Q5_K:
        s.high = p + KVD__Q5_K_QH;
        rotate = 4 - j;
        /* fall through */
    case KVD_Q4_K:
        s.low = p + 512 * (j / 2);
        shift = 4 * (j % 2);
        break;
    case KVD_Q6_K:
        s.low = p + 64 * (16 * h + 8 * (part % 2) + v);
        shift = 4 * (part / 2);
        s.high = p + KVD__Q6_K_QH + 64 * (8 * h + v);
        rotate = 4 - 2 * part;
        break;
    case KVD_Q3_K:
        s.high = p + KVD__Q3_K_HMASK + 64 * v;
        rotate = 2 - (4 * h + part);
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
    s.rotate = _mm512_set1_epi32(rotate & 31);
    return s;
}

/* k-group g of a sub-block as u8. */
KVD__INLINE __m512i weights(const kvd_dtype f, const sub_block *s, const int g)
{
    if (f == KVD_IQ4_XS) {
        const __m512i table = _mm512_xor_si512(_mm512_broadcast_i32x4(_mm_loadu_si128((const void *)kvd__iq4_table)),
                                               _mm512_set1_epi8((char)0x80));
        return _mm512_shuffle_epi8(table, bits(kvd__load(s->low + 64 * (g % 4)), g < 4 ? 0 : 4, 15));
    }
    const int mask = f == KVD_Q2_K || f == KVD_Q3_K ? 3 : 15;
    const __m512i low = _mm512_and_si512(_mm512_srl_epi16(kvd__load(s->low + 64 * g), s->shift),
                                         _mm512_set1_epi8((char)mask));
    if (f == KVD_Q2_K || f == KVD_Q4_K)
        return low;
    const int high = f == KVD_Q3_K ? 4 : f == KVD_Q5_K ? 16 : 48;
    return _mm512_ternarylogic_epi32(low, _mm512_rolv_epi32(kvd__load(s->high + 64 * g), s->rotate),
                                     _mm512_set1_epi8((char)high), 0xf8);
}

/* ---- products ------------------------------------------------------------- */

/* One block's step for T tokens; q: their rows, at the block. side: [word][T]. */
KVD__INLINE void step_256(const kvd_dtype f, const uint8_t *p, const int8_t *const q_block[4], int64_t ld,
                          const int32_t *side, __m512 acc[], const int T)
{
    const kvd__layout o = kvd__layout_of(f);
    const int subs = kvd__n_subs(f), groups = 64 / subs;
    const int8_t *q[4] = {q_block[0], q_block[1], q_block[2], q_block[3]};
    scales s;
    unpack_scales(f, &s, p);
    __m512i S[KVD__AVX512_TOKENS], sum[KVD__AVX512_TOKENS];
#define M(t) S[t] = _mm512_setzero_si512()
    EACH_TOKEN(T, M);
#undef M
    for (int j = 0; j < subs; j++) {
        const sub_block sub = find(f, p, j);
        if (kvd__has_min(f)) {
#define M(t) sum[t] = _mm512_setzero_si512()
            EACH_TOKEN(T, M);
#undef M
        } else {
#define M(t) sum[t] = kvd__bcast(side + (1 + j) * T + t)
            EACH_TOKEN(T, M);
#undef M
        }
        kvd__dot(sum, weights(f, &sub, 0), q, ld, 0, T);
        kvd__dot(sum, weights(f, &sub, 1), q, ld, 4, T);
        kvd__dot(sum, weights(f, &sub, 2), q, ld, 8, T);
        kvd__dot(sum, weights(f, &sub, 3), q, ld, 12, T);
        if (groups == 8) {
            kvd__dot(sum, weights(f, &sub, 4), q, ld, 16, T);
            kvd__dot(sum, weights(f, &sub, 5), q, ld, 20, T);
            kvd__dot(sum, weights(f, &sub, 6), q, ld, 24, T);
            kvd__dot(sum, weights(f, &sub, 7), q, ld, 28, T);
        }
        const __m512i sc = _mm512_cvtepi8_epi32(_mm_load_si128((const void *)s.sc[j]));
#define M(t) S[t] = _mm512_add_epi32(S[t], _mm512_mullo_epi32(sc, sum[t]))
        EACH_TOKEN(T, M);
#undef M
        KVD__ROWS_NEXT(q, 4 * groups);
        if (T == 1)
            kvd__prefetch_block(p, o, j, subs);
    }
    const __m512 d = kvd__load_16_f16(p + o.d);
#define M(t)                                                                   \
    acc[t] = _mm512_fmadd_ps(_mm512_mul_ps(d, kvd__bcast_f32(side + t)), _mm512_cvtepi32_ps(S[t]), acc[t])
    EACH_TOKEN(T, M);
#undef M
    if (kvd__has_min(f)) {
        const __m512 dmin = kvd__load_16_f16(p + o.m);
        __m512i *min_sum = sum;
#define M(t) min_sum[t] = _mm512_setzero_si512()
        EACH_TOKEN(T, M);
#undef M
        for (int j = 0; j < subs / 2; j++) {
#define M(t) min_sum[t] = _mm512_dpwssd_epi32(min_sum[t], s.mins[j], kvd__bcast(side + (1 + j) * T + t))
            EACH_TOKEN(T, M);
#undef M
        }
#define M(t)                                                                   \
    acc[t] = _mm512_fnmadd_ps(_mm512_mul_ps(dmin, kvd__bcast_f32(side + t)), _mm512_cvtepi32_ps(min_sum[t]), acc[t])
        EACH_TOKEN(T, M);
#undef M
    }
}

KVD__INLINE void tile_256(const kvd_dtype f, const kvd__tile *c, const int T)
{
    for (int64_t i = 0; i < c->n_panels; i++) {
        const uint8_t *p = c->panels + i * c->panel_bytes;
        const int32_t *side = c->side;
        KVD__ROWS(int8_t, q, c->q, c->ld, T);
        __m512 acc[KVD__AVX512_TOKENS];
        kvd__start(c, i, T, acc);
        for (int64_t b = 0; b < c->n_blocks; b++) {
            step_256(f, p, q, c->ld, side, acc, T);
            p += kvd__layout_of(f).stride;
            side += n_words(f) * T;
            KVD__ROWS_NEXT(q, 256);
        }
        kvd__finish(c, i, T, acc);
    }
}

#define DEFINE_TILE(TYPE, stem, T)                                             \
    static void tile_##stem##_##T(const kvd__tile *c) { tile_256(KVD_##TYPE, c, T); }

/* X(format, stem, side, bias) */
#define FORMATS(X)                                                             \
    X(Q2_K, q2_k, KVD__SIDE_PAIRS_16, 0)                                       \
    X(Q3_K, q3_k, KVD__SIDE_BIAS_16, 4)                                        \
    X(Q4_K, q4_k, KVD__SIDE_PAIRS_32, 0)                                       \
    X(Q5_K, q5_k, KVD__SIDE_PAIRS_32, 0)                                       \
    X(Q6_K, q6_k, KVD__SIDE_BIAS_16, 32)                                       \
    X(IQ4_XS, iq4_xs, KVD__SIDE_BIAS_32, 128)

#define DEFINE(TYPE, stem, side, bias)                                                               \
    KVD__1_TO_12(DEFINE_TILE, TYPE, stem)                                                            \
    static kvd__tile_fn *const tiles_##stem[] = KVD__TILES_12(stem);                                 \
    static const kvd__walk walk_##stem = {tiles_##stem, 12, KVD__##TYPE##_STRIDE, 256, side, bias};  \
    static void gemm_##stem(float *y, int64_t ld_y, const void *panels, int64_t n_panels, int64_t K, \
                            const kvd_acts *a, int64_t T)                                            \
    {                                                                                                \
        kvd__gemm_walk(&walk_##stem, y, ld_y, panels, n_panels, K, a, T);                            \
    }
FORMATS(DEFINE)

void kvd__kern_fill_gemm_k_avx512(kvd_kern *k)
{
#define FILL(TYPE, stem, ...) k->gemm[KVD_##TYPE] = gemm_##stem;
    FORMATS(FILL)
}
