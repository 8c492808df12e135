/* SPDX-License-Identifier: MIT
 *
 * columns_grid_pipeline_batch.cu - batch norm over adjacent channels (NHWC) by the whole grid at once, from pipelines
 * as in columns_grid_pipeline.cu. Each channel is a set, so what the blocks found of all of them is too much for every
 * block to join: each joins that of its share of the channels, and the blocks meet a second time before they read what
 * all found. */
#include "gradients.cuh"
#include "pipeline.cuh"

/* What a block has found of its channels, in shared memory: of each channel that of its threads beside one another, an
 * odd number apart. Few channels are joined by several lanes each. */
struct channel_join {
    int lanes, apart;

    __device__ __forceinline__ explicit channel_join(const normfuse_cuda_columns &a)
    {
        lanes = 1 << a.lane_bits;
        apart = a.at_once | 1;
    }
    /* work(channel, lane, whether there is such a channel) for each channel that the thread has a part in; whole warps
     * go on together. */
    template <typename Work> __device__ __forceinline__ void walk(int channels, int consumers, Work work) const
    {
        const int nth = (int)threadIdx.x / lanes, at_once = consumers / lanes,
                  of_warp = (int)(threadIdx.x & ~31u) / lanes;
#pragma unroll 1
        for (int round = 0; round + of_warp < channels; round += at_once)
            work(min(round + nth, channels - 1), (int)threadIdx.x & (lanes - 1), round + nth < channels);
    }
};

/* The channels that the block joins for all blocks; `owners` blocks have any. */
struct own_channels {
    int first, stop, owners;

    __device__ __forceinline__ own_channels(const normfuse_cuda_columns &a, int channels)
    {
        const int own = (channels + a.parts - 1) / a.parts;
        first = (int)blockIdx.x * own;
        stop = min(channels, first + own);
        owners = (channels + own - 1) / own;
    }
};

/* The second grid barrier: owners arrive, all wait. */
__device__ __forceinline__ void meet_owners(uint32_t *grid_barrier, int owners, uint32_t before, int consumers)
{
    meet(MEETING_OF_CONSUMERS, consumers);
    if (threadIdx.x == 0) {
        if ((int)blockIdx.x < owners)
            add_release(grid_barrier, grid_barrier_share((int)blockIdx.x, owners));
        await_grid_barrier(grid_barrier, before);
    }
    meet(MEETING_OF_CONSUMERS, consumers);
}

/* Of all channels, by each block once: all of its threads requesting took 4 us, since few lines of L2 had it. */
template <typename Known>
__device__ __forceinline__ void read_once(const Known *from, Known *to, int channels, int consumers)
{
#pragma unroll 1
    for (int c = (int)threadIdx.x; c < channels; c += consumers)
        to[c] = __ldcg(from + c);
    meet(MEETING_OF_CONSUMERS, consumers);
}

enum { held_parts = 5 }; /* by each lane of a warp: 160 blocks at once */

/* ---- forward ----------------------------------------------------------------------------------------------------- */

template <typename T, int V> __device__ __forceinline__ void batch_forward(const normfuse_cuda_arguments &all)
{
    follow_kernel();
    const normfuse_cuda_columns &a = all.columns;
    const normfuse_problem &p = all.problem;
    constexpr bool fast = sizeof(T) == 2;
    NORMFUSE_DYNAMIC_SHARED(dynamic);
    __shared__ pipeline_barriers barriers;
    const int consumers = (int)blockDim.x - 32, channels = a.width * V;
    const grid_part own(a);
    float2 *const of_parts = reinterpret_cast<float2 *>(all.partials);
    float4 *const of_channels = reinterpret_cast<float4 *>(of_parts + (int64_t)a.parts * channels);
    if ((int)threadIdx.x >= consumers) {
        const int lane = (int)threadIdx.x - consumers;
        tile_producer<1> producer(barriers, dynamic, a.of.grid.l2_tiles);
        open_pipeline(barriers, a, lane);
        if (lane == 0) {
            producer.from[0] = a.x;
            producer.fill_all(own);
            producer.fill_again(own);
        }
        __syncwarp();
        /* What others receive, beside the consumers, which write results. */
        meet(CHANNELS_ARE_KNOWN, (int)blockDim.x);
        const own_channels mine(a, channels);
#pragma unroll 1
        for (int c = mine.first + lane; c < mine.stop; c += 32) {
            const float4 found = __ldcg(of_channels + c);
            const double mean = (double)found.x + (double)found.y;
            put_parameter<double>(p.mean, 0, c, mean);
            put_parameter<float>(p.rstd, 0, c, found.z);
            if (p.has_running_momentum)
                update_running<float>(p, c, mean, unbiased((double)found.w, (double)a.rows));
        }
        return;
    }

    pipeline_place place;
    place.find(a);
    channel_parameters<V> parameters;
    parameters.request_weights(a, place.column * V);
    /* A value of each channel that all blocks know: its first. */
    const uint4 requested_base = load_vector<T, V>(a.x, place.column * V);
    uint32_t before = 0, owners_before = 0;
    uint32_t *const grid_barriers = all.grid_barriers;
    if (threadIdx.x == 0) {
        before = look_at_grid_barrier(grid_barriers);
        owners_before = look_at_grid_barrier(grid_barriers + grid_barrier_stride);
    }
    const channel_join join(a);
    /* After the pipeline: of each channel what results need; of each and a row of threads the mean, less the value that
     * all know, and squares about it; of each row how many rows of the tensor it has. */
    const normfuse_batch_layout at =
        normfuse_lay_out_batch(NORMFUSE_VECTOR_BYTES * own.stages * own.tile_vectors, channels, a.at_once, false);
    float4 *const shared_channels = in_shared<float4>(dynamic, at.channels);
    float2 *const entries = in_shared<float2>(dynamic, at.entries);
    float *const counts = in_shared<float>(dynamic, at.counts);
    tile_consumer consumer(barriers);
    meet(PIPELINE_IS_OPEN, (int)blockDim.x);

    /* ---- sums, about values of the thread's own ---- */
    float about[V] = {}, sum[V] = {}, square[V] = {}, found_mean[V] = {}, found_square[V] = {}, found_count = 0.0f;
    int rows_here = 0, until_fold = a.of.grid.chunk_tiles;
    consumer.walk_sums(own, [&](int tile, int stage) {
        const uint4 *const from = dynamic + stage * own.tile_vectors;
        const int vectors = own.vectors_of(tile);
        if (tile == 0 && place.first < vectors)
            unpack<T, V>(from[place.first], about);
        walk_vectors<4>(
            place, vectors, [&](int i) { return from[i]; },
            [&](const uint4 &vector, int) {
                float value[V];
                unpack<T, V>(vector, value);
                rows_here++;
#pragma unroll
                for (int k = 0; k < V; k++) {
                    const float distance = value[k] - about[k];
                    sum[k] += distance;
                    square[k] += distance * distance;
                }
            });
        if (--until_fold == 0 || tile + 1 == own.tiles) {
            /* As append in join.cuh, of all channels. */
            const float next_count = (float)rows_here, count = found_count + next_count;
            const float share = next_count * reciprocal(fmaxf(count, 1.0f)), one = reciprocal(fmaxf(next_count, 1.0f));
#pragma unroll
            for (int k = 0; k < V; k++) {
                const float mean = sum[k] * one, distance = mean - found_mean[k];
                found_mean[k] += distance * share;
                found_square[k] += square[k] - sum[k] * mean + distance * distance * found_count * share;
                sum[k] = square[k] = 0.0f;
            }
            found_count = count;
            rows_here = 0;
            until_fold = a.of.grid.chunk_tiles;
        }
    });
    if (place.has_rows()) {
        float base[V];
        unpack<T, V>(requested_base, base);
#pragma unroll
        for (int k = 0; k < V; k++)
            entries[(place.column * V + k) * join.apart + place.beside] =
                make_float2((about[k] - base[k]) + found_mean[k], found_square[k]);
        if (place.column == 0)
            counts[place.beside] = found_count;
    }
    meet(MEETING_OF_CONSUMERS, consumers);

    /* ---- of the block: first means, then squares about them, which cannot cancel ---- */
    const float share = 1.0f / (float)a.rows;
    const float of_first_parts = (float)a.part_rows, of_other_parts = (float)a.of.grid.small_part_rows;
    const float lacking = (float)a.of.grid.lacking_rows;
    const float count_part = (own.part < a.of.grid.first_parts ? of_first_parts : of_other_parts) -
                             (own.part == a.of.grid.first_parts - 1 ? lacking : 0.0f);
    join.walk(channels, consumers, [&](int c, int lane, bool is_needed) {
        const float2 *const of_channel = entries + c * join.apart;
        float mean = 0.0f, squares = 0.0f;
#pragma unroll 4
        for (int i = lane; i < a.at_once; i += join.lanes)
            mean += counts[i] * of_channel[i].x;
        mean = sum_few(mean, join.lanes) * reciprocal(count_part);
#pragma unroll 4
        for (int i = lane; i < a.at_once; i += join.lanes) {
            const float distance = of_channel[i].x - mean;
            squares += of_channel[i].y + counts[i] * distance * distance;
        }
        squares = sum_few(squares, join.lanes);
        if (is_needed && lane == 0)
            __stcg(of_parts + (int64_t)own.part * channels + c, make_float2(mean, squares));
    });
    meet_blocks(grid_barriers, own.part, a.parts, before, consumers);

    /* ---- of all blocks ---- */
    const own_channels mine(a, channels);
    const int lane = (int)threadIdx.x % 32;
#pragma unroll 1
    for (int c = mine.first + (int)threadIdx.x / 32; c < mine.stop; c += consumers / 32) {
        float first_value[1];
        unpack<T, 1>(load_vector<T, 1>(a.x, c), first_value);
        float2 part[held_parts];
        moments<float> joined = {};
#pragma unroll 1
        for (int round = lane; round < a.parts; round += 32 * held_parts) {
            const auto number = [&](int k) {
                const int i = round + 32 * k;
                return i >= a.parts ? 0.0f
                                    : (i < a.of.grid.first_parts ? of_first_parts : of_other_parts) -
                                          (i == a.of.grid.first_parts - 1 ? lacking : 0.0f);
            };
            moments<float> next = {};
#pragma unroll
            for (int k = 0; k < held_parts; k++) {
                part[k] = make_float2(0.0f, 0.0f);
                if (round + 32 * k < a.parts)
                    part[k] = __ldcg(of_parts + (int64_t)(round + 32 * k) * channels + c);
            }
#pragma unroll
            for (int k = 0; k < held_parts; k++) {
                next.count += number(k);
                next.mean += number(k) * part[k].x;
            }
            next.mean *= reciprocal(fmaxf(next.count, 1.0f));
#pragma unroll
            for (int k = 0; k < held_parts; k++) {
                const float distance = part[k].x - next.mean;
                next.squares += part[k].y + number(k) * distance * distance;
            }
            append_near(joined, next);
        }
        const float mean = sum_few(joined.count * joined.mean, 32) * share, distance = joined.mean - mean;
        const float squares = sum_few(joined.squares + joined.count * distance * distance, 32);
        const float rstd = inverse_root(squares * share + a.eps);
        if (lane == 0) {
            float rounded, rest;
            split_sum<T>(first_value[0], mean, rounded, rest);
            __stcg(of_channels + c, make_float4(rounded, rest, rstd, squares * share));
        }
    }
    meet_owners(grid_barriers + grid_barrier_stride, mine.owners, owners_before, consumers);
    announce(CHANNELS_ARE_KNOWN, (int)blockDim.x);

    /* ---- results ---- */
    read_once(of_channels, shared_channels, channels, consumers);
    float slope[V], offset[V], shift[V];
    parameters.receive_weights(a, slope, offset);
    const float factor = takes_half<fast, true>(a.activation) ? 0.5f : 1.0f;
#pragma unroll
    for (int k = 0; k < V; k++) {
        const float4 of_channel = shared_channels[place.column * V + k];
        shift[k] = of_channel.x;
        slope[k] *= of_channel.z * factor;
        offset[k] = offset[k] * factor - of_channel.y * slope[k];
    }
    choose_activation<true, true>(a.activation, [&](auto chosen) {
        consumer.walk_results(own, true, [&](int tile, int stage) {
            const uint4 *const from = dynamic + stage * own.tile_vectors;
            char *const to_tile = a.out + own.place_of(tile);
            walk_vectors<4>(
                place, own.vectors_of(tile), [&](int i) { return from[i]; },
                [&](const uint4 &vector, int i) {
                    store_result<T, V>(a, chosen, vector, shift, slope, offset, to_tile + i * 16);
                });
        });
    });
}

/* ---- backward ---------------------------------------------------------------------------------------------------- */

template <typename T, int V> __device__ __forceinline__ void batch_backward(const normfuse_cuda_arguments &all)
{
    follow_kernel();
    const normfuse_cuda_columns &a = all.columns;
    const normfuse_problem &p = all.problem;
    constexpr bool fast = sizeof(T) == 2;
    NORMFUSE_DYNAMIC_SHARED(dynamic);
    __shared__ pipeline_barriers barriers;
    const int consumers = (int)blockDim.x - 32, channels = a.width * V;
    const grid_part own(a);
    float2 *const of_parts = reinterpret_cast<float2 *>(all.partials);
    float2 *const of_channels = of_parts + (int64_t)a.parts * channels;
    double2 *const of_parameters = reinterpret_cast<double2 *>(of_channels + channels);
    if ((int)threadIdx.x >= consumers) {
        const int lane = (int)threadIdx.x - consumers;
        tile_producer<2> producer(barriers, dynamic, a.of.grid.l2_tiles);
        open_pipeline(barriers, a, lane);
        if (lane == 0) {
            producer.from[0] = a.x;
            producer.from[1] = a.dy;
            producer.fill_all(own);
            producer.fill_again(own);
        }
        __syncwarp();
        meet(CHANNELS_ARE_KNOWN, (int)blockDim.x);
        const own_channels mine(a, channels);
#pragma unroll 1
        for (int c = mine.first + lane; c < mine.stop; c += 32) {
            const double2 found = __ldcg(of_parameters + c);
            put_gradient(p, p.dbias, 0, c, found.x);
            put_gradient(p, p.dweight, 0, c, found.y);
        }
        return;
    }

    pipeline_place place;
    place.find(a);
    channel_parameters<V> parameters;
    parameters.request_weights(a, place.column * V);
    const int mean_type = type_of(a, COLUMNS_MEAN);
    const channel_words<V> requested_means = request_channels<V>(a.mean, place.column * V, mean_type);
    double requested_twice[V] = {};
    if (mean_type == NORMFUSE_F64) {
#pragma unroll
        for (int k = 0; k < V; k += 2) {
            const double2 pair = __ldcg(reinterpret_cast<const double2 *>(a.mean) + (place.column * V + k) / 2);
            requested_twice[k] = pair.x;
            requested_twice[k + 1] = pair.y;
        }
    }
    const channel_words<V> requested_rstds = request_channels<V>(a.rstd, place.column * V, type_of(a, COLUMNS_RSTD));
    uint32_t before = 0, owners_before = 0;
    uint32_t *const grid_barriers = all.grid_barriers;
    if (threadIdx.x == 0) {
        before = look_at_grid_barrier(grid_barriers);
        owners_before = look_at_grid_barrier(grid_barriers + grid_barrier_stride);
    }
    const channel_join join(a);
    const normfuse_batch_layout at =
        normfuse_lay_out_batch(2 * NORMFUSE_VECTOR_BYTES * own.stages * own.tile_vectors, channels, a.at_once, true);
    float2 *const shared_channels = in_shared<float2>(dynamic, at.channels);
    float2 *const entries = in_shared<float2>(dynamic, at.entries);
    tile_consumer consumer(barriers);
    meet(PIPELINE_IS_OPEN, (int)blockDim.x);

    float shift[V], slope[V], offset[V];
    {
        float rstds[V];
        receive_channels<V>(requested_means, mean_type, shift);
        receive_channels<V>(requested_rstds, type_of(a, COLUMNS_RSTD), rstds);
        parameters.receive_weights(a, slope, offset);
        const float factor = takes_half<fast, true>(a.activation) ? 0.5f : 1.0f;
#pragma unroll
        for (int k = 0; k < V; k++) {
            float rounded, rest;
            split_mean<T>(mean_type == NORMFUSE_F64 ? requested_twice[k] : (double)shift[k], rounded, rest);
            slope[k] *= rstds[k] * factor;
            offset[k] = offset[k] * factor - rest * slope[k];
            shift[k] = rounded;
        }
    }
    const auto differentiate = [&](auto chosen, float(&x)[V], float(&dy)[V]) {
        differentiate_channels<fast, V>(a.activation, a.act_param, chosen, shift, slope, offset, x, dy);
    };
    /* ---- sums ---- */
    float first[V] = {}, second[V] = {};
    choose_activation<true, false>(a.activation, [&](auto chosen) {
        sum_gradients<T, V>(consumer, dynamic, own, place, chosen, differentiate, first, second);
    });
    if (place.has_rows()) {
        const float factor = takes_half<fast, true>(a.activation) ? 0.5f : 1.0f;
#pragma unroll
        for (int k = 0; k < V; k++)
            entries[(place.column * V + k) * join.apart + place.beside] =
                make_float2(first[k] * factor, second[k] * factor);
    }
    meet(MEETING_OF_CONSUMERS, consumers);

    /* ---- of the block, then of all ---- */
    join.walk(channels, consumers, [&](int c, int lane, bool is_needed) {
        const float2 *const of_channel = entries + c * join.apart;
        float2 pair = make_float2(0.0f, 0.0f);
#pragma unroll 4
        for (int i = lane; i < a.at_once; i += join.lanes) {
            pair.x += of_channel[i].x;
            pair.y += of_channel[i].y;
        }
        pair.x = sum_few(pair.x, join.lanes);
        pair.y = sum_few(pair.y, join.lanes);
        if (is_needed && lane == 0)
            __stcg(of_parts + (int64_t)own.part * channels + c, pair);
    });
    meet_blocks(grid_barriers, own.part, a.parts, before, consumers);
    const own_channels mine(a, channels);
    const int lane = (int)threadIdx.x % 32;
#pragma unroll 1
    for (int c = mine.first + (int)threadIdx.x / 32; c < mine.stop; c += consumers / 32) {
        double sum = 0.0, product = 0.0;
        float2 part[held_parts];
#pragma unroll 1
        for (int round = lane; round < a.parts; round += 32 * held_parts) {
#pragma unroll
            for (int k = 0; k < held_parts; k++) {
                part[k] = make_float2(0.0f, 0.0f);
                if (round + 32 * k < a.parts)
                    part[k] = __ldcg(of_parts + (int64_t)(round + 32 * k) * channels + c);
            }
#pragma unroll
            for (int k = 0; k < held_parts; k++) {
                sum += (double)part[k].x;
                product += (double)part[k].y;
            }
        }
        sum = sum_lanes(sum, 32);
        product = sum_lanes(product, 32);
        if (lane == 0) {
            const float rstd = load_value<float>(a.rstd, c, type_of(a, COLUMNS_RSTD));
            float rounded, rest;
            split_mean<T>(load_value<double>(a.mean, c, type_of(a, COLUMNS_MEAN)), rounded, rest);
            product -= (double)rest * sum;
            const float slope_here =
                (a.weight ? load_value<float>(a.weight, c, type_of(a, COLUMNS_WEIGHT)) : 1.0f) * rstd;
            const float centred = -(slope_here * (float)product * rstd) * (rstd * a.share);
            __stcg(of_channels + c, make_float2(centred, -(slope_here * (float)sum) * a.share - centred * rest));
            __stcg(of_parameters + c, make_double2(sum, product * (double)rstd));
        }
    }
    meet_owners(grid_barriers + grid_barrier_stride, mine.owners, owners_before, consumers);
    announce(CHANNELS_ARE_KNOWN, (int)blockDim.x);

    /* ---- results ---- */
    read_once(of_channels, shared_channels, channels, consumers);
    float of_x[V], level[V];
#pragma unroll
    for (int k = 0; k < V; k++) {
        const float2 of_channel = shared_channels[place.column * V + k];
        of_x[k] = of_channel.x;
        level[k] = of_channel.y;
    }
    choose_activation<true, false>(a.activation, [&](auto chosen) {
        consumer.walk_results(own, true, [&](int tile, int stage) {
            const uint4 *const from = dynamic + 2 * stage * own.tile_vectors;
            const auto read = [&](int i) { return both{from[i], from[own.tile_vectors + i]}; };
            char *const to_tile = a.out + own.place_of(tile);
            walk_vectors<2>(place, own.vectors_of(tile), read, [&](const both &here, int i) {
                float x[V], dy[V];
                unpack<T, V>(here.x, x);
                unpack<T, V>(here.dy, dy);
                differentiate(chosen, x, dy);
                store_gradient<T, V>(slope, of_x, level, x, dy, to_tile + i * 16);
            });
        });
    });
}

#define INSTANCE(layout, schedule, direction, type, elements, vectors, threads, registers)                             \
    NORMFUSE_KERNEL(layout, schedule, direction, type, elements, vectors, registers)                                   \
    {                                                                                                                  \
        NORMFUSE_PIPELINE_BODY((batch_##direction<type, elements>(a)));                                                \
    }
NORMFUSE_KERNELS_COLUMNS_GRID_PIPELINE_BATCH(INSTANCE)
