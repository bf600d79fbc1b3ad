/* base: the monotonic clock, for statistics and for measuring; no result depends on
 * it. */
#ifndef KVD_BASE_CLOCK_H
#define KVD_BASE_CLOCK_H

#include <stdint.h>

int64_t kvd__now_ns(void);

static inline double kvd__seconds(void) { return 1e-9 * (double)kvd__now_ns(); }

#endif
