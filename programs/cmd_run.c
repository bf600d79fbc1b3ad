/* kvd run: one completion. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"

typedef struct {
    bool print;
    bool failed; /* stdout takes no more */
    double seconds; /* what its reader took */
} printer;

static int on_token(void *ctx, int32_t id, const char *text, size_t n)
{
    printer *p = ctx;
    if (p->print && n) {
        double t0 = cli_seconds();
        cli_progress_clear();
        p->failed = !cli_put_text(stdout, text, n) || fflush(stdout);
        p->seconds += id < 0 ? 0 : cli_seconds() - t0; /* the rest of the text comes when the clock has stopped */
    }
    return p->failed || cli_interrupted();
}

static int encode(const cli *c, kvd_model *m, int32_t **ids, int64_t *n)
{
    char *text = NULL, *chat = NULL;
    size_t n_text = 0, n_chat = 0;
    kvd_error err;
    int rc = cli_read_prompt(c, &text, &n_text);
    if (rc)
        return rc;
    unsigned flags = (c->no_bos ? 0u : KVD_TOKENIZE_BOS) | (!c->raw || c->special ? KVD_TOKENIZE_SPECIAL : 0u);
    if (!c->raw) {
        kvd_chat_turn turns[2];
        int64_t k = 0;
        if (c->system)
            turns[k++] = (kvd_chat_turn){"system", c->system};
        turns[k++] = (kvd_chat_turn){"user", text};
        rc = kvd_chat_render(m, c->template_name, turns, k, c->no_think ? KVD_CHAT_NO_THINK : 0, &chat, &n_chat, &err);
    }
    if (!rc)
        rc = kvd_tokenize(m, chat ? chat : text, chat ? n_chat : n_text, flags, ids, n, &err);
    if (rc)
        rc = cli_fail(kvd_error_exit(rc), "%s%s", err.message, chat || c->raw ? "" : " (or --raw)");
    else if (*n == 0) {
        rc = cli_fail(EXIT_USAGE, "the prompt is empty"); /* the caller frees ids */
    }
    kvd_text_free(chat);
    free(text);
    return rc;
}

static double rate(int64_t tokens, double s) { return s > 0 ? (double)tokens / s : 0; }

static json_t *report(const kvd_model *m, const kvd_session *s, const kvd_result *r, int64_t loaded_bytes)
{
    kvd_model_info info;
    kvd_session_stats st;
    int64_t now, peak, budget;
    kvd_model_get_info(m, &info);
    kvd_session_get_stats(s, &st);
    kvd_memory_context(m, &now, &peak, &budget);
    int64_t decoded = r->n_tokens > 0 ? r->n_tokens - 1 : 0; /* the first comes from the prefill */
    json_t *kv = json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "budget_bytes", (json_int_t)budget, "peak_bytes",
                           (json_int_t)peak, "resident_tokens", (json_int_t)st.resident_tokens, "evicted_tokens",
                           (json_int_t)st.evicted_tokens, "recomputed_tokens", (json_int_t)st.recomputed_tokens, "passes",
                           (json_int_t)st.passes, "drafted", (json_int_t)st.drafted, "accepted", (json_int_t)st.accepted);
    if (st.disk || st.disk_error)
        json_object_set_new(kv, "disk", json_pack("{s:b, s:I, s:I, s:f, s:s?}", "in_use", st.disk, "read_bytes", (json_int_t)st.disk_read_bytes,
                                                  "written_bytes", (json_int_t)st.disk_written_bytes, "wait_s", st.disk_wait_s,
                                                  "error", st.disk_error));
    json_t *o = json_object();
    json_object_set_new(o, "text", lab_text(r->text ? r->text : "", r->n_text));
    json_object_set_new(o, "tokens", cli_json_ids(r->tokens, r->n_tokens));
    json_object_set_new(o, "receipt", json_string(r->receipt));
    json_object_set_new(o, "prompt_tokens", json_integer(r->prompt_tokens));
    json_object_set_new(o, "generated_tokens", json_integer(r->n_tokens));
    json_object_set_new(o, "stop_reason", json_string(kvd_stop_reason_name(r->stop_reason)));
    json_object_set_new(o, "prefill_tokens_per_s", json_real(rate(r->prompt_tokens, r->prefill_s)));
    json_object_set_new(o, "decode_tokens_per_s", json_real(rate(decoded, r->decode_s)));
    json_object_set_new(o, "kv", kv);
    json_object_set_new(o, "ledger", cli_json_ledger(m));
    json_object_set_new(o, "process_loaded_bytes", json_integer(loaded_bytes));
    json_object_set_new(o, "process_peak_bytes", json_integer(cli_peak_bytes()));
    json_object_set_new(o, "model", cli_json_model(m));
    json_object_set_new(o, "cpu", json_string(info.isa));
    json_object_set_new(o, "threads", json_integer(info.n_threads));
    return o;
}

static void last_lines(const kvd_model *m, const kvd_session *s, const kvd_result *r)
{
    kvd_session_stats st;
    int64_t now, peak, budget;
    char a[32];
    kvd_session_get_stats(s, &st);
    kvd_memory_context(m, &now, &peak, &budget);
    fprintf(stderr, "kvd: %lld + %lld tokens (%s), prefill %.1f/s, decode %.1f/s; context peak %s, %lld resident, %lld evicted, %lld recomputed\n",
            (long long)r->prompt_tokens, (long long)r->n_tokens, kvd_stop_reason_name(r->stop_reason),
            rate(r->prompt_tokens, r->prefill_s), rate(r->n_tokens > 0 ? r->n_tokens - 1 : 0, r->decode_s), cli_size(peak, a),
            (long long)st.resident_tokens, (long long)st.evicted_tokens, (long long)st.recomputed_tokens);
}

/* The disk tier given up is no error: the answer is right, but slower. */
static void say_disk(const kvd_session *s)
{
    kvd_session_stats st;
    kvd_session_get_stats(s, &st);
    if (st.disk_error)
        fprintf(stderr, "kvd: the disk tier was given up, recomputing instead: %s\n", st.disk_error);
}

static int generate(cli *c, kvd_model *m, const int32_t *ids, int64_t n)
{
    kvd_error err = {0};
    kvd_session *s = NULL;
    kvd_result r;
    printer p = {.print = !c->json};
    if (kvd_session_create(&s, m, &c->so, &err))
        return cli_error("", &err);
    kvd_session_set_progress(s, cli_progress, NULL);
    c->go.on_token = on_token;
    c->go.ctx = &p;
    int64_t loaded = cli_resident_bytes();
    int rc = kvd_generate(s, ids, n, &c->go, &r, &err), code = EXIT_OK;
    cli_progress_clear();
    if (!c->quiet)
        say_disk(s);
    if (rc && rc != KVD_E_CANCELLED) {
        code = cli_error("", &err);
        if (rc == KVD_E_IO) /* no file of the user's: there is just no disk to be had */
            code = EXIT_RESOURCES;
    } else {
        bool cut = cli_interrupted();
        if (cut)
            r.stop_reason = KVD_STOP_INTERRUPTED;
        kvd_session_stats st;
        kvd_session_get_stats(s, &st);
        cli_learn(c, m, &st, n, r.n_tokens, r.decode_s - p.seconds);
        if (c->json)
            code = cli_print_json(report(m, s, &r, loaded));
        else {
            if (r.n_text && r.text[r.n_text - 1] != '\n')
                putchar('\n');
            if (c->receipt)
                printf("receipt %s\n", r.receipt);
            code = cli_close_stdout();
            if (!c->quiet)
                last_lines(m, s, &r);
        }
        if (cut)
            code = EXIT_INTERRUPTED;
    }
    kvd_result_free(&r);
    kvd_session_free(&s);
    return code;
}

int cmd_run(int argc, char **argv)
{
    cli c;
    int rc = cli_parse(&c, argc, argv, "run",
                       OPT_MODEL | OPT_MACHINE | OPT_MEMORY | OPT_NUMBERS | OPT_PROMPT | OPT_GENERATE | OPT_RAW | OPT_JSON | OPT_OUTPUT | OPT_TEXT, 0);
    if (rc)
        return rc;
    cli_progress_allow(!c.quiet);
    kvd_model *m = NULL;
    int32_t *ids = NULL;
    int64_t n = 0;
    if ((rc = cli_spill_dir(&c)) || (rc = cli_load(&c, true, &m)))
        return rc;
    cli_catch_interrupt();
    if (!(rc = encode(&c, m, &ids, &n)) && !(rc = cli_choose_tier(&c, m, n, n + (c.go.max_tokens > 0 ? c.go.max_tokens : 1)))) {
        if (!c.quiet)
            cli_first_line(&c, m);
        rc = generate(&c, m, ids, n);
    }
    kvd_ids_free(ids);
    kvd_model_free(&m);
    return rc;
}
