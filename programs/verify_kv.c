/* Part 1 of kvd verify: K and V rebuilt from the residual stream.
 *
 * A pass is watched: the residual h that enters each layer, and the K and V that
 * attention reads there. Then, one position at a time and by themselves, K and V
 * are made from h again (arXiv 2603.19664, Eq. 13-14) and compared. Section 5.1 of
 * the paper does this for five lengths and four number types. Beyond it, all
 * positions are then dropped and rebuilt by a second pass, and h, K and V of that
 * pass must be the bits of the first one.
 *
 * What must be equal is compared as bits; the differences that are printed are for
 * people. "bf16 cast" is the paper's fourth regime: an f32 stream whose checkpoint
 * is rounded to bf16. That loses bits, so it can not be exact; it is here to show
 * by how much, and counts as neither match nor mismatch. */
#include <stdlib.h>
#include <string.h>

#include "verify.h"

enum { STREAM_CAST = 3, N_STREAMS, N_KV = 2, MAX_LENGTHS = 8 };
static const kvd_float_type streams[N_STREAMS] = {KVD_TYPE_F32, KVD_TYPE_F16, KVD_TYPE_BF16, KVD_TYPE_F32};
static const char *const stream_names[N_STREAMS] = {"f32", "f16", "bf16", "bf16 cast"};
static const kvd_float_type kv_types[N_KV] = {KVD_TYPE_F16, KVD_TYPE_F32};

#define CAPTURE_BYTES ((int64_t)256 << 20) /* more layers than this holds are watched in turns */

typedef struct {
    double dk, dv; /* largest |difference| */
} layer_error;

/* One (stream, length, KV type). */
typedef struct {
    layer_error *layers;      /* [n_layers] */
    int64_t n_differ;         /* (layer, position) pairs whose K or V is not the same bits */
    int first_layer;
    int64_t first_pos;        /* of those */
    int64_t n_rebuilt_differ; /* the same for the pass that rebuilt all */
    bool rebuilt;             /* there was one */
    bool numeric;
    char message[256];        /* of the numeric error */
} measure;

/* What the taps record, for layers [first, first + n_layers). */
typedef struct {
    int first, n_layers;
    int64_t T, d, n_kv;
    float *h, *k, *v; /* [n_layers][T][d], [n_layers][T][n_kv] twice */
    bool compare;     /* the second pass: against what is there */
    int64_t n_seen, n_differ;
} capture;

/* ---- watching a pass --------------------------------------------------------------- */

static bool at(const capture *c, int layer, int64_t pos, int64_t *row)
{
    *row = (layer - c->first) * c->T + pos;
    return layer >= c->first && layer < c->first + c->n_layers && pos < c->T;
}

/* Keep x, or compare it with what was kept. */
static bool keep(const capture *c, float *kept, const float *x, int64_t n)
{
    if (c->compare)
        return !memcmp(kept, x, (size_t)n * sizeof *x);
    memcpy(kept, x, (size_t)n * sizeof *x);
    return true;
}

static void on_residual(void *ctx, int layer, int64_t pos, float *h)
{
    capture *c = ctx;
    int64_t row;
    if (at(c, layer, pos, &row))
        c->n_differ += !keep(c, c->h + row * c->d, h, c->d);
}

static void on_read(void *ctx, int layer, int64_t pos, const float *k, const float *v)
{
    capture *c = ctx;
    int64_t row;
    if (!at(c, layer, pos, &row))
        return;
    bool same_k = keep(c, c->k + row * c->n_kv, k, c->n_kv), same_v = keep(c, c->v + row * c->n_kv, v, c->n_kv);
    c->n_differ += !same_k || !same_v;
    c->n_seen++;
}

static void capture_free(capture *c)
{
    free(c->h);
    free(c->k);
    free(c->v);
}

static int capture_make(const verify *v, int64_t T, capture *c)
{
    *c = (capture){.T = T, .d = v->info.d_model, .n_kv = v->info.n_kv_heads * v->info.d_head};
    int64_t layer_bytes = T * (c->d + 2 * c->n_kv) * (int64_t)sizeof(float), most = CAPTURE_BYTES / layer_bytes;
    c->n_layers = (int)(most < 1 ? 1 : most < v->info.n_layers ? most : v->info.n_layers);
    size_t rows = (size_t)(c->n_layers * T) * sizeof(float);
    c->h = malloc(rows * (size_t)c->d);
    c->k = malloc(rows * (size_t)c->n_kv);
    c->v = malloc(rows * (size_t)c->n_kv);
    if (c->h && c->k && c->v)
        return 0;
    capture_free(c);
    return cli_fail(EXIT_RESOURCES, "out of memory: %lld bytes to watch a pass",
                    (long long)(c->n_layers * layer_bytes));
}

/* ---- comparing ------------------------------------------------------------------------ */

double verify_largest(const float *a, const float *b, int64_t n)
{
    double most = 0;
    for (int64_t i = 0; i < n; i++) {
        double d = (double)a[i] - (double)b[i];
        d = d < 0 ? -d : d;
        most = d > most ? d : most;
    }
    return most;
}

/* Round to bf16, to nearest even: what a bf16 checkpoint keeps of an f32 stream. */
static void cast_bf16(float *out, const float *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        uint32_t u;
        memcpy(&u, x + i, sizeof u);
        u = (u + 0x7fff + (u >> 16 & 1)) & 0xffff0000u;
        memcpy(out + i, &u, sizeof u);
    }
}

/* K and V of all that c holds from its residuals; scratch: [d + 2*n_kv]. */
static int compare_rows(kvd_session *s, const capture *c, bool cast, float *scratch, measure *x, kvd_error *err)
{
    float *h = scratch, *k = h + c->d, *v = k + c->n_kv;
    for (int64_t row = 0; row < c->n_layers * c->T; row++) {
        int layer = c->first + (int)(row / c->T);
        int64_t pos = row % c->T;
        const float *residual = c->h + row * c->d, *read_k = c->k + row * c->n_kv, *read_v = c->v + row * c->n_kv;
        if (cli_interrupted())
            return KVD_E_CANCELLED;
        if (cast) {
            cast_bf16(h, residual, c->d);
            residual = h;
        }
        int rc = kvd_lab_reconstruct(s, layer, pos, residual, k, v, err);
        if (rc)
            return rc;
        layer_error *e = &x->layers[layer];
        double dk = verify_largest(k, read_k, c->n_kv), dv = verify_largest(v, read_v, c->n_kv);
        e->dk = dk > e->dk ? dk : e->dk;
        e->dv = dv > e->dv ? dv : e->dv;
        size_t bytes = (size_t)c->n_kv * sizeof *k;
        if (memcmp(k, read_k, bytes) || memcmp(v, read_v, bytes)) {
            if (!x->n_differ++) {
                x->first_layer = layer;
                x->first_pos = pos;
            }
        }
    }
    return 0;
}

/* Drop all K and V; one pass then makes T rows again, T - 1 of them as evicted
 * ones. They must be what the first pass saw. */
static int compare_rebuilt(verify *v, kvd_session *s, capture *c, measure *x, kvd_error *err)
{
    c->compare = true;
    c->n_seen = c->n_differ = 0;
    kvd_session_park(s);
    int rc = kvd_session_rewind(s, c->T - 1, err);
    if (!rc)
        rc = kvd_session_feed(s, v->ids + c->T - 1, 1, NULL, err);
    x->rebuilt = true;
    x->n_rebuilt_differ += c->n_differ + (rc ? 0 : c->n_layers * c->T - c->n_seen);
    c->compare = false;
    return rc;
}

static void measure_numeric(measure *x, const kvd_error *err)
{
    x->numeric = true;
    memcpy(x->message, err->message, sizeof x->message);
}

/* A session of its own, watched; exact and, for an f32 stream, cast. */
static int measure_session(verify *v, kvd_session *s, capture *c, measure *exact, measure *cast, kvd_error *err)
{
    int rc = 0;
    float *scratch = malloc((size_t)(c->d + 2 * c->n_kv) * sizeof *scratch);
    if (!scratch)
        return KVD_E_NOMEM;
    kvd_lab_set_taps(s, &(kvd_lab_taps){.ctx = c, .residual = on_residual, .kv_read = on_read});
    int step = c->n_layers;
    for (c->first = 0; !rc && c->first < v->info.n_layers; c->first += step) {
        if (v->info.n_layers - c->first < c->n_layers)
            c->n_layers = (int)v->info.n_layers - c->first;
        rc = kvd_session_rewind(s, 0, err);
        if (!rc)
            rc = kvd_session_feed(s, v->ids, c->T, NULL, err);
        if (!rc)
            rc = compare_rows(s, c, false, scratch, exact, err);
        if (!rc && cast) {
            rc = compare_rows(s, c, true, scratch, cast, err);
            if (rc == KVD_E_NUMERIC) { /* of the cast only */
                measure_numeric(cast, err);
                rc = 0;
            }
        }
        if (!rc)
            rc = compare_rebuilt(v, s, c, exact, err);
    }
    free(scratch);
    return rc;
}

/* Fill exact (and cast, if given). 0 or an exit code. */
static int measure_one(verify *v, kvd_float_type stream, kvd_float_type kv, int64_t T, measure *exact, measure *cast)
{
    kvd_session_options so;
    kvd_session *s = NULL;
    kvd_error err = {0};
    capture c;
    int code = capture_make(v, T, &c);
    if (code)
        return code;
    kvd_session_options_defaults(&so);
    so.kv_type = kv;
    so.stream = stream;
    int rc = kvd_session_create(&s, v->m, &so, &err);
    if (!rc) {
        kvd_session_set_progress(s, verify_on_pass, NULL);
        rc = measure_session(v, s, &c, exact, cast, &err);
    }
    kvd_session_free(&s);
    capture_free(&c);
    if (rc == KVD_E_NUMERIC) {
        measure_numeric(exact, &err);
        if (cast)
            measure_numeric(cast, &err);
        return 0;
    }
    return rc ? verify_error(rc, &err) : 0;
}

/* ---- lengths ---------------------------------------------------------------------------- */

static int lengths(const verify *v, int64_t *out)
{
    static const int64_t all[] = {16, 32, 64, 128, 256, 512}, quick[] = {16, 64, 256};
    const int64_t *list = v->c->quick ? quick : all;
    int n_list = v->c->quick ? 3 : v->c->full ? 6 : 5, n = 0;
    int64_t n_ctx = v->info.trained_context_tokens, window = v->info.window_tokens;
    for (int i = 0; i < n_list; i++)
        if (list[i] <= n_ctx)
            out[n++] = list[i];
    if (n == 0)
        out[n++] = n_ctx;
    /* Local layers: far enough beyond the window that blocks have left it. */
    if (window && !v->c->quick && out[n - 1] < window + 64 && out[n - 1] < n_ctx)
        out[n++] = window + 64 < n_ctx ? window + 64 : n_ctx;
    return n;
}

int64_t verify_positions(const verify *v)
{
    int64_t list[MAX_LENGTHS];
    return list[lengths(v, list) - 1];
}

/* ---- the table ---------------------------------------------------------------------------- */

/* "0", or the value with the layer it is from. */
static const char *cell(double value, int layer, char *buf)
{
    if (value == 0)
        return "0";
    snprintf(buf, 32, "%.1e L%d", value, layer);
    return buf;
}

static void worst(const verify *v, const measure *x, layer_error *e, int *k_layer, int *v_layer)
{
    *e = (layer_error){0};
    *k_layer = *v_layer = 0;
    for (int l = 0; l < v->info.n_layers; l++) {
        if (x->layers[l].dk > e->dk) {
            e->dk = x->layers[l].dk;
            *k_layer = l;
        }
        if (x->layers[l].dv > e->dv) {
            e->dv = x->layers[l].dv;
            *v_layer = l;
        }
    }
}

static void say_heading(const verify *v)
{
    verify_say(v, "1. K and V made from the residual entering each layer, against what attention read (paper, 5.1)\n"
                  "   Largest difference over all positions, heads and layers; Ln names the layer.\n"
                  "   %lld layers", (long long)v->info.n_layers);
    if (v->info.window_tokens)
        verify_say(v, ", %lld of them local with a window of %lld", (long long)v->info.n_local_layers,
                   (long long)v->info.window_tokens);
    verify_say(v, "\n\n   %-9s %6s %23s  %23s  dropped,\n", "", "", "KV as f16       ", "KV as f32       ");
    verify_say(v, "   %-9s %6s %11s %11s  %11s %11s  rebuilt\n", "stream", "tokens", "|dK|", "|dV|", "|dK|", "|dV|");
}

static void say_cells(const verify *v, const char *name, int64_t n, const char *const cells[2 * N_KV], const char *note)
{
    verify_say(v, "   %-9s %6lld %11s %11s  %11s %11s%s%s\n", name, (long long)n, cells[0], cells[1], cells[2],
               cells[3], *note ? "  " : "", note);
}

static void say_layers(const verify *v, const measure x[N_KV])
{
    char b[4][32];
    for (int l = 0; l < v->info.n_layers; l++) {
        const layer_error *e = &x[0].layers[l], *f = &x[1].layers[l];
        const char *cells[] = {cell(e->dk, l, b[0]), cell(e->dv, l, b[1]), cell(f->dk, l, b[2]), cell(f->dv, l, b[3])};
        say_cells(v, "  layer", l, cells, "");
    }
}

/* What is to be said of a line beside its numbers. */
static const char *note(int stream, const measure x[N_KV], char *buf, size_t size)
{
    if (stream == STREAM_CAST)
        return "not exact: a rounded copy";
    for (int i = 0; i < N_KV; i++)
        if (x[i].numeric)
            return x[i].message;
    const char *rebuilt = x[0].n_rebuilt_differ || x[1].n_rebuilt_differ ? "OTHER BITS" : "same bits";
    for (int i = 0; i < N_KV; i++)
        if (x[i].n_differ) {
            snprintf(buf, size, "DIFFERS: layer %d, position %lld (rebuilt: %s)", x[i].first_layer,
                     (long long)x[i].first_pos, rebuilt);
            return buf;
        }
    return rebuilt;
}

static void say_row(const verify *v, int stream, int64_t T, const measure x[N_KV])
{
    char b[4][32], text[96];
    const char *cells[2 * N_KV];
    if (x[0].numeric && x[1].numeric) {
        verify_say(v, "   %-9s %6lld   numeric error: %s\n", stream_names[stream], (long long)T, x[0].message);
        return;
    }
    for (int i = 0; i < N_KV; i++) {
        layer_error e;
        int kl, vl;
        worst(v, &x[i], &e, &kl, &vl);
        cells[2 * i] = x[i].numeric ? "numeric" : cell(e.dk, kl, b[2 * i]);
        cells[2 * i + 1] = x[i].numeric ? "error" : cell(e.dv, vl, b[2 * i + 1]);
    }
    say_cells(v, stream_names[stream], T, cells, note(stream, x, text, sizeof text));
    if (v->c->full)
        say_layers(v, x);
}

static json_t *row_json(const verify *v, int stream, kvd_float_type kv, int64_t T, const measure *x)
{
    layer_error e;
    int kl, vl;
    worst(v, x, &e, &kl, &vl);
    json_t *o = json_pack("{s:I, s:s, s:s, s:b}", "tokens", (json_int_t)T, "stream", stream_names[stream], "kv_type",
                          verify_type_name(kv), "must_be_exact", stream != STREAM_CAST);
    if (x->numeric) {
        json_object_set_new(o, "numeric_error", json_string(x->message));
        return o;
    }
    json_object_set_new(o, "exact", json_boolean(x->n_differ == 0));
    json_object_set_new(o, "max_dk", json_real(e.dk));
    json_object_set_new(o, "max_dk_layer", json_integer(kl));
    json_object_set_new(o, "max_dv", json_real(e.dv));
    json_object_set_new(o, "max_dv_layer", json_integer(vl));
    if (x->n_differ)
        json_object_set_new(o, "differing",
                            json_pack("{s:I, s:i, s:I}", "layer_positions", (json_int_t)x->n_differ, "first_layer",
                                      x->first_layer, "first_position", (json_int_t)x->first_pos));
    if (x->rebuilt)
        json_object_set_new(o, "rebuilt_equal", json_boolean(x->n_rebuilt_differ == 0));
    json_t *a = json_array();
    for (int l = 0; l < v->info.n_layers; l++)
        json_array_append_new(a, json_pack("{s:f, s:f}", "max_dk", x->layers[l].dk, "max_dv", x->layers[l].dv));
    json_object_set_new(o, "layers", a);
    return o;
}

static void count(verify *v, int stream, const measure *x)
{
    if (x->numeric)
        v->numeric_errors += stream != STREAM_CAST;
    else if (stream != STREAM_CAST) {
        int64_t bad = (x->n_differ != 0) + (x->n_rebuilt_differ != 0);
        v->mismatches += bad;
        v->matches += 2 - bad;
    }
}

/* One line of the table, done and counted. */
static void report(verify *v, json_t *list, int stream, int64_t T, const measure x[N_KV])
{
    say_row(v, stream, T, x);
    for (int i = 0; i < N_KV; i++) {
        json_array_append_new(list, row_json(v, stream, kv_types[i], T, &x[i]));
        count(v, stream, &x[i]);
    }
}

int verify_reconstruction(verify *v)
{
    int64_t list[MAX_LENGTHS];
    int n = lengths(v, list), code = 0;
    size_t n_layers = (size_t)v->info.n_layers;
    json_t *rows = json_array();
    json_object_set_new(v->out, "reconstruction", rows);
    /* [0] of the stream at hand, [1 ..] of the casts, which are made beside f32 and shown last. */
    measure x[1 + MAX_LENGTHS][N_KV] = {0};
    layer_error *errors = calloc((1 + MAX_LENGTHS) * N_KV * n_layers, sizeof *errors);
    if (!errors)
        return cli_fail(EXIT_RESOURCES, "out of memory: errors of layers");
    for (int i = 0; i < (1 + MAX_LENGTHS) * N_KV; i++)
        x[i / N_KV][i % N_KV].layers = errors + (size_t)i * n_layers;
    say_heading(v);
    for (int stream = 0; !code && stream < STREAM_CAST; stream++)
        for (int i = 0; !code && i < n; i++) {
            for (int kv = 0; !code && kv < N_KV; kv++) {
                layer_error *own = x[0][kv].layers;
                memset(own, 0, n_layers * sizeof *own);
                x[0][kv] = (measure){.layers = own};
                verify_progress(v, "1 of 3: stream %s, %lld tokens, KV as %s", stream_names[stream], (long long)list[i],
                                verify_type_name(kv_types[kv]));
                measure *cast = stream == 0 ? &x[1 + i][kv] : NULL;
                code = measure_one(v, streams[stream], kv_types[kv], list[i], &x[0][kv], cast);
            }
            if (!code)
                report(v, rows, stream, list[i], x[0]);
        }
    for (int i = 0; !code && i < n; i++)
        report(v, rows, STREAM_CAST, list[i], x[1 + i]);
    if (!code)
        verify_say(v, "\n   bf16 cast: an f32 stream of which bf16 copies are kept. It shows why a checkpoint must\n"
                      "   hold the stream's own bits; it is neither match nor mismatch.\n");
    free(errors);
    return code;
}
