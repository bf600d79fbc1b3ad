/* The page: a chapter for each part of the paper, in its order; before them all
 * verdicts in one table. All of it is made from DIR/data. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "report.h"
#include "lab/whole_file.h"

typedef struct {
    report *r;
    FILE *f;
    const json_t *entries; /* report_load's, each with what is shown of it as "shown" */
    bool can_draw;
    int n_plots;
    int verdicts[3]; /* reproduced, differs, not comparable */
} page;

static const char *model_file(const json_t *entry) { return lab_text_at(json_object_get(entry, "model"), "file"); }

/* The name of a model as its file has it, without the ending. */
static void put_model(FILE *f, const json_t *entry)
{
    char name[256];
    snprintf(name, sizeof name, "%s", model_file(entry));
    size_t n = strlen(name);
    if (n > 5 && !strcmp(name + n - 5, ".gguf"))
        name[n - 5] = 0;
    html_text(f, name);
}

/* "MODEL-EXPERIMENT-PART": of a file in tsv/ or png/. */
static void part_name(const json_t *entry, const char *part, const char *ending, char *out, size_t size)
{
    char model[SLUG], job[SLUG], name[SLUG];
    report_model_slug(model_file(entry), model);
    report_slug(lab_text_at(entry, "experiment"), job);
    report_slug(part, name);
    snprintf(out, size, "%s-%s-%s%s", model, job, name, ending);
}

/* ---- verdicts ------------------------------------------------------------------------ */

enum { REPRODUCED, DIFFERS, NOT_COMPARABLE };
static const char *const verdict_words[] = {"reproduced", "differs", "not comparable"};
static const char *const verdict_class[] = {"reproduced", "differs", "not"};

static int verdict_of(const json_t *row)
{
    for (int i = 0; i < 3; i++)
        if (!strcmp(lab_text_at(row, "verdict"), verdict_words[i]))
            return i;
    return NOT_COMPARABLE;
}

static void verdict_cells(FILE *f, const json_t *row)
{
    int v = verdict_of(row);
    fputs("<td data-l=\"paper\">", f);
    html_text(f, lab_text_at(row, "paper"));
    fputs("</td><td data-l=\"ours\">", f);
    html_text(f, lab_text_at(row, "ours"));
    fprintf(f, "</td><td class=\"v %s\">%s</td><td>", verdict_class[v], verdict_words[v]);
    html_text(f, lab_text_at(row, "why"));
    fputs("</td></tr>\n", f);
}

/* The paper's numbers beside those of one entry. */
static void entry_verdicts(FILE *f, const json_t *shown)
{
    size_t i;
    json_t *row;
    if (!json_array_size(json_object_get(shown, "paper_rows")))
        return;
    fputs("<h5>The paper's numbers beside ours</h5>\n<div class=wide><table class=verdicts>\n"
          "<tr><th>what</th><th>paper</th><th>ours</th><th>verdict</th><th>why</th></tr>\n", f);
    json_array_foreach(json_object_get(shown, "paper_rows"), i, row) {
        fputs("<tr><td>", f);
        html_text(f, lab_text_at(row, "what"));
        fputs("</td>", f);
        verdict_cells(f, row);
    }
    fputs("</table></div>\n", f);
}

/* The rows that say the same of several models stand together; what they are about
 * stands before the first. */
static void summary_row(page *p, const char *what, const json_t *entry, const json_t *row, bool first)
{
    fputs("<tr><td>", p->f);
    html_text(p->f, first ? what : "");
    fputs("</td><td data-l=\"model\">", p->f);
    put_model(p->f, entry);
    fputs("</td>", p->f);
    verdict_cells(p->f, row);
}

/* All rows of a job, of all models, that are about what. */
static void rows_about(page *p, const char *job, const char *what)
{
    size_t i, k;
    json_t *entry, *row;
    bool first = true;
    json_array_foreach(p->entries, i, entry)
        if (!strcmp(lab_text_at(entry, "experiment"), job))
            json_array_foreach(json_object_get(json_object_get(entry, "shown"), "paper_rows"), k, row)
                if (!strcmp(lab_text_at(row, "what"), what)) {
                    summary_row(p, what, entry, row, first);
                    first = false;
                }
}

static void rows_of_job(page *p, const char *job)
{
    json_t *seen = json_object(), *entry, *row;
    size_t i, k;
    json_array_foreach(p->entries, i, entry) {
        if (strcmp(lab_text_at(entry, "experiment"), job))
            continue;
        json_array_foreach(json_object_get(json_object_get(entry, "shown"), "paper_rows"), k, row) {
            const char *what = lab_text_at(row, "what");
            if (!json_object_get(seen, what))
                rows_about(p, job, what);
            json_object_set_new(seen, what, json_true());
        }
        if (json_object_get(entry, "failed")) {
            fprintf(p->f, "<tr><td>%s</td><td data-l=\"model\">", report_find_job(job)->title);
            put_model(p->f, entry);
            fputs("</td><td></td><td></td><td class=\"v differs\">failed</td><td>", p->f);
            html_text(p->f, lab_text_at(entry, "failed"));
            fputs("</td></tr>\n", p->f);
        }
    }
    json_decref(seen);
}

static void summary_rows(page *p, const report_chapter *ch)
{
    fprintf(p->f, "<tr class=g><td colspan=6><a href=\"#%s\">%s</a> <span class=dim>(%s)</span></td></tr>\n", ch->id, ch->title, ch->section);
    for (int i = 0; ch->jobs[i]; i++) {
        if (ch->jobs[1])
            fprintf(p->f, "<tr class=j><td colspan=6><a href=\"#job-%s\">%s</a></td></tr>\n", ch->jobs[i], report_find_job(ch->jobs[i])->title);
        rows_of_job(p, ch->jobs[i]);
    }
}

static void count_verdicts(page *p)
{
    size_t i, k;
    json_t *entry, *row;
    json_array_foreach(p->entries, i, entry)
        json_array_foreach(json_object_get(json_object_get(entry, "shown"), "paper_rows"), k, row)
            p->verdicts[verdict_of(row)]++;
}

static void summary(page *p)
{
    count_verdicts(p);
    fprintf(p->f,
            "<h2 id=\"verdicts\">Verdicts</h2>\n<p><span class=\"v reproduced\">%d reproduced</span>, <span class=\"v differs\">%d differ</span>, "
            "<span class=\"v not\">%d not comparable</span>. <em>Reproduced</em>: the same number, or within what the last column "
            "says. <em>Differs</em>: measured as the paper describes it, with another outcome. <em>Not comparable</em>: the number hangs on weights, a "
            "machine's speed or a text that are not the paper's, or that the paper does not name. The paper gives no unit for its KL; where it matters it "
            "is read as nats. Ours is in bits unless nats are said.</p>\n<div class=wide><table class=verdicts>\n"
            "<tr><th>what</th><th>model</th><th>paper</th><th>ours</th><th>verdict</th><th>why</th></tr>\n",
            p->verdicts[REPRODUCED], p->verdicts[DIFFERS], p->verdicts[NOT_COMPARABLE]);
    for (const report_chapter *ch = report_chapters; ch->id; ch++)
        summary_rows(p, ch);
    fputs("</table></div>\n", p->f);
}

/* ---- tables and plots of an entry ------------------------------------------------------- */

static int write_tsv(const page *p, const json_t *table, const char *name)
{
    char *path = NULL;
    kvd_error err;
    if (asprintf(&path, "%s/tsv/%s", p->r->dir, name) < 0)
        return cli_fail(EXIT_RESOURCES, "out of memory");
    int code = lab_file_tsv(path, table, &err) ? cli_fail(EXIT_RESOURCES, "%s: %s", path, err.message) : 0;
    free(path);
    return code;
}

static int put_tables(page *p, const json_t *entry, const json_t *shown)
{
    size_t i;
    json_t *table;
    int code = 0;
    json_array_foreach(json_object_get(shown, "tables"), i, table) {
        char name[4 * SLUG];
        part_name(entry, lab_text_at(table, "name"), ".tsv", name, sizeof name);
        code = code ? code : write_tsv(p, table, name);
        html_table(p->f, table, name);
    }
    return code;
}

/* All verdicts as one table. */
static int write_verdicts(const page *p)
{
    static const lab_column columns[] = {{"experiment", "experiment", 0}, {"model", "model", 0}, {"what", "what", 0}, {"paper", "paper", 0},
                                         {"ours", "ours", 0}, {"verdict", "verdict", 0}, {"why", "why", 0}, {NULL, NULL, 0}};
    static const char *const keys[] = {"what", "paper", "ours", "verdict", "why"};
    json_t *result = json_pack("{s:[]}", "tables"), *table = lab_table(result, "verdicts", "Verdicts", columns), *entry, *row;
    size_t i, k;
    json_array_foreach(p->entries, i, entry)
        json_array_foreach(json_object_get(json_object_get(entry, "shown"), "paper_rows"), k, row) {
            json_t *cells = json_array();
            json_array_append(cells, json_object_get(entry, "experiment"));
            json_array_append(cells, json_object_get(json_object_get(entry, "model"), "file"));
            for (size_t c = 0; c < sizeof keys / sizeof keys[0]; c++)
                json_array_append_new(cells, json_string(lab_text_at(row, keys[c])));
            lab_row(table, cells);
        }
    int code = write_tsv(p, table, "verdicts.tsv");
    json_decref(result);
    return code;
}

/* One plot: in the page as SVG, beside it as PNG. What can not be drawn is said. */
static void put_plot(page *p, const json_t *entry, const json_t *shown, const json_t *plot)
{
    char name[4 * SLUG], *png = NULL, *svg = NULL, *drawn = NULL;
    size_t n;
    kvd_error err = {0};
    part_name(entry, lab_text_at(plot, "name"), ".png", name, sizeof name);
    bool ok = asprintf(&png, "%s/png/%s", p->r->dir, name) >= 0 && asprintf(&svg, "%s/png/plot.part%ld.svg", p->r->dir, (long)getpid()) >= 0;
    ok = ok && !lab_draw(shown, plot, svg, &err) && !lab_draw(shown, plot, png, &err) && !cli_read_file(svg, &drawn, &n);
    if (svg)
        unlink(svg);
    if (ok) {
        fputs("<figure>", p->f);
        html_svg(p->f, drawn, ++p->n_plots, lab_text_at(plot, "title"));
        fputs("</figure>\n", p->f);
    } else {
        p->r->failed = true;
        fputs("<p class=dim>A plot could not be drawn: ", p->f);
        html_text(p->f, err.message);
        fputs("</p>\n", p->f);
    }
    free(drawn);
    free(svg);
    free(png);
}

static void put_plots(page *p, const json_t *entry, const json_t *shown)
{
    size_t i;
    json_t *plot;
    if (!p->can_draw || !json_array_size(json_object_get(shown, "plots")))
        return;
    fputs("<div class=plots>\n", p->f);
    json_array_foreach(json_object_get(shown, "plots"), i, plot)
        put_plot(p, entry, shown, plot);
    fputs("</div>\n", p->f);
}

static void put_notes(FILE *f, const json_t *shown)
{
    size_t i;
    json_t *note;
    if (!json_array_size(json_object_get(shown, "notes")))
        return;
    fputs("<ul class=notes>\n", f);
    json_array_foreach(json_object_get(shown, "notes"), i, note) {
        fputs("<li>", f);
        html_json(f, note);
        fputs("</li>\n", f);
    }
    fputs("</ul>\n", f);
}

static void put_settings(FILE *f, const json_t *shown)
{
    const char *key;
    json_t *value;
    if (!json_object_size(json_object_get(shown, "settings")))
        return;
    fputs("<details><summary>Settings</summary><p class=dim>", f);
    const char *between = "";
    json_object_foreach(json_object_get(shown, "settings"), key, value) {
        char *text = json_dumps(value, JSON_COMPACT | JSON_ENCODE_ANY | JSON_REAL_PRECISION(15));
        fputs(between, f);
        between = "; ";
        html_text(f, key);
        fputc(' ', f);
        html_text(f, json_is_string(value) ? json_string_value(value) : text);
        free(text);
    }
    fputs("</p></details>\n", f);
}

static void put_machine(FILE *f, const json_t *machine, const json_t *engine)
{
    html_text(f, lab_text_at(machine, "cpu"));
    if (json_integer_value(json_object_get(machine, "cpus")) > 0)
        fprintf(f, ", %" JSON_INTEGER_FORMAT " CPUs, %.1f GiB, ", json_integer_value(json_object_get(machine, "cpus")),
                json_number_value(json_object_get(machine, "memory_bytes")) / 1073741824);
    html_text(f, lab_text_at(machine, "system"));
    if (*lab_text_at(engine, "isa")) {
        fputs("; ", f);
        html_text(f, lab_text_at(engine, "isa"));
        fprintf(f, ", %" JSON_INTEGER_FORMAT " threads", json_integer_value(json_object_get(engine, "threads")));
    }
}

/* The file that -f named, by what is in it. */
static void put_data_file(FILE *f, const json_t *data)
{
    if (!json_is_object(data))
        return;
    fputs("; data ", f);
    html_json(f, json_object_get(data, "file"));
    fprintf(f, ", %" JSON_INTEGER_FORMAT " bytes, FNV-1a <span class=hash>", json_integer_value(json_object_get(data, "bytes")));
    html_text(f, lab_text_at(data, "hash"));
    fputs("</span>", f);
}

/* How to get these numbers again, and where they are from. */
static void put_origin(FILE *f, const json_t *entry, const json_t *shown)
{
    size_t i;
    json_t *word;
    const json_t *machine = json_object_get(shown, "machine");
    if (json_array_size(json_object_get(entry, "command")) > 1) {
        fputs("<p class=dim><code>", f);
        json_array_foreach(json_object_get(entry, "command"), i, word) {
            const char *s = json_string_value(word), *mark = s && strpbrk(s, " '\"\\$`*?;&|<>()") ? "&quot;" : "";
            if (!s || !strcmp(s, "--json")) /* how it was asked for, not what */
                continue;
            fprintf(f, "%s%s", i ? " " : "", mark);
            html_text(f, s);
            fputs(mark, f);
        }
        fputs("</code><br>", f);
    } else
        fputs("<p class=dim>", f);
    put_machine(f, json_object_get(entry, "machine"), machine);
    fprintf(f, "; %.1f s; ", json_number_value(json_object_get(entry, "seconds")));
    html_text(f, lab_text_at(entry, "date"));
    const char *version = lab_text_at(entry, "version"); /* verify's result has none of its own */
    version = *version ? version : lab_text_at(json_object_get(shown, "settings"), "version");
    if (*version) {
        fputs("; KV-Direct ", f);
        html_text(f, version);
    }
    fputs("; model <span class=hash>", f);
    html_text(f, lab_text_at(json_object_get(entry, "model"), "fingerprint"));
    fputs("</span>", f);
    put_data_file(f, json_object_get(entry, "data"));
    fputs("</p>\n", f);
}

/* ---- chapters -------------------------------------------------------------------------------- */

static int put_entry(page *p, const json_t *entry)
{
    const json_t *shown = json_object_get(entry, "shown");
    int code = 0;
    fputs("<h4>", p->f);
    put_model(p->f, entry);
    fputs("</h4>\n", p->f);
    put_origin(p->f, entry, shown);
    if (json_object_get(entry, "failed")) {
        fputs("<p class=alarm>This experiment failed: ", p->f);
        html_text(p->f, lab_text_at(entry, "failed"));
        fputs("</p>\n", p->f);
        return 0;
    }
    if (json_is_true(json_object_get(shown, "check_failed")))
        fputs("<p class=alarm>A guarantee did not hold here; see the notes.</p>\n", p->f);
    code = put_tables(p, entry, shown);
    put_plots(p, entry, shown);
    put_notes(p->f, shown);
    entry_verdicts(p->f, shown);
    put_settings(p->f, shown);
    return code;
}

static int put_chapter(page *p, const report_chapter *ch)
{
    int code = 0;
    fprintf(p->f, "<h2 id=\"%s\">%s</h2>\n<p class=dim>The paper: %s</p>\n<p class=paper>%s</p>\n", ch->id, ch->title, ch->section, ch->paper);
    for (int k = 0; ch->jobs[k]; k++) {
        int n = 0;
        size_t i;
        json_t *entry;
        if (ch->jobs[1])
            fprintf(p->f, "<h3 id=\"job-%s\">%s</h3>\n", ch->jobs[k], report_find_job(ch->jobs[k])->title);
        json_array_foreach(p->entries, i, entry)
            if (!strcmp(lab_text_at(entry, "experiment"), ch->jobs[k])) {
                n++;
                code = code ? code : put_entry(p, entry);
            }
        if (!n) {
            unsigned flags = report_find_job(ch->jobs[k])->flags;
            fprintf(p->f, "<p class=dim>Not run%s.</p>\n", flags & JOB_TEXT ? ": no text was given (-f)" : flags & JOB_TASKS ? ": no tasks were given (--hellaswag)" : "");
        }
    }
    return code;
}

static void put_models(page *p)
{
    const char *last = "";
    size_t i;
    json_t *entry;
    fputs("<div class=wide><table>\n<tr><th class=w>model</th><th class=w>calls itself</th><th class=w>family</th><th>parameters, millions</th>"
          "<th>weights, MiB</th><th>layers</th><th>heads / KV heads / size</th><th class=w>fingerprint</th></tr>\n", p->f);
    json_array_foreach(p->entries, i, entry) {
        const json_t *m = json_object_get(entry, "model");
        if (!strcmp(last, model_file(entry)))
            continue;
        last = model_file(entry);
        fputs("<tr><td class=w>", p->f);
        put_model(p->f, entry);
        fputs("</td><td class=w>", p->f);
        html_text(p->f, lab_text_at(m, "name"));
        fputs("</td><td class=w>", p->f);
        html_text(p->f, lab_text_at(m, "architecture"));
        fprintf(p->f, "</td><td>%.0f</td><td>%.0f</td><td>%" JSON_INTEGER_FORMAT "</td><td>%" JSON_INTEGER_FORMAT " / %" JSON_INTEGER_FORMAT " / %" JSON_INTEGER_FORMAT "</td><td class=w>",
                json_number_value(json_object_get(m, "n_params")) * 1e-6, json_number_value(json_object_get(m, "weight_bytes")) / 1048576,
                json_integer_value(json_object_get(m, "n_layers")), json_integer_value(json_object_get(m, "n_heads")),
                json_integer_value(json_object_get(m, "n_kv_heads")), json_integer_value(json_object_get(m, "d_head")));
        html_text(p->f, lab_text_at(m, "fingerprint"));
        fputs("</td></tr>\n", p->f);
    }
    fputs("</table></div>\n", p->f);
}

static void put_head(page *p, const json_t *problems)
{
    size_t i;
    json_t *problem;
    html_begin(p->f);
    fputs("<h1>The Residual Stream Is All You Need: measured</h1>\n"
          "<p>The experiments of <a href=\"https://arxiv.org/abs/2603.19664\">arXiv 2603.19664</a>, run by the commands of KV-Direct " KVD_VERSION
          " on the models below. Every number and picture on this page was made by the command that stands above it. <em>kv-direct</em> and "
          "<em>full</em> are exact: their rows must be equal in every bit; the other policies forget. Each table is also a TSV file "
          "(<code>tsv/</code>), each plot a PNG file (<code>png/</code>), each result a JSON file (<code>data/</code>).</p>\n", p->f);
    if (!p->can_draw)
        fputs("<p class=alarm>There are no plots here: gnuplot was not found when the page was made. The tables have all numbers.</p>\n", p->f);
    json_array_foreach(problems, i, problem) {
        fputs("<p class=alarm>A data file could not be used: ", p->f);
        html_json(p->f, problem);
        fputs("</p>\n", p->f);
    }
    put_models(p);
    fputs("<p>", p->f);
    for (const report_chapter *ch = report_chapters; ch->id; ch++)
        fprintf(p->f, "%s<a href=\"#%s\">%s</a>", ch == report_chapters ? "" : " &middot; ", ch->id, ch->title);
    fputs("</p>\n", p->f);
}

/* What is shown of an entry: its result, or what report_verify.c makes of it. */
static void prepare(json_t *entries)
{
    size_t i;
    json_t *entry;
    json_array_foreach(entries, i, entry) {
        json_t *result = json_object_get(entry, "result");
        if (!strcmp(lab_text_at(entry, "experiment"), "verify") && result) {
            json_object_set_new(entry, "shown", report_from_verify(result, json_object_get(entry, "model")));
            continue;
        }
        lab_judge(result); /* by today's rules, whenever it was measured */
        json_object_set(entry, "shown", result);
    }
}

static int write_page(page *p, const json_t *problems)
{
    int code = 0;
    put_head(p, problems);
    summary(p);
    for (const report_chapter *ch = report_chapters; ch->id; ch++)
        code = code ? code : put_chapter(p, ch);
    code = code ? code : write_verdicts(p);
    html_end(p->f);
    return code;
}

int report_write(report *r)
{
    json_t *problems = NULL, *entries = report_load(r, &problems);
    char *path = NULL;
    lab_file w;
    kvd_error err = {0};
    page p = {.r = r, .entries = entries, .can_draw = lab_can_draw()};
    int code = 0;
    prepare(entries);
    if (asprintf(&path, "%s/index.html", r->dir) < 0) {
        path = NULL;
        code = cli_fail(EXIT_RESOURCES, "out of memory");
    } else if (lab_file_begin(&w, path, &err))
        code = cli_fail(EXIT_RESOURCES, "%s: %s", path, err.message);
    else {
        p.f = w.f;
        code = write_page(&p, problems);
        if (lab_file_end(&w, !code, &err) && !code)
            code = cli_fail(EXIT_RESOURCES, "%s: %s", path, err.message);
    }
    if (json_array_size(problems))
        r->failed = true;
    if (!code && !r->c->quiet)
        fprintf(stderr, "kvd: %s: %d reproduced, %d differ, %d not comparable; %d plots%s\n", path, p.verdicts[0], p.verdicts[1], p.verdicts[2],
                p.n_plots, p.can_draw ? "" : " (no gnuplot)");
    free(path);
    json_decref(problems);
    json_decref(entries);
    return code;
}
