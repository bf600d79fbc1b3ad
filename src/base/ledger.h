/* base: the ledger, and the only allocator of the library.
 *
 * Every allocation names an account. A ledger has one byte budget; the accounts
 * that hold *context* memory (KV blocks, stream, layer scratch, checkpoints, and
 * later drafts and prefixes) draw on it together, by reservation before the
 * allocation: the sum can not pass the budget, not even for a moment and not
 * from several threads. Weights, compute scratch and host objects (vocabulary,
 * metadata) do not grow with context; they are counted but not limited.
 *
 * What is counted is what was asked for. The allocator adds a 64-byte header
 * and, from KVD__MAP_THRESHOLD on, maps whole pages that go back to the kernel on
 * free, so the process's high-water mark follows the ledger.
 *
 * Thread safety: all functions may be called from any thread. */
#ifndef KVD_BASE_LEDGER_H
#define KVD_BASE_LEDGER_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kvd/kvd_error.h"

/* X(id, name, counts against the context budget) */
#define KVD_ACCOUNTS(X)                                                        \
    X(WEIGHTS, "weights", false)                                               \
    X(KV, "kv", true)                                                          \
    X(STREAM, "stream", true)                                                  \
    X(LAYER, "layer", true)                                                    \
    X(CHECKPOINT, "checkpoint", true)                                          \
    X(COMPUTE, "compute", false)                                               \
    X(HOST, "host", false)

typedef enum kvd_account {
#define KVD_X(id, name, context) KVD_ACC_##id,
    KVD_ACCOUNTS(KVD_X)
#undef KVD_X
    KVD_ACC_COUNT
} kvd_account;

#define KVD__MAP_THRESHOLD ((size_t)128 * 1024)

typedef struct kvd_ledger {
    _Atomic int64_t now[KVD_ACC_COUNT];
    _Atomic int64_t peak[KVD_ACC_COUNT];
    _Atomic int64_t context_now;  /* sum over the context accounts */
    _Atomic int64_t context_peak; /* peak of that sum, not sum of peaks */
    _Atomic int64_t budget_bytes; /* of context; INT64_MAX: unlimited */
    /* Fault injection for tests: allocation number fail_at (from 1) and all
     * after it fail; 0: never. */
    int64_t fail_at;
    _Atomic int64_t n_allocs;
} kvd_ledger;

/* budget_bytes <= 0 means unlimited. */
void kvd__ledger_init(kvd_ledger *l, int64_t budget_bytes);

/* The same on the heap; NULL with err set when out of memory. All that was
 * allocated from it must be freed before. */
kvd_ledger *kvd__ledger_create(int64_t budget_bytes, kvd_error *err);
void kvd__ledger_destroy(kvd_ledger **l);

const char *kvd__account_name(kvd_account a);
bool kvd__account_is_context(kvd_account a);

/* Bytes of context memory still free under the budget. */
int64_t kvd__ledger_room(const kvd_ledger *l);

/* Return zeroed memory of `bytes` bytes aligned to 64, charged to account a, or
 * NULL with err set: KVD_E_BUDGET (need_bytes: the whole context need) or
 * KVD_E_NOMEM. bytes == 0 gives a valid pointer. Free with kvd__free. */
void *kvd__alloc(kvd_ledger *l, kvd_account a, size_t bytes, kvd_error *err);

/* n*size with overflow check, else as kvd__alloc. */
void *kvd__alloc_array(kvd_ledger *l, kvd_account a, size_t n, size_t size, kvd_error *err);

/* Like kvd__alloc, for large read-mostly memory: 2 MiB aligned mapping with
 * transparent huge pages asked for. Not touched: the first writer places it. */
void *kvd__alloc_huge(kvd_ledger *l, kvd_account a, size_t bytes, kvd_error *err);

/* Grow or shrink; the old pointer is valid on failure (NULL returned). The
 * grown part is zeroed. p == NULL allocates. What comes from here is mapped from a
 * page (4096 bytes) on and then grows without a second copy; only the difference
 * is charged, also below a page, where two blocks exist for a moment. Such a block
 * shrinks without failing. A block of a page or more that kvd__alloc made below
 * its threshold is copied, and both are charged for that moment. */
void *kvd__realloc(kvd_ledger *l, kvd_account a, void *p, size_t bytes, kvd_error *err);

/* NULL is allowed. */
void kvd__free(void *p);

/* Address space, for a caller that counts by hand what it uses of it: zeroed pages
 * that exist from their first touch on. 4096-byte aligned; NULL with err set. */
void *kvd__map(kvd_ledger *l, kvd_account a, size_t bytes, kvd_error *err);
void kvd__unmap(void *p, size_t bytes);
/* Count bytes of a mapping, and no more. Charging may be refused (KVD_E_BUDGET). */
int kvd__charge(kvd_ledger *l, kvd_account a, int64_t bytes, kvd_error *err);
void kvd__uncharge(kvd_ledger *l, kvd_account a, int64_t bytes);

/* Copy of a string of n bytes, terminated. */
char *kvd__strndup(kvd_ledger *l, kvd_account a, const char *s, size_t n, kvd_error *err);

#endif
