/* SPDX-License-Identifier: MIT
 *
 * shape.h - what a call is, for the planner: bytes, alignment, what is wanted. */
#ifndef NORMFUSE_CUDA_SHAPE_H
#define NORMFUSE_CUDA_SHAPE_H

#include "loader.h"
#include "policy.h"

enum { FORWARD = 0, BACKWARD = 1 };

struct shape {
    const struct normfuse_problem *problem;
    const struct normfuse_cuda_device *device;
    const struct normfuse_cuda_policy *policy; /* of the device */
    bool has_grid_barriers;
    bool explains; /* NORMFUSE_VERBOSE=plan */
    int direction;
    size_t value_bytes;         /* of what is computed in */
    bool wants_gradients;       /* backward: the parameters' */
    int tensors;                /* that a norm group has: x, or x and dy */
    double tensor_bytes, bytes; /* of x; that must move at least */
};

static inline int64_t divide_up(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

static inline int64_t minimum(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static inline int64_t maximum(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

static inline uint32_t whole_warps(int64_t threads)
{
    return (uint32_t)(divide_up(maximum(threads, 1), 32) * 32);
}

/* Numbers that the kernels count in 32 bits. */
static inline bool is_countable(int64_t value)
{
    return value < INT32_MAX - (1 << 24);
}

/* Whose derivatives take many instructions. */
static inline bool is_rare(int32_t activation)
{
    return activation == NORMFUSE_GELU || activation == NORMFUSE_GELU_TANH || activation == NORMFUSE_ELU ||
           activation == NORMFUSE_MISH;
}

/* A backward that does both of its phases. */
static inline bool has_both_phases(const struct normfuse_problem *p)
{
    const int32_t both = NORMFUSE_PHASE_BACKWARD_SUMS | NORMFUSE_PHASE_BACKWARD_APPLY;
    return (p->phases & both) == both;
}

/* True if dz is the same numbers after it was in memory, or shared memory, as a tensor of the call. */
static inline bool is_dz_exact(const struct normfuse_problem *p)
{
    return normfuse_type_bytes(p->type) >= 4 || p->activation == NORMFUSE_IDENTITY ||
           p->activation == NORMFUSE_RELU || p->activation == NORMFUSE_RELU6;
}

/* Norm groups, or channels where there are none. */
static inline int64_t sets_of(const struct normfuse_problem *p)
{
    return p->sets == NORMFUSE_SETS_GROUP      ? p->n * p->groups
           : p->sets == NORMFUSE_SETS_POSITION ? p->n * p->groups * p->s
                                               : p->c;
}

/* Channels of a norm group; 1 where it is no group's. */
static inline int64_t group_of(const struct normfuse_problem *p)
{
    return p->sets == NORMFUSE_SETS_GROUP || p->sets == NORMFUSE_SETS_POSITION ? p->c / p->groups : 1;
}

static inline bool is_modulated(const struct normfuse_problem *p)
{
    return p->scale.data != NULL || p->shift.data != NULL || p->dscale.data != NULL || p->dshift.data != NULL;
}

/* Calls that the body `single` alone computes, of norm over channels. */
static inline bool is_of_single(const struct normfuse_problem *p)
{
    return p->sets == NORMFUSE_SETS_POSITION || p->y_type != p->type || p->statistics == NORMFUSE_MEAN_SQUARE ||
           p->eps_kind == NORMFUSE_EPS_OF_NORM || (p->rounds_pre_bias && p->pre_bias.data != NULL);
}

static inline char *output_of(const struct normfuse_problem *p)
{
    return p->dy.data != NULL ? p->dx.data : p->y.data;
}

/* The nine tensors that a problem may have. */
#define NORMFUSE_CUDA_TENSORS(TENSOR)                                                                                  \
    TENSOR(x) TENSOR(pre_add) TENSOR(post_add) TENSOR(y) TENSOR(u) TENSOR(dy) TENSOR(du) TENSOR(dx) TENSOR(dpost_add)
enum { VIEWS = 9 };
/* And the parameters. */
#define NORMFUSE_CUDA_PARAMETERS(PARAMETER)                                                                            \
    PARAMETER(weight) PARAMETER(bias) PARAMETER(scale) PARAMETER(shift) PARAMETER(pre_bias) PARAMETER(mean)            \
    PARAMETER(rstd) PARAMETER(running_mean) PARAMETER(running_var) PARAMETER(dweight) PARAMETER(dbias)                 \
    PARAMETER(dscale) PARAMETER(dshift) PARAMETER(slope) PARAMETER(dslope)

/* True if all tensors begin at a multiple of so many bytes. */
static inline bool are_aligned(const struct normfuse_problem *p, unsigned bytes)
{
#define PLACE(name) | (uintptr_t)p->name.data
    const uintptr_t places = 0 NORMFUSE_CUDA_TENSORS(PLACE);
#undef PLACE
    return places % bytes == 0;
}

static inline int64_t common_divisor(int64_t a, int64_t b)
{
    return b == 0 ? a : common_divisor(b, a % b);
}

static inline int64_t common_multiple(int64_t a, int64_t b)
{
    return a / common_divisor(a, b) * b;
}

static inline bool takes_all_samples(const struct normfuse_problem *p)
{
    if (p->sets == NORMFUSE_SETS_NONE)
        return p->pre_bias.batch == 0 && p->weight.batch == 0 && p->bias.batch == 0 && p->dweight.batch == 0 &&
               p->dbias.batch == 0 && !is_modulated(p);
    return p->sets == NORMFUSE_SETS_BATCH;
}

/* The second pass of a forward whose first one stored u, perhaps over x, or of a backward whose first one stored dz. */
static inline void go_on_from_first_pass(struct normfuse_problem *p)
{
    if ((p->phases & NORMFUSE_PHASE_STATISTICS) != 0) {
        p->x.data = p->u.data;
        p->pre_add.data = p->pre_bias.data = p->u.data = NULL;
        return;
    }
    p->dy = p->dpost_add;
    p->post_add.data = p->dpost_add.data = NULL;
    p->activation = NORMFUSE_IDENTITY;
}

/* *shape has the device and what else is not of a problem: device to explains. False: more than the kernels count. */
bool normfuse_cuda_shape_of(const struct normfuse_problem *problem, struct shape *shape);

#endif
