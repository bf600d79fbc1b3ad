/* A result on a terminal: its tables, the paper's numbers beside ours, its notes.
 *
 * Columns are as wide as their widest cell or the longest word of their title, which
 * is broken into lines. On a terminal a table is cut to what fits: rows from the end,
 * columns from the right, and a line says so; in a pipe nothing is cut. */
#define _GNU_SOURCE
#include "lab/lab.h"

#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

enum { MOST_ROWS = 64, MOST_WIDE = 48, MOST_COLUMNS = 32, CELL = 1024 };

typedef struct {
    const json_t *rows;
    const char *title[MOST_COLUMNS];
    int decimals[MOST_COLUMNS], width[MOST_COLUMNS];
    bool left[MOST_COLUMNS];
    int n, n_all; /* columns shown, and there */
    size_t n_rows;
} layout;

/* Characters of text; one column each, whatever the script. */
static int width_of(const char *s, size_t n)
{
    int w = 0;
    for (size_t i = 0; i < n; i++)
        w += ((unsigned char)s[i] & 0xc0) != 0x80;
    return w;
}

static void put(FILE *out, const char *s, size_t n, int width, bool left)
{
    int pad = width - width_of(s, n);
    pad = pad > 0 ? pad : 0;
    fprintf(out, "%*s%.*s%*s", left ? 0 : pad, "", (int)n, s, left ? pad : 0, "");
}

/* Bytes of text that are shown: whole characters, at most so many. */
static size_t shown(const char *s, int most)
{
    size_t i = 0;
    for (int w = 0; s[i]; i++)
        if (((unsigned char)s[i] & 0xc0) != 0x80 && ++w > most)
            break;
    return i;
}

/* Bytes of as many words as stand in one line, at least one. */
static size_t line_of(const char *s, int width)
{
    size_t end = strcspn(s, " ");
    while (s[end]) {
        size_t next = end + 1 + strcspn(s + end + 1, " ");
        if (width_of(s, next) > width)
            break;
        end = next;
    }
    return end;
}

static int longest_word(const char *s)
{
    int most = 0;
    while (*s) {
        size_t n = strcspn(s, " ");
        int w = width_of(s, n);
        most = w > most ? w : most;
        s += n + (s[n] == ' ');
    }
    return most;
}

static void cell_of(const layout *l, size_t row, int column, char out[CELL])
{
    lab_cell(json_array_get(json_array_get(l->rows, row), (size_t)column), l->decimals[column], out, CELL);
    size_t n = shown(out, MOST_WIDE);
    if (out[n]) { /* it is longer */
        n = shown(out, MOST_WIDE - 3);
        memcpy(out + n, "...", 4);
    }
}

static void lay_out(const json_t *table, bool whole, int terminal, layout *l)
{
    const json_t *columns = json_object_get(table, "columns");
    char text[CELL];
    *l = (layout){.rows = json_object_get(table, "rows"), .n_all = (int)json_array_size(columns)};
    l->n_rows = json_array_size(l->rows);
    if (!whole && l->n_rows > MOST_ROWS)
        l->n_rows = MOST_ROWS;
    for (int c = 0, used = 3; c < l->n_all && c < MOST_COLUMNS; c++) {
        const json_t *column = json_array_get(columns, (size_t)c);
        const char *title = json_string_value(json_object_get(column, "title"));
        l->title[c] = title ? title : "";
        l->decimals[c] = (int)json_integer_value(json_object_get(column, "decimals"));
        l->width[c] = longest_word(l->title[c]);
        for (size_t r = 0; r < l->n_rows; r++) {
            cell_of(l, r, c, text);
            int w = width_of(text, strlen(text));
            l->width[c] = w > l->width[c] ? w : l->width[c];
            l->left[c] = l->left[c] || json_is_string(json_array_get(json_array_get(l->rows, r), (size_t)c));
        }
        used += l->width[c] + 2;
        if (!whole && c > 0 && used > terminal)
            break;
        l->n = c + 1;
    }
}

static void print_titles(const layout *l, FILE *out)
{
    const char *rest[MOST_COLUMNS];
    bool more = true;
    memcpy(rest, l->title, sizeof rest);
    while (more) {
        more = false;
        fputs(" ", out);
        for (int c = 0; c < l->n; c++) {
            size_t n = line_of(rest[c], l->width[c]);
            fputs("  ", out);
            put(out, rest[c], n, l->width[c], l->left[c]);
            rest[c] += n + (rest[c][n] == ' ');
            more = more || *rest[c];
        }
        fputc('\n', out);
    }
}

static void print_table(const json_t *table, FILE *out, bool whole, int terminal)
{
    layout l;
    char text[CELL];
    lay_out(table, whole, terminal, &l);
    fprintf(out, "\n%s\n", json_string_value(json_object_get(table, "title")));
    print_titles(&l, out);
    for (size_t r = 0; r < l.n_rows; r++) {
        fputs(" ", out);
        for (int c = 0; c < l.n; c++) {
            cell_of(&l, r, c, text);
            fputs("  ", out);
            put(out, text, strlen(text), l.width[c], l.left[c]);
        }
        fputc('\n', out);
    }
    size_t hidden = json_array_size(l.rows) - l.n_rows;
    if (hidden || l.n < l.n_all)
        fprintf(out, "   (%zu more rows, %d more columns: -o FILE.tsv or --json has all)\n", hidden, l.n_all - l.n);
}

/* Words of text within the width, later lines indented. */
static void print_wrapped(const char *text, int indent, int width, FILE *out)
{
    for (const char *s = text; *s;) {
        size_t n = line_of(s, width - indent);
        fprintf(out, "%*s%.*s\n", s == text ? 0 : indent, "", (int)n, s);
        s += n + (s[n] == ' ');
    }
}

void lab_print(const json_t *result, FILE *out)
{
    struct winsize w = {0};
    bool whole = !isatty(fileno(out));
    int terminal = !whole && !ioctl(fileno(out), TIOCGWINSZ, &w) && w.ws_col >= 40 ? w.ws_col : 100;
    const json_t *model = json_object_get(result, "model"), *machine = json_object_get(result, "machine");
    char text[CELL];
    size_t i;
    json_t *item;
    lab_cell(json_object_get(model, "name"), 0, text, sizeof text);
    fprintf(out, "%s (paper: %s), %s", lab_text_at(result, "experiment"), lab_text_at(result, "paper"), text);
    lab_cell(json_object_get(model, "file"), 0, text, sizeof text);
    fprintf(out, " (%s), %s, %lld threads\n", text, lab_text_at(machine, "isa"), (long long)json_integer_value(json_object_get(machine, "threads")));
    json_array_foreach(json_object_get(result, "tables"), i, item)
        print_table(item, out, whole, terminal);
    if (json_array_size(json_object_get(result, "paper_rows")))
        fputs("\nThe paper's numbers beside ours\n", out);
    json_array_foreach(json_object_get(result, "paper_rows"), i, item) {
        const char *why = lab_text_at(item, "why");
        int n = snprintf(text, sizeof text, "   %s: paper %s, ours %s: %s%s%s", lab_text_at(item, "what"), lab_text_at(item, "paper"), lab_text_at(item, "ours"),
                         lab_text_at(item, "verdict"), *why ? ", " : "", why);
        if (n > 0)
            print_wrapped(text, 6, terminal, out);
    }
    if (json_array_size(json_object_get(result, "notes")))
        fputs("\nNotes\n", out);
    json_array_foreach(json_object_get(result, "notes"), i, item) {
        const char *s = json_string_value(item);
        fputs(" - ", out);
        print_wrapped(s ? s : "", 3, terminal, out);
    }
    fprintf(out, "\n%.1f s\n", json_number_value(json_object_get(result, "seconds")));
}
