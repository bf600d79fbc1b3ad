/* Lines for kvd chat, and the signals that go with them.
 *
 * Input is waited for in one place, in ppoll with the signals let through there
 * and nowhere else while a line is read: a Ctrl-C can not be lost between looking
 * for it and waiting. libedit, where it is built in and both ends are terminals,
 * gets its characters from there too. Its own handling of signals is not used: it
 * passes them on to the whole process group, and after a Ctrl-C the line could
 * not be told from a finished one.
 *
 * Without libedit the terminal's own line discipline edits (and forgets the line
 * on Ctrl-C, as it should be). Not a terminal: plain lines of any length. */
#define _GNU_SOURCE
#include "chat_line.h"

#include <errno.h>
#include <langinfo.h>
#include <locale.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>
#include <wchar.h>
#ifdef KVD_HAVE_EDITLINE
#include <histedit.h>
#endif

#include "cli.h"

#define MAX_LINE ((size_t)1 << 26)

struct liner {
    bool terminal; /* standard input is one */
    FILE *out;     /* prompts; a terminal, or NULL */
    const char *prompt;
    unsigned char in[4096];
    size_t at, n; /* in[at..n) is still to be taken */
    size_t n_typed_ahead; /* bytes that come next and were typed when the line discipline had the terminal */
    bool end, failed;
    char *line; /* [cap] */
    size_t len, cap;
#ifdef KVD_HAVE_EDITLINE
    EditLine *el; /* NULL: plain reading */
    History *history;
    mbstate_t decoding;
#endif
};

/* ---- signals ---------------------------------------------------------------- */

static volatile sig_atomic_t stop_asked, terminate_asked, answering, resized, suspend_asked;

/* What is typed during an answer is kept for the next line, and shown there. */
static struct termios echoing;
static volatile sig_atomic_t silenced;

static void silence(bool on)
{
    if (on && isatty(STDIN_FILENO) && !tcgetattr(STDIN_FILENO, &echoing) && echoing.c_lflag & ECHO) {
        struct termios t = echoing;
        t.c_lflag &= ~(tcflag_t)ECHO;
        silenced = !tcsetattr(STDIN_FILENO, TCSANOW, &t);
    } else if (!on && silenced) {
        tcsetattr(STDIN_FILENO, TCSANOW, &echoing);
        silenced = 0;
    }
}

static void on_signal(int sig)
{
    if (sig == SIGWINCH)
        resized = 1;
    else if (sig == SIGTSTP && !answering)
        suspend_asked = 1; /* the editor has the terminal: it gives it back first */
    else if (sig == SIGTSTP) {
        silence(false);
        kill(getpid(), SIGSTOP);
        silence(true);
    } else {
        if (answering && stop_asked) {
            silence(false);
            _exit(EXIT_INTERRUPTED);
        }
        stop_asked = 1;
        if (sig == SIGTERM)
            terminate_asked = 1;
    }
}

static const int handled[] = {SIGINT, SIGTERM, SIGWINCH, SIGTSTP};
enum { N_HANDLED = sizeof handled / sizeof handled[0] };

/* The last two are a terminal's business only. */
static void catch_signals(bool terminal)
{
    struct sigaction sa = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
    sigemptyset(&sa.sa_mask);
    for (int i = 0; i < (terminal ? N_HANDLED : 2); i++)
        sigaction(handled[i], &sa, NULL);
}

void line_answer_begin(void)
{
    silence(true);
    answering = 1;
}

void line_answer_end(void)
{
    answering = 0;
    silence(false);
    if (!terminate_asked)
        stop_asked = 0;
}

bool line_stop_asked(void) { return stop_asked != 0; }

#ifdef KVD_HAVE_EDITLINE
static void lend_terminal(liner *l, bool away)
{
    if (l->el)
        el_set(l->el, EL_PREP_TERM, !away);
    if (l->el && !away)
        el_set(l->el, EL_REFRESH);
}

static void resize_editor(liner *l)
{
    if (l->el)
        el_resize(l->el);
}
#else
static void lend_terminal(liner *l, bool away) { (void)l, (void)away; }
static void resize_editor(liner *l) { (void)l; }
#endif

/* ---- bytes -------------------------------------------------------------------- */

static void after_signals(liner *l)
{
    if (suspend_asked) {
        lend_terminal(l, true);
        kill(getpid(), SIGSTOP);
        lend_terminal(l, false);
    }
    if (resized)
        resize_editor(l);
    suspend_asked = resized = 0;
}

/* More of the input. False: its end, an error, or a signal that ends the line. */
static bool fill(liner *l)
{
    sigset_t block, before;
    sigemptyset(&block);
    for (int i = 0; i < N_HANDLED; i++)
        sigaddset(&block, handled[i]);
    sigprocmask(SIG_BLOCK, &block, &before);
    int ready = 0;
    while (!stop_asked && ready <= 0) {
        after_signals(l);
        struct pollfd p = {.fd = STDIN_FILENO, .events = POLLIN};
        ready = ppoll(&p, 1, NULL, &before);
        if (ready < 0 && errno != EINTR)
            break;
    }
    sigprocmask(SIG_SETMASK, &before, NULL);
    if (stop_asked)
        return false;
    ssize_t got;
    do
        got = read(STDIN_FILENO, l->in, sizeof l->in);
    while (got < 0 && errno == EINTR && !stop_asked);
    if (got < 0 && errno == EINTR)
        return false;
    l->at = 0;
    l->n = got > 0 ? (size_t)got : 0;
    l->end = got == 0;
    for (size_t i = 0; i < l->n && l->n_typed_ahead; i++, l->n_typed_ahead--)
        if (l->in[i] == 0)
            l->in[i] = 4; /* what is left of a Ctrl-D there */
    if (got < 0 && l->terminal && errno == EIO) /* the terminal is gone */
        l->end = true;
    else if (got < 0) {
        l->failed = true;
        cli_fail(EXIT_BAD_FILE, "standard input: %s", strerror(errno));
    }
    return got > 0;
}

static bool more(liner *l) { return l->at < l->n || fill(l); }

static bool append(liner *l, const void *bytes, size_t n)
{
    if (l->cap - l->len < n + 1) {
        size_t cap = 2 * (l->len + n) + 256;
        char *p = cap > MAX_LINE ? NULL : realloc(l->line, cap);
        if (!p) {
            l->failed = true;
            cli_fail(EXIT_RESOURCES, "standard input: a line of more than %zu bytes does not fit", l->len);
            return false;
        }
        l->line = p;
        l->cap = cap;
    }
    memcpy(l->line + l->len, bytes, n);
    l->len += n;
    l->line[l->len] = 0;
    return true;
}

/* ---- one line ------------------------------------------------------------------ */

/* Append the next line with its end. False: nothing more, or see stop_asked. */
static bool plain_line(liner *l)
{
    bool any = false;
    if (l->out) {
        fputs(l->prompt, l->out);
        fflush(l->out);
    }
    while (more(l)) {
        const unsigned char *from = l->in + l->at, *nl = memchr(from, '\n', l->n - l->at);
        size_t n = nl ? (size_t)(nl - from) + 1 : l->n - l->at;
        any = true;
        l->at += n;
        if (!append(l, from, n) || nl)
            return !l->failed;
    }
    return any && l->end;
}

#ifdef KVD_HAVE_EDITLINE

static char *el_prompt(EditLine *el)
{
    static char text[8];
    liner *l;
    el_get(el, EL_CLIENTDATA, &l);
    snprintf(text, sizeof text, "%s", l->prompt);
    return text;
}

/* The terminal is the editor's before the prompt says so: libedit takes it only for the
 * first character, and a Ctrl-D that comes in between is one for the line discipline,
 * which leaves a 0 in its place. So does a Ctrl-D that was typed during an answer. */
static void take_terminal(liner *l)
{
    int n = 0;
    el_set(l->el, EL_PREP_TERM, 1);
    l->n_typed_ahead = ioctl(STDIN_FILENO, FIONREAD, &n) ? 0 : (size_t)n;
}

static int el_character(EditLine *el, wchar_t *out)
{
    liner *l;
    el_get(el, EL_CLIENTDATA, &l);
    while (more(l)) {
        size_t k = mbrtowc(out, (const char *)&l->in[l->at++], 1, &l->decoding);
        if (k != (size_t)-1 && k != (size_t)-2)
            return 1;
        if (k == (size_t)-1) /* no character of this locale: left out */
            l->decoding = (mbstate_t){0};
    }
    if (stop_asked) { /* as if by Enter: the cursor leaves the line at its end */
        *out = L'\n';
        return 1;
    }
    return l->end ? 0 : -1;
}

static bool edited_line(liner *l)
{
    int n = 0;
    take_terminal(l);
    const char *text = el_gets(l->el, &n);
    if (stop_asked || l->failed)
        return false;
    if (!text || n <= 0) {
        l->end = true; /* Ctrl-D */
        return false;
    }
    return append(l, text, (size_t)n);
}

/* History gets what was typed, whole. */
static void remember(liner *l)
{
    HistEvent event;
    if (l->el && l->len && l->line[strspn(l->line, " \t")])
        history(l->history, &event, H_ENTER, l->line);
}

static void open_editor(liner *l)
{
    const char *term = getenv("TERM");
    if (!l->terminal || !l->out || !term || !*term || !strcmp(term, "dumb"))
        return;
    /* libedit reads text by the locale; where that is plain "C", as in many
     * containers, people still type UTF-8. */
    setlocale(LC_CTYPE, "");
    if (strcmp(nl_langinfo(CODESET), "UTF-8") != 0)
        setlocale(LC_CTYPE, "C.UTF-8");
    HistEvent event;
    l->history = history_init();
    l->el = l->history ? el_init("kvd", stdin, l->out, stderr) : NULL;
    if (!l->el)
        return;
    history(l->history, &event, H_SETSIZE, 1000);
    history(l->history, &event, H_SETUNIQUE, 1);
    el_set(l->el, EL_CLIENTDATA, l);
    el_set(l->el, EL_PROMPT, el_prompt);
    el_set(l->el, EL_EDITOR, "emacs");
    el_set(l->el, EL_HIST, history, l->history);
    el_set(l->el, EL_BIND, "^R", "em-inc-search-prev", NULL);
    el_set(l->el, EL_BIND, "^D", "em-delete-or-list", NULL);
    el_source(l->el, NULL); /* the user's own .editrc */
    el_set(l->el, EL_GETCFN, el_character);
}

static void close_editor(liner *l)
{
    if (l->el)
        el_end(l->el);
    if (l->history)
        history_end(l->history);
}

static bool is_edited(const liner *l) { return l->el != NULL; }
static bool next_line(liner *l) { return l->el ? edited_line(l) : plain_line(l); }

#else
static void remember(liner *l) { (void)l; }
static void open_editor(liner *l) { (void)l; }
static void close_editor(liner *l) { (void)l; }
static bool is_edited(const liner *l) { (void)l; return false; }
static bool next_line(liner *l) { return plain_line(l); }
#endif

static bool cut_end(liner *l, char end)
{
    if (!l->len || l->line[l->len - 1] != end)
        return false;
    l->line[--l->len] = 0;
    return true;
}

line_status line_read(liner *l, const char **text, size_t *n)
{
    l->len = 0;
    l->prompt = "> ";
    for (;;) {
        bool got = !l->end && next_line(l);
        if (l->failed)
            return LINE_ERROR;
        if (stop_asked) {
            if (l->out && !is_edited(l))
                fputc('\n', l->out);
            stop_asked = 0;
            return terminate_asked ? LINE_TERMINATE : LINE_INTERRUPT;
        }
        if (!got) {
            if (l->out)
                fputc('\n', l->out);
            return LINE_END;
        }
        if (cut_end(l, '\n'))
            cut_end(l, '\r');
        if (!l->terminal || !cut_end(l, '\\'))
            break;
        if (!append(l, "\n", 1))
            return LINE_ERROR;
        l->prompt = ". ";
    }
    remember(l);
    if (!l->line && !append(l, "", 0))
        return LINE_ERROR;
    *text = l->line;
    *n = l->len;
    return LINE_TEXT;
}

bool line_is_terminal(const liner *l) { return l->terminal; }

liner *line_open(void)
{
    liner *l = calloc(1, sizeof *l);
    if (!l)
        return NULL;
    l->terminal = isatty(STDIN_FILENO);
    if (l->terminal)
        l->out = isatty(STDOUT_FILENO) ? stdout : isatty(STDERR_FILENO) ? stderr : NULL;
    catch_signals(l->terminal);
    open_editor(l);
    return l;
}

void line_close(liner **pl)
{
    liner *l = *pl;
    *pl = NULL;
    if (!l)
        return;
    close_editor(l);
    free(l->line);
    free(l);
}
