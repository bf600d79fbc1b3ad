/* kvd lab, patch and eval: the experiments of lab/, one at a time. The command reads
 * files and options, shows progress, and prints what the experiment hands back; all
 * numbers are made there. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"
#include "lab/whole_file.h"

/* ---- -o --------------------------------------------------------------------------- */

static const char *const endings[] = {".tsv", ".json", ".svg", ".png", NULL};
enum { TSV, JSON, SVG, PNG };

int cli_ending(const char *path, const char *const *list)
{
    size_t n = strlen(path);
    for (int i = 0; list[i]; i++) {
        size_t k = strlen(list[i]);
        if (n > k && path[n - k - 1] != '/' && !strcmp(path + n - k, list[i]))
            return i;
    }
    return -1;
}

/* What can be known before hours of work: that the file can be written at its end. */
static int check_output(const char *path)
{
    kvd_error err;
    if (!path)
        return 0;
    int kind = cli_ending(path, endings);
    if (kind < 0)
        return cli_fail(EXIT_USAGE, "-o %s: the name ends with none of .tsv, .json, .svg, .png", path);
    if (lab_file_check(path, &err))
        return cli_fail(EXIT_BAD_FILE, "-o %s: %s", path, err.message);
    if (kind >= SVG && !lab_can_draw())
        return cli_fail(EXIT_RESOURCES, "-o %s: no gnuplot in PATH to draw it (.tsv has the numbers)", path);
    return 0;
}

int cli_draw(const json_t *result, const json_t *plot, const char *path)
{
    kvd_error err = {0};
    int rc = lab_draw(result, plot, path, &err);
    return rc ? cli_fail(rc == KVD_E_UNSUPPORTED ? EXIT_RESOURCES : kvd_error_exit(rc), "%s: %s", path, err.message) : 0;
}

static int write_tsv(const json_t *table, const char *path)
{
    kvd_error err;
    return lab_file_tsv(path, table, &err) ? cli_fail(EXIT_BAD_FILE, "%s: %s", path, err.message) : 0;
}

/* Each of a list of tables or plots: FILE itself if there is one, else FILE-NAME. */
static int write_each(const json_t *result, const char *key, const char *path, int kind)
{
    const json_t *list = json_object_get(result, key);
    size_t n = json_array_size(list), stem = strlen(path) - strlen(endings[kind]);
    if (n == 0)
        return cli_fail(EXIT_RESOURCES, "-o %s: this experiment has no %s", path, key);
    for (size_t i = 0; i < n; i++) {
        const json_t *item = json_array_get(list, i);
        char *name = NULL;
        if ((n == 1 ? asprintf(&name, "%s", path)
                    : asprintf(&name, "%.*s-%s%s", (int)stem, path, json_string_value(json_object_get(item, "name")), endings[kind])) < 0)
            return cli_fail(EXIT_RESOURCES, "out of memory");
        int code = kind == TSV ? write_tsv(item, name) : cli_draw(result, item, name);
        free(name);
        if (code)
            return code;
    }
    return 0;
}

static int write_output(const json_t *result, const char *path)
{
    int kind = cli_ending(path, endings);
    if (kind != JSON)
        return write_each(result, kind == TSV ? "tables" : "plots", path, kind);
    kvd_error err;
    if (lab_file_json(path, result, JSON_INDENT(2) | JSON_REAL_PRECISION(15), &err))
        return cli_fail(EXIT_BAD_FILE, "%s: %s", path, err.message);
    return 0;
}

/* ---- one experiment ------------------------------------------------------------------ */

/* An option that this experiment would not look at is a mistake of somebody. */
static int check_options(const cli *c, const lab_experiment *e)
{
    const struct {
        unsigned takes;
        bool given;
        const char *name;
    } list[] = {{LAB_TAKES_TEXT, c->file != NULL, "-f"}, {LAB_TAKES_NEW, c->n_given, "-n"}, {LAB_TAKES_POLICIES, c->policies != NULL, "--policies"},
                {LAB_TAKES_CHUNKS, c->chunks > 0, "--chunks"}, {LAB_TAKES_CHUNKS, c->chunk_tokens > 0, "--chunk-tokens"},
                {LAB_TAKES_CHUNKS, c->first_scored > 0, "--first-scored"}, {LAB_TAKES_TASKS, c->tasks > 0, "--tasks"}};
    for (size_t i = 0; i < sizeof list / sizeof list[0]; i++)
        if (list[i].given && !(e->takes & list[i].takes))
            return cli_fail(EXIT_USAGE, "%s means nothing to %s", list[i].name, e->name);
    return 0;
}

/* What -- and in which file -- is wrong, before the model is loaded. */
static int check_request(const cli *c, const lab_experiment *e, const lab *l)
{
    bool data = e->run == lab_perplexity || e->run == lab_hellaswag;
    int rc = check_options(c, e);
    if (rc)
        return rc;
    if (data && !c->file)
        return cli_fail(EXIT_USAGE, "%s needs its data: -f FILE", e->name);
    if (c->n_given && c->go.max_tokens < 1)
        return cli_fail(EXIT_USAGE, "-n: an experiment generates 1 token or more");
    if (c->head >= 0 && !c->patch_kv)
        return cli_fail(EXIT_USAGE, "--head is of --what kv");
    if (c->first_scored >= (c->chunk_tokens ? c->chunk_tokens : 512))
        return cli_fail(EXIT_USAGE, "--first-scored %lld lies beyond a chunk of %lld tokens", (long long)c->first_scored,
                        (long long)(c->chunk_tokens ? c->chunk_tokens : 512));
    kvd_session_options o;
    kvd_error err = {0};
    char name[64];
    for (const char *list = c->policies; list && lab_next_policy(l, &list, &o, name, &rc, &err);)
        ;
    return rc ? cli_error("--policies", &err) : check_output(c->output);
}

/* Layer and head exist? Only the model knows. */
static int check_shape(const cli *c, const kvd_model_info *i)
{
    if (c->layer >= i->n_layers)
        return cli_fail(EXIT_USAGE, "--layer %d: the model has layers 0..%lld", c->layer, (long long)i->n_layers - 1);
    if (c->head >= i->n_kv_heads)
        return cli_fail(EXIT_USAGE, "--head %d: the model has KV heads 0..%lld", c->head, (long long)i->n_kv_heads - 1);
    return 0;
}

static int run(const cli *c, const lab_experiment *e, const lab *l)
{
    kvd_error err = {0};
    json_t *result = lab_run(e, l, &err);
    cli_progress_clear();
    if (!result)
        return err.code == KVD_E_CANCELLED || cli_interrupted() ? cli_fail(EXIT_INTERRUPTED, "%s: interrupted", e->name) : cli_error(e->name, &err);
    int code = c->output ? write_output(result, c->output) : 0, printed;
    bool failed = json_is_true(json_object_get(result, "check_failed"));
    if (c->json)
        printed = cli_print_json(result); /* takes it */
    else {
        lab_print(result, stdout);
        json_decref(result);
        printed = cli_close_stdout();
    }
    return code ? code : printed ? printed : failed ? EXIT_CHECK : EXIT_OK;
}

int cli_run_experiment(cli *c, const char *name)
{
    const lab_experiment *e = lab_find(name);
    kvd_model *m = NULL;
    char *text = NULL, cpu[256];
    const char *slash = strrchr(c->model, '/');
    if (!e)
        return cli_fail(EXIT_USAGE, "no experiment \"%.40s\" (kvd lab --help lists them)", name);
    cli_progress_allow(!c->quiet);
    cli_catch_interrupt();
    int code = cli_spill_dir(c);
    lab l = {.so = c->so, .activations_f32 = c->mo.activations_f32, .model_file = slash ? slash + 1 : c->model, .cpu = cpu, .n_new = c->n_given ? c->go.max_tokens : 0, .quick = c->quick,
             .limit = e->run == lab_hellaswag ? c->tasks : c->chunks, .policies = c->policies, .chunk_tokens = c->chunk_tokens,
             .first_scored = c->first_scored, .donor = c->donor, .recipient = c->recipient, .layer = c->layer, .head = c->head,
             .at_all = c->at_all, .patch_kv = c->patch_kv, .tick = cli_lab_progress};
    cli_cpu_name(cpu, sizeof cpu);
    code = code ? code : check_request(c, e, &l);
    if (!code && c->file && !(code = cli_read_file(c->file, &text, &l.n_text)))
        l.text = text;
    code = code ? code : cli_load(c, true, &m);
    if (!code) {
        kvd_model_get_info(m, &l.info);
        l.m = m;
        code = check_shape(c, &l.info);
        code = code ? code : run(c, e, &l);
    }
    kvd_model_free(&m);
    free(text);
    return code;
}

/* ---- the commands ----------------------------------------------------------------------- */

static void list_experiments(void)
{
    puts("usage: kvd lab NAME -m MODEL [options]\nexperiments (section or figure of arXiv 2603.19664):");
    for (const lab_experiment *e = lab_experiments; e->name; e++)
        printf("  %-12s %-14s %s%s%s%s\n", e->name, e->paper, e->what, e->takes & LAB_TAKES_TEXT ? "; -f" : "", e->takes & LAB_TAKES_NEW ? "; -n" : "",
               e->takes & LAB_TAKES_POLICIES ? "; --policies" : "");
    puts("kvd patch and kvd eval have more options for patch, perplexity and hellaswag.");
}

static bool wants_help(int argc, char **argv)
{
    for (int i = 1; i < argc; i++)
        if (!strcmp(argv[i], "--help") || !strcmp(argv[i], "-h"))
            return true;
    return false;
}

int cmd_lab(int argc, char **argv)
{
    cli c;
    if (wants_help(argc, argv))
        list_experiments();
    int code = cli_parse(&c, argc, argv, "lab NAME",
                         OPT_MODEL | OPT_MACHINE | OPT_NUMBERS | OPT_LAB | OPT_LAB_TEXT | OPT_LAB_NEW | OPT_POLICIES | OPT_JSON | OPT_OUTPUT, 1);
    if (code)
        return code;
    if (c.n_words == 0)
        return cli_fail(EXIT_USAGE, "which experiment? (kvd lab --help lists them)");
    return cli_run_experiment(&c, c.words[0]);
}
