/* kern/x86: kvd__exp_f32 in eight lanes. The same operations in the same order
 * (kern/exp_f32.h says why they are what they are). */
#ifndef KVD_KERN_X86_EXP_AVX2_H
#define KVD_KERN_X86_EXP_AVX2_H

#include <immintrin.h>

#include "kern/exp_f32.h"

/* For x <= 88.37626 or NaN: all that softmax needs. */
static inline __m256 kvd__exp_below_avx2(__m256 x)
{
    __m256 magic = _mm256_set1_ps(KVD__EXP_MAGIC), one = _mm256_set1_ps(1.0f);
    __m256 t = _mm256_fmadd_ps(x, _mm256_set1_ps(KVD__EXP_LOG2E), magic), n = _mm256_sub_ps(t, magic);
    __m256 r = _mm256_fmadd_ps(n, _mm256_set1_ps(-KVD__EXP_LN2_HI), x);
    r = _mm256_fmadd_ps(n, _mm256_set1_ps(-KVD__EXP_LN2_LO), r);
    __m256 p = _mm256_fmadd_ps(_mm256_set1_ps(KVD__EXP_C6), r, _mm256_set1_ps(KVD__EXP_C5));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(KVD__EXP_C4));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(KVD__EXP_C3));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(KVD__EXP_C2));
    p = _mm256_fmadd_ps(p, r, one);
    p = _mm256_fmadd_ps(p, r, one);
    __m256i power = _mm256_add_epi32(_mm256_slli_epi32(_mm256_castps_si256(t), 23), _mm256_castps_si256(one));
    p = _mm256_mul_ps(p, _mm256_castsi256_ps(power));
    return _mm256_andnot_ps(_mm256_cmp_ps(x, _mm256_set1_ps(KVD__EXP_LO), _CMP_LT_OQ), p);
}

static inline __m256 kvd__exp_avx2(__m256 x)
{
    __m256 inf = _mm256_castsi256_ps(_mm256_set1_epi32(0x7f800000));
    return _mm256_blendv_ps(kvd__exp_below_avx2(x), inf, _mm256_cmp_ps(x, _mm256_set1_ps(KVD__EXP_HI), _CMP_GT_OQ));
}

/* The sum of 16 lanes by the contract's fold: 8, 4, 2, 1. */
static inline float kvd__fold16_avx2(__m256 lo, __m256 hi)
{
    __m256 a = _mm256_add_ps(lo, hi);
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}

#endif
