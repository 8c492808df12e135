/* SPDX-License-Identifier: MIT
 *
 * runs.cuh - how threads walk the tile of a block when positions are adjacent; kernels.h has the picture. Forward and
 * backward share it. */
#ifndef NORMFUSE_CUDA_RUNS_CUH
#define NORMFUSE_CUDA_RUNS_CUH

#include "join.cuh"

/* Where a thread's rows are. `many`: each segment has a set of its own, so nothing here is the same in a whole block.
 */
struct run_place {
    int set, n, c;   /* the set, its first sample and channel */
    int first_outer; /* of the rows of the block */
    int outer;       /* of the thread's first row, */
    int span, rows;  /* the row within it; how many rows there are */
    bool whole;      /* the thread has a pack in the last row of a stretch, too */
};

/* First sample and channel of a set. */
__device__ __forceinline__ void begin_of(const normfuse_cuda_arguments &a, int set, int &n, int &c)
{
    if (a.problem.sets == NORMFUSE_SETS_GROUP) {
        n = divide(set, a.geometry.by_groups);
        c = (set - n * (int)a.problem.groups) * a.geometry.outer;
    } else {
        const bool by_sample = a.problem.sets == NORMFUSE_SETS_BATCH;
        n = by_sample ? 0 : set;
        c = by_sample ? set : 0;
    }
}

template <bool many>
__device__ __forceinline__ run_place place_of(const normfuse_cuda_arguments &a, int set, int part, int tile)
{
    const normfuse_cuda_geometry &g = a.geometry;
    run_place place;
    const int lanes = 1 << g.lane_bits, segment = (int)threadIdx.x >> g.lane_bits;
    int row = 0, end = g.rows;
    place.first_outer = 0;
    if (many) {
        set = set * g.sets_a_block + segment;
        if (set >= g.sets)
            end = 0;
    } else {
        const int first = part * g.part_rows + tile * ((int)blockDim.x >> g.lane_bits) * g.segment_rows;
        row = first + segment * g.segment_rows;
        end = min(end, (part + 1) * g.part_rows);
        place.first_outer = divide(first, g.by_spans);
    }
    place.set = set;
    begin_of(a, set, place.n, place.c);
    place.outer = divide(row, g.by_spans);
    place.span = row - place.outer * g.spans;
    place.rows = max(0, min(g.segment_rows, end - row));
    place.whole = ((int)threadIdx.x & (lanes - 1)) < g.last_lanes;
    return place;
}

/* The thread's place in one tensor. A stride is asked for from the arguments each time rather than kept. */
template <typename T, int V> struct run_cursor {
    char *at;

    __device__ __forceinline__ run_cursor(const normfuse_cuda_arguments &a, const normfuse_view &view,
                                          const run_place &place)
    {
        /* Places found again for each walk: kept from one to the next they would be more registers than the packs. */
        int outer = place.outer, span = place.span;
        asm volatile("" : "+r"(outer), "+r"(span));
        const int lanes = 1 << a.geometry.lane_bits, lane = (int)threadIdx.x & (lanes - 1);
        const int64_t inner = (int64_t)(span * lanes + lane) * V;
        at = view.data + ((int64_t)place.n * view.batch + (int64_t)place.c * view.channel +
                          (int64_t)outer * outer_step(a, view) + (V > 1 ? inner : inner * view.position)) *
                             (int64_t)sizeof(T);
    }
    static __device__ __forceinline__ int64_t outer_step(const normfuse_cuda_arguments &a, const normfuse_view &view)
    {
        return a.problem.sets == NORMFUSE_SETS_BATCH ? view.batch : view.channel;
    }
    /* To the next row: of the same stretch, or the first one of the next. */
    __device__ __forceinline__ void advance(const normfuse_cuda_arguments &a, const normfuse_view &view, bool last)
    {
        const int64_t row = ((int64_t)V * (int64_t)sizeof(T) << a.geometry.lane_bits) * (V > 1 ? 1 : view.position);
        at += last ? outer_step(a, view) * (int64_t)sizeof(T) - (a.geometry.spans - 1) * row : row;
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

/* Calls work(slot, valid, last) for each row of the thread: `shared` slots first, which are negative, then K that are
 * known when compiling. last: the stretch ends with this row. */
template <int K, typename Work>
__device__ __forceinline__ void walk(const run_place &place, int spans, int shared, Work work)
{
    int span = place.span;
    asm volatile("" : "+r"(span));
#pragma unroll 1
    for (int k = 0; k < shared; k++) {
        const bool last = span == spans - 1;
        work(-1 - k, !last || place.whole, last);
        span = last ? 0 : span + 1;
    }
#pragma unroll
    for (int k = 0; k < K; k++) {
        if (shared + k < place.rows) {
            const bool last = span == spans - 1;
            work(k, !last || place.whole, last);
            span = last ? 0 : span + 1;
        }
    }
}

#endif
