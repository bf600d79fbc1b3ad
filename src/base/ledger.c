#define _GNU_SOURCE
#include "base/ledger.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/error.h"

/* The 64 bytes in front of every pointer that is handed out. */
typedef struct {
    kvd_ledger *ledger;
    size_t bytes;    /* as asked for: what the ledger counts */
    void *map;       /* start of the mapping, or NULL: malloc'd */
    size_t map_bytes;
    void *raw;       /* malloc'd: what free() wants */
    kvd_account account;
} header;

enum { HEADER_BYTES = 64, PAGE_BYTES = 4096 };
#define HUGE_BYTES ((size_t)2 << 20)
_Static_assert(sizeof(header) <= HEADER_BYTES, "the header must fit");

static const struct {
    const char *name;
    bool context;
} accounts[] = {
#define KVD_X(id, name, context) {name, context},
    KVD_ACCOUNTS(KVD_X)
#undef KVD_X
};

void kvd__ledger_init(kvd_ledger *l, int64_t budget_bytes)
{
    memset(l, 0, sizeof *l);
    l->budget_bytes = budget_bytes > 0 ? budget_bytes : INT64_MAX;
}

kvd_ledger *kvd__ledger_create(int64_t budget_bytes, kvd_error *err)
{
    kvd_ledger *l = malloc(sizeof *l);
    if (l)
        kvd__ledger_init(l, budget_bytes);
    else
        kvd__fail(err, KVD_E_NOMEM, "out of memory: the ledger");
    return l;
}

void kvd__ledger_destroy(kvd_ledger **l)
{
    free(*l);
    *l = NULL;
}

const char *kvd__account_name(kvd_account a) { return accounts[a].name; }
bool kvd__account_is_context(kvd_account a) { return accounts[a].context; }

int64_t kvd__ledger_room(const kvd_ledger *l)
{
    return l->budget_bytes - atomic_load(&l->context_now);
}

static void raise_peak(_Atomic int64_t *peak, int64_t value)
{
    int64_t old = atomic_load(peak);
    while (value > old && !atomic_compare_exchange_weak(peak, &old, value))
        ;
}

static int reserve(kvd_ledger *l, kvd_account a, int64_t bytes, kvd_error *err)
{
    int64_t n = atomic_fetch_add(&l->n_allocs, 1) + 1;
    if (l->fail_at && n >= l->fail_at)
        return kvd__fail(err, KVD_E_NOMEM, "out of memory (injected at allocation %lld)", (long long)n);
    if (accounts[a].context) {
        int64_t old = atomic_load(&l->context_now), budget;
        do {
            budget = atomic_load(&l->budget_bytes);
            if (bytes > budget - old) {
                int rc = kvd__fail(err, KVD_E_BUDGET,
                                   "context memory: %lld bytes more do not fit the budget of %lld (%lld in use)",
                                   (long long)bytes, (long long)l->budget_bytes, (long long)old);
                if (err)
                    err->need_bytes = old + bytes;
                return rc;
            }
        } while (!atomic_compare_exchange_weak(&l->context_now, &old, old + bytes));
        raise_peak(&l->context_peak, old + bytes);
    }
    raise_peak(&l->peak[a], atomic_fetch_add(&l->now[a], bytes) + bytes);
    return 0;
}

static void release(kvd_ledger *l, kvd_account a, int64_t bytes)
{
    atomic_fetch_sub(&l->now[a], bytes);
    if (accounts[a].context)
        atomic_fetch_sub(&l->context_now, bytes);
}

static size_t page_round(size_t n, size_t page) { return (n + page - 1) & ~(page - 1); }

static void *no_memory(kvd_account a, size_t bytes, kvd_error *err)
{
    kvd__fail(err, KVD_E_NOMEM, "out of memory: %zu bytes for %s", bytes, accounts[a].name);
    if (err)
        err->need_bytes = bytes <= INT64_MAX ? (int64_t)bytes : 0;
    return NULL;
}

static bool too_large(size_t bytes) { return bytes > (size_t)INT64_MAX / 4; }

/* Memory for h.bytes that are reserved already, or NULL. `map`: whole pages. */
static char *place(header h, bool map, bool huge)
{
    char *p;
    if (map) {
        size_t need = page_round(h.bytes + HEADER_BYTES, PAGE_BYTES), slack = huge ? HUGE_BYTES : 0;
        char *m = mmap(NULL, need + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (m == MAP_FAILED)
            return NULL;
        if (huge) { /* trim to a 2 MiB boundary, so that whole huge pages fit */
            char *start = (char *)page_round((size_t)m, HUGE_BYTES);
            if (start > m)
                munmap(m, (size_t)(start - m));
            if (m + slack > start)
                munmap(start + need, (size_t)(m + slack - start));
            m = start;
#ifdef MADV_HUGEPAGE
            madvise(m, need, MADV_HUGEPAGE);
#endif
        }
        h.map = m;
        h.map_bytes = need;
        p = m + HEADER_BYTES;
    } else {
        h.raw = calloc(1, h.bytes + HEADER_BYTES + 63);
        if (!h.raw)
            return NULL;
        p = (char *)page_round((size_t)h.raw + HEADER_BYTES, 64);
    }
    memcpy(p - HEADER_BYTES, &h, sizeof h);
    return p;
}

static void *allocate(kvd_ledger *l, kvd_account a, size_t bytes, bool map, bool huge, kvd_error *err)
{
    if (too_large(bytes))
        return no_memory(a, bytes, err);
    if (reserve(l, a, (int64_t)bytes, err))
        return NULL;
    char *p = place((header){.ledger = l, .bytes = bytes, .account = a}, map, huge);
    if (p)
        return p;
    release(l, a, (int64_t)bytes);
    return no_memory(a, bytes, err);
}

void *kvd__alloc(kvd_ledger *l, kvd_account a, size_t bytes, kvd_error *err)
{
    return allocate(l, a, bytes, bytes >= KVD__MAP_THRESHOLD, false, err);
}

void *kvd__alloc_huge(kvd_ledger *l, kvd_account a, size_t bytes, kvd_error *err)
{
    return allocate(l, a, bytes, true, true, err);
}

void *kvd__alloc_array(kvd_ledger *l, kvd_account a, size_t n, size_t size, kvd_error *err)
{
    size_t bytes;
    if (__builtin_mul_overflow(n, size, &bytes)) {
        kvd__fail(err, KVD_E_NOMEM, "out of memory: %zu times %zu bytes", n, size);
        return NULL;
    }
    return kvd__alloc(l, a, bytes, err);
}

void kvd__free(void *p)
{
    if (!p)
        return;
    header h;
    memcpy(&h, (char *)p - HEADER_BYTES, sizeof h);
    release(h.ledger, h.account, (int64_t)h.bytes);
    if (h.map)
        munmap(h.map, h.map_bytes);
    else
        free(h.raw);
}

/* A mapped block: the kernel moves pages, there is never a second copy. */
static void *remap(header h, size_t bytes, kvd_error *err)
{
    kvd_ledger *l = h.ledger;
    kvd_account a = h.account;
    size_t old = h.bytes, need = page_round(bytes + HEADER_BYTES, PAGE_BYTES);
    if (bytes > old && reserve(l, a, (int64_t)(bytes - old), err))
        return NULL;
    if (need != h.map_bytes) {
        char *m = mremap(h.map, h.map_bytes, need, MREMAP_MAYMOVE);
        if (m == MAP_FAILED) {
            if (bytes > old)
                release(l, a, (int64_t)(bytes - old));
            return no_memory(a, bytes, err);
        }
        h.map = m;
    }
    if (bytes < old)
        release(l, a, (int64_t)(old - bytes));
    h.bytes = bytes;
    h.map_bytes = need;
    memcpy(h.map, &h, sizeof h);
    /* Pages that the kernel adds are zero; the tail of the old last one may still
     * hold what was shrunk away. */
    size_t from = old + HEADER_BYTES, to = page_round(from, PAGE_BYTES);
    if (to > bytes + HEADER_BYTES)
        to = bytes + HEADER_BYTES;
    if (to > from)
        memset((char *)h.map + from, 0, to - from);
    return (char *)h.map + HEADER_BYTES;
}

/* A block below a page: only the difference is charged, although for a moment
 * there are two. A table that grows would else need a budget for both. */
static void *regrow(header h, void *p, size_t bytes, kvd_error *err)
{
    kvd_ledger *l = h.ledger;
    kvd_account a = h.account;
    size_t old = h.bytes;
    if (bytes <= old) { /* in place: can not fail */
        release(l, a, (int64_t)(old - bytes));
        h.bytes = bytes;
        memcpy((char *)p - HEADER_BYTES, &h, sizeof h);
        return p;
    }
    if (reserve(l, a, (int64_t)(bytes - old), err))
        return NULL;
    char *q = place((header){.ledger = l, .bytes = bytes, .account = a}, bytes >= PAGE_BYTES, false);
    if (!q) {
        release(l, a, (int64_t)(bytes - old));
        return no_memory(a, bytes, err);
    }
    memcpy(q, p, old);
    free(h.raw);
    return q;
}

void *kvd__realloc(kvd_ledger *l, kvd_account a, void *p, size_t bytes, kvd_error *err)
{
    if (!p)
        return allocate(l, a, bytes, bytes >= PAGE_BYTES, false, err);
    if (too_large(bytes))
        return no_memory(a, bytes, err);
    header h;
    memcpy(&h, (char *)p - HEADER_BYTES, sizeof h);
    if (h.map)
        return remap(h, bytes, err);
    if (h.bytes < PAGE_BYTES)
        return regrow(h, p, bytes, err);
    void *q = allocate(l, a, bytes, bytes >= PAGE_BYTES, false, err);
    if (!q)
        return NULL;
    memcpy(q, p, bytes < h.bytes ? bytes : h.bytes);
    kvd__free(p);
    return q;
}

char *kvd__strndup(kvd_ledger *l, kvd_account a, const char *s, size_t n, kvd_error *err)
{
    char *p = kvd__alloc(l, a, n + 1, err);
    if (p)
        memcpy(p, s, n);
    return p;
}

void *kvd__map(kvd_ledger *l, kvd_account a, size_t bytes, kvd_error *err)
{
    if (reserve(l, a, 0, err)) /* for fault injection */
        return NULL;
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p != MAP_FAILED)
        return p;
    kvd__fail(err, KVD_E_NOMEM, "out of memory: %zu bytes for %s", bytes, accounts[a].name);
    return NULL;
}

void kvd__unmap(void *p, size_t bytes) { munmap(p, bytes); }

int kvd__charge(kvd_ledger *l, kvd_account a, int64_t bytes, kvd_error *err) { return reserve(l, a, bytes, err); }

void kvd__uncharge(kvd_ledger *l, kvd_account a, int64_t bytes) { release(l, a, bytes); }
