/* base: f16 and bf16 <-> f32 in integer arithmetic, round to nearest even,
 * subnormals kept, NaN stays NaN (quieted). The truth that SIMD must equal. */
#ifndef KVD_BASE_HALF_H
#define KVD_BASE_HALF_H

#include <stdint.h>
#include <string.h>

static inline uint32_t kvd__f32_bits(float f)
{
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
}

static inline float kvd__f32_from_bits(uint32_t u)
{
    float f;
    memcpy(&f, &u, 4);
    return f;
}

static inline float kvd__f16_to_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, e = (h >> 10) & 0x1f, m = h & 0x3ff;
    if (e == 0x1f) /* infinity, or NaN made quiet */
        return kvd__f32_from_bits(sign | 0x7f800000u | (m ? 0x400000u | m << 13 : 0));
    if (e == 0) { /* zero or subnormal: m * 2^-24, exact */
        float f = (float)m * 0x1p-24f;
        return kvd__f32_from_bits(sign | kvd__f32_bits(f));
    }
    return kvd__f32_from_bits(sign | (e + 112) << 23 | m << 13);
}

static inline uint16_t kvd__f16_from_f32(float f)
{
    uint32_t u = kvd__f32_bits(f), sign = u >> 16 & 0x8000, a = u & 0x7fffffff;
    if (a > 0x7f800000u) /* NaN: payload's top bits, quiet */
        return (uint16_t)(sign | 0x7e00 | (a >> 13 & 0x3ff));
    if (a >= 0x477ff000u) /* 65520 and above round to infinity */
        return (uint16_t)(sign | 0x7c00);
    if (a >= 0x38800000u) { /* normal: round the low 13 bits away */
        uint32_t r = a - 0x38000000u;
        return (uint16_t)(sign | ((r + 0xfff + (r >> 13 & 1)) >> 13));
    }
    if (a < 0x33000000u) /* below half the least subnormal: zero */
        return (uint16_t)sign;
    uint32_t shift = 126 - (a >> 23), m = (a & 0x7fffff) | 0x800000; /* 14..24 */
    uint32_t q = m >> shift, rest = m & ((1u << shift) - 1), half = 1u << (shift - 1);
    return (uint16_t)(sign | (q + (rest > half || (rest == half && (q & 1)))));
}

static inline float kvd__bf16_to_f32(uint16_t h)
{
    return kvd__f32_from_bits((uint32_t)h << 16);
}

static inline uint16_t kvd__bf16_from_f32(float f)
{
    uint32_t u = kvd__f32_bits(f);
    if ((u & 0x7fffffff) > 0x7f800000u)
        return (uint16_t)(u >> 16 | 0x40);
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

#endif
