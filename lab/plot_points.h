/* lab: what a plot shows, as plot_points.c reads it from a table and plot.c draws it. */
#ifndef LAB_PLOT_POINTS_H
#define LAB_PLOT_POINTS_H

#include "lab/lab.h"

enum { MOST_SERIES = 24, LABEL = 40 };

typedef struct {
    char (*label)[LABEL];
    int n;
    bool words; /* values are indices of labels */
} axis;

typedef struct {
    double x, y, z;
    int s;
    bool has_x, has_y, has_z;
} point;

typedef struct {
    const char *kind, *title, *name;
    const char *x_title, *y_title, *z_title;
    int z_decimals;
    axis x, y, by;
    bool heat, bars, log_x, log_y, png;
    point *p;
    int n, n_series, n_zero[MOST_SERIES], n_drawn[MOST_SERIES];
    int height;
} drawing;

/* Read the points that a plot of the result asks for. 0; KVD_E_ARG for a plot of a
 * table or column that is not there; KVD_E_NOMEM. Free the drawing in every case. */
int lab_plot_points(const json_t *result, const json_t *plot, drawing *d, kvd_error *err);
void lab_plot_free(drawing *d);
/* Can this point be drawn? */
bool lab_plot_visible(const drawing *d, const point *p);

#endif
