/* SPDX-License-Identifier: MIT
 *
 * columns.cuh - how threads walk the tile of a block when channels are adjacent; kernels.h has the picture. A thread has
 * one pack of channels and every RT-th row, RT being the rows that a block of threads covers at once. */
#ifndef NORMFUSE_CUDA_COLUMNS_CUH
#define NORMFUSE_CUDA_COLUMNS_CUH

#include "join.cuh"

struct column_place {
    int64_t n, c;       /* sample (0 where a team has all) and the thread's first channel */
    int64_t first, stop; /* the rows of the whole part */
    int32_t column, beside, rows_at_once; /* the thread's pack in the block, its row among those at once */
    bool active;        /* has a pack at all */
};

template <int V>
__device__ __forceinline__ column_place place_of(const normfuse_cuda_arguments &a, int64_t team, int part)
{
    const normfuse_problem &p = a.problem;
    const normfuse_cuda_geometry &g = a.geometry;
    column_place place;
    const int64_t sample = team / g.blocks_wide, beside = team - sample * g.blocks_wide;
    place.n = g.all_samples ? part / g.parts_a_sample : sample;
    place.rows_at_once = (int)blockDim.x / g.width;
    place.beside = (int)threadIdx.x / g.width;
    place.column = (int)threadIdx.x - place.beside * g.width;
    const int64_t pack = beside * g.width + place.column;
    place.c = pack * V;
    place.active = place.beside < place.rows_at_once && place.c < p.c;
    place.first = (g.all_samples ? part % g.parts_a_sample : part) * g.part_rows;
    place.stop = min(g.rows, place.first + g.part_rows);
    return place;
}

/* How many rows of the part fall to the threads of row `beside`. */
__device__ __forceinline__ int rows_of(const column_place &place, int beside)
{
    const int64_t rows = place.stop - place.first - beside;
    return rows <= 0 ? 0 : (int)((rows + place.rows_at_once - 1) / place.rows_at_once);
}

template <typename T, int V> struct column_cursor {
    char *at;

    __device__ __forceinline__ column_cursor(const normfuse_view &view, const column_place &place, int64_t row)
    {
        asm volatile("" : "+l"(row));
        at = view.data + (place.n * view.batch + row * view.position + place.c * (V > 1 ? 1 : view.channel)) *
                             (int64_t)sizeof(T);
    }
    /* To the row that the thread has next. */
    __device__ __forceinline__ void advance(const normfuse_view &view, const column_place &place)
    {
        at += place.rows_at_once * view.position * (int64_t)sizeof(T);
    }
    __device__ __forceinline__ raw<T, V> load() const { return load_pack<T, V>(at, 0); }
    __device__ __forceinline__ void store(raw<T, V> pack) const { store_pack<T, V>(at, 0, pack); }
};

/* How many of `slots` packs the thread has in a tile that begins at `row`. */
__device__ __forceinline__ int slots_of(const column_place &place, int64_t row, int slots)
{
    const int64_t rows = place.stop - row;
    return !place.active || rows <= 0 ? 0 : (int)min((int64_t)slots, (rows + place.rows_at_once - 1) / place.rows_at_once);
}

/* Calls work(slot) for each of the thread's `count` rows: `shared` slots first, which are negative, then K that are known
 * when compiling. */
template <int K, typename Work> __device__ __forceinline__ void walk(int count, int shared, Work work)
{
#pragma unroll 1
    for (int k = 0; k < shared; k++)
        if (k < count)
            work(-1 - k);
#pragma unroll
    for (int k = 0; k < K; k++)
        if (shared + k < count)
            work(k);
}

#endif
