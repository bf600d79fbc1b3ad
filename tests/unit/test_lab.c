/* The laboratory's calls beside the taps: K and V rebuilt from residuals, many at once
 * and one by one, are the bits that attention reads; matrices are the file's, read and
 * dequantised here on another way. */
#include "tiny.h"

#include "gguf/gguf.h"
#include "kvd/kvd_lab.h"
#include "quant/quant.h"

static const char *const families[] = {"llama", "window", "qwen2", "qwen3", "gemma3", "narrow", "kquant"};
enum { N_FAMILIES = sizeof families / sizeof families[0], N_TOKENS = 70 };

/* ---- reconstruction ------------------------------------------------------------- */

/* What a pass had: residuals entering layers, K and V as attention read them. */
typedef struct {
    int64_t n_layers, d, n_kv;
    float *h, *k, *v; /* [n_layers][N_TOKENS][d or n_kv] */
} record;

static void on_residual(void *ctx, int layer, int64_t pos, float *h)
{
    record *r = ctx;
    if (layer < r->n_layers)
        memcpy(r->h + (layer * N_TOKENS + pos) * r->d, h, (size_t)r->d * sizeof *h);
}

static void on_read(void *ctx, int layer, int64_t pos, const float *k, const float *v)
{
    record *r = ctx;
    int64_t at = (layer * N_TOKENS + pos) * r->n_kv;
    memcpy(r->k + at, k, (size_t)r->n_kv * sizeof *k);
    memcpy(r->v + at, v, (size_t)r->n_kv * sizeof *v);
}

static record recorded(kvd_model *m, kvd_session *s)
{
    record r = {m->config.n_layers, m->config.d_model, (int64_t)m->config.n_kv_heads * m->config.d_head, NULL, NULL, NULL};
    r.h = malloc(sizeof(float) * (size_t)(r.n_layers * N_TOKENS * r.d));
    r.k = malloc(sizeof(float) * (size_t)(r.n_layers * N_TOKENS * r.n_kv));
    r.v = malloc(sizeof(float) * (size_t)(r.n_layers * N_TOKENS * r.n_kv));
    int32_t ids[N_TOKENS];
    for (int i = 0; i < N_TOKENS; i++)
        ids[i] = (int32_t)pick(m->config.n_vocab);
    kvd_error err = {0};
    kvd_lab_set_taps(s, &(kvd_lab_taps){.ctx = &r, .residual = on_residual, .kv_read = on_read});
    check(kvd_session_feed(s, ids, N_TOKENS, NULL, &err) == 0, "%s", err.message);
    kvd_lab_set_taps(s, NULL);
    return r;
}

static void free_record(record *r)
{
    free(r->h);
    free(r->k);
    free(r->v);
}

/* n rows of a layer, in a random order, into buffers with a value behind the end. */
static void rebuild_some(kvd_session *s, const record *r, int layer, int64_t n, const char *what)
{
    int64_t pos[N_TOKENS], row = r->n_kv;
    float *h = malloc(sizeof(float) * (size_t)(n * r->d)), *k = malloc(sizeof(float) * (size_t)(n * row + 1)),
          *v = malloc(sizeof(float) * (size_t)(n * row + 1));
    k[n * row] = v[n * row] = 123;
    for (int64_t i = 0; i < n; i++) {
        pos[i] = pick(N_TOKENS);
        memcpy(h + i * r->d, r->h + (layer * N_TOKENS + pos[i]) * r->d, (size_t)r->d * sizeof *h);
    }
    kvd_error err = {0};
    check(kvd_lab_reconstruct_rows(s, layer, n, pos, h, k, v, &err) == 0, "%s: %s", what, err.message);
    for (int64_t i = 0; i < n; i++) {
        int64_t at = (layer * N_TOKENS + pos[i]) * row;
        check(!memcmp(k + i * row, r->k + at, (size_t)row * sizeof *k), "%s: layer %d, position %lld, K", what, layer, (long long)pos[i]);
        check(!memcmp(v + i * row, r->v + at, (size_t)row * sizeof *v), "%s: layer %d, position %lld, V", what, layer, (long long)pos[i]);
    }
    check(k[n * row] == 123 && v[n * row] == 123, "%s: written behind the end", what);
    if (n) { /* the last one alone */
        check(kvd_lab_reconstruct(s, layer, pos[n - 1], h + (n - 1) * r->d, k, v, &err) == 0, "%s: %s", what, err.message);
        int64_t at = (layer * N_TOKENS + pos[n - 1]) * row;
        check(!memcmp(k, r->k + at, (size_t)row * sizeof *k) && !memcmp(v, r->v + at, (size_t)row * sizeof *v), "%s: one by one", what);
    }
    free(h);
    free(k);
    free(v);
}

static void rows_are_what_attention_reads(void **state)
{
    (void)state;
    static const int threads[] = {1, 2, 3}, chunks[] = {1, 7, 256};
    for (int f = 0; f < N_FAMILIES; f++)
        for (int i = 0; i < 3; i++) {
            kvd_model_options mo;
            kvd_model_options_defaults(&mo);
            mo.n_threads = threads[(f + i) % 3];
            mo.chunk_tokens = chunks[i];
            mo.activations_f32 = f == 0 && i == 2;
            kvd_model *m = tiny_load(families[f], &mo);
            kvd_session_options so;
            kvd_session_options_defaults(&so);
            so.kv_type = (kvd_float_type)i;
            kvd_session *s = tiny_session(m, &so);
            record r = recorded(m, s);
            char what[80];
            snprintf(what, sizeof what, "%s, %d threads, chunks of %d", families[f], mo.n_threads, mo.chunk_tokens);
            for (int layer = 0; layer < r.n_layers; layer++) {
                static const int64_t n[] = {0, 1, 2, 7, 8, 17, N_TOKENS};
                for (size_t j = 0; j < sizeof n / sizeof n[0]; j++)
                    rebuild_some(s, &r, layer, n[j], what);
            }
            free_record(&r);
            kvd_session_free(&s);
            tiny_free(&m);
        }
}

static void a_bad_row_is_named(void **state)
{
    (void)state;
    for (int n_threads = 1; n_threads <= 2; n_threads++) {
        kvd_model_options mo;
        kvd_model_options_defaults(&mo);
        mo.n_threads = n_threads;
        mo.chunk_tokens = 4;
        kvd_model *m = tiny_load("llama", &mo);
        kvd_session *s = tiny_session(m, NULL);
        record r = recorded(m, s);
        int64_t pos[10];
        for (int i = 0; i < 10; i++)
            pos[i] = 20 - i;
        float *k = malloc(sizeof(float) * (size_t)(10 * r.n_kv)), *v = malloc(sizeof(float) * (size_t)(10 * r.n_kv));
        kvd_error err = {0};
        r.h[6 * r.d + 3] = __builtin_inff();
        assert_int_equal(kvd_lab_reconstruct_rows(s, 1, 10, pos, r.h, k, v, &err), KVD_E_NUMERIC);
        check(strstr(err.message, "layer 1 at position 14"), "%s", err.message);
        assert_int_equal(kvd_lab_reconstruct_rows(s, 1, 6, pos, r.h, k, v, &err), 0);
        assert_int_equal(kvd_lab_reconstruct(s, 0, 3, r.h + 6 * r.d, k, v, &err), KVD_E_NUMERIC);
        check(strstr(err.message, "layer 0 at position 3"), "%s", err.message);
        free(k);
        free(v);
        free_record(&r);
        kvd_session_free(&s);
        tiny_free(&m);
    }
}

static void rows_out_of_range(void **state)
{
    (void)state;
    kvd_model *m = tiny_load("short", NULL);
    kvd_session *s = tiny_session(m, NULL);
    float h[2 * 512] = {0}, k[1024], v[1024];
    memset(k, 0x5a, sizeof k);
    int64_t n_ctx = m->config.n_ctx, good[] = {0, n_ctx - 1}, high[] = {0, n_ctx}, low[] = {-1, 0};
    check(m->config.d_model <= 512 && m->config.n_kv_heads * m->config.d_head <= 512, "buffers");
    kvd_error err = {0};
    assert_int_equal(kvd_lab_reconstruct_rows(s, -1, 2, good, h, k, v, &err), KVD_E_RANGE);
    assert_int_equal(kvd_lab_reconstruct_rows(s, m->config.n_layers, 2, good, h, k, v, &err), KVD_E_RANGE);
    assert_int_equal(kvd_lab_reconstruct_rows(s, 0, -1, good, h, k, v, &err), KVD_E_RANGE);
    assert_int_equal(kvd_lab_reconstruct_rows(s, 0, 2, high, h, k, v, &err), KVD_E_RANGE);
    assert_int_equal(kvd_lab_reconstruct_rows(s, 0, 2, low, h, k, v, NULL), KVD_E_RANGE);
    assert_int_equal(kvd_lab_reconstruct_rows(s, 0, 0, NULL, NULL, NULL, NULL, &err), 0);
    for (size_t i = 0; i < sizeof k; i++)
        assert_int_equal(((unsigned char *)k)[i], 0x5a);
    assert_int_equal(kvd_lab_reconstruct_rows(s, 0, 2, good, h, k, v, &err), 0);
    kvd_session_free(&s);
    tiny_free(&m);
}

/* ---- matrices -------------------------------------------------------------------- */

static const char *const suffixes[] = {"attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"};

/* A tensor of the file as f32, NULL if it is not there; row by row from the file's own
 * bytes. */
static float *file_tensor(const kvd_gguf *g, int layer, const char *suffix, const char *part, int64_t *rows, int64_t *columns)
{
    char name[64];
    snprintf(name, sizeof name, "blk.%d.%s.%s", layer, suffix, part);
    const kvd_gguf_tensor *t = kvd__gguf_tensor(g, name);
    if (!t)
        return NULL;
    *columns = t->ne[0];
    *rows = t->n_dims > 1 ? t->ne[1] : 1;
    char *bytes = malloc((size_t)t->n_bytes);
    float *out = malloc(sizeof(float) * (size_t)(*rows * *columns));
    kvd_error err = {0};
    check(kvd__gguf_read(g, t, 0, bytes, (size_t)t->n_bytes, &err) == 0, "%s", err.message);
    for (int64_t r = 0; r < *rows; r++)
        kvd__dequant_row(t->type, bytes + r * (t->n_bytes / *rows), out + r * *columns, *columns);
    free(bytes);
    return out;
}

static void same_matrix(const kvd_model *m, const kvd_gguf *g, int layer, int which)
{
    int64_t rows, columns, n_rows = -1, n_columns = -1, one, n_bias;
    float *w = file_tensor(g, layer, suffixes[which], "weight", &rows, &columns);
    check(w != NULL, "%s is not in the file", suffixes[which]);
    kvd_error err = {0};
    assert_int_equal(kvd_lab_get_matrix(m, layer, (kvd_lab_matrix)which, &n_rows, &n_columns, NULL, NULL, &err), 0);
    assert_int_equal(n_rows, rows);
    assert_int_equal(n_columns, columns);
    float *got = malloc(sizeof(float) * (size_t)(rows * columns + 1)), *bias = malloc(sizeof(float) * (size_t)(rows + 1));
    got[rows * columns] = bias[rows] = 123;
    assert_int_equal(kvd_lab_get_matrix(m, layer, (kvd_lab_matrix)which, &n_rows, &n_columns, got, bias, &err), 0);
    check(!memcmp(got, w, sizeof(float) * (size_t)(rows * columns)), "layer %d, %s", layer, suffixes[which]);
    float *b = file_tensor(g, layer, suffixes[which], "bias", &one, &n_bias);
    for (int64_t i = 0; i < rows; i++)
        check(bias[i] == (b ? b[i] : 0), "layer %d, bias of %s", layer, suffixes[which]);
    check(got[rows * columns] == 123 && bias[rows] == 123, "written behind the end");
    free(w);
    free(b);
    free(got);
    free(bias);
}

static void matrices_are_the_files(void **state)
{
    (void)state;
    for (int f = 0; f < N_FAMILIES; f++) {
        kvd_model *m = tiny_load(families[f], NULL);
        kvd_error err = {0};
        kvd_ledger *ledger = kvd__ledger_create(0, &err);
        kvd_gguf *g = NULL;
        check(kvd__gguf_open(&g, tiny_path(families[f]), ledger, &err) == 0, "%s", err.message);
        for (int layer = 0; layer < m->config.n_layers; layer++)
            for (int which = 0; which < 7; which++)
                same_matrix(m, g, layer, which);
        kvd__gguf_close(&g);
        kvd__ledger_destroy(&ledger);
        tiny_free(&m);
    }
}

static void matrices_out_of_range(void **state)
{
    (void)state;
    kvd_model *m = tiny_load("llama", NULL);
    kvd_error err = {0};
    int64_t rows = -1, columns = -1;
    assert_int_equal(kvd_lab_get_matrix(m, -1, KVD_LAB_WQ, &rows, &columns, NULL, NULL, &err), KVD_E_RANGE);
    assert_int_equal(kvd_lab_get_matrix(m, m->config.n_layers, KVD_LAB_WQ, &rows, &columns, NULL, NULL, &err), KVD_E_RANGE);
    assert_int_equal(kvd_lab_get_matrix(m, 0, (kvd_lab_matrix)7, &rows, &columns, NULL, NULL, NULL), KVD_E_RANGE);
    assert_int_equal(rows, -1);
    kvd_model_free(&m);
    check(kvd_model_load_vocab(&m, tiny_path("llama"), &err) == 0, "%s", err.message);
    assert_int_equal(kvd_lab_get_matrix(m, 0, KVD_LAB_WQ, &rows, &columns, NULL, NULL, &err), KVD_E_ARG);
    assert_int_equal(columns, -1);
    kvd_model_free(&m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_are_what_attention_reads),
        cmocka_unit_test(a_bad_row_is_named),
        cmocka_unit_test(rows_out_of_range),
        cmocka_unit_test(matrices_are_the_files),
        cmocka_unit_test(matrices_out_of_range),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
