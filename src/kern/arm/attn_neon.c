/* kern/arm: attention for NEON. The queries of a tile are taken in groups of up to
 * 4 that share their loads of K and V, in four steps:
 *
 *   scores   e[i][j] = chain over d of q[i][d] * k[d][j]; lanes are positions
 *   softmax  per query: scale, mask, maximum m, e = exp(s - m), sum l
 *   weights  M, L and the factors a, b of the merge; scalar
 *   values   chain over j of e[i][j] * v[j][d], merged into O; lanes are d
 *
 * No lane ever holds a part of another's sum, so the group's size does not show
 * in the bits. Of 32 registers, 16 accumulate: a block's 16 positions, or 16
 * elements of d, of 4 queries. f16 and bf16 are widened as they are loaded.
 *
 * A score block is computed whole, also the slots that no query sees: what comes
 * out of these, garbage or NaN, stays in its own lanes and is masked. */
#include "base/fma.h"
#include "base/half.h"
#include "kern/arm/neon.h"

enum { GROUP = 4, VECTORS = KVD__TILE / 4 };

typedef struct group {
    int n;                  /* queries */
    int first, end;         /* hull of what they see */
    int common, common_end; /* what all of them see; common <= common_end */
    const float *q[GROUP];
    int lo[GROUP], hi[GROUP];
    float *M[GROUP], *L[GROUP], *O[GROUP];
    float m[GROUP], l[GROUP]; /* of the tile */
    float a[GROUP], b[GROUP]; /* O = fma(O, a, o*b) */
    bool fresh[GROUP];        /* O = o */
    float e[GROUP][KVD__TILE];
} group;

/* Stored values i .. i+3. */
INLINE float32x4_t load4(kvd_kvtype t, const void *p, int64_t i)
{
    if (t == KVD_KV_F32)
        return vld1q_f32((const float *)p + i);
    const uint16x4_t h = vld1_u16((const uint16_t *)p + i);
    return t == KVD_KV_F16 ? kvd__f16x4(h) : kvd__bf16x4(h);
}

/* Block b for n queries. */
INLINE void scores(kvd_kvtype t, int n, const kvd_attn_tile *tile, group *g, int b)
{
    const void *k = tile->k[b];
    float32x4_t acc[GROUP][4], q[GROUP];
    UNROLL(4) for (int i = 0; i < n; i++)
        UNROLL(4) for (int x = 0; x < 4; x++)
            acc[i][x] = vdupq_n_f32(0);
    for (int d = 0; d < tile->d_head; d += 4) {
        UNROLL(4) for (int i = 0; i < n; i++)
            q[i] = vld1q_f32(g->q[i] + d);
#define STEP(lane)                                                                             \
    UNROLL(4) for (int x = 0; x < 4; x++) {                                                    \
        const float32x4_t v = load4(t, k, (int64_t)(d + lane) * KVD__BLOCK + 4 * x);           \
        UNROLL(4) for (int i = 0; i < n; i++)                                                  \
            acc[i][x] = vfmaq_laneq_f32(acc[i][x], v, q[i], lane);                             \
    }
        STEP(0)
        STEP(1)
        STEP(2)
        STEP(3)
#undef STEP
    }
    UNROLL(4) for (int i = 0; i < n; i++)
        UNROLL(4) for (int x = 0; x < 4; x++)
            vst1q_f32(g->e[i] + b * KVD__BLOCK + 4 * x, acc[i][x]);
}

/* The lanes of vector v that query i sees. */
INLINE uint32x4_t visible(const group *g, int i, int v)
{
    static const int32_t count[4] = {0, 1, 2, 3};
    const int32x4_t j = vaddq_s32(vld1q_s32(count), vdupq_n_s32(4 * v));
    return vandq_u32(vcgeq_s32(j, vdupq_n_s32(g->lo[i])), vcltq_s32(j, vdupq_n_s32(g->hi[i])));
}

/* m, l and the exponentials in place of the scores. FMAXNM prefers a number to a
 * NaN, as `s > m` does; adding +0 makes a maximum of -0 the +0 of the contract. */
static void softmax(group *g, int i, float scale)
{
    const float32x4_t minus_inf = vreinterpretq_f32_u32(vdupq_n_u32(0xff800000u));
    const int first = g->lo[i] / KVD__BLOCK * 4, end = (g->hi[i] + KVD__BLOCK - 1) / KVD__BLOCK * 4;
    float32x4_t m = minus_inf, sum[4];
    for (int v = first; v < end; v++) {
        const float32x4_t s = vmulq_n_f32(vld1q_f32(g->e[i] + 4 * v), scale);
        vst1q_f32(g->e[i] + 4 * v, s);
        m = vmaxnmq_f32(vbslq_f32(visible(g, i, v), s, minus_inf), m);
    }
    const float top = vmaxnmvq_f32(m) + 0.0f;
    UNROLL(4) for (int x = 0; x < 4; x++)
        sum[x] = vdupq_n_f32(0);
    for (int v = first; v < end; v += 4)
        UNROLL(4) for (int x = 0; x < 4; x++) {
            float *at = g->e[i] + 4 * (v + x);
            float32x4_t e = kvd__exp_below_neon(vsubq_f32(vld1q_f32(at), vdupq_n_f32(top)));
            e = vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(e), visible(g, i, v + x)));
            sum[x] = vaddq_f32(sum[x], e);
            vst1q_f32(at, e);
        }
    const float l = kvd__fold16_neon(sum);
    g->l[i] = l;
    g->m[i] = l == l ? top : l; /* a NaN must not pass for an empty partial */
}

/* M and L of the merge, and its factors. */
static void merge_weights(group *g, int i)
{
    const float m = g->m[i], l = g->l[i], M = *g->M[i], L = *g->L[i];
    g->fresh[i] = M == kvd__f32_from_bits(0xff800000u);
    const float top = M > m ? M : m;
    g->a[i] = kvd__exp_f32(M - top);
    g->b[i] = kvd__exp_f32(m - top);
    *g->M[i] = top; /* of an empty state: m, for -inf is not above it */
    *g->L[i] = g->fresh[i] ? l : kvd__fmaf(L, g->a[i], l * g->b[i]);
}

/* acc += e[.][j] * v[j] for j of [j, end), for each query as far as it sees;
 * all: they see all of it. */
INLINE void add_values(kvd_kvtype t, int n, int w, const kvd_attn_tile *tile, const group *g, int c, int j, int end,
                       bool all, float32x4_t acc[GROUP][4])
{
    for (; j < end; j++) {
        const void *v = tile->v[j / KVD__BLOCK];
        if (!all && !v) /* between two windows there may be none */
            continue;
        const int64_t at = (int64_t)(j % KVD__BLOCK) * tile->d_head + c;
        float32x4_t vj[4];
        UNROLL(4) for (int x = 0; x < w; x++)
            vj[x] = load4(t, v, at + 4 * x);
        UNROLL(4) for (int i = 0; i < n; i++)
            if (all || (j >= g->lo[i] && j < g->hi[i]))
                UNROLL(4) for (int x = 0; x < w; x++)
                    acc[i][x] = vfmaq_n_f32(acc[i][x], vj[x], g->e[i][j]);
    }
}

/* Elements c .. c + 4w - 1 of the result, w registers. */
INLINE void values(kvd_kvtype t, int n, int w, const kvd_attn_tile *tile, const group *g, int c)
{
    float32x4_t acc[GROUP][4];
    UNROLL(4) for (int i = 0; i < n; i++)
        UNROLL(4) for (int x = 0; x < w; x++)
            acc[i][x] = vdupq_n_f32(0);
    if (n > 1)
        add_values(t, n, w, tile, g, c, g->first, g->common, false, acc);
    add_values(t, n, w, tile, g, c, g->common, g->common_end, true, acc);
    if (n > 1)
        add_values(t, n, w, tile, g, c, g->common_end, g->end, false, acc);
    UNROLL(4) for (int i = 0; i < n; i++)
        UNROLL(4) for (int x = 0; x < w; x++) {
            float *O = g->O[i] + c + 4 * x;
            float32x4_t o = acc[i][x];
            if (!g->fresh[i])
                o = vfmaq_f32(vmulq_n_f32(o, g->b[i]), vld1q_f32(O), vdupq_n_f32(g->a[i]));
            vst1q_f32(O, o);
        }
}

static void set_ranges(group *g)
{
    g->first = g->common_end = KVD__TILE;
    g->end = g->common = 0;
    for (int i = 0; i < g->n; i++) {
        g->first = g->lo[i] < g->first ? g->lo[i] : g->first;
        g->common = g->lo[i] > g->common ? g->lo[i] : g->common;
        g->end = g->hi[i] > g->end ? g->hi[i] : g->end;
        g->common_end = g->hi[i] < g->common_end ? g->hi[i] : g->common_end;
    }
    if (g->common > g->end)
        g->common = g->end;
    if (g->common_end < g->common)
        g->common_end = g->common;
}

INLINE void run_group(kvd_kvtype t, int n, const kvd_attn_tile *tile, group *g)
{
    int c = 0;
    set_ranges(g);
    for (int b = g->first / KVD__BLOCK; b * KVD__BLOCK < g->end; b++)
        if (tile->k[b])
            scores(t, n, tile, g, b);
    for (int i = 0; i < n; i++) {
        softmax(g, i, tile->scale);
        merge_weights(g, i);
    }
    for (; c + 16 <= tile->d_head; c += 16)
        values(t, n, 4, tile, g, c);
    if (c < tile->d_head)
        values(t, n, 2, tile, g, c);
}

INLINE void attn_tile_any(kvd_kvtype type, const kvd_attn_tile *t, float *M, float *L, float *O)
{
    group g = {.n = 0};
    for (int r = 0; r < t->n_rows; r++)
        for (int h = 0; h < t->n_heads && t->lo[r] < t->hi[r]; h++) {
            const int64_t i = (int64_t)r * t->n_heads + h;
            g.q[g.n] = t->q + r * t->ld_q + (int64_t)h * t->d_head;
            g.lo[g.n] = t->lo[r];
            g.hi[g.n] = t->hi[r];
            g.M[g.n] = M + i;
            g.L[g.n] = L + i;
            g.O[g.n] = O + i * t->d_head;
            if (++g.n == GROUP) {
                run_group(type, GROUP, t, &g);
                g.n = 0;
            }
        }
    if (g.n == 3)
        run_group(type, 3, t, &g);
    else if (g.n == 2)
        run_group(type, 2, t, &g);
    else if (g.n == 1)
        run_group(type, 1, t, &g);
}

static void attn_tile_neon(const kvd_attn_tile *t, float *M, float *L, float *O, void *scratch)
{
    (void)scratch;
    if (t->kvtype == KVD_KV_F16)
        attn_tile_any(KVD_KV_F16, t, M, L, O);
    else if (t->kvtype == KVD_KV_BF16)
        attn_tile_any(KVD_KV_BF16, t, M, L, O);
    else
        attn_tile_any(KVD_KV_F32, t, M, L, O);
}

static void attn_merge_neon(float *M, float *L, float *O, float m, float l, const float *o, int d_head)
{
    const float minus_inf = kvd__f32_from_bits(0xff800000u);
    if (m == minus_inf)
        return;
    const bool fresh = *M == minus_inf;
    const float top = *M > m ? *M : m, a = kvd__exp_f32(*M - top), b = kvd__exp_f32(m - top);
    *M = top;
    *L = fresh ? l : kvd__fmaf(*L, a, l * b);
    for (int i = 0; i < d_head; i += 4) {
        float32x4_t v = vld1q_f32(o + i);
        if (!fresh)
            v = vfmaq_f32(vmulq_n_f32(v, b), vld1q_f32(O + i), vdupq_n_f32(a));
        vst1q_f32(O + i, v);
    }
}

static void attn_finish_neon(float *out, const float *O, float L, int d_head)
{
    for (int i = 0; i < d_head; i += 4)
        vst1q_f32(out + i, vdivq_f32(vld1q_f32(O + i), vdupq_n_f32(L)));
}

void kvd__kern_fill_attn_neon(kvd_kern *k)
{
    k->attn_tile = attn_tile_neon;
    k->attn_merge = attn_merge_neon;
    k->attn_finish = attn_finish_neon;
}
