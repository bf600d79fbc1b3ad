#include "kern/x86/gemm_avx512.h"
void kvd__kern_fill_gemm_k_avx512(kvd_kern *k) { (void)k; }
