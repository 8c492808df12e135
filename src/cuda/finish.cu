/* SPDX-License-Identifier: MIT
 *
 * finish.cu - the small kernels beside the tiles: they join what tiles left in memory, in double, in one fixed order.
 * What follows another kernel finds its places before it waits for that. */
#include "gradients.cuh"

/* What adjacent threads of a block share, 1 to 256 of them: the set or channel, 0 where there is none, and the thread
 * among those. */
struct shared_item {
    int index, lane, lanes;
    bool exists;

    __device__ __forceinline__ shared_item(int lanes_of_item, int items, int first_block = 0) : lanes(lanes_of_item)
    {
        const int64_t thread = (int64_t)((int)blockIdx.x - first_block) * blockDim.x + threadIdx.x;
        index = (int)(thread >> (31 - __clz(lanes)));
        lane = (int)thread & (lanes - 1);
        exists = index < items;
        index = exists ? index : 0;
    }
};

/* Known to all threads of the item. Whole warps call. */
static __device__ __forceinline__ double2 sum_item(double2 value, const shared_item &item)
{
    value = {sum_few(value.x, item.lanes), sum_few(value.y, item.lanes)};
    if (item.lanes <= 32)
        return value;
    __shared__ double2 of_warps[max_warps];
    __syncthreads();
    const int warps = item.lanes / 32, first = ((int)threadIdx.x - item.lane) / 32, lane = item.lane % 32;
    if (lane == 0)
        of_warps[threadIdx.x / 32] = value;
    __syncthreads();
    value = lane < warps ? of_warps[first + lane] : make_double2(0.0, 0.0);
    return {sum_few(value.x, 32), sum_few(value.y, 32)};
}

static __device__ __forceinline__ void update(const normfuse_cuda_problem &p, int64_t c, double mean, double variance)
{
    if (computes_in_double(p))
        update_running<double>(p, c, mean, variance);
    else
        update_running<float>(p, c, mean, variance);
}

/* The mean, then squares about it, of `count` triples that are `stride` apart; those that a lane holds are read once.
 */
static __device__ __forceinline__ moments<double> join_triples(const double *triples, int64_t stride, int count,
                                                               const shared_item &item)
{
    constexpr int held = 4;
    const double shift = count > 0 ? triples[1] : 0.0;
    const auto read = [&](int i) {
        const double *const triple = triples + i * stride * TRIPLE;
        return i < count ? moments<double>{triple[0], triple[1], triple[2]} : moments<double>{0.0, 0.0, 0.0};
    };
    moments<double> found[held], all = {0.0, 0.0, 0.0};
    const auto add_mean = [&](const moments<double> &next) {
        all.count += next.count;
        all.mean += next.count > 0.0 ? next.count * (next.mean - shift) : 0.0;
    };
    each<held>([&](int k) { found[k] = read(item.lane + k * item.lanes); });
    each<held>([&](int k) { add_mean(found[k]); });
#pragma unroll 8
    for (int i = item.lane + held * item.lanes; i < count; i += item.lanes)
        add_mean(read(i));
    const double2 both = sum_item({all.count, all.mean}, item);
    all.count = both.x;
    all.mean = both.y / (all.count > 0.0 ? all.count : 1.0);
    const auto add_squares = [&](const moments<double> &next) {
        const double distance = next.mean - shift - all.mean;
        all.squares += next.count > 0.0 ? next.squares + next.count * distance * distance : 0.0;
    };
    each<held>([&](int k) { add_squares(found[k]); });
#pragma unroll 8
    for (int i = item.lane + held * item.lanes; i < count; i += item.lanes)
        add_squares(read(i));
    all.squares = sum_item({all.squares, 0.0}, item).x;
    all.mean += shift;
    return all;
}

static __device__ __forceinline__ void write_triple(double *triple, const moments<double> &all)
{
    triple[0] = all.count;
    triple[1] = all.mean;
    triple[2] = all.squares;
}

/* Of very many triples of a set, `shares` items first make one each, in the place of their first. */
extern "C" __global__ void normfuse_shares(const __grid_constant__ normfuse_cuda_arguments a)
{
    const normfuse_cuda_geometry &g = a.geometry;
    const shared_item item(g.lanes, g.items);
    const int set = divide(item.index, g.by_shares), first = (item.index - set * g.shares) * g.share;
    const int count = item.exists ? max(min(g.share, g.triples - first), 0) : 0;
    double *const triples = a.partials + ((int64_t)set * g.triples + first) * TRIPLE;
    follow_kernel();
    const moments<double> all = join_triples(triples, 1, count, item);
    __syncthreads(); /* all of the item have read them */
    if (item.lane == 0 && count > 0)
        write_triple(triples, all);
}

/* Triples of the parts of each set become its statistics: saved, running and for the tiles that follow, or a triple of
 * its own where a call ends with those. */
extern "C" __global__ void normfuse_statistics(const __grid_constant__ normfuse_cuda_arguments a)
{
    const normfuse_cuda_problem &p = a.problem;
    const normfuse_cuda_geometry &g = a.geometry;
    const bool by_channel = p.sets == NORMFUSE_SETS_BATCH, sharded = !(p.phases() & NORMFUSE_PHASE_STATISTICS);
    const shared_item item(g.lanes, g.items);
    const int set = item.index, n = by_channel ? 0 : divide(set, g.by_groups);
    const double *const triples = sharded ? p.stats : a.partials;
    follow_kernel();

    const moments<double> all =
        join_triples(triples + (int64_t)set * g.triples * TRIPLE, g.share, item.exists ? g.joined : 0, item);
    if (item.lane != 0 || !item.exists)
        return;
    if (p.stats && !sharded) {
        double *const triple = p.stats + (int64_t)set * TRIPLE;
        moments<double> before = {0.0, 0.0, 0.0};
        if (p.accumulate() && triple[0] != 0.0)
            before = {triple[0], triple[1], triple[2]};
        if (p.accumulate())
            append(before, all);
        write_triple(triple, p.accumulate() ? before : all);
        return;
    }
    const double variance = all.count > 0.0 ? all.squares / all.count : 0.0, rstd = root_inverse(p, variance);
    store_statistics(a, n, by_channel ? set : set - n * (int)p.groups, set, all.mean, variance, rstd, all.count);
    if (p.has_running_momentum() && by_channel && all.count > 0.0)
        update(p, set, all.mean, unbiased(variance, all.count));
}

/* Instance norm's running statistics: the means over the batch of mean and unbiased variance. */
extern "C" __global__ void normfuse_running(const __grid_constant__ normfuse_cuda_arguments a)
{
    const normfuse_cuda_problem &p = a.problem;
    const shared_item item(a.geometry.lanes, (int)p.c);
    const int c = item.index, samples = item.exists ? (int)p.n : 0;
    follow_kernel();
    double2 both = {0.0, 0.0}; /* mean, variance */
#pragma unroll 4
    for (int n = item.lane; n < samples; n += item.lanes) {
        const normfuse_cuda_statistics &of_sample = a.statistics[n * p.c + c];
        both.x += of_sample.mean;
        both.y += of_sample.variance;
    }
    both = sum_item(both, item);
    if (item.lane == 0 && item.exists)
        update(p, c, both.x / (double)p.n, both.y / (double)p.n);
}

/* ---- the backward ----------------------------------------------------------------------------------------------- */

/* The lane's pairs of `outers`, the channels of a norm group or the samples of a channel, which are `apart` pairs from
 * one another and have slots_of(outer) each. Several are on their way at once, with what they are weighed by:
 * request(outer, wanted), then take(pair, what was requested). */
template <typename Slots, typename Request, typename Take>
static __device__ __forceinline__ void walk_pairs(const normfuse_cuda_arguments &a, const shared_item &item, int outers,
                                                  const double *pairs, int64_t apart, Slots slots_of, Request request,
                                                  Take take)
{
    constexpr int at_once = 4;
    const int slots = (int)a.geometry.by_sum_slots.divisor, all = outers * slots;
#pragma unroll 1
    for (int first = item.lane; first < all; first += at_once * item.lanes) {
        double2 found[at_once];
        decltype(request(0, true)) by[at_once];
        each<at_once>([&](int k) {
            const int i = first + k * item.lanes, outer = divide(i, a.geometry.by_sum_slots), slot = i - outer * slots;
            const bool wanted = i < all && slot < slots_of(outer);
            const double *const pair = pairs + (wanted ? outer * apart + slot : 0) * PAIR;
            found[k] = {wanted ? pair[0] : 0.0, wanted ? pair[1] : 0.0};
            by[k] = request(outer, wanted);
        });
        each<at_once>([&](int k) { take(found[k], by[k]); });
    }
}

/* Of very many parts those of each channel become one, in the place of the first. */
extern "C" __global__ void normfuse_parts(const __grid_constant__ normfuse_cuda_arguments a)
{
    const normfuse_cuda_problem &p = a.problem;
    const normfuse_cuda_geometry &g = a.geometry;
    const shared_item item(g.lanes, g.items);
    const int c = item.index % (int)p.c;
    const int slots = item.exists ? sum_slots_of(a, outer_of_channel(a, c)) : 0;
    double *const own = a.sums + (int64_t)item.index * g.sum_slots * PAIR;
    follow_kernel();
    double2 sum = {0.0, 0.0};
#pragma unroll 4
    for (int i = item.lane; i < slots; i += item.lanes) {
        sum.x += own[i * PAIR];
        sum.y += own[i * PAIR + 1];
    }
    sum = sum_item(sum, item);
    __syncthreads(); /* all of the item have read them */
    if (item.lane == 0 && item.exists) {
        own[0] = sum.x;
        own[1] = sum.y;
    }
}

static __device__ __forceinline__ double rstd_of(const normfuse_cuda_arguments &a, int64_t n, int c)
{
    const normfuse_cuda_problem &p = a.problem;
    if (p.sets == NORMFUSE_SETS_NONE)
        return p.evaluate() ? root_inverse(p, parameter<double>(p.running_var(), 0, c, 1.0)) : 1.0;
    return parameter<double>(p.rstd(), n, p.sets == NORMFUSE_SETS_BATCH ? c : set_of_channel(a, c), 1.0);
}

/* The weighted sums of a set. */
static __device__ __forceinline__ void find_totals(const normfuse_cuda_arguments &a)
{
    const normfuse_cuda_problem &p = a.problem;
    const normfuse_cuda_geometry &g = a.geometry;
    const bool by_channel = p.sets == NORMFUSE_SETS_BATCH;
    const shared_item item(g.lanes, g.items);
    const int set = item.index, n = by_channel ? 0 : divide(set, g.by_groups);
    const int channels = (int)g.by_set_channels.divisor, c = by_channel ? set : (set - n * (int)p.groups) * channels;
    const int64_t slots = a.sums ? g.sum_slots : 1, first = a.sums && g.sums_by_channel ? c : n * p.c + c;
    /* A channel's sums of each sample, or those of a group's channels. */
    const int samples = by_channel && a.sums && !g.sums_by_channel ? (int)p.n : 1;
    const int64_t apart = by_channel ? p.c * slots : slots;
    const double rstd = rstd_of(a, n, c);
    const double *const sums = a.sums ? a.sums : p.sums;
    follow_kernel();

    struct weights {
        requested_value weight, scale;
    };
    double2 total = {0.0, 0.0}; /* plain, centred */
    walk_pairs(
        a, item, !item.exists ? 0 : by_channel ? samples : channels, sums + first * slots * PAIR, apart,
        [&](int outer) { return a.sums ? sum_slots_of(a, by_channel ? 0 : outer) : 1; },
        [&](int outer, bool wanted) {
            const int64_t of = by_channel ? c : c + outer;
            return weights{request_parameter(p.weight(), n, of, wanted), request_parameter(p.scale(), n, of, wanted)};
        },
        [&](const double2 &pair, const weights &by) {
            const double slope =
                rstd * number_or(p.weight(), by.weight, 1.0) * (1.0 + number_or(p.scale(), by.scale, 0.0));
            total.x += slope * pair.x;
            total.y += slope * pair.y;
        });
    total = sum_item(total, item);
    if (item.lane == 0 && item.exists)
        reinterpret_cast<double2 *>(a.totals)[set] = total;
}

/* What each sample of channel c gets, and the lane's sums of bias and weight. Many parts are added by a warp, few by
 * one thread. rstd_by(n): a sum of centred values times this is one of normalized ones. */
template <typename Rstd>
static __device__ __forceinline__ double2 write_samples(const normfuse_cuda_arguments &a, const shared_item &item,
                                                        int samples, int c, bool per_sample, bool writes_pairs,
                                                        Rstd rstd_by)
{
    const normfuse_cuda_problem &p = a.problem;
    const bool many = a.sums && a.geometry.sum_slots > 8 && item.lanes >= 32;
    const int lane = many ? item.lane % 32 : 0, lanes = many ? 32 : 1;
    double weight = 0.0, bias = 0.0;
    for (int n = item.lane / lanes; n < samples; n += item.lanes / lanes) {
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
        const double normalized = centred * rstd_by(n);
        if (per_sample) {
            write_gradient(p, p.dweight(), n, c, normalized);
            write_gradient(p, p.dbias(), n, c, plain);
        }
        const double scale = write_modulation(p, n, c, plain, normalized);
        weight += scale * normalized;
        bias += scale * plain;
    }
    return {bias, weight};
}

/* The parts of a channel become the gradients of its parameters, or a sharded call's sums. */
static __device__ __forceinline__ void find_gradients(const normfuse_cuda_arguments &a)
{
    const normfuse_cuda_problem &p = a.problem;
    const normfuse_cuda_geometry &g = a.geometry;
    const shared_item item(g.gradient_lanes, (int)p.c, g.totals_blocks);
    const bool by_group = p.sets == NORMFUSE_SETS_GROUP;
    const int c = item.index, group = set_of_channel(a, c);
    const bool by_channel = a.sums ? g.sums_by_channel != 0 : !by_group;
    const bool per_sample = p.sets == NORMFUSE_SETS_NONE && (p.dweight().batch != 0 || p.dbias().batch != 0);
    const bool writes_sums = !(p.phases() & NORMFUSE_PHASE_BACKWARD_APPLY), writes_pairs = writes_sums && by_group;
    const bool by_sample = per_sample || writes_pairs || p.dscale().data || p.dshift().data; /* each gets something */
    const int samples = !item.exists ? 0 : by_channel ? 1 : (int)p.n;
    /* Sums of all samples of group norm have each sample's rstd in them. */
    const bool has_rstd = writes_sums || (by_channel && by_group);
    const bool each_has_rstd = by_group && !has_rstd; /* each sample */
    const double rstd = has_rstd || by_group ? 1.0 : rstd_of(a, 0, c);
    const int slots = a.sums ? sum_slots_of(a, by_group ? outer_of_channel(a, c) : c) : 1;
    const int64_t apart = a.sums ? g.sum_slots : 1;
    const double *const sums = (a.sums ? a.sums : p.sums) + c * apart * PAIR;
    follow_kernel();

    double2 found = {0.0, 0.0}; /* bias, weight */
    if (!by_sample) {
        struct weights {
            requested_value rstd, scale;
        };
        walk_pairs(
            a, item, samples, sums, p.c * apart, [&](int) { return slots; },
            [&](int n, bool wanted) {
                return weights{request_parameter(p.rstd(), n, group, wanted && each_has_rstd),
                               request_parameter(p.scale(), n, c, wanted)};
            },
            [&](const double2 &pair, const weights &by) {
                const double scale = 1.0 + number_or(p.scale(), by.scale, 0.0);
                found.x += scale * pair.x;
                found.y += scale * (pair.y * (each_has_rstd ? number_or(p.rstd(), by.rstd, 1.0) : rstd));
            });
    } else {
        found = write_samples(a, item, samples, c, per_sample, writes_pairs,
                              [&](int n) { return each_has_rstd ? rstd_of(a, n, c) : rstd; });
    }
    found = sum_item(found, item);
    if (item.lane != 0 || !item.exists || per_sample || writes_pairs)
        return;
    if (writes_sums) {
        write_shard_sums(p, c, found.x, found.y);
        return;
    }
    write_gradient(p, p.dweight(), 0, c, found.y);
    write_gradient(p, p.dbias(), 0, c, found.x);
}

/* The parts of a channel become the gradient of its slope; of one slope those of all channels, where these are very
 * many in two launches. */
static __device__ __forceinline__ void find_slopes(const normfuse_cuda_arguments &a)
{
    const normfuse_cuda_problem &p = a.problem;
    const normfuse_cuda_slopes &of = a.geometry.slopes;
    const shared_item item(of.lanes, of.items, of.first_block);
    const int all = item.exists ? of.outers * (int)of.by_slots.divisor : 0;
    double *const own = sums_of_slopes(a) + (int64_t)item.index * a.geometry.sum_slots * PAIR;
    follow_kernel();
    double sum = 0.0;
#pragma unroll 4
    for (int i = item.lane; i < all; i += item.lanes) {
        const int outer = divide(i, of.by_slots);
        sum += own[((int64_t)outer * of.apart + i - outer * (int)of.by_slots.divisor) * PAIR];
    }
    sum = sum_item({sum, 0.0}, item).x;
    __syncthreads(); /* all of the item have read them */
    if (item.lane != 0 || !item.exists)
        return;
    if (of.leaves)
        own[0] = sum;
    else
        write_parameter<double>(p.dslope(), 0, item.index,
                                sum + (p.accumulate_slope() ? parameter<double>(p.dslope(), 0, item.index, 0.0) : 0.0));
}

/* All follow from the same sums: the first blocks have the sets' totals, which results wait for, others what the
 * parameters get, and the last ones what prelu's slopes do. */
extern "C" __global__ void normfuse_gradients(const __grid_constant__ normfuse_cuda_arguments a)
{
    if ((int)blockIdx.x < a.geometry.totals_blocks)
        find_totals(a);
    else if ((int)blockIdx.x >= a.geometry.slopes.first_block)
        find_slopes(a);
    else
        find_gradients(a);
}

/* ---- shards ----------------------------------------------------------------------------------------------------- */

/* As normfuse_stats_merge, normfuse_sums_merge and normfuse_sums_merge_per_value on the CPU, one thread a triple or a
 * pair. */
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
        if (a.stats != nullptr) {
            const double count = a.stats[i / a.share * TRIPLE], divisor = count < 1.0 ? 1.0 : count;
            plain = plain * a.factor / divisor;
            centred = centred * a.factor / divisor;
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
    write_triple(a.out + i * TRIPLE, all);
}
