/* checkasm of attention: tiles of every shape, folded one after the other into
 * running states, against the scalar reference; merge and finish; and the speed
 * of the two regimes, decode and prefill. */
#define _GNU_SOURCE
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/half.h"
#include "checkasm.h"

static const char *const kvtype_names[KVD_KV_COUNT] = {"f16", "bf16", "f32"};

typedef enum visibility {
    SEE_ALL,    /* [0, 64) */
    SEE_CAUSAL, /* the diagonal tile: one more slot per row */
    SEE_WINDOW, /* sliding: both ends move */
    SEE_PREFIX, /* an empty prefix: [lo, 64) */
    SEE_ONE,    /* one slot each */
    SEE_RANDOM, /* anything, rows that see nothing included */
    N_VISIBILITIES
} visibility;

typedef struct shape {
    kvd_kvtype t;
    int d_head, n_rows, n_heads;
    visibility see;
    float magnitude; /* of q and k */
    bool some_empty; /* some states start empty, or all do not */
} shape;

/* One tile with its blocks and queries. */
typedef struct tile_data {
    kvd_attn_tile t;
    void *block[2][KVD__TILE_BLOCKS];
    size_t block_bytes, q_bytes, rows_bytes;
} tile_data;

static int n_queries(const shape *s) { return s->n_rows * s->n_heads; }

static void choose_range(check_context *c, visibility see, int row, int32_t *lo, int32_t *hi)
{
    uint64_t r = check_random(c);
    *lo = 0;
    *hi = KVD__TILE;
    switch (see) {
    case SEE_CAUSAL:
        *hi = row % KVD__TILE + 1;
        break;
    case SEE_WINDOW:
        *lo = row < 10 ? 0 : (row - 10) % KVD__TILE;
        *hi = *lo + 21 < KVD__TILE ? *lo + 21 : KVD__TILE;
        break;
    case SEE_PREFIX:
        *lo = (row * 3 + 5) % KVD__TILE;
        break;
    case SEE_ONE:
        *lo = (int32_t)(r % KVD__TILE);
        *hi = *lo + 1;
        break;
    case SEE_RANDOM:
        *lo = (int32_t)(r % KVD__TILE);
        *hi = (int32_t)(r >> 32) % (KVD__TILE + 1);
        if (*lo >= *hi && r >> 62) /* keep one in four */
            *hi = *lo + 1;
        break;
    default:
        break;
    }
}

static float attn_value(check_context *c, float magnitude)
{
    uint64_t r = check_random(c);
    return r % 16 == 0 ? -0.0f : check_random_float(c, magnitude);
}

static void put_value(void *block, kvd_kvtype t, int i, float f)
{
    if (t == KVD_KV_F16)
        ((uint16_t *)block)[i] = kvd__f16_from_f32(f);
    else if (t == KVD_KV_BF16)
        ((uint16_t *)block)[i] = kvd__bf16_from_f32(f);
    else
        ((float *)block)[i] = f;
}

/* Blocks that no row sees are missing; slots that no row sees hold NaN. */
static void make_tile(check_context *c, const shape *s, tile_data *td)
{
    memset(td, 0, sizeof *td);
    kvd_attn_tile *t = &td->t;
    int d = s->d_head;
    int64_t ld_q = (int64_t)s->n_heads * d + 16, n_q = (s->n_rows - 1) * ld_q + (int64_t)s->n_heads * d;
    td->block_bytes = (size_t)(KVD__BLOCK * d * kvd__kvtype_bytes(s->t));
    td->q_bytes = (size_t)n_q * 4;
    td->rows_bytes = (size_t)s->n_rows * 4;
    float *q = check_alloc(td->q_bytes, 4);
    int32_t *lo = check_alloc(td->rows_bytes, 4), *hi = check_alloc(td->rows_bytes, 4);
    bool seen[KVD__TILE] = {false};
    for (int64_t i = 0; i < n_q; i++)
        q[i] = attn_value(c, s->magnitude);
    for (int r = 0; r < s->n_rows; r++) {
        choose_range(c, s->see, r, lo + r, hi + r);
        for (int j = lo[r]; j < hi[r]; j++)
            seen[j] = true;
    }
    for (int b = 0; b < KVD__TILE_BLOCKS; b++) {
        bool any = false;
        for (int j = 0; j < KVD__BLOCK; j++)
            any |= seen[b * KVD__BLOCK + j];
        if (!any)
            continue;
        for (int kv = 0; kv < 2; kv++) {
            void *p = td->block[kv][b] = check_alloc(td->block_bytes, 64);
            for (int i = 0; i < KVD__BLOCK * d; i++) {
                int j = kv ? i / d : i % KVD__BLOCK;
                float f = attn_value(c, kv ? 1.0f : s->magnitude);
                put_value(p, s->t, i, seen[b * KVD__BLOCK + j] ? f : check_random(c) & 1 ? NAN : -INFINITY);
            }
        }
        t->k[b] = td->block[0][b];
        t->v[b] = td->block[1][b];
    }
    t->kvtype = s->t;
    t->d_head = d;
    t->scale = (float)(1.0 / sqrt((double)d));
    t->n_rows = s->n_rows;
    t->n_heads = s->n_heads;
    t->q = q;
    t->ld_q = ld_q;
    t->lo = lo;
    t->hi = hi;
}

static void free_tile(tile_data *td)
{
    for (int b = 0; b < KVD__TILE_BLOCKS; b++) {
        check_free(td->block[0][b], td->block_bytes, 64);
        check_free(td->block[1][b], td->block_bytes, 64);
    }
    check_free((void *)(uintptr_t)td->t.q, td->q_bytes, 4);
    check_free((void *)(uintptr_t)td->t.lo, td->rows_bytes, 4);
    check_free((void *)(uintptr_t)td->t.hi, td->rows_bytes, 4);
}

typedef struct states {
    float *M, *L, *O;
} states;

static states make_states(int n, int d)
{
    return (states){check_alloc((size_t)n * 4, 4), check_alloc((size_t)n * 4, 4), check_alloc((size_t)(n * d) * 4, 4)};
}

static void free_states(states *s, int n, int d)
{
    check_free(s->M, (size_t)n * 4, 4);
    check_free(s->L, (size_t)n * 4, 4);
    check_free(s->O, (size_t)(n * d) * 4, 4);
}

/* Two tiles after one another, so that an exact state meets the second. */
static void check_tile(check_context *c, const shape *s)
{
    int n = n_queries(s), d = s->d_head;
    size_t scratch_bytes = kvd__attn_scratch_bytes(d);
    void *scratch = check_alloc(scratch_bytes, 64);
    states st[2] = {make_states(n, d), make_states(n, d)};
    for (int i = 0; i < n; i++) {
        bool empty = !s->some_empty || check_random(c) % 2;
        st[0].M[i] = st[1].M[i] = empty ? -INFINITY : check_random_float(c, 2 * s->magnitude);
        st[0].L[i] = st[1].L[i] = empty ? NAN : 1 + fabsf(check_random_float(c, 10));
        for (int j = 0; j < d; j++)
            st[0].O[i * d + j] = st[1].O[i * d + j] = empty ? NAN : check_random_float(c, 1);
    }
    for (int round = 0; round < 2; round++) {
        tile_data td;
        make_tile(c, s, &td);
        memset(scratch, 0xff, scratch_bytes);
        c->ref->attn_tile(&td.t, st[0].M, st[0].L, st[0].O, NULL);
        c->isa->attn_tile(&td.t, st[1].M, st[1].L, st[1].O, scratch);
        bool m = check_same_floats(st[0].M, st[1].M, n), l = check_same_floats(st[0].L, st[1].L, n);
        bool o = check_same_floats(st[0].O, st[1].O, (int64_t)n * d);
        check_report(c, m && l && o, "%s attn_tile_%s d=%d rows=%d heads=%d see=%d mag=%g round=%d differs:%s%s%s",
                     c->isa->name, kvtype_names[s->t], d, s->n_rows, s->n_heads, s->see, (double)s->magnitude, round,
                     m ? "" : " M", l ? "" : " L", o ? "" : " O");
        free_tile(&td);
    }
    free_states(&st[0], n, d);
    free_states(&st[1], n, d);
    check_free(scratch, scratch_bytes, 64);
}

static bool wanted_type(const check_context *c, int t)
{
    char name[32];
    snprintf(name, sizeof name, "attn_tile_%s", kvtype_names[t]);
    return check_wanted(c, name);
}

static void check_tiles(check_context *c)
{
    static const int sizes[] = {8, 16, 24, 32, 40, 48, 64, 72, 80, 96, 112, 128, 176, 256, 512};
    static const int rows[] = {1, 2, 3, 4, 5, 6, 7, 9, 12, 17, 31, 70};
    /* 1e-25: products underflow, and scores are zeros of either sign; 1e20: scores
     * overflow to infinity, or to NaN within a chain */
    static const float magnitudes[] = {1.0f, 12.0f, 1e-25f, 1e20f};
    /* every size with some rows and all sights; then every number of rows */
    for (int t = 0; t < KVD_KV_COUNT; t++) {
        if (!wanted_type(c, t))
            continue;
        for (int is = 0; is < 15; is++)
            for (int see = 0; see < N_VISIBILITIES; see++) {
                int heads = 1 + (int)(check_random(c) % 8), n = rows[check_random(c) % (sizes[is] > 128 ? 7 : 11)];
                shape s = {(kvd_kvtype)t, sizes[is], n, heads, (visibility)see, 1.0f, see % 2};
                check_tile(c, &s);
                s.magnitude = magnitudes[check_random(c) % 4];
                s.n_rows = 1 + see % 3;
                check_tile(c, &s);
            }
        for (int heads = 1; heads <= 8; heads++)
            for (int ir = 0; ir < 12; ir++) {
                int d = ir % 2 ? 24 : 64;
                visibility see = (visibility)((heads + ir) % N_VISIBILITIES);
                shape s = {(kvd_kvtype)t, d, rows[ir], heads, see, magnitudes[(heads + ir) % 2], ir % 2};
                check_tile(c, &s);
            }
        for (int im = 0; im < 4; im++)
            for (int see = 0; see < N_VISIBILITIES; see++) {
                shape s = {(kvd_kvtype)t, 32, 7, 3, (visibility)see, magnitudes[im], see % 2};
                check_tile(c, &s);
            }
    }
}

static void check_merge(check_context *c)
{
    static const float values[] = {-INFINITY, NAN, 0, 1, -1, 90, -90, 1e30f};
    for (int d = 8; d <= 512; d += d < 64 ? 8 : 64)
        for (int pair = 0; pair < 64; pair++) {
            states st[2] = {make_states(1, d), make_states(1, d)}, part = make_states(1, d);
            float m = values[pair % 8], l = 1 + check_random_float(c, 0.5f);
            st[0].M[0] = values[pair / 8];
            st[0].L[0] = 1 + check_random_float(c, 0.5f);
            for (int i = 0; i < d; i++) {
                st[0].O[i] = attn_value(c, 3);
                part.O[i] = attn_value(c, 3);
            }
            st[1].M[0] = st[0].M[0];
            st[1].L[0] = st[0].L[0];
            memcpy(st[1].O, st[0].O, (size_t)d * 4);
            c->ref->attn_merge(st[0].M, st[0].L, st[0].O, m, l, part.O, d);
            c->isa->attn_merge(st[1].M, st[1].L, st[1].O, m, l, part.O, d);
            bool ok = check_same_floats(st[0].M, st[1].M, 1) && check_same_floats(st[0].L, st[1].L, 1) &&
                      check_same_floats(st[0].O, st[1].O, d);
            check_report(c, ok, "%s attn_merge d=%d M=%g m=%g", c->isa->name, d, (double)values[pair / 8], (double)m);
            c->ref->attn_finish(st[0].O, part.O, l, d);
            c->isa->attn_finish(st[1].O, part.O, l, d);
            check_report(c, check_same_floats(st[0].O, st[1].O, d), "%s attn_finish d=%d", c->isa->name, d);
            free_states(&st[0], 1, d);
            free_states(&st[1], 1, d);
            free_states(&part, 1, d);
        }
}

/* Attention over several tiles against its definition in double precision: the
 * softmax of all scores at once, on the stored values. */
static void check_accuracy(check_context *c, kvd_kvtype t)
{
    enum { D = 64, HEADS = 3, TILES = 5, N = TILES * KVD__TILE - 23, BLOCK_BYTES = KVD__BLOCK * D * 4 };
    int32_t lo = 0, hi;
    size_t scratch_bytes = kvd__attn_scratch_bytes(D), kv_bytes = (size_t)TILES * KVD__TILE_BLOCKS * BLOCK_BYTES;
    void *scratch = check_alloc(scratch_bytes, 64);
    char *block[2] = {check_alloc(kv_bytes, 64), check_alloc(kv_bytes, 64)};
    float *kv[2] = {check_alloc(N * D * 4, 64), check_alloc(N * D * 4, 64)}, *q = check_alloc(HEADS * D * 4, 64);
    states st = make_states(HEADS, D);
    for (int i = 0; i < HEADS * D; i++)
        q[i] = check_random_float(c, 4);
    for (int i = 0; i < 2 * N * D; i++)
        kv[i % 2][i / 2] = check_random_float(c, 2);
    for (int j = 0; j < N; j++) {
        size_t at = (size_t)(j / KVD__BLOCK) * BLOCK_BYTES;
        c->isa->store_k(block[0] + at, t, j % KVD__BLOCK, 1, kv[0] + j * D, D, D);
        c->isa->store_v(block[1] + at, t, j % KVD__BLOCK, 1, kv[1] + j * D, D, D);
    }
    c->isa->round_to(kv[0], t, N * D); /* what was stored */
    c->isa->round_to(kv[1], t, N * D);
    for (int i = 0; i < HEADS; i++)
        st.M[i] = -INFINITY;
    for (int tile = 0; tile < TILES; tile++) {
        kvd_attn_tile a = {.kvtype = t, .d_head = D, .scale = 0.125f, .n_rows = 1, .n_heads = HEADS, .q = q,
                           .ld_q = HEADS * D, .lo = &lo, .hi = &hi};
        hi = N - tile * KVD__TILE < KVD__TILE ? N - tile * KVD__TILE : KVD__TILE;
        for (int b = 0; b * KVD__BLOCK < hi; b++) {
            a.k[b] = block[0] + (size_t)(tile * KVD__TILE_BLOCKS + b) * BLOCK_BYTES;
            a.v[b] = block[1] + (size_t)(tile * KVD__TILE_BLOCKS + b) * BLOCK_BYTES;
        }
        c->isa->attn_tile(&a, st.M, st.L, st.O, scratch);
    }
    double worst = 0;
    for (int h = 0; h < HEADS; h++) {
        double l = 0, o[D] = {0};
        for (int j = 0; j < N; j++) {
            double s = 0;
            for (int i = 0; i < D; i++)
                s += (double)q[h * D + i] * (double)kv[0][j * D + i];
            double e = exp(s * 0.125);
            l += e;
            for (int i = 0; i < D; i++)
                o[i] += e * (double)kv[1][j * D + i];
        }
        float got[D];
        c->isa->attn_finish(got, st.O + h * D, st.L[h], D);
        for (int i = 0; i < D; i++)
            worst = fmax(worst, fabs((double)got[i] - o[i] / l));
    }
    check_report(c, worst < 1e-5, "%s attn_accuracy %s error %g", c->isa->name, kvtype_names[t], worst);
    free_states(&st, HEADS, D);
    check_free(q, HEADS * D * 4, 64);
    for (int i = 0; i < 2; i++) {
        check_free(block[i], kv_bytes, 64);
        check_free(kv[i], N * D * 4, 64);
    }
    check_free(scratch, scratch_bytes, 64);
}

/* ---- speed ------------------------------------------------------------------- */

/* n_tiles full tiles, their blocks one after the other as a KV cache has them: from
 * one tile, which stays in the first-level cache (prefill), to more than all caches
 * hold (decode of a long context). */
static void bench_tiles(check_context *c, kvd_kvtype t, int d, int n_rows, int n_heads, int n_tiles)
{
    shape s = {t, d, n_rows, n_heads, SEE_ALL, 1.0f, false};
    int n = n_queries(&s);
    states st = make_states(n, d);
    size_t scratch_bytes = kvd__attn_scratch_bytes(d);
    void *scratch = check_alloc(scratch_bytes, 64);
    tile_data td;
    make_tile(c, &s, &td);
    size_t tile_bytes = 8 * td.block_bytes, all_bytes = tile_bytes * (size_t)n_tiles;
    char *arena = check_alloc(all_bytes, 4096);
    for (int i = 0; i < n_tiles; i++)
        for (int b = 0; b < 8; b++)
            memcpy(arena + (size_t)(i * 8 + b) * td.block_bytes, td.block[b / 4][b % 4], td.block_bytes);
    /* Best times of pieces short enough to fall between two interruptions. */
    enum { PIECE = 32, MAX_PIECES = 512 };
    double best[MAX_PIECES], sum = 0;
    int n_pieces = (n_tiles + PIECE - 1) / PIECE;
    for (int i = 0; i < n_pieces; i++)
        best[i] = 1e9;
    int rounds = 0;
    for (double end = check_seconds() + 0.1; check_seconds() < end || rounds < 8; rounds++) {
        for (int i = 0; i < n; i++)
            st.M[i] = -INFINITY;
        for (int piece = 0; piece < n_pieces; piece++) {
            double now = check_seconds();
            for (int i = piece * PIECE; i < n_tiles && i < (piece + 1) * PIECE; i++) {
                for (int b = 0; b < KVD__TILE_BLOCKS; b++) {
                    td.t.k[b] = arena + (size_t)(i * 8 + b) * td.block_bytes;
                    td.t.v[b] = arena + (size_t)(i * 8 + 4 + b) * td.block_bytes;
                }
                c->isa->attn_tile(&td.t, st.M, st.L, st.O, scratch);
            }
            now = check_seconds() - now;
            best[piece] = now < best[piece] ? now : best[piece];
        }
    }
    for (int i = 0; i < n_pieces; i++)
        sum += best[i];
    double mac = 2.0 * n * d * KVD__TILE * n_tiles;
    printf("%-7s attn_tile %-4s d=%-3d rows=%-3d heads=%d tiles=%-4d %6.2f MAC/cycle %6.2f GB/s\n", c->isa->name,
           kvtype_names[t], d, n_rows, n_heads, n_tiles, mac / (sum * check_hz()), (double)all_bytes / sum * 1e-9);
    check_free(arena, all_bytes, 4096);
    free_tile(&td);
    free_states(&st, n, d);
    check_free(scratch, scratch_bytes, 64);
}

static void bench_attn(check_context *c)
{
    static const int sizes[] = {64, 128, 256};
    static const int heads[] = {1, 2, 3, 4, 7, 8};
    for (int t = 0; t < KVD_KV_COUNT; t++)
        for (int i = 0; i < 3 && wanted_type(c, t); i++) {
            int d = sizes[i], deep = 64 * 4096 / d / kvd__kvtype_bytes((kvd_kvtype)t); /* 64 MiB */
            for (int j = 0; j < 6; j++) {
                bench_tiles(c, (kvd_kvtype)t, d, 1, heads[j], 16);
                bench_tiles(c, (kvd_kvtype)t, d, 1, heads[j], deep);
            }
            bench_tiles(c, (kvd_kvtype)t, d, 4, 3, 4);
            bench_tiles(c, (kvd_kvtype)t, d, 64, 1, 1);
            bench_tiles(c, (kvd_kvtype)t, d, 64, 3, 1);
        }
}

void check_attn(check_context *c)
{
    if (check_wanted(c, "attn_merge"))
        check_merge(c);
    for (int t = 0; t < KVD_KV_COUNT && check_wanted(c, "attn_accuracy"); t++)
        check_accuracy(c, (kvd_kvtype)t);
    check_tiles(c);
    if (c->bench)
        bench_attn(c);
}
