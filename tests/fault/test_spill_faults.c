/* The spill file when the system fails: every call of every kind fails once at its
 * n-th time, in every way that this kind has, for all n that a run has; and from the
 * n-th time on for good.
 *
 * A run makes a spill, writes, lets it grow, writes again what failed, reads all that is
 * there, rewinds, writes other bytes, reads. Whatever happens:
 *
 *   bytes     what is handed out is what was written, to the bit
 *   writes    a failure breaks nothing: other blocks are still there, a later try goes on
 *   reads     a failure names its layer and block, comes after all segments before it,
 *             and the spill is broken: nothing is there any more, all calls say so
 *   remains   no memory, no file
 *
 * and what a single fault should do is known (`expect`), so a fault that is swallowed
 * shows, too. */
#include "../unit/check.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include "../unit/spill_rig.h"

/* ---- faults ----------------------------------------------------------------------- */

typedef enum call { OPEN, FS_TYPE, RESERVE, PREAD, PWRITE, WRITE_BACK, FORGET, N_CALLS } call;
static const char *const call_names[] = {"open", "fs_type", "reserve", "pread", "pwrite", "write_back", "forget"};

typedef enum way {
    ERROR,    /* -1 and the errno */
    NOTHING,  /* 0 bytes */
    SHORT,    /* half of it, in whole records or not; only a progress, no error */
    SCRAPS,   /* 100 bytes: no progress that could be continued */
    FLIP,     /* one bit of what is read */
    MISPLACE, /* the record behind */
    LOSE,     /* said to be written */
} way;

/* What the run should come to. CREATE etc.: that call fails with KVD_E_IO. */
typedef enum expect { FINE, CREATE_FAILS, WRITE_FAILS, READ_FAILS, READ_CHECK } expect;

typedef struct fault {
    call call;
    way way;
    int error;
    expect expect; /* CREATE_FAILS in any case if it hits the calls of creation */
} fault;

static const fault faults[] = {
    {OPEN, ERROR, EACCES, CREATE_FAILS},
    {OPEN, ERROR, EMFILE, CREATE_FAILS},
    {OPEN, ERROR, EROFS, CREATE_FAILS},
    {OPEN, ERROR, EOPNOTSUPP, FINE}, /* no O_TMPFILE: a name for a moment */
    {OPEN, ERROR, EISDIR, FINE},
    {OPEN, ERROR, EINTR, FINE},
    {FS_TYPE, ERROR, EINTR, FINE},
    {RESERVE, ERROR, ENOSPC, WRITE_FAILS}, /* when it grows */
    {RESERVE, ERROR, EDQUOT, WRITE_FAILS},
    {RESERVE, ERROR, EFBIG, WRITE_FAILS},
    {RESERVE, ERROR, EIO, WRITE_FAILS},
    {RESERVE, ERROR, EINTR, FINE},
    {PREAD, ERROR, EIO, READ_FAILS},
    {PREAD, ERROR, ENOMEM, READ_FAILS},
    {PREAD, ERROR, EINTR, FINE},
    {PREAD, NOTHING, 0, READ_FAILS},
    {PREAD, SHORT, 0, FINE},
    {PREAD, SCRAPS, 0, READ_FAILS},
    {PREAD, FLIP, 0, READ_CHECK},
    {PREAD, MISPLACE, 0, READ_CHECK},
    {PWRITE, ERROR, EIO, WRITE_FAILS},
    {PWRITE, ERROR, ENOSPC, WRITE_FAILS},
    {PWRITE, ERROR, EDQUOT, WRITE_FAILS},
    {PWRITE, ERROR, EINTR, FINE},
    {PWRITE, NOTHING, 0, WRITE_FAILS},
    {PWRITE, SHORT, 0, FINE},
    {PWRITE, SCRAPS, 0, WRITE_FAILS},
    {PWRITE, LOSE, 0, READ_CHECK},
    {WRITE_BACK, ERROR, EIO, WRITE_FAILS},
    {WRITE_BACK, ERROR, ENOSPC, WRITE_FAILS},
    {WRITE_BACK, ERROR, EINTR, FINE},
    {WRITE_BACK, ERROR, ENOSYS, FINE},
    {FORGET, ERROR, EIO, FINE},
};
enum { N_FAULTS = sizeof faults / sizeof *faults };

enum { N_LAYERS = 3, N_FIRST = 4, N_BLOCKS = 11, RECORD = 4096 };

typedef struct injector {
    fault f;
    int64_t first, last; /* times of that call that fail, from 1 */
    _Atomic int64_t n[N_CALLS];
    _Atomic int64_t hit_offset, n_hits;
    int64_t created[N_CALLS]; /* counts when the creation was done */
    long fs_type;             /* 0: the real one */
    bool no_tmpfile, taken_names, no_direct_open, no_direct_io;
} injector;

static bool hit(injector *i, call c, int64_t offset)
{
    int64_t n = atomic_fetch_add(&i->n[c], 1) + 1;
    if (c != i->f.call || n < i->first || n > i->last)
        return false;
    if (atomic_fetch_add(&i->n_hits, 1) == 0)
        atomic_store(&i->hit_offset, offset);
    errno = i->f.error;
    return true;
}

static int refuse(int e)
{
    errno = e;
    return -1;
}

static int faulty_open(void *ctx, int dir_fd, const char *path, int flags)
{
    injector *i = ctx;
    bool tmpfile_asked = (flags & O_TMPFILE) == O_TMPFILE;
    if (hit(i, OPEN, 0))
        return -1;
    if (i->no_direct_open && (flags & O_DIRECT)) {
        if (!tmpfile_asked) /* as some file systems do: the name stays */
            close(kvd__spill_system.open(NULL, dir_fd, path, flags & ~O_DIRECT));
        return refuse(EINVAL);
    }
    if (i->no_tmpfile && tmpfile_asked)
        return refuse(EOPNOTSUPP);
    if (i->taken_names && !tmpfile_asked && atomic_load(&i->n[OPEN]) < 12)
        return refuse(EEXIST);
    return kvd__spill_system.open(NULL, dir_fd, path, flags);
}

static long faulty_fs_type(void *ctx, int fd)
{
    injector *i = ctx;
    return hit(i, FS_TYPE, 0) ? -1 : i->fs_type ? i->fs_type : kvd__spill_system.fs_type(NULL, fd);
}

static int faulty_reserve(void *ctx, int fd, off_t bytes)
{
    return hit(ctx, RESERVE, 0) ? -1 : kvd__spill_system.reserve(NULL, fd, bytes);
}

static bool is_direct(int fd) { return (fcntl(fd, F_GETFL) & O_DIRECT) != 0; }

static ssize_t faulty_pread(void *ctx, int fd, void *buf, size_t n, off_t at)
{
    injector *i = ctx;
    if (!hit(i, PREAD, at))
        return kvd__spill_system.pread(NULL, fd, buf, n, at);
    ssize_t got;
    switch (i->f.way) {
    case ERROR: return refuse(i->f.error);
    case NOTHING: return 0;
    case SCRAPS: return 100;
    case SHORT: /* and a half record on top of it, whose bytes are not to be trusted */
        got = kvd__spill_system.pread(NULL, fd, buf, n, at);
        if (got <= RECORD)
            return got;
        got = got / RECORD / 2 * RECORD + RECORD / 2 * (got / RECORD % 2);
        return got ? got : RECORD;
    case MISPLACE: return kvd__spill_system.pread(NULL, fd, buf, n, at + RECORD);
    default:
        got = kvd__spill_system.pread(NULL, fd, buf, n, at);
        if (got > 0)
            ((char *)buf)[(uint64_t)at * 31 % RECORD] ^= 0x10;
        return got;
    }
}

static ssize_t faulty_pwrite(void *ctx, int fd, const void *buf, size_t n, off_t at)
{
    injector *i = ctx;
    if (i->no_direct_io && is_direct(fd))
        return refuse(EINVAL);
    if (!hit(i, PWRITE, at))
        return kvd__spill_system.pwrite(NULL, fd, buf, n, at);
    switch (i->f.way) {
    case ERROR: return refuse(i->f.error);
    case NOTHING: return 0;
    case SCRAPS: return 100;
    case LOSE: return (ssize_t)n;
    default: return kvd__spill_system.pwrite(NULL, fd, buf, n > RECORD ? n / RECORD / 2 * RECORD : n, at);
    }
}

static int faulty_write_back(void *ctx, int fd, off_t at, off_t n)
{
    return hit(ctx, WRITE_BACK, at) ? -1 : kvd__spill_system.write_back(NULL, fd, at, n);
}

static int faulty_forget(void *ctx, int fd, off_t at, off_t n)
{
    return hit(ctx, FORGET, at) ? -1 : kvd__spill_system.forget(NULL, fd, at, n);
}

static const kvd_spill_ops faulty = {faulty_open,   faulty_fs_type,    faulty_reserve, faulty_pread,
                                     faulty_pwrite, faulty_write_back, faulty_forget};

/* ---- a run -------------------------------------------------------------------------- */

typedef struct run {
    injector *in;
    kvd_kv_shape shape;
    kvd_spill *sp;
    rig_source source;
    char what[160];     /* for messages */
    bool write_failed;
    int read_code;      /* of the failure that broke it, or 0 */
} run;

/* From "..., reading layer 2, block 7: ..." */
static void named_place(const char *message, const char *verb, int *layer, long long *block)
{
    const char *p = strstr(message, verb);
    *layer = -1;
    *block = -1;
    if (p)
        sscanf(p + strlen(verb), " layer %d, block %lld:", layer, block);
}

static void write_blocks(run *r, int64_t from, int64_t to)
{
    bool before[N_LAYERS][N_BLOCKS];
    for (int l = 0; l < N_LAYERS; l++)
        for (int64_t b = 0; b < N_BLOCKS; b++)
            before[l][b] = kvd__spill_has_layer(r->sp, l, b);
    kvd_error err;
    int rc = kvd__spill_write(r->sp, from, to, rig_get, &r->source, &err);
    check(!kvd__spill_broken(r->sp), "%s: a write broke it", r->what);
    for (int l = 0; l < N_LAYERS; l++)
        for (int64_t b = 0; b < N_BLOCKS; b++)
            check(kvd__spill_has_layer(r->sp, l, b) >= before[l][b], "%s: a write lost a block", r->what);
    if (!rc) {
        for (int64_t b = from; b < to; b++)
            check(kvd__spill_has(r->sp, b), "%s: written, and not there", r->what);
        return;
    }
    int layer;
    long long block;
    r->write_failed = true;
    check(rc == KVD_E_IO && err.code == rc, "%s: write: %d %s", r->what, rc, err.message);
    named_place(err.message, "writing", &layer, &block);
    check(layer >= 0 && layer < N_LAYERS && block >= from && block < to, "%s: not named: %s", r->what, err.message);
    check(!kvd__spill_has(r->sp, block) && !kvd__spill_has_layer(r->sp, layer, block), "%s: failed, and there", r->what);
}

/* Runs of what is there, layer by layer. */
static int there(run *r, kvd_spill_range *ranges)
{
    int n = 0;
    for (int l = 0; l < N_LAYERS; l++)
        for (int64_t b = 0; b < N_BLOCKS; b++) {
            if (!kvd__spill_has_layer(r->sp, l, b))
                continue;
            if (n && ranges[n - 1].layer == l && ranges[n - 1].to_block == b)
                ranges[n - 1].to_block++;
            else
                ranges[n++] = (kvd_spill_range){l, b, b + 1};
        }
    return n;
}

static void is_broken(run *r)
{
    kvd_error err;
    check(kvd__spill_broken(r->sp), "%s: not broken", r->what);
    for (int64_t b = 0; b < N_BLOCKS; b++)
        check(!kvd__spill_has(r->sp, b) && !kvd__spill_has_layer(r->sp, 0, b), "%s: broken, and there", r->what);
    kvd_spill_range empty = {0, 0, 0};
    check(kvd__spill_read_begin(r->sp, &empty, 1, &err) == KVD_E_IO, "%s: broken, and reads", r->what);
    check(kvd__spill_write(r->sp, 0, 1, rig_get, &r->source, &err) == KVD_E_IO, "%s: broken, and writes", r->what);
}

/* Where a record is in the file: the second section lies behind the first. */
static int64_t record_of(int layer, int64_t block)
{
    return block < N_FIRST ? layer * N_FIRST + block : N_LAYERS * N_FIRST + layer * (N_BLOCKS - N_FIRST) + block - N_FIRST;
}

/* Read all that is there. generation_of: blocks from `changed` on are of generation 1. */
static void read_blocks(run *r, int64_t changed)
{
    kvd_spill_range ranges[N_LAYERS * N_BLOCKS];
    int n = there(r, ranges), rc = 0;
    kvd_error err;
    check(!kvd__spill_read_begin(r->sp, ranges, n, &err), "%s: %s", r->what, err.message);
    for (int i = 0; i < n && !rc; i++) {
        kvd_spill_segment seg;
        for (int64_t b = ranges[i].from_block; b < ranges[i].to_block && !rc; b += seg.n_blocks) {
            rc = kvd__spill_next(r->sp, &seg, &err);
            if (rc) {
                int layer;
                long long block;
                named_place(err.message, "reading", &layer, &block);
                check(layer == ranges[i].layer && block >= b && block < ranges[i].to_block,
                      "%s: expected at layer %d, block %lld: %s", r->what, ranges[i].layer, (long long)b, err.message);
                check(kvd__spill_next(r->sp, &seg, &err) == rc, "%s: said only once", r->what);
                int64_t hit_record = atomic_load(&r->in->hit_offset) / RECORD;
                check(r->in->last != r->in->first || r->in->f.way == MISPLACE || r->in->f.way == LOSE || hit_record == record_of(layer, block),
                      "%s: hit record %lld, named %d, %lld", r->what, (long long)hit_record, layer, block);
                break;
            }
            check(seg.layer == ranges[i].layer && seg.from_block == b, "%s: another segment", r->what);
            for (int64_t k = 0; k < seg.n_blocks; k++) {
                r->source.generation = b + k >= changed;
                check(rig_is(seg.blocks + k * seg.stride_bytes, &r->source, seg.layer, b + k), "%s: WRONG BITS", r->what);
            }
            kvd__spill_release(r->sp);
        }
    }
    kvd__spill_read_end(r->sp);
    if (rc) {
        check(rc == KVD_E_IO || rc == KVD_E_CHECK, "%s: read: %d", r->what, rc);
        r->read_code = rc;
        is_broken(r);
    } else {
        check(!kvd__spill_broken(r->sp), "%s: broken without a word", r->what);
    }
}

/* To N_BLOCKS, at the second try if need be; what it has room for afterwards. */
static int64_t grow(run *r)
{
    kvd_error err;
    for (int tries = 0; tries < 2; tries++) {
        int rc = kvd__spill_grow(r->sp, N_BLOCKS, &err);
        if (!rc)
            return N_BLOCKS;
        check(rc == KVD_E_IO && err.code == rc && err.message[0] && !kvd__spill_broken(r->sp), "%s: grow: %d", r->what, rc);
        if (r->in->f.call == RESERVE && r->in->f.error != EIO)
            assert_int_equal(err.need_bytes, N_LAYERS * N_BLOCKS * RECORD);
        r->write_failed = true;
    }
    return N_FIRST;
}

static void write_twice(run *r, int64_t from, int64_t to)
{
    write_blocks(r, from, to);
    if (r->write_failed)
        write_blocks(r, from, to);
}

/* The whole story; what it came to. */
static expect play(injector *in, bool direct, const char *what)
{
    run r = {.in = in, .shape = rig_shape(N_LAYERS, 1, 64)};
    r.source = rig_source_of(&r.shape);
    snprintf(r.what, sizeof r.what, "%s", what);
    kvd_spill_options o;
    kvd__spill_defaults(&o);
    o.dir = rig_dir;
    o.max_blocks = N_FIRST;
    o.segment_blocks = 3;
    o.write_blocks = 4;
    o.direct = direct;
    o.ops = &faulty;
    o.ops_ctx = in;
    kvd_ledger ledger;
    kvd_error err;
    kvd__ledger_init(&ledger, 0);
    int rc = kvd__spill_create(&r.sp, &r.shape, &o, &ledger, &err);
    for (int c = 0; c < N_CALLS; c++)
        in->created[c] = atomic_load(&in->n[c]);
    if (!rc) {
        write_twice(&r, 0, N_FIRST - 1);
        int64_t n = grow(&r);
        write_twice(&r, N_FIRST - 1, n);
        read_blocks(&r, N_BLOCKS);
        if (!r.read_code) {
            kvd__spill_drop(r.sp, 3);
            r.source.generation = 1;
            write_twice(&r, 3, n);
            read_blocks(&r, 3);
        }
    }
    check(!rc || (!r.sp && rc == KVD_E_IO && err.code == rc && err.message[0]), "%s: create: %d", what, rc);
    if (rc && in->f.call == RESERVE && in->f.error != EIO)
        assert_int_equal(err.need_bytes, kvd__spill_file_bytes(&r.shape, &o));
    kvd__spill_destroy(&r.sp);
    check(rig_ledger_empty(&ledger), "%s: memory remains", what);
    check(rig_dir_entries() == 0, "%s: a file remains", what);
    free(r.source.block);
    return rc                           ? CREATE_FAILS
           : r.read_code == KVD_E_CHECK ? READ_CHECK
           : r.read_code                ? READ_FAILS
           : r.write_failed             ? WRITE_FAILS
                                        : FINE;
}

/* ---- tests -------------------------------------------------------------------------- */

static void describe(char *out, size_t n, const fault *f, int64_t first, bool for_good, bool direct)
{
    snprintf(out, n, "%s %lld%s, way %d, errno %d, O_DIRECT %d", call_names[f->call], (long long)first,
             for_good ? " and on" : "", f->way, f->error, direct);
}

static void one_fault_anywhere(void **state)
{
    int64_t n_runs = 0, n_hits[N_FAULTS] = {0};
    for (int k = 0; k < N_FAULTS; k++) {
        const fault *f = &faults[k];
        for (int64_t at = 1;; at++, n_runs++) {
            injector in = {.f = *f, .first = at, .last = at};
            bool direct = (at / 2 + k) % 2; /* half of them each */
            char what[120];
            describe(what, sizeof what, f, at, false, direct);
            expect got = play(&in, direct, what);
            if (!in.n_hits) {
                check(got == FINE, "%s: %d without a fault", what, got);
                break;
            }
            n_hits[k]++;
            expect want = at <= in.created[f->call] && f->expect != FINE ? CREATE_FAILS : f->expect;
            check(got == want, "%s: came to %d, not %d", what, got, want);
        }
    }
    for (int k = 0; k < N_FAULTS; k++)
        check(n_hits[k] > 0, "fault %d never happened", k);
    print_message("%lld runs\n", (long long)n_runs);
}

/* A disk that stays full, that stays dead: the same promises. (Interrupted for good is
 * no case: a call that is never let through ends with the process.) */
static void from_then_on(void **state)
{
    for (int k = 0; k < N_FAULTS; k++) {
        const fault *f = &faults[k];
        for (int64_t at = 1; f->error != EINTR; at += 1 + at / 3) {
            injector in = {.f = *f, .first = at, .last = INT64_MAX};
            bool direct = (at + k) % 2;
            char what[120];
            describe(what, sizeof what, f, at, true, direct);
            expect got = play(&in, direct, what);
            if (!in.n_hits)
                break;
            check(f->expect == FINE || got != FINE, "%s: nobody noticed", what);
        }
    }
}

/* What a file system lacks is done without. */
static void poor_file_systems(void **state)
{
    for (int k = 0; k < 32; k++) {
        injector in = {.f.call = N_CALLS, .no_tmpfile = k & 1, .no_direct_open = k & 2, .no_direct_io = k & 4,
                       .taken_names = (k & 9) == 9};
        char what[40];
        snprintf(what, sizeof what, "poor file system %d", k);
        expect got = play(&in, k & 16, what);
        check(got == FINE, "%s: came to %d", what, got);
    }
}

static void kinds_of_memory(void **state)
{
    static const long types[] = {0x01021994, 0x858458f6L, (int)0x858458f6u};
    for (int k = 0; k < 3; k++) {
        injector in = {.f.call = N_CALLS, .fs_type = types[k]};
        kvd_kv_shape s = rig_shape(1, 1, 8);
        kvd_spill_options o;
        kvd__spill_defaults(&o);
        o.dir = rig_dir;
        o.max_blocks = 1;
        o.ops = &faulty;
        o.ops_ctx = &in;
        kvd_ledger l;
        kvd_spill *sp = NULL;
        kvd__ledger_init(&l, 0);
        assert_int_equal(kvd__spill_create(&sp, &s, &o, &l, NULL), KVD_E_UNSUPPORTED);
        assert_int_equal(in.n[OPEN], 0); /* refused before anything was made */
        assert_true(rig_ledger_empty(&l));
    }
    injector in = {.f.call = N_CALLS, .fs_type = -1}; /* fstatfs failed: let it come */
    assert_int_equal(play(&in, true, "unknown file system"), FINE);
}

/* Above RLIMIT_FSIZE the kernel sends SIGXFSZ, which kills: it is refused before. */
static void file_size_limit(void **state)
{
    pid_t pid = fork();
    if (!pid) {
        struct rlimit limit = {100000, 100000};
        kvd_kv_shape s = rig_shape(4, 1, 64);
        kvd_spill_options o;
        kvd__spill_defaults(&o);
        o.dir = rig_dir;
        o.max_blocks = 10;
        kvd_ledger l;
        kvd_error err;
        kvd_spill *sp = NULL;
        kvd__ledger_init(&l, 0);
        setrlimit(RLIMIT_FSIZE, &limit);
        int rc = kvd__spill_create(&sp, &s, &o, &l, &err);
        _exit(rc == KVD_E_IO && err.need_bytes == 40 * 4096 && rig_ledger_empty(&l) ? 0 : 1);
    }
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    assert_int_equal(rig_dir_entries(), 0);
}

/* Linked with --wrap=pthread_create. */
static _Atomic int threads_left = INT32_MAX;
int __real_pthread_create(pthread_t *t, const pthread_attr_t *a, void *(*fn)(void *), void *arg);
int __wrap_pthread_create(pthread_t *t, const pthread_attr_t *a, void *(*fn)(void *), void *arg);
int __wrap_pthread_create(pthread_t *t, const pthread_attr_t *a, void *(*fn)(void *), void *arg)
{
    return threads_left-- > 0 ? __real_pthread_create(t, a, fn, arg) : EAGAIN;
}

static void no_thread(void **state)
{
    for (int n = 0; n < 4; n++) {
        kvd_kv_shape s = rig_shape(1, 1, 8);
        kvd_spill_options o;
        kvd__spill_defaults(&o);
        o.dir = rig_dir;
        o.max_blocks = 4;
        o.n_readers = 3;
        kvd_ledger l;
        kvd_error err;
        kvd_spill *sp = NULL;
        sigset_t before, after;
        kvd__ledger_init(&l, 0);
        pthread_sigmask(SIG_SETMASK, NULL, &before);
        threads_left = n;
        assert_int_equal(kvd__spill_create(&sp, &s, &o, &l, &err), n < 3 ? KVD_E_NOMEM : 0);
        threads_left = INT32_MAX;
        pthread_sigmask(SIG_SETMASK, NULL, &after);
        assert_true(!sigismember(&after, SIGTERM) && sigismember(&before, SIGINT) == sigismember(&after, SIGINT));
        kvd__spill_destroy(&sp);
        assert_true(rig_ledger_empty(&l) && rig_dir_entries() == 0);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_fault_anywhere), cmocka_unit_test(from_then_on),    cmocka_unit_test(poor_file_systems),
        cmocka_unit_test(kinds_of_memory),    cmocka_unit_test(file_size_limit), cmocka_unit_test(no_thread),
    };
    return rig_run_tests(tests);
}
