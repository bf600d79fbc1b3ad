/* kv: the planner. What each tier costs in bytes and in time at a context length
 * and a budget, from shapes and a handful of measured rates: pure arithmetic.
 *
 * The model of time (docs/memory.md, "The planner"):
 *   rows(R)      seconds for R rows of all layers, attention aside: interpolated
 *                between measured points, since one row is bound by reading weights
 *                and many are bound by arithmetic
 *   pairs        query-key pairs of attention, cheaper in a chunk than alone
 *   read         seconds for reading what is evicted: bytes at the disk's rate, and
 *                something for each segment they come in (spill.h), which are small
 *                where the budget is
 * Decode of one token with n tokens of context behind it, E of them evicted:
 *   full         rows(1) + n alone-pairs
 *   recompute    rows(E + 1) + n alone-pairs + E^2/2 chunk-pairs
 *   disk         max(rows(1) + n alone-pairs, read(E)), plus columns written once
 *
 * Layer: kv. Pure functions; any thread. */
#ifndef KVD_KV_PLAN_H
#define KVD_KV_PLAN_H

#include "kv/kv.h"
#include "kv/spill.h"

enum { KVD__RATE_POINTS = 5 };

typedef struct kvd_plan_rates {
    int64_t rows[KVD__RATE_POINTS];  /* ascending, rows[0] == 1 */
    double rows_s[KVD__RATE_POINTS]; /* seconds of a pass of so many rows, all layers */
    double head_s;                   /* the output head for one row, and choosing a token */
    double pair_alone_s;             /* one query position against one key position, all layers: one row */
    double pair_chunk_s;             /* the same with many rows */
    double disk_pass_s;              /* a pass that reads, beside bytes and segments */
    double disk_segment_s;           /* each segment, whatever its size */
    double disk_read_bytes_s, disk_write_bytes_s; /* bytes per second beside that; 0: no disk */
} kvd_plan_rates;

typedef enum kvd_tier { KVD_TIER_FULL, KVD_TIER_RECOMPUTE, KVD_TIER_DISK, KVD_TIER_COUNT } kvd_tier;

/* One tier at one budget. */
typedef struct kvd_plan_of_tier {
    bool fits;
    int64_t need_bytes;       /* the least budget with which the tier runs n_tokens */
    int64_t resident_tokens;  /* at the end */
    double prefill_s;         /* of the prompt */
    double decode_tokens_per_s; /* mean over the new tokens */
} kvd_plan_of_tier;

/* The median of n >= 1 measurements; reorders them. */
double kvd__median(double *t, int n);

/* Seconds of a pass of R rows, attention aside. */
double kvd__rows_seconds(const kvd_plan_rates *r, int64_t n_rows);

/* All tiers for a prompt of n_prompt tokens and n_new more, under a budget.
 * spill: the spill's options (dir unused), NULL: no disk tier. */
void kvd__plan_tiers(const kvd_kv_shape *s, const kvd_limits *lim, const kvd_plan_rates *r, const kvd_spill_options *spill,
                     int64_t n_prompt, int64_t n_new, kvd_plan_of_tier plans[KVD_TIER_COUNT]);

/* Full if it fits, else the tier with the least time for prompt and answer;
 * KVD_TIER_COUNT if none fits. */
kvd_tier kvd__plan_choose(const kvd_plan_of_tier plans[KVD_TIER_COUNT], int64_t n_new);

const char *kvd__tier_name(kvd_tier t);

#endif
