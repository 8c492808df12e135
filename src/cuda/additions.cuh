/* SPDX-License-Identifier: MIT
 *
 * additions.cuh - how what is added to x, before the activation or to dx reaches the threads of the schedule `additions`,
 * both layouts. */
#ifndef NORMFUSE_CUDA_ADDITIONS_CUH
#define NORMFUSE_CUDA_ADDITIONS_CUH

#include "body.cuh"
#include "vector.cuh"

/* One or two tensors that pass through shared memory beside vectors that are held: of each a thread has so many vectors
 * on their way. Its first place is `first`; a slot has one for each of so many tensors. */
template <bool adds> struct passing_tensors {
    enum { ahead = NORMFUSE_CUDA_PASSING_AHEAD };
    uint4 *const first;
    const int tensors;
    const char *from[2] = {nullptr, nullptr};
    int slot = 0;

    __device__ __forceinline__ passing_tensors(uint4 *first, int tensors) : first(first), tensors(tensors)
    {
    }
    __device__ __forceinline__ uint4 &at(int slot, int which) const
    {
        return first[(slot * tensors + which) * (int)blockDim.x];
    }
    /* copy(to, tensor, i) requests the thread's i-th vector, if it has one. */
    template <typename Copy> __device__ __forceinline__ void request(int into, int i, Copy copy) const
    {
        each<2>([&](int which) {
            if (from[which])
                copy(&at(into, which), from[which], i);
        });
        commit_copies();
    }
    template <typename Copy> __device__ __forceinline__ void open(const char *one, const char *other, Copy copy)
    {
        from[0] = one;
        from[1] = other;
        slot = 0;
        if (one || other)
#pragma unroll 1
            for (int i = 0; i < ahead; i++)
                request(i, i, copy);
    }
    __device__ __forceinline__ void await() const
    {
        wait_for_older_copies<ahead - 1>();
    }
    /* Past the i-th vector. */
    template <typename Copy> __device__ __forceinline__ void advance(int i, Copy copy)
    {
        if (from[0] || from[1]) {
            request(slot, i + ahead, copy);
            slot = slot + 1 == ahead ? 0 : slot + 1;
        }
    }
};

#endif
