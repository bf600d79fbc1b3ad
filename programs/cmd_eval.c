/* kvd eval: perplexity and HellaSwag under one or several policies (arXiv
 * 2603.19664, section 5.4). Options for lab/perplexity.c and lab/hellaswag.c.
 *
 * Either --policies names what is measured ("paper": the experiment's own list), or the
 * memory options of kvd run do, as one policy: then the JSON has the number at its top.
 * Without either it is full. */
#include <stdio.h>
#include <string.h>

#include "cli.h"

/* The memory options in the words of --policies. */
static void name_policy(const cli *c, char *out, size_t size)
{
    static const char *const names[] = {"kv-direct", "full", "window", "streaming-llm", "h2o", "snapkv", "tova"};
    bool any = c->policy_given || c->so.kv_tokens >= 0 || c->budget_given || c->evict_given;
    char b[32] = "";
    if (c->so.kv_tokens >= 0)
        snprintf(b, sizeof b, ":%lld", (long long)c->so.kv_tokens);
    const char *tier = c->so.evict_to == KVD_EVICT_DISK ? ":disk" : c->so.evict_to == KVD_EVICT_RECOMPUTE && !cli_lossy(c->so.policy) ? ":recompute" : "";
    snprintf(out, size, "%s%s%s%s", any ? names[c->so.policy] : "full", b, c->so.positions == KVD_POSITIONS_RENUMBER ? ":renumber" : "",
             any && c->so.policy == KVD_POLICY_KV_DIRECT ? tier : "");
}

int cmd_eval(int argc, char **argv)
{
    cli c;
    char policy[64];
    int code = cli_parse(&c, argc, argv, "eval perplexity|hellaswag",
                         OPT_MODEL | OPT_MACHINE | OPT_MEMORY | OPT_NUMBERS | OPT_EVAL | OPT_LAB | OPT_POLICIES | OPT_JSON | OPT_OUTPUT, 1);
    if (code)
        return code;
    if (c.n_words == 0 || (strcmp(c.words[0], "perplexity") && strcmp(c.words[0], "hellaswag")))
        return cli_fail(EXIT_USAGE, "usage: kvd eval perplexity|hellaswag -m MODEL -f FILE");
    if (c.policies && (c.policy_given || c.so.kv_tokens >= 0 || c.positions_given))
        return cli_fail(EXIT_USAGE, "--policies and --policy, --kv-tokens or --positions exclude each other");
    if (c.policies && !strcmp(c.policies, "paper"))
        c.policies = NULL; /* the experiment's own list */
    else if (!c.policies) {
        name_policy(&c, policy, sizeof policy);
        c.policies = policy;
    }
    return cli_run_experiment(&c, c.words[0]);
}
