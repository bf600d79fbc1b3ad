/* token: the merging of neighbours, which both kinds of vocabulary share.
 *
 * A text is a row of symbols. While any two neighbours may be merged, the pair
 * of the least priority (a rank, or a score turned upside down) is; among equal
 * ones the leftmost. The row is a linked list, the candidates lie in a binary
 * heap, and a candidate that has been overtaken is not searched for but known
 * by its length when it comes up: a symbol only ever grows to the right, so
 * left and right have changed if and only if the two lengths no longer add up.
 * n symbols cost O(n log n), also when they are a megabyte of one letter. */
#ifndef KVD_TOKEN_MERGE_H
#define KVD_TOKEN_MERGE_H

#include "token/token.h"

#define KVD__NO_NODE UINT32_MAX

typedef struct kvd__node {
    uint32_t at, n; /* bytes of the text; n == 0: was merged into another */
    uint32_t prev, next;
    int32_t symbol;
} kvd__node;

typedef struct kvd__candidate {
    uint64_t order; /* priority, then index of the left node */
    uint32_t n;     /* bytes of both */
    int32_t symbol; /* what they become */
} kvd__candidate;

typedef struct kvd__merger {
    const char *text;
    kvd__node *nodes;
    kvd__candidate *heap;
    uint32_t cap;
} kvd__merger;

/* May left and right be merged? Then *priority and *symbol say how. */
typedef bool (*kvd__pair_fn)(const void *ctx, const char *text, const kvd__node *left, const kvd__node *right,
                             uint32_t *priority, int32_t *symbol);

/* Room for n nodes; what was in them is lost. */
int kvd__merger_reserve(kvd__merger *m, uint32_t n, kvd_ledger *l, kvd_error *err);
void kvd__merger_free(kvd__merger *m);

/* Merge nodes 0..n-1 (n > 0), of which at, n and symbol are set. What remains
 * is the list from node 0 along next. */
void kvd__merger_run(kvd__merger *m, uint32_t n, kvd__pair_fn pair, const void *ctx);

#endif
