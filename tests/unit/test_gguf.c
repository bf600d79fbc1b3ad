/* The reader of GGUF files: what well-formed files give, one refusal of each
 * kind with its code and place, memory, and files that change under the reader.
 * mutate_gguf.c does the broken files by the thousand. */
#include "gguf_build.h"

#include <glob.h>
#include <setjmp.h>
#include <stdarg.h>

#include <cmocka.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include "gguf/gguf.h"

static gb b;           /* the file being built; tests run one by one */
static gb_file file;
static kvd_ledger ledger;
static kvd_error err;

static int setup(void **state)
{
    (void)state;
    gb_file_create(&file);
    kvd__ledger_init(&ledger, 0);
    err = (kvd_error){0};
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    close(file.fd);
    return ledger.now[KVD_ACC_HOST] != 0;
}

static kvd_gguf *open_ok(void)
{
    kvd_gguf *g = NULL;
    gb_file_set(&file, b.p, b.n);
    int rc = kvd__gguf_open(&g, file.path, &ledger, &err);
    if (rc)
        fail_msg("%s: %s", kvd_error_name(rc), err.message);
    return g;
}

static void open_fails(int code, size_t offset, const char *says)
{
    kvd_gguf *g = NULL;
    gb_file_set(&file, b.p, b.n);
    int rc = kvd__gguf_open(&g, file.path, &ledger, &err);
    if (rc != code || (size_t)err.offset != offset || !strstr(err.message, says))
        fail_msg("%s at %lld: %s; expected %s at %zu with '%s'", kvd_error_name(rc), (long long)err.offset, err.message,
                 kvd_error_name(code), offset, says);
    assert_null(g);
    assert_int_equal(ledger.now[KVD_ACC_HOST], 0);
}

static void put_u64(size_t at, uint64_t v) { memcpy(b.p + at, &v, 8); }
static void put_u32(size_t at, uint32_t v) { memcpy(b.p + at, &v, 4); }

/* One key, two tensors of ten floats. */
static void simple_file(void)
{
    const uint64_t ne[] = {10};
    gb_header(&b, 3, 2, 1);
    gb_key_str(&b, "general.architecture", "llama");
    gb_tensor(&b, "one", 0, 1, ne, 40);
    gb_tensor(&b, "two", 0, 1, ne, 40);
    gb_data(&b);
}

/* --- what is read --- */

static void scalars(void **state)
{
    (void)state;
    gb_header(&b, 3, 0, 12);
    gb_key_value(&b, "u8", GB_U8, "\xfe", 1);
    gb_key_value(&b, "i8", GB_I8, "\xfe", 1);
    gb_key_value(&b, "u16", GB_U16, "\xfe\xff", 2);
    gb_key_value(&b, "i16", GB_I16, "\xfe\xff", 2);
    gb_key_value(&b, "u32", GB_U32, "\xfe\xff\xff\xff", 4);
    gb_key_value(&b, "i32", GB_I32, "\xfe\xff\xff\xff", 4);
    gb_key_value(&b, "u64", GB_U64, "\xfe\xff\xff\xff\xff\xff\xff\xff", 8);
    gb_key_value(&b, "i64", GB_I64, "\xfe\xff\xff\xff\xff\xff\xff\xff", 8);
    gb_key_value(&b, "f32", GB_F32, &(float){-1.5f}, 4);
    gb_key_value(&b, "f64", GB_F64, &(double){0.1}, 8);
    gb_key_value(&b, "bool", GB_BOOL, "\1", 1);
    gb_key_str(&b, "str", "text");
    kvd_gguf *g = open_ok();
    assert_int_equal(kvd__gguf_version(g), 3);

    static const struct {
        const char *key;
        uint64_t u;
        double f;
    } expected[] = {{"u8", 254, 254},        {"i8", 0, -2}, {"u16", 65534, 65534},      {"i16", 0, -2},
                    {"u32", 0xfffffffe, 0xfffffffe}, {"i32", 0, -2}, {"u64", UINT64_MAX - 1, 0x1p64}, {"i64", 0, -2}};
    for (size_t i = 0; i < sizeof expected / sizeof expected[0]; i++) {
        uint64_t u = 5;
        double f = 5;
        int rc = kvd__gguf_u64(g, expected[i].key, &u, &err);
        assert_int_equal(rc, expected[i].u ? 0 : KVD_E_GGUF_VALUE_TYPE);
        assert_true(u == (expected[i].u ? expected[i].u : 5));
        assert_int_equal(kvd__gguf_f64(g, expected[i].key, &f, NULL), 0);
        assert_true(f == expected[i].f);
    }
    double f;
    bool t = false;
    kvd_str s;
    uint64_t u = 5;
    assert_int_equal(kvd__gguf_f64(g, "f32", &f, NULL), 0);
    assert_true(f == -1.5);
    assert_int_equal(kvd__gguf_f64(g, "f64", &f, NULL), 0);
    assert_true(f == 0.1);
    assert_int_equal(kvd__gguf_bool(g, "bool", &t, NULL), 0);
    assert_true(t);
    assert_int_equal(kvd__gguf_str(g, "str", &s, NULL), 0);
    assert_int_equal(s.n, 4);
    assert_memory_equal(s.data, "text", 4);

    assert_true(kvd__gguf_has(g, "str"));
    assert_false(kvd__gguf_has(g, "st"));
    assert_false(kvd__gguf_has(g, "str\x01"));
    assert_false(kvd__gguf_has(g, ""));
    assert_int_equal(kvd__gguf_u64(g, "absent", &u, &err), KVD_E_GGUF_MISSING);
    assert_non_null(strstr(err.message, "absent"));
    assert_int_equal(kvd__gguf_u64(g, "f32", &u, &err), KVD_E_GGUF_VALUE_TYPE);
    assert_int_equal(kvd__gguf_u64(g, "bool", &u, &err), KVD_E_GGUF_VALUE_TYPE);
    assert_int_equal(kvd__gguf_str(g, "u8", &s, &err), KVD_E_GGUF_VALUE_TYPE);
    assert_int_equal(kvd__gguf_bool(g, "u8", &t, &err), KVD_E_GGUF_VALUE_TYPE);
    assert_int_equal(kvd__gguf_f64(g, "str", &f, &err), KVD_E_GGUF_VALUE_TYPE);
    assert_non_null(strstr(err.message, "holds string, a number expected"));
    assert_int_equal(err.offset, gb_at(&b, GB_STRING_LEN, 0));
    assert_true(u == 5);
    kvd__gguf_close(&g);
    assert_null(g);
    kvd__gguf_close(&g);
}

static void arrays(void **state)
{
    (void)state;
    /* Keys of different lengths: the arrays lie at every residue mod 4. */
    gb_header(&b, 2, 0, 11);
    const float floats[] = {1.5f, -2.0f, 3.25f};
    const uint32_t words[] = {1, 2, 0x7fffffff}, large[] = {1, 0x80000000u};
    gb_key_array(&b, "f", GB_F32, 3, floats, sizeof floats);
    gb_key_array(&b, "ff", GB_F32, 3, floats, sizeof floats);
    gb_key_array(&b, "fff", GB_F32, 3, floats, sizeof floats);
    gb_key_array(&b, "u8", GB_U8, 3, "\x01\x80\xff", 3);
    gb_key_array(&b, "i8", GB_I8, 3, "\x01\x80\xff", 3);
    gb_key_array(&b, "u16", GB_U16, 2, "\x00\x80\xff\xff", 4);
    gb_key_array(&b, "i16", GB_I16, 2, "\x00\x80\xff\xff", 4);
    gb_key_array(&b, "u32.", GB_U32, 3, words, sizeof words);
    gb_key_array(&b, "large", GB_U32, 2, large, sizeof large);
    gb_key_array(&b, "bool", GB_BOOL, 2, "\0\1", 2);
    gb_key(&b, "str", GB_ARR);
    gb_array(&b, GB_STR, 3);
    gb_string(&b, GB_STRING_LEN, GB_STRING, "a");
    gb_string(&b, GB_STRING_LEN, GB_STRING, "");
    gb_string(&b, GB_STRING_LEN, GB_STRING, "bcd");
    kvd_gguf *g = open_ok();
    const float *f;
    const int32_t *v;
    const kvd_str *s;
    int64_t n;
    for (const char *key = "fff"; *key; key++) {
        assert_int_equal(kvd__gguf_f32_array(g, key, &f, &n, &err), 0);
        assert_int_equal(n, 3);
        assert_int_equal((uintptr_t)f % 4, 0);
        assert_memory_equal(f, floats, sizeof floats);
    }
    static const struct {
        const char *key;
        int32_t v[3];
    } expected[] = {{"u8", {1, 128, 255}}, {"i8", {1, -128, -1}}, {"u16", {32768, 65535}}, {"i16", {-32768, -1}},
                    {"u32.", {1, 2, 0x7fffffff}}, {"bool", {0, 1}}};
    for (size_t i = 0; i < sizeof expected / sizeof expected[0]; i++) {
        assert_int_equal(kvd__gguf_i32_array(g, expected[i].key, &v, &n, &err), 0);
        assert_in_range(n, 2, 3);
        assert_memory_equal(v, expected[i].v, (size_t)n * 4);
    }
    assert_int_equal(kvd__gguf_i32_array(g, "large", &v, &n, &err), KVD_E_GGUF_VALUE_TYPE);
    assert_int_equal(kvd__gguf_i32_array(g, "f", &v, &n, &err), KVD_E_GGUF_VALUE_TYPE);
    assert_int_equal(kvd__gguf_f32_array(g, "u8", &f, &n, &err), KVD_E_GGUF_VALUE_TYPE);
    assert_int_equal(kvd__gguf_str_array(g, "u8", &s, &n, &err), KVD_E_GGUF_VALUE_TYPE);
    assert_non_null(strstr(err.message, "holds an array of u8, an array of string expected"));
    assert_int_equal(kvd__gguf_str_array(g, "absent", &s, &n, &err), KVD_E_GGUF_MISSING);
    assert_int_equal(kvd__gguf_str_array(g, "str", &s, &n, &err), 0);
    assert_int_equal(n, 3);
    assert_int_equal(s[1].n, 0);
    assert_int_equal(s[2].n, 3);
    assert_memory_equal(s[2].data, "bcd", 3);
    kvd__gguf_close(&g);
}

static void tensors(void **state)
{
    (void)state;
    const uint64_t q[] = {64, 3, 2}, v[] = {5};
    gb_header(&b, 3, 3, 1);
    gb_key_u32(&b, "general.alignment", b.alignment = 256);
    gb_tensor(&b, "blk.0.attn_q.weight", 3, 3, q, 12 * 20);
    gb_tensor(&b, "known, not implemented", 9, 1, (uint64_t[]){32}, 36);
    gb_tensor(&b, "bias", 0, 1, v, 20);
    gb_data(&b);
    size_t data = gb_at(&b, GB_DATA, 0);
    kvd_gguf *g = open_ok();
    assert_int_equal(kvd__gguf_n_tensors(g), 3);
    assert_int_equal(kvd__gguf_size_bytes(g), b.n);
    const kvd_gguf_tensor *t = kvd__gguf_tensor(g, "blk.0.attn_q.weight");
    assert_ptr_equal(t, kvd__gguf_tensor_at(g, 0));
    assert_string_equal(t->name, "blk.0.attn_q.weight");
    assert_int_equal(t->type, KVD_Q4_1);
    assert_int_equal(t->n_dims, 3);
    assert_memory_equal(t->ne, ((int64_t[]){64, 3, 2, 1}), sizeof t->ne);
    assert_int_equal(t->offset, data);
    assert_int_equal(t->offset % 256, 0);
    assert_int_equal(t->n_bytes, 240);
    t = kvd__gguf_tensor(g, "bias");
    assert_int_equal(t->offset, data + 512);
    assert_null(kvd__gguf_tensor(g, "bia"));
    assert_null(kvd__gguf_tensor(g, "bias2"));
    assert_null(kvd__gguf_tensor_at(g, 3));
    assert_null(kvd__gguf_tensor_at(g, -1));

    uint8_t buf[20];
    assert_int_equal(kvd__gguf_read(g, t, 3, buf, 17, &err), 0);
    assert_memory_equal(buf, b.p + data + 512 + 3, 17);
    assert_int_equal(kvd__gguf_read(g, t, 20, buf, 0, &err), 0);
    assert_int_equal(kvd__gguf_read(g, t, 3, buf, 18, &err), KVD_E_RANGE);
    assert_int_equal(kvd__gguf_read(g, t, -1, buf, 1, &err), KVD_E_RANGE);
    assert_int_equal(kvd__gguf_read(g, t, 21, buf, 0, &err), KVD_E_RANGE);
    assert_int_equal(kvd__gguf_read(g, t, 1, buf, SIZE_MAX, &err), KVD_E_RANGE);
    kvd__gguf_close(&g);
}

static void order_and_gaps(void **state)
{
    (void)state;
    const uint64_t ne[] = {8};
    gb_header(&b, 3, 3, 0);
    gb_tensor_at(&b, "last", 0, 1, ne, 160);
    gb_tensor_at(&b, "first", 0, 1, ne, 0); /* touches the next one */
    gb_tensor_at(&b, "middle", 0, 1, ne, 32);
    b.data_end = 192;
    gb_data(&b);
    kvd_gguf *g = open_ok();
    assert_int_equal(kvd__gguf_tensor(g, "last")->offset, b.n - 32);
    kvd__gguf_close(&g);
}

static void without_tensors(void **state)
{
    (void)state;
    /* Neither padded nor empty nor without keys is an error. */
    gb_header(&b, 3, 0, 1);
    gb_key_str(&b, "k", "odd");
    kvd_gguf *g = open_ok();
    assert_int_equal(kvd__gguf_n_tensors(g), 0);
    kvd__gguf_close(&g);
    gb_header(&b, 3, 0, 0);
    g = open_ok();
    assert_false(kvd__gguf_has(g, "k"));
    kvd__gguf_close(&g);
}

static void limits_are_reached(void **state)
{
    (void)state;
    char name[65], key[65536];
    memset(name, 'n', 64);
    memset(key, 'k', 1000);
    name[64] = key[1000] = 0;
    gb_header(&b, 3, 1, 2);
    gb_key_str(&b, key, "");
    gb_key(&b, "nested", GB_ARR);
    for (int depth = 0; depth < 3; depth++)
        gb_array(&b, GB_ARR, 1);
    gb_array(&b, GB_I64, 0);
    gb_tensor(&b, name, 0, 4, (uint64_t[]){1, 1, 1, 1}, 4);
    gb_data(&b);
    kvd_gguf *g = open_ok();
    assert_non_null(kvd__gguf_tensor(g, name));
    assert_true(kvd__gguf_has(g, key));
    kvd__gguf_close(&g);
    for (uint32_t a = 8; a <= 32768; a *= 2) {
        gb_header(&b, 3, 1, 1);
        gb_key_u32(&b, "general.alignment", b.alignment = a);
        gb_tensor(&b, "t", 24, 1, (uint64_t[]){1}, 1);
        gb_data(&b);
        g = open_ok();
        assert_int_equal(kvd__gguf_tensor_at(g, 0)->offset, b.n - a);
        kvd__gguf_close(&g);
    }
}

/* --- what is refused --- */

static void headers(void **state)
{
    (void)state;
    simple_file();
    gb whole = b;
    memcpy(b.p, "GGML", 4);
    open_fails(KVD_E_GGUF_MAGIC, 0, "47 47 4d 4c");
    b.n = 3;
    open_fails(KVD_E_GGUF_TRUNCATED, 0, "GGUF header needs 4 bytes, the file has 3 more");
    b.n = 0;
    open_fails(KVD_E_GGUF_TRUNCATED, 0, "");
    b = whole;
    put_u32(4, 1);
    open_fails(KVD_E_GGUF_VERSION, 4, "version 1; 2 and 3 are read");
    put_u32(4, 4);
    open_fails(KVD_E_GGUF_VERSION, 4, "version 4");
    put_u32(4, 0);
    open_fails(KVD_E_GGUF_VERSION, 4, "version 0");
    put_u32(4, 3u << 24);
    open_fails(KVD_E_GGUF_VERSION, 4, "big-endian file (version 3)");
    b = whole;
    static const uint64_t counts[] = {65537, 1u << 31, UINT64_MAX, (uint64_t)1 << 63, 30};
    for (int i = 0; i < 5; i++) {
        put_u64(8, counts[i]);
        open_fails(KVD_E_GGUF_COUNT, 8, "tensors");
        put_u64(8, 2);
        put_u64(16, counts[i]);
        open_fails(KVD_E_GGUF_COUNT, 16, "keys");
        put_u64(16, 1);
    }
    /* Cut anywhere: never accepted, and where the header ends early it says so. */
    for (b.n = 0; b.n < whole.n; b.n++) {
        kvd_gguf *g = NULL;
        gb_file_set(&file, b.p, b.n);
        int rc = kvd__gguf_open(&g, file.path, &ledger, &err);
        if (b.n + 25 > whole.n) { /* padding of the last tensor */
            assert_int_equal(rc, 0);
            kvd__gguf_close(&g);
        } else
            assert_true(rc == KVD_E_GGUF_TRUNCATED || rc == KVD_E_GGUF_COUNT || rc == KVD_E_GGUF_STRING);
    }
}

static void strings(void **state)
{
    (void)state;
    simple_file();
    gb whole = b;
    size_t at = gb_at(&b, GB_KEY_LEN, 0);
    static const uint64_t lengths[] = {0, 65536, UINT64_MAX, (uint64_t)1 << 63};
    for (int i = 0; i < 4; i++) {
        put_u64(at, lengths[i]);
        open_fails(KVD_E_GGUF_STRING, at, "1 to 65535 expected");
    }
    b = whole;
    at = gb_at(&b, GB_KEY, 0);
    b.p[at + 3] = 0;
    open_fails(KVD_E_GGUF_STRING, at, "zero byte");
    b = whole;
    at = gb_at(&b, GB_STRING_LEN, 0);
    put_u64(at, b.n - at - 8 + 1);
    open_fails(KVD_E_GGUF_STRING, at, "the file has");
    put_u64(at, UINT64_MAX);
    open_fails(KVD_E_GGUF_STRING, at, "18446744073709551615 bytes");
    b = whole;
    at = gb_at(&b, GB_NAME_LEN, 1);
    put_u64(at, 65);
    open_fails(KVD_E_GGUF_STRING, at, "1 to 64 expected");
    put_u64(at, 0);
    open_fails(KVD_E_GGUF_STRING, at, "1 to 64 expected");
    b = whole;
    at = gb_at(&b, GB_NAME, 1);
    b.p[at] = 0;
    open_fails(KVD_E_GGUF_STRING, at, "zero byte");
    b.p[at] = '\n'; /* allowed, shown harmless */
    put_u32(gb_at(&b, GB_TENSOR_TYPE, 1), 99);
    open_fails(KVD_E_GGUF_TENSOR_TYPE, gb_at(&b, GB_TENSOR_TYPE, 1), "'?wo' has the unknown type 99");
}

static void values(void **state)
{
    (void)state;
    simple_file();
    put_u32(gb_at(&b, GB_VALUE_TYPE, 0), 13);
    open_fails(KVD_E_GGUF_VALUE_TYPE, gb_at(&b, GB_VALUE_TYPE, 0), "value type 13, 0 to 12 expected");
    gb_header(&b, 3, 0, 1);
    gb_key_value(&b, "t", GB_BOOL, "\2", 1);
    open_fails(KVD_E_GGUF_VALUE_TYPE, b.n - 1, "bool is 2");
    gb_header(&b, 3, 0, 1);
    gb_key_array(&b, "t", GB_BOOL, 3, "\0\1\xff", 3);
    open_fails(KVD_E_GGUF_VALUE_TYPE, b.n - 1, "bool is 255");
    gb_header(&b, 3, 0, 1);
    gb_key_array(&b, "t", GB_I16, 3, "abcdef", 6);
    put_u64(gb_at(&b, GB_ARRAY_LEN, 0), 4);
    open_fails(KVD_E_GGUF_COUNT, gb_at(&b, GB_ARRAY_LEN, 0), "array of 4 x i16");
    put_u64(gb_at(&b, GB_ARRAY_LEN, 0), ((uint64_t)1 << 63) + 1);
    open_fails(KVD_E_GGUF_COUNT, gb_at(&b, GB_ARRAY_LEN, 0), "the file has 6 more bytes");
    put_u32(gb_at(&b, GB_ARRAY_TYPE, 0), 77);
    open_fails(KVD_E_GGUF_VALUE_TYPE, gb_at(&b, GB_ARRAY_TYPE, 0), "77");
    /* The fifth level is refused even if it is empty. */
    for (uint64_t n = 0; n < 2; n++) {
        gb_header(&b, 3, 0, 1);
        gb_key(&b, "nested", GB_ARR);
        for (int depth = 0; depth < 3; depth++)
            gb_array(&b, GB_ARR, 1);
        gb_array(&b, GB_ARR, n);
        for (int i = 0; i < 12; i++)
            gb_u32(&b, GB_VALUE, GB_ARR);
        open_fails(KVD_E_GGUF_NESTING, gb_at(&b, GB_ARRAY_TYPE, 3), "deeper than 4");
    }
}

static void duplicates(void **state)
{
    (void)state;
    static const char *const keys[] = {"b", "a", "ba", "ab", "c", "a"};
    gb_header(&b, 3, 0, 6);
    for (int i = 0; i < 6; i++)
        gb_key_u32(&b, keys[i], 1);
    open_fails(KVD_E_GGUF_DUPLICATE, gb_at(&b, GB_KEY, 5), "key 'a' is there twice");
    simple_file();
    memcpy(b.p + gb_at(&b, GB_NAME, 1), "one", 3);
    open_fails(KVD_E_GGUF_DUPLICATE, gb_at(&b, GB_NAME, 1), "tensor 'one' is there twice");
}

static void alignments(void **state)
{
    (void)state;
    static const uint32_t bad[] = {0, 1, 4, 12, 48, 1u << 21, UINT32_MAX};
    for (int i = 0; i < 7; i++) {
        gb_header(&b, 3, 0, 1);
        gb_key_u32(&b, "general.alignment", bad[i]);
        open_fails(KVD_E_GGUF_ALIGNMENT, gb_at(&b, GB_ALIGNMENT, 0), "a power of two from 8 to 1048576 expected");
    }
    gb_header(&b, 3, 0, 1);
    gb_key_str(&b, "general.alignment", "32");
    open_fails(KVD_E_GGUF_ALIGNMENT, gb_at(&b, GB_STRING_LEN, 0), "type string, u32 expected");
}

static void shapes(void **state)
{
    (void)state;
    simple_file();
    gb whole = b;
    size_t at = gb_at(&b, GB_N_DIMS, 0), dim = gb_at(&b, GB_DIM, 0);
    put_u32(at, 0);
    open_fails(KVD_E_GGUF_SHAPE, at, "has 0 dimensions");
    put_u32(at, 5);
    open_fails(KVD_E_GGUF_SHAPE, at, "has 5 dimensions");
    b = whole;
    put_u64(dim, 0);
    open_fails(KVD_E_GGUF_SHAPE, dim, "dimension 0 is 0");
    put_u64(dim, (uint64_t)1 << 63);
    open_fails(KVD_E_GGUF_SHAPE, dim, "9223372036854775808");
    put_u64(dim, INT64_MAX);
    open_fails(KVD_E_GGUF_SHAPE, gb_at(&b, GB_TENSOR_TYPE, 0), "more than 2^63 bytes");
    b = whole;
    put_u32(gb_at(&b, GB_TENSOR_TYPE, 0), 12); /* Q4_K: 256 elements a block */
    open_fails(KVD_E_GGUF_SHAPE, gb_at(&b, GB_TENSOR_TYPE, 0), "rows of 10, a multiple of 256 expected of Q4_K");
    gb_header(&b, 3, 1, 0);
    gb_tensor(&b, "t", 0, 3, (uint64_t[]){(uint64_t)1 << 31, (uint64_t)1 << 31, 2}, 0);
    gb_data(&b);
    open_fails(KVD_E_GGUF_SHAPE, gb_at(&b, GB_DIM, 2), "dimension 2 is 2");
    static const uint32_t unknown[] = {4, 5, 31, 33, 36, 1000, UINT32_MAX};
    for (int i = 0; i < 7; i++) {
        b = whole;
        put_u32(gb_at(&b, GB_TENSOR_TYPE, 1), unknown[i]);
        open_fails(KVD_E_GGUF_TENSOR_TYPE, gb_at(&b, GB_TENSOR_TYPE, 1), "tensor 'two' has the unknown type");
    }
}

static void places(void **state)
{
    (void)state;
    simple_file();
    gb whole = b;
    size_t at = gb_at(&b, GB_OFFSET, 1), data = gb_at(&b, GB_DATA, 0);
    static const uint64_t bad[] = {1, 48, 63, UINT64_MAX, ((uint64_t)1 << 63) - 32, (uint64_t)1 << 63};
    for (int i = 0; i < 6; i++) {
        put_u64(at, bad[i]);
        open_fails(KVD_E_GGUF_OFFSET, at, "a multiple of 32 below 2^62 expected");
    }
    put_u64(at, 32);
    open_fails(KVD_E_GGUF_OVERLAP, data + 32, "tensor 'two' begins inside 'one', which ends at");
    put_u64(at, 0);
    open_fails(KVD_E_GGUF_OVERLAP, data, "begins inside");
    put_u64(at, 96);
    open_fails(KVD_E_GGUF_TRUNCATED, data + 96, "tensor 'two' has 40 bytes here, the file ends at");
    put_u64(at, (uint64_t)1 << 61);
    open_fails(KVD_E_GGUF_TRUNCATED, data + ((uint64_t)1 << 61), "tensor 'two'");
    b = whole;
    b.n = data + 64 + 40; /* the last tensor needs no padding behind it */
    kvd_gguf *g = open_ok();
    kvd__gguf_close(&g);
    b.n--;
    open_fails(KVD_E_GGUF_TRUNCATED, data + 64, "tensor 'two' has 40 bytes here");
}

static void not_a_file(void **state)
{
    (void)state;
    kvd_gguf *g = NULL;
    assert_int_equal(kvd__gguf_open(&g, "/nowhere/at/all.gguf", &ledger, &err), KVD_E_IO);
    assert_int_equal(kvd__gguf_open(&g, "/", &ledger, &err), KVD_E_IO);
    assert_int_equal(kvd__gguf_open(&g, "/dev/zero", &ledger, NULL), KVD_E_IO);
    assert_null(g);
}

/* --- a file that changes --- */

static void size_changes(void **state)
{
    (void)state;
    simple_file();
    uint8_t buf[40], fingerprint[16] = {9};
    kvd_gguf *g = open_ok();
    assert_int_equal(ftruncate(file.fd, (off_t)b.n + 1), 0);
    assert_int_equal(kvd__gguf_read(g, kvd__gguf_tensor_at(g, 0), 0, buf, 40, &err), KVD_E_IO);
    assert_int_equal(kvd__gguf_fingerprint(g, fingerprint, &err), KVD_E_IO);
    assert_int_equal(ftruncate(file.fd, (off_t)b.n - 1), 0);
    assert_int_equal(kvd__gguf_read(g, kvd__gguf_tensor_at(g, 0), 0, buf, 40, &err), KVD_E_IO);
    assert_int_equal(ftruncate(file.fd, (off_t)b.n - 30), 0);
    assert_int_equal(kvd__gguf_read(g, kvd__gguf_tensor_at(g, 1), 0, buf, 40, &err), KVD_E_GGUF_TRUNCATED);
    assert_int_equal(kvd__gguf_fingerprint(g, fingerprint, &err), KVD_E_IO);
    assert_int_equal(fingerprint[0], 9);
    kvd__gguf_close(&g);
}

/* --- fingerprint --- */

static void hash(const void *p, size_t n, uint8_t out[16])
{
    XXH128_canonical_t c;
    XXH128_canonicalFromHash(&c, XXH3_128bits(p, n));
    memcpy(out, c.digest, 16);
}

static void fingerprints(void **state)
{
    (void)state;
    simple_file();
    size_t data = gb_at(&b, GB_DATA, 0);
    uint8_t parts[16 + 8 + 2 * 16], expected[16], got[16], again[16];
    hash(b.p, data, parts);
    memcpy(parts + 16, &(uint64_t){b.n}, 8);
    hash(b.p + data, 40, parts + 24);
    hash(b.p + data + 64, 40, parts + 40);
    hash(parts, sizeof parts, expected);
    kvd_gguf *g = open_ok();
    assert_int_equal(kvd__gguf_fingerprint(g, got, &err), 0);
    assert_memory_equal(got, expected, 16);
    assert_int_equal(kvd__gguf_fingerprint_from(g, (const uint8_t(*)[16])(parts + 24), again), 0);
    assert_memory_equal(again, expected, 16);
    kvd__gguf_close(&g);

    /* One bit anywhere that matters, and one byte more at the end. */
    static const int bits[] = {0, 1, 2};
    for (int i = 0; i < 3; i++) {
        gb whole = b;
        if (bits[i] == 0)
            b.p[gb_at(&b, GB_STRING, 0)] ^= 1;
        else if (bits[i] == 1)
            b.p[data + 64 + 39] ^= 1;
        else
            b.n++;
        g = open_ok();
        assert_int_equal(kvd__gguf_fingerprint(g, got, &err), 0);
        assert_memory_not_equal(got, expected, 16);
        kvd__gguf_close(&g);
        b = whole;
    }
    gb_header(&b, 3, 0, 0); /* nothing to hash but the header */
    g = open_ok();
    assert_int_equal(kvd__gguf_fingerprint(g, got, &err), 0);
    kvd__gguf_close(&g);
}

/* --- memory --- */

static void out_of_memory(void **state)
{
    (void)state;
    simple_file();
    uint8_t fingerprint[16];
    int64_t n = 0;
    for (int rc = KVD_E_NOMEM; rc; ) {
        assert_true(n < 100);
        kvd__ledger_init(&ledger, 0);
        ledger.fail_at = ++n;
        kvd_gguf *g = NULL;
        gb_file_set(&file, b.p, b.n);
        rc = kvd__gguf_open(&g, file.path, &ledger, &err);
        if (!rc) {
            rc = kvd__gguf_fingerprint(g, fingerprint, &err);
            kvd__gguf_close(&g);
        }
        assert_true(!rc || rc == KVD_E_NOMEM);
        assert_null(g);
        assert_int_equal(ledger.now[KVD_ACC_HOST], 0);
    }
    assert_true(n > 10);
}

/* A file with holes backs any number: only what was read may cost memory. */
static void huge_and_hollow(void **state)
{
    (void)state;
    const off_t size = (off_t)64 << 30;
    kvd_gguf *g = NULL;
    gb_header(&b, 3, 0, 1);
    gb_key(&b, "str", GB_STR);
    gb_u64(&b, GB_STRING_LEN, (uint64_t)20 << 30);
    gb_file_set(&file, b.p, b.n);
    if (ftruncate(file.fd, size)) {
        print_message("SKIP: no file of 64 GiB here\n");
        skip();
    }
    assert_int_equal(kvd__gguf_open(&g, file.path, &ledger, &err), KVD_E_GGUF_COUNT);
    assert_non_null(strstr(err.message, "metadata may have 268435456 in all"));
    assert_true(ledger.peak[KVD_ACC_HOST] < 3 << 20);
    /* 4e9 empty strings: stopped by the same limit, having cost what was read. */
    gb_header(&b, 3, 0, 1);
    gb_key(&b, "strings", GB_ARR);
    gb_array(&b, GB_STR, (uint64_t)4000 << 20);
    gb_file_set(&file, b.p, b.n);
    assert_int_equal(ftruncate(file.fd, size), 0);
    assert_int_equal(kvd__gguf_open(&g, file.path, &ledger, &err), KVD_E_GGUF_COUNT);
    assert_true(ledger.peak[KVD_ACC_HOST] < 260 << 20);
    assert_null(g);
}

/* As many tokens as Gemma has. */
static void large_vocabulary(void **state)
{
    (void)state;
    enum { N = 262144 };
    gb_header(&b, 3, 0, 2);
    gb_key(&b, "tokens", GB_ARR);
    gb_array(&b, GB_STR, N);
    uint8_t *p = malloc(b.n + (size_t)N * (8 + 8 + 4) + 100);
    assert_non_null(p);
    memcpy(p, b.p, b.n);
    size_t n = b.n;
    for (uint64_t i = 0; i < N; i++) {
        char token[16];
        uint64_t len = (uint64_t)snprintf(token, sizeof token, "%llx", (unsigned long long)i);
        memcpy(p + n, &len, 8);
        memcpy(p + n + 8, token, len);
        n += 8 + len;
    }
    gb_header(&b, 3, 0, 0);
    gb_key(&b, "scores", GB_ARR);
    gb_array(&b, GB_F32, N);
    memcpy(p + n, b.p + 24, b.n - 24);
    n += b.n - 24;
    for (int i = 0; i < N; i++, n += 4)
        memcpy(p + n, &(float){(float)i}, 4);
    gb_file_set(&file, p, n);
    free(p);

    kvd_gguf *g = NULL;
    assert_int_equal(kvd__gguf_open(&g, file.path, &ledger, &err), 0);
    const kvd_str *s;
    const float *f;
    int64_t n_tokens, n_scores;
    assert_int_equal(kvd__gguf_str_array(g, "tokens", &s, &n_tokens, &err), 0);
    assert_int_equal(kvd__gguf_f32_array(g, "scores", &f, &n_scores, &err), 0);
    assert_int_equal(n_tokens, N);
    assert_int_equal(n_scores, N);
    for (int i = 0; i < N; i++) {
        char token[16];
        int len = snprintf(token, sizeof token, "%x", i);
        if (s[i].n != (size_t)len || memcmp(s[i].data, token, s[i].n) || f[i] != (float)i)
            fail_msg("token %d", i);
    }
    assert_true(ledger.now[KVD_ACC_HOST] < (int64_t)(2 * n));
    kvd__gguf_close(&g);
}

/* --- real files, when they are there --- */

static void real_files(void **state)
{
    (void)state;
    const char *home = getenv("HOME");
    char pattern[512];
    glob_t found;
    snprintf(pattern, sizeof pattern, "%s/.cache/kvd/models/*.gguf", home ? home : "");
    if (glob(pattern, 0, NULL, &found)) {
        print_message("SKIP: real_files: no model in ~/.cache/kvd/models (sh tools/get-model)\n");
        skip();
    }
    for (size_t i = 0; i < found.gl_pathc; i++) {
        kvd_gguf *g = NULL;
        int rc = kvd__gguf_open(&g, found.gl_pathv[i], &ledger, &err);
        if (rc)
            fail_msg("%s: %s", found.gl_pathv[i], err.message);
        kvd_str arch;
        assert_int_equal(kvd__gguf_str(g, "general.architecture", &arch, &err), 0);
        const kvd_str *tokens;
        int64_t n;
        assert_int_equal(kvd__gguf_str_array(g, "tokenizer.ggml.tokens", &tokens, &n, &err), 0);
        int64_t total = 0;
        uint8_t byte;
        for (int64_t k = 0; k < kvd__gguf_n_tensors(g); k++) {
            const kvd_gguf_tensor *t = kvd__gguf_tensor_at(g, k);
            assert_ptr_equal(kvd__gguf_tensor(g, t->name), t);
            assert_int_equal(kvd__gguf_read(g, t, t->n_bytes - 1, &byte, 1, &err), 0);
            total += t->n_bytes;
        }
        assert_true(total <= kvd__gguf_size_bytes(g));
        kvd__gguf_close(&g);
    }
    globfree(&found);
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(scalars),      TEST(arrays),     TEST(tensors),         TEST(order_and_gaps), TEST(without_tensors),
        TEST(limits_are_reached), TEST(headers), TEST(strings),      TEST(values),         TEST(duplicates),
        TEST(alignments),   TEST(shapes),     TEST(places),          TEST(not_a_file),     TEST(size_changes),
        TEST(fingerprints), TEST(out_of_memory), TEST(huge_and_hollow), TEST(large_vocabulary), TEST(real_files),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
