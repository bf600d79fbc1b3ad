/* What the tests of the spill file as it works share (test_spill*.c): one on a real disk
 * with its ledger and source, whose every byte is compared when it is read. */
#ifndef KVD_TESTS_SPILL_CASE_H
#define KVD_TESTS_SPILL_CASE_H

#include "check.h"
#include "spill_rig.h"

static uint64_t seed = 20250101;
static inline int64_t pick(int64_t n) { return (int64_t)(kvd__splitmix64(&seed) % (uint64_t)n); }

static inline kvd_spill_options options_of(int64_t max_blocks)
{
    kvd_spill_options o;
    kvd__spill_defaults(&o);
    o.dir = rig_dir;
    o.max_blocks = max_blocks;
    return o;
}

typedef struct rig {
    kvd_ledger ledger;
    kvd_kv_shape shape;
    kvd_spill_options options;
    kvd_spill *sp;
    rig_source source;
    kvd_error err;
    int fd; /* of the file, seen by `open` below */
} rig;

static inline int spying_open(void *ctx, int dir_fd, const char *path, int flags)
{
    return ((rig *)ctx)->fd = kvd__spill_system.open(NULL, dir_fd, path, flags);
}
static kvd_spill_ops spying;

static inline void rig_open(rig *r, kvd_kv_shape shape, kvd_spill_options o)
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

static inline void rig_close(rig *r)
{
    kvd__spill_destroy(&r->sp);
    assert_null(r->sp);
    check(rig_ledger_empty(&r->ledger), "memory remains");
    check(rig_dir_entries() == 0, "something stayed in the folder");
    free(r->source.block);
}

static inline void rig_write(rig *r, int64_t from, int64_t to)
{
    int rc = kvd__spill_write(r->sp, from, to, rig_get, &r->source, &r->err);
    check(!rc, "write: %s", r->err.message);
}

/* Read the ranges to their end, holding up to `hold` segments; every byte compared. */
static inline void rig_read(rig *r, const kvd_spill_range *ranges, int64_t n_ranges, int hold)
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

static inline void rig_read_all(rig *r, int64_t to, int hold)
{
    kvd_spill_range ranges[KVD__MAX_LAYERS];
    for (int l = 0; l < r->shape.n_layers; l++)
        ranges[l] = (kvd_spill_range){l, 0, to};
    rig_read(r, ranges, r->shape.n_layers, hold);
}

#endif
