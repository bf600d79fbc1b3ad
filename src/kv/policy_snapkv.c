/* SnapKV (arXiv 2404.14469): the last queries of a prompt vote, once, for what the
 * answer will need; votes are pooled over neighbours, so that what belongs together
 * stays together. */
#include "kv/policy.h"

enum { WINDOW = 32, POOL = 7 };

static int64_t observes(int64_t n_rows, int64_t budget)
{
    int64_t w = budget / 2 < WINDOW ? budget / 2 : WINDOW;
    return n_rows == 1 ? 0 : n_rows < w ? n_rows : w;
}

/* The window is the last n_rows slots; it takes no part in the pooling. */
static void vote(double *score, const double *weights, int64_t n, int64_t n_queries, int64_t n_rows)
{
    int64_t end = n - n_rows;
    (void)n_queries;
    for (int64_t i = 0; i < n; i++) {
        int64_t a = i - POOL / 2, b = i + POOL / 2 + 1;
        score[i] = 0;
        for (int64_t j = a > 0 ? a : 0; i < end && j < b && j < end; j++)
            score[i] = weights[j] > score[i] ? weights[j] : score[i];
    }
}

static void select_voted(const kvd_kept *k, uint8_t *keep)
{
    /* Slots [0, end) stand before the window of the latest prompt. */
    int64_t end = 0, from_window = k->prompt_end - k->window, count;
    while (end < k->n && k->pos[end] < from_window)
        end++;
    for (int64_t i = 0; i < k->n; i++)
        keep[i] = i >= end;
    count = k->budget - (k->n - end);
    kvd__keep_highest(k->score, 0, end, count > 0 ? count : 0, keep);
    for (int64_t i = end; count < 0; i++, count++) /* none of them is left: the oldest goes */
        keep[i] = 0;
}

const kvd_keeper kvd__keep_snapkv = {.name = "snapkv", .observes = observes, .observe = vote, .select = select_voted};
