/* The planner: its arithmetic on made-up rates, and that what it says of bytes is what
 * sessions really take. Nothing here measures time. */
#include "gen/disk.h"
#include "kv/plan.h"
#include "tiny.h"

static const char *const families[] = {"llama", "window", "qwen2", "qwen3", "gemma3", "narrow", "kquant"};
enum { N_FAMILIES = sizeof families / sizeof families[0] };

/* About those of a small model on two cores. */
static const kvd_plan_rates rates = {.rows = {1, 4, 16, 64, 256}, .rows_s = {0.006, 0.008, 0.02, 0.06, 0.22}, .head_s = 0.001,
                                     .pair_alone_s = 4e-7, .pair_chunk_s = 1e-7, .disk_segment_s = 3e-5, .disk_read_bytes_s = 1e9, .disk_write_bytes_s = 5e8};

static kvd_kv_shape random_shape(void)
{
    kvd_kv_shape s = {.n_layers = 1 + (int)pick(20), .n_kv_heads = 1 + (int)pick(3), .d_head = 16 << pick(3),
                      .type = (kvd_kvtype)pick(3), .window = pick(2) ? 0 : 16 + pick(200)};
    s.stream_row_bytes = 64 * (1 + pick(40));
    for (int l = 0; s.window && l < s.n_layers; l++)
        s.local[l] = pick(4) != 0;
    return s;
}

static kvd_spill_options random_spill(int64_t n)
{
    kvd_spill_options o;
    kvd__spill_defaults(&o);
    o.segment_blocks = 4 << pick(3);
    o.max_blocks = (n + KVD__BLOCK - 1) / KVD__BLOCK;
    return o;
}

static kvd_limits limits(int64_t budget)
{
    return (kvd_limits){.kv_tokens = -1, .budget_bytes = budget, .piece_tokens = 512, .disk_piece_tokens = 256};
}

static void rows_go_through_their_points(void **state)
{
    (void)state;
    double last = 0;
    for (int i = 0; i < KVD__RATE_POINTS; i++)
        assert_true(kvd__rows_seconds(&rates, rates.rows[i]) == rates.rows_s[i]);
    for (int64_t n = 1; n < 3000; n++) {
        double t = kvd__rows_seconds(&rates, n);
        check(t > last, "%lld rows take no longer than %lld", (long long)n, (long long)n - 1);
        last = t;
    }
    assert_true(kvd__rows_seconds(&rates, 0) == 0 && kvd__rows_seconds(&rates, -5) == 0);
    assert_true(kvd__rows_seconds(&rates, 512) == 2 * rates.rows_s[4]);
}

static bool usable(const kvd_plan_of_tier *t)
{
    return t->decode_tokens_per_s > 0 && t->decode_tokens_per_s < 1e9 && t->prefill_s > 0 && t->prefill_s < 1e9;
}

/* need_bytes fits, a byte less does not. */
static void fits_is_exact(void **state)
{
    (void)state;
    for (int i = 0; i < 200; i++) {
        tiny_seed = (uint64_t)i * 7919;
        kvd_kv_shape s = random_shape();
        int64_t n_new = pick(80), n_prompt = 1 + pick(900);
        kvd_spill_options o = random_spill(n_prompt + n_new);
        kvd_limits lim = limits(INT64_MAX);
        kvd_plan_of_tier all[KVD_TIER_COUNT], p[KVD_TIER_COUNT];
        kvd__plan_tiers(&s, &lim, &rates, &o, n_prompt, n_new, all);
        for (int t = 0; t < KVD_TIER_COUNT; t++)
            for (int less = 0; less < 2; less++) {
                lim.budget_bytes = all[t].need_bytes - less;
                kvd__plan_tiers(&s, &lim, &rates, &o, n_prompt, n_new, p);
                check(p[t].fits == !less, "case %d, %s: need %lld", i, kvd__tier_name((kvd_tier)t), (long long)all[t].need_bytes);
                assert_int_equal(p[t].need_bytes, all[t].need_bytes);
                if (!less)
                    check(usable(&p[t]), "case %d, %s: %g tokens/s, prefill %g s", i, kvd__tier_name((kvd_tier)t),
                          p[t].decode_tokens_per_s, p[t].prefill_s);
            }
    }
}

/* More memory is never slower, and keeps no less. */
static void more_memory_is_not_slower(void **state)
{
    (void)state;
    for (int i = 0; i < 60; i++) {
        tiny_seed = (uint64_t)i * 104729;
        kvd_kv_shape s = random_shape();
        int64_t n_new = 1 + pick(80), n_prompt = 1 + pick(900), full = kvd__full_bytes(&s, n_prompt + n_new);
        kvd_spill_options o = random_spill(n_prompt + n_new);
        kvd_plan_of_tier last[KVD_TIER_COUNT] = {{0}}, p[KVD_TIER_COUNT];
        for (int k = 1; k <= 40; k++) {
            kvd_limits lim = limits(full * k / 32);
            kvd__plan_tiers(&s, &lim, &rates, &o, n_prompt, n_new, p);
            for (int t = 0; t < KVD_TIER_COUNT; t++) {
                if (last[t].fits) {
                    assert_true(p[t].fits);
                    /* On disk a longer piece of the prompt may cost a few blocks. */
                    check(p[t].decode_tokens_per_s >= last[t].decode_tokens_per_s * (t == KVD_TIER_DISK ? 0.98 : 1 - 1e-9), "case %d, %s at %d/32: %g after %g", i,
                          kvd__tier_name((kvd_tier)t), k, p[t].decode_tokens_per_s, last[t].decode_tokens_per_s);
                    check(t == KVD_TIER_DISK || p[t].resident_tokens >= last[t].resident_tokens, "case %d, %s at %d/32: %lld resident after %lld",
                          i, kvd__tier_name((kvd_tier)t), k, (long long)p[t].resident_tokens, (long long)last[t].resident_tokens);
                }
                assert_true(p[t].resident_tokens <= n_prompt + n_new);
                last[t] = p[t];
            }
        }
    }
}

/* Where all can stay it stays: noise in rates may say that a tier is faster. */
static void the_least_time_is_chosen(void **state)
{
    (void)state;
    for (int i = 0; i < 3000; i++) {
        tiny_seed = (uint64_t)i * 31337;
        kvd_plan_of_tier p[KVD_TIER_COUNT];
        int64_t n_new = pick(200);
        double least = 1e300;
        bool any = false;
        for (int t = 0; t < KVD_TIER_COUNT; t++) {
            p[t] = (kvd_plan_of_tier){.fits = pick(3) != 0, .prefill_s = (double)pick(50), .decode_tokens_per_s = 1 + (double)pick(20)};
            double s = p[t].prefill_s + (double)n_new / p[t].decode_tokens_per_s;
            least = p[t].fits && s < least ? s : least;
            any |= p[t].fits;
        }
        kvd_tier c = kvd__plan_choose(p, n_new);
        assert_true(any == (c != KVD_TIER_COUNT));
        if (p[KVD_TIER_FULL].fits)
            assert_true(c == KVD_TIER_FULL);
        else if (any)
            assert_true(p[c].fits && p[c].prefill_s + (double)n_new / p[c].decode_tokens_per_s == least);
    }
    assert_string_equal(kvd__tier_name(KVD_TIER_COUNT), "none");
}

/* Each segment that is read costs something beside its bytes, so small ones are slower. */
static void segments_cost(void **state)
{
    (void)state;
    kvd_kv_shape s = {.n_layers = 7, .n_kv_heads = 2, .d_head = 64, .type = KVD_KV_F16, .stream_row_bytes = 1024};
    kvd_limits lim = limits(INT64_MAX);
    kvd_plan_rates r = rates;
    lim.kv_tokens = 0; /* the same is evicted, whatever the buffers */
    r.disk_read_bytes_s = 1e8; /* reading is what takes the time */
    r.disk_segment_s = 2e-3;
    double step_s[3];
    for (int i = 0; i < 3; i++) {
        kvd_plan_of_tier p[KVD_TIER_COUNT];
        kvd_spill_options o = random_spill(1024);
        o.segment_blocks = 4 << i;
        kvd__plan_tiers(&s, &lim, &r, &o, 800, 0, p); /* 50 blocks are evicted */
        step_s[i] = 1 / p[KVD_TIER_DISK].decode_tokens_per_s;
    }
    /* 50 blocks are 13, 7 and 4 segments of each layer; the last block is not yet evicted
     * when the token after it is made. */
    double bytes_s = 49.0 * 7 * (double)kvd__kv_block_bytes(&s) / 1e8;
    check(step_s[2] > bytes_s + 7 * 4 * 2e-3, "%g s", step_s[2]);
    assert_true(step_s[0] - step_s[1] > 7 * 6 * 2e-3 * 0.999 && step_s[0] - step_s[1] < 7 * 6 * 2e-3 * 1.001);
    assert_true(step_s[1] - step_s[2] > 7 * 3 * 2e-3 * 0.999 && step_s[1] - step_s[2] < 7 * 3 * 2e-3 * 1.001);
}

/* Of local layers only what of the window is not resident comes from disk. */
static void what_is_resident_is_not_read(void **state)
{
    (void)state;
    kvd_kv_shape s = {.n_layers = 4, .n_kv_heads = 1, .d_head = 64, .type = KVD_KV_F16, .stream_row_bytes = 256, .window = 64,
                      .local = {1, 1, 1, 1}};
    kvd_plan_rates r = rates;
    kvd_limits lim = limits(INT64_MAX);
    double step_s[5];
    r.disk_read_bytes_s = 1e3;
    for (int i = 0; i < 5; i++) { /* 0, 16, .. 64 positions are kept */
        kvd_plan_of_tier p[KVD_TIER_COUNT];
        kvd_spill_options o = random_spill(1024);
        lim.kv_tokens = 16 * i;
        kvd__plan_tiers(&s, &lim, &r, &o, 800, 0, p);
        assert_true(p[KVD_TIER_DISK].fits);
        step_s[i] = 1 / p[KVD_TIER_DISK].decode_tokens_per_s;
        assert_true(i == 0 || step_s[i] <= step_s[i - 1]);
    }
    double block_s = (double)kvd__kv_block_bytes(&s) * 4 / 1e3;
    assert_true(step_s[0] > 3 * block_s && step_s[0] < 5 * block_s);
    assert_true(step_s[4] < block_s); /* nothing at all */
}

/* A disk that does not read, or does not write, is none. */
static void half_a_disk_is_none(void **state)
{
    (void)state;
    tiny_seed = 5;
    kvd_kv_shape s = random_shape();
    kvd_spill_options o = random_spill(500);
    kvd_limits lim = limits(kvd__disk_least_bytes(&s, 500) + kvd__spill_bytes(&s, &o));
    for (int i = 0; i < 3; i++) {
        kvd_plan_rates r = rates;
        kvd_plan_of_tier p[KVD_TIER_COUNT];
        r.disk_read_bytes_s = i == 0 ? 0 : r.disk_read_bytes_s;
        r.disk_write_bytes_s = i == 1 ? 0 : r.disk_write_bytes_s;
        kvd__plan_tiers(&s, &lim, &r, &o, 400, 100, p);
        assert_true(p[KVD_TIER_DISK].fits == (i == 2));
    }
}

/* ---- what sessions take ---------------------------------------------------------------------- */

static kvd_session_options options_of(int tier)
{
    kvd_session_options so;
    kvd_session_options_defaults(&so);
    so.policy = tier == KVD_TIER_FULL ? KVD_POLICY_FULL : KVD_POLICY_KV_DIRECT;
    so.evict_to = tier == KVD_TIER_DISK ? KVD_EVICT_DISK : KVD_EVICT_RECOMPUTE;
    so.spill_dir = getenv("KVD_TINY") ? getenv("KVD_TINY") : ".";
    return so;
}

static int generate(kvd_model *m, const kvd_session_options *so, int64_t n_prompt, int64_t n_new, char *tier, char *receipt)
{
    kvd_session *s = tiny_session(m, so);
    kvd_generate_options o;
    kvd_result r;
    kvd_error err = {0};
    kvd_session_stats st;
    int32_t ids[512];
    for (int i = 0; i < 512; i++)
        ids[i] = i * 31 % 300;
    kvd_generate_options_defaults(&o);
    o.max_tokens = n_new;
    o.ignore_end = true;
    int rc = kvd_generate(s, ids, n_prompt, &o, &r, &err);
    check(rc == 0 || rc == KVD_E_BUDGET, "%s", err.message);
    kvd_session_get_stats(s, &st);
    if (tier)
        strcpy(tier, st.tier);
    if (receipt)
        strcpy(receipt, r.receipt);
    kvd_result_free(&r);
    kvd_session_free(&s);
    return rc;
}

/* need_bytes of each tier is what a session of it is admitted with, and no byte less;
 * max_tokens is the longest that is. */
static void needs_are_what_sessions_take(void **state)
{
    (void)state;
    static const int64_t lengths[][2] = {{1, 1}, {60, 9}, {250, 12}};
    const kvd_rates *r = (const kvd_rates *)(const void *)&rates;
    for (int f = 0; f < N_FAMILIES; f++) {
        kvd_model *m = tiny_load(families[f], NULL);
        for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++)
            for (int t = 0; t < KVD_TIER_COUNT; t++) {
                int64_t n_prompt = lengths[i][0], n_new = lengths[i][1];
                kvd_session_options so = options_of(t), any = options_of(KVD_TIER_RECOMPUTE);
                kvd_tier_plan p, q;
                kvd_error err = {0};
                assert_true(kvd_plan_tier(m, &any, r, n_prompt, n_new, 0, t, &p));
                int64_t need = p.need_bytes;
                assert_true(p.max_tokens == m->config.n_ctx);
                if (t == KVD_TIER_DISK) { /* nothing goes to disk that fits */
                    kvd_plan_tier(m, &any, r, n_prompt, n_new, 0, KVD_TIER_FULL, &q);
                    need = min64(need, q.need_bytes);
                }
                for (int less = 0; less < 2; less++) {
                    assert_int_equal(kvd_memory_set_budget(m, need - less, &err), 0);
                    int rc = generate(m, &so, n_prompt, n_new, NULL, NULL);
                    check(rc == (less ? KVD_E_BUDGET : 0), "%s, %s, %lld tokens: %d with %lld bytes", families[f], p.name,
                          (long long)(n_prompt + n_new), rc, (long long)(need - less));
                }
                assert_true(kvd_plan_tier(m, &any, r, n_prompt, n_new, p.need_bytes, t, &q));
                assert_true(q.fits && q.max_tokens >= n_prompt + n_new);
                assert_true(kvd_plan_tier(m, &any, r, n_prompt, n_new, p.need_bytes - 1, t, &q));
                assert_true(!q.fits && !q.chosen && q.max_tokens < n_prompt + n_new && q.decode_tokens_per_s == 0);
                assert_int_equal(kvd_memory_set_budget(m, 0, &err), 0);
            }
        tiny_free(&m);
    }
}

/* AUTO does what the rates say, and the answer is the same. */
static void auto_follows_the_rates(void **state)
{
    (void)state;
    for (int f = 0; f < N_FAMILIES; f++) {
        kvd_model *m = tiny_load(families[f], NULL);
        kvd_session_options so = options_of(KVD_TIER_FULL), any = options_of(KVD_TIER_RECOMPUTE);
        char receipts[3][33], tier[16];
        kvd_tier_plan full, recompute, disk;
        kvd_rates r;
        kvd_error err = {0};
        memcpy(&r, &rates, sizeof r);
        assert_int_equal(generate(m, &so, 200, 20, tier, receipts[0]), 0);
        kvd_plan_tier(m, &any, &r, 200, 20, 0, KVD_TIER_FULL, &full);
        kvd_plan_tier(m, &any, &r, 200, 20, 0, KVD_TIER_RECOMPUTE, &recompute);
        kvd_plan_tier(m, &any, &r, 200, 20, 0, KVD_TIER_DISK, &disk);
        int64_t budget = max64(recompute.need_bytes, disk.need_bytes);
        assert_int_equal(kvd_memory_set_budget(m, budget, &err), 0);
        for (int fast = 0; fast < 2; fast++) {
            so = options_of(KVD_TIER_RECOMPUTE);
            so.evict_to = KVD_EVICT_AUTO;
            so.rates = &r;
            r.disk_read_bytes_s = r.disk_write_bytes_s = fast ? 1e15 : 1;
            assert_int_equal(generate(m, &so, 200, 20, tier, receipts[1 + fast]), 0);
            assert_string_equal(tier, full.need_bytes <= budget ? "full" : fast ? "disk" : "recompute");
            assert_string_equal(receipts[0], receipts[1 + fast]);
        }
        /* Only one of them fits: that one, whatever the rates. */
        if (max64(recompute.need_bytes, disk.need_bytes) < full.need_bytes && recompute.need_bytes != disk.need_bytes) {
            bool on_disk = disk.need_bytes < recompute.need_bytes;
            assert_int_equal(kvd_memory_set_budget(m, min64(recompute.need_bytes, disk.need_bytes), &err), 0);
            r.disk_read_bytes_s = r.disk_write_bytes_s = on_disk ? 1 : 1e15;
            assert_int_equal(generate(m, &so, 200, 20, tier, receipts[1]), 0);
            assert_string_equal(tier, on_disk ? "disk" : "recompute");
            assert_string_equal(receipts[0], receipts[1]);
        }
        tiny_free(&m);
    }
}

static void odd_questions_have_answers(void **state)
{
    (void)state;
    kvd_model *m = tiny_load("llama", NULL);
    static const int64_t odd[] = {0, 1, 2, 2000, INT64_MAX / 4};
    const kvd_rates *r = (const kvd_rates *)(const void *)&rates;
    kvd_session_options so = options_of(KVD_TIER_RECOMPUTE);
    kvd_tier_plan p;
    for (int a = 0; a < 4; a++)
        for (int b = 0; b < 4; b++)
            for (int c = 0; c < 5; c++)
                for (int kept = -1; kept < 3; kept++) {
                    int n_chosen = 0;
                    so.kv_tokens = kept;
                    for (int i = 0; kvd_plan_tier(m, &so, r, odd[a], odd[b], odd[c], i, &p); i++) {
                        n_chosen += p.chosen;
                        assert_true(p.need_bytes >= 0 && p.max_tokens >= 0 && p.max_tokens <= m->config.n_ctx);
                        assert_true(!p.chosen || p.fits);
                        assert_true(p.decode_tokens_per_s >= 0 && p.decode_tokens_per_s < 1e9);
                    }
                    assert_true(n_chosen <= 1);
                }
    assert_false(kvd_plan_tier(m, NULL, r, 1, 1, 0, -1, &p));
    assert_false(kvd_plan_tier(m, NULL, r, 1, 1, 0, KVD_TIER_COUNT, &p));
    tiny_free(&m);
}

/* What calibration gives can be planned with; the budget neither hinders nor knows it. */
static void calibration_gives_usable_rates(void **state)
{
    (void)state;
    for (int f = 0; f < N_FAMILIES; f += 4) {
        kvd_model_options mo;
        kvd_model_options_defaults(&mo);
        mo.n_threads = 2;
        mo.kv_budget_bytes = 20000;
        kvd_model *m = tiny_load(families[f], &mo);
        kvd_session_options so = options_of(KVD_TIER_DISK);
        kvd_rates r;
        kvd_error err = {0};
        int rc = kvd_calibrate(m, &so, &r, &err);
        check(rc == 0, "%s", err.message);
        for (int i = 0; i < KVD_RATE_POINTS; i++)
            check(r.rows_s[i] > 0 && (i == 0 || r.rows_s[i] >= r.rows_s[i - 1]), "%lld rows: %g s", (long long)r.rows[i], r.rows_s[i]);
        assert_true(r.head_s >= 0 && r.pair_alone_s > 0 && r.pair_chunk_s > 0);
        assert_true(r.disk_read_bytes_s > 0 && r.disk_write_bytes_s > 0);
        assert_int_equal(atomic_load(&m->ledger->context_peak), 0);
        so.spill_dir = "/dev/shm";
        assert_int_equal(kvd_calibrate(m, &so, &r, &err), 0);
        assert_true(r.disk_read_bytes_s == 0 && r.disk_write_bytes_s == 0);
        tiny_free(&m);
    }
}

int main(void)
{
    cmocka_set_test_filter(getenv("KVD_TEST")); /* a pattern: only these */
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_go_through_their_points),
        cmocka_unit_test(fits_is_exact),
        cmocka_unit_test(more_memory_is_not_slower),
        cmocka_unit_test(the_least_time_is_chosen),
        cmocka_unit_test(segments_cost),
        cmocka_unit_test(what_is_resident_is_not_read),
        cmocka_unit_test(half_a_disk_is_none),
        cmocka_unit_test(needs_are_what_sessions_take),
        cmocka_unit_test(auto_follows_the_rates),
        cmocka_unit_test(odd_questions_have_answers),
        cmocka_unit_test(calibration_gives_usable_rates),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
