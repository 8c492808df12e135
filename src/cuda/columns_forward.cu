/* SPDX-License-Identifier: MIT
 *
 * columns_forward.cu - statistics and results where channels are adjacent (NHWC). A thread sums its own channels over
 * its rows while the data arrive; threads, then channels of a group, then blocks are joined; results come from what the
 * block holds. */
#include "columns.cuh"

/* What the threads of a block know of a group once its sums are joined. */
template <typename R> struct group_statistics {
    double mean;
    R rstd;
};

template <typename T, int V, int K, bool plain>
__device__ __forceinline__ void columns_forward(const normfuse_cuda_arguments &a)
{
    using R = compute<T>;
    constexpr bool fast = sizeof(T) == 2;
    const normfuse_problem &p = a.problem;
    const normfuse_cuda_geometry &g = a.geometry;
    extern __shared__ uint4 dynamic[];
    const int group_lanes = 1 << g.group_bits, channel_lanes = 1 << g.channel_bits;
    const int threads = (int)blockDim.x, channels = g.width * V, groups = divide(channels, g.by_group);
    /* In this order: packs; parts of groups; groups; of each channel weight, bias and a shift; of each thread's
     * channels means and squares. */
    double *const of_parts = reinterpret_cast<double *>(dynamic + (V > 1 ? g.kept_shared : 0) * threads);
    group_statistics<R> *const of_groups = reinterpret_cast<group_statistics<R> *>(
        of_parts + groups * (g.exchange == NORMFUSE_EXCHANGE_CLUSTER ? g.parts : 1) * TRIPLE);
    R *const of_slopes = reinterpret_cast<R *>(of_groups + groups), *const of_offsets = of_slopes + channels;
    R *const of_shifts = of_offsets + channels, *const of_means = of_shifts + channels;
    R *const of_squares = of_means + threads * V;

    const bool sums = (a.phases & NORMFUSE_PHASE_STATISTICS) != 0, applies = (a.phases & NORMFUSE_PHASE_APPLY) != 0;
    const unsigned block = g.backwards ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    const int first_team = divide((int)block, g.by_parts);
    const int part = (int)block - first_team * g.parts;
    const bool by_channel = p.sets == NORMFUSE_SETS_BATCH;

    raw<T, V> kept[K];
    const auto read = [&](int slot, R(&value)[V]) {
        if constexpr (V > 1)
            unpack<T, V>(slot < 0 ? dynamic[(-1 - slot) * threads + (int)threadIdx.x] : kept[slot < 0 ? 0 : slot],
                         value);
        else
            unpack<T, V>(kept[slot], value);
    };

    if (g.exchange == NORMFUSE_EXCHANGE_CLUSTER)
        cluster_arrive(false);
    int parity = 0;
    for (int team = first_team;;) {
        const column_place place = place_of<V>(a, team, part);
        const int shared = V > 1 ? g.kept_shared : 0;
        const int tile_rows = (K + shared) * place.rows_at_once;
        const int first_channel = place.c - place.column * V; /* of the block */
        int met = 0;
        R sum[V] = {}, square[V] = {};
        raw<T, V> about = zero_pack<T, V>(); /* first a value of the thread's, then the mean */
        raw<T, V> common = zero_pack<T, V>();
        R slope[V], offset[V];

        for (int pass = 0; pass < g.passes; pass++) {
            const int row = place.first + (g.backwards ? g.passes - 1 - pass : pass) * tile_rows + place.beside;
            const int count = slots_of(a, place, row, K + shared);

            /* ---- load ---- */
            if (place.active) {
                column_cursor<T, V> x(p.x, place, row);
                walk<K>(count, shared, [&](int slot) {
                    if constexpr (V > 1) {
                        if (slot < 0)
                            copy_ahead(dynamic + (-1 - slot) * threads + (int)threadIdx.x, x.at, 0);
                        else
                            kept[slot < 0 ? 0 : slot] = x.load();
                    } else {
                        kept[slot] = x.load();
                    }
                    x.advance(p.x, place);
                });
                if (sums && pass == 0 && place.first < place.stop) {
                    common = column_cursor<T, V>(p.x, place, place.first).load();
                    if (!plain && p.pre_add.data) {
                        R value[V], added[V];
                        unpack<T, V>(common, value);
                        unpack<T, V>(column_cursor<T, V>(p.pre_add, place, place.first).load(), added);
#pragma unroll
                        for (int i = 0; i < V; i++)
                            value[i] += added[i];
                        common = make_pack<T, V>(value);
                    }
                }
            }
            if (applies && pass == 0)
#pragma unroll 1
                for (int i = (int)threadIdx.x; i < channels; i += threads) {
                    const int c = first_channel + i;
                    if (c >= p.c)
                        break;
                    const R scale = R(1) + parameter<R>(p.scale, place.n, c, R(0));
                    of_slopes[i] = parameter<R>(p.weight, place.n, c, R(1)) * scale;
                    of_offsets[i] =
                        parameter<R>(p.bias, place.n, c, R(0)) * scale + parameter<R>(p.shift, place.n, c, R(0));
                }
            if (place.active) {
                if (V > 1 && shared > 0)
                    wait_for_copies();
                if (!plain && p.pre_add.data) {
                    column_cursor<T, V> other(p.pre_add, place, row), u(p.u.data ? p.u : p.x, place, row);
                    const bool writes = p.u.data && (sums || !(p.phases & NORMFUSE_PHASE_STATISTICS));
                    walk<K>(count, shared, [&](int slot) {
                        R value[V], added[V];
                        read(slot, value);
                        unpack<T, V>(other.load(), added);
#pragma unroll
                        for (int i = 0; i < V; i++)
                            value[i] += added[i];
                        const raw<T, V> pack = make_pack<T, V>(value);
                        if constexpr (V > 1) {
                            if (slot < 0)
                                dynamic[(-1 - slot) * threads + (int)threadIdx.x] = pack;
                            else
                                kept[slot < 0 ? 0 : slot] = pack;
                        } else {
                            kept[slot] = pack;
                        }
                        if (writes)
                            u.store(pack);
                        other.advance(p.pre_add, place);
                        u.advance(p.u.data ? p.u : p.x, place);
                    });
                }
            }

            /* ---- sums ---- */
            if (sums) {
                if (place.active) {
                    /* Squares about one of the thread's own values cannot cancel by more than their number. */
                    if (pass == 0) {
                        if constexpr (V > 1)
                            about = shared > 0 ? dynamic[threadIdx.x] : kept[0];
                        else
                            about = kept[0];
                    }
                    met += count;
                    R shift[V];
                    unpack<T, V>(about, shift);
                    walk<K>(count, shared, [&](int slot) {
                        R value[V];
                        read(slot, value);
#pragma unroll
                        for (int i = 0; i < V; i++) {
                            const R distance = value[i] - shift[i];
                            sum[i] += distance;
                            square[i] += distance * distance;
                        }
                    });
                }
                if (pass + 1 < g.passes)
                    continue;

                /* ---- the statistics of the groups ---- */
                if (place.active) {
                    const int at = place.beside * channels + place.column * V;
                    const R share = R(1) / (R)max(met, 1);
                    R shift[V], base[V];
                    unpack<T, V>(about, shift);
                    unpack<T, V>(common, base);
#pragma unroll
                    for (int i = 0; i < V; i++) {
                        const R mean = sum[i] * share;
                        of_means[at + i] = met > 0 ? (shift[i] - base[i]) + mean : R(0);
                        of_squares[at + i] = met > 0 ? square[i] - sum[i] * mean : R(0);
                        if (place.beside == 0)
                            of_shifts[place.column * V + i] = base[i];
                    }
                }
                __syncthreads();
                const int rows = max(0, place.stop - place.first), each = divide(rows, g.by_rows_at_once);
                const int more = rows - each * place.rows_at_once; /* threads with a row more than the others */
                const int channels_here = min(channels, (int)p.c - first_channel);
                /* First the threads of a channel, then the channels of a group: the mean, then squares about it, which
                 * cannot cancel. Results take the place of those of the first thread. */
                for (int round = 0; round < channels_here; round += threads >> g.channel_bits) {
                    const int c = round + ((int)threadIdx.x >> g.channel_bits);
                    const int first = (int)threadIdx.x & (channel_lanes - 1);
                    const bool exists = c < channels_here;
                    R mean = R(0), squares = R(0);
                    for (int beside = first; exists && beside < place.rows_at_once; beside += channel_lanes)
                        mean += (R)(each + (beside < more)) * of_means[beside * channels + c];
                    mean = sum_lanes(mean, channel_lanes) / (R)max(rows, 1);
                    for (int beside = first; exists && beside < min(rows, place.rows_at_once);
                         beside += channel_lanes) {
                        const R distance = of_means[beside * channels + c] - mean;
                        squares +=
                            of_squares[beside * channels + c] + (R)(each + (beside < more)) * distance * distance;
                    }
                    squares = sum_lanes(squares, channel_lanes);
                    if (exists && first == 0) {
                        of_means[c] = mean;
                        of_squares[c] = squares;
                    }
                }
                __syncthreads();
                const int lane = (int)threadIdx.x & (group_lanes - 1), at_once = threads >> g.group_bits;
                const int here = divide(channels_here, g.by_group);
                const R count = (R)rows * (R)g.group;
                if (g.exchange == NORMFUSE_EXCHANGE_CLUSTER)
                    cluster_wait();
                for (int round = 0; round < here; round += at_once) {
                    const int group = round + ((int)threadIdx.x >> g.group_bits);
                    const bool exists = group < here;
                    R mean = R(0), squares = R(0);
                    const int begin = group * g.group, end = exists ? begin + g.group : begin;
                    const R shift = exists ? of_shifts[begin] : R(0);
                    for (int c = begin + lane; c < end; c += group_lanes)
                        mean += (of_shifts[c] - shift) + of_means[c];
                    mean = sum_lanes(mean, group_lanes) / (R)g.group;
                    for (int c = begin + lane; c < end; c += group_lanes) {
                        const R distance = (of_shifts[c] - shift) + of_means[c] - mean;
                        squares += of_squares[c] + (R)rows * distance * distance;
                    }
                    squares = sum_lanes(squares, group_lanes);
                    if (!exists)
                        continue;
                    const double whole = (double)shift + (double)mean;
                    if (!applies) {
                        /* A later kernel joins the parts. */
                        const int64_t set =
                            (g.all_samples ? 0 : place.n * (p.c / g.group)) + divide(first_channel, g.by_group) + group;
                        double *const triple = a.partials + (set * g.parts + part) * TRIPLE;
                        if (lane == 0) {
                            triple[0] = (double)count;
                            triple[1] = whole;
                            triple[2] = (double)squares;
                        }
                    } else if (g.exchange == NORMFUSE_EXCHANGE_CLUSTER) {
                        double *const there = of_parts + (group * g.parts + part) * TRIPLE;
                        for (int other = lane; other < g.parts; other += group_lanes) {
                            store_remote(there, other, (double)count);
                            store_remote(there + 1, other, whole);
                            store_remote(there + 2, other, (double)squares);
                        }
                    } else if (g.exchange == NORMFUSE_EXCHANGE_GRID) {
                        double *const triple =
                            a.partials +
                            ((((int64_t)parity * g.teams + first_team) * groups + group) * g.parts + part) * TRIPLE;
                        if (lane == 0) {
                            triple[0] = (double)count;
                            triple[1] = whole;
                            triple[2] = (double)squares;
                        }
                    } else if (lane == 0) {
                        of_parts[group * TRIPLE] = (double)count;
                        of_parts[group * TRIPLE + 1] = whole;
                        of_parts[group * TRIPLE + 2] = (double)squares;
                    }
                }
                if (!applies)
                    break;
                const double *triples = of_parts;
                if (g.exchange == NORMFUSE_EXCHANGE_CLUSTER) {
                    cluster_arrive(true);
                    cluster_wait();
                } else if (g.exchange == NORMFUSE_EXCHANGE_GRID) {
                    team_barrier(a.tickets + first_team * ticket_stride, part, g.parts);
                    triples = a.partials + ((int64_t)parity * g.teams + first_team) * groups * g.parts * TRIPLE;
                } else {
                    __syncthreads();
                }
                for (int round = 0; round < here; round += at_once) {
                    const int group = round + ((int)threadIdx.x >> g.group_bits);
                    const bool exists = group < here;
                    const double *const own = triples + (int64_t)(exists ? group : 0) * g.parts * TRIPLE;
                    const double whole = read_part(own + 1, g.exchange == NORMFUSE_EXCHANGE_GRID);
                    R all = R(0), mean = R(0), squares = R(0);
                    for (int i = lane; i < g.parts; i += group_lanes) {
                        const bool far = g.exchange == NORMFUSE_EXCHANGE_GRID;
                        const R number = (R)read_part(own + i * TRIPLE, far);
                        all += number;
                        mean += number * (R)(read_part(own + i * TRIPLE + 1, far) - whole);
                    }
                    all = sum_lanes(all, group_lanes);
                    mean = sum_lanes(mean, group_lanes) / all;
                    for (int i = lane; i < g.parts; i += group_lanes) {
                        const bool far = g.exchange == NORMFUSE_EXCHANGE_GRID;
                        const R number = (R)read_part(own + i * TRIPLE, far);
                        const R distance = (R)(read_part(own + i * TRIPLE + 1, far) - whole) - mean;
                        squares += (R)read_part(own + i * TRIPLE + 2, far) + number * distance * distance;
                    }
                    squares = sum_lanes(squares, group_lanes);
                    if (!exists || lane != 0)
                        continue;
                    const set_statistics<R> found = statistics_of<R>({all, mean, squares}, whole, p.eps);
                    of_groups[group] = {found.mean, found.rstd};
                    if (part == 0) {
                        const int channel = divide(first_channel, g.by_group) + group;
                        put_parameter<double>(p.mean, place.n, channel, found.mean);
                        put_parameter<R>(p.rstd, place.n, channel, found.rstd);
                        if (a.statistics)
                            a.statistics[by_channel ? channel : place.n * p.groups + channel] = {
                                found.mean, (double)found.rstd, unbiased((double)found.variance, (double)all)};
                        if (p.has_running_momentum && by_channel)
                            update_running<R>(p, channel, found.mean, unbiased((double)found.variance, (double)all));
                    }
                }
                __syncthreads();
            }

            /* ---- coefficients: z = (x - about) * slope + offset, `about` in the tensor's own type ---- */
            if (pass == 0 || sums) {
                /* Each channel's by one thread: those of a block have each channel many times. */
#pragma unroll 1
                for (int i = (int)threadIdx.x; i < channels; i += threads) {
                    const int c = first_channel + i;
                    if (c >= p.c)
                        break;
                    double mean = 0.0;
                    R slope_here = of_slopes[i];
                    if (sums) {
                        const group_statistics<R> of_group = of_groups[divide(i, g.by_group)];
                        mean = of_group.mean;
                        slope_here *= of_group.rstd;
                    } else if (a.source == NORMFUSE_SOURCE_SCRATCH) {
                        const normfuse_cuda_statistics *const of_set =
                            a.statistics + (by_channel ? c : place.n * p.groups + c / (int)(p.c / p.groups));
                        mean = of_set->mean;
                        slope_here *= (R)of_set->rstd;
                    } else if (a.source == NORMFUSE_SOURCE_RUNNING) {
                        mean = parameter<double>(p.running_mean, 0, c, 0.0);
                        slope_here = scaled_by_running(p, c, slope_here);
                    }
                    const R value[1] = {(R)mean};
                    R back[1];
                    unpack<T, 1>(make_pack<T, 1>(value), back);
                    of_slopes[i] = slope_here;
                    of_offsets[i] -= (R)(mean - (double)back[0]) * slope_here;
                    of_shifts[i] = back[0];
                }
                __syncthreads();
                if (place.active) {
                    R rounded[V];
#pragma unroll
                    for (int i = 0; i < V; i++) {
                        slope[i] = of_slopes[place.column * V + i];
                        offset[i] = of_offsets[place.column * V + i];
                        rounded[i] = of_shifts[place.column * V + i];
                    }
                    about = make_pack<T, V>(rounded);
                }
            }

            /* ---- results ---- */
            if (place.active && p.y.data) {
#pragma unroll
                for (int k = 0; k < K; k++)
                    forget(kept[k]);
                column_cursor<T, V> y(p.y, place, row), other(!plain && p.post_add.data ? p.post_add : p.y, place, row);
                choose_activation<plain>(p.activation, [&](auto chosen) {
                    walk<K>(count, shared, [&](int slot) {
                        R z[V], shift[V];
                        read(slot, z);
                        forget(about);
                        unpack<T, V>(about, shift);
#pragma unroll
                        for (int i = 0; i < V; i++)
                            z[i] = fma(z[i] - shift[i], slope[i], offset[i]);
                        if (!plain && p.post_add.data) {
                            R added[V];
                            unpack<T, V>(other.load(), added);
#pragma unroll
                            for (int i = 0; i < V; i++)
                                z[i] += added[i];
                            other.advance(p.post_add, place);
                        }
                        activate<fast, !plain>(z, chosen.of(p.activation), (R)p.act_param);
                        y.store(make_pack<T, V>(z));
                        y.advance(p.y, place);
                    });
                });
            }
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

#define COLUMNS_FORWARD(picture, direction, type, pack, kept)                                                          \
    extern "C" __global__ void __maxnreg__(pack > 1 || sizeof(type) == 8 ? 128 : 96)                                   \
        normfuse_##picture##_##direction##_##type##_##pack##x##kept(const __grid_constant__ normfuse_cuda_arguments a) \
    {                                                                                                                  \
        columns_forward<type, pack, kept, (kept > 6)>(a);                                                              \
    }
NORMFUSE_CUDA_COLUMNS_FORWARD(COLUMNS_FORWARD)
