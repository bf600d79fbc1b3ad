/* Fuzzer of the GGUF reader: any bytes as a file, then every look-up of what was
 * accepted. With libFuzzer (docs of the compiler: -fsanitize=fuzzer):
 *
 *   clang -std=c17 -g -O1 -fsanitize=fuzzer,address,undefined -Isrc -Iinclude \
 *     fuzz/fuzz_gguf.c src/gguf/gguf.c src/gguf/gguf_parse.c src/base/error.c \
 *     src/base/ledger.c src/base/file.c src/base/dtype.c -o fuzz_gguf
 *   ./fuzz_gguf -max_len=4096 CORPUS
 *
 * tests/unit/mutate_gguf --corpus DIR writes a good first corpus. With replay.c
 * instead of -fsanitize=fuzzer it reads files named on the command line. */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "gguf/gguf.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

/* Of our own bugs; the fuzzing driver reports the abort. */
static void must(int condition)
{
    if (!condition)
        abort();
}

/* Keys are not enumerable through the interface: those that models use, and
 * short ones that a fuzzer finds by itself. */
static const char *const keys[] = {
    "general.architecture", "general.alignment", "tokenizer.ggml.tokens", "tokenizer.ggml.scores",
    "tokenizer.ggml.token_type", "llama.block_count", "a", "b", "a.u8", "a.i64", "a.f32", "r.u8", "r.i16", "r.u32",
    "r.f32", "r.bool", "r.str", "r.deep", "key.0", "key.39",
};

static uint64_t use_key(const kvd_gguf *g, const char *key)
{
    uint64_t u = 0, sum = 0;
    double d;
    bool t;
    kvd_str s;
    const kvd_str *strings;
    const float *floats;
    const int32_t *ints;
    int64_t count;
    kvd_error err;
    kvd__gguf_u64(g, key, &u, &err);
    kvd__gguf_f64(g, key, &d, &err);
    kvd__gguf_bool(g, key, &t, &err);
    if (!kvd__gguf_str(g, key, &s, &err))
        for (size_t i = 0; i < s.n; i++)
            sum += (uint8_t)s.data[i];
    if (!kvd__gguf_str_array(g, key, &strings, &count, &err))
        for (int64_t i = 0; i < count; i++)
            for (size_t k = 0; k < strings[i].n; k++)
                sum += (uint8_t)strings[i].data[k];
    if (!kvd__gguf_f32_array(g, key, &floats, &count, &err))
        for (int64_t i = 0; i < count; i++)
            sum += floats[i] > 0;
    if (!kvd__gguf_i32_array(g, key, &ints, &count, &err))
        for (int64_t i = 0; i < count; i++)
            sum += (uint64_t)ints[i];
    return u + sum;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    static int fd = -1;
    char path[32];
    if (fd < 0)
        fd = memfd_create("fuzz", MFD_CLOEXEC);
    must(fd >= 0 && !ftruncate(fd, (off_t)n) && pwrite(fd, data, n, 0) == (ssize_t)n);
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);

    kvd_ledger ledger;
    kvd__ledger_init(&ledger, 0);
    kvd_error err;
    kvd_gguf *g = NULL;
    int rc = kvd__gguf_open(&g, path, &ledger, &err);
    must(!rc == (g != NULL));
    must(ledger.peak[KVD_ACC_HOST] <= 8 * (int64_t)n + 1024);
    if (!rc) {
        uint64_t sum = 0;
        uint8_t byte, fingerprint[16];
        for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++)
            sum += use_key(g, keys[i]);
        for (int64_t i = 0; i < kvd__gguf_n_tensors(g); i++) {
            const kvd_gguf_tensor *t = kvd__gguf_tensor_at(g, i);
            must(kvd__gguf_tensor(g, t->name) == t);
            must(!kvd__gguf_read(g, t, t->n_bytes - 1, &byte, 1, &err));
            sum += byte;
        }
        must(!kvd__gguf_fingerprint(g, fingerprint, &err));
        __asm__ volatile("" : : "r"(sum)); /* the reads happen */
        kvd__gguf_close(&g);
    } else
        must(rc <= KVD_E_GGUF_MAGIC && rc >= KVD_E_GGUF_OVERLAP && err.code == rc && err.message[0]);
    must(ledger.now[KVD_ACC_HOST] == 0);
    return 0;
}
