/* SPDX-License-Identifier: MIT
 *
 * lines.cu - group norm where the values of a norm group are adjacent in memory and few, in both layouts: [N, C], small
 * planes, whole small samples. They are called a line. Loads are of one element, or of a word of two halves, so a line
 * may begin anywhere, may have any length, and every addition is taken.
 *
 * A power of two of adjacent threads, the lanes, holds a line: lane l has the vectors l, l + lanes, l + 2 lanes, in its
 * slots, so a warp loads adjacent elements. A thread keeps its norm group and goes from sample to sample; the values of
 * the next sample are requested before this one is worked on. Words are those that memory is made of: the line's first
 * element may be the second of a word, by as much in each of a thread's samples, which are even numbers apart where
 * samples begin in turn at even and odd elements. What a value is weighed by lies in shared memory, in a place that its
 * thread alone reads. The backward sums the gradients of weight and bias by position, in registers, and the block joins
 * positions to channels once, at the end.
 *
 * A thread that has no line, or no value in a slot, has zeros there: x, dy, weight and bias. It goes through the same
 * shuffles and barriers as all others and stores nothing. */
#include "gradients.cuh"
#include "rows.cuh"
#include "single.cuh"

constexpr int max_line_warps = 16;
constexpr int values_in_step = 2; /* of loops over values, which end between steps */

/* z = (x - mean) rstd slope + offset of a slot; at the end of the backward the sums of a position. */
template <typename R> struct __align__(2 * sizeof(R)) line_pair
{
    R first, second;
};

/* One more than a thread has: no conflicts of banks, and all places of a thread are one address and an offset. */
__device__ __forceinline__ int pairs_of_thread(const normfuse_cuda_geometry &g)
{
    return g.segment_rows + 1;
}

/* Which values a thread has of a line: those of its first slots, but not what is another line's. */
template <int V> struct line_share {
    int count, whole; /* slots that have a value; whose last element is one */
    int readable;     /* slots that are in the tensor, the elements of others with them */
    bool is_cut;      /* the first element of the first slot is none */

    __device__ __forceinline__ bool has(int value) const
    {
        const int slot = value / V;
        return V > 1 && value % V > 0 ? slot < whole : slot < count && !(V > 1 && slot == 0 && is_cut);
    }
};

/* Elements before a line's first one in the vector where that lies. */
template <int V>
__device__ __forceinline__ int shift_of(const normfuse_cuda_arguments &a, int n, int group)
{
    return (int)(n * a.problem.x().batch + (int64_t)group * a.geometry.group * a.problem.x().channel) & (V - 1);
}

/* Vectors of a line that may be shifted. */
template <int V> __device__ __forceinline__ int vectors_of_line(const normfuse_cuda_arguments &a)
{
    return (a.geometry.rows + ((int)a.problem.x().batch & (V - 1)) + V - 1) / V;
}

template <int V> struct line_place {
    int lanes, lane; /* of the line */
    int sample;      /* of those that the block has beside one another */
    int group;       /* norm group of a sample */
    int shift;
    int64_t at, step; /* bytes from the tensor's beginning to the first slot of sample 0, and from sample to sample */
    bool is_last;     /* no norm group of a sample lies behind it in memory */
    line_share<V> own;

    __device__ __forceinline__ line_place(const normfuse_cuda_arguments &a, int part, int block_of_row, int bytes)
    {
        const normfuse_cuda_geometry &g = a.geometry;
        const int line = (int)threadIdx.x >> g.lane_bits;
        lanes = 1 << g.lane_bits;
        lane = (int)threadIdx.x & (lanes - 1);
        sample = divide(line, g.by_width);
        group = block_of_row * g.width + line - sample * g.width;
        shift = shift_of<V>(a, part * g.sets_a_block + sample, group);
        const bool has = sample < g.sets_a_block && group < (int)a.problem.groups;
        const auto slots_of = [&](int vectors) {
            return has && lane < vectors ? (vectors - lane + lanes - 1) >> g.lane_bits : 0;
        };
        const int past = g.rows + shift, count = slots_of((past + V - 1) / V);
        own = {count, slots_of(past / V), count, has && lane == 0 && shift > 0};
        at = ((int64_t)group * g.group * a.problem.x().channel - shift + lane * V) * bytes;
        step = a.problem.x().batch * bytes;
        is_last = group == (int)a.problem.groups - 1 || a.problem.x().channel == 0;
    }
    /* Of sample n, where there is one. What follows the last line in memory is nobody's: that of the last sample and norm
     * group, and all that lie in its place. */
    __device__ __forceinline__ line_share<V> share(const normfuse_cuda_arguments &a, int n) const
    {
        const int samples = (int)a.problem.n;
        line_share<V> share = n < samples ? own : line_share<V>{0, 0, 0, false};
        if (V > 1 && is_last && (n == samples - 1 || step == 0))
            share.readable = min(share.readable, share.whole);
        return share;
    }
    __device__ __forceinline__ int64_t of_sample(int n) const
    {
        return at + n * step;
    }
    /* Rows: the positions of a channel are adjacent. Columns: one position, or all channels of each position. */
    __device__ __forceinline__ int channel_of(const normfuse_cuda_arguments &a, int value) const
    {
        const int in_line = (lane + value / V * lanes) * V + value % V - shift;
        const int channel = a.problem.columns() ? in_line - divide(in_line, a.geometry.by_group) * a.geometry.group
                                                : divide(in_line, a.geometry.by_spans);
        return group * a.geometry.group + channel;
    }
    /* Whether the thread speaks for its line. */
    __device__ __forceinline__ bool is_first() const
    {
        return lane == 0 && own.count > 0;
    }
};

/* The slots of a thread from the first one on, `bytes` from one to the next; those that it has not are 0. */
template <typename T, int V, int K>
__device__ __forceinline__ void request_slots(const char *from, int bytes, const line_share<V> &share,
                                              raw<T, V> (&vectors)[K])
{
    const char *const first = from;
    /* From one to the next: addresses that follow from a base are held in registers, all of them. */
    each<K>([&](int k) {
        load_where(k < share.readable, vectors[k], from);
        from += bytes;
    });
    if constexpr (V > 1) {
        if (share.readable < share.count)
            each<K>([&](int k) { load_half_where(k == share.whole, vectors[k], first + k * bytes); });
    }
}

template <typename T, int V, int K>
__device__ __forceinline__ compute<T> value_of(const raw<T, V> (&vectors)[K], int value)
{
    compute<T> values[V];
    unpack<T, V>(vectors[value / V], values);
    return values[value % V];
}

/* 0 for what is another line's. */
template <int V, typename R, int N>
__device__ __forceinline__ void clear_others(const line_share<V> &share, R (&values)[N])
{
    if constexpr (V > 1) {
        values[0] = share.is_cut ? R(0) : values[0];
        /* Not in a branch, of whose assignment the compiler makes one through an index, and of registers memory. */
        each<N / V>([&](int k) { values[k * V + V - 1] = k == share.whole ? R(0) : values[k * V + V - 1]; });
    }
}

/* One slot, of values[first] and those that follow. */
template <typename T, int V, int N>
__device__ __forceinline__ void store_slot(char *to, const line_share<V> &share, int slot,
                                           const compute<T> (&values)[N], int first)
{
    compute<T> own[V];
    each<V>([&](int i) { own[i] = values[first + i]; });
    const bool is_cut = V > 1 && slot == 0 && share.is_cut;
    if (slot < share.whole && !is_cut)
        *reinterpret_cast<raw<T, V> *>(to) = make_vector<T, V>(own);
    else if (V > 1 && slot < share.count)
        store_number<T>(to + (is_cut ? (int)sizeof(T) : 0), is_cut ? own[V - 1] : own[0]);
}
template <typename T, int V, int N>
__device__ __forceinline__ void store_slots(char *to, int bytes, const line_share<V> &share,
                                            const compute<T> (&values)[N])
{
    each<N / V>([&](int k) {
        store_slot<T, V>(to, share, k, values, k * V);
        to += bytes;
    });
}

/* work(begin) for each `step` of the first `used` of a thread's values, from number `begin` on. */
template <int N, int step, typename Work> __device__ __forceinline__ void in_values(int used, Work work)
{
#pragma unroll
    for (int begin = 0; begin < N; begin += step) {
        if (begin >= used)
            break;
        work(begin);
    }
}

/* Its parameters are requested once, and a thread joins the sums of its positions by itself. */
__device__ __forceinline__ bool is_one_channel(const normfuse_cuda_geometry &g)
{
    return g.group == 1;
}

/* Of each slot what its value is weighed by: weight (1 + scale), bias (1 + scale) + shift. */
template <int M, bool modulated, int V, typename R>
__device__ __forceinline__ void prepare_line(const normfuse_cuda_arguments &a, const line_place<V> &place, int n,
                                             const line_share<V> &share, line_pair<R> *own)
{
    const normfuse_cuda_problem &p = a.problem;
    const auto request = [&](int64_t c, bool wanted) {
        const auto request_one = [&](const normfuse_parameter &of) { return request_parameter(of, n, c, wanted); };
        requested_weights found = {request_one(p.weight()), request_one(p.bias()), {0, 0}, {0, 0}};
        if (modulated) {
            found.scale = request_one(p.scale());
            found.shift = request_one(p.shift());
        }
        return found;
    };
    if (is_one_channel(a.geometry)) {
        R slope, offset;
        weigh(p, request(place.group, share.count > 0), slope, offset);
#pragma unroll 1
        for (int k = 0; k < a.geometry.segment_rows; k++)
            own[k] = share.has(k) ? line_pair<R>{slope, offset} : line_pair<R>{R(0), R(0)};
        return;
    }
#pragma unroll 1
    for (int first = 0; first < a.geometry.segment_rows; first += M) {
        requested_weights found[M];
        each<M>([&](int i) { found[i] = request(place.channel_of(a, first + i), share.has(first + i)); });
        each<M>([&](int i) {
            R slope, offset;
            weigh(p, found[i], slope, offset);
            own[first + i] = share.has(first + i) ? line_pair<R>{slope, offset} : line_pair<R>{R(0), R(0)};
        });
    }
}

/* Behind the pairs of all threads: slopes of prelu, and what values add to their gradients. */
template <typename R>
__device__ __forceinline__ R *slopes_of_thread(const normfuse_cuda_geometry &g, uint4 *dynamic, int which)
{
    const int values = pairs_of_thread(g), threads = (int)blockDim.x;
    return reinterpret_cast<R *>(dynamic) + ((2 + which) * threads + (int)threadIdx.x) * values;
}
template <int V, typename R>
__device__ __forceinline__ void prepare_slopes(const normfuse_cuda_arguments &a, const line_place<V> &place, R *slopes)
{
#pragma unroll 1
    for (int v = 0; v < a.geometry.segment_rows; v++)
        slopes[v] =
            place.own.has(v) ? parameter<R>(a.problem.slope(), 0, place.channel_of(a, v), R(0)) : R(0);
}

/* Values of a line that its warp number `warp` has. */
template <int V> __device__ __forceinline__ int values_of_warp(const normfuse_cuda_geometry &g, int shift, int warp)
{
    const int past = g.rows + shift, at_once = V << g.lane_bits, rounds = past / at_once;
    const int rest = min(max(past - rounds * at_once - 32 * V * warp, 0), 32 * V);
    return rounds * 32 * V + rest - (warp == 0 ? shift : 0);
}

/* What is known of the values of a line, or of those that a warp has of it: the mean is about + rest, squares are about
 * that. Lanes count the warps of their line, a power of two. */
template <typename R> struct __align__(4 * sizeof(R)) line_moments
{
    R about, rest, squares, count;

    __device__ __forceinline__ line_moments join(int warps, R values, R share) const
    {
        const R near = __shfl_sync(full_mask, about, 0), distance = (about - near) + rest;
        const R mean = quotient(sum_few(count * distance, warps), values, share), off = distance - mean;
        const R all = sum_few(squares + count * off * off, warps);
        const R sum = near + mean, back = sum - near;
        return {sum, (near - (sum - back)) + (mean - back), all, values};
    }
};

/* ---- forward ---------------------------------------------------------------------------------------------------- */

template <typename T, int V, int K> __device__ __forceinline__ void lines_forward(const normfuse_cuda_arguments &a)
{
    follow_kernel();
    using R = compute<T>;
    constexpr bool fast = sizeof(T) == 2;
    constexpr int N = K * V;
    const normfuse_cuda_problem &p = a.problem;
    const normfuse_cuda_geometry &g = a.geometry;
    NORMFUSE_DYNAMIC_SHARED(dynamic);
    __shared__ line_moments<R> of_warps[2][max_line_warps];
    const int warp = (int)threadIdx.x / 32;
    const int part = divide((int)blockIdx.x, g.by_blocks_wide);
    const line_place<V> place(a, part, (int)blockIdx.x - part * g.blocks_wide, (int)sizeof(T));
    line_pair<R> *const own = reinterpret_cast<line_pair<R> *>(dynamic) + (int)threadIdx.x * pairs_of_thread(g);
    const int bytes = place.lanes * V * (int)sizeof(T), warps = max(place.lanes / 32, 1); /* of a line */
    const int first_warp = warp & ~(warps - 1), first_lane = (int)threadIdx.x % 32 & ~(place.lanes - 1);
    const int samples = (int)p.n, apart = g.parts * g.sets_a_block;
    const int used = ((vectors_of_line<V>(a) + place.lanes - 1) >> g.lane_bits) * V; /* values */
    const bool modulated = p.scale().data || p.shift().data;
    const R values = (R)g.rows, share_of_one = R(1) / values;
    const R warp_values = warps > 1 ? (R)values_of_warp<V>(g, place.shift, warp - first_warp) : values;
    const R share_of_warp = R(1) / max(warp_values, R(1));

    raw<T, V> requested[K];
    const auto request_sample = [&](int n) {
        request_slots<T, V>(p.x().data + place.of_sample(n), bytes, place.share(a, n), requested);
    };
    request_sample(part * g.sets_a_block + place.sample);
    if (!modulated)
        prepare_line<slots_at_once, false>(a, place, 0, place.own, own);
    R *const slopes = slopes_of_thread<R>(g, dynamic, 0);
    if (p.activation == NORMFUSE_PRELU)
        prepare_slopes(a, place, slopes);

    int parity = 0; /* so that nobody writes what another warp still reads of the sample before */
#pragma unroll 1
    for (int first = part * g.sets_a_block; first < samples; first += apart) {
        const int n = first + place.sample;
        const line_share<V> share = place.share(a, n);
        const int64_t here = place.of_sample(n);
        R x[N];
        raw<T, V> more[K];
        each<N>([&](int v) { x[v] = value_of<T, V>(requested, v); });
        if (p.pre_add().data) {
            request_slots<T, V>(p.pre_add().data + here, bytes, share, more);
            each<N>([&](int v) { x[v] = rounded_sum<T>(x[v], value_of<T, V>(more, v)); });
            if (p.u().data)
                store_slots<T, V>(p.u().data + here, bytes, share, x);
        }
        if (p.post_add().data)
            request_slots<T, V>(p.post_add().data + here, bytes, share, more);
        request_sample(n + apart);
        if (modulated)
            prepare_line<1, true>(a, place, n, share, own);

        /* About the first value of the line, or of the warp; then about the mean, which cannot cancel. */
        const R base = __shfl_sync(full_mask, share.is_cut ? x[V - 1] : x[0], first_lane);
        R sum = R(0), square = R(0);
        in_values<N, values_in_step>(used, [&](int begin) {
            each<values_in_step>([&](int i) {
                if (share.has(begin + i))
                    sum += x[begin + i] - base;
            });
        });
        const R distance = quotient(sum_few(sum, place.lanes), warp_values, share_of_warp);
        const R about = base + distance, back = about - base;
        R rest = (base - (about - back)) + (distance - back);
        in_values<N, values_in_step>(used, [&](int begin) {
            each<values_in_step>([&](int i) {
                R &own_x = x[begin + i];
                own_x -= about;
                if (share.has(begin + i))
                    square += (own_x - rest) * (own_x - rest);
            });
        });
        line_moments<R> all = {about, rest, sum_few(square, place.lanes), warp_values};
        if (warps > 1) {
            if (threadIdx.x % 32 == 0)
                of_warps[parity][warp] = all;
            __syncthreads();
            all = of_warps[parity][first_warp + ((int)threadIdx.x & (warps - 1))].join(warps, values, share_of_one);
            rest = (all.about - about) + all.rest;
            parity ^= 1;
        }
        const R variance = quotient(all.squares, values, share_of_one), rstd = inverse_root(variance + (R)p.eps);
        if (place.is_first() && n < samples)
            store_statistics(a, n, place.group, (int64_t)n * p.groups + place.group,
                             (double)all.about + (double)all.rest, variance, rstd, (double)p.set_values);

        char *to = p.y().data + here;
        const R off = -rest * rstd;
        choose_any_activation(p.activation, [&](auto chosen) {
            in_values<N, slots_at_once>(used, [&](int begin) {
                R z[slots_at_once];
                each<slots_at_once>([&](int i) {
                    const line_pair<R> by = own[begin + i];
                    z[i] = fma(fma(x[begin + i], rstd, off), by.first, by.second);
                    if (p.post_add().data)
                        z[i] += value_of<T, V>(more, begin + i);
                    if (takes_half<fast, true>(decltype(chosen)::constant))
                        z[i] *= R(0.5);
                });
                if constexpr (decltype(chosen)::constant == NORMFUSE_PRELU)
                    each<slots_at_once>([&](int i) { z[i] = z[i] > R(0) ? z[i] : slopes[begin + i] * z[i]; });
                else
                    activate<fast, true>(z, chosen, p.activation, (R)p.act_param);
                each<slots_at_once / V>([&](int k) {
                    store_slot<T, V>(to, share, begin / V + k, z, k * V);
                    to += bytes;
                });
            });
        });
    }
}

/* ---- backward --------------------------------------------------------------------------------------------------- */

/* The sums of the block's channels, of what its threads have of positions (of one channel two doubles, in the place of
 * the first), to memory, or without a place there to the gradients: `bits` say how many threads of a warp have a channel
 * together. */
template <int V, typename R>
__device__ __forceinline__ void write_line_sums(const normfuse_cuda_arguments &a, const line_pair<R> *positions,
                                                double *to, int part, int block_of_row)
{
    const normfuse_cuda_geometry &g = a.geometry;
    const int threads = (int)blockDim.x, lanes = 1 << g.lane_bits;
    const bool by_thread = is_one_channel(g);
    const int channels = g.width * g.group, first_channel = block_of_row * channels, length = (int)a.problem.s;
    int bits = 0;
    while (bits < 5 && channels << (bits + 1) <= threads)
        bits++;
#pragma unroll 1
    for (int begin = 0; begin < channels << bits; begin += threads) {
        const int item = begin + (int)threadIdx.x, channel = item >> bits, of = item & ((1 << bits) - 1);
        const bool has = channel < channels && first_channel + channel < (int)a.problem.c;
        double plain = 0.0, normalized = 0.0;
        if (has) {
            const int line = divide(channel, g.by_group), within = channel - line * g.group;
            const int first = a.problem.columns() ? within : within * length, apart = a.problem.columns() ? g.group : 1;
#pragma unroll 1
            for (int i = of; i < (by_thread ? lanes : length); i += 1 << bits) {
#pragma unroll 4
                for (int sample = 0; sample < g.sets_a_block; sample++) {
                    const int shift = by_thread ? 0 : shift_of<V>(a, part * g.sets_a_block + sample,
                                                                  block_of_row * g.width + line);
                    const int place = first + i * apart + shift, vector = by_thread ? i : place / V;
                    const int thread = ((sample * g.width + line) << g.lane_bits) + (vector & (lanes - 1));
                    const line_pair<R> *const sums = positions + thread * pairs_of_thread(g) +
                                                     (by_thread ? 0 : (vector >> g.lane_bits) * V + place % V);
                    const double *const of_thread = reinterpret_cast<const double *>(sums);
                    plain += by_thread ? of_thread[0] : (double)sums->first;
                    normalized += by_thread ? of_thread[1] : (double)sums->second;
                }
            }
        }
        plain = sum_lanes(plain, 1 << bits);
        normalized = sum_lanes(normalized, 1 << bits);
        if (!has || of != 0)
            continue;
        const int64_t c = first_channel + channel;
        if (to) {
            reinterpret_cast<double2 *>(to)[c * g.sum_slots + part] = make_double2(plain, normalized);
        } else {
            write_gradient(a.problem, a.problem.dbias(), 0, c, plain);
            write_gradient(a.problem, a.problem.dweight(), 0, c, normalized);
        }
    }
}

/* The thread's sums of positions into shared memory; of one channel they are one. */
template <typename R, int N>
__device__ __forceinline__ void hold_positions(const normfuse_cuda_geometry &g, line_pair<R> *own, const R (&plain)[N],
                                               const R (&normalized)[N])
{
#pragma unroll
    for (int v = 0; v < N; v++)
        if (v < g.segment_rows && !is_one_channel(g))
            own[v] = {plain[v], normalized[v]};
    if (is_one_channel(g)) {
        double of_thread[2] = {0.0, 0.0};
#pragma unroll
        for (int v = 0; v < N; v++) {
            of_thread[0] += (double)plain[v];
            of_thread[1] += (double)normalized[v];
        }
        reinterpret_cast<double *>(own)[0] = of_thread[0];
        reinterpret_cast<double *>(own)[1] = of_thread[1];
    }
}

/* Of weight and bias, and of the slopes of prelu. */
template <int V, typename R, int N>
__device__ __forceinline__ void write_all_sums(const normfuse_cuda_arguments &a, const uint4 *dynamic,
                                               line_pair<R> *own, R (&plain)[N], const R (&normalized)[N],
                                               const R *of_slopes, int part, int block_of_row)
{
    const line_pair<R> *const positions = reinterpret_cast<const line_pair<R> *>(dynamic);
    hold_positions(a.geometry, own, plain, normalized);
    __syncthreads();
    write_line_sums<V>(a, positions, a.geometry.contributors ? nullptr : a.sums, part, block_of_row);
    if (!a.problem.dslope().data)
        return;
    each<N>([&](int v) { plain[v] = v < a.geometry.segment_rows ? of_slopes[v] : R(0); });
    __syncthreads();
    hold_positions(a.geometry, own, plain, plain);
    __syncthreads();
    write_line_sums<V>(a, positions, sums_of_slopes(a), part, block_of_row);
}

/* A norm group's statistics from sample to sample. */
struct statistic_walk {
    const char *at;
    int64_t step; /* bytes */
    int type;

    __device__ __forceinline__ statistic_walk(const normfuse_parameter &of, int group, int first, int apart)
        : type(of.type)
    {
        at = of.data + ((first * of.batch + group * of.channel) << byte_bits(type));
        step = (apart * of.batch) << byte_bits(type);
    }
    __device__ __forceinline__ requested_value request_next(bool wanted)
    {
        requested_value found = {0, 0};
        load_parameter<NORMFUSE_F32, NORMFUSE_F64>(found.low, found.high, at, wanted ? type : -1);
        at += step;
        return found;
    }
};

template <typename T, int V, int K> __device__ __forceinline__ void lines_backward(const normfuse_cuda_arguments &a)
{
    follow_kernel();
    using R = compute<T>;
    constexpr bool fast = sizeof(T) == 2;
    constexpr int N = K * V;
    const normfuse_cuda_problem &p = a.problem;
    const normfuse_cuda_geometry &g = a.geometry;
    NORMFUSE_DYNAMIC_SHARED(dynamic);
    __shared__ totals<R> of_warps[2][max_line_warps];
    const int warp = (int)threadIdx.x / 32;
    const int part = divide((int)blockIdx.x, g.by_blocks_wide), block_of_row = (int)blockIdx.x - part * g.blocks_wide;
    const line_place<V> place(a, part, block_of_row, (int)sizeof(T));
    line_pair<R> *const own = reinterpret_cast<line_pair<R> *>(dynamic) + (int)threadIdx.x * pairs_of_thread(g);
    const int bytes = place.lanes * V * (int)sizeof(T), warps = max(place.lanes / 32, 1);
    const int first_warp = warp & ~(warps - 1);
    const int samples = (int)p.n, apart = g.parts * g.sets_a_block;
    const bool modulated = p.scale().data || p.shift().data;
    const bool has_post = p.post_add().data && p.activation != NORMFUSE_IDENTITY;
    const R portion = R(1) / (R)p.set_values;

    raw<T, V> requested_x[K], requested_dy[K];
    requested_value requested_mean, requested_rstd;
    statistic_walk means(p.mean(), place.group, part * g.sets_a_block + place.sample, apart);
    statistic_walk rstds(p.rstd(), place.group, part * g.sets_a_block + place.sample, apart);
    const auto request_sample = [&](int n) {
        const line_share<V> share = place.share(a, n);
        const int64_t there = place.of_sample(n);
        requested_mean = means.request_next(share.count > 0);
        requested_rstd = rstds.request_next(share.count > 0);
        request_slots<T, V>(p.x().data + there, bytes, share, requested_x);
        request_slots<T, V>(p.dy().data + there, bytes, share, requested_dy);
    };
    request_sample(part * g.sets_a_block + place.sample);
    if (!modulated)
        prepare_line<slots_at_once, false>(a, place, 0, place.own, own);
    R *const slopes = slopes_of_thread<R>(g, dynamic, 0), *const of_slopes = slopes_of_thread<R>(g, dynamic, 1);
    if (p.activation == NORMFUSE_PRELU) {
        prepare_slopes(a, place, slopes);
        for (int v = 0; v < g.segment_rows; v++)
            of_slopes[v] = R(0);
    }
    R plain[N], normalized[N]; /* of each position, over samples */
    each<N>([&](int v) { plain[v] = normalized[v] = R(0); });

    int parity = 0; /* so that nobody writes what another warp still reads of the sample before */
#pragma unroll 1
    for (int first = part * g.sets_a_block; first < samples; first += apart) {
        const int n = first + place.sample;
        const line_share<V> share = place.share(a, n);
        const int64_t here = place.of_sample(n);
        R x[N], dy[N];
        raw<T, V> more[K];
        each<N>([&](int v) {
            x[v] = value_of<T, V>(requested_x, v);
            dy[v] = value_of<T, V>(requested_dy, v);
        });
        if (p.pre_add().data) {
            request_slots<T, V>(p.pre_add().data + here, bytes, share, more);
            each<N>([&](int v) { x[v] = rounded_sum<T>(x[v], value_of<T, V>(more, v)); });
        }
        clear_others(share, x);
        const double mean = receive<double>(requested_mean, p.mean().type);
        const R rstd = receive<R>(requested_rstd, p.rstd().type);
        const R about = (R)mean, off = -(R)(mean - (double)about) * rstd;
        if (has_post)
            request_slots<T, V>(p.post_add().data + here, bytes, share, more);
        if (modulated)
            prepare_line<1, true>(a, place, n, share, own);
        /* x becomes (x - mean) rstd. */
        each<N>([&](int v) { x[v] = fma(x[v] - about, rstd, off); });

        /* dy becomes what came through the activation. */
        choose_any_activation(p.activation, [&](auto chosen) {
            if (decltype(chosen)::constant != NORMFUSE_IDENTITY) {
                in_values<N, slots_at_once>(g.segment_rows, [&](int begin) {
                    R z[slots_at_once], by[slots_at_once];
                    const bool half = takes_half<fast, true>(decltype(chosen)::constant);
                    each<slots_at_once>([&](int i) {
                        const line_pair<R> pair = own[begin + i];
                        z[i] = fma(x[begin + i], pair.first, pair.second);
                        if (has_post) {
                            const R added = value_of<T, V>(more, begin + i);
                            z[i] = p.from_y() ? added : z[i] + added;
                        }
                        if (half)
                            z[i] *= R(0.5);
                        by[i] = dy[begin + i];
                    });
                    if constexpr (decltype(chosen)::constant == NORMFUSE_PRELU)
                        each<slots_at_once>([&](int i) {
                            if (z[i] > R(0) || !share.has(begin + i))
                                return;
                            of_slopes[begin + i] += by[i] * z[i];
                            by[i] *= slopes[begin + i];
                        });
                    else
                        differentiate_by<fast>(by, z, chosen, p.activation, (R)p.act_param);
                    each<slots_at_once>([&](int i) { dy[begin + i] = half ? R(0.5) * by[i] : by[i]; });
                });
            }
        });
        clear_others(share, dy);
        if (p.du().data)
            request_slots<T, V>(p.du().data + here, bytes, share, more);
        request_sample(n + apart); /* not before the derivatives: with registers for both fewer blocks would run */

        /* dy becomes weight dy; it is 0 in a slot without a value. */
        if (p.dpost_add().data)
            store_slots<T, V>(p.dpost_add().data + here, bytes, share, dy);
        totals<R> all = {R(0), R(0)};
        in_values<N, slots_at_once>(g.segment_rows, [&](int begin) {
            each<slots_at_once>([&](int i) {
                const int v = begin + i;
                plain[v] += dy[v];
                normalized[v] = fma(dy[v], x[v], normalized[v]);
                dy[v] *= own[v].first;
                all.plain += dy[v];
                all.centred = fma(dy[v], x[v], all.centred);
            });
        });
        all = all.sum_few(place.lanes);
        if (warps > 1) {
            if (threadIdx.x % 32 == 0)
                of_warps[parity][warp] = all;
            __syncthreads();
            all = of_warps[parity][first_warp + ((int)threadIdx.x & (warps - 1))].sum_few(warps);
            parity ^= 1;
        }
        /* dx = rstd (weight dy - mean of weight dy - x mean of weight dy x) */
        const R level = -all.plain * portion, by_x = -all.centred * portion;
        if (p.dx().data) {
            char *to = p.dx().data + here;
            in_values<N, slots_at_once>(g.segment_rows, [&](int begin) {
                R dx[slots_at_once];
                each<slots_at_once>([&](int i) {
                    dx[i] = rstd * (dy[begin + i] + fma(by_x, x[begin + i], level));
                    if (p.du().data)
                        dx[i] += value_of<T, V>(more, begin + i);
                });
                each<slots_at_once / V>([&](int k) {
                    store_slot<T, V>(to, share, begin / V + k, dx, k * V);
                    to += bytes;
                });
            });
        }
    }

    if (a.sums)
        write_all_sums<V>(a, dynamic, own, plain, normalized, of_slopes, part, block_of_row);
}

#define INSTANCE(layout, schedule, direction, type, elements, vectors, threads, registers)                             \
    NORMFUSE_KERNEL(layout, schedule, direction, type, elements, vectors, registers)                                   \
    {                                                                                                                  \
        lines_##direction<type, elements, vectors>(a);                                                                 \
    }
NORMFUSE_KERNELS_LINES(INSTANCE)
