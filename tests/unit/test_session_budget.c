/* Sessions and budgets: what the plan says is needed is what is needed, to the byte; what
 * is admitted is finished; and several hands on one budget. */
#include "session_watch.h"

#include <pthread.h>
#include <sched.h>

/* least_bytes runs the context however it is fed; a byte less is refused before any
 * work, with what would do. full_bytes keeps everything, a byte less does not. */
static void least_and_full_bytes_are_tight(void **state)
{
    (void)state;
    static const int64_t lengths[] = {1, 15, 16, 17, 100, 257, N_TOKENS};
    for (int f = 0; f < N_FAMILIES; f++) {
        kvd_model *m = load_default(f, 1);
        for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++)
            for (int limit = 0; limit < 3; limit++) {
                tiny_seed = (uint64_t)(f * 100 + limit) + i;
                int64_t n = lengths[i];
                kvd_session_options so;
                kvd_session_options_defaults(&so);
                so.kv_tokens = limit == 1 ? 20 : -1;
                so.policy = limit == 2 ? KVD_POLICY_FULL : KVD_POLICY_KV_DIRECT;
                kvd_plan plan, tight;
                kvd_plan_session(m, &so, n, n, 0, &plan);
                kvd_error err = {0};
                for (int64_t less = 0; less < 2; less++) {
                    assert_int_equal(kvd_memory_set_budget(m, plan.least_bytes - less, &err), 0);
                    kvd_plan_session(m, &so, n, n, plan.least_bytes - less, &tight);
                    assert_true(less ? tight.max_tokens < n : tight.max_tokens >= n);
                    watch w = {.m = m, .s = tiny_session(m, &so), .r = reference_of(f, so.kv_type, so.stream, 0), .cancel_at = -1};
                    kvd_session_set_progress(w.s, count_progress, &w);
                    int rc = 0;
                    while (!rc && w.s->n < n)
                        rc = feed(&w, pick(2) ? min64(n - w.s->n, 1 + pick(50)) : n - w.s->n, -1);
                    check(rc == (less ? KVD_E_BUDGET : 0), "%s, %lld tokens, limit %d: %d with %lld bytes", families[f], (long long)n,
                          limit, rc, (long long)(plan.least_bytes - less));
                    if (less) { /* in one call, what is needed is said */
                        rewind_to(&w, 0);
                        assert_int_equal(kvd_session_feed(w.s, w.r->ids, n, NULL, &err), KVD_E_BUDGET);
                        assert_int_equal(err.need_bytes, plan.least_bytes);
                        assert_int_equal(err.max_tokens, tight.max_tokens);
                    }
                    kvd_session_free(&w.s);
                }
                assert_int_equal(kvd_memory_set_budget(m, 0, &err), 0);
                if (so.kv_tokens >= 0)
                    continue;
                for (int64_t less = 0; less < 2; less++) {
                    if (less && plan.full_bytes == plan.least_bytes)
                        continue;
                    assert_int_equal(kvd_memory_set_budget(m, plan.full_bytes - less, &err), 0);
                    watch w = {.m = m, .s = tiny_session(m, &so), .r = reference_of(f, so.kv_type, so.stream, 0), .cancel_at = -1};
                    int rc = 0;
                    while (!rc && w.s->n < n)
                        rc = feed(&w, pick(2) ? min64(n - w.s->n, 1 + pick(50)) : n - w.s->n, -1);
                    kvd_session_stats st;
                    kvd_session_get_stats(w.s, &st);
                    assert_int_equal(rc, 0);
                    assert_true(less || st.evicted_tokens == 0);
                    if (less && !m->config.window)
                        assert_true(st.evicted_tokens > 0);
                    kvd_session_free(&w.s);
                }
                assert_int_equal(kvd_memory_set_budget(m, 0, &err), 0);
            }
        tiny_free(&m);
    }
}

/* What is admitted is finished: generation to T_max under budgets that just allow it;
 * one token more is refused before the first one, with the bytes and T_max. */
static void what_is_admitted_is_finished(void **state)
{
    (void)state;
    for (int f = 0; f < N_FAMILIES; f++)
        for (int limit = 0; limit < 3; limit++) {
            kvd_model *m = load_default(f, 1);
            kvd_session_options so;
            kvd_session_options_defaults(&so);
            so.kv_tokens = limit == 1 ? 17 : -1;
            so.policy = limit == 2 ? KVD_POLICY_FULL : KVD_POLICY_KV_DIRECT;
            const reference *r = reference_of(f, so.kv_type, so.stream, 0);
            kvd_plan plan, more;
            kvd_plan_session(m, &so, 30, 83, 0, &plan);
            kvd_plan_session(m, &so, 30, 83, plan.least_bytes, &more);
            int64_t t_max = more.max_tokens;
            assert_true(t_max >= 83 && t_max < m->config.n_ctx);
            kvd_plan_session(m, &so, 30, t_max + 1, 0, &more);
            assert_true(more.least_bytes > plan.least_bytes);
            kvd_generate_options o;
            kvd_generate_options_defaults(&o);
            o.ignore_end = true;
            kvd_error err = {0};
            kvd_result first, res;
            kvd_session *s = tiny_session(m, NULL);
            o.max_tokens = t_max - 30;
            assert_int_equal(kvd_generate(s, r->ids, 30, &o, &first, &err), 0);
            kvd_session_free(&s);
            assert_int_equal(kvd_memory_set_budget(m, plan.least_bytes, &err), 0);
            for (int way = 0; way < 3; way++) {
                atomic_store(&m->ledger->context_peak, 0);
                s = tiny_session(m, &so);
                o.max_tokens = way == 0 ? t_max - 29 : way == 1 ? t_max - 30 : -1;
                int rc = kvd_generate(s, r->ids, 30, &o, &res, &err);
                if (way == 0) {
                    assert_int_equal(rc, KVD_E_BUDGET);
                    assert_int_equal(err.need_bytes, more.least_bytes);
                    assert_int_equal(err.max_tokens, t_max);
                    assert_int_equal(atomic_load(&m->ledger->context_peak), 0);
                } else {
                    check(rc == 0, "%s, limit %d: %s", families[f], limit, err.message);
                    assert_int_equal(res.n_tokens, t_max - 30);
                    assert_int_equal(res.stop_reason, way == 1 ? KVD_STOP_LENGTH : KVD_STOP_CONTEXT);
                    assert_string_equal(res.receipt, first.receipt);
                    assert_true(atomic_load(&m->ledger->context_peak) <= plan.least_bytes);
                }
                kvd_result_free(&res);
                kvd_session_free(&s);
            }
            kvd_result_free(&first);
            tiny_free(&m);
        }
}

/* Two sessions under one budget, and a budget that moves between feeds. */
static void sessions_share_a_budget(void **state)
{
    (void)state;
    for (int f = 0; f < N_FAMILIES; f++) {
        tiny_seed = 77 + (uint64_t)f;
        kvd_model *m = load_default(f, 2);
        kvd_session_options so;
        kvd_session_options_defaults(&so);
        const reference *r = reference_of(f, so.kv_type, so.stream, 0);
        watch a = {.m = m, .s = tiny_session(m, &so), .r = r, .cancel_at = -1}, b = a;
        b.s = tiny_session(m, &so);
        kvd_plan plan;
        kvd_plan_session(m, &so, 200, 200, 0, &plan);
        kvd_error err = {0};
        assert_int_equal(kvd_memory_set_budget(m, plan.full_bytes + plan.least_bytes / 2, &err), 0);
        for (int step = 0; a.s->n < 180 || b.s->n < 180; step++) {
            assert_true(step < 400);
            watch *w = pick(2) ? &a : &b, *other = w == &a ? &b : &a;
            if (w->s->n >= 180)
                continue;
            int rc = feed(w, 1 + pick(9), pick(2) ? -1 : 1);
            if (rc) { /* the other one holds too much */
                assert_int_equal(rc, KVD_E_BUDGET);
                kvd_session_park(other->s);
                assert_int_equal(feed(w, 1, -1), 0);
            }
            if (pick(10) == 0) {
                int64_t now, peak, budget, want = plan.least_bytes + kvd__checkpoint_bytes(&a.s->shape, 200) + pick(plan.full_bytes);
                kvd_memory_context(m, &now, &peak, &budget);
                rc = kvd_memory_set_budget(m, want, &err);
                assert_int_equal(rc, now > want ? KVD_E_BUDGET : 0);
                if (rc) {
                    assert_int_equal(m->ledger->budget_bytes, budget);
                    kvd_session_park(a.s);
                    kvd_session_park(b.s);
                    assert_int_equal(kvd_memory_set_budget(m, want, &err), 0);
                }
            }
        }
        kvd_session_free(&a.s);
        assert_int_equal(atomic_load(&m->ledger->context_now), kvd__kv_context_bytes(b.s->kv) + b.s->capacity * 4);
        kvd_session_free(&b.s);
        tiny_free(&m);
    }
}

/* Other threads look at the model and move its budget while a session is fed. */
static void *meddle(void *arg)
{
    kvd_model *m = ((watch *)arg)->m;
    uint64_t seed = 5;
    while (!atomic_load(&((watch *)arg)->done)) {
        int64_t now, peak, budget, a, b;
        const char *name;
        bool context;
        kvd_model_info info;
        kvd_memory_context(m, &now, &peak, &budget);
        for (int i = 0; kvd_memory_account(m, i, &name, &context, &a, &b); i++)
            ;
        kvd_model_get_info(m, &info);
        kvd_memory_set_budget(m, kvd__splitmix64(&seed) % 3 ? now + (int64_t)(kvd__splitmix64(&seed) % 100000) : 0, NULL);
        int32_t *ids;
        int64_t n;
        if (kvd_tokenize(m, "the cache", 9, 0, &ids, &n, NULL) == 0)
            kvd_ids_free(ids);
        sched_yield();
    }
    return NULL;
}

static void others_meddle_meanwhile(void **state)
{
    (void)state;
    static watch w;
    kvd_model *m = load_default(4, 4);
    w = (watch){.m = m, .s = tiny_session(m, NULL), .r = reference_of(4, KVD_TYPE_F16, KVD_TYPE_F32, 0)};
    pthread_t threads_of[2];
    for (int i = 0; i < 2; i++)
        assert_int_equal(pthread_create(&threads_of[i], NULL, meddle, &w), 0);
    for (int step = 0, fed = 0; step < 2000 && fed < 40; step++) {
        kvd_error err;
        const float *logits;
        int64_t n = kvd_session_tokens(w.s, NULL);
        int rc = kvd_session_feed(w.s, w.r->ids + n, 1 + step % 7, &logits, &err);
        fed += rc == 0;
        if (rc == 0)
            same_row(w.r, n + step % 7, logits);
        else {
            assert_int_equal(rc, KVD_E_BUDGET);
            assert_int_equal(kvd_session_tokens(w.s, NULL), n);
        }
    }
    atomic_store(&w.done, true);
    for (int i = 0; i < 2; i++)
        pthread_join(threads_of[i], NULL);
    assert_true(kvd_session_tokens(w.s, NULL) > 0);
    kvd_session_free(&w.s);
    tiny_free(&m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(least_and_full_bytes_are_tight),
        cmocka_unit_test(what_is_admitted_is_finished),
        cmocka_unit_test(sessions_share_a_budget),
        cmocka_unit_test(others_meddle_meanwhile),
    };
    return cmocka_run_group_tests(tests, NULL, free_references);
}
