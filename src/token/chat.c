/* Chat templates. A file carries its template as a program in Jinja. It is not
 * run: running it would need an interpreter, and make every model file a script.
 * It is looked at for the words that tell one known template from another, and
 * what that template does is done here. A template with words that none of the
 * known ones has (a default system prompt of its own, say) is not recognised:
 * better no chat than one that the model was not trained for.
 *
 * "The template" below is the model author's; differences from it:
 * - BOS at the very beginning is left to the encoder.
 * - Tools are not supported.
 * - llama3.1: the date is always the template's own default. Newer ones ask the
 *   clock, and then the same conversation would not have the same tokens tomorrow.
 * - gemma: a system message goes in front of the first user message, as with
 *   Gemma 3; the template of Gemma 2 refuses one. */
#include "token/chat.h"

#include <string.h>
#include <utf8proc.h>

#include "base/error.h"

const char *kvd__chat_name(kvd_chat c)
{
    static const char *const names[] = {
#define KVD_X(id, name) name,
        KVD_CHATS(KVD_X)
#undef KVD_X
    };
    return c >= 0 && c < KVD_CHAT_COUNT ? names[c] : "none";
}

kvd_chat kvd__chat_find(const char *name)
{
    for (int c = 0; c < (int)KVD_CHAT_COUNT; c++)
        if (!strcmp(name, kvd__chat_name((kvd_chat)c)))
            return (kvd_chat)c;
    return KVD_CHAT_NONE;
}

/* --- recognition --- */

typedef struct {
    const char *data;
    size_t n;
} view;

static const char *find(view v, const char *what)
{
    size_t n = strlen(what);
    for (size_t i = 0; i + n <= v.n; i++)
        if (v.data[i] == what[0] && !memcmp(v.data + i, what, n))
            return v.data + i;
    return NULL;
}

static bool has(view v, const char *what) { return find(v, what) != NULL; }

/* The end of what begins at p, or NULL. An end of line in it may be one or be
 * written \n, and either quote will do: both depend on how the file came to be. */
static const char *match_phrase(const char *p, const char *end, const char *phrase)
{
    for (; *phrase; phrase++) {
        if (p == end)
            return NULL;
        if (*phrase == '\n' && *p == '\\' && end - p > 1 && p[1] == 'n')
            p += 2;
        else if (*p == *phrase || (*phrase == '\'' && *p == '"'))
            p++;
        else
            return NULL;
    }
    return p;
}

static const char *find_phrase(view v, const char *phrase)
{
    for (const char *p = v.data, *end = p + v.n, *after; p < end; p++)
        if ((after = match_phrase(p, end, phrase)) != NULL)
            return after;
    return NULL;
}

/* Does the template write out a system prompt: the words <|im_start|>system, an
 * end of line, and then not the end of the string? */
static bool chatml_has_default(view v)
{
    for (const char *p; (p = find_phrase(v, "<|im_start|>system\n")) != NULL;) {
        v = (view){p, v.n - (size_t)(p - v.data)};
        if (v.n && *p != '\'' && *p != '"')
            return true;
    }
    return false;
}

/* What a template must say, and what it must not. The phrases hold what is put
 * around the contents, so a template that has them all does what is done below;
 * the words that it lacks are those of relatives that do something else. The
 * first that fits is it. */
static const struct {
    kvd_chat chat;
    const char *has[4], *lacks[6];
} signatures[] = {
    {KVD_CHAT_SMOLLM2,
     {"<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n",
      "'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>'"},
     {"tools", "<think>"}},
    {KVD_CHAT_QWEN25,
     {"<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n",
      "'<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n'"},
     {"<think>"}},
    {KVD_CHAT_QWEN3,
     {"<|im_start|>", "enable_thinking is defined and enable_thinking is false", "ns.last_query_index",
      "'<think>\n\n</think>\n\n'"},
     {"'<think>\n' }}", "SmolLM"}},
    {KVD_CHAT_CHATML,
     {"<|im_start|>", "<|im_end|>"},
     {"<|im_sep|>", "<think>", "tools", "trim", "strip(", "bos_token"}},
    {KVD_CHAT_DEEPSEEK_R1, {"{{'<｜User｜>' + message['content']}}", "{{'<｜Assistant｜><think>\n'}}"}, {NULL}},
    {KVD_CHAT_LLAMA31,
     {"<|start_header_id|>system<|end_header_id|>\n\n", "'Cutting Knowledge Date: December 2023\n'",
      "'Today Date: ' + date_string + '\n\n'", "message['content'] | trim + '<|eot_id|>'"},
     {NULL}},
    {KVD_CHAT_LLAMA3,
     {"'<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>'"},
     {"tools", "functions"}},
    {KVD_CHAT_GEMMA, {"'<start_of_turn>' + role + '\n'", "'model'", "| trim", "<end_of_turn>\n'"}, {"tools"}},
    {KVD_CHAT_LLAMA2,
     {"'<<SYS>>\n' + system_message + '\n<</SYS>>\n\n' + message['content']", "bos_token + '[INST] ' + content",
      "+ ' ' + eos_token", "system_message = false"},
     {"<<SYS>>' in", "<<SYS>>' not in"}},
    {KVD_CHAT_MISTRAL,
     {"'[INST]' + system_message + '\n\n' + message['content'] + '[/INST]'",
      "'[INST]' + message['content'] + '[/INST]'",
      "{{- message['content'] + eos_token}}", "loop.last and system_message is defined"},
     {NULL}},
    {KVD_CHAT_MISTRAL_V3,
     {"'[INST] ' + system_message + '\n\n' + message['content'] + '[/INST]'",
      "'[INST] ' + message['content'] + '[/INST]'",
      "{{- ' ' + message['content']|trim + eos_token}}", "loop.last and system_message is defined"},
     {NULL}},
    {KVD_CHAT_MISTRAL_V2,
     {"' [INST] ' + system_message + '\n\n' + message['content'] + ' [/INST]'",
      "' [INST] ' + message['content'] + ' [/INST]'", "{{- ' ' + message['content'] + eos_token}}",
      "loop.first and system_message is defined"},
     {NULL}},
    {KVD_CHAT_MISTRAL_V1,
     {"{{ bos_token }}", "{{ '[INST] ' + message['content'] + ' [/INST]' }}", "{{ message['content'] + eos_token}}",
      "raise_exception"},
     {"system"}},
};

kvd_chat kvd__chat_detect(const char *template_text, size_t n)
{
    view v = {template_text, n};
    for (size_t i = 0; i < sizeof signatures / sizeof signatures[0]; i++) {
        bool fits = true;
        for (size_t k = 0; fits && k < 4 && signatures[i].has[k]; k++)
            fits = find_phrase(v, signatures[i].has[k]);
        for (size_t k = 0; fits && k < 6 && signatures[i].lacks[k]; k++)
            fits = !find_phrase(v, signatures[i].lacks[k]);
        if (fits && signatures[i].chat == KVD_CHAT_CHATML && chatml_has_default(v))
            fits = false;
        if (fits)
            return signatures[i].chat;
    }
    return KVD_CHAT_NONE;
}

/* --- rendering --- */

typedef struct {
    kvd_ledger *ledger;
    kvd_error *err;
    char *data; /* one byte more than n, which stays 0 */
    size_t n, cap;
    int rc; /* the first failure; what is put after it is dropped */
} text;

static void put(text *t, view v)
{
    if (t->rc)
        return;
    if (v.n >= t->cap - t->n) {
        size_t cap = (t->n + v.n) * 2 + 1;
        char *p = kvd__realloc(t->ledger, KVD_ACC_HOST, t->data, cap, t->err);
        if (!p) {
            t->rc = KVD_E_NOMEM;
            return;
        }
        t->data = p;
        t->cap = cap;
    }
    memcpy(t->data + t->n, v.data, v.n);
    t->n += v.n;
}

static view str(const char *s) { return (view){s, strlen(s)}; }
static void puts_(text *t, const char *s) { put(t, str(s)); }

static bool is_role(const kvd_chat_message *m, const char *role) { return !strcmp(m->role, role); }

/* Python's str.strip(), which Jinja's trim is. */
static bool is_python_space(utf8proc_int32_t c)
{
    return (c >= 9 && c <= 13) || (c >= 0x1c && c <= 0x20) || c == 0x85 || c == 0xa0 || c == 0x1680 ||
           (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f || c == 0x205f || c == 0x3000;
}

static view trim(view v)
{
    const utf8proc_uint8_t *p = (const utf8proc_uint8_t *)v.data;
    size_t from = 0, to = v.n;
    utf8proc_int32_t c;
    utf8proc_ssize_t k;
    while (from < to && (k = utf8proc_iterate(p + from, (utf8proc_ssize_t)(to - from), &c)) > 0 && is_python_space(c))
        from += (size_t)k;
    for (;;) {
        size_t at = to;
        while (at > from && to - at < 4 && (p[--at] & 0xc0) == 0x80)
            ;
        if (at == to || utf8proc_iterate(p + at, (utf8proc_ssize_t)(to - at), &c) != (utf8proc_ssize_t)(to - at) ||
            !is_python_space(c))
            return (view){v.data + from, to - from};
        to = at;
    }
}

static view strip_newlines(view v, bool left, bool right)
{
    while (left && v.n && v.data[0] == '\n')
        v = (view){v.data + 1, v.n - 1};
    while (right && v.n && v.data[v.n - 1] == '\n')
        v.n--;
    return v;
}

/* What is after the last `mark`, or everything. */
static view after_last(view v, const char *mark)
{
    for (const char *p; (p = find(v, mark)) != NULL;) {
        p += strlen(mark);
        v = (view){p, v.n - (size_t)(p - v.data)};
    }
    return v;
}

static view before_first(view v, const char *mark)
{
    const char *p = find(v, mark);
    return p ? (view){v.data, (size_t)(p - v.data)} : v;
}

typedef struct {
    const kvd_chat_message *m;
    int64_t n;
    bool generate, thinking;
} talk;

/* Users and assistants must take turns from message `from` on. */
static int check_turns(text *t, const talk *k, int64_t from)
{
    for (int64_t i = from; i < k->n && !t->rc; i++)
        if (is_role(&k->m[i], (i - from) % 2 ? "assistant" : "user") == 0)
            t->rc = kvd__fail(t->err, KVD_E_ARG,
                              "message %lld is of role \"%.32s\"; this template wants user and assistant in turn",
                              (long long)i, k->m[i].role);
    return t->rc;
}

static void put_chatml(text *t, const char *role, view content)
{
    puts_(t, "<|im_start|>");
    puts_(t, role);
    puts_(t, "\n");
    put(t, content);
    puts_(t, "<|im_end|>\n");
}

static void render_chatml(text *t, const talk *k, const char *default_system)
{
    if (default_system && !is_role(&k->m[0], "system"))
        put_chatml(t, "system", str(default_system));
    for (int64_t i = 0; i < k->n; i++)
        put_chatml(t, k->m[i].role, str(k->m[i].content));
    if (k->generate)
        puts_(t, "<|im_start|>assistant\n");
}

/* Answers before the last question lose their thoughts; later ones keep them. */
static void put_qwen3_answer(text *t, const talk *k, int64_t i, bool after_question)
{
    view content = str(k->m[i].content), thoughts = {"", 0};
    if (has(content, "</think>")) {
        thoughts = strip_newlines(before_first(content, "</think>"), false, true);
        thoughts = strip_newlines(after_last(thoughts, "<think>"), true, false);
        content = strip_newlines(after_last(content, "</think>"), true, false);
    }
    puts_(t, "<|im_start|>assistant\n");
    if (after_question && (i == k->n - 1 || thoughts.n)) {
        puts_(t, "<think>\n");
        put(t, strip_newlines(thoughts, true, true));
        puts_(t, "\n</think>\n\n");
        content = strip_newlines(content, true, false);
    }
    put(t, content);
    puts_(t, "<|im_end|>\n");
}

static bool is_tool_response(view v)
{
    static const char open[] = "<tool_response>", close[] = "</tool_response>";
    size_t a = sizeof open - 1, b = sizeof close - 1;
    return v.n >= b && !memcmp(v.data, open, a) && !memcmp(v.data + v.n - b, close, b);
}

static void render_qwen3(text *t, const talk *k)
{
    int64_t question = k->n - 1;
    for (int64_t i = k->n - 1; i >= 0; i--)
        if (is_role(&k->m[i], "user") && !is_tool_response(str(k->m[i].content))) {
            question = i;
            break;
        }
    for (int64_t i = 0; i < k->n; i++)
        if (is_role(&k->m[i], "assistant"))
            put_qwen3_answer(t, k, i, i > question);
        else
            put_chatml(t, k->m[i].role, str(k->m[i].content));
    if (k->generate)
        puts_(t, k->thinking ? "<|im_start|>assistant\n" : "<|im_start|>assistant\n<think>\n\n</think>\n\n");
}

static void render_deepseek_r1(text *t, const talk *k)
{
    for (int64_t i = k->n - 1; i >= 0; i--) /* the last one holds */
        if (is_role(&k->m[i], "system")) {
            puts_(t, k->m[i].content);
            break;
        }
    for (int64_t i = 0; i < k->n; i++) {
        if (is_role(&k->m[i], "user")) {
            puts_(t, "<｜User｜>");
            puts_(t, k->m[i].content);
        } else if (is_role(&k->m[i], "assistant")) {
            puts_(t, "<｜Assistant｜>");
            put(t, after_last(str(k->m[i].content), "</think>"));
            puts_(t, "<｜end▁of▁sentence｜>");
        }
    }
    if (k->generate)
        puts_(t, k->thinking ? "<｜Assistant｜><think>\n" : "<｜Assistant｜><think>\n</think>");
}

/* The system prompt and the question are stripped as one text; its left end is
 * a mark, so only the right one counts. */
static void cut_end(text *t, size_t from)
{
    if (t->rc)
        return;
    size_t n = from + trim((view){t->data + from, t->n - from}).n;
    memset(t->data + n, 0, t->n - n);
    t->n = n;
}

static void render_llama2(text *t, const talk *k)
{
    int64_t first = is_role(&k->m[0], "system");
    if (check_turns(t, k, first))
        return;
    for (int64_t i = first; i < k->n; i++) {
        view content = str(k->m[i].content);
        if (is_role(&k->m[i], "assistant")) {
            puts_(t, " ");
            put(t, trim(content));
            puts_(t, " </s>");
            continue;
        }
        puts_(t, i > first ? "<s>[INST] " : "[INST] ");
        size_t from = t->n;
        if (i == first && first) {
            puts_(t, "<<SYS>>\n");
            puts_(t, k->m[0].content);
            puts_(t, "\n<</SYS>>\n\n");
            put(t, content);
            cut_end(t, from);
        } else {
            put(t, trim(content));
        }
        puts_(t, " [/INST]");
    }
}

static void put_llama3(text *t, const char *role, view content)
{
    puts_(t, "<|start_header_id|>");
    puts_(t, role);
    puts_(t, "<|end_header_id|>\n\n");
    put(t, content);
    puts_(t, "<|eot_id|>");
}

static void render_llama3(text *t, const talk *k, bool dates)
{
    int64_t first = dates && is_role(&k->m[0], "system");
    if (dates) {
        puts_(t, "<|start_header_id|>system<|end_header_id|>\n\n"
                 "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n");
        if (first)
            put(t, trim(str(k->m[0].content)));
        puts_(t, "<|eot_id|>");
    }
    for (int64_t i = first; i < k->n; i++)
        put_llama3(t, k->m[i].role, trim(str(k->m[i].content)));
    if (k->generate)
        puts_(t, "<|start_header_id|>assistant<|end_header_id|>\n\n");
}

static void render_gemma(text *t, const talk *k)
{
    int64_t first = is_role(&k->m[0], "system");
    if (check_turns(t, k, first))
        return;
    for (int64_t i = first; i < k->n; i++) {
        puts_(t, is_role(&k->m[i], "assistant") ? "<start_of_turn>model\n" : "<start_of_turn>user\n");
        if (first && i == first) {
            puts_(t, k->m[0].content);
            puts_(t, "\n\n");
        }
        put(t, trim(str(k->m[i].content)));
        puts_(t, "<end_of_turn>\n");
    }
    if (k->generate)
        puts_(t, "<start_of_turn>model\n");
}

/* Four ways with spaces. The system prompt goes into the first question or the
 * last one, or is refused. */
static const struct {
    const char *question, *question_end, *answer;
    bool trim_answer;
    enum { SYSTEM_LAST, SYSTEM_FIRST, SYSTEM_REFUSED } system;
} mistrals[] = {
    [KVD_CHAT_MISTRAL - KVD_CHAT_MISTRAL] = {"[INST]", "[/INST]", "", false, SYSTEM_LAST},
    [KVD_CHAT_MISTRAL_V1 - KVD_CHAT_MISTRAL] = {"[INST] ", " [/INST]", "", false, SYSTEM_REFUSED},
    [KVD_CHAT_MISTRAL_V2 - KVD_CHAT_MISTRAL] = {" [INST] ", " [/INST]", " ", false, SYSTEM_FIRST},
    [KVD_CHAT_MISTRAL_V3 - KVD_CHAT_MISTRAL] = {"[INST] ", "[/INST]", " ", true, SYSTEM_LAST},
};

static void render_mistral(text *t, const talk *k, int version)
{
    int64_t first = mistrals[version].system != SYSTEM_REFUSED && is_role(&k->m[0], "system");
    if (check_turns(t, k, first))
        return;
    for (int64_t i = first; i < k->n; i++) {
        view content = str(k->m[i].content);
        if (is_role(&k->m[i], "assistant")) {
            puts_(t, mistrals[version].answer);
            put(t, mistrals[version].trim_answer ? trim(content) : content);
            puts_(t, "</s>");
            continue;
        }
        puts_(t, mistrals[version].question);
        if (first && i == (mistrals[version].system == SYSTEM_LAST ? k->n - 1 : first)) {
            puts_(t, k->m[0].content);
            puts_(t, "\n\n");
        }
        put(t, content);
        puts_(t, mistrals[version].question_end);
    }
}

static void render(text *t, kvd_chat c, const talk *k)
{
    switch (c) {
    case KVD_CHAT_CHATML:
        render_chatml(t, k, NULL);
        break;
    case KVD_CHAT_SMOLLM2:
        render_chatml(t, k, "You are a helpful AI assistant named SmolLM, trained by Hugging Face");
        break;
    case KVD_CHAT_QWEN25:
        render_chatml(t, k, "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.");
        break;
    case KVD_CHAT_QWEN3:
        render_qwen3(t, k);
        break;
    case KVD_CHAT_DEEPSEEK_R1:
        render_deepseek_r1(t, k);
        break;
    case KVD_CHAT_LLAMA2:
        render_llama2(t, k);
        break;
    case KVD_CHAT_LLAMA3:
    case KVD_CHAT_LLAMA31:
        render_llama3(t, k, c == KVD_CHAT_LLAMA31);
        break;
    case KVD_CHAT_GEMMA:
        render_gemma(t, k);
        break;
    case KVD_CHAT_MISTRAL:
    case KVD_CHAT_MISTRAL_V1:
    case KVD_CHAT_MISTRAL_V2:
    case KVD_CHAT_MISTRAL_V3:
        render_mistral(t, k, (int)c - KVD_CHAT_MISTRAL);
        break;
    default:
        t->rc = kvd__fail(t->err, KVD_E_ARG, "no chat template");
    }
}

int kvd__chat_render(kvd_chat c, const kvd_chat_message *messages, int64_t n_messages, bool add_generation,
                     bool thinking, kvd_ledger *l, char **out, size_t *n, kvd_error *err)
{
    if (n_messages < 1)
        return kvd__fail(err, KVD_E_ARG, "a chat of no messages");
    for (int64_t i = 0; i < n_messages; i++) {
        const kvd_chat_message *m = &messages[i];
        if (!m->role || !m->content || (!is_role(m, "system") && !is_role(m, "user") && !is_role(m, "assistant")))
            return kvd__fail(err, KVD_E_ARG, "message %lld: role \"%.32s\" is not system, user or assistant",
                             (long long)i, m->role ? m->role : "");
    }
    text t = {.ledger = l, .err = err, .cap = 256};
    t.data = kvd__alloc(l, KVD_ACC_HOST, t.cap, err);
    if (!t.data)
        return KVD_E_NOMEM;
    render(&t, c, &(talk){messages, n_messages, add_generation, thinking});
    if (t.rc) {
        kvd__free(t.data);
        return t.rc;
    }
    *out = t.data;
    *n = t.n;
    return 0;
}
