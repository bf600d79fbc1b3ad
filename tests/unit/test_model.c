/* Models that are well-formed GGUF files and wrong as models: each is refused by
 * name, before work. And models of odd shapes, which run, with the same bits on
 * every instruction set and however the rows come. */
#include "model_build.h"

static const mb_shape llama = {"llama", 2, 64, 4, 2, 16, 96, 256, 0, false}, qwen2 = {"qwen2", 1, 64, 4, 2, 16, 64, 256, 0, false},
                      qwen3 = {"qwen3", 1, 64, 2, 1, 32, 64, 256, 0, true}, gemma3 = {"gemma3", 7, 64, 2, 1, 32, 64, 256, 20, false};

static mb b;

static void refused(int code, const char *says)
{
    kvd_model *m = NULL;
    kvd_error err = {0};
    kvd_model_options o;
    kvd_model_options_defaults(&o);
    o.n_threads = 1;
    mb_write(&b);
    int rc = kvd_model_load(&m, b.path, &o, &err);
    check(rc == code && err.code == code && strstr(err.message, says), "%s: %s; expected %s and '%s'", kvd_error_name(rc), err.message,
          kvd_error_name(code), says);
    assert_null(m);
    assert_int_equal(kvd_model_load(&m, b.path, &o, NULL), code);
}

static kvd_model *loaded(kvd_isa isa, int n_threads, int chunk)
{
    kvd_model *m = NULL;
    kvd_error err = {0};
    kvd_model_options o;
    kvd_model_options_defaults(&o);
    o.n_threads = n_threads;
    o.isa = isa;
    o.chunk_tokens = chunk;
    check(kvd_model_load(&m, b.path, &o, &err) == 0, "%s", err.message);
    return m;
}

static void every_key_that_must_be_there(void **state)
{
    (void)state;
    static const mb_shape *const shapes[] = {&llama, &qwen2, &qwen3, &gemma3};
    static const char *const keys[] = {"block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count"};
    for (int f = 0; f < 4; f++)
        for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
            mb_init(&b, shapes[f]);
            mb_drop(&b, mb_name(shapes[f], keys[i]));
            refused(KVD_E_GGUF_MISSING, mb_name(shapes[f], keys[i]));
            mb_close(&b);
        }
    static const char *const others[] = {"general.architecture", "tokenizer.ggml.model", "tokenizer.ggml.tokens"};
    for (int i = 0; i < 3; i++) {
        mb_init(&b, &llama);
        mb_drop(&b, others[i]);
        refused(KVD_E_GGUF_MISSING, others[i]);
        mb_close(&b);
    }
}

static void every_tensor(void **state)
{
    (void)state;
    static const mb_shape *const shapes[] = {&llama, &qwen2, &qwen3, &gemma3};
    for (int f = 0; f < 4; f++) {
        mb_init(&b, shapes[f]);
        int n = b.n_tensors;
        for (int i = 0; i < n; i++) {
            mb_init(&b, shapes[f]);
            char name[64];
            strcpy(name, b.tensors[i].name);
            bool optional = strstr(name, ".bias") || !strcmp(name, "output.weight");
            if (!optional) {
                mb_drop(&b, name);
                refused(KVD_E_GGUF_MISSING, name);
                mb_close(&b);
            }
            for (int d = 0; d < 2; d++)
                for (int delta = -1; delta <= 1; delta += 2) {
                    mb_init(&b, shapes[f]);
                    mb_tensor *t = mb_tensor_of(&b, name);
                    if (d >= (int)t->n_dims || t->ne[d] + (uint64_t)delta == 0)
                        continue;
                    t->ne[d] += (uint64_t)delta;
                    refused(KVD_E_GGUF_SHAPE, name);
                    mb_close(&b);
                }
            mb_init(&b, shapes[f]); /* a dimension too many, or too few */
            mb_tensor *t = mb_tensor_of(&b, name);
            if (t->n_dims == 1) {
                t->n_dims = 2;
                t->ne[1] = 2;
            } else {
                t->n_dims = 1;
                t->ne[0] *= t->ne[1];
                t->ne[1] = 1;
            }
            refused(KVD_E_GGUF_SHAPE, name);
            mb_close(&b);
            static const uint32_t types[] = {24, 26, 28, 9, 39}; /* I8 I32 F64 Q8_1 MXFP4 */
            for (size_t k = 0; k < sizeof types / sizeof types[0]; k++) {
                mb_init(&b, shapes[f]);
                t = mb_tensor_of(&b, name);
                if (t->n_dims == 1 && types[k] != 24)
                    continue; /* may not be whole blocks */
                t->type = types[k];
                refused(KVD_E_UNSUPPORTED, name);
                mb_close(&b);
            }
        }
    }
    /* One that the architecture does not have. */
    static const char *const extra[] = {"blk.0.attn_q_norm.weight.x", "blk.2.attn_q.weight", "blk.0.ffn_gate_inp.weight",
                                        "output.bias", "token_types.weight", "blk.0.ffn_up.bias"};
    for (size_t i = 0; i < sizeof extra / sizeof extra[0]; i++) {
        mb_init(&b, &llama);
        mb_tensor_add(&b, extra[i], 1, 64, 1, 1, 0);
        refused(KVD_E_UNSUPPORTED, extra[i]);
        mb_close(&b);
    }
    /* The vocabulary decides how many rows there are. */
    mb_init(&b, &llama);
    mb_array(&b, "tokenizer.ggml.tokens", MB_STR, MB_VOCAB - 1, mb_tokens);
    mb_array(&b, "tokenizer.ggml.token_type", MB_I32, MB_VOCAB - 1, mb_types);
    refused(KVD_E_GGUF_SHAPE, "24 rows, the vocabulary 23");
    mb_array(&b, "tokenizer.ggml.token_type", MB_I32, MB_VOCAB, mb_types);
    refused(KVD_E_GGUF_COUNT, "24 token types for 23 tokens");
    mb_close(&b);
}

static void unknown_architectures(void **state)
{
    (void)state;
    static const char *const names[] = {"mamba", "", "llama2", "LLAMA", "llam", "gemma", "gemma2", "qwen2moe", "llama ",
                                        "a-name-that-is-longer-than-any-architecture-that-there-is-or-will-be"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        mb_init(&b, &llama);
        mb_str(&b, "general.architecture", names[i]);
        char says[80];
        snprintf(says, sizeof says, "\"%.40s", names[i]);
        refused(KVD_E_UNSUPPORTED, says);
        mb_close(&b);
    }
    mb_init(&b, &llama);
    mb_str(&b, "general.architecture", "ev\x1b[2Jil\n");
    refused(KVD_E_UNSUPPORTED, "ev?[2Jil?");
    mb_u32(&b, "general.architecture", 7);
    refused(KVD_E_GGUF_VALUE_TYPE, "general.architecture");
    mb_close(&b);
}

static void absurd_numbers(void **state)
{
    (void)state;
    static const struct {
        const char *suffix;
        uint64_t value;
        int code;
    } cases[] = {
        {"block_count", 0, KVD_E_GGUF_BOUNDS}, {"block_count", 513, KVD_E_GGUF_BOUNDS}, {"block_count", UINT64_MAX, KVD_E_GGUF_BOUNDS},
        {"embedding_length", 0, KVD_E_GGUF_BOUNDS}, {"embedding_length", 31, KVD_E_GGUF_BOUNDS}, {"embedding_length", 65537, KVD_E_GGUF_BOUNDS},
        {"attention.head_count", 0, KVD_E_GGUF_BOUNDS}, {"attention.head_count", 513, KVD_E_GGUF_BOUNDS},
        {"attention.head_count", (uint64_t)1 << 32, KVD_E_GGUF_BOUNDS}, {"attention.head_count", ((uint64_t)1 << 32) + 4, KVD_E_GGUF_BOUNDS},
        {"attention.head_count_kv", 0, KVD_E_GGUF_BOUNDS}, {"attention.head_count_kv", 600, KVD_E_GGUF_BOUNDS},
        {"attention.key_length", 0, KVD_E_GGUF_BOUNDS}, {"attention.key_length", 520, KVD_E_GGUF_BOUNDS},
        {"feed_forward_length", 16, KVD_E_GGUF_BOUNDS}, {"feed_forward_length", (1 << 20) + 32, KVD_E_GGUF_BOUNDS},
        {"context_length", 0, KVD_E_GGUF_BOUNDS}, {"context_length", (1 << 24) + 1, KVD_E_GGUF_BOUNDS},
        {"rope.dimension_count", 0, KVD_E_GGUF_BOUNDS}, {"rope.dimension_count", 18, KVD_E_GGUF_BOUNDS},
        {"attention.sliding_window", (1 << 24) + 1, KVD_E_GGUF_BOUNDS},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        mb_init(&b, &llama);
        mb_set(&b, mb_name(&llama, cases[i].suffix), MB_U64)->u64 = cases[i].value;
        refused(cases[i].code, mb_name(&llama, cases[i].suffix));
        mb_close(&b);
    }
    static const struct {
        const char *suffix;
        uint32_t value;
        int code;
        const char *says;
    } pairs[] = {
        {"attention.head_count_kv", 3, KVD_E_GGUF_BOUNDS, "no multiple of 3 KV heads"},
        {"attention.head_count_kv", 8, KVD_E_GGUF_BOUNDS, "no multiple of 8 KV heads"},
        {"attention.head_count_kv", 4, KVD_E_GGUF_SHAPE, "attn_k.weight"},
        {"attention.head_count", 8, KVD_E_GGUF_SHAPE, "attn_q.weight"},
        {"attention.value_length", 8, KVD_E_UNSUPPORTED, "value heads"},
        {"attention.key_length", 8, KVD_E_UNSUPPORTED, "value heads"},
        {"rope.dimension_count", 15, KVD_E_UNSUPPORTED, "multiples"},
        {"embedding_length", 33, KVD_E_UNSUPPORTED, "multiples of 32"},
        {"embedding_length", 96, KVD_E_GGUF_SHAPE, "token_embd.weight"},
        {"feed_forward_length", 33, KVD_E_UNSUPPORTED, "multiples of 32"},
        {"feed_forward_length", 64, KVD_E_GGUF_SHAPE, "ffn_gate.weight"},
        {"block_count", 3, KVD_E_GGUF_MISSING, "blk.2.attn_norm.weight"},
        {"block_count", 1, KVD_E_UNSUPPORTED, "blk.1."},
        {"expert_count", 8, KVD_E_UNSUPPORTED, "llama.expert_count = 8"},
    };
    for (size_t i = 0; i < sizeof pairs / sizeof pairs[0]; i++) {
        mb_init(&b, &llama);
        mb_u32(&b, mb_name(&llama, pairs[i].suffix), pairs[i].value);
        refused(pairs[i].code, pairs[i].says);
        mb_close(&b);
    }
    static const struct {
        const char *suffix;
        float value;
        int code;
    } reals[] = {
        {"attention.layer_norm_rms_epsilon", -1e-6f, KVD_E_GGUF_BOUNDS}, {"attention.layer_norm_rms_epsilon", NAN, KVD_E_GGUF_BOUNDS},
        {"attention.layer_norm_rms_epsilon", 2, KVD_E_GGUF_BOUNDS}, {"rope.freq_base", 0, KVD_E_GGUF_BOUNDS},
        {"rope.freq_base", NAN, KVD_E_GGUF_BOUNDS}, {"rope.freq_base", INFINITY, KVD_E_GGUF_BOUNDS}, {"rope.freq_base", -5, KVD_E_GGUF_BOUNDS},
        {"rope.scaling.factor", NAN, KVD_E_GGUF_BOUNDS}, {"rope.scaling.factor", -1, KVD_E_GGUF_BOUNDS},
        {"rope.scale_linear", INFINITY, KVD_E_GGUF_BOUNDS},
        {"attn_logit_softcapping", 50, KVD_E_UNSUPPORTED}, {"final_logit_softcapping", 30, KVD_E_UNSUPPORTED},
        {"logit_scale", 0.5f, KVD_E_UNSUPPORTED}, {"residual_scale", 2, KVD_E_UNSUPPORTED}, {"attention.scale", 0.1f, KVD_E_UNSUPPORTED},
        {"attention.clamp_kqv", NAN, KVD_E_UNSUPPORTED},
    };
    for (size_t i = 0; i < sizeof reals / sizeof reals[0]; i++) {
        mb_init(&b, &llama);
        mb_f32(&b, mb_name(&llama, reals[i].suffix), reals[i].value);
        refused(reals[i].code, mb_name(&llama, reals[i].suffix));
        mb_close(&b);
    }
}

static void keys_of_another_kind(void **state)
{
    (void)state;
    static const char *const ints[] = {"block_count", "embedding_length", "attention.head_count", "attention.head_count_kv", "context_length",
                                       "attention.key_length", "expert_count"};
    static const uint32_t per_layer[] = {2, 2};
    for (size_t i = 0; i < sizeof ints / sizeof ints[0]; i++) {
        mb_init(&b, &llama);
        mb_str(&b, mb_name(&llama, ints[i]), "4");
        refused(KVD_E_GGUF_VALUE_TYPE, mb_name(&llama, ints[i]));
        mb_array(&b, mb_name(&llama, ints[i]), MB_U32, 2, per_layer);
        refused(KVD_E_GGUF_VALUE_TYPE, mb_name(&llama, ints[i]));
        mb_set(&b, mb_name(&llama, ints[i]), MB_I32)->i32 = -4;
        refused(KVD_E_GGUF_VALUE_TYPE, mb_name(&llama, ints[i]));
        mb_close(&b);
    }
    mb_init(&b, &llama);
    static const char *const scalings[] = {"yarn", "longrope", "", "linear2"};
    for (int i = 0; i < 4; i++) {
        mb_str(&b, "llama.rope.scaling.type", scalings[i]);
        refused(KVD_E_UNSUPPORTED, "RoPE scaling \"");
    }
    mb_u32(&b, "llama.rope.scaling.type", 1);
    refused(KVD_E_GGUF_VALUE_TYPE, "llama.rope.scaling.type");
    mb_drop(&b, "llama.rope.scaling.type");
    mb_str(&b, "tokenizer.ggml.model", "bert");
    refused(KVD_E_UNSUPPORTED, "bert");
    mb_str(&b, "tokenizer.ggml.model", "gpt2");
    mb_str(&b, "tokenizer.ggml.pre", "a-pre-type-of-next-year");
    refused(KVD_E_UNSUPPORTED, "a-pre-type-of-next-year");
    mb_str(&b, "tokenizer.ggml.pre", "smollm");
    mb_set(&b, "llama.attention.causal", MB_BOOL)->flag = 0;
    refused(KVD_E_UNSUPPORTED, "llama.attention.causal");
    mb_close(&b);
    mb_init(&b, &gemma3);
    mb_u32(&b, "gemma3.attention.sliding_window_pattern", 4);
    refused(KVD_E_UNSUPPORTED, "sliding_window_pattern = 4");
    mb_close(&b);
}

static void bad_rope_factors(void **state)
{
    (void)state;
    static const float bad[] = {NAN, INFINITY, -1, 1e-7f, 1e7f};
    mb_init(&b, &llama);
    mb_tensor_add(&b, "rope_freqs.weight", 1, 8, 1, 0, 1);
    mb_write(&b);
    kvd_model *m = loaded(KVD_ISA_AUTO, 1, 16);
    kvd_model_free(&m);
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        mb_tensor_of(&b, "rope_freqs.weight")->poison = bad[i];
        refused(KVD_E_GGUF_BOUNDS, "rope_freqs.weight[1]");
    }
    mb_tensor_of(&b, "rope_freqs.weight")->ne[0] = 16;
    refused(KVD_E_GGUF_SHAPE, "rope_freqs.weight");
    mb_tensor_of(&b, "rope_freqs.weight")->ne[0] = 8 << 20; /* far more than is staged for any reading */
    refused(KVD_E_GGUF_SHAPE, "rope_freqs.weight");
    mb_tensor_of(&b, "rope_freqs.weight")->ne[0] = 8;
    mb_tensor_of(&b, "rope_freqs.weight")->type = 1;
    refused(KVD_E_GGUF_SHAPE, "rope_freqs.weight");
    mb_close(&b);
}

/* Values that are no numbers: vectors are looked at while loading, matrices make
 * themselves known in a pass, by layer and position; the session stays usable. */
static void not_finite(void **state)
{
    (void)state;
    mb_init(&b, &llama);
    int n = b.n_tensors;
    for (int i = 0; i < n; i++)
        for (int kind = 0; kind < 3; kind++) {
            static const float poisons[] = {NAN, INFINITY, 3e38f};
            mb_init(&b, &llama);
            mb_tensor *t = &b.tensors[i];
            t->poison = poisons[kind];
            if (t->n_dims == 1) {
                if (kind < 2)
                    refused(KVD_E_NUMERIC, t->name);
                mb_close(&b);
                continue;
            }
            mb_write(&b);
            kvd_model *m = loaded(KVD_ISA_AUTO, 1 + i % 3, 4);
            kvd_session *s = tiny_session(m, NULL);
            kvd_error err = {0};
            static const int32_t ids[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10};
            bool embd = !strcmp(t->name, "token_embd.weight"); /* row 0, and the head's row 0 */
            const float *logits = NULL;
            int rc = kvd_session_feed(s, ids, 10, &logits, &err);
            if (rc == 0) { /* an overflow need not come to light */
                assert_true(kind == 2);
                for (int v = 0; v < MB_VOCAB; v++)
                    assert_true(isfinite(logits[v]));
                kvd_session_free(&s);
                tiny_free(&m);
                mb_close(&b);
                continue;
            }
            assert_int_equal(rc, KVD_E_NUMERIC);
            int layer = -1;
            if (sscanf(t->name, "blk.%d.", &layer) == 1 && kind == 0) {
                char says[40];
                snprintf(says, sizeof says, "layer %d at position", layer);
                bool at = strstr(err.message, says) != NULL;
                snprintf(says, sizeof says, "layer %d at position", layer + 1); /* seen when it is read */
                at |= strstr(err.message, says) != NULL || strstr(err.message, "logits of position") != NULL;
                check(at, "%s: %s", t->name, err.message);
            }
            check(!embd || strstr(err.message, "logits"), "%s: %s", t->name, err.message);
            assert_int_equal(kvd_session_tokens(s, NULL), 0);
            rc = kvd_session_feed(s, ids, 1, NULL, NULL); /* a finite one may be too small to show */
            assert_true(rc == KVD_E_NUMERIC || (rc == 0 && kind == 2));
            kvd_session_free(&s);
            tiny_free(&m);
            mb_close(&b);
        }
    /* A poisoned row of the embedding is only met by its own token. */
    mb_shape untied = llama;
    untied.untied = true;
    mb_init(&b, &untied);
    mb_tensor_of(&b, "token_embd.weight")->poison = NAN;
    mb_write(&b);
    kvd_model *m = loaded(KVD_ISA_AUTO, 2, 4);
    kvd_session *s = tiny_session(m, NULL);
    kvd_error err;
    static const int32_t good[] = {1, 2, 3, 4, 5}, bad[] = {6, 7, 8, 0, 9};
    const float *logits;
    float kept[MB_VOCAB];
    assert_int_equal(kvd_session_feed(s, good, 5, NULL, &err), 0);
    assert_int_equal(kvd_session_feed(s, bad, 5, NULL, &err), KVD_E_NUMERIC);
    assert_non_null(strstr(err.message, "layer 0 at position 8"));
    assert_int_equal(kvd_session_tokens(s, NULL), 5);
    assert_int_equal(kvd_session_feed(s, good, 1, &logits, &err), 0);
    memcpy(kept, logits, sizeof kept);
    kvd_session_free(&s);
    s = tiny_session(m, NULL);
    static const int32_t same[] = {1, 2, 3, 4, 5, 1};
    assert_int_equal(kvd_session_feed(s, same, 6, &logits, &err), 0);
    assert_memory_equal(logits, kept, sizeof kept);
    kvd_session_free(&s);
    tiny_free(&m);
    mb_close(&b);
}

/* ---- shapes that are odd and right ------------------------------------------------------ */

enum { N_IDS = 150 };

static float *rows_of(kvd_isa isa, int n_threads, int chunk, int64_t kv_tokens, int64_t piece)
{
    kvd_model *m = loaded(isa, n_threads, chunk);
    kvd_session_options so;
    kvd_session_options_defaults(&so);
    so.kv_tokens = kv_tokens;
    kvd_session *s = tiny_session(m, &so);
    float *rows = malloc(sizeof(float) * MB_VOCAB * N_IDS);
    int32_t ids[N_IDS];
    int64_t n = min64(N_IDS, m->config.n_ctx);
    memset(rows, 0, sizeof(float) * MB_VOCAB * N_IDS);
    for (int i = 0; i < N_IDS; i++)
        ids[i] = 1 + i * i % (MB_VOCAB - 1);
    for (int64_t at = 0; at < n; at += piece) {
        const float *logits;
        kvd_error err = {0};
        int64_t end = min64(n, at + piece);
        check(kvd_session_feed(s, ids + at, end - at, &logits, &err) == 0, "%s", err.message);
        memcpy(rows + (end - 1) * MB_VOCAB, logits, sizeof(float) * MB_VOCAB);
    }
    kvd_session_free(&s);
    tiny_free(&m);
    return rows;
}

static void odd_shapes_run(void **state)
{
    (void)state;
    /* arch, layers, d, heads, kv heads, d_head, ffn, context, window, untied */
    static const mb_shape shapes[] = {
        {"llama", 1, 32, 4, 4, 8, 32, 256, 0, false}, {"llama", 2, 32, 12, 1, 8, 32, 256, 0, true}, {"llama", 1, 64, 64, 1, 8, 32, 256, 0, false},
        {"llama", 1, 32, 1, 1, 512, 32, 256, 0, false}, {"qwen2", 2, 96, 4, 1, 24, 160, 256, 0, false}, {"qwen3", 2, 32, 4, 4, 40, 64, 256, 0, true},
        {"llama", 1, 32, 2, 2, 16, 32, 256, 1, false}, {"llama", 2, 32, 2, 1, 16, 32, 256, 2, false}, {"llama", 2, 32, 2, 1, 16, 32, 256, 64, false},
        {"llama", 2, 32, 2, 1, 16, 32, 256, 100000, false}, {"gemma3", 1, 32, 2, 1, 16, 32, 256, 7, false}, {"gemma3", 13, 32, 2, 1, 16, 32, 256, 33, false},
        {"llama", 1, 32, 2, 1, 16, 32, 1, 0, false}, {"llama", 1, 32, 2, 1, 16, 32, 17, 0, false}, {"llama", 1, 32, 200, 100, 8, 32, 256, 0, false},
        {"gemma3", 62, 32, 1, 1, 32, 32, 256, 20, false},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        mb_init(&b, &shapes[i]);
        if (i == 4)
            mb_u32(&b, "qwen2.rope.dimension_count", 10);
        mb_write(&b);
        float *first = rows_of(KVD_ISA_SCALAR, 1, 512, -1, 1);
        static const struct {
            kvd_isa isa;
            int n_threads, chunk;
            int64_t kv_tokens, piece;
        } ways[] = {{KVD_ISA_AUTO, 1, 512, -1, 1}, {KVD_ISA_AUTO, 3, 5, 0, 150}, {KVD_ISA_AVX2, 2, 64, 20, 29}, {KVD_ISA_SCALAR, 3, 7, 1, 37}};
        for (int w = 0; w < 4; w++) {
            if (ways[w].isa == KVD_ISA_AVX2 && !kvd__cpu_has(KVD_CPU_AVX2))
                continue;
            float *rows = rows_of(ways[w].isa, ways[w].n_threads, ways[w].chunk, ways[w].kv_tokens, ways[w].piece);
            for (int r = 0; r < N_IDS; r++)
                for (int v = 0; v < MB_VOCAB; v++)
                    check(rows[r * MB_VOCAB] == 0 || rows[r * MB_VOCAB + v] == first[r * MB_VOCAB + v], "shape %zu, way %d, position %d", i, w, r);
            free(rows);
        }
        free(first);
        mb_close(&b);
    }
}

/* Gemma 3 27B, known by its 62 layers, scales attention by d/heads; all others by d_head. */
static void gemma3_scales_attention(void **state)
{
    (void)state;
    static const struct {
        mb_shape shape;
        float scale;
    } cases[] = {{{"gemma3", 61, 128, 2, 1, 16, 32, 64, 20, false}, 0.25F}, {{"gemma3", 62, 128, 2, 1, 16, 32, 64, 20, false}, 0.125F},
                 {{"llama", 62, 128, 2, 1, 16, 32, 64, 0, false}, 0.25F}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        mb_init(&b, &cases[i].shape);
        mb_write(&b);
        kvd_model *m = loaded(KVD_ISA_AUTO, 1, 16);
        check(m->config.attn_scale == cases[i].scale, "%s of %d layers: %g", cases[i].shape.arch, m->config.n_layers, (double)m->config.attn_scale);
        kvd_model_free(&m);
        mb_close(&b);
    }
}

/* Scaling of positions as the files say it: the same model by three names. */
static void rope_scaling_has_three_names(void **state)
{
    (void)state;
    float *rows[5];
    for (int i = 0; i < 5; i++) {
        mb_init(&b, &llama);
        if (i == 1 || i == 4)
            mb_str(&b, "llama.rope.scaling.type", i == 1 ? "linear" : "none");
        if (i)
            mb_f32(&b, i == 3 ? "llama.rope.scale_linear" : "llama.rope.scaling.factor", 4);
        mb_write(&b);
        rows[i] = rows_of(KVD_ISA_AUTO, 1, 64, -1, 50);
        mb_close(&b);
    }
    size_t bytes = sizeof(float) * MB_VOCAB * N_IDS;
    assert_true(memcmp(rows[0], rows[1], bytes) != 0);
    assert_memory_equal(rows[1], rows[2], bytes);
    assert_memory_equal(rows[1], rows[3], bytes);
    assert_memory_equal(rows[0], rows[4], bytes);
    for (int i = 0; i < 5; i++)
        free(rows[i]);
}

/* A window as long as the context is no window. */
static void a_window_of_everything(void **state)
{
    (void)state;
    mb_shape wide = llama;
    wide.window = N_IDS;
    mb_init(&b, &llama);
    mb_write(&b);
    float *plain = rows_of(KVD_ISA_AUTO, 1, 64, 33, 10);
    mb_close(&b);
    mb_init(&b, &wide);
    mb_write(&b);
    float *windowed = rows_of(KVD_ISA_AUTO, 1, 64, 33, 10);
    mb_close(&b);
    assert_memory_equal(plain, windowed, sizeof(float) * MB_VOCAB * N_IDS);
    free(plain);
    free(windowed);
}

static void vocabulary_alone(void **state)
{
    (void)state;
    mb_init(&b, &llama);
    b.n_tensors = 0;
    mb_write(&b);
    kvd_model *m = NULL;
    kvd_session *s = NULL;
    kvd_error err = {0};
    check(kvd_model_load_vocab(&m, b.path, &err) == 0, "%s", err.message);
    assert_int_equal(kvd_session_create(&s, m, NULL, &err), KVD_E_ARG);
    assert_null(s);
    int32_t *ids;
    int64_t n;
    assert_int_equal(kvd_tokenize(m, "abc", 3, 0, &ids, &n, &err), 0);
    assert_true(n == 2 && ids[0] == 19 && ids[1] == 3);
    kvd_ids_free(ids);
    kvd_model_free(&m);
    kvd_model_free(&m);
    assert_true(kvd_model_load(&m, b.path, NULL, &err) == KVD_E_GGUF_MISSING && !m);
    mb_close(&b);
    assert_int_equal(kvd_model_load(&m, "/nowhere/at/all.gguf", NULL, &err), KVD_E_IO);
    static const struct {
        kvd_model_options o;
    } bad[] = {{{.n_threads = -1, .chunk_tokens = 1}}, {{.n_threads = 257, .chunk_tokens = 1}}, {{.chunk_tokens = 0}}, {{.chunk_tokens = 4097}},
               {{.chunk_tokens = 1, .kv_budget_bytes = -1}}, {{.chunk_tokens = 1, .isa = (kvd_isa)9}}, {{.chunk_tokens = 1, .isa = (kvd_isa)-1}}};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        assert_true(kvd_model_load(&m, b.path, &bad[i].o, &err) == KVD_E_RANGE && !m);
}

/* One token that completes a stop string and begins a character: what is behind the
 * stop never comes out, not when the run is flushed either. */
static void a_stop_string_and_half_a_character_in_one_token(void **state)
{
    (void)state;
    mb_init(&b, &llama);
    mb_write(&b);
    kvd_model *m = loaded(KVD_ISA_AUTO, 1, 16);
    for (int with = 0; with < 2; with++) {
        kvd_session *s = tiny_session(m, NULL);
        kvd_generate_options o;
        kvd_generate_options_defaults(&o);
        kvd_logit_bias bias = {18, 1e6f}; /* "b" and the first byte of U+20AC */
        const char *stop[] = {with ? "b" : "zzz"};
        o.max_tokens = 3;
        o.sampling.bias = &bias;
        o.sampling.n_bias = 1;
        o.stop = stop;
        o.n_stop = 1;
        kvd_result r;
        kvd_error err;
        int32_t prompt[] = {1};
        assert_int_equal(kvd_generate(s, prompt, 1, &o, &r, &err), 0);
        assert_int_equal(r.n_text, with ? 0 : 6);
        assert_memory_equal(r.text, "b\xe2" "b\xe2" "b\xe2", with ? 0 : 6);
        assert_int_equal(r.text[r.n_text], 0);
        kvd_result_free(&r);
        kvd_session_free(&s);
    }
    tiny_free(&m);
    mb_close(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_key_that_must_be_there),
        cmocka_unit_test(every_tensor),
        cmocka_unit_test(unknown_architectures),
        cmocka_unit_test(absurd_numbers),
        cmocka_unit_test(keys_of_another_kind),
        cmocka_unit_test(bad_rope_factors),
        cmocka_unit_test(not_finite),
        cmocka_unit_test(odd_shapes_run),
        cmocka_unit_test(gemma3_scales_attention),
        cmocka_unit_test(rope_scaling_has_three_names),
        cmocka_unit_test(a_window_of_everything),
        cmocka_unit_test(vocabulary_alone),
        cmocka_unit_test(a_stop_string_and_half_a_character_in_one_token),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
