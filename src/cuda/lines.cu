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

/* A thread's place, the same in each sample. Parameters of one channel are requested once, and a thread joins the sums
 * of its positions by itself. */
template <typename T, int K> struct line_place {
    using R = compute<T>;
    const normfuse_cuda_arguments &a;
    const normfuse_cuda_problem &p;
    const normfuse_cuda_geometry &g;
    int part, block_of_row;      /* of the block */
    int lanes, lane;             /* of the line */
    int warp, warps, first_warp; /* of the block; of a line, 0: less than one; the line's first */
    int sample;                  /* of those that the block has beside one another */
    int group;                   /* norm group of a sample */
    int count;                   /* values of a line that the thread has, those of its first slots; 0: it has no line */
    int step;                    /* bytes from one to the next */
    int64_t at;                  /* elements from the beginning of a sample to the first of them */
    int samples, apart, first;   /* all, from one of the thread's to the next, the block's first */
    bool modulated, one_channel;
    line_pair<R> *own;

    __device__ __forceinline__ explicit line_place(const normfuse_cuda_arguments &a)
        : a(a), p(a.problem), g(a.geometry)
    {
        NORMFUSE_DYNAMIC_SHARED(dynamic);
        part = divide((int)blockIdx.x, g.by_blocks_wide);
        block_of_row = (int)blockIdx.x - part * g.blocks_wide;
        const int line = (int)threadIdx.x >> g.lane_bits;
        lanes = 1 << g.lane_bits;
        lane = (int)threadIdx.x & (lanes - 1);
        warp = (int)threadIdx.x / 32;
        warps = lanes / 32;
        first_warp = warp & ~(max(warps, 1) - 1);
        sample = divide(line, g.by_width);
        group = block_of_row * g.width + line - sample * g.width;
        const bool has = sample < g.sets_a_block && group < (int)p.groups && lane < g.rows;
        count = has ? (g.rows - lane + lanes - 1) >> g.lane_bits : 0;
        step = lanes * (int)sizeof(T);
        at = (int64_t)group * g.group * p.x().channel + lane;
        samples = (int)p.n;
        apart = g.parts * g.sets_a_block;
        first = part * g.sets_a_block;
        modulated = p.scale().data || p.shift().data;
        one_channel = g.group == 1;
        own = reinterpret_cast<line_pair<R> *>(dynamic) + (int)threadIdx.x * pairs_of_thread(g);
    }
    __device__ __forceinline__ int count_of(int n) const
    {
        return n < samples ? count : 0;
    }
    /* Rows: the positions of a channel are adjacent. Columns: one position, or all channels of each position. */
    __device__ __forceinline__ int channel_of(int slot) const
    {
        const int value = lane + slot * lanes;
        const int channel = p.columns() ? value - divide(value, g.by_group) * g.group : divide(value, g.by_spans);
        return group * g.group + channel;
    }
    /* The first `count` of the thread's values of sample n in a tensor, which has the strides of x. */
    __device__ __forceinline__ char *line_of(const normfuse_view &view, int n) const
    {
        return view.data + (n * p.x().batch + at) * (int64_t)sizeof(T);
    }
    __device__ __forceinline__ void request(const normfuse_view &view, int n, int count, raw<T, 1> (&values)[K]) const
    {
        const char *from = line_of(view, n);
        /* From one to the next: addresses that follow from a base are held in registers, all of them. */
#pragma unroll
        for (int k = 0; k < K; k++) {
            load_where(k < count, values[k], from);
            from += step;
        }
    }
    /* Of each slot what its value is weighed by: weight (1 + scale), bias (1 + scale) + shift. Of M at a time. */
    template <int M> __device__ __forceinline__ void prepare(int n, int count) const
    {
        const auto hold = [&](int slot, const requested_weights &found) {
            R slope, offset;
            weigh(p, found, slope, offset);
            own[slot] = slot < count ? line_pair<R>{slope, offset} : line_pair<R>{R(0), R(0)};
        };
        if (one_channel) {
            const requested_weights found = request_weights(p, n, group, count > 0);
#pragma unroll 1
            for (int k = 0; k < g.segment_rows; k++)
                hold(k, found);
            return;
        }
#pragma unroll 1
        for (int first = 0; first < g.segment_rows; first += M) {
            requested_weights found[M];
            each<M>([&](int i) { found[i] = request_weights(p, n, channel_of(first + i), first + i < count); });
            each<M>([&](int i) { hold(first + i, found[i]); });
        }
    }
};

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
    __shared__ R base_of[max_line_warps], sum_of[max_line_warps], square_of[max_line_warps];
    const line_place<T, K> place(a);
    line_pair<R> *const own = place.own;
    const int warp = place.warp, warps = place.warps, first_warp = place.first_warp, step = place.step;
    const int first_lane = (int)threadIdx.x % 32 & ~(place.lanes - 1);
    const R values = (R)g.rows, share = R(1) / values;

    raw<T, 1> requested[K];
    const auto request_sample = [&](int n) {
        place.request(p.x(), n, place.count_of(n), requested);
    };
    request_sample(place.first + place.sample);
    if (!place.modulated)
        place.template prepare<slots_at_once>(0, place.count);

#pragma unroll 1
    for (int first = place.first; first < place.samples; first += place.apart) {
        const int n = first + place.sample, count = place.count_of(n);
        R x[K];
        raw<T, 1> more[K];
        if (p.pre_add().data)
            place.request(p.pre_add(), n, count, more);
        each<K>([&](int k) { x[k] = number_of<T>(requested[k]); });
        if (p.pre_add().data) {
            add_slots<T>(K, more, x);
            if (p.u().data)
                store_slots<T>(K, place.line_of(p.u(), n), step, x, [&](int k) { return k < count; });
        }
        if (p.post_add().data)
            place.request(p.post_add(), n, count, more);
        request_sample(n + place.apart);
        if (place.modulated)
            place.template prepare<1>(n, count);

        /* About the line's first value, or that of each warp; then about the mean, which cannot cancel. */
        R base = __shfl_sync(full_mask, x[0], first_lane), sum = R(0), square = R(0);
        in_slots<K>(g.segment_rows, [&](int k) {
            if (k < count)
                sum += x[k] - base;
        });
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
        in_slots<K>(g.segment_rows, [&](int k) {
            x[k] -= about;
            if (k < count)
                square += (x[k] - rest) * (x[k] - rest);
        });
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
        if (place.lane == 0 && place.count > 0 && n < place.samples)
            store_statistics(a, n, place.group, (int64_t)n * p.groups + place.group, (double)about + (double)rest,
                             variance, rstd, (double)p.set_values);

        in_slots<K>(g.segment_rows, [&](int k) {
            const line_pair<R> by = own[k];
            const R slope = by.first * rstd;
            x[k] = fma(x[k], slope, by.second - rest * slope);
            if (p.post_add().data)
                x[k] += number_of<T>(more[k]);
        });
        activate_slots<fast, false, false>(g.segment_rows, x, x, p.activation, (R)p.act_param);
        store_slots<T>(g.segment_rows, place.line_of(p.y(), n), step, x, [&](int k) { return k < count; });
    }
}

/* ---- backward --------------------------------------------------------------------------------------------------- */

/* The sums of the block's channels, of what its threads have of positions (of one channel two doubles, in the place of
 * the first), to memory: `bits` say how many threads of a warp have a channel together. */
template <typename R>
__device__ __forceinline__ void write_line_sums(const normfuse_cuda_arguments &a, int part, int block_of_row)
{
    NORMFUSE_DYNAMIC_SHARED(dynamic);
    const line_pair<R> *const positions = reinterpret_cast<const line_pair<R> *>(dynamic);
    const normfuse_cuda_geometry &g = a.geometry;
    const int threads = (int)blockDim.x, lanes = 1 << g.lane_bits;
    const bool by_thread = g.group == 1;
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
    each<K>([&](int k) {
        if (k < g.segment_rows && g.group > 1)
            own[k] = {plain[k], normalized[k]};
    });
    if (g.group == 1) {
        double of_thread[2] = {0.0, 0.0};
        each<K>([&](int k) {
            of_thread[0] += (double)plain[k];
            of_thread[1] += (double)normalized[k];
        });
        reinterpret_cast<double *>(own)[0] = of_thread[0];
        reinterpret_cast<double *>(own)[1] = of_thread[1];
    }
}

template <typename T, int K> __device__ __forceinline__ void lines_backward(const normfuse_cuda_arguments &a)
{
    follow_kernel();
    using R = compute<T>;
    constexpr bool fast = sizeof(T) == 2;
    const normfuse_cuda_problem &p = a.problem;
    const normfuse_cuda_geometry &g = a.geometry;
    __shared__ totals<R> of_warps[2][max_line_warps];
    const line_place<T, K> place(a);
    line_pair<R> *const own = place.own;
    const int warp = place.warp, warps = place.warps, first_warp = place.first_warp, step = place.step;
    const bool has_post = p.post_add().data && p.activation != NORMFUSE_IDENTITY;
    const R portion = R(1) / (R)p.set_values;

    raw<T, 1> requested_x[K], requested_dy[K];
    requested_value requested_mean, requested_rstd;
    const auto request_sample = [&](int n) {
        const int count = place.count_of(n);
        requested_mean = request_at_once(p.mean(), n * p.mean().batch + place.group * p.mean().channel, count > 0);
        requested_rstd = request_at_once(p.rstd(), n * p.rstd().batch + place.group * p.rstd().channel, count > 0);
        place.request(p.x(), n, count, requested_x);
        place.request(p.dy(), n, count, requested_dy);
    };
    request_sample(place.first + place.sample);
    if (!place.modulated)
        place.template prepare<slots_at_once>(0, place.count);
    R plain[K], normalized[K]; /* of each position, over samples */
    each<K>([&](int k) { plain[k] = normalized[k] = R(0); });

    int parity = 0; /* so that nobody writes what another warp still reads of the sample before */
#pragma unroll 1
    for (int first = place.first; first < place.samples; first += place.apart) {
        const int n = first + place.sample, count = place.count_of(n);
        R x[K], dy[K];
        raw<T, 1> more[K];
        if (p.pre_add().data)
            place.request(p.pre_add(), n, count, more);
        each<K>([&](int k) {
            x[k] = number_of<T>(requested_x[k]);
            dy[k] = number_of<T>(requested_dy[k]);
        });
        if (p.pre_add().data)
            add_slots<T>(K, more, x);
        const double mean = receive<double>(requested_mean, p.mean().type);
        const R rstd = receive<R>(requested_rstd, p.rstd().type);
        const R about = (R)mean, rest = (R)(mean - (double)about);
        if (has_post)
            place.request(p.post_add(), n, count, more);
        if (place.modulated)
            place.template prepare<1>(n, count);
        each<K>([&](int k) { x[k] -= about; });

        /* dy becomes what came through the activation. */
        if (p.activation != NORMFUSE_IDENTITY) {
            R z[K];
            in_slots<K>(g.segment_rows, [&](int k) {
                const line_pair<R> pair = own[k];
                const R slope = pair.first * rstd;
                z[k] = fma(x[k], slope, pair.second - rest * slope);
                if (has_post)
                    z[k] = p.from_y() ? number_of<T>(more[k]) : z[k] + number_of<T>(more[k]);
            });
            activate_slots<fast, true, false>(g.segment_rows, z, dy, p.activation, (R)p.act_param);
        }
        if (p.du().data)
            place.request(p.du(), n, count, more);
        /* Not before the derivatives: with registers for both fewer blocks would run. */
        request_sample(n + place.apart);

        /* dy becomes its part of dx, slope dy'. */
        char *to_addition = place.line_of(p.dpost_add(), n);
        totals<R> all = {R(0), R(0)};
        in_slots<K>(g.segment_rows, [&](int k) {
            if (k < count) {
                if (p.dpost_add().data)
                    store_number<T>(to_addition, dy[k]);
                plain[k] += dy[k];
                normalized[k] += dy[k] * ((x[k] - rest) * rstd);
                dy[k] *= own[k].first * rstd;
                all.plain += dy[k];
                all.centred += dy[k] * x[k];
            }
            to_addition += step;
        });
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
            char *to = place.line_of(p.dx(), n);
            in_slots<K>(g.segment_rows, [&](int k) {
                R dx = dy[k] + fma(by_x, x[k], level);
                if (p.du().data)
                    dx += number_of<T>(more[k]);
                if (k < count)
                    store_number<T>(to, dx);
                to += step;
            });
        }
    }

    if (a.sums) {
        hold_positions(g, own, plain, normalized);
        __syncthreads();
        write_line_sums<R>(a, place.part, place.block_of_row);
    }
}

#define INSTANCE(layout, schedule, direction, type, elements, vectors, threads, registers)                             \
    NORMFUSE_KERNEL(layout, schedule, direction, type, elements, vectors, registers)                                   \
    {                                                                                                                  \
        lines_##direction<type, vectors>(a);                                                                           \
    }
NORMFUSE_KERNELS_LINES(INSTANCE)
