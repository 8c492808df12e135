/* SPDX-License-Identifier: MIT
 *
 * columns_grid_pipeline.cu - group norm over adjacent channels (NHWC) by the whole grid at once. A block has adjacent
 * rows of a sample, which are adjacent in memory: one thread requests tiles of them by bulk copies into a pipeline in
 * shared memory, the others sum what arrives. All blocks of a sample send one another their sums through memory, then
 * write results from what the pipeline still holds and, of samples larger than the chip, from tiles that are read
 * again, the last first, since those are in L2. Copies by one thread leave the others nothing but the work on values:
 * by a load or a copy a vector, sums were bound by the unit that takes these. The first tiles of the next sample are on
 * their way while results of this one are written. */
#include "pipeline.cuh"

/* ---- forward ----------------------------------------------------------------------------------------------------- */

/* Of what a lane joins, how much it requests at once. */
enum { HELD_PARTS = 9, HELD_SUMS = 4 };

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
                                              int n, const grid_part &own, int parity, const float4 *entries,
                                              float4 *of_groups, raw<T, 1> requested_base)
{
    const normfuse_cuda_columns &a = all.columns;
    share_groups<32>(a, [&](int group, bool exists, int lane, bool is_first) {
        const float base = receive_base<T>(is_first ? requested_base : request_base<T>(a, n, group));
        int begin, count;
        entries_of_group<V>(a, group, begin, count);
        const float2 found =
            join_entries<HELD_SUMS>(entries + begin, lane, count, GROUP_LANES, base, counts_of.part(a, own.part));
        if (exists && lane == 0) {
            __stcg(parts_of_group(all, own.block_group, parity, group) + own.part, found);
            of_groups[group].x = base;
        }
    });
}

/* What all blocks of the sample found, into what results need of each group: its mean, what that leaves out, rstd. */
template <typename T>
__device__ __forceinline__ void join_moments(const normfuse_cuda_arguments &all, const values_of_parts &counts_of,
                                             int n, const grid_part &own, int parity, float4 *of_groups)
{
    const normfuse_cuda_columns &a = all.columns;
    share_groups<32>(a, [&](int group, bool exists, int lane, bool) {
        /* Not from x, in whose place another block may have put results by now. */
        const float base = of_groups[group].x;
        const float2 *const of_parts = parts_of_group(all, own.block_group, parity, group);
        const float2 last = __ldcg(of_parts + a.of.grid.first_parts - 1);
        moments<float> joined = {};
#pragma unroll 1
        for (int left = a.parts - lane; left > 0; left -= HELD_PARTS * GROUP_LANES) {
            float2 found[HELD_PARTS];
            request_parts<GROUP_LANES>(of_parts + (a.parts - left), 1, left, found);
            append_parts(joined, found, [&](int k) {
                const int behind = left - k * GROUP_LANES; /* parts from this one on */
                return behind <= 0 ? 0.0f : behind > a.parts - a.of.grid.first_parts ? counts_of.first : counts_of.other;
            });
        }
        const float mean = (sum_few(joined.count * joined.mean, GROUP_LANES) - counts_of.lacking * last.x) * a.share;
        const float distance = joined.mean - mean, of_last = last.x - mean;
        const float squares = sum_few(joined.squares + joined.count * distance * distance, GROUP_LANES) -
                              counts_of.lacking * of_last * of_last;
        const float rstd = inverse_root(squares * a.share + a.eps);
        if (exists && lane == 0) {
            float rounded, rest;
            split_sum<T>(base, mean, rounded, rest);
            of_groups[group] = make_float4(rounded, rest, rstd, 0.0f);
            if (own.part == 0)
                store_group(a, n, group, (double)base + (double)mean, rstd);
        }
    });
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
    consumer_place place;
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
        tile_producer<1> producer(a, barriers, dynamic, own, (int)threadIdx.x - consumers);
        if ((int)threadIdx.x == consumers) {
#pragma unroll 1
            for (int n = own.block_group; n < a.n; n += a.of.grid.block_groups) {
                producer.fill_all(n);
                producer.fill_again();
            }
        }
        return;
    }

    place.find_groups<V>(a, place.column);
    tile_consumer consumer(a, barriers, dynamic, own, place);
    grid_meeting meeting(all.grid_barriers + own.block_group * grid_barrier_stride);
    int parity = 0;
#pragma unroll 1
    for (int n = own.block_group; n < a.n; n += a.of.grid.block_groups, parity ^= 1) {
        parameters.request_modulation(a, n, place.column * V);
        const raw<T, 1> requested_base = request_base<T>(a, n, min((int)threadIdx.x / GROUP_LANES, a.groups - 1));
        meeting.look();
        if (n == own.block_group)
            meet(PIPELINE_IS_OPEN, (int)blockDim.x);

        side_moments<T, V> found(place);
        consumer.sum_moments(found);
        if (place.has_rows()) {
            entries[place.entry(a, 0)] = found.entry(0);
            if (place.split < V)
                entries[place.entry(a, 1)] = found.entry(1);
        }
        meet(MEETING_OF_CONSUMERS, consumers);

        /* ---- the statistics of the groups ---- */
        const values_of_parts counts_of(a, a.group);
        write_moments<T, V>(all, counts_of, n, own, parity, entries, of_groups, requested_base);
        meeting.meet_blocks(own.part, a.parts, consumers);
        join_moments<T>(all, counts_of, n, own, parity, of_groups);
        meet(MEETING_OF_CONSUMERS, consumers);

        /* ---- results ---- */
        const float4 of_first = of_groups[place.groups[0]], of_second = of_groups[place.groups[1]];
        float slope[V], offset[V];
        parameters.receive(a, slope, offset);
        const side_values means = {{of_first.x, of_second.x}, place.split};
        centre<V>(slope, offset, side_values{{of_first.y, of_second.y}, place.split},
                  side_values{{of_first.z, of_second.z}, place.split},
                  takes_half<fast, true>(a.activation) ? 0.5f : 1.0f);
        consumer.store_results<T, V>(a.out + n * a.batch_bytes, n + a.of.grid.block_groups >= a.n, means, slope,
                                     offset);
    }
}

/* ---- backward ---------------------------------------------------------------------------------------------------- */

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
    const int consumers = (int)blockDim.x - 32;
    consumer_place place;
    channel_parameters<V> parameters;
    if ((int)threadIdx.x < consumers) {
        place.find(a);
        parameters.request_weights(a, place.column * V);
    }
    const grid_part own(a);
    group_backward<T, V, true> group(all, place, own.block_group, own.part, dynamic,
                                     2 * NORMFUSE_VECTOR_BYTES * own.stages * own.tile_vectors);
    if ((int)threadIdx.x >= consumers) {
        const int lane = (int)threadIdx.x - consumers;
        tile_producer<2> producer(a, barriers, dynamic, own, lane);
        uint32_t *const grid_barrier = all.grid_barriers + a.of.grid.block_groups * grid_barrier_stride;
        uint32_t before = 0;
        if (group.gives && lane == 0)
            before = look_at_grid_barrier(grid_barrier);
#pragma unroll 1
        for (int n = own.block_group; n < a.n; n += a.of.grid.block_groups, group.parity ^= 1) {
            if (lane == 0)
                producer.fill_all(n);
            __syncwarp();
            if (group.gives) {
                /* While the others join the sums of groups. */
                meet(SUMS_ARE_THERE, (int)blockDim.x);
                group.template write_channels<double>(lane, 32, n != own.block_group);
                __syncwarp();
                if (n + a.of.grid.block_groups < a.n)
                    announce(CHANNELS_ARE_PUT, (int)blockDim.x);
            }
            if (lane == 0)
                producer.fill_again();
            __syncwarp();
        }
        if (group.gives) {
            if (lane == 0) {
                add_release(grid_barrier, grid_barrier_share((int)blockIdx.x, (int)gridDim.x));
                await_grid_barrier(grid_barrier, before);
            }
            __syncwarp();
            finish_channels(all, group.channels);
        }
        return;
    }

    place.find_groups<V>(a, place.column);
    group.request_statistics(own.block_group);
    tile_consumer consumer(a, barriers, dynamic, own, place);
    grid_meeting meeting(all.grid_barriers + own.block_group * grid_barrier_stride);
#pragma unroll 1
    for (int n = own.block_group; n < a.n; n += a.of.grid.block_groups, group.parity ^= 1) {
        const bool is_first = n == own.block_group, is_last = n + a.of.grid.block_groups >= a.n;
        side_values about, rests, rstds, of_x, level;
        float slope[V], offset[V];
        meeting.look();
        if (is_first)
            meet(PIPELINE_IS_OPEN, (int)blockDim.x);
        group.receive_statistics(n, about, rests, rstds);
        parameters.receive_weights(a, slope, offset);
        const float factor = takes_half<fast, true>(a.activation) ? 0.5f : 1.0f;
        centre<V>(slope, offset, rests, rstds, factor);
        const auto differentiate = [&](auto chosen, const uint4 &x_vector, const uint4 &dy_vector, float(&x)[V],
                                       float(&dy)[V]) {
            unpack<T, V>(x_vector, x);
            unpack<T, V>(dy_vector, dy);
            differentiate_channels<fast, V>(a.activation, a.act_param, chosen, about, slope, offset, x, dy);
        };

        /* ---- sums ---- */
        float first[V] = {}, second[V] = {};
        consumer.sum_gradients(differentiate, first, second);
        /* What the producer's warp reads of the sample before is not written over. */
        if (group.gives && !is_first)
            meet(CHANNELS_ARE_PUT, (int)blockDim.x);
        group.write_sums(slope, first, second, factor);
        if (group.gives)
            announce(SUMS_ARE_THERE, (int)blockDim.x);
        meet(MEETING_OF_CONSUMERS, consumers);

        /* ---- the totals of the groups ---- */
        group.write_totals();
        meeting.meet_blocks(own.part, a.parts, consumers);
        group.join_totals();
        meet(MEETING_OF_CONSUMERS, consumers);

        /* ---- results ---- */
        if (!is_last)
            group.request_statistics(n + a.of.grid.block_groups);
        group.totals(of_x, level);
        consumer.store_gradients<T, V>(a.out + n * a.batch_bytes, is_last, differentiate, slope, of_x, level);
    }
}

#define INSTANCE(layout, schedule, direction, type, elements, vectors, threads, registers)                             \
    NORMFUSE_KERNEL(layout, schedule, direction, type, elements, vectors, registers)                                   \
    {                                                                                                                  \
        NORMFUSE_PIPELINE_BODY((grid_##direction<type, elements>(a)));                                                 \
    }
NORMFUSE_KERNELS_COLUMNS_GRID_PIPELINE(INSTANCE)
