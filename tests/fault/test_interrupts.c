/* Sessions on disk among signals and forks: a handler without SA_RESTART runs at every
 * call of the spill and in the middle of all of them, every kind of call comes back with
 * EINTR, and children are forked while a pass reads. Tokens and receipt are those of
 * policy full, the disk tier is not given up, and the folder is empty at every moment.
 *
 * Nothing is timed: signals are sent by the calls themselves; a timer runs besides, and
 * how often it fires decides nothing. */
#include "../unit/tiny.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <sys/time.h>
#include <sys/wait.h>

#include "../unit/spill_rig.h"
#include "base/pool.h"

#if defined(__SANITIZE_THREAD__)
#define UNDER_TSAN
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define UNDER_TSAN
#endif
#endif

static const char *const families[] = {"llama", "gemma3", "window"};
enum { N_FAMILIES = 3, N_PROMPT = 120, N_NEW = 24 };

/* ---- a generation --------------------------------------------------------------------- */

typedef struct {
    char receipt[33];
    int32_t tokens[N_NEW];
    kvd_session_stats stats;
} outcome;

static kvd_model *load(const char *family, int n_threads)
{
    kvd_model_options mo;
    kvd_model_options_defaults(&mo);
    mo.n_threads = n_threads;
    mo.chunk_tokens = 16;
    return tiny_load(family, &mo);
}

static kvd_session_options disk_options(void)
{
    kvd_session_options so;
    kvd_session_options_defaults(&so);
    so.evict_to = KVD_EVICT_DISK;
    so.spill_dir = rig_dir;
    so.kv_tokens = 16;
    return so;
}

static void prompt_of(const kvd_model *m, int32_t *ids)
{
    for (int i = 0; i < N_PROMPT; i++)
        ids[i] = (int32_t)((i * 7919 + i / 3) % m->config.n_vocab);
}

/* The answer of s, which the caller frees. */
static outcome generate(kvd_model *m, kvd_session *s)
{
    int32_t ids[N_PROMPT];
    kvd_generate_options o;
    kvd_result r;
    kvd_error err = {0};
    outcome x = {.receipt = ""};
    kvd_generate_options_defaults(&o);
    o.max_tokens = N_NEW;
    o.ignore_end = true;
    prompt_of(m, ids);
    check(kvd_generate(s, ids, N_PROMPT, &o, &r, &err) == 0, "%s", err.message);
    assert_int_equal(r.n_tokens, N_NEW);
    memcpy(x.tokens, r.tokens, sizeof x.tokens);
    memcpy(x.receipt, r.receipt, sizeof x.receipt);
    kvd_session_get_stats(s, &x.stats);
    kvd_result_free(&r);
    return x;
}

static outcome reference_of(kvd_model *m)
{
    kvd_session_options so;
    kvd_session_options_defaults(&so);
    so.policy = KVD_POLICY_FULL;
    kvd_session *s = tiny_session(m, &so);
    outcome x = generate(m, s);
    kvd_session_free(&s);
    return x;
}

static void check_outcome(const outcome *got, const outcome *want, const char *family)
{
    check(!strcmp(got->receipt, want->receipt), "%s: receipt %s, policy full has %s", family, got->receipt, want->receipt);
    assert_memory_equal(got->tokens, want->tokens, sizeof want->tokens);
    check(!got->stats.disk_error, "%s: given up: %s", family, got->stats.disk_error);
    assert_true(got->stats.disk && got->stats.disk_read_bytes > got->stats.disk_written_bytes && got->stats.disk_written_bytes > 0);
    assert_int_equal(got->stats.recomputed_tokens, 0);
    assert_int_equal(rig_dir_entries(), 0);
}

/* ---- signals ---------------------------------------------------------------------------- */

static pthread_t main_thread;
static _Atomic int64_t n_signals, n_elsewhere;

static void on_signal(int sig)
{
    (void)sig;
    atomic_fetch_add(&n_signals, 1);
    atomic_fetch_add(&n_elsewhere, !pthread_equal(pthread_self(), main_thread));
}

/* Signals go to the main thread, whoever sends them. */
static void catch_signal(int sig, struct sigaction *old)
{
    struct sigaction sa = {.sa_handler = on_signal}; /* no SA_RESTART */
    main_thread = pthread_self();
    atomic_store(&n_signals, 0);
    atomic_store(&n_elsewhere, 0);
    sigaction(sig, &sa, old);
}

typedef enum call { OPEN, FS_TYPE, RESERVE, PREAD, PWRITE, WRITE_BACK, FORGET, N_CALLS } call;
static _Atomic int64_t n_calls[N_CALLS];

/* A signal at every call; of each kind all but every third are interrupted. */
static bool interrupted(call c)
{
    pthread_kill(main_thread, SIGUSR1);
    errno = EINTR;
    return atomic_fetch_add(&n_calls[c], 1) % 3 != 2;
}

static int loud_open(void *ctx, int dir_fd, const char *path, int flags)
{
    return interrupted(OPEN) ? -1 : kvd__spill_system.open(ctx, dir_fd, path, flags);
}

static long loud_fs_type(void *ctx, int fd) { return interrupted(FS_TYPE) ? -1 : kvd__spill_system.fs_type(ctx, fd); }

static int loud_reserve(void *ctx, int fd, off_t bytes)
{
    return interrupted(RESERVE) ? -1 : kvd__spill_system.reserve(ctx, fd, bytes);
}

static ssize_t loud_pread(void *ctx, int fd, void *buf, size_t n, off_t at)
{
    return interrupted(PREAD) ? -1 : kvd__spill_system.pread(ctx, fd, buf, n, at);
}

static ssize_t loud_pwrite(void *ctx, int fd, const void *buf, size_t n, off_t at)
{
    return interrupted(PWRITE) ? -1 : kvd__spill_system.pwrite(ctx, fd, buf, n, at);
}

static int loud_write_back(void *ctx, int fd, off_t at, off_t n)
{
    return interrupted(WRITE_BACK) ? -1 : kvd__spill_system.write_back(ctx, fd, at, n);
}

static int loud_forget(void *ctx, int fd, off_t at, off_t n)
{
    return interrupted(FORGET) ? -1 : kvd__spill_system.forget(ctx, fd, at, n);
}

static const kvd_spill_ops loud = {loud_open, loud_fs_type, loud_reserve, loud_pread, loud_pwrite, loud_write_back, loud_forget};

static void a_signal_at_every_call(void **state)
{
    (void)state;
    struct sigaction old;
    for (int f = 0; f < N_FAMILIES; f++) {
        kvd_model *m = load(families[f], 2);
        outcome want = reference_of(m);
        kvd_session_options so = disk_options();
        kvd_session *s = tiny_session(m, &so);
        s->spill_ops = &loud;
        for (int c = 0; c < N_CALLS; c++)
            atomic_store(&n_calls[c], 0);
        catch_signal(SIGUSR1, &old);
        outcome got = generate(m, s);
        sigaction(SIGUSR1, &old, NULL);
        check_outcome(&got, &want, families[f]);
        for (int c = 0; c < N_CALLS; c++)
            check(atomic_load(&n_calls[c]) >= (c == FORGET ? 2 : 3), "%s: call %d was interrupted %lld times", families[f], c,
                  (long long)atomic_load(&n_calls[c]));
        assert_true(atomic_load(&n_signals) > 10);
        assert_int_equal(atomic_load(&n_elsewhere), 0);
        kvd_session_free(&s);
        tiny_free(&m);
    }
}

/* Signals in the middle of calls, of waits and of the computation. */
static void a_timer_that_does_not_rest(void **state)
{
    (void)state;
    struct sigaction old;
    struct itimerval often = {{0, 200}, {0, 200}}, off = {{0, 0}, {0, 0}};
    for (int f = 0; f < N_FAMILIES; f++) {
        kvd_model *m = load(families[f], 1); /* the only thread that takes them is this one */
        outcome want = reference_of(m);
        kvd_session_options so = disk_options();
        catch_signal(SIGALRM, &old);
        setitimer(ITIMER_REAL, &often, NULL);
        for (int round = 0; round < 3 || (atomic_load(&n_signals) < 50 && round < 500); round++) {
            kvd_session *s = tiny_session(m, &so);
            outcome got = generate(m, s);
            check_outcome(&got, &want, families[f]);
            kvd_session_free(&s);
        }
        setitimer(ITIMER_REAL, &off, NULL);
        sigaction(SIGALRM, &old, NULL);
        assert_true(atomic_load(&n_signals) >= 50);
        assert_int_equal(atomic_load(&n_elsewhere), 0);
        tiny_free(&m);
    }
}

/* ---- forks --------------------------------------------------------------------------------- */

static void wait_for(pid_t pid, const char *what)
{
    int status;
    assert_true(pid > 0);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    check(WIFEXITED(status) && WEXITSTATUS(status) == 0, "%s: the child's status is %#x", what, (unsigned)status);
}

typedef struct {
    kvd_model *m;
    kvd_session *s;
    int64_t calls, n_children;
} forker;

/* In the middle of a pass: the child frees what it was given, and ends. */
static int fork_in_a_pass(void *ctx, int64_t done, int64_t total, int64_t rows, int64_t recomputed)
{
    forker *k = ctx;
    (void)done, (void)total, (void)rows, (void)recomputed;
    if (!k->s->spill || k->calls++ % 23)
        return 0;
    pid_t pid = fork();
    if (!pid) {
        kvd_session_free(&k->s);
        bool empty = atomic_load(&k->m->ledger->now[KVD_ACC_KV]) == 0 && atomic_load(&k->m->ledger->now[KVD_ACC_CHECKPOINT]) == 0;
        kvd_model_free(&k->m);
        _exit(empty && !k->s && !k->m ? 0 : 1);
    }
    k->n_children++;
    wait_for(pid, "fork in a pass");
    return 0;
}

static void children_in_the_middle(void **state)
{
    (void)state;
    for (int f = 0; f < N_FAMILIES; f++)
        for (int n_threads = 1; n_threads <= 2; n_threads++) {
            kvd_model *m = load(families[f], n_threads);
            outcome want = reference_of(m);
            kvd_session_options so = disk_options();
            kvd_session *s = tiny_session(m, &so);
            forker k = {.m = m, .s = s};
            kvd_session_set_progress(s, fork_in_a_pass, &k);
            outcome got = generate(m, s);
            check_outcome(&got, &want, families[f]);
            assert_true(k.n_children > 3);
            kvd_session_free(&s);
            tiny_free(&m);
        }
}

/* Logits of the tokens after the prompt: the same in parent and child? */
static bool feeds_like(kvd_session *s, const int32_t *ids, int64_t from, int64_t to, const float *want, int64_t n_vocab)
{
    bool same = true;
    for (int64_t i = from; i < to; i++) {
        const float *logits = NULL;
        same &= kvd_session_feed(s, ids + i, 1, &logits, NULL) == 0 && logits &&
                !memcmp(logits, want + i * n_vocab, (size_t)n_vocab * sizeof *logits);
    }
    return same;
}

/* Between two passes: with one thread the child goes on, in a file of its own, while the
 * parent's stays as it was; with more it is told that it can not. */
static void a_child_that_goes_on(void **state)
{
    (void)state;
#ifdef UNDER_TSAN
    print_message("SKIPPED: ThreadSanitizer allows no threads after fork\n");
#else
    for (int f = 0; f < N_FAMILIES; f++)
        for (int n_threads = 1; n_threads <= 2; n_threads++) {
            kvd_model *m = load(families[f], n_threads);
            int64_t n_vocab = m->config.n_vocab;
            int32_t ids[N_PROMPT];
            float *want = malloc((size_t)(N_PROMPT * n_vocab) * sizeof *want);
            kvd_session_options so = disk_options(), full;
            kvd_error err = {0};
            kvd_session_options_defaults(&full);
            prompt_of(m, ids);
            kvd_session *s = tiny_session(m, &full);
            for (int i = 0; i < N_PROMPT; i++) {
                const float *logits;
                assert_int_equal(kvd_session_feed(s, ids + i, 1, &logits, &err), 0);
                memcpy(want + i * n_vocab, logits, (size_t)n_vocab * sizeof *want);
            }
            kvd_session_free(&s);
            s = tiny_session(m, &so);
            assert_int_equal(kvd_session_feed(s, ids, 80, NULL, &err), 0);
            assert_non_null(s->spill);
            pid_t pid = fork();
            if (!pid) {
                bool good;
                kvd_rates r;
                if (n_threads > 1)
                    good = kvd_session_feed(s, ids + 80, 1, NULL, NULL) == KVD_E_ARG && s->n == 80 && kvd_calibrate(m, &so, &r, NULL) == KVD_E_ARG;
                else {
                    kvd_session_stats st;
                    good = feeds_like(s, ids, 80, N_PROMPT, want, n_vocab);
                    kvd_session_get_stats(s, &st);
                    good = good && st.disk && !st.disk_error && kvd__spill_is_ours(s->spill);
                }
                kvd_session_free(&s);
                kvd_model_free(&m);
                _exit(good && rig_dir_entries() == 0 ? 0 : 1);
            }
            bool good = feeds_like(s, ids, 80, N_PROMPT, want, n_vocab); /* while the child works, too */
            wait_for(pid, families[f]);
            assert_true(good);
            kvd_session_stats st;
            kvd_session_get_stats(s, &st);
            assert_true(st.disk && !st.disk_error && st.recomputed_tokens == 0);
            assert_int_equal(rig_dir_entries(), 0);
            kvd_session_free(&s);
            tiny_free(&m);
            free(want);
        }
#endif
}

int main(void)
{
    cmocka_set_test_filter(getenv("KVD_TEST")); /* a pattern: only these */
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_signal_at_every_call),
        cmocka_unit_test(a_timer_that_does_not_rest),
        cmocka_unit_test(children_in_the_middle),
        cmocka_unit_test(a_child_that_goes_on),
    };
    return rig_run_tests(tests);
}
