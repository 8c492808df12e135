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
    const normfuse_cuda_problem &p = a.problem;
    share_channels<many>(a, vectors, first, [&](int i, int n, int c) {
        /* One after the other: requested all at once, they were ahead of the vectors (128x256x28x28: 61 us for 56). */
        const R scale = R(1) + parameter<R>(p.scale(), n, c, R(0));
        R slope = parameter<R>(p.weight(), n, c, R(1)) * scale;
        R offset = parameter<R>(p.bias(), n, c, R(0)) * scale + parameter<R>(p.shift(), n, c, R(0));
        R shift = R(0);
        if (a.source == NORMFUSE_SOURCE_RUNNING) {
            const double mean = parameter<double>(p.running_mean(), 0, c, 0.0);
            slope = scaled_by_running(p, c, slope);
            shift = (R)mean;
            offset -= (R)(mean - (double)shift) * slope;
        }
        coefficients[i] = {shift, slope * factor, offset * factor, R(0)};
    });
}

/* What is known of a set, to memory. Running statistics are read first: where blocks share a set all wait for the one
 * that does this, so after the results; a block that has its set alone would end later. */
template <bool many, typename R>
__device__ __forceinline__ void store_set(const normfuse_cuda_arguments &a, const row_vectors &vectors, int part,
                                          const set_statistics<R> &found)
{
    const normfuse_cuda_problem &p = a.problem;
    const bool by_sample = p.sets == NORMFUSE_SETS_BATCH;
    if (many ? vectors.index == 0 && vectors.end > 0 : part == 0 && threadIdx.x == 0) {
        const int n = by_sample ? 0 : vectors.n;
        const int channel = by_sample ? vectors.set : vectors.set - n * (int)p.groups;
        const double variance =
            store_statistics(a, n, channel, vectors.set, found.mean, found.variance, found.rstd, (double)p.set_values);
        if (p.has_running_momentum() && by_sample)
            update_running<R>(p, vectors.c, found.mean, variance);
    }
}

/* The first value of the tile, the same in all threads: one of the set's own, so not far from its mean. */
template <typename T, int V, normfuse_cuda_schedule schedule>
__device__ __forceinline__ compute<T> first_value(const normfuse_cuda_arguments &a, const row_vectors &vectors,
                                                  int part)
{
    using R = compute<T>;
    constexpr bool many = schedule == NORMFUSE_SCHEDULE_lanes, plain = !many,
                   unaligned = schedule == NORMFUSE_SCHEDULE_unaligned;
    using tensor = row_tensor<T, V, plain, unaligned>;
    const normfuse_cuda_problem &p = a.problem;
    const normfuse_cuda_geometry &g = a.geometry;
    R common = R(0);
    const int first = many ? 0 : part * g.part_rows;
    if (first < vectors.end) {
        const int stretch = divide(first, g.by_spans);
        const tensor x(a, p.x(), vectors.n, vectors.c);
        R value[1];
        /* A unaligned vector of a stretch need not have elements of it; the stretch has a first. */
        unpack<T, 1>(load_vector<T, 1>(unaligned ? x.data + x.start(stretch) : x.at(g, first, stretch), 0), value);
        common = value[0];
        if (!plain && p.pre_add().data) {
            unpack<T, 1>(
                load_vector<T, 1>(tensor(a, p.pre_add(), vectors.n, vectors.c).at(g, first, stretch), 0),
                value);
            common += value[0];
        }
    }
    return common;
}

/* The moments of the vectors that walk(work) calls work(vector, index) for; the `first` of them is at `index`. */
template <typename T, int V, normfuse_cuda_schedule schedule, typename Walk>
__device__ __forceinline__ void add_moments(const normfuse_cuda_arguments &a, const row_vectors &vectors,
                                            compute<T> common, const raw<T, V> &first, int index, Walk walk_some,
                                            moments<compute<T>> &met)
{
    using R = compute<T>;
    constexpr bool plain = schedule != NORMFUSE_SCHEDULE_lanes, unaligned = schedule == NORMFUSE_SCHEDULE_unaligned,
                   streams = schedule == NORMFUSE_SCHEDULE_two_pass;
    using tensor = row_tensor<T, V, plain, unaligned>;
    const normfuse_cuda_problem &p = a.problem;
    const normfuse_cuda_geometry &g = a.geometry;
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
            row_elements<V, unaligned> own = elements_of<T, V, plain, unaligned>(a, vectors, index);
#pragma unroll
            for (int i = V - 2; i >= 0; i--)
                shift = own.has(i) ? value[i] : shift;
            if (own.count() == 0) {
                for (index += vectors.step; index < vectors.end; index += vectors.step) {
                    own = elements_of<T, V, plain, unaligned>(a, vectors, index);
                    if (own.count() > 0) {
                        const tensor x(a, p.x(), vectors.n, vectors.c);
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
        const row_elements<V, unaligned> own = elements_of<T, V, plain, unaligned>(a, vectors, index);
        if (!own.are_all()) {
            each<V>([&](int i) { value[i] = own.has(i) ? value[i] : shift; });
        }
        each<V>([&](int i) {
            const R distance = value[i] - shift;
            sum[i % 2] += distance;
            square[i % 2] += distance * distance;
        });
        count += own.count();
    });
    if (count > 0) {
        const R total = sum[0] + sum[1], number = (R)count, mean = total / number;
        append(met, {number, (shift - common) + mean, (square[0] + square[1]) - total * mean});
    }
}

/* What values of a set are centred by: shift + remainder is the mean. */
template <typename R> struct row_centre {
    bool is_needed;
    R shift, remainder, rstd;

    __device__ __forceinline__ void find(double mean, R of_rstd)
    {
        rstd = of_rstd;
        shift = (R)mean;
        remainder = (R)(mean - (double)shift);
    }
};

/* The results of the vectors that walk(work) calls work(vector, index) for. */
template <typename T, int V, normfuse_cuda_schedule schedule, typename Walk>
__device__ __forceinline__ void store_results(const normfuse_cuda_arguments &a, const row_vectors &vectors,
                                              const row_coefficient<compute<T>> *coefficients,
                                              const row_centre<compute<T>> &of, Walk walk)
{
    using R = compute<T>;
    constexpr bool many = schedule == NORMFUSE_SCHEDULE_lanes, plain = !many, fast = sizeof(T) == 2,
                   unaligned = schedule == NORMFUSE_SCHEDULE_unaligned;
    using tensor = row_tensor<T, V, plain, unaligned>;
    const normfuse_cuda_problem &p = a.problem;
    const normfuse_cuda_geometry &g = a.geometry;
    const bool by_sample = p.sets == NORMFUSE_SETS_BATCH;
    /* Channels of the set are beside one another, from the first that the block touches. */
    const int own = (many ? ((int)threadIdx.x >> g.lane_bits) * (by_sample ? 1 : g.outer) : 0);
    const int channel_step = by_sample ? 0 : 1, before = own - vectors.first_outer * channel_step;
    const tensor y(a, p.y(), vectors.n, vectors.c);
    /* z of a vector, and where it goes */
    const auto normalize = [&](raw<T, V> &vector, int index, R(&z)[V]) {
        const int stretch = divide(index, g.by_spans);
        const row_coefficient<R> coefficient = coefficients[before + stretch * channel_step];
        R slope = coefficient.slope, offset = coefficient.offset, about = coefficient.shift;
        if (of.is_needed) {
            slope *= of.rstd;
            offset -= of.remainder * slope;
            about = of.shift;
        }
        unpack<T, V>(vector, z);
        each<V>([&](int i) { z[i] = fma(z[i] - about, slope, offset); });
        return y.at(g, index, stretch);
    };
    const normfuse_view added_view = !plain && p.post_add().data ? p.post_add() : p.y();
    const tensor other(a, added_view, vectors.n, vectors.c);
    choose_activation<plain, true>(p.activation, [&](auto chosen) {
        const auto store = [&](raw<T, V> &vector, int index) {
            R z[V];
            char *const to = normalize(vector, index, z);
            if (!plain && p.post_add().data) {
                R residual[V];
                unpack<T, V>(load_vector<T, V>(other.at(g, index, divide(index, g.by_spans)), 0), residual);
                each<V>([&](int i) { z[i] += residual[i]; });
            }
            activate<fast, plain, false>(z, chosen, p.activation, (R)p.act_param);
            store_own<T, V, unaligned>(to, make_vector<T, V>(z),
                                       elements_of<T, V, plain, unaligned>(a, vectors, index));
        };
        walk(store);
    });
}

/* Calls work(vector, index) for each of `shared` vectors that the thread has in shared memory. Those of the set that
 * begins at next_set, if any, are requested into their places. */
template <typename T, int V, normfuse_cuda_schedule schedule, typename Work>
__device__ __forceinline__ void walk_slots(const normfuse_cuda_arguments &a, const row_vectors &vectors, int shared,
                                           int index, uint4 *own_shared, const char *next_set, Work work)
{
    const normfuse_cuda_problem &p = a.problem;
    const normfuse_cuda_geometry &g = a.geometry;
#pragma unroll 1
    for (int k = 0; k < shared && index < vectors.end; k++) {
        raw<T, V> vector = own_shared[k * (int)blockDim.x];
        work(vector, index);
        if constexpr (schedule == NORMFUSE_SCHEDULE_split) {
            row_tensor<T, V, true, false> x(a, p.x(), vectors.n, vectors.c);
            x.data = const_cast<char *>(next_set);
            if (next_set)
                copy_once(own_shared + k * (int)blockDim.x, x.at(g, index, divide(index, g.by_spans)), 0);
        }
        index += vectors.step;
    }
}
template <int count, typename Vector, int K, typename Work>
__device__ __forceinline__ void walk_held(const row_vectors &vectors, int rest, Vector (&held)[K], Work work)
{
    int index = rest;
    compiler_barrier(index);
#pragma unroll
    for (int k = 0; k < count; k++) {
        if (index >= vectors.end)
            break;
        work(held[k], index);
        index += vectors.step;
    }
}

template <typename R> __device__ __forceinline__ moments<R> join_warp(const moments<R> &of_lane)
{
    return join_lanes(of_lane, 32);
}

/* The statistics of a set, of what its threads found about `common`. meanwhile() is done while the moments of other
 * blocks are on their way. */
template <normfuse_cuda_schedule schedule, typename R, typename Meanwhile>
__device__ __forceinline__ set_statistics<R> join_set(const normfuse_cuda_arguments &a, const row_block &block,
                                                      const moments<R> &met, R common, moments<R> *of_warps,
                                                      cluster_mailbox &mailbox, double *of_parts, Meanwhile meanwhile)
{
    constexpr bool many = schedule == NORMFUSE_SCHEDULE_lanes;
    const normfuse_cuda_geometry &g = a.geometry;
    double base = (double)common;
    moments<R> all = join_lanes(met, many ? 1 << g.lane_bits : 32);
    if constexpr (many) {
        __syncthreads();
    } else {
        all = join_warps(of_warps, all, join_warp<R>);
        const double own[TRIPLE] = {(double)all.count, base + (double)all.mean, (double)all.squares};
        exchange_sums(a, block, mailbox, of_parts, own, meanwhile, [&](const double *triples, bool near_by) {
            /* What was done meanwhile. */
            if (near_by && schedule == NORMFUSE_SCHEDULE_split)
                __syncthreads();
            all = near_by ? join_near<R>(triples, TRIPLE, g.parts, &base)
                          : join_parts<R>(triples, TRIPLE, g.parts, &base);
        });
    }
    return statistics_of(all, base, a.problem.eps);
}

/* What a block found of a set: a later kernel joins the parts. */
template <typename R>
__device__ __forceinline__ void store_part(const normfuse_cuda_arguments &a, const moments<R> &all, R common, int set,
                                           int part)
{
    if (threadIdx.x == 0) {
        double *const triple = a.partials + ((int64_t)set * a.geometry.parts + part) * TRIPLE;
        triple[0] = (double)all.count;
        triple[1] = (double)common + (double)all.mean;
        triple[2] = (double)all.squares;
    }
}

template <typename T, int V, int K, normfuse_cuda_schedule schedule>
__device__ __forceinline__ void rows_forward(const normfuse_cuda_arguments &a)
{
    follow_kernel();
    using R = compute<T>;
    constexpr bool many = schedule == NORMFUSE_SCHEDULE_lanes, whole = schedule == NORMFUSE_SCHEDULE_block;
    constexpr bool plain = !many; /* lanes alone have additions and sets of more than 2^31 bytes */
    constexpr bool holds = whole || schedule == NORMFUSE_SCHEDULE_split,
                   unaligned = schedule == NORMFUSE_SCHEDULE_unaligned;
    constexpr bool streams = schedule == NORMFUSE_SCHEDULE_two_pass, fast = sizeof(T) == 2;
    using tensor = row_tensor<T, V, plain, unaligned>;
    const normfuse_cuda_problem &p = a.problem;
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
    const bool centred = sums || a.source == NORMFUSE_SOURCE_SCRATCH;
    const bool backwards = !holds && g.backwards;
    const int passes = holds || streams ? 1 : g.passes;
    row_block block(a, whole, schedule == NORMFUSE_SCHEDULE_split || unaligned, backwards);
    raw<T, V> held[1][K];
    constexpr bool stores_late = schedule == NORMFUSE_SCHEDULE_split;
    block.open(g, mailbox, TRIPLE);
    bool is_requested = false; /* for what goes to shared memory: while the results of the set before were written */
    do {
        moments<R> met = {R(0), R(0), R(0)};
        R common = R(0); /* the shift of the whole block, or segment */
        for (int pass = 0; pass < passes; pass++) {
            const row_vectors vectors =
                vectors_of<many, true>(a, block.set, block.part, backwards ? passes - 1 - pass : pass);
            const int rest = vectors.index + shared * vectors.step; /* the first that is held in a register */

            /* ---- load ---- */
            /* The vector that is requested next, and how many there are. */
            int next = vectors.index, count = max(0, (vectors.end - next + vectors.step - 1) / vectors.step);
            const auto request_vector = [&](raw<T, V> &vector, bool wanted) {
                const tensor x(a, p.x(), vectors.n, vectors.c);
                load_vector_where<T, V>(wanted, vector, x.at(g, next, divide(next, g.by_spans)));
                next += vectors.step;
            };
            if constexpr (streams)
                request_first<K>(held[0], count, request_vector);
            else
                load_rows<false>(a, vectors, shared, is_requested, {tensor(a, p.x(), vectors.n, vectors.c)}, held);
            if (block.exchange == NORMFUSE_EXCHANGE_GRID && threadIdx.x == 0)
                grid_barrier_before() = look_at_grid_barrier(block.grid_barrier(a));
            if (sums && pass == 0)
                common = first_value<T, V, schedule>(a, vectors, block.part);
            const auto prepare = [&](int first) {
                prepare_coefficients<many>(a, vectors, takes_half<fast, plain>(p.activation) ? R(0.5) : R(1),
                                           coefficients, first);
            };
            /* Parameters come behind all vectors. Where the block asks others for their sums, it requests these then.
             */
            const bool later = schedule == NORMFUSE_SCHEDULE_split && block.exchange != NORMFUSE_EXCHANGE_NONE;
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
            const auto walk_shared = [&](auto work, const char *next_set = nullptr) {
                int index = vectors.index;
                compiler_barrier(index);
                if constexpr (streams)
                    walk_passing<K>(held[0], count, request_vector, [&](raw<T, V> &vector) {
                        work(vector, index);
                        index += vectors.step;
                    });
                else if constexpr (!many)
                    walk_slots<T, V, schedule>(a, vectors, shared, index, own_shared, next_set, work);
            };
            const auto walk_registers = [&](auto work) { walk_held<streams ? 0 : K>(vectors, rest, held[0], work); };
            if (!plain && p.pre_add().data) {
                const bool writes = p.u().data && (sums || !(p.phases() & NORMFUSE_PHASE_STATISTICS));
                /* Perhaps in place of x or of its residual, so not before all have read the value that they share. */
                if (writes && sums && pass == 0)
                    __syncthreads();
                add_residual<T, V>(a, vectors, writes, walk_registers);
            }

            /* ---- sums ---- */
            if (sums) {
                /* Those in shared memory and those in registers each about a value of their own. */
                const auto gather = [&](const raw<T, V> &first, int index, auto walk_some) {
                    add_moments<T, V, schedule>(a, vectors, common, first, index, walk_some, met);
                };
                if constexpr (streams)
                    gather(held[0][0], vectors.index, walk_shared);
                if constexpr (!streams && !many)
                    if (shared > 0)
                        gather(own_shared[0], vectors.index, walk_shared);
                if constexpr (!streams)
                    gather(held[0][0], rest, walk_registers);
            }
            if (!applies)
                continue;

            /* ---- the statistics of the set ---- */
            row_centre<R> of = {centred, R(0), R(0), R(1)};
            if (sums) {
                const set_statistics<R> found =
                    join_set<schedule>(a, block, met, common, of_warps, mailbox, of_parts, prepare_later);
                if (!stores_late)
                    store_set<many>(a, vectors, block.part, found);
                else if (threadIdx.x == 0)
                    of_set = found;
                of.find(found.mean, found.rstd);
            } else {
                if (centred && vectors.end > 0)
                    of.find(a.statistics[vectors.set].mean, (R)a.statistics[vectors.set].rstd);
                __syncthreads();
            }

            /* ---- results ---- */
            if (p.y().data) {
                each<(streams ? 0 : K)>([&](int k) { compiler_barrier(held[0][k]); });
                /* The set after this one, whose vectors take the places of those that were read. */
                const char *next = nullptr;
                if constexpr (schedule == NORMFUSE_SCHEDULE_split) {
                    int n, c;
                    is_requested = block.find_next(a, n, c);
                    if (is_requested)
                        next = tensor(a, p.x(), n, c).data;
                }
                store_results<T, V, schedule>(a, vectors, coefficients, of, [&](auto store) {
                    walk_shared(store, next);
                    walk_registers(store);
                });
            }
            if (stores_late && sums)
                store_set<many>(a, vectors, block.part, of_set);
            if (pass + 1 < passes)
                __syncthreads();
        }

        if (!applies)
            store_part(a, join_warps(of_warps, join_lanes(met, 32), join_warp<R>), common, block.set, block.part);
    } while (block.advance(g));
}

/* Of the block schedule: blocks of 224 threads that hold a set of 25 KB, four on a multiprocessor at 72 registers. With
 * 64 a vector went to memory as soon as it was loaded, and the parameters were requested only then. */
NORMFUSE_KERNELS_ROWS_FORWARD(NORMFUSE_INSTANCE)
