/* kvd bench: prefill and decode rates in the manner of llama-bench. A test is
 * "pp512" (feed 512 tokens at once), "tg64" (64 tokens one by one), each at a
 * depth of context ("@d4096"); one warm-up, then repetitions: mean and spread. */
#define _GNU_SOURCE
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"

enum { MAX_LIST = 16 };

typedef struct {
    int64_t value[MAX_LIST];
    int n;
} list;

static int parse_list(const char *text, const char *absent, int64_t max, list *l)
{
    l->n = 0;
    for (const char *p = text ? text : absent; *p;) {
        char *end;
        errno = 0;
        long long v = strtoll(p, &end, 10);
        if (end == p || errno || v < 0 || v > max || l->n == MAX_LIST || (*end && *end != ','))
            return cli_fail(EXIT_USAGE, "\"%.60s\" is not a list of numbers in 0..%lld", text ? text : absent, (long long)max);
        l->value[l->n++] = v;
        p = *end ? end + 1 : end;
    }
    return 0;
}

typedef struct {
    kvd_model *m;
    kvd_session *s;
    int32_t *ids;
    kvd_error err;
} bench;

/* One repetition from a context of `depth`: seconds, or a negative code. */
static double repetition(bench *b, int64_t depth, int64_t n, bool decode)
{
    int rc = kvd_session_rewind(b->s, depth, &b->err);
    double t0 = cli_seconds();
    if (!decode)
        rc = rc ? rc : kvd_session_feed(b->s, b->ids + depth, n, NULL, &b->err);
    for (int64_t i = 0; decode && !rc && i < n; i++)
        rc = kvd_session_feed(b->s, b->ids + depth + i, 1, NULL, &b->err);
    return rc ? rc : cli_seconds() - t0;
}

typedef struct {
    char name[48];
    double mean, stddev, gmac, gbytes;
} row;

static int run_test(bench *b, const cli *c, int64_t depth, int64_t n, bool decode, row *out)
{
    double sum = 0, squares = 0, seconds = 0;
    int rc = kvd_session_rewind(b->s, 0, &b->err);
    if (!rc && depth)
        rc = kvd_session_feed(b->s, b->ids, depth, NULL, &b->err);
    if (rc)
        return cli_error("", &b->err);
    if (repetition(b, depth, decode && n > 8 ? 8 : n, decode) < 0)
        return cli_error("", &b->err);
    for (int64_t i = 0; i < c->repetitions; i++) {
        double t = repetition(b, depth, n, decode);
        if (cli_interrupted())
            return EXIT_INTERRUPTED;
        if (t < 0)
            return cli_error("", &b->err);
        sum += (double)n / t;
        squares += (double)n / t * (double)n / t;
        seconds += t;
    }
    double r = (double)c->repetitions, mean = sum / r, var = r > 1 ? (squares - r * mean * mean) / (r - 1) : 0;
    kvd_model_cost cost;
    kvd_plan plan;
    kvd_model_get_cost(b->m, &cost);
    kvd_plan_session(b->m, &c->so, 0, 1, 0, &plan);
    double heads = decode ? (double)n : 1, per_s = r / seconds;
    *out = (row){.mean = mean, .stddev = var > 0 ? sqrt(var) : 0};
    out->gmac = 1e-9 * per_s * ((double)n * (double)cost.layer_macs + heads * (double)cost.head_macs);
    if (decode) /* weights once a token, and the K and V of what is behind */
        out->gbytes = 1e-9 * per_s * (double)n * ((double)(cost.layer_bytes + cost.head_bytes) +
                                                  ((double)depth + (double)n / 2) * (double)plan.kv_bytes_per_token);
    int len = snprintf(out->name, sizeof out->name, "%s%lld", decode ? "tg" : "pp", (long long)n);
    if (depth)
        snprintf(out->name + len, sizeof out->name - (size_t)len, "@d%lld", (long long)depth);
    return 0;
}

static json_t *profile_json(const kvd_model *m)
{
    json_t *o = json_object();
    const char *stage;
    double s;
    for (int i = 0; kvd_model_profile(m, i, &stage, &s); i++)
        json_object_set_new(o, stage, json_real(s));
    return o;
}

static void print_profile(const kvd_model *m)
{
    const char *stage;
    double s, sum = 0;
    for (int i = 0; kvd_model_profile(m, i, &stage, &s); i++)
        sum += s;
    for (int i = 0; kvd_model_profile(m, i, &stage, &s); i++)
        printf("    %-20s %8.3f s %5.1f %%\n", stage, s, sum > 0 ? 100 * s / sum : 0);
}

static int run_all(bench *b, const cli *c, const list *pp, const list *tg, const list *depth)
{
    json_t *results = json_array();
    int rc = 0;
    if (!c->json)
        printf("%-18s %12s %10s %9s %9s\n", "test", "tokens/s", "+-", "GMAC/s", "GB/s");
    for (int d = 0; d < depth->n; d++)
        for (int i = 0; !rc && i < pp->n + tg->n; i++) {
            bool decode = i >= pp->n;
            int64_t n = decode ? tg->value[i - pp->n] : pp->value[i];
            row r;
            if (!n)
                continue;
            kvd_model_set_profile(b->m, c->profile);
            if ((rc = run_test(b, c, depth->value[d], n, decode, &r)))
                break;
            if (c->json) {
                json_t *o = json_pack("{s:s, s:f, s:f, s:f, s:f}", "test", r.name, "tokens_per_s", r.mean, "stddev", r.stddev,
                                      "gmac_per_s", r.gmac, "gbyte_per_s", r.gbytes);
                if (c->profile)
                    json_object_set_new(o, "profile_s", profile_json(b->m));
                json_array_append_new(results, o);
                continue;
            }
            cli_progress_clear();
            printf("%-18s %12.2f %10.2f %9.1f %9.1f\n", r.name, r.mean, r.stddev, r.gmac, r.gbytes);
            if (c->profile)
                print_profile(b->m);
            fflush(stdout);
        }
    if (!rc && c->json) {
        kvd_model_info info;
        kvd_model_get_info(b->m, &info);
        json_t *o = json_pack("{s:o, s:o, s:s, s:i, s:I}", "results", results, "model", cli_json_model(b->m), "cpu", info.isa,
                              "threads", info.n_threads, "repetitions", (json_int_t)c->repetitions);
        return cli_print_json(o);
    }
    json_decref(results);
    return rc ? rc : cli_close_stdout();
}

static int64_t greatest(const list *l)
{
    int64_t n = 0;
    for (int i = 0; i < l->n; i++)
        n = l->value[i] > n ? l->value[i] : n;
    return n;
}

int cmd_bench(int argc, char **argv)
{
    cli c;
    list pp, tg, depth;
    int rc = cli_parse(&c, argc, argv, "bench", OPT_MODEL | OPT_MACHINE | OPT_MEMORY | OPT_NUMBERS | OPT_BENCH | OPT_JSON | OPT_OUTPUT, 0);
    if (rc || (rc = parse_list(c.prompt, "512", 1 << 20, &pp)) || (rc = parse_list(c.new_tokens, "64", 1 << 20, &tg)) ||
        (rc = parse_list(c.depths, "0", 1 << 20, &depth)))
        return rc;
    bench b = {0};
    cli_progress_allow(!c.quiet);
    if ((rc = cli_spill_dir(&c)) || (rc = cli_load(&c, true, &b.m)))
        return rc;
    cli_catch_interrupt();
    kvd_model_info info;
    kvd_model_get_info(b.m, &info);
    int64_t n = greatest(&depth) + (greatest(&pp) > greatest(&tg) ? greatest(&pp) : greatest(&tg));
    if (n > info.trained_context_tokens)
        rc = cli_fail(EXIT_USAGE, "%lld tokens do not fit the trained context of %lld", (long long)n, (long long)info.trained_context_tokens);
    else if (!(b.ids = malloc((size_t)(n + 1) * sizeof *b.ids)))
        rc = cli_fail(EXIT_RESOURCES, "out of memory");
    else if (kvd_session_create(&b.s, b.m, &c.so, &b.err))
        rc = cli_error("", &b.err);
    if (!rc) {
        uint32_t x = 1; /* any tokens do: no arithmetic depends on their values */
        for (int64_t i = 0; i < n; i++) {
            x = x * 1664525u + 1013904223u;
            b.ids[i] = (int32_t)(x >> 8) % (int32_t)info.n_vocab;
        }
        kvd_session_set_progress(b.s, cli_progress, NULL);
        rc = run_all(&b, &c, &pp, &tg, &depth);
    }
    kvd_session_free(&b.s);
    free(b.ids);
    kvd_model_free(&b.m);
    return rc;
}
