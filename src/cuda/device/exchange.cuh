/* SPDX-License-Identifier: MIT
 *
 * exchange.cuh - sums of threads become those of the lanes, the block or the cluster that share a norm group. Every join has
 * one order, fixed by the signature: no float atomics, the same bits each time. */
#ifndef NORMFUSE_DEVICE_EXCHANGE_CUH
#define NORMFUSE_DEVICE_EXCHANGE_CUH

#include "vector.cuh"

constexpr unsigned full_mask = 0xffffffffu;

__device__ __forceinline__ int divide(int value, const normfuse_divisor &by)
{
    return (int)((__umulhi((unsigned)value, by.multiplier) + (unsigned)value) >> by.shift);
}

/* value / divisor, rounded once but for the last bit, exact where the quotient is; share is 1 / divisor. */
__device__ __forceinline__ R quotient(R value, R divisor, R share)
{
    const R near = value * share;
    return fma(fma(-near, divisor, value), share, near);
}

/* The hardware's has 2.2 units of 2^-24 (CUDA's rsqrtf: 2 ulp); a root and a division have 2, and take ten times as
 * long. */
__device__ __forceinline__ R inverse_root(R value)
{
    if constexpr (sizeof(R) == 8)
        return 1.0 / sqrt(value);
    else
        return rsqrtf(value);
}

/* Over `lanes` adjacent threads of a warp, from `apart` threads to the next on. */
template <int N, int lanes, int apart = 1, typename Number>
__device__ __forceinline__ void sum_lanes(Number (&values)[N])
{
#pragma unroll
    for (int distance = lanes / 2; distance > 0; distance /= 2)
        each<N>([&](int i) { values[i] += __shfl_xor_sync(full_mask, values[i], distance * apart); });
}

/* Over the threads that share a norm group: `lanes` of a warp, or the whole block. `shared` has N numbers of each warp; a
 * block that sums twice has two of them, in turn. */
template <int N, int lanes> __device__ __forceinline__ void sum_threads(R (&values)[N], R *shared)
{
    sum_lanes<N, (lanes < 32 ? lanes : 32)>(values);
    if constexpr (lanes > 32) {
        constexpr int warps = lanes / 32;
        if (threadIdx.x % 32 == 0)
            each<N>([&](int i) { shared[(int)threadIdx.x / 32 * N + i] = values[i]; });
        __syncthreads();
        if constexpr (warps <= 8) {
            each<N>([&](int i) { values[i] = shared[i]; });
            each<warps - 1>([&](int w) { each<N>([&](int i) { values[i] += shared[(w + 1) * N + i]; }); });
        } else {
            const int lane = (int)threadIdx.x % 32;
            each<N>([&](int i) { values[i] = lane < warps ? shared[lane * N + i] : R(0); });
            sum_lanes<N, 32>(values);
        }
    }
}

/* Adjacent threads of a warp that join what `down` threads have of each of so many columns. */
__device__ __forceinline__ constexpr int lanes_that_join(int threads, int columns, int down)
{
    int found = 1;
    while (found < 32 && found * 2 <= down && found * 2 * columns <= threads)
        found *= 2;
    return found;
}

/* work(item, lane, exists) for items of which `lanes` adjacent threads have one each, whole warps in step. */
template <int block_threads, int lanes, typename Work> __device__ __forceinline__ void each_item(int items, Work work)
{
    constexpr int at_once = block_threads / lanes;
#pragma unroll 1
    for (int first = 0; first < items; first += at_once) {
        const int item = first + (int)threadIdx.x / lanes;
        work(item < items ? item : 0, (int)threadIdx.x % lanes, item < items);
    }
}

/* Numbers that a block of a cluster sends all of them. */
template <int N> struct message {
    R numbers[N];
};

/* To one block of the cluster. */
template <int N>
__device__ __forceinline__ void send_message(uint64_t &mailbox, message<N> *place, int to, const message<N> &sent)
{
#if __CUDA_ARCH__ >= 900
    constexpr int words = (int)sizeof(message<N>) / 8;
    static_assert(words * 8 == sizeof(message<N>), "messages are words of 8 bytes");
    union {
        message<N> of;
        uint64_t bits[words];
    } read;
    read.of = sent;
    each<words>([&](int i) { send(mailbox, reinterpret_cast<uint64_t *>(place) + i, to, read.bits[i]); });
#endif
}

/* The same message to every block of the cluster, in the sender's place; `entries` has one for each block. By the first
 * `parts` threads; returns when those of all blocks are here. */
template <int N>
__device__ __forceinline__ void exchange_messages(uint64_t &mailbox, message<N> *entries, int rank, int parts,
                                                  const message<N> &sent)
{
#if __CUDA_ARCH__ >= 900
    await_open_mailboxes();
    if ((int)threadIdx.x < parts)
        send_message(mailbox, entries + rank, (int)threadIdx.x, sent);
    await_mailbox(mailbox, 0);
#endif
}

#endif
