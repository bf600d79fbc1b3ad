/* Runs: prompts, greedy decoding, and what is kept of it.
 *
 * Decoding is done by kvd_session_feed and not by kvd_generate where logits are
 * compared: generate has its own loop and shows tokens only. Both choose the lowest id
 * among equal logits. */
#include "lab/runs.h"

#include <stdlib.h>
#include <string.h>

#include "lab/texts.h"

void *lab_alloc(int64_t n, size_t size, kvd_error *err)
{
    void *p = n >= 0 ? calloc(n ? (size_t)n : 1, size) : NULL;
    if (!p)
        lab_fail(err, KVD_E_NOMEM, "no memory for %lld things of %zu bytes", (long long)n, size);
    return p;
}

/* ---- memory ----------------------------------------------------------------------- */

int64_t lab_gauge_look(lab_gauge *g)
{
    int64_t now, peak, budget;
    kvd_memory_context(g->l->m, &now, &peak, &budget);
    if (now > g->peak_bytes)
        g->peak_bytes = now;
    return now;
}

static int on_pass(void *ctx, int64_t done, int64_t total, int64_t rows, int64_t recomputed)
{
    lab_gauge *g = ctx;
    (void)done, (void)total, (void)rows, (void)recomputed;
    lab_gauge_look(g);
    return lab_tick(g->l, NULL, 0, 0, NULL);
}

void lab_gauge_watch(lab_gauge *g, kvd_session *s)
{
    kvd_session_set_progress(s, on_pass, g);
}

/* ---- greedy runs ------------------------------------------------------------------ */

int lab_decode(const lab *l, kvd_session *s, const int32_t *prompt, int64_t n_prompt, const int32_t *forced, int64_t n,
               lab_step_fn *fn, void *ctx, kvd_error *err)
{
    const float *logits;
    int rc = kvd_session_feed(s, prompt, n_prompt, &logits, err);
    for (int64_t t = 0; !rc && t < n; t++) {
        int32_t token = lab_argmax(logits, l->info.n_vocab);
        rc = fn(ctx, t, logits, token, err);
        if (!rc && t + 1 < n)
            rc = kvd_session_feed(s, forced ? &forced[t] : &token, 1, &logits, err);
    }
    return rc;
}

int lab_trace_make(lab_trace *tr, int64_t n, int64_t n_vocab, lab_keep keep, kvd_error *err)
{
    *tr = (lab_trace){.n = n, .n_vocab = n_vocab};
    if (!(tr->tokens = lab_alloc(n, sizeof *tr->tokens, err)) || !(tr->seconds = lab_alloc(n, sizeof *tr->seconds, err)) ||
        (keep == LAB_KEEP_DIGESTS && !(tr->digest = lab_alloc(n, sizeof *tr->digest, err))) ||
        (keep == LAB_KEEP_LOGITS && !(tr->logits = lab_alloc(n * n_vocab, sizeof *tr->logits, err)))) {
        lab_trace_free(tr);
        return KVD_E_NOMEM;
    }
    return 0;
}

void lab_trace_free(lab_trace *tr)
{
    free(tr->tokens);
    free(tr->logits);
    free(tr->digest);
    free(tr->seconds);
    *tr = (lab_trace){0};
}

int lab_trace_step(void *ctx, int64_t t, const float *logits, int32_t token, kvd_error *err)
{
    lab_trace *tr = ctx;
    (void)err;
    double now = lab_seconds();
    tr->seconds[t] = now - tr->begun;
    tr->tokens[t] = token;
    size_t bytes = (size_t)tr->n_vocab * sizeof *logits;
    if (tr->logits)
        memcpy(tr->logits + t * tr->n_vocab, logits, bytes);
    else if (tr->digest)
        lab_hash(logits, bytes, tr->digest[t]);
    tr->begun += lab_seconds() - now; /* keeping them is nobody's decoding */
    return 0;
}

bool lab_trace_same(const lab_trace *tr, int64_t t, const float *logits)
{
    size_t bytes = (size_t)tr->n_vocab * sizeof *logits;
    if (!tr->logits && !tr->digest)
        return false;
    if (tr->logits)
        return !memcmp(tr->logits + t * tr->n_vocab, logits, bytes);
    char digest[17];
    lab_hash(logits, bytes, digest);
    return !memcmp(digest, tr->digest[t], sizeof digest);
}

int64_t lab_first_difference(const int32_t *a, const int32_t *b, int64_t n)
{
    int64_t t = 0;
    while (t < n && a[t] == b[t])
        t++;
    return t;
}

/* ---- conversations ---------------------------------------------------------------- */

static const char ANSWER[] = "The-answer-stands-here"; /* no template trims or escapes it */

bool lab_has_chat(const lab *l)
{
    return l->info.chat_template && *l->info.chat_template;
}

void lab_note_chat(const lab *l, json_t *result)
{
    lab_setting(result, "chat_template", lab_has_chat(l) ? json_string(l->info.chat_template) : json_null());
    if (!lab_has_chat(l))
        lab_note(result, "The file has no chat template%s: conversations are plain text, \"User: ... Assistant: ...\".",
                 l->info.has_chat_template ? " that is recognised" : "");
}

static int tokenize(const lab *l, const char *text, size_t n, bool opening, int32_t **ids, int64_t *n_ids, kvd_error *err)
{
    unsigned flags = (lab_has_chat(l) ? KVD_TOKENIZE_SPECIAL : 0u) | (opening ? KVD_TOKENIZE_BOS : 0u);
    return kvd_tokenize(l->m, text, n, flags, ids, n_ids, err);
}

int lab_chat_open(const lab *l, const char *system, const char *user, int32_t **ids, int64_t *n, kvd_error *err)
{
    kvd_chat_turn turns[2];
    int64_t n_turns = 0;
    char *text;
    size_t n_text;
    if (!lab_has_chat(l)) {
        char plain[1024];
        int len = snprintf(plain, sizeof plain, "%s%sUser: %s\nAssistant:", system ? system : "", system ? "\n\n" : "", user);
        if (len < 0 || (size_t)len >= sizeof plain)
            return lab_fail(err, KVD_E_RANGE, "a question of %d bytes", len);
        return tokenize(l, plain, (size_t)len, true, ids, n, err);
    }
    if (system)
        turns[n_turns++] = (kvd_chat_turn){"system", system};
    turns[n_turns++] = (kvd_chat_turn){"user", user};
    int rc = kvd_chat_render(l->m, NULL, turns, n_turns, KVD_CHAT_NO_THINK, &text, &n_text, err);
    if (rc)
        return rc;
    rc = tokenize(l, text, n_text, true, ids, n, err);
    kvd_text_free(text);
    return rc;
}

int lab_chat_next(const lab *l, const char *user, int32_t **ids, int64_t *n, kvd_error *err)
{
    char *text;
    size_t n_text;
    if (!lab_has_chat(l)) {
        char plain[1024];
        int len = snprintf(plain, sizeof plain, "\n\nUser: %s\nAssistant:", user);
        if (len < 0 || (size_t)len >= sizeof plain)
            return lab_fail(err, KVD_E_RANGE, "a question of %d bytes", len);
        return tokenize(l, plain, (size_t)len, false, ids, n, err);
    }
    const kvd_chat_turn turns[] = {{"user", "Hello."}, {"assistant", ANSWER}, {"user", user}};
    int rc = kvd_chat_render(l->m, NULL, turns, 3, KVD_CHAT_NO_THINK, &text, &n_text, err);
    if (rc)
        return rc;
    const char *answer = strstr(text, ANSWER);
    if (!answer)
        rc = lab_fail(err, KVD_E_UNSUPPORTED, "chat template %s: an answer is not written as it is", l->info.chat_template);
    else
        rc = tokenize(l, answer + strlen(ANSWER), strlen(answer) - strlen(ANSWER), false, ids, n, err);
    kvd_text_free(text);
    return rc;
}

/* ---- long prompts ----------------------------------------------------------------- */

/* The laboratory's passage i, and the next ones behind it until there are n tokens. */
static int own_prompt(const lab *l, int64_t i, int64_t n, int32_t *out, int *n_passages, kvd_error *err)
{
    int64_t have = 0;
    for (*n_passages = 0; have < n; ++*n_passages) {
        const char *text = lab_passages[(i + *n_passages) % LAB_PASSAGES];
        int32_t *ids;
        int64_t n_ids;
        int rc = kvd_tokenize(l->m, text, strlen(text), 0, &ids, &n_ids, err);
        if (rc)
            return rc;
        int64_t take = n_ids < n - have ? n_ids : n - have;
        memcpy(out + have, ids, (size_t)take * sizeof *ids);
        have += take;
        kvd_ids_free(ids);
        if (n_ids < 1)
            return lab_fail(err, KVD_E_UNSUPPORTED, "the tokeniser makes nothing of a text");
    }
    return 0;
}

static int own_prompts(const lab *l, json_t *result, int64_t n_prompts, int64_t n, int64_t bos, int32_t *out, kvd_error *err)
{
    int rc = 0, most = 0;
    for (int64_t i = 0; !rc && i < n_prompts; i++) {
        int used = 0;
        rc = own_prompt(l, i, n - bos, out + i * n + bos, &used, err);
        most = used > most ? used : most;
    }
    lab_setting(result, "text", json_string("the laboratory's own passages"));
    if (most > 1)
        lab_note(result, "With this tokeniser a passage has fewer tokens than a prompt: up to %d passages are put one behind the "
                         "other.", most);
    return rc;
}

static int file_prompts(const lab *l, json_t *result, int64_t n_prompts, int64_t n, int64_t bos, int32_t *out, kvd_error *err)
{
    int32_t *ids;
    int64_t n_ids, take = n - bos;
    char hex[17];
    int rc = kvd_tokenize(l->m, l->text, l->n_text, 0, &ids, &n_ids, err);
    if (rc)
        return rc;
    if (n_ids < take)
        rc = lab_fail(err, KVD_E_ENCODING, "the text has %lld tokens, a prompt needs %lld", (long long)n_ids, (long long)take);
    for (int64_t i = 0; !rc && i < n_prompts; i++) {
        int64_t at = n_prompts > 1 ? (n_ids - take) * i / (n_prompts - 1) : 0;
        memcpy(out + i * n + bos, ids + at, (size_t)take * sizeof *ids);
    }
    kvd_ids_free(ids);
    lab_hash(l->text, l->n_text, hex);
    lab_setting(result, "text", json_string("a file, from evenly spaced places"));
    lab_setting(result, "text_hash", json_string(hex));
    if (!rc && n_ids < n_prompts * take)
        lab_note(result, "The text has %lld tokens only: the prompts overlap.", (long long)n_ids);
    return rc;
}

int lab_prompts(const lab *l, json_t *result, int64_t n_prompts, int64_t n_tokens, int32_t **out, kvd_error *err)
{
    int64_t bos = kvd_tokenize_adds_bos(l->m) ? 1 : 0;
    char hex[17];
    if (n_prompts < 1 || n_tokens <= bos)
        return lab_fail(err, KVD_E_RANGE, "%lld prompts of %lld tokens", (long long)n_prompts, (long long)n_tokens);
    int32_t *ids = lab_alloc(n_prompts * n_tokens, sizeof *ids, err);
    if (!ids)
        return KVD_E_NOMEM;
    for (int64_t i = 0; bos && i < n_prompts; i++)
        ids[i * n_tokens] = kvd_token_bos(l->m);
    int rc = (l->text ? file_prompts : own_prompts)(l, result, n_prompts, n_tokens, bos, ids, err);
    if (rc) {
        free(ids);
        return rc;
    }
    lab_hash(ids, (size_t)(n_prompts * n_tokens) * sizeof *ids, hex);
    lab_setting(result, "prompts", json_integer(n_prompts));
    lab_setting(result, "prompt_tokens", json_integer(n_tokens));
    lab_setting(result, "prompts_hash", json_string(hex)); /* of the ids, i32 little-endian */
    *out = ids;
    return 0;
}

int lab_run_full(const lab *l, const int32_t *prompt, int64_t n_prompt, int64_t n, lab_gauge *g, lab_trace *full, kvd_error *err)
{
    kvd_session_options o;
    kvd_session *s = NULL;
    const char *list = "full";
    char name[64];
    int rc;
    if (!lab_next_policy(l, &list, &o, name, &rc, err) || (rc = kvd_session_create(&s, l->m, &o, err)))
        return rc;
    lab_gauge_watch(g, s);
    full->begun = lab_seconds();
    rc = lab_decode(l, s, prompt, n_prompt, NULL, n, lab_trace_step, full, err);
    kvd_session_free(&s);
    return rc;
}
