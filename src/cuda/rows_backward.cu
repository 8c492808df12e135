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

/* dx = slope dy' + share (x - shift) + level */
template <typename R> struct row_level {
    R level, share;
};

/* What a channel is given, as it is in memory: requested ahead of the vectors. Behind them it would come last, and what
 * waits for it would begin when all is there. */
struct requested_gradient {
    requested_value mean, rstd;
    requested_weights weights;
};

template <typename T, int V, int K, normfuse_cuda_schedule schedule>
struct backward_rows : row_kernel<T, V, K, 2, schedule> {
    using kernel = row_kernel<T, V, K, 2, schedule>;
    using kernel::a, kernel::p, kernel::g, kernel::by_sample, kernel::shared, kernel::block, kernel::vectors;
    using kernel::adds, kernel::unaligned, kernel::split, kernel::fast;
    using R = compute<T>;
    using tensor = typename kernel::tensor;
    using pairs = raw<T, V>[2][kernel::registers]; /* of x and dy */
    /* Unaligned tiles alone have the rare derivatives, by a call in each vector. */
    static constexpr bool all = unaligned;
    static constexpr int lanes = 32;
    /* Channels of a set then have levels of their own, which the others have no registers for. */
    static constexpr bool takes_bias = split && sizeof(T) > 2;
    const int segment, lane;       /* the thread's warp, and its lane of that */
    row_gradient<R> *coefficients; /* of the block's channels */
    totals<R> *of_channels;

    __device__ __forceinline__ explicit backward_rows(const normfuse_cuda_arguments &a)
        : kernel(a), segment((int)threadIdx.x / lanes), lane((int)threadIdx.x % lanes)
    {
        coefficients = reinterpret_cast<row_gradient<R> *>(this->behind_slots());
        of_channels = reinterpret_cast<totals<R> *>(coefficients + g.coefficients);
    }
    __device__ __forceinline__ R half() const
    {
        return takes_half<fast>(p.activation) ? R(0.5) : R(1);
    }
    __device__ __forceinline__ int channel_step() const
    {
        return by_sample ? 0 : 1;
    }

    /* ---- channels ---- */
    __device__ __forceinline__ static row_gradient<R> gradient_of(double mean, R slope, R offset, R factor)
    {
        const R shift = (R)mean, rest = (R)(mean - (double)shift);
        return {shift, rest, slope * factor, (offset - rest * slope) * factor};
    }
    /* What x itself is centred by. */
    __device__ __forceinline__ double less_bias(double mean, int n, int c) const
    {
        return takes_bias && p.pre_bias().data ? mean - (double)parameter<R>(p.pre_bias(), n, c, R(0)) : mean;
    }
    __device__ __forceinline__ void prepare_gradients() const
    {
        const R factor = half();
        this->share_channels((int)threadIdx.x, [&](int i, int n, int c) {
            const int group = by_sample ? c : divide(c, g.by_outer);
            const auto saved_mean = request_bits<double>(p.mean(), n * p.mean().batch + group * p.mean().channel);
            const auto saved_rstd = request_bits<R>(p.rstd(), n * p.rstd().batch + group * p.rstd().channel);
            const auto request = [&](const normfuse_parameter &of) {
                return of.data ? request_bits<R>(of, n * of.batch + c * of.channel) : bits<R>(0);
            };
            struct {
                bits<R> weight, bias, scale, shift;
            } const weights = {request(p.weight()), request(p.bias()), request(p.scale()), request(p.shift())};
            R slope, offset;
            weigh(p, weights, slope, offset);
            const double mean = receive<double>(saved_mean, p.mean().type);
            slope *= receive<R>(saved_rstd, p.rstd().type);
            coefficients[i] = gradient_of(less_bias(mean, n, c), slope, offset, factor);
        });
    }
    /* The same where each block has one set at a time, whose statistics are saved. */
    __device__ __forceinline__ bool has_channel(int i) const
    {
        return i < g.coefficients && (by_sample || vectors.first_outer + i < g.outer);
    }
    __device__ __forceinline__ int channel_of(int i) const
    {
        return vectors.c + (by_sample ? 0 : vectors.first_outer + i);
    }
    __device__ __forceinline__ requested_gradient request_gradient(int i) const
    {
        const bool wanted = has_channel(i);
        const int n = vectors.n, c = channel_of(i);
        const int group = by_sample ? c : divide(c, g.by_outer);
        return {request_at_once(p.mean(), n * p.mean().batch + group * p.mean().channel, wanted),
                request_at_once(p.rstd(), n * p.rstd().batch + group * p.rstd().channel, wanted),
                request_weights(p, n, c, wanted)};
    }
    __device__ __forceinline__ void receive_gradients(requested_gradient first, R &rstd_of_set) const
    {
        const R factor = half();
        const int threads = (int)blockDim.x;
        for (int i = (int)threadIdx.x; has_channel(i); i += threads) {
            if (i >= threads)
                first = request_gradient(i);
            R slope, offset;
            weigh(p, first.weights, slope, offset);
            const R rstd = receive<R>(first.rstd, p.rstd().type);
            const double mean = receive<double>(first.mean, p.mean().type);
            coefficients[i] = gradient_of(less_bias(mean, vectors.n, channel_of(i)), slope * rstd, offset, factor);
            if (i == 0)
                rstd_of_set = rstd;
        }
    }

    /* Calls work(x, dy, index) for each slot of the thread, those in shared memory first, as long as any thread of the
     * warp has a vector there. Vectors `next` bytes further on, if not 0, are requested into the places of those that
     * were read. */
    template <typename Work> __device__ __forceinline__ void walk(pairs &held, Work work, int64_t next) const
    {
        this->walk_shared([&](int index) { return index - lane < vectors.end; }, [&](int k, int index) {
            work(this->place_of_slot(k, 0), this->place_of_slot(k, 1), index);
            if constexpr (split) {
                if (next != 0 && index < vectors.end) {
                    const tensor x = this->of(p.x()), dy = this->of(p.dy());
                    const int stretch = this->stretch_of(index);
                    copy_once(&this->place_of_slot(k, 0), x.at(g, index, stretch), next);
                    copy_once(&this->place_of_slot(k, 1), dy.at(g, index, stretch), next);
                }
            }
        });
        int index = vectors.index + shared * vectors.step;
        compiler_barrier(index);
#pragma unroll
        for (int k = 0; k < K; k++) {
            if (index - lane >= vectors.end)
                break;
            work(held[0][k], held[1][k], index);
            index += vectors.step;
        }
    }

    /* ---- sums ---- */
    /* Where dz is exact in the tensors' type it takes the place of dy, and results do not read post_add again. */
    __device__ __forceinline__ bool reads_post() const
    {
        return adds && p.post_add().data && p.activation != NORMFUSE_IDENTITY;
    }
    __device__ __forceinline__ bool keeps_dz() const
    {
        return reads_post() && normfuse_is_dz_exact(sizeof(T), p.activation);
    }
    __device__ __forceinline__ bool rereads_post() const
    {
        return reads_post() && !keeps_dz();
    }
    __device__ __forceinline__ tensor post_add() const
    {
        const normfuse_view view = adds && p.post_add().data ? p.post_add() : p.x();
        return this->of(view);
    }
    /* x becomes x - shift, dy what came through the activation; `post` is post_add, or y. */
    template <typename Chosen>
    __device__ __forceinline__ void differentiate(Chosen chosen, const tensor &post, const row_gradient<R> &coefficient,
                                                  int index, R (&x)[V], R (&dy)[V]) const
    {
        each<V>([&](int i) { x[i] -= coefficient.shift; });
        if (chosen.of(p.activation) != NORMFUSE_IDENTITY) {
            R z[V];
            each<V>([&](int i) { z[i] = fma(x[i], coefficient.slope, coefficient.offset); });
            if (adds && p.post_add().data) {
                const R factor = half();
                R residual[V];
                this->read_added(post, 0, index, residual);
                each<V>([&](int i) { z[i] = p.from_y() ? residual[i] : fma(residual[i], factor, z[i]); });
            }
            differentiate_by<fast, !all>(dy, z, chosen, p.activation, (R)p.act_param);
        }
    }
    /* The thread's weighted sums over its set; those of its segment's channels go to of_channels. */
    __device__ __forceinline__ totals<R> sum_channels(const tensor &post, pairs &held) const
    {
        const R factor = half();
        totals<R> met = {R(0), R(0)};
        /* A warp goes through its channels one after the other. They are counted from the first that the block touches; all of a channel's set are the same one. */
        int current = by_sample ? 0 : this->stretch_of(vectors.index - lane) - vectors.first_outer;
        totals<R> channel = {R(0), R(0)};
        totals<R> *entry = of_channels + segment * g.channels_a_segment;
        int keeps = keeps_dz(); /* asked once, not of the arguments for each vector; so is of_du below */
        make_opaque(keeps);
        const auto flush = [&] {
            const R slope = coefficients[current].slope;
            channel.centred -= coefficients[current].rest * channel.plain;
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
        choose_activation<all>(p.activation, [&](auto chosen) {
            const auto sum = [&](raw<T, V> &x_vector, raw<T, V> &dy_vector, int index) {
                const int stretch = this->stretch_of(index);
                R plain = R(0), about = R(0);
                int channel_here = current;
                if (index < vectors.end) {
                    channel_here = (stretch - vectors.first_outer) * channel_step();
                    R x[V], dy[V];
                    unpack<T, V>(x_vector, x);
                    unpack<T, V>(dy_vector, dy);
                    differentiate(chosen, post, coefficients[channel_here], index, x, dy);
                    if (adds && keeps)
                        dy_vector = make_vector<T, V>(dy);
                    if (!this->is_inside(index)) {
                        const row_elements<V, unaligned> elements = this->elements_of(index);
                        /* Not by a factor of 0: what others have there may be infinite. */
                        if (!elements.are_all())
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
                const auto add = [&] {
                    if (channel_here == current) {
                        channel.plain += plain;
                        channel.centred += about;
                    }
                };
                while (__any_sync(full_mask, channel_here > current)) {
                    add();
                    flush();
                    current++;
                }
                add();
            };
            walk(held, sum, 0);
        });
        if (vectors.index - lane < vectors.end)
            flush();
        return met;
    }
    /* The sums of the block's channels, of what its segments found, to memory. */
    __device__ __forceinline__ void store_channels() const
    {
        const int first = block.part * g.part_rows;
        const int rows = max(0, min(g.part_rows, g.rows - first));
        const int before = first - vectors.first_outer * g.spans;
        const int channels = rows == 0 ? 0 : by_sample ? 1 : this->stretch_of(before + rows + g.spans - 1);
        for (int i = (int)threadIdx.x; i < channels; i += (int)blockDim.x) {
            const int low = by_sample ? 0 : max(0, i * g.spans - before) / g.segment_rows;
            const int end = by_sample ? rows : min(rows, (i + 1) * g.spans - before);
            totals<R> sum = {R(0), R(0)};
            for (int q = low; q * g.segment_rows < end; q++) {
                const int j = by_sample ? 0 : i - this->stretch_of(q * g.segment_rows + before);
                sum.plain += of_channels[q * g.channels_a_segment + j].plain;
                sum.centred += of_channels[q * g.channels_a_segment + j].centred;
            }
            const int outer = vectors.first_outer + i;
            const int slot = by_sample ? block.part : block.part - outer * g.spans / g.part_rows;
            const int64_t channel = by_sample ? vectors.c : (int64_t)vectors.n * p.c + vectors.c + outer;
            double *const pair = a.sums + (channel * g.sum_slots + slot) * PAIR;
            pair[0] = (double)sum.plain;
            pair[1] = (double)sum.centred;
        }
    }
    /* The weighted sums of a set, of what its threads found; write_sums() while those of other blocks are on their
     * way. */
    template <typename Write>
    __device__ __forceinline__ totals<R> join_set(const totals<R> &met, cluster_mailbox &mailbox,
                                                  Write write_sums) const
    {
        __shared__ totals<R> of_warps[max_row_warps];
        __shared__ __align__(16) double of_parts[PAIR * NORMFUSE_CUDA_ROW_CLUSTER];
        totals<R> total = {sum_lanes(met.plain, lanes), sum_lanes(met.centred, lanes)};
        total = join_warps(of_warps, total, [](const totals<R> &of_lane) {
            return totals<R>{sum_lanes(of_lane.plain, lanes), sum_lanes(of_lane.centred, lanes)};
        });
        const double sums[PAIR] = {(double)total.plain, (double)total.centred};
        total = this->exchange_sums(mailbox, of_parts, sums, total, write_sums, [&](const double *pairs, bool near_by) {
            return add_parts<R>(pairs, PAIR, g.parts, near_by);
        });
        if (block.exchange == NORMFUSE_EXCHANGE_NONE)
            write_sums();
        return total;
    }

    /* ---- results ---- */
    __device__ __forceinline__ void store_gradients(const tensor &post, const row_level<R> &level, pairs &held,
                                                    int64_t next) const
    {
        const bool writes_dx = p.dx().data;
        const normfuse_view dx_view = p.dx().data ? p.dx() : p.x();
        const normfuse_view du_view = adds && p.du().data ? p.du() : p.x();
        const normfuse_view dpost_view = adds && p.dpost_add().data ? p.dpost_add() : p.x();
        const tensor dx = this->of(dx_view), du = this->of(du_view), dpost = this->of(dpost_view);
        int of_du = rereads_post(); /* of what passes */
        make_opaque(of_du);
        choose_activation<all>(keeps_dz() ? NORMFUSE_IDENTITY : p.activation, [&](auto chosen) {
            const auto store = [&](raw<T, V> &x_vector, raw<T, V> &dy_vector, int index) {
                if (index >= vectors.end)
                    return;
                const int stretch = this->stretch_of(index);
                const row_gradient<R> coefficient = coefficients[(stretch - vectors.first_outer) * channel_step()];
                R x[V], dy[V];
                unpack<T, V>(x_vector, x);
                unpack<T, V>(dy_vector, dy);
                differentiate(chosen, post, coefficient, index, x, dy);
                if (adds && p.dpost_add().data) {
                    R dz[V];
                    each<V>([&](int i) { dz[i] = dy[i] * half(); });
                    this->store(dpost.at(g, index, stretch), make_vector<T, V>(dz), index);
                }
                if (writes_dx) {
                    const R constant = takes_bias ? level.level - level.share * coefficient.rest : level.level;
                    each<V>([&](int i) {
                        x[i] = fma(coefficient.slope, dy[i], fma(level.share, x[i], constant));
                    });
                    if (adds && p.du().data) {
                        R more[V];
                        this->read_added(du, of_du, index, more);
                        each<V>([&](int i) { x[i] += more[i]; });
                    }
                    this->store(dx.at(g, index, stretch), make_vector<T, V>(x), index);
                }
            };
            walk(held, store, next);
        });
    }
};

template <typename T, int V, int K, normfuse_cuda_schedule schedule>
__device__ __forceinline__ void rows_backward(const normfuse_cuda_arguments &a)
{
    follow_kernel();
    using R = compute<T>;
    using kernel = backward_rows<T, V, K, schedule>;
    constexpr bool holds = kernel::split; /* vectors in registers, and parameters requested ahead of them */
    const normfuse_cuda_problem &p = a.problem;
    const normfuse_cuda_geometry &g = a.geometry;
    __shared__ cluster_mailbox mailbox;
    __shared__ R rstd_of_set;
    kernel of(a);
    row_block &block = of.block;
    const row_vectors &vectors = of.vectors;
    raw<T, V> held[2][kernel::registers];
    block.open(g, mailbox, PAIR);
    bool is_requested = false; /* for what goes to shared memory: while the results of the set before were written */
    do {
        of.find_vectors();

        /* ---- load ---- */
        const uint32_t grid_barrier = look_at_grid_barrier_where(
            block.exchange == NORMFUSE_EXCHANGE_GRID && threadIdx.x == 0, block.grid_barrier(a));
        requested_gradient first;
        if constexpr (holds)
            first = of.request_gradient((int)threadIdx.x);
        of.template load<holds>(is_requested, {of.of(p.x()), of.of(p.dy())}, held);
        bits<R> saved_rstd = 0;
        if (!holds && vectors.end > 0) {
            const int group = of.by_sample ? vectors.c : divide(vectors.c, g.by_outer);
            saved_rstd = request_bits<R>(p.rstd(), vectors.n * p.rstd().batch + group * p.rstd().channel);
        }
        if (block.exchange == NORMFUSE_EXCHANGE_GRID && threadIdx.x == 0)
            grid_barrier_before() = grid_barrier;
        const R portion = R(1) / (R)p.set_values;
        if constexpr (holds)
            of.receive_gradients(first, rstd_of_set);
        else
            of.prepare_gradients();
        of.pass(p.pre_add(), {});
        if (of.shared > 0)
            wait_for_copies();
        if (kernel::adds && p.pre_add().data) {
            of.add_residual([&](auto work) {
                const auto add = [&](raw<T, V> &x, raw<T, V> &, int index) {
                    if (index < vectors.end)
                        work(x, index);
                };
                of.walk(held, add, 0);
            });
        }
        if (of.reads_post())
            of.pass(p.post_add(), {});
        __syncthreads();
        const auto post = of.post_add();

        /* ---- sums ---- */
        const totals<R> met = of.sum_channels(post, held);
        const normfuse_view du = p.dx().data ? p.du() : normfuse_view();
        if (of.rereads_post())
            of.pass(p.post_add(), du);
        else
            of.pass(du, {});
        /* What the channels of the block summed, to memory: while the totals of other blocks are on their way. */
        const auto write_sums = [&] {
            if (a.sums)
                of.store_channels();
        };

        /* ---- the totals of the set ---- */
        const totals<R> total = of.join_set(met, mailbox, write_sums);
        row_level<R> level = {total.plain, total.centred};
        if (vectors.end > 0) {
            const R rstd = holds ? rstd_of_set : receive<R>(saved_rstd, p.rstd().type);
            level.share = -(level.share * rstd) * (rstd * portion);
            level.level = -level.level * portion - (kernel::takes_bias ? R(0) : level.share * of.coefficients->rest);
        }

        uint32_t counted = 0;
        if (g.contributors > 0) {
            __syncthreads();
            if (threadIdx.x == 0)
                counted = count_block(a, of.by_sample ? vectors.set : vectors.set - vectors.n * (int)p.groups);
        }

        /* ---- results ---- */
        each<K>([&](int k) {
            compiler_barrier(held[0][k]);
            compiler_barrier(held[1][k]);
        });
        /* The set after this one, whose vectors take the places of those that were read, is so many bytes further on.
         */
        int64_t next = 0;
        if constexpr (kernel::split) {
            int n, c;
            is_requested = block.find_next(a, n, c);
            if (is_requested)
                next = typename kernel::tensor(a, p.x(), n, c).data - of.of(p.x()).data;
        }
        of.store_gradients(post, level, held, next);

        /* ---- the parameters' gradients ---- */
        write_last_gradients(a, counted, vectors.c, of.by_sample ? 1 : g.outer);
    } while (block.advance(g));
}

NORMFUSE_KERNELS_ROWS_BACKWARD(NORMFUSE_INSTANCE)
