#include "gen/sampler.h"

#include <string.h>

#include "base/error.h"
#include "base/math64.h"
#include "base/rng.h"

void kvd_sampling_defaults(kvd_sampling *o)
{
    *o = (kvd_sampling){.top_k = 40, .top_p = 0.95f, .min_p = 0.05f, .repeat_penalty = 1, .penalty_tokens = 64};
}

int kvd__sampling_check(const kvd_sampling *o, int32_t n_vocab, kvd_error *err)
{
    if (!(o->temperature >= 0 && o->temperature <= 1000))
        return kvd__fail(err, KVD_E_RANGE, "temperature %g is not in 0..1000", (double)o->temperature);
    if (o->top_k < 0)
        return kvd__fail(err, KVD_E_RANGE, "top-k %d is negative", o->top_k);
    if (!(o->top_p > 0 && o->top_p <= 1))
        return kvd__fail(err, KVD_E_RANGE, "top-p %g is not in (0, 1]", (double)o->top_p);
    if (!(o->min_p >= 0 && o->min_p <= 1))
        return kvd__fail(err, KVD_E_RANGE, "min-p %g is not in 0..1", (double)o->min_p);
    if (!(o->repeat_penalty > 0 && o->repeat_penalty <= 1000))
        return kvd__fail(err, KVD_E_RANGE, "repeat penalty %g is not in (0, 1000]", (double)o->repeat_penalty);
    if (!(o->presence_penalty >= -1000 && o->presence_penalty <= 1000) || !(o->frequency_penalty >= -1000 && o->frequency_penalty <= 1000))
        return kvd__fail(err, KVD_E_RANGE, "presence and frequency penalties must be in -1000..1000");
    if (o->penalty_tokens < -1)
        return kvd__fail(err, KVD_E_RANGE, "penalty tokens: %d is below -1", o->penalty_tokens);
    for (int64_t i = 0; i < o->n_bias; i++)
        if (o->bias[i].id < 0 || o->bias[i].id >= n_vocab || !(o->bias[i].bias >= -1e6f && o->bias[i].bias <= 1e6f))
            return kvd__fail(err, KVD_E_RANGE, "logit bias %g of id %d: id must be in 0..%d, bias in -1e6..1e6",
                             (double)o->bias[i].bias, o->bias[i].id, n_vocab - 1);
    return 0;
}

double kvd__gumbel(uint64_t seed, uint32_t choice, int64_t pos, int32_t id)
{
    uint32_t counter[4] = {(uint32_t)pos, (uint32_t)((uint64_t)pos >> 32), (uint32_t)id, choice};
    uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)}, r[4];
    kvd__philox4x32(counter, key, r);
    uint64_t bits = (uint64_t)r[0] << 32 | r[1];
    double u = ((double)(bits >> 12) + 0.5) * 0x1p-52; /* in (0, 1) */
    return -kvd__log64(-kvd__log64(u));
}

/* Bias, then penalties once for each id that is among the tokens looked at. */
static void adjust(const kvd_sampling *o, kvd__candidate *c, int32_t n_vocab, const int32_t *recent, int64_t pos)
{
    for (int64_t i = 0; i < o->n_bias; i++)
        c[o->bias[i].id].value += (double)o->bias[i].bias;
    if (o->repeat_penalty == 1 && o->presence_penalty == 0 && o->frequency_penalty == 0)
        return;
    for (int64_t i = o->penalty_tokens < 0 || o->penalty_tokens > pos ? 0 : pos - o->penalty_tokens; i < pos; i++)
        c[recent[i]].count++;
    for (int32_t i = 0; i < n_vocab; i++) {
        double *v = &c[i].value;
        if (!c[i].count)
            continue;
        *v = *v > 0 ? *v / (double)o->repeat_penalty : *v * (double)o->repeat_penalty;
        *v -= (double)o->presence_penalty + (double)c[i].count * (double)o->frequency_penalty;
    }
}

static bool before(const kvd__candidate *a, const kvd__candidate *b)
{
    return a->value > b->value || (a->value == b->value && a->id < b->id);
}

static void swap(kvd__candidate *a, kvd__candidate *b)
{
    kvd__candidate t = *a;
    *a = *b;
    *b = t;
}

/* Restore the heap whose root is the last of the order. */
static void sift(kvd__candidate *h, int32_t n, int32_t i)
{
    for (int32_t child; (child = 2 * i + 1) < n; i = child) {
        if (child + 1 < n && before(&h[child], &h[child + 1]))
            child++;
        if (!before(&h[i], &h[child]))
            return;
        swap(&h[i], &h[child]);
    }
}

/* Move the first k of the order to the front (k = 0: all), sorted, in place: a
 * library's sort may allocate. */
static int32_t top(kvd__candidate *c, int32_t n, int32_t k)
{
    k = k > 0 && k < n ? k : n;
    for (int32_t i = k / 2 - 1; i >= 0; i--)
        sift(c, k, i);
    for (int32_t i = k; i < n; i++)
        if (before(&c[i], &c[0])) {
            c[0] = c[i];
            sift(c, k, 0);
        }
    for (int32_t i = k - 1; i > 0; i--) {
        swap(&c[0], &c[i]);
        sift(c, i, 0);
    }
    return k;
}

int32_t kvd__sample(const kvd_sampling *o, const float *logits, int32_t n_vocab, const int32_t *recent, int64_t pos,
                    kvd__candidate *c)
{
    for (int32_t i = 0; i < n_vocab; i++)
        c[i] = (kvd__candidate){.value = (double)logits[i], .id = i};
    adjust(o, c, n_vocab, recent, pos);
    if (o->temperature == 0) {
        int32_t best = 0;
        for (int32_t i = 1; i < n_vocab; i++)
            if (c[i].value > c[best].value)
                best = i;
        return best;
    }
    for (int32_t i = 0; i < n_vocab; i++)
        c[i].value /= (double)o->temperature;
    int32_t n = top(c, n_vocab, o->top_k), kept = n;
    if (o->top_p < 1) { /* the fewest whose probabilities reach top_p */
        double sum = 0, cum = 0;
        for (int32_t i = 0; i < n; i++)
            sum += kvd__exp64(c[i].value - c[0].value);
        for (kept = 0; kept < n && cum < (double)o->top_p * sum; kept++)
            cum += kvd__exp64(c[kept].value - c[0].value);
        n = kept;
    }
    if (o->min_p > 0)
        for (kept = 1; kept < n && kvd__exp64(c[kept].value - c[0].value) >= (double)o->min_p; kept++)
            ;
    n = n < kept ? n : kept;
    int32_t best = 0;
    double best_score = 0;
    for (int32_t i = 0; i < n; i++) {
        double score = c[i].value + kvd__gumbel(o->seed, o->choice, pos, c[i].id);
        if (i == 0 || score > best_score || (score == best_score && c[i].id < c[best].id)) {
            best = i;
            best_score = score;
        }
    }
    return c[best].id;
}
