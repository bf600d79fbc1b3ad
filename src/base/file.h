/* base: reading a file with pread only (no mapping: a file that shrinks while it
 * is read is an error, not a SIGBUS). */
#ifndef KVD_BASE_FILE_H
#define KVD_BASE_FILE_H

#include <stddef.h>
#include <stdint.h>

#include "kvd/kvd_error.h"

typedef struct kvd_file {
    int fd; /* -1: closed */
    int64_t size_bytes;
} kvd_file;

/* Regular files only. */
int kvd__file_open(kvd_file *f, const char *path, kvd_error *err);
void kvd__file_close(kvd_file *f);

/* All n bytes at offset, or an error: KVD_E_GGUF_TRUNCATED past the end. May be
 * called from several threads. */
int kvd__file_read(const kvd_file *f, int64_t offset, void *buf, size_t n, kvd_error *err);

#endif
