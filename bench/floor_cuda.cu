/* SPDX-License-Identifier: MIT
 *
 * floor_cuda.cu - the benchmark's floor on a GPU: kernels that only move the bytes that an operator must move, 16 at a
 * time with streaming stores. One vector a thread in blocks of 512, and tiles: a block of 256 threads loads all its
 * vectors before it stores the first. No operator that reads its input from memory and writes its output there is
 * faster. */
#include <stdint.h>

#define FLOOR_THREADS(VECTORS) ((VECTORS) == 1 ? 512 : 256)

typedef unsigned long long int vector_count;

template <int VECTORS> static __device__ void copy_tile(uint4 *y, const uint4 *x, vector_count vectors)
{
    const uint32_t threads = FLOOR_THREADS(VECTORS);
    const vector_count first = (vector_count)blockIdx.x * (threads * VECTORS) + threadIdx.x;
    uint4 values[VECTORS];
    if (first - threadIdx.x + threads * VECTORS <= vectors) {
#pragma unroll
        for (int i = 0; i < VECTORS; i++)
            values[i] = __ldcs(x + first + i * threads);
#pragma unroll
        for (int i = 0; i < VECTORS; i++)
            __stcs(y + first + i * threads, values[i]);
        return;
    }
    for (int i = 0; i < VECTORS; i++)
        if (first + i * threads < vectors)
            __stcs(y + first + i * threads, __ldcs(x + first + i * threads));
}

static __device__ uint4 combine(uint4 a, uint4 b)
{
    return make_uint4(a.x ^ b.x, a.y ^ b.y, a.z ^ b.z, a.w ^ b.w);
}

template <int VECTORS>
static __device__ void combine_tile(uint4 *dx, const uint4 *x, const uint4 *dy, vector_count vectors)
{
    const uint32_t threads = FLOOR_THREADS(VECTORS);
    const vector_count first = (vector_count)blockIdx.x * (threads * VECTORS) + threadIdx.x;
    uint4 a[VECTORS], b[VECTORS];
    if (first - threadIdx.x + threads * VECTORS <= vectors) {
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            a[i] = __ldcs(x + first + i * threads);
            b[i] = __ldcs(dy + first + i * threads);
        }
#pragma unroll
        for (int i = 0; i < VECTORS; i++)
            __stcs(dx + first + i * threads, combine(a[i], b[i]));
        return;
    }
    for (int i = 0; i < VECTORS; i++)
        if (first + i * threads < vectors)
            __stcs(dx + first + i * threads,
                   combine(__ldcs(x + first + i * threads), __ldcs(dy + first + i * threads)));
}

/* `rest` bytes, fewer than 16, follow the vectors; the first block moves them. */
static __device__ void copy_rest(uint4 *y, const uint4 *x, vector_count vectors, uint32_t rest)
{
    if (blockIdx.x == 0 && threadIdx.x < rest)
        ((unsigned char *)(y + vectors))[threadIdx.x] = ((const unsigned char *)(x + vectors))[threadIdx.x];
}

static __device__ void combine_rest(uint4 *dx, const uint4 *x, const uint4 *dy, vector_count vectors, uint32_t rest)
{
    if (blockIdx.x == 0 && threadIdx.x < rest)
        ((unsigned char *)(dx + vectors))[threadIdx.x] = ((const unsigned char *)(x + vectors))[threadIdx.x] ^
                                                         ((const unsigned char *)(dy + vectors))[threadIdx.x];
}

#define COPY(VECTORS)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(FLOOR_THREADS(VECTORS))                                               \
        floor_copy_##VECTORS(uint4 *y, const uint4 *x, vector_count vectors, uint32_t rest)                            \
    {                                                                                                                  \
        copy_tile<VECTORS>(y, x, vectors);                                                                             \
        copy_rest(y, x, vectors, rest);                                                                                \
    }
#define COMBINE(VECTORS)                                                                                               \
    extern "C" __global__ void __launch_bounds__(FLOOR_THREADS(VECTORS))                                               \
        floor_combine_##VECTORS(uint4 *dx, const uint4 *x, const uint4 *dy, vector_count vectors, uint32_t rest)       \
    {                                                                                                                  \
        combine_tile<VECTORS>(dx, x, dy, vectors);                                                                     \
        combine_rest(dx, x, dy, vectors, rest);                                                                        \
    }

COPY(1)
COPY(8)
COPY(16)
COMBINE(1)
COMBINE(8)
COMBINE(16)
