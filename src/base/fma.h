/* base: the fused multiply-add of the scalar reference, without libm.
 *
 * KVD_FMA_HW is set by the build for files that are compiled for a CPU with FMA.
 * Otherwise: the product of two f32 is exact in f64 (24 + 24 <= 53 bits); the
 * sum is formed in f64 with its error by TwoSum and rounded to odd, so that the
 * final narrowing rounds once (Boldo and Melquiond, "Emulation of FMA and
 * correctly rounded sums", 2008). */
#ifndef KVD_BASE_FMA_H
#define KVD_BASE_FMA_H

#include <stdint.h>
#include <string.h>

static inline float kvd__fmaf_soft(float a, float b, float c)
{
    double p = (double)a * (double)b, z = (double)c;
    double s = p + z;
    double bb = s - p, e = (p - (s - bb)) + (z - bb);
    uint64_t u;
    memcpy(&u, &s, 8);
    if (e != 0.0 && !(u & 1) && (u >> 52 & 0x7ff) != 0x7ff) {
        /* inexact and even: step one ulp towards the true sum, making it odd */
        int away = (e > 0.0) == (s > 0.0);
        u = away ? u + 1 : u - 1;
        memcpy(&s, &u, 8);
    }
    return (float)s;
}

static inline float kvd__fmaf(float a, float b, float c)
{
#if defined(KVD_FMA_HW) || defined(__FMA__) || defined(__aarch64__)
    return __builtin_fmaf(a, b, c);
#else
    return kvd__fmaf_soft(a, b, c);
#endif
}

#endif
