/* SPDX-License-Identifier: MIT
 *
 * columns_parameters.cuh - what the kernels over columns with a file of their own have in common: a thread requests the
 * parameters of its own channels, whole vectors of them, while its data are on their way. */
#ifndef NORMFUSE_CUDA_COLUMNS_PARAMETERS_CUH
#define NORMFUSE_CUDA_COLUMNS_PARAMETERS_CUH

#include "columns.cuh"

enum columns_parameter { COLUMNS_WEIGHT, COLUMNS_BIAS, COLUMNS_SCALE, COLUMNS_SHIFT, COLUMNS_MEAN, COLUMNS_RSTD };

__device__ __forceinline__ int type_of(const normfuse_cuda_columns &a, columns_parameter which)
{
    return (int)(a.types >> 2 * which & 3);
}

/* The thread's channels of a parameter as they are in memory: halves of a vector of floats, or a vector of 16 bits and
 * the same again, since whatever is loaded in a branch is waited for at the branch's end. */
template <int V> struct half_type {
    using type = uint4;
};
template <> struct half_type<4> {
    using type = uint2;
};
template <int V> struct channel_words {
    typename half_type<V>::type of[2];
};

/* Where many blocks request the same, one after the other, L1 answers: lines of L2 that all multiprocessors want take
 * longer than what is wanted (`shared`; evaluation of 64x256x56x56 f16 100 us for 52). */
template <int V, bool shared = false>
__device__ __forceinline__ channel_words<V> request_channels(const char *data, int c, int type)
{
    using half = typename half_type<V>::type;
    const bool singles = type == NORMFUSE_F32;
    const half *const first = reinterpret_cast<const half *>(data + c * (singles ? 4 : 2));
    const half *const second = first + (singles ? 1 : 0);
    if (shared)
        return {{__ldg(first), __ldg(second)}};
    return {{__ldcg(first), __ldcg(second)}};
}

template <int V>
__device__ __forceinline__ void receive_channels(const channel_words<V> &words, int type, float (&values)[V])
{
    unsigned of[V];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        of[i * V / 2] = words.of[i].x;
        of[i * V / 2 + 1] = words.of[i].y;
        if constexpr (V == 8) {
            of[i * V / 2 + 2] = words.of[i].z;
            of[i * V / 2 + 3] = words.of[i].w;
        }
    }
    if (type == NORMFUSE_F32) {
#pragma unroll
        for (int i = 0; i < V; i++)
            values[i] = __uint_as_float(of[i]);
        return;
    }
#pragma unroll
    for (int i = 0; i < V / 2; i++) {
        const float2 pair = type == NORMFUSE_F16 ? pair_of(of[i], f16()) : pair_of(of[i], bf16());
        values[2 * i] = pair.x;
        values[2 * i + 1] = pair.y;
    }
}

/* weight (1 + scale) and bias (1 + scale) + shift of the thread's channels. */
template <int V> struct channel_parameters {
    channel_words<V> weight, bias, scale, shift;

    __device__ __forceinline__ void request_weights(const normfuse_cuda_columns &a, int c)
    {
        /* Absent ones are read where x is. */
        weight = request_channels<V>(a.weight ? a.weight : a.x, a.weight ? c : 0, type_of(a, COLUMNS_WEIGHT));
        bias = request_channels<V>(a.bias ? a.bias : a.x, a.bias ? c : 0, type_of(a, COLUMNS_BIAS));
    }
    __device__ __forceinline__ void request_modulation(const normfuse_cuda_columns &a, int n, int c)
    {
        if (a.scale)
            scale = request_channels<V>(a.scale + n * a.scale_batch, c, type_of(a, COLUMNS_SCALE));
        if (a.shift)
            shift = request_channels<V>(a.shift + n * a.shift_batch, c, type_of(a, COLUMNS_SHIFT));
    }
    __device__ __forceinline__ void request(const normfuse_cuda_columns &a, int n, int c)
    {
        request_weights(a, c);
        request_modulation(a, n, c);
    }
    __device__ __forceinline__ void receive_weights(const normfuse_cuda_columns &a, float (&slope)[V],
                                                    float (&offset)[V]) const
    {
#pragma unroll
        for (int i = 0; i < V; i++) {
            slope[i] = 1.0f;
            offset[i] = 0.0f;
        }
        if (a.weight)
            receive_channels<V>(weight, type_of(a, COLUMNS_WEIGHT), slope);
        if (a.bias)
            receive_channels<V>(bias, type_of(a, COLUMNS_BIAS), offset);
    }
    __device__ __forceinline__ void receive(const normfuse_cuda_columns &a, float (&slope)[V], float (&offset)[V]) const
    {
        receive_weights(a, slope, offset);
        if (a.scale) {
            float more[V];
            receive_channels<V>(scale, type_of(a, COLUMNS_SCALE), more);
#pragma unroll
            for (int i = 0; i < V; i++) {
                slope[i] *= 1.0f + more[i];
                offset[i] *= 1.0f + more[i];
            }
        }
        if (a.shift) {
            float more[V];
            receive_channels<V>(shift, type_of(a, COLUMNS_SHIFT), more);
#pragma unroll
            for (int i = 0; i < V; i++)
                offset[i] += more[i];
        }
    }
};

/* work(k) for the rows that the thread has: one jump at their end. */
template <int k, int K, typename Work> __device__ __forceinline__ void walk_rows(int left, int at_once, Work &work)
{
    if constexpr (k < K) {
        if (left > 0) {
            work(k);
            walk_rows<k + 1, K>(left - at_once, at_once, work);
        }
    }
}

/* A saved statistic as it is in memory, f32 or f64, requested without a branch, whose end would wait for it. */
struct saved_statistic {
    float single = 0.0f;
    double twice = 0.0;

    __device__ __forceinline__ void request(const char *data, int64_t element, int type)
    {
        load_statistic<NORMFUSE_F32, NORMFUSE_F64>(single, twice, data + element * 4, data + element * 8, type);
    }
    __device__ __forceinline__ double receive(int type) const
    {
        return type == NORMFUSE_F64 ? twice : (double)single;
    }
};

#endif
