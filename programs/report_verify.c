/* Two results that are no experiment of lab/: what kvd verify says, and what a token
 * costs in bytes. Both take the form of the others, so that the page knows one form. */
#include <stdlib.h>
#include <string.h>

#include "report.h"

static json_t *empty_result(const char *experiment, const char *paper)
{
    return json_pack("{s:s, s:s, s:{}, s:[], s:[], s:[], s:[]}", "experiment", experiment, "paper", paper, "settings", "tables", "plots", "notes",
                     "paper_rows");
}

static json_int_t int_at(const json_t *o, const char *key) { return json_integer_value(json_object_get(o, key)); }

/* ---- bytes per token ----------------------------------------------------------------- */

/* Table 1 of the paper, for models of these shapes. */
static const struct {
    const char *name;
    int64_t n_layers, n_kv_heads, d_head, d_model;
    const char *kv, *residual, *ratio;
} table1[] = {
    {"SmolLM2-135M", 30, 3, 64, 576, "22.5 KB", "1.1 KB", "20.0"},
    {"Qwen2.5-0.5B", 24, 2, 64, 896, "12.0 KB", "1.8 KB", "6.9"},
    {"Qwen3-0.6B", 28, 8, 128, 1024, "112.0 KB", "2.0 KB", "56.0"},
    {"DS-R1-Distill-1.5B, Qwen2.5-1.5B", 28, 2, 128, 1536, "28.0 KB", "3.0 KB", "9.3"},
    {"Gemma 3-4B-IT", 34, 4, 256, 2560, "136.0 KB", "5.0 KB", "27.2"},
};

static void compare_table1(json_t *result, const kvd_model_info *i, double kv, double residual)
{
    for (size_t k = 0; k < sizeof table1 / sizeof table1[0]; k++) {
        char what[96], paper[96], ours[96];
        if (table1[k].n_layers != i->n_layers || table1[k].n_kv_heads != i->n_kv_heads || table1[k].d_head != i->d_head || table1[k].d_model != i->d_model)
            continue;
        snprintf(what, sizeof what, "KV cache, one residual, ratio (%s)", table1[k].name);
        snprintf(paper, sizeof paper, "%s, %s, %sx", table1[k].kv, table1[k].residual, table1[k].ratio);
        snprintf(ours, sizeof ours, "%.1f KB, %.1f KB, %.1fx", kv / 1024, residual / 1024, kv / residual);
        lab_paper(result, what, paper, ours, strcmp(paper, ours) ? "differs" : "reproduced", strcmp(paper, ours) ? "the file's shapes give other bytes" : "");
    }
}

json_t *report_memory(const kvd_model *m, const kvd_model_info *i)
{
    static const lab_column columns[] = {
        {"what", "what is kept of a token", 0}, {"kb", "KB of 1024 bytes a token", 3}, {"ratio", "the KV cache is so many times larger", 1}, {NULL, NULL, 0}};
    kvd_session_options o;
    kvd_plan small, own;
    kvd_session_options_defaults(&o);
    kvd_plan_session(m, &o, 0, 1, 0, &own);
    o.kv_type = o.stream = KVD_TYPE_BF16;
    kvd_plan_session(m, &o, 0, 1, 0, &small);
    double kv = (double)small.kv_bytes_per_token, residual = (double)small.residual_bytes_per_token;
    json_t *result = empty_result("memory", "Table 1"), *t = lab_table(result, "bytes", "Bytes per token of context, 2-byte numbers", columns);
    const struct {
        const char *what;
        double bytes;
    } rows[] = {{"K and V of all layers", kv},
                {"one residual vector", residual},
                {"a residual vector of each layer", residual * (double)i->n_layers},
                {"the token's id: between passes", 4},
                {"while a pass rebuilds it: an f32 residual, K and V of one layer", (double)own.evicted_bytes_per_token}};
    for (size_t k = 0; k < sizeof rows / sizeof rows[0]; k++)
        lab_row(t, json_pack("[s, f, f]", rows[k].what, rows[k].bytes / 1024, kv / rows[k].bytes));
    compare_table1(result, i, kv, residual);
    char ours[96];
    snprintf(ours, sizeof ours, "%.1f KB while a pass rebuilds it, 4 bytes between", (double)own.evicted_bytes_per_token / 1024);
    lab_paper(result, "memory of an evicted token", "one residual of 2-byte numbers", ours, "differs",
              "one vector a token is not enough to make K and V of all layers: layer l needs the residual at layer l. So evicted tokens are computed "
              "again from their ids, and while that lasts each has its residual and one layer's K and V in memory (docs/memory.md)");
    if (i->window_tokens)
        lab_note(result,
                 "%lld of %lld layers keep the last %lld tokens only: beyond that a token of context costs less than the first row says, and the ratios fall.",
                 (long long)i->n_local_layers, (long long)i->n_layers, (long long)i->window_tokens);
    return result;
}

/* ---- verify: reconstruction ------------------------------------------------------------- */

typedef struct {
    int n, exact, cast, cast_exact;
    double cast_dk; /* the largest difference of the casts */
    bool rebuilt;   /* all that were rebuilt were the same bits */
    char lengths[96], streams[64];
} reconstruction;

static void append_once(char *list, size_t size, const char *word)
{
    char padded[160], sought[64];
    snprintf(padded, sizeof padded, ", %s,", list);
    snprintf(sought, sizeof sought, ", %s,", word);
    if (!strstr(padded, sought) && strlen(list) + strlen(word) + 3 < size) {
        if (*list)
            strcat(list, ", ");
        strcat(list, word);
    }
}

static void count_row(reconstruction *s, const json_t *row)
{
    bool exact = json_is_true(json_object_get(row, "exact"));
    char length[32];
    if (!json_is_true(json_object_get(row, "must_be_exact"))) {
        double dk = json_number_value(json_object_get(row, "max_dk"));
        s->cast++;
        s->cast_exact += exact;
        s->cast_dk = dk > s->cast_dk ? dk : s->cast_dk;
        return;
    }
    if (json_object_get(row, "numeric_error"))
        return;
    s->n++;
    s->exact += exact;
    s->rebuilt = s->rebuilt && !json_is_false(json_object_get(row, "rebuilt_equal"));
    snprintf(length, sizeof length, "%" JSON_INTEGER_FORMAT, int_at(row, "tokens"));
    append_once(s->lengths, sizeof s->lengths, length);
    append_once(s->streams, sizeof s->streams, lab_text_at(row, "stream"));
}

/* One line for each stream that a length or more could not be computed in. */
static void note_numeric_errors(json_t *result, const json_t *verify)
{
    const json_t *rows = json_object_get(verify, "reconstruction");
    size_t i, k;
    json_t *row, *other;
    json_array_foreach(rows, i, row) {
        const char *stream = lab_text_at(row, "stream"), *error = lab_text_at(row, "numeric_error");
        char lengths[96] = "";
        bool first = *error;
        json_array_foreach(rows, k, other) {
            char length[32];
            if (!*error || strcmp(lab_text_at(other, "numeric_error"), error) || strcmp(lab_text_at(other, "stream"), stream))
                continue;
            first = first && k >= i;
            snprintf(length, sizeof length, "%" JSON_INTEGER_FORMAT, int_at(other, "tokens"));
            append_once(lengths, sizeof lengths, length);
        }
        if (first)
            lab_note(result, "stream %s: %s; nothing was compared there (lengths %s).", stream, error, lengths);
    }
}

static reconstruction add_reconstruction(json_t *result, const json_t *verify)
{
    static const lab_column columns[] = {{"stream", "stream", 0}, {"kv_type", "K and V as", 0}, {"tokens", "tokens", 0},
                                         {"max_dk", "max |dK|", -2}, {"layer_k", "in layer", 0}, {"max_dv", "max |dV|", -2}, {"layer_v", "in layer", 0},
                                         {"exact", "equal bits", 0}, {"rebuilt", "dropped and rebuilt: equal bits", 0}, {NULL, NULL, 0}};
    json_t *t = lab_table(result, "reconstruction", "K and V made from the residual against those that attention read, all layers and positions", columns);
    reconstruction s = {.rebuilt = true};
    size_t i;
    json_t *row;
    json_array_foreach(json_object_get(verify, "reconstruction"), i, row) {
        json_t *cells = json_array();
        static const char *const keys[] = {"stream", "kv_type", "tokens", "max_dk", "max_dk_layer", "max_dv", "max_dv_layer", "exact", "rebuilt_equal"};
        for (size_t k = 0; k < sizeof keys / sizeof keys[0]; k++) {
            json_t *cell = json_object_get(row, keys[k]);
            bool no_layer = (k == 4 || k == 6) && json_number_value(json_object_get(row, keys[k - 1])) == 0; /* of a difference that is none */
            json_array_append_new(cells, cell && !no_layer ? json_incref(cell) : json_null());
        }
        lab_row(t, cells);
        count_row(&s, row);
    }
    note_numeric_errors(result, verify);
    return s;
}

/* ---- verify: rotation, tokens, receipts ---------------------------------------------------- */

static void add_rope(json_t *result, const json_t *verify)
{
    static const lab_column columns[] = {{"layers", "layers, rotation", 0}, {"max_dk", "max |dK|", -2}, {"max_dv", "max |dV|", -2}, {NULL, NULL, 0}};
    const json_t *rows = json_object_get(verify, "rope");
    size_t i;
    json_t *row, *t = json_array_size(rows) ? lab_table(result, "rotation", "Sliding-window layers past their window", columns) : NULL;
    json_array_foreach(rows, i, row) {
        double dk = json_number_value(json_object_get(row, "max_dk")), dv = json_number_value(json_object_get(row, "max_dv"));
        lab_row(t, json_pack("[s, f, f]", lab_text_at(row, "layers"), dk, dv));
        if (i == 2) {
            char ours[96];
            snprintf(ours, sizeof ours, "0 and 0 as we rotate; %.3g and %.3g by Eq. 16", dk, dv);
            lab_paper(result, "sliding-window layers: max |dK|, max |dV|", "> 0, 0", ours, "differs",
                      "keys are rotated by their absolute position and the window is a mask, so K is exact on sliding layers too; rotated by their "
                      "place in the window, as the paper's cache does, the difference is there as it says");
        }
    }
}

static void add_generation(json_t *result, const json_t *verify)
{
    static const lab_column columns[] = {{"prompt", "prompt tokens", 0}, {"tokens", "new tokens", 0}, {"same", "equal tokens", 0},
                                         {"logits", "logits equal in every bit", 0}, {"cached_s", "cached, s", 3}, {"scratch_s", "from scratch, s", 3},
                                         {NULL, NULL, 0}};
    const json_t *g = json_object_get(verify, "generation");
    if (g)
        lab_row(lab_table(result, "generation", "Greedy tokens, cached against from scratch at every step", columns),
                json_pack("[I, I, I, I, f, f]", int_at(g, "prompt_tokens"), int_at(g, "tokens"), int_at(g, "equal_tokens"), int_at(g, "equal_logits"),
                          json_number_value(json_object_get(g, "cached_s")), json_number_value(json_object_get(g, "scratch_s"))));
}

static void add_receipts(json_t *result, const json_t *verify)
{
    static const lab_column columns[] = {{"prompt", "prompt tokens", 0}, {"tokens", "new tokens", 0}, {"numbers", "numbers", 0}, {"receipt", "receipt", 0},
                                         {NULL, NULL, 0}};
    json_t *t = lab_table(result, "receipts", "One hash of tokens and logits over all budgets, chunks, threads and instruction sets", columns);
    size_t i, runs = 0;
    json_t *group;
    json_array_foreach(json_object_get(verify, "receipts"), i, group) {
        const char *name;
        json_t *receipt;
        json_object_foreach(json_object_get(group, "receipts"), name, receipt) {
            json_t *cells = json_pack("[I, I, s]", int_at(group, "prompt_tokens"), int_at(group, "new_tokens"), name);
            json_array_append(cells, receipt);
            lab_row(t, cells);
        }
        runs += json_array_size(json_object_get(group, "runs"));
    }
    lab_note(result, "%zu runs gave these receipts; %" JSON_INTEGER_FORMAT " comparisons were equal, %" JSON_INTEGER_FORMAT " were not: verdict %s.", runs,
             int_at(verify, "matches"), int_at(verify, "mismatches"), lab_text_at(verify, "verdict"));
}

json_t *report_from_verify(const json_t *verify, const json_t *model)
{
    json_t *result = empty_result("verify", "5.1, Table 2");
    reconstruction s = add_reconstruction(result, verify);
    char what[256], ours[160];
    json_int_t n_local = int_at(model, "n_local_layers"), bad = int_at(verify, "mismatches");
    snprintf(what, sizeof what, "max |dK| and |dV|, %s layers, lengths %s, streams %s", n_local ? "global and sliding" : "all", s.lengths, s.streams);
    snprintf(ours, sizeof ours, "%d of %d exactly 0", s.exact, s.n);
    if (s.n)
        lab_paper(result, what, "0 on full-attention layers", ours, s.exact == s.n ? "reproduced" : "differs", s.exact == s.n ? "" : "see the table");
    if (s.cast) {
        snprintf(ours, sizeof ours, "%d of %d exactly 0, |dK| up to %.2g", s.cast_exact, s.cast, s.cast_dk);
        lab_paper(result, "f32 stream, its copy cast to bfloat16", "0", ours, s.cast_exact == s.cast ? "reproduced" : "differs",
                  s.cast_exact == s.cast ? "" : "a rounded copy is not the residual that the layer saw; it can be exact only where the stream itself is bfloat16");
    }
    add_rope(result, verify);
    add_generation(result, verify);
    add_receipts(result, verify);
    if (s.n && !s.rebuilt)
        lab_note(result, "What was dropped and rebuilt did not have the old bits.");
    if (bad)
        lab_check_failed(result, "%" JSON_INTEGER_FORMAT " comparisons that must be equal were not.", bad);
    const char *keys[] = {"mode", "chunk"};
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++)
        lab_setting(result, keys[i], json_incref(json_object_get(verify, keys[i])));
    json_object_set_new(result, "machine", json_pack("{s:O?, s:O?}", "isa", json_object_get(verify, "cpu"), "threads", json_object_get(verify, "threads")));
    json_object_set(result, "seconds", json_object_get(verify, "seconds"));
    return result;
}
