/* runs: what the experiments that generate have in common: prompts as tokens, greedy
 * runs with their logits, and an eye on the ledger while they run.
 *
 * Layer: lab, above include/kvd. */
#ifndef LAB_RUNS_H
#define LAB_RUNS_H

#include "lab/lab.h"

/* n elements of size, zeroed, or NULL with err set. For free(). */
void *lab_alloc(int64_t n, size_t size, kvd_error *err);

/* ---- prompts ---------------------------------------------------------------------- */

/* Can conversations go through the file's chat template? Else they are plain text,
 * and a note of the result says so. */
bool lab_has_chat(const lab *l);
void lab_note_chat(const lab *l, json_t *result);

/* The opening of a conversation as tokens: system (NULL: none), a question, and the
 * beginning of the answer. *ids: owned, kvd_ids_free. */
int lab_chat_open(const lab *l, const char *system, const char *user, int32_t **ids, int64_t *n, kvd_error *err);
/* What goes from the end of an answer to the beginning of the next one: the end of the
 * assistant's turn, and the next question. Depends on nothing said before, so a
 * conversation only ever grows, and a policy that forgets need not be rewound. */
int lab_chat_next(const lab *l, const char *user, int32_t **ids, int64_t *n, kvd_error *err);

/* n_prompts prompts of n_tokens each, [n_prompts][n_tokens], BOS in front where the
 * model wants one: from evenly spaced places of l->text, or from the laboratory's own
 * passages, each going on with the next one where a tokeniser makes few tokens of it.
 * Says in settings and notes what they are. *ids: owned, free. */
int lab_prompts(const lab *l, json_t *result, int64_t n_prompts, int64_t n_tokens, int32_t **ids, kvd_error *err);

/* ---- memory ----------------------------------------------------------------------- */

/* The most context memory that was in use whenever somebody looked. The ledger's own
 * peak is of the model's whole life; this one begins where it is set to 0. */
typedef struct lab_gauge {
    const lab *l;
    int64_t peak_bytes;
} lab_gauge;

/* Look now; returns the bytes in use. */
int64_t lab_gauge_look(lab_gauge *g);
/* Look in every pass of the session, whose buffers are all there while it runs; and
 * let l->tick cancel it. g stays with the session. */
void lab_gauge_watch(lab_gauge *g, kvd_session *s);

/* ---- greedy runs ------------------------------------------------------------------ */

/* Told the logits [n_vocab] of step t, borrowed for the call, and the likeliest token
 * in them. Non-zero ends the run with that code. */
typedef int lab_step_fn(void *ctx, int64_t t, const float *logits, int32_t token, kvd_error *err);

/* Feed an empty session a prompt, then tokens one by one: forced[t] if given, else the
 * likeliest of step t. n steps; the last one's token is not fed. */
int lab_decode(const lab *l, kvd_session *s, const int32_t *prompt, int64_t n_prompt, const int32_t *forced, int64_t n,
               lab_step_fn *fn, void *ctx, kvd_error *err);

/* A run kept for comparison: its tokens, and of the logits of each step nothing, a
 * digest (64 bits), or all. */
typedef enum lab_keep { LAB_KEEP_TOKENS, LAB_KEEP_DIGESTS, LAB_KEEP_LOGITS } lab_keep;
typedef struct lab_trace {
    int64_t n, n_vocab;
    int32_t *tokens;    /* [n] */
    float *logits;      /* [n][n_vocab], or NULL */
    char (*digest)[17]; /* [n], or NULL */
    double *seconds;    /* [n] from begun until its logits were there */
    double begun;       /* set before the run; time taken to keep things is added */
} lab_trace;

int lab_trace_make(lab_trace *tr, int64_t n, int64_t n_vocab, lab_keep keep, kvd_error *err);
void lab_trace_free(lab_trace *tr);
/* A lab_step_fn; ctx: lab_trace *. */
int lab_trace_step(void *ctx, int64_t t, const float *logits, int32_t token, kvd_error *err);
/* Are the logits of step t the same bits? False where nothing was kept of them. */
bool lab_trace_same(const lab_trace *tr, int64_t t, const float *logits);
/* The first step whose tokens differ; n if none does. */
int64_t lab_first_difference(const int32_t *a, const int32_t *b, int64_t n);
/* A greedy run of policy full into a made trace: what others are compared with. */
int lab_run_full(const lab *l, const int32_t *prompt, int64_t n_prompt, int64_t n, lab_gauge *g, lab_trace *full, kvd_error *err);

#endif
