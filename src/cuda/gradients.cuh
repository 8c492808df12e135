/* SPDX-License-Identifier: MIT
 *
 * gradients.cuh - the sums of channels that tiles left in memory, and what parameters get from them. */
#ifndef NORMFUSE_CUDA_GRADIENTS_CUH
#define NORMFUSE_CUDA_GRADIENTS_CUH

#include "join.cuh"

/* How many partial sums channel `outer` of a set has. */
static __device__ __forceinline__ int sum_slots_of(const normfuse_cuda_arguments &a, int outer)
{
    const normfuse_cuda_geometry &g = a.geometry;
    if (g.sum_slots == 1 || g.channels_a_segment == 0 || g.sums_by_channel)
        return g.sum_slots; /* one, columns, or one stretch a set */
    const unsigned first = (unsigned)outer * (unsigned)g.spans, part = (unsigned)g.part_rows;
    return (int)((first + (unsigned)g.spans - 1) / part - first / part) + 1;
}

/* The norm group of a channel in its sample, and its number there. */
static __device__ __forceinline__ int set_of_channel(const normfuse_cuda_arguments &a, int c)
{
    return divide(c, a.geometry.by_set_channels);
}
static __device__ __forceinline__ int outer_of_channel(const normfuse_cuda_arguments &a, int c)
{
    return c - set_of_channel(a, c) * (int)a.geometry.by_set_channels.divisor;
}

/* Where the partial sums of a channel are, and how many. */
struct channel_parts {
    const double *pairs;
    int count;
};

static __device__ __forceinline__ channel_parts parts_of(const normfuse_cuda_arguments &a, int64_t n, int c)
{
    const normfuse_cuda_problem &p = a.problem;
    const int64_t channel = (a.geometry.sums_by_channel ? 0 : n * p.c) + c;
    return {a.sums + channel * a.geometry.sum_slots * PAIR,
            sum_slots_of(a, p.sets == NORMFUSE_SETS_GROUP ? outer_of_channel(a, c) : c)};
}

/* Pairs as those of the channels' sums, behind them: what the parts found of prelu's slopes, and 0. */
static __device__ __forceinline__ double *sums_of_slopes(const normfuse_cuda_arguments &a)
{
    const normfuse_cuda_geometry &g = a.geometry;
    return a.sums + (g.sums_by_channel ? 1 : a.problem.n) * a.problem.c * g.sum_slots * PAIR;
}

static __device__ __forceinline__ void write_gradient(const normfuse_cuda_problem &p, const normfuse_parameter &to,
                                                      int64_t n, int64_t c, double value)
{
    if (!to.data)
        return;
    if (p.accumulate())
        value += parameter<double>(to, n, c, 0.0);
    write_parameter<double>(to, n, c, value);
}

/* What scale and shift of a sample get; by how much weight and bias count there. */
static __device__ __forceinline__ double write_modulation(const normfuse_cuda_problem &p, int64_t n, int64_t c,
                                                          double plain, double normalized)
{
    if (p.dscale().data)
        write_parameter<double>(p.dscale(), n, c,
                                parameter<double>(p.weight(), n, c, 1.0) * normalized +
                                    parameter<double>(p.bias(), n, c, 0.0) * plain);
    write_parameter<double>(p.dshift(), n, c, plain);
    return 1.0 + parameter<double>(p.scale(), n, c, 0.0);
}

static __device__ __forceinline__ double number_or(const normfuse_parameter &p, const requested_value &found,
                                                   double absent)
{
    return p.data ? receive<double>(found, p.type) : absent;
}

/* ---- in the tile kernel itself ----------------------------------------------------------------------------------- */

/* Of the blocks that have parts of the same channels the last one to write them finds what parameters get, and nobody
 * waits: each counts itself, in a word of sync memory that is 0 again once all have. */
constexpr int first_counter = NORMFUSE_CUDA_GRID_BARRIER_WORDS;

/* Thread 0, once all threads of the block have written and met. What the word said before. */
__device__ __forceinline__ uint32_t count_block(const normfuse_cuda_arguments &a, int channels)
{
    return a.geometry.contributors > 1
               ? count_up(a.grid_barriers + first_counter + channels, (uint32_t)a.geometry.contributors - 1)
               : 0;
}

/* All threads: where the last of the blocks that count themselves finds the gradients, of so many channels. */
__device__ __forceinline__ void write_last_gradients(const normfuse_cuda_arguments &a, uint32_t before, int first,
                                                     int channels)
{
    const normfuse_cuda_problem &p = a.problem;
    const int blocks = a.geometry.contributors;
    const bool by_group = p.sets == NORMFUSE_SETS_GROUP;
    if (blocks <= 0 || !__syncthreads_or(threadIdx.x == 0 && before == (uint32_t)blocks - 1))
        return;
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < channels; i += (int)blockDim.x) {
        const int c = first + i;
        const int samples = a.geometry.sums_by_channel ? 1 : (int)p.n, set = by_group ? set_of_channel(a, c) : c;
        double weight = 0.0, bias = 0.0;
        for (int n = 0; n < samples; n++) {
            const channel_parts parts = parts_of(a, n, c);
            /* With the pairs: each wait is as long as all of this. Other blocks wrote these, so not from L1. */
            const requested_value rstd = request_at_once(p.rstd(), n * p.rstd().batch + set * p.rstd().channel);
            double plain = 0.0, centred = 0.0;
#pragma unroll 2
            for (int k = 0; k < parts.count; k++) {
                const double2 pair = __ldcg(reinterpret_cast<const double2 *>(parts.pairs) + k);
                plain += pair.x;
                centred += pair.y;
            }
            const double normalized = centred * number_or(p.rstd(), rstd, 1.0);
            const double scale = write_modulation(p, n, c, plain, normalized);
            weight += scale * normalized;
            bias += scale * plain;
        }
        write_gradient(p, p.dweight(), 0, c, weight);
        write_gradient(p, p.dbias(), 0, c, bias);
    }
}

#endif
