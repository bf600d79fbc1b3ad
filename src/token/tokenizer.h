/* token: the inside of a kvd_tokenizer, for the files of this room.
 *
 * Both kinds of vocabulary are held by what their tokens *mean*: pieces are the
 * bytes that a token stands for in a text, byte-level decoded (BPE) or with
 * U+2581 turned back into the space (SentencePiece). So encoding works on the
 * bytes of the text itself, without a mapped copy of it, and decoding is a look
 * into the same block. */
#ifndef KVD_TOKEN_TOKENIZER_H
#define KVD_TOKEN_TOKENIZER_H

#include "token/lookup.h"
#include "token/merge.h"
#include "token/pretokenize.h"
#include "token/special.h"
#include "token/token.h"

/* Bits of kvd_tokenizer.flags. */
enum {
    KVD__TOKEN_CONTROL = 1,   /* hidden unless asked for; matched only when asked for */
    KVD__TOKEN_WHOLE = 2,     /* control or user-defined: never the result of merging */
    KVD__TOKEN_END = 4        /* generation ends here */
};

struct kvd_tokenizer {
    kvd_ledger *ledger;
    bool spm; /* SentencePiece-style; else byte-level BPE */
    bool add_bos, add_eos;
    int64_t n_tokens, bos, eos, unk;
    size_t max_bytes; /* of a piece of a token */

    kvd__pieces pieces; /* [n_tokens], then BPE's symbols that are no tokens */
    uint8_t *flags;     /* [n_tokens] */
    kvd__strings words; /* pieces that merging may arrive at */
    kvd__special special;
    int32_t byte_token[256]; /* for a byte that is part of no token; -1: there is none */

    /* BPE. A symbol is a token id, or from n_tokens on a piece without one. */
    kvd__presplit *presplit;
    bool ignore_merges;
    kvd__pairs merges; /* left symbol << 32 | right -> rank, symbol */
    int32_t byte_symbol[256];

    /* SentencePiece */
    uint32_t *priority; /* [n_tokens] the lowest is merged first */
    bool space_prefix;
    uint8_t neighbours[256][32]; /* bit r of [l]: some token has byte l before byte r */
};

/* One call of encode. */
typedef struct kvd__encoder {
    const kvd_tokenizer *t;
    int32_t *ids;
    size_t n, cap;
    kvd__merger merger;
    kvd__words words;
    char *copy; /* spm: the text with its prefix */
    size_t copy_cap;
} kvd__encoder;

int kvd__encoder_push(kvd__encoder *e, int32_t id, kvd_error *err);
/* One token for each byte; a byte without one is left out. */
int kvd__encoder_push_bytes(kvd__encoder *e, const char *text, size_t n, kvd_error *err);

/* The byte of a token named "<0xNN>", or -1. */
int kvd__byte_of_name(kvd_bytes text);

/* bpe.c: the bytes that a token's text stands for go to out (at least n long).
 * *whole: every character of it was one of the 256. Returns their number. */
size_t kvd__bpe_decode(const char *text, size_t n, char *out, bool *whole);
/* Build merges and byte symbols; pieces, words and flags are there. */
int kvd__bpe_init(kvd_tokenizer *t, const kvd_vocab *v, kvd_error *err);
/* A stretch of text, n > 0. */
int kvd__bpe_encode(kvd__encoder *e, const char *text, size_t n, kvd_error *err);

/* spm.c */
size_t kvd__spm_decode(const char *text, size_t n, char *out);
int kvd__spm_init(kvd_tokenizer *t, const kvd_vocab *v, kvd_error *err);
/* prefix: the text is at the beginning, or follows a special token. */
int kvd__spm_encode(kvd__encoder *e, const char *text, size_t n, bool prefix, kvd_error *err);

#endif
