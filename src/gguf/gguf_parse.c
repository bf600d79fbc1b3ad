/* The file format, little-endian, nothing aligned before the tensor data:
 *
 *   "GGUF" | u32 version | u64 n_tensors | u64 n_keys
 *   n_keys times:     string key | u32 type | value
 *   n_tensors times:  string name | u32 n_dims | u64 ne[n_dims] | u32 type
 *                     | u64 offset from the start of the data
 *   zeros up to a multiple of general.alignment (32 if the key is absent)
 *   tensor data
 *
 *   string: u64 n | n bytes       array: u32 type | u64 n | n values
 *
 * Source: ggml's docs/gguf.md. v2 and v3 differ only in that v3 allows big-endian
 * files, which are refused here, as is v1 (32-bit counts).
 *
 * How it is read. The region before the data is fetched with pread in chunks
 * into one buffer and stays there; the tables built from it hold positions. No
 * number is trusted: a length is compared with what is left of the file before a
 * byte of it is fetched, and memory grows only with bytes that have been read or
 * with tables whose entries cost at least as many bytes of file as stated in
 * KEY_LEAST and TENSOR_LEAST. Arrays are walked once to check them, and only
 * then given memory.
 *
 * When all is checked the buffer is made usable in place: a 0 goes behind every
 * key and name, over the field that followed it and has been read, and arrays of
 * 32-bit elements slide down by up to 3 bytes, over their own count, to be
 * aligned. The hash for the fingerprint is taken before that. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "gguf/gguf_int.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "metadata is used as it lies in the file");

enum {
    CHUNK_BYTES = 1 << 20,
    KEY_LEAST = 8 + 1 + 4 + 1,            /* key of one byte, a u8 */
    TENSOR_LEAST = 8 + 1 + 4 + 8 + 4 + 8, /* name of one byte, one dimension */
};

static const int value_bytes[KVD__GGUF_VALUE_COUNT] = {
#define KVD_X(id, bytes, name) bytes,
    KVD__GGUF_VALUES(KVD_X)
#undef KVD_X
};

const char *const kvd__gguf_value_names[KVD__GGUF_VALUE_COUNT] = {
#define KVD_X(id, bytes, name) name,
    KVD__GGUF_VALUES(KVD_X)
#undef KVD_X
};

typedef struct {
    kvd_gguf *g;
    kvd_error *err;
    int64_t pos;       /* of the next byte to look at */
    int64_t filled;    /* bytes of the file in g->meta */
    int64_t n_strings; /* in arrays, all keys */
    int64_t n_widened; /* elements of 8 and 16 bits, all keys */
    int64_t alignment;
} reader;

/* Every message starts with the place. */
__attribute__((format(printf, 4, 5)))
static int bad(const reader *r, int code, int64_t at, const char *format, ...)
{
    char text[192];
    va_list ap;
    va_start(ap, format);
    vsnprintf(text, sizeof text, format, ap);
    va_end(ap);
    return kvd__fail_at(r->err, code, at, "byte %lld: %s", (long long)at, text);
}

/* Names in messages: their first bytes are enough to find them. */
#define SHOWN(n) ((int)((n) < 64 ? (n) : 64))

/* --- bytes --- */

static int64_t left(const reader *r) { return r->g->file.size_bytes - r->pos; }

/* Fetch until n bytes from pos on are there. Slow path of need(). */
static int fetch(reader *r, uint64_t n, const char *what)
{
    if (n > (uint64_t)left(r))
        return bad(r, KVD_E_GGUF_TRUNCATED, r->pos, "%s needs %llu bytes, the file has %lld more", what,
                   (unsigned long long)n, (long long)left(r));
    if (r->pos + (int64_t)n > KVD__GGUF_MAX_META)
        return bad(r, KVD_E_GGUF_COUNT, r->pos, "%s of %llu bytes: metadata may have %d in all", what,
                   (unsigned long long)n, (int)KVD__GGUF_MAX_META);
    int64_t to = r->pos + (int64_t)n;
    if (to < r->filled + CHUNK_BYTES)
        to = r->filled + CHUNK_BYTES;
    if (to > r->g->file.size_bytes)
        to = r->g->file.size_bytes;
    uint8_t *p = kvd__realloc(r->g->ledger, KVD_ACC_HOST, r->g->meta, (size_t)to, r->err);
    if (!p)
        return KVD_E_NOMEM;
    r->g->meta = p;
    int rc = kvd__file_read(&r->g->file, r->filled, p + r->filled, (size_t)(to - r->filled), r->err);
    if (!rc)
        r->filled = to;
    return rc;
}

static inline int need(reader *r, uint64_t n, const char *what)
{
    return n <= (uint64_t)(r->filled - r->pos) ? 0 : fetch(r, n, what);
}

static int get_u32(reader *r, uint32_t *out, const char *what)
{
    int rc = need(r, sizeof *out, what);
    if (rc)
        return rc;
    memcpy(out, r->g->meta + r->pos, sizeof *out);
    r->pos += (int64_t)sizeof *out;
    return 0;
}

static int get_u64(reader *r, uint64_t *out, const char *what)
{
    int rc = need(r, sizeof *out, what);
    if (rc)
        return rc;
    memcpy(out, r->g->meta + r->pos, sizeof *out);
    r->pos += (int64_t)sizeof *out;
    return 0;
}

/* A string's length; its bytes are then in the buffer from pos on. */
static int get_string(reader *r, uint64_t *n, const char *what)
{
    int64_t at = r->pos;
    int rc = get_u64(r, n, what);
    if (rc)
        return rc;
    if (*n > (uint64_t)left(r))
        return bad(r, KVD_E_GGUF_STRING, at, "%s of %llu bytes, the file has %lld more", what,
                   (unsigned long long)*n, (long long)left(r));
    return need(r, *n, what);
}

/* A key or tensor name: 1..max bytes, none of them 0. */
static int get_name(reader *r, kvd__gguf_name *out, int max, const char *what)
{
    int64_t at = r->pos;
    uint64_t n;
    int rc = get_u64(r, &n, what);
    if (rc)
        return rc;
    if (n < 1 || n > (uint64_t)max)
        return bad(r, KVD_E_GGUF_STRING, at, "%s of %llu bytes, 1 to %d expected", what, (unsigned long long)n, max);
    rc = need(r, n, what);
    if (rc)
        return rc;
    if (memchr(r->g->meta + r->pos, 0, n))
        return bad(r, KVD_E_GGUF_STRING, r->pos, "%s holds a zero byte", what);
    *out = (kvd__gguf_name){(uint32_t)r->pos, (uint32_t)n};
    r->pos += (int64_t)n;
    return 0;
}

/* --- sorting, without qsort: that one may call malloc --- */

typedef bool (*less_fn)(const void *ctx, uint32_t a, uint32_t b);

static void sift(uint32_t *ids, uint32_t root, uint32_t n, less_fn less, const void *ctx)
{
    for (uint32_t child; (child = 2 * root + 1) < n; root = child) {
        if (child + 1 < n && less(ctx, ids[child], ids[child + 1]))
            child++;
        if (!less(ctx, ids[root], ids[child]))
            return;
        uint32_t t = ids[root];
        ids[root] = ids[child];
        ids[child] = t;
    }
}

/* Heapsort of 0..n-1 into ids: n log n for every input. */
static void sort_ids(uint32_t *ids, uint32_t n, less_fn less, const void *ctx)
{
    for (uint32_t i = 0; i < n; i++)
        ids[i] = i;
    for (uint32_t i = n / 2; i-- > 0;)
        sift(ids, i, n, less, ctx);
    for (uint32_t end = n; end-- > 1;) {
        uint32_t t = ids[0];
        ids[0] = ids[end];
        ids[end] = t;
        sift(ids, 0, end, less, ctx);
    }
}

static int compare(const uint8_t *a, size_t na, const uint8_t *b, size_t nb)
{
    int c = memcmp(a, b, na < nb ? na : nb);
    return c ? c : (na > nb) - (na < nb);
}

typedef struct {
    const kvd__gguf_names *names;
    const uint8_t *meta;
} name_ctx;

static int compare_names(const name_ctx *c, uint32_t a, uint32_t b)
{
    const kvd__gguf_name *x = &c->names->name[a], *y = &c->names->name[b];
    return compare(c->meta + x->at, x->n, c->meta + y->at, y->n);
}

static bool name_less(const void *ctx, uint32_t a, uint32_t b) { return compare_names(ctx, a, b) < 0; }

static bool offset_less(const void *ctx, uint32_t a, uint32_t b)
{
    const kvd_gguf_tensor *t = ctx;
    return t[a].offset < t[b].offset;
}

static int names_alloc(reader *r, kvd__gguf_names *names, uint64_t n)
{
    names->name = kvd__alloc_array(r->g->ledger, KVD_ACC_HOST, n, sizeof *names->name, r->err);
    names->order = kvd__alloc_array(r->g->ledger, KVD_ACC_HOST, n, sizeof *names->order, r->err);
    if (!names->name || !names->order)
        return KVD_E_NOMEM;
    names->n = (uint32_t)n;
    return 0;
}

static int names_sort(reader *r, kvd__gguf_names *names, const char *what)
{
    name_ctx c = {names, r->g->meta};
    sort_ids(names->order, names->n, name_less, &c);
    for (uint32_t i = 1; i < names->n; i++) {
        uint32_t a = names->order[i - 1], b = names->order[i];
        if (!compare_names(&c, a, b)) {
            kvd__gguf_name x = names->name[a > b ? a : b];
            return bad(r, KVD_E_GGUF_DUPLICATE, x.at, "%s '%.*s' is there twice", what, SHOWN(x.n),
                       (const char *)r->g->meta + x.at);
        }
    }
    return 0;
}

int64_t kvd__gguf_find(const kvd__gguf_names *names, const uint8_t *meta, const char *s, size_t n)
{
    uint32_t lo = 0, hi = names->n;
    while (lo < hi) {
        uint32_t mid = lo + (hi - lo) / 2, id = names->order[mid];
        int c = compare((const uint8_t *)s, n, meta + names->name[id].at, names->name[id].n);
        if (!c)
            return id;
        if (c < 0)
            hi = mid;
        else
            lo = mid + 1;
    }
    return -1;
}

/* --- metadata --- */

static int check_type(const reader *r, uint32_t type, int64_t at)
{
    if (type < KVD__GGUF_VALUE_COUNT)
        return 0;
    return bad(r, KVD_E_GGUF_VALUE_TYPE, at, "value type %u, 0 to %d expected", type, KVD__GGUF_VALUE_COUNT - 1);
}

/* n values of a type of fixed size: check that they are there, step over them. */
static int skip_scalars(reader *r, uint32_t type, uint64_t n)
{
    uint64_t bytes = n * (uint64_t)value_bytes[type]; /* n: at most the file's size */
    int rc = need(r, bytes, "value");
    if (rc)
        return rc;
    if (type == KVD__GGUF_BOOL)
        for (uint64_t i = 0; i < n; i++) {
            uint8_t b = r->g->meta[r->pos + (int64_t)i];
            if (b > 1)
                return bad(r, KVD_E_GGUF_VALUE_TYPE, r->pos + (int64_t)i, "bool is %u, 0 or 1 expected", b);
        }
    r->pos += (int64_t)bytes;
    return 0;
}

static int skip_strings(reader *r, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++) {
        uint64_t bytes;
        int rc = get_string(r, &bytes, "string");
        if (rc)
            return rc;
        r->pos += (int64_t)bytes;
    }
    return 0;
}

/* Step over an array at nesting depth `depth` (the outermost is 1); v: where to
 * note what it holds, NULL for inner ones. Recursion is bounded by depth. */
static int skip_array(reader *r, kvd__gguf_value *v, int depth)
{
    int64_t at = r->pos;
    uint32_t elem = 0;
    uint64_t n = 0;
    int rc = get_u32(r, &elem, "array type");
    if (!rc)
        rc = check_type(r, elem, at);
    if (!rc)
        rc = get_u64(r, &n, "array length");
    if (rc)
        return rc;
    if (elem == KVD__GGUF_ARRAY && depth == KVD__GGUF_MAX_DEPTH)
        return bad(r, KVD_E_GGUF_NESTING, at, "arrays nested deeper than %d", (int)KVD__GGUF_MAX_DEPTH);
    if (n > (uint64_t)(left(r) / value_bytes[elem]))
        return bad(r, KVD_E_GGUF_COUNT, at + 4, "array of %llu x %s, the file has %lld more bytes",
                   (unsigned long long)n, kvd__gguf_value_names[elem], (long long)left(r));
    if (v) {
        v->elem = (uint8_t)elem;
        v->at = (uint32_t)r->pos;
    }
    if (elem == KVD__GGUF_STRING)
        rc = skip_strings(r, n);
    else if (elem == KVD__GGUF_ARRAY)
        for (uint64_t i = 0; i < n && !rc; i++)
            rc = skip_array(r, NULL, depth + 1);
    else
        rc = skip_scalars(r, elem, n);
    if (rc || !v)
        return rc;
    v->n = (uint32_t)n; /* fits: every element took a byte below KVD__GGUF_MAX_META */
    if (elem == KVD__GGUF_STRING)
        r->n_strings += (int64_t)n;
    else if (value_bytes[elem] < 4)
        r->n_widened += (int64_t)n;
    return 0;
}

static int read_value(reader *r, kvd__gguf_value *v)
{
    int64_t at = r->pos;
    uint32_t type = 0;
    int rc = get_u32(r, &type, "value type");
    if (!rc)
        rc = check_type(r, type, at);
    if (rc)
        return rc;
    *v = (kvd__gguf_value){.type = (uint8_t)type, .at = (uint32_t)r->pos};
    if (type == KVD__GGUF_ARRAY)
        return skip_array(r, v, 1);
    if (type == KVD__GGUF_STRING)
        return skip_strings(r, 1);
    return skip_scalars(r, type, 1);
}

static int read_alignment(reader *r)
{
    kvd_gguf *g = r->g;
    r->alignment = 32;
    int64_t id = kvd__gguf_find(&g->keys, g->meta, "general.alignment", strlen("general.alignment"));
    if (id < 0)
        return 0;
    const kvd__gguf_value *v = &g->values[id];
    uint32_t a;
    if (v->type != KVD__GGUF_U32)
        return bad(r, KVD_E_GGUF_ALIGNMENT, v->at, "general.alignment is of type %s, u32 expected",
                   kvd__gguf_value_names[v->type]);
    memcpy(&a, g->meta + v->at, sizeof a);
    if (a < KVD__GGUF_MIN_ALIGN || a > KVD__GGUF_MAX_ALIGN || (a & (a - 1)))
        return bad(r, KVD_E_GGUF_ALIGNMENT, v->at, "general.alignment is %u, a power of two from %d to %d expected", a,
                   (int)KVD__GGUF_MIN_ALIGN, (int)KVD__GGUF_MAX_ALIGN);
    r->alignment = a;
    return 0;
}

static int read_keys(reader *r, uint64_t n)
{
    kvd_gguf *g = r->g;
    int rc = names_alloc(r, &g->keys, n);
    if (rc)
        return rc;
    g->values = kvd__alloc_array(g->ledger, KVD_ACC_HOST, n, sizeof *g->values, r->err);
    if (!g->values)
        return KVD_E_NOMEM;
    for (uint64_t i = 0; i < n; i++) {
        rc = get_name(r, &g->keys.name[i], KVD__GGUF_MAX_KEY_BYTES, "key");
        if (!rc)
            rc = read_value(r, &g->values[i]);
        if (rc)
            return rc;
    }
    return names_sort(r, &g->keys, "key");
}

/* --- tensors --- */

static int read_shape(reader *r, kvd_gguf_tensor *t, const char *name, int name_n)
{
    int64_t at = r->pos;
    uint32_t n_dims = 0;
    int rc = get_u32(r, &n_dims, "tensor dimensions");
    if (rc)
        return rc;
    if (n_dims < 1 || n_dims > KVD__GGUF_MAX_DIMS)
        return bad(r, KVD_E_GGUF_SHAPE, at, "tensor '%.*s' has %u dimensions, 1 to %d expected", name_n, name, n_dims,
                   (int)KVD__GGUF_MAX_DIMS);
    t->n_dims = (int)n_dims;
    int64_t elements = 1;
    for (int d = 0; d < KVD__GGUF_MAX_DIMS; d++) {
        t->ne[d] = 1;
        if (d >= t->n_dims)
            continue;
        uint64_t ne = 0;
        at = r->pos;
        rc = get_u64(r, &ne, "tensor dimension");
        if (rc)
            return rc;
        if (ne < 1 || ne > INT64_MAX || __builtin_mul_overflow(elements, (int64_t)ne, &elements))
            return bad(r, KVD_E_GGUF_SHAPE, at, "tensor '%.*s': dimension %d is %llu, at least 1 and a product below "
                       "2^63 expected", name_n, name, d, (unsigned long long)ne);
        t->ne[d] = (int64_t)ne;
    }
    return 0;
}

/* One entry of the table; t->offset is left relative to the data. */
static int read_tensor(reader *r, kvd_gguf_tensor *t, kvd__gguf_name *name)
{
    int rc = get_name(r, name, KVD__GGUF_MAX_NAME, "tensor name");
    if (rc)
        return rc;
    /* The buffer may move at every get_: the name is copied for messages. */
    char text[KVD__GGUF_MAX_NAME];
    int n = (int)name->n;
    memcpy(text, r->g->meta + name->at, name->n);
    rc = read_shape(r, t, text, n);
    if (rc)
        return rc;

    int64_t at = r->pos;
    uint32_t number = 0;
    rc = get_u32(r, &number, "tensor type");
    if (rc)
        return rc;
    int type = kvd__dtype_from_number(number);
    if (type < 0)
        return bad(r, KVD_E_GGUF_TENSOR_TYPE, at, "tensor '%.*s' has the unknown type %u", n, text, number);
    t->type = (kvd_dtype)type;
    const kvd_dtype_info *info = &kvd__dtypes[type];
    if (t->ne[0] % info->block_elems)
        return bad(r, KVD_E_GGUF_SHAPE, at, "tensor '%.*s': rows of %lld, a multiple of %d expected of %s", n, text,
                   (long long)t->ne[0], info->block_elems, info->name);
    /* Elements are below 2^63, so only the last product can overflow. */
    int64_t blocks = t->ne[0] / info->block_elems * t->ne[1] * t->ne[2] * t->ne[3];
    if (__builtin_mul_overflow(blocks, (int64_t)info->block_bytes, &t->n_bytes))
        return bad(r, KVD_E_GGUF_SHAPE, at, "tensor '%.*s' has more than 2^63 bytes", n, text);

    at = r->pos;
    uint64_t offset = 0;
    rc = get_u64(r, &offset, "tensor offset");
    if (rc)
        return rc;
    if (offset > INT64_MAX / 2 || offset % (uint64_t)r->alignment)
        return bad(r, KVD_E_GGUF_OFFSET, at, "tensor '%.*s': offset %llu, a multiple of %lld below 2^62 expected", n,
                   text, (unsigned long long)offset, (long long)r->alignment);
    t->offset = (int64_t)offset;
    return 0;
}

/* Make offsets absolute; all data must lie in the file, none on another. */
static int place_tensors(reader *r, int64_t data)
{
    kvd_gguf *g = r->g;
    uint32_t n = g->tensor_names.n;
    int64_t size = g->file.size_bytes;
    for (uint32_t i = 0; i < n; i++) {
        kvd_gguf_tensor *t = &g->tensors[i];
        kvd__gguf_name name = g->tensor_names.name[i];
        t->offset += data;
        if (t->offset > size || t->n_bytes > size - t->offset)
            return bad(r, KVD_E_GGUF_TRUNCATED, t->offset, "tensor '%.*s' has %lld bytes here, the file ends at %lld",
                       (int)name.n, (const char *)g->meta + name.at, (long long)t->n_bytes, (long long)size);
    }
    uint32_t *order = kvd__alloc_array(g->ledger, KVD_ACC_HOST, n, sizeof *order, r->err);
    if (!order)
        return KVD_E_NOMEM;
    sort_ids(order, n, offset_less, g->tensors);
    int rc = 0;
    for (uint32_t i = 1; i < n && !rc; i++) {
        const kvd_gguf_tensor *a = &g->tensors[order[i - 1]], *b = &g->tensors[order[i]];
        kvd__gguf_name x = g->tensor_names.name[order[i - 1]], y = g->tensor_names.name[order[i]];
        if (b->offset < a->offset + a->n_bytes)
            rc = bad(r, KVD_E_GGUF_OVERLAP, b->offset, "tensor '%.*s' begins inside '%.*s', which ends at %lld",
                     (int)y.n, (const char *)g->meta + y.at, (int)x.n, (const char *)g->meta + x.at,
                     (long long)(a->offset + a->n_bytes));
    }
    kvd__free(order);
    return rc;
}

static int read_tensors(reader *r, uint64_t n)
{
    kvd_gguf *g = r->g;
    int rc = names_alloc(r, &g->tensor_names, n);
    if (rc)
        return rc;
    g->tensors = kvd__alloc_array(g->ledger, KVD_ACC_HOST, n, sizeof *g->tensors, r->err);
    if (!g->tensors)
        return KVD_E_NOMEM;
    for (uint64_t i = 0; i < n; i++) {
        rc = read_tensor(r, &g->tensors[i], &g->tensor_names.name[i]);
        if (rc)
            return rc;
    }
    return names_sort(r, &g->tensor_names, "tensor");
}

/* --- the whole --- */

static int read_header(reader *r, uint64_t *n_tensors, uint64_t *n_keys)
{
    uint32_t magic = 0, version = 0;
    int rc = get_u32(r, &magic, "GGUF header");
    if (rc)
        return rc;
    if (memcmp(r->g->meta, "GGUF", 4))
        return bad(r, KVD_E_GGUF_MAGIC, 0, "begins with the bytes %02x %02x %02x %02x, 'GGUF' expected", r->g->meta[0],
                   r->g->meta[1], r->g->meta[2], r->g->meta[3]);
    rc = get_u32(r, &version, "GGUF version");
    if (rc)
        return rc;
    if (version && !(version & 0xffff))
        return bad(r, KVD_E_GGUF_VERSION, 4, "a big-endian file (version %u); little-endian ones are read",
                   __builtin_bswap32(version));
    if (version != 2 && version != 3)
        return bad(r, KVD_E_GGUF_VERSION, 4, "GGUF version %u; 2 and 3 are read", version);
    r->g->version = (int)version;
    rc = get_u64(r, n_tensors, "tensor count");
    if (!rc)
        rc = get_u64(r, n_keys, "key count");
    if (rc)
        return rc;
    if (*n_tensors > KVD__GGUF_MAX_TENSORS || *n_tensors > (uint64_t)(left(r) / TENSOR_LEAST))
        return bad(r, KVD_E_GGUF_COUNT, 8, "%llu tensors; at most %d and what %lld bytes can hold are read",
                   (unsigned long long)*n_tensors, (int)KVD__GGUF_MAX_TENSORS, (long long)left(r));
    if (*n_keys > KVD__GGUF_MAX_KEYS || *n_keys > (uint64_t)(left(r) / KEY_LEAST))
        return bad(r, KVD_E_GGUF_COUNT, 16, "%llu keys; at most %d and what %lld bytes can hold are read",
                   (unsigned long long)*n_keys, (int)KVD__GGUF_MAX_KEYS, (long long)left(r));
    return 0;
}

static void fill_strings(const uint8_t *meta, uint32_t at, kvd_str *out, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        uint64_t bytes;
        memcpy(&bytes, meta + at, sizeof bytes);
        out[i] = (kvd_str){(const char *)meta + at + sizeof bytes, (size_t)bytes};
        at += (uint32_t)(sizeof bytes + bytes);
    }
}

static void widen(const uint8_t *p, int type, int32_t *out, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        uint16_t u16 = 0;
        if (value_bytes[type] == 2)
            memcpy(&u16, p + 2 * (size_t)i, 2);
        switch (type) {
        case KVD__GGUF_I8: out[i] = (int8_t)p[i]; break;
        case KVD__GGUF_U16: out[i] = u16; break;
        case KVD__GGUF_I16: out[i] = (int16_t)u16; break;
        default: out[i] = p[i]; /* U8, BOOL */
        }
    }
}

static bool all_below_2_31(const int32_t *p, uint32_t n)
{
    int32_t any = 0;
    for (uint32_t i = 0; i < n; i++)
        any |= p[i];
    return any >= 0;
}

/* Give every array of a kind that the look-ups serve its final form. */
static int finish_arrays(reader *r)
{
    kvd_gguf *g = r->g;
    g->strings = kvd__alloc_array(g->ledger, KVD_ACC_HOST, (size_t)r->n_strings, sizeof *g->strings, r->err);
    g->widened = kvd__alloc_array(g->ledger, KVD_ACC_HOST, (size_t)r->n_widened, sizeof *g->widened, r->err);
    if (!g->strings || !g->widened)
        return KVD_E_NOMEM;
    kvd_str *s = g->strings;
    int32_t *w = g->widened;
    for (uint32_t i = 0; i < g->keys.n; i++) {
        kvd__gguf_value *v = &g->values[i];
        if (v->type != KVD__GGUF_ARRAY)
            continue;
        uint8_t *p = g->meta + v->at;
        if (v->elem == KVD__GGUF_STRING) {
            fill_strings(g->meta, v->at, s, v->n);
            v->array = s;
            s += v->n;
        } else if (value_bytes[v->elem] < 4) {
            widen(p, v->elem, w, v->n);
            v->array = w;
            v->fits_i32 = true;
            w += v->n;
        } else if (value_bytes[v->elem] == 4) {
            uint8_t *to = p - ((uintptr_t)p & 3);
            memmove(to, p, (size_t)v->n * 4);
            v->array = to;
            v->fits_i32 = v->elem == KVD__GGUF_I32 ||
                          (v->elem == KVD__GGUF_U32 && all_below_2_31(v->array, v->n));
        }
    }
    return 0;
}

static void finish_names(kvd_gguf *g)
{
    for (uint32_t i = 0; i < g->keys.n; i++)
        g->meta[g->keys.name[i].at + g->keys.name[i].n] = 0;
    for (uint32_t i = 0; i < g->tensor_names.n; i++) {
        kvd__gguf_name name = g->tensor_names.name[i];
        g->meta[name.at + name.n] = 0;
        g->tensors[i].name = (const char *)g->meta + name.at;
    }
}

int kvd__gguf_parse(kvd_gguf *g, kvd_error *err)
{
    reader r = {.g = g, .err = err};
    uint64_t n_tensors = 0, n_keys = 0;
    int rc = read_header(&r, &n_tensors, &n_keys);
    if (!rc)
        rc = read_keys(&r, n_keys);
    if (!rc)
        rc = read_alignment(&r);
    if (!rc)
        rc = read_tensors(&r, n_tensors);
    if (rc)
        return rc;
    int64_t data = (r.pos + r.alignment - 1) & ~(r.alignment - 1);
    rc = place_tensors(&r, data);
    if (rc)
        return rc;
    /* A file without tensors (a vocabulary) may end before the padding. */
    g->meta_bytes = data < g->file.size_bytes ? data : g->file.size_bytes;
    rc = need(&r, (uint64_t)(g->meta_bytes - r.pos), "padding");
    if (rc)
        return rc;
    uint8_t *p = kvd__realloc(g->ledger, KVD_ACC_HOST, g->meta, (size_t)g->meta_bytes, err);
    if (!p)
        return KVD_E_NOMEM;
    g->meta = p;
    kvd__gguf_hash(g->meta, (size_t)g->meta_bytes, g->meta_hash);
    rc = finish_arrays(&r);
    if (rc)
        return rc;
    finish_names(g);
    return kvd__gguf_same_size(g, err);
}
