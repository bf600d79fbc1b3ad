/* The block formats: values worked out by hand, panels against rows for every
 * type, and the file's bytes back out of a panel.
 *
 * `test_quant --dequant TYPE` reads GGUF blocks on stdin and writes f32 on
 * stdout: check_quant_gguf.py compares that with the gguf package. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/half.h"
#include "base/rng.h"
#include "quant/panel.h"
#include "quant/quant.h"

enum { MAX_K = 768, MAX_ROW_BYTES = MAX_K * 4 };

static void random_bytes(uint8_t *p, int64_t n, uint64_t seed)
{
    for (int64_t i = 0; i < n; i++)
        p[i] = (uint8_t)kvd__splitmix64(&seed);
}

static void put_u16(uint8_t *p, uint16_t v) { memcpy(p, &v, 2); }

/* Bit for bit, so that NaNs of random scales compare too. */
static void assert_same_floats(const float *a, const float *b, int64_t n)
{
    assert_memory_equal(a, b, (size_t)n * sizeof *a);
}

static void panels_are_rows(void **state)
{
    (void)state;
    static uint8_t rows[16 * MAX_ROW_BYTES], back[MAX_ROW_BYTES];
    static _Alignas(64) uint8_t panel[16 * MAX_ROW_BYTES];
    static float want[MAX_K], got[MAX_K];
    for (int t = 0; t < KVD_DTYPE_COUNT; t++) {
        if (!kvd__dtypes[t].implemented)
            continue;
        const int elems = kvd__dtypes[t].block_elems;
        for (int n_blocks = 1; n_blocks <= 3; n_blocks++)
            for (int n_rows = 1; n_rows <= 16; n_rows += 5) {
                const int64_t k = (int64_t)elems * n_blocks * (elems == 1 ? 7 : 1);
                const int64_t row_bytes = kvd__row_bytes(t, k);
                random_bytes(rows, n_rows * row_bytes, (uint64_t)(t * 100 + n_blocks));
                memset(panel, 0xa5, sizeof panel);
                kvd__panel_pack(t, rows, n_rows, k, panel);
                for (int64_t i = kvd__panel_bytes(t, k); i < (int64_t)sizeof panel; i++)
                    assert_int_equal(panel[i], 0xa5);
                for (int r = 0; r < 16; r++) {
                    memset(back, 0x5a, sizeof back);
                    kvd__panel_unpack_row(t, panel, r, k, back);
                    assert_int_equal(back[row_bytes], 0x5a);
                    kvd__panel_dequant_row(t, panel, r, k, got);
                    if (r < n_rows) {
                        assert_memory_equal(back, rows + r * row_bytes, (size_t)row_bytes);
                        kvd__dequant_row(t, rows + r * row_bytes, want, k);
                        assert_same_floats(got, want, k);
                    } else {
                        for (int64_t i = 0; i < row_bytes; i++)
                            assert_int_equal(back[i], 0);
                    }
                }
            }
    }
}

/* Where panel.h says that an element is. */
static void panel_places(void **state)
{
    (void)state;
    static uint8_t rows[16 * MAX_ROW_BYTES];
    static _Alignas(64) uint8_t panel[16 * MAX_ROW_BYTES];
    const int r = 5;

    memset(rows, 0, sizeof rows);
    rows[r * 40 + 20 + 4 + 9] = 0xc3; /* Q4_1, block 1 of 2: elements 9 and 25 */
    kvd__panel_pack(KVD_Q4_1, rows, 16, 64, panel);
    assert_int_equal(panel[KVD__Q4_1_STRIDE + 64 * 2 + 4 * r + 1], 0xc3);

    memset(rows, 0, sizeof rows);
    rows[r * 22 + 2 + 2] = 0x40; /* Q5_0: fifth bit of element 22 = k-group 5, byte 2 */
    kvd__panel_pack(KVD_Q5_0, rows, 16, 32, panel);
    assert_int_equal(panel[KVD__Q5_0_QH + 4 * r + 2], 1 << 5);

    memset(rows, 0, sizeof rows);
    put_u16(rows + r * 144 + 2, 0x3c00); /* Q4_K dmin */
    rows[r * 144 + 4 + 11] = 0x77;
    kvd__panel_pack(KVD_Q4_K, rows, 16, 256, panel);
    assert_int_equal(panel[KVD__Q4_K_DMIN + 2 * r + 1], 0x3c);
    assert_int_equal(panel[KVD__Q4_K_SCALES + 16 * 11 + r], 0x77);
}

static void small_formats(void **state)
{
    (void)state;
    float y[32];
    uint8_t b[34] = {0};

    put_u16(b, 0x3800); /* 0.5 */
    b[2] = 0xf0;
    kvd__dequant_row(KVD_Q4_0, b, y, 32);
    assert_true(y[0] == -4.0f && y[16] == 3.5f && y[1] == -4.0f);
    kvd__dequant_row(KVD_IQ4_NL, b, y, 32);
    assert_true(y[0] == -63.5f && y[16] == 56.5f);

    memset(b, 0, sizeof b);
    put_u16(b, 0x3800);
    put_u16(b + 2, 0xc000); /* -2 */
    b[4 + 15] = 0x31;
    kvd__dequant_row(KVD_Q4_1, b, y, 32);
    assert_true(y[15] == -1.5f && y[31] == -0.5f && y[0] == -2.0f);

    memset(b, 0, sizeof b);
    put_u16(b, 0x4000); /* 2 */
    b[2 + 3] = 0x80;    /* fifth bit of element 31 */
    b[6] = 0x0f;
    kvd__dequant_row(KVD_Q5_0, b, y, 32);
    assert_true(y[0] == -2.0f && y[31] == 0.0f && y[30] == -32.0f);

    memset(b, 0, sizeof b);
    put_u16(b, 0x0001); /* 2^-24, subnormal */
    b[2] = 0x80;
    b[3] = 0x7f;
    kvd__dequant_row(KVD_Q8_0, b, y, 32);
    assert_true(y[0] == -128 * 0x1p-24f && y[1] == 127 * 0x1p-24f);
}

static void k_formats(void **state)
{
    (void)state;
    static float y[256];
    uint8_t b[210];

    memset(b, 0, sizeof b); /* Q4_K: sub-block 5 has sc = 0x2b, m = 0x1c */
    put_u16(b, 0x3c00);
    put_u16(b + 2, 0x3c00);
    b[4 + 9] = 0xcb;        /* S[9]: low nibbles of m and sc */
    b[4 + 1] = 0x80;        /* S[1]: top of sc = 2 */
    b[4 + 5] = 0x40;        /* S[5]: top of m = 1 */
    b[16 + 2 * 32 + 7] = 0xa0; /* chunk 2, high nibble: sub-block 5, element 7 */
    kvd__dequant_row(KVD_Q4_K, b, y, 256);
    assert_true(y[5 * 32 + 7] == (float)(0x2b * 10 - 0x1c) && y[5 * 32 + 6] == -0x1c && y[0] == 0.0f);

    memset(b, 0, sizeof b); /* Q6_K: element 128 + 96 + 20 */
    put_u16(b + 208, 0x3c00);
    b[192 + (128 + 96 + 20) / 16] = 0x80; /* -128 */
    b[64 + 32 + 20] = 0xe0;
    b[128 + 32 + 20] = 0x40;
    kvd__dequant_row(KVD_Q6_K, b, y, 256);
    assert_true(y[128 + 96 + 20] == -128.0f * (14 + 16 - 32));

    memset(b, 0, sizeof b); /* Q3_K: element 32, bits of group 1 */
    put_u16(b + 108, 0x3c00);
    b[0] = 0x02;      /* hmask bit 1 of byte 0 */
    b[32] = 0x0c;     /* q2 = 3 */
    b[96 + 2] = 0x05; /* scale 2: low nibble 5, high bits 0 */
    kvd__dequant_row(KVD_Q3_K, b, y, 256);
    assert_true(y[32] == (5 - 32) * 3.0f && y[33] == (5 - 32) * -4.0f && y[0] == 128.0f);

    memset(b, 0, sizeof b); /* Q2_K */
    put_u16(b + 80, 0x3c00);
    put_u16(b + 82, 0x3c00);
    b[9] = 0x73;           /* sub-block 9: scale 3, minimum 7 */
    b[16 + 32 + 17] = 0x02; /* element 128 + 17: q = 2 */
    kvd__dequant_row(KVD_Q2_K, b, y, 256);
    assert_true(y[128 + 17] == 3 * 2 - 7 && y[128 + 16] == -7.0f);

    memset(b, 0, sizeof b); /* IQ4_XS: sub-block 3 */
    put_u16(b, 0x3c00);
    put_u16(b + 2, 0x0080); /* high bits of scale 3: 2 */
    b[4 + 1] = 0x90;        /* low nibble 9 */
    b[8 + 48] = 0x0f;
    kvd__dequant_row(KVD_IQ4_XS, b, y, 256);
    assert_true(y[96] == (41 - 32) * 113.0f && y[97] == 9 * -127.0f && y[0] == 32 * 127.0f);
}

static void activation_kinds(void **state)
{
    (void)state;
    assert_int_equal(kvd__dtype_act(KVD_BF16), KVD_ACT_F32);
    assert_int_equal(kvd__dtype_act(KVD_IQ4_NL), KVD_ACT_Q8_32);
    assert_int_equal(kvd__dtype_act(KVD_IQ4_XS), KVD_ACT_Q8_256);
}

static int dequant_filter(const char *name)
{
    for (int t = 0; t < KVD_DTYPE_COUNT; t++) {
        if (strcmp(name, kvd__dtypes[t].name) || !kvd__dtypes[t].implemented)
            continue;
        uint8_t block[256];
        float y[256];
        const size_t bytes = (size_t)kvd__dtypes[t].block_bytes, elems = (size_t)kvd__dtypes[t].block_elems;
        while (fread(block, 1, bytes, stdin) == bytes) {
            kvd__dequant_row(t, block, y, (int64_t)elems);
            if (fwrite(y, sizeof *y, elems, stdout) != elems)
                return 1;
        }
        return 0;
    }
    fprintf(stderr, "test_quant: no such type: %s\n", name);
    return 2;
}

int main(int argc, char **argv)
{
    if (argc == 3 && !strcmp(argv[1], "--dequant"))
        return dequant_filter(argv[2]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(panels_are_rows),
        cmocka_unit_test(panel_places),
        cmocka_unit_test(small_formats),
        cmocka_unit_test(k_formats),
        cmocka_unit_test(activation_kinds),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
