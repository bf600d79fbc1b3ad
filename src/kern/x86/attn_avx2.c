/* kern/x86: attention for AVX2. Two registers are a block's positions in the
 * scores; eight lanes are elements of d_head in the values, of which d_head is a
 * multiple, so there are no tails. attn_group.h has the frame, attn_avx512.c the
 * reason why scores take one block at a time. Of 16 registers, up to 12
 * accumulate: 2n in the scores, n times the vectors of d in the values. */
#include "kern/x86/attn_group.h"

/* Stored values i .. i+7. */
INLINE __m256 load8(kvd_kvtype t, const void *p, int64_t i)
{
    if (t == KVD_KV_F32)
        return _mm256_loadu_ps((const float *)p + i);
    __m128i h = _mm_loadu_si128((const void *)((const uint16_t *)p + i));
    if (t == KVD_KV_F16)
        return _mm256_cvtph_ps(h);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}

static void widen(float *dst, const void *src, kvd_kvtype t, int n)
{
    if (t == KVD_KV_F16)
        for (int i = 0; i < n; i += 8)
            _mm256_storeu_ps(dst + i, load8(KVD_KV_F16, src, i));
    else
        for (int i = 0; i < n; i += 8)
            _mm256_storeu_ps(dst + i, load8(KVD_KV_BF16, src, i));
}

/* Block b for n queries. */
INLINE void scores(kvd_kvtype t, int n, const kvd_group *g, int b)
{
    __m256 acc[KVD__GROUP][2];
    const float *q[KVD__GROUP];
    const void *k = g->k[b];
    UNROLL(8) for (int i = 0; i < n; i++) {
        q[i] = g->q[i];
        acc[i][0] = acc[i][1] = _mm256_setzero_ps();
    }
    bool ahead = t != KVD_KV_F32 && n >= 2 && g->d >= KVD__PREFETCH_D;
    for (int d = 0; d < g->d; d++) {
        if (ahead && d % 2 == 0)
            _mm_prefetch((const char *)g->v[b] + d * 2 * KVD__BLOCK, _MM_HINT_T1);
        __m256 k0 = load8(t, k, (int64_t)d * KVD__BLOCK), k1 = load8(t, k, (int64_t)d * KVD__BLOCK + 8);
        UNROLL(8) for (int i = 0; i < n; i++) {
            __m256 qd = _mm256_set1_ps(q[i][d]);
            acc[i][0] = _mm256_fmadd_ps(qd, k0, acc[i][0]);
            acc[i][1] = _mm256_fmadd_ps(qd, k1, acc[i][1]);
        }
    }
    UNROLL(8) for (int i = 0; i < n; i++) {
        _mm256_storeu_ps(g->e[i] + b * KVD__BLOCK, acc[i][0]);
        _mm256_storeu_ps(g->e[i] + b * KVD__BLOCK + 8, acc[i][1]);
    }
}

enum { VECTORS = KVD__TILE / 8 };

/* The lanes of vector v that query i sees. */
INLINE __m256 visible(const kvd_group *g, int i, int v)
{
    __m256i j = _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(8 * v));
    __m256i from = _mm256_set1_epi32(g->lo[i] - 1), to = _mm256_set1_epi32(g->hi[i]);
    return _mm256_castsi256_ps(_mm256_and_si256(_mm256_cmpgt_epi32(j, from), _mm256_cmpgt_epi32(to, j)));
}

/* Scaled scores in place of scores; returns their maximum. max(s, m) gives m if s
 * is NaN. `all`: the whole tile is visible. */
INLINE float scale_and_max(const kvd_group *g, int i, bool all)
{
    const __m256 minus_inf = _mm256_castsi256_ps(_mm256_set1_epi32((int)0xff800000));
    __m256 m = minus_inf;
    UNROLL(8) for (int v = 0; v < VECTORS; v++) {
        __m256 s = _mm256_mul_ps(_mm256_loadu_ps(g->e[i] + 8 * v), _mm256_set1_ps(g->scale));
        _mm256_storeu_ps(g->e[i] + 8 * v, s);
        m = _mm256_max_ps(all ? s : _mm256_blendv_ps(minus_inf, s, visible(g, i, v)), m);
    }
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(m), _mm256_extractf128_ps(m, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half))) + 0.0f;
}

/* Exponentials in place of scaled scores; returns their sum. */
INLINE float exp_and_sum(const kvd_group *g, int i, float top, bool all)
{
    __m256 sum[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    UNROLL(8) for (int v = 0; v < VECTORS; v++) {
        __m256 e = kvd__exp_below_avx2(_mm256_sub_ps(_mm256_loadu_ps(g->e[i] + 8 * v), _mm256_set1_ps(top)));
        e = all ? e : _mm256_and_ps(e, visible(g, i, v));
        sum[v % 2] = _mm256_add_ps(sum[v % 2], e);
        _mm256_storeu_ps(g->e[i] + 8 * v, e);
    }
    return kvd__fold16_avx2(sum[0], sum[1]);
}

/* m, l and the exponentials. Two loops over the queries, so that the latencies of
 * one's maximum and sum hide behind the others. */
static void softmax(kvd_group *g)
{
    float top[KVD__GROUP];
    for (int i = 0; i < g->n; i++)
        top[i] = g->lo[i] == 0 && g->hi[i] == KVD__TILE ? scale_and_max(g, i, true) : scale_and_max(g, i, false);
    for (int i = 0; i < g->n; i++) {
        bool all = g->lo[i] == 0 && g->hi[i] == KVD__TILE;
        float l = all ? exp_and_sum(g, i, top[i], true) : exp_and_sum(g, i, top[i], false);
        g->l[i] = l;
        g->m[i] = l == l ? top[i] : l;
    }
}

/* acc += e[.][j] * v[j] for j of [j, end), for each query as far as it sees. */
INLINE void add_ragged(kvd_kvtype t, int n, int w, const kvd_group *g, int c, int j, int end, __m256 acc[KVD__GROUP][8])
{
    for (; j < end; j++) {
        int64_t at = (int64_t)(j % KVD__BLOCK) * g->d + c;
        UNROLL(8) for (int i = 0; i < n; i++)
            if (j >= g->lo[i] && j < g->hi[i])
                UNROLL(8) for (int x = 0; x < w; x++)
                    acc[i][x] = _mm256_fmadd_ps(_mm256_set1_ps(g->e[i][j]), load8(t, g->v[j / KVD__BLOCK], at + 8 * x),
                                                acc[i][x]);
    }
}

/* The same where all see all. Besides acc, only one element of V and n of e are
 * in registers at a time, or the other way round. */
INLINE void add_common(kvd_kvtype t, int n, int w, const kvd_group *g, int c, int j, int end, __m256 acc[KVD__GROUP][8])
{
    while (j < end) {
        const void *v = g->v[j / KVD__BLOCK];
        int stop = (j | (KVD__BLOCK - 1)) + 1;
        stop = stop < end ? stop : end;
        for (; j < stop; j++) {
            int64_t at = (int64_t)(j % KVD__BLOCK) * g->d + c;
            if (n <= w) {
                __m256 ej[KVD__GROUP];
                UNROLL(8) for (int i = 0; i < n; i++)
                    ej[i] = _mm256_set1_ps(g->e[i][j]);
                UNROLL(8) for (int x = 0; x < w; x++) {
                    __m256 vj = load8(t, v, at + 8 * x);
                    UNROLL(8) for (int i = 0; i < n; i++)
                        acc[i][x] = _mm256_fmadd_ps(ej[i], vj, acc[i][x]);
                }
            } else {
                __m256 vj[8];
                UNROLL(8) for (int x = 0; x < w; x++)
                    vj[x] = load8(t, v, at + 8 * x);
                UNROLL(8) for (int i = 0; i < n; i++) {
                    __m256 ej = _mm256_set1_ps(g->e[i][j]);
                    UNROLL(8) for (int x = 0; x < w; x++)
                        acc[i][x] = _mm256_fmadd_ps(ej, vj[x], acc[i][x]);
                }
            }
        }
    }
}

/* Elements c .. c + 8w - 1 of the result, w registers. */
INLINE void values(kvd_kvtype t, int n, int w, const kvd_group *g, int c)
{
    __m256 acc[KVD__GROUP][8];
    UNROLL(8) for (int i = 0; i < n; i++)
        UNROLL(8) for (int x = 0; x < w; x++)
            acc[i][x] = _mm256_setzero_ps();
    if (n > 1 && g->first < g->common)
        add_ragged(t, n, w, g, c, g->first, g->common, acc);
    add_common(t, n, w, g, c, g->common, g->common_end, acc);
    if (n > 1 && g->common_end < g->end)
        add_ragged(t, n, w, g, c, g->common_end, g->end, acc);
    UNROLL(8) for (int i = 0; i < n; i++) {
        float *O = g->O[i] + c;
        if (g->fresh[i]) {
            UNROLL(8) for (int x = 0; x < w; x++)
                _mm256_storeu_ps(O + 8 * x, acc[i][x]);
        } else {
            __m256 a = _mm256_set1_ps(g->a[i]), b = _mm256_set1_ps(g->b[i]);
            UNROLL(8) for (int x = 0; x < w; x++) {
                __m256 old = _mm256_loadu_ps(O + 8 * x);
                _mm256_storeu_ps(O + 8 * x, _mm256_fmadd_ps(old, a, _mm256_mul_ps(acc[i][x], b)));
            }
        }
    }
}

INLINE void group(kvd_kvtype t, int n, kvd_group *g, float *const *M, float *const *L)
{
    int c = 0;
    for (int b = g->first / KVD__BLOCK; b * KVD__BLOCK < g->end; b++)
        scores(t, n, g, b);
    softmax(g);
    kvd__group_weights(g, M, L);
    if (n == 1)
        for (; c + 64 <= g->d; c += 64)
            values(t, n, 8, g, c);
    if (n <= 3)
        for (; c + 32 <= g->d; c += 32)
            values(t, n, 4, g, c);
    for (; c + 16 <= g->d; c += 16)
        values(t, n, 2, g, c);
    if (c < g->d)
        values(t, n, 1, g, c);
}

#define INSTANCES(t)                                                                                \
    KVD_GROUP_INSTANCE(group, t, 1) KVD_GROUP_INSTANCE(group, t, 2) KVD_GROUP_INSTANCE(group, t, 3) \
    KVD_GROUP_INSTANCE(group, t, 4) KVD_GROUP_INSTANCE(group, t, 5) KVD_GROUP_INSTANCE(group, t, 6)
#define LIST(t) {NULL, group_##t##_1, group_##t##_2, group_##t##_3, group_##t##_4, group_##t##_5, group_##t##_6}
INSTANCES(F16)
INSTANCES(BF16)
INSTANCES(F32)

static void attn_tile_avx2(const kvd_attn_tile *t, float *M, float *L, float *O, void *scratch)
{
    static const kvd_group_isa isa = {.group = 6, .convert_from = 18, .widen = widen, .run = {LIST(F16), LIST(BF16), LIST(F32)}};
    kvd__group_tile(t, M, L, O, scratch, &isa);
}

static void attn_merge_avx2(float *M, float *L, float *O, float m, float l, const float *o, int d_head)
{
    const float minus_inf = kvd__f32_from_bits(0xff800000u);
    if (m == minus_inf)
        return;
    bool fresh = *M == minus_inf;
    float top = *M > m ? *M : m, a = kvd__exp_f32(*M - top), b = kvd__exp_f32(m - top);
    *M = top;
    *L = fresh ? l : kvd__fmaf(*L, a, l * b);
    for (int i = 0; i < d_head; i += 8) {
        __m256 v = _mm256_loadu_ps(o + i);
        if (!fresh) {
            __m256 old = _mm256_loadu_ps(O + i);
            v = _mm256_fmadd_ps(old, _mm256_set1_ps(a), _mm256_mul_ps(v, _mm256_set1_ps(b)));
        }
        _mm256_storeu_ps(O + i, v);
    }
}

static void attn_finish_avx2(float *out, const float *O, float L, int d_head)
{
    for (int i = 0; i < d_head; i += 8)
        _mm256_storeu_ps(out + i, _mm256_div_ps(_mm256_loadu_ps(O + i), _mm256_set1_ps(L)));
}

void kvd__kern_fill_attn_avx2(kvd_kern *k)
{
    k->attn_tile = attn_tile_avx2;
    k->attn_merge = attn_merge_avx2;
    k->attn_finish = attn_finish_avx2;
}
