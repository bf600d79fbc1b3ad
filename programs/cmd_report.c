/* kvd report: every experiment on some models, and one page of what came out.
 *
 * Each experiment is a child process of this program, and what it printed is kept in
 * DIR/data. What is there already is not run again, so a report that was interrupted
 * goes on where it stopped, another model costs only its own experiments, and without a
 * model the page is made anew from the data alone. The page shows all that lies in DIR/data, also
 * of models that are not named this time. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "report.h"
#include "lab/whole_file.h"

static json_t *describe(const kvd_model_info *i, const char *file)
{
    json_t *o = json_pack("{s:s, s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "architecture", i->architecture, "fingerprint",
                          i->fingerprint, "n_params", (json_int_t)i->n_params, "weight_bytes", (json_int_t)i->weight_bytes, "n_layers",
                          (json_int_t)i->n_layers, "d_model", (json_int_t)i->d_model, "n_heads", (json_int_t)i->n_heads, "n_kv_heads",
                          (json_int_t)i->n_kv_heads, "d_head", (json_int_t)i->d_head, "n_vocab", (json_int_t)i->n_vocab, "window_tokens",
                          (json_int_t)i->window_tokens, "n_local_layers", (json_int_t)i->n_local_layers, "trained_context_tokens",
                          (json_int_t)i->trained_context_tokens);
    json_object_set_new(o, "file", lab_text(file, strlen(file)));
    json_object_set_new(o, "name", lab_text(i->name, strlen(i->name)));
    return o;
}

/* Load a model once, for its fingerprint and its shapes. */
static int add_model(report *r, const char *path)
{
    report_model *m = &r->models[r->n_models];
    kvd_model *model = NULL;
    kvd_model_info info;
    kvd_error err;
    const char *slash = strrchr(path, '/');
    *m = (report_model){.path = path, .file = slash ? slash + 1 : path};
    report_model_slug(m->file, m->slug);
    for (int i = 0; i < r->n_models; i++)
        if (!strcmp(r->models[i].slug, m->slug))
            return cli_fail(EXIT_USAGE, "two models are called %s: their files would be one", m->slug);
    if (kvd_model_load(&model, path, &r->c->mo, &err))
        return cli_file_error(path, &err);
    kvd_model_get_info(model, &info);
    m->info = describe(&info, m->file);
    m->memory = report_memory(model, &info);
    kvd_model_free(&model);
    r->n_models++;
    return 0;
}

/* What a data file is: its numbers depend on its bytes, not on its place. */
static int add_data(const char *path, json_t **out)
{
    char *text, hex[17];
    size_t n;
    if (!path)
        return 0;
    int code = cli_read_file(path, &text, &n);
    if (code)
        return code;
    const char *slash = strrchr(path, '/'), *file = slash ? slash + 1 : path;
    lab_hash(text, n, hex);
    *out = json_pack("{s:o, s:I, s:s}", "file", lab_text(file, strlen(file)), "bytes", (json_int_t)n, "hash", hex);
    free(text);
    return *out ? 0 : cli_fail(EXIT_RESOURCES, "out of memory");
}

static int make_folder(const char *dir, const char *name)
{
    char path[4200];
    struct stat st;
    int n = snprintf(path, sizeof path, "%s%s%s", dir, *name ? "/" : "", name);
    if (n < 0 || (size_t)n >= sizeof path)
        return cli_fail(EXIT_USAGE, "-o: the name is too long");
    for (char *p = path + 1; *p; p++)
        if (*p == '/') {
            *p = 0;
            mkdir(path, 0777); /* if this matters, the last one fails */
            *p = '/';
        }
    if ((mkdir(path, 0777) && errno != EEXIST) || access(path, W_OK | X_OK))
        return cli_fail(EXIT_BAD_FILE, "-o %s: %s", path, strerror(errno));
    if (stat(path, &st) || !S_ISDIR(st.st_mode))
        return cli_fail(EXIT_BAD_FILE, "-o %s: is no folder", path);
    lab_file_clear(path); /* what a report that was killed was writing */
    return 0;
}

static int make_folders(const char *dir)
{
    int code = make_folder(dir, "");
    code = code ? code : make_folder(dir, "data");
    code = code ? code : make_folder(dir, "tsv");
    return code ? code : make_folder(dir, "png");
}

static bool has_data(const char *dir)
{
    char path[4200];
    int n = snprintf(path, sizeof path, "%s/data", dir);
    return n > 0 && (size_t)n < sizeof path && !access(path, R_OK | X_OK);
}

static int check(const cli *c)
{
    if (!c->output)
        return cli_fail(EXIT_USAGE, "no folder: -o DIR (kvd report --help)");
    if (c->quick && c->full)
        return cli_fail(EXIT_USAGE, "--quick and --full exclude each other");
    if (!c->n_models && !has_data(c->output))
        return cli_fail(EXIT_USAGE, "no model: -m FILE (without one the page is made of what is in DIR/data; kvd report --help)");
    for (int i = 0; i < c->n_again; i++)
        if (strcmp(c->again[i], "all") && !report_find_job(c->again[i])) {
            char names[256] = "all";
            for (const report_job *j = report_jobs; j->name; j++)
                snprintf(names + strlen(names), sizeof names - strlen(names), ", %s", j->name);
            return cli_fail(EXIT_USAGE, "--again: no experiment \"%.40s\" (%s)", c->again[i], names);
        }
    return 0;
}

static bool again(const cli *c, const report_job *j)
{
    for (int i = 0; i < c->n_again; i++)
        if (!strcmp(c->again[i], "all") || !strcmp(c->again[i], j->name))
            return true;
    return false;
}

/* About how long, in any unit: by the bytes that a token reads. */
static double units(const report_model *m, const report_job *j)
{
    return j->cost * json_number_value(json_object_get(m->info, "weight_bytes")) * 1e-8;
}

static int run_all(report *r)
{
    enum { N_JOBS = 32 };
    bool todo[CLI_MODELS][N_JOBS] = {{false}};
    for (int i = 0; i < r->n_models; i++)
        for (int k = 0; report_jobs[k].name && k < N_JOBS; k++) {
            const report_job *j = &report_jobs[k];
            todo[i][k] = report_can_run(r, j) && (again(r->c, j) || !report_is_done(r, &r->models[i], j));
            r->n_todo += todo[i][k];
            r->units += todo[i][k] ? units(&r->models[i], j) : 0;
        }
    for (int i = 0; i < r->n_models; i++)
        for (int k = 0; report_jobs[k].name && k < N_JOBS; k++) {
            int code = todo[i][k] ? report_run(r, &r->models[i], &report_jobs[k]) : 0;
            if (code == EXIT_INTERRUPTED)
                return cli_fail(code, "interrupted: the same command goes on where this one stopped");
            if (code)
                return code;
            r->units_done += todo[i][k] ? units(&r->models[i], &report_jobs[k]) : 0;
        }
    return 0;
}

static void report_free(report *r)
{
    for (int i = 0; i < r->n_models; i++) {
        json_decref(r->models[i].info);
        json_decref(r->models[i].memory);
    }
    json_decref(r->text);
    json_decref(r->tasks);
    free(r->self);
}

int cmd_report(int argc, char **argv)
{
    cli c;
    int code = cli_parse(&c, argc, argv, "report", OPT_REPORT | OPT_MACHINE | OPT_OUTPUT, 0);
    if (code)
        return code;
    report r = {.c = &c, .dir = c.output, .self = realpath("/proc/self/exe", NULL)};
    code = r.self ? check(&c) : cli_fail(EXIT_RESOURCES, "this program's own file: %s", strerror(errno));
    code = code ? code : add_data(c.file, &r.text);
    code = code ? code : add_data(c.hellaswag, &r.tasks);
    cli_cpu_name(r.cpu, sizeof r.cpu);
    cli_catch_interrupt();
    for (int i = 0; !code && i < c.n_models; i++)
        code = cli_interrupted() ? EXIT_INTERRUPTED : add_model(&r, c.models[i]);
    code = code ? code : make_folders(r.dir);
    code = code ? code : run_all(&r);
    code = code ? code : report_write(&r);
    if (!code && r.failed)
        code = EXIT_CHECK;
    report_free(&r);
    return code;
}
