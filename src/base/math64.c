/* Elementary functions in f64 without libm.
 *
 * Each is the textbook scheme, argument reduction and then a Taylor series long
 * enough that its rest does not count, with the parts that must be better than
 * f64 carried as an unevaluated sum hi + lo (Dekker, "A floating-point technique
 * for extending the available precision", 1971). Only + - * / are used, each
 * rounded once (the build forbids contraction), so the bits are the same
 * everywhere; an FMA would be faster but is not everywhere. Series instead of
 * fitted polynomials: these functions make tables and sample tokens, and a
 * reader can check 1/k! without a tool. */
#include "base/math64.h"

#include <stdint.h>
#include <string.h>

#define ROUND_MAGIC 0x1.8p52 /* adding it rounds to an integer, to nearest even */
#define LOG2_E 0x1.71547652b82fep+0
/* ln 2 with 42 bits, so that n*LN2_HI is exact for |n| < 2^11, and the rest. */
#define LN2_HI 0x1.62e42fefa38p-1
#define LN2_LO 0x1.ef35793c7673p-45

static double from_bits(uint64_t u)
{
    double d;
    memcpy(&d, &u, 8);
    return d;
}

static uint64_t to_bits(double d)
{
    uint64_t u;
    memcpy(&u, &d, 8);
    return u;
}

static double infinity64(void) { return from_bits((uint64_t)0x7ff << 52); }
static double nan64(void) { return from_bits((uint64_t)0x7ff8 << 48); }

/* a*b = result + *lo exactly, far from overflow and underflow. */
static double two_product(double a, double b, double *lo)
{
    const double split = 0x1p27 + 1;
    double ca = split * a, ah = ca - (ca - a), al = a - ah;
    double cb = split * b, bh = cb - (cb - b), bl = b - bh;
    double p = a * b;
    *lo = ((ah * bh - p) + ah * bl + al * bh) + al * bl;
    return p;
}

/* e^(x + tail), |tail| below an ulp or so of x. */
static double exp_parts(double x, double tail)
{
    static const double inverse_factorial[] = {/* 1/2! .. 1/13! */
        1.0 / 2, 1.0 / 6, 1.0 / 24, 1.0 / 120, 1.0 / 720, 1.0 / 5040, 1.0 / 40320, 1.0 / 362880,
        1.0 / 3628800, 1.0 / 39916800, 1.0 / 479001600, 1.0 / 6227020800};

    if (x != x)
        return x;
    if (x > 710)
        return infinity64();
    if (x < -709)
        return 0;
    double n = (x * LOG2_E + ROUND_MAGIC) - ROUND_MAGIC;
    double hi = x - n * LN2_HI, lo = n * LN2_LO - tail; /* hi is exact */
    double r = hi - lo, c = (hi - r) - lo;               /* r + c, |r| < 0.3466 */
    double q = 0;
    for (int i = 11; i >= 0; i--)
        q = q * r + inverse_factorial[i];
    double y = 1 + (r + (c + r * r * q));
    /* 2^n in two steps: n = 1024 has no number of its own */
    int half = (int)n / 2, rest = (int)n - half;
    y = y * from_bits((uint64_t)(1023 + half) << 52) * from_bits((uint64_t)(1023 + rest) << 52);
    return y < 0x1p-1022 ? 0 : y;
}

double kvd__exp64(double x) { return exp_parts(x, 0); }

/* log x = result + *lo with a relative error of about 2^-64, for finite x > 0.
 *
 * x = 2^k * m, m in [sqrt 1/2, sqrt 2); s = (m-1)/(m+1);
 * log m = 2 atanh s = 2s * (1 + w/3 + w^2/5 + ...), w = s^2 < 0.0295. */
static double log_parts(double x, double *lo)
{
    const double third = 1.0 / 3, third_lo = 0x1.5555555555555p-56;
    int64_t k = 0;
    if (x < 0x1p-1022) {
        x *= 0x1p54;
        k = -54;
    }
    const uint64_t sqrt_half = 0x3fe6a09e667f3bcd;
    int64_t e = (int64_t)(to_bits(x) - sqrt_half) >> 52;
    double m = from_bits(to_bits(x) - ((uint64_t)e << 52));
    k += e;

    double f = m - 1, d = 1 + m, d_lo = m - (d - 1);
    double p_lo, s = f / d, p = two_product(s, d, &p_lo);
    double s_lo = ((f - p) - p_lo - s * d_lo) / d;

    double w_lo, w = two_product(s, s, &w_lo);
    w_lo += 2 * s * s_lo;
    double q = 0; /* w/5 + w^2/7 + ... + w^11/25: at most 2 % of 1/3, so plain f64 will do */
    for (int i = 25; i >= 5; i -= 2)
        q = (q + 1.0 / i) * w;
    double t = third + q, t_lo = (third - t) + q + third_lo;

    double a_lo, a = two_product(w, t, &a_lo);
    a_lo += w * t_lo + w_lo * t;
    double b_lo, b = two_product(2 * s, a, &b_lo);
    b_lo += 2 * s * a_lo + 2 * s_lo * a;

    double h = 2 * s + b, h_lo = (2 * s - h) + b + (b_lo + 2 * s_lo);
    double n = (double)k * LN2_HI, y = n + h;
    double y_lo = (n - y) + h + (h_lo + (double)k * LN2_LO);
    double sum = y + y_lo;
    *lo = (y - sum) + y_lo;
    return sum;
}

double kvd__log64(double x)
{
    double lo;
    if (!(x >= 0))
        return nan64();
    if (x == 0)
        return -infinity64();
    if (x == infinity64())
        return x;
    return log_parts(x, &lo);
}

double kvd__pow64(double x, double y)
{
    if (y == 0 || x == 1)
        return 1;
    double lo, hi = kvd__log64(x);
    /* NaN, zero, infinity, overflow and underflow need no second part */
    if (!(hi * y < 800 && hi * y > -800))
        return exp_parts(hi * y, 0);
    hi = log_parts(x, &lo);
    double p_lo, p = two_product(hi, y, &p_lo);
    return exp_parts(p, p_lo + lo * y);
}

void kvd__sincos64(double x, double *sin_out, double *cos_out)
{
    /* pi/2 in parts of at most 23 bits: their products with n < 2^30 are exact.
     * Together 159 bits, enough for the x closest to a multiple of pi/2. */
    static const double half_pi[] = {0x1.921fb4p+0, 0x1.4442dp-24, 0x1.84698p-48, 0x1.3198ap-69, 0x1.701b8p-92};
    const double half_pi_rest = 0x1.cd129024e088ap-115;

    double n = (x * 0x1.45f306dc9c883p-1 + ROUND_MAGIC) - ROUND_MAGIC;
    double r = x - n * half_pi[0], r_lo = 0; /* exact */
    for (int i = 1; i < 5; i++) {
        double t = n * half_pi[i], s = r - t, z = s - r;
        r_lo += (r - (s - z)) - (t + z); /* the rounding error of s (Knuth's TwoSum) */
        r = s;
    }
    r_lo -= n * half_pi_rest;
    double sum = r + r_lo;
    r_lo = (r - sum) + r_lo;
    r = sum; /* r + r_lo, |r| < 0.7854 */

    /* sin r = r + r*z*ps, cos r = 1 - z/2 + z*z*pc, by Taylor to r^19 and r^18 */
    double z = r * r, ps = 0, pc = 0;
    static const double inverse_factorial[] = {/* 1/3! .. 1/19! */
        1.0 / 6, 1.0 / 24, 1.0 / 120, 1.0 / 720, 1.0 / 5040, 1.0 / 40320, 1.0 / 362880, 1.0 / 3628800,
        1.0 / 39916800, 1.0 / 479001600, 1.0 / 6227020800, 1.0 / 87178291200, 1.0 / 1307674368000,
        1.0 / 20922789888000, 1.0 / 355687428096000, 1.0 / 6402373705728000, 1.0 / 121645100408832000};
    for (int i = 16; i >= 0; i -= 2)
        ps = inverse_factorial[i] - ps * z;
    ps = -ps;
    for (int i = 15; i >= 1; i -= 2)
        pc = inverse_factorial[i] - pc * z;
    double sine = r + (r_lo * (1 - 0.5 * z) + r * z * ps);
    double h = 0.5 * z, w = 1 - h;
    double cosine = w + (((1 - w) - h) + (z * z * pc - r * r_lo));

    int64_t quadrant = (int64_t)n & 3;
    double a = quadrant & 1 ? cosine : sine, b = quadrant & 1 ? sine : cosine;
    *sin_out = quadrant & 2 ? -a : a;
    *cos_out = quadrant == 1 || quadrant == 2 ? -b : b;
}
