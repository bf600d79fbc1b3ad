/* The ground that everything stands on: ledger, pool, half floats, fused
 * multiply-add, error texts, noise, files. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/dtype.h"
#include "base/error.h"
#include "base/file.h"
#include "base/fma.h"
#include "base/fpenv.h"
#include "base/half.h"
#include "base/ledger.h"
#include "base/pool.h"
#include "base/rng.h"

/* --- ledger --- */

static int all_zero(const uint8_t *p, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (p[i])
            return 0;
    return 1;
}

static void ledger_counts(void **state)
{
    (void)state;
    kvd_ledger l;
    kvd_error err;
    kvd__ledger_init(&l, 0);
    static const size_t sizes[] = {0, 1, 63, 64, 65, 4000, KVD__MAP_THRESHOLD - 1, KVD__MAP_THRESHOLD, 1000000};
    enum { N = sizeof sizes / sizeof sizes[0] };
    for (int a = 0; a < KVD_ACC_COUNT; a++) {
        void *p[N];
        int64_t sum = 0;
        for (int i = 0; i < N; i++) {
            p[i] = kvd__alloc(&l, (kvd_account)a, sizes[i], &err);
            assert_non_null(p[i]);
            assert_int_equal((uintptr_t)p[i] % 64, 0);
            assert_true(all_zero(p[i], sizes[i]));
            memset(p[i], 0xff, sizes[i]);
            sum += (int64_t)sizes[i];
            assert_int_equal(l.now[a], sum);
        }
        assert_int_equal(l.context_now, kvd__account_is_context((kvd_account)a) ? sum : 0);
        for (int i = 0; i < N; i++)
            kvd__free(p[i]);
        assert_int_equal(l.now[a], 0);
        assert_int_equal(l.peak[a], sum);
        assert_int_equal(l.context_now, 0);
    }
    kvd__free(NULL);
    assert_string_equal(kvd__account_name(KVD_ACC_KV), "kv");
    assert_int_equal(kvd__ledger_room(&l), INT64_MAX);
}

static void ledger_budget(void **state)
{
    (void)state;
    kvd_ledger l;
    kvd_error err;
    kvd__ledger_init(&l, 1000);
    void *kv = kvd__alloc(&l, KVD_ACC_KV, 600, &err), *stream = kvd__alloc(&l, KVD_ACC_STREAM, 400, &err);
    assert_non_null(kv);
    assert_non_null(stream);
    assert_int_equal(kvd__ledger_room(&l), 0);
    assert_null(kvd__alloc(&l, KVD_ACC_CHECKPOINT, 1, &err));
    assert_int_equal(err.code, KVD_E_BUDGET);
    assert_int_equal(err.need_bytes, 1001);
    assert_null(kvd__alloc(&l, KVD_ACC_LAYER, 1, NULL));
    /* What is not context is counted, never limited; no bytes always fit. */
    void *weights = kvd__alloc(&l, KVD_ACC_WEIGHTS, 5000, &err), *none = kvd__alloc(&l, KVD_ACC_KV, 0, &err);
    assert_non_null(weights);
    assert_non_null(none);
    assert_int_equal(l.now[KVD_ACC_CHECKPOINT], 0);
    assert_int_equal(l.context_now, 1000);
    kvd__free(none);
    kvd__free(weights);
    kvd__free(stream);
    assert_int_equal(kvd__ledger_room(&l), 400);
    assert_int_equal(l.context_peak, 1000);
    /* Growing charges the difference; what does not fit leaves the old block. */
    memset(kv, 7, 600);
    assert_null(kvd__realloc(&l, KVD_ACC_KV, kv, 1001, &err));
    assert_int_equal(err.code, KVD_E_BUDGET);
    assert_int_equal(err.need_bytes, 1001);
    assert_int_equal(((uint8_t *)kv)[599], 7);
    kv = kvd__realloc(&l, KVD_ACC_KV, kv, 1000, &err);
    assert_non_null(kv);
    assert_int_equal(l.context_peak, 1000);
    assert_true(((uint8_t *)kv)[599] == 7 && all_zero((uint8_t *)kv + 600, 400));
    /* Shrinking can not fail, not even when nothing more can be allocated. */
    l.fail_at = 1;
    kv = kvd__realloc(&l, KVD_ACC_KV, kv, 10, &err);
    assert_non_null(kv);
    assert_int_equal(l.context_now, 10);
    l.fail_at = 0;
    kvd__free(kv);
    assert_int_equal(l.context_now, 0);

    kvd__ledger_init(&l, 100000); /* page by page up to the budget and back */
    kv = NULL;
    for (size_t bytes = 512; bytes <= 100000; bytes += 512) {
        kv = kvd__realloc(&l, KVD_ACC_KV, kv, bytes, &err);
        assert_non_null(kv);
        assert_int_equal(l.context_peak, (int64_t)bytes);
    }
    l.fail_at = 1;
    for (size_t bytes = 99000; bytes > 0; bytes -= 500) {
        kv = kvd__realloc(&l, KVD_ACC_KV, kv, bytes, &err);
        assert_non_null(kv);
        assert_int_equal(l.context_now, (int64_t)bytes);
    }
    kvd__free(kv);
    assert_int_equal(l.context_now, 0);

    /* Mapped from the start: pages move. */
    kvd__ledger_init(&l, 300000);
    kv = kvd__alloc(&l, KVD_ACC_KV, 200000, &err);
    assert_non_null(kv);
    kv = kvd__realloc(&l, KVD_ACC_KV, kv, 300000, &err);
    assert_non_null(kv);
    assert_int_equal(l.context_peak, 300000);
    assert_null(kvd__realloc(&l, KVD_ACC_KV, kv, 300001, &err));
    assert_int_equal(err.code, KVD_E_BUDGET);
    kvd__free(kv);
    assert_int_equal(l.context_now, 0);
    /* Absurd sizes overflow nothing. */
    assert_null(kvd__alloc(&l, KVD_ACC_HOST, SIZE_MAX, &err));
    assert_int_equal(err.code, KVD_E_NOMEM);
    assert_null(kvd__alloc_array(&l, KVD_ACC_HOST, SIZE_MAX / 2, 3, &err));
    assert_int_equal(err.code, KVD_E_NOMEM);
    assert_null(kvd__alloc(&l, KVD_ACC_HOST, (size_t)1 << 60, &err));
    assert_int_equal(err.code, KVD_E_NOMEM);
    assert_int_equal(l.now[KVD_ACC_HOST], 0);
}

/* Grow and shrink over the threshold in all directions: contents stay, what is
 * new is zero, also what was written, shrunk away and grown again. */
static void ledger_realloc(void **state)
{
    (void)state;
    static const size_t sizes[] = {0, 1, 100, 5000, 131071, 131072, 131073, 135000, 140000, 135168 - 64, 135168 - 63, 600000};
    enum { N = sizeof sizes / sizeof sizes[0] };
    kvd_ledger l;
    kvd_error err;
    kvd__ledger_init(&l, 0);
    for (int i = 0; i < N; i++)
        for (int j = 0; j < N; j++)
            for (int k = 0; k < N; k++) {
                size_t from = sizes[i], mid = sizes[j], to = sizes[k], kept = from < mid ? from : mid;
                uint8_t *p = kvd__realloc(&l, KVD_ACC_HOST, NULL, from, &err);
                assert_non_null(p);
                memset(p, 0xa5, from);
                p = kvd__realloc(&l, KVD_ACC_HOST, p, mid, &err);
                assert_non_null(p);
                assert_int_equal((uintptr_t)p % 64, 0);
                assert_true(all_zero(p + kept, mid - kept));
                assert_true(!kept || (p[0] == 0xa5 && !memcmp(p, p + 1, kept - 1)));
                memset(p, 0x5a, mid);
                kept = mid < to ? mid : to;
                p = kvd__realloc(&l, KVD_ACC_HOST, p, to, &err);
                assert_non_null(p);
                assert_true(all_zero(p + kept, to - kept));
                assert_true(!kept || (p[0] == 0x5a && !memcmp(p, p + 1, kept - 1)));
                assert_int_equal(l.now[KVD_ACC_HOST], to);
                kvd__free(p);
                assert_int_equal(l.now[KVD_ACC_HOST], 0);
            }
}

static void ledger_fails_on_demand(void **state)
{
    (void)state;
    kvd_ledger l;
    kvd_error err;
    kvd__ledger_init(&l, 1 << 20);
    l.fail_at = 3;
    void *a = kvd__alloc(&l, KVD_ACC_KV, 10, &err), *b = kvd__alloc_huge(&l, KVD_ACC_WEIGHTS, 10, &err);
    assert_non_null(a);
    assert_non_null(b);
    assert_null(kvd__alloc(&l, KVD_ACC_KV, 10, &err));
    assert_int_equal(err.code, KVD_E_NOMEM);
    assert_null(kvd__realloc(&l, KVD_ACC_KV, a, 20, &err));
    assert_null(kvd__strndup(&l, KVD_ACC_HOST, "abc", 2, &err));
    l.fail_at = 0;
    char *s = kvd__strndup(&l, KVD_ACC_HOST, "abc", 2, &err);
    assert_string_equal(s, "ab");
    kvd__free(s);
    kvd__free(a);
    kvd__free(b);
    assert_int_equal(l.context_now, 0);
    assert_int_equal(l.now[KVD_ACC_WEIGHTS], 0);
}

static void ledger_huge(void **state)
{
    (void)state;
    kvd_ledger l;
    kvd_error err;
    kvd__ledger_init(&l, 0);
    for (size_t n = 1; n < (size_t)9 << 20; n = n * 5 + 1) {
        uint8_t *p = kvd__alloc_huge(&l, KVD_ACC_WEIGHTS, n, &err);
        assert_non_null(p);
        assert_int_equal((uintptr_t)p % 64, 0);
        assert_true(all_zero(p, n));
        p[n - 1] = 1;
        assert_int_equal(l.now[KVD_ACC_WEIGHTS], n);
        kvd__free(p);
        assert_int_equal(l.now[KVD_ACC_WEIGHTS], 0);
    }
}

typedef struct {
    kvd_ledger l;
    _Atomic int refused;
} contest;

static void compete(void *ctx, int tid, int n_threads)
{
    contest *c = ctx;
    uint64_t seed = (uint64_t)tid;
    (void)n_threads;
    for (int i = 0; i < 2000; i++) {
        void *p = kvd__alloc(&c->l, (kvd_account)(KVD_ACC_KV + i % 3), kvd__splitmix64(&seed) % 600, NULL);
        if (!p)
            atomic_fetch_add(&c->refused, 1);
        kvd__free(p);
    }
}

/* Many threads at the budget's edge: it is never passed, nothing gets lost. */
static void ledger_contest(void **state)
{
    (void)state;
    contest c = {.refused = 0};
    kvd_ledger host;
    kvd__ledger_init(&host, 0);
    kvd__ledger_init(&c.l, 700);
    kvd_pool *pool;
    assert_int_equal(kvd__pool_create(&pool, 4, &host, NULL), 0);
    kvd__pool_run(pool, compete, &c);
    kvd__pool_destroy(&pool);
    assert_true(c.l.context_peak <= 700);
    assert_int_equal(c.l.context_now, 0);
    for (int a = 0; a < KVD_ACC_COUNT; a++)
        assert_int_equal(c.l.now[a], 0);
}

/* --- pool --- */

enum { ROUNDS = 300, MAX_TEST_THREADS = 8 };

typedef struct {
    kvd_pool *pool;
    int slot[2][MAX_TEST_THREADS];
    _Atomic int wrong, seen[MAX_TEST_THREADS];
} relay;

/* Every round each thread writes a slot and reads those of all others after a
 * barrier: a thread that runs ahead or behind reads a wrong number. */
static void run_relay(void *ctx, int tid, int n_threads)
{
    relay *r = ctx;
    atomic_fetch_add(&r->seen[tid], 1);
    for (int round = 1; round <= ROUNDS; round++) {
        int *slot = r->slot[round & 1];
        slot[tid] = round * 100 + tid;
        kvd__pool_barrier(r->pool);
        for (int i = 0; i < n_threads; i++)
            if (slot[i] != round * 100 + i)
                atomic_fetch_add(&r->wrong, 1);
    }
}

static void pool_barriers(void **state)
{
    (void)state;
    static const int threads[] = {1, 2, 3, 8};
    kvd_ledger l;
    kvd_error err;
    kvd__ledger_init(&l, 0);
    for (int i = 0; i < 4; i++) {
        relay r = {.wrong = 0};
        assert_int_equal(kvd__pool_create(&r.pool, threads[i], &l, &err), 0);
        assert_int_equal(kvd__pool_threads(r.pool), threads[i]);
        for (int run = 1; run <= 5; run++) {
            kvd__pool_run(r.pool, run_relay, &r);
            for (int t = 0; t < threads[i]; t++)
                assert_int_equal(r.seen[t], run);
        }
        assert_int_equal(r.wrong, 0);
        kvd__pool_destroy(&r.pool);
        assert_null(r.pool);
        kvd__pool_destroy(&r.pool);
        assert_int_equal(l.now[KVD_ACC_HOST], 0);
    }
}

static void count_once(void *ctx, int tid, int n_threads)
{
    (void)n_threads;
    ((_Atomic int *)ctx)[tid]++;
}

static void pool_many_short_runs(void **state)
{
    (void)state;
    kvd_ledger l;
    kvd__ledger_init(&l, 0);
    kvd_pool *pool;
    assert_int_equal(kvd__pool_create(&pool, 3, &l, NULL), 0);
    _Atomic int seen[3] = {0};
    for (int run = 1; run <= 3000; run++) {
        kvd__pool_run(pool, count_once, seen);
        assert_true(seen[0] == run && seen[1] == run && seen[2] == run);
    }
    kvd__pool_destroy(&pool);
    /* One that never runs ends, too. */
    assert_int_equal(kvd__pool_create(&pool, 8, &l, NULL), 0);
    kvd__pool_destroy(&pool);
}

static void pool_limits(void **state)
{
    (void)state;
    kvd_ledger l;
    kvd_error err;
    kvd__ledger_init(&l, 0);
    kvd_pool *pool = NULL;
    assert_int_equal(kvd__pool_create(&pool, 0, &l, &err), KVD_E_RANGE);
    assert_int_equal(kvd__pool_create(&pool, KVD__MAX_THREADS + 1, &l, &err), KVD_E_RANGE);
    for (int64_t n = 1; n <= 6; n++) { /* pool, threads, three workers */
        kvd__ledger_init(&l, 0);
        l.fail_at = n;
        int rc = kvd__pool_create(&pool, 4, &l, &err);
        assert_int_equal(rc, n <= 5 ? KVD_E_NOMEM : 0);
        if (!rc)
            kvd__pool_destroy(&pool);
        assert_null(pool);
        assert_int_equal(l.now[KVD_ACC_HOST], 0);
    }
    assert_true(kvd__cpu_count() >= 1);
    for (int64_t n = 0; n < 40; n++)
        for (int threads = 1; threads < 10; threads++) {
            int64_t begin, end, last = 0;
            for (int t = 0; t < threads; t++) {
                kvd__pool_share(n, t, threads, &begin, &end);
                assert_true(begin == last && end >= begin && end - begin <= n / threads + 1);
                last = end;
            }
            assert_int_equal(last, n);
        }
}

static void halve_least(void *ctx, int tid, int n_threads)
{
    (void)n_threads;
    volatile float least = 0x1p-126f, half = 0.5f;
    ((float *)ctx)[tid] = least * half; /* zero under flush-to-zero */
}

#if defined(__x86_64__)
enum { HOSTILE = 0xe040 }; /* FTZ, DAZ, towards zero */
static uint64_t get_control(void) { return __builtin_ia32_stmxcsr(); }
static void set_control(uint64_t c) { __builtin_ia32_ldmxcsr((unsigned)c); }
#elif defined(__aarch64__)
enum { HOSTILE = 0x7c80000 }; /* AHP, DN, FZ, towards zero, FZ16 */
static uint64_t get_control(void)
{
    uint64_t c;
    __asm__ volatile("mrs %0, fpcr" : "=r"(c));
    return c;
}
static void set_control(uint64_t c) { __asm__ volatile("msr fpcr, %0" : : "r"(c)); }
#endif

/* The caller's flush-to-zero reaches no thread, and is there again afterwards. */
static void pool_float_environment(void **state)
{
    (void)state;
#if defined(__x86_64__) || defined(__aarch64__)
    kvd_ledger l;
    kvd__ledger_init(&l, 0);
    kvd_pool *pool;
    uint64_t before = get_control();
    set_control(before | HOSTILE);
    float out[3] = {0}, outside;
    int rc = kvd__pool_create(&pool, 3, &l, NULL);
    if (!rc)
        kvd__pool_run(pool, halve_least, out);
    kvd_job_fn volatile opaque = halve_least; /* arithmetic of an inlined body may move over set_control */
    opaque(&outside, 0, 1);
    uint64_t after = get_control();
    set_control(before);
    assert_int_equal(rc, 0);
    for (int i = 0; i < 3; i++)
        assert_true(out[i] == 0x1p-127f);
    assert_true(outside == 0);
    assert_int_equal(after & HOSTILE, HOSTILE);
    kvd__pool_destroy(&pool);
#else
    (void)halve_least;
    print_message("SKIP: pool_float_environment: written for x86-64 and AArch64\n");
    skip();
#endif
}

/* --- half floats --- */

static void f16_every_value(void **state)
{
    (void)state;
    for (uint32_t h = 0; h < 0x10000; h++) {
        float f = kvd__f16_to_f32((uint16_t)h);
        uint32_t e = h >> 10 & 31, m = h & 1023;
        uint16_t back = kvd__f16_from_f32(f);
        if (e == 31 && m) {
            assert_true(isnan(f));
            assert_int_equal(back, h | 0x200); /* quiet, payload kept */
            continue;
        }
        double v = e == 31 ? INFINITY : e ? ldexp(1024.0 + m, (int)e - 25) : ldexp(m, -24);
        assert_true((double)f == (h & 0x8000 ? -v : v));
        assert_int_equal(signbit(f) != 0, h >> 15);
        assert_int_equal(back, h);
    }
}

/* Rounding, from the definition: the nearer neighbour, at equal distance the even one. */
static uint16_t f16_by_search(float f)
{
    uint16_t sign = signbit(f) ? 0x8000 : 0;
    double a = fabs((double)f);
    if (a >= 65520.0)
        return sign | 0x7c00;
    uint32_t lo = 0, hi = 0x7c00; /* f16(lo) <= a < f16(hi) */
    while (hi - lo > 1) {
        uint32_t mid = (lo + hi) / 2;
        if ((double)kvd__f16_to_f32((uint16_t)mid) <= a)
            lo = mid;
        else
            hi = mid;
    }
    double below = a - kvd__f16_to_f32((uint16_t)lo);
    double above = (hi == 0x7c00 ? 65536.0 : (double)kvd__f16_to_f32((uint16_t)hi)) - a;
    return (uint16_t)(sign | (below < above || (below == above && !(lo & 1)) ? lo : hi)) | sign;
}

static uint16_t bf16_by_search(uint32_t u)
{
    double below, above;
    uint32_t lo = u >> 16 & 0x7fff, hi = lo + 1;
    double a = (double)kvd__f32_from_bits(u & 0x7fffffff);
    below = a - (double)kvd__bf16_to_f32((uint16_t)lo);
    above = (hi == 0x7f80 ? 0x1p128 : (double)kvd__bf16_to_f32((uint16_t)hi)) - a;
    return (uint16_t)((u >> 16 & 0x8000) | (below < above || (below == above && !(lo & 1)) ? lo : hi));
}

static void half_rounding(void **state)
{
    (void)state;
    /* Every f16 boundary and half-way point with its neighbours, both signs. */
    for (uint32_t h = 0; h < 0x7c00; h++) {
        float a = kvd__f16_to_f32((uint16_t)h);
        float b = h == 0x7bff ? 65536.0f : kvd__f16_to_f32((uint16_t)(h + 1));
        uint32_t mid = kvd__f32_bits((a + b) / 2);
        for (uint32_t u = mid - 2; u <= mid + 2; u++) {
            assert_int_equal(kvd__f16_from_f32(kvd__f32_from_bits(u)), f16_by_search(kvd__f32_from_bits(u)));
            uint32_t minus = u | 0x80000000u;
            assert_int_equal(kvd__f16_from_f32(kvd__f32_from_bits(minus)), f16_by_search(kvd__f32_from_bits(minus)));
        }
    }
    static const uint32_t edges[] = {0, 1, 0x32ffffff, 0x33000000, 0x33000001, 0x387fe000, 0x387fffff, 0x38800000,
                                     0x477fefff, 0x477ff000, 0x7f7fffff, 0x7f800000, 0x007fffff, 0x00800000};
    for (size_t i = 0; i < sizeof edges / sizeof edges[0]; i++)
        for (uint32_t sign = 0; sign <= 0x80000000u && sign + 1 > sign; sign += 0x80000000u) {
            assert_int_equal(kvd__f16_from_f32(kvd__f32_from_bits(edges[i] | sign)),
                             f16_by_search(kvd__f32_from_bits(edges[i] | sign)));
            if (sign)
                break;
        }
    uint64_t seed = 1;
    for (int i = 0; i < 2000000; i++) {
        uint32_t u = (uint32_t)kvd__splitmix64(&seed);
        if ((u & 0x7fffffff) > 0x7f800000) {
            assert_true(isnan(kvd__f16_to_f32(kvd__f16_from_f32(kvd__f32_from_bits(u)))));
            assert_true(isnan(kvd__bf16_to_f32(kvd__bf16_from_f32(kvd__f32_from_bits(u)))));
            continue;
        }
        if (i < 300000 && f16_by_search(kvd__f32_from_bits(u)) != kvd__f16_from_f32(kvd__f32_from_bits(u)))
            fail_msg("f16 of %08x", u);
        if ((u & 0x7fffffff) < 0x7f800000 && bf16_by_search(u) != kvd__bf16_from_f32(kvd__f32_from_bits(u)))
            fail_msg("bf16 of %08x", u);
    }
    for (uint32_t h = 0; h < 0x10000; h++) { /* bf16 is exact both ways */
        float f = kvd__bf16_to_f32((uint16_t)h);
        assert_int_equal(kvd__bf16_from_f32(f), isnan(f) ? h | 0x40 : h);
    }
    assert_int_equal(kvd__bf16_from_f32(kvd__f32_from_bits(0x7f7fffff)), 0x7f80);
    assert_int_equal(kvd__bf16_from_f32(kvd__f32_from_bits(0x7f800001)), 0x7fc0);
}

/* --- fused multiply-add --- */

#if defined(__x86_64__)
__attribute__((target("fma"))) static float hardware_fmaf(float a, float b, float c)
{
    return __builtin_fmaf(a, b, c);
}
static int have_hardware_fma(void) { return __builtin_cpu_supports("fma"); }
#else
static float hardware_fmaf(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
static int have_hardware_fma(void) { return 1; }
#endif

static void check_fma(float a, float b, float c)
{
    float soft = kvd__fmaf_soft(a, b, c), hard = hardware_fmaf(a, b, c);
    if (isnan(hard) ? !isnan(soft) : kvd__f32_bits(soft) != kvd__f32_bits(hard))
        fail_msg("fma(%a, %a, %a): soft %a, hardware %a", (double)a, (double)b, (double)c, (double)soft, (double)hard);
}

static void fma_soft_is_hardware(void **state)
{
    (void)state;
    if (!have_hardware_fma()) {
        print_message("SKIP: fma_soft_is_hardware: this CPU has no FMA\n");
        skip();
    }
    static const uint32_t special[] = {
        0, 1, 2, 3, 0x7fffff, 0x800000, 0x800001, 0x1000000, 0x33800000, 0x33ffffff, 0x34000000, 0x3f000000, 0x3f7fffff,
        0x3f800000, 0x3f800001, 0x3f800002, 0x3fffffff, 0x40000000, 0x4b000000, 0x4b000001, 0x4b7fffff, 0x5f000000,
        0x5f7fffff, 0x7e800000, 0x7f000000, 0x7f7ffffe, 0x7f7fffff, 0x7f800000, 0x7fc00000, 0x1fc00000, 0x20000000,
        0x20000001, 0x00400000, 0x0c000001, 0x33000001};
    enum { N = sizeof special / sizeof special[0] };
    for (int i = 0; i < 2 * N; i++)
        for (int j = 0; j < 2 * N; j++)
            for (int k = 0; k < 2 * N; k++)
                check_fma(kvd__f32_from_bits(special[i / 2] | (uint32_t)(i & 1) << 31),
                          kvd__f32_from_bits(special[j / 2] | (uint32_t)(j & 1) << 31),
                          kvd__f32_from_bits(special[k / 2] | (uint32_t)(k & 1) << 31));
    uint64_t seed = 3;
    for (int i = 0; i < 3000000; i++) {
        uint64_t x = kvd__splitmix64(&seed), y = kvd__splitmix64(&seed);
        float a = kvd__f32_from_bits((uint32_t)x), b = kvd__f32_from_bits((uint32_t)(x >> 32));
        float c = kvd__f32_from_bits((uint32_t)y);
        check_fma(a, b, c);
        /* An addend that all but cancels, or that sits half an ulp off. */
        float p = a * b;
        check_fma(a, b, -p);
        check_fma(a, b, kvd__f32_from_bits(kvd__f32_bits(-p) + (uint32_t)(y >> 32 & 3) - 1));
        uint32_t e = (uint32_t)((y >> 40) % 60);
        if (isfinite(p) && p != 0) {
            check_fma(a, b, ldexpf(p, (int)e - 30));
            check_fma(a, b, ldexpf(y & 1 ? 1.0f : -1.0f, ilogbf(p) - 30 + (int)e));
        }
        /* Few bits, so that half-way cases are common; and results below 2^-126. */
        float sa = kvd__f32_from_bits((uint32_t)x & 0xfffff000), sb = kvd__f32_from_bits((uint32_t)(x >> 32) & 0xfffff000);
        check_fma(sa, sb, c);
        check_fma(ldexpf(1.0f + (float)(x & 0xfff) / 4096, -60 - (int)(y & 31)),
                  ldexpf(1.0f + (float)(x >> 12 & 0xfff) / 4096, -60 - (int)(y >> 5 & 15)),
                  kvd__f32_from_bits((uint32_t)(y >> 32) & 0x80ffffff));
    }
}

/* --- errors --- */

static void errors(void **state)
{
    (void)state;
    static const struct {
        int code, exit;
        const char *name;
    } all[] = {
#define KVD_X(name, value, exit_code, text) {value, exit_code, "KVD_E_" #name},
        KVD_ERRORS(KVD_X)
#undef KVD_X
    };
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        assert_string_equal(kvd_error_name(all[i].code), all[i].name);
        assert_int_equal(kvd_error_exit(all[i].code), all[i].exit);
        assert_true(strlen(kvd_error_text(all[i].code)) > 3);
        for (size_t k = 0; k < i; k++) {
            assert_int_not_equal(all[i].code, all[k].code);
            assert_string_not_equal(kvd_error_text(all[i].code), kvd_error_text(all[k].code));
        }
    }
    assert_string_equal(kvd_error_name(-9999), "KVD_E_?");
    assert_string_equal(kvd_error_text(5), "unknown error");
    assert_int_equal(kvd_error_exit(-9999), 1);

    kvd_error err = {.need_bytes = 9, .max_tokens = 9, .offset = 9};
    assert_int_equal(kvd__fail(&err, KVD_E_IO, "a %s\n\x1b[31m\x7f\t%d", "name", 7), KVD_E_IO);
    assert_string_equal(err.message, "a name??[31m??7");
    assert_true(err.code == KVD_E_IO && err.offset == -1 && err.need_bytes == 0 && err.max_tokens == 0);
    assert_int_equal(kvd__fail_at(&err, KVD_E_GGUF_SHAPE, 77, "x"), KVD_E_GGUF_SHAPE);
    assert_int_equal(err.offset, 77);
    assert_int_equal(kvd__fail(NULL, KVD_E_ARG, "nobody reads %d", 1), KVD_E_ARG);
    char text[1000];
    memset(text, 'x', sizeof text);
    text[999] = 0;
    kvd__fail(&err, KVD_E_ARG, "%s", text);
    assert_int_equal(strlen(err.message), sizeof err.message - 1);
}

/* --- the rest --- */

static void dtypes(void **state)
{
    (void)state;
    for (int t = 0; t < KVD_DTYPE_COUNT; t++) {
        assert_int_equal(kvd__dtype_from_number(kvd__dtypes[t].number), t);
        assert_true(kvd__dtypes[t].block_elems > 0 && kvd__dtypes[t].block_bytes > 0);
    }
    assert_int_equal(kvd__dtype_from_number(4), -1);
    assert_int_equal(kvd__dtype_from_number(UINT32_MAX), -1);
    assert_int_equal(kvd__row_bytes(KVD_Q4_1, 64), 40);
    assert_int_equal(kvd__row_bytes(KVD_Q6_K, (int64_t)1 << 40), ((int64_t)1 << 32) * 210);
}

/* Known answers of Random123 (kat_vectors, philox4x32 with 10 rounds). */
static void philox(void **state)
{
    (void)state;
    static const uint32_t zero[4] = {0}, ones[4] = {~0u, ~0u, ~0u, ~0u};
    static const uint32_t pi[] = {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344, 0xa4093822, 0x299f31d0};
    uint32_t out[4];
    kvd__philox4x32(zero, zero, out);
    assert_memory_equal(out, ((uint32_t[]){0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}), 16);
    kvd__philox4x32(ones, ones, out);
    assert_memory_equal(out, ((uint32_t[]){0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}), 16);
    kvd__philox4x32(pi, pi + 4, out);
    assert_memory_equal(out, ((uint32_t[]){0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}), 16);
}

static void files(void **state)
{
    (void)state;
    kvd_file f = {.fd = -1};
    kvd_error err;
    char path[32], buf[8];
    int fd = memfd_create("base", MFD_CLOEXEC);
    assert_true(fd >= 0 && write(fd, "0123456789", 10) == 10);
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    assert_int_equal(kvd__file_open(&f, path, &err), 0);
    assert_int_equal(f.size_bytes, 10);
    assert_int_equal(kvd__file_read(&f, 4, buf, 6, &err), 0);
    assert_memory_equal(buf, "456789", 6);
    assert_int_equal(kvd__file_read(&f, 4, buf, 7, &err), KVD_E_GGUF_TRUNCATED);
    assert_int_equal(err.offset, 10);
    assert_int_equal(kvd__file_read(&f, 100, buf, 0, &err), 0);
    kvd__file_close(&f);
    assert_int_equal(f.fd, -1);
    kvd__file_close(&f);
    assert_int_equal(kvd__file_read(&f, 0, buf, 1, &err), KVD_E_IO);
    assert_int_equal(kvd__file_open(&f, "/", &err), KVD_E_IO);
    assert_int_equal(f.fd, -1);
    assert_int_equal(kvd__file_open(&f, "/nowhere/at/all", &err), KVD_E_IO);
    assert_non_null(strstr(err.message, "/nowhere/at/all: "));
    close(fd);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ledger_counts),
        cmocka_unit_test(ledger_budget),
        cmocka_unit_test(ledger_realloc),
        cmocka_unit_test(ledger_fails_on_demand),
        cmocka_unit_test(ledger_huge),
        cmocka_unit_test(ledger_contest),
        cmocka_unit_test(pool_barriers),
        cmocka_unit_test(pool_many_short_runs),
        cmocka_unit_test(pool_limits),
        cmocka_unit_test(pool_float_environment),
        cmocka_unit_test(f16_every_value),
        cmocka_unit_test(half_rounding),
        cmocka_unit_test(fma_soft_is_hardware),
        cmocka_unit_test(errors),
        cmocka_unit_test(dtypes),
        cmocka_unit_test(philox),
        cmocka_unit_test(files),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
