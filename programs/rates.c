/* The planner's rates, kept in the user's cache folder: a file a machine, model
 * shape and set of settings.
 *
 * Two seconds of measuring see one mood of a machine: clocks, neighbours and disks
 * change by half within minutes. So a run says how long its tokens took, and the file
 * keeps factors of time, which go halfway to what would have predicted it; predictions
 * are made of the rates with these factors in them. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "cli.h"
#include "lab/whole_file.h"

/* The CPU's name and this build's version: rates of another are not ours. */
static void machine_name(char *out, size_t size)
{
    char cpu[256], host[128] = "";
    cli_cpu_name(cpu, sizeof cpu);
    gethostname(host, sizeof host - 1);
    snprintf(out, size, "%s%s%s|" KVD_VERSION, cpu, *cpu ? "|" : "", host);
}

/* In the order of kvd_plan_tier. */
static const char *const tiers[] = {"full", "recompute", "disk"};
enum { FULL, RECOMPUTE, DISK, N_TIERS };

typedef struct {
    kvd_rates measured;
    double seen[N_TIERS]; /* time that runs took beside what was measured, see expected() */
} record;

/* All that the rates depend on, as one line. dir: of the disk tier, or NULL. */
static void key_of(const cli *c, const kvd_model *m, const char *dir, char *out, size_t size)
{
    kvd_model_info i;
    char machine[512];
    const char *type;
    int64_t n, bytes;
    kvd_model_get_info(m, &i);
    machine_name(machine, sizeof machine);
    int len = snprintf(out, size, "%s|%s|rates 6|%d threads|chunk %d|acts %d|kv %d|%s %lld %lld %lld %lld %lld %lld %lld|%s", machine, i.isa,
                       i.n_threads, c->mo.chunk_tokens, c->mo.activations_f32, (int)c->so.kv_type, i.architecture, (long long)i.n_layers,
                       (long long)i.d_model, (long long)i.n_heads, (long long)i.n_kv_heads, (long long)i.d_head, (long long)i.d_ffn,
                       (long long)i.n_vocab, dir ? dir : "no disk");
    for (int k = 0; len > 0 && (size_t)len < size && kvd_model_format_share(m, k, &type, &n, &bytes); k++)
        len += snprintf(out + len, size - (size_t)len, "|%s %lld", type, (long long)bytes);
}

static void file_of(const cli *c, const char *key, char *out, size_t size)
{
    uint64_t h = 1469598103934665603u; /* FNV-1a: names a file, proves nothing; the key is inside */
    for (const char *p = key; *p; p++)
        h = (h ^ (unsigned char)*p) * 1099511628211u;
    snprintf(out, size, "%s/rates-%016llx.json", c->cache_dir, (unsigned long long)h);
}

/* A cache: what is no file, or no JSON, is not there. */
static json_t *load(const char *path)
{
    struct stat st;
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC); /* a pipe of that name would wait for a writer */
    json_t *o = fd >= 0 && !fstat(fd, &st) && S_ISREG(st.st_mode) ? json_loadfd(fd, 0, NULL) : NULL;
    if (fd >= 0)
        close(fd);
    return o;
}

typedef struct {
    const char *name;
    double *value;
} field;

enum { N_FIELDS = 7 };

static void fields_of(kvd_rates *r, field out[N_FIELDS])
{
    const field list[N_FIELDS] = {{"head_s", &r->head_s},
                                  {"pair_alone_s", &r->pair_alone_s},
                                  {"pair_chunk_s", &r->pair_chunk_s},
                                  {"disk_pass_s", &r->disk_pass_s},
                                  {"disk_segment_s", &r->disk_segment_s},
                                  {"disk_read_bytes_s", &r->disk_read_bytes_s},
                                  {"disk_write_bytes_s", &r->disk_write_bytes_s}};
    memcpy(out, list, sizeof list);
}

/* A factor of time is believed within these. */
static const double least_seen = 1.0 / 16, most_seen = 16;

static bool read_record(const char *path, const char *key, record *x)
{
    json_t *o = load(path), *rows = json_object_get(o, "rows"), *rows_s = json_object_get(o, "rows_s"), *seen = json_object_get(o, "seen");
    const char *k = json_string_value(json_object_get(o, "key"));
    kvd_rates *r = &x->measured;
    field fields[N_FIELDS];
    fields_of(r, fields);
    bool ok = k && !strcmp(k, key) && json_array_size(rows) == KVD_RATE_POINTS && json_array_size(rows_s) == KVD_RATE_POINTS;
    for (size_t i = 0; ok && i < KVD_RATE_POINTS; i++) {
        r->rows[i] = json_integer_value(json_array_get(rows, i));
        r->rows_s[i] = json_number_value(json_array_get(rows_s, i));
        ok = (i ? r->rows[i] > r->rows[i - 1] : r->rows[i] == 1) && r->rows_s[i] > 1e-12 && r->rows_s[i] < 1e6;
    }
    for (int i = 0; ok && i < N_FIELDS; i++) {
        const json_t *v = json_object_get(o, fields[i].name);
        *fields[i].value = json_number_value(v);
        ok = json_is_number(v) && *fields[i].value >= 0 && *fields[i].value < 1e15;
    }
    for (int i = 0; ok && i < N_TIERS; i++) {
        x->seen[i] = json_number_value(json_object_get(seen, tiers[i]));
        ok = x->seen[i] >= least_seen && x->seen[i] <= most_seen;
    }
    json_decref(o);
    return ok;
}

/* Whole or not at all; a cache that can not be written is no error. */
static void write_record(const char *path, const char *key, record *x)
{
    struct stat st;
    field fields[N_FIELDS];
    if (!stat(path, &st) && !S_ISREG(st.st_mode))
        return;
    fields_of(&x->measured, fields);
    json_t *rows = json_array(), *rows_s = json_array(), *seen = json_object();
    for (int i = 0; i < KVD_RATE_POINTS; i++) {
        json_array_append_new(rows, json_integer(x->measured.rows[i]));
        json_array_append_new(rows_s, json_real(x->measured.rows_s[i]));
    }
    for (int i = 0; i < N_TIERS; i++)
        json_object_set_new(seen, tiers[i], json_real(x->seen[i]));
    json_t *o = json_pack("{s:s, s:o, s:o, s:o}", "key", key, "rows", rows, "rows_s", rows_s, "seen", seen);
    for (int i = 0; o && i < N_FIELDS; i++)
        json_object_set_new(o, fields[i].name, json_real(*fields[i].value));
    if (o) /* none: a folder's name that is no UTF-8 can not be in the key */
        lab_file_json(path, o, JSON_INDENT(1), NULL);
    json_decref(o);
}

/* The rates with what runs have shown. What belongs to decoding with all in memory, to
 * many rows, and to the disk is disjoint; the other tiers use the first too, and their
 * own factors say what is left. */
static kvd_rates expected(const record *x)
{
    kvd_rates r = x->measured;
    r.rows_s[0] *= x->seen[FULL];
    r.head_s *= x->seen[FULL];
    r.pair_alone_s *= x->seen[FULL];
    for (int i = 1; i < KVD_RATE_POINTS; i++)
        r.rows_s[i] *= x->seen[RECOMPUTE];
    r.pair_chunk_s *= x->seen[RECOMPUTE];
    r.disk_pass_s *= x->seen[DISK];
    r.disk_segment_s *= x->seen[DISK];
    r.disk_read_bytes_s /= x->seen[DISK];
    return r;
}

/* No disk tier was to be had there: it was full, or failed. Should it be tried again? */
static bool may_serve_now(const char *dir)
{
    struct statfs fs;
    return !lab_file_in_memory(dir) && !statfs(dir, &fs) && (double)fs.f_bavail * (double)fs.f_bsize >= 16e6;
}

int cli_rates(cli *c, kvd_model *m, kvd_rates *r)
{
    char key[4096], path[4300];
    kvd_error err;
    record x;
    key_of(c, m, c->so.spill_dir, key, sizeof key);
    file_of(c, key, path, sizeof path);
    bool known = !c->recalibrate && *c->cache_dir && read_record(path, key, &x);
    if (known && c->so.spill_dir && x.measured.disk_read_bytes_s <= 0 && may_serve_now(c->so.spill_dir))
        known = false;
    if (!known) {
        x = (record){.seen = {1, 1, 1}};
        if (!c->quiet)
            fprintf(stderr, "kvd: measuring this machine (once a model; --recalibrate does it again)\n");
        if (kvd_calibrate(m, &c->so, &x.measured, &err))
            return cli_error("calibration", &err);
        if (*c->cache_dir)
            write_record(path, key, &x);
    }
    *r = expected(&x);
    return 0;
}

/* A run that was planned, and what is asked of its plan. */
typedef struct {
    const kvd_model *m;
    const kvd_session_options *o;
    int64_t n_prompt, n_new, budget;
    int tier;
} planned_run;

/* Seconds a token of decode if the factor of a tier were f. 0: it does not fit. */
static double seconds(const planned_run *run, record x, int teach, double f)
{
    kvd_tier_plan t;
    x.seen[teach] = f;
    kvd_rates r = expected(&x);
    return kvd_plan_tier(run->m, run->o, &r, run->n_prompt, run->n_new, run->budget, run->tier, &t) && t.fits ? 1 / t.decode_tokens_per_s : 0;
}

/* The factor, the nearest to the one there is and no further than twice or half of it,
 * that would have predicted what was seen. Where the prediction does not depend on it,
 * because something else takes the time, it stays. */
static double solve(const planned_run *run, const record *x, int teach, double seen)
{
    double near = x->seen[teach], at_near = seconds(run, *x, teach, near);
    bool slower = at_near < seen;
    double far = near * (slower ? 2 : 0.5), at_far = seconds(run, *x, teach, far);
    if (slower ? at_far <= at_near : at_far >= at_near)
        return near;
    if (slower ? seen > at_far : seen < at_far)
        seen = at_far;
    for (int i = 0; i < 40; i++) {
        double mid = sqrt(near * far), at = seconds(run, *x, teach, mid);
        *((slower ? at < seen : at > seen) ? &near : &far) = mid;
    }
    return near;
}

/* Which factor a run speaks of: that of the disk if it was waited for, that of many rows
 * if any were recomputed; else that of decoding with all in memory. */
static int what_it_teaches(int tier, const kvd_session_stats *st, double decode_s)
{
    if (tier == DISK && st->disk_wait_s > 0.1 * decode_s)
        return DISK;
    return tier == RECOMPUTE && st->recomputed_tokens > 0 ? RECOMPUTE : FULL;
}

void cli_learn(const cli *c, const kvd_model *m, const kvd_session_stats *st, int64_t n_prompt, int64_t n_new, double decode_s)
{
    char key[4096], path[4300];
    record x;
    int64_t now, peak;
    kvd_session_options o = c->so;
    o.spill_dir = c->planned_dir;
    planned_run run = {.m = m, .o = &o, .n_prompt = n_prompt, .n_new = n_new, .tier = c->planned - 1};
    if (run.tier < 0 || n_new < 16 || !(decode_s > 0) || st->disk_error || !*c->cache_dir)
        return;
    key_of(c, m, o.spill_dir, key, sizeof key);
    file_of(c, key, path, sizeof path);
    kvd_memory_context(m, &now, &peak, &run.budget);
    if (!read_record(path, key, &x) || !(seconds(&run, x, FULL, x.seen[FULL]) > 0))
        return;
    int teach = what_it_teaches(run.tier, st, decode_s);
    double f = sqrt(x.seen[teach] * solve(&run, &x, teach, decode_s / (double)(n_new - 1)));
    x.seen[teach] = f < least_seen ? least_seen : f > most_seen ? most_seen : f;
    for (int i = RECOMPUTE; i < N_TIERS; i++)
        if (i != run.tier) /* not tried: what was seen fades, or a disturbed run would rule it out for ever */
            x.seen[i] = pow(x.seen[i], 0.9);
    write_record(path, key, &x);
}

int cli_choose_tier(cli *c, kvd_model *m, int64_t n_prompt, int64_t n_tokens)
{
    int64_t now, peak, budget;
    kvd_session_options full = c->so;
    kvd_plan plan;
    if (c->so.evict_to != KVD_EVICT_AUTO || c->so.policy != KVD_POLICY_KV_DIRECT)
        return 0;
    full.policy = KVD_POLICY_FULL;
    full.kv_tokens = -1;
    c->planned_dir = c->so.spill_dir;
    kvd_memory_context(m, &now, &peak, &budget);
    kvd_plan_session(m, &full, n_prompt, n_tokens, budget, &plan);
    bool all_fits = c->so.kv_tokens < 0 && plan.full_bytes <= budget;
    int rc = all_fits && !c->recalibrate ? 0 : cli_rates(c, m, &c->rates);
    if (all_fits) {
        c->rates = (kvd_rates){0};
        c->so.spill_dir = NULL;
        c->planned = FULL + 1;
        return rc;
    }
    kvd_tier_plan t;
    c->so.rates = &c->rates;
    for (int i = 0; !rc && kvd_plan_tier(m, &c->so, &c->rates, n_prompt, n_tokens - n_prompt, budget, i, &t); i++)
        if (t.chosen) {
            c->tier = t.name;
            c->planned = i + 1;
            c->expected_tokens_s = t.decode_tokens_per_s;
        }
    return rc;
}
