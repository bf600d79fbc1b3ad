/* From a vocabulary to a tokenizer, and the outer loop of encoding: cut out the
 * special tokens, hand the rest to BPE or to SentencePiece.
 *
 * The types of tokens that a file gives are believed, with one exception: tokens
 * of chat and fill-in-the-middle templates that some files list as normal text
 * (<|im_end|> and so on) are control tokens whatever the file says.
 *
 * A control, unknown or byte token is never the result of merging ordinary text,
 * even where its name would be: text can not forge one unless the caller asks
 * for KVD_ENCODE_SPECIAL, and "<0x41>" comes back as it was. */
#include "token/tokenizer.h"

#include <string.h>

#include "base/error.h"

/* Control tokens by name. */
static const struct {
    const char *name;
    bool end;
} known[] = {
    {"<|eot_id|>", true},         {"<|im_end|>", true},         {"<|end|>", true},
    {"<|endoftext|>", true},      {"<|end_of_text|>", true},    {"<|eom_id|>", true},
    {"<end_of_turn>", true},      {"<end_of_utterance>", true}, {"<｜end▁of▁sentence｜>", true},
    {"<EOT>", true},              {"<|fim_pad|>", true},        {"<|repo_name|>", true},
    {"<|file_sep|>", true},       {"<|fim_prefix|>", false},    {"<|fim_suffix|>", false},
    {"<|fim_middle|>", false},    {"<fim_prefix>", false},      {"<fim_suffix>", false},
    {"<fim_middle>", false},
};

static bool is_text(kvd_bytes b, const char *s) { return b.n == strlen(s) && !memcmp(b.data, s, b.n); }

/* The type of a token, and whether it ends a text, by the file and by name. */
static int classify(const kvd_vocab *v, int64_t id, bool *end)
{
    int type = v->types ? v->types[id] : KVD_TOKEN_NORMAL;
    *end = false;
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        if (!is_text(v->tokens[id], known[i].name))
            continue;
        *end = known[i].end;
        if (type == KVD_TOKEN_NORMAL || type == KVD_TOKEN_USER_DEFINED)
            type = KVD_TOKEN_CONTROL;
    }
    /* In Gemma's vocabulary </s> is the HTML tag, user-defined. */
    if (is_text(v->tokens[id], "</s>") && type == KVD_TOKEN_CONTROL)
        *end = true;
    return type;
}

int kvd__byte_of_name(kvd_bytes text)
{
    int value = 0;
    if (text.n != 6 || memcmp(text.data, "<0x", 3) || text.data[5] != '>')
        return -1;
    for (int i = 3; i < 5; i++) {
        char c = text.data[i];
        int digit = c >= '0' && c <= '9' ? c - '0' : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
        if (digit < 0)
            return -1;
        value = value << 4 | digit;
    }
    return value;
}

/* The piece of a token into scratch. *mergeable: ordinary text may become it. */
static size_t piece_of(const kvd_tokenizer *t, kvd_bytes text, int type, char *scratch, bool *mergeable)
{
    *mergeable = false;
    if (type == KVD_TOKEN_CONTROL || type == KVD_TOKEN_UNKNOWN || (type == KVD_TOKEN_USER_DEFINED && !t->spm)) {
        memcpy(scratch, text.data, text.n);
        return text.n;
    }
    if (type == KVD_TOKEN_BYTE) {
        int value = kvd__byte_of_name(text);
        if (value < 0)
            return 0;
        scratch[0] = (char)value;
        return 1;
    }
    if (!t->spm)
        return kvd__bpe_decode(text.data, text.n, scratch, mergeable);
    /* With a real space in it, it is found whole or not at all. */
    *mergeable = !memchr(text.data, ' ', text.n);
    return kvd__spm_decode(text.data, text.n, scratch);
}

static int add_token(kvd_tokenizer *t, const kvd_vocab *v, int64_t id, char *scratch, kvd_error *err)
{
    kvd_bytes text = v->tokens[id];
    bool mergeable, end;
    int type = classify(v, id, &end);
    size_t n = piece_of(t, text, type, scratch, &mergeable);
    if (n > t->max_bytes)
        t->max_bytes = n;
    bool control = type == KVD_TOKEN_CONTROL || type == KVD_TOKEN_UNKNOWN;
    bool listed = control || type == KVD_TOKEN_USER_DEFINED;
    /* One written with U+2581 is found whole where that is in the text, and
     * merged where the text has spaces, as Gemma's runs of them in older files. */
    bool whole = control || (listed && n == text.n);
    t->flags[id] =
        (uint8_t)((control ? KVD__TOKEN_CONTROL : 0) | (whole ? KVD__TOKEN_WHOLE : 0) | (end ? KVD__TOKEN_END : 0));
    int rc = kvd__pieces_add(&t->pieces, scratch, n, t->ledger, err);
    if (!rc && listed && text.n)
        rc = kvd__special_add(&t->special, text, (int32_t)id, control, t->ledger, err);
    if (rc || !mergeable || !n)
        return rc;
    int32_t twin = kvd__strings_find(&t->words, &t->pieces, scratch, n);
    if (twin >= 0)
        return kvd__fail(err, KVD_E_ENCODING, "tokens %d and %lld of the vocabulary are the same", twin, (long long)id);
    return kvd__strings_add(&t->words, &t->pieces, (uint32_t)id, t->ledger, err);
}

static int check_id(const kvd_vocab *v, int64_t id, const char *what, kvd_error *err)
{
    if (id < -1 || id >= v->n_tokens)
        return kvd__fail(err, KVD_E_ENCODING, "%s token %lld is not in the vocabulary of %lld", what, (long long)id,
                         (long long)v->n_tokens);
    return 0;
}

/* Which special ids there are and what encoding adds. */
static int set_rules(kvd_tokenizer *t, const kvd_vocab *v, bool pre_adds_bos, kvd_error *err)
{
    int rc = check_id(v, v->bos, "BOS", err);
    if (!rc)
        rc = check_id(v, v->eos, "EOS", err);
    if (!rc)
        rc = check_id(v, v->eot, "EOT", err);
    if (!rc)
        rc = check_id(v, v->unk, "unknown", err);
    if (rc)
        return rc;
    /* A SentencePiece vocabulary that names none has them where Llama's has. */
    t->bos = v->bos < 0 && t->spm && v->n_tokens > 1 ? 1 : v->bos;
    t->eos = v->eos < 0 && t->spm && v->n_tokens > 2 ? 2 : v->eos;
    t->unk = v->unk < 0 && t->spm ? 0 : v->unk;
    if ((v->add_bos == 1 && t->bos < 0) || (v->add_eos == 1 && t->eos < 0))
        return kvd__fail(err, KVD_E_ENCODING, "the vocabulary wants a %s token added and has none",
                         v->add_bos == 1 && t->bos < 0 ? "BOS" : "EOS");
    t->add_bos = t->bos >= 0 && (v->add_bos >= 0 ? v->add_bos : t->spm || pre_adds_bos);
    t->add_eos = v->add_eos == 1;
    t->space_prefix = t->spm && v->add_space_prefix != 0;
    if (t->eos >= 0)
        t->flags[t->eos] |= KVD__TOKEN_END;
    if (v->eot >= 0)
        t->flags[v->eot] |= KVD__TOKEN_END;
    return 0;
}

static int fill(kvd_tokenizer *t, const kvd_vocab *v, kvd_error *err)
{
    kvd__pretype pretype = {0};
    int rc = 0;
    if (!t->spm)
        rc = kvd__presplit_create(&t->presplit, v->pre, &pretype, t->ledger, err);
    t->ignore_merges = pretype.ignore_merges;
    if (!rc)
        rc = kvd__strings_init(&t->words, v->n_tokens + 256, t->ledger, err);
    if (!rc)
        rc = kvd__special_init(&t->special, t->ledger, err);
    size_t longest = 8;
    for (int64_t i = 0; i < v->n_tokens; i++)
        longest = v->tokens[i].n > longest ? v->tokens[i].n : longest;
    t->flags = rc ? NULL : kvd__alloc(t->ledger, KVD_ACC_HOST, (size_t)v->n_tokens, err);
    char *scratch = t->flags ? kvd__alloc(t->ledger, KVD_ACC_HOST, longest, err) : NULL;
    if (!scratch)
        return rc ? rc : KVD_E_NOMEM;
    for (int64_t i = 0; !rc && i < v->n_tokens; i++)
        rc = add_token(t, v, i, scratch, err);
    kvd__free(scratch);
    if (!rc)
        rc = set_rules(t, v, pretype.add_bos, err);
    if (!rc)
        rc = t->spm ? kvd__spm_init(t, v, err) : kvd__bpe_init(t, v, err);
    return rc;
}

int kvd__tokenizer_create(kvd_tokenizer **out, const kvd_vocab *v, kvd_ledger *l, kvd_error *err)
{
    bool spm = is_text(v->model, "llama");
    if (!spm && !is_text(v->model, "gpt2"))
        return kvd__fail(err, KVD_E_UNSUPPORTED, "unknown tokenizer \"%.*s\" (tokenizer.ggml.model)",
                         v->model.n < 64 ? (int)v->model.n : 64, v->model.data);
    if (v->n_tokens < 1 || v->n_tokens > 1 << 24 || v->n_merges < 0 || v->n_merges > 1 << 24)
        return kvd__fail(err, KVD_E_ENCODING, "a vocabulary of %lld tokens and %lld merges", (long long)v->n_tokens,
                         (long long)v->n_merges);
    kvd_tokenizer *t = kvd__alloc(l, KVD_ACC_HOST, sizeof *t, err);
    if (!t)
        return KVD_E_NOMEM;
    t->ledger = l;
    t->spm = spm;
    t->n_tokens = v->n_tokens;
    int rc = fill(t, v, err);
    if (rc)
        kvd__tokenizer_destroy(&t);
    else
        *out = t;
    return rc;
}

void kvd__tokenizer_destroy(kvd_tokenizer **out)
{
    kvd_tokenizer *t = *out;
    if (!t)
        return;
    kvd__pieces_free(&t->pieces);
    kvd__strings_free(&t->words);
    kvd__special_free(&t->special);
    kvd__pairs_free(&t->merges);
    kvd__presplit_destroy(&t->presplit);
    kvd__free(t->flags);
    kvd__free(t->priority);
    kvd__free(t);
    *out = NULL;
}

int64_t kvd__tokenizer_n_tokens(const kvd_tokenizer *t) { return t->n_tokens; }
int64_t kvd__tokenizer_bos(const kvd_tokenizer *t) { return t->bos; }
int64_t kvd__tokenizer_eos(const kvd_tokenizer *t) { return t->eos; }
bool kvd__tokenizer_adds_bos(const kvd_tokenizer *t) { return t->add_bos; }
bool kvd__tokenizer_adds_eos(const kvd_tokenizer *t) { return t->add_eos; }

bool kvd__token_is_end(const kvd_tokenizer *t, int32_t id)
{
    return id >= 0 && id < t->n_tokens && t->flags[id] & KVD__TOKEN_END;
}

int32_t kvd__token_find(const kvd_tokenizer *t, const char *text, size_t n)
{
    int32_t id = kvd__special_find(&t->special, text, n);
    if (id < 0)
        id = kvd__strings_find(&t->words, &t->pieces, text, n);
    return id < t->n_tokens ? id : -1;
}

/* --- encoding --- */

int kvd__encoder_push(kvd__encoder *e, int32_t id, kvd_error *err)
{
    if (e->n == e->cap) {
        size_t cap = e->cap * 2;
        int32_t *ids = kvd__realloc(e->t->ledger, KVD_ACC_HOST, e->ids, cap * sizeof *ids, err);
        if (!ids)
            return KVD_E_NOMEM;
        e->ids = ids;
        e->cap = cap;
    }
    e->ids[e->n++] = id;
    return 0;
}

int kvd__encoder_push_bytes(kvd__encoder *e, const char *text, size_t n, kvd_error *err)
{
    int rc = 0;
    for (size_t i = 0; !rc && i < n; i++) {
        int32_t id = e->t->byte_token[(unsigned char)text[i]];
        if (id >= 0)
            rc = kvd__encoder_push(e, id, err);
    }
    return rc;
}

static int encode_fragments(kvd__encoder *e, const char *text, const kvd__fragments *f, kvd_error *err)
{
    int rc = 0;
    bool prefix = true;
    for (uint32_t i = 0; !rc && i < f->n; i++) {
        kvd__fragment one = f->list[i];
        if (one.token >= 0)
            rc = kvd__encoder_push(e, one.token, err);
        else if (e->t->spm)
            rc = kvd__spm_encode(e, text + one.at, one.n, prefix, err);
        else
            rc = kvd__bpe_encode(e, text + one.at, one.n, err);
        prefix = one.token >= 0;
    }
    return rc;
}

int kvd__tokenizer_encode(const kvd_tokenizer *t, const char *text, size_t n, unsigned flags, int32_t **ids,
                          int64_t *n_ids, kvd_error *err)
{
    if (n > INT32_MAX / 4)
        return kvd__fail(err, KVD_E_RANGE, "text of %zu bytes, at most %d", n, INT32_MAX / 4);
    kvd__encoder e = {.t = t, .cap = n / 3 + 16};
    kvd__fragments fragments = {0};
    e.ids = kvd__alloc_array(t->ledger, KVD_ACC_HOST, e.cap, sizeof *e.ids, err);
    if (!e.ids)
        return KVD_E_NOMEM;
    int rc = 0;
    if (flags & KVD_ENCODE_BOS && t->add_bos)
        rc = kvd__encoder_push(&e, (int32_t)t->bos, err);
    if (!rc)
        rc = kvd__special_cut(&t->special, text, n, flags & KVD_ENCODE_SPECIAL, &fragments, t->ledger, err);
    if (!rc)
        rc = encode_fragments(&e, text, &fragments, err);
    if (!rc && flags & KVD_ENCODE_BOS && t->add_eos)
        rc = kvd__encoder_push(&e, (int32_t)t->eos, err);
    kvd__free(fragments.list);
    kvd__merger_free(&e.merger);
    kvd__words_free(&e.words);
    kvd__free(e.copy);
    if (rc) {
        kvd__free(e.ids);
        return rc;
    }
    *ids = e.ids;
    *n_ids = (int64_t)e.n;
    return 0;
}
