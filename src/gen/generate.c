/* Generation: admission, prefill, then one pass per token; text is streamed in
 * whole characters, and held back while it could still become a stop string. */
#include <string.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/fpenv.h"
#include "gen/receipt.h"
#include "gen/sampler.h"
#include "gen/session.h"

static const char *const reasons[] = {"length", "end", "stop", "context", "interrupted"};

const char *kvd_stop_reason_name(kvd_stop_reason r) { return (unsigned)r <= KVD_STOP_INTERRUPTED ? reasons[r] : "?"; }

void kvd_generate_options_defaults(kvd_generate_options *o)
{
    *o = (kvd_generate_options){.max_tokens = 256};
    kvd_sampling_defaults(&o->sampling);
}

/* The text of a run as it grows. [0, sent) was given to the callback. */
typedef struct {
    kvd_session *s;
    const kvd_generate_options *o;
    kvd_result *r;
    kvd_decoder decoder;
    size_t capacity, sent;
} writer;

static int reserve_text(writer *w, size_t more, kvd_error *err)
{
    size_t need = w->r->n_text + more + 1;
    if (need <= w->capacity)
        return 0;
    size_t cap = need + need / 2 + 256;
    char *t = kvd__realloc(w->s->m->ledger, KVD_ACC_HOST, w->r->text, cap, err);
    if (!t)
        return KVD_E_NOMEM;
    w->r->text = t;
    w->capacity = cap;
    return 0;
}

/* Where the earliest stop string begins at or after `from`, or n_text. */
static size_t find_stop(const writer *w, size_t from)
{
    size_t best = w->r->n_text;
    for (int64_t i = 0; i < w->o->n_stop; i++) {
        size_t n = strlen(w->o->stop[i]);
        for (size_t at = from; at + n <= w->r->n_text && at < best; at++)
            if (!memcmp(w->r->text + at, w->o->stop[i], n))
                best = at;
    }
    return best;
}

/* Bytes at the end that a stop string could begin with. */
static size_t held_back(const writer *w)
{
    size_t most = 0;
    for (int64_t i = 0; i < w->o->n_stop; i++) {
        size_t n = strlen(w->o->stop[i]), have = w->r->n_text - w->sent;
        for (size_t k = n - 1 < have ? n - 1 : have; k > most; k--)
            if (!memcmp(w->r->text + w->r->n_text - k, w->o->stop[i], k))
                most = k;
    }
    return most;
}

/* Take a token's text; *stopped when a stop string is complete. A token whose id
 * is -1 flushes. Returns a KVD_E_* or the callback's wish to stop (1). */
static int write_token(writer *w, int32_t id, bool visible, bool *stopped, kvd_error *err)
{
    kvd_result *r = w->r;
    const kvd_tokenizer *t = w->s->m->tokenizer;
    int rc = reserve_text(w, kvd__token_max_bytes(t) + 8, err);
    if (rc)
        return rc;
    char *end = r->text + r->n_text;
    if (id < 0)
        r->n_text += kvd__decoder_flush(&w->decoder, end);
    else if (visible)
        r->n_text += kvd__decoder_push(&w->decoder, t, id, w->o->special, end);
    size_t stop = find_stop(w, w->sent);
    *stopped = stop < r->n_text;
    if (*stopped) /* half a character behind it goes too */
        w->decoder.n_pending = 0;
    r->n_text = stop;
    r->text[r->n_text] = 0;
    size_t give = r->n_text - w->sent - (*stopped || id < 0 ? 0 : held_back(w));
    const char *p = r->text + w->sent;
    w->sent += give;
    if (w->o->on_token && (id >= 0 || give))
        return w->o->on_token(w->o->ctx, id, p, give) ? 1 : 0;
    return 0;
}

/* How many tokens may be generated: refuse what cannot be finished. */
static int admit(kvd_session *s, int64_t n, const kvd_generate_options *o, int64_t *limit, kvd_error *err)
{
    kvd_limits lim = kvd__session_limits(s);
    int64_t n_ctx = s->m->config.n_ctx, new = o->max_tokens < 0 ? 1 : o->max_tokens;
    if (o->max_tokens < -1)
        return kvd__fail(err, KVD_E_RANGE, "max_tokens: %lld is below -1", (long long)o->max_tokens);
    if (n < 1)
        return kvd__fail(err, KVD_E_RANGE, "the prompt is empty");
    if (n > n_ctx - s->n || new > n_ctx - s->n - n) /* no sum of what a caller gives */
        return kvd__fail(err, KVD_E_RANGE,
                         "%lld tokens, %lld of prompt and %lld new ones do not fit the trained context of %lld",
                         (long long)s->n, (long long)n, (long long)new, (long long)n_ctx);
    int64_t prompt = s->n + n, want = prompt + new;
    kvd__session_choose_tier(s, prompt, new);
    int64_t need = kvd__session_least_bytes(s, &lim, want);
    if (need > lim.budget_bytes) {
        int64_t most = kvd__session_max_tokens(s, &lim);
        kvd__fail(err, KVD_E_BUDGET,
                  "context memory: prompt of %lld tokens and %lld new ones need %lld bytes, the budget is %lld (T_max %lld tokens)",
                  (long long)prompt, (long long)new, (long long)need, (long long)lim.budget_bytes, (long long)most);
        if (err) {
            err->need_bytes = need;
            err->max_tokens = most;
        }
        return KVD_E_BUDGET;
    }
    *limit = o->max_tokens;
    s->reserve_tokens = want;
    if (o->max_tokens < 0)
        *limit = kvd__session_max_tokens(s, &lim) - prompt;
    return 0;
}

static int check_options(kvd_session *s, const kvd_generate_options *o, kvd_error *err)
{
    for (int64_t i = 0; i < o->n_stop; i++)
        if (!o->stop[i] || !o->stop[i][0])
            return kvd__fail(err, KVD_E_ARG, "an empty stop string");
    return kvd__sampling_check(&o->sampling, s->m->config.n_vocab, err);
}

/* The loop: sample from the session's logits, emit, feed. */
static int decode_loop(writer *w, kvd_receipt *receipt, int64_t limit, kvd_error *err)
{
    kvd_session *s = w->s;
    kvd_result *r = w->r;
    int32_t n_vocab = s->m->config.n_vocab;
    for (;;) {
        if (r->n_tokens >= limit) {
            r->stop_reason = w->o->max_tokens < 0 ? KVD_STOP_CONTEXT : KVD_STOP_LENGTH;
            return 0;
        }
        int32_t id = kvd__sample(&w->o->sampling, s->logits, n_vocab, s->ids, s->n, s->candidates);
        kvd__receipt_add(receipt, id, s->logits, n_vocab);
        r->tokens[r->n_tokens++] = id;
        bool end = !w->o->ignore_end && kvd__token_is_end(s->m->tokenizer, id), stopped = false;
        int rc = write_token(w, id, !end, &stopped, err);
        if (rc < 0)
            return rc;
        if (end || stopped || rc) {
            r->stop_reason = end ? KVD_STOP_END : stopped ? KVD_STOP_STRING : KVD_STOP_INTERRUPTED;
            return 0;
        }
        if (r->n_tokens < limit && (rc = kvd_session_feed(s, &id, 1, NULL, err)))
            return rc;
    }
}

static int make_buffers(kvd_session *s, int64_t limit, kvd_result *r, kvd_error *err)
{
    r->tokens = kvd__alloc_array(s->m->ledger, KVD_ACC_HOST, (size_t)limit, sizeof *r->tokens, err);
    r->text = kvd__alloc(s->m->ledger, KVD_ACC_HOST, 256, err);
    return r->tokens && r->text ? 0 : KVD_E_NOMEM;
}

int kvd_generate(kvd_session *s, const int32_t *ids, int64_t n, const kvd_generate_options *o, kvd_result *r, kvd_error *err)
{
    kvd_generate_options defaults;
    kvd_generate_options_defaults(&defaults);
    o = o ? o : &defaults;
    *r = (kvd_result){.stop_reason = KVD_STOP_INTERRUPTED};
    int64_t limit = 0;
    int rc;
    if (!s->m->tokenizer)
        return kvd__fail(err, KVD_E_UNSUPPORTED, "the model has no vocabulary");
    if ((rc = check_options(s, o, err)) || (rc = admit(s, n, o, &limit, err)) || (rc = make_buffers(s, limit, r, err)))
        return rc;
    kvd_fpenv env = kvd__fpenv_enter();
    writer w = {.s = s, .o = o, .r = r, .capacity = 256, .decoder = {.started = true}}; /* the text goes on from the prompt */
    double t0 = kvd__seconds();
    rc = kvd_session_feed(s, ids, n, NULL, err);
    r->prefill_s = kvd__seconds() - t0;
    if (!rc) {
        r->prompt_tokens = s->n;
        kvd_receipt *receipt = kvd__receipt_begin(s, err);
        t0 = kvd__seconds();
        rc = receipt ? decode_loop(&w, receipt, limit, err) : KVD_E_NOMEM;
        r->decode_s = kvd__seconds() - t0;
        kvd__receipt_end(&receipt, r->receipt);
        bool stopped;
        int flush = write_token(&w, -1, false, &stopped, rc ? NULL : err);
        rc = rc ? rc : flush < 0 ? flush : 0;
    }
    kvd__fpenv_leave(env);
    return rc;
}

void kvd_result_free(kvd_result *r)
{
    kvd__free(r->tokens);
    kvd__free(r->text);
    *r = (kvd_result){0};
}
