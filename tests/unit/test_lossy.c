/* The lossy policies: what each keeps, by hand; that nothing dropped means the bits
 * of the exact engine; that threads, chunks and instruction sets do not show; that
 * budgets hold and failures leave nothing behind. Against an independent
 * implementation they are tested from outside (tests/system/test_policies.py). */
#include "tiny.h"

enum { N = 200 };

static const kvd_policy policies[] = {KVD_POLICY_WINDOW, KVD_POLICY_STREAMING_LLM, KVD_POLICY_H2O, KVD_POLICY_SNAPKV, KVD_POLICY_TOVA};
enum { N_POLICIES = sizeof policies / sizeof policies[0] };
static const char *const families[] = {"llama", "window", "qwen2", "qwen3", "gemma3", "kquant"};
enum { N_FAMILIES = sizeof families / sizeof families[0] };

/* ---- the pure part ------------------------------------------------------------------- */

/* Which of the slots 0 .. n - 1 stay, as a string of 0 and 1. */
static void check_kept(kvd_policy_kind kind, const double *score, int64_t n, int64_t budget, int64_t incoming, int64_t prompt_end,
                       int64_t window, const char *expected)
{
    int64_t pos[64];
    uint8_t keep[64];
    char got[65] = "";
    for (int64_t i = 0; i < n; i++)
        pos[i] = i;
    kvd_kept k = {.n = n, .pos = pos, .score = score, .budget = budget, .incoming = incoming, .prompt_end = prompt_end, .window = window};
    memset(keep, 0, sizeof keep);
    kvd__keeper(kind)->select(&k, keep);
    for (int64_t i = 0; i < n; i++)
        got[i] = (char)('0' + keep[i]);
    got[n] = 0;
    assert_string_equal(got, expected);
}

static void keeps_by_hand(void **state)
{
    (void)state;
    const double s[12] = {5, 1, 9, 1, 7, 2, 3, 8, 1, 0, 4, 6}, zero[12] = {0};
    check_kept(KVD_KEEP_WINDOW, zero, 12, 5, 0, 12, 0, "000000011111");
    check_kept(KVD_KEEP_STREAMING_LLM, zero, 12, 7, 0, 12, 0, "111100000111");
    check_kept(KVD_KEEP_STREAMING_LLM, zero, 12, 3, 0, 12, 0, "111000000000");
    check_kept(KVD_KEEP_H2O, s, 12, 6, 0, 12, 0, "001010010111");
    check_kept(KVD_KEEP_H2O, s, 12, 5, 1, 12, 0, "001010010011"); /* B = 6: the third of the last is to come */
    check_kept(KVD_KEEP_SNAPKV, s, 12, 6, 0, 12, 3, "001010010111");
    check_kept(KVD_KEEP_SNAPKV, s, 12, 8, 1, 8, 2, "001010111111"); /* 0..5 may go, 6..7 are the window, the rest is generated */
    check_kept(KVD_KEEP_SNAPKV, s, 12, 5, 1, 4, 2, "000000011111"); /* the prompt's own are used up: the oldest go */
    check_kept(KVD_KEEP_TOVA, s, 12, 4, 0, 12, 0, "001010010001");
    check_kept(KVD_KEEP_TOVA, s, 12, 11, 1, 12, 0, "111111111011");
}

static void ties_keep_the_younger(void **state)
{
    (void)state;
    const double s[6] = {1, 1, 1, 1, 1, 1};
    check_kept(KVD_KEEP_TOVA, s, 6, 2, 0, 6, 0, "000011");
    check_kept(KVD_KEEP_TOVA, s, 6, 5, 0, 6, 0, "011111");
}

static void snapkv_pools_its_votes(void **state)
{
    (void)state;
    const double w[12] = {0, 0, 0, 0, 4, 0, 0, 0, 2, 0, 100, 100};
    double s[12];
    kvd__keep_snapkv.observe(s, w, 12, 1, 2);
    const double expected[12] = {0, 4, 4, 4, 4, 4, 4, 4, 2, 2, 0, 0};
    for (int i = 0; i < 12; i++)
        assert_true(s[i] == expected[i]);
}

static void highest_is_what_sorting_gives(void **state)
{
    (void)state;
    for (int round = 0; round < 500; round++) {
        double s[40];
        uint8_t keep[40] = {0}, expected[40] = {0};
        int n = 1 + (int)pick(40), count = (int)pick(n + 1);
        for (int i = 0; i < n; i++)
            s[i] = (double)pick(12);
        for (int c = 0; c < count; c++) {
            int best = -1;
            for (int i = 0; i < n; i++)
                if (!expected[i] && (best < 0 || s[i] >= s[best]))
                    best = i;
            expected[best] = 1;
        }
        kvd__keep_highest(s, 0, n, count, keep);
        assert_memory_equal(keep, expected, sizeof keep);
    }
}

/* ---- sessions -------------------------------------------------------------------------- */

static int32_t ids[N];

static void make_ids(const kvd_model *m)
{
    uint64_t seed = 7;
    for (int i = 0; i < N; i++)
        ids[i] = (int32_t)(kvd__splitmix64(&seed) % (uint64_t)m->config.n_vocab);
}

typedef struct {
    float *rows; /* [N][n_vocab] */
    int64_t n_vocab;
} logits_of;

static int take(void *ctx, int64_t pos, const float *logits)
{
    logits_of *l = ctx;
    memcpy(l->rows + pos * l->n_vocab, logits, (size_t)l->n_vocab * sizeof *logits);
    return 0;
}

static logits_of make_logits(const kvd_model *m)
{
    return (logits_of){.rows = calloc((size_t)(N * m->config.n_vocab), sizeof(float)), .n_vocab = m->config.n_vocab};
}

/* Feed N tokens: n_prompt at once, then one by one, a second prompt of n_second in between. */
static void feed_all(kvd_session *s, int64_t n_prompt, int64_t n_second, logits_of *out)
{
    kvd_error err = {0};
    int64_t at = 0, second = n_prompt + 20;
    while (at < N) {
        int64_t n = at == 0 ? n_prompt : at == second && n_second ? n_second : 1;
        int rc = kvd_session_feed_all(s, ids + at, n, n, take, out, &err);
        check(rc == 0, "%s", err.message);
        at += n;
    }
}

static kvd_session *lossy(kvd_model *m, kvd_policy p, kvd_positions positions, int64_t budget, kvd_float_type type)
{
    kvd_session_options o;
    kvd_session_options_defaults(&o);
    o.policy = p;
    o.positions = positions;
    o.kv_tokens = budget;
    o.kv_type = type;
    return tiny_session(m, &o);
}

static void nothing_dropped_means_the_exact_bits(void **state)
{
    (void)state;
    for (int f = 0; f < N_FAMILIES; f++) {
        kvd_model *m = tiny_load(families[f], NULL);
        make_ids(m);
        for (int renumber = 0; renumber < 2; renumber++) {
            kvd_float_type type = renumber ? KVD_TYPE_F32 : KVD_TYPE_F16; /* renumbered K are rounded twice */
            logits_of exact = make_logits(m), got = make_logits(m);
            kvd_session_options o;
            kvd_session_options_defaults(&o);
            o.kv_type = type;
            kvd_session *s = tiny_session(m, &o);
            feed_all(s, N, 0, &exact);
            kvd_session_free(&s);
            for (int p = 0; p < N_POLICIES; p++) {
                s = lossy(m, policies[p], (kvd_positions)renumber, N + 5, type);
                feed_all(s, 77, 30, &got);
                int64_t same = m->config.window ? 77 : N; /* a sliding window drops, and from then on slots are no positions */
                check(!memcmp(exact.rows, got.rows, (size_t)(same * exact.n_vocab) * sizeof(float)), "%s, %s, renumber %d", families[f],
                      kvd_policy_name(policies[p]), renumber);
                kvd_session_free(&s);
            }
            free(exact.rows);
            free(got.rows);
        }
        tiny_free(&m);
    }
}

static void same_bits_however_it_is_shared_out(void **state)
{
    (void)state;
    static const struct {
        int threads, chunk;
        kvd_isa isa;
    } how[] = {{1, 512, KVD_ISA_SCALAR}, {1, 512, KVD_ISA_AUTO}, {2, 64, KVD_ISA_AUTO}, {3, 7, KVD_ISA_AUTO}, {2, 1, KVD_ISA_AUTO}};
    for (int f = 0; f < N_FAMILIES; f++)
        for (int p = 0; p < N_POLICIES; p++)
            for (int renumber = 0; renumber < 2; renumber++) {
                logits_of first = {0};
                int64_t kept[64] = {0}, n_kept = 0;
                for (size_t h = 0; h < sizeof how / sizeof how[0]; h++) {
                    kvd_model_options mo;
                    kvd_model_options_defaults(&mo);
                    mo.n_threads = how[h].threads;
                    mo.chunk_tokens = how[h].chunk;
                    mo.isa = how[h].isa;
                    kvd_model *m = tiny_load(families[f], &mo);
                    make_ids(m);
                    logits_of got = make_logits(m);
                    kvd_session *s = lossy(m, policies[p], (kvd_positions)renumber, 24, KVD_TYPE_F16);
                    feed_all(s, 90, 40, &got);
                    const int64_t *pos;
                    int64_t n = kvd_lab_kept(s, m->config.n_layers - 1, m->config.n_kv_heads - 1, &pos);
                    check(n > 0 && n <= 24, "%lld kept", (long long)n);
                    if (h == 0) {
                        first = got;
                        n_kept = n;
                        memcpy(kept, pos, (size_t)n * sizeof *pos);
                    } else {
                        check(n == n_kept && !memcmp(kept, pos, (size_t)n * sizeof *pos), "%s, %s: other positions are kept with %d threads, chunks of %d",
                              families[f], kvd_policy_name(policies[p]), how[h].threads, how[h].chunk);
                        check(!memcmp(first.rows, got.rows, (size_t)(N * got.n_vocab) * sizeof(float)), "%s, %s, renumber %d, %d threads, chunks of %d",
                              families[f], kvd_policy_name(policies[p]), renumber, how[h].threads, how[h].chunk);
                        free(got.rows);
                    }
                    kvd_session_free(&s);
                    tiny_free(&m);
                }
                free(first.rows);
            }
}

static void dropping_is_seen_in_the_logits(void **state)
{
    (void)state;
    kvd_model *m = tiny_load("llama", NULL);
    make_ids(m);
    logits_of exact = make_logits(m), got = make_logits(m);
    kvd_session *s = tiny_session(m, NULL);
    feed_all(s, N, 0, &exact);
    kvd_session_free(&s);
    for (int p = 0; p < N_POLICIES; p++) {
        s = lossy(m, policies[p], KVD_POSITIONS_ORIGINAL, 24, KVD_TYPE_F16);
        feed_all(s, 90, 0, &got);
        size_t row = (size_t)got.n_vocab;
        assert_memory_equal(got.rows, exact.rows, 90 * row * sizeof(float)); /* the prompt saw all of itself */
        assert_memory_not_equal(got.rows + 90 * row, exact.rows + 90 * row, row * sizeof(float));
        kvd_session_free(&s);
    }
    free(exact.rows);
    free(got.rows);
    tiny_free(&m);
}

/* A model whose layers all have a sliding window of B, kept whole, against the same
 * weights without one under the window policy, token by token. */
static void the_window_policy_is_a_sliding_window(void **state)
{
    (void)state;
    kvd_model_options mo;
    kvd_model_options_defaults(&mo);
    mo.activations_f32 = true; /* 8-bit ones would turn a last bit into a step */
    kvd_model *a = tiny_load("window", &mo), *b = tiny_load("nowindow", &mo);
    make_ids(a);
    assert_int_equal(a->config.window, 48);
    for (int l = 0; l < a->config.n_layers; l++)
        assert_true(a->config.local[l]);
    assert_int_equal(b->config.window, 0);
    logits_of exact = make_logits(a), got = make_logits(b);
    kvd_session_options o;
    kvd_session_options_defaults(&o);
    o.kv_type = KVD_TYPE_F32;
    kvd_session *s = tiny_session(a, &o);
    feed_all(s, N, 0, &exact);
    kvd_session_free(&s);
    s = lossy(b, KVD_POLICY_WINDOW, KVD_POSITIONS_ORIGINAL, 48, KVD_TYPE_F32);
    feed_all(s, 1, 0, &got);
    float worst = 0, size = 0;
    for (int64_t i = 0; i < N * got.n_vocab; i++) {
        float d = got.rows[i] - exact.rows[i];
        worst = d > worst ? d : -d > worst ? -d : worst;
        size = exact.rows[i] > size ? exact.rows[i] : size;
    }
    check(worst < 1e-3f * size, "logits differ by %g, the largest is %g", (double)worst, (double)size);
    kvd_session_free(&s);
    free(exact.rows);
    free(got.rows);
    tiny_free(&a);
    tiny_free(&b);
}

static void the_ledger_holds_the_budget(void **state)
{
    (void)state;
    for (int f = 0; f < N_FAMILIES; f++)
        for (int p = 0; p < N_POLICIES; p++)
            for (int renumber = 0; renumber < 2; renumber++) {
                kvd_model *m = tiny_load(families[f], NULL);
                make_ids(m);
                kvd_session *s = lossy(m, policies[p], (kvd_positions)renumber, 64, KVD_TYPE_F16);
                int64_t arena = kvd__compact_arena_bytes(&s->shape, 64);
                assert_int_equal(atomic_load(&m->ledger->context_now), arena);
                logits_of got = make_logits(m);
                feed_all(s, 90, 0, &got);
                int64_t ids_bytes = kvd__checkpoint_capacity(N) * 4;
                assert_int_equal(atomic_load(&m->ledger->context_now), arena + ids_bytes);
                int64_t peak = atomic_load(&m->ledger->context_peak),
                        bound = kvd__compact_feed_bytes(&s->shape, (kvd_policy_kind)p, renumber, 64, 1, 90) + ids_bytes;
                check(peak > arena && peak <= bound, "peak %lld, bound %lld", (long long)peak, (long long)bound);
                for (int l = 0; l < m->config.n_layers; l++)
                    for (int h = 0; h < m->config.n_kv_heads; h++) {
                        const int64_t *pos;
                        int64_t n = kvd_lab_kept(s, l, h, &pos);
                        assert_in_range(n, 1, 64);
                        assert_int_equal(pos[n - 1], N - 1); /* the newest is not dropped before the next comes */
                        for (int64_t i = 1; i < n; i++)
                            assert_true(pos[i] > pos[i - 1]);
                    }
                kvd_session_free(&s);
                check_no_context(m);
                free(got.rows);
                tiny_free(&m);
            }
}

/* The ledger's peak of a feed of n tokens to a session that holds its budget. */
static int64_t peak_of_feed(kvd_session *s, int64_t n)
{
    kvd_error err = {0};
    atomic_store(&s->m->ledger->context_peak, atomic_load(&s->m->ledger->context_now));
    assert_int_equal(kvd_session_feed(s, ids, n, NULL, &err), 0);
    return atomic_load(&s->m->ledger->context_peak);
}

/* Weights and scores exist for what a policy observes, and for no more. */
static void what_is_not_observed_takes_no_memory(void **state)
{
    (void)state;
    enum { B = 64, ROWS = 90 };
    static const struct {
        int64_t of_many, of_one; /* rows that a thread probes at once */
    } probed[N_POLICIES] = {{0, 0}, {0, 0}, {32, 1}, {32, 0}, {1, 1}};
    for (int f = 0; f < N_FAMILIES; f++) {
        kvd_model *m = tiny_load(families[f], NULL);
        make_ids(m);
        int64_t n_heads = m->config.n_kv_heads, window_many = 0, window_one = 0;
        for (int p = 0; p < N_POLICIES; p++) {
            kvd_session *s = lossy(m, policies[p], KVD_POSITIONS_ORIGINAL, B, KVD_TYPE_F16);
            kvd_error err;
            assert_int_equal(kvd_session_feed(s, ids, ROWS, NULL, &err), 0);
            int64_t many = peak_of_feed(s, ROWS), one = peak_of_feed(s, 1);
            int64_t slots = 192; /* B + ROWS, in tiles of 64 */
            assert_int_equal(many, kvd__compact_feed_bytes(&s->shape, (kvd_policy_kind)p, false, B, 1, ROWS) + kvd__checkpoint_capacity(2 * ROWS) * 4);
            if (p == 0) {
                window_many = many;
                window_one = one;
            }
            assert_int_equal(many - window_many, probed[p].of_many ? slots * (n_heads * 8 + probed[p].of_many * 4) : 0);
            assert_int_equal(one - window_one, probed[p].of_one ? B * (n_heads * 8 + probed[p].of_one * 4) : 0);
            kvd_session_free(&s);
        }
        tiny_free(&m);
    }
}

static int never(void *ctx, int64_t done, int64_t total, int64_t rows, int64_t recomputed)
{
    (void)total, (void)rows, (void)recomputed;
    return done > *(int64_t *)ctx;
}

static void what_can_not_be_is_refused(void **state)
{
    (void)state;
    kvd_model *m = tiny_load("llama", NULL);
    make_ids(m);
    kvd_session *s = NULL;
    kvd_error err;
    for (int p = 0; p < N_POLICIES; p++) {
        kvd_session_options o;
        kvd_session_options_defaults(&o);
        o.policy = policies[p];
        assert_int_equal(kvd_session_create(&s, m, &o, &err), KVD_E_RANGE); /* no kv_tokens */
        o.kv_tokens = 7;
        assert_int_equal(kvd_session_create(&s, m, &o, &err), KVD_E_RANGE);
        o.kv_tokens = 8;
        o.evict_to = KVD_EVICT_DISK;
        o.spill_dir = "/";
        assert_int_equal(kvd_session_create(&s, m, &o, &err), KVD_E_RANGE);
    }
    kvd_session_options o;
    kvd_session_options_defaults(&o);
    o.positions = KVD_POSITIONS_RENUMBER;
    assert_int_equal(kvd_session_create(&s, m, &o, &err), KVD_E_RANGE);
    o.policy = (kvd_policy)99;
    assert_int_equal(kvd_session_create(&s, m, &o, &err), KVD_E_RANGE);
    assert_null(s);
    assert_string_equal(kvd_policy_name((kvd_policy)99), "?");

    s = lossy(m, KVD_POLICY_H2O, KVD_POSITIONS_ORIGINAL, 16, KVD_TYPE_F16);
    assert_int_equal(kvd_session_feed(s, ids, 40, NULL, &err), 0);
    assert_int_equal(kvd_session_rewind(s, 20, &err), KVD_E_UNSUPPORTED);
    assert_int_equal(kvd_session_rewind(s, 40, &err), 0);
    kvd_session_park(s); /* nothing happens */
    assert_int_equal(kvd_session_feed(s, ids, 1, NULL, &err), 0);
    int64_t stop_at = 50;
    kvd_session_set_progress(s, never, &stop_at);
    assert_int_equal(kvd_session_feed(s, ids, 40, NULL, &err), KVD_E_CANCELLED);
    kvd_session_set_progress(s, NULL, NULL);
    assert_int_equal(kvd_session_tokens(s, NULL), 41);
    assert_int_equal(kvd_session_feed(s, ids, 1, NULL, &err), KVD_E_ARG); /* it is in pieces */
    assert_int_equal(kvd_session_rewind(s, 0, &err), 0);
    assert_int_equal(kvd_session_feed(s, ids, 40, NULL, &err), 0);
    kvd_session_free(&s);

    assert_int_equal(kvd_memory_set_budget(m, 4096, &err), 0);
    kvd_session_options_defaults(&o);
    o.policy = KVD_POLICY_TOVA;
    o.kv_tokens = 64;
    assert_int_equal(kvd_session_create(&s, m, &o, &err), KVD_E_BUDGET);
    assert_true(err.need_bytes > 4096);
    tiny_free(&m);
}

/* Every allocation fails once: a clean error, and the session goes on after a rewind. */
static void failed_allocations(void **state)
{
    (void)state;
    kvd_model *m = tiny_load("gemma3", NULL);
    make_ids(m);
    logits_of first = make_logits(m), got = make_logits(m);
    int failures = 0;
    for (int64_t at = 0;; at++) {
        kvd_session_options o;
        kvd_session_options_defaults(&o);
        o.policy = KVD_POLICY_SNAPKV;
        o.positions = KVD_POSITIONS_RENUMBER;
        o.kv_tokens = 16;
        kvd_session *s = NULL;
        kvd_error err;
        m->ledger->n_allocs = 0;
        m->ledger->fail_at = at;
        int rc = kvd_session_create(&s, m, &o, &err);
        rc = rc ? rc : kvd_session_feed(s, ids, 60, NULL, &err);
        rc = rc ? rc : kvd_session_feed(s, ids + 60, 1, NULL, &err);
        bool reached = m->ledger->n_allocs >= at && at;
        m->ledger->fail_at = 0;
        if (at && reached) {
            assert_int_equal(rc, KVD_E_NOMEM);
            failures++;
        } else
            assert_int_equal(rc, 0);
        if (s) {
            assert_int_equal(kvd_session_rewind(s, 0, &err), 0);
            feed_all(s, 60, 0, at ? &got : &first);
            if (at)
                assert_memory_equal(first.rows, got.rows, (size_t)(N * got.n_vocab) * sizeof(float));
        }
        kvd_session_free(&s);
        check_no_context(m);
        if (at && !reached)
            break;
    }
    assert_true(failures > 10);
    free(first.rows);
    free(got.rows);
    tiny_free(&m);
}

static void generation_has_a_receipt_of_its_own(void **state)
{
    (void)state;
    kvd_model *m = tiny_load("llama", NULL);
    make_ids(m);
    char receipts[4][33];
    for (int i = 0; i < 4; i++) {
        kvd_session *s = i == 3 ? tiny_session(m, NULL) : lossy(m, KVD_POLICY_WINDOW, KVD_POSITIONS_ORIGINAL, i == 1 ? 32 : 33, KVD_TYPE_F16);
        kvd_generate_options go;
        kvd_generate_options_defaults(&go);
        go.max_tokens = 20;
        go.ignore_end = true;
        kvd_result r;
        kvd_error err;
        assert_int_equal(kvd_generate(s, ids, 60, &go, &r, &err), 0);
        assert_int_equal(r.n_tokens, 20);
        memcpy(receipts[i], r.receipt, 33);
        kvd_session_stats st;
        kvd_session_get_stats(s, &st);
        assert_string_equal(st.tier, i == 3 ? "full" : "dropped");
        kvd_result_free(&r);
        kvd_session_free(&s);
    }
    assert_string_equal(receipts[0], receipts[2]);
    assert_string_not_equal(receipts[0], receipts[1]);
    assert_string_not_equal(receipts[0], receipts[3]);
    tiny_free(&m);
}

int main(void)
{
    cmocka_set_test_filter(getenv("KVD_TEST")); /* a pattern: only these */
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(keeps_by_hand),
        cmocka_unit_test(ties_keep_the_younger),
        cmocka_unit_test(snapkv_pools_its_votes),
        cmocka_unit_test(highest_is_what_sorting_gives),
        cmocka_unit_test(nothing_dropped_means_the_exact_bits),
        cmocka_unit_test(same_bits_however_it_is_shared_out),
        cmocka_unit_test(dropping_is_seen_in_the_logits),
        cmocka_unit_test(the_window_policy_is_a_sliding_window),
        cmocka_unit_test(the_ledger_holds_the_budget),
        cmocka_unit_test(what_is_not_observed_takes_no_memory),
        cmocka_unit_test(what_can_not_be_is_refused),
        cmocka_unit_test(failed_allocations),
        cmocka_unit_test(generation_has_a_receipt_of_its_own),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
