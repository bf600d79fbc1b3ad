/* token: finding the tokens that are matched whole in a text before anything
 * else is done to it: control tokens, when the caller wants them parsed, and
 * user-defined ones, always.
 *
 * Longer tokens go first, wherever they stand; among those of one length the
 * leftmost. (So llama.cpp does it, token by token over the whole text. Here a
 * walk through a trie finds which lengths occur at all, mostly none, and one
 * pass is made for each of those.) */
#ifndef KVD_TOKEN_SPECIAL_H
#define KVD_TOKEN_SPECIAL_H

#include "token/lookup.h"

typedef struct kvd__special {
    kvd__pairs edges;   /* node << 8 | byte -> node */
    int32_t *token;     /* [n_nodes] the token that ends here, or -1 */
    bool *control;      /* [n_nodes] it is one of those that must be asked for */
    uint32_t n_nodes, cap;
    uint32_t max_bytes; /* of the longest token */
    bool first[256];    /* does any token begin so? */
} kvd__special;

int kvd__special_init(kvd__special *s, kvd_ledger *l, kvd_error *err);
void kvd__special_free(kvd__special *s);
/* text.n > 0. KVD_E_ENCODING: another token has this text. */
int kvd__special_add(kvd__special *s, kvd_bytes text, int32_t token, bool control, kvd_ledger *l, kvd_error *err);
/* The token with exactly this text, or -1. */
int32_t kvd__special_find(const kvd__special *s, const char *text, size_t n);

/* A stretch of text, or a token in it. */
typedef struct kvd__fragment {
    uint32_t at, n;
    int32_t token; /* -1: text */
} kvd__fragment;

/* Zero it, then free it. */
typedef struct kvd__fragments {
    kvd__fragment *list;
    uint32_t n, cap;
} kvd__fragments;

/* Cut n bytes of text, n < 2^31, into fragments, all in order. */
int kvd__special_cut(const kvd__special *s, const char *text, size_t n, bool control, kvd__fragments *out,
                     kvd_ledger *l, kvd_error *err);

#endif
