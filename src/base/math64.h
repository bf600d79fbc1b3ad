/* base: exp, log, sin, cos, pow in f64 from + - * / only, so that every
 * conforming machine gives the same bits (libm does not). Used for RoPE tables
 * and the sampler, never in inner loops. Error below 2 ulp in the ranges stated;
 * tests/unit/test_math64.c compares with libm. */
#ifndef KVD_BASE_MATH64_H
#define KVD_BASE_MATH64_H

/* Any x; overflow gives +inf, underflow 0 (no subnormal results). */
double kvd__exp64(double x);

/* x > 0, finite. 0 gives -inf, negative or NaN gives NaN. */
double kvd__log64(double x);

/* x^y for x > 0: exp(y*log x) with log carried in two parts. */
double kvd__pow64(double x, double y);

/* |x| <= 2^30. */
void kvd__sincos64(double x, double *sin_out, double *cos_out);

#endif
