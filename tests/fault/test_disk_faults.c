/* Sessions on disk when the disk fails: every call of the spill fails at its n-th time,
 * once or from then on, in every way that this kind has; and so does every allocation.
 *
 *   bits      what a feed hands out is policy full's, whatever happened before
 *   errors    none where recomputing fits the budget; else KVD_E_BUDGET. Refused with
 *             KVD_E_IO: only the first feed, which had not begun
 *   after     the tokens are those of before; with room, the session goes on
 *   remains   no memory
 */
#include "../unit/tiny.h"

#include <errno.h>

#include "gen/disk.h"
#include "kv/spill.h"

enum { N_TOKENS = 300, FORK = 60, RECORD = 4096 };

/* ---- faults ------------------------------------------------------------------------ */

typedef enum call { OPEN, RESERVE, PREAD, PWRITE, WRITE_BACK, N_CALLS } call;
static const char *const call_names[] = {"open", "reserve", "pread", "pwrite", "write_back"};
typedef enum way { ERROR, NOTHING, FLIP, MISPLACE, LOSE } way;

typedef struct fault {
    call call;
    way way;
    int error;
} fault;

static const fault faults[] = {
    {OPEN, ERROR, EACCES},  {OPEN, ERROR, EMFILE},   {RESERVE, ERROR, ENOSPC}, {PREAD, ERROR, EIO},   {PREAD, NOTHING, 0},
    {PREAD, FLIP, 0},       {PREAD, MISPLACE, 0},    {PWRITE, ERROR, ENOSPC},  {PWRITE, ERROR, EIO},  {PWRITE, NOTHING, 0},
    {PWRITE, LOSE, 0},      {WRITE_BACK, ERROR, EIO},
};
enum { N_FAULTS = sizeof faults / sizeof faults[0] };

typedef struct injector {
    fault f;
    int64_t first, last; /* times of the call that fail, from 1 */
    _Atomic int64_t n[N_CALLS], n_hits;
} injector;

static bool hit(injector *i, call c)
{
    int64_t n = atomic_fetch_add(&i->n[c], 1) + 1;
    if (c != i->f.call || n < i->first || n > i->last)
        return false;
    atomic_fetch_add(&i->n_hits, 1);
    errno = i->f.error;
    return true;
}

static int faulty_open(void *ctx, int dir_fd, const char *path, int flags)
{
    return hit(ctx, OPEN) ? -1 : kvd__spill_system.open(NULL, dir_fd, path, flags);
}

static long faulty_fs_type(void *ctx, int fd)
{
    (void)ctx;
    return kvd__spill_system.fs_type(NULL, fd);
}

static int faulty_reserve(void *ctx, int fd, off_t bytes)
{
    return hit(ctx, RESERVE) ? -1 : kvd__spill_system.reserve(NULL, fd, bytes);
}

static ssize_t faulty_pread(void *ctx, int fd, void *buf, size_t n, off_t at)
{
    injector *i = ctx;
    if (!hit(i, PREAD))
        return kvd__spill_system.pread(NULL, fd, buf, n, at);
    if (i->f.way == ERROR)
        return -1;
    if (i->f.way == NOTHING)
        return 0;
    ssize_t got = kvd__spill_system.pread(NULL, fd, buf, n, i->f.way == MISPLACE ? at + RECORD : at);
    if (i->f.way == FLIP && got > 0)
        ((char *)buf)[77] ^= 4;
    return got;
}

static ssize_t faulty_pwrite(void *ctx, int fd, const void *buf, size_t n, off_t at)
{
    injector *i = ctx;
    if (!hit(i, PWRITE))
        return kvd__spill_system.pwrite(NULL, fd, buf, n, at);
    return i->f.way == ERROR ? -1 : i->f.way == NOTHING ? 0 : (ssize_t)n;
}

static int faulty_write_back(void *ctx, int fd, off_t at, off_t n)
{
    return hit(ctx, WRITE_BACK) ? -1 : kvd__spill_system.write_back(NULL, fd, at, n);
}

static int faulty_forget(void *ctx, int fd, off_t at, off_t n)
{
    (void)ctx;
    return kvd__spill_system.forget(NULL, fd, at, n);
}

static const kvd_spill_ops faulty = {faulty_open,   faulty_fs_type,    faulty_reserve, faulty_pread,
                                     faulty_pwrite, faulty_write_back, faulty_forget};

/* ---- two texts that part, by policy full -------------------------------------------------- */

typedef struct {
    int32_t ids[N_TOKENS];
    float *logits;
    int64_t n_vocab;
} text;

typedef struct {
    kvd_model *m;
    text t[2];
} rig;

static int take_row(void *ctx, int64_t pos, const float *logits)
{
    text *t = ctx;
    memcpy(t->logits + pos * t->n_vocab, logits, (size_t)t->n_vocab * sizeof *logits);
    return 0;
}

static rig make_rig(const char *name)
{
    rig r = {0};
    kvd_model_options mo;
    kvd_session_options so;
    kvd_model_options_defaults(&mo);
    kvd_session_options_defaults(&so);
    mo.n_threads = 1; /* where the faults are there are no other threads than the spill's */
    mo.chunk_tokens = 48;
    r.m = tiny_load(name, &mo);
    so.policy = KVD_POLICY_FULL;
    for (int i = 0; i < 2; i++) {
        text *t = &r.t[i];
        kvd_session *s = tiny_session(r.m, &so);
        kvd_error err = {0};
        t->n_vocab = r.m->config.n_vocab;
        t->logits = malloc(sizeof(float) * N_TOKENS * (size_t)t->n_vocab);
        for (int k = 0; k < N_TOKENS; k++)
            t->ids[k] = (int32_t)((k * 7919 + k / 3 + (k >= FORK ? i * 101 : 0)) % t->n_vocab);
        check(kvd_session_feed_all(s, t->ids, N_TOKENS, N_TOKENS, take_row, t, &err) == 0, "%s", err.message);
        kvd_session_free(&s);
    }
    return r;
}

static void free_rig(rig *r)
{
    free(r->t[0].logits);
    free(r->t[1].logits);
    tiny_free(&r->m);
}

/* ---- a story -------------------------------------------------------------------------------- */

typedef struct {
    rig *r;
    kvd_session *s;
    int text;
    bool recompute_fits;
    int64_t fail_after; /* so many allocations; 0: none fails */
    const char *what;
    int64_t rows;
    int refused;   /* the code of the last feed that failed */
    int64_t n_refused;
} story;

static int check_row(void *ctx, int64_t pos, const float *logits)
{
    story *y = ctx;
    const text *t = &y->r->t[y->text];
    check(!memcmp(logits, t->logits + pos * t->n_vocab, (size_t)t->n_vocab * sizeof *logits), "%s: WRONG BITS at position %lld", y->what,
          (long long)pos);
    y->rows++;
    return 0;
}

/* Feed n, once more after a failure that allows it. */
static void feed(story *y, int64_t n)
{
    for (int tries = 0; tries < 2; tries++) {
        kvd_session *s = y->s;
        kvd_ledger *l = y->r->m->ledger;
        kvd_error err = {0};
        int64_t before = s->n, passes = s->stats.passes;
        y->rows = 0;
        int rc = kvd_session_feed_all(s, y->r->t[y->text].ids + before, n, n, check_row, y, &err);
        assert_true(atomic_load(&l->context_peak) <= l->budget_bytes);
        if (!rc) {
            check(s->n == before + n && y->rows == n, "%s: %lld rows of %lld", y->what, (long long)y->rows, (long long)n);
            return;
        }
        y->refused = rc;
        y->n_refused++;
        assert_int_equal(s->n, before);
        assert_int_equal(err.code, rc);
        if (rc == KVD_E_NOMEM) {
            check(y->fail_after, "%s: %s", y->what, err.message);
            l->fail_at = 0; /* memory is there again */
        } else if (rc == KVD_E_IO) {
            check(passes == 0 && before == 0, "%s: refused in the middle: %s", y->what, err.message);
            l->budget_bytes = tries ? l->budget_bytes : INT64_MAX; /* all fits then */
        } else {
            check(rc == KVD_E_BUDGET && !y->recompute_fits && err.need_bytes > l->budget_bytes, "%s: %s", y->what, err.message);
            kvd_session_stats st;
            kvd_session_get_stats(s, &st);
            assert_non_null(st.disk_error);
            l->budget_bytes = INT64_MAX; /* somebody gives it more */
        }
    }
    fail_msg("%s: does not recover, %d", y->what, y->refused);
}

static void play(story *y, int64_t budget, const injector *in)
{
    kvd_session_options so;
    kvd_session_options_defaults(&so);
    so.evict_to = KVD_EVICT_DISK;
    so.spill_dir = getenv("KVD_TINY") ? getenv("KVD_TINY") : ".";
    y->s = tiny_session(y->r->m, &so);
    y->text = 0;
    y->r->m->ledger->budget_bytes = budget;
    atomic_store(&y->r->m->ledger->context_peak, 0);
    if (in) {
        y->s->spill_ops = &faulty;
        y->s->spill_ops_ctx = (void *)(uintptr_t)in;
    }
    kvd_ledger *l = y->r->m->ledger;
    l->fail_at = y->fail_after ? atomic_load(&l->n_allocs) + y->fail_after : 0;
    feed(y, 150);
    for (int i = 0; i < 6; i++)
        feed(y, 1);
    kvd_error err = {0};
    assert_int_equal(kvd_session_rewind(y->s, FORK + 3, &err), 0);
    assert_int_equal(kvd_session_rewind(y->s, FORK, &err), 0);
    y->text = 1;
    feed(y, 40);
    for (int i = 0; i < 5; i++) /* past the 256 that the file was made for */
        feed(y, 37);
    kvd_session_free(&y->s);
    check_no_context(y->r->m);
    y->r->m->ledger->budget_bytes = INT64_MAX;
}

/* The budget with which n tokens run on disk, and one that suffices to recompute, too. */
static int64_t budget_of(const rig *r, bool roomy)
{
    kvd_session_options so;
    kvd_plan p;
    kvd_kv_shape shape;
    kvd_session_options_defaults(&so);
    kvd_plan_session(r->m, &so, N_TOKENS, N_TOKENS, 0, &p);
    kvd__model_kv_shape(r->m, KVD_KV_F16, KVD_KV_F32, &shape);
    int64_t need = kvd__disk_need(r->m, &shape, N_TOKENS);
    check(need < p.full_bytes && need < p.least_bytes, "the disk needs %lld, recompute %lld, full %lld", (long long)need,
          (long long)p.least_bytes, (long long)p.full_bytes);
    return roomy ? max64(need, p.least_bytes) : need;
}

static void every_call_fails(void **state)
{
    (void)state;
    int64_t n_hits = 0, n_given_up = 0;
    rig r = make_rig("llama");
    for (int i = 0; i < N_FAULTS * 4; i++) {
        bool roomy = i % 2, forever = i / 2 % 2, more = true;
        for (int64_t n = 1; more && (!forever || n < 32); n += 1 + n / 2) {
            char what[120];
            injector in = {.f = faults[i / 4], .first = n, .last = forever ? INT64_MAX : n};
            snprintf(what, sizeof what, "%s, way %d, errno %d, %s time %lld%s", call_names[in.f.call], in.f.way, in.f.error,
                     roomy ? "roomy," : "tight,", (long long)n, forever ? " and on" : "");
            story y = {.r = &r, .recompute_fits = roomy, .what = what};
            play(&y, budget_of(&r, roomy), &in);
            more = atomic_load(&in.n_hits) > 0;
            n_hits += more;
            n_given_up += y.refused == KVD_E_BUDGET;
            check(!y.n_refused || more, "%s: refused without a fault", what);
        }
    }
    free_rig(&r);
    check(n_hits > 100 && n_given_up > 20, "%lld faults hit, %lld sessions outgrew their budget", (long long)n_hits, (long long)n_given_up);
}

static void every_allocation_fails(void **state)
{
    (void)state;
    static const char *const names[] = {"llama", "window"};
    for (int k = 0; k < 2; k++) {
        rig r = make_rig(names[k]);
        bool more = true;
        int64_t n_failed = 0;
        kvd_session_options so;
        kvd_plan p;
        kvd_session_options_defaults(&so);
        kvd_plan_session(r.m, &so, N_TOKENS, N_TOKENS, 0, &p);
        for (int64_t n = 1; more; n += 1 + n / 10) {
            char what[80];
            snprintf(what, sizeof what, "%s, allocation %lld", names[k], (long long)n);
            story y = {.r = &r, .recompute_fits = true, .fail_after = n, .what = what};
            play(&y, p.least_bytes * 5 / 4, NULL);
            more = y.n_refused > 0;
            n_failed += more;
            r.m->ledger->fail_at = 0;
        }
        check(n_failed > 15, "%lld failures", (long long)n_failed);
        free_rig(&r);
    }
}

int main(void)
{
    cmocka_set_test_filter(getenv("KVD_TEST")); /* a pattern: only these */
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_call_fails),
        cmocka_unit_test(every_allocation_fails),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
