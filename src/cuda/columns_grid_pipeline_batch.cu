/* SPDX-License-Identifier: MIT
 *
 * columns_grid_pipeline_batch.cu - batch norm over adjacent channels (NHWC) by the whole grid at once, from pipelines
 * as in columns_grid.cu. Each channel is a norm group, so what the blocks found of all of them is too much for every
 * block to join: each joins that of its share of the channels, and the blocks meet a second time before they read what
 * all found. */
#include "pipeline.cuh"

enum { HELD_PARTS = 5 }; /* by each lane of a warp: 160 blocks at once */

/* A block, of so many tensors. `Known`: what results need of a channel. */
template <int tensors, typename Known> struct batch_block : grid_part {
    const normfuse_cuda_arguments &all;
    const normfuse_cuda_columns &a;
    uint4 *const pipeline;
    const int consumers, channels;
    float2 *const of_parts;   /* in memory, what each block found of each channel */
    Known *const of_channels; /* behind it, of all blocks */

    __device__ __forceinline__ batch_block(const normfuse_cuda_arguments &all, uint4 *pipeline, int V)
        : grid_part(all.columns), all(all), a(all.columns), pipeline(pipeline), consumers((int)blockDim.x - 32),
          channels(a.width * V), of_parts(reinterpret_cast<float2 *>(all.partials)),
          of_channels(reinterpret_cast<Known *>(of_parts + (int64_t)a.parts * channels))
    {
    }
    /* In shared memory, after the pipeline: of each channel what results need; of each channel and row of threads what
     * these found; forward, of each row how many rows of the tensor it has. */
    __device__ __forceinline__ normfuse_batch_layout layout() const
    {
        return normfuse_lay_out_batch(tensors * NORMFUSE_VECTOR_BYTES * stages * tile_vectors, channels, a.at_once,
                                      tensors > 1);
    }
    /* Where shared memory has what the threads of row 0 found of a channel: an odd number apart. */
    __device__ __forceinline__ float2 *entries_of(int c) const
    {
        return in_shared<float2>(pipeline, layout().entries) + c * (a.at_once | 1);
    }
    /* work(c) for every step-th of the channels that the block joins for all blocks. How many blocks have any. */
    template <typename Work> __device__ __forceinline__ int walk_own(int first, int step, Work work) const
    {
        const int own = (channels + a.parts - 1) / a.parts, begin = (int)blockIdx.x * own;
        const int stop = min(channels, begin + own);
#pragma unroll 1
        for (int c = begin + first; c < stop; c += step)
            work(c);
        return (channels + own - 1) / own;
    }
    /* work(first part, what HELD_PARTS parts found, every 32nd) for all blocks' parts of a channel, by a warp. */
    template <typename Work> __device__ __forceinline__ void walk_parts(int c, Work work) const
    {
#pragma unroll 1
        for (int first = (int)threadIdx.x % 32; first < a.parts; first += 32 * HELD_PARTS) {
            float2 found[HELD_PARTS];
            request_parts<32>(of_parts + c + (int64_t)first * channels, channels, a.parts - first, found);
            work(first, found);
        }
    }
    /* What consumers found of the channels: add(a channel's entries, lane, lanes) of the block, then join(channel) by a
     * warp, of all blocks, into of_channels. What results need of all channels is then in shared memory. */
    template <typename Add, typename Join>
    __device__ __forceinline__ const Known *exchange(const grid_meeting &of_all, const grid_meeting &of_owners, Add add,
                                                     Join join) const
    {
        Known *const shared_channels = in_shared<Known>(pipeline, layout().channels);
        meet(MEETING_OF_CONSUMERS, consumers);
        share_items<32>(channels, a.lane_bits, [&](int c, bool exists, int lane, int lanes) {
            const float2 found = add(entries_of(c), lane, lanes);
            if (exists && lane == 0)
                __stcg(of_parts + (int64_t)part * channels + c, found);
        });
        of_all.meet_blocks(part, a.parts, consumers);
        const int owners = walk_own((int)threadIdx.x / 32, consumers / 32, join);
        of_owners.meet_blocks((int)blockIdx.x, owners, consumers);
        announce(CHANNELS_ARE_KNOWN, (int)blockDim.x);
        /* By each block once: all of its threads requesting took 4 us, since few lines of L2 had it. */
#pragma unroll 1
        for (int c = (int)threadIdx.x; c < channels; c += consumers)
            shared_channels[c] = __ldcg(of_channels + c);
        meet(MEETING_OF_CONSUMERS, consumers);
        return shared_channels;
    }
    /* The producer's warp: tiles, then store(channel) of the block's share of the channels, beside the consumers, which
     * write results. */
    template <bool adds, typename Store>
    __device__ __forceinline__ void produce(pipeline_barriers &barriers, Store store) const
    {
        const int lane = (int)threadIdx.x % 32;
        tile_producer<tensors> producer(a, barriers, pipeline, *this, lane);
        if (lane == 0) {
            producer.fill_all(0);
            producer.fill_again(adds && goes_on_from_dz(all.problem, *this) ? all.problem.dpost_add().data : nullptr);
        }
        __syncwarp();
        meet(CHANNELS_ARE_KNOWN, (int)blockDim.x);
        walk_own(lane, 32, store);
    }
};

/* ---- forward ----------------------------------------------------------------------------------------------------- */

/* Of a thread's channels: sums about values of its own, and what these came to so far. */
template <typename T, int V> struct channel_moments {
    float about[V] = {}, square[V] = {}, sum[V] = {}, mean[V] = {}, squares[V] = {}, count = 0.0f;
    int rows = 0;

    __device__ __forceinline__ void begin(const uint4 &vector)
    {
        unpack<T, V>(vector, about);
    }
    __device__ __forceinline__ void add(const uint4 &vector)
    {
        rows++;
        add_squares<T, V>(vector, about, sum, square);
    }
    /* As append in join.cuh, of all channels. */
    __device__ __forceinline__ void fold()
    {
        const float next_count = (float)rows, both = count + next_count;
        const float share = next_count * reciprocal(fmaxf(both, 1.0f)), one = reciprocal(fmaxf(next_count, 1.0f));
        each<V>([&](int k) {
            const float next = sum[k] * one, distance = next - mean[k];
            mean[k] += distance * share;
            squares[k] += square[k] - sum[k] * next + distance * distance * count * share;
            sum[k] = square[k] = 0.0f;
        });
        count = both;
        rows = 0;
    }
};

template <typename T, int V, int, normfuse_cuda_schedule schedule>
__device__ __forceinline__ void columns_forward(const normfuse_cuda_arguments &all)
{
    follow_kernel();
    const normfuse_cuda_columns &a = all.columns;
    const normfuse_cuda_problem &p = all.problem;
    NORMFUSE_DYNAMIC_SHARED(dynamic);
    __shared__ pipeline_barriers barriers;
    /* Of a channel: its rounded mean, what that leaves out, rstd, the variance. */
    const batch_block<1, float4> block(all, dynamic, V);
    if ((int)threadIdx.x >= block.consumers) {
        block.template produce<false>(barriers, [&](int c) {
            const float4 found = __ldcg(block.of_channels + c);
            const double mean = (double)found.x + (double)found.y;
            write_parameter<double>(p.mean(), 0, c, mean);
            write_parameter<float>(p.rstd(), 0, c, found.z);
            if (p.has_running_momentum())
                update_running<float>(p, c, mean, unbiased((double)found.w, (double)a.rows));
        });
        return;
    }

    thread_place place;
    place.find(a);
    channel_parameters<V, false> parameters;
    parameters.request_weights(a, place.column * V);
    /* A value of each channel that all blocks know: its first. */
    const uint4 requested_base = load_vector<T, V>(a.x, place.column * V);
    const grid_meeting of_all(all.grid_barriers), of_owners(all.grid_barriers + grid_barrier_stride);
    float *const counts = in_shared<float>(dynamic, block.layout().counts);
    consumer_for<1, schedule> consumer(all, barriers, dynamic, block, place);
    meet(PIPELINE_IS_OPEN, (int)blockDim.x);

    /* ---- sums: of each row of threads the mean, less the value that all know, and squares about it ---- */
    channel_moments<T, V> found;
    consumer.sum_moments(found);
    if (place.has_rows(a)) {
        float base[V];
        unpack<T, V>(requested_base, base);
        each<V>([&](int k) {
            block.entries_of(place.column * V + k)[place.beside] =
                make_float2((found.about[k] - base[k]) + found.mean[k], found.squares[k]);
        });
        if (place.column == 0)
            counts[place.beside] = found.count;
    }

    /* ---- exchange: first means, then squares about them, which cannot cancel ---- */
    const float share = 1.0f / (float)a.rows;
    const values_of_parts rows_of(a, 1);
    const float count_part = rows_of.part(a, block.part);
    const auto add = [&](const float2 *of_channel, int lane, int lanes) {
        return join_means<0, 4>(
            a.at_once, lane, lanes, [&](int i) { return of_channel[i]; }, [&](float2, int i) { return counts[i]; },
            [&](float sum) { return sum * reciprocal(count_part); });
    };
    const float4 *const of_channels = block.exchange(of_all, of_owners, add, [&](int c) {
        float first_value[1];
        unpack<T, 1>(load_vector<T, 1>(a.x, c), first_value);
        moments<float> joined = {};
        block.walk_parts(c, [&](int first, const float2(&found)[HELD_PARTS]) {
            append_parts(joined, found,
                         [&](int k) { return first + 32 * k >= a.parts ? 0.0f : rows_of.part(a, first + 32 * k); });
        });
        /* The mean, less the value that all know, and squares about it. */
        const float mean = sum_few(joined.count * joined.mean, 32) * share, distance = joined.mean - mean;
        const float variance = sum_few(joined.squares + joined.count * distance * distance, 32) * share;
        const float rstd = inverse_root(variance + a.eps);
        if ((int)threadIdx.x % 32 == 0) {
            float rounded, rest;
            split_sum<T>(first_value[0], mean, rounded, rest);
            __stcg(block.of_channels + c, make_float4(rounded, rest, rstd, variance));
        }
    });

    float means[V], rests[V], rstds[V];
    each<V>([&](int k) {
        const float4 of_channel = of_channels[place.column * V + k];
        means[k] = of_channel.x;
        rests[k] = of_channel.y;
        rstds[k] = of_channel.z;
    });
    store_results<T, V>(a, consumer, parameters, means, rests, rstds, a.out, true);
}

/* ---- backward ---------------------------------------------------------------------------------------------------- */

/* The saved means of a thread's channels, f64 or what parameters may be. */
template <int V> struct saved_means {
    channel_words<V> single;
    double twice[V] = {};

    __device__ __forceinline__ saved_means(const normfuse_cuda_columns &a, int c, int type)
        : single(request_channels<V>(a.mean, c, type))
    {
        if (type == NORMFUSE_F64) {
#pragma unroll
            for (int k = 0; k < V; k += 2) {
                const double2 pair = __ldcg(reinterpret_cast<const double2 *>(a.mean) + (c + k) / 2);
                twice[k] = pair.x;
                twice[k + 1] = pair.y;
            }
        }
    }
    template <typename T> __device__ __forceinline__ void receive(int type, float (&means)[V], float (&rests)[V]) const
    {
        receive_channels<V>(single, type, means);
        each<V>([&](int k) { split_mean<T>(type == NORMFUSE_F64 ? twice[k] : (double)means[k], means[k], rests[k]); });
    }
};

template <typename T, int V, int, normfuse_cuda_schedule schedule>
__device__ __forceinline__ void columns_backward(const normfuse_cuda_arguments &all)
{
    follow_kernel();
    const normfuse_cuda_columns &a = all.columns;
    const normfuse_cuda_problem &p = all.problem;
    NORMFUSE_DYNAMIC_SHARED(dynamic);
    __shared__ pipeline_barriers barriers;
    /* Of a channel: what dx takes of x - mean, and what else. */
    const batch_block<2, float2> block(all, dynamic, V);
    double2 *const of_parameters = reinterpret_cast<double2 *>(block.of_channels + block.channels);
    if ((int)threadIdx.x >= block.consumers) {
        block.template produce<adds_to_tiles<schedule>>(barriers, [&](int c) {
            const double2 found = __ldcg(of_parameters + c);
            write_gradient(p, p.dbias(), 0, c, found.x);
            write_gradient(p, p.dweight(), 0, c, found.y);
        });
        return;
    }

    thread_place place;
    place.find(a);
    channel_parameters<V, false> parameters;
    parameters.request_weights(a, place.column * V);
    const int mean_type = type_of(a, COLUMNS_MEAN), rstd_type = type_of(a, COLUMNS_RSTD);
    const saved_means<V> requested_means(a, place.column * V, mean_type);
    const channel_words<V> requested_rstds = request_channels<V>(a.rstd, place.column * V, rstd_type);
    const grid_meeting of_all(all.grid_barriers), of_owners(all.grid_barriers + grid_barrier_stride);
    consumer_for<2, schedule> consumer(all, barriers, dynamic, block, place);
    meet(PIPELINE_IS_OPEN, (int)blockDim.x);

    float means[V], rests[V], rstds[V];
    requested_means.template receive<T>(mean_type, means, rests);
    receive_channels<V>(requested_rstds, rstd_type, rstds);
    const auto add = [&](const float2 *of_channel, int lane, int lanes) {
        return sum_pairs<4>(a.at_once, lane, lanes, [&](int i) { return of_channel[i]; });
    };
    const auto join_parts = [&](int c) {
        double sum = 0.0, product = 0.0;
        block.walk_parts(c, [&](int, const float2(&found)[HELD_PARTS]) {
            each<HELD_PARTS>([&](int k) {
                sum += (double)found[k].x;
                product += (double)found[k].y;
            });
        });
        sum = sum_lanes(sum, 32);
        product = sum_lanes(product, 32);
        if ((int)threadIdx.x % 32 != 0)
            return;
        const float rstd = load_value<float>(a.rstd, c, rstd_type);
        float rounded, rest;
        split_mean<T>(load_value<double>(a.mean, c, mean_type), rounded, rest);
        product -= (double)rest * sum;
        const float slope = (a.weight ? load_value<float>(a.weight, c, type_of(a, COLUMNS_WEIGHT)) : 1.0f) * rstd;
        const float centred = -(slope * (float)product * rstd) * (rstd * a.share);
        __stcg(block.of_channels + c, make_float2(centred, -(slope * (float)sum) * a.share - centred * rest));
        __stcg(of_parameters + c, make_double2(sum, product * (double)rstd));
    };
    const auto join = [&](auto &, auto &first, auto &second, float factor, auto &of_x, auto &level) {
        if (place.has_rows(a)) {
            each<V>([&](int k) {
                block.entries_of(place.column * V + k)[place.beside] =
                    make_float2(first[k] * factor, second[k] * factor);
            });
        }
        const float2 *const of_channels = block.exchange(of_all, of_owners, add, join_parts);
        each<V>([&](int k) {
            of_x[k] = of_channels[place.column * V + k].x;
            level[k] = of_channels[place.column * V + k].y;
        });
        return true;
    };
    store_gradients<T, V>(a, consumer, parameters, means, rests, rstds, a.out, true, join);
}

NORMFUSE_KERNELS_COLUMNS_GRID_PIPELINE_BATCH(NORMFUSE_PIPELINE_INSTANCE)
