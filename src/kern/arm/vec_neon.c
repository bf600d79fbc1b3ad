/* kern/arm: element-wise kernels and stores for NEON. Lanes hold different
 * elements, so the only sum is RMSNorm's, whose 16 lanes are four registers.
 * Every pointer may have 4-byte alignment, and nothing past an end is touched:
 * tails are scalar, by the very functions of the reference.
 *
 * The f16 conversions are the machine's. They round to nearest even, keep
 * subnormals and quiet a NaN with its upper payload, as base/half.h does, under
 * the FPCR of base/fpenv.h. bf16 is made by integers: FEAT_BF16 is not asked for. */
#include <string.h>

#include "base/fma.h"
#include "base/half.h"
#include "kern/arm/neon.h"

/* ---- element-wise ---------------------------------------------------------- */

static int rmsnorm_neon(float *y, const float *x, const float *w, float eps, int64_t n)
{
    float32x4_t s[4] = {vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0)};
    float rest[16] = {0};
    int64_t i = 0;
    for (; i + 16 <= n; i += 16)
        UNROLL(4) for (int l = 0; l < 4; l++) {
            float32x4_t v = vld1q_f32(x + i + 4 * l);
            s[l] = vfmaq_f32(s[l], v, v);
        }
    if (i < n) { /* a lane without an element adds +0 to a sum that is never -0 */
        memcpy(rest, x + i, (size_t)(n - i) * sizeof *x);
        UNROLL(4) for (int l = 0; l < 4; l++) {
            float32x4_t v = vld1q_f32(rest + 4 * l);
            s[l] = vfmaq_f32(s[l], v, v);
        }
    }
    float sum = kvd__fold16_neon(s);
    if ((kvd__f32_bits(sum) & 0x7f800000u) == 0x7f800000u)
        return -1;
    float r = 1.0f / __builtin_sqrtf(sum / (float)n + eps);
    for (i = 0; i + 4 <= n; i += 4)
        vst1q_f32(y + i, vmulq_f32(vmulq_n_f32(vld1q_f32(x + i), r), vld1q_f32(w + i)));
    for (; i < n; i++)
        y[i] = (x[i] * r) * w[i];
    return 0;
}

/* (x0, x1) turned by (c, s). */
INLINE float32x4x2_t turn(float32x4_t x0, float32x4_t x1, float32x4x2_t cs)
{
    const float32x4_t c = cs.val[0], s = cs.val[1];
    float32x4x2_t y = {{vfmaq_f32(vnegq_f32(vmulq_f32(x1, s)), x0, c), vfmaq_f32(vmulq_f32(x1, c), x0, s)}};
    return y;
}

static void rope_neon(float *x, int n_heads, int d_head, int n_rot, const float *cs, bool interleaved)
{
    const int half = n_rot / 2, step = interleaved ? 1 : half; /* from one half of a pair to the other */
    int i = 0;
    for (; i + 4 <= half; i += 4) {
        const float32x4x2_t t = vld2q_f32(cs + 2 * i);
        for (int h = 0; h < n_heads; h++) {
            float *p = x + (int64_t)h * d_head + (interleaved ? 2 * i : i);
            if (interleaved) {
                float32x4x2_t v = vld2q_f32(p);
                vst2q_f32(p, turn(v.val[0], v.val[1], t));
            } else {
                float32x4x2_t v = turn(vld1q_f32(p), vld1q_f32(p + half), t);
                vst1q_f32(p, v.val[0]);
                vst1q_f32(p + half, v.val[1]);
            }
        }
    }
    for (; i < half; i++)
        for (int h = 0; h < n_heads; h++) {
            float *p = x + (int64_t)h * d_head + (interleaved ? 2 * i : i);
            float x0 = p[0], x1 = p[step], c = cs[2 * i], s = cs[2 * i + 1];
            p[0] = kvd__fmaf(x0, c, -(x1 * s));
            p[step] = kvd__fmaf(x0, s, x1 * c);
        }
}

static void silu_mul_neon(float *y, const float *gate, const float *up, int64_t n)
{
    int64_t i = 0;
    for (; i + 4 <= n; i += 4) {
        float32x4_t x = vld1q_f32(gate + i);
        float32x4_t v = vdivq_f32(x, vaddq_f32(vdupq_n_f32(1.0f), kvd__exp_neon(vnegq_f32(x))));
        vst1q_f32(y + i, vmulq_f32(v, vld1q_f32(up + i)));
    }
    for (; i < n; i++)
        y[i] = gate[i] / (1.0f + kvd__exp_f32(-gate[i])) * up[i];
}

static void gelu_mul_neon(float *y, const float *gate, const float *up, int64_t n)
{
    int64_t i = 0;
    for (; i + 4 <= n; i += 4) {
        float32x4_t x = vld1q_f32(gate + i);
        float32x4_t z = vfmaq_f32(vdupq_n_f32(KVD__GELU_A), vmulq_f32(x, x), vdupq_n_f32(KVD__GELU_B));
        float32x4_t v = vdivq_f32(x, vaddq_f32(vdupq_n_f32(1.0f), kvd__exp_neon(vmulq_f32(x, z))));
        vst1q_f32(y + i, vmulq_f32(v, vld1q_f32(up + i)));
    }
    for (; i < n; i++) {
        float x = gate[i], z = x * kvd__fmaf(x * x, KVD__GELU_B, KVD__GELU_A);
        y[i] = x / (1.0f + kvd__exp_f32(z)) * up[i];
    }
}

static void add_neon(float *y, const float *x, int64_t n)
{
    int64_t i = 0;
    for (; i + 4 <= n; i += 4)
        vst1q_f32(y + i, vaddq_f32(vld1q_f32(y + i), vld1q_f32(x + i)));
    for (; i < n; i++)
        y[i] += x[i];
}

static void scale_neon(float *y, float c, int64_t n)
{
    int64_t i = 0;
    for (; i + 4 <= n; i += 4)
        vst1q_f32(y + i, vmulq_n_f32(vld1q_f32(y + i), c));
    for (; i < n; i++)
        y[i] *= c;
}

static void exp_all_neon(float *y, const float *x, int64_t n)
{
    int64_t i = 0;
    for (; i + 4 <= n; i += 4)
        vst1q_f32(y + i, kvd__exp_neon(vld1q_f32(x + i)));
    for (; i < n; i++)
        y[i] = kvd__exp_f32(x[i]);
}

/* ---- stored values -----------------------------------------------------------
 *
 * Written once for all types and made three times: the type is a constant in
 * each. `bad` collects the lanes of what is not finite once stored. */
#define BY_TYPE(t, call, ...)                                                  \
    ((t) == KVD_KV_F16    ? call(KVD_KV_F16, __VA_ARGS__)                      \
     : (t) == KVD_KV_BF16 ? call(KVD_KV_BF16, __VA_ARGS__)                     \
                          : call(KVD_KV_F32, __VA_ARGS__))

/* Four values as f16 or bf16. */
INLINE uint16x4_t narrow4(kvd_kvtype t, float32x4_t f, uint16x4_t *bad)
{
    uint16x4_t h, top;
    if (t == KVD_KV_F16) {
        h = vreinterpret_u16_f16(vcvt_f16_f32(f));
        top = vdup_n_u16(0x7c00);
    } else {
        uint32x4_t u = vreinterpretq_u32_f32(f), odd = vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1));
        uint32x4_t rounded = vaddq_u32(vaddq_u32(u, vdupq_n_u32(0x7fff)), odd);
        uint32x4_t quiet = vorrq_u32(u, vdupq_n_u32(0x400000));
        h = vshrn_n_u32(vbslq_u32(vceqq_f32(f, f), rounded, quiet), 16);
        top = vdup_n_u16(0x7f80);
    }
    *bad = vorr_u16(*bad, vceq_u16(vand_u16(h, top), top));
    return h;
}

INLINE float32x4_t widen4(kvd_kvtype t, uint16x4_t h) { return t == KVD_KV_F16 ? kvd__f16x4(h) : kvd__bf16x4(h); }

INLINE uint16x4_t bad4(float32x4_t f)
{
    const uint32x4_t top = vdupq_n_u32(0x7f800000);
    return vmovn_u32(vceqq_u32(vandq_u32(vreinterpretq_u32_f32(f), top), top));
}

INLINE void put4(kvd_kvtype t, void *block, int64_t at, float32x4_t f, uint16x4_t *bad)
{
    if (t == KVD_KV_F32) {
        vst1q_f32((float *)block + at, f);
        *bad = vorr_u16(*bad, bad4(f));
    } else {
        vst1_u16((uint16_t *)block + at, narrow4(t, f, bad));
    }
}

INLINE int verdict(uint16x4_t bad) { return vget_lane_u64(vreinterpret_u64_u16(bad), 0) ? -1 : 0; }

INLINE int store_v_any(kvd_kvtype t, void *block, int slot, int n_slots, const float *src, int64_t ld, int d_head)
{
    uint16x4_t bad = vdup_n_u16(0);
    for (int j = 0; j < n_slots; j++, src += ld) {
        int64_t at = (int64_t)(slot + j) * d_head;
        for (int i = 0; i < d_head; i += 4)
            put4(t, block, at + i, vld1q_f32(src + i), &bad);
    }
    return verdict(bad);
}

static int store_v_neon(void *block, kvd_kvtype t, int slot, int n_slots, const float *src, int64_t ld, int d_head)
{
    return BY_TYPE(t, store_v_any, block, slot, n_slots, src, ld, d_head);
}

/* r[i] lane j <-> r[j] lane i */
INLINE void transpose4(float32x4_t r[4])
{
    const float32x4x2_t a = vtrnq_f32(r[0], r[1]), b = vtrnq_f32(r[2], r[3]);
    r[0] = vcombine_f32(vget_low_f32(a.val[0]), vget_low_f32(b.val[0]));
    r[1] = vcombine_f32(vget_low_f32(a.val[1]), vget_low_f32(b.val[1]));
    r[2] = vcombine_f32(vget_high_f32(a.val[0]), vget_high_f32(b.val[0]));
    r[3] = vcombine_f32(vget_high_f32(a.val[1]), vget_high_f32(b.val[1]));
}

/* Four slots at a time by transposed 4x4 pieces, so that a store has four
 * positions; the rest (decode has one slot) scattered element by element. */
INLINE int store_k_any(kvd_kvtype t, void *block, int slot, int n_slots, const float *src, int64_t ld, int d_head)
{
    uint16x4_t bad = vdup_n_u16(0);
    int j = 0;
    for (; j + 4 <= n_slots; j += 4)
        for (int i = 0; i < d_head; i += 4) {
            float32x4_t r[4];
            UNROLL(4) for (int l = 0; l < 4; l++)
                r[l] = vld1q_f32(src + (j + l) * ld + i);
            transpose4(r);
            UNROLL(4) for (int l = 0; l < 4; l++)
                put4(t, block, (int64_t)(i + l) * KVD__BLOCK + slot + j, r[l], &bad);
        }
    for (; j < n_slots; j++)
        for (int i = 0; i < d_head; i += 4) {
            int64_t at = (int64_t)i * KVD__BLOCK + slot + j;
            uint32_t four[4]; /* of any type */
            put4(t, four, 0, vld1q_f32(src + j * ld + i), &bad);
            for (int l = 0; l < 4; l++)
                if (t == KVD_KV_F32)
                    memcpy((float *)block + at + l * KVD__BLOCK, four + l, 4);
                else
                    memcpy((uint16_t *)block + at + l * KVD__BLOCK, (char *)four + 2 * l, 2);
        }
    return verdict(bad);
}

static int store_k_neon(void *block, kvd_kvtype t, int slot, int n_slots, const float *src, int64_t ld, int d_head)
{
    return BY_TYPE(t, store_k_any, block, slot, n_slots, src, ld, d_head);
}

INLINE float32x4_t round4(kvd_kvtype t, float32x4_t f, uint16x4_t *bad)
{
    if (t != KVD_KV_F32)
        return widen4(t, narrow4(t, f, bad));
    *bad = vorr_u16(*bad, bad4(f));
    return f;
}

INLINE int round_to_any(kvd_kvtype t, float *x, int64_t n)
{
    uint16x4_t bad = vdup_n_u16(0);
    float rest[4] = {0};
    int64_t i = 0;
    for (; i + 4 <= n; i += 4)
        vst1q_f32(x + i, round4(t, vld1q_f32(x + i), &bad));
    if (i < n) {
        memcpy(rest, x + i, (size_t)(n - i) * sizeof *x);
        vst1q_f32(rest, round4(t, vld1q_f32(rest), &bad));
        memcpy(x + i, rest, (size_t)(n - i) * sizeof *x);
    }
    return verdict(bad);
}

static int round_to_neon(float *x, kvd_kvtype t, int64_t n) { return BY_TYPE(t, round_to_any, x, n); }

void kvd__kern_fill_neon(kvd_kern *k)
{
    k->rmsnorm = rmsnorm_neon;
    k->rope = rope_neon;
    k->silu_mul = silu_mul_neon;
    k->gelu_mul = gelu_mul_neon;
    k->add = add_neon;
    k->scale = scale_neon;
    k->exp = exp_all_neon;
    k->store_k = store_k_neon;
    k->store_v = store_v_neon;
    k->round_to = round_to_neon;
    kvd__kern_fill_attn_neon(k);
}
