/* SPDX-License-Identifier: MIT
 *
 * finish.cu - the small kernels beside the tiles: they join what tiles left in memory. A warp has a set or a channel,
 * and adds in double in one fixed order. */
#include "join.cuh"

static __device__ __forceinline__ int64_t own_warp()
{
    return ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / 32;
}

static __device__ __forceinline__ bool computes_in_double(const normfuse_problem &p)
{
    return p.type == NORMFUSE_F64;
}

/* R as the tiles have it. */
static __device__ __forceinline__ double root_inverse(const normfuse_problem &p, double variance)
{
    if (computes_in_double(p))
        return 1.0 / sqrt(variance + p.eps);
    return (double)(1.0f / sqrtf((float)variance + (float)p.eps));
}

static __device__ __forceinline__ void update(const normfuse_problem &p, int64_t c, double mean, double variance)
{
    if (computes_in_double(p))
        update_running<double>(p, c, mean, variance);
    else
        update_running<float>(p, c, mean, variance);
}

/* Triples of the parts of each set become its statistics: saved, running and for the tiles that follow, or a triple of
 * its own where a call ends with those. */
extern "C" __global__ void normfuse_statistics(const __grid_constant__ normfuse_cuda_arguments a)
{
    follow_kernel();
    const normfuse_problem &p = a.problem;
    const bool by_channel = p.sets == NORMFUSE_SETS_BATCH;
    const int64_t sets = by_channel ? p.c : p.n * p.groups, set = own_warp();
    if (set >= sets)
        return;
    const int64_t channels = by_channel ? 1 : p.c / p.groups;
    const bool sharded = !(p.phases & NORMFUSE_PHASE_STATISTICS);
    const int64_t parts = sharded ? 1 : channels / a.geometry.group * a.geometry.parts;
    const double *const triples = sharded ? p.stats + set * TRIPLE : a.partials + set * parts * TRIPLE;
    const int lane = threadIdx.x % 32;

    /* The mean, then squares about it: both loops are loads and additions, no divisions that wait for one another. */
    moments<double> all = {0.0, 0.0, 0.0};
    const double shift = parts > 0 ? triples[1] : 0.0;
#pragma unroll 8
    for (int64_t i = lane; i < parts; i += 32) {
        const double count = triples[i * TRIPLE];
        all.count += count;
        all.mean += count > 0.0 ? count * (triples[i * TRIPLE + 1] - shift) : 0.0;
    }
    all.count = sum_lanes(all.count, 32);
    all.mean = all.count > 0.0 ? sum_lanes(all.mean, 32) / all.count : 0.0;
#pragma unroll 8
    for (int64_t i = lane; i < parts; i += 32) {
        const double count = triples[i * TRIPLE], distance = triples[i * TRIPLE + 1] - shift - all.mean;
        all.squares += count > 0.0 ? triples[i * TRIPLE + 2] + count * distance * distance : 0.0;
    }
    all.squares = sum_lanes(all.squares, 32);
    all.mean += shift;
    if (lane != 0)
        return;
    if (p.stats && !sharded) {
        double *const triple = p.stats + set * TRIPLE;
        if (p.accumulate) {
            moments<double> before = {triple[0], triple[1], triple[2]};
            if (before.count == 0.0)
                before = {0.0, 0.0, 0.0};
            append(before, all);
            all = before;
        }
        triple[0] = all.count;
        triple[1] = all.mean;
        triple[2] = all.squares;
        return;
    }
    const double variance = all.squares / all.count, rstd = root_inverse(p, variance);
    const int64_t n = by_channel ? 0 : set / p.groups, group = by_channel ? set : set - n * p.groups;
    put_parameter<double>(p.mean, n, group, all.mean);
    put_parameter<double>(p.rstd, n, group, rstd);
    if (a.statistics)
        a.statistics[set] = {all.mean, rstd, unbiased(variance, all.count)};
    if (p.has_running_momentum && by_channel)
        update(p, set, all.mean, unbiased(variance, all.count));
}

/* Instance norm's running statistics: the means over the batch of mean and unbiased variance. */
extern "C" __global__ void normfuse_running(const __grid_constant__ normfuse_cuda_arguments a)
{
    follow_kernel();
    const normfuse_problem &p = a.problem;
    const int64_t c = own_warp();
    if (c >= p.c)
        return;
    double mean = 0.0, variance = 0.0;
    for (int64_t n = threadIdx.x % 32; n < p.n; n += 32) {
        mean += a.statistics[n * p.c + c].mean;
        variance += a.statistics[n * p.c + c].variance;
    }
    mean = sum_lanes(mean, 32);
    variance = sum_lanes(variance, 32);
    if (threadIdx.x % 32 == 0)
        update(p, c, mean / (double)p.n, variance / (double)p.n);
}

/* ---- the backward ----------------------------------------------------------------------------------------------- */

/* How many partial sums channel `outer` of a set has. */
static __device__ __forceinline__ int slots_of(const normfuse_cuda_arguments &a, int64_t outer)
{
    const normfuse_cuda_geometry &g = a.geometry;
    if (g.channels_a_segment == 0 || g.sums_by_channel || g.sets_a_block > 1) /* columns, or one stretch a set */
        return g.sum_slots;
    return (int)(((outer + 1) * g.spans - 1) / g.part_rows - outer * g.spans / g.part_rows) + 1;
}

/* Where the partial sums of a channel are, and how many. */
struct channel_parts {
    const double *pairs;
    int count;
};

static __device__ __forceinline__ channel_parts parts_of(const normfuse_cuda_arguments &a, int64_t n, int64_t c)
{
    const normfuse_problem &p = a.problem;
    if (!a.sums)
        return {p.sums + ((p.sets == NORMFUSE_SETS_GROUP ? n * p.c : 0) + c) * PAIR, 1};
    const int64_t channel = (a.geometry.sums_by_channel ? 0 : n * p.c) + c;
    return {a.sums + channel * a.geometry.sum_slots * PAIR,
            slots_of(a, p.sets == NORMFUSE_SETS_GROUP ? c % (p.c / p.groups) : c)};
}

/* Many parts are added by a whole warp, few by one thread; `many` says which, and all lanes then have the sum. */
static __device__ __forceinline__ double2 channel_sums(const normfuse_cuda_arguments &a, int64_t n, int64_t c,
                                                       bool many)
{
    const channel_parts parts = parts_of(a, n, c);
    double2 sum = make_double2(0.0, 0.0);
#pragma unroll 4
    for (int i = many ? threadIdx.x % 32 : 0; i < parts.count; i += many ? 32 : 1) {
        sum.x += parts.pairs[i * PAIR];
        sum.y += parts.pairs[i * PAIR + 1];
    }
    if (many)
        sum = make_double2(sum_lanes(sum.x, 32), sum_lanes(sum.y, 32));
    return sum;
}

/* `others`: what the lanes have to share out otherwise. */
static __device__ __forceinline__ bool has_many_parts(const normfuse_cuda_arguments &a, int64_t others)
{
    return a.sums && a.geometry.sum_slots > 8 && others < 16;
}

static __device__ __forceinline__ double rstd_of(const normfuse_problem &p, int64_t n, int64_t c)
{
    if (p.sets == NORMFUSE_SETS_NONE)
        return p.evaluate ? root_inverse(p, parameter<double>(p.running_var, 0, c, 1.0)) : 1.0;
    return parameter<double>(p.rstd, n, p.sets == NORMFUSE_SETS_BATCH ? c : c / (p.c / p.groups), 1.0);
}

/* The weighted sums of each set. */
extern "C" __global__ void normfuse_totals(const __grid_constant__ normfuse_cuda_arguments a)
{
    follow_kernel();
    const normfuse_problem &p = a.problem;
    const bool by_channel = p.sets == NORMFUSE_SETS_BATCH;
    const int64_t sets = by_channel ? p.c : p.n * p.groups, set = own_warp(),
                  channels = by_channel ? 1 : p.c / p.groups;
    if (set >= sets)
        return;
    const int64_t n = by_channel ? 0 : set / p.groups, first = by_channel ? set : (set - n * p.groups) * channels;
    double plain = 0.0, centred = 0.0;
    const bool many = has_many_parts(a, channels);
    for (int64_t i = many ? 0 : threadIdx.x % 32; i < channels; i += many ? 1 : 32) {
        const int64_t c = first + i;
        const double slope =
            rstd_of(p, n, c) * parameter<double>(p.weight, n, c, 1.0) * (1.0 + parameter<double>(p.scale, n, c, 0.0));
        const double2 sum = channel_sums(a, n, c, many);
        plain += slope * sum.x;
        centred += slope * sum.y;
    }
    if (!many) {
        plain = sum_lanes(plain, 32);
        centred = sum_lanes(centred, 32);
    }
    if (threadIdx.x % 32 == 0) {
        a.totals[set * PAIR] = plain;
        a.totals[set * PAIR + 1] = centred;
    }
}

static __device__ __forceinline__ void put_gradient(const normfuse_problem &p, const normfuse_parameter &to, int64_t n,
                                                    int64_t c, double value)
{
    if (!to.data)
        return;
    if (p.accumulate)
        value += parameter<double>(to, n, c, 0.0);
    put_parameter<double>(to, n, c, value);
}

/* Sums of each channel become the gradients of the parameters, or a sharded call's sums. */
extern "C" __global__ void normfuse_gradients(const __grid_constant__ normfuse_cuda_arguments a)
{
    follow_kernel();
    const normfuse_problem &p = a.problem;
    const int64_t c = own_warp();
    if (c >= p.c)
        return;
    const int lane = threadIdx.x % 32;
    const bool by_channel = a.sums ? a.geometry.sums_by_channel != 0 : p.sets != NORMFUSE_SETS_GROUP;
    const bool per_sample = p.sets == NORMFUSE_SETS_NONE && (p.dweight.batch != 0 || p.dbias.batch != 0);
    const bool gives_sums = !(p.phases & NORMFUSE_PHASE_BACKWARD_APPLY);
    double weight = 0.0, bias = 0.0;
    const bool many = has_many_parts(a, by_channel ? 1 : p.n);
    for (int64_t n = many ? 0 : lane; n < (by_channel ? 1 : p.n); n += many ? 1 : 32) {
        const double2 sum = channel_sums(a, n, c, many);
        if (many && lane != 0)
            continue; /* all lanes have the sum; one writes and adds */
        if (gives_sums && p.sets == NORMFUSE_SETS_GROUP) {
            double *const pair = p.sums + (n * p.c + c) * PAIR;
            pair[0] = sum.x + (p.accumulate ? pair[0] : 0.0);
            pair[1] = sum.y + (p.accumulate ? pair[1] : 0.0);
            continue;
        }
        const double scale = 1.0 + parameter<double>(p.scale, n, c, 0.0);
        const double normalized = gives_sums ? sum.y : sum.y * rstd_of(p, n, c);
        if (per_sample) {
            put_gradient(p, p.dweight, n, c, normalized);
            put_gradient(p, p.dbias, n, c, sum.x);
        }
        put_parameter<double>(p.dscale, n, c,
                              parameter<double>(p.weight, n, c, 1.0) * normalized +
                                  parameter<double>(p.bias, n, c, 0.0) * sum.x);
        put_parameter<double>(p.dshift, n, c, sum.x);
        weight += scale * normalized;
        bias += scale * sum.x;
    }
    if (gives_sums && p.sets == NORMFUSE_SETS_GROUP)
        return;
    weight = sum_lanes(weight, 32);
    bias = sum_lanes(bias, 32);
    if (lane != 0 || per_sample)
        return;
    if (gives_sums) {
        double *const pair = p.sums + c * PAIR;
        pair[0] = bias + (p.accumulate ? pair[0] : 0.0);
        pair[1] = weight + (p.accumulate ? pair[1] : 0.0);
        return;
    }
    put_gradient(p, p.dweight, 0, c, weight);
    put_gradient(p, p.dbias, 0, c, bias);
}

/* ---- shards ----------------------------------------------------------------------------------------------------- */

/* As normfuse_stats_merge and normfuse_sums_merge on the CPU, one thread a triple or a sum. */
extern "C" __global__ void normfuse_merge(const __grid_constant__ normfuse_cuda_merge_arguments a)
{
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= a.values / a.width)
        return;
    if (a.width == PAIR) {
        double plain = 0.0, centred = 0.0;
        for (int64_t shard = 0; shard < a.shards; shard++) {
            plain += a.in[shard * a.values + i * PAIR];
            centred += a.in[shard * a.values + i * PAIR + 1];
        }
        a.out[i * PAIR] = plain;
        a.out[i * PAIR + 1] = centred;
        return;
    }
    moments<double> all = {0.0, 0.0, 0.0};
    for (int64_t shard = 0; shard < a.shards; shard++) {
        const double *const triple = a.in + shard * a.values + i * TRIPLE;
        if (triple[0] != 0.0) /* a part without values, whatever its mean holds */
            append(all, {triple[0], triple[1], triple[2]});
    }
    a.out[i * TRIPLE] = all.count;
    a.out[i * TRIPLE + 1] = all.mean;
    a.out[i * TRIPLE + 2] = all.squares;
}
