/* A conversation over a session.
 *
 * The turns are rendered anew by the chat template for every message, and the
 * session should be fed with nothing that it has computed already. Two things
 * stand in the way of "feed what is new":
 *
 * - The tokens of an answer are what the model chose, which need not be what the
 *   tokeniser makes of the same text. Encoding the whole text again would part
 *   from the session in the middle of an earlier answer, for no reason.
 * - Some templates change what was said: earlier thoughts are dropped (Qwen3,
 *   DeepSeek-R1), answers trimmed (Gemma, Llama), the system message moves to the
 *   last question (Mistral).
 *
 * So we keep the text of the conversation beside its tokens, and *marks*: places
 * at the end of answers where text and tokens may be cut together. For a new
 * message the last mark is sought up to which the new rendering has the same
 * text; tokens up to there stay, and what follows is encoded. That is right if
 * what follows begins with a control token, which nothing can merge with (the end
 * of turn of most templates); else the mark before is tried, at last the
 * beginning. Then the session is rewound to where its tokens and these part,
 * which for most templates is its end, and the rest is fed: the last token of the
 * answer (generation does not feed it), the end of its turn, the new message.
 *
 * The transcript is what was said, the session only a cache of it: a pass that
 * was cancelled may leave the session shorter, and nothing else happens. */
#define _GNU_SOURCE
#include "chat_talk.h"

#include <stdlib.h>
#include <string.h>

/* An answer should have room for this many tokens, or its turn is refused: a
 * prefill for a few words that break off is worth nothing to anybody. */
enum { LEAST_ANSWER = 16 };

typedef struct {
    size_t text;
    int64_t ids;
} mark;

/* What was said, to the end of the last answer. */
typedef struct {
    char *text;
    size_t n_text;
    int32_t *ids;
    int64_t n_ids;
    mark *marks;
    int64_t n_marks;
} transcript;

struct talk {
    kvd_model *m;
    const cli *c;
    kvd_session *s;
    char *system;
    kvd_chat_turn *turns; /* [n_turns] user and assistant by turns; content owned */
    int64_t n_turns, cap_turns;
    transcript said;
};

static int no_memory(void) { return cli_fail(EXIT_RESOURCES, "out of memory"); }

/* ---- turns ------------------------------------------------------------------ */

/* Takes content (NULL: it could not be made). One slot more than asked for, so
 * that rendering finds room for the system message. */
static int push_turn(talk *t, const char *role, char *content)
{
    if (content && t->n_turns + 2 > t->cap_turns) {
        int64_t cap = 2 * t->n_turns + 8;
        kvd_chat_turn *p = realloc(t->turns, (size_t)cap * sizeof *p);
        if (p) {
            t->turns = p;
            t->cap_turns = cap;
        }
    }
    if (!content || t->n_turns + 2 > t->cap_turns) {
        free(content);
        return no_memory();
    }
    t->turns[t->n_turns++] = (kvd_chat_turn){role, content};
    return 0;
}

static void pop_turn(talk *t) { free((char *)(uintptr_t)t->turns[--t->n_turns].content); }

/* The answer as a string: a byte 0, which a model may well say, ends one. */
static char *content_of(const kvd_result *r)
{
    static const char replacement[] = "\xef\xbf\xbd";
    char *p = malloc(3 * r->n_text + 1);
    size_t n = 0;
    for (size_t i = 0; p && i < r->n_text; i++) {
        size_t k = r->text[i] ? 1 : 3;
        memcpy(p + n, r->text[i] ? r->text + i : replacement, k);
        n += k;
    }
    if (p)
        p[n] = 0;
    return p;
}

static int render(talk *t, char **text, size_t *n, kvd_error *err)
{
    kvd_chat_turn *all = t->turns;
    int64_t k = t->n_turns;
    unsigned flags = t->c->no_think ? KVD_CHAT_NO_THINK : 0;
    if (!t->system)
        return kvd_chat_render(t->m, t->c->template_name, all, k, flags, text, n, err);
    memmove(all + 1, all, (size_t)k * sizeof *all);
    all[0] = (kvd_chat_turn){"system", t->system};
    int rc = kvd_chat_render(t->m, t->c->template_name, all, k + 1, flags, text, n, err);
    memmove(all, all + 1, (size_t)k * sizeof *all);
    return rc;
}

/* ---- text to tokens --------------------------------------------------------- */

static bool is_control(const kvd_model *m, int32_t id)
{
    size_t shown, named;
    kvd_token_text(m, id, false, &shown);
    kvd_token_text(m, id, true, &named);
    return shown == 0 && named > 0;
}

/* Tokens of a rendering: those of the transcript up to the last mark that holds,
 * then encoded ones. *ids owned (free). *n_marks: how many marks hold. */
static int encode(const talk *t, const char *text, size_t n, int32_t **ids, int64_t *n_ids, int64_t *n_marks, kvd_error *err)
{
    const transcript *said = &t->said;
    size_t same = 0;
    while (same < n && same < said->n_text && text[same] == said->text[same])
        same++;
    int64_t k = said->n_marks;
    while (k && said->marks[k - 1].text > same)
        k--;
    for (;; k--) {
        mark at = k ? said->marks[k - 1] : (mark){0, 0};
        int32_t *tail;
        int64_t n_tail;
        int rc = kvd_tokenize(t->m, text + at.text, n - at.text, KVD_TOKENIZE_SPECIAL | (k ? 0u : KVD_TOKENIZE_BOS), &tail, &n_tail, err);
        if (rc)
            return rc;
        if (k && !(n_tail && is_control(t->m, tail[0]))) {
            kvd_ids_free(tail);
            continue;
        }
        *ids = malloc((size_t)(at.ids + n_tail + 1) * sizeof **ids);
        if (*ids) {
            if (at.ids) /* else there may be none at all */
                memcpy(*ids, said->ids, (size_t)at.ids * sizeof **ids);
            memcpy(*ids + at.ids, tail, (size_t)n_tail * sizeof **ids);
        }
        kvd_ids_free(tail);
        *n_ids = at.ids + n_tail;
        *n_marks = k;
        return *ids ? 0 : KVD_E_NOMEM;
    }
}

/* The transcript becomes the rendering and the answer, as templates will show it
 * again. Its ids are taken. */
static int record(transcript *said, const char *text, size_t n_text, int32_t *ids, int64_t n_ids, int64_t n_marks,
                  const kvd_result *r, const char *content)
{
    /* An end token is said again by the template, in its own way. A stop string
     * is cut out of the text but not out of the tokens: no place to cut both. */
    int64_t n_answer = r->n_tokens - (r->stop_reason == KVD_STOP_END);
    bool both = r->stop_reason != KVD_STOP_STRING;
    size_t n_content = strlen(content);
    char *all = malloc(n_text + n_content + 1);
    int32_t *all_ids = realloc(ids, (size_t)(n_ids + n_answer + 1) * sizeof *ids);
    mark *marks = realloc(said->marks, (size_t)(n_marks + 1) * sizeof *marks);
    if (marks)
        said->marks = marks;
    if (!all || !all_ids || !marks) {
        free(all);
        free(all_ids ? all_ids : ids);
        return no_memory();
    }
    memcpy(all, text, n_text);
    memcpy(all + n_text, content, n_content);
    memcpy(all_ids + n_ids, r->tokens, (size_t)n_answer * sizeof *ids);
    free(said->text);
    free(said->ids);
    said->text = all;
    said->n_text = n_text + n_content;
    said->ids = all_ids;
    said->n_ids = n_ids + n_answer;
    if (both)
        marks[n_marks++] = (mark){said->n_text, said->n_ids};
    said->n_marks = n_marks;
    return 0;
}

/* ---- a turn ----------------------------------------------------------------- */

/* Rewind the session to where it parts from ids; at least one token is left to feed. */
static int rewind_to_common(talk *t, const int32_t *ids, int64_t n, int64_t *common, kvd_error *err)
{
    const int32_t *have;
    int64_t n_have = kvd_session_tokens(t->s, &have), k = 0;
    while (k < n_have && k < n - 1 && have[k] == ids[k])
        k++;
    if (k < n_have && cli_lossy(t->c->so.policy))
        k = 0; /* what it forgot is not there to go back to */
    *common = k;
    return k < n_have ? kvd_session_rewind(t->s, k, err) : 0;
}

static int64_t recomputed(const talk *t)
{
    kvd_session_stats st;
    kvd_session_get_stats(t->s, &st);
    return st.recomputed_tokens;
}

/* A prompt of n tokens and the least answer pass the longest context. */
static int refuse(const talk *t, int64_t n, int64_t least, int64_t most, bool trained)
{
    int64_t now, peak, budget;
    char size[32];
    kvd_memory_context(t->m, &now, &peak, &budget);
    return cli_fail(EXIT_RESOURCES, "not sent: the conversation would have %lld tokens and the answer %lld or more, the longest context is %lld (%s%s); %s",
                    (long long)n, (long long)least, (long long)most, trained ? "what the model was trained for" : "T_max of the budget of ",
                    trained ? "" : cli_size(budget, size),
                    t->n_turns > 1 ? "/reset begins anew" : trained ? "a shorter message may fit" : "a shorter message or a larger --kv-budget may fit");
}

/* Generate, with as much of max_tokens as there is room for. What the budget has
 * room for the library knows best: it is asked, before any work, by a refusal. */
static int generate(talk *t, const int32_t *ids, int64_t n, kvd_generate_options *o, kvd_result *r, talk_cost *cost)
{
    kvd_error err = {0};
    kvd_model_info info;
    kvd_model_get_info(t->m, &info);
    int64_t want = o->max_tokens, room = info.trained_context_tokens - n, kept;
    int64_t least = want > 0 && want < LEAST_ANSWER ? want : LEAST_ANSWER;
    if (room < least)
        return refuse(t, n, least, info.trained_context_tokens, true);
    o->max_tokens = want < 0 || want > room ? room : want;
    int rc = rewind_to_common(t, ids, n, &kept, &err);
    if (!rc)
        rc = kvd_generate(t->s, ids + kept, n - kept, o, r, &err);
    if (rc == KVD_E_BUDGET && !r->n_tokens && err.max_tokens - n < o->max_tokens) {
        room = err.max_tokens - n;
        if (room < least)
            return refuse(t, n, least, err.max_tokens, false);
        kvd_result_free(r);
        o->max_tokens = room;
        rc = kvd_generate(t->s, ids + kept, n - kept, o, r, &err);
    }
    cost->kept_tokens = kept;
    cost->new_tokens = n - kept;
    cost->stop = rc == KVD_E_CANCELLED ? KVD_STOP_INTERRUPTED : r->stop_reason;
    cost->context_full = !rc && o->max_tokens != want && r->stop_reason == KVD_STOP_LENGTH;
    cost->cancelled = rc == KVD_E_CANCELLED && r->n_tokens == 0;
    if (rc == KVD_E_BUDGET)
        return cli_fail(EXIT_RESOURCES, "%s: %s; /reset begins anew", r->n_tokens ? "the answer breaks off" : "not sent", err.message);
    if (rc == KVD_E_IO) /* no file of the user's: there is just no disk to be had */
        return cli_fail(EXIT_RESOURCES, "not sent: %s", err.message);
    return rc && rc != KVD_E_CANCELLED ? cli_error("", &err) : 0;
}

/* Answer a prompt, and record what was said. ids are taken. */
static int answer(talk *t, const char *text, size_t n_text, int32_t *ids, int64_t n, int64_t n_marks,
                  kvd_generate_options *o, talk_cost *cost)
{
    kvd_result r = {0};
    int64_t before = recomputed(t);
    int code = generate(t, ids, n, o, &r, cost), stored = 1;
    cli_progress_clear();
    cost->answer_tokens = r.n_tokens;
    cost->recomputed_tokens = recomputed(t) - before;
    cost->prefill_s = r.prefill_s;
    cost->decode_s = r.decode_s;
    memcpy(cost->receipt, r.receipt, sizeof cost->receipt);
    if (r.n_tokens)
        stored = push_turn(t, "assistant", content_of(&r));
    if (stored) {
        free(ids);
        pop_turn(t); /* the question without an answer */
    } else {
        stored = record(&t->said, text, n_text, ids, n, n_marks, &r, t->turns[t->n_turns - 1].content);
        if (stored && n_marks < t->said.n_marks) /* what was said before still holds, as a beginning */
            t->said.n_marks = n_marks;
    }
    if (stored && r.n_tokens && !code)
        code = stored;
    kvd_result_free(&r);
    return code;
}

int talk_say(talk *t, const char *message, kvd_token_fn on_token, kvd_progress_fn progress, void *ctx, talk_cost *cost)
{
    kvd_error err = {0};
    char *text = NULL;
    size_t n_text = 0;
    int32_t *ids = NULL;
    int64_t n = 0, n_marks = 0;
    *cost = (talk_cost){0};
    int code = push_turn(t, "user", strdup(message));
    if (code)
        return code;
    int rc = render(t, &text, &n_text, &err);
    if (!rc)
        rc = encode(t, text, n_text, &ids, &n, &n_marks, &err);
    if (rc) {
        code = err.code ? cli_error("", &err) : no_memory();
        free(ids);
        pop_turn(t);
    } else {
        kvd_generate_options o = t->c->go;
        o.on_token = on_token;
        o.ctx = ctx;
        kvd_session_set_progress(t->s, progress, ctx);
        code = answer(t, text, n_text, ids, n, n_marks, &o, cost);
    }
    kvd_text_free(text);
    return code;
}

/* ---- the whole --------------------------------------------------------------- */

static void forget(transcript *said)
{
    free(said->text);
    free(said->ids);
    free(said->marks);
    *said = (transcript){0};
}

void talk_reset(talk *t)
{
    while (t->n_turns)
        pop_turn(t);
    forget(&t->said);
    kvd_session_rewind(t->s, 0, NULL);
}

int talk_set_system(talk *t, const char *text)
{
    char *copy = text ? strdup(text) : NULL;
    if (text && !copy)
        return no_memory();
    free(t->system);
    t->system = copy;
    return 0;
}

const char *talk_system(const talk *t) { return t->system; }
const kvd_session *talk_session(const talk *t) { return t->s; }
int64_t talk_turns(const talk *t) { return t->n_turns; }

int talk_create(talk **out, kvd_model *m, const cli *c)
{
    kvd_error err = {0};
    char *text = NULL;
    size_t n;
    talk *t = calloc(1, sizeof *t);
    if (!t)
        return no_memory();
    t->m = m;
    t->c = c;
    int code = c->system ? talk_set_system(t, c->system) : 0;
    if (!code)
        code = push_turn(t, "user", strdup(""));
    if (!code) {
        if (render(t, &text, &n, &err))
            code = cli_fail(kvd_error_exit(err.code), "%s%s", err.message, c->template_name ? "" : " (--template NAME)");
        pop_turn(t);
    }
    kvd_text_free(text);
    if (!code && kvd_session_create(&t->s, m, &c->so, &err))
        code = cli_error("", &err);
    if (code)
        talk_free(&t);
    else
        *out = t;
    return code;
}

void talk_free(talk **pt)
{
    talk *t = *pt;
    *pt = NULL;
    if (!t)
        return;
    while (t->n_turns)
        pop_turn(t);
    free(t->turns);
    free(t->system);
    forget(&t->said);
    kvd_session_free(&t->s);
    free(t);
}
