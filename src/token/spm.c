/* SentencePiece-style BPE (Kudo and Richardson 2018; the tokenizer "llama" of
 * the file format): no pre-tokeniser and no list of merges; two neighbours may be
 * merged if together they are a token, the one of the highest score first. A
 * character that no token holds is emitted as bytes <0xNN>.
 *
 * In the file the space is written U+2581. Here pieces have the space itself. A
 * U+2581 that is really in a text is taken for a space, as in SentencePiece and
 * llama.cpp, and comes back as one: the only text that does not survive a round
 * trip. A byte that is no part of a well-formed character is a symbol of its
 * own, and so becomes its byte token.
 *
 * The text is not merged as one. Where two bytes meet that no token has side by
 * side, nothing is ever merged across: there it is cut, which in most
 * vocabularies means before every space, and the pieces are merged one by one in
 * little memory that stays in the cache.
 *
 * A vocabulary may want a space before the text (add_space_prefix): it is put at
 * the beginning and after every special token, and the decoder takes it away at
 * the same places. */
#include <string.h>

#include "base/error.h"
#include "base/half.h"
#include "token/tokenizer.h"
#include "token/utf8.h"

static const char escaped[3] = "\xe2\x96\x81"; /* U+2581 */

size_t kvd__spm_decode(const char *text, size_t n, char *out)
{
    size_t n_out = 0;
    for (size_t i = 0; i < n;) {
        if (n - i >= 3 && !memcmp(text + i, escaped, 3)) {
            out[n_out++] = ' ';
            i += 3;
        } else {
            out[n_out++] = text[i++];
        }
    }
    return n_out;
}

static bool meets(const kvd_tokenizer *t, char left, char right)
{
    return t->neighbours[(unsigned char)left][(unsigned char)right / 8] >> ((unsigned char)right % 8) & 1;
}

static void set_neighbours(kvd_tokenizer *t)
{
    for (uint32_t i = 0; i <= t->words.mask; i++) {
        if (!t->words.slots[i])
            continue;
        kvd_bytes b = kvd__piece(&t->pieces, (uint32_t)t->words.slots[i] - 1);
        for (size_t k = 0; k + 1 < b.n; k++)
            t->neighbours[(unsigned char)b.data[k]][(unsigned char)b.data[k + 1] / 8] |=
                (uint8_t)(1u << ((unsigned char)b.data[k + 1] % 8));
    }
}

/* Ascending for descending scores; equal for equal ones. */
static uint32_t priority_of(float score)
{
    uint32_t u = kvd__f32_bits(score + 0.0f); /* -0 becomes +0 */
    return ~(u & 0x80000000u ? ~u : u | 0x80000000u);
}

int kvd__spm_init(kvd_tokenizer *t, const kvd_vocab *v, kvd_error *err)
{
    t->priority = kvd__alloc_array(t->ledger, KVD_ACC_HOST, (size_t)t->n_tokens, sizeof *t->priority, err);
    if (!t->priority)
        return KVD_E_NOMEM;
    for (int i = 0; i < 256; i++)
        t->byte_token[i] = -1;
    for (int64_t i = 0; i < t->n_tokens; i++) {
        float score = v->scores ? v->scores[i] : 0.0f;
        if (score != score)
            return kvd__fail(err, KVD_E_ENCODING, "token %lld: its score is not a number", (long long)i);
        t->priority[i] = priority_of(score);
        int byte = kvd__byte_of_name(v->tokens[i]);
        /* by name, as some files do not type them; but the type is better */
        if (byte >= 0 && (t->byte_token[byte] < 0 || (v->types && v->types[i] == KVD_TOKEN_BYTE)))
            t->byte_token[byte] = (int32_t)i;
    }
    for (int i = 0; i < 256; i++) {
        char byte = (char)i;
        if (t->byte_token[i] < 0)
            t->byte_token[i] = kvd__strings_find(&t->words, &t->pieces, &byte, 1);
        if (t->byte_token[i] < 0)
            t->byte_token[i] = (int32_t)t->unk;
    }
    set_neighbours(t);
    return 0;
}

static bool scored_pair(const void *ctx, const char *text, const kvd__node *left, const kvd__node *right,
                        uint32_t *priority, int32_t *symbol)
{
    const kvd_tokenizer *t = ctx;
    size_t n = (size_t)left->n + right->n;
    int32_t id = n <= t->max_bytes ? kvd__strings_find(&t->words, &t->pieces, text + left->at, n) : -1;
    if (id < 0)
        return false;
    *priority = t->priority[id];
    *symbol = id;
    return true;
}

/* The text to be merged: the prefix before it, U+2581 as spaces. */
static int prepare(kvd__encoder *e, const char **text, size_t *n, bool prefix, kvd_error *err)
{
    bool has_escape = false;
    for (const char *p = *text, *end = *text + *n; !has_escape && p < end; p++) {
        p = memchr(p, escaped[0], (size_t)(end - p));
        if (!p)
            break;
        has_escape = end - p >= 3 && !memcmp(p, escaped, 3);
    }
    if (!prefix && !has_escape)
        return 0;
    if (e->copy_cap < *n + 1) {
        kvd__free(e->copy);
        e->copy_cap = 0;
        e->copy = kvd__alloc(e->t->ledger, KVD_ACC_HOST, *n + 1, err);
        if (!e->copy)
            return KVD_E_NOMEM;
        e->copy_cap = *n + 1;
    }
    e->copy[0] = ' ';
    *n = prefix + kvd__spm_decode(*text, *n, e->copy + prefix);
    *text = e->copy;
    return 0;
}

/* n bytes between two cuts. */
static int encode_piece(kvd__encoder *e, const char *text, size_t n, kvd_error *err)
{
    const kvd_tokenizer *t = e->t;
    int rc = kvd__merger_reserve(&e->merger, (uint32_t)n, t->ledger, err);
    if (rc)
        return rc;
    kvd__node *nodes = e->merger.nodes;
    uint32_t n_nodes = 0;
    for (size_t i = 0; i < n; i += nodes[n_nodes++].n) {
        size_t k = kvd__utf8_length(text + i, n - i);
        k = k ? k : 1;
        nodes[n_nodes] = (kvd__node){.at = (uint32_t)i, .n = (uint32_t)k,
                                     .symbol = kvd__strings_find(&t->words, &t->pieces, text + i, k)};
    }
    e->merger.text = text;
    kvd__merger_run(&e->merger, n_nodes, scored_pair, t);
    for (uint32_t i = 0; !rc && i != KVD__NO_NODE; i = nodes[i].next)
        rc = nodes[i].symbol >= 0 ? kvd__encoder_push(e, nodes[i].symbol, err)
                                  : kvd__encoder_push_bytes(e, text + nodes[i].at, nodes[i].n, err);
    return rc;
}

int kvd__spm_encode(kvd__encoder *e, const char *text, size_t n, bool prefix, kvd_error *err)
{
    const kvd_tokenizer *t = e->t;
    int rc = prepare(e, &text, &n, prefix && t->space_prefix, err);
    size_t from = 0;
    for (size_t i = 0; !rc && i < n;) {
        size_t k = kvd__utf8_length(text + i, n - i);
        i += k ? k : 1;
        if (i == n || !meets(t, text[i - 1], text[i])) {
            rc = encode_piece(e, text + from, i - from, err);
            from = i;
        }
    }
    return rc;
}
