#include "lab/hellaswag_data.h"

#include <stdlib.h>
#include <string.h>

#include "lab/runs.h"

/* ---- lines ----------------------------------------------------------------------- */

typedef struct {
    const char *at, *end;
    int64_t line; /* of the line that was taken last */
} reader;

/* The next line without its end; false at the end of the text. */
static bool next_line(reader *r, const char **line, size_t *n)
{
    if (r->at == r->end)
        return false;
    const char *stop = memchr(r->at, '\n', (size_t)(r->end - r->at));
    const char *end = stop ? stop : r->end;
    *line = r->at;
    r->at = stop ? stop + 1 : r->end;
    if (end > *line && end[-1] == '\r')
        end--;
    *n = (size_t)(end - *line);
    r->line++;
    return true;
}

static bool blank(const char *s, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (s[i] != ' ' && s[i] != '\t' && s[i] != '\r' && s[i] != '\n')
            return false;
    return true;
}

static int copy(lab_span *out, const char *s, size_t n, kvd_error *err)
{
    out->text = lab_alloc((int64_t)n + 1, 1, err);
    if (!out->text)
        return KVD_E_NOMEM;
    memcpy(out->text, s, n);
    out->n = n;
    return 0;
}

static lab_task *add_task(lab_tasks *t, int64_t line, int64_t *room, kvd_error *err)
{
    if (t->n == *room) {
        int64_t more = *room ? 2 * *room : 256;
        lab_task *task = lab_alloc(more, sizeof *task, err);
        if (!task)
            return NULL;
        if (t->n)
            memcpy(task, t->task, (size_t)t->n * sizeof *task);
        free(t->task);
        t->task = task;
        *room = more;
    }
    t->task[t->n].line = line;
    return &t->task[t->n++];
}

/* ---- six lines ----------------------------------------------------------------------- */

static int read_six(lab_tasks *t, reader *r, kvd_error *err)
{
    const char *line;
    size_t n;
    int64_t room = 0;
    while (next_line(r, &line, &n)) {
        if (blank(line, n)) {
            if (blank(r->at, (size_t)(r->end - r->at)))
                break; /* empty lines at the end */
            return lab_fail(err, KVD_E_ENCODING, "line %lld: an empty line where a context should be", (long long)r->line);
        }
        lab_task *task = add_task(t, r->line, &room, err);
        int rc = task ? copy(&task->context, line, n, err) : KVD_E_NOMEM;
        for (int i = -1; !rc && i < LAB_ENDINGS; i++) {
            if (!next_line(r, &line, &n))
                return lab_fail(err, KVD_E_ENCODING, "line %lld: the text ends within the task that begins at line %lld (six lines each: context, label, four endings)",
                                (long long)r->line, (long long)task->line);
            if (blank(line, n))
                return lab_fail(err, KVD_E_ENCODING, "line %lld: an empty line within a task", (long long)r->line);
            if (i >= 0)
                rc = copy(&task->ending[i], line, n, err);
            else if (n != 1 || line[0] < '0' || line[0] >= '0' + LAB_ENDINGS)
                return lab_fail(err, KVD_E_ENCODING, "line %lld: a label is 0, 1, 2 or 3", (long long)r->line);
            else
                task->right = line[0] - '0';
        }
        if (rc)
            return rc;
    }
    return 0;
}

/* ---- JSONL --------------------------------------------------------------------------------- */

/* What lm-evaluation-harness makes of a text (tasks/hellaswag/utils.py, preprocess), in
 * the same order: no space at the ends, " [title]" is ". ", [...] goes away, and each
 * two spaces become one. In place. */
static size_t clean(char *s, size_t n)
{
    static const char title[] = " [title]";
    size_t len = 0, k = sizeof title - 1;
    while (n && blank(s + n - 1, 1))
        n--;
    size_t from = 0;
    while (from < n && blank(s + from, 1))
        from++;
    for (size_t i = from; i < n; len++)
        if (n - i >= k && !memcmp(s + i, title, k)) {
            s[len++] = '.';
            s[len] = ' ';
            i += k;
        } else
            s[len] = s[i++];
    n = len, len = 0;
    for (size_t i = 0; i < n;) {
        const char *close = s[i] == '[' ? memchr(s + i, ']', n - i) : NULL;
        if (close && !memchr(s + i, '\n', (size_t)(close - (s + i))))
            i = (size_t)(close - s) + 1;
        else
            s[len++] = s[i++];
    }
    n = len, len = 0;
    for (size_t i = 0; i < n; i++) {
        if (s[i] == ' ' && i + 1 < n && s[i + 1] == ' ')
            i++;
        s[len++] = s[i];
    }
    return len;
}

static const char *string_of(const json_t *o, const char *key) { return json_string_value(json_object_get(o, key)); }

/* First letter upper case, the others lower, as Python's capitalize; of ASCII. */
static void capitalize(char *s)
{
    for (size_t i = 0; s[i]; i++)
        if (i == 0 && s[i] >= 'a' && s[i] <= 'z')
            s[i] = (char)(s[i] - 'a' + 'A');
        else if (i > 0 && s[i] >= 'A' && s[i] <= 'Z')
            s[i] = (char)(s[i] - 'A' + 'a');
}

static int read_context(lab_task *task, const json_t *o, kvd_error *err)
{
    const char *label = string_of(o, "activity_label"), *a = string_of(o, "ctx_a"), *b = string_of(o, "ctx_b"), *ctx = string_of(o, "ctx");
    if (!(a && b) && !ctx)
        return lab_fail(err, KVD_E_ENCODING, "line %lld: neither ctx_a and ctx_b nor ctx", (long long)task->line);
    bool parts = a && b;
    size_t size = (label ? strlen(label) : 0) + (parts ? strlen(a) + strlen(b) : strlen(ctx)) + 4;
    char *text = lab_alloc((int64_t)size, 1, err);
    if (!text)
        return KVD_E_NOMEM;
    int n = snprintf(text, size, "%s%s%s%s", label ? label : "", label ? ": " : "", parts ? a : ctx, parts ? " " : "");
    if (parts) {
        strcpy(text + n, b);
        capitalize(text + n);
    }
    task->context = (lab_span){text, clean(text, strlen(text))};
    return task->context.n ? 0 : lab_fail(err, KVD_E_ENCODING, "line %lld: an empty context", (long long)task->line);
}

static int read_endings(lab_task *task, const json_t *o, kvd_error *err)
{
    const json_t *list = json_object_get(o, "endings"), *label = json_object_get(o, "label");
    if (!json_is_array(list) || json_array_size(list) != LAB_ENDINGS)
        return lab_fail(err, KVD_E_ENCODING, "line %lld: \"endings\" is not a list of four", (long long)task->line);
    for (size_t i = 0; i < LAB_ENDINGS; i++) {
        const char *s = json_string_value(json_array_get(list, i));
        int rc = s ? copy(&task->ending[i], s, strlen(s), err) : 0;
        if (rc)
            return rc;
        task->ending[i].n = s ? clean(task->ending[i].text, task->ending[i].n) : 0;
        if (!task->ending[i].n)
            return lab_fail(err, KVD_E_ENCODING, "line %lld: ending %d is empty or no string", (long long)task->line, (int)i);
    }
    const char *digit = json_string_value(label); /* some copies have it as a string */
    json_int_t right = json_is_integer(label) ? json_integer_value(label) : digit && digit[0] && !digit[1] ? digit[0] - '0' : -1;
    if (right < 0 || right >= LAB_ENDINGS)
        return lab_fail(err, KVD_E_ENCODING, "line %lld: \"label\" is not 0, 1, 2 or 3", (long long)task->line);
    task->right = (int)right;
    return 0;
}

static int read_jsonl(lab_tasks *t, reader *r, kvd_error *err)
{
    const char *line;
    size_t n;
    int64_t room = 0;
    t->json = true;
    while (next_line(r, &line, &n)) {
        if (blank(line, n))
            continue;
        json_error_t why;
        json_t *o = json_loadb(line, n, 0, &why);
        if (!json_is_object(o)) {
            bool other = o != NULL;
            json_decref(o);
            if (other)
                return lab_fail(err, KVD_E_ENCODING, "line %lld: no JSON object", (long long)r->line);
            return lab_fail(err, KVD_E_ENCODING, "line %lld, column %d: no JSON", (long long)r->line, why.column);
        }
        lab_task *task = add_task(t, r->line, &room, err);
        int rc = task ? read_context(task, o, err) : KVD_E_NOMEM;
        rc = rc ? rc : read_endings(task, o, err);
        json_decref(o);
        if (rc)
            return rc;
    }
    return 0;
}

int lab_tasks_read(lab_tasks *t, const char *text, size_t n, kvd_error *err)
{
    size_t i = n >= 3 && !memcmp(text, "\xef\xbb\xbf", 3) ? 3 : 0; /* a byte order mark is no part of a context */
    reader r = {text + i, text + n, 0};
    while (i < n && blank(text + i, 1))
        i++;
    int rc = i < n && text[i] == '{' ? read_jsonl(t, &r, err) : read_six(t, &r, err);
    return rc ? rc : t->n ? 0 : lab_fail(err, KVD_E_ENCODING, "no tasks in it");
}

void lab_tasks_hash(const lab_tasks *t, int64_t n, char hex[17])
{
    char all[(LAB_ENDINGS + 3) * 16 + 1] = "", *last = all + (LAB_ENDINGS + 2) * 16;
    for (int64_t i = 0; i < n; i++) { /* a chain: each task's parts, and the hash so far */
        char part[17];
        const lab_task *k = &t->task[i];
        lab_hash(k->context.text, k->context.n, part);
        memcpy(all, part, 16);
        for (int e = 0; e < LAB_ENDINGS; e++) {
            lab_hash(k->ending[e].text, k->ending[e].n, part);
            memcpy(all + (e + 1) * 16, part, 16);
        }
        snprintf(part, sizeof part, "%016d", k->right);
        memcpy(last - 16, part, 16);
        lab_hash(all, sizeof all - 1, part);
        memcpy(last, part, 16);
    }
    memcpy(hex, last, 16);
    hex[16] = 0;
}

void lab_tasks_free(lab_tasks *t)
{
    for (int64_t i = 0; i < t->n; i++) {
        free(t->task[i].context.text);
        for (int k = 0; k < LAB_ENDINGS; k++)
            free(t->task[i].ending[k].text);
    }
    free(t->task);
    *t = (lab_tasks){0};
}
