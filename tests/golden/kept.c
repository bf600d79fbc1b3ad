/* kept: what a lossy policy keeps and says after each feed, for comparison with an
 * independent implementation (tests/system/test_policies.py).
 *
 * usage: kept MODEL POLICY B original|renumber [--kv-type f16|f32] [--threads N] [--chunk N] < LINES
 *
 * Each line of standard input is one feed of token ids, separated by blanks; an empty
 * line rewinds the session to 0. For each feed, one line of JSON:
 *   kept    [layer][KV head][...] positions kept after the feed, as kvd_lab_kept lists them
 *   logits  [row][n_vocab] of each of the feed's tokens
 * K and V are f32 unless asked otherwise, activations always are. On the public API
 * only. Exit 0, or 1 after one line on stderr. */
#define _GNU_SOURCE
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvd/kvd.h"
#include "kvd/kvd_lab.h"

enum { MOST_IDS = 4096 };

static int fail(const char *what, const char *why)
{
    fprintf(stderr, "kept: %s: %s\n", what, why);
    return 1;
}

static int read_options(int argc, char **argv, kvd_model_options *mo, kvd_session_options *so)
{
    kvd_model_options_defaults(mo);
    kvd_session_options_defaults(so);
    mo->activations_f32 = true;
    so->kv_type = KVD_TYPE_F32;
    if (argc < 5 || argc % 2 == 0)
        return fail("usage", "kept MODEL POLICY B original|renumber [--kv-type f16|f32] [--threads N] [--chunk N]");
    int policy = KVD_POLICY_WINDOW;
    while (policy <= KVD_POLICY_TOVA && strcmp(argv[2], kvd_policy_name((kvd_policy)policy)) != 0)
        policy++;
    if (policy > KVD_POLICY_TOVA)
        return fail("not a lossy policy", argv[2]);
    so->policy = (kvd_policy)policy;
    so->kv_tokens = strtoll(argv[3], NULL, 10);
    if (!strcmp(argv[4], "renumber"))
        so->positions = KVD_POSITIONS_RENUMBER;
    else if (strcmp(argv[4], "original") != 0)
        return fail("neither original nor renumber", argv[4]);
    for (int i = 5; i < argc; i += 2) {
        if (!strcmp(argv[i], "--kv-type") && !strcmp(argv[i + 1], "f16"))
            so->kv_type = KVD_TYPE_F16;
        else if (!strcmp(argv[i], "--kv-type") && !strcmp(argv[i + 1], "f32"))
            so->kv_type = KVD_TYPE_F32;
        else if (!strcmp(argv[i], "--threads"))
            mo->n_threads = atoi(argv[i + 1]);
        else if (!strcmp(argv[i], "--chunk"))
            mo->chunk_tokens = atoi(argv[i + 1]);
        else
            return fail("unknown option", argv[i]);
    }
    return 0;
}

/* ids: [MOST_IDS]. How many there are; -1: malformed. */
static int64_t read_ids(const char *line, int32_t *ids)
{
    int64_t n = 0;
    for (char *end; n < MOST_IDS; line = end, n++) {
        long v = strtol(line, &end, 10);
        if (end == line)
            return line[strspn(line, " \t\r\n")] ? -1 : n;
        ids[n] = v < 0 || v > INT32_MAX ? -1 : (int32_t)v;
    }
    return -1;
}

typedef struct {
    int64_t n_vocab;
    bool first;
} rows;

static int on_logits(void *ctx, int64_t pos, const float *logits)
{
    rows *r = ctx;
    (void)pos;
    printf(r->first ? "[" : ", [");
    r->first = false;
    for (int64_t i = 0; i < r->n_vocab; i++)
        printf("%s%.9g", i ? ", " : "", (double)logits[i]);
    printf("]");
    return 0;
}

static int print_kept(const kvd_session *s, const kvd_model_info *info)
{
    for (int layer = 0; layer < info->n_layers; layer++) {
        printf("%s[", layer ? ", " : "");
        for (int head = 0; head < info->n_kv_heads; head++) {
            const int64_t *pos = NULL;
            int64_t n = kvd_lab_kept(s, layer, head, &pos);
            if (n < 0)
                return fail("kvd_lab_kept", "refused");
            printf("%s[", head ? ", " : "");
            for (int64_t i = 0; i < n; i++)
                printf("%s%" PRId64, i ? ", " : "", pos[i]);
            printf("]");
        }
        printf("]");
    }
    return 0;
}

static int one_feed(kvd_session *s, const kvd_model_info *info, const int32_t *ids, int64_t n)
{
    kvd_error err;
    rows r = {.n_vocab = info->n_vocab, .first = true};
    if (n < 0)
        return fail("standard input", "expected token ids separated by blanks");
    if (n == 0)
        return kvd_session_rewind(s, 0, &err) ? fail("rewind", err.message) : 0;
    printf("{\"logits\": [");
    if (kvd_session_feed_all(s, ids, n, n, on_logits, &r, &err))
        return fail("feed", err.message);
    printf("], \"kept\": [");
    if (print_kept(s, info))
        return 1;
    puts("]}");
    return 0;
}

int main(int argc, char **argv)
{
    static int32_t ids[MOST_IDS];
    kvd_model *m = NULL;
    kvd_session *s = NULL;
    kvd_model_options mo;
    kvd_session_options so;
    kvd_model_info info;
    kvd_error err;
    char *line = NULL;
    size_t size = 0;
    int rc = read_options(argc, argv, &mo, &so);
    if (rc)
        return rc;
    if (kvd_model_load(&m, argv[1], &mo, &err))
        return fail(argv[1], err.message);
    kvd_model_get_info(m, &info);
    if (kvd_session_create(&s, m, &so, &err))
        rc = fail("session", err.message);
    while (!rc && getline(&line, &size, stdin) > 0)
        rc = one_feed(s, &info, ids, read_ids(line, ids));
    if (!rc && (fflush(stdout) || ferror(stdout)))
        rc = fail("standard output", "cannot be written");
    free(line);
    kvd_session_free(&s);
    kvd_model_free(&m);
    return rc;
}
