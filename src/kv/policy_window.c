/* The last B positions. */
#include "kv/policy.h"

static int64_t observes(int64_t n_rows, int64_t budget)
{
    (void)n_rows, (void)budget;
    return 0;
}

static void select_last(const kvd_kept *k, uint8_t *keep)
{
    for (int64_t i = 0; i < k->n; i++)
        keep[i] = i >= k->n - k->budget;
}

const kvd_keeper kvd__keep_window = {.name = "window", .per_layer = true, .observes = observes, .select = select_last};
