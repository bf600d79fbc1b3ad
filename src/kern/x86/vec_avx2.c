/* kern: everything but the matrix products, for avx2. */
#include "kern/kern.h"

void kvd__kern_fill_avx2(kvd_kern *k) { (void)k; }
