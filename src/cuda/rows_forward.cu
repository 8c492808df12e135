/* SPDX-License-Identifier: MIT
 *
 * rows_forward.cu - statistics and results where positions are adjacent (NCHW). A block reads its part of a set once,
 * sums while the data arrive, learns the sums of the other blocks of the set, and writes from what it holds. Vectors
 * are dealt to threads in turn, whatever channel they are of: dealing whole rows of one channel to warps, as the
 * backward must, took twice the instructions. */
#include "rows.cuh"

/* z = (x - shift) * slope + offset; `added` is pre_bias, which with statistics to come is not yet in the shift. */
template <typename R> struct row_coefficient {
    R shift, slope, offset, added;
};

/* What values of a set are centred by: shift + remainder is the mean. */
template <typename R> struct row_centre {
    R shift, remainder, rstd;

    __device__ __forceinline__ void find(double mean, R of_rstd)
    {
        rstd = of_rstd;
        shift = (R)mean;
        remainder = (R)(mean - (double)shift);
    }
};

template <typename T, int V, int K, normfuse_cuda_schedule schedule>
struct forward_rows : row_kernel<T, V, K, 1, schedule> {
    using kernel = row_kernel<T, V, K, 1, schedule>;
    using kernel::a, kernel::p, kernel::g, kernel::by_sample, kernel::shared, kernel::block, kernel::vectors;
    using kernel::adds, kernel::unaligned, kernel::split, kernel::fast;
    using R = compute<T>;
    /* The others have no registers for it: 3 to 8 % of the time of calls without one. */
    static constexpr bool takes_bias = split;

    row_coefficient<R> *coefficients;

    __device__ __forceinline__ explicit forward_rows(const normfuse_cuda_arguments &a) : kernel(a)
    {
        coefficients = reinterpret_cast<row_coefficient<R> *>(this->behind_slots());
    }

    __device__ __forceinline__ bool is_biased() const
    {
        return takes_bias && p.pre_bias().data != nullptr;
    }
    __device__ __forceinline__ R half() const
    {
        return takes_half<fast>(p.activation) ? R(0.5) : R(1);
    }
    /* Coefficients of the channels that the block touches, halved where the activation takes half. With statistics to
     * come they are weight and bias with the sample's scale and shift. */
    __device__ __forceinline__ void prepare_coefficients(int first) const
    {
        const R factor = half();
        this->share_channels(first, [&](int i, int n, int c) {
            /* One after the other: requested all at once, they were ahead of the vectors (128x256x28x28: 61 us for
             * 56). */
            const R scale = R(1) + parameter<R>(p.scale(), n, c, R(0));
            R slope = parameter<R>(p.weight(), n, c, R(1)) * scale;
            R offset = parameter<R>(p.bias(), n, c, R(0)) * scale + parameter<R>(p.shift(), n, c, R(0));
            const R added = is_biased() ? parameter<R>(p.pre_bias(), n, c, R(0)) : R(0);
            coefficients[i] = {R(0), slope * factor, offset * factor, added};
        });
    }
    /* The same with the statistics of the set and pre_bias, which is a part of a channel's mean. */
    __device__ __forceinline__ void finish_coefficients(const row_centre<R> &centre) const
    {
        this->share_channels((int)threadIdx.x, [&](int i, int, int) {
            row_coefficient<R> &of = coefficients[i];
            R left;
            of.shift = add_exactly(centre.shift, -of.added, left);
            of.slope *= centre.rstd;
            of.offset -= (centre.remainder + left) * of.slope;
        });
    }
    __device__ __forceinline__ int channel_step() const
    {
        return by_sample ? 0 : 1;
    }
    /* Where those of a stretch are, less its number: channels of the set are beside one another, from the first that the
     * block touches. */
    __device__ __forceinline__ int first_coefficient() const
    {
        return -vectors.first_outer * channel_step();
    }
    __device__ __forceinline__ R bias_of(int index) const
    {
        return coefficients[first_coefficient() + this->stretch_of(index) * channel_step()].added;
    }
    /* What is known of a set, to memory. Running statistics are read first: where blocks share a set all wait for the
     * one that does this, so after the results; a block that has its set alone would end later. */
    __device__ __forceinline__ void store_set(const set_statistics<R> &found) const
    {
        if (block.part == 0 && threadIdx.x == 0) {
            const int n = by_sample ? 0 : vectors.n;
            const int channel = by_sample ? vectors.set : vectors.set - n * (int)p.groups;
            const double variance = store_statistics(a, n, channel, vectors.set, found.mean, found.variance, found.rstd,
                                                     (double)p.set_values);
            if (p.has_running_momentum() && by_sample)
                update_running<R>(p, vectors.c, found.mean, variance);
        }
    }
    /* The first value of the tile, the same in all threads: one of the set's own, so not far from its mean. */
    __device__ __forceinline__ R first_value() const
    {
        const int first = block.part * g.part_rows;
        if (first >= vectors.end)
            return R(0);
        const int stretch = this->stretch_of(first);
        /* An unaligned vector of a stretch need not have elements of it; the stretch has a first. */
        const auto number = [&](const typename kernel::tensor &of) {
            return number_at(unaligned ? of.data + of.start(stretch) : of.at(g, first, stretch), 0);
        };
        R value = number(this->of(p.x()));
        if (adds && p.pre_add().data)
            value += number(this->of(p.pre_add()));
        return value;
    }
    /* The same with pre_bias, rounded. */
    __device__ __forceinline__ R with_bias(R first_value) const
    {
        const int first = block.part * g.part_rows;
        return first < vectors.end ? first_value + bias_of(first) : first_value;
    }
    __device__ __forceinline__ static R number_at(const char *vector, int element)
    {
        R value[1];
        unpack<T, 1>(load_vector<T, 1>(vector, element), value);
        return value[0];
    }

    /* ---- sums ---- */
    /* The moments of the vectors that walk(work) calls work(vector, index) for; the `first` of them is at `index`. */
    template <typename Walk>
    __device__ __forceinline__ void add_moments(R common, const raw<T, V> &first, int index, Walk walk_some,
                                                moments<R> &met) const
    {
        if (index >= vectors.end)
            return;
        /* Squares about one of the thread's own values cannot cancel by more than their number. */
        R sum[2] = {R(0), R(0)}, square[2] = {R(0), R(0)};
        int count = 0;
        R value[V];
        unpack<T, V>(first, value);
        R shift = value[unaligned ? V - 1 : 0];
        if constexpr (unaligned) {
            /* Of the first vector that has one; only then from memory, so that none waits for it. */
            row_elements<V, unaligned> own = this->elements_of(index);
#pragma unroll
            for (int i = V - 2; i >= 0; i--)
                shift = own.has(i) ? value[i] : shift;
            if (own.count() == 0) {
                for (index += vectors.step; index < vectors.end; index += vectors.step) {
                    own = this->elements_of(index);
                    if (own.count() > 0) {
                        const auto number = [&](const normfuse_view &view) {
                            return number_at(this->of(view).at(g, index, this->stretch_of(index)), own.begin());
                        };
                        shift = number(p.x());
                        if (adds && p.pre_add().data)
                            shift += number(p.pre_add());
                        break;
                    }
                }
            }
        }
        const bool biased = is_biased();
        if (biased && index < vectors.end)
            shift += bias_of(index);
        const auto add = [&](raw<T, V> &vector, int index) {
            R value[V];
            unpack<T, V>(vector, value);
            const row_elements<V, unaligned> own = this->elements_of(index);
            if (!own.are_all())
                each<V>([&](int i) { value[i] = own.has(i) ? value[i] : shift; });
            each<V>([&](int i) {
                const R distance = value[i] - shift;
                sum[i % 2] += distance;
                square[i % 2] += distance * distance;
            });
            count += own.count();
        };
        /* x + pre_bias is as far from the shift as x is from about + rest, exactly. */
        const auto add_biased = [&](raw<T, V> &vector, int index) {
            R value[V], rest, total = R(0), squares = R(0);
            unpack<T, V>(vector, value);
            const row_elements<V, unaligned> own = this->elements_of(index);
            const R about = add_exactly(shift, -bias_of(index), rest);
            each<V>([&](int i) {
                const R distance = own.has(i) ? value[i] - about : R(0);
                total += distance;
                squares += distance * distance;
            });
            const R moved = (R)own.count() * rest;
            sum[0] += total - moved;
            square[0] += squares - rest * (R(2) * total - moved);
            count += own.count();
        };
        if (biased)
            walk_some(add_biased);
        else
            walk_some(add);
        if (count > 0) {
            const R total = sum[0] + sum[1], number = (R)count, mean = total / number;
            append(met, {number, (shift - common) + mean, (square[0] + square[1]) - total * mean});
        }
    }
    /* What the threads of a block found. */
    __device__ __forceinline__ static moments<R> join_block(const moments<R> &met)
    {
        __shared__ moments<R> of_warps[max_row_warps];
        return join_warps(of_warps, join_lanes(met, 32), [](const moments<R> &of) { return join_lanes(of, 32); });
    }
    /* The statistics of a set, of what its threads found about `common`. meanwhile() is done while the moments of other
     * blocks are on their way. */
    template <typename Meanwhile>
    __device__ __forceinline__ set_statistics<R> join_set(const moments<R> &met, R common, cluster_mailbox &mailbox,
                                                          Meanwhile meanwhile) const
    {
        __shared__ double of_parts[TRIPLE * NORMFUSE_CUDA_ROW_CLUSTER];
        shifted_moments<R> found = {{}, (double)common};
        found.of = join_block(met);
        const double own[TRIPLE] = {(double)found.of.count, found.shift + (double)found.of.mean,
                                    (double)found.of.squares};
        found = this->exchange_sums(mailbox, of_parts, own, found, meanwhile, [&](const double *triples, bool near_by) {
            /* What was done meanwhile. */
            if (near_by && split)
                __syncthreads();
            return near_by ? join_near<R>(triples, TRIPLE, g.parts) : join_parts<R>(triples, TRIPLE, g.parts);
        });
        return statistics_of(found.of, found.shift, p.eps);
    }

    /* ---- results ---- */
    /* Of the vectors that walk(work) calls work(vector, index) for. `by_channel`: each channel has a shift of its own. */
    template <typename Walk>
    __device__ __forceinline__ void store_results(const row_centre<R> &centre, bool by_channel, Walk walk) const
    {
        const int before = first_coefficient(), step = channel_step();
        const auto y = this->of(p.y());
        /* z of a vector, and where it goes */
        const auto normalize = [&](raw<T, V> &vector, int index, R(&z)[V]) {
            const int stretch = this->stretch_of(index);
            const row_coefficient<R> coefficient = coefficients[before + stretch * step];
            const R slope = coefficient.slope * centre.rstd, about = by_channel ? coefficient.shift : centre.shift;
            const R offset = coefficient.offset - centre.remainder * slope;
            unpack<T, V>(vector, z);
            each<V>([&](int i) { z[i] = fma(z[i] - about, slope, offset); });
            return y.at(g, index, stretch);
        };
        const bool has_residual = adds && p.post_add().data, writes_u = adds && p.u().data;
        const auto other = this->of(has_residual ? p.post_add() : p.y()), u = this->of(writes_u ? p.u() : p.y());
        const R factor = half();
        choose_activation<true>(p.activation, [&](auto chosen) {
            const auto store = [&](raw<T, V> &vector, int index) {
                R z[V];
                char *const to = normalize(vector, index, z);
                if (has_residual) {
                    R residual[V];
                    this->read_added(other, 0, index, residual);
                    each<V>([&](int i) { z[i] = fma(residual[i], factor, z[i]); });
                }
                if (writes_u)
                    this->store(u.at(g, index, this->stretch_of(index)), vector, index);
                activate<fast, false>(z, chosen, p.activation, (R)p.act_param);
                this->store(to, make_vector<T, V>(z), index);
            };
            walk(store);
        });
    }

    /* ---- walks: work(vector, index) for each that the thread has ---- */
    /* In shared memory. Those of the set that begins at next_set, if any, are requested into their places. */
    template <typename Work>
    __device__ __forceinline__ void walk_slots(const char *next_set, Work work) const
    {
        this->walk_shared([&](int index) { return index < vectors.end; }, [&](int k, int index) {
            raw<T, V> &slot = this->place_of_slot(k, 0), vector = slot;
            work(adds ? slot : vector, index);
            if constexpr (split) {
                auto x = this->of(p.x());
                x.data = const_cast<char *>(next_set);
                if (next_set)
                    copy_once(&slot, x.at(g, index, this->stretch_of(index)), 0);
            }
        });
    }
    /* In registers. */
    template <int count, typename Work>
    __device__ __forceinline__ void walk_held(raw<T, V> (&held)[1][kernel::registers], Work work) const
    {
        int index = vectors.index + shared * vectors.step;
        compiler_barrier(index);
#pragma unroll
        for (int k = 0; k < count; k++) {
            if (index >= vectors.end)
                break;
            work(held[0][k], index);
            index += vectors.step;
        }
    }
};

template <typename T, int V, int K, normfuse_cuda_schedule schedule>
__device__ __forceinline__ void rows_forward(const normfuse_cuda_arguments &a)
{
    follow_kernel();
    using R = compute<T>;
    using kernel = forward_rows<T, V, K, schedule>;
    constexpr bool split = kernel::split;
    const normfuse_cuda_problem &p = a.problem;
    const normfuse_cuda_geometry &g = a.geometry;
    __shared__ cluster_mailbox mailbox;
    __shared__ set_statistics<R> of_set;
    kernel of(a);
    row_block &block = of.block;
    const row_vectors &vectors = of.vectors;
    raw<T, V> held[1][kernel::registers];
    block.open(g, mailbox, TRIPLE);
    bool is_requested = false; /* for what goes to shared memory: while the results of the set before were written */
    do {
        moments<R> met = {R(0), R(0), R(0)};
        of.find_vectors();
        /* ---- load ---- */
        of.template load<false>(is_requested, {of.of(p.x())}, held);
        if (block.exchange == NORMFUSE_EXCHANGE_GRID && threadIdx.x == 0)
            grid_barrier_before() = look_at_grid_barrier(block.grid_barrier(a));
        R common = of.first_value(); /* the shift of the whole block */
        /* Parameters come behind all vectors. Where the block asks others for their sums, it requests these then. */
        const bool biased = of.is_biased(), later = split && block.exchange != NORMFUSE_EXCHANGE_NONE && !biased;
        const auto prepare_later = [&] {
            if (split && later)
                of.prepare_coefficients(((int)threadIdx.x >= 32 ? 0 : (int)blockDim.x) + (int)threadIdx.x - 32);
        };
        if (biased)
            __syncthreads(); /* those of the set before are read no more */
        if (!later)
            of.prepare_coefficients((int)threadIdx.x);
        if (biased) {
            __syncthreads();
            common = of.with_bias(common);
        }
        of.pass(p.pre_add(), {});
        if (of.shared > 0)
            wait_for_copies();
        const auto walk_shared = [&](auto work, const char *next_set = nullptr) {
            of.walk_slots(next_set, work);
        };
        const auto walk_registers = [&](auto work) { of.template walk_held<K>(held, work); };
        /* u is perhaps in place of x or of its residual: it is written with the results, when all have read the value
         * that they share. */
        if (kernel::adds && p.pre_add().data)
            of.add_residual([&](auto work) { walk_shared(work); });

        /* ---- sums ---- */
        /* Those in shared memory and those in registers each about a value of their own. */
        if (of.shared > 0)
            of.add_moments(common, of.place_of_slot(0, 0), vectors.index, walk_shared, met);
        of.add_moments(common, held[0][0], vectors.index + of.shared * vectors.step, walk_registers, met);
        of.pass(p.post_add(), {});

        /* ---- the statistics of the set ---- */
        row_centre<R> centre;
        const set_statistics<R> found = of.join_set(met, common, mailbox, prepare_later);
        if (!split)
            of.store_set(found);
        else if (threadIdx.x == 0)
            of_set = found;
        centre.find(found.mean, found.rstd);
        if (biased) {
            of.finish_coefficients(centre);
            __syncthreads();
            centre = {R(0), R(0), R(1)};
        }

        /* ---- results ---- */
        if (p.y().data) {
            each<K>([&](int k) { compiler_barrier(held[0][k]); });
            /* The set after this one, whose vectors take the places of those that were read. */
            const char *next = nullptr;
            if constexpr (split) {
                int n, c;
                is_requested = block.find_next(a, n, c);
                if (is_requested)
                    next = typename kernel::tensor(a, p.x(), n, c).data;
            }
            of.store_results(centre, biased, [&](auto store) {
                walk_shared(store, next);
                walk_registers(store);
            });
        }
        if (split)
            of.store_set(of_set);
    } while (block.advance(g));
}

NORMFUSE_KERNELS_ROWS_FORWARD(NORMFUSE_INSTANCE)
