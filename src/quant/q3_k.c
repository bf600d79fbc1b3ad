/* Q3_K: 256 elements of 3 bits in 16 sub-blocks of 16, each with a 6-bit scale.
 *
 *   0 hmask[32]   32 qs[64]   96 scales[12]   108 d f16
 *
 *   value = d*(sc - 32)*(q2 + 4*hbit - 4)
 *
 * Element 128h + 32g + l: q2 is bits 2g, 2g+1 of qs[32h + l], hbit is bit 4h + g
 * of hmask[l]. Scale j: low 4 bits from nibble j/8 of scales[j%8], high 2 from
 * bits 2*(j/4), 2*(j/4)+1 of scales[8 + j%4]. All products are exact in f32. */
#include "quant/format.h"

static int scale(const uint8_t *s, int j)
{
    return (s[j % 8] >> (4 * (j / 8)) & 15) | (s[8 + j % 4] >> (2 * (j / 4)) & 3) << 4;
}

static void dequant_q3_k(const uint8_t *src, float *dst, int64_t n)
{
    for (int64_t b = 0; b < n; b++, src += 110, dst += 256) {
        const uint8_t *hmask = src, *qs = src + 32, *scales = src + 96;
        float d = kvd__load_f16(src + 108);
        for (int i = 0; i < 256; i++) {
            int h = i / 128, g = i / 32 % 4, l = i % 32;
            int q = (qs[32 * h + l] >> (2 * g) & 3) | (hmask[l] >> (4 * h + g) & 1) << 2;
            float dl = d * (float)(scale(scales, i / 16) - 32);
            dst[i] = dl * (float)(q - 4);
        }
    }
}

const kvd__format kvd__format_q3_k = {dequant_q3_k, {{32, 4, 16}, {0, 4, 8}, {96, 1, 12}, {108, 2, 1}}};
