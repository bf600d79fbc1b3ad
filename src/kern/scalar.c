/* kern: the scalar reference of everything but the matrix products. It is the
 * specification: other ISAs equal it by memcmp, and where docs/numerics.md is
 * silent, the comments here decide. Plain C, one operation per rounding, no
 * libm: the only square root is the machine's instruction.
 *
 * Compiled twice: with the software FMA of base/fma.h, which runs anywhere, and
 * with hardware FMA (KVD_FMA_HW), which gives the same bits and fills the table
 * on machines that have it but none of the wider sets.
 *
 * The payload and sign of a NaN *result* of arithmetic are not part of the
 * contract (x86 and ARM differ): whether it is a NaN is. No NaN reaches a
 * receipt. */
#include "base/fma.h"
#include "base/half.h"
#include "kern/exp_f32.h"
#include "kern/kern.h"

enum { LANES = 16 };

/* Lane i takes lane i+8 for i < 8, then i+4 for i < 4, then i+2, then i+1. */
static float fold16(float *lane)
{
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++)
            lane[i] += lane[i + half];
    return lane[0];
}

static bool is_finite(float f) { return (kvd__f32_bits(f) & 0x7f800000u) != 0x7f800000u; }

/* ---- element-wise ---------------------------------------------------------- */

static int rmsnorm(float *y, const float *x, const float *w, float eps, int64_t n)
{
    float lane[LANES] = {0};
    for (int64_t i = 0; i < n; i++)
        lane[i % LANES] = kvd__fmaf(x[i], x[i], lane[i % LANES]);
    float sum = fold16(lane);
    if (!is_finite(sum))
        return -1;
    float r = 1.0f / __builtin_sqrtf(sum / (float)n + eps);
    for (int64_t i = 0; i < n; i++)
        y[i] = (x[i] * r) * w[i];
    return 0;
}

static void rope(float *x, int n_heads, int d_head, int n_rot, const float *cs, bool interleaved)
{
    int step = interleaved ? 1 : n_rot / 2; /* from one half of a pair to the other */
    for (int h = 0; h < n_heads; h++, x += d_head) {
        for (int i = 0; i < n_rot / 2; i++) {
            float *p = x + (interleaved ? 2 * i : i);
            float x0 = p[0], x1 = p[step], c = cs[2 * i], s = cs[2 * i + 1];
            p[0] = kvd__fmaf(x0, c, -(x1 * s));
            p[step] = kvd__fmaf(x0, s, x1 * c);
        }
    }
}

static void silu_mul(float *y, const float *gate, const float *up, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        y[i] = gate[i] / (1.0f + kvd__exp_f32(-gate[i])) * up[i];
}

static void gelu_mul(float *y, const float *gate, const float *up, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        float x = gate[i], z = x * kvd__fmaf(x * x, KVD__GELU_B, KVD__GELU_A);
        y[i] = x / (1.0f + kvd__exp_f32(z)) * up[i];
    }
}

static void add(float *y, const float *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        y[i] += x[i];
}

static void scale(float *y, float c, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        y[i] *= c;
}

static void exp_f32(float *y, const float *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        y[i] = kvd__exp_f32(x[i]);
}

/* ---- stored values --------------------------------------------------------- */

static float load_stored(const void *p, kvd_kvtype t, int64_t i)
{
    switch (t) {
    case KVD_KV_F16:
        return kvd__f16_to_f32(((const uint16_t *)p)[i]);
    case KVD_KV_BF16:
        return kvd__bf16_to_f32(((const uint16_t *)p)[i]);
    default:
        return ((const float *)p)[i];
    }
}

/* Returns whether the stored value is finite. */
static bool store_one(void *p, kvd_kvtype t, int64_t i, float f)
{
    switch (t) {
    case KVD_KV_F16:
        ((uint16_t *)p)[i] = kvd__f16_from_f32(f);
        break;
    case KVD_KV_BF16:
        ((uint16_t *)p)[i] = kvd__bf16_from_f32(f);
        break;
    default:
        ((float *)p)[i] = f;
        break;
    }
    return is_finite(load_stored(p, t, i));
}

static int store_k(void *block, kvd_kvtype t, int slot, int n_slots, const float *src, int64_t ld, int d_head)
{
    bool ok = true;
    for (int j = 0; j < n_slots; j++)
        for (int i = 0; i < d_head; i++)
            ok &= store_one(block, t, (int64_t)i * KVD__BLOCK + slot + j, src[j * ld + i]);
    return ok ? 0 : -1;
}

static int store_v(void *block, kvd_kvtype t, int slot, int n_slots, const float *src, int64_t ld, int d_head)
{
    bool ok = true;
    for (int j = 0; j < n_slots; j++)
        for (int i = 0; i < d_head; i++)
            ok &= store_one(block, t, (int64_t)(slot + j) * d_head + i, src[j * ld + i]);
    return ok ? 0 : -1;
}

static int round_to(float *x, kvd_kvtype t, int64_t n)
{
    bool ok = true;
    for (int64_t i = 0; i < n; i++) {
        float stored; /* large enough for any type */
        ok &= store_one(&stored, t, 0, x[i]);
        x[i] = load_stored(&stored, t, 0);
    }
    return ok ? 0 : -1;
}

/* ---- attention -------------------------------------------------------------
 *
 * The state of a query: M (maximum score so far), L (sum of exponentials), O
 * (weighted sum of V, not yet divided). M = -inf is the empty state.
 *
 * Two decisions that keep maxima independent of the order in which lanes are
 * compared: m is formed by `s > m`, which a NaN never wins, and then +0 is added,
 * so that a -0 becomes +0. If a score is NaN or the maximum is infinite (finite
 * q and stored k can overflow), some e_j is NaN and so is l; then m is set to
 * that NaN too, lest m = -inf pass for "empty" and the NaN be lost. From there on
 * L and O are NaN to the end, where the logits are checked. */

static void attn_merge(float *M, float *L, float *O, float m, float l, const float *o, int d_head)
{
    const float minus_inf = kvd__f32_from_bits(0xff800000u);
    if (m == minus_inf)
        return;
    if (*M == minus_inf) {
        *M = m;
        *L = l;
        for (int i = 0; i < d_head; i++)
            O[i] = o[i];
        return;
    }
    float top = *M > m ? *M : m;
    float a = kvd__exp_f32(*M - top), b = kvd__exp_f32(m - top);
    *M = top;
    *L = kvd__fmaf(*L, a, l * b);
    for (int i = 0; i < d_head; i++)
        O[i] = kvd__fmaf(O[i], a, o[i] * b);
}

/* The partial of one query over the slots [lo, hi) of a tile, merged. */
static void attn_query(const kvd_attn_tile *t, const float *q, int lo, int hi, float *M, float *L, float *O)
{
    float e[KVD__TILE], lane[LANES] = {0}, o[KVD__MAX_D_HEAD];
    float m = kvd__f32_from_bits(0xff800000u);

    for (int j = lo; j < hi; j++) {
        const void *k = t->k[j / KVD__BLOCK];
        float s = 0;
        for (int i = 0; i < t->d_head; i++)
            s = kvd__fmaf(q[i], load_stored(k, t->kvtype, i * KVD__BLOCK + j % KVD__BLOCK), s);
        e[j] = s * t->scale;
        if (e[j] > m)
            m = e[j];
    }
    m += 0.0f;
    for (int j = lo; j < hi; j++) {
        e[j] = kvd__exp_f32(e[j] - m);
        lane[j % LANES] += e[j]; /* a tile starts at a multiple of 64: j mod 16 is the position's */
    }
    float l = fold16(lane);
    if (l != l)
        m = l;
    for (int i = 0; i < t->d_head; i++)
        o[i] = 0;
    for (int j = lo; j < hi; j++) {
        const void *v = t->v[j / KVD__BLOCK];
        for (int i = 0; i < t->d_head; i++)
            o[i] = kvd__fmaf(e[j], load_stored(v, t->kvtype, j % KVD__BLOCK * t->d_head + i), o[i]);
    }
    attn_merge(M, L, O, m, l, o, t->d_head);
}

static void attn_tile(const kvd_attn_tile *t, float *M, float *L, float *O, void *scratch)
{
    (void)scratch;
    for (int r = 0; r < t->n_rows; r++) {
        if (t->lo[r] >= t->hi[r])
            continue;
        for (int h = 0; h < t->n_heads; h++) {
            int i = r * t->n_heads + h;
            const float *q = t->q + r * t->ld_q + (int64_t)h * t->d_head;
            attn_query(t, q, t->lo[r], t->hi[r], M + i, L + i, O + (int64_t)i * t->d_head);
        }
    }
}

static void attn_finish(float *out, const float *O, float L, int d_head)
{
    for (int i = 0; i < d_head; i++)
        out[i] = O[i] / L;
}

#ifdef KVD_FMA_HW
void kvd__kern_fill_scalar_fma(kvd_kern *k)
#else
void kvd__kern_fill_scalar(kvd_kern *k)
#endif
{
    k->rmsnorm = rmsnorm;
    k->rope = rope;
    k->silu_mul = silu_mul;
    k->gelu_mul = gelu_mul;
    k->add = add;
    k->scale = scale;
    k->exp = exp_f32;
    k->store_k = store_k;
    k->store_v = store_v;
    k->round_to = round_to;
    k->attn_tile = attn_tile;
    k->attn_merge = attn_merge;
    k->attn_finish = attn_finish;
}
