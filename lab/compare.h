/* compare: policies held against policy full. Each is a *cell*, run greedily on the
 * same prompts; at every step its logits stand beside full's. What baselines and sweep
 * have in common: which cells there are, their runs, and what is summed up of any run.
 * What a step or a run is worth is the experiment's own.
 *
 * Layer: lab, above include/kvd. */
#ifndef LAB_COMPARE_H
#define LAB_COMPARE_H

#include "lab/runs.h"

enum { LAB_MOST_CELLS = 128 };

typedef struct lab_compare_cell {
    char name[64]; /* as a list of policies writes it */
    kvd_session_options o;
    bool exact;    /* kv-direct or full: must be full to the bit */
    int64_t n_prompts; /* that it was run on; below, sums over these */
    double first_different, decode_s;
} lab_compare_cell;

typedef struct lab_comparison {
    const lab *l;
    int64_t n, n_prompts, n_prompt; /* new tokens, prompts, tokens of each */
    int32_t *prompts;               /* [n_prompts][n_prompt] */
    lab_compare_cell *cells;
    int n_cells;
    lab_trace full;                 /* of the prompt under way */
    lab_gauge gauge;
    int64_t done;                   /* runs, for the progress bar */
} lab_comparison;

/* Make what is below n_prompt, for l, n, n_prompts and n_prompt as they are: cells from
 * l->policies, or NULL: from own; prompts; and room for what is kept of full's run. Free
 * it in any case. */
int lab_compare_make(lab_comparison *c, json_t *result, const char *own, lab_keep keep, kvd_error *err);
void lab_compare_free(lab_comparison *c);

/* Every cell i on every prompt, once full has run there. fn returns 0, also where it
 * has chosen not to run the cell, or a KVD_E_* that ends it all. */
typedef int lab_compare_fn(void *ctx, int i, int64_t prompt, kvd_error *err);
int lab_compare_all(lab_comparison *c, lab_compare_fn *fn, void *ctx, kvd_error *err);

/* ---- one run ---------------------------------------------------------------------- */

/* Told the logits of step t; what it takes is not in the run's time. */
typedef void lab_compare_seen_fn(void *ctx, int64_t t, const float *logits);

typedef struct lab_compare_run {
    lab_comparison *c;
    lab_compare_cell *cell;
    int64_t prompt;
    lab_compare_seen_fn *seen;
    void *ctx;
    lab_trace own;  /* the tokens it would have chosen, of the latest of the two below */
    kvd_session *s;
    int64_t first_different; /* of the free run */
    double decode_s;
} lab_compare_run;

/* Run freely, the cell going on with its own tokens; r's first five members are given.
 * Then, if wanted, forced: fed full's tokens. Then end: adds to the cell's sums if ok. */
int lab_compare_begin(lab_compare_run *r, kvd_error *err);
int lab_compare_forced(lab_compare_run *r, kvd_error *err);
void lab_compare_end(lab_compare_run *r, bool ok);

#endif
