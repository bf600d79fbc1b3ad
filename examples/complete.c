/* Generate text inside a fixed budget of context memory.
 *
 * usage: generate MODEL.gguf PROMPT [BUDGET_BYTES]
 *
 * The text is the same under any budget that is not refused; only time and memory
 * differ. Needs the public API and nothing else. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvd/kvd.h"

/* Text comes in whole characters as soon as it is certain. */
static int print(void *ctx, int32_t id, const char *text, size_t n)
{
    (void)ctx, (void)id;
    fwrite(text, 1, n, stdout);
    return fflush(stdout); /* non-zero stops */
}

int main(int argc, char **argv)
{
    kvd_error err = {0};
    kvd_model *model = NULL;
    kvd_session *session = NULL;
    kvd_result result = {0};
    int32_t *ids = NULL;
    int64_t n_ids, now, peak, budget;
    kvd_model_options mo;
    kvd_generate_options go;

    if (argc < 3) {
        fprintf(stderr, "usage: generate MODEL.gguf PROMPT [BUDGET_BYTES]\n");
        return 2;
    }
    kvd_model_options_defaults(&mo);
    kvd_generate_options_defaults(&go);
    mo.kv_budget_bytes = argc > 3 ? atoll(argv[3]) : 0; /* 0: no limit */
    go.max_tokens = 64;
    go.on_token = print;

    int rc = kvd_model_load(&model, argv[1], &mo, &err);
    rc = rc ? rc : kvd_tokenize(model, argv[2], strlen(argv[2]), KVD_TOKENIZE_BOS, &ids, &n_ids, &err);
    rc = rc ? rc : kvd_session_create(&session, model, NULL, &err);
    rc = rc ? rc : kvd_generate(session, ids, n_ids, &go, &result, &err);
    if (!rc) {
        kvd_memory_context(model, &now, &peak, &budget);
        printf("\nreceipt %s, context memory at most %lld bytes\n", result.receipt, (long long)peak);
    } else
        fprintf(stderr, "generate: %s\n", err.message);

    kvd_result_free(&result);
    kvd_session_free(&session);
    kvd_ids_free(ids);
    kvd_model_free(&model);
    return kvd_error_exit(rc);
}
