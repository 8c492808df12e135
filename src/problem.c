/* SPDX-License-Identifier: MIT
 *
 * problem.c - checks the options and tensors of a call and says them as rows or columns (problem.h). Small calls pay
 * for every check on each call, so nothing is formatted unless a call is refused and nothing loops over what is absent.
 */
#include "problem.h"

#include <inttypes.h>
#include <string.h>

#include "activation.h"
#include "package.h"

/* In the order of normfuse_tensors. */
enum slot {
#define SLOT(number, member, kind) number,
#include "slots.def"
#undef SLOT
    SLOTS
};
_Static_assert(sizeof(normfuse_tensors) == 8 + SLOTS * sizeof(void *), "enum slot lists every tensor");
_Static_assert(offsetof(normfuse_tensors, x) == 8, "the tensors follow struct_bytes and flags");

#define BIT(slot) (UINT32_C(1) << (slot))

enum kind {
    BIG,
    CHANNEL,        /* [C]; affine: or [N, C] */
    SAMPLE_CHANNEL, /* [N, C] */
    EITHER,         /* [C] or [N, C] */
    SHARED,         /* [C], or [1] for all channels */
    STATISTICS,     /* one value a set */
    JOINED          /* triples or pairs, f64 */
};

static const struct {
    const char *name;
    enum kind kind;
    size_t offset; /* in struct normfuse_problem */
} slots[SLOTS] = {
#define SLOT(number, member, kind) [number] = {"tensors." #member, kind, offsetof(struct normfuse_problem, member)},
#include "slots.def"
#undef SLOT
};

/* ---- what each call takes ------------------------------------------------------------------------------------- */

enum operator { GROUP_NORM, BATCH_NORM, AFFINE, CHANNEL_NORM };

#define CALL_NAMES(operator)                                                                                           \
    {operator " forward",                                                                                              \
     operator " backward",                                                                                             \
     operator " stats",                                                                                                \
     operator " apply",                                                                                                \
     operator " backward_sums",                                                                                        \
     operator " backward_apply",                                                                                       \
     operator " forward_scratch_bytes",                                                                                \
     operator " backward_scratch_bytes"}
static const char *const call_names[][8] = {
    [GROUP_NORM] = CALL_NAMES("group_norm"),
    [BATCH_NORM] = CALL_NAMES("batch_norm"),
    [AFFINE] = CALL_NAMES("affine"),
    [CHANNEL_NORM] = CALL_NAMES("channel_norm"),
};

#define PRE (BIT(PRE_ADD) | BIT(PRE_BIAS))
#define FORWARD_INPUTS (BIT(X) | PRE | BIT(POST_ADD) | BIT(WEIGHT) | BIT(BIAS) | BIT(SCALE) | BIT(SHIFT) | BIT(SLOPE))
#define SAVED (BIT(MEAN) | BIT(RSTD))
#define RUNNING (BIT(RUNNING_MEAN) | BIT(RUNNING_VAR))
#define FORWARD_OUTPUTS (BIT(Y) | BIT(U) | SAVED | RUNNING)
#define BACKWARD_NEEDS (BIT(X) | BIT(DY) | SAVED)
#define BACKWARD_INPUTS (BACKWARD_NEEDS | FORWARD_INPUTS | BIT(DU) | BIT(Y))
#define PARAMETER_GRADIENTS (BIT(DWEIGHT) | BIT(DBIAS) | BIT(DSCALE) | BIT(DSHIFT))
#define GRADIENTS (PARAMETER_GRADIENTS | BIT(DX) | BIT(DPOST_ADD) | BIT(DPRE_BIAS) | BIT(DSLOPE))
#define ADAPTIVE (BIT(SCALE) | BIT(SHIFT) | BIT(DSCALE) | BIT(DSHIFT))
/* Tensors of batches and shards. */
#define SHARED_STATISTICS (RUNNING | BIT(STATS) | BIT(SUMS))
/* Tensors that affine does not take. */
#define NORM_ONLY (SAVED | ADAPTIVE | SHARED_STATISTICS)

#define FORWARD_PHASES (NORMFUSE_PHASE_STATISTICS | NORMFUSE_PHASE_APPLY)
#define BACKWARD_PHASES (NORMFUSE_PHASE_BACKWARD_SUMS | NORMFUSE_PHASE_BACKWARD_APPLY)

/* Tensors of training group and batch norm; evaluation and affine take part of it. */
static const struct call {
    int32_t phases;
    bool sharded; /* not offered in evaluation */
    bool accumulates;
    uint32_t allowed, required, outputs;
} calls[] = {
    [NORMFUSE_CALL_FORWARD] = {FORWARD_PHASES, false, false, FORWARD_INPUTS | FORWARD_OUTPUTS, BIT(X), FORWARD_OUTPUTS},
    [NORMFUSE_CALL_BACKWARD] = {BACKWARD_PHASES, false, true, BACKWARD_INPUTS | GRADIENTS, BACKWARD_NEEDS, GRADIENTS},
    [NORMFUSE_CALL_STATS] = {NORMFUSE_PHASE_STATISTICS, true, true, BIT(X) | PRE | BIT(U) | BIT(STATS),
                             BIT(X) | BIT(STATS), BIT(U) | BIT(STATS)},
    [NORMFUSE_CALL_APPLY] = {NORMFUSE_PHASE_APPLY, true, false, FORWARD_INPUTS | BIT(Y) | SAVED | RUNNING | BIT(STATS),
                             BIT(X) | BIT(STATS), BIT(Y) | SAVED | RUNNING},
    [NORMFUSE_CALL_BACKWARD_SUMS] = {NORMFUSE_PHASE_BACKWARD_SUMS, true, true,
                                     BACKWARD_INPUTS | BIT(DPOST_ADD) | BIT(DSLOPE) | BIT(SUMS),
                                     BACKWARD_NEEDS | BIT(SUMS), BIT(DPOST_ADD) | BIT(DSLOPE) | BIT(SUMS)},
    [NORMFUSE_CALL_BACKWARD_APPLY] = {NORMFUSE_PHASE_BACKWARD_APPLY, true, true,
                                      BACKWARD_INPUTS | PARAMETER_GRADIENTS | BIT(DX) | BIT(DPRE_BIAS) | BIT(SUMS),
                                      BACKWARD_NEEDS | BIT(SUMS), PARAMETER_GRADIENTS | BIT(DX) | BIT(DPRE_BIAS)},
    [NORMFUSE_CALL_FORWARD_SCRATCH] = {FORWARD_PHASES, false, true, FORWARD_INPUTS | FORWARD_OUTPUTS | BIT(STATS),
                                       BIT(X), FORWARD_OUTPUTS},
    [NORMFUSE_CALL_BACKWARD_SCRATCH] = {BACKWARD_PHASES, false, true, BACKWARD_INPUTS | GRADIENTS | BIT(SUMS),
                                        BACKWARD_NEEDS, GRADIENTS},
};

/* The inputs that an output may be, with equal strides: those it is computed from element by element, each read before
 * it is written. */
static uint32_t in_place(enum slot output)
{
    switch (output) {
    case Y: return BIT(X) | BIT(PRE_ADD) | BIT(POST_ADD);
    case U: return BIT(X) | BIT(PRE_ADD);
    case DX: return BIT(DY) | BIT(X) | BIT(DU);
    case DPOST_ADD: return BIT(DY);
    default: return 0;
    }
}

/* ---- one tensor ----------------------------------------------------------------------------------------------- */

/* The bytes that a tensor's elements lie in: [low, high). */
struct range {
    uintptr_t low, high;
};
static const struct range no_range = {UINTPTR_MAX, 0}; /* meets none */

enum { AXES = 3 };

normfuse_status normfuse_check_struct(const char *call, const char *argument, uint32_t struct_bytes, size_t known_bytes)
{
    if (struct_bytes < known_bytes)
        return normfuse_refuse(NORMFUSE_BAD_ARGUMENT, "%s: %s.struct_bytes is %" PRIu32 ", version 0.1 has %zu", call,
                               argument, struct_bytes, known_bytes);
    if (struct_bytes > known_bytes)
        return normfuse_refuse(NORMFUSE_BAD_ARGUMENT,
                               "%s: %s.struct_bytes is %" PRIu32 ", this library (%s) is older and knows %zu", call,
                               argument, struct_bytes, normfuse_version(), known_bytes);
    return NORMFUSE_OK;
}

static normfuse_status check_type(int32_t *type, const char *call, const char *argument, normfuse_dtype dtype)
{
    if (dtype.lanes == 1) {
        if (dtype.code == 2 && (dtype.bits == 64 || dtype.bits == 32 || dtype.bits == 16)) {
            *type = dtype.bits == 32 ? NORMFUSE_F32 : dtype.bits == 64 ? NORMFUSE_F64 : NORMFUSE_F16;
            return NORMFUSE_OK;
        }
        if (dtype.code == 4 && dtype.bits == 16) {
            *type = NORMFUSE_BF16;
            return NORMFUSE_OK;
        }
    }
    return normfuse_refuse(NORMFUSE_UNSUPPORTED,
                           "%s: %s has a dtype of code %d, %d bits, %d lanes; f64, f32, f16 and bf16 are supported",
                           call, argument, dtype.code, dtype.bits, dtype.lanes);
}

static normfuse_status check_device(const char *call, const char *argument, normfuse_device device,
                                    normfuse_device expected)
{
    if (device.device_type == expected.device_type && device.device_id == expected.device_id)
        return NORMFUSE_OK;
    return normfuse_refuse(NORMFUSE_UNSUPPORTED, "%s: %s is on device (%d, %d), another tensor is on (%d, %d)", call,
                           argument, (int)device.device_type, (int)device.device_id, (int)expected.device_type,
                           (int)expected.device_id);
}

/* The first element's address and the range of them all; sizes are above 0. */
static normfuse_status locate(char **data, struct range *range, const char *call, const char *argument,
                              const normfuse_tensor *tensor, size_t element_bytes, const int64_t sizes[AXES],
                              const ptrdiff_t strides[AXES])
{
    const uintptr_t address = (uintptr_t)tensor->data + (uintptr_t)tensor->byte_offset;
    if (tensor->data == NULL)
        return normfuse_refuse(NORMFUSE_BAD_POINTER, "%s: %s.data is NULL", call, argument);
    if ((address & (element_bytes - 1)) != 0)
        return normfuse_refuse(NORMFUSE_BAD_POINTER,
                               "%s: %s.data + byte_offset is not a multiple of %zu, the bytes of an element", call,
                               argument, element_bytes);
    ptrdiff_t low = 0, high = 0;
    bool overflow = address < tensor->byte_offset;
    for (int a = 0; a < AXES; a++) {
        if (sizes[a] == 1)
            continue;
        ptrdiff_t reach;
        overflow |= __builtin_mul_overflow(sizes[a] - 1, strides[a], &reach);
        if (reach < 0)
            overflow |= __builtin_add_overflow(low, reach, &low);
        else
            overflow |= __builtin_add_overflow(high, reach, &high);
    }
    ptrdiff_t span;
    overflow |= __builtin_mul_overflow(low, (ptrdiff_t)element_bytes, &low);
    overflow |= __builtin_add_overflow(high, 1, &high);
    overflow |= __builtin_mul_overflow(high, (ptrdiff_t)element_bytes, &high);
    overflow |= __builtin_sub_overflow(high, low, &span);
    if (overflow || address < (uintptr_t)0 - (uintptr_t)low || address + (uintptr_t)high < address)
        return normfuse_refuse(NORMFUSE_BAD_SHAPE, "%s: the strides of %s reach outside of the address space", call,
                               argument);
    *data = (char *)tensor->data + tensor->byte_offset;
    range->low = address + (uintptr_t)low;
    range->high = address + (uintptr_t)high;
    return NORMFUSE_OK;
}

static ptrdiff_t magnitude(ptrdiff_t stride)
{
    return stride < 0 ? -stride : stride;
}

/* Axes of more than one element, longest stride first; returns how many. locate() has shown that no product of these
 * overflows, nor their sum. */
static int sort_axes(int64_t sorted_sizes[AXES], ptrdiff_t sorted_strides[AXES], const int64_t sizes[AXES],
                     const ptrdiff_t strides[AXES])
{
    int count = 0;
    for (int a = 0; a < AXES; a++) {
        if (sizes[a] == 1)
            continue;
        int at = count++;
        for (; at > 0 && sorted_strides[at - 1] < magnitude(strides[a]); at--) {
            sorted_sizes[at] = sorted_sizes[at - 1];
            sorted_strides[at] = sorted_strides[at - 1];
        }
        sorted_sizes[at] = sizes[a];
        sorted_strides[at] = magnitude(strides[a]);
    }
    return count;
}

/* No stride enters the span of the shorter ones, so no two elements share an address. Strides that interleave without
 * meeting are refused too. */
static bool elements_are_apart(const int64_t sizes[AXES], const ptrdiff_t strides[AXES])
{
    int64_t sorted_sizes[AXES];
    ptrdiff_t sorted_strides[AXES], span = 0;
    for (int a = sort_axes(sorted_sizes, sorted_strides, sizes, strides); a-- > 0;) {
        if (sorted_strides[a] <= span)
            return false;
        span += (sorted_sizes[a] - 1) * sorted_strides[a];
    }
    return true;
}

/* True if two tensors of equal sizes and (sorted) strides, `distance` elements apart, share an element: whether the
 * distance is a sum of d[a] * strides[a] with |d[a]| < sizes[a]. Says yes where strides interleave so much that it
 * would have to search. */
static bool distance_is_met(ptrdiff_t distance, int axes, const int64_t *sizes, const ptrdiff_t *strides)
{
    if (axes == 0)
        return distance == 0;
    ptrdiff_t span = 0;
    for (int a = 1; a < axes; a++)
        span += (sizes[a] - 1) * strides[a];
    if (strides[0] <= span)
        return true;
    /* By symmetry a distance of d is met as -d is. Of the multiples of strides[0] only the two around the distance are
     * within the span of the other axes. */
    distance = magnitude(distance);
    const ptrdiff_t below = distance / strides[0];
    for (ptrdiff_t d = below; d <= below + 1; d++)
        if (d < sizes[0] && distance_is_met(distance - d * strides[0], axes - 1, sizes + 1, strides + 1))
            return true;
    return false;
}

/* ---- each kind of tensor -------------------------------------------------------------------------------------- */

static normfuse_status check_axes(const char *call, const char *argument, const normfuse_tensor *tensor,
                                  int32_t minimum, int32_t maximum)
{
    if (tensor->ndim < minimum || tensor->ndim > maximum)
        return normfuse_refuse(NORMFUSE_BAD_SHAPE, "%s: %s has %d axes, expected %d to %d", call, argument,
                               (int)tensor->ndim, (int)minimum, (int)maximum);
    if (tensor->shape == NULL)
        return normfuse_refuse(NORMFUSE_BAD_POINTER, "%s: %s.shape is NULL", call, argument);
    return NORMFUSE_OK;
}

static normfuse_status flat_tensor(struct normfuse_flat *flat, struct range *range, const char *call,
                                   const char *argument, const normfuse_tensor *tensor)
{
    normfuse_status status = check_axes(call, argument, tensor, 1, 8);
    if (status == NORMFUSE_OK)
        status = check_type(&flat->type, call, argument, tensor->dtype);
    if (status != NORMFUSE_OK)
        return status;
    /* Zero sizes count as 1, so that no product of some of the sizes overflows either. */
    int64_t elements = 1;
    bool empty = false, row_major = true;
    for (int32_t a = tensor->ndim - 1; a >= 0; a--) {
        const int64_t size = tensor->shape[a];
        if (size < 0)
            return normfuse_refuse(NORMFUSE_BAD_SHAPE, "%s: %s has a size of %" PRId64 " on axis %d", call, argument,
                                   size, (int)a);
        if (tensor->strides != NULL && size > 1)
            row_major &= tensor->strides[a] == elements;
        empty |= size == 0;
        if (__builtin_mul_overflow(elements, size == 0 ? 1 : size, &elements) || elements > INT64_MAX / 8)
            return normfuse_refuse(NORMFUSE_BAD_SHAPE, "%s: the sizes of %s overflow", call, argument);
    }
    *range = no_range;
    if (empty) {
        flat->data = NULL;
        flat->elements = 0;
        return NORMFUSE_OK;
    }
    if (!row_major)
        return normfuse_refuse(NORMFUSE_UNSUPPORTED, "%s: %s is not row-major", call, argument);
    flat->elements = elements;
    return locate(&flat->data, range, call, argument, tensor, normfuse_type_bytes(flat->type),
                  (const int64_t[AXES]){1, 1, elements}, (const ptrdiff_t[AXES]){0, 0, 1});
}

normfuse_status normfuse_flat_tensor(struct normfuse_flat *flat, const char *call, const char *argument,
                                     const normfuse_tensor *tensor)
{
    struct range range;
    return flat_tensor(flat, &range, call, argument, tensor);
}

static normfuse_status refuse_size(const char *call, const char *argument, const char *axis, int64_t size,
                                   const char *expected_by, int64_t expected)
{
    return normfuse_refuse(NORMFUSE_BAD_SHAPE, "%s: %s has %" PRId64 " elements along %s, %s has %" PRId64, call,
                           argument, size, axis, expected_by, expected);
}

/* [c], or [n, c] where `per_sample`. */
static normfuse_status parameter_tensor(struct normfuse_parameter *parameter, struct range *range, const char *call,
                                        const char *argument, const normfuse_tensor *tensor, bool per_sample, int64_t n,
                                        int64_t c, bool is_output)
{
    const int32_t axes = per_sample ? 2 : 1;
    if (tensor->ndim != axes)
        return normfuse_refuse(NORMFUSE_BAD_SHAPE, "%s: %s has %d axes, expected %s", call, argument, (int)tensor->ndim,
                               per_sample ? "[N, C]" : "[C]");
    if (tensor->shape == NULL)
        return normfuse_refuse(NORMFUSE_BAD_POINTER, "%s: %s.shape is NULL", call, argument);
    if (per_sample && tensor->shape[0] != n)
        return refuse_size(call, argument, "N", tensor->shape[0], "x", n);
    if (tensor->shape[axes - 1] != c)
        return refuse_size(call, argument, "C", tensor->shape[axes - 1], "x", c);
    const normfuse_status status = check_type(&parameter->type, call, argument, tensor->dtype);
    if (status != NORMFUSE_OK)
        return status;
    parameter->channel = c <= 1 ? 0 : tensor->strides != NULL ? tensor->strides[axes - 1] : 1;
    parameter->batch = !per_sample || n <= 1 ? 0 : tensor->strides != NULL ? tensor->strides[0] : c;
    *range = no_range;
    if (c == 0 || (per_sample && n == 0)) {
        parameter->data = NULL;
        return NORMFUSE_OK;
    }
    const int64_t sizes[AXES] = {per_sample ? n : 1, c, 1};
    const ptrdiff_t strides[AXES] = {parameter->batch, parameter->channel, 0};
    const normfuse_status located =
        locate(&parameter->data, range, call, argument, tensor, normfuse_type_bytes(parameter->type), sizes, strides);
    if (located == NORMFUSE_OK && is_output && !elements_are_apart(sizes, strides))
        return normfuse_refuse(NORMFUSE_OVERLAP, "%s: elements of %s, an output, overlap each other", call, argument);
    return located;
}

normfuse_status normfuse_channel_tensor(struct normfuse_parameter *parameter, const char *call, const char *argument,
                                        const normfuse_tensor *tensor, int64_t c)
{
    struct range range;
    return parameter_tensor(parameter, &range, call, argument, tensor, false, 1, c, false);
}

/* The strides of N, C and the spatial axes as one, 0 where there is one element. False where the spatial axes are not
 * one in memory. */
static bool collapse(struct normfuse_view *view, const normfuse_tensor *tensor, int64_t n, int64_t c, int64_t s)
{
    if (tensor->strides == NULL) {
        *view = (struct normfuse_view){NULL, n > 1 ? c * s : 0, c > 1 ? s : 0, s > 1 ? 1 : 0};
        return true;
    }
    *view = (struct normfuse_view){NULL, n > 1 ? tensor->strides[0] : 0, c > 1 ? tensor->strides[1] : 0, 0};
    ptrdiff_t expected = 0;
    for (int32_t a = tensor->ndim - 1; a >= 2; a--) {
        const int64_t size = tensor->shape[a];
        if (size == 1)
            continue;
        const ptrdiff_t stride = tensor->strides[a];
        if (expected == 0)
            view->position = expected = stride;
        if (stride != expected || stride <= 0 || __builtin_mul_overflow(expected, size, &expected))
            return false;
    }
    return true;
}

/* True if the strides of a tensor of x's sizes, all above 0, are of the layouts that the library walks. */
static bool view_of(struct normfuse_view *view, const struct normfuse_problem *problem, const normfuse_tensor *tensor)
{
    const int64_t c = problem->c, s = problem->s;
    if (!collapse(view, tensor, problem->n, c, s))
        return false;
    if (c > 1 && s > 1)
        return (view->position == 1 && view->channel >= s) || (view->channel == 1 && view->position >= c);
    return c > 1 ? view->channel >= 1 : s == 1 || view->position >= 1;
}

static normfuse_status refuse_strides(const struct normfuse_problem *problem, const char *argument)
{
    return normfuse_refuse(NORMFUSE_UNSUPPORTED,
                           "%s: the strides of %s are neither contiguous nor channels-last, nor a slice "
                           "of either along N or C",
                           problem->name, argument);
}

static normfuse_status locate_big(struct normfuse_view *view, struct range *range,
                                  const struct normfuse_problem *problem, const char *argument,
                                  const normfuse_tensor *tensor, int32_t type, bool is_output)
{
    if (!view_of(view, problem, tensor))
        return refuse_strides(problem, argument);
    const int64_t sizes[AXES] = {problem->n, problem->c, problem->s};
    const ptrdiff_t strides[AXES] = {view->batch, view->channel, view->position};
    const normfuse_status status =
        locate(&view->data, range, problem->name, argument, tensor, normfuse_type_bytes(type), sizes, strides);
    if (status == NORMFUSE_OK && is_output && !elements_are_apart(sizes, strides))
        return normfuse_refuse(NORMFUSE_OVERLAP, "%s: elements of %s, an output, overlap each other", problem->name,
                               argument);
    return status;
}

/* On an axis of one element that the picture has contiguous the stride is 1. */
static void fit_picture(struct normfuse_view *view, const struct normfuse_problem *problem)
{
    if (problem->columns && problem->c <= 1)
        view->channel = 1;
    if (!problem->columns && problem->s <= 1)
        view->position = 1;
}

/* Sizes, type and device of the problem are those of x. */
static normfuse_status take_shape(struct normfuse_problem *problem, const normfuse_tensor *x)
{
    normfuse_status status = check_axes(problem->name, "tensors.x", x, 2, NORMFUSE_MAX_AXES);
    if (status == NORMFUSE_OK)
        status = check_type(&problem->type, problem->name, "tensors.x", x->dtype);
    if (status != NORMFUSE_OK)
        return status;
    /* Zero sizes count as 1, and an element as 32 bytes, so that nothing made of these sizes overflows: sums, triples,
     * products of some axes. */
    int64_t all = 32, s = 1;
    for (int32_t a = 0; a < x->ndim; a++) {
        const int64_t size = x->shape[a];
        if (size < 0)
            return normfuse_refuse(NORMFUSE_BAD_SHAPE, "%s: tensors.x has a size of %" PRId64 " on axis %d",
                                   problem->name, size, (int)a);
        if (__builtin_mul_overflow(all, size == 0 ? 1 : size, &all))
            return normfuse_refuse(NORMFUSE_BAD_SHAPE, "%s: the sizes of tensors.x overflow", problem->name);
        s *= a >= 2 ? size : 1;
    }
    problem->n = x->shape[0];
    problem->c = x->shape[1];
    problem->s = s;
    problem->device = x->device;
    if (x->device.device_type != NORMFUSE_CPU && x->device.device_type != NORMFUSE_CUDA)
        return normfuse_refuse(NORMFUSE_UNSUPPORTED,
                               "%s: tensors.x is on a device of type %d; CPU (1) and CUDA (2) are supported",
                               problem->name, (int)x->device.device_type);
    return NORMFUSE_OK;
}

static void choose_picture(struct normfuse_problem *problem, const struct normfuse_view *x)
{
    if (problem->s > 1)
        problem->columns = x->position != 1;
    else
        problem->columns = problem->c > 1 && x->channel == 1;
}

/* ---- a call --------------------------------------------------------------------------------------------------- */

/* The common members of the options structs; fields that an operator does not have are 0. */
struct settings {
    enum operator operator;
    enum normfuse_call call;
    uint32_t flags, known_flags;
    int64_t groups;
    double eps;
    int32_t activation, reserved;
    double act_param, momentum;
    int64_t batches_seen, set_values;
    int32_t statistics, eps_kind;
};

static normfuse_status check_settings(struct normfuse_problem *problem, const struct settings *settings)
{
    const char *const name = problem->name;
    const uint32_t flags = settings->flags;
    if ((flags & ~settings->known_flags) != 0)
        return normfuse_refuse(NORMFUSE_BAD_ARGUMENT,
                               "%s: options.flags has bits 0x%" PRIx32 " that this operator does not know", name,
                               flags & ~settings->known_flags);
    if (settings->reserved != 0)
        return normfuse_refuse(NORMFUSE_BAD_ARGUMENT, "%s: options.reserved is %" PRId32 ", must be 0", name,
                               settings->reserved);
    if (settings->activation < 0 || settings->activation >= NORMFUSE_ACTIVATIONS)
        return normfuse_refuse(NORMFUSE_BAD_ARGUMENT, "%s: options.activation is %" PRId32 ", the last known one is %d",
                               name, settings->activation, NORMFUSE_ACTIVATIONS - 1);
    if ((flags & NORMFUSE_ACCUMULATE) != 0 && !calls[settings->call].accumulates)
        return normfuse_refuse(NORMFUSE_BAD_ARGUMENT,
                               "%s: options.flags has NORMFUSE_ACCUMULATE, which this call does not take", name);
    if ((flags & NORMFUSE_EVALUATE) != 0 && calls[settings->call].sharded)
        return normfuse_refuse(NORMFUSE_BAD_ARGUMENT,
                               "%s: options.flags has NORMFUSE_EVALUATE, where there are no statistics to share", name);
    if ((flags & NORMFUSE_CUMULATIVE) != 0 && settings->batches_seen < 0)
        return normfuse_refuse(NORMFUSE_BAD_ARGUMENT, "%s: options.batches_seen is %" PRId64 ", must not be negative",
                               name, settings->batches_seen);
    if (settings->set_values < 0)
        return normfuse_refuse(NORMFUSE_BAD_ARGUMENT, "%s: options.set_values is %" PRId64 ", must not be negative",
                               name, settings->set_values);
    if (settings->operator == BATCH_NORM && (flags & NORMFUSE_EVALUATE) == 0 && !(settings->eps > 0))
        return normfuse_refuse(NORMFUSE_BAD_ARGUMENT, "%s: options.eps is %g, training needs one above 0", name,
                               settings->eps);
    if (settings->statistics < 0 || settings->statistics > NORMFUSE_MEAN_SQUARE)
        return normfuse_refuse(NORMFUSE_BAD_ARGUMENT, "%s: options.statistics is %" PRId32 ", the last known one is %d",
                               name, settings->statistics, NORMFUSE_MEAN_SQUARE);
    if (settings->eps_kind < 0 || settings->eps_kind > NORMFUSE_EPS_OF_NORM)
        return normfuse_refuse(NORMFUSE_BAD_ARGUMENT, "%s: options.eps_kind is %" PRId32 ", the last known one is %d",
                               name, settings->eps_kind, NORMFUSE_EPS_OF_NORM);
    if (settings->eps_kind == NORMFUSE_EPS_OF_NORM && !(settings->eps >= 0))
        return normfuse_refuse(NORMFUSE_BAD_ARGUMENT, "%s: options.eps is %g, NORMFUSE_EPS_OF_NORM needs 0 or above",
                               name, settings->eps);
    problem->accumulate = (flags & NORMFUSE_ACCUMULATE) != 0;
    problem->evaluate = (flags & NORMFUSE_EVALUATE) != 0;
    problem->activation = settings->activation;
    problem->act_param = (flags & NORMFUSE_HAS_ACT_PARAM) != 0
                             ? settings->act_param
                             : normfuse_activation_table[settings->activation].default_param;
    problem->eps = settings->eps;
    problem->statistics = settings->statistics;
    problem->eps_kind = settings->eps_kind;
    problem->momentum =
        (flags & NORMFUSE_CUMULATIVE) != 0 ? 1.0 / ((double)settings->batches_seen + 1.0) : settings->momentum;
    return NORMFUSE_OK;
}

static enum slot first_of(uint32_t mask)
{
    return (enum slot)__builtin_ctz(mask);
}

static normfuse_status read_tensors(const normfuse_tensor *tensors[SLOTS], const char *call,
                                    const normfuse_tensors *given)
{
    if (given == NULL)
        return normfuse_refuse(NORMFUSE_BAD_ARGUMENT, "%s: tensors is NULL", call);
    const normfuse_status status = normfuse_check_struct(call, "tensors", given->struct_bytes, sizeof *given);
    if (status != NORMFUSE_OK)
        return status;
    if (given->flags != 0)
        return normfuse_refuse(NORMFUSE_BAD_ARGUMENT, "%s: tensors.flags is 0x%" PRIx32 ", must be 0", call,
                               given->flags);
    memcpy(tensors, (const char *)given + offsetof(normfuse_tensors, x), SLOTS * sizeof *tensors);
    return NORMFUSE_OK;
}

static uint32_t present_of(const normfuse_tensor *const tensors[SLOTS])
{
    uint32_t present = 0;
    for (int slot = 0; slot < SLOTS; slot++)
        present |= (uint32_t)(tensors[slot] != NULL) << slot;
    return present;
}

static normfuse_status check_mask(const char *call, uint32_t present, uint32_t allowed, uint32_t required,
                                  const char *mode)
{
    if ((present & ~allowed) != 0)
        return normfuse_refuse(NORMFUSE_BAD_ARGUMENT, "%s: %s is not taken by this call%s and must be NULL", call,
                               slots[first_of(present & ~allowed)].name, mode);
    if ((required & ~present) != 0)
        return normfuse_refuse(NORMFUSE_BAD_ARGUMENT, "%s: %s is NULL, but required%s", call,
                               slots[first_of(required & ~present)].name, mode);
    return NORMFUSE_OK;
}

normfuse_status normfuse_check_fold_tensors(const char *call, const normfuse_tensors *tensors)
{
    const normfuse_tensor *given[SLOTS];
    const normfuse_status status = read_tensors(given, call, tensors);
    if (status != NORMFUSE_OK)
        return status;
    return check_mask(call, present_of(given), RUNNING | BIT(WEIGHT) | BIT(BIAS), RUNNING, "");
}

/* True if act'(z) is a function of y: y has z's sign and, for relu6, reaches 6 where z does. */
static bool has_derivative_of_y(const struct normfuse_problem *problem)
{
    switch (problem->activation) {
    case NORMFUSE_RELU:
    case NORMFUSE_RELU6: return true;
    case NORMFUSE_LEAKY_RELU: return problem->act_param > 0;
    default: return false;
    }
}

/* present and *outputs: bits of the slots. */
static normfuse_status check_presence(const struct normfuse_problem *problem, const struct settings *settings,
                                      uint32_t present, uint32_t *outputs)
{
    const struct call *const call = &calls[settings->call];
    uint32_t allowed = call->allowed, required = call->required;
    *outputs = call->outputs;
    if (settings->operator == AFFINE)
        allowed &= ~NORM_ONLY, required &= ~SAVED;
    else if (settings->operator == BATCH_NORM)
        allowed &= ~ADAPTIVE;
    else if (settings->operator == CHANNEL_NORM)
        allowed &= ~SHARED_STATISTICS;
    const bool has_mean = settings->statistics != NORMFUSE_MEAN_SQUARE;
    if (!has_mean)
        allowed &= ~BIT(MEAN), required &= ~BIT(MEAN);
    if (problem->evaluate) {
        allowed = (allowed & ~(SAVED | BIT(STATS) | BIT(SUMS))) | RUNNING;
        required = (required & ~SAVED) | RUNNING;
        *outputs &= ~RUNNING;
    }
    if (settings->call == NORMFUSE_CALL_FORWARD && (settings->operator == AFFINE || problem->evaluate))
        required |= BIT(Y);
    if (problem->activation == NORMFUSE_PRELU && (present & (BIT(Y) | BIT(DY))) != 0)
        required |= allowed & BIT(SLOPE);
    if (problem->activation != NORMFUSE_PRELU && (present & (BIT(SLOPE) | BIT(DSLOPE))) != 0)
        return normfuse_refuse(NORMFUSE_BAD_ARGUMENT, "%s: %s is for prelu alone and must be NULL", problem->name,
                               slots[first_of(present & (BIT(SLOPE) | BIT(DSLOPE)))].name);

    const normfuse_status status =
        check_mask(problem->name, present, allowed, required,
                   problem->evaluate ? " with NORMFUSE_EVALUATE" : has_mean ? "" : " with NORMFUSE_MEAN_SQUARE");
    if (status != NORMFUSE_OK)
        return status;
    if ((present & BIT(U)) != 0 && (present & PRE) == 0)
        return normfuse_refuse(NORMFUSE_BAD_ARGUMENT,
                               "%s: tensors.u needs tensors.pre_add or tensors.pre_bias; without them u is x",
                               problem->name);
    if ((present & BIT(DPRE_BIAS)) != 0 && (present & BIT(DX)) == 0)
        return normfuse_refuse(NORMFUSE_BAD_ARGUMENT, "%s: tensors.dpre_bias needs tensors.dx, whose sum it is",
                               problem->name);
    if ((present & BIT(Y)) != 0 && (call->phases & BACKWARD_PHASES) != 0) {
        if ((present & BIT(POST_ADD)) != 0)
            return normfuse_refuse(NORMFUSE_BAD_ARGUMENT, "%s: tensors.y and tensors.post_add are given, expected one",
                                   problem->name);
        if (!has_derivative_of_y(problem))
            return normfuse_refuse(NORMFUSE_BAD_ARGUMENT,
                                   "%s: tensors.y is for relu, relu6 and leaky_relu with a slope above 0",
                                   problem->name);
    }
    if ((present & RUNNING) != 0 && (present & RUNNING) != RUNNING)
        return normfuse_refuse(NORMFUSE_BAD_ARGUMENT, "%s: %s is NULL, the running statistics come together",
                               problem->name, slots[first_of(RUNNING & ~present)].name);
    return NORMFUSE_OK;
}

static normfuse_status check_groups(struct normfuse_problem *problem, const struct settings *settings, uint32_t present)
{
    const int64_t c = problem->c;
    problem->groups = c;
    if (settings->operator != GROUP_NORM && settings->operator != CHANNEL_NORM)
        return NORMFUSE_OK;
    const int64_t groups = settings->groups;
    if (groups < 0 || (groups == 0 && c != 0))
        return normfuse_refuse(NORMFUSE_BAD_ARGUMENT, "%s: options.groups is %" PRId64 ", must be above 0",
                               problem->name, groups);
    if (groups != 0 && c % groups != 0)
        return normfuse_refuse(NORMFUSE_BAD_SHAPE,
                               "%s: options.groups is %" PRId64 " and does not divide the %" PRId64
                               " channels of tensors.x",
                               problem->name, groups, c);
    if (groups != c && (settings->flags & (NORMFUSE_EVALUATE | NORMFUSE_CUMULATIVE)) != 0)
        return normfuse_refuse(NORMFUSE_BAD_ARGUMENT,
                               "%s: options.flags has NORMFUSE_EVALUATE or NORMFUSE_CUMULATIVE, "
                               "which need groups = C (%" PRId64 ", %" PRId64 ")",
                               problem->name, groups, c);
    if (groups != c && (present & RUNNING) != 0)
        return normfuse_refuse(NORMFUSE_BAD_ARGUMENT, "%s: %s needs groups = C (%" PRId64 ", %" PRId64 ")",
                               problem->name, slots[first_of(present & RUNNING)].name, groups, c);
    problem->groups = groups;
    return NORMFUSE_OK;
}

static int32_t type_of_big(const struct normfuse_problem *problem, enum slot slot)
{
    return slot == Y || slot == DY || slot == POST_ADD || slot == DPOST_ADD ? problem->y_type : problem->type;
}

/* The type of y and of what is like it: x's, but for channel norm's. */
static normfuse_status take_y_type(struct normfuse_problem *problem, const struct settings *settings,
                                   const normfuse_tensor *const *tensors)
{
    problem->y_type = problem->type;
    const enum slot slot = tensors[DY] != NULL ? DY : Y;
    if (settings->operator != CHANNEL_NORM || tensors[slot] == NULL)
        return NORMFUSE_OK;
    const normfuse_status status = check_type(&problem->y_type, problem->name, slots[slot].name, tensors[slot]->dtype);
    const bool differs = status == NORMFUSE_OK && problem->y_type != problem->type;
    /* one is f32, the other one has 16 bits */
    if (differs && normfuse_type_bytes(problem->type) + normfuse_type_bytes(problem->y_type) != 6)
        return normfuse_refuse(NORMFUSE_UNSUPPORTED,
                               "%s: %s must have the dtype of tensors.x, or one of them f32 and the other one 16 bits",
                               problem->name, slots[slot].name);
    return status;
}

static normfuse_status take_big(struct normfuse_problem *problem, struct range *range, enum slot slot,
                                const normfuse_tensor *tensor, const normfuse_tensor *x, bool is_output)
{
    const char *const name = slots[slot].name;
    struct normfuse_view *const view = (struct normfuse_view *)((char *)problem + slots[slot].offset);
    int32_t type;
    normfuse_status status = check_type(&type, problem->name, name, tensor->dtype);
    if (status != NORMFUSE_OK)
        return status;
    if (type != type_of_big(problem, slot))
        return normfuse_refuse(NORMFUSE_UNSUPPORTED, "%s: %s must have the dtype of tensors.%s", problem->name, name,
                               type_of_big(problem, slot) == problem->type ? "x" : "y and tensors.dy");
    if (tensor->ndim != x->ndim)
        return normfuse_refuse(NORMFUSE_BAD_SHAPE, "%s: %s has %d axes, tensors.x has %d", problem->name, name,
                               (int)tensor->ndim, (int)x->ndim);
    if (tensor->shape == NULL)
        return normfuse_refuse(NORMFUSE_BAD_POINTER, "%s: %s.shape is NULL", problem->name, name);
    for (int32_t a = 0; a < x->ndim; a++)
        if (tensor->shape[a] != x->shape[a])
            return normfuse_refuse(NORMFUSE_BAD_SHAPE,
                                   "%s: %s has %" PRId64 " elements along axis %d, tensors.x has %" PRId64,
                                   problem->name, name, tensor->shape[a], (int)a, x->shape[a]);
    *range = no_range;
    if (normfuse_is_empty(problem))
        view->data = tensor->data;
    else
        status = locate_big(view, range, problem, name, tensor, type, is_output);
    if (slot == X && !normfuse_is_empty(problem))
        choose_picture(problem, view);
    fit_picture(view, problem);
    return status;
}

/* mean, rstd, stats and sums: `elements` values in a row. */
static normfuse_status take_flat(struct normfuse_problem *problem, struct range *range, enum slot slot,
                                 const normfuse_tensor *tensor)
{
    const char *const name = slots[slot].name;
    struct normfuse_flat flat;
    const normfuse_status status = flat_tensor(&flat, range, problem->name, name, tensor);
    if (status != NORMFUSE_OK)
        return status;
    const bool batch = problem->sets == NORMFUSE_SETS_BATCH;
    const int64_t of_set = problem->sets == NORMFUSE_SETS_POSITION ? problem->s : 1;
    const int64_t each = slot == STATS ? 3 : slot == SUMS ? 2 : of_set;
    /* Without channels any number of groups is legal. */
    int64_t elements = slot == SUMS ? problem->c : problem->groups;
    if (__builtin_mul_overflow(elements, batch ? 1 : problem->n, &elements) ||
        __builtin_mul_overflow(elements, each, &elements))
        return normfuse_refuse(NORMFUSE_BAD_SHAPE, "%s: the sizes of %s overflow", problem->name, name);
    if (flat.elements != elements)
        return normfuse_refuse(NORMFUSE_BAD_SHAPE, "%s: %s has %" PRId64 " elements, expected %" PRId64, problem->name,
                               name, flat.elements, elements);
    const bool f64_only = slots[slot].kind == JOINED || problem->type == NORMFUSE_F64;
    if (flat.type != NORMFUSE_F64 && (f64_only || flat.type != NORMFUSE_F32))
        return normfuse_refuse(NORMFUSE_UNSUPPORTED, "%s: %s must be f64%s", problem->name, name,
                               f64_only       ? ""
                               : slot == MEAN ? " or f32"
                                              : "");
    if (slot == RSTD && (flat.type == NORMFUSE_F64) != (problem->type == NORMFUSE_F64))
        return normfuse_refuse(NORMFUSE_UNSUPPORTED, "%s: %s must be f32, but for f64 tensors.x", problem->name, name);
    if (slots[slot].kind == JOINED)
        *(double **)((char *)problem + slots[slot].offset) = (double *)(void *)flat.data;
    else
        *(struct normfuse_parameter *)((char *)problem + slots[slot].offset) = (struct normfuse_parameter){
            flat.data, batch || elements == 0 ? 0 : problem->groups * each, each, flat.type};
    return NORMFUSE_OK;
}

/* slope, or dslope, which has its size: [C], or [1] for all channels. */
static normfuse_status take_shared(struct normfuse_problem *problem, struct range *range, enum slot slot,
                                   const normfuse_tensor *tensor, const normfuse_tensor *slope, bool is_output)
{
    const char *const name = slots[slot].name;
    const int64_t c = slope->ndim == 1 && slope->shape != NULL && slope->shape[0] == 1 ? 1 : problem->c;
    if (is_output && tensor->ndim == 1 && tensor->shape != NULL && tensor->shape[0] != c)
        return refuse_size(problem->name, name, "C", tensor->shape[0], slots[SLOPE].name, c);
    return parameter_tensor((struct normfuse_parameter *)((char *)problem + slots[slot].offset), range, problem->name,
                            name, tensor, false, 1, c, is_output);
}

/* Sizes and strides of a big tensor or a parameter; parameters of one value on an axis have stride 0 there. */
static void lattice_of(const struct normfuse_problem *problem, enum slot slot, int64_t sizes[AXES],
                       ptrdiff_t strides[AXES], char **data, int32_t *type)
{
    const char *const field = (const char *)problem + slots[slot].offset;
    sizes[0] = problem->n;
    sizes[1] = problem->c;
    sizes[2] = problem->s;
    if (slots[slot].kind == BIG) {
        const struct normfuse_view *const view = (const struct normfuse_view *)field;
        strides[0] = view->batch;
        strides[1] = view->channel;
        strides[2] = view->position;
        *data = view->data;
        *type = type_of_big(problem, slot);
    } else {
        const struct normfuse_parameter *const parameter = (const struct normfuse_parameter *)field;
        strides[0] = parameter->batch;
        strides[1] = parameter->channel;
        strides[2] = 0;
        *data = parameter->data;
        *type = parameter->type;
        if (parameter->batch == 0)
            sizes[0] = 1;
        if (parameter->channel == 0)
            sizes[1] = 1;
        sizes[2] = 1;
    }
}

/* True if `output` and `other`, whose ranges meet, share memory in a way that is not permitted. */
static bool is_overlap(const struct normfuse_problem *problem, enum slot output, enum slot other)
{
    if (slots[output].kind >= STATISTICS || slots[other].kind >= STATISTICS)
        return true;
    int64_t sizes[AXES], other_sizes[AXES];
    ptrdiff_t strides[AXES], other_strides[AXES];
    char *data, *other_data;
    int32_t type, other_type;
    lattice_of(problem, output, sizes, strides, &data, &type);
    lattice_of(problem, other, other_sizes, other_strides, &other_data, &other_type);
    for (int a = 0; a < AXES; a++)
        if (sizes[a] != other_sizes[a] || (sizes[a] > 1 && strides[a] != other_strides[a]))
            return true;
    if (type != other_type)
        return true;
    if (data == other_data && (in_place(output) & BIT(other)) != 0)
        return false;
    /* Both are aligned to their element. */
    const ptrdiff_t distance =
        (ptrdiff_t)((uintptr_t)data - (uintptr_t)other_data) / (ptrdiff_t)normfuse_type_bytes(type);
    const int axes = sort_axes(other_sizes, other_strides, sizes, strides);
    return distance_is_met(distance, axes, other_sizes, other_strides);
}

static normfuse_status check_overlap(const struct normfuse_problem *problem, uint32_t present, uint32_t outputs,
                                     const struct range *ranges)
{
    for (uint32_t left = present & outputs; left != 0; left &= left - 1) {
        const enum slot output = first_of(left);
        /* A pair of outputs is looked at once. */
        for (uint32_t others = present & ~(outputs & (BIT(output) | (BIT(output) - 1))); others != 0;
             others &= others - 1) {
            const enum slot other = first_of(others);
            if (ranges[output].low < ranges[other].high && ranges[other].low < ranges[output].high &&
                is_overlap(problem, output, other))
                return normfuse_refuse(NORMFUSE_OVERLAP, "%s: %s, an output, overlaps %s", problem->name,
                                       slots[output].name, slots[other].name);
        }
    }
    return NORMFUSE_OK;
}

/* True if merged statistics on the CPU have a set of one value. */
static bool has_count_of_one(const struct normfuse_problem *problem)
{
    const int64_t sets = problem->sets == NORMFUSE_SETS_BATCH ? problem->c : problem->n * problem->groups;
    for (int64_t i = 0; i < sets; i++)
        if (problem->stats[3 * i] == 1.0)
            return true;
    return false;
}

/* Checks the number of values of a set: one value a set has no unbiased variance, and batch norm of it is a
 * constant. A shard may have one. */
static normfuse_status check_values(struct normfuse_problem *problem, const struct settings *settings, uint32_t present)
{
    const int64_t n = problem->n, c = problem->c, s = problem->s;
    const bool batch = problem->sets == NORMFUSE_SETS_BATCH, group = problem->sets == NORMFUSE_SETS_GROUP;
    const bool updates = (present & RUNNING) != 0 && !problem->evaluate;
    problem->set_values = batch ? n * s : group && c != 0 ? c / problem->groups * s : 1;
    if (settings->call == NORMFUSE_CALL_BACKWARD_APPLY && settings->set_values != 0)
        problem->set_values = settings->set_values;
    /* An empty batch has nothing that running statistics could take; merged ones may have. Without channels there are
     * none. */
    problem->has_running_momentum = updates && c != 0 &&
                                    (settings->call == NORMFUSE_CALL_APPLY ||
                                     settings->call == NORMFUSE_CALL_FORWARD_SCRATCH || !normfuse_is_empty(problem));

    const char *counted = "tensors.x";
    bool is_one = problem->set_values == 1 && !(group && c == 0); /* without channels there is no group */
    switch (settings->call) {
    case NORMFUSE_CALL_FORWARD:
    case NORMFUSE_CALL_BACKWARD: break;
    case NORMFUSE_CALL_BACKWARD_APPLY:
        if (settings->set_values != 0)
            counted = "options.set_values";
        break;
    case NORMFUSE_CALL_APPLY:
        counted = "tensors.stats";
        is_one = (batch || updates) && problem->device.device_type == NORMFUSE_CPU && has_count_of_one(problem);
        break;
    default: return NORMFUSE_OK;
    }
    if (is_one && batch)
        return normfuse_refuse(NORMFUSE_BAD_SHAPE, "%s: %s: expected more than 1 value per channel when training",
                               problem->name, counted);
    if (is_one && updates)
        return normfuse_refuse(NORMFUSE_BAD_SHAPE,
                               "%s: tensors.running_var takes the unbiased variance, which needs more "
                               "than 1 value per channel",
                               problem->name);
    return NORMFUSE_OK;
}

/* ---- calls as before ------------------------------------------------------------------------------------------ */

/* This thread's last small calls on the CPU. A call that differs from one of them in addresses alone takes its problem and
 * its plan: both are half of the time of a call of 256 elements. */
enum { MEMOS = 4, MEMO_VALUES = 8192, KEY_WORDS = 96 };
static _Thread_local struct memo {
    int64_t key[KEY_WORDS]; /* settings, and tensors without addresses; */
    int32_t words;          /* so many, 0: none */
    uint32_t outputs;
    struct normfuse_problem problem;
    struct range reach[SLOTS]; /* of each tensor's bytes, from its first element on */
    uint64_t of_backend[NORMFUSE_MEMO_WORDS];
} memos[MEMOS];
enum { FACTS = offsetof(normfuse_tensor, shape) - offsetof(normfuse_tensor, device) };
_Static_assert(sizeof(struct settings) == 80 && FACTS == 16, "a key has no padding");

/* The words of a call's key; 0: it is not to be remembered. */
static int32_t make_key(int64_t *key, const struct settings *settings, const normfuse_tensor *const *tensors,
                        uint32_t present)
{
    int32_t words = sizeof *settings / sizeof *key;
    memcpy(key, settings, sizeof *settings);
    key[words++] = present;
    for (uint32_t left = present; left != 0; left &= left - 1) {
        const normfuse_tensor *const tensor = tensors[first_of(left)];
        if (tensor->ndim < 1 || tensor->ndim > NORMFUSE_MAX_AXES || words + 2 + 2 * tensor->ndim > KEY_WORDS ||
            tensor->shape == NULL || tensor->strides == NULL)
            return 0;
        memcpy(key + words, &tensor->device, FACTS); /* and ndim, dtype */
        words += FACTS / 8;
        for (int32_t a = 0; a < tensor->ndim; a++) {
            key[words++] = tensor->shape[a];
            key[words++] = tensor->strides[a];
        }
    }
    const bool has_channels = (present & BIT(X)) != 0 && tensors[X]->ndim >= 2;
    return settings->call <= NORMFUSE_CALL_BACKWARD && has_channels ? words : 0;
}

/* Every tensor's member of the problem begins with its address. */
static char **data_of(struct normfuse_problem *problem, enum slot slot)
{
    return (char **)((char *)problem + slots[slot].offset);
}

/* False: the addresses are to be looked at as those of a new call. */
static bool recall(struct normfuse_problem *problem, const struct memo *memo, const normfuse_tensor *const *tensors,
                   uint32_t present)
{
    struct range ranges[SLOTS];
    *problem = memo->problem;
    for (uint32_t left = present; left != 0; left &= left - 1) {
        const enum slot slot = first_of(left);
        const uintptr_t address = (uintptr_t)tensors[slot]->data + (uintptr_t)tensors[slot]->byte_offset;
        ranges[slot] = (struct range){address + memo->reach[slot].low, address + memo->reach[slot].high};
        if (tensors[slot]->data == NULL || address % sizeof(double) != 0 || address < tensors[slot]->byte_offset ||
            ranges[slot].low > address || ranges[slot].high < address)
            return false;
        *data_of(problem, slot) = (char *)tensors[slot]->data + tensors[slot]->byte_offset;
    }
    return check_overlap(problem, present, memo->outputs, ranges) == NORMFUSE_OK;
}

static normfuse_status build(struct normfuse_problem *problem, const struct settings *settings,
                             const normfuse_tensors *given)
{
    const normfuse_tensor *tensors[SLOTS];
    normfuse_status status = read_tensors(tensors, problem->name, given);
    if (status != NORMFUSE_OK)
        return status;
    const uint32_t present = present_of(tensors);
    uint32_t outputs;
    int64_t key[KEY_WORDS];
    const int32_t words = make_key(key, settings, tensors, present);
    const int64_t some_channels = words > 0 ? tensors[X]->shape[1] / 8 : 0;
    struct memo *const memo = &memos[(size_t)(settings->call + 2 * some_channels) % MEMOS]; /* two for each direction */
    if (words > 0 && memo->words == words && memcmp(memo->key, key, (size_t)words * sizeof *key) == 0 &&
        recall(problem, memo, tensors, present))
        return NORMFUSE_OK;
    *problem = (struct normfuse_problem){.name = problem->name};
    if ((status = check_settings(problem, settings)) != NORMFUSE_OK ||
        (status = check_presence(problem, settings, present, &outputs)) != NORMFUSE_OK ||
        (status = take_shape(problem, tensors[X])) != NORMFUSE_OK ||
        (status = take_y_type(problem, settings, tensors)) != NORMFUSE_OK ||
        (status = check_groups(problem, settings, present)) != NORMFUSE_OK)
        return status;

    problem->sets = settings->operator == AFFINE || problem->evaluate ? NORMFUSE_SETS_NONE
                    : settings->operator == BATCH_NORM                ? NORMFUSE_SETS_BATCH
                    : settings->operator == CHANNEL_NORM              ? NORMFUSE_SETS_POSITION
                                                                      : NORMFUSE_SETS_GROUP;
    problem->phases = calls[settings->call].phases;
    if (problem->sets == NORMFUSE_SETS_NONE)
        problem->phases &= ~NORMFUSE_PHASE_STATISTICS;
    else if (settings->call == NORMFUSE_CALL_FORWARD && tensors[Y] == NULL)
        problem->phases = NORMFUSE_PHASE_STATISTICS;

    const uint32_t affine_parameters =
        settings->operator == AFFINE ? present & (BIT(WEIGHT) | BIT(BIAS) | BIT(DWEIGHT) | BIT(DBIAS)) : 0;
    const bool per_sample = affine_parameters != 0 && tensors[first_of(affine_parameters)]->ndim == 2;

    struct range ranges[SLOTS];
    for (uint32_t left = present; left != 0; left &= left - 1) {
        const enum slot slot = first_of(left);
        const normfuse_tensor *const tensor = tensors[slot];
        const bool is_output = (outputs & BIT(slot)) != 0;
        status = check_device(problem->name, slots[slot].name, tensor->device, problem->device);
        if (status != NORMFUSE_OK)
            return status;
        if (slots[slot].kind == BIG)
            status = take_big(problem, &ranges[slot], slot, tensor, tensors[X], is_output);
        else if (slots[slot].kind >= STATISTICS)
            status = take_flat(problem, &ranges[slot], slot, tensor);
        else if (slots[slot].kind == SHARED)
            status = take_shared(problem, &ranges[slot], slot, tensor, tensors[SLOPE], is_output);
        else
            status =
                parameter_tensor((struct normfuse_parameter *)((char *)problem + slots[slot].offset), &ranges[slot],
                                 problem->name, slots[slot].name, tensor,
                                 slots[slot].kind == SAMPLE_CHANNEL || (affine_parameters & BIT(slot) && per_sample) ||
                                     (slots[slot].kind == EITHER && tensor->ndim == 2),
                                 problem->n, problem->c, is_output);
        if (status != NORMFUSE_OK)
            return status;
    }
    /* The destination of a sum is [C]: [N, C] of one sample is not. */
    problem->accumulate_slope = problem->accumulate;
    problem->accumulate_pre_bias = problem->accumulate && tensors[DPRE_BIAS] != NULL && tensors[DPRE_BIAS]->ndim == 1;
    problem->accumulate = problem->accumulate && !per_sample;
    /* One sample, too, as a shard of several, and where all samples have the same. */
    problem->weights_samples = per_sample;
    problem->biases_samples = (present & BIT(PRE_BIAS)) != 0 && tensors[PRE_BIAS]->ndim == 2;
    status = check_values(problem, settings, present);
    if (status == NORMFUSE_OK)
        status = check_overlap(problem, present, outputs, ranges);
    const bool is_small = !normfuse_is_empty(problem) && problem->n * problem->c * problem->s <= MEMO_VALUES;
    if (status == NORMFUSE_OK && words > 0 && is_small && problem->device.device_type == NORMFUSE_CPU &&
        settings->operator != CHANNEL_NORM && (present & ~outputs & BIT(Y)) == 0) {
        for (uint32_t left = present; left != 0; left &= left - 1) {
            const uintptr_t first = (uintptr_t)*data_of(problem, first_of(left));
            const struct range *const range = &ranges[first_of(left)];
            memo->reach[first_of(left)] = (struct range){range->low - first, range->high - first};
        }
        problem->memo = memset(memo->of_backend, 0, sizeof memo->of_backend);
        memo->problem = *problem;
        memo->outputs = outputs;
        memcpy(memo->key, key, (size_t)words * sizeof *key);
        memo->words = words;
    }
    if ((present & BIT(Y)) != 0 && (outputs & BIT(Y)) == 0) {
        problem->post_add = problem->y;
        problem->y = (struct normfuse_view){0};
        problem->from_y = true;
    }
    if (problem->c == 0 && problem->sets == NORMFUSE_SETS_GROUP) {
        /* Groups of no channels have the statistics of channels of no positions. */
        problem->c = problem->groups;
        problem->s = 0;
    }
    return status;
}

/* ---- the operators -------------------------------------------------------------------------------------------- */

static normfuse_status check_options(struct normfuse_problem *problem, enum operator operator, enum normfuse_call call,
                                     const void *options, size_t known_bytes)
{
    *problem = (struct normfuse_problem){.name = call_names[operator][call]};
    if (options == NULL)
        return normfuse_refuse(NORMFUSE_BAD_ARGUMENT, "%s: options is NULL", problem->name);
    uint32_t struct_bytes;
    memcpy(&struct_bytes, options, sizeof struct_bytes);
    return normfuse_check_struct(problem->name, "options", struct_bytes, known_bytes);
}

#define KNOWN_FLAGS (NORMFUSE_HAS_ACT_PARAM | NORMFUSE_ACCUMULATE)
#define OF_MOMENTS                                                                                                     \
    .eps = options->eps, .momentum = options->momentum, .batches_seen = options->batches_seen,                         \
    .set_values = options->set_values
/* A function of an operator; what follows the flags that it knows are settings that not all operators have. */
#define OPERATOR(name, operator_of, flags_known, ...)                                                                  \
    normfuse_status normfuse_##name##_problem(struct normfuse_problem *problem, enum normfuse_call call,               \
                                              const normfuse_##name##_options *options,                                \
                                              const normfuse_tensors *tensors)                                         \
    {                                                                                                                  \
        const normfuse_status status = check_options(problem, operator_of, call, options, sizeof *options);            \
        if (status != NORMFUSE_OK)                                                                                     \
            return status;                                                                                             \
        const struct settings settings = {.operator = operator_of, .call = call, .flags = options->flags,              \
                                          .known_flags = flags_known, .activation = options->activation,               \
                                          .reserved = options->reserved, .act_param = options->act_param,              \
                                          __VA_ARGS__};                                                                \
        return build(problem, &settings, tensors);                                                                     \
    }

OPERATOR(group_norm, GROUP_NORM, KNOWN_FLAGS | NORMFUSE_EVALUATE | NORMFUSE_CUMULATIVE, .groups = options->groups,
         OF_MOMENTS)
OPERATOR(batch_norm, BATCH_NORM, KNOWN_FLAGS | NORMFUSE_EVALUATE | NORMFUSE_CUMULATIVE, OF_MOMENTS)
OPERATOR(channel_norm, CHANNEL_NORM, KNOWN_FLAGS, .groups = options->groups, .eps = options->eps,
         .statistics = options->statistics, .eps_kind = options->eps_kind)
OPERATOR(affine, AFFINE, KNOWN_FLAGS, .statistics = NORMFUSE_MEAN_AND_VARIANCE)
#undef OPERATOR

normfuse_status normfuse_shape_problem(struct normfuse_problem *problem, const char *name, const normfuse_tensor *x)
{
    *problem = (struct normfuse_problem){.name = name};
    if (x == NULL)
        return normfuse_refuse(NORMFUSE_BAD_ARGUMENT, "%s: x is NULL", name);
    const normfuse_status status = take_shape(problem, x);
    if (problem->n == 0) /* no samples: as they would lie */
        problem->n = 1;
    if (status != NORMFUSE_OK || normfuse_is_empty(problem))
        return status;
    struct normfuse_view view;
    if (!view_of(&view, problem, x))
        return refuse_strides(problem, "x");
    choose_picture(problem, &view);
    return NORMFUSE_OK;
}

/* ---- activations ------------------------------------------------------------------------------------------------ */

const char *normfuse_activation_name(int32_t activation, double *default_param)
{
    if (activation < 0 || activation >= NORMFUSE_ACTIVATIONS)
        return NULL;
    *default_param = normfuse_activation_table[activation].default_param;
    return normfuse_activation_table[activation].name;
}
