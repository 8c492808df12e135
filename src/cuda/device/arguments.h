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
    NORMFUSE_STATISTICS_COLUMN,  /* a column of the matrix that a block holds: a channel, channels last */
    NORMFUSE_STATISTICS_CHANNEL  /* finish: a channel, whatever the layout */
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
    NORMFUSE_GRADIENTS_NORMALIZED,  /* the same, the second one multiplied by the sample's rstd */
    NORMFUSE_GRADIENTS_OF_SAMPLES_NORMALIZED /* pairs of each sample, channel and block, multiplied likewise */
};

/* Values of signature::exchanges: how blocks that share a slab send one another what they have found. */
enum {
    NORMFUSE_EXCHANGE_THROUGH_MEMORY, /* another kernel joins it */
    NORMFUSE_EXCHANGE_IN_BLOCK,       /* one block has the slab */
    NORMFUSE_EXCHANGE_IN_CLUSTER,
    NORMFUSE_EXCHANGE_IN_GRID
};

/* Values of signature::work, of the body `finish`. */
enum {
    NORMFUSE_WORK_SHARES,     /* partial statistics of a set become fewer */
    NORMFUSE_WORK_STATISTICS, /* these become its statistics */
    NORMFUSE_WORK_RUNNING,    /* running statistics of instance norm */
    NORMFUSE_WORK_PARTS,      /* partial sums of a channel become one */
    NORMFUSE_WORK_GRADIENTS,  /* sums of channels become totals of sets and gradients of parameters */
    NORMFUSE_WORK_MERGE       /* shards become one */
};

/* Values of signature::straight, of the body `transpose`: whether copies go through shared memory. */
enum {
    NORMFUSE_COPIES_ACROSS, /* all do */
    NORMFUSE_COPIES_STRAIGHT,
    NORMFUSE_COPIES_MIXED
};

/* Threads of a block: of `finish` at most, of `transpose`. */
enum { NORMFUSE_FINISH_THREADS = 256, NORMFUSE_TRANSPOSE_THREADS = 256 };

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

/* Arguments that any body may read: parameters, statistics, sums, and the tensors that few calls have. */
struct normfuse_call_arguments {
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
    double eps_of_double, act_param_of_double, momentum, unbiased; /* n / (n - 1), n values of a norm group */
    double clamped_rstd; /* of eps_of_norm: what a norm of eps has; NaN: none is clamped */
};

/* The body `single`. A norm group is a matrix of rows of adjacent values; single.cuh says how threads share it. A block of
 * the grid is the part-th of those that share norm groups, of the walker-th of those that take turns with samples, of the
 * norm groups that lie beside one another in the block. Strides are in elements. */
struct normfuse_single_arguments {
    const char *x, *dy;
    char *out; /* y, or dx */
    int64_t sample_stride, group_stride, row_stride;
    int64_t outer_stride; /* positions: of samples of the call, whose norm groups are one after the other */
    int32_t rows, columns;           /* of a norm group; where columns are spread over blocks or tiles, of the sample */
    int32_t part_rows, part_columns; /* that a block has */
    int32_t next_rows, next_columns; /* from one block's first to the next one's: one of these is 0 */
    int32_t parts, walkers;
    struct normfuse_divisor by_parts, by_walkers;
    struct normfuse_divisor by_inner_groups; /* positions: norm groups of a sample of the call */
    int32_t groups, samples;
    int32_t sample_bits;    /* 2^bits samples are side by side in a block, and norm groups beside these */
    int32_t group_channels; /* from one norm group's first channel to the next one's */
    struct normfuse_call_arguments call;
};

/* The bodies `stream` and `held`. walk.cuh says what a slab is, and how threads share it. Strides are in elements. */
struct normfuse_stream_arguments {
    const char *x, *dy;
    char *out; /* y, or dx */
    int64_t sample_stride, slab_stride, row_stride, column_stride;
    int64_t row_jump;      /* row_step rows */
    int32_t rows, columns; /* of a slab */
    int32_t parts;         /* blocks that share a slab, beside those that share its rows */
    int32_t next_rows, part_rows, row_step; /* rows from a part to the next one, of a part (0: all), of a thread's step */
    int32_t next_vectors, part_vectors;     /* channels first: the same of a row */
    int32_t steps;                          /* channels first: that threads take in a row of a part */
    int32_t slabs, samples;
    int32_t slab_channels; /* channels first: of a slab */
    int32_t blocks_wide;   /* channels last: blocks that share rows */
    struct normfuse_divisor by_parts, by_blocks_wide, by_row_step;
    struct normfuse_divisor by_sample_slabs, by_channels, by_group, by_subgroup; /* group: channels of one */
    int32_t backwards;                                /* the last block begins: what was read last is still in the L2 */
    int32_t sets_are_of_samples, sums_are_of_samples; /* or of all together */
    int32_t set_triples, part_slots; /* triples of a set; of these, those that a subgroup's parts have */
    int32_t subgroup;                /* channels of a group whose statistics a block joins */
    int32_t joined_rows, copies;     /* rows folded whose sums a block joins; that have sums of their own */
    int32_t sum_parts;               /* 1: each part of a slab leaves sums of all its channels; 0: of its own */
    double *triples;                 /* count, mean, squares: [set][subgroup][part][copy] */
    const double *totals;            /* pairs of each set, of a backward */
    double set_values;
    /* held */
    int32_t kept;      /* vectors of a thread in shared memory */
    int32_t slab_sets; /* norm groups of a block's slab */
    int32_t ring_at, sums_at; /* bytes, in dynamic shared memory */
    int32_t turns;     /* slabs of a block, one after the other */
    char *messages;    /* of all blocks of a slab, twice where there are turns: [turn % 2][slab of the grid][part][norm group] */
    uint32_t *barriers;
    struct normfuse_call_arguments call;
};

/* The last blocks of `finish` join pairs of slopes, of `outers` that are `apart` pairs from one another and have as many
 * slots each; each item of its own place. */
struct normfuse_finish_slopes {
    int32_t first_block, lanes, items;
    int32_t outers, apart;
    int32_t leaves; /* the sum in the place of the first pair, for another launch */
    struct normfuse_divisor by_slots;
};

/* The body `finish`, but for merges. Items are sets, shares of them, or channels; `lanes` threads share one, a power of
 * two. A set is a norm group, or a channel where all samples share statistics. */
struct normfuse_finish_arguments {
    double *sums; /* triples of each set and part, or pairs of each channel and slot; a shard's where these are given */
    double *totals;     /* pairs of each set: what the backward subtracts */
    double *statistics; /* of each set: mean, rstd, unbiased variance */
    double *shard;      /* what a sharded call leaves: a triple of each set, or pairs */
    int32_t lanes, items;
    int32_t samples, channels;
    struct normfuse_divisor by_groups;       /* norm groups of a sample */
    struct normfuse_divisor by_set_channels; /* channels of a norm group */
    /* Partial statistics of a set: all, those of a share, and those that are joined, one of each share. */
    int32_t triples, share, joined;
    struct normfuse_divisor by_shares; /* items that first join those of a set */
    /* Partial sums of a channel: their room, their number, and in by_slots the most of them, which is at least 1. */
    int32_t slot_stride, slots;
    struct normfuse_divisor by_slots;
    int32_t gradient_lanes, totals_blocks; /* threads that share a channel; the blocks ahead of these, which have totals */
    int32_t accumulate, accumulate_slope;
    struct normfuse_place weight, bias, scale;
    struct normfuse_place mean, rstd, running_mean, running_var;
    struct normfuse_place dweight, dbias, dscale, dshift, dslope;
    double eps, momentum;
    double *slope_sums; /* pairs as `sums`: what parts found of prelu's slopes, and 0 */
    struct normfuse_finish_slopes slopes;
};

/* The work MERGE of `finish`. An item is a triple, or a pair. */
struct normfuse_merge_arguments {
    const double *in; /* [shards][items] */
    double *out;      /* [items] */
    int64_t shards, items;
    const double *stats; /* triples, whose counts divide factor * sums; NULL: nothing does */
    int64_t share;       /* pairs a triple */
    double factor;
};

/* The body `transpose`. Axes of a tensor that is copied to other strides: `a`, on which the source's elements are
 * nearest; `b`, the same of the destination, or the next one where that is `a`; and the third. A block has a tile. */
struct normfuse_transpose_axis {
    int64_t size, from, to; /* strides in elements */
};
struct normfuse_transpose_copy {
    const char *from;
    char *to;
    struct normfuse_transpose_axis a, b, outer;
    int32_t tile_a, tile_b, tile_outer;
    int32_t first_block;
    int32_t pitch;    /* of a row of the tile in shared memory, in elements */
    int32_t shared;   /* bytes of it */
    int32_t straight; /* nothing goes through shared memory */
    int32_t from_vectors, to_vectors; /* of 16 bytes; else elements */
    int32_t from_plane, to_plane;     /* the tile's elements of a and b are adjacent, and read or written as one row */
    struct normfuse_divisor by_tiles_a, by_tiles_b, by_tile_a, by_tile_b;
    struct normfuse_divisor by_read, by_write; /* vectors or elements of a row */
};
/* Five of a call's tensors are inputs: x, pre_add, post_add, dy, du. */
enum { NORMFUSE_TRANSPOSE_COPIES = 5 };
struct normfuse_transpose_arguments {
    int64_t blocks; /* of all copies */
    int32_t count;
    struct normfuse_transpose_copy copies[NORMFUSE_TRANSPOSE_COPIES];
};

#endif
