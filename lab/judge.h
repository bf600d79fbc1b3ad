/* The paper's numbers beside ours: the "paper_rows" of a result.
 *
 * They are made from the finished result alone, its tables, settings and model, so that
 * a verdict whose rule, reason or paper value is put right needs no new measuring:
 * lab_run judges what it has just run, the report judges again what it finds on disk.
 * A result may come from an older version or have been edited: what is missing or of
 * another type is "not measured", and a row that needs it is left out.
 *
 * One rule for all: "reproduced" is the same number, or within what the row's reason
 * says; "differs" is measured as the paper describes it, with another outcome; "not
 * comparable" hangs on weights, a machine's speed or a text that are not the paper's or
 * that it does not name. The paper gives no unit for its KL; it is read as nats. */
#ifndef LAB_JUDGE_H
#define LAB_JUDGE_H

#include "lab/lab.h"

typedef enum lab_paper_model {
    LAB_PAPER_NONE = -1,
    LAB_PAPER_SMOLLM2_135M,
    LAB_PAPER_QWEN25_05B,
    LAB_PAPER_QWEN3_06B,
    LAB_PAPER_DS_R1_15B,
    LAB_PAPER_QWEN25_15B,
    LAB_PAPER_GEMMA3_4B
} lab_paper_model;

/* A result as it is judged. */
typedef struct lab_judged {
    json_t *result;
    lab_paper_model model;    /* of the paper's Table 1, by family and shape */
    const char *other;        /* why numbers that hang on the weights can not be laid beside those of that
                               * model: NULL, or the reason. Bytes, exactness and times do not hang on them. */
    const char *architecture;
    bool local;               /* has sliding-window layers */
} lab_judged;

typedef void lab_judge_fn(const lab_judged *j);
lab_judge_fn lab_judge_generation, lab_judge_patch, lab_judge_perplexity, lab_judge_hellaswag, lab_judge_multiturn; /* judge_outputs.c */
lab_judge_fn lab_judge_baselines, lab_judge_sweep, lab_judge_latency;                                              /* judge_caches.c */
lab_judge_fn lab_judge_rank, lab_judge_truncate;                                                                   /* judge_weights.c */

extern const char lab_fault[]; /* the reason where exactness is not reproduced */

/* ---- reading a result (judge.c) -------------------------------------------------------- */

/* A row of a table; cells NULL: there is none. */
typedef struct lab_line {
    const json_t *table, *cells;
} lab_line;

/* Row i of the table called name. */
lab_line lab_line_at(const lab_judged *j, const char *name, size_t i);
/* The first row whose column key holds text. */
lab_line lab_line_where(const lab_judged *j, const char *name, const char *key, const char *text);

const json_t *lab_get(lab_line r, const char *key);  /* NULL: no such cell */
double lab_value(lab_line r, const char *key);       /* NaN: null, or no number */
const char *lab_word(lab_line r, const char *key);   /* "": null, or no text */

/* A setting of the result. */
double lab_judged_number(const lab_judged *j, const char *setting);
const char *lab_judged_text(const lab_judged *j, const char *setting);

#define LAB_EACH_LINE(j, table, r) \
    for (size_t i_ = 0; (r = lab_line_at(j, table, i_), r.cells); i_++)

#endif
