/* SPDX-License-Identifier: MIT
 *
 * shape.c - see shape.h. */
#include "shape.h"

static bool is_short(ptrdiff_t stride)
{
    return stride >= -INT32_MAX && stride <= INT32_MAX;
}

/* True if struct normfuse_place holds the strides of all parameters. */
static bool has_short_parameters(const struct normfuse_problem *p)
{
    bool all = true;
#define SHORT(name) all = all && is_short(p->name.batch) && is_short(p->name.channel);
    NORMFUSE_CUDA_PARAMETERS(SHORT)
#undef SHORT
    return all;
}

bool normfuse_cuda_shape_of(const struct normfuse_problem *p, struct shape *shape)
{
    const bool forward = !(p->phases & (NORMFUSE_PHASE_BACKWARD_SUMS | NORMFUSE_PHASE_BACKWARD_APPLY));
    shape->problem = p;
    shape->direction = forward ? FORWARD : BACKWARD;
    shape->tensors = forward ? 1 : 2;
    shape->value_bytes = p->type == NORMFUSE_F64 ? 8 : 4;
    shape->tensor_bytes = (double)p->n * (double)p->c * (double)p->s * (double)normfuse_type_bytes(p->type);
    shape->bytes = shape->tensor_bytes * (forward ? 2.0 : 3.0);
    shape->wants_gradients = !forward && (!(p->phases & NORMFUSE_PHASE_BACKWARD_APPLY) || p->dweight.data != NULL ||
                                          p->dbias.data != NULL || p->dscale.data != NULL || p->dshift.data != NULL ||
                                          p->dslope.data != NULL);
    return has_short_parameters(p) && is_countable(p->n) && is_countable(p->c) &&
           is_countable(p->sets == NORMFUSE_SETS_GROUP || p->sets == NORMFUSE_SETS_POSITION ? sets_of(p) : p->n);
}
