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
#include "columns_held.cuh"
#include "gradients.cuh"

/* A number for each of the thread's channels, of their group: one for all, or one for each. */
template <int S> struct lane_values {
    float of[S];

    __device__ __forceinline__ const float &operator[](int i) const
    {
        return of[S == 1 ? 0 : i];
    }
    __device__ __forceinline__ float &operator[](int i)
    {
        return of[S == 1 ? 0 : i];
    }
};

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
    __device__ __forceinline__ void join(const normfuse_cuda_columns &a, lane_values<S> &value) const
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
};

/* The samples of a block, `M` at a time, of each `K` vectors a thread and tensor. The next ones are on their way
 * meanwhile; backward their statistics, too. */
template <typename T, int V, int M, int K, int tensors> struct lanes_samples {
    static constexpr int S = K == 1 ? 1 : V;
    using rows_of = held_rows<K, tensors, true>;
    const normfuse_cuda_columns &a;
    const int part;
    const lanes_place<T, V, S> place;
    const int samples_apart;
    uint4 requested[M][K][tensors] = {};
    saved_statistic requested_mean[M]; /* of the first channel's group */
    float requested_rstd[M], weight[V], bias[V];

    __device__ __forceinline__ explicit lanes_samples(const normfuse_cuda_columns &a)
        : a(a), part(divide((int)blockIdx.x, a.by_blocks_wide)),
          place(a, (int)blockIdx.x - part * (int)a.by_blocks_wide.divisor), samples_apart(a.parts * a.of.lanes.samples)
    {
        request(part * a.of.lanes.samples);
        channel_parameters<V, false> parameters;
        parameters.request_weights(a, place.left > 0 ? place.channel : 0);
        parameters.receive(a, weight, bias);
    }
    __device__ __forceinline__ void receive(const normfuse_cuda_columns &, float (&slope)[V], float (&offset)[V]) const
    {
        each<V>([&](int i) {
            slope[i] = weight[i];
            offset[i] = bias[i];
        });
    }
    __device__ __forceinline__ void request(int first)
    {
        const unsigned step = (unsigned)a.at_once * a.row_bytes;
        each<M>([&](int m) {
            const int n = first + m * samples_apart + place.sample, clamped = min(n, a.n - 1);
            const int64_t at = n * a.batch_bytes + place.at;
            each<K>([&](int k) {
                each<tensors>([&](int i) {
                    load_vector_where<T, V>(n < a.n && place.left > k * a.at_once, requested[m][k][i],
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
    /* work(n, the thread's rows of sample n, the saved mean, rstd) */
    template <typename Work> __device__ __forceinline__ void walk(Work work)
    {
#pragma unroll 1
        for (int first = part * a.of.lanes.samples; first < a.n; first += M * samples_apart) {
            uint4 here[M][K][tensors];
            double mean[M];
            float rstd[M];
            each<M>([&](int m) {
                each<K>([&](int k) { each<tensors>([&](int i) { here[m][k][i] = requested[m][k][i]; }); });
                mean[m] = requested_mean[m].receive(type_of(a, COLUMNS_MEAN));
                rstd[m] = requested_rstd[m];
            });
            request(first + M * samples_apart);
            each<M>([&](int m) {
                const int n = first + m * samples_apart + place.sample;
                rows_of rows(a, n < a.n ? place.left : 0, place.at);
                each<K>([&](int k) { each<tensors>([&](int i) { rows.held[k][i] = here[m][k][i]; }); });
                work(n, rows, mean[m], rstd[m]);
            });
        }
    }
};

template <typename T, int V, int K, normfuse_cuda_schedule>
__device__ __forceinline__ void columns_forward(const normfuse_cuda_arguments &all)
{
    follow_kernel();
    const normfuse_cuda_columns &a = all.columns;
    constexpr int S = K == 1 ? 1 : V;
    lanes_samples<T, V, 4 / K, K, 1> samples(a);
    const lanes_place<T, V, S> &place = samples.place;

    samples.walk([&](int n, auto &rows, double, float) {
        float x[V];
        lane_values<S> base, sum = {}, square = {}, about, rest;
        unpack<T, V>(rows.held[0][0], x);
        /* The first value of each group. */
        each<S>([&](int i) { base[i] = __shfl_sync(full_mask, x[i], place.first_lane); });
        place.walk_spans(a, [&](int i, int k) { base[k] = base[i]; });
        rows.walk([&](int k) {
            unpack<T, V>(rows.held[k][0], x);
            each<V>([&](int i) { sum[i] += x[i] - base[i]; });
        });
        place.join(a, sum);
        each<S>([&](int i) { sum[i] *= a.share; });
        /* About the mean, which cannot cancel. */
        rows.walk([&](int k) {
            unpack<T, V>(rows.held[k][0], x);
            each<V>([&](int i) {
                const float distance = (x[i] - base[i]) - sum[i];
                square[i] += distance * distance;
            });
        });
        place.join(a, square);
        each<S>([&](int i) {
            square[i] = inverse_root(square[i] * a.share + a.eps);
            split_sum<T>(base[i], sum[i], about[i], rest[i]);
        });
        if (place.is_first && rows.left > 0) {
            each<S>([&](int i) {
                if (S == 1 || (a.group >= V ? i == 0 : (i & (a.group - 1)) == 0))
                    store_group(a, n, place.set_of(a, i), (double)base[i] + (double)sum[i], square[i]);
            });
        }
        store_results<T, V>(a, rows, samples, about, rest, square, a.out + n * a.batch_bytes, true);
    });
}

template <typename T, int V, int K, normfuse_cuda_schedule>
__device__ __forceinline__ void columns_backward(const normfuse_cuda_arguments &all)
{
    follow_kernel();
    const normfuse_cuda_columns &a = all.columns;
    constexpr int S = K == 1 ? 1 : V;
    lanes_samples<T, V, 2 / K, K, 2> samples(a);
    const lanes_place<T, V, S> &place = samples.place;
    float plain[V] = {}, normalized[V] = {};

    samples.walk([&](int n, auto &rows, double mean, float rstd) {
        lane_values<S> means, rests, rstds;
        split_mean<T>(mean, means[0], rests[0]);
        each<S>([&](int i) {
            means[i] = means[0];
            rests[i] = rests[0];
            rstds[i] = rstd;
        });
        if (S > 1 && a.group < V) {
            const int clamped = min(n, a.n - 1);
#pragma unroll
            for (int i = 1; i < S; i++) {
                split_mean<T>(
                    load_value<double>(a.mean, clamped * a.mean_batch + place.set_of(a, i), type_of(a, COLUMNS_MEAN)),
                    means[i], rests[i]);
                rstds[i] = reinterpret_cast<const float *>(a.rstd)[clamped * a.rstd_batch + place.set_of(a, i)];
            }
        }
        float slope[V], offset[V];
        const float factor = factor_of<T>(a.activation);
        each<V>([&](int i) {
            slope[i] = samples.weight[i] * rstds[i] * factor;
            offset[i] = samples.bias[i] * factor - rests[i] * slope[i];
        });
        const channel_derivative<T, V, lane_values<S>> differentiate = {a.activation, a.act_param, means, slope,
                                                                        offset};
        choose_activation<true, false>(a.activation, [&](auto chosen) {
            float first[V] = {}, second[V] = {}, x[V], dy[V];
            lane_values<S> sum = {}, product = {};
            rows.walk([&](int k) {
                differentiate(chosen, rows.held[k][0], rows.held[k][1], x, dy);
                add_products(x, dy, first, second);
            });
            each<V>([&](int i) {
                sum[i] += slope[i] * first[i];
                product[i] += slope[i] * second[i];
                plain[i] += factor * first[i];
                normalized[i] += (second[i] - rests[i] * first[i]) * (rstds[i] * factor);
            });
            place.join(a, sum);
            place.join(a, product);
            each<S>([&](int i) {
                const float2 of_group = gradient_of_group(sum[i], product[i], rests[i], rstds[i], a.share);
                product[i] = of_group.x;
                sum[i] = of_group.y;
            });
            rows.store(a.out + n * a.batch_bytes, true, [&](const uint4 *vectors, char *to, no_additions) {
                differentiate(chosen, vectors[0], vectors[1], x, dy);
                store_gradient<T, V>(slope, product, sum, x, dy, to);
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
        store_channel_sums(all, 0, first_channel + c, samples.part, sum, product);
    }
}

NORMFUSE_KERNELS_COLUMNS_LANES(NORMFUSE_INSTANCE)
