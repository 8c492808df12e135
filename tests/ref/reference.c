/* SPDX-License-Identifier: MIT
 *
 * reference.c - see reference.h. Written to be read against the formulas, not to be fast. Sums are made row by row in
 * long double, so that a large set's sum is as good as a small one's. */
#include "reference.h"

#include <math.h>

/* ---- activations ---------------------------------------------------------------------------------------------- */

static const double sqrt_half = 0.70710678118654752440;
static const double sqrt_two_over_pi = 0.79788456080286535588;
static const double one_over_sqrt_two_pi = 0.39894228040143267794;

/* *complement is that of -z. */
static double sigmoid(double z, double *complement)
{
    const double e = exp(-fabs(z)), of_size = 1 / (1 + e), of_negative = e / (1 + e);
    *complement = z >= 0 ? of_negative : of_size;
    return z >= 0 ? of_size : of_negative;
}

/* The standard normal distribution. */
static double normal_cdf(double z)
{
    return 0.5 * erfc(-z * sqrt_half);
}

static double softplus(double z)
{
    return z > 0 ? z + log1p(exp(-z)) : log1p(exp(z));
}

/* x * factor where factor reaches 0 sooner than x reaches infinity. */
static double vanishing(double x, double factor)
{
    return factor == 0 && !isnan(x) ? 0 : x * factor;
}

double reference_default_parameter(int activation)
{
    return activation == NORMFUSE_LEAKY_RELU ? 0.01 : activation == NORMFUSE_ELU ? 1.0 : 0.0;
}

double reference_activation(int activation, double parameter, double z)
{
    double rest;
    switch (activation) {
    case NORMFUSE_RELU: return z < 0 ? 0 : z; /* NaN stays */
    case NORMFUSE_LEAKY_RELU:
    case NORMFUSE_PRELU: return z > 0 ? z : z * parameter;
    case NORMFUSE_SILU: return vanishing(z, sigmoid(z, &rest));
    case NORMFUSE_GELU: return vanishing(z, normal_cdf(z));
    case NORMFUSE_GELU_TANH: return vanishing(z, sigmoid(2 * sqrt_two_over_pi * (z + 0.044715 * z * z * z), &rest));
    case NORMFUSE_HARDSWISH: return z <= -3 ? 0 : z < 3 ? z * (z + 3) / 6 : z;
    case NORMFUSE_ELU: return z > 0 ? z : parameter * expm1(z);
    case NORMFUSE_MISH: return vanishing(z, tanh(softplus(z)));
    case NORMFUSE_RELU6: return z < 0 ? 0 : z > 6 ? 6 : z; /* NaN stays */
    default: return z;
    }
}

double reference_slope(int activation, double parameter, double z)
{
    double s, t, rest;
    switch (activation) {
    case NORMFUSE_RELU: return z <= 0 ? 0 : 1; /* NaN passes dy on */
    case NORMFUSE_LEAKY_RELU:
    case NORMFUSE_PRELU: return z <= 0 ? parameter : 1; /* NaN passes dy on */
    case NORMFUSE_SILU: s = sigmoid(z, &rest); return s + vanishing(z, s * rest);
    case NORMFUSE_GELU: return normal_cdf(z) + vanishing(z, one_over_sqrt_two_pi * exp(-0.5 * z * z));
    case NORMFUSE_GELU_TANH:
        t = 2 * sqrt_two_over_pi * (z + 0.044715 * z * z * z);
        t = sigmoid(t, &rest);
        s = t * rest;
        return t + (s == 0 ? 0 : z * s * 2 * sqrt_two_over_pi * (1 + 3 * 0.044715 * z * z));
    case NORMFUSE_HARDSWISH: return z <= -3 ? 0 : z < 3 ? z / 3 + 0.5 : 1;
    case NORMFUSE_ELU: return z > 0 ? 1 : parameter * exp(z); /* of NaN a NaN */
    case NORMFUSE_RELU6: return z <= 0 || z >= 6 ? 0 : 1;
    case NORMFUSE_MISH:
        t = tanh(softplus(z));
        return t + vanishing(z, sigmoid(z, &rest) * (1 - t) * (1 + t));
    default: return 1;
    }
}

/* ---- one set -------------------------------------------------------------------------------------------------- */

struct reference_statistics reference_statistics(const double *u, int64_t rows, int64_t positions)
{
    int64_t count = rows * positions;
    long double total = 0;
    for (int64_t row = 0; row < rows; row++) {
        long double sum = 0;
        for (int64_t i = 0; i < positions; i++)
            sum += u[row * positions + i];
        total += sum;
    }
    long double mean = total / count;
    long double m2 = 0;
    for (int64_t row = 0; row < rows; row++) {
        long double sum = 0;
        for (int64_t i = 0; i < positions; i++) {
            long double centred = u[row * positions + i] - mean;
            sum += centred * centred;
        }
        m2 += sum;
    }
    return (struct reference_statistics){ (double)count, (double)mean, (double)m2 };
}

struct reference_statistics reference_squares(const double *u, int64_t rows, int64_t positions)
{
    long double total = 0;
    for (int64_t i = 0; i < rows * positions; i++)
        total += (long double)u[i] * u[i];
    return (struct reference_statistics){ (double)(rows * positions), 0, (double)total };
}

double reference_rstd_of_norm(double count, double m2, double eps)
{
    double norm = sqrt(m2);
    if (norm < eps)
        norm = eps;
    return sqrt(count) / norm;
}

double reference_rstd(double variance, double eps)
{
    return 1 / sqrt(variance + eps);
}

double reference_running(double old, double new_value, double momentum)
{
    return (1 - momentum) * old + momentum * new_value;
}

static double parameter_at(const double *parameter, int64_t index, double absent)
{
    return parameter ? parameter[index] : absent;
}

/* (u - mean) * rstd of the value at `index`. */
static double normalized(const struct reference_set *set, int64_t index)
{
    return (set->u[index] - set->mean) * set->rstd;
}

/* The affine of the operator, before scale and shift. */
static double affine(const struct reference_set *set, int64_t pair, int64_t index)
{
    return normalized(set, index) * parameter_at(set->weight, pair, 1) + parameter_at(set->bias, pair, 0);
}

double reference_parameter(const struct reference_set *set, int64_t pair)
{
    return parameter_at(set->slope, pair, set->parameter);
}

double reference_z(const struct reference_set *set, int64_t row, int64_t channel, int64_t position)
{
    int64_t pair = row * set->channels + channel;
    int64_t index = pair * set->positions + position;
    if (set->y)
        return set->y[index];
    double z = affine(set, pair, index) * (1 + parameter_at(set->scale, pair, 0)) + parameter_at(set->shift, pair, 0);
    return z + parameter_at(set->post_add, index, 0);
}

void reference_forward(const struct reference_set *set, double *y)
{
    for (int64_t row = 0; row < set->rows; row++)
        for (int64_t channel = 0; channel < set->channels; channel++)
            for (int64_t i = 0; i < set->positions; i++)
                y[(row * set->channels + channel) * set->positions + i] =
                    reference_activation(set->activation, reference_parameter(set, row * set->channels + channel),
                                         reference_z(set, row, channel, i));
}

void reference_backward(const struct reference_set *set, const struct reference_gradients *gradients)
{
    int64_t pairs = set->rows * set->channels;
    double *dz = gradients->dz;
    /* Sums over the set of the gradient of the normalized value, and of that times the normalized value. */
    long double sum = 0, sum_normalized = 0;
    for (int64_t pair = 0; pair < pairs; pair++) {
        double weight = parameter_at(set->weight, pair, 1);
        double factor = 1 + parameter_at(set->scale, pair, 0);
        long double pair_sum = 0, pair_sum_normalized = 0, pair_sum_affine = 0, pair_sum_slope = 0;
        for (int64_t i = 0; i < set->positions; i++) {
            int64_t index = pair * set->positions + i;
            double z = reference_z(set, pair / set->channels, pair % set->channels, i);
            dz[index] = set->dy[index] * reference_slope(set->activation, reference_parameter(set, pair), z);
            pair_sum += dz[index];
            pair_sum_normalized += (long double)dz[index] * normalized(set, index);
            if (gradients->dscale)
                pair_sum_affine += (long double)dz[index] * affine(set, pair, index);
            if (gradients->dslope)
                pair_sum_slope += z > 0 ? 0 : (long double)set->dy[index] * z;
        }
        if (gradients->dslope)
            gradients->dslope[pair] = (double)pair_sum_slope;
        if (gradients->dshift)
            gradients->dshift[pair] = (double)pair_sum;
        if (gradients->dscale)
            gradients->dscale[pair] = (double)pair_sum_affine;
        if (gradients->dbias)
            gradients->dbias[pair] = (double)(pair_sum * factor);
        if (gradients->dweight)
            gradients->dweight[pair] = (double)(pair_sum_normalized * factor);
        sum += pair_sum * factor * weight;
        sum_normalized += pair_sum_normalized * factor * weight;
    }
    if (!gradients->dx)
        return;
    double mean = 0, mean_normalized = 0;
    if (set->has_statistics) {
        mean = (double)(sum / set->set_values);
        mean_normalized = (double)(sum_normalized / set->set_values);
    }
    if (set->is_root_mean_square)
        mean = 0;
    if (set->is_clamped)
        mean_normalized = 0;
    for (int64_t pair = 0; pair < pairs; pair++) {
        double gain = parameter_at(set->weight, pair, 1) * (1 + parameter_at(set->scale, pair, 0));
        for (int64_t i = 0; i < set->positions; i++) {
            int64_t index = pair * set->positions + i;
            double dx = dz[index] * gain;
            if (set->has_statistics)
                dx -= mean + normalized(set, index) * mean_normalized;
            gradients->dx[index] = dx * set->rstd + parameter_at(set->du, index, 0);
        }
    }
}
