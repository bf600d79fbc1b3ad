/* What is kept and what goes to disk: the disk tier's pure arithmetic.
 *
 * Evicted positions [0, start) lie in the spill file (spill.h) and are read back
 * in every pass; only new tokens are rows. A block goes to disk when it is whole
 * and before the pass that needs its room, so start never passes the tokens that
 * were there before; a prompt is therefore fed in pieces no longer than what the
 * budget can hold. Besides the spill's own buffers a pass takes
 *
 *   global layers   blocks of [start, n)
 *   local layers    of those, what the new queries see and what stays
 *   stream          n_new rows
 *   checkpoints     ids and block tables */
#include "base/minmax.h"
#include "base/error.h"
#include "kv/kv.h"

void kvd__disk_cost(const kvd_kv_shape *s, int64_t n_tokens, int64_t n_before, int64_t n_new, int64_t start,
                    kvd_pass_plan *p)
{
    int64_t n = n_before + n_new, block = kvd__kv_block_bytes(s), first = start / KVD__BLOCK, end = kvd__blocks(n);
    *p = (kvd_pass_plan){.n_before = n_before, .n_new = n_new, .n_tokens = n_tokens, .start = start, .n_rows = n_new,
                         .scratch_block = first, .scratch_end_block = first};
    p->kv_bytes = (end - first) * block * kvd__kv_layers(s, false);
    if (s->window) {
        /* Pieces are no longer than the window: no gap between held and kept. */
        p->held_block = kvd__max64(first, kvd__max64(0, n_before - s->window + 1) / KVD__BLOCK);
        p->held_end_block = kvd__max64(p->held_block, kvd__blocks(n_before));
        p->keep_block = kvd__max64(first, kvd__max64(0, n - s->window + 1) / KVD__BLOCK);
        p->kv_bytes += (end - kvd__min64(p->held_block, p->keep_block)) * block * kvd__kv_layers(s, true);
    }
    p->stream_bytes = n_new * s->stream_row_bytes;
    p->checkpoint_bytes = kvd__checkpoint_bytes(s, n_tokens);
    p->bytes = p->kv_bytes + p->stream_bytes + p->checkpoint_bytes;
}

/* The most new tokens that a piece may have. */
static int64_t longest_piece(const kvd_kv_shape *s, const kvd_limits *lim)
{
    int64_t p = lim->disk_piece_tokens;
    return s->window && s->window - 1 < p ? kvd__max64(1, s->window - 1) : p;
}

int kvd__disk_plan(const kvd_kv_shape *s, const kvd_limits *lim, int64_t n_before, int64_t start_before, int64_t n_left,
                   kvd_pass_plan *plan, kvd_error *err)
{
    int64_t n = n_before + n_left, least = 0, most = n_before / KVD__BLOCK * KVD__BLOCK;
    kvd_pass_plan p;
    for (int64_t piece = kvd__min64(n_left, longest_piece(s, lim)); piece > 0; piece /= 2) {
        int64_t after = n_before + piece, start = start_before;
        if (lim->kv_tokens >= 0) /* --kv-tokens holds here too, as far as whole blocks go */
            start = kvd__max64(start, kvd__min64(most, kvd__max64(0, after - lim->kv_tokens) / KVD__BLOCK * KVD__BLOCK));
        for (; start <= most; start += KVD__BLOCK) {
            kvd__disk_cost(s, n, n_before, piece, start, &p);
            least = p.bytes;
            if (p.bytes <= lim->budget_bytes) {
                *plan = p;
                return 0;
            }
        }
    }
    int rc = kvd__fail(err, KVD_E_BUDGET, "context memory: %lld tokens with the rest on disk need %lld bytes more than the spill's buffers, the budget leaves %lld",
                       (long long)n, (long long)least, (long long)lim->budget_bytes);
    if (err)
        err->need_bytes = least;
    return rc;
}

int64_t kvd__disk_least_bytes(const kvd_kv_shape *s, int64_t n_tokens)
{
    int64_t least = 0;
    kvd_pass_plan p;
    /* The last 16 lengths: how full the last block is makes a ripple. */
    for (int64_t n = kvd__max64(1, n_tokens - KVD__BLOCK); n <= n_tokens; n++) {
        kvd__disk_cost(s, n_tokens, n - 1, 1, (n - 1) / KVD__BLOCK * KVD__BLOCK, &p);
        least = kvd__max64(least, p.bytes);
    }
    return least;
}
