/* SPDX-License-Identifier: MIT
 *
 * columns_backward.cu - gradients where channels are adjacent (NHWC). rows_backward.cu has the formulas; here each
 * thread sums its own channels over its rows, so that the channels' sums need no search for who has which. */
#include "columns_vectors.cuh"
#include "gradients.cuh"

/* Of a block's channels: statistics of groups; of each channel what channel_values says, `ready` with the rest of the
 * mean as the fourth; two sums of each thread's channels; weighted sums of channels; totals of groups; pairs of blocks.
 */
template <typename T, int V> struct gradient_memory : block_channels {
    const bool ready; /* coefficients are made once a channel, else by each thread */
    const int spans = (int)g.by_spans.divisor; /* columns of a channel */
    int channel_bits;
    float *of_plain, *of_centred;
    float2 *of_sums;
    totals<float> *of_totals;

    __device__ __forceinline__ gradient_memory(const normfuse_cuda_arguments &a, const block_turns &block,
                                               const column_place &place, uint4 *behind_vectors)
        : block_channels(a, block, place, V), ready(g.group == 1 || p.pre_bias().data), channel_bits(g.channel_bits)
    {
        find_again(channel_bits);
        of_groups = reinterpret_cast<group_statistics<float> *>(behind_vectors);
        float *const values = reinterpret_cast<float *>(of_groups + groups);
        of_channels = {values, values + channels, values + 2 * channels, values + 3 * channels};
        of_plain = values + 4 * channels;
        of_centred = of_plain + at_once * channels;
        of_sums = reinterpret_cast<float2 *>(of_centred + at_once * channels);
        of_totals = reinterpret_cast<totals<float> *>(of_sums + channels);
        of_parts = reinterpret_cast<float2 *>(of_totals + groups);
    }
    /* What the block has to know of its channels before their vectors are there. */
    __device__ __forceinline__ void know_channels() const
    {
        if (ready) {
            know_given<T>();
        } else {
            const int n = g.all_samples ? 0 : this->n;
            /* Of the groups, requested with the rest. */
            struct requested_statistics {
                bits<float> rstd;
                bits<double> mean;
            };
            const auto request = [&](int i) {
                const int set = divide(divide(first_channel + i * g.group, g.by_spans), g.by_set_channels);
                return requested_statistics{
                    request_bits<float>(p.rstd(), n * p.rstd().batch + set * p.rstd().channel),
                    request_bits<double>(p.mean(), n * p.mean().batch + set * p.mean().channel)};
            };
            const auto hold = [&](int i, const requested_statistics &requested) {
                group_statistics<float> found;
                found.rstd = receive<float>(requested.rstd, p.rstd().type);
                split_mean<T>(receive<double>(requested.mean, p.mean().type), found.mean, found.rest);
                in_all_rows(i, groups_here, groups, [&](int at) { of_groups[at] = found; });
            };
            const auto know_parameters = [&] { stage(a, of_channels, n, first_channel, here, channels, step); };
            request_groups(request, know_parameters, hold);
        }
    }
    /* What threads summed of channels, for the block: weighted into of_sums, and to memory. */
    __device__ __forceinline__ void join_channels(const float (&first)[V], const float (&second)[V]) const
    {
        if (place.active) {
            const int at = place.beside * channels + place.column * V;
            write_values<V>(of_plain + at, first);
            write_values<V>(of_centred + at, second);
        }
        __syncthreads();
        const auto store = [&](int i, float sum, float product) {
            const int column = i * spans;
            float weight, bias;
            if (ready) {
                product -= of_channels.shifts[column] * sum;
                weight = of_channels.slopes[column];
            } else {
                const group_statistics<float> of_group = of_groups[divide(column, g.by_group)];
                product -= of_group.rest * sum;
                weigh(p, of_channels, column, weight, bias);
                weight *= of_group.rstd;
            }
            of_sums[i] = make_float2(weight * sum, weight * product);
            if (a.sums)
                store_channel_sums(a, n, divide(first_channel, g.by_spans) + i, block.part, sum, product);
        };
        /* Rows folded are beside one another, too. */
        const int row_channels = g.folded > 1 ? here : channels;
        sum_beside(a, of_plain, of_centred, here, row_channels, at_once * g.folded, channel_bits, store);
    }
    /* What dx takes of the groups, of the channels' weighted sums. */
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
        const bool far = block.exchange == NORMFUSE_EXCHANGE_GRID;
        float2 *const of_grid = block.parts_of<float2>(a, groups);
        __syncthreads();
        if (threadIdx.x == 0 && g.contributors > 0)
            counted = count_block(a, divide(first_channel, g.by_group));
        if (block.exchange == NORMFUSE_EXCHANGE_CLUSTER)
            await_open_mailboxes();
        share_items(groups_here, group_bits, [&](int group, bool exists, int lane, int lanes) {
            const int channels_of_group = divide(g.group, g.by_spans);
            const float2 both = sum_pairs<4>(exists ? channels_of_group : 0, lane, lanes,
                                             [&](int i) { return of_sums[group * channels_of_group + i]; });
            if (!exists)
                return;
            send_part(
                mailbox, group, lane, lanes, both, [&] { return of_grid; }, [&] { finish(group, both.x, both.y); });
        });
        if (block.exchange != NORMFUSE_EXCHANGE_NONE) {
            if (far)
                synchronize_block_group(block.grid_barrier(a), block.part, g.parts, grid_barrier_before);
            else
                await_mailbox(mailbox);
            share_items(groups_here, group_bits, [&](int group, bool exists, int lane, int lanes) {
                const int begin = group * g.parts;
                const double2 found =
                    far ? add_pairs<double2, 8>(g.parts, lane, lanes,
                                                [&](int i) { return __ldcg(of_grid + begin + i); })
                        : add_pairs<double2, 1>(g.parts, lane, lanes, [&](int i) { return of_parts[begin + i]; });
                const float sum = (float)sum_few(found.x, lanes), product = (float)sum_few(found.y, lanes);
                if (exists && lane == 0)
                    finish(group, sum, product);
            });
        }
    }
};

template <typename T, int V, int K, normfuse_cuda_schedule schedule>
__device__ __forceinline__ void columns_backward(const normfuse_cuda_arguments &a)
{
    follow_kernel();
    constexpr bool adds = schedule == NORMFUSE_SCHEDULE_additions;
    using cursor = column_cursor<T, V>;
    constexpr int H = values_a_part;
    const normfuse_cuda_problem &p = a.problem;
    const normfuse_cuda_geometry &g = a.geometry;
    __shared__ cluster_mailbox mailbox;
    const bool half = takes_half<sizeof(T) == 2>(p.activation);
    block_turns block(a);
    column_vectors<T, V, K, 2, adds> vectors(a);
    bool is_loaded = false; /* the tile of this round, while the results of the last one were written */
    do {
        const column_place place = place_of<T, V>(a, block.set, block.part);
        const int shared = g.held_shared;
        uint32_t counted = 0;
        float slope[V], offset[V], shift[V];
        /* Sums of dy' and dy' (x - shift); then what the gradient takes of x - shift, and what else it takes. */
        float first[V] = {}, second[V] = {};
        const int row = place.first + place.beside;
        const int count = slots_of(a, place, row, K + shared);
        /* ---- load ---- */
        cursor from[] = {{p.x().data, p.x(), place, row}, {p.dy().data, p.x(), place, row}};
        vectors.request(from, place, count, shared, is_loaded);
        vectors.pass(p.pre_add(), {}, place, count);
        const gradient_memory<T, V> of(a, block, place, vectors.behind());
        const uint32_t grid_barrier_before = of.open_exchange(mailbox);
        of.know_channels();
        if (shared > 0)
            wait_for_copies();
        if constexpr (adds)
            vectors.add_to_x(place, count);
        __syncthreads();
        const int column = place.active ? place.column : 0, of_groups = column * V;
        coefficients_of<V>(a, of.of_channels, of.of_groups, column, of_groups, of.ready, slope, offset, shift);
        if (half)
            multiply(slope, offset, 0.5f);
        const channel_derivative<T, V, float[V], double> differentiate = {p.activation, p.act_param, shift, slope,
                                                                                offset};
        const bool keeps_dz = vectors.keeps_dz();
        const float factor = half ? 0.5f : 1.0f;
        const typename decltype(vectors)::added_after add = {vectors, factor};
        if (vectors.reads_post())
            vectors.pass(p.post_add(), {}, place, count);
        /* ---- sums ---- */
        choose_activation<adds>(p.activation, [&](auto chosen) {
            vectors.walk_rows(place, count, shared, [&](const row_vectors<2> &row, int slot) {
                uint4 dz = make_uint4(0, 0, 0, 0);
                each<V / H>([&](int h) {
                    float x[H], dy[H];
                    differentiate(chosen, row.of[0], row.of[1], x, dy, h, add);
                    add_products(x, dy, first, second, h);
                    if (keeps_dz)
                        pack_part<T, V>(dz, h, dy);
                });
                if (keeps_dz)
                    vectors.shared(slot, 1) = dz;
            });
        });
        vectors.pass_to_gradients(place, count);
        if (half)
            multiply(first, second, 0.5f);
        of.join_channels(first, second);
        /* ---- the totals of the groups ---- */
        of.join_totals(mailbox, grid_barrier_before, counted);
        __syncthreads();
        totals<float> of_group;
        float rest = 0.0f;
        each<V>([&](int i) {
            if ((i & ((1 << of.subvector_bits) - 1)) == 0) {
                const int group = divide(of_groups + i, g.by_group);
                of_group = of.of_totals[group];
                rest = of.ready ? 0.0f : of.of_groups[group].rest;
            }
            if (of.ready)
                rest = of.of_channels.shifts[column * V + i];
            first[i] = of_group.centred;
            second[i] = of_group.plain - of_group.centred * rest;
        });

        /* ---- results ---- */
        vectors.forget();
        const bool writes = p.dx().data != nullptr, writes_dz = adds && p.dpost_add().data;
        if (writes || writes_dz) {
            /* The same rows of the block group that this block has next are requested as places become free. */
            is_loaded = !adds && block.has_next(g) && g.row_channels == g.blocks_wide * g.width * V;
            const column_place next = place_of<T, V>(a, block.set + (is_loaded ? g.block_groups : 0), block.part);
            cursor next_from[] = {{p.x().data, p.x(), next, row}, {p.dy().data, p.x(), next, row}};
            cursor dx(p.dx().data, p.x(), place, row),
                to_dz(writes_dz ? p.dpost_add().data : p.x().data, p.x(), place, row);
            const int activation = keeps_dz ? NORMFUSE_IDENTITY : p.activation;
            choose_activation<adds>(activation, [&](auto chosen) {
                vectors.walk_rows(place, count, shared, [&](const row_vectors<2> &row, int slot) {
                    uint4 vector = make_uint4(0, 0, 0, 0), dz_vector = vector;
                    each<V / H>([&](int h) {
                        float x[H], dy[H];
                        differentiate(chosen, row.of[0], row.of[1], x, dy, h, add);
                        if (writes_dz) {
                            float dz[H];
                            each<H>([&](int i) { dz[i] = dy[i] * factor; });
                            pack_part<T, V>(dz_vector, h, dz);
                        }
                        if (writes) {
                            each<H>([&](int i) {
                                const int k = h * H + i;
                                x[i] = fma(slope[k], dy[i], fma(first[k], x[i], second[k]));
                            });
                            vectors.add_du(h, x);
                            pack_part<T, V>(vector, h, x);
                        }
                    });
                    if (writes_dz)
                        to_dz.store(dz_vector);
                    if (adds)
                        to_dz.advance(place);
                    if (writes)
                        dx.store(vector);
                    dx.advance(place);
                    if (is_loaded)
                        vectors.load(next_from, place, slot);
                });
            });
        }
        /* ---- the parameters' gradients ---- */
        write_last_gradients(a, counted, divide(place.first_channel, g.by_spans), divide(of.here, g.by_spans));
    } while (block.advance(g));
}

NORMFUSE_KERNELS_COLUMNS_BACKWARD(NORMFUSE_INSTANCE)
