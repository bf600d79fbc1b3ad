/* The spill file on a real disk: sizes, and what comes back. How it is read while others
 * wait: test_spill_ring.c. What the system sees of it: test_spill_system.c. Failures of
 * the system are the matter of tests/fault/test_spill_faults.c. */
#include "spill_case.h"

#include <sys/stat.h>

/* ---- sizes ------------------------------------------------------------------------ */

static void bytes_are_known_beforehand(void **state)
{
    for (int i = 0; i < 60; i++) {
        kvd_kv_shape s = rig_shape(1 + (int)pick(5), 1 + (int)pick(3), 1 + (int)pick(300));
        s.type = (kvd_kvtype)pick(KVD_KV_COUNT);
        kvd_spill_options o = options_of(1 + pick(20));
        o.segment_blocks = 1 + pick(24);
        o.write_blocks = 1 + pick(24);
        o.n_slots = 2 + (int)pick(6);
        o.direct = pick(2);
        int64_t bytes = kvd__spill_bytes(&s, &o);
        kvd_ledger l;
        kvd_error err;
        kvd_spill *sp = NULL;
        kvd__ledger_init(&l, bytes); /* exactly enough */
        check(!kvd__spill_create(&sp, &s, &o, &l, &err), "create: %s", err.message);
        assert_int_equal(l.now[KVD_ACC_LAYER] + l.now[KVD_ACC_CHECKPOINT], bytes);
        assert_int_equal(l.context_now, bytes);
        assert_int_equal(l.context_peak, bytes);
        kvd__spill_destroy(&sp);
        assert_true(rig_ledger_empty(&l));
        kvd__ledger_init(&l, bytes - 1);
        assert_int_equal(kvd__spill_create(&sp, &s, &o, &l, &err), KVD_E_BUDGET);
        assert_int_equal(err.need_bytes, bytes);
        assert_null(sp);
        assert_true(rig_ledger_empty(&l));
    }
    /* SmolLM2, 125 blocks: 12,288-byte blocks, no padding. */
    kvd_kv_shape smol = rig_shape(30, 3, 64);
    kvd_spill_options o = options_of(125);
    assert_int_equal(kvd__spill_file_bytes(&smol, &o), 30 * 125 * 12288);
    assert_int_equal(kvd__spill_bytes(&smol, &o), (4 * 16 + 4) * 12288 + 4096 + 125 * (30 * 8 + 2));
}

static void options_out_of_range(void **state)
{
    kvd_kv_shape s = rig_shape(2, 1, 8);
    kvd_spill_options good = options_of(4), bad[14];
    for (int i = 0; i < 14; i++)
        bad[i] = good;
    bad[0].max_blocks = 0;
    bad[1].max_blocks = INT64_MAX;
    bad[2].max_blocks = -1;
    bad[3].segment_blocks = 0;
    bad[4].n_slots = 1;
    bad[5].n_slots = KVD__SPILL_MAX_SLOTS + 1;
    bad[6].write_blocks = 0;
    bad[7].max_blocks = bad[7].segment_blocks = INT64_MAX / 4096;
    bad[8].max_blocks = bad[8].write_blocks = INT64_MAX / 4096;
    bad[9].max_blocks = INT64_MAX / 8192 + 1;
    bad[10].segment_blocks = bad[10].write_blocks = -5;
    bad[11].n_readers = 0;
    bad[12].n_readers = KVD__SPILL_MAX_READERS + 1;
    bad[13].dir = NULL;
    for (int i = 0; i < 14; i++) {
        kvd_ledger l;
        kvd_error err;
        kvd_spill *sp = NULL;
        kvd__ledger_init(&l, 0);
        check(kvd__spill_create(&sp, &s, &bad[i], &l, &err) == KVD_E_RANGE && !sp, "options %d", i);
        if (i < 13)
            check(kvd__spill_bytes(&s, &bad[i]) == INT64_MAX && kvd__spill_file_bytes(&s, &bad[i]) == INT64_MAX,
                  "bytes of options %d", i);
    }
    kvd__spill_destroy(&(kvd_spill *){NULL});
}

/* ---- what comes back -------------------------------------------------------------- */

static void round_trips(void **state)
{
    for (int i = 0; i < 40; i++) {
        int64_t n = 1 + pick(30);
        kvd_kv_shape s = rig_shape(1 + (int)pick(4), 1 + (int)pick(2), 8 << pick(6));
        kvd_spill_options o = options_of(n);
        o.segment_blocks = 1 + pick(12);
        o.write_blocks = 1 + pick(9);
        o.n_slots = 2 + (int)pick(4);
        o.direct = i % 2;
        o.n_readers = 1 + (int)pick(4);
        rig r;
        rig_open(&r, s, o);
        for (int64_t b = 0; b < n;) { /* some at once, some layer by layer and backwards */
            int64_t to = b + 1 + pick(n - b);
            for (int l = s.n_layers - 1; l >= 0 && pick(2); l--)
                assert_int_equal(kvd__spill_write_layer(r.sp, l, b, to, rig_get, &r.source, &r.err), 0);
            rig_write(&r, b, to);
            b = to;
        }
        assert_int_equal(r.source.n_calls, n * s.n_layers); /* each once */
        for (int pass = 0; pass < 4; pass++) {
            kvd_spill_range ranges[24];
            int n_ranges = (int)pick(25);
            for (int k = 0; k < n_ranges; k++) {
                int64_t from = pick(n), to = from + pick(n - from + 1);
                ranges[k] = (kvd_spill_range){(int)pick(s.n_layers), from, to};
            }
            rig_read(&r, ranges, n_ranges, 1 + (int)pick(o.n_slots));
        }
        rig_read_all(&r, n, 1);
        rig_close(&r);
    }
}

static void written_once(void **state)
{
    rig r;
    rig_open(&r, rig_shape(3, 1, 64), options_of(8));
    rig_write(&r, 2, 4);
    kvd_spill_stats before, after;
    kvd__spill_stats(r.sp, &before);
    assert_int_equal(before.written_bytes, 6 * 4096);
    int64_t calls = r.source.n_calls;
    rig_write(&r, 2, 4);
    kvd__spill_stats(r.sp, &after);
    assert_int_equal(after.written_bytes, before.written_bytes);
    assert_int_equal(r.source.n_calls, calls);
    rig_write(&r, 0, 8); /* the rest only */
    assert_int_equal(r.source.n_calls, 24);
    rig_read_all(&r, 8, 1);
    rig_close(&r);
}

static void what_is_there(void **state)
{
    rig r;
    rig_open(&r, rig_shape(3, 1, 8), options_of(5));
    for (int l = 0; l < 3; l++) {
        assert_false(kvd__spill_has(r.sp, 1));
        assert_false(kvd__spill_has_layer(r.sp, l, 1));
        assert_int_equal(kvd__spill_write_layer(r.sp, l, 1, 2, rig_get, &r.source, &r.err), 0);
        assert_true(kvd__spill_has_layer(r.sp, l, 1));
    }
    assert_true(kvd__spill_has(r.sp, 1));
    assert_false(kvd__spill_has(r.sp, 0) || kvd__spill_has(r.sp, 2) || kvd__spill_has(r.sp, -1) ||
                 kvd__spill_has(r.sp, 5) || kvd__spill_has_layer(r.sp, 3, 1) || kvd__spill_has_layer(r.sp, -1, 1));
    assert_int_equal(kvd__spill_write(r.sp, 4, 6, rig_get, &r.source, &r.err), KVD_E_RANGE);
    assert_int_equal(kvd__spill_write(r.sp, -1, 1, rig_get, &r.source, &r.err), KVD_E_RANGE);
    assert_int_equal(kvd__spill_write_layer(r.sp, 3, 0, 1, rig_get, &r.source, &r.err), KVD_E_RANGE);
    assert_int_equal(kvd__spill_write(r.sp, 3, 3, rig_get, &r.source, &r.err), 0);
    rig_close(&r);
}

static void rewind_and_write_anew(void **state)
{
    rig r;
    kvd_spill_options o = options_of(12);
    o.segment_blocks = 4;
    rig_open(&r, rig_shape(2, 1, 64), o);
    rig_write(&r, 0, 12);
    kvd__spill_drop(r.sp, 12); /* nothing */
    assert_true(kvd__spill_has(r.sp, 11));
    kvd__spill_drop(r.sp, 7);
    assert_true(kvd__spill_has(r.sp, 6));
    for (int64_t b = 7; b < 12; b++)
        assert_false(kvd__spill_has(r.sp, b) || kvd__spill_has_layer(r.sp, 1, b));
    rig_read_all(&r, 7, 2);
    r.source.generation = 1;
    rig_write(&r, 7, 12);
    for (int l = 0; l < 2; l++)
        rig_read(&r, &(kvd_spill_range){l, 7, 12}, 1, 1);
    r.source.generation = 0;
    rig_read_all(&r, 7, 1);
    kvd__spill_drop(r.sp, -3);
    assert_false(kvd__spill_has(r.sp, 0));
    rig_close(&r);
}

/* A file that grows, section by section: what was written stays, what is new may be
 * written and read across the seams, and a failure changes nothing. */
static void grows(void **state)
{
    rig r;
    kvd_spill_options o = options_of(8);
    o.segment_blocks = 8;
    o.write_blocks = 3;
    rig_open(&r, rig_shape(3, 1, 64), o);
    int64_t bytes = kvd__spill_bytes(&r.shape, &o), each = kvd__spill_bytes_per_block(&r.shape);
    rig_write(&r, 1, 7);
    static const int64_t sizes[] = {12, 40, 44, 60};
    for (int i = 0; i < 4; i++) {
        struct stat st;
        int64_t n = sizes[i], before = i ? sizes[i - 1] : 8, calls = r.source.n_calls;
        assert_int_equal(kvd__spill_write(r.sp, before, n, rig_get, &r.source, &r.err), KVD_E_RANGE);
        r.ledger.budget_bytes = r.ledger.context_now + (n - before) * each - 1;
        assert_int_equal(kvd__spill_grow(r.sp, n, &r.err), KVD_E_BUDGET);
        r.ledger.budget_bytes++; /* exactly enough */
        check(!kvd__spill_grow(r.sp, n, &r.err), "%s", r.err.message);
        assert_int_equal(r.ledger.context_now, bytes + (n - 8) * each);
        assert_int_equal(fstat(r.fd, &st), 0);
        assert_int_equal(st.st_size, 3 * 4096 * n);
        for (int64_t b = before; b < n; b++)
            assert_false(kvd__spill_has(r.sp, b) || kvd__spill_has_layer(r.sp, 2, b));
        rig_write(&r, 0, n - 1);
        assert_int_equal(r.source.n_calls, calls + 3 * (n - before + (i == 0))); /* each once: what was there stays */
        rig_read_all(&r, n - 1, 2);
        for (int l = 2; l >= 0; l--)
            rig_read(&r, &(kvd_spill_range){l, before - 3, n - 1}, 1, 1);
    }
    kvd__spill_drop(r.sp, 10); /* in the middle of a section */
    assert_true(kvd__spill_has(r.sp, 9));
    for (int64_t b = 10; b < 60; b++)
        assert_false(kvd__spill_has(r.sp, b) || kvd__spill_has_layer(r.sp, 1, b));
    r.source.generation = 1;
    rig_write(&r, 10, 60);
    for (int l = 0; l < 3; l++)
        rig_read(&r, &(kvd_spill_range){l, 10, 60}, 1, 1);
    rig_close(&r);
}

static void growth_that_can_not_be(void **state)
{
    rig r;
    kvd_spill_options o = options_of(8);
    o.segment_blocks = 4;
    rig_open(&r, rig_shape(3, 1, 64), o);
    rig_write(&r, 0, 8);
    int64_t now = r.ledger.context_now;
    static const int64_t wrong[] = {8, 7, 0, -1, INT64_MAX, INT64_MAX / 4096};
    for (int i = 0; i < 6; i++)
        assert_int_equal(kvd__spill_grow(r.sp, wrong[i], &r.err), KVD_E_RANGE);
    r.ledger.fail_at = r.ledger.n_allocs + 1;
    assert_int_equal(kvd__spill_grow(r.sp, 12, NULL), KVD_E_NOMEM);
    r.ledger.fail_at = 0;
    kvd_spill_range whole = {0, 0, 8};
    assert_int_equal(kvd__spill_read_begin(r.sp, &whole, 1, &r.err), 0);
    assert_int_equal(kvd__spill_grow(r.sp, 12, &r.err), KVD_E_ARG);
    kvd__spill_read_end(r.sp);
    assert_int_equal(r.ledger.context_now, now);
    rig_read_all(&r, 8, 1);
    for (int i = 1; i < KVD__SPILL_MAX_SECTIONS; i++)
        assert_int_equal(kvd__spill_grow(r.sp, 8 + 4 * i, &r.err), 0);
    assert_int_equal(kvd__spill_grow(r.sp, 8 + 4 * KVD__SPILL_MAX_SECTIONS, &r.err), KVD_E_RANGE);
    rig_write(&r, 8, 4 + 4 * KVD__SPILL_MAX_SECTIONS);
    rig_read_all(&r, 4 + 4 * KVD__SPILL_MAX_SECTIONS, 3);
    rig_close(&r);
    o.max_blocks = 10; /* a tile would lie in two sections */
    rig_open(&r, rig_shape(3, 1, 64), o);
    assert_int_equal(kvd__spill_grow(r.sp, 12, &r.err), KVD_E_RANGE);
    rig_close(&r);
}

static void out_of_memory(void **state)
{
    kvd_kv_shape s = rig_shape(2, 1, 8);
    kvd_spill_options o = options_of(4);
    for (int64_t n = 1;; n++) {
        kvd_ledger l;
        kvd_spill *sp = NULL;
        kvd__ledger_init(&l, 0);
        l.fail_at = n;
        int rc = kvd__spill_create(&sp, &s, &o, &l, NULL);
        if (!rc) {
            assert_int_equal(n, 4); /* three allocations */
            kvd__spill_destroy(&sp);
            break;
        }
        assert_int_equal(rc, KVD_E_NOMEM);
        assert_true(!sp && rig_ledger_empty(&l) && rig_dir_entries() == 0);
    }
}

/* The size of the real thing: SmolLM2, 2,000 tokens, three times. */
static void a_real_size(void **state)
{
    rig r;
    rig_open(&r, rig_shape(30, 3, 64), options_of(125));
    rig_write(&r, 0, 125);
    for (int pass = 0; pass < 3; pass++)
        rig_read_all(&r, 125, 1);
    kvd_spill_stats st;
    kvd__spill_stats(r.sp, &st);
    assert_int_equal(st.written_bytes, 30 * 125 * 12288);
    assert_int_equal(st.read_bytes, 3 * st.written_bytes);
    rig_close(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bytes_are_known_beforehand),
        cmocka_unit_test(options_out_of_range),
        cmocka_unit_test(round_trips),
        cmocka_unit_test(written_once),
        cmocka_unit_test(what_is_there),
        cmocka_unit_test(rewind_and_write_anew),
        cmocka_unit_test(grows),
        cmocka_unit_test(growth_that_can_not_be),
        cmocka_unit_test(out_of_memory),
        cmocka_unit_test(a_real_size),
    };
    return rig_run_tests(tests);
}
