/* probe: logits and losses of token lists, for comparison with an independent
 * reference (tests/system/test_reference.py).
 *
 * usage: probe MODEL [--activations f32] [--kv-type f32] [--threads N] < LINES
 *
 * Each line of standard input is a list of token ids, separated by blanks, that
 * begins a session of its own. For each, one line of JSON:
 *   top8      [[id, logit], ...] of the last position, largest first
 *   argmax    the most likely id after each position
 *   mean_nll  mean of -ln p(token i | tokens before), i = 1 .. n - 1; null if n = 1
 *   mean_nll_257_511  the same over tokens 257 .. 511 (what `kvd eval` scores); or null
 * On the public API only. Exit 0, or 1 after one line on stderr. */
#define _GNU_SOURCE
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvd/kvd.h"

enum { TOP = 8, FIRST_SCORED = 257, LAST_SCORED = 511 };

typedef struct {
    const int32_t *ids;
    int64_t n, n_vocab;
    int32_t *argmax; /* [n] */
    int32_t top[TOP];
    float top_logit[TOP];
    double nll, nll_scored;
    int64_t n_nll, n_scored;
} line;

static int fail(const char *what, const char *why)
{
    fprintf(stderr, "probe: %s: %s\n", what, why);
    return 1;
}

/* The TOP largest, ties to the lower id: insertion into a sorted list. */
static void find_top(line *l, const float *logits)
{
    int have = 0;
    for (int64_t i = 0; i < l->n_vocab; i++) {
        int at = have;
        while (at > 0 && logits[i] > l->top_logit[at - 1])
            at--;
        if (at == TOP)
            continue;
        have += have < TOP;
        for (int j = have - 1; j > at; j--) {
            l->top[j] = l->top[j - 1];
            l->top_logit[j] = l->top_logit[j - 1];
        }
        l->top[at] = (int32_t)i;
        l->top_logit[at] = logits[i];
    }
    for (; have < TOP; have++)
        l->top[have] = -1;
}

static int on_logits(void *ctx, int64_t pos, const float *logits)
{
    line *l = ctx;
    int64_t best = 0, next = pos + 1;
    for (int64_t i = 1; i < l->n_vocab; i++)
        if (logits[i] > logits[best])
            best = i;
    l->argmax[pos] = (int32_t)best;
    if (next == l->n) {
        find_top(l, logits);
        return 0;
    }
    double sum = 0, max = (double)logits[best];
    for (int64_t i = 0; i < l->n_vocab; i++)
        sum += exp((double)logits[i] - max);
    double nll = max + log(sum) - (double)logits[l->ids[next]];
    l->nll += nll;
    l->n_nll++;
    if (next >= FIRST_SCORED && next <= LAST_SCORED) {
        l->nll_scored += nll;
        l->n_scored++;
    }
    return 0;
}

static void print_mean(const char *name, double sum, int64_t n)
{
    if (n)
        printf(", \"%s\": %.12g", name, sum / (double)n);
    else
        printf(", \"%s\": null", name);
}

static void print_line(const line *l)
{
    printf("{\"top8\": [");
    for (int i = 0; i < TOP && l->top[i] >= 0; i++)
        printf("%s[%d, %.9g]", i ? ", " : "", l->top[i], (double)l->top_logit[i]);
    printf("], \"argmax\": [");
    for (int64_t i = 0; i < l->n; i++)
        printf("%s%d", i ? ", " : "", l->argmax[i]);
    printf("]");
    print_mean("mean_nll", l->nll, l->n_nll);
    print_mean("mean_nll_257_511", l->nll_scored, l->n_scored);
    puts("}");
    fflush(stdout);
}

static int probe_ids(kvd_model *m, const kvd_session_options *o, const int32_t *ids, int64_t n)
{
    kvd_model_info info;
    kvd_session *s = NULL;
    kvd_error err;
    kvd_model_get_info(m, &info);
    line l = {.ids = ids, .n = n, .n_vocab = info.n_vocab, .argmax = malloc((size_t)n * sizeof(int32_t))};
    if (!l.argmax)
        return fail("ids", "out of memory");
    int rc = kvd_session_create(&s, m, o, &err);
    if (!rc)
        rc = kvd_session_feed_all(s, ids, n, n, on_logits, &l, &err);
    if (!rc)
        print_line(&l);
    kvd_session_free(&s);
    free(l.argmax);
    return rc ? fail("session", err.message) : 0;
}

/* One line of standard input as ids; *n is 0 at its end, -1 if malformed. */
static int32_t *read_ids(int64_t *n)
{
    char *text = NULL;
    size_t size = 0;
    int32_t *ids = NULL;
    *n = 0;
    if (getline(&text, &size, stdin) < 0) {
        free(text);
        return NULL;
    }
    for (char *p = text, *end;; p = end) {
        long v = strtol(p, &end, 10);
        if (end == p) {
            if (*n == 0 || p[strspn(p, " \t\r\n")])
                *n = -1;
            break;
        }
        if ((*n & (*n - 1)) == 0) { /* double it at powers of two */
            int32_t *more = realloc(ids, sizeof *ids * (size_t)(*n ? 2 * *n : 1));
            if (!more) {
                *n = -1;
                break;
            }
            ids = more;
        }
        ids[(*n)++] = v < 0 || v > INT32_MAX ? -1 : (int32_t)v;
    }
    free(text);
    return ids;
}

int main(int argc, char **argv)
{
    kvd_model_options mo;
    kvd_session_options so;
    kvd_model *m = NULL;
    kvd_error err;
    kvd_model_options_defaults(&mo);
    kvd_session_options_defaults(&so);
    if (argc < 2)
        return fail("usage", "probe MODEL [--activations f32] [--kv-type f32] [--threads N]");
    for (int i = 2; i < argc; i += 2) {
        if (i + 1 < argc && !strcmp(argv[i], "--activations") && !strcmp(argv[i + 1], "f32"))
            mo.activations_f32 = true;
        else if (i + 1 < argc && !strcmp(argv[i], "--kv-type") && !strcmp(argv[i + 1], "f32"))
            so.kv_type = KVD_TYPE_F32;
        else if (i + 1 < argc && !strcmp(argv[i], "--threads"))
            mo.n_threads = atoi(argv[i + 1]);
        else
            return fail("unknown option", argv[i]);
    }
    if (kvd_model_load(&m, argv[1], &mo, &err))
        return fail(argv[1], err.message);
    int rc = 0;
    int64_t n;
    for (int32_t *ids; !rc && (ids = read_ids(&n), n); free(ids))
        rc = n < 0 ? fail("standard input", "expected token ids separated by blanks") : probe_ids(m, &so, ids, n);
    kvd_model_free(&m);
    return rc;
}
