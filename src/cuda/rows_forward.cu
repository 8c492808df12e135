/* SPDX-License-Identifier: MIT
 *
 * rows_forward.cu - statistics and results where positions are adjacent (NCHW). A block reads its part of a set once,
 * sums while the data arrive, learns the sums of the other blocks of the set, and writes from what it holds. Vectors
 * are dealt to threads in turn, whatever channel they are of: dealing whole rows of one channel to warps, as the
 * backward must, took twice the instructions. */
#include "rows.cuh"

/* z = (x - shift) * slope + offset */
template <typename R> struct row_coefficient {
    R shift, slope, offset, unused;
};

/* Coefficients of the channels that the block touches, slope and offset times `factor`. With statistics to come they
 * are weight and bias with the sample's scale and shift. */
template <bool many, typename R>
__device__ __forceinline__ void prepare_coefficients(const normfuse_cuda_arguments &a, const row_vectors &vectors,
                                                     R factor, row_coefficient<R> *coefficients, int first)
{
    const normfuse_problem &p = a.problem;
    const normfuse_cuda_geometry &g = a.geometry;
    const bool by_sample = p.sets == NORMFUSE_SETS_BATCH;
    for (int i = first; i < g.coefficients; i += (int)blockDim.x) {
        int n = vectors.n, c = vectors.c;
        if (many) {
            const int nth = by_sample ? i : divide(i, g.by_outer);
            const int set = vectors.set - ((int)threadIdx.x >> g.lane_bits) + nth;
            if (set >= g.sets)
                break;
            begin_of(a, set, n, c);
            c += by_sample ? 0 : i - nth * g.outer;
        } else if (!by_sample) {
            if (vectors.first_outer + i >= g.outer)
                break;
            c += vectors.first_outer + i;
        }
        /* One after the other: requested all at once, they were ahead of the vectors (128x256x28x28: 61 us for 56). */
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
        coefficients[i] = {shift, slope * factor, offset * factor, R(0)};
    }
}

template <typename T, int V, int K, normfuse_cuda_schedule schedule>
__device__ __forceinline__ void rows_forward(const normfuse_cuda_arguments &a)
{
    follow_kernel();
    using R = compute<T>;
    constexpr bool many = schedule == NORMFUSE_SCHEDULE_lanes, whole = schedule == NORMFUSE_SCHEDULE_block;
    constexpr bool plain = !many; /* lanes alone have additions and tensors of different strides */
    constexpr bool holds = whole || schedule == NORMFUSE_SCHEDULE_split,
                   unaligned = schedule == NORMFUSE_SCHEDULE_unaligned;
    constexpr bool streams = schedule == NORMFUSE_SCHEDULE_two_pass;
    using tensor = row_tensor<T, V, plain, unaligned>;
    constexpr bool fast = sizeof(T) == 2;
    const normfuse_problem &p = a.problem;
    const normfuse_cuda_geometry &g = a.geometry;
    NORMFUSE_DYNAMIC_SHARED(dynamic);
    __shared__ moments<R> of_warps[max_row_warps];
    __shared__ double of_parts[TRIPLE * NORMFUSE_CUDA_ROW_CLUSTER];
    __shared__ cluster_mailbox mailbox;
    __shared__ set_statistics<R> of_set;
    const int shared = !many && !streams ? g.held_shared : 0;
    uint4 *const own_shared = dynamic + threadIdx.x;
    row_coefficient<R> *const coefficients = reinterpret_cast<row_coefficient<R> *>(dynamic + shared * (int)blockDim.x);

    const bool sums = holds || (a.phases & NORMFUSE_PHASE_STATISTICS) != 0;
    const bool applies = holds || (a.phases & NORMFUSE_PHASE_APPLY) != 0;
    const bool centred = sums || a.source == NORMFUSE_SOURCE_SCRATCH, by_sample = p.sets == NORMFUSE_SETS_BATCH;
    const bool shares = schedule == NORMFUSE_SCHEDULE_split || unaligned;
    const int exchange = shares ? g.exchange : NORMFUSE_EXCHANGE_NONE, passes = holds || streams ? 1 : g.passes;
    const bool backwards = !holds && g.backwards;
    const int block = (int)(backwards ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
    const int block_group = whole ? block : divide(block, g.by_parts);
    const int part = whole ? 0 : block - block_group * g.parts, warp = (int)threadIdx.x / 32;

    raw<T, V> held[K];
    const auto own_of = [&](const row_vectors &vectors, int index) {
        return elements_of<T, V, plain, unaligned>(a, vectors, index);
    };

    /* What is known of a set, to memory. Running statistics are read first: where blocks share a set all wait for the
     * one that does this, so after the results; a block that has its set alone would end later. */
    constexpr bool stores_late = schedule == NORMFUSE_SCHEDULE_split;
    const auto store_set = [&](const row_vectors &vectors, const set_statistics<R> &found) {
        if (many ? vectors.index == 0 && vectors.end > 0 : part == 0 && threadIdx.x == 0) {
            const int n = by_sample ? 0 : vectors.n;
            const int channel = by_sample ? vectors.set : vectors.set - n * (int)p.groups;
            const double variance = store_statistics(a, n, channel, vectors.set, found.mean, found.variance, found.rstd,
                                                     (double)p.set_values);
            if (p.has_running_momentum && by_sample)
                update_running<R>(p, vectors.c, found.mean, variance);
        }
    };

    if (exchange == NORMFUSE_EXCHANGE_CLUSTER)
        open_only_mailbox(mailbox, g.parts * TRIPLE * (int)sizeof(double));
    if (exchange == NORMFUSE_EXCHANGE_GRID)
        begin_staggered(g);
    int parity = 0;
    bool is_requested = false; /* for what goes to shared memory: while the results of the set before were written */
    for (int set = block_group;;) {
        moments<R> met = {R(0), R(0), R(0)};
        R common = R(0); /* the shift of the whole block, or segment */

        for (int pass = 0; pass < passes; pass++) {
            const row_vectors vectors = vectors_of<many, true>(a, set, part, backwards ? passes - 1 - pass : pass);
            const int rest = vectors.index + shared * vectors.step; /* the first that is held in a register */

            /* ---- load ---- */
            int next = vectors.index, count = 0; /* the vector that is requested next, and how many there are */
            const auto request_vector = [&](raw<T, V> &vector, bool wanted) {
                const tensor x(a, p.x, p.x, vectors.n, vectors.c);
                load_vector_where<T, V>(wanted, vector, x.at(g, next, divide(next, g.by_spans)));
                next += vectors.step;
            };
            if constexpr (streams) {
                count = max(0, (vectors.end - vectors.index + vectors.step - 1) / vectors.step);
                request_first<K>(held, count, request_vector);
            } else {
                const tensor x(a, p.x, p.x, vectors.n, vectors.c);
                const row_end<T, unaligned> end(a, vectors, x.lead);
                if constexpr (!many) {
#pragma unroll 1
                    for (int k = 0; k < (is_requested ? 0 : shared); k++) {
                        const int index = vectors.index + k * vectors.step;
                        if (index < vectors.end) {
                            uint4 *const to = own_shared + k * (int)blockDim.x;
                            const int stretch = divide(index, g.by_spans);
                            if (!end.cuts(x.place(g, index, stretch)))
                                copy_once(to, x.at(g, index, stretch), 0);
                            else
                                *to = load_cut<T>(x.data, x.place(g, index, stretch), end.bytes);
                        }
                    }
                }
                unsigned furthest = 0;
#pragma unroll
                for (int k = 0; k < K; k++) {
                    const int index = rest + k * vectors.step;
                    if (index < vectors.end) {
                        const int stretch = divide(index, g.by_spans);
                        furthest = max(furthest, x.place(g, index, stretch));
                        if (!end.cuts(x.place(g, index, stretch)))
                            held[k] = load_vector<T, V>(x.at(g, index, stretch), 0);
                    }
                }
                if constexpr (unaligned) {
                    /* Once all others have been requested: these are waited for. */
                    if (end.cuts(furthest)) {
#pragma unroll
                        for (int k = 0; k < K; k++) {
                            const int index = rest + k * vectors.step;
                            const unsigned place = x.place(g, index, divide(index, g.by_spans));
                            if (index < vectors.end && end.cuts(place))
                                held[k] = load_cut<T>(x.data, place, end.bytes);
                        }
                    }
                }
            }
            if (exchange == NORMFUSE_EXCHANGE_GRID && threadIdx.x == 0)
                grid_barrier_before() = look_at_grid_barrier(a.grid_barriers + block_group * grid_barrier_stride);
            if (sums && pass == 0) {
                /* The first value of the tile, the same in all threads: one of the set's own, so not far from its mean.
                 */
                const int first = many ? 0 : part * g.part_rows;
                if (first < vectors.end) {
                    const int stretch = divide(first, g.by_spans);
                    const tensor x(a, p.x, p.x, vectors.n, vectors.c);
                    R value[1];
                    /* A unaligned vector of a stretch need not have elements of it; the stretch has a first. */
                    unpack<T, 1>(load_vector<T, 1>(unaligned ? x.data + x.start(stretch) : x.at(g, first, stretch), 0),
                                 value);
                    common = value[0];
                    if (!plain && p.pre_add.data) {
                        unpack<T, 1>(
                            load_vector<T, 1>(
                                tensor(a, p.pre_add, p.pre_add, vectors.n, vectors.c).at(g, first, stretch), 0),
                            value);
                        common += value[0];
                    }
                }
            }
            const auto prepare = [&](int first) {
                prepare_coefficients<many>(a, vectors, takes_half<fast, plain>(p.activation) ? R(0.5) : R(1),
                                           coefficients, first);
            };
            /* Parameters come behind all vectors. Where the block asks others for their sums, it requests these then.
             */
            const bool later = schedule == NORMFUSE_SCHEDULE_split && exchange != NORMFUSE_EXCHANGE_NONE;
            const auto prepare_later = [&] {
                if constexpr (schedule == NORMFUSE_SCHEDULE_split)
                    prepare(((int)threadIdx.x >= 32 ? 0 : (int)blockDim.x) + (int)threadIdx.x - 32);
            };
            if (applies && !later && (pass == 0 || !many))
                prepare((int)threadIdx.x);
            if (shared > 0)
                wait_for_copies();
            /* Calls work(vector, index) for each vector that the thread has in shared memory; where nothing is held,
             * for all vectors that the thread has. */
            const auto walk_shared = [&](auto work, const char *next = nullptr) {
                int index = vectors.index;
                compiler_barrier(index);
                if constexpr (streams) {
                    walk_passing<K>(held, count, request_vector, [&](raw<T, V> &vector) {
                        work(vector, index);
                        index += vectors.step;
                    });
                } else if constexpr (!many) {
#pragma unroll 1
                    for (int k = 0; k < shared && index < vectors.end; k++) {
                        raw<T, V> vector = own_shared[k * (int)blockDim.x];
                        work(vector, index);
                        if constexpr (schedule == NORMFUSE_SCHEDULE_split) {
                            tensor x(a, p.x, p.x, vectors.n, vectors.c);
                            x.data = const_cast<char *>(next);
                            if (next)
                                copy_once(own_shared + k * (int)blockDim.x, x.at(g, index, divide(index, g.by_spans)),
                                          0);
                        }
                        index += vectors.step;
                    }
                }
            };
            const auto walk_registers = [&](auto work) {
                int index = rest;
                compiler_barrier(index);
#pragma unroll
                for (int k = 0; k < (streams ? 0 : K); k++) {
                    if (index >= vectors.end)
                        break;
                    work(held[k], index);
                    index += vectors.step;
                }
            };
            if (!plain && p.pre_add.data) {
                const tensor other(a, p.pre_add, p.pre_add, vectors.n, vectors.c);
                const normfuse_view &to = p.u.data ? p.u : p.x;
                const tensor u(a, to, to, vectors.n, vectors.c);
                const bool writes = p.u.data && (sums || !(p.phases & NORMFUSE_PHASE_STATISTICS));
                /* Perhaps in place of x or of its residual, so not before all have read the value that they
                 * share. */
                if (writes && sums && pass == 0)
                    __syncthreads();
                walk_registers([&](raw<T, V> &vector, int index) {
                    const int stretch = divide(index, g.by_spans);
                    R value[V], residual[V];
                    unpack<T, V>(vector, value);
                    unpack<T, V>(load_vector<T, V>(other.at(g, index, stretch), 0), residual);
#pragma unroll
                    for (int i = 0; i < V; i++)
                        value[i] += residual[i];
                    vector = make_vector<T, V>(value);
                    if (writes)
                        store_vector<T, V>(u.at(g, index, stretch), 0, vector);
                });
            }

            /* ---- sums ---- */
            if (sums) {
                /* Those in shared memory and those in registers each about a value of their own. */
                const auto gather = [&](const raw<T, V> &first, int index, auto walk_some) {
                    if (!streams && index >= vectors.end)
                        return;
                    /* Squares about one of the thread's own values cannot cancel by more than their number. */
                    R shift = common, sum[2] = {R(0), R(0)}, square[2] = {R(0), R(0)};
                    int count = 0;
                    if (!streams || index < vectors.end) {
                        R value[V];
                        unpack<T, V>(first, value);
                        shift = value[unaligned ? V - 1 : 0];
                        if constexpr (unaligned) {
                            /* Of the first vector that has one; only then from memory, so that none waits for it. */
                            row_elements<V, unaligned> own = own_of(vectors, index);
#pragma unroll
                            for (int i = V - 2; i >= 0; i--)
                                shift = own.has(i) ? value[i] : shift;
                            if (own.count() == 0) {
                                for (index += vectors.step; index < vectors.end; index += vectors.step) {
                                    own = own_of(vectors, index);
                                    if (own.count() > 0) {
                                        const tensor x(a, p.x, p.x, vectors.n, vectors.c);
                                        const char *const vector = x.at(g, index, divide(index, g.by_spans));
                                        R other[1];
                                        unpack<T, 1>(load_vector<T, 1>(vector, own.begin()), other);
                                        shift = other[0];
                                        break;
                                    }
                                }
                            }
                        }
                    }
                    walk_some([&](raw<T, V> &vector, int index) {
                        R value[V];
                        unpack<T, V>(vector, value);
                        const row_elements<V, unaligned> own = own_of(vectors, index);
                        if (!own.are_all()) {
#pragma unroll
                            for (int i = 0; i < V; i++)
                                value[i] = own.has(i) ? value[i] : shift;
                        }
#pragma unroll
                        for (int i = 0; i < V; i++) {
                            const R distance = value[i] - shift;
                            sum[i % 2] += distance;
                            square[i % 2] += distance * distance;
                        }
                        count += own.count();
                    });
                    if (count > 0) {
                        const R total = sum[0] + sum[1], number = (R)count, mean = total / number;
                        append(met, {number, (shift - common) + mean, (square[0] + square[1]) - total * mean});
                    }
                };
                if constexpr (streams) {
                    gather(held[0], vectors.index, walk_shared);
                } else {
                    if constexpr (!many) {
                        if (shared > 0)
                            gather(own_shared[0], vectors.index, walk_shared);
                    }
                    gather(held[0], rest, walk_registers);
                }
            }
            if (!applies)
                continue;

            /* ---- the statistics of the set ---- */
            R shift = R(0), remainder = R(0), rstd = R(1);
            if (sums) {
                double base = (double)common;
                moments<R> all = join_lanes(met, many ? 1 << g.lane_bits : 32);
                if (!many) {
                    if (threadIdx.x % 32 == 0)
                        of_warps[warp] = all;
                    __syncthreads();
                    moments<R> of_lane = {R(0), R(0), R(0)};
                    if (threadIdx.x % 32 < blockDim.x / 32)
                        of_lane = of_warps[threadIdx.x % 32];
                    all = join_lanes(of_lane, 32);
                    if (exchange == NORMFUSE_EXCHANGE_CLUSTER) {
                        await_open_mailboxes();
                        if ((int)threadIdx.x < g.parts) {
                            double *const there = of_parts + TRIPLE * part;
                            send(mailbox, there, (int)threadIdx.x, (double)all.count);
                            send(mailbox, there + 1, (int)threadIdx.x, base + (double)all.mean);
                            send(mailbox, there + 2, (int)threadIdx.x, (double)all.squares);
                        }
                        prepare_later();
                        await_mailbox(mailbox);
                        if (later)
                            __syncthreads();
                        all = join_near<R>(of_parts, TRIPLE, g.parts, &base);
                    } else if (exchange == NORMFUSE_EXCHANGE_GRID) {
                        double *const triples =
                            a.partials + ((int64_t)parity * g.block_groups + block_group) * g.parts * TRIPLE;
                        if (threadIdx.x == 0) {
                            triples[TRIPLE * part] = (double)all.count;
                            triples[TRIPLE * part + 1] = base + (double)all.mean;
                            triples[TRIPLE * part + 2] = (double)all.squares;
                        }
                        arrive_at_block_group(a.grid_barriers + block_group * grid_barrier_stride, part, g.parts);
                        prepare_later();
                        await_block_group(a.grid_barriers + block_group * grid_barrier_stride, grid_barrier_before());
                        all = join_parts<R>(triples, TRIPLE, g.parts, &base);
                    }
                } else {
                    __syncthreads();
                }
                const set_statistics<R> found = statistics_of(all, base, p.eps);
                if (!stores_late)
                    store_set(vectors, found);
                else if (threadIdx.x == 0)
                    of_set = found;
                shift = (R)found.mean;
                remainder = (R)(found.mean - (double)shift);
                rstd = found.rstd;
            } else {
                if (centred && vectors.end > 0) {
                    const double mean = a.statistics[vectors.set].mean;
                    rstd = (R)a.statistics[vectors.set].rstd;
                    shift = (R)mean;
                    remainder = (R)(mean - (double)shift);
                }
                __syncthreads();
            }

            /* ---- results ---- */
            if (p.y.data) {
                /* Channels of the set are beside one another, from the first that the block touches. */
                const int own = (many ? ((int)threadIdx.x >> g.lane_bits) * (by_sample ? 1 : g.outer) : 0);
                const int channel_step = by_sample ? 0 : 1, before = own - vectors.first_outer * channel_step;
                const tensor y(a, p.y, plain ? p.x : p.y, vectors.n, vectors.c);
#pragma unroll
                for (int k = 0; k < (streams ? 0 : K); k++)
                    compiler_barrier(held[k]);
                /* z of a vector, and where it goes */
                const auto normalize = [&](raw<T, V> &vector, int index, R(&z)[V]) {
                    const int stretch = divide(index, g.by_spans);
                    const row_coefficient<R> coefficient = coefficients[before + stretch * channel_step];
                    R slope = coefficient.slope, offset = coefficient.offset, about = coefficient.shift;
                    if (centred) {
                        slope *= rstd;
                        offset -= remainder * slope;
                        about = shift;
                    }
                    unpack<T, V>(vector, z);
#pragma unroll
                    for (int i = 0; i < V; i++)
                        z[i] = fma(z[i] - about, slope, offset);
                    return y.at(g, index, stretch);
                };
                const normfuse_view &added_view = !plain && p.post_add.data ? p.post_add : p.y;
                const tensor other(a, added_view, plain ? p.x : added_view, vectors.n, vectors.c);
                /* The set after this one, whose vectors take the places of those that were read. */
                const char *next = nullptr;
                if constexpr (schedule == NORMFUSE_SCHEDULE_split) {
                    is_requested = exchange == NORMFUSE_EXCHANGE_GRID && set + g.block_groups < g.sets;
                    if (is_requested) {
                        int n, c;
                        begin_of(a, set + g.block_groups, n, c);
                        next = tensor(a, p.x, p.x, n, c).data;
                    }
                }
                choose_activation<plain, true>(p.activation, [&](auto chosen) {
                    const auto give = [&](raw<T, V> &vector, int index) {
                        R z[V];
                        char *const to = normalize(vector, index, z);
                        if (!plain && p.post_add.data) {
                            R residual[V];
                            unpack<T, V>(load_vector<T, V>(other.at(g, index, divide(index, g.by_spans)), 0), residual);
#pragma unroll
                            for (int i = 0; i < V; i++)
                                z[i] += residual[i];
                        }
                        activate<fast, plain, false>(z, chosen, p.activation, (R)p.act_param);
                        store_own<T, V, unaligned>(to, make_vector<T, V>(z), own_of(vectors, index));
                    };
                    walk_shared(give, next);
                    walk_registers(give);
                });
            }
            if (stores_late && sums)
                store_set(vectors, of_set);
            if (pass + 1 < passes)
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
                    double *const triple = a.partials + ((int64_t)set * g.parts + part) * TRIPLE;
                    triple[0] = (double)all.count;
                    triple[1] = (double)common + (double)all.mean;
                    triple[2] = (double)all.squares;
                }
            }
        }
        if (exchange != NORMFUSE_EXCHANGE_GRID)
            break;
        set += g.block_groups;
        if (set >= g.sets)
            break;
        parity ^= 1;
        __syncthreads();
    }
}

/* Of the block schedule: blocks of 224 threads that hold a set of 25 KB, four on a multiprocessor at 72 registers. With
 * 64 a vector went to memory as soon as it was loaded, and the parameters were requested only then. */
#define INSTANCE(layout, schedule, direction, type, elements, vectors, threads, registers)                             \
    NORMFUSE_KERNEL(layout, schedule, direction, type, elements, vectors, registers)                                   \
    {                                                                                                                  \
        rows_forward<type, elements, vectors, NORMFUSE_SCHEDULE_##schedule>(a);                                        \
    }
NORMFUSE_KERNELS_ROWS_FORWARD(INSTANCE)
