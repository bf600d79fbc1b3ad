/* kern/x86: attention for AVX-512. Sixteen lanes are a block's positions in the
 * scores and sixteen elements of d_head in the values. attn_group.h has the frame.
 *
 * Scores take one block at a time, although one to three queries alone do not fill
 * the FMA's latency then: long contexts come from memory, and there one stream in
 * the order of addresses is worth more. (Zen 4, d_head 64, f16, one query: 32 GB/s
 * from memory against 12 with the four blocks of a tile side by side; 41 against
 * 43 from the L2 cache.) Values take as many elements of d at a time as registers
 * allow, 16 to 28 of 32, for the same reason. */
#include "kern/x86/attn_group.h"
#include "kern/x86/exp_avx512.h"

/* Stored values i .. i+15; only those of `lanes` are touched. */
INLINE __m512 load16(kvd_kvtype t, const void *p, int64_t i, __mmask16 lanes)
{
    if (t == KVD_KV_F32)
        return _mm512_maskz_loadu_ps(lanes, (const float *)p + i);
    __m256i h = lanes == 0xffff ? _mm256_loadu_si256((const void *)((const uint16_t *)p + i))
                                : _mm256_maskz_loadu_epi16(lanes, (const uint16_t *)p + i);
    if (t == KVD_KV_F16)
        return _mm512_cvtph_ps(h);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}

static void widen(float *dst, const void *src, kvd_kvtype t, int n)
{
    if (t == KVD_KV_F16)
        for (int i = 0; i < n; i += 16)
            _mm512_storeu_ps(dst + i, load16(KVD_KV_F16, src, i, 0xffff));
    else
        for (int i = 0; i < n; i += 16)
            _mm512_storeu_ps(dst + i, load16(KVD_KV_BF16, src, i, 0xffff));
}

/* Block b for n queries. One block at a time, so that K is read in the order of its
 * addresses. */
INLINE void scores(kvd_kvtype t, int n, const kvd_group *g, int b)
{
    __m512 acc[KVD__GROUP];
    const float *q[KVD__GROUP];
    const void *k = g->k[b];
    UNROLL(8) for (int i = 0; i < n; i++) {
        q[i] = g->q[i];
        acc[i] = _mm512_setzero_ps();
    }
    bool ahead = t != KVD_KV_F32 && n >= 4 && g->d >= KVD__PREFETCH_D;
    for (int d = 0; d < g->d; d++) {
        if (ahead && d % 2 == 0)
            _mm_prefetch((const char *)g->v[b] + d * 2 * KVD__BLOCK, _MM_HINT_T1);
        __m512 kd = load16(t, k, (int64_t)d * KVD__BLOCK, 0xffff);
        UNROLL(8) for (int i = 0; i < n; i++)
            acc[i] = _mm512_fmadd_ps(_mm512_set1_ps(q[i][d]), kd, acc[i]);
    }
    UNROLL(8) for (int i = 0; i < n; i++)
        _mm512_storeu_ps(g->e[i] + b * KVD__BLOCK, acc[i]);
}

static inline uint64_t visible_slots(const kvd_group *g, int i)
{
    return ~(uint64_t)0 >> (KVD__TILE - g->hi[i] + g->lo[i]) << g->lo[i];
}

/* Scores to exponentials, in place; m and l. Two loops over the queries, so that
 * the latencies of one's maximum and sum hide behind the others. max(s, m) gives m
 * if s is NaN. */
static void softmax(kvd_group *g)
{
    float top[KVD__GROUP];
    for (int i = 0; i < g->n; i++) {
        uint64_t visible = visible_slots(g, i);
        __m512 m = _mm512_set1_ps(kvd__f32_from_bits(0xff800000u));
        UNROLL(4) for (int b = 0; b < KVD__TILE_BLOCKS; b++) {
            __m512 s = _mm512_mul_ps(_mm512_loadu_ps(g->e[i] + b * KVD__BLOCK), _mm512_set1_ps(g->scale));
            m = _mm512_mask_max_ps(m, (__mmask16)(visible >> b * KVD__BLOCK), s, m);
            _mm512_storeu_ps(g->e[i] + b * KVD__BLOCK, s);
        }
        top[i] = _mm512_reduce_max_ps(m) + 0.0f;
    }
    for (int i = 0; i < g->n; i++) {
        uint64_t visible = visible_slots(g, i);
        __m512 m = _mm512_set1_ps(top[i]), sum = _mm512_setzero_ps();
        UNROLL(4) for (int b = 0; b < KVD__TILE_BLOCKS; b++) {
            __m512 e = _mm512_sub_ps(_mm512_loadu_ps(g->e[i] + b * KVD__BLOCK), m);
            e = kvd__exp_below_avx512((__mmask16)(visible >> b * KVD__BLOCK), e);
            sum = _mm512_add_ps(sum, e);
            _mm512_storeu_ps(g->e[i] + b * KVD__BLOCK, e);
        }
        float l = kvd__fold16_avx512(sum);
        g->l[i] = l;
        g->m[i] = l == l ? top[i] : l;
    }
}

/* acc += e[.][j] * v[j] for j of [j, end), for each query as far as it sees. */
INLINE void add_ragged(kvd_kvtype t, int n, int w, const kvd_group *g, int c, __mmask16 lanes, int j, int end,
                       __m512 acc[KVD__GROUP][8])
{
    for (; j < end; j++) {
        int64_t at = (int64_t)(j % KVD__BLOCK) * g->d + c;
        UNROLL(8) for (int i = 0; i < n; i++)
            if (j >= g->lo[i] && j < g->hi[i])
                UNROLL(8) for (int x = 0; x < w; x++)
                    acc[i][x] = _mm512_fmadd_ps(_mm512_set1_ps(g->e[i][j]),
                                                load16(t, g->v[j / KVD__BLOCK], at + 16 * x, lanes), acc[i][x]);
    }
}

/* The same where all see all. Besides acc, only one element of V and n of e are
 * in registers at a time, or the other way round. */
INLINE void add_common(kvd_kvtype t, int n, int w, const kvd_group *g, int c, __mmask16 lanes, int j, int end,
                       __m512 acc[KVD__GROUP][8])
{
    while (j < end) {
        const void *v = g->v[j / KVD__BLOCK];
        int stop = (j | (KVD__BLOCK - 1)) + 1;
        stop = stop < end ? stop : end;
        for (; j < stop; j++) {
            int64_t at = (int64_t)(j % KVD__BLOCK) * g->d + c;
            if (n <= w) {
                __m512 ej[8];
                UNROLL(8) for (int i = 0; i < n; i++)
                    ej[i] = _mm512_set1_ps(g->e[i][j]);
                UNROLL(8) for (int x = 0; x < w; x++) {
                    __m512 vj = load16(t, v, at + 16 * x, lanes);
                    UNROLL(8) for (int i = 0; i < n; i++)
                        acc[i][x] = _mm512_fmadd_ps(ej[i], vj, acc[i][x]);
                }
            } else {
                __m512 vj[8];
                UNROLL(8) for (int x = 0; x < w; x++)
                    vj[x] = load16(t, v, at + 16 * x, lanes);
                UNROLL(8) for (int i = 0; i < n; i++) {
                    __m512 ej = _mm512_set1_ps(g->e[i][j]);
                    UNROLL(8) for (int x = 0; x < w; x++)
                        acc[i][x] = _mm512_fmadd_ps(ej, vj[x], acc[i][x]);
                }
            }
        }
    }
}

/* Elements c .. c + 16w - 1 of the result, w registers; of the last, `lanes`. */
INLINE void values(kvd_kvtype t, int n, int w, const kvd_group *g, int c, __mmask16 lanes)
{
    __m512 acc[KVD__GROUP][8];
    UNROLL(8) for (int i = 0; i < n; i++)
        UNROLL(8) for (int x = 0; x < w; x++)
            acc[i][x] = _mm512_setzero_ps();
    if (n > 1 && g->first < g->common)
        add_ragged(t, n, w, g, c, lanes, g->first, g->common, acc);
    add_common(t, n, w, g, c, lanes, g->common, g->common_end, acc);
    if (n > 1 && g->common_end < g->end)
        add_ragged(t, n, w, g, c, lanes, g->common_end, g->end, acc);
    UNROLL(8) for (int i = 0; i < n; i++) {
        float *O = g->O[i] + c;
        if (g->fresh[i]) {
            UNROLL(8) for (int x = 0; x < w; x++)
                _mm512_mask_storeu_ps(O + 16 * x, lanes, acc[i][x]);
        } else {
            __m512 a = _mm512_set1_ps(g->a[i]), b = _mm512_set1_ps(g->b[i]);
            UNROLL(8) for (int x = 0; x < w; x++) {
                __m512 old = _mm512_maskz_loadu_ps(lanes, O + 16 * x);
                old = _mm512_fmadd_ps(old, a, _mm512_mul_ps(acc[i][x], b));
                _mm512_mask_storeu_ps(O + 16 * x, lanes, old);
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
    if (n <= 3)
        for (; c + 128 <= g->d; c += 128)
            values(t, n, 8, g, c, 0xffff);
    if (n <= 7)
        for (; c + 64 <= g->d; c += 64)
            values(t, n, 4, g, c, 0xffff);
    for (; c + 32 <= g->d; c += 32)
        values(t, n, 2, g, c, 0xffff);
    for (; c < g->d; c += 16)
        values(t, n, 1, g, c, g->d - c >= 16 ? 0xffff : 0xff);
}

#define INSTANCES(t)                                                                                  \
    KVD_GROUP_INSTANCE(group, t, 1) KVD_GROUP_INSTANCE(group, t, 2) KVD_GROUP_INSTANCE(group, t, 3)   \
    KVD_GROUP_INSTANCE(group, t, 4) KVD_GROUP_INSTANCE(group, t, 5) KVD_GROUP_INSTANCE(group, t, 6)   \
    KVD_GROUP_INSTANCE(group, t, 7) KVD_GROUP_INSTANCE(group, t, 8)
#define LIST(t) {NULL, group_##t##_1, group_##t##_2, group_##t##_3, group_##t##_4, group_##t##_5, group_##t##_6, group_##t##_7, group_##t##_8}
INSTANCES(F16)
INSTANCES(BF16)
INSTANCES(F32)

static void attn_tile_avx512(const kvd_attn_tile *t, float *M, float *L, float *O, void *scratch)
{
    static const kvd_group_isa isa = {.group = 8, .convert_from = 24, .widen = widen, .run = {LIST(F16), LIST(BF16), LIST(F32)}};
    kvd__group_tile(t, M, L, O, scratch, &isa);
}

static void attn_merge_avx512(float *M, float *L, float *O, float m, float l, const float *o, int d_head)
{
    const float minus_inf = kvd__f32_from_bits(0xff800000u);
    if (m == minus_inf)
        return;
    bool fresh = *M == minus_inf;
    float top = *M > m ? *M : m, a = kvd__exp_f32(*M - top), b = kvd__exp_f32(m - top);
    *M = top;
    *L = fresh ? l : kvd__fmaf(*L, a, l * b);
    for (int i = 0; i < d_head; i += 16) {
        __mmask16 lanes = d_head - i >= 16 ? 0xffff : 0xff;
        __m512 v = _mm512_maskz_loadu_ps(lanes, o + i);
        if (!fresh) {
            __m512 old = _mm512_maskz_loadu_ps(lanes, O + i);
            v = _mm512_fmadd_ps(old, _mm512_set1_ps(a), _mm512_mul_ps(v, _mm512_set1_ps(b)));
        }
        _mm512_mask_storeu_ps(O + i, lanes, v);
    }
}

static void attn_finish_avx512(float *out, const float *O, float L, int d_head)
{
    for (int i = 0; i < d_head; i += 16) {
        __mmask16 lanes = d_head - i >= 16 ? 0xffff : 0xff;
        _mm512_mask_storeu_ps(out + i, lanes, _mm512_div_ps(_mm512_maskz_loadu_ps(lanes, O + i), _mm512_set1_ps(L)));
    }
}

void kvd__kern_fill_attn_avx512(kvd_kern *k)
{
    k->attn_tile = attn_tile_avx512;
    k->attn_merge = attn_merge_avx512;
    k->attn_finish = attn_finish_avx512;
}
