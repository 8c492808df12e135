/* SPDX-License-Identifier: MIT
 *
 * columns_grid.cuh - norms over adjacent channels (NHWC) by the whole grid at once, a block a multiprocessor: how blocks
 * meet, and what the backwards of group norm have in common, whether vectors come through registers or a pipeline. A
 * block has consumers, which work on values, and may have one more warp for other work, the producer's. */
#ifndef NORMFUSE_CUDA_COLUMNS_GRID_CUH
#define NORMFUSE_CUDA_COLUMNS_GRID_CUH

#include "columns_parameters.cuh"
#include "gradients.cuh"

/* Barriers of a block. */
enum { SUMS_ARE_THERE = 1, MEETING_OF_CONSUMERS, PIPELINE_IS_OPEN, CHANNELS_ARE_KNOWN, CHANNELS_ARE_PUT };

/* What threads, then blocks found of a group is joined by so many lanes of a warp. */
enum { GROUP_LANES = 8 };

/* The block's threads but the last `others` share out groups: work(group, exists, lane, whether it is the lane's first
 * one), all in step. Not by share_items(): where a whole warp may leave, shuffles have a second form. */
template <int others, typename Work>
__device__ __forceinline__ void share_groups(const normfuse_cuda_columns &a, Work work)
{
    const int groups_at_once = ((int)blockDim.x - others) / GROUP_LANES;
#pragma unroll 1
    for (int round = 0; round < a.groups; round += groups_at_once) {
        const int group = round + (int)threadIdx.x / GROUP_LANES;
        const bool exists = group < a.groups;
        work(exists ? group : a.groups - 1, exists, (int)threadIdx.x % GROUP_LANES, round == 0);
    }
}

/* A consumer's place. */
struct consumer_place : thread_place {
    int vectors_at_once; /* of all threads */
    int first;           /* the thread's first vector of adjacent rows; beyond all where it has none */

    __device__ __forceinline__ void find(const normfuse_cuda_columns &a)
    {
        find_column(a);
        vectors_at_once = a.at_once * a.width;
        first = beside < a.at_once ? (int)threadIdx.x : 1 << 30;
    }
    __device__ __forceinline__ bool has_rows() const
    {
        return first < 1 << 30;
    }
};

/* A grid barrier; what it says before is requested while data arrive, and known to thread 0. */
struct grid_meeting {
    uint32_t *barrier, before = 0;

    __device__ __forceinline__ explicit grid_meeting(uint32_t *barrier) : barrier(barrier)
    {
    }
    __device__ __forceinline__ void look()
    {
        if (threadIdx.x == 0)
            before = look_at_grid_barrier(barrier);
    }
    /* The consumers of a block: the first `parts` blocks arrive, and all wait for these. */
    __device__ __forceinline__ void meet_blocks(int part, int parts, int consumers) const
    {
        meet(MEETING_OF_CONSUMERS, consumers);
        if (threadIdx.x == 0) {
            if (part < parts)
                add_release(barrier, grid_barrier_share(part, parts));
            await_grid_barrier(barrier, before);
        }
        meet(MEETING_OF_CONSUMERS, consumers);
    }
};

/* What the blocks of a sample send one another of a group, beside one another. Two such places take turns: a block may
 * write for the next sample while another still reads of this one, but not for the one after that. */
__device__ __forceinline__ float2 *parts_of_group(const normfuse_cuda_arguments &all, int block_group, int parity,
                                                  int group)
{
    const normfuse_cuda_columns &a = all.columns;
    return reinterpret_cast<float2 *>(all.partials) +
           ((int64_t)(parity * a.of.grid.block_groups + block_group) * a.groups + group) * a.parts;
}

/* Every lanes-th of `left` pairs, `apart` from one to the next, that other blocks wrote; zeros where there are no more.
 */
template <int lanes, int held>
__device__ __forceinline__ void request_parts(const float2 *from, int apart, int left, float2 (&parts)[held])
{
#pragma unroll
    for (int k = 0; k < held; k++) {
        parts[k] = make_float2(0.0f, 0.0f);
        if (k * lanes < left)
            parts[k] = __ldcg(from + (int64_t)(k * lanes) * apart);
    }
}

/* Over `lanes` lanes: the sums of `count` adjacent pairs. */
__device__ __forceinline__ float2 sum_pairs(const float2 *pairs, int count, int lane, int lanes)
{
    float2 found = make_float2(0.0f, 0.0f);
#pragma unroll 4
    for (int i = lane; i < count; i += lanes) {
        found.x += pairs[i].x;
        found.y += pairs[i].y;
    }
    return make_float2(sum_few(found.x, lanes), sum_few(found.y, lanes));
}

/* Of the kernels: bulk copies came with capability 9.0, and none is launched below. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define NORMFUSE_PIPELINE_BODY(body) __trap()
#else
#define NORMFUSE_PIPELINE_BODY(body) body
#endif

/* ---- backward: the gradients of parameters ----------------------------------------------------------------------- */

/* Two channels' pairs of `Number` of one block, as they are in memory. */
template <typename Number> struct channel_pairs {
    Number of[4] = {};

    __device__ __forceinline__ void request(const char *from, bool wanted)
    {
        if constexpr (sizeof(Number) == 4) {
            float4 four = {};
            request_where(wanted, four, from);
            of[0] = four.x;
            of[1] = four.y;
            of[2] = four.z;
            of[3] = four.w;
        } else if (wanted) {
#pragma unroll
            for (int i = 0; i < 4; i += 2) {
                const double2 two = __ldcg(reinterpret_cast<const double2 *>(from) + i / 2);
                of[i] = two.x;
                of[i + 1] = two.y;
            }
        }
    }
    __device__ __forceinline__ void store(char *to) const
    {
        if constexpr (sizeof(Number) == 4) {
            __stcg(reinterpret_cast<float4 *>(to), make_float4(of[0], of[1], of[2], of[3]));
        } else {
            __stcg(reinterpret_cast<double2 *>(to), make_double2(of[0], of[1]));
            __stcg(reinterpret_cast<double2 *>(to) + 1, make_double2(of[2], of[3]));
        }
    }
    template <typename Sum> __device__ __forceinline__ void add_to(Sum (&sums)[4]) const
    {
#pragma unroll
        for (int i = 0; i < 4; i++)
            sums[i] += (Sum)of[i];
    }
};

/* What parameters get when all blocks have put their sums of channels, pairs of `Number`: of two channels at a time, a
 * warp's, whose lanes have every 32nd block each. */
template <typename Number> struct channel_gradients {
    enum { requested_blocks = 5 };
    channel_pairs<Number> requested[requested_blocks];
    const char *from;
    int channels;

    __device__ __forceinline__ channel_gradients(const normfuse_cuda_arguments &all, int channels)
        : from(reinterpret_cast<const char *>(all.sums)), channels(channels)
    {
    }
    __device__ __forceinline__ const char *place(int block, int c) const
    {
        return from + ((int64_t)block * channels + c) * (int)(2 * sizeof(Number));
    }
    __device__ __forceinline__ void request(int c)
    {
#pragma unroll
        for (int i = 0; i < requested_blocks; i++) {
            const int block = (int)threadIdx.x % 32 + 32 * i;
            requested[i].request(place(block, c), c < channels && block < (int)gridDim.x);
        }
    }
    /* What was requested. */
    __device__ __forceinline__ void give(const normfuse_cuda_arguments &all, int c)
    {
        const int lane = (int)threadIdx.x % 32;
        double sums[4] = {};
#pragma unroll
        for (int i = 0; i < requested_blocks; i++)
            requested[i].add_to(sums);
#pragma unroll 1
        for (int block = lane + 32 * requested_blocks; block < (int)gridDim.x; block += 32) {
            channel_pairs<Number> more;
            more.request(place(block, c), true);
            more.add_to(sums);
        }
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2)
#pragma unroll
            for (int i = 0; i < 4; i++)
                sums[i] += __shfl_xor_sync(full_mask, sums[i], distance);
        /* A lane each, so that what they need of the arguments is waited for once. */
        if (lane < 4)
            write_gradient(all.problem, lane % 2 == 0 ? all.problem.dbias() : all.problem.dweight(), 0, c + lane / 2,
                           lane == 0   ? sums[0]
                           : lane == 1 ? sums[1]
                           : lane == 2 ? sums[2]
                                       : sums[3]);
    }
};

/* ---- backward of group norm -------------------------------------------------------------------------------------- */

/* What a block does of a sample but for the walks over its vectors, which come through registers or a pipeline: then
 * the next sample's statistics come early. */
template <typename T, int V, bool pipelined> struct group_backward {
    enum { OTHERS = pipelined ? 32 : 0, HELD_PARTS = 9 }; /* parts that a lane requests at once */
    const normfuse_cuda_arguments &all;
    const normfuse_cuda_columns &a;
    const consumer_place &place;
    const int block_group, part, channels;
    int parity = 0;
    const bool gives; /* parameters want gradients */
    /* In shared memory: of each row and channel two sums, one after the other; two sums of each thread in a group; of
     * each group what its mean leaves out and rstd, pipelined also of the sample before; and what dx takes of x - mean
     * and what else. */
    float *of_plain, *of_centred;
    float2 *entries, *of_both, *of_totals;
    saved_statistic requested_means[2], requested_rstds[2];

    __device__ __forceinline__ group_backward(const normfuse_cuda_arguments &all, const consumer_place &place,
                                              int block_group, int part, uint4 *dynamic, int stages)
        : all(all), a(all.columns), place(place), block_group(block_group), part(part), channels(a.width * V),
          gives(all.sums != nullptr)
    {
        const normfuse_grid_layout at =
            normfuse_lay_out_grid_backward(stages, a.width, channels, a.groups, a.at_once, pipelined, gives);
        of_plain = in_shared<float>(dynamic, at.plain);
        of_centred = in_shared<float>(dynamic, at.centred);
        entries = in_shared<float2>(dynamic, at.entries);
        of_both = in_shared<float2>(dynamic, at.groups);
        of_totals = in_shared<float2>(dynamic, at.totals);
    }
    __device__ __forceinline__ float2 *of_groups() const
    {
        return of_both + parity * a.groups;
    }
    __device__ __forceinline__ void request_statistics(int n)
    {
#pragma unroll
        for (int side = 0; side < 2; side++) {
            requested_means[side].request(a.mean, n * a.mean_batch + place.groups[side], type_of(a, COLUMNS_MEAN));
            requested_rstds[side].request(a.rstd, n * a.rstd_batch + place.groups[side], type_of(a, COLUMNS_RSTD));
        }
    }
    __device__ __forceinline__ void receive_statistics(int n, side_values &about, side_values &rests,
                                                       side_values &rstds) const
    {
        const int mean_type = type_of(a, COLUMNS_MEAN), rstd_type = type_of(a, COLUMNS_RSTD);
        about.split = rests.split = rstds.split = place.split;
#pragma unroll
        for (int side = 0; side < 2; side++) {
            double mean = requested_means[side].receive(mean_type);
            rstds.of[side] = (float)requested_rstds[side].receive(rstd_type);
            if (pipelined && (mean_type > NORMFUSE_F32 || rstd_type > NORMFUSE_F32)) {
                mean = load_value<double>(a.mean, n * a.mean_batch + place.groups[side], mean_type);
                rstds.of[side] = load_value<float>(a.rstd, n * a.rstd_batch + place.groups[side], rstd_type);
            }
            split_mean<T>(mean, about.of[side], rests.of[side]);
        }
        if (place.has_rows() && place.beside == 0) {
            of_groups()[place.groups[0]] = make_float2(rests.of[0], rstds.of[0]);
            of_groups()[place.groups[1]] = make_float2(rests.of[1], rstds.of[1]);
        }
    }
    /* What the thread found, for the block. */
    __device__ __forceinline__ void write_sums(const float (&slope)[V], float (&first)[V], float (&second)[V],
                                               float factor) const
    {
        if (place.has_rows())
            write_thread_sums<V>(a, place, slope, first, second, factor, gives, channels, entries, of_plain,
                                 of_centred);
    }
    /* What the block's threads found, of each group, into memory. */
    __device__ __forceinline__ void write_totals() const
    {
        share_groups<OTHERS>(a, [&](int group, bool exists, int lane, bool) {
            int begin, count;
            entries_of_group<V>(a, group, begin, count);
            const float2 found = sum_pairs(entries + begin, count, lane, GROUP_LANES);
            if (exists && lane == 0)
                __stcg(parts_of_group(all, block_group, parity, group) + part, found);
        });
    }
    /* What all blocks of the sample found, into what dx takes. */
    __device__ __forceinline__ void join_totals() const
    {
        share_groups<OTHERS>(a, [&](int group, bool exists, int lane, bool) {
            const float2 *const of_parts = parts_of_group(all, block_group, parity, group);
            float sum = 0.0f, product = 0.0f;
#pragma unroll 1
            for (int i = lane; i < a.parts; i += HELD_PARTS * GROUP_LANES) {
                float2 found[HELD_PARTS], of_round = make_float2(0.0f, 0.0f);
                request_parts<GROUP_LANES>(of_parts + i, 1, a.parts - i, found);
#pragma unroll
                for (int k = 0; k < HELD_PARTS; k++) {
                    of_round.x += found[k].x;
                    of_round.y += found[k].y;
                }
                sum += of_round.x;
                product += of_round.y;
            }
            sum = sum_few(sum, GROUP_LANES);
            product = sum_few(product, GROUP_LANES);
            if (exists && lane == 0) {
                const float2 of_group = of_groups()[group];
                product -= of_group.x * sum;
                const float centred = -(product * of_group.y) * (of_group.y * a.share);
                of_totals[group] = make_float2(centred, -sum * a.share - centred * of_group.x);
            }
        });
    }
    __device__ __forceinline__ void totals(side_values &of_x, side_values &level) const
    {
        const float2 of_first = of_totals[place.groups[0]], of_second = of_totals[place.groups[1]];
        of_x = {{of_first.x, of_second.x}, place.split};
        level = {{of_first.y, of_second.y}, place.split};
    }
    /* The block's sums of channels into memory, one block's beside one another: every step-th four from the first-th
     * on. `adds`: to what is there. */
    template <typename Number> __device__ __forceinline__ void write_channels(int first, int step, bool adds) const
    {
        const int quads = channels / 4;
#pragma unroll 1
        for (int quad = first; quad < quads; quad += step) {
            char *const to =
                reinterpret_cast<char *>(all.sums) + ((int64_t)blockIdx.x * quads + quad) * (int)(8 * sizeof(Number));
            float sum[4] = {}, product[4] = {};
            sum_rows(reinterpret_cast<const float4 *>(of_plain), reinterpret_cast<const float4 *>(of_centred), quad,
                     quads, 0, a.at_once, 1, sum, product);
            channel_pairs<Number> pairs[2];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float2 of_group = of_groups()[divide(4 * quad + i, a.by_group)];
                pairs[i / 2].of[i % 2 * 2] = (Number)sum[i];
                pairs[i / 2].of[i % 2 * 2 + 1] = (Number)((product[i] - of_group.x * sum[i]) * of_group.y);
            }
            if (adds) {
                channel_pairs<Number> before[2];
                for (int i = 0; i < 2; i++)
                    before[i].request(to + i * (int)sizeof before[i], true);
                for (int i = 0; i < 2; i++)
                    before[i].add_to(pairs[i].of);
            }
            for (int i = 0; i < 2; i++)
                pairs[i].store(to + i * (int)sizeof pairs[i]);
        }
    }
};

#endif
