#include "lab/compare.h"

#include <stdlib.h>
#include <string.h>

static int make_cells(lab_comparison *c, const char *list, kvd_error *err)
{
    int rc = 0;
    kvd_session_options o;
    char name[64];
    if (!(c->cells = lab_alloc(LAB_MOST_CELLS, sizeof *c->cells, err)))
        return KVD_E_NOMEM;
    while (lab_next_policy(c->l, &list, &o, name, &rc, err)) {
        if (c->n_cells == LAB_MOST_CELLS)
            return lab_fail(err, KVD_E_RANGE, "more than %d policies", LAB_MOST_CELLS);
        lab_compare_cell *cell = &c->cells[c->n_cells++];
        memcpy(cell->name, name, sizeof name);
        cell->o = o;
        cell->exact = o.policy == KVD_POLICY_KV_DIRECT || o.policy == KVD_POLICY_FULL;
    }
    return rc || c->n_cells ? rc : lab_fail(err, KVD_E_ARG, "no policies");
}

int lab_compare_make(lab_comparison *c, json_t *result, const char *own, lab_keep keep, kvd_error *err)
{
    c->gauge.l = c->l;
    int rc = make_cells(c, c->l->policies ? c->l->policies : own, err);
    rc = rc ? rc : lab_prompts(c->l, result, c->n_prompts, c->n_prompt, &c->prompts, err);
    return rc ? rc : lab_trace_make(&c->full, c->n, c->l->info.n_vocab, keep, err);
}

void lab_compare_free(lab_comparison *c)
{
    lab_trace_free(&c->full);
    free(c->cells);
    free(c->prompts);
}

int lab_compare_all(lab_comparison *c, lab_compare_fn *fn, void *ctx, kvd_error *err)
{
    int rc = 0;
    for (int64_t p = 0; !rc && p < c->n_prompts; p++) {
        rc = lab_run_full(c->l, c->prompts + p * c->n_prompt, c->n_prompt, c->n, &c->gauge, &c->full, err);
        for (int i = 0; !rc && i < c->n_cells; i++, c->done++)
            rc = fn(ctx, i, p, err);
    }
    return rc;
}

/* ---- one run ---------------------------------------------------------------------- */

static int step(void *ctx, int64_t t, const float *logits, int32_t token, kvd_error *err)
{
    lab_compare_run *r = ctx;
    lab_trace_step(&r->own, t, logits, token, err);
    double begun = lab_seconds();
    r->seen(r->ctx, t, logits);
    r->own.begun += lab_seconds() - begun;
    return lab_tick(r->c->l, r->cell->name, r->c->done, (int64_t)r->c->n_cells * r->c->n_prompts, err);
}

static int decode(lab_compare_run *r, const int32_t *forced, kvd_error *err)
{
    const lab_comparison *c = r->c;
    return lab_decode(c->l, r->s, c->prompts + r->prompt * c->n_prompt, c->n_prompt, forced, c->n, step, r, err);
}

int lab_compare_begin(lab_compare_run *r, kvd_error *err)
{
    lab_comparison *c = r->c;
    int rc = lab_trace_make(&r->own, c->n, c->l->info.n_vocab, LAB_KEEP_TOKENS, err);
    rc = rc ? rc : kvd_session_create(&r->s, c->l->m, &r->cell->o, err);
    if (rc)
        return rc;
    lab_gauge_watch(&c->gauge, r->s);
    r->own.begun = lab_seconds();
    if ((rc = decode(r, NULL, err)))
        return rc;
    r->first_different = lab_first_difference(r->own.tokens, c->full.tokens, c->n);
    r->decode_s = r->own.seconds[c->n - 1] - r->own.seconds[0];
    return 0;
}

int lab_compare_forced(lab_compare_run *r, kvd_error *err)
{
    int rc = kvd_session_rewind(r->s, 0, err);
    return rc ? rc : decode(r, r->c->full.tokens, err);
}

void lab_compare_end(lab_compare_run *r, bool ok)
{
    kvd_session_free(&r->s);
    lab_trace_free(&r->own);
    if (!ok)
        return;
    r->cell->n_prompts++;
    r->cell->first_different += (double)r->first_different;
    r->cell->decode_s += r->decode_s;
}
