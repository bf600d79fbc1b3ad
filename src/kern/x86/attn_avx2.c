/* kern/x86: attention for AVX2. Two registers are a block's positions in the
 * scores; eight lanes are elements of d_head in the values, of which d_head is a
 * multiple, so there are no tails.
 *
 * Of 16 registers the inner loops use 8 to 12 to accumulate, n queries times
 * blocks or times vectors of d: an FMA of 4 cycles, two a cycle, wants at least 8.
 * attn_group.h has the frame. */
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

/* Blocks b .. b + n_blocks - 1 for n queries. Registers are taken in the order
 * that keeps fewest alive: all of K and one query, or the other way round. */
INLINE void scores(kvd_kvtype t, int n, int n_blocks, const kvd_group *g, int b)
{
    __m256 acc[KVD__GROUP][2 * KVD__TILE_BLOCKS];
    const float *q[KVD__GROUP];
    const void *k[KVD__TILE_BLOCKS];
    UNROLL(8) for (int i = 0; i < n; i++) {
        q[i] = g->q[i];
        UNROLL(8) for (int c = 0; c < 2 * n_blocks; c++)
            acc[i][c] = _mm256_setzero_ps();
    }
    UNROLL(4) for (int c = 0; c < n_blocks; c++)
        k[c] = g->k[b + c];
    for (int d = 0; d < g->d; d++) {
        if (2 * n_blocks <= n) {
            __m256 kd[2 * KVD__TILE_BLOCKS];
            UNROLL(8) for (int c = 0; c < 2 * n_blocks; c++)
                kd[c] = load8(t, k[c / 2], (int64_t)d * KVD__BLOCK + c % 2 * 8);
            UNROLL(8) for (int i = 0; i < n; i++) {
                __m256 qd = _mm256_set1_ps(q[i][d]);
                UNROLL(8) for (int c = 0; c < 2 * n_blocks; c++)
                    acc[i][c] = _mm256_fmadd_ps(qd, kd[c], acc[i][c]);
            }
        } else {
            __m256 qd[KVD__GROUP];
            UNROLL(8) for (int i = 0; i < n; i++)
                qd[i] = _mm256_set1_ps(q[i][d]);
            UNROLL(8) for (int c = 0; c < 2 * n_blocks; c++) {
                __m256 kd = load8(t, k[c / 2], (int64_t)d * KVD__BLOCK + c % 2 * 8);
                UNROLL(8) for (int i = 0; i < n; i++)
                    acc[i][c] = _mm256_fmadd_ps(qd[i], kd, acc[i][c]);
            }
        }
    }
    UNROLL(8) for (int i = 0; i < n; i++)
        UNROLL(8) for (int c = 0; c < 2 * n_blocks; c++)
            _mm256_storeu_ps(g->e[i] + b * KVD__BLOCK + c * 8, acc[i][c]);
}

enum { VECTORS = KVD__TILE / 8 };

/* Scores to exponentials, in place; m and l. max(s, m) gives m if s is NaN. `all`:
 * the whole tile is visible. */
INLINE void softmax_of(kvd_group *g, int i, bool all)
{
    const __m256 minus_inf = _mm256_castsi256_ps(_mm256_set1_epi32((int)0xff800000));
    const __m256i iota = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    __m256i from = _mm256_set1_epi32(g->lo[i] - 1), to = _mm256_set1_epi32(g->hi[i]);
    __m256 s[VECTORS], seen[VECTORS], m = minus_inf, sum[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    UNROLL(8) for (int v = 0; v < VECTORS; v++) {
        s[v] = _mm256_mul_ps(_mm256_loadu_ps(g->e[i] + 8 * v), _mm256_set1_ps(g->scale));
        __m256 masked = s[v];
        if (!all) {
            __m256i j = _mm256_add_epi32(iota, _mm256_set1_epi32(8 * v));
            seen[v] = _mm256_castsi256_ps(_mm256_and_si256(_mm256_cmpgt_epi32(j, from), _mm256_cmpgt_epi32(to, j)));
            masked = _mm256_blendv_ps(minus_inf, s[v], seen[v]);
        }
        m = _mm256_max_ps(masked, m);
    }
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(m), _mm256_extractf128_ps(m, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    float top = _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half))) + 0.0f;
    m = _mm256_set1_ps(top);
    UNROLL(8) for (int v = 0; v < VECTORS; v++) {
        __m256 e = kvd__exp_below_avx2(_mm256_sub_ps(s[v], m));
        e = all ? e : _mm256_and_ps(e, seen[v]);
        sum[v % 2] = _mm256_add_ps(sum[v % 2], e);
        _mm256_storeu_ps(g->e[i] + 8 * v, e);
    }
    float l = kvd__fold16_avx2(sum[0], sum[1]);
    g->l[i] = l;
    g->m[i] = l == l ? top : l;
}

static inline void softmax(kvd_group *g, int i)
{
    if (g->lo[i] == 0 && g->hi[i] == KVD__TILE)
        softmax_of(g, i, true);
    else
        softmax_of(g, i, false);
}

/* acc += e[.][j] * v[j] for j of [j, end); each query its own part of it unless
 * `all` say that they see the whole of it. */
INLINE void add_values(kvd_kvtype t, int n, int w, bool all, const kvd_group *g, int c, int j, int end,
                       __m256 acc[KVD__GROUP][8])
{
    while (j < end) {
        const void *v = g->v[j / KVD__BLOCK];
        int stop = (j | (KVD__BLOCK - 1)) + 1;
        stop = stop < end ? stop : end;
        for (; j < stop; j++) {
            int64_t at = (int64_t)(j % KVD__BLOCK) * g->d + c;
            if (n == 1) {
                __m256 ej = _mm256_set1_ps(g->e[0][j]);
                UNROLL(8) for (int x = 0; x < w; x++)
                    acc[0][x] = _mm256_fmadd_ps(ej, load8(t, v, at + 8 * x), acc[0][x]);
                continue;
            }
            __m256 vj[4];
            UNROLL(4) for (int x = 0; x < w; x++)
                vj[x] = load8(t, v, at + 8 * x);
            UNROLL(8) for (int i = 0; i < n; i++) {
                if (!all && (j < g->lo[i] || j >= g->hi[i]))
                    continue;
                __m256 ej = _mm256_set1_ps(g->e[i][j]);
                UNROLL(4) for (int x = 0; x < w; x++)
                    acc[i][x] = _mm256_fmadd_ps(ej, vj[x], acc[i][x]);
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
        add_values(t, n, w, false, g, c, g->first, g->common, acc);
    add_values(t, n, w, true, g, c, g->common, g->common_end, acc);
    if (n > 1 && g->common_end < g->end)
        add_values(t, n, w, false, g, c, g->common_end, g->end, acc);
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
    int n_blocks = n == 1 ? 4 : n <= 3 ? 2 : 1, c = 0;
    for (int b = 0; b < KVD__TILE_BLOCKS; b += n_blocks)
        if (g->first < (b + n_blocks) * KVD__BLOCK && g->end > b * KVD__BLOCK)
            scores(t, n, n_blocks, g, b);
    for (int i = 0; i < n; i++)
        softmax(g, i);
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
