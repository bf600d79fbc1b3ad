/* The open file: look-ups over the tables that gguf_parse.c has built, reads of
 * tensor data, and the fingerprint.
 *
 * The fingerprint is XXH3-128 over
 *
 *   hash of the bytes from 0 to the tensor data (16)
 *   | size of the file, u64 little-endian (8)
 *   | hash of each tensor's bytes, in table order (16 each)
 *
 * so that a loader which reads every tensor anyway, in any order and from any
 * thread, gets it without a second pass (kvd__gguf_fingerprint_from). Hashes are
 * in xxHash's canonical form (XXH128_canonicalFromHash: high half first, each
 * big-endian), the form that `xxhsum -H2` prints. Bytes between tensors are
 * padding and are not covered. */
#include "gguf/gguf.h"

#include <string.h>
#include <sys/stat.h>

/* Inlined: the hash state lives on the stack, xxHash allocates nothing. */
#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/error.h"
#include "gguf/gguf_int.h"

enum { READ_BYTES = 1 << 20 };

void kvd__gguf_hash(const void *p, size_t n, uint8_t out[16])
{
    XXH128_canonical_t c;
    XXH128_canonicalFromHash(&c, XXH3_128bits(p, n));
    memcpy(out, c.digest, 16);
}

static void digest(const XXH3_state_t *state, uint8_t out[16])
{
    XXH128_canonical_t c;
    XXH128_canonicalFromHash(&c, XXH3_128bits_digest(state));
    memcpy(out, c.digest, 16);
}

int kvd__gguf_open(kvd_gguf **out, const char *path, kvd_ledger *l, kvd_error *err)
{
    kvd_gguf *g = kvd__alloc(l, KVD_ACC_HOST, sizeof *g, err);
    if (!g)
        return KVD_E_NOMEM;
    g->ledger = l;
    g->file.fd = -1;
    int rc = kvd__file_open(&g->file, path, err);
    if (!rc)
        rc = kvd__gguf_parse(g, err);
    if (rc) {
        kvd__gguf_close(&g);
        return rc;
    }
    *out = g;
    return 0;
}

void kvd__gguf_close(kvd_gguf **gguf)
{
    kvd_gguf *g = *gguf;
    *gguf = NULL;
    if (!g)
        return;
    kvd__file_close(&g->file);
    kvd__free(g->widened);
    kvd__free(g->strings);
    kvd__free(g->tensors);
    kvd__free(g->tensor_names.order);
    kvd__free(g->tensor_names.name);
    kvd__free(g->values);
    kvd__free(g->keys.order);
    kvd__free(g->keys.name);
    kvd__free(g->meta);
    kvd__free(g);
}

int64_t kvd__gguf_size_bytes(const kvd_gguf *g) { return g->file.size_bytes; }
int kvd__gguf_version(const kvd_gguf *g) { return g->version; }
int64_t kvd__gguf_n_tensors(const kvd_gguf *g) { return g->tensor_names.n; }

const kvd_gguf_tensor *kvd__gguf_tensor_at(const kvd_gguf *g, int64_t i)
{
    return i >= 0 && i < g->tensor_names.n ? &g->tensors[i] : NULL;
}

const kvd_gguf_tensor *kvd__gguf_tensor(const kvd_gguf *g, const char *name)
{
    return kvd__gguf_tensor_at(g, kvd__gguf_find(&g->tensor_names, g->meta, name, strlen(name)));
}

/* --- tensor data --- */

int kvd__gguf_same_size(const kvd_gguf *g, kvd_error *err)
{
    struct stat st;
    if (fstat(g->file.fd, &st))
        return kvd__fail(err, KVD_E_IO, "the file's size cannot be read");
    if ((int64_t)st.st_size != g->file.size_bytes)
        return kvd__fail(err, KVD_E_IO, "the file had %lld bytes when it was opened and now has %lld",
                         (long long)g->file.size_bytes, (long long)st.st_size);
    return 0;
}

int kvd__gguf_read(const kvd_gguf *g, const kvd_gguf_tensor *t, int64_t from, void *buf, size_t n, kvd_error *err)
{
    if (from < 0 || from > t->n_bytes || n > (uint64_t)(t->n_bytes - from))
        return kvd__fail(err, KVD_E_RANGE, "tensor '%s': %zu bytes from %lld on, it has %lld", t->name, n,
                         (long long)from, (long long)t->n_bytes);
    int rc = kvd__file_read(&g->file, t->offset + from, buf, n, err);
    return rc ? rc : kvd__gguf_same_size(g, err);
}

int kvd__gguf_hash_tensor(const kvd_gguf *g, const kvd_gguf_tensor *t, void *buf, int64_t buf_bytes, uint8_t out[16],
                          kvd_error *err)
{
    XXH3_state_t state;
    XXH3_128bits_reset(&state);
    for (int64_t at = 0; at < t->n_bytes; at += buf_bytes) {
        size_t n = (size_t)(t->n_bytes - at < buf_bytes ? t->n_bytes - at : buf_bytes);
        int rc = kvd__gguf_read(g, t, at, buf, n, err);
        if (rc)
            return rc;
        XXH3_128bits_update(&state, buf, n);
    }
    digest(&state, out);
    return 0;
}

int kvd__gguf_fingerprint(const kvd_gguf *g, uint8_t out[16], kvd_error *err)
{
    uint8_t(*hash)[16] = kvd__alloc_array(g->ledger, KVD_ACC_HOST, g->tensor_names.n, sizeof *hash, err);
    uint8_t *buf = kvd__alloc(g->ledger, KVD_ACC_HOST, READ_BYTES, err);
    int rc = hash && buf ? 0 : KVD_E_NOMEM;
    for (uint32_t i = 0; i < g->tensor_names.n && !rc; i++)
        rc = kvd__gguf_hash_tensor(g, &g->tensors[i], buf, READ_BYTES, hash[i], err);
    if (!rc)
        rc = kvd__gguf_fingerprint_from(g, (const uint8_t(*)[16])hash, out);
    kvd__free(buf);
    kvd__free(hash);
    return rc;
}

int kvd__gguf_fingerprint_from(const kvd_gguf *g, const uint8_t (*tensor_hash)[16], uint8_t out[16])
{
    uint64_t size = (uint64_t)g->file.size_bytes;
    uint8_t size_le[8];
    for (int i = 0; i < 8; i++)
        size_le[i] = (uint8_t)(size >> 8 * i);
    XXH3_state_t state;
    XXH3_128bits_reset(&state);
    XXH3_128bits_update(&state, g->meta_hash, 16);
    XXH3_128bits_update(&state, size_le, 8);
    if (g->tensor_names.n)
        XXH3_128bits_update(&state, tensor_hash, (size_t)g->tensor_names.n * 16);
    digest(&state, out);
    return 0;
}

/* --- metadata --- */

static const kvd__gguf_value *find(const kvd_gguf *g, const char *key)
{
    int64_t id = kvd__gguf_find(&g->keys, g->meta, key, strlen(key));
    return id < 0 ? NULL : &g->values[id];
}

static int missing(kvd_error *err, const char *key)
{
    return kvd__fail(err, KVD_E_GGUF_MISSING, "key '%s' is missing", key);
}

static int wrong_kind(kvd_error *err, const kvd__gguf_value *v, const char *key, const char *expected)
{
    bool array = v->type == KVD__GGUF_ARRAY;
    return kvd__fail_at(err, KVD_E_GGUF_VALUE_TYPE, v->at, "byte %u: key '%s' holds %s%s, %s expected", v->at, key,
                        array ? "an array of " : "", kvd__gguf_value_names[array ? v->elem : v->type], expected);
}

bool kvd__gguf_has(const kvd_gguf *g, const char *key) { return find(g, key) != NULL; }

/* An integer value as sign and magnitude bits; false: it is none. */
static bool load_int(const kvd_gguf *g, const kvd__gguf_value *v, uint64_t *bits, bool *negative)
{
    const uint8_t *p = g->meta + v->at;
    uint16_t h;
    uint32_t w;
    uint64_t d;
    int64_t s;
    switch (v->type) {
    case KVD__GGUF_U8: s = p[0]; break;
    case KVD__GGUF_I8: s = (int8_t)p[0]; break;
    case KVD__GGUF_U16: memcpy(&h, p, 2); s = h; break;
    case KVD__GGUF_I16: memcpy(&h, p, 2); s = (int16_t)h; break;
    case KVD__GGUF_U32: memcpy(&w, p, 4); s = w; break;
    case KVD__GGUF_I32: memcpy(&w, p, 4); s = (int32_t)w; break;
    case KVD__GGUF_I64: memcpy(&d, p, 8); s = (int64_t)d; break;
    case KVD__GGUF_U64:
        memcpy(bits, p, 8);
        *negative = false;
        return true;
    default: return false;
    }
    *negative = s < 0;
    *bits = (uint64_t)s;
    return true;
}

int kvd__gguf_u64(const kvd_gguf *g, const char *key, uint64_t *out, kvd_error *err)
{
    const kvd__gguf_value *v = find(g, key);
    if (!v)
        return missing(err, key);
    uint64_t bits;
    bool negative;
    if (!load_int(g, v, &bits, &negative))
        return wrong_kind(err, v, key, "an integer");
    if (negative)
        return kvd__fail_at(err, KVD_E_GGUF_VALUE_TYPE, v->at, "byte %u: key '%s' is %lld, not negative expected",
                            v->at, key, (long long)bits);
    *out = bits;
    return 0;
}

int kvd__gguf_f64(const kvd_gguf *g, const char *key, double *out, kvd_error *err)
{
    const kvd__gguf_value *v = find(g, key);
    if (!v)
        return missing(err, key);
    uint64_t bits;
    bool negative;
    if (v->type == KVD__GGUF_F32) {
        float f;
        memcpy(&f, g->meta + v->at, sizeof f);
        *out = f;
    } else if (v->type == KVD__GGUF_F64)
        memcpy(out, g->meta + v->at, sizeof *out);
    else if (load_int(g, v, &bits, &negative))
        *out = negative ? (double)(int64_t)bits : (double)bits;
    else
        return wrong_kind(err, v, key, "a number");
    return 0;
}

int kvd__gguf_bool(const kvd_gguf *g, const char *key, bool *out, kvd_error *err)
{
    const kvd__gguf_value *v = find(g, key);
    if (!v)
        return missing(err, key);
    if (v->type != KVD__GGUF_BOOL)
        return wrong_kind(err, v, key, "bool");
    *out = g->meta[v->at];
    return 0;
}

int kvd__gguf_str(const kvd_gguf *g, const char *key, kvd_str *out, kvd_error *err)
{
    const kvd__gguf_value *v = find(g, key);
    if (!v)
        return missing(err, key);
    if (v->type != KVD__GGUF_STRING)
        return wrong_kind(err, v, key, "string");
    uint64_t n;
    memcpy(&n, g->meta + v->at, sizeof n);
    *out = (kvd_str){(const char *)g->meta + v->at + sizeof n, (size_t)n};
    return 0;
}

int kvd__gguf_str_array(const kvd_gguf *g, const char *key, const kvd_str **out, int64_t *n, kvd_error *err)
{
    const kvd__gguf_value *v = find(g, key);
    if (!v)
        return missing(err, key);
    if (v->type != KVD__GGUF_ARRAY || v->elem != KVD__GGUF_STRING)
        return wrong_kind(err, v, key, "an array of string");
    *out = v->array;
    *n = v->n;
    return 0;
}

int kvd__gguf_f32_array(const kvd_gguf *g, const char *key, const float **out, int64_t *n, kvd_error *err)
{
    const kvd__gguf_value *v = find(g, key);
    if (!v)
        return missing(err, key);
    if (v->type != KVD__GGUF_ARRAY || v->elem != KVD__GGUF_F32)
        return wrong_kind(err, v, key, "an array of f32");
    *out = v->array;
    *n = v->n;
    return 0;
}

int kvd__gguf_i32_array(const kvd_gguf *g, const char *key, const int32_t **out, int64_t *n, kvd_error *err)
{
    const kvd__gguf_value *v = find(g, key);
    if (!v)
        return missing(err, key);
    if (v->type != KVD__GGUF_ARRAY || !v->fits_i32)
        return wrong_kind(err, v, key, "an array of integers below 2^31");
    *out = v->array;
    *n = v->n;
    return 0;
}
