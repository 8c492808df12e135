/* SPDX-License-Identifier: MIT
 *
 * columns_forward.cu - statistics and results where channels are adjacent (NHWC). A thread sums its own channels over
 * its rows while the data arrive; threads of a group, then blocks are joined; results come from what the block holds.
 */
#include "columns_vectors.cuh"

/* Of a block's channels: sums of subvectors (where pipelines are, once these are done with); statistics of groups; of
 * each channel what channel_values says; means of groups; pairs of blocks. */
template <typename T, int V, bool unaligned_samples, bool adds> struct column_memory : block_channels {
    static constexpr int max_bits = V == 8 ? 3 : 2;
    const column_edges<T, V, unaligned_samples> &edges;
    const bool sums;
    int rows, part_rows;
    subvector_sums<float> *of_subvectors;
    double *of_means;

    /* `pipeline`: bytes that subvectors share with it, at least. */
    __device__ __forceinline__ column_memory(const normfuse_cuda_arguments &a, const block_turns &block,
                                             const column_place &place,
                                             const column_edges<T, V, unaligned_samples> &edges, uint4 *behind_vectors,
                                             int pipeline, bool sums)
        : block_channels(a, block, place, V), edges(edges), sums(sums), rows(g.rows), part_rows(g.part_rows)
    {
        find_again(rows, part_rows);
        const int vector_bits = max_bits - subvector_bits;
        of_subvectors = reinterpret_cast<subvector_sums<float> *>(behind_vectors);
        const int subvectors_bytes = sums ? ((at_once * width) << vector_bits) * (int)sizeof(subvector_sums<float>) : 0;
        of_groups = reinterpret_cast<group_statistics<float> *>(reinterpret_cast<char *>(of_subvectors) +
                                                                max(subvectors_bytes, pipeline));
        float *const values = reinterpret_cast<float *>(of_groups + (sums ? groups : 0));
        const int modulated = sums && (p.scale().data || p.shift().data), biased = sums && p.pre_bias().data;
        of_channels = {values, values + channels, values + 2 * channels, values + 3 * channels};
        of_means = reinterpret_cast<double *>(values + (3 + modulated + biased) * channels);
        of_parts = reinterpret_cast<float2 *>(of_means + groups + (groups & 1));
    }
    /* What the block has to know of its channels before their vectors are there. */
    __device__ __forceinline__ void know_channels(bool applies) const
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
                value[0] += parameter<float>(p.pre_bias(), n, first_channel + i * g.group, 0.0f);
            of_groups[i].mean = value[0];
        };
        if (sums) {
            const auto know_parameters = [&] {
                if (applies || p.pre_bias().data)
                    stage(p, of_channels, n, first_channel, here, channels, edges.later(), step);
            };
            request_groups(first_value, know_parameters, hold_first);
        } else if (applies) {
            know_given<T, false>(edges.later(), true);
        }
    }

    /* What the thread summed about `shift`, in subvectors, for the block. */
    __device__ __forceinline__ void store_subvectors(int count, float (&shift)[V], float (&first)[V],
                                                     float (&second)[V]) const
    {
        const int vector_bits = max_bits - subvector_bits, subvectors_a_vector = 1 << vector_bits;
        const int subvectors = g.group >> subvector_bits, entries = subvectors * at_once;
        const float share = 1.0f / (float)max(count, 1);
        const float share_of_fewer = unaligned_samples ? 1.0f / (float)max(count - 1, 1) : share;
        /* A bit for each element that an edge lacks. */
        const unsigned lacking = unaligned_samples ? ~(~0u << edges.begin()) | ~0u << edges.finish() : 0;
        const auto met_of = [&](int i) { return count - (unaligned_samples ? (int)(lacking >> i & 1) : 0); };
        each<V>([&](int i) {
            const float mean = first[i] * (unaligned_samples && met_of(i) != count ? share_of_fewer : share);
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
            const int met_here = met_of(i);
            const bool any = met_here > 0;
            if (i < subvectors_a_vector) {
                const int of_row = (place.column << vector_bits) + i - edges.later();
                const int subvector = of_row + (unaligned_samples && of_row < 0 ? channels : 0),
                          group = divide(subvector, g.by_subvectors);
                of_subvectors[group * entries + place.beside * subvectors + subvector - group * subvectors] = {
                    any ? shift[i] : 0.0f, any ? first[i] : 0.0f, any ? second[i] : 0.0f,
                    (float)(met_here << subvector_bits)};
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
    __device__ __forceinline__ void join_subvectors(cluster_mailbox &mailbox, bool applies) const
    {
        const int entries = (g.group >> subvector_bits) * at_once;
        int part_rows_here = max(0, place.stop - place.first);
        if (g.interleaved) {
            const int turns = divide(part_rows_here, g.by_row_step);
            part_rows_here = turns * at_once + min(at_once, part_rows_here - turns * (int)g.by_row_step.divisor);
        }
        const float rows_part = (float)part_rows_here * (float)g.row_values;
        if (block.exchange == NORMFUSE_EXCHANGE_CLUSTER)
            await_open_mailboxes();
        share_items(groups_here, group_bits, [&](int group, bool exists, int lane, int lanes) {
            const int own = exists ? entries : 0;
            const float base = of_groups[group].mean;
            float mean = 0.0f, squares = 0.0f, met_in_all = 0.0f;
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
                met_in_all += unaligned_samples ? found.count : 0.0f;
            });
            /* Exact, of no more than 2^24. */
            const float count_part = unaligned_samples ? sum_few(met_in_all, lanes) : rows_part;
            mean = sum_few(mean, lanes) / max(count_part, 1.0f);
            walk_found([&](const subvector_sums<float> &found) {
                const float distance = ((found.first - base) + found.mean) - mean;
                squares += found.squares + found.count * distance * distance;
            });
            squares = sum_few(squares, lanes);
            if (own == 0)
                return;
            const auto finish = [&] {
                if (applies) {
                    finish_group(group, mean, squares);
                } else {
                    /* A later kernel joins the parts. */
                    const int set = (g.all_samples ? 0 : n * divide((int)p.c, g.by_group)) +
                                    divide(first_channel, g.by_group) + group;
                    double *const triple = a.partials + ((int64_t)set * g.parts + block.part) * TRIPLE;
                    triple[0] = (double)count_part;
                    triple[1] = (double)base + (double)mean;
                    triple[2] = (double)squares;
                }
            };
            send_part(
                mailbox, group, lane, lanes, make_float2(mean, squares),
                [&] { return block.parts_of<float2>(a, groups); }, finish);
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
    constexpr bool adds = schedule == NORMFUSE_SCHEDULE_additions, holds = adds || schedule == NORMFUSE_SCHEDULE_split,
                   unaligned_samples = schedule == NORMFUSE_SCHEDULE_unaligned;
    using cursor = column_cursor<T, V>;
    constexpr bool fast = sizeof(T) == 2;
    constexpr int max_pairs = K <= 8 ? 10 : 4; /* parts of a set that a lane reads once */
    const normfuse_cuda_problem &p = a.problem;
    const normfuse_cuda_geometry &g = a.geometry;
    __shared__ cluster_mailbox mailbox;
    __shared__ uint4 of_edges[2]; /* results of the first and the last vector of a sample */
    const bool sums = holds || (a.phases & NORMFUSE_PHASE_STATISTICS) != 0;
    const bool applies = holds || !sums;
    block_turns block(a, false, holds, !holds && g.backwards);

    column_vectors<T, V, K, 1, holds, adds> vectors(a);
    bool is_loaded = false; /* the tile of this round, while the results of the last one were written */
    do {
        const column_place place = place_of<T, V>(a, block.set, block.part);
        const int shared = holds ? g.held_shared : 0;
        /* Of the thread's channels. First a value of its own and sums of distances from it and of their squares, then
         * the mean, slope and offset. */
        float shift[V], first[V] = {}, second[V] = {};
        const int row = place.first + place.beside;
        const column_edges<T, V, unaligned_samples> edges(a, place, row, holds ? K + shared : 1 << 30);
        const int count = edges.count;

        /* ---- load ---- */
        cursor from[] = {{p.x().data, p.x(), place, row, edges.lead()}};
        vectors.template request<unaligned_samples>(from, place, edges, shared, is_loaded);
        vectors.pass(p.pre_add(), {}, place, count);
        const column_memory<T, V, unaligned_samples, adds> of(a, block, place, edges, vectors.behind(),
                                                              holds ? 0 : K * vectors.threads * 16, sums);
        const uint32_t grid_barrier_before = of.open_exchange(mailbox);
        of.know_channels(applies);
        if (shared > 0)
            wait_for_copies();
        if constexpr (adds)
            vectors.add_to_x(place, count);

        /* ---- sums ---- */
        if (sums) {
            if (count > 0) {
                /* Squares about one of the thread's own values cannot cancel by more than their number. */
                if constexpr (!holds)
                    wait_for_older_copies<K - 1>();
                /* Not one slot or the other: registers have no places to count through. */
                if (!holds || shared > 0)
                    unpack<T, V>(vectors.shared(0, 0), shift);
                else
                    unpack<T, V>(vectors.held[0].of[0], shift);
                vectors.walk_rows(from, place, count, shared, [&](const row_vectors<1> &row, int, int) {
                    add_squares<T, V>(row.of[0], shift, first, second);
                });
            }
            vectors.pass(p.post_add(), {}, place, count);
            /* ---- the statistics of the groups ---- */
            if (!holds || p.pre_bias().data)
                __syncthreads();
            if (place.active)
                of.store_subvectors(count, shift, first, second);
            __syncthreads();

            of.join_subvectors(mailbox, applies);
            if (!applies)
                return;
            of.template join_parts<max_pairs>(mailbox, grid_barrier_before);
        }

        /* ---- results ---- */
        __syncthreads();
        const int column = place.active ? place.column : 0;
        coefficients_of<V>(a, of.of_channels, of.of_groups, column, sums ? column * V : 0, !sums || g.group == 1, first,
                           second, shift);
        if (p.y().data) {
            if (takes_half<fast, true>(p.activation))
                multiply(first, second, 0.5f);
            vectors.forget();
            /* The same rows of the block group that this block has next are requested as places become free. */
            is_loaded = holds && !adds && block.has_next(g) && g.row_channels == g.blocks_wide * g.width * V;
            const column_place next_place = place_of<T, V>(a, block.set + (is_loaded ? g.block_groups : 0), block.part);
            cursor next[] = {{p.x().data, p.x(), next_place, row}};
            column_results<T, V, unaligned_samples> y(p.y().data, p.x(), place, row, edges, of_edges);
            column_cursor<T, V> u(adds && p.u().data ? p.u().data : p.y().data, p.x(), place, row);
            const float factor = takes_half<fast, true>(p.activation) ? 0.5f : 1.0f;
            const typename decltype(vectors)::added_after add = {vectors, factor};
            choose_activation<!unaligned_samples, true, true>(p.activation, [&](auto chosen) {
                vectors.walk_rows(from, place, count, shared, [&](const row_vectors<1> &row, int slot, int left) {
                    if constexpr (adds) {
                        if (p.u().data)
                            u.store(row.of[0]);
                        u.advance(place);
                    }
                    y.store(result_of<T, V, !unaligned_samples>(chosen, p.activation, p.act_param, row.of[0], shift,
                                                                first, second, add),
                            place, left);
                    if (holds && is_loaded)
                        vectors.load(next, place, slot);
                });
            });
            y.store_edges();
        }

        /* ---- what others receive: after the results, which wait for nothing here ---- */
        const bool by_channel = p.sets == NORMFUSE_SETS_BATCH;
#pragma unroll 1
        for (int i = (int)threadIdx.x; sums && block.part == 0 && i < of.groups_here; i += of.step) {
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
