/* SPDX-License-Identifier: MIT
 *
 * finish.cuh - the body `finish`: small kernels beside the others of a call. They join what those left in memory, in
 * double, in one fixed order; signature::work says what. What follows another kernel finds its places before it waits
 * for that. Products and sums fuse where fma() says so. */
#include "exchange.cuh"
#include "parameters.cuh"

using namespace signature;

namespace {

using arguments = normfuse_finish_arguments;

constexpr bool by_channel = statistics == NORMFUSE_STATISTICS_CHANNEL;
constexpr bool by_group = statistics == NORMFUSE_STATISTICS_GROUP;
constexpr int max_warps = NORMFUSE_FINISH_THREADS / 32;

/* Doubles of a triple: count, mean, sum of squares about the mean; and of a pair. */
enum { TRIPLE = 3, PAIR = 2 };

/* A team of 1 to 256 adjacent threads of a block: the set or channel, 0 where there is none, and the thread
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

/* Over 1 to 32 adjacent threads; the same number in the whole warp. */
__device__ __forceinline__ double2 sum_few(double2 value, int lanes)
{
#pragma unroll 1
    for (int distance = lanes / 2; distance > 0; distance /= 2) {
        const double other = __shfl_xor_sync(full_mask, value.x, distance);
        value.y += __shfl_xor_sync(full_mask, value.y, distance);
        value.x += other;
    }
    return value;
}

/* Known to all threads of the item. Whole warps call. */
__device__ __forceinline__ double2 sum_item(double2 value, const shared_item &item)
{
    __shared__ double2 of_warps[max_warps];
    value = sum_few(value, min(item.lanes, 32));
    if (item.lanes <= 32)
        return value;
    __syncthreads();
    const int warps = item.lanes / 32, first = ((int)threadIdx.x - item.lane) / 32, lane = item.lane % 32;
    if (lane == 0)
        of_warps[threadIdx.x / 32] = value;
    __syncthreads();
    return sum_few(lane < warps ? of_warps[first + lane] : make_double2(0.0, 0.0), 32);
}

__device__ __forceinline__ R root_inverse(R variance, R eps)
{
    return R(1) / sqrt(variance + eps);
}

/* ---- parameters -------------------------------------------------------------------------------------------------- */

template <int code> __device__ __forceinline__ double number_or(const requested<code, 1> &found, double absent)
{
    double number[1];
    found.receive(number, absent);
    return number[0];
}

template <int code>
__device__ __forceinline__ double parameter(const normfuse_place &from, int64_t sample, int channel, double absent)
{
    if constexpr (code != 0)
        return load_parameter<code, double>(from, sample, channel);
    else
        return absent;
}

/* running = (1 - momentum) * running + momentum * of this batch, in R. */
template <int code>
__device__ __forceinline__ void move_towards(const normfuse_place &running, int channel, double number, double momentum)
{
    if constexpr (code != 0) {
        const R share = (R)momentum, keep = R(1) - share;
        store_parameter<code>(running, 0, channel,
                              fma((R)number, share, keep * load_parameter<code, R>(running, 0, channel)));
    }
}

__device__ __forceinline__ void update_running(const arguments &a, int channel, double of_mean, double unbiased)
{
    move_towards<running_mean>(a.running_mean, channel, of_mean, a.momentum);
    move_towards<running_var>(a.running_var, channel, unbiased, a.momentum);
}

/* ---- the forward ------------------------------------------------------------------------------------------------- */

struct moments {
    double count, mean, squares;
};

/* Chan, Golub and LeVeque 1979. */
__device__ __forceinline__ void append(moments &to, const moments &next)
{
    const double count = to.count + next.count;
    if (count > 0.0) {
        const double distance = next.mean - to.mean, share = next.count / count;
        to.mean = fma(distance, share, to.mean);
        to.squares += fma(distance * distance * to.count, share, next.squares);
        to.count = count;
    }
}

/* The mean, then squares about it, of `count` triples that are `stride` apart; where a lane holds all that it has, they
 * are read once. */
__device__ __forceinline__ moments join_triples(const double *triples, int64_t stride, int count,
                                                const shared_item &item)
{
    constexpr int held = 4;
    const int at_once = held * item.lanes;
    const double shift_of_means = count > 0 ? triples[1] : 0.0;
    moments found[held], all = {0.0, 0.0, 0.0};
    const auto read = [&](int first) {
        each<held>([&](int k) {
            const int i = first + k * item.lanes;
            const double *const triple = triples + i * stride * TRIPLE;
            found[k] = i < count ? moments{triple[0], triple[1], triple[2]} : moments{0.0, 0.0, 0.0};
        });
    };
#pragma unroll 1
    for (int first = item.lane; first < count; first += at_once) {
        read(first);
        each<held>([&](int k) {
            all.count += found[k].count;
            all.mean += found[k].count > 0.0 ? found[k].count * (found[k].mean - shift_of_means) : 0.0;
        });
    }
    const double2 both = sum_item({all.count, all.mean}, item);
    all.count = both.x;
    all.mean = both.y / (all.count > 0.0 ? all.count : 1.0);
#pragma unroll 1
    for (int first = item.lane; first < count; first += at_once) {
        if (count > at_once)
            read(first);
        each<held>([&](int k) {
            const double distance = found[k].mean - shift_of_means - all.mean;
            all.squares += found[k].count > 0.0 ? fma(found[k].count * distance, distance, found[k].squares) : 0.0;
        });
    }
    all.squares = sum_item({all.squares, 0.0}, item).x;
    all.mean += shift_of_means;
    return all;
}

__device__ __forceinline__ void store_triple(double *triple, const moments &all)
{
    triple[0] = all.count;
    triple[1] = all.mean;
    triple[2] = all.squares;
}

/* Very many triples of a set: several items first make one each, in the place of their first. */
__device__ __forceinline__ void join_shares(const arguments &a)
{
    const shared_item item(a.lanes, a.items);
    const int set = divide(item.index, a.by_shares), first = (item.index - set * (int)a.by_shares.divisor) * a.share;
    const int count = item.exists ? max(min(a.share, a.triples - first), 0) : 0;
    double *const triples = a.sums + ((int64_t)set * a.triples + first) * TRIPLE;
    follow_kernel();
    const moments all = join_triples(triples, 1, count, item);
    __syncthreads(); /* all of the item have read them */
    if (item.lane == 0 && count > 0)
        store_triple(triples, all);
}

/* Triples of the parts of each set become its statistics: saved, running and for the kernels that follow, or a triple
 * of its own where a call ends with those. */
__device__ __forceinline__ void find_statistics(const arguments &a)
{
    const shared_item item(a.lanes, a.items);
    const int set = item.index, n = by_channel ? 0 : divide(set, a.by_groups);
    const int of_sample = by_channel ? set : set - n * (int)a.by_groups.divisor;
    follow_kernel();
    const moments all =
        join_triples(a.sums + (int64_t)set * a.triples * TRIPLE, a.share, item.exists ? a.joined : 0, item);
    if (item.lane != 0 || !item.exists)
        return;
    if constexpr (writes_shard) {
        double *const triple = a.shard + (int64_t)set * TRIPLE;
        moments before = {0.0, 0.0, 0.0};
        if (a.accumulate && triple[0] != 0.0)
            before = {triple[0], triple[1], triple[2]};
        if (a.accumulate)
            append(before, all);
        store_triple(triple, a.accumulate ? before : all);
    } else {
        const double variance = all.count > 0.0 ? all.squares / all.count : 0.0;
        const double rstd_of = (double)root_inverse((R)variance, (R)a.eps);
        const double unbiased = variance * (all.count / (all.count - 1.0));
        store_parameter<mean>(a.mean, n, of_sample, all.mean);
        store_parameter<rstd>(a.rstd, n, of_sample, rstd_of);
        if constexpr (keeps_statistics)
            store_triple(a.statistics + (int64_t)set * TRIPLE, {all.mean, rstd_of, unbiased});
        if (updates_running && all.count > 0.0)
            update_running(a, set, all.mean, unbiased);
    }
}

/* Instance norm's running statistics: the means over the batch of mean and unbiased variance. */
__device__ __forceinline__ void find_running(const arguments &a)
{
    const shared_item item(a.lanes, a.items);
    const int c = item.index, samples = item.exists ? a.samples : 0;
    follow_kernel();
    double2 both = {0.0, 0.0}; /* mean, variance */
#pragma unroll 4
    for (int n = item.lane; n < samples; n += item.lanes) {
        const double *const of_sample = a.statistics + ((int64_t)n * a.channels + c) * TRIPLE;
        both.x += of_sample[0];
        both.y += of_sample[2];
    }
    both = sum_item(both, item);
    if (item.lane == 0 && item.exists)
        update_running(a, c, both.x / (double)a.samples, both.y / (double)a.samples);
}

/* ---- the backward ------------------------------------------------------------------------------------------------ */

/* Sums of a channel are of all its samples. */
constexpr bool sums_by_channel =
    gradients != NORMFUSE_GRADIENTS_OF_SAMPLES && gradients != NORMFUSE_GRADIENTS_OF_SAMPLES_NORMALIZED;
constexpr bool finds_gradients =
    dweight || dbias || dscale || dshift || (writes_shard && work == NORMFUSE_WORK_GRADIENTS);

/* The norm group of a channel in its sample. */
__device__ __forceinline__ int set_of_channel(const arguments &a, int c)
{
    return by_group ? divide(c, a.by_set_channels) : c;
}

/* The place of a channel's partial sums. */
__device__ __forceinline__ double *pairs_of(const arguments &a, int64_t n, int c)
{
    return a.sums + ((sums_by_channel ? 0 : n * a.channels) + c) * a.slot_stride * PAIR;
}

/* The lane's pairs of `outers`, the channels of a norm group or the samples of a channel, which are `apart` pairs from
 * one another and have a.slots each. Several are on their way at once, with what they are weighed by:
 * request(outer, wanted), then take(pair, what was requested). */
template <typename Request, typename Take>
__device__ __forceinline__ void walk_pairs(const arguments &a, const shared_item &item, int outers, const double *pairs,
                                           int64_t apart, Request request, Take take)
{
    constexpr int at_once = 4;
    const int all = outers * (int)a.by_slots.divisor;
#pragma unroll 1
    for (int first = item.lane; first < all; first += at_once * item.lanes) {
        double2 found[at_once];
        decltype(request(0, true)) by[at_once];
        each<at_once>([&](int k) {
            const int i = first + k * item.lanes, outer = divide(i, a.by_slots);
            const int slot = i - outer * (int)a.by_slots.divisor;
            const bool wanted = i < all && slot < a.slots;
            const double *const pair = pairs + (wanted ? outer * apart + slot : 0) * PAIR;
            found[k] = {wanted ? pair[0] : 0.0, wanted ? pair[1] : 0.0};
            by[k] = request(outer, wanted);
        });
        each<at_once>([&](int k) { take(found[k], by[k]); });
    }
}

/* The lane's of `count` adjacent pairs. */
__device__ __forceinline__ double2 sum_pairs(const double *pairs, int count, int lane, int lanes)
{
    double2 sum = {0.0, 0.0};
#pragma unroll 4
    for (int i = lane; i < count; i += lanes) {
        sum.x += pairs[i * PAIR];
        sum.y += pairs[i * PAIR + 1];
    }
    return sum;
}

/* Very many parts: those of each channel become one, in the place of the first. */
__device__ __forceinline__ void join_parts(const arguments &a)
{
    const shared_item item(a.lanes, a.items);
    const int slots = item.exists ? a.slots : 0;
    double *const own = a.sums + (int64_t)item.index * a.slot_stride * PAIR;
    follow_kernel();
    const double2 sum = sum_item(sum_pairs(own, slots, item.lane, item.lanes), item);
    __syncthreads(); /* all of the item have read them */
    if (item.lane == 0 && item.exists) {
        own[0] = sum.x;
        own[1] = sum.y;
    }
}

__device__ __forceinline__ double rstd_of(const arguments &a, int64_t n, int c)
{
    if constexpr (statistics == NORMFUSE_STATISTICS_RUNNING)
        return (double)root_inverse((R)parameter<running_var>(a.running_var, 0, c, 1.0), (R)a.eps);
    else
        return parameter<rstd>(a.rstd, n, set_of_channel(a, c), 1.0);
}

/* The weighed sums of a set. */
__device__ __forceinline__ void find_totals(const arguments &a)
{
    const shared_item item(a.lanes, a.items);
    const int set = item.index, n = by_channel ? 0 : divide(set, a.by_groups);
    const int channels = (int)a.by_set_channels.divisor;
    const int c = by_channel ? set : (set - n * (int)a.by_groups.divisor) * channels;
    /* A channel's sums of each sample, or those of a group's channels. */
    const int outers = !by_channel ? channels : sums_by_channel ? 1 : a.samples;
    const int64_t apart = (by_channel ? a.channels : 1) * (int64_t)a.slot_stride;
    const double of_set = rstd_of(a, n, c);
    const double *const pairs = pairs_of(a, n, c);
    follow_kernel();

    struct weights {
        requested<weight, 1> by;
        requested<scale, 1> more;
    };
    double2 total = {0.0, 0.0}; /* plain, centred */
    walk_pairs(
        a, item, item.exists ? outers : 0, pairs, apart,
        [&](int outer, bool wanted) {
            weights of;
            of.by.request(a.weight, n, [&](int) { return by_channel ? c : c + outer; }, wanted);
            of.more.request(a.scale, n, [&](int) { return by_channel ? c : c + outer; }, wanted);
            return of;
        },
        [&](const double2 &pair, const weights &of) {
            const double by = of_set * number_or(of.by, 1.0) * (1.0 + number_or(of.more, 0.0));
            total.x = fma(by, pair.x, total.x);
            total.y = fma(by, pair.y, total.y);
        });
    total = sum_item(total, item);
    if (item.lane == 0 && item.exists)
        reinterpret_cast<double2 *>(a.totals)[set] = total;
}

__device__ __forceinline__ void store_shard(const arguments &a, int64_t at, double plain, double centred)
{
    double *const pair = a.shard + at * PAIR;
    pair[0] = plain + (a.accumulate ? pair[0] : 0.0);
    pair[1] = centred + (a.accumulate ? pair[1] : 0.0);
}

/* The sums of each sample of channel c, and the lane's sums of bias and weight. Many parts are added by a warp, few by
 * one thread. rstd_by(n): a sum of centred values times this is one of normalized ones. */
template <typename Rstd>
__device__ __forceinline__ double2 store_samples(const arguments &a, const shared_item &item, int samples, int c,
                                                 Rstd rstd_by)
{
    const bool many = a.slot_stride > 8 && item.lanes >= 32;
    const int lane = many ? item.lane % 32 : 0, lanes = many ? 32 : 1;
    const int slots = a.slots;
    double2 sums = {0.0, 0.0};
    for (int n = item.lane / lanes; n < samples; n += item.lanes / lanes) {
        const double *const pairs = pairs_of(a, n, c);
        const double2 sum = sum_few(sum_pairs(pairs, slots, lane, lanes), lanes);
        const double plain = sum.x, centred = sum.y;
        if (lane != 0)
            continue; /* all lanes have the sum; one writes and adds */
        if constexpr (writes_shard) {
            store_shard(a, (int64_t)n * a.channels + c, plain, centred);
        } else {
            const double normalized = centred * rstd_by(n);
            if constexpr (per_sample) {
                store_gradient<dweight>(a.dweight, n, c, normalized, a.accumulate);
                store_gradient<dbias>(a.dbias, n, c, plain, a.accumulate);
            }
            if constexpr (dscale != 0)
                store_parameter<dscale>(a.dscale, n, c,
                                        fma(normalized, parameter<weight>(a.weight, n, c, 1.0),
                                            parameter<bias>(a.bias, n, c, 0.0) * plain));
            store_parameter<dshift>(a.dshift, n, c, plain);
            const double by = 1.0 + parameter<scale>(a.scale, n, c, 0.0);
            sums.x = fma(by, plain, sums.x);
            sums.y = fma(by, normalized, sums.y);
        }
    }
    return sums;
}

/* The parts of a channel become the gradients of its parameters, or a shard's sums. */
__device__ __forceinline__ void find_gradients_of_channel(const arguments &a)
{
    const shared_item item(a.gradient_lanes, a.channels, totals ? a.totals_blocks : 0);
    constexpr bool by_sample = per_sample || (writes_shard && by_group) || dscale || dshift; /* each gets something */
    /* Sums of all samples of group norm have each sample's rstd in them. */
    constexpr bool has_rstd = writes_shard || gradients == NORMFUSE_GRADIENTS_NORMALIZED ||
                              gradients == NORMFUSE_GRADIENTS_OF_SAMPLES_NORMALIZED;
    constexpr int each_rstd = by_group && !has_rstd ? rstd : 0; /* of each sample */
    const int c = item.index, group = set_of_channel(a, c);
    const int samples = !item.exists ? 0 : sums_by_channel ? 1 : a.samples;
    const double of_all = has_rstd || by_group ? 1.0 : rstd_of(a, 0, c);
    const int slots = a.slots;
    follow_kernel();

    double2 found = {0.0, 0.0}; /* bias, weight */
    if constexpr (!by_sample) {
        struct weights {
            requested<each_rstd, 1> of_rstd;
            requested<scale, 1> more;
        };
        walk_pairs(
            a, item, samples, pairs_of(a, 0, c), a.channels * (int64_t)a.slot_stride,
            [&](int n, bool wanted) {
                weights of;
                of.of_rstd.request(a.rstd, n, [&](int) { return group; }, wanted);
                of.more.request(a.scale, n, [&](int) { return c; }, wanted);
                return of;
            },
            [&](const double2 &pair, const weights &of) {
                const double by = 1.0 + number_or(of.more, 0.0);
                found.x = fma(by, pair.x, found.x);
                found.y = fma(by, pair.y * number_or(of.of_rstd, of_all), found.y);
            });
    } else {
        found = store_samples(a, item, samples, c,
                              [&](int n) { return by_group && !has_rstd ? rstd_of(a, n, c) : of_all; });
    }
    found = sum_item(found, item);
    if (item.lane != 0 || !item.exists || per_sample || (writes_shard && by_group))
        return;
    if constexpr (writes_shard) {
        store_shard(a, c, found.x, found.y);
    } else if constexpr (!per_sample) {
        store_gradient<dweight>(a.dweight, 0, c, found.y, a.accumulate);
        store_gradient<dbias>(a.dbias, 0, c, found.x, a.accumulate);
    }
}

/* The parts of a channel become the gradient of its slope; of one slope those of all channels, where these are very
 * many in two launches. */
__device__ __forceinline__ void find_slopes(const arguments &a)
{
    const normfuse_finish_slopes &of = a.slopes;
    const shared_item item(of.lanes, of.items, of.first_block);
    const int all = item.exists ? of.outers * (int)of.by_slots.divisor : 0;
    double *const own = a.slope_sums + (int64_t)item.index * a.slot_stride * PAIR;
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
        store_gradient<dslope>(a.dslope, 0, item.index, sum, a.accumulate_slope);
}

/* All follow from the same sums: the first blocks have the sets' totals, which results wait for, others what the
 * parameters get, and the last ones what prelu's slopes do. */
__device__ __forceinline__ void find_gradients(const arguments &a)
{
    if (totals != 0 && (!(finds_gradients || dslope) || (int)blockIdx.x < a.totals_blocks))
        find_totals(a);
    else if (dslope != 0 && (!finds_gradients || (int)blockIdx.x >= a.slopes.first_block))
        find_slopes(a);
    else if (finds_gradients)
        find_gradients_of_channel(a);
}

/* ---- shards ------------------------------------------------------------------------------------------------------ */

/* As normfuse_stats_merge, normfuse_sums_merge and normfuse_sums_merge_per_value on the CPU, one thread a triple, or
 * `backward` a pair. */
__device__ __forceinline__ void merge_shards(const normfuse_merge_arguments &a)
{
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= a.items)
        return;
    if constexpr (backward != 0) {
        double plain = 0.0, centred = 0.0;
        for (int64_t of = 0; of < a.shards; of++) {
            const double *const pair = a.in + (of * a.items + i) * PAIR;
            plain += pair[0];
            centred += pair[1];
        }
        if (a.stats != nullptr) {
            const double count = a.stats[i / a.share * TRIPLE], divisor = count < 1.0 ? 1.0 : count;
            plain = plain * a.factor / divisor;
            centred = centred * a.factor / divisor;
        }
        a.out[i * PAIR] = plain;
        a.out[i * PAIR + 1] = centred;
    } else {
        moments all = {0.0, 0.0, 0.0};
        for (int64_t of = 0; of < a.shards; of++) {
            const double *const triple = a.in + (of * a.items + i) * TRIPLE;
            if (triple[0] != 0.0) /* a part without values, whatever its mean holds */
                append(all, {triple[0], triple[1], triple[2]});
        }
        store_triple(a.out + i * TRIPLE, all);
    }
}

/* A template, so that what is not this signature's work is not compiled. */
template <typename Arguments> __device__ __forceinline__ void finish(const Arguments &a)
{
    if constexpr (work == NORMFUSE_WORK_MERGE)
        merge_shards(a);
    else if constexpr (work == NORMFUSE_WORK_SHARES)
        join_shares(a);
    else if constexpr (work == NORMFUSE_WORK_STATISTICS)
        find_statistics(a);
    else if constexpr (work == NORMFUSE_WORK_RUNNING)
        find_running(a);
    else if constexpr (work == NORMFUSE_WORK_PARTS)
        join_parts(a);
    else
        find_gradients(a);
}

} // namespace

extern "C" __global__ void __launch_bounds__(NORMFUSE_FINISH_THREADS)
    NORMFUSE_KERNEL(const __grid_constant__ choose<work == NORMFUSE_WORK_MERGE, normfuse_merge_arguments,
                                                   normfuse_finish_arguments>::type a)
{
    finish(a);
}
