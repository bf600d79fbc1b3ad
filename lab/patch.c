/* 5.3: cross-task residual patching. A donor and a recipient prompt run apart; then the
 * recipient runs again for each layer, with the donor's residual in place of its own
 * where it enters that layer, and what comes out is compared with both.
 *
 * What is replaced decides what one learns.
 *
 *   all positions   Everything that the layers above see is the donor's. The result has
 *                   to be the donor's distribution, to the bit: the arithmetic above the
 *                   patch is the same function of the same bits. True of any program
 *                   whose layers pass on one tensor, so as evidence about the residual
 *                   stream it is a tautology; as a test of an engine it is a good one.
 *   last position   At the layers from the patch on, the recipient's earlier positions
 *                   keep their keys and values, and the patched position attends to
 *                   them. KL is 0 only behind the last layer, where nobody attends to
 *                   anything any more.
 *   K and V         (--what kv) of one KV head, or of all, at one layer: the position's
 *                   own residual goes on, and its query, which all query heads of the
 *                   group share K and V with, is the recipient's. K is rotated to where
 *                   it is put, so it is rebuilt there from the donor's residual.
 *
 * The paper replaces "the recipient's residual with the donor's" and finds KL 0 at every
 * layer, which is what the first mode gives. */
#include "lab/lab.h"

#include <stdlib.h>
#include <string.h>

#include "lab/runs.h"
#include "lab/texts.h"


typedef struct {
    const lab *l;
    kvd_error *err;
    kvd_session *s;
    int32_t *donor, *recipient;     /* recipient: as it is fed */
    int32_t *next;                  /* [n_new] greedy tokens of the last run */
    int64_t n_donor, n_recipient, n_new, d, n_vocab;
    float *h;                 /* [n_layers + 1][n_donor][d_model] of the donor; behind the last layer its last row only */
    float *k, *v;             /* [n_donor][n_kv_heads][d_head], rotated to where they go */
    float *of_donor, *of_recipient, *patched; /* logits */
    int layer, head;          /* of the patch under way; head -1: all */
} patch;

/* ---- taps ---------------------------------------------------------------------- */

static float *residual_of(const patch *p, int layer, int64_t pos)
{
    return p->h + ((int64_t)layer * p->n_donor + pos) * p->d;
}

static void keep_residual(void *ctx, int layer, int64_t pos, float *h)
{
    const patch *p = ctx;
    if (pos < p->n_donor)
        memcpy(residual_of(p, layer, pos), h, (size_t)p->d * sizeof *h);
}

/* Which of the donor's positions goes to pos of the recipient; -1: none. */
static int64_t source(const patch *p, int64_t pos)
{
    if (p->l->at_all)
        return pos < p->n_donor ? pos : -1;
    return pos == p->n_recipient - 1 ? p->n_donor - 1 : -1;
}

static void put_residual(void *ctx, int layer, int64_t pos, float *h)
{
    const patch *p = ctx;
    if (layer == p->layer && source(p, pos) >= 0)
        memcpy(h, residual_of(p, layer, source(p, pos)), (size_t)p->d * sizeof *h);
}

static void put_kv(void *ctx, int layer, int64_t pos, float *k, float *v)
{
    const patch *p = ctx;
    int64_t dh = p->l->info.d_head, n_heads = p->l->info.n_kv_heads;
    int64_t from = p->head < 0 ? 0 : p->head * dh, n = p->head < 0 ? n_heads * dh : dh;
    if (layer != p->layer || source(p, pos) < 0)
        return;
    memcpy(k + from, p->k + source(p, pos) * n_heads * dh + from, (size_t)n * sizeof *k);
    memcpy(v + from, p->v + source(p, pos) * n_heads * dh + from, (size_t)n * sizeof *v);
}

/* ---- runs ---------------------------------------------------------------------- */

/* Feed an empty session a prompt under taps: the logits of its end, and n greedy tokens
 * (p->next). */
static int run(patch *p, const kvd_lab_taps *taps, const int32_t *ids, int64_t n_ids, int64_t n, float *logits)
{
    const float *row;
    int rc = kvd_session_rewind(p->s, 0, p->err);
    kvd_lab_set_taps(p->s, taps);
    for (int64_t t = 0; !rc && t < n; t++) {
        rc = kvd_session_feed(p->s, t ? &p->next[t - 1] : ids, t ? 1 : n_ids, &row, p->err);
        if (rc)
            break;
        if (t == 0)
            memcpy(logits, row, (size_t)p->n_vocab * sizeof *logits);
        p->next[t] = lab_argmax(row, p->n_vocab);
    }
    kvd_lab_set_taps(p->s, NULL);
    return rc;
}

/* K and V of a layer, made of the donor's residuals at the positions where they go. */
static int rebuild(patch *p)
{
    int64_t n_kv = p->l->info.n_kv_heads * p->l->info.d_head;
    int rc = 0;
    for (int64_t pos = 0; !rc && pos < p->n_recipient; pos++) {
        int64_t from = source(p, pos);
        if (from >= 0)
            rc = kvd_lab_reconstruct(p->s, p->layer, pos, residual_of(p, p->layer, from), p->k + from * n_kv, p->v + from * n_kv, p->err);
    }
    return rc;
}

static int run_patched(patch *p, int layer, int head, int64_t n)
{
    p->layer = layer;
    p->head = head;
    kvd_lab_taps taps = {.ctx = p, .from_pos = p->l->at_all ? 0 : p->n_recipient - 1};
    if (p->l->patch_kv)
        taps.kv_made = put_kv;
    else
        taps.residual = put_residual;
    int rc = p->l->patch_kv ? rebuild(p) : 0;
    return rc ? rc : run(p, &taps, p->recipient, p->n_recipient, n, p->patched);
}

/* ---- tables ---------------------------------------------------------------------- */

/* Tokens as text, control tokens included: what an instructed model says to a bare
 * question often comes behind one. */
static json_t *text_of(const patch *p, const int32_t *ids, int64_t n)
{
    char text[1024];
    size_t len = 0, k;
    for (int64_t i = 0; i < n; i++) {
        const char *piece = kvd_token_text(p->l->m, ids[i], true, &k);
        if (len + k > sizeof text)
            break;
        memcpy(text + len, piece, k);
        len += k;
    }
    return lab_text(text, len);
}

static void plain_row(const patch *p, json_t *table, const char *who, const int32_t *ids, int64_t n, const float *logits)
{
    lab_row(table, json_pack("[s, I, o, o, o, o]", who, (json_int_t)n, text_of(p, ids, n), text_of(p, p->next, 1), text_of(p, p->next, p->n_new),
                             lab_number(lab_kl_bits(logits, p->of_donor, p->n_vocab))));
}

typedef struct {
    int rows, zeros; /* layers; with the donor's very logits */
    bool zero_after; /* behind the last layer */
} summary;

static bool same_bits(const patch *p)
{
    return !memcmp(p->patched, p->of_donor, (size_t)p->n_vocab * sizeof(float));
}

static void layer_row(const patch *p, json_t *table, summary *sum)
{
    bool same = same_bits(p), after = p->layer == (int)p->l->info.n_layers;
    lab_row(table, json_pack("[i, o, o, b, o, o]", p->layer, lab_number(lab_kl_bits(p->patched, p->of_donor, p->n_vocab)),
                             lab_number(lab_kl_bits(p->patched, p->of_recipient, p->n_vocab)), same,
                             text_of(p, p->next, 1), text_of(p, p->next, p->n_new)));
    sum->zero_after |= after && same;
    if (after)
        return;
    sum->rows++;
    sum->zeros += same;
}

/* One row per layer, and for the residual one for behind the last layer. */
static int all_layers(patch *p, json_t *result, summary *sum)
{
    static const lab_column columns[] = {{"layer", "layer", 0},
                                         {"kl_donor", "KL(patched || donor), bits", -2},
                                         {"kl_recipient", "KL(patched || recipient), bits", -2},
                                         {"same_bits", "logits are the donor's", 0},
                                         {"next", "next token", 0},
                                         {"continuation", "continuation", 0},
                                         {NULL, NULL, 0}};
    json_t *table = lab_table(result, "layers", p->l->patch_kv ? "Donor's K and V at a layer" : "Donor's residual where it enters a layer", columns);
    int last = (int)p->l->info.n_layers - (p->l->patch_kv ? 1 : 0), rc = 0;
    int from = p->l->layer < 0 ? 0 : p->l->layer, to = p->l->layer < 0 ? last : p->l->layer;
    for (int layer = from; !rc && layer <= to; layer++) {
        rc = lab_tick(p->l, "patch", layer - from, to - from + 1, p->err);
        rc = rc ? rc : run_patched(p, layer, p->l->head, p->n_new);
        if (!rc)
            layer_row(p, table, sum);
    }
    if (!rc && to > from && (p->l->patch_kv || !p->l->at_all))
        lab_plot(result, "kl", "KL to the donor by patched layer", "lines", "layers", "layer", "kl_donor", NULL, NULL, LAB_LOG_Y);
    return rc;
}

/* K and V of single KV heads: how much of the difference between the prompts each carries. */
static int all_heads(patch *p, json_t *result)
{
    static const lab_column columns[] = {{"layer", "layer", 0},
                                         {"head", "KV head", 0},
                                         {"kl_donor", "KL(patched || donor), bits", -2},
                                         {"kl_recipient", "KL(patched || recipient), bits", -2},
                                         {NULL, NULL, 0}};
    int layers = (int)p->l->info.n_layers, heads = (int)p->l->info.n_kv_heads, rc = 0;
    if (!p->l->patch_kv || p->l->head >= 0 || p->l->layer >= 0 || p->l->quick)
        return 0;
    json_t *table = lab_table(result, "heads", "Donor's K and V of one KV head", columns);
    for (int i = 0; !rc && i < layers * heads; i++) {
        rc = lab_tick(p->l, "patch: single heads", i, (int64_t)layers * heads, p->err);
        rc = rc ? rc : run_patched(p, i / heads, i % heads, 1);
        if (!rc)
            lab_row(table, json_pack("[i, i, o, o]", i / heads, i % heads, lab_number(lab_kl_bits(p->patched, p->of_donor, p->n_vocab)),
                                     lab_number(lab_kl_bits(p->patched, p->of_recipient, p->n_vocab))));
    }
    if (!rc && heads > 1)
        lab_plot(result, "heads", "KL to the recipient by patched layer and KV head", "heat", "heads", "layer", "head", NULL, "kl_recipient", 0);
    return rc;
}

/* ---- what it means ------------------------------------------------------------------ */

static void notes(const patch *p, json_t *result, const summary *sum)
{
    const lab *l = p->l;
    if (l->patch_kv)
        lab_note(result, "K is rotated to the position where it is put, from the donor's residual entering the layer. The patched position keeps the recipient's residual and queries.");
    else if (l->at_all)
        lab_note(result, "All positions are replaced: what the layers above compute from is the donor's to the bit, so KL is exactly 0 whatever the model is. "
                         "As a statement about the residual stream this is a tautology; it checks the engine. With --at last the recipient's earlier keys and values remain, and KL is 0 only behind the last layer.");
    else
        lab_note(result, "Only the last position is replaced: the recipient's earlier keys and values remain at that layer and above, and the patched position attends to them. "
                         "KL is exactly 0 behind the last layer (the row after the last layer) and nowhere before. With --at all it is exactly 0 everywhere, which is a tautology.");
    lab_note(result, "The continuation goes on greedily after the patched pass; below the patched layer its tokens attend to the recipient's keys and values, so it need not be the donor's.");
    if (l->at_all)
        lab_note(result, "The recipient is brought to the donor's length by dropping tokens from its front or repeating its first one; all that enters the patched layer is replaced.");
    if (l->patch_kv || l->layer >= 0)
        return;
    if (l->at_all ? sum->zeros < sum->rows || !sum->zero_after : !sum->zero_after)
        lab_check_failed(result, "KL had to be exactly 0 (%s) and was not: the same residuals gave other logits.",
                         l->at_all ? "all positions, every layer" : "last position, behind the last layer");
}

/* ---- the experiment ------------------------------------------------------------------ */

static int prompt(const patch *p, const char *text, int32_t **ids, int64_t *n)
{
    int rc = kvd_tokenize(p->l->m, text, strlen(text), KVD_TOKENIZE_BOS, ids, n, p->err);
    return rc ? rc : *n ? 0 : lab_fail(p->err, KVD_E_ARG, "a prompt without tokens");
}

/* With all positions replaced, the recipient has as many as the donor. */
static int fit_recipient(patch *p, const int32_t *ids, int64_t n)
{
    p->n_recipient = p->l->at_all ? p->n_donor : n;
    p->recipient = lab_alloc(p->n_recipient, sizeof *p->recipient, p->err);
    if (!p->recipient)
        return KVD_E_NOMEM;
    for (int64_t i = 0; i < p->n_recipient; i++) {
        int64_t from = n - p->n_recipient + i;
        p->recipient[i] = ids[from < 0 ? 0 : from];
    }
    return 0;
}

static int prepare(patch *p, const lab *l, json_t *result)
{
    const char *donor = l->donor ? l->donor : lab_patch_donor, *recipient = l->recipient ? l->recipient : lab_patch_recipient;
    int32_t *ids = NULL;
    int64_t n = 0;
    int rc = prompt(p, donor, &p->donor, &p->n_donor);
    rc = rc ? rc : prompt(p, recipient, &ids, &n);
    rc = rc ? rc : fit_recipient(p, ids, n);
    kvd_ids_free(ids);
    if (rc)
        return rc;
    int64_t n_kv = l->info.n_kv_heads * l->info.d_head, most = p->n_donor > p->n_recipient ? p->n_donor : p->n_recipient;
    if (p->n_new - 1 > l->info.trained_context_tokens - most)
        return lab_fail(p->err, KVD_E_RANGE, "a prompt of %lld tokens and %lld new ones: the model's context is %lld", (long long)most, (long long)p->n_new,
                        (long long)l->info.trained_context_tokens);
    p->h = lab_alloc((l->info.n_layers + 1) * p->n_donor * p->d, sizeof *p->h, p->err);
    p->k = lab_alloc(p->n_donor * n_kv, sizeof *p->k, p->err);
    p->v = lab_alloc(p->n_donor * n_kv, sizeof *p->v, p->err);
    p->next = lab_alloc(p->n_new, sizeof *p->next, p->err);
    float **rows[] = {&p->of_donor, &p->of_recipient, &p->patched};
    for (int i = 0; i < 3; i++)
        *rows[i] = lab_alloc(p->n_vocab, sizeof(float), p->err);
    if (!p->h || !p->k || !p->v || !p->next || !p->of_donor || !p->of_recipient || !p->patched)
        return KVD_E_NOMEM;
    lab_setting(result, "donor", lab_text(donor, strlen(donor)));
    lab_setting(result, "recipient", lab_text(recipient, strlen(recipient)));
    lab_setting(result, "at", json_string(l->at_all ? "all" : "last"));
    lab_setting(result, "what", json_string(l->patch_kv ? "kv" : "residual"));
    lab_setting(result, "layer", l->layer < 0 ? json_string("all") : json_integer(l->layer));
    if (l->patch_kv)
        lab_setting(result, "head", l->head < 0 ? json_string("all") : json_integer(l->head));
    lab_setting(result, "new_tokens", json_integer((json_int_t)p->n_new));
    kvd_session_options so = l->so;
    so.policy = KVD_POLICY_FULL;
    so.evict_to = KVD_EVICT_RECOMPUTE;
    so.spill_dir = NULL;
    so.rates = NULL;
    so.kv_tokens = -1;
    rc = kvd_session_create(&p->s, l->m, &so, p->err);
    if (!rc)
        lab_watch(l, p->s);
    return rc;
}

static int measure(patch *p, json_t *result)
{
    static const lab_column columns[] = {{"prompt", "prompt", 0},   {"tokens", "tokens", 0},           {"text", "as it is fed", 0}, {"next", "next token", 0},
                                         {"continuation", "continuation", 0}, {"kl_donor", "KL(it || donor), bits", -2}, {NULL, NULL, 0}};
    summary sum = {0};
    json_t *table = lab_table(result, "prompts", "The prompts, unpatched", columns);
    int rc = run(p, &(kvd_lab_taps){.ctx = p, .residual = keep_residual}, p->donor, p->n_donor, p->n_new, p->of_donor);
    if (!rc)
        plain_row(p, table, "donor", p->donor, p->n_donor, p->of_donor);
    rc = rc ? rc : run(p, NULL, p->recipient, p->n_recipient, p->n_new, p->of_recipient);
    if (!rc)
        plain_row(p, table, "recipient", p->recipient, p->n_recipient, p->of_recipient);
    rc = rc ? rc : all_layers(p, result, &sum);
    rc = rc ? rc : all_heads(p, result);
    if (rc)
        return rc;
    notes(p, result, &sum);
    return 0;
}

int lab_patch(const lab *l, json_t *result, kvd_error *err)
{
    int last = (int)l->info.n_layers - (l->patch_kv ? 1 : 0);
    if (l->layer > last)
        return lab_fail(err, KVD_E_ARG, "layer %d: %s 0..%d", l->layer, l->patch_kv ? "K and V are at layers" : "residuals are before layers, and behind the last,", last);
    if (l->head >= l->info.n_kv_heads)
        return lab_fail(err, KVD_E_ARG, "KV head %d: the model has 0..%d", l->head, (int)l->info.n_kv_heads - 1);
    patch p = {.l = l, .err = err, .d = l->info.d_model, .n_vocab = l->info.n_vocab, .n_new = l->n_new ? l->n_new : l->quick ? 4 : 14};
    int rc = prepare(&p, l, result);
    rc = rc ? rc : measure(&p, result);
    kvd_session_free(&p.s);
    kvd_ids_free(p.donor);
    void *owned[] = {p.recipient, p.next, p.h, p.k, p.v, p.of_donor, p.of_recipient, p.patched};
    for (size_t i = 0; i < sizeof owned / sizeof owned[0]; i++)
        free(owned[i]);
    return rc;
}
