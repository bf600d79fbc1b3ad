/* kern: the compute kernels' contract, and the table that dispatches them.
 *
 * The scalar reference (scalar*.c) is the specification; every other ISA equals
 * it by memcmp (tests/kern/checkasm). The numeric order is in docs/numerics.md;
 * the short of it: lanes hold different outputs, never parts of one sum, so
 * tiles, threads and vector widths do not show in the bits.
 *
 * Layer: above base and quant. No allocation, no state, any thread; callers own
 * all buffers. f32 buffers are 64-byte aligned unless a comment says otherwise
 * (what is not a matrix product takes any f32 pointer), and rows ("ld_": distance
 * between rows, in elements) start at multiples of 16 elements. T tokens, K inner
 * size, N outputs, p position, j slot in a tile. */
#ifndef KVD_KERN_KERN_H
#define KVD_KERN_KERN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/dtype.h"
#include "quant/quant.h"

/* ---- activations of a matrix product ------------------------------------- */

/* T rows of activations over K. Which members are read depends on the weight
 * type's kvd_act_kind; the others may be NULL. Per token t (docs/numerics.md,
 * Activations): q in [-127,127], d the f32 scale, bsum the i32 sums of q.
 *   Q8_32 : d [K/32], bsum [K/32], s [K/32] = d * (f32)bsum
 *   Q8_256: d [K/256], bsum [K/16], s unused
 * A 256-element kind is only made when K % 256 == 0. */
typedef struct kvd_acts {
    const float *x;      /* [T][ld_x] */
    const int8_t *q;     /* [T][ld_q], rows 64-byte aligned */
    const float *d;      /* [T][ld_d] */
    const float *s;      /* [T][ld_d] */
    const int32_t *bsum; /* [T][ld_b] */
    int64_t ld_x, ld_q, ld_d, ld_b;
} kvd_acts;

/* y[t][16*i + r] = product of row r of panel i with token t, for n_panels panels
 * and T tokens (any T >= 0). y: [T][ld_y]; all 16 rows of each panel are
 * written. panels: as packed by kvd__panel_pack, 64-byte aligned. */
typedef void kvd_gemm_fn(float *y, int64_t ld_y, const void *panels, int64_t n_panels, int64_t K,
                         const kvd_acts *a, int64_t T);

/* ---- attention ------------------------------------------------------------ */

typedef enum kvd_kvtype { KVD_KV_F16, KVD_KV_BF16, KVD_KV_F32, KVD_KV_COUNT } kvd_kvtype;

static inline int kvd__kvtype_bytes(kvd_kvtype t) { return t == KVD_KV_F32 ? 4 : 2; }

enum {
    KVD__BLOCK = 16,      /* positions in a block */
    KVD__TILE_BLOCKS = 4, /* blocks in a tile */
    KVD__TILE = 64        /* positions in a tile */
};

/* One tile (64 positions at an absolute multiple of 64) of one KV head, and the
 * queries that read it: n_rows positions times n_heads query heads that share
 * the KV head. Query i = row*n_heads + head; its d_head f32 values are at
 * q + row*ld_q + head*d_head.
 * k[b]: [d_head][16] of block b of the tile, v[b]: [16][d_head], in kvtype; a
 * block that no query sees may be NULL. Slots outside what a query sees may hold
 * anything, NaN included. Row r sees slots lo[r] <= j < hi[r], within 0..64; a row
 * with lo[r] >= hi[r] sees nothing and keeps its state.
 * d_head is a multiple of 8, at most KVD__MAX_D_HEAD. */
enum { KVD__MAX_D_HEAD = 512 };
typedef struct kvd_attn_tile {
    const void *k[KVD__TILE_BLOCKS], *v[KVD__TILE_BLOCKS];
    kvd_kvtype kvtype;
    int d_head;
    float scale;
    int n_rows, n_heads;
    const float *q;
    int64_t ld_q;
    const int32_t *lo, *hi; /* [n_rows] */
} kvd_attn_tile;

/* Bytes of scratch for attn_tile: enough for a tile of K and V as f32 and the
 * scores of some queries. 64-byte aligned, contents are don't-care. */
static inline size_t kvd__attn_scratch_bytes(int d_head)
{
    return ((size_t)2 * KVD__TILE * (size_t)d_head + 64 * KVD__TILE + 1024) * sizeof(float);
}

/* ---- the table ------------------------------------------------------------ */

typedef struct kvd_kern {
    const char *name; /* "scalar", "avx2", "avx512", "neon" */

    /* The canonical product, by weight type. NULL: type not implemented. */
    kvd_gemm_fn *gemm[KVD_DTYPE_COUNT];

    /* A panel as f32 [K][16], the same bits as dequantised rows: with gemm[F32]
     * this is --activations f32. */
    void (*dequant_panel[KVD_DTYPE_COUNT])(float *dst, const void *panel, int64_t K);

    /* Quantise one row of K activations. Return 0, or -1 if amax is not finite
     * (outputs then unspecified). K % 32 (256) == 0. */
    int (*quant_q8_32)(const float *x, int64_t K, int8_t *q, float *d, float *s, int32_t *bsum);
    int (*quant_q8_256)(const float *x, int64_t K, int8_t *q, float *d, int32_t *bsum);

    /* y[i] = (x[i]*r)*w[i], r = 1/sqrt(mean(x^2)+eps), 16-lane sum. y may be x.
     * Return 0, or -1 if the sum of squares is not finite. n: any. */
    int (*rmsnorm)(float *y, const float *x, const float *w, float eps, int64_t n);

    /* Rotate n_heads heads of d_head values in place; the first n_rot of each
     * head turn. cs: [n_rot/2][2] = cos, sin of this position. Pairs: (2i, 2i+1)
     * if interleaved, else (i, i + n_rot/2). */
    void (*rope)(float *x, int n_heads, int d_head, int n_rot, const float *cs, bool interleaved);

    void (*silu_mul)(float *y, const float *gate, const float *up, int64_t n); /* y may be gate or up */
    void (*gelu_mul)(float *y, const float *gate, const float *up, int64_t n); /* tanh form */
    void (*add)(float *y, const float *x, int64_t n);                          /* y += x */
    void (*scale)(float *y, float c, int64_t n);                               /* y *= c */
    void (*exp)(float *y, const float *x, int64_t n); /* the one exp; for tests and the sampler */

    /* Store n_slots consecutive positions, from slot on, of one KV head into a
     * block. src: [n_slots][ld] f32. Rounds to nearest even. Return 0, or -1 if
     * a stored value is not finite (all are written). slot + n_slots <= 16. */
    int (*store_k)(void *block, kvd_kvtype t, int slot, int n_slots, const float *src, int64_t ld, int d_head);
    int (*store_v)(void *block, kvd_kvtype t, int slot, int n_slots, const float *src, int64_t ld, int d_head);

    /* Round n values to f16 or bf16 and back, in place (--stream). Return 0, or
     * -1 if a result is not finite. t == KVD_KV_F32 only checks. */
    int (*round_to)(float *x, kvd_kvtype t, int64_t n);

    /* Fold a tile into the running softmax of each query. M[i] = -inf marks an
     * empty state: the tile's partial is then copied, else merged
     * (docs/numerics.md, Attention). M, L: [n_q]; O: [n_q][d_head], n_q =
     * n_rows*n_heads; only 4-byte aligned. */
    void (*attn_tile)(const kvd_attn_tile *t, float *M, float *L, float *O, void *scratch);

    /* Merge a partial (m, l, o) of a later tile into (M, L, O), both of one
     * query; an empty partial is skipped, an empty state is overwritten. */
    void (*attn_merge)(float *M, float *L, float *O, float m, float l, const float *o, int d_head);

    /* out[i] = O[i] / L, one division each. */
    void (*attn_finish)(float *out, const float *O, float L, int d_head);
} kvd_kern;

/* Instruction sets, ascending; a table is the best of what its mask allows. */
typedef enum kvd_cpu {
    KVD_CPU_SCALAR, /* plain C; hardware FMA where the machine has it */
    KVD_CPU_AVX2,   /* AVX2, FMA, F16C */
    KVD_CPU_AVX512, /* + AVX-512 F, BW, VL, DQ, VNNI */
    KVD_CPU_NEON,   /* AArch64 with the dot product extension */
    KVD_CPU_COUNT
} kvd_cpu;

const char *kvd__cpu_name(kvd_cpu cpu);

/* Can this machine (and this build) run it? */
bool kvd__cpu_has(kvd_cpu cpu);

/* The best one here. */
kvd_cpu kvd__cpu_best(void);

/* Fill *k for cpu, which kvd__cpu_has must allow: scalar first, then ascending. */
void kvd__kern_init(kvd_kern *k, kvd_cpu cpu);

/* The portable software-FMA build of the scalar reference, for checkasm. */
void kvd__kern_init_soft(kvd_kern *k);

/* Filled by the per-ISA files, each overriding what it has. */
void kvd__kern_fill_scalar(kvd_kern *k);     /* software FMA */
void kvd__kern_fill_scalar_fma(kvd_kern *k); /* the same source, hardware FMA */
void kvd__kern_fill_gemm_scalar(kvd_kern *k);
void kvd__kern_fill_gemm_scalar_fma(kvd_kern *k);
void kvd__kern_fill_avx2(kvd_kern *k);
void kvd__kern_fill_attn_avx2(kvd_kern *k);
void kvd__kern_fill_gemm_avx2(kvd_kern *k);
void kvd__kern_fill_avx512(kvd_kern *k);
void kvd__kern_fill_attn_avx512(kvd_kern *k);
void kvd__kern_fill_gemm_avx512(kvd_kern *k);
void kvd__kern_fill_neon(kvd_kern *k);
void kvd__kern_fill_gemm_neon(kvd_kern *k);

#endif
