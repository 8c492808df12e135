/* SPDX-License-Identifier: MIT
 *
 * runs.cuh - how threads walk the tile of a block when positions are adjacent; kernels.h has the picture. Forward and
 * backward share it. */
#ifndef NORMFUSE_CUDA_RUNS_CUH
#define NORMFUSE_CUDA_RUNS_CUH

#include "join.cuh"

/* The kernels of a type, in the order of the lists in kernels.h. */
enum run_tile {
    TILE_MANY,    /* sets so small that each segment of a warp has one */
    TILE_ANY,     /* every way, with everything that is added, and all activations */
    TILE_WHOLE,   /* a block has one set, and nothing to ask of others; here and below: plain */
    TILE_PASSING, /* nothing is kept: sums alone, or results from statistics that are known */
    TILE_SHARED   /* the blocks of a set keep it and tell one another what they found */
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

/* Weight and bias of a channel with the sample's scale and shift. */
template <typename R>
__device__ __forceinline__ void weigh_channel(const normfuse_problem &p, int64_t n, int64_t c, R &slope, R &offset)
{
    const auto asked = [&](const normfuse_parameter &of) {
        return of.data ? ask<R>(of, n * of.batch + c * of.channel) : bits<R>(0);
    };
    const bits<R> weight = asked(p.weight), bias = asked(p.bias), scale = asked(p.scale), shift = asked(p.shift);
    const R more = p.scale.data ? R(1) + told<R>(scale, p.scale.type) : R(1);
    slope = p.weight.data ? told<R>(weight, p.weight.type) * more : more;
    offset = p.bias.data ? told<R>(bias, p.bias.type) * more : R(0);
    if (p.shift.data)
        offset += told<R>(shift, p.shift.type);
}

/* Where a thread's packs are: from `index` on, `step` apart, up to `end`; all of a set are counted through. */
struct run_packs {
    int set, n, c;
    int first_outer; /* the stretch that the block begins in */
    int index, end, step;
};

/* The forward deals packs to the threads of a block in turn. The backward, which has to know what each channel sums to,
 * gives each warp adjacent ones, so that a warp meets few channels. `many`: each segment of a warp has a set of its
 * own, so nothing here is the same in a whole block. */
template <bool many, bool dealt>
__device__ __forceinline__ run_packs packs_of(const normfuse_cuda_arguments &a, int set, int part, int tile)
{
    const normfuse_cuda_geometry &g = a.geometry;
    run_packs packs;
    if (many) {
        packs.step = 1 << g.lane_bits;
        packs.set = set * g.sets_a_block + ((int)threadIdx.x >> g.lane_bits);
        packs.index = (int)threadIdx.x & (packs.step - 1);
        packs.end = packs.set < g.sets ? g.rows : 0;
        packs.first_outer = 0;
    } else {
        packs.set = set;
        packs.end = min(g.rows, (part + 1) * g.part_rows);
        int first = part * g.part_rows;
        if (dealt) {
            packs.step = (int)blockDim.x;
            first += tile * g.segment_rows * packs.step;
            packs.index = first + (int)threadIdx.x;
        } else {
            packs.step = 32;
            const int of_warp = first + ((int)threadIdx.x >> 5) * g.segment_rows;
            packs.index = of_warp + ((int)threadIdx.x & 31);
            packs.end = min(packs.end, of_warp + g.segment_rows);
        }
        packs.first_outer = divide(first, g.by_spans);
    }
    begin_of(a, packs.set, packs.n, packs.c);
    return packs;
}

/* One tensor as a thread sees it: the first element of the set, and what leads from one stretch to the next. `alike`:
 * the call's tensors have the same strides and sets below 2^31 bytes, so that one place of 32 bits is found for all of
 * them; `strides` is then the same view for each. */
template <typename T, int V, bool alike> struct run_tensor {
    char *data;
    int64_t outer, inner; /* bytes */

    __device__ __forceinline__ run_tensor(const normfuse_cuda_arguments &a, const normfuse_view &view,
                                          const normfuse_view &strides, int n, int c)
    {
        /* Found again for each walk: kept from one to the next these would be more registers than the packs. */
        if (!alike)
            asm volatile("" : "+r"(n), "+r"(c));
        data = view.data + ((int64_t)n * strides.batch + (int64_t)c * strides.channel) * (int64_t)sizeof(T);
        outer = (a.problem.sets == NORMFUSE_SETS_BATCH ? strides.batch : strides.channel) * (int64_t)sizeof(T);
        inner = V > 1 ? (int64_t)sizeof(T) * V : strides.position * (int64_t)sizeof(T);
    }
    __device__ __forceinline__ char *at(const normfuse_cuda_geometry &g, int index, int stretch) const
    {
        if (alike) {
            const unsigned gap = (unsigned)outer - (unsigned)g.spans * (unsigned)(sizeof(T) * V);
            return data + ((unsigned)index * (unsigned)(sizeof(T) * V) + (unsigned)stretch * gap);
        }
        const int within = index - stretch * g.spans;
        return data + stretch * outer + (V > 1 ? (int64_t)within * (int)(sizeof(T) * V) : within * inner);
    }
};

#endif
