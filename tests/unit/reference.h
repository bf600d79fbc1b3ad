/* tests: what the tests of sessions hold logits against: two texts for each tiny model,
 * and their logits by policy full, fed at once by one thread. The texts part at FORK.
 * Made when they are first asked for; free_references is a group's teardown. */
#ifndef KVD_TESTS_REFERENCE_H
#define KVD_TESTS_REFERENCE_H

#include "tiny.h"

static const char *const families[] = {"llama", "window", "qwen2", "qwen3", "gemma3", "narrow", "kquant"};
enum { N_FAMILIES = sizeof families / sizeof families[0], N_TOKENS = 320, N_TEXTS = 2, FORK = 70 };

typedef struct {
    float *logits; /* [N_TOKENS][n_vocab] */
    int32_t ids[N_TOKENS];
    int64_t n_vocab;
} reference;

static reference references[N_FAMILIES][3][3][N_TEXTS]; /* by family, type of K and V, type of the stream, text */

static inline int take_row(void *ctx, int64_t pos, const float *logits)
{
    reference *r = ctx;
    memcpy(r->logits + pos * r->n_vocab, logits, (size_t)r->n_vocab * sizeof *logits);
    return 0;
}

static inline const reference *reference_of(int family, kvd_float_type kv, kvd_float_type stream, int text)
{
    reference *r = &references[family][kv][stream][text];
    if (r->logits)
        return r;
    kvd_model_options mo;
    kvd_model_options_defaults(&mo);
    mo.n_threads = 1;
    mo.chunk_tokens = 512;
    kvd_model *m = tiny_load(families[family], &mo);
    kvd_session_options so;
    kvd_session_options_defaults(&so);
    so.policy = KVD_POLICY_FULL;
    so.kv_type = kv;
    so.stream = stream;
    kvd_session *s = tiny_session(m, &so);
    r->n_vocab = m->config.n_vocab;
    r->logits = malloc(sizeof(float) * N_TOKENS * (size_t)r->n_vocab);
    uint64_t seed = (uint64_t)family, other = 99 + (uint64_t)family;
    for (int i = 0; i < N_TOKENS; i++)
        r->ids[i] = (int32_t)(kvd__splitmix64(text && i >= FORK ? &other : &seed) % (uint64_t)r->n_vocab);
    kvd_error err = {0};
    check(kvd_session_feed_all(s, r->ids, N_TOKENS, N_TOKENS, take_row, r, &err) == 0, "%s", err.message);
    kvd_session_free(&s);
    tiny_free(&m);
    return r;
}

static inline int free_references(void **state)
{
    (void)state;
    for (int f = 0; f < N_FAMILIES; f++)
        for (int i = 0; i < 9 * N_TEXTS; i++)
            free(references[f][i / N_TEXTS / 3][i / N_TEXTS % 3][i % N_TEXTS].logits);
    return 0;
}

static inline void same_row(const reference *r, int64_t pos, const float *logits)
{
    if (!memcmp(logits, r->logits + pos * r->n_vocab, (size_t)r->n_vocab * sizeof *logits))
        return;
    int64_t i = 0;
    while (!memcmp(logits + i, r->logits + pos * r->n_vocab + i, sizeof *logits))
        i++;
    fail_msg("logits of position %lld differ from policy full: id %lld has %a, not %a", (long long)pos, (long long)i,
             (double)logits[i], (double)r->logits[pos * r->n_vocab + i]);
}

#endif
