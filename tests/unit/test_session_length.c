/* How long a session gets: to the end of the trained context, past a piece, past what
 * threads merge at once, and past a sliding window. */
#include "session_watch.h"

/* A context that is filled to its last position. */
static void the_trained_context_can_be_filled(void **state)
{
    (void)state;
    kvd_model *m = tiny_load("short", NULL); /* context 100 */
    kvd_error err = {0};
    int32_t ids[101] = {0};
    for (int one = 0; one < 2; one++) {
        kvd_session *s = tiny_session(m, NULL);
        for (int i = 0; i < 100; i += one ? 1 : 100)
            assert_int_equal(kvd_session_feed(s, ids, one ? 1 : 100, NULL, &err), 0);
        assert_int_equal(kvd_session_feed(s, ids, 1, NULL, &err), KVD_E_RANGE);
        assert_int_equal(kvd_session_tokens(s, NULL), 100);
        kvd_session_free(&s);
    }
    kvd_session *s = tiny_session(m, NULL);
    kvd_generate_options o;
    kvd_generate_options_defaults(&o);
    kvd_result r;
    o.ignore_end = true;
    static const int64_t refused[] = {100, 101, INT64_MAX, -2, INT64_MIN};
    for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++) {
        o.max_tokens = refused[i];
        assert_int_equal(kvd_generate(s, ids, 1, &o, &r, &err), KVD_E_RANGE);
        kvd_result_free(&r);
    }
    o.max_tokens = 1;
    assert_int_equal(kvd_generate(s, ids, INT64_MAX, &o, &r, &err), KVD_E_RANGE);
    kvd_result_free(&r);
    o.max_tokens = -1;
    assert_int_equal(kvd_generate(s, ids, 10, &o, &r, &err), 0);
    assert_int_equal(r.n_tokens, 90);
    assert_int_equal(r.stop_reason, KVD_STOP_CONTEXT);
    kvd_result_free(&r);
    kvd_session_free(&s);
    tiny_free(&m);
}

/* A prompt longer than a piece, and the same session in one piece. */
static void long_prompts_come_in_pieces(void **state)
{
    (void)state;
    static const int wanted[] = {0, 1, 4}; /* llama, window, gemma3 */
    for (int i = 0; i < 3; i++) {
        kvd_model *m = load_default(wanted[i], 2);
        int64_t n = 1200, n_vocab = m->config.n_vocab;
        int32_t *ids = malloc(sizeof *ids * (size_t)n);
        float *rows = malloc(sizeof(float) * (size_t)(n_vocab * n));
        for (int64_t t = 0; t < n; t++)
            ids[t] = (int32_t)pick(n_vocab);
        kvd_session_options so;
        kvd_session_options_defaults(&so);
        kvd_error err = {0};
        reference r = {.logits = rows, .n_vocab = n_vocab};
        kvd_session *s = tiny_session(m, &so);
        assert_int_equal(kvd_session_feed_all(s, ids, n, n, take_row, &r, &err), 0);
        kvd_session_stats st;
        kvd_session_get_stats(s, &st);
        assert_int_equal(st.passes, 3);
        kvd_session_free(&s);
        so.kv_tokens = 0; /* one pass, nothing stays */
        s = tiny_session(m, &so);
        watch w = {.m = m, .s = s, .r = &r};
        assert_int_equal(kvd_session_feed_all(s, ids, n, n, check_row, &w, &err), 0);
        kvd_session_get_stats(s, &st);
        assert_true(st.passes == 1 && st.resident_tokens == 0 && st.evicted_tokens == n);
        assert_int_equal(w.rows_seen, n);
        kvd_session_free(&s);
        free(ids);
        free(rows);
        tiny_free(&m);
    }
}

/* Decoding with several threads merges tiles in waves of 64: past 4,096 positions
 * there is more than one. */
static void waves_of_tiles(void **state)
{
    (void)state;
    enum { N = 4250, FROM = 4080 };
    static int32_t ids[N];
    static reference r;
    kvd_error err = {0};
    for (int i = 0; i < N; i++)
        ids[i] = (int32_t)((i * 31 + i / 7) % 320);
    for (int n_threads = 1; n_threads <= 3; n_threads++) {
        kvd_model_options mo;
        kvd_model_options_defaults(&mo);
        mo.n_threads = n_threads;
        kvd_model *m = tiny_load("long", &mo);
        kvd_session *s = tiny_session(m, NULL);
        assert_int_equal(kvd_session_feed(s, ids, FROM, NULL, &err), 0);
        if (n_threads == 1) {
            r.n_vocab = m->config.n_vocab;
            r.logits = malloc(sizeof(float) * N * (size_t)r.n_vocab);
            assert_int_equal(kvd_session_feed_all(s, ids + FROM, N - FROM, N - FROM, take_row, &r, &err), 0);
        } else
            for (int64_t at = FROM; at < N; at += at % 50 ? 1 : 10) {
                const float *logits;
                int64_t n = at % 50 ? 1 : 10;
                assert_int_equal(kvd_session_feed(s, ids + at, n, &logits, &err), 0);
                same_row(&r, at + n - 1, logits);
            }
        kvd_session_free(&s);
        tiny_free(&m);
    }
    free(r.logits);
}

/* Local layers hold the window's blocks and no more, for as long as a session lasts,
 * and what a rewind needs again is rebuilt. */
static void windows_are_given_back(void **state)
{
    (void)state;
    for (int f = 0; f < N_FAMILIES; f++) {
        kvd_model *m = load_default(f, 1);
        int64_t window = m->config.window, n_local = 0;
        for (int l = 0; l < m->config.n_layers; l++)
            n_local += m->config.local[l];
        if (window) {
            watch w = {.m = m, .s = tiny_session(m, NULL), .r = reference_of(f, KVD_TYPE_F16, KVD_TYPE_F32, 0), .cancel_at = -1};
            int64_t block = kvd__kv_block_bytes(&w.s->shape);
            tiny_seed = 3;
            while (w.s->n < N_TOKENS) {
                assert_int_equal(feed(&w, min64(N_TOKENS - w.s->n, 1 + pick(12)), -1), 0);
                int64_t n = w.s->n, local = (n + 15) / 16 - max64(0, n - window + 1) / 16;
                assert_int_equal(atomic_load(&m->ledger->now[KVD_ACC_KV]),
                                 block * ((n + 15) / 16 * (m->config.n_layers - n_local) + local * n_local));
                assert_true(local <= (window + 30) / 16);
            }
            for (int back = 1; back < N_TOKENS; back += 23) {
                rewind_to(&w, w.s->n - min64(back, w.s->n));
                assert_int_equal(feed(&w, min64(N_TOKENS - w.s->n, 1 + back / 2), -1), 0);
            }
            kvd_session_free(&w.s);
        }
        tiny_free(&m);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_trained_context_can_be_filled),
        cmocka_unit_test(long_prompts_come_in_pieces),
        cmocka_unit_test(waves_of_tiles),
        cmocka_unit_test(windows_are_given_back),
    };
    return cmocka_run_group_tests(tests, NULL, free_references);
}
