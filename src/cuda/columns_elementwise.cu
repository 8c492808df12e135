/* SPDX-License-Identifier: MIT
 *
 * columns_elementwise.cu - what needs no sum over adjacent channels (NHWC): evaluation and affine. Nothing waits for a
 * sum, so memory is the limit as long as enough is on its way: blocks are many and short, and each thread requests its own
 * channels' parameters along with its vectors. Where a block prepared them in shared memory, to meet before the first
 * result, affine 64x256x64x64 bf16 took 69.6 us for 67.6 and its backward 120 for 109. */
#include "columns_held.cuh"
#include "gradients.cuh"

/* Of the thread's channels: z = (x - shift) * slope + offset. */
template <typename T, int V> struct elementwise_channels {
    channel_words<V> weight, bias;
    /* An absent one is read where x is: a branch would wait at its end for what was requested in it. */
    __device__ __forceinline__ static channel_words<V> request_of(const normfuse_cuda_problem &p,
                                                                  const normfuse_parameter &of, int n, int c)
    {
        const int64_t at = n * of.batch * (of.type == NORMFUSE_F32 ? 4 : 2);
        return request_channels<V>(of.data ? of.data + at : p.x().data, of.data ? c : 0,
                                   of.data ? of.type : NORMFUSE_F16);
    }
    __device__ __forceinline__ void request(const normfuse_cuda_problem &p, int n, int c)
    {
        weight = request_of(p, p.weight(), n, c);
        bias = request_of(p, p.bias(), n, c);
    }
    __device__ __forceinline__ void receive(const normfuse_cuda_arguments &a, int n, int c, float factor,
                                            float (&slope)[V], float (&offset)[V], float (&about)[V]) const
    {
        const normfuse_cuda_problem &p = a.problem;
        each<V>([&](int i) {
            slope[i] = 1.0f;
            offset[i] = about[i] = 0.0f;
        });
        if (p.weight().data)
            receive_channels<V>(weight, p.weight().type, slope);
        if (p.bias().data)
            receive_channels<V>(bias, p.bias().type, offset);
        /* work(i, value), of what is seldom there. */
        const auto take = [&](const normfuse_parameter &from, auto work) {
            if (from.data) {
                float of[V];
                receive_channels<V>(request_of(p, from, n, c), from.type, of);
                each<V>([&](int i) { work(i, of[i]); });
            }
        };
        take(p.scale(), [&](int i, float scale) {
            slope[i] *= 1.0f + scale;
            offset[i] *= 1.0f + scale;
        });
        take(p.shift(), [&](int i, float shift) { offset[i] += shift; });
        if (p.evaluate()) {
            float of[V];
            const channel_words<V> mean = request_of(p, p.running_mean(), 0, c);
            receive_channels<V>(request_of(p, p.running_var(), 0, c), p.running_var().type, of);
            each<V>([&](int i) {
                slope[i] = (float)((double)slope[i] / sqrt((double)of[i] + p.eps)); /* as requested_set::scale */
            });
            receive_channels<V>(mean, p.running_mean().type, of);
            each<V>([&](int i) {
                float rest;
                split_mean<T>(of[i], about[i], rest);
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
};

template <typename T, int V, int K, normfuse_cuda_schedule schedule>
__device__ __forceinline__ void columns_forward(const normfuse_cuda_arguments &a)
{
    follow_kernel();
    using cursor = column_cursor<T, V>;
    using vectors = row_vectors<1>;
    constexpr bool fast = sizeof(T) == 2;
    const normfuse_cuda_problem &p = a.problem;
    const normfuse_cuda_geometry &g = a.geometry;
    const int block_group = divide((int)blockIdx.x, g.by_parts), part = (int)blockIdx.x - block_group * g.parts;
    const column_place place = place_of<T, V>(a, block_group, part);
    const int row = place.first + place.beside, count = slots_of(a, place, row, 1 << 30);
    if (count == 0)
        return;
    vectors held[K];
    cursor x(p.x().data, p.x(), place, row), y(p.y().data, p.x(), place, row);
    const auto request_vector = [&](vectors &of, bool wanted) {
        load_vector_where<T, V>(wanted, of.of[0], x.base + x.at);
        x.advance(place);
    };
    request_first<K>(held, count, request_vector);
    elementwise_channels<T, V> parameters;
    parameters.request(p, place.n, place.c);
    float slope[V], offset[V], about[V];
    const float factor = factor_of<T>(p.activation);
    parameters.receive(a, place.n, place.c, factor, slope, offset, about);
    choose_activation<false>(p.activation, [&](auto chosen) {
        walk_passing<K>(held, count, request_vector, [&](const vectors &of) {
            float z[V];
            unpack<T, V>(of.of[0], z);
            each<V>([&](int i) { z[i] = fmaf(z[i] - about[i], slope[i], offset[i]); });
            activate<fast>(z, chosen, p.activation, (float)p.act_param);
            y.store(make_vector<T, V>(z));
            y.advance(place);
        });
    });
}

/* dx = slope * dy', and of each channel the block's sums of dy' and dy' * (x - mean). */
template <typename T, int V, int K, normfuse_cuda_schedule schedule>
__device__ __forceinline__ void columns_backward(const normfuse_cuda_arguments &a)
{
    follow_kernel();
    using cursor = column_cursor<T, V>;
    using channels_of = elementwise_channels<T, V>;
    using vectors = row_vectors<2>; /* x, dy */
    constexpr bool fast = sizeof(T) == 2;
    constexpr int H = values_a_part;
    const normfuse_cuda_problem &p = a.problem;
    const normfuse_cuda_geometry &g = a.geometry;
    NORMFUSE_DYNAMIC_SHARED(dynamic);
    const int block_group = divide((int)blockIdx.x, g.by_parts), part = (int)blockIdx.x - block_group * g.parts;
    const column_place place = place_of<T, V>(a, block_group, part);
    const int row = place.first + place.beside, count = slots_of(a, place, row, 1 << 30);
    const bool writes_dx = (a.phases & NORMFUSE_PHASE_BACKWARD_APPLY) != 0 && p.dx().data;
    vectors held[K];
    cursor x_at(p.x().data, p.x(), place, row), dy_at(p.dy().data, p.x(), place, row),
        dx(p.dx().data, p.x(), place, row);
    const auto request_vector = [&](vectors &of, bool wanted) {
        load_vector_where<T, V>(wanted, of.of[0], x_at.base + x_at.at);
        load_vector_where<T, V>(wanted, of.of[1], dy_at.base + dy_at.at);
        x_at.advance(place);
        dy_at.advance(place);
    };
    request_first<K>(held, count, request_vector);
    channels_of parameters;
    const int c = place.active ? place.c : 0;
    parameters.request(p, place.n, c);
    float slope[V], offset[V], about[V], first[V] = {}, second[V] = {};
    const float factor = factor_of<T>(p.activation);
    parameters.receive(a, place.n, c, factor, slope, offset, about);
    choose_activation<false>(p.activation, [&](auto chosen) {
        walk_passing<K>(held, count, request_vector, [&](const vectors &of) {
            uint4 out = make_uint4(0, 0, 0, 0);
            each<V / H>([&](int h) {
                float x[H], dy[H];
                unpack_part<T, V>(of.of[0], h, x);
                unpack_part<T, V>(of.of[1], h, dy);
                each<H>([&](int i) { x[i] -= about[h * H + i]; });
                if (decltype(chosen)::constant != NORMFUSE_IDENTITY) {
                    float z[H];
                    each<H>([&](int i) { z[i] = fmaf(x[i], slope[h * H + i], offset[h * H + i]); });
                    differentiate_by<fast>(dy, z, chosen, p.activation, (float)p.act_param);
                }
                add_products(x, dy, first, second, h);
                each<H>([&](int i) { dy[i] *= slope[h * H + i]; });
                pack_part<T, V>(out, h, dy);
            });
            if (writes_dx)
                dx.store(out);
            dx.advance(place);
        });
    });
    if (!a.sums)
        return;

    const int channels = g.width * V, here = min(channels, (int)p.c - place.first_channel);
    float *const of_plain = reinterpret_cast<float *>(dynamic), *const of_centred =
                                                                    of_plain + place.rows_at_once * channels;
    if (place.active) {
        multiply(first, second, factor);
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
        if (p.pre_bias().data) {
            (void)add_exactly(rounded, -parameter<float>(p.pre_bias(), place.n, c, 0.0f), left);
            rest += left;
        }
        store_channel_sums(a, place.n, c, part, sum, product - rest * sum);
    };
    sum_beside(a, of_plain, of_centred, here, channels, place.rows_at_once, g.channel_bits, store);
}

NORMFUSE_KERNELS_COLUMNS_ELEMENTWISE(NORMFUSE_INSTANCE)
