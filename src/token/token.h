/* token: text to token ids and back, special tokens, and chat templates.
 *
 * Layer: above base only; it does not know GGUF. model/ fills kvd_vocab from a
 * file. A kvd_tokenizer is immutable after creation: any thread may use it. */
#ifndef KVD_TOKEN_TOKEN_H
#define KVD_TOKEN_TOKEN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/ledger.h"

/* A byte string, borrowed, not terminated. */
typedef struct kvd_bytes {
    const char *data;
    size_t n;
} kvd_bytes;

/* tokenizer.ggml.token_type of the file format. */
enum {
    KVD_TOKEN_NORMAL = 1,
    KVD_TOKEN_UNKNOWN = 2,
    KVD_TOKEN_CONTROL = 3,
    KVD_TOKEN_USER_DEFINED = 4,
    KVD_TOKEN_UNUSED = 5,
    KVD_TOKEN_BYTE = 6
};

/* What a file says of its vocabulary (keys tokenizer.ggml.*). All borrowed for
 * the call of kvd__tokenizer_create only. Ids that the file does not give: -1. */
typedef struct kvd_vocab {
    kvd_bytes model; /* "gpt2" or "llama" */
    kvd_bytes pre;   /* "smollm", "qwen2", ...; n == 0: absent */
    int64_t n_tokens;
    const kvd_bytes *tokens;
    const int32_t *types; /* [n_tokens] or NULL */
    const float *scores;  /* [n_tokens] or NULL */
    int64_t n_merges;
    const kvd_bytes *merges; /* "left right" */
    int64_t bos, eos, eot, unk; /* -1: none */
    int add_bos, add_eos, add_space_prefix; /* 0, 1, -1: not in the file */
} kvd_vocab;

typedef struct kvd_tokenizer kvd_tokenizer;

/* KVD_E_UNSUPPORTED names an unknown model or pre-type; KVD_E_ENCODING a
 * vocabulary that contradicts itself. Returns owned. Memory: host account. */
int kvd__tokenizer_create(kvd_tokenizer **out, const kvd_vocab *v, kvd_ledger *l, kvd_error *err);
void kvd__tokenizer_destroy(kvd_tokenizer **t);

enum {
    KVD_ENCODE_BOS = 1,    /* put BOS (and EOS) where the file's rules want it */
    KVD_ENCODE_SPECIAL = 2 /* parse control tokens written in the text, e.g. <|im_end|> */
};

/* Encode n bytes of text (any bytes). *ids: returned owned ([*n_ids], free with
 * kvd__free). O(n log n) at worst. KVD_E_RANGE above half a GiB.
 *
 * User-defined tokens are found in the text whatever the flags. Bytes that are
 * not well-formed UTF-8 are kept: they become byte tokens, and cut words as an
 * unassigned character would. Decoding gives the text back, except: a byte that
 * the vocabulary can not express (SmolLM2's lacks 21 that hardly occur) is left
 * out, and SentencePiece takes U+2581 for a space. */
int kvd__tokenizer_encode(const kvd_tokenizer *t, const char *text, size_t n, unsigned flags, int32_t **ids,
                          int64_t *n_ids, kvd_error *err);

/* The bytes of one token as they appear in text (byte-level decoded). Control
 * tokens give their name if special, else nothing. Borrowed from t.
 * id out of range gives n = 0. */
kvd_bytes kvd__token_bytes(const kvd_tokenizer *t, int32_t id, bool special);

int64_t kvd__tokenizer_n_tokens(const kvd_tokenizer *t);
int64_t kvd__tokenizer_bos(const kvd_tokenizer *t); /* -1: none */
int64_t kvd__tokenizer_eos(const kvd_tokenizer *t);
/* Does generation end at this id? EOS, EOT and end-of-turn tokens by name
 * (<|im_end|>, <|eot_id|>, <end_of_turn>, <|endoftext|>, </s>, ...). */
bool kvd__token_is_end(const kvd_tokenizer *t, int32_t id);
/* Would KVD_ENCODE_BOS add one? And EOS? */
bool kvd__tokenizer_adds_bos(const kvd_tokenizer *t);
bool kvd__tokenizer_adds_eos(const kvd_tokenizer *t);
/* Id of a token by its exact text, -1 if none. */
int32_t kvd__token_find(const kvd_tokenizer *t, const char *text, size_t n);

/* Streamed decoding; begin with all zero. Bytes of an unfinished UTF-8 sequence
 * are held back until it is complete or can not become valid (then they are given
 * as they are). A SentencePiece vocabulary that puts a space before every text
 * has it taken away again; what continues a text that was decoded elsewhere keeps
 * its first space if `started` is set before. */
typedef struct kvd_decoder {
    char pending[4];
    int n_pending;
    bool started; /* the space before the text is not to come any more */
} kvd_decoder;

/* Write what token id completes to out (capacity at least
 * kvd__token_max_bytes + 4); returns the number of bytes, all whole characters. */
size_t kvd__decoder_push(kvd_decoder *d, const kvd_tokenizer *t, int32_t id, bool special, char *out);
/* What is left at the end. */
size_t kvd__decoder_flush(kvd_decoder *d, char *out);
size_t kvd__token_max_bytes(const kvd_tokenizer *t);

#endif
