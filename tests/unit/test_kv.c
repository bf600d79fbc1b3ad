/* Residency and blocks without a model. Two witnesses stand beside the code:
 *
 *   sets    a pass's bytes once more, by asking of every block of every kind of
 *           layer who needs it (and, without windows, the formula of
 *           docs/memory.md as it is printed there)
 *   stamps  a pass that stores a mark of (layer, position, head, tokens so far) in
 *           place of K and V and, as attention would, reads every position that a
 *           row sees: a block that is missing, stale, shared or of another layer
 *           shows at once
 *
 * Random walks of feeds, rewinds, parks, faults and budgets then look for states
 * in which they disagree with the plan, the ledger or the promise of
 * kvd__least_bytes. */
#include "check.h"

#include "base/rng.h"
#include "kv/kv.h"

static uint64_t seed;
static int64_t pick(int64_t n) { return (int64_t)(kvd__splitmix64(&seed) % (uint64_t)n); }
static int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t blocks_of(int64_t n) { return (n + 15) / 16; }

static kvd_kv_shape shape_of(int n_layers, int n_kv, int d_head, kvd_kvtype type, int64_t window, int period, int64_t row)
{
    kvd_kv_shape s = {.n_layers = n_layers, .n_kv_heads = n_kv, .d_head = d_head, .type = type, .window = window, .stream_row_bytes = row};
    for (int l = 0; l < n_layers && window; l++)
        s.local[l] = period == 0 || (l + 1) % period != 0;
    return s;
}

/* Wide and narrow caches, with and without windows; row: of the stream. */
static kvd_kv_shape random_shape(void)
{
    static const int64_t windows[] = {0, 0, 0, 1, 2, 15, 16, 17, 33, 48, 64, 100};
    int64_t w = windows[pick(12)];
    return shape_of(1 + (int)pick(7), 1 + (int)pick(3), 8, (kvd_kvtype)pick(KVD_KV_COUNT), w, (int)pick(4) * 2, 64 << pick(6));
}

/* ---- bytes, by sets --------------------------------------------------------------- */

typedef struct {
    int64_t kv, layer, stream, checkpoint;
} bytes;

static int64_t capacity(int64_t n) { return (n + 255) / 256 * 256; }

/* Does block b reach into positions [from, to)? Half-filled blocks count: a window
 * that begins at the next position still owns its block. */
static bool touches(int64_t b, int64_t from, int64_t to) { return b >= from / 16 && b < blocks_of(to); }

static bytes by_sets(const kvd_kv_shape *s, int64_t n0, int64_t start0, int64_t n_new, int64_t start, int64_t n_tokens)
{
    int64_t n = n0 + n_new, rebuilt = min64(max64(start, start0), n0), block = 2 * s->n_kv_heads * s->d_head * 16 * kvd__kvtype_bytes(s->type);
    int n_global = 0, n_local = 0;
    for (int l = 0; l < s->n_layers; l++)
        *(s->local[l] ? &n_local : &n_global) += 1;
    bytes r = {.stream = (rebuilt + n_new) * s->stream_row_bytes};
    int64_t scratch_from = INT64_MAX, scratch_to = 0;
    for (int64_t b = 0; b < blocks_of(n); b++) {
        bool stays = start < n && touches(b, start, n);
        bool local_stays = stays && touches(b, max64(0, n - s->window + 1), n);
        bool local_held = rebuilt < n0 && touches(b, max64(rebuilt, n0 - s->window + 1), n0);
        r.kv += block * (stays * n_global + (local_stays || local_held) * n_local);
        /* Is there a row to be stored that has no column on some layer? On local ones
         * a rebuilt row brings its whole tile along. */
        bool is_new = b >= n0 / 16;
        if ((!stays && (is_new || b < blocks_of(rebuilt))) ||
            (s->window && !local_stays && (is_new || (rebuilt && b / 4 <= (rebuilt - 1) / 64)))) {
            scratch_from = min64(scratch_from, b);
            scratch_to = b + 1;
        }
    }
    if (scratch_to)
        r.layer = (scratch_to - (rebuilt ? 0 : scratch_from)) * block;
    r.checkpoint = capacity(n_tokens) * 4 + capacity(n_tokens) / 16 * 8 * (s->window ? 2 : 1);
    return r;
}

static void cost_is_the_sum_of_the_sets(void **state)
{
    (void)state;
    for (int i = 0; i < 200000; i++) {
        seed = (uint64_t)i;
        kvd_kv_shape s = random_shape();
        int64_t n0 = pick(3) ? pick(200) : pick(20), n_new = 1 + (pick(2) ? 0 : pick(150)), n = n0 + n_new;
        int64_t start0 = pick(3) ? pick(n0 + 1) / 16 * 16 : pick(2) ? 0 : n0, start = pick(3) ? pick(n + 1) / 16 * 16 : pick(2) ? 0 : n;
        kvd_pass_plan p;
        kvd__pass_cost(&s, n0, start0, n_new, start, &p);
        bytes w = by_sets(&s, n0, start0, n_new, start, n);
        check(p.kv_bytes == w.kv && p.layer_bytes == w.layer && p.stream_bytes == w.stream && p.checkpoint_bytes == w.checkpoint,
              "case %d: window %lld, %lld + %lld tokens, start %lld -> %lld: kv %lld, layer %lld, stream %lld; by sets %lld, %lld, %lld",
              i, (long long)s.window, (long long)n0, (long long)n_new, (long long)start0, (long long)start, (long long)p.kv_bytes,
              (long long)p.layer_bytes, (long long)p.stream_bytes, (long long)w.kv, (long long)w.layer, (long long)w.stream);
        assert_int_equal(p.bytes, w.kv + w.layer + w.stream + w.checkpoint);
        if (s.window)
            continue;
        /* docs/memory.md, "The formula, to the block" */
        int64_t E = min64(max64(start, start0), n0), block = 2 * s.n_kv_heads * s.d_head * 16 * kvd__kvtype_bytes(s.type);
        int64_t first = start == n ? blocks_of(n) : start / 16;
        assert_int_equal(p.kv_bytes, (blocks_of(n) - first) * block * s.n_layers);
        assert_int_equal(p.layer_bytes, (E > 0 ? first : max64(0, first - n0 / 16)) * block);
        assert_int_equal(p.stream_bytes, (E + n_new) * s.stream_row_bytes);
        assert_int_equal(p.checkpoint_bytes, capacity(n) * 4 + capacity(n) / 16 * 8);
    }
}

/* ---- the promise of least_bytes ---------------------------------------------------- */

static int64_t least_start(const kvd_limits *lim, int64_t n)
{
    return lim->full || lim->kv_tokens < 0 ? 0 : lim->kv_tokens == 0 ? n : max64(0, n - lim->kv_tokens) / 16 * 16;
}

/* The cheapest single-token walk to n tokens, trying every start. */
static int64_t least_by_force(const kvd_kv_shape *s, const kvd_limits *lim, int64_t n)
{
    int64_t least = INT64_MAX;
    for (int64_t start = least_start(lim, n); start <= n; start = start == n ? n + 1 : min64(start / 16 * 16 + 16, n)) {
        int64_t most = 0;
        for (int64_t i = 1; i <= n; i++) {
            kvd_pass_plan p;
            kvd__pass_cost(s, i - 1, min64(start, i), 1, min64(start, i), &p);
            most = max64(most, p.bytes - p.checkpoint_bytes + kvd__checkpoint_bytes(s, n));
        }
        least = min64(least, most);
        if (lim->full)
            break;
    }
    return least;
}

static void least_bytes_by_force(void **state)
{
    (void)state;
    static const int64_t kv_tokens[] = {-1, -1, 0, 1, 15, 16, 17, 48, 64, 1000};
    for (int i = 0; i < 150; i++) {
        seed = 1000 + (uint64_t)i;
        kvd_kv_shape s = random_shape();
        kvd_limits lim = {.full = pick(4) == 0, .kv_tokens = kv_tokens[pick(10)], .budget_bytes = INT64_MAX, .piece_tokens = 64};
        if (lim.full)
            lim.kv_tokens = -1;
        int64_t before = 0;
        for (int64_t n = 1; n < 300; n += 1 + pick(7)) {
            int64_t least = kvd__least_bytes(&s, &lim, n), forced = least_by_force(&s, &lim, n);
            check(least == forced, "case %d, %lld tokens: %lld, by force %lld", i, (long long)n, (long long)least, (long long)forced);
            check(least >= before, "case %d: fewer bytes for %lld tokens than before", i, (long long)n);
            before = least;
            lim.budget_bytes = least;
            int64_t t_max = kvd__max_tokens(&s, &lim, 400);
            assert_true(t_max >= n && (t_max == 400 || kvd__least_bytes(&s, &lim, t_max + 1) > least));
            lim.budget_bytes = least - 1;
            assert_true(kvd__max_tokens(&s, &lim, 400) < n);
        }
    }
}

/* T_max of a model that was trained for millions of tokens, in no time. */
static void max_tokens_is_quick(void **state)
{
    (void)state;
    kvd_kv_shape plain = shape_of(64, 8, 128, KVD_KV_F16, 0, 0, 16384), gemma = shape_of(62, 16, 128, KVD_KV_F16, 1024, 6, 21504);
    kvd_limits lim = {.kv_tokens = -1, .budget_bytes = (int64_t)1 << 40, .piece_tokens = 512};
    for (int i = 0; i < 20; i++) {
        assert_true(kvd__max_tokens(&plain, &lim, 1 << 24) > 1 << 20);
        assert_true(kvd__max_tokens(&gemma, &lim, 1 << 24) > 1 << 20);
    }
    assert_int_equal(kvd__max_tokens(&plain, &lim, 1000), 1000);
    assert_int_equal(kvd__max_tokens(&plain, &lim, 0), 0);
    lim.budget_bytes = 1;
    assert_int_equal(kvd__max_tokens(&plain, &lim, 1 << 24), 0);
}

/* ---- stamps ------------------------------------------------------------------------- */

enum { MAX_TOKENS = 700 };

/* What a session is to residency. tokens: a digest of the tokens up to each
 * position, so that a mark of another timeline is another mark. */
typedef struct {
    kvd_kv_shape s;
    kvd_ledger l;
    kvd_kv *kv;
    int32_t *ids;
    int64_t capacity, n;
    uint64_t tokens[MAX_TOKENS];
    kvd_error err;
} world;

static void fit_ids(world *w, int64_t n)
{
    int32_t *p = kvd__realloc(&w->l, KVD_ACC_CHECKPOINT, w->ids, (size_t)capacity(n) * 4, &w->err);
    assert_non_null(p);
    w->ids = p;
    w->capacity = capacity(n);
}

static uint16_t mark(const world *w, int layer, int64_t pos, int head, int part)
{
    uint64_t x = w->tokens[pos] ^ (uint64_t)(layer << 20 | head << 1 | part) << 32 ^ (uint64_t)pos;
    return (uint16_t)(kvd__splitmix64(&x) | 1);
}

static void store(const world *w, int layer, int64_t pos)
{
    int size = kvd__kvtype_bytes(w->s.type), slot = (int)(pos % 16), dh = w->s.d_head;
    for (int h = 0; h < w->s.n_kv_heads; h++) {
        char *k = kvd__kv_k(w->kv, layer, pos / 16, h), *v = kvd__kv_v(w->kv, layer, pos / 16, h);
        uint16_t mk = mark(w, layer, pos, h, 0), mv = mark(w, layer, pos, h, 1);
        for (int i = 0; i < dh; i++) {
            memcpy(k + (i * 16 + slot) * size, &mk, 2);
            memcpy(v + (slot * dh + i) * size, &mv, 2);
        }
    }
}

static void read_back(const world *w, int layer, int64_t pos, int64_t by)
{
    int size = kvd__kvtype_bytes(w->s.type), slot = (int)(pos % 16), dh = w->s.d_head;
    for (int h = 0; h < w->s.n_kv_heads; h++) {
        const char *k = kvd__kv_k(w->kv, layer, pos / 16, h), *v = kvd__kv_v(w->kv, layer, pos / 16, h);
        uint16_t mk, mv;
        memcpy(&mk, k + ((dh - 1) * 16 + slot) * size, 2);
        memcpy(&mv, v + slot * dh * size, 2);
        check(mk == mark(w, layer, pos, h, 0) && mv == mark(w, layer, pos, h, 1),
              "layer %d: the row at %lld reads something else at position %lld, head %d", layer, (long long)by, (long long)pos, h);
    }
}

/* All rows of the plan through all layers, chunk rows at a time; stop: leave after
 * so many chunks, as a cancelled pass does. Returns false then. */
static bool stamped_pass(const world *w, const kvd_pass_plan *p, int64_t chunk, int64_t stop)
{
    for (int layer = 0; layer < w->s.n_layers; layer++)
        for (int64_t row = 0; row < p->n_rows; row += chunk) {
            if (stop-- == 0)
                return false;
            int64_t end = min64(p->n_rows, row + chunk);
#define POS(r) ((r) < p->recompute ? (r) : p->n_before + (r) - p->recompute)
            for (int64_t r = row; r < end; r++)
                store(w, layer, POS(r));
            for (int64_t r = row; r < end; r++)
                for (int64_t q = w->s.local[layer] ? max64(0, POS(r) - w->s.window + 1) : 0; q <= POS(r); q++)
                    read_back(w, layer, q, POS(r));
#undef POS
        }
    return true;
}

static void open_world(world *w)
{
    memset(w, 0, sizeof *w);
    w->s = random_shape();
    kvd__ledger_init(&w->l, pick(2)); /* by the budget, columns lie alone or by tiles */
    assert_int_equal(kvd__kv_create(&w->kv, &w->s, &w->l, &w->err), 0);
    w->l.budget_bytes = INT64_MAX;
}

static void close_world(world *w)
{
    kvd__kv_destroy(&w->kv);
    kvd__free(w->ids);
    for (int a = 0; a < KVD_ACC_COUNT; a++)
        assert_int_equal(w->l.now[a], 0);
    kvd__kv_destroy(&w->kv); /* NULL is fine */
}

static void check_held(const world *w)
{
    int64_t end = w->kv->end, held = 0;
    assert_true(w->kv->start <= end && w->kv->local_start >= w->kv->start && w->kv->local_start <= end && end == w->n);
    for (int kind = 0; kind < (w->s.window ? 2 : 1); kind++) {
        int64_t column = kvd__kv_block_bytes(&w->s) * kvd__kv_layers(&w->s, kind), from = kind ? w->kv->local_start : w->kv->start;
        for (int64_t b = 0; b < w->kv->n_slots && w->kv->column[kind]; b++) {
            bool in = from < end && b >= from / 16 && b < blocks_of(end);
            check(!column || (w->kv->column[kind][b] != NULL) == in, "block %lld of kind %d: held %d of [%lld, %lld)", (long long)b,
                  kind, w->kv->column[kind][b] != NULL, (long long)from, (long long)end);
            held += in ? column : 0;
        }
    }
    assert_int_equal(w->l.now[KVD_ACC_KV], held);
    assert_int_equal(w->l.now[KVD_ACC_LAYER], 0);
    assert_int_equal(w->l.now[KVD_ACC_STREAM], 0);
    /* Tables are dropped with what they held where a feed began again and failed. */
    assert_true(w->l.now[KVD_ACC_CHECKPOINT] <= kvd__checkpoint_bytes(&w->s, w->n));
    assert_true(held == 0 || w->l.now[KVD_ACC_CHECKPOINT] == kvd__checkpoint_bytes(&w->s, w->n));
    assert_int_equal(kvd__kv_context_bytes(w->kv) + w->capacity * 4, w->l.context_now);
}

enum { RUN, CANCEL, NO_MEMORY };

/* One pass as gen/session.c carries it out. Returns what happened to it. */
static int pass(world *w, const kvd_pass_plan *p, int64_t total, int what)
{
    if (p->n_before < w->kv->end)
        kvd__kv_reset(w->kv, 0);
    kvd__kv_evict(w->kv, p);
    fit_ids(w, total);
    atomic_store(&w->l.context_peak, 0);
    w->l.fail_at = what == NO_MEMORY ? atomic_load(&w->l.n_allocs) + 1 + pick(8) : 0;
    int rc = kvd__kv_begin(w->kv, p, pick(2) ? &w->err : NULL);
    void *stream = rc ? NULL : kvd__alloc(&w->l, KVD_ACC_STREAM, (size_t)p->stream_bytes, &w->err);
    w->l.fail_at = 0;
    if (!rc && !stream)
        kvd__kv_end(w->kv, p, false);
    if (!stream) {
        assert_int_equal(what, NO_MEMORY);
        return NO_MEMORY;
    }
    check(w->l.context_now == p->bytes && w->l.context_peak == p->bytes, "ledger %lld, peak %lld, plan %lld",
          (long long)w->l.context_now, (long long)w->l.context_peak, (long long)p->bytes);
    assert_int_equal(w->l.now[KVD_ACC_KV], p->kv_bytes);
    assert_int_equal(w->l.now[KVD_ACC_LAYER], p->layer_bytes);
    assert_int_equal(w->l.now[KVD_ACC_CHECKPOINT], p->checkpoint_bytes);
    bytes b = by_sets(&w->s, p->n_before, w->kv->start, p->n_new, p->start, total);
    assert_int_equal(p->bytes, b.kv + b.layer + b.stream + b.checkpoint);
    int64_t chunk = 1 + pick(70), n_chunks = (p->n_rows + chunk - 1) / chunk * w->s.n_layers;
    bool done = stamped_pass(w, p, chunk, what == CANCEL ? pick(n_chunks) : -1);
    kvd__free(stream);
    kvd__kv_end(w->kv, p, done);
    return done ? RUN : CANCEL;
}

static void feed(world *w, const kvd_limits *lim, int64_t n_new)
{
    int64_t n_old = w->n, total = w->n + n_new, at = w->n;
    int fault = pick(4) ? RUN : 1 + (int)pick(2), result = RUN, restarts = 0;
    for (int64_t i = n_old; i < total; i++) {
        uint64_t x = (i ? w->tokens[i - 1] : 7) + (uint64_t)pick(1000);
        w->tokens[i] = kvd__splitmix64(&x);
    }
    kvd_pass_plan p;
    for (; at < total && result == RUN; at = p.n_before + p.n_new) {
        int rc = kvd__pass_plan(&w->s, lim, at, w->kv->start, total - at, &p, &w->err);
        int64_t least = kvd__least_bytes(&w->s, lim, total);
        if (rc) {
            assert_int_equal(rc, KVD_E_BUDGET);
            assert_int_equal(w->err.need_bytes, least);
            check(least > lim->budget_bytes, "refused with %lld of %lld bytes", (long long)lim->budget_bytes, (long long)least);
            check(at == n_old, "refused in the middle of a feed");
            return;
        }
        assert_true(p.bytes <= lim->budget_bytes && p.n_new >= 1 && p.n_tokens == total);
        assert_true(p.n_before == at || p.n_before == 0);
        restarts += p.n_before < at;
        assert_true(restarts <= 1);
        int64_t end = p.n_before + p.n_new;
        assert_true(!lim->full || (p.start == 0 && p.recompute == 0));
        assert_true(p.start >= least_start(lim, end));
        w->l.budget_bytes = lim->budget_bytes;
        result = pass(w, &p, total, fault != RUN && (end == total || pick(3) == 0) ? fault : RUN);
        w->l.budget_bytes = INT64_MAX;
        if (result == RUN && lim->budget_bytes == INT64_MAX && least_start(lim, total) == 0)
            assert_int_equal(w->kv->start, 0);
    }
    if (result == RUN) {
        w->n = total;
    } else {
        if (w->kv->end < n_old)
            kvd__kv_reset(w->kv, n_old);
        kvd__kv_truncate(w->kv, n_old);
        fit_ids(w, n_old);
    }
    check_held(w);
}

static void walk(uint64_t number)
{
    static const int64_t kv_tokens[] = {-1, -1, -1, 0, 1, 15, 16, 17, 48, 64, 1000};
    static world w;
    seed = number;
    open_world(&w);
    int64_t longest = pick(3) ? 250 : MAX_TOKENS;
    for (int step = 0; step < 30; step++) {
        kvd_limits lim = {.kv_tokens = kv_tokens[pick(11)], .budget_bytes = INT64_MAX, .piece_tokens = pick(2) ? 512 : 32, .full = pick(5) == 0};
        if (lim.full)
            lim.kv_tokens = -1;
        int64_t n_new = pick(2) ? 1 : 1 + pick(pick(2) ? 20 : 200);
        if (w.n + n_new <= longest) {
            if (pick(4)) { /* from just too little to more than enough */
                int64_t least = kvd__least_bytes(&w.s, &lim, w.n + n_new), full = kvd__full_bytes(&w.s, w.n + n_new);
                lim.budget_bytes = pick(3) == 0 ? least - 1 + pick(2) : least + pick(max64(1, full - least + 100));
                if (lim.budget_bytes < w.l.context_now) /* as a budget that shrank: park */
                    kvd__kv_clear(w.kv);
            }
            feed(&w, &lim, n_new);
        }
        if (pick(6) == 0 && w.n) {
            w.n = pick(3) ? max64(0, w.n - pick(40)) : pick(w.n + 1);
            kvd__kv_truncate(w.kv, w.n);
            fit_ids(&w, w.n);
            check_held(&w);
        }
        if (pick(12) == 0) {
            kvd__kv_clear(w.kv);
            check_held(&w);
        }
    }
    close_world(&w);
}

static void random_walks(void **state)
{
    (void)state;
    const char *n = getenv("KVD_WALKS");
    for (int i = 0; i < (n ? atoi(n) : 250); i++)
        walk((uint64_t)i * 7919);
}

/* Every way of going from fresh to n tokens under the least budget of n. */
static void least_bytes_suffices(void **state)
{
    (void)state;
    static const int64_t kv_tokens[] = {-1, -1, 0, 17, 64};
    for (int i = 0; i < 150; i++) {
        static world w;
        seed = 5000 + (uint64_t)i;
        open_world(&w);
        kvd_limits lim = {.kv_tokens = kv_tokens[pick(5)], .piece_tokens = 64, .full = pick(4) == 0};
        if (lim.full)
            lim.kv_tokens = -1;
        int64_t n = 1 + pick(300), step = pick(3) == 0 ? 1 : 1 + pick(n);
        lim.budget_bytes = kvd__least_bytes(&w.s, &lim, n);
        while (w.n < n) {
            int64_t n_old = w.n, n_new = min64(step, n - w.n);
            for (int tries = 0; w.n == n_old; tries++) { /* feed() also injects faults */
                feed(&w, &lim, n_new);
                assert_true(tries < 200);
            }
            if (pick(20) == 0)
                kvd__kv_clear(w.kv);
        }
        close_world(&w);
    }
}

/* full_bytes keeps all of n tokens, however they come. */
static void full_bytes_suffices(void **state)
{
    (void)state;
    for (int i = 0; i < 200; i++) {
        static world w;
        seed = 9000 + (uint64_t)i;
        open_world(&w);
        kvd_limits lim = {.kv_tokens = -1, .piece_tokens = 64, .full = pick(2) == 0};
        int64_t n = 1 + pick(300), step = pick(3) == 0 ? 1 : 1 + pick(n);
        lim.budget_bytes = kvd__full_bytes(&w.s, n);
        while (w.n < n) {
            feed(&w, &lim, min64(step, n - w.n));
            check(w.kv->start == 0 || w.kv->start == w.kv->end, "case %d: %lld evicted", i, (long long)w.kv->start);
        }
        close_world(&w);
    }
}

/* Local layers give back what has left the window, and only that. */
static void windows_slide(void **state)
{
    (void)state;
    static world w;
    for (int64_t window = 1; window < 70; window += 1 + window / 17) {
        memset(&w, 0, sizeof w);
        seed = (uint64_t)window;
        w.s = shape_of(6, 1, 8, KVD_KV_F16, window, 6, 256);
        kvd__ledger_init(&w.l, 0);
        assert_int_equal(kvd__kv_create(&w.kv, &w.s, &w.l, &w.err), 0);
        kvd_limits lim = {.kv_tokens = -1, .budget_bytes = INT64_MAX, .piece_tokens = 512};
        int64_t block = kvd__kv_block_bytes(&w.s);
        while (w.n < 300) {
            feed(&w, &lim, w.n % 5 == 0 ? 7 : 1);
            int64_t local = blocks_of(w.n) - max64(0, w.n - window + 1) / 16;
            if (w.kv->start == 0)
                assert_int_equal(w.l.now[KVD_ACC_KV], block * (blocks_of(w.n) + 5 * local));
        }
        /* Back by less than what the last block still holds: nothing is lost. By more: all. */
        int64_t local_start = w.kv->local_start;
        if (w.kv->start == 0 && local_start > 0 && local_start < w.n) {
            int64_t least = local_start + window - 1; /* sees exactly what is held */
            if (least < w.n) {
                kvd__kv_truncate(w.kv, w.n = least);
                fit_ids(&w, w.n);
                assert_int_equal(w.kv->start, 0);
                check_held(&w);
            }
            kvd__kv_truncate(w.kv, w.n = w.n - 1);
            fit_ids(&w, w.n);
            assert_int_equal(w.kv->start, w.n);
            check_held(&w);
            feed(&w, &lim, 30);
        }
        close_world(&w);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(cost_is_the_sum_of_the_sets),
        cmocka_unit_test(least_bytes_by_force),
        cmocka_unit_test(max_tokens_is_quick),
        cmocka_unit_test(windows_slide),
        cmocka_unit_test(least_bytes_suffices),
        cmocka_unit_test(full_bytes_suffices),
        cmocka_unit_test(random_walks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
