/* The list of experiments, in the paper's order, and what all have in common. */
#include "lab/lab.h"

#include <string.h>

const lab_experiment lab_experiments[] = {
    {"generation", "5.2, Table 3", "tokens with a cache against from scratch at every step", lab_generation, LAB_TAKES_NEW},
    {"patch", "5.3", "the donor's residual (or K and V) in the recipient's pass", lab_patch, LAB_TAKES_NEW},
    {"perplexity", "5.4, Table 4", "perplexity under each policy", lab_perplexity, LAB_TAKES_TEXT | LAB_TAKES_POLICIES | LAB_TAKES_CHUNKS},
    {"hellaswag", "5.4, Table 4", "HellaSwag, 0-shot, under each policy", lab_hellaswag, LAB_TAKES_TEXT | LAB_TAKES_POLICIES | LAB_TAKES_TASKS},
    {"multiturn", "5.5, Fig. 3", "memory and latency over 20 turns", lab_multiturn, LAB_TAKES_NEW},
    {"baselines", "5.6, Fig. 4", "token match and KL of lossy caches against the exact one", lab_baselines, LAB_TAKES_TEXT | LAB_TAKES_NEW | LAB_TAKES_POLICIES},
    {"sweep", "5.6", "token match against the window's size", lab_sweep, LAB_TAKES_TEXT | LAB_TAKES_NEW | LAB_TAKES_POLICIES},
    {"rank", "5.7, Fig. 5", "effective rank of each head's query-key form", lab_rank, 0},
    {"truncate", "5.7, Fig. 6", "token match and KL against the rank of K and V projections", lab_truncate, LAB_TAKES_TEXT | LAB_TAKES_NEW},
    {"latency", "5.8, Fig. 7", "recomputing K and V against reading them", lab_latency, LAB_TAKES_TEXT},
    {NULL, NULL, NULL, NULL, 0},
};

const lab_experiment *lab_find(const char *name)
{
    for (const lab_experiment *e = lab_experiments; e->name; e++)
        if (!strcmp(e->name, name))
            return e;
    return NULL;
}

static void describe(const lab *l, json_t *result)
{
    const kvd_model_info *i = &l->info;
    json_t *model = json_pack("{s:s, s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "architecture", i->architecture, "fingerprint",
                              i->fingerprint, "n_layers", (json_int_t)i->n_layers, "d_model", (json_int_t)i->d_model, "n_heads",
                              (json_int_t)i->n_heads, "n_kv_heads", (json_int_t)i->n_kv_heads, "d_head", (json_int_t)i->d_head, "n_vocab",
                              (json_int_t)i->n_vocab, "window_tokens", (json_int_t)i->window_tokens, "n_local_layers",
                              (json_int_t)i->n_local_layers, "weight_bytes", (json_int_t)i->weight_bytes);
    const char *file = l->model_file ? l->model_file : "";
    json_object_set_new(model, "name", lab_text(i->name, strlen(i->name)));
    json_object_set_new(model, "file", lab_text(file, strlen(file)));
    json_object_set_new(result, "model", model);
    json_t *machine = json_pack("{s:s, s:i}", "isa", i->isa, "threads", i->n_threads);
    json_object_set_new(machine, "cpu", l->cpu ? lab_text(l->cpu, strlen(l->cpu)) : json_null());
    json_object_set_new(result, "machine", machine);
}

/* What every number depends on; an experiment may overwrite them. */
static void common_settings(const lab *l, json_t *result)
{
    static const char *const types[] = {"f16", "bf16", "f32"};
    char hex[17];
    lab_setting(result, "version", json_string(KVD_VERSION));
    lab_setting(result, "kv_type", json_string(types[l->so.kv_type]));
    lab_setting(result, "stream", json_string(types[l->so.stream]));
    lab_setting(result, "activations", json_string(l->activations_f32 ? "f32" : "auto (8 bit with quantised weights)"));
    lab_setting(result, "quick", json_boolean(l->quick));
    if (l->text) {
        lab_hash(l->text, l->n_text, hex);
        lab_setting(result, "text_hash", json_string(hex));
        lab_setting(result, "text_bytes", json_integer((json_int_t)l->n_text));
    }
}

json_t *lab_run(const lab_experiment *e, const lab *l, kvd_error *err)
{
    static const char *const lists[] = {"tables", "plots", "notes", "paper_rows"};
    kvd_error own;
    json_t *result = json_object();
    double begun = lab_seconds();
    err = err ? err : &own; /* experiments need not ask whether there is one */
    *err = (kvd_error){.offset = -1};
    json_object_set_new(result, "experiment", json_string(e->name));
    json_object_set_new(result, "paper", json_string(e->paper));
    describe(l, result);
    json_object_set_new(result, "settings", json_object());
    for (size_t i = 0; i < sizeof lists / sizeof lists[0]; i++)
        json_object_set_new(result, lists[i], json_array());
    common_settings(l, result);
    int rc = lab_tick(l, e->name, 0, 1, err);
    rc = rc ? rc : e->run(l, result, err);
    if (rc) {
        err->code = rc;
        json_decref(result);
        return NULL;
    }
    lab_judge(result);
    json_object_set_new(result, "seconds", json_real(lab_seconds() - begun));
    return result;
}
