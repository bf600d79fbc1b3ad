/* The spill file on a real disk: sizes, what comes back, the ring, what stays behind.
 * Failures of the system are the matter of tests/fault/test_spill_faults.c.
 *
 * test_spill --bench [layers kv_heads d_head blocks] measures: the ring against
 * a plain sequential read of as many bytes, for some segment sizes. Nothing is
 * asserted there. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>

#include <cmocka.h>

#include "spill_rig.h"

static uint64_t seed = 20250101;
static int64_t pick(int64_t n) { return (int64_t)(kvd__splitmix64(&seed) % (uint64_t)n); }

#define check(ok, ...)                                                         \
    do {                                                                       \
        if (!(ok))                                                             \
            fail_msg(__VA_ARGS__);                                             \
    } while (0)

static kvd_spill_options options_of(int64_t max_blocks)
{
    kvd_spill_options o;
    kvd__spill_defaults(&o);
    o.dir = rig_dir;
    o.max_blocks = max_blocks;
    return o;
}

/* ---- a spill with its surroundings ------------------------------------------------ */

typedef struct rig {
    kvd_ledger ledger;
    kvd_kv_shape shape;
    kvd_spill_options options;
    kvd_spill *sp;
    rig_source source;
    kvd_error err;
    int fd; /* of the file, seen by `open` below */
} rig;

static int spying_open(void *ctx, int dir_fd, const char *path, int flags)
{
    return ((rig *)ctx)->fd = kvd__spill_system.open(NULL, dir_fd, path, flags);
}
static kvd_spill_ops spying;

static void rig_open(rig *r, kvd_kv_shape shape, kvd_spill_options o)
{
    spying = kvd__spill_system;
    spying.open = spying_open;
    *r = (rig){.shape = shape, .options = o, .source = rig_source_of(&shape), .fd = -1};
    kvd__ledger_init(&r->ledger, 0);
    if (!r->options.ops)
        r->options.ops = &spying;
    if (!r->options.ops_ctx)
        r->options.ops_ctx = r;
    int rc = kvd__spill_create(&r->sp, &r->shape, &r->options, &r->ledger, &r->err);
    check(!rc, "create: %s", r->err.message);
}

static void rig_close(rig *r)
{
    kvd__spill_destroy(&r->sp);
    assert_null(r->sp);
    check(rig_ledger_empty(&r->ledger), "memory remains");
    check(rig_dir_entries() == 0, "something stayed in the folder");
    free(r->source.block);
}

static void rig_write(rig *r, int64_t from, int64_t to)
{
    int rc = kvd__spill_write(r->sp, from, to, rig_get, &r->source, &r->err);
    check(!rc, "write: %s", r->err.message);
}

/* Read the ranges to their end, holding up to `hold` segments; every byte compared. */
static void rig_read(rig *r, const kvd_spill_range *ranges, int64_t n_ranges, int hold)
{
    check(!kvd__spill_read_begin(r->sp, ranges, n_ranges, &r->err), "begin: %s", r->err.message);
    kvd_spill_segment held[KVD__SPILL_MAX_SLOTS], seg;
    int n_held = 0;
    for (int64_t i = 0; i < n_ranges; i++) {
        for (int64_t b = ranges[i].from_block; b < ranges[i].to_block; b += seg.n_blocks) {
            check(!kvd__spill_next(r->sp, &seg, &r->err), "next: %s", r->err.message);
            check(seg.layer == ranges[i].layer && seg.from_block == b && seg.n_blocks > 0 &&
                      b + seg.n_blocks <= ranges[i].to_block,
                  "segment of another place");
            int64_t last = b + seg.n_blocks - 1;
            check(last / r->options.segment_blocks == b / r->options.segment_blocks, "segment crosses a cut");
            held[n_held++] = seg;
            if (n_held == hold) {
                for (int k = 0; k < n_held; k++) {
                    check(rig_segment_is(&held[k], &r->source), "other bytes");
                    kvd__spill_release(r->sp);
                }
                n_held = 0;
            }
        }
    }
    for (int k = 0; k < n_held; k++)
        check(rig_segment_is(&held[k], &r->source), "other bytes");
    for (int k = 0; k < 2; k++) /* the end can be asked for more than once, with slots held */
        assert_true(!kvd__spill_next(r->sp, &seg, &r->err) && seg.n_blocks == 0);
    kvd__spill_read_end(r->sp);
}

static void rig_read_all(rig *r, int64_t to, int hold)
{
    kvd_spill_range ranges[KVD__MAX_LAYERS];
    for (int l = 0; l < r->shape.n_layers; l++)
        ranges[l] = (kvd_spill_range){l, 0, to};
    rig_read(r, ranges, r->shape.n_layers, hold);
}

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

/* ---- the ring --------------------------------------------------------------------- */

static void misuse_is_refused(void **state)
{
    rig r;
    kvd_spill_options o = options_of(10);
    o.segment_blocks = 2;
    o.n_slots = 3;
    rig_open(&r, rig_shape(2, 1, 8), o);
    rig_write(&r, 0, 9);
    kvd_spill_segment seg = {.layer = 77};
    kvd_spill_range whole = {1, 0, 9}, more = {1, 0, 10}, below = {1, -1, 3}, other = {2, 0, 1};
    assert_int_equal(kvd__spill_next(r.sp, &seg, &r.err), KVD_E_ARG);
    kvd__spill_release(r.sp);
    kvd__spill_read_end(r.sp);
    assert_int_equal(kvd__spill_read_begin(r.sp, &more, 1, &r.err), KVD_E_ARG);
    assert_int_equal(kvd__spill_read_begin(r.sp, &below, 1, &r.err), KVD_E_ARG);
    assert_int_equal(kvd__spill_read_begin(r.sp, &other, 1, NULL), KVD_E_ARG);
    assert_int_equal(kvd__spill_read_begin(r.sp, &whole, 1, &r.err), 0);
    assert_int_equal(kvd__spill_read_begin(r.sp, &whole, 1, &r.err), KVD_E_ARG);
    kvd__spill_release(r.sp); /* none is held */
    for (int i = 0; i < 3; i++)
        assert_int_equal(kvd__spill_next(r.sp, &seg, &r.err), 0);
    seg.layer = 77;
    assert_int_equal(kvd__spill_next(r.sp, &seg, &r.err), KVD_E_ARG); /* would wait forever */
    assert_int_equal(seg.layer, 77);
    kvd__spill_release(r.sp);
    assert_int_equal(kvd__spill_next(r.sp, &seg, &r.err), 0); /* and it goes on */
    assert_int_equal(seg.from_block, 6);
    assert_true(rig_segment_is(&seg, &r.source));
    kvd__spill_read_end(r.sp);
    assert_false(kvd__spill_broken(r.sp));
    rig_read(&r, NULL, 0, 1);
    rig_close(&r);
}

static void ends_midway(void **state)
{
    rig r;
    kvd_spill_options o = options_of(24);
    o.segment_blocks = 2;
    rig_open(&r, rig_shape(2, 1, 64), o);
    rig_write(&r, 0, 24);
    kvd_spill_range ranges[] = {{0, 1, 24}, {1, 0, 23}};
    for (int stop = 0; stop <= 24; stop++) {
        assert_int_equal(kvd__spill_read_begin(r.sp, ranges, 2, &r.err), 0);
        for (int i = 0; i < stop; i++) {
            kvd_spill_segment seg;
            assert_int_equal(kvd__spill_next(r.sp, &seg, &r.err), 0);
            assert_true(rig_segment_is(&seg, &r.source));
            if (i != stop - 1 || stop % 2) /* the last one stays held */
                kvd__spill_release(r.sp);
        }
        kvd__spill_read_end(r.sp);
    }
    rig_read(&r, ranges, 2, 3);
    assert_int_equal(kvd__spill_read_begin(r.sp, ranges, 2, &r.err), 0);
    rig_close(&r); /* destroy ends a read, too */
}

/* A pass that stores new blocks while it reads old ones. */
static void writes_while_reading(void **state)
{
    rig r;
    kvd_spill_options o = options_of(40);
    o.segment_blocks = 4;
    rig_open(&r, rig_shape(3, 1, 64), o);
    rig_write(&r, 0, 20);
    kvd_spill_range ranges[] = {{0, 0, 20}, {1, 0, 20}, {2, 0, 20}};
    assert_int_equal(kvd__spill_read_begin(r.sp, ranges, 3, &r.err), 0);
    for (int l = 0; l < 3; l++) {
        for (int i = 0; i < 5; i++) {
            kvd_spill_segment seg;
            assert_int_equal(kvd__spill_next(r.sp, &seg, &r.err), 0);
            assert_true(rig_segment_is(&seg, &r.source));
            kvd__spill_release(r.sp);
            assert_int_equal(
                kvd__spill_write_layer(r.sp, l, 20 + 4 * i, 24 + 4 * i, rig_get, &r.source, &r.err), 0);
        }
    }
    kvd__spill_read_end(r.sp);
    assert_true(kvd__spill_has(r.sp, 39));
    rig_read_all(&r, 40, 2);
    rig_close(&r);
}

/* The bytes of a segment are for all threads between next and release. */
typedef struct crew {
    rig *r;
    pthread_barrier_t barrier;
    kvd_spill_segment seg;
    _Atomic int wrong;
} crew;

static void *member(void *arg)
{
    crew *c = arg;
    rig_source source = rig_source_of(&c->r->shape);
    for (;;) {
        pthread_barrier_wait(&c->barrier);
        if (!c->seg.n_blocks)
            break;
        c->wrong += !rig_segment_is(&c->seg, &source);
        pthread_barrier_wait(&c->barrier);
    }
    free(source.block);
    return NULL;
}

static void many_threads_read_a_segment(void **state)
{
    rig r;
    kvd_spill_options o = options_of(32);
    o.segment_blocks = 4;
    rig_open(&r, rig_shape(4, 1, 64), o);
    rig_write(&r, 0, 32);
    kvd_spill_range ranges[] = {{0, 0, 32}, {1, 0, 32}, {2, 0, 32}, {3, 0, 32}};
    crew c = {.r = &r};
    pthread_t threads[3];
    pthread_barrier_init(&c.barrier, NULL, 4);
    for (int i = 0; i < 3; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, member, &c), 0);
    assert_int_equal(kvd__spill_read_begin(r.sp, ranges, 4, &r.err), 0);
    do {
        if (kvd__spill_next(r.sp, &c.seg, &r.err))
            c.seg.n_blocks = 0, c.wrong++;
        pthread_barrier_wait(&c.barrier);
        if (!c.seg.n_blocks)
            break;
        pthread_barrier_wait(&c.barrier);
        kvd__spill_release(r.sp);
    } while (1);
    kvd__spill_read_end(r.sp);
    for (int i = 0; i < 3; i++)
        pthread_join(threads[i], NULL);
    pthread_barrier_destroy(&c.barrier);
    assert_int_equal(c.wrong, 0);
    rig_close(&r);
}

/* ---- the system around it ------------------------------------------------------------ */

static void memory_is_no_disk(void **state)
{
    kvd_kv_shape s = rig_shape(1, 1, 8);
    kvd_spill_options o = options_of(4);
    kvd_ledger l;
    kvd_error err;
    kvd_spill *sp = NULL;
    kvd__ledger_init(&l, 0);
    o.dir = "/dev/shm";
    if (access(o.dir, W_OK) || !rig_in_memory(o.dir)) {
        print_message("SKIPPED: /dev/shm is no tmpfs here\n");
        return;
    }
    assert_int_equal(kvd__spill_create(&sp, &s, &o, &l, &err), KVD_E_UNSUPPORTED);
    assert_non_null(strstr(err.message, "tmpfs"));
    assert_true(rig_ledger_empty(&l));
    o.dir = "/nowhere/at/all";
    assert_int_equal(kvd__spill_create(&sp, &s, &o, &l, &err), KVD_E_IO);
    o.dir = "/proc/self/status"; /* no folder */
    assert_int_equal(kvd__spill_create(&sp, &s, &o, &l, NULL), KVD_E_IO);
}

static void too_large_for_the_disk(void **state)
{
    kvd_kv_shape s = rig_shape(30, 3, 64);
    kvd_spill_options o = options_of((int64_t)1 << 24); /* 6 TB on disk; sums of 4 GB that are never touched */
    kvd_ledger l;
    kvd_error err;
    kvd_spill *sp = NULL;
    kvd__ledger_init(&l, 0);
    int rc = kvd__spill_create(&sp, &s, &o, &l, &err);
    if (!rc || rc == KVD_E_NOMEM) {
        print_message("SKIPPED: a disk with 6 TB free, or no address space\n");
        kvd__spill_destroy(&sp);
        return;
    }
    assert_int_equal(rc, KVD_E_IO);
    assert_int_equal(err.need_bytes, kvd__spill_file_bytes(&s, &o));
    assert_true(rig_ledger_empty(&l) && rig_dir_entries() == 0);
}

static void unnamed_private_closed_on_exec(void **state)
{
    rig r;
    rig_open(&r, rig_shape(2, 1, 64), options_of(6));
    struct stat st;
    assert_int_equal(fstat(r.fd, &st), 0);
    assert_int_equal(st.st_nlink, 0);
    assert_int_equal(st.st_mode & 0777 & ~0600, 0);
    assert_int_equal(st.st_size, kvd__spill_file_bytes(&r.shape, &r.options));
    if (fallocate(r.fd, FALLOC_FL_KEEP_SIZE, 0, 1) && errno == EOPNOTSUPP)
        print_message("SKIPPED: reservation, on a file system that has none\n");
    else
        assert_true(st.st_blocks * 512 >= st.st_size);
    assert_true(fcntl(r.fd, F_GETFD) & FD_CLOEXEC);
    assert_int_equal(rig_dir_entries(), 0);
    rig_close(&r);
}

static int64_t cached_pages(int fd, int64_t bytes)
{
    int64_t n = (bytes + 4095) / 4096, cached = 0;
    unsigned char *in = calloc(1, (size_t)n);
    void *m = mmap(NULL, (size_t)bytes, PROT_READ, MAP_SHARED, fd, 0);
    if (m != MAP_FAILED && !mincore(m, (size_t)bytes, in))
        for (int64_t i = 0; i < n; i++)
            cached += in[i] & 1;
    if (m != MAP_FAILED)
        munmap(m, (size_t)bytes);
    free(in);
    return cached;
}

/* Nothing of the file stays in the page cache, whatever the mode. */
static void page_cache_is_no_budget(void **state)
{
    for (int direct = 0; direct < 2; direct++) {
        rig r;
        kvd_spill_options o = options_of(64);
        o.direct = direct;
        rig_open(&r, rig_shape(4, 2, 64), o);
        rig_write(&r, 0, 64);
        int64_t bytes = kvd__spill_file_bytes(&r.shape, &r.options), written = cached_pages(r.fd, bytes);
        rig_read_all(&r, 64, 1);
        int64_t read = cached_pages(r.fd, bytes);
        print_message("O_DIRECT %d: of %lld pages are cached: %lld after writing, %lld after reading\n", direct,
                      (long long)(bytes / 4096), (long long)written, (long long)read);
        check(written <= 64 && read <= 64, "%lld and %lld pages are cached", (long long)written, (long long)read);
        rig_close(&r);
    }
}

static int no_tmpfile(void *ctx, int dir_fd, const char *path, int flags)
{
    if ((flags & O_TMPFILE) != O_TMPFILE)
        return kvd__spill_system.open(NULL, dir_fd, path, flags);
    errno = EOPNOTSUPP;
    return -1;
}

/* kill -9 in the middle of writing leaves an empty folder. */
static void killed(void **state)
{
    for (int named = 0; named < 2; named++) {
        int ready[2];
        assert_int_equal(pipe(ready), 0);
        pid_t pid = fork();
        if (!pid) {
            kvd_ledger l;
            kvd_kv_shape s = rig_shape(4, 1, 64);
            kvd_spill_options o = options_of(64);
            kvd_spill *sp = NULL;
            rig_source source = rig_source_of(&s);
            kvd_spill_ops ops = kvd__spill_system;
            ops.open = no_tmpfile;
            o.ops = named ? &ops : NULL;
            kvd__ledger_init(&l, 0);
            int ok = !kvd__spill_create(&sp, &s, &o, &l, NULL) &&
                     !kvd__spill_write(sp, 0, 16, rig_get, &source, NULL);
            ok = write(ready[1], ok ? "+" : "-", 1) == 1;
            for (;;) /* until the end */
                if (ok && kvd__spill_write(sp, 16, 64, rig_get, &source, NULL) == 0)
                    kvd__spill_drop(sp, 16);
        }
        char c = 0;
        int status;
        close(ready[1]);
        ssize_t got = read(ready[0], &c, 1);
        int alive = rig_dir_entries();
        close(ready[0]);
        kill(pid, SIGKILL); /* before anything is asserted: it has no other end */
        assert_int_equal(waitpid(pid, &status, 0), pid);
        assert_true(WIFSIGNALED(status));
        assert_true(got == 1 && alive == 0);
        assert_int_equal(c, '+');
        assert_int_equal(rig_dir_entries(), 0);
    }
}

static void after_fork(void **state)
{
    rig r;
    rig_open(&r, rig_shape(2, 1, 64), options_of(16));
    rig_write(&r, 0, 12);
    kvd_spill_range range = {1, 0, 12};
    kvd_spill_segment seg;
    assert_int_equal(kvd__spill_read_begin(r.sp, &range, 1, &r.err), 0);
    pid_t pid = fork();
    if (!pid) {
        kvd_spill_stats stats;
        int ok = kvd__spill_next(r.sp, &seg, NULL) == KVD_E_ARG;
        ok &= kvd__spill_read_begin(r.sp, &range, 1, NULL) == KVD_E_ARG;
        ok &= kvd__spill_grow(r.sp, 32, NULL) == KVD_E_ARG && !kvd__spill_is_ours(r.sp);
        ok &= kvd__spill_write(r.sp, 12, 13, rig_get, &r.source, NULL) == KVD_E_ARG;
        kvd__spill_read_end(r.sp);
        kvd__spill_release(r.sp);
        kvd__spill_stats(r.sp, &stats);
        kvd__spill_destroy(&r.sp);
        _exit(ok && !r.sp ? 0 : 1);
    }
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    assert_int_equal(kvd__spill_next(r.sp, &seg, &r.err), 0);
    assert_true(rig_segment_is(&seg, &r.source));
    kvd__spill_read_end(r.sp);
    rig_write(&r, 12, 16);
    rig_read_all(&r, 16, 1);
    rig_close(&r);
}

static pthread_t main_thread;
static volatile sig_atomic_t n_alarms, elsewhere;
static void on_alarm(int sig)
{
    n_alarms++;
    elsewhere |= !pthread_equal(pthread_self(), main_thread);
}

/* A timer that interrupts every call it can: nothing is lost, and the readers
 * take no signal. */
static void signals_during_io(void **state)
{
    struct sigaction sa = {.sa_handler = on_alarm}, old; /* no SA_RESTART */
    struct itimerval often = {{0, 300}, {0, 300}}, off = {{0, 0}, {0, 0}};
    main_thread = pthread_self();
    n_alarms = 0;
    sigaction(SIGALRM, &sa, &old);
    setitimer(ITIMER_REAL, &often, NULL);
    rig r;
    rig_open(&r, rig_shape(4, 2, 64), options_of(64));
    for (int round = 0; round < 5 || (n_alarms < 20 && round < 1000); round++) {
        kvd__spill_drop(r.sp, 0);
        rig_write(&r, 0, 64);
        rig_read_all(&r, 64, 2);
    }
    rig_close(&r);
    setitimer(ITIMER_REAL, &off, NULL);
    sigaction(SIGALRM, &old, NULL);
    assert_true(n_alarms >= 20);
    assert_false(elsewhere);
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

/* ---- rates --------------------------------------------------------------------------- */

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Best of some: MB/s of reading the file from end to end with calls of `piece` bytes. */
static double plain_rate(int fd, int64_t bytes, size_t piece)
{
    char *buf = aligned_alloc(4096, piece);
    double best = 0;
    for (int k = 0; k < 5; k++) {
        double t = seconds();
        for (int64_t at = 0; at < bytes; at += (int64_t)piece)
            if (pread(fd, buf, piece, at) < 0)
                return 0;
        t = seconds() - t;
        posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
        best = (double)bytes / t / 1e6 > best ? (double)bytes / t / 1e6 : best;
    }
    free(buf);
    return best;
}

static void bench_one(int layers, int heads, int d, kvd_spill_options o)
{
    kvd_spill_range ranges[KVD__MAX_LAYERS];
    for (int l = 0; l < layers; l++)
        ranges[l] = (kvd_spill_range){l, 0, o.max_blocks};
    rig r;
    rig_open(&r, rig_shape(layers, heads, d), o);
    rig_write(&r, 0, o.max_blocks);
    kvd_spill_stats st;
    kvd__spill_stats(r.sp, &st);
    double best = 0, wrote = (double)st.written_bytes / (double)st.write_ns * 1e3;
    int64_t bytes = kvd__spill_file_bytes(&r.shape, &o), piece = kvd__spill_bytes(&r.shape, &o);
    for (int k = 0; k < 5; k++) {
        double t = seconds();
        kvd_spill_segment seg;
        kvd__spill_read_begin(r.sp, ranges, layers, NULL);
        while (!kvd__spill_next(r.sp, &seg, NULL) && seg.n_blocks)
            kvd__spill_release(r.sp);
        kvd__spill_read_end(r.sp);
        double rate = (double)bytes / (seconds() - t) / 1e6;
        best = rate > best ? rate : best;
    }
    printf("%6d %7d %5d %7lld %6lld %6.0f %6.0f %6.0f\n", st.direct, o.n_readers, o.n_slots, (long long)o.segment_blocks,
           (long long)piece / 1024, wrote, best, plain_rate(r.fd, bytes, 1 << 20));
    rig_close(&r);
}

static int bench(int argc, char **argv)
{
    int layers = argc > 2 ? atoi(argv[2]) : 30, heads = argc > 3 ? atoi(argv[3]) : 3, d = argc > 4 ? atoi(argv[4]) : 64;
    kvd_spill_options o = options_of(argc > 5 ? atoi(argv[5]) : 125);
    printf("%d layers, %lld blocks; reads: MB/s, best of 5; plain: one after the other, 1 MiB each\n", layers,
           (long long)o.max_blocks);
    printf("direct readers slots segment mem_KB  write  spill  plain\n");
    for (int mode = 0; mode < 2; mode++)
        for (int memory = 16; memory <= 128; memory *= 2) /* blocks of the ring */
            for (o.segment_blocks = 4; o.segment_blocks <= memory / 2; o.segment_blocks *= 2)
                for (o.n_readers = 1; o.n_readers <= 8 && o.n_readers < memory / o.segment_blocks; o.n_readers += 1 + (o.n_readers > 3)) {
                    o.direct = !mode;
                    o.n_slots = memory / (int)o.segment_blocks;
                    if (!mode || o.n_readers == 2)
                        bench_one(layers, heads, d, o);
                }
    return 0;
}

int main(int argc, char **argv)
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
        cmocka_unit_test(misuse_is_refused),
        cmocka_unit_test(ends_midway),
        cmocka_unit_test(writes_while_reading),
        cmocka_unit_test(many_threads_read_a_segment),
        cmocka_unit_test(memory_is_no_disk),
        cmocka_unit_test(too_large_for_the_disk),
        cmocka_unit_test(unnamed_private_closed_on_exec),
        cmocka_unit_test(page_cache_is_no_budget),
        cmocka_unit_test(killed),
        cmocka_unit_test(after_fork),
        cmocka_unit_test(signals_during_io),
        cmocka_unit_test(out_of_memory),
        cmocka_unit_test(a_real_size),
    };
    if (!rig_make_dir()) {
        printf("SKIPPED: no folder on a disk (all in memory); set KVD_TEST_DIR\n");
        return 77;
    }
    int rc = argc > 1 && !strcmp(argv[1], "--bench") ? bench(argc, argv) : cmocka_run_group_tests(tests, NULL, NULL);
    rmdir(rig_dir);
    return rc;
}
