/* SPDX-License-Identifier: MIT
 *
 * columns_lanes.cu - group norm over adjacent channels (NHWC) of many samples that have few rows each, [N, C] among
 * them: the lanes of a part of a warp hold a group, so nothing is sent through memory, and a block goes from sample to
 * sample with the parameters of its channels, whose gradients it sums, in registers. The vectors of the next samples
 * are on their way meanwhile. By a block for each sample 65536x512 bf16 took 163 us and backward 1259, most of it for
 * sums of channels of every sample in memory.
 *
 * The lanes of a segment are the vectors of a group, rounded up to a power of two, times the rows that are beside one
 * another. Where groups are less than a vector a thread has several, each channel with the sums of its group. */
#include "columns_parameters.cuh"
#include "gradients.cuh"

/* `S`: sums that a vector has: one, or one for each channel. */
template <typename T, int V, int S> struct lanes_place {
    int lanes, first_lane; /* of the segment, in its warp */
    int beside, sample, unit;
    int channel; /* the thread's first */
    int left;    /* rows from the thread's first on; not above 0: the thread has none */
    bool is_first;
    unsigned at; /* bytes from a sample's beginning to the thread's first vector */

    __device__ __forceinline__ explicit lanes_place(const normfuse_cuda_columns &a, int block_of_row)
    {
        const int vectors = max(1, a.group / V);
        lanes = a.at_once << a.lane_bits;
        const int segment = divide((int)threadIdx.x, a.of.lanes.by_lanes), lane = (int)threadIdx.x - segment * lanes;
        const int vector = lane & ((1 << a.lane_bits) - 1);
        const int units = (int)a.of.lanes.by_units.divisor; /* that a block has beside one another */
        first_lane = ((int)threadIdx.x - lane) % 32;
        beside = lane >> a.lane_bits;
        sample = divide(segment, a.of.lanes.by_units);
        unit = block_of_row * units + segment - sample * units;
        channel = (unit * vectors + vector) * V;
        left = vector < vectors && unit < a.of.lanes.units && sample < a.of.lanes.samples ? a.rows - beside : 0;
        is_first = lane == 0 && left > 0;
        unit = min(unit, a.of.lanes.units - 1); /* whoever has none reads what is there */
        at = (unsigned)beside * a.row_bytes + (unsigned)channel * (unsigned)sizeof(T);
    }
    /* work(i, k) for the channels of a vector two after two, as often as groups of several channels have any. */
    template <typename Work> __device__ __forceinline__ void walk_spans(const normfuse_cuda_columns &a, Work work) const
    {
#pragma unroll
        for (int span = 1; span < S; span *= 2) {
            if (a.group > span) {
#pragma unroll
                for (int i = 0; i < S; i += 2 * span)
#pragma unroll
                    for (int k = 0; k < span; k++)
                        work(i + k, i + k + span);
            }
        }
    }
    /* What all lanes of each group have together. */
    __device__ __forceinline__ void join(const normfuse_cuda_columns &a, float (&value)[S]) const
    {
        walk_spans(a, [&](int i, int k) { value[i] = value[k] = value[i] + value[k]; });
        value[0] = sum_few(value[0], lanes);
        const bool is_whole = a.group >= S;
#pragma unroll
        for (int i = 1; i < S; i++)
            value[i] = is_whole ? value[0] : sum_few(value[i], lanes);
    }
    __device__ __forceinline__ int set_of(const normfuse_cuda_columns &a, int i) const
    {
        return S == 1 || a.group >= V ? unit : unit * (V >> (a.group >> 1)) + (i >> (a.group >> 1));
    }
    /* The first value of each group. */
    __device__ __forceinline__ void find_base(const normfuse_cuda_columns &a, const float (&x)[V],
                                              float (&base)[S]) const
    {
        each<S>([&](int i) { base[i] = __shfl_sync(full_mask, x[i], first_lane); });
        walk_spans(a, [&](int i, int k) { base[k] = base[i]; });
    }
};

/* Sums of a thread's values, of all its channels or of each. */
template <int S, int V> __device__ __forceinline__ void add_to(float (&sums)[S], const float (&values)[V])
{
    each<V>([&](int i) { sums[S == 1 ? 0 : i] += values[i]; });
}

/* The samples of a block, `M` at a time, of each `K` vectors a thread and tensor. The next ones are on their way
 * meanwhile; backward their statistics, too. */
template <typename T, int V, int M, int K, int tensors> struct lanes_samples {
    static constexpr int S = K == 1 ? 1 : V;
    const normfuse_cuda_columns &a;
    const int part;
    const lanes_place<T, V, S> place;
    const int samples_apart;
    const unsigned step;
    uint4 requested[tensors][M][K] = {}, here[tensors][M][K];
    saved_statistic requested_mean[M]; /* of the first channel's group */
    float requested_rstd[M], rstd[M];
    double mean[M];
    float weight[V], bias[V], factor;

    __device__ __forceinline__ explicit lanes_samples(const normfuse_cuda_columns &a)
        : a(a), part(divide((int)blockIdx.x, a.by_blocks_wide)),
          place(a, (int)blockIdx.x - part * (int)a.by_blocks_wide.divisor), samples_apart(a.parts * a.of.lanes.samples),
          step((unsigned)a.at_once * a.row_bytes)
    {
        request(part * a.of.lanes.samples);
        channel_parameters<V, false> parameters;
        parameters.request_weights(a, place.left > 0 ? place.channel : 0);
        parameters.receive(a, weight, bias);
        factor = factor_of<T>(a.activation);
    }
    __device__ __forceinline__ void request(int first)
    {
        each<M>([&](int m) {
            const int n = first + m * samples_apart + place.sample, clamped = min(n, a.n - 1);
            const int64_t at = n * a.batch_bytes + place.at;
            each<K>([&](int k) {
                each<tensors>([&](int i) {
                    load_vector_where<T, V>(n < a.n && place.left > k * a.at_once, requested[i][m][k],
                                            (i == 0 ? a.x : a.dy) + at + k * step);
                });
            });
            if (tensors > 1) {
                requested_mean[m].request(a.mean, clamped * a.mean_batch + place.set_of(a, 0),
                                          type_of(a, COLUMNS_MEAN));
                requested_rstd[m] =
                    __ldcg(reinterpret_cast<const float *>(a.rstd) + clamped * a.rstd_batch + place.set_of(a, 0));
            }
        });
    }
    /* work(m, n, rows from the thread's first one on) for sample n, whose vectors are here[...][m]. */
    template <typename Work> __device__ __forceinline__ void walk(Work work)
    {
#pragma unroll 1
        for (int first = part * a.of.lanes.samples; first < a.n; first += M * samples_apart) {
            each<M>([&](int m) {
                each<K>([&](int k) { each<tensors>([&](int i) { here[i][m][k] = requested[i][m][k]; }); });
                mean[m] = requested_mean[m].receive(type_of(a, COLUMNS_MEAN));
                rstd[m] = requested_rstd[m];
            });
            request(first + M * samples_apart);
            each<M>([&](int m) {
                const int n = first + m * samples_apart + place.sample;
                work(m, n, n < a.n ? place.left : 0);
            });
        }
    }
    /* work(k, bytes from the thread's first vector) for the thread's vectors of a sample. */
    template <typename Work> __device__ __forceinline__ void walk_vectors(int left, Work work) const
    {
        each<K>([&](int k) {
            if (left > k * a.at_once)
                work(k, k * step);
        });
    }
};

template <typename T, int V, int M, int K>
__device__ __forceinline__ void lanes_forward(const normfuse_cuda_arguments &all)
{
    follow_kernel();
    const normfuse_cuda_columns &a = all.columns;
    constexpr int S = K == 1 ? 1 : V;
    lanes_samples<T, V, M, K, 1> samples(a);
    const lanes_place<T, V, S> &place = samples.place;

    samples.walk([&](int m, int n, int left) {
        const uint4(&here)[K] = samples.here[0][m];
        float x[V], base[S], sum[S] = {}, square[S] = {};
        unpack<T, V>(here[0], x);
        place.find_base(a, x, base);
        samples.walk_vectors(left, [&](int k, unsigned) {
            unpack<T, V>(here[k], x);
            each<V>([&](int i) { x[i] -= base[S == 1 ? 0 : i]; });
            add_to(sum, x);
        });
        place.join(a, sum);
        each<S>([&](int i) { sum[i] *= a.share; });
        /* About the mean, which cannot cancel. */
        samples.walk_vectors(left, [&](int k, unsigned) {
            unpack<T, V>(here[k], x);
            each<V>([&](int i) {
                x[i] = (x[i] - base[S == 1 ? 0 : i]) - sum[S == 1 ? 0 : i];
                x[i] *= x[i];
            });
            add_to(square, x);
        });
        place.join(a, square);
        float about[S], rest[S];
        each<S>([&](int i) {
            square[i] = inverse_root(square[i] * a.share + a.eps);
            split_sum<T>(base[i], sum[i], about[i], rest[i]);
        });
        if (place.is_first && left > 0) {
            each<S>([&](int i) {
                if (S == 1 || (a.group >= V ? i == 0 : (i & (a.group - 1)) == 0))
                    store_group(a, n, place.set_of(a, i), (double)base[i] + (double)sum[i], square[i]);
            });
        }
        float slope[V], offset[V];
        each<V>([&](int i) {
            slope[i] = samples.weight[i];
            offset[i] = samples.bias[i];
        });
        centre<V>(slope, offset, lane_values<S>{rest}, lane_values<S>{square}, samples.factor);
        char *const to = a.out + n * a.batch_bytes + place.at;
        choose_activation<true, false>(a.activation, [&](auto chosen) {
            samples.walk_vectors(left, [&](int k, unsigned at) {
                store_vector<T, V>(
                    to + at, 0,
                    result_of<T, V>(chosen, a.activation, a.act_param, here[k], lane_values<S>{about}, slope, offset));
            });
        });
    });
}

template <typename T, int V, int M, int K>
__device__ __forceinline__ void lanes_backward(const normfuse_cuda_arguments &all)
{
    follow_kernel();
    const normfuse_cuda_columns &a = all.columns;
    constexpr int S = K == 1 ? 1 : V;
    lanes_samples<T, V, M, K, 2> samples(a);
    const lanes_place<T, V, S> &place = samples.place;
    float plain[V] = {}, normalized[V] = {};

    samples.walk([&](int m, int n, int left) {
        float about[S], rest[S], rstd[S], slope[V], offset[V];
        split_mean<T>(samples.mean[m], about[0], rest[0]);
        rstd[0] = samples.rstd[m];
#pragma unroll
        for (int i = 1; i < S; i++) {
            about[i] = about[0];
            rest[i] = rest[0];
            rstd[i] = rstd[0];
        }
        if (S > 1 && a.group < V) {
            const int clamped = min(n, a.n - 1);
#pragma unroll
            for (int i = 1; i < S; i++) {
                split_mean<T>(
                    load_value<double>(a.mean, clamped * a.mean_batch + place.set_of(a, i), type_of(a, COLUMNS_MEAN)),
                    about[i], rest[i]);
                rstd[i] = reinterpret_cast<const float *>(a.rstd)[clamped * a.rstd_batch + place.set_of(a, i)];
            }
        }
        each<V>([&](int i) {
            slope[i] = samples.weight[i] * rstd[S == 1 ? 0 : i] * samples.factor;
            offset[i] = samples.bias[i] * samples.factor - rest[S == 1 ? 0 : i] * slope[i];
        });
        const lane_values<S> means = {about};
        const channel_derivative<T, V, lane_values<S>> differentiate = {a.activation, a.act_param, means, slope,
                                                                        offset};
        const uint4(&x_here)[K] = samples.here[0][m], (&dy_here)[K] = samples.here[1][m];
        choose_activation<true, false>(a.activation, [&](auto chosen) {
            float of_dy[V] = {}, of_both[V] = {}, sum[S] = {}, product[S] = {}, x[V], dy[V];
            samples.walk_vectors(left, [&](int k, unsigned) {
                differentiate(chosen, x_here[k], dy_here[k], x, dy);
                add_products(x, dy, of_dy, of_both);
            });
            each<V>([&](int i) {
                const int s = S == 1 ? 0 : i;
                sum[s] += slope[i] * of_dy[i];
                product[s] += slope[i] * of_both[i];
                plain[i] += samples.factor * of_dy[i];
                normalized[i] += (of_both[i] - rest[s] * of_dy[i]) * (rstd[s] * samples.factor);
            });
            place.join(a, sum);
            place.join(a, product);
            each<S>([&](int i) {
                const float2 of_group = gradient_of_group(sum[i], product[i], rest[i], rstd[i], a.share);
                product[i] = of_group.x;
                sum[i] = of_group.y;
            });
            char *const to = a.out + n * a.batch_bytes + place.at;
            samples.walk_vectors(left, [&](int k, unsigned at) {
                differentiate(chosen, x_here[k], dy_here[k], x, dy);
                store_gradient<T, V>(slope, lane_values<S>{product}, lane_values<S>{sum}, x, dy, to + at);
            });
        });
    });
    if (!all.sums)
        return;

    /* ---- the block's sums of its channels, into its place in memory ---- */
    NORMFUSE_DYNAMIC_SHARED(dynamic);
    const int channels = a.width * V;
    const int first_channel = ((int)blockIdx.x - samples.part * (int)a.by_blocks_wide.divisor) * channels;
    const normfuse_lanes_layout at_of = normfuse_lay_out_lanes(a.of.lanes.samples, a.at_once, channels);
    float *const of_plain = reinterpret_cast<float *>(dynamic), *const of_normalized =
                                                                    in_shared<float>(dynamic, at_of.normalized);
    if (place.left > 0) {
        const int at = (place.sample * a.at_once + place.beside) * channels + place.channel - first_channel;
        write_values<V>(of_plain + at, plain);
        write_values<V>(of_normalized + at, normalized);
    }
    __syncthreads();
    const int lasting = min(a.at_once, a.rows); /* rows of a sample whose threads have any */
#pragma unroll 1
    for (int c = (int)threadIdx.x; c < channels && first_channel + c < (int)all.problem.c; c += (int)blockDim.x) {
        double sum = 0.0, product = 0.0;
#pragma unroll 1
        for (int sample = 0; sample < a.of.lanes.samples; sample++)
#pragma unroll 4
            for (int row = 0; row < lasting; row++) {
                const int at = (sample * a.at_once + row) * channels + c;
                sum += (double)of_plain[at];
                product += (double)of_normalized[at];
            }
        reinterpret_cast<double2 *>(all.sums)[(int64_t)(first_channel + c) * all.geometry.sum_slots + samples.part] =
            make_double2(sum, product);
    }
}

/* Vectors of each tensor that a thread has at a time. */
constexpr int vectors_forward = 4, vectors_backward = 2;

#define INSTANCE(layout, schedule, direction, type, elements, vectors, threads, registers)                             \
    extern "C" __global__ void __launch_bounds__(threads, 65536 / (threads * registers))                               \
        NORMFUSE_KERNEL_NAME(layout, schedule, direction, type, elements, vectors)                                     \
    {                                                                                                                  \
        lanes_##direction<type, elements, vectors_##direction / vectors, vectors>(a);                                  \
    }
NORMFUSE_KERNELS_COLUMNS_LANES(INSTANCE)
