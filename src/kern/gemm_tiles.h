/* kern, internal: how the matrix products of all instruction sets walk their operands.
 *
 * A *tile* is a few tokens (5 or 12 at most) that share each unpacked weight. Tile
 * functions are instantiated for every token count, so that sums live in
 * registers; EACH_TOKEN writes a statement out for each token with a literal
 * index, which gcc and clang both turn into registers.
 *
 * The walk, from outside: groups of panels that fit the second-level cache;
 * tiles of tokens; chunks of K whose activations fit the first-level cache;
 * panels. A chunk continues the chains where the last one left them in y, as
 * f32, so chunks do not show in the bits.
 *
 * The few numbers that a block's step needs of each token (scale, sums) are
 * copied together first, as the chunk's *side* array [block][word][token]: one
 * stream instead of several for each token, and biases are folded in once for
 * all panels. Rejected: to copy the 8-bit activations too; it costs as much as
 * one panel's product, and callers may come with few panels. */
#ifndef KVD_KERN_GEMM_TILES_H
#define KVD_KERN_GEMM_TILES_H

#include "kern/kern.h"
#include "quant/panel.h"

#define KVD__INLINE static inline __attribute__((always_inline))

/* M(0) .. M(T-1), each M a statement; T a constant of at most 5 or 12. The ISA's
 * header picks one as EACH_TOKEN. */
#define KVD__EACH_5(T, M)                                                      \
    do {                                                                       \
        M(0);                                                                  \
        if ((T) > 1)                                                           \
            M(1);                                                              \
        if ((T) > 2)                                                           \
            M(2);                                                              \
        if ((T) > 3)                                                           \
            M(3);                                                              \
        if ((T) > 4)                                                           \
            M(4);                                                              \
    } while (0)
#define KVD__EACH_12(T, M)                                                     \
    do {                                                                       \
        KVD__EACH_5(T, M);                                                     \
        if ((T) > 5)                                                           \
            M(5);                                                              \
        if ((T) > 6)                                                           \
            M(6);                                                              \
        if ((T) > 7)                                                           \
            M(7);                                                              \
        if ((T) > 8)                                                           \
            M(8);                                                              \
        if ((T) > 9)                                                           \
            M(9);                                                              \
        if ((T) > 10)                                                          \
            M(10);                                                             \
        if ((T) > 11)                                                          \
            M(11);                                                             \
    } while (0)

/* M(a, b, 1) .. M(a, b, 5) or 12: a definition for each token count; and the
 * table of tile functions that they defined. */
#define KVD__1_TO_5(M, a, b) M(a, b, 1) M(a, b, 2) M(a, b, 3) M(a, b, 4) M(a, b, 5)
#define KVD__1_TO_12(M, a, b)                                                  \
    KVD__1_TO_5(M, a, b)                                                       \
    M(a, b, 6) M(a, b, 7) M(a, b, 8) M(a, b, 9) M(a, b, 10) M(a, b, 11) M(a, b, 12)
#define KVD__TILES_5(s) {0, tile_##s##_1, tile_##s##_2, tile_##s##_3, tile_##s##_4, tile_##s##_5}
#define KVD__TILES_12(s)                                                                                  \
    {0, tile_##s##_1, tile_##s##_2, tile_##s##_3, tile_##s##_4, tile_##s##_5, tile_##s##_6, tile_##s##_7, \
     tile_##s##_8, tile_##s##_9, tile_##s##_10, tile_##s##_11, tile_##s##_12}

enum {
    KVD__SIDE_WORDS = 2304,           /* of a chunk: 9 KiB of stack */
    KVD__CHUNK_BYTES = 24 * 1024,     /* activations of a chunk: in the first-level cache */
    KVD__GROUP_BYTES = 384 * 1024,    /* panels of a group */
    KVD__PREFETCH_BYTES = 1024        /* ahead of a single token's weights */
};

/* A quantised format's panel block (quant/panel.h): offsets in bytes. */
typedef struct kvd__layout {
    int stride;
    int d;
    int m;  /* m or dmin; -1: none */
    int qh; /* fifth bits, high bits */
} kvd__layout;

/* Fetch the weights that follow the next `bytes` into the second-level cache. One
 * sequential stream a thread, close ahead: on a Zen 4 with two threads it reads
 * 60-70 GB/s, as fast as plain loads, where two panels in flight, or 2 KiB ahead
 * into the first level, gave 25-39. */
KVD__INLINE void kvd__prefetch(const uint8_t *p, int bytes)
{
    for (int at = 0; at < bytes; at += 64)
        __builtin_prefetch(p + KVD__PREFETCH_BYTES + at, 0, 2);
}

/* The same for part j of `parts` of a 256-element block whose high bits lie apart
 * from the low ones: two blocks ahead, each line once (Q6_K 43 GB/s, 14 without).
 * The other 256-element formats read in the order of addresses, and the hardware's
 * prefetcher is better alone (Q4_K 55 GB/s, 42 with). */
KVD__INLINE void kvd__prefetch_block(const uint8_t *p, const kvd__layout o, int j, int parts)
{
    const int lines = o.stride / 64 + 1, from = lines * j / parts, to = lines * (j + 1) / parts;
    for (int line = from; o.qh && line < to; line++)
        __builtin_prefetch(p + 2 * o.stride + 64 * line, 0, 2);
}

/* One tile's work on a chunk of K of a group of panels. */
typedef struct kvd__tile {
    float *y; /* at the tile's first token and the group's first panel */
    int64_t ld_y;
    const uint8_t *panels; /* at the chunk's first block of the first panel */
    int64_t panel_bytes, n_panels;
    int64_t n_blocks; /* of the chunk; float types: k */
    bool carry;       /* continue the chains in y; else they start from +0 */
    const int8_t *q;  /* at the chunk's first element of the first token */
    const float *x;   /* the same of a float product */
    int64_t ld;       /* of q or x */
    const int32_t *side; /* [n_blocks][words][tokens] */
} kvd__tile;

typedef void kvd__tile_fn(const kvd__tile *c);

/* Where token t's row is, from every third row's pointer: x86 addresses reach
 * base, base + ld and base + 2*ld, so 12 rows take 4 pointers and a stride. */
#define TOKEN_ROW(base, ld, t) ((base)[(t) / 3] + (t) % 3 * (ld))

KVD__INLINE kvd__layout kvd__layout_of(const kvd_dtype t)
{
    switch (t) {
    case KVD_Q4_1:
        return (kvd__layout){KVD__Q4_1_STRIDE, KVD__Q4_1_D, KVD__Q4_1_M, 0};
    case KVD_Q5_0:
        return (kvd__layout){KVD__Q5_0_STRIDE, KVD__Q5_0_D, -1, KVD__Q5_0_QH};
    case KVD_Q5_1:
        return (kvd__layout){KVD__Q5_1_STRIDE, KVD__Q5_1_D, KVD__Q5_1_M, KVD__Q5_1_QH};
    case KVD_Q8_0:
        return (kvd__layout){KVD__Q8_0_STRIDE, KVD__Q8_0_D, -1, 0};
    case KVD_Q2_K:
        return (kvd__layout){KVD__Q2_K_STRIDE, KVD__Q2_K_D, KVD__Q2_K_DMIN, 0};
    case KVD_Q3_K:
        return (kvd__layout){KVD__Q3_K_STRIDE, KVD__Q3_K_D, -1, KVD__Q3_K_HMASK};
    case KVD_Q4_K:
        return (kvd__layout){KVD__Q4_K_STRIDE, KVD__Q4_K_D, KVD__Q4_K_DMIN, 0};
    case KVD_Q5_K:
        return (kvd__layout){KVD__Q5_K_STRIDE, KVD__Q5_K_D, KVD__Q5_K_DMIN, KVD__Q5_K_QH};
    case KVD_Q6_K:
        return (kvd__layout){KVD__Q6_K_STRIDE, KVD__Q6_K_D, -1, KVD__Q6_K_QH};
    case KVD_IQ4_XS:
        return (kvd__layout){KVD__IQ4_XS_STRIDE, KVD__IQ4_XS_D, -1, 0};
    default: /* Q4_0, IQ4_NL */
        return (kvd__layout){KVD__Q4_0_STRIDE, KVD__Q4_0_D, -1, 0};
    }
}

KVD__INLINE bool kvd__has_min(const kvd_dtype t) { return kvd__layout_of(t).m >= 0; }

/* Sub-blocks of a 256-element block: 8 of 32 or 16 of 16 elements. */
KVD__INLINE int kvd__n_subs(const kvd_dtype t) { return t == KVD_Q4_K || t == KVD_Q5_K || t == KVD_IQ4_XS ? 8 : 16; }

/* What the side array holds of a block, after its activation scale (word 0). */
typedef enum kvd__side_kind {
    KVD__SIDE_S,         /* 32: s */
    KVD__SIDE_BIAS,      /* 32: -bias*bsum */
    KVD__SIDE_BIAS_16,   /* 256: -bias*bsum of each 16 elements: 16 words */
    KVD__SIDE_BIAS_32,   /* 256: -bias*bsum of each 32 elements: 8 words */
    KVD__SIDE_PAIRS_16,  /* 256: bsum of each 16 as i16, two a word: 8 words */
    KVD__SIDE_PAIRS_32   /* 256: bsum of each 32 as i16, two a word: 4 words */
} kvd__side_kind;

/* A quantised weight type as its walk sees it. */
typedef struct kvd__walk {
    kvd__tile_fn *const *tiles; /* [max_tokens + 1], by token count */
    int max_tokens;
    int block_bytes;  /* of a panel block */
    int block_elems;
    kvd__side_kind side;
    int bias;
} kvd__walk;

/* gemm_walk.c; compiled once for all: no arithmetic on floats. */
void kvd__gemm_walk(const kvd__walk *w, float *y, int64_t ld_y, const void *panels, int64_t n_panels, int64_t K,
                    const kvd_acts *a, int64_t T);
void kvd__gemm_walk_float(kvd__tile_fn *const *tiles, int max_tokens, int elem_bytes, float *y, int64_t ld_y,
                          const void *panels, int64_t n_panels, int64_t K, const kvd_acts *a, int64_t T);

/* Defines quant_q8_32 and quant_q8_256 of the table from the file's
 *   int quant_block(const float *x, int n, int8_t *q, float *d, int32_t *bsum, int n_sum)
 * which quantises n elements with one scale and a sum for every n_sum, and returns
 * -1 if amax is not finite. */
#define KVD__DEFINE_QUANTISERS                                                                       \
    static int quant_q8_32(const float *x, int64_t K, int8_t *q, float *d, float *s, int32_t *bsum)  \
    {                                                                                                \
        for (int64_t b = 0; b < K / 32; b++) {                                                       \
            if (quant_block(x + 32 * b, 32, q + 32 * b, d + b, bsum + b, 32))                        \
                return -1;                                                                           \
            s[b] = d[b] * (float)bsum[b];                                                            \
        }                                                                                            \
        return 0;                                                                                    \
    }                                                                                                \
    static int quant_q8_256(const float *x, int64_t K, int8_t *q, float *d, int32_t *bsum)           \
    {                                                                                                \
        for (int64_t b = 0; b < K / 256; b++)                                                        \
            if (quant_block(x + 256 * b, 256, q + 256 * b, d + b, bsum + 16 * b, 16))                \
                return -1;                                                                           \
        return 0;                                                                                    \
    }

#endif
