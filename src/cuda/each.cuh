/* SPDX-License-Identifier: MIT
 *
 * each.cuh - loops over what a thread has in registers. */
#ifndef NORMFUSE_CUDA_EACH_CUH
#define NORMFUSE_CUDA_EACH_CUH

/* work(i) for each i below N, unrolled: what i counts through stays in registers. */
template <int N, typename Work> __device__ __forceinline__ void each(Work work)
{
#pragma unroll
    for (int i = 0; i < N; i++)
        work(i);
}

#endif
