/* lab: the experiments of "The Residual Stream Is All You Need" (arXiv
 * 2603.19664), one file each, over the public API and nothing else.
 *
 * An experiment is a function that fills a *result*: one JSON object, complete in
 * itself, from which the program prints tables, TSV files and plots, and the report
 * is made. Nothing in a report comes from anywhere else.
 *
 *   {
 *     "experiment": "rank", "paper": "5.7, Fig. 5",
 *     "model":    {"name", "file", "architecture", "fingerprint", ...},
 *     "machine":  {"cpu", "isa", "threads"},
 *     "settings": {what the numbers depend on: texts by hash, lengths, types, ...},
 *     "tables":   [{"name", "title", "columns": [{"key", "title", "decimals"}], "rows": [[...], ...]}],
 *     "plots":    [{"name", "title", "kind", "table", "x", "y", "by", ...}],
 *     "notes":    ["what a reader must know to use the numbers", ...],
 *     "paper_rows": [{"what", "paper", "ours", "verdict", "why"}],
 *     "check_failed": true,   (only where a guarantee did not hold; see lab_check_failed)
 *     "seconds":  12.3
 *   }
 *
 * A cell is a number, a string, a boolean or null (not measured). Every table is
 * written for a person: titles have units. `paper_rows` hold our value beside the
 * paper's: verdict is "reproduced", "differs" or "not comparable"; why says the
 * reason, empty where it was reproduced. Where the paper has no number for this
 * model there is no row, or a row that says so.
 *
 * Layer: above include/kvd, below programs. An experiment prints nothing, reads no
 * file and no environment, has fixed seeds, decodes greedily, and gives up with
 * KVD_E_CANCELLED as soon as lab_tick says so. One experiment at a time per model. */
#ifndef LAB_LAB_H
#define LAB_LAB_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "kvd/kvd.h"
#include "kvd/kvd_lab.h"

/* What an experiment works with. All borrowed. */
typedef struct lab {
    kvd_model *m;
    kvd_model_info info;
    const char *model_file;      /* its name without folders */
    bool activations_f32;        /* as m was loaded; only said in the settings */
    const char *cpu;             /* the machine's, as it calls itself, or NULL */
    kvd_session_options so;      /* numbers (kv_type, stream), tier, spill_dir; the policy is the experiment's */
    int64_t n_new;               /* -n; 0: the experiment's default */
    bool quick;                  /* minutes instead of hours */
    const char *text;            /* -f FILE, or NULL: the experiment's own texts */
    size_t n_text;
    int64_t limit;               /* --tasks, --chunks: of a data file, the first so many; 0: all (quick: few) */
    const char *policies;        /* --policies "full,kv-direct,window:64", or NULL: the experiment's own list */
    /* eval perplexity */
    int64_t chunk_tokens, first_scored; /* 0: 512, 257 */
    /* patch */
    const char *donor, *recipient; /* NULL: the paper's */
    int layer;                   /* -1: all */
    int head;                    /* KV head of --what kv; -1: all */
    bool at_all;                 /* --at all: every position, not the last alone */
    bool patch_kv;               /* --what kv */
    /* Told what is going on; non-zero to cancel. what NULL: nothing new, only asked
     * whether to go on. May be NULL. */
    int (*tick)(void *ctx, const char *what, int64_t done, int64_t total);
    void *tick_ctx;
} lab;

/* Fill result, whose "tables", "plots", "notes", "paper_rows" and "settings" exist
 * and are empty. 0, or a KVD_E_* with err set; the result is then thrown away. */
typedef int lab_fn(const lab *l, json_t *result, kvd_error *err);

/* What an experiment makes use of, beside what all do; the rest of struct lab means
 * nothing to it, and a caller that lets a person choose should refuse it. */
enum {
    LAB_TAKES_TEXT = 1 << 0,     /* text */
    LAB_TAKES_NEW = 1 << 1,      /* n_new */
    LAB_TAKES_POLICIES = 1 << 2, /* policies */
    LAB_TAKES_CHUNKS = 1 << 3,   /* limit as --chunks, chunk_tokens, first_scored */
    LAB_TAKES_TASKS = 1 << 4     /* limit as --tasks */
};

typedef struct lab_experiment {
    const char *name;            /* "rank" */
    const char *paper;           /* "5.7, Fig. 5" */
    const char *what;            /* one line for --help */
    lab_fn *run;
    unsigned takes;              /* LAB_TAKES_* */
} lab_experiment;

/* All of them, in the paper's order; the last has a NULL name. */
extern const lab_experiment lab_experiments[];
const lab_experiment *lab_find(const char *name);

/* Run one: the whole result, owned (json_decref), or NULL with err set. */
json_t *lab_run(const lab_experiment *e, const lab *l, kvd_error *err);

lab_fn lab_generation;  /* 5.2, Table 3: cached against from scratch */
lab_fn lab_patch;       /* 5.3 */
lab_fn lab_perplexity;  /* 5.4, Table 4 */
lab_fn lab_hellaswag;   /* 5.4, Table 4 */
lab_fn lab_multiturn;   /* 5.5, Fig. 3 */
lab_fn lab_baselines;   /* 5.6, Fig. 4 */
lab_fn lab_sweep;       /* 5.6, windows */
lab_fn lab_rank;        /* 5.7, Fig. 5 */
lab_fn lab_truncate;    /* 5.7, Fig. 6 */
lab_fn lab_latency;     /* 5.8, Fig. 7 */

/* ---- results (result.c) ------------------------------------------------------- */

typedef struct lab_column {
    const char *key, *title;
    int decimals; /* of numbers; -1: as short as it is exact; -2: scientific, three digits */
} lab_column;

/* Add a table to the result; borrowed from it. columns end with a NULL key. */
json_t *lab_table(json_t *result, const char *name, const char *title, const lab_column *columns);
/* Add a row; takes the array, as json_pack("[i, f, s?]", ...) makes it. NULL, as
 * json_pack gives for a number that is not finite or a string that is no UTF-8: a row
 * of nulls. Too short or too long a row is made to fit. */
void lab_row(json_t *table, json_t *cells);
/* A cell for json_pack's "o": null where x is not finite; text of any bytes. */
json_t *lab_number(double x);
json_t *lab_text(const char *text, size_t n);

/* Add a plot of a table: points with columns x and y, one series for each value of
 * column by (NULL: one). kind "lines", "points", "bars" or "heat" (x across, y down,
 * colour by z). flags: LAB_LOG_X, LAB_LOG_Y. z: NULL unless heat. */
enum { LAB_LOG_X = 1, LAB_LOG_Y = 2 };
void lab_plot(json_t *result, const char *name, const char *title, const char *kind, const char *table, const char *x,
              const char *y, const char *by, const char *z, unsigned flags);

void lab_note(json_t *result, const char *format, ...) __attribute__((format(printf, 2, 3)));
void lab_setting(json_t *result, const char *key, json_t *value); /* takes value */
/* A guarantee did not hold (a kv-direct row is not exactly full's): a note, and the
 * program's exit code will be 1. */
void lab_check_failed(json_t *result, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Our value beside the paper's: a row of "paper_rows". */
void lab_paper(json_t *result, const char *what, const char *paper, const char *ours, const char *verdict, const char *why);
/* Make "paper_rows" of an experiment's finished result anew, from what is in it alone
 * (judge.h). Part of lab_run; for results of an earlier day. One that no experiment of
 * the list made stays as it is. */
void lab_judge(json_t *result);

/* Reading one, or any other JSON object; what is missing or of another type is "", NaN,
 * NULL and -1. Text is borrowed. */
const char *lab_text_at(const json_t *object, const char *key);
double lab_number_at(const json_t *object, const char *key);
const json_t *lab_find_table(const json_t *result, const char *name);
int lab_find_column(const json_t *table, const char *key); /* index in its rows */

/* Print all tables and notes for a person; tables are cut to what fits if out is a
 * terminal (print.c). */
void lab_print(const json_t *result, FILE *out);
/* A table as TSV with a header line of keys, each with the unit that its title names
 * ("kl_free", "KL, free, bits": kl_free_bits). null is empty; tab, newline,
 * NUL and backslash in text are \t, \n, \0, \\; numbers have all their digits. */
void lab_write_tsv(const json_t *table, FILE *out);
/* A cell as a person reads it, in one line; "-" for null. A zero that is exact is "0". */
void lab_cell(const json_t *cell, int decimals, char *out, size_t size);
/* Length of the valid UTF-8 sequence at text, 0 if there is none. Is the one of length k
 * a control character, which may command a terminal (U+0000..1F, U+007F..9F)? */
size_t lab_utf8(const char *text, size_t n);
bool lab_is_control(const char *text, size_t k);

/* ---- drawing (plot.c), by gnuplot ----------------------------------------------- */

/* Draw a plot of the result. path ends with .svg or .png. 0; KVD_E_UNSUPPORTED:
 * no gnuplot; KVD_E_IO. */
int lab_draw(const json_t *result, const json_t *plot, const char *path, kvd_error *err);
bool lab_can_draw(void); /* is there a gnuplot in PATH? */

/* ---- shared arithmetic (stat.c), all in f64 --------------------------------------- */

/* D_KL(softmax(p) || softmax(q)) in bits; p and q are logits [n]. Exactly 0 where
 * they are the same bits. */
double lab_kl_bits(const float *p, const float *q, int64_t n);
/* log softmax(x)[i], natural. */
double lab_log_prob(const float *x, int64_t n, int64_t i);
int32_t lab_argmax(const float *x, int64_t n); /* ties to the lowest */
/* Parts of a and b that are equal position by position, 0..1. */
double lab_match(const int32_t *a, const int32_t *b, int64_t n);
double lab_seconds(void);
/* Hex of a 64-bit FNV-1a: names a text in "settings", proves nothing. */
void lab_hash(const void *data, size_t n, char hex[17]);
/* Fill err, if there is one; returns code. */
int lab_fail(kvd_error *err, int code, const char *format, ...) __attribute__((format(printf, 3, 4)));
/* 0, or KVD_E_CANCELLED with err set. */
int lab_tick(const lab *l, const char *what, int64_t done, int64_t total, kvd_error *err);
/* Let l->tick cancel the passes of a session too (it gets what NULL). l must outlive s. */
void lab_watch(const lab *l, kvd_session *s);

/* ---- policies by name ---------------------------------------------------------- */

/* "kv-direct", "window:64", "streaming-llm:128:renumber": the session options of a
 * policy, on top of l->so. Advances *list behind the comma; false at the end.
 * KVD_E_ARG for unknown names through *rc. name: as given, [64]. */
bool lab_next_policy(const lab *l, const char **list, kvd_session_options *o, char name[64], int *rc, kvd_error *err);

#endif
