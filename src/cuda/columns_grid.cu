/* SPDX-License-Identifier: MIT
 *
 * columns_grid.cu - group norm over adjacent channels (NHWC) by the whole grid at once. A block has adjacent rows of a
 * sample, which are adjacent in memory: one thread asks for tiles of them by bulk copies into a ring in shared memory,
 * the others sum what arrives. All blocks of a sample tell one another their sums through memory, then write results
 * from what the ring still holds and, of samples larger than the chip, from tiles that are read again, the last first,
 * since those are in L2. Copies by one thread leave the others nothing but the work on values: by a load or a copy a
 * pack, sums were bound by the unit that takes these. The first tiles of the next sample are on their way while results
 * of this one are written. */
#include "gradients.cuh"
#include "ring.cuh"

struct grid_place : ring_place {
    int groups[2], split; /* that of its first `split` channels, and of the others */

    template <int V> __device__ __forceinline__ void find_groups(const normfuse_cuda_compact &a)
    {
        groups[0] = divide(column * V, a.by_group);
        split = min(V, (groups[0] + 1) * a.group - column * V);
        groups[1] = min(groups[0] + 1, a.groups - 1);
    }
    /* In shared memory each group has the sums of its packs beside one another. A pack of two groups has a place in
     * both, so every group begins one pack further on than its first. */
    __device__ __forceinline__ int entry(const normfuse_cuda_compact &a, int side) const
    {
        return (column + groups[side] + (side == 1 && groups[1] == groups[0] ? 1 : 0)) * a.at_once + beside;
    }
};

/* What threads, then blocks found of a group is joined by eight lanes; a warp does four groups at a time, those of the
 * whole block as many as it has threads for. */
constexpr int lanes_of_group = 8;

struct joining_lane {
    int group, lane;
    bool is_needed; /* whether there is such a group: whole warps go on */

    __device__ __forceinline__ joining_lane(const normfuse_cuda_compact &a, int round)
    {
        const int nth = round + (int)threadIdx.x / lanes_of_group;
        is_needed = nth < a.groups;
        group = is_needed ? nth : a.groups - 1;
        lane = (int)threadIdx.x % lanes_of_group;
    }
    __device__ __forceinline__ bool is_first() const
    {
        return is_needed && lane == 0;
    }
    template <int V>
    __device__ __forceinline__ void find_entries(const normfuse_cuda_compact &a, int &begin, int &count) const
    {
        const int channel = group * a.group, pack = channel / V;
        begin = (pack + group) * a.at_once;
        count = ((channel + a.group - 1) / V - pack + 1) * a.at_once;
    }
};

/* What the blocks of a sample tell one another of a group, beside one another. Two such places take turns: a block may
 * write for the next sample while another still reads of this one, but not for the one after that. */
__device__ __forceinline__ float2 *parts_of_group(const normfuse_cuda_arguments &all, const grid_part &own, int parity,
                                                  int group)
{
    const normfuse_cuda_compact &a = all.compact;
    return reinterpret_cast<float2 *>(all.partials) +
           ((int64_t)(parity * a.teams + own.team) * a.groups + group) * a.parts;
}

/* Of what a lane joins, how much it asks for at once. */
enum { held_parts = 9, held_sums = 4 };

/* Every eighth of `left` pairs; zeros where there are no more. */
__device__ __forceinline__ void ask_parts(const float2 *from, int left, float2 (&parts)[held_parts])
{
#pragma unroll
    for (int k = 0; k < held_parts; k++) {
        parts[k] = make_float2(0.0f, 0.0f);
        if (k * lanes_of_group < left)
            parts[k] = __ldcg(from + k * lanes_of_group);
    }
}

/* ---- forward ----------------------------------------------------------------------------------------------------- */

template <typename T, int V> __device__ __forceinline__ void grid_forward(const normfuse_cuda_arguments &all)
{
    follow_kernel();
    const normfuse_cuda_compact &a = all.compact;
    constexpr bool fast = sizeof(T) == 2;
    extern __shared__ uint4 dynamic[];
    __shared__ ring_barriers barriers;
    const int consumers = (int)blockDim.x - 32;
    grid_place place;
    channel_parameters<V> parameters = {};
    if ((int)threadIdx.x < consumers) {
        place.find_column(a);
        parameters.ask_weights(a, place.column * V);
    }
    const grid_part own(a);
    /* After the ring: of each thread in a group a value that it sums about, its mean less that, squares about the mean,
     * and how many values these are; then what results need of each group. */
    float4 *const entries = reinterpret_cast<float4 *>(dynamic + own.stages * own.tile_packs);
    float4 *const of_groups = entries + (a.width + a.groups) * a.at_once;

    if ((int)threadIdx.x >= consumers) {
        const int lane = (int)threadIdx.x - consumers;
        tile_producer<1> producer(barriers, dynamic, a.soon);
        open_ring(barriers, a, lane);
        if (lane == 0) {
#pragma unroll 1
            for (int n = own.team; n < a.n; n += a.teams) {
                producer.from[0] = a.x + n * a.batch_bytes;
                producer.fill_all(own);
                producer.fill_again(own);
            }
        }
        return;
    }

    place.find_groups<V>(a);
    tile_consumer consumer(barriers);
    int parity = 0;
#pragma unroll 1
    for (int n = own.team; n < a.n; n += a.teams, parity ^= 1) {
        parameters.ask_modulation(a, n, place.column * V);
        /* A value of each group that all blocks know: its first. */
        const auto ask_base = [&](int group) { return load_pack<T, 1>(a.x + n * a.batch_bytes, group * a.group); };
        const auto tell_base = [&](raw<T, 1> asked) {
            float value[1];
            unpack<T, 1>(asked, value);
            return value[0];
        };
        const raw<T, 1> asked_base = ask_base(joining_lane(a, 0).group);
        uint32_t before = 0;
        if (threadIdx.x == 0)
            before = look_at_ticket(all.tickets + own.team * ticket_stride);
        if (n == own.team)
            meet(RING_IS_OPEN, (int)blockDim.x);

        /* ---- sums, about values of the thread's own: the first of its first group and the last of the other ---- */
        float about[2] = {0.0f, 0.0f}, sum[V] = {}, square[V] = {};
        moments<float> found[2] = {};
        int rows_here = 0;
        const auto fold = [&]() {
            float of[2] = {0.0f, 0.0f}, squares[2] = {0.0f, 0.0f};
#pragma unroll
            for (int i = 0; i < V; i++) {
                const bool is_first = i < place.split;
                of[0] += is_first ? sum[i] : 0.0f;
                of[1] += is_first ? 0.0f : sum[i];
                squares[0] += is_first ? square[i] : 0.0f;
                squares[1] += is_first ? 0.0f : square[i];
                sum[i] = square[i] = 0.0f;
            }
#pragma unroll
            for (int side = 0; side < 2; side++) {
                const float count = (float)rows_here * (float)(side == 0 ? place.split : V - place.split);
                const float mean = of[side] * reciprocal(fmaxf(count, 1.0f));
                append_near(found[side], {count, mean, squares[side] - of[side] * mean});
            }
            rows_here = 0;
        };
        int until_fold = a.chunk_tiles;
        consumer.walk_sums(own, [&](int tile, int stage) {
            const uint4 *const from = dynamic + stage * own.tile_packs;
            const int packs = own.packs_of(tile);
            float value[V];
            if (tile == 0 && place.first < packs) {
                unpack<T, V>(from[place.first], value);
                about[0] = value[0];
                about[1] = value[V - 1];
            }
            walk_packs<4>(
                place, packs, [&](int i) { return from[i]; },
                [&](const uint4 &pack, int) {
                    unpack<T, V>(pack, value);
                    rows_here++;
#pragma unroll
                    for (int k = 0; k < V; k++) {
                        const float distance = value[k] - (k < place.split ? about[0] : about[1]);
                        sum[k] += distance;
                        square[k] += distance * distance;
                    }
                });
            if (--until_fold == 0 || tile + 1 == own.tiles) {
                fold();
                until_fold = a.chunk_tiles;
            }
        });
        if (place.has_rows()) {
            entries[place.entry(a, 0)] = make_float4(about[0], found[0].mean, found[0].squares, found[0].count);
            if (place.split < V)
                entries[place.entry(a, 1)] = make_float4(about[1], found[1].mean, found[1].squares, found[1].count);
        }
        meet(MEETING_OF_CONSUMERS, consumers);

        /* ---- the statistics of the groups: means less `base`, then squares about them, which cannot cancel ---- */
        /* The first blocks may have a tile more than the others; the last of these what is left of its last one, which
         * is counted whole, then taken back. */
        const float of_first_parts = (float)a.part_rows * (float)a.group;
        const float of_other_parts = (float)a.small_part_rows * (float)a.group;
        const float lacking = (float)a.lacking_rows * (float)a.group;
        const float count_part = (own.part < a.first_parts ? of_first_parts : of_other_parts) -
                                 (own.part == a.first_parts - 1 ? lacking : 0.0f);
        const int groups_at_once = consumers / lanes_of_group;
#pragma unroll 1
        for (int round = 0; round < a.groups; round += groups_at_once) {
            const joining_lane join(a, round);
            const float base = tell_base(round == 0 ? asked_base : ask_base(join.group));
            int begin, count;
            join.find_entries<V>(a, begin, count);
            float means[held_sums], found_squares[held_sums], counts[held_sums], mean = 0.0f, squares = 0.0f;
#pragma unroll
            for (int k = 0; k < held_sums; k++) {
                const int i = join.lane + k * lanes_of_group;
                float4 entry = make_float4(base, 0.0f, 0.0f, 0.0f);
                if (i < count)
                    entry = entries[begin + i];
                means[k] = (entry.x - base) + entry.y;
                found_squares[k] = entry.z;
                counts[k] = entry.w;
                mean += counts[k] * means[k];
            }
            const int rest_of_lane = join.lane + held_sums * lanes_of_group;
#pragma unroll 1
            for (int i = rest_of_lane; i < count; i += lanes_of_group) {
                const float4 entry = entries[begin + i];
                mean += entry.w * ((entry.x - base) + entry.y);
            }
            mean = sum_few(mean, lanes_of_group) * reciprocal(count_part);
#pragma unroll
            for (int k = 0; k < held_sums; k++) {
                const float distance = means[k] - mean;
                squares += found_squares[k] + counts[k] * distance * distance;
            }
#pragma unroll 1
            for (int i = rest_of_lane; i < count; i += lanes_of_group) {
                const float4 entry = entries[begin + i];
                const float distance = ((entry.x - base) + entry.y) - mean;
                squares += entry.z + entry.w * distance * distance;
            }
            squares = sum_few(squares, lanes_of_group);
            if (join.is_first()) {
                __stcg(parts_of_group(all, own, parity, join.group) + own.part, make_float2(mean, squares));
                of_groups[join.group].x = base;
            }
        }
        meet_blocks(all.tickets + own.team * ticket_stride, own.part, a.parts, before, consumers);

#pragma unroll 1
        for (int round = 0; round < a.groups; round += groups_at_once) {
            const joining_lane join(a, round);
            /* Not from x, in whose place another block may have put results by now. */
            const float base = join.is_needed ? of_groups[join.group].x : 0.0f;
            const float2 *const of_parts = parts_of_group(all, own, parity, join.group);
            const float2 last = __ldcg(of_parts + a.first_parts - 1);
            moments<float> joined = {};
            const auto number = [&](int left, int k) {
                const int behind = left - k * lanes_of_group; /* parts from this one on */
                return behind <= 0 ? 0.0f : behind > a.parts - a.first_parts ? of_first_parts : of_other_parts;
            };
#pragma unroll 1
            for (int left = a.parts - join.lane; left > 0; left -= held_parts * lanes_of_group) {
                float2 part[held_parts];
                ask_parts(of_parts + (a.parts - left), left, part);
                moments<float> next = {};
#pragma unroll
                for (int k = 0; k < held_parts; k++) {
                    next.count += number(left, k);
                    next.mean += number(left, k) * part[k].x;
                }
                next.mean *= reciprocal(next.count);
#pragma unroll
                for (int k = 0; k < held_parts; k++) {
                    const float distance = part[k].x - next.mean;
                    next.squares += part[k].y + number(left, k) * distance * distance;
                }
                append_near(joined, next);
            }
            const float mean = (sum_few(joined.count * joined.mean, lanes_of_group) - lacking * last.x) * a.share;
            const float distance = joined.mean - mean, of_last = last.x - mean;
            const float squares = sum_few(joined.squares + joined.count * distance * distance, lanes_of_group) -
                                  lacking * of_last * of_last;
            const float rstd = inverse_root(squares * a.share + a.eps);
            if (join.is_first()) {
                float rounded, rest;
                split_sum<T>(base, mean, rounded, rest);
                of_groups[join.group] = make_float4(rounded, rest, rstd, 0.0f);
                if (own.part == 0) {
                    if (a.mean)
                        store_value<double>(a.mean, n * a.mean_batch + join.group, type_of(a, COMPACT_MEAN),
                                            (double)base + (double)mean);
                    if (a.rstd)
                        store_value<float>(a.rstd, n * a.rstd_batch + join.group, type_of(a, COMPACT_RSTD), rstd);
                }
            }
        }
        meet(MEETING_OF_CONSUMERS, consumers);

        /* ---- results ---- */
        const float4 of_first = of_groups[place.groups[0]], of_second = of_groups[place.groups[1]];
        float slope[V], offset[V];
        parameters.tell(a, slope, offset);
        const float factor = takes_half<fast, true>(a.activation) ? 0.5f : 1.0f;
#pragma unroll
        for (int i = 0; i < V; i++) {
            const bool is_first = i < place.split;
            slope[i] *= (is_first ? of_first.z : of_second.z) * factor;
            offset[i] = offset[i] * factor - (is_first ? of_first.y : of_second.y) * slope[i];
        }
        char *const to = a.out + n * a.batch_bytes;
        choose_activation<true, true>(a.activation, [&](auto chosen) {
            consumer.walk_results(own, n + a.teams >= a.n, [&](int tile, int stage) {
                const uint4 *const from = dynamic + stage * own.tile_packs;
                const int packs = own.packs_of(tile);
                char *const to_tile = to + own.place_of(tile);
                walk_packs<4>(
                    place, packs, [&](int i) { return from[i]; },
                    [&](const uint4 &pack, int i) {
                        float z[V];
                        unpack<T, V>(pack, z);
#pragma unroll
                        for (int k = 0; k < V; k++)
                            z[k] = fmaf(z[k] - (k < place.split ? of_first.x : of_second.x), slope[k], offset[k]);
                        activate<fast, true>(z, chosen, a.activation, a.act_param);
                        store_pack<T, V>(to_tile + i * 16, 0, make_pack<T, V>(z));
                    });
            });
        });
    }
}

/* ---- backward ---------------------------------------------------------------------------------------------------- */

/* The block's sums of channels into memory, one block's beside one another, by the producer's warp while the others
 * join those of groups; those of a next sample are added. Four channels a lane. */
__device__ __forceinline__ void put_channels(const normfuse_cuda_arguments &all, const float4 *plain,
                                             const float4 *centred, const float2 *of_groups, int channels, int lane,
                                             bool adds)
{
    const normfuse_cuda_compact &a = all.compact;
    const int quads = channels / 4;
    double2 *const to = reinterpret_cast<double2 *>(all.sums) + (int64_t)blockIdx.x * channels;
#pragma unroll 1
    for (int quad = lane; quad < quads; quad += 32) {
        float sum[4] = {}, product[4] = {};
#pragma unroll 4
        for (int row = 0; row < a.at_once; row++) {
            const float4 one = plain[row * quads + quad], other = centred[row * quads + quad];
            sum[0] += one.x;
            sum[1] += one.y;
            sum[2] += one.z;
            sum[3] += one.w;
            product[0] += other.x;
            product[1] += other.y;
            product[2] += other.z;
            product[3] += other.w;
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 known = of_groups[divide(4 * quad + i, a.by_group)];
            double2 pair = make_double2((double)sum[i], (double)((product[i] - known.x * sum[i]) * known.y));
            if (adds) {
                const double2 before = __ldcg(to + 4 * quad + i);
                pair.x += before.x;
                pair.y += before.y;
            }
            __stcg(to + 4 * quad + i, pair);
        }
    }
}

/* What the parameters get, when all blocks have put their sums: two channels at a time for each block in turn. */
__device__ __forceinline__ void give_channels(const normfuse_cuda_arguments &all, int channels, int lane)
{
    const double2 *const from = reinterpret_cast<const double2 *>(all.sums);
#pragma unroll 1
    for (int c = 2 * (int)blockIdx.x; c < channels; c += 2 * (int)gridDim.x) {
        double2 own[2] = {};
#pragma unroll 4
        for (int block = lane; block < (int)gridDim.x; block += 32) {
            const double2 one = __ldcg(from + (int64_t)block * channels + c);
            const double2 other = __ldcg(from + (int64_t)block * channels + c + 1);
            own[0].x += one.x;
            own[0].y += one.y;
            own[1].x += other.x;
            own[1].y += other.y;
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const double bias = sum_lanes(own[i].x, 32), weight = sum_lanes(own[i].y, 32);
            if (lane == 0) {
                put_gradient(all.problem, all.problem.dweight, 0, c + i, weight);
                put_gradient(all.problem, all.problem.dbias, 0, c + i, bias);
            }
        }
    }
}

template <typename T, int V> __device__ __forceinline__ void grid_backward(const normfuse_cuda_arguments &all)
{
    follow_kernel();
    const normfuse_cuda_compact &a = all.compact;
    constexpr bool fast = sizeof(T) == 2;
    extern __shared__ uint4 dynamic[];
    __shared__ ring_barriers barriers;
    const int consumers = (int)blockDim.x - 32, channels = a.width * V;
    grid_place place;
    channel_parameters<V> parameters;
    if ((int)threadIdx.x < consumers) {
        place.find_column(a);
        parameters.ask_weights(a, place.column * V);
    }
    const grid_part own(a);
    const bool gives = all.sums != nullptr;
    /* After the ring: of each row and channel two sums, one after the other; two sums of each thread in a group; of
     * each group what its mean leaves out and rstd, of this sample and of the one before, and what dx takes of x - mean
     * and what else. */
    float *const of_plain = reinterpret_cast<float *>(dynamic + 2 * own.stages * own.tile_packs);
    float *const of_centred = of_plain + (gives ? a.at_once * channels : 0);
    float2 *const entries = reinterpret_cast<float2 *>(of_centred + (gives ? a.at_once * channels : 0));
    float2 *const of_both = entries + (a.width + a.groups) * a.at_once, *const of_totals = of_both + 2 * a.groups;
    int parity = 0;

    if ((int)threadIdx.x >= consumers) {
        const int lane = (int)threadIdx.x - consumers;
        tile_producer<2> producer(barriers, dynamic, a.soon);
        uint32_t *const ticket = all.tickets + a.teams * ticket_stride;
        uint32_t before = 0;
        open_ring(barriers, a, lane);
        if (gives && lane == 0)
            before = look_at_ticket(ticket);
#pragma unroll 1
        for (int n = own.team; n < a.n; n += a.teams, parity ^= 1) {
            producer.from[0] = a.x + n * a.batch_bytes;
            producer.from[1] = a.dy + n * a.batch_bytes;
            if (lane == 0)
                producer.fill_all(own);
            __syncwarp();
            if (gives) {
                if (n != own.team)
                    meet(CHANNELS_ARE_PUT, (int)blockDim.x);
                meet(MEETING_OF_ALL, (int)blockDim.x);
                put_channels(all, reinterpret_cast<const float4 *>(of_plain),
                             reinterpret_cast<const float4 *>(of_centred), of_both + parity * a.groups, channels, lane,
                             n != own.team);
                __syncwarp();
            }
            if (lane == 0)
                producer.fill_again(own);
            __syncwarp();
        }
        if (gives) {
            if (lane == 0) {
                asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(ticket),
                             "r"(ticket_share((int)blockIdx.x, (int)gridDim.x))
                             : "memory");
                await_ticket(ticket, before);
            }
            __syncwarp();
            give_channels(all, channels, lane);
        }
        return;
    }

    place.find_groups<V>(a);
    const int mean_type = type_of(a, COMPACT_MEAN), rstd_type = type_of(a, COMPACT_RSTD);
    const bool are_wide = min(mean_type, rstd_type) >= 0 && mean_type <= NORMFUSE_F32 && rstd_type <= NORMFUSE_F32;
    saved_statistic asked_means[2], asked_rstds[2];
    const auto ask_statistics = [&](int n) {
#pragma unroll
        for (int side = 0; side < 2; side++) {
            asked_means[side].ask(a.mean, n * a.mean_batch + place.groups[side], mean_type);
            asked_rstds[side].ask(a.rstd, n * a.rstd_batch + place.groups[side], rstd_type);
        }
    };
    ask_statistics(own.team);
    tile_consumer consumer(barriers);
#pragma unroll 1
    for (int n = own.team; n < a.n; n += a.teams, parity ^= 1) {
        float2 *const of_groups = of_both + parity * a.groups;
        float about[2], rests[2], rstds[2], slope[V], offset[V];
        uint32_t before = 0;
        if (threadIdx.x == 0)
            before = look_at_ticket(all.tickets + own.team * ticket_stride);
        if (n == own.team)
            meet(RING_IS_OPEN, (int)blockDim.x);
#pragma unroll
        for (int side = 0; side < 2; side++) {
            const int group = place.groups[side];
            double mean = asked_means[side].tell(mean_type);
            rstds[side] = (float)asked_rstds[side].tell(rstd_type);
            if (!are_wide) {
                mean = load_value<double>(a.mean, n * a.mean_batch + group, mean_type);
                rstds[side] = load_value<float>(a.rstd, n * a.rstd_batch + group, rstd_type);
            }
            split_mean<T>(mean, about[side], rests[side]);
        }
        if (place.has_rows() && place.beside == 0) {
            of_groups[place.groups[0]] = make_float2(rests[0], rstds[0]);
            of_groups[place.groups[1]] = make_float2(rests[1], rstds[1]);
        }
        parameters.tell_weights(a, slope, offset);
        const float factor = takes_half<fast, true>(a.activation) ? 0.5f : 1.0f;
#pragma unroll
        for (int i = 0; i < V; i++) {
            const bool is_first = i < place.split;
            slope[i] *= (is_first ? rstds[0] : rstds[1]) * factor;
            offset[i] = offset[i] * factor - (is_first ? rests[0] : rests[1]) * slope[i];
        }
        /* x becomes x - mean and dy what came through the activation, for SiLU twice that. */
        const auto differentiate = [&](auto chosen, float(&x)[V], float(&dy)[V]) {
#pragma unroll
            for (int i = 0; i < V; i++)
                x[i] -= i < place.split ? about[0] : about[1];
            if (decltype(chosen)::known != NORMFUSE_IDENTITY) {
                float z[V];
#pragma unroll
                for (int i = 0; i < V; i++)
                    z[i] = fmaf(x[i], slope[i], offset[i]);
                differentiate_by<fast, true>(dy, z, chosen, a.activation, a.act_param);
            }
        };

        /* ---- sums ---- */
        float first[V] = {}, second[V] = {};
        choose_activation<true, false>(a.activation, [&](auto chosen) {
            sum_gradients<T, V>(consumer, dynamic, own, place, chosen, differentiate, first, second);
        });
        /* What the producer's warp reads of the sample before is not written over. */
        if (gives && n != own.team)
            meet(CHANNELS_ARE_PUT, (int)blockDim.x);
        if (place.has_rows()) {
            float2 found[2] = {};
#pragma unroll
            for (int i = 0; i < V; i++) {
                const bool is_first = i < place.split;
                found[0].x += is_first ? slope[i] * first[i] : 0.0f;
                found[0].y += is_first ? slope[i] * second[i] : 0.0f;
                found[1].x += is_first ? 0.0f : slope[i] * first[i];
                found[1].y += is_first ? 0.0f : slope[i] * second[i];
            }
            entries[place.entry(a, 0)] = found[0];
            if (place.split < V)
                entries[place.entry(a, 1)] = found[1];
            if (gives) {
                const int at = place.beside * channels + place.column * V;
#pragma unroll
                for (int i = 0; i < V; i++) {
                    first[i] *= factor;
                    second[i] *= factor;
                }
                write_values<float, V>(of_plain + at, first);
                write_values<float, V>(of_centred + at, second);
            }
        }
        if (gives)
            meet(MEETING_OF_ALL, (int)blockDim.x);
        else
            meet(MEETING_OF_CONSUMERS, consumers);

        /* ---- the totals of the groups ---- */
        const int groups_at_once = consumers / lanes_of_group;
#pragma unroll 1
        for (int round = 0; round < a.groups; round += groups_at_once) {
            const joining_lane join(a, round);
            int begin, count;
            join.find_entries<V>(a, begin, count);
            float sum = 0.0f, product = 0.0f;
#pragma unroll 4
            for (int i = join.lane; i < count; i += lanes_of_group) {
                sum += entries[begin + i].x;
                product += entries[begin + i].y;
            }
            sum = sum_few(sum, lanes_of_group);
            product = sum_few(product, lanes_of_group);
            if (join.is_first())
                __stcg(parts_of_group(all, own, parity, join.group) + own.part, make_float2(sum, product));
        }
        meet_blocks(all.tickets + own.team * ticket_stride, own.part, a.parts, before, consumers);
#pragma unroll 1
        for (int round = 0; round < a.groups; round += groups_at_once) {
            const joining_lane join(a, round);
            const float2 *const of_parts = parts_of_group(all, own, parity, join.group);
            float sum = 0.0f, product = 0.0f;
#pragma unroll 1
            for (int left = a.parts - join.lane; left > 0; left -= held_parts * lanes_of_group) {
                float2 part[held_parts], of_round = make_float2(0.0f, 0.0f);
                ask_parts(of_parts + (a.parts - left), left, part);
#pragma unroll
                for (int k = 0; k < held_parts; k++) {
                    of_round.x += part[k].x;
                    of_round.y += part[k].y;
                }
                sum += of_round.x;
                product += of_round.y;
            }
            sum = sum_few(sum, lanes_of_group);
            product = sum_few(product, lanes_of_group);
            if (join.is_first()) {
                const float2 of_group = of_groups[join.group];
                product -= of_group.x * sum;
                const float centred = -(product * of_group.y) * (of_group.y * a.share);
                of_totals[join.group] = make_float2(centred, -sum * a.share - centred * of_group.x);
            }
        }
        meet(MEETING_OF_CONSUMERS, consumers);

        /* ---- results ---- */
        if (n + a.teams < a.n)
            ask_statistics(n + a.teams);
        const float2 of_first = of_totals[place.groups[0]], of_second = of_totals[place.groups[1]];
        char *const to = a.out + n * a.batch_bytes;
        choose_activation<true, false>(a.activation, [&](auto chosen) {
            consumer.walk_results(own, n + a.teams >= a.n, [&](int tile, int stage) {
                const uint4 *const from = dynamic + 2 * stage * own.tile_packs;
                const auto read = [&](int i) { return both{from[i], from[own.tile_packs + i]}; };
                const int packs = own.packs_of(tile);
                char *const to_tile = to + own.place_of(tile);
                walk_packs<2>(place, packs, read, [&](const both &packs_here, int i) {
                    float x[V], dy[V];
                    unpack<T, V>(packs_here.x, x);
                    unpack<T, V>(packs_here.dy, dy);
                    differentiate(chosen, x, dy);
#pragma unroll
                    for (int k = 0; k < V; k++) {
                        const bool is_first = k < place.split;
                        x[k] =
                            fmaf(slope[k], dy[k],
                                 fmaf(is_first ? of_first.x : of_second.x, x[k], is_first ? of_first.y : of_second.y));
                    }
                    store_pack<T, V>(to_tile + i * 16, 0, make_pack<T, V>(x));
                });
            });
        });
    }
}

#define GRID(picture, direction, type, pack, kept)                                                                     \
    extern "C" __global__ void __maxnreg__(most_registers)                                                             \
        normfuse_##picture##_##direction##_##type##_##pack##x##kept(const __grid_constant__ normfuse_cuda_arguments a) \
    {                                                                                                                  \
        NORMFUSE_RING_BODY((grid_##direction<type, pack>(a)));                                                         \
    }
NORMFUSE_CUDA_COLUMNS_GRID(GRID)
