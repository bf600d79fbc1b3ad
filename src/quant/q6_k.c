/* Q6_K: 256 elements of 6 bits in 16 sub-blocks of 16, each with a signed 8-bit
 * scale.
 *
 *   0 ql[128]   128 qh[64]   192 scales[16] i8   208 d f16
 *
 *   value = d*sc*(q - 32)
 *
 * Element 128h + 32p + l: the low 4 bits are nibble p/2 of ql[64h + 32*(p%2) + l],
 * the high 2 are bits 2p, 2p+1 of qh[32h + l]. All products are exact in f32
 * (11 + 8 + 5 bits). */
#include "quant/format.h"

static void dequant_q6_k(const uint8_t *src, float *dst, int64_t n)
{
    for (int64_t b = 0; b < n; b++, src += 210, dst += 256) {
        const uint8_t *ql = src, *qh = src + 128, *scales = src + 192;
        float d = kvd__load_f16(src + 208);
        for (int i = 0; i < 256; i++) {
            int h = i / 128, p = i / 32 % 4, l = i % 32;
            int q = (ql[64 * h + 32 * (p % 2) + l] >> (4 * (p / 2)) & 15) | (qh[32 * h + l] >> (2 * p) & 3) << 4;
            float dl = d * (float)(int8_t)scales[i / 16];
            dst[i] = dl * (float)(q - 32);
        }
    }
}

const kvd__format kvd__format_q6_k = {dequant_q6_k, {{0, 4, 32}, {128, 4, 16}, {192, 1, 16}, {208, 2, 1}}};
