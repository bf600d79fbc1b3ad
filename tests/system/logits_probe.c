/* For test_reference.py: what the public API says of a list of token ids. Prints
 * JSON: the eight best logits of the last position and the mean loss of every
 * token but the first.
 *
 * usage: logits_probe MODEL auto|f32 < IDS        ids as decimal numbers */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "kvd/kvd.h"

enum { MAX_IDS = 8192, BEST = 8 };

typedef struct {
    const int32_t *ids;
    int64_t n, n_vocab;
    double nll;
} probe;

static int on_logits(void *ctx, int64_t pos, const float *logits)
{
    probe *p = ctx;
    if (pos + 1 >= p->n)
        return 0;
    double max = (double)logits[0], sum = 0;
    for (int64_t i = 1; i < p->n_vocab; i++)
        max = fmax(max, (double)logits[i]);
    for (int64_t i = 0; i < p->n_vocab; i++)
        sum += exp((double)logits[i] - max);
    p->nll += max + log(sum) - (double)logits[p->ids[pos + 1]];
    return 0;
}

static void print_best(const float *logits, int64_t n_vocab)
{
    int64_t best[BEST];
    for (int k = 0; k < BEST; k++) {
        best[k] = -1;
        for (int64_t i = 0; i < n_vocab; i++) {
            bool taken = false;
            for (int j = 0; j < k; j++)
                taken |= best[j] == i;
            if (!taken && (best[k] < 0 || logits[i] > logits[best[k]]))
                best[k] = i;
        }
        printf("%s[%lld, %.6f]", k ? ", " : "", (long long)best[k], (double)logits[best[k]]);
    }
}

int main(int argc, char **argv)
{
    static int32_t ids[MAX_IDS];
    kvd_model *m = NULL;
    kvd_session *s = NULL;
    kvd_model_options o;
    kvd_model_info info;
    kvd_error err = {0};
    int64_t n = 0;
    const float *logits;

    if (argc != 3)
        return 2;
    kvd_model_options_defaults(&o);
    o.activations_f32 = !strcmp(argv[2], "f32");
    while (n < MAX_IDS && scanf("%d", &ids[n]) == 1)
        n++;
    int rc = kvd_model_load(&m, argv[1], &o, &err);
    if (!rc)
        rc = kvd_session_create(&s, m, NULL, &err);
    if (!rc) {
        kvd_model_get_info(m, &info);
        probe p = {.ids = ids, .n = n, .n_vocab = info.n_vocab};
        rc = kvd_session_feed_all(s, ids, n - 1, n - 1, on_logits, &p, &err);
        if (!rc && !(rc = kvd_session_feed(s, ids + n - 1, 1, &logits, &err))) {
            printf("{\"mean_nll\": %.9f, \"top8\": [", p.nll / (double)(n - 1));
            print_best(logits, info.n_vocab);
            printf("]}\n");
        }
    }
    if (rc)
        fprintf(stderr, "logits_probe: %s\n", err.message);
    kvd_session_free(&s);
    kvd_model_free(&m);
    return rc ? kvd_error_exit(rc) : 0;
}
