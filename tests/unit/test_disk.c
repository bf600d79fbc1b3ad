/* The disk tier: its arithmetic, and sessions whose K and V go to a file. Whatever is
 * written, read back, cut, parked, outgrown, squeezed or cancelled, the logits are the
 * bits of policy full, and the ledger's peak is the plan's, to the byte.
 *
 * KVD_CASES sets how many combinations of settings are drawn (default 60). */
#include "gen/disk.h"
#include "kv/spill.h"
#include "reference.h"

/* ---- a session under watch -------------------------------------------------------------- */

typedef struct {
    kvd_model *m;
    kvd_session *s;
    const reference *r;
    int64_t rows_seen, cancel_at, steps;
    bool shared; /* the model has another session */
} watch;

static int check_row(void *ctx, int64_t pos, const float *logits)
{
    watch *w = ctx;
    same_row(w->r, pos, logits);
    w->rows_seen++;
    return 0;
}

static int count_progress(void *ctx, int64_t done, int64_t total, int64_t rows, int64_t recomputed)
{
    watch *w = ctx;
    check(done >= 0 && done < total && recomputed >= 0 && recomputed <= rows, "progress %lld of %lld", (long long)done, (long long)total);
    return w->steps++ == w->cancel_at;
}

/* tiny models are under a folder that is not in memory only if the build is */
static const char *spill_dir(void)
{
    const char *dir = getenv("KVD_TINY");
    return dir ? dir : ".";
}

static kvd_session_options disk_options(void)
{
    kvd_session_options so;
    kvd_session_options_defaults(&so);
    so.evict_to = KVD_EVICT_DISK;
    so.spill_dir = spill_dir();
    return so;
}

/* Where threads are not the matter one family has two and the others one: threads that
 * wait for the disk together spin, and a busy machine makes them do so for long. The
 * product below has up to three for all. */
static int threads_of(int family) { return family == 0 ? 2 : 1; }

static kvd_model *load(int family, int n_threads, int chunk)
{
    kvd_model_options mo;
    kvd_model_options_defaults(&mo);
    mo.n_threads = n_threads;
    mo.chunk_tokens = chunk;
    return tiny_load(families[family], &mo);
}

static watch begin(int family, kvd_model *m, const kvd_session_options *so)
{
    watch w = {.m = m, .s = tiny_session(m, so), .r = reference_of(family, so->kv_type, KVD_TYPE_F32, 0), .cancel_at = -1};
    return w;
}

/* Least and full bytes of n tokens for a session on disk. */
static void bounds(const kvd_session *s, int64_t n, int64_t *least, int64_t *full)
{
    *least = kvd__disk_need(s->m, &s->shape, n);
    *full = kvd__full_bytes(&s->shape, n);
}

static void set_budget(kvd_model *m, int64_t bytes)
{
    kvd_error err = {0};
    check(kvd_memory_set_budget(m, bytes, &err) == 0, "budget %lld: %s", (long long)bytes, err.message);
}

/* Feed n of the text; -1 rows: the last one's logits. */
static int feed(watch *w, int64_t n, int64_t n_logits)
{
    kvd_session *s = w->s;
    kvd_ledger *l = s->m->ledger;
    int64_t old = s->n;
    kvd_error err = {0};
    const float *logits = NULL;
    kvd_session_stats st;
    w->rows_seen = w->steps = 0;
    kvd_session_set_progress(s, count_progress, w);
    atomic_store(&l->context_peak, atomic_load(&l->context_now));
    int rc = n_logits < 0 ? kvd_session_feed(s, w->r->ids + old, n, &logits, &err)
                          : kvd_session_feed_all(s, w->r->ids + old, n, n_logits, check_row, w, &err);
    kvd_session_get_stats(s, &st);
    assert_true(atomic_load(&l->context_peak) <= l->budget_bytes);
    assert_int_equal(atomic_load(&l->now[KVD_ACC_STREAM]), 0);
    assert_null(st.disk_error);
    if (!s->spill && !w->shared)
        assert_int_equal(atomic_load(&l->now[KVD_ACC_LAYER]), 0);
    assert_int_equal(st.n_tokens, rc ? old : old + n);
    assert_int_equal(st.resident_tokens + st.evicted_tokens, st.n_tokens);
    if (rc) {
        check(rc == KVD_E_CANCELLED || rc == KVD_E_BUDGET, "%s", err.message);
        if (rc == KVD_E_BUDGET) {
            assert_int_equal(w->steps, 0); /* before any work */
            assert_true(err.need_bytes > 0);
        }
        return rc;
    }
    if (logits)
        same_row(w->r, old + n - 1, logits);
    if (n_logits >= 0)
        assert_int_equal(w->rows_seen, n_logits);
    if (s->o.kv_tokens >= 0 && s->spill) /* whole blocks, and never those of the new tokens */
        assert_true(st.resident_tokens <= s->o.kv_tokens + 2 * KVD__BLOCK + s->m->scratch.chunk);
    return 0;
}

static void must_feed(watch *w, int64_t n)
{
    int rc = feed(w, n, -1);
    check(rc == 0, "%lld tokens behind %lld: %s with a budget of %lld", (long long)n, (long long)w->s->n, kvd_error_name(rc),
          (long long)w->m->ledger->budget_bytes);
}

static void rewind_to(watch *w, int64_t n)
{
    kvd_error err = {0};
    check(kvd_session_rewind(w->s, n, &err) == 0, "%s", err.message);
}

static void end(watch *w)
{
    kvd_session_free(&w->s);
    tiny_free(&w->m);
}

/* ---- arithmetic --------------------------------------------------------------------------- */

static kvd_kv_shape random_shape(void)
{
    kvd_kv_shape s = {.n_layers = 1 + (int)pick(9), .n_kv_heads = 1 + (int)pick(3), .d_head = 16 << pick(3),
                      .type = (kvd_kvtype)pick(3), .window = pick(2) ? 0 : 1 + pick(200)};
    s.stream_row_bytes = 64 * (1 + pick(40));
    for (int l = 0; s.window && l < s.n_layers; l++)
        s.local[l] = pick(4) != 0;
    return s;
}

/* From kvd__disk_least_bytes on there is a next pass in every state, and whatever the
 * plan is, it keeps its limits. */
static void a_plan_in_every_state(void **state)
{
    (void)state;
    for (int i = 0; i < 4000; i++) {
        tiny_seed = (uint64_t)i * 7919;
        kvd_kv_shape s = random_shape();
        int64_t n = 1 + pick(1500), least = kvd__disk_least_bytes(&s, n), before = pick(n);
        kvd_limits lim = {.kv_tokens = pick(3) ? -1 : pick(300), .piece_tokens = 512, .disk_piece_tokens = 1 + pick(300),
                          .budget_bytes = least + pick(2) * pick(least * 4)};
        int64_t start = pick(before / KVD__BLOCK + 1) * KVD__BLOCK;
        for (int64_t at = before; at < n;) {
            kvd_pass_plan p, c;
            kvd_error err = {0};
            check(kvd__disk_plan(&s, &lim, at, start, n - at, &p, &err) == 0, "case %d, at %lld of %lld: %s", i, (long long)at,
                  (long long)n, err.message);
            assert_true(p.bytes <= lim.budget_bytes && p.n_before == at && p.recompute == 0 && p.n_rows == p.n_new);
            assert_true(p.n_new >= 1 && p.n_new <= lim.disk_piece_tokens && at + p.n_new <= n);
            assert_true(p.start >= start && p.start <= at && p.start % KVD__BLOCK == 0);
            kvd__disk_cost(&s, n, at, p.n_new, p.start, &c);
            assert_int_equal(c.bytes, p.bytes);
            assert_int_equal(c.bytes, c.kv_bytes + c.stream_bytes + c.checkpoint_bytes);
            if (p.start > start && lim.kv_tokens < 0) { /* as little dropped as can be */
                kvd__disk_cost(&s, n, at, p.n_new, p.start - KVD__BLOCK, &c);
                assert_true(c.bytes > lim.budget_bytes);
            }
            at += p.n_new;
            start = p.start;
        }
    }
}

static void least_bytes_are_tight_and_grow(void **state)
{
    (void)state;
    for (int i = 0; i < 300; i++) {
        tiny_seed = (uint64_t)i * 104729;
        kvd_kv_shape s = random_shape();
        int64_t last = 0;
        for (int64_t n = 1; n < 700; n += 1 + pick(5)) {
            int64_t least = kvd__disk_least_bytes(&s, n), most = 0;
            check(least >= last, "case %d: least bytes fall at %lld tokens", i, (long long)n);
            last = least;
            kvd_limits lim = {.kv_tokens = -1, .piece_tokens = 512, .disk_piece_tokens = 1, .budget_bytes = least - 1};
            for (int64_t at = 0; at < n; at++) { /* somewhere a byte less is too little */
                kvd_pass_plan p;
                most += kvd__disk_plan(&s, &lim, at, at / KVD__BLOCK * KVD__BLOCK, n - at, &p, NULL) != 0;
                if (n - at > 40 && at > 4)
                    at += 30;
            }
            check(most > 0, "case %d: %lld tokens run with a byte less", i, (long long)n);
        }
    }
}

/* ---- the product of settings ---------------------------------------------------------------- */

typedef struct {
    int family, chunk, n_threads;
    kvd_float_type kv;
    int64_t kv_tokens, n, budget; /* budget: thousandths from least to full; -1: none */
    int way;
    bool disturbed;
} combination;

static combination draw(void)
{
    static const int chunks[] = {1, 3, 7, 16, 32, 63, 64, 256};
    static const int64_t kept[] = {-1, -1, -1, 0, 1, 16, 17, 48, 100};
    combination c = {.family = (int)pick(N_FAMILIES), .chunk = chunks[pick(8)], .n_threads = 1 + (int)pick(3), .kv = (kvd_float_type)pick(3),
                     .kv_tokens = kept[pick(9)], .n = 40 + pick(N_TOKENS - 40), .budget = pick(4) ? pick(8) * 140 : -1, .way = (int)pick(4),
                     .disturbed = pick(2) == 0};
    if (c.budget < 0 && c.kv_tokens < 0)
        c.kv_tokens = 20;
    if (c.way == 1 || c.chunk < 7)
        c.n = min64(c.n, 140);
    return c;
}

/* The other text from FORK on: what is on disk behind it must not come back. */
static void fork_text(watch *w, const combination *c)
{
    int text = w->r == reference_of(c->family, c->kv, KVD_TYPE_F32, 0);
    if (w->s->n > FORK)
        rewind_to(w, FORK - pick(20));
    w->r = reference_of(c->family, c->kv, KVD_TYPE_F32, text);
}

static void disturb(watch *w, const combination *c)
{
    int64_t n = w->s->n, least, full;
    switch (pick(7)) {
    case 0: rewind_to(w, n - pick(min64(n, 30) + 1)); break;
    case 1: rewind_to(w, pick(n + 1)); break;
    case 2: rewind_to(w, pick(n / 16 + 1) * 16); break;
    case 3: kvd_session_park(w->s); break;
    case 4: w->cancel_at = pick(9); break;
    case 5: fork_text(w, c); break;
    case 6: /* another budget */
        if (c->budget >= 0) {
            bounds(w->s, c->n, &least, &full);
            int64_t want = least + pick(max64(full - least, 1) + 1);
            if (atomic_load(&w->m->ledger->context_now) > want)
                kvd_session_park(w->s);
            set_budget(w->m, want);
        }
        break;
    }
}

static void run(const combination *c)
{
    kvd_model *m = load(c->family, c->n_threads, c->chunk);
    kvd_session_options so = disk_options();
    int64_t least, full;
    so.kv_type = c->kv;
    so.kv_tokens = c->kv_tokens;
    watch w = begin(c->family, m, &so);
    bounds(w.s, c->n, &least, &full);
    if (c->budget >= 0)
        set_budget(m, least + max64(0, full - least) * c->budget / 1000);
    for (int tries = 0; w.s->n < c->n; tries++) {
        int64_t left = c->n - w.s->n, n = c->way == 1 ? 1 : c->way == 2 ? min64(left, 1 + pick(37)) : left;
        if (tries == 0 && c->disturbed)
            n = min64(n, 90);
        bool cancels = w.cancel_at >= 0;
        int rc = feed(&w, n, c->way == 3 ? pick(n + 1) : -1);
        check(rc == 0 || (rc == KVD_E_CANCELLED && cancels), "%s: budget %lld, %lld tokens", kvd_error_name(rc),
              (long long)m->ledger->budget_bytes, (long long)w.s->n);
        w.cancel_at = -1;
        if (c->disturbed && tries < 14)
            disturb(&w, c);
    }
    end(&w);
}

static void product(void **state)
{
    (void)state;
    const char *cases = getenv("KVD_CASES");
    for (int i = 0, n = cases ? atoi(cases) : 60; i < n; i++) {
        tiny_seed = (uint64_t)i * 1000003;
        combination c = draw();
        if (getenv("KVD_VERBOSE"))
            fprintf(stderr, "case %d: %s, chunk %d, threads %d, kv %d, kv_tokens %lld, n %lld, way %d, budget %lld, disturbed %d\n", i,
                    families[c.family], c.chunk, c.n_threads, c.kv, (long long)c.kv_tokens, (long long)c.n, c.way, (long long)c.budget,
                    c.disturbed);
        run(&c);
    }
}

/* ---- budgets ------------------------------------------------------------------------------------ */

/* kvd__disk_need runs the context however it is fed; a byte less is refused. */
static void the_need_is_tight(void **state)
{
    (void)state;
    static const int64_t lengths[] = {1, 17, 100, 257, N_TOKENS};
    for (int f = 0; f < N_FAMILIES; f++)
        for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
            kvd_model *m = load(f, 1, 32);
            kvd_session_options so = disk_options();
            so.kv_tokens = 0; /* nothing may be had by keeping all */
            watch w = begin(f, m, &so);
            int64_t n = lengths[i], need = kvd__disk_need(m, &w.s->shape, n);
            tiny_seed = i;
            set_budget(m, need);
            while (w.s->n < n)
                must_feed(&w, pick(2) ? min64(n - w.s->n, 1 + pick(50)) : n - w.s->n);
            kvd_session_free(&w.s);
            w.s = tiny_session(m, &so);
            set_budget(m, need - 1);
            kvd_error err = {0};
            assert_int_equal(kvd_session_feed(w.s, w.r->ids, n, NULL, &err), KVD_E_BUDGET);
            assert_int_equal(err.need_bytes, need);
            assert_true(err.max_tokens < n);
            assert_int_equal(w.s->n, 0);
            if (err.max_tokens) /* T_max is no promise too much */
                must_feed(&w, err.max_tokens);
            end(&w);
        }
}

/* From the need on the buffers leave what the context needs; with room for pieces they
 * grow, but never for less reading than they take. */
static void buffers_leave_room(void **state)
{
    (void)state;
    for (int f = 0; f < N_FAMILIES; f++) {
        kvd_model *m = load(f, 1, 32);
        kvd_session_options so = disk_options();
        watch w = begin(f, m, &so);
        const kvd_kv_shape *s = &w.s->shape;
        bool large = false;
        for (int64_t n = 1; n < m->config.n_ctx; n += 1 + n / 3) {
            int64_t need = kvd__disk_need(m, s, n), least = kvd__disk_least_bytes(s, n);
            for (int64_t budget = need; budget < need * 40; budget += 1 + budget / 9) {
                kvd_spill_options o = kvd__disk_options(m, s, NULL, n, budget);
                int64_t bytes = kvd__spill_bytes(s, &o), tiles = o.segment_blocks / KVD__TILE_BLOCKS;
                check(least + bytes <= budget, "%s, %lld tokens: %lld + %lld of %lld", families[f], (long long)n, (long long)least, (long long)bytes, (long long)budget);
                assert_true(tiles * KVD__TILE_BLOCKS == o.segment_blocks && (tiles & (tiles - 1)) == 0);
                assert_true(o.max_blocks * KVD__BLOCK >= n);
                large |= tiles > 1;
            }
        }
        assert_true(large);
        end(&w);
    }
}

/* The highest of the passes' plans and the spill is the ledger's peak, to the byte. */
static void the_peak_is_the_plan(void **state)
{
    (void)state;
    for (int f = 0; f < N_FAMILIES; f++)
        for (int part = 0; part < 3; part++) {
            kvd_model *m = load(f, threads_of(f), 32);
            kvd_session_options so = disk_options();
            watch w = begin(f, m, &so);
            int64_t least, full, peak = 0;
            bounds(w.s, 300, &least, &full);
            so.kv_tokens = full < least ? 40 : -1;
            kvd_session_free(&w.s);
            w.s = tiny_session(m, &so);
            set_budget(m, least + max64(0, full - least) * part / 3);
            w.s->reserve_tokens = 300;
            kvd_limits lim = kvd__session_limits(w.s);
            kvd_spill_options o = kvd__disk_options(m, &w.s->shape, spill_dir(), 300, lim.budget_bytes);
            int64_t buffers = kvd__spill_bytes(&w.s->shape, &o), at = 0, start = 0;
            kvd_pass_plan p;
            lim.budget_bytes -= buffers;
            for (; at < 300; at += p.n_new, start = p.start) {
                assert_int_equal(kvd__disk_plan(&w.s->shape, &lim, at, start, 300 - at, &p, NULL), 0);
                peak = max64(peak, p.bytes + buffers);
            }
            must_feed(&w, 300);
            assert_int_equal(w.s->spill_bytes, buffers);
            assert_int_equal(w.s->kv->start, start);
            assert_int_equal(atomic_load(&m->ledger->context_peak), peak);
            end(&w);
        }
}

/* A conversation fills its budget with everything resident, and goes on: token by
 * token, at the moment when the buffers need the room that the blocks have. */
static void from_resident_to_disk(void **state)
{
    (void)state;
    for (int f = 0; f < N_FAMILIES; f++)
        for (int known = 0; known < 2; known++) {
            kvd_model *m = load(f, threads_of(f), 64);
            kvd_session_options so = disk_options();
            watch w = begin(f, m, &so);
            int64_t least, full;
            bounds(w.s, 280, &least, &full);
            int64_t budget = max64(least, kvd__full_bytes(&w.s->shape, 200));
            set_budget(m, budget);
            w.s->reserve_tokens = known ? 280 : 0;
            must_feed(&w, 150);
            kvd_session_stats st;
            kvd_session_get_stats(w.s, &st);
            bool must = full > budget;
            assert_int_equal(st.disk, known && must);
            while (w.s->n < 280)
                must_feed(&w, 1);
            kvd_session_get_stats(w.s, &st);
            if (must && known)
                assert_int_equal(st.recomputed_tokens, 0);
            if (must)
                assert_string_equal(st.tier, "disk");
            end(&w);
        }
}

/* No spill where everything fits, also after parking. */
static void what_fits_stays(void **state)
{
    (void)state;
    kvd_model *m = load(0, 1, 32);
    kvd_session_options so = disk_options();
    watch w = begin(0, m, &so);
    set_budget(m, kvd__full_bytes(&w.s->shape, 200));
    must_feed(&w, 90);
    kvd_session_park(w.s);
    assert_int_equal(atomic_load(&m->ledger->now[KVD_ACC_KV]), 0);
    must_feed(&w, 110);
    assert_null(w.s->spill);
    end(&w);
}

/* A session whose tokens are its ids again after parking. */
static void parking_gives_all_back(void **state)
{
    (void)state;
    for (int f = 0; f < N_FAMILIES; f++) {
        kvd_model *m = load(f, 1, 32);
        kvd_session_options so = disk_options();
        so.kv_tokens = 30;
        watch w = begin(f, m, &so);
        must_feed(&w, 200);
        assert_non_null(w.s->spill);
        kvd_session_stats before, after;
        kvd_session_get_stats(w.s, &before);
        assert_true(before.disk_written_bytes > 0 && before.disk_read_bytes > 0);
        kvd_session_park(w.s);
        assert_int_equal(atomic_load(&m->ledger->context_now), kvd__checkpoint_bytes(&w.s->shape, 200));
        kvd_session_get_stats(w.s, &after);
        assert_int_equal(after.disk_written_bytes, before.disk_written_bytes);
        must_feed(&w, 40);
        end(&w);
    }
}

/* The file is made for half as much again as is known, then grows; what is in it stays,
 * so nothing is computed twice. */
static void a_spill_grows(void **state)
{
    (void)state;
    for (int f = 0; f < N_FAMILIES; f++)
        for (int by = 3; by <= 80; by += 77) {
            kvd_model *m = load(f, 1, 32);
            kvd_session_options so = disk_options();
            kvd_session_stats st;
            so.kv_tokens = 16;
            watch w = begin(f, m, &so);
            must_feed(&w, 40);
            const kvd_spill *file = w.s->spill;
            int64_t bytes = w.s->spill_bytes;
            assert_int_equal(w.s->spill_tokens, 256);
            while (w.s->n < 310)
                must_feed(&w, min64(by, 310 - w.s->n));
            assert_ptr_equal(w.s->spill, file);
            assert_int_equal(w.s->spill_tokens, 512);
            assert_int_equal(w.s->spill_bytes, bytes + 16 * kvd__spill_bytes_per_block(&w.s->shape));
            assert_int_equal(atomic_load(&m->ledger->now[KVD_ACC_LAYER]) + 32 * kvd__spill_bytes_per_block(&w.s->shape), w.s->spill_bytes);
            kvd_session_get_stats(w.s, &st);
            assert_int_equal(st.recomputed_tokens, 0);
            rewind_to(&w, 250); /* what is there is there on both sides of the seam */
            must_feed(&w, 70);
            end(&w);
        }
}

/* Where its buffers leave no room for more of it, it begins again with smaller ones. */
static void a_spill_without_room_begins_again(void **state)
{
    (void)state;
    for (int f = 0; f < N_FAMILIES; f++) {
        kvd_model *m = load(f, 1, 32);
        kvd_session_options so = disk_options();
        so.kv_tokens = 16;
        watch w = begin(f, m, &so);
        set_budget(m, kvd__disk_need(m, &w.s->shape, 310));
        must_feed(&w, 40);
        while (w.s->n < 310)
            must_feed(&w, min64(9, 310 - w.s->n));
        assert_true(w.s->spill_tokens >= 310);
        end(&w);
    }
}

/* What generation is admitted to, it does, with tokens and receipt of policy full; and a
 * second answer in the same session is admitted by the same rule. */
static void generation_keeps_its_word(void **state)
{
    (void)state;
    for (int f = 0; f < N_FAMILIES; f++) {
        char receipts[2][2][33];
        for (int disk = 0; disk < 2; disk++) {
            kvd_model *m = load(f, threads_of(f), 64);
            kvd_session_options so = disk_options();
            if (!disk)
                so.policy = KVD_POLICY_FULL;
            watch w = begin(f, m, &so);
            if (disk)
                set_budget(m, kvd__disk_need(m, &w.s->shape, 150));
            kvd_generate_options o;
            kvd_generate_options_defaults(&o);
            o.ignore_end = true;
            for (int turn = 0; turn < 2; turn++) {
                kvd_result r;
                kvd_error err = {0};
                o.max_tokens = turn ? 30 : 20;
                int rc = kvd_generate(w.s, w.r->ids, turn ? 41 : 60, &o, &r, &err);
                check(rc == 0, "%s, turn %d: %s", families[f], turn, err.message);
                strcpy(receipts[disk][turn], r.receipt);
                kvd_result_free(&r);
            }
            if (disk) {
                kvd_result r;
                kvd_error err = {0};
                o.max_tokens = 120; /* 150 + 1 and more */
                if (!m->config.window || kvd__full_bytes(&w.s->shape, 320) > m->ledger->budget_bytes)
                    assert_int_equal(kvd_generate(w.s, w.r->ids, 50, &o, &r, &err), KVD_E_BUDGET);
                else
                    kvd_generate(w.s, w.r->ids, 50, &o, &r, &err);
                kvd_result_free(&r);
            }
            end(&w);
        }
        assert_string_equal(receipts[0][0], receipts[1][0]);
        assert_string_equal(receipts[0][1], receipts[1][1]);
    }
}

/* Two sessions on disk under one budget. */
static void sessions_share_a_budget(void **state)
{
    (void)state;
    for (int f = 0; f < N_FAMILIES; f++) {
        kvd_model *m = load(f, threads_of(f), 32);
        kvd_session_options so = disk_options();
        watch a = begin(f, m, &so), b = begin(f, m, &so);
        int64_t need = kvd__disk_need(m, &a.s->shape, 180);
        tiny_seed = (uint64_t)f;
        a.shared = b.shared = true;
        set_budget(m, need * 2);
        while (a.s->n < 170 || b.s->n < 170) {
            watch *w = pick(2) ? &a : &b, *other = w == &a ? &b : &a;
            if (w->s->n >= 170)
                continue;
            int rc = feed(w, 1 + pick(9), -1);
            if (rc) { /* the other one holds too much */
                assert_int_equal(rc, KVD_E_BUDGET);
                kvd_session_park(other->s);
                must_feed(w, 1);
            }
        }
        kvd_session_free(&a.s);
        end(&b);
    }
}

/* ---- folders ------------------------------------------------------------------------------------- */

/* Asked for by name, a folder that does not serve is refused before any work; AUTO
 * recomputes and says why. */
static void folders_that_do_not_serve(void **state)
{
    (void)state;
    static const char *const folders[] = {"/dev/shm", "/nowhere/at/all", "/proc"};
    for (size_t i = 0; i < sizeof folders / sizeof folders[0]; i++)
        for (int late = 0; late < 2; late++) {
            kvd_model *m = load(0, 1, 32);
            kvd_session_options so = disk_options();
            so.spill_dir = folders[i];
            watch w = begin(0, m, &so);
            set_budget(m, kvd__full_bytes(&w.s->shape, 200));
            kvd_error err = {0};
            kvd_session_stats st;
            if (late) { /* everything fits, for now */
                must_feed(&w, 100);
                for (int k = 0; k < 120; k++)
                    assert_int_equal(kvd_session_feed(w.s, w.r->ids + w.s->n, 1, NULL, &err), 0);
                same_row(w.r, 219, w.s->logits);
                kvd_session_get_stats(w.s, &st);
                assert_non_null(st.disk_error);
                assert_string_equal(st.tier, "recompute");
            } else {
                assert_int_equal(kvd_session_feed(w.s, w.r->ids, 220, NULL, &err), KVD_E_IO);
                assert_non_null(strstr(err.message, folders[i]));
                assert_int_equal(w.s->n, 0);
                must_feed(&w, 100); /* fits without */
            }
            end(&w);
        }
}

int main(void)
{
    cmocka_set_test_filter(getenv("KVD_TEST")); /* a pattern: only these */
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_plan_in_every_state),
        cmocka_unit_test(least_bytes_are_tight_and_grow),
        cmocka_unit_test(the_need_is_tight),
        cmocka_unit_test(buffers_leave_room),
        cmocka_unit_test(the_peak_is_the_plan),
        cmocka_unit_test(from_resident_to_disk),
        cmocka_unit_test(what_fits_stays),
        cmocka_unit_test(parking_gives_all_back),
        cmocka_unit_test(a_spill_grows),
        cmocka_unit_test(a_spill_without_room_begins_again),
        cmocka_unit_test(generation_keeps_its_word),
        cmocka_unit_test(sessions_share_a_budget),
        cmocka_unit_test(folders_that_do_not_serve),
        cmocka_unit_test(product),
    };
    return cmocka_run_group_tests(tests, NULL, free_references);
}
