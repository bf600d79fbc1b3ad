/* tests: what the tests of the engine share. The tiny models are made by
 * tools/make_tiny_gguf.py into the folder that KVD_TINY names (tests/unit/meson.build
 * does both). A test may look into sessions, so the internal headers are here. */
#ifndef KVD_TESTS_TINY_H
#define KVD_TESTS_TINY_H

#include "check.h"

#include <unistd.h>

#include "base/rng.h"
#include "gen/session.h"
#include "kvd/kvd.h"

static uint64_t tiny_seed = 1;
static inline int64_t pick(int64_t n) { return (int64_t)(kvd__splitmix64(&tiny_seed) % (uint64_t)n); }
static inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

/* Path of a tiny model, borrowed until the next call; skips the test without. */
static inline const char *tiny_path(const char *name)
{
    static char path[512];
    const char *dir = getenv("KVD_TINY");
    snprintf(path, sizeof path, "%s/tiny_%s.gguf", dir ? dir : ".", name);
    if (access(path, R_OK)) {
        fprintf(stderr, "SKIP: no %s (KVD_TINY names the folder of tiny models)\n", path);
        skip();
    }
    return path;
}

/* options NULL: one thread. */
static inline kvd_model *tiny_load(const char *name, const kvd_model_options *options)
{
    kvd_model *m = NULL;
    kvd_model_options one, *o = &one;
    kvd_model_options_defaults(o);
    one.n_threads = 1;
    if (options)
        one = *options;
    kvd_error err = {0};
    int rc = kvd_model_load(&m, tiny_path(name), o, &err);
    check(rc == 0, "%s: %s", name, err.message);
    return m;
}

static inline kvd_session *tiny_session(kvd_model *m, const kvd_session_options *o)
{
    kvd_session *s = NULL;
    kvd_error err = {0};
    check(kvd_session_create(&s, m, o, &err) == 0, "%s", err.message);
    return s;
}

/* All context accounts are empty. */
static inline void check_no_context(const kvd_model *m)
{
    for (int a = 0; a < KVD_ACC_COUNT; a++)
        if (kvd__account_is_context((kvd_account)a))
            assert_int_equal(atomic_load(&m->ledger->now[a]), 0);
    assert_int_equal(atomic_load(&m->ledger->context_now), 0);
}

static inline void tiny_free(kvd_model **m)
{
    check_no_context(*m);
    kvd_model_free(m);
    assert_null(*m);
}

#endif
