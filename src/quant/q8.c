/* Q8_0: 32 signed bytes with one scale.
 *
 *   0 d f16   2 qs[32] i8      value = d*q
 *
 * -128 does not come out of the usual quantisers, but a file may hold it. */
#include "quant/format.h"

static void dequant_q8_0(const uint8_t *src, float *dst, int64_t n)
{
    for (int64_t b = 0; b < n; b++, src += 34, dst += 32) {
        float d = kvd__load_f16(src);
        for (int i = 0; i < 32; i++)
            dst[i] = d * (float)(int8_t)src[2 + i];
    }
}

const kvd__format kvd__format_q8_0 = {dequant_q8_0, {{2, 4, 8}, {0, 2, 1}}};
