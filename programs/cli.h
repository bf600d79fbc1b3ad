/* The command line: one table of options, of which each command takes a part. */
#ifndef KVD_CLI_H
#define KVD_CLI_H

#include <jansson.h>
#include <stdio.h>

#include "kvd/kvd.h"
#include "kvd/kvd_lab.h"
#include "lab/lab.h"

enum {
    EXIT_OK = 0,
    EXIT_CHECK = 1,
    EXIT_USAGE = 2,
    EXIT_BAD_FILE = 3,
    EXIT_RESOURCES = 4,
    EXIT_NUMERIC_ERROR = 5,
    EXIT_INTERRUPTED = 130
};

/* Groups of options; a command names those it takes. */
enum {
    OPT_MODEL = 1 << 0,    /* -m */
    OPT_MACHINE = 1 << 1,  /* --threads --cpu --chunk */
    OPT_MEMORY = 1 << 2,   /* --kv-budget --kv-tokens --policy */
    OPT_NUMBERS = 1 << 3,  /* --kv-type --stream --activations */
    OPT_PROMPT = 1 << 4,   /* -p -f */
    OPT_GENERATE = 1 << 5, /* -n, sampling, stop strings, --system, --template, --no-think */
    OPT_JSON = 1 << 6,     /* --json */
    OPT_OUTPUT = 1 << 7,   /* --receipt --quiet */
    OPT_TEXT = 1 << 8,     /* --no-bos --special */
    OPT_EVAL = 1 << 9,     /* -f --chunks --tasks --chunk-tokens --first-scored */
    OPT_VERIFY = 1 << 10,  /* --quick --full --inject --rope */
    OPT_BENCH = 1 << 11,   /* -p -n -d -r as lists of numbers, --profile */
    OPT_RAW = 1 << 12,     /* --raw */
    OPT_CHAT = 1 << 13,    /* --stats */
    OPT_PLAN = 1 << 14,    /* --context -n -o */
    OPT_LAB = 1 << 15,     /* --quick -o --spill-dir: what all experiments take */
    OPT_LAB_TEXT = 1 << 16, /* -f: a text of the user's */
    OPT_LAB_NEW = 1 << 17, /* -n: tokens to generate */
    OPT_POLICIES = 1 << 18, /* --policies */
    OPT_PATCH = 1 << 19,   /* --donor --recipient --layer --at --what --head */
    OPT_REPORT = 1 << 20,  /* -m several times, -o -f --hellaswag --quick --full --again */
};

enum { CLI_MODELS = 32, CLI_AGAIN = 64 };

typedef struct cli {
    const char *model, *prompt, *file, *system, *template_name;
    bool raw, json, receipt, quiet, no_bos, special, quick, full, no_think, stats;
    bool n_given, budget_given, policy_given, positions_given, evict_given, stream_given, kv_type_given;
    kvd_model_options mo;
    kvd_session_options so;
    kvd_generate_options go;
    int64_t chunks, tasks, chunk_tokens, first_scored; /* of eval; 0: all, the experiment's own */
    const char *policies; /* "full,window:64" */
    const char *donor, *recipient; /* of patch, with the next five */
    bool at_all, patch_kv;
    int layer, head; /* -1: all */
    const char *models[CLI_MODELS]; /* each -m of report */
    int n_models;
    const char *hellaswag, *again[CLI_AGAIN]; /* of report */
    int n_again;
    const char *depths, *new_tokens; /* of bench: lists as given */
    int64_t context;      /* of plan */
    const char *output;   /* -o */
    bool recalibrate;
    bool window_relative; /* of verify: --rope window-relative */
    int64_t repetitions;
    bool profile;
    int inject_layer;
    int64_t inject_pos;
    const char *stop[32];
    kvd_logit_bias bias[256];
    char cache_dir[4096];
    kvd_rates rates; /* of --evict-to auto */
    const char *tier; /* what it will take, and how fast decoding will be, if that is known */
    double expected_tokens_s;
    int planned;          /* for cli_learn: which of kvd_plan_tier, from 1; 0: nothing was planned */
    const char *planned_dir; /* so.spill_dir at that time */
    const char *words[4]; /* what stands without an option */
    int n_words;
} cli;

/* Parse argv[1..] with the options of `groups`; at most max_words words. 0, or
 * EXIT_USAGE after one line on stderr. Missing -m is an error when the group is
 * asked for. */
int cli_parse(cli *c, int argc, char **argv, const char *command, unsigned groups, int max_words);

/* "64M", "1.5G", "4096": bytes; -1 if malformed. */
int64_t cli_bytes(const char *text);
/* Does this policy forget? */
bool cli_lossy(kvd_policy p);
/* Human readable bytes; buf of 32. */
const char *cli_size(int64_t bytes, char *buf);

/* One line on stderr, the exit code as result. */
int cli_fail(int exit_code, const char *format, ...) __attribute__((format(printf, 2, 3)));
int cli_error(const char *what, const kvd_error *err);
/* The same about a file, which is named once: not before a message that names it. */
int cli_file_error(const char *path, const kvd_error *err);

/* The prompt: -p, -f, or standard input. *text owned (free). 0 or an exit code. */
int cli_read_prompt(const cli *c, char **text, size_t *n);
int cli_read_file(const char *path, char **text, size_t *n);

/* Load c->model as asked; the default budget, half of the available memory, is
 * set when budget is true and none was given. 0 or an exit code. */
int cli_load(const cli *c, bool budget, kvd_model **m);

/* Make the user's cache folder ($XDG_CACHE_HOME/kvd or ~/.cache/kvd), and take it as
 * c->so.spill_dir unless --spill-dir gave another or --evict-to recompute wants none.
 * 0, or an exit code where --evict-to disk can not do without. */
int cli_spill_dir(cli *c);

/* The planner's rates for c->model as loaded: from the cache folder, else measured
 * and put there. 0 or an exit code. */
int cli_rates(cli *c, kvd_model *m, kvd_rates *r);
/* What --evict-to auto needs for a context of n_tokens, the first n_prompt at once:
 * nothing where all of it can stay, else the rates. 0 or an exit code. */
int cli_choose_tier(cli *c, kvd_model *m, int64_t n_prompt, int64_t n_tokens);
/* What became of it, in a session of its own: n_new tokens, the first of them from the
 * prefill, the others in decode_s, without what their reader took. Later predictions
 * follow, if rates were measured and it was enough to tell. */
void cli_learn(const cli *c, const kvd_model *m, const kvd_session_stats *st, int64_t n_prompt, int64_t n_new, double decode_s);

/* First SIGINT sets a flag, the second ends the process at once. */
void cli_catch_interrupt(void);
bool cli_interrupted(void);

/* One line on stderr before the work: tier, budget, T_max, and the rate that the planner
 * expects. */
void cli_first_line(const cli *c, const kvd_model *m);
/* The longest context of the model under its budget and these options. */
int64_t cli_max_tokens(const cli *c, const kvd_model *m);

/* Write text that a model or a file gave. If f is a terminal, bytes that could
 * command it (C0 but newline and tab, DEL, C1, what is no UTF-8) are shown as
 * \xNN; else the bytes go out as they are. False: f takes no more. */
bool cli_put_text(FILE *f, const char *text, size_t n);

/* A progress bar on stderr if it is a terminal and not --quiet; cancels on
 * SIGINT. Give it to kvd_session_set_progress with NULL. */
int cli_progress(void *ctx, int64_t done, int64_t total, int64_t rows, int64_t recomputed);
/* The same for an experiment of lab/: what it is at, and how far. */
int cli_lab_progress(void *ctx, const char *what, int64_t done, int64_t total);
void cli_progress_clear(void);
void cli_progress_allow(bool on);

/* What the machine calls its CPU; "" if it does not say. */
void cli_cpu_name(char *out, size_t size);

/* High-water mark of resident memory, and setting it back. Bytes, -1: unknown. */
int64_t cli_peak_bytes(void);
int64_t cli_resident_bytes(void);
void cli_peak_reset(void);

/* Print one object and a newline on stdout; frees it. An exit code. */
int cli_print_json(json_t *object);
/* Flush stdout and tell whether all was written. An exit code. */
int cli_close_stdout(void);

json_t *cli_json_ids(const int32_t *ids, int64_t n);
json_t *cli_json_ledger(const kvd_model *m);
json_t *cli_json_model(const kvd_model *m);
/* Run one experiment of lab/ as the options say, and print it (cmd_lab.c). An exit code. */
int cli_run_experiment(cli *c, const char *name);
/* Has path one of these endings (ended by NULL)? Its index, or -1. */
int cli_ending(const char *path, const char *const *endings);
/* Draw a plot of a result. An exit code. */
int cli_draw(const json_t *result, const json_t *plot, const char *path);

double cli_seconds(void);

int cmd_run(int argc, char **argv);
int cmd_chat(int argc, char **argv);
int cmd_info(int argc, char **argv);
int cmd_tokenize(int argc, char **argv);
int cmd_verify(int argc, char **argv);
int cmd_eval(int argc, char **argv);
int cmd_bench(int argc, char **argv);
int cmd_plan(int argc, char **argv);
int cmd_lab(int argc, char **argv);
int cmd_patch(int argc, char **argv);
int cmd_report(int argc, char **argv);

#endif
