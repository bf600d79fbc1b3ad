/* Reading a spill ahead: the ring of segments, its misuse, reads that end midway, writes
 * and other threads meanwhile. */
#include "spill_case.h"

#include <pthread.h>

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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(misuse_is_refused),
        cmocka_unit_test(ends_midway),
        cmocka_unit_test(writes_while_reading),
        cmocka_unit_test(many_threads_read_a_segment),
    };
    return rig_run_tests(tests);
}
