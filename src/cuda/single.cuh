/* SPDX-License-Identifier: MIT
 *
 * single.cuh - what the kernels that load one element at a time have in common: lines.cu and tile.cu. */
#ifndef NORMFUSE_CUDA_SINGLE_CUH
#define NORMFUSE_CUDA_SINGLE_CUH

#include "activation.cuh"
#include "body.cuh"

/* Values of a thread that are worked on together; slots that are used are a multiple of this. */
constexpr int slots_at_once = 4;

template <typename T> __device__ __forceinline__ compute<T> number_of(const raw<T, 1> &value)
{
    compute<T> number[1];
    unpack<T, 1>(value, number);
    return number[0];
}
template <typename T> __device__ __forceinline__ raw<T, 1> rounded_to(compute<T> number)
{
    const compute<T> numbers[1] = {number};
    return make_vector<T, 1>(numbers);
}
/* Not a streaming store: several stores fill a sector. */
template <typename T> __device__ __forceinline__ void store_number(char *to, compute<T> number)
{
    *reinterpret_cast<raw<T, 1> *>(to) = rounded_to<T>(number);
}

/* work(slot) for the first `used` of a thread's slots, rounded up to slots_at_once. */
template <int K, typename Work> __device__ __forceinline__ void in_slots(int used, Work work)
{
#pragma unroll
    for (int k = 0; k < K; k++) {
        if (k % slots_at_once == 0 && k >= used)
            break;
        work(k);
    }
}

/* x with what is added to it, rounded as it would be in memory. */
template <typename T> __device__ __forceinline__ compute<T> rounded_sum(compute<T> x, compute<T> more)
{
    return number_of<T>(rounded_to<T>(x + more));
}

/* value / divisor, rounded once but for the last bit, exact where the quotient is; share is 1 / divisor. */
template <typename R> __device__ __forceinline__ R quotient(R value, R divisor, R share)
{
    const R near = value * share;
    return fma(fma(-near, divisor, value), share, near);
}

#endif
