/* SPDX-License-Identifier: MIT
 *
 * columns_backward.cu - gradients where channels are adjacent (NHWC). runs_backward.cu has the formulas; here each
 * thread sums its own channels over its rows, so that the channels' sums need no search for who has which. */
#include "columns.cuh"

template <typename T, int V, int K, bool simple>
__device__ __forceinline__ void columns_backward(const normfuse_cuda_arguments &a)
{
    using R = compute<T>;
    constexpr bool fast = sizeof(T) == 2;
    const normfuse_problem &p = a.problem;
    const normfuse_cuda_geometry &g = a.geometry;
    extern __shared__ uint4 dynamic[];
    const int group_lanes = 1 << g.group_bits, channel_lanes = 1 << g.channel_bits;
    const int threads = (int)blockDim.x, channels = g.width * V, groups = divide(channels, g.by_group);
    /* In this order: packs; parts of groups; totals of groups; of each channel slope, offset, squared rstd, shift and
     * the remainder of the mean, weighted sums; of each thread's channels two sums. */
    double *const of_parts = reinterpret_cast<double *>(dynamic + (V > 1 ? 2 * g.kept_shared : 0) * threads);
    totals<R> *const of_groups = reinterpret_cast<totals<R> *>(
        of_parts + groups * (g.exchange == NORMFUSE_EXCHANGE_CLUSTER ? g.parts : 1) * PAIR);
    R *const of_slopes = reinterpret_cast<R *>(of_groups + groups), *const of_offsets = of_slopes + channels;
    R *const of_squares = of_offsets + channels, *const of_shifts = of_squares + channels;
    R *const of_rests = of_shifts + channels;
    totals<R> *const of_channels = reinterpret_cast<totals<R> *>(of_rests + channels + channels % 2);
    R *const of_plain = reinterpret_cast<R *>(of_channels + channels), *const of_centred = of_plain + threads * V;

    const bool sums = (a.phases & NORMFUSE_PHASE_BACKWARD_SUMS) != 0;
    const bool applies = (a.phases & NORMFUSE_PHASE_BACKWARD_APPLY) != 0;
    const bool centred = p.sets != NORMFUSE_SETS_NONE, by_channel = p.sets == NORMFUSE_SETS_BATCH;
    const unsigned block = g.backwards ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    const int first_team = divide((int)block, g.by_parts);
    const int part = (int)block - first_team * g.parts;

    raw<T, V> kept_x[K], kept_dy[K];
    const auto place_of_slot = [&](int slot, int tensor) -> uint4 & {
        return dynamic[(2 * (-1 - slot) + tensor) * threads + (int)threadIdx.x];
    };
    const auto read = [&](int slot, R(&x)[V], R(&dy)[V]) {
        if constexpr (V > 1) {
            unpack<T, V>(slot < 0 ? place_of_slot(slot, 0) : kept_x[slot < 0 ? 0 : slot], x);
            unpack<T, V>(slot < 0 ? place_of_slot(slot, 1) : kept_dy[slot < 0 ? 0 : slot], dy);
        } else {
            unpack<T, V>(kept_x[slot], x);
            unpack<T, V>(kept_dy[slot], dy);
        }
    };

    if (g.exchange == NORMFUSE_EXCHANGE_CLUSTER)
        cluster_arrive(false);
    int parity = 0;
    for (int team = first_team;;) {
        const column_place place = place_of<V>(a, team, part);
        const int shared = V > 1 ? g.kept_shared : 0;
        const int tile_rows = (K + shared) * place.rows_at_once;
        const int first_channel = place.c - place.column * V; /* of the block */
        const int here = min(channels, (int)p.c - first_channel);
        R plain[V] = {}, about[V] = {}, slope[V], offset[V];
        raw<T, V> shift = zero_pack<T, V>();

        for (int pass = 0; pass < g.passes; pass++) {
            const int row = place.first + (g.backwards ? g.passes - 1 - pass : pass) * tile_rows + place.beside;
            const int count = slots_of(a, place, row, K + shared);

            /* ---- load ---- */
            {
                column_cursor<T, V> x(p.x, place, row), dy(p.dy, place, row);
                walk<K>(count, shared, [&](int slot) {
                    if constexpr (V > 1) {
                        if (slot < 0) {
                            copy_ahead(&place_of_slot(slot, 0), x.at, 0);
                            copy_ahead(&place_of_slot(slot, 1), dy.at, 0);
                        } else {
                            kept_x[slot < 0 ? 0 : slot] = x.load();
                            kept_dy[slot < 0 ? 0 : slot] = dy.load();
                        }
                    } else {
                        kept_x[slot] = x.load();
                        kept_dy[slot] = dy.load();
                    }
                    x.advance(p.x, place);
                    dy.advance(p.dy, place);
                });
            }
            if (pass == 0) {
#pragma unroll 1
                for (int i = (int)threadIdx.x; i < here; i += threads) {
                    const int c = first_channel + i, n = g.all_samples ? 0 : place.n;
                    const R scale = R(1) + parameter<R>(p.scale, n, c, R(0));
                    const R offset_here = parameter<R>(p.bias, n, c, R(0)) * scale + parameter<R>(p.shift, n, c, R(0));
                    double mean = 0.0;
                    R rstd = R(1);
                    if (a.source == NORMFUSE_SOURCE_SAVED) {
                        const int group = by_channel ? c : c / (int)(p.c / p.groups);
                        mean = parameter<double>(p.mean, n, group, 0.0);
                        rstd = parameter<R>(p.rstd, n, group, R(1));
                    } else if (a.source == NORMFUSE_SOURCE_RUNNING) {
                        mean = parameter<double>(p.running_mean, 0, c, 0.0);
                        rstd = scaled_by_running(p, c, R(1));
                    }
                    /* The mean in the tensor's own type, and what that leaves out. */
                    const R value[1] = {(R)mean};
                    R back[1];
                    unpack<T, 1>(make_pack<T, 1>(value), back);
                    const R rest = (R)(mean - (double)back[0]),
                            slope_here = parameter<R>(p.weight, n, c, R(1)) * scale * rstd;
                    of_slopes[i] = slope_here;
                    of_offsets[i] = offset_here - rest * slope_here;
                    of_squares[i] = rstd;
                    of_shifts[i] = back[0];
                    of_rests[i] = rest;
                }
                __syncthreads();
                if (place.active) {
                    R mean[V];
#pragma unroll
                    for (int i = 0; i < V; i++) {
                        slope[i] = of_slopes[place.column * V + i];
                        offset[i] = of_offsets[place.column * V + i];
                        mean[i] = of_shifts[place.column * V + i];
                    }
                    shift = make_pack<T, V>(mean);
                }
            }
            if (V > 1 && shared > 0)
                wait_for_copies();
            if (!simple && p.pre_add.data) {
                column_cursor<T, V> other(p.pre_add, place, row);
                walk<K>(count, shared, [&](int slot) {
                    R value[V], added[V], unused[V];
                    read(slot, value, unused);
                    unpack<T, V>(other.load(), added);
#pragma unroll
                    for (int i = 0; i < V; i++)
                        value[i] += added[i];
                    const raw<T, V> pack = make_pack<T, V>(value);
                    if constexpr (V > 1) {
                        if (slot < 0)
                            place_of_slot(slot, 0) = pack;
                        else
                            kept_x[slot < 0 ? 0 : slot] = pack;
                    } else {
                        kept_x[slot] = pack;
                    }
                    other.advance(p.pre_add, place);
                });
            }
            /* x - shift into x, dy' into dy */
            const auto differentiate = [&](auto chosen, R(&x)[V], R(&dy)[V], const column_cursor<T, V> &other) {
                R from[V];
                forget(shift);
                unpack<T, V>(shift, from);
#pragma unroll
                for (int i = 0; i < V; i++)
                    x[i] -= from[i];
                if (chosen.of(p.activation) != NORMFUSE_IDENTITY) {
                    R z[V];
#pragma unroll
                    for (int i = 0; i < V; i++)
                        z[i] = fma(x[i], slope[i], offset[i]);
                    if (!simple && p.post_add.data) {
                        R added[V];
                        unpack<T, V>(other.load(), added);
#pragma unroll
                        for (int i = 0; i < V; i++)
                            z[i] += added[i];
                    }
                    activate_gradient<fast, !simple>(dy, z, chosen.of(p.activation), (R)p.act_param);
                }
            };

            /* ---- sums ---- */
            if (sums) {
                column_cursor<T, V> other(!simple && p.post_add.data ? p.post_add : p.x, place, row);
                choose_activation<simple>(p.activation, [&](auto chosen) {
                    walk<K>(count, shared, [&](int slot) {
                        R x[V], dy[V];
                        read(slot, x, dy);
                        differentiate(chosen, x, dy, other);
#pragma unroll
                        for (int i = 0; i < V; i++) {
                            plain[i] += dy[i];
                            about[i] += dy[i] * x[i];
                        }
                        if (!simple && p.post_add.data)
                            other.advance(p.post_add, place);
                    });
                });
            }
            const bool summed = sums && pass + 1 == g.passes;
            /* In place of dy it must not be written before dy was read for the last time. */
            const bool gives_dy =
                !simple && p.dpost_add.data && (applies || !(p.phases & NORMFUSE_PHASE_BACKWARD_APPLY));
            if (sums && !summed && !applies && !gives_dy)
                continue;

            if (summed) {
                const int at = place.beside * channels + place.column * V;
                if (place.active) {
#pragma unroll
                    for (int i = 0; i < V; i++) {
                        of_plain[at + i] = plain[i];
                        of_centred[at + i] = about[i];
                    }
                }
                __syncthreads();
                for (int round = 0; round < here; round += threads >> g.channel_bits) {
                    const int i = round + ((int)threadIdx.x >> g.channel_bits);
                    const int first = (int)threadIdx.x & (channel_lanes - 1);
                    R sum = R(0), product = R(0);
                    for (int beside = first; i < here && beside < place.rows_at_once; beside += channel_lanes) {
                        sum += of_plain[beside * channels + i];
                        product += of_centred[beside * channels + i];
                    }
                    sum = sum_lanes(sum, channel_lanes);
                    product = sum_lanes(product, channel_lanes);
                    if (i >= here || first != 0)
                        continue;
                    product -= of_rests[i] * sum;
                    of_channels[i] = {of_slopes[i] * sum, of_slopes[i] * product};
                    if (a.sums) {
                        const int64_t channel = (g.sums_by_channel ? 0 : place.n * p.c) + first_channel + i;
                        double *const pair = a.sums + (channel * g.sum_slots + part) * PAIR;
                        pair[0] = (double)sum;
                        pair[1] = (double)product;
                    }
                }
            }

            /* ---- the totals of the groups ---- */
            R share[V] = {}, level[V] = {}; /* dx = slope dy' + share (x - shift) + level */
            if (applies && centred && (summed || (!sums && pass == 0))) {
                const int lane = (int)threadIdx.x & (group_lanes - 1), at_once = threads >> g.group_bits;
                const int groups_here = divide(here, g.by_group);
                if (sums) {
                    __syncthreads();
                    if (g.exchange == NORMFUSE_EXCHANGE_CLUSTER)
                        cluster_wait();
                    for (int round = 0; round < groups_here; round += at_once) {
                        const int group = round + ((int)threadIdx.x >> g.group_bits);
                        const bool exists = group < groups_here;
                        R sum = R(0), product = R(0);
                        for (int i = lane; exists && i < g.group; i += group_lanes) {
                            sum += of_channels[group * g.group + i].plain;
                            product += of_channels[group * g.group + i].centred;
                        }
                        sum = sum_lanes(sum, group_lanes);
                        product = sum_lanes(product, group_lanes);
                        if (!exists)
                            continue;
                        if (g.exchange == NORMFUSE_EXCHANGE_CLUSTER) {
                            double *const there = of_parts + (group * g.parts + part) * PAIR;
                            for (int other = lane; other < g.parts; other += group_lanes) {
                                store_remote(there, other, (double)sum);
                                store_remote(there + 1, other, (double)product);
                            }
                        } else if (lane == 0) {
                            double *const pair =
                                g.exchange == NORMFUSE_EXCHANGE_GRID
                                    ? a.partials +
                                          ((((int64_t)parity * g.teams + first_team) * groups + group) * g.parts +
                                           part) *
                                              PAIR
                                    : of_parts + group * PAIR;
                            pair[0] = (double)sum;
                            pair[1] = (double)product;
                        }
                    }
                    if (g.exchange == NORMFUSE_EXCHANGE_CLUSTER) {
                        cluster_arrive(true);
                        cluster_wait();
                    } else if (g.exchange == NORMFUSE_EXCHANGE_GRID) {
                        team_barrier(a.tickets + first_team * ticket_stride, part, g.parts);
                    } else {
                        __syncthreads();
                    }
                }
                const bool far = g.exchange == NORMFUSE_EXCHANGE_GRID;
                const double *const pairs =
                    far ? a.partials + ((int64_t)parity * g.teams + first_team) * groups * g.parts * PAIR : of_parts;
                for (int round = 0; round < groups_here; round += at_once) {
                    const int group = round + ((int)threadIdx.x >> g.group_bits);
                    if (round + ((int)(threadIdx.x & ~31u) >> g.group_bits) >= groups_here)
                        break;
                    const bool exists = group < groups_here;
                    double sum = 0.0, product = 0.0;
                    if (sums) {
                        const double *const own = pairs + (int64_t)(exists ? group : 0) * g.parts * PAIR;
                        for (int i = lane; i < g.parts; i += group_lanes) {
                            sum += read_part(own + i * PAIR, far);
                            product += read_part(own + i * PAIR + 1, far);
                        }
                        sum = sum_lanes(sum, group_lanes);
                        product = sum_lanes(product, group_lanes);
                    } else if (exists) {
                        const int64_t c = first_channel + (int64_t)group * g.group;
                        const int64_t set = by_channel ? c : place.n * p.groups + c / (p.c / p.groups);
                        sum = a.totals[set * PAIR];
                        product = a.totals[set * PAIR + 1];
                    }
                    if (exists && lane == 0) {
                        const R rstd = of_squares[group * g.group], part_of = R(1) / (R)p.set_values;
                        of_groups[group] = {-(R)sum * part_of, -((R)product * rstd) * (rstd * part_of)};
                    }
                }
                __syncthreads();
            }
            if (applies && centred && place.active) {
#pragma unroll
                for (int i = 0; i < V; i++) {
                    const totals<R> of_group = of_groups[divide(place.column * V + i, g.by_group)];
                    share[i] = of_group.centred;
                    level[i] = of_group.plain - of_group.centred * of_rests[place.column * V + i];
                }
            }

            /* ---- results ---- */
#pragma unroll
            for (int k = 0; k < K; k++) {
                forget(kept_x[k]);
                forget(kept_dy[k]);
            }
            column_cursor<T, V> other(!simple && p.post_add.data ? p.post_add : p.x, place, row);
            column_cursor<T, V> dx(p.dx.data ? p.dx : p.x, place, row),
                du(!simple && p.du.data ? p.du : p.x, place, row);
            column_cursor<T, V> dpost(!simple && p.dpost_add.data ? p.dpost_add : p.x, place, row);
            if (gives_dy || (applies && p.dx.data))
                choose_activation<simple>(p.activation, [&](auto chosen) {
                    walk<K>(count, shared, [&](int slot) {
                        R x[V], dy[V];
                        read(slot, x, dy);
                        differentiate(chosen, x, dy, other);
                        if (!simple && p.post_add.data)
                            other.advance(p.post_add, place);
                        if (gives_dy) {
                            dpost.store(make_pack<T, V>(dy));
                            dpost.advance(p.dpost_add, place);
                        }
                        if (p.dx.data && applies) {
#pragma unroll
                            for (int i = 0; i < V; i++)
                                x[i] = centred ? fma(slope[i], dy[i], fma(share[i], x[i], level[i])) : slope[i] * dy[i];
                            if (!simple && p.du.data) {
                                R added[V];
                                unpack<T, V>(du.load(), added);
#pragma unroll
                                for (int i = 0; i < V; i++)
                                    x[i] += added[i];
                                du.advance(p.du, place);
                            }
                            dx.store(make_pack<T, V>(x));
                            dx.advance(p.dx, place);
                        }
                    });
                });
        }

        if (g.exchange != NORMFUSE_EXCHANGE_GRID)
            break;
        team += g.teams;
        if (team >= g.sets)
            break;
        parity ^= 1;
        __syncthreads();
    }
}

#define COLUMNS_BACKWARD(picture, direction, type, pack, kept)                                                         \
    extern "C" __global__ void __maxnreg__(128)                                                                        \
        normfuse_##picture##_##direction##_##type##_##pack##x##kept(const __grid_constant__ normfuse_cuda_arguments a) \
    {                                                                                                                  \
        columns_backward<type, pack, kept, (kept > 3)>(a);                                                             \
    }
NORMFUSE_CUDA_COLUMNS_BACKWARD(COLUMNS_BACKWARD)
