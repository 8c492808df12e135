/* SPDX-License-Identifier: MIT
 *
 * vector.cuh - the element type of a call, vectors of adjacent elements, and single values of any type. R is what is
 * computed in: double for f64, float for all others. */
#ifndef NORMFUSE_DEVICE_VECTOR_CUH
#define NORMFUSE_DEVICE_VECTOR_CUH

#include "arguments.h"
#include "ptx.cuh"

/* Numbers of normfuse_type. */
enum { F64 = 0, F32 = 1, F16 = 2, BF16 = 3 };

__device__ __forceinline__ constexpr int bytes_of(int type)
{
    return type == F64 ? 8 : type == F32 ? 4 : 2;
}

template <bool first, typename A, typename B> struct choose {
    using type = A;
};
template <typename A, typename B> struct choose<false, A, B> {
    using type = B;
};

using R = choose<signature::type == F64, double, float>::type;

/* work(i) for each i below N, unrolled: what i counts through stays in registers. */
template <int N, typename Work> __device__ __forceinline__ void each(Work work)
{
#pragma unroll
    for (int i = 0; i < N; i++)
        work(i);
}

/* ---- vectors ----------------------------------------------------------------------------------------------------- */

template <int bytes> struct raw_type {
    using type = uint4;
};
template <> struct raw_type<8> {
    using type = uint2;
};
template <> struct raw_type<4> {
    using type = unsigned;
};
template <> struct raw_type<2> {
    using type = unsigned short;
};
/* V elements of this type as they are in memory. */
template <int type, int V> using raw = typename raw_type<V * bytes_of(type)>::type;

template <typename Raw> __device__ __forceinline__ unsigned word(const Raw &of, int i)
{
    if constexpr (sizeof(Raw) == 16)
        return i == 0 ? of.x : i == 1 ? of.y : i == 2 ? of.z : of.w;
    else if constexpr (sizeof(Raw) == 8)
        return i == 0 ? of.x : of.y;
    else
        return of;
}
template <typename Raw> __device__ __forceinline__ void set_word(Raw &of, int i, unsigned value)
{
    if constexpr (sizeof(Raw) == 16)
        (i == 0 ? of.x : i == 1 ? of.y : i == 2 ? of.z : of.w) = value;
    else if constexpr (sizeof(Raw) == 8)
        (i == 0 ? of.x : of.y) = value;
    else
        of = (Raw)value;
}

/* A number of a 16-bit type. */
template <int type> __device__ __forceinline__ float number_of_half(unsigned bits)
{
    if constexpr (type == F16)
        return f16_to_float((unsigned short)bits);
    else
        return __uint_as_float(bits << 16);
}
template <int type> __device__ __forceinline__ unsigned bits_of_pair(float low, float high)
{
    if constexpr (type == F16)
        return bits_of_f16_pair(low, high);
    else
        return bits_of_bf16_pair(low, high);
}

template <int type, int V, typename Number>
__device__ __forceinline__ void unpack(const raw<type, V> &vector, Number (&numbers)[V])
{
    if constexpr (type == F64) {
        each<V>([&](int i) {
            numbers[i] =
                (Number)__hiloint2double((int)word(vector, 2 * i + 1), (int)word(vector, 2 * i));
        });
    } else if constexpr (type == F32) {
        each<V>([&](int i) { numbers[i] = (Number)__uint_as_float(word(vector, i)); });
    } else if constexpr (V == 1) {
        numbers[0] = (Number)number_of_half<type>(vector);
    } else {
        each<V / 2>([&](int i) {
            const unsigned bits = word(vector, i);
            if constexpr (type == F16) {
                const float2 pair = f16_pair(bits);
                numbers[2 * i] = (Number)pair.x;
                numbers[2 * i + 1] = (Number)pair.y;
            } else {
                numbers[2 * i] = (Number)__uint_as_float(bits << 16);
                numbers[2 * i + 1] = (Number)__uint_as_float(bits & 0xffff0000u);
            }
        });
    }
}

template <int type, int V> __device__ __forceinline__ raw<type, V> pack(const R (&numbers)[V])
{
    raw<type, V> vector;
    if constexpr (type == F64) {
        each<V>([&](int i) {
            set_word(vector, 2 * i, (unsigned)__double2loint(numbers[i]));
            set_word(vector, 2 * i + 1, (unsigned)__double2hiint(numbers[i]));
        });
    } else if constexpr (type == F32) {
        each<V>([&](int i) { set_word(vector, i, __float_as_uint(numbers[i])); });
    } else if constexpr (V == 1) {
        vector = (unsigned short)bits_of_pair<type>(numbers[0], 0.0f);
    } else {
        each<V / 2>([&](int i) { set_word(vector, i, bits_of_pair<type>(numbers[2 * i], numbers[2 * i + 1])); });
    }
    return vector;
}

/* Results are not read again soon. */
template <typename Raw> __device__ __forceinline__ void store_whole(char *to, const Raw &vector)
{
    if constexpr (sizeof(Raw) >= 8)
        __stcs(reinterpret_cast<Raw *>(to), vector);
    else
        *reinterpret_cast<Raw *>(to) = vector;
}

/* ---- single values of any type ----------------------------------------------------------------------------------- */

/* Rounded once: what f32 leaves out is kept in its last bit. */
__device__ __forceinline__ unsigned short bits_of_bf16(double value)
{
    const float cut = __double2float_rz(value);
    const unsigned sticky = (double)cut != value && value == value ? 1u : 0u;
    return (unsigned short)bits_of_bf16_pair(__uint_as_float(__float_as_uint(cut) | sticky), 0.0f);
}

template <int type, typename Number>
__device__ __forceinline__ void store_number(char *data, int64_t element, Number value)
{
    if constexpr (type == F64)
        reinterpret_cast<double *>(data)[element] = (double)value;
    else if constexpr (type == F32)
        reinterpret_cast<float *>(data)[element] = (float)value;
    else if constexpr (type == F16 && sizeof(Number) == 8)
        reinterpret_cast<unsigned short *>(data)[element] = bits_of_f16(value);
    else if constexpr (sizeof(Number) == 8)
        reinterpret_cast<unsigned short *>(data)[element] = bits_of_bf16(value);
    else
        reinterpret_cast<unsigned short *>(data)[element] = (unsigned short)bits_of_pair<type>(value, 0.0f);
}

template <int type, typename Number> __device__ __forceinline__ Number load_number(const char *data, int64_t element)
{
    if constexpr (type == F64)
        return (Number) reinterpret_cast<const double *>(data)[element];
    else if constexpr (type == F32)
        return (Number) reinterpret_cast<const float *>(data)[element];
    else
        return (Number)number_of_half<type>(reinterpret_cast<const unsigned short *>(data)[element]);
}

#endif
