/* SPDX-License-Identifier: MIT
 *
 * columns_grid.cu - group norm over adjacent channels (NHWC) by the whole grid at once. A block has adjacent rows of a
 * sample. All blocks of a sample send one another their sums through memory, then write results.
 *
 * A block's rows are adjacent in memory, and one thread requests tiles of them by bulk copies into a
 * pipeline in shared memory, the others sum what arrives. They write results from what the pipeline still holds and, of
 * samples larger than the chip, from tiles that are read again, the last first, since those are in L2. Copies by one
 * thread leave the others nothing but the work on values: by a load or a copy a vector, sums were bound by the unit
 * that takes these. The first tiles of the next sample are on their way while results of this one are written. */
#include "pipeline.cuh"

/* What threads, then blocks found of a group is joined by so many lanes of a warp. */
enum { GROUP_LANES = 8 };

/* The consumers share out groups: work(group, exists, lane, whether it is the lane's first one), all in step. Not by
 * share_items(): where a whole warp may leave, shuffles have a second form. */
template <typename Work> __device__ __forceinline__ void share_groups(const normfuse_cuda_columns &a, Work work)
{
    const int groups_at_once = ((int)blockDim.x - 32) / GROUP_LANES;
#pragma unroll 1
    for (int round = 0; round < a.groups; round += groups_at_once) {
        const int group = round + (int)threadIdx.x / GROUP_LANES;
        const bool exists = group < a.groups;
        work(exists ? group : a.groups - 1, exists, (int)threadIdx.x % GROUP_LANES, round == 0);
    }
}

/* What the blocks of a sample send one another of a group, beside one another. Two such places take turns: a block may
 * write for the next sample while another still reads of this one, but not for the one after that. */
__device__ __forceinline__ float2 *parts_of_group(const normfuse_cuda_arguments &all, int block_group, int parity,
                                                  int group)
{
    const normfuse_cuda_columns &a = all.columns;
    return reinterpret_cast<float2 *>(all.partials) +
           ((int64_t)(parity * a.of.grid.block_groups + block_group) * a.groups + group) * a.parts;
}

/* Of what a lane joins, how much it requests at once. */
enum { HELD_PARTS = 9, HELD_SUMS = 4 };

/* ---- forward ----------------------------------------------------------------------------------------------------- */

template <typename T, int V, int, normfuse_cuda_schedule schedule>
__device__ __forceinline__ void columns_forward(const normfuse_cuda_arguments &all)
{
    follow_kernel();
    const normfuse_cuda_columns &a = all.columns;
    NORMFUSE_DYNAMIC_SHARED(dynamic);
    __shared__ pipeline_barriers barriers;
    const int consumers = (int)blockDim.x - 32;
    thread_place place;
    channel_parameters<V> parameters = {};
    if ((int)threadIdx.x < consumers) {
        place.find(a);
        parameters.request_weights(a, place.column * V);
    }
    const grid_part own(a);
    /* After the pipeline: of each thread in a group a value that it sums about, its mean less that, squares about the
     * mean, and how many values these are; then what results need of each group. */
    const normfuse_grid_layout at = normfuse_lay_out_grid(NORMFUSE_VECTOR_BYTES * own.stages * own.tile_vectors,
                                                          a.width, a.groups, a.at_once, 0, false);
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
    consumer_for<1, schedule> consumer(all, barriers, dynamic, own, place);
    int parity = 0;
#pragma unroll 1
    for (int n = own.block_group; n < a.n; n += a.of.grid.block_groups, parity ^= 1) {
        parameters.request_modulation(a, n, place.column * V);
        /* A value of each group that all blocks know: its first. */
        const auto request_base = [&](int group) {
            return load_vector<T, 1>(a.x + n * a.batch_bytes, group * a.group);
        };
        const raw<T, 1> requested_base = request_base(min((int)threadIdx.x / GROUP_LANES, a.groups - 1));
        const grid_meeting meeting(all.grid_barriers + own.block_group * grid_barrier_stride);
        if (n == own.block_group)
            meet(PIPELINE_IS_OPEN, (int)blockDim.x);

        side_moments<T, V> found = {place, {{}, place.split}};
        consumer.begin(n);
        consumer.sum_moments(found);
        if (place.has_rows(a)) {
            entries[place.entry(a, 0)] = found.entry(0, found.found[0]);
            if (place.split < V)
                entries[place.entry(a, 1)] = found.entry(1, found.found[1]);
        }
        meet(MEETING_OF_CONSUMERS, consumers);

        /* ---- of the block: means less the group's base, which is kept, then squares about them, which cannot cancel
         */
        const values_of_parts counts_of(a, a.group);
        share_groups(a, [&](int group, bool exists, int lane, bool is_first) {
            float base[1];
            unpack<T, 1>(is_first ? requested_base : request_base(group), base);
            int begin, count;
            entries_of_group<V>(a, group, begin, count);
            const float2 found = join_entries<HELD_SUMS>(entries + begin, lane, count, GROUP_LANES, base[0],
                                                         counts_of.part(a, own.part));
            if (exists && lane == 0) {
                __stcg(parts_of_group(all, own.block_group, parity, group) + own.part, found);
                of_groups[group].x = base[0];
            }
        });
        meeting.meet_blocks(own.part, a.parts, consumers);

        /* ---- of all blocks: what results need of each group, its mean, what that leaves out, rstd ---- */
        share_groups(a, [&](int group, bool exists, int lane, bool) {
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
                    return behind <= 0                                ? 0.0f
                           : behind > a.parts - a.of.grid.first_parts ? counts_of.first
                                                                      : counts_of.other;
                });
            }
            const float mean =
                (sum_few(joined.count * joined.mean, GROUP_LANES) - counts_of.lacking * last.x) * a.share;
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
        meet(MEETING_OF_CONSUMERS, consumers);

        /* ---- results ---- */
        const float4 of_first = of_groups[place.groups[0]], of_second = of_groups[place.groups[1]];
        const side_values means = {{of_first.x, of_second.x}, place.split},
                          rests = {{of_first.y, of_second.y}, place.split},
                          rstds = {{of_first.z, of_second.z}, place.split};
        store_results<T, V>(a, consumer, parameters, means, rests, rstds, a.out + n * a.batch_bytes,
                            n + a.of.grid.block_groups >= a.n);
    }
}

/* ---- backward: what blocks exchange ------------------------------------------------------------------------------ */

/* Two channels' pairs of one block, as they are in memory. */
struct channel_pairs {
    double of[4] = {};

    __device__ __forceinline__ void request(const char *from, bool wanted)
    {
        if (wanted)
#pragma unroll
            for (int i = 0; i < 4; i += 2) {
                const double2 two = __ldcg(reinterpret_cast<const double2 *>(from) + i / 2);
                of[i] = two.x;
                of[i + 1] = two.y;
            }
    }
    __device__ __forceinline__ void store(char *to) const
    {
        __stcg(reinterpret_cast<double2 *>(to), make_double2(of[0], of[1]));
        __stcg(reinterpret_cast<double2 *>(to) + 1, make_double2(of[2], of[3]));
    }
    __device__ __forceinline__ void add_to(double (&sums)[4]) const
    {
        each<4>([&](int i) { sums[i] += of[i]; });
    }
};

/* What parameters get when all blocks have put their sums of channels: of two channels at a time, one warp of each
 * block, whose lanes have every 32nd block each. */
struct channel_gradients {
    enum { requested_blocks = 5 };
    channel_pairs requested[requested_blocks];
    const normfuse_cuda_arguments *all;
    int channels, step, c;

    __device__ __forceinline__ channel_gradients(const normfuse_cuda_arguments &all, int channels)
        : all(&all), channels(channels), step(2 * (int)gridDim.x), c(2 * (int)blockIdx.x)
    {
    }
    __device__ __forceinline__ const char *place(int block) const
    {
        return reinterpret_cast<const char *>(all->sums) + ((int64_t)block * channels + c) * (int)(2 * sizeof(double));
    }
    __device__ __forceinline__ void request()
    {
        each<requested_blocks>([&](int i) {
            const int block = (int)threadIdx.x % 32 + 32 * i;
            requested[i].request(place(block), c < channels && block < (int)gridDim.x);
        });
    }
    /* All of the warp's channels, the next requested before these are added. */
    __device__ __forceinline__ void give()
    {
#pragma unroll 1
        while (c < channels) {
            channel_gradients next = *this;
            next.c += step;
            if (next.c < channels)
                next.request();
            const int lane = (int)threadIdx.x % 32;
            double sums[4] = {};
            each<requested_blocks>([&](int i) { requested[i].add_to(sums); });
#pragma unroll 1
            for (int block = lane + 32 * requested_blocks; block < (int)gridDim.x; block += 32) {
                channel_pairs more;
                more.request(place(block), true);
                more.add_to(sums);
            }
#pragma unroll
            for (int distance = 16; distance > 0; distance /= 2)
                each<4>([&](int i) { sums[i] += __shfl_xor_sync(full_mask, sums[i], distance); });
            /* A lane each, so that what they need of the arguments is waited for once. */
            if (lane < 4)
                write_gradient(all->problem, lane % 2 == 0 ? all->problem.dbias() : all->problem.dweight(), 0,
                               c + lane / 2,
                               lane == 0   ? sums[0]
                               : lane == 1 ? sums[1]
                               : lane == 2 ? sums[2]
                                           : sums[3]);
            *this = next;
        }
    }
};

/* In shared memory: of each row and channel two sums, one after the other; two sums of each thread in a group; of each
 * group what its mean leaves out and rstd, of a pipeline of this sample and of the one before; and what dx takes of
 * x - mean and what else. */
struct backward_sums : block_sums {
    float2 *groups, *totals;
};

/* The block's sums of channels into memory, one block's beside one another, by a warp. `adds`: to what is there. */
__device__ __forceinline__ void write_channels(const normfuse_cuda_arguments &all, const backward_sums &sums,
                                               const float2 *of_groups, int channels, int lane, bool adds)
{
    const normfuse_cuda_columns &a = all.columns;
    const int quads = channels / 4;
#pragma unroll 1
    for (int quad = lane; quad < quads; quad += 32) {
        char *const to =
            reinterpret_cast<char *>(all.sums) + ((int64_t)blockIdx.x * quads + quad) * (int)(8 * sizeof(double));
        float sum[4] = {}, product[4] = {};
        sum_rows(sums, quad, quads, 0, a.at_once, 1, sum, product);
        channel_pairs pairs[2];
        each<4>([&](int i) {
            const float2 of_group = of_groups[divide(4 * quad + i, a.by_group)];
            pairs[i / 2].of[i % 2 * 2] = (double)sum[i];
            pairs[i / 2].of[i % 2 * 2 + 1] = (double)((product[i] - of_group.x * sum[i]) * of_group.y);
        });
        each<2>([&](int i) {
            char *const to_pair = to + i * (int)sizeof pairs[i];
            if (adds) {
                channel_pairs before;
                before.request(to_pair, true);
                before.add_to(pairs[i].of);
            }
            pairs[i].store(to_pair);
        });
    }
}

/* ---- backward ---------------------------------------------------------------------------------------------------- */

/* The producer's warp: tiles, and the block's sums of channels while the others join those of groups; then what the
 * parameters get, alone, while the others write results: with all warps' help afterwards 2x2560x16x16 took 12.5 us for
 * 15, but these had their loops in another order, and 1x256x512x512 182 for 168. */
template <bool adds>
__device__ __forceinline__ void produce_backward(const normfuse_cuda_arguments &all, pipeline_barriers &barriers,
                                                 uint4 *dynamic, const grid_part &own, const backward_sums &sums,
                                                 int channels)
{
    const normfuse_cuda_columns &a = all.columns;
    const bool gives = all.sums != nullptr;
    const int lane = (int)threadIdx.x % 32;
    tile_producer<2> producer(a, barriers, dynamic, own, lane);
    uint32_t *const grid_barrier = all.grid_barriers + a.of.grid.block_groups * grid_barrier_stride;
    uint32_t before = 0;
    int parity = 0;
    if (gives && lane == 0)
        before = look_at_grid_barrier(grid_barrier);
#pragma unroll 1
    for (int n = own.block_group; n < a.n; n += a.of.grid.block_groups, parity ^= 1) {
        if (lane == 0)
            producer.fill_all(n);
        __syncwarp();
        if (gives) {
            meet(SUMS_ARE_THERE, (int)blockDim.x);
            write_channels(all, sums, sums.groups + parity * a.groups, channels, lane, n != own.block_group);
            __syncwarp();
            if (n + a.of.grid.block_groups < a.n)
                announce(CHANNELS_ARE_PUT, (int)blockDim.x);
        }
        if (lane == 0)
            producer.fill_again(
                adds && goes_on_from_dz(all.problem, own) ? all.problem.dpost_add().data + n * a.batch_bytes : nullptr);
        __syncwarp();
    }
    if (gives) {
        if (lane == 0) {
            add_release(grid_barrier, grid_barrier_share((int)blockIdx.x, (int)gridDim.x));
            await_grid_barrier(grid_barrier, before);
        }
        __syncwarp();
        channel_gradients gradients(all, channels);
        gradients.request();
        gradients.give();
    }
}

template <typename T, int V, int, normfuse_cuda_schedule schedule>
__device__ __forceinline__ void columns_backward(const normfuse_cuda_arguments &all)
{
    follow_kernel();
    const normfuse_cuda_columns &a = all.columns;
    NORMFUSE_DYNAMIC_SHARED(dynamic);
    __shared__ pipeline_barriers barriers;
    const int consumers = (int)blockDim.x - 32, channels = a.width * V;
    const bool gives = all.sums != nullptr;
    thread_place place;
    channel_parameters<V, false> parameters;
    if ((int)threadIdx.x < consumers) {
        place.find(a);
        parameters.request_weights(a, place.column * V);
    }
    const grid_part own(a);
    const normfuse_grid_layout at = normfuse_lay_out_grid(2 * NORMFUSE_VECTOR_BYTES * own.stages * own.tile_vectors,
                                                          a.width, a.groups, a.at_once, gives ? channels : 0, true);
    const backward_sums sums = {{in_shared<float2>(dynamic, at.entries), in_shared<float>(dynamic, at.plain),
                                 in_shared<float>(dynamic, at.centred)},
                                in_shared<float2>(dynamic, at.groups),
                                in_shared<float2>(dynamic, at.totals)};
    if ((int)threadIdx.x >= consumers) {
        produce_backward<adds_to_tiles<schedule>>(all, barriers, dynamic, own, sums, channels);
        return;
    }

    place.find_groups<V>(a, place.column);
    const int mean_type = type_of(a, COLUMNS_MEAN), rstd_type = type_of(a, COLUMNS_RSTD);
    saved_statistic requested_means[2], requested_rstds[2];
    const auto request_statistics = [&](int n) {
        each<2>([&](int side) {
            requested_means[side].request(a.mean, n * a.mean_batch + place.groups[side], mean_type);
            requested_rstds[side].request(a.rstd, n * a.rstd_batch + place.groups[side], rstd_type);
        });
    };
    request_statistics(own.block_group);
    consumer_for<2, schedule> consumer(all, barriers, dynamic, own, place);
    int parity = 0;
#pragma unroll 1
    for (int n = own.block_group; n < a.n; n += a.of.grid.block_groups, parity ^= 1) {
        const bool is_first = n == own.block_group, is_last = n + a.of.grid.block_groups >= a.n;
        consumer.begin(n);
        float2 *const of_groups = sums.groups + parity * a.groups;
        side_values means = {{}, place.split}, rests = means, rstds = means;
        const grid_meeting meeting(all.grid_barriers + own.block_group * grid_barrier_stride);
        if (is_first)
            meet(PIPELINE_IS_OPEN, (int)blockDim.x);
        each<2>([&](int side) {
            double mean = requested_means[side].receive(mean_type);
            rstds.of[side] = (float)requested_rstds[side].receive(rstd_type);
            if (mean_type > NORMFUSE_F32 || rstd_type > NORMFUSE_F32) {
                mean = load_value<double>(a.mean, n * a.mean_batch + place.groups[side], mean_type);
                rstds.of[side] = load_value<float>(a.rstd, n * a.rstd_batch + place.groups[side], rstd_type);
            }
            split_mean<T>(mean, means.of[side], rests.of[side]);
        });
        if (place.has_rows(a) && place.beside == 0) {
            of_groups[place.groups[0]] = make_float2(rests.of[0], rstds.of[0]);
            of_groups[place.groups[1]] = make_float2(rests.of[1], rstds.of[1]);
        }
        const auto join = [&](auto &slope, auto &first, auto &second, float factor, auto &of_x, auto &level) {
            /* What the producer's warp reads of the sample before is not written over. */
            if (gives && !is_first)
                meet(CHANNELS_ARE_PUT, (int)blockDim.x);
            if (place.has_rows(a))
                write_thread_sums<V>(a, place, slope, first, second, factor, gives, sums);
            if (gives)
                announce(SUMS_ARE_THERE, (int)blockDim.x);
            meet(MEETING_OF_CONSUMERS, consumers);

            /* ---- the totals of the groups ---- */
            share_groups(a, [&](int group, bool exists, int lane, bool) {
                int begin, count;
                entries_of_group<V>(a, group, begin, count);
                const float2 found =
                    sum_pairs<4>(count, lane, GROUP_LANES, [&](int i) { return sums.entries[begin + i]; });
                if (exists && lane == 0)
                    __stcg(parts_of_group(all, own.block_group, parity, group) + own.part, found);
            });
            meeting.meet_blocks(own.part, a.parts, consumers);
            /* ---- of all blocks: what dx takes ---- */
            share_groups(a, [&](int group, bool exists, int lane, bool) {
                const float2 *const of_parts = parts_of_group(all, own.block_group, parity, group);
                float sum = 0.0f, product = 0.0f;
#pragma unroll 1
                for (int i = lane; i < a.parts; i += HELD_PARTS * GROUP_LANES) {
                    float2 found[HELD_PARTS], of_round = make_float2(0.0f, 0.0f);
                    request_parts<GROUP_LANES>(of_parts + i, 1, a.parts - i, found);
                    each<HELD_PARTS>([&](int k) {
                        of_round.x += found[k].x;
                        of_round.y += found[k].y;
                    });
                    sum += of_round.x;
                    product += of_round.y;
                }
                sum = sum_few(sum, GROUP_LANES);
                product = sum_few(product, GROUP_LANES);
                if (exists && lane == 0) {
                    const float2 of_group = of_groups[group];
                    sums.totals[group] = gradient_of_group(sum, product, of_group.x, of_group.y, a.share);
                }
            });
            meet(MEETING_OF_CONSUMERS, consumers);
            if (!is_last)
                request_statistics(n + a.of.grid.block_groups);
            const float2 *const totals = sums.totals;
            of_x = {{totals[place.groups[0]].x, totals[place.groups[1]].x}, place.split};
            level = {{totals[place.groups[0]].y, totals[place.groups[1]].y}, place.split};
            return true;
        };
        store_gradients<T, V>(a, consumer, parameters, means, rests, rstds, a.out + n * a.batch_bytes, is_last, join);
    }
}

NORMFUSE_KERNELS_COLUMNS_GRID_PIPELINE(NORMFUSE_PIPELINE_INSTANCE)
