/* HellaSwag's tasks from a file that the user gives: a context, four endings, and which
 * of them is right (Zellers et al. 2019).
 *
 * Two forms, told apart by the first byte that is no space:
 *
 *   six lines   context, label 0..3, four endings, for each task; as llama.cpp's tool
 *               takes it. The text is used as it stands.
 *   JSONL       the original, an object a line ('{' begins the file): ctx_a, ctx_b and
 *               activity_label, or ctx; endings; label. Put together and cleaned as
 *               lm-evaluation-harness does it.
 *
 * Layer: lab, above include/kvd. */
#ifndef LAB_HELLASWAG_DATA_H
#define LAB_HELLASWAG_DATA_H

#include <stddef.h>

#include "lab/lab.h"

enum { LAB_ENDINGS = 4 };

typedef struct lab_span {
    char *text; /* [n], owned by the tasks, not terminated */
    size_t n;
} lab_span;

typedef struct lab_task {
    lab_span context, ending[LAB_ENDINGS];
    int right;
    int64_t line; /* where it begins in the file, from 1 */
} lab_task;

typedef struct lab_tasks {
    lab_task *task; /* [n] */
    int64_t n;
    bool json;
} lab_tasks;

/* All tasks of a text, every line looked at. KVD_E_ENCODING names the line and what is
 * wrong with it; KVD_E_NOMEM. t: zeroed; free with lab_tasks_free also after a failure. */
int lab_tasks_read(lab_tasks *t, const char *text, size_t n, kvd_error *err);
void lab_tasks_free(lab_tasks *t);
/* Names the first n tasks as they were read: the same for the same tasks in either form. */
void lab_tasks_hash(const lab_tasks *t, int64_t n, char hex[17]);

#endif
