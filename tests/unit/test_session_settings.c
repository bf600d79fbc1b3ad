/* Sessions under any settings: threads, chunks, instruction sets, types, budgets and
 * limits, fed in any pieces and disturbed in between, and whatever the caller's
 * floating-point environment is. The bits are the reference's.
 *
 * KVD_CASES sets how many combinations of settings are drawn (default 120); the
 * slow suite draws thousands. */
#include "session_watch.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* ---- the product of settings ---------------------------------------------------- */

static const int chunks[] = {1, 2, 3, 5, 7, 16, 63, 64, 65, 512};
static const int threads[] = {1, 2, 3, 4, 8};
static const int64_t kept[] = {-1, -1, 0, 1, 15, 16, 17, 48, 64, 1000};

typedef struct {
    int family, chunk, n_threads;
    kvd_isa isa;
    kvd_float_type kv, stream;
    kvd_policy policy;
    int64_t kv_tokens, n;
    int way;         /* at once, one by one, in odd pieces, all rows */
    int64_t budget;  /* in thousandths from least (0) to full (1000); -1: none */
    bool disturbed;
} combination;

static kvd_isa random_isa(void)
{
    static const struct {
        kvd_isa isa;
        kvd_cpu cpu;
    } all[] = {{KVD_ISA_SCALAR, KVD_CPU_SCALAR}, {KVD_ISA_AVX2, KVD_CPU_AVX2}, {KVD_ISA_AVX512, KVD_CPU_AVX512}, {KVD_ISA_NEON, KVD_CPU_NEON}};
    int i = (int)pick(5);
    return i < 4 && kvd__cpu_has(all[i].cpu) ? all[i].isa : KVD_ISA_AUTO;
}

static combination draw(void)
{
    combination c = {.family = (int)pick(N_FAMILIES), .chunk = chunks[pick(10)], .n_threads = threads[pick(5)], .isa = random_isa(),
                     .kv = (kvd_float_type)pick(3), .stream = pick(2) ? KVD_TYPE_F32 : (kvd_float_type)pick(3),
                     .policy = pick(6) ? KVD_POLICY_KV_DIRECT : KVD_POLICY_FULL, .kv_tokens = kept[pick(10)],
                     .n = 20 + pick(pick(3) ? 90 : N_TOKENS - 20), .way = (int)pick(4), .budget = pick(3) ? pick(8) * 150 : -1,
                     .disturbed = pick(3) == 0};
    if (c.policy == KVD_POLICY_FULL)
        c.kv_tokens = -1;
    /* One row at a time costs a pass over what is evicted each, and many threads and
     * small chunks a barrier each: keep those short. */
    if (c.way == 1)
        c.n = min64(c.n, c.isa == KVD_ISA_SCALAR || c.n_threads > 2 || c.chunk < 16 ? 40 : 110);
    return c;
}

static void disturb(watch *w)
{
    int64_t n = w->s->n;
    switch (pick(5)) {
    case 0:
        rewind_to(w, n - pick(min64(n, 30) + 1));
        break;
    case 1:
        rewind_to(w, pick(n + 1));
        break;
    case 2:
        kvd_session_park(w->s);
        assert_int_equal(atomic_load(&w->m->ledger->now[KVD_ACC_KV]), 0);
        break;
    case 3:
        w->cancel_at = pick(6);
        break;
    }
}

static void run(const combination *c)
{
    kvd_model_options mo;
    kvd_model_options_defaults(&mo);
    mo.n_threads = c->n_threads;
    mo.chunk_tokens = c->chunk;
    mo.isa = c->isa;
    kvd_session_options so;
    kvd_session_options_defaults(&so);
    so.policy = c->policy;
    so.kv_type = c->kv;
    so.stream = c->stream;
    so.kv_tokens = c->kv_tokens;
    const reference *r = reference_of(c->family, c->kv, c->stream, 0);
    kvd_model *m = tiny_load(families[c->family], &mo);
    kvd_error err = {0};
    if (c->budget >= 0) {
        kvd_plan plan;
        kvd_plan_session(m, &so, c->n, c->n, 0, &plan);
        int64_t span = max64(0, plan.full_bytes - plan.least_bytes);
        assert_int_equal(kvd_memory_set_budget(m, plan.least_bytes + span * c->budget / 1000, &err), 0);
    }
    watch w = {.m = m, .s = tiny_session(m, &so), .r = r, .cancel_at = -1};
    kvd_session_set_progress(w.s, count_progress, &w);
    for (int tries = 0; w.s->n < c->n; tries++) {
        int64_t left = c->n - w.s->n, n = c->way == 1 ? 1 : c->way == 2 ? min64(left, 1 + pick(37)) : left;
        int rc = feed(&w, n, c->way == 3 ? pick(n + 1) : c->way == 2 && pick(2) ? pick(n + 1) : -1);
        check(rc == 0 || rc == KVD_E_CANCELLED, "refused: budget %lld, %lld tokens", (long long)m->ledger->budget_bytes, (long long)w.s->n);
        w.cancel_at = -1;
        if (c->disturbed && tries < 12 && pick(3) == 0)
            disturb(&w);
    }
    kvd_session_free(&w.s);
    tiny_free(&m);
}

static void product(void **state)
{
    (void)state;
    const char *cases = getenv("KVD_CASES");
    for (int i = 0, n = cases ? atoi(cases) : 120; i < n; i++) {
        tiny_seed = (uint64_t)i * 1000003;
        combination c = draw();
        if (getenv("KVD_VERBOSE"))
            fprintf(stderr, "case %d: %s, chunk %d, threads %d, isa %d, kv %d, stream %d, policy %d, kv_tokens %lld, n %lld, way %d, budget %lld, disturbed %d\n",
                    i, families[c.family], c.chunk, c.n_threads, c.isa, c.kv, c.stream, c.policy, (long long)c.kv_tokens, (long long)c.n,
                    c.way, (long long)c.budget, c.disturbed);
        run(&c);
    }
}

/* ---- the caller's floating-point environment ------------------------------------------- */

static void the_callers_rounding_does_not_matter(void **state)
{
    (void)state;
#if defined(__x86_64__)
    static const unsigned modes[] = {0x1f80 | 0x8040, 0x1f80 | 0x4000, 0x1f80 | 0x2000, 0x1f80 | 0xe040, 0x1f80 | 0x3f};
    unsigned mine = _mm_getcsr();
    char receipts[6][33];
    for (int i = 0; i < 6; i++) {
        const reference *r = reference_of(4, KVD_TYPE_F16, KVD_TYPE_F32, 0);
        unsigned set = i < 5 ? modes[i] : 0x1f80;
        kvd_error err = {0};
        kvd_session_options so;
        kvd_session_options_defaults(&so);
        so.kv_tokens = 40;
        kvd_model *m = NULL;
        kvd_session *s = NULL;
        kvd_generate_options o;
        kvd_generate_options_defaults(&o);
        o.max_tokens = 20;
        o.sampling.temperature = 0.8f;
        o.ignore_end = true;
        kvd_result res;
        const float *logits;
        kvd_model_options mo;
        kvd_model_options_defaults(&mo);
        mo.n_threads = 2;
        float k[64], v[64], h[64];
        for (int j = 0; j < 64; j++)
            h[j] = (float)j * 0.01f;
        _mm_setcsr(set);
        int rc = kvd_model_load(&m, tiny_path(families[4]), &mo, &err);
        rc = rc ? rc : kvd_session_create(&s, m, &so, &err);
        rc = rc ? rc : kvd_session_feed(s, r->ids, 90, &logits, &err);
        unsigned after_feed = _mm_getcsr();
        if (!rc)
            same_row(r, 89, logits);
        rc = rc ? rc : kvd_lab_reconstruct(s, 1, 5, h, k, v, &err);
        unsigned after_lab = _mm_getcsr();
        rc = rc ? rc : kvd_generate(s, r->ids + 90, 10, &o, &res, &err);
        unsigned after_generate = _mm_getcsr();
        _mm_setcsr(mine);
        check(rc == 0, "%s", err.message);
        assert_int_equal(after_feed, set);
        assert_int_equal(after_lab, set);
        assert_int_equal(after_generate, set);
        strcpy(receipts[i], res.receipt);
        assert_string_equal(receipts[0], res.receipt);
        kvd_result_free(&res);
        kvd_session_free(&s);
        tiny_free(&m);
    }
#else
    skip();
#endif
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(product),
        cmocka_unit_test(the_callers_rounding_does_not_matter),
    };
    return cmocka_run_group_tests(tests, NULL, free_references);
}
