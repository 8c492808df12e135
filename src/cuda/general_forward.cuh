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
        choose_any_activation<has_one_loop<R>>(p.activation, [&](auto chosen) {
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
                        activate<fast>(z, chosen, p.activation, (R)p.act_param);
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

/* What a later kernel joins of the sets, of the block's subvectors: first means, then squares about them. */
template <typename T, int V, bool columns>
__device__ __forceinline__ void join_sets(const normfuse_cuda_arguments &a, const general_tile<T, V, columns> &tile,
                                          const subvector_sums<compute<T>> *subvectors)
{
    using R = compute<T>;
    const normfuse_cuda_problem &p = a.problem;
    const normfuse_cuda_geometry &g = a.geometry;
    const bool by_channel = p.sets == NORMFUSE_SETS_BATCH;
    const int entries = (g.group >> (columns ? g.subvector_bits : 0)) * g.unit_lanes;
    const int sets_here = divide(tile.summed(a), g.by_group);
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
        if (exists && lane == 0) {
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
    });
}

template <typename T, int V, int K, bool columns>
__device__ __forceinline__ void general_forward(const normfuse_cuda_arguments &a)
{
    admit_next_kernel();
    using R = compute<T>;
    constexpr int N = GENERAL_POST_ADD + 1;
    constexpr int max_bits = !columns ? 0 : V == 8 ? 3 : V / 2;
    constexpr bool fast = sizeof(T) == 2;
    using loader = general_loader<T, V, K, columns, N>;
    constexpr int H = loader::H, values = H * loader::parts, sums_in_turn = V > 4 ? V : values < 4 ? values : 4;
    const normfuse_cuda_problem &p = a.problem;
    const normfuse_cuda_geometry &g = a.geometry;
    NORMFUSE_DYNAMIC_SHARED(dynamic);
    const bool sums = (a.phases & NORMFUSE_PHASE_STATISTICS) != 0;
    /* A kernel has one of both. With a `return` behind the sums in its place results spill. */
    const bool applies = (a.phases & NORMFUSE_PHASE_APPLY) != 0 && !sums;
    const bool adds = p.pre_add().data != nullptr;
    const normfuse_general_layout at = normfuse_lay_out_general(&g.general, (int)sizeof(R), false);
    subvector_sums<R> *const subvectors = in_shared<subvector_sums<R>>(dynamic, at.entries);
    general_channel<R> *const channels = in_shared<general_channel<R>>(dynamic, at.channels);
    R *const of_prelu = in_shared<R>(dynamic, at.slopes);

    const general_tile<T, V, columns> tile(a);
    loader data(a, tile);
    data.from[GENERAL_X] = p.x().data;
    data.from[GENERAL_PRE_ADD] = p.pre_add().data;
    data.from[GENERAL_POST_ADD] = !sums ? p.post_add().data : nullptr;
    request_early(a, [&] { data.open(); });
    if (applies)
        know_channels(a, tile, channels, of_prelu);

    if (sums) {
        /* Squares about one of the thread's own values cannot cancel by more than their number. */
        R shift[V], first[sums_in_turn] = {}, second[sums_in_turn] = {};
        char *const u_to = adds ? p.u().data : nullptr;
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

        join_sets(a, tile, subvectors);
    }
    if (!applies)
        return;

    /* ---- results ---- */
    __syncthreads();
    R slope[V], offset[V], mean[V];
    const int first_channel = tile.active ? tile.unit * V : 0;
    const R factor = takes_half<fast>(p.activation) ? R(0.5) : R(1);
    recall_channels<R, V>(channels, first_channel, factor, slope, offset, mean);
    const bool writes = adds && p.u().data && !(p.phases() & NORMFUSE_PHASE_STATISTICS);
    store_results<T, V>(a, data, writes, factor, slope, offset, mean, of_prelu + first_channel);
}

#endif
