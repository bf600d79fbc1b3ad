/* The patterns are those of the models' own tokenizer.json files as llama.cpp
 * (MIT) renders them, for token ids must be equal to its. Written for PCRE2:
 *
 * - \s is spelled out (SPACE): the 25 characters with White_Space of Unicode.
 *   PCRE2's \s has U+180E besides.
 * - \p{L}, \p{N} and \p{P} are completed by hand to Unicode 15.1, which llama.cpp
 *   has: PCRE2 10.42 has 14, and ids should not depend on the library's version.
 * - Quantifiers are possessive where nothing can be given back, so that a run
 *   of a million letters is one step; where one must be given back, as in
 *   \s+(?!\S), it is one. Every pattern takes time linear in the text:
 *   where a match fails after a long run, a later alternative consumes that run.
 * - `[a-z]`-like letter classes of "tekken" stand for llama.cpp's rendering of
 *   \p{Lu}\p{Lt}.. and \p{Ll}..: a letter outside ASCII counts as both. The
 *   original tells them apart and takes in \p{M}; the ids differ from it in
 *   words that mix cases outside ASCII, or have combining marks.
 * - In the classes of "deepseek-llm" and "deepseek-coder" the spaces that their
 *   ranges cover are left out, as they are in llama.cpp.
 *
 * Ill-formed bytes. PCRE2 wants well-formed text, and its own check would run
 * over the whole text at every match. So a piece is checked once; if it is not
 * well formed, the patterns see a copy in which each bad byte is U+0001: of the
 * class Cc, which no pattern names, as U+FFFD would be, but one byte long, so
 * that offsets hold. The bytes themselves reach the vocabulary unchanged.
 *
 * The compiler to machine code (JIT) is used where PCRE2 has one and the system
 * lets it; the interpreter gives the same matches. Limits on the number of steps
 * are lifted: with linear patterns they would only forbid long texts. */
#include "token/pretokenize.h"

#include <string.h>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "base/error.h"
#include "token/utf8.h"

enum { MAX_PATTERNS = 6 };

struct kvd__presplit {
    kvd_ledger *ledger;
    pcre2_general_context *general;
    pcre2_match_context *match;
    pcre2_code *patterns[MAX_PATTERNS];
    int n_patterns;
};

#define SPACE                                                                                                          \
    "\\t-\\r \\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}\\x{3000}"
/* \p{L} and so on, to be put into a class. */
#define LETTER                                                                                                         \
    "\\p{L}\\x{1123f}-\\x{11240}\\x{11f02}\\x{11f04}-\\x{11f10}\\x{11f12}-\\x{11f33}\\x{1342f}\\x{13441}-\\x{13446}"     \
    "\\x{1b132}\\x{1b155}\\x{1df25}-\\x{1df2a}\\x{1e030}-\\x{1e06d}\\x{1e4d0}-\\x{1e4eb}\\x{2b739}"                     \
    "\\x{2ebf0}-\\x{2ee5d}\\x{31350}-\\x{323af}"
#define NUMBER "\\p{N}\\x{11f50}-\\x{11f59}\\x{1d2c0}-\\x{1d2d3}\\x{1e4f0}-\\x{1e4f9}"
#define MARK "\\p{P}\\x{11b00}-\\x{11b09}\\x{11f43}-\\x{11f4f}"
/* A run of spaces gives its last one to the word that follows. */
#define SPACES "[" SPACE "]+(?![^" SPACE "])"
#define CONTRACTION "'(?:[sS]|[tT]|[rR][eE]|[vV][eE]|[mM]|[lL][lL]|[dD])"
#define WORD "[^\\r\\n" LETTER NUMBER "]?[" LETTER "]++"
#define MARKS " ?[^" SPACE LETTER NUMBER "]++" /* and all else that has no name */

#define GPT2                                                                                                           \
    "'(?:s|t|re|ve|m|ll|d)| ?[" LETTER "]++| ?[" NUMBER "]++|" MARKS "|" SPACES "|[" SPACE "]++"
/* digits: how many make one word */
#define LLAMA3(digits)                                                                                                 \
    CONTRACTION "|" WORD "|[" NUMBER "]" digits "|" MARKS "[\\r\\n]*+|[" SPACE "]*[\\r\\n]++|" SPACES "|[" SPACE "]++"
/* A letter, but not of a-z; of A-Z. (A class has no way to complete these.) */
#define UPPER "[^\\P{L}a-z]"
#define LOWER "[^\\P{L}A-Z]"
#define TEKKEN                                                                                                         \
    "[^\\r\\n\\p{L}" NUMBER "]?" UPPER "*" LOWER "++|[^\\r\\n\\p{L}" NUMBER "]?" UPPER "++" LOWER "*+|[" NUMBER "]"          \
    "| ?[^" SPACE "\\p{L}" NUMBER "]++[\\r\\n/]*+|[" SPACE "]*[\\r\\n]++|" SPACES "|[" SPACE "]++"
/* The Latin, Greek, Cyrillic, Armenian, Georgian, ... letters of DeepSeek's list. */
#define DEEPSEEK_LETTERS                                                                                               \
    "A-Za-z\\x{b5}\\x{c0}-\\x{d6}\\x{d8}-\\x{f6}\\x{f8}-\\x{1ba}\\x{1bc}-\\x{1bf}\\x{1c4}-\\x{293}"                    \
    "\\x{295}-\\x{2af}\\x{370}-\\x{373}\\x{376}\\x{377}\\x{37b}-\\x{37d}\\x{37f}\\x{386}\\x{388}-\\x{38a}\\x{38c}"     \
    "\\x{38e}-\\x{3a1}\\x{3a3}-\\x{3f5}\\x{3f7}-\\x{481}\\x{48a}-\\x{52f}\\x{531}-\\x{556}\\x{10a0}-\\x{10c5}"         \
    "\\x{13a0}-\\x{13f5}\\x{13f8}-\\x{13fd}\\x{1c90}-\\x{1cba}\\x{1cbd}-\\x{1cbf}\\x{1d00}-\\x{1d2b}"                  \
    "\\x{1d6b}-\\x{1d77}\\x{1d79}-\\x{1d9a}\\x{1e00}-\\x{1f15}\\x{1f18}-\\x{1f1d}\\x{1f20}-\\x{1f45}"                  \
    "\\x{1f48}-\\x{1f4d}\\x{1f50}-\\x{1f57}\\x{1f59}\\x{1f5b}\\x{1f5d}\\x{1f5f}-\\x{1f7d}\\x{1f80}-\\x{1fb4}"          \
    "\\x{1fb6}-\\x{1fbc}\\x{1fbe}\\x{1fc2}-\\x{1fc4}\\x{1fc6}-\\x{1fcc}\\x{1fd0}-\\x{1fd3}\\x{1fd6}-\\x{1fdb}"         \
    "\\x{1fe0}-\\x{1fec}\\x{1ff2}-\\x{1ff4}\\x{1ff6}-\\x{1ffc}\\x{2102}\\x{2107}\\x{210a}-\\x{2113}\\x{2115}"          \
    "\\x{2119}-\\x{211d}\\x{2124}\\x{2126}\\x{2128}\\x{212a}-\\x{212d}\\x{212f}-\\x{2134}\\x{2139}"                    \
    "\\x{213c}-\\x{213f}\\x{2145}-\\x{2149}\\x{214e}\\x{2183}\\x{2184}\\x{2c00}-\\x{2c7b}\\x{2c7e}-\\x{2ce4}"          \
    "\\x{2ceb}-\\x{2cee}\\x{2cf2}\\x{2cf3}\\x{a640}-\\x{a66d}\\x{a680}-\\x{a69b}\\x{a722}-\\x{a76f}"                   \
    "\\x{a771}-\\x{a787}\\x{a78b}-\\x{a78e}\\x{ab70}-\\x{abbf}\\x{fb00}-\\x{fb06}\\x{fb13}-\\x{fb17}"                  \
    "\\x{ff21}-\\x{ff3a}\\x{ff41}-\\x{ff5a}\\x{10400}-\\x{1044f}\\x{104b0}-\\x{104d3}\\x{104d8}-\\x{104fb}"            \
    "\\x{10c80}-\\x{10cb2}\\x{10cc0}-\\x{10cf2}\\x{118a0}-\\x{118df}\\x{1e900}-\\x{1e943}"
#define DEEPSEEK_MARKS "!-/:-~\\x{ff01}-\\x{ff0f}\\x{ff1a}-\\x{ff5e}\\x{2018}-\\x{201f}\\x{3001}\\x{3002}"
#define DEEPSEEK_CJK                                                                                                   \
    "[\\x{4e00}-\\x{9fa5}\\x{800}-\\x{167f}\\x{1681}-\\x{1fff}\\x{200b}-\\x{2027}\\x{202a}-\\x{202e}"                  \
    "\\x{2030}-\\x{205e}\\x{2060}-\\x{2fff}\\x{3001}-\\x{4dff}\\x{ac00}-\\x{d7ff}]++"

static const struct {
    const char *name;
    kvd__pretype pretype;
    const char *patterns[MAX_PATTERNS];
} pretypes[] = {
    {"default", {0}, {"[" MARK "$+<=>^~|]++", GPT2, "[" NUMBER "]++", "[0-9][0-9][0-9]"}},
    {"gpt-2", {0}, {GPT2}},
    {"smollm", {0}, {"[" NUMBER "]", GPT2}},
    {"starcoder", {0}, {"[" NUMBER "]", GPT2}},
    {"refact", {0}, {"[" NUMBER "]", GPT2}},
    {"llama-bpe", {true, true}, {LLAMA3("{1,3}")}},
    {"llama3", {true, true}, {LLAMA3("{1,3}")}},
    {"llama-v3", {true, true}, {LLAMA3("{1,3}")}},
    {"qwen2", {0}, {LLAMA3("")}},
    {"deepseek-r1-qwen", {0}, {LLAMA3("")}},
    {"deepseek-llm",
     {0},
     {"[\\r\\n]", "[" SPACE "]?[" DEEPSEEK_LETTERS "]++", "[" SPACE "]?[" DEEPSEEK_MARKS "]++",
      "(?<![" SPACE "])[" SPACE "]++\\z", DEEPSEEK_CJK, "[" NUMBER "]++"}},
    {"deepseek-coder",
     {0},
     {"[\\r\\n]", "[" SPACE "]?[" LETTER "]++", "[" SPACE "]?[" MARK "]++", DEEPSEEK_CJK, "[" NUMBER "]"}},
    {"tekken", {true, true}, {TEKKEN}},
};

/* --- creation --- */

static void *pcre_alloc(PCRE2_SIZE n, void *ledger)
{
    return kvd__alloc(ledger, KVD_ACC_HOST, n, NULL);
}

static void pcre_free(void *p, void *ledger) { kvd__free(p); }

static int compile(kvd__presplit *p, const char *pattern, kvd_error *err)
{
    pcre2_compile_context *c = pcre2_compile_context_create(p->general);
    if (!c)
        return kvd__fail(err, KVD_E_NOMEM, "out of memory: pre-tokeniser");
    int code;
    PCRE2_SIZE at;
    pcre2_code *re = pcre2_compile((PCRE2_SPTR)pattern, PCRE2_ZERO_TERMINATED, PCRE2_UTF | PCRE2_UCP, &code, &at, c);
    pcre2_compile_context_free(c);
    if (!re && code == PCRE2_ERROR_HEAP_FAILED)
        return kvd__fail(err, KVD_E_NOMEM, "out of memory: pre-tokeniser");
    if (!re)
        return kvd__fail(err, KVD_E_UNSUPPORTED, "PCRE2 without Unicode: error %d at %zu of a pattern", code,
                         (size_t)at);
    (void)pcre2_jit_compile(re, PCRE2_JIT_COMPLETE); /* where it can not be had, the interpreter matches */
    p->patterns[p->n_patterns++] = re;
    return 0;
}

int kvd__presplit_create(kvd__presplit **out, kvd_bytes name, kvd__pretype *pretype, kvd_ledger *l, kvd_error *err)
{
    size_t k = 0, n_types = sizeof pretypes / sizeof pretypes[0];
    while (name.n && k < n_types && (strlen(pretypes[k].name) != name.n || memcmp(pretypes[k].name, name.data, name.n)))
        k++;
    if (k == n_types)
        return kvd__fail(err, KVD_E_UNSUPPORTED, "unknown pre-tokeniser \"%.*s\" (tokenizer.ggml.pre)",
                         name.n < 64 ? (int)name.n : 64, name.data);
    kvd__presplit *p = kvd__alloc(l, KVD_ACC_HOST, sizeof *p, err);
    if (!p)
        return KVD_E_NOMEM;
    p->ledger = l;
    int rc = 0;
    p->general = pcre2_general_context_create(pcre_alloc, pcre_free, l);
    p->match = p->general ? pcre2_match_context_create(p->general) : NULL;
    if (!p->match)
        rc = kvd__fail(err, KVD_E_NOMEM, "out of memory: pre-tokeniser");
    for (int i = 0; !rc && i < MAX_PATTERNS && pretypes[k].patterns[i]; i++)
        rc = compile(p, pretypes[k].patterns[i], err);
    if (rc) {
        kvd__presplit_destroy(&p);
        return rc;
    }
    pcre2_set_match_limit(p->match, UINT32_MAX);
    pcre2_set_depth_limit(p->match, UINT32_MAX);
    pcre2_set_heap_limit(p->match, UINT32_MAX);
    *pretype = pretypes[k].pretype;
    *out = p;
    return 0;
}

void kvd__presplit_destroy(kvd__presplit **out)
{
    kvd__presplit *p = *out;
    if (!p)
        return;
    for (int i = 0; i < p->n_patterns; i++)
        pcre2_code_free(p->patterns[i]);
    pcre2_match_context_free(p->match);
    pcre2_general_context_free(p->general);
    kvd__free(p);
    *out = NULL;
}

/* --- splitting --- */

static int push(kvd__words *w, size_t length, kvd_ledger *l, kvd_error *err)
{
    if (w->n == w->cap) {
        uint32_t cap = w->cap ? w->cap * 2 : 1024;
        uint32_t *q = kvd__realloc(l, KVD_ACC_HOST, w->lengths, (size_t)cap * sizeof *q, err);
        if (!q)
            return KVD_E_NOMEM;
        w->lengths = q;
        w->cap = cap;
    }
    w->lengths[w->n++] = (uint32_t)length;
    return 0;
}

/* The text itself if it is well formed, else a copy that is. */
static const char *well_formed(const kvd__presplit *p, kvd__words *w, const char *text, size_t n, kvd_error *err)
{
    size_t i = 0, k = 1;
    while (i < n && (k = kvd__utf8_length(text + i, n - i)) > 0)
        i += k;
    if (i >= n)
        return text;
    if (w->stand_in_cap < n) {
        kvd__free(w->stand_in);
        w->stand_in_cap = 0;
        w->stand_in = kvd__alloc(p->ledger, KVD_ACC_HOST, n, err);
        if (!w->stand_in)
            return NULL;
        w->stand_in_cap = n;
    }
    memcpy(w->stand_in, text, n);
    for (; i < n; i += k) {
        k = kvd__utf8_length(text + i, n - i);
        if (!k) {
            w->stand_in[i] = 1;
            k = 1;
        }
    }
    return w->stand_in;
}

/* One piece by one pattern: matches and gaps are pushed. */
static int split_piece(const kvd__presplit *p, const pcre2_code *re, kvd__words *w, const char *s, size_t n,
                       kvd_error *err)
{
    size_t done = 0, from = 0;
    while (from < n) {
        int found = pcre2_match(re, (PCRE2_SPTR)s, n, from, PCRE2_NO_UTF_CHECK, w->match_data, p->match);
        if (found == PCRE2_ERROR_JIT_STACKLIMIT)
            found = pcre2_match(re, (PCRE2_SPTR)s, n, from, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, w->match_data, p->match);
        if (found == PCRE2_ERROR_NOMATCH)
            break;
        if (found == PCRE2_ERROR_NOMEMORY || found == PCRE2_ERROR_HEAPLIMIT)
            return kvd__fail(err, KVD_E_NOMEM, "out of memory: pre-tokeniser");
        if (found < 0)
            return kvd__fail(err, KVD_E_ENCODING, "pre-tokeniser: PCRE2 error %d", found);
        const PCRE2_SIZE *span = pcre2_get_ovector_pointer(w->match_data);
        int rc = 0;
        if (span[0] > done)
            rc = push(w, span[0] - done, p->ledger, err);
        if (!rc)
            rc = push(w, span[1] - span[0], p->ledger, err);
        if (rc)
            return rc;
        done = from = span[1]; /* no pattern matches nothing, so this is progress */
    }
    return done < n ? push(w, n - done, p->ledger, err) : 0;
}

int kvd__presplit_run(const kvd__presplit *p, kvd__words *w, const char *text, size_t n, kvd_error *err)
{
    if (!w->match_data)
        w->match_data = pcre2_match_data_create(1, p->general);
    if (!w->match_data)
        return kvd__fail(err, KVD_E_NOMEM, "out of memory: pre-tokeniser");
    const char *s = well_formed(p, w, text, n, err);
    if (!s)
        return KVD_E_NOMEM;
    w->n = 0;
    int rc = push(w, n, p->ledger, err);
    for (int i = 0; !rc && i < p->n_patterns; i++) {
        uint32_t *pieces = w->lengths, n_pieces = w->n, cap = w->cap;
        w->lengths = w->other;
        w->cap = w->other_cap;
        w->other = pieces;
        w->other_cap = cap;
        w->n = 0;
        const char *at = s;
        for (uint32_t j = 0; !rc && j < n_pieces; at += pieces[j++])
            rc = split_piece(p, p->patterns[i], w, at, pieces[j], err);
    }
    return rc;
}

void kvd__words_free(kvd__words *w)
{
    kvd__free(w->lengths);
    kvd__free(w->other);
    kvd__free(w->stand_in);
    pcre2_match_data_free(w->match_data);
    *w = (kvd__words){0};
}
