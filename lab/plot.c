/* Drawing the plots of a result: a gnuplot script with its data inside.
 *
 * A plot must be legible where it is read: in a light or dark page, in one column of a
 * telephone. So the canvas is small (480 units) with large letters, nothing is filled
 * behind it, lines have colours of middle lightness, and in SVG what gnuplot draws in
 * black takes the colour of the text around it (currentColor). PNG has a white ground
 * and a quarter more points.
 *
 * Text columns are axes of words, in the order of their first row. A heat map and bars
 * take numbers as words too: their cells are evenly spaced, whatever they are. On a
 * logarithmic axis there is no place for 0: such points are left out, and a series
 * that is 0 everywhere says so in the key, since that is what exact policies are. */
#define _GNU_SOURCE
#include "lab/lab.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "lab/gnuplot.h"
#include "lab/plot_points.h"
#include "lab/whole_file.h"

enum { WIDE = 480, MANY_SERIES = 9 };

/* Middle lightness: at least 3:1 against white and against #181818. */
static const char *const colours[] = {"#3b82d6", "#d9622b", "#2a9d6a", "#c256a8", "#a8842a", "#7d74dc", "#d1495b", "#2f9aa3", "#808890"};
enum { N_COLOURS = sizeof colours / sizeof colours[0] };

/* ---- the script ----------------------------------------------------------------------- */

/* A string for gnuplot: in double quotes a backquote would run a command. */
static void quote(FILE *f, const char *s)
{
    fputc('"', f);
    for (; *s; s++)
        if (*s == '\n')
            fputs("\\n", f);
        else if (*s == '"' || *s == '\\')
            fprintf(f, "\\%c", *s);
        else
            fputc(*s == '`' ? '\'' : (unsigned char)*s < 0x20 || *s == 0x7f ? ' ' : *s, f);
    fputc('"', f);
}

/* The same broken into lines of at most so many bytes. */
static void quote_wrapped(FILE *f, const char *s, size_t most)
{
    char line[512];
    size_t n = 0, begun = 0;
    for (size_t i = 0; s[i] && n < sizeof line - 1; i++) {
        line[n] = s[i];
        if (s[i] == ' ' && n - begun + strcspn(s + i + 1, " ") > most) {
            line[n] = '\n';
            begun = n;
        }
        n++;
    }
    line[n] = 0;
    quote(f, line);
}

static void set_text(FILE *f, const char *what, const char *text, size_t most, const char *more)
{
    fprintf(f, "set %s ", what);
    quote_wrapped(f, text, most);
    fprintf(f, " noenhanced tc rgb 'black'%s\n", more);
}

static int longest(const axis *a)
{
    int most = 0;
    for (int i = 0; i < a->n; i++) {
        int k = (int)strlen(a->label[i]);
        most = k > most ? k : most;
    }
    return most;
}

static void set_words(FILE *f, char which, const axis *a)
{
    int step = a->n > 16 ? (a->n + 11) / 12 : 1;
    bool turn = which == 'x' && longest(a) * ((a->n + step - 1) / step) > 44;
    fprintf(f, "set %ctics scale 0 noenhanced tc rgb 'black'%s (", which, turn ? " rotate by 40 right" : "");
    for (int i = 0; i < a->n; i += step) {
        fputs(i ? ", " : "", f);
        quote(f, a->label[i]);
        fprintf(f, " %d", i);
    }
    fputs(")\n", f);
}

static void head(FILE *f, const drawing *d)
{
    if (d->png)
        fprintf(f, "set terminal pngcairo size %d,%d noenhanced font 'sans,12.5' linewidth 1.2\n", 5 * WIDE / 4, 5 * d->height / 4);
    else {
        fprintf(f, "set terminal svg size %d,%d dynamic noenhanced font 'sans-serif,14' name 'p_", WIDE, d->height);
        for (const char *s = d->name; *s; s++) /* it takes letters and digits only */
            fputc((*s >= 'a' && *s <= 'z') || (*s >= 'A' && *s <= 'Z') || (*s >= '0' && *s <= '9') ? *s : '_', f);
        fputs("'\n", f);
    }
    fputs("set encoding utf8\n"
          "set border 3 lc rgb '#808080'\n"
          "set tics nomirror out noenhanced tc rgb 'black'\n"
          "set format x '%g'\nset format y '%g'\n"
          "set grid lc rgb '#808080' lw 0.4 dt (2,4)\n", f);
}

/* ---- lines, points, bars -------------------------------------------------------------------- */

static void series_data(FILE *f, drawing *d, int s)
{
    double width = 0.8 / d->n_series;
    fprintf(f, "$s%d << EOD\n", s);
    for (int i = 0; i < d->n; i++) {
        const point *p = &d->p[i];
        if (p->s != s)
            continue;
        if (lab_plot_visible(d, p)) {
            fprintf(f, "%.15g %.15g\n", d->bars ? p->x + (s + 0.5) * width - 0.4 : p->x, p->y);
            d->n_drawn[s]++;
        } else {
            d->n_zero[s] += p->has_y && p->y == 0;
            fputs("\n", f); /* a gap in the line */
        }
    }
    fputs("EOD\n", f);
}

static void series_style(FILE *f, const drawing *d, int s)
{
    static const int marks[] = {7, 5, 9, 11, 13, 6, 4, 8, 10};
    const char *colour = colours[s % N_COLOURS];
    if (d->bars)
        fprintf(f, "with boxes fs solid 0.85 noborder lc rgb '%s'", colour);
    else if (!strcmp(d->kind, "points"))
        fprintf(f, "with points pt %d ps 0.7 lc rgb '%s'", marks[s % 9], colour);
    else
        fprintf(f, "with linespoints pt %d ps 0.6 lw 2 dt %d lc rgb '%s'", marks[s % 9], 1 + s / N_COLOURS, colour);
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* A logarithmic axis is labelled where there are points: 32, 64, 128 say more than 10
 * and 100. Those that would touch are left out. */
static void log_tics(FILE *f, const drawing *d)
{
    double *x = malloc(((size_t)d->n + 1) * sizeof *x), last = 0;
    int n = 0;
    for (int i = 0; x && i < d->n; i++)
        if (lab_plot_visible(d, &d->p[i]))
            x[n++] = d->p[i].x;
    if (n > 1) {
        qsort(x, (size_t)n, sizeof *x, ascending);
        double gap = pow(x[n - 1] / x[0], 0.07);
        fputs("set logscale x\nset xtics (", f);
        for (int i = 0; i < n; i++)
            if (last == 0 || x[i] >= last * gap) {
                fprintf(f, "%s'%g' %.15g", last == 0 ? "" : ", ", x[i], x[i]);
                last = x[i];
            }
        fprintf(f, ")\nset xrange [%.15g:%.15g]\n", x[0] / sqrt(gap), x[n - 1] * sqrt(gap));
    }
    free(x);
}

static void draw_series(FILE *f, drawing *d)
{
    double least = INFINITY, most = -INFINITY;
    for (int i = 0; i < d->n; i++)
        if (lab_plot_visible(d, &d->p[i])) {
            least = fmin(least, d->p[i].y);
            most = fmax(most, d->p[i].y);
        }
    for (int s = 0; s < d->n_series; s++)
        series_data(f, d, s);
    if (d->log_x && !d->x.words)
        log_tics(f, d);
    if (d->log_y)
        fputs("set logscale y\n", f);
    if (d->x.words) {
        set_words(f, 'x', &d->x);
        fprintf(f, "set xrange [-0.6:%g]\n", d->x.n - 0.4);
    }
    if (!d->log_y && least >= 0 && (d->bars || least < 0.4 * most))
        fprintf(f, "set yrange [0:%s]\n", most > 0 ? "*" : "1");
    else if (!d->log_y && least == most)
        fprintf(f, "set yrange [%g:%g]\n", least - fabs(least) * 0.1 - 0.1, most + fabs(most) * 0.1 + 0.1);
    if (d->bars)
        fprintf(f, "set boxwidth %g absolute\n", 0.76 / d->n_series);
    if (d->n_series > 1) /* many names in small print, so that they stand in columns and leave room for the lines */
        fprintf(f, "set key outside bottom center horizontal Left reverse noenhanced tc rgb 'black' samplen 1.6 %s\n",
                d->n_series > MANY_SERIES ? "font ',9' width -4" : "width 1");
    else
        fputs("set key off\n", f);
    bool any = false;
    for (int s = 0; s < d->n_series; s++) {
        char zero[32] = "";
        if (d->n_zero[s])
            snprintf(zero, sizeof zero, d->n_drawn[s] ? " (%d x 0)" : " (0)", d->n_zero[s]);
        fputs(any ? ", " : "plot ", f);
        any = true;
        if (d->n_drawn[s])
            fprintf(f, "$s%d using 1:2 ", s);
        else
            fputs("NaN ", f);
        series_style(f, d, s);
        fputs(" title ", f);
        char label[LABEL + 32];
        snprintf(label, sizeof label, "%s%s", d->by.n ? d->by.label[s] : "", zero);
        quote(f, label);
    }
    fputc('\n', f);
}

/* ---- heat maps --------------------------------------------------------------------------------- */

/* From dark to light with even steps of lightness; stops after viridis. */
static void palette(FILE *f)
{
    fputs("set palette defined (0 '#440154', 0.125 '#472d7b', 0.25 '#3b528b', 0.375 '#2c728e', 0.5 '#21918c', 0.625 '#28ae80',"
          " 0.75 '#5ec962', 0.875 '#addc30', 1 '#fde725')\n", f);
}

/* Where z lies between the least and the greatest, 0..1. */
static double shade(const drawing *d, double z, double least, double most)
{
    if (!(most > least))
        return 0.5;
    z = z < least ? least : z;
    return d->log_y ? log(z / least) / log(most / least) : (z - least) / (most - least);
}

/* The numbers of the cells, those on dark cells or those on light ones. */
static void heat_text(FILE *f, const drawing *d, int s, bool light, double least, double most)
{
    fprintf(f, "$t%d%d << EOD\n-9 -9 \"\"\n", s, light); /* out of sight, so that the block is never empty */
    for (int i = 0; i < d->n; i++) {
        const point *p = &d->p[i];
        if (p->s != s || !lab_plot_visible(d, p) || (shade(d, p->z, least, most) > 0.55) != light)
            continue;
        json_t *number = json_real(p->z);
        char text[64];
        int digits = fabs(p->z) >= 1 ? 2 : 3; /* the table has the others */
        lab_cell(number, d->z_decimals > digits ? digits : d->z_decimals, text, sizeof text);
        json_decref(number);
        fprintf(f, "%g %g ", p->x, p->y);
        quote(f, text);
        fputc('\n', f);
    }
    fputs("EOD\n", f);
}

/* Few enough cells to write their numbers into them; then no scale of colours is needed. */
static bool has_numbers(const drawing *d) { return d->x.n <= 8 && d->y.n <= 24; }

static void heat_panel(FILE *f, const drawing *d, int s, double least, double most)
{
    int cells = 0;
    fprintf(f, "$d%d << EOD\n", s);
    for (int i = 0; i < d->n; i++)
        if (d->p[i].s == s && lab_plot_visible(d, &d->p[i])) {
            fprintf(f, "%g %g %.15g\n", d->p[i].x, d->p[i].y, d->log_y && d->p[i].z < least ? least : d->p[i].z);
            cells++;
        }
    if (!cells)
        fputs("-9 -9 0\n", f);
    fputs("EOD\n", f);
    bool numbers = has_numbers(d);
    for (int light = 0; numbers && light < 2; light++)
        heat_text(f, d, s, light, least, most);
    char title[300];
    snprintf(title, sizeof title, "%s%s%s%s", d->title, d->by.n ? ": " : "", d->by.n ? d->by.label[s] : "", cells ? "" : " (nothing measured)");
    size_t wide = (size_t)longest(&d->y); /* the title stands over the cells, not over their names */
    set_text(f, "title", title, wide > 26 ? 26 : 52 - wide, "");
    fprintf(f, "plot $d%d using 1:2:(0.47):(0.47):3 with boxxyerror fs solid 1 noborder fc palette notitle", s);
    if (numbers)
        fprintf(f, ", $t%d0 using 1:2:3 with labels font ',%d' tc rgb '#ffffff' notitle, $t%d1 using 1:2:3 with labels font ',%d' tc rgb '#101010' notitle", s, d->png ? 10 : 12, s, d->png ? 10 : 12);
    fputc('\n', f);
}

static void draw_heat(FILE *f, const drawing *d)
{
    double least = INFINITY, most = -INFINITY;
    for (int i = 0; i < d->n; i++)
        if (lab_plot_visible(d, &d->p[i]) && (!d->log_y || d->p[i].z > 0)) {
            least = fmin(least, d->p[i].z);
            most = fmax(most, d->p[i].z);
        }
    if (!(most >= least))
        least = most = 1;
    palette(f);
    set_words(f, 'x', &d->x);
    set_words(f, 'y', &d->y);
    fprintf(f, "unset grid\nset key off\nset border 0\nset xrange [-0.5:%g]\nset yrange [%g:-0.5]\n", d->x.n - 0.5, d->y.n - 0.5);
    if (most > least)
        fprintf(f, "set cbrange [%.15g:%.15g]\n%s", least, most, d->log_y ? "set logscale cb\n" : "");
    else
        fprintf(f, "set cbrange [%.15g:%.15g]\n", least - 1, most + 1);
    if (has_numbers(d))
        fputs("unset colorbox\n", f);
    if (longest(&d->y) > 8)
        fputs("unset ylabel\n", f); /* names that speak for themselves, and need the room */
    /* Beside a flat map there is no room for a long title: what the map shows its own says, so the unit will do. */
    size_t room = (size_t)(d->height / d->n_series / 9);
    const char *unit = strlen(d->z_title) > room ? strrchr(d->z_title, ',') : NULL;
    set_text(f, "cblabel", unit ? unit + 1 + strspn(unit + 1, " ") : d->z_title, room, "");
    fputs("set cbtics noenhanced tc rgb 'black'\n", f);
    if (d->n_series > 1)
        fprintf(f, "set multiplot layout %d,1\n", d->n_series);
    for (int s = 0; s < d->n_series; s++)
        heat_panel(f, d, s, least, most);
    if (d->n_series > 1)
        fputs("unset multiplot\n", f);
}

/* ---- the file ---------------------------------------------------------------------------------- */

/* What is drawn in black takes the colour of the text around the picture. The new
 * text, owned, or NULL. */
static char *adopt_colour(const char *svg, size_t n, size_t *n_out)
{
    static const char *const change[][2] = {
        {" color=\"black\"", ""}, {"stroke='black'", "stroke='currentColor'"}, {"stroke=\"black\"", "stroke=\"currentColor\""},
        {"fill=\"black\"", "fill=\"currentColor\""}, {"fill=\"rgb(0,0,0)\"", "fill=\"currentColor\""},
        {"'rgb(  0,   0,   0)'", "'currentColor'"}};
    enum { N = sizeof change / sizeof change[0] };
    char *out = malloc(2 * n + 1); /* no replacement is twice as long */
    size_t len = 0;
    for (size_t i = 0; out && i < n;) {
        size_t r = 0;
        while (r < N && (n - i < strlen(change[r][0]) || memcmp(svg + i, change[r][0], strlen(change[r][0]))))
            r++;
        const char *with = r < N ? change[r][1] : svg + i;
        size_t k = r < N ? strlen(with) : 1;
        memcpy(out + len, with, k);
        len += k;
        i += r < N ? strlen(change[r][0]) : 1;
    }
    *n_out = len;
    return out;
}

static int write_file(const char *path, const char *data, size_t n, kvd_error *err)
{
    lab_file w;
    int rc = lab_file_begin(&w, path, err);
    if (rc)
        return rc;
    fwrite(data, 1, n, w.f); /* the end sees whether it went well */
    return lab_file_end(&w, true, err);
}

static int draw(drawing *d, const char *path, kvd_error *err)
{
    char *out = NULL;
    size_t n = 0;
    FILE *script = tmpfile();
    if (!script)
        return lab_fail(err, KVD_E_IO, "a script for gnuplot: %s", strerror(errno));
    int cells = has_numbers(d) ? 24 : d->y.n > 12 ? 11 : 16;
    int panel = 130 + cells * d->y.n;
    d->height = d->heat ? d->n_series * (panel < 220 ? 220 : panel) : 330 + 20 * ((d->n_series + 1) / 2);
    head(script, d);
    set_text(script, "title", d->title, 52, "");
    set_text(script, "xlabel", d->x_title, 56, " offset 0,0.5");
    set_text(script, "ylabel", d->y_title, 44, "");
    if (d->heat)
        draw_heat(script, d);
    else
        draw_series(script, d);
    int rc = ferror(script) ? lab_fail(err, KVD_E_IO, "a script for gnuplot") : lab_gnuplot(script, &out, &n, err);
    fclose(script);
    if (!rc && !d->png) {
        char *svg = adopt_colour(out, n, &n);
        free(out);
        out = svg;
        rc = svg ? 0 : lab_fail(err, KVD_E_NOMEM, "out of memory: a drawing");
    }
    rc = rc ? rc : write_file(path, out, n, err);
    free(out);
    return rc;
}

int lab_draw(const json_t *result, const json_t *plot, const char *path, kvd_error *err)
{
    size_t n = strlen(path);
    drawing d = {.png = n > 4 && !strcmp(path + n - 4, ".png"), .x_title = "", .y_title = "", .z_title = ""};
    if (!d.png && (n <= 4 || strcmp(path + n - 4, ".svg")))
        return lab_fail(err, KVD_E_ARG, "a drawing is .svg or .png");
    int rc = lab_plot_points(result, plot, &d, err);
    rc = rc ? rc : draw(&d, path, err);
    lab_plot_free(&d);
    return rc;
}
