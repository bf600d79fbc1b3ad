/* base: the lesser and the greater of two 64-bit numbers. */
#ifndef KVD_BASE_MINMAX_H
#define KVD_BASE_MINMAX_H

#include <stdint.h>

static inline int64_t kvd__min64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t kvd__max64(int64_t a, int64_t b) { return a > b ? a : b; }

#endif
