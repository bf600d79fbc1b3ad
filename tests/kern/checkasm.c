/* checkasm: every kernel of every instruction set of this machine against the
 * portable scalar reference, by memcmp.
 *
 *   checkasm [--bench] [--seed N] [--only SUBSTRING] [--cpu NAME] [--exhaustive]
 *
 * The tables of kvd__kern_init are run one after the other; the plain scalar one
 * counts, too, since it is the same source with hardware FMA. One line per kernel
 * family, all failures by name, and a closing "N passed, N failed"; exit 1 if
 * anything failed. The seed is printed and repeats a run. --exhaustive runs
 * only the comparison of exp over all 2^32 inputs (minutes).
 *
 * Buffers end at an inaccessible page (check_alloc), so an overrun is a crash
 * here and not a wrong token later. */
#define _GNU_SOURCE
#include "checkasm.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "base/fpenv.h"
#include "base/rng.h"

/* ---- reports ---------------------------------------------------------------- */

/* A family is named by the first two words of its reports. */
typedef struct family {
    char name[64];
    int n_passed, n_failed;
} family;

static family families[64];
static int n_families;

static family *find_family(const char *line)
{
    size_t n = strcspn(line, " ");
    n += line[n] ? 1 + strcspn(line + n + 1, " ") : 0;
    for (int i = 0; i < n_families; i++)
        if (strlen(families[i].name) == n && !memcmp(families[i].name, line, n))
            return families + i;
    family *f = families + n_families;
    if (n_families < (int)(sizeof families / sizeof families[0]) - 1)
        n_families++; /* when the table is full its last entry takes all the rest */
    memset(f, 0, sizeof *f);
    snprintf(f->name, sizeof f->name, "%.*s", (int)n, line);
    return f;
}

static void print_families(void)
{
    for (int i = 0; i < n_families; i++)
        printf("%-32s %6d passed%s\n", families[i].name, families[i].n_passed, families[i].n_failed ? "  FAILED" : "");
    fflush(stdout);
    n_families = 0;
}

void check_report(check_context *c, bool ok, const char *format, ...)
{
    char line[256];
    va_list ap;
    va_start(ap, format);
    vsnprintf(line, sizeof line, format, ap);
    va_end(ap);

    family *f = find_family(line);
    if (ok) {
        f->n_passed++;
        c->n_passed++;
        return;
    }
    /* a broken kernel fails thousands of times: the first ones tell enough */
    if (f->n_failed++ < 10)
        printf("FAILED %s\n", line);
    c->n_failed++;
}

bool check_wanted(const check_context *c, const char *name) { return !c->only || strstr(name, c->only); }

/* ---- data ------------------------------------------------------------------- */

uint64_t check_random(check_context *c) { return kvd__splitmix64(&c->seed); }

float check_random_float(check_context *c, float magnitude)
{
    int32_t i = (int32_t)(check_random(c) >> 39) - (1 << 24); /* 25 bits, signed */
    return (float)i * 0x1p-24f * magnitude;
}

bool check_same_floats(const float *a, const float *b, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        if (memcmp(a + i, b + i, 4) != 0 && !(a[i] != a[i] && b[i] != b[i]))
            return false;
    return true;
}

/* ---- guarded memory --------------------------------------------------------- */

static size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

/* [guard page][whole pages, the buffer at their end][guard page] */
void *check_alloc(size_t n, size_t align)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE), used = round_up(n, align), body = round_up(used, page);
    char *p = mmap(NULL, body + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED || (body && mprotect(p + page, body, PROT_READ | PROT_WRITE))) {
        fprintf(stderr, "checkasm: out of memory\n");
        exit(2);
    }
    return p + page + body - used;
}

void check_free(void *p, size_t n, size_t align)
{
    if (!p)
        return;
    size_t page = (size_t)sysconf(_SC_PAGESIZE), used = round_up(n, align), body = round_up(used, page);
    munmap((char *)p + used - body - page, body + 2 * page);
}

/* ---- time ------------------------------------------------------------------- */

double check_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

double check_hz(void)
{
    static double hz;
    for (int round = 0; hz == 0 || round < 5; round++) {
        enum { N = 1000000 };
        double t = check_seconds();
        uint64_t x = 1;
        for (int i = 0; i < N; i++) {
            /* eight dependent additions of one cycle each; the compiler must not see through */
#define STEP __asm__ volatile("" : "+r"(x)); x += 3;
            STEP STEP STEP STEP STEP STEP STEP STEP
#undef STEP
        }
        __asm__ volatile("" : : "r"(x));
        double now = 8.0 * N / (check_seconds() - t);
        hz = now > hz ? now : hz;
    }
    return hz;
}

/* ---- the program ------------------------------------------------------------ */

static int usage(void)
{
    fprintf(stderr, "usage: checkasm [--bench] [--seed N] [--only SUBSTRING] [--cpu scalar|avx2|avx512|neon]"
                    " [--exhaustive]\n");
    return 2;
}

int main(int argc, char **argv)
{
    check_context c = {.seed = (uint64_t)time(NULL)};
    const char *cpu_name = NULL;
    bool exhaustive = false, any = false;
    for (int i = 1; i < argc; i++) {
        bool has_value = i + 1 < argc;
        if (!strcmp(argv[i], "--bench"))
            c.bench = true;
        else if (!strcmp(argv[i], "--exhaustive"))
            exhaustive = true;
        else if (!strcmp(argv[i], "--seed") && has_value)
            c.seed = strtoull(argv[++i], NULL, 0);
        else if (!strcmp(argv[i], "--only") && has_value)
            c.only = argv[++i];
        else if (!strcmp(argv[i], "--cpu") && has_value)
            cpu_name = argv[++i];
        else
            return usage();
    }
    kvd_kern ref, scalar, isa;
    kvd__kern_init_soft(&ref);
    kvd__kern_init(&scalar, KVD_CPU_SCALAR);
    c.ref = &ref;
    c.isa = &isa;
    uint64_t seed = c.seed;
    printf("checkasm: seed %llu\n", (unsigned long long)seed);
    kvd_fpenv env = kvd__fpenv_enter();
    for (int cpu = 0; cpu < KVD_CPU_COUNT; cpu++) {
        if (cpu_name && strcmp(cpu_name, kvd__cpu_name((kvd_cpu)cpu)) != 0)
            continue;
        if (!kvd__cpu_has((kvd_cpu)cpu)) {
            printf("%s: not on this machine, SKIPPED\n", kvd__cpu_name((kvd_cpu)cpu));
            continue;
        }
        any = true;
        kvd__kern_init(&isa, (kvd_cpu)cpu);
        c.seed = seed; /* the same data for each */
        if (exhaustive) {
            /* software FMA against hardware FMA, then that against the rest: faster */
            c.ref = cpu == KVD_CPU_SCALAR ? &ref : &scalar;
            check_exp_all(&c);
        } else {
            check_gemm(&c);
            check_vec(&c);
            check_attn(&c);
        }
        print_families();
    }
    kvd__fpenv_leave(env);
    if (cpu_name && !any) {
        fprintf(stderr, "checkasm: no such instruction set here: %s\n", cpu_name);
        return 2;
    }
    printf("%d passed, %d failed\n", c.n_passed, c.n_failed);
    return c.n_failed > 0;
}
