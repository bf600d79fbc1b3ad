/* kern/arm, internal: what the NEON kernels share. A vector is four f32; the
 * sixteen lanes of a reduction or the sixteen rows of a panel are four vectors.
 *
 * INLINE functions are written once and made several times, with constant types
 * and sizes; UNROLL(n) marks their loops of constant length, so that arrays of
 * accumulators become registers. */
#ifndef KVD_KERN_ARM_NEON_H
#define KVD_KERN_ARM_NEON_H

#include <arm_neon.h>

#include "kern/exp_f32.h"
#include "kern/kern.h"

#define INLINE static inline __attribute__((always_inline))

#define KVD_STR(x) #x
#if defined(__clang__)
#define UNROLL(n) _Pragma("clang loop unroll(full)")
#else
#define UNROLL(n) _Pragma(KVD_STR(GCC unroll n))
#endif

/* Further parts of kvd__kern_fill_neon and kvd__kern_fill_gemm_neon. */
void kvd__kern_fill_attn_neon(kvd_kern *k);
void kvd__kern_fill_gemm_k_neon(kvd_kern *k);

/* Four f16 or bf16, widened. Inexact types of the cache and of weights; F32 is
 * the caller's case. */
INLINE float32x4_t kvd__f16x4(uint16x4_t h) { return vcvt_f32_f16(vreinterpret_f16_u16(h)); }
INLINE float32x4_t kvd__bf16x4(uint16x4_t h) { return vreinterpretq_f32_u32(vshll_n_u16(h, 16)); }

/* kvd__exp_f32 in four lanes: the same operations in the same order. For
 * x <= 88.37626 or NaN, all that softmax needs. */
INLINE float32x4_t kvd__exp_below_neon(float32x4_t x)
{
    const float32x4_t magic = vdupq_n_f32(KVD__EXP_MAGIC), one = vdupq_n_f32(1.0f);
    float32x4_t t = vfmaq_f32(magic, x, vdupq_n_f32(KVD__EXP_LOG2E)), n = vsubq_f32(t, magic);
    float32x4_t r = vfmaq_f32(x, n, vdupq_n_f32(-KVD__EXP_LN2_HI));
    r = vfmaq_f32(r, n, vdupq_n_f32(-KVD__EXP_LN2_LO));
    float32x4_t p = vfmaq_f32(vdupq_n_f32(KVD__EXP_C5), vdupq_n_f32(KVD__EXP_C6), r);
    p = vfmaq_f32(vdupq_n_f32(KVD__EXP_C4), p, r);
    p = vfmaq_f32(vdupq_n_f32(KVD__EXP_C3), p, r);
    p = vfmaq_f32(vdupq_n_f32(KVD__EXP_C2), p, r);
    p = vfmaq_f32(one, p, r);
    p = vfmaq_f32(one, p, r);
    uint32x4_t power = vaddq_u32(vshlq_n_u32(vreinterpretq_u32_f32(t), 23), vreinterpretq_u32_f32(one));
    p = vmulq_f32(p, vreinterpretq_f32_u32(power));
    uint32x4_t below = vcltq_f32(x, vdupq_n_f32(KVD__EXP_LO)); /* of a NaN: false */
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(p), below));
}

INLINE float32x4_t kvd__exp_neon(float32x4_t x)
{
    const float32x4_t inf = vreinterpretq_f32_u32(vdupq_n_u32(0x7f800000));
    return vbslq_f32(vcgtq_f32(x, vdupq_n_f32(KVD__EXP_HI)), inf, kvd__exp_below_neon(x));
}

/* The sum of 16 lanes by the contract's fold: 8, 4, 2, 1. */
INLINE float kvd__fold16_neon(const float32x4_t s[4])
{
    float32x4_t four = vaddq_f32(vaddq_f32(s[0], s[2]), vaddq_f32(s[1], s[3]));
    float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}

#endif
