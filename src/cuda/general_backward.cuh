/* SPDX-License-Identifier: MIT
 *
 * general_backward.cuh - gradients of any call; rows_backward.cu has the formulas, general.cuh the picture. */
#ifndef NORMFUSE_CUDA_GENERAL_BACKWARD_CUH
#define NORMFUSE_CUDA_GENERAL_BACKWARD_CUH

#include "general.cuh"

/* Of part `h`: u - mean, and of dy the gradient of what the activation is of; for SiLU twice that. Of prelu `of_slope`
 * is what values add to the gradient of the slopes, `of_prelu`. */
template <typename Loader, bool alone, int V, typename R, int H, typename Batch, typename Chosen>
__device__ __forceinline__ void differentiate_part(const normfuse_cuda_arguments &a, Chosen chosen, const Batch &from,
                                                   bool reads_post, R factor, const R (&slope)[V], const R (&offset)[V],
                                                   const R (&mean)[V], const R *of_prelu, int h, R (&u)[H], R (&dy)[H],
                                                   R (&of_slope)[H])
{
    constexpr bool fast = Loader::fast;
    const normfuse_cuda_problem &p = a.problem;
    values_of_x<Loader>(from, !alone && p.pre_add().data != nullptr, h, u);
    from.take(GENERAL_DY, h, dy);
    each<H>([&](int i) { u[i] -= mean[(h * H + i) % V]; });
    if (decltype(chosen)::constant != NORMFUSE_IDENTITY) {
        R z[H];
        each<H>([&](int i) { z[i] = fma(u[i], slope[(h * H + i) % V], offset[(h * H + i) % V]); });
        if (!alone && reads_post) {
            R more[H];
            from.take(GENERAL_POST_ADD, h, more);
            each<H>([&](int i) { z[i] = p.from_y() ? more[i] : fma(more[i], factor, z[i]); });
        }
        if constexpr (decltype(chosen)::constant == NORMFUSE_PRELU) {
            each<H>([&](int i) {
                of_slope[i] = z[i] > R(0) ? R(0) : dy[i] * z[i];
                dy[i] = z[i] <= R(0) ? of_prelu[(h * H + i) % V] * dy[i] : dy[i];
            });
        } else {
            differentiate_by<fast>(dy, z, chosen, p.activation, (R)p.act_param);
        }
    }
}

/* What dx takes of totals that are known: of u - mean, and level. Of each channel by the thread that knows it. */
template <typename T, int V, bool columns>
__device__ __forceinline__ void know_totals(const normfuse_cuda_arguments &a, const general_tile<T, V, columns> &tile,
                                            const general_channel<compute<T>> *channels,
                                            totals<compute<T>> *of_channels)
{
    using R = compute<T>;
    const normfuse_cuda_problem &p = a.problem;
    for (int i = (int)threadIdx.x; i < tile.summed(a); i += (int)blockDim.x) {
        int copy;
        const int c = tile.joined > 1 ? i : tile.channel_at(a, i, copy);
        const int set = p.sets == NORMFUSE_SETS_GROUP ? divide(c, a.geometry.by_set_channels) : c;
        const double2 total = reinterpret_cast<const double2 *>(
            a.totals)[(p.sets == NORMFUSE_SETS_GROUP ? tile.n * p.groups : 0) + set];
        const R rstd = parameter<R>(p.rstd(), tile.n, set, R(1)), portion = R(1) / (R)p.set_values;
        const R of_mean = -((R)total.y * rstd) * (rstd * portion);
        const totals<R> of = {-(R)total.x * portion - of_mean * channels[spread<V>(tile.place_of(a, i, 0))].rest,
                              of_mean};
        for (copy = 0; copy < tile.joined; copy++)
            of_channels[spread<V>(tile.place_of(a, i, copy))] = of;
    }
}

/* The sums of the block's channels, of what their threads have: of dy and of dy * u, in a second round of slopes. */
template <typename T, int V, bool columns>
__device__ __forceinline__ void join_channels(const normfuse_cuda_arguments &a, const general_tile<T, V, columns> &tile,
                                              int round, const totals<compute<T>> *entries,
                                              const general_channel<compute<T>> *channels)
{
    using R = compute<T>;
    const normfuse_cuda_geometry &g = a.geometry;
    const int lanes = g.unit_lanes;
    share_items(tile.summed(a), g.channel_bits, [&](int i, bool exists, int lane, int lanes_of_channel) {
        totals<R> sum = {R(0), R(0)};
        for (int copy = 0; copy < (exists ? tile.joined : 0); copy++) {
            const int first = tile.place_of(a, i, copy) * lanes;
#pragma unroll 2
            for (int k = lane; k < lanes; k += lanes_of_channel) {
                const totals<R> found = entries[spread<V>(first + k)];
                sum.plain += found.plain;
                sum.centred += found.centred;
            }
        }
        sum = {sum_few(sum.plain, lanes_of_channel), sum_few(sum.centred, lanes_of_channel)};
        if (!exists || lane != 0)
            return;
        if (round == 0)
            sum.centred -= channels[spread<V>(tile.place_of(a, i, 0))].rest * sum.plain;
        if (a.sums) {
            int copy = 0;
            const int c = tile.joined > 1 ? i : tile.channel_at(a, i, copy);
            const int64_t channel = (g.sums_by_channel ? 0 : tile.n * a.problem.c) + c;
            double2 *const pairs = reinterpret_cast<double2 *>(round == 0 ? a.sums : sums_of_slopes(a));
            pairs[channel * g.sum_slots + tile.part * (tile.joined > 1 ? 1 : g.folded) + copy] =
                make_double2((double)sum.plain, (double)sum.centred);
        }
    });
}

/* The sums of a channel that were added to in turn become one, in its place. */
template <int V, typename R, int N> __device__ __forceinline__ void fold_sums(R (&sums)[N])
{
#pragma unroll
    for (int i = V; i < N; i++)
        sums[i % V] += sums[i];
}

template <typename T, int V, int K, bool columns>
__device__ __forceinline__ void general_backward(const normfuse_cuda_arguments &a)
{
    admit_next_kernel();
    using R = compute<T>;
    constexpr int N = GENERAL_DU + 1;
    constexpr bool fast = sizeof(T) == 2;
    using loader = general_loader<T, V, K, columns, N>;
    constexpr int H = loader::H, values = H * loader::parts, sums_in_turn = V > 4 ? V : values < 4 ? values : 4;
    const normfuse_cuda_problem &p = a.problem;
    const normfuse_cuda_geometry &g = a.geometry;
    NORMFUSE_DYNAMIC_SHARED(dynamic);
    const bool sums = (a.phases & NORMFUSE_PHASE_BACKWARD_SUMS) != 0;
    const bool applies = (a.phases & NORMFUSE_PHASE_BACKWARD_APPLY) != 0, centred = p.sets != NORMFUSE_SETS_NONE;
    const bool reads_post = p.post_add().data && p.activation != NORMFUSE_IDENTITY;
    const normfuse_general_layout at = normfuse_lay_out_general(&g.general, (int)sizeof(R), true);
    totals<R> *const entries = in_shared<totals<R>>(dynamic, at.entries);
    general_channel<R> *const channels = in_shared<general_channel<R>>(dynamic, at.channels);
    totals<R> *const of_channels = in_shared<totals<R>>(dynamic, at.changes);
    R *const of_prelu = in_shared<R>(dynamic, at.slopes);

    const general_tile<T, V, columns> tile(a);
    loader data(a, tile);
    data.from[GENERAL_X] = p.x().data;
    data.from[GENERAL_PRE_ADD] = p.pre_add().data;
    data.from[GENERAL_POST_ADD] = reads_post ? p.post_add().data : nullptr;
    data.from[GENERAL_DY] = p.dy().data;
    data.from[GENERAL_DU] = p.dx().data && applies ? p.du().data : nullptr;
    request_early(a, [&] { data.open(); });
    know_channels(a, tile, channels, of_prelu);
    if (applies && centred)
        know_totals(a, tile, channels, of_channels);
    __syncthreads();

    R slope[V], offset[V], mean[V];
    const int first_channel = tile.active ? tile.unit * V : 0;
    const R factor = takes_half<fast>(p.activation) ? R(0.5) : R(1);
    recall_channels<R, V>(channels, first_channel, factor, slope, offset, mean);
    R first[sums_in_turn] = {}, second[sums_in_turn] = {}, third[sums_in_turn] = {};
    R level[V] = {}, of_mean[V] = {}; /* dx = slope * dy' + of_mean * (u - mean) + level */
    /* Results of known totals; else sums, and results that need no totals. */
    const auto walk = [&](auto totals_known) {
        constexpr bool is_known = decltype(totals_known)::constant;
        const bool applies_here = is_known || (applies && !centred);
        char *const dx = applies_here ? p.dx().data : nullptr;
        const bool stores_dz = applies_here || g.stores_dz || !(p.phases() & NORMFUSE_PHASE_BACKWARD_APPLY);
        char *const dz = stores_dz ? p.dpost_add().data : nullptr;
        data.choose(dz != nullptr, [&](auto reads) {
            constexpr bool alone = decltype(reads)::constant;
            choose_any_activation<has_one_loop<R>>(p.activation, [&](auto chosen) {
                [[maybe_unused]] constexpr bool sums_slopes = !is_known && decltype(chosen)::constant == NORMFUSE_PRELU;
                data.walk(reads, [&](const auto &from) {
                    typename loader::results of_dx = {}, of_dz = {};
                    each<loader::parts>([&](int h) {
                        R u[H], dy[H], of_slope[H];
                        differentiate_part<loader, alone>(a, chosen, from, reads_post, factor, slope, offset, mean,
                                                          of_prelu + first_channel, h, u, dy, of_slope);
                        if constexpr (!is_known) { /* sums */
                            if (from.is_edge())
                                each<H>([&](int i) {
                                    const bool has = from.has(h * H + i);
                                    u[i] = has ? u[i] : R(0);
                                    dy[i] = has ? dy[i] : R(0);
                                    of_slope[i] = has ? of_slope[i] : R(0);
                                });
                            each<H>([&](int i) {
                                const int of = (h * H + i) % sums_in_turn;
                                first[of] += dy[i];
                                second[of] += dy[i] * u[i];
                                if constexpr (sums_slopes)
                                    third[of] += of_slope[i];
                            });
                        }
                        if (!alone && dz) {
                            R through[H];
                            each<H>([&](int i) { through[i] = dy[i] * factor; });
                            of_dz.put(h, through);
                        }
                        if (is_known || dx) {
                            each<H>([&](int i) {
                                const int c = (h * H + i) % V;
                                u[i] =
                                    is_known ? fma(slope[c], dy[i], fma(of_mean[c], u[i], level[c])) : slope[c] * dy[i];
                            });
                            if (!alone && p.du().data) {
                                R more[H];
                                from.take(GENERAL_DU, h, more);
                                each<H>([&](int i) { u[i] += more[i]; });
                            }
                            of_dx.put(h, u);
                        }
                    });
                    if (!alone)
                        from.store(1, dz, of_dz);
                    from.store(0, dx, of_dx);
                });
            });
        });
        data.store_edges(1, dz);
        data.store_edges(0, dx);
    };
    if (sums || !centred)
        walk(choice<false>());
    if (sums) {
        fold_sums<V>(first);
        fold_sums<V>(second);
        fold_sums<V>(third);
        const int rounds = p.dslope().data ? 2 : 1;
#pragma unroll 1
        for (int round = 0; round < rounds; round++) {
            __syncthreads(); /* shared memory that is read no more */
            if (tile.active)
                each<V>([&](int i) {
                    entries[spread<V>((tile.unit * V + i) * g.unit_lanes + tile.lane)] =
                        round == 0 ? totals<R>{first[i] * factor, second[i] * factor} : totals<R>{third[i], R(0)};
                });
            __syncthreads();
            join_channels(a, tile, round, entries, channels);
        }
    }
    if (!applies || !centred)
        return;

    each<V>([&](int i) {
        const totals<R> known = of_channels[spread<V>(first_channel + i)];
        of_mean[i] = known.centred;
        level[i] = known.plain;
    });
    walk(choice<true>());
}

#endif
