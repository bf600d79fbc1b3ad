/* The list of experiments, in the paper's order, and what all have in common. */
#include "lab/lab.h"

#include <string.h>

const lab_experiment lab_experiments[] = {
    {"generation", "5.2, Table 3", "tokens with a cache against from scratch at every step", lab_generation},
    {"patch", "5.3", "the donor's residual (or K and V) in the recipient's pass", lab_patch},
    {"perplexity", "5.4, Table 4", "perplexity under each policy", lab_perplexity},
    {"hellaswag", "5.4, Table 4", "HellaSwag, 0-shot, under each policy", lab_hellaswag},
    {"multiturn", "5.5, Fig. 3", "memory and latency over 20 turns", lab_multiturn},
    {"baselines", "5.6, Fig. 4", "token match and KL of lossy caches against the exact one", lab_baselines},
    {"sweep", "5.6", "token match against the window's size", lab_sweep},
    {"rank", "5.7, Fig. 5", "effective rank of each head's query-key form", lab_rank},
    {"truncate", "5.7, Fig. 6", "token match and KL against the rank of K and V projections", lab_truncate},
    {"latency", "5.8, Fig. 7", "recomputing K and V against reading them", lab_latency},
    {NULL, NULL, NULL, NULL},
};

const lab_experiment *lab_find(const char *name)
{
    for (const lab_experiment *e = lab_experiments; e->name; e++)
        if (!strcmp(e->name, name))
            return e;
    return NULL;
}
