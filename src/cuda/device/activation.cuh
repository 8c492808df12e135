/* SPDX-License-Identifier: MIT
 *
 * activation.cuh - the activation of a call and its derivative; docs/numerics.md has their errors. */
#ifndef NORMFUSE_DEVICE_ACTIVATION_CUH
#define NORMFUSE_DEVICE_ACTIVATION_CUH

#include "vector.cuh"

/* Numbers of normfuse_activation. */
enum {
    IDENTITY = 0,
    RELU = 1,
    LEAKY_RELU = 2,
    SILU = 3,
    GELU = 4,
    GELU_TANH = 5,
    HARDSWISH = 6,
    ELU = 7,
    MISH = 8,
    RELU6 = 9,
    PRELU = 10
};

/* Results of 16 bits are found by the hardware's fast functions. */
constexpr bool fast = bytes_of(signature::type) == 2;

__device__ __forceinline__ double reciprocal(double x)
{
    return 1.0 / x;
}
__device__ __forceinline__ double fast_tanh(double z)
{
    return tanh(z);
}
__device__ __forceinline__ double relu_of(double z)
{
    return z > 0.0 ? z : z != z ? z : 0.0;
}
__device__ __forceinline__ double min_with_6(double z)
{
    return z > 6.0 ? 6.0 : z;
}
__device__ __forceinline__ float exponential(float z)
{
    return fast ? __expf(z) : expf(z);
}
__device__ __forceinline__ double exponential(double z)
{
    return exp(z);
}

/* 1/(1 + e^-z); absolute error 2^-12 where `fast`. */
__device__ __forceinline__ R sigmoid(R z)
{
    if constexpr (fast)
        return fma(R(0.5), fast_tanh(R(0.5) * z), R(0.5));
    else
        return reciprocal(R(1) + exponential(-z));
}

/* `fast`: below -1/8 by e^z - 1, above it by Taylor's polynomial; relative error 2^-17. */
__device__ __forceinline__ R exponential_less_1(R z)
{
    if constexpr (fast) {
        const R near_zero = z * fma(z, fma(z, fma(z, R(1.0) / R(24.0), R(1.0) / R(6.0)), R(0.5)), R(1.0));
        const R far = exponential(z) - R(1.0);
        return z < R(-0.125) ? far : near_zero;
    } else if constexpr (sizeof(R) == 8) {
        return expm1(z);
    } else {
        return expm1f(z);
    }
}

/* The slope of softplus, a sigmoid, and tanh(softplus(z)) without cancellation: from e = e^z they are e / (1 + e) and
 * w / (w + 2), w = e (e + 2). Beyond 20 both are 1. */
struct softplus {
    R slope, tanh;
};
__device__ __forceinline__ softplus softplus_of(R z)
{
    const R e = exponential(min(z, R(20))), w = e * (e + R(2));
    return {e * reciprocal(e + R(1)), w * reciprocal(w + R(2))};
}

/* The normal distribution, as exact in its lower tail, where 1 + erf would cancel, and its density. Where `fast` the tail is
 * e^(-z^2/2) t P(t), t = 1 / (1 + 0.32 |z|): relative error of t P(t) 2^-16.6 up to 14. */
struct normal {
    R cumulative, density;
};
__device__ __forceinline__ normal normal_of(R z)
{
    if constexpr (fast) {
        const R t = reciprocal(fma(fabs(z), R(0.32), R(1.0))), e = exponential(R(-0.5) * z * z);
        R p = fma(t, R(-0.06585629), R(0.13672779));
        p = fma(p, t, R(0.05300246));
        p = fma(p, t, R(0.12115609));
        p = fma(p, t, R(0.12732278));
        p = fma(p, t, R(0.12764212));
        const R tail = p * t * e;
        return {z < R(0.0) ? tail : R(1.0) - tail, R(0.39894228) * e};
    } else if constexpr (sizeof(R) == 8) {
        return {0.5 * erfc(z * -0.7071067811865476), 0.3989422804014327 * exp(-0.5 * z * z)};
    } else {
        return {(R)0.5f * erfcf(z * -0.70710678f), 0.39894228f * expf(-0.5f * z * z)};
    }
}

/* gelu_tanh is z sigmoid(2 q(z)), since (1 + tanh q)/2 = sigmoid(2 q). */
constexpr R gelu_linear = R(1.5957691216057308), gelu_cubic = R(1.5957691216057308 * 0.044715); /* 2 sqrt(2/pi) */

/* SiLU of 16-bit results is found from half of z: z sigmoid(z) = h tanh(h) + h with h = z/2. The halving goes into the
 * coefficients, and of five instructions a value three are left. */
constexpr bool halves_z = fast && signature::activation == SILU;
constexpr R half = halves_z ? R(0.5) : R(1);

/* act(z), p its parameter or prelu's slope; z is half of it where halves_z. */
__device__ __forceinline__ R activate(R z, R p)
{
    constexpr int activation = signature::activation;
    if constexpr (activation == RELU) {
        return relu_of(z);
    } else if constexpr (activation == LEAKY_RELU || activation == PRELU) {
        return z > R(0) ? z : p * z;
    } else if constexpr (activation == SILU) {
        if constexpr (halves_z)
            return fma(z, fast_tanh(z), z);
        else
            return z * sigmoid(z);
    } else if constexpr (activation == GELU) {
        return z * normal_of(z).cumulative;
    } else if constexpr (activation == GELU_TANH) {
        return z * sigmoid(z * (gelu_linear + gelu_cubic * z * z));
    } else if constexpr (activation == HARDSWISH) {
        return z * fmin(fmax(z + R(3), R(0)), R(6)) * R(1.0 / 6.0);
    } else if constexpr (activation == ELU) {
        return fma(p, exponential_less_1(fmin(z, R(0))), relu_of(z));
    } else if constexpr (activation == MISH) {
        return z * softplus_of(z).tanh;
    } else if constexpr (activation == RELU6) {
        return min_with_6(relu_of(z));
    } else {
        return z;
    }
}

/* dy * act'(z). Where halves_z twice that. No value is found under a condition: it would be a branch for each element. */
__device__ __forceinline__ R differentiate(R dy, R z, R p)
{
    constexpr int activation = signature::activation;
    if constexpr (activation == RELU) {
        return z <= R(0) ? R(0) : dy;
    } else if constexpr (activation == LEAKY_RELU || activation == PRELU) {
        return z <= R(0) ? p * dy : dy;
    } else if constexpr (activation == RELU6) {
        return z <= R(0) || z >= R(6) ? R(0) : dy;
    } else if constexpr (activation == SILU) {
        if constexpr (halves_z) {
            /* 2 silu'(2h) = (1 + t) (1 + h (1 - t)) */
            const R t = fast_tanh(z), part = fma(-z, t, z + R(1));
            return dy * fma(part, t, part);
        } else {
            const R s = sigmoid(z);
            return dy * (s * (R(1) + z * (R(1) - s)));
        }
    } else if constexpr (activation == GELU) {
        const normal of = normal_of(z);
        return dy * (of.cumulative + z * of.density);
    } else if constexpr (activation == GELU_TANH) {
        /* Beyond 12 the derivative is 0 or 1, and the terms of an infinity would be 0 times infinity. */
        const R at_most_12 = z > R(12) ? R(12) : z, near_zero = at_most_12 < R(-12) ? R(-12) : at_most_12;
        const R square = near_zero * near_zero, s = sigmoid(near_zero * (gelu_linear + gelu_cubic * square));
        return dy * (s + near_zero * s * (R(1) - s) * (gelu_linear + R(3) * gelu_cubic * square));
    } else if constexpr (activation == HARDSWISH) {
        const R rising = (R(2) * z + R(3)) * R(1.0 / 6.0), above = z < R(3) ? rising : R(1);
        return dy * (z <= R(-3) ? R(0) : above);
    } else if constexpr (activation == ELU) {
        const R below = p * exponential(z > R(0) ? R(0) : z);
        return dy * (z > R(0) ? R(1) : below);
    } else if constexpr (activation == MISH) {
        const softplus of = softplus_of(z);
        return dy * (of.tanh + z * of.slope * (R(1) - of.tanh * of.tanh));
    } else {
        return dy;
    }
}

#endif
