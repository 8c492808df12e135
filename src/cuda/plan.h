/* SPDX-License-Identifier: MIT
 *
 * plan.h - the kernels of a call with their geometry, and the scratch memory between them. */
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
 * is this thread's until its next call. */
const struct plan *normfuse_cuda_plan_of(const struct normfuse_problem *problem,
                                         const struct normfuse_cuda_device *device, bool has_grid_barriers,
                                         bool *is_certain);
/* NORMFUSE_VERBOSE=plan: what every schedule says of the call, to stderr. */
void normfuse_cuda_explain(const struct normfuse_problem *problem, const struct normfuse_cuda_device *device,
                           bool has_grid_barriers);

static inline size_t rounded(size_t bytes)
{
    return (bytes + 63) / 64 * 64;
}

#endif
