/* tests: a session under watch, for the tests of sessions (test_session_*.c): every feed
 * is held against the reference's logits, and the ledger's peak against the plan's, to
 * the byte. Whatever is evicted, rebuilt, cut, parked, refused, cancelled, and however
 * the work is shared out, both hold. */
#ifndef KVD_TESTS_SESSION_WATCH_H
#define KVD_TESTS_SESSION_WATCH_H

#include "reference.h"

typedef struct {
    kvd_model *m;
    kvd_session *s;
    const reference *r;
    int64_t rows_seen;
    int64_t cancel_at, steps; /* progress calls; cancel_at -1: never */
    int64_t calls_rows, calls_recomputed;
    _Atomic bool done;
} watch;

static inline int count_progress(void *ctx, int64_t done, int64_t total, int64_t rows, int64_t recomputed)
{
    watch *w = ctx;
    check(done >= 0 && done < total && recomputed >= 0 && recomputed <= rows && total % rows == 0,
          "progress %lld of %lld, %lld rows, %lld recomputed", (long long)done, (long long)total, (long long)rows, (long long)recomputed);
    w->calls_rows = rows;
    w->calls_recomputed = recomputed;
    return w->steps++ == w->cancel_at;
}

static inline int check_row(void *ctx, int64_t pos, const float *logits)
{
    watch *w = ctx;
    same_row(w->r, pos, logits);
    w->rows_seen++;
    return 0;
}

/* What the planner says of the passes of a feed: their number, and the peak. */
static inline int foretell(const kvd_session *s, int64_t n, int64_t *passes, int64_t *peak, int64_t *recomputed, kvd_error *err)
{
    kvd_limits lim = kvd__session_limits(s);
    int64_t total = s->n + n, start = s->kv->start;
    int64_t others = atomic_load(&s->m->ledger->context_now) - kvd__kv_context_bytes(s->kv) - s->capacity * 4;
    *passes = *recomputed = 0;
    *peak = atomic_load(&s->m->ledger->context_now); /* until something is dropped */
    kvd_pass_plan p;
    for (int64_t at = s->n; at < total; at = p.n_before + p.n_new) {
        int rc = kvd__pass_plan(&s->shape, &lim, at, start, total - at, &p, err);
        if (rc)
            return rc;
        ++*passes;
        *peak = max64(*peak, p.bytes + others);
        *recomputed += p.recompute + max64(0, min64(s->n, p.n_before + p.n_new) - p.n_before);
        start = p.start;
    }
    return 0;
}

/* Feed the next n tokens and hold everything against the reference and the plan. */
static inline int feed(watch *w, int64_t n, int64_t n_logits)
{
    kvd_session *s = w->s;
    kvd_ledger *l = s->m->ledger;
    kvd_session_stats before, after;
    kvd_session_get_stats(s, &before);
    int64_t passes, peak, recomputed, old = s->n;
    kvd_error err = {0}, told = {0};
    int expected = foretell(s, n, &passes, &peak, &recomputed, &told);
    atomic_store(&l->context_peak, atomic_load(&l->context_now));
    const float *logits = NULL;
    w->rows_seen = 0;
    w->steps = 0;
    int rc = n_logits < 0 ? kvd_session_feed(s, w->r->ids + old, n, &logits, &err)
                          : kvd_session_feed_all(s, w->r->ids + old, n, n_logits, check_row, w, &err);
    kvd_session_get_stats(s, &after);
    assert_true(atomic_load(&l->context_peak) <= l->budget_bytes);
    assert_int_equal(atomic_load(&l->now[KVD_ACC_STREAM]), 0);
    assert_int_equal(atomic_load(&l->now[KVD_ACC_LAYER]), 0);
    if (rc) {
        assert_true(rc == KVD_E_CANCELLED || rc == expected);
        assert_int_equal(after.n_tokens, old);
        if (rc == KVD_E_BUDGET) { /* before any work */
            assert_int_equal(err.need_bytes, told.need_bytes);
            assert_int_equal(w->steps, 0);
            assert_int_equal(after.passes, before.passes);
            assert_int_equal(after.resident_tokens, before.resident_tokens);
        }
        return rc;
    }
    check(expected == 0, "fed although the plan says %s", told.message);
    assert_int_equal(after.n_tokens, old + n);
    assert_int_equal(after.resident_tokens + after.evicted_tokens, old + n);
    assert_int_equal(after.passes - before.passes, passes);
    assert_int_equal(after.recomputed_tokens - before.recomputed_tokens, recomputed);
    check(atomic_load(&l->context_peak) == peak, "peak %lld, planned %lld", (long long)atomic_load(&l->context_peak), (long long)peak);
    if (s->o.kv_tokens >= 0)
        assert_true(after.resident_tokens <= (s->o.kv_tokens ? s->o.kv_tokens + 15 : 0));
    if (logits)
        same_row(w->r, old + n - 1, logits);
    if (n_logits >= 0)
        assert_int_equal(w->rows_seen, n_logits);
    return 0;
}

static inline void rewind_to(watch *w, int64_t n)
{
    kvd_error err = {0};
    check(kvd_session_rewind(w->s, n, &err) == 0, "%s", err.message);
    assert_int_equal(kvd_session_tokens(w->s, NULL), n);
    assert_true(atomic_load(&w->m->ledger->now[KVD_ACC_CHECKPOINT]) <= kvd__checkpoint_bytes(&w->s->shape, n));
}

static inline kvd_model *load_default(int family, int n_threads)
{
    kvd_model_options mo;
    kvd_model_options_defaults(&mo);
    mo.n_threads = n_threads;
    mo.chunk_tokens = 32;
    return tiny_load(families[family], &mo);
}

#endif
