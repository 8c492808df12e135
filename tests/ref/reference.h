/* SPDX-License-Identifier: MIT
 *
 * reference.h - what normalization layers are, in double precision and naive loops. It shares nothing with the library
 * but the public header's enums; tests/cpu/test_reference.c checks its gradients by finite differences.
 *
 * The unit is one set: the values that share statistics, dense, as [rows, channels, positions].
 *
 *   group norm   one sample and one group: rows 1, channels C/groups, positions S
 *   batch norm   one channel: rows N, channels 1, positions S
 *   channel norm one position and one group: rows 1, channels C/groups, positions 1
 *   affine       one channel, likewise, without statistics */
#ifndef NORMFUSE_TEST_REFERENCE_H
#define NORMFUSE_TEST_REFERENCE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "elements.h"
#include "normfuse.h"

/* ---- activations ---------------------------------------------------------------------------------------------- */

/* parameter: the slope of leaky_relu and prelu, elu's alpha; others ignore it. */
double reference_default_parameter(int activation);
double reference_activation(int activation, double parameter, double z);
/* The derivative; at kinks PyTorch's choice. */
double reference_slope(int activation, double parameter, double z);

/* ---- one set -------------------------------------------------------------------------------------------------- */

struct reference_set {
    int64_t rows, channels, positions;
    int activation;
    double parameter;
    /* [rows, channels, positions]; u is x + pre_add. NULL: 0 */
    const double *u, *post_add, *dy, *du;
    /* backward: NULL, or y, of which act' is what it is of z */
    const double *y;
    /* [rows, channels]; NULL: 1, 0, 0, 0 */
    const double *weight, *bias, *scale, *shift;
    /* [rows, channels]: prelu's, in the place of parameter */
    const double *slope;
    /* Normalization is (u - mean) * rstd; affine: mean 0, rstd 1. */
    double mean, rstd;
    /* True if mean and rstd depend on u: false for given (running) statistics and for affine. */
    bool has_statistics;
    bool is_root_mean_square; /* mean is 0, and does not */
    bool is_clamped;          /* rstd does not: the norm was below its least */
    /* The divisor of the means of the backward; a shard's is the count of all shards. */
    double set_values;
};

struct reference_statistics {
    double count, mean, m2; /* m2: sum of (u - mean)^2 */
};

/* Two passes: the mean first, centred squares second. */
struct reference_statistics reference_statistics(const double *u, int64_t rows, int64_t positions);
/* About 0: m2 is the sum of u^2. */
struct reference_statistics reference_squares(const double *u, int64_t rows, int64_t positions);
double reference_rstd(double variance, double eps);
/* The rstd of values whose norm is the root of m2, but eps at least: the normalized ones have a mean square of 1. */
double reference_rstd_of_norm(double count, double m2, double eps);
/* (1 - momentum) * old + momentum * new. */
double reference_running(double old, double new_value, double momentum);

/* The activation's parameter of a row's channel, row * channels + channel. */
double reference_parameter(const struct reference_set *set, int64_t pair);

/* z before the activation, of the value at (row, channel, position); or y, where that is given. */
double reference_z(const struct reference_set *set, int64_t row, int64_t channel, int64_t position);

/* y [rows, channels, positions]. */
void reference_forward(const struct reference_set *set, double *y);

/* Gradients; each may be NULL but dz, which is dy through the activation (= the gradient of post_add).
 * dz, dx [rows, channels, positions]; the others [rows, channels], to be summed over rows (batch norm) or samples. */
struct reference_gradients {
    double *dz, *dx;
    double *dweight, *dbias, *dscale, *dshift;
    double *dslope; /* prelu's: the sum of dy * z where z is not above 0 */
};
void reference_backward(const struct reference_set *set, const struct reference_gradients *gradients);

#endif
