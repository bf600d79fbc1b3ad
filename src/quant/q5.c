/* Q5_0 and Q5_1: Q4_0 and Q4_1 with a fifth bit per element.
 *
 *   Q5_0   0 d f16   2 qh u32   6 qs[16]             value = d*(q - 16)
 *   Q5_1   0 d f16   2 m f16    4 qh u32   8 qs[16]  value = d*q + m
 *
 * Bit i of qh is bit 4 of element i; nibbles as in Q4_0. */
#include "quant/format.h"

static int element(const uint8_t *qs, uint32_t qh, int i)
{
    int low = i < 16 ? qs[i] & 15 : qs[i - 16] >> 4;
    return low | (int)(qh >> i & 1) << 4;
}

static void dequant_q5_0(const uint8_t *src, float *dst, int64_t n)
{
    for (int64_t b = 0; b < n; b++, src += 22, dst += 32) {
        float d = kvd__load_f16(src);
        uint32_t qh = kvd__load_u32(src + 2);
        for (int i = 0; i < 32; i++)
            dst[i] = d * (float)(element(src + 6, qh, i) - 16);
    }
}

static void dequant_q5_1(const uint8_t *src, float *dst, int64_t n)
{
    for (int64_t b = 0; b < n; b++, src += 24, dst += 32) {
        float d = kvd__load_f16(src), m = kvd__load_f16(src + 2);
        uint32_t qh = kvd__load_u32(src + 4);
        for (int i = 0; i < 32; i++)
            dst[i] = kvd__fmaf(d, (float)element(src + 8, qh, i), m);
    }
}

const kvd__format kvd__format_q5_0 = {dequant_q5_0, {{6, 4, 4}, {2, KVD__UNIT_QH, 1}, {0, 2, 1}}};
const kvd__format kvd__format_q5_1 = {dequant_q5_1, {{8, 4, 4}, {4, KVD__UNIT_QH, 1}, {0, 2, 1}, {2, 2, 1}}};
