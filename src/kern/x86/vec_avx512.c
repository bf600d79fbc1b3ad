/* kern/x86: element-wise kernels and stores for AVX-512. As vec_avx2.c, but every
 * tail is the loop's own body under a mask: masked-off elements are neither read
 * nor written. RMSNorm's 16 lanes are one register. RoPE and the transposing store
 * of K stay with AVX2: they are bound by shuffles, loads and stores, and wider
 * registers gained nothing. */
#include <immintrin.h>

#include "base/half.h"
#include "kern/kern.h"
#include "kern/x86/exp_avx512.h"
#include "kern/x86/unroll.h"

/* The lanes of elements i .. i+15 that are below n. */
static inline __mmask16 lanes_at(int64_t i, int64_t n) { return n - i >= 16 ? 0xffff : (__mmask16)((1u << (n - i)) - 1); }

/* ---- element-wise ---------------------------------------------------------- */

static int rmsnorm_avx512(float *y, const float *x, const float *w, float eps, int64_t n)
{
    __m512 s = _mm512_setzero_ps();
    for (int64_t i = 0; i < n; i += 16) {
        /* a lane without an element adds +0 to a sum that is never -0 */
        __m512 v = _mm512_maskz_loadu_ps(lanes_at(i, n), x + i);
        s = _mm512_fmadd_ps(v, v, s);
    }
    float sum = kvd__fold16_avx512(s);
    if ((kvd__f32_bits(sum) & 0x7f800000u) == 0x7f800000u)
        return -1;
    __m512 r = _mm512_set1_ps(1.0f / __builtin_sqrtf(sum / (float)n + eps));
    for (int64_t i = 0; i < n; i += 16) {
        __mmask16 m = lanes_at(i, n);
        __m512 v = _mm512_mul_ps(_mm512_maskz_loadu_ps(m, x + i), r);
        _mm512_mask_storeu_ps(y + i, m, _mm512_mul_ps(v, _mm512_maskz_loadu_ps(m, w + i)));
    }
    return 0;
}

static void silu_mul_avx512(float *y, const float *gate, const float *up, int64_t n)
{
    const __m512 one = _mm512_set1_ps(1.0f);
    for (int64_t i = 0; i < n; i += 16) {
        __mmask16 m = lanes_at(i, n);
        __m512 x = _mm512_maskz_loadu_ps(m, gate + i);
        __m512 e = kvd__exp_avx512(_mm512_xor_ps(x, _mm512_set1_ps(-0.0f)));
        x = _mm512_div_ps(x, _mm512_add_ps(one, e));
        _mm512_mask_storeu_ps(y + i, m, _mm512_mul_ps(x, _mm512_maskz_loadu_ps(m, up + i)));
    }
}

static void gelu_mul_avx512(float *y, const float *gate, const float *up, int64_t n)
{
    const __m512 one = _mm512_set1_ps(1.0f), a = _mm512_set1_ps(KVD__GELU_A), b = _mm512_set1_ps(KVD__GELU_B);
    for (int64_t i = 0; i < n; i += 16) {
        __mmask16 m = lanes_at(i, n);
        __m512 x = _mm512_maskz_loadu_ps(m, gate + i);
        __m512 z = _mm512_mul_ps(x, _mm512_fmadd_ps(_mm512_mul_ps(x, x), b, a));
        x = _mm512_div_ps(x, _mm512_add_ps(one, kvd__exp_avx512(z)));
        _mm512_mask_storeu_ps(y + i, m, _mm512_mul_ps(x, _mm512_maskz_loadu_ps(m, up + i)));
    }
}

static void add_avx512(float *y, const float *x, int64_t n)
{
    for (int64_t i = 0; i < n; i += 16) {
        __mmask16 m = lanes_at(i, n);
        __m512 v = _mm512_add_ps(_mm512_maskz_loadu_ps(m, y + i), _mm512_maskz_loadu_ps(m, x + i));
        _mm512_mask_storeu_ps(y + i, m, v);
    }
}

static void scale_avx512(float *y, float c, int64_t n)
{
    for (int64_t i = 0; i < n; i += 16) {
        __mmask16 m = lanes_at(i, n);
        _mm512_mask_storeu_ps(y + i, m, _mm512_mul_ps(_mm512_maskz_loadu_ps(m, y + i), _mm512_set1_ps(c)));
    }
}

static void exp_avx512(float *y, const float *x, int64_t n)
{
    for (int64_t i = 0; i < n; i += 16) {
        __mmask16 m = lanes_at(i, n);
        _mm512_mask_storeu_ps(y + i, m, kvd__exp_avx512(_mm512_maskz_loadu_ps(m, x + i)));
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

/* Sixteen values as f16 or bf16. */
INLINE __m256i narrow16(kvd_kvtype t, __m512 f)
{
    if (t == KVD_KV_F16)
        return _mm512_cvtps_ph(f, _MM_FROUND_TO_NEAREST_INT);
    __m512i u = _mm512_castps_si512(f), odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    __m512i r = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd);
    r = _mm512_mask_or_epi32(r, _mm512_cmp_ps_mask(f, f, _CMP_UNORD_Q), u, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(r, 16));
}

INLINE __m512 widen16(kvd_kvtype t, __m256i h)
{
    if (t == KVD_KV_F16)
        return _mm512_cvtph_ps(h);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}

/* The lanes that are infinite or NaN once stored. */
INLINE __mmask16 bad16(kvd_kvtype t, __m512 f, __m256i h)
{
    if (t == KVD_KV_F32) {
        __m512i top = _mm512_set1_epi32(0x7f800000);
        return _mm512_cmpeq_epi32_mask(_mm512_and_si512(_mm512_castps_si512(f), top), top);
    }
    __m256i top = _mm256_set1_epi16(t == KVD_KV_F16 ? 0x7c00 : 0x7f80);
    return _mm256_cmpeq_epi16_mask(_mm256_and_si256(h, top), top);
}

/* Store the lanes m of f at element `at`; returns the bad ones. */
INLINE __mmask16 put16(kvd_kvtype t, void *block, int64_t at, __mmask16 m, __m512 f)
{
    __m256i h = _mm256_setzero_si256();
    if (t == KVD_KV_F32) {
        _mm512_mask_storeu_ps((float *)block + at, m, f);
    } else {
        h = narrow16(t, f);
        _mm256_mask_storeu_epi16((uint16_t *)block + at, m, h);
    }
    return bad16(t, f, h) & m;
}

INLINE int store_v_any(kvd_kvtype t, void *block, int slot, int n_slots, const float *src, int64_t ld, int d_head)
{
    __mmask16 bad = 0;
    for (int j = 0; j < n_slots; j++, src += ld)
        for (int i = 0; i < d_head; i += 16) {
            __mmask16 m = lanes_at(i, d_head);
            bad |= put16(t, block, (int64_t)(slot + j) * d_head + i, m, _mm512_maskz_loadu_ps(m, src + i));
        }
    return bad ? -1 : 0;
}

static int store_v_avx512(void *block, kvd_kvtype t, int slot, int n_slots, const float *src, int64_t ld, int d_head)
{
    return BY_TYPE(t, store_v_any, block, slot, n_slots, src, ld, d_head);
}

INLINE int round_to_any(kvd_kvtype t, float *x, int64_t n)
{
    __mmask16 bad = 0;
    for (int64_t i = 0; i < n; i += 16) {
        __mmask16 m = lanes_at(i, n);
        __m512 f = _mm512_maskz_loadu_ps(m, x + i);
        __m256i h = _mm256_setzero_si256();
        if (t != KVD_KV_F32) {
            h = narrow16(t, f);
            _mm512_mask_storeu_ps(x + i, m, widen16(t, h));
        }
        bad |= bad16(t, f, h) & m;
    }
    return bad ? -1 : 0;
}

static int round_to_avx512(float *x, kvd_kvtype t, int64_t n) { return BY_TYPE(t, round_to_any, x, n); }

void kvd__kern_fill_avx512(kvd_kern *k)
{
    k->rmsnorm = rmsnorm_avx512;
    k->silu_mul = silu_mul_avx512;
    k->gelu_mul = gelu_mul_avx512;
    k->add = add_avx512;
    k->scale = scale_avx512;
    k->exp = exp_avx512;
    k->store_v = store_v_avx512;
    k->round_to = round_to_avx512;
}
