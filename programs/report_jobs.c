/* What a report consists of, and the files that keep what came out.
 *
 * A file is written whole or not at all (a new one, renamed), so what is there is
 * complete; whether it still is what this report asks for its own head says. */
#define _GNU_SOURCE
#include <dirent.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/utsname.h>
#include <time.h>
#include <unistd.h>

#include "report.h"
#include "lab/whole_file.h"

/* Costs: seconds of SmolLM2-135M on two cores, of the report without --quick or --full. */
const report_job report_jobs[] = {
    {"memory", "Bytes per token", {"info", NULL}, JOB_OWN, 0},
    {"verify", "Reconstruction, and receipts", {"verify", NULL}, JOB_FULL | JOB_WINDOW, 60},
    {"generation", "Cached against from scratch", {"lab", "generation", NULL}, 0, 5},
    {"patch", "The residual of the last position", {"patch", "--at", "last", NULL}, 0, 5},
    {"patch-all", "The residuals of all positions", {"patch", "--at", "all", NULL}, 0, 5},
    {"patch-kv", "Keys and values", {"patch", "--what", "kv", NULL}, 0, 10},
    {"perplexity", "Perplexity", {"eval", "perplexity", "--policies", "paper", NULL}, JOB_TEXT, 120},
    {"hellaswag", "HellaSwag", {"eval", "hellaswag", "--policies", "paper", NULL}, JOB_TASKS, 120},
    {"multiturn", "A conversation", {"lab", "multiturn", NULL}, 0, 30},
    {"baselines", "Policies by budget", {"lab", "baselines", NULL}, JOB_OWN_TEXT, 120},
    {"sweep", "Windows", {"lab", "sweep", NULL}, JOB_OWN_TEXT, 30},
    {"rank", "Effective rank", {"lab", "rank", NULL}, 0, 5},
    {"truncate", "Truncated projections", {"lab", "truncate", NULL}, 0, 60},
    {"latency", "Times", {"lab", "latency", NULL}, 0, 60},
    {NULL, NULL, {NULL}, 0, 0},
};

const report_job *report_find_job(const char *name)
{
    for (const report_job *j = report_jobs; j->name; j++)
        if (!strcmp(j->name, name))
            return j;
    return NULL;
}

bool report_can_run(const report *r, const report_job *j)
{
    return !((j->flags & JOB_TEXT) && !r->text) && !((j->flags & JOB_TASKS) && !r->tasks);
}

void report_slug(const char *text, char out[SLUG])
{
    size_t n = 0;
    for (; text[n] && n < SLUG - 1; n++) {
        char c = text[n];
        bool plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '-' || (c == '.' && n > 0);
        out[n] = plain ? c : '_';
    }
    out[n] = 0;
    if (!n)
        memcpy(out, "_", 2);
}

void report_model_slug(const char *file, char out[SLUG])
{
    char name[SLUG];
    snprintf(name, sizeof name, "%s", file);
    size_t n = strlen(name);
    if (n > 5 && !strcmp(name + n - 5, ".gguf"))
        name[n - 5] = 0;
    report_slug(name, out);
}

/* ---- the command of a job ------------------------------------------------------------- */

typedef struct {
    char *item[MOST_ARGS];
    int n;
    bool ok;
} words;

__attribute__((format(printf, 2, 3))) static void add(words *w, const char *format, ...)
{
    va_list ap;
    char *text = NULL;
    va_start(ap, format);
    int n = vasprintf(&text, format, ap);
    va_end(ap);
    w->ok = w->ok && n >= 0 && w->n < MOST_ARGS - 1;
    if (!w->ok) {
        if (n >= 0)
            free(text);
        return;
    }
    w->item[w->n++] = text;
    w->item[w->n] = NULL;
}

static void words_free(words *w)
{
    for (int i = 0; i < w->n; i++)
        free(w->item[i]);
}

static const char *base_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

/* How much of a data file: enough for two digits and an error of a few per cent, all
 * with --full, little with --quick. */
static void add_limits(const report *r, const report_job *j, words *w)
{
    if (r->c->full)
        return;
    if (!strcmp(j->name, "perplexity"))
        add(w, "--chunks"), add(w, r->c->quick ? "2" : "20");
    if (!strcmp(j->name, "hellaswag"))
        add(w, "--tasks"), add(w, r->c->quick ? "20" : "400");
}

/* To run (paths), or to be written down (names). */
static words command_of(const report *r, const report_model *m, const report_job *j, bool paths)
{
    static const char *const isas[] = {"auto", "scalar", "avx2", "avx512", "neon"};
    const cli *c = r->c;
    words w = {.ok = true};
    const char *data = j->flags & JOB_TASKS ? c->hellaswag : j->flags & (JOB_TEXT | JOB_OWN_TEXT) ? c->file : NULL;
    add(&w, "kvd");
    for (int i = 0; j->args[i]; i++)
        add(&w, "%s", j->args[i]);
    add(&w, "-m"), add(&w, "%s", paths ? m->path : m->file);
    if (j->flags & JOB_OWN)
        return w; /* nothing else says it to this command */
    if (data)
        add(&w, "-f"), add(&w, "%s", paths ? data : base_name(data));
    add_limits(r, j, &w);
    if (c->quick)
        add(&w, "--quick");
    if (c->full && (j->flags & JOB_FULL))
        add(&w, "--full");
    if ((j->flags & JOB_WINDOW) && json_integer_value(json_object_get(m->info, "window_tokens")) > 0)
        add(&w, "--rope"), add(&w, "window-relative");
    if (c->mo.n_threads)
        add(&w, "--threads"), add(&w, "%d", c->mo.n_threads);
    if (c->mo.isa != KVD_ISA_AUTO)
        add(&w, "--cpu"), add(&w, "%s", isas[c->mo.isa]);
    if (c->so.spill_dir && !(j->flags & JOB_WINDOW))
        add(&w, "--spill-dir"), add(&w, "%s", paths ? c->so.spill_dir : base_name(c->so.spill_dir));
    add(&w, "--json");
    if (paths)
        add(&w, "--quiet");
    return w;
}

/* ---- entries --------------------------------------------------------------------------------- */

static json_t *today(void)
{
    char text[16] = "";
    time_t now = time(NULL);
    struct tm tm;
    if (gmtime_r(&now, &tm))
        strftime(text, sizeof text, "%Y-%m-%d", &tm);
    return json_string(text);
}

/* What a time depends on beside the program. */
static json_t *this_machine(const report *r)
{
    struct utsname u;
    char system[sizeof u.sysname + sizeof u.release + sizeof u.machine + 2] = "";
    if (!uname(&u))
        snprintf(system, sizeof system, "%s %s %s", u.sysname, u.release, u.machine);
    return json_pack("{s:o, s:I, s:I, s:o}", "cpu", lab_text(r->cpu, strlen(r->cpu)), "cpus", (json_int_t)sysconf(_SC_NPROCESSORS_ONLN), "memory_bytes",
                     (json_int_t)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE), "system", lab_text(system, strlen(system)));
}

json_t *report_entry(const report *r, const report_model *m, const report_job *j)
{
    words w = command_of(r, m, j, false);
    json_t *o = json_object(), *command = json_array();
    const json_t *data = j->flags & JOB_TASKS ? r->tasks : j->flags & (JOB_TEXT | JOB_OWN_TEXT) ? r->text : NULL;
    for (int i = 0; i < w.n; i++)
        json_array_append_new(command, lab_text(w.item[i], strlen(w.item[i])));
    words_free(&w);
    json_object_set_new(o, "report", json_integer(REPORT_FORMAT));
    json_object_set_new(o, "experiment", json_string(j->name));
    json_object_set_new(o, "command", command);
    json_object_set_new(o, "data", data ? json_deep_copy(data) : json_null());
    json_object_set(o, "model", m->info);
    json_object_set_new(o, "machine", this_machine(r));
    json_object_set_new(o, "version", json_string(KVD_VERSION));
    json_object_set_new(o, "date", today());
    return o;
}

static char *path_of(const report *r, const report_model *m, const report_job *j)
{
    char *path = NULL;
    return asprintf(&path, "%s/data/%s-%s.json", r->dir, m->slug, j->name) < 0 ? NULL : path;
}

static const json_t *fingerprint_of(const json_t *entry)
{
    return json_object_get(json_object_get(entry, "model"), "fingerprint");
}

bool report_is_done(const report *r, const report_model *m, const report_job *j)
{
    static const char *const same[] = {"report", "experiment", "command", "data"};
    char *path = path_of(r, m, j);
    json_t *there = path ? json_load_file(path, JSON_ALLOW_NUL, NULL) : NULL, *ours = report_entry(r, m, j);
    bool done = json_is_object(json_object_get(there, "result")) && json_equal(fingerprint_of(there), fingerprint_of(ours));
    for (size_t i = 0; done && i < sizeof same / sizeof same[0]; i++)
        done = json_equal(json_object_get(there, same[i]), json_object_get(ours, same[i]));
    json_decref(there);
    json_decref(ours);
    free(path);
    return done;
}

static int write_entry(const report *r, const report_model *m, const report_job *j, const json_t *entry)
{
    char *path = path_of(r, m, j);
    kvd_error err = {.message = "out of memory"};
    int rc = path ? lab_file_json(path, entry, JSON_INDENT(1) | JSON_REAL_PRECISION(15), &err) : KVD_E_NOMEM;
    int code = rc ? cli_fail(EXIT_RESOURCES, "%s/data/%s-%s.json: %s", r->dir, m->slug, j->name, err.message) : 0;
    free(path);
    return code;
}

static void fail_entry(report *r, json_t *entry, const char *why)
{
    json_object_set_new(entry, "failed", lab_text(why, strlen(why)));
    r->failed = true;
}

/* What the child left, into the entry. */
static void take(report *r, json_t *entry, report_child *c)
{
    json_error_t e = {.text = ""};
    json_t *result = c->exit_code == 0 || c->exit_code == EXIT_CHECK ? json_loadb(c->out ? c->out : "", c->n_out, JSON_ALLOW_NUL, &e) : NULL;
    json_object_set_new(entry, "seconds", json_real(c->seconds));
    json_object_set_new(entry, "exit", json_integer(c->exit_code));
    if (json_is_object(result)) {
        json_object_del(result, "paper_rows"); /* made with the page, by the rules of that day */
        json_object_set(entry, "result", result);
    } else
        fail_entry(r, entry, *c->message ? c->message : *e.text ? e.text : "no JSON came out");
    if (c->exit_code)
        r->failed = true;
    json_decref(result);
}

/* ---- running ------------------------------------------------------------------------------------ */

typedef struct {
    const report *r;
    const char *what;
    double begun, last;
} watching;

/* One line on a terminal: where we are, and for how long yet. */
static void show(void *ctx)
{
    watching *w = ctx;
    const report *r = w->r;
    double now = cli_seconds();
    if (r->c->quiet || !isatty(STDERR_FILENO) || now - w->last < 0.5)
        return;
    w->last = now;
    fprintf(stderr, "\r\033[K[%d of %d] %s, %.0f s", r->n_done + 1, r->n_todo, w->what, now - w->begun);
    if (r->units_done > 0) {
        double left = (r->units - r->units_done) * r->seconds_done / r->units_done - (now - w->begun);
        if (left > 90)
            fprintf(stderr, "; about %.0f min left", left / 60);
        else if (left > 0)
            fprintf(stderr, "; about %.0f s left", left);
    }
    fflush(stderr);
}

static void say_done(const report *r, const char *what, const json_t *entry)
{
    if (r->c->quiet)
        return;
    if (isatty(STDERR_FILENO))
        fputs("\r\033[K", stderr);
    const char *why = json_string_value(json_object_get(entry, "failed"));
    fprintf(stderr, "kvd: [%d of %d] %s: ", r->n_done + 1, r->n_todo, what);
    if (why) {
        fputs("FAILED: ", stderr);
        cli_put_text(stderr, why, strlen(why));
        fputc('\n', stderr);
    } else
        fprintf(stderr, "%.1f s%s\n", json_number_value(json_object_get(entry, "seconds")),
                json_integer_value(json_object_get(entry, "exit")) ? ", A CHECK FAILED" : "");
}

static int run_child(report *r, const report_model *m, const report_job *j, const char *what, json_t *entry)
{
    words w = command_of(r, m, j, true);
    report_child child = {.message = "out of memory"};
    watching watch = {.r = r, .what = what, .begun = cli_seconds()};
    if (!w.ok || report_spawn(r->self, w.item, show, &watch, &child)) {
        child.exit_code = EXIT_RESOURCES;
        fail_entry(r, entry, child.message);
    } else if (!cli_interrupted())
        take(r, entry, &child);
    words_free(&w);
    free(child.out);
    return cli_interrupted() || child.exit_code == EXIT_INTERRUPTED ? EXIT_INTERRUPTED : 0;
}

int report_run(report *r, const report_model *m, const report_job *j)
{
    json_t *entry = report_entry(r, m, j);
    char what[SLUG + 64];
    int code = 0;
    double begun = cli_seconds();
    snprintf(what, sizeof what, "%s: %s", m->slug, j->name);
    if (j->flags & JOB_OWN) {
        json_object_set(entry, "result", m->memory);
        json_object_set_new(entry, "seconds", json_real(0));
        json_object_set_new(entry, "exit", json_integer(0));
    } else
        code = run_child(r, m, j, what, entry);
    if (!code)
        code = write_entry(r, m, j, entry);
    if (!code) {
        say_done(r, what, entry);
        r->n_done++;
        r->seconds_done += cli_seconds() - begun;
    }
    json_decref(entry);
    return code;
}

/* ---- what is there -------------------------------------------------------------------------------- */

static int ends_with_json(const struct dirent *d)
{
    size_t n = strlen(d->d_name);
    return n > 5 && d->d_name[0] != '.' && !strcmp(d->d_name + n - 5, ".json");
}

static bool is_entry(const json_t *o)
{
    const char *name = json_string_value(json_object_get(o, "experiment"));
    return json_integer_value(json_object_get(o, "report")) == REPORT_FORMAT && name && report_find_job(name) &&
           json_is_string(json_object_get(json_object_get(o, "model"), "file")) &&
           (json_is_object(json_object_get(o, "result")) || json_is_string(json_object_get(o, "failed")));
}

/* Small models first; of one size by name; of one model in the order of jobs. */
static int compare(const void *pa, const void *pb)
{
    const json_t *a = *(json_t *const *)pa, *b = *(json_t *const *)pb;
    const json_t *ma = json_object_get(a, "model"), *mb = json_object_get(b, "model");
    json_int_t na = json_integer_value(json_object_get(ma, "n_params")), nb = json_integer_value(json_object_get(mb, "n_params"));
    if (na != nb)
        return na < nb ? -1 : 1;
    int c = strcmp(json_string_value(json_object_get(ma, "file")), json_string_value(json_object_get(mb, "file")));
    if (c)
        return c;
    const report_job *ja = report_find_job(json_string_value(json_object_get(a, "experiment")));
    const report_job *jb = report_find_job(json_string_value(json_object_get(b, "experiment")));
    return ja < jb ? -1 : ja > jb;
}

static json_t *sorted(json_t *list)
{
    size_t n = json_array_size(list);
    json_t **items = malloc((n + 1) * sizeof(json_t *)), *out = json_array();
    for (size_t i = 0; items && i < n; i++)
        items[i] = json_array_get(list, i);
    if (items)
        qsort(items, n, sizeof items[0], compare);
    for (size_t i = 0; items && i < n; i++)
        json_array_append(out, items[i]);
    free(items);
    json_decref(list);
    return out;
}

json_t *report_load(const report *r, json_t **problems)
{
    char *folder = NULL;
    struct dirent **names = NULL;
    json_t *list = json_array();
    *problems = json_array();
    int n = asprintf(&folder, "%s/data", r->dir) < 0 ? -1 : scandir(folder, &names, ends_with_json, alphasort);
    for (int i = 0; i < n; i++) {
        char *path = NULL;
        json_error_t e = {.text = "out of memory"};
        json_t *o = asprintf(&path, "%s/%s", folder, names[i]->d_name) < 0 ? NULL : json_load_file(path, JSON_ALLOW_NUL, &e);
        if (is_entry(o))
            json_array_append(list, o);
        else {
            char text[512];
            int k = snprintf(text, sizeof text, "data/%s: %s", names[i]->d_name, o ? "not an entry of a report" : e.text);
            json_array_append_new(*problems, lab_text(text, k < (int)sizeof text ? (size_t)k : sizeof text - 1));
        }
        json_decref(o);
        free(path);
        free(names[i]);
    }
    free(names);
    free(folder);
    return sorted(list);
}
