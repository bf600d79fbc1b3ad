/* Products with 256-element blocks for NEON with the dot product extension.
 *
 * Two sets of sums are alive, those of a sub-block and S, so a slice has half the
 * rows of gemm_neon.c: R * T is at most 8. Centred formats take their bias off the
 * weights, which SDOT then uses as they are: one subtraction for each 16 bytes
 * and all tokens. The shifts that find a k-group's bits are by register (USHL
 * goes both ways), so that one body serves all sub-blocks. */
#include "kern/arm/gemm_neon.h"

/* ---- scales --------------------------------------------------------------- */

/* A block's scales and minima as bytes, [sub-block][row]. */
typedef struct scales {
    int8_t sc[16][16], mins[16][16];
} scales;

INLINE uint8x16_t low_nibble(uint8x16_t x) { return vandq_u8(x, vdupq_n_u8(15)); }

/* low | bits n, n+1 of high as bits 4, 5 */
INLINE uint8x16_t with_high(uint8x16_t low, uint8x16_t high, int n)
{
    return vorrq_u8(low, vandq_u8(vshlq_u8(high, vdupq_n_s8((int8_t)(4 - n))), vdupq_n_u8(0x30)));
}

INLINE void put(int8_t *to, uint8x16_t v) { vst1q_s8(to, vreinterpretq_s8_u8(v)); }

static void scales_q2_k(scales *o, const uint8_t *p)
{
    for (int j = 0; j < 16; j++) {
        const uint8x16_t x = vld1q_u8(p + KVD__Q2_K_SCALES + 16 * j);
        put(o->sc[j], low_nibble(x));
        put(o->mins[j], vshrq_n_u8(x, 4));
    }
}

static void scales_q3_k(scales *o, const uint8_t *p)
{
    const uint8x16_t centre = vdupq_n_u8(32);
    for (int j = 0; j < 4; j++) {
        const uint8_t *s = p + KVD__Q3_K_SCALES + 16 * j;
        const uint8x16_t a = vld1q_u8(s), b = vld1q_u8(s + 64), h = vld1q_u8(s + 128);
        put(o->sc[j], vsubq_u8(with_high(low_nibble(a), h, 0), centre));
        put(o->sc[j + 4], vsubq_u8(with_high(low_nibble(b), h, 2), centre));
        put(o->sc[j + 8], vsubq_u8(with_high(vshrq_n_u8(a, 4), h, 4), centre));
        put(o->sc[j + 12], vsubq_u8(with_high(vshrq_n_u8(b, 4), h, 6), centre));
    }
}

/* Q4_K and Q5_K. s: [12][16]. */
static void scales_6(scales *o, const uint8_t *s)
{
    const uint8x16_t six = vdupq_n_u8(63);
    for (int j = 0; j < 4; j++) {
        const uint8x16_t a = vld1q_u8(s + 16 * j), b = vld1q_u8(s + 16 * j + 64), c = vld1q_u8(s + 16 * j + 128);
        put(o->sc[j], vandq_u8(a, six));
        put(o->sc[j + 4], with_high(low_nibble(c), a, 6));
        put(o->mins[j], vandq_u8(b, six));
        put(o->mins[j + 4], with_high(vshrq_n_u8(c, 4), b, 6));
    }
}

static void scales_iq4_xs(scales *o, const uint8_t *p)
{
    /* the u16 of 16 rows as their low bytes (scales 0-3) and high bytes (4-7) */
    const uint8x16x2_t h = vld2q_u8(p + KVD__IQ4_XS_SCALES_H);
    for (int i = 0; i < 4; i++) {
        const uint8x16_t l = vld1q_u8(p + KVD__IQ4_XS_SCALES_L + 16 * i), centre = vdupq_n_u8(32);
        const int bit = 4 * (i % 2);
        put(o->sc[2 * i], vsubq_u8(with_high(low_nibble(l), h.val[i / 2], bit), centre));
        put(o->sc[2 * i + 1], vsubq_u8(with_high(vshrq_n_u8(l, 4), h.val[i / 2], bit + 2), centre));
    }
}

INLINE void unpack_scales(const kvd_dtype f, scales *o, const uint8_t *p)
{
    switch (f) {
    case KVD_Q2_K:
        scales_q2_k(o, p);
        break;
    case KVD_Q3_K:
        scales_q3_k(o, p);
        break;
    case KVD_Q4_K:
        scales_6(o, p + KVD__Q4_K_SCALES);
        break;
    case KVD_Q5_K:
        scales_6(o, p + KVD__Q5_K_SCALES);
        break;
    case KVD_Q6_K:
        memcpy(o->sc, p + KVD__Q6_K_SCALES, sizeof o->sc);
        break;
    default: /* IQ4_XS */
        scales_iq4_xs(o, p);
        break;
    }
}

/* 4*R rows' scales as i32. */
INLINE void widen_scales(const int8_t *p, int32x4_t out[4], const int R)
{
    if (R == 1) {
        uint32_t four;
        memcpy(&four, p, 4);
        out[0] = vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(four))));
        return;
    }
    UNROLL(2) for (int r = 0; r < R; r += 2) {
        const int16x8_t v = vmovl_s8(vld1_s8(p + 4 * r));
        out[r] = vmovl_s16(vget_low_s16(v));
        out[r + 1] = vmovl_s16(vget_high_s16(v));
    }
}

/* ---- weights -------------------------------------------------------------- */

/* Where the bits of the four k-groups 4u .. 4u+3 are, one k-vector after the
 * other: `low` ones, shifted; for some formats `high` ones, shifted too. See the
 * diagrams in panel.h. */
typedef struct run_of_four {
    const uint8_t *low, *high;
    int8x16_t low_shift, high_shift;
} run_of_four;

INLINE run_of_four find(const kvd_dtype f, const uint8_t *p, int u)
{
    run_of_four s = {.low = p, .high = p};
    /* eighth e of the block and k-vector v of it; half h and quarter part of that */
    const int e = u / 2, v = 4 * (u % 2), h = e / 4, part = e % 4;
    int low = 0, high = 0;
    switch (f) {
    case KVD_Q5_K:
        s.high = p + KVD__Q5_K_QH + 64 * v;
        high = 4 - e;
        /* fall through */
    case KVD_Q4_K:
        s.low = p + 64 * (8 * (e / 2) + v);
        low = -4 * (e % 2);
        break;
    case KVD_Q6_K:
        s.low = p + 64 * (16 * h + 8 * (part % 2) + v);
        low = -4 * (part / 2);
        s.high = p + KVD__Q6_K_QH + 64 * (8 * h + v);
        high = 4 - 2 * part;
        break;
    case KVD_Q3_K:
        s.high = p + KVD__Q3_K_HMASK + 64 * v;
        high = 2 - e;
        /* fall through */
    case KVD_Q2_K:
        s.low = p + 64 * (8 * h + v);
        low = -2 * part;
        break;
    default: /* IQ4_XS */
        s.low = p + 256 * e;
        low = -v;
        break;
    }
    s.low_shift = vdupq_n_s8((int8_t)low);
    s.high_shift = vdupq_n_s8((int8_t)high);
    return s;
}

/* Four rows, from byte `at` of the k-vectors on, of the run's k-group g. */
INLINE int8x16_t weights(const kvd_dtype f, const run_of_four *s, const int g, int at)
{
    const uint8x16_t shifted = vshlq_u8(vld1q_u8(s->low + 64 * g + at), s->low_shift);
    const uint8x16_t low = vandq_u8(shifted, vdupq_n_u8(f == KVD_Q2_K || f == KVD_Q3_K ? 3 : 15));
    if (f == KVD_IQ4_XS)
        return vqtbl1q_s8(vld1q_s8(kvd__iq4_table), low);
    if (f == KVD_Q2_K || f == KVD_Q4_K)
        return vreinterpretq_s8_u8(low);
    const uint8x16_t bits = vdupq_n_u8(f == KVD_Q3_K ? 4 : f == KVD_Q5_K ? 16 : 48);
    const uint8x16_t high = vshlq_u8(vld1q_u8(s->high + 64 * g + at), s->high_shift);
    const int8x16_t q = vreinterpretq_s8_u8(vorrq_u8(low, vandq_u8(high, bits)));
    return f == KVD_Q5_K ? q : vsubq_s8(q, vdupq_n_s8(f == KVD_Q3_K ? 4 : 32));
}

/* ---- products ------------------------------------------------------------- */

/* The integer sums of four k-groups added to sum. q: at the first. */
INLINE void sum_run(const kvd_dtype f, const run_of_four *s, int row, const int8_t *q, int64_t ld, int32x4_t sum[][4],
                    const int R, const int T)
{
    int8x16_t a[KVD__NEON_TOKENS], w[4];
    UNROLL(8) for (int t = 0; t < T; t++)
        a[t] = vld1q_s8(q + t * ld);
#define GROUP(g)                                                               \
    do {                                                                       \
        UNROLL(4) for (int r = 0; r < R; r++)                                  \
            w[r] = weights(f, s, g, 4 * row + 16 * r);                         \
        KVD__DOT(sum, w, a, g, R, T);                                          \
    } while (0)
    GROUP(0);
    GROUP(1);
    GROUP(2);
    GROUP(3);
#undef GROUP
}

/* M[t] = sum over sub-blocks of mins[j] * bsum_j. bsums: [sub-block][T]. */
INLINE void sum_mins(const scales *s, const int subs, int row, const int32_t *bsums, int32x4_t M[][4], const int R,
                     const int T)
{
    UNROLL(8) for (int t = 0; t < T; t++)
        UNROLL(4) for (int r = 0; r < R; r++)
            M[t][r] = vdupq_n_s32(0);
    for (int j = 0; j < subs; j++, bsums += T) {
        int32x4_t m[4];
        widen_scales(s->mins[j] + row, m, R);
        UNROLL(8) for (int t = 0; t < T; t++)
            UNROLL(4) for (int r = 0; r < R; r++)
                M[t][r] = vmlaq_n_s32(M[t][r], m[r], bsums[t]);
    }
}

/* One block's step of the rows from `row` on. side: da [T], then of formats with
 * minima the sums of q, [sub-block][T]. */
INLINE void step_256(const kvd_dtype f, const uint8_t *p, const scales *s, const int8_t *q, int64_t ld,
                     const int32_t *side, int row, float *chains, const int R, const int T)
{
    const kvd__layout o = kvd__layout_of(f);
    const int subs = kvd__n_subs(f), runs = 16 / subs;
    int32x4_t S[KVD__NEON_TOKENS][4], M[KVD__NEON_TOKENS][4];
    UNROLL(8) for (int t = 0; t < T; t++)
        UNROLL(4) for (int r = 0; r < R; r++)
            S[t][r] = vdupq_n_s32(0);
    for (int j = 0; j < subs; j++) {
        int32x4_t sum[KVD__NEON_TOKENS][4], sc[4];
        UNROLL(8) for (int t = 0; t < T; t++)
            UNROLL(4) for (int r = 0; r < R; r++)
                sum[t][r] = vdupq_n_s32(0);
        UNROLL(2) for (int u = 0; u < runs; u++, q += 16) {
            const run_of_four run = find(f, p, runs * j + u);
            sum_run(f, &run, row, q, ld, sum, R, T);
        }
        widen_scales(s->sc[j] + row, sc, R);
        UNROLL(8) for (int t = 0; t < T; t++)
            UNROLL(4) for (int r = 0; r < R; r++)
                S[t][r] = vmlaq_s32(S[t][r], sum[t][r], sc[r]);
    }
    if (kvd__has_min(f))
        sum_mins(s, subs, row, side + T, M, R, T);
    UNROLL(4) for (int r = 0; r < R; r++) {
        const float32x4_t d = kvd__load_4_f16(p + o.d + 2 * row + 8 * r);
        const float32x4_t dmin = kvd__has_min(f) ? kvd__load_4_f16(p + o.m + 2 * row + 8 * r) : d;
        UNROLL(8) for (int t = 0; t < T; t++) {
            float *chain = chains + 16 * t + row + 4 * r;
            const float da = kvd__side_f32(side + t);
            float32x4_t v = vfmaq_f32(vld1q_f32(chain), vmulq_n_f32(d, da), vcvtq_f32_s32(S[t][r]));
            if (kvd__has_min(f))
                v = vfmsq_f32(v, vmulq_n_f32(dmin, da), vcvtq_f32_s32(M[t][r]));
            vst1q_f32(chain, v);
        }
    }
}

INLINE void tile_256(const kvd_dtype f, const kvd__tile *c, const int T)
{
    const int R = T <= 4 ? 2 : 1, words = kvd__has_min(f) ? 1 + kvd__n_subs(f) : 2;
    for (int64_t i = 0; i < c->n_panels; i++) {
        const uint8_t *p = c->panels + i * c->panel_bytes;
        const int32_t *side = c->side;
        const int8_t *q = c->q;
        float chains[16 * KVD__NEON_TOKENS];
        kvd__start_chains(c, i, chains, T);
        for (int64_t b = 0; b < c->n_blocks; b++) {
            scales s;
            unpack_scales(f, &s, p);
            for (int row = 0; row < KVD__PANEL_ROWS; row += 4 * R)
                step_256(f, p, &s, q, c->ld, side, row, chains, R, T);
            p += kvd__layout_of(f).stride;
            side += words * T;
            q += 256;
        }
        kvd__finish_chains(c, i, chains, T);
    }
}

#define DEFINE_TILE(TYPE, stem, T)                                             \
    static void tile_##stem##_##T(const kvd__tile *c) { tile_256(KVD_##TYPE, c, T); }

/* X(format, stem, side, bias): bias -1 puts the sums themselves into the side
 * array; formats without minima need nothing but the scale of it. */
#define FORMATS(X)                                                             \
    X(Q2_K, q2_k, KVD__SIDE_BIAS_16, -1)                                       \
    X(Q3_K, q3_k, KVD__SIDE_BIAS, 0)                                           \
    X(Q4_K, q4_k, KVD__SIDE_BIAS_32, -1)                                       \
    X(Q5_K, q5_k, KVD__SIDE_BIAS_32, -1)                                       \
    X(Q6_K, q6_k, KVD__SIDE_BIAS, 0)                                           \
    X(IQ4_XS, iq4_xs, KVD__SIDE_BIAS, 0)

#define DEFINE(TYPE, stem, side, bias)                                                                              \
    KVD__1_TO_8(DEFINE_TILE, TYPE, stem)                                                                            \
    static kvd__tile_fn *const tiles_##stem[] = KVD__TILES_8(stem);                                                 \
    static const kvd__walk walk_##stem = {tiles_##stem, KVD__NEON_TOKENS, KVD__##TYPE##_STRIDE, 256, side, bias};   \
    static void gemm_##stem(float *y, int64_t ld_y, const void *panels, int64_t n_panels, int64_t K,                \
                            const kvd_acts *a, int64_t T)                                                           \
    {                                                                                                               \
        kvd__gemm_walk(&walk_##stem, y, ld_y, panels, n_panels, K, a, T);                                           \
    }
FORMATS(DEFINE)

void kvd__kern_fill_gemm_k_neon(kvd_kern *k)
{
#define FILL(TYPE, stem, ...) k->gemm[KVD_##TYPE] = gemm_##stem;
    FORMATS(FILL)
}
