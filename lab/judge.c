#define _GNU_SOURCE
#include "lab/judge.h"

#include <math.h>
#include <string.h>

const char lab_fault[] = "a guarantee of the engine does not hold";

/* ---- reading -------------------------------------------------------------------------- */

lab_line lab_line_at(const lab_judged *j, const char *name, size_t i)
{
    const json_t *t = lab_find_table(j->result, name);
    return (lab_line){t, json_array_get(json_object_get(t, "rows"), i)};
}

lab_line lab_line_where(const lab_judged *j, const char *name, const char *key, const char *text)
{
    lab_line r;
    LAB_EACH_LINE(j, name, r)
        if (!strcmp(lab_word(r, key), text))
            break;
    return r;
}

const json_t *lab_get(lab_line r, const char *key)
{
    int column = lab_find_column(r.table, key);
    return column < 0 ? NULL : json_array_get(r.cells, (size_t)column);
}

double lab_value(lab_line r, const char *key)
{
    const json_t *x = lab_get(r, key);
    return json_is_number(x) ? json_number_value(x) : (double)NAN;
}

const char *lab_word(lab_line r, const char *key)
{
    const char *s = json_string_value(lab_get(r, key));
    return s ? s : "";
}

double lab_judged_number(const lab_judged *j, const char *setting) { return lab_number_at(json_object_get(j->result, "settings"), setting); }

const char *lab_judged_text(const lab_judged *j, const char *setting) { return lab_text_at(json_object_get(j->result, "settings"), setting); }

/* ---- whose numbers they are --------------------------------------------------------------- */

static lab_paper_model model_of(const json_t *model)
{
    static const struct {
        lab_paper_model which;
        const char *architecture;
        double n_layers, d_model;
    } shapes[] = {{LAB_PAPER_SMOLLM2_135M, "llama", 30, 576}, {LAB_PAPER_QWEN25_05B, "qwen2", 24, 896},
                  {LAB_PAPER_QWEN3_06B, "qwen3", 28, 1024},   {LAB_PAPER_QWEN25_15B, "qwen2", 28, 1536},
                  {LAB_PAPER_GEMMA3_4B, "gemma3", 34, 2560}};
    const char *name = lab_text_at(model, "name");
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
        if (!strcmp(lab_text_at(model, "architecture"), shapes[i].architecture) && lab_number_at(model, "n_layers") == shapes[i].n_layers &&
            lab_number_at(model, "d_model") == shapes[i].d_model) {
            bool distilled = strstr(name, "R1") || strstr(name, "DeepSeek");
            return shapes[i].which == LAB_PAPER_QWEN25_15B && distilled ? LAB_PAPER_DS_R1_15B : shapes[i].which;
        }
    return LAB_PAPER_NONE;
}

void lab_judge(json_t *result)
{
    static const struct {
        const char *experiment;
        lab_judge_fn *judge;
    } judges[] = {{"generation", lab_judge_generation}, {"patch", lab_judge_patch},         {"perplexity", lab_judge_perplexity},
                  {"hellaswag", lab_judge_hellaswag},   {"multiturn", lab_judge_multiturn}, {"baselines", lab_judge_baselines},
                  {"sweep", lab_judge_sweep},           {"rank", lab_judge_rank},           {"truncate", lab_judge_truncate},
                  {"latency", lab_judge_latency}};
    const json_t *model = json_object_get(result, "model");
    lab_judged j = {.result = result, .model = model_of(model), .architecture = lab_text_at(model, "architecture"),
                    .local = lab_number_at(model, "n_local_layers") > 0};
    if ((j.model == LAB_PAPER_QWEN25_05B || j.model == LAB_PAPER_QWEN25_15B) && strcasestr(lab_text_at(model, "name"), "coder"))
        j.other = "other weights of the same shapes: the paper's are of Qwen2.5-Instruct, not of Qwen2.5-Coder";
    for (size_t i = 0; i < sizeof judges / sizeof judges[0]; i++)
        if (!strcmp(lab_text_at(result, "experiment"), judges[i].experiment)) {
            json_object_set_new(result, "paper_rows", json_array());
            judges[i].judge(&j);
        }
}
