/* H2O (arXiv 2306.14048): half of the budget for the last positions, half for the
 * heavy hitters, those with the most attention accumulated over all queries. */
#include "kv/policy.h"

static int64_t observes(int64_t n_rows, int64_t budget)
{
    (void)budget;
    return n_rows;
}

static void accumulate(double *score, const double *weights, int64_t n, int64_t n_queries, int64_t n_rows)
{
    (void)n_queries, (void)n_rows;
    for (int64_t i = 0; i < n; i++)
        score[i] += weights[i];
}

static void select_heavy_and_last(const kvd_kept *k, uint8_t *keep)
{
    /* What is about to come counts among the last. */
    int64_t last = (k->budget + k->incoming) / 2 - k->incoming, from = k->n - last;
    for (int64_t i = 0; i < k->n; i++)
        keep[i] = i >= from;
    kvd__keep_highest(k->score, 0, from, k->budget - last, keep);
}

const kvd_keeper kvd__keep_h2o = {.name = "h2o", .observes = observes, .observe = accumulate, .select = select_heavy_and_last};
