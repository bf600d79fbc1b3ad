/* Tokenisers on vocabularies that are built here: what merging, cutting, special
 * tokens, decoding and the rules of the file do, each alone. That the ids of real
 * models come out is tests/system/test_tokenizer_vectors.py. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/rng.h"
#include "token/pretokenize.h"
#include "token/token.h"
#include "token/utf8.h"

static kvd_ledger ledger;

static int setup(void **state)
{
    kvd__ledger_init(&ledger, 0);
    return 0;
}

static int teardown(void **state)
{
    assert_int_equal(ledger.now[KVD_ACC_HOST], 0); /* nothing leaks */
    return 0;
}

/* --- small vocabularies --- */

enum { MAX_TOKENS = 1024 };

typedef struct {
    kvd_vocab v;
    kvd_bytes tokens[MAX_TOKENS];
    int32_t types[MAX_TOKENS];
    float scores[MAX_TOKENS];
    kvd_bytes merges[64];
    char text[MAX_TOKENS * 16];
    size_t used;
} vocab;

static kvd_bytes keep(vocab *b, const char *s, size_t n)
{
    kvd_bytes out = {b->text + b->used, n};
    memcpy(b->text + b->used, s, n);
    b->used += n;
    assert_true(b->used <= sizeof b->text);
    return out;
}

static int32_t add(vocab *b, const char *s, size_t n, int type, float score)
{
    int32_t id = (int32_t)b->v.n_tokens++;
    assert_true(id < MAX_TOKENS);
    b->tokens[id] = keep(b, s, n);
    b->types[id] = type;
    b->scores[id] = score;
    return id;
}

static kvd_bytes text_of(const char *s) { return (kvd_bytes){s, strlen(s)}; }

static void start(vocab *b, const char *model, const char *pre)
{
    memset(b, 0, sizeof *b);
    b->v = (kvd_vocab){.model = text_of(model), .pre = text_of(pre), .tokens = b->tokens, .types = b->types,
                       .scores = b->scores, .merges = b->merges, .bos = -1, .eos = -1, .eot = -1, .unk = -1,
                       .add_bos = -1, .add_eos = -1, .add_space_prefix = -1};
}

/* A string as byte-level BPE writes it: the printable half of Latin-1 as it is,
 * the others counted up from U+0100. */
static size_t printable(const char *s, size_t n, char *out)
{
    size_t k = 0;
    for (size_t i = 0; i < n; i++) {
        unsigned byte = (unsigned char)s[i], code = byte, other = 0;
        for (unsigned b = 0; b < byte; b++)
            other += !((b > 32 && b < 127) || (b > 160 && b != 173));
        if (!((byte > 32 && byte < 127) || (byte > 160 && byte != 173)))
            code = 256 + other;
        if (code < 128) {
            out[k++] = (char)code;
        } else {
            out[k++] = (char)(0xc0 | code >> 6);
            out[k++] = (char)(0x80 | (code & 0x3f));
        }
    }
    return k;
}

static int32_t add_bpe(vocab *b, const char *s)
{
    char out[64];
    return add(b, out, printable(s, strlen(s), out), KVD_TOKEN_NORMAL, 0);
}

static void add_merge(vocab *b, const char *left, const char *right)
{
    char out[64];
    size_t n = printable(left, strlen(left), out);
    out[n++] = ' ';
    n += printable(right, strlen(right), out + n);
    b->merges[b->v.n_merges++] = keep(b, out, n);
}

/* All bytes, ids 0..255; then the tokens and merges of a small language. */
static void start_bpe(vocab *b, const char *pre)
{
    start(b, "gpt2", pre);
    for (int i = 0; i < 256; i++) {
        char byte = (char)i, out[4];
        add(b, out, printable(&byte, 1, out), KVD_TOKEN_NORMAL, 0);
    }
}

/* <unk> <s> </s>, 256 byte tokens "<0xNN>", then single letters. */
static void start_spm(vocab *b)
{
    start(b, "llama", "");
    add(b, "<unk>", 5, KVD_TOKEN_UNKNOWN, 0);
    add(b, "<s>", 3, KVD_TOKEN_CONTROL, 0);
    add(b, "</s>", 4, KVD_TOKEN_CONTROL, 0);
    for (int i = 0; i < 256; i++) {
        char name[8];
        snprintf(name, sizeof name, "<0x%02X>", i);
        add(b, name, 6, KVD_TOKEN_BYTE, 0);
    }
}

static int32_t add_spm(vocab *b, const char *s, float score) { return add(b, s, strlen(s), KVD_TOKEN_NORMAL, score); }

static kvd_tokenizer *made(const vocab *b)
{
    kvd_tokenizer *t = NULL;
    kvd_error err;
    int rc = kvd__tokenizer_create(&t, &b->v, &ledger, &err);
    if (rc)
        fail_msg("%s", err.message);
    return t;
}

/* ids as "1 2 3" */
static void expect_ids(const kvd_tokenizer *t, const char *text, size_t n, unsigned flags, const char *expected)
{
    int32_t *ids;
    int64_t n_ids;
    char got[1024] = "";
    size_t k = 0;
    assert_int_equal(kvd__tokenizer_encode(t, text, n, flags, &ids, &n_ids, NULL), 0);
    for (int64_t i = 0; i < n_ids && k < sizeof got - 16; i++)
        k += (size_t)snprintf(got + k, sizeof got - k, i ? " %d" : "%d", ids[i]);
    kvd__free(ids);
    assert_string_equal(got, expected);
}

#define IDS(t, text, flags, expected) expect_ids(t, text, sizeof(text) - 1, flags, expected)

static bool well_formed(const char *text, size_t n)
{
    size_t k = 1;
    for (size_t i = 0; i < n && k; i += k)
        k = kvd__utf8_length(text + i, n - i);
    return k > 0;
}

/* Encode, decode token by token, compare. No push ends inside a character. */
static void round_trip(const kvd_tokenizer *t, const char *text, size_t n, unsigned flags)
{
    int32_t *ids;
    int64_t n_ids;
    assert_int_equal(kvd__tokenizer_encode(t, text, n, flags, &ids, &n_ids, NULL), 0);
    kvd_decoder d = {0};
    bool valid = well_formed(text, n);
    size_t most = kvd__token_max_bytes(t) + 4, at = 0;
    char *out = malloc(most);
    for (int64_t i = 0; i < n_ids; i++) {
        size_t k = kvd__decoder_push(&d, t, ids[i], flags & KVD_ENCODE_SPECIAL, out);
        assert_true(k <= most && at + k <= n);
        assert_memory_equal(out, text + at, k);
        at += k;
        assert_false(valid && at < n && ((unsigned char)text[at] & 0xc0) == 0x80);
    }
    size_t k = kvd__decoder_flush(&d, out);
    assert_true(at + k == n && (k == 0 || !valid));
    assert_memory_equal(out, text + at, k);
    free(out);
    kvd__free(ids);
}

/* --- byte-level BPE --- */

static void test_bpe_merges_by_rank(void **state)
{
    vocab b;
    start_bpe(&b, "gpt-2");
    int32_t ab = add_bpe(&b, "ab"), bc = add_bpe(&b, "bc"), abc = add_bpe(&b, "abc"), aa = add_bpe(&b, "aa");
    int32_t aaaa = add_bpe(&b, "aaaa"), space_a = add_bpe(&b, " a");
    add_merge(&b, "b", "c");
    add_merge(&b, "a", "b");
    add_merge(&b, "a", "bc");
    add_merge(&b, "a", "a");
    add_merge(&b, "aa", "aa");
    add_merge(&b, " ", "a");
    kvd_tokenizer *t = made(&b);
    assert_int_equal(abc, 258);
    IDS(t, "abc", 0, "258");      /* bc first, then a with it */
    IDS(t, "ab", 0, "256");
    IDS(t, "abab", 0, "256 256");
    IDS(t, "aaa", 0, "259 97");   /* the leftmost of equals */
    IDS(t, "aaaa", 0, "260");
    IDS(t, "aaaaa", 0, "260 97");
    IDS(t, "b a", 0, "98 261");
    IDS(t, "a b", 0, "97 32 98"); /* words are merged apart */
    IDS(t, "", 0, "");
    assert_true(ab == 256 && bc == 257 && aa == 259 && aaaa == 260 && space_a == 261);
    assert_int_equal(kvd__token_find(t, " a", 2), space_a);
    assert_int_equal(kvd__token_find(t, "xyz", 3), -1);
    kvd__tokenizer_destroy(&t);
    assert_null(t);
    kvd__tokenizer_destroy(&t);
}

/* Merges may go through strings that are no tokens. */
static void test_bpe_merges_without_tokens(void **state)
{
    vocab b;
    start_bpe(&b, "gpt-2");
    add_bpe(&b, "xyz");
    add_merge(&b, "x", "y");
    add_merge(&b, "xy", "z");
    kvd_tokenizer *t = made(&b);
    IDS(t, "xyz", 0, "256");
    IDS(t, "xyy", 0, "120 121 121"); /* "xy" is left: its bytes */
    kvd__tokenizer_destroy(&t);
}

static void test_bpe_ignore_merges(void **state)
{
    vocab b;
    start_bpe(&b, "llama-bpe");
    add_bpe(&b, "word"); /* no merges lead to it */
    kvd_tokenizer *t = made(&b);
    IDS(t, "word", 0, "256");
    IDS(t, "words", 0, "119 111 114 100 115");
    kvd__tokenizer_destroy(&t);
    b.v.pre = text_of("qwen2");
    t = made(&b);
    IDS(t, "word", 0, "119 111 114 100");
    kvd__tokenizer_destroy(&t);
}

static void test_bpe_missing_bytes(void **state)
{
    vocab b;
    start(&b, "gpt2", "gpt-2");
    add_bpe(&b, "a");
    add_bpe(&b, "b");
    kvd_tokenizer *t = made(&b);
    IDS(t, "abcab", 0, "0 1 0 1");
    kvd__tokenizer_destroy(&t);
}

static void test_bpe_any_bytes_come_back(void **state)
{
    static const char *const pres[] = {"",     "default",          "gpt-2",        "smollm",         "llama-bpe",
                                       "qwen2", "deepseek-r1-qwen", "deepseek-llm", "deepseek-coder", "tekken"};
    uint64_t rng = 1;
    for (size_t p = 0; p < sizeof pres / sizeof pres[0]; p++) {
        vocab b;
        start_bpe(&b, pres[p]);
        for (int i = 0; i < 40; i++) {
            static const char *const some[] = {"th", "e", "in", " t", "\xc3\xa9", "\xe6\x97", "\n\n", "  "};
            const char *l = some[i % 8];
            if (strlen(l) == 2 && i < 8) {
                char left[2] = {l[0], 0}, right[2] = {l[1], 0};
                add_bpe(&b, l);
                add_merge(&b, left, right);
            }
        }
        kvd_tokenizer *t = made(&b);
        for (int i = 0; i < 300; i++) {
            char text[64];
            size_t n = kvd__splitmix64(&rng) % sizeof text;
            for (size_t k = 0; k < n; k++) {
                uint64_t r = kvd__splitmix64(&rng);
                static const char some[] = "the in\n\r\t 1 'S.\xc3\xa9\xe6\x97\xa5\xf0\x9f\x98\x80\xff\xc0\xed\xa0\x80";
                text[k] = r & 3 ? some[(r >> 8) % (sizeof some - 1)] : (char)(r >> 16);
            }
            round_trip(t, text, n, i & 1 ? KVD_ENCODE_SPECIAL : 0);
        }
        kvd__tokenizer_destroy(&t);
    }
}

/* --- the cutting of words --- */

static void expect_words(const char *pre, const char *text, const char *expected)
{
    kvd__presplit *p;
    kvd__pretype type;
    kvd_error err;
    int rc = kvd__presplit_create(&p, text_of(pre), &type, &ledger, &err);
    if (rc)
        fail_msg("%s: %s", pre, err.message);
    kvd__words w = {0};
    char got[512];
    size_t k = 0;
    assert_int_equal(kvd__presplit_run(p, &w, text, strlen(text), &err), 0);
    for (uint32_t i = 0; i < w.n; i++) {
        if (i)
            got[k++] = '|';
        memcpy(got + k, text, w.lengths[i]);
        k += w.lengths[i];
        text += w.lengths[i];
    }
    got[k] = 0;
    assert_string_equal(got, expected);
    kvd__words_free(&w);
    kvd__presplit_destroy(&p);
}

static void test_words(void **state)
{
    static const struct {
        const char *pre, *text, *expected;
    } cases[] = {
        {"gpt-2", "I've 2024 cats, don't", "I|'ve| 2024| cats|,| don|'t"},
        {"gpt-2", "WE'VE  x", "WE|'|VE| | x"},
        {"gpt-2", "a \n b   ", "a| \n| b|   "},
        {"gpt-2", "a\tb", "a|\t|b"},
        {"smollm", "in 2024!", "in| |2|0|2|4|!"},
        {"smollm", "a  1", "a|  |1"}, /* the spaces see the end of their piece */
        {"llama-bpe", "We'VE 12345", "We|'VE| |123|45"},
        {"llama-bpe", "(foo) bar\n\n  x", "(foo|)| bar|\n\n| | x"},
        {"llama-bpe", "a !!\r\n b", "a| !!\r\n| b"},
        {"llama-bpe", "x \n \n  y", "x| \n \n| | y"},
        {"qwen2", "12 ab", "1|2| ab"},
        {"deepseek-r1-qwen", "12 ab", "1|2| ab"},
        {"tekken", "camelCase HTTPServer 12/\n", "camel|Case| HTTPServer| |1|2|/\n"},
        {"tekken", "aÉb", "aÉb"},
        {"deepseek-llm", "ab, 12\n\n日本 c  ", "ab|,| |12|\n|\n|日本| c|  "},
        {"deepseek-llm", "   1", "   |1"},
        {"deepseek-coder", "a_b 12 日本", "a|_|b| |1|2| |日本"},
        {"default", "a+b 12345", "a|+|b| |123|45"},
        {"", "a+b", "a|+|b"},
        {"gpt-2", "a\xc2\xa0\xe3\x80\x80" "b", "a|\xc2\xa0|\xe3\x80\x80|b"},
        {"llama-bpe", "\xf0\x91\xbd\x90" "1", "\xf0\x91\xbd\x90" "1"}, /* U+11F50, a number since Unicode 15 */
        {"gpt-2", "a\xf0\xb1\x8d\x90", "a\xf0\xb1\x8d\x90"},           /* U+31350, a letter since Unicode 15 */
        {"gpt-2", "a\xff\xfe" "b", "a|\xff\xfe|b"},
        {"gpt-2", "a\xe1\xa0\x8e" "b", "a|\xe1\xa0\x8e|b"}, /* U+180E is no space */
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        expect_words(cases[i].pre, cases[i].text, cases[i].expected);
}

/* Quadratic time would hang here. */
static void test_long_runs(void **state)
{
    static const char *const pres[] = {"gpt-2", "qwen2", "tekken", "deepseek-llm", "deepseek-coder", "default"};
    static const char *const runs[] = {"a", " ", "\n", " \n", "A", "\xc3\xa9", "!", "7", "\xff"};
    enum { N = 1 << 20 };
    char *text = malloc(N + 1);
    for (size_t p = 0; p < sizeof pres / sizeof pres[0]; p++) {
        kvd__presplit *s;
        kvd__pretype type;
        kvd__words w = {0};
        assert_int_equal(kvd__presplit_create(&s, text_of(pres[p]), &type, &ledger, NULL), 0);
        for (size_t r = 0; r < sizeof runs / sizeof runs[0]; r++) {
            size_t n = strlen(runs[r]);
            for (size_t i = 0; i < N; i++)
                text[i] = runs[r][i % n];
            text[N] = '1';
            assert_int_equal(kvd__presplit_run(s, &w, text, N + 1, NULL), 0);
        }
        kvd__words_free(&w);
        kvd__presplit_destroy(&s);
    }
    vocab b;
    start_bpe(&b, "gpt-2");
    add_bpe(&b, "aa");
    add_bpe(&b, "aaaa");
    add_merge(&b, "a", "a");
    add_merge(&b, "aa", "aa");
    kvd_tokenizer *t = made(&b);
    memset(text, 'a', N);
    int32_t *ids;
    int64_t n_ids;
    assert_int_equal(kvd__tokenizer_encode(t, text, N, 0, &ids, &n_ids, NULL), 0);
    assert_int_equal(n_ids, N / 4);
    kvd__free(ids);
    kvd__tokenizer_destroy(&t);
    free(text);
}

/* --- special tokens and rules --- */

static void test_special_tokens(void **state)
{
    vocab b;
    start_bpe(&b, "gpt-2");
    add(&b, "<|im_start|>", 12, KVD_TOKEN_CONTROL, 0);  /* 256 */
    add(&b, "<|im_end|>", 10, KVD_TOKEN_NORMAL, 0);     /* 257: control by name */
    add(&b, "<tool>", 6, KVD_TOKEN_USER_DEFINED, 0);    /* 258 */
    add(&b, "<tool><tool>", 12, KVD_TOKEN_CONTROL, 0);  /* 259 */
    add(&b, "l><t", 4, KVD_TOKEN_USER_DEFINED, 0);      /* 260 */
    add(&b, "<\xef\xbd\x9cx\xe2\x96\x81y>", 10, KVD_TOKEN_CONTROL, 0); /* 261: not of the byte alphabet */
    b.v.eos = 256;
    kvd_tokenizer *t = made(&b);
    IDS(t, "<|im_end|>", KVD_ENCODE_SPECIAL, "257");
    IDS(t, "<|im_end|>", 0, "60 124 105 109 95 101 110 100 124 62");
    IDS(t, "a<tool>b", 0, "97 258 98");                      /* user-defined: always */
    IDS(t, "<tool><tool>", 0, "258 258");
    IDS(t, "<tool><tool>", KVD_ENCODE_SPECIAL, "259");       /* the longer goes first */
    IDS(t, "<tool><t", 0, "258 60 116");                     /* and here it is <tool> */
    IDS(t, "tool><t", 0, "116 111 111 260");
    IDS(t, "x<|im_start|><|im_end|>\n", KVD_ENCODE_SPECIAL, "120 256 257 10");
    IDS(t, "<\xef\xbd\x9cx\xe2\x96\x81y>", KVD_ENCODE_SPECIAL, "261");
    assert_int_equal(kvd__token_find(t, "<|im_end|>", 10), 257);
    assert_int_equal(kvd__token_find(t, "<tool>", 6), 258);
    assert_int_equal(kvd__token_bytes(t, 257, false).n, 0);
    assert_int_equal(kvd__token_bytes(t, 257, true).n, 10);
    assert_int_equal(kvd__token_bytes(t, 258, false).n, 6);
    assert_int_equal(kvd__token_bytes(t, 261, true).n, 10);
    assert_int_equal(kvd__token_bytes(t, -1, true).n, 0);
    assert_int_equal(kvd__token_bytes(t, 262, true).n, 0);
    assert_true(kvd__token_is_end(t, 256) && kvd__token_is_end(t, 257));
    assert_false(kvd__token_is_end(t, 258) || kvd__token_is_end(t, -1) || kvd__token_is_end(t, 262));
    assert_int_equal(kvd__tokenizer_n_tokens(t), 262);
    kvd__tokenizer_destroy(&t);
}

static void test_bos_and_eos(void **state)
{
    vocab b;
    start_bpe(&b, "llama-bpe");
    add(&b, "<b>", 3, KVD_TOKEN_CONTROL, 0);
    add(&b, "<e>", 3, KVD_TOKEN_CONTROL, 0);
    b.v.bos = 256;
    b.v.eos = 257;
    static const struct {
        const char *pre;
        int add_bos, add_eos;
        const char *expected;
    } cases[] = {
        {"llama-bpe", -1, -1, "256 97"}, {"llama-bpe", 0, -1, "97"},     {"tekken", -1, -1, "256 97"},
        {"qwen2", -1, -1, "97"},         {"qwen2", 1, -1, "256 97"},     {"qwen2", 1, 1, "256 97 257"},
        {"smollm", -1, 0, "97"},         {"llama-bpe", -1, 1, "256 97 257"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        b.v.pre = text_of(cases[i].pre);
        b.v.add_bos = cases[i].add_bos;
        b.v.add_eos = cases[i].add_eos;
        kvd_tokenizer *t = made(&b);
        IDS(t, "a", KVD_ENCODE_BOS, cases[i].expected);
        IDS(t, "a", 0, "97");
        assert_int_equal(kvd__tokenizer_adds_bos(t), !strncmp(cases[i].expected, "256", 3));
        assert_int_equal(kvd__tokenizer_bos(t), 256);
        assert_int_equal(kvd__tokenizer_eos(t), 257);
        kvd__tokenizer_destroy(&t);
    }
    b.v.bos = -1; /* the pre-type would add one, but there is none */
    b.v.pre = text_of("llama-bpe");
    b.v.add_bos = -1;
    kvd_tokenizer *t = made(&b);
    assert_false(kvd__tokenizer_adds_bos(t));
    kvd__tokenizer_destroy(&t);
}

/* --- SentencePiece --- */

static void test_spm(void **state)
{
    vocab b;
    start_spm(&b);
    int32_t first = add_spm(&b, "\xe2\x96\x81", -9); /* 259 */
    add_spm(&b, "a", -9);                            /* 260 */
    add_spm(&b, "b", -9);                            /* 261 */
    add_spm(&b, "ab", -3);                           /* 262 */
    add_spm(&b, "ba", -2);                           /* 263 */
    add_spm(&b, "\xe2\x96\x81" "a", -4);             /* 264 */
    add_spm(&b, "aba", -1);                          /* 265 */
    add_spm(&b, "\xc3\xa9", -9);                     /* 266 */
    add(&b, "\n", 1, KVD_TOKEN_USER_DEFINED, -1000); /* 267 */
    add(&b, "  ", 2, KVD_TOKEN_USER_DEFINED, -1000); /* 268 */
    assert_int_equal(first, 259);
    kvd_tokenizer *t = made(&b);
    IDS(t, "ab", 0, "259 262");         /* the prefix; ab before _a */
    IDS(t, "a", 0, "264");
    IDS(t, "aba", 0, "259 265");        /* ba is the best pair, then aba; _a and ab come to nothing */
    IDS(t, "b", KVD_ENCODE_BOS, "1 259 261");
    IDS(t, "\xc3\xa9", 0, "259 266");
    IDS(t, "\xc3\xa8", 0, "259 198 171"); /* bytes */
    IDS(t, "\xc3" "a", 0, "259 198 260"); /* ill formed: the byte alone */
    IDS(t, "a\na", 0, "264 267 264");   /* after a special token the prefix again */
    IDS(t, "b  b", 0, "259 261 268 259 261");
    IDS(t, "b\xe2\x96\x81" "a", 0, "259 261 264"); /* U+2581 is a space */
    IDS(t, "<s>a", KVD_ENCODE_SPECIAL, "1 264");
    IDS(t, "", KVD_ENCODE_BOS, "1");
    assert_true(kvd__tokenizer_adds_bos(t) && kvd__token_is_end(t, 2));
    static const char *const texts[] = {"a", " a", "  a", "a b  ab\n\n a", "\xc3\xa8\xff\xc3", "\n", " \n ", "\na", "<0x41>",
                                        "<s></s>"};
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        round_trip(t, texts[i], strlen(texts[i]), 0);
        round_trip(t, texts[i], strlen(texts[i]), KVD_ENCODE_SPECIAL);
    }
    kvd_decoder d = {.started = true}; /* a continuation keeps its space */
    char out[64];
    assert_int_equal(kvd__decoder_push(&d, t, 264, false, out), 2);
    kvd__tokenizer_destroy(&t);

    b.v.add_space_prefix = 0;
    b.v.add_bos = 0;
    t = made(&b);
    IDS(t, "a", KVD_ENCODE_BOS, "260");
    IDS(t, "a a", 0, "260 264");
    IDS(t, "a\na", 0, "260 267 260");
    kvd__tokenizer_destroy(&t);
}

/* Ordinary text does not become a control or byte token by merging. */
static void test_spm_no_forgery(void **state)
{
    vocab b;
    start_spm(&b);
    b.v.add_space_prefix = 0;
    static const char *const parts[] = {"<", "s", ">", "<s", "0", "x", "4", "1", "<0", "<0x", "<0x4", "<0x41"};
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++)
        add_spm(&b, parts[i], (float)i);
    kvd_tokenizer *t = made(&b);
    IDS(t, "<s>", 0, "262 261");
    IDS(t, "<s>", KVD_ENCODE_SPECIAL, "1");
    IDS(t, "<0x41>", KVD_ENCODE_SPECIAL, "270 261");
    round_trip(t, "<0x41><s>", 9, 0);
    kvd__tokenizer_destroy(&t);
}

static void test_spm_random(void **state)
{
    vocab b;
    start_spm(&b);
    uint64_t rng = 2;
    const char *const parts[] = {"\xe2\x96\x81", "a",  "b",        "aa",
                                 "ab",           "aab", "\xe2\x96\201a", "b\xe2\x96\x81",
                                 "\xc3\xa9",     "\xc3\xa9\xc3\xa9"};
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++)
        add_spm(&b, parts[i], (float)(i % 4));
    kvd_tokenizer *t = made(&b);
    for (int i = 0; i < 2000; i++) {
        char text[40];
        size_t n = kvd__splitmix64(&rng) % sizeof text;
        static const char some[] = " ab\xc3\xa9\xff\xf0\x9f\x98\x80";
        for (size_t k = 0; k < n; k++)
            text[k] = some[kvd__splitmix64(&rng) % (sizeof some - 1)];
        round_trip(t, text, n, 0);
    }
    kvd__tokenizer_destroy(&t);
}

/* Runs of spaces as user-defined tokens, written with U+2581 (older files of
 * Gemma): spaces are merged to them, and lose nothing. */
static void test_spm_escaped_user_defined(void **state)
{
    vocab b;
    start_spm(&b);
    add_spm(&b, "\xe2\x96\x81", -1);                                       /* 259 */
    add(&b, "\xe2\x96\x81\xe2\x96\x81", 6, KVD_TOKEN_USER_DEFINED, -2);     /* 260 */
    add_spm(&b, "a", -1);                                                  /* 261 */
    add_spm(&b, " a", -1); /* 262: a real space comes in no escaped text */
    kvd_tokenizer *t = made(&b);
    IDS(t, "a  a", 0, "259 261 260 261");
    IDS(t, " a", 0, "260 261");
    round_trip(t, "a  a", 4, 0);
    round_trip(t, " a", 2, 0);
    round_trip(t, "    ", 4, 0);
    kvd__tokenizer_destroy(&t);
}

/* Without byte tokens: the byte itself, then the unknown token. */
static void test_spm_without_bytes(void **state)
{
    vocab b;
    start(&b, "llama", "");
    add(&b, "<unk>", 5, KVD_TOKEN_UNKNOWN, 0);
    add(&b, "<s>", 3, KVD_TOKEN_CONTROL, 0);
    add(&b, "</s>", 4, KVD_TOKEN_CONTROL, 0);
    add_spm(&b, "a", 0);
    b.v.add_space_prefix = 0;
    kvd_tokenizer *t = made(&b);
    IDS(t, "ab\xc3\xa9", 0, "3 0 0 0");
    kvd__tokenizer_destroy(&t);
}

/* --- decoding --- */

static void test_decoder_holds_characters(void **state)
{
    vocab b;
    start_bpe(&b, "gpt-2");
    kvd_tokenizer *t = made(&b);
    kvd_decoder d = {0};
    char out[16];
    static const struct {
        int byte;
        size_t n;
        const char *out;
    } steps[] = {
        {0xf0, 0, ""}, {0x9f, 0, ""}, {0x98, 0, ""}, {0x80, 4, "\xf0\x9f\x98\x80"},
        {0xc3, 0, ""}, {'a', 2, "\xc3" "a"},            /* can not become valid */
        {0xe0, 0, ""}, {0x80, 2, "\xe0\x80"},           /* overlong */
        {0xed, 0, ""}, {0xa0, 2, "\xed\xa0"},           /* a surrogate */
        {0xf4, 0, ""}, {0x90, 2, "\xf4\x90"},           /* past U+10FFFF */
        {0xff, 1, "\xff"}, {0x80, 1, "\x80"},
        {0xe6, 0, ""}, {0x97, 0, ""}, {0xe6, 2, "\xe6\x97"}, {0x97, 0, ""}, {0xa5, 3, "\xe6\x97\xa5"},
        {0xf0, 0, ""}, {0x9f, 0, ""},
    };
    for (size_t i = 0; i < sizeof steps / sizeof steps[0]; i++) {
        assert_int_equal(kvd__decoder_push(&d, t, steps[i].byte, false, out), steps[i].n);
        assert_memory_equal(out, steps[i].out, steps[i].n);
    }
    assert_int_equal(kvd__decoder_flush(&d, out), 2);
    assert_memory_equal(out, "\xf0\x9f", 2);
    assert_int_equal(kvd__decoder_flush(&d, out), 0);
    kvd__tokenizer_destroy(&t);
}

/* --- refusals --- */

static void expect_refusal(const vocab *b, int code, const char *word)
{
    kvd_tokenizer *t = NULL;
    kvd_error err;
    assert_int_equal(kvd__tokenizer_create(&t, &b->v, &ledger, &err), code);
    assert_null(t);
    if (!strstr(err.message, word))
        fail_msg("\"%s\" does not name \"%s\"", err.message, word);
    assert_int_equal(ledger.now[KVD_ACC_HOST], 0);
}

static void test_refusals(void **state)
{
    vocab b;
    start_bpe(&b, "gpt-5");
    expect_refusal(&b, KVD_E_UNSUPPORTED, "gpt-5");
    start_bpe(&b, "gpt-2");
    b.v.model = text_of("bert");
    expect_refusal(&b, KVD_E_UNSUPPORTED, "bert");
    start_bpe(&b, "gpt-2");
    b.v.bos = 256;
    expect_refusal(&b, KVD_E_ENCODING, "256");
    start_bpe(&b, "gpt-2");
    b.v.add_bos = 1;
    expect_refusal(&b, KVD_E_ENCODING, "BOS");
    start_bpe(&b, "gpt-2");
    b.v.add_eos = 1;
    expect_refusal(&b, KVD_E_ENCODING, "EOS");
    start_bpe(&b, "gpt-2");
    add(&b, "a", 1, KVD_TOKEN_NORMAL, 0);
    expect_refusal(&b, KVD_E_ENCODING, "97");
    start_bpe(&b, "gpt-2");
    add(&b, "<x>", 3, KVD_TOKEN_CONTROL, 0);
    add(&b, "<x>", 3, KVD_TOKEN_USER_DEFINED, 0);
    expect_refusal(&b, KVD_E_ENCODING, "256 and 257");
    start_bpe(&b, "gpt-2");
    b.merges[b.v.n_merges++] = text_of("nospace");
    expect_refusal(&b, KVD_E_ENCODING, "merge 0");
    start_bpe(&b, "gpt-2");
    b.v.n_tokens = 0;
    expect_refusal(&b, KVD_E_ENCODING, "0 tokens");
    start_spm(&b);
    b.scores[5] = 0.0f / 0.0f;
    expect_refusal(&b, KVD_E_ENCODING, "token 5");
}

/* Every allocation fails once: an error, no crash, nothing kept. */
static void test_out_of_memory(void **state)
{
    for (int spm = 0; spm < 2; spm++) {
        vocab b;
        if (spm)
            start_spm(&b);
        else
            start_bpe(&b, "llama-bpe");
        for (int i = 0; i < 300; i++) {
            char name[16];
            add(&b, name, (size_t)snprintf(name, sizeof name, "<t%d>", i), KVD_TOKEN_CONTROL, 0);
        }
        int64_t n = 0;
        int rc = KVD_E_NOMEM;
        for (n = 1; rc; n++) {
            assert_true(n < 1000);
            kvd__ledger_init(&ledger, 0);
            ledger.fail_at = n;
            kvd_tokenizer *t = NULL;
            int32_t *ids = NULL;
            int64_t n_ids;
            rc = kvd__tokenizer_create(&t, &b.v, &ledger, NULL);
            if (!rc)
                rc = kvd__tokenizer_encode(t, "a \xff<t7> b\xc3\xa9", 11, KVD_ENCODE_SPECIAL, &ids, &n_ids, NULL);
            assert_true(rc == 0 || rc == KVD_E_NOMEM);
            kvd__free(ids);
            kvd__tokenizer_destroy(&t);
            assert_int_equal(ledger.now[KVD_ACC_HOST], 0);
        }
        assert_true(n > 20);
    }
    kvd__ledger_init(&ledger, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_bpe_merges_by_rank, setup, teardown),
        cmocka_unit_test_setup_teardown(test_bpe_merges_without_tokens, setup, teardown),
        cmocka_unit_test_setup_teardown(test_bpe_ignore_merges, setup, teardown),
        cmocka_unit_test_setup_teardown(test_bpe_missing_bytes, setup, teardown),
        cmocka_unit_test_setup_teardown(test_bpe_any_bytes_come_back, setup, teardown),
        cmocka_unit_test_setup_teardown(test_words, setup, teardown),
        cmocka_unit_test_setup_teardown(test_long_runs, setup, teardown),
        cmocka_unit_test_setup_teardown(test_special_tokens, setup, teardown),
        cmocka_unit_test_setup_teardown(test_bos_and_eos, setup, teardown),
        cmocka_unit_test_setup_teardown(test_spm, setup, teardown),
        cmocka_unit_test_setup_teardown(test_spm_no_forgery, setup, teardown),
        cmocka_unit_test_setup_teardown(test_spm_random, setup, teardown),
        cmocka_unit_test_setup_teardown(test_spm_escaped_user_defined, setup, teardown),
        cmocka_unit_test_setup_teardown(test_spm_without_bytes, setup, teardown),
        cmocka_unit_test_setup_teardown(test_decoder_holds_characters, setup, teardown),
        cmocka_unit_test_setup_teardown(test_refusals, setup, teardown),
        cmocka_unit_test_setup_teardown(test_out_of_memory, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
