#include <string.h>

#include "kern/kern.h"

#if defined(KVD_HAVE_X86)
#include <cpuid.h>

/* clang 14 does not know this one by __builtin_cpu_supports. */
static bool has_f16c(void)
{
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

#if defined(KVD_HAVE_NEON) && defined(__linux__)
#include <sys/auxv.h>

/* Every AArch64 has NEON; SDOT is optional before Armv8.4 (Cortex-A72 has none). */
static bool has_dotprod(void)
{
    return getauxval(AT_HWCAP) >> 20 & 1; /* HWCAP_ASIMDDP */
}
#elif defined(KVD_HAVE_NEON)
static bool has_dotprod(void) { return true; } /* Apple's have it, all of them */
#endif

static const char *const names[KVD_CPU_COUNT] = {"scalar", "avx2", "avx512", "neon"};

const char *kvd__cpu_name(kvd_cpu cpu) { return names[cpu]; }

bool kvd__cpu_has(kvd_cpu cpu)
{
    switch (cpu) {
    case KVD_CPU_SCALAR:
        return true;
#if defined(KVD_HAVE_X86)
    case KVD_CPU_AVX2:
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
    case KVD_CPU_AVX512:
        return kvd__cpu_has(KVD_CPU_AVX2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512vnni");
#endif
#if defined(KVD_HAVE_NEON)
    case KVD_CPU_NEON:
        return has_dotprod();
#endif
    default:
        return false;
    }
}

kvd_cpu kvd__cpu_best(void)
{
    for (int c = KVD_CPU_COUNT - 1; c > 0; c--)
        if (kvd__cpu_has((kvd_cpu)c))
            return (kvd_cpu)c;
    return KVD_CPU_SCALAR;
}

void kvd__kern_init_soft(kvd_kern *k)
{
    memset(k, 0, sizeof *k);
    kvd__kern_fill_scalar(k);
    kvd__kern_fill_gemm_scalar(k);
    k->name = "soft";
}

void kvd__kern_init(kvd_kern *k, kvd_cpu cpu)
{
    kvd__kern_init_soft(k);
#if defined(KVD_HAVE_X86)
    if (__builtin_cpu_supports("fma")) {
        kvd__kern_fill_scalar_fma(k);
        kvd__kern_fill_gemm_scalar_fma(k);
    }
    if (cpu == KVD_CPU_AVX2 || cpu == KVD_CPU_AVX512) {
        kvd__kern_fill_avx2(k);
        kvd__kern_fill_attn_avx2(k);
        kvd__kern_fill_gemm_avx2(k);
    }
    if (cpu == KVD_CPU_AVX512) {
        kvd__kern_fill_avx512(k);
        kvd__kern_fill_attn_avx512(k);
        kvd__kern_fill_gemm_avx512(k);
    }
#endif
#if defined(KVD_HAVE_NEON)
    if (cpu == KVD_CPU_NEON) {
        kvd__kern_fill_neon(k);
        kvd__kern_fill_gemm_neon(k);
    }
#endif
    k->name = kvd__cpu_name(cpu);
}
