/* SPDX-License-Identifier: MIT
 *
 * kernels.h - what host and kernels agree on: which kernels there are (kernels.def) and what each is given. Included by
 * C and by CUDA C. */
#ifndef NORMFUSE_CUDA_KERNELS_H
#define NORMFUSE_CUDA_KERNELS_H

#include <stdint.h>

#include "../problem.h"

/* How a kernel loads, and how the sums of the blocks that share a norm group travel; README.md has the matrix.  `elementwise`
 * of rows, both of general and `additions` take every addition, `grid_additions` and `batch_additions` all but pre_add
 * forward; the others are plain: nothing is added to x, before the activation or to dx. Tensors have the same strides. */
#define NORMFUSE_SCHEDULE_LIST(SCHEDULE)                                                                               \
    SCHEDULE(cluster) SCHEDULE(split) SCHEDULE(grid_pipeline) SCHEDULE(grid_pipeline_batch) SCHEDULE(unaligned)        \
    SCHEDULE(additions) SCHEDULE(grid_additions) SCHEDULE(batch_additions)
enum normfuse_cuda_schedule {
#define NORMFUSE_SCHEDULE_ID(schedule) NORMFUSE_SCHEDULE_##schedule,
    NORMFUSE_SCHEDULE_LIST(NORMFUSE_SCHEDULE_ID) NORMFUSE_SCHEDULES
#undef NORMFUSE_SCHEDULE_ID
};

#include "kernels.def"
#include "layout.h"

#define NORMFUSE_KERNEL_NAME(layout, schedule, direction, type, elements, vectors)                                     \
    normfuse_##layout##_##schedule##_##direction##_##type##_##elements##x##vectors(                                    \
        const __grid_constant__ normfuse_cuda_arguments a)
#define NORMFUSE_KERNEL(layout, schedule, direction, type, elements, vectors, registers)                               \
    extern "C" __global__ void __maxnreg__(registers)                                                                  \
        NORMFUSE_KERNEL_NAME(layout, schedule, direction, type, elements, vectors)

enum {
    NORMFUSE_CUDA_GRID_BARRIER_WORDS = 8192, /* of sync memory: 512 barriers, each on a cache line of its own */
    NORMFUSE_CUDA_COUNTERS = 8192,           /* words behind them, which count blocks */
    NORMFUSE_CUDA_SYNC_BYTES = 65536,        /* of both: what normfuse_sync_bytes answers for every device */
    NORMFUSE_CUDA_ROW_CLUSTER = 8,           /* blocks of a cluster over rows, at most */
    NORMFUSE_CUDA_PASSING_AHEAD = 4          /* additions: vectors of a thread that are on their way, of each tensor */
};

enum normfuse_cuda_kernel {
#define NORMFUSE_KERNEL_ID(layout, schedule, direction, type, elements, vectors, registers)                            \
    NORMFUSE_CUDA_##layout##_##schedule##_##direction##_##type##_##elements##x##vectors,
    NORMFUSE_KERNELS(NORMFUSE_KERNEL_ID) NORMFUSE_CUDA_KERNELS
#undef NORMFUSE_KERNEL_ID
};

/* A row of kernels.def. */
struct normfuse_cuda_kernel_row {
    uint8_t schedule, columns, backward, type;
    int16_t elements, vectors, registers;
};
extern const struct normfuse_cuda_kernel_row normfuse_cuda_kernel_table[NORMFUSE_CUDA_KERNELS];

/* Whether dz is the same numbers after it was in memory, or shared memory, as a tensor of so many bytes an element. */
NORMFUSE_LAYOUT bool normfuse_is_dz_exact(int32_t bytes, int32_t activation)
{
    return bytes >= 4 || activation == NORMFUSE_IDENTITY || activation == NORMFUSE_RELU || activation == NORMFUSE_RELU6;
}

/* In the module: "normfuse_rows_general_forward_f64_1x8". This thread's until it asks again. */
const char *normfuse_cuda_kernel_name(enum normfuse_cuda_kernel kernel);

/* Whether a build for these targets ("80 90a 90-general-PTX") has nothing for a GPU but PTX of the general kernels.
 * Machine code is for the GPU's own capability, or an earlier one of its generation; PTX for every newer one. */
bool normfuse_cuda_has_general_alone(const char *built_for, int32_t capability);

/* The kernel of a schedule, which must have one of that type and width; `vectorized`: with vectors of 16 bytes, or words
 * of two halves. */
enum normfuse_cuda_kernel normfuse_cuda_kernel_of(bool columns, enum normfuse_cuda_schedule schedule, bool backward,
                                                  int32_t type, bool vectorized);

/* How the blocks that share a set send one another their sums. */
enum normfuse_cuda_exchange {
    NORMFUSE_EXCHANGE_NONE,    /* one block holds the set, or the sums only go to memory */
    NORMFUSE_EXCHANGE_CLUSTER, /* through the shared memory of a cluster */
    NORMFUSE_EXCHANGE_GRID     /* through scratch, with a barrier in sync memory; the whole grid is resident */
};

/* Where the statistics of a tile kernel come from that does not compute them. */
enum normfuse_cuda_source {
    NORMFUSE_SOURCE_NONE,    /* there are none: affine */
    NORMFUSE_SOURCE_SAVED,   /* problem.mean, problem.rstd: backward */
    NORMFUSE_SOURCE_RUNNING, /* problem.running_mean, running_var */
    NORMFUSE_SOURCE_SCRATCH  /* arguments.statistics */
};

/* Division by what is known before the launch: x / divisor = (high(x * multiplier) + x) >> shift for x below 2^31
 * (Granlund and Montgomery 1994). The hardware has no division; the compiler's of 64 bits takes longer than a load. */
struct normfuse_cuda_divisor {
    uint32_t divisor, multiplier, shift;
};

/* A tile is what one block holds at a time.
 *
 * Rows. A set is `outer` stretches (channels of a group, or samples of a channel) of `spans` vectors each (unaligned:
 * as many as the stretch that needs most); its vectors are counted through, and a part of a set is part_rows of them.
 * The forward deals these to the threads of a block in turn, segment_rows to each; in the backward each warp, a
 * segment, has segment_rows adjacent ones.
 *
 * Columns. A block group has `width` vectors of channels of one sample, or of all samples when `all_samples`; a part
 * of these is part_rows rows, which the block walks threads / width at a time. Where C channels are not whole vectors,
 * `folded` rows that are adjacent in memory are walked as one of folded C channels, which are: each vector then has the
 * same channels in every such wide row, perhaps of two rows or groups. All that counts rows, here and in the strides
 * that the kernel is given, then counts wide ones, and a block that holds them has all vectors of one. Where samples
 * begin and end inside of vectors (general_vectors) the first wide row begins with the vector that a sample begins in.
 * Batch norm over rows may be given to `split` and `additions` as columns: samples are rows then, and a channel is
 * `spans` adjacent columns, which are its set; the problem's sizes stay those of rows.
 *
 * Runs (elementwise of rows). The whole tensor is one run of vectors, and a block has part_rows elements of it: each
 * warp segment_rows times 32 vectors. `spans` are the positions of a row, which is a channel of a sample, `outer` the
 * channels, and `coefficients` the most rows that a block has elements of, and one. A row has sum_slots sums, of as
 * many blocks; with statistics to come a triple in the place of each, those of a set adjacent. */
struct normfuse_cuda_geometry {
    /* Each group of members is a line of 64 bytes that a kernel waits for, as in normfuse_cuda_problem. */
    int32_t rows; /* of a norm group or block group */
    int32_t part_rows;
    int32_t parts; /* blocks a norm group or block group */
    int32_t width, blocks_wide;
    int32_t group;     /* columns: channels whose sums are joined in the block: those of a group, or 1 */
    int32_t sum_slots; /* backward: partial sums that a channel (of a sample) may have */
    struct normfuse_cuda_divisor by_width, by_blocks_wide, by_group;

    struct normfuse_cuda_divisor by_parts, by_parts_a_sample, by_rows_at_once;
    struct normfuse_cuda_divisor by_set_channels; /* channels of a set: of a group, or 1 */
    int32_t all_samples;
    int32_t parts_a_sample; /* all_samples: each part is of one sample */
    int32_t row_channels;   /* of all rows that are walked as one */
    int32_t backwards;      /* walk tiles from the last to the first: what was read last is still in L2 */

    /* rows */
    int32_t lane_bits, spans, segment_rows;
    int32_t passing;            /* additions: tensors that pass in shared memory, at most */
    int32_t coefficients;       /* channels that a block holds coefficients of, at most */
    int32_t channels_a_segment; /* backward: that the vectors of a segment can touch */
    int32_t outer;
    struct normfuse_cuda_divisor by_spans, by_outer, by_groups;

    int32_t sums_by_channel; /* backward: sums are of all samples */
    int32_t contributors;    /* blocks that have parts of a channel, where the last or only one finds the gradients;
                                0: a later kernel */
    int32_t all_block_groups; /* of the problem; rows: its norm groups */
    int32_t block_groups;     /* exchange by the grid: sets at a time, each with a grid barrier */
    int32_t exchange;         /* enum normfuse_cuda_exchange */
    int32_t held_shared;      /* vectors of each tensor that a thread holds in shared memory beside those in registers */
    int32_t interleaved;      /* general_vectors: parts take turns, as many rows as are walked at once, so that all blocks
                                 are near one another and what was read last is the end of the sample; general: blocks
                                 follow one another by width, as those of vectors always do */
    int32_t folded;           /* columns: rows walked as one */
    int32_t row_values;       /* of one group in what is walked as a row */
    int32_t group_bits;       /* 2^bits threads join the channels of a group, */
    int32_t subvector_bits;   /* forward: from subvectors of 2^bits adjacent channels, as many as vectors and groups have
                                 in common; */
    int32_t channel_bits;     /* backward: so many join what threads found of a channel */
    struct normfuse_cuda_divisor by_row_step;

    /* general */
    int32_t unit_lanes;    /* threads that share a vector of channels (columns) or a channel of a sample (rows) */
    int32_t part_samples;  /* all_samples: that a part walks through */
    int32_t whole_rows;    /* vectors: of a sample; `rows` are as many as it may begin and end in */
    int32_t stores_dz;     /* dz goes to dpost_add with the sums, and the next kernel goes on from it */
    int32_t passes; /* tiles of a part, one after the other; no kernel reads it */
    int32_t rest;    /* vectors: elements behind the whole rows */

    struct normfuse_cuda_divisor by_subvectors;   /* columns: subvectors of a group */
    int32_t staggered_blocks, stagger_cycles; /* exchange by the grid: from which block on they begin so much later */
};

struct normfuse_cuda_statistics {
    double mean, rstd;
    double variance; /* the unbiased one */
};

/* What the schedules `cluster` and those of the grid read. A block waits for each line of
 * constants when it reads the line first, so these are few, and beside one another. */
struct normfuse_cuda_cluster { /* blocks follow one another by part, sample of a cluster, width, sample */
    int32_t samples; /* whose blocks are in one cluster and find the parameters' gradients there; 0: they do not */
    struct normfuse_cuda_divisor by_ranks, by_at_once; /* ranks: blocks of a cluster */
};
struct normfuse_cuda_grid {
    int32_t block_groups; /* samples at a time */
    int32_t stages;       /* tiles that shared memory holds */
    int32_t chunk_tiles;  /* after which a thread joins what it has summed to what it had */
    int32_t l2_tiles;     /* tiles that are read again, which the L2 is to keep */
    int32_t interleaved;  /* blocks take turns, tile by tile */
    /* The first blocks of a sample have part_rows rows, but the last of these lacks some; the rest have fewer. */
    int32_t first_parts, small_part_rows, lacking_rows;
    struct normfuse_cuda_divisor by_tile, by_turn; /* rows of a tile, and of a tile of each block */
};
union normfuse_cuda_of_schedule {
    struct normfuse_cuda_cluster cluster;
    struct normfuse_cuda_grid grid;
};
struct normfuse_cuda_columns {
    char *x, *dy, *out; /* out: y, or dx */
    int64_t batch_bytes;
    uint32_t row_bytes;
    int32_t rows, part_rows;
    int32_t at_once;           /* rows that the threads of a block have at once */
    int32_t width;             /* vectors of a row that a block has */
    int32_t group;             /* channels of a group */
    int32_t groups, lane_bits; /* groups of a block, 2^bits lanes of a warp for each */
    int32_t parts;             /* blocks that share a group */
    union normfuse_cuda_of_schedule of;
    struct normfuse_cuda_divisor by_blocks_wide, by_width, by_group, by_parts;
    const char *weight, *bias, *scale, *shift;
    int64_t scale_batch, shift_batch; /* bytes */
    char *mean, *rstd;
    int64_t mean_batch, rstd_batch; /* elements */
    /* normfuse_type of each: two bits of weight, bias, scale, shift, mean, rstd, from the lowest on */
    uint32_t types;
    int32_t activation;
    float act_param, eps, share; /* share: 1 / values of a set */
    int32_t n;
};

/* The places of tensors in what follows. No call has both y and dx, nor both u and du. */
enum normfuse_cuda_view {
    NORMFUSE_VIEW_X,
    NORMFUSE_VIEW_OUT,
    NORMFUSE_VIEW_DY,
    NORMFUSE_VIEW_POST_ADD,
    NORMFUSE_VIEW_PRE_ADD,
    NORMFUSE_VIEW_U,
    NORMFUSE_VIEW_DPOST_ADD,
    NORMFUSE_VIEWS
};
/* Those that most calls read, on one line; and the rest. */
#define NORMFUSE_COMMON_PARAMETER_LIST(PARAMETER)                                                                      \
    PARAMETER(weight) PARAMETER(bias) PARAMETER(scale) PARAMETER(shift) PARAMETER(pre_bias) PARAMETER(mean)            \
    PARAMETER(rstd)
#define NORMFUSE_RARE_PARAMETER_LIST(PARAMETER)                                                                        \
    PARAMETER(running_mean) PARAMETER(running_var) PARAMETER(dweight) PARAMETER(dbias) PARAMETER(dscale)               \
    PARAMETER(dshift) PARAMETER(slope) PARAMETER(dslope)
enum normfuse_cuda_parameter {
#define NORMFUSE_PARAMETER_ID(name) NORMFUSE_PARAMETER_##name,
    NORMFUSE_COMMON_PARAMETER_LIST(NORMFUSE_PARAMETER_ID) NORMFUSE_COMMON_PARAMETERS,
    NORMFUSE_BEFORE_RARE_PARAMETERS = NORMFUSE_COMMON_PARAMETERS - 1,
    NORMFUSE_RARE_PARAMETER_LIST(NORMFUSE_PARAMETER_ID) NORMFUSE_PARAMETERS
#undef NORMFUSE_PARAMETER_ID
};
struct normfuse_cuda_strides {
    int64_t batch, channel;
};
/* Bits of `flags`; phases are above them. */
#define NORMFUSE_FLAG_LIST(FLAG)                                                                                       \
    FLAG(columns) FLAG(accumulate) FLAG(has_running_momentum) FLAG(from_y) FLAG(evaluate)
enum normfuse_cuda_flag {
#define NORMFUSE_FLAG_ID(name) NORMFUSE_FLAG_##name,
    NORMFUSE_FLAG_LIST(NORMFUSE_FLAG_ID) NORMFUSE_FLAG_PHASES = 8
#undef NORMFUSE_FLAG_ID
};

/* A problem as kernels read it. A block waits some 100 cycles for each line of 64 bytes when it first reads of it, one
 * line after the other: what most calls read is on few, all pointers on two. */
struct normfuse_cuda_problem {
    int64_t n, c, s;
    int64_t x_batch, x_channel, x_position; /* strides of every tensor, in elements */
    int32_t sets, activation, groups, flags;

    char *views[NORMFUSE_VIEWS];
    double eps;

    char *parameters[NORMFUSE_COMMON_PARAMETERS];
    int64_t set_values;

    struct normfuse_cuda_strides strides[NORMFUSE_COMMON_PARAMETERS];
    int32_t types[NORMFUSE_COMMON_PARAMETERS];
    int32_t big_type;
    double act_param;

    double momentum;
    char *rare_parameters[NORMFUSE_PARAMETERS - NORMFUSE_COMMON_PARAMETERS];
    struct normfuse_cuda_strides rare_strides[NORMFUSE_PARAMETERS - NORMFUSE_COMMON_PARAMETERS];
    int32_t rare_types[NORMFUSE_PARAMETERS - NORMFUSE_COMMON_PARAMETERS];

#if defined(__cplusplus)
#define NORMFUSE_VIEW(name, place)                                                                                     \
    __device__ __forceinline__ normfuse_view name() const                                                              \
    {                                                                                                                  \
        return {views[NORMFUSE_VIEW_##place], x_batch, x_channel, x_position};                                         \
    }
#define NORMFUSE_PARAMETER(name)                                                                                       \
    __device__ __forceinline__ normfuse_parameter name() const                                                         \
    {                                                                                                                  \
        constexpr int given = NORMFUSE_PARAMETER_##name, rare = given - NORMFUSE_COMMON_PARAMETERS;                    \
        constexpr int at = rare < 0 ? given : rare;                                                                    \
        const normfuse_cuda_strides &of = rare < 0 ? strides[at] : rare_strides[at];                                   \
        return {rare < 0 ? parameters[at] : rare_parameters[at], of.batch, of.channel,                                 \
                rare < 0 ? types[at] : rare_types[at]};                                                                \
    }
#define NORMFUSE_FLAG(name)                                                                                            \
    __device__ __forceinline__ bool name() const                                                                       \
    {                                                                                                                  \
        return (flags & 1 << NORMFUSE_FLAG_##name) != 0;                                                               \
    }
    NORMFUSE_VIEW(x, X) NORMFUSE_VIEW(y, OUT) NORMFUSE_VIEW(dx, OUT) NORMFUSE_VIEW(dy, DY) NORMFUSE_VIEW(u, U)
    NORMFUSE_VIEW(du, U) NORMFUSE_VIEW(pre_add, PRE_ADD) NORMFUSE_VIEW(post_add, POST_ADD)
    NORMFUSE_VIEW(dpost_add, DPOST_ADD)
    NORMFUSE_COMMON_PARAMETER_LIST(NORMFUSE_PARAMETER)
    NORMFUSE_RARE_PARAMETER_LIST(NORMFUSE_PARAMETER)
    NORMFUSE_FLAG_LIST(NORMFUSE_FLAG)
#undef NORMFUSE_VIEW
#undef NORMFUSE_PARAMETER
#undef NORMFUSE_FLAG
    __device__ __forceinline__ int phases() const
    {
        return flags >> NORMFUSE_FLAG_PHASES;
    }
    __device__ __forceinline__ int type() const
    {
        return big_type;
    }
#endif
};

/* On Hopper what a kernel is given begins 16 bytes into a line, so that all but the first members here begin one. */
struct normfuse_cuda_arguments {
    int32_t phases;                              /* of the problem's, those that this launch does */
    int16_t source;                              /* enum normfuse_cuda_source */
    int16_t begins_early; /* the tensors that this launch reads are there before the launch ahead of it ends */
    struct normfuse_cuda_statistics *statistics; /* one a set */
    /* Triples (count, mean, M2) [set][part]; exchange by the grid: [parity][block group][group][part]. */
    double *partials;
    double *sums;            /* pairs per (n, c, slot), or per (c, slot) */
    double *totals;          /* pairs a set: what the backward subtracts */
    uint32_t *grid_barriers; /* sync memory */
    struct normfuse_cuda_problem problem;
    union { /* of the schedules that read it; those that read `columns` read little else */
        struct normfuse_cuda_columns columns;
        char lines[5][64];
    };
    struct normfuse_cuda_geometry geometry;
};

#endif
