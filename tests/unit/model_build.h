/* tests: a whole model as a GGUF file in memory, from a list of keys and a list of
 * tensors that a test may change before it is written. F32 throughout, a
 * vocabulary of a few tokens; any sizes. */
#ifndef KVD_TESTS_MODEL_BUILD_H
#define KVD_TESTS_MODEL_BUILD_H

#include "tiny.h" /* first: it asks for GNU features */

#include <math.h>
#include <sys/mman.h>

enum { MB_U8, MB_I8, MB_U16, MB_I16, MB_U32, MB_I32, MB_F32, MB_BOOL, MB_STR, MB_ARR, MB_U64, MB_I64, MB_F64 };

typedef struct mb_key {
    char name[96];
    uint32_t type;
    union {
        uint32_t u32;
        int32_t i32;
        uint64_t u64;
        float f32;
        uint8_t flag;
        const char *str;
        struct {
            uint32_t elem, n;
            const void *data; /* const char *const * for strings */
        } array;
    };
} mb_key;

typedef struct mb_tensor {
    char name[64];
    uint32_t type, n_dims; /* type: number in the file */
    uint64_t ne[4];
    float std, mean;
    float poison; /* element 1, if not 0 */
} mb_tensor;

typedef struct mb_shape {
    const char *arch;
    uint32_t layers, d, heads, kv_heads, d_head, ffn, context, window; /* window 0: no key */
    bool untied;
} mb_shape;

enum { MB_VOCAB = 24 };
typedef struct mb {
    mb_key keys[64];
    int n_keys;
    mb_tensor tensors[1024];
    int n_tensors;
    int fd;
    char path[40];
} mb;

/* 0 <end>, then letters, and byte tokens as the byte-level alphabet writes them:
 * 0xe2 is U+00E2, 0x82 U+0124, 0xac U+00AC. */
static const char *const mb_tokens[MB_VOCAB] = {"<|im_end|>", "a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l", "m", "n",
                                                "\xc3\xa2", "\xc4\xa4", "\xc2\xac", "b\xc3\xa2", "ab", "\xc4\xa4\xc2\xac", "o", "p", "q"};
static const int32_t mb_types[MB_VOCAB] = {3, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
static const char *const mb_merges[] = {"a b"};

static inline mb_key *mb_set(mb *b, const char *name, uint32_t type)
{
    int i = 0;
    while (i < b->n_keys && strcmp(b->keys[i].name, name))
        i++;
    assert_true(i < 64);
    b->n_keys = i == b->n_keys ? i + 1 : b->n_keys;
    memset(&b->keys[i], 0, sizeof b->keys[i]);
    snprintf(b->keys[i].name, sizeof b->keys[i].name, "%s", name);
    b->keys[i].type = type;
    return &b->keys[i];
}

static inline void mb_u32(mb *b, const char *name, uint32_t v) { mb_set(b, name, MB_U32)->u32 = v; }
static inline void mb_f32(mb *b, const char *name, float v) { mb_set(b, name, MB_F32)->f32 = v; }
static inline void mb_str(mb *b, const char *name, const char *v) { mb_set(b, name, MB_STR)->str = v; }
static inline void mb_array(mb *b, const char *name, uint32_t elem, uint32_t n, const void *data)
{
    mb_key *k = mb_set(b, name, MB_ARR);
    k->array.elem = elem;
    k->array.n = n;
    k->array.data = data;
}

static inline void mb_tensor_add(mb *b, const char *name, uint32_t n_dims, uint64_t k, uint64_t n, float std, float mean)
{
    assert_true(b->n_tensors < 1024);
    mb_tensor *t = &b->tensors[b->n_tensors++];
    *t = (mb_tensor){.n_dims = n_dims, .ne = {k, n, 1, 1}, .std = std, .mean = mean};
    snprintf(t->name, sizeof t->name, "%s", name);
}

static inline mb_tensor *mb_tensor_of(mb *b, const char *name)
{
    for (int i = 0; i < b->n_tensors; i++)
        if (!strcmp(b->tensors[i].name, name))
            return &b->tensors[i];
    fail_msg("no tensor %s", name);
    return NULL;
}

/* Leave out a key or a tensor. */
static inline void mb_drop(mb *b, const char *name)
{
    for (int i = 0; i < b->n_keys; i++)
        if (!strcmp(b->keys[i].name, name)) {
            b->keys[i] = b->keys[--b->n_keys];
            return;
        }
    mb_tensor *t = mb_tensor_of(b, name);
    memmove(t, t + 1, (size_t)(b->tensors + --b->n_tensors - t) * sizeof *t);
}

static inline const char *mb_name(const mb_shape *s, const char *suffix)
{
    static char name[96];
    snprintf(name, sizeof name, "%s.%s", s->arch, suffix);
    return name;
}

static inline void mb_init(mb *b, const mb_shape *s)
{
    bool gemma = !strcmp(s->arch, "gemma3"), norms = gemma || !strcmp(s->arch, "qwen3"), bias = !strcmp(s->arch, "qwen2");
    memset(b, 0, sizeof *b);
    mb_str(b, "general.architecture", s->arch);
    mb_u32(b, mb_name(s, "block_count"), s->layers);
    mb_u32(b, mb_name(s, "context_length"), s->context);
    mb_u32(b, mb_name(s, "embedding_length"), s->d);
    mb_u32(b, mb_name(s, "feed_forward_length"), s->ffn);
    mb_u32(b, mb_name(s, "attention.head_count"), s->heads);
    mb_u32(b, mb_name(s, "attention.head_count_kv"), s->kv_heads);
    mb_f32(b, mb_name(s, "attention.layer_norm_rms_epsilon"), 1e-5f);
    mb_u32(b, mb_name(s, "attention.key_length"), s->d_head);
    mb_u32(b, mb_name(s, "attention.value_length"), s->d_head);
    if (s->window)
        mb_u32(b, mb_name(s, "attention.sliding_window"), s->window);
    mb_str(b, "tokenizer.ggml.model", "gpt2");
    mb_str(b, "tokenizer.ggml.pre", "smollm");
    mb_array(b, "tokenizer.ggml.tokens", MB_STR, MB_VOCAB, mb_tokens);
    mb_array(b, "tokenizer.ggml.token_type", MB_I32, MB_VOCAB, mb_types);
    mb_array(b, "tokenizer.ggml.merges", MB_STR, 1, mb_merges);
    mb_u32(b, "tokenizer.ggml.eos_token_id", 0);

    uint64_t d = s->d, q = (uint64_t)s->heads * s->d_head, kv = (uint64_t)s->kv_heads * s->d_head, f = s->ffn;
    float dd = 1 / sqrtf((float)d);
    mb_tensor_add(b, "token_embd.weight", 2, d, MB_VOCAB, 1, 0);
    if (s->untied)
        mb_tensor_add(b, "output.weight", 2, d, MB_VOCAB, 1, 0);
    mb_tensor_add(b, "output_norm.weight", 1, d, 1, 0.1f, 1);
    for (uint32_t l = 0; l < s->layers; l++) {
        char name[64];
#define ADD(suffix, ...) (snprintf(name, sizeof name, "blk.%u." suffix, l), mb_tensor_add(b, name, __VA_ARGS__))
        ADD("attn_norm.weight", 1, d, 1, 0.1f, 1);
        ADD("attn_q.weight", 2, d, q, dd, 0);
        ADD("attn_k.weight", 2, d, kv, dd, 0);
        ADD("attn_v.weight", 2, d, kv, dd, 0);
        ADD("attn_output.weight", 2, q, d, 1 / sqrtf((float)q), 0);
        ADD("ffn_norm.weight", 1, d, 1, 0.1f, 1);
        ADD("ffn_gate.weight", 2, d, f, dd, 0);
        ADD("ffn_up.weight", 2, d, f, dd, 0);
        ADD("ffn_down.weight", 2, f, d, 1 / sqrtf((float)f), 0);
        if (norms) {
            ADD("attn_q_norm.weight", 1, s->d_head, 1, 0.1f, 1);
            ADD("attn_k_norm.weight", 1, s->d_head, 1, 0.1f, 1);
        }
        if (gemma) {
            ADD("post_attention_norm.weight", 1, d, 1, 0.1f, 1);
            ADD("post_ffw_norm.weight", 1, d, 1, 0.1f, 1);
        }
        if (bias) {
            ADD("attn_q.bias", 1, q, 1, 0.2f, 0);
            ADD("attn_k.bias", 1, kv, 1, 0.2f, 0);
            ADD("attn_v.bias", 1, kv, 1, 0.2f, 0);
        }
#undef ADD
    }
}

static inline void mb_put(FILE *f, const void *p, size_t n) { assert_int_equal(fwrite(p, 1, n, f), n); }
static inline void mb_put_u32(FILE *f, uint32_t v) { mb_put(f, &v, 4); }
static inline void mb_put_u64(FILE *f, uint64_t v) { mb_put(f, &v, 8); }
static inline void mb_put_str(FILE *f, const char *s)
{
    mb_put_u64(f, strlen(s));
    mb_put(f, s, strlen(s));
}

static inline void mb_put_key(FILE *f, const mb_key *k)
{
    static const size_t sizes[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
    mb_put_str(f, k->name);
    mb_put_u32(f, k->type);
    if (k->type == MB_STR)
        mb_put_str(f, k->str);
    else if (k->type != MB_ARR)
        mb_put(f, &k->u64, sizes[k->type]);
    else {
        mb_put_u32(f, k->array.elem);
        mb_put_u64(f, k->array.n);
        if (k->array.elem == MB_STR)
            for (uint32_t i = 0; i < k->array.n; i++)
                mb_put_str(f, ((const char *const *)k->array.data)[i]);
        else
            mb_put(f, k->array.data, k->array.n * sizes[k->array.elem]);
    }
}

/* Bytes of a tensor's data: of F32, or of the type it claims to have. */
static inline uint64_t mb_tensor_bytes(const mb_tensor *t)
{
    int i = kvd__dtype_from_number(t->type);
    uint64_t n = t->ne[0] * t->ne[1] * t->ne[2] * t->ne[3];
    return i < 0 ? n * 4 : (n / (uint64_t)kvd__dtypes[i].block_elems + 1) * (uint64_t)kvd__dtypes[i].block_bytes;
}

/* Write it to b->path, which can be opened until mb_close. */
static inline void mb_write(mb *b)
{
    if (!b->fd) {
        b->fd = memfd_create("model", MFD_CLOEXEC);
        assert_true(b->fd > 0);
        snprintf(b->path, sizeof b->path, "/proc/self/fd/%d", b->fd);
    }
    assert_int_equal(ftruncate(b->fd, 0), 0);
    lseek(b->fd, 0, SEEK_SET);
    FILE *f = fdopen(dup(b->fd), "wb");
    assert_non_null(f);
    mb_put(f, "GGUF", 4);
    mb_put_u32(f, 3);
    mb_put_u64(f, (uint64_t)b->n_tensors);
    mb_put_u64(f, (uint64_t)b->n_keys);
    for (int i = 0; i < b->n_keys; i++)
        mb_put_key(f, &b->keys[i]);
    uint64_t at = 0;
    for (int i = 0; i < b->n_tensors; i++) {
        const mb_tensor *t = &b->tensors[i];
        mb_put_str(f, t->name);
        mb_put_u32(f, t->n_dims);
        mb_put(f, t->ne, 8 * t->n_dims);
        mb_put_u32(f, t->type);
        mb_put_u64(f, at);
        at += (mb_tensor_bytes(t) + 31) / 32 * 32;
    }
    while (ftell(f) % 32)
        fputc(0, f);
    uint64_t seed = 5;
    for (int i = 0; i < b->n_tensors; i++) {
        const mb_tensor *t = &b->tensors[i];
        uint64_t n = (mb_tensor_bytes(t) + 31) / 32 * 8;
        for (uint64_t j = 0; j < n; j++) {
            double u = (double)(kvd__splitmix64(&seed) >> 11) * 0x1p-53;
            float x = t->mean + t->std * (float)(3.46 * (u - 0.5));
            x = j == 1 && t->poison != 0 ? t->poison : x;
            mb_put(f, &x, 4);
        }
    }
    assert_int_equal(fclose(f), 0);
}

static inline void mb_close(mb *b)
{
    if (b->fd)
        close(b->fd);
    b->fd = 0;
}

#endif
