/* SPDX-License-Identifier: MIT
 *
 * columns_elementwise.cu - what needs no sum over adjacent channels (NHWC): evaluation and affine, and of norms with an
 * addition before the activation the second half, results from given statistics, and the first half of their
 * gradient. Nothing waits for a sum, so memory is the limit as long as enough is on its way: blocks are many and short,
 * and each thread requests its own channels' parameters along with its vectors. Where a block prepared them in shared
 * memory, to meet before the first result, affine 64x256x64x64 bf16 took 69.6 us for 67.6 and its backward 120 for 109.
 *
 * With an addition, z = normalized(x) + post_add, a gradient has three tensors to read. Here they are read once: dz,
 * which is the gradient of post_add anyway, goes to memory along with the channels' sums, and a plain tile makes dx of
 * x and dz. Where dz would be rounded on the way (16 bits, and an activation that does more than pass or drop dy) the
 * general tiles read all three twice, or hold them. */
#include "columns_held.cuh"
#include "gradients.cuh"

__device__ __forceinline__ set_statistics<float> given_statistics(const normfuse_cuda_arguments &a, int n, int set)
{
    const normfuse_cuda_problem &p = a.problem;
    if (a.source == NORMFUSE_SOURCE_SAVED)
        return {parameter<double>(p.mean(), n, set, 0.0), 0.0f, parameter<float>(p.rstd(), n, set, 1.0f)};
    const normfuse_cuda_statistics *const of =
        a.statistics + ((p.sets == NORMFUSE_SETS_BATCH ? 0 : (int64_t)n * p.groups) + set);
    return {of->mean, 0.0f, (float)of->rstd};
}

/* A thread's rows of x, backward of dy, and with a residual of what is added, K of them on their way together; and of
 * its channels z = (x - about) slope + offset, `factor` times. */
template <typename T, int V, int K, bool backward, bool residual> struct elementwise_tile {
    static constexpr int tensors = 1 + backward + residual;
    const normfuse_cuda_arguments &a;
    const normfuse_cuda_problem &p;
    const int block, block_group, part;
    const column_place place;
    const int row, count, n, c;
    const float factor;
    const char *from[tensors];
    unsigned at; /* bytes from there to the next row to request */
    row_vectors<tensors> held[K];
    float slope[V], offset[V], about[V];

    /* Requests all that it can, then receives the channels' parameters. */
    __device__ __forceinline__ explicit elementwise_tile(const normfuse_cuda_arguments &a)
        : a(a), p(a.problem),
          block((int)(!backward && residual && a.geometry.backwards ? gridDim.x - 1 - blockIdx.x : blockIdx.x)),
          block_group(divide(block, a.geometry.by_parts)), part(block - block_group * a.geometry.parts),
          place(place_of<T, V>(a, block_group, part)), row(place.first + place.beside),
          count(slots_of(a, place, row, 1 << 30)), n(place.n), c(place.active ? place.c : 0),
          factor(factor_of<T>(p.activation))
    {
        each<tensors>([&](int i) {
            char *const data = i == 0 ? p.x().data : backward && i == 1 ? p.dy().data : p.post_add().data;
            const column_cursor<T, V> first(data, p.x(), place, row);
            from[i] = first.base;
            at = first.at;
        });
        request_first<K>(held, count, *this);
        const channel_words<V> weight = request_of(p.weight()), bias = request_of(p.bias());
        each<V>([&](int i) {
            slope[i] = 1.0f;
            offset[i] = about[i] = 0.0f;
        });
        if (p.weight().data)
            receive_channels<V>(weight, p.weight().type, slope);
        if (p.bias().data)
            receive_channels<V>(bias, p.bias().type, offset);
        take(p.scale(), [&](int i, float scale) {
            slope[i] *= 1.0f + scale;
            offset[i] *= 1.0f + scale;
        });
        take(p.shift(), [&](int i, float shift) { offset[i] += shift; });
        if (p.evaluate()) {
            const channel_words<V> mean = request_of(p.running_mean());
            take(p.running_var(), [&](int i, float variance) {
                slope[i] = (float)((double)slope[i] / sqrt((double)variance + p.eps)); /* as scaled_by_running */
            });
            receive_channels<V>(mean, p.running_mean().type, about);
            each<V>([&](int i) {
                float rest;
                split_mean<T>(about[i], about[i], rest);
                offset[i] -= rest * slope[i];
            });
        } else if (residual && p.sets != NORMFUSE_SETS_NONE) {
            /* Of the sets that the channels are of; a vector of one group requests once. */
            const normfuse_cuda_divisor &by_set = a.geometry.by_set_channels;
            const int first = divide(c, by_set);
            const bool several = divide(c + V - 1, by_set) != first;
            float rest = 0.0f, rstd = 0.0f;
            each<V>([&](int i) {
                if (i == 0 || several) {
                    const set_statistics<float> of = given_statistics(a, n, i == 0 ? first : divide(c + i, by_set));
                    split_mean<T>(of.mean, about[i], rest);
                    rstd = of.rstd;
                } else {
                    about[i] = about[0];
                }
                slope[i] *= rstd;
                offset[i] -= rest * slope[i];
            });
        }
        take(p.pre_bias(), [&](int i, float added) {
            float left;
            about[i] = add_exactly(about[i], -added, left);
            offset[i] -= left * slope[i];
        });
        multiply(slope, offset, factor);
    }
    /* The next row, for request_first() and walk_passing(). */
    __device__ __forceinline__ void operator()(row_vectors<tensors> &of, bool wanted)
    {
        each<tensors>([&](int i) { load_vector_where<T, V>(wanted, of.of[i], from[i] + at); });
        at += place.step;
    }
    /* An absent one is read where x is: a branch would wait at its end for what was requested in it. */
    __device__ __forceinline__ channel_words<V> request_of(const normfuse_parameter &of) const
    {
        const int64_t begin = n * of.batch * (of.type == NORMFUSE_F32 ? 4 : 2);
        return request_channels<V, true>(of.data ? of.data + begin : p.x().data, of.data ? c : 0,
                                         of.data ? of.type : NORMFUSE_F16);
    }
    /* work(i, value), of what is seldom there. */
    template <typename Work> __device__ __forceinline__ void take(const normfuse_parameter &from, Work work) const
    {
        if (from.data) {
            float of[V];
            receive_channels<V>(request_of(from), from.type, of);
            each<V>([&](int i) { work(i, of[i]); });
        }
    }
    /* What was added to z, in part h. */
    template <int H>
    __device__ __forceinline__ void add_residual(const row_vectors<tensors> &row, float (&z)[H], int h) const
    {
        if constexpr (residual) {
            float more[H];
            unpack_part<T, V>(row.of[tensors - 1], h, more);
            each<H>([&](int i) { z[i] = backward && p.from_y() ? more[i] : fmaf(more[i], factor, z[i]); });
        }
    }
};

template <typename T, int V, int K, normfuse_cuda_schedule schedule>
__device__ __forceinline__ void columns_forward(const normfuse_cuda_arguments &a)
{
    follow_kernel();
    constexpr bool residual = schedule == NORMFUSE_SCHEDULE_elementwise_residual;
    const normfuse_cuda_problem &p = a.problem;
    elementwise_tile<T, V, K, false, residual> tile(a);
    column_cursor<T, V> y(p.y().data, p.x(), tile.place, tile.row);
    choose_activation<true, false>(p.activation, [&](auto chosen) {
        walk_passing<K>(tile.held, tile.count, tile, [&](const row_vectors<1 + residual> &row) {
            y.store(result_of<T, V>(chosen, p.activation, p.act_param, row.of[0], tile.about, tile.slope, tile.offset,
                                    [&](float(&z)[V], int h) { tile.add_residual(row, z, h); }));
            y.advance(tile.place);
        });
    });
}

/* dx = slope * dy', and of each channel the block's sums of dy' and dy' * (x - mean); with an addition dy', its
 * gradient. */
template <typename T, int V, int K, normfuse_cuda_schedule schedule>
__device__ __forceinline__ void columns_backward(const normfuse_cuda_arguments &a)
{
    follow_kernel();
    constexpr bool residual = schedule == NORMFUSE_SCHEDULE_elementwise_residual;
    constexpr int H = values_a_part;
    const normfuse_cuda_problem &p = a.problem;
    const normfuse_cuda_geometry &g = a.geometry;
    NORMFUSE_DYNAMIC_SHARED(dynamic);
    const bool writes_dx = (a.phases & NORMFUSE_PHASE_BACKWARD_APPLY) != 0 && p.dx().data;
    elementwise_tile<T, V, K, true, residual> tile(a);
    const column_place &place = tile.place;
    column_cursor<T, V> dx(p.dx().data, p.x(), place, tile.row), dresidual(p.dpost_add().data, p.x(), place, tile.row);
    float first[V] = {}, second[V] = {};
    const channel_derivative<T, V, float[V], true, double> differentiate = {p.activation, p.act_param, tile.about,
                                                                            tile.slope, tile.offset};
    choose_activation<true, false>(p.activation, [&](auto chosen) {
        walk_passing<K>(tile.held, tile.count, tile, [&](const row_vectors<2 + residual> &row) {
            uint4 out = make_uint4(0, 0, 0, 0), out_residual = make_uint4(0, 0, 0, 0);
            each<V / H>([&](int h) {
                float x[H], dy[H];
                differentiate(chosen, row.of[0], row.of[1], x, dy, h,
                              [&](float(&z)[H], int h) { tile.add_residual(row, z, h); });
                if constexpr (residual) {
                    float more[H];
                    each<H>([&](int i) { more[i] = dy[i] * tile.factor; });
                    pack_part<T, V>(out_residual, h, more);
                }
                add_products(x, dy, first, second, h);
                each<H>([&](int i) { dy[i] *= tile.slope[h * H + i]; });
                pack_part<T, V>(out, h, dy);
            });
            if (writes_dx)
                dx.store(out);
            if constexpr (residual) {
                if (p.dpost_add().data)
                    store_vector<T, V>(dresidual.base + dx.at, 0, out_residual);
            }
            dx.advance(place);
        });
    });
    if (!a.sums)
        return;

    const int channels = g.width * V, here = min(channels, (int)p.c - place.first_channel);
    float *const of_plain = reinterpret_cast<float *>(dynamic), *const of_centred =
                                                                    of_plain + place.rows_at_once * channels;
    if (place.active) {
        multiply(first, second, tile.factor);
        const int at = place.beside * channels + place.column * V;
        write_values<V>(of_plain + at, first);
        write_values<V>(of_centred + at, second);
    }
    __syncthreads();
    const auto store = [&](int i, float sum, float product) {
        const int c = place.first_channel + i;
        float rounded = 0.0f, rest = 0.0f, left;
        if (p.evaluate())
            split_mean<T>(parameter<float>(p.running_mean(), 0, c, 0.0f), rounded, rest);
        else if (residual && p.sets != NORMFUSE_SETS_NONE)
            split_mean<T>(given_statistics(a, place.n, divide(c, g.by_set_channels)).mean, rounded, rest);
        if (p.pre_bias().data) {
            (void)add_exactly(rounded, -parameter<float>(p.pre_bias(), place.n, c, 0.0f), left);
            rest += left;
        }
        store_channel_sums(a, place.n, c, tile.part, sum, product - rest * sum);
    };
    sum_beside(of_plain, of_centred, here, channels, place.rows_at_once, g.channel_bits, store);
}

NORMFUSE_KERNELS_COLUMNS_ELEMENTWISE(NORMFUSE_INSTANCE)
