/* tests: GGUF files put together in memory, field by field. Each field is noted
 * with its kind, so that mutate_gguf.c knows what it breaks and test_gguf.c can
 * find the byte that an error should name. */
#ifndef KVD_TESTS_GGUF_BUILD_H
#define KVD_TESTS_GGUF_BUILD_H

#define _GNU_SOURCE
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef enum gb_kind {
    GB_MAGIC,
    GB_VERSION,
    GB_N_TENSORS,
    GB_N_KEYS,
    GB_KEY_LEN,
    GB_KEY,
    GB_VALUE_TYPE,
    GB_VALUE,
    GB_STRING_LEN,
    GB_STRING,
    GB_ARRAY_TYPE,
    GB_ARRAY_LEN,
    GB_ALIGNMENT,
    GB_NAME_LEN,
    GB_NAME,
    GB_N_DIMS,
    GB_DIM,
    GB_TENSOR_TYPE,
    GB_OFFSET,
    GB_PADDING,
    GB_DATA,
    GB_KINDS
} gb_kind;

typedef struct gb_field {
    gb_kind kind;
    size_t at, n;
} gb_field;

enum { GB_MAX_BYTES = 1 << 16, GB_MAX_FIELDS = 2048 };

typedef struct gb {
    uint8_t p[GB_MAX_BYTES];
    size_t n;
    gb_field field[GB_MAX_FIELDS];
    int n_fields;
    uint64_t data_end; /* of the tensors so far, from the start of the data */
    uint32_t alignment;
} gb;

enum { GB_U8, GB_I8, GB_U16, GB_I16, GB_U32, GB_I32, GB_F32, GB_BOOL, GB_STR, GB_ARR, GB_U64, GB_I64, GB_F64 };

static inline void gb_put(gb *b, gb_kind kind, const void *p, size_t n)
{
    if (b->n + n > GB_MAX_BYTES || b->n_fields == GB_MAX_FIELDS)
        abort();
    b->field[b->n_fields++] = (gb_field){kind, b->n, n};
    if (n)
        memcpy(b->p + b->n, p, n);
    b->n += n;
}

static inline void gb_u32(gb *b, gb_kind kind, uint32_t v) { gb_put(b, kind, &v, 4); }
static inline void gb_u64(gb *b, gb_kind kind, uint64_t v) { gb_put(b, kind, &v, 8); }

static inline void gb_string(gb *b, gb_kind len_kind, gb_kind kind, const char *s)
{
    gb_u64(b, len_kind, strlen(s));
    gb_put(b, kind, s, strlen(s));
}

static inline void gb_header(gb *b, uint32_t version, uint64_t n_tensors, uint64_t n_keys)
{
    b->n = 0;
    b->n_fields = 0;
    b->data_end = 0;
    b->alignment = 32;
    gb_put(b, GB_MAGIC, "GGUF", 4);
    gb_u32(b, GB_VERSION, version);
    gb_u64(b, GB_N_TENSORS, n_tensors);
    gb_u64(b, GB_N_KEYS, n_keys);
}

static inline void gb_key(gb *b, const char *name, uint32_t type)
{
    gb_string(b, GB_KEY_LEN, GB_KEY, name);
    gb_u32(b, GB_VALUE_TYPE, type);
}

static inline void gb_key_u32(gb *b, const char *name, uint32_t v)
{
    gb_key(b, name, GB_U32);
    gb_u32(b, strcmp(name, "general.alignment") ? GB_VALUE : GB_ALIGNMENT, v);
}

static inline void gb_key_value(gb *b, const char *name, uint32_t type, const void *p, size_t n)
{
    gb_key(b, name, type);
    gb_put(b, GB_VALUE, p, n);
}

static inline void gb_key_str(gb *b, const char *name, const char *s)
{
    gb_key(b, name, GB_STR);
    gb_string(b, GB_STRING_LEN, GB_STRING, s);
}

/* The head of an array; the elements follow by gb_put or gb_string. */
static inline void gb_array(gb *b, uint32_t elem, uint64_t n)
{
    gb_u32(b, GB_ARRAY_TYPE, elem);
    gb_u64(b, GB_ARRAY_LEN, n);
}

static inline void gb_key_array(gb *b, const char *name, uint32_t elem, uint64_t n, const void *p, size_t bytes)
{
    gb_key(b, name, GB_ARR);
    gb_array(b, elem, n);
    gb_put(b, GB_VALUE, p, bytes);
}

/* A table entry at an offset of its own. */
static inline void gb_tensor_at(gb *b, const char *name, uint32_t type, uint32_t n_dims, const uint64_t *ne,
                                uint64_t offset)
{
    gb_string(b, GB_NAME_LEN, GB_NAME, name);
    gb_u32(b, GB_N_DIMS, n_dims);
    for (uint32_t d = 0; d < n_dims; d++)
        gb_u64(b, GB_DIM, ne[d]);
    gb_u32(b, GB_TENSOR_TYPE, type);
    gb_u64(b, GB_OFFSET, offset);
}

/* A table entry behind the ones before; bytes: of its data. */
static inline void gb_tensor(gb *b, const char *name, uint32_t type, uint32_t n_dims, const uint64_t *ne,
                             uint64_t bytes)
{
    gb_tensor_at(b, name, type, n_dims, ne, b->data_end);
    b->data_end += (bytes + b->alignment - 1) / b->alignment * b->alignment;
}

/* Padding and data: byte i of the data is i * 7 + i / 256. */
static inline void gb_data(gb *b)
{
    static const uint8_t zero[GB_MAX_BYTES];
    gb_put(b, GB_PADDING, zero, -b->n & (b->alignment - 1));
    gb_put(b, GB_DATA, zero, (size_t)b->data_end);
    uint8_t *p = b->p + b->n - b->data_end;
    for (size_t i = 0; i < b->data_end; i++)
        p[i] = (uint8_t)(i * 7 + i / 256);
}

/* Position of field number `nth` (from 0) of a kind. */
static inline size_t gb_at(const gb *b, gb_kind kind, int nth)
{
    for (int i = 0; i < b->n_fields; i++)
        if (b->field[i].kind == kind && nth-- == 0)
            return b->field[i].at;
    abort();
}

/* A file in memory with a path to open it by. */
typedef struct gb_file {
    int fd;
    char path[32];
} gb_file;

static inline void gb_file_create(gb_file *f)
{
    f->fd = memfd_create("gguf", MFD_CLOEXEC);
    if (f->fd < 0)
        abort();
    snprintf(f->path, sizeof f->path, "/proc/self/fd/%d", f->fd);
}

static inline void gb_file_set(const gb_file *f, const void *p, size_t n)
{
    if (ftruncate(f->fd, 0) || ftruncate(f->fd, (off_t)n) || pwrite(f->fd, p, n, 0) != (ssize_t)n)
        abort();
}

#endif
