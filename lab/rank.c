/* Effective rank of each head's query-key form (5.7, Fig. 5): the smallest r such that
 * the first r singular values hold 90 % of the sum of squares.
 *
 * The paper writes M = W_q W_k^T with the residual as a row vector on the left; for the
 * scores x_i M x_j that is a d x d matrix of rank d_head at most. In the convention of
 * GGUF (y = W x, W [d_head][d]) it is
 *
 *   bilinear form   W_q^T W_k    d x d             scores = x_i^T (W_q^T W_k) x_j
 *   head product    W_q W_k^T    d_head x d_head   what the same letters give when the
 *                                                  arrays are multiplied as they lie
 *
 * The paper's means come out of the second. It compares how the two maps lie towards
 * each other, coordinate by coordinate, and says nothing about attention scores; both
 * are computed and named here.
 *
 * The d x d product is never formed. With W_q^T = Q_q R_q and W_k^T = Q_k R_k its
 * singular values are those of R_q R_k^T, which is d_head x d_head.
 *
 * Neither form knows of RoPE (it turns pairs by the distance between i and j), of
 * biases, of the norm's weights before or of QK-norm after: this is the paper's
 * definition, on the file's dequantised weights. */
#define _GNU_SOURCE
#include "lab/lapack.h"
#include "lab/runs.h"

#include <stdlib.h>
#include <string.h>

static const double part_of_energy = 0.9;
enum { NEAR_ONE = 10, BINS = 16 };

/* A query head. */
typedef struct {
    int layer, head, kv_head, group; /* query heads that share the KV head */
    bool local;
    int rank[2]; /* of FORM_* */
} head_rank;

enum { FORM_BILINEAR, FORM_PRODUCT, N_FORMS };
static const char *const form_names[] = {"W_q^T W_k (d x d)", "W_q W_k^T (d_head x d_head)"};

/* Buffers for one layer and one head; d, dh: widths of residual and head; k: min of both. */
typedef struct {
    lab_lapack *la;
    int d, dh, k, group;
    float *wq, *wk;    /* [n_heads][dh][d], [n_kv_heads][dh][d] */
    double *a;         /* [dh][d]: a head's rows, as LAPACK sees it d x dh */
    double *kt;        /* [d][dh]: the KV head's, turned */
    double *rq, *rk;   /* [dh][k]: columns of R */
    double *m, *s;     /* [dh][dh], [dh] */
} work;

static void free_work(work *w)
{
    lab_lapack_close(&w->la);
    void *all[] = {w->wq, w->wk, w->a, w->kt, w->rq, w->rk, w->m, w->s};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        free(all[i]);
}

static int make_work(work *w, const kvd_model_info *info, kvd_error *err)
{
    int64_t d = info->d_model, dh = info->d_head;
    *w = (work){.d = (int)d, .dh = (int)dh, .k = (int)(d < dh ? d : dh), .group = (int)(info->n_heads / info->n_kv_heads)};
    int rc = lab_lapack_open(&w->la, err);
    if (rc)
        return rc;
    w->wq = lab_alloc(info->n_heads * dh * d, sizeof *w->wq, err);
    w->wk = lab_alloc(info->n_kv_heads * dh * d, sizeof *w->wk, err);
    w->a = lab_alloc(dh * d, sizeof *w->a, err);
    w->kt = lab_alloc(dh * d, sizeof *w->kt, err);
    w->rq = lab_alloc(dh * w->k, sizeof *w->rq, err);
    w->rk = lab_alloc(dh * w->k, sizeof *w->rk, err);
    w->m = lab_alloc(dh * dh, sizeof *w->m, err);
    w->s = lab_alloc(dh, sizeof *w->s, err);
    if (w->wq && w->wk && w->a && w->kt && w->rq && w->rk && w->m && w->s)
        return 0;
    free_work(w);
    return KVD_E_NOMEM;
}

static void widen(const float *src, double *dst, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        dst[i] = (double)src[i];
}

/* m = R_q R_k^T, k x k; both are zero below the diagonal. */
static void multiply_triangles(work *w)
{
    int64_t k = w->k;
    memset(w->m, 0, (size_t)(k * k) * sizeof *w->m);
    for (int64_t c = 0; c < w->dh; c++) {
        int64_t n = c + 1 < k ? c + 1 : k; /* rows of column c that are not zero */
        for (int64_t j = 0; j < n; j++) {
            double x = w->rk[j + c * k];
            for (int64_t i = 0; i < n; i++)
                w->m[i + j * k] += w->rq[i + c * k] * x;
        }
    }
}

/* m = W_q W_k^T, dh x dh. */
static void multiply_rows(work *w)
{
    int64_t d = w->d, dh = w->dh;
    memset(w->m, 0, (size_t)(dh * dh) * sizeof *w->m);
    for (int64_t i = 0; i < dh; i++)
        for (int64_t c = 0; c < d; c++) {
            double x = w->a[i * d + c];
            const double *row = w->kt + c * dh;
            for (int64_t j = 0; j < dh; j++)
                w->m[i * dh + j] += x * row[j];
        }
}

/* R of a KV head's matrix, and the matrix turned. */
static int take_kv_head(work *w, int g, kvd_error *err)
{
    int64_t d = w->d, dh = w->dh;
    widen(w->wk + g * dh * d, w->a, dh * d);
    for (int64_t i = 0; i < dh; i++)
        for (int64_t c = 0; c < d; c++)
            w->kt[c * dh + i] = w->a[i * d + c];
    return lab_lapack_r(w->la, w->d, w->dh, w->a, w->rk, err);
}

static int rank_head(work *w, head_rank *h, kvd_error *err)
{
    int64_t size = (int64_t)w->dh * w->d;
    widen(w->wq + h->head * size, w->a, size);
    multiply_rows(w);
    int rc = lab_lapack_singular_values(w->la, w->dh, w->dh, w->m, w->s, err);
    if (rc)
        return rc;
    h->rank[FORM_PRODUCT] = lab_effective_rank(w->s, w->dh, part_of_energy);
    if ((rc = lab_lapack_r(w->la, w->d, w->dh, w->a, w->rq, err)))
        return rc;
    multiply_triangles(w);
    if ((rc = lab_lapack_singular_values(w->la, w->k, w->k, w->m, w->s, err)))
        return rc;
    h->rank[FORM_BILINEAR] = lab_effective_rank(w->s, w->k, part_of_energy);
    return 0;
}

/* heads: [n_layers][n_heads] */
static int rank_layer(const lab *l, work *w, int layer, head_rank *heads, kvd_error *err)
{
    int64_t rows, columns;
    int rc = kvd_lab_get_matrix(l->m, layer, KVD_LAB_WQ, &rows, &columns, w->wq, NULL, err);
    rc = rc ? rc : kvd_lab_get_matrix(l->m, layer, KVD_LAB_WK, &rows, &columns, w->wk, NULL, err);
    for (int i = 0; !rc && i < l->info.n_heads; i++) {
        head_rank *h = &heads[layer * l->info.n_heads + i];
        *h = (head_rank){.layer = layer, .head = i, .kv_head = i / w->group, .group = w->group,
                         .local = kvd_model_layer_is_local(l->m, layer)};
        if (i % w->group == 0 && (rc = take_kv_head(w, h->kv_head, err)))
            break;
        rc = rank_head(w, h, err);
    }
    return rc;
}

/* ---- tables ---------------------------------------------------------------------- */

typedef struct {
    int64_t n, at_most_10, ones;
    double mean, median;
    int least, greatest;
} summary;

/* Which heads a line of the summary is about. The paper counts a head for each KV head
 * (its "136 heads" of Gemma are 34 layers of 4); taking the first query head of each
 * group is our guess at which. */
typedef enum { ALL_HEADS, ONE_PER_GROUP, GLOBAL_LAYERS, LOCAL_LAYERS } which_heads;
enum { N_WHICH = LOCAL_LAYERS + 1 };

static bool is_of(const head_rank *h, which_heads which)
{
    switch (which) {
    case ALL_HEADS: return true;
    case ONE_PER_GROUP: return h->head % h->group == 0;
    case GLOBAL_LAYERS: return !h->local;
    case LOCAL_LAYERS: return h->local;
    }
    return false;
}

static int ascending(const void *a, const void *b) { return *(const int *)a - *(const int *)b; }

/* ranks: [n], room to sort in. */
static summary summarise(const head_rank *heads, int64_t n, int form, which_heads which, int *ranks)
{
    summary s = {0};
    for (int64_t i = 0; i < n; i++)
        if (is_of(&heads[i], which))
            ranks[s.n++] = heads[i].rank[form];
    if (!s.n)
        return s;
    qsort(ranks, (size_t)s.n, sizeof *ranks, ascending);
    double sum = 0;
    for (int64_t i = 0; i < s.n; i++) {
        sum += ranks[i];
        s.at_most_10 += ranks[i] <= NEAR_ONE;
        s.ones += ranks[i] == 1;
    }
    s.mean = sum / (double)s.n;
    s.median = 0.5 * (ranks[(s.n - 1) / 2] + ranks[s.n / 2]);
    s.least = ranks[0];
    s.greatest = ranks[s.n - 1];
    return s;
}

static void summary_table(const lab *l, json_t *result, const head_rank *heads, int64_t n, int *ranks, summary sums[N_FORMS][N_WHICH])
{
    static const lab_column columns[] = {
        {"form", "form", 0}, {"which", "of", 0}, {"heads", "query heads", 0}, {"mean", "mean rank", 1}, {"median", "median", 1},
        {"least", "least", 0}, {"greatest", "greatest", 0}, {"part", "mean, % of d_head", 1}, {"at_most_10", "heads of rank <= 10", 0},
        {"ones", "heads of rank 1", 0}, {NULL, NULL, 0}};
    static const char *const names[] = {"all", "one per KV head", "global layers", "local layers"};
    json_t *t = lab_table(result, "summary", "Effective rank at 90 % of the energy", columns);
    for (int form = 0; form < N_FORMS; form++)
        for (int which = 0; which < N_WHICH; which++) {
            summary s = sums[form][which] = summarise(heads, n, form, (which_heads)which, ranks);
            if (s.n && (which == ALL_HEADS || s.n < n))
                lab_row(t, json_pack("[s, s, I, f, f, i, i, f, I, I]", form_names[form], names[which], (json_int_t)s.n, s.mean, s.median,
                                     s.least, s.greatest, 100 * s.mean / (double)l->info.d_head, (json_int_t)s.at_most_10, (json_int_t)s.ones));
        }
}

static void heads_table(const lab *l, json_t *result, const head_rank *heads, int64_t n)
{
    static const lab_column columns[] = {
        {"layer", "layer", 0}, {"head", "query head", 0}, {"kv_head", "KV head", 0}, {"local", "sliding window", 0},
        {"rank_bilinear", "rank, W_q^T W_k", 0}, {"rank_product", "rank, W_q W_k^T", 0},
        {"part_bilinear", "% of d_head, W_q^T W_k", 1}, {"part_product", "% of d_head, W_q W_k^T", 1}, {NULL, NULL, 0}};
    json_t *t = lab_table(result, "heads", "Effective rank of each query head", columns);
    double percent = 100 / (double)l->info.d_head;
    for (int64_t i = 0; i < n; i++) {
        const head_rank *h = &heads[i];
        lab_row(t, json_pack("[i, i, i, b, i, i, f, f]", h->layer, h->head, h->kv_head, h->local, h->rank[0], h->rank[1],
                             percent * h->rank[0], percent * h->rank[1]));
    }
    lab_plot(result, "heat-bilinear", "Effective rank of W_q^T W_k, % of d_head", "heat", "heads", "head", "layer", NULL, "part_bilinear", 0);
    lab_plot(result, "heat-product", "Effective rank of W_q W_k^T, % of d_head", "heat", "heads", "head", "layer", NULL, "part_product", 0);
}

/* Ranks in sixteenths of d_head, named by their upper end. */
static void histogram(const lab *l, json_t *result, const head_rank *heads, int64_t n)
{
    static const lab_column columns[] = {
        {"part", "rank up to, % of d_head", 1}, {"form", "form", 0}, {"heads", "query heads", 0}, {NULL, NULL, 0}};
    json_t *t = lab_table(result, "histogram", "How many heads have which rank", columns);
    for (int form = 0; form < N_FORMS; form++) {
        int64_t counts[BINS] = {0};
        for (int64_t i = 0; i < n; i++) {
            int64_t bin = ((int64_t)heads[i].rank[form] * BINS - 1) / l->info.d_head;
            counts[heads[i].rank[form] ? bin : 0]++;
        }
        for (int b = 0; b < BINS; b++)
            lab_row(t, json_pack("[f, s, I]", 100.0 * (b + 1) / BINS, form_names[form], (json_int_t)counts[b]));
    }
    lab_plot(result, "histogram", "Heads by effective rank", "bars", "histogram", "part", "heads", "form", NULL, 0);
}

static void report(const lab *l, json_t *result, const head_rank *heads, int64_t n, int *ranks)
{
    summary sums[N_FORMS][N_WHICH];
    summary_table(l, result, heads, n, ranks, sums);
    heads_table(l, result, heads, n);
    histogram(l, result, heads, n);
    lab_setting(result, "energy", json_real(part_of_energy));
    lab_setting(result, "weights", json_string("of the file, dequantised; singular values in f64"));
    lab_note(result, "W_q^T W_k (d x d) is the bilinear form of the paper's equations: scores are x_i^T W_q^T W_k x_j. W_q W_k^T "
                     "(d_head x d_head) is the product that the paper's numbers come from; no attention score is made of it.");
    lab_note(result, "Singular values of the d x d form are those of R_q R_k^T, from QR decompositions of W_q^T and W_k^T.");
    lab_note(result, "As in the paper, neither form includes RoPE, biases, the norm's weights or QK-norm.");
    if (l->info.n_heads > l->info.n_kv_heads)
        lab_note(result, "The paper counts one head per KV head; here that is the first query head of each group.");
}

int lab_rank(const lab *l, json_t *result, kvd_error *err)
{
    work w;
    int rc = make_work(&w, &l->info, err);
    if (rc)
        return rc;
    int64_t n = l->info.n_layers * l->info.n_heads;
    head_rank *heads = lab_alloc(n, sizeof *heads, err);
    int *ranks = lab_alloc(n, sizeof *ranks, err);
    rc = heads && ranks ? 0 : KVD_E_NOMEM;
    for (int layer = 0; !rc && layer < l->info.n_layers; layer++) {
        rc = lab_tick(l, "rank: layers", layer, l->info.n_layers, err);
        rc = rc ? rc : rank_layer(l, &w, layer, heads, err);
    }
    if (!rc)
        report(l, result, heads, n, ranks);
    free(ranks);
    free(heads);
    free_work(&w);
    return rc;
}
