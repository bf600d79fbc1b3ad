/* kvd report: its parts.
 *
 *   cmd_report.c     options, models, the loop over what is to run
 *   report_jobs.c    what is to run, and the files that keep what came out
 *   report_child.c   this program run as a child
 *   report_verify.c  results that are no experiment of lab/: verify, bytes per token
 *   report_text.c    what the paper says, chapter by chapter
 *   report_page.c    the page; report_html.c its pieces
 *
 * An *entry* is what DIR/data/MODEL-EXPERIMENT.json holds:
 *   {"report": 1, "experiment": "rank", "command": ["kvd", "lab", "rank", ...],
 *    "data": {"file", "bytes", "hash"} or null, "model": {"file", "fingerprint", ...},
 *    "machine": {"cpu", "cpus", "memory_bytes", "system"}, "version": "0.1.0",
 *    "date": "2026-01-31", "seconds": 12.3, "exit": 0,
 *    "result": {as the command printed it}}      or "failed": "why" in its place.
 * Commands hold file names without folders: a report says nothing of a machine's
 * paths, and holds for files that have moved. */
#ifndef KVD_REPORT_H
#define KVD_REPORT_H

#include "cli.h"

enum { REPORT_FORMAT = 1, SLUG = 96, MOST_ARGS = 40 };

typedef struct report_model {
    const char *path, *file; /* as given; without folders */
    char slug[SLUG];         /* of its data files */
    json_t *info;            /* "model" of its entries */
    json_t *memory;          /* the result of "memory" */
} report_model;

typedef struct report {
    const cli *c;
    char *self;   /* this program */
    const char *dir;
    report_model models[CLI_MODELS];
    int n_models;
    json_t *text, *tasks; /* of -f and --hellaswag: {"file", "bytes", "hash"}, or NULL */
    char cpu[256];
    bool failed;          /* an experiment, or a drawing */
    double begun, units, units_done, seconds_done; /* for the ETA */
    int n_todo, n_done;
} report;

/* ---- jobs (report_jobs.c) ------------------------------------------------------- */

typedef struct report_job {
    const char *name, *title;
    const char *args[6];        /* after "kvd"; NULL ends them */
    unsigned flags;             /* JOB_* */
    double cost;                /* about how long, in any unit, for a model of one size */
} report_job;
enum {
    JOB_TEXT = 1,      /* needs -f */
    JOB_OWN_TEXT = 2,  /* takes -f, has texts of its own */
    JOB_TASKS = 4,     /* needs --hellaswag */
    JOB_FULL = 8,      /* knows --full */
    JOB_OWN = 16,      /* computed here, no child */
    JOB_WINDOW = 32    /* --rope window-relative where there are sliding layers */
};
extern const report_job report_jobs[]; /* in the paper's order; a NULL name ends them */
const report_job *report_find_job(const char *name);

/* Does this report have what the job needs? */
bool report_can_run(const report *r, const report_job *j);
/* The entry of a job as it would be: all but seconds, exit and result. */
json_t *report_entry(const report *r, const report_model *m, const report_job *j);
/* Is the file there, complete, and of the same command, data and model? */
bool report_is_done(const report *r, const report_model *m, const report_job *j);
/* Run it and write its file. 0; EXIT_INTERRUPTED; EXIT_RESOURCES if nothing can be
 * written. What fails in the experiment is in the file, and in r->failed. */
int report_run(report *r, const report_model *m, const report_job *j);
/* All entries of DIR/data: an array, owned, in the order of models and jobs. *problems:
 * an array of strings, files that are no entries. */
json_t *report_load(const report *r, json_t **problems);
/* A part of a file name: letters, digits, "." "_" "-", no leading dot. */
void report_slug(const char *text, char out[SLUG]);
/* The same of a model's file, without ".gguf". */
void report_model_slug(const char *file, char out[SLUG]);

/* ---- children (report_child.c) ----------------------------------------------------- */

typedef struct report_child {
    int exit_code;
    char *out;         /* standard output, owned */
    size_t n_out;
    char message[512]; /* the last line of standard error */
    double seconds;
} report_child;
/* 0, or -1 when it could not be started (then message says why). on_wait is called
 * several times a second. */
int report_spawn(const char *self, char *const *argv, void (*on_wait)(void *ctx), void *ctx, report_child *out);

/* ---- results that are not of lab/ (report_verify.c) ----------------------------------- */

/* What kvd verify --json printed, in the form of a result of lab/. Owned. */
json_t *report_from_verify(const json_t *verify, const json_t *model);
/* Bytes per token of the model: Table 1. Owned. */
json_t *report_memory(const kvd_model *m, const kvd_model_info *i);

/* ---- the page (report_page.c, report_html.c, report_text.c) --------------------------------- */

typedef struct report_chapter {
    const char *id, *title, *section; /* "rank", "Effective rank", "5.7, Fig. 5 and 6" */
    const char *paper;                /* what the paper says; sentences */
    const char *jobs[6];              /* NULL ends them */
} report_chapter;
extern const report_chapter report_chapters[]; /* a NULL id ends them */

/* Draw, and write index.html, tsv/ and png/. 0 or an exit code. */
int report_write(report *r);

/* Escape for text and for attributes in quotes. */
void html_text(FILE *f, const char *s);
void html_json(FILE *f, const json_t *string);
/* A table of a result; at most so many rows, the rest is in the TSV. */
void html_table(FILE *f, const json_t *table, const char *tsv);
/* An SVG file of plot.c, in the page: ids made unique by n, described by title. */
void html_svg(FILE *f, const char *svg, int n, const char *title);
void html_begin(FILE *f);
void html_end(FILE *f);

#endif
