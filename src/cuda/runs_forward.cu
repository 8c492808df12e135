/* SPDX-License-Identifier: MIT
 *
 * runs_forward.cu - statistics and results where positions are adjacent (NCHW). A block reads its part of a set once,
 * sums while the data arrive, learns the sums of the other blocks of the set, and writes from what it holds. */
#include "runs.cuh"

/* z = (x - shift) * slope + offset */
template <typename R> struct run_coefficient {
    R shift, slope, offset;
};

/* Coefficients of the channels that the block's rows touch. With statistics to come they are weight and bias with the
 * sample's scale and shift. */
template <bool many, typename R>
__device__ __forceinline__ void prepare_coefficients(const normfuse_cuda_arguments &a, const run_place &place,
                                                     run_coefficient<R> *coefficients)
{
    const normfuse_problem &p = a.problem;
    const normfuse_cuda_geometry &g = a.geometry;
    const bool by_sample = p.sets == NORMFUSE_SETS_BATCH;
    for (int i = (int)threadIdx.x; i < g.coefficients; i += (int)blockDim.x) {
        int64_t n = place.n, c = place.c;
        if (many) {
            const int own = by_sample ? 1 : (int)g.outer;
            const int64_t set = place.set - ((int)threadIdx.x >> g.lane_bits) + i / own;
            if (set >= g.sets)
                break;
            n = p.sets == NORMFUSE_SETS_GROUP ? set / p.groups : by_sample ? 0 : set;
            c = p.sets == NORMFUSE_SETS_GROUP ? (set - n * p.groups) * own : by_sample ? set : 0;
            c += i % own;
        } else if (!by_sample) {
            if (place.first_outer + i >= g.outer)
                break;
            c += place.first_outer + i;
        }
        const R scale = R(1) + parameter<R>(p.scale, n, c, R(0));
        R slope = parameter<R>(p.weight, n, c, R(1)) * scale;
        R offset = parameter<R>(p.bias, n, c, R(0)) * scale + parameter<R>(p.shift, n, c, R(0));
        R shift = R(0);
        if (a.source == NORMFUSE_SOURCE_RUNNING) {
            const double mean = parameter<double>(p.running_mean, 0, c, 0.0);
            slope = scaled_by_running(p, c, slope);
            shift = (R)mean;
            offset -= (R)(mean - (double)shift) * slope;
        }
        coefficients[i] = {shift, slope, offset};
    }
}

template <typename T, int V, int K, bool many>
__device__ __forceinline__ void runs_forward(const normfuse_cuda_arguments &a)
{
    using R = compute<T>;
    constexpr bool fast = sizeof(T) == 2;
    const normfuse_problem &p = a.problem;
    const normfuse_cuda_geometry &g = a.geometry;
    extern __shared__ uint4 dynamic[];
    __shared__ moments<R> of_warps[most_warps];
    __shared__ double of_parts[TRIPLE * MOST_CLUSTER];
    run_coefficient<R> *const coefficients =
        reinterpret_cast<run_coefficient<R> *>(dynamic + (V > 1 ? g.kept_shared : 0) * (int)blockDim.x);

    const bool sums = (a.phases & NORMFUSE_PHASE_STATISTICS) != 0, applies = (a.phases & NORMFUSE_PHASE_APPLY) != 0;
    const bool centred = sums || a.source == NORMFUSE_SOURCE_SCRATCH, by_sample = p.sets == NORMFUSE_SETS_BATCH;
    const unsigned block = g.backwards ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    const unsigned team = block / (unsigned)g.parts;
    const int part = (int)(block - team * (unsigned)g.parts), warp = (int)threadIdx.x / 32;

    raw<T, V> kept[K];
    const auto read = [&](int slot, R(&value)[V]) {
        if constexpr (V > 1)
            unpack<T, V>(slot < 0 ? dynamic[(-1 - slot) * (int)blockDim.x + (int)threadIdx.x] : kept[slot < 0 ? 0 : slot],
                         value);
        else
            unpack<T, V>(kept[slot], value);
    };

    if (g.exchange == NORMFUSE_EXCHANGE_CLUSTER)
        cluster_arrive();
    int parity = 0;
    for (int64_t set = team;;) {
        moments<R> met = {R(0), R(0), R(0)};
        R common = R(0); /* the shift of the whole block, or segment */

        for (int pass = 0; pass < g.passes; pass++) {
            const run_place place = place_of<many>(a, set, part, g.backwards ? g.passes - 1 - pass : pass);
            const int shared = V > 1 ? min(g.kept_shared, place.rows) : 0;

            /* ---- load ---- */
            {
                run_cursor<T, V> x(a, p.x, place);
                walk<K>(place, g.spans, shared, [&](int slot, bool valid, bool last) {
                    if constexpr (V > 1) {
                        if (slot < 0) {
                            if (valid)
                                copy_ahead(dynamic + (-1 - slot) * (int)blockDim.x + (int)threadIdx.x, x.at, 0);
                        } else {
                            kept[slot < 0 ? 0 : slot] = valid ? x.load() : zero_pack<T, V>();
                        }
                    } else {
                        kept[slot] = valid ? x.load() : zero_pack<T, V>();
                    }
                    x.advance(a, p.x, last);
                });
            }
            if (sums && pass == 0) {
                /* The first value of the tile, the same in all threads: one of the set's own, so not far from its mean. */
                run_place first = place;
                first.outer = many ? 0 : place.first_outer;
                first.span = many ? 0 : (int32_t)(part * g.part_rows - first.outer * g.spans);
                if (first.outer < g.outer && (!many || place.rows > 0)) {
                    const int lane = (int)threadIdx.x & ((1 << g.lane_bits) - 1);
                    const run_cursor<T, V> x(a, p.x, first);
                    R value[1];
                    unpack<T, 1>(load_pack<T, 1>(x.at, -(int64_t)lane * V * (V > 1 ? 1 : p.x.position)), value);
                    common = value[0];
                    if (p.pre_add.data) {
                        const run_cursor<T, V> other(a, p.pre_add, first);
                        unpack<T, 1>(load_pack<T, 1>(other.at, -(int64_t)lane * V * (V > 1 ? 1 : p.pre_add.position)),
                                     value);
                        common += value[0];
                    }
                }
            }
            if (applies && (pass == 0 || !many))
                prepare_coefficients<many>(a, place, coefficients);
            if (V > 1 && shared > 0)
                wait_for_copies();
            if (p.pre_add.data) {
                run_cursor<T, V> other(a, p.pre_add, place), u(a, p.u.data ? p.u : p.x, place);
                const bool writes = p.u.data && (sums || !(p.phases & NORMFUSE_PHASE_STATISTICS));
                walk<K>(place, g.spans, shared, [&](int slot, bool valid, bool last) {
                    if (valid) {
                        R value[V], added[V];
                        read(slot, value);
                        unpack<T, V>(other.load(), added);
#pragma unroll
                        for (int i = 0; i < V; i++)
                            value[i] += added[i];
                        const raw<T, V> pack = make_pack<T, V>(value);
                        if constexpr (V > 1) {
                            if (slot < 0)
                                dynamic[(-1 - slot) * (int)blockDim.x + (int)threadIdx.x] = pack;
                            else
                                kept[slot < 0 ? 0 : slot] = pack;
                        } else {
                            kept[slot] = pack;
                        }
                        if (writes)
                            u.store(pack);
                    }
                    other.advance(a, p.pre_add, last);
                    u.advance(a, p.u.data ? p.u : p.x, last);
                });
            }

            /* ---- sums ---- */
            if (sums) {
                R shift = common, sum[2] = {R(0), R(0)}, square[2] = {R(0), R(0)};
                int count = 0;
                walk<K>(place, g.spans, shared, [&](int slot, bool valid, bool) {
                    if (!valid)
                        return;
                    R value[V];
                    read(slot, value);
                    /* Squares about one of the thread's own values cannot cancel by more than their number. */
                    shift = count == 0 ? value[0] : shift;
#pragma unroll
                    for (int i = 0; i < V; i++) {
                        const R distance = value[i] - shift;
                        sum[i % 2] += distance;
                        square[i % 2] += distance * distance;
                    }
                    count += V;
                });
                if (count > 0) {
                    const R total = sum[0] + sum[1], number = (R)count, mean = total / number;
                    append(met, {number, (shift - common) + mean, (square[0] + square[1]) - total * mean});
                }
            }
            if (!applies)
                continue;

            /* ---- the statistics of the set ---- */
            R shift = R(0), rest = R(0), rstd = R(1);
            if (sums) {
                double whole = (double)common;
                moments<R> all = join_lanes(met, many ? 1 << g.lane_bits : 32);
                if (!many) {
                    if (threadIdx.x % 32 == 0)
                        of_warps[warp] = all;
                    __syncthreads();
                    moments<R> of_lane = {R(0), R(0), R(0)};
                    if (threadIdx.x % 32 < blockDim.x / 32)
                        of_lane = of_warps[threadIdx.x % 32];
                    all = join_lanes(of_lane, 32);
                    if (g.exchange == NORMFUSE_EXCHANGE_CLUSTER) {
                        cluster_wait();
                        if ((int)threadIdx.x < g.parts) {
                            double *const there = of_parts + TRIPLE * part;
                            store_remote(there, (int)threadIdx.x, (double)all.count);
                            store_remote(there + 1, (int)threadIdx.x, whole + (double)all.mean);
                            store_remote(there + 2, (int)threadIdx.x, (double)all.squares);
                        }
                        cluster_arrive();
                        cluster_wait();
                        all = join_near<R>(of_parts, TRIPLE, g.parts, &whole);
                    } else if (g.exchange == NORMFUSE_EXCHANGE_GRID) {
                        double *const triples = a.partials + ((int64_t)parity * g.teams + team) * g.parts * TRIPLE;
                        if (threadIdx.x == 0) {
                            triples[TRIPLE * part] = (double)all.count;
                            triples[TRIPLE * part + 1] = whole + (double)all.mean;
                            triples[TRIPLE * part + 2] = (double)all.squares;
                        }
                        team_barrier(a.tickets + team * ticket_stride, part, g.parts);
                        all = join_parts<R>(triples, TRIPLE, g.parts, &whole);
                    }
                } else {
                    __syncthreads();
                }
                const set_statistics<R> found = statistics_of(all, whole, p.eps);
                if (many ? ((int)threadIdx.x & ((1 << g.lane_bits) - 1)) == 0 && place.rows > 0
                         : part == 0 && threadIdx.x == 0) {
                    const int64_t n = by_sample ? 0 : place.n;
                    const int64_t channel = by_sample ? place.set : place.set - place.n * p.groups;
                    put_parameter<double>(p.mean, n, channel, found.mean);
                    put_parameter<R>(p.rstd, n, channel, found.rstd);
                    if (a.statistics)
                        a.statistics[place.set] = {found.mean, (double)found.rstd,
                                                   unbiased((double)found.variance, (double)all.count)};
                    if (p.has_running_momentum && by_sample)
                        update_running<R>(p, place.c, found.mean, unbiased((double)found.variance, (double)all.count));
                }
                shift = (R)found.mean;
                rest = (R)(found.mean - (double)shift);
                rstd = found.rstd;
            } else {
                if (centred && place.rows > 0) {
                    const double mean = a.statistics[place.set].mean;
                    rstd = (R)a.statistics[place.set].rstd;
                    shift = (R)mean;
                    rest = (R)(mean - (double)shift);
                }
                __syncthreads();
            }

            /* ---- results ---- */
            if (p.y.data) {
                const run_coefficient<R> *own = coefficients;
                if (many)
                    own += ((int)threadIdx.x >> g.lane_bits) * (by_sample ? 1 : (int)g.outer);
                else if (!by_sample)
                    own += place.outer - place.first_outer;
#pragma unroll
                for (int k = 0; k < K; k++)
                    forget(kept[k]);
                run_cursor<T, V> y(a, p.y, place), other(a, p.post_add.data ? p.post_add : p.y, place);
                walk<K>(place, g.spans, shared, [&](int slot, bool valid, bool last) {
                    if (valid) {
                        R slope = own->slope, offset = own->offset, about = own->shift;
                        if (centred) {
                            slope *= rstd;
                            offset -= rest * slope;
                            about = shift;
                        }
                        R z[V];
                        read(slot, z);
#pragma unroll
                        for (int i = 0; i < V; i++)
                            z[i] = fma(z[i] - about, slope, offset);
                        if (p.post_add.data) {
                            R added[V];
                            unpack<T, V>(other.load(), added);
#pragma unroll
                            for (int i = 0; i < V; i++)
                                z[i] += added[i];
                        }
                        activate<fast, K <= 8>(z, p.activation, (R)p.act_param);
                        y.store(make_pack<T, V>(z));
                    }
                    y.advance(a, p.y, last);
                    if (p.post_add.data)
                        other.advance(a, p.post_add, last);
                    own += last && !by_sample;
                });
            }
            if (pass + 1 < g.passes)
                __syncthreads();
        }

        if (!applies) {
            /* What this block found of the set: a later kernel joins the parts. */
            const moments<R> of_warp = join_lanes(met, 32);
            if (threadIdx.x % 32 == 0)
                of_warps[warp] = of_warp;
            __syncthreads();
            if (warp == 0) {
                moments<R> of_lane = {R(0), R(0), R(0)};
                if (threadIdx.x < blockDim.x / 32)
                    of_lane = of_warps[threadIdx.x];
                const moments<R> all = join_lanes(of_lane, 32);
                if (threadIdx.x == 0) {
                    double *const triple = a.partials + (set * g.parts + part) * TRIPLE;
                    triple[0] = (double)all.count;
                    triple[1] = (double)common + (double)all.mean;
                    triple[2] = (double)all.squares;
                }
            }
        }
        if (g.exchange != NORMFUSE_EXCHANGE_GRID)
            break;
        set += g.teams;
        if (set >= g.sets)
            break;
        parity ^= 1;
        __syncthreads();
    }
}

/* Registers: a block of 512 threads of the kernels that keep few packs, or two of 256 that keep many, fit a processor. */
#define RUNS_FORWARD(picture, direction, type, pack, kept)                                                             \
    extern "C" __global__ void __maxnreg__(kept > 8 || sizeof(type) == 8 ? 128 : 80)                                   \
        normfuse_##picture##_##direction##_##type##_##pack##x##kept(const __grid_constant__ normfuse_cuda_arguments a) \
    {                                                                                                                  \
        runs_forward<type, pack, kept, kept <= 4>(a);                                                                  \
    }
NORMFUSE_CUDA_RUNS_FORWARD(RUNS_FORWARD)
