/* kvd info and kvd tokenize: what a file is, without its weights. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"

static json_t *formats(const kvd_model *m)
{
    json_t *a = json_array();
    const char *type;
    int64_t n, bytes;
    for (int i = 0; kvd_model_format_share(m, i, &type, &n, &bytes); i++)
        json_array_append_new(a, json_pack("{s:s, s:I, s:I}", "type", type, "tensors", (json_int_t)n, "bytes", (json_int_t)bytes));
    return a;
}

static int print_json(const kvd_model *m, const kvd_model_info *i, const kvd_plan *p)
{
    json_t *o = cli_json_model(m);
    json_object_del(o, "fingerprint"); /* needs the weights */
    const struct {
        const char *key;
        int64_t value;
    } numbers[] = {{"layers", i->n_layers}, {"d_model", i->d_model}, {"heads", i->n_heads}, {"kv_heads", i->n_kv_heads},
                   {"d_head", i->d_head}, {"d_ffn", i->d_ffn}, {"vocabulary", i->n_vocab}, {"context_tokens", i->trained_context_tokens},
                   {"parameters", i->n_params}, {"file_bytes", i->file_bytes}, {"kv_bytes_per_token", p->kv_bytes_per_token},
                   {"residual_bytes_per_token", p->residual_bytes_per_token}, {"all_residuals_bytes_per_token", p->residual_bytes_per_token * i->n_layers},
                   {"id_bytes_per_token", 4}, {"evicted_bytes_per_token", p->evicted_bytes_per_token}};
    for (size_t k = 0; k < sizeof numbers / sizeof numbers[0]; k++)
        json_object_set_new(o, numbers[k].key, json_integer(numbers[k].value));
    json_object_set_new(o, "tied_head", json_boolean(i->tied_head));
    json_object_set_new(o, "formats", formats(m));
    json_object_set_new(o, "chat_template", json_string(i->chat_template));
    return cli_print_json(o);
}

static void print_table(const kvd_model *m, const kvd_model_info *i, const kvd_plan *p)
{
    char a[32];
    const char *type;
    int64_t n, bytes;
    printf("%-22s %s\n%-22s %s\n", "name", i->name, "architecture", i->architecture);
    if (i->n_layers) {
        printf("%-22s %lld layers, d %lld, %lld heads, %lld KV heads, d_head %lld, ffn %lld\n", "shape", (long long)i->n_layers,
               (long long)i->d_model, (long long)i->n_heads, (long long)i->n_kv_heads, (long long)i->d_head, (long long)i->d_ffn);
        printf("%-22s %lld tokens\n%-22s %lld%s\n", "trained context", (long long)i->trained_context_tokens, "parameters",
               (long long)i->n_params, i->tied_head ? " (tied head)" : "");
    }
    printf("%-22s %lld tokens, template %s\n", "vocabulary", (long long)i->n_vocab, *i->chat_template ? i->chat_template : "none known");
    for (int k = 0; kvd_model_format_share(m, k, &type, &n, &bytes); k++)
        printf("%-22s %s, %lld tensors, %s\n", k ? "" : "formats", type, (long long)n, cli_size(bytes, a));
    if (!i->n_layers)
        return;
    puts("bytes per token of context, 2-byte types (arXiv 2603.19664, Table 1):");
    printf("  %-20s %.1f KB\n", "KV cache", (double)p->kv_bytes_per_token / 1024);
    printf("  %-20s %.1f KB, ratio %.1fx\n", "one residual", (double)p->residual_bytes_per_token / 1024,
           (double)p->kv_bytes_per_token / (double)p->residual_bytes_per_token);
    printf("  %-20s %.1f KB\n  %-20s 4 B\n", "all layers' residuals", (double)(p->residual_bytes_per_token * i->n_layers) / 1024, "token id");
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
        return cli_error(strstr(err.message, c.model) ? "" : c.model, &err);
    kvd_model_info info;
    kvd_plan plan = {0};
    kvd_model_get_info(m, &info);
    if (info.n_layers) {
        kvd_session_options bf16;
        kvd_session_options_defaults(&bf16);
        bf16.kv_type = bf16.stream = KVD_TYPE_BF16;
        kvd_plan_session(m, &bf16, 0, 1, 0, &plan);
    }
    if (c.json)
        rc = print_json(m, &info, &plan);
    else {
        print_table(m, &info, &plan);
        rc = cli_close_stdout();
    }
    kvd_model_free(&m);
    return rc;
}

int cmd_tokenize(int argc, char **argv)
{
    cli c;
    char *text = NULL;
    size_t n_text = 0;
    int rc = cli_parse(&c, argc, argv, "tokenize", OPT_MODEL | OPT_PROMPT | OPT_TEXT | OPT_JSON, 0);
    if (rc)
        return rc;
    kvd_model *m = NULL;
    kvd_error err;
    if (kvd_model_load_vocab(&m, c.model, &err))
        return cli_error(strstr(err.message, c.model) ? "" : c.model, &err);
    if (!(rc = cli_read_prompt(&c, &text, &n_text))) {
        int32_t *ids = NULL;
        int64_t n = 0;
        unsigned flags = (c.no_bos ? 0u : KVD_TOKENIZE_BOS) | (c.special ? KVD_TOKENIZE_SPECIAL : 0u);
        if (kvd_tokenize(m, text, n_text, flags, &ids, &n, &err))
            rc = cli_error("", &err);
        else if (c.json)
            rc = cli_print_json(json_pack("{s:o, s:I}", "tokens", cli_json_ids(ids, n), "n_tokens", (json_int_t)n));
        else {
            for (int64_t i = 0; i < n; i++) {
                size_t len;
                const char *piece = kvd_token_text(m, ids[i], true, &len);
                printf("%7d  ", ids[i]);
                for (size_t k = 0; k < len; k++) {
                    unsigned char ch = (unsigned char)piece[k];
                    if (ch < 0x20 || ch == 0x7f || ch == '\\')
                        printf("\\x%02x", ch);
                    else
                        putchar(ch);
                }
                putchar('\n');
            }
            rc = cli_close_stdout();
        }
        kvd_ids_free(ids);
    }
    free(text);
    kvd_model_free(&m);
    return rc;
}
