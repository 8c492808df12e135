/* SPDX-License-Identifier: MIT
 *
 * schedules.h - the plan of a call: kernels with their geometry, the copies around them, and the scratch memory between
 * them; and the bodies that may have it. */
#ifndef NORMFUSE_CUDA_SCHEDULES_H
#define NORMFUSE_CUDA_SCHEDULES_H

#include <math.h>

#include "device/arguments.h"
#include "shape.h"
#include "signature.h"

/* Norm groups that exchange through the grid at a time. Each has a grid barrier on a line of 16 words. */
enum { MAX_BLOCK_GROUPS = NORMFUSE_CUDA_GRID_BARRIER_WORDS / 16 };

/* How sums of channels lie in scratch memory. */
struct sums {
    int32_t slots;   /* of a channel, or of a channel of a sample */
    bool by_channel; /* of all samples together */
};

/* One kernel of a call. */
struct step {
    struct normfuse_cuda_launch launch; /* but for its arguments and its signature */
    struct normfuse_cuda_signature signature;
    union { /* of its body, but for what launch.c adds */
        struct normfuse_single_arguments single;
        struct normfuse_stream_arguments stream;
        struct normfuse_finish_arguments finish;
    };
    double microseconds; /* as estimated */
    size_t messages;     /* bytes that blocks of the grid send one another, of plan.partials */
    int32_t phases;      /* 0: of the body `finish` */
    int32_t parts;       /* blocks that share a norm group */
    struct sums sums;
    bool finds_gradients; /* of the parameters: no later kernel does */
    bool stores_dz;       /* with the sums, for the next kernel to go on from */
    bool goes_on;         /* from u or dz, which the first pass stored */
};

/* One way of giving a call to threads. */
struct schedule {
    const char *name;
    /* NULL: `step` is filled in, with its microseconds; else why it cannot have the call. */
    const char *(*configure)(const struct shape *, struct step *step);
};
/* A norm group in registers; in shared memory; two passes, of which the step has the time alone. */
extern const struct schedule normfuse_cuda_single, normfuse_cuda_held, normfuse_cuda_stream;
extern const struct schedule *const normfuse_cuda_schedules[]; /* to NULL */

/* For tests, this thread's. Schedules by their names. */
struct normfuse_cuda_choice {
    const char *only;  /* takes every call that it does not refuse; NULL: the cheapest does */
    const char *taken; /* what normfuse_cuda_hold took last; NULL: nothing fitted */
    uint64_t drawn;    /* not 0: a schedule takes any geometry that it has, by this seed, not the cheapest one */
};
struct normfuse_cuda_choice *normfuse_cuda_choice(void);

/* Tries every schedule and takes the cheapest. False: that is two passes. */
bool normfuse_cuda_hold(const struct shape *shape, struct step *step);
/* A kernel of the body `stream`: sums, results of given statistics, or both where none are to be found. False: it
 * counts more than 32 bits do, or `single` alone computes it. */
bool normfuse_cuda_pass(const struct shape *shape, struct step *step, bool sums, bool applies);

enum { MAX_STEPS = 6 };

struct plan {
    struct step steps[MAX_STEPS];
    int count;
    /* Bytes of each part of scratch; 0: not there. */
    size_t partials, statistics, sums, totals;
    struct sums of_sums; /* of the kernel that wrote them */
};

/* NULL: none fits. The plan is this thread's until its next call. `explains`: what every schedule says of the call goes
 * to stderr. */
const struct plan *normfuse_cuda_plan_of(const struct normfuse_problem *problem,
                                         const struct normfuse_cuda_device *device, bool has_grid_barriers,
                                         bool explains);

/* The tensors of a call that have not the strides of the others: kernels take tensors of the same strides alone, so
 * these are copied, inputs before a call's kernels and outputs after them. */
struct transposed {
    struct normfuse_transpose_arguments before[2], after[2]; /* of a call's kernels; [1]: of y_type, another one */
    size_t bytes; /* of scratch, whose beginning it is */
};

/* Makes the strides of all tensors the same, by as few copies as can be: x's, or those of either layout without gaps.
 * Tensors that are copied then lie in `scratch`, of which nothing is read here.
 * False: they are too large for that. */
bool normfuse_cuda_transpose(struct normfuse_problem *problem, char *scratch, struct transposed *transposed);

static inline size_t rounded(size_t bytes)
{
    return (bytes + 63) / 64 * 64;
}

static inline struct normfuse_divisor divisor_of(int64_t value)
{
    struct normfuse_divisor by = {.divisor = (uint32_t)maximum(1, value)};
    by.shift = by.divisor > 1 ? 32u - (uint32_t)__builtin_clz(by.divisor - 1) : 0;
    by.multiplier = (uint32_t)((UINT64_C(1) << 32) * ((UINT64_C(1) << by.shift) - by.divisor) / by.divisor + 1);
    return by;
}

static inline bool reads_du(const struct shape *shape)
{
    return shape->direction == BACKWARD && shape->problem->du.data != NULL && shape->problem->dx.data != NULL;
}

static inline bool reads_post(const struct shape *shape)
{
    const struct normfuse_problem *const p = shape->problem;
    return p->post_add.data != NULL && (shape->direction == FORWARD || p->activation != NORMFUSE_IDENTITY);
}

/* Tensors that are read, each once. */
static inline int tensors_of(const struct shape *shape)
{
    return shape->tensors + (shape->problem->pre_add.data != NULL) + reads_du(shape) + reads_post(shape);
}

/* Tensors that are written. */
static inline int results_of(const struct shape *shape)
{
    const struct normfuse_problem *const p = shape->problem;
    return shape->direction == FORWARD ? 1 + (p->u.data != NULL) : (p->dx.data != NULL) + (p->dpost_add.data != NULL);
}

/* True if a thread reads parameters of so many adjacent channels at once, in groups of so many. */
static inline bool is_packed(const struct normfuse_parameter *of, int64_t elements, int64_t group_channels)
{
    const int64_t bytes = (int64_t)normfuse_type_bytes(of->type), at_once = minimum(16, bytes * elements);
    return of->data == NULL ||
           (of->channel == 1 && (intptr_t)of->data % at_once == 0 && of->batch * bytes % at_once == 0 &&
            group_channels * bytes % at_once == 0);
}

/* For tests, which would see few geometries where problems are small: a number of this one in the place of its time. */
static inline double draw_geometry(uint64_t seed, const int64_t *of, size_t count)
{
    for (size_t i = 0; i < count; i++)
        seed = (seed ^ (uint64_t)of[i]) * UINT64_C(0x9e3779b97f4a7c15) ^ seed >> 29;
    return (double)(seed >> 11);
}

#endif
