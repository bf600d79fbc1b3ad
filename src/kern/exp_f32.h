/* kern: the one exp of the engine, in f32. Softmax, SiLU and GELU use it, and
 * every ISA repeats these operations in this order, on these constants.
 *
 *   n = rne(x * log2 e)          by adding and taking away 1.5 * 2^23
 *   r = (x - n*LN2_HI) - n*LN2_LO
 *   e^x = 2^n * (1 + r + r^2 * q(r)),   q of degree 4 by Horner
 *
 * All of it is fused multiply-add. LN2_HI is ln 2 rounded to f32; the first
 * reduction step is exact nevertheless (the difference is a multiple of 2^-25
 * below 0.35, so it fits 24 bits), and two constants are enough. The polynomial
 * is minimax in relative error on |r| <= 0.3468 with the coefficients 1 and 1
 * fixed and the others rounded to f32 one after the other, each time refitting
 * the rest: 2^-27.7. In all, the result is within 1.0 ulp of e^x.
 *
 * Ends: below LO the result is +0, above HI it is +inf, so that 2^n is a normal
 * number (-126 <= n <= 127) and r >= 0 where n = -126: no result is subnormal.
 * e^0 is exactly 1. A NaN gives that NaN, made quiet.
 *
 * What is made of it:
 *
 * SiLU is x / (1 + e^-x). Where e^-x overflows to infinity (x below -88.4) the
 * quotient is -0; the true value is below 2^-120 there.
 *
 * GELU, tanh form, is x/2 * (1 + tanh u), u = sqrt(2/pi) * (x + 0.044715 x^3).
 * Since (1 + tanh u)/2 = 1 / (1 + e^-2u), it is x / (1 + e^z) with
 * z = x * fma(x*x, B, A), A = -2 sqrt(2/pi), B = 0.044715 A: no cancellation at
 * the negative end, where 1 + tanh u has lost all its digits, and none at the
 * positive one, where e^z is 0. x*x = inf gives z = -+inf and so x or -0. */
#ifndef KVD_KERN_EXP_F32_H
#define KVD_KERN_EXP_F32_H

#include "base/fma.h"
#include "base/half.h"

#define KVD__EXP_LO (-87.33654f)
#define KVD__EXP_HI 88.37626f
#define KVD__EXP_LOG2E 0x1.715476p+0f
#define KVD__EXP_MAGIC 0x1.8p+23f /* bits 0x4b400000: the low 9 are zero */
#define KVD__EXP_LN2_HI 0x1.62e43p-1f
#define KVD__EXP_LN2_LO (-0x1.05c61p-29f)
#define KVD__EXP_C2 0x1p-1f
#define KVD__EXP_C3 0x1.555466p-3f
#define KVD__EXP_C4 0x1.5552fep-5f
#define KVD__EXP_C5 0x1.1257dcp-7f
#define KVD__EXP_C6 0x1.6ff274p-10f

#define KVD__GELU_A (-1.5957691216057308f)
#define KVD__GELU_B (-0.07135481627260026f)

static inline float kvd__exp_f32(float x)
{
    if (x < KVD__EXP_LO)
        return 0.0f;
    if (x > KVD__EXP_HI)
        return kvd__f32_from_bits(0x7f800000u);
    float t = kvd__fmaf(x, KVD__EXP_LOG2E, KVD__EXP_MAGIC), n = t - KVD__EXP_MAGIC;
    float r = kvd__fmaf(n, -KVD__EXP_LN2_HI, x);
    r = kvd__fmaf(n, -KVD__EXP_LN2_LO, r);
    float p = kvd__fmaf(KVD__EXP_C6, r, KVD__EXP_C5);
    p = kvd__fmaf(p, r, KVD__EXP_C4);
    p = kvd__fmaf(p, r, KVD__EXP_C3);
    p = kvd__fmaf(p, r, KVD__EXP_C2);
    p = kvd__fmaf(p, r, 1.0f);
    p = kvd__fmaf(p, r, 1.0f);
    return p * kvd__f32_from_bits((kvd__f32_bits(t) << 23) + 0x3f800000u);
}

#endif
