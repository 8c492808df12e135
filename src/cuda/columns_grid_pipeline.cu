/* SPDX-License-Identifier: MIT
 *
 * columns_grid_pipeline.cu - group norm over adjacent channels (NHWC) by the whole grid at once. A block has adjacent
 * rows of a sample, which are adjacent in memory: one thread requests tiles of them by bulk copies into a pipeline in
 * shared memory, the others sum what arrives. All blocks of a sample send one another their sums through memory, then
 * write results from what the pipeline still holds and, of samples larger than the chip, from tiles that are read
 * again, the last first, since those are in L2. Copies by one thread leave the others nothing but the work on values:
 * by a load or a copy a vector, sums were bound by the unit that takes these. The first tiles of the next sample are on
 * their way while results of this one are written. */
#include "columns_grid.cuh"

/* ---- forward ----------------------------------------------------------------------------------------------------- */

/* A value of each group that all blocks know: its first. */
template <typename T>
__device__ __forceinline__ raw<T, 1> request_base(const normfuse_cuda_columns &a, int n, int group)
{
    return load_vector<T, 1>(a.x + n * a.batch_bytes, group * a.group);
}
template <typename T> __device__ __forceinline__ float receive_base(raw<T, 1> requested)
{
    float value[1];
    unpack<T, 1>(requested, value);
    return value[0];
}

/* What the block's threads found, of each group, into memory: means less the group's base, which is kept, then squares
 * about them, which cannot cancel. */
template <typename T, int V>
__device__ __forceinline__ void write_moments(const normfuse_cuda_arguments &all, const values_of_parts &counts_of,
                                              int n, int block_group, int part, int parity, const float4 *entries,
                                              float4 *of_groups, raw<T, 1> requested_base, int consumers)
{
    const normfuse_cuda_columns &a = all.columns;
    const int groups_at_once = consumers / lanes_of_group;
#pragma unroll 1
    for (int round = 0; round < a.groups; round += groups_at_once) {
        const joining_lane join(a, round);
        const float base = receive_base<T>(round == 0 ? requested_base : request_base<T>(a, n, join.group));
        int begin, count;
        entries_of_group<V>(a, join.group, begin, count);
        const float2 found =
            join_entries<held_sums>(entries + begin, join.lane, count, lanes_of_group, base, counts_of.part(a, part));
        if (join.is_first()) {
            __stcg(parts_of_group(all, block_group, parity, join.group) + part, found);
            of_groups[join.group].x = base;
        }
    }
}

/* What all blocks of the sample found, into what results need of each group: its mean, what that leaves out, rstd. */
template <typename T>
__device__ __forceinline__ void join_moments(const normfuse_cuda_arguments &all, const values_of_parts &counts_of,
                                             int n, int block_group, int part, int parity, float4 *of_groups,
                                             int consumers)
{
    const normfuse_cuda_columns &a = all.columns;
    const int groups_at_once = consumers / lanes_of_group;
#pragma unroll 1
    for (int round = 0; round < a.groups; round += groups_at_once) {
        const joining_lane join(a, round);
        /* Not from x, in whose place another block may have put results by now. */
        const float base = join.is_needed ? of_groups[join.group].x : 0.0f;
        const float2 *const of_parts = parts_of_group(all, block_group, parity, join.group);
        const float2 last = __ldcg(of_parts + a.of.grid.first_parts - 1);
        moments<float> joined = {};
        const auto number = [&](int left, int k) {
            const int behind = left - k * lanes_of_group; /* parts from this one on */
            return behind <= 0 ? 0.0f : behind > a.parts - a.of.grid.first_parts ? counts_of.first : counts_of.other;
        };
#pragma unroll 1
        for (int left = a.parts - join.lane; left > 0; left -= held_parts * lanes_of_group) {
            float2 found[held_parts];
            request_parts(of_parts + (a.parts - left), left, found);
            moments<float> next = {};
#pragma unroll
            for (int k = 0; k < held_parts; k++) {
                next.count += number(left, k);
                next.mean += number(left, k) * found[k].x;
            }
            next.mean *= reciprocal(next.count);
#pragma unroll
            for (int k = 0; k < held_parts; k++) {
                const float distance = found[k].x - next.mean;
                next.squares += found[k].y + number(left, k) * distance * distance;
            }
            append_near(joined, next);
        }
        const float mean = (sum_few(joined.count * joined.mean, lanes_of_group) - counts_of.lacking * last.x) * a.share;
        const float distance = joined.mean - mean, of_last = last.x - mean;
        const float squares = sum_few(joined.squares + joined.count * distance * distance, lanes_of_group) -
                              counts_of.lacking * of_last * of_last;
        const float rstd = inverse_root(squares * a.share + a.eps);
        if (join.is_first()) {
            float rounded, rest;
            split_sum<T>(base, mean, rounded, rest);
            of_groups[join.group] = make_float4(rounded, rest, rstd, 0.0f);
            if (part == 0)
                store_group(a, n, join.group, (double)base + (double)mean, rstd);
        }
    }
}

/* Sums about values of the thread's own, the first of its first group and the last of the other. */
template <typename T, int V> struct side_moments {
    const thread_place &place;
    side_values about;
    float sum[V] = {}, square[V] = {};
    moments<float> found[2] = {};
    int rows = 0;

    __device__ __forceinline__ explicit side_moments(const thread_place &place)
        : place(place), about{{0.0f, 0.0f}, place.split}
    {
    }
    __device__ __forceinline__ void begin(const uint4 &vector)
    {
        float value[V];
        unpack<T, V>(vector, value);
        about.of[0] = value[0];
        about.of[1] = value[V - 1];
    }
    __device__ __forceinline__ void add(const uint4 &vector)
    {
        float value[V];
        unpack<T, V>(vector, value);
        rows++;
        add_squares<V>(value, about, sum, square);
    }
    __device__ __forceinline__ void fold()
    {
#pragma unroll
        for (int side = 0; side < 2; side++)
            append_near(found[side], moments_of_side<V>(place, side, sum, square, (float)rows));
#pragma unroll
        for (int i = 0; i < V; i++)
            sum[i] = square[i] = 0.0f;
        rows = 0;
    }
    __device__ __forceinline__ float4 entry(int side) const
    {
        return make_float4(about.of[side], found[side].mean, found[side].squares, found[side].count);
    }
};

template <typename T, int V> __device__ __forceinline__ void grid_forward(const normfuse_cuda_arguments &all)
{
    follow_kernel();
    const normfuse_cuda_columns &a = all.columns;
    constexpr bool fast = sizeof(T) == 2;
    NORMFUSE_DYNAMIC_SHARED(dynamic);
    __shared__ pipeline_barriers barriers;
    const int consumers = (int)blockDim.x - 32;
    pipeline_place place;
    channel_parameters<V> parameters = {};
    if ((int)threadIdx.x < consumers) {
        place.find(a);
        parameters.request_weights(a, place.column * V);
    }
    const grid_part own(a);
    /* After the pipeline: of each thread in a group a value that it sums about, its mean less that, squares about the
     * mean, and how many values these are; then what results need of each group. */
    const normfuse_grid_layout at = normfuse_lay_out_grid_forward(NORMFUSE_VECTOR_BYTES * own.stages * own.tile_vectors,
                                                                  a.width, a.groups, a.at_once);
    float4 *const entries = in_shared<float4>(dynamic, at.entries), *const of_groups =
                                                                        in_shared<float4>(dynamic, at.groups);

    if ((int)threadIdx.x >= consumers) {
        const int lane = (int)threadIdx.x - consumers;
        tile_producer<1> producer(barriers, dynamic, a.of.grid.l2_tiles);
        open_pipeline(barriers, a, lane);
        if (lane == 0) {
#pragma unroll 1
            for (int n = own.block_group; n < a.n; n += a.of.grid.block_groups) {
                producer.from[0] = a.x + n * a.batch_bytes;
                producer.fill_all(own);
                producer.fill_again(own);
            }
        }
        return;
    }

    place.find_groups<V>(a, place.column);
    tile_consumer consumer(barriers);
    int parity = 0;
#pragma unroll 1
    for (int n = own.block_group; n < a.n; n += a.of.grid.block_groups, parity ^= 1) {
        parameters.request_modulation(a, n, place.column * V);
        const raw<T, 1> requested_base = request_base<T>(a, n, joining_lane(a, 0).group);
        uint32_t before = 0;
        if (threadIdx.x == 0)
            before = look_at_grid_barrier(all.grid_barriers + own.block_group * grid_barrier_stride);
        if (n == own.block_group)
            meet(PIPELINE_IS_OPEN, (int)blockDim.x);

        side_moments<T, V> found(place);
        sum_moments(a, consumer, dynamic, own, place, found);
        if (place.has_rows()) {
            entries[place.entry(a, 0)] = found.entry(0);
            if (place.split < V)
                entries[place.entry(a, 1)] = found.entry(1);
        }
        meet(MEETING_OF_CONSUMERS, consumers);

        /* ---- the statistics of the groups ---- */
        const values_of_parts counts_of(a, a.group);
        write_moments<T, V>(all, counts_of, n, own.block_group, own.part, parity, entries, of_groups, requested_base,
                            consumers);
        meet_blocks(all.grid_barriers + own.block_group * grid_barrier_stride, own.part, a.parts, before, consumers);
        join_moments<T>(all, counts_of, n, own.block_group, own.part, parity, of_groups, consumers);
        meet(MEETING_OF_CONSUMERS, consumers);

        /* ---- results ---- */
        const float4 of_first = of_groups[place.groups[0]], of_second = of_groups[place.groups[1]];
        float slope[V], offset[V];
        parameters.receive(a, slope, offset);
        const side_values means = {{of_first.x, of_second.x}, place.split};
        centre<V>(slope, offset, side_values{{of_first.y, of_second.y}, place.split},
                  side_values{{of_first.z, of_second.z}, place.split},
                  takes_half<fast, true>(a.activation) ? 0.5f : 1.0f);
        store_results<T, V>(a, consumer, dynamic, own, place, a.out + n * a.batch_bytes,
                            n + a.of.grid.block_groups >= a.n, means, slope, offset);
    }
}

/* ---- backward ---------------------------------------------------------------------------------------------------- */

/* The block's sums of channels into memory, one block's beside one another, by the producer's warp while the others
 * join those of groups; those of a next sample are added. Four channels a lane. */
__device__ __forceinline__ void write_channels(const normfuse_cuda_arguments &all, const float4 *plain,
                                               const float4 *centred, const float2 *of_groups, int channels, int lane,
                                               bool adds)
{
    const normfuse_cuda_columns &a = all.columns;
    const int quads = channels / 4;
    double2 *const to = reinterpret_cast<double2 *>(all.sums) + (int64_t)blockIdx.x * channels;
#pragma unroll 1
    for (int quad = lane; quad < quads; quad += 32) {
        float sum[4] = {}, product[4] = {};
        sum_rows(plain, centred, quad, quads, 0, a.at_once, 1, sum, product);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 of_group = of_groups[divide(4 * quad + i, a.by_group)];
            double2 pair = make_double2((double)sum[i], (double)((product[i] - of_group.x * sum[i]) * of_group.y));
            if (adds) {
                const double2 before = __ldcg(to + 4 * quad + i);
                pair.x += before.x;
                pair.y += before.y;
            }
            __stcg(to + 4 * quad + i, pair);
        }
    }
}

/* Of the block's share of the channels two after two, the next requested before these are added. By the producer's warp
 * alone, while the others write results: with all warps' help afterwards 2x2560x16x16 took 12.5 us for 15, but these
 * had their loops in another order, and 1x256x512x512 182 for 168. */
__device__ __forceinline__ void finish_channels(const normfuse_cuda_arguments &all, int channels)
{
    const int step = 2 * (int)gridDim.x;
    channel_gradients<double> now(all, channels);
    now.request(2 * (int)blockIdx.x);
#pragma unroll 1
    for (int c = 2 * (int)blockIdx.x; c < channels; c += step) {
        channel_gradients<double> next(all, channels);
        next.request(c + step);
        now.give(all, c);
        now = next;
    }
}

template <typename T, int V> __device__ __forceinline__ void grid_backward(const normfuse_cuda_arguments &all)
{
    follow_kernel();
    const normfuse_cuda_columns &a = all.columns;
    constexpr bool fast = sizeof(T) == 2;
    NORMFUSE_DYNAMIC_SHARED(dynamic);
    __shared__ pipeline_barriers barriers;
    const int consumers = (int)blockDim.x - 32, channels = a.width * V;
    pipeline_place place;
    channel_parameters<V> parameters;
    if ((int)threadIdx.x < consumers) {
        place.find(a);
        parameters.request_weights(a, place.column * V);
    }
    const grid_part own(a);
    const bool gives = all.sums != nullptr;
    /* After the pipeline: of each row and channel two sums, one after the other; two sums of each thread in a group; of
     * each group what its mean leaves out and rstd, of this sample and of the one before, and what dx takes of x - mean
     * and what else. */
    const normfuse_grid_layout at = normfuse_lay_out_grid_backward(
        2 * NORMFUSE_VECTOR_BYTES * own.stages * own.tile_vectors, a.width, channels, a.groups, a.at_once, true, gives);
    float *const of_plain = in_shared<float>(dynamic, at.plain), *const of_centred =
                                                                     in_shared<float>(dynamic, at.centred);
    float2 *const entries = in_shared<float2>(dynamic, at.entries), *const of_both =
                                                                        in_shared<float2>(dynamic, at.groups);
    float2 *const of_totals = in_shared<float2>(dynamic, at.totals);
    int parity = 0;

    if ((int)threadIdx.x >= consumers) {
        const int lane = (int)threadIdx.x - consumers;
        tile_producer<2> producer(barriers, dynamic, a.of.grid.l2_tiles);
        uint32_t *const grid_barrier = all.grid_barriers + a.of.grid.block_groups * grid_barrier_stride;
        uint32_t before = 0;
        open_pipeline(barriers, a, lane);
        if (gives && lane == 0)
            before = look_at_grid_barrier(grid_barrier);
#pragma unroll 1
        for (int n = own.block_group; n < a.n; n += a.of.grid.block_groups, parity ^= 1) {
            producer.from[0] = a.x + n * a.batch_bytes;
            producer.from[1] = a.dy + n * a.batch_bytes;
            if (lane == 0)
                producer.fill_all(own);
            __syncwarp();
            if (gives) {
                meet(SUMS_ARE_THERE, (int)blockDim.x);
                write_channels(all, reinterpret_cast<const float4 *>(of_plain),
                               reinterpret_cast<const float4 *>(of_centred), of_both + parity * a.groups, channels,
                               lane, n != own.block_group);
                __syncwarp();
                if (n + a.of.grid.block_groups < a.n)
                    announce(CHANNELS_ARE_PUT, (int)blockDim.x);
            }
            if (lane == 0)
                producer.fill_again(own);
            __syncwarp();
        }
        if (gives) {
            if (lane == 0) {
                add_release(grid_barrier, grid_barrier_share((int)blockIdx.x, (int)gridDim.x));
                await_grid_barrier(grid_barrier, before);
            }
            __syncwarp();
            finish_channels(all, channels);
        }
        return;
    }

    place.find_groups<V>(a, place.column);
    const int mean_type = type_of(a, COLUMNS_MEAN), rstd_type = type_of(a, COLUMNS_RSTD);
    const bool are_wide = min(mean_type, rstd_type) >= 0 && mean_type <= NORMFUSE_F32 && rstd_type <= NORMFUSE_F32;
    saved_statistic requested_means[2], requested_rstds[2];
    const auto request_statistics = [&](int n) {
#pragma unroll
        for (int side = 0; side < 2; side++) {
            requested_means[side].request(a.mean, n * a.mean_batch + place.groups[side], mean_type);
            requested_rstds[side].request(a.rstd, n * a.rstd_batch + place.groups[side], rstd_type);
        }
    };
    request_statistics(own.block_group);
    tile_consumer consumer(barriers);
#pragma unroll 1
    for (int n = own.block_group; n < a.n; n += a.of.grid.block_groups, parity ^= 1) {
        float2 *const of_groups = of_both + parity * a.groups;
        side_values about = {{}, place.split}, rests = about, rstds = about;
        float slope[V], offset[V];
        uint32_t before = 0;
        if (threadIdx.x == 0)
            before = look_at_grid_barrier(all.grid_barriers + own.block_group * grid_barrier_stride);
        if (n == own.block_group)
            meet(PIPELINE_IS_OPEN, (int)blockDim.x);
#pragma unroll
        for (int side = 0; side < 2; side++) {
            const int group = place.groups[side];
            double mean = requested_means[side].receive(mean_type);
            rstds.of[side] = (float)requested_rstds[side].receive(rstd_type);
            if (!are_wide) {
                mean = load_value<double>(a.mean, n * a.mean_batch + group, mean_type);
                rstds.of[side] = load_value<float>(a.rstd, n * a.rstd_batch + group, rstd_type);
            }
            split_mean<T>(mean, about.of[side], rests.of[side]);
        }
        if (place.has_rows() && place.beside == 0) {
            of_groups[place.groups[0]] = make_float2(rests.of[0], rstds.of[0]);
            of_groups[place.groups[1]] = make_float2(rests.of[1], rstds.of[1]);
        }
        parameters.receive_weights(a, slope, offset);
        const float factor = takes_half<fast, true>(a.activation) ? 0.5f : 1.0f;
        centre<V>(slope, offset, rests, rstds, factor);
        const auto differentiate = [&](auto chosen, float(&x)[V], float(&dy)[V]) {
            differentiate_channels<fast, V>(a.activation, a.act_param, chosen, about, slope, offset, x, dy);
        };

        /* ---- sums ---- */
        float first[V] = {}, second[V] = {};
        sum_gradients<T, V>(a, consumer, dynamic, own, place, differentiate, first, second);
        /* What the producer's warp reads of the sample before is not written over. */
        if (gives && n != own.block_group)
            meet(CHANNELS_ARE_PUT, (int)blockDim.x);
        if (place.has_rows())
            write_thread_sums<V>(a, place, slope, first, second, factor, gives, channels, entries, of_plain,
                                 of_centred);
        if (gives)
            announce(SUMS_ARE_THERE, (int)blockDim.x);
        meet(MEETING_OF_CONSUMERS, consumers);

        /* ---- the totals of the groups ---- */
        write_totals<V>(all, own.block_group, own.part, parity, entries, consumers);
        meet_blocks(all.grid_barriers + own.block_group * grid_barrier_stride, own.part, a.parts, before, consumers);
        join_totals(all, own.block_group, parity, of_groups, of_totals, consumers);
        meet(MEETING_OF_CONSUMERS, consumers);

        /* ---- results ---- */
        if (n + a.of.grid.block_groups < a.n)
            request_statistics(n + a.of.grid.block_groups);
        const float2 of_first = of_totals[place.groups[0]], of_second = of_totals[place.groups[1]];
        const side_values of_x = {{of_first.x, of_second.x}, place.split};
        const side_values level = {{of_first.y, of_second.y}, place.split};
        store_gradients<T, V>(a, consumer, dynamic, own, place, a.out + n * a.batch_bytes,
                              n + a.of.grid.block_groups >= a.n, differentiate, slope, of_x, level);
    }
}

#define INSTANCE(layout, schedule, direction, type, elements, vectors, threads, registers)                             \
    NORMFUSE_KERNEL(layout, schedule, direction, type, elements, vectors, registers)                                   \
    {                                                                                                                  \
        NORMFUSE_PIPELINE_BODY((grid_##direction<type, elements>(a)));                                                 \
    }
NORMFUSE_KERNELS_COLUMNS_GRID_PIPELINE(INSTANCE)
