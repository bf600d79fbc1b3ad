/* What the system has to do with a spill file: folders that are no disk, a name nowhere,
 * nothing in the page cache, nothing left behind, forks and signals. */
#include "spill_case.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/wait.h>

static void memory_is_no_disk(void **state)
{
    kvd_kv_shape s = rig_shape(1, 1, 8);
    kvd_spill_options o = options_of(4);
    kvd_ledger l;
    kvd_error err;
    kvd_spill *sp = NULL;
    kvd__ledger_init(&l, 0);
    o.dir = "/dev/shm";
    if (access(o.dir, W_OK) || !rig_in_memory(o.dir)) {
        print_message("SKIPPED: /dev/shm is no tmpfs here\n");
        return;
    }
    assert_int_equal(kvd__spill_create(&sp, &s, &o, &l, &err), KVD_E_UNSUPPORTED);
    assert_non_null(strstr(err.message, "tmpfs"));
    assert_true(rig_ledger_empty(&l));
    o.dir = "/nowhere/at/all";
    assert_int_equal(kvd__spill_create(&sp, &s, &o, &l, &err), KVD_E_IO);
    o.dir = "/proc/self/status"; /* no folder */
    assert_int_equal(kvd__spill_create(&sp, &s, &o, &l, NULL), KVD_E_IO);
}

static void too_large_for_the_disk(void **state)
{
    kvd_kv_shape s = rig_shape(30, 3, 64);
    kvd_spill_options o = options_of((int64_t)1 << 24); /* 6 TB on disk; sums of 4 GB that are never touched */
    kvd_ledger l;
    kvd_error err;
    kvd_spill *sp = NULL;
    kvd__ledger_init(&l, 0);
    int rc = kvd__spill_create(&sp, &s, &o, &l, &err);
    if (!rc || rc == KVD_E_NOMEM) {
        print_message("SKIPPED: a disk with 6 TB free, or no address space\n");
        kvd__spill_destroy(&sp);
        return;
    }
    assert_int_equal(rc, KVD_E_IO);
    assert_int_equal(err.need_bytes, kvd__spill_file_bytes(&s, &o));
    assert_true(rig_ledger_empty(&l) && rig_dir_entries() == 0);
}

static void unnamed_private_closed_on_exec(void **state)
{
    rig r;
    rig_open(&r, rig_shape(2, 1, 64), options_of(6));
    struct stat st;
    assert_int_equal(fstat(r.fd, &st), 0);
    assert_int_equal(st.st_nlink, 0);
    assert_int_equal(st.st_mode & 0777 & ~0600, 0);
    assert_int_equal(st.st_size, kvd__spill_file_bytes(&r.shape, &r.options));
    if (fallocate(r.fd, FALLOC_FL_KEEP_SIZE, 0, 1) && errno == EOPNOTSUPP)
        print_message("SKIPPED: reservation, on a file system that has none\n");
    else
        assert_true(st.st_blocks * 512 >= st.st_size);
    assert_true(fcntl(r.fd, F_GETFD) & FD_CLOEXEC);
    assert_int_equal(rig_dir_entries(), 0);
    rig_close(&r);
}

static int64_t cached_pages(int fd, int64_t bytes)
{
    int64_t n = (bytes + 4095) / 4096, cached = 0;
    unsigned char *in = calloc(1, (size_t)n);
    void *m = mmap(NULL, (size_t)bytes, PROT_READ, MAP_SHARED, fd, 0);
    if (m != MAP_FAILED && !mincore(m, (size_t)bytes, in))
        for (int64_t i = 0; i < n; i++)
            cached += in[i] & 1;
    if (m != MAP_FAILED)
        munmap(m, (size_t)bytes);
    free(in);
    return cached;
}

/* Nothing of the file stays in the page cache, whatever the mode. */
static void page_cache_is_no_budget(void **state)
{
    for (int direct = 0; direct < 2; direct++) {
        rig r;
        kvd_spill_options o = options_of(64);
        o.direct = direct;
        rig_open(&r, rig_shape(4, 2, 64), o);
        rig_write(&r, 0, 64);
        int64_t bytes = kvd__spill_file_bytes(&r.shape, &r.options), written = cached_pages(r.fd, bytes);
        rig_read_all(&r, 64, 1);
        int64_t read = cached_pages(r.fd, bytes);
        print_message("O_DIRECT %d: of %lld pages are cached: %lld after writing, %lld after reading\n", direct,
                      (long long)(bytes / 4096), (long long)written, (long long)read);
        check(written <= 64 && read <= 64, "%lld and %lld pages are cached", (long long)written, (long long)read);
        rig_close(&r);
    }
}

static int no_tmpfile(void *ctx, int dir_fd, const char *path, int flags)
{
    if ((flags & O_TMPFILE) != O_TMPFILE)
        return kvd__spill_system.open(NULL, dir_fd, path, flags);
    errno = EOPNOTSUPP;
    return -1;
}

/* kill -9 in the middle of writing leaves an empty folder. */
static void killed(void **state)
{
    for (int named = 0; named < 2; named++) {
        int ready[2];
        assert_int_equal(pipe(ready), 0);
        pid_t pid = fork();
        if (!pid) {
            kvd_ledger l;
            kvd_kv_shape s = rig_shape(4, 1, 64);
            kvd_spill_options o = options_of(64);
            kvd_spill *sp = NULL;
            rig_source source = rig_source_of(&s);
            kvd_spill_ops ops = kvd__spill_system;
            ops.open = no_tmpfile;
            o.ops = named ? &ops : NULL;
            kvd__ledger_init(&l, 0);
            int ok = !kvd__spill_create(&sp, &s, &o, &l, NULL) &&
                     !kvd__spill_write(sp, 0, 16, rig_get, &source, NULL);
            ok = write(ready[1], ok ? "+" : "-", 1) == 1;
            for (;;) /* until the end */
                if (ok && kvd__spill_write(sp, 16, 64, rig_get, &source, NULL) == 0)
                    kvd__spill_drop(sp, 16);
        }
        char c = 0;
        int status;
        close(ready[1]);
        ssize_t got = read(ready[0], &c, 1);
        int alive = rig_dir_entries();
        close(ready[0]);
        kill(pid, SIGKILL); /* before anything is asserted: it has no other end */
        assert_int_equal(waitpid(pid, &status, 0), pid);
        assert_true(WIFSIGNALED(status));
        assert_true(got == 1 && alive == 0);
        assert_int_equal(c, '+');
        assert_int_equal(rig_dir_entries(), 0);
    }
}

static void after_fork(void **state)
{
    rig r;
    rig_open(&r, rig_shape(2, 1, 64), options_of(16));
    rig_write(&r, 0, 12);
    kvd_spill_range range = {1, 0, 12};
    kvd_spill_segment seg;
    assert_int_equal(kvd__spill_read_begin(r.sp, &range, 1, &r.err), 0);
    pid_t pid = fork();
    if (!pid) {
        kvd_spill_stats stats;
        int ok = kvd__spill_next(r.sp, &seg, NULL) == KVD_E_ARG;
        ok &= kvd__spill_read_begin(r.sp, &range, 1, NULL) == KVD_E_ARG;
        ok &= kvd__spill_grow(r.sp, 32, NULL) == KVD_E_ARG && !kvd__spill_is_ours(r.sp);
        ok &= kvd__spill_write(r.sp, 12, 13, rig_get, &r.source, NULL) == KVD_E_ARG;
        kvd__spill_read_end(r.sp);
        kvd__spill_release(r.sp);
        kvd__spill_stats(r.sp, &stats);
        kvd__spill_destroy(&r.sp);
        _exit(ok && !r.sp ? 0 : 1);
    }
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    assert_int_equal(kvd__spill_next(r.sp, &seg, &r.err), 0);
    assert_true(rig_segment_is(&seg, &r.source));
    kvd__spill_read_end(r.sp);
    rig_write(&r, 12, 16);
    rig_read_all(&r, 16, 1);
    rig_close(&r);
}

static pthread_t main_thread;
static volatile sig_atomic_t n_alarms, elsewhere;
static void on_alarm(int sig)
{
    n_alarms++;
    elsewhere |= !pthread_equal(pthread_self(), main_thread);
}

/* A timer that interrupts every call it can: nothing is lost, and the readers
 * take no signal. */
static void signals_during_io(void **state)
{
    struct sigaction sa = {.sa_handler = on_alarm}, old; /* no SA_RESTART */
    struct itimerval often = {{0, 300}, {0, 300}}, off = {{0, 0}, {0, 0}};
    main_thread = pthread_self();
    n_alarms = 0;
    sigaction(SIGALRM, &sa, &old);
    setitimer(ITIMER_REAL, &often, NULL);
    rig r;
    rig_open(&r, rig_shape(4, 2, 64), options_of(64));
    for (int round = 0; round < 5 || (n_alarms < 20 && round < 1000); round++) {
        kvd__spill_drop(r.sp, 0);
        rig_write(&r, 0, 64);
        rig_read_all(&r, 64, 2);
    }
    rig_close(&r);
    setitimer(ITIMER_REAL, &off, NULL);
    sigaction(SIGALRM, &old, NULL);
    assert_true(n_alarms >= 20);
    assert_false(elsewhere);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(memory_is_no_disk),
        cmocka_unit_test(too_large_for_the_disk),
        cmocka_unit_test(unnamed_private_closed_on_exec),
        cmocka_unit_test(page_cache_is_no_budget),
        cmocka_unit_test(killed),
        cmocka_unit_test(after_fork),
        cmocka_unit_test(signals_during_io),
    };
    return rig_run_tests(tests);
}
