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
    int count = 0; /* of those, that pass now */
    const char *from[2] = {nullptr, nullptr};
    int slot = 0; /* of the vector that comes next, in places from `first` on */

    __device__ __forceinline__ passing_tensors(uint4 *first, int tensors) : first(first), tensors(tensors)
    {
    }
    __device__ __forceinline__ int slot_places() const
    {
        return tensors * (int)blockDim.x;
    }
    /* The vector that comes next, of the `which`-th tensor. */
    __device__ __forceinline__ uint4 &at(int which) const
    {
        return first[slot + which * (int)blockDim.x];
    }
    /* copy(i, one) calls one(request) where the thread has an i-th vector, and request(to, tensor) requests it. */
    template <typename Copy> __device__ __forceinline__ void request(int into, int i, Copy copy) const
    {
        copy(i, [&](auto request_one) {
            request_one(first + into, from[0]);
            if (count > 1)
                request_one(first + into + (int)blockDim.x, from[1]);
        });
        commit_copies();
    }
    /* `other` only where there is `one`. */
    template <typename Copy> __device__ __forceinline__ void open(const char *one, const char *other, Copy copy)
    {
        from[0] = one;
        from[1] = other;
        count = one ? other ? 2 : 1 : 0;
        make_opaque(count);
        slot = 0;
        if (count > 0)
#pragma unroll 1
            for (int i = 0; i < ahead; i++)
                request(i * slot_places(), i, copy);
    }
    __device__ __forceinline__ void await() const
    {
        wait_for_older_copies<ahead - 1>();
    }
    /* Past the i-th vector. */
    template <typename Copy> __device__ __forceinline__ void advance(int i, Copy copy)
    {
        if (count > 0) {
            request(slot, i + ahead, copy);
            slot += slot_places();
            if (slot == ahead * slot_places())
                slot = 0;
        }
    }
};

#endif
