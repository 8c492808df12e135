/* SPDX-License-Identifier: MIT
 *
 * activation_f64.c - the activations and their derivatives in double, by libm, shared by every table. */
#include <math.h>

#include "cpu/kernels.h"
#include "normfuse.h"

static double sigmoid(double z)
{
    const double e = exp(-fabs(z));
    return (z < 0 ? e : 1) / (1 + e);
}

static double phi(double z)
{
    return 0.5 * erfc(-z * 0.70710678118654752440);
}

double normfuse_activation_f64(int32_t activation, double act_param, double z)
{
    switch (activation) {
    case NORMFUSE_RELU: return z < 0 ? 0 : z;
    case NORMFUSE_LEAKY_RELU: return z <= 0 ? z * act_param : z;
    case NORMFUSE_SILU: return z * sigmoid(z);
    case NORMFUSE_GELU: return z * phi(z);
    case NORMFUSE_GELU_TANH: return z * sigmoid(1.59576912160573071176 * (z + 0.044715 * z * z * z));
    case NORMFUSE_HARDSWISH: {
        const double gate = z / 6 + 0.5;
        return z * (gate < 0 ? 0 : gate > 1 ? 1 : gate);
    }
    case NORMFUSE_ELU: return z <= 0 ? act_param * expm1(z) : z;
    case NORMFUSE_MISH: return z * tanh(z > 40 ? z : log1p(exp(z)));
    case NORMFUSE_RELU6: return z < 0 ? 0 : z > 6 ? 6 : z;
    default: return z;
    }
}

double normfuse_activation_gradient_f64(int32_t activation, double act_param, double dy, double z)
{
    switch (activation) {
    case NORMFUSE_RELU: return z <= 0 ? 0 : dy;
    case NORMFUSE_LEAKY_RELU: return z <= 0 ? dy * act_param : dy;
    case NORMFUSE_SILU: {
        const double s = sigmoid(z);
        return dy * (s + z * s * sigmoid(-z));
    }
    case NORMFUSE_GELU: return dy * (phi(z) + z * 0.39894228040143267794 * exp(-0.5 * z * z));
    case NORMFUSE_GELU_TANH: {
        const double w = 1.59576912160573071176 * (z + 0.044715 * z * z * z), s = sigmoid(w);
        const double slope = 1.59576912160573071176 * (1 + 3 * 0.044715 * z * z);
        return dy * (s + (fabs(z) > 20 ? 0 : z * slope * s * sigmoid(-w)));
    }
    case NORMFUSE_HARDSWISH: return z <= -3 ? 0 : z < 3 ? dy * (z / 3 + 0.5) : dy;
    case NORMFUSE_ELU: return z <= 0 ? dy * act_param * exp(z) : dy;
    case NORMFUSE_RELU6: return z <= 0 || z >= 6 ? 0 : dy;
    case NORMFUSE_MISH: {
        const double t = tanh(z > 40 ? z : log1p(exp(z)));
        return dy * (t + z * (1 - t * t) * sigmoid(z));
    }
    default: return dy;
    }
}
