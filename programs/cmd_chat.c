/* kvd chat: a conversation at a terminal, or line by line through pipes.
 *
 * Answers go to standard output and nothing else does; everything that is said
 * about them goes to standard error. At a turn's end the conversation either has
 * room for the next one or says, in numbers, that it has not: nothing of it is
 * ever dropped to make room. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "chat_line.h"
#include "chat_talk.h"

typedef struct {
    cli c;
    kvd_model *m;
    talk *talk;
    liner *line;
    bool stats, quit;
    bool begun, failed; /* the answer: something came; standard output takes no more */
    char last;          /* byte of the answer */
    bool have_cost, told_disk;
    talk_cost cost;     /* of the last answer */
} chat;

/* ---- an answer ------------------------------------------------------------------ */

static int on_token(void *ctx, int32_t id, const char *text, size_t n)
{
    chat *k = ctx;
    (void)id;
    if (!k->begun)
        cli_progress_clear();
    k->begun = true;
    if (n) {
        k->last = text[n - 1];
        k->failed = !cli_put_text(stdout, text, n) || fflush(stdout);
    }
    return k->failed || line_stop_asked();
}

/* The bar is for the prompt: later passes, even slow ones, would draw it into the
 * line of the answer. */
static int on_progress(void *ctx, int64_t done, int64_t total, int64_t rows, int64_t recomputed)
{
    const chat *k = ctx;
    if (line_stop_asked())
        return 1;
    return k->begun ? 0 : cli_progress(NULL, done, total, rows, recomputed);
}

static double rate(int64_t tokens, double s) { return s > 0 ? (double)tokens / s : 0; }

static void print_stats(const chat *k)
{
    const talk_cost *c = &k->cost;
    kvd_session_stats st;
    kvd_session_get_stats(talk_session(k->talk), &st);
    fprintf(stderr, "kvd: %lld tokens, %.1f/s; prompt %lld new + %lld kept, %.1f/s; %lld resident, %lld evicted%s, %lld recomputed\n",
            (long long)c->answer_tokens, rate(c->answer_tokens - 1, c->decode_s), (long long)c->new_tokens,
            (long long)c->kept_tokens, rate(c->new_tokens, c->prefill_s), (long long)st.resident_tokens,
            (long long)st.evicted_tokens, strcmp(st.tier, "disk") ? "" : " to disk", (long long)c->recomputed_tokens);
}

/* What of the answer a reader should know and can not see. */
static void print_end(chat *k)
{
    const talk_cost *c = &k->cost;
    kvd_session_stats st;
    if (k->c.quiet)
        return;
    kvd_session_get_stats(talk_session(k->talk), &st);
    if (st.disk_error && !k->told_disk)
        fprintf(stderr, "kvd: the disk tier was given up, recomputing instead: %s\n", st.disk_error);
    k->told_disk = st.disk_error != NULL;
    if (c->cancelled)
        fputs("kvd: cancelled; the message is not part of the conversation\n", stderr);
    else if (c->context_full)
        fprintf(stderr, "kvd: the answer is cut off, the context is full (%lld tokens); /reset begins anew\n",
                (long long)(c->kept_tokens + c->new_tokens + c->answer_tokens));
    else if (c->stop == KVD_STOP_LENGTH)
        fprintf(stderr, "kvd: the answer is cut off after %lld tokens (-n)\n", (long long)c->answer_tokens);
    else if (c->stop == KVD_STOP_INTERRUPTED && line_is_terminal(k->line))
        fputs("kvd: stopped\n", stderr);
}

static int say(chat *k, const char *text, size_t n)
{
    if (strlen(text) < n)
        return cli_fail(EXIT_BAD_FILE, "not sent: the message has a byte 0");
    k->begun = k->failed = false;
    k->last = 0;
    line_answer_begin();
    int code = talk_say(k->talk, text, on_token, on_progress, k, &k->cost);
    bool answered = k->cost.answer_tokens > 0;
    if (answered && k->last != '\n')
        putchar('\n');
    int closed = cli_close_stdout();
    line_answer_end(); /* not before: a reader of our output may be slow */
    if (closed) {
        k->quit = true;
        return closed;
    }
    if (!code)
        print_end(k);
    k->have_cost = k->have_cost || answered;
    if (answered && k->stats)
        print_stats(k);
    if (answered && k->c.receipt)
        fprintf(stderr, "receipt %s\n", k->cost.receipt);
    return code;
}

/* ---- commands ------------------------------------------------------------------- */

static int do_help(chat *k, const char *rest);

static int do_reset(chat *k, const char *rest)
{
    (void)rest;
    talk_reset(k->talk);
    if (!k->c.quiet)
        fputs("kvd: a new conversation\n", stderr);
    return 0;
}

static int do_system(chat *k, const char *rest)
{
    const char *now = talk_system(k->talk);
    if (!*rest) {
        fputs(now ? "" : "kvd: no system message (the template may have its own)", stderr);
        cli_put_text(stderr, now ? now : "", now ? strlen(now) : 0);
        fputc('\n', stderr);
        return 0;
    }
    int code = talk_set_system(k->talk, strcmp(rest, "\"\"") != 0 ? rest : NULL);
    if (!code && !k->c.quiet)
        fprintf(stderr, "kvd: system message %s%s\n", talk_system(k->talk) ? "set" : "removed",
                talk_turns(k->talk) ? "; with the next message the conversation is computed anew (/reset forgets it)" : "");
    return code;
}

static int do_memory(chat *k, const char *rest)
{
    (void)rest;
    kvd_session_stats st;
    int64_t now, peak, budget;
    char a[32], b[32], d[32];
    const char *name;
    bool context;
    kvd_memory_context(k->m, &now, &peak, &budget);
    kvd_session_get_stats(talk_session(k->talk), &st);
    fprintf(stderr, "conversation  %lld tokens (%lld resident, %lld evicted), T_max %lld\n", (long long)st.n_tokens,
            (long long)st.resident_tokens, (long long)st.evicted_tokens, (long long)cli_max_tokens(&k->c, k->m));
    fprintf(stderr, "context       %s now, %s peak, budget %s\n", cli_size(now, a), cli_size(peak, b), budget ? cli_size(budget, d) : "none");
    for (int i = 0; kvd_memory_account(k->m, i, &name, &context, &now, &peak); i++)
        if (now || peak)
            fprintf(stderr, "  %-11s %s now, %s peak%s\n", name, cli_size(now, a), cli_size(peak, b), context ? "" : " (outside the budget)");
    return 0;
}

static int do_stats(chat *k, const char *rest)
{
    (void)rest;
    k->stats = !k->stats;
    if (k->stats && k->have_cost)
        print_stats(k);
    else
        fprintf(stderr, "kvd: statistics after each answer: %s\n", k->stats ? "on" : "off");
    return 0;
}

static int do_quit(chat *k, const char *rest)
{
    (void)rest;
    k->quit = true;
    return 0;
}

static const struct {
    const char *name, *what;
    int (*run)(chat *, const char *);
} commands[] = {
    {"help", "this list", do_help},
    {"reset", "forget the conversation; the system message stays", do_reset},
    {"system", "TEXT: set the system message; \"\": remove it; nothing: show it", do_system},
    {"memory", "context memory: budget, use, resident and evicted tokens", do_memory},
    {"stats", "tokens, rates and what was recomputed after each answer: on, off", do_stats},
    {"quit", "end; Ctrl-D does too", do_quit},
};
enum { N_COMMANDS = sizeof commands / sizeof commands[0] };

static int do_help(chat *k, const char *rest)
{
    (void)rest;
    for (int i = 0; i < N_COMMANDS; i++)
        fprintf(stderr, "/%-8s %s\n", commands[i].name, commands[i].what);
    fputs("//text    a message that begins with a slash\n", stderr);
    if (line_is_terminal(k->line))
        fputs("Ctrl-C stops an answer. A backslash at the end goes on in the next line.\n", stderr);
    return 0;
}

/* Is a line "/word" or "/word rest"? A path, "/etc/hosts", is not. */
static bool is_command(const char *line, size_t *word)
{
    *word = strspn(line + 1, "abcdefghijklmnopqrstuvwxyz");
    char after = line[1 + *word];
    return line[0] == '/' && *word && (after == 0 || after == ' ' || after == '\t');
}

static int command(chat *k, const char *line, size_t word)
{
    const char *rest = line + 1 + word;
    rest += strspn(rest, " \t");
    for (int i = 0; i < N_COMMANDS; i++)
        if (strlen(commands[i].name) == word && !memcmp(line + 1, commands[i].name, word))
            return commands[i].run(k, rest);
    return cli_fail(EXIT_USAGE, "no command /%.*s; /help lists them, // begins a message with a slash", (int)(word < 40 ? word : 40), line + 1);
}

/* ---- the loop -------------------------------------------------------------------- */

static int one_line(chat *k, const char *text, size_t n)
{
    size_t word;
    if (text[strspn(text, " \t")] == 0 && strlen(text) == n)
        return 0;
    if (text[0] == '/' && is_command(text, &word))
        return command(k, text, word);
    bool slash = text[0] == '/' && text[1] == '/';
    return say(k, text + slash, n - slash);
}

/* At a terminal a person has seen what went wrong; a script asks for the code. */
static int loop(chat *k)
{
    int first = 0, interrupts = 0;
    while (!k->quit) {
        const char *text;
        size_t n;
        int code = 0;
        switch (line_read(k->line, &text, &n)) {
        case LINE_TEXT:
            interrupts = 0;
            code = one_line(k, text, n);
            break;
        case LINE_INTERRUPT:
            if (interrupts++)
                return line_is_terminal(k->line) ? 0 : first;
            if (!k->c.quiet)
                fputs("kvd: Ctrl-C again, or Ctrl-D, ends\n", stderr);
            break;
        case LINE_TERMINATE:
            return EXIT_INTERRUPTED;
        case LINE_ERROR:
            return EXIT_BAD_FILE;
        default:
            k->quit = true;
        }
        if (code && k->quit)
            return code; /* nobody listens any more */
        if (code && !first)
            first = code;
    }
    return line_is_terminal(k->line) ? 0 : first;
}

static int64_t trained_context(const kvd_model *m)
{
    kvd_model_info i;
    kvd_model_get_info(m, &i);
    return i.trained_context_tokens;
}

int cmd_chat(int argc, char **argv)
{
    chat k = {0};
    int rc = cli_parse(&k.c, argc, argv, "chat",
                       OPT_MODEL | OPT_MACHINE | OPT_MEMORY | OPT_NUMBERS | OPT_GENERATE | OPT_OUTPUT | OPT_CHAT, 0);
    if (rc)
        return rc;
    if (!k.c.n_given)
        k.c.go.max_tokens = 512;
    k.stats = k.c.stats;
    cli_progress_allow(!k.c.quiet);
    if ((rc = cli_spill_dir(&k.c)) || (rc = cli_load(&k.c, true, &k.m)))
        return rc;
    rc = cli_choose_tier(&k.c, k.m, 1, trained_context(k.m));
    k.c.expected_tokens_s = 0; /* a conversation that grows has no one rate */
    if (!rc)
        rc = talk_create(&k.talk, k.m, &k.c);
    if (!rc && !(k.line = line_open()))
        rc = cli_fail(EXIT_RESOURCES, "out of memory");
    if (!rc) {
        if (!k.c.quiet)
            cli_first_line(&k.c, k.m);
        if (!k.c.quiet && line_is_terminal(k.line))
            fputs("kvd: /help lists commands; Ctrl-C stops an answer; Ctrl-D ends\n", stderr);
        rc = loop(&k);
    }
    line_close(&k.line);
    talk_free(&k.talk);
    kvd_model_free(&k.m);
    return rc;
}
