/* SPDX-License-Identifier: MIT
 *
 * columns_backward.cuh - gradients where channels are adjacent (NHWC). rows_backward.cu has the formulas; here each
 * thread sums its own channels over its rows, so that the channels' sums need no search for who has which. */
#ifndef NORMFUSE_CUDA_COLUMNS_BACKWARD_CUH
#define NORMFUSE_CUDA_COLUMNS_BACKWARD_CUH

#include "columns.cuh"
#include "gradients.cuh"

template <typename T, int V, int K, normfuse_cuda_schedule schedule>
__device__ __forceinline__ void columns_backward(const normfuse_cuda_arguments &a)
{
    follow_kernel();
    using R = compute<T>;
    constexpr bool plain = schedule != NORMFUSE_SCHEDULE_general, keeps = schedule == NORMFUSE_SCHEDULE_split;
    constexpr bool shares = !plain || keeps, uneven = schedule == NORMFUSE_SCHEDULE_unaligned;
    constexpr bool streams = schedule == NORMFUSE_SCHEDULE_two_pass || uneven, loops = plain && !uneven;
    using cursor = column_cursor<T, V, plain>;
    constexpr bool fast = sizeof(T) == 2, all = !plain || streams;
    constexpr int H = part_of<V>::values;
    using values_of_part = R[H];
    const normfuse_problem &p = a.problem;
    const normfuse_cuda_geometry &g = a.geometry;
    extern __shared__ uint4 dynamic[];
    __shared__ mailbox mail;
    __shared__ uint4 of_edges[2]; /* results of the first and the last pack of a sample */
    const int threads = (int)blockDim.x;
    const bool sums = keeps || (a.phases & NORMFUSE_PHASE_BACKWARD_SUMS) != 0;
    const bool applies = keeps || (a.phases & NORMFUSE_PHASE_BACKWARD_APPLY) != 0;
    const bool centred = keeps || p.sets != NORMFUSE_SETS_NONE, by_channel = p.sets == NORMFUSE_SETS_BATCH;
    const bool ready = !centred || g.group == 1; /* coefficients are made once a channel, else by each thread */
    const bool backwards = !keeps && g.backwards, half = takes_half<fast, plain>(p.activation);
    const int exchange = shares ? g.exchange : NORMFUSE_EXCHANGE_NONE, passes = keeps || streams ? 1 : g.passes;
    const int block = (int)(backwards ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
    const int first_team = divide(block, g.by_parts), part = block - first_team * g.parts;

    struct both {
        raw<T, V> x, dy;
    } kept[streams ? 1 : K];
    const auto place_of_slot = [&](int slot, int tensor) -> uint4 & {
        return dynamic[(2 * (-1 - slot) + tensor) * threads + (int)threadIdx.x];
    };
    const auto read = [&](int slot, int h, values_of_part &x, values_of_part &dy) {
        if constexpr (V > 1) {
            unpack_part<T, V>(slot < 0 ? place_of_slot(slot, 0) : kept[slot < 0 ? 0 : slot].x, h, x);
            unpack_part<T, V>(slot < 0 ? place_of_slot(slot, 1) : kept[slot < 0 ? 0 : slot].dy, h, dy);
        } else {
            unpack_part<T, V>(kept[slot].x, h, x);
            unpack_part<T, V>(kept[slot].dy, h, dy);
        }
    };

    int parity = 0;
    bool is_loaded = false; /* the tile of this round, while the results of the last one were written */
    for (int team = first_team;;) {
        const column_place place = place_of<T, V>(a, team, part);
        const int shared = V > 1 && !streams ? g.kept_shared : 0;
        const int tile_rows = (K + shared) * place.rows_at_once;
        uint32_t ticket_before = 0, counted = 0;
        R slope[V], offset[V], shift[V];
        /* Sums of dy' and dy' (x - shift); then what the gradient takes of x - shift, and what else it takes. */
        R first[V] = {}, second[V] = {};

        for (int pass = 0; pass < passes; pass++) {
            const int row = place.first + (backwards ? passes - 1 - pass : pass) * tile_rows + place.beside;
            const column_edges<T, V, uneven> edges(a, place, row, streams ? 1 << 30 : K + shared);
            const int count = edges.count;

            /* ---- load ---- */
            cursor x_at(p.x, p.x, place, row, edges.lead()), dy_at(p.dy, p.x, place, row, edges.lead());
            const auto load = [&](cursor &x, cursor &dy, int slot) {
                if constexpr (V > 1) {
                    if (slot < 0) {
                        copy_once(&place_of_slot(slot, 0), x.base + x.at, 0);
                        copy_once(&place_of_slot(slot, 1), dy.base + dy.at, 0);
                    } else {
                        kept[slot < 0 ? 0 : slot].x = x.load();
                        kept[slot < 0 ? 0 : slot].dy = dy.load();
                    }
                } else {
                    kept[slot].x = x.load();
                    kept[slot].dy = dy.load();
                }
                x.advance(p.x, place);
                dy.advance(p.dy, place);
            };
            const auto copy = [&](int slot) {
                uint4 *const to = dynamic + 2 * slot * threads + (int)threadIdx.x;
                copy_ahead(to, x_at.base + x_at.at, 0);
                copy_ahead(to + threads, dy_at.base + dy_at.at, 0);
                x_at.advance(p.x, place);
                dy_at.advance(p.dy, place);
            };
            if constexpr (uneven) {
                char *const first_x = x_at.base + x_at.at, *const first_dy = dy_at.base + dy_at.at;
                x_at.at += edges.skipped();
                dy_at.at += edges.skipped();
                open_ring<K>(edges, copy);
#pragma unroll 1
                for (int k = 0; k < edges.edges(); k++) {
                    uint4 *const to = dynamic + 2 * k * threads + (int)threadIdx.x;
                    const int begin = edges.begin(k), finish = edges.finish(k);
                    to[0] = load_range<T>(first_x + edges.at(k), begin, finish, make_uint4(0, 0, 0, 0));
                    to[threads] = load_range<T>(first_dy + edges.at(k), begin, finish, make_uint4(0, 0, 0, 0));
                }
            } else if constexpr (streams) {
                open_ring<K>(edges, copy);
            } else if (!is_loaded) {
                walk<K>(count, shared, [&](int slot) { load(x_at, dy_at, slot); });
            }

            /* What follows from these is found now, not ahead of all loops and loads. */
            int width = g.width, at_once = place.rows_at_once, group_bits = g.group_bits, piece_bits = g.piece_bits;
            int sample = place.n, step = threads, channel_bits = g.channel_bits;
            forget(width);
            forget(at_once);
            forget(group_bits);
            forget(piece_bits);
            forget(sample);
            forget(step);
            forget(channel_bits);
            /* Shared memory, in this order: packs; statistics of groups; of each channel what channel_values says,
             * `ready` with the rest of the mean as the fourth; two sums of each thread's channels; weighted sums of
             * channels; totals of groups; of each block of a cluster those of a group. */
            const int channels = width * V, first_channel = place.first_channel;
            const int here = min(channels, (int)p.c - first_channel);
            const int groups_here = divide(here, g.by_group);
            const int groups = divide(channels, g.by_group) + (edges.later() > 0 ? groups_here : 0);
            group_statistics<R> *const of_groups =
                reinterpret_cast<group_statistics<R> *>(dynamic + 2 * (streams ? K : shared) * threads);
            const int stride = channels + (V == 1 ? channels & 1 : 0);
            R *const values = reinterpret_cast<R *>(of_groups + groups);
            const channel_values<R> of_channels = {values, values + stride, values + 2 * stride, values + 3 * stride};
            R *const of_plain = values + 4 * stride, *const of_centred = of_plain + at_once * channels;
            totals<R> *const of_sums = reinterpret_cast<totals<R> *>(of_centred + at_once * channels);
            totals<R> *const of_totals = of_sums + channels;
            pair<R> *const of_parts = reinterpret_cast<pair<R> *>(of_totals + groups);

            if (pass == 0) {
                if (exchange == NORMFUSE_EXCHANGE_CLUSTER)
                    open_mail(mail, groups_here * g.parts * (int)sizeof(pair<R>));
                if (exchange == NORMFUSE_EXCHANGE_GRID && threadIdx.x == 0)
                    ticket_before = look_at_ticket(a.tickets + first_team * ticket_stride);
                const int n = g.all_samples ? 0 : sample;
                if (ready) {
#pragma unroll 1
                    for (int i = (int)threadIdx.x; i < here; i += step) {
                        const int c = first_channel + i;
                        R rstd = R(1), rest;
                        double mean = 0.0;
                        if (a.source == NORMFUSE_SOURCE_SAVED) {
                            const int set = divide(c, g.by_set_channels);
                            rstd = parameter<R>(p.rstd, n, set, R(1));
                            mean = parameter<double>(p.mean, n, set, 0.0);
                        } else if (a.source == NORMFUSE_SOURCE_RUNNING) {
                            mean = parameter<double>(p.running_mean, 0, c, 0.0);
                            rstd = scaled_by_running(p, c, R(1));
                        }
                        const R scale = R(1) + parameter<R>(p.scale, n, c, R(0));
                        const R slope_here = parameter<R>(p.weight, n, c, R(1)) * scale * rstd;
                        const R offset_here =
                            parameter<R>(p.bias, n, c, R(0)) * scale + parameter<R>(p.shift, n, c, R(0));
                        R mean_here;
                        split_mean<T>(mean, mean_here, rest);
                        in_all_rows(first_place(i, edges.later(), here), here, channels, [&](int at) {
                            of_channels.means[at] = mean_here;
                            of_channels.slopes[at] = slope_here;
                            of_channels.offsets[at] = offset_here - rest * slope_here;
                            of_channels.shifts[at] = rest;
                        });
                        if (centred)
                            of_groups[i].rstd = rstd;
                    }
                } else {
                    /* Of the groups, asked for with the rest. */
                    const auto ask_group = [&](int i, bits<R> &rstd, bits<double> &mean) {
                        const int set = divide(first_channel + i * g.group, g.by_set_channels);
                        rstd = ask<R>(p.rstd, n * p.rstd.batch + set * p.rstd.channel);
                        mean = ask<double>(p.mean, n * p.mean.batch + set * p.mean.channel);
                    };
                    const auto keep_group = [&](int i, bits<R> rstd, bits<double> mean) {
                        group_statistics<R> found;
                        found.rstd = told<R>(rstd, p.rstd.type);
                        split_mean<T>(told<double>(mean, p.mean.type), found.mean, found.rest);
                        in_all_rows(i, groups_here, groups, [&](int at) { of_groups[at] = found; });
                    };
                    bits<R> rstd = 0;
                    bits<double> mean = 0;
                    if ((int)threadIdx.x < groups_here)
                        ask_group((int)threadIdx.x, rstd, mean);
                    stage(p, of_channels, n, first_channel, here, channels, edges.later(), step);
                    if ((int)threadIdx.x < groups_here)
                        keep_group((int)threadIdx.x, rstd, mean);
#pragma unroll 1
                    for (int i = (int)threadIdx.x + step; i < groups_here; i += step) {
                        ask_group(i, rstd, mean);
                        keep_group(i, rstd, mean);
                    }
                }
                if (V > 1 && shared > 0)
                    wait_for_copies();
                __syncthreads();
                const int column = place.active ? place.column : 0;
                coefficients_of<R, V>(a, of_channels, of_groups, column, edges.of_group(column * V, here), ready, slope,
                                      offset, shift);
                if (half) {
#pragma unroll
                    for (int i = 0; i < V; i++) {
                        slope[i] *= R(0.5);
                        offset[i] *= R(0.5);
                    }
                }
            } else if (V > 1 && shared > 0) {
                wait_for_copies();
            }
            if (!plain && p.pre_add.data) {
                cursor other(p.pre_add, p.x, place, row);
                walk<K>(count, shared, [&](int slot) {
                    const raw<T, V> more = other.load();
                    raw<T, V> pack = zero_pack<T, V>();
#pragma unroll
                    for (int h = 0; h < V / H; h++) {
                        R value[H], added[H], unused[H];
                        read(slot, h, value, unused);
                        unpack_part<T, V>(more, h, added);
#pragma unroll
                        for (int i = 0; i < H; i++)
                            value[i] += added[i];
                        put_part<T, V>(pack, h, value);
                    }
                    if constexpr (V > 1) {
                        if (slot < 0)
                            place_of_slot(slot, 0) = pack;
                        else
                            kept[slot < 0 ? 0 : slot].x = pack;
                    } else {
                        kept[slot].x = pack;
                    }
                    other.advance(p.pre_add, place);
                });
            }
            /* Of part `h` of a pack, x and dy become x - shift and dy'; `post` is what was added before the activation.
             */
            const auto differentiate = [&](auto chosen, int h, const raw<T, V> &post, values_of_part &x,
                                           values_of_part &dy) {
#pragma unroll
                for (int i = 0; i < H; i++)
                    x[i] -= shift[h * H + i];
                if (chosen.of(p.activation) != NORMFUSE_IDENTITY && (loops || p.activation != NORMFUSE_IDENTITY)) {
                    R z[H];
#pragma unroll
                    for (int i = 0; i < H; i++)
                        z[i] = fma(x[i], slope[h * H + i], offset[h * H + i]);
                    if (!plain && p.post_add.data) {
                        R added[H];
                        unpack_part<T, V>(post, h, added);
#pragma unroll
                        for (int i = 0; i < H; i++)
                            z[i] = p.from_y ? added[i] : z[i] + added[i];
                    }
                    differentiate_by<fast, loops>(dy, z, chosen, p.activation, (R)p.act_param);
                }
            };

            /* dx in place of x - shift */
            const auto gradient = [&](int h, values_of_part &x, const values_of_part &dy) {
#pragma unroll
                for (int i = 0; i < H; i++)
                    x[i] = centred ? fma(slope[h * H + i], dy[i], fma(first[h * H + i], x[i], second[h * H + i]))
                                   : slope[h * H + i] * dy[i];
            };
            const auto sum_up = [&](int h, const values_of_part &x, const values_of_part &dy) {
#pragma unroll
                for (int i = 0; i < H; i++) {
                    first[h * H + i] += dy[i];
                    second[h * H + i] += dy[i] * x[i];
                }
            };

            /* ---- sums ---- */
            if (sums && !streams) {
                cursor other(!plain && p.post_add.data ? p.post_add : p.x, p.x, place, row);
                choose_activation<plain, all>(p.activation, [&](auto chosen) {
                    walk<K>(count, shared, [&](int slot) {
                        raw<T, V> post = zero_pack<T, V>();
                        if (!plain && p.post_add.data) {
                            post = other.load();
                            other.advance(p.post_add, place);
                        }
#pragma unroll
                        for (int h = 0; h < V / H; h++) {
                            R x[H], dy[H];
                            read(slot, h, x, dy);
                            differentiate(chosen, h, post, x, dy);
                            sum_up(h, x, dy);
                        }
                    });
                });
            }
            const bool summed = sums && pass + 1 == passes;
            /* In place of dy it must not be written before dy was read for the last time. */
            const bool gives_dy =
                !plain && p.dpost_add.data && (applies || !(p.phases & NORMFUSE_PHASE_BACKWARD_APPLY));
            if (sums && !summed && !applies && !gives_dy)
                continue;

            const auto join_threads = [&] {
                if (half) {
#pragma unroll
                    for (int i = 0; i < V; i++) {
                        first[i] *= R(0.5);
                        second[i] *= R(0.5);
                    }
                }
                if (place.active) {
                    const int column = place.column * V - edges.later(), at = place.beside * channels + column;
                    if (uneven && edges.later() > 0) {
                        /* The columns ahead of the first channel follow the last one. */
#pragma unroll
                        for (int i = 0; i < V; i++) {
                            const int to = at + i + (column + i < 0 ? channels : 0);
                            of_plain[to] = first[i];
                            of_centred[to] = second[i];
                        }
                    } else {
                        write_values<R, V>(of_plain + at, first);
                        write_values<R, V>(of_centred + at, second);
                    }
                }
                __syncthreads();
                /* Rows abreast are beside one another here, too. */
                const int row_channels = V > 1 && g.abreast > 1 ? here : channels, sums_beside = at_once * g.abreast;
                const int lanes = 1 << channel_bits, lane = (int)threadIdx.x & (lanes - 1);
                const int first_of_warp = (int)(threadIdx.x & ~31u) >> channel_bits;
#pragma unroll 1
                for (int round = 0; round + first_of_warp < here; round += step >> channel_bits) {
                    const int i = round + ((int)threadIdx.x >> channel_bits);
                    R sum = R(0), product = R(0);
#pragma unroll 4
                    for (int beside = lane; beside < (i < here ? sums_beside : 0); beside += lanes) {
                        sum += of_plain[beside * row_channels + i];
                        product += of_centred[beside * row_channels + i];
                    }
                    sum = sum_few(sum, lanes);
                    product = sum_few(product, lanes);
                    if (i >= here || lane != 0)
                        continue;
                    R weight, bias;
                    const int of_channel = first_place(i, edges.later(), here);
                    if (ready) {
                        product -= of_channels.shifts[of_channel] * sum;
                        weight = of_channels.slopes[of_channel];
                    } else {
                        const group_statistics<R> of_group = of_groups[divide(i, g.by_group)];
                        product -= of_group.rest * sum;
                        weigh(p, of_channels, of_channel, weight, bias);
                        weight *= of_group.rstd;
                    }
                    if (!streams)
                        of_sums[i] = {weight * sum, weight * product};
                    if (a.sums) {
                        const int64_t channel = (int64_t)(g.sums_by_channel ? 0 : sample) * p.c + first_channel + i;
                        reinterpret_cast<double2 *>(a.sums)[channel * g.sum_slots + part] =
                            make_double2((double)sum, (double)product);
                    }
                }
            };
            if (summed && !streams)
                join_threads();

            /* ---- the totals of the groups ---- */
            if (applies && centred && (summed || (!sums && pass == 0))) {
                const R share = R(1) / (R)p.set_values;
                const auto finish = [&](int group, R sum, R product) {
                    const R rstd = of_groups[group].rstd;
                    in_all_rows(group, groups_here, groups, [&](int at) {
                        of_totals[at] = {-sum * share, -(product * rstd) * (rstd * share)};
                    });
                };
                if (sums && !streams) { /* tiles that keep nothing have no group at once */
                    const int lanes = 1 << group_bits, lane = (int)threadIdx.x & (lanes - 1);
                    const int groups_at_once = step >> group_bits, own_group = (int)threadIdx.x >> group_bits;
                    const int first_of_warp = (int)(threadIdx.x & ~31u) >> group_bits;
                    const bool far = exchange == NORMFUSE_EXCHANGE_GRID;
                    pair<R> *const of_grid = reinterpret_cast<pair<R> *>(a.partials) +
                                             ((int64_t)parity * g.teams + first_team) * groups * g.parts;
                    __syncthreads();
                    if (threadIdx.x == 0 && g.contributors > 0)
                        counted = count_block(a, divide(first_channel, g.by_group));
                    if (exchange == NORMFUSE_EXCHANGE_CLUSTER)
                        await_boxes();
#pragma unroll 1
                    for (int round = 0; round + first_of_warp < groups_here; round += groups_at_once) {
                        const int group = round + own_group;
                        const bool exists = group < groups_here;
                        R sum = R(0), product = R(0);
#pragma unroll 4
                        for (int i = lane; i < (exists ? g.group : 0); i += lanes) {
                            const totals<R> found = of_sums[group * g.group + i];
                            sum += found.plain;
                            product += found.centred;
                        }
                        sum = sum_few(sum, lanes);
                        product = sum_few(product, lanes);
                        if (!exists)
                            continue;
                        const pair<R> both = {sum, product};
                        if (exchange == NORMFUSE_EXCHANGE_CLUSTER) {
                            for (int other = lane; other < g.parts; other += lanes)
                                send(mail, of_parts + group * g.parts + part, other, both);
                        } else if (lane == 0) {
                            if (far)
                                of_grid[group * g.parts + part] = both;
                            else
                                finish(group, sum, product);
                        }
                    }
                    if (exchange != NORMFUSE_EXCHANGE_NONE) {
                        if (far) {
                            meet_team(a.tickets + first_team * ticket_stride, part, g.parts, ticket_before);
                        } else {
                            await_mail(mail);
                        }
#pragma unroll 1
                        for (int round = 0; round + first_of_warp < groups_here; round += groups_at_once) {
                            const int group = round + own_group;
                            const bool exists = group < groups_here;
                            const int begin = (exists ? group : 0) * g.parts;
                            double sum = 0.0, product = 0.0;
                            if (far) {
#pragma unroll 8
                                for (int i = lane; i < g.parts; i += lanes) {
                                    const pair<R> found = __ldcg(of_grid + begin + i);
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
                                finish(group, (R)sum, (R)product);
                        }
                    }
                } else {
#pragma unroll 1
                    for (int group = (int)threadIdx.x; group < groups_here; group += step) {
                        const int c = first_channel + group * g.group;
                        const int64_t set = by_channel ? c : (int64_t)sample * p.groups + divide(c, g.by_set_channels);
                        finish(group, (R)a.totals[set * PAIR], (R)a.totals[set * PAIR + 1]);
                    }
                }
                __syncthreads();
                const int column = place.active ? place.column : 0, of_group_at = edges.of_group(column * V, here);
                totals<R> of_group;
                R rest = R(0);
#pragma unroll
                for (int i = 0; i < V; i++) {
                    if ((i & ((1 << piece_bits) - 1)) == 0) {
                        const int group = divide(of_group_at + i, g.by_group);
                        of_group = of_totals[group];
                        rest = ready ? of_channels.shifts[column * V + i] : of_groups[group].rest;
                    }
                    first[i] = of_group.centred;
                    second[i] = of_group.plain - of_group.centred * rest;
                }
            }

            /* ---- results ---- */
#pragma unroll
            for (int k = 0; k < (streams ? 0 : K); k++) {
                forget(kept[k].x);
                forget(kept[k].dy);
            }
            if constexpr (streams) {
                /* Sums without results, results from totals that are known, or results that need none. */
                const bool gives_dx = applies && p.dx.data;
                cursor dx(p.dx.data ? p.dx : p.x, p.x, place, row, edges.lead());
                char *const first_dx = dx.base + dx.at;
                if constexpr (uneven)
                    dx.at += edges.skipped() - (unsigned)edges.edges() * place.step;
                choose_activation<loops, all, plain>(p.activation, [&](auto chosen) {
                    struct row_values {
                        R x[V / H][H], dy[V / H][H];
                    };
                    walk_ring<K>(
                        count, copy,
                        [&](int slot) {
                            const uint4 *const from = dynamic + 2 * slot * threads + (int)threadIdx.x;
                            const uint4 x = from[0], dy = from[threads];
                            row_values values;
#pragma unroll
                            for (int h = 0; h < V / H; h++) {
                                unpack_part<T, V>(x, h, values.x[h]);
                                unpack_part<T, V>(dy, h, values.dy[h]);
                            }
                            return values;
                        },
                        [&](row_values &values, int left) {
                            raw<T, V> dx_out = zero_pack<T, V>();
#pragma unroll
                            for (int h = 0; h < V / H; h++) {
                                differentiate(chosen, h, dx_out, values.x[h], values.dy[h]);
                                if (sums)
                                    sum_up(h, values.x[h], values.dy[h]);
                                if (gives_dx) {
                                    gradient(h, values.x[h], values.dy[h]);
                                    put_part<T, V>(dx_out, h, values.x[h]);
                                }
                            }
                            if (gives_dx) {
                                if (uneven && left > edges.whole)
                                    of_edges[edges.result(count - left)] = dx_out;
                                else
                                    dx.store(dx_out);
                                dx.advance(p.dx, place);
                            }
                        });
                });
                if (uneven && gives_dx)
                    store_edges<T>(edges, first_dx, of_edges);
                if (sums)
                    join_threads();
            } else if (gives_dy || (applies && p.dx.data)) {
                cursor other(!plain && p.post_add.data ? p.post_add : p.x, p.x, place, row);
                cursor dx(p.dx.data ? p.dx : p.x, p.x, place, row);
                cursor du(!plain && p.du.data ? p.du : p.x, p.x, place, row);
                cursor dpost(!plain && p.dpost_add.data ? p.dpost_add : p.x, p.x, place, row);
                /* The same rows of the team that this block has next are asked for as places become free. */
                const int next_team = team + g.teams;
                is_loaded = schedule == NORMFUSE_SCHEDULE_split && exchange == NORMFUSE_EXCHANGE_GRID &&
                            next_team < g.sets && g.row_channels == g.blocks_wide * g.width * V;
                const column_place next = place_of<T, V>(a, is_loaded ? next_team : team, part);
                cursor next_x(p.x, p.x, next, row), next_dy(p.dy, p.x, next, row);
                choose_activation<plain, all>(p.activation, [&](auto chosen) {
                    walk<K>(count, shared, [&](int slot) {
                        raw<T, V> post = zero_pack<T, V>(), more = post, dy_out = post, dx_out = post;
                        if (!plain && p.post_add.data) {
                            post = other.load();
                            other.advance(p.post_add, place);
                        }
                        if (!plain && p.du.data && p.dx.data && applies) {
                            more = du.load();
                            du.advance(p.du, place);
                        }
#pragma unroll
                        for (int h = 0; h < V / H; h++) {
                            R x[H], dy[H];
                            read(slot, h, x, dy);
                            differentiate(chosen, h, post, x, dy);
                            if (gives_dy)
                                put_part<T, V>(dy_out, h, dy);
                            gradient(h, x, dy);
                            if (!plain && p.du.data) {
                                R added[H];
                                unpack_part<T, V>(more, h, added);
#pragma unroll
                                for (int i = 0; i < H; i++)
                                    x[i] += added[i];
                            }
                            put_part<T, V>(dx_out, h, x);
                        }
                        if (gives_dy) {
                            dpost.store(dy_out);
                            dpost.advance(p.dpost_add, place);
                        }
                        if (p.dx.data && applies) {
                            dx.store(dx_out);
                            dx.advance(p.dx, place);
                        }
                        if (schedule == NORMFUSE_SCHEDULE_split && is_loaded)
                            load(next_x, next_dy, slot);
                    });
                });
            }
        }

        /* ---- the parameters' gradients ---- */
        if (!streams && g.contributors > 0 && is_last(a, counted)) {
            const int channels = min(g.width * V, (int)p.c - place.first_channel);
#pragma unroll 1
            for (int i = (int)threadIdx.x; i < channels; i += threads)
                give_gradients(a, place.first_channel + i);
        }

        if (exchange != NORMFUSE_EXCHANGE_GRID)
            break;
        team += g.teams;
        if (team >= g.sets)
            break;
        parity ^= 1;
        __syncthreads();
    }
}

#endif
