/* kvd plan: before any weights are read, what fits and how fast each tier would be. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"
#include "lab/whole_file.h"

/* Budgets of the curve, as parts of full KV. */
static const int percents[] = {100, 75, 50, 35, 25, 15, 10, 7, 5, 3, 2};
enum { N_PERCENTS = sizeof percents / sizeof percents[0] };

typedef struct {
    const cli *c;
    kvd_model *m;
    kvd_rates rates;
    int64_t n_prompt, n_new, budget, full_bytes;
} planning;

static bool tier(const planning *p, int64_t budget, int i, kvd_tier_plan *t)
{
    return kvd_plan_tier(p->m, &p->c->so, &p->rates, p->n_prompt, p->n_new, budget, i, t);
}

static json_t *tiers_json(const planning *p, int64_t budget)
{
    json_t *a = json_array();
    kvd_tier_plan t;
    for (int i = 0; tier(p, budget, i, &t); i++)
        json_array_append_new(a, json_pack("{s:s, s:b, s:b, s:I, s:I, s:I, s:f, s:f}", "tier", t.name, "fits", t.fits, "chosen", t.chosen,
                                           "need_bytes", (json_int_t)t.need_bytes, "max_tokens", (json_int_t)t.max_tokens,
                                           "resident_tokens", (json_int_t)t.resident_tokens, "prefill_tokens_per_s",
                                           t.prefill_tokens_per_s, "decode_tokens_per_s", t.decode_tokens_per_s));
    return a;
}

static int print_json(const planning *p, const kvd_plan *bytes)
{
    json_t *curve = json_array();
    for (int i = 0; i < N_PERCENTS; i++) {
        int64_t budget = p->full_bytes * percents[i] / 100;
        json_array_append_new(curve, json_pack("{s:i, s:I, s:o}", "percent", percents[i], "budget_bytes", (json_int_t)budget, "tiers",
                                               tiers_json(p, budget)));
    }
    json_t *o = json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:o, s:o}", "context_tokens", (json_int_t)(p->n_prompt + p->n_new),
                          "budget_bytes", (json_int_t)p->budget, "full_bytes", (json_int_t)p->full_bytes, "kv_bytes_per_token",
                          (json_int_t)bytes->kv_bytes_per_token, "evicted_bytes_per_token", (json_int_t)bytes->evicted_bytes_per_token,
                          "residual_bytes_per_token", (json_int_t)bytes->residual_bytes_per_token, "least_bytes",
                          (json_int_t)bytes->least_bytes, "tiers", tiers_json(p, p->budget), "curve", curve);
    json_object_set_new(o, "rates", json_pack("{s:f, s:f, s:f, s:f}", "decode_tokens_per_s", 1 / (p->rates.rows_s[0] + p->rates.head_s),
                                              "prefill_tokens_per_s", (double)p->rates.rows[KVD_RATE_POINTS - 1] / p->rates.rows_s[KVD_RATE_POINTS - 1],
                                              "disk_read_bytes_per_s", p->rates.disk_read_bytes_s, "disk_write_bytes_per_s",
                                              p->rates.disk_write_bytes_s));
    return cli_print_json(o);
}

static void print_tiers(const planning *p, const kvd_plan *b)
{
    char a[32], d[32];
    kvd_tier_plan t;
    printf("context                %lld tokens (prompt %lld, new %lld), budget %s\n", (long long)(p->n_prompt + p->n_new),
           (long long)p->n_prompt, (long long)p->n_new, cli_size(p->budget, a));
    printf("a resident token       %.1f KB of K and V\n", (double)b->kv_bytes_per_token / 1024);
    printf("an evicted token       recompute: 4 B between passes, %.1f KB in one; disk: %.1f KB on disk\n",
           (double)b->evicted_bytes_per_token / 1024, (double)b->kv_bytes_per_token / 1024);
    printf("this machine           decode %.0f/s, prefill %.0f/s without context", 1 / (p->rates.rows_s[0] + p->rates.head_s),
           (double)p->rates.rows[KVD_RATE_POINTS - 1] / p->rates.rows_s[KVD_RATE_POINTS - 1]);
    if (p->rates.disk_read_bytes_s > 0)
        printf("; disk read %s/s, write %s/s", cli_size((int64_t)p->rates.disk_read_bytes_s, a), cli_size((int64_t)p->rates.disk_write_bytes_s, d));
    printf("\n\n%-11s %12s %10s %10s %12s %12s\n", "tier", "needs", "T_max", "resident", "prefill t/s", "decode t/s");
    for (int i = 0; tier(p, p->budget, i, &t); i++) {
        printf("%-11s %12s %10lld ", t.name, cli_size(t.need_bytes, a), (long long)t.max_tokens);
        if (t.fits)
            printf("%10lld %12.1f %12.1f%s\n", (long long)t.resident_tokens, t.prefill_tokens_per_s, t.decode_tokens_per_s, t.chosen ? "  <- auto" : "");
        else
            printf("%10s\n", i < 2 || p->rates.disk_read_bytes_s > 0 ? "does not fit" : p->c->so.spill_dir ? "no disk with room there" : "no folder (--spill-dir)");
    }
}

static void print_curve(const planning *p, FILE *out, const char *separator)
{
    kvd_tier_plan t;
    fprintf(out, "percent%sbudget_bytes", separator);
    for (int i = 0; tier(p, p->full_bytes, i, &t); i++)
        fprintf(out, "%s%s", separator, t.name);
    fputc('\n', out);
    for (int k = 0; k < N_PERCENTS; k++) {
        int64_t budget = p->full_bytes * percents[k] / 100;
        fprintf(out, "%d%s%lld", percents[k], separator, (long long)budget);
        for (int i = 0; tier(p, budget, i, &t); i++)
            if (t.fits)
                fprintf(out, "%s%.2f%s", separator, t.decode_tokens_per_s, t.chosen && *separator == ' ' ? "*" : "");
            else
                fprintf(out, "%s-", separator);
        fputc('\n', out);
    }
}

static const char *const drawings[] = {".svg", ".png", NULL};

/* The curve as a table with a row for each tier and budget, and a plot of it. */
static int draw_curve(const planning *p)
{
    static const lab_column columns[] = {{"percent", "budget, % of full KV", 0}, {"tier", "tier", 0}, {"rate", "tokens a second while generating", 1}, {NULL, NULL, 0}};
    json_t *result = json_pack("{s:[], s:[]}", "tables", "plots"), *table = lab_table(result, "curve", "", columns);
    char title[96];
    kvd_tier_plan t;
    for (int k = 0; k < N_PERCENTS; k++)
        for (int i = 0; tier(p, p->full_bytes * percents[k] / 100, i, &t); i++)
            lab_row(table, json_pack("[i, s, o]", percents[k], t.name, t.fits ? json_real(t.decode_tokens_per_s) : json_null()));
    snprintf(title, sizeof title, "Predicted speed by budget, %lld tokens of context", (long long)(p->n_prompt + p->n_new));
    lab_plot(result, "curve", title, "lines", "curve", "percent", "rate", "tier", NULL, LAB_LOG_X | LAB_LOG_Y);
    int code = cli_draw(result, json_array_get(json_object_get(result, "plots"), 0), p->c->output);
    json_decref(result);
    return code;
}

/* -o: the curve as a drawing or as TSV. */
static int write_curve(const planning *p)
{
    if (!p->c->output)
        return 0;
    if (cli_ending(p->c->output, drawings) >= 0)
        return draw_curve(p);
    lab_file w;
    kvd_error err;
    int rc = lab_file_begin(&w, p->c->output, &err);
    if (!rc) {
        print_curve(p, w.f, "\t");
        rc = lab_file_end(&w, true, &err);
    }
    return rc ? cli_fail(EXIT_BAD_FILE, "%s: %s", p->c->output, err.message) : 0;
}

static int print_all(const planning *p, const kvd_plan *b)
{
    print_tiers(p, b);
    printf("\ndecode tokens/s by budget (percent of full KV; * auto)\n");
    print_curve(p, stdout, "  ");
    return cli_close_stdout();
}

int cmd_plan(int argc, char **argv)
{
    cli c;
    int rc = cli_parse(&c, argc, argv, "plan", OPT_MODEL | OPT_MACHINE | OPT_MEMORY | OPT_NUMBERS | OPT_PLAN | OPT_JSON | OPT_OUTPUT, 0);
    if (rc)
        return rc;
    if (c.context < 1)
        return cli_fail(EXIT_USAGE, "no length: --context N");
    if (cli_lossy(c.so.policy))
        return cli_fail(EXIT_USAGE, "plan is of exact policies: a lossy one keeps --kv-tokens and needs no tier");
    kvd_error err;
    if (c.output && lab_file_check(c.output, &err)) /* before the machine is measured */
        return cli_fail(EXIT_BAD_FILE, "-o %s: %s", c.output, err.message);
    if (c.output && cli_ending(c.output, drawings) >= 0 && !lab_can_draw())
        return cli_fail(EXIT_RESOURCES, "-o %s: no gnuplot in PATH to draw it (another name: TSV)", c.output);
    if ((rc = cli_spill_dir(&c))) /* also the folder of the rates */
        return rc;
    planning p = {.c = &c};
    int64_t budget = c.mo.kv_budget_bytes;
    c.mo.kv_budget_bytes = 0;
    if (kvd_model_load_synthetic(&p.m, c.model, &c.mo, &err))
        return cli_file_error(c.model, &err);
    kvd_model_info info;
    kvd_model_get_info(p.m, &info);
    if (c.context > info.trained_context_tokens)
        rc = cli_fail(EXIT_USAGE, "%lld tokens do not fit the trained context of %lld", (long long)c.context, (long long)info.trained_context_tokens);
    else if (!(rc = cli_rates(&c, p.m, &p.rates))) {
        kvd_plan b;
        kvd_session_options full = c.so;
        full.policy = KVD_POLICY_FULL;
        full.kv_tokens = -1;
        p.n_new = c.n_given && c.go.max_tokens > 0 ? c.go.max_tokens : 100;
        p.n_new = p.n_new < c.context ? p.n_new : c.context - 1;
        p.n_prompt = c.context - p.n_new;
        p.budget = c.budget_given ? budget : kvd_memory_available() / 2;
        kvd_plan_session(p.m, &full, p.n_prompt, c.context, 0, &b);
        p.full_bytes = b.full_bytes;
        kvd_plan_session(p.m, &c.so, p.n_prompt, c.context, p.budget, &b);
        if (!(rc = write_curve(&p)))
            rc = c.json ? print_json(&p, &b) : print_all(&p, &b);
    }
    kvd_model_free(&p.m);
    return rc;
}
