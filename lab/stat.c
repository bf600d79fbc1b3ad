/* Arithmetic that several experiments share, all in f64. */
#define _GNU_SOURCE
#include "lab/lab.h"

#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <string.h>
#include <time.h>

/* log sum exp(x), shifted by the greatest. */
static double log_sum(const float *x, int64_t n)
{
    double max = (double)x[0], sum = 0;
    for (int64_t i = 1; i < n; i++)
        if ((double)x[i] > max)
            max = (double)x[i];
    for (int64_t i = 0; i < n; i++)
        sum += exp((double)x[i] - max);
    return max + log(sum);
}

/* The sum over p ln(p/q) has terms of both signs that cancel: between two runs that
 * differ in the last bits nothing but rounding would be left of it. As p and q both
 * sum to 1, the terms p ln(p/q) - p + q give the same sum, and none is negative. With
 * d = ln(p/q) such a term is p (d - 1 + exp(-d)), for small d by its series. */
double lab_kl_bits(const float *p, const float *q, int64_t n)
{
    if (n < 1 || !memcmp(p, q, (size_t)n * sizeof *p))
        return 0;
    double zp = log_sum(p, n), zq = log_sum(q, n), sum = 0;
    for (int64_t i = 0; i < n; i++) {
        double lp = (double)p[i] - zp, lq = (double)q[i] - zq, d = lp - lq, a = exp(lp);
        if (fabs(d) < 1e-2)
            sum += a * d * d * (1.0 / 2 - d * (1.0 / 6 - d * (1.0 / 24 - d * (1.0 / 120 - d / 720))));
        else if (a > 0)
            sum += a * d - a + exp(lq);
        else
            sum += exp(lq);
    }
    return sum / log(2);
}

double lab_log_prob(const float *x, int64_t n, int64_t i)
{
    return (double)x[i] - log_sum(x, n);
}

int32_t lab_argmax(const float *x, int64_t n)
{
    int64_t best = 0;
    for (int64_t i = 1; i < n; i++)
        if (x[i] > x[best])
            best = i;
    return (int32_t)best;
}

double lab_match(const int32_t *a, const int32_t *b, int64_t n)
{
    int64_t same = 0;
    for (int64_t i = 0; i < n; i++)
        same += a[i] == b[i];
    return n > 0 ? (double)same / (double)n : 1;
}

double lab_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

void lab_hash(const void *data, size_t n, char hex[17])
{
    const unsigned char *p = data;
    uint64_t h = 14695981039346656037u;
    for (size_t i = 0; i < n; i++)
        h = (h ^ p[i]) * 1099511628211u;
    snprintf(hex, 17, "%016" PRIx64, h);
}

int lab_fail(kvd_error *err, int code, const char *format, ...)
{
    va_list ap;
    if (err) {
        *err = (kvd_error){.code = code, .offset = -1};
        va_start(ap, format);
        vsnprintf(err->message, sizeof err->message, format, ap);
        va_end(ap);
    }
    return code;
}

int lab_tick(const lab *l, const char *what, int64_t done, int64_t total, kvd_error *err)
{
    if (!l->tick || !l->tick(l->tick_ctx, what, done, total))
        return 0;
    return lab_fail(err, KVD_E_CANCELLED, "interrupted");
}

static int on_pass(void *ctx, int64_t done, int64_t total, int64_t rows, int64_t recomputed)
{
    const lab *l = ctx;
    (void)done, (void)total, (void)rows, (void)recomputed;
    return l->tick(l->tick_ctx, NULL, 0, 0);
}

void lab_watch(const lab *l, kvd_session *s)
{
    if (l->tick)
        kvd_session_set_progress(s, on_pass, (void *)(uintptr_t)l); /* read only there */
}
