/* kern: everything but the matrix products, for avx512. */
#include "kern/kern.h"

void kvd__kern_fill_avx512(kvd_kern *k) { (void)k; }
