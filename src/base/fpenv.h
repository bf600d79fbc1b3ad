/* base: the floating-point environment of the numeric contract: round to
 * nearest even, no flush-to-zero, no denormals-are-zero, whatever the caller has
 * set. Entered by every public call that computes and by every pool thread. */
#ifndef KVD_BASE_FPENV_H
#define KVD_BASE_FPENV_H

#include <stdint.h>

typedef struct kvd_fpenv {
    uint64_t control;
} kvd_fpenv;

static inline kvd_fpenv kvd__fpenv_enter(void)
{
    kvd_fpenv saved = {0};
#if defined(__x86_64__)
    saved.control = __builtin_ia32_stmxcsr();
    /* all exceptions masked; rounding, FTZ (15) and DAZ (6) bits zero */
    __builtin_ia32_ldmxcsr((unsigned)(saved.control & 0x3fu) | 0x1f80u);
#elif defined(__aarch64__)
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved.control));
    /* all of it zero: rounding, FZ and FZ16, DN, the alternative f16 (AHP), traps,
     * and what FEAT_AFP adds */
    __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)0));
#endif
    return saved;
}

static inline void kvd__fpenv_leave(kvd_fpenv saved)
{
#if defined(__x86_64__)
    __builtin_ia32_ldmxcsr((unsigned)saved.control);
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" : : "r"(saved.control));
#endif
}

#endif
