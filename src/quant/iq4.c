/* IQ4_NL and IQ4_XS: 4-bit indices into a fixed table of 16 unevenly spaced
 * values, denser around zero, where weights are.
 *
 *   IQ4_NL   0 d f16   2 qs[16]                            value = d*T[q]
 *   IQ4_XS   0 d f16   2 scales_h u16   4 scales_l[4]   8 qs[128]
 *                                                          value = d*(ls - 32)*T[q]
 *
 * IQ4_XS has 8 sub-blocks of 32, each with nibbles as IQ4_NL has them and a
 * scale ls of 6 bits: the low 4 of sub-block j are nibble j of scales_l, the
 * high 2 are bits 2j, 2j+1 of scales_h. */
#include "quant/format.h"
#include "quant/panel.h"

const int8_t kvd__iq4_table[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

static void dequant_iq4_nl(const uint8_t *src, float *dst, int64_t n)
{
    for (int64_t b = 0; b < n; b++, src += 18, dst += 32) {
        float d = kvd__load_f16(src);
        for (int i = 0; i < 16; i++) {
            dst[i] = d * (float)kvd__iq4_table[src[2 + i] & 15];
            dst[i + 16] = d * (float)kvd__iq4_table[src[2 + i] >> 4];
        }
    }
}

static void dequant_iq4_xs(const uint8_t *src, float *dst, int64_t n)
{
    for (int64_t b = 0; b < n; b++, src += 136) {
        float d = kvd__load_f16(src);
        unsigned scales_h = kvd__load_u16(src + 2);
        const uint8_t *qs = src + 8;
        for (int j = 0; j < 8; j++, qs += 16, dst += 32) {
            int ls = (src[4 + j / 2] >> (4 * (j % 2)) & 15) | (int)(scales_h >> (2 * j) & 3) << 4;
            float dl = d * (float)(ls - 32);
            for (int i = 0; i < 16; i++) {
                dst[i] = dl * (float)kvd__iq4_table[qs[i] & 15];
                dst[i + 16] = dl * (float)kvd__iq4_table[qs[i] >> 4];
            }
        }
    }
}

const kvd__format kvd__format_iq4_nl = {dequant_iq4_nl, {{2, 4, 4}, {0, 2, 1}}};
const kvd__format kvd__format_iq4_xs = {dequant_iq4_xs, {{8, 4, 32}, {4, 1, 4}, {2, 2, 1}, {0, 2, 1}}};
