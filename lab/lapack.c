#define _GNU_SOURCE
#include "lab/lapack.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "lab/runs.h"

/* As lapacke.h has them, for the 32-bit integers that liblapacke.so.3 is built with. */
enum { COLUMN_MAJOR = 102, WORK_MEMORY_ERROR = -1010, TRANSPOSE_MEMORY_ERROR = -1011 };
typedef int geqrf_fn(int layout, int m, int n, double *a, int lda, double *tau);
typedef int gesdd_fn(int layout, char job, int m, int n, double *a, int lda, double *s, double *u, int ldu, double *vt, int ldvt);
typedef void set_threads_fn(int n);

struct lab_lapack {
    void *library;
    geqrf_fn *geqrf;
    gesdd_fn *gesdd;
};

/* A function of the library or of one that it needs; ISO C has no conversion between
 * the two kinds of pointer. */
static int find(void *library, const char *name, void *function)
{
    void *p = dlsym(library, name);
    memcpy(function, &p, sizeof p);
    return p != NULL;
}

int lab_lapack_open(lab_lapack **out, kvd_error *err)
{
    lab_lapack *p = lab_alloc(1, sizeof *p, err);
    if (!p)
        return KVD_E_NOMEM;
    p->library = dlopen("liblapacke.so.3", RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (!p->library || !find(p->library, "LAPACKE_dgeqrf", &p->geqrf) || !find(p->library, "LAPACKE_dgesdd", &p->gesdd)) {
        const char *why = dlerror();
        lab_fail(err, KVD_E_UNSUPPORTED, "needs LAPACK: package liblapacke (%.150s)", why ? why : "not what was expected");
        lab_lapack_close(&p);
        return KVD_E_UNSUPPORTED;
    }
    set_threads_fn *set_threads;
    if (find(p->library, "openblas_set_num_threads", &set_threads))
        set_threads(1);
    *out = p;
    return 0;
}

void lab_lapack_close(lab_lapack **p)
{
    if (*p && (*p)->library)
        dlclose((*p)->library);
    free(*p);
    *p = NULL;
}

/* LAPACK's info as ours: positive is an iteration that does not end, negative a NaN
 * in the input (LAPACKE looks) or no memory. */
static int check(int info, kvd_error *err)
{
    if (info == WORK_MEMORY_ERROR || info == TRANSPOSE_MEMORY_ERROR)
        return lab_fail(err, KVD_E_NOMEM, "LAPACK: out of memory");
    if (info)
        return lab_fail(err, KVD_E_NUMERIC, "LAPACK: %s", info < 0 ? "a value is not a number" : "no convergence");
    return 0;
}

static int least(int a, int b) { return a < b ? a : b; }

int lab_lapack_r(const lab_lapack *p, int m, int n, double *a, double *r, kvd_error *err)
{
    int k = least(m, n);
    double *tau = lab_alloc(k, sizeof *tau, err);
    if (!tau)
        return KVD_E_NOMEM;
    int rc = check(p->geqrf(COLUMN_MAJOR, m, n, a, m, tau), err);
    free(tau);
    for (int64_t j = 0; !rc && j < n; j++)
        for (int64_t i = 0; i < k; i++)
            r[i + j * k] = i <= j ? a[i + j * m] : 0;
    return rc;
}

int lab_lapack_singular_values(const lab_lapack *p, int m, int n, double *a, double *s, kvd_error *err)
{
    double none; /* u and vt are not touched, but must be somewhere */
    return check(p->gesdd(COLUMN_MAJOR, 'N', m, n, a, m, s, &none, 1, &none, 1), err);
}

int lab_lapack_right_vectors(const lab_lapack *p, int m, int n, double *a, double *s, double *vt, kvd_error *err)
{
    int k = least(m, n);
    double *u = lab_alloc((int64_t)m * k, sizeof *u, err), *columns = lab_alloc((int64_t)k * n, sizeof *columns, err);
    int rc = u && columns ? check(p->gesdd(COLUMN_MAJOR, 'S', m, n, a, m, s, u, m, columns, k), err) : KVD_E_NOMEM;
    for (int64_t i = 0; !rc && i < k; i++)
        for (int64_t j = 0; j < n; j++)
            vt[i * n + j] = columns[i + j * k];
    free(u);
    free(columns);
    return rc;
}

int lab_effective_rank(const double *s, int n, double part)
{
    double all = 0, sum = 0;
    for (int i = 0; i < n; i++)
        all += s[i] * s[i];
    for (int i = 0; i < n; i++)
        if ((sum += s[i] * s[i]) >= part * all)
            return all > 0 ? i + 1 : 0;
    return n;
}
