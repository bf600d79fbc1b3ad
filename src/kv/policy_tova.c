/* TOVA (arXiv 2401.06104): what the last query attends to, mean over all heads of the
 * layer; whatever it looks at least goes, be it the newest. */
#include "kv/policy.h"

static int64_t observes(int64_t n_rows, int64_t budget)
{
    (void)n_rows, (void)budget;
    return 1;
}

static void mean(double *score, const double *weights, int64_t n, int64_t n_queries, int64_t n_rows)
{
    (void)n_rows;
    for (int64_t i = 0; i < n; i++)
        score[i] = weights[i] / (double)n_queries;
}

static void select_attended(const kvd_kept *k, uint8_t *keep)
{
    for (int64_t i = 0; i < k->n; i++)
        keep[i] = 0;
    kvd__keep_highest(k->score, 0, k->n, k->budget, keep);
}

const kvd_keeper kvd__keep_tova = {.name = "tova", .per_layer = true, .observes = observes, .observe = mean, .select = select_attended};
