/* SPDX-License-Identifier: MIT
 *
 * reference.c - see reference.h. Written to be read against the formulas, not to be fast. Sums are made row by row in
 * long double, so that a large set's sum is as good as a small one's. */
#include "reference.h"

#include <math.h>
#include <string.h>

/* ---- elements ------------------------------------------------------------------------------------------------- */

size_t reference_type_bytes(normfuse_type type)
{
    switch (type) {
    case NORMFUSE_F64: return 8;
    case NORMFUSE_F32: return 4;
    default: return 2;
    }
}

/* 2^exponent where that is a normal double; products with it are exact, and quicker than ldexp. */
static double power_of_two(int exponent)
{
    uint64_t bits = (uint64_t)(exponent + 1023) << 52;
    double power;
    memcpy(&power, &bits, sizeof power);
    return power;
}

/* The exponent of a value above 0: value in [2^exponent, 2^(exponent+1)); of subnormal doubles -1023. */
static int exponent_of(double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (int)(bits >> 52) - 1023;
}

/* A 16-bit float with this many bits of exponent and fraction. */
static double load_16(uint16_t bits, int exponent_bits, int fraction_bits)
{
    int bias = (1 << (exponent_bits - 1)) - 1;
    int exponent = (bits >> fraction_bits) & ((1 << exponent_bits) - 1);
    int fraction = bits & ((1 << fraction_bits) - 1);
    double sign = bits >> 15 ? -1.0 : 1.0;
    if (exponent == (1 << exponent_bits) - 1)
        return fraction ? (double)NAN : sign * (double)INFINITY;
    if (exponent == 0)
        return sign * fraction * power_of_two(1 - bias - fraction_bits);
    return sign * ((1 << fraction_bits) + fraction) * power_of_two(exponent - bias - fraction_bits);
}

static uint16_t store_16(double value, int exponent_bits, int fraction_bits)
{
    int bias = (1 << (exponent_bits - 1)) - 1;
    int infinity = ((1 << exponent_bits) - 1) << fraction_bits;
    int sign = signbit(value) ? 0x8000 : 0;
    double size = fabs(value);
    if (isnan(value))
        return (uint16_t)(sign | infinity | (1 << (fraction_bits - 1)));
    if (isinf(value))
        return (uint16_t)(sign | infinity);
    if (size == 0.0)
        return (uint16_t)sign;
    int exponent = exponent_of(size);
    if (exponent < 1 - bias)
        exponent = 1 - bias; /* subnormals have the spacing of the smallest normals */
    /* Steps of the spacing at this exponent; a carry into the next exponent is right because the bits count on. */
    double steps = nearbyint(size * power_of_two(fraction_bits - exponent));
    double bits = steps + (exponent - (1 - bias)) * power_of_two(fraction_bits);
    return (uint16_t)(sign | (bits >= infinity ? infinity : (int)bits));
}

double reference_load(const void *element, normfuse_type type)
{
    uint16_t bits;
    float single;
    double value;
    switch (type) {
    case NORMFUSE_F64: memcpy(&value, element, sizeof value); return value;
    case NORMFUSE_F32: memcpy(&single, element, sizeof single); return (double)single;
    case NORMFUSE_F16: memcpy(&bits, element, sizeof bits); return load_16(bits, 5, 10);
    default: { /* the upper half of a float */
        memcpy(&bits, element, sizeof bits);
        uint32_t wide = (uint32_t)bits << 16;
        memcpy(&single, &wide, sizeof single);
        return (double)single;
    }
    }
}

void reference_store(void *element, normfuse_type type, double value)
{
    uint16_t bits;
    float single;
    switch (type) {
    case NORMFUSE_F64: memcpy(element, &value, sizeof value); return;
    case NORMFUSE_F32: single = (float)value; memcpy(element, &single, sizeof single); return;
    case NORMFUSE_F16: bits = store_16(value, 5, 10); break;
    default: bits = store_16(value, 8, 7); break;
    }
    memcpy(element, &bits, sizeof bits);
}

double reference_round(double value, normfuse_type type)
{
    double element;
    reference_store(&element, type, value);
    return reference_load(&element, type);
}

double reference_add(double x, double pre_bias, double pre_add, bool rounds, normfuse_type type)
{
    if (type == NORMFUSE_F64)
        return x + pre_bias + pre_add;
    if (!rounds)
        return x + (double)(float)pre_bias;
    return reference_round((double)((float)x + (float)pre_bias + (float)pre_add), type);
}

void reference_load_strided(double *values, const void *data, normfuse_type type, int64_t count, ptrdiff_t stride)
{
    const char *element = data;
    ptrdiff_t step = stride * (ptrdiff_t)reference_type_bytes(type);
    for (int64_t i = 0; i < count; i++)
        values[i] = reference_load(element + i * step, type);
}

void reference_store_strided(void *data, normfuse_type type, const double *values, int64_t count, ptrdiff_t stride)
{
    char *element = data;
    ptrdiff_t step = stride * (ptrdiff_t)reference_type_bytes(type);
    for (int64_t i = 0; i < count; i++)
        reference_store(element + i * step, type, values[i]);
}

/* ---- activations ---------------------------------------------------------------------------------------------- */

static const double sqrt_half = 0.70710678118654752440;
static const double sqrt_two_over_pi = 0.79788456080286535588;
static const double one_over_sqrt_two_pi = 0.39894228040143267794;

static double sigmoid(double z)
{
    return z >= 0 ? 1 / (1 + exp(-z)) : exp(z) / (1 + exp(z));
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
    switch (activation) {
    case NORMFUSE_RELU: return z < 0 ? 0 : z; /* NaN stays */
    case NORMFUSE_LEAKY_RELU:
    case NORMFUSE_PRELU: return z > 0 ? z : z * parameter;
    case NORMFUSE_SILU: return vanishing(z, sigmoid(z));
    case NORMFUSE_GELU: return vanishing(z, normal_cdf(z));
    case NORMFUSE_GELU_TANH: return vanishing(z, sigmoid(2 * sqrt_two_over_pi * (z + 0.044715 * z * z * z)));
    case NORMFUSE_HARDSWISH: return z <= -3 ? 0 : z < 3 ? z * (z + 3) / 6 : z;
    case NORMFUSE_ELU: return z > 0 ? z : parameter * expm1(z);
    case NORMFUSE_MISH: return vanishing(z, tanh(softplus(z)));
    case NORMFUSE_RELU6: return z < 0 ? 0 : z > 6 ? 6 : z; /* NaN stays */
    default: return z;
    }
}

double reference_slope(int activation, double parameter, double z)
{
    double s, t;
    switch (activation) {
    case NORMFUSE_RELU: return z <= 0 ? 0 : 1; /* NaN passes dy on */
    case NORMFUSE_LEAKY_RELU: return z > 0 ? 1 : parameter;
    case NORMFUSE_PRELU: return z <= 0 ? parameter : 1; /* NaN passes dy on */
    case NORMFUSE_SILU: return sigmoid(z) + vanishing(z, sigmoid(z) * sigmoid(-z));
    case NORMFUSE_GELU: return normal_cdf(z) + vanishing(z, one_over_sqrt_two_pi * exp(-0.5 * z * z));
    case NORMFUSE_GELU_TANH:
        t = 2 * sqrt_two_over_pi * (z + 0.044715 * z * z * z);
        s = sigmoid(t) * sigmoid(-t);
        return sigmoid(t) + (s == 0 ? 0 : z * s * 2 * sqrt_two_over_pi * (1 + 3 * 0.044715 * z * z));
    case NORMFUSE_HARDSWISH: return z <= -3 ? 0 : z < 3 ? z / 3 + 0.5 : 1;
    case NORMFUSE_ELU: return z <= 0 ? parameter * exp(z) : 1;
    case NORMFUSE_RELU6: return z <= 0 || z >= 6 ? 0 : 1;
    case NORMFUSE_MISH:
        t = tanh(softplus(z));
        return t + vanishing(z, sigmoid(z) * (1 - t) * (1 + t));
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
            pair_sum_affine += (long double)dz[index] * affine(set, pair, index);
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
