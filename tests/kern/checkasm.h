/* checkasm: kernels of every ISA against the scalar reference, by memcmp, in
 * guarded and padded buffers; the same binary benchmarks (--bench). */
#ifndef KVD_CHECKASM_H
#define KVD_CHECKASM_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "kern/kern.h"

typedef struct check_context {
    const kvd_kern *ref, *isa; /* compare isa with ref */
    bool bench;                /* also print speed of isa */
    uint64_t seed;
    const char *only;          /* substring of the check's name, or NULL */
    int n_passed, n_failed;
} check_context;

/* Count and, on failure, print one check: "avx2 gemm_q4_1 K=576 T=6". */
void check_report(check_context *c, bool ok, const char *format, ...) __attribute__((format(printf, 3, 4)));
/* Is a check of this name asked for? */
bool check_wanted(const check_context *c, const char *name);

uint64_t check_random(check_context *c);                    /* 64 bits */
float check_random_float(check_context *c, float magnitude); /* uniform in +-magnitude */

/* n bytes, 64-byte aligned, followed by an inaccessible page, so that reading or
 * writing one byte past the end (rounded up to `align`) faults. */
void *check_alloc(size_t n, size_t align);
void check_free(void *p, size_t n, size_t align);

/* Seconds, for --bench only. */
double check_seconds(void);

void check_gemm(check_context *c); /* check_gemm.c: panels, products, quantisation */
void check_vec(check_context *c);  /* check_vec.c: element-wise, stores, exp */
void check_attn(check_context *c); /* check_attn.c: attention */

#endif
