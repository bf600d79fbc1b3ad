/* kv: lossy policies, the field's baselines, as pure functions. What each keeps and
 * where that comes from: docs/baselines.md.
 *
 * A policy sees one *set* of slots: those of a KV head at a layer, or of a layer
 * (per_layer). It is shown attention weights when it wants some, and asked which
 * slots to keep. It knows no weights, no tensors and no memory.
 *
 * Layer: kv. Pure; any thread. */
#ifndef KVD_KV_POLICY_H
#define KVD_KV_POLICY_H

#include <stdbool.h>
#include <stdint.h>

typedef enum kvd_policy_kind {
    KVD_KEEP_WINDOW,
    KVD_KEEP_STREAMING_LLM,
    KVD_KEEP_H2O,
    KVD_KEEP_SNAPKV,
    KVD_KEEP_TOVA,
    KVD_KEEP_COUNT
} kvd_policy_kind;

/* The slots of a set, in ascending order of position. */
typedef struct kvd_kept {
    int64_t n;
    const int64_t *pos;  /* [n] ascending, absolute */
    const double *score; /* [n], what observe left; zeros for a policy that wants none */
    int64_t budget;      /* how many may stay, 0 .. n - 1: B less what is about to come */
    int64_t incoming;    /* 1: a token comes next, and is the B-th; 0 */
    int64_t prompt_end;  /* of the latest feed of several tokens: positions below were there or in it */
    int64_t window;      /* snapkv: observation window of that feed */
} kvd_kept;

typedef struct kvd_keeper {
    const char *name;
    bool per_layer; /* one set for all KV heads of a layer, else one each */
    /* Of a feed of n_rows tokens under budget B: whose weights it wants to see, the
     * last so many rows; 0: none. */
    int64_t (*observes)(int64_t n_rows, int64_t budget);
    /* Weights that those rows gave the slots, summed over rows and query heads of the
     * set (n_queries heads, n_rows rows): fold into score. weights, score: [n]. NULL
     * where observes gives 0. */
    void (*observe)(double *score, const double *weights, int64_t n, int64_t n_queries, int64_t n_rows);
    /* keep[i] = 1 for exactly k->budget slots, 0 for the others. */
    void (*select)(const kvd_kept *k, uint8_t *keep);
} kvd_keeper;

const kvd_keeper *kvd__keeper(kvd_policy_kind kind);

extern const kvd_keeper kvd__keep_window, kvd__keep_streaming_llm, kvd__keep_h2o, kvd__keep_snapkv, kvd__keep_tova;

/* Mark the `count` slots of [from, to) with the highest scores, of equal ones the
 * younger (higher index); what is marked already stays and does not count. */
void kvd__keep_highest(const double *score, int64_t from, int64_t to, int64_t count, uint8_t *keep);

#endif
