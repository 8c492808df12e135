/* SPDX-License-Identifier: MIT
 *
 * columns_grid.cuh - group norm over adjacent channels (NHWC) by the whole grid at once: what the threads of a block,
 * then the blocks of a sample exchange of each group. */
#ifndef NORMFUSE_CUDA_COLUMNS_GRID_CUH
#define NORMFUSE_CUDA_COLUMNS_GRID_CUH

#include "gradients.cuh"
#include "pipeline.cuh"

/* What threads, then blocks found of a group is joined by eight lanes; a warp does four groups at a time, those of the
 * whole block as many as it has threads for. */
constexpr int lanes_of_group = 8;

struct joining_lane {
    int group, lane;
    bool is_needed; /* whether there is such a group: whole warps go on */

    __device__ __forceinline__ joining_lane(const normfuse_cuda_columns &a, int round)
    {
        const int nth = round + (int)threadIdx.x / lanes_of_group;
        is_needed = nth < a.groups;
        group = is_needed ? nth : a.groups - 1;
        lane = (int)threadIdx.x % lanes_of_group;
    }
    __device__ __forceinline__ bool is_first() const
    {
        return is_needed && lane == 0;
    }
};

/* What the blocks of a sample send one another of a group, beside one another. Two such places take turns: a block may
 * write for the next sample while another still reads of this one, but not for the one after that. */
__device__ __forceinline__ float2 *parts_of_group(const normfuse_cuda_arguments &all, int block_group, int parity,
                                                  int group)
{
    const normfuse_cuda_columns &a = all.columns;
    return reinterpret_cast<float2 *>(all.partials) +
           ((int64_t)(parity * a.of.grid.block_groups + block_group) * a.groups + group) * a.parts;
}

/* Of what a lane joins, how much it requests at once. */
enum { held_parts = 9, held_sums = 4 };

/* Every eighth of `left` pairs; zeros where there are no more. */
__device__ __forceinline__ void request_parts(const float2 *from, int left, float2 (&parts)[held_parts])
{
#pragma unroll
    for (int k = 0; k < held_parts; k++) {
        parts[k] = make_float2(0.0f, 0.0f);
        if (k * lanes_of_group < left)
            parts[k] = __ldcg(from + k * lanes_of_group);
    }
}

/* ---- backward: totals -------------------------------------------------------------------------------------------- */

/* What the block's threads found, of each group, into memory. */
template <int V>
__device__ __forceinline__ void write_totals(const normfuse_cuda_arguments &all, int block_group, int part, int parity,
                                             const float2 *entries, int consumers)
{
    const normfuse_cuda_columns &a = all.columns;
    const int groups_at_once = consumers / lanes_of_group;
#pragma unroll 1
    for (int round = 0; round < a.groups; round += groups_at_once) {
        const joining_lane join(a, round);
        int begin, count;
        entries_of_group<V>(a, join.group, begin, count);
        float sum = 0.0f, product = 0.0f;
#pragma unroll 4
        for (int i = join.lane; i < count; i += lanes_of_group) {
            sum += entries[begin + i].x;
            product += entries[begin + i].y;
        }
        sum = sum_few(sum, lanes_of_group);
        product = sum_few(product, lanes_of_group);
        if (join.is_first())
            __stcg(parts_of_group(all, block_group, parity, join.group) + part, make_float2(sum, product));
    }
}

/* What all blocks of the sample found, into what dx takes of x - mean, and what else. `of_groups`: what each mean
 * leaves out, and rstd. */
__device__ __forceinline__ void join_totals(const normfuse_cuda_arguments &all, int block_group, int parity,
                                            const float2 *of_groups, float2 *of_totals, int consumers)
{
    const normfuse_cuda_columns &a = all.columns;
    const int groups_at_once = consumers / lanes_of_group;
#pragma unroll 1
    for (int round = 0; round < a.groups; round += groups_at_once) {
        const joining_lane join(a, round);
        const float2 *const of_parts = parts_of_group(all, block_group, parity, join.group);
        float sum = 0.0f, product = 0.0f;
#pragma unroll 1
        for (int left = a.parts - join.lane; left > 0; left -= held_parts * lanes_of_group) {
            float2 found[held_parts], of_round = make_float2(0.0f, 0.0f);
            request_parts(of_parts + (a.parts - left), left, found);
#pragma unroll
            for (int k = 0; k < held_parts; k++) {
                of_round.x += found[k].x;
                of_round.y += found[k].y;
            }
            sum += of_round.x;
            product += of_round.y;
        }
        sum = sum_few(sum, lanes_of_group);
        product = sum_few(product, lanes_of_group);
        if (join.is_first()) {
            const float2 of_group = of_groups[join.group];
            product -= of_group.x * sum;
            const float centred = -(product * of_group.y) * (of_group.y * a.share);
            of_totals[join.group] = make_float2(centred, -sum * a.share - centred * of_group.x);
        }
    }
}

/* ---- backward: what parameters get ------------------------------------------------------------------------------- */

/* Two channels' pairs of one block, as they are in memory. */
template <typename Number> struct channel_pairs;
template <> struct channel_pairs<float> {
    float4 of = {};

    __device__ __forceinline__ void request(const char *from, bool wanted)
    {
        request_where(wanted, of, from);
    }
    __device__ __forceinline__ void add_to(double (&sums)[4]) const
    {
        sums[0] += (double)of.x;
        sums[1] += (double)of.y;
        sums[2] += (double)of.z;
        sums[3] += (double)of.w;
    }
};
template <> struct channel_pairs<double> {
    double2 of[2] = {};

    __device__ __forceinline__ void request(const char *from, bool wanted)
    {
        if (wanted) {
            of[0] = __ldcg(reinterpret_cast<const double2 *>(from));
            of[1] = __ldcg(reinterpret_cast<const double2 *>(from) + 1);
        }
    }
    __device__ __forceinline__ void add_to(double (&sums)[4]) const
    {
        sums[0] += of[0].x;
        sums[1] += of[0].y;
        sums[2] += of[1].x;
        sums[3] += of[1].y;
    }
};

/* What parameters get when all blocks have put their sums of channels, pairs of `Number`: of two channels at a time, a
 * warp's, whose lanes have every 32nd block each. */
template <typename Number> struct channel_gradients {
    enum { requested_blocks = 5 };
    channel_pairs<Number> requested[requested_blocks];
    const char *from;
    int channels;

    __device__ __forceinline__ channel_gradients(const normfuse_cuda_arguments &all, int channels)
        : from(reinterpret_cast<const char *>(all.sums)), channels(channels)
    {
    }
    __device__ __forceinline__ const char *place(int block, int c) const
    {
        return from + ((int64_t)block * channels + c) * (int)(2 * sizeof(Number));
    }
    __device__ __forceinline__ void request(int c)
    {
#pragma unroll
        for (int i = 0; i < requested_blocks; i++) {
            const int block = (int)threadIdx.x % 32 + 32 * i;
            requested[i].request(place(block, c), c < channels && block < (int)gridDim.x);
        }
    }
    /* What was requested. */
    __device__ __forceinline__ void give(const normfuse_cuda_arguments &all, int c)
    {
        const int lane = (int)threadIdx.x % 32;
        double sums[4] = {};
#pragma unroll
        for (int i = 0; i < requested_blocks; i++)
            requested[i].add_to(sums);
#pragma unroll 1
        for (int block = lane + 32 * requested_blocks; block < (int)gridDim.x; block += 32) {
            channel_pairs<Number> more;
            more.request(place(block, c), true);
            more.add_to(sums);
        }
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2)
#pragma unroll
            for (int i = 0; i < 4; i++)
                sums[i] += __shfl_xor_sync(full_mask, sums[i], distance);
        /* A lane each, so that what they need of the arguments is waited for once. */
        if (lane < 4)
            write_gradient(all.problem, lane % 2 == 0 ? all.problem.dbias() : all.problem.dweight(), 0, c + lane / 2,
                           lane == 0   ? sums[0]
                           : lane == 1 ? sums[1]
                           : lane == 2 ? sums[2]
                                     : sums[3]);
    }
};

#endif
