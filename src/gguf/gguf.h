/* gguf: reader of GGUF v2 and v3 files (the format's own specification: ggml
 * docs/gguf.md). Knows no models.
 *
 * The file is hostile. Every offset, count, length, nesting, alignment, type and
 * shape is checked before it is used, in 64 bits with overflow checks; nothing
 * is allocated from a number that the rest of the file cannot back. Errors name
 * the byte offset and what was expected. Limits of our own, far above real files:
 * 256 MiB before the tensor data, 65,536 keys and as many tensors.
 *
 * Layer: above base only. A kvd_gguf is immutable after open: any thread may
 * read it. */
#ifndef KVD_GGUF_GGUF_H
#define KVD_GGUF_GGUF_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/dtype.h"
#include "base/ledger.h"

typedef struct kvd_gguf kvd_gguf;

/* Borrowed from the kvd_gguf; not terminated, may hold any bytes. */
typedef struct kvd_str {
    const char *data;
    size_t n;
} kvd_str;

enum { KVD__GGUF_MAX_DIMS = 4, KVD__GGUF_MAX_NAME = 64 };

typedef struct kvd_gguf_tensor {
    const char *name; /* terminated */
    int n_dims;
    int64_t ne[KVD__GGUF_MAX_DIMS]; /* ne[0] is the row length K; absent: 1 */
    kvd_dtype type;
    int64_t offset;  /* absolute, in the file */
    int64_t n_bytes;
} kvd_gguf_tensor;

/* Parse header, metadata and tensor table; check that all tensor data lies in
 * the file. Returns owned. Memory: host account, about 1.8 times the bytes before
 * the tensor data for a real file and at most 6 times (many tiny entries), plus
 * read-ahead of 1 MiB during the call. Borrows l until the close. */
int kvd__gguf_open(kvd_gguf **out, const char *path, kvd_ledger *l, kvd_error *err);
void kvd__gguf_close(kvd_gguf **g);

/* XXH3-128 of everything before the tensor data plus size of the file, and of
 * each tensor's bytes (computed when called: reads the file once). What the
 * receipt names as the model. 16 bytes out; gguf.c has the exact layout. */
int kvd__gguf_fingerprint(const kvd_gguf *g, uint8_t out[16], kvd_error *err);

/* The same for a caller that has read all tensors anyway: tensor_hash is
 * [n_tensors][16], in table order, each the XXH3-128 of the tensor's n_bytes as
 * they lie in the file, in canonical form (XXH128_canonicalFromHash). Reads
 * nothing; always 0. */
int kvd__gguf_fingerprint_from(const kvd_gguf *g, const uint8_t (*tensor_hash)[16], uint8_t out[16]);

/* One of those hashes; the tensor is read in pieces through buf. */
int kvd__gguf_hash_tensor(const kvd_gguf *g, const kvd_gguf_tensor *t, void *buf, int64_t buf_bytes, uint8_t out[16],
                          kvd_error *err);

int64_t kvd__gguf_size_bytes(const kvd_gguf *g);
int kvd__gguf_version(const kvd_gguf *g);
int64_t kvd__gguf_n_tensors(const kvd_gguf *g);
const kvd_gguf_tensor *kvd__gguf_tensor_at(const kvd_gguf *g, int64_t i);
/* By name, NULL if absent. */
const kvd_gguf_tensor *kvd__gguf_tensor(const kvd_gguf *g, const char *name);

/* Read n bytes of a tensor's data from byte `from` of it. Any thread. A file
 * whose size has changed since the opening is an error: KVD_E_GGUF_TRUNCATED or
 * KVD_E_IO. */
int kvd__gguf_read(const kvd_gguf *g, const kvd_gguf_tensor *t, int64_t from, void *buf, size_t n, kvd_error *err);

/* Metadata. All return 0, KVD_E_GGUF_MISSING, or KVD_E_GGUF_VALUE_TYPE when the
 * value is there but of another kind (any integer width, signed but not
 * negative, serves u64; f32, f64 and integers serve f64). *out is untouched on
 * failure; err may be NULL. */
bool kvd__gguf_has(const kvd_gguf *g, const char *key);
int kvd__gguf_u64(const kvd_gguf *g, const char *key, uint64_t *out, kvd_error *err);
int kvd__gguf_f64(const kvd_gguf *g, const char *key, double *out, kvd_error *err);
int kvd__gguf_bool(const kvd_gguf *g, const char *key, bool *out, kvd_error *err);
int kvd__gguf_str(const kvd_gguf *g, const char *key, kvd_str *out, kvd_error *err);

/* Arrays, borrowed from g, n entries. Strings; f32; integers of 32 bits or any
 * narrower kind (bool too) widened to i32. A u32 of 2^31 or more is a
 * KVD_E_GGUF_VALUE_TYPE. */
int kvd__gguf_str_array(const kvd_gguf *g, const char *key, const kvd_str **out, int64_t *n, kvd_error *err);
int kvd__gguf_f32_array(const kvd_gguf *g, const char *key, const float **out, int64_t *n, kvd_error *err);
int kvd__gguf_i32_array(const kvd_gguf *g, const char *key, const int32_t **out, int64_t *n, kvd_error *err);

#endif
