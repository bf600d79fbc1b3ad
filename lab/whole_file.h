/* Files of results: whole, or as they were before. */
#ifndef LAB_WHOLE_FILE_H
#define LAB_WHOLE_FILE_H

#include <jansson.h>
#include <stdbool.h>
#include <stdio.h>

#include "kvd/kvd.h"

/* Could a file of this name be written at the end of the work? 0, KVD_E_IO, KVD_E_NOMEM. */
int lab_file_check(const char *path, kvd_error *err);

typedef struct lab_file {
    FILE *f;            /* to be written to */
    char *path, *part;  /* what it will be called, and is called until then; part NULL: no difference */
} lab_file;

/* KVD_E_IO, KVD_E_NOMEM: nothing is there, and nothing to be ended. */
int lab_file_begin(lab_file *w, const char *path, kvd_error *err);

/* Put it in its place, or, if keep is false or it could not be written, leave what was
 * there. KVD_E_IO. */
int lab_file_end(lab_file *w, bool keep, kvd_error *err);

/* A JSON file, by json_dumpf; a table, by lab_write_tsv. */
int lab_file_json(const char *path, const json_t *value, size_t flags, kvd_error *err);
int lab_file_tsv(const char *path, const json_t *table, kvd_error *err);

/* Remove from a folder what processes were writing, here or with .svg behind it, that are
 * no more. */
void lab_file_clear(const char *folder);

/* Is the folder's file system in memory (tmpfs, ramfs)? False where that can not be told. */
bool lab_file_in_memory(const char *folder);

#endif
