/* SPDX-License-Identifier: MIT
 *
 * activation.h - what each activation is, in one place. p is act_param.
 *
 *                act(z)                                            act'(z)
 *   identity     z                                                 1
 *   relu         max(z, 0)                                         z <= 0 ? 0 : 1
 *   leaky_relu   z > 0 ? z : p z                                   z <= 0 ? p : 1
 *   silu         z sigma(z),  sigma(z) = 1/(1 + exp(-z))           sigma(z) (1 + z (1 - sigma(z)))
 *   gelu         z Phi(z),  Phi(z) = (1 + erf(z/sqrt 2))/2         Phi(z) + z phi(z),  phi(z) = exp(-z^2/2)/sqrt(2 pi)
 *   gelu_tanh    z (1 + t)/2,  t = tanh(q),                        (1 + t)/2 + z (1 - t^2) q'/2,
 *                q = sqrt(2/pi) (z + 0.044715 z^3)                 q' = sqrt(2/pi) (1 + 3 * 0.044715 z^2)
 *   hardswish    z min(max(z + 3, 0), 6)/6                         z <= -3: 0; z < 3: (2 z + 3)/6; else 1
 *   elu          z > 0 ? z : p (exp(z) - 1)                        z > 0 ? 1 : p exp(z)
 *   mish         z tanh(w),  w = log(1 + exp(z))                   tanh(w) + z sigma(z) (1 - tanh(w)^2)
 *   relu6        min(max(z, 0), 6)                                 z <= 0 or z >= 6 ? 0 : 1
 *   prelu        leaky_relu whose p is tensors.slope
 *
 * A NaN z gives a NaN, but for act'(z) of relu, leaky_relu, prelu, hardswish and relu6, which is 1: no comparison above
 * holds. PyTorch's are others, and not the same in all of a tensor: docs/numerics.md. */
#ifndef NORMFUSE_ACTIVATION_H
#define NORMFUSE_ACTIVATION_H

#include <stdint.h>

#include "normfuse.h"

enum { NORMFUSE_ACTIVATIONS = NORMFUSE_PRELU + 1 };

struct normfuse_activation_facts {
    const char *name;     /* as in a problem's act= */
    double default_param; /* 0 where there is none */
};

static const struct normfuse_activation_facts normfuse_activation_table[NORMFUSE_ACTIVATIONS] = {
    [NORMFUSE_IDENTITY] = {"identity", 0.0},
    [NORMFUSE_RELU] = {"relu", 0.0},
    [NORMFUSE_LEAKY_RELU] = {"leaky_relu", 0.01},
    [NORMFUSE_SILU] = {"silu", 0.0},
    [NORMFUSE_GELU] = {"gelu", 0.0},
    [NORMFUSE_GELU_TANH] = {"gelu_tanh", 0.0},
    [NORMFUSE_HARDSWISH] = {"hardswish", 0.0},
    [NORMFUSE_ELU] = {"elu", 1.0},
    [NORMFUSE_MISH] = {"mish", 0.0},
    [NORMFUSE_RELU6] = {"relu6", 0.0},
    [NORMFUSE_PRELU] = {"prelu", 0.0},
};

#endif
