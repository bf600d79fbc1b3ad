/* Generation with K and V projections of lower rank (5.7, Fig. 6).
 *
 * W_k and W_v of each KV head (d_head x d, GGUF's y = W x) are replaced by their best
 * approximation of rank r, W_r = U_r U_r^T W, U from the singular value decomposition.
 * No weight is changed for it: the tap `projected` sees y = W x + b of every row, before
 * QK-norm and rotation, and W_r x + b = U_r U_r^T (y - b) + b, on quantised weights as on
 * others. Queries are left alone, as in the paper.
 *
 * Since y - b lies in the span of U, U_r U_r^T (y - b) is y - b without its parts along
 * the vectors that are dropped. Whichever of the two sums is shorter is used, in f64; at
 * full rank nothing is taken away and the run is the exact one, bit for bit.
 *
 * Two measures against the run with all ranks: its own text, token by token (match), and
 * the divergence of the next token's distribution, both on the exact run's text
 * (teacher-forced: what truncation does to a prediction) and each on its own text (free:
 * after the first different token it compares different texts). */
#include "lab/lapack.h"
#include "lab/runs.h"

#include <stdlib.h>
#include <string.h>

enum { N_PROMPTS = 5, PROMPT_TOKENS = 64, N_NEW = 50, QUICK_NEW = 16 };
enum { K = 0, V = 1, ONLY_K = 1 << K, ONLY_V = 1 << V, BOTH = ONLY_K | ONLY_V };
static const struct {
    const char *name;
    int mask;
} kinds[] = {{"K", ONLY_K}, {"V", ONLY_V}, {"K and V", BOTH}};
enum { N_KINDS = 3 };
static const int sixteenths[] = {1, 2, 4, 6, 8, 10, 12, 14, 15, 16};
enum { N_PARTS = sizeof sixteenths / sizeof sixteenths[0] };

/* Left singular vectors of W_k and W_v, [n_layers][n_kv_heads] of each. */
typedef struct {
    int n_layers, n_heads, dh, k; /* k = min(d_head, d): what rank there can be */
    double *u[2];                 /* [..][k][dh], a vector a row */
    double *s[2];                 /* [..][k] */
    float *bias[2];               /* [n_layers][n_heads*dh] */
} bases;

/* What the tap does now. */
typedef struct {
    const bases *b;
    int mask, rank, layer; /* layer -1: all */
    double *y; /* [dh] */
} truncation;

/* ---- bases ---------------------------------------------------------------------- */

static void free_bases(bases *b)
{
    for (int i = 0; i < 2; i++) {
        free(b->u[i]);
        free(b->s[i]);
        free(b->bias[i]);
    }
}

/* One head: w is [dh][d]; for LAPACK that is W^T, whose R has W's left singular vectors
 * as its right ones. a: [dh][d], r: [dh][k]. */
static int decompose_head(const lab_lapack *la, const bases *b, const float *w, int d, double *a, double *r, double *s, double *u,
                          kvd_error *err)
{
    for (int64_t i = 0; i < (int64_t)b->dh * d; i++)
        a[i] = (double)w[i];
    int rc = lab_lapack_r(la, d, b->dh, a, r, err);
    return rc ? rc : lab_lapack_right_vectors(la, b->k, b->dh, r, s, u, err);
}

static int decompose_layer(const lab *l, const lab_lapack *la, bases *b, int layer, float *w, double *a, double *r, kvd_error *err)
{
    static const kvd_lab_matrix matrices[] = {KVD_LAB_WK, KVD_LAB_WV};
    int rc = 0;
    for (int i = 0; i < 2; i++) {
        int64_t rows, d;
        rc = rc ? rc : kvd_lab_get_matrix(l->m, layer, matrices[i], &rows, &d, w, b->bias[i] + (int64_t)layer * b->n_heads * b->dh, err);
        for (int64_t g = 0; !rc && g < b->n_heads; g++) {
            int64_t at = layer * b->n_heads + g;
            rc = decompose_head(la, b, w + g * b->dh * d, (int)d, a, r, b->s[i] + at * b->k, b->u[i] + at * b->k * b->dh, err);
        }
    }
    return rc;
}

static int make_bases(const lab *l, bases *b, kvd_error *err)
{
    const kvd_model_info *info = &l->info;
    int64_t d = info->d_model, dh = info->d_head, heads = info->n_layers * info->n_kv_heads;
    *b = (bases){.n_layers = (int)info->n_layers, .n_heads = (int)info->n_kv_heads, .dh = (int)dh, .k = (int)(d < dh ? d : dh)};
    lab_lapack *la = NULL;
    int rc = lab_lapack_open(&la, err);
    if (rc)
        return rc;
    float *w = lab_alloc(info->n_kv_heads * dh * d, sizeof *w, err);
    double *a = lab_alloc(dh * d, sizeof *a, err), *r = lab_alloc(dh * b->k, sizeof *r, err);
    rc = w && a && r ? 0 : KVD_E_NOMEM;
    for (int i = 0; !rc && i < 2; i++) {
        b->u[i] = lab_alloc(heads * b->k * dh, sizeof(double), err);
        b->s[i] = lab_alloc(heads * b->k, sizeof(double), err);
        b->bias[i] = lab_alloc(heads * dh, sizeof(float), err);
        rc = b->u[i] && b->s[i] && b->bias[i] ? 0 : KVD_E_NOMEM;
    }
    for (int layer = 0; !rc && layer < b->n_layers; layer++) {
        rc = lab_tick(l, "truncate: singular vectors", layer, b->n_layers, err);
        rc = rc ? rc : decompose_layer(l, la, b, layer, w, a, r, err);
    }
    free(w);
    free(a);
    free(r);
    lab_lapack_close(&la);
    return rc;
}

/* Part of the sum of squares that the first r values hold, in %, the mean over the heads
 * of a layer (-1: of all). */
static double energy_kept(const bases *b, int i, int r, int layer)
{
    double sum = 0;
    int64_t from = layer < 0 ? 0 : (int64_t)layer * b->n_heads, to = layer < 0 ? (int64_t)b->n_layers * b->n_heads : from + b->n_heads;
    for (int64_t h = from; h < to; h++) {
        const double *s = b->s[i] + h * b->k;
        double kept = 0, all = 0;
        for (int j = 0; j < b->k; j++) {
            all += s[j] * s[j];
            kept += j < r ? s[j] * s[j] : 0;
        }
        sum += all > 0 ? kept / all : 1;
    }
    return 100 * sum / (double)(to - from);
}

/* ---- the tap -------------------------------------------------------------------- */

static double dot(const double *u, const float *x, const float *bias, int n)
{
    double sum = 0;
    for (int i = 0; i < n; i++)
        sum += u[i] * ((double)x[i] - (double)bias[i]);
    return sum;
}

/* x = U_r U_r^T (x - bias) + bias. u: [k][dh]. */
static void truncate_head(const truncation *t, const double *u, const float *bias, float *x)
{
    int dh = t->b->dh, k = t->b->k, r = t->rank;
    if (r >= k)
        return;
    bool keep = r <= k - r; /* sum what is kept, or take away what is not */
    for (int i = 0; i < dh; i++)
        t->y[i] = keep ? (double)bias[i] : (double)x[i];
    for (int j = keep ? 0 : r; j < (keep ? r : k); j++) {
        const double *v = u + (int64_t)j * dh;
        double c = keep ? dot(v, x, bias, dh) : -dot(v, x, bias, dh);
        for (int i = 0; i < dh; i++)
            t->y[i] += c * v[i];
    }
    for (int i = 0; i < dh; i++)
        x[i] = (float)t->y[i];
}

static void on_projected(void *ctx, int layer, int64_t pos, float *q, float *k, float *v)
{
    const truncation *t = ctx;
    const bases *b = t->b;
    float *rows[] = {k, v};
    (void)pos, (void)q;
    if (t->layer >= 0 && t->layer != layer)
        return;
    for (int i = 0; i < 2; i++)
        for (int64_t g = 0; (t->mask & 1 << i) && g < b->n_heads; g++) {
            int64_t at = (int64_t)layer * b->n_heads + g;
            truncate_head(t, b->u[i] + at * b->k * b->dh, b->bias[i] + at * b->dh, rows[i] + g * b->dh);
        }
}

/* ---- runs ----------------------------------------------------------------------- */

typedef struct {
    const lab *l;
    kvd_session *s;
    const int32_t *prompt;
    int64_t n_prompt;
    lab_trace full;  /* the exact run */
    int32_t *tokens; /* [n]: of the run now */
    int32_t *forced; /* [n_prompt + n - 1]: the prompt and the exact run's tokens */
    double kl;       /* sum over the run's steps */
} rig;

/* Sums over prompts. */
typedef struct {
    double match, same_until, kl_forced, kl_free;
    bool exact; /* no bit of any logits was different */
} score;

static void add_kl(rig *g, int64_t t, const float *logits)
{
    g->kl += lab_kl_bits(g->full.logits + t * g->full.n_vocab, logits, g->full.n_vocab);
}

static int on_free_step(void *ctx, int64_t t, const float *logits, int32_t token, kvd_error *err)
{
    rig *g = ctx;
    (void)err;
    g->tokens[t] = token;
    add_kl(g, t, logits);
    return 0;
}

typedef struct {
    rig *g;
    bool same;
} forced_run;

static int on_forced_row(void *ctx, int64_t pos, const float *logits)
{
    forced_run *f = ctx;
    int64_t t = pos - (f->g->n_prompt - 1);
    add_kl(f->g, t, logits);
    f->same &= lab_trace_same(&f->g->full, t, logits);
    return 0;
}

/* The mean divergence on the exact run's text, in one pass. */
static int run_forced(rig *g, truncation *t, double *kl, bool *same, kvd_error *err)
{
    int64_t n = g->full.n;
    forced_run f = {g, true};
    kvd_lab_set_taps(g->s, &(kvd_lab_taps){.ctx = t, .projected = on_projected});
    g->kl = 0;
    int rc = kvd_session_rewind(g->s, 0, err);
    rc = rc ? rc : kvd_session_feed_all(g->s, g->forced, g->n_prompt + n - 1, n, on_forced_row, &f, err);
    kvd_lab_set_taps(g->s, NULL);
    *kl = g->kl / (double)n;
    *same = f.same;
    return rc;
}

static int run_free(rig *g, truncation *t, double *kl, kvd_error *err)
{
    kvd_lab_set_taps(g->s, &(kvd_lab_taps){.ctx = t, .projected = on_projected});
    g->kl = 0;
    int rc = kvd_session_rewind(g->s, 0, err);
    rc = rc ? rc : lab_decode(g->l, g->s, g->prompt, g->n_prompt, NULL, g->full.n, on_free_step, g, err);
    kvd_lab_set_taps(g->s, NULL);
    *kl = g->kl / (double)g->full.n;
    return rc;
}

/* Both runs of one truncation after one prompt, added to *sc. */
static int measure(rig *g, truncation *t, score *sc, kvd_error *err)
{
    double forced, free_kl;
    bool same;
    int rc = run_forced(g, t, &forced, &same, err);
    rc = rc ? rc : run_free(g, t, &free_kl, err);
    if (rc)
        return rc;
    sc->kl_forced += forced;
    sc->kl_free += free_kl;
    sc->exact &= same;
    sc->match += lab_match(g->full.tokens, g->tokens, g->full.n);
    sc->same_until += (double)lab_first_difference(g->full.tokens, g->tokens, g->full.n);
    return 0;
}

static int exact_run(rig *g, kvd_error *err)
{
    int rc = kvd_session_rewind(g->s, 0, err);
    g->full.begun = lab_seconds();
    rc = rc ? rc : lab_decode(g->l, g->s, g->prompt, g->n_prompt, NULL, g->full.n, lab_trace_step, &g->full, err);
    memcpy(g->forced, g->prompt, (size_t)g->n_prompt * sizeof *g->forced);
    memcpy(g->forced + g->n_prompt, g->full.tokens, (size_t)(g->full.n - 1) * sizeof *g->forced);
    return rc;
}

/* ---- the experiment -------------------------------------------------------------- */

typedef struct {
    int n_ranks, ranks[N_PARTS];
    int64_t n_prompts, n_prompt, n_new;
    score scores[N_KINDS][N_PARTS];
    int layer_rank;                       /* of the runs that cut one layer alone */
    double (*layer_kl)[2];                /* [n_layers]: of K and V, after the first prompt */
    int64_t done, total;                  /* runs */
} plan;

/* Ranks are sixteenths of d_head, each once (heads may be small). */
static plan make_plan(const lab *l)
{
    plan p = {.n_prompts = l->quick ? 1 : N_PROMPTS, .n_new = l->n_new > 0 ? l->n_new : l->quick ? QUICK_NEW : N_NEW};
    int64_t context = l->info.trained_context_tokens;
    p.n_new = p.n_new < context / 2 ? p.n_new : context / 2;
    p.n_prompt = PROMPT_TOKENS < context - p.n_new ? PROMPT_TOKENS : context - p.n_new;
    for (int i = 0; i < N_PARTS; i++) {
        int r = (int)(l->info.d_head * sixteenths[i] / 16);
        if (r > (p.n_ranks ? p.ranks[p.n_ranks - 1] : 0))
            p.ranks[p.n_ranks++] = r;
    }
    for (int k = 0; k < N_KINDS; k++)
        for (int i = 0; i < p.n_ranks; i++)
            p.scores[k][i].exact = true;
    p.layer_rank = p.n_ranks > 1 ? p.ranks[p.n_ranks - 2] : p.ranks[0];
    p.total = p.n_prompts * N_KINDS * p.n_ranks + 2 * l->info.n_layers;
    return p;
}

/* One layer alone, at the highest rank below the full one: which layers does the
 * damage come from? */
static int run_layers(rig *g, plan *p, truncation *t, kvd_error *err)
{
    int rc = 0;
    t->rank = p->layer_rank;
    for (int i = 0; !rc && i < 2 * g->l->info.n_layers; i++) {
        bool same;
        t->layer = i / 2;
        t->mask = 1 << i % 2;
        rc = lab_tick(g->l, "truncate: one layer alone", p->done++, p->total, err);
        rc = rc ? rc : run_forced(g, t, &p->layer_kl[i / 2][i % 2], &same, err);
    }
    return rc;
}

static int run_prompt(rig *g, plan *p, truncation *t, int64_t index, kvd_error *err)
{
    int rc = exact_run(g, err);
    for (int k = 0; k < N_KINDS; k++)
        for (int i = 0; !rc && i < p->n_ranks; i++) {
            t->layer = -1;
            t->mask = kinds[k].mask;
            t->rank = p->ranks[i];
            rc = lab_tick(g->l, "truncate: ranks and prompts", p->done++, p->total, err);
            rc = rc ? rc : measure(g, t, &p->scores[k][i], err);
        }
    return rc || index > 0 ? rc : run_layers(g, p, t, err);
}

static int run_all(const lab *l, plan *p, const bases *b, const int32_t *prompts, kvd_error *err)
{
    rig g = {.l = l, .n_prompt = p->n_prompt};
    truncation t = {.b = b, .y = lab_alloc(b->dh, sizeof(double), err)};
    kvd_session_options so = l->so;
    so.policy = KVD_POLICY_KV_DIRECT;
    so.kv_tokens = -1;
    so.evict_to = KVD_EVICT_RECOMPUTE;
    so.spill_dir = NULL;
    g.tokens = lab_alloc(p->n_new, sizeof *g.tokens, err);
    g.forced = lab_alloc(p->n_prompt + p->n_new, sizeof *g.forced, err);
    int rc = t.y && g.tokens && g.forced ? lab_trace_make(&g.full, p->n_new, l->info.n_vocab, LAB_KEEP_LOGITS, err) : KVD_E_NOMEM;
    rc = rc ? rc : kvd_session_create(&g.s, l->m, &so, err);
    if (!rc)
        lab_watch(l, g.s);
    for (int64_t i = 0; !rc && i < p->n_prompts; i++) {
        g.prompt = prompts + i * p->n_prompt;
        rc = run_prompt(&g, p, &t, i, err);
    }
    kvd_session_free(&g.s);
    lab_trace_free(&g.full);
    free(g.tokens);
    free(g.forced);
    free(t.y);
    return rc;
}

/* ---- results --------------------------------------------------------------------- */

static void result_table(const lab *l, json_t *result, const plan *p, const bases *b)
{
    static const lab_column columns[] = {
        {"what", "truncated", 0}, {"rank", "rank", 0}, {"part", "% of d_head", 1}, {"energy_k", "energy of W_k, %", 2},
        {"energy_v", "energy of W_v, %", 2}, {"match", "token match, %", 1}, {"same_until", "first different token (mean)", 1},
        {"kl_forced", "KL teacher-forced, bits", 4}, {"kl_free", "KL free, bits", 4}, {"exact", "logits the same bits", 0}, {NULL, NULL, 0}};
    json_t *t = lab_table(result, "truncate", "Token match and KL against the rank of K and V projections", columns);
    double n = (double)p->n_prompts;
    for (int k = 0; k < N_KINDS; k++)
        for (int i = 0; i < p->n_ranks; i++) {
            const score *sc = &p->scores[k][i];
            int r = p->ranks[i];
            if (r == l->info.d_head && (!sc->exact || sc->match < n))
                lab_check_failed(result, "%s at full rank is not exactly the run without truncation.", kinds[k].name);
            lab_row(t, json_pack("[s, i, f, f, f, f, f, o, o, b]", kinds[k].name, r, 100.0 * r / (double)l->info.d_head,
                                 kinds[k].mask & ONLY_K ? energy_kept(b, K, r, -1) : 100.0,
                                 kinds[k].mask & ONLY_V ? energy_kept(b, V, r, -1) : 100.0, 100 * sc->match / n, sc->same_until / n,
                                 lab_number(sc->kl_forced / n), lab_number(sc->kl_free / n), sc->exact));
        }
    lab_plot(result, "match", "Token match with the exact run, %", "lines", "truncate", "rank", "match", "what", NULL, 0);
    lab_plot(result, "kl-forced", "KL to the exact run on its text, bits", "lines", "truncate", "rank", "kl_forced", "what", NULL, 0);
    lab_plot(result, "kl-free", "KL, each on its own text, bits", "lines", "truncate", "rank", "kl_free", "what", NULL, 0);
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* values: [n], sorted here. */
static double median(double *values, int64_t n)
{
    qsort(values, (size_t)n, sizeof *values, ascending);
    return 0.5 * (values[(n - 1) / 2] + values[n / 2]);
}

static int layers_table(const lab *l, json_t *result, const plan *p, const bases *b, kvd_error *err)
{
    static const lab_column columns[] = {{"layer", "layer", 0}, {"local", "sliding window", 0}, {"energy_k", "energy of W_k, %", 2},
                                         {"energy_v", "energy of W_v, %", 2}, {"kl_k", "K cut: KL teacher-forced, bits", 4},
                                         {"kl_v", "V cut: KL teacher-forced, bits", 4}, {NULL, NULL, 0}};
    char title[96];
    int64_t n = l->info.n_layers, worst = 0;
    double *v = lab_alloc(n, sizeof *v, err);
    if (!v)
        return KVD_E_NOMEM;
    snprintf(title, sizeof title, "One layer alone cut to rank %d, after the first prompt", p->layer_rank);
    json_t *t = lab_table(result, "layers", title, columns);
    for (int64_t i = 0; i < n; i++) {
        lab_row(t, json_pack("[I, b, f, f, o, o]", (json_int_t)i, kvd_model_layer_is_local(l->m, (int)i),
                             energy_kept(b, K, p->layer_rank, (int)i), energy_kept(b, V, p->layer_rank, (int)i),
                             lab_number(p->layer_kl[i][K]), lab_number(p->layer_kl[i][V])));
        v[i] = p->layer_kl[i][V];
        worst = v[i] > v[worst] ? i : worst;
    }
    lab_plot(result, "layers", "V of one layer cut: KL to the exact run, bits", "bars", "layers", "layer", "kl_v", NULL, NULL, 0);
    double most = v[worst], middle = median(v, n);
    lab_note(result, "With V of one layer cut to rank %d of %lld, layer %lld does the most harm: %.3g bits, though its W_v keeps %.1f %% of its "
                     "energy; the median layer does %.2g.%s", p->layer_rank, (long long)l->info.d_head, (long long)worst, most,
             energy_kept(b, V, p->layer_rank, (int)worst), middle,
             most > 10 * middle ? " Energy does not tell which directions a model lives by." : "");
    free(v);
    return 0;
}

int lab_truncate(const lab *l, json_t *result, kvd_error *err)
{
    plan p = make_plan(l);
    bases b;
    int32_t *prompts = NULL;
    int rc = make_bases(l, &b, err);
    p.layer_kl = lab_alloc(l->info.n_layers, sizeof *p.layer_kl, err);
    if (!rc && !p.layer_kl)
        rc = KVD_E_NOMEM;
    rc = rc ? rc : lab_prompts(l, result, p.n_prompts, p.n_prompt, &prompts, err);
    rc = rc ? rc : run_all(l, &p, &b, prompts, err);
    if (!rc)
        result_table(l, result, &p, &b);
    rc = rc ? rc : layers_table(l, result, &p, &b, err);
    if (!rc) {
        lab_setting(result, "new_tokens", json_integer(p.n_new));
        lab_note(result, "W_k and W_v of each KV head are cut to rank r by singular value decomposition, each by itself; queries are as they were.");
        if (!strcmp(l->info.architecture, "gemma3") || !strcmp(l->info.architecture, "qwen3"))
            lab_note(result, "QK-norm follows the projection and restores the length of a truncated K.");
        lab_note(result, "KL is D(exact || truncated), the mean over new tokens and prompts. Teacher-forced: both predict the exact run's "
                         "next token. Free: each after its own text, so that once they have parted it compares two texts.");
    }
    free(p.layer_kl);
    free(prompts);
    free_bases(&b);
    return rc;
}
