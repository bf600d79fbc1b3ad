/* kern/x86: two macros of the compute kernels.
 *
 * INLINE functions are written once and made several times, with constant types
 * and sizes; UNROLL(n) marks their loops of constant length. Both compilers would
 * unroll these by themselves, but too late to keep an array of accumulators in
 * registers (a third of the speed). */
#ifndef KVD_KERN_X86_UNROLL_H
#define KVD_KERN_X86_UNROLL_H

#define INLINE static inline __attribute__((always_inline))

#define KVD_STR(x) #x
#if defined(__clang__)
#define UNROLL(n) _Pragma("clang loop unroll(full)")
#else
#define UNROLL(n) _Pragma(KVD_STR(GCC unroll n))
#endif

#endif
