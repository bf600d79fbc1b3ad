/* Packing and reading of R16 panels, for all formats.
 *
 * A panel holds the same bytes as the 16 GGUF rows, permuted (format.h), so a
 * tied head is stored once: embedding rows are read back out of its panels.
 * Repacking into a wider or cheaper form was rejected: it costs memory or bits,
 * and unpacking is a few instructions for each 64 bytes. */
#include "quant/quant.h"

#include "quant/format.h"

static const kvd__format *const formats[KVD_DTYPE_COUNT] = {
    [KVD_F32] = &kvd__format_f32,       [KVD_F16] = &kvd__format_f16,   [KVD_BF16] = &kvd__format_bf16,
    [KVD_Q4_0] = &kvd__format_q4_0,     [KVD_Q4_1] = &kvd__format_q4_1, [KVD_Q5_0] = &kvd__format_q5_0,
    [KVD_Q5_1] = &kvd__format_q5_1,     [KVD_Q8_0] = &kvd__format_q8_0, [KVD_IQ4_NL] = &kvd__format_iq4_nl,
    [KVD_Q2_K] = &kvd__format_q2_k,     [KVD_Q3_K] = &kvd__format_q3_k, [KVD_Q4_K] = &kvd__format_q4_k,
    [KVD_Q5_K] = &kvd__format_q5_k,     [KVD_Q6_K] = &kvd__format_q6_k, [KVD_IQ4_XS] = &kvd__format_iq4_xs,
};

kvd_act_kind kvd__dtype_act(kvd_dtype t)
{
    switch (kvd__dtypes[t].block_elems) {
    case 1:
        return KVD_ACT_F32;
    case 32:
        return KVD_ACT_Q8_32;
    default:
        return KVD_ACT_Q8_256;
    }
}

void kvd__dequant_row(kvd_dtype t, const void *src, float *dst, int64_t k)
{
    formats[t]->dequant(src, dst, k / kvd__dtypes[t].block_elems);
}

/* Bit 4g + j <-> bit g of byte j: an 8 x 4 matrix of bits, transposed. */
static uint32_t qh_to_panel(uint32_t qh)
{
    uint32_t v = 0;
    for (int i = 0; i < 32; i++)
        v |= (qh >> i & 1) << (8 * (i % 4) + i / 4);
    return v;
}

static uint32_t qh_from_panel(uint32_t v)
{
    uint32_t qh = 0;
    for (int i = 0; i < 32; i++)
        qh |= (v >> (8 * (i % 4) + i / 4) & 1) << i;
    return qh;
}

static inline int unit_bytes(const kvd__field *f) { return f->unit == KVD__UNIT_QH ? 4 : f->unit; }

/* One field of a row's block to its places in the panel block, which are 16
 * units apart; dst points at the row's first. */
static void scatter(const kvd__field *f, const uint8_t *src, uint8_t *dst)
{
    uint32_t v;
    switch (f->unit) {
    case KVD__UNIT_QH:
        v = qh_to_panel(kvd__load_u32(src));
        memcpy(dst, &v, 4);
        break;
    case 4:
        for (int u = 0; u < f->count; u++)
            memcpy(dst + 64 * u, src + 4 * u, 4);
        break;
    case 2:
        for (int u = 0; u < f->count; u++)
            memcpy(dst + 32 * u, src + 2 * u, 2);
        break;
    default:
        for (int u = 0; u < f->count; u++)
            dst[16 * u] = src[u];
    }
}

static void gather(const kvd__field *f, const uint8_t *src, uint8_t *dst)
{
    uint32_t v;
    switch (f->unit) {
    case KVD__UNIT_QH:
        v = qh_from_panel(kvd__load_u32(src));
        memcpy(dst, &v, 4);
        break;
    case 4:
        for (int u = 0; u < f->count; u++)
            memcpy(dst + 4 * u, src + 64 * u, 4);
        break;
    case 2:
        for (int u = 0; u < f->count; u++)
            memcpy(dst + 2 * u, src + 32 * u, 2);
        break;
    default:
        for (int u = 0; u < f->count; u++)
            dst[u] = src[16 * u];
    }
}

void kvd__panel_pack(kvd_dtype t, const void *rows, int n_rows, int64_t k, void *panel)
{
    const kvd__format *fmt = formats[t];
    const int block_bytes = kvd__dtypes[t].block_bytes;
    const int64_t row_bytes = kvd__row_bytes(t, k);
    if (n_rows < KVD__PANEL_ROWS)
        memset(panel, 0, (size_t)(KVD__PANEL_ROWS * row_bytes));
    for (int64_t at = 0; at < row_bytes; at += block_bytes) {
        uint8_t *dst = (uint8_t *)panel + KVD__PANEL_ROWS * at;
        for (const kvd__field *f = fmt->fields; f->count; f++) {
            const uint8_t *src = (const uint8_t *)rows + at + f->offset;
            for (int r = 0; r < n_rows; r++)
                scatter(f, src + r * row_bytes, dst + r * unit_bytes(f));
            dst += KVD__PANEL_ROWS * unit_bytes(f) * f->count;
        }
    }
}

/* GGUF blocks b .. b + n - 1 of row r out of a panel. */
static void gather_blocks(kvd_dtype t, const uint8_t *panel, int r, int64_t b, int64_t n, uint8_t *out)
{
    const kvd__format *fmt = formats[t];
    const int block_bytes = kvd__dtypes[t].block_bytes;
    for (const uint8_t *src = panel + KVD__PANEL_ROWS * b * block_bytes; n > 0; n--, out += block_bytes)
        for (const kvd__field *f = fmt->fields; f->count; f++) {
            gather(f, src + r * unit_bytes(f), out + f->offset);
            src += KVD__PANEL_ROWS * unit_bytes(f) * f->count;
        }
}

void kvd__panel_unpack_row(kvd_dtype t, const void *panel, int r, int64_t k, void *row)
{
    gather_blocks(t, panel, r, 0, k / kvd__dtypes[t].block_elems, row);
}

void kvd__panel_dequant_row(kvd_dtype t, const void *panel, int r, int64_t k, float *dst)
{
    uint8_t blocks[4 * KVD__MAX_BLOCK_BYTES];
    const int elems = kvd__dtypes[t].block_elems;
    const int64_t n_blocks = k / elems, step = (int64_t)sizeof blocks / kvd__dtypes[t].block_bytes;
    for (int64_t b = 0; b < n_blocks; b += step) {
        int64_t n = n_blocks - b < step ? n_blocks - b : step;
        gather_blocks(t, panel, r, b, n, blocks);
        formats[t]->dequant(blocks, dst + b * elems, n);
    }
}
