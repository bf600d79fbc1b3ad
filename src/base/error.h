/* base: setting a kvd_error. May be included by every layer. */
#ifndef KVD_BASE_ERROR_H
#define KVD_BASE_ERROR_H

#include "kvd/kvd_error.h"

/* Store code and a formatted line in err (NULL: only the code counts) and
 * return code, so that a failing path reads `return kvd__fail(err, ...)`.
 * Bytes below 0x20 and 0x7f of the line (they can come from a hostile file)
 * become '?'. offset, need_bytes and max_tokens are reset. */
int kvd__fail(kvd_error *err, int code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* The same with a byte offset of the input file. */
int kvd__fail_at(kvd_error *err, int code, int64_t offset, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

#endif
