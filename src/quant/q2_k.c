/* Q2_K: 256 elements of 2 bits in 16 sub-blocks of 16, each with a 4-bit scale
 * and a 4-bit minimum.
 *
 *   0 scales[16]   16 qs[64]   80 d f16   82 dmin f16
 *
 *   value = d*(s & 15)*q - dmin*(s >> 4)
 *
 * Element 128h + 32g + l is bits 2g, 2g+1 of qs[32h + l]; sub-block j = i/16.
 * d*(s & 15)*q is exact in f32 (11 + 4 + 2 bits), so the one rounding is that of
 * the subtraction, fused or not. */
#include "quant/format.h"

static void dequant_q2_k(const uint8_t *src, float *dst, int64_t n)
{
    for (int64_t b = 0; b < n; b++, src += 84, dst += 256) {
        const uint8_t *scales = src, *qs = src + 16;
        float d = kvd__load_f16(src + 80), dmin = kvd__load_f16(src + 82);
        for (int i = 0; i < 256; i++) {
            int h = i / 128, g = i / 32 % 4, l = i % 32, s = scales[i / 16];
            float dl = d * (float)(s & 15), ml = dmin * (float)(s >> 4);
            dst[i] = kvd__fmaf(dl, (float)(qs[32 * h + l] >> (2 * g) & 3), -ml);
        }
    }
}

const kvd__format kvd__format_q2_k = {dequant_q2_k, {{16, 4, 16}, {0, 1, 16}, {80, 2, 1}, {82, 2, 1}}};
