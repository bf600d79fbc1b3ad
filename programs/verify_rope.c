/* kvd verify --rope window-relative: the paper's Table 2 row for sliding-window
 * layers (arXiv 2603.19664, Eq. 16), beside ours.
 *
 * The paper's cache rotates the keys of sliding layers by their place in the
 * window, and its reconstruction by their absolute position: K then differs by
 * (R_j - R_{j-w}) of the unrotated key, V does not. We rotate by absolute positions
 * on every layer and mask, so both are equal. Here the residuals of positions past
 * the window are rebuilt both ways. A showing, not a check: only our own way counts
 * as match or mismatch. */
#include <stdlib.h>
#include <string.h>

#include "verify.h"

enum { TAIL = 16 }; /* positions looked at, the last ones */

typedef struct {
    int64_t T, d, n_kv, n_layers;
    float *h, *k, *v; /* [n_layers][TAIL][d], [n_layers][TAIL][n_kv] */
} tail;

static int64_t row_of(const tail *t, int layer, int64_t pos)
{
    int64_t i = pos - (t->T - TAIL);
    return i < 0 || layer >= t->n_layers ? -1 : layer * TAIL + i;
}

static void on_residual(void *ctx, int layer, int64_t pos, float *h)
{
    tail *t = ctx;
    int64_t row = row_of(t, layer, pos);
    if (row >= 0)
        memcpy(t->h + row * t->d, h, (size_t)t->d * sizeof *h);
}

static void on_read(void *ctx, int layer, int64_t pos, const float *k, const float *v)
{
    tail *t = ctx;
    int64_t row = row_of(t, layer, pos);
    if (row < 0)
        return;
    memcpy(t->k + row * t->n_kv, k, (size_t)t->n_kv * sizeof *k);
    memcpy(t->v + row * t->n_kv, v, (size_t)t->n_kv * sizeof *v);
}

typedef struct {
    double dk, dv;
} errors;

/* Errors over the layers of one kind, rotated as at pos - shift. */
static int rebuild(verify *v, kvd_session *s, const tail *t, bool local, int64_t shift, errors *e, kvd_error *err)
{
    float *k = malloc((size_t)(2 * t->n_kv) * sizeof *k);
    int rc = k ? 0 : KVD_E_NOMEM;
    *e = (errors){0};
    for (int l = 0; !rc && l < t->n_layers; l++)
        for (int64_t pos = t->T - TAIL; kvd_model_layer_is_local(v->m, l) == local && !rc && pos < t->T; pos++) {
            int64_t row = row_of(t, l, pos);
            rc = kvd_lab_reconstruct(s, l, pos - shift, t->h + row * t->d, k, k + t->n_kv, err);
            double dk = verify_largest(k, t->k + row * t->n_kv, t->n_kv), dv = verify_largest(k + t->n_kv, t->v + row * t->n_kv, t->n_kv);
            e->dk = dk > e->dk ? dk : e->dk;
            e->dv = dv > e->dv ? dv : e->dv;
        }
    free(k);
    return rc;
}

static int show(verify *v, kvd_session *s, const tail *t, kvd_error *err)
{
    static const char *const names[] = {"global, absolute", "sliding, absolute (ours)", "sliding, window-relative"};
    json_t *rows = json_array();
    int rc = 0;
    verify_say(v, "\nRotation of sliding-window layers (paper: Table 2, Eq. 16), %lld positions past a window of %lld\n", (long long)TAIL,
               (long long)v->info.window_tokens);
    verify_say(v, "   %-28s %12s %12s\n", "layers, rotation", "max |dK|", "max |dV|");
    for (int i = 0; !rc && i < 3; i++) {
        errors e;
        rc = rebuild(v, s, t, i > 0, i == 2 ? v->info.window_tokens : 0, &e, err);
        verify_say(v, "   %-28s %12g %12g\n", names[i], e.dk, e.dv);
        json_array_append_new(rows, json_pack("{s:s, s:f, s:f}", "layers", names[i], "max_dk", e.dk, "max_dv", e.dv));
        bool equal = e.dk == 0 && e.dv == 0;
        if (i < 2)
            *(equal ? &v->matches : &v->mismatches) += 1;
    }
    json_object_set_new(v->out, "rope", rows);
    return rc;
}

int verify_rope(verify *v)
{
    kvd_session_options so;
    kvd_session *s = NULL;
    kvd_error err = {0};
    tail t = {.T = v->info.window_tokens + 4 * TAIL, .d = v->info.d_model, .n_kv = v->info.n_kv_heads * v->info.d_head,
              .n_layers = v->info.n_layers};
    if (!v->info.window_tokens || t.T > v->info.trained_context_tokens)
        return cli_fail(EXIT_USAGE, "--rope window-relative needs a model with sliding-window layers, and a context beyond the window");
    size_t rows = (size_t)(t.n_layers * TAIL);
    int32_t *ids = NULL;
    t.h = malloc(rows * (size_t)t.d * sizeof *t.h);
    t.k = malloc(rows * (size_t)t.n_kv * sizeof *t.k);
    t.v = malloc(rows * (size_t)t.n_kv * sizeof *t.v);
    int code = t.h && t.k && t.v ? verify_prompt(v->m, t.T, &ids) : cli_fail(EXIT_RESOURCES, "out of memory");
    kvd_session_options_defaults(&so);
    so.kv_type = KVD_TYPE_F32;
    if (!code) {
        kvd_lab_taps taps = {.ctx = &t, .residual = on_residual, .kv_read = on_read};
        int rc = kvd_session_create(&s, v->m, &so, &err);
        if (!rc) {
            kvd_session_set_progress(s, verify_on_pass, v);
            kvd_lab_set_taps(s, &taps);
            rc = kvd_session_feed(s, ids, t.T, NULL, &err);
        }
        rc = rc ? rc : show(v, s, &t, &err);
        code = rc ? verify_error(rc, &err) : 0;
    }
    kvd_session_free(&s);
    free(ids);
    free(t.h);
    free(t.k);
    free(t.v);
    return code;
}
