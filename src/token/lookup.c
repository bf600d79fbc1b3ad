#include "token/lookup.h"

#include <string.h>

#include "base/error.h"

/* --- pieces --- */

int kvd__pieces_add(kvd__pieces *p, const char *data, size_t n, kvd_ledger *l, kvd_error *err)
{
    uint32_t used = p->n ? p->at[p->n] : 0;
    if (n > (size_t)INT32_MAX - used || p->n == (uint32_t)INT32_MAX)
        return kvd__fail(err, KVD_E_ENCODING, "vocabulary of more than 2 GiB of text");
    if (p->n + 2 > p->cap) {
        uint32_t cap = p->cap < 64 ? 128 : p->cap + p->cap / 2;
        uint32_t *at = kvd__realloc(l, KVD_ACC_HOST, p->at, (size_t)cap * sizeof *at, err);
        if (!at)
            return KVD_E_NOMEM;
        p->at = at;
        p->cap = cap;
    }
    if (used + (uint32_t)n > p->cap_bytes || !p->data) {
        size_t cap = ((size_t)used + n) * 3 / 2 + 256;
        char *block = kvd__realloc(l, KVD_ACC_HOST, p->data, cap, err);
        if (!block)
            return KVD_E_NOMEM;
        p->data = block;
        p->cap_bytes = (uint32_t)cap;
    }
    if (n)
        memcpy(p->data + used, data, n);
    p->at[p->n] = used;
    p->at[++p->n] = used + (uint32_t)n;
    return 0;
}

void kvd__pieces_free(kvd__pieces *p)
{
    kvd__free(p->data);
    kvd__free(p->at);
    *p = (kvd__pieces){0};
}

/* --- strings --- */

/* Eight bytes at a time; only ever compared within one process. */
static uint32_t hash_bytes(const char *data, size_t n)
{
    const uint64_t k = 0x9e3779b97f4a7c15u;
    uint64_t h = n * k, w;
    for (; n >= 8; data += 8, n -= 8) {
        memcpy(&w, data, 8);
        h = (h ^ w) * k;
        h ^= h >> 32;
    }
    w = 0;
    for (size_t i = 0; i < n; i++)
        w |= (uint64_t)(unsigned char)data[i] << (8 * i);
    h = (h ^ w) * k;
    return (uint32_t)(h >> 32) ^ (uint32_t)(h >> 17);
}

/* Least power of two with room for n entries at 3/4. */
static size_t table_size(uint64_t n)
{
    size_t size = 16;
    while (size - size / 4 <= n)
        size *= 2;
    return size;
}

int kvd__strings_init(kvd__strings *s, int64_t expected, kvd_ledger *l, kvd_error *err)
{
    size_t size = table_size((uint64_t)expected);
    s->slots = kvd__alloc_array(l, KVD_ACC_HOST, size, sizeof *s->slots, err);
    if (!s->slots)
        return KVD_E_NOMEM;
    s->mask = (uint32_t)(size - 1);
    s->n = 0;
    return 0;
}

void kvd__strings_free(kvd__strings *s)
{
    kvd__free(s->slots);
    *s = (kvd__strings){0};
}

int32_t kvd__strings_find(const kvd__strings *s, const kvd__pieces *p, const char *data, size_t n)
{
    uint32_t h = hash_bytes(data, n);
    for (uint32_t i = h & s->mask; s->slots[i]; i = (i + 1) & s->mask) {
        if ((uint32_t)(s->slots[i] >> 32) != h)
            continue;
        uint32_t number = (uint32_t)s->slots[i] - 1;
        kvd_bytes b = kvd__piece(p, number);
        if (b.n == n && !memcmp(b.data, data, n))
            return (int32_t)number;
    }
    return -1;
}

static void place(kvd__strings *s, uint64_t slot)
{
    uint32_t i = (uint32_t)(slot >> 32) & s->mask;
    while (s->slots[i])
        i = (i + 1) & s->mask;
    s->slots[i] = slot;
    s->n++;
}

int kvd__strings_add(kvd__strings *s, const kvd__pieces *p, uint32_t i, kvd_ledger *l, kvd_error *err)
{
    if (s->n + 1 > s->mask - s->mask / 4) {
        kvd__strings bigger;
        int rc = kvd__strings_init(&bigger, (int64_t)s->n * 2, l, err);
        if (rc)
            return rc;
        for (uint64_t j = 0; j <= s->mask; j++)
            if (s->slots[j])
                place(&bigger, s->slots[j]);
        kvd__strings_free(s);
        *s = bigger;
    }
    kvd_bytes b = kvd__piece(p, i);
    place(s, (uint64_t)hash_bytes(b.data, b.n) << 32 | (i + 1));
    return 0;
}

/* --- pairs --- */

int kvd__pairs_init(kvd__pairs *t, int64_t expected, kvd_ledger *l, kvd_error *err)
{
    size_t size = table_size((uint64_t)expected);
    t->slots = kvd__alloc_array(l, KVD_ACC_HOST, size, sizeof *t->slots, err);
    if (!t->slots)
        return KVD_E_NOMEM;
    for (size_t i = 0; i < size; i++)
        t->slots[i].key = UINT64_MAX;
    t->mask = (uint32_t)(size - 1);
    t->n = 0;
    return 0;
}

void kvd__pairs_free(kvd__pairs *t)
{
    kvd__free(t->slots);
    *t = (kvd__pairs){0};
}

static void pair_place(kvd__pairs *t, kvd__pair p)
{
    uint32_t i = (uint32_t)((p.key * 0x9e3779b97f4a7c15u) >> 32) & t->mask;
    while (t->slots[i].key != UINT64_MAX)
        i = (i + 1) & t->mask;
    t->slots[i] = p;
    t->n++;
}

int kvd__pairs_add(kvd__pairs *t, uint64_t key, uint32_t a, uint32_t b, kvd_ledger *l, kvd_error *err)
{
    if (kvd__pairs_find(t, key))
        return 0;
    if (t->n + 1 > t->mask - t->mask / 4) {
        kvd__pairs bigger;
        int rc = kvd__pairs_init(&bigger, (int64_t)t->n * 2, l, err);
        if (rc)
            return rc;
        for (uint64_t i = 0; i <= t->mask; i++)
            if (t->slots[i].key != UINT64_MAX)
                pair_place(&bigger, t->slots[i]);
        kvd__pairs_free(t);
        *t = bigger;
    }
    pair_place(t, (kvd__pair){key, a, b});
    return 0;
}
