/* Pieces of the page: escaping, tables, pictures, and the head with its style.
 *
 * One file without scripts, fonts or pictures from elsewhere. Text that came from a
 * model file or a data file goes through html_text, without exception. */
#include <stdlib.h>
#include <string.h>

#include "report.h"

void html_text(FILE *f, const char *s)
{
    for (; s && *s; s++)
        switch (*s) {
        case '&': fputs("&amp;", f); break;
        case '<': fputs("&lt;", f); break;
        case '>': fputs("&gt;", f); break;
        case '"': fputs("&quot;", f); break;
        case '\'': fputs("&#39;", f); break;
        default:
            if ((unsigned char)*s >= 0x20 || *s == '\n' || *s == '\t')
                fputc(*s, f);
            else
                fputs("\xef\xbf\xbd", f); /* no page may hold it, not even as a number */
        }
}

void html_json(FILE *f, const json_t *string)
{
    const char *s = json_string_value(string), *end = s ? s + json_string_length(string) : NULL;
    while (s < end) { /* a NUL may be in it */
        html_text(f, s);
        s += strlen(s);
        if (s < end)
            fputs("\xef\xbf\xbd", f), s++;
    }
}

/* ---- tables -------------------------------------------------------------------------- */

enum { FOLDED_ROWS = 24, MOST_ROWS = 400 };

static void rows(FILE *f, const json_t *table)
{
    const json_t *columns = json_object_get(table, "columns");
    char text[2048];
    size_t i, k;
    json_t *row;
    json_array_foreach(json_object_get(table, "rows"), i, row) {
        if (i == MOST_ROWS)
            return;
        fputs("<tr>", f);
        for (k = 0; k < json_array_size(columns); k++) {
            const json_t *cell = json_array_get(row, k);
            lab_cell(cell, (int)json_integer_value(json_object_get(json_array_get(columns, k), "decimals")), text, sizeof text);
            fputs(json_is_string(cell) ? "<td class=w>" : "<td>", f);
            html_text(f, text);
            fputs("</td>", f);
        }
        fputs("</tr>\n", f);
    }
}

static bool column_of_words(const json_t *table, size_t k)
{
    return json_is_string(json_array_get(json_array_get(json_object_get(table, "rows"), 0), k));
}

void html_table(FILE *f, const json_t *table, const char *tsv)
{
    size_t n = json_array_size(json_object_get(table, "rows")), k;
    json_t *column;
    bool folded = n > FOLDED_ROWS;
    fputs(folded ? "<details><summary>" : "<h5>", f);
    html_json(f, json_object_get(table, "title"));
    if (folded)
        fprintf(f, " (%zu rows)", n);
    fprintf(f, " <a class=tsv href=\"tsv/%s\">TSV</a>%s\n<div class=wide><table>\n<tr>", tsv, folded ? "</summary>" : "</h5>");
    json_array_foreach(json_object_get(table, "columns"), k, column) {
        fputs(column_of_words(table, k) ? "<th class=w>" : "<th>", f);
        html_json(f, json_object_get(column, "title"));
        fputs("</th>", f);
    }
    fputs("</tr>\n", f);
    rows(f, table);
    fputs("</table></div>\n", f);
    if (n > MOST_ROWS)
        fprintf(f, "<p class=dim>The first %d rows; the others are in the TSV file.</p>\n", MOST_ROWS);
    if (folded)
        fputs("</details>\n", f);
}

/* ---- pictures --------------------------------------------------------------------------- */

static bool starts(const char *s, const char *with) { return !strncmp(s, with, strlen(with)); }

/* Behind the end of an element that begins at s. */
static const char *behind(const char *s, const char *end)
{
    const char *p = strstr(s, end);
    return p ? p + strlen(end) : s + 1;
}

void html_svg(FILE *f, const char *svg, int n, const char *title)
{
    static const char line_style[] = " stroke-width=\"1.00\" stroke-linecap=\"butt\" stroke-linejoin=\"miter\"";
    const char *s = strstr(svg, "<svg"), *box = s ? strstr(s, "viewBox=\"") : NULL, *open = s ? strchr(s, '>') : NULL;
    if (!open || !box || box > open)
        return;
    fprintf(f, "<svg viewBox=\"%.*s\" role=\"img\" aria-label=\"", (int)strcspn(box + 9, "\""), box + 9);
    html_text(f, title);
    fputs("\">", f);
    for (s = open + 1; *s;) {
        if (starts(s, "<title>"))
            s = behind(s, "</title>"); /* gnuplot's own; the label says more */
        else if (starts(s, "<desc>"))
            s = behind(s, "</desc>");
        else if (starts(s, "<script"))
            s = behind(s, "</script>");
        else if (starts(s, "<filter")) /* for boxed labels, of which there are none */
            s = behind(s, "</filter>");
        else if (starts(s, line_style)) /* what is so without being said, once for each mark of an axis */
            s += strlen(line_style);
        else if (starts(s, " font-family=\"sans-serif\""))
            s += strlen(" font-family=\"sans-serif\""); /* the page's */
        else if (starts(s, " id=\"") || starts(s, " id='")) {
            fprintf(f, "%.5sp%d-", s, n);
            s += 5;
        } else if (starts(s, "href='#") || starts(s, "href=\"#")) {
            fprintf(f, "%.7sp%d-", s, n);
            s += 7;
        } else if (*s == '\t' || (*s == ' ' && s[1] == ' ') || (*s == '\n' && s[1] == '\n'))
            s++;
        else
            fputc(*s++, f);
    }
}

/* ---- head and foot ---------------------------------------------------------------------- */

static const char style[] =
    ":root{color-scheme:light dark;--fg:#1b1e22;--bg:#fff;--dim:#5b6570;--line:#d6dbe1;--soft:#f3f5f8;--link:#1259b5;"
    "--ok:#17713d;--bad:#b3261e;--mid:#7d5a00}\n"
    "@media(prefers-color-scheme:dark){:root{--fg:#e4e6e9;--bg:#15171a;--dim:#9aa4af;--line:#363c43;--soft:#1f2328;--link:#7db4ff;"
    "--ok:#62c78a;--bad:#ff8a80;--mid:#e0b04a}}\n"
    "*{box-sizing:border-box}body{margin:0 auto;max-width:64rem;padding:1rem;background:var(--bg);color:var(--fg);"
    "font:16px/1.5 system-ui,sans-serif;overflow-wrap:break-word}\n"
    "h1{font-size:1.6rem;line-height:1.2}h2{font-size:1.3rem;margin:2.5rem 0 .5rem;border-top:1px solid var(--line);padding-top:1.2rem}"
    "h3{font-size:1.1rem;margin:2rem 0 .2rem}h4{font-size:1rem;margin:1.5rem 0 .2rem}h5{font-size:.9rem;margin:1rem 0 .3rem}\n"
    "a{color:var(--link)}code{font:.85em ui-monospace,monospace;background:var(--soft);padding:.1em .3em;border-radius:3px}"
    ".dim{color:var(--dim);font-size:.85rem}.hash{font-family:ui-monospace,monospace;font-size:.9em;overflow-wrap:anywhere}.paper{border-left:3px solid var(--line);padding-left:.8rem}\n"
    ".wide{overflow-x:auto}table{border-collapse:collapse;font-size:.85rem;font-variant-numeric:tabular-nums}"
    "th,td{padding:.25rem .6rem;text-align:right;vertical-align:top;border-bottom:1px solid var(--line)}"
    "th{font-weight:600;vertical-align:bottom;background:var(--soft)}.w{text-align:left}\n"
    ".plots{display:flex;flex-wrap:wrap;gap:1rem}figure{margin:.5rem 0;flex:1 1 20rem;max-width:36rem;min-width:0}svg{width:100%;height:auto;"
    "font-family:system-ui,sans-serif}\n"
    "summary{cursor:pointer;font-size:.9rem;font-weight:600;margin:.6rem 0}.tsv{font-weight:400;font-size:.8rem}\n"
    ".v{white-space:nowrap;font-weight:600}.reproduced{color:var(--ok)}.differs{color:var(--bad)}.not{color:var(--mid)}"
    ".alarm{border:2px solid var(--bad);padding:.5rem .8rem;border-radius:4px}\n"
    ".verdicts td{text-align:left}.verdicts th{text-align:left}.g td{font-weight:600;background:var(--soft)}\n"
    ".verdicts td[data-l=model]{min-width:9.5em}"
    "@media(max-width:44rem){.verdicts tr:first-child{display:none}.verdicts,.verdicts tbody,.verdicts tr,.verdicts td{display:block;width:100%}"
    ".verdicts tr{border-bottom:1px solid var(--line);padding:.5rem 0}.verdicts td{border:0;padding:.05rem 0}"
    ".verdicts td[data-l]::before{content:attr(data-l) \": \";color:var(--dim)}.verdicts td:empty{display:none}}\n";

void html_begin(FILE *f)
{
    fprintf(f,
            "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n"
            "<meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\n"
            "<title>The Residual Stream Is All You Need: measured</title>\n<style>\n%s</style></head>\n<body>\n",
            style);
}

void html_end(FILE *f) { fputs("</body></html>\n", f); }
