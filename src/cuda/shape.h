/* SPDX-License-Identifier: MIT
 *
 * shape.h - what a call is, for the planner: bytes, alignment, what is wanted, and which kernels can take it. */
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
    bool wide;              /* vectors of 16 bytes, whole ones */
    bool unaligned;         /* vectors that rows begin and end inside of: where the tensors allow no others */
    int elements;           /* elements of a vector */
    int32_t folded;         /* columns: rows that are walked as one, so that they are whole vectors */
    int32_t spans;          /* columns of a channel; 0: one. Only normfuse_cuda_stacked has more. */
    bool unaligned_samples; /* these and samples do not end together, which two passes can bear */
    size_t value_bytes;     /* of what is computed in */
    bool short_offsets;     /* what a block has of a tensor is fewer than 2^31 bytes */
    bool plain;             /* vectors of singles or halves, nothing is added, offsets are short; the device has
                                more than general kernels */
    bool in_cache_lines;    /* columns, two passes: rows folded are whole cache lines, and so are blocks */
    bool additions;         /* the same, of rows perhaps unaligned, where something is added */
    bool tiled;             /* group norm of whole vectors, of columns, with parameters that can be read in vectors */
    bool batch;             /* grid_pipeline_batch: batch norm, as `tiled` */
    bool given;             /* elementwise: evaluation and affine, the same */
    bool run;               /* rows: aligned, of singles or halves, without gaps in a sample; whatever is added */
    bool has_pipeline;      /* grid_pipeline can take it */
    bool wants_gradients;   /* backward: the parameters' */
    int tensors;            /* that a kernel holds: x, or x and dy */
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

/* What the kernels count in 32 bits. */
static inline bool is_countable(int64_t value)
{
    return value < INT32_MAX - (1 << 24);
}

/* What few networks have: plain kernels that hold vectors lack the derivatives, which cost too many registers, and
 * elementwise of columns both directions. */
static inline bool is_rare(int32_t activation)
{
    return activation == NORMFUSE_GELU || activation == NORMFUSE_GELU_TANH || activation == NORMFUSE_ELU ||
           activation == NORMFUSE_MISH;
}

/* What `cluster` takes. */
static inline bool fits_cluster(const struct shape *shape)
{
    return shape->tiled && shape->plain;
}

/* Of kernels that hold vectors of columns that of additions alone has rare derivatives. */
static inline void leave_rare_derivatives(struct shape *shape)
{
    if (shape->direction != BACKWARD || !is_rare(shape->problem->activation))
        return;
    shape->additions = shape->additions || shape->plain;
    shape->plain = shape->tiled = shape->batch = false;
}

/* A backward that does both of its phases. */
static inline bool has_both_phases(const struct normfuse_problem *p)
{
    const int32_t both = NORMFUSE_PHASE_BACKWARD_SUMS | NORMFUSE_PHASE_BACKWARD_APPLY;
    return (p->phases & both) == both;
}

/* Whether dz is the same numbers after it was in memory. */
static inline bool is_dz_exact(const struct normfuse_problem *p)
{
    return normfuse_is_dz_exact((int32_t)normfuse_type_bytes(p->type), p->activation);
}

/* Norm groups, or channels where there are none. */
static inline int64_t sets_of(const struct normfuse_problem *p)
{
    return p->sets == NORMFUSE_SETS_GROUP ? p->n * p->groups : p->c;
}

/* Channels of a norm group; 1 where it is no group's. */
static inline int64_t group_of(const struct normfuse_problem *p)
{
    return p->sets == NORMFUSE_SETS_GROUP ? p->c / p->groups : 1;
}

static inline bool is_modulated(const struct normfuse_problem *p)
{
    return p->scale.data != NULL || p->shift.data != NULL || p->dscale.data != NULL || p->dshift.data != NULL;
}

static inline bool has_additions(const struct normfuse_problem *p)
{
    return p->pre_add.data != NULL || p->post_add.data != NULL || p->du.data != NULL || p->dpost_add.data != NULL;
}

static inline char *output_of(const struct normfuse_problem *p)
{
    return p->dy.data != NULL ? p->dx.data : p->y.data;
}

/* The nine tensors that a problem may have. */
#define NORMFUSE_CUDA_TENSORS(TENSOR)                                                                                  \
    TENSOR(x) TENSOR(pre_add) TENSOR(post_add) TENSOR(y) TENSOR(u) TENSOR(dy) TENSOR(du) TENSOR(dx) TENSOR(dpost_add)
enum { VIEWS = 9 };

/* Whether all tensors begin at a multiple of so many bytes. */
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

static inline double vector_bytes(const struct shape *shape)
{
    return (double)shape->elements * (double)normfuse_type_bytes(shape->problem->type);
}

/* Columns: vectors of what is walked as a row. */
static inline int64_t vectors_of_row(const struct shape *shape)
{
    return shape->problem->c * shape->folded / shape->elements;
}

/* Of vectors of so many elements that are aligned in memory: how many a row can touch. Where in its first vector it
 * begins is a multiple of what divides the strides and the vector. */
static inline int64_t unaligned_spans(const struct normfuse_problem *p, int elements)
{
    const int64_t places = p->x.batch | p->x.channel | elements;
    return divide_up(p->s + elements - (places & -places), elements);
}

/* Whether so much of what these vectors carry is the row's. */
static inline bool fills_vectors(const struct normfuse_problem *p, int elements, double part)
{
    return (double)p->s >= part * (double)(elements * unaligned_spans(p, elements));
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

/* Of rows folded at once, so that a lane that joins what threads found has no more of it one after the other than
 * docs/numerics.md says: of 16 threads and, forward, as many channels of a group. Each vector holds subvectors of
 * several, and single channels where rows begin inside of vectors. */
static inline int64_t max_at_once(const struct shape *shape, int64_t group)
{
    const bool forward = shape->direction == FORWARD;
    if (shape->folded <= 1)
        return INT64_MAX;
    const int64_t in_lane = forward ? 16 + minimum(group, 16) : 16;
    const int64_t subvectors = !forward                   ? 1
                               : shape->unaligned_samples ? group
                                                          : common_multiple(group, shape->elements) / shape->elements;
    return in_lane / shape->folded * 32 / subvectors;
}

/* The same shape, element by element. */
static inline struct shape narrowed(const struct shape *shape)
{
    struct shape narrow = *shape;
    narrow.wide = narrow.unaligned = narrow.plain = narrow.unaligned_samples = narrow.in_cache_lines = false;
    narrow.elements = narrow.folded = 1;
    return narrow;
}

int32_t normfuse_cuda_rows_folded(const struct normfuse_problem *problem, int elements, bool unaligned_samples);
/* *shape has the device and what else is not of a problem: device to explains. False: more than the kernels count. */
bool normfuse_cuda_shape_of(const struct normfuse_problem *problem, struct shape *shape);
#endif
