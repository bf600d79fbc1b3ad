/* Fuzzer of the tokenisers and of the recognition of chat templates: the input
 * makes a vocabulary and then is text for it. With libFuzzer:
 *
 *   clang -std=c17 -g -O1 -fsanitize=fuzzer,address,undefined -Isrc -Iinclude \
 *     fuzz/fuzz_token.c src/token/[a-z]*.c src/base/error.c src/base/ledger.c \
 *     -lpcre2-8 -lutf8proc -o fuzz_token
 *   ./fuzz_token -max_len=4096 CORPUS
 *
 * Any file is a corpus. With replay.c instead of -fsanitize=fuzzer it reads files
 * named on the command line.
 *
 * Input: model and pre-type, rules, number of tokens, number of merges; tokens
 * {length | type << 5, bytes}; merges {length, bytes}; the rest is text.
 *
 * What must hold beside memory safety: ids lie in the vocabulary; if it has all
 * 256 bytes, decoding gives the text back; well-formed text is never decoded into
 * half characters; no memory is left. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "token/chat.h"
#include "token/token.h"
#include "token/utf8.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

enum { MAX_OWN = 64, MAX_TOKENS = 256 + MAX_OWN, MAX_MERGES = 64 };

/* Of our own bugs; the fuzzing driver reports the abort. */
static void must(int condition)
{
    if (!condition)
        abort();
}

typedef struct {
    const uint8_t *p;
    size_t n;
} input;

static unsigned take(input *in)
{
    if (!in->n)
        return 0;
    in->n--;
    return *in->p++;
}

static kvd_bytes take_bytes(input *in, size_t n)
{
    n = n < in->n ? n : in->n;
    kvd_bytes b = {(const char *)in->p, n};
    in->p += n;
    in->n -= n;
    return b;
}

typedef struct {
    kvd_vocab v;
    kvd_bytes tokens[MAX_TOKENS], merges[MAX_MERGES];
    int32_t types[MAX_TOKENS];
    float scores[MAX_TOKENS];
    char bytes[256][8];
    bool all_bytes;
} vocab;

/* One token for each byte, as the model writes them. */
static void add_all_bytes(vocab *b, bool spm)
{
    static const char hex[] = "0123456789ABCDEF";
    unsigned other = 256;
    for (unsigned i = 0; i < 256; i++) {
        size_t k = 0;
        if (spm) {
            memcpy(b->bytes[i], "<0xNN>", k = 6);
            b->bytes[i][3] = hex[i >> 4];
            b->bytes[i][4] = hex[i & 15];
        } else {
            bool itself = (i > 32 && i < 127) || (i > 160 && i != 173);
            unsigned code = itself ? i : other++;
            if (code < 128) {
                b->bytes[i][k++] = (char)code;
            } else {
                b->bytes[i][k++] = (char)(0xc0 | code >> 6);
                b->bytes[i][k++] = (char)(0x80 | (code & 0x3f));
            }
        }
        b->types[b->v.n_tokens] = spm ? KVD_TOKEN_BYTE : KVD_TOKEN_NORMAL;
        b->tokens[b->v.n_tokens++] = (kvd_bytes){b->bytes[i], k};
    }
}

static void read_vocab(vocab *b, input *in)
{
    static const char *const pres[] = {"",          "default",          "gpt-2",        "smollm",         "llama-bpe",
                                       "qwen2",     "deepseek-r1-qwen", "deepseek-llm", "deepseek-coder", "tekken"};
    unsigned kind = take(in), rules = take(in), n_own = take(in) % MAX_OWN, n_merges = take(in) % MAX_MERGES;
    bool spm = kind & 1;
    const char *pre = pres[(kind >> 2) % (sizeof pres / sizeof pres[0])];
    b->v = (kvd_vocab){.model = spm ? (kvd_bytes){"llama", 5} : (kvd_bytes){"gpt2", 4}, .pre = {pre, strlen(pre)},
                       .tokens = b->tokens, .merges = b->merges, .types = rules & 1 ? NULL : b->types,
                       .scores = rules & 2 ? NULL : b->scores, .bos = (rules & 4) ? 0 : -1, .eos = (rules & 8) ? 1 : -1,
                       .eot = -1, .unk = -1, .add_bos = (int)(rules >> 4 & 3) % 3 - 1, .add_eos = (rules & 64) != 0,
                       .add_space_prefix = (rules & 128) != 0};
    b->all_bytes = kind & 2 && !(spm && rules & 1); /* without types, "<0x41>" is text */
    if (b->all_bytes)
        add_all_bytes(b, spm);
    for (unsigned i = 0; i < n_own; i++) {
        unsigned head = take(in);
        b->types[b->v.n_tokens] = (int32_t)(head >> 5);
        b->scores[b->v.n_tokens] = (float)(int)(take(in) & 7);
        b->tokens[b->v.n_tokens++] = take_bytes(in, head & 31);
    }
    for (unsigned i = 0; i < n_merges; i++)
        b->merges[b->v.n_merges++] = take_bytes(in, take(in) & 15);
}

static bool well_formed(const char *text, size_t n)
{
    size_t k = 1;
    for (size_t i = 0; i < n && k; i += k)
        k = kvd__utf8_length(text + i, n - i);
    return k > 0;
}

static bool has_escape(const char *text, size_t n)
{
    for (size_t i = 0; i + 3 <= n; i++)
        if (!memcmp(text + i, "\xe2\x96\x81", 3))
            return true;
    return false;
}

static void encode(const kvd_tokenizer *t, const vocab *b, const char *text, size_t n, unsigned flags)
{
    int32_t *ids;
    int64_t n_ids;
    must(kvd__tokenizer_encode(t, text, n, flags, &ids, &n_ids, NULL) == 0);
    kvd_decoder d = {0};
    size_t at = 0, most = kvd__token_max_bytes(t) + 4;
    char *out = malloc(most);
    bool exact = b->all_bytes && !(b->v.model.n == 5 && has_escape(text, n)), whole = well_formed(text, n);
    must(out != NULL);
    for (int64_t i = 0; i < n_ids; i++) {
        must(ids[i] >= 0 && ids[i] < b->v.n_tokens);
        size_t k = kvd__decoder_push(&d, t, ids[i], flags & KVD_ENCODE_SPECIAL, out);
        must(k <= most);
        if (!exact)
            continue;
        must(k <= n - at && !memcmp(out, text + at, k));
        at += k;
        must(!whole || at == n || ((unsigned char)text[at] & 0xc0) != 0x80);
    }
    size_t k = kvd__decoder_flush(&d, out);
    must(!exact || (at + k == n && !memcmp(out, text + at, k)));
    free(out);
    kvd__free(ids);
}

static void chat(input in, kvd_ledger *l)
{
    static const char *const roles[] = {"system", "user", "assistant", "tool"};
    (void)kvd__chat_detect((const char *)in.p, in.n);
    kvd_chat_message messages[4];
    char text[4][64];
    unsigned head = take(&in), order = take(&in), n = head >> 5 & 3;
    for (unsigned i = 0; i < n; i++) {
        kvd_bytes b = take_bytes(&in, take(&in) % sizeof text[0]);
        memcpy(text[i], b.data, b.n);
        text[i][b.n] = 0;
        messages[i] = (kvd_chat_message){roles[order >> (2 * i) & 3], text[i]};
    }
    char *out;
    size_t n_out;
    kvd_chat c = (kvd_chat)((int)(head % 32) - 1);
    if (!kvd__chat_render(c, messages, n, order & 128, head & 128, l, &out, &n_out, NULL)) {
        must(strlen(out) == n_out);
        kvd__free(out);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    input in = {data, n};
    static vocab b;
    kvd_ledger l;
    kvd__ledger_init(&l, 0);
    memset(&b, 0, sizeof b);
    chat(in, &l);
    read_vocab(&b, &in);
    kvd_tokenizer *t = NULL;
    if (kvd__tokenizer_create(&t, &b.v, &l, NULL) == 0) {
        encode(t, &b, (const char *)in.p, in.n, 0);
        encode(t, &b, (const char *)in.p, in.n, KVD_ENCODE_SPECIAL);
        (void)kvd__token_find(t, (const char *)in.p, in.n);
        int32_t *ids;
        int64_t n_ids;
        must(kvd__tokenizer_encode(t, (const char *)in.p, in.n, KVD_ENCODE_BOS, &ids, &n_ids, NULL) == 0);
        kvd__free(ids);
    }
    kvd__tokenizer_destroy(&t);
    must(l.now[KVD_ACC_HOST] == 0);
    return 0;
}
