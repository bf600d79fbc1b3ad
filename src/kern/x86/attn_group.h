/* kern/x86: the frame of attention, the same for AVX2 and AVX-512.
 *
 * The queries of a tile are taken in groups of at most KVD__GROUP that share
 * their loads of K and V. A group goes through four steps:
 *
 *   scores   e[i][j] = chain over d of q[i][d] * k[d][j]; lanes are positions
 *   softmax  per query: scale, mask, maximum m, e = exp(s - m), sum l
 *   weights  M, L and the factors a, b of the merge; lanes are queries
 *   values   chain over j of e[i][j] * v[j][d], merged into O; lanes are d
 *
 * No lane ever holds a part of another's sum, so the group's size and the
 * registers' width do not show in the bits. Steps one, two and four belong to the
 * instruction set's own file, made once per stored type and group size.
 *
 * Few queries (decode) convert f16 and bf16 in registers, as they load; from
 * `convert_from` queries on (prefill) the blocks are first widened to f32 in
 * scratch, once for all groups.
 *
 * A block that nobody sees may be missing. Then another block of the tile stands
 * in for it: whole blocks can be loaded without a test, and what comes out of
 * unseen slots, garbage or NaN, stays in its own lanes and is masked there. */
#ifndef KVD_KERN_X86_ATTN_GROUP_H
#define KVD_KERN_X86_ATTN_GROUP_H

#include <immintrin.h>

#include "kern/kern.h"
#include "kern/x86/exp_avx2.h"
#include "kern/x86/unroll.h"

enum { KVD__GROUP = 8 };

/* From this d_head on, the values of several queries take so many passes over a
 * block that the hardware's prefetchers lose track; then V is fetched to the
 * second-level cache line by line while the scores read K. (Zen 4, f16, d_head 256,
 * four queries, from memory: 15.3 GB/s with it, 13.5 without on AVX-512, 13.6 and
 * 8.2 on AVX2. With fewer passes it harms: d_head 128, one query 20.6 and 34.2.) */
enum { KVD__PREFETCH_D = 256 };

typedef struct kvd_group {
    int n, d;                /* queries, d_head */
    int first, end;          /* hull of what they see */
    int common, common_end;  /* what all of them see; common <= common_end */
    float scale;
    const void *k[KVD__TILE_BLOCKS], *v[KVD__TILE_BLOCKS];
    const float *q[KVD__GROUP];
    int lo[KVD__GROUP], hi[KVD__GROUP];
    float *O[KVD__GROUP];
    float m[KVD__GROUP], l[KVD__GROUP]; /* of the tile */
    float a[KVD__GROUP], b[KVD__GROUP]; /* O = fma(O, a, o*b) */
    bool fresh[KVD__GROUP];             /* O = o */
    float (*e)[KVD__TILE];              /* [KVD__GROUP][64] */
} kvd_group;

/* Steps one to four for g->n queries. */
typedef void kvd_group_fn(kvd_group *g, float *const *M, float *const *L);

typedef struct kvd_group_isa {
    int group;        /* best number of queries, at most KVD__GROUP */
    int convert_from; /* queries from which on widening pays */
    kvd_group_fn *run[KVD_KV_COUNT][KVD__GROUP + 1];
    void (*widen)(float *dst, const void *src, kvd_kvtype t, int n); /* n: multiple of 8 */
} kvd_group_isa;

/* Step three. The maximum is written as in the reference: a NaN in either place
 * reaches L through exp and stays. */
static inline void kvd__group_weights(kvd_group *g, float *const *M, float *const *L)
{
    float m_old[KVD__GROUP] = {0}, l_old[KVD__GROUP] = {0}, m_new[KVD__GROUP], l_new[KVD__GROUP];
    for (int i = 0; i < g->n; i++) {
        m_old[i] = *M[i];
        l_old[i] = *L[i];
    }
    for (int i = g->n; i < KVD__GROUP; i++)
        g->m[i] = g->l[i] = 0;
    __m256 mo = _mm256_loadu_ps(m_old), m = _mm256_loadu_ps(g->m), l = _mm256_loadu_ps(g->l);
    __m256 empty = _mm256_cmp_ps(mo, _mm256_castsi256_ps(_mm256_set1_epi32((int)0xff800000)), _CMP_EQ_OQ);
    __m256 top = _mm256_blendv_ps(m, mo, _mm256_cmp_ps(mo, m, _CMP_GT_OQ));
    __m256 a = kvd__exp_below_avx2(_mm256_sub_ps(mo, top)), b = kvd__exp_below_avx2(_mm256_sub_ps(m, top));
    __m256 sum = _mm256_fmadd_ps(_mm256_loadu_ps(l_old), a, _mm256_mul_ps(l, b));
    _mm256_storeu_ps(m_new, top); /* of an empty state: m, for -inf is not above it */
    _mm256_storeu_ps(l_new, _mm256_blendv_ps(sum, l, empty));
    _mm256_storeu_ps(g->a, a);
    _mm256_storeu_ps(g->b, b);
    int bits = _mm256_movemask_ps(empty);
    for (int i = 0; i < g->n; i++) {
        *M[i] = m_new[i];
        *L[i] = l_new[i];
        g->fresh[i] = bits >> i & 1;
    }
}

/* Which blocks does any row see? */
static inline unsigned kvd__seen_blocks(const kvd_attn_tile *t, int *n_rows)
{
    unsigned seen = 0;
    *n_rows = 0;
    for (int r = 0; r < t->n_rows; r++) {
        if (t->lo[r] >= t->hi[r])
            continue;
        ++*n_rows;
        for (int b = t->lo[r] / KVD__BLOCK; b <= (t->hi[r] - 1) / KVD__BLOCK; b++)
            seen |= 1u << b;
    }
    return seen;
}

/* Set g->k and g->v, widened where that pays, and return their type. */
static inline kvd_kvtype kvd__group_blocks(kvd_group *g, const kvd_attn_tile *t, unsigned seen, bool convert,
                                           const kvd_group_isa *isa, float *scratch)
{
    int d = t->d_head, stand_in = __builtin_ctz(seen);
    for (int half = 0; half < 2; half++) { /* all of K, then all of V, as they lie in memory */
        const void *const *from = half ? t->v : t->k;
        const void **to = half ? g->v : g->k;
        for (int b = 0; b < KVD__TILE_BLOCKS; b++) {
            to[b] = from[b];
            if (convert && (seen >> b & 1)) {
                float *wide = scratch + (half * KVD__TILE + b * KVD__BLOCK) * d;
                isa->widen(wide, from[b], t->kvtype, KVD__BLOCK * d);
                to[b] = wide;
            }
        }
    }
    for (int b = 0; b < KVD__TILE_BLOCKS; b++)
        if (!(seen >> b & 1)) {
            g->k[b] = g->k[stand_in];
            g->v[b] = g->v[stand_in];
        }
    return convert ? KVD_KV_F32 : t->kvtype;
}

static inline void kvd__group_ranges(kvd_group *g)
{
    g->first = g->common_end = KVD__TILE;
    g->end = g->common = 0;
    for (int i = 0; i < g->n; i++) {
        g->first = g->lo[i] < g->first ? g->lo[i] : g->first;
        g->common = g->lo[i] > g->common ? g->lo[i] : g->common;
        g->end = g->hi[i] > g->end ? g->hi[i] : g->end;
        g->common_end = g->hi[i] < g->common_end ? g->hi[i] : g->common_end;
    }
    if (g->common_end < g->common)
        g->common_end = g->common;
}

static inline void kvd__group_tile(const kvd_attn_tile *t, float *M, float *L, float *O, void *scratch,
                                   const kvd_group_isa *isa)
{
    int n_rows, d = t->d_head;
    unsigned seen = kvd__seen_blocks(t, &n_rows);
    if (!seen || !t->n_heads)
        return;
    kvd_group g = {.d = d, .scale = t->scale, .e = scratch};
    float *Mi[KVD__GROUP], *Li[KVD__GROUP];
    int left = n_rows * t->n_heads;
    bool convert = t->kvtype != KVD_KV_F32 && left >= isa->convert_from;
    kvd_kvtype type = kvd__group_blocks(&g, t, seen, convert, isa, (float *)scratch + KVD__GROUP * KVD__TILE);
    /* groups of even size: seven queries are four and three, not six and one */
    int n_groups = (left + isa->group - 1) / isa->group, size = (left + n_groups - 1) / n_groups;
    for (int r = 0; r < t->n_rows; r++) {
        if (t->lo[r] >= t->hi[r])
            continue;
        for (int h = 0; h < t->n_heads; h++) {
            int64_t i = (int64_t)r * t->n_heads + h;
            g.q[g.n] = t->q + r * t->ld_q + (int64_t)h * d;
            g.lo[g.n] = t->lo[r];
            g.hi[g.n] = t->hi[r];
            g.O[g.n] = O + i * d;
            Mi[g.n] = M + i;
            Li[g.n] = L + i;
            if (++g.n < size)
                continue;
            kvd__group_ranges(&g);
            isa->run[type][g.n](&g, Mi, Li);
            left -= g.n;
            n_groups--;
            size = n_groups ? (left + n_groups - 1) / n_groups : 0;
            g.n = 0;
        }
    }
}

/* Instances for one type: 1 .. 8 queries. */
#define KVD_GROUP_INSTANCE(body, type, n)                                                    \
    static void body##_##type##_##n(kvd_group *g, float *const *M, float *const *L)          \
    {                                                                                        \
        body(KVD_KV_##type, n, g, M, L);                                                     \
    }

#endif
