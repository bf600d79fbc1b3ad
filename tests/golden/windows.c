/* windows: a model with sliding-window layers keeps only the window's blocks on
 * them, and its logits are those of a session that keeps all blocks. Needs a test
 * build (-Dtest_hooks=true).
 *
 * usage: windows MODEL TOKENS
 * One line of JSON: kv_bytes and kept_bytes (the ledger's K and V without and with
 * the blocks beyond the window), expected_bytes (what the window's blocks come to),
 * equal (all logits of 8 decoded positions, bit for bit). Exit 0, or 1 after one
 * line on stderr. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvd/kvd.h"
#include "kvd/kvd_lab.h"

enum { DECODED = 8 };

static int fail(const kvd_error *err)
{
    fprintf(stderr, "windows: %s\n", err->message);
    return 1;
}

static int64_t kv_bytes(const kvd_model *m)
{
    const char *name;
    bool context;
    int64_t now, peak;
    for (int i = 0; kvd_memory_account(m, i, &name, &context, &now, &peak); i++)
        if (!strcmp(name, "kv"))
            return now;
    return -1;
}

/* Feed n ids, then DECODED greedy ones; logits: [DECODED][n_vocab]. */
static int run(kvd_model *m, const int32_t *ids, int64_t n, int64_t n_vocab, float *logits, int64_t *bytes, kvd_error *err)
{
    kvd_session *s = NULL;
    const float *y;
    int rc = kvd_session_create(&s, m, NULL, err);
    rc = rc ? rc : kvd_session_feed(s, ids, n, &y, err);
    *bytes = kv_bytes(m);
    for (int i = 0; !rc && i < DECODED; i++) {
        int32_t best = 0;
        memcpy(logits + i * n_vocab, y, (size_t)n_vocab * sizeof *y);
        for (int32_t k = 1; k < n_vocab; k++)
            if (y[k] > y[best])
                best = k;
        rc = kvd_session_feed(s, &best, 1, &y, err);
    }
    kvd_session_free(&s);
    return rc;
}

int main(int argc, char **argv)
{
    kvd_error err;
    kvd_model *m = NULL;
    kvd_model_info info;
    int64_t n = argc == 3 ? atoll(argv[2]) : 0, dropped, kept;
    if (n < 1) {
        fputs("usage: windows MODEL TOKENS\n", stderr);
        return 1;
    }
    if (kvd_model_load(&m, argv[1], NULL, &err))
        return fail(&err);
    kvd_model_get_info(m, &info);
    int32_t *ids = malloc((size_t)n * sizeof *ids);
    float *a = malloc((size_t)(DECODED * info.n_vocab) * sizeof *a), *b = malloc((size_t)(DECODED * info.n_vocab) * sizeof *b);
    if (!ids || !a || !b)
        return 1;
    for (int64_t i = 0; i < n; i++)
        ids[i] = (int32_t)(i * 2654435761u % (uint64_t)info.n_vocab);
    if (run(m, ids, n, info.n_vocab, a, &dropped, &err) || kvd_lab_keep_windows(m, true, &err) ||
        run(m, ids, n, info.n_vocab, b, &kept, &err))
        return fail(&err);
    int64_t layer_block = 2 * info.n_kv_heads * info.d_head * 16 * 2, end = (n + 15) / 16;
    int64_t from = info.window_tokens && n >= info.window_tokens ? (n - info.window_tokens + 1) / 16 : 0;
    int64_t expected = layer_block * ((info.n_layers - info.n_local_layers) * end + info.n_local_layers * (end - from));
    printf("{\"kv_bytes\": %lld, \"kept_bytes\": %lld, \"expected_bytes\": %lld, \"full_bytes\": %lld, \"equal\": %s}\n", (long long)dropped,
           (long long)kept, (long long)expected, (long long)(layer_block * info.n_layers * end),
           memcmp(a, b, (size_t)(DECODED * info.n_vocab) * sizeof *a) ? "false" : "true");
    free(ids);
    free(a);
    free(b);
    kvd_model_free(&m);
    return 0;
}
