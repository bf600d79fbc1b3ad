/* 5.4, Table 4: perplexity under each policy.
 *
 * The rule is that of llama.cpp's tool, so that numbers can be laid beside its: chunks
 * of chunk_tokens tokens from the start of the text, each read on its own; a BOS in place
 * of a chunk's first token where the model wants one; scored are the predictions of
 * tokens first_scored and up (257 of 512: each with 256 tokens or more before it). The
 * mean over all scored tokens of all chunks is one mean, not a mean of means. A model
 * whose text is shorter than a chunk can not be measured.
 *
 * A policy that is exact is fed in two pieces, so that kv-direct has something to drop
 * and to rebuild: its number comes from its own recomputation (recomputed tokens are in
 * the table), as the paper has it, and has to be the same bits as that of full. A policy
 * that forgets is fed token by token: a longer feed attends to all of itself, and the
 * number would be that of a larger budget. */
#include "lab/lab.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "lab/runs.h"

static const char own_policies[] = "full,kv-direct,window:128,window:64,window:32,streaming-llm:64";

typedef struct {
    const lab *l;
    json_t *result, *table;
    kvd_error *err;
    int32_t *ids, *chunk;      /* [n_chunks*n_chunk]; [n_chunk] */
    int64_t n_chunks, n_chunk, first_scored;
    double *nll, *full;        /* [n_chunks*scored] of this policy; of full, or NULL */
    int64_t n, n_policies;     /* nll so far; policies so far */
} evaluation;

/* ---- one policy -------------------------------------------------------------------- */

static int score_row(void *ctx, int64_t pos, const float *logits)
{
    evaluation *e = ctx;
    e->nll[e->n++] = -lab_log_prob(logits, e->l->info.n_vocab, e->chunk[pos + 1]);
    return 0;
}

/* Tokens [from, to) of the chunk, the logits of those that predict a scored one. */
static int feed(evaluation *e, kvd_session *s, int64_t from, int64_t to)
{
    int64_t first = e->first_scored - 1 > from ? e->first_scored - 1 : from;
    return kvd_session_feed_all(s, e->chunk + from, to - from, first < to ? to - first : 0, score_row, e, e->err);
}

static int feed_chunk(evaluation *e, kvd_session *s, int64_t i, bool one_by_one)
{
    int64_t end = e->n_chunk - 1; /* nobody asks what follows the last token */
    memcpy(e->chunk, e->ids + i * e->n_chunk, (size_t)e->n_chunk * sizeof *e->chunk);
    if (kvd_tokenize_adds_bos(e->l->m))
        e->chunk[0] = kvd_token_bos(e->l->m);
    int rc = kvd_session_rewind(s, 0, e->err);
    for (int64_t at = 0; !rc && at < end;) {
        int64_t to = one_by_one ? at + 1 : at == 0 && e->n_chunk > 3 ? e->n_chunk / 2 : end;
        rc = feed(e, s, at, to);
        at = to;
    }
    return rc;
}

static void mean_and_error(const double *x, int64_t n, double *mean, double *error)
{
    double sum = 0, squares = 0;
    for (int64_t i = 0; i < n; i++)
        sum += x[i];
    *mean = sum / (double)n;
    for (int64_t i = 0; i < n; i++)
        squares += (x[i] - *mean) * (x[i] - *mean);
    *error = n > 1 ? sqrt(squares / (double)(n - 1) / (double)n) : (double)NAN;
}

/* ---- the experiment ------------------------------------------------------------------- */

static int measure(evaluation *e, const char *name, const kvd_session_options *so)
{
    bool exact = so->policy == KVD_POLICY_FULL || so->policy == KVD_POLICY_KV_DIRECT, same = false;
    char what[96];
    kvd_session *s = NULL;
    kvd_session_stats st;
    double begun = lab_seconds(), mean, error;
    int rc = kvd_session_create(&s, e->l->m, so, e->err);
    if (!rc)
        lab_watch(e->l, s);
    snprintf(what, sizeof what, "perplexity, %s", name);
    e->n = 0;
    for (int64_t i = 0; !rc && i < e->n_chunks; i++) {
        rc = lab_tick(e->l, what, i, e->n_chunks, e->err);
        rc = rc ? rc : feed_chunk(e, s, i, !exact);
    }
    if (!rc)
        kvd_session_get_stats(s, &st);
    kvd_session_free(&s);
    if (rc)
        return rc;
    mean_and_error(e->nll, e->n, &mean, &error);
    if (!e->full && so->policy == KVD_POLICY_FULL) {
        e->full = lab_alloc(e->n, sizeof *e->full, e->err);
        if (!e->full)
            return KVD_E_NOMEM;
        memcpy(e->full, e->nll, (size_t)e->n * sizeof *e->full);
    }
    same = e->full && !memcmp(e->full, e->nll, (size_t)e->n * sizeof *e->nll);
    lab_row(e->table, json_pack("[s, o, o, o, o, I, I, I, o, f]", name, lab_number(exp(mean)), lab_number(exp(mean) * error), lab_number(mean),
                                lab_number(error), (json_int_t)e->n, (json_int_t)e->n_chunks, (json_int_t)st.recomputed_tokens,
                                e->full ? json_boolean(same) : json_null(), lab_seconds() - begun));
    if (e->full && exact && !same)
        lab_check_failed(e->result, "%s had to give each token the probability that full gives it, to the bit, and did not.", name);
    json_object_set_new(e->result, "perplexity", lab_number(exp(mean))); /* taken out again if there are more policies */
    json_object_set_new(e->result, "mean_nll", lab_number(mean));
    json_object_set_new(e->result, "tokens", json_integer((json_int_t)e->n));
    json_object_set_new(e->result, "chunks", json_integer((json_int_t)e->n_chunks));
    json_object_set_new(e->result, "recomputed_tokens", json_integer((json_int_t)st.recomputed_tokens));
    e->n_policies++;
    return 0;
}

static int all_policies(evaluation *e)
{
    static const lab_column columns[] = {{"policy", "policy", 0},
                                         {"perplexity", "perplexity", 4},
                                         {"perplexity_error", "standard error", 4},
                                         {"mean_nll", "mean -log p, nats", 6},
                                         {"mean_nll_error", "standard error, nats", 6},
                                         {"tokens", "scored tokens", 0},
                                         {"chunks", "chunks", 0},
                                         {"recomputed_tokens", "recomputed tokens", 0},
                                         {"same_as_full", "same bits as full", 0},
                                         {"seconds", "seconds", 1},
                                         {NULL, NULL, 0}};
    static const char *const single[] = {"perplexity", "mean_nll", "tokens", "chunks", "recomputed_tokens"};
    const char *list = e->l->policies ? e->l->policies : own_policies;
    kvd_session_options so;
    char name[64];
    int rc = 0;
    e->table = lab_table(e->result, "perplexity", "Perplexity by policy", columns);
    while (!rc && lab_next_policy(e->l, &list, &so, name, &rc, e->err))
        rc = measure(e, name, &so);
    for (size_t i = 0; i < sizeof single / sizeof single[0] && e->n_policies != 1; i++)
        json_object_del(e->result, single[i]);
    if (!rc && e->n_policies == 0)
        rc = lab_fail(e->err, KVD_E_ARG, "no policy to measure");
    return rc;
}

static int read_text(evaluation *e)
{
    const lab *l = e->l;
    int64_t n;
    if (!l->text)
        return lab_fail(e->err, KVD_E_ARG, "perplexity needs a text");
    if (e->n_chunk < 2 || e->n_chunk > l->info.trained_context_tokens)
        return lab_fail(e->err, KVD_E_ARG, "chunks of %lld tokens: a chunk is 2 to %lld", (long long)e->n_chunk, (long long)l->info.trained_context_tokens);
    if (e->first_scored < 1 || e->first_scored >= e->n_chunk)
        return lab_fail(e->err, KVD_E_ARG, "scored from token %lld of chunks of %lld: from 1 to %lld", (long long)e->first_scored, (long long)e->n_chunk,
                        (long long)e->n_chunk - 1);
    int rc = kvd_tokenize(l->m, l->text, l->n_text, KVD_TOKENIZE_BOS, &e->ids, &n, e->err);
    if (rc)
        return rc;
    e->n_chunks = n / e->n_chunk;
    if (e->n_chunks == 0)
        return lab_fail(e->err, KVD_E_ENCODING, "the text has %lld tokens, a chunk is %lld", (long long)n, (long long)e->n_chunk);
    int64_t most = l->limit ? l->limit : l->quick ? 2 : e->n_chunks;
    lab_setting(e->result, "text_chunks", json_integer((json_int_t)e->n_chunks));
    e->n_chunks = most < e->n_chunks ? most : e->n_chunks;
    e->chunk = lab_alloc(e->n_chunk, sizeof *e->chunk, e->err);
    e->nll = lab_alloc(e->n_chunks * (e->n_chunk - e->first_scored), sizeof *e->nll, e->err);
    return e->chunk && e->nll ? 0 : KVD_E_NOMEM;
}

int lab_perplexity(const lab *l, json_t *result, kvd_error *err)
{
    evaluation e = {.l = l, .result = result, .err = err, .n_chunk = l->chunk_tokens ? l->chunk_tokens : 512};
    e.first_scored = l->first_scored ? l->first_scored : e.n_chunk / 2 + 1;
    int rc = read_text(&e);
    if (!rc) {
        lab_setting(result, "chunks", json_integer((json_int_t)e.n_chunks));
        lab_setting(result, "chunk_tokens", json_integer((json_int_t)e.n_chunk));
        lab_setting(result, "first_scored", json_integer((json_int_t)e.first_scored));
        lab_setting(result, "bos", json_boolean(kvd_tokenize_adds_bos(l->m)));
        lab_note(result, "Chunks of %lld tokens from the start of the text, each on its own%s; scored are the predictions of tokens %lld to %lld of each (the first token is 0). This is llama.cpp's rule for 512 and 257.",
                 (long long)e.n_chunk, kvd_tokenize_adds_bos(l->m) ? ", with BOS in place of its first token" : "", (long long)e.first_scored, (long long)e.n_chunk - 1);
        lab_note(result, "full and kv-direct are fed in two halves, so that kv-direct (as listed, nothing kept: B = 0) rebuilds the first half in the second pass. Policies that forget are fed token by token: each prediction sees B positions and no more.");
        lab_note(result, "The standard error is that of a mean of independent tokens, which neighbouring tokens are not; between policies on the same text it overstates the noise.");
        rc = all_policies(&e);
    }
    if (!rc && e.n_policies > 1)
        lab_plot(result, "perplexity", "Perplexity by policy", "bars", "perplexity", "policy", "perplexity", NULL, NULL, LAB_LOG_Y);
    kvd_ids_free(e.ids);
    free(e.chunk);
    free(e.nll);
    free(e.full);
    return rc;
}
