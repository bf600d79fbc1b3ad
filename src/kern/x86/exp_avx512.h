/* kern/x86: kvd__exp_f32 in sixteen lanes. The same operations in the same order
 * (kern/exp_f32.h says why they are what they are). */
#ifndef KVD_KERN_X86_EXP_AVX512_H
#define KVD_KERN_X86_EXP_AVX512_H

#include <immintrin.h>

#include "kern/exp_f32.h"

/* e^x in the lanes of `lanes`, +0 in the others, for x <= 88.37626 or NaN: all
 * that softmax needs. */
static inline __m512 kvd__exp_below_avx512(__mmask16 lanes, __m512 x)
{
    __m512 magic = _mm512_set1_ps(KVD__EXP_MAGIC), one = _mm512_set1_ps(1.0f);
    __m512 t = _mm512_fmadd_ps(x, _mm512_set1_ps(KVD__EXP_LOG2E), magic), n = _mm512_sub_ps(t, magic);
    __m512 r = _mm512_fmadd_ps(n, _mm512_set1_ps(-KVD__EXP_LN2_HI), x);
    r = _mm512_fmadd_ps(n, _mm512_set1_ps(-KVD__EXP_LN2_LO), r);
    __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(KVD__EXP_C6), r, _mm512_set1_ps(KVD__EXP_C5));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(KVD__EXP_C4));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(KVD__EXP_C3));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(KVD__EXP_C2));
    p = _mm512_fmadd_ps(p, r, one);
    p = _mm512_fmadd_ps(p, r, one);
    __m512i power = _mm512_add_epi32(_mm512_slli_epi32(_mm512_castps_si512(t), 23), _mm512_castps_si512(one));
    /* "not less" is true of a NaN */
    __mmask16 not_zero = _mm512_mask_cmp_ps_mask(lanes, x, _mm512_set1_ps(KVD__EXP_LO), _CMP_NLT_UQ);
    return _mm512_maskz_mul_ps(not_zero, p, _mm512_castsi512_ps(power));
}

static inline __m512 kvd__exp_avx512(__m512 x)
{
    __m512 inf = _mm512_castsi512_ps(_mm512_set1_epi32(0x7f800000));
    __mmask16 over = _mm512_cmp_ps_mask(x, _mm512_set1_ps(KVD__EXP_HI), _CMP_GT_OQ);
    return _mm512_mask_mov_ps(kvd__exp_below_avx512(0xffff, x), over, inf);
}

/* The sum of 16 lanes by the contract's fold: 8, 4, 2, 1. */
static inline float kvd__fold16_avx512(__m512 v)
{
    __m256 a = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}

#endif
