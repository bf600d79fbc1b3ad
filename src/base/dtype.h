/* base: the tensor types of GGUF, by their number in the file. gguf/ needs sizes
 * of all of them to check offsets; quant/ and kern/ implement the ones marked 1.
 *
 * Source of numbers and sizes: the GGUF specification (ggml, MIT). */
#ifndef KVD_BASE_DTYPE_H
#define KVD_BASE_DTYPE_H

#include <stdint.h>

/* X(id, number in the file, elements per block, bytes per block, implemented) */
#define KVD_DTYPES(X)                                                          \
    X(F32, 0, 1, 4, 1)                                                         \
    X(F16, 1, 1, 2, 1)                                                         \
    X(Q4_0, 2, 32, 18, 1)                                                      \
    X(Q4_1, 3, 32, 20, 1)                                                      \
    X(Q5_0, 6, 32, 22, 1)                                                      \
    X(Q5_1, 7, 32, 24, 1)                                                      \
    X(Q8_0, 8, 32, 34, 1)                                                      \
    X(Q8_1, 9, 32, 36, 0)                                                      \
    X(Q2_K, 10, 256, 84, 1)                                                    \
    X(Q3_K, 11, 256, 110, 1)                                                   \
    X(Q4_K, 12, 256, 144, 1)                                                   \
    X(Q5_K, 13, 256, 176, 1)                                                   \
    X(Q6_K, 14, 256, 210, 1)                                                   \
    X(Q8_K, 15, 256, 292, 0)                                                   \
    X(IQ2_XXS, 16, 256, 66, 0)                                                 \
    X(IQ2_XS, 17, 256, 74, 0)                                                  \
    X(IQ3_XXS, 18, 256, 98, 0)                                                 \
    X(IQ1_S, 19, 256, 50, 0)                                                   \
    X(IQ4_NL, 20, 32, 18, 1)                                                   \
    X(IQ3_S, 21, 256, 110, 0)                                                  \
    X(IQ2_S, 22, 256, 82, 0)                                                   \
    X(IQ4_XS, 23, 256, 136, 1)                                                 \
    X(I8, 24, 1, 1, 0)                                                         \
    X(I16, 25, 1, 2, 0)                                                        \
    X(I32, 26, 1, 4, 0)                                                        \
    X(I64, 27, 1, 8, 0)                                                        \
    X(F64, 28, 1, 8, 0)                                                        \
    X(IQ1_M, 29, 256, 56, 0)                                                   \
    X(BF16, 30, 1, 2, 1)                                                       \
    X(TQ1_0, 34, 256, 54, 0)                                                   \
    X(TQ2_0, 35, 256, 66, 0)                                                   \
    X(MXFP4, 39, 32, 17, 0)

typedef enum kvd_dtype {
#define KVD_X(id, number, elems, bytes, ok) KVD_##id,
    KVD_DTYPES(KVD_X)
#undef KVD_X
    KVD_DTYPE_COUNT
} kvd_dtype;

typedef struct kvd_dtype_info {
    const char *name;
    uint32_t number;
    int block_elems, block_bytes, implemented;
} kvd_dtype_info;

extern const kvd_dtype_info kvd__dtypes[KVD_DTYPE_COUNT];

/* The type with that number in a file, or -1. */
int kvd__dtype_from_number(uint32_t number);

/* Bytes of a row of k elements; k must be a multiple of the block size. */
static inline int64_t kvd__row_bytes(kvd_dtype t, int64_t k)
{
    return k / kvd__dtypes[t].block_elems * kvd__dtypes[t].block_bytes;
}

#endif
