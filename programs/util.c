/* What the commands share: files, signals, progress, JSON, the process's memory. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "cli.h"

double cli_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- files -------------------------------------------------------------------------- */

#define MAX_TEXT ((size_t)1 << 30)

static int read_stream(FILE *f, const char *name, char **text, size_t *n)
{
    size_t cap = 1 << 16, len = 0;
    char *p = malloc(cap);
    for (;;) {
        if (!p)
            return cli_fail(EXIT_RESOURCES, "%s: out of memory", name);
        errno = 0;
        size_t got = fread(p + len, 1, cap - len - 1, f);
        len += got;
        if (ferror(f)) {
            free(p);
            return cli_fail(EXIT_BAD_FILE, "%s: %s", name, strerror(errno ? errno : EIO));
        }
        if (got == 0)
            break;
        if (len > MAX_TEXT) {
            free(p);
            return cli_fail(EXIT_BAD_FILE, "%s: more than %zu bytes of text", name, MAX_TEXT);
        }
        if (cap - len < 2) {
            char *q = realloc(p, cap *= 2);
            if (!q)
                free(p);
            p = q;
        }
    }
    p[len] = 0;
    *text = p;
    *n = len;
    return 0;
}

int cli_read_file(const char *path, char **text, size_t *n)
{
    FILE *f = fopen(path, "rbe");
    if (!f)
        return cli_fail(EXIT_BAD_FILE, "%s: %s", path, strerror(errno));
    struct stat st;
    if (!fstat(fileno(f), &st) && S_ISDIR(st.st_mode)) {
        fclose(f);
        return cli_fail(EXIT_BAD_FILE, "%s: is a directory", path);
    }
    int rc = read_stream(f, path, text, n);
    fclose(f);
    return rc;
}

int cli_read_prompt(const cli *c, char **text, size_t *n)
{
    if (c->prompt) {
        *text = strdup(c->prompt);
        *n = strlen(c->prompt);
        return *text ? 0 : cli_fail(EXIT_RESOURCES, "out of memory");
    }
    if (c->file && strcmp(c->file, "-"))
        return cli_read_file(c->file, text, n);
    if ((fcntl(STDIN_FILENO, F_GETFL) & O_ACCMODE) == O_WRONLY) /* or closed: kvd.c holds its place with such a file */
        return cli_fail(EXIT_USAGE, "no prompt: give -p TEXT or -f FILE (standard input can not be read)");
    return read_stream(stdin, "standard input", text, n);
}

/* ---- model ---------------------------------------------------------------------------- */

int cli_load(const cli *c, bool budget, kvd_model **m)
{
    kvd_error err;
    if (kvd_model_load(m, c->model, &c->mo, &err))
        return cli_file_error(c->model, &err);
    if (budget && !c->budget_given && kvd_memory_set_budget(*m, kvd_memory_available() / 2 + 1, &err)) {
        kvd_model_free(m);
        return cli_error("", &err);
    }
    cli_peak_reset();
    return 0;
}

/* mkdir -p; false if the folder is not there afterwards. */
static bool make_folders(char *path)
{
    for (char *p = path + 1; *p; p++)
        if (*p == '/') {
            *p = 0;
            mkdir(path, 0755);
            *p = '/';
        }
    return mkdir(path, 0700) == 0 || errno == EEXIST;
}

int cli_spill_dir(cli *c)
{
    const char *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    bool own = cache && *cache == '/', must = c->so.evict_to == KVD_EVICT_DISK && !c->so.spill_dir;
    if (!own && (!home || *home != '/'))
        return must ? cli_fail(EXIT_USAGE, "no HOME: give --spill-dir") : 0;
    int n = snprintf(c->cache_dir, sizeof c->cache_dir, "%s%s", own ? cache : home, own ? "/kvd" : "/.cache/kvd");
    errno = ENAMETOOLONG;
    if (n < 0 || (size_t)n >= sizeof c->cache_dir || !make_folders(c->cache_dir)) {
        int e = errno;
        *c->cache_dir = 0;
        return must ? cli_fail(EXIT_RESOURCES, "the cache folder: %s; give --spill-dir", strerror(e)) : 0;
    }
    if (c->so.evict_to != KVD_EVICT_RECOMPUTE && !c->so.spill_dir && !cli_lossy(c->so.policy))
        c->so.spill_dir = c->cache_dir;
    return 0;
}

/* ---- signals and progress ---------------------------------------------------------------- */

static volatile sig_atomic_t interrupted;

static void on_interrupt(int sig)
{
    (void)sig;
    if (interrupted)
        _exit(EXIT_INTERRUPTED);
    interrupted = 1;
}

void cli_catch_interrupt(void)
{
    struct sigaction sa = {.sa_handler = on_interrupt, .sa_flags = SA_RESTART};
    sigemptyset(&sa.sa_mask);
    sigaction(SIGINT, &sa, NULL);
    sigaction(SIGTERM, &sa, NULL);
}

bool cli_interrupted(void) { return interrupted != 0; }

static bool bar_allowed = true, bar_shown;
static double bar_begun, bar_last;

void cli_progress_allow(bool on) { bar_allowed = on && isatty(STDERR_FILENO); }

void cli_progress_clear(void)
{
    if (bar_shown)
        fputs("\r\033[K", stderr);
    bar_shown = false;
}

int cli_progress(void *ctx, int64_t done, int64_t total, int64_t rows, int64_t recomputed)
{
    (void)ctx;
    if (interrupted)
        return 1;
    double now = cli_seconds();
    if (done == 0)
        bar_begun = now;
    if (!bar_allowed || now - bar_begun < 0.5 || now - bar_last < 0.1 || !done)
        return 0;
    bar_last = now;
    bar_shown = true;
    double part = (double)done / (double)total, rate = (double)rows * part / (now - bar_begun);
    char bar[21];
    for (int i = 0; i < 20; i++)
        bar[i] = i < (int)(part * 20) ? '#' : '.';
    bar[20] = 0;
    fprintf(stderr, "\r\033[K[%s] %lld tokens", bar, (long long)rows);
    if (recomputed)
        fprintf(stderr, " (%lld recomputed)", (long long)recomputed);
    fprintf(stderr, ", %.0f/s, %.0f s left", rate, (now - bar_begun) * (1 - part) / part);
    fflush(stderr);
    return 0;
}

int cli_lab_progress(void *ctx, const char *what, int64_t done, int64_t total)
{
    (void)ctx;
    if (interrupted)
        return 1;
    double now = cli_seconds();
    if (bar_begun == 0)
        bar_begun = now;
    if (!what || !bar_allowed || now - bar_begun < 0.5 || now - bar_last < 0.1)
        return 0;
    bar_last = now;
    bar_shown = true;
    char bar[21];
    for (int i = 0; i < 20; i++)
        bar[i] = total > 0 && i < (int)((double)done / (double)total * 20) ? '#' : '.';
    bar[20] = 0;
    fprintf(stderr, "\r\033[K[%s] %s, %lld of %lld, %.0f s", bar, what, (long long)done, (long long)total, now - bar_begun);
    fflush(stderr);
    return 0;
}

/* ---- what is said of a session before it begins ---------------------------------------------- */

int64_t cli_max_tokens(const cli *c, const kvd_model *m)
{
    int64_t now, peak, budget;
    kvd_plan plan;
    kvd_memory_context(m, &now, &peak, &budget);
    kvd_plan_session(m, &c->so, 0, 1, budget, &plan);
    return plan.max_tokens;
}

void cli_first_line(const cli *c, const kvd_model *m)
{
    int64_t now, peak, budget;
    char size[32];
    kvd_memory_context(m, &now, &peak, &budget);
    const char *tier = c->so.evict_to == KVD_EVICT_DISK                                       ? "disk"
                       : c->so.evict_to == KVD_EVICT_AUTO && c->rates.disk_read_bytes_s > 0 ? "auto"
                                                                                            : "recompute";
    if (c->so.policy == KVD_POLICY_FULL)
        fprintf(stderr, "kvd: full");
    else if (cli_lossy(c->so.policy)) /* not to be taken for the exact engine */
        fprintf(stderr, "kvd: %s, LOSSY: a token sees %lld positions at most%s, the others are forgotten", kvd_policy_name(c->so.policy),
                (long long)c->so.kv_tokens, c->so.positions == KVD_POSITIONS_RENUMBER ? ", renumbered" : "");
    else
        fprintf(stderr, "kvd: kv-direct (%s%s%s%s)", tier, c->tier ? ": " : "", c->tier ? c->tier : "", c->so.kv_tokens >= 0 ? ", --kv-tokens" : "");
    fprintf(stderr, ", budget %s, T_max %lld tokens", budget ? cli_size(budget, size) : "none", (long long)cli_max_tokens(c, m));
    if (c->expected_tokens_s > 0)
        fprintf(stderr, ", about %.*f tokens/s expected", c->expected_tokens_s < 10 ? 1 : 0, c->expected_tokens_s);
    fputc('\n', stderr);
}

/* ---- the process's memory ------------------------------------------------------------------ */

static int64_t status_bytes(const char *key)
{
    FILE *f = fopen("/proc/self/status", "re");
    char line[256];
    long long kib = -1;
    while (f && fgets(line, sizeof line, f))
        if (!strncmp(line, key, strlen(key)))
            kib = strtoll(line + strlen(key), NULL, 10);
    if (f)
        fclose(f);
    return kib < 0 ? -1 : kib * 1024;
}

void cli_cpu_name(char *out, size_t size)
{
    char line[512];
    FILE *f = fopen("/proc/cpuinfo", "re");
    *out = 0;
    while (f && !*out && fgets(line, sizeof line, f)) {
        char *colon = strchr(line, ':');
        if (!strncmp(line, "model name", 10) && colon) {
            line[strcspn(line, "\n")] = 0;
            snprintf(out, size, "%s", colon[1] ? colon + 2 : "");
        }
    }
    if (f)
        fclose(f);
}

int64_t cli_peak_bytes(void) { return status_bytes("VmHWM:"); }
int64_t cli_resident_bytes(void) { return status_bytes("VmRSS:"); }

void cli_peak_reset(void)
{
    int fd = open("/proc/self/clear_refs", O_WRONLY | O_CLOEXEC);
    if (fd >= 0) {
        ssize_t n = write(fd, "5", 1);
        (void)n;
        close(fd);
    }
}

/* ---- output ---------------------------------------------------------------------------------- */

int cli_close_stdout(void)
{
    if (fflush(stdout) || ferror(stdout))
        return errno == EPIPE ? EXIT_BAD_FILE : cli_fail(EXIT_BAD_FILE, "standard output: %s", strerror(errno ? errno : EIO));
    return EXIT_OK;
}

int cli_print_json(json_t *object)
{
    char *text = json_dumps(object, JSON_INDENT(2) | JSON_REAL_PRECISION(15));
    json_decref(object);
    if (!text)
        return cli_fail(EXIT_RESOURCES, "out of memory: the JSON output");
    puts(text);
    free(text);
    return cli_close_stdout();
}

json_t *cli_json_ids(const int32_t *ids, int64_t n)
{
    json_t *a = json_array();
    for (int64_t i = 0; i < n; i++)
        json_array_append_new(a, json_integer(ids[i]));
    return a;
}

bool cli_put_text(FILE *f, const char *text, size_t n)
{
    const unsigned char *p = (const unsigned char *)text;
    if (!isatty(fileno(f)))
        return fwrite(text, 1, n, f) == n;
    for (size_t i = 0, k; i < n; i += k) {
        k = lab_utf8(text + i, n - i);
        bool plain = k && (!lab_is_control(text + i, k) || p[i] == '\n' || p[i] == '\t');
        k = k ? k : 1;
        if (plain)
            fwrite(p + i, 1, k, f);
        else /* U+0080..U+009F by number, as its last byte is one too */
            fprintf(f, "\\x%02x", p[i + k - 1]);
    }
    return !ferror(f);
}

json_t *cli_json_ledger(const kvd_model *m)
{
    json_t *o = json_object();
    const char *name;
    bool context;
    int64_t now, peak;
    for (int i = 0; kvd_memory_account(m, i, &name, &context, &now, &peak); i++)
        json_object_set_new(o, name, json_pack("{s:I, s:I}", "now_bytes", (json_int_t)now, "peak_bytes", (json_int_t)peak));
    return o;
}

json_t *cli_json_model(const kvd_model *m)
{
    kvd_model_info info;
    kvd_model_get_info(m, &info);
    json_t *o = json_object();
    json_object_set_new(o, "name", lab_text(info.name, strlen(info.name)));
    json_object_set_new(o, "architecture", json_string(info.architecture));
    json_object_set_new(o, "fingerprint", json_string(info.fingerprint));
    return o;
}
