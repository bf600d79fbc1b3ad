/* checkasm of everything element-wise: norm, RoPE, activations, exp, stores. All
 * of these take pointers of 4-byte alignment, so buffers end exactly at the guard
 * page and start wherever that puts them. */
#define _GNU_SOURCE
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/half.h"
#include "checkasm.h"

static float *floats(int64_t n) { return check_alloc((size_t)n * 4, 4); }
static void free_floats(float *p, int64_t n) { check_free(p, (size_t)n * 4, 4); }

static const int64_t lengths[] = {1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 100, 128, 255, 576, 896, 1000};
#define N_LENGTHS ((int)(sizeof lengths / sizeof lengths[0]))

enum { KIND_UNIT, KIND_SMALL, KIND_LARGE, KIND_SUBNORMAL, KIND_MIXED, KIND_SPECIAL, KIND_BITS, N_KINDS };

static float random_value(check_context *c, int kind)
{
    static const float special[] = {0.0f, -0.0f, 1.0f, -1.0f, 0x1p-149f, -0x1p-149f, 0x1p-126f, 0x1.fffffep127f,
                                    -0x1.fffffep127f, INFINITY, -INFINITY, NAN, 65519.996f, 65520.0f, -65520.0f,
                                    0x1p-24f, 0x1p-25f, 0x1.8p-24f, 88.37626f, -87.33654f};
    uint64_t r = check_random(c);
    switch (kind) {
    case KIND_UNIT:
        return check_random_float(c, 1.0f);
    case KIND_SMALL:
        return check_random_float(c, 1e-6f);
    case KIND_LARGE:
        return check_random_float(c, 3e4f);
    case KIND_SUBNORMAL:
        return check_random_float(c, 1e-38f);
    case KIND_MIXED: /* mantissas of one size, exponents of many, -0 */
        return r % 8 == 0 ? -0.0f : check_random_float(c, ldexpf(1.0f, (int)(r >> 8) % 40));
    case KIND_SPECIAL:
        return r % 4 ? check_random_float(c, 90.0f) : special[(r >> 8) % (sizeof special / sizeof special[0])];
    default:
        return kvd__f32_from_bits((uint32_t)r);
    }
}

static void fill(check_context *c, float *x, int64_t n, int kind)
{
    for (int64_t i = 0; i < n; i++)
        x[i] = random_value(c, kind);
}

/* ---- the common shape y = f(x, w) -------------------------------------------- */

static void bench_line(check_context *c, const char *name, double best, int64_t n)
{
    printf("%-7s %-12s n=%-6lld %6.2f elements/cycle\n", c->isa->name, name, (long long)n,
           (double)n / (best * check_hz()));
}

/* Best time of a statement, over about 20 ms. */
#define BEST_OF(best, statement)                                               \
    do {                                                                       \
        best = 1e9;                                                            \
        for (double end_ = check_seconds() + 0.02; check_seconds() < end_;) {  \
            double t_ = check_seconds();                                       \
            for (int rep_ = 0; rep_ < 8; rep_++)                               \
                statement;                                                     \
            t_ = (check_seconds() - t_) / 8;                                   \
            best = t_ < best ? t_ : best;                                      \
        }                                                                      \
    } while (0)

enum { OP_RMSNORM, OP_SILU, OP_GELU, OP_ADD, OP_SCALE, OP_EXP, N_OPS };
static const char *const op_names[N_OPS] = {"rmsnorm", "silu_mul", "gelu_mul", "add", "scale", "exp"};

static int run_op(const kvd_kern *k, int op, float *y, const float *x, const float *w, int64_t n)
{
    switch (op) {
    case OP_RMSNORM:
        return k->rmsnorm(y, x, w, 1e-5f, n);
    case OP_SILU:
        k->silu_mul(y, x, w, n);
        break;
    case OP_GELU:
        k->gelu_mul(y, x, w, n);
        break;
    case OP_ADD:
        k->add(y, x, n);
        break;
    case OP_SCALE:
        k->scale(y, w[0], n);
        break;
    default:
        k->exp(y, x, n);
        break;
    }
    return 0;
}

/* alias: 0 y apart, 1 y is x, 2 y is w (which only the activations allow). */
static void check_op(check_context *c, int op, int64_t n, int kind, int alias)
{
    float *in[2] = {floats(n), floats(n)}, *buf[2][3];
    for (int i = 0; i < 2; i++)
        fill(c, in[i], n, kind);
    int ret[2];
    for (int side = 0; side < 2; side++) {
        for (int i = 0; i < 3; i++)
            buf[side][i] = floats(n);
        memcpy(buf[side][0], in[0], (size_t)n * 4); /* add and scale read y */
        memcpy(buf[side][1], in[0], (size_t)n * 4);
        memcpy(buf[side][2], in[1], (size_t)n * 4);
        ret[side] = run_op(side ? c->isa : c->ref, op, buf[side][alias], buf[side][1], buf[side][2], n);
    }
    bool ok = ret[0] == ret[1] && (ret[0] || check_same_floats(buf[0][alias], buf[1][alias], n));
    for (int i = 0; i < 3; i++)
        ok &= i == alias || memcmp(buf[0][i], buf[1][i], (size_t)n * 4) == 0;
    check_report(c, ok, "%s %s n=%lld kind=%d alias=%d", c->isa->name, op_names[op], (long long)n, kind, alias);
    for (int side = 0; side < 2; side++)
        for (int i = 0; i < 3; i++)
            free_floats(buf[side][i], n);
    free_floats(in[0], n);
    free_floats(in[1], n);
}

static void check_ops(check_context *c)
{
    for (int op = 0; op < N_OPS; op++) {
        if (!check_wanted(c, op_names[op]))
            continue;
        bool two_inputs = op == OP_SILU || op == OP_GELU, in_place = op != OP_ADD && op != OP_SCALE;
        for (int i = 0; i < N_LENGTHS; i++)
            for (int kind = 0; kind < N_KINDS; kind++)
                for (int alias = 0; alias <= (two_inputs ? 2 : in_place ? 1 : 0); alias++)
                    check_op(c, op, lengths[i], kind, alias);
        if (c->bench) {
            enum { N = 2048 };
            float *x = floats(N), *w = floats(N), *y = floats(N);
            double best;
            fill(c, x, N, KIND_UNIT);
            fill(c, w, N, KIND_UNIT);
            BEST_OF(best, run_op(c->isa, op, y, x, w, N));
            bench_line(c, op_names[op], best, N);
            free_floats(x, N);
            free_floats(w, N);
            free_floats(y, N);
        }
    }
}

/* ---- exp --------------------------------------------------------------------- */

/* All bits count here, NaN payloads too; and the bound of exp_f32.h is checked
 * against libm in double precision. */
static void check_exp(check_context *c)
{
    enum { N = 1 << 16 };
    if (!check_wanted(c, "exp"))
        return;
    float *x = floats(N), *y[2] = {floats(N), floats(N)};
    const float edges[] = {0.0f, -87.33654f, 88.37626f, 0.34657359f, -0.34657359f, -INFINITY, INFINITY, NAN};
    double worst = 0;
    for (int round = 0; round < 8; round++) {
        for (int i = 0; i < N; i++) {
            uint32_t u = kvd__f32_bits(edges[round]) + (uint32_t)i - N / 2; /* the neighbourhood of an edge */
            x[i] = i % 2 ? kvd__f32_from_bits(u) : random_value(c, i % 4 ? KIND_SPECIAL : KIND_BITS);
        }
        c->ref->exp(y[0], x, N);
        c->isa->exp(y[1], x, N);
        check_report(c, memcmp(y[0], y[1], N * 4) == 0, "%s exp_bits edge=%g", c->isa->name, (double)edges[round]);
        for (int i = 0; i < N; i++) {
            if (!(x[i] >= -87.33654f && x[i] <= 88.37626f))
                continue;
            double want = exp((double)x[i]);
            int e;
            frexp(want, &e);
            worst = fmax(worst, fabs((double)y[1][i] - want) / ldexp(1.0, e - 24));
        }
    }
    const float x8[] = {0.0f, -0.0f, -87.34f, 88.38f, INFINITY, -INFINITY, NAN, 1.0f};
    float y8[8];
    c->isa->exp(y8, x8, 8);
    bool ends = y8[0] == 1 && y8[1] == 1 && kvd__f32_bits(y8[2]) == 0 && isinf(y8[3]) && isinf(y8[4]) &&
                kvd__f32_bits(y8[5]) == 0 && isnan(y8[6]);
    check_report(c, ends, "%s exp_bits ends", c->isa->name);
    check_report(c, worst <= 1.0, "%s exp_bits error %.4f ulp", c->isa->name, worst);
    free_floats(x, N);
    free_floats(y[0], N);
    free_floats(y[1], N);
}

void check_exp_all(check_context *c)
{
    enum { N = 1 << 16 };
    float *x = floats(N), *y[2] = {floats(N), floats(N)};
    for (uint32_t chunk = 0; chunk < 1u << 16; chunk++) {
        for (uint32_t i = 0; i < N; i++)
            x[i] = kvd__f32_from_bits(chunk << 16 | i);
        c->ref->exp(y[0], x, N);
        c->isa->exp(y[1], x, N);
        check_report(c, memcmp(y[0], y[1], N * 4) == 0, "%s exp_all bits %04x0000..", c->isa->name, (unsigned)chunk);
    }
    free_floats(x, N);
    free_floats(y[0], N);
    free_floats(y[1], N);
}

/* ---- accuracy ----------------------------------------------------------------
 *
 * Equality with the reference says nothing of the reference itself: here what the
 * kernels compute is compared with the definitions, in double precision. */

static void check_activation_accuracy(check_context *c)
{
    enum { N = 4096 };
    float *x = floats(N), *one = floats(N), *y = floats(N);
    double silu = 0, gelu = 0;
    for (int i = 0; i < N; i++) {
        x[i] = check_random_float(c, i % 2 ? 60.0f : 3.0f);
        one[i] = 1.0f;
    }
    c->isa->silu_mul(y, x, one, N);
    for (int i = 0; i < N; i++) {
        double v = x[i], want = v / (1 + exp(-v));
        silu = fmax(silu, fabs(y[i] - want) / (fabs(want) + 1e-30));
    }
    c->isa->gelu_mul(y, x, one, N);
    for (int i = 0; i < N; i++) {
        double v = x[i], u = sqrt(2 / acos(-1.0)) * (v + 0.044715 * v * v * v), want = v * 0.5 * (1 + tanh(u));
        gelu = fmax(gelu, fabs(y[i] - want) / fmax(fabs(want), 1e-3)); /* tanh itself cancels at the negative end */
    }
    check_report(c, silu < 4 * 0x1p-24, "%s accuracy silu_mul %g", c->isa->name, silu);
    check_report(c, gelu < 32 * 0x1p-24, "%s accuracy gelu_mul %g", c->isa->name, gelu);
    free_floats(x, N);
    free_floats(one, N);
    free_floats(y, N);
}

static void check_norm_accuracy(check_context *c)
{
    enum { N = 900 };
    float *x = floats(N), *w = floats(N), *y = floats(N), *cs = floats(64);
    double sum = 0, norm = 0, rope = 0;
    fill(c, x, N, KIND_UNIT);
    fill(c, w, N, KIND_UNIT);
    for (int i = 0; i < N; i++)
        sum += (double)x[i] * x[i];
    c->isa->rmsnorm(y, x, w, 1e-5f, N);
    for (int i = 0; i < N; i++)
        norm = fmax(norm, fabs(y[i] - x[i] * w[i] / sqrt(sum / N + (double)1e-5f)));
    check_report(c, norm < 8 * 0x1p-24, "%s accuracy rmsnorm %g", c->isa->name, norm);

    for (int i = 0; i < 32; i++) {
        cs[2 * i] = (float)cos(i);
        cs[2 * i + 1] = (float)sin(i);
    }
    memcpy(y, x, N * 4);
    c->isa->rope(y, 2, 80, 64, cs, false); /* halves: i and i + 32; 64.. stay */
    for (int h = 0; h < 2; h++)
        for (int i = 0; i < 80; i++) {
            const float *p = x + 80 * h;
            double want = i < 32   ? p[i] * (double)cs[2 * i] - p[i + 32] * (double)cs[2 * i + 1]
                          : i < 64 ? p[i - 32] * (double)cs[2 * i - 63] + p[i] * (double)cs[2 * i - 64]
                                   : p[i];
            rope = fmax(rope, fabs(y[80 * h + i] - want));
        }
    check_report(c, rope < 2 * 0x1p-24, "%s accuracy rope %g", c->isa->name, rope);
    free_floats(x, N);
    free_floats(w, N);
    free_floats(y, N);
    free_floats(cs, 64);
}

/* ---- rope -------------------------------------------------------------------- */

static void check_rope(check_context *c)
{
    static const int heads[] = {1, 2, 3, 5}, sizes[] = {8, 16, 24, 64, 72, 80, 96, 128, 256};
    if (!check_wanted(c, "rope"))
        return;
    for (int ih = 0; ih < 4; ih++)
        for (int is = 0; is < 9; is++)
            for (int turn = 0; turn < 4; turn++)
                for (int inter = 0; inter < 2; inter++) {
                    int d = sizes[is], n_heads = heads[ih], n = n_heads * d;
                    int n_rot = turn == 0 ? d : turn == 1 ? d / 2 : turn == 2 ? 2 : d - 2;
                    float *cs = floats(n_rot), *x[2] = {floats(n), floats(n)};
                    fill(c, cs, n_rot, KIND_UNIT);
                    fill(c, x[0], n, turn == 1 ? KIND_MIXED : KIND_UNIT);
                    memcpy(x[1], x[0], (size_t)n * 4);
                    c->ref->rope(x[0], n_heads, d, n_rot, cs, inter);
                    c->isa->rope(x[1], n_heads, d, n_rot, cs, inter);
                    check_report(c, memcmp(x[0], x[1], (size_t)n * 4) == 0, "%s rope d=%d heads=%d n_rot=%d inter=%d",
                                 c->isa->name, d, n_heads, n_rot, inter);
                    free_floats(cs, n_rot);
                    free_floats(x[0], n);
                    free_floats(x[1], n);
                }
    for (int inter = 0; c->bench && inter < 2; inter++) {
        enum { N = 16 * 64 };
        float *x = floats(N), *cs = floats(64);
        double best;
        for (int i = 0; i < 32; i++) {
            cs[2 * i] = 0.6f;
            cs[2 * i + 1] = 0.8f;
        }
        fill(c, x, N, KIND_UNIT);
        BEST_OF(best, c->isa->rope(x, 16, 64, 64, cs, inter));
        bench_line(c, inter ? "rope_pairs" : "rope_halves", best, N);
        free_floats(x, N);
        free_floats(cs, 64);
    }
}

/* ---- stored values ------------------------------------------------------------ */

static const char *const kvtype_names[KVD_KV_COUNT] = {"f16", "bf16", "f32"};

typedef int store_fn(void *block, kvd_kvtype t, int slot, int n_slots, const float *src, int64_t ld, int d_head);

static void check_store_one(check_context *c, const char *name, bool is_k, kvd_kvtype t, int d, int slot, int n, int kind)
{
    int64_t ld = d + 8, n_src = (n - 1) * ld + d;
    size_t bytes = (size_t)(KVD__BLOCK * d * kvd__kvtype_bytes(t));
    float *src = floats(n_src);
    fill(c, src, n_src, kind);
    unsigned char *block[2];
    int ret[2];
    for (int side = 0; side < 2; side++) {
        const kvd_kern *k = side ? c->isa : c->ref;
        store_fn *store = is_k ? k->store_k : k->store_v;
        block[side] = check_alloc(bytes, 64);
        memset(block[side], 0xa5, bytes); /* the other slots must stay */
        ret[side] = store(block[side], t, slot, n, src, ld, d);
    }
    check_report(c, ret[0] == ret[1] && memcmp(block[0], block[1], bytes) == 0, "%s %s_%s d=%d slot=%d n=%d kind=%d",
                 c->isa->name, name, kvtype_names[t], d, slot, n, kind);
    check_free(block[0], bytes, 64);
    check_free(block[1], bytes, 64);
    free_floats(src, n_src);
}

static void check_stores(check_context *c)
{
    static const int sizes[] = {8, 16, 24, 40, 64, 80, 128, 256};
    for (int is_k = 0; is_k < 2; is_k++) {
        const char *name = is_k ? "store_k" : "store_v";
        if (!check_wanted(c, name))
            continue;
        for (int t = 0; t < KVD_KV_COUNT; t++) {
            for (int is = 0; is < 8; is++)
                for (int slot = 0; slot < KVD__BLOCK; slot += slot < 2 || slot >= 14 ? 1 : 3)
                    for (int n = 1; slot + n <= KVD__BLOCK; n += n < 3 || slot + n >= 15 ? 1 : 3)
                        check_store_one(c, name, is_k, (kvd_kvtype)t, sizes[is], slot, n, (slot + n + is) % N_KINDS);
            for (int kind = 0; kind < N_KINDS; kind++)
                check_store_one(c, name, is_k, (kvd_kvtype)t, 64, 0, KVD__BLOCK, kind);
            for (int n = 1; c->bench && n <= KVD__BLOCK; n += 15) {
                enum { D = 64 };
                float *src = floats(n * D);
                size_t bytes = KVD__BLOCK * D * 4;
                void *block = check_alloc(bytes, 64);
                store_fn *store = is_k ? c->isa->store_k : c->isa->store_v;
                char label[32];
                double best;
                fill(c, src, n * D, KIND_UNIT);
                BEST_OF(best, store(block, (kvd_kvtype)t, 0, n, src, D, D));
                snprintf(label, sizeof label, "%s_%s", name, kvtype_names[t]);
                bench_line(c, label, best, (int64_t)n * D);
                free_floats(src, n * D);
                check_free(block, bytes, 64);
            }
        }
    }
}

static void check_round_to(check_context *c)
{
    if (!check_wanted(c, "round_to"))
        return;
    for (int t = 0; t < KVD_KV_COUNT; t++)
        for (int i = 0; i < N_LENGTHS; i++)
            for (int kind = 0; kind < N_KINDS; kind++) {
                int64_t n = lengths[i];
                float *x[2] = {floats(n), floats(n)};
                fill(c, x[0], n, kind);
                memcpy(x[1], x[0], (size_t)n * 4);
                int a = c->ref->round_to(x[0], (kvd_kvtype)t, n), b = c->isa->round_to(x[1], (kvd_kvtype)t, n);
                check_report(c, a == b && memcmp(x[0], x[1], (size_t)n * 4) == 0, "%s round_to_%s n=%lld kind=%d",
                             c->isa->name, kvtype_names[t], (long long)n, kind);
                free_floats(x[0], n);
                free_floats(x[1], n);
            }
}

void check_vec(check_context *c)
{
    check_ops(c);
    check_exp(c);
    if (check_wanted(c, "accuracy")) {
        check_activation_accuracy(c);
        check_norm_accuracy(c);
    }
    check_rope(c);
    check_stores(c);
    check_round_to(c);
}
