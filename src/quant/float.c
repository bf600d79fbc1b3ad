/* F32, F16, BF16: one element is one block; widening is exact. */
#include "quant/format.h"

static void dequant_f32(const uint8_t *src, float *dst, int64_t n) { memcpy(dst, src, (size_t)n * 4); }

static void dequant_f16(const uint8_t *src, float *dst, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        dst[i] = kvd__load_f16(src + 2 * i);
}

static void dequant_bf16(const uint8_t *src, float *dst, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        dst[i] = kvd__bf16_to_f32(kvd__load_u16(src + 2 * i));
}

const kvd__format kvd__format_f32 = {dequant_f32, {{0, 4, 1}}};
const kvd__format kvd__format_f16 = {dequant_f16, {{0, 2, 1}}};
const kvd__format kvd__format_bf16 = {dequant_bf16, {{0, 2, 1}}};
