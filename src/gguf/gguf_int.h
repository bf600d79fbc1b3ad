/* gguf: what gguf.c (the object and its look-ups) and gguf_parse.c (bytes to
 * tables) share. Private to the room.
 *
 * The whole region before the tensor data is kept as one buffer, `meta`; names
 * and values are 32-bit positions in it (the region is capped at
 * KVD__GGUF_MAX_META), so that the buffer may move while it grows. */
#ifndef KVD_GGUF_GGUF_INT_H
#define KVD_GGUF_GGUF_INT_H

#include "base/file.h"
#include "gguf/gguf.h"

/* Metadata value types, as numbered in the file. X(id, bytes, name); bytes of
 * STRING and ARRAY: the least that a value takes. */
#define KVD__GGUF_VALUES(X)                                                    \
    X(U8, 1, "u8")                                                             \
    X(I8, 1, "i8")                                                             \
    X(U16, 2, "u16")                                                           \
    X(I16, 2, "i16")                                                           \
    X(U32, 4, "u32")                                                           \
    X(I32, 4, "i32")                                                           \
    X(F32, 4, "f32")                                                           \
    X(BOOL, 1, "bool")                                                         \
    X(STRING, 8, "string")                                                     \
    X(ARRAY, 12, "array")                                                      \
    X(U64, 8, "u64")                                                           \
    X(I64, 8, "i64")                                                           \
    X(F64, 8, "f64")

enum {
#define KVD_X(id, bytes, name) KVD__GGUF_##id,
    KVD__GGUF_VALUES(KVD_X)
#undef KVD_X
    KVD__GGUF_VALUE_COUNT
};

/* Limits of our own. Real files have tens of keys, hundreds to a few thousand
 * tensors, and up to some tens of MB of metadata (the vocabulary). */
enum {
    KVD__GGUF_MAX_META = 256 << 20,
    KVD__GGUF_MAX_KEYS = 1 << 16,
    KVD__GGUF_MAX_TENSORS = 1 << 16,
    KVD__GGUF_MAX_KEY_BYTES = (1 << 16) - 1, /* the specification's */
    KVD__GGUF_MAX_DEPTH = 4,                 /* of arrays in arrays */
    KVD__GGUF_MIN_ALIGN = 8,
    KVD__GGUF_MAX_ALIGN = 1 << 20
};

typedef struct kvd__gguf_name {
    uint32_t at, n; /* in meta; n bytes, followed by a 0 once the file is open */
} kvd__gguf_name;

/* Names in file order, and their ids in byte order of the names. Sorted and not
 * hashed: the worst case of a hostile file is n log n and needs no secret. */
typedef struct kvd__gguf_names {
    kvd__gguf_name *name; /* [n] */
    uint32_t *order;      /* [n] */
    uint32_t n;
} kvd__gguf_names;

typedef struct kvd__gguf_value {
    uint8_t type, elem;   /* elem: of an array */
    bool fits_i32;        /* array of integers: every element does */
    uint32_t at;          /* in meta: the scalar, the string's length, an array's first element */
    uint32_t n;           /* elements of an array */
    const void *array;    /* strings: kvd_str; f32: float; 32 bits or less: int32_t; else NULL */
} kvd__gguf_value;

struct kvd_gguf {
    kvd_ledger *ledger; /* borrowed */
    kvd_file file;
    int version;
    uint8_t *meta;          /* [meta_bytes] */
    int64_t meta_bytes;     /* from 0 to the tensor data, or to the end of the file */
    uint8_t meta_hash[16];  /* of the bytes as they are in the file */
    kvd__gguf_names keys, tensor_names;
    kvd__gguf_value *values;  /* [keys.n] */
    kvd_gguf_tensor *tensors; /* [tensor_names.n] */
    kvd_str *strings;         /* elements of all string arrays */
    int32_t *widened;         /* elements of all arrays of 8 and 16 bits */
};

extern const char *const kvd__gguf_value_names[KVD__GGUF_VALUE_COUNT];

/* Fill all of g but ledger and file, which must be set. On failure g holds what
 * kvd__gguf_close can free. */
int kvd__gguf_parse(kvd_gguf *g, kvd_error *err);

/* Id of a name, -1 if absent. names->order must be sorted. */
int64_t kvd__gguf_find(const kvd__gguf_names *names, const uint8_t *meta, const char *s, size_t n);

/* KVD_E_IO if the file's size is no longer that of the opening. */
int kvd__gguf_same_size(const kvd_gguf *g, kvd_error *err);

/* XXH3-128 in xxHash's canonical form. */
void kvd__gguf_hash(const void *p, size_t n, uint8_t out[16]);

#endif
