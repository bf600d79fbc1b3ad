/* Out of memory at the n-th allocation, for every n, of everything the engine does:
 * a clean error or the right answer, nothing leaked (run it under LeakSanitizer),
 * and a session that goes on afterwards as if nothing had happened, on each tier. Also
 * a budget that somebody else takes away in the middle of a feed. */
#include "../unit/tiny.h"

static const char *const families[] = {"llama", "window", "gemma3", "narrow"};
enum { N_FAMILIES = 4, N_TOKENS = 330 };

static int32_t ids[N_TOKENS];
static float *rows; /* [N_TOKENS][n_vocab], of policy full fed at once */
static int64_t n_vocab;

static int take_row(void *ctx, int64_t pos, const float *logits)
{
    (void)ctx;
    memcpy(rows + pos * n_vocab, logits, sizeof(float) * (size_t)n_vocab);
    return 0;
}

static kvd_model *reference(const char *family, int n_threads)
{
    kvd_model_options mo;
    kvd_model_options_defaults(&mo);
    mo.n_threads = n_threads;
    mo.chunk_tokens = 40;
    kvd_model *m = tiny_load(family, &mo);
    kvd_session *s = tiny_session(m, NULL);
    kvd_error err;
    n_vocab = m->config.n_vocab;
    rows = malloc(sizeof(float) * N_TOKENS * (size_t)n_vocab);
    for (int i = 0; i < N_TOKENS; i++)
        ids[i] = (int32_t)((i * 37 + i * i) % n_vocab);
    assert_int_equal(kvd_session_feed_all(s, ids, N_TOKENS, N_TOKENS, take_row, NULL, &err), 0);
    kvd_session_free(&s);
    return m;
}

/* Allocation number n from now on and all after it fail; 0: none. */
static void fail_from(kvd_model *m, int64_t n)
{
    m->ledger->fail_at = n ? atomic_load(&m->ledger->n_allocs) + n : 0;
}

static void loading(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        int n_threads;
        bool vocab_only;
    } cases[] = {{"llama", 1, false}, {"gemma3", 3, false}, {"qwen2", 2, false}, {"qwen3", 1, true}, {"gemma3", 1, true}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        int64_t n = 1;
        for (;; n++) {
            kvd_load_options o = {.n_threads = cases[i].n_threads, .chunk = 8, .vocab_only = cases[i].vocab_only, .fail_at = n};
            kvd_model *m = NULL;
            kvd_error err = {0};
            int rc = kvd__model_load(&m, tiny_path(cases[i].name), &o, n % 2 ? &err : NULL);
            if (rc == 0) {
                kvd_model_free(&m);
                break;
            }
            check(rc == KVD_E_NOMEM, "%s, allocation %lld: %s, %s", cases[i].name, (long long)n, kvd_error_name(rc), err.message);
            assert_true(n % 2 == 0 || err.code == KVD_E_NOMEM);
            assert_null(m);
        }
        check(n > 20 && n < 5000, "%lld allocations", (long long)n);
    }
}

static void making_a_session(void **state)
{
    (void)state;
    kvd_model *m = tiny_load("gemma3", NULL);
    int64_t host = atomic_load(&m->ledger->now[KVD_ACC_HOST]), compute = atomic_load(&m->ledger->now[KVD_ACC_COMPUTE]);
    for (int64_t n = 1;; n++) {
        kvd_session *s = NULL;
        kvd_error err = {0};
        fail_from(m, n);
        int rc = kvd_session_create(&s, m, NULL, &err);
        fail_from(m, 0);
        if (rc == 0) {
            assert_true(n > 3);
            kvd_session_free(&s);
            break;
        }
        assert_int_equal(rc, KVD_E_NOMEM);
        assert_null(s);
        assert_int_equal(atomic_load(&m->ledger->now[KVD_ACC_HOST]), host);
        assert_int_equal(atomic_load(&m->ledger->now[KVD_ACC_COMPUTE]), compute);
    }
    tiny_free(&m);
}

static void same_row(int64_t pos, const float *logits)
{
    check(!memcmp(logits, rows + pos * n_vocab, sizeof(float) * (size_t)n_vocab), "logits of position %lld", (long long)pos);
}

/* Feed [from, to) failing at every allocation in turn (sparse: at ever fewer), each
 * time from the same beginning; then go on. */
static void fail_a_feed(kvd_model *m, const kvd_session_options *so, int64_t from, int64_t to, bool parked, bool sparse)
{
    int64_t n = 1;
    for (bool done = false; !done; n += sparse ? 1 + n / 3 : 1) {
        kvd_session *s = tiny_session(m, so);
        kvd_error err = {0};
        const float *logits = NULL;
        if (from)
            assert_int_equal(kvd_session_feed(s, ids, from, &logits, &err), 0);
        if (parked)
            kvd_session_park(s);
        const float *before = logits;
        int64_t context = atomic_load(&m->ledger->context_now);
        fail_from(m, n);
        int rc = kvd_session_feed(s, ids + from, to - from, &logits, n % 3 ? &err : NULL);
        fail_from(m, 0);
        done = rc == 0;
        if (!done) {
            check(rc == KVD_E_NOMEM, "allocation %lld: %s", (long long)n, kvd_error_name(rc));
            assert_true(n % 3 == 0 || err.code == KVD_E_NOMEM);
            assert_int_equal(kvd_session_tokens(s, NULL), from);
            check(parked /* what was rebuilt may stay */ || atomic_load(&m->ledger->context_now) <= context, "%s, from %lld, allocation %lld: %lld bytes of context, %lld before", m->config.arch, (long long)from, (long long)n, (long long)atomic_load(&m->ledger->context_now), (long long)context);
            assert_true(logits == before);
            if (from)
                same_row(from - 1, logits);
            if (n % 2) { /* a retry is safe; so is something else first */
                assert_int_equal(kvd_session_feed(s, ids + from, 1, &logits, &err), 0);
                same_row(from, logits);
                assert_int_equal(kvd_session_rewind(s, from, &err), 0);
            }
            assert_int_equal(kvd_session_feed(s, ids + from, to - from, &logits, &err), 0);
        }
        same_row(to - 1, logits);
        assert_int_equal(kvd_session_feed(s, ids + to, 2, &logits, &err), 0);
        same_row(to + 1, logits);
        kvd_session_free(&s);
        check_no_context(m);
    }
    assert_true(n > 2);
}

static void feeding(void **state)
{
    (void)state;
    for (int f = 0; f < N_FAMILIES; f++) {
        kvd_model *m = reference(families[f], f == 0 ? 2 : 1);
        for (int limit = 0; limit < 3; limit++) {
            kvd_session_options so;
            kvd_session_options_defaults(&so);
            so.kv_tokens = limit == 1 ? 40 : limit == 2 ? 0 : -1;
            fail_a_feed(m, &so, 0, 70, false, false);     /* the first one */
            fail_a_feed(m, &so, 64, 65, false, false);    /* a new block */
            fail_a_feed(m, &so, 254, 258, false, false);  /* tables grow */
            fail_a_feed(m, &so, 70, 75, true, false);     /* everything is rebuilt */
        }
        /* The budget makes it take several passes, and begin again. */
        kvd_session_options so;
        kvd_session_options_defaults(&so);
        kvd_plan plan;
        kvd_plan_session(m, &so, 102, 102, 0, &plan);
        kvd_error err;
        assert_int_equal(kvd_memory_set_budget(m, plan.least_bytes, &err), 0);
        fail_a_feed(m, &so, 0, 100, false, true);
        fail_a_feed(m, &so, 70, 100, true, true);
        free(rows);
        tiny_free(&m);
    }
}

/* ---- whole generations ------------------------------------------------------------- */

enum { N_GENERATED = 12, N_ASKED = 250 };

static kvd_generate_options generate_options(int64_t max_tokens)
{
    static const char *const stop[] = {"never to be seen"};
    kvd_generate_options o;
    kvd_generate_options_defaults(&o);
    o.stop = stop;
    o.n_stop = 1;
    o.max_tokens = max_tokens;
    o.ignore_end = true;
    o.sampling.temperature = 1;
    return o;
}

static int generate(kvd_session *s, const int32_t *prompt, int64_t n, int64_t max_tokens, kvd_result *r)
{
    kvd_generate_options o = generate_options(max_tokens);
    kvd_error err = {0};
    int rc = kvd_generate(s, prompt, n, &o, r, &err);
    check(rc == 0 || (rc == KVD_E_NOMEM && err.code == rc && err.message[0]), "%s: %s", kvd_error_name(rc), err.message);
    return rc;
}

/* Go on with s from wherever the failure has left it: the rest is the rest of whole. */
static void go_on(kvd_session *s, int64_t n_part, const kvd_result *whole)
{
    kvd_error err = {0};
    kvd_result rest;
    int64_t fed = kvd_session_tokens(s, NULL), done = max64(0, fed - N_ASKED);
    assert_true(fed == 0 || fed == N_ASKED + max64(0, n_part - 1));
    if (fed == 0)
        assert_int_equal(generate(s, ids, N_ASKED, N_GENERATED, &rest), 0);
    else { /* from the last token that was chosen; none yet: the prompt's last */
        assert_int_equal(kvd_session_rewind(s, fed - 1, &err), 0);
        int32_t last = fed == N_ASKED ? ids[N_ASKED - 1] : whole->tokens[fed - N_ASKED - 1];
        assert_int_equal(generate(s, &last, 1, N_GENERATED - done, &rest), 0);
    }
    assert_int_equal(rest.n_tokens, N_GENERATED - done);
    assert_memory_equal(rest.tokens, whole->tokens + done, 4 * (size_t)rest.n_tokens);
    if (!fed)
        assert_string_equal(rest.receipt, whole->receipt);
    kvd_result_free(&rest);
}

/* Session and answer with allocation n and all after it failing. Returns whether the
 * answer was there before that. */
static bool generate_until(kvd_model *m, const kvd_session_options *so, int64_t n, const kvd_result *whole, bool on_disk)
{
    kvd_session *s = NULL;
    kvd_result part = {0};
    kvd_error err = {0};
    int64_t host = atomic_load(&m->ledger->now[KVD_ACC_HOST]), compute = atomic_load(&m->ledger->now[KVD_ACC_COMPUTE]);
    fail_from(m, n);
    int rc = kvd_session_create(&s, m, so, &err);
    if (!rc)
        rc = generate(s, ids, N_ASKED, N_GENERATED, &part);
    fail_from(m, 0);
    if (s) {
        kvd_session_stats st;
        assert_true(part.n_tokens == 0 || !memcmp(part.tokens, whole->tokens, 4 * (size_t)part.n_tokens));
        assert_true(part.n_text <= whole->n_text && (!part.text || !memcmp(part.text, whole->text, part.n_text)));
        if (rc)
            go_on(s, part.n_tokens, whole);
        else {
            assert_int_equal(part.n_tokens, N_GENERATED);
            assert_string_equal(part.receipt, whole->receipt);
        }
        kvd_session_get_stats(s, &st);
        check(st.disk == on_disk && !st.disk_error, "allocation %lld: disk %d: %s", (long long)n, st.disk, st.disk_error ? st.disk_error : "");
    } else
        assert_int_equal(rc, KVD_E_NOMEM);
    kvd_result_free(&part);
    kvd_session_free(&s);
    check_no_context(m);
    assert_int_equal(atomic_load(&m->ledger->now[KVD_ACC_HOST]), host);
    assert_int_equal(atomic_load(&m->ledger->now[KVD_ACC_COMPUTE]), compute);
    return rc == 0;
}

static void generating(void **state)
{
    (void)state;
    static const kvd_rates rates = {.rows = {1, 4, 16, 64, 256}, .rows_s = {1, 2, 3, 4, 5}, .head_s = 1, .pair_alone_s = 1e-3,
                                    .pair_chunk_s = 1e-3, .disk_read_bytes_s = 1e12, .disk_write_bytes_s = 1e12};
    static const struct {
        const char *name;
        kvd_evict_to evict_to;
        bool by_bytes, disk;
    } cases[] = {{"gemma3", KVD_EVICT_RECOMPUTE, false, false}, {"llama", KVD_EVICT_RECOMPUTE, true, false},
                 {"gemma3", KVD_EVICT_DISK, false, true},       {"llama", KVD_EVICT_DISK, true, true},
                 {"llama", KVD_EVICT_AUTO, true, true}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        kvd_model *m = reference(cases[i].name, 1);
        kvd_session_options so;
        kvd_plan plan;
        kvd_error err = {0};
        kvd_session_options_defaults(&so);
        kvd_plan_session(m, &so, N_ASKED, N_ASKED + N_GENERATED, 0, &plan);
        so.evict_to = cases[i].evict_to;
        so.spill_dir = so.evict_to == KVD_EVICT_RECOMPUTE ? NULL : getenv("KVD_TINY") ? getenv("KVD_TINY") : ".";
        so.rates = so.evict_to == KVD_EVICT_AUTO ? &rates : NULL;
        if (cases[i].by_bytes)
            assert_int_equal(kvd_memory_set_budget(m, (plan.least_bytes + plan.full_bytes) / 2, &err), 0);
        else
            so.kv_tokens = 32;
        kvd_session *s = tiny_session(m, &so);
        kvd_result whole;
        assert_int_equal(generate(s, ids, N_ASKED, N_GENERATED, &whole), 0);
        kvd_session_free(&s);
        int64_t n = 1;
        while (!generate_until(m, &so, n, &whole, cases[i].disk))
            n++;
        check(n > N_GENERATED, "%s, case %d: only %lld allocations", cases[i].name, (int)i, (long long)n);
        kvd_result_free(&whole);
        free(rows);
        tiny_free(&m);
    }
}

static void text(void **state)
{
    (void)state;
    static const char *const names[] = {"llama", "gemma3"};
    static const char words[] = "The cache is not the memory of the model. <|im_end|> 12 \xe2\x82\xac \xff and so on, and so on; and then a rather long rest.";
    for (int i = 0; i < 2; i++) {
        kvd_model *m = tiny_load(names[i], NULL);
        int64_t host = atomic_load(&m->ledger->now[KVD_ACC_HOST]);
        for (int64_t n = 1;; n++) {
            int32_t *got = NULL;
            int64_t n_got = -7;
            kvd_error err = {0};
            fail_from(m, n);
            int rc = kvd_tokenize(m, words, sizeof words - 1, KVD_TOKENIZE_BOS | KVD_TOKENIZE_SPECIAL, &got, &n_got, &err);
            fail_from(m, 0);
            if (rc == 0) {
                assert_true(n > 1 && n_got > 10);
                kvd_ids_free(got);
                break;
            }
            assert_int_equal(rc, KVD_E_NOMEM);
            assert_true(!got && n_got == -7);
            assert_int_equal(atomic_load(&m->ledger->now[KVD_ACC_HOST]), host);
        }
        static const kvd_chat_turn turns[] = {{"system", "Be brief."}, {"user", "Who?"}, {"assistant", "I."}, {"user", "Why?"}};
        for (int64_t n = 1;; n++) {
            char *got = NULL;
            size_t n_got = 77;
            kvd_error err = {0};
            fail_from(m, n);
            int rc = kvd_chat_render(m, NULL, turns, 4, 0, &got, &n_got, &err);
            fail_from(m, 0);
            if (rc == 0) {
                assert_true(n > 1 && n_got > 10);
                kvd_text_free(got);
                break;
            }
            assert_int_equal(rc, KVD_E_NOMEM);
            assert_true(!got && n_got == 77);
        }
        assert_int_equal(atomic_load(&m->ledger->now[KVD_ACC_HOST]), host);
        tiny_free(&m);
    }
}

/* Somebody else takes the room between two passes of a feed. */
typedef struct {
    kvd_model *m;
    void *taken;
    int64_t at, calls;
} thief;

static int steal(void *ctx, int64_t done, int64_t total, int64_t n_rows, int64_t recomputed)
{
    thief *t = ctx;
    (void)done, (void)total, (void)n_rows, (void)recomputed;
    if (t->calls++ == t->at) {
        kvd_error err;
        t->taken = kvd__alloc(t->m->ledger, KVD_ACC_KV, (size_t)kvd__ledger_room(t->m->ledger), &err);
        assert_non_null(t->taken);
    }
    return 0;
}

static void the_budget_goes_in_the_middle(void **state)
{
    (void)state;
    for (int f = 0; f < N_FAMILIES; f++) {
        kvd_model *m = reference(families[f], 1);
        kvd_session_options so;
        kvd_session_options_defaults(&so);
        kvd_plan plan;
        kvd_error err = {0};
        kvd_plan_session(m, &so, 300, 300, 0, &plan);
        assert_int_equal(kvd_memory_set_budget(m, plan.full_bytes, &err), 0);
        bool refused = false;
        for (int64_t at = 0; at < 40; at += 3) {
            kvd_session *s = tiny_session(m, &so);
            thief t = {.m = m, .at = at};
            const float *logits = NULL;
            assert_int_equal(kvd_session_feed(s, ids, 60, &logits, &err), 0);
            kvd_session_set_progress(s, steal, &t);
            int rc = kvd_session_feed(s, ids + 60, 240, &logits, &err);
            kvd_session_set_progress(s, NULL, NULL);
            kvd__free(t.taken);
            if (rc) {
                refused = true;
                assert_int_equal(rc, KVD_E_BUDGET);
                assert_int_equal(kvd_session_tokens(s, NULL), 60);
                same_row(59, logits);
                assert_int_equal(kvd_session_feed(s, ids + 60, 240, &logits, &err), 0);
            }
            same_row(299, logits);
            kvd_session_free(&s);
            check_no_context(m);
        }
        assert_true(refused);
        free(rows);
        tiny_free(&m);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(loading),
        cmocka_unit_test(making_a_session),
        cmocka_unit_test(text),
        cmocka_unit_test(feeding),
        cmocka_unit_test(generating),
        cmocka_unit_test(the_budget_goes_in_the_middle),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
