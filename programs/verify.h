/* kvd verify: what its parts share. cmd_verify.c is the command, verify_kv.c the
 * reconstruction of K and V, verify_runs.c generation and receipts,
 * verify_prompt.c the text that all of them use. */
#ifndef KVD_VERIFY_H
#define KVD_VERIFY_H

#include "cli.h"

typedef struct verify {
    const cli *c;
    kvd_model *m;
    kvd_model_options loaded; /* how m was loaded */
    kvd_model_info info;
    int32_t *ids;             /* [n_ids] the prompt; every part takes its beginning */
    int64_t n_ids;
    json_t *out;
    /* Of what must be equal. A run that ends with KVD_E_NUMERIC is neither. */
    int64_t matches, mismatches, numeric_errors;
    double begun;
} verify;

/* Each of these returns 0, or the exit code that ends the command: cancelled,
 * out of memory and the like. A mismatch is counted and does not end it. */
int verify_reconstruction(verify *v);
int verify_generation(verify *v);
int verify_receipts(verify *v);
int verify_rope(verify *v); /* only with --rope window-relative */

/* Positions that verify_reconstruction will look at: 0 .. result - 1. */
int64_t verify_positions(const verify *v);

/* The prompt cut to n tokens; random ids where text or vocabulary give too few.
 * *ids owned (free). 0 or an exit code. */
int verify_prompt(const kvd_model *m, int64_t n, int32_t **ids);

/* Load the model again if it is loaded in another way; injects anew. */
int verify_load(verify *v, const kvd_model_options *mo);
/* An exit code for a failure of the library that is no result: not KVD_E_NUMERIC. */
int verify_error(int rc, const kvd_error *err);
/* For kvd_session_set_progress: cancels on SIGINT. */
int verify_on_pass(void *ctx, int64_t done, int64_t total, int64_t rows, int64_t recomputed);
/* Show what is being done, on a terminal; and remove it. */
void verify_progress(verify *v, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* A part of the table, unless --json. */
void verify_say(const verify *v, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Largest |a[i] - b[i]|. */
double verify_largest(const float *a, const float *b, int64_t n);

/* "f16", "bf16", "f32" */
const char *verify_type_name(kvd_float_type t);

#endif
