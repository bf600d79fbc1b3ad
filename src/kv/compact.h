/* kv: the compacted arena, where sessions with a lossy policy keep K and V. Each KV
 * head of each layer holds a *set* of at most B positions of its own; what is
 * dropped is gone. The exact engine (kv.h) does not know of this.
 *
 * A set has *slots* in the arena, in no order, and lists them by ascending position.
 * A feed of one token drops one slot where B are held and takes a free one; it
 * attends to the arena. A feed of several (a prompt) goes through the layer in a
 * *gathering* of what was kept and what is new, in ascending order, of which the
 * policy's choice is copied back at the layer's end: so memory between feeds is the
 * arena, and during one it is one layer of all rows besides.
 *
 * While nothing was ever dropped slot and position are equal, and attention gives
 * the bits of the exact engine.
 *
 * Layer: kv. One feed at a time; functions of different heads may run on different
 * threads. */
#ifndef KVD_KV_COMPACT_H
#define KVD_KV_COMPACT_H

#include "kv/kv.h"
#include "kv/policy.h"

typedef struct kvd_set {
    int64_t n;
    int64_t *pos;   /* [capacity] ascending */
    double *score;  /* [capacity] of pos */
    int32_t *slot;  /* [capacity] of pos, in the arena */
} kvd_set;

typedef struct kvd_compact {
    kvd_kv_shape shape;
    kvd_ledger *ledger;
    const kvd_keeper *keeper;
    bool renumber;
    int64_t budget;     /* B */
    int64_t n_tokens;   /* fed so far */
    int64_t prompt_end, snap_window; /* of the latest feed of several */
    int64_t capacity;   /* slots of a set: B rounded up to tiles */
    int64_t head_bytes; /* K and V of a block of one head */
    char *arena;        /* [n_layers][n_kv_heads][capacity/16] blocks */
    kvd_set *sets;      /* [n_layers][n_kv_heads] */
    char *lists;        /* what sets point into */

    /* The feed under way. */
    int64_t n_new, n_observed; /* rows, and how many of the last are observed */
    int64_t slots;      /* of a head below: kept and new, rounded up to tiles */
    char *gathered;     /* [n_kv_heads][slots/16] blocks; NULL with one row */
    char *rotated;      /* renumber: [n_kv_heads][slots/16][d_head][16] K of what attention reads */
    kvd_set *feed;      /* [n_kv_heads]: the sets that attention sees at the layer under way */
    char *feed_lists;   /* what feed points into; NULL with one row, whose sets are the arena's */
    uint8_t *keep;      /* [n_kv_heads][slots] */
    int64_t n_threads;
    /* The probe's; NULL where nothing is observed. */
    double *weights;    /* [n_kv_heads][slots] in the order of feed[].pos */
    float *rows;        /* [threads that have a head][probe_rows][slots]: scores of some rows */
    int64_t probe_rows; /* at once, KVD__PROBE_ROWS or less */
} kvd_compact;

enum { KVD__PROBE_ROWS = 32, KVD__LEAST_BUDGET = 8 };

/* budget: KVD__LEAST_BUDGET or more. KVD_E_BUDGET (need_bytes), KVD_E_NOMEM. */
int kvd__compact_create(kvd_compact **out, const kvd_kv_shape *s, kvd_policy_kind kind, bool renumber, int64_t budget,
                        int n_threads, kvd_ledger *l, kvd_error *err);
void kvd__compact_destroy(kvd_compact **c);
/* Forget all tokens. */
void kvd__compact_reset(kvd_compact *c);

/* Context memory: between feeds, and at the highest of a feed of n_rows on top of
 * budget kept ones, stream included, ids aside. What only a probe needs is in it where
 * the policy observes such a feed. */
int64_t kvd__compact_arena_bytes(const kvd_kv_shape *s, int64_t budget);
int64_t kvd__compact_feed_bytes(const kvd_kv_shape *s, kvd_policy_kind kind, bool renumber, int64_t budget, int n_threads,
                                int64_t n_rows);

/* A feed of n_new tokens begins and ends. After begin fails nothing has changed;
 * done false: the sets may be in pieces, reset before anything else. */
int kvd__compact_begin(kvd_compact *c, int64_t n_new, kvd_error *err);
void kvd__compact_end(kvd_compact *c, bool done);

/* ---- at a layer, for one head: by one thread --------------------------------------- */

/* Before its rows are stored: make room for a single one, or gather. feed[head] is
 * then what rows see: its last n_new are the new ones. */
void kvd__compact_open(kvd_compact *c, int layer, int head);
/* After its rows were stored and observed (c->weights): fold the weights into the
 * scores of all heads [head0, head1) and keep what the policy chooses. Policies that
 * choose per layer want all heads in one call. n_queries: of a head. */
void kvd__compact_close(kvd_compact *c, int layer, int head0, int head1, int64_t n_queries);

/* The set's slot that new row i was given, and the rank of that row. */
static inline int64_t kvd__compact_rank(const kvd_compact *c, int head, int64_t i) { return c->feed[head].n - c->n_new + i; }

/* Where K and V of a block of slots are, as rows of this feed read or store them;
 * raw_k: where K is stored, before it is rotated by rank. */
void kvd__compact_block(const kvd_compact *c, int layer, int head, int64_t block, char **k, char **v, char **raw_k);

/* Oldest position that a query at pos sees. */
static inline int64_t kvd__compact_first_seen(const kvd_compact *c, int layer, int64_t pos)
{
    return c->shape.local[layer] && c->shape.window && pos >= c->shape.window ? pos - c->shape.window + 1 : 0;
}

#endif
