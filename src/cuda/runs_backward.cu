/* SPDX-License-Identifier: MIT
 *
 * runs_backward.cu - gradients where positions are adjacent (NCHW). A block reads x and dy of its part of a set once
 * and keeps both; the sums of dy' and dy' * (x - mean) of each channel go to memory for the gradients of the
 * parameters, and their weighted totals over the set become dx.
 *
 *   dx = slope * dy' - (plain + rstd^2 * centred * (x - mean)) / values,   slope = rstd * weight * (1 + scale)
 *   plain = sum of slope * dy' over the set,  centred = sum of slope * dy' * (x - mean) */
#include "runs.cuh"

/* z = (x - shift - rest) * slope + offset; shift + rest is the mean. */
template <typename R> struct run_gradient {
    R shift, rest, slope, offset;
};

template <bool many, typename R>
__device__ __forceinline__ void prepare_gradients(const normfuse_cuda_arguments &a, const run_place &place,
                                                  run_gradient<R> *coefficients)
{
    const normfuse_problem &p = a.problem;
    const normfuse_cuda_geometry &g = a.geometry;
    const bool by_sample = p.sets == NORMFUSE_SETS_BATCH;
    for (int i = (int)threadIdx.x; i < g.coefficients; i += (int)blockDim.x) {
        int n = place.n, c = place.c;
        if (many) {
            const int nth = by_sample ? i : divide(i, g.by_outer);
            const int set = place.set - ((int)threadIdx.x >> g.lane_bits) + nth;
            if (set >= g.sets)
                break;
            begin_of(a, set, n, c);
            c += by_sample ? 0 : i - nth * g.outer;
        } else if (!by_sample) {
            if (place.first_outer + i >= g.outer)
                break;
            c += place.first_outer + i;
        }
        const R scale = R(1) + parameter<R>(p.scale, n, c, R(0));
        R slope = parameter<R>(p.weight, n, c, R(1)) * scale;
        const R offset = parameter<R>(p.bias, n, c, R(0)) * scale + parameter<R>(p.shift, n, c, R(0));
        double mean = 0.0;
        if (a.source == NORMFUSE_SOURCE_SAVED) {
            const int group = by_sample ? c : divide(c, g.by_outer);
            mean = parameter<double>(p.mean, n, group, 0.0);
            slope *= parameter<R>(p.rstd, n, group, R(1));
        } else if (a.source == NORMFUSE_SOURCE_RUNNING) {
            mean = parameter<double>(p.running_mean, 0, c, 0.0);
            slope = scaled_by_running(p, c, slope);
        }
        const R shift = (R)mean;
        coefficients[i] = {shift, (R)(mean - (double)shift), slope, offset};
    }
}

template <typename T, int V, int K, bool many, bool simple>
__device__ __forceinline__ void runs_backward(const normfuse_cuda_arguments &a)
{
    using R = compute<T>;
    constexpr bool fast = sizeof(T) == 2;
    const normfuse_problem &p = a.problem;
    const normfuse_cuda_geometry &g = a.geometry;
    extern __shared__ uint4 dynamic[];
    __shared__ totals<R> of_warps[most_warps];
    __shared__ double of_parts[PAIR * MOST_CLUSTER];
    const int lanes = 1 << g.lane_bits, lane = (int)threadIdx.x & (lanes - 1),
              segment = (int)threadIdx.x >> g.lane_bits;
    const int threads = (int)blockDim.x;
    const unsigned segment_mask = (lanes == 32 ? full_mask : (1u << lanes) - 1) << (((int)threadIdx.x % 32) & -lanes);
    run_gradient<R> *const coefficients =
        reinterpret_cast<run_gradient<R> *>(dynamic + (V > 1 ? 2 * g.kept_shared : 0) * threads);
    totals<R> *const of_channels = reinterpret_cast<totals<R> *>(coefficients + g.coefficients);

    const bool sums = (a.phases & NORMFUSE_PHASE_BACKWARD_SUMS) != 0;
    const bool applies = (a.phases & NORMFUSE_PHASE_BACKWARD_APPLY) != 0;
    const bool centred = p.sets != NORMFUSE_SETS_NONE, by_sample = p.sets == NORMFUSE_SETS_BATCH;
    const unsigned block = g.backwards ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    const int team = divide((int)block, g.by_parts);
    const int part = (int)block - team * g.parts, warp = (int)threadIdx.x / 32;

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
    for (int set = team;;) {
        const run_place place = place_of<many>(a, set, part, 0);
        const int shared = V > 1 ? min(g.kept_shared, place.rows) : 0;

        /* ---- load ---- */
        {
            run_cursor<T, V> x(a, p.x, place), dy(a, p.dy, place);
            walk<K>(place, g.spans, shared, [&](int slot, bool valid, bool last) {
                if constexpr (V > 1) {
                    if (slot < 0) {
                        if (valid) {
                            copy_ahead(&place_of_slot(slot, 0), x.at, 0);
                            copy_ahead(&place_of_slot(slot, 1), dy.at, 0);
                        }
                    } else {
                        kept_x[slot < 0 ? 0 : slot] = valid ? x.load() : zero_pack<T, V>();
                        kept_dy[slot < 0 ? 0 : slot] = valid ? dy.load() : zero_pack<T, V>();
                    }
                } else {
                    kept_x[slot] = valid ? x.load() : zero_pack<T, V>();
                    kept_dy[slot] = valid ? dy.load() : zero_pack<T, V>();
                }
                x.advance(a, p.x, last);
                dy.advance(a, p.dy, last);
            });
        }
        prepare_gradients<many>(a, place, coefficients);
        if (V > 1 && shared > 0)
            wait_for_copies();
        if (!simple && p.pre_add.data) {
            run_cursor<T, V> other(a, p.pre_add, place);
            walk<K>(place, g.spans, shared, [&](int slot, bool valid, bool last) {
                if (valid) {
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
                }
                other.advance(a, p.pre_add, last);
            });
        }
        __syncthreads();

        const run_gradient<R> *own = coefficients;
        if (many)
            own += segment * (by_sample ? 1 : g.outer);
        else if (!by_sample)
            own += place.outer - place.first_outer;
        /* x - mean into x, dy' into dy */
        const auto differentiate = [&](auto chosen, const run_gradient<R> &coefficient, R(&x)[V], R(&dy)[V],
                                       const run_cursor<T, V> &other) {
#pragma unroll
            for (int i = 0; i < V; i++)
                x[i] = (x[i] - coefficient.shift) - coefficient.rest;
            if (chosen.of(p.activation) != NORMFUSE_IDENTITY) {
                R z[V];
#pragma unroll
                for (int i = 0; i < V; i++)
                    z[i] = fma(x[i], coefficient.slope, coefficient.offset);
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
        totals<R> met = {R(0), R(0)};
        if (sums) {
            totals<R> channel = {R(0), R(0)};
            totals<R> *entry = of_channels + segment * g.channels_a_segment;
            const auto flush = [&](const run_gradient<R> &coefficient) {
                met.plain += coefficient.slope * channel.plain;
                met.centred += coefficient.slope * channel.centred;
                if (a.sums) {
                    const R plain = sum_lanes(channel.plain, lanes, segment_mask);
                    const R about = sum_lanes(channel.centred, lanes, segment_mask);
                    if (lane == 0)
                        *entry = {plain, about};
                    entry++;
                }
                channel = {R(0), R(0)};
            };
            const run_gradient<R> *coefficient = own;
            run_cursor<T, V> other(a, !simple && p.post_add.data ? p.post_add : p.x, place);
            int left = place.rows;
            choose_activation<simple>(p.activation, [&](auto chosen) {
                walk<K>(place, g.spans, shared, [&](int slot, bool valid, bool last) {
                    if (valid) {
                        R x[V], dy[V];
                        read(slot, x, dy);
                        differentiate(chosen, *coefficient, x, dy, other);
#pragma unroll
                        for (int i = 0; i < V; i++) {
                            channel.plain += dy[i];
                            channel.centred += dy[i] * x[i];
                        }
                    }
                    if (!simple && p.post_add.data)
                        other.advance(a, p.post_add, last);
                    left--;
                    if (by_sample ? left == 0 : last || left == 0) {
                        flush(*coefficient);
                        coefficient += !by_sample;
                    }
                });
            });
        }
        /* What the channels of the block summed, to memory: while the totals of other blocks are on their way. */
        const auto write_sums = [&] {
            if (a.sums) {
                if (many) {
                    /* A segment has its whole set: entry i is channel i of it. */
                    if (place.rows > 0)
                        for (int i = lane; i < (by_sample ? 1 : g.outer); i += lanes) {
                            const totals<R> sum = of_channels[segment * g.channels_a_segment + i];
                            double *const pair = a.sums + ((int64_t)place.n * p.c + place.c + i) * PAIR;
                            pair[0] = (double)sum.plain;
                            pair[1] = (double)sum.centred;
                        }
                } else {
                    const int first = part * g.part_rows;
                    const int rows = max(0, min(g.part_rows, g.rows - first));
                    const int before = first - place.first_outer * g.spans;
                    const int channels = rows == 0   ? 0
                                         : by_sample ? 1
                                                     : divide(before + rows + g.spans - 1, g.by_spans);
                    for (int i = (int)threadIdx.x; i < channels; i += threads) {
                        const int low = by_sample ? 0 : max(0, i * g.spans - before) / g.segment_rows;
                        const int end = by_sample ? rows : min(rows, (i + 1) * g.spans - before);
                        R plain = R(0), about = R(0);
                        for (int q = low; q * g.segment_rows < end; q++) {
                            const int j = by_sample ? 0 : i - divide(q * g.segment_rows + before, g.by_spans);
                            plain += of_channels[q * g.channels_a_segment + j].plain;
                            about += of_channels[q * g.channels_a_segment + j].centred;
                        }
                        const int outer = place.first_outer + i;
                        const int slot = by_sample ? part : part - outer * g.spans / g.part_rows;
                        const int64_t channel = by_sample ? place.c : (int64_t)place.n * p.c + place.c + outer;
                        double *const pair = a.sums + (channel * g.sum_slots + slot) * PAIR;
                        pair[0] = (double)plain;
                        pair[1] = (double)about;
                    }
                }
            }
        };
        /* In place of dy it must not be written before dy was read for the last time. */
        const bool gives_dy = !simple && p.dpost_add.data && (applies || !(p.phases & NORMFUSE_PHASE_BACKWARD_APPLY));
        const bool exchanges = sums && applies && centred && !many;
        if (sums && !exchanges) {
            __syncthreads();
            write_sums();
        }
        if (!applies && !gives_dy)
            return;

        /* ---- the totals of the set ---- */
        R plain = R(0), about = R(0);
        if (centred && applies) {
            if (sums) {
                totals<R> all = {sum_lanes(met.plain, many ? lanes : 32), sum_lanes(met.centred, many ? lanes : 32)};
                if (!many) {
                    if (threadIdx.x % 32 == 0)
                        of_warps[warp] = all;
                    __syncthreads();
                    totals<R> of_lane = {R(0), R(0)};
                    if (threadIdx.x % 32 < blockDim.x / 32)
                        of_lane = of_warps[threadIdx.x % 32];
                    all = {sum_lanes(of_lane.plain, 32), sum_lanes(of_lane.centred, 32)};
                    if (g.exchange == NORMFUSE_EXCHANGE_CLUSTER) {
                        cluster_wait();
                        if ((int)threadIdx.x < g.parts) {
                            store_remote(of_parts + PAIR * part, (int)threadIdx.x, (double)all.plain);
                            store_remote(of_parts + PAIR * part + 1, (int)threadIdx.x, (double)all.centred);
                        }
                        cluster_arrive(warp == 0);
                        write_sums();
                        cluster_wait();
                        all = add_parts<R>(of_parts, PAIR, g.parts, true);
                    } else if (g.exchange == NORMFUSE_EXCHANGE_GRID) {
                        double *const pairs = a.partials + ((int64_t)parity * g.teams + team) * g.parts * PAIR;
                        if (threadIdx.x == 0) {
                            pairs[PAIR * part] = (double)all.plain;
                            pairs[PAIR * part + 1] = (double)all.centred;
                        }
                        team_arrive(a.tickets + team * ticket_stride, part, g.parts);
                        write_sums();
                        team_wait(a.tickets + team * ticket_stride);
                        all = add_parts<R>(pairs, PAIR, g.parts, false);
                    } else {
                        write_sums();
                    }
                }
                plain = all.plain;
                about = all.centred;
            } else if (place.rows > 0) {
                plain = (R)a.totals[(int64_t)place.set * PAIR];
                about = (R)a.totals[(int64_t)place.set * PAIR + 1];
            }
            if (place.rows > 0) {
                const int group = by_sample ? place.c : divide(place.c, g.by_outer);
                const R rstd = parameter<R>(p.rstd, place.n, group, R(1)), share = R(1) / (R)p.set_values;
                plain *= -share;
                about = -(about * rstd) * (rstd * share);
            }
        }

        /* ---- results ---- */
#pragma unroll
        for (int k = 0; k < K; k++) {
            forget(kept_x[k]);
            forget(kept_dy[k]);
        }
        run_cursor<T, V> other(a, !simple && p.post_add.data ? p.post_add : p.x, place),
            dx(a, p.dx.data ? p.dx : p.x, place);
        run_cursor<T, V> du(a, !simple && p.du.data ? p.du : p.x, place),
            dpost(a, !simple && p.dpost_add.data ? p.dpost_add : p.x, place);
        choose_activation<simple>(p.activation, [&](auto chosen) {
            walk<K>(place, g.spans, shared, [&](int slot, bool valid, bool last) {
                if (valid) {
                    R x[V], dy[V];
                    read(slot, x, dy);
                    differentiate(chosen, *own, x, dy, other);
                    if (gives_dy)
                        dpost.store(make_pack<T, V>(dy));
                    if (p.dx.data && applies) {
                        const R slope = own->slope;
#pragma unroll
                        for (int i = 0; i < V; i++)
                            x[i] = centred ? fma(slope, dy[i], fma(about, x[i], plain)) : slope * dy[i];
                        if (!simple && p.du.data) {
                            R added[V];
                            unpack<T, V>(du.load(), added);
#pragma unroll
                            for (int i = 0; i < V; i++)
                                x[i] += added[i];
                        }
                        dx.store(make_pack<T, V>(x));
                    }
                }
                if (!simple && p.post_add.data)
                    other.advance(a, p.post_add, last);
                if (gives_dy)
                    dpost.advance(a, p.dpost_add, last);
                if (!simple && p.du.data)
                    du.advance(a, p.du, last);
                dx.advance(a, p.dx.data ? p.dx : p.x, last);
                own += last && !by_sample;
            });
        });

        if (g.exchange != NORMFUSE_EXCHANGE_GRID)
            break;
        set += g.teams;
        if (set >= g.sets)
            break;
        parity ^= 1;
        __syncthreads();
    }
}

#define RUNS_BACKWARD(picture, direction, type, pack, kept)                                                            \
    extern "C" __global__ void __maxnreg__(kept > 4 || sizeof(type) == 8 ? 128 : 96)                                   \
        normfuse_##picture##_##direction##_##type##_##pack##x##kept(const __grid_constant__ normfuse_cuda_arguments a) \
    {                                                                                                                  \
        runs_backward<type, pack, kept, kept == 2, (kept > 3)>(a);                                                     \
    }
NORMFUSE_CUDA_RUNS_BACKWARD(RUNS_BACKWARD)
