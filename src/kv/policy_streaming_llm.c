/* StreamingLLM (arXiv 2309.17453): the first positions of a text draw attention that
 * has nowhere else to go; keep those sinks and the last ones. */
#include "kv/policy.h"

enum { SINKS = 4 };

static int64_t observes(int64_t n_rows, int64_t budget)
{
    (void)n_rows, (void)budget;
    return 0;
}

static void select_sinks_and_last(const kvd_kept *k, uint8_t *keep)
{
    int64_t sinks = 0;
    while (sinks < k->n && sinks < k->budget && k->pos[sinks] < SINKS)
        sinks++;
    for (int64_t i = 0; i < k->n; i++)
        keep[i] = i < sinks || i >= k->n - (k->budget - sinks);
}

const kvd_keeper kvd__keep_streaming_llm = {.name = "streaming-llm", .per_layer = true, .observes = observes, .select = select_sinks_and_last};
