/* SPDX-License-Identifier: MIT
 *
 * parameters.cuh - what channels are weighed by: requested before the vectors of a call and used last. Which there are, and
 * of which type, is in the signature: 0 for none, else 1 + normfuse_type. */
#ifndef NORMFUSE_DEVICE_PARAMETERS_CUH
#define NORMFUSE_DEVICE_PARAMETERS_CUH

#include "vector.cuh"

/* u = x + pre_bias + pre_add is a tensor, or taken as one, and rounded to its type; else the bias is a part of the
 * mean. */
constexpr bool rounds_u = signature::pre_add || signature::stores_u || signature::rounds_pre_bias;
constexpr bool centre_has_bias = signature::pre_bias != 0 && !rounds_u;
constexpr bool is_modulated = signature::scale != 0 || signature::shift != 0;
constexpr bool of_samples = is_modulated || signature::pre_bias != 0 || signature::per_sample; /* some parameter is a sample's own */
constexpr bool reads_post = signature::post_add && !(signature::backward && signature::activation == 0);
__device__ __forceinline__ constexpr int least(int a, int b)
{
    return a < b ? a : b;
}

/* Values of V channels as they are in memory; channel_of(i) is the i-th one's. `packed`: adjacent ones are read in vectors. */
template <int code, int V, bool packed = signature::packed_parameters != 0> struct requested {
    static constexpr int type = code - 1;
    static constexpr int at_once = packed ? least(V, 16 / bytes_of(type)) : 1;
    raw<type, at_once> bits[V / at_once];

    template <typename Channels>
    __device__ __forceinline__ void request(const normfuse_place &of, int64_t sample, Channels channel_of, bool wanted)
    {
        each<V / at_once>([&](int i) {
            const int64_t element = sample * of.sample + (int64_t)channel_of(i * at_once) * of.channel;
            bits[i] = {};
            load_shared_by_many(wanted, bits[i], of.data + element * bytes_of(type));
        });
    }
    template <typename Number> __device__ __forceinline__ void receive(Number (&numbers)[V], Number) const
    {
        each<V / at_once>([&](int i) {
            Number some[at_once];
            unpack<type, at_once>(bits[i], some);
            each<at_once>([&](int j) { numbers[i * at_once + j] = some[j]; });
        });
    }
};
template <int V, bool packed> struct requested<0, V, packed> {
    template <typename Channels>
    __device__ __forceinline__ void request(const normfuse_place &, int64_t, Channels, bool)
    {
    }
    /* The value of a parameter that is absent. */
    template <typename Number> __device__ __forceinline__ void receive(Number (&numbers)[V], Number absent) const
    {
        each<V>([&](int i) { numbers[i] = absent; });
    }
};

/* One value to a parameter's place. */
template <int code, typename Number>
__device__ __forceinline__ void store_parameter(const normfuse_place &to, int64_t sample, int channel, Number value)
{
    if constexpr (code != 0)
        store_number<code - 1>(to.data, sample * to.sample + (int64_t)channel * to.channel, value);
}
template <int code, typename Number>
__device__ __forceinline__ Number load_parameter(const normfuse_place &from, int64_t sample, int channel)
{
    return load_number<code - 1, Number>(from.data, sample * from.sample + (int64_t)channel * from.channel);
}

/* dweight, dbias, dslope: += where the caller accumulates. */
template <int code>
__device__ __forceinline__ void store_gradient(const normfuse_place &to, int64_t sample, int channel, double value,
                                               bool accumulates)
{
    if constexpr (code != 0) {
        if (accumulates)
            value += load_parameter<code, double>(to, sample, channel);
        store_parameter<code>(to, sample, channel, value);
    }
}

#endif
