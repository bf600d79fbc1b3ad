/* kern/x86: element-wise kernels and stores for AVX2, FMA and F16C. Lanes hold
 * different elements, so the only sum is RMSNorm's, whose 16 lanes are two
 * registers. Every pointer may have 4-byte alignment, and nothing past an end is
 * touched: tails go through masked loads and stores, which cost more than whole
 * ones on some machines but occur once per row. */
#include <immintrin.h>
#include <string.h>

#include "base/fma.h"
#include "base/half.h"
#include "kern/kern.h"
#include "kern/x86/exp_avx2.h"
#include "kern/x86/unroll.h"

/* The first n (0..8) lanes. */
static inline __m256i mask8(int64_t n)
{
    static const int32_t ones[16] = {-1, -1, -1, -1, -1, -1, -1, -1};
    return _mm256_loadu_si256((const __m256i *)(const void *)(ones + 8 - n));
}

/* ---- element-wise ---------------------------------------------------------- */

static int rmsnorm_avx2(float *y, const float *x, const float *w, float eps, int64_t n)
{
    __m256 s0 = _mm256_setzero_ps(), s1 = s0;
    int64_t i = 0, tail = n % 16;
    for (; i + 16 <= n; i += 16) {
        __m256 a = _mm256_loadu_ps(x + i), b = _mm256_loadu_ps(x + i + 8);
        s0 = _mm256_fmadd_ps(a, a, s0);
        s1 = _mm256_fmadd_ps(b, b, s1);
    }
    if (tail) { /* a lane without an element adds +0 to a sum that is never -0 */
        __m256 a = _mm256_maskload_ps(x + i, mask8(tail < 8 ? tail : 8));
        s0 = _mm256_fmadd_ps(a, a, s0);
    }
    if (tail > 8) {
        __m256 b = _mm256_maskload_ps(x + i + 8, mask8(tail - 8));
        s1 = _mm256_fmadd_ps(b, b, s1);
    }
    float sum = kvd__fold16_avx2(s0, s1);
    if ((kvd__f32_bits(sum) & 0x7f800000u) == 0x7f800000u)
        return -1;
    __m256 r = _mm256_set1_ps(1.0f / __builtin_sqrtf(sum / (float)n + eps));
    for (i = 0; i + 8 <= n; i += 8)
        _mm256_storeu_ps(y + i, _mm256_mul_ps(_mm256_mul_ps(_mm256_loadu_ps(x + i), r), _mm256_loadu_ps(w + i)));
    if (i < n) {
        __m256i m = mask8(n - i);
        __m256 v = _mm256_mul_ps(_mm256_maskload_ps(x + i, m), r);
        _mm256_maskstore_ps(y + i, m, _mm256_mul_ps(v, _mm256_maskload_ps(w + i, m)));
    }
    return 0;
}

/* Pairs (2i, 2i+1): even lanes x0*c - x1*s, odd lanes x0*s + x1*c. */
static void rope_pairs(float *x, int n_heads, int d_head, int n_rot, const float *cs)
{
    int i = 0;
    for (; i + 8 <= n_rot; i += 8) {
        __m256 t = _mm256_loadu_ps(cs + i), sc = _mm256_permute_ps(t, 0xb1);
        for (int h = 0; h < n_heads; h++) {
            float *p = x + (int64_t)h * d_head + i;
            __m256 v = _mm256_loadu_ps(p);
            __m256 m = _mm256_mul_ps(_mm256_movehdup_ps(v), sc);
            _mm256_storeu_ps(p, _mm256_fmaddsub_ps(_mm256_moveldup_ps(v), t, m));
        }
    }
    for (; i < n_rot; i += 2)
        for (int h = 0; h < n_heads; h++) {
            float *p = x + (int64_t)h * d_head + i, x0 = p[0], x1 = p[1];
            p[0] = kvd__fmaf(x0, cs[i], -(x1 * cs[i + 1]));
            p[1] = kvd__fmaf(x0, cs[i + 1], x1 * cs[i]);
        }
}

/* Pairs (i, i + n_rot/2). */
static void rope_halves(float *x, int n_heads, int d_head, int n_rot, const float *cs)
{
    int i = 0, half = n_rot / 2;
    for (; i + 8 <= half; i += 8) {
        __m256 a = _mm256_loadu_ps(cs + 2 * i), b = _mm256_loadu_ps(cs + 2 * i + 8);
        __m256 even = _mm256_shuffle_ps(a, b, 0x88), odd = _mm256_shuffle_ps(a, b, 0xdd);
        __m256 c = _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(even), 0xd8));
        __m256 s = _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(odd), 0xd8));
        for (int h = 0; h < n_heads; h++) {
            float *p = x + (int64_t)h * d_head + i;
            __m256 x0 = _mm256_loadu_ps(p), x1 = _mm256_loadu_ps(p + half);
            _mm256_storeu_ps(p, _mm256_fmsub_ps(x0, c, _mm256_mul_ps(x1, s)));
            _mm256_storeu_ps(p + half, _mm256_fmadd_ps(x0, s, _mm256_mul_ps(x1, c)));
        }
    }
    for (; i < half; i++)
        for (int h = 0; h < n_heads; h++) {
            float *p = x + (int64_t)h * d_head + i, x0 = p[0], x1 = p[half];
            p[0] = kvd__fmaf(x0, cs[2 * i], -(x1 * cs[2 * i + 1]));
            p[half] = kvd__fmaf(x0, cs[2 * i + 1], x1 * cs[2 * i]);
        }
}

static void rope_avx2(float *x, int n_heads, int d_head, int n_rot, const float *cs, bool interleaved)
{
    if (interleaved)
        rope_pairs(x, n_heads, d_head, n_rot, cs);
    else
        rope_halves(x, n_heads, d_head, n_rot, cs);
}

static inline __m256 silu8(__m256 x)
{
    __m256 e = kvd__exp_avx2(_mm256_xor_ps(x, _mm256_set1_ps(-0.0f)));
    return _mm256_div_ps(x, _mm256_add_ps(_mm256_set1_ps(1.0f), e));
}

static void silu_mul_avx2(float *y, const float *gate, const float *up, int64_t n)
{
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(y + i, _mm256_mul_ps(silu8(_mm256_loadu_ps(gate + i)), _mm256_loadu_ps(up + i)));
    if (i < n) {
        __m256i m = mask8(n - i);
        __m256 v = silu8(_mm256_maskload_ps(gate + i, m));
        _mm256_maskstore_ps(y + i, m, _mm256_mul_ps(v, _mm256_maskload_ps(up + i, m)));
    }
}

static inline __m256 gelu8(__m256 x)
{
    __m256 a = _mm256_set1_ps(KVD__GELU_A), b = _mm256_set1_ps(KVD__GELU_B);
    __m256 z = _mm256_mul_ps(x, _mm256_fmadd_ps(_mm256_mul_ps(x, x), b, a));
    return _mm256_div_ps(x, _mm256_add_ps(_mm256_set1_ps(1.0f), kvd__exp_avx2(z)));
}

static void gelu_mul_avx2(float *y, const float *gate, const float *up, int64_t n)
{
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(y + i, _mm256_mul_ps(gelu8(_mm256_loadu_ps(gate + i)), _mm256_loadu_ps(up + i)));
    if (i < n) {
        __m256i m = mask8(n - i);
        __m256 v = gelu8(_mm256_maskload_ps(gate + i, m));
        _mm256_maskstore_ps(y + i, m, _mm256_mul_ps(v, _mm256_maskload_ps(up + i, m)));
    }
}

static void add_avx2(float *y, const float *x, int64_t n)
{
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(y + i, _mm256_add_ps(_mm256_loadu_ps(y + i), _mm256_loadu_ps(x + i)));
    for (; i < n; i++)
        y[i] += x[i];
}

static void scale_avx2(float *y, float c, int64_t n)
{
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(y + i, _mm256_mul_ps(_mm256_loadu_ps(y + i), _mm256_set1_ps(c)));
    for (; i < n; i++)
        y[i] *= c;
}

static void exp_avx2(float *y, const float *x, int64_t n)
{
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(y + i, kvd__exp_avx2(_mm256_loadu_ps(x + i)));
    if (i < n) {
        __m256i m = mask8(n - i);
        _mm256_maskstore_ps(y + i, m, kvd__exp_avx2(_mm256_maskload_ps(x + i, m)));
    }
}

/* ---- stored values -----------------------------------------------------------
 *
 * Written once for all types and made three times: the type is a constant in
 * each. */
#define BY_TYPE(t, call, ...)                                                  \
    ((t) == KVD_KV_F16    ? call(KVD_KV_F16, __VA_ARGS__)                      \
     : (t) == KVD_KV_BF16 ? call(KVD_KV_BF16, __VA_ARGS__)                     \
                          : call(KVD_KV_F32, __VA_ARGS__))

/* Eight values as f16 or bf16; *bad collects what is not finite. */
INLINE __m128i narrow8(kvd_kvtype t, __m256 f, __m128i *bad)
{
    __m128i h, top;
    if (t == KVD_KV_F16) {
        h = _mm256_cvtps_ph(f, _MM_FROUND_TO_NEAREST_INT);
        top = _mm_set1_epi16(0x7c00);
    } else {
        __m256i u = _mm256_castps_si256(f), odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
        __m256i r = _mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd);
        __m256i quiet = _mm256_or_si256(u, _mm256_set1_epi32(0x400000));
        r = _mm256_blendv_epi8(r, quiet, _mm256_castps_si256(_mm256_cmp_ps(f, f, _CMP_UNORD_Q)));
        r = _mm256_srli_epi32(r, 16);
        h = _mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1));
        top = _mm_set1_epi16(0x7f80);
    }
    *bad = _mm_or_si128(*bad, _mm_cmpeq_epi16(_mm_and_si128(h, top), top));
    return h;
}

INLINE __m256 widen8(kvd_kvtype t, __m128i h)
{
    if (t == KVD_KV_F16)
        return _mm256_cvtph_ps(h);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}

/* The non-finite lanes of eight f32, as eight 16-bit masks. */
INLINE __m128i bad8(__m256 f)
{
    __m256i top = _mm256_set1_epi32(0x7f800000);
    __m256i m = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_castps_si256(f), top), top);
    return _mm_packs_epi32(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
}

INLINE void put8(kvd_kvtype t, void *block, int64_t at, __m256 f, __m128i *bad)
{
    if (t == KVD_KV_F32) {
        _mm256_storeu_ps((float *)block + at, f);
        *bad = _mm_or_si128(*bad, bad8(f));
    } else {
        _mm_storeu_si128((__m128i *)(void *)((uint16_t *)block + at), narrow8(t, f, bad));
    }
}

static inline int verdict(__m128i bad) { return _mm_testz_si128(bad, bad) ? 0 : -1; }

INLINE int store_v_any(kvd_kvtype t, void *block, int slot, int n_slots, const float *src, int64_t ld, int d_head)
{
    __m128i bad = _mm_setzero_si128();
    for (int j = 0; j < n_slots; j++, src += ld) {
        int64_t at = (int64_t)(slot + j) * d_head;
        for (int i = 0; i < d_head; i += 8)
            put8(t, block, at + i, _mm256_loadu_ps(src + i), &bad);
    }
    return verdict(bad);
}

static int store_v_avx2(void *block, kvd_kvtype t, int slot, int n_slots, const float *src, int64_t ld, int d_head)
{
    return BY_TYPE(t, store_v_any, block, slot, n_slots, src, ld, d_head);
}

/* r[i] lane j <-> r[j] lane i */
INLINE void transpose8(__m256 r[8])
{
    __m256 a[8], b[8];
    UNROLL(4) for (int i = 0; i < 4; i++) {
        a[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        a[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
    UNROLL(2) for (int i = 0; i < 2; i++) {
        b[4 * i] = _mm256_shuffle_ps(a[4 * i], a[4 * i + 2], 0x44);
        b[4 * i + 1] = _mm256_shuffle_ps(a[4 * i], a[4 * i + 2], 0xee);
        b[4 * i + 2] = _mm256_shuffle_ps(a[4 * i + 1], a[4 * i + 3], 0x44);
        b[4 * i + 3] = _mm256_shuffle_ps(a[4 * i + 1], a[4 * i + 3], 0xee);
    }
    UNROLL(4) for (int i = 0; i < 4; i++) {
        r[i] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x20);
        r[i + 4] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x31);
    }
}

/* Eight slots at a time by transposed 8x8 pieces, so that a store has eight
 * positions; the rest (decode has one slot) scattered element by element. */
INLINE int store_k_any(kvd_kvtype t, void *block, int slot, int n_slots, const float *src, int64_t ld, int d_head)
{
    __m128i bad = _mm_setzero_si128();
    int j = 0;
    for (; j + 8 <= n_slots; j += 8)
        for (int i = 0; i < d_head; i += 8) {
            __m256 r[8];
            UNROLL(8) for (int l = 0; l < 8; l++)
                r[l] = _mm256_loadu_ps(src + (j + l) * ld + i);
            transpose8(r);
            UNROLL(8) for (int l = 0; l < 8; l++)
                put8(t, block, (int64_t)(i + l) * KVD__BLOCK + slot + j, r[l], &bad);
        }
    for (; j < n_slots; j++)
        for (int i = 0; i < d_head; i += 8) {
            int64_t at = (int64_t)i * KVD__BLOCK + slot + j;
            uint32_t eight[8]; /* of any type */
            put8(t, eight, 0, _mm256_loadu_ps(src + j * ld + i), &bad);
            for (int l = 0; l < 8; l++)
                if (t == KVD_KV_F32)
                    memcpy((float *)block + at + l * KVD__BLOCK, eight + l, 4);
                else
                    memcpy((uint16_t *)block + at + l * KVD__BLOCK, (char *)eight + 2 * l, 2);
        }
    return verdict(bad);
}

static int store_k_avx2(void *block, kvd_kvtype t, int slot, int n_slots, const float *src, int64_t ld, int d_head)
{
    return BY_TYPE(t, store_k_any, block, slot, n_slots, src, ld, d_head);
}

INLINE int round_to_any(kvd_kvtype t, float *x, int64_t n)
{
    __m128i bad = _mm_setzero_si128();
    for (int64_t i = 0; i < n; i += 8) {
        bool whole = n - i >= 8;
        __m256i m = mask8(whole ? 8 : n - i);
        __m256 f = whole ? _mm256_loadu_ps(x + i) : _mm256_maskload_ps(x + i, m);
        if (t == KVD_KV_F32) {
            bad = _mm_or_si128(bad, bad8(f));
            continue;
        }
        f = widen8(t, narrow8(t, f, &bad));
        if (whole)
            _mm256_storeu_ps(x + i, f);
        else
            _mm256_maskstore_ps(x + i, m, f);
    }
    return verdict(bad);
}

static int round_to_avx2(float *x, kvd_kvtype t, int64_t n) { return BY_TYPE(t, round_to_any, x, n); }

void kvd__kern_fill_avx2(kvd_kern *k)
{
    k->rmsnorm = rmsnorm_avx2;
    k->rope = rope_avx2;
    k->silu_mul = silu_mul_avx2;
    k->gelu_mul = gelu_mul_avx2;
    k->add = add_avx2;
    k->scale = scale_avx2;
    k->exp = exp_avx2;
    k->store_k = store_k_avx2;
    k->store_v = store_v_avx2;
    k->round_to = round_to_avx2;
}
