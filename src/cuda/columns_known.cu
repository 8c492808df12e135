/* SPDX-License-Identifier: MIT
 *
 * columns_known.cu - evaluation and affine over adjacent channels (NHWC). Nothing waits for a sum, so memory is the
 * limit as long as enough is on its way: blocks are many and short, and each thread asks for its own channels'
 * parameters along with its packs. Where a block prepared them in shared memory, to meet before the first result,
 * affine 64x256x64x64 bf16 took 69.6 us for 67.6 and its backward 120 for 109. */
#include "columns_parameters.cuh"
#include "gradients.cuh"

/* Of the thread's channels: z = (x - shift) * slope + offset. */
template <typename T, int V> struct known_channels {
    channel_words<V> weight, bias;

    /* An absent one is read where x is: a branch would wait at its end for what was asked for in it. */
    __device__ __forceinline__ static channel_words<V> ask_of(const normfuse_problem &p, const normfuse_parameter &of,
                                                              int n, int c)
    {
        const int64_t at = n * of.batch * (of.type == NORMFUSE_F32 ? 4 : 2);
        return ask_channels<V, true>(of.data ? of.data + at : p.x.data, of.data ? c : 0,
                                     of.data ? of.type : NORMFUSE_F16);
    }
    __device__ __forceinline__ void ask(const normfuse_problem &p, int n, int c)
    {
        weight = ask_of(p, p.weight, n, c);
        bias = ask_of(p, p.bias, n, c);
    }
    __device__ __forceinline__ void tell(const normfuse_problem &p, int n, int c, float factor, float (&slope)[V],
                                         float (&offset)[V], float (&about)[V]) const
    {
        float of[V];
#pragma unroll
        for (int i = 0; i < V; i++) {
            slope[i] = 1.0f;
            offset[i] = about[i] = 0.0f;
        }
        if (p.weight.data)
            told_channels<V>(weight, p.weight.type, slope);
        if (p.bias.data)
            told_channels<V>(bias, p.bias.type, offset);
        if (p.scale.data) {
            told_channels<V>(ask_of(p, p.scale, n, c), p.scale.type, of);
#pragma unroll
            for (int i = 0; i < V; i++) {
                slope[i] *= 1.0f + of[i];
                offset[i] *= 1.0f + of[i];
            }
        }
        if (p.shift.data) {
            told_channels<V>(ask_of(p, p.shift, n, c), p.shift.type, of);
#pragma unroll
            for (int i = 0; i < V; i++)
                offset[i] += of[i];
        }
        if (p.evaluate) {
            const channel_words<V> mean = ask_of(p, p.running_mean, 0, c);
            told_channels<V>(ask_of(p, p.running_var, 0, c), p.running_var.type, of);
#pragma unroll
            for (int i = 0; i < V; i++)
                slope[i] = (float)((double)slope[i] / sqrt((double)of[i] + p.eps)); /* as scaled_by_running */
            told_channels<V>(mean, p.running_mean.type, of);
#pragma unroll
            for (int i = 0; i < V; i++) {
                float rest;
                split_mean(of[i], about[i], rest);
                offset[i] -= rest * slope[i];
            }
        }
#pragma unroll
        for (int i = 0; i < V; i++) {
            slope[i] *= factor;
            offset[i] *= factor;
        }
    }
    /* As split_mean in columns.cuh; what is left of a single is one. */
    __device__ __forceinline__ static void split_mean(float mean, float &rounded, float &rest)
    {
        const float value[1] = {mean};
        float back[1];
        unpack<T, 1>(make_pack<T, 1>(value), back);
        rounded = back[0];
        rest = mean - back[0];
    }
};

template <typename T, int V, int K> __device__ __forceinline__ void known_forward(const normfuse_cuda_arguments &a)
{
    follow_kernel();
    using cursor = column_cursor<T, V, true>;
    constexpr bool fast = sizeof(T) == 2;
    const normfuse_problem &p = a.problem;
    const int team = divide((int)blockIdx.x, a.geometry.by_parts), part = (int)blockIdx.x - team * a.geometry.parts;
    const column_place place = place_of<T, V>(a, team, part);
    const int row = place.first + place.beside, count = slots_of(a, place, row, 1 << 30);
    if (count == 0)
        return;
    uint4 kept[K];
    cursor x(p.x, p.x, place, row), y(p.y, p.x, place, row);
    const auto ask_pack = [&](uint4 &pack, bool wanted) {
        load_pack_where<T, V>(wanted, pack, x.base + x.at);
        x.advance(p.x, place);
    };
    ask_first<K>(kept, count, ask_pack);
    known_channels<T, V> known;
    known.ask(p, place.n, place.c);
    float slope[V], offset[V], about[V];
    known.tell(p, place.n, place.c, takes_half<fast, true>(p.activation) ? 0.5f : 1.0f, slope, offset, about);
    choose_activation<true, false>(p.activation, [&](auto chosen) {
        walk_passing<K>(kept, count, ask_pack, [&](const uint4 &pack) {
            float z[V];
            unpack<T, V>(pack, z);
#pragma unroll
            for (int i = 0; i < V; i++)
                z[i] = fmaf(z[i] - about[i], slope[i], offset[i]);
            activate<fast, true>(z, chosen, p.activation, (float)p.act_param);
            y.store(make_pack<T, V>(z));
            y.advance(p.y, place);
        });
    });
}

/* dx = slope * dy', and of each channel the block's sums of dy' and dy' * (x - mean). */
template <typename T, int V, int K> __device__ __forceinline__ void known_backward(const normfuse_cuda_arguments &a)
{
    follow_kernel();
    using cursor = column_cursor<T, V, true>;
    constexpr bool fast = sizeof(T) == 2;
    constexpr int H = part_of<V>::values;
    const normfuse_problem &p = a.problem;
    const normfuse_cuda_geometry &g = a.geometry;
    extern __shared__ uint4 dynamic[];
    const int team = divide((int)blockIdx.x, g.by_parts), part = (int)blockIdx.x - team * g.parts;
    const column_place place = place_of<T, V>(a, team, part);
    const int row = place.first + place.beside, count = slots_of(a, place, row, 1 << 30);
    const bool gives_dx = (a.phases & NORMFUSE_PHASE_BACKWARD_APPLY) != 0 && p.dx.data;
    struct both {
        uint4 x, dy;
    } kept[K];
    cursor x_at(p.x, p.x, place, row), dy_at(p.dy, p.x, place, row), dx(p.dx.data ? p.dx : p.x, p.x, place, row);
    const auto ask_pack = [&](both &packs, bool wanted) {
        load_pack_where<T, V>(wanted, packs.x, x_at.base + x_at.at);
        load_pack_where<T, V>(wanted, packs.dy, dy_at.base + dy_at.at);
        x_at.advance(p.x, place);
        dy_at.advance(p.dy, place);
    };
    ask_first<K>(kept, count, ask_pack);
    known_channels<T, V> known;
    const int c = place.active ? place.c : 0;
    known.ask(p, place.n, c);
    float slope[V], offset[V], about[V], first[V] = {}, second[V] = {};
    const float factor = takes_half<fast, true>(p.activation) ? 0.5f : 1.0f;
    known.tell(p, place.n, c, factor, slope, offset, about);
    choose_activation<true, false>(p.activation, [&](auto chosen) {
        walk_passing<K>(kept, count, ask_pack, [&](const both &packs) {
            uint4 out = make_uint4(0, 0, 0, 0);
#pragma unroll
            for (int h = 0; h < V / H; h++) {
                float x[H], dy[H];
                unpack_part<T, V>(packs.x, h, x);
                unpack_part<T, V>(packs.dy, h, dy);
#pragma unroll
                for (int i = 0; i < H; i++)
                    x[i] -= about[h * H + i];
                if (decltype(chosen)::known != NORMFUSE_IDENTITY) {
                    float z[H];
#pragma unroll
                    for (int i = 0; i < H; i++)
                        z[i] = fmaf(x[i], slope[h * H + i], offset[h * H + i]);
                    differentiate_by<fast, true>(dy, z, chosen, p.activation, (float)p.act_param);
                }
#pragma unroll
                for (int i = 0; i < H; i++) {
                    first[h * H + i] += dy[i];
                    second[h * H + i] += dy[i] * x[i];
                    dy[i] *= slope[h * H + i];
                }
                put_part<T, V>(out, h, dy);
            }
            if (gives_dx)
                dx.store(out);
            dx.advance(p.x, place);
        });
    });
    if (!a.sums)
        return;

    const int channels = g.width * V, here = min(channels, (int)p.c - place.first_channel);
    float *const of_plain = reinterpret_cast<float *>(dynamic), *const of_centred =
                                                                    of_plain + place.rows_at_once * channels;
    if (place.active) {
#pragma unroll
        for (int i = 0; i < V; i++) {
            first[i] *= factor;
            second[i] *= factor;
        }
        const int at = place.beside * channels + place.column * V;
        write_values<float, V>(of_plain + at, first);
        write_values<float, V>(of_centred + at, second);
    }
    __syncthreads();
    const int lanes = 1 << g.channel_bits, lane = (int)threadIdx.x & (lanes - 1);
    const int first_of_warp = (int)(threadIdx.x & ~31u) >> g.channel_bits;
#pragma unroll 1
    for (int round = 0; round + first_of_warp < here; round += (int)blockDim.x >> g.channel_bits) {
        const int i = round + ((int)threadIdx.x >> g.channel_bits), c = place.first_channel + i;
        float sum = 0.0f, product = 0.0f;
#pragma unroll 4
        for (int beside = lane; beside < (i < here ? place.rows_at_once : 0); beside += lanes) {
            sum += of_plain[beside * channels + i];
            product += of_centred[beside * channels + i];
        }
        sum = sum_few(sum, lanes);
        product = sum_few(product, lanes);
        if (i >= here || lane != 0)
            continue;
        if (p.evaluate) {
            float rounded, rest;
            known_channels<T, V>::split_mean(parameter<float>(p.running_mean, 0, c, 0.0f), rounded, rest);
            product -= rest * sum;
        }
        const int64_t channel = (int64_t)(g.sums_by_channel ? 0 : place.n) * p.c + c;
        reinterpret_cast<double2 *>(a.sums)[channel * g.sum_slots + part] = make_double2((double)sum, (double)product);
    }
}

enum { registers_forward = 64, registers_backward = 112 };

#define KNOWN(picture, direction, type, pack, kept)                                                                    \
    extern "C" __global__ void __maxnreg__(registers_##direction)                                                      \
        normfuse_##picture##_##direction##_##type##_##pack##x##kept(const __grid_constant__ normfuse_cuda_arguments a) \
    {                                                                                                                  \
        known_##direction<type, pack, kept>(a);                                                                        \
    }
NORMFUSE_CUDA_COLUMNS_KNOWN(KNOWN)
