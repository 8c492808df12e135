/* SPDX-License-Identifier: MIT
 *
 * vector.cuh - vectors of adjacent elements, loads and stores, values of any dtype. R is what a storage type T is
 * computed in: double for double, float for all others. */
#ifndef NORMFUSE_CUDA_VECTOR_CUH
#define NORMFUSE_CUDA_VECTOR_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels.h"
#include "ptx.cuh"

using f64 = double;
using f32 = float;
using f16 = __half;
using bf16 = __nv_bfloat16;

template <typename T> struct compute_type {
    using type = float;
};
template <> struct compute_type<double> {
    using type = double;
};
template <typename T> using compute = typename compute_type<T>::type;

/* ---- vectors ------------------------------------------------------------------------------------------------------
 */

/* A vector is 16 bytes, a word of two halves, or one element. */
template <typename T, int V> struct raw_type {
    using type = uint4;
};
template <> struct raw_type<double, 1> {
    using type = double;
};
template <> struct raw_type<float, 1> {
    using type = float;
};
template <> struct raw_type<f16, 1> {
    using type = unsigned short;
};
template <> struct raw_type<bf16, 1> {
    using type = unsigned short;
};
template <> struct raw_type<f16, 2> {
    using type = unsigned;
};
template <> struct raw_type<bf16, 2> {
    using type = unsigned;
};
template <typename T, int V> using raw = typename raw_type<T, V>::type;

__device__ __forceinline__ float2 pair_of(unsigned bits, f16)
{
    return __half22float2(*reinterpret_cast<const __half2 *>(&bits));
}

/* A bf16 is the upper half of a float. */
__device__ __forceinline__ float2 pair_of(unsigned bits, bf16)
{
    return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u));
}

__device__ __forceinline__ unsigned bits_of(float low, float high, f16)
{
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const unsigned *>(&pair);
}

__device__ __forceinline__ unsigned bits_of(float low, float high, bf16)
{
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const unsigned *>(&pair);
}

template <typename T, int V> __device__ __forceinline__ void unpack(const raw<T, V> &vector, compute<T> (&values)[V])
{
    if constexpr (V == 1) {
        if constexpr (sizeof(T) == 2)
            values[0] = pair_of(vector, T()).x;
        else
            values[0] = vector;
    } else if constexpr (V * sizeof(T) == 4) {
        const float2 pair = pair_of(vector, T());
        values[0] = pair.x;
        values[1] = pair.y;
    } else if constexpr (sizeof(T) == 2) {
        const unsigned words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 pair = pair_of(words[i], T());
            values[2 * i] = pair.x;
            values[2 * i + 1] = pair.y;
        }
    } else if constexpr (sizeof(T) == 4) {
        values[0] = __uint_as_float(vector.x);
        values[1] = __uint_as_float(vector.y);
        values[2] = __uint_as_float(vector.z);
        values[3] = __uint_as_float(vector.w);
    } else {
        values[0] = __hiloint2double((int)vector.y, (int)vector.x);
        values[1] = __hiloint2double((int)vector.w, (int)vector.z);
    }
}

template <typename T, int V> __device__ __forceinline__ raw<T, V> make_vector(const compute<T> (&values)[V])
{
    if constexpr (V == 1) {
        if constexpr (sizeof(T) == 2)
            return (unsigned short)bits_of(values[0], 0.0f, T());
        else
            return values[0];
    } else if constexpr (V * sizeof(T) == 4) {
        return bits_of(values[0], values[1], T());
    } else if constexpr (sizeof(T) == 2) {
        return make_uint4(bits_of(values[0], values[1], T()), bits_of(values[2], values[3], T()),
                          bits_of(values[4], values[5], T()), bits_of(values[6], values[7], T()));
    } else if constexpr (sizeof(T) == 4) {
        return make_uint4(__float_as_uint(values[0]), __float_as_uint(values[1]), __float_as_uint(values[2]),
                          __float_as_uint(values[3]));
    } else {
        return make_uint4((unsigned)__double2loint(values[0]), (unsigned)__double2hiint(values[0]),
                          (unsigned)__double2loint(values[1]), (unsigned)__double2hiint(values[1]));
    }
}

/* A vector is worked on in parts of four values where those of eight would be as many registers as two vectors more. */
constexpr int values_a_part = 4;

/* Part `part` of H values. */
template <typename T, int V, int H>
__device__ __forceinline__ void unpack_part(const uint4 &vector, int part, float (&values)[H])
{
    if constexpr (H == V) {
        unpack<T, V>(vector, values);
    } else {
        const float2 low = pair_of(part == 0 ? vector.x : vector.z, T()),
                     high = pair_of(part == 0 ? vector.y : vector.w, T());
        values[0] = low.x;
        values[1] = low.y;
        values[2] = high.x;
        values[3] = high.y;
    }
}
template <typename T, int V, int H>
__device__ __forceinline__ void pack_part(uint4 &vector, int part, const float (&values)[H])
{
    if constexpr (H == V) {
        vector = make_vector<T, V>(values);
    } else {
        (part == 0 ? vector.x : vector.z) = bits_of(values[0], values[1], T());
        (part == 0 ? vector.y : vector.w) = bits_of(values[2], values[3], T());
    }
}

template <typename T, int V> __device__ __forceinline__ raw<T, V> zero_vector()
{
    const compute<T> zeros[V] = {};
    return make_vector<T, V>(zeros);
}

/* Reads past the L1: what a block reads it reads once. Not the read-only path, since outputs may be written in place.
 */
template <typename T, int V> __device__ __forceinline__ raw<T, V> load_vector(const char *data, int64_t element)
{
    const T *address = reinterpret_cast<const T *>(data) + element;
    if constexpr (V > 1) {
        uint4 value;
        NORMFUSE_LOAD_UINT4(value, address);
        return value;
    } else {
        return *reinterpret_cast<const raw<T, V> *>(address);
    }
}

/* Where it is wanted, without a branch. */
template <typename T, int V>
__device__ __forceinline__ void load_vector_where(bool wanted, raw<T, V> &vector, const char *data)
{
    if constexpr (V > 1)
        load_uint4_where(wanted, vector, data);
    else if (wanted)
        vector = load_vector<T, V>(data, 0);
}

/* Results are not read again soon: streaming stores gained 5 % over plain ones in whole-tensor copies. */
template <typename T, int V> __device__ __forceinline__ void store_vector(char *data, int64_t element, raw<T, V> value)
{
    T *address = reinterpret_cast<T *>(data) + element;
    __stcs(reinterpret_cast<raw<T, V> *>(address), value);
}

/* Of a vector that is shared with others, or that the tensor's end cuts, elements [begin, end); the others of `fill`.
 */
template <typename T> __device__ __forceinline__ uint4 load_range(const char *data, int begin, int end, uint4 fill)
{
    constexpr int V = 16 / (int)sizeof(T);
    /* From the last to the first, each pushing the others along: a vector in registers has no places to count through.
     */
#pragma unroll 1
    for (int i = V - 1; i >= 0; i--) {
        const bool own = i >= begin && i < end;
        if constexpr (sizeof(T) == 2) {
            const unsigned value = own ? load_vector<T, 1>(data, i) : fill.w >> 16;
            fill = make_uint4(fill.x << 16 | value, __funnelshift_l(fill.x, fill.y, 16),
                              __funnelshift_l(fill.y, fill.z, 16), __funnelshift_l(fill.z, fill.w, 16));
        } else {
            const unsigned value = own ? __float_as_uint(load_vector<T, 1>(data, i)) : fill.w;
            fill = make_uint4(value, fill.x, fill.y, fill.z);
        }
    }
    return fill;
}

/* Never an element of others: someone else may be writing it. */
template <typename T> __device__ __forceinline__ void store_range(char *data, uint4 vector, int begin, int end)
{
    constexpr int V = 16 / (int)sizeof(T);
#pragma unroll 1
    for (int i = 0; i < V; i++) {
        if constexpr (sizeof(T) == 2) {
            if (i >= begin && i < end)
                store_vector<T, 1>(data, i, (unsigned short)vector.x);
            vector = make_uint4(__funnelshift_r(vector.x, vector.y, 16), __funnelshift_r(vector.y, vector.z, 16),
                                __funnelshift_r(vector.z, vector.w, 16), vector.w >> 16);
        } else {
            if (i >= begin && i < end)
                store_vector<T, 1>(data, i, __uint_as_float(vector.x));
            vector = make_uint4(vector.y, vector.z, vector.w, 0);
        }
    }
}

/* What layout.h places in dynamic shared memory. */
template <typename T> __device__ __forceinline__ T *in_shared(uint4 *dynamic, int bytes)
{
    return reinterpret_cast<T *>(reinterpret_cast<char *>(dynamic) + bytes);
}

/* What a thread reads once, in registers, K vectors on their way at a time: request(vector, wanted) requests the next
 * one, work(vector) is what it is for. Of short blocks that begin quickly: affine 64x256x64x64 131 us, by pipelines in
 * shared memory 137. */
template <int K, typename Vector, typename Request>
__device__ __forceinline__ void request_first(Vector (&vectors)[K], int count, Request &request)
{
#pragma unroll
    for (int k = 0; k < K; k++) {
        vectors[k] = Vector();
        request(vectors[k], k < count);
    }
}
template <int K, typename Vector, typename Request, typename Work>
__device__ __forceinline__ void walk_passing(Vector (&vectors)[K], int count, Request &request, Work work)
{
#pragma unroll 1
    for (int left = count; left > 0; left -= K) {
#pragma unroll
        for (int k = 0; k < K; k++) {
            if (k >= left)
                break;
            work(vectors[k]);
        }
        if (left > K) {
#pragma unroll
            for (int k = 0; k < K; k++)
                request(vectors[k], k + K < left);
        }
    }
}

/* ---- single values of any dtype --------------------------------------------------------------------------------- */

/* Rounds once, whatever R. */
template <typename R> __device__ __forceinline__ void store_value(char *data, int64_t element, int type, R value)
{
    /* Asked one after the other: of a switch the compiler makes a jump by a table, for which a warp waits longer. */
    if (type == NORMFUSE_F32) {
        reinterpret_cast<float *>(data)[element] = (float)value;
        return;
    }
    make_opaque(type);
    if (type == NORMFUSE_F64) {
        reinterpret_cast<double *>(data)[element] = (double)value;
        return;
    }
    make_opaque(type);
    if (type == NORMFUSE_F16) {
        if constexpr (sizeof(R) == 8)
            reinterpret_cast<__half *>(data)[element] = __double2half(value);
        else
            reinterpret_cast<__half *>(data)[element] = __float2half_rn(value);
    } else {
        if constexpr (sizeof(R) == 8)
            reinterpret_cast<__nv_bfloat16 *>(data)[element] = __double2bfloat16(value);
        else
            reinterpret_cast<__nv_bfloat16 *>(data)[element] = __float2bfloat16_rn(value);
    }
}

template <typename R>
__device__ __forceinline__ void write_parameter(const normfuse_parameter &p, int64_t n, int64_t c, R value)
{
    if (p.data)
        store_value<R>(p.data, n * p.batch + c * p.channel, p.type, value);
}

/* An element of a parameter as it is in memory: requested now, made a number of once it is needed, so that several are
 * waited for at once. */
template <typename R> struct bits_type {
    using type = unsigned;
};
template <> struct bits_type<double> {
    using type = unsigned long long;
};
template <typename R> using bits = typename bits_type<R>::type;

template <typename R> __device__ __forceinline__ bits<R> request_bits(const normfuse_parameter &p, int64_t element)
{
    bits<R> found;
    if (p.type == NORMFUSE_F32)
        found = __ldca(reinterpret_cast<const unsigned *>(p.data) + element);
    else if (p.type != NORMFUSE_F64)
        found = __ldca(reinterpret_cast<const unsigned short *>(p.data) + element);
    else if constexpr (sizeof(R) == 8)
        found = __ldca(reinterpret_cast<const unsigned long long *>(p.data) + element);
    else /* no use to keep more of it than R has */
        found = __float_as_uint((float)__ldca(reinterpret_cast<const double *>(p.data) + element));
    return found;
}

template <typename R> __device__ __forceinline__ R receive(bits<R> found, int type)
{
    if constexpr (sizeof(R) == 8)
        if (type == NORMFUSE_F64)
            return __longlong_as_double((int64_t)found);
    return (R)single_of<NORMFUSE_F16, NORMFUSE_BF16>((unsigned)found, (unsigned)found, type);
}

/* 2^byte_bits bytes an element. */
__device__ __forceinline__ int byte_bits(int type)
{
    return type == NORMFUSE_F64 ? 3 : type == NORMFUSE_F32 ? 2 : 1;
}

/* A parameter by loads that no branch surrounds: at a branch's end what was loaded in it is waited for, so that parameters
 * requested one after the other are as many ways to memory and back. Nothing where there is no parameter. */
struct requested_value {
    unsigned low, high;
};
__device__ __forceinline__ requested_value request_at_once(const normfuse_parameter &p, int64_t element,
                                                           bool wanted = true)
{
    requested_value found = {0, 0};
    const int type = wanted && p.data ? p.type : -1;
    const char *const address = p.data + (element << byte_bits(type));
    load_parameter<NORMFUSE_F32, NORMFUSE_F64>(found.low, found.high, address, type);
    return found;
}
/* Of sample n and channel, or norm group, c. */
__device__ __forceinline__ requested_value request_parameter(const normfuse_parameter &p, int64_t n, int64_t c,
                                                             bool wanted = true)
{
    return request_at_once(p, n * p.batch + c * p.channel, wanted);
}
template <typename R> __device__ __forceinline__ R receive(const requested_value &found, int type)
{
    if (type == NORMFUSE_F64)
        return (R)__hiloint2double((int)found.high, (int)found.low);
    return (R)single_of<NORMFUSE_F16, NORMFUSE_BF16>(found.low, found.high, type);
}

/* By loads in branches: each is waited for before the next one is requested, so that they come after what was requested
 * before them. Types are asked one after the other, as above. */
template <typename R> __device__ __forceinline__ R load_value(const char *data, int64_t element, int type)
{
    if (type == NORMFUSE_F32)
        return (R) reinterpret_cast<const float *>(data)[element];
    make_opaque(type);
    if (type == NORMFUSE_F64)
        return (R) reinterpret_cast<const double *>(data)[element];
    const unsigned found = reinterpret_cast<const unsigned short *>(data)[element];
    return (R)single_of<NORMFUSE_F16, NORMFUSE_BF16>(found, found, type);
}

template <typename R>
__device__ __forceinline__ R parameter(const normfuse_parameter &p, int64_t n, int64_t c, R absent)
{
    return p.data ? load_value<R>(p.data, n * p.batch + c * p.channel, p.type) : absent;
}

#endif
