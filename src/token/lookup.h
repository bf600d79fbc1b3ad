/* token: the three tables that a vocabulary is made of. Filled once when a
 * tokenizer is created, then only read.
 *
 * pieces   numbered byte strings, one after the other in one block
 * strings  hash from the bytes of a piece to its number
 * pairs    hash from a 64-bit key to two 32-bit values
 *
 * Both hashes are open addressing with linear probing, at most 3/4 full. */
#ifndef KVD_TOKEN_LOOKUP_H
#define KVD_TOKEN_LOOKUP_H

#include "token/token.h"

typedef struct kvd__pieces {
    char *data;
    uint32_t *at; /* [n + 1] offsets into data */
    uint32_t n, cap;
    uint32_t cap_bytes;
} kvd__pieces;

int kvd__pieces_add(kvd__pieces *p, const char *data, size_t n, kvd_ledger *l, kvd_error *err);
void kvd__pieces_free(kvd__pieces *p);

static inline kvd_bytes kvd__piece(const kvd__pieces *p, uint32_t i)
{
    return (kvd_bytes){p->data + p->at[i], p->at[i + 1] - p->at[i]};
}

typedef struct kvd__strings {
    uint64_t *slots; /* high half: hash, low half: number + 1; 0: free */
    uint32_t mask, n;
} kvd__strings;

int kvd__strings_init(kvd__strings *s, int64_t expected, kvd_ledger *l, kvd_error *err);
void kvd__strings_free(kvd__strings *s);
/* The number of the piece with these bytes, or -1. */
int32_t kvd__strings_find(const kvd__strings *s, const kvd__pieces *p, const char *data, size_t n);
/* Piece i must not be there yet, and its bytes neither. */
int kvd__strings_add(kvd__strings *s, const kvd__pieces *p, uint32_t i, kvd_ledger *l, kvd_error *err);

typedef struct kvd__pair {
    uint64_t key; /* UINT64_MAX: free */
    uint32_t a, b;
} kvd__pair;

typedef struct kvd__pairs {
    kvd__pair *slots;
    uint32_t mask, n;
} kvd__pairs;

int kvd__pairs_init(kvd__pairs *t, int64_t expected, kvd_ledger *l, kvd_error *err);
void kvd__pairs_free(kvd__pairs *t);
/* Does nothing if the key is there. */
int kvd__pairs_add(kvd__pairs *t, uint64_t key, uint32_t a, uint32_t b, kvd_ledger *l, kvd_error *err);

static inline const kvd__pair *kvd__pairs_find(const kvd__pairs *t, uint64_t key)
{
    uint64_t h = key * 0x9e3779b97f4a7c15u;
    for (uint32_t i = (uint32_t)(h >> 32) & t->mask;; i = (i + 1) & t->mask) {
        if (t->slots[i].key == key)
            return &t->slots[i];
        if (t->slots[i].key == UINT64_MAX)
            return NULL;
    }
}

#endif
