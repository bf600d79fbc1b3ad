/* Q4_K and Q5_K: 256 elements of 4 or 5 bits in 8 sub-blocks of 32, each with a
 * 6-bit scale and a 6-bit minimum. They differ in the fifth bits only.
 *
 *   Q4_K   0 d f16   2 dmin f16   4 scales[12]   16 qs[128]
 *   Q5_K   0 d f16   2 dmin f16   4 scales[12]   16 qh[32]   48 qs[128]
 *
 *   value = d*sc*q - dmin*m
 *
 * Sub-block s = 2c + n, element l: nibble n of qs[32c + l]; bit s of qh[l] is the
 * fifth bit. The 16 numbers of 6 bits in 12 bytes S: for j < 4, sc and m are the
 * low 6 bits of S[j] and S[j + 4]; for j >= 4 their low nibbles share S[j + 4]
 * and their high 2 bits are the top bits of S[j - 4] and S[j].
 * d*sc*q is exact in f32 (11 + 6 + 5 bits): one rounding, that of the
 * subtraction. */
#include "quant/format.h"

static void scale_min(const uint8_t *s, int j, int *sc, int *m)
{
    if (j < 4) {
        *sc = s[j] & 63;
        *m = s[j + 4] & 63;
    } else {
        *sc = (s[j + 4] & 15) | (s[j - 4] >> 6) << 4;
        *m = s[j + 4] >> 4 | (s[j] >> 6) << 4;
    }
}

/* qh == NULL: no fifth bits. */
static void dequant_block(const uint8_t *head, const uint8_t *qh, const uint8_t *qs, float *dst)
{
    float d = kvd__load_f16(head), dmin = kvd__load_f16(head + 2);
    for (int s = 0; s < 8; s++, dst += 32) {
        int sc, m;
        scale_min(head + 4, s, &sc, &m);
        float dl = d * (float)sc, ml = dmin * (float)m;
        for (int l = 0; l < 32; l++) {
            int q = qs[32 * (s / 2) + l] >> (4 * (s % 2)) & 15;
            if (qh)
                q |= (qh[l] >> s & 1) << 4;
            dst[l] = kvd__fmaf(dl, (float)q, -ml);
        }
    }
}

static void dequant_q4_k(const uint8_t *src, float *dst, int64_t n)
{
    for (int64_t b = 0; b < n; b++, src += 144, dst += 256)
        dequant_block(src, NULL, src + 16, dst);
}

static void dequant_q5_k(const uint8_t *src, float *dst, int64_t n)
{
    for (int64_t b = 0; b < n; b++, src += 176, dst += 256)
        dequant_block(src, src + 16, src + 48, dst);
}

const kvd__format kvd__format_q4_k = {dequant_q4_k, {{16, 4, 32}, {4, 1, 12}, {0, 2, 1}, {2, 2, 1}}};
const kvd__format kvd__format_q5_k = {dequant_q5_k, {{48, 4, 32}, {16, 4, 8}, {4, 1, 12}, {0, 2, 1}, {2, 2, 1}}};
