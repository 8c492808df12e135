/* SPDX-License-Identifier: MIT
 *
 * lines.cu - group norm where the values of a norm group are adjacent in memory and few, in both layouts: [N, C], small
 * planes, whole small samples. They are called a line. Loads are of one element, so a line may begin anywhere, may have
 * any length, and every addition is taken.
 *
 * A power of two of adjacent threads, the lanes, holds a line: lane l has the values l, l + lanes, l + 2 lanes, so a
 * warp loads adjacent elements. A thread keeps its norm group and goes from sample to sample; the values of the next
 * sample are requested before this one is worked on. What a value is weighed by lies in shared memory, in a place that
 * its thread alone reads. The backward sums the gradients of weight and bias by position, in registers, and the block
 * joins positions to channels once, at the end.
 *
 * A thread that has no line, or no value in a slot, has zeros there: x, dy, weight and bias. It goes through the same
 * shuffles and barriers as all others and stores nothing. */
#include "gradients.cuh"
#include "rows.cuh"
#include "single.cuh"

constexpr int max_line_warps = 16;
constexpr int slots_in_step = 2; /* loops over slots end after so many, not in the middle of them */

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

struct line_place {
    int lanes, lane; /* of the line */
    int sample;      /* of those that the block has beside one another */
    int group;       /* norm group of a sample */
    int count;       /* values of a line that the thread has, those of its first slots; 0: it has no line */
    int64_t at;      /* elements from the beginning of a sample to the first of them */

    __device__ __forceinline__ line_place(const normfuse_cuda_arguments &a, int block_of_row)
    {
        const normfuse_cuda_geometry &g = a.geometry;
        const int line = (int)threadIdx.x >> g.lane_bits;
        lanes = 1 << g.lane_bits;
        lane = (int)threadIdx.x & (lanes - 1);
        sample = divide(line, g.by_width);
        group = block_of_row * g.width + line - sample * g.width;
        const bool has = sample < g.sets_a_block && group < (int)a.problem.groups && lane < g.rows;
        count = has ? (g.rows - lane + lanes - 1) >> g.lane_bits : 0;
        at = (int64_t)group * g.group * a.problem.x().channel + lane;
    }
    /* Rows: the positions of a channel are adjacent. Columns: one position, or all channels of each position. */
    __device__ __forceinline__ int channel_of(const normfuse_cuda_arguments &a, int slot) const
    {
        const int value = lane + slot * lanes;
        const int channel = a.problem.columns() ? value - divide(value, a.geometry.by_group) * a.geometry.group
                                              : divide(value, a.geometry.by_spans);
        return group * a.geometry.group + channel;
    }
    /* Whether the thread speaks for its line. */
    __device__ __forceinline__ bool is_first() const
    {
        return lane == 0 && count > 0;
    }
};

/* The first `count` of the thread's values of sample n in a tensor, which has the strides of x. */
template <typename T>
__device__ __forceinline__ char *line_of(const normfuse_cuda_arguments &a, const normfuse_view &view,
                                         const line_place &place, int n)
{
    return view.data + (n * a.problem.x().batch + place.at) * (int64_t)sizeof(T);
}
template <typename T, int K>
__device__ __forceinline__ void request_values(const normfuse_cuda_arguments &a, const normfuse_view &view,
                                               const line_place &place, int n, int count, raw<T, 1> (&values)[K])
{
    const char *from = line_of<T>(a, view, place, n);
    /* From one to the next: addresses that follow from a base are held in registers, all of them. */
#pragma unroll
    for (int k = 0; k < K; k++) {
        load_where(k < count, values[k], from);
        from += place.lanes * (int)sizeof(T);
    }
}

template <typename T, int K>
__device__ __forceinline__ void store_values(const normfuse_cuda_arguments &a, const normfuse_view &view,
                                             const line_place &place, int n, int count, const compute<T> (&values)[K])
{
    char *to = line_of<T>(a, view, place, n);
#pragma unroll
    for (int k = 0; k < K; k++) {
        if (k < count)
            store_number<T>(to, values[k]);
        to += place.lanes * (int)sizeof(T);
    }
}

/* Its parameters are requested once, and a thread joins the sums of its positions by itself. */
__device__ __forceinline__ bool is_one_channel(const normfuse_cuda_geometry &g)
{
    return g.group == 1;
}

/* Of each slot what its value is weighed by: weight (1 + scale), bias (1 + scale) + shift. */
template <int M, typename R>
__device__ __forceinline__ void prepare_line(const normfuse_cuda_arguments &a, const line_place &place, int n,
                                             int count, line_pair<R> *own)
{
    const normfuse_cuda_problem &p = a.problem;
    if (is_one_channel(a.geometry)) {
        const auto request = [&](const normfuse_parameter &of) {
            return request_at_once(of, n * of.batch + place.group * of.channel, count > 0);
        };
        const requested_weights found = {request(p.weight()), request(p.bias()), request(p.scale()), request(p.shift())};
        R slope, offset;
        weigh(p, found, slope, offset);
#pragma unroll 1
        for (int k = 0; k < a.geometry.segment_rows; k++)
            own[k] = k < count ? line_pair<R>{slope, offset} : line_pair<R>{R(0), R(0)};
        return;
    }
#pragma unroll 1
    for (int first = 0; first < a.geometry.segment_rows; first += M) {
        requested_weights found[M];
#pragma unroll
        for (int i = 0; i < M; i++) {
            const bool wanted = first + i < count;
            const int64_t c = place.channel_of(a, first + i);
            const auto request = [&](const normfuse_parameter &of) {
                return request_at_once(of, n * of.batch + c * of.channel, wanted);
            };
            found[i] = {request(p.weight()), request(p.bias()), request(p.scale()), request(p.shift())};
        }
#pragma unroll
        for (int i = 0; i < M; i++) {
            R slope, offset;
            weigh(p, found[i], slope, offset);
            own[first + i] = first + i < count ? line_pair<R>{slope, offset} : line_pair<R>{R(0), R(0)};
        }
    }
}

/* Values of a line that its warp number `warp` has. */
__device__ __forceinline__ int values_of_warp(const normfuse_cuda_geometry &g, int warp)
{
    const int rest = g.rows & ((1 << g.lane_bits) - 1);
    return (g.rows >> g.lane_bits) * 32 + min(max(rest - 32 * warp, 0), 32);
}

/* ---- forward ---------------------------------------------------------------------------------------------------- */

template <typename T, int K> __device__ __forceinline__ void lines_forward(const normfuse_cuda_arguments &a)
{
    follow_kernel();
    using R = compute<T>;
    constexpr bool fast = sizeof(T) == 2;
    const normfuse_cuda_problem &p = a.problem;
    const normfuse_cuda_geometry &g = a.geometry;
    NORMFUSE_DYNAMIC_SHARED(dynamic);
    __shared__ R base_of[max_line_warps], sum_of[max_line_warps], square_of[max_line_warps];
    const int warp = (int)threadIdx.x / 32;
    const int part = divide((int)blockIdx.x, g.by_blocks_wide);
    const line_place place(a, (int)blockIdx.x - part * g.blocks_wide);
    line_pair<R> *const own = reinterpret_cast<line_pair<R> *>(dynamic) + (int)threadIdx.x * pairs_of_thread(g);
    const int step = place.lanes * (int)sizeof(T), warps = place.lanes / 32; /* of a line; 0: less than one */
    const int first_warp = warp & ~(max(warps, 1) - 1), first_lane = (int)threadIdx.x % 32 & ~(place.lanes - 1);
    const int samples = (int)p.n, apart = g.parts * g.sets_a_block;
    const int used = (g.rows + place.lanes - 1) >> g.lane_bits; /* slots */
    const bool modulated = p.scale().data || p.shift().data;
    const R values = (R)g.rows, share = R(1) / values;

    raw<T, 1> requested[K];
    const auto request_sample = [&](int n) {
        request_values<T, K>(a, p.x(), place, n, n < samples ? place.count : 0, requested);
    };
    request_sample(part * g.sets_a_block + place.sample);
    if (!modulated)
        prepare_line<slots_at_once>(a, place, 0, place.count, own);

#pragma unroll 1
    for (int first = part * g.sets_a_block; first < samples; first += apart) {
        const int n = first + place.sample, count = n < samples ? place.count : 0;
        R x[K];
        raw<T, 1> more[K];
        if (p.pre_add().data)
            request_values<T, K>(a, p.pre_add(), place, n, count, more);
#pragma unroll
        for (int k = 0; k < K; k++)
            x[k] = number_of<T>(requested[k]);
        if (p.pre_add().data) {
            add_slots<T>(K, more, x);
            if (p.u().data)
                store_values<T>(a, p.u(), place, n, count, x);
        }
        if (p.post_add().data)
            request_values<T, K>(a, p.post_add(), place, n, count, more);
        request_sample(n + apart);
        if (modulated)
            prepare_line<1>(a, place, n, count, own);

        /* About the line's first value, or that of each warp; then about the mean, which cannot cancel. */
        R base = __shfl_sync(full_mask, x[0], first_lane), sum = R(0), square = R(0);
#pragma unroll
        for (int k = 0; k < K; k++) {
            if (k % slots_in_step == 0 && k >= used)
                break;
            if (k < count)
                sum += x[k] - base;
        }
        sum = sum_few(sum, place.lanes);
        if (warps > 1) {
            if (threadIdx.x % 32 == 0) {
                base_of[warp] = base;
                sum_of[warp] = sum;
            }
            __syncthreads();
            base = base_of[first_warp];
            sum = R(0);
            for (int i = 0; i < warps; i++)
                sum += sum_of[first_warp + i] + (R)values_of_warp(g, i) * (base_of[first_warp + i] - base);
        }
        /* The mean is about + rest. */
        const R distance = quotient(sum, values, share), about = base + distance, back = about - base;
        const R rest = (base - (about - back)) + (distance - back);
#pragma unroll
        for (int k = 0; k < K; k++) {
            if (k % slots_in_step == 0 && k >= used)
                break;
            x[k] -= about;
            if (k < count)
                square += (x[k] - rest) * (x[k] - rest);
        }
        square = sum_few(square, place.lanes);
        if (warps > 1) {
            if (threadIdx.x % 32 == 0)
                square_of[warp] = square;
            __syncthreads();
            square = R(0);
            for (int i = 0; i < warps; i++)
                square += square_of[first_warp + i];
        }
        const R variance = quotient(square, values, share), rstd = inverse_root(variance + (R)p.eps);
        if (place.is_first() && n < samples)
            store_statistics(a, n, place.group, (int64_t)n * p.groups + place.group, (double)about + (double)rest,
                             variance, rstd, (double)p.set_values);

        char *to = line_of<T>(a, p.y(), place, n);
        choose_activation<true, true>(p.activation, [&](auto chosen) {
#pragma unroll
            for (int begin = 0; begin < K; begin += slots_at_once) {
                if (begin >= g.segment_rows)
                    break;
                R z[slots_at_once];
#pragma unroll
                for (int i = 0; i < slots_at_once; i++) {
                    const line_pair<R> by = own[begin + i];
                    const R slope = by.first * rstd;
                    z[i] = fma(x[begin + i], slope, by.second - rest * slope);
                    if (p.post_add().data)
                        z[i] += number_of<T>(more[begin + i]);
                    if (takes_half<fast, true>(decltype(chosen)::constant))
                        z[i] *= R(0.5);
                }
                activate<fast, true>(z, chosen, p.activation, (R)p.act_param);
#pragma unroll
                for (int i = 0; i < slots_at_once; i++) {
                    if (begin + i < count)
                        store_number<T>(to, z[i]);
                    to += step;
                }
            }
        });
    }
}

/* ---- backward --------------------------------------------------------------------------------------------------- */

/* The sums of the block's channels, of what its threads have of positions (of one channel two doubles, in the place of
 * the first), to memory: `bits` say how many threads of a warp have a channel together. */
template <typename R>
__device__ __forceinline__ void write_line_sums(const normfuse_cuda_arguments &a, const line_pair<R> *positions,
                                                int part, int block_of_row)
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
                const int value = first + i * apart;
                const int thread = (line << g.lane_bits) + (value & (lanes - 1));
                const line_pair<R> *const from =
                    positions + thread * pairs_of_thread(g) + (by_thread ? 0 : value >> g.lane_bits);
#pragma unroll 4
                for (int sample = 0; sample < g.sets_a_block; sample++) {
                    const line_pair<R> *const sums = from + sample * (g.width << g.lane_bits) * pairs_of_thread(g);
                    const double *const of_thread = reinterpret_cast<const double *>(sums);
                    plain += by_thread ? of_thread[0] : (double)sums->first;
                    normalized += by_thread ? of_thread[1] : (double)sums->second;
                }
            }
        }
        plain = sum_lanes(plain, 1 << bits);
        normalized = sum_lanes(normalized, 1 << bits);
        if (has && of == 0)
            reinterpret_cast<double2 *>(a.sums)[(int64_t)(first_channel + channel) * g.sum_slots + part] =
                make_double2(plain, normalized);
    }
}

/* The thread's sums of positions into shared memory; of one channel they are one. */
template <typename R, int K>
__device__ __forceinline__ void hold_positions(const normfuse_cuda_geometry &g, line_pair<R> *own, const R (&plain)[K],
                                               const R (&normalized)[K])
{
#pragma unroll
    for (int k = 0; k < K; k++)
        if (k < g.segment_rows && !is_one_channel(g))
            own[k] = {plain[k], normalized[k]};
    if (is_one_channel(g)) {
        double of_thread[2] = {0.0, 0.0};
#pragma unroll
        for (int k = 0; k < K; k++) {
            of_thread[0] += (double)plain[k];
            of_thread[1] += (double)normalized[k];
        }
        reinterpret_cast<double *>(own)[0] = of_thread[0];
        reinterpret_cast<double *>(own)[1] = of_thread[1];
    }
}

/* A norm group's statistics from sample to sample. */
struct statistic_walk {
    const char *at;
    int64_t step; /* bytes */
    int type;

    __device__ __forceinline__ statistic_walk(const normfuse_parameter &of, const line_place &place, int first,
                                              int apart)
        : type(of.type)
    {
        at = of.data + ((first * of.batch + place.group * of.channel) << byte_bits(type));
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

template <typename T, int K> __device__ __forceinline__ void lines_backward(const normfuse_cuda_arguments &a)
{
    follow_kernel();
    using R = compute<T>;
    constexpr bool fast = sizeof(T) == 2;
    const normfuse_cuda_problem &p = a.problem;
    const normfuse_cuda_geometry &g = a.geometry;
    NORMFUSE_DYNAMIC_SHARED(dynamic);
    __shared__ totals<R> of_warps[2][max_line_warps];
    const int warp = (int)threadIdx.x / 32;
    const int part = divide((int)blockIdx.x, g.by_blocks_wide), block_of_row = (int)blockIdx.x - part * g.blocks_wide;
    const line_place place(a, block_of_row);
    line_pair<R> *const own = reinterpret_cast<line_pair<R> *>(dynamic) + (int)threadIdx.x * pairs_of_thread(g);
    const int step = place.lanes * (int)sizeof(T), warps = place.lanes / 32;
    const int first_warp = warp & ~(max(warps, 1) - 1);
    const int samples = (int)p.n, apart = g.parts * g.sets_a_block;
    const int used = (g.rows + place.lanes - 1) >> g.lane_bits; /* slots */
    const bool modulated = p.scale().data || p.shift().data;
    const bool has_post = p.post_add().data && p.activation != NORMFUSE_IDENTITY;
    const R portion = R(1) / (R)p.set_values;

    raw<T, 1> requested_x[K], requested_dy[K];
    requested_value requested_mean, requested_rstd;
    statistic_walk means(p.mean(), place, part * g.sets_a_block + place.sample, apart);
    statistic_walk rstds(p.rstd(), place, part * g.sets_a_block + place.sample, apart);
    const auto request_sample = [&](int n) {
        const int count = n < samples ? place.count : 0;
        requested_mean = means.request_next(count > 0);
        requested_rstd = rstds.request_next(count > 0);
        request_values<T, K>(a, p.x(), place, n, count, requested_x);
        request_values<T, K>(a, p.dy(), place, n, count, requested_dy);
    };
    request_sample(part * g.sets_a_block + place.sample);
    if (!modulated)
        prepare_line<slots_at_once>(a, place, 0, place.count, own);
    R plain[K], normalized[K]; /* of each position, over samples */
#pragma unroll
    for (int k = 0; k < K; k++)
        plain[k] = normalized[k] = R(0);

    int parity = 0; /* so that nobody writes what another warp still reads of the sample before */
#pragma unroll 1
    for (int first = part * g.sets_a_block; first < samples; first += apart) {
        const int n = first + place.sample, count = n < samples ? place.count : 0;
        R x[K], dy[K];
        raw<T, 1> more[K];
        if (p.pre_add().data)
            request_values<T, K>(a, p.pre_add(), place, n, count, more);
#pragma unroll
        for (int k = 0; k < K; k++) {
            x[k] = number_of<T>(requested_x[k]);
            dy[k] = number_of<T>(requested_dy[k]);
        }
        if (p.pre_add().data)
            add_slots<T>(K, more, x);
        const double mean = receive<double>(requested_mean, p.mean().type);
        const R rstd = receive<R>(requested_rstd, p.rstd().type);
        const R about = (R)mean, rest = (R)(mean - (double)about);
        if (has_post)
            request_values<T, K>(a, p.post_add(), place, n, count, more);
        if (modulated)
            prepare_line<1>(a, place, n, count, own);
#pragma unroll
        for (int k = 0; k < K; k++)
            x[k] -= about;

        /* dy becomes what came through the activation. */
        choose_activation<true, true>(p.activation, [&](auto chosen) {
            if (decltype(chosen)::constant != NORMFUSE_IDENTITY) {
#pragma unroll
                for (int begin = 0; begin < K; begin += slots_at_once) {
                    if (begin >= g.segment_rows)
                        break;
                    R z[slots_at_once], by[slots_at_once];
                    const bool half = takes_half<fast, true>(decltype(chosen)::constant);
#pragma unroll
                    for (int i = 0; i < slots_at_once; i++) {
                        const line_pair<R> pair = own[begin + i];
                        const R slope = pair.first * rstd;
                        z[i] = fma(x[begin + i], slope, pair.second - rest * slope);
                        if (has_post)
                            z[i] = p.from_y() ? number_of<T>(more[begin + i]) : z[i] + number_of<T>(more[begin + i]);
                        if (half)
                            z[i] *= R(0.5);
                        by[i] = dy[begin + i];
                    }
                    differentiate_by<fast>(by, z, chosen, p.activation, (R)p.act_param);
#pragma unroll
                    for (int i = 0; i < slots_at_once; i++)
                        dy[begin + i] = half ? R(0.5) * by[i] : by[i];
                }
            }
        });
        if (p.du().data)
            request_values<T, K>(a, p.du(), place, n, count, more);
        request_sample(n + apart); /* not before the derivatives: with registers for both fewer blocks would run */

        /* dy becomes its part of dx, slope dy'; it is 0 in a slot without a value. */
        if (p.dpost_add().data)
            store_values<T>(a, p.dpost_add(), place, n, count, dy);
        totals<R> all = {R(0), R(0)};
#pragma unroll
        for (int k = 0; k < K; k++) {
            if (k % slots_in_step == 0 && k >= used)
                break;
            plain[k] += dy[k];
            normalized[k] += dy[k] * ((x[k] - rest) * rstd);
            dy[k] *= own[k].first * rstd;
            all.plain += dy[k];
            all.centred += dy[k] * x[k];
        }
        all = {sum_few(all.plain, place.lanes), sum_few(all.centred, place.lanes)};
        if (warps > 1) {
            if (threadIdx.x % 32 == 0)
                of_warps[parity][warp] = all;
            __syncthreads();
            all = {R(0), R(0)};
            for (int i = 0; i < warps; i++) {
                all.plain += of_warps[parity][first_warp + i].plain;
                all.centred += of_warps[parity][first_warp + i].centred;
            }
            parity ^= 1;
        }
        /* dx = slope dy' + by_x (x - about) + level */
        const R by_x = -((all.centred - rest * all.plain) * rstd) * (rstd * portion);
        const R level = -all.plain * portion - by_x * rest;
        if (p.dx().data) {
            char *to = line_of<T>(a, p.dx(), place, n);
#pragma unroll
            for (int k = 0; k < K; k++) {
                if (k % slots_in_step == 0 && k >= used)
                    break;
                R dx = dy[k] + fma(by_x, x[k], level);
                if (p.du().data)
                    dx += number_of<T>(more[k]);
                if (k < count)
                    store_number<T>(to, dx);
                to += step;
            }
        }
    }

    if (a.sums) {
        hold_positions(g, own, plain, normalized);
        __syncthreads();
        write_line_sums(a, reinterpret_cast<const line_pair<R> *>(dynamic), part, block_of_row);
    }
}

#define INSTANCE(layout, schedule, direction, type, elements, vectors, threads, registers)                             \
    NORMFUSE_KERNEL(layout, schedule, direction, type, elements, vectors, registers)                                   \
    {                                                                                                                  \
        lines_##direction<type, vectors>(a);                                                                           \
    }
NORMFUSE_KERNELS_LINES(INSTANCE)
