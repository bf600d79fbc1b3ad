/* kv: where keys and values live.
 *
 * K and V are derived state: any block may be dropped and rebuilt from the
 * residual stream. A kvd_kv holds the blocks of one session; a *block* is 16
 * positions of one layer, a *block column* the block of all layers of one kind.
 *
 * A layer's block is K [d_head][16] and V [16][d_head] for each KV head. Columns
 * come and go one by one, but attention reads tiles of four blocks, head by head,
 * and a long cache comes from memory. So where the budget is not tight (it holds
 * KVD__EXTENT_COLUMNS columns), the four columns of a tile share a mapping:
 *
 *   extent   layer 0                                  layer 1 ...
 *            head 0                    head 1
 *            K0 K1 K2 K3 V0 V1 V2 V3   K0 K1 ...
 *
 * (SmolLM2 at 4,096 tokens, Zen 4: 18 GB/s a core, 7 with columns of their own.)
 * The ledger still counts columns; pages of a tile that is dropped in part go back
 * with the rest of it, at most three columns late. Where the budget is tight each
 * column is an allocation of its own, and the process follows the ledger exactly.
 *
 * Layers are of two kinds: global ones attend to everything, local ones to a
 * sliding window, so a position may have left the local column while its global
 * one is still there. Attention reads through kvd__kv_k and kvd__kv_v, from
 * (layer, block, head) to pointer: the resident block if there is one, else the scratch of the one
 * layer being computed, which the next layer reuses.
 *
 * The evicted set is a prefix [0, start): a hole would need K and V that local
 * layers have dropped.
 *
 * Layer: above base, quant, kern; does not see model. One caller at a time per
 * kvd_kv; during a pass its pointers are read by all threads. */
#ifndef KVD_KV_KV_H
#define KVD_KV_KV_H

#include "base/ledger.h"
#include "kern/kern.h"

enum { KVD__MAX_LAYERS = 512 };

/* What storage needs to know of a model and of a session's settings. */
typedef struct kvd_kv_shape {
    int n_layers, n_kv_heads, d_head;
    kvd_kvtype type;
    int64_t window;                  /* of local layers, in positions; 0: there are none */
    uint8_t local[KVD__MAX_LAYERS];  /* is layer l local? */
    int64_t stream_row_bytes;        /* of one position, while in a pass */
} kvd_kv_shape;

/* Blocks that n positions from 0 on touch. */
static inline int64_t kvd__blocks(int64_t n) { return (n + KVD__BLOCK - 1) / KVD__BLOCK; }

int kvd__kv_layers(const kvd_kv_shape *s, bool local);
/* Bytes of one layer's block: 2 * n_kv * d_head * 16 * b. */
int64_t kvd__kv_block_bytes(const kvd_kv_shape *s);

/* ---- residency: the pure arithmetic of what is kept ------------------------- */

typedef struct kvd_limits {
    bool full;             /* --policy full: nothing may be dropped */
    int64_t kv_tokens;     /* B, or -1: no such limit */
    int64_t budget_bytes;  /* for this session, INT64_MAX: none */
    int64_t piece_tokens;  /* rows of a pass while everything stays resident, at most */
    int64_t disk_piece_tokens; /* rows of a pass of the disk tier, at most */
} kvd_limits;

/* One pass, as it will be carried out. Positions are multiples of 16 where they
 * bound blocks; *_block are block numbers. */
typedef struct kvd_pass_plan {
    int64_t n_before, n_new; /* tokens before, and new ones in this pass */
    int64_t n_tokens;        /* ids and tables are for so many: more than the sum if more passes follow */
    int64_t start;           /* resident afterwards (global layers): [start, n_before + n_new) */
    int64_t recompute;       /* positions [0, recompute) ride along */
    int64_t n_rows;          /* recompute + n_new */
    /* Local layers: held from before are blocks [held_block, held_end_block), to
     * stay after the pass are those from keep_block on. */
    int64_t held_block, held_end_block, keep_block;
    /* Layer scratch: blocks [scratch_block, scratch_end_block). */
    int64_t scratch_block, scratch_end_block;
    int64_t kv_bytes, stream_bytes, layer_bytes, checkpoint_bytes;
    int64_t bytes; /* their sum: context memory at its highest */
} kvd_pass_plan;

/* Ids and block tables of n tokens; capacity grows in steps of
 * KVD__CHECKPOINT_STEP tokens. */
enum { KVD__CHECKPOINT_STEP = 256 };
static inline int64_t kvd__checkpoint_capacity(int64_t n_tokens)
{
    return (n_tokens + KVD__CHECKPOINT_STEP - 1) / KVD__CHECKPOINT_STEP * KVD__CHECKPOINT_STEP;
}
int64_t kvd__checkpoint_bytes(const kvd_kv_shape *s, int64_t n_tokens);

/* Bytes of the context memory of a pass after which [start, n_before + n_new) is
 * resident, when [start_before, n_before) was. Fills the plan, as of the only pass
 * to n_before + n_new tokens. docs/memory.md
 * states the same formula; tests hold the ledger against it. */
void kvd__pass_cost(const kvd_kv_shape *s, int64_t n_before, int64_t start_before, int64_t n_new, int64_t start,
                    kvd_pass_plan *plan);

/* The next pass towards n_before + n_left tokens: chooses start (the smallest that
 * obeys the limits; all resident if it fits) and how many new tokens to take.
 * Where nothing is held, or what is held stands in the way, plan->n_before is 0:
 * begin again, with what there was among the new tokens (kvd__kv_reset first).
 * KVD_E_BUDGET with need_bytes = kvd__least_bytes if no choice fits; from that
 * budget on there is a plan in every state, and so there is for the next pass. */
int kvd__pass_plan(const kvd_kv_shape *s, const kvd_limits *lim, int64_t n_before, int64_t start_before,
                   int64_t n_left, kvd_pass_plan *plan, kvd_error *err);

/* Least context memory with which n_tokens can be run at all, from any state, one
 * token at a time if need be (grows with n_tokens); the least that keeps all of
 * them resident; the longest context (at most max_tokens) that the limits allow. */
int64_t kvd__least_bytes(const kvd_kv_shape *s, const kvd_limits *lim, int64_t n_tokens);
int64_t kvd__full_bytes(const kvd_kv_shape *s, int64_t n_tokens);
int64_t kvd__max_tokens(const kvd_kv_shape *s, const kvd_limits *lim, int64_t max_tokens);

/* The largest n of 0..most whose need is within the budget, for any need that grows
 * with n and is 0 for 0. */
typedef int64_t kvd_need_fn(const void *ctx, int64_t n_tokens);
int64_t kvd__longest(kvd_need_fn *need, const void *ctx, int64_t budget_bytes, int64_t most);

/* ---- the disk tier (residency_disk.c) ------------------------------------------ */

/* A pass after which [start, n_before + n_new) is resident and [0, start) on disk;
 * start is a multiple of 16, at most n_before. plan->bytes: without the spill's own
 * buffers (kvd__spill_bytes). n_tokens: ids and tables are for so many. */
void kvd__disk_cost(const kvd_kv_shape *s, int64_t n_tokens, int64_t n_before, int64_t n_new, int64_t start,
                    kvd_pass_plan *plan);

/* The next pass towards n_before + n_left tokens when [0, start_before) is on disk:
 * the longest piece that fits, dropping as little as it can. lim->budget_bytes is
 * what the spill's buffers leave. KVD_E_BUDGET as kvd__pass_plan. */
int kvd__disk_plan(const kvd_kv_shape *s, const kvd_limits *lim, int64_t n_before, int64_t start_before, int64_t n_left,
                   kvd_pass_plan *plan, kvd_error *err);

/* Least bytes for n_tokens, one at a time, without the spill's own buffers. */
int64_t kvd__disk_least_bytes(const kvd_kv_shape *s, int64_t n_tokens);

/* ---- blocks ----------------------------------------------------------------- */

enum { KVD__EXTENT_COLUMNS = 128 };

typedef struct kvd_kv {
    kvd_kv_shape shape;
    kvd_ledger *ledger;
    int64_t start, end;           /* resident on global layers: [start, end) */
    int64_t local_start;          /* on local layers: [local_start, end) */
    int64_t n_slots;              /* capacity of the tables, in blocks */
    char **column[2];             /* [n_slots] by kind (0 global, 1 local): its first K; NULL: not resident */
    char *scratch;                /* one layer's K and V of blocks from scratch_block on */
    int64_t scratch_block;
    int32_t index[KVD__MAX_LAYERS]; /* layer -> index within its kind */
    int64_t block_bytes, head_bytes; /* of a layer's block, of a KV head in it: K and V */
    int extent_blocks;              /* columns that share a mapping: 4, or 1 */
} kvd_kv;

int kvd__kv_create(kvd_kv **out, const kvd_kv_shape *s, kvd_ledger *l, kvd_error *err);
void kvd__kv_destroy(kvd_kv **kv);

/* Drop what the plan drops, to rebuild it or for good. kvd__kv_begin does it too;
 * a caller that grows something else for the pass does it before. */
void kvd__kv_evict(kvd_kv *kv, const kvd_pass_plan *plan);

/* Make ready for a pass: drop what the plan drops, allocate what it stores and
 * the layer scratch. On failure the tokens before are as resident as they can be
 * and nothing of the pass remains. */
int kvd__kv_begin(kvd_kv *kv, const kvd_pass_plan *plan, kvd_error *err);
/* After the pass: done tells whether it was completed. Frees the scratch and, on
 * local layers, what has left the window. */
void kvd__kv_end(kvd_kv *kv, const kvd_pass_plan *plan, bool done);

/* Context bytes held now: columns, scratch aside, and block tables. */
int64_t kvd__kv_context_bytes(const kvd_kv *kv);

/* Forget positions from n on. */
void kvd__kv_truncate(kvd_kv *kv, int64_t n);
/* Drop everything; the number of tokens stays. */
void kvd__kv_clear(kvd_kv *kv);
/* Drop everything: n tokens, none resident. */
void kvd__kv_reset(kvd_kv *kv, int64_t n);

/* Where K [d_head][16] and V [16][d_head] of a head of a block are. */
static inline void kvd__kv_find(const kvd_kv *kv, int layer, int64_t block, int head, char **k, char **v)
{
    char *c = kv->column[kv->shape.local[layer]][block];
    int64_t half = kv->head_bytes / 2, extent = c ? kv->extent_blocks : 1;
    *k = c ? c + extent * (kv->index[layer] * kv->block_bytes + head * kv->head_bytes)
           : kv->scratch + (block - kv->scratch_block) * kv->block_bytes + head * kv->head_bytes;
    *v = *k + extent * half;
}

static inline char *kvd__kv_k(const kvd_kv *kv, int layer, int64_t block, int head)
{
    char *k, *v;
    kvd__kv_find(kv, layer, block, head, &k, &v);
    return k;
}

static inline char *kvd__kv_v(const kvd_kv *kv, int layer, int64_t block, int head)
{
    char *k, *v;
    kvd__kv_find(kv, layer, block, head, &k, &v);
    return v;
}

#endif
