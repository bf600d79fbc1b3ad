/* token: cutting a text into the words within which byte-level BPE merges.
 *
 * Each pre-type is one regular expression or several, applied one after the
 * other: each cuts every piece that the ones before it left into its matches and
 * what lies between them. A piece is matched as a text of its own: `(?!\S)` and
 * \z see its end. */
#ifndef KVD_TOKEN_PRETOKENIZE_H
#define KVD_TOKEN_PRETOKENIZE_H

#include "token/token.h"

typedef struct kvd__presplit kvd__presplit;

/* What a pre-type says besides its patterns. */
typedef struct kvd__pretype {
    bool ignore_merges; /* a word that is a token is that token, whatever its merges */
    bool add_bos;       /* when the file does not say */
} kvd__pretype;

/* KVD_E_UNSUPPORTED: an unknown name. n == 0 is "default". Returns owned;
 * immutable: any thread may split with it. */
int kvd__presplit_create(kvd__presplit **out, kvd_bytes name, kvd__pretype *pretype, kvd_ledger *l, kvd_error *err);
void kvd__presplit_destroy(kvd__presplit **p);

/* The memory of one caller. Zero it, then keep it from call to call. */
typedef struct kvd__words {
    uint32_t *lengths; /* [n] bytes of each word, in order; they add up to the text */
    uint32_t n;
    uint32_t cap;
    uint32_t *other; /* lengths of the previous pattern */
    uint32_t other_cap;
    char *stand_in; /* the text without ill-formed bytes */
    size_t stand_in_cap;
    void *match_data;
} kvd__words;

/* Cut n > 0 bytes of text, n < 2^31. Any bytes: one that is no part of a
 * well-formed character counts as a character that is neither letter, number,
 * punctuation nor space. */
int kvd__presplit_run(const kvd__presplit *p, kvd__words *w, const char *text, size_t n, kvd_error *err);
void kvd__words_free(kvd__words *w);

#endif
