/* SPDX-License-Identifier: MIT
 *
 * columns.cuh - how threads walk the tile of a block when channels are adjacent; kernels.h has the picture. A thread
 * has one pack of channels and every RT-th row, RT being the rows that a block of threads covers at once. */
#ifndef NORMFUSE_CUDA_COLUMNS_CUH
#define NORMFUSE_CUDA_COLUMNS_CUH

#include "join.cuh"

struct column_place {
    int n, c;                         /* sample (0 where a team has all as one) and the thread's first channel */
    int first, stop;                  /* the rows of the part */
    int column, beside, rows_at_once; /* the thread's pack in the block, its row among those at once */
    bool active;                      /* has a pack at all */
};

template <int V> __device__ __forceinline__ column_place place_of(const normfuse_cuda_arguments &a, int team, int part)
{
    const normfuse_cuda_geometry &g = a.geometry;
    column_place place;
    const int sample = divide(team, g.by_blocks_wide), beside = team - sample * g.blocks_wide;
    const int of_sample = g.all_samples ? divide(part, g.by_parts_a_sample) : 0;
    place.n = g.all_samples ? of_sample : sample;
    place.rows_at_once = (int)g.by_rows_at_once.divisor;
    place.beside = divide((int)threadIdx.x, g.by_width);
    place.column = (int)threadIdx.x - place.beside * g.width;
    place.c = (beside * g.width + place.column) * V;
    place.active = place.beside < place.rows_at_once && place.c < a.problem.c;
    place.first = (part - of_sample * g.parts_a_sample) * g.part_rows;
    place.stop = min(g.rows, place.first + g.part_rows);
    return place;
}

template <typename T, int V> struct column_cursor {
    char *at;

    __device__ __forceinline__ column_cursor(const normfuse_view &view, const column_place &place, int row)
    {
        asm volatile("" : "+r"(row));
        at = view.data + ((int64_t)place.n * view.batch + (int64_t)row * view.position +
                          (int64_t)place.c * (V > 1 ? 1 : view.channel)) *
                             (int64_t)sizeof(T);
    }
    /* To the row that the thread has next. */
    __device__ __forceinline__ void advance(const normfuse_view &view, const column_place &place)
    {
        at += place.rows_at_once * view.position * (int64_t)sizeof(T);
    }
    __device__ __forceinline__ raw<T, V> load() const
    {
        return load_pack<T, V>(at, 0);
    }
    __device__ __forceinline__ void store(raw<T, V> pack) const
    {
        store_pack<T, V>(at, 0, pack);
    }
};

/* How many of `slots` packs the thread has in a tile that begins at `row`. */
__device__ __forceinline__ int slots_of(const normfuse_cuda_arguments &a, const column_place &place, int row, int slots)
{
    const int rows = place.stop - row;
    return !place.active || rows <= 0 ? 0
                                      : min(slots, divide(rows + place.rows_at_once - 1, a.geometry.by_rows_at_once));
}

/* Calls work(slot) for each of the thread's `count` rows: `shared` slots first, which are negative, then K that are
 * known when compiling. */
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
