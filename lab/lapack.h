/* lab: the few pieces of linear algebra that `rank` and `truncate` need, by LAPACK.
 *
 * LAPACK is opened when an experiment asks for it and not linked: the optimised
 * libraries start threads and take buffers as soon as they are loaded, in every run
 * of the program, and those would show in the memory figures that this program is
 * about. Once opened it stays (a thread pool does not like to be unloaded), with one
 * thread: the matrices are small.
 *
 * Matrices are column by column, as LAPACK has them: a[i + j*lda] is row i of column
 * j. A row-major [n][m] array is thus the m x n matrix that is its transpose. */
#ifndef LAB_LAPACK_H
#define LAB_LAPACK_H

#include <stdint.h>

#include "kvd/kvd_error.h"

typedef struct lab_lapack lab_lapack;

/* *out: returned owned. KVD_E_UNSUPPORTED: there is no LAPACKE here; KVD_E_NOMEM. */
int lab_lapack_open(lab_lapack **out, kvd_error *err);
/* Sets *p to NULL; NULL inside is fine. */
void lab_lapack_close(lab_lapack **p);

/* R of a = Q R. a: [n] columns of m, overwritten; r: [n] columns of k = min(m, n),
 * zeros below its diagonal. */
int lab_lapack_r(const lab_lapack *p, int m, int n, double *a, double *r, kvd_error *err);

/* Singular values of a, [n] columns of m, overwritten; s: [min(m, n)], descending. */
int lab_lapack_singular_values(const lab_lapack *p, int m, int n, double *a, double *s, kvd_error *err);

/* The same with the right singular vectors: vt: [min(m, n)][n], a vector a row. */
int lab_lapack_right_vectors(const lab_lapack *p, int m, int n, double *a, double *s, double *vt, kvd_error *err);

/* The smallest r such that the first r of n squares hold `part` of the sum of all: the
 * paper's effective rank (its appendix; part 0.9). 0 if all are zero. */
int lab_effective_rank(const double *s, int n, double part);

#endif
