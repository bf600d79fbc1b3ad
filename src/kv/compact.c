#include "kv/compact.h"

#include <string.h>

#include "base/error.h"

static int64_t tiles_up(int64_t n) { return (n + KVD__TILE - 1) / KVD__TILE * KVD__TILE; }

static int64_t head_bytes(const kvd_kv_shape *s) { return kvd__kv_block_bytes(s) / s->n_kv_heads; }

/* pos, score and slot of one entry. */
enum { ENTRY_BYTES = sizeof(int64_t) + sizeof(double) + sizeof(int32_t) };

static int64_t lists_bytes(int64_t n_sets, int64_t capacity) { return n_sets * capacity * ENTRY_BYTES; }

int64_t kvd__compact_arena_bytes(const kvd_kv_shape *s, int64_t budget)
{
    int64_t n_sets = (int64_t)s->n_layers * s->n_kv_heads, capacity = tiles_up(budget);
    return n_sets * (capacity / KVD__BLOCK * head_bytes(s) + (int64_t)sizeof(kvd_set)) + lists_bytes(n_sets, capacity);
}

/* How many of n_observed rows a thread probes at once. */
static int64_t probe_rows(int64_t n_observed) { return n_observed < KVD__PROBE_ROWS ? n_observed : KVD__PROBE_ROWS; }

/* Bytes of a feed's buffers, for a head's `slots`. */
typedef struct {
    int64_t gathered, rotated, lists, keep, weights, rows;
} feed_sizes;

static feed_sizes sizes_of(const kvd_kv_shape *s, bool renumber, int64_t n_threads, int64_t n_rows, int64_t n_observed, int64_t slots)
{
    int64_t all = s->n_kv_heads * slots, block = head_bytes(s) * s->n_kv_heads * (slots / KVD__BLOCK);
    int64_t probing = n_threads < s->n_kv_heads ? n_threads : s->n_kv_heads; /* threads that have a head */
    return (feed_sizes){.gathered = n_rows > 1 ? block : 0, .rotated = renumber ? block / 2 : 0,
                        .lists = n_rows > 1 ? lists_bytes(s->n_kv_heads, slots) : 0, .keep = all,
                        .weights = n_observed ? all * (int64_t)sizeof(double) : 0,
                        .rows = probing * probe_rows(n_observed) * slots * (int64_t)sizeof(float)};
}

int64_t kvd__compact_feed_bytes(const kvd_kv_shape *s, kvd_policy_kind kind, bool renumber, int64_t budget, int n_threads,
                                int64_t n_rows)
{
    feed_sizes z = sizes_of(s, renumber, n_threads, n_rows, kvd__keeper(kind)->observes(n_rows, budget),
                            tiles_up(budget + (n_rows > 1 ? n_rows : 0)));
    return kvd__compact_arena_bytes(s, budget) + n_rows * s->stream_row_bytes + z.gathered + z.rotated + z.lists + z.weights + z.keep + z.rows;
}

/* Point n sets into their lists. */
static void place_lists(kvd_set *sets, int64_t n, int64_t capacity, char *lists)
{
    for (int64_t i = 0; i < n; i++) {
        sets[i].pos = (int64_t *)(void *)lists + i * capacity;
        sets[i].score = (double *)(void *)(lists + n * capacity * (int64_t)sizeof(int64_t)) + i * capacity;
        sets[i].slot = (int32_t *)(void *)(lists + n * capacity * (int64_t)(sizeof(int64_t) + sizeof(double))) + i * capacity;
        sets[i].n = 0;
    }
}

int kvd__compact_create(kvd_compact **out, const kvd_kv_shape *s, kvd_policy_kind kind, bool renumber, int64_t budget,
                        int n_threads, kvd_ledger *l, kvd_error *err)
{
    int64_t n_sets = (int64_t)s->n_layers * s->n_kv_heads, capacity = tiles_up(budget);
    kvd_compact *c = kvd__alloc(l, KVD_ACC_HOST, sizeof *c, err);
    if (!c)
        return KVD_E_NOMEM;
    *c = (kvd_compact){.shape = *s, .ledger = l, .keeper = kvd__keeper(kind), .renumber = renumber, .budget = budget,
                       .capacity = capacity, .head_bytes = head_bytes(s), .n_threads = n_threads};
    c->arena = kvd__alloc(l, KVD_ACC_KV, (size_t)(n_sets * capacity / KVD__BLOCK * c->head_bytes), err);
    c->sets = kvd__alloc_array(l, KVD_ACC_KV, (size_t)n_sets, sizeof *c->sets, err);
    c->lists = kvd__alloc(l, KVD_ACC_KV, (size_t)lists_bytes(n_sets, capacity), err);
    c->feed = kvd__alloc_array(l, KVD_ACC_HOST, (size_t)s->n_kv_heads, sizeof *c->feed, err);
    if (!c->arena || !c->sets || !c->lists || !c->feed) {
        kvd__compact_destroy(&c);
        return err && err->code ? err->code : KVD_E_NOMEM;
    }
    place_lists(c->sets, n_sets, capacity, c->lists);
    *out = c;
    return 0;
}

static void free_feed(kvd_compact *c)
{
    kvd__free(c->gathered);
    kvd__free(c->rotated);
    kvd__free(c->feed_lists);
    kvd__free(c->keep);
    kvd__free(c->weights);
    kvd__free(c->rows);
    c->gathered = c->rotated = c->feed_lists = NULL;
    c->keep = NULL;
    c->weights = NULL;
    c->rows = NULL;
}

void kvd__compact_destroy(kvd_compact **pc)
{
    kvd_compact *c = *pc;
    *pc = NULL;
    if (!c)
        return;
    free_feed(c);
    kvd__free(c->arena);
    kvd__free(c->sets);
    kvd__free(c->lists);
    kvd__free(c->feed);
    kvd__free(c);
}

void kvd__compact_reset(kvd_compact *c)
{
    for (int64_t i = 0; i < (int64_t)c->shape.n_layers * c->shape.n_kv_heads; i++)
        c->sets[i].n = 0;
    c->n_tokens = c->prompt_end = c->snap_window = 0;
}

int kvd__compact_begin(kvd_compact *c, int64_t n_new, kvd_error *err)
{
    int64_t kept = c->n_tokens < c->budget ? c->n_tokens : c->budget;
    c->n_new = n_new;
    c->n_observed = c->keeper->observes(n_new, c->budget);
    c->probe_rows = probe_rows(c->n_observed);
    c->slots = n_new > 1 ? tiles_up(kept + n_new) : c->capacity;
    feed_sizes z = sizes_of(&c->shape, c->renumber, c->n_threads, n_new, c->n_observed, c->slots);
    bool ok = true;
    struct {
        void **to;
        int64_t bytes;
    } list[] = {{(void **)(void *)&c->gathered, z.gathered}, {(void **)(void *)&c->rotated, z.rotated},
                {(void **)(void *)&c->feed_lists, z.lists},  {(void **)(void *)&c->keep, z.keep},
                {(void **)(void *)&c->weights, z.weights},   {(void **)(void *)&c->rows, z.rows}};
    for (size_t i = 0; ok && i < sizeof list / sizeof list[0]; i++)
        ok = !list[i].bytes || (*list[i].to = kvd__alloc(c->ledger, KVD_ACC_LAYER, (size_t)list[i].bytes, err));
    if (!ok) {
        free_feed(c);
        return err && err->code ? err->code : KVD_E_NOMEM;
    }
    if (n_new > 1) {
        place_lists(c->feed, c->shape.n_kv_heads, c->slots, c->feed_lists);
        c->prompt_end = c->n_tokens + n_new;
        c->snap_window = c->n_observed;
    }
    return 0;
}

void kvd__compact_end(kvd_compact *c, bool done)
{
    if (done)
        c->n_tokens += c->n_new;
    free_feed(c);
}

/* ---- slots ---------------------------------------------------------------------------- */

/* Copy one slot's K and V between blocks of a head. */
static void copy_slot(const kvd_compact *c, char *to, int64_t to_slot, const char *from, int64_t from_slot)
{
    int b = kvd__kvtype_bytes(c->shape.type), dh = c->shape.d_head;
    char *tk = to + to_slot / KVD__BLOCK * c->head_bytes, *tv = tk + c->head_bytes / 2;
    const char *fk = from + from_slot / KVD__BLOCK * c->head_bytes, *fv = fk + c->head_bytes / 2;
    int64_t t = to_slot % KVD__BLOCK, f = from_slot % KVD__BLOCK;
    if (b == 2)
        for (int i = 0; i < dh; i++)
            ((uint16_t *)(void *)tk)[i * KVD__BLOCK + t] = ((const uint16_t *)(const void *)fk)[i * KVD__BLOCK + f];
    else
        for (int i = 0; i < dh; i++)
            ((uint32_t *)(void *)tk)[i * KVD__BLOCK + t] = ((const uint32_t *)(const void *)fk)[i * KVD__BLOCK + f];
    memcpy(tv + t * dh * b, fv + f * dh * b, (size_t)dh * (size_t)b);
}

static kvd_set *set_of(const kvd_compact *c, int layer, int head) { return &c->sets[layer * c->shape.n_kv_heads + head]; }

static char *arena_of(const kvd_compact *c, int layer, int head)
{
    return c->arena + ((int64_t)layer * c->shape.n_kv_heads + head) * (c->capacity / KVD__BLOCK) * c->head_bytes;
}

static char *gathered_of(const kvd_compact *c, int head) { return c->gathered + head * (c->slots / KVD__BLOCK) * c->head_bytes; }

/* Drop what keep does not mark. The slots in use stay the first s->n ones: the last
 * of them moves into the hole. */
static void drop(kvd_compact *c, kvd_set *s, char *arena, const uint8_t *keep)
{
    int64_t n = 0, before = s->n, used = s->n;
    for (int64_t i = 0; i < before; i++) {
        if (keep[i])
            continue;
        int32_t hole = s->slot[i], last = (int32_t)--used;
        if (hole == last)
            continue;
        copy_slot(c, arena, hole, arena, last);
        for (int64_t j = 0; j < before; j++)
            if (s->slot[j] == last && j != i) {
                s->slot[j] = hole;
                break;
            }
        s->slot[i] = last;
    }
    for (int64_t i = 0; i < before; i++)
        if (keep[i]) {
            s->pos[n] = s->pos[i];
            s->score[n] = s->score[i];
            s->slot[n++] = s->slot[i];
        }
    s->n = n;
}

/* Mark what stays of n entries so that at most `budget` do: those no later query can
 * see (below from_pos) go first, then the policy chooses. */
static void choose(const kvd_compact *c, const int64_t *pos, const double *score, int64_t n, int64_t from_pos, int64_t budget,
                   int64_t incoming, uint8_t *keep)
{
    int64_t gone = 0;
    while (gone < n && pos[gone] < from_pos)
        keep[gone++] = 0;
    memset(keep + gone, 1, (size_t)(n - gone));
    if (n - gone <= budget)
        return;
    kvd_kept k = {.n = n - gone, .pos = pos + gone, .score = score + gone, .budget = budget, .incoming = incoming,
                  .prompt_end = c->prompt_end, .window = c->snap_window};
    memset(keep + gone, 0, (size_t)(n - gone));
    c->keeper->select(&k, keep + gone);
}

/* ---- a layer ----------------------------------------------------------------------------- */

static void open_single(kvd_compact *c, int layer, int head)
{
    kvd_set *s = set_of(c, layer, head), *f = &c->feed[head];
    uint8_t *keep = c->keep + head * c->slots;
    choose(c, s->pos, s->score, s->n, kvd__compact_first_seen(c, layer, c->n_tokens), c->budget - 1, 1, keep);
    drop(c, s, arena_of(c, layer, head), keep);
    s->pos[s->n] = c->n_tokens;
    s->score[s->n] = 0;
    s->slot[s->n] = (int32_t)s->n;
    s->n++;
    *f = *s; /* the same lists */
}

static void open_gathered(kvd_compact *c, int layer, int head)
{
    const kvd_set *s = set_of(c, layer, head);
    kvd_set *f = &c->feed[head];
    char *to = gathered_of(c, head);
    const char *from = arena_of(c, layer, head);
    for (int64_t i = 0; i < s->n; i++) {
        f->pos[i] = s->pos[i];
        f->score[i] = s->score[i];
        copy_slot(c, to, i, from, s->slot[i]);
    }
    for (int64_t i = 0; i < c->n_new; i++) {
        f->pos[s->n + i] = c->n_tokens + i;
        f->score[s->n + i] = 0;
    }
    f->n = s->n + c->n_new;
    for (int64_t i = 0; i < f->n; i++)
        f->slot[i] = (int32_t)i;
}

void kvd__compact_open(kvd_compact *c, int layer, int head)
{
    if (c->n_observed)
        memset(c->weights + head * c->slots, 0, (size_t)c->slots * sizeof *c->weights);
    if (c->n_new == 1)
        open_single(c, layer, head);
    else
        open_gathered(c, layer, head);
}

/* Copy the chosen entries of a gathering into the arena. */
static void settle(kvd_compact *c, int layer, int head)
{
    kvd_set *s = set_of(c, layer, head), *f = &c->feed[head];
    uint8_t *keep = c->keep + head * c->slots;
    char *to = arena_of(c, layer, head);
    const char *from = gathered_of(c, head);
    choose(c, f->pos, f->score, f->n, kvd__compact_first_seen(c, layer, c->n_tokens + c->n_new), c->budget, 0, keep);
    s->n = 0;
    for (int64_t i = 0; i < f->n; i++) {
        if (!keep[i])
            continue;
        s->pos[s->n] = f->pos[i];
        s->score[s->n] = f->score[i];
        s->slot[s->n] = (int32_t)s->n;
        copy_slot(c, to, s->n, from, i);
        s->n++;
    }
}

/* Let the policy see what was observed of heads [head0, head1). */
static void fold(kvd_compact *c, int head0, int head1, int64_t n_queries)
{
    if (c->keeper->per_layer) { /* one sum for all heads, whose sets are equal */
        double *sum = c->weights + head0 * c->slots;
        for (int h = head0 + 1; h < head1; h++)
            for (int64_t i = 0; i < c->feed[h].n; i++)
                sum[i] += c->weights[h * c->slots + i];
        n_queries *= head1 - head0;
    }
    for (int h = head0; h < head1; h++) {
        const double *w = c->weights + (c->keeper->per_layer ? head0 : h) * c->slots;
        c->keeper->observe(c->feed[h].score, w, c->feed[h].n, n_queries, c->n_observed);
    }
}

void kvd__compact_close(kvd_compact *c, int layer, int head0, int head1, int64_t n_queries)
{
    if (c->n_observed)
        fold(c, head0, head1, n_queries);
    for (int h = head0; c->n_new > 1 && h < head1; h++)
        settle(c, layer, h);
}

void kvd__compact_block(const kvd_compact *c, int layer, int head, int64_t block, char **k, char **v, char **raw_k)
{
    char *b = (c->n_new == 1 ? arena_of(c, layer, head) : gathered_of(c, head)) + block * c->head_bytes;
    *raw_k = b;
    *v = b + c->head_bytes / 2;
    *k = c->renumber ? c->rotated + (head * (c->slots / KVD__BLOCK) + block) * (c->head_bytes / 2) : b;
}
