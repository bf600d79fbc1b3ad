/* 10,000 broken GGUF files. Well-formed files with every kind of field are
 * changed where it hurts: a field gets an interesting value or that of a
 * neighbour of its kind, bytes flip, fields vanish or repeat, the file is cut or
 * grows; one change in most files, up to four in the others. Then:
 *
 * - nothing crashes (run it under the sanitizers, too), nothing stays allocated,
 *   results are untouched on failure, and the error is one line with a code that
 *   the reader may give and an offset inside the file or at its end;
 * - a file that is accepted can be used: all look-ups, reads, fingerprint;
 * - every KVD_E_GGUF_* code has been seen, GGUF_MISSING by a look-up. GGUF_BOUNDS
 *   belongs to the binder of models.
 *
 * The choice of mutations is a fixed sequence.
 *
 * usage: mutate_gguf [FILES [SEED]]
 *        mutate_gguf --corpus DIR     write the well-formed files, for a fuzzer
 *        mutate_gguf --open FILE...   files that must be accepted, and are used */
#include "gguf_build.h"

#include "base/error.h"
#include "base/rng.h"
#include "gguf/gguf.h"

enum { N_BASES = 4 };

static uint64_t rng_state;
static uint64_t draw(uint64_t below) { return kvd__splitmix64(&rng_state) % below; }

static int n_failed;
#define EXPECT(cond, ...)                                                      \
    do {                                                                       \
        if (!(cond)) {                                                         \
            printf("FAILED: " __VA_ARGS__);                                    \
            printf(" (%s)\n", #cond);                                          \
            n_failed++;                                                        \
        }                                                                      \
    } while (0)

/* --- the well-formed files --- */

static const char *const keys[] = {"general.architecture", "a.u8",    "a.i8",   "a.u16",     "a.i16",    "a.u32",
                                   "a.i32",                "a.f32",   "a.bool", "a.u64",     "a.i64",    "a.f64",
                                   "r.u8",                 "r.i8",    "r.u16",  "r.i16",     "r.u32",    "r.i32",
                                   "r.f32",                "r.bool",  "r.str",  "r.u64",     "r.empty",  "r.deep",
                                   "general.alignment",    "missing", "t.0",    "tokenizer"};
enum { N_KEYS = sizeof keys / sizeof keys[0] };
static const char *const names[] = {"token_embd.weight", "blk.0.attn_q.weight", "blk.0.ffn_up.weight", "output_norm.weight",
                                    "w.3d", "missing"};
enum { N_NAMES = sizeof names / sizeof names[0] };

/* A tree of arrays: 2^(depth - 1) leaves at the greatest depth that is read. */
static void deep(gb *b, int depth)
{
    if (depth == 1) {
        gb_array(b, GB_U16, 2);
        gb_put(b, GB_VALUE, "abcd", 4);
        return;
    }
    gb_array(b, GB_ARR, 2);
    deep(b, depth - 1);
    deep(b, depth - 1);
}

/* Every value type and every array. */
static void keys_of_all_kinds(gb *b)
{
    static const uint8_t raw[8] = {1, 2, 3, 4, 5, 6, 7, 8}, bits[4] = {1, 0, 0, 1};
    static const float f[3] = {1.5f, -2.0f, 0.25f};
    static const uint32_t w[3] = {7, 8, 9};
    static const int size[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
    static const uint32_t type[] = {GB_U8, GB_I8, GB_U16, GB_I16, GB_U32, GB_I32, GB_F32, GB_BOOL, GB_U64, GB_I64, GB_F64};
    gb_key_str(b, keys[0], "llama");
    for (int i = 0; i < 11; i++)
        gb_key_value(b, keys[1 + i], type[i], raw, (size_t)size[type[i]]);
    for (int i = 0; i < 4; i++)
        gb_key_array(b, keys[12 + i], (uint32_t)i, (uint64_t)(8 / size[i]), raw, 8);
    gb_key_array(b, "r.u32", GB_U32, 3, w, sizeof w);
    gb_key_array(b, "r.i32", GB_I32, 3, w, sizeof w);
    gb_key_array(b, "r.f32", GB_F32, 3, f, sizeof f);
    gb_key_array(b, "r.bool", GB_BOOL, 4, bits, sizeof bits);
    gb_key(b, "r.str", GB_ARR);
    gb_array(b, GB_STR, 3);
    gb_string(b, GB_STRING_LEN, GB_STRING, "");
    gb_string(b, GB_STRING_LEN, GB_STRING, "token");
    gb_string(b, GB_STRING_LEN, GB_STRING, "another one");
    gb_key_array(b, "r.u64", GB_U64, 1, raw, 8);
    gb_key_array(b, "r.empty", GB_STR, 0, "", 0);
    gb_key(b, "r.deep", GB_ARR);
    deep(b, 4);
}
enum { N_ALL_KINDS = 24 };

static void make_base(gb *b, int which)
{
    const uint64_t e[] = {32, 4}, q[] = {64, 3}, k[] = {256, 2}, v[] = {10}, d3[] = {4, 3, 2, 1};
    switch (which) {
    case 0: /* everything */
        gb_header(b, 3, 5, N_ALL_KINDS + 1);
        keys_of_all_kinds(b);
        gb_key_u32(b, "general.alignment", b->alignment = 64);
        gb_tensor(b, names[0], 8, 2, e, 4 * 34);
        gb_tensor(b, names[1], 2, 2, q, 6 * 18);
        gb_tensor(b, names[2], 12, 2, k, 2 * 144);
        gb_tensor(b, names[3], 0, 1, v, 40);
        gb_tensor(b, names[4], 1, 4, d3, 48);
        break;
    case 1: /* v2, metadata only */
        gb_header(b, 2, 0, N_ALL_KINDS);
        keys_of_all_kinds(b);
        return; /* as vocabulary files: no padding */
    case 2: /* tensors only, not in the order of their data */
        gb_header(b, 3, 3, 1);
        gb_key_str(b, "general.architecture", "qwen2");
        gb_tensor_at(b, names[0], 0, 1, v, 96);
        gb_tensor_at(b, names[1], 0, 1, v, 32);
        gb_tensor_at(b, names[3], 30, 1, v, 0);
        b->data_end = 160;
        break;
    default: /* many */
        gb_header(b, 3, 40, 40);
        for (int i = 0; i < 40; i++) {
            char name[16];
            snprintf(name, sizeof name, "key.%d", i);
            gb_key_u32(b, name, (uint32_t)i);
        }
        for (int i = 0; i < 40; i++) {
            char name[16];
            snprintf(name, sizeof name, "t.%d", i);
            gb_tensor(b, name, 24, 1, v, 10);
        }
    }
    gb_data(b);
}

/* --- mutations --- */

typedef struct {
    uint8_t p[3 * GB_MAX_BYTES];
    size_t n;
} bytes;

static uint64_t interesting(gb_kind kind, uint64_t old, size_t file_n)
{
    static const uint64_t fixed[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 13, 16, 29, 31, 40, 63, 64, 65, 0x7f, 0x80, 0xff,
                                     0x100, 0xffff, 0x10000, 0x10001, 0x100000, 0x200000, 0x7fffffff, 0x80000000u,
                                     0xffffffffu, 0x100000000u, (uint64_t)1 << 40, (uint64_t)1 << 61, (uint64_t)1 << 62,
                                     INT64_MAX, (uint64_t)1 << 63, UINT64_MAX - 31, UINT64_MAX};
    if (draw(2)) /* the values that stand next to the right ones */
        switch (kind) {
        case GB_VALUE_TYPE:
        case GB_ARRAY_TYPE: return draw(14);
        case GB_TENSOR_TYPE: return draw(42);
        case GB_N_DIMS: return draw(6);
        case GB_OFFSET:
        case GB_ALIGNMENT: return draw(20) * 16;
        default: break;
        }
    switch (draw(8)) {
    case 0: return old + 1;
    case 1: return old - 1;
    case 2: return old ^ (uint64_t)1 << draw(64);
    case 3: return file_n - draw(64);
    case 4: return old + 32 - 64 * draw(2);
    case 5: return draw(2) ? __builtin_bswap32((uint32_t)old) : old * (2 + draw(15));
    default: return fixed[draw(sizeof fixed / sizeof fixed[0])];
    }
}

/* Replace n bytes at `at` by m bytes of p. */
static void splice(bytes *f, size_t at, size_t n, const uint8_t *p, size_t m)
{
    if (at + n > f->n || f->n - n + m > sizeof f->p)
        return;
    uint8_t copy[GB_MAX_BYTES];
    if (m > sizeof copy)
        return;
    memcpy(copy, p, m);
    memmove(f->p + at + m, f->p + at + n, f->n - at - n);
    memcpy(f->p + at, copy, m);
    f->n += m - n;
}

static gb_field pick_field(const gb *b)
{
    /* By kind first, so that the rare ones get their share. */
    for (;;) {
        gb_kind kind = (gb_kind)draw(GB_KINDS);
        int n = 0;
        for (int i = 0; i < b->n_fields; i++)
            n += b->field[i].kind == kind;
        if (!n)
            continue;
        int nth = (int)draw((uint64_t)n);
        for (int i = 0; i < b->n_fields; i++)
            if (b->field[i].kind == kind && nth-- == 0)
                return b->field[i];
    }
}

static void mutate(bytes *f, const gb *b)
{
    gb_field x = pick_field(b);
    if (x.at + x.n > f->n) /* an earlier change has cut it off */
        return;
    bool number = (x.n == 4 || x.n == 8) && x.kind != GB_KEY && x.kind != GB_NAME && x.kind != GB_STRING;
    uint64_t v = 0;
    switch (draw(number ? 16 : 8)) {
    case 0: /* cut */
        f->n = x.at + draw(x.n + 1);
        return;
    case 1: /* grow */
        splice(f, f->n, 0, f->p, draw(40));
        return;
    case 2: splice(f, x.at, x.n, f->p, 0); return;
    case 3: splice(f, x.at, 0, f->p + x.at, x.n); return;
    case 4: /* bytes */
        for (uint64_t i = draw(3) + 1; x.n && i > 0; i--)
            f->p[x.at + draw(x.n)] = draw(3) ? (uint8_t)draw(256) : 0;
        return;
    case 5:
    case 6:
    case 7: { /* the value of another field of this kind */
        gb_field y = pick_field(b);
        for (int i = 0; i < 400 && y.kind != x.kind; i++)
            y = pick_field(b);
        if (y.kind == x.kind && y.n == x.n && y.at + y.n <= f->n)
            memmove(f->p + x.at, f->p + y.at, x.n);
        return;
    }
    default:
        memcpy(&v, f->p + x.at, x.n);
        v = interesting(x.kind, v, f->n);
        memcpy(f->p + x.at, &v, x.n);
    }
}

/* --- use --- */

static int opened[64], looked_up[64]; /* [-code]: how often an opening, a look-up gave it */

static void note(int rc, const kvd_error *err, int *codes, const char *what)
{
    EXPECT(rc <= 0 && rc > -64, "%s: code %d", what, rc);
    if (rc >= 0 || rc <= -64)
        return;
    codes[-rc]++;
    size_t n = strnlen(err->message, sizeof err->message);
    EXPECT(err->code == rc && n > 0 && n < sizeof err->message && !strchr(err->message, '\n'), "%s: message of %d", what, rc);
}

static void use_keys(const kvd_gguf *g)
{
    for (int i = 0; i < N_KEYS; i++) {
        uint64_t u = 77;
        double d = 77;
        bool t = true;
        kvd_str s = {0};
        const kvd_str *strings = NULL;
        const float *floats = NULL;
        const int32_t *ints = NULL;
        int64_t n = -1;
        kvd_error err;
        int rc = kvd__gguf_u64(g, keys[i], &u, &err);
        note(rc, &err, looked_up, keys[i]);
        EXPECT(!rc || u == 77, "u64 of %s touched", keys[i]);
        EXPECT((rc == KVD_E_GGUF_MISSING) == !kvd__gguf_has(g, keys[i]), "has %s", keys[i]);
        note(kvd__gguf_f64(g, keys[i], &d, &err), &err, looked_up, keys[i]);
        note(kvd__gguf_bool(g, keys[i], &t, &err), &err, looked_up, keys[i]);
        uint64_t sum = u + t;
        rc = kvd__gguf_str(g, keys[i], &s, &err);
        note(rc, &err, looked_up, keys[i]);
        for (size_t k = 0; k < s.n; k++)
            sum += (uint8_t)s.data[k];
        rc = kvd__gguf_str_array(g, keys[i], &strings, &n, &err);
        note(rc, &err, looked_up, keys[i]);
        for (int64_t k = 0; !rc && k < n; k++)
            for (size_t j = 0; j < strings[k].n; j++)
                sum += (uint8_t)strings[k].data[j];
        rc = kvd__gguf_f32_array(g, keys[i], &floats, &n, &err);
        note(rc, &err, looked_up, keys[i]);
        for (int64_t k = 0; !rc && k < n; k++)
            sum += floats[k] > 0;
        rc = kvd__gguf_i32_array(g, keys[i], &ints, &n, &err);
        note(rc, &err, looked_up, keys[i]);
        for (int64_t k = 0; !rc && k < n; k++)
            sum += (uint64_t)ints[k];
        __asm__ volatile("" : : "r"(sum)); /* the reads happen */
    }
}

static void use_tensors(const kvd_gguf *g)
{
    uint8_t fingerprint[16], buf[64];
    kvd_error err;
    for (int i = 0; i < N_NAMES; i++)
        (void)kvd__gguf_tensor(g, names[i]);
    for (int64_t i = 0; i < kvd__gguf_n_tensors(g); i++) {
        const kvd_gguf_tensor *t = kvd__gguf_tensor_at(g, i);
        EXPECT(kvd__gguf_tensor(g, t->name) == t, "tensor %lld by name", (long long)i);
        EXPECT(t->n_bytes > 0 && t->offset > 0 && t->offset + t->n_bytes <= kvd__gguf_size_bytes(g), "tensor %lld place",
               (long long)i);
        int64_t n = t->n_bytes < 64 ? t->n_bytes : 64;
        EXPECT(!kvd__gguf_read(g, t, t->n_bytes - n, buf, (size_t)n, &err), "tensor %lld read", (long long)i);
        EXPECT(kvd__gguf_read(g, t, t->n_bytes - n + 1, buf, (size_t)n, &err) == KVD_E_RANGE, "tensor %lld past its end",
               (long long)i);
    }
    EXPECT(!kvd__gguf_fingerprint(g, fingerprint, &err), "fingerprint");
}

static int n_accepted;

static void check_file(const gb_file *file, const bytes *f)
{
    kvd_ledger ledger;
    kvd__ledger_init(&ledger, 0);
    kvd_error err = {0};
    kvd_gguf *const untouched = (kvd_gguf *)&ledger;
    kvd_gguf *g = untouched;
    gb_file_set(file, f->p, f->n);
    int rc = kvd__gguf_open(&g, file->path, &ledger, &err);
    note(rc, &err, opened, "open");
    EXPECT(ledger.peak[KVD_ACC_HOST] <= 8 * (int64_t)f->n + 1024, "%lld bytes for a file of %zu",
           (long long)ledger.peak[KVD_ACC_HOST], f->n);
    if (rc) {
        EXPECT(g == untouched, "result of a failed open");
        EXPECT(rc <= KVD_E_GGUF_MAGIC && rc >= KVD_E_GGUF_OVERLAP, "open gave %s: %s", kvd_error_name(rc), err.message);
        EXPECT(err.offset >= 0, "offset %lld: %s", (long long)err.offset, err.message);
        /* Truncated tensors begin past the end; all else is at a byte of the file. */
        EXPECT(err.offset <= (int64_t)f->n || rc == KVD_E_GGUF_TRUNCATED, "offset %lld: %s", (long long)err.offset, err.message);
    } else {
        n_accepted++;
        use_keys(g);
        use_tensors(g);
        kvd__gguf_close(&g);
        EXPECT(!g, "close sets NULL");
    }
    EXPECT(ledger.now[KVD_ACC_HOST] == 0, "%lld bytes left", (long long)ledger.now[KVD_ACC_HOST]);
}

static int write_corpus(const char *dir)
{
    static gb b;
    for (int i = 0; i < N_BASES; i++) {
        char path[512];
        snprintf(path, sizeof path, "%s/base%d.gguf", dir, i);
        make_base(&b, i);
        FILE *f = fopen(path, "wb");
        if (!f || fwrite(b.p, 1, b.n, f) != b.n || fclose(f)) {
            fprintf(stderr, "%s: cannot be written\n", path);
            return 1;
        }
    }
    return 0;
}

static int open_files(char **paths)
{
    for (; *paths; paths++) {
        kvd_ledger ledger;
        kvd__ledger_init(&ledger, 0);
        kvd_error err;
        kvd_gguf *g = NULL;
        int rc = kvd__gguf_open(&g, *paths, &ledger, &err);
        EXPECT(!rc, "%s: %s", *paths, err.message);
        if (rc)
            continue;
        use_keys(g);
        use_tensors(g);
        kvd__gguf_close(&g);
    }
    return n_failed != 0;
}

int main(int argc, char **argv)
{
    if (argc > 2 && !strcmp(argv[1], "--open"))
        return open_files(argv + 2);
    if (argc == 3 && !strcmp(argv[1], "--corpus"))
        return write_corpus(argv[2]);
    int64_t n_files = argc > 1 ? atoll(argv[1]) : 10000;
    rng_state = argc > 2 ? strtoull(argv[2], NULL, 0) : 1;
    static gb bases[N_BASES];
    static bytes f;
    gb_file file;
    gb_file_create(&file);
    for (int i = 0; i < N_BASES; i++) {
        make_base(&bases[i], i);
        f.n = bases[i].n;
        memcpy(f.p, bases[i].p, f.n);
        check_file(&file, &f);
        EXPECT(n_accepted == i + 1, "base %d is refused", i);
    }
    for (int64_t i = 0; i < n_files && n_failed < 20; i++) {
        const gb *b = &bases[draw(N_BASES)];
        f.n = b->n;
        memcpy(f.p, b->p, f.n);
        for (uint64_t n = draw(4) ? 1 : 2 + draw(3); n > 0; n--)
            mutate(&f, b);
        int before = n_failed;
        check_file(&file, &f);
        if (n_failed > before)
            printf("  in file %lld\n", (long long)i);
    }
    close(file.fd);

    int n_passed = 1; /* nothing crashed */
#define KVD_X(name, value, exit_code, text)                                    \
    if (value <= KVD_E_GGUF_MAGIC && value != KVD_E_GGUF_BOUNDS) {             \
        int n = value == KVD_E_GGUF_MISSING ? looked_up[-(value)] : opened[-(value)]; \
        printf("%-16s %d\n", #name, n);                                        \
        EXPECT(n > 0, #name " not reached");                                   \
        n_passed += n > 0;                                                     \
    }
    KVD_ERRORS(KVD_X)
#undef KVD_X
    printf("%lld files, %d accepted\n", (long long)n_files, n_accepted);
    printf("%d passed, %d failed\n", n_passed, n_failed);
    return n_failed != 0;
}
