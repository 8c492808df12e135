/* SPDX-License-Identifier: MIT
 *
 * floor_cuda.cu - the benchmark's floor on a GPU: kernels that only move the bytes that an operator must move, 16 at a
 * time with streaming stores. One vector a thread in blocks of 512, and tiles: a block of 256 threads loads all its
 * vectors before it stores the first. No operator that reads its input from memory and writes its output there is
 * faster. NVRTC compiles floor_streams.h and this file as one text, without any header of C's or of CUDA's. */
#define FLOOR_THREADS(VECTORS) ((VECTORS) == 1 ? 512 : 256)

typedef unsigned long long int vector_count;

static __device__ uint4 combine(uint4 a, uint4 b)
{
    return make_uint4(a.x ^ b.x, a.y ^ b.y, a.z ^ b.z, a.w ^ b.w);
}

static __device__ const uint4 *vectors_of(const char *data)
{
    return (const uint4 *)data;
}

template <int READS> static __device__ uint4 read(const floor_streams &s, vector_count at)
{
    uint4 value = __ldcs(vectors_of(s.in[0]) + at);
#pragma unroll
    for (int r = 1; r < READS; r++)
        value = combine(value, __ldcs(vectors_of(s.in[r]) + at));
    return value;
}

template <int WRITES> static __device__ void write(const floor_streams &s, vector_count at, uint4 value)
{
#pragma unroll
    for (int w = 0; w < WRITES; w++)
        __stcs((uint4 *)s.out[w] + at, value);
}

/* `rest` bytes, fewer than 16, follow the vectors; the first block moves them. */
template <int READS, int WRITES, int VECTORS>
static __device__ void move(const floor_streams &s, vector_count vectors, unsigned rest)
{
    const unsigned threads = FLOOR_THREADS(VECTORS);
    const vector_count first = (vector_count)blockIdx.x * (threads * VECTORS) + threadIdx.x;
    if (first - threadIdx.x + threads * VECTORS <= vectors) {
        uint4 values[VECTORS][READS];
#pragma unroll
        for (int i = 0; i < VECTORS; i++)
#pragma unroll
            for (int r = 0; r < READS; r++)
                values[i][r] = __ldcs(vectors_of(s.in[r]) + first + i * threads);
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
#pragma unroll
            for (int r = 1; r < READS; r++)
                values[i][0] = combine(values[i][0], values[i][r]);
            write<WRITES>(s, first + i * threads, values[i][0]);
        }
    } else {
        for (int i = 0; i < VECTORS; i++)
            if (first + i * threads < vectors)
                write<WRITES>(s, first + i * threads, read<READS>(s, first + i * threads));
    }
    if (blockIdx.x == 0 && threadIdx.x < rest) {
        const vector_count at = vectors * sizeof(uint4) + threadIdx.x;
        char value = 0;
        for (int r = 0; r < READS; r++)
            value ^= s.in[r][at];
        for (int w = 0; w < WRITES; w++)
            s.out[w][at] = value;
    }
}

#define FLOOR(READS, WRITES, VECTORS)                                                                                  \
    extern "C" __global__ void __launch_bounds__(FLOOR_THREADS(VECTORS))                                               \
        floor_##READS##r##WRITES##w_##VECTORS(floor_streams s, vector_count vectors, unsigned rest)                    \
    {                                                                                                                  \
        move<READS, WRITES, VECTORS>(s, vectors, rest);                                                                \
    }
/* A thread has registers for 32 vectors. */
#define FLOORS(READS, WRITES, SOME, MANY)                                                                              \
    FLOOR(READS, WRITES, 1)                                                                                            \
    FLOOR(READS, WRITES, SOME)                                                                                         \
    FLOOR(READS, WRITES, MANY)

FLOORS(1, 1, 8, 16)
FLOORS(1, 2, 8, 16)
FLOORS(2, 1, 8, 16)
FLOORS(2, 2, 8, 16)
FLOORS(3, 1, 4, 8)
FLOORS(3, 2, 4, 8)
FLOORS(4, 1, 4, 8)
FLOORS(4, 2, 4, 8)
