/* The planner's rates, kept in the user's cache folder: a file a machine, model
 * shape and set of settings. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
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

/* All that the rates depend on, as one line. */
static void key_of(const cli *c, const kvd_model *m, char *out, size_t size)
{
    kvd_model_info i;
    char machine[512];
    const char *type;
    int64_t n, bytes;
    kvd_model_get_info(m, &i);
    machine_name(machine, sizeof machine);
    int len = snprintf(out, size, "%s|%s|rates 5|%d threads|chunk %d|acts %d|kv %d|%s %lld %lld %lld %lld %lld %lld %lld|%s", machine, i.isa,
                       i.n_threads, c->mo.chunk_tokens, c->mo.activations_f32, (int)c->so.kv_type, i.architecture, (long long)i.n_layers,
                       (long long)i.d_model, (long long)i.n_heads, (long long)i.n_kv_heads, (long long)i.d_head, (long long)i.d_ffn,
                       (long long)i.n_vocab, c->so.spill_dir ? c->so.spill_dir : "no disk");
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

static bool read_rates(const char *path, const char *key, kvd_rates *r)
{
    json_t *o = load(path), *rows = json_object_get(o, "rows"), *rows_s = json_object_get(o, "rows_s");
    const char *k = json_string_value(json_object_get(o, "key"));
    bool ok = k && !strcmp(k, key) && json_array_size(rows) == KVD_RATE_POINTS && json_array_size(rows_s) == KVD_RATE_POINTS;
    for (size_t i = 0; ok && i < KVD_RATE_POINTS; i++) {
        r->rows[i] = json_integer_value(json_array_get(rows, i));
        r->rows_s[i] = json_number_value(json_array_get(rows_s, i));
        ok = (i ? r->rows[i] > r->rows[i - 1] : r->rows[i] == 1) && r->rows_s[i] > 0 && r->rows_s[i] < 1e6;
    }
    const struct {
        const char *name;
        double *value;
    } list[] = {{"head_s", &r->head_s}, {"pair_alone_s", &r->pair_alone_s}, {"pair_chunk_s", &r->pair_chunk_s}, {"disk_pass_s", &r->disk_pass_s}, {"disk_segment_s", &r->disk_segment_s},
                {"disk_read_bytes_s", &r->disk_read_bytes_s}, {"disk_write_bytes_s", &r->disk_write_bytes_s}};
    for (size_t i = 0; ok && i < sizeof list / sizeof list[0]; i++) {
        *list[i].value = json_number_value(json_object_get(o, list[i].name));
        ok = *list[i].value >= 0 && *list[i].value < 1e15;
    }
    json_decref(o);
    return ok;
}

/* Whole or not at all; a cache that can not be written is no error. */
static void write_rates(const char *path, const char *key, const kvd_rates *r)
{
    struct stat st;
    if (!stat(path, &st) && !S_ISREG(st.st_mode))
        return;
    json_t *rows = json_array(), *rows_s = json_array();
    for (int i = 0; i < KVD_RATE_POINTS; i++) {
        json_array_append_new(rows, json_integer(r->rows[i]));
        json_array_append_new(rows_s, json_real(r->rows_s[i]));
    }
    json_t *o = json_pack("{s:s, s:o, s:o, s:f, s:f, s:f, s:f, s:f, s:f, s:f}", "key", key, "rows", rows, "rows_s", rows_s, "head_s", r->head_s,
                          "pair_alone_s", r->pair_alone_s, "pair_chunk_s", r->pair_chunk_s, "disk_pass_s", r->disk_pass_s, "disk_segment_s", r->disk_segment_s, "disk_read_bytes_s", r->disk_read_bytes_s,
                          "disk_write_bytes_s", r->disk_write_bytes_s);
    if (o) /* none: a folder's name that is no UTF-8 can not be in the key */
        lab_file_json(path, o, JSON_INDENT(1), NULL);
    json_decref(o);
}

int cli_rates(cli *c, kvd_model *m, kvd_rates *r)
{
    char key[4096], path[4300];
    kvd_error err;
    key_of(c, m, key, sizeof key);
    file_of(c, key, path, sizeof path);
    *r = (kvd_rates){0};
    if (!c->recalibrate && *c->cache_dir && read_rates(path, key, r))
        return 0;
    if (!c->quiet)
        fprintf(stderr, "kvd: measuring this machine (once a model; --recalibrate does it again)\n");
    if (kvd_calibrate(m, &c->so, r, &err))
        return cli_error("calibration", &err);
    if (*c->cache_dir)
        write_rates(path, key, r);
    return 0;
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
    kvd_memory_context(m, &now, &peak, &budget);
    kvd_plan_session(m, &full, n_prompt, n_tokens, budget, &plan);
    if (c->so.kv_tokens < 0 && plan.full_bytes <= budget) {
        c->so.spill_dir = NULL;
        return 0;
    }
    int rc = cli_rates(c, m, &c->rates);
    kvd_tier_plan t;
    c->so.rates = &c->rates;
    for (int i = 0; !rc && kvd_plan_tier(m, &c->so, &c->rates, n_prompt, n_tokens - n_prompt, budget, i, &t); i++)
        if (t.chosen) {
            c->tier = t.name;
            c->expected_tokens_s = t.decode_tokens_per_s;
        }
    return rc;
}
