/* SPDX-License-Identifier: MIT
 *
 * activation.h - the rows of activations.def as a table. */
#ifndef NORMFUSE_ACTIVATION_H
#define NORMFUSE_ACTIVATION_H

#include "normfuse.h"

struct normfuse_activation_facts {
    const char *name;     /* as in a problem's act= */
    double default_param; /* 0 where there is none */
};

static const struct normfuse_activation_facts normfuse_activation_table[] = {
#define ACTIVATION(number, name, parameter) [number] = {#name, parameter},
#include "activations.def"
#undef ACTIVATION
};
enum { NORMFUSE_ACTIVATIONS = sizeof normfuse_activation_table / sizeof *normfuse_activation_table };

#endif
