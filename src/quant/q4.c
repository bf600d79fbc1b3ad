/* Q4_0 and Q4_1: 32 elements of 4 bits with one scale, centred or with a minimum.
 *
 *   Q4_0   0 d f16   2 qs[16]             value = d*(q - 8)
 *   Q4_1   0 d f16   2 m f16   4 qs[16]   value = d*q + m
 *
 * The low nibble of qs[i] is element i, the high one element i + 16. */
#include "quant/format.h"

static void dequant_q4_0(const uint8_t *src, float *dst, int64_t n)
{
    for (int64_t b = 0; b < n; b++, src += 18, dst += 32) {
        float d = kvd__load_f16(src);
        for (int i = 0; i < 16; i++) {
            dst[i] = d * (float)((src[2 + i] & 15) - 8);
            dst[i + 16] = d * (float)((src[2 + i] >> 4) - 8);
        }
    }
}

static void dequant_q4_1(const uint8_t *src, float *dst, int64_t n)
{
    for (int64_t b = 0; b < n; b++, src += 20, dst += 32) {
        float d = kvd__load_f16(src), m = kvd__load_f16(src + 2);
        for (int i = 0; i < 16; i++) {
            dst[i] = kvd__fmaf(d, (float)(src[4 + i] & 15), m);
            dst[i + 16] = kvd__fmaf(d, (float)(src[4 + i] >> 4), m);
        }
    }
}

const kvd__format kvd__format_q4_0 = {dequant_q4_0, {{2, 4, 4}, {0, 2, 1}}};
const kvd__format kvd__format_q4_1 = {dequant_q4_1, {{4, 4, 4}, {0, 2, 1}, {2, 2, 1}}};
