/* kvd info: what a file is, and what its context costs, without its weights.
 *
 * The paper compares the K and V of all layers with one residual vector, both in
 * 2-byte types (arXiv 2603.19664, Table 1); the same numbers are given here, with
 * two truths beside them. All layers' residuals, which is what a cache of
 * residuals without recomputation would keep, are often larger than K and V. And
 * where layers are local only their window is ever held, so the ratio of the
 * table holds up to the window and shrinks beyond it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"

enum { MAX_LENGTHS = 12 };

typedef struct {
    const kvd_model *m;
    kvd_model_info i;
    kvd_plan table;    /* 2-byte types, as in the paper */
    kvd_plan defaults; /* what a session has when nothing is asked for */
} facts;

/* Bytes of K and V that n tokens of context hold: local layers only their window. */
static int64_t held_bytes(const facts *f, int64_t n)
{
    int64_t layer = f->table.kv_bytes_per_token / f->i.n_layers, window = f->i.window_tokens;
    int64_t local = window && n > window ? window : n;
    return layer * ((f->i.n_layers - f->i.n_local_layers) * n + f->i.n_local_layers * local);
}

/* Lengths at which the windowed ratio is told: the window, times 4 each, the
 * trained context. How many; none without windows. */
static int lengths(const facts *f, int64_t *n)
{
    int64_t last = f->i.trained_context_tokens;
    int k = 0;
    if (!f->i.n_local_layers || !f->i.window_tokens)
        return 0;
    for (int64_t at = f->i.window_tokens; at < last && k < MAX_LENGTHS - 1; at *= 4)
        n[k++] = at;
    n[k++] = last;
    return k;
}

/* From this many tokens on a token's share of the windowed cache is less than
 * what it takes to rebuild it in a pass; 0: never. */
static int64_t break_even_tokens(const facts *f)
{
    int64_t layer = f->defaults.kv_bytes_per_token / f->i.n_layers;
    int64_t slope = f->defaults.evicted_bytes_per_token - layer * (f->i.n_layers - f->i.n_local_layers);
    if (!f->i.window_tokens || slope <= 0)
        return 0;
    int64_t n = layer * f->i.n_local_layers * f->i.window_tokens / slope;
    return n > f->i.window_tokens ? n : 0;
}

static double ratio(int64_t a, int64_t b) { return b ? (double)a / (double)b : 0; }

/* ---- JSON ------------------------------------------------------------------------ */

static json_t *token_json(const kvd_model *m, int32_t id)
{
    size_t n = 0;
    const char *text = id < 0 ? "" : kvd_token_text(m, id, true, &n);
    return id < 0 ? json_null() : json_pack("{s:i, s:o}", "id", id, "text", lab_text(text, n));
}

static json_t *tokenizer_json(const facts *f)
{
    json_t *ends = json_array();
    for (int32_t id = 0; id < f->i.n_vocab; id++)
        if (kvd_token_is_end(f->m, id))
            json_array_append_new(ends, token_json(f->m, id));
    json_t *o = json_object();
    json_object_set_new(o, "model", lab_text(f->i.tokenizer, strlen(f->i.tokenizer)));
    json_object_set_new(o, "pre", lab_text(f->i.pretokenizer, strlen(f->i.pretokenizer)));
    json_object_set_new(o, "bos", token_json(f->m, kvd_token_bos(f->m)));
    json_object_set_new(o, "adds_bos", json_boolean(kvd_tokenize_adds_bos(f->m)));
    json_object_set_new(o, "eos", token_json(f->m, kvd_token_eos(f->m)));
    json_object_set_new(o, "adds_eos", json_boolean(kvd_tokenize_adds_eos(f->m)));
    json_object_set_new(o, "end_tokens", ends);
    return o;
}

static json_t *formats_json(const facts *f)
{
    json_t *a = json_array();
    const char *type;
    int64_t n, bytes, all = 0;
    for (int k = 0; kvd_model_format_share(f->m, k, &type, &n, &bytes); k++)
        all += bytes;
    for (int k = 0; kvd_model_format_share(f->m, k, &type, &n, &bytes); k++)
        json_array_append_new(a, json_pack("{s:s, s:I, s:I, s:f}", "type", type, "tensors", (json_int_t)n, "bytes",
                                           (json_int_t)bytes, "share", ratio(bytes, all)));
    return a;
}

static json_t *windowed_json(const facts *f)
{
    json_t *a = json_array();
    int64_t at[MAX_LENGTHS];
    int n = lengths(f, at);
    for (int k = 0; k < n; k++)
        json_array_append_new(a, json_pack("{s:I, s:I, s:f, s:f}", "context_tokens", (json_int_t)at[k], "kv_bytes",
                                           (json_int_t)held_bytes(f, at[k]), "kv_bytes_per_token", ratio(held_bytes(f, at[k]), at[k]),
                                           "kv_ratio", ratio(held_bytes(f, at[k]), at[k] * f->table.residual_bytes_per_token)));
    return a;
}

static int print_json(const facts *f)
{
    const kvd_model_info *i = &f->i;
    const kvd_plan *p = &f->table;
    json_t *o = cli_json_model(f->m);
    json_object_del(o, "fingerprint"); /* needs the weights */
    const struct {
        const char *key;
        int64_t value;
    } numbers[] = {{"layers", i->n_layers}, {"local_layers", i->n_local_layers}, {"window_tokens", i->window_tokens},
                   {"d_model", i->d_model}, {"heads", i->n_heads}, {"kv_heads", i->n_kv_heads}, {"d_head", i->d_head},
                   {"d_ffn", i->d_ffn}, {"vocabulary", i->n_vocab}, {"context_tokens", i->trained_context_tokens},
                   {"parameters", i->n_params}, {"file_bytes", i->file_bytes}, {"kv_bytes_per_token", p->kv_bytes_per_token},
                   {"residual_bytes_per_token", p->residual_bytes_per_token},
                   {"all_residuals_bytes_per_token", p->residual_bytes_per_token * i->n_layers}, {"id_bytes_per_token", 4},
                   {"evicted_bytes_per_token", p->evicted_bytes_per_token}};
    for (size_t k = 0; k < sizeof numbers / sizeof numbers[0]; k++)
        json_object_set_new(o, numbers[k].key, json_integer(numbers[k].value));
    json_object_set_new(o, "kv_ratio", json_real(ratio(p->kv_bytes_per_token, p->residual_bytes_per_token)));
    json_object_set_new(o, "windowed", windowed_json(f));
    json_object_set_new(o, "tied_head", json_boolean(i->tied_head));
    json_object_set_new(o, "formats", formats_json(f));
    json_object_set_new(o, "tokenizer", tokenizer_json(f));
    json_object_set_new(o, "chat_template", json_string(i->chat_template));
    json_object_set_new(o, "has_chat_template", json_boolean(i->has_chat_template));
    return cli_print_json(o);
}

/* ---- the table ------------------------------------------------------------------- */

static void label(const char *name) { printf("%-22s ", name); }

/* A line of text that the file gives. */
static void line(const char *name, const char *text)
{
    label(name);
    cli_put_text(stdout, text, strlen(text));
    putchar('\n');
}

/* With commas; buf of 32. */
static const char *grouped(int64_t v, char *buf)
{
    char digits[24];
    int n = snprintf(digits, sizeof digits, "%lld", (long long)v), k = 0;
    for (int j = 0; j < n; j++) {
        if (j && (n - j) % 3 == 0)
            buf[k++] = ',';
        buf[k++] = digits[j];
    }
    buf[k] = 0;
    return buf;
}

static void print_token(const kvd_model *m, int32_t id)
{
    size_t n;
    const char *text = kvd_token_text(m, id, true, &n);
    cli_put_text(stdout, text, n);
    printf(" (%d)", id);
}

static void print_tokenizer(const facts *f)
{
    char a[32];
    int32_t bos = kvd_token_bos(f->m), eos = kvd_token_eos(f->m);
    label("vocabulary");
    printf("%s tokens\n", grouped(f->i.n_vocab, a));
    label("tokeniser");
    printf("%s, ", strcmp(f->i.tokenizer, "llama") ? "byte-level BPE" : "SentencePiece");
    cli_put_text(stdout, f->i.tokenizer, strlen(f->i.tokenizer));
    if (*f->i.pretokenizer) {
        fputs(", pre-type ", stdout);
        cli_put_text(stdout, f->i.pretokenizer, strlen(f->i.pretokenizer));
    }
    putchar('\n');
    label("BOS");
    if (bos >= 0)
        print_token(f->m, bos);
    puts(bos < 0 ? "none" : kvd_tokenize_adds_bos(f->m) ? ", put before every text" : ", not put before a text");
    label("EOS");
    if (eos >= 0)
        print_token(f->m, eos);
    puts(eos < 0 ? "none" : kvd_tokenize_adds_eos(f->m) ? ", put after every text" : "");
    label("an answer ends at");
    int n = 0;
    for (int32_t id = 0; id < f->i.n_vocab; id++)
        if (kvd_token_is_end(f->m, id)) {
            fputs(n++ ? ", " : "", stdout);
            print_token(f->m, id);
        }
    puts(n ? "" : "no token");
    line("chat template", *f->i.chat_template ? f->i.chat_template
                          : f->i.has_chat_template ? "not one of those known (--template NAME)"
                                                   : "none (a base model?)");
}

static void print_shape(const facts *f)
{
    const kvd_model_info *i = &f->i;
    char a[32];
    label("shape");
    printf("%lld layers, d %lld, %lld heads, %lld KV head%s, d_head %lld, ffn %lld\n", (long long)i->n_layers, (long long)i->d_model,
           (long long)i->n_heads, (long long)i->n_kv_heads, i->n_kv_heads == 1 ? "" : "s", (long long)i->d_head, (long long)i->d_ffn);
    if (i->n_local_layers) {
        label("attention");
        printf("%lld local layers see the last %s tokens, %lld global ones see all\n", (long long)i->n_local_layers,
               grouped(i->window_tokens, a), (long long)(i->n_layers - i->n_local_layers));
    }
    label("trained context");
    printf("%s tokens\n", grouped(i->trained_context_tokens, a));
    label("parameters");
    printf("%s%s\n", grouped(i->n_params, a), i->tied_head ? " (output head tied to the embedding)" : "");
}

static void print_formats(const facts *f)
{
    char a[32];
    const char *type;
    int64_t n, bytes, all = 0;
    for (int k = 0; kvd_model_format_share(f->m, k, &type, &n, &bytes); k++)
        all += bytes;
    for (int k = 0; kvd_model_format_share(f->m, k, &type, &n, &bytes); k++) {
        label(k ? "" : "formats");
        printf("%-8s %5.1f %%  %10s, %lld tensor%s\n", type, 100 * ratio(bytes, all), cli_size(bytes, a), (long long)n, n == 1 ? "" : "s");
    }
}

static double kb(int64_t bytes) { return (double)bytes / 1024; }

static void print_context(const facts *f)
{
    const kvd_plan *p = &f->table;
    int64_t kv = p->kv_bytes_per_token, all = p->residual_bytes_per_token * f->i.n_layers;
    puts("\nbytes per token of context, 2-byte types (arXiv 2603.19664, Table 1):");
    printf("  %-22s %8.1f KB\n", "KV cache", kb(kv));
    printf("  %-22s %8.1f KB   the KV cache is %.1fx\n", "one residual", kb(p->residual_bytes_per_token), ratio(kv, p->residual_bytes_per_token));
    printf("  %-22s %8.1f KB   the KV cache is %.2fx%s\n", "all layers' residuals", kb(all), ratio(kv, all), all > kv ? ": no saving" : "");
    printf("  %-22s %8s B    the KV cache is %.0fx\n", "token id", "4", ratio(kv, 4));
    printf("An evicted token is kept as its id. While a pass rebuilds it, it takes %.1f KB\n"
           "(its residual in f32, one layer's K and V in f16): %.0f %% of %.1f KB.\n",
           kb(f->defaults.evicted_bytes_per_token), 100 * ratio(f->defaults.evicted_bytes_per_token, f->defaults.kv_bytes_per_token),
           kb(f->defaults.kv_bytes_per_token));
}

static void print_windowed(const facts *f)
{
    int64_t at[MAX_LENGTHS], even = break_even_tokens(f);
    char a[32], b[32];
    int n = lengths(f, at);
    if (!n)
        return;
    printf("\nThat is so up to %s tokens. Local layers never hold more than their window, so a\n"
           "longer context costs less than the table says, and there is less to save:\n"
           "  %10s  %12s  %12s  %s\n",
           grouped(f->i.window_tokens, a), "context", "KV cache", "per token", "to one residual");
    for (int k = 0; k < n; k++)
        printf("  %10s  %12s  %9.1f KB  %14.1fx\n", grouped(at[k], a), cli_size(held_bytes(f, at[k]), b),
               kb(held_bytes(f, at[k])) / (double)at[k],
               ratio(held_bytes(f, at[k]), at[k] * f->table.residual_bytes_per_token));
    if (even && even < f->i.trained_context_tokens)
        printf("From about %s tokens on, rebuilding a token takes more memory than its share of\n"
               "the KV cache does: there a disk, or --stream bf16, serves better than eviction.\n", grouped(even, a));
}

static void print_table(const facts *f)
{
    char a[32];
    line("name", f->i.name);
    line("architecture", f->i.architecture);
    label("file");
    puts(cli_size(f->i.file_bytes, a));
    if (f->i.n_layers)
        print_shape(f);
    print_formats(f);
    print_tokenizer(f);
    if (f->i.n_layers) {
        print_context(f);
        print_windowed(f);
    }
}

int cmd_info(int argc, char **argv)
{
    cli c;
    int rc = cli_parse(&c, argc, argv, "info", OPT_MODEL | OPT_JSON, 0);
    if (rc)
        return rc;
    kvd_model *m = NULL;
    kvd_error err;
    if (kvd_model_load_vocab(&m, c.model, &err))
        return cli_file_error(c.model, &err);
    facts f = {.m = m};
    kvd_model_get_info(m, &f.i);
    if (f.i.n_layers) {
        kvd_session_options o;
        kvd_session_options_defaults(&o);
        kvd_plan_session(m, &o, 0, 1, 0, &f.defaults);
        o.kv_type = o.stream = KVD_TYPE_BF16;
        kvd_plan_session(m, &o, 0, 1, 0, &f.table);
    }
    if (c.json)
        rc = print_json(&f);
    else {
        print_table(&f);
        rc = cli_close_stdout();
    }
    kvd_model_free(&m);
    return rc;
}
