/* SPDX-License-Identifier: MIT
 *
 * rows_backward.cu - gradients where positions are adjacent (NCHW). A block reads x and dy of its part of a set once
 * and holds both; the sums of dy' and dy' * (x - mean) of each channel go to memory for the gradients of the
 * parameters, and their weighted totals over the set become dx.
 *
 *   dx = slope * dy' - (plain + rstd^2 * centred * (x - mean)) / values,   slope = rstd * weight * (1 + scale)
 *   plain = sum of slope * dy' over the set,  centred = sum of slope * dy' * (x - mean) */
#include "gradients.cuh"
#include "rows.cuh"

/* z = (x - shift) * slope + offset; shift + rest is the mean. */
template <typename R> struct row_gradient {
    R shift, rest, slope, offset;
};

template <bool many, typename R>
__device__ __forceinline__ void prepare_gradients(const normfuse_cuda_arguments &a, const row_vectors &vectors,
                                                  R factor, row_gradient<R> *coefficients)
{
    const normfuse_cuda_problem &p = a.problem;
    const normfuse_cuda_geometry &g = a.geometry;
    const bool by_sample = p.sets == NORMFUSE_SETS_BATCH;
    share_channels<many>(a, vectors, (int)threadIdx.x, [&](int i, int n, int c) {
        const int group = by_sample ? c : divide(c, g.by_outer);
        bits<double> saved_mean = 0;
        bits<R> saved_rstd = 0;
        if (a.source == NORMFUSE_SOURCE_SAVED) {
            saved_mean = request_bits<double>(p.mean(), n * p.mean().batch + group * p.mean().channel);
            saved_rstd = request_bits<R>(p.rstd(), n * p.rstd().batch + group * p.rstd().channel);
        }
        R slope, offset;
        const auto request = [&](const normfuse_parameter &of) {
            return of.data ? request_bits<R>(of, n * of.batch + c * of.channel) : bits<R>(0);
        };
        struct {
            bits<R> weight, bias, scale, shift;
        } const weights = {request(p.weight()), request(p.bias()), request(p.scale()), request(p.shift())};
        weigh(p, weights, slope, offset);
        double mean = 0.0;
        if (a.source == NORMFUSE_SOURCE_SAVED) {
            mean = receive<double>(saved_mean, p.mean().type);
            slope *= receive<R>(saved_rstd, p.rstd().type);
        } else if (a.source == NORMFUSE_SOURCE_RUNNING) {
            mean = parameter<double>(p.running_mean(), 0, c, 0.0);
            slope = scaled_by_running(p, c, slope);
        }
        const R shift = (R)mean, rest = (R)(mean - (double)shift);
        coefficients[i] = {shift, rest, slope * factor, (offset - rest * slope) * factor};
    });
}

/* The same where each block has one set at a time, whose statistics are saved. */
struct requested_gradient {
    requested_value mean, rstd;
    requested_weights weights;
};
__device__ __forceinline__ requested_gradient request_gradient(const normfuse_cuda_arguments &a,
                                                               const row_vectors &vectors, int i)
{
    const normfuse_cuda_problem &p = a.problem;
    const bool wanted = has_channel(a, vectors, i);
    const int n = vectors.n, c = channel_of(a, vectors, i);
    const int group = p.sets == NORMFUSE_SETS_BATCH ? c : divide(c, a.geometry.by_outer);
    return {request_at_once(p.mean(), n * p.mean().batch + group * p.mean().channel, wanted),
            request_at_once(p.rstd(), n * p.rstd().batch + group * p.rstd().channel, wanted), request_weights(p, n, c, wanted)};
}
template <typename R>
__device__ __forceinline__ row_gradient<R> make_gradient(const normfuse_cuda_problem &p, const requested_gradient &from,
                                                         R factor)
{
    R slope, offset;
    weigh(p, from.weights, slope, offset);
    const double mean = receive<double>(from.mean, p.mean().type);
    slope *= receive<R>(from.rstd, p.rstd().type);
    const R shift = (R)mean, rest = (R)(mean - (double)shift);
    return {shift, rest, slope * factor, (offset - rest * slope) * factor};
}

/* Calls work(x, dy, index) for each slot of the thread, those in shared memory first, as long as any thread of the warp
 * has a vector there. Vectors `next` bytes further on, if not 0, are requested into the places of those that were read.
 */
template <typename T, int V, int K, normfuse_cuda_schedule schedule, typename Work>
__device__ __forceinline__ void walk_pairs(const normfuse_cuda_arguments &a, const row_vectors &vectors, int shared,
                                           raw<T, V> (&held)[2][K], Work work, int64_t next)
{
    constexpr bool many = schedule == NORMFUSE_SCHEDULE_lanes;
    using tensor = row_tensor<T, V, !many, schedule == NORMFUSE_SCHEDULE_unaligned>;
    const normfuse_cuda_problem &p = a.problem;
    const normfuse_cuda_geometry &g = a.geometry;
    const int lane = (int)threadIdx.x & ((many ? 1 << g.lane_bits : 32) - 1);
    int index = vectors.index;
    compiler_barrier(index);
    if constexpr (!many) {
#pragma unroll 1
        for (int k = 0; k < shared && index - lane < vectors.end; k++) {
            work(place_of_slot<2>(k, 0), place_of_slot<2>(k, 1), index);
            if constexpr (schedule == NORMFUSE_SCHEDULE_split) {
                if (next != 0 && index < vectors.end) {
                    const tensor x(a, p.x(), vectors.n, vectors.c), dy(a, p.dy(), vectors.n, vectors.c);
                    const int stretch = divide(index, g.by_spans);
                    copy_once(&place_of_slot<2>(k, 0), x.at(g, index, stretch), next);
                    copy_once(&place_of_slot<2>(k, 1), dy.at(g, index, stretch), next);
                }
            }
            index += vectors.step;
        }
    }
#pragma unroll
    for (int k = 0; k < K; k++) {
        if (!many && index - lane >= vectors.end)
            break;
        work(held[0][k], held[1][k], index);
        index += vectors.step;
    }
}

/* The sums of the block's channels, of what its segments found, to memory. */
template <bool many, typename R>
__device__ __forceinline__ void store_channels(const normfuse_cuda_arguments &a, const row_vectors &vectors, int part,
                                               const totals<R> *of_channels)
{
    const normfuse_cuda_problem &p = a.problem;
    const normfuse_cuda_geometry &g = a.geometry;
    const bool by_sample = p.sets == NORMFUSE_SETS_BATCH;
    const int lanes = many ? 1 << g.lane_bits : 32, lane = (int)threadIdx.x & (lanes - 1);
    const int segment = (int)threadIdx.x >> (many ? g.lane_bits : 5), threads = (int)blockDim.x;
    if (many) {
        /* A segment has its whole set: entry i is channel i of it. */
        if (vectors.end > 0)
            for (int i = lane; i < (by_sample ? 1 : g.outer); i += lanes) {
                const totals<R> sum = of_channels[segment * g.channels_a_segment + i];
                double *const pair = a.sums + ((int64_t)vectors.n * p.c + vectors.c + i) * PAIR;
                pair[0] = (double)sum.plain;
                pair[1] = (double)sum.centred;
            }
    } else {
        const int first = part * g.part_rows;
        const int rows = max(0, min(g.part_rows, g.rows - first));
        const int before = first - vectors.first_outer * g.spans;
        const int channels = rows == 0 ? 0 : by_sample ? 1 : divide(before + rows + g.spans - 1, g.by_spans);
        for (int i = (int)threadIdx.x; i < channels; i += threads) {
            const int low = by_sample ? 0 : max(0, i * g.spans - before) / g.segment_rows;
            const int end = by_sample ? rows : min(rows, (i + 1) * g.spans - before);
            R plain = R(0), about = R(0);
            for (int q = low; q * g.segment_rows < end; q++) {
                const int j = by_sample ? 0 : i - divide(q * g.segment_rows + before, g.by_spans);
                plain += of_channels[q * g.channels_a_segment + j].plain;
                about += of_channels[q * g.channels_a_segment + j].centred;
            }
            const int outer = vectors.first_outer + i;
            const int slot = by_sample ? part : part - outer * g.spans / g.part_rows;
            const int64_t channel = by_sample ? vectors.c : (int64_t)vectors.n * p.c + vectors.c + outer;
            double *const pair = a.sums + (channel * g.sum_slots + slot) * PAIR;
            pair[0] = (double)plain;
            pair[1] = (double)about;
        }
    }
}

/* x becomes x - shift, dy what came through the activation; `post` is post_add, or y. */
template <typename T, int V, normfuse_cuda_schedule schedule, typename Tensor, typename Chosen>
__device__ __forceinline__ void differentiate_row(const normfuse_cuda_arguments &a, const Tensor &post, Chosen chosen,
                                                  const row_gradient<compute<T>> &coefficient, int index, int stretch,
                                                  compute<T> (&x)[V], compute<T> (&dy)[V])
{
    using R = compute<T>;
    constexpr bool many = schedule == NORMFUSE_SCHEDULE_lanes, unaligned = schedule == NORMFUSE_SCHEDULE_unaligned;
    constexpr bool fast = sizeof(T) == 2;
    const normfuse_cuda_problem &p = a.problem;
    const normfuse_cuda_geometry &g = a.geometry;
    each<V>([&](int i) { x[i] -= coefficient.shift; });
    if (chosen.of(p.activation) != NORMFUSE_IDENTITY) {
        R z[V];
        each<V>([&](int i) { z[i] = fma(x[i], coefficient.slope, coefficient.offset); });
        if (many && p.post_add().data) {
            R residual[V];
            unpack<T, V>(load_vector<T, V>(post.at(g, index, stretch), 0), residual);
            each<V>([&](int i) { z[i] = p.from_y() ? residual[i] : z[i] + residual[i]; });
        }
        differentiate_by<fast, !many && !unaligned>(dy, z, chosen, p.activation, (R)p.act_param);
    }
}

/* The thread's weighted sums over its set; those of its segment's channels go to of_channels. `own` are the
 * coefficients of the segment. */
template <typename T, int V, normfuse_cuda_schedule schedule, typename Walk, typename Differentiate>
__device__ __forceinline__ totals<compute<T>>
sum_channels(const normfuse_cuda_arguments &a, const row_vectors &vectors, const row_gradient<compute<T>> *own,
             compute<T> factor, totals<compute<T>> *of_channels, Walk walk, Differentiate differentiate)
{
    using R = compute<T>;
    constexpr bool many = schedule == NORMFUSE_SCHEDULE_lanes, unaligned = schedule == NORMFUSE_SCHEDULE_unaligned;
    constexpr bool all = many || unaligned;
    const normfuse_cuda_problem &p = a.problem;
    const normfuse_cuda_geometry &g = a.geometry;
    const bool by_sample = p.sets == NORMFUSE_SETS_BATCH;
    /* Channels of the block are counted from the first that it touches; all of a channel's set are the same one. */
    const int channel_step = by_sample ? 0 : 1;
    const int lanes = many ? 1 << g.lane_bits : 32, lane = (int)threadIdx.x & (lanes - 1);
    const int segment = (int)threadIdx.x >> (many ? g.lane_bits : 5);
    totals<R> met = {R(0), R(0)};
    /* A warp (or the segments of one, in step, since all begin with a set) goes through its channels one after
     * the other. */
    int current = many || by_sample ? 0 : divide(vectors.index - lane, g.by_spans) - vectors.first_outer;
    totals<R> channel = {R(0), R(0)};
    totals<R> *entry = of_channels + segment * g.channels_a_segment;
    const auto flush = [&] {
        const R slope = own[current].slope;
        channel.centred -= own[current].rest * channel.plain;
        met.plain += slope * channel.plain;
        met.centred += slope * channel.centred;
        if (a.sums) {
            const R plain = sum_lanes(channel.plain, lanes), about = sum_lanes(channel.centred, lanes);
            if (lane == 0)
                *entry = {plain * factor, about * factor};
            entry++;
        }
        channel = {R(0), R(0)};
    };
    choose_activation<!many, all>(p.activation, [&](auto chosen) {
        walk([&](raw<T, V> &x_vector, raw<T, V> &dy_vector, int index) {
            const int stretch = divide(index, g.by_spans);
            R plain = R(0), about = R(0);
            int channel_here = current;
            if (index < vectors.end) {
                channel_here = (stretch - vectors.first_outer) * channel_step;
                R x[V], dy[V];
                unpack<T, V>(x_vector, x);
                unpack<T, V>(dy_vector, dy);
                differentiate(chosen, own[channel_here], index, stretch, x, dy);
                const row_elements<V, unaligned> elements = elements_of<T, V, !many, unaligned>(a, vectors, index);
                if (!elements.are_all()) {
                    /* Not by a factor of 0: what others have there may be infinite. */
                    each<V>([&](int i) {
                        x[i] = elements.has(i) ? x[i] : R(0);
                        dy[i] = elements.has(i) ? dy[i] : R(0);
                    });
                }
                each<V>([&](int i) {
                    plain += dy[i];
                    about += dy[i] * x[i];
                });
            }
            while (__any_sync(full_mask, channel_here > current)) {
                if (channel_here == current) {
                    channel.plain += plain;
                    channel.centred += about;
                }
                flush();
                current++;
            }
            if (channel_here == current) {
                channel.plain += plain;
                channel.centred += about;
            }
        });
    });
    if (many || vectors.index - lane < vectors.end)
        flush();
    return met;
}

/* dx = slope dy' + share (x - shift) + level; without a centre the first alone */
template <typename R> struct row_level {
    R level, share;
    bool is_needed;
};

template <typename T, int V, normfuse_cuda_schedule schedule, typename Walk, typename Differentiate>
__device__ __forceinline__ void store_gradients(const normfuse_cuda_arguments &a, const row_vectors &vectors,
                                                const row_gradient<compute<T>> *own, const row_level<compute<T>> &of,
                                                bool writes_dy, bool applies, Walk walk, Differentiate differentiate)
{
    using R = compute<T>;
    constexpr bool many = schedule == NORMFUSE_SCHEDULE_lanes, unaligned = schedule == NORMFUSE_SCHEDULE_unaligned;
    /* Lanes alone have additions and sets of more than 2^31 bytes. Beside them unaligned tiles alone have the rare
     * derivatives, by a call in each vector. */
    constexpr bool all = many || unaligned;
    using tensor = row_tensor<T, V, !many, unaligned>;
    const normfuse_cuda_problem &p = a.problem;
    const normfuse_cuda_geometry &g = a.geometry;
    /* Lanes find it where it is needed: before the loop 16-bit vectors spilled. */
    const bool writes_dx = !many && p.dx().data && applies;
    const int channel_step = p.sets == NORMFUSE_SETS_BATCH ? 0 : 1;
    const normfuse_view dx_view = p.dx().data ? p.dx() : p.x(), du_view = many && p.du().data ? p.du() : p.x();
    const normfuse_view dpost_view = many && p.dpost_add().data ? p.dpost_add() : p.x();
    const tensor dx(a, dx_view, vectors.n, vectors.c);
    const tensor du(a, du_view, vectors.n, vectors.c), dpost(a, dpost_view, vectors.n, vectors.c);
    choose_activation<!many, all>(p.activation, [&](auto chosen) {
        const auto store = [&](raw<T, V> &x_vector, raw<T, V> &dy_vector, int index) {
            if (index >= vectors.end)
                return;
            const int stretch = divide(index, g.by_spans);
            const row_gradient<R> coefficient = own[(stretch - vectors.first_outer) * channel_step];
            R x[V], dy[V];
            unpack<T, V>(x_vector, x);
            unpack<T, V>(dy_vector, dy);
            differentiate(chosen, coefficient, index, stretch, x, dy);
            if (writes_dy)
                store_vector<T, V>(dpost.at(g, index, stretch), 0, make_vector<T, V>(dy));
            if (many ? p.dx().data && applies : writes_dx) {
                each<V>([&](int i) {
                    x[i] = fma(coefficient.slope, dy[i], of.is_needed ? fma(of.share, x[i], of.level) : R(0));
                });
                if (many && p.du().data) {
                    R more[V];
                    unpack<T, V>(load_vector<T, V>(du.at(g, index, stretch), 0), more);
                    each<V>([&](int i) { x[i] += more[i]; });
                }
                store_own<T, V, unaligned>(dx.at(g, index, stretch), make_vector<T, V>(x),
                                           elements_of<T, V, !many, unaligned>(a, vectors, index));
            }
        };
        walk(store);
    });
}

/* The weighted sums of a set, of what its threads found; write_sums() while those of other blocks are on their way. */
template <bool many, typename R, typename Write>
__device__ __forceinline__ totals<R> join_set(const normfuse_cuda_arguments &a, const row_block &block,
                                              const totals<R> &met, totals<R> *of_warps, cluster_mailbox &mailbox,
                                              double *of_parts, Write write_sums)
{
    const normfuse_cuda_geometry &g = a.geometry;
    const int lanes = many ? 1 << g.lane_bits : 32;
    totals<R> all = {sum_lanes(met.plain, lanes), sum_lanes(met.centred, lanes)};
    if constexpr (!many) {
        all = join_warps(of_warps, all, [](const totals<R> &of_lane) {
            return totals<R>{sum_lanes(of_lane.plain, 32), sum_lanes(of_lane.centred, 32)};
        });
        const double own[PAIR] = {(double)all.plain, (double)all.centred};
        exchange_sums(a, block, mailbox, of_parts, own, write_sums,
                      [&](const double *pairs, bool near_by) { all = add_parts<R>(pairs, PAIR, g.parts, near_by); });
        if (block.exchange == NORMFUSE_EXCHANGE_NONE)
            write_sums();
    }
    return all;
}

template <typename T, int V, int K, normfuse_cuda_schedule schedule>
__device__ __forceinline__ void rows_backward(const normfuse_cuda_arguments &a)
{
    follow_kernel();
    using R = compute<T>;
    constexpr bool many = schedule == NORMFUSE_SCHEDULE_lanes, whole = schedule == NORMFUSE_SCHEDULE_block;
    constexpr bool holds = whole || schedule == NORMFUSE_SCHEDULE_split,
                   unaligned = schedule == NORMFUSE_SCHEDULE_unaligned;
    using tensor = row_tensor<T, V, !many, unaligned>;
    const normfuse_cuda_problem &p = a.problem;
    const normfuse_cuda_geometry &g = a.geometry;
    NORMFUSE_DYNAMIC_SHARED(dynamic);
    __shared__ totals<R> of_warps[max_row_warps];
    __shared__ double of_parts[PAIR * NORMFUSE_CUDA_ROW_CLUSTER];
    __shared__ cluster_mailbox mailbox;
    __shared__ R rstd_of_set;
    const int segment = (int)threadIdx.x >> (many ? g.lane_bits : 5), threads = (int)blockDim.x;
    const int shared = !many ? g.held_shared : 0;
    row_gradient<R> *const coefficients = reinterpret_cast<row_gradient<R> *>(dynamic + 2 * shared * threads);
    totals<R> *const of_channels = reinterpret_cast<totals<R> *>(coefficients + g.coefficients);

    const bool sums = holds || (a.phases & NORMFUSE_PHASE_BACKWARD_SUMS) != 0;
    const bool applies = holds || (a.phases & NORMFUSE_PHASE_BACKWARD_APPLY) != 0;
    const bool centred = holds || p.sets != NORMFUSE_SETS_NONE, by_sample = p.sets == NORMFUSE_SETS_BATCH;
    row_block block(a, whole, schedule == NORMFUSE_SCHEDULE_split || unaligned, !holds && g.backwards);
    raw<T, V> held[2][K]; /* of x and dy */
    block.open(g, mailbox, PAIR);
    bool is_requested = false; /* for what goes to shared memory: while the results of the set before were written */
    do {
        const row_vectors vectors = vectors_of<many, false>(a, block.set, block.part, 0);
        const auto walk = [&](auto work, int64_t next = 0) {
            walk_pairs<T, V, K, schedule>(a, vectors, shared, held, work, next);
        };

        /* ---- load ---- */
        const uint32_t grid_barrier = look_at_grid_barrier_where(
            block.exchange == NORMFUSE_EXCHANGE_GRID && threadIdx.x == 0, block.grid_barrier(a));
        requested_gradient first;
        if constexpr (holds)
            first = request_gradient(a, vectors, (int)threadIdx.x);
        load_rows<holds>(a, vectors, shared, is_requested,
                         {tensor(a, p.x(), vectors.n, vectors.c), tensor(a, p.dy(), vectors.n, vectors.c)}, held);
        bits<R> saved_rstd = 0;
        if (!holds && centred && applies && vectors.end > 0) {
            const int group = by_sample ? vectors.c : divide(vectors.c, g.by_outer);
            saved_rstd = request_bits<R>(p.rstd(), vectors.n * p.rstd().batch + group * p.rstd().channel);
        }
        if (block.exchange == NORMFUSE_EXCHANGE_GRID && threadIdx.x == 0)
            grid_barrier_before() = grid_barrier;
        const R portion = R(1) / (R)p.set_values;
        const R factor = takes_half<sizeof(T) == 2, !many>(p.activation) ? R(0.5) : R(1);
        if constexpr (holds) {
            for (int i = (int)threadIdx.x; has_channel(a, vectors, i); i += threads) {
                if (i >= threads)
                    first = request_gradient(a, vectors, i);
                coefficients[i] = make_gradient<R>(p, first, factor);
                if (i == 0)
                    rstd_of_set = receive<R>(first.rstd, p.rstd().type);
            }
        } else {
            prepare_gradients<many>(a, vectors, factor, coefficients);
        }
        if (shared > 0)
            wait_for_copies();
        if (many && p.pre_add().data) {
            add_residual<T, V>(a, vectors, false, [&](auto work) {
                walk([&](raw<T, V> &x, raw<T, V> &, int index) {
                    if (index < vectors.end)
                        work(x, index);
                });
            });
        }
        __syncthreads();

        const row_gradient<R> *const own = coefficients + (many ? segment * (by_sample ? 1 : g.outer) : 0);
        const normfuse_view post_view = many && p.post_add().data ? p.post_add() : p.x();
        const tensor post(a, post_view, vectors.n, vectors.c);
        const auto differentiate = [&](auto chosen, const row_gradient<R> &coefficient, int index, int stretch,
                                       R(&x)[V], R(&dy)[V]) {
            differentiate_row<T, V, schedule>(a, post, chosen, coefficient, index, stretch, x, dy);
        };

        /* ---- sums ---- */
        totals<R> met = {R(0), R(0)};
        if (sums)
            met = sum_channels<T, V, schedule>(a, vectors, own, factor, of_channels, walk, differentiate);
        /* What the channels of the block summed, to memory: while the totals of other blocks are on their way. */
        const auto write_sums = [&] {
            if (a.sums)
                store_channels<many>(a, vectors, block.part, of_channels);
        };
        /* In place of dy it must not be written before dy was read for the last time. */
        const bool writes_dy = many && p.dpost_add().data && (applies || !(p.phases() & NORMFUSE_PHASE_BACKWARD_APPLY));
        const bool exchanges = sums && applies && centred && !many;
        if (sums && !exchanges) {
            __syncthreads();
            write_sums();
        }
        if (!applies && !writes_dy)
            return;

        /* ---- the totals of the set ---- */
        R level = R(0), share = R(0);
        if (centred && applies) {
            if (sums) {
                const totals<R> all = join_set<many>(a, block, met, of_warps, mailbox, of_parts, write_sums);
                level = all.plain;
                share = all.centred;
            } else if (vectors.end > 0) {
                level = (R)a.totals[(int64_t)vectors.set * PAIR];
                share = (R)a.totals[(int64_t)vectors.set * PAIR + 1];
            }
            if (vectors.end > 0) {
                const R rstd = holds ? rstd_of_set : receive<R>(saved_rstd, p.rstd().type);
                share = -(share * rstd) * (rstd * portion);
                level = -level * portion - share * own->rest;
            }
        }

        uint32_t counted = 0;
        if (!many && g.contributors > 0) {
            __syncthreads();
            if (threadIdx.x == 0)
                counted = count_block(a, by_sample ? vectors.set : vectors.set - vectors.n * (int)p.groups);
        }

        /* ---- results ---- */
        each<K>([&](int k) {
            compiler_barrier(held[0][k]);
            compiler_barrier(held[1][k]);
        });
        /* The set after this one, whose vectors take the places of those that were read, is so many bytes further on.
         */
        int64_t next = 0;
        if constexpr (schedule == NORMFUSE_SCHEDULE_split) {
            int n, c;
            is_requested = block.find_next(a, n, c);
            if (is_requested)
                next = tensor(a, p.x(), n, c).data - tensor(a, p.x(), vectors.n, vectors.c).data;
        }
        store_gradients<T, V, schedule>(
            a, vectors, own, {level, share, centred}, writes_dy, applies, [&](auto store) { walk(store, next); },
            differentiate);

        /* ---- the parameters' gradients ---- */
        if (!many)
            write_last_gradients(a, counted, vectors.c, by_sample ? 1 : g.outer);
    } while (block.advance(g));
}

NORMFUSE_KERNELS_ROWS_BACKWARD(NORMFUSE_INSTANCE)
