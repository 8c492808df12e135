/* SPDX-License-Identifier: MIT
 *
 * finish.cu - the small kernels beside the tiles: they join what tiles left in memory. A warp has a set or a channel,
 * or a whole block where there is much to join, and adds in double in one fixed order. */
#include "gradients.cuh"

/* What a warp or a block works on: the set or channel, and the thread among those that share it. */
struct shared_item {
    int64_t index;
    int lane, lanes;

    __device__ __forceinline__ shared_item(const normfuse_cuda_geometry &g, int first_block)
    {
        const int64_t thread = (int64_t)((int)blockIdx.x - first_block) * blockDim.x + threadIdx.x;
        lanes = g.lanes;
        index = thread / lanes;
        lane = (int)(thread - index * lanes);
    }
};

/* Known to all threads of the item. */
static __device__ __forceinline__ double sum_item(double value, const shared_item &item)
{
    value = sum_lanes(value, 32);
    if (item.lanes == 32)
        return value;
    __shared__ double of_warps[max_warps];
    __syncthreads();
    if (item.lane % 32 == 0)
        of_warps[item.lane / 32] = value;
    __syncthreads();
    return sum_lanes(item.lane % 32 < item.lanes / 32 ? of_warps[item.lane % 32] : 0.0, 32);
}

static __device__ __forceinline__ void update(const normfuse_problem &p, int64_t c, double mean, double variance)
{
    if (computes_in_double(p))
        update_running<double>(p, c, mean, variance);
    else
        update_running<float>(p, c, mean, variance);
}

/* The mean, then squares about it: both loops are loads and additions, no divisions that wait for one another. Triples
 * are `stride` doubles apart. */
static __device__ __forceinline__ moments<double> join_triples(const double *triples, int64_t stride, int64_t count,
                                                               const shared_item &item)
{
    moments<double> all = {0.0, 0.0, 0.0};
    const double shift = count > 0 ? triples[1] : 0.0;
#pragma unroll 8
    for (int64_t i = item.lane; i < count; i += item.lanes) {
        const double number = triples[i * stride];
        all.count += number;
        all.mean += number > 0.0 ? number * (triples[i * stride + 1] - shift) : 0.0;
    }
    all.count = sum_item(all.count, item);
    all.mean = sum_item(all.mean, item) / (all.count > 0.0 ? all.count : 1.0);
#pragma unroll 8
    for (int64_t i = item.lane; i < count; i += item.lanes) {
        const double number = triples[i * stride], distance = triples[i * stride + 1] - shift - all.mean;
        all.squares += number > 0.0 ? triples[i * stride + 2] + number * distance * distance : 0.0;
    }
    all.squares = sum_item(all.squares, item);
    all.mean += shift;
    return all;
}

/* Triples of a set that tiles left. */
static __device__ __forceinline__ int64_t parts_of_set(const normfuse_cuda_arguments &a)
{
    const normfuse_problem &p = a.problem;
    const int64_t channels = p.sets == NORMFUSE_SETS_BATCH ? 1 : p.c / p.groups;
    return channels / a.geometry.group * a.geometry.parts * max(1, a.geometry.copies);
}

/* Of very many triples of a set, `shares` blocks first make one each, in the place of their first. */
extern "C" __global__ void normfuse_shares(const __grid_constant__ normfuse_cuda_arguments a)
{
    follow_kernel();
    const int set = divide((int)blockIdx.x, a.geometry.by_shares);
    const int share = (int)blockIdx.x - set * a.geometry.shares;
    const shared_item item(a.geometry, (int)blockIdx.x);
    const int64_t parts = parts_of_set(a), each = (parts + a.geometry.shares - 1) / a.geometry.shares;
    double *const triples = a.partials + (set * parts + share * each) * TRIPLE;
    const moments<double> all = join_triples(triples, TRIPLE, max(min(each, parts - share * each), (int64_t)0), item);
    __syncthreads();
    if (item.lane == 0 && share * each < parts) {
        triples[0] = all.count;
        triples[1] = all.mean;
        triples[2] = all.squares;
    }
}

/* Triples of the parts of each set become its statistics: saved, running and for the tiles that follow, or a triple of
 * its own where a call ends with those. */
extern "C" __global__ void normfuse_statistics(const __grid_constant__ normfuse_cuda_arguments a)
{
    follow_kernel();
    const normfuse_problem &p = a.problem;
    const bool by_channel = p.sets == NORMFUSE_SETS_BATCH;
    const shared_item item(a.geometry, 0);
    const int64_t sets = by_channel ? p.c : p.n * p.groups, set = item.index;
    if (set >= sets)
        return;
    const bool sharded = !(p.phases & NORMFUSE_PHASE_STATISTICS);
    const int64_t parts = sharded ? 1 : parts_of_set(a);
    const double *const triples = sharded ? p.stats + set * TRIPLE : a.partials + set * parts * TRIPLE;
    /* Of shares that have been joined, one each. */
    const int64_t each = a.geometry.shares > 0 && !sharded ? (parts + a.geometry.shares - 1) / a.geometry.shares : 1;

    const moments<double> all = join_triples(triples, each * TRIPLE, (parts + each - 1) / each, item);
    if (item.lane != 0)
        return;
    if (p.stats && !sharded) {
        double *const triple = p.stats + set * TRIPLE;
        if (p.accumulate) {
            moments<double> before = {triple[0], triple[1], triple[2]};
            if (before.count == 0.0)
                before = {0.0, 0.0, 0.0};
            append(before, all);
            triple[0] = before.count;
            triple[1] = before.mean;
            triple[2] = before.squares;
            return;
        }
        triple[0] = all.count;
        triple[1] = all.mean;
        triple[2] = all.squares;
        return;
    }
    const double variance = all.count > 0.0 ? all.squares / all.count : 0.0, rstd = root_inverse(p, variance);
    const int64_t n = by_channel ? 0 : set / p.groups, group = by_channel ? set : set - n * p.groups;
    store_statistics(a, n, (int)group, set, all.mean, variance, rstd, all.count);
    if (p.has_running_momentum && by_channel && all.count > 0.0)
        update(p, set, all.mean, unbiased(variance, all.count));
}

/* Instance norm's running statistics: the means over the batch of mean and unbiased variance. */
extern "C" __global__ void normfuse_running(const __grid_constant__ normfuse_cuda_arguments a)
{
    follow_kernel();
    const normfuse_problem &p = a.problem;
    const shared_item item(a.geometry, 0);
    const int64_t c = item.index;
    if (c >= p.c)
        return;
    double mean = 0.0, variance = 0.0;
    for (int64_t n = item.lane; n < p.n; n += item.lanes) {
        mean += a.statistics[n * p.c + c].mean;
        variance += a.statistics[n * p.c + c].variance;
    }
    mean = sum_item(mean, item);
    variance = sum_item(variance, item);
    if (item.lane == 0)
        update(p, c, mean / (double)p.n, variance / (double)p.n);
}

/* ---- the backward ----------------------------------------------------------------------------------------------- */

/* How the threads of an item share out channels or samples, `outers`, of about `slots` parts each: all of those at once
 * if there are threads, since each waits for parameters of its own, and the parts of each among the threads then left.
 */
struct shared_parts {
    int first, step, slot, lanes;

    __device__ __forceinline__ shared_parts(const shared_item &item, int64_t outers, int slots)
    {
        const auto exponent = [](int value) { return value <= 1 ? 0 : 32 - __clz(value - 1); };
        const int all = exponent(item.lanes), bits = min(exponent(slots), all - min(all, exponent((int)outers)));
        lanes = 1 << bits;
        first = item.lane >> bits;
        step = item.lanes >> bits;
        slot = item.lane & (lanes - 1);
    }
    /* What this thread has of them. */
    __device__ __forceinline__ double2 add(const channel_parts &parts) const
    {
        double2 sum = make_double2(0.0, 0.0);
#pragma unroll 8
        for (int i = slot; i < parts.count; i += lanes) {
            sum.x += parts.pairs[i * PAIR];
            sum.y += parts.pairs[i * PAIR + 1];
        }
        return sum;
    }
};

/* The weighted sums of a set. */
static __device__ __forceinline__ void find_totals(const normfuse_cuda_arguments &a, const shared_item &item)
{
    const normfuse_problem &p = a.problem;
    const bool by_channel = p.sets == NORMFUSE_SETS_BATCH;
    const int64_t set = item.index;
    if (set >= (by_channel ? p.c : p.n * p.groups))
        return;
    const int channels = by_channel ? 1 : (int)(p.c / p.groups), slots = a.sums ? a.geometry.sum_slots : 1;
    const int64_t n = by_channel ? 0 : set / p.groups, first = by_channel ? set : (set - n * p.groups) * channels;
    const shared_parts share(item, channels, slots);
    double plain = 0.0, centred = 0.0;
    for (int64_t outer = share.first; outer < channels; outer += share.step) {
        const int64_t c = first + outer;
        const double2 sum = share.add(parts_of(a, n, c));
        const double slope =
            rstd_of(p, n, c) * parameter<double>(p.weight, n, c, 1.0) * (1.0 + parameter<double>(p.scale, n, c, 0.0));
        plain += slope * sum.x;
        centred += slope * sum.y;
    }
    plain = sum_item(plain, item);
    centred = sum_item(centred, item);
    if (item.lane == 0) {
        a.totals[set * PAIR] = plain;
        a.totals[set * PAIR + 1] = centred;
    }
}

/* The parts of a channel become the gradients of its parameters, or a sharded call's sums. */
static __device__ __forceinline__ void find_gradients(const normfuse_cuda_arguments &a, const shared_item &item)
{
    const normfuse_problem &p = a.problem;
    const int64_t c = item.index;
    if (c >= p.c)
        return;
    const bool by_channel = a.sums ? a.geometry.sums_by_channel != 0 : p.sets != NORMFUSE_SETS_GROUP;
    const bool per_sample = p.sets == NORMFUSE_SETS_NONE && (p.dweight.batch != 0 || p.dbias.batch != 0);
    const bool writes_sums = !(p.phases & NORMFUSE_PHASE_BACKWARD_APPLY);
    const bool writes_pairs = writes_sums && p.sets == NORMFUSE_SETS_GROUP;
    const bool each = per_sample || writes_pairs || p.dscale.data || p.dshift.data; /* something for each sample */
    const int64_t samples = by_channel ? 1 : p.n;
    /* Sums of all samples of group norm have each sample's rstd in them. */
    const bool has_rstd = writes_sums || (by_channel && p.sets == NORMFUSE_SETS_GROUP);
    const auto normalized_of = [&](int64_t n, double centred) {
        return has_rstd ? centred : centred * rstd_of(p, n, c);
    };
    double weight = 0.0, bias = 0.0;
    if (!each) {
        const shared_parts share(item, samples, a.sums ? a.geometry.sum_slots : 1);
        for (int64_t n = share.first; n < samples; n += share.step) {
            const double2 sum = share.add(parts_of(a, n, c));
            const double scale = 1.0 + parameter<double>(p.scale, n, c, 0.0);
            weight += scale * normalized_of(n, sum.y);
            bias += scale * sum.x;
        }
    } else {
        /* Many parts are added by a warp, few by one thread. */
        const bool many = a.sums && a.geometry.sum_slots > 8;
        const int lane = many ? item.lane % 32 : 0, lanes = many ? 32 : 1;
        for (int64_t n = item.lane / lanes; n < samples; n += item.lanes / lanes) {
            const channel_parts parts = parts_of(a, n, c);
            double plain = 0.0, centred = 0.0;
#pragma unroll 4
            for (int i = lane; i < parts.count; i += lanes) {
                plain += parts.pairs[i * PAIR];
                centred += parts.pairs[i * PAIR + 1];
            }
            plain = sum_lanes(plain, lanes);
            centred = sum_lanes(centred, lanes);
            if (lane != 0)
                continue; /* all lanes have the sum; one writes and adds */
            if (writes_pairs) {
                write_shard_sums(p, n * p.c + c, plain, centred);
                continue;
            }
            const double normalized = normalized_of(n, centred);
            if (per_sample) {
                write_gradient(p, p.dweight, n, c, normalized);
                write_gradient(p, p.dbias, n, c, plain);
            }
            const double scale = write_modulation(p, n, c, plain, normalized);
            weight += scale * normalized;
            bias += scale * plain;
        }
        if (writes_pairs)
            return;
    }
    weight = sum_item(weight, item);
    bias = sum_item(bias, item);
    if (item.lane != 0 || per_sample)
        return;
    if (writes_sums) {
        write_shard_sums(p, c, bias, weight);
        return;
    }
    write_gradient(p, p.dweight, 0, c, weight);
    write_gradient(p, p.dbias, 0, c, bias);
}

/* Both follow from the same sums: the first blocks have the sets' totals, which results wait for, the others what
 * the parameters get. */
extern "C" __global__ void normfuse_gradients(const __grid_constant__ normfuse_cuda_arguments a)
{
    follow_kernel();
    if ((int)blockIdx.x < a.geometry.totals_blocks)
        find_totals(a, shared_item(a.geometry, 0));
    else
        find_gradients(a, shared_item(a.geometry, a.geometry.totals_blocks));
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
