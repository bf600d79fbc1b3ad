#include "gen/disk.h"
#include "gen/sampler.h"
#include "gen/session.h"

#include <string.h>

#include "base/error.h"

kvd_kvtype kvd__kvtype_of(kvd_float_type t)
{
    return t == KVD_TYPE_F16 ? KVD_KV_F16 : t == KVD_TYPE_BF16 ? KVD_KV_BF16 : KVD_KV_F32;
}

void kvd_session_options_defaults(kvd_session_options *o)
{
    *o = (kvd_session_options){.policy = KVD_POLICY_KV_DIRECT, .kv_type = KVD_TYPE_F16, .stream = KVD_TYPE_F32, .kv_tokens = -1};
}

_Static_assert(KVD_POLICY_TOVA - KVD_POLICY_WINDOW == (int)KVD_KEEP_TOVA, "the public list of lossy policies is that of kv/policy.h");

static kvd_policy_kind keep_kind(kvd_policy lossy) { return (kvd_policy_kind)(lossy - KVD_POLICY_WINDOW); }

const char *kvd_policy_name(kvd_policy p)
{
    if (p == KVD_POLICY_KV_DIRECT || p == KVD_POLICY_FULL)
        return p == KVD_POLICY_FULL ? "full" : "kv-direct";
    return kvd__is_lossy(p) && p <= KVD_POLICY_TOVA ? kvd__keeper(keep_kind(p))->name : "?";
}

static int check_options(const kvd_session_options *o, kvd_error *err)
{
    if ((unsigned)o->policy > KVD_POLICY_TOVA || (unsigned)o->positions > KVD_POSITIONS_RENUMBER || (unsigned)o->kv_type > KVD_TYPE_F32 || (unsigned)o->stream > KVD_TYPE_F32)
        return kvd__fail(err, KVD_E_RANGE, "session options: unknown policy or type");
    if (o->kv_tokens < -1)
        return kvd__fail(err, KVD_E_RANGE, "kv_tokens: %lld is below -1", (long long)o->kv_tokens);
    if ((unsigned)o->evict_to > KVD_EVICT_DISK)
        return kvd__fail(err, KVD_E_RANGE, "session options: unknown tier");
    if (o->evict_to == KVD_EVICT_DISK && (!o->spill_dir || !*o->spill_dir))
        return kvd__fail(err, KVD_E_RANGE, "evicting to disk needs a folder (spill_dir)");
    if (o->policy == KVD_POLICY_FULL && o->kv_tokens >= 0)
        return kvd__fail(err, KVD_E_RANGE, "policy full keeps everything: kv_tokens does not go with it");
    if (kvd__is_lossy(o->policy) && o->kv_tokens < KVD__LEAST_BUDGET)
        return kvd__fail(err, KVD_E_RANGE, "policy %s needs a budget in tokens (kv_tokens) of %d or more", kvd_policy_name(o->policy), KVD__LEAST_BUDGET);
    if (kvd__is_lossy(o->policy) && o->evict_to == KVD_EVICT_DISK)
        return kvd__fail(err, KVD_E_RANGE, "policy %s drops for good: there is nothing to evict to disk", kvd_policy_name(o->policy));
    if (!kvd__is_lossy(o->policy) && o->positions != KVD_POSITIONS_ORIGINAL)
        return kvd__fail(err, KVD_E_RANGE, "policy %s keeps all positions: there is nothing to renumber", kvd_policy_name(o->policy));
    return 0;
}

int kvd_session_create(kvd_session **out, kvd_model *m, const kvd_session_options *options, kvd_error *err)
{
    kvd_session_options o;
    kvd_session_options_defaults(&o);
    if (options)
        o = *options;
    int rc = check_options(&o, err);
    if (rc)
        return rc;
    if (!m->has_weights)
        return kvd__fail(err, KVD_E_ARG, "the model was loaded without weights");
    kvd_session *s = kvd__alloc(m->ledger, KVD_ACC_HOST, sizeof *s, err);
    if (!s)
        return KVD_E_NOMEM;
    s->m = m;
    s->o = o;
    s->evict_to = o.evict_to == KVD_EVICT_DISK ? KVD_EVICT_DISK : KVD_EVICT_RECOMPUTE;
    if (o.spill_dir && !(s->spill_dir = kvd__strndup(m->ledger, KVD_ACC_HOST, o.spill_dir, strlen(o.spill_dir), err))) {
        kvd_session_free(&s);
        return KVD_E_NOMEM;
    }
    s->o.spill_dir = s->spill_dir;
    if (o.rates) {
        s->rates = *o.rates;
        s->has_rates = true;
    }
    s->o.rates = NULL;
    s->stream_type = kvd__kvtype_of(o.stream);
    kvd__model_kv_shape(m, kvd__kvtype_of(o.kv_type), s->stream_type, &s->shape);
    size_t n_vocab = (size_t)m->config.n_vocab;
    s->logits = kvd__alloc_array(m->ledger, KVD_ACC_COMPUTE, n_vocab, sizeof *s->logits, err);
    s->candidates = kvd__alloc_array(m->ledger, KVD_ACC_COMPUTE, n_vocab, sizeof *s->candidates, err);
    if (s->logits && s->candidates) { /* touched now, like the model's scratch */
        memset(s->logits, 0, n_vocab * sizeof *s->logits);
        memset(s->candidates, 0, n_vocab * sizeof *s->candidates);
    }
    if (!s->logits || !s->candidates || kvd__kv_create(&s->kv, &s->shape, m->ledger, err)) {
        kvd_session_free(&s);
        return KVD_E_NOMEM;
    }
    if (kvd__is_lossy(o.policy)) {
        rc = kvd__compact_create(&s->compact, &s->shape, keep_kind(o.policy), o.positions == KVD_POSITIONS_RENUMBER, o.kv_tokens,
                                 kvd__pool_threads(m->pool), m->ledger, err);
        if (rc) {
            kvd_session_free(&s);
            return rc;
        }
    }
    *out = s;
    return 0;
}

void kvd_session_free(kvd_session **ps)
{
    kvd_session *s = *ps;
    *ps = NULL;
    if (!s)
        return;
    kvd__disk_drop(s);
    kvd__compact_destroy(&s->compact);
    kvd__kv_destroy(&s->kv);
    kvd__free(s->disk_block);
    kvd__free(s->spill_dir);
    kvd__free(s->ids);
    kvd__free(s->logits);
    kvd__free(s->candidates);
    kvd__free(s);
}

int64_t kvd_session_tokens(const kvd_session *s, const int32_t **ids)
{
    if (ids)
        *ids = s->ids;
    return s->n;
}

kvd_limits kvd__session_limits(const kvd_session *s)
{
    int64_t budget = s->m->ledger->budget_bytes, room = budget - atomic_load(&s->m->ledger->context_now);
    int64_t own = kvd__kv_context_bytes(s->kv) + s->capacity * (int64_t)sizeof *s->ids + s->spill_bytes;
    if (s->compact)
        own += kvd__compact_arena_bytes(&s->shape, s->o.kv_tokens);
    return (kvd_limits){
        .full = s->o.policy == KVD_POLICY_FULL,
        .kv_tokens = s->o.kv_tokens,
        .budget_bytes = budget == INT64_MAX ? INT64_MAX : room + own,
        .piece_tokens = KVD__PIECE_TOKENS,
        .disk_piece_tokens = s->m->scratch.chunk,
    };
}

static int64_t lossy_bytes(const void *ctx, int64_t n)
{
    const kvd_session *s = ctx;
    return kvd__compact_feed_bytes(&s->shape, keep_kind(s->o.policy), s->o.positions == KVD_POSITIONS_RENUMBER, s->o.kv_tokens,
                                   kvd__pool_threads(s->m->pool), n) +
           kvd__checkpoint_capacity(n) * (int64_t)sizeof *s->ids;
}

int64_t kvd__session_least_bytes(const kvd_session *s, const kvd_limits *lim, int64_t n)
{
    if (s->compact)
        return lossy_bytes(s, n);
    return kvd__disk_wanted(s) ? kvd__disk_least(s->m, &s->shape, lim, n) : kvd__least_bytes(&s->shape, lim, n);
}

int64_t kvd__session_max_tokens(const kvd_session *s, const kvd_limits *lim)
{
    if (s->compact)
        return kvd__longest(lossy_bytes, s, lim->budget_bytes, s->m->config.n_ctx);
    return kvd__disk_wanted(s) ? kvd__disk_max_tokens(s->m, &s->shape, lim) : kvd__max_tokens(&s->shape, lim, s->m->config.n_ctx);
}

/* ---- one pass ----------------------------------------------------------------- */

typedef struct {
    kvd_session *s;
    kvd_logits_fn fn;
    void *ctx;
    const kvd_pass_plan *plan;
    bool keep; /* copy the last row's logits into the session */
    int64_t recomputed; /* positions of the pass that were there before the feed */
    int64_t told;       /* logits of positions below have been handed out */
} sink;

static int on_logits(void *ctx, int span, int64_t pos, const float *logits)
{
    sink *k = ctx;
    (void)span;
    if (k->fn && k->fn(k->ctx, pos, logits))
        return 1;
    if (k->keep && pos == k->plan->n_before + k->plan->n_new - 1)
        memcpy(k->s->logits, logits, (size_t)k->s->m->config.n_vocab * sizeof *logits);
    return 0;
}

static int on_progress(void *ctx, int64_t done, int64_t total)
{
    sink *k = ctx;
    return k->s->progress(k->s->progress_ctx, done, total, k->plan->n_rows, k->recomputed);
}

/* A pass over one span, with what this session has of stream, taps and callbacks. */
static int compute(kvd_session *s, kvd_span *span, kvd_compact *compact, sink *k, kvd_error *err)
{
    void *stream = kvd__alloc(s->m->ledger, KVD_ACC_STREAM, (size_t)k->plan->stream_bytes, err);
    if (!stream)
        return err && err->code ? err->code : KVD_E_NOMEM;
    kvd_lab_taps own;
    kvd_taps taps;
    kvd_pass pass = {.spans = span, .n_spans = 1, .stream = stream, .stream_type = s->stream_type,
                     .taps = kvd__lab_taps(s, &own, &taps), .compact = compact, .ctx = k, .on_logits = on_logits,
                     .on_progress = s->progress ? on_progress : NULL};
    int rc = kvd__model_pass(s->m, &pass, err);
    kvd__free(stream);
    if (!rc) {
        s->stats.passes++;
        s->stats.recomputed_tokens += k->recomputed;
    }
    return rc;
}

/* Carry out a plan whose new tokens' ids are in place. */
static int run_pass(kvd_session *s, const kvd_pass_plan *plan, bool disk, int64_t n_logits, sink *k, kvd_error *err)
{
    int rc = kvd__kv_begin(s->kv, plan, err);
    if (rc)
        return rc;
    kvd_span span = {.kv = s->kv, .ids = s->ids, .recompute = plan->recompute, .n_before = plan->n_before,
                     .n_new = plan->n_new, .n_logits = n_logits, .spill = disk ? s->spill : NULL,
                     .disk_blocks = disk ? plan->start / KVD__BLOCK : 0};
    int64_t again = s->n - plan->n_before; /* when it begins again from 0 */
    k->recomputed = plan->recompute + (again < 0 ? 0 : again < plan->n_new ? again : plan->n_new);
    k->plan = plan;
    rc = compute(s, &span, NULL, k, err);
    kvd__kv_end(s->kv, plan, rc == 0);
    return rc;
}

/* ---- feeding --------------------------------------------------------------------- */

/* Ids for n tokens, in steps. Shrinking does not fail. */
static int fit_ids(kvd_session *s, int64_t n, kvd_error *err)
{
    int64_t want = kvd__checkpoint_capacity(n);
    if (want == s->capacity)
        return 0;
    int32_t *ids = kvd__realloc(s->m->ledger, KVD_ACC_CHECKPOINT, s->ids, (size_t)want * sizeof *ids, err);
    if (!ids)
        return err ? err->code : KVD_E_NOMEM;
    s->ids = ids;
    s->capacity = want;
    return 0;
}

static int check_feed(const kvd_session *s, const int32_t *ids, int64_t n, kvd_error *err)
{
    if (n < 1)
        return kvd__fail(err, KVD_E_RANGE, "no tokens to feed");
    if (n > s->m->config.n_ctx - s->n)
        return kvd__fail(err, KVD_E_RANGE, "%lld tokens do not fit the trained context of %d (%lld are there)", (long long)n,
                         s->m->config.n_ctx, (long long)s->n);
    for (int64_t i = 0; i < n; i++)
        if (ids[i] < 0 || ids[i] >= s->m->config.n_vocab)
            return kvd__fail(err, KVD_E_RANGE, "token id %d is not in 0..%d", ids[i], s->m->config.n_vocab - 1);
    return kvd__pool_check(s->m->pool, err);
}

/* Will generation drop something, sooner or later? Then the spill is made now, while
 * there is room for its buffers and a folder that does not serve can be refused. */
static bool will_evict(const kvd_session *s, const kvd_limits *lim)
{
    int64_t n = s->reserve_tokens;
    bool over = lim->kv_tokens >= 0 && n >= lim->kv_tokens + (lim->kv_tokens ? KVD__BLOCK : 1);
    return over || kvd__full_bytes(&s->shape, n) > lim->budget_bytes;
}

/* The next pass: resident if all fits, else by the session's tier. */
static int next_pass(kvd_session *s, const kvd_limits *lim, int64_t total, kvd_pass_plan *plan, bool *disk, kvd_error *err)
{
    const kvd_kv *kv = s->kv;
    kvd_limits left = *lim;
    *disk = false;
    if (left.budget_bytes != INT64_MAX)
        left.budget_bytes -= s->spill_bytes;
    int rc = kvd__pass_plan(&s->shape, &left, kv->end, kv->start, total - kv->end, plan, err);
    if (!kvd__disk_wanted(s))
        return rc;
    bool all_stays = !rc && plan->start == 0 && plan->recompute == 0 && (plan->n_before == kv->end || s->disk_end == 0);
    if (all_stays && !will_evict(s, lim))
        return 0;
    kvd_error disk_error;
    rc = kvd__disk_next(s, lim, total, plan, &disk_error);
    if (rc == KVD_E_IO || rc == KVD_E_UNSUPPORTED) { /* no spill to be had */
        if (s->o.evict_to == KVD_EVICT_DISK && s->stats.passes == 0)
            return kvd__fail(err, KVD_E_IO, "no disk tier: %.200s", disk_error.message);
        kvd__disk_off(s, &disk_error);
        return kvd__pass_plan(&s->shape, lim, kv->end, kv->start, total - kv->end, plan, err);
    }
    *disk = !rc;
    if (rc && err)
        *err = disk_error;
    return rc;
}

/* One step towards total tokens from kv->end. May also go back, or just give the disk
 * tier up. */
static int step(kvd_session *s, const kvd_limits *lim, const int32_t *ids, int64_t total, int64_t n_logits, sink *k,
                kvd_error *err)
{
    kvd_pass_plan plan;
    bool disk;
    int rc = next_pass(s, lim, total, &plan, &disk, err);
    if (rc)
        return rc;
    if (plan.n_before < s->kv->end)
        kvd__kv_reset(s->kv, plan.n_before);
    if (disk && (rc = kvd__disk_write(s, &plan, err))) {
        kvd__disk_off(s, err);
        return 0; /* again, without it */
    }
    kvd__kv_evict(s->kv, &plan); /* first: the ids may need its room */
    if ((rc = fit_ids(s, total, err)))
        return rc;
    memcpy(s->ids + s->n, ids, (size_t)(total - s->n) * sizeof *ids);
    int64_t end = plan.n_before + plan.n_new, first_wanted = total - n_logits > k->told ? total - n_logits : k->told;
    int64_t want = end > first_wanted ? end - first_wanted : 0;
    rc = run_pass(s, &plan, disk, want < plan.n_new ? want : plan.n_new, k, err);
    if ((rc == KVD_E_IO || rc == KVD_E_CHECK) && disk) {
        kvd__disk_off(s, err); /* what is not resident is evicted now */
        return 0;
    }
    if (!rc && end > k->told)
        k->told = end;
    return rc;
}

/* A lossy policy: all new tokens in one pass, whatever they are. What a failed one had
 * got to is in pieces and has to be forgotten. */
static int feed_lossy(kvd_session *s, const int32_t *ids, int64_t n, int64_t n_logits, sink *k, kvd_error *err)
{
    if (s->n && s->compact->n_tokens != s->n)
        return kvd__fail(err, KVD_E_ARG, "a pass of this session failed, and policy %s can not rebuild: rewind it to 0", kvd_policy_name(s->o.policy));
    kvd_pass_plan plan = {.n_before = s->n, .n_new = n, .n_rows = n, .stream_bytes = n * s->shape.stream_row_bytes};
    kvd_span span = {.kv = s->kv, .ids = s->ids, .n_before = s->n, .n_new = n, .n_logits = n_logits};
    k->plan = &plan;
    k->recomputed = 0;
    int rc = fit_ids(s, s->n + n, err);
    if (rc || (rc = kvd__compact_begin(s->compact, n, err)))
        return rc;
    memcpy(s->ids + s->n, ids, (size_t)n * sizeof *ids);
    span.ids = s->ids;
    rc = compute(s, &span, s->compact, k, err);
    kvd__compact_end(s->compact, rc == 0);
    if (rc)
        kvd__compact_reset(s->compact);
    else
        s->n += n;
    return rc;
}

static int feed_exact(kvd_session *s, const int32_t *ids, int64_t n, int64_t n_logits, sink *k, kvd_error *e)
{
    int rc = 0;
    int64_t total = s->n + n;
    kvd_limits lim = kvd__session_limits(s);
    while (!rc && s->kv->end < total)
        rc = step(s, &lim, ids, total, n_logits, k, e);
    if (!rc) {
        s->n = total;
        return 0;
    }
    if (s->kv->end < s->n) /* it had begun again */
        kvd__kv_reset(s->kv, s->n);
    kvd__kv_truncate(s->kv, s->n);
    kvd__disk_cut(s, s->n);
    fit_ids(s, s->n, NULL);
    if (rc == KVD_E_BUDGET)
        e->max_tokens = kvd__session_max_tokens(s, &lim);
    return rc;
}

int kvd__model_claim(struct kvd_model *m, kvd_error *err)
{
    if (atomic_exchange_explicit(&m->computing, true, memory_order_acquire))
        return kvd__fail(err, KVD_E_ARG, "the model is computing already: no such call from a callback, or from two threads");
    return 0;
}

void kvd__model_release(struct kvd_model *m) { atomic_store_explicit(&m->computing, false, memory_order_release); }

static int feed(kvd_session *s, const int32_t *ids, int64_t n, int64_t n_logits, sink *k, kvd_error *err)
{
    kvd_error own = {0}, *e = err ? err : &own;
    int rc = kvd__model_claim(s->m, e);
    if (rc)
        return rc;
    s->feeding = true;
    rc = check_feed(s, ids, n, e);
    rc = rc ? rc : (s->compact ? feed_lossy : feed_exact)(s, ids, n, n_logits, k, e);
    s->feeding = false;
    kvd__model_release(s->m);
    return rc;
}

int kvd_session_feed(kvd_session *s, const int32_t *ids, int64_t n, const float **logits, kvd_error *err)
{
    sink k = {.s = s, .keep = true};
    int rc = feed(s, ids, n, 1, &k, err);
    if (rc)
        return rc;
    s->has_logits = true;
    if (logits)
        *logits = s->logits;
    return 0;
}

int kvd_session_feed_all(kvd_session *s, const int32_t *ids, int64_t n, int64_t n_logits, kvd_logits_fn fn, void *ctx,
                         kvd_error *err)
{
    if (n_logits < 0 || n_logits > n)
        return kvd__fail(err, KVD_E_RANGE, "logits of %lld of %lld tokens", (long long)n_logits, (long long)n);
    sink k = {.s = s, .fn = fn, .ctx = ctx, .keep = true};
    int rc = feed(s, ids, n, n_logits, &k, err);
    if (!rc)
        s->has_logits = n_logits > 0;
    return rc;
}

int kvd_session_rewind(kvd_session *s, int64_t n_tokens, kvd_error *err)
{
    if (s->feeding)
        return kvd__fail(err, KVD_E_ARG, "the session is being fed: no rewinding from a callback");
    if (n_tokens < 0 || n_tokens > s->n)
        return kvd__fail(err, KVD_E_RANGE, "cannot rewind to %lld of %lld tokens", (long long)n_tokens, (long long)s->n);
    if (s->compact && n_tokens != s->n) {
        if (n_tokens)
            return kvd__fail(err, KVD_E_UNSUPPORTED, "policy %s has dropped what lies behind: rewind to 0", kvd_policy_name(s->o.policy));
        kvd__compact_reset(s->compact);
    }
    if (n_tokens < s->n)
        s->has_logits = false;
    kvd__kv_truncate(s->kv, n_tokens);
    kvd__disk_cut(s, n_tokens);
    fit_ids(s, n_tokens, NULL);
    s->n = n_tokens;
    return 0;
}

void kvd_session_park(kvd_session *s)
{
    if (s->compact || s->feeding)
        return;
    kvd__kv_clear(s->kv);
    kvd__disk_drop(s); /* its buffers are context memory */
}

void kvd_session_set_progress(kvd_session *s, kvd_progress_fn fn, void *ctx)
{
    s->progress = fn;
    s->progress_ctx = ctx;
}

void kvd_session_get_stats(const kvd_session *s, kvd_session_stats *st)
{
    *st = s->stats;
    st->n_tokens = s->n;
    st->resident_tokens = s->kv->end - s->kv->start;
    if (s->compact)
        st->resident_tokens = s->compact->n_tokens < s->o.kv_tokens ? s->compact->n_tokens : s->o.kv_tokens;
    st->evicted_tokens = s->n - st->resident_tokens;
    st->tier = !st->evicted_tokens ? "full" : s->compact ? "dropped" : s->spill ? "disk" : "recompute";
    st->disk = s->spill != NULL;
    st->disk_error = s->disk_off ? s->disk_error.message : NULL;
    kvd__disk_add_stats(s, st);
}
