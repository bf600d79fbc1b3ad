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

/* Are n floats the same bits? Any NaN equals any NaN: its payload is not part of
 * the contract. */
bool check_same_floats(const float *a, const float *b, int64_t n);

/* n bytes rounded up to `align` (1, 2, 4, .. 4096), aligned to that and followed
 * by an inaccessible page: one byte past the end faults. Zeroed. */
void *check_alloc(size_t n, size_t align);
void check_free(void *p, size_t n, size_t align);

/* Seconds, and the present clock of the core in Hz, for --bench only. */
double check_seconds(void);
double check_hz(void);

void check_gemm(check_context *c); /* check_gemm.c: panels, products, quantisation */
void check_vec(check_context *c);  /* check_vec.c: element-wise, stores, exp */
void check_attn(check_context *c); /* check_attn.c: attention */
void check_exp_all(check_context *c); /* check_vec.c: --exhaustive */

#endif
