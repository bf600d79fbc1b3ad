/* Results: building them, and writing their tables as TSV.
 *
 * Building never fails half-way: what could not be made (out of memory, a number
 * that JSON can not hold) becomes null in its place, "not measured", so that a table
 * keeps its shape and an experiment needs no test behind each cell. */
#define _GNU_SOURCE
#include "lab/lab.h"

#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

/* ---- building ----------------------------------------------------------------------- */

static json_t *text_of(const char *s)
{
    return s ? lab_text(s, strlen(s)) : json_null();
}

json_t *lab_table(json_t *result, const char *name, const char *title, const lab_column *columns)
{
    json_t *table = json_object(), *list = json_array();
    for (const lab_column *c = columns; c->key; c++)
        json_array_append_new(list, json_pack("{s:s, s:s, s:i}", "key", c->key, "title", c->title, "decimals", c->decimals));
    json_object_set_new(table, "name", json_string(name));
    json_object_set_new(table, "title", text_of(title));
    json_object_set_new(table, "columns", list);
    json_object_set_new(table, "rows", json_array());
    json_array_append_new(json_object_get(result, "tables"), table);
    return table;
}

void lab_row(json_t *table, json_t *cells)
{
    size_t n = json_array_size(json_object_get(table, "columns"));
    if (!json_is_array(cells)) {
        json_decref(cells);
        cells = json_array();
    }
    while (json_array_size(cells) < n)
        json_array_append_new(cells, json_null());
    while (json_array_size(cells) > n)
        json_array_remove(cells, n);
    json_array_append_new(json_object_get(table, "rows"), cells);
}

json_t *lab_number(double x)
{
    return isfinite(x) ? json_real(x) : json_null();
}

void lab_plot(json_t *result, const char *name, const char *title, const char *kind, const char *table, const char *x,
              const char *y, const char *by, const char *z, unsigned flags)
{
    json_t *p = json_pack("{s:s, s:s, s:s, s:s, s:s, s:s, s:s?, s:s?, s:b, s:b}", "name", name, "title", title, "kind", kind, "table",
                          table, "x", x, "y", y, "by", by, "z", z, "log_x", (flags & LAB_LOG_X) != 0, "log_y", (flags & LAB_LOG_Y) != 0);
    json_array_append_new(json_object_get(result, "plots"), p);
}

__attribute__((format(printf, 2, 0))) static void note(json_t *result, const char *format, va_list ap)
{
    char *line = NULL;
    int n = vasprintf(&line, format, ap);
    if (n >= 0) {
        json_array_append_new(json_object_get(result, "notes"), lab_text(line, (size_t)n));
        free(line);
    }
}

void lab_note(json_t *result, const char *format, ...)
{
    va_list ap;
    va_start(ap, format);
    note(result, format, ap);
    va_end(ap);
}

void lab_check_failed(json_t *result, const char *format, ...)
{
    va_list ap;
    va_start(ap, format);
    note(result, format, ap);
    va_end(ap);
    json_object_set_new(result, "check_failed", json_true());
}

void lab_setting(json_t *result, const char *key, json_t *value)
{
    json_object_set_new(json_object_get(result, "settings"), key, value ? value : json_null());
}

void lab_paper(json_t *result, const char *what, const char *paper, const char *ours, const char *verdict, const char *why)
{
    json_t *row = json_object();
    json_object_set_new(row, "what", text_of(what));
    json_object_set_new(row, "paper", text_of(paper));
    json_object_set_new(row, "ours", text_of(ours));
    json_object_set_new(row, "verdict", text_of(verdict));
    json_object_set_new(row, "why", text_of(why ? why : ""));
    json_array_append_new(json_object_get(result, "paper_rows"), row);
}

/* ---- reading ---------------------------------------------------------------------------- */

const char *lab_text_at(const json_t *object, const char *key)
{
    const char *s = json_string_value(json_object_get(object, key));
    return s ? s : "";
}

double lab_number_at(const json_t *object, const char *key)
{
    const json_t *x = json_object_get(object, key);
    return json_is_number(x) ? json_number_value(x) : (double)NAN;
}

const json_t *lab_find_table(const json_t *result, const char *name)
{
    size_t i;
    json_t *t;
    json_array_foreach(json_object_get(result, "tables"), i, t)
        if (*name && !strcmp(lab_text_at(t, "name"), name))
            return t;
    return NULL;
}

int lab_find_column(const json_t *table, const char *key)
{
    size_t i;
    json_t *c;
    json_array_foreach(json_object_get(table, "columns"), i, c)
        if (*key && !strcmp(lab_text_at(c, "key"), key))
            return (int)i;
    return -1;
}

/* ---- cells as text -------------------------------------------------------------------- */

static void real_text(double x, int decimals, char *out, size_t size)
{
    if (x == 0)
        snprintf(out, size, "0"); /* exactly: 0.000 would say "or less than half of the last digit" */
    else if (decimals >= 0) {
        double least = 0.5 * pow(10, -decimals);
        if (fabs(x) < least)
            snprintf(out, size, "%.0e", x);
        else
            snprintf(out, size, "%.*f", decimals, x);
    } else if (decimals == -2)
        snprintf(out, size, "%.2e", x);
    else {
        int digits = 15;
        do
            snprintf(out, size, "%.*g", digits, x);
        while (++digits <= 17 && strtod(out, NULL) != x);
    }
}

/* What would break a line or command a terminal, by number. */
static void plain_text(const char *s, size_t n, char *out, size_t size)
{
    size_t len = 0;
    for (size_t i = 0, k; i < n; i += k) {
        k = lab_utf8(s + i, n - i);
        unsigned char c = (unsigned char)s[i];
        bool hidden = !k || lab_is_control(s + i, k);
        k = k ? k : 1;
        char esc[16];
        const char *from = s + i;
        size_t take = k;
        if (hidden) {
            take = 0;
            for (size_t j = 0; j < k; j++)
                take += (size_t)snprintf(esc + take, sizeof esc - take, c == '\n' ? "\\n" : c == '\t' ? "\\t" : "\\x%02x", (unsigned char)s[i + j]);
            from = esc;
        }
        if (len + take + 1 > size)
            break;
        memcpy(out + len, from, take);
        len += take;
    }
    out[len] = 0;
}

void lab_cell(const json_t *cell, int decimals, char *out, size_t size)
{
    if (json_is_string(cell))
        plain_text(json_string_value(cell), json_string_length(cell), out, size);
    else if (json_is_integer(cell))
        snprintf(out, size, "%" JSON_INTEGER_FORMAT, json_integer_value(cell));
    else if (json_is_real(cell))
        real_text(json_real_value(cell), decimals, out, size);
    else if (json_is_boolean(cell))
        snprintf(out, size, "%s", json_is_true(cell) ? "yes" : "no");
    else
        snprintf(out, size, "-");
}

/* ---- TSV -------------------------------------------------------------------------------- */

static void tsv_cell(const json_t *cell, FILE *out)
{
    char text[64];
    if (json_is_string(cell)) {
        const char *end = json_string_value(cell) + json_string_length(cell);
        for (const char *s = json_string_value(cell); s < end; s++)
            if (*s == '\t' || *s == '\n' || *s == '\r' || *s == '\\' || !*s)
                fprintf(out, "\\%c", *s == '\t' ? 't' : *s == '\n' ? 'n' : *s == '\r' ? 'r' : *s ? '\\' : '0');
            else
                fputc(*s, out);
    } else if (json_is_boolean(cell))
        fputs(json_is_true(cell) ? "true" : "false", out);
    else if (json_is_number(cell)) {
        lab_cell(cell, -1, text, sizeof text);
        fputs(text, out);
    }
}

/* The unit that a title gives between its commas ("KL, free, bits", "ms, lower quartile",
 * "% of d_head"), as the end of a name; NULL: a number of things, or no number. */
static const char *unit_of(const char *title)
{
    static const char *const units[][2] = {{"bits", "bits"}, {"nats", "nats"}, {"%", "percent"}, {"tokens", "tokens"}, {"KB", "kb"},
                                           {"MB", "mb"},     {"MB/s", "mb_s"}, {"ms", "ms"},     {"s", "s"}};
    for (const char *piece = title; piece; piece = strstr(piece, ", ") ? strstr(piece, ", ") + 2 : NULL) {
        size_t n = strcspn(piece, ", ");
        if (piece[n] == ' ' && strncmp(piece + n, " of ", 4))
            continue; /* "ms per token": its key says it */
        for (size_t i = 0; i < sizeof units / sizeof units[0]; i++)
            if (strlen(units[i][0]) == n && !strncmp(piece, units[i][0], n) && (n != strlen(title)))
                return units[i][1];
    }
    return NULL;
}

/* A column's name in a file: its key, and its unit where the key does not end with it. */
static void tsv_name(const json_t *column, FILE *out)
{
    const char *key = json_string_value(json_object_get(column, "key")), *title = json_string_value(json_object_get(column, "title"));
    const char *unit = title ? unit_of(title) : NULL;
    size_t n = key ? strlen(key) : 0, k = unit ? strlen(unit) : 0;
    tsv_cell(json_object_get(column, "key"), out);
    if (unit && !(n >= k && !strcmp(key + n - k, unit) && (n == k || key[n - k - 1] == '_')))
        fprintf(out, "_%s", unit);
}

void lab_write_tsv(const json_t *table, FILE *out)
{
    size_t i, k;
    json_t *column, *row;
    json_array_foreach(json_object_get(table, "columns"), i, column) {
        if (i)
            fputc('\t', out);
        tsv_name(column, out);
    }
    fputc('\n', out);
    json_array_foreach(json_object_get(table, "rows"), i, row) {
        for (k = 0; k < json_array_size(json_object_get(table, "columns")); k++) { /* a row from a file may have any length */
            if (k)
                fputc('\t', out);
            tsv_cell(json_array_get(row, k), out);
        }
        fputc('\n', out);
    }
}
