/* SPDX-License-Identifier: MIT
 *
 * activation.cuh - the activations and their derivatives; docs/numerics.md has their errors. */
#ifndef NORMFUSE_CUDA_ACTIVATION_CUH
#define NORMFUSE_CUDA_ACTIVATION_CUH

#include "body.cuh"
#include "vector.cuh"

__device__ __forceinline__ double reciprocal(double x)
{
    return 1.0 / x;
}

template <bool fast> __device__ __forceinline__ float exponential(float z)
{
    return fast ? __expf(z) : expf(z);
}
template <bool fast> __device__ __forceinline__ double exponential(double z)
{
    return exp(z);
}

/* 1/(1 + e^-z). Where the result is stored in 16 bits the hardware's tanh is good enough (absolute error 2^-11). */
template <bool fast, typename R> __device__ __forceinline__ R sigmoid(R z)
{
    if constexpr (fast)
        return fmaf(0.5f, fast_tanh(0.5f * z), 0.5f);
    else
        return reciprocal(R(1) + exponential<fast>(-z));
}

/* Where the result is stored in 16 bits: below -1/8 by e^z - 1, above it by Taylor's polynomial; relative error 2^-18.
 */
template <bool fast> __device__ __forceinline__ float exponential_less_1(float z)
{
    if constexpr (fast) {
        const float near_zero = z * fmaf(z, fmaf(z, fmaf(z, 1.0f / 24.0f, 1.0f / 6.0f), 0.5f), 1.0f);
        const float far = __expf(z) - 1.0f;
        return z < -0.125f ? far : near_zero;
    } else {
        return expm1f(z);
    }
}
template <bool fast> __device__ __forceinline__ double exponential_less_1(double z)
{
    return expm1(z);
}

/* The slope of softplus, a sigmoid, and tanh(softplus(z)) without cancellation: from e = e^z they are e / (1 + e) and
 * w / (w + 2), w = e (e + 2). Beyond 20 both are 1. */
template <typename R> struct softplus {
    R slope, tanh;
};
template <bool fast, typename R> __device__ __forceinline__ softplus<R> softplus_of(R z)
{
    const R e = exponential<fast>(min(z, R(20))), w = e * (e + R(2));
    return {e * reciprocal(e + R(1)), w * reciprocal(w + R(2))};
}

/* The normal distribution, as exact in its lower tail, where 1 + erf would cancel, and its density. Where results are
 * stored in 16 bits the tail is e^(-z^2/2) t P(t), t = 1 / (1 + 0.32 |z|): relative error of t P(t) 2^-16.6 up to 14.
 */
template <typename R> struct normal {
    R cumulative, density;
};
template <bool fast> __device__ __forceinline__ normal<float> normal_of(float z)
{
    if constexpr (fast) {
        const float t = reciprocal(fmaf(fabsf(z), 0.32f, 1.0f)), e = __expf(-0.5f * z * z);
        float p = fmaf(t, -0.06585629f, 0.13672779f);
        p = fmaf(p, t, 0.05300246f);
        p = fmaf(p, t, 0.12115609f);
        p = fmaf(p, t, 0.12732278f);
        p = fmaf(p, t, 0.12764212f);
        const float tail = p * t * e;
        return {z < 0.0f ? tail : 1.0f - tail, 0.39894228f * e};
    } else {
        return {0.5f * erfcf(z * -0.70710678f), 0.39894228f * expf(-0.5f * z * z)};
    }
}
template <bool fast> __device__ __forceinline__ normal<double> normal_of(double z)
{
    return {0.5 * erfc(z * -0.7071067811865476), 0.3989422804014327 * exp(-0.5 * z * z)};
}

__device__ __forceinline__ double relu_of(double z)
{
    return z > 0.0 ? z : z != z ? z : 0.0;
}

__device__ __forceinline__ double min_with_6(double z)
{
    return z > 6.0 ? 6.0 : z;
}

/* gelu_tanh is z sigmoid(2 q(z)), since (1 + tanh q)/2 = sigmoid(2 q). */
template <typename R> struct gelu_tanh_constants {
    static constexpr R linear = R(1.5957691216057308), cubic = R(1.5957691216057308 * 0.044715); /* 2 sqrt(2/pi) */
};

/* What few networks have. No value is found under a condition, here and below: it would be a branch for each element,
 * with which backwards of hardswish took up to 1.5 times those of relu. */
template <bool fast, typename R, int V>
static __device__ __forceinline__ void activate_rare(R (&z)[V], int activation, R p)
{
    switch (activation) {
    case NORMFUSE_SILU:
#pragma unroll
        for (int i = 0; i < V; i++)
            z[i] *= sigmoid<fast>(z[i]);
        break;
    case NORMFUSE_GELU:
#pragma unroll
        for (int i = 0; i < V; i++)
            z[i] *= normal_of<fast>(z[i]).cumulative;
        break;
    case NORMFUSE_GELU_TANH:
#pragma unroll
        for (int i = 0; i < V; i++) {
            using k = gelu_tanh_constants<R>;
            z[i] *= sigmoid<fast>(z[i] * (k::linear + k::cubic * z[i] * z[i]));
        }
        break;
    case NORMFUSE_ELU:
#pragma unroll
        for (int i = 0; i < V; i++)
            z[i] = fma(p, exponential_less_1<fast>(fmin(z[i], R(0))), relu_of(z[i]));
        break;
    default: /* mish */
#pragma unroll
        for (int i = 0; i < V; i++)
            z[i] *= softplus_of<fast>(z[i]).tanh;
    }
}

/* g *= act'(z) */
template <bool fast, typename R, int V>
static __device__ __forceinline__ void differentiate_rare(R (&g)[V], const R (&z)[V], int activation, R p)
{
    switch (activation) {
    case NORMFUSE_SILU:
#pragma unroll
        for (int i = 0; i < V; i++) {
            const R s = sigmoid<fast>(z[i]);
            g[i] *= s * (R(1) + z[i] * (R(1) - s));
        }
        break;
    case NORMFUSE_GELU:
#pragma unroll
        for (int i = 0; i < V; i++) {
            const normal<R> of = normal_of<fast>(z[i]);
            g[i] *= of.cumulative + z[i] * of.density;
        }
        break;
    case NORMFUSE_GELU_TANH:
#pragma unroll
        for (int i = 0; i < V; i++) {
            using k = gelu_tanh_constants<R>;
            /* Beyond 12 the derivative is 0 or 1, and the terms of an infinity would be 0 times infinity. */
            const R at_most_12 = z[i] > R(12) ? R(12) : z[i], near_zero = at_most_12 < R(-12) ? R(-12) : at_most_12;
            const R square = near_zero * near_zero, s = sigmoid<fast>(near_zero * (k::linear + k::cubic * square));
            g[i] *= s + near_zero * s * (R(1) - s) * (k::linear + R(3) * k::cubic * square);
        }
        break;
    case NORMFUSE_ELU:
#pragma unroll
        for (int i = 0; i < V; i++) {
            const R below = p * exponential<fast>(z[i] > R(0) ? R(0) : z[i]);
            g[i] *= z[i] > R(0) ? R(1) : below;
        }
        break;
    default: /* mish */
#pragma unroll
        for (int i = 0; i < V; i++) {
            const softplus<R> of = softplus_of<fast>(z[i]);
            g[i] *= of.tanh + z[i] * of.slope * (R(1) - of.tanh * of.tanh);
        }
    }
}

/* The same of doubles, of single elements and in loops over all vectors that a thread holds by functions that are
 * called: these loops are unrolled, and would be several times as long. Others have them in place, since what a called
 * function may not touch goes to memory right after it was loaded, so that nothing else is requested before it has
 * come. A struct stays in registers, an array would not. */
template <typename R, int V> struct values_of {
    R at[V];
};
template <typename R, int V> constexpr bool in_place = V > 1 && sizeof(R) == 4;
/* Values of a call of these: doubles, whose functions are long, have one. */
template <typename R, int V> constexpr int at_a_time = sizeof(R) == 4 ? V : 1;
template <bool fast, typename R, int V>
static __device__ __noinline__ values_of<R, V> activated(values_of<R, V> of, int activation, R p)
{
    activate_rare<fast>(of.at, activation, p);
    return of;
}
template <bool fast, typename R, int V>
static __device__ __noinline__ values_of<R, V> differentiated(values_of<R, V> by, values_of<R, V> at, int activation,
                                                              R p)
{
    differentiate_rare<fast>(by.at, at.at, activation, p);
    return by;
}

/* `others`: the loops of choose_activation are those of all activations. */
template <int value, bool others = false> struct chosen_activation {
    static constexpr int constant = value;
    static constexpr bool all = others;
    static __device__ __forceinline__ int of(int otherwise)
    {
        return value >= 0 ? value : otherwise;
    }
};

/* work(chosen_activation()): with a loop of its own for those that networks have most; leaky_relu and hardswish are in
 * relu's. `all`: of the others, too; relu6 is among these, since relu's loop would spill with it. */
template <bool all, typename Work> __device__ __forceinline__ void choose_activation(int activation, Work work)
{
    if (activation == NORMFUSE_IDENTITY)
        work(chosen_activation<NORMFUSE_IDENTITY>());
    else if (activation == NORMFUSE_SILU)
        work(chosen_activation<NORMFUSE_SILU>());
    else if (!all || activation == NORMFUSE_RELU || activation == NORMFUSE_LEAKY_RELU ||
             activation == NORMFUSE_HARDSWISH)
        work(chosen_activation<NORMFUSE_RELU, all>());
    else
        work(chosen_activation<-1>());
}

/* The same; prelu, whose slopes are a channel's, has a loop of its own. `one`: all others have one. */
template <bool one = false, typename Work>
__device__ __forceinline__ void choose_any_activation(int activation, Work work)
{
    if (activation == NORMFUSE_PRELU)
        work(chosen_activation<NORMFUSE_PRELU>());
    else if constexpr (one)
        work(chosen_activation<-1>());
    else
        choose_activation<true>(activation, work);
}

/* SiLU of 16-bit results is found from half of z: z sigmoid(z) = h tanh(h) + h with h = z/2. The halving goes into the
 * coefficients, and of five instructions a value three are left; `dy` that has been through the
 * derivative is then twice as large, for which slopes, already half, make up. */
template <bool fast> __device__ __forceinline__ bool takes_half(int activation)
{
    return fast && activation == NORMFUSE_SILU;
}

template <bool fast, bool rolled = true, typename Chosen, typename R, int V>
__device__ __forceinline__ void activate(R (&z)[V], Chosen, int activation, R p)
{
    if constexpr (Chosen::constant == NORMFUSE_SILU) {
#pragma unroll
        for (int i = 0; i < V; i++) {
            if constexpr (fast)
                z[i] = fmaf(z[i], fast_tanh(z[i]), z[i]);
            else
                z[i] *= sigmoid<fast>(z[i]);
        }
    } else if constexpr (Chosen::constant != NORMFUSE_IDENTITY) {
        if (sizeof(R) == 8 && activation == NORMFUSE_IDENTITY)
            return;
        if (activation == NORMFUSE_RELU) {
#pragma unroll
            for (int i = 0; i < V; i++)
                z[i] = relu_of(z[i]);
        } else if (!(Chosen::constant == NORMFUSE_RELU && Chosen::all) && activation == NORMFUSE_RELU6) {
#pragma unroll
            for (int i = 0; i < V; i++)
                z[i] = min_with_6(relu_of(z[i]));
        } else if (activation == NORMFUSE_LEAKY_RELU) {
#pragma unroll
            for (int i = 0; i < V; i++)
                z[i] = z[i] > R(0) ? z[i] : p * z[i];
        } else if (Chosen::constant == NORMFUSE_RELU || activation == NORMFUSE_HARDSWISH) {
#pragma unroll
            for (int i = 0; i < V; i++) {
                const R clipped = fmin(fmax(z[i] + R(3), R(0)), R(6));
                z[i] = z[i] * clipped * R(1.0 / 6.0);
            }
        } else if constexpr (rolled && in_place<R, V>) {
            activate_rare<fast>(z, activation, p);
        } else {
            constexpr int W = at_a_time<R, V>;
#pragma unroll
            for (int k = 0; k < V; k += W) {
                values_of<R, W> of;
                each<W>([&](int i) { of.at[i] = z[k + i]; });
                of = activated<fast>(of, activation, p);
                each<W>([&](int i) { z[k + i] = of.at[i]; });
            }
        }
    }
}

/* g *= act'(z) */
template <bool fast, bool rolled = true, typename Chosen, typename R, int V>
__device__ __forceinline__ void differentiate_by(R (&g)[V], const R (&z)[V], Chosen, int activation, R p)
{
    if constexpr (Chosen::constant == NORMFUSE_SILU) {
#pragma unroll
        for (int i = 0; i < V; i++) {
            if constexpr (fast) {
                /* 2 silu'(2h) = (1 + t) (1 + h (1 - t)) */
                const R t = fast_tanh(z[i]), part = fmaf(-z[i], t, z[i] + 1.0f);
                g[i] *= fmaf(part, t, part);
            } else {
                const R s = sigmoid<fast>(z[i]);
                g[i] *= s * (R(1) + z[i] * (R(1) - s));
            }
        }
    } else if constexpr (Chosen::constant != NORMFUSE_IDENTITY) {
        /* In relu's loop relu6 has a branch of its own, elsewhere it is a second step of relu: the other way round
         * registers spill. */
        constexpr bool apart = Chosen::constant == NORMFUSE_RELU;
        if (sizeof(R) == 8 && activation == NORMFUSE_IDENTITY)
            return;
        if (activation == NORMFUSE_RELU || activation == NORMFUSE_LEAKY_RELU ||
            (!apart && activation == NORMFUSE_RELU6)) {
            const R slope = activation == NORMFUSE_LEAKY_RELU ? p : R(0);
#pragma unroll
            for (int i = 0; i < V; i++)
                g[i] = z[i] <= R(0) ? slope * g[i] : g[i];
            if (Chosen::constant < 0 && activation == NORMFUSE_RELU6) {
#pragma unroll
                for (int i = 0; i < V; i++)
                    g[i] = z[i] >= R(6) ? R(0) : g[i];
            }
        } else if (apart && activation == NORMFUSE_RELU6) {
#pragma unroll
            for (int i = 0; i < V; i++)
                g[i] = z[i] <= R(0) || z[i] >= R(6) ? R(0) : g[i];
        } else if (Chosen::constant == NORMFUSE_RELU || activation == NORMFUSE_HARDSWISH) {
#pragma unroll
            for (int i = 0; i < V; i++) {
                const R rising = (R(2) * z[i] + R(3)) * R(1.0 / 6.0), above = z[i] < R(3) ? rising : R(1);
                g[i] *= z[i] <= R(-3) ? R(0) : above; /* of z above -3 */
            }
        } else if constexpr (rolled && in_place<R, V>) {
            differentiate_rare<fast>(g, z, activation, p);
        } else {
            constexpr int W = at_a_time<R, V>;
#pragma unroll
            for (int k = 0; k < V; k += W) {
                values_of<R, W> by, at;
                each<W>([&](int i) {
                    by.at[i] = g[k + i];
                    at.at[i] = z[k + i];
                });
                by = differentiated<fast>(by, at, activation, p);
                each<W>([&](int i) { g[k + i] = by.at[i]; });
            }
        }
    }
}

#endif
