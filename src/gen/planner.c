/* Planning behind the public API, and the choice of a session's tier. The arithmetic is
 * kv/plan.c; the rates come from measure.c. */
#include "gen/disk.h"
#include "gen/session.h"

_Static_assert(sizeof(kvd_rates) == sizeof(kvd_plan_rates) && (int)KVD_RATE_POINTS == (int)KVD__RATE_POINTS,
               "the public record is the planner's");

static const kvd_plan_rates *inner(const kvd_rates *r) { return (const kvd_plan_rates *)(const void *)r; }

typedef struct {
    kvd_kv_shape shape;
    kvd_limits lim;
    kvd_spill_options spill;
    kvd_plan_of_tier tier[KVD_TIER_COUNT];
    kvd_tier chosen;
} plans;

static void plan_all(const kvd_model *m, const kvd_session_options *o, const kvd_rates *r, int64_t n_prompt, int64_t n_new,
                     int64_t budget, plans *p)
{
    kvd__model_kv_shape(m, kvd__kvtype_of(o->kv_type), kvd__kvtype_of(o->stream), &p->shape);
    p->lim = (kvd_limits){.full = o->policy == KVD_POLICY_FULL, .kv_tokens = o->kv_tokens, .budget_bytes = budget,
                          .piece_tokens = KVD__PIECE_TOKENS, .disk_piece_tokens = m->scratch.chunk ? m->scratch.chunk : 256};
    p->spill = kvd__disk_options(m, &p->shape, o->spill_dir, n_prompt + n_new, budget);
    kvd__plan_tiers(&p->shape, &p->lim, inner(r), r->disk_read_bytes_s > 0 ? &p->spill : NULL, n_prompt, n_new, p->tier);
    p->tier[KVD_TIER_DISK].need_bytes = kvd__disk_need(m, &p->shape, n_prompt + n_new); /* with smaller buffers than these */
    p->chosen = kvd__plan_choose(p->tier, n_new);
}

typedef struct {
    const kvd_model *m;
    const plans *p;
    kvd_tier tier;
} tier_of;

static int64_t tier_need(const void *ctx, int64_t n)
{
    const tier_of *x = ctx;
    switch (x->tier) {
    case KVD_TIER_FULL:
        return kvd__full_bytes(&x->p->shape, n);
    case KVD_TIER_DISK:
        return kvd__disk_need(x->m, &x->p->shape, n);
    default:
        return kvd__least_bytes(&x->p->shape, &x->p->lim, n);
    }
}

bool kvd_plan_tier(const kvd_model *m, const kvd_session_options *options, const kvd_rates *rates, int64_t n_prompt,
                   int64_t n_new, int64_t budget_bytes, int i, kvd_tier_plan *plan)
{
    kvd_session_options o;
    kvd_session_options_defaults(&o);
    if (options)
        o = *options;
    if (i < 0 || i >= KVD_TIER_COUNT)
        return false;
    plans p;
    plan_all(m, &o, rates, n_prompt, n_new, budget_bytes > 0 ? budget_bytes : INT64_MAX, &p);
    const kvd_plan_of_tier *t = &p.tier[i];
    *plan = (kvd_tier_plan){.name = kvd__tier_name((kvd_tier)i), .fits = t->fits, .chosen = p.chosen == (kvd_tier)i,
                            .need_bytes = t->need_bytes, .resident_tokens = t->resident_tokens,
                            .max_tokens = kvd__longest(tier_need, &(tier_of){m, &p, (kvd_tier)i}, p.lim.budget_bytes, m->config.n_ctx)};
    if (t->fits) {
        plan->prefill_tokens_per_s = (double)(n_prompt > 0 ? n_prompt : 1) / t->prefill_s;
        plan->decode_tokens_per_s = t->decode_tokens_per_s;
    }
    return true;
}

void kvd__session_choose_tier(kvd_session *s, int64_t n_prompt, int64_t n_new)
{
    if (s->o.evict_to != KVD_EVICT_AUTO || !s->has_rates || !s->spill_dir || s->disk_off || s->spill)
        return;
    plans p;
    kvd_limits lim = kvd__session_limits(s);
    plan_all(s->m, &s->o, &s->rates, n_prompt, n_new, lim.budget_bytes, &p);
    bool disk = p.chosen == KVD_TIER_DISK; /* none fits: the refusal names what would do */
    if (p.chosen == KVD_TIER_COUNT && s->rates.disk_read_bytes_s > 0)
        disk = p.tier[KVD_TIER_DISK].need_bytes < p.tier[KVD_TIER_RECOMPUTE].need_bytes;
    s->evict_to = disk ? KVD_EVICT_DISK : KVD_EVICT_RECOMPUTE;
}
