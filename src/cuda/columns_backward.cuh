/* SPDX-License-Identifier: MIT
 *
 * columns_backward.cuh - gradients where channels are adjacent (NHWC). rows_backward.cu has the formulas; here each
 * thread sums its own channels over its rows, so that the channels' sums need no search for who has which. */
#ifndef NORMFUSE_CUDA_COLUMNS_BACKWARD_CUH
#define NORMFUSE_CUDA_COLUMNS_BACKWARD_CUH

#include "columns.cuh"
#include "gradients.cuh"

/* Of a block's channels: how many there are, and what shared memory has of them, in this order behind the vectors:
 * statistics of groups; of each channel what channel_values says, `ready` with the rest of the mean as the fourth; two
 * sums of each thread's channels; weighted sums of channels; totals of groups; of each block of a cluster those of a
 * group. */
template <typename T, int V, bool holds, bool unaligned_samples> struct gradient_memory {
    const normfuse_cuda_arguments &a;
    const normfuse_cuda_problem &p;
    const normfuse_cuda_geometry &g;
    const block_turns &block;
    const column_place &place;
    const column_edges<T, V, unaligned_samples> &edges;
    const bool centred, ready; /* ready: coefficients are made once a channel, else by each thread */
    int n, step, at_once, group_bits, subvector_bits, channel_bits;
    int channels, first_channel, here, groups, groups_here, later;
    group_statistics<float> *of_groups;
    channel_values of_channels;
    float *of_plain, *of_centred;
    totals<float> *of_sums, *of_totals;
    float2 *of_parts;

    /* What follows from these is found now, not ahead of all loops and loads. */
    __device__ __forceinline__ gradient_memory(const normfuse_cuda_arguments &a, const block_turns &block,
                                               const column_place &place,
                                               const column_edges<T, V, unaligned_samples> &edges,
                                               uint4 *behind_vectors)
        : a(a), p(a.problem), g(a.geometry), block(block), place(place), edges(edges),
          centred(holds || p.sets != NORMFUSE_SETS_NONE), ready(!centred || g.group == 1 || p.pre_bias().data),
          n(place.n), step((int)blockDim.x), at_once(place.rows_at_once), group_bits(g.group_bits),
          subvector_bits(g.subvector_bits), channel_bits(g.channel_bits), later(edges.later())
    {
        int width = g.width;
        compiler_barrier(width);
        compiler_barrier(at_once);
        compiler_barrier(group_bits);
        compiler_barrier(subvector_bits);
        compiler_barrier(n);
        compiler_barrier(step);
        compiler_barrier(channel_bits);
        channels = width * V;
        first_channel = place.first_channel;
        here = min(channels, (int)p.c - first_channel);
        groups_here = divide(here, g.by_group);
        groups = divide(channels, g.by_group) + (later > 0 ? groups_here : 0);
        of_groups = reinterpret_cast<group_statistics<float> *>(behind_vectors);
        float *const values = reinterpret_cast<float *>(of_groups + groups);
        of_channels = {values, values + channels, values + 2 * channels, values + 3 * channels};
        of_plain = values + 4 * channels;
        of_centred = of_plain + at_once * channels;
        of_sums = reinterpret_cast<totals<float> *>(of_centred + at_once * channels);
        of_totals = of_sums + channels;
        of_parts = reinterpret_cast<float2 *>(of_totals + groups);
    }
    /* What the block has to know of its channels before their vectors are there. */
    __device__ __forceinline__ void know_channels() const
    {
        const int n = g.all_samples ? 0 : this->n;
        if (ready) {
#pragma unroll 1
            for (int i = (int)threadIdx.x; i < here; i += step) {
                const int c = first_channel + i;
                float rstd = 1.0f, rest;
                double mean = 0.0;
                if (a.source == NORMFUSE_SOURCE_SAVED) {
                    const int set = divide(c, g.by_set_channels);
                    rstd = parameter<float>(p.rstd(), n, set, 1.0f);
                    mean = parameter<double>(p.mean(), n, set, 0.0);
                } else if (a.source == NORMFUSE_SOURCE_RUNNING) {
                    mean = parameter<double>(p.running_mean(), 0, c, 0.0);
                    rstd = scaled_by_running(p, c, 1.0f);
                }
                const float scale = 1.0f + parameter<float>(p.scale(), n, c, 0.0f);
                const float slope_here = parameter<float>(p.weight(), n, c, 1.0f) * scale * rstd;
                const float offset_here =
                    parameter<float>(p.bias(), n, c, 0.0f) * scale + parameter<float>(p.shift(), n, c, 0.0f);
                float mean_here;
                split_mean<T>(mean - (double)parameter<float>(p.pre_bias(), n, c, 0.0f), mean_here, rest);
                in_all_rows(first_place(i, later, here), here, channels, [&](int at) {
                    of_channels.means[at] = mean_here;
                    of_channels.slopes[at] = slope_here;
                    of_channels.offsets[at] = offset_here - rest * slope_here;
                    of_channels.shifts[at] = rest;
                });
                if (centred)
                    of_groups[divide(i, g.by_group)].rstd = rstd;
            }
        } else {
            /* Of the groups, requested with the rest. */
            const auto request_group = [&](int i, bits<float> &rstd, bits<double> &mean) {
                const int set = divide(first_channel + i * g.group, g.by_set_channels);
                rstd = request_bits<float>(p.rstd(), n * p.rstd().batch + set * p.rstd().channel);
                mean = request_bits<double>(p.mean(), n * p.mean().batch + set * p.mean().channel);
            };
            const auto hold_group = [&](int i, bits<float> rstd, bits<double> mean) {
                group_statistics<float> found;
                found.rstd = receive<float>(rstd, p.rstd().type);
                split_mean<T>(receive<double>(mean, p.mean().type), found.mean, found.rest);
                in_all_rows(i, groups_here, groups, [&](int at) { of_groups[at] = found; });
            };
            bits<float> rstd = 0;
            bits<double> mean = 0;
            if ((int)threadIdx.x < groups_here)
                request_group((int)threadIdx.x, rstd, mean);
            stage(p, of_channels, n, first_channel, here, channels, later, step);
            if ((int)threadIdx.x < groups_here)
                hold_group((int)threadIdx.x, rstd, mean);
#pragma unroll 1
            for (int i = (int)threadIdx.x + step; i < groups_here; i += step) {
                request_group(i, rstd, mean);
                hold_group(i, rstd, mean);
            }
        }
    }
    /* What threads summed of channels, for the block: weighted into of_sums, and to memory. */
    __device__ __forceinline__ void join_channels(const float (&first)[V], const float (&second)[V]) const
    {
        if (place.active) {
            const int column = place.column * V - later, at = place.beside * channels + column;
            if (unaligned_samples && later > 0) {
                /* The columns ahead of the first channel follow the last one. */
                each<V>([&](int i) {
                    const int to = at + i + (column + i < 0 ? channels : 0);
                    of_plain[to] = first[i];
                    of_centred[to] = second[i];
                });
            } else {
                write_values<V>(of_plain + at, first);
                write_values<V>(of_centred + at, second);
            }
        }
        __syncthreads();
        const auto store = [&](int i, float sum, float product) {
            float weight, bias;
            const int of_channel = first_place(i, later, here);
            if (ready) {
                product -= of_channels.shifts[of_channel] * sum;
                weight = of_channels.slopes[of_channel];
            } else {
                const group_statistics<float> of_group = of_groups[divide(i, g.by_group)];
                product -= of_group.rest * sum;
                weigh(p, of_channels, of_channel, weight, bias);
                weight *= of_group.rstd;
            }
            if (holds)
                of_sums[i] = {weight * sum, weight * product};
            if (a.sums) {
                const int64_t channel = (int64_t)(g.sums_by_channel ? 0 : n) * p.c + first_channel + i;
                reinterpret_cast<double2 *>(a.sums)[channel * g.sum_slots + block.part] =
                    make_double2((double)sum, (double)product);
            }
        };
        /* Rows folded are beside one another, too. */
        const int row_channels = g.folded > 1 ? here : channels;
        sum_beside(of_plain, of_centred, here, row_channels, at_once * g.folded, channel_bits, store);
    }
    /* What dx takes of the groups, of the channels' weighted sums, or of totals that are known. */
    __device__ __forceinline__ void join_totals(cluster_mailbox &mailbox, uint32_t grid_barrier_before,
                                                uint32_t &counted) const
    {
        const float share = 1.0f / (float)p.set_values;
        const auto finish = [&](int group, float sum, float product) {
            const float rstd = of_groups[group].rstd;
            in_all_rows(group, groups_here, groups, [&](int at) {
                of_totals[at] = {-sum * share, -(product * rstd) * (rstd * share)};
            });
        };
        if constexpr (holds) {
            const bool far = block.exchange == NORMFUSE_EXCHANGE_GRID;
            float2 *const of_grid = block.parts_of<float2>(a, groups);
            __syncthreads();
            if (threadIdx.x == 0 && g.contributors > 0)
                counted = count_block(a, divide(first_channel, g.by_group));
            if (block.exchange == NORMFUSE_EXCHANGE_CLUSTER)
                await_open_mailboxes();
            share_items(groups_here, group_bits, [&](int group, bool exists, int lane, int lanes) {
                float sum = 0.0f, product = 0.0f;
#pragma unroll 4
                for (int i = lane; i < (exists ? g.group : 0); i += lanes) {
                    const totals<float> found = of_sums[group * g.group + i];
                    sum += found.plain;
                    product += found.centred;
                }
                sum = sum_few(sum, lanes);
                product = sum_few(product, lanes);
                if (!exists)
                    return;
                const float2 both = {sum, product};
                if (block.exchange == NORMFUSE_EXCHANGE_CLUSTER) {
                    for (int other = lane; other < g.parts; other += lanes)
                        send(mailbox, of_parts + group * g.parts + block.part, other, both);
                } else if (lane == 0) {
                    if (far)
                        of_grid[group * g.parts + block.part] = both;
                    else
                        finish(group, sum, product);
                }
            });
            if (block.exchange != NORMFUSE_EXCHANGE_NONE) {
                if (far) {
                    synchronize_block_group(block.grid_barrier(a), block.part, g.parts, grid_barrier_before);
                } else {
                    await_mailbox(mailbox);
                }
                share_items(groups_here, group_bits, [&](int group, bool exists, int lane, int lanes) {
                    const int begin = group * g.parts;
                    double sum = 0.0, product = 0.0;
                    if (far) {
#pragma unroll 8
                        for (int i = lane; i < g.parts; i += lanes) {
                            const float2 found = __ldcg(of_grid + begin + i);
                            sum += found.x;
                            product += found.y;
                        }
                    } else {
                        for (int i = lane; i < g.parts; i += lanes) {
                            sum += of_parts[begin + i].x;
                            product += of_parts[begin + i].y;
                        }
                    }
                    sum = sum_few(sum, lanes);
                    product = sum_few(product, lanes);
                    if (exists && lane == 0)
                        finish(group, (float)sum, (float)product);
                });
            }
        } else {
#pragma unroll 1
            for (int group = (int)threadIdx.x; group < groups_here; group += step) {
                const int c = first_channel + group * g.group;
                const int64_t set =
                    p.sets == NORMFUSE_SETS_BATCH ? c : (int64_t)n * p.groups + divide(c, g.by_set_channels);
                finish(group, (float)a.totals[set * PAIR], (float)a.totals[set * PAIR + 1]);
            }
        }
    }
    /* What dx takes of x - shift, and what else, of the thread's channels. */
    __device__ __forceinline__ void know_gradient(int column, float (&first)[V], float (&second)[V]) const
    {
        const int of_group_at = edges.of_group(column * V, here);
        totals<float> of_group;
        float rest = 0.0f;
#pragma unroll
        for (int i = 0; i < V; i++) {
            if ((i & ((1 << subvector_bits) - 1)) == 0) {
                const int group = divide(of_group_at + i, g.by_group);
                of_group = of_totals[group];
                rest = ready ? 0.0f : of_groups[group].rest;
            }
            if (ready)
                rest = of_channels.shifts[column * V + i];
            first[i] = of_group.centred;
            second[i] = of_group.plain - of_group.centred * rest;
        }
    }
};

/* Of part `h` of a vector, x and dy become x - shift and dy'. */
template <bool fast, bool unaligned_samples, int V, int H, typename Chosen>
__device__ __forceinline__ void differentiate_part(const normfuse_cuda_problem &p, Chosen chosen, int h,
                                                   const float (&shift)[V], const float (&slope)[V],
                                                   const float (&offset)[V], float (&x)[H], float (&dy)[H])
{
    each<H>([&](int i) { x[i] -= shift[h * H + i]; });
    if (chosen.of(p.activation) != NORMFUSE_IDENTITY && (!unaligned_samples || p.activation != NORMFUSE_IDENTITY)) {
        float z[H];
        each<H>([&](int i) { z[i] = fma(x[i], slope[h * H + i], offset[h * H + i]); });
        differentiate_by<fast>(dy, z, chosen, p.activation, (float)p.act_param);
    }
}

/* Sums without results, results from totals that are known, or results that need none. */
template <typename T, int V, int K, bool unaligned_samples, typename Edges, typename Copy, typename Differentiate,
          typename Sum, typename Gradient>
__device__ __forceinline__ void walk_passing_gradients(const normfuse_cuda_arguments &a, const column_place &place,
                                                       int row, const Edges &edges, bool sums, bool writes_dx,
                                                       Copy &copy, uint4 *of_edges, Differentiate differentiate,
                                                       Sum sum_up, Gradient gradient)
{
    constexpr int H = values_a_part;
    NORMFUSE_DYNAMIC_SHARED(dynamic);
    const int threads = (int)blockDim.x;
    const normfuse_cuda_problem &p = a.problem;
    column_cursor<T, V> dx(p.dx().data, p.x(), place, row, edges.lead());
    char *const first_dx = dx.base + dx.at;
    if constexpr (unaligned_samples)
        dx.at += edges.skipped() - (unsigned)edges.edges() * place.step;
    struct row_values {
        float x[V / H][H], dy[V / H][H];
    };
    choose_activation<!unaligned_samples, true, true>(p.activation, [&](auto chosen) {
        walk_pipeline<K>(
            edges.count, copy,
            [&](int slot) {
                const uint4 *const from = dynamic + 2 * slot * threads + (int)threadIdx.x;
                const uint4 x = from[0], dy = from[threads];
                row_values values;
                each<V / H>([&](int h) {
                    unpack_part<T, V>(x, h, values.x[h]);
                    unpack_part<T, V>(dy, h, values.dy[h]);
                });
                return values;
            },
            [&](row_values &values, int left) {
                raw<T, V> dx_out = zero_vector<T, V>();
                each<V / H>([&](int h) {
                    differentiate(chosen, h, values.x[h], values.dy[h]);
                    if (sums)
                        sum_up(h, values.x[h], values.dy[h]);
                    if (writes_dx) {
                        gradient(h, values.x[h], values.dy[h]);
                        pack_part<T, V>(dx_out, h, values.x[h]);
                    }
                });
                if (writes_dx) {
                    if (unaligned_samples && left > edges.whole)
                        of_edges[edges.result(edges.count - left)] = dx_out;
                    else
                        dx.store(dx_out);
                    dx.advance(place);
                }
            });
    });
    if (unaligned_samples && writes_dx)
        store_edges<T>(edges, first_dx, of_edges);
}

/* Opens the thread's pipeline where its first and last vector have elements of others. */
template <typename T, int V, int K, typename Edges, typename Copy>
__device__ __forceinline__ void load_edges(column_cursor<T, V> &x_at, column_cursor<T, V> &dy_at, const Edges &edges,
                                           Copy &copy)
{
    NORMFUSE_DYNAMIC_SHARED(dynamic);
    const int threads = (int)blockDim.x;
    char *const first_x = x_at.base + x_at.at, *const first_dy = dy_at.base + dy_at.at;
    x_at.at += edges.skipped();
    dy_at.at += edges.skipped();
    open_pipeline<K>(edges, copy);
#pragma unroll 1
    for (int k = 0; k < edges.edges(); k++) {
        uint4 *const to = dynamic + 2 * k * threads + (int)threadIdx.x;
        const int begin = edges.begin(k), finish = edges.finish(k);
        to[0] = load_range<T>(first_x + edges.at(k), begin, finish, make_uint4(0, 0, 0, 0));
        to[threads] = load_range<T>(first_dy + edges.at(k), begin, finish, make_uint4(0, 0, 0, 0));
    }
}

/* dx of the vectors that the thread holds; each slot is then done(slot) with. */
template <typename T, int V, int K, typename Read, typename Differentiate, typename Gradient, typename Done>
__device__ __forceinline__ void store_held_gradients(const normfuse_cuda_arguments &a, const column_place &place,
                                                     int row, int count, int shared, Read read,
                                                     Differentiate differentiate, Gradient gradient, Done done)
{
    constexpr int H = values_a_part;
    const normfuse_cuda_problem &p = a.problem;
    column_cursor<T, V> dx(p.dx().data, p.x(), place, row);
    choose_activation<true, false>(p.activation, [&](auto chosen) {
        walk<K>(count, shared, [&](int slot) {
            raw<T, V> dx_out = zero_vector<T, V>();
#pragma unroll
            for (int h = 0; h < V / H; h++) {
                float x[H], dy[H];
                read(slot, h, x, dy);
                differentiate(chosen, h, x, dy);
                gradient(h, x, dy);
                pack_part<T, V>(dx_out, h, x);
            }
            if (p.dx().data) {
                dx.store(dx_out);
                dx.advance(place);
            }
            done(slot);
        });
    });
}

template <typename T, int V, int K, normfuse_cuda_schedule schedule>
__device__ __forceinline__ void columns_backward(const normfuse_cuda_arguments &a)
{
    follow_kernel();
    constexpr bool holds = schedule == NORMFUSE_SCHEDULE_split,
                   unaligned_samples = schedule == NORMFUSE_SCHEDULE_unaligned;
    using cursor = column_cursor<T, V>;
    constexpr int H = values_a_part;
    using values_of_part = float[H];
    const normfuse_cuda_problem &p = a.problem;
    const normfuse_cuda_geometry &g = a.geometry;
    NORMFUSE_DYNAMIC_SHARED(dynamic);
    __shared__ cluster_mailbox mailbox;
    __shared__ uint4 of_edges[2]; /* results of the first and the last vector of a sample */
    const int threads = (int)blockDim.x;
    const bool sums = holds || (a.phases & NORMFUSE_PHASE_BACKWARD_SUMS) != 0;
    const bool applies = holds || (a.phases & NORMFUSE_PHASE_BACKWARD_APPLY) != 0;
    const bool half = takes_half<sizeof(T) == 2, true>(p.activation);
    block_turns block(a, false, holds, !holds && g.backwards);
    struct both {
        raw<T, V> x, dy;
    } held[holds ? K : 1];
    const auto place_of_slot = [&](int slot, int tensor) -> uint4 & {
        return dynamic[(2 * (-1 - slot) + tensor) * threads + (int)threadIdx.x];
    };
    const auto read = [&](int slot, int h, values_of_part &x, values_of_part &dy) {
        unpack_part<T, V>(slot < 0 ? place_of_slot(slot, 0) : held[slot < 0 ? 0 : slot].x, h, x);
        unpack_part<T, V>(slot < 0 ? place_of_slot(slot, 1) : held[slot < 0 ? 0 : slot].dy, h, dy);
    };
    bool is_loaded = false; /* the tile of this round, while the results of the last one were written */
    do {
        const column_place place = place_of<T, V>(a, block.set, block.part);
        const int shared = holds ? g.held_shared : 0;
        uint32_t grid_barrier_before = 0, counted = 0;
        float slope[V], offset[V], shift[V];
        /* Sums of dy' and dy' (x - shift); then what the gradient takes of x - shift, and what else it takes. */
        float first[V] = {}, second[V] = {};
        const int row = place.first + place.beside;
        const column_edges<T, V, unaligned_samples> edges(a, place, row, holds ? K + shared : 1 << 30);
        const int count = edges.count;
        /* ---- load ---- */
        cursor x_at(p.x().data, p.x(), place, row, edges.lead()), dy_at(p.dy().data, p.x(), place, row, edges.lead());
        const auto load = [&](cursor &x, cursor &dy, int slot) {
            if (slot < 0) {
                copy_once(&place_of_slot(slot, 0), x.base + x.at, 0);
                copy_once(&place_of_slot(slot, 1), dy.base + dy.at, 0);
            } else {
                held[slot < 0 ? 0 : slot].x = x.load();
                held[slot < 0 ? 0 : slot].dy = dy.load();
            }
            x.advance(place);
            dy.advance(place);
        };
        const auto copy = [&](int slot) {
            uint4 *const to = dynamic + 2 * slot * threads + (int)threadIdx.x;
            copy_ahead(to, x_at.base + x_at.at, 0);
            copy_ahead(to + threads, dy_at.base + dy_at.at, 0);
            x_at.advance(place);
            dy_at.advance(place);
        };
        if constexpr (unaligned_samples)
            load_edges<T, V, K>(x_at, dy_at, edges, copy);
        else if constexpr (!holds)
            open_pipeline<K>(edges, copy);
        else if (!is_loaded)
            walk<K>(count, shared, [&](int slot) { load(x_at, dy_at, slot); });
        const gradient_memory<T, V, holds, unaligned_samples> of(a, block, place, edges,
                                                                 dynamic + 2 * (holds ? shared : K) * threads);
        if (block.exchange == NORMFUSE_EXCHANGE_CLUSTER)
            open_only_mailbox(mailbox, of.groups_here * g.parts * (int)sizeof(float2));
        if (block.exchange == NORMFUSE_EXCHANGE_GRID && threadIdx.x == 0)
            grid_barrier_before = look_at_grid_barrier(block.grid_barrier(a));
        of.know_channels();
        if (shared > 0)
            wait_for_copies();
        __syncthreads();
        const int column = place.active ? place.column : 0;
        coefficients_of<V>(a, of.of_channels, of.of_groups, column, edges.of_group(column * V, of.here), of.ready,
                           slope, offset, shift);
        if (half)
            halve(slope, offset);
        const auto differentiate = [&](auto chosen, int h, values_of_part &x, values_of_part &dy) {
            differentiate_part<sizeof(T) == 2, unaligned_samples>(p, chosen, h, shift, slope, offset, x, dy);
        };
        /* dx in place of x - shift */
        const auto gradient = [&](int h, values_of_part &x, const values_of_part &dy) {
            each<H>([&](int i) {
                x[i] = of.centred ? fma(slope[h * H + i], dy[i], fma(first[h * H + i], x[i], second[h * H + i]))
                               : slope[h * H + i] * dy[i];
            });
        };
        const auto sum_up = [&](int h, const values_of_part &x, const values_of_part &dy) {
            each<H>([&](int i) {
                first[h * H + i] += dy[i];
                second[h * H + i] += dy[i] * x[i];
            });
        };

        /* ---- sums ---- */
        if constexpr (holds)
            choose_activation<true, false>(p.activation, [&](auto chosen) {
                walk<K>(count, shared, [&](int slot) {
                    each<V / H>([&](int h) {
                        float x[H], dy[H];
                        read(slot, h, x, dy);
                        differentiate(chosen, h, x, dy);
                        sum_up(h, x, dy);
                    });
                });
            });
        const auto join_threads = [&] {
            if (half)
                halve(first, second);
            of.join_channels(first, second);
        };
        if constexpr (holds)
            join_threads();
        /* ---- the totals of the groups ---- */
        if (applies && of.centred) {
            of.join_totals(mailbox, grid_barrier_before, counted);
            __syncthreads();
            of.know_gradient(column, first, second);
        }

        /* ---- results ---- */
        each<(holds ? K : 0)>([&](int k) {
            compiler_barrier(held[k].x);
            compiler_barrier(held[k].dy);
        });
        if constexpr (!holds) {
            walk_passing_gradients<T, V, K, unaligned_samples>(a, place, row, edges, sums, applies && p.dx().data, copy,
                                                               of_edges, differentiate, sum_up, gradient);
            if (sums)
                join_threads();
        } else if (p.dx().data) {
            /* The same rows of the block group that this block has next are requested as places become free. */
            is_loaded = block.has_next(g) && g.row_channels == g.blocks_wide * g.width * V;
            const column_place next = place_of<T, V>(a, block.set + (is_loaded ? g.block_groups : 0), block.part);
            cursor next_x(p.x().data, p.x(), next, row), next_dy(p.dy().data, p.x(), next, row);
            store_held_gradients<T, V, K>(a, place, row, count, shared, read, differentiate, gradient, [&](int slot) {
                if (is_loaded)
                    load(next_x, next_dy, slot);
            });
        }
        /* ---- the parameters' gradients ---- */
        if (holds)
            write_last_gradients(a, counted, place.first_channel, min(g.width * V, (int)p.c - place.first_channel));
    } while (block.advance(g));
}

#endif
