#include "kv/policy.h"

#include <stddef.h>

static const kvd_keeper *const keepers[KVD_KEEP_COUNT] = {
    [KVD_KEEP_WINDOW] = &kvd__keep_window, [KVD_KEEP_STREAMING_LLM] = &kvd__keep_streaming_llm,
    [KVD_KEEP_H2O] = &kvd__keep_h2o,       [KVD_KEEP_SNAPKV] = &kvd__keep_snapkv,
    [KVD_KEEP_TOVA] = &kvd__keep_tova,
};

const kvd_keeper *kvd__keeper(kvd_policy_kind kind) { return (unsigned)kind < KVD_KEEP_COUNT ? keepers[kind] : NULL; }

/* Of the slots of [from, to) with keep == was, the one to take next: the highest
 * score, the younger of equals (take == 1), or the lowest, the older of equals. */
static int64_t next_of(const double *score, int64_t from, int64_t to, const uint8_t *keep, uint8_t was, bool highest)
{
    int64_t best = -1;
    for (int64_t i = from; i < to; i++)
        if (keep[i] == was && (best < 0 || (highest ? score[i] >= score[best] : score[i] < score[best])))
            best = i;
    return best;
}

enum { FREE = 0, KEPT = 1, CHOSEN = 2 };

void kvd__keep_highest(const double *score, int64_t from, int64_t to, int64_t count, uint8_t *keep)
{
    int64_t n = 0;
    for (int64_t i = from; i < to; i++)
        n += keep[i] == FREE;
    count = count < n ? count : n;
    if (2 * count <= n) {
        while (count-- > 0)
            keep[next_of(score, from, to, keep, FREE, true)] = KEPT;
        return;
    }
    /* Nearly all stay, as for each token of a decode: choose all, take the lowest back. */
    for (int64_t i = from; i < to; i++)
        if (keep[i] == FREE)
            keep[i] = CHOSEN;
    for (int64_t drop = n - count; drop > 0; drop--)
        keep[next_of(score, from, to, keep, CHOSEN, false)] = FREE;
    for (int64_t i = from; i < to; i++)
        if (keep[i] == CHOSEN)
            keep[i] = KEPT;
}
