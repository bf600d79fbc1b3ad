#include "token/special.h"

#include <string.h>

#include "base/error.h"

static int new_node(kvd__special *s, kvd_ledger *l, kvd_error *err)
{
    if (s->n_nodes == s->cap) {
        uint32_t cap = s->cap ? s->cap * 2 : 256;
        int32_t *token = kvd__realloc(l, KVD_ACC_HOST, s->token, cap * sizeof *token, err);
        if (!token)
            return KVD_E_NOMEM;
        s->token = token;
        bool *control = kvd__realloc(l, KVD_ACC_HOST, s->control, cap * sizeof *control, err);
        if (!control)
            return KVD_E_NOMEM;
        s->control = control;
        s->cap = cap;
    }
    s->token[s->n_nodes++] = -1;
    return 0;
}

int kvd__special_init(kvd__special *s, kvd_ledger *l, kvd_error *err)
{
    int rc = kvd__pairs_init(&s->edges, 256, l, err);
    return rc ? rc : new_node(s, l, err);
}

void kvd__special_free(kvd__special *s)
{
    kvd__pairs_free(&s->edges);
    kvd__free(s->token);
    kvd__free(s->control);
    *s = (kvd__special){0};
}

/* Node 0 is the root, and nobody's child. */
static uint32_t child(const kvd__special *s, uint32_t node, char byte)
{
    const kvd__pair *e = kvd__pairs_find(&s->edges, (uint64_t)node << 8 | (unsigned char)byte);
    return e ? e->a : 0;
}

int kvd__special_add(kvd__special *s, kvd_bytes text, int32_t token, bool control, kvd_ledger *l, kvd_error *err)
{
    uint32_t node = 0;
    for (size_t i = 0; i < text.n; i++) {
        uint32_t next = child(s, node, text.data[i]);
        if (!next) {
            next = s->n_nodes;
            int rc = new_node(s, l, err);
            if (!rc)
                rc = kvd__pairs_add(&s->edges, (uint64_t)node << 8 | (unsigned char)text.data[i], next, 0, l, err);
            if (rc)
                return rc;
        }
        node = next;
    }
    if (s->token[node] >= 0)
        return kvd__fail(err, KVD_E_ENCODING, "tokens %d and %d of the vocabulary are the same", s->token[node], token);
    s->token[node] = token;
    s->control[node] = control;
    s->first[(unsigned char)text.data[0]] = true;
    if (text.n > s->max_bytes)
        s->max_bytes = (uint32_t)text.n;
    return 0;
}

int32_t kvd__special_find(const kvd__special *s, const char *text, size_t n)
{
    uint32_t node = 0;
    for (size_t i = 0; i < n; i++)
        if (!(node = child(s, node, text[i])))
            return -1;
    return n ? s->token[node] : -1;
}

/* Mark the lengths of the tokens that stand at the beginning of text. */
static bool mark_lengths(const kvd__special *s, const char *text, size_t n, bool control, bool *lengths)
{
    bool any = false;
    uint32_t node = 0;
    for (size_t i = 0; i < n; i++) {
        if (!(node = child(s, node, text[i])))
            break;
        if (s->token[node] >= 0 && (control || !s->control[node]))
            any = lengths[i + 1] = true;
    }
    return any;
}

static int push(kvd__fragments *f, kvd__fragment one, kvd_ledger *l, kvd_error *err)
{
    if (f->n == f->cap) {
        uint32_t cap = f->cap ? f->cap * 2 : 64;
        kvd__fragment *list = kvd__realloc(l, KVD_ACC_HOST, f->list, (size_t)cap * sizeof *list, err);
        if (!list)
            return KVD_E_NOMEM;
        f->list = list;
        f->cap = cap;
    }
    f->list[f->n++] = one;
    return 0;
}

/* Take the tokens of one length out of a stretch of text. */
static int cut_length(const kvd__special *s, const char *text, kvd__fragment from, uint32_t length, bool control,
                      kvd__fragments *out, kvd_ledger *l, kvd_error *err)
{
    uint32_t done = from.at, end = from.at + from.n;
    int rc = 0;
    for (uint32_t i = from.at; end - i >= length;) {
        int32_t token = -1;
        uint32_t node = 0, k = 0;
        if (s->first[(unsigned char)text[i]])
            while (k < length && (node = child(s, node, text[i + k])))
                k++;
        if (k == length && (control || !s->control[node]))
            token = s->token[node];
        if (token < 0) {
            i++;
            continue;
        }
        if (i > done)
            rc = push(out, (kvd__fragment){done, i - done, -1}, l, err);
        if (!rc)
            rc = push(out, (kvd__fragment){i, length, token}, l, err);
        if (rc)
            return rc;
        done = i += length;
    }
    return end > done ? push(out, (kvd__fragment){done, end - done, -1}, l, err) : 0;
}

int kvd__special_cut(const kvd__special *s, const char *text, size_t n, bool control, kvd__fragments *out,
                     kvd_ledger *l, kvd_error *err)
{
    out->n = 0;
    if (!n)
        return 0;
    int rc = push(out, (kvd__fragment){0, (uint32_t)n, -1}, l, err);
    bool *lengths = rc ? NULL : kvd__alloc(l, KVD_ACC_HOST, s->max_bytes + 1u, err), any = false;
    if (!lengths)
        return KVD_E_NOMEM;
    for (size_t i = 0; i < n; i++)
        if (s->first[(unsigned char)text[i]])
            any |= mark_lengths(s, text + i, n - i, control, lengths);
    kvd__fragments before = {0};
    for (uint32_t length = any ? s->max_bytes : 0; !rc && length > 0; length--) {
        if (!lengths[length])
            continue;
        kvd__fragments swap = before;
        before = *out;
        *out = swap;
        out->n = 0;
        for (uint32_t i = 0; !rc && i < before.n; i++) {
            kvd__fragment f = before.list[i];
            rc = f.token >= 0 || f.n < length ? push(out, f, l, err)
                                              : cut_length(s, text, f, length, control, out, l, err);
        }
    }
    kvd__free(before.list);
    kvd__free(lengths);
    return rc;
}
