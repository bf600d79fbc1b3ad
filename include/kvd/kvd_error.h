/* Error codes and the detail record. The only public header that every layer
 * of src/ may include; it includes nothing of the project itself.
 *
 * One X-macro gives codes, names and messages, so they cannot drift apart. */
#ifndef KVD_ERROR_H
#define KVD_ERROR_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* X(name, value, exit code of the program, message) */
#define KVD_ERRORS(X)                                                          \
    X(OK, 0, 0, "no error")                                                    \
    X(ARG, -1, 2, "invalid argument")                                          \
    X(RANGE, -2, 2, "value out of range")                                      \
    X(NOMEM, -3, 4, "out of memory")                                           \
    X(BUDGET, -4, 4, "does not fit the memory budget")                         \
    X(IO, -5, 3, "input/output error")                                         \
    X(UNSUPPORTED, -6, 3, "not supported")                                     \
    X(NUMERIC, -7, 5, "non-finite value")                                      \
    X(CANCELLED, -8, 130, "cancelled")                                         \
    X(LOCKED, -9, 4, "locked by another process")                              \
    X(CHECK, -10, 1, "a check failed")                                         \
    X(ENCODING, -11, 3, "invalid text or token")                               \
    /* The GGUF reader: what is wrong with the file. */                        \
    X(GGUF_MAGIC, -20, 3, "not a GGUF file")                                   \
    X(GGUF_VERSION, -21, 3, "unsupported GGUF version")                        \
    X(GGUF_TRUNCATED, -22, 3, "file ends too early")                           \
    X(GGUF_COUNT, -23, 3, "count out of bounds")                               \
    X(GGUF_STRING, -24, 3, "bad string")                                       \
    X(GGUF_VALUE_TYPE, -25, 3, "bad metadata value type")                      \
    X(GGUF_NESTING, -26, 3, "arrays nested too deep")                          \
    X(GGUF_DUPLICATE, -27, 3, "duplicate key or tensor name")                  \
    X(GGUF_ALIGNMENT, -28, 3, "bad alignment")                                 \
    X(GGUF_TENSOR_TYPE, -29, 3, "unknown tensor type")                         \
    X(GGUF_SHAPE, -30, 3, "bad tensor shape")                                  \
    X(GGUF_OFFSET, -31, 3, "bad tensor offset")                                \
    X(GGUF_OVERLAP, -32, 3, "tensors overlap")                                 \
    X(GGUF_MISSING, -33, 3, "missing key or tensor")                           \
    X(GGUF_BOUNDS, -34, 3, "model dimension out of bounds")

typedef enum kvd_status {
#define KVD_X(name, value, exit_code, text) KVD_E_##name = value,
    KVD_ERRORS(KVD_X)
#undef KVD_X
    KVD_OK = 0
} kvd_status;

/* Filled by a failing call when the caller passes one; NULL is always allowed.
 * A plain value: copy it freely, nothing in it is owned. */
typedef struct kvd_error {
    int code;           /* the KVD_E_* that the call returned */
    int64_t need_bytes; /* KVD_E_BUDGET, KVD_E_NOMEM: how many would do; else 0 */
    int64_t max_tokens; /* KVD_E_BUDGET: T_max, the longest context that fits */
    int64_t offset;     /* GGUF errors: byte offset in the file; else -1 */
    char message[256];  /* one line, no newline, always terminated */
} kvd_error;

/* "KVD_E_BUDGET" for a code of the list, "KVD_E_?" otherwise. Static storage.
 * Thread-safe. */
const char *kvd_error_name(int code);

/* The general text of a code; err->message has the particular one.
 * Static storage. Thread-safe. */
const char *kvd_error_text(int code);

/* The process exit code that `kvd` uses for a code (docs: README, exit codes).
 * Thread-safe. */
int kvd_error_exit(int code);

#ifdef __cplusplus
}
#endif
#endif
