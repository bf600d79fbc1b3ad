/* base: a small pool of pthreads that run one function together (SPMD).
 *
 * Why our own: libgomp blinds ThreadSanitizer and forks badly, and a forward
 * pass of a small model has thousands of barriers a second, so they must cost
 * well below a microsecond. Between runs the workers sleep. */
#ifndef KVD_BASE_POOL_H
#define KVD_BASE_POOL_H

#include "base/ledger.h"

typedef struct kvd_pool kvd_pool;

/* Called on every thread; tid 0 is the caller of kvd__pool_run. */
typedef void (*kvd_job_fn)(void *ctx, int tid, int n_threads);

enum { KVD__MAX_THREADS = 256 };

/* n_threads 1..KVD__MAX_THREADS, the caller included: n_threads - 1 are started. */
int kvd__pool_create(kvd_pool **out, int n_threads, kvd_ledger *l, kvd_error *err);
/* Joins the workers. Sets *pool to NULL; NULL inside is accepted. In a forked child
 * there are none: only the memory is freed. */
void kvd__pool_destroy(kvd_pool **pool);

int kvd__pool_threads(const kvd_pool *p);

/* Run fn on all threads and wait for all. One run at a time per pool. Every
 * thread runs under the numeric environment of docs/numerics.md. */
void kvd__pool_run(kvd_pool *p, kvd_job_fn fn, void *ctx);

/* May this process run the pool? KVD_E_ARG in a forked child, whose workers stayed
 * with the parent; a pool of one thread has none and works there too. */
int kvd__pool_check(const kvd_pool *p, kvd_error *err);

/* Inside a run: wait for all threads. What was written before is visible after. */
void kvd__pool_barrier(kvd_pool *p);

/* Split n items into n_threads runs of whole items, static and even: thread tid
 * owns [*begin, *end). */
void kvd__pool_share(int64_t n, int tid, int n_threads, int64_t *begin, int64_t *end);

/* Number of CPUs this process may run on (affinity mask), at least 1. */
int kvd__cpu_count(void);

#endif
