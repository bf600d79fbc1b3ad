/* kern/x86, internal: loads and token loops of the AVX2 products. A k-vector is
 * two registers, rows 0-7 and 8-15; names end in 0 and 1 for them. */
#ifndef KVD_KERN_X86_GEMM_AVX2_H
#define KVD_KERN_X86_GEMM_AVX2_H

#include <immintrin.h>
#include <string.h>

#include "kern/gemm_tiles.h"

enum { KVD__AVX2_TOKENS = 5 }; /* two sums each, and what makes them: 15 registers */
#define EACH_TOKEN KVD__EACH_5

KVD__INLINE __m256i kvd__load(const void *p) { return _mm256_loadu_si256(p); }
KVD__INLINE __m256 kvd__load_8_f16(const void *p) { return _mm256_cvtph_ps(_mm_loadu_si128(p)); }

KVD__INLINE __m256i kvd__bcast(const void *p)
{
    int32_t v;
    memcpy(&v, p, 4);
    return _mm256_set1_epi32(v);
}

KVD__INLINE __m256 kvd__bcast_f32(const void *p)
{
    float v;
    memcpy(&v, p, 4);
    return _mm256_set1_ps(v);
}

/* (x >> n) & mask of bytes. */
KVD__INLINE __m256i kvd__bits(__m256i x, const int n, const int mask)
{
    return _mm256_and_si256(n ? _mm256_srli_epi16(x, n) : x, _mm256_set1_epi8((char)mask));
}

/* The chains of a tile, [T][16], on the stack: a block's integer sums need the
 * registers, and the chains are touched once a block. The array is passed
 * through an empty asm so that compilers leave it there. */
typedef struct kvd__chains {
    _Alignas(32) float v[16 * KVD__AVX2_TOKENS];
} kvd__chains;

KVD__INLINE float *kvd__start(const kvd__tile *c, int64_t i, const int T, kvd__chains *chains)
{
    const float *y = c->y + KVD__PANEL_ROWS * i;
    float *v = chains->v;
    __asm__("" : "+r"(v) : : "memory");
    for (int t = 0; t < T; t++)
        if (c->carry)
            memcpy(v + 16 * t, y + t * c->ld_y, 16 * sizeof *v);
        else
            memset(v + 16 * t, 0, 16 * sizeof *v);
    return v;
}

KVD__INLINE void kvd__finish(const kvd__tile *c, int64_t i, const int T, const float *v)
{
    float *y = c->y + KVD__PANEL_ROWS * i;
    for (int t = 0; t < T; t++)
        memcpy(y + t * c->ld_y, v + 16 * t, 16 * sizeof *v);
}

/* The same address, but not known to be: what was read is read again, which is
 * cheaper than a spill. */
KVD__INLINE const uint8_t *kvd__reread(const uint8_t *p)
{
    __asm__("" : "+r"(p));
    return p;
}

/* a + b, now: integer sums may be reordered, and both compilers then put all the
 * products of a block first and spill them. The empty asm makes the sum opaque. */
KVD__INLINE __m256i kvd__add_16(__m256i a, __m256i b)
{
    __m256i sum = _mm256_add_epi16(a, b);
    __asm__("" : "+x"(sum));
    return sum;
}

KVD__INLINE __m256i kvd__add_32(__m256i a, __m256i b)
{
    __m256i sum = _mm256_add_epi32(a, b);
    __asm__("" : "+x"(sum));
    return sum;
}

/* 16-bit sums of w (u8) . q of token t (s8), 4 k at `at`; first: instead of
 * adding to what is there. The caller sees to it that nothing saturates. */
KVD__INLINE void kvd__dot(__m256i sum0[], __m256i sum1[], __m256i w0, __m256i w1, const int8_t *const q[2],
                          int64_t ld, int at, const bool first, const int T)
{
#define M(t)                                                                              \
    do {                                                                                  \
        const __m256i a = kvd__bcast(TOKEN_ROW(q, ld, t) + at);                           \
        const __m256i v0 = _mm256_maddubs_epi16(w0, a), v1 = _mm256_maddubs_epi16(w1, a); \
        sum0[t] = first ? v0 : kvd__add_16(sum0[t], v0);                                  \
        sum1[t] = first ? v1 : kvd__add_16(sum1[t], v1);                                  \
    } while (0)
    EACH_TOKEN(T, M);
#undef M
}

/* 32-bit sums of signed weights: |w| (u8) . sign(q, w), times c (i16 lanes). The
 * pair sums of vpmaddubsw are at most 2*128*127, so each must be widened alone. */
KVD__INLINE void kvd__dot_signed(__m256i sum0[], __m256i sum1[], __m256i w0, __m256i w1, __m256i c0, __m256i c1,
                                 const int8_t *const q[2], int64_t ld, int at, const int T)
{
    const __m256i abs0 = _mm256_abs_epi8(w0), abs1 = _mm256_abs_epi8(w1);
#define M(t)                                                                    \
    do {                                                                        \
        const __m256i a = kvd__bcast(TOKEN_ROW(q, ld, t) + at);                 \
        const __m256i v0 = _mm256_maddubs_epi16(abs0, _mm256_sign_epi8(a, w0)); \
        const __m256i v1 = _mm256_maddubs_epi16(abs1, _mm256_sign_epi8(a, w1)); \
        sum0[t] = kvd__add_32(sum0[t], _mm256_madd_epi16(v0, c0));              \
        sum1[t] = kvd__add_32(sum1[t], _mm256_madd_epi16(v1, c1));              \
    } while (0)
    EACH_TOKEN(T, M);
#undef M
}

/* The rows that a tile of T tokens reads, from the chunk's start on. */
#define KVD__ROWS(type, name, p, ld, T) const type *name[2] = {(p), (T) > 3 ? (p) + 3 * (ld) : (p)}
#define KVD__ROWS_NEXT(name, n) (name[0] += (n), name[1] += (n))

void kvd__kern_fill_gemm_k_avx2(kvd_kern *k); /* gemm_k_avx2.c */

#endif
