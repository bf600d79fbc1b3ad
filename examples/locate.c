/* Which layer carries a fact? Causal patching, layer by layer.
 *
 * usage: locate MODEL.gguf PROMPT OTHER ANSWER
 *        locate model.gguf "The capital of France is" "The capital of Italy is" " Paris"
 *
 * Two prompts of the same number of tokens that differ in their subject. OTHER is run
 * once for each layer with PROMPT's residual put in where it enters that layer, either
 * at the tokens that differ or at the last one, and the probability of ANSWER's first
 * token is printed. As long as the fact is still with the subject, the left column is
 * high; once attention has carried it to where the next token is predicted, the right
 * one is. At layer 0 the left column is PROMPT's own probability to the bit, in the
 * last row the right one is. Needs the public API and nothing else. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvd/kvd.h"
#include "kvd/kvd_lab.h"

typedef struct {
    int64_t n_layers, d, n; /* n: tokens of a prompt */
    int32_t *prompt, *other;
    float *h;               /* [n_layers + 1][n][d] of PROMPT */
    int layer;              /* where to put it, */
    bool subject;           /* at the tokens that differ, or at the last one */
} experiment;

static void keep(void *ctx, int layer, int64_t pos, float *h)
{
    experiment *e = ctx;
    memcpy(e->h + (layer * e->n + pos) * e->d, h, (size_t)e->d * sizeof *h);
}

static void put(void *ctx, int layer, int64_t pos, float *h)
{
    experiment *e = ctx;
    if (layer == e->layer && (e->subject ? e->prompt[pos] != e->other[pos] : pos == e->n - 1))
        memcpy(h, e->h + (layer * e->n + pos) * e->d, (size_t)e->d * sizeof *h);
}

/* Probability of a token behind ids, under taps; negative: failed. */
static double probability(kvd_session *s, const kvd_lab_taps *taps, const int32_t *ids, int64_t n, int32_t token, int64_t n_vocab,
                          kvd_error *err)
{
    const float *logits;
    double sum = 0;
    kvd_lab_set_taps(s, taps);
    if (kvd_session_rewind(s, 0, err) || kvd_session_feed(s, ids, n, &logits, err))
        return -1;
    float max = logits[0];
    for (int64_t i = 1; i < n_vocab; i++)
        max = logits[i] > max ? logits[i] : max;
    for (int64_t i = 0; i < n_vocab; i++)
        sum += exp((double)logits[i] - (double)max);
    return exp((double)logits[token] - (double)max) / sum;
}

static int locate(experiment *e, kvd_session *s, int32_t answer, int64_t n_vocab, kvd_error *err)
{
    double clean = probability(s, &(kvd_lab_taps){.ctx = e, .residual = keep}, e->prompt, e->n, answer, n_vocab, err);
    double plain = clean < 0 ? -1 : probability(s, NULL, e->other, e->n, answer, n_vocab, err);
    if (plain < 0)
        return err->code;
    printf("probability of the answer: %.9g after PROMPT, %.9g after OTHER\n\nlayer  subject patched  last token patched\n", clean, plain);
    int handed_over = -1;
    for (e->layer = 0; e->layer <= e->n_layers; e->layer++) {
        double p[2];
        for (int i = 0; i < 2; i++) {
            e->subject = i == 0;
            p[i] = probability(s, &(kvd_lab_taps){.ctx = e, .residual = put}, e->other, e->n, answer, n_vocab, err);
            if (p[i] < 0)
                return err->code;
        }
        if (handed_over < 0 && p[1] > p[0])
            handed_over = e->layer;
        printf("%5d  %15.9g  %18.9g\n", e->layer, p[0], p[1]);
    }
    if (clean <= plain)
        printf("\nPROMPT does not make the answer likelier than OTHER does: there is nothing to find\n");
    else
        printf("\nthe fact is with the subject below layer %d, and with the last token from there on\n", handed_over);
    return 0;
}

int main(int argc, char **argv)
{
    kvd_error err = {0};
    kvd_model *model = NULL;
    kvd_session *session = NULL;
    int32_t *answer = NULL;
    int64_t n_other, n_answer;
    kvd_model_info info;
    experiment e = {0};

    if (argc != 5) {
        fprintf(stderr, "usage: locate MODEL.gguf PROMPT OTHER ANSWER\n");
        return 2;
    }
    int rc = kvd_model_load(&model, argv[1], NULL, &err);
    rc = rc ? rc : kvd_tokenize(model, argv[2], strlen(argv[2]), KVD_TOKENIZE_BOS, &e.prompt, &e.n, &err);
    rc = rc ? rc : kvd_tokenize(model, argv[3], strlen(argv[3]), KVD_TOKENIZE_BOS, &e.other, &n_other, &err);
    rc = rc ? rc : kvd_tokenize(model, argv[4], strlen(argv[4]), 0, &answer, &n_answer, &err);
    rc = rc ? rc : kvd_session_create(&session, model, NULL, &err);
    if (!rc && (e.n != n_other || e.n == 0 || n_answer == 0)) {
        rc = KVD_E_ARG;
        snprintf(err.message, sizeof err.message, "the prompts have %lld and %lld tokens, the answer %lld: the first two must be equal, none 0",
                 (long long)e.n, (long long)n_other, (long long)n_answer);
    }
    if (!rc) {
        kvd_model_get_info(model, &info);
        e.n_layers = info.n_layers;
        e.d = info.d_model;
        e.h = malloc((size_t)((e.n_layers + 1) * e.n * e.d) * sizeof *e.h);
        rc = e.h ? locate(&e, session, answer[0], info.n_vocab, &err) : KVD_E_NOMEM;
    }
    if (rc)
        fprintf(stderr, "locate: %s\n", err.message[0] ? err.message : kvd_error_text(rc));

    free(e.h);
    kvd_session_free(&session);
    kvd_ids_free(e.prompt);
    kvd_ids_free(e.other);
    kvd_ids_free(answer);
    kvd_model_free(&model);
    return kvd_error_exit(rc);
}
