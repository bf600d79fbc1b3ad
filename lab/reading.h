/* lab: the time it takes to read some bytes of keys and values, from where they could
 * be: memory, a disk, a slow link. What `latency` sets recomputing against. */
#ifndef LAB_READING_H
#define LAB_READING_H

#include <stdbool.h>
#include <stdint.h>

#include "kvd/kvd_error.h"

typedef enum lab_reading {
    LAB_RAM_COLD, /* copied by all threads from a buffer much larger than the caches, never twice in a row */
    LAB_RAM_WARM, /* copied by all threads from where it was just read */
    LAB_DISK,     /* read from a file past the page cache */
    LAB_100_MB_S, /* copied as it comes in, at this rate by the clock */
    LAB_500_MB_S,
    LAB_1_GB_S,
    LAB_N_READINGS
} lab_reading;

/* "RAM, cold" */
const char *lab_reading_name(lab_reading how);

typedef struct lab_reader lab_reader;

/* For pieces of at most max_bytes. n_threads: those that copy. dir: for the file, which
 * has no name and is gone with the process; NULL or a folder that does not serve: no
 * LAB_DISK, and lab_reader_no_disk says why. *out: returned owned. KVD_E_NOMEM. */
int lab_reader_create(lab_reader **out, int64_t max_bytes, int n_threads, const char *dir, kvd_error *err);
/* Sets *r to NULL; NULL inside is fine. */
void lab_reader_free(lab_reader **r);

/* Why there is no LAB_DISK, or NULL. Borrowed. */
const char *lab_reader_no_disk(const lab_reader *r);
/* Is the disk read with O_DIRECT? */
bool lab_reader_direct(const lab_reader *r);
/* Bytes of the buffer that cold reads go through. */
int64_t lab_reader_arena_bytes(const lab_reader *r);

/* One sample: seconds for `bytes` bytes, the mean of as many repetitions as it takes to
 * be well above the clock's grain. KVD_E_IO of the disk, KVD_E_NOMEM: no threads. */
int lab_reader_time(lab_reader *r, lab_reading how, int64_t bytes, double *seconds, kvd_error *err);

#endif
