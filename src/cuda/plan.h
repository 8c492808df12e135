/* SPDX-License-Identifier: MIT
 *
 * plan.h - the kernels of a call with their geometry, the copies around them, and the scratch memory between them. */
#ifndef NORMFUSE_CUDA_PLAN_H
#define NORMFUSE_CUDA_PLAN_H

#include "schedules.h"

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
    struct normfuse_cuda_transpose_arguments before, after; /* of a call's kernels */
    size_t bytes; /* of scratch, whose beginning it is */
};

/* Makes the strides of all tensors the same, by as few copies as can be: x's, or those of either layout without gaps.
 * Tensors that are copied then lie in `scratch`, of which nothing is read here. False: they are too large for that. */
bool normfuse_cuda_transpose(struct normfuse_problem *problem, char *scratch, struct transposed *transposed);

static inline size_t rounded(size_t bytes)
{
    return (bytes + 63) / 64 * 64;
}

#endif
