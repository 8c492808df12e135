/* SPDX-License-Identifier: MIT
 *
 * algebra.cuh - what a value is weighed by, and the statistics of norm groups: the same in every body. A body defines, ahead
 * of this header, how many sets of weights a thread has and which of them an element takes:
 *   weight_sets, weight_values, weight_set(ky, kx), weight_value(j)
 *   centre_sets, centre_values, many_centres: the same of means, where an element's is not that of its norm group
 *   many_rstds: a thread has more than one rstd
 * and a place, `Place` here, that knows `a`, the arguments; channel(set, i), the channel of a set's i-th weight; has_weights(set). */
#ifndef NORMFUSE_DEVICE_ALGEBRA_CUH
#define NORMFUSE_DEVICE_ALGEBRA_CUH

using raw_vector = raw<type, vector>;
using raw_element = raw<type, 1>;

/* As they are in memory. Those of channels are requested once, those of samples for each sample. */
struct requested_weights {
    requested<weight, weight_values> of_weight[weight_sets];
    requested<bias, weight_values> of_bias[weight_sets];
    requested<slope, weight_values> of_slope[weight_sets];
    requested<scale, weight_values> of_scale[weight_sets];
    requested<shift, weight_values> of_shift[weight_sets];
    requested<pre_bias, weight_values> of_pre_bias[weight_sets];
    requested<running_mean, weight_values> of_mean[weight_sets];
    requested<running_var, weight_values> of_variance[weight_sets];

    template <typename Place> __device__ __forceinline__ void request_of_channels(const Place &at, int64_t sample)
    {
        const normfuse_call_arguments &call = at.a.call;
        each<weight_sets>([&](int set) {
            const auto c = [&](int i) { return at.channel(set, i); };
            const bool wanted = at.has_weights(set);
            of_weight[set].request(call.weight, sample, c, wanted);
            of_bias[set].request(call.bias, sample, c, wanted);
            of_slope[set].request(call.slope, 0, c, wanted);
            if constexpr (statistics == NORMFUSE_STATISTICS_RUNNING) {
                of_mean[set].request(call.running_mean, 0, c, wanted);
                of_variance[set].request(call.running_var, 0, c, wanted);
            }
        });
    }
    template <typename Place>
    __device__ __forceinline__ void request_of_sample(const Place &at, int64_t sample, bool wanted_at_all)
    {
        const normfuse_call_arguments &call = at.a.call;
        each<weight_sets>([&](int set) {
            const auto c = [&](int i) { return at.channel(set, i); };
            const bool wanted = wanted_at_all && at.has_weights(set);
            of_scale[set].request(call.scale, sample, c, wanted);
            of_shift[set].request(call.shift, sample, c, wanted);
            of_pre_bias[set].request(call.pre_bias, sample, c, wanted);
        });
    }
};

/* Coefficients of each weight: z = e * by + offset, where e = x - centre, exactly e = (x - centre) - rest. p: prelu's slope. */
struct coefficients {
    R by[weight_sets][weight_values], offset[weight_sets][weight_values], p[weight_sets][weight_values];

    /* Coefficients of what activations take for z. */
    __device__ __forceinline__ void halve()
    {
        each<weight_sets>([&](int set) {
            each<weight_values>([&](int i) {
                by[set][i] *= half;
                offset[set][i] *= half;
            });
        });
    }
};
struct centres {
    R near[centre_sets][centre_values], rest[centre_sets][centre_values];

    /* u less the mean, but for `rest` where that is not a channel's own. */
    __device__ __forceinline__ R of(R x, int ky, int kx, int j) const
    {
        if constexpr (mean_square)
            return x;
        const R distance = x - near[centre_set(ky, kx)][centre_value(j)];
        return centre_has_bias ? distance - rest[centre_set(ky, kx)][centre_value(j)] : distance;
    }
    __device__ __forceinline__ R left(int set, int value) const
    {
        return centre_has_bias ? R(0) : rest[many_centres ? set : 0][many_centres ? value : 0];
    }
    /* mean - bias as two numbers. */
    __device__ __forceinline__ void set(int at, int value, double mean, R of_bias)
    {
        if constexpr (sizeof(R) == 8) {
            const R sum = mean - of_bias, part = sum - mean;
            near[at][value] = sum;
            rest[at][value] = (mean - (sum - part)) + (-of_bias - part);
        } else {
            const double exact_centre = mean - (double)of_bias;
            near[at][value] = (R)exact_centre;
            rest[at][value] = (R)(exact_centre - (double)near[at][value]);
        }
    }
};

/* rstd: of the norm group, or of each weight. */
template <int sets, int values>
__device__ __forceinline__ void weigh(const requested_weights &from, const centres &centre,
                                      const R (&rstd)[sets][values], const normfuse_call_arguments &call,
                                      coefficients &of)
{
    constexpr bool many = sets * values > 1;
    each<weight_sets>([&](int set) {
        R w[weight_values], b[weight_values], more[weight_values], by_shift[weight_values];
        from.of_weight[set].receive(w, R(1));
        from.of_bias[set].receive(b, R(0));
        from.of_scale[set].receive(more, R(0));
        from.of_shift[set].receive(by_shift, R(0));
        from.of_slope[set].receive(of.p[set], sizeof(R) == 8 ? (R)call.act_param_of_double : (R)call.act_param);
        each<weight_values>([&](int i) {
            if constexpr (is_modulated) {
                more[i] += R(1);
                w[i] *= more[i];
                b[i] = b[i] * more[i] + by_shift[i];
            }
            const R slope_of = has_statistics || statistics == NORMFUSE_STATISTICS_RUNNING
                                   ? w[i] * rstd[many ? set : 0][many ? i : 0]
                                   : w[i];
            of.by[set][i] = slope_of;
            of.offset[set][i] = mean_square ? b[i] : fma(-centre.left(set, i), slope_of, b[i]);
        });
    });
}

/* One of the norm group, or one of each weight. */
using rstds = R[many_rstds ? weight_sets : 1][many_rstds ? weight_values : 1];

/* Running statistics of a channel, requested while the norm finds its own: two latencies of the memory else. */
struct running_statistics {
    requested<updates_running ? running_mean : 0, 1> of_mean;
    requested<updates_running ? running_var : 0, 1> of_variance;

    __device__ __forceinline__ void request(const normfuse_call_arguments &call, int channel, bool wanted)
    {
        of_mean.request(call.running_mean, 0, [&](int) { return channel; }, wanted);
        of_variance.request(call.running_var, 0, [&](int) { return channel; }, wanted);
    }
};

/* The running statistics take the variance over count - 1. */
template <int = 0>
__device__ __forceinline__ void store_statistics(const normfuse_call_arguments &call, int64_t sample, int group,
                                                 int channel, double mean_of, R variance, R rstd_of,
                                                 const running_statistics &running)
{
    if constexpr (keeps_statistics) {
        double *const to = call.statistics + (sample * call.channel_groups + group) * 3;
        to[0] = mean_of;
        to[1] = (double)rstd_of;
        to[2] = (double)variance * call.unbiased;
    }
    store_parameter<mean>(call.mean, sample, group, mean_of);
    store_parameter<rstd>(call.rstd, sample, group, rstd_of);
    if constexpr (updates_running) {
        const R momentum = (R)call.momentum, keep = R(1) - momentum;
        R old_mean[1], old_variance[1];
        running.of_mean.receive(old_mean, R(0));
        running.of_variance.receive(old_variance, R(0));
        const double unbiased = (double)variance * call.unbiased;
        store_parameter<running_mean>(call.running_mean, 0, channel, keep * old_mean[0] + momentum * (R)mean_of);
        store_parameter<running_var>(call.running_var, 0, channel, keep * old_variance[0] + momentum * (R)unbiased);
    }
}

/* Without norm groups: given statistics of channels, or u as it is, or with its bias. */
template <typename Rstds>
__device__ __forceinline__ void receive_given(const requested_weights &weights, const normfuse_call_arguments &call,
                                              centres &centre, Rstds &rstd_of)
{
    if constexpr (statistics == NORMFUSE_STATISTICS_RUNNING) {
        each<weight_sets>([&](int set) {
            double mean_of[weight_values], variance[weight_values];
            R of_bias[weight_values];
            weights.of_mean[set].receive(mean_of, 0.0);
            weights.of_variance[set].receive(variance, 1.0);
            weights.of_pre_bias[set].receive(of_bias, R(0));
            each<weight_values>([&](int i) {
                centre.set(set, i, mean_of[i], centre_has_bias ? of_bias[i] : R(0));
                rstd_of[set][i] = (R)(1.0 / sqrt(variance[i] + call.eps_of_double));
            });
        });
    } else {
        each<centre_sets>([&](int set) {
            R of_bias[weight_values];
            if constexpr (centre_has_bias)
                weights.of_pre_bias[set].receive(of_bias, R(0));
            each<centre_values>([&](int i) {
                centre.near[set][i] = centre_has_bias ? -of_bias[i] : R(0);
                centre.rest[set][i] = R(0);
            });
        });
    }
}

/* ---- values of a vector ------------------------------------------------------------------------------------------- */

/* pre_bias and pre_add, to x. */
__device__ __forceinline__ void add_to_x(R (&numbers)[W], const raw_vector &added, const R (&of_bias)[weight_values])
{
    R more[W];
    if constexpr (pre_bias != 0)
        each<W>([&](int j) { numbers[j] += of_bias[weight_value(j)]; });
    if constexpr (pre_add) {
        unpack<type, W>(added, more);
        each<W>([&](int j) { numbers[j] += more[j]; });
    }
}

/* z of a distance from the centre, with what is added behind the norm; half of it where halves_z. */
__device__ __forceinline__ R z_of(R distance, R by, R offset, const R (&behind)[W], int j)
{
    const R z = fma(distance, by, offset);
    if constexpr (reads_post)
        return halves_z ? fma(behind[j], R(0.5), z) : z + behind[j];
    else
        return z;
}

/* dz from dy; `behind` is y where that is given. on_z(z) before. */
template <typename OnZ>
__device__ __forceinline__ R dz_of(R dy, R distance, R by, R offset, R p, const R (&behind)[W], int j, OnZ on_z)
{
    if constexpr (activation == IDENTITY) {
        return dy;
    } else {
        R z;
        if constexpr (reads_post && from_y)
            z = behind[j];
        else
            z = z_of(distance, by, offset, behind, j);
        on_z(z);
        const R dz = differentiate(dy, z, p);
        return halves_z ? dz * R(0.5) : dz;
    }
}

#endif
