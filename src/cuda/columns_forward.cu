/* SPDX-License-Identifier: MIT
 *
 * columns_forward.cu - statistics and results where channels are adjacent (NHWC). A thread sums its own channels over
 * its rows while the data arrive; threads of a group, then blocks are joined; results come from what the block holds.
 */
#include "columns_vectors.cuh"

/* Of a block's channels: sums of subvectors; statistics of groups; of each channel what channel_values says; means of
 * groups; pairs of blocks. */
template <typename T, int V, bool adds> struct column_memory : block_channels {
    static constexpr int max_bits = V == 8 ? 3 : 2;
    int rows, part_rows;
    subvector_sums<float> *of_subvectors;
    double *of_means;

    __device__ __forceinline__ column_memory(const normfuse_cuda_arguments &a, const block_turns &block,
                                             const column_place &place, uint4 *behind_vectors)
        : block_channels(a, block, place, V), rows(g.rows), part_rows(g.part_rows)
    {
        find_again(rows, part_rows);
        const int vector_bits = max_bits - subvector_bits;
        of_subvectors = reinterpret_cast<subvector_sums<float> *>(behind_vectors);
        of_groups = reinterpret_cast<group_statistics<float> *>(of_subvectors + ((at_once * width) << vector_bits));
        float *const values = reinterpret_cast<float *>(of_groups + groups);
        const int modulated = p.scale().data || p.shift().data, biased = p.pre_bias().data != nullptr;
        of_channels = {values, values + channels, values + 2 * channels, values + 3 * channels};
        of_means = reinterpret_cast<double *>(values + (3 + modulated + biased) * channels);
        of_parts = reinterpret_cast<float2 *>(of_means + groups + (groups & 1));
    }
    /* What the block has to know of its channels before their vectors are there. */
    __device__ __forceinline__ void know_channels() const
    {
        /* The first value of each group, which all of its blocks know: means are sent less it. */
        const auto first_value = [&](int i) {
            const int64_t c = first_channel + i * g.group;
            return load_vector<T, 1>(p.x().data, n * p.x().batch + c * p.x().channel);
        };
        const auto hold_first = [&](int i, raw<T, 1> own) {
            float value[1];
            unpack<T, 1>(own, value);
            if (adds && p.pre_add().data) {
                float more[1];
                const int64_t c = first_channel + i * g.group;
                unpack<T, 1>(load_vector<T, 1>(p.pre_add().data, n * p.x().batch + c * p.x().channel), more);
                value[0] += more[0];
            }
            if (p.pre_bias().data)
                value[0] += parameter<float>(p.pre_bias(), n, divide(first_channel + i * g.group, g.by_spans), 0.0f);
            of_groups[i].mean = value[0];
        };
        request_groups(first_value, [&] { stage(a, of_channels, n, first_channel, here, channels, step); }, hold_first);
    }

    /* What the thread summed about `shift`, in subvectors, for the block. */
    __device__ __forceinline__ void store_subvectors(int count, float (&shift)[V], float (&first)[V],
                                                     float (&second)[V]) const
    {
        const int vector_bits = max_bits - subvector_bits, subvectors_a_vector = 1 << vector_bits;
        const int subvectors = g.group >> subvector_bits, entries = subvectors * at_once;
        const float share = 1.0f / (float)max(count, 1);
        each<V>([&](int i) {
            const float mean = first[i] * share;
            second[i] -= first[i] * mean;
            first[i] = mean;
        });
        if (p.pre_bias().data) {
            float bias[V];
            read_values<V>(biases_of(p, of_channels, channels) + place.column * V, bias);
            add_bias<float, V>(bias, shift, first);
        }
        ::join_channels<float, V>(shift, first, second, (float)count, subvector_bits);
        each<V>([&](int i) {
            const bool any = count > 0;
            if (i < subvectors_a_vector) {
                const int subvector = (place.column << vector_bits) + i, group = divide(subvector, g.by_subvectors);
                of_subvectors[group * entries + place.beside * subvectors + subvector - group * subvectors] = {
                    any ? shift[i] : 0.0f, any ? first[i] : 0.0f, any ? second[i] : 0.0f,
                    (float)(count << subvector_bits)};
            }
        });
    }

    /* `mean` is less the value that all know, which the statistics then replace. */
    __device__ __forceinline__ void finish_group(int group, float mean, float squares) const
    {
        group_statistics<float> of_group;
        const float base = of_groups[group].mean;
        of_group.variance = squares / ((float)rows * (float)g.row_values);
        of_group.rstd = inverse_root(of_group.variance + (float)p.eps);
        split_sum<T>(base, mean, of_group.mean, of_group.rest);
        in_all_rows(group, groups_here, groups, [&](int at) { of_groups[at] = of_group; });
        of_means[group] = (double)base + (double)mean;
        if (g.group == 1) {
            float weight, bias, left = 0.0f, shift_here = of_group.mean;
            weigh(p, of_channels, group, weight, bias);
            if (p.pre_bias().data)
                shift_here = add_exactly(shift_here, -biases_of(p, of_channels, channels)[group], left);
            in_all_rows(group, groups_here, groups, [&](int at) {
                of_channels.slopes[at] = weight * of_group.rstd;
                of_channels.offsets[at] = bias - (of_group.rest + left) * (weight * of_group.rstd);
                of_channels.means[at] = shift_here;
            });
        }
    }
    /* The block's subvectors become its part of each group: first the mean, then squares about it, which cannot
     * cancel. */
    __device__ __forceinline__ void join_subvectors(cluster_mailbox &mailbox) const
    {
        const int entries = (g.group >> subvector_bits) * at_once;
        const float count_part = (float)max(0, place.stop - place.first) * (float)g.row_values;
        if (block.exchange == NORMFUSE_EXCHANGE_CLUSTER)
            await_open_mailboxes();
        share_items(groups_here, group_bits, [&](int group, bool exists, int lane, int lanes) {
            const int own = exists ? entries : 0;
            const float base = of_groups[group].mean;
            float mean = 0.0f, squares = 0.0f;
            /* The groups of the rows folded follow one another. */
            const auto walk_found = [&](auto work) {
#pragma unroll 1
                for (int row = 0; row < g.folded; row++) {
                    const subvector_sums<float> *const of_row = of_subvectors + (row * groups_here + group) * entries;
#pragma unroll 2
                    for (int i = lane; i < own; i += lanes)
                        work(of_row[i]);
                }
            };
            walk_found([&](const subvector_sums<float> &found) {
                mean += found.count * ((found.first - base) + found.mean);
            });
            mean = sum_few(mean, lanes) / max(count_part, 1.0f);
            walk_found([&](const subvector_sums<float> &found) {
                const float distance = ((found.first - base) + found.mean) - mean;
                squares += found.squares + found.count * distance * distance;
            });
            squares = sum_few(squares, lanes);
            if (own == 0)
                return;
            send_part(
                mailbox, group, lane, lanes, make_float2(mean, squares),
                [&] { return block.parts_of<float2>(a, groups); }, [&] { finish_group(group, mean, squares); });
        });
    }
    /* The parts of each group, of which a lane reads max_pairs at once, become its statistics. How many values a part
     * has follows from its place. */
    template <int max_pairs>
    __device__ __forceinline__ void join_parts(cluster_mailbox &mailbox, uint32_t grid_barrier_before) const
    {
        const auto join = [&](auto read) {
            share_items(groups_here, group_bits, [&](int group, bool exists, int lane, int lanes) {
                const float2 found = join_means<max_pairs, 4>(
                    g.parts, lane, lanes, [&](int i) { return read(group * g.parts + i); },
                    [&](float2, int i) {
                        return (float)max(0, min(part_rows, rows - i * part_rows)) * (float)g.row_values;
                    },
                    [&](float sum) { return sum / ((float)rows * (float)g.row_values); });
                if (exists && lane == 0)
                    finish_group(group, found.x, found.y);
            });
        };
        if (block.exchange == NORMFUSE_EXCHANGE_CLUSTER) {
            await_mailbox(mailbox);
            join([&](int i) { return of_parts[i]; });
        } else if (block.exchange == NORMFUSE_EXCHANGE_GRID) {
            synchronize_block_group(block.grid_barrier(a), block.part, g.parts, grid_barrier_before);
            const float2 *const of_grid = block.parts_of<float2>(a, groups);
            join([&](int i) { return __ldcg(of_grid + i); });
        }
    }
};

template <typename T, int V, int K, normfuse_cuda_schedule schedule>
__device__ __forceinline__ void columns_forward(const normfuse_cuda_arguments &a)
{
    follow_kernel();
    constexpr bool adds = schedule == NORMFUSE_SCHEDULE_additions, fast = sizeof(T) == 2;
    using cursor = column_cursor<T, V>;
    constexpr int max_pairs = K <= 8 ? 10 : 4; /* parts of a set that a lane reads once */
    const normfuse_cuda_problem &p = a.problem;
    const normfuse_cuda_geometry &g = a.geometry;
    __shared__ cluster_mailbox mailbox;
    block_turns block(a);

    column_vectors<T, V, K, 1, adds> vectors(a);
    bool is_loaded = false; /* the tile of this round, while the results of the last one were written */
    do {
        const column_place place = place_of<T, V>(a, block.set, block.part);
        const int shared = g.held_shared;
        /* Of the thread's channels. First a value of its own and sums of distances from it and of their squares, then
         * the mean, slope and offset. */
        float shift[V], first[V] = {}, second[V] = {};
        const int row = place.first + place.beside;
        const int count = slots_of(a, place, row, K + shared);

        /* ---- load ---- */
        cursor from[] = {{p.x().data, p.x(), place, row}};
        vectors.request(from, place, count, shared, is_loaded);
        vectors.pass(p.pre_add(), {}, place, count);
        const column_memory<T, V, adds> of(a, block, place, vectors.behind());
        const uint32_t grid_barrier_before = of.open_exchange(mailbox);
        of.know_channels();
        if (shared > 0)
            wait_for_copies();
        if constexpr (adds)
            vectors.add_to_x(place, count);

        /* ---- sums ---- */
        if (count > 0) {
            /* Squares about one of the thread's own values cannot cancel by more than their number. Not one slot or the
             * other: registers have no places to count through. */
            if (shared > 0)
                unpack<T, V>(vectors.shared(0, 0), shift);
            else
                unpack<T, V>(vectors.held[0].of[0], shift);
            vectors.walk_rows(place, count, shared, [&](const row_vectors<1> &row, int) {
                add_squares<T, V>(row.of[0], shift, first, second);
            });
        }
        vectors.pass(p.post_add(), {}, place, count);
        /* ---- the statistics of the groups ---- */
        if (p.pre_bias().data)
            __syncthreads();
        if (place.active)
            of.store_subvectors(count, shift, first, second);
        __syncthreads();

        of.join_subvectors(mailbox);
        of.template join_parts<max_pairs>(mailbox, grid_barrier_before);

        /* ---- results ---- */
        __syncthreads();
        const int column = place.active ? place.column : 0;
        coefficients_of<V>(a, of.of_channels, of.of_groups, column, column * V, g.group == 1, first, second, shift);
        if (p.y().data) {
            if (takes_half<fast>(p.activation))
                multiply(first, second, 0.5f);
            vectors.forget();
            /* The same rows of the block group that this block has next are requested as places become free. */
            is_loaded = !adds && block.has_next(g) && g.row_channels == g.blocks_wide * g.width * V;
            const column_place next_place = place_of<T, V>(a, block.set + (is_loaded ? g.block_groups : 0), block.part);
            cursor next[] = {{p.x().data, p.x(), next_place, row}};
            cursor y(p.y().data, p.x(), place, row), u(adds && p.u().data ? p.u().data : p.y().data, p.x(), place, row);
            const float factor = takes_half<fast>(p.activation) ? 0.5f : 1.0f;
            const typename decltype(vectors)::added_after add = {vectors, factor};
            choose_activation<true>(p.activation, [&](auto chosen) {
                vectors.walk_rows(place, count, shared, [&](const row_vectors<1> &row, int slot) {
                    if constexpr (adds) {
                        if (p.u().data)
                            u.store(row.of[0]);
                        u.advance(place);
                    }
                    y.store(result_of<T, V>(chosen, p.activation, p.act_param, row.of[0], shift, first, second, add));
                    y.advance(place);
                    if (is_loaded)
                        vectors.load(next, place, slot);
                });
            });
        }

        /* ---- what others receive: after the results, which wait for nothing here ---- */
        const bool by_channel = p.sets == NORMFUSE_SETS_BATCH;
#pragma unroll 1
        for (int i = (int)threadIdx.x; block.part == 0 && i < of.groups_here; i += of.step) {
            const int set = divide(of.first_channel, g.by_group) + i;
            const double mean = of.of_means[i], values = (double)of.rows * (double)g.row_values;
            const double variance = store_statistics(a, of.n, set, by_channel ? set : of.n * p.groups + set, mean,
                                                     of.of_groups[i].variance, of.of_groups[i].rstd, values);
            if (p.has_running_momentum() && by_channel)
                update_running<float>(p, set, mean, variance);
        }
    } while (block.advance(g));
}

NORMFUSE_KERNELS_COLUMNS_FORWARD(NORMFUSE_INSTANCE)
