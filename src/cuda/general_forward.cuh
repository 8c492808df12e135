/* SPDX-License-Identifier: MIT
 *
 * general_forward.cuh - statistics and results of any call; general.cuh has the picture. */
#ifndef NORMFUSE_CUDA_GENERAL_FORWARD_CUH
#define NORMFUSE_CUDA_GENERAL_FORWARD_CUH

#include "general.cuh"

/* Results of all of the thread's vectors, and u where it `writes` that. `of_prelu`: slopes of the thread's channels. */
template <typename T, int V, typename Loader>
__device__ __forceinline__ void store_results(const normfuse_cuda_arguments &a, Loader &data, bool writes,
                                              compute<T> factor, const compute<T> (&slope)[V],
                                              const compute<T> (&offset)[V], const compute<T> (&mean)[V],
                                              const compute<T> *of_prelu)
{
    using R = compute<T>;
    constexpr int H = Loader::H;
    constexpr bool fast = sizeof(T) == 2;
    const normfuse_cuda_problem &p = a.problem;
    const bool adds = p.pre_add().data != nullptr;
    char *const u = writes ? p.u().data : nullptr;
    data.choose(u != nullptr, [&](auto reads) {
        constexpr bool alone = decltype(reads)::constant;
        choose_any_activation(p.activation, [&](auto chosen) {
            data.walk(reads, [&](const auto &from) {
                typename Loader::results y = {}, of_u = {};
                each<Loader::parts>([&](int h) {
                    R z[H];
                    values_of_x<Loader>(from, !alone && adds, h, z);
                    if (!alone && u)
                        of_u.put(h, z);
                    each<H>([&](int i) {
                        const int c = (h * H + i) % V;
                        z[i] = fma(z[i] - mean[c], slope[c], offset[c]);
                    });
                    if (!alone && p.post_add().data) {
                        R more[H];
                        from.take(GENERAL_POST_ADD, h, more);
                        each<H>([&](int i) { z[i] = fma(more[i], factor, z[i]); });
                    }
                    if constexpr (decltype(chosen)::constant == NORMFUSE_PRELU)
                        each<H>([&](int i) { z[i] = z[i] > R(0) ? z[i] : of_prelu[(h * H + i) % V] * z[i]; });
                    else
                        activate<fast, true>(z, chosen, p.activation, (R)p.act_param);
                    y.put(h, z);
                });
                if (!alone)
                    from.store(1, u, of_u);
                from.store(0, p.y().data, y);
            });
        });
    });
    data.store_edges(1, u);
    data.store_edges(0, p.y().data);
}

/* The statistics of the sets, of the block's subvectors: first means, then squares about them. They go to of_sets and
 * means, or to memory, where a later kernel joins them. */
template <typename T, int V, bool columns>
__device__ __forceinline__ void join_sets(const normfuse_cuda_arguments &a, const general_tile<T, V, columns> &tile,
                                          int sets_here, const subvector_sums<compute<T>> *subvectors,
                                          cluster_mailbox &mailbox, double *of_blocks,
                                          group_statistics<compute<T>> *of_sets, double *means)
{
    using R = compute<T>;
    const normfuse_cuda_problem &p = a.problem;
    const normfuse_cuda_geometry &g = a.geometry;
    const bool applies = (a.phases & NORMFUSE_PHASE_APPLY) != 0, by_channel = p.sets == NORMFUSE_SETS_BATCH;
    const bool in_cluster = V <= 2 && g.exchange == NORMFUSE_EXCHANGE_CLUSTER;
    const int entries = (g.group >> (columns ? g.subvector_bits : 0)) * g.unit_lanes;
    const auto finish = [&](int set, double mean_of_set, R squares_of_set) {
        group_statistics<R> found;
        found.variance = squares_of_set / (R)p.set_values;
        found.rstd = inverse_root(found.variance + (R)p.eps);
        split_mean<T>(mean_of_set, found.mean, found.rest);
        of_sets[set] = found;
        means[set] = mean_of_set;
    };
    if (in_cluster)
        await_open_mailboxes();
    share_items(sets_here, g.group_bits, [&](int set, bool exists, int lane, int lanes_of_set) {
        const int copies = exists ? tile.joined : 0;
        const auto found_at = [&](int copy, int i) {
            return subvectors[spread<V>(tile.place_of(a, set, copy) * entries + i)];
        };
        /* Of the first that has any: others hold nothing that is near. */
        R base = R(0);
        bool has_base = false;
        for (int copy = 0; copy < copies && !has_base; copy++) {
            for (int i = 0; i < entries && !has_base; i++) {
                const subvector_sums<R> found = found_at(copy, i);
                base = found.first;
                has_base = found.count > R(0);
            }
        }
        R count = R(0), mean_of_set = R(0), squares_of_set = R(0);
        for (int copy = 0; copy < copies; copy++) {
#pragma unroll 2
            for (int i = lane; i < entries; i += lanes_of_set) {
                const subvector_sums<R> found = found_at(copy, i);
                count += found.count;
                mean_of_set += found.count * ((found.first - base) + found.mean);
            }
        }
        count = sum_few(count, lanes_of_set);
        mean_of_set = sum_few(mean_of_set, lanes_of_set) / max(count, R(1));
        for (int copy = 0; copy < copies; copy++) {
#pragma unroll 2
            for (int i = lane; i < entries; i += lanes_of_set) {
                const subvector_sums<R> found = found_at(copy, i);
                const R distance = ((found.first - base) + found.mean) - mean_of_set;
                squares_of_set += found.count > R(0) ? found.squares + found.count * distance * distance : R(0);
            }
        }
        squares_of_set = sum_few(squares_of_set, lanes_of_set);
        const double whole = (double)base + (double)mean_of_set;
        if (in_cluster) {
            for (int other = exists ? lane : g.joined_blocks; other < g.joined_blocks; other += lanes_of_set) {
                double *const there = of_blocks + (set * g.joined_blocks + tile.rank) * TRIPLE;
                send(mailbox, there, other, (double)count);
                send(mailbox, there + 1, other, whole);
                send(mailbox, there + 2, other, (double)squares_of_set);
            }
        } else if (exists && lane == 0) {
            if (applies) {
                finish(set, whole, squares_of_set);
            } else {
                /* With rows folded sets are single channels here. */
                int copy = 0;
                const int first = tile.joined > 1 ? set : tile.channel_at(a, set * g.group, copy);
                const int copies_apart = tile.joined > 1 ? 1 : g.folded;
                const int64_t of_all =
                    (by_channel ? 0 : tile.n * (int64_t)divide((int)p.c, g.by_group)) + divide(first, g.by_group);
                double *const triple = a.partials + ((of_all * g.parts + tile.part) * copies_apart + copy) * TRIPLE;
                triple[0] = (double)count;
                triple[1] = whole;
                triple[2] = (double)squares_of_set;
            }
        }
    });
    if (in_cluster) {
        await_mailbox(mailbox);
        share_items(sets_here, g.group_bits, [&](int set, bool exists, int lane, int lanes_of_set) {
            const double *const own = of_blocks + set * g.joined_blocks * TRIPLE;
            const double base = own[1];
            const int last = exists ? g.joined_blocks : 0;
            R count = R(0), mean_of_set = R(0), squares_of_set = R(0);
            for (int i = lane; i < last; i += lanes_of_set) {
                count += (R)own[i * TRIPLE];
                mean_of_set += (R)own[i * TRIPLE] * (R)(own[i * TRIPLE + 1] - base);
            }
            mean_of_set = sum_few(mean_of_set, lanes_of_set) / max(sum_few(count, lanes_of_set), R(1));
            for (int i = lane; i < last; i += lanes_of_set) {
                const R distance = (R)(own[i * TRIPLE + 1] - base) - mean_of_set;
                squares_of_set += (R)own[i * TRIPLE + 2] + (R)own[i * TRIPLE] * distance * distance;
            }
            squares_of_set = sum_few(squares_of_set, lanes_of_set);
            if (exists && lane == 0)
                finish(set, base + (double)mean_of_set, squares_of_set);
        });
    }
}

template <typename T, int V, bool columns>
__device__ __forceinline__ void store_sets(const normfuse_cuda_arguments &a, const general_tile<T, V, columns> &tile,
                                           int sets_here, const group_statistics<compute<T>> *of_sets,
                                           const double *means)
{
    using R = compute<T>;
    const normfuse_cuda_problem &p = a.problem;
    const normfuse_cuda_geometry &g = a.geometry;
    const bool by_channel = p.sets == NORMFUSE_SETS_BATCH;
    for (int i = (int)threadIdx.x; i < sets_here; i += (int)blockDim.x) {
        const int set = divide(tile.first_channel, g.by_set_channels) + i;
        const group_statistics<R> found = of_sets[i];
        const double variance = store_statistics(a, tile.n, set, by_channel ? set : tile.n * p.groups + set, means[i],
                                                 found.variance, found.rstd, (double)p.set_values);
        if (p.has_running_momentum() && by_channel)
            update_running<R>(p, set, means[i], variance);
    }
}

template <typename T, int V, int K, bool columns>
__device__ __forceinline__ void general_forward(const normfuse_cuda_arguments &a)
{
    admit_next_kernel();
    using R = compute<T>;
    constexpr int N = GENERAL_POST_ADD + 1;
    constexpr int max_bits = !columns ? 0 : V == 8 ? 3 : V / 2;
    constexpr bool fast = sizeof(T) == 2, joins = V <= 2; /* may have both the sums and what follows from them */
    using loader = general_loader<T, V, K, columns, N>;
    constexpr int H = loader::H, values = H * loader::parts, sums_in_turn = V > 4 ? V : values < 4 ? values : 4;
    const normfuse_cuda_problem &p = a.problem;
    const normfuse_cuda_geometry &g = a.geometry;
    NORMFUSE_DYNAMIC_SHARED(dynamic);
    __shared__ cluster_mailbox mailbox;
    const bool sums = (a.phases & NORMFUSE_PHASE_STATISTICS) != 0;
    const bool applies = (a.phases & NORMFUSE_PHASE_APPLY) != 0 && (joins || !sums);
    const bool adds = p.pre_add().data != nullptr, in_cluster = joins && g.exchange == NORMFUSE_EXCHANGE_CLUSTER;
    const normfuse_general_layout at = normfuse_lay_out_general(&g.general, (int)sizeof(R), false);
    subvector_sums<R> *const subvectors = in_shared<subvector_sums<R>>(dynamic, at.entries);
    general_channel<R> *const channels = in_shared<general_channel<R>>(dynamic, at.channels);
    group_statistics<R> *const of_sets = in_shared<group_statistics<R>>(dynamic, at.sets);
    double *const means = in_shared<double>(dynamic, at.means), *const of_blocks =
                                                                    in_shared<double>(dynamic, at.blocks);
    R *const of_prelu = in_shared<R>(dynamic, at.slopes);

    const general_tile<T, V, columns> tile(a);
    loader data(a, tile);
    data.from[GENERAL_X] = p.x().data;
    data.from[GENERAL_PRE_ADD] = p.pre_add().data;
    data.from[GENERAL_POST_ADD] = !sums || data.holds ? p.post_add().data : nullptr;
    request_early(a, [&] { data.open(); });
    const int sets_here = sums ? divide(tile.summed(a), g.by_group) : 0;
    if (in_cluster)
        open_only_mailbox(mailbox, sets_here * g.joined_blocks * TRIPLE * (int)sizeof(double));
    if (applies)
        know_channels(a, tile, channels, of_prelu, sums);

    if (sums) {
        /* Squares about one of the thread's own values cannot cancel by more than their number. */
        R shift[V], first[sums_in_turn] = {}, second[sums_in_turn] = {};
        char *const u_to = !applies && adds ? p.u().data : nullptr;
        data.first_values(shift, [&](const auto &from, int h, auto &u) { values_of_x<loader>(from, adds, h, u); });
        data.choose(u_to != nullptr, [&](auto reads) {
            constexpr bool alone = decltype(reads)::constant;
            data.walk(reads, [&](const auto &from) {
                typename loader::results of_u = {};
                each<loader::parts>([&](int h) {
                    R u[H];
                    values_of_x<loader>(from, !alone && adds, h, u);
                    if (!alone && u_to)
                        of_u.put(h, u);
                    if (from.is_edge())
                        each<H>([&](int i) { u[i] = from.has(h * H + i) ? u[i] : shift[(h * H + i) % V]; });
                    each<H>([&](int i) {
                        const int of = (h * H + i) % sums_in_turn;
                        const R distance = u[i] - shift[(h * H + i) % V];
                        first[of] += distance;
                        second[of] += distance * distance;
                    });
                });
                if (!alone)
                    from.store(1, u_to, of_u);
            });
        });
        data.store_edges(1, u_to);
        R mean[V], squares[V];
#pragma unroll
        for (int i = V; i < sums_in_turn; i++) {
            first[i % V] += first[i];
            second[i % V] += second[i];
        }
        const R share = R(1) / (R)max(tile.count, 1);
        each<V>([&](int i) { mean[i] = first[i] * share; });
        if (tile.has_edges())
            each<V>([&](int i) { mean[i] = first[i] / (R)max(tile.count_of(i), 1); });
        each<V>([&](int i) { squares[i] = second[i] - first[i] * mean[i]; });
        const int subvector_bits = columns ? g.subvector_bits : 0, lanes = g.unit_lanes;
        if (p.pre_bias().data) {
            R bias[V];
#pragma unroll
            for (int i = 0; i < V; i++) {
                int copy;
                bias[i] = parameter<R>(p.pre_bias(), tile.n,
                                       tile.channel_at(a, tile.active ? tile.unit * V + i : 0, copy), R(0));
            }
            add_bias<R, V>(bias, shift, mean);
        }
        if constexpr (columns)
            join_channels<R, V>(shift, mean, squares, (R)tile.count, subvector_bits);
        __syncthreads(); /* shared memory that is read no more */
        const int subvectors_a_unit = 1 << (max_bits - subvector_bits);
        if (tile.active) {
#pragma unroll
            for (int i = 0; i < V; i++)
                if (i < subvectors_a_unit)
                    subvectors[spread<V>((tile.unit * subvectors_a_unit + i) * lanes + tile.lane)] = {
                        shift[i], mean[i], squares[i], (R)(tile.count_of(i) << subvector_bits)};
        }
        __syncthreads();

        join_sets<T, V, columns>(a, tile, sets_here, subvectors, mailbox, of_blocks, of_sets, means);
    }
    if (!applies)
        return;

    /* ---- results ---- */
    __syncthreads();
    if constexpr (joins) {
        if (sums && !data.holds) {
            data.from[GENERAL_POST_ADD] = p.post_add().data;
            data.open();
        }
    }
    R slope[V], offset[V], mean[V];
    const int first_channel = tile.active ? tile.unit * V : 0;
    const R factor = takes_half<fast, true>(p.activation) ? R(0.5) : R(1);
    recall_channels<R, V>(channels, first_channel, sums ? R(1) : factor, slope, offset, mean);
    if (joins && sums) {
#pragma unroll
        for (int i = 0; i < V; i++) {
            const group_statistics<R> found = of_sets[divide(first_channel + i, g.by_group)];
            R left;
            slope[i] *= found.rstd * factor;
            mean[i] = add_exactly(found.mean, mean[i], left);
            offset[i] = offset[i] * factor - (found.rest + left) * slope[i];
        }
    }
    const bool writes = adds && p.u().data && (sums || !(p.phases() & NORMFUSE_PHASE_STATISTICS));
    store_results<T, V>(a, data, writes, factor, slope, offset, mean, of_prelu + first_channel);

    /* ---- what others receive ---- */
    if (joins && sums && tile.rank == 0)
        store_sets(a, tile, sets_here, of_sets, means);
}

#endif
