/* Matrix products, panels as f32, and the activation quantisers.
 *
 * Weights and activations come in kinds that go for the weak spots of integer
 * kernels: sums at the edge of 16 bits (all weights largest, activations +-127),
 * alternating signs, -128, scales that are zero, subnormal or huge. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/half.h"
#include "checkasm.h"
#include "quant/quant.h"

/* ---- weights -------------------------------------------------------------- */

typedef struct type_case {
    kvd_dtype type;
    const char *name;
    int f16_at[2];   /* offsets of f16 fields in a block, -1: none */
    uint64_t golden; /* check_golden */
} type_case;

static const type_case cases[] = {
    {KVD_F32, "f32", {-1, -1}, 0x81df2a64490f320b},
    {KVD_F16, "f16", {-1, -1}, 0x2f98cb1845c91409},
    {KVD_BF16, "bf16", {-1, -1}, 0xa4302b4b70871c13},
    {KVD_Q4_0, "q4_0", {0, -1}, 0x4f9c7aecdfd7afee},
    {KVD_Q4_1, "q4_1", {0, 2}, 0x2f70743c5dea67d1},
    {KVD_Q5_0, "q5_0", {0, -1}, 0xc57454a995bed750},
    {KVD_Q5_1, "q5_1", {0, 2}, 0xc43d6334c451aa07},
    {KVD_Q8_0, "q8_0", {0, -1}, 0x9cbec02c99998353},
    {KVD_IQ4_NL, "iq4_nl", {0, -1}, 0x0644bc047dc144e4},
    {KVD_Q2_K, "q2_k", {80, 82}, 0x744c6ac3c498590c},
    {KVD_Q3_K, "q3_k", {108, -1}, 0x94f41cc15c15773f},
    {KVD_Q4_K, "q4_k", {0, 2}, 0x566edb342fc79cbf},
    {KVD_Q5_K, "q5_k", {0, 2}, 0xfc0e5be881e79663},
    {KVD_Q6_K, "q6_k", {208, -1}, 0xe7a442a0640ec612},
    {KVD_IQ4_XS, "iq4_xs", {0, -1}, 0x2df4a71f8fadc79a},
};
enum { N_CASES = sizeof cases / sizeof *cases };

enum { W_RANDOM, W_MAX, W_ZERO, W_ALTERNATE, W_MINUS_128, W_SMALL_SCALES, W_BIG_SCALES, W_KINDS };

static uint16_t random_scale(check_context *c, int kind)
{
    uint64_t r = check_random(c);
    if (kind == W_SMALL_SCALES) /* zeros of both signs, subnormals */
        return (uint16_t)((r & 0x8000) | (r & 0x10000 ? r & 0x3ff : 0));
    if (kind == W_BIG_SCALES) /* up to the largest finite */
        return (uint16_t)((r & 0x83ff) | 0x7800);
    return kvd__f16_from_f32(check_random_float(c, 0.1f));
}

static uint8_t random_quant(check_context *c, int kind, int64_t i)
{
    switch (kind) {
    case W_MAX:
        return 0xff;
    case W_ZERO:
        return 0;
    case W_ALTERNATE:
        return i & 1 ? 0xff : 0x00;
    case W_MINUS_128:
        return 0x80;
    default:
        return (uint8_t)check_random(c);
    }
}

static void make_floats(check_context *c, kvd_dtype t, int kind, uint8_t *row, int64_t k)
{
    for (int64_t i = 0; i < k; i++) {
        float f = check_random_float(c, kind == W_BIG_SCALES ? 1e4f : 0.2f);
        if (kind == W_SMALL_SCALES)
            f = i % 3 ? f * 1e-6f : -0.0f;
        uint16_t h = t == KVD_F16 ? kvd__f16_from_f32(f) : kvd__bf16_from_f32(f);
        if (t == KVD_F32)
            memcpy(row + 4 * i, &f, 4);
        else
            memcpy(row + 2 * i, &h, 2);
    }
}

/* One GGUF row of that kind. */
static void make_row(check_context *c, const type_case *tc, int kind, uint8_t *row, int64_t k)
{
    const kvd_dtype_info *info = &kvd__dtypes[tc->type];
    if (info->block_elems == 1) {
        make_floats(c, tc->type, kind, row, k);
        return;
    }
    const int64_t n = kvd__row_bytes(tc->type, k);
    for (int64_t i = 0; i < n; i++)
        row[i] = random_quant(c, kind, i);
    for (int64_t at = 0; at < n; at += info->block_bytes)
        for (int f = 0; f < 2; f++)
            if (tc->f16_at[f] >= 0) {
                uint16_t h = random_scale(c, kind);
                memcpy(row + at + tc->f16_at[f], &h, 2);
            }
}

typedef struct weights {
    uint8_t *panels;
    size_t bytes;
} weights;

static weights make_weights(check_context *c, const type_case *tc, int kind, int64_t n_panels, int64_t K)
{
    const int64_t row_bytes = kvd__row_bytes(tc->type, K), panel_bytes = kvd__panel_bytes(tc->type, K);
    weights w = {.bytes = (size_t)(n_panels * panel_bytes)};
    w.panels = check_alloc(w.bytes, 64);
    uint8_t *rows = malloc((size_t)(16 * row_bytes));
    for (int64_t i = 0; i < n_panels; i++) {
        for (int r = 0; r < 16; r++)
            make_row(c, tc, kind, rows + r * row_bytes, K);
        kvd__panel_pack(tc->type, rows, 16, K, w.panels + i * panel_bytes);
    }
    free(rows);
    return w;
}

/* ---- activations ---------------------------------------------------------- */

enum { A_RANDOM, A_MAX, A_MIN, A_ALTERNATE, A_PAIRS, A_ZERO, A_KINDS };

typedef struct acts {
    kvd_acts a;
    int64_t T;
} acts;

static int8_t random_act(check_context *c, int kind, int64_t i)
{
    switch (kind) {
    case A_MAX:
        return 127;
    case A_MIN:
        return -127;
    case A_ALTERNATE:
        return i & 1 ? -127 : 127;
    case A_PAIRS: /* the signs that W_ALTERNATE does not cancel */
        return i & 2 ? -127 : 127;
    case A_ZERO:
        return 0;
    default:
        return (int8_t)((int)(check_random(c) % 255) - 127);
    }
}

static int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

static acts make_acts(check_context *c, kvd_act_kind kind, int how, int64_t K, int64_t T)
{
    acts o = {.T = T};
    const int64_t block = kind == KVD_ACT_Q8_256 ? 256 : 32, sums = kind == KVD_ACT_Q8_256 ? 16 : 32;
    if (kind == KVD_ACT_F32) {
        o.a.ld_x = round_up(K, 16) + 16;
        float *x = check_alloc((size_t)(T * o.a.ld_x) * 4, 64);
        for (int64_t i = 0; i < T * o.a.ld_x; i++)
            x[i] = how == A_ZERO ? -0.0f : check_random_float(c, how == A_MAX ? 1e6f : 4.0f);
        o.a.x = x;
        return o;
    }
    o.a.ld_q = round_up(K, 64) + 64;
    o.a.ld_d = round_up(K / block, 16);
    o.a.ld_b = round_up(K / sums, 16) + 16;
    int8_t *q = check_alloc((size_t)(T * o.a.ld_q), 64);
    float *d = check_alloc((size_t)(T * o.a.ld_d) * 4, 64), *s = check_alloc((size_t)(T * o.a.ld_d) * 4, 64);
    int32_t *bsum = check_alloc((size_t)(T * o.a.ld_b) * 4, 64);
    for (int64_t t = 0; t < T; t++) {
        for (int64_t i = 0; i < K; i++)
            q[t * o.a.ld_q + i] = random_act(c, how, i);
        for (int64_t j = 0; j < K / sums; j++) {
            int32_t sum = 0;
            for (int64_t i = j * sums; i < (j + 1) * sums; i++)
                sum += q[t * o.a.ld_q + i];
            bsum[t * o.a.ld_b + j] = sum;
        }
        for (int64_t j = 0; j < K / block; j++) {
            float *p = d + t * o.a.ld_d + j;
            *p = how == A_ZERO ? 0.0f : fabsf(check_random_float(c, how == A_MAX ? 1e3f : 0.05f));
            s[t * o.a.ld_d + j] = kind == KVD_ACT_Q8_32 ? *p * (float)bsum[t * o.a.ld_b + j] : NAN;
        }
    }
    o.a.q = q;
    o.a.d = d;
    o.a.s = s;
    o.a.bsum = bsum;
    return o;
}

static void free_acts(acts *o)
{
    if (o->a.x) {
        check_free((void *)(uintptr_t)o->a.x, (size_t)(o->T * o->a.ld_x) * 4, 64);
        return;
    }
    check_free((void *)(uintptr_t)o->a.q, (size_t)(o->T * o->a.ld_q), 64);
    check_free((void *)(uintptr_t)o->a.d, (size_t)(o->T * o->a.ld_d) * 4, 64);
    check_free((void *)(uintptr_t)o->a.s, (size_t)(o->T * o->a.ld_d) * 4, 64);
    check_free((void *)(uintptr_t)o->a.bsum, (size_t)(o->T * o->a.ld_b) * 4, 64);
}

/* ---- products ------------------------------------------------------------- */

static void fill_sentinel(float *y, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        y[i] = kvd__f32_from_bits(0x7fedcba9);
}

/* One product on both tables, gaps between rows included. */
static void check_product(check_context *c, const type_case *tc, int w_kind, int a_kind, int64_t n_panels, int64_t K,
                          int64_t T)
{
    weights w = make_weights(c, tc, w_kind, n_panels, K);
    acts a = make_acts(c, kvd__dtype_act(tc->type), a_kind, K, T > 0 ? T : 1);
    const int64_t ld_y = 16 * n_panels + 16, n = T > 0 ? (T - 1) * ld_y + 16 * n_panels : 1;
    const size_t bytes = (size_t)n * 4;
    float *want = check_alloc(bytes, 64), *got = check_alloc(bytes, 64);
    fill_sentinel(want, n);
    fill_sentinel(got, n);
    c->ref->gemm[tc->type](want, ld_y, w.panels, n_panels, K, &a.a, T);
    c->isa->gemm[tc->type](got, ld_y, w.panels, n_panels, K, &a.a, T);
    check_report(c, !memcmp(want, got, bytes), "%s gemm_%s K=%lld T=%lld panels=%lld weights=%d acts=%d", c->isa->name,
                 tc->name, (long long)K, (long long)T, (long long)n_panels, w_kind, a_kind);
    check_free(want, bytes, 64);
    check_free(got, bytes, 64);
    free_acts(&a);
    check_free(w.panels, w.bytes, 64);
}

/* The reference against f64 on what the blocks mean: an error in the chain would
 * be repeated by every ISA that is made to equal it. */
static void check_accuracy(check_context *c, const type_case *tc)
{
    const int64_t K = 768, T = 3;
    const kvd_act_kind kind = kvd__dtype_act(tc->type);
    weights w = make_weights(c, tc, W_RANDOM, 1, K);
    acts a = make_acts(c, kind, A_RANDOM, K, T);
    float y[3 * 16], *row = malloc((size_t)K * sizeof *row);
    c->ref->gemm[tc->type](y, 16, w.panels, 1, K, &a.a, T);
    bool ok = true;
    for (int r = 0; r < 16; r++) {
        kvd__panel_dequant_row(tc->type, w.panels, r, K, row);
        for (int64_t t = 0; t < T; t++) {
            double sum = 0, size = 0;
            for (int64_t k = 0; k < K; k++) {
                double x = kind == KVD_ACT_F32 ? (double)a.a.x[t * a.a.ld_x + k]
                                               : (double)a.a.q[t * a.a.ld_q + k] *
                                                     (double)a.a.d[t * a.a.ld_d + k / (kind == KVD_ACT_Q8_32 ? 32 : 256)];
                sum += row[k] * x;
                size += fabs(row[k] * x);
            }
            ok = ok && fabs(sum - y[t * 16 + r]) <= 1e-6 * size;
        }
    }
    check_report(c, ok, "%s gemm_%s against f64", c->ref->name, tc->name);
    free(row);
    free_acts(&a);
    check_free(w.panels, w.bytes, 64);
}

/* The bits of a product of fixed data, which any machine must give: ISAs that
 * agree with each other could still drift together from what was released. */
static void check_golden(check_context *c, const type_case *tc)
{
    enum { T = 5, N_PANELS = 2, N = T * 16 * N_PANELS };
    const int64_t K = kvd__dtypes[tc->type].block_elems == 1 ? 67 : 768;
    const uint64_t seed = c->seed;
    uint64_t hash = 0xcbf29ce484222325u; /* FNV-1a */
    float y[N];
    c->seed = 42;
    for (int kind = 0; kind < 2; kind++) {
        weights w = make_weights(c, tc, kind ? W_SMALL_SCALES : W_RANDOM, N_PANELS, K);
        acts a = make_acts(c, kvd__dtype_act(tc->type), A_RANDOM, K, T);
        c->isa->gemm[tc->type](y, 16 * N_PANELS, w.panels, N_PANELS, K, &a.a, T);
        for (int i = 0; i < N; i++)
            for (int j = 0; j < 32; j += 8)
                hash = (hash ^ (kvd__f32_bits(y[i]) >> j & 0xff)) * 0x100000001b3u;
        free_acts(&a);
        check_free(w.panels, w.bytes, 64);
    }
    c->seed = seed;
    check_report(c, hash == tc->golden, "%s gemm_%s golden hash: 0x%016llx", c->isa->name, tc->name,
                 (unsigned long long)hash);
}

static void check_dequant_panel(check_context *c, const type_case *tc)
{
    const int elems = kvd__dtypes[tc->type].block_elems;
    const int64_t K = elems == 1 ? 37 : 3 * elems;
    for (int kind = 0; kind < W_KINDS; kind++) {
        weights w = make_weights(c, tc, kind, 1, K);
        const size_t bytes = (size_t)(16 * K) * 4;
        float *want = check_alloc(bytes, 64), *got = check_alloc(bytes, 64), *row = malloc((size_t)K * sizeof *row);
        for (int r = 0; r < 16; r++) {
            kvd__panel_dequant_row(tc->type, w.panels, r, K, row);
            for (int64_t k = 0; k < K; k++)
                want[16 * k + r] = row[k];
        }
        c->isa->dequant_panel[tc->type](got, w.panels, K);
        check_report(c, !memcmp(want, got, bytes), "%s dequant_panel_%s weights=%d", c->isa->name, tc->name, kind);
        free(row);
        check_free(want, bytes, 64);
        check_free(got, bytes, 64);
        check_free(w.panels, w.bytes, 64);
    }
}

static void check_type(check_context *c, const type_case *tc)
{
    static const int64_t tokens[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 17, 25};
    const int elems = kvd__dtypes[tc->type].block_elems;
    /* float types take any K */
    const int64_t ks[] = {elems, elems == 1 ? 67 : 3 * elems, elems == 256 ? 512 : 32 * 6};
    for (size_t i = 0; i < sizeof tokens / sizeof *tokens; i++)
        for (int j = 0; j < 3; j++)
            for (int64_t n_panels = 1; n_panels <= 3; n_panels++)
                check_product(c, tc, W_RANDOM, A_RANDOM, n_panels, ks[j], tokens[i]);
    for (int w = 0; w < W_KINDS; w++)
        for (int a = 0; a < A_KINDS; a++) {
            check_product(c, tc, w, a, 2, ks[1], 1);
            check_product(c, tc, w, a, 1, ks[1], 5);
            check_product(c, tc, w, a, 1, ks[0], 12);
        }
    check_product(c, tc, W_RANDOM, A_RANDOM, 0, ks[0], 4);
    /* past every cache-sized piece that a kernel may cut K, tokens or panels into */
    check_product(c, tc, W_RANDOM, A_RANDOM, 11, elems == 1 ? 1301 : 5120, 13);
    check_product(c, tc, W_RANDOM, A_RANDOM, 2, elems == 1 ? 6151 : 25600, 1);
    check_product(c, tc, W_RANDOM, A_RANDOM, 1, elems == 1 ? 701 : 5120, 12);
}

/* ---- quantisers ----------------------------------------------------------- */

enum { X_RANDOM, X_TIES, X_OUTLIER, X_TINY, X_HUGE, X_MINUS_ZERO, X_EDGE, X_INF, X_NAN, X_NAN_FIRST, X_KINDS };

static void make_x(check_context *c, float *x, int64_t K, int kind)
{
    const int64_t at = (int64_t)(check_random(c) % (uint64_t)K);
    for (int64_t i = 0; i < K; i++) {
        float f = check_random_float(c, 3.0f);
        switch (kind) {
        case X_TIES: /* amax 127 exactly: q = rne(x), with halves, and +-127 both */
            f = i % 32 < 2 ? (i & 1 ? -127.0f : 127.0f) : (float)((int)(check_random(c) % 507) - 253) * 0.5f;
            break;
        case X_TINY: /* around 2^-100, subnormals */
            f *= (i / 32) % 3 == 0 ? 0x1p-101f : (i / 32) % 3 == 1 ? 0x1p-98f : 0x1p-140f;
            break;
        case X_HUGE:
            f *= 1e38f;
            break;
        case X_MINUS_ZERO:
            f = -0.0f;
            break;
        case X_EDGE: /* the largest of a block exactly 2^-100, or just below */
            f = (i / 32) % 2 ? 0x1p-100f : 0x1.fffffep-101f;
            break;
        default:
            break;
        }
        x[i] = f;
    }
    if (kind == X_OUTLIER)
        x[at] = -1e30f;
    if (kind == X_INF)
        x[at] = -INFINITY;
    if (kind == X_NAN)
        x[at] = NAN;
    if (kind == X_NAN_FIRST) {
        x[0] = -NAN;
        x[1] = INFINITY;
    }
}

static void check_quantiser(check_context *c, bool is_256, int64_t K, int kind)
{
    const int64_t block = is_256 ? 256 : 32, n = K / block, n_sums = is_256 ? K / 16 : n;
    const size_t d_bytes = (size_t)n * 4, b_bytes = (size_t)n_sums * 4;
    float *x = check_alloc((size_t)K * 4, 64);
    make_x(c, x, K, kind);
    int rc[2];
    int8_t *q[2];
    float *d[2], *s[2];
    int32_t *bsum[2];
    for (int i = 0; i < 2; i++) {
        const kvd_kern *k = i ? c->isa : c->ref;
        q[i] = check_alloc((size_t)K, 64);
        d[i] = check_alloc(d_bytes, 64);
        s[i] = check_alloc(d_bytes, 64);
        bsum[i] = check_alloc(b_bytes, 64);
        memset(s[i], 0, d_bytes);
        rc[i] = is_256 ? k->quant_q8_256(x, K, q[i], d[i], bsum[i]) : k->quant_q8_32(x, K, q[i], d[i], s[i], bsum[i]);
    }
    const bool bad = kind >= X_INF;
    bool ok = rc[0] == (bad ? -1 : 0) && rc[1] == rc[0];
    if (!bad)
        ok = ok && !memcmp(q[0], q[1], (size_t)K) && !memcmp(d[0], d[1], d_bytes) && !memcmp(s[0], s[1], d_bytes) &&
             !memcmp(bsum[0], bsum[1], b_bytes);
    for (int64_t i = 0; ok && !bad && i < K; i++)
        ok = q[0][i] >= -127;
    check_report(c, ok, "%s quant_q8_%d K=%lld x=%d", c->isa->name, is_256 ? 256 : 32, (long long)K, kind);
    for (int i = 0; i < 2; i++) {
        check_free(q[i], (size_t)K, 64);
        check_free(d[i], d_bytes, 64);
        check_free(s[i], d_bytes, 64);
        check_free(bsum[i], b_bytes, 64);
    }
    check_free(x, (size_t)K * 4, 64);
}

/* ---- speed ---------------------------------------------------------------- */

/* Cycles a second, from a chain of additions that take one each. */
static double cycles_per_second(void)
{
    double best = 0;
    for (int run = 0; run < 25; run++) {
        uint64_t x = 0;
        const double start = check_seconds();
        for (int i = 0; i < 500000; i++) {
#define STEP x += 1; __asm__ volatile("" : "+r"(x));
            STEP STEP STEP STEP STEP STEP STEP STEP STEP STEP
#undef STEP
        }
        const double rate = 5e6 / (check_seconds() - start);
        best = rate > best ? rate : best;
    }
    return best;
}

/* One token from memory: weights larger than any cache. Ends the line. */
static void bench_memory(check_context *c, const type_case *tc)
{
    const int64_t K = 2048, panel_bytes = kvd__panel_bytes(tc->type, K), n_panels = (100 << 20) / panel_bytes;
    weights w = make_weights(c, tc, W_RANDOM, 1, K);
    const size_t bytes = (size_t)(n_panels * panel_bytes), y_bytes = (size_t)(16 * n_panels) * 4;
    uint8_t *all = check_alloc(bytes, 64);
    float *y = check_alloc(y_bytes, 64);
    for (int64_t i = 0; i < n_panels; i++)
        memcpy(all + i * panel_bytes, w.panels, w.bytes);
    acts a = make_acts(c, kvd__dtype_act(tc->type), A_RANDOM, K, 1);
    double best = 0;
    for (int run = 0; run < 5; run++) {
        const double start = check_seconds();
        c->isa->gemm[tc->type](y, 16 * n_panels, all, n_panels, K, &a.a, 1);
        const double rate = (double)bytes / (check_seconds() - start) / 1e9;
        best = rate > best ? rate : best;
    }
    printf("  | T=1 from memory: %.1f GB/s\n", best);
    free_acts(&a);
    check_free(y, y_bytes, 64);
    check_free(all, bytes, 64);
    check_free(w.panels, w.bytes, 64);
}

static void bench_type(check_context *c, const type_case *tc, double hz)
{
    static const int64_t tokens[] = {1, 2, 4, 5, 6, 8, 12, 17, 64};
    const int64_t K = 2048, n_panels = 16;
    weights w = make_weights(c, tc, W_RANDOM, n_panels, K);
    acts a = make_acts(c, kvd__dtype_act(tc->type), A_RANDOM, K, 64);
    float *y = check_alloc((size_t)(64 * 16 * n_panels) * 4, 64);
    printf("%-7s gemm_%-7s MAC/cycle:", c->isa->name, tc->name);
    for (size_t i = 0; i < sizeof tokens / sizeof *tokens; i++) {
        const int64_t T = tokens[i];
        double best = 0;
        for (int run = 0; run < 7; run++) {
            const int reps = (int)(24 / T) + 1;
            const double start = check_seconds();
            for (int rep = 0; rep < reps; rep++)
                c->isa->gemm[tc->type](y, 16 * n_panels, w.panels, n_panels, K, &a.a, T);
            const double rate = (double)(16 * n_panels * K * T * reps) / (check_seconds() - start) / hz;
            best = rate > best ? rate : best;
        }
        printf("  T=%lld %.1f", (long long)T, best);
    }
    bench_memory(c, tc);
    check_free(y, (size_t)(64 * 16 * n_panels) * 4, 64);
    free_acts(&a);
    check_free(w.panels, w.bytes, 64);
}

static void bench_quantisers(check_context *c, double hz)
{
    enum { K = 2048 };
    float *x = check_alloc(K * 4, 64), *d = check_alloc(K, 64), *s = check_alloc(K, 64);
    int32_t *bsum = check_alloc(K, 64);
    int8_t *q = check_alloc(K, 64);
    make_x(c, x, K, X_RANDOM);
    for (int is_256 = 0; is_256 < 2; is_256++) {
        double best = 0;
        for (int run = 0; run < 20; run++) {
            const double start = check_seconds();
            for (int rep = 0; rep < 20; rep++)
                if (is_256)
                    c->isa->quant_q8_256(x, K, q, d, bsum);
                else
                    c->isa->quant_q8_32(x, K, q, d, s, bsum);
            const double rate = 20.0 * K / (check_seconds() - start) / hz;
            best = rate > best ? rate : best;
        }
        printf("%-7s quant_q8_%-3d elements/cycle: %.2f\n", c->isa->name, is_256 ? 256 : 32, best);
    }
    check_free(x, K * 4, 64);
    check_free(d, K, 64);
    check_free(s, K, 64);
    check_free(bsum, K, 64);
    check_free(q, K, 64);
}

void check_gemm(check_context *c)
{
    for (int i = 0; i < N_CASES; i++) {
        char name[32];
        snprintf(name, sizeof name, "gemm_%s", cases[i].name);
        if (check_wanted(c, name)) {
            check_accuracy(c, &cases[i]);
            check_golden(c, &cases[i]);
            check_type(c, &cases[i]);
            if (c->bench)
                bench_type(c, &cases[i], cycles_per_second());
        }
        snprintf(name, sizeof name, "dequant_panel_%s", cases[i].name);
        if (check_wanted(c, name))
            check_dequant_panel(c, &cases[i]);
    }
    if (check_wanted(c, "quant_q8")) {
        for (int kind = 0; kind < X_KINDS; kind++)
            for (int64_t n = 1; n <= 7; n++) {
                check_quantiser(c, false, 32 * n, kind);
                check_quantiser(c, true, 256 * n, kind);
            }
        if (c->bench)
            bench_quantisers(c, cycles_per_second());
    }
}
