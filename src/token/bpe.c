/* Byte-level BPE (Radford et al. 2019; the tokenizer "gpt2" of the file format).
 *
 * In the file a token is written in 256 printable characters that stand for the
 * bytes: those of "!".."~", "¡".."¬" and "®".."ÿ" for themselves, the other 68
 * in ascending order as U+0100 and on. Here tokens and merges are decoded once,
 * when the vocabulary is read, and the merging works on bytes.
 *
 * A merge names two strings, which need not be tokens, nor their concatenation:
 * such strings become symbols without an id, and if one is left at the end its
 * bytes are emitted one by one. A byte that the vocabulary lacks (SmolLM2's lacks
 * 21 control characters and impossible UTF-8 bytes) is left out, as in llama.cpp. */
#include <string.h>

#include "base/error.h"
#include "token/tokenizer.h"
#include "token/utf8.h"

/* Byte of a character of the alphabet above, or -1. */
static int byte_of(int32_t code)
{
    if ((code >= 0x21 && code <= 0x7e) || (code >= 0xa1 && code <= 0xac) || (code >= 0xae && code <= 0xff))
        return code;
    int k = code - 0x100; /* 0..32, 127..160, 173 */
    if (k < 0 || k > 67)
        return -1;
    return k <= 0x20 ? k : k <= 66 ? k - 0x21 + 0x7f : 0xad;
}

size_t kvd__bpe_decode(const char *text, size_t n, char *out, bool *whole)
{
    size_t n_out = 0;
    *whole = true;
    for (size_t i = 0, k; i < n; i += k) {
        k = kvd__utf8_length(text + i, n - i);
        int byte = -1;
        if (k == 1)
            byte = byte_of(text[i]);
        else if (k == 2)
            byte = byte_of((text[i] & 0x1f) << 6 | (text[i + 1] & 0x3f));
        if (byte >= 0) {
            out[n_out++] = (char)byte;
            continue;
        }
        k = k ? k : 1;
        memcpy(out + n_out, text + i, k);
        n_out += k;
        *whole = false;
    }
    return n_out;
}

/* The symbol with these bytes, made if need be. */
static int symbol_of(kvd_tokenizer *t, const char *data, size_t n, int32_t *symbol, kvd_error *err)
{
    *symbol = kvd__strings_find(&t->words, &t->pieces, data, n);
    if (*symbol >= 0)
        return 0;
    *symbol = (int32_t)t->pieces.n;
    int rc = kvd__pieces_add(&t->pieces, data, n, t->ledger, err);
    return rc ? rc : kvd__strings_add(&t->words, &t->pieces, (uint32_t)*symbol, t->ledger, err);
}

/* One line of the merges: "left right". scratch: as long as the line. */
static int add_merge(kvd_tokenizer *t, kvd_bytes line, uint32_t rank, char *scratch, kvd_error *err)
{
    const char *space = line.n > 1 ? memchr(line.data + 1, ' ', line.n - 1) : NULL;
    size_t n_left = space ? (size_t)(space - line.data) : 0;
    if (!space || n_left + 1 == line.n)
        return kvd__fail(err, KVD_E_ENCODING, "merge %u of the vocabulary is not two strings", rank);
    bool whole_left, whole_right;
    size_t a = kvd__bpe_decode(line.data, n_left, scratch, &whole_left);
    size_t b = kvd__bpe_decode(space + 1, line.n - n_left - 1, scratch + a, &whole_right);
    if (!whole_left || !whole_right)
        return 0; /* no text comes to it */
    int32_t left, right, both;
    int rc = symbol_of(t, scratch, a, &left, err);
    if (!rc)
        rc = symbol_of(t, scratch + a, b, &right, err);
    if (!rc)
        rc = symbol_of(t, scratch, a + b, &both, err);
    if (rc)
        return rc;
    return kvd__pairs_add(&t->merges, (uint64_t)(uint32_t)left << 32 | (uint32_t)right, rank, (uint32_t)both, t->ledger,
                          err);
}

int kvd__bpe_init(kvd_tokenizer *t, const kvd_vocab *v, kvd_error *err)
{
    int rc = kvd__pairs_init(&t->merges, v->n_merges, t->ledger, err);
    for (int i = 0; !rc && i < 256; i++) {
        char byte = (char)i;
        t->byte_token[i] = kvd__strings_find(&t->words, &t->pieces, &byte, 1);
    }
    for (int i = 0; !rc && i < 256; i++) {
        char byte = (char)i;
        rc = symbol_of(t, &byte, 1, &t->byte_symbol[i], err);
    }
    size_t longest = 0;
    for (int64_t i = 0; i < v->n_merges; i++)
        longest = v->merges[i].n > longest ? v->merges[i].n : longest;
    char *scratch = rc ? NULL : kvd__alloc(t->ledger, KVD_ACC_HOST, longest, err);
    if (!scratch)
        return rc ? rc : KVD_E_NOMEM;
    for (int64_t i = 0; !rc && i < v->n_merges; i++)
        rc = add_merge(t, v->merges[i], (uint32_t)i, scratch, err);
    kvd__free(scratch);
    return rc;
}

static bool ranked_pair(const void *ctx, const char *text, const kvd__node *left, const kvd__node *right,
                        uint32_t *priority, int32_t *symbol)
{
    const kvd_tokenizer *t = ctx;
    const kvd__pair *p = kvd__pairs_find(&t->merges, (uint64_t)(uint32_t)left->symbol << 32 | (uint32_t)right->symbol);
    if (!p)
        return false;
    *priority = p->a;
    *symbol = (int32_t)p->b;
    return true;
}

static int encode_word(kvd__encoder *e, const char *word, uint32_t n, kvd_error *err)
{
    const kvd_tokenizer *t = e->t;
    if (t->ignore_merges) {
        int32_t id = kvd__strings_find(&t->words, &t->pieces, word, n);
        if (id >= 0 && id < t->n_tokens)
            return kvd__encoder_push(e, id, err);
    }
    int rc = kvd__merger_reserve(&e->merger, n, t->ledger, err);
    if (rc)
        return rc;
    kvd__node *nodes = e->merger.nodes;
    for (uint32_t i = 0; i < n; i++)
        nodes[i] = (kvd__node){.at = i, .n = 1, .symbol = t->byte_symbol[(unsigned char)word[i]]};
    e->merger.text = word;
    kvd__merger_run(&e->merger, n, ranked_pair, t);
    for (uint32_t i = 0; !rc && i != KVD__NO_NODE; i = nodes[i].next)
        rc = nodes[i].symbol < t->n_tokens ? kvd__encoder_push(e, nodes[i].symbol, err)
                                           : kvd__encoder_push_bytes(e, word + nodes[i].at, nodes[i].n, err);
    return rc;
}

int kvd__bpe_encode(kvd__encoder *e, const char *text, size_t n, kvd_error *err)
{
    int rc = kvd__presplit_run(e->t->presplit, &e->words, text, n, err);
    for (uint32_t i = 0; !rc && i < e->words.n; text += e->words.lengths[i++])
        rc = encode_word(e, text, e->words.lengths[i], err);
    return rc;
}
