/* Loading: bind every tensor that the architecture has, check its type and shape
 * before anything is allocated for it, then read and repack in parallel.
 *
 * Memory stays near the file's size: one allocation of exactly the packed sizes,
 * filled through a staging buffer of at most STAGE_BYTES per thread. Threads take
 * whole tensors, largest first; each reads rows with pread, hashes what it read
 * (the fingerprint costs no second read) and packs panels into their final place,
 * which also is what places the pages. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#define XXH_STATIC_LINKING_ONLY /* a state of our own memory: worker threads do not malloc */
#include <xxhash.h>

#include "base/error.h"
#include "base/fpenv.h"
#include "model/model.h"

enum { STAGE_BYTES = 1 << 20 };

/* One tensor to load. */
typedef struct {
    const kvd_gguf_tensor *t;
    kvd_linear *linear;    /* a matrix, or */
    const float **vector;  /* a vector, widened to f32 and padded to 16 */
    int64_t bytes, offset; /* of its place in m->weights */
} item;

typedef struct {
    struct kvd_model *m;
    const kvd_gguf *g;
    item *items;
    int64_t n_items, capacity, total_bytes;
    XXH128_canonical_t *hash; /* [n_tensors] */
    char *stage;              /* [n_threads][STAGE_BYTES + slack] */
    int64_t stage_bytes;
    bool synthetic;
    _Atomic int64_t next;
    _Atomic int failed;
    kvd_error error;          /* of the first to fail */
} loader;

/* Its place in the table: the tensors are one array. */
static int64_t index_of(const loader *ld, const kvd_gguf_tensor *t) { return t - kvd__gguf_tensor_at(ld->g, 0); }

static int bind(loader *ld, const char *name, bool required, int64_t k, int64_t n, kvd_linear *linear,
                const float **vector, kvd_error *err)
{
    const kvd_gguf_tensor *t = kvd__gguf_tensor(ld->g, name);
    if (!t)
        return required ? kvd__fail(err, KVD_E_GGUF_MISSING, "missing tensor %s", name) : 0;
    const kvd_dtype_info *ti = &kvd__dtypes[t->type];
    if (!ti->implemented)
        return kvd__fail_at(err, KVD_E_UNSUPPORTED, t->offset, "%s: tensor type %s is not supported", name, ti->name);
    bool shape_ok = linear ? t->n_dims == 2 && t->ne[0] == k && t->ne[1] == n : t->n_dims == 1 && t->ne[0] == k;
    if (!shape_ok)
        return kvd__fail_at(err, KVD_E_GGUF_SHAPE, t->offset, "%s: shape [%lld, %lld], expected [%lld, %lld]", name,
                            (long long)t->ne[0], (long long)t->ne[1], (long long)k, (long long)(linear ? n : 1));
    if (ld->n_items == ld->capacity)
        return kvd__fail(err, KVD_E_GGUF_BOUNDS, "more tensors than %lld", (long long)ld->capacity);
    item it = {.t = t, .linear = linear, .vector = vector, .offset = ld->total_bytes};
    if (linear) {
        if (k % ti->block_elems)
            return kvd__fail_at(err, KVD_E_GGUF_SHAPE, t->offset, "%s: %lld columns are no multiple of %s's block of %d",
                                name, (long long)k, ti->name, ti->block_elems);
        if (ld->m->kern.gemm[t->type] == NULL)
            return kvd__fail_at(err, KVD_E_UNSUPPORTED, t->offset, "%s: no kernel for type %s", name, ti->name);
        *linear = (kvd_linear){.type = t->type, .n = n, .k = k, .n_panels = (n + 15) / 16,
                               .panel_bytes = kvd__panel_bytes(t->type, k)};
        it.bytes = linear->n_panels * linear->panel_bytes;
    } else
        it.bytes = (k + 15) / 16 * 64;
    ld->total_bytes += (it.bytes + 63) / 64 * 64;
    ld->items[ld->n_items++] = it;
    kvd_share *sh = &ld->m->share[t->type];
    sh->type = t->type;
    sh->n_tensors++;
    sh->bytes += t->n_bytes;
    ld->m->n_params += k * (linear ? n : 1);
    return 0;
}

static int bind_layer(loader *ld, int l, kvd_error *err)
{
    const kvd_config *c = &ld->m->config;
    kvd_layer *y = &ld->m->layers[l];
    int64_t d = c->d_model, q = (int64_t)c->n_heads * c->d_head, kv = (int64_t)c->n_kv_heads * c->d_head, f = c->d_ffn;
    const struct {
        const char *name;
        bool required;
        int64_t k, n;
        kvd_linear *linear;
        const float **vector;
    } list[] = {
        {"attn_norm.weight", true, d, 1, NULL, &y->attn_norm},
        {"attn_q.weight", true, d, q, &y->q, NULL},
        {"attn_k.weight", true, d, kv, &y->k, NULL},
        {"attn_v.weight", true, d, kv, &y->v, NULL},
        {"attn_output.weight", true, q, d, &y->o, NULL},
        {"ffn_norm.weight", true, d, 1, NULL, &y->ffn_norm},
        {"ffn_gate.weight", true, d, f, &y->gate, NULL},
        {"ffn_up.weight", true, d, f, &y->up, NULL},
        {"ffn_down.weight", true, f, d, &y->down, NULL},
        {"attn_q_norm.weight", c->qk_norm, c->d_head, 1, NULL, &y->q_norm},
        {"attn_k_norm.weight", c->qk_norm, c->d_head, 1, NULL, &y->k_norm},
        {"post_attention_norm.weight", c->post_norms, d, 1, NULL, &y->attn_post_norm},
        {"post_ffw_norm.weight", c->post_norms, d, 1, NULL, &y->ffn_post_norm},
        {"attn_q.bias", false, q, 1, NULL, &y->q.bias},
        {"attn_k.bias", false, kv, 1, NULL, &y->k.bias},
        {"attn_v.bias", false, kv, 1, NULL, &y->v.bias},
        {"attn_output.bias", false, d, 1, NULL, &y->o.bias},
    };
    for (size_t i = 0; i < sizeof list / sizeof list[0]; i++) {
        char name[64];
        snprintf(name, sizeof name, "blk.%d.%s", l, list[i].name);
        int rc = bind(ld, name, list[i].required, list[i].k, list[i].n, list[i].linear, list[i].vector, err);
        if (rc)
            return rc;
    }
    return 0;
}

static int bind_all(loader *ld, kvd_error *err)
{
    struct kvd_model *m = ld->m;
    const kvd_config *c = &m->config;
    const kvd_gguf_tensor *e = kvd__gguf_tensor(ld->g, "token_embd.weight");
    if (!e)
        return kvd__fail(err, KVD_E_GGUF_MISSING, "missing tensor token_embd.weight");
    if (e->ne[1] < 1 || e->ne[1] > 1 << 21)
        return kvd__fail_at(err, KVD_E_GGUF_BOUNDS, e->offset, "token_embd.weight: %lld rows", (long long)e->ne[1]);
    m->config.n_vocab = (int)e->ne[1];
    if (m->tokenizer && kvd__tokenizer_n_tokens(m->tokenizer) != c->n_vocab)
        return kvd__fail(err, KVD_E_GGUF_SHAPE, "token_embd.weight has %d rows, the vocabulary %lld tokens", c->n_vocab,
                         (long long)kvd__tokenizer_n_tokens(m->tokenizer));
    m->tied_head = !kvd__gguf_tensor(ld->g, "output.weight");
    int rc;
    if ((rc = bind(ld, "token_embd.weight", true, c->d_model, c->n_vocab, &m->embd, NULL, err)) ||
        (rc = bind(ld, "output.weight", false, c->d_model, c->n_vocab, &m->head, NULL, err)) ||
        (rc = bind(ld, "output_norm.weight", true, c->d_model, 1, NULL, &m->out_norm, err)))
        return rc;
    for (int l = 0; l < c->n_layers; l++)
        if ((rc = bind_layer(ld, l, err)))
            return rc;
    /* What the file has and this build would ignore may change the arithmetic. */
    for (int64_t i = 0; i < kvd__gguf_n_tensors(ld->g); i++) {
        const kvd_gguf_tensor *t = kvd__gguf_tensor_at(ld->g, i);
        bool used = !strcmp(t->name, "rope_freqs.weight");
        for (int64_t j = 0; j < ld->n_items && !used; j++)
            used = ld->items[j].t == t;
        if (!used)
            return kvd__fail_at(err, KVD_E_UNSUPPORTED, t->offset, "tensor %s is not part of architecture %s as known here",
                                t->name, c->arch);
    }
    return 0;
}

static int load_matrix(loader *ld, const item *it, char *stage, XXH3_state_t *hash, kvd_error *err)
{
    const kvd_linear *w = it->linear;
    int64_t row = kvd__row_bytes(w->type, w->k), panels = ld->stage_bytes / (16 * row);
    char *dst = (char *)ld->m->weights + it->offset;
    for (int64_t p = 0; p < w->n_panels; p += panels) {
        int64_t first = p * 16, last = (p + panels) * 16 < w->n ? (p + panels) * 16 : w->n;
        int rc = kvd__gguf_read(ld->g, it->t, first * row, stage, (size_t)((last - first) * row), err);
        if (rc)
            return rc;
        XXH3_128bits_update(hash, stage, (size_t)((last - first) * row));
        for (int64_t r = first; r < last; r += 16)
            kvd__panel_pack(w->type, stage + (r - first) * row, (int)(last - r < 16 ? last - r : 16), w->k,
                            dst + r / 16 * w->panel_bytes);
    }
    return 0;
}

static int load_vector(loader *ld, const item *it, char *stage, XXH3_state_t *hash, kvd_error *err)
{
    int rc = kvd__gguf_read(ld->g, it->t, 0, stage, (size_t)it->t->n_bytes, err);
    if (rc)
        return rc;
    XXH3_128bits_update(hash, stage, (size_t)it->t->n_bytes);
    float *dst = (float *)(void *)((char *)ld->m->weights + it->offset);
    kvd__dequant_row(it->t->type, stage, dst, it->t->ne[0]);
    for (int64_t i = 0; i < it->t->ne[0]; i++)
        if (!(dst[i] - dst[i] == 0))
            return kvd__fail_at(err, KVD_E_NUMERIC, it->t->offset, "%s[%lld] is not finite", it->t->name, (long long)i);
    return 0;
}

/* Bytes that are sane values in every format, and norms of one: speed does not
 * depend on what they are. */
static void make_up(loader *ld, const item *it)
{
    char *dst = (char *)ld->m->weights + it->offset;
    memset(dst, 0x11, (size_t)it->bytes);
    for (int64_t i = 0; it->vector && i < it->t->ne[0]; i++)
        ((float *)(void *)dst)[i] = 1;
}

static void load_job(void *ctx, int tid, int n_threads)
{
    loader *ld = ctx;
    (void)n_threads;
    char *stage = ld->stage + tid * ld->stage_bytes;
    XXH3_state_t state, *hash = &state;
    XXH3_INITSTATE(hash);
    kvd_error err = {0};
    int rc = 0;
    for (int64_t i; !rc && !atomic_load(&ld->failed) && (i = atomic_fetch_add(&ld->next, 1)) < ld->n_items;) {
        const item *it = &ld->items[i];
        if (ld->synthetic) {
            make_up(ld, it);
            continue;
        }
        XXH3_128bits_reset(hash);
        rc = it->linear ? load_matrix(ld, it, stage, hash, &err) : load_vector(ld, it, stage, hash, &err);
        if (!rc)
            XXH128_canonicalFromHash(&ld->hash[index_of(ld, it->t)], XXH3_128bits_digest(hash));
    }
    int expected = 0;
    if (rc && atomic_compare_exchange_strong(&ld->failed, &expected, rc))
        ld->error = err;
}

/* Largest first: the last threads to finish then have little left. */
static int by_size(const void *a, const void *b)
{
    int64_t x = ((const item *)a)->bytes, y = ((const item *)b)->bytes;
    if (x != y)
        return x < y ? 1 : -1;
    return ((const item *)a)->offset < ((const item *)b)->offset ? -1 : 1;
}

/* The fingerprint; rope_freqs.weight, which is no item, is hashed here. */
static int fingerprint(loader *ld, kvd_error *err)
{
    const kvd_gguf_tensor *t = kvd__gguf_tensor(ld->g, "rope_freqs.weight");
    int rc = t ? kvd__gguf_hash_tensor(ld->g, t, ld->stage, ld->stage_bytes, ld->hash[index_of(ld, t)].digest, err) : 0;
    return rc ? rc : kvd__gguf_fingerprint_from(ld->g, (const uint8_t(*)[16])ld->hash, ld->m->fingerprint);
}

/* The widest staging that an item needs: one panel, or a whole vector. */
static int64_t stage_bytes(const loader *ld)
{
    int64_t n = STAGE_BYTES;
    for (int64_t i = 0; i < ld->n_items; i++) {
        int64_t need = ld->items[i].linear ? 16 * kvd__row_bytes(ld->items[i].t->type, ld->items[i].t->ne[0]) : ld->items[i].t->n_bytes;
        n = need > n ? need : n;
    }
    return (n + 63) / 64 * 64;
}

static int load_weights(struct kvd_model *m, const kvd_gguf *g, bool synthetic, kvd_error *err)
{
    int64_t n_tensors = kvd__gguf_n_tensors(g);
    loader ld = {.m = m, .g = g, .capacity = n_tensors, .synthetic = synthetic};
    int rc = KVD_E_NOMEM;
    m->layers = kvd__alloc_array(m->ledger, KVD_ACC_WEIGHTS, (size_t)m->config.n_layers, sizeof *m->layers, err);
    ld.items = kvd__alloc_array(m->ledger, KVD_ACC_HOST, (size_t)n_tensors, sizeof *ld.items, err);
    ld.hash = kvd__alloc_array(m->ledger, KVD_ACC_HOST, (size_t)n_tensors, sizeof *ld.hash, err);
    if (!m->layers || !ld.items || !ld.hash || (rc = bind_all(&ld, err)))
        goto done;
    rc = KVD_E_NOMEM;
    m->weight_bytes = ld.total_bytes;
    ld.stage_bytes = stage_bytes(&ld);
    m->weights = kvd__alloc_huge(m->ledger, KVD_ACC_WEIGHTS, (size_t)ld.total_bytes, err);
    ld.stage = kvd__alloc_array(m->ledger, KVD_ACC_COMPUTE, (size_t)kvd__pool_threads(m->pool), (size_t)ld.stage_bytes, err);
    if (!m->weights || !ld.stage)
        goto done;
    for (int64_t i = 0; i < ld.n_items; i++) {
        char *p = (char *)m->weights + ld.items[i].offset;
        if (ld.items[i].linear)
            ld.items[i].linear->panels = p;
    }
    for (int64_t i = 0; i < ld.n_items; i++) /* after: a bias lives in its kvd_linear */
        if (ld.items[i].vector)
            *ld.items[i].vector = (const float *)(const void *)((char *)m->weights + ld.items[i].offset);
    qsort(ld.items, (size_t)ld.n_items, sizeof *ld.items, by_size);
    kvd__pool_run(m->pool, load_job, &ld);
    rc = atomic_load(&ld.failed);
    if (rc && err)
        *err = ld.error;
    if (!rc && !synthetic)
        rc = fingerprint(&ld, err);
    if (m->tied_head)
        m->head = m->embd;
done:
    kvd__free(ld.stage);
    kvd__free(ld.hash);
    kvd__free(ld.items);
    return rc;
}

static kvd_bytes bytes_of(kvd_str s) { return (kvd_bytes){s.data, s.n}; }

static int64_t id_of(const kvd_gguf *g, const char *key)
{
    uint64_t v;
    return kvd__gguf_u64(g, key, &v, NULL) || v > INT32_MAX ? -1 : (int64_t)v;
}

static int flag_of(const kvd_gguf *g, const char *key)
{
    bool b;
    return kvd__gguf_bool(g, key, &b, NULL) ? -1 : b;
}

_Static_assert(sizeof(kvd_str) == sizeof(kvd_bytes), "arrays of both are the same");

static int load_vocab(struct kvd_model *m, const kvd_gguf *g, kvd_error *err)
{
    kvd_vocab v = {.bos = id_of(g, "tokenizer.ggml.bos_token_id"), .eos = id_of(g, "tokenizer.ggml.eos_token_id"),
                   .eot = id_of(g, "tokenizer.ggml.eot_token_id"), .unk = id_of(g, "tokenizer.ggml.unknown_token_id"),
                   .add_bos = flag_of(g, "tokenizer.ggml.add_bos_token"), .add_eos = flag_of(g, "tokenizer.ggml.add_eos_token"),
                   .add_space_prefix = flag_of(g, "tokenizer.ggml.add_space_prefix")};
    kvd_str s;
    const kvd_str *list;
    int64_t n;
    int rc = kvd__gguf_str(g, "tokenizer.ggml.model", &s, err);
    if (rc)
        return rc;
    v.model = bytes_of(s);
    if (!kvd__gguf_str(g, "tokenizer.ggml.pre", &s, NULL))
        v.pre = bytes_of(s);
    m->tokenizer_model = kvd__strndup(m->ledger, KVD_ACC_HOST, v.model.data, v.model.n, err);
    m->tokenizer_pre = kvd__strndup(m->ledger, KVD_ACC_HOST, v.pre.n ? v.pre.data : "", v.pre.n, err);
    if (!m->tokenizer_model || !m->tokenizer_pre)
        return KVD_E_NOMEM;
    if ((rc = kvd__gguf_str_array(g, "tokenizer.ggml.tokens", &list, &v.n_tokens, err)))
        return rc;
    v.tokens = (const kvd_bytes *)(const void *)list;
    if (!kvd__gguf_str_array(g, "tokenizer.ggml.merges", &list, &v.n_merges, NULL))
        v.merges = (const kvd_bytes *)(const void *)list;
    if (!kvd__gguf_i32_array(g, "tokenizer.ggml.token_type", &v.types, &n, NULL) && n != v.n_tokens)
        return kvd__fail(err, KVD_E_GGUF_COUNT, "%lld token types for %lld tokens", (long long)n, (long long)v.n_tokens);
    if (!kvd__gguf_f32_array(g, "tokenizer.ggml.scores", &v.scores, &n, NULL) && n != v.n_tokens)
        return kvd__fail(err, KVD_E_GGUF_COUNT, "%lld token scores for %lld tokens", (long long)n, (long long)v.n_tokens);
    if ((rc = kvd__tokenizer_create(&m->tokenizer, &v, m->ledger, err)))
        return rc;
    m->config.n_vocab = (int)v.n_tokens;
    m->chat = KVD_CHAT_NONE;
    if (!kvd__gguf_str(g, "tokenizer.chat_template", &s, NULL)) {
        m->chat = kvd__chat_detect(s.data, s.n);
        m->chat_template = kvd__strndup(m->ledger, KVD_ACC_HOST, s.data, s.n, err);
        if (!m->chat_template)
            return KVD_E_NOMEM;
    }
    return 0;
}

static int load(struct kvd_model *m, const kvd_gguf *g, const kvd_load_options *o, kvd_error *err)
{
    kvd_str s = {0};
    int rc;
    kvd__gguf_str(g, "general.name", &s, NULL);
    if (!(m->name = kvd__strndup(m->ledger, KVD_ACC_HOST, s.data ? s.data : "", s.n, err)))
        return KVD_E_NOMEM;
    m->file_bytes = kvd__gguf_size_bytes(g);
    if (o->vocab_only) {
        /* A vocabulary-only file has no shapes; a model's file has. */
        if (kvd__gguf_n_tensors(g) > 0 && (rc = kvd__config_read(&m->config, g, err)))
            return rc;
        if (!m->config.arch[0] && !kvd__gguf_str(g, "general.architecture", &s, NULL))
            snprintf(m->config.arch, sizeof m->config.arch, "%.*s", (int)(s.n < 15 ? s.n : 15), s.data);
        for (int64_t i = 0; i < kvd__gguf_n_tensors(g); i++) {
            const kvd_gguf_tensor *t = kvd__gguf_tensor_at(g, i);
            m->share[t->type].type = t->type;
            m->share[t->type].n_tensors++;
            m->share[t->type].bytes += t->n_bytes;
            m->n_params += t->ne[0] * t->ne[1] * t->ne[2] * t->ne[3];
        }
        m->tied_head = !kvd__gguf_tensor(g, "output.weight");
        return load_vocab(m, g, err);
    }
    if ((rc = kvd__config_read(&m->config, g, err)) || (rc = load_vocab(m, g, err)) ||
        (rc = kvd__rope_create(m, g, err)) || (rc = kvd__pool_create(&m->pool, o->n_threads, m->ledger, err)) ||
        (rc = load_weights(m, g, o->synthetic, err)) || (rc = kvd__scratch_create(m, o->chunk, err)))
        return rc;
    m->has_weights = true;
    return 0;
}

int kvd__model_load(struct kvd_model **out, const char *path, const kvd_load_options *o, kvd_error *err)
{
    kvd_fpenv env = kvd__fpenv_enter();
    kvd_ledger *ledger = kvd__ledger_create(o->budget_bytes, err);
    if (ledger)
        ledger->fail_at = o->fail_at;
    struct kvd_model *m = ledger ? kvd__alloc(ledger, KVD_ACC_HOST, sizeof *m, err) : NULL;
    kvd_gguf *g = NULL;
    int rc = m ? 0 : KVD_E_NOMEM;
    if (!rc) {
        m->ledger = ledger;
        m->activations_f32 = o->activations_f32;
        m->inject_layer = -1;
        m->cpu = o->cpu;
        kvd__kern_init(&m->kern, o->cpu);
        rc = kvd__gguf_open(&g, path, ledger, err);
    } else
        kvd__ledger_destroy(&ledger);
    if (!rc)
        rc = load(m, g, o, err);
    kvd__gguf_close(&g);
    kvd__fpenv_leave(env);
    if (rc) {
        kvd__model_free(&m);
        return rc;
    }
    *out = m;
    return 0;
}

void kvd__model_free(struct kvd_model **pm)
{
    struct kvd_model *m = *pm;
    *pm = NULL;
    if (!m)
        return;
    kvd__scratch_destroy(m);
    kvd__rope_destroy(m);
    kvd__pool_destroy(&m->pool);
    kvd__tokenizer_destroy(&m->tokenizer);
    kvd__free(m->weights);
    kvd__free(m->layers);
    kvd__free(m->chat_template);
    kvd__free(m->tokenizer_model);
    kvd__free(m->tokenizer_pre);
    kvd__free(m->name);
    kvd_ledger *ledger = m->ledger;
    kvd__free(m);
    kvd__ledger_destroy(&ledger);
}

void kvd__model_kv_shape(const struct kvd_model *m, kvd_kvtype kv_type, kvd_kvtype stream, kvd_kv_shape *s)
{
    const kvd_config *c = &m->config;
    *s = (kvd_kv_shape){.n_layers = c->n_layers, .n_kv_heads = c->n_kv_heads, .d_head = c->d_head, .type = kv_type,
                        .window = m->keep_windows ? 0 : c->window, .stream_row_bytes = (int64_t)c->d_model * kvd__kvtype_bytes(stream)};
    if (!m->keep_windows)
        memcpy(s->local, c->local, sizeof s->local);
}
