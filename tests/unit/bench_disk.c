/* How fast a session decodes from slow disks, and what of that its writes cost: a
 * measurement, not a test.
 *
 *   bench_disk MODEL.gguf [prompt tokens [new tokens [percent of full KV]]]
 *
 * A disk here is the real one with a turnstile in front: a call takes a fixed time and
 * its bytes at a rate, one call after the other. Each disk is run with the writes through
 * the turnstile and past it; the difference is what writing costs. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "base/clock.h"
#include "gen/session.h"
#include "kv/spill.h"

typedef struct {
    const char *name;
    double call_s, bytes_s; /* bytes_s 0: no turnstile */
} disk;

static const disk disks[] = {{"as it is", 0, 0}, {"SSD, 500 MB/s, 0.1 ms", 1e-4, 5e8}, {"network, 200 MB/s, 1 ms", 1e-3, 2e8},
                             {"hard disk, 150 MB/s, 8 ms", 8e-3, 1.5e8}, {"card, 80 MB/s, 2 ms", 2e-3, 8e7}};

typedef struct {
    disk d;
    bool writes; /* go through, too */
    pthread_mutex_t lock;
    double free_at; /* when the disk is done with what it has */
} turnstile;

static void pass(turnstile *t, size_t n)
{
    if (t->d.bytes_s <= 0)
        return;
    pthread_mutex_lock(&t->lock);
    double now = kvd__seconds(), from = t->free_at > now ? t->free_at : now;
    t->free_at = from + t->d.call_s + (double)n / t->d.bytes_s;
    double wait = t->free_at - now;
    pthread_mutex_unlock(&t->lock);
    struct timespec ts = {(time_t)wait, (long)((wait - (double)(time_t)wait) * 1e9)};
    nanosleep(&ts, NULL);
}

static int open_file(void *ctx, int dir_fd, const char *path, int flags) { return kvd__spill_system.open(NULL, dir_fd, path, flags); }
static long fs_type(void *ctx, int fd) { return kvd__spill_system.fs_type(NULL, fd); }
static int reserve(void *ctx, int fd, off_t bytes) { return kvd__spill_system.reserve(NULL, fd, bytes); }

static ssize_t slow_pread(void *ctx, int fd, void *buf, size_t n, off_t at)
{
    pass(ctx, n);
    return kvd__spill_system.pread(NULL, fd, buf, n, at);
}

static ssize_t slow_pwrite(void *ctx, int fd, const void *buf, size_t n, off_t at)
{
    if (((turnstile *)ctx)->writes)
        pass(ctx, n);
    return kvd__spill_system.pwrite(NULL, fd, buf, n, at);
}

static int write_back(void *ctx, int fd, off_t at, off_t n) { return kvd__spill_system.write_back(NULL, fd, at, n); }
static int forget(void *ctx, int fd, off_t at, off_t n) { return kvd__spill_system.forget(NULL, fd, at, n); }

static const kvd_spill_ops slow = {open_file, fs_type, reserve, slow_pread, slow_pwrite, write_back, forget};

static double decode_rate(kvd_model *m, turnstile *t, int64_t n_prompt, int64_t n_new)
{
    kvd_session_options so;
    kvd_generate_options o;
    kvd_session *s = NULL;
    kvd_result r;
    kvd_error err = {0};
    kvd_session_options_defaults(&so);
    so.evict_to = KVD_EVICT_DISK;
    so.spill_dir = ".";
    kvd_generate_options_defaults(&o);
    o.max_tokens = n_new;
    o.ignore_end = true;
    int32_t *ids = malloc((size_t)n_prompt * sizeof *ids);
    for (int64_t i = 0; ids && i < n_prompt; i++)
        ids[i] = (int32_t)(i * 7919 % m->config.n_vocab);
    if (!ids || kvd_session_create(&s, m, &so, &err)) {
        fprintf(stderr, "%s\n", err.message);
        exit(1);
    }
    s->spill_ops = &slow;
    s->spill_ops_ctx = t;
    if (kvd_generate(s, ids, n_prompt, &o, &r, &err)) {
        fprintf(stderr, "%s\n", err.message);
        exit(1);
    }
    double rate = (double)(r.n_tokens - 1) / r.decode_s;
    kvd_result_free(&r);
    kvd_session_free(&s);
    free(ids);
    return rate;
}

int main(int argc, char **argv)
{
    if (argc < 2) {
        fprintf(stderr, "usage: bench_disk MODEL.gguf [prompt tokens [new tokens [percent of full KV]]]\n");
        return 2;
    }
    int64_t n_prompt = argc > 2 ? atoll(argv[2]) : 600, n_new = argc > 3 ? atoll(argv[3]) : 48, percent = argc > 4 ? atoll(argv[4]) : 50;
    kvd_model *m = NULL;
    kvd_error err = {0};
    kvd_session_options so;
    kvd_plan plan;
    kvd_session_options_defaults(&so);
    if (kvd_model_load(&m, argv[1], NULL, &err)) {
        fprintf(stderr, "%s\n", err.message);
        return 1;
    }
    kvd_plan_session(m, &so, n_prompt, n_prompt + n_new, 0, &plan);
    if (kvd_memory_set_budget(m, plan.full_bytes * percent / 100, &err)) {
        fprintf(stderr, "%s\n", err.message);
        return 1;
    }
    printf("%lld + %lld tokens, %lld %% of full KV; decode, tokens/s\n%-28s %12s %14s\n", (long long)n_prompt, (long long)n_new,
           (long long)percent, "disk", "writes slow", "writes free");
    for (size_t i = 0; i < sizeof disks / sizeof disks[0]; i++) {
        double rate[2];
        for (int writes = 0; writes < 2; writes++) {
            turnstile t = {.d = disks[i], .writes = writes, .lock = PTHREAD_MUTEX_INITIALIZER};
            rate[writes] = decode_rate(m, &t, n_prompt, n_new);
        }
        printf("%-28s %12.2f %14.2f\n", disks[i].name, rate[1], rate[0]);
    }
    kvd_model_free(&m);
    return 0;
}
