/* SPDX-License-Identifier: MIT
 *
 * shape.c - see shape.h. */
#include "shape.h"

/* How many rows have to be walked as one so that every tensor can be read and written in vectors of 16 bytes: one, or
 * under columns the fewest adjacent ones that are whole vectors; 0 where that is impossible. `unaligned_samples`:
 * though samples begin and end inside of vectors. */
int32_t normfuse_cuda_rows_folded(const struct normfuse_problem *p, int elements, bool unaligned_samples)
{
    enum { MAX_VECTORS = 512 }; /* of rows folded, which a block has whole */
    int64_t folded = 1;
    if (p->columns && p->c % elements != 0) {
        folded = common_multiple(p->c, elements) / p->c;
        if ((p->s % folded != 0 && !unaligned_samples) || p->c * folded / elements > MAX_VECTORS)
            return 0;
    } else if (unaligned_samples || (!p->columns && p->s % elements != 0)) {
        return 0;
    }
    const struct normfuse_view *const x = &p->x;
    if (!are_aligned(p, 16) || (x->batch % elements != 0 && !unaligned_samples) ||
        (!p->columns   ? x->position != 1 || x->channel % elements != 0
         : folded == 1 ? x->channel != 1 || x->position % elements != 0
                       : x->channel != 1 || x->position != p->c))
        return 0;
    return (int32_t)folded;
}

/* Whether what a block counts bytes through is below 2^31 of them: a set, or under columns a sample, or all samples that
 * one reads through. */
static bool has_short_offsets(const struct normfuse_problem *p, bool all_samples)
{
    const struct normfuse_view *const x = &p->x;
    if (x->batch < 0 || x->channel < 0 || x->position < 0)
        return false;
    const bool by_batch = p->columns ? all_samples : p->sets == NORMFUSE_SETS_BATCH;
    const int64_t channels = p->columns || p->sets == NORMFUSE_SETS_NONE ? p->c : group_of(p);
    const double elements = (by_batch ? (double)p->n * (double)x->batch : 0.0) + (double)channels * (double)x->channel +
                            (double)p->s * (double)x->position;
    return elements * (double)normfuse_type_bytes(p->type) < 2147483648.0;
}

/* Whether a thread can read a parameter of its vector's channels at once; `takes_double`: as doubles, too. */
static bool is_packed(const struct normfuse_parameter *of, int elements, bool takes_double)
{
    const int64_t bytes = (int64_t)normfuse_type_bytes(of->type), aligned = minimum(16, bytes * elements);
    return of->data == NULL ||
           ((of->type != NORMFUSE_F64 || takes_double) && of->channel == 1 && (intptr_t)of->data % aligned == 0 &&
            of->batch * bytes % aligned == 0);
}

/* Whether a thread can read the running statistics of its vector's channels at once, where there are any. */
static bool reads_running(const struct normfuse_problem *p, int elements)
{
    return !p->evaluate ||
           (is_packed(&p->running_mean, elements, false) && is_packed(&p->running_var, elements, false));
}

static bool is_short(ptrdiff_t stride)
{
    return stride >= -INT32_MAX && stride <= INT32_MAX;
}

/* Whether struct normfuse_place holds the strides of all parameters. */
static bool has_short_parameters(const struct normfuse_problem *p)
{
    bool all = true;
#define SHORT(name) all = all && is_short(p->name.batch) && is_short(p->name.channel);
    NORMFUSE_COMMON_PARAMETER_LIST(SHORT) NORMFUSE_RARE_PARAMETER_LIST(SHORT)
#undef SHORT
    return all;
}

bool normfuse_cuda_shape_of(const struct normfuse_problem *p, struct shape *shape)
{
    shape->problem = p;
    const bool forward = !(p->phases & (NORMFUSE_PHASE_BACKWARD_SUMS | NORMFUSE_PHASE_BACKWARD_APPLY));
    shape->direction = forward ? FORWARD : BACKWARD;
    shape->tensors = forward ? 1 : 2;
    shape->value_bytes = p->type == NORMFUSE_F64 ? 8 : 4;
    shape->tensor_bytes = (double)p->n * (double)p->c * (double)p->s * (double)normfuse_type_bytes(p->type);
    shape->bytes = shape->tensor_bytes * (forward ? 2.0 : 3.0);
    shape->elements = (int)(16 / normfuse_type_bytes(p->type));
    shape->short_offsets = has_short_offsets(p, takes_all_samples(p));
    const bool biased = p->pre_bias.data != NULL;
    const bool takes_vectors = p->type != NORMFUSE_F64 && shape->short_offsets && !shape->device->general_alone &&
                               p->activation != NORMFUSE_PRELU;
    shape->plain = takes_vectors && !has_additions(p);
    /* Doubles have kernels with vectors of one element only under columns. */
    shape->folded = p->type == NORMFUSE_F64 && p->columns ? 0 : normfuse_cuda_rows_folded(p, shape->elements, false);
    const int64_t d = group_of(p);
    if (shape->folded > 1 && max_at_once(shape, d) == 0)
        shape->folded = 0;
    const bool folds_samples = shape->folded == 0 && shape->plain;
    if (folds_samples)
        shape->folded = normfuse_cuda_rows_folded(p, shape->elements, true);
    shape->unaligned_samples = folds_samples && shape->folded > 0;
    shape->wide = shape->folded > 0;
    /* Over rows the plain kernels of whole vectors lack derivatives that those of unaligned ones have. Short rows: batch
     * norm 1000x1024x5 f16 117.5 us, by single elements 61.4. */
    const bool lacks_derivative = !p->columns && !forward && is_rare(p->activation);
    const bool none = p->sets == NORMFUSE_SETS_NONE;
    const bool touches_vectors = takes_vectors && !p->columns && !biased && !none && are_aligned(p, 16) &&
                                 p->x.position == 1 && fills_vectors(p, shape->elements, 0.5);
    shape->unaligned = (!shape->wide || lacks_derivative) && shape->plain && touches_vectors;
    shape->additions = takes_vectors && has_additions(p) && !none && (!forward || p->y.data != NULL) &&
                       (p->columns ? shape->wide : touches_vectors);
    shape->wide = shape->wide && !shape->unaligned;
    shape->plain = shape->plain && (shape->unaligned || (shape->wide && !lacks_derivative));
    if (!shape->wide)
        shape->folded = 1;
    if (!shape->wide && !shape->unaligned)
        shape->elements = 1;
    const int elements = shape->elements;
    /* Columns of whole vectors, with weights that threads read in vectors. */
#define PACKED(name) is_packed(&p->name, elements, false)
    const bool weights = PACKED(weight) && PACKED(bias) && PACKED(pre_bias), modulation = PACKED(scale) && PACKED(shift);
    const bool held = shape->plain || shape->additions;
    const bool vectors = p->columns && shape->wide && held && shape->folded == 1 && weights;
    const bool has_adjacent_statistics = p->groups == 1 || ((p->mean.data == NULL || p->mean.channel == 1) &&
                                                            (p->rstd.data == NULL || p->rstd.channel == 1));
    const bool groups = vectors && !biased && p->sets == NORMFUSE_SETS_GROUP && !p->has_running_momentum &&
                        has_adjacent_statistics;
    /* No vector has channels of more than two groups, since it begins at a multiple of what both have in common. */
    shape->tiled = groups && modulation && d + common_divisor(d, elements) >= elements;
    shape->batch = vectors && !biased && p->sets == NORMFUSE_SETS_BATCH && p->n == 1 &&
                   (forward || (is_packed(&p->mean, elements, true) && PACKED(rstd)));
#undef PACKED
    shape->given = vectors && modulation && none && reads_running(p, elements) && !is_rare(p->activation);
    /* Where samples are apart, vectors are of one. */
    const bool apart = p->n > 1 && p->x.batch != p->c * p->s;
    const int64_t whole = 16 / (int64_t)normfuse_type_bytes(p->type);
    shape->run = !p->columns && p->type != NORMFUSE_F64 && !shape->device->general_alone && are_aligned(p, 16) &&
                 (p->s <= 1 || p->x.position == 1) && (p->c <= 1 || p->x.channel == p->s) &&
                 (!apart || (p->c * p->s % whole == 0 && p->x.batch % whole == 0)) && is_countable(p->s) &&
                 (double)p->n * (double)p->c < (double)(INT32_MAX - (1 << 24));
    shape->wants_gradients = !forward && (!(p->phases & NORMFUSE_PHASE_BACKWARD_APPLY) || p->dweight.data != NULL ||
                                          p->dbias.data != NULL || p->dscale.data != NULL || p->dshift.data != NULL ||
                                          p->dslope.data != NULL);
    return has_short_parameters(p) && is_countable(p->n) && is_countable(p->c) && is_countable(p->s / elements * (p->columns ? elements : 1)) &&
           is_countable(p->sets == NORMFUSE_SETS_GROUP ? sets_of(p) : p->n);
}
