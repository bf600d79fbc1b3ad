/* kern/x86, internal: loads and token loops of the AVX-512 products. */
#ifndef KVD_KERN_X86_GEMM_AVX512_H
#define KVD_KERN_X86_GEMM_AVX512_H

#include <immintrin.h>
#include <string.h>

#include "kern/gemm_tiles.h"

enum { KVD__AVX512_TOKENS = 12 }; /* a sum and a chain each, and some weights: 32 registers */
#define EACH_TOKEN KVD__EACH_12

KVD__INLINE __m512i kvd__load(const void *p) { return _mm512_loadu_si512(p); }
KVD__INLINE __m512 kvd__load_16_f16(const void *p) { return _mm512_cvtph_ps(_mm256_loadu_si256(p)); }

/* 4 bytes to all lanes: the operand {1to16} of the instruction that uses it. */
KVD__INLINE __m512i kvd__bcast(const void *p)
{
    int32_t v;
    memcpy(&v, p, 4);
    return _mm512_set1_epi32(v);
}

KVD__INLINE __m512 kvd__bcast_f32(const void *p)
{
    float v;
    memcpy(&v, p, 4);
    return _mm512_set1_ps(v);
}

KVD__INLINE void kvd__start(const kvd__tile *c, int64_t i, const int T, __m512 acc[])
{
    const float *y = c->y + KVD__PANEL_ROWS * i;
    if (c->carry) {
#define M(t) acc[t] = _mm512_loadu_ps(y + t * c->ld_y)
        EACH_TOKEN(T, M);
#undef M
    } else {
#define M(t) acc[t] = _mm512_setzero_ps()
        EACH_TOKEN(T, M);
#undef M
    }
}

KVD__INLINE void kvd__finish(const kvd__tile *c, int64_t i, const int T, const __m512 acc[])
{
    float *y = c->y + KVD__PANEL_ROWS * i;
#define M(t) _mm512_storeu_ps(y + t * c->ld_y, acc[t])
    EACH_TOKEN(T, M);
#undef M
}

/* sum[t] += w (u8) . q of token t (s8), 4 k at `at`. */
KVD__INLINE void kvd__dot(__m512i sum[], __m512i w, const int8_t *const q[4], int64_t ld, int at, const int T)
{
#define M(t) sum[t] = _mm512_dpbusd_epi32(sum[t], w, kvd__bcast(TOKEN_ROW(q, ld, t) + at))
    EACH_TOKEN(T, M);
#undef M
}

/* The rows of q that a tile of T tokens reads, from block 0 on. */
#define KVD__ROWS(type, name, p, ld, T)                                                         \
    const type *name[4] = {(p), (T) > 3 ? (p) + 3 * (ld) : (p), (T) > 6 ? (p) + 6 * (ld) : (p), \
                           (T) > 9 ? (p) + 9 * (ld) : (p)}
#define KVD__ROWS_NEXT(name, n) (name[0] += (n), name[1] += (n), name[2] += (n), name[3] += (n))

void kvd__kern_fill_gemm_k_avx512(kvd_kern *k); /* gemm_k_avx512.c */

#endif
