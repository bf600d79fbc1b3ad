/* Reading bytes and taking the time.
 *
 * Memory is read as the engine would, by all threads at once, each its share; they run
 * several repetitions in a row, and starting the threads is not in the time.
 * The rated streams are not computed from the rate: each piece is copied when the clock
 * says that it would have come in. */
#define _GNU_SOURCE
#include "lab/reading.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "lab/runs.h"
#include "lab/whole_file.h"

enum {
    PAGE = 4096,
    PIECE = 64 << 10,            /* of a rated stream */
    MIB = 1 << 20,
    LEAST_ARENA = 64 * MIB, MOST_ARENA = 512 * MIB, UNKNOWN_ARENA = 256 * MIB,
    LEAST_FILE = 16 * MIB,
    MAX_THREADS = 256
};

struct lab_reader {
    int n_threads;
    char *arena, *to;           /* [arena_bytes], [max_bytes, whole pages] */
    int64_t arena_bytes, max_bytes, cursor;
    int fd;
    bool direct;
    int64_t file_bytes, file_cursor;
    char no_disk[160];
};

const char *lab_reading_name(lab_reading how)
{
    static const char *const names[] = {"RAM, cold", "RAM, warm", "disk", "100 MB/s", "500 MB/s", "1 GB/s"};
    return names[how];
}

static int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
static int64_t greater(int64_t a, int64_t b) { return a > b ? a : b; }

/* ---- the file ------------------------------------------------------------------- */

static int open_in(const char *dir, int flags)
{
    int fd = open(dir, O_TMPFILE | O_RDWR | O_CLOEXEC | flags, 0600);
    if (fd >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != ENOENT))
        return fd;
    char path[4096];
    if (snprintf(path, sizeof path, "%s/.kvd-lab-XXXXXX", dir) >= (int)sizeof path) {
        errno = ENAMETOOLONG;
        return -1;
    }
    fd = mkostemp(path, O_CLOEXEC | flags);
    int e = errno;
    if (fd >= 0)
        unlink(path);
    errno = e;
    return fd;
}

static bool fill_file(lab_reader *r)
{
    for (int64_t at = 0; at < r->file_bytes; at += MIB) {
        const char *from = r->arena + at % (r->arena_bytes - MIB) / PAGE * PAGE;
        if (pwrite(r->fd, from, MIB, at) != MIB)
            return false;
    }
    return fdatasync(r->fd) == 0;
}

static void open_disk(lab_reader *r, const char *dir)
{
    r->fd = -1;
    if (!dir || !*dir) {
        snprintf(r->no_disk, sizeof r->no_disk, "no folder for spill files was given");
        return;
    }
    if (lab_file_in_memory(dir)) {
        snprintf(r->no_disk, sizeof r->no_disk, "the folder for spill files is in memory");
        return;
    }
    r->file_bytes = round_up(greater(LEAST_FILE, 4 * r->max_bytes), MIB);
    for (int direct = 1; direct >= 0; direct--) {
        r->direct = direct;
        r->fd = open_in(dir, direct ? O_DIRECT : 0);
        if (r->fd >= 0 && fill_file(r))
            return;
        int e = errno;
        if (r->fd >= 0)
            close(r->fd);
        r->fd = -1;
        snprintf(r->no_disk, sizeof r->no_disk, "the folder for spill files does not serve: %s", strerror(e));
        if (e != EINVAL && e != EOPNOTSUPP)
            return;
    }
}

/* ---- making ---------------------------------------------------------------------- */

/* Several times the largest cache, if the system knows how large that is; not more than
 * an eighth of what there is. */
static int64_t arena_size(int64_t max_bytes)
{
    long cache = sysconf(_SC_LEVEL3_CACHE_SIZE);
    int64_t n = cache > 0 ? 4 * (int64_t)cache : UNKNOWN_ARENA, room = kvd_memory_available() / 8;
    n = n > MOST_ARENA ? MOST_ARENA : n;
    n = n > room ? room : n;
    n = n < LEAST_ARENA ? LEAST_ARENA : n;
    return round_up(greater(n, 4 * max_bytes), MIB);
}

int lab_reader_create(lab_reader **out, int64_t max_bytes, int n_threads, const char *dir, kvd_error *err)
{
    lab_reader *r = calloc(1, sizeof *r);
    if (!r)
        return lab_fail(err, KVD_E_NOMEM, "out of memory");
    r->fd = -1;
    r->n_threads = n_threads < MAX_THREADS ? n_threads : MAX_THREADS;
    r->max_bytes = max_bytes;
    r->arena_bytes = arena_size(max_bytes);
    r->arena = aligned_alloc(PAGE, (size_t)r->arena_bytes);
    r->to = aligned_alloc(PAGE, (size_t)round_up(max_bytes, PAGE));
    if (!r->arena || !r->to) {
        lab_reader_free(&r);
        return lab_fail(err, KVD_E_NOMEM, "out of memory: %lld bytes to read from", (long long)arena_size(max_bytes));
    }
    /* Not zeros: untouched pages are all the same one, and some disks leave out zeros. */
    uint64_t x = 1;
    for (int64_t i = 0; i < r->arena_bytes / 8; i++) {
        x = x * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        memcpy(r->arena + 8 * i, &x, 8);
    }
    memset(r->to, 1, (size_t)round_up(max_bytes, PAGE));
    open_disk(r, dir);
    *out = r;
    return 0;
}

void lab_reader_free(lab_reader **pr)
{
    lab_reader *r = *pr;
    *pr = NULL;
    if (!r)
        return;
    if (r->fd >= 0)
        close(r->fd);
    free(r->arena);
    free(r->to);
    free(r);
}

const char *lab_reader_no_disk(const lab_reader *r) { return r->fd < 0 ? r->no_disk : NULL; }
bool lab_reader_direct(const lab_reader *r) { return r->direct; }
int64_t lab_reader_arena_bytes(const lab_reader *r) { return r->arena_bytes; }

/* ---- memory ----------------------------------------------------------------------- */

enum { WAIT, GO, GIVE_UP };

typedef struct {
    lab_reader *r;
    int64_t bytes, reps;
    bool cold;
    _Atomic int word;           /* WAIT, then GO or GIVE_UP */
    _Atomic int ready, done;    /* threads that have come so far */
} copy_job;

typedef struct {
    copy_job *job;
    int tid;
} copy_worker;

static void copy_share(const copy_job *j, int tid, int n_threads)
{
    const lab_reader *r = j->r;
    int64_t begin = j->bytes * tid / n_threads, end = j->bytes * (tid + 1) / n_threads, places = r->arena_bytes / j->bytes;
    for (int64_t i = 0; i < j->reps; i++) {
        int64_t place = j->cold ? (r->cursor + i) % places : 0;
        memcpy(r->to + begin, r->arena + place * j->bytes + begin, (size_t)(end - begin));
        __asm__ volatile("" : : "r"(r->to) : "memory"); /* each copy is wanted */
    }
}

static void *copy_thread(void *arg)
{
    const copy_worker *w = arg;
    copy_job *j = w->job;
    atomic_fetch_add(&j->ready, 1);
    while (atomic_load(&j->word) == WAIT)
        sched_yield();
    if (atomic_load(&j->word) == GO)
        copy_share(j, w->tid, j->r->n_threads);
    atomic_fetch_add(&j->done, 1);
    return NULL;
}

/* Threads of its own: the engine's pool runs nothing but the engine. */
static int copy_together(copy_job *j, double *seconds, kvd_error *err)
{
    pthread_t threads[MAX_THREADS];
    copy_worker workers[MAX_THREADS];
    int n = 1;
    for (; n < j->r->n_threads; n++) {
        workers[n] = (copy_worker){j, n};
        if (pthread_create(&threads[n], NULL, copy_thread, &workers[n]))
            break;
    }
    bool all = n == j->r->n_threads;
    while (atomic_load(&j->ready) < n - 1)
        sched_yield();
    double t0 = lab_seconds();
    atomic_store(&j->word, all ? GO : GIVE_UP);
    if (all)
        copy_share(j, 0, n);
    while (atomic_load(&j->done) < n - 1)
        sched_yield();
    *seconds = (lab_seconds() - t0) / (double)j->reps;
    for (int i = 1; i < n; i++)
        pthread_join(threads[i], NULL);
    return all ? 0 : lab_fail(err, KVD_E_NOMEM, "cannot start thread %d of %d", n + 1, j->r->n_threads);
}

static int read_memory(lab_reader *r, bool cold, int64_t bytes, double *seconds, kvd_error *err)
{
    copy_job j = {.r = r, .bytes = bytes, .cold = cold, .reps = 1};
    if (!cold) /* make it warm */
        copy_share(&j, 0, 1);
    j.reps = 1 + 16 * (int64_t)MIB / bytes; /* a millisecond or more */
    int rc = copy_together(&j, seconds, err);
    if (cold)
        r->cursor = (r->cursor + j.reps) % (r->arena_bytes / bytes);
    return rc;
}

/* ---- disk ------------------------------------------------------------------------- */

static int read_disk(lab_reader *r, int64_t bytes, double *seconds, kvd_error *err)
{
    int64_t n = round_up(bytes, PAGE), reps = r->direct ? 1 + 2 * (int64_t)MIB / n : 1;
    if (r->fd < 0)
        return lab_fail(err, KVD_E_UNSUPPORTED, "%s", r->no_disk);
    if (!r->direct)
        posix_fadvise(r->fd, 0, 0, POSIX_FADV_DONTNEED);
    double t0 = lab_seconds();
    for (int64_t i = 0; i < reps; i++) {
        if (r->file_cursor + n > r->file_bytes)
            r->file_cursor = 0;
        for (int64_t done = 0; done < n;) {
            ssize_t got = pread(r->fd, r->to + done, (size_t)(n - done), r->file_cursor + done);
            if (got <= 0)
                return lab_fail(err, KVD_E_IO, "reading the file in the folder for spill files: %s", got ? strerror(errno) : "it ends");
            done += got;
        }
        r->file_cursor += n;
    }
    *seconds = (lab_seconds() - t0) / (double)reps;
    return 0;
}

/* ---- a rated stream ------------------------------------------------------------------ */

/* Sleep as long as that is safely short enough, then look at the clock. */
static void wait_until(double t)
{
    double left = t - lab_seconds();
    if (left > 300e-6) {
        left -= 200e-6;
        struct timespec ts = {.tv_sec = (time_t)left, .tv_nsec = (long)((left - (double)(time_t)left) * 1e9)};
        nanosleep(&ts, NULL);
    }
    while (lab_seconds() < t)
        ;
}

static void read_stream(lab_reader *r, double bytes_per_s, int64_t bytes, double *seconds)
{
    double t0 = lab_seconds();
    for (int64_t at = 0; at < bytes; at += PIECE) {
        int64_t n = bytes - at < PIECE ? bytes - at : PIECE;
        wait_until(t0 + (double)(at + n) / bytes_per_s);
        memcpy(r->to + at, r->arena + at, (size_t)n);
    }
    *seconds = lab_seconds() - t0;
}

int lab_reader_time(lab_reader *r, lab_reading how, int64_t bytes, double *seconds, kvd_error *err)
{
    switch (how) {
    case LAB_RAM_COLD: return read_memory(r, true, bytes, seconds, err);
    case LAB_RAM_WARM: return read_memory(r, false, bytes, seconds, err);
    case LAB_DISK: return read_disk(r, bytes, seconds, err);
    case LAB_100_MB_S: read_stream(r, 100e6, bytes, seconds); return 0;
    case LAB_500_MB_S: read_stream(r, 500e6, bytes, seconds); return 0;
    case LAB_1_GB_S: read_stream(r, 1e9, bytes, seconds); return 0;
    case LAB_N_READINGS: break;
    }
    return lab_fail(err, KVD_E_ARG, "no such reading");
}
