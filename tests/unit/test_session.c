/* Sessions on tiny models: whatever is evicted, rebuilt, cut, parked, refused,
 * cancelled, and however the work is shared out, the logits are the bits of policy
 * full fed at once, and the ledger's peak is the plan's, to the byte.
 *
 * KVD_CASES sets how many combinations of settings are drawn (default 120); the
 * slow suite draws thousands. */
#include "tiny.h"

#include <pthread.h>
#include <sched.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

static const char *const families[] = {"llama", "window", "qwen2", "qwen3", "gemma3", "narrow", "kquant"};
enum { N_FAMILIES = sizeof families / sizeof families[0], N_TOKENS = 320 };

static int n_cases(int absent)
{
    const char *n = getenv("KVD_CASES");
    return n ? atoi(n) : absent;
}

/* ---- references --------------------------------------------------------------- */

/* Logits of each position by policy full, fed at once, f32 or whatever the key says. */
typedef struct {
    float *logits; /* [N_TOKENS][n_vocab] */
    int32_t ids[N_TOKENS];
    int64_t n_vocab;
} reference;

static reference references[N_FAMILIES][3][3];

static int take_row(void *ctx, int64_t pos, const float *logits)
{
    reference *r = ctx;
    memcpy(r->logits + pos * r->n_vocab, logits, (size_t)r->n_vocab * sizeof *logits);
    return 0;
}

static const reference *reference_of(int family, kvd_float_type kv, kvd_float_type stream)
{
    reference *r = &references[family][kv][stream];
    if (r->logits)
        return r;
    kvd_model_options mo;
    kvd_model_options_defaults(&mo);
    mo.n_threads = 1;
    mo.chunk_tokens = 512;
    kvd_model *m = tiny_load(families[family], &mo);
    kvd_session_options so;
    kvd_session_options_defaults(&so);
    so.policy = KVD_POLICY_FULL;
    so.kv_type = kv;
    so.stream = stream;
    kvd_session *s = tiny_session(m, &so);
    r->n_vocab = m->config.n_vocab;
    r->logits = malloc(sizeof(float) * N_TOKENS * (size_t)r->n_vocab);
    uint64_t seed = (uint64_t)family;
    for (int i = 0; i < N_TOKENS; i++)
        r->ids[i] = (int32_t)(kvd__splitmix64(&seed) % (uint64_t)r->n_vocab);
    kvd_error err = {0};
    check(kvd_session_feed_all(s, r->ids, N_TOKENS, N_TOKENS, take_row, r, &err) == 0, "%s", err.message);
    kvd_session_free(&s);
    tiny_free(&m);
    return r;
}

static int free_references(void **state)
{
    (void)state;
    for (int f = 0; f < N_FAMILIES; f++)
        for (int i = 0; i < 9; i++)
            free(references[f][i / 3][i % 3].logits);
    return 0;
}

static void same_row(const reference *r, int64_t pos, const float *logits)
{
    if (!memcmp(logits, r->logits + pos * r->n_vocab, (size_t)r->n_vocab * sizeof *logits))
        return;
    int64_t i = 0;
    while (!memcmp(logits + i, r->logits + pos * r->n_vocab + i, sizeof *logits))
        i++;
    fail_msg("logits of position %lld differ from policy full: id %lld has %a, not %a", (long long)pos, (long long)i,
             (double)logits[i], (double)r->logits[pos * r->n_vocab + i]);
}

/* ---- a session under watch -------------------------------------------------------- */

typedef struct {
    kvd_model *m;
    kvd_session *s;
    const reference *r;
    int64_t rows_seen;
    int64_t cancel_at, steps; /* progress calls; cancel_at -1: never */
    int64_t calls_rows, calls_recomputed;
    _Atomic bool done;
} watch;

static int count_progress(void *ctx, int64_t done, int64_t total, int64_t rows, int64_t recomputed)
{
    watch *w = ctx;
    check(done >= 0 && done < total && recomputed >= 0 && recomputed <= rows && total % rows == 0,
          "progress %lld of %lld, %lld rows, %lld recomputed", (long long)done, (long long)total, (long long)rows, (long long)recomputed);
    w->calls_rows = rows;
    w->calls_recomputed = recomputed;
    return w->steps++ == w->cancel_at;
}

static int check_row(void *ctx, int64_t pos, const float *logits)
{
    watch *w = ctx;
    same_row(w->r, pos, logits);
    w->rows_seen++;
    return 0;
}

/* What the planner says of the passes of a feed: their number, and the peak. */
static int foretell(const kvd_session *s, int64_t n, int64_t *passes, int64_t *peak, int64_t *recomputed, kvd_error *err)
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
static int feed(watch *w, int64_t n, int64_t n_logits)
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

static void rewind_to(watch *w, int64_t n)
{
    kvd_error err = {0};
    check(kvd_session_rewind(w->s, n, &err) == 0, "%s", err.message);
    assert_int_equal(kvd_session_tokens(w->s, NULL), n);
    assert_true(atomic_load(&w->m->ledger->now[KVD_ACC_CHECKPOINT]) <= kvd__checkpoint_bytes(&w->s->shape, n));
}

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
    const reference *r = reference_of(c->family, c->kv, c->stream);
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
    int n = n_cases(120);
    for (int i = 0; i < n; i++) {
        tiny_seed = (uint64_t)i * 1000003;
        combination c = draw();
        if (getenv("KVD_VERBOSE"))
            fprintf(stderr, "case %d: %s, chunk %d, threads %d, isa %d, kv %d, stream %d, policy %d, kv_tokens %lld, n %lld, way %d, budget %lld, disturbed %d\n",
                    i, families[c.family], c.chunk, c.n_threads, c.isa, c.kv, c.stream, c.policy, (long long)c.kv_tokens, (long long)c.n,
                    c.way, (long long)c.budget, c.disturbed);
        run(&c);
    }
}

/* ---- budgets ---------------------------------------------------------------------- */

static kvd_model *load_default(int family, int n_threads)
{
    kvd_model_options mo;
    kvd_model_options_defaults(&mo);
    mo.n_threads = n_threads;
    mo.chunk_tokens = 32;
    return tiny_load(families[family], &mo);
}

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
                    watch w = {.m = m, .s = tiny_session(m, &so), .r = reference_of(f, so.kv_type, so.stream), .cancel_at = -1};
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
                    watch w = {.m = m, .s = tiny_session(m, &so), .r = reference_of(f, so.kv_type, so.stream), .cancel_at = -1};
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
            const reference *r = reference_of(f, so.kv_type, so.stream);
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
        const reference *r = reference_of(f, so.kv_type, so.stream);
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
    w = (watch){.m = m, .s = tiny_session(m, NULL), .r = reference_of(4, KVD_TYPE_F16, KVD_TYPE_F32)};
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

/* ---- failures in the middle -------------------------------------------------------- */

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
            watch w = {.m = m, .s = tiny_session(m, &so), .r = reference_of(f, so.kv_type, so.stream), .cancel_at = -1};
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
    watch w = {.m = m, .s = tiny_session(m, &so), .r = reference_of(0, so.kv_type, so.stream)};
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
    watch w = {.m = m, .s = tiny_session(m, NULL), .r = reference_of(0, KVD_TYPE_F16, KVD_TYPE_F32), .cancel_at = -1};
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

/* ---- pieces and windows -------------------------------------------------------------- */

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
            watch w = {.m = m, .s = tiny_session(m, NULL), .r = reference_of(f, KVD_TYPE_F16, KVD_TYPE_F32), .cancel_at = -1};
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

/* ---- the caller's floating-point environment ------------------------------------------- */

static void the_callers_rounding_does_not_matter(void **state)
{
    (void)state;
#if defined(__x86_64__)
    static const unsigned modes[] = {0x1f80 | 0x8040, 0x1f80 | 0x4000, 0x1f80 | 0x2000, 0x1f80 | 0xe040, 0x1f80 | 0x3f};
    unsigned mine = _mm_getcsr();
    char receipts[6][33];
    for (int i = 0; i < 6; i++) {
        const reference *r = reference_of(4, KVD_TYPE_F16, KVD_TYPE_F32);
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
        cmocka_unit_test(least_and_full_bytes_are_tight),
        cmocka_unit_test(what_is_admitted_is_finished),
        cmocka_unit_test(sessions_share_a_budget),
        cmocka_unit_test(others_meddle_meanwhile),
        cmocka_unit_test(cancelled_at_every_step),
        cmocka_unit_test(cancelled_by_the_logits),
        cmocka_unit_test(bad_arguments_change_nothing),
        cmocka_unit_test(the_trained_context_can_be_filled),
        cmocka_unit_test(long_prompts_come_in_pieces),
        cmocka_unit_test(waves_of_tiles),
        cmocka_unit_test(windows_are_given_back),
        cmocka_unit_test(the_callers_rounding_does_not_matter),
    };
    return cmocka_run_group_tests(tests, NULL, free_references);
}
