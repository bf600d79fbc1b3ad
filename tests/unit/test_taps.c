/* The laboratory's taps on tiny models. Watching changes no bit; what a tap is shown is
 * what the pass goes on with, so putting back what another run had there changes no bit
 * either, and putting something else does; attention weights sum to 1 and, with V, give
 * what attention gave. Prompts and single tokens, all threads, rebuilt positions,
 * sliding windows, the disk tier. */
#include "tiny.h"

#include <math.h>

static const char *const families[] = {"llama", "window", "qwen2", "qwen3", "gemma3", "kquant"};
enum { N_FAMILIES = sizeof families / sizeof families[0], N_TOKENS = 150, MAX_LAYERS = 8, MAX_ROW = 512 };

/* How the tokens come: a prompt, single ones, another prompt. */
static const int64_t feeds[] = {1, 99, 1, 1, 1, 30, 1, 16};

typedef struct {
    const char *what;
    int n_threads, chunk;
    int64_t kv_tokens; /* -1: policy full */
    bool disk;
} setting;

static const setting settings[] = {
    {"full, one thread", 1, 256, -1, false}, {"full, three threads, chunks of 7", 3, 7, -1, false},
    {"nothing kept", 2, 64, 0, false},       {"some kept", 3, 33, 48, false},
    {"disk", 3, 64, 32, true},               {"disk, one thread, nothing kept", 1, 16, 0, true},
};
enum { N_SETTINGS = sizeof settings / sizeof settings[0] };

/* ---- what a run is watched by ---------------------------------------------------- */

typedef struct {
    const kvd_config *c;
    int64_t n_q, n_kv; /* values of q, of K */
    /* [layer][pos][..] of the last time each was shown */
    float *q, *k, *v, *made_v, *read_v, *out;
    int64_t residuals, projections, reads, outs, weights; /* calls, of layer 0 but outs and weights: of all */
    int64_t least_pos;
    /* the row that weights were given for last, and what they make of V */
    int layer, heads;
    int64_t pos;
    float mixed[MAX_ROW];
    double worst; /* difference between that and attention's output, as part of the largest V */
} record;

static float *at(const record *r, float *p, int layer, int64_t pos, int64_t width)
{
    check(layer >= 0 && layer < r->c->n_layers && pos >= 0 && pos < N_TOKENS, "layer %d, position %lld", layer, (long long)pos);
    return p + (layer * N_TOKENS + pos) * width;
}

static void seen(record *r, int64_t pos) { r->least_pos = pos < r->least_pos ? pos : r->least_pos; }

static void on_residual(void *ctx, int layer, int64_t pos, float *h)
{
    record *r = ctx;
    (void)h;
    seen(r, pos);
    r->residuals += layer == 0;
}

static void on_projected(void *ctx, int layer, int64_t pos, float *q, float *k, float *v)
{
    record *r = ctx;
    seen(r, pos);
    r->projections += layer == 0;
    memcpy(at(r, r->q, layer, pos, r->n_q), q, (size_t)r->n_q * sizeof *q);
    memcpy(at(r, r->k, layer, pos, r->n_kv), k, (size_t)r->n_kv * sizeof *k);
    memcpy(at(r, r->v, layer, pos, r->n_kv), v, (size_t)r->n_kv * sizeof *v);
}

static void on_made(void *ctx, int layer, int64_t pos, float *k, float *v)
{
    record *r = ctx;
    seen(r, pos);
    memcpy(at(r, r->made_v, layer, pos, r->n_kv), v, (size_t)r->n_kv * sizeof *v);
    if (pos == 0 && !r->c->qk_norm) /* turned by nothing */
        for (int64_t i = 0; i < r->n_kv; i++)
            assert_true(k[i] == at(r, r->k, layer, pos, r->n_kv)[i]);
}

static void on_read(void *ctx, int layer, int64_t pos, const float *k, const float *v)
{
    record *r = ctx;
    (void)k;
    seen(r, pos);
    r->reads += layer == 0;
    memcpy(at(r, r->read_v, layer, pos, r->n_kv), v, (size_t)r->n_kv * sizeof *v);
}

static void on_weights(void *ctx, int layer, int64_t pos, int head, int64_t first, int64_t n, const float *p)
{
    record *r = ctx;
    int dh = r->c->d_head, kv_head = head / (r->c->n_heads / r->c->n_kv_heads);
    int64_t sees_from = r->c->local[layer] && pos >= r->c->window ? pos - r->c->window + 1 : 0;
    seen(r, pos);
    r->weights++;
    assert_int_equal(first, sees_from);
    assert_int_equal(first + n - 1, pos);
    assert_int_equal(head, head == 0 ? 0 : r->heads);
    r->heads = head + 1;
    r->layer = layer;
    r->pos = pos;
    double sum = 0;
    for (int64_t j = 0; j < n; j++) {
        assert_true(p[j] >= 0 && p[j] <= 1);
        sum += (double)p[j];
    }
    check(fabs(sum - 1) < 1e-5, "layer %d, position %lld, head %d: weights sum to %g", layer, (long long)pos, head, sum);
    for (int d = 0; d < dh; d++) {
        double s = 0;
        for (int64_t j = 0; j < n; j++)
            s += (double)p[j] * (double)at(r, r->read_v, layer, first + j, r->n_kv)[kv_head * dh + d];
        r->mixed[head * dh + d] = (float)s;
    }
}

static void on_attention(void *ctx, int layer, int64_t pos, float *out)
{
    record *r = ctx;
    float largest = 0, off = 0;
    seen(r, pos);
    r->outs++;
    memcpy(at(r, r->out, layer, pos, r->n_q), out, (size_t)r->n_q * sizeof *out);
    if (!r->weights) /* they are not watched */
        return;
    assert_true(r->layer == layer && r->pos == pos);
    assert_int_equal(r->heads, r->c->n_heads);
    for (int64_t i = 0; i < r->n_kv; i++)
        largest = fmaxf(largest, fabsf(at(r, r->read_v, layer, pos, r->n_kv)[i]));
    for (int64_t i = 0; i < r->n_q; i++)
        off = fmaxf(off, fabsf(out[i] - r->mixed[i]));
    double worst = (double)off, scale = fmax((double)largest, 1);
    check(worst <= 1e-3 * scale, "layer %d, position %lld: attention is %g off its weights times V", layer, (long long)pos, worst);
    r->worst = fmax(r->worst, worst / scale);
}

static record *record_create(const kvd_model *m)
{
    record *r = calloc(1, sizeof *r);
    r->c = &m->config;
    assert_true(r->c->n_layers <= MAX_LAYERS);
    r->n_q = (int64_t)r->c->n_heads * r->c->d_head;
    r->n_kv = (int64_t)r->c->n_kv_heads * r->c->d_head;
    assert_true(r->n_q <= MAX_ROW);
    float **rows[] = {&r->q, &r->out, &r->k, &r->v, &r->made_v, &r->read_v};
    for (int i = 0; i < 6; i++)
        *rows[i] = calloc((size_t)r->c->n_layers * N_TOKENS * (size_t)(i < 2 ? r->n_q : r->n_kv), sizeof(float));
    r->least_pos = INT64_MAX;
    r->layer = -1;
    return r;
}

static void record_free(record *r)
{
    float *rows[] = {r->q, r->out, r->k, r->v, r->made_v, r->read_v};
    for (int i = 0; i < 6; i++)
        free(rows[i]);
    free(r);
}

/* ---- runs ----------------------------------------------------------------------------- */

static void make_ids(int32_t *ids, int n_vocab)
{
    uint64_t seed = 11;
    for (int i = 0; i < N_TOKENS; i++)
        ids[i] = (int32_t)(kvd__splitmix64(&seed) % (uint64_t)n_vocab);
}

static kvd_model *load(int family, const setting *s)
{
    kvd_model_options mo;
    kvd_model_options_defaults(&mo);
    mo.n_threads = s->n_threads;
    mo.chunk_tokens = s->chunk;
    return tiny_load(families[family], &mo);
}

static kvd_session *session(kvd_model *m, const setting *s)
{
    kvd_session_options so;
    kvd_session_options_defaults(&so);
    so.policy = s->kv_tokens < 0 ? KVD_POLICY_FULL : KVD_POLICY_KV_DIRECT;
    so.kv_tokens = s->kv_tokens;
    so.evict_to = s->disk ? KVD_EVICT_DISK : KVD_EVICT_RECOMPUTE;
    so.spill_dir = !s->disk ? NULL : getenv("KVD_TINY") ? getenv("KVD_TINY") : ".";
    return tiny_session(m, &so);
}

/* Feed all tokens; the logits after each feed are appended to *logits. */
static void run(kvd_session *s, const kvd_lab_taps *taps, float *logits)
{
    int32_t ids[N_TOKENS];
    size_t n_vocab = (size_t)s->m->config.n_vocab;
    make_ids(ids, (int)n_vocab);
    kvd_lab_set_taps(s, taps);
    int64_t compute = atomic_load(&s->m->ledger->now[KVD_ACC_COMPUTE]) - (s->disk_block ? s->kv->block_bytes : 0), done = 0;
    for (size_t i = 0; i < sizeof feeds / sizeof feeds[0]; i++) {
        kvd_error err = {0};
        const float *row;
        check(kvd_session_feed(s, ids + done, feeds[i], &row, &err) == 0, "%s", err.message);
        memcpy(logits + i * n_vocab, row, n_vocab * sizeof *row);
        done += feeds[i];
    }
    assert_int_equal(done, N_TOKENS);
    compute += s->disk_block ? s->kv->block_bytes : 0; /* comes with the first use of the disk, and stays */
    assert_int_equal(atomic_load(&s->m->ledger->now[KVD_ACC_COMPUTE]), compute);
}

enum { N_FEEDS = sizeof feeds / sizeof feeds[0] };

static bool same(const float *a, const float *b, const kvd_model *m)
{
    return !memcmp(a, b, N_FEEDS * (size_t)m->config.n_vocab * sizeof *a);
}

static float *make_logits(const kvd_model *m) { return calloc(N_FEEDS * (size_t)m->config.n_vocab, sizeof(float)); }

/* ---- tests ----------------------------------------------------------------------------- */

static void watching_changes_no_bit(void **state)
{
    (void)state;
    double worst = 0;
    for (int f = 0; f < N_FAMILIES; f++)
        for (int i = 0; i < N_SETTINGS; i++) {
            kvd_model *m = load(f, &settings[i]);
            kvd_session *s = session(m, &settings[i]);
            float *plain = make_logits(m), *watched = make_logits(m);
            record *r = record_create(m);
            run(s, NULL, plain);
            kvd_session_stats before, after;
            kvd_session_get_stats(s, &before);
            assert_int_equal(kvd_session_rewind(s, 0, NULL), 0);
            kvd_session_park(s);
            run(s, &(kvd_lab_taps){.ctx = r, .residual = on_residual, .projected = on_projected, .kv_made = on_made,
                                   .kv_read = on_read, .attention = on_attention, .weights = on_weights}, watched);
            kvd_session_get_stats(s, &after);
            check(same(plain, watched, m), "%s, %s: watching changed the logits", families[f], settings[i].what);
            int64_t rows = N_TOKENS + after.recomputed_tokens - before.recomputed_tokens, layers = m->config.n_layers;
            check((settings[i].kv_tokens >= 0 && !settings[i].disk) == (rows > N_TOKENS), "%s: %lld rows", settings[i].what, (long long)rows);
            check(!settings[i].disk || after.disk_read_bytes > before.disk_read_bytes, "%s: nothing was read", settings[i].what);
            assert_int_equal(r->residuals, rows);
            assert_int_equal(r->projections, rows);
            assert_int_equal(r->reads, rows);
            assert_int_equal(r->outs, rows * (layers - 1) + N_FEEDS);
            assert_int_equal(r->weights, r->outs * m->config.n_heads);
            assert_int_equal(r->least_pos, 0);
            /* V is not normed or rotated on its way */
            assert_memory_equal(r->v, r->made_v, (size_t)(layers * N_TOKENS * r->n_kv) * sizeof(float));
            worst = fmax(worst, r->worst);
            record_free(r);
            free(plain);
            free(watched);
            kvd_session_free(&s);
            tiny_free(&m);
        }
    check(worst > 0 && worst < 1e-4, "weights times V differ from attention by up to %g", worst);
}

/* What a run under other settings had there is put in place of what this one has. */
static void put_projected(void *ctx, int layer, int64_t pos, float *q, float *k, float *v)
{
    record *r = ctx;
    memcpy(q, at(r, r->q, layer, pos, r->n_q), (size_t)r->n_q * sizeof *q);
    memcpy(k, at(r, r->k, layer, pos, r->n_kv), (size_t)r->n_kv * sizeof *k);
    memcpy(v, at(r, r->v, layer, pos, r->n_kv), (size_t)r->n_kv * sizeof *v);
}

static void put_attention(void *ctx, int layer, int64_t pos, float *out)
{
    record *r = ctx;
    memcpy(out, at(r, r->out, layer, pos, r->n_q), (size_t)r->n_q * sizeof *out);
}

static void what_was_there_changes_no_bit(void **state)
{
    (void)state;
    for (int f = 0; f < N_FAMILIES; f++) {
        kvd_model *m = load(f, &settings[0]);
        kvd_session *s = session(m, &settings[0]);
        float *plain = make_logits(m);
        record *r = record_create(m);
        run(s, &(kvd_lab_taps){.ctx = r, .projected = on_projected, .attention = on_attention}, plain);
        kvd_session_free(&s);
        for (int i = 0; i < N_SETTINGS; i++) {
            kvd_model *other = load(f, &settings[i]);
            kvd_session *t = session(other, &settings[i]);
            float *put = make_logits(other);
            run(t, &(kvd_lab_taps){.ctx = r, .projected = put_projected}, put);
            check(same(plain, put, m), "%s, %s: q, K and V as they were", families[f], settings[i].what);
            assert_int_equal(kvd_session_rewind(t, 0, NULL), 0);
            run(t, &(kvd_lab_taps){.ctx = r, .attention = put_attention}, put);
            check(same(plain, put, m), "%s, %s: attention as it was", families[f], settings[i].what);
            free(put);
            kvd_session_free(&t);
            tiny_free(&other);
        }
        record_free(r);
        free(plain);
        tiny_free(&m);
    }
}

/* A change at one place, of one kind: a row with its signs turned. (A smaller one can
 * vanish where a softmax is sharp and activations are rounded to 8 bits.) */
typedef struct {
    const kvd_config *c;
    char kind; /* q, k, v, or o: attention's output */
    int layer;
    int64_t pos, times;
} change;

static void spoil(change *c, char kind, int layer, int64_t pos, float *x, int heads)
{
    if (c->kind != kind || c->layer != layer || c->pos != pos)
        return;
    c->times++;
    for (int i = 0; i < heads * c->c->d_head; i++)
        x[i] = -x[i];
}

static void spoil_projected(void *ctx, int layer, int64_t pos, float *q, float *k, float *v)
{
    change *c = ctx;
    spoil(c, 'q', layer, pos, q, c->c->n_heads);
    spoil(c, 'k', layer, pos, k, c->c->n_kv_heads);
    spoil(c, 'v', layer, pos, v, c->c->n_kv_heads);
}

static void spoil_attention(void *ctx, int layer, int64_t pos, float *out)
{
    change *c = ctx;
    spoil(c, 'o', layer, pos, out, c->c->n_heads);
}

/* A change shows in some logits from its position on and in none before, and it shows in
 * the same bits whether the changed position is kept, rebuilt in each pass or read from disk. */
static void a_change_is_the_same_under_every_setting(void **state)
{
    (void)state;
    enum { POS = 101 }; /* the fourth feed, alone */
    for (int f = 0; f < N_FAMILIES; f++)
        for (const char *kind = "qkvo"; *kind; kind++) {
            float *first = NULL;
            for (int i = 0; i < N_SETTINGS; i++) {
                kvd_model *m = load(f, &settings[i]);
                kvd_session *s = session(m, &settings[i]);
                size_t n = (size_t)m->config.n_vocab;
                float *plain = make_logits(m), *changed = make_logits(m);
                change c = {&m->config, *kind, m->config.n_layers - 2, POS, 0};
                run(s, NULL, plain);
                assert_int_equal(kvd_session_rewind(s, 0, NULL), 0);
                run(s, &(kvd_lab_taps){.ctx = &c, .projected = spoil_projected, .attention = spoil_attention}, changed);
                assert_true(c.times > 0);
                int first_seen = 0;
                while (first_seen < N_FEEDS && !memcmp(plain + (size_t)first_seen * n, changed + (size_t)first_seen * n, n * sizeof *plain))
                    first_seen++;
                check(first_seen >= 3 && first_seen < N_FEEDS, "%s, %s: %c changed, first seen in feed %d", families[f], settings[i].what, *kind, first_seen);
                check(!first || same(first, changed, m), "%s, %s: %c changed gives other bits", families[f], settings[i].what, *kind);
                if (first)
                    free(changed);
                else
                    first = changed;
                free(plain);
                kvd_session_free(&s);
                tiny_free(&m);
            }
            free(first);
        }
}

static void from_pos_hides_what_lies_below(void **state)
{
    (void)state;
    for (int f = 0; f < N_FAMILIES; f++)
        for (int i = 2; i < N_SETTINGS; i++)
            for (int64_t from = 100; from <= N_TOKENS; from += 25) {
                kvd_model *m = load(f, &settings[i]);
                kvd_session *s = session(m, &settings[i]);
                float *logits = make_logits(m);
                record *r = record_create(m);
                run(s, &(kvd_lab_taps){.ctx = r, .from_pos = from, .residual = on_residual, .projected = on_projected, .kv_made = on_made,
                                       .kv_read = on_read, .attention = on_attention}, logits);
                assert_int_equal(r->least_pos, from < N_TOKENS ? from : INT64_MAX);
                assert_true(from == N_TOKENS ? r->reads == 0 : r->reads >= N_TOKENS - from);
                record_free(r);
                free(logits);
                kvd_session_free(&s);
                tiny_free(&m);
            }
}

/* Copying K for the weights may fail; the session is then as before. */
static void out_of_memory_for_weights(void **state)
{
    (void)state;
    int failures = 0;
    for (int i = 0; i < N_SETTINGS; i++) {
        kvd_model *m = load(4, &settings[i]);
        kvd_session *s = session(m, &settings[i]);
        float *plain = make_logits(m), *watched = make_logits(m);
        record *r = record_create(m);
        int32_t ids[N_TOKENS];
        make_ids(ids, m->config.n_vocab);
        run(s, NULL, plain);
        assert_int_equal(kvd_session_rewind(s, 0, NULL), 0);
        kvd_lab_taps taps = {.ctx = r, .kv_read = on_read, .attention = on_attention, .weights = on_weights};
        kvd_lab_set_taps(s, &taps);
        kvd_error err = {0};
        for (int64_t k = 1;; k++) {
            m->ledger->fail_at = atomic_load(&m->ledger->n_allocs) + k;
            int rc = kvd_session_feed(s, ids, 100, NULL, &err);
            m->ledger->fail_at = 0;
            if (rc == 0)
                break;
            assert_int_equal(rc, KVD_E_NOMEM);
            assert_int_equal(kvd_session_tokens(s, NULL), 0);
            failures++;
        }
        assert_int_equal(kvd_session_rewind(s, 0, NULL), 0);
        run(s, &taps, watched);
        check(same(plain, watched, m), "%s: after failures", settings[i].what);
        record_free(r);
        free(plain);
        free(watched);
        kvd_session_free(&s);
        tiny_free(&m);
    }
    assert_true(failures >= 3 * N_SETTINGS);
}

/* What a callback must not do is refused, and the pass goes on as if it had not been asked. */
typedef struct {
    kvd_session *s, *other;
    int64_t calls;
} meddler;

static void meddle(void *ctx, int layer, int64_t pos, float *h)
{
    meddler *x = ctx;
    kvd_error err = {0};
    int32_t id = 1;
    float kv[2 * MAX_ROW];
    if (x->calls++ % 37)
        return;
    assert_int_equal(kvd_session_feed(x->s, &id, 1, NULL, &err), KVD_E_ARG);
    assert_true(strstr(err.message, "callback") != NULL);
    assert_int_equal(kvd_session_feed(x->other, &id, 1, NULL, NULL), KVD_E_ARG);
    assert_int_equal(kvd_session_rewind(x->s, 0, &err), KVD_E_ARG);
    assert_int_equal(kvd_lab_reconstruct(x->s, layer ? 1 : 0, pos, h, kv, kv + MAX_ROW, &err), KVD_E_ARG);
    assert_int_equal(kvd_calibrate(x->s->m, NULL, &(kvd_rates){0}, &err), KVD_E_ARG);
    kvd_session_park(x->s);
    kvd_lab_set_taps(x->s, NULL); /* this pass goes on with those it has */
}

static void a_callback_may_not_compute(void **state)
{
    (void)state;
    for (int i = 0; i < N_SETTINGS; i++) {
        kvd_model *m = load(0, &settings[i]);
        kvd_session *s = session(m, &settings[i]);
        meddler x = {.s = s, .other = session(m, &settings[i])};
        float *plain = make_logits(m), *meddled = make_logits(m);
        run(s, NULL, plain);
        assert_int_equal(kvd_session_rewind(s, 0, NULL), 0);
        run(s, &(kvd_lab_taps){.ctx = &x, .residual = meddle}, meddled);
        assert_true(x.calls > 0);
        check(same(plain, meddled, m), "%s: it changed something", settings[i].what);
        assert_int_equal(kvd_session_feed(x.other, &(int32_t){1}, 1, NULL, NULL), 0); /* and nothing is left claimed */
        free(plain);
        free(meddled);
        kvd_session_free(&x.other);
        kvd_session_free(&s);
        tiny_free(&m);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(watching_changes_no_bit),
        cmocka_unit_test(what_was_there_changes_no_bit),
        cmocka_unit_test(a_change_is_the_same_under_every_setting),
        cmocka_unit_test(from_pos_hides_what_lies_below),
        cmocka_unit_test(out_of_memory_for_weights),
        cmocka_unit_test(a_callback_may_not_compute),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
