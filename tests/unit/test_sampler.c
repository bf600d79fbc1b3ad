/* The sampler: the order of its steps against a plain restatement, the law of its
 * draws, ties and edges; and kvd_generate's text: stop strings over token borders,
 * whole characters, callbacks that stop it. */
#include "tiny.h"

#include <math.h>

#include "base/rng.h"
#include "gen/sampler.h"

/* ---- noise ------------------------------------------------------------------------ */

/* Known answers of philox4x32-10, from Random123's kat_vectors. */
static void philox_known_answers(void **state)
{
    (void)state;
    static const uint32_t cases[3][10] = {
        {0, 0, 0, 0, 0, 0, 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8},
        {0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd},
        {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344, 0xa4093822, 0x299f31d0, 0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1},
    };
    for (int i = 0; i < 3; i++) {
        uint32_t out[4];
        kvd__philox4x32(cases[i], cases[i] + 4, out);
        assert_memory_equal(out, cases[i] + 6, sizeof out);
    }
}

/* The noise is what docs/numerics.md says, of (seed, choice, position, id) alone. */
static void gumbel_by_the_page(void **state)
{
    (void)state;
    double sum = 0, square = 0;
    enum { N = 40000 };
    for (int i = 0; i < N; i++) {
        uint64_t seed = 0x123456789abcdefu * (uint64_t)(i % 5);
        int64_t pos = i < 10 ? ((int64_t)1 << 33) + i : i;
        int32_t id = i * 7 % 1000;
        uint32_t counter[4] = {(uint32_t)pos, (uint32_t)(pos >> 32), (uint32_t)id, (uint32_t)i % 3}, key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)}, r[4];
        kvd__philox4x32(counter, key, r);
        double u = ((double)(((uint64_t)r[0] << 32 | r[1]) >> 12) + 0.5) / 4503599627370496.0, g = kvd__gumbel(seed, (uint32_t)i % 3, pos, id);
        assert_true(u > 0 && u < 1);
        assert_true(fabs(g + log(-log(u))) <= 1e-13 * (1 + fabs(g)));
        sum += g;
        square += g * g;
    }
    double mean = sum / N, variance = square / N - mean * mean;
    assert_true(fabs(mean - 0.5772156649) < 0.03); /* standard error 0.0064 */
    assert_true(fabs(variance - 1.6449340668) < 0.1);
}

/* ---- the steps, restated ---------------------------------------------------------- */

enum { MAX_VOCAB = 512 };

typedef struct {
    double value;
    int32_t id;
} entry;

static int by_order(const void *a, const void *b)
{
    const entry *x = a, *y = b;
    return x->value != y->value ? (x->value < y->value ? 1 : -1) : x->id < y->id ? -1 : 1;
}

/* Survivors, sorted; returns their number. */
static int survivors(const kvd_sampling *o, const float *logits, int n_vocab, const int32_t *recent, int64_t pos, entry *e)
{
    int64_t from = o->penalty_tokens < 0 ? 0 : max64(0, pos - o->penalty_tokens);
    for (int i = 0; i < n_vocab; i++) {
        double v = logits[i];
        int64_t count = 0;
        for (int64_t j = 0; j < o->n_bias; j++)
            v += o->bias[j].id == i ? (double)o->bias[j].bias : 0;
        for (int64_t j = from; j < pos; j++)
            count += recent[j] == i;
        if (count) {
            v = v > 0 ? v / (double)o->repeat_penalty : v * (double)o->repeat_penalty;
            v -= (double)o->presence_penalty + (double)count * (double)o->frequency_penalty;
        }
        e[i] = (entry){o->temperature > 0 ? v / (double)o->temperature : v, i};
    }
    qsort(e, (size_t)n_vocab, sizeof *e, by_order);
    if (o->temperature == 0)
        return 1;
    int n = o->top_k > 0 && o->top_k < n_vocab ? o->top_k : n_vocab;
    if (o->top_p < 1) {
        double total = 0, cum = 0;
        int keep = 0;
        for (int i = 0; i < n; i++)
            total += exp(e[i].value - e[0].value);
        while (keep < n && cum < (double)o->top_p * total)
            cum += exp(e[keep++].value - e[0].value);
        n = keep;
    }
    while (n > 1 && exp(e[n - 1].value - e[0].value) < (double)o->min_p)
        n--;
    return n;
}

static int32_t sample(const kvd_sampling *o, const float *logits, int n_vocab, const int32_t *recent, int64_t pos)
{
    static kvd__candidate work[MAX_VOCAB];
    return kvd__sample(o, logits, n_vocab, recent, pos, work);
}

static void steps_as_restated(void **state)
{
    (void)state;
    static const float tops[] = {1, 0.95f, 0.5f, 0.9f, 1e-6f, 1e-45f, 0.999999f}, mins[] = {0, 0, 0.05f, 0.5f, 1, 1e-30f};
    for (int i = 0; i < 20000; i++) {
        tiny_seed = (uint64_t)i;
        int n_vocab = 1 + (int)pick(pick(3) ? 40 : MAX_VOCAB);
        float logits[MAX_VOCAB];
        int32_t recent[64];
        int64_t pos = pick(64);
        kvd_logit_bias bias[8];
        for (int j = 0; j < n_vocab; j++) /* coarse, so that there are ties */
            logits[j] = pick(2) ? (float)(pick(40) - 20) * 0.25f : (float)pick(1 << 20) * 0x1p-18f - 2;
        for (int j = 0; j < pos; j++)
            recent[j] = (int32_t)pick(n_vocab);
        kvd_sampling o;
        kvd_sampling_defaults(&o);
        o.temperature = pick(6) ? 0.1f + (float)pick(30) * 0.1f : 0;
        o.top_k = (int32_t)(pick(2) ? pick(n_vocab + 5) : 0);
        o.top_p = tops[pick(7)];
        o.min_p = mins[pick(6)];
        o.repeat_penalty = pick(2) ? 1 : 0.5f + (float)pick(10) * 0.2f;
        o.presence_penalty = pick(2) ? 0 : (float)(pick(9) - 4) * 0.5f;
        o.frequency_penalty = pick(2) ? 0 : (float)(pick(9) - 4) * 0.25f;
        o.penalty_tokens = (int32_t)(pick(4) ? pick(70) : -1);
        o.seed = kvd__splitmix64(&tiny_seed);
        o.choice = (uint32_t)pick(3);
        o.bias = bias;
        o.n_bias = pick(2) ? 0 : pick(8);
        for (int j = 0; j < o.n_bias; j++)
            bias[j] = (kvd_logit_bias){(int32_t)pick(n_vocab), (float)(pick(21) - 10)};
        kvd_error err;
        assert_int_equal(kvd__sampling_check(&o, n_vocab, &err), 0);
        entry e[MAX_VOCAB];
        int n = survivors(&o, logits, n_vocab, recent, pos, e), best = 0;
        for (int j = 1; j < n; j++) {
            double a = e[j].value + kvd__gumbel(o.seed, o.choice, pos, e[j].id), b = e[best].value + kvd__gumbel(o.seed, o.choice, pos, e[best].id);
            if (a > b || (a == b && e[j].id < e[best].id))
                best = j;
        }
        int32_t id = sample(&o, logits, n_vocab, recent, pos);
        check(id == e[best].id, "case %d: id %d, restated %d", i, id, e[best].id);
        assert_int_equal(sample(&o, logits, n_vocab, recent, pos), id);
    }
}

/* Draws follow the softmax of what survives: chi-square over 20,000 positions. */
static void draws_follow_the_softmax(void **state)
{
    (void)state;
    static const struct {
        float temperature, top_p, min_p;
        int32_t top_k;
        uint64_t seed;
        uint32_t choice;
    } cases[] = {{1, 1, 0, 0, 1, 0}, {0.7f, 1, 0, 0, 2, 0}, {2, 0.9f, 0, 0, 3, 1}, {1, 1, 0, 8, 4, 0}, {1.3f, 1, 0.1f, 0, 5, 2}, {1, 0.8f, 0.05f, 10, (uint64_t)6 << 40, 0}};
    for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++) {
        enum { V = 24, N = 20000 };
        float logits[V];
        int32_t recent[1] = {0};
        int64_t count[V] = {0};
        tiny_seed = 99 + c;
        for (int i = 0; i < V; i++)
            logits[i] = (float)pick(1000) * 0.004f;
        kvd_sampling o;
        kvd_sampling_defaults(&o);
        o.temperature = cases[c].temperature;
        o.top_p = cases[c].top_p;
        o.min_p = cases[c].min_p;
        o.top_k = cases[c].top_k;
        o.seed = cases[c].seed;
        o.choice = cases[c].choice;
        entry e[V];
        int n = survivors(&o, logits, V, recent, 0, e);
        for (int64_t pos = 0; pos < N; pos++)
            count[sample(&o, logits, V, recent, pos)]++;
        double total = 0, chi = 0;
        int64_t seen = 0;
        for (int i = 0; i < n; i++)
            total += exp(e[i].value - e[0].value);
        for (int i = 0; i < n; i++) {
            double expect = N * exp(e[i].value - e[0].value) / total, d = (double)count[e[i].id] - expect;
            assert_true(expect > 5);
            chi += d * d / expect;
            seen += count[e[i].id];
        }
        assert_int_equal(seen, N); /* nothing that was cut is ever drawn */
        assert_true(n > 3);
        /* Wilson-Hilferty: above 3.5 standard deviations once in 4,000. */
        double k = n - 1, z = (cbrt(chi / k) - (1 - 2 / (9 * k))) / sqrt(2 / (9 * k));
        check(z < 3.5, "case %zu: chi-square %g with %d degrees of freedom", c, chi, n - 1);
        check(z > -3.5, "case %zu: chi-square %g with %d degrees of freedom is too good", c, chi, n - 1);
    }
}

static void greedy_ties_and_edges(void **state)
{
    (void)state;
    float logits[6] = {1, 3, 3, -0.0f, 0.0f, 3};
    int32_t recent[4] = {1, 1, 2, 5};
    kvd_sampling o;
    kvd_sampling_defaults(&o);
    assert_int_equal(sample(&o, logits, 6, recent, 0), 1); /* the lowest of equals */
    assert_int_equal(sample(&o, logits, 1, recent, 0), 0);
    kvd_logit_bias bias[] = {{1, -1e6f}, {2, 0.5f}, {2, -1}};
    o.bias = bias;
    o.n_bias = 2;
    assert_int_equal(sample(&o, logits, 6, recent, 0), 2);
    o.n_bias = 3; /* of one id: they add up */
    assert_int_equal(sample(&o, logits, 6, recent, 0), 5);
    o.n_bias = 0;
    o.repeat_penalty = 2; /* 1, 2 and 5 are halved, once each: 0 stays below */
    assert_int_equal(sample(&o, logits, 6, recent, 4), 1);
    o.repeat_penalty = 4;
    assert_int_equal(sample(&o, logits, 6, recent, 4), 0);
    o.repeat_penalty = 1;
    o.frequency_penalty = 0.5f; /* 1 occurs twice */
    assert_int_equal(sample(&o, logits, 6, recent, 4), 2);
    o.penalty_tokens = 1; /* only the 5 is looked at */
    assert_int_equal(sample(&o, logits, 6, recent, 4), 1);
    o.penalty_tokens = 0;
    o.presence_penalty = 10;
    assert_int_equal(sample(&o, logits, 6, recent, 4), 1);
    /* A temperature that is next to nothing is greedy but for exact ties. */
    kvd_sampling_defaults(&o);
    o.temperature = 1e-40f;
    o.top_p = 1;
    o.top_k = 0;
    logits[0] = 3.0000002f;
    for (int64_t pos = 0; pos < 200; pos++)
        assert_int_equal(sample(&o, logits, 6, recent, pos), 0);
    /* top-k 1, min-p 1 and a top-p below everything leave the best alone. */
    kvd_sampling_defaults(&o);
    o.temperature = 1000;
    for (int i = 0; i < 3; i++) {
        o.top_k = i == 0 ? 1 : 0;
        o.top_p = i == 1 ? 1e-10f : 1;
        o.min_p = i == 2 ? 1 : 0;
        for (int64_t pos = 0; pos < 200; pos++)
            assert_int_equal(sample(&o, logits, 6, recent, pos), 0);
    }
    /* Penalties of all tokens are no quadratic affair. */
    enum { LONG = 200000 };
    int32_t *all = calloc(LONG, sizeof *all);
    for (int i = 0; i < LONG; i++)
        all[i] = i % 6;
    o.penalty_tokens = -1;
    o.frequency_penalty = 0.01f;
    sample(&o, logits, 6, all, LONG);
    free(all);
}

static void bad_settings_are_refused(void **state)
{
    (void)state;
    kvd_error err;
    const kvd_logit_bias high = {10, 0}, low = {-1, 0}, much = {0, 2e6f}, nan = {0, NAN};
#define BAD(member, value)                                                     \
    do {                                                                       \
        kvd_sampling o;                                                        \
        kvd_sampling_defaults(&o);                                             \
        o.n_bias = 1;                                                          \
        o.bias = &(kvd_logit_bias){0, 0};                                      \
        assert_int_equal(kvd__sampling_check(&o, 10, &err), 0);                \
        o.member = value;                                                      \
        assert_int_equal(kvd__sampling_check(&o, 10, &err), KVD_E_RANGE);      \
    } while (0)
    BAD(temperature, -0.1f);
    BAD(temperature, NAN);
    BAD(temperature, INFINITY);
    BAD(top_k, -1);
    BAD(top_p, 0);
    BAD(top_p, 1.1f);
    BAD(top_p, NAN);
    BAD(min_p, -0.1f);
    BAD(min_p, 1.1f);
    BAD(min_p, NAN);
    BAD(repeat_penalty, 0);
    BAD(repeat_penalty, -1);
    BAD(repeat_penalty, NAN);
    BAD(presence_penalty, INFINITY);
    BAD(frequency_penalty, NAN);
    BAD(penalty_tokens, -2);
    BAD(bias, &high);
    BAD(bias, &low);
    BAD(bias, &much);
    BAD(bias, &nan);
}

/* ---- text ------------------------------------------------------------------------------ */

typedef struct {
    char text[8192];
    size_t n;
    int64_t tokens, stop_after; /* stop_after tokens; 0: never */
    bool border[8192];          /* a call ended before this byte */
    bool flushed;
} heard;

/* Length of the well-formed character at p, 0 if there is none (Unicode, table 3-7). */
static size_t character(const char *s, size_t n)
{
    const unsigned char *p = (const unsigned char *)s;
    size_t need = p[0] < 0x80 ? 1 : p[0] >= 0xc2 && p[0] <= 0xdf ? 2 : p[0] >= 0xe0 && p[0] <= 0xef ? 3 : p[0] >= 0xf0 && p[0] <= 0xf4 ? 4 : 0;
    if (!need || need > n)
        return 0;
    for (size_t i = 1; i < need; i++)
        if ((p[i] & 0xc0) != 0x80)
            return 0;
    bool bad = (p[0] == 0xe0 && p[1] < 0xa0) || (p[0] == 0xed && p[1] > 0x9f) || (p[0] == 0xf0 && p[1] < 0x90) || (p[0] == 0xf4 && p[1] > 0x8f);
    return bad ? 0 : need;
}

static int hear(void *ctx, int32_t id, const char *text, size_t n)
{
    heard *h = ctx;
    assert_true(h->n + n < sizeof h->text);
    assert_false(h->flushed);
    if (id < 0) {
        h->flushed = true;
        assert_true(n > 0);
    } else {
        h->tokens++;
        h->border[h->n + n] = true;
    }
    memcpy(h->text + h->n, text, n);
    h->n += n;
    return h->stop_after && h->tokens == h->stop_after;
}

static bool contains(const char *p, size_t n, const char *s)
{
    return memmem(p, n, s, strlen(s)) != NULL;
}

/* Sampled text of few tokens, whose pieces make characters and stop strings that
 * cross their borders, against the bytes of the tokens put together. */
static void text_is_the_tokens_up_to_the_stop(void **state)
{
    (void)state;
    kvd_model *m = tiny_load("llama", NULL);
    int n_vocab = m->config.n_vocab, stopped = 0;
    /* a b ab, the bytes of U+20AC, U+00E9 and U+1F600, one that is never valid */
    static const char *const wanted[] = {"a", "b", "t", "h", "th", "\xe2", "\x82", "\xac", "\xc3", "\xa9", "\xf0", "\x9f", "\x98", "\x80", "\xff"};
    kvd_logit_bias bias[512];
    int64_t n_bias = 0;
    for (int id = 0; id < n_vocab; id++) {
        size_t n;
        const char *p = kvd_token_text(m, id, false, &n);
        bool in = false;
        for (size_t i = 0; i < sizeof wanted / sizeof wanted[0]; i++)
            in |= n == strlen(wanted[i]) && !memcmp(p, wanted[i], n);
        if (!in || kvd_token_is_end(m, id))
            bias[n_bias++] = (kvd_logit_bias){id, -1000};
    }
    assert_true(n_vocab - n_bias >= 12);
    static const char *const stops[] = {"ab", "aab", "bth", "\xe2\x82\xac", "a\xc3\xa9", "tt", "\xff\xff", "b", "ha", "\xf0\x9f\x98\x80", "ththt"};
    for (int run = 0; run < 400; run++) {
        tiny_seed = (uint64_t)run;
        const char *stop[3] = {stops[pick(11)], stops[pick(11)], stops[pick(11)]};
        static heard h;
        h = (heard){.stop_after = pick(8) == 0 ? 1 + pick(30) : 0};
        kvd_generate_options o;
        kvd_generate_options_defaults(&o);
        o.max_tokens = 1 + pick(40);
        o.sampling.temperature = 2;
        o.sampling.top_k = 0;
        o.sampling.top_p = 1;
        o.sampling.min_p = 0;
        o.sampling.seed = (uint64_t)run;
        o.sampling.bias = bias;
        o.sampling.n_bias = n_bias;
        o.stop = stop;
        o.n_stop = pick(4);
        o.on_token = pick(4) ? hear : NULL;
        o.ctx = &h;
        kvd_session *s = tiny_session(m, NULL);
        kvd_result r;
        kvd_error err = {0};
        int32_t prompt[2] = {5, (int32_t)pick(n_vocab)};
        check(kvd_generate(s, prompt, 2, &o, &r, &err) == 0, "%s", err.message);
        /* The same from the ids: after which token is a stop string complete? */
        char all[8192];
        size_t n = 0, cut = SIZE_MAX;
        int64_t t = 0;
        for (; t < r.n_tokens && cut == SIZE_MAX; t++) {
            size_t k;
            const char *p = kvd_token_text(m, r.tokens[t], false, &k);
            memcpy(all + n, p, k);
            n += k;
            size_t whole = n; /* what is certain: an unfinished character is not */
            for (size_t back = 1; back <= 3 && back <= n; back++) {
                unsigned char c = (unsigned char)all[n - back];
                if ((c & 0xc0) == 0x80)
                    continue;
                size_t need = c >= 0xc2 && c <= 0xdf ? 2 : c >= 0xe0 && c <= 0xef ? 3 : c >= 0xf0 && c <= 0xf4 ? 4 : 1;
                bool can = back < need && !(back > 1 && ((c == 0xe2 && (unsigned char)all[n - back + 1] < 0x80) ||
                                                          (c == 0xf0 && (unsigned char)all[n - back + 1] < 0x90)));
                if (can)
                    whole = n - back;
                break;
            }
            for (int64_t i = 0; i < o.n_stop; i++) {
                const char *at = memmem(all, whole, stop[i], strlen(stop[i]));
                if (at && (size_t)(at - all) < cut)
                    cut = (size_t)(at - all);
            }
        }
        assert_int_equal(t, r.n_tokens); /* nothing after the stop */
        if (cut != SIZE_MAX) {
            stopped++;
            n = cut;
            assert_int_equal(r.stop_reason, KVD_STOP_STRING);
        } else if (o.on_token && h.stop_after && h.stop_after <= r.n_tokens) {
            assert_int_equal(r.stop_reason, KVD_STOP_INTERRUPTED);
            assert_int_equal(r.n_tokens, h.stop_after);
        } else {
            assert_int_equal(r.stop_reason, KVD_STOP_LENGTH);
            assert_int_equal(r.n_tokens, o.max_tokens);
        }
        check(r.n_text == n && !memcmp(r.text, all, n) && r.text[n] == 0, "run %d: text of %zu bytes, expected %zu", run, r.n_text, n);
        for (int64_t i = 0; i < o.n_stop && r.stop_reason == KVD_STOP_STRING; i++)
            assert_false(contains(r.text, r.n_text, stop[i]));
        if (o.on_token) {
            assert_int_equal(h.tokens, r.n_tokens);
            assert_int_equal(h.n, n);
            assert_memory_equal(h.text, all, n);
            for (size_t at = 0, k; at < n; at += k ? k : 1) {
                k = character(all + at, n - at);
                for (size_t i = 1; i < k; i++)
                    check(!h.border[at + i], "run %d: a character was cut at byte %zu", run, at + i);
            }
        }
        assert_int_equal(kvd_session_tokens(s, NULL), 2 + r.n_tokens - 1); /* the last one is fed to no pass */
        kvd_result_free(&r);
        kvd_session_free(&s);
    }
    assert_true(stopped > 60);
    tiny_free(&m);
}

static void end_tokens_end(void **state)
{
    (void)state;
    kvd_model *m = tiny_load("llama", NULL);
    int32_t end = kvd_token_eos(m);
    assert_true(kvd_token_is_end(m, end));
    for (int i = 0; i < 3; i++) {
        kvd_session *s = tiny_session(m, NULL);
        kvd_generate_options o;
        kvd_generate_options_defaults(&o);
        kvd_logit_bias bias = {end, 1e6f};
        o.max_tokens = 5;
        o.sampling.bias = &bias;
        o.sampling.n_bias = 1;
        o.ignore_end = i == 1;
        o.special = i == 2;
        kvd_result r;
        kvd_error err;
        int32_t prompt[1] = {7};
        assert_int_equal(kvd_generate(s, prompt, 1, &o, &r, &err), 0);
        assert_int_equal(r.n_tokens, i == 1 ? 5 : 1);
        assert_int_equal(r.stop_reason, i == 1 ? KVD_STOP_LENGTH : KVD_STOP_END);
        assert_int_equal(r.n_text, 0);
        assert_int_equal(kvd_session_tokens(s, NULL), i == 1 ? 5 : 1);
        kvd_result_free(&r);
        kvd_result_free(&r);
        /* and none at all */
        o.max_tokens = 0;
        assert_int_equal(kvd_generate(s, prompt, 1, &o, &r, &err), 0);
        assert_true(r.n_tokens == 0 && r.stop_reason == KVD_STOP_LENGTH && r.n_text == 0 && r.text[0] == 0);
        kvd_result_free(&r);
        const char *empty[] = {"x", ""}, *null[] = {NULL};
        o.stop = empty;
        o.n_stop = 2;
        assert_int_equal(kvd_generate(s, prompt, 1, &o, &r, &err), KVD_E_ARG);
        kvd_result_free(&r);
        o.stop = null;
        o.n_stop = 1;
        assert_int_equal(kvd_generate(s, prompt, 1, &o, &r, &err), KVD_E_ARG);
        kvd_result_free(&r);
        kvd_session_free(&s);
    }
    tiny_free(&m);
}

static int cancel_later(void *ctx, int64_t done, int64_t total, int64_t rows, int64_t recomputed)
{
    (void)done, (void)total, (void)rows, (void)recomputed;
    return --*(int64_t *)ctx == 0;
}

/* A run that is cancelled leaves what there is; the session goes on where it was,
 * and the same tokens come again. */
static void cancelled_runs_leave_what_there_is(void **state)
{
    (void)state;
    kvd_model *m = tiny_load("gemma3", NULL);
    kvd_session_options so;
    kvd_session_options_defaults(&so);
    so.kv_tokens = 16;
    kvd_generate_options o;
    kvd_generate_options_defaults(&o);
    o.max_tokens = 30;
    o.ignore_end = true;
    o.sampling.temperature = 1;
    int32_t prompt[20] = {2, 9, 300, 301};
    kvd_result whole, part, rest;
    kvd_error err = {0};
    kvd_session *s = tiny_session(m, &so);
    assert_int_equal(kvd_generate(s, prompt, 20, &o, &whole, &err), 0);
    assert_int_equal(whole.n_tokens, 30);
    kvd_session_free(&s);
    for (int64_t at = 1; at < 120; at += 7) {
        int64_t count = at;
        s = tiny_session(m, &so);
        kvd_session_set_progress(s, cancel_later, &count);
        assert_int_equal(kvd_generate(s, prompt, 20, &o, &part, &err), KVD_E_CANCELLED);
        assert_int_equal(part.stop_reason, KVD_STOP_INTERRUPTED);
        kvd_session_set_progress(s, NULL, NULL);
        int64_t n = kvd_session_tokens(s, NULL);
        assert_true(n == 0 ? part.n_tokens == 0 : n == 20 + part.n_tokens - 1);
        assert_memory_equal(part.tokens, whole.tokens, (size_t)part.n_tokens * 4);
        assert_true(part.n_text <= whole.n_text && !memcmp(part.text, whole.text, part.n_text));
        /* go on: feed the token that was not, or the prompt */
        kvd_generate_options more = o;
        more.max_tokens = 30 - part.n_tokens;
        assert_int_equal(n == 0 ? kvd_generate(s, prompt, 20, &more, &rest, &err)
                                : kvd_generate(s, part.tokens + part.n_tokens - 1, 1, &more, &rest, &err), 0);
        assert_int_equal(rest.n_tokens, more.max_tokens);
        assert_memory_equal(rest.tokens, whole.tokens + part.n_tokens, (size_t)rest.n_tokens * 4);
        kvd_result_free(&part);
        kvd_result_free(&rest);
        kvd_session_free(&s);
    }
    kvd_result_free(&whole);
    tiny_free(&m);
}

/* The receipt names what differs and nothing else. */
static void receipts_differ_when_bits_may(void **state)
{
    (void)state;
    static const char *const models[] = {"llama", "qwen2", "gemma3"};
    char seen[64][33];
    int n_seen = 0;
    for (int f = 0; f < 3; f++)
        for (int kv = 0; kv < 3; kv++)
            for (int stream = 0; stream < 2; stream++)
                for (int exact = 0; exact < 2; exact++) {
                    char first[33] = "";
                    for (int same = 0; same < 3; same++) {
                        kvd_model_options mo;
                        kvd_model_options_defaults(&mo);
                        mo.activations_f32 = exact;
                        mo.n_threads = 1 + same;
                        mo.chunk_tokens = 4 + 60 * same;
                        kvd_model *m = tiny_load(models[f], &mo);
                        kvd_session_options so;
                        kvd_session_options_defaults(&so);
                        so.kv_type = (kvd_float_type)kv;
                        so.stream = (kvd_float_type)(2 - stream);
                        so.kv_tokens = same == 1 ? 16 : -1;
                        kvd_session *s = tiny_session(m, &so);
                        kvd_generate_options o;
                        kvd_generate_options_defaults(&o);
                        o.max_tokens = 4;
                        o.ignore_end = true;
                        int32_t prompt[40] = {1, 2, 3};
                        kvd_result r;
                        kvd_error err;
                        assert_int_equal(kvd_generate(s, prompt, 40, &o, &r, &err), 0);
                        if (same)
                            assert_string_equal(r.receipt, first);
                        strcpy(first, r.receipt);
                        kvd_result_free(&r);
                        kvd_session_free(&s);
                        tiny_free(&m);
                    }
                    for (int i = 0; i < n_seen; i++)
                        assert_string_not_equal(seen[i], first);
                    strcpy(seen[n_seen++], first);
                }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(philox_known_answers),
        cmocka_unit_test(gumbel_by_the_page),
        cmocka_unit_test(steps_as_restated),
        cmocka_unit_test(draws_follow_the_softmax),
        cmocka_unit_test(greedy_ties_and_edges),
        cmocka_unit_test(bad_settings_are_refused),
        cmocka_unit_test(text_is_the_tokens_up_to_the_stop),
        cmocka_unit_test(end_tokens_end),
        cmocka_unit_test(cancelled_runs_leave_what_there_is),
        cmocka_unit_test(receipts_differ_when_bits_may),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
