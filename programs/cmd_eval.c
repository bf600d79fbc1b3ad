/* kvd eval: perplexity, by the rule of llama.cpp's tool: chunks of 512 tokens
 * from the start of the text, a BOS in place of each chunk's first token where
 * the model wants one, and in each chunk the predictions of tokens 257 to 511
 * scored. */
#define _GNU_SOURCE
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"

enum { CHUNK = 512, FIRST_SCORED = 257 };

typedef struct {
    const int32_t *ids; /* of the chunk */
    int64_t n_vocab, first_pos;
    double nll;
    int64_t n;
} score;

/* -log softmax(logits)[next], in f64. */
static int add_score(void *ctx, int64_t pos, const float *logits)
{
    score *s = ctx;
    int64_t next = pos + 1;
    if (cli_interrupted())
        return 1;
    if (next < FIRST_SCORED || next >= CHUNK)
        return 0;
    double max = (double)logits[0], sum = 0;
    for (int64_t i = 1; i < s->n_vocab; i++)
        if ((double)logits[i] > max)
            max = (double)logits[i];
    for (int64_t i = 0; i < s->n_vocab; i++)
        sum += exp((double)logits[i] - max);
    s->nll += max + log(sum) - (double)logits[s->ids[next]];
    s->n++;
    return 0;
}

static int perplexity(const cli *c, kvd_model *m)
{
    char *text;
    size_t n_text;
    int32_t *ids = NULL;
    int64_t n = 0;
    kvd_error err;
    int rc = cli_read_prompt(c, &text, &n_text);
    if (rc)
        return rc;
    rc = kvd_tokenize(m, text, n_text, KVD_TOKENIZE_BOS, &ids, &n, &err);
    free(text);
    if (rc)
        return cli_error("", &err);
    int64_t chunks = n / CHUNK;
    if (chunks == 0) {
        kvd_ids_free(ids);
        return cli_fail(EXIT_BAD_FILE, "the text has %lld tokens, a chunk is %d", (long long)n, CHUNK);
    }
    if (c->chunks && c->chunks < chunks)
        chunks = c->chunks;
    kvd_model_info info;
    kvd_model_get_info(m, &info);
    kvd_session *s = NULL;
    score sc = {.n_vocab = info.n_vocab};
    double begun = cli_seconds();
    rc = kvd_session_create(&s, m, &c->so, &err) ? cli_error("", &err) : 0;
    if (!rc)
        kvd_session_set_progress(s, cli_progress, NULL);
    for (int64_t i = 0; !rc && i < chunks; i++) {
        int32_t chunk[CHUNK];
        memcpy(chunk, ids + i * CHUNK, sizeof chunk);
        if (kvd_tokenize_adds_bos(m))
            chunk[0] = kvd_token_bos(m);
        sc.ids = chunk;
        int r = kvd_session_rewind(s, 0, &err);
        /* Two feeds, so that kv-direct has something to evict and to rebuild. */
        r = r ? r : kvd_session_feed_all(s, chunk, FIRST_SCORED - 1, 0, NULL, NULL, &err);
        r = r ? r : kvd_session_feed_all(s, chunk + FIRST_SCORED - 1, CHUNK - FIRST_SCORED + 1, CHUNK - FIRST_SCORED + 1, add_score, &sc, &err);
        if (r == KVD_E_CANCELLED || cli_interrupted())
            rc = cli_fail(EXIT_INTERRUPTED, "interrupted after %lld of %lld chunks", (long long)i, (long long)chunks);
        else if (r)
            rc = cli_error("", &err);
        else if (!c->json && !c->quiet) {
            cli_progress_clear();
            fprintf(stderr, "[%lld] %.4f\n", (long long)i + 1, exp(sc.nll / (double)sc.n));
        }
    }
    if (!rc) {
        double mean = sc.nll / (double)sc.n;
        if (c->json) {
            kvd_session_stats st;
            kvd_session_get_stats(s, &st);
            json_t *o = json_pack("{s:f, s:f, s:I, s:I, s:f, s:I}", "perplexity", exp(mean), "mean_nll", mean, "tokens",
                                  (json_int_t)sc.n, "chunks", (json_int_t)chunks, "seconds", cli_seconds() - begun,
                                  "recomputed_tokens", (json_int_t)st.recomputed_tokens);
            json_object_set_new(o, "model", cli_json_model(m));
            rc = cli_print_json(o);
        } else {
            printf("perplexity %.4f (mean nll %.6f, %lld tokens of %lld chunks of %d, predictions of tokens %d to %d)\n", exp(mean),
                   mean, (long long)sc.n, (long long)chunks, CHUNK, FIRST_SCORED, CHUNK - 1);
            rc = cli_close_stdout();
        }
    }
    kvd_session_free(&s);
    kvd_ids_free(ids);
    return rc;
}

int cmd_eval(int argc, char **argv)
{
    cli c;
    int rc = cli_parse(&c, argc, argv, "eval perplexity",
                       OPT_MODEL | OPT_MACHINE | OPT_MEMORY | OPT_NUMBERS | OPT_EVAL | OPT_JSON | OPT_OUTPUT, 1);
    if (rc)
        return rc;
    if (c.n_words == 0 || strcmp(c.words[0], "perplexity"))
        return cli_fail(EXIT_USAGE, "usage: kvd eval perplexity -m MODEL -f FILE");
    if (!c.file)
        return cli_fail(EXIT_USAGE, "no text: -f FILE");
    kvd_model *m = NULL;
    cli_progress_allow(!c.quiet);
    if ((rc = cli_load(&c, true, &m)))
        return rc;
    cli_catch_interrupt();
    rc = perplexity(&c, m);
    kvd_model_free(&m);
    return rc;
}
