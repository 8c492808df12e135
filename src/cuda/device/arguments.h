/* SPDX-License-Identifier: MIT
 *
 * arguments.h - what kernels that are compiled at run time receive: sizes, strides, addresses. What a call *is* (types,
 * which tensors there are, its activation) is in its signature. C and CUDA C; host and device agree by this file. */
#ifndef NORMFUSE_CUDA_ARGUMENTS_H
#define NORMFUSE_CUDA_ARGUMENTS_H

#if defined(__CUDACC_RTC__)
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
#else
#include <stdint.h>
#endif

/* Values of signature::statistics: which values share a mean and an rstd. */
enum {
    NORMFUSE_STATISTICS_NONE,    /* there are none: affine */
    NORMFUSE_STATISTICS_RUNNING, /* given ones of each channel: evaluation */
    NORMFUSE_STATISTICS_GROUP,   /* a norm group */
    NORMFUSE_STATISTICS_COLUMN   /* a column of the matrix that a block holds: a channel, channels last */
};

/* Values of signature::parameters: what has a weight of its own. */
enum {
    NORMFUSE_PARAMETERS_OF_GROUP,
    NORMFUSE_PARAMETERS_OF_ROW,
    NORMFUSE_PARAMETERS_OF_COLUMN
};

/* Values of signature::gradients: where the sums of channels go, of which parameters get gradients. */
enum {
    NORMFUSE_GRADIENTS_NONE,
    NORMFUSE_GRADIENTS_DIRECT,     /* one block has all of a channel, and writes its gradients */
    NORMFUSE_GRADIENTS_OF_SAMPLES,  /* pairs of doubles of each sample and channel, for a later kernel */
    NORMFUSE_GRADIENTS_OF_CHANNELS, /* pairs of each channel and block */
    NORMFUSE_GRADIENTS_NORMALIZED   /* the same, the second one multiplied by the sample's rstd */
};

/* Division by what is known before the launch: x / divisor = (high(x * multiplier) + x) >> shift for x below 2^31
 * (Granlund and Montgomery 1994). */
struct normfuse_divisor {
    uint32_t divisor, multiplier, shift;
};

/* Element (sample, channel) of a parameter is at data + sample * stride + channel * stride, in elements. */
struct normfuse_place {
    char *data;
    int32_t sample, channel;
};

/* The body `single`. A norm group is a matrix of rows of adjacent values; single.cuh says how threads share it. A block of
 * the grid is the part-th of those that share norm groups, of the walker-th of those that take turns with samples, of the
 * norm groups that lie beside one another in the block. Strides are in elements. */
struct normfuse_single_arguments {
    const char *x, *dy;
    char *out; /* y, or dx */
    int64_t sample_stride, group_stride, row_stride;
    int32_t rows, columns;           /* of a norm group; where columns are spread over blocks, of the sample */
    int32_t part_rows, part_columns; /* that a block has */
    int32_t next_rows, next_columns; /* from one block's first to the next one's: one of these is 0 */
    int32_t parts, walkers;
    struct normfuse_divisor by_parts, by_walkers;
    int32_t groups, samples;
    int32_t sample_bits;    /* 2^bits samples are side by side in a block, and norm groups beside these */
    int32_t group_channels; /* from one norm group's first channel to the next one's */
    struct normfuse_place weight, bias;
    struct normfuse_place mean, rstd;
    float eps, act_param, values, share; /* values of a norm group, and 1 / values */

    struct normfuse_place dweight, dbias;
    double *sums, *slope_sums;
    int32_t sum_slots, part_slots; /* sums of a channel; those of the blocks of a norm group */
    int32_t accumulate, unused;
    double *statistics; /* of each sample and norm group: mean, rstd, unbiased variance */
    int32_t channel_groups, channels; /* of a sample: norm groups, channels */
    const char *pre_add, *post_add, *du;
    char *u, *dpost_add;
    struct normfuse_place scale, shift, pre_bias, slope;
    struct normfuse_place running_mean, running_var;
    double eps_of_double, act_param_of_double, momentum;
};

#endif
