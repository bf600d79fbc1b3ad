/* The walk of gemm_tiles.h: groups of panels, tiles of tokens, chunks of K. */
#include "base/minmax.h"
#include "kern/gemm_tiles.h"

#include <string.h>

static int side_words(kvd__side_kind kind)
{
    static const int words[] = {
        [KVD__SIDE_S] = 2,        [KVD__SIDE_BIAS] = 2,      [KVD__SIDE_BIAS_16] = 17,
        [KVD__SIDE_BIAS_32] = 9,  [KVD__SIDE_PAIRS_16] = 9,  [KVD__SIDE_PAIRS_32] = 5,
    };
    return words[kind];
}

static int32_t pair(int32_t even, int32_t odd) { return (int32_t)((uint32_t)odd << 16 | (uint32_t)(even & 0xffff)); }

/* Block b's words of token t; out: [words], n apart. */
static void fill_block(const kvd__walk *w, const kvd_acts *a, int64_t t, int64_t b, int32_t *out, int n)
{
    const int32_t *bsum = a->bsum + t * a->ld_b;
    memcpy(out, a->d + t * a->ld_d + b, 4);
    out += n;
    switch (w->side) {
    case KVD__SIDE_S:
        memcpy(out, a->s + t * a->ld_d + b, 4);
        break;
    case KVD__SIDE_BIAS:
        *out = -w->bias * bsum[b];
        break;
    case KVD__SIDE_BIAS_16:
        for (int j = 0; j < 16; j++)
            out[j * n] = -w->bias * bsum[16 * b + j];
        break;
    case KVD__SIDE_BIAS_32:
        for (int j = 0; j < 8; j++)
            out[j * n] = -w->bias * (bsum[16 * b + 2 * j] + bsum[16 * b + 2 * j + 1]);
        break;
    case KVD__SIDE_PAIRS_16:
        for (int j = 0; j < 8; j++)
            out[j * n] = pair(bsum[16 * b + 2 * j], bsum[16 * b + 2 * j + 1]);
        break;
    case KVD__SIDE_PAIRS_32:
        for (int j = 0; j < 4; j++) {
            const int32_t *s = bsum + 16 * b + 4 * j;
            out[j * n] = pair(s[0] + s[1], s[2] + s[3]);
        }
        break;
    }
}

/* Panels whose weights stay in the second-level cache while several tiles pass;
 * with one tile there is nothing to keep. */
static int64_t group_panels(int64_t n_panels, int64_t panel_bytes, int64_t n_tiles)
{
    int64_t n = n_tiles > 1 && panel_bytes > 0 ? KVD__GROUP_BYTES / panel_bytes : n_panels;
    return n < 8 ? 8 : n;
}

void kvd__gemm_walk(const kvd__walk *w, float *y, int64_t ld_y, const void *panels, int64_t n_panels, int64_t K,
                    const kvd_acts *a, int64_t T)
{
    _Alignas(64) int32_t side[KVD__SIDE_WORDS];
    const int words = side_words(w->side);
    const int64_t n_blocks = K / w->block_elems, panel_bytes = n_blocks * w->block_bytes;
    const int64_t n_tiles = (T + w->max_tokens - 1) / w->max_tokens;
    const int64_t group = group_panels(n_panels, panel_bytes, n_tiles);
    for (int64_t i = 0; i < n_panels; i += group)
        for (int64_t tile = 0, t0 = 0, n; tile < n_tiles; tile++, t0 += n) {
            n = (T - t0 + n_tiles - tile - 1) / (n_tiles - tile); /* as even as can be */
            const int64_t chunk = kvd__min64(KVD__SIDE_WORDS / (words * n), KVD__CHUNK_BYTES / (w->block_elems * n));
            kvd__tile c = {
                .y = y + t0 * ld_y + KVD__PANEL_ROWS * i,
                .ld_y = ld_y,
                .panel_bytes = panel_bytes,
                .n_panels = kvd__min64(group, n_panels - i),
                .ld = a->ld_q,
                .side = side,
            };
            for (int64_t b0 = 0; b0 < n_blocks; b0 += chunk) {
                c.n_blocks = kvd__min64(chunk, n_blocks - b0);
                for (int64_t t = 0; t < n; t++)
                    for (int64_t b = 0; b < c.n_blocks; b++)
                        fill_block(w, a, t0 + t, b0 + b, side + b * words * n + t, (int)n);
                c.panels = (const uint8_t *)panels + i * panel_bytes + b0 * w->block_bytes;
                c.q = a->q + t0 * a->ld_q + b0 * w->block_elems;
                c.carry = b0 > 0;
                w->tiles[n](&c);
            }
        }
}

void kvd__gemm_walk_float(kvd__tile_fn *const *tiles, int max_tokens, int elem_bytes, float *y, int64_t ld_y,
                          const void *panels, int64_t n_panels, int64_t K, const kvd_acts *a, int64_t T)
{
    const int64_t k_bytes = KVD__PANEL_ROWS * elem_bytes, panel_bytes = K * k_bytes;
    const int64_t n_tiles = (T + max_tokens - 1) / max_tokens;
    const int64_t group = group_panels(n_panels, panel_bytes, n_tiles);
    for (int64_t i = 0; i < n_panels; i += group)
        for (int64_t tile = 0, t0 = 0, n; tile < n_tiles; tile++, t0 += n) {
            n = (T - t0 + n_tiles - tile - 1) / (n_tiles - tile);
            const int64_t chunk = KVD__CHUNK_BYTES / (4 * n);
            kvd__tile c = {
                .y = y + t0 * ld_y + KVD__PANEL_ROWS * i,
                .ld_y = ld_y,
                .panel_bytes = panel_bytes,
                .n_panels = kvd__min64(group, n_panels - i),
                .ld = a->ld_x,
            };
            for (int64_t k0 = 0; k0 < K; k0 += chunk) {
                c.n_blocks = kvd__min64(chunk, K - k0);
                c.panels = (const uint8_t *)panels + i * panel_bytes + k0 * k_bytes;
                c.x = a->x + t0 * a->ld_x + k0;
                c.carry = k0 > 0;
                tiles[n](&c);
            }
        }
}
