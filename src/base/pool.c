#define _GNU_SOURCE
#include "base/pool.h"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include "base/error.h"
#include "base/fpenv.h"

struct kvd_pool {
    int n_threads, n_started;
    pid_t owner; /* after fork the child is another, and has no workers */
    int spins; /* before yielding: 0 when there are more threads than CPUs */
    pthread_t *threads;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    /* A run: generation goes up, workers run job, the closing barrier ends it. */
    _Atomic uint64_t generation;
    _Atomic bool quit;
    kvd_job_fn job;
    void *ctx;
    _Alignas(64) _Atomic int arrived;
    _Alignas(64) _Atomic unsigned phase;
    _Atomic int sleepers; /* at the barrier */
    pthread_mutex_t barrier_lock;
    pthread_cond_t barrier_wake;
};

enum { SPINS = 4000, YIELDS = 4 };

typedef struct {
    kvd_pool *pool;
    int tid;
} worker_arg;

static inline void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Wait until the phase is not `phase` any more. On a calm machine the others are
 * there within the spins. On a busy one a thread that is waited for may have lost
 * its CPU: yielding gives it no precedence, and each barrier would cost a turn of
 * all processes; a sleeper is woken at once, so whoever waits long goes to sleep. */
static void wait_phase(kvd_pool *p, unsigned phase)
{
    for (int i = 0; i < p->spins + YIELDS; i++) {
        if (atomic_load_explicit(&p->phase, memory_order_acquire) != phase)
            return;
        if (i < p->spins)
            relax();
        else
            sched_yield();
    }
    pthread_mutex_lock(&p->barrier_lock);
    atomic_fetch_add(&p->sleepers, 1);
    while (atomic_load(&p->phase) == phase)
        pthread_cond_wait(&p->barrier_wake, &p->barrier_lock);
    atomic_fetch_sub(&p->sleepers, 1);
    pthread_mutex_unlock(&p->barrier_lock);
}

void kvd__pool_barrier(kvd_pool *p)
{
    if (p->n_threads == 1)
        return;
    unsigned phase = atomic_load_explicit(&p->phase, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&p->arrived, 1, memory_order_acq_rel) != p->n_threads - 1) {
        wait_phase(p, phase);
        return;
    }
    atomic_store_explicit(&p->arrived, 0, memory_order_relaxed);
    /* Phase before sleepers here, sleepers before phase there, both sequentially
     * consistent: either we see the sleeper or it sees the new phase. */
    atomic_store(&p->phase, phase + 1);
    if (atomic_load(&p->sleepers)) {
        pthread_mutex_lock(&p->barrier_lock);
        pthread_cond_broadcast(&p->barrier_wake);
        pthread_mutex_unlock(&p->barrier_lock);
    }
}

static void run_job(kvd_pool *p, int tid)
{
    kvd_fpenv saved = kvd__fpenv_enter();
    p->job(p->ctx, tid, p->n_threads);
    kvd__fpenv_leave(saved);
}

static void *worker(void *arg)
{
    worker_arg w = *(worker_arg *)arg;
    kvd__free(arg);
    kvd_pool *p = w.pool;
    for (uint64_t seen = 0;; ) {
        /* Between two tokens the next run comes at once: look before sleeping. */
        for (int spin = p->spins; spin > 0 && atomic_load(&p->generation) == seen && !atomic_load(&p->quit); spin--)
            relax();
        pthread_mutex_lock(&p->lock);
        while (atomic_load(&p->generation) == seen && !atomic_load(&p->quit))
            pthread_cond_wait(&p->wake, &p->lock);
        seen = atomic_load(&p->generation);
        pthread_mutex_unlock(&p->lock);
        if (atomic_load(&p->quit))
            return NULL;
        run_job(p, w.tid);
        kvd__pool_barrier(p);
    }
}

int kvd__pool_create(kvd_pool **out, int n_threads, kvd_ledger *l, kvd_error *err)
{
    if (n_threads < 1 || n_threads > KVD__MAX_THREADS)
        return kvd__fail(err, KVD_E_RANGE, "threads: %d is not in 1..%d", n_threads, KVD__MAX_THREADS);
    kvd_pool *p = kvd__alloc(l, KVD_ACC_HOST, sizeof *p, err);
    if (!p)
        return KVD_E_NOMEM;
    p->n_threads = n_threads;
    p->owner = getpid();
    p->spins = n_threads <= kvd__cpu_count() ? SPINS : 0;
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->wake, NULL);
    pthread_mutex_init(&p->barrier_lock, NULL);
    pthread_cond_init(&p->barrier_wake, NULL);
    p->threads = kvd__alloc_array(l, KVD_ACC_HOST, (size_t)n_threads, sizeof *p->threads, err);
    if (!p->threads)
        goto fail;
    for (int i = 1; i < n_threads; i++) {
        worker_arg *w = kvd__alloc(l, KVD_ACC_HOST, sizeof *w, err);
        if (!w)
            goto fail;
        *w = (worker_arg){p, i};
        if (pthread_create(&p->threads[i], NULL, worker, w)) {
            kvd__free(w);
            kvd__fail(err, KVD_E_NOMEM, "cannot start thread %d of %d", i + 1, n_threads);
            goto fail;
        }
        p->n_started++;
    }
    *out = p;
    return 0;
fail:
    kvd__pool_destroy(&p);
    return KVD_E_NOMEM;
}

void kvd__pool_destroy(kvd_pool **pool)
{
    kvd_pool *p = *pool;
    *pool = NULL;
    if (!p)
        return;
    if (p->owner == getpid()) { /* else nobody is there to be told, and locks may be held by the absent */
        pthread_mutex_lock(&p->lock);
        atomic_store(&p->quit, true);
        pthread_cond_broadcast(&p->wake);
        pthread_mutex_unlock(&p->lock);
        for (int i = 1; i <= p->n_started; i++)
            pthread_join(p->threads[i], NULL);
        pthread_cond_destroy(&p->wake);
        pthread_mutex_destroy(&p->barrier_lock);
        pthread_cond_destroy(&p->barrier_wake);
        pthread_mutex_destroy(&p->lock);
    }
    kvd__free(p->threads);
    kvd__free(p);
}

int kvd__pool_check(const kvd_pool *p, kvd_error *err)
{
    if (p->n_threads == 1 || p->owner == getpid())
        return 0;
    return kvd__fail(err, KVD_E_ARG, "the model's threads are those of the process that loaded it; this one was forked");
}

int kvd__pool_threads(const kvd_pool *p) { return p->n_threads; }

void kvd__pool_run(kvd_pool *p, kvd_job_fn fn, void *ctx)
{
    p->job = fn;
    p->ctx = ctx;
    if (p->n_threads > 1) {
        pthread_mutex_lock(&p->lock);
        atomic_fetch_add(&p->generation, 1);
        pthread_cond_broadcast(&p->wake);
        pthread_mutex_unlock(&p->lock);
    }
    run_job(p, 0);
    kvd__pool_barrier(p);
}

void kvd__pool_share(int64_t n, int tid, int n_threads, int64_t *begin, int64_t *end)
{
    *begin = n * tid / n_threads;
    *end = n * (tid + 1) / n_threads;
}

int kvd__cpu_count(void)
{
    cpu_set_t set;
    if (!sched_getaffinity(0, sizeof set, &set)) {
        int n = CPU_COUNT(&set);
        return n > 0 ? n : 1;
    }
    long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n > 0 ? (int)n : 1;
}
