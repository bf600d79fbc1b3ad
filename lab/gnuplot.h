/* lab: the gnuplot process behind plot.c. */
#ifndef LAB_GNUPLOT_H
#define LAB_GNUPLOT_H

#include <stddef.h>
#include <stdio.h>

#include "kvd/kvd_error.h"

/* Run gnuplot over a script (a file positioned anywhere, read from its start; its
 * plots go to standard output) and hand back what it drew. *out owned (free), *n bytes.
 * 0; KVD_E_UNSUPPORTED: no gnuplot; KVD_E_NOMEM; KVD_E_IO with gnuplot's own words. */
int lab_gnuplot(FILE *script, char **out, size_t *n, kvd_error *err);

#endif
