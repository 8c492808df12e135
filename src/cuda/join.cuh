/* SPDX-License-Identifier: MIT
 *
 * join.cuh - sums of threads become those of a block, and those of blocks the ones of their set. Every join has one
 * order, fixed by the geometry: no float atomics, the same bits each time. */
#ifndef NORMFUSE_CUDA_JOIN_CUH
#define NORMFUSE_CUDA_JOIN_CUH

#include "body.cuh"
#include "vector.cuh"

constexpr unsigned full_mask = 0xffffffffu;

__device__ __forceinline__ int divide(int value, const normfuse_cuda_divisor &by)
{
    return (int)((__umulhi((unsigned)value, by.multiplier) + (unsigned)value) >> by.shift);
}

/* a + b, and what its rounding leaves out (Knuth: exact). */
template <typename R> __device__ __forceinline__ R add_exactly(R a, R b, R &left)
{
    const R sum = a + b, part = sum - a;
    left = (a - (sum - part)) + (b - part);
    return sum;
}

/* Of values: how many, their mean less a shift, the sum of squares about that mean. */
template <typename R> struct moments {
    R count, mean, squares;
};

/* `mask` are the threads that call together: a multiple of `lanes`. */
template <typename R> __device__ __forceinline__ R sum_lanes(R value, int lanes, unsigned mask = full_mask)
{
    for (int distance = lanes / 2; distance > 0; distance /= 2)
        value += __shfl_xor_sync(mask, value, distance);
    return value;
}

/* The same of all threads of a warp, unrolled; `lanes` is the same in the whole warp. */
template <typename R> __device__ __forceinline__ R sum_few(R value, int lanes)
{
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
        if (distance < lanes)
            value += __shfl_xor_sync(full_mask, value, distance);
    return value;
}

/* The threads of a block but the last `others` share out items, 2^bits adjacent ones for each: calls work(item, exists,
 * lane, lanes), whole warps in step. */
template <int others = 0, typename Work> __device__ __forceinline__ void share_items(int items, int bits, Work work)
{
    const int lanes = 1 << bits, lane = (int)threadIdx.x & (lanes - 1);
    const int first_of_warp = (int)(threadIdx.x & ~31u) >> bits;
#pragma unroll 1
    for (int round = 0; round + first_of_warp < items; round += ((int)blockDim.x - others) >> bits) {
        const int item = round + ((int)threadIdx.x >> bits);
        work(item < items ? item : 0, item < items, lane, lanes);
    }
}

/* Over `lanes` adjacent threads: first the mean, then squares about it, which cannot cancel. All threads of the warp
 * call. Where a warp has several norm groups their counts differ, so no shuffle may depend on one: a lane that skipped
 * it would leave the others waiting. A whole warp has one count, and the branch spares its kernels registers. */
template <typename R> __device__ __forceinline__ moments<R> join_lanes(const moments<R> &own, int lanes)
{
    moments<R> all;
    all.count = sum_lanes(own.count, lanes);
    if (lanes == 32)
        all.mean = all.count > R(0) ? sum_lanes(own.count * own.mean, lanes) / all.count : R(0);
    else
        all.mean = sum_lanes(own.count * own.mean, lanes) / max(all.count, R(1)); /* a count is 0 or at least 1 */
    const R distance = own.mean - all.mean;
    all.squares = sum_lanes(own.count > R(0) ? own.squares + own.count * distance * distance : R(0), lanes);
    return all;
}

/* Chan, Golub and LeVeque 1979: what a thread has met so far and what its next tile brought. */
template <typename R> __device__ __forceinline__ void append(moments<R> &to, const moments<R> &next)
{
    const R count = to.count + next.count;
    if (count > R(0)) {
        const R distance = next.mean - to.mean, share = next.count / count;
        to.mean += distance * share;
        to.squares += next.squares + distance * distance * to.count * share;
        to.count = count;
    }
}

/* What the blocks of a set send one another: a triple with the whole mean, since each block has a shift of its own. */
enum { TRIPLE = 3, PAIR = 2 };

template <typename R> struct set_statistics {
    double mean;
    R variance, rstd;
};

/* Moments about a number. */
template <typename R> struct shifted_moments {
    moments<R> of;
    double shift;
};

/* One warp joins `parts` triples: count, mean, squares, `stride` doubles apart. Written by other blocks, so not from
 * L1. */
template <typename R>
__device__ __forceinline__ shifted_moments<R> join_parts(const double *triples, int64_t stride, int parts)
{
    constexpr int AT_ONCE = 2; /* requested, of each lane */
    const int lane = threadIdx.x % 32;
    moments<R> own = {R(0), R(0), R(0)};
    const double shift = __ldcg(triples + 1);
    for (int first = lane; first < parts; first += AT_ONCE * 32) {
        double found[AT_ONCE][TRIPLE] = {};
        each<AT_ONCE>([&](int k) {
            const double *const triple = triples + (first + 32 * k) * stride;
            if (first + 32 * k < parts)
                each<TRIPLE>([&](int i) { found[k][i] = __ldcg(triple + i); });
        });
        each<AT_ONCE>([&](int k) {
            if (first + 32 * k < parts)
                append(own, {(R)found[k][0], (R)(found[k][1] - shift), (R)found[k][2]});
        });
    }
    return {join_lanes(own, 32), shift};
}

/* The same from this block's shared memory. */
template <typename R>
__device__ __forceinline__ shifted_moments<R> join_near(const double *triples, int64_t stride, int parts)
{
    const int lane = threadIdx.x % 32;
    moments<R> own = {R(0), R(0), R(0)};
    const double shift = triples[1];
    if (lane < parts) {
        const double *triple = triples + lane * stride;
        own = {(R)triple[0], (R)(triple[1] - shift), (R)triple[2]};
    }
    return {join_lanes(own, 32), shift};
}

/* The hardware's has 2.2 units of 2^-24 (CUDA's rsqrtf: 2 ulp); a root and a division have 2, and take ten times as
 * long. */
__device__ __forceinline__ float inverse_root(float value)
{
    return rsqrtf(value);
}
__device__ __forceinline__ double inverse_root(double value)
{
    return 1.0 / sqrt(value);
}

template <typename R>
__device__ __forceinline__ set_statistics<R> statistics_of(const moments<R> &all, double shift, double eps)
{
    const R variance = all.squares / all.count;
    return {shift + (double)all.mean, variance, inverse_root(variance + (R)eps)};
}

/* What a channel is weighed by, as it is in memory. */
struct requested_weights {
    requested_value weight, bias, scale, shift;
};
__device__ __forceinline__ requested_weights request_weights(const normfuse_cuda_problem &p, int64_t n, int64_t c,
                                                             bool wanted)
{
    const auto request = [&](const normfuse_parameter &of) {
        return request_at_once(of, n * of.batch + c * of.channel, wanted);
    };
    requested_weights found = {request(p.weight()), request(p.bias()), {0, 0}, {0, 0}};
    /* A warp asks for what there is not in 70 instructions, too. */
    if (p.scale().data || p.shift().data) {
        found.scale = request(p.scale());
        found.shift = request(p.shift());
    }
    return found;
}

/* Weight and bias with the sample's scale and shift. */
template <typename R, typename Requested>
__device__ __forceinline__ void weigh(const normfuse_cuda_problem &p, const Requested &from, R &slope, R &offset)
{
    const R more = p.scale().data ? R(1) + receive<R>(from.scale, p.scale().type) : R(1);
    slope = p.weight().data ? receive<R>(from.weight, p.weight().type) * more : more;
    offset = p.bias().data ? receive<R>(from.bias, p.bias().type) * more : R(0);
    if (p.shift().data)
        offset += receive<R>(from.shift, p.shift().type);
}

/* The statistics of a channel's set, requested together, wherever they are. */
struct requested_set {
    normfuse_parameter centre, spread; /* mean, and rstd or the running variance */
    requested_value of_centre, of_spread;
    bool wanted, running;

    __device__ __forceinline__ requested_set(const normfuse_cuda_arguments &a, int n, int set, int c)
    {
        const normfuse_cuda_problem &p = a.problem;
        const bool scratch = a.source == NORMFUSE_SOURCE_SCRATCH;
        running = a.source == NORMFUSE_SOURCE_RUNNING;
        wanted = running || scratch || a.source == NORMFUSE_SOURCE_SAVED;
        centre = p.mean();
        spread = p.rstd();
        int64_t at_centre = n * centre.batch + set * centre.channel, at_spread = n * spread.batch + set * spread.channel;
        if (running) {
            centre = p.running_mean();
            spread = p.running_var();
            at_centre = c * centre.channel;
            at_spread = c * spread.channel;
        } else if (scratch) { /* struct normfuse_cuda_statistics */
            centre.data = reinterpret_cast<char *>(a.statistics);
            centre.type = NORMFUSE_F64;
            spread = centre;
            at_centre = ((p.sets == NORMFUSE_SETS_BATCH ? 0 : (int64_t)n * p.groups) + set) * TRIPLE;
            at_spread = at_centre + 1;
        }
        of_centre = request_at_once(centre, at_centre, wanted);
        of_spread = request_at_once(spread, at_spread, wanted);
    }
    __device__ __forceinline__ double mean() const
    {
        return wanted && centre.data ? receive<double>(of_centre, centre.type) : 0.0;
    }
    /* 1 where the running variance, which scale() has, takes its place. */
    template <typename R> __device__ __forceinline__ R rstd() const
    {
        return wanted && !running ? receive<R>(of_spread, spread.type) : R(1);
    }
    /* slope / sqrt(running variance + eps), rounded once, or slope. */
    template <typename R> __device__ __forceinline__ R scale(R slope, double eps) const
    {
        const double variance = running && spread.data ? receive<double>(of_spread, spread.type) : 1.0;
        return running ? (R)((double)slope / sqrt(variance + eps)) : slope;
    }
};

/* Running statistics take the variance over count - 1. */
__device__ __forceinline__ double unbiased(double variance, double count)
{
    return variance * (count / (count - 1.0));
}

/* running = (1 - momentum) * running + momentum * of this batch, in R. */
template <typename R>
__device__ __forceinline__ void update_running(const normfuse_cuda_problem &p, int64_t c, double mean, double variance)
{
    const R momentum = (R)p.momentum, keep = R(1) - momentum;
    write_parameter<R>(p.running_mean(), 0, c, keep * parameter<R>(p.running_mean(), 0, c, R(0)) + momentum * (R)mean);
    write_parameter<R>(p.running_var(), 0, c,
                       keep * parameter<R>(p.running_var(), 0, c, R(0)) + momentum * (R)variance);
}

/* The statistics of a norm group of so many values, the set-th of sample n and the index-th of all, to memory. The
 * unbiased variance. */
template <typename R>
__device__ __forceinline__ double store_statistics(const normfuse_cuda_arguments &a, int64_t n, int set, int64_t index,
                                                   double mean, R variance, R rstd, double values)
{
    write_parameter<double>(a.problem.mean(), n, set, mean);
    write_parameter<R>(a.problem.rstd(), n, set, rstd);
    const double of_running = unbiased((double)variance, values);
    if (a.statistics)
        a.statistics[index] = {mean, (double)rstd, of_running};
    return of_running;
}

template <typename R> struct totals {
    R plain, centred;

    /* Of adjacent lanes, as sum_few() of one number; both are on their way at once. */
    __device__ __forceinline__ totals sum_few(int lanes) const
    {
        totals all = *this;
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2)
            if (distance < lanes) {
                const R other = __shfl_xor_sync(full_mask, all.plain, distance);
                all.centred += __shfl_xor_sync(full_mask, all.centred, distance);
                all.plain += other;
            }
        return all;
    }
};

/* Sums of two numbers over the parts of a set, `stride` doubles apart. */
template <typename R>
__device__ __forceinline__ totals<R> add_parts(const double *pairs, int64_t stride, int parts, bool near_by)
{
    double plain = 0.0, centred = 0.0;
    for (int i = threadIdx.x % 32; i < parts; i += 32) {
        plain += near_by ? pairs[i * stride] : __ldcg(pairs + i * stride);
        centred += near_by ? pairs[i * stride + 1] : __ldcg(pairs + i * stride + 1);
    }
    return {(R)sum_lanes(plain, 32), (R)sum_lanes(centred, 32)};
}

/* ---- clusters --------------------------------------------------------------------------------------------------- */

/* A block's only mailbox, opened and announced. */
__device__ __forceinline__ void open_only_mailbox(cluster_mailbox &mailbox, int bytes)
{
    open_mailbox(mailbox, bytes);
    announce_mailboxes();
}

/* ---- the barrier of a block group ---------------------------------------------------------------------------- */

/* Grid barriers are on cache lines of their own. */
constexpr int grid_barrier_stride = 16;

/* Block 0 of the block group adds 2^31 - (parts - 1) to the grid barrier and every other block 1: when all have, its
 * top bit has flipped and the lower ones are as they were, so that the grid barrier is ready for the next barrier with
 * nothing to reset. What any thread wrote before it arrived is seen by every thread of the block group after it waited.
 */
__device__ __forceinline__ uint32_t grid_barrier_share(int part, int parts)
{
    return part == 0 ? 0x80000000u - (uint32_t)(parts - 1) : 1u;
}

/* What the grid barrier says is requested while the data arrive, which spares a way to memory and back: it cannot
 * change until this block has arrived, too. Thread 0. */
__device__ __forceinline__ uint32_t look_at_grid_barrier(const uint32_t *grid_barrier)
{
    return load_relaxed(grid_barrier);
}

/* The same by a load that no branch surrounds, and where it waits without a register of every thread's. */
__device__ __forceinline__ uint32_t look_at_grid_barrier_where(bool wanted, const uint32_t *grid_barrier)
{
    return load_relaxed_where(wanted, grid_barrier);
}

__device__ __forceinline__ uint32_t &grid_barrier_before()
{
    __shared__ uint32_t before;
    return before;
}

__device__ __forceinline__ void arrive_at_block_group(uint32_t *grid_barrier, int part, int parts)
{
    __syncthreads();
    if (threadIdx.x == 0)
        add_release(grid_barrier, grid_barrier_share(part, parts));
}

__device__ __forceinline__ void synchronize_block_group(uint32_t *grid_barrier, int part, int parts, uint32_t before)
{
    arrive_at_block_group(grid_barrier, part, parts);
    if (threadIdx.x == 0)
        await_grid_barrier(grid_barrier, before);
    __syncthreads();
}

/* What a block has of its sets or block groups, one after the other: part `part` of each. */
struct block_turns {
    int exchange, block_group, part, set, parity = 0;

    __device__ __forceinline__ explicit block_turns(const normfuse_cuda_arguments &a) : exchange(a.geometry.exchange)
    {
        set = block_group = divide((int)blockIdx.x, a.geometry.by_parts);
        part = (int)blockIdx.x - block_group * a.geometry.parts;
    }
    __device__ __forceinline__ uint32_t *grid_barrier(const normfuse_cuda_arguments &a) const
    {
        return a.grid_barriers + block_group * grid_barrier_stride;
    }
    /* What the blocks of the block group send one another of its `groups`. */
    template <typename Pair>
    __device__ __forceinline__ Pair *parts_of(const normfuse_cuda_arguments &a, int groups) const
    {
        return reinterpret_cast<Pair *>(a.partials) +
               ((int64_t)parity * a.geometry.block_groups + block_group) * groups * a.geometry.parts;
    }
    __device__ __forceinline__ bool has_next(const normfuse_cuda_geometry &g) const
    {
        return exchange == NORMFUSE_EXCHANGE_GRID && set + g.block_groups < g.all_block_groups;
    }
    __device__ __forceinline__ bool advance(const normfuse_cuda_geometry &g)
    {
        set += g.block_groups;
        if (exchange != NORMFUSE_EXCHANGE_GRID || set >= g.all_block_groups)
            return false;
        parity ^= 1;
        __syncthreads();
        return true;
    }
};

#endif
