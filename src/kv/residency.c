/* What is kept and what is rebuilt: pure arithmetic, testable without weights.
 *
 * A pass from n_before to n = n_before + n_new tokens that leaves [start, n)
 * resident rebuilds the prefix [0, E), E = max(start, start_before) but at most
 * n_before. A block that is to be dropped is dropped before the pass and rebuilt
 * with the others, so that no pass holds both it and its successor. It needs
 *
 *   global layers   blocks of [start, n)
 *   local layers    what the new queries read (held from before) and what stays
 *   stream          E + n_new rows
 *   layer scratch   one layer's K and V of rows that are stored nowhere
 *   checkpoints     ids and block tables
 *
 * Rebuilding costs compute, keeping costs bytes: the smallest start that fits is
 * the best one. Usually an evicted position also costs less memory than a resident
 * one, but not always: the stream of a narrow cache (Gemma's local layers, few KV
 * heads) is wider than its K and V. So a plan may also take fewer new tokens at a
 * time, or begin again from position 0 where what is held stands in the way; what
 * kvd__least_bytes promises, kvd__pass_plan finds from every state. */
#include "base/minmax.h"
#include "base/error.h"
#include "kv/kv.h"

int kvd__kv_layers(const kvd_kv_shape *s, bool local)
{
    int n = 0;
    for (int l = 0; l < s->n_layers; l++)
        n += (s->local[l] != 0) == local;
    return n;
}

int64_t kvd__kv_block_bytes(const kvd_kv_shape *s)
{
    return (int64_t)2 * s->n_kv_heads * s->d_head * KVD__BLOCK * kvd__kvtype_bytes(s->type);
}

int64_t kvd__checkpoint_bytes(const kvd_kv_shape *s, int64_t n_tokens)
{
    int64_t cap = kvd__checkpoint_capacity(n_tokens);
    return cap * (int64_t)sizeof(int32_t) + cap / KVD__BLOCK * (int64_t)sizeof(char *) * (s->window ? 2 : 1);
}

/* First block that local layers keep when [start, n) is resident globally: the
 * next query, at n, sees from n - window + 1 on. */
static int64_t local_keep_block(const kvd_kv_shape *s, int64_t start, int64_t n)
{
    return kvd__max64(start, kvd__max64(0, n - s->window + 1)) / KVD__BLOCK;
}

void kvd__pass_cost(const kvd_kv_shape *s, int64_t n_before, int64_t start_before, int64_t n_new, int64_t start,
                    kvd_pass_plan *p)
{
    int64_t n = n_before + n_new, e = kvd__min64(kvd__max64(start, start_before), n_before);
    int64_t block = kvd__kv_block_bytes(s), end = kvd__blocks(n);
    *p = (kvd_pass_plan){.n_before = n_before, .n_new = n_new, .n_tokens = n, .start = start, .recompute = e, .n_rows = e + n_new};

    int64_t first = start < n ? start / KVD__BLOCK : end; /* start == n: nothing stays */
    p->kv_bytes = (end - first) * block * kvd__kv_layers(s, false);
    p->scratch_block = e > 0 ? 0 : n_before / KVD__BLOCK;
    p->scratch_end_block = first;
    if (s->window) {
        p->keep_block = start < n ? local_keep_block(s, start, n) : end;
        p->held_end_block = e < n_before ? kvd__blocks(n_before) : 0;
        p->held_block = kvd__min64(local_keep_block(s, e, n_before), p->held_end_block);
        int64_t held = p->held_end_block - p->held_block;
        int64_t overlap = kvd__min64(p->held_end_block, end) - kvd__max64(p->held_block, p->keep_block);
        int64_t local = held + (end - p->keep_block) - (held > 0 ? kvd__max64(0, overlap) : 0);
        p->kv_bytes += local * block * kvd__kv_layers(s, true);
        /* New rows that do not stay end where keep_block begins, rebuilt ones with
         * their tile: attention may touch all of a tile. */
        int64_t rebuilt = (e + KVD__TILE - 1) / KVD__TILE * KVD__TILE_BLOCKS;
        int64_t local_end = p->keep_block > n_before / KVD__BLOCK ? p->keep_block : kvd__min64(p->keep_block, rebuilt);
        p->scratch_end_block = kvd__max64(first, local_end);
    }
    if (p->scratch_end_block < p->scratch_block)
        p->scratch_end_block = p->scratch_block;
    /* A position whose block is resident is not in the scratch: with nothing to
     * rebuild and all kept there is none. */
    if (e == 0 && first <= p->scratch_block && (!s->window || p->keep_block <= p->scratch_block))
        p->scratch_end_block = p->scratch_block;
    p->layer_bytes = (p->scratch_end_block - p->scratch_block) * block;
    p->stream_bytes = p->n_rows * s->stream_row_bytes;
    p->checkpoint_bytes = kvd__checkpoint_bytes(s, n);
    p->bytes = p->kv_bytes + p->layer_bytes + p->stream_bytes + p->checkpoint_bytes;
}

/* The smallest start that --kv-tokens allows with n tokens; n itself: keep none. */
static int64_t least_start(const kvd_limits *lim, int64_t n)
{
    if (lim->full || lim->kv_tokens < 0)
        return 0;
    if (lim->kv_tokens == 0)
        return n;
    return kvd__max64(0, n - lim->kv_tokens) / KVD__BLOCK * KVD__BLOCK;
}

/* The next candidate: multiples of 16, then n itself. */
static int64_t next_start(int64_t start, int64_t n)
{
    return kvd__min64(start / KVD__BLOCK * KVD__BLOCK + KVD__BLOCK, n);
}

/* A pass on the way to n_tokens: ids and tables are for all of them. */
static int64_t cost_on_way(const kvd_kv_shape *s, int64_t n_tokens, int64_t n_before, int64_t start_before,
                           int64_t n_new, int64_t start, kvd_pass_plan *p)
{
    kvd__pass_cost(s, n_before, start_before, n_new, start, p);
    p->bytes -= p->checkpoint_bytes;
    p->n_tokens = n_tokens;
    p->checkpoint_bytes = kvd__checkpoint_bytes(s, n_tokens);
    return p->bytes += p->checkpoint_bytes;
}

/* The most that any pass over a single new token takes, on the way to n tokens
 * with [start, ...) resident. It grows with n; a window adds a ripple of period 16,
 * by how many blocks it touches, so the last 16 lengths hold the maximum. */
static int64_t walk_bytes(const kvd_kv_shape *s, int64_t n, int64_t start)
{
    int64_t most = 0, from = s->window ? kvd__max64(1, n - KVD__BLOCK + 1) : n;
    kvd_pass_plan p;
    for (int64_t i = from; i <= n; i++)
        most = kvd__max64(most, cost_on_way(s, n, i - 1, kvd__min64(start, i), 1, kvd__min64(start, i), &p));
    return most;
}

/* The start whose walk to n tokens takes least. Bytes are linear in start but for
 * steps of a tile (the scratch of local layers) and a bend where the windows begin:
 * only the ends of these stretches can be best. */
static int64_t least_walk(const kvd_kv_shape *s, const kvd_limits *lim, int64_t n, int64_t *best)
{
    const int64_t first = least_start(lim, n), bend = s->window ? n - s->window : first, far = 2 * KVD__TILE;
    int64_t least = INT64_MAX;
    for (int64_t start = first;;) {
        int64_t bytes = walk_bytes(s, n, start);
        if (bytes < least) {
            least = bytes;
            *best = start;
        }
        if (lim->full || start >= n)
            return least;
        start = next_start(start, n);
        if (start > first + far && start < bend - far)
            start = (bend - far) / KVD__BLOCK * KVD__BLOCK;
        else if (start > first + far && start > bend + far && start < n - far)
            start = (n - far) / KVD__BLOCK * KVD__BLOCK;
    }
}

/* All new tokens in one pass that drops as little as it can. */
static bool plan_whole(const kvd_kv_shape *s, const kvd_limits *lim, int64_t n_before, int64_t start_before,
                       int64_t n_left, kvd_pass_plan *plan)
{
    int64_t n = n_before + n_left;
    for (int64_t start = least_start(lim, n);; start = next_start(start, n)) {
        kvd__pass_cost(s, n_before, start_before, n_left, start, plan);
        if (plan->bytes <= lim->budget_bytes)
            return true;
        if (start >= n)
            return false;
    }
}

/* The next pass of a walk, in the longest steps that fit. */
static bool plan_walk(const kvd_kv_shape *s, const kvd_limits *lim, int64_t n_before, int64_t start_before,
                      int64_t n_left, int64_t start, kvd_pass_plan *plan)
{
    if (start_before > start)
        return false;
    for (int64_t p = kvd__min64(n_left, lim->piece_tokens); p > 0; p /= 2)
        if (cost_on_way(s, n_before + n_left, n_before, start_before, p, kvd__min64(start, n_before + p), plan) <= lim->budget_bytes)
            return true;
    return false;
}

int kvd__pass_plan(const kvd_kv_shape *s, const kvd_limits *lim, int64_t n_before, int64_t start_before,
                   int64_t n_left, kvd_pass_plan *plan, kvd_error *err)
{
    int64_t n = n_before + n_left, start = 0, from = n_before;
    kvd_pass_plan p;
    bool none_held = start_before >= n_before;
    if (start_before == 0 || none_held) { /* can everything stay? */
        from = start_before == 0 ? n_before : 0;
        if (least_start(lim, n) == 0 && walk_bytes(s, n, 0) <= lim->budget_bytes &&
            plan_walk(s, lim, from, 0, n - from, 0, &p)) {
            *plan = p;
            return 0;
        }
    }
    if (!lim->full && plan_whole(s, lim, n_before, start_before, n_left, &p)) {
        *plan = p;
        return 0;
    }
    int64_t least = least_walk(s, lim, n, &start);
    if (least > lim->budget_bytes) {
        int rc = kvd__fail(err, KVD_E_BUDGET, "context memory: %lld tokens need %lld bytes, the budget is %lld",
                           (long long)n, (long long)least, (long long)lim->budget_bytes);
        if (err)
            err->need_bytes = least;
        return rc;
    }
    if (!plan_walk(s, lim, n_before, start_before, n_left, start, &p))
        plan_walk(s, lim, 0, 0, n, start, &p);
    *plan = p;
    return 0;
}

int64_t kvd__least_bytes(const kvd_kv_shape *s, const kvd_limits *lim, int64_t n_tokens)
{
    int64_t start;
    return n_tokens > 0 ? least_walk(s, lim, n_tokens, &start) : 0;
}

int64_t kvd__full_bytes(const kvd_kv_shape *s, int64_t n_tokens)
{
    return n_tokens > 0 ? walk_bytes(s, n_tokens, 0) : 0;
}

int64_t kvd__longest(kvd_need_fn *need, const void *ctx, int64_t budget_bytes, int64_t most)
{
    int64_t lo = 0, hi = most; /* lo fits, the answer is in [lo, hi] */
    while (lo < hi) {
        int64_t mid = lo + (hi - lo + 1) / 2;
        if (need(ctx, mid) <= budget_bytes)
            lo = mid;
        else
            hi = mid - 1;
    }
    return lo;
}

typedef struct {
    const kvd_kv_shape *s;
    const kvd_limits *lim;
} limited;

static int64_t least_of(const void *ctx, int64_t n)
{
    const limited *x = ctx;
    return kvd__least_bytes(x->s, x->lim, n);
}

int64_t kvd__max_tokens(const kvd_kv_shape *s, const kvd_limits *lim, int64_t max_tokens)
{
    return kvd__longest(least_of, &(limited){s, lim}, lim->budget_bytes, max_tokens);
}
