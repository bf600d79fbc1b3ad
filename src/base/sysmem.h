/* base: how much memory this process can still get. */
#ifndef KVD_BASE_SYSMEM_H
#define KVD_BASE_SYSMEM_H

#include <stdint.h>

/* The least of MemAvailable, the cgroup's limit minus its use (v2 and v1, with
 * all ancestors), and RLIMIT_AS minus the address space in use. Bytes, at least 0. */
int64_t kvd__memory_available(void);

#endif
