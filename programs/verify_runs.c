/* Parts 2 and 3 of kvd verify: whole runs against each other.
 *
 * Part 2 is section 5.2 of the paper: greedy tokens from a cache against tokens
 * for each of which the whole prefix is computed from scratch, by a session that
 * has seen nothing. It compares all bits of the logits, not only the tokens.
 *
 * Part 3 holds receipts (hashes of tokens and all logits) of the same generation
 * under other settings against each other: what is kept of the KV cache, rows
 * computed together, threads, instruction sets. Types of K, V and stream change the
 * bits; each of them has a receipt of its own, a column. Settings other than what is
 * kept are tried with a cache that evicts, so that they are tried together. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "verify.h"

/* ---- part 2: cached against from scratch ---------------------------------------------- */

static int32_t best(const float *logits, int64_t n)
{
    int64_t b = 0;
    for (int64_t i = 1; i < n; i++)
        if (logits[i] > logits[b])
            b = i;
    return (int32_t)b;
}

typedef struct {
    int64_t n_prompt, n_tokens;
    int64_t same_tokens, same_logits;
    int32_t *ids[2]; /* [n_prompt + n_tokens] of the cached run, and from scratch */
    double cached_s, scratch_s;
} greedy;

/* One token both ways; *cached stays, a new session does the other. */
static int greedy_step(verify *v, greedy *g, kvd_session *cached, int64_t step, kvd_error *err)
{
    const float *a, *b;
    kvd_session *fresh = NULL;
    int64_t n = g->n_prompt + step, old = kvd_session_tokens(cached, NULL);
    double t0 = cli_seconds();
    int rc = kvd_session_feed(cached, g->ids[0] + old, n - old, &a, err);
    double t1 = cli_seconds();
    rc = rc ? rc : kvd_session_create(&fresh, v->m, NULL, err);
    if (!rc) {
        kvd_session_set_progress(fresh, verify_on_pass, NULL);
        rc = kvd_session_feed(fresh, g->ids[1], n, &b, err);
    }
    if (!rc) {
        g->cached_s += t1 - t0;
        g->scratch_s += cli_seconds() - t1;
        g->ids[0][n] = best(a, v->info.n_vocab);
        g->ids[1][n] = best(b, v->info.n_vocab);
        g->same_tokens += g->ids[0][n] == g->ids[1][n];
        g->same_logits += !memcmp(a, b, (size_t)v->info.n_vocab * sizeof *a);
    }
    kvd_session_free(&fresh);
    return rc;
}

static int greedy_run(verify *v, greedy *g, kvd_error *err)
{
    kvd_session *s = NULL;
    int rc = kvd_session_create(&s, v->m, NULL, err);
    if (!rc)
        kvd_session_set_progress(s, verify_on_pass, NULL);
    for (int64_t i = 0; !rc && i < g->n_tokens; i++) {
        verify_progress(v, "2 of 3: token %lld of %lld", (long long)i + 1, (long long)g->n_tokens);
        rc = greedy_step(v, g, s, i, err);
    }
    kvd_session_free(&s);
    return rc;
}

static void greedy_report(verify *v, const greedy *g, const kvd_error *err, int rc)
{
    json_t *o = json_pack("{s:I, s:I, s:I, s:I, s:f, s:f}", "prompt_tokens", (json_int_t)g->n_prompt, "tokens",
                          (json_int_t)g->n_tokens, "equal_tokens", (json_int_t)g->same_tokens, "equal_logits",
                          (json_int_t)g->same_logits, "cached_s", g->cached_s, "scratch_s", g->scratch_s);
    json_object_set_new(v->out, "generation", o);
    verify_say(v, "\n2. %lld greedy tokens after a prompt of %lld, cached against from scratch (paper, 5.2)\n",
               (long long)g->n_tokens, (long long)g->n_prompt);
    if (rc) {
        v->numeric_errors++;
        json_object_set_new(o, "numeric_error", json_string(err->message));
        verify_say(v, "   numeric error: %s\n", err->message);
        return;
    }
    json_object_set_new(o, "ids", cli_json_ids(g->ids[0] + g->n_prompt, g->n_tokens));
    int64_t bad = (g->same_tokens != g->n_tokens) + (g->same_logits != g->n_tokens);
    v->mismatches += bad;
    v->matches += 2 - bad;
    verify_say(v, "   tokens that agree          %lld of %lld%s\n   logits equal in every bit  %lld of %lld%s\n",
               (long long)g->same_tokens, (long long)g->n_tokens, g->same_tokens == g->n_tokens ? "" : "  DIFFERS",
               (long long)g->same_logits, (long long)g->n_tokens, g->same_logits == g->n_tokens ? "" : "  DIFFERS");
    verify_say(v, "   time                       %.2f s cached, %.2f s from scratch (%.1fx)\n", g->cached_s,
               g->scratch_s, g->cached_s > 0 ? g->scratch_s / g->cached_s : 0);
}

int verify_generation(verify *v)
{
    int64_t most = verify_positions(v), prompt = most / 2 < 32 ? (most + 1) / 2 : 32;
    greedy g = {.n_prompt = prompt, .n_tokens = most - prompt < 30 ? most - prompt : 30};
    kvd_error err = {0};
    if (g.n_tokens < 1)
        return 0;
    size_t n = (size_t)(g.n_prompt + g.n_tokens);
    int32_t *ids = malloc(2 * n * sizeof *ids);
    if (!ids)
        return cli_fail(EXIT_RESOURCES, "out of memory: token ids");
    g.ids[0] = ids;
    g.ids[1] = ids + n;
    for (int i = 0; i < 2; i++)
        memcpy(g.ids[i], v->ids, (size_t)g.n_prompt * sizeof *ids);
    int rc = greedy_run(v, &g, &err), code = 0;
    if (rc && rc != KVD_E_NUMERIC)
        code = verify_error(rc, &err);
    else
        greedy_report(v, &g, &err, rc);
    free(ids);
    return code;
}

/* ---- part 3: receipts --------------------------------------------------------------------- */

enum { N_COLUMNS = 4, MAX_MEMORY = 8, MAX_ROWS = 64 };

/* Settings with bits of their own. */
static const struct {
    const char *name;
    kvd_float_type kv, stream;
} columns[N_COLUMNS] = {
    {"KV f16", KVD_TYPE_F16, KVD_TYPE_F32},
    {"KV bf16", KVD_TYPE_BF16, KVD_TYPE_F32},
    {"KV f32", KVD_TYPE_F32, KVD_TYPE_F32},
    {"bf16 stream", KVD_TYPE_F16, KVD_TYPE_BF16},
};

/* What is kept: all, B positions, or what a byte budget allows. */
enum { KEEP_ALL = -1, KEEP_BUDGET = -2 };

/* One line of the table: a way to load the model, and ways to keep K and V. */
typedef struct {
    kvd_model_options mo;
    int64_t keep[MAX_MEMORY]; /* B, or KEEP_* */
    int n_keep, n_columns;
    char label[80];
} row;

/* Lines with one prompt, and so with one receipt a column. The first is the reference. */
typedef struct {
    int64_t n_prompt, n_new;
    int n_columns, n_rows;
    row rows[MAX_ROWS];
    char receipt[N_COLUMNS][33]; /* "": not yet */
    bool numeric[N_COLUMNS];
    json_t *runs;
} group;

/* What came out of a line in one column. */
typedef struct {
    int n, same, numeric;
    int64_t recomputed;
} outcome;

static void keep_name(int64_t keep, char *buf, size_t size)
{
    if (keep == KEEP_ALL)
        snprintf(buf, size, "--policy full");
    else if (keep == KEEP_BUDGET)
        snprintf(buf, size, "--kv-budget (tight)");
    else
        snprintf(buf, size, "--kv-tokens %lld", (long long)keep);
}

/* A budget that holds the run but not all of its K and V; 0 if there is none. */
static int64_t tight_budget(const verify *v, const kvd_session_options *so, const group *g)
{
    kvd_plan p;
    kvd_plan_session(v->m, so, g->n_prompt, g->n_prompt + g->n_new, 0, &p);
    return p.least_bytes < p.full_bytes ? p.least_bytes + (p.full_bytes - p.least_bytes) / 4 : 0;
}

/* One run. 0 or a KVD_E_*; *stats of its session. */
static int generate(verify *v, const group *g, int column, int64_t keep, int64_t budget, char receipt[33],
                    kvd_session_stats *stats, kvd_error *err)
{
    kvd_session_options so;
    kvd_generate_options go;
    kvd_session *s = NULL;
    kvd_result r = {0};
    kvd_session_options_defaults(&so);
    kvd_generate_options_defaults(&go);
    so.kv_type = columns[column].kv;
    so.stream = columns[column].stream;
    so.policy = keep == KEEP_ALL ? KVD_POLICY_FULL : KVD_POLICY_KV_DIRECT;
    so.kv_tokens = keep >= 0 ? keep : -1;
    go.max_tokens = g->n_new;
    go.ignore_end = true;
    int rc = kvd_memory_set_budget(v->m, budget, err);
    rc = rc ? rc : kvd_session_create(&s, v->m, &so, err);
    if (!rc) {
        kvd_session_set_progress(s, verify_on_pass, NULL);
        rc = kvd_generate(s, v->ids, g->n_prompt, &go, &r, err);
        kvd_session_get_stats(s, stats);
        memcpy(receipt, r.receipt, 33);
        kvd_result_free(&r);
    }
    kvd_session_free(&s);
    kvd_memory_set_budget(v->m, 0, NULL);
    return rc;
}

static json_t *run_json(const verify *v, int column, int64_t keep, int64_t budget, const kvd_session_stats *st)
{
    json_t *o = json_object();
    json_object_set_new(o, "kv_type", json_string(verify_type_name(columns[column].kv)));
    json_object_set_new(o, "stream", json_string(verify_type_name(columns[column].stream)));
    json_object_set_new(o, "policy", json_string(keep == KEEP_ALL ? "full" : "kv-direct"));
    if (keep >= 0)
        json_object_set_new(o, "kv_tokens", json_integer(keep));
    if (budget)
        json_object_set_new(o, "budget_bytes", json_integer(budget));
    json_object_set_new(o, "cpu", json_string(v->info.isa));
    json_object_set_new(o, "threads", json_integer(v->info.n_threads));
    json_object_set_new(o, "chunk", json_integer(v->loaded.chunk_tokens));
    json_object_set_new(o, "recomputed_tokens", json_integer(st->recomputed_tokens));
    return o;
}

/* Run it, compare it, count it. 0 or an exit code. */
static int try_run(verify *v, group *g, int column, int64_t keep, outcome *out)
{
    char receipt[33] = "";
    kvd_error err = {0};
    kvd_session_stats st = {0};
    kvd_session_options so;
    kvd_session_options_defaults(&so);
    so.kv_type = columns[column].kv;
    so.stream = columns[column].stream;
    int64_t budget = keep == KEEP_BUDGET ? tight_budget(v, &so, g) : 0;
    if (keep == KEEP_BUDGET && !budget)
        return 0; /* dropping saves nothing on this model */
    int rc = generate(v, g, column, keep, budget, receipt, &st, &err);
    if (rc && rc != KVD_E_NUMERIC)
        return verify_error(rc, &err);
    json_t *o = run_json(v, column, keep, budget, &st);
    json_array_append_new(g->runs, o);
    out->n++;
    out->recomputed += st.recomputed_tokens;
    if (rc) {
        out->numeric++;
        v->numeric_errors++;
        g->numeric[column] = true;
        json_object_set_new(o, "numeric_error", json_string(err.message));
        return 0;
    }
    if (!g->receipt[column][0] && !g->numeric[column]) {
        memcpy(g->receipt[column], receipt, sizeof receipt);
        out->same++; /* the reference: it has nothing to be compared with */
    } else {
        bool same = !strcmp(receipt, g->receipt[column]);
        out->same += same;
        *(same ? &v->matches : &v->mismatches) += 1;
        json_object_set_new(o, "equal", json_boolean(same));
    }
    json_object_set_new(o, "receipt", json_string(receipt));
    return 0;
}

static const char *outcome_text(const outcome *o, bool reference, char *buf)
{
    if (o->n == 0)
        return "-";
    if (o->numeric == o->n)
        return "numeric error";
    if (o->n == 1)
        return reference ? "reference" : o->same ? "same" : "DIFFERS";
    snprintf(buf, 32, "%d of %d%s", o->same, o->n, o->same + o->numeric < o->n ? " DIFFER" : "");
    return buf;
}

/* One line of the table. */
static int try_row(verify *v, group *g, int i)
{
    const row *r = &g->rows[i];
    outcome out[N_COLUMNS] = {{0}};
    int code = verify_load(v, &r->mo);
    for (int c = 0; !code && c < r->n_columns; c++)
        for (int k = 0; !code && k < r->n_keep; k++) {
            verify_progress(v, "3 of 3: line %d of %d, %s, %s", i + 1, g->n_rows, r->label, columns[c].name);
            code = try_run(v, g, c, r->keep[k], &out[c]);
        }
    if (code)
        return code;
    char b[32];
    verify_say(v, "   %-38s %8lld", r->label, (long long)out[0].recomputed);
    for (int c = 0; c < g->n_columns; c++)
        verify_say(v, "  %13s", outcome_text(&out[c], i == 0 && r->n_keep == 1, b));
    verify_say(v, "\n");
    return 0;
}

static int try_group(verify *v, group *g, json_t *list)
{
    int code = 0;
    json_t *o = json_object(), *receipts = json_object();
    g->runs = json_array();
    json_object_set_new(o, "prompt_tokens", json_integer(g->n_prompt));
    json_object_set_new(o, "new_tokens", json_integer(g->n_new));
    json_object_set_new(o, "receipts", receipts);
    json_object_set_new(o, "runs", g->runs);
    json_array_append_new(list, o);
    verify_say(v, "\n   %lld tokens of prompt, %lld new ones\n   %-38s %8s", (long long)g->n_prompt,
               (long long)g->n_new, "settings", "rebuilt*");
    for (int c = 0; c < g->n_columns; c++)
        verify_say(v, "  %13s", columns[c].name);
    verify_say(v, "\n");
    for (int i = 0; !code && i < g->n_rows; i++)
        code = try_row(v, g, i);
    for (int c = 0; !code && c < g->n_columns; c++)
        if (g->receipt[c][0]) {
            json_object_set_new(receipts, columns[c].name, json_string(g->receipt[c]));
            verify_say(v, "   receipt, %-12s %s\n", columns[c].name, g->receipt[c]);
        }
    return code;
}

/* ---- which lines there are ------------------------------------------------------------------- */

static row *add(group *g, const kvd_model_options *mo, int64_t keep, const char *what)
{
    char kept[40];
    if (g->n_rows == MAX_ROWS)
        return NULL;
    row *r = &g->rows[g->n_rows++];
    *r = (row){.mo = *mo, .keep = {keep}, .n_keep = 1, .n_columns = g->n_columns};
    keep_name(keep, kept, sizeof kept);
    snprintf(r->label, sizeof r->label, "%s%s%s", what, *what ? " " : "", kept);
    return r;
}

static const char *isa_name(kvd_isa i)
{
    static const char *const names[] = {"auto", "scalar", "avx2", "avx512", "neon"};
    return names[i];
}

/* Instruction sets of this machine. A machine without one refuses it before it
 * reads the file, so asking costs nothing; those that it has are not loaded here. */
static int isas(const verify *v, kvd_isa *out)
{
    int n = 0;
    for (int i = KVD_ISA_SCALAR; i <= KVD_ISA_NEON; i++) {
        kvd_model *m = NULL;
        kvd_model_options mo = v->loaded;
        mo.isa = (kvd_isa)i;
        int rc = kvd_model_load(&m, "", &mo, NULL);
        if (rc != KVD_E_RANGE)
            out[n++] = (kvd_isa)i;
        if (!rc)
            kvd_model_free(&m);
    }
    return n;
}

static void shape(const verify *v, group *g, int64_t n_prompt, int64_t n_new, int n_columns)
{
    int64_t most = verify_positions(v);
    *g = (group){.n_prompt = n_prompt, .n_new = n_new, .n_columns = n_columns};
    if (n_prompt + n_new > most) {
        g->n_new = most > n_new ? n_new : most > 1 ? most / 2 : 1;
        g->n_prompt = most > g->n_new ? most - g->n_new : 1;
    }
}

static const int64_t budgets[] = {KEEP_ALL, 128, 64, 48, 16, 0, KEEP_BUDGET};
static const int chunks[] = {1, 7, 64, 512}, threads[] = {1, 2, 3};
enum {
    N_BUDGETS = sizeof budgets / sizeof budgets[0],
    N_CHUNKS = sizeof chunks / sizeof chunks[0],
    N_THREADS = sizeof threads / sizeof threads[0]
};

/* What is kept, on its own; then chunk and threads with a cache that evicts. */
static void plan_settings(const verify *v, group *g)
{
    char what[32];
    shape(v, g, 144, 4, N_COLUMNS);
    for (int i = 0; i < N_BUDGETS; i++)
        add(g, &v->c->mo, budgets[i], "");
    for (int i = 0; i < N_CHUNKS; i++) {
        kvd_model_options mo = v->c->mo;
        mo.chunk_tokens = chunks[i];
        snprintf(what, sizeof what, "--chunk %d", chunks[i]);
        add(g, &mo, 128, what);
    }
    for (int i = 0; i < N_THREADS; i++) {
        kvd_model_options mo = v->c->mo;
        mo.n_threads = threads[i];
        snprintf(what, sizeof what, "--threads %d", threads[i]);
        add(g, &mo, 128, what);
    }
}

static void add_isas(const verify *v, group *g, int n_columns)
{
    kvd_isa list[8];
    char what[32];
    int n = isas(v, list);
    for (int i = 0; i < n; i++) {
        kvd_model_options mo = v->c->mo;
        mo.isa = list[i];
        snprintf(what, sizeof what, "--cpu %s", isa_name(list[i]));
        row *r = add(g, &mo, 16, what);
        if (r)
            r->n_columns = n_columns;
    }
}

/* Every instruction set; a short prompt, since the scalar one is slow. */
static void plan_isas(const verify *v, group *g)
{
    shape(v, g, 32, 3, N_COLUMNS);
    add(g, &v->c->mo, KEEP_ALL, "");
    add_isas(v, g, N_COLUMNS);
}

/* --quick: some of each, with a short prompt. */
static void plan_quick(const verify *v, group *g)
{
    kvd_model_options chunked = v->c->mo, threaded = v->c->mo;
    shape(v, g, 32, 3, N_COLUMNS);
    add(g, &v->c->mo, KEEP_ALL, "");
    add(g, &v->c->mo, 16, "");
    add(g, &v->c->mo, 0, "");
    add(g, &v->c->mo, KEEP_BUDGET, "");
    chunked.chunk_tokens = 7;
    add(g, &chunked, 16, "--chunk 7");
    threaded.n_threads = 3;
    add(g, &threaded, 16, "--threads 3");
    add_isas(v, g, 1);
}

/* Local layers: a prompt longer than their window. */
static void plan_window(const verify *v, group *g)
{
    shape(v, g, v->info.window_tokens + 61, 3, 2);
    static const int64_t keep[] = {KEEP_ALL, 128, 0, KEEP_BUDGET};
    for (size_t i = 0; i < sizeof keep / sizeof *keep; i++)
        add(g, &v->c->mo, keep[i], "");
}

/* --full: the cross product. A line is a way to load the model, with all budgets. */
static void plan_product(const verify *v, group *g)
{
    kvd_isa list[8];
    int n = isas(v, list);
    shape(v, g, 144, 4, N_COLUMNS);
    add(g, &v->c->mo, KEEP_ALL, "");
    for (int i = 0; i < n; i++)
        for (int t = 0; t < N_THREADS; t++)
            for (int c = 0; c < N_CHUNKS; c++) {
                kvd_model_options mo = v->c->mo;
                mo.isa = list[i];
                mo.n_threads = threads[t];
                mo.chunk_tokens = chunks[c];
                row *r = add(g, &mo, KEEP_ALL, "");
                if (!r)
                    return;
                memcpy(r->keep, budgets, sizeof budgets);
                r->n_keep = N_BUDGETS;
                snprintf(r->label, sizeof r->label, "--cpu %s --threads %d --chunk %d", isa_name(list[i]), threads[t],
                         chunks[c]);
            }
}

int verify_receipts(verify *v)
{
    group *g = malloc(sizeof *g);
    json_t *list = json_array();
    if (!g)
        return cli_fail(EXIT_RESOURCES, "out of memory: the matrix of settings");
    json_object_set_new(v->out, "receipts", list);
    verify_say(v, "\n3. One receipt (hash of tokens and logits) whatever the settings\n"
                  "   * positions whose K and V had to be made again, in the first column's run\n");
    if (verify_positions(v) < 2) {
        verify_say(v, "   the model's context has no room for a prompt and a token\n");
        free(g);
        return 0;
    }
    (v->c->quick ? plan_quick : plan_settings)(v, g);
    int code = try_group(v, g, list);
    /* If the prompt above was longer than the window, that is shown already. */
    if (!code && v->info.window_tokens >= g->n_prompt - 16 && !v->c->quick) {
        plan_window(v, g);
        code = try_group(v, g, list);
    }
    if (!code && !v->c->quick) {
        (v->c->full ? plan_product : plan_isas)(v, g);
        code = try_group(v, g, list);
    }
    free(g);
    return code;
}
