/* 5.4, Table 4: HellaSwag, 0-shot, under each policy.
 *
 * Each ending is scored by the log probabilities of its tokens behind the context. The
 * tokens are those of context + " " + ending, tokenised together, as llama.cpp's tool
 * does it; what the four have in common at their beginning is read once, and each ending
 * after a rewind to there. Three answers come from the same numbers:
 *
 *   acc              the greatest sum
 *   acc_norm         the greatest sum per token behind the common beginning: llama.cpp's
 *   acc_norm_bytes   the greatest sum per byte of the ending: lm-evaluation-harness's
 *                    acc_norm. There the sum is of all tokens behind the context's own,
 *                    also those that the endings share.
 *
 * A policy that forgets can not be rewound, so there the context is read anew for each
 * ending: at once, as a prompt is, and then the ending token by token, so that each of
 * its tokens sees B positions and no more. Most tasks are shorter than the budgets that
 * anyone asks for; how many are not is in the settings. */
#include "lab/lab.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "lab/hellaswag_data.h"
#include "lab/runs.h"

static const char own_policies[] = "full,kv-direct,window:64";

enum { ACC, ACC_NORM, ACC_NORM_BYTES, N_RULES };

typedef struct {
    int32_t *ids[LAB_ENDINGS]; /* of context + " " + ending */
    int64_t n[LAB_ENDINGS];
    int64_t prefix;            /* tokens that all four begin with; less than any n */
    int64_t context;           /* tokens of the context alone, at most prefix */
} task_ids;

/* What a policy answered. */
typedef struct {
    double *sum;      /* [n_tasks][LAB_ENDINGS]: log probability behind the common beginning */
    int8_t (*answer)[N_RULES]; /* [n_tasks] */
} answers;

typedef struct {
    const lab *l;
    json_t *result, *table;
    kvd_error *err;
    lab_tasks data;
    task_ids *tasks;  /* [n_tasks] */
    int64_t n_tasks, n_policies;
    int64_t beyond_64; /* endings of more tokens than that, with their context */
    answers now, full;
    bool has_full;
} evaluation;

/* ---- one task -------------------------------------------------------------------- */

typedef struct {
    const task_ids *t;
    int64_t n_vocab;
    int ending;                 /* whose tokens are fed now; -1: the common beginning */
    double sum[LAB_ENDINGS];    /* behind the common beginning */
    double shared;              /* between the context and there */
} scoring;

static int score_row(void *ctx, int64_t pos, const float *logits)
{
    scoring *s = ctx;
    const task_ids *t = s->t;
    double log_sum = (double)logits[0] - lab_log_prob(logits, s->n_vocab, 0);
    int64_t next = pos + 1;
    if (s->ending >= 0)
        s->sum[s->ending] += (double)logits[t->ids[s->ending][next]] - log_sum;
    else if (next < t->prefix)
        s->shared += (double)logits[t->ids[0][next]] - log_sum;
    else
        for (int e = 0; e < LAB_ENDINGS; e++)
            s->sum[e] += (double)logits[t->ids[e][next]] - log_sum;
    return 0;
}

static int feed_prefix(scoring *sc, kvd_session *s, kvd_error *err)
{
    const task_ids *t = sc->t;
    sc->ending = -1;
    sc->shared = 0;
    int rc = kvd_session_rewind(s, 0, err);
    return rc ? rc : kvd_session_feed_all(s, t->ids[0], t->prefix, t->prefix - (t->context > 0 ? t->context - 1 : 0), score_row, sc, err);
}

static int score_exact(scoring *sc, kvd_session *s, kvd_error *err)
{
    const task_ids *t = sc->t;
    int rc = feed_prefix(sc, s, err);
    for (int e = 0; !rc && e < LAB_ENDINGS; e++) {
        int64_t n = t->n[e] - 1 - t->prefix; /* nobody asks what follows the last token */
        if (n == 0)
            continue;
        sc->ending = e;
        rc = kvd_session_rewind(s, t->prefix, err);
        rc = rc ? rc : kvd_session_feed_all(s, t->ids[e] + t->prefix, n, n, score_row, sc, err);
    }
    return rc;
}

static int score_lossy(scoring *sc, kvd_session *s, kvd_error *err)
{
    const task_ids *t = sc->t;
    double sum[LAB_ENDINGS];
    int rc = 0;
    for (int e = 0; !rc && e < LAB_ENDINGS; e++) {
        memset(sc->sum, 0, sizeof sc->sum);
        rc = feed_prefix(sc, s, err);
        sc->ending = e;
        for (int64_t i = t->prefix; !rc && i < t->n[e] - 1; i++)
            rc = kvd_session_feed_all(s, t->ids[e] + i, 1, 1, score_row, sc, err);
        sum[e] = sc->sum[e];
    }
    memcpy(sc->sum, sum, sizeof sum);
    return rc;
}

static int best(const double x[LAB_ENDINGS])
{
    int b = 0;
    for (int e = 1; e < LAB_ENDINGS; e++)
        b = x[e] > x[b] ? e : b;
    return b;
}

static void answer(const evaluation *v, int64_t i, const scoring *sc)
{
    double per_token[LAB_ENDINGS], per_byte[LAB_ENDINGS];
    for (int e = 0; e < LAB_ENDINGS; e++) {
        per_token[e] = sc->sum[e] / (double)(sc->t->n[e] - sc->t->prefix);
        per_byte[e] = (sc->shared + sc->sum[e]) / (double)v->data.task[i].ending[e].n;
        v->now.sum[i * LAB_ENDINGS + e] = sc->sum[e];
    }
    v->now.answer[i][ACC] = (int8_t)best(sc->sum);
    v->now.answer[i][ACC_NORM] = (int8_t)best(per_token);
    v->now.answer[i][ACC_NORM_BYTES] = (int8_t)best(per_byte);
}

/* ---- one policy ---------------------------------------------------------------------- */

static int answer_all(evaluation *v, const char *name, kvd_session *s, bool exact)
{
    char what[96];
    int rc = 0;
    snprintf(what, sizeof what, "hellaswag, %s", name);
    for (int64_t i = 0; !rc && i < v->n_tasks; i++) {
        scoring sc = {.t = &v->tasks[i], .n_vocab = v->l->info.n_vocab};
        rc = lab_tick(v->l, what, i, v->n_tasks, v->err);
        rc = rc ? rc : exact ? score_exact(&sc, s, v->err) : score_lossy(&sc, s, v->err);
        if (!rc)
            answer(v, i, &sc);
    }
    return rc;
}

static double right_part(const evaluation *v, int rule)
{
    int64_t right = 0;
    for (int64_t i = 0; i < v->n_tasks; i++)
        right += v->now.answer[i][rule] == v->data.task[i].right;
    return (double)right / (double)v->n_tasks;
}

/* Of a part of n answers. */
static double error_of(double part, int64_t n) { return n > 1 ? sqrt(part * (1 - part) / (double)(n - 1)) : (double)NAN; }

static double agreement(const evaluation *v, int rule)
{
    int64_t same = 0;
    for (int64_t i = 0; i < v->n_tasks; i++)
        same += v->now.answer[i][rule] == v->full.answer[i][rule];
    return (double)same / (double)v->n_tasks;
}

static int make_answers(const evaluation *v, answers *a)
{
    a->sum = lab_alloc(v->n_tasks * LAB_ENDINGS, sizeof *a->sum, v->err);
    a->answer = lab_alloc(v->n_tasks, sizeof *a->answer, v->err);
    return a->sum && a->answer ? 0 : KVD_E_NOMEM;
}

static int keep_full(evaluation *v)
{
    int rc = make_answers(v, &v->full);
    if (rc)
        return rc;
    memcpy(v->full.sum, v->now.sum, (size_t)(v->n_tasks * LAB_ENDINGS) * sizeof *v->now.sum);
    memcpy(v->full.answer, v->now.answer, (size_t)v->n_tasks * sizeof *v->now.answer);
    v->has_full = true;
    return 0;
}

/* ---- the experiment ----------------------------------------------------------------------- */

static int measure(evaluation *v, const char *name, const kvd_session_options *so)
{
    bool exact = so->policy == KVD_POLICY_FULL || so->policy == KVD_POLICY_KV_DIRECT, same;
    kvd_session *s = NULL;
    kvd_session_stats st;
    double begun = lab_seconds(), part[N_RULES];
    int rc = kvd_session_create(&s, v->l->m, so, v->err);
    if (!rc) {
        lab_watch(v->l, s);
        rc = answer_all(v, name, s, exact);
        kvd_session_get_stats(s, &st);
    }
    kvd_session_free(&s);
    if (!rc && !v->has_full && so->policy == KVD_POLICY_FULL)
        rc = keep_full(v);
    if (rc)
        return rc;
    same = v->has_full && !memcmp(v->full.sum, v->now.sum, (size_t)(v->n_tasks * LAB_ENDINGS) * sizeof *v->now.sum);
    for (int r = 0; r < N_RULES; r++)
        part[r] = right_part(v, r);
#define PERCENT(rule) lab_number(100 * part[rule]), lab_number(100 * error_of(part[rule], v->n_tasks))
    lab_row(v->table, json_pack("[s, I, o, o, o, o, o, o, o, o, o, I, f]", name, (json_int_t)v->n_tasks, PERCENT(ACC), PERCENT(ACC_NORM), PERCENT(ACC_NORM_BYTES),
                                v->has_full ? lab_number(100 * agreement(v, ACC)) : json_null(), v->has_full ? lab_number(100 * agreement(v, ACC_NORM)) : json_null(),
                                v->has_full ? json_boolean(same) : json_null(), (json_int_t)st.recomputed_tokens, lab_seconds() - begun));
#undef PERCENT
    if (v->has_full && exact && !same)
        lab_check_failed(v->result, "%s had to give each ending the log probability that full gives it, to the bit, and did not.", name);
    json_object_set_new(v->result, "acc", lab_number(part[ACC])); /* taken out again if there are more policies */
    json_object_set_new(v->result, "acc_norm", lab_number(part[ACC_NORM]));
    json_object_set_new(v->result, "acc_norm_bytes", lab_number(part[ACC_NORM_BYTES]));
    json_object_set_new(v->result, "tasks", json_integer((json_int_t)v->n_tasks));
    v->n_policies++;
    return 0;
}

static int all_policies(evaluation *v)
{
    static const lab_column columns[] = {{"policy", "policy", 0},
                                         {"tasks", "tasks", 0},
                                         {"acc", "acc, %", 1},
                                         {"acc_error", "standard error, %", 1},
                                         {"acc_norm", "acc_norm (per token), %", 1},
                                         {"acc_norm_error", "standard error, %", 1},
                                         {"acc_norm_bytes", "acc_norm (per byte), %", 1},
                                         {"acc_norm_bytes_error", "standard error, %", 1},
                                         {"agree_acc", "acc answers as full, %", 1},
                                         {"agree_acc_norm", "acc_norm answers as full, %", 1},
                                         {"same_as_full", "same bits as full", 0},
                                         {"recomputed_tokens", "recomputed tokens", 0},
                                         {"seconds", "seconds", 1},
                                         {NULL, NULL, 0}};
    static const char *const single[] = {"acc", "acc_norm", "acc_norm_bytes", "tasks"};
    const char *list = v->l->policies ? v->l->policies : own_policies;
    kvd_session_options so;
    char name[64];
    int rc = make_answers(v, &v->now);
    v->table = lab_table(v->result, "hellaswag", "HellaSwag, 0-shot, by policy", columns);
    while (!rc && lab_next_policy(v->l, &list, &so, name, &rc, v->err))
        rc = measure(v, name, &so);
    for (size_t i = 0; i < sizeof single / sizeof single[0] && v->n_policies != 1; i++)
        json_object_del(v->result, single[i]);
    if (!rc && v->n_policies == 0)
        rc = lab_fail(v->err, KVD_E_ARG, "no policy to measure");
    return rc;
}

static int tokenise(const evaluation *v, const lab_task *task, task_ids *t)
{
    int64_t n_context, shortest = INT64_MAX;
    int32_t *ids = NULL;
    int rc = kvd_tokenize(v->l->m, task->context.text, task->context.n, KVD_TOKENIZE_BOS, &ids, &n_context, v->err);
    kvd_ids_free(ids);
    for (int e = 0; !rc && e < LAB_ENDINGS; e++) {
        size_t n = task->context.n + 1 + task->ending[e].n;
        char *text = lab_alloc((int64_t)n, 1, v->err);
        if (!text)
            return KVD_E_NOMEM;
        memcpy(text, task->context.text, task->context.n);
        text[task->context.n] = ' ';
        memcpy(text + task->context.n + 1, task->ending[e].text, task->ending[e].n);
        rc = kvd_tokenize(v->l->m, text, n, KVD_TOKENIZE_BOS, &t->ids[e], &t->n[e], v->err);
        free(text);
        shortest = t->n[e] < shortest ? t->n[e] : shortest;
    }
    if (rc)
        return rc;
    while (t->prefix < shortest - 1 && t->ids[0][t->prefix] == t->ids[1][t->prefix] && t->ids[0][t->prefix] == t->ids[2][t->prefix] &&
           t->ids[0][t->prefix] == t->ids[3][t->prefix])
        t->prefix++;
    t->context = n_context < t->prefix ? n_context : t->prefix;
    return t->prefix ? 0 : lab_fail(v->err, KVD_E_ENCODING, "line %lld: the endings have no first token in common", (long long)task->line);
}

static int read_tasks(evaluation *v)
{
    const lab *l = v->l;
    int64_t longest = 0;
    if (!l->text)
        return lab_fail(v->err, KVD_E_ARG, "hellaswag needs a file of tasks");
    int rc = lab_tasks_read(&v->data, l->text, l->n_text, v->err);
    if (rc)
        return rc;
    int64_t most = l->limit ? l->limit : l->quick ? 20 : v->data.n;
    v->n_tasks = most < v->data.n ? most : v->data.n;
    v->tasks = lab_alloc(v->n_tasks, sizeof *v->tasks, v->err);
    if (!v->tasks)
        return KVD_E_NOMEM;
    for (int64_t i = 0; !rc && i < v->n_tasks; i++) {
        task_ids *t = &v->tasks[i];
        rc = tokenise(v, &v->data.task[i], t);
        for (int e = 0; !rc && e < LAB_ENDINGS; e++) {
            longest = t->n[e] > longest ? t->n[e] : longest;
            v->beyond_64 += t->n[e] > 64;
        }
        if (!rc && longest > l->info.trained_context_tokens)
            rc = lab_fail(v->err, KVD_E_RANGE, "line %lld: a task of %lld tokens, the model's context is %lld", (long long)v->data.task[i].line,
                          (long long)longest, (long long)l->info.trained_context_tokens);
    }
    lab_setting(v->result, "tasks", json_integer((json_int_t)v->n_tasks));
    lab_setting(v->result, "tasks_in_file", json_integer((json_int_t)v->data.n));
    char hex[17];
    lab_tasks_hash(&v->data, v->n_tasks, hex);
    lab_setting(v->result, "tasks_hash", json_string(hex));
    lab_setting(v->result, "form", json_string(v->data.json ? "JSONL" : "six lines"));
    lab_setting(v->result, "longest_tokens", json_integer((json_int_t)longest));
    lab_setting(v->result, "endings_beyond_64_tokens", json_integer((json_int_t)v->beyond_64));
    return rc;
}

int lab_hellaswag(const lab *l, json_t *result, kvd_error *err)
{
    evaluation v = {.l = l, .result = result, .err = err};
    int rc = read_tasks(&v);
    if (!rc) {
        lab_note(result, "0-shot, the first %lld tasks of the file. acc: greatest sum of log probabilities of an ending's tokens; acc_norm (per token): divided by their number behind the common beginning, as llama.cpp does it; acc_norm (per byte): of all tokens behind the context, divided by the ending's bytes, as lm-evaluation-harness does it (there: characters).",
                 (long long)v.n_tasks);
        lab_note(result, "%lld of %lld endings have more than 64 tokens with their context: only there has a window of 64 anything to forget.",
                 (long long)v.beyond_64, (long long)v.n_tasks * LAB_ENDINGS);
        lab_note(result, "Policies that forget read the context at once and then the ending token by token.");
        rc = all_policies(&v);
    }
    if (!rc && v.n_policies > 1)
        lab_plot(result, "hellaswag", "HellaSwag acc_norm by policy", "bars", "hellaswag", "policy", "acc_norm", NULL, NULL, 0);
    for (int64_t i = 0; v.tasks && i < v.n_tasks; i++)
        for (int e = 0; e < LAB_ENDINGS; e++)
            kvd_ids_free(v.tasks[i].ids[e]);
    free(v.tasks);
    free(v.now.sum);
    free(v.now.answer);
    free(v.full.sum);
    free(v.full.answer);
    lab_tasks_free(&v.data);
    return rc;
}
