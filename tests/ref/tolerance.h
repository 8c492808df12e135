/* SPDX-License-Identifier: MIT
 *
 * tolerance.h - how far a right result may be from the exact one. Each function is a bound of docs/numerics.md,
 * computed from the data; nothing here is fitted to what the library gives. Bounds are worst cases over all roundings;
 * products of two of them are covered by a factor of 1.01. */
#ifndef NORMFUSE_TEST_TOLERANCE_H
#define NORMFUSE_TEST_TOLERANCE_H

#include <stdbool.h>
#include <stdint.h>

#include "normfuse.h"

/* The arithmetic that a set's values go through. */
struct tolerance_arithmetic {
    double unit;            /* half an ulp of 1 in the compute type */
    double tiny;            /* its smallest subnormal */
    double additions;       /* most roundings that a value meets on its way into a chunk's sum */
    /* CUDA: additions are those of the whole way, of which so many are in a thread, in joins below the last, in it. */
    double thread_additions, joined, joined_last;
    double shift_additions; /* the same of the first shift */
    double shift_ratio;     /* values of a piece's first chunk, divided by those that its shift is the mean of */
    int64_t shift_values;   /* every shift is the mean of at least so many adjacent values, or of the whole set; */
    double drift;           /* the most that such a mean is from the set's: tolerance_drift, or infinity */
    double joins;           /* most chunks and pieces of a set, which are joined in double */
    bool is_double;
    bool exact_sums; /* the data are such that every sum is exact */
    bool on_cuda;    /* then activations are the device's, faster where */
    bool is_stored_half; /* results are stored in 16 bits */
    double shift_unit;   /* how far, relatively, the shift that elements are taken about may be from the mean */
    double coefficient_roundings; /* of what elements are multiplied with */
    double gradient_roundings;    /* of a product on its way into the backward's sums, beside dy times the slope, the centring of u
                                     and the product itself */
    bool small_sets;              /* gradients of parameters are sums of rows of several samples */
    double parameter_additions, parameter_joins; /* the same as additions and joins, of gradients of parameters */
};

/* device: NORMFUSE_CPU or NORMFUSE_CUDA. A norm group of `rows` rows (or, in columns, of `channels` columns) of
 * `positions` values each. ambiguous: the tensor has one channel or one position, and may be seen either way. */
struct tolerance_arithmetic tolerance_arithmetic(int32_t device, normfuse_type type, bool columns, bool ambiguous,
                                                 int64_t rows, int64_t channels, int64_t positions);

/* A group norm on the CPU: what is different where its sets are small, `channels` channels of `positions` values.
 * Changes nothing for others. */
void tolerance_small_sets(struct tolerance_arithmetic *arithmetic, bool columns, int64_t channels, int64_t positions);

/* Norm over `channels` channels of each of `positions` positions of all samples. */
struct tolerance_arithmetic tolerance_channels(normfuse_type type, bool columns, bool ambiguous, int64_t channels,
                                               int64_t positions);

/* Roundings that sums over all samples have beside `additions`: on CUDA those of a channel go on in a thread from one
 * sample of few positions to the next, on the CPU those of small sets from one sample to the next. */
double tolerance_sample_additions(const struct tolerance_arithmetic *arithmetic, bool columns, int64_t samples,
                                  int64_t positions);

/* The data's own drift: how far the mean of shift_values or more adjacent values may be from the mean of all. u is
 * [rows, channels, positions]; in columns a channel's values are adjacent to each other only. */
double tolerance_drift(const struct tolerance_arithmetic *arithmetic, bool columns, const double *u, int64_t rows,
                       int64_t channels, int64_t positions, double mean);

struct tolerance_statistics {
    double mean, m2; /* absolute */
    double rstd;     /* relative */
};
struct tolerance_statistics tolerance_statistics(const struct tolerance_arithmetic *arithmetic, double count,
                                                 double mean, double m2, double eps);

/* The bounds of a norm group of `count` channels of a position. */
struct tolerance_statistics tolerance_channel_statistics(const struct tolerance_arithmetic *arithmetic, double count,
                                                         double mean, double m2, double eps, int32_t statistics,
                                                         int32_t eps_kind);

/* The affine of one channel of one sample: z = gain * (u - mean) + offset [+ post_add]. */
struct tolerance_affine {
    double gain, offset;
    double offset_parts;              /* sizes of what offset is the sum of */
    double mean;                      /* what is subtracted */
    double mean_error, gain_error;    /* of mean, absolute, and of rstd, relative; 0 where both are given */
    bool has_post_add;
};
/* z0: z before post_add. */
double tolerance_z(const struct tolerance_arithmetic *arithmetic, const struct tolerance_affine *affine, double centred,
                   double z0, double z);
/* |u - k| where k is the shift that passes subtract: the mean, in the compute type. */
double tolerance_shifted(const struct tolerance_arithmetic *arithmetic, const struct tolerance_affine *affine,
                         double centred);

/* act(z + error of z) as it is computed, against y = act(z). */
double tolerance_activation(const struct tolerance_arithmetic *arithmetic, int activation, double parameter, double z,
                            double y, double z_error);
/* The same of the derivative. Where z is so near a kink that the other side may be taken, the jump is part of it. */
double tolerance_slope(const struct tolerance_arithmetic *arithmetic, int activation, double parameter, double z,
                       double z_error);

/* Sums over one channel of one sample or over one channel: what a value adds. */
double tolerance_growth(double roundings, double unit);

/* `error` of a value, and storing it in a type. */
double tolerance_stored(normfuse_type type, double value, double error);
/* The largest finite value of a type, and half an ulp of 1. */
double tolerance_largest(normfuse_type type);
double tolerance_unit(normfuse_type type);

#endif
