/* Policies by name: what stands in --policies, and what the experiments write down
 * for themselves.
 *
 *   list    = policy {"," policy}
 *   policy  = NAME [":" B] [":renumber"] [":recompute" | ":disk"]
 *
 * One spelling for people, tables and files: a cell of a table can be run again by
 * giving back its name. What a policy does not have is refused and not ignored, or a
 * table would show two rows that are the same run. */
#include "lab/lab.h"

#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

enum { N_POLICIES = KVD_POLICY_TOVA + 1, LEAST_LOSSY = 8, MOST_TOKENS = 1 << 30 };

static bool is_lossy(kvd_policy p)
{
    return p != KVD_POLICY_KV_DIRECT && p != KVD_POLICY_FULL;
}

__attribute__((format(printf, 3, 4))) static int refuse(kvd_error *err, const char *item, const char *format, ...)
{
    if (!err)
        return KVD_E_ARG;
    *err = (kvd_error){.code = KVD_E_ARG, .offset = -1};
    int n = snprintf(err->message, sizeof err->message, "policy \"%.63s\": ", item);
    va_list ap;
    va_start(ap, format);
    vsnprintf(err->message + n, sizeof err->message - (size_t)n, format, ap);
    va_end(ap);
    return KVD_E_ARG;
}

/* The part up to the next ':'; *rest moves behind it, to NULL at the end. */
static void next_part(const char **rest, char part[64])
{
    size_t n = strcspn(*rest, ":");
    memcpy(part, *rest, n); /* of an item, which is shorter than 64 */
    part[n] = 0;
    *rest = (*rest)[n] ? *rest + n + 1 : NULL;
}

static int find_policy(const char *item, const char *name, kvd_policy *out, kvd_error *err)
{
    char names[128] = "";
    for (int p = 0; p < N_POLICIES; p++) {
        const char *known = kvd_policy_name((kvd_policy)p);
        if (!strcmp(name, known)) {
            *out = (kvd_policy)p;
            return 0;
        }
        size_t n = strlen(names);
        snprintf(names + n, sizeof names - n, "%s%s", n ? ", " : "", known);
    }
    return refuse(err, item, "NAME[:B][:renumber][:recompute|:disk], NAME is one of: %s", names);
}

/* One thing behind the name: a number, or a word. */
static int take_part(const char *item, const char *part, kvd_session_options *o, bool *has_b, bool *has_tier, kvd_error *err)
{
    const char *name = kvd_policy_name(o->policy);
    bool lossy = is_lossy(o->policy);
    if (part[0] >= '0' && part[0] <= '9') {
        char *end;
        errno = 0;
        long long b = strtoll(part, &end, 10);
        if (*has_b || *end || errno || b > MOST_TOKENS)
            return refuse(err, item, "one number of tokens, at most %d", MOST_TOKENS);
        if (o->policy == KVD_POLICY_FULL)
            return refuse(err, item, "%s keeps everything and takes no number", name);
        if (lossy && b < LEAST_LOSSY)
            return refuse(err, item, "%s needs %d tokens or more", name, LEAST_LOSSY);
        o->kv_tokens = b;
        *has_b = true;
        return 0;
    }
    if (!strcmp(part, "renumber")) {
        if (!lossy || o->positions == KVD_POSITIONS_RENUMBER)
            return refuse(err, item, "renumber goes once with a policy that forgets");
        o->positions = KVD_POSITIONS_RENUMBER;
        return 0;
    }
    bool disk = !strcmp(part, "disk");
    if (!disk && strcmp(part, "recompute"))
        return refuse(err, item, "\"%.20s\" is none of: a number, renumber, recompute, disk", part);
    if (o->policy != KVD_POLICY_KV_DIRECT || *has_tier)
        return refuse(err, item, "%s goes once with %s", part, kvd_policy_name(KVD_POLICY_KV_DIRECT));
    if (disk && (!o->spill_dir || !*o->spill_dir))
        return refuse(err, item, "there is no folder for the disk tier");
    o->evict_to = disk ? KVD_EVICT_DISK : KVD_EVICT_RECOMPUTE;
    *has_tier = true;
    return 0;
}

static int parse(const lab *l, const char *item, kvd_session_options *out, kvd_error *err)
{
    kvd_session_options o = l->so;
    bool has_b = false, has_tier = false;
    char part[64];
    const char *rest = item;
    next_part(&rest, part);
    int rc = find_policy(item, part, &o.policy, err);
    o.positions = KVD_POSITIONS_ORIGINAL;
    o.kv_tokens = o.policy == KVD_POLICY_KV_DIRECT ? 0 : -1;
    while (!rc && rest) {
        next_part(&rest, part);
        rc = take_part(item, part, &o, &has_b, &has_tier, err);
    }
    if (!rc && is_lossy(o.policy) && !has_b)
        rc = refuse(err, item, "%s needs a number of tokens, as in %s:64", kvd_policy_name(o.policy), kvd_policy_name(o.policy));
    if (rc)
        return rc;
    if (o.policy != KVD_POLICY_KV_DIRECT) { /* nothing comes back, so from nowhere */
        o.evict_to = KVD_EVICT_RECOMPUTE;
        o.spill_dir = NULL;
        o.rates = NULL;
    }
    *out = o;
    return 0;
}

bool lab_next_policy(const lab *l, const char **list, kvd_session_options *o, char name[64], int *rc, kvd_error *err)
{
    const char *begin = *list + strspn(*list, " ");
    *rc = 0;
    if (!*begin)
        return false;
    size_t n = strcspn(begin, ","), shown = n;
    const char *end = begin + n;
    while (shown && begin[shown - 1] == ' ')
        shown--;
    char item[64];
    snprintf(item, sizeof item, "%.*s", (int)(shown < 63 ? shown : 63), begin);
    if (shown >= sizeof item)
        *rc = refuse(err, item, "too long");
    else if (*end && !end[1 + strspn(end + 1, " ")])
        *rc = refuse(err, item, "nothing behind the last comma");
    else
        *rc = parse(l, item, o, err);
    if (*rc)
        return false;
    memcpy(name, item, sizeof item);
    *list = *end ? end + 1 : end;
    return true;
}
