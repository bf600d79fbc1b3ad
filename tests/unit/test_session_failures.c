/* Feeds that do not come to their end: cancelled at every step, by whoever takes the
 * logits, or refused. The session is as before, and goes on. */
#include "session_watch.h"

/* Cancelled at every step that can be: nothing changes, and the next feed is right. */
static void cancelled_at_every_step(void **state)
{
    (void)state;
    for (int f = 0; f < N_FAMILIES; f++)
        for (int tight = 0; tight < 2; tight++) {
            kvd_model *m = load_default(f, 1 + tight * 2);
            kvd_session_options so;
            kvd_session_options_defaults(&so);
            so.kv_tokens = tight ? 32 : -1;
            watch w = {.m = m, .s = tiny_session(m, &so), .r = reference_of(f, so.kv_type, so.stream, 0), .cancel_at = -1};
            kvd_session_set_progress(w.s, count_progress, &w);
            assert_int_equal(feed(&w, 90, -1), 0);
            for (int64_t at = 0;; at++) {
                w.cancel_at = at;
                int rc = feed(&w, 61, 61);
                if (!rc)
                    break;
                assert_int_equal(rc, KVD_E_CANCELLED);
                if (at % 3 == 0) { /* usable at once */
                    w.cancel_at = -1;
                    assert_int_equal(feed(&w, 1, -1), 0);
                    rewind_to(&w, 90);
                }
            }
            assert_true(w.steps > 2);
            kvd_session_free(&w.s);
            tiny_free(&m);
        }
}

static int stop_at_row(void *ctx, int64_t pos, const float *logits)
{
    watch *w = ctx;
    same_row(w->r, pos, logits);
    return ++w->rows_seen == w->cancel_at;
}

static void cancelled_by_the_logits(void **state)
{
    (void)state;
    kvd_model *m = load_default(0, 2);
    kvd_session_options so;
    kvd_session_options_defaults(&so);
    so.kv_tokens = 48;
    watch w = {.m = m, .s = tiny_session(m, &so), .r = reference_of(0, so.kv_type, so.stream, 0)};
    kvd_error err = {0};
    const float *logits;
    assert_int_equal(kvd_session_feed(w.s, w.r->ids, 70, &logits, &err), 0);
    for (w.cancel_at = 1; w.cancel_at <= 20; w.cancel_at++) {
        w.rows_seen = 0;
        assert_int_equal(kvd_session_feed_all(w.s, w.r->ids + 70, 25, 20, stop_at_row, &w, &err), KVD_E_CANCELLED);
        assert_int_equal(w.rows_seen, w.cancel_at);
        assert_int_equal(w.s->n, 70);
        same_row(w.r, 69, logits); /* untouched */
        assert_true(w.s->has_logits);
    }
    assert_int_equal(kvd_session_feed_all(w.s, w.r->ids + 70, 25, 26, stop_at_row, &w, &err), KVD_E_RANGE);
    assert_int_equal(kvd_session_feed_all(w.s, w.r->ids + 70, 25, -1, stop_at_row, &w, &err), KVD_E_RANGE);
    assert_int_equal(kvd_session_feed_all(w.s, w.r->ids + 70, 25, 0, NULL, NULL, NULL), 0);
    assert_false(w.s->has_logits);
    kvd_session_free(&w.s);
    tiny_free(&m);
}

static void bad_arguments_change_nothing(void **state)
{
    (void)state;
    kvd_model *m = load_default(0, 1);
    watch w = {.m = m, .s = tiny_session(m, NULL), .r = reference_of(0, KVD_TYPE_F16, KVD_TYPE_F32, 0), .cancel_at = -1};
    kvd_error err = {0};
    int32_t ids[] = {1, 2, m->config.n_vocab}, low[] = {0, -1};
    static int32_t many[4096];
    assert_int_equal(feed(&w, 20, -1), 0);
    int64_t now = atomic_load(&m->ledger->context_now);
    assert_int_equal(kvd_session_feed(w.s, ids, 3, NULL, &err), KVD_E_RANGE);
    assert_non_null(strstr(err.message, "320"));
    assert_int_equal(kvd_session_feed(w.s, low, 2, NULL, NULL), KVD_E_RANGE);
    assert_int_equal(kvd_session_feed(w.s, ids, 0, NULL, &err), KVD_E_RANGE);
    assert_int_equal(kvd_session_feed(w.s, ids, -5, NULL, &err), KVD_E_RANGE);
    assert_int_equal(kvd_session_feed(w.s, many, 2029, NULL, &err), KVD_E_RANGE); /* context 2048 */
    assert_int_equal(kvd_session_feed(w.s, many, INT64_MAX, NULL, &err), KVD_E_RANGE);
    assert_int_equal(kvd_session_rewind(w.s, 21, &err), KVD_E_RANGE);
    assert_int_equal(kvd_session_rewind(w.s, -1, &err), KVD_E_RANGE);
    assert_int_equal(kvd_memory_set_budget(m, -1, &err), KVD_E_RANGE);
    assert_int_equal(kvd_memory_set_budget(m, now - 1, &err), KVD_E_BUDGET);
    assert_int_equal(atomic_load(&m->ledger->context_now), now);
    assert_int_equal(feed(&w, 1, -1), 0);
    kvd_session_options so;
    kvd_session *s = NULL;
    static const struct {
        kvd_session_options o;
    } bad[] = {{{.policy = (kvd_policy)2, .kv_tokens = -1}}, {{.kv_type = (kvd_float_type)3, .kv_tokens = -1}},
               {{.stream = (kvd_float_type)9, .kv_tokens = -1}}, {{.kv_tokens = -2}}, {{.policy = KVD_POLICY_FULL, .kv_tokens = 0}}};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        so = bad[i].o;
        assert_int_equal(kvd_session_create(&s, m, &so, &err), KVD_E_RANGE);
        assert_null(s);
    }
    kvd_session_free(&w.s);
    kvd_session_free(&w.s);
    tiny_free(&m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(cancelled_at_every_step),
        cmocka_unit_test(cancelled_by_the_logits),
        cmocka_unit_test(bad_arguments_change_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, free_references);
}
