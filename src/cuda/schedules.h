/* SPDX-License-Identifier: MIT
 *
 * schedules.h - the schedules that a call may take, and the plan that is made of them: kernels with their geometry, the
 * copies around them, and the scratch memory between them. */
#ifndef NORMFUSE_CUDA_SCHEDULES_H
#define NORMFUSE_CUDA_SCHEDULES_H

#include <math.h>

#include "device/arguments.h"
#include "shape.h"
#include "signature.h"

/* Block groups: norm groups (columns: samples) that exchange through the grid at a time. Each has a grid barrier on a
 * line of 16 words. */
enum { MAX_CLUSTER = 16, MAX_BLOCK_GROUPS = NORMFUSE_CUDA_GRID_BARRIER_WORDS / 16 };

/* One kernel of a call. */
struct step {
    struct normfuse_cuda_launch launch; /* but for its arguments and its signature */
    bool is_specialized;                /* it has a signature */
    struct normfuse_cuda_signature signature;
    union { /* of its body, but for what launch.c adds */
        struct normfuse_single_arguments single;
        struct normfuse_stream_arguments stream;
        struct normfuse_finish_arguments finish;
    };
    double microseconds;                     /* as estimated */
    size_t messages;                         /* bytes that blocks of the grid send one another, of plan.partials */
    struct normfuse_cuda_geometry geometry;
    int32_t phases, source;
    int variant;              /* of its schedule */
    uint32_t without_vectors; /* threads of the last warp, where that has other work */
    int32_t at_once;          /* 0: not of normfuse_cuda_columns; rows, and what else these schedules have */
    union normfuse_cuda_of_schedule of;
    bool finds_gradients; /* of the parameters: no later kernel does */
    bool goes_on;         /* from u or dz, which the first pass stored */
    bool is_stacked;      /* of columns, for rows: normfuse_cuda_stacked */
};

/* What a schedule may need, and take. */
enum {
    NEEDS_PLAIN = 1,     /* shape.plain */
    TAKES_BIAS = 2,      /* pre_bias; the others refuse it */
    TAKES_PRELU = 4,     /* the same */
    IS_GENERAL = 8,      /* a GPU may lack the others */
    TAKES_ADDITIONS = 16, /* where it needs shape.plain: or shape.additions */
    TAKES_GIVEN = 32     /* evaluation and affine, which have no norm groups; the others refuse them */
};

/* One way of holding norm groups on the chip. */
struct schedule {
    const char *name;
    int needs;
    const char *(*refuse)(const struct shape *); /* NULL: it may take this; else why it cannot. May be NULL itself. */
    int variants;                                /* sizes of blocks and clusters; 0: one */
    /* NULL: `step`, which has the variant, is filled in; else why not. A schedule without this is two passes. */
    const char *(*configure)(const struct shape *, struct step *step);
    double (*estimate)(const struct shape *, const struct step *); /* microseconds */
    bool in_order; /* taken before all after it, whatever the estimates, unless two passes take less */
};
extern const struct schedule *const normfuse_cuda_rows_schedules[],
    *const normfuse_cuda_columns_schedules[]; /* to NULL */
extern const struct schedule normfuse_cuda_single, normfuse_cuda_grid_pipeline, normfuse_cuda_stacked;
extern const struct schedule normfuse_cuda_stream, normfuse_cuda_held;

/* For tests, this thread's. Schedules by their names. */
struct normfuse_cuda_choice {
    const char *only;  /* takes every call that it does not refuse; NULL: the cheapest does */
    const char *taken; /* what normfuse_cuda_hold took last; NULL: nothing fitted */
    uint64_t drawn;    /* not 0: `single` takes any geometry that holds a norm group, by this seed, not the cheapest one */
};
struct normfuse_cuda_choice *normfuse_cuda_choice(void);

/* An estimate that knows the memory's time, how blocks fill the device, and that blocks wait for one another. */
double normfuse_cuda_estimate_once(const struct shape *shape, const struct step *step);
/* Tries every schedule of the layout and takes the cheapest. False: two passes are cheaper, or nothing else fits. */
bool normfuse_cuda_hold(const struct shape *shape, struct step *step);
/* NULL: it does not refuse this. */
const char *normfuse_cuda_refused(const struct schedule *schedule, const struct shape *shape);
/* What a schedule that holds vectors has of this where something is added. */
struct shape normfuse_cuda_shape_held(const struct shape *given);
/* Whether the schedule, of one variant, would hold this. */
bool normfuse_cuda_takes(const struct schedule *schedule, const struct shape *shape);
/* A kernel of the body `stream`: sums, results of given statistics, or both where none are to be found. False: it counts
 * more than 32 bits do. */
bool normfuse_cuda_pass(const struct shape *shape, struct step *step, bool sums, bool applies);

enum { MAX_STEPS = 6 };

struct plan {
    struct step steps[MAX_STEPS];
    int count;
    /* Bytes of each part of scratch; 0: not there. */
    size_t partials, statistics, sums, totals;
    struct normfuse_cuda_geometry sums_geometry; /* of the kernel that wrote the sums */
};

/* NULL: none fits. *is_certain: not for want of an answer from the driver, which may give it to the next call. The plan
 * is this thread's until its next call. `explains`: what every schedule says of the call goes to stderr. */
const struct plan *normfuse_cuda_plan_of(const struct normfuse_problem *problem,
                                         const struct normfuse_cuda_device *device, bool has_grid_barriers,
                                         bool explains, bool *is_certain);

/* The tensors of a call that have not the strides of the others: kernels take tensors of the same strides alone, so
 * these are copied, inputs before a call's kernels and outputs after them. */
struct transposed {
    struct normfuse_transpose_arguments before, after; /* of a call's kernels */
    size_t bytes; /* of scratch, whose beginning it is */
};

/* Makes the strides of all tensors the same, by as few copies as can be: x's, or those of either layout without gaps.
 * Tensors that are copied then lie in `scratch`, of which nothing is read here. False: they are too large for that. */
bool normfuse_cuda_transpose(struct normfuse_problem *problem, char *scratch, struct transposed *transposed);

/* Whether a tensor is less than what a wave of blocks begins with: backward such calls would wait for its channels. */
static inline bool is_short_of_waves(const struct shape *shape)
{
    static const double MAX_BYTES = 64 << 10; /* of a multiprocessor */
    return shape->tensor_bytes < MAX_BYTES * shape->device->multiprocessors;
}

/* General kernels over columns: sums of a channel that a part leaves. Blocks of whole rows join the rows folded. */
static inline int32_t copies_of(const struct normfuse_cuda_geometry *g)
{
    return g->blocks_wide == 1 || g->folded == 0 ? 1 : g->folded;
}

static inline size_t rounded(size_t bytes)
{
    return (bytes + 63) / 64 * 64;
}

/* Columns: vectors that have channels of one group, at most. */
static inline int64_t max_vectors_of_group(const struct shape *shape, int64_t group)
{
    return 1 + divide_up(group - common_divisor(group, shape->elements), shape->elements);
}

static inline struct normfuse_cuda_divisor divisor_of(int64_t value)
{
    struct normfuse_cuda_divisor by = {.divisor = (uint32_t)maximum(1, value)};
    by.shift = by.divisor > 1 ? 32u - (uint32_t)__builtin_clz(by.divisor - 1) : 0;
    by.multiplier = (uint32_t)((UINT64_C(1) << 32) * ((UINT64_C(1) << by.shift) - by.divisor) / by.divisor + 1);
    return by;
}

/* The same for a kernel that is compiled at run time. */
static inline struct normfuse_divisor short_divisor(int64_t value)
{
    const struct normfuse_cuda_divisor by = divisor_of(value);
    return (struct normfuse_divisor){by.divisor, by.multiplier, by.shift};
}

/* Blocks of a step that run at the same time. */
static inline int64_t resident_blocks(const struct shape *shape, const struct step *step)
{
    return (int64_t)normfuse_cuda_resident_clusters(shape->device, &step->launch) * maximum(1, step->launch.cluster);
}

/* A set of schedules. */
#define OF(schedule) (1u << NORMFUSE_SCHEDULE_##schedule)

/* One kernel has additions for all that hold vectors; over rows one has unaligned vectors. */
enum normfuse_cuda_kernel normfuse_cuda_kernel_for(const struct shape *shape, enum normfuse_cuda_schedule schedule);

static inline bool reads_du(const struct shape *shape)
{
    return shape->direction == BACKWARD && shape->problem->du.data != NULL && shape->problem->dx.data != NULL;
}

static inline bool reads_post(const struct shape *shape)
{
    const struct normfuse_problem *const p = shape->problem;
    return p->post_add.data != NULL && (shape->direction == FORWARD || p->activation != NORMFUSE_IDENTITY);
}

/* Whether a kernel that holds x and dy reads post_add again for results. */
static inline bool rereads_post(const struct shape *shape)
{
    return shape->direction == BACKWARD && reads_post(shape) && !is_dz_exact(shape->problem);
}

/* Tensors that are walked through, and those that are written. */
int normfuse_cuda_tensors_of(const struct shape *shape);
int normfuse_cuda_results_of(const struct shape *shape);

/* Tensors that pass through shared memory at a time beside those that are held, and what of it they take. */
int32_t normfuse_cuda_passing_of(const struct shape *shape);

static inline size_t passing_bytes(const struct shape *shape, uint32_t threads)
{
    return (size_t)normfuse_cuda_passing_of(shape) * NORMFUSE_CUDA_PASSING_AHEAD * 16 * threads;
}

/* Whether a first pass writes dz, which the second then goes on from. */
static inline bool stores_dz(const struct shape *shape, bool sums, bool applies)
{
    const struct normfuse_problem *const p = shape->problem;
    return sums && !applies && shape->direction == BACKWARD && has_both_phases(p) && p->sets != NORMFUSE_SETS_NONE &&
           p->dpost_add.data != NULL && p->pre_add.data == NULL && p->dx.data != NULL && is_dz_exact(p);
}

/* What most schedules begin with; most variants are refused before they need it. */
struct normfuse_cuda_geometry *normfuse_cuda_begin_step(struct step *step);

/* Blocks of `width` of all that is side by side in a row, which join `group` channels over so many rows. */
static inline void set_width(const struct shape *shape, struct normfuse_cuda_geometry *g, int64_t all, int64_t width,
                             int64_t group, int64_t rows)
{
    const struct normfuse_problem *const p = shape->problem;
    g->rows = (int32_t)rows;
    g->group = (int32_t)group;
    g->width = (int32_t)width;
    g->blocks_wide = (int32_t)divide_up(all, width);
    g->folded = shape->folded;
    g->row_channels = (int32_t)(p->c * shape->folded);
    g->all_samples = g->sums_by_channel = takes_all_samples(p);
    g->all_block_groups = (int32_t)(g->all_samples ? g->blocks_wide : p->n * g->blocks_wide);
}

/* Columns: `width` vectors a block, in which `group` channels are joined. */
static inline struct normfuse_cuda_geometry *begin_columns(const struct shape *shape, struct step *step, int64_t width,
                                                           int64_t group)
{
    struct normfuse_cuda_geometry *const g = normfuse_cuda_begin_step(step);
    set_width(shape, g, vectors_of_row(shape), width, group, shape->problem->s / shape->folded);
    g->row_values = g->group * shape->folded;
    g->spans = shape->spans;
    return g;
}

/* Vectors of each tensor that a thread of this schedule's kernel holds, or has on their way. */
static inline int vectors_of(const struct shape *shape, enum normfuse_cuda_schedule schedule)
{
    return normfuse_cuda_kernel_table[normfuse_cuda_kernel_for(shape, schedule)].vectors;
}

static inline bool is_of(const struct step *step, uint32_t schedules)
{
    return !step->is_specialized && (schedules >> normfuse_cuda_kernel_table[step->launch.kernel].schedule & 1) != 0;
}

/* The part of the bandwidth that so many blocks draw: half of the multiprocessors draw most of it. */
static inline double reach_of(const struct shape *shape, double blocks, double resident)
{
    return fmin(1.0, fmin(blocks, resident) * 1.3 / shape->device->multiprocessors);
}

/* What waves of blocks take beside the memory's time where each takes `least` microseconds, however little it moves. */
static inline double short_waves(const struct shape *shape, double waves, double least)
{
    return fmax(0.0, waves - 1.0) * fmax(0.0, least - shape->bytes / shape->policy->bytes_a_microsecond / waves);
}

/* The fewest bits of which 2^bits is `count` or more. */
static inline int32_t bits_for(int64_t count)
{
    return count > 1 ? 64 - __builtin_clzll((unsigned long long)count - 1) : 0;
}

/* 2^bits lanes of a warp for each of `count`, as many as `threads` allow. */
static inline int32_t lane_bits_of(int64_t count, int64_t threads)
{
    int32_t bits = 0;
    while (bits < 5 && count << (bits + 1) <= threads)
        bits++;
    return bits;
}

/* How a block of `threads` joins sums of so many groups and channels; `in_subvectors`: the channels of a subvector are
 * joined first. */
static inline void set_joins(const struct shape *shape, struct normfuse_cuda_geometry *g, int64_t groups,
                             int64_t channels, int64_t threads, bool in_subvectors)
{
    g->group_bits = lane_bits_of(groups, threads);
    g->channel_bits = lane_bits_of(channels, threads);
    g->subvector_bits = in_subvectors ? bits_for(common_divisor(g->group, shape->elements)) : 0;
    g->by_subvectors = divisor_of(g->group >> g->subvector_bits);
}

/* Blocks of a cluster, if they are several, wait for one another. */
static inline void exchange_by_cluster(struct step *step, int64_t blocks)
{
    step->launch.cluster = blocks > 1 ? (uint32_t)blocks : 0;
    step->geometry.exchange = blocks > 1 ? NORMFUSE_EXCHANGE_CLUSTER : NORMFUSE_EXCHANGE_NONE;
}

/* Clusters of the `parts` blocks of a sample, or of all samples', which then find the parameters' gradients, where that
 * is small enough and nothing is requested of each. Returns the samples; 0: one. */
static inline int64_t exchange_of_samples(const struct shape *shape, struct step *step, int64_t samples, int64_t parts)
{
    const int64_t max_cluster = shape->device->clusters ? MAX_CLUSTER : 1;
    const bool gives = shape->wants_gradients && shape->problem->dslope.data == NULL && !is_modulated(shape->problem);
    step->finds_gradients = gives && samples * parts <= max_cluster;
    exchange_by_cluster(step, step->finds_gradients ? samples * parts : parts);
    return step->finds_gradients ? samples : 0;
}

/* Blocks of `at_once` rows that share a norm group by the grid, at most: each thread has a vector, forward two, since more
 * blocks only take longer to meet. Group norm 1x1x29x84x36 f16 backward, 264 blocks 23.8 us, 11 9.4; 1x1x65891 f32 20.0,
 * 11.8; 7x6x26x12x18 f32 forward, ten for 20 a set, 9.4, 7.8. */
static inline int64_t most_blocks(const struct shape *shape, int64_t rows, int64_t at_once)
{
    return divide_up(rows, at_once * (shape->direction == FORWARD ? 2 : 1));
}

/* All blocks of the grid wait for one another, so all must run at the same time. Returns why they cannot. */
static inline const char *exchange_by_grid(const struct shape *shape, struct step *step)
{
    step->geometry.exchange = NORMFUSE_EXCHANGE_GRID;
    step->launch.cooperative = true;
    return resident_blocks(shape, step) >= step->launch.grid ? NULL : "its blocks are not resident together";
}

#endif
