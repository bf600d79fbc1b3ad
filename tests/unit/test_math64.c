/* base/math64.c against libm in extended precision, in units of the last place,
 * and its ends. Where long double is no wider than double the bound is looser by
 * the reference's own error. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "base/math64.h"
#include "base/rng.h"

enum { N = 200000 };
static const double BOUND = sizeof(long double) > 8 ? 1.0 : 2.0;

static double uniform(uint64_t *seed, double lo, double hi)
{
    return lo + (hi - lo) * ((double)(kvd__splitmix64(seed) >> 11) * 0x1p-53);
}

static double ulps(double got, long double want)
{
    int e;
    frexp((double)want, &e);
    return (double)(fabsl((long double)got - want) / ldexpl(1.0L, e - 53));
}

static void assert_below(double worst, double bound)
{
    if (!(worst <= bound))
        fail_msg("error %.4f ulp, allowed %.2f", worst, bound);
}

static void test_exp(void **state)
{
    (void)state;
    uint64_t seed = 1;
    double worst = 0;
    for (int i = 0; i < N; i++) {
        double x = i % 2 ? uniform(&seed, -708, 709.5) : uniform(&seed, -1, 1);
        worst = fmax(worst, ulps(kvd__exp64(x), expl((long double)x)));
    }
    assert_below(worst, BOUND);
    assert_true(kvd__exp64(0.0) == 1.0 && kvd__exp64(-0.0) == 1.0);
    assert_true(isfinite(kvd__exp64(709.782712893384)) && isinf(kvd__exp64(709.7827128933841)));
    assert_true(kvd__exp64(-708.396418532264) > 0 && kvd__exp64(-708.3964185322642) == 0);
    assert_true(isinf(kvd__exp64(INFINITY)) && kvd__exp64(-INFINITY) == 0 && isnan(kvd__exp64(NAN)));
}

static void test_log(void **state)
{
    (void)state;
    uint64_t seed = 2;
    double worst = 0;
    for (int i = 0; i < N; i++) {
        double x;
        uint64_t bits = kvd__splitmix64(&seed) & 0x7fefffffffffffff; /* any positive number, subnormals too */
        memcpy(&x, &bits, 8);
        if (i % 3 == 0)
            x = uniform(&seed, 0.5, 2);
        else if (i % 3 == 1)
            x = 1 + ldexp(uniform(&seed, -1, 1), -(int)(bits % 52) - 1);
        worst = fmax(worst, ulps(kvd__log64(x), logl((long double)x)));
    }
    assert_below(worst, BOUND);
    assert_true(kvd__log64(1.0) == 0 && kvd__log64(0.0) == -INFINITY);
    assert_true(isnan(kvd__log64(-1.0)) && isnan(kvd__log64(NAN)) && isinf(kvd__log64(INFINITY)));
}

static void test_pow(void **state)
{
    (void)state;
    uint64_t seed = 3;
    double worst = 0;
    for (int i = 0; i < N; i++) {
        double x = exp(uniform(&seed, -15, 15)), y = uniform(&seed, -40, 40);
        if (i % 2) { /* what RoPE asks for: base^(-2i/n) */
            x = i % 4 == 1 ? 10000 : 1000000;
            y = -(double)(i / 4 % 128) / 128;
        }
        worst = fmax(worst, ulps(kvd__pow64(x, y), powl((long double)x, (long double)y)));
    }
    assert_below(worst, BOUND);
    assert_true(kvd__pow64(10.0, 0.0) == 1 && kvd__pow64(1.0, 1e300) == 1 && kvd__pow64(2.0, 10.0) == 1024);
    assert_true(isinf(kvd__pow64(2.0, 1e300)) && kvd__pow64(2.0, -1e300) == 0 && kvd__pow64(2.0, -1100.0) == 0);
    assert_true(kvd__pow64(0.0, 2.0) == 0 && isinf(kvd__pow64(0.0, -2.0)) && isnan(kvd__pow64(-1.0, 2.0)));
}

static void test_sincos(void **state)
{
    (void)state;
    uint64_t seed = 4;
    double worst = 0;
    for (int i = 0; i < N; i++) {
        double s, c, x = i % 2 ? uniform(&seed, -0x1p30, 0x1p30) : uniform(&seed, -10, 10);
        if (i % 5 == 0) /* the f64 next to a multiple of pi/2: all digits cancel */
            x = (double)((long double)(i / 5 + 1) * 1.57079632679489661923L);
        kvd__sincos64(x, &s, &c);
        /* the reference rounds pi to 66 bits inside sinl on x87: leave out its own cancellation */
        if (fabs(s) > 1e-6)
            worst = fmax(worst, ulps(s, sinl((long double)x)));
        if (fabs(c) > 1e-6)
            worst = fmax(worst, ulps(c, cosl((long double)x)));
    }
    assert_below(worst, BOUND);

    double s, c;
    kvd__sincos64(0.0, &s, &c);
    assert_true(s == 0 && c == 1);
    /* cos of the f64 next to pi/2 is the rest of pi/2, known exactly */
    kvd__sincos64(0x1.921fb54442d18p+0, &s, &c);
    assert_true(s == 1 && c == 0x1.1a62633145c07p-54);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_exp),
        cmocka_unit_test(test_log),
        cmocka_unit_test(test_pow),
        cmocka_unit_test(test_sincos),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
