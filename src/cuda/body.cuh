/* SPDX-License-Identifier: MIT
 *
 * body.cuh - how kernels come of bodies, what these may request first, and loops over what a thread has in registers.
 */
#ifndef NORMFUSE_CUDA_BODY_CUH
#define NORMFUSE_CUDA_BODY_CUH

#include "kernels.h"
#include "ptx.cuh"

/* The kernel of a row of kernels.def, whose body is a template of its layout and direction. */
#define NORMFUSE_INSTANCE(layout, schedule, direction, type, elements, vectors, registers)                             \
    NORMFUSE_KERNEL(layout, schedule, direction, type, elements, vectors, registers)                                   \
    {                                                                                                                  \
        layout##_##direction<type, elements, vectors, NORMFUSE_SCHEDULE_##schedule>(a);                                \
    }

/* What request() reads of the tensors may be there before the kernel ahead has ended, which all else waits for. */
template <typename Request>
__device__ __forceinline__ void request_early(const normfuse_cuda_arguments &a, Request request)
{
    if (!a.begins_early)
        await_last_kernel();
    request();
    await_last_kernel();
}

/* work(i) for each i below N, unrolled: what i counts through stays in registers. */
template <int N, typename Work> __device__ __forceinline__ void each(Work work)
{
#pragma unroll
    for (int i = 0; i < N; i++)
        work(i);
}

#endif
