/* SPDX-License-Identifier: MIT
 *
 * policy.h - what the planner knows of each kind of GPU beyond what the driver says, by compute capability. */
#ifndef NORMFUSE_CUDA_POLICY_H
#define NORMFUSE_CUDA_POLICY_H

#include <stdint.h>

struct normfuse_cuda_policy {
    int32_t capability;         /* the least that this row is for */
    double bytes_a_microsecond; /* that a copy moves, read and written */
};

static inline const struct normfuse_cuda_policy *normfuse_cuda_policy(int32_t capability)
{
    /* The first row whose capability the device has. */
    static const struct normfuse_cuda_policy policies[] = {{.capability = 90, .bytes_a_microsecond = 4.2e6}, /* H200 */
                                                           {.capability = 0, .bytes_a_microsecond = 1.5e6}}; /* A100 */
    const struct normfuse_cuda_policy *policy = policies;
    while (capability < policy->capability)
        policy++;
    return policy;
}

#endif
