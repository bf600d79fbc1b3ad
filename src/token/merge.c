#include "token/merge.h"

int kvd__merger_reserve(kvd__merger *m, uint32_t n, kvd_ledger *l, kvd_error *err)
{
    if (n <= m->cap)
        return 0;
    kvd__merger_free(m);
    uint32_t cap = n < 1024 ? 1024 : n;
    m->nodes = kvd__alloc_array(l, KVD_ACC_HOST, cap, sizeof *m->nodes, err);
    /* n - 1 candidates at first; each merge takes one away and adds at most two */
    m->heap = m->nodes ? kvd__alloc_array(l, KVD_ACC_HOST, cap, 2 * sizeof *m->heap, err) : NULL;
    if (!m->heap) {
        kvd__merger_free(m);
        return KVD_E_NOMEM;
    }
    m->cap = cap;
    return 0;
}

void kvd__merger_free(kvd__merger *m)
{
    kvd__free(m->nodes);
    kvd__free(m->heap);
    *m = (kvd__merger){.text = m->text};
}

static void sift_down(kvd__candidate *heap, size_t n, size_t i, kvd__candidate c)
{
    for (size_t child; (child = 2 * i + 1) < n; i = child) {
        if (child + 1 < n && heap[child + 1].order < heap[child].order)
            child++;
        if (c.order <= heap[child].order)
            break;
        heap[i] = heap[child];
    }
    heap[i] = c;
}

static void sift_up(kvd__candidate *heap, size_t i, kvd__candidate c)
{
    for (size_t parent; i > 0 && heap[parent = (i - 1) / 2].order > c.order; i = parent)
        heap[i] = heap[parent];
    heap[i] = c;
}

static bool candidate_of(const kvd__merger *m, uint32_t left, uint32_t right, kvd__pair_fn pair, const void *ctx,
                         kvd__candidate *c)
{
    if (left == KVD__NO_NODE || right == KVD__NO_NODE)
        return false;
    const kvd__node *a = &m->nodes[left], *b = &m->nodes[right];
    uint32_t priority;
    if (!pair(ctx, m->text, a, b, &priority, &c->symbol))
        return false;
    c->order = (uint64_t)priority << 32 | left;
    c->n = a->n + b->n;
    return true;
}

void kvd__merger_run(kvd__merger *m, uint32_t n, kvd__pair_fn pair, const void *ctx)
{
    kvd__node *nodes = m->nodes;
    kvd__candidate *heap = m->heap, c;
    size_t n_heap = 0;
    for (uint32_t i = 0; i < n; i++) {
        nodes[i].prev = i ? i - 1 : KVD__NO_NODE;
        nodes[i].next = i + 1 < n ? i + 1 : KVD__NO_NODE;
    }
    for (uint32_t i = 0; i + 1 < n; i++)
        if (candidate_of(m, i, i + 1, pair, ctx, &c))
            heap[n_heap++] = c;
    for (size_t i = n_heap / 2; i-- > 0;)
        sift_down(heap, n_heap, i, heap[i]);

    while (n_heap) {
        kvd__candidate best = heap[0];
        if (--n_heap)
            sift_down(heap, n_heap, 0, heap[n_heap]);
        uint32_t left = (uint32_t)best.order, right = nodes[left].next;
        if (nodes[left].n == 0 || right == KVD__NO_NODE || nodes[left].n + nodes[right].n != best.n)
            continue;
        nodes[left].n = best.n;
        nodes[left].symbol = best.symbol;
        nodes[left].next = nodes[right].next;
        nodes[right].n = 0;
        if (nodes[right].next != KVD__NO_NODE)
            nodes[nodes[right].next].prev = left;
        if (candidate_of(m, nodes[left].prev, left, pair, ctx, &c))
            sift_up(heap, n_heap++, c);
        if (candidate_of(m, left, nodes[left].next, pair, ctx, &c))
            sift_up(heap, n_heap++, c);
    }
}
