/* From the rows of a table to the points of a plot: which columns, which axes are
 * numbers and which are words. */
#include "lab/plot_points.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Index of a column, -1: none; its title and decimals. */
static int column(const json_t *table, const char *key, const char **title, int *decimals)
{
    int i = lab_find_column(table, key);
    const json_t *c = i < 0 ? NULL : json_array_get(json_object_get(table, "columns"), (size_t)i);
    if (c) {
        *title = lab_text_at(c, "title");
        *decimals = (int)json_integer_value(json_object_get(c, "decimals"));
    }
    return i;
}

static bool has_words(const json_t *rows, int column_index)
{
    size_t i;
    json_t *row;
    json_array_foreach(rows, i, row)
        if (json_is_string(json_array_get(row, (size_t)column_index)))
            return true;
    return false;
}

/* The value of a cell on an axis; false: it has none. */
static bool place(axis *a, const json_t *cell, int decimals, double *out)
{
    if (!a->words) {
        *out = json_number_value(cell);
        return json_is_number(cell) && isfinite(*out);
    }
    char text[LABEL];
    lab_cell(cell, decimals, text, sizeof text);
    for (int i = 0; i < a->n; i++)
        if (!strcmp(a->label[i], text)) {
            *out = i;
            return true;
        }
    memcpy(a->label[a->n], text, sizeof text); /* there is room for one a row */
    *out = a->n++;
    return !json_is_null(cell);
}

static bool axis_make(axis *a, bool words, size_t n)
{
    a->words = words;
    a->label = words ? calloc(n + 1, sizeof *a->label) : NULL;
    return !words || a->label;
}

void lab_plot_free(drawing *d)
{
    free(d->x.label);
    free(d->y.label);
    free(d->by.label);
    free(d->p);
}

int lab_plot_points(const json_t *result, const json_t *plot, drawing *d, kvd_error *err)
{
    const char *unused = "";
    const json_t *table = lab_find_table(result, lab_text_at(plot, "table")), *rows = json_object_get(table, "rows");
    int dx = 0, dy = 0, dby = 0, x = column(table, lab_text_at(plot, "x"), &d->x_title, &dx), y = column(table, lab_text_at(plot, "y"), &d->y_title, &dy);
    int by = column(table, lab_text_at(plot, "by"), &unused, &dby), z = column(table, lab_text_at(plot, "z"), &d->z_title, &d->z_decimals);
    size_t n = json_array_size(rows), i;
    json_t *row;
    d->kind = lab_text_at(plot, "kind");
    d->title = lab_text_at(plot, "title");
    d->name = *lab_text_at(plot, "name") ? lab_text_at(plot, "name") : "plot";
    d->heat = !strcmp(d->kind, "heat");
    d->bars = !strcmp(d->kind, "bars");
    d->log_x = json_is_true(json_object_get(plot, "log_x"));
    d->log_y = json_is_true(json_object_get(plot, "log_y"));
    if (!table || x < 0 || y < 0 || (d->heat && z < 0) || (*lab_text_at(plot, "by") && by < 0))
        return lab_fail(err, KVD_E_ARG, "plot \"%.60s\" names a table or column that is not there", d->name);
    if (!axis_make(&d->x, d->heat || d->bars || has_words(rows, x), n) || !axis_make(&d->y, d->heat, n) || !axis_make(&d->by, true, n) ||
        !(d->p = calloc(n + 1, sizeof *d->p)))
        return lab_fail(err, KVD_E_NOMEM, "out of memory: a drawing");
    json_array_foreach(rows, i, row) {
        point *p = &d->p[d->n++];
        double s = 0;
        p->has_x = place(&d->x, json_array_get(row, (size_t)x), dx, &p->x);
        p->has_y = place(&d->y, json_array_get(row, (size_t)y), dy, &p->y);
        if (z >= 0) {
            p->z = json_number_value(json_array_get(row, (size_t)z));
            p->has_z = json_is_number(json_array_get(row, (size_t)z)) && isfinite(p->z);
        }
        if (by >= 0)
            place(&d->by, json_array_get(row, (size_t)by), dby, &s);
        p->s = (int)s;
    }
    d->n_series = by >= 0 && d->by.n ? d->by.n : 1;
    return d->n_series <= MOST_SERIES ? 0 : lab_fail(err, KVD_E_ARG, "plot \"%.60s\" has %d series, %d can be told apart", d->name, d->n_series, MOST_SERIES);
}

bool lab_plot_visible(const drawing *d, const point *p)
{
    if (d->heat)
        return p->has_x && p->has_y && p->has_z;
    return p->has_x && p->has_y && (!d->log_x || d->x.words || p->x > 0) && (!d->log_y || p->y > 0);
}
