/* SPDX-License-Identifier: MIT
 *
 * fold.c - an evaluating batch norm as part of the convolution before it, in double, rounded once to what is written.
 */
#include <inttypes.h>
#include <math.h>

#include "caller.h"
#include "problem.h"
#include "scalar.h"

static const char call[] = "batch_norm_fold";

static double value_of(const struct normfuse_parameter *parameter, int64_t channel, double absent)
{
    if (parameter->data == NULL)
        return absent;
    const ptrdiff_t bytes = (ptrdiff_t)normfuse_type_bytes(parameter->type);
    return normfuse_load(parameter->data + channel * parameter->channel * bytes, parameter->type);
}

struct bytes {
    uintptr_t low, high;
};

static struct bytes bytes_of(const struct normfuse_flat *flat)
{
    const uintptr_t low = (uintptr_t)flat->data;
    return (struct bytes){low, low + (uintptr_t)flat->elements * normfuse_type_bytes(flat->type)};
}

static struct bytes bytes_of_parameter(const struct normfuse_parameter *parameter, int64_t c)
{
    const ptrdiff_t bytes = (ptrdiff_t)normfuse_type_bytes(parameter->type);
    const uintptr_t first = (uintptr_t)parameter->data,
                    last = first + (uintptr_t)((c - 1) * parameter->channel * bytes);
    return (struct bytes){first < last ? first : last, (first < last ? last : first) + (uintptr_t)bytes};
}

static bool meet(struct bytes a, struct bytes b)
{
    return a.low < b.high && b.low < a.high;
}

/* Memory that an output may share with the tensor that it replaces: all or nothing. */
static bool meets_in_part(const struct normfuse_flat *output, const struct normfuse_flat *replaced)
{
    return meet(bytes_of(output), bytes_of(replaced)) &&
           (output->data != replaced->data || output->type != replaced->type);
}

static normfuse_status refuse_overlap(const char *output, const char *other)
{
    return normfuse_refuse(NORMFUSE_OVERLAP, "%s: %s, an output, overlaps %s", call, output, other);
}

static normfuse_status refuse_channels(const char *argument, int64_t elements, int64_t channels)
{
    return normfuse_refuse(NORMFUSE_BAD_SHAPE,
                           "%s: %s has %" PRId64 " elements, conv_weight has %" PRId64 " output channels", call,
                           argument, elements, channels);
}

static normfuse_status flat_on_cpu(struct normfuse_flat *flat, const char *argument, const normfuse_tensor *tensor)
{
    if (tensor == NULL)
        return normfuse_refuse(NORMFUSE_BAD_ARGUMENT, "%s: %s is NULL, but required", call, argument);
    if (tensor->device.device_type != NORMFUSE_CPU)
        return normfuse_refuse(NORMFUSE_UNSUPPORTED, "%s: %s is not on the CPU", call, argument);
    return normfuse_flat_tensor(flat, call, argument, tensor);
}

/* The weight as [outer, channels, inner]. */
struct weight_shape {
    int64_t outer, channels, inner;
};

static normfuse_status check_weight(struct weight_shape *shape, const normfuse_tensor *weight,
                                    const normfuse_tensor *new_weight, bool transposed)
{
    const int32_t axis = transposed ? 1 : 0;
    if (weight->ndim <= axis)
        return normfuse_refuse(NORMFUSE_BAD_SHAPE, "%s: conv_weight has %d axes, the output channels are on axis %d",
                               call, (int)weight->ndim, (int)axis);
    if (new_weight->ndim != weight->ndim)
        return normfuse_refuse(NORMFUSE_BAD_SHAPE, "%s: new_weight has %d axes, conv_weight has %d", call,
                               (int)new_weight->ndim, (int)weight->ndim);
    *shape = (struct weight_shape){transposed ? weight->shape[0] : 1, weight->shape[axis], 1};
    for (int32_t a = 0; a < weight->ndim; a++) {
        if (new_weight->shape[a] != weight->shape[a])
            return normfuse_refuse(NORMFUSE_BAD_SHAPE,
                                   "%s: new_weight has %" PRId64 " elements along axis %d, conv_weight has %" PRId64,
                                   call, new_weight->shape[a], (int)a, weight->shape[a]);
        if (a > axis)
            shape->inner *= weight->shape[a];
    }
    return NORMFUSE_OK;
}

static normfuse_status fold(const normfuse_tensors *tensors, double eps, uint32_t flags,
                            const normfuse_tensor *conv_weight, const normfuse_tensor *conv_bias,
                            const normfuse_tensor *new_weight, const normfuse_tensor *new_bias)
{
    const bool transposed = (flags & NORMFUSE_FOLD_TRANSPOSED) != 0;
    if ((flags & ~(uint32_t)NORMFUSE_FOLD_TRANSPOSED) != 0)
        return normfuse_refuse(NORMFUSE_BAD_ARGUMENT, "%s: flags has unknown bits 0x%" PRIx32, call,
                               flags & ~(uint32_t)NORMFUSE_FOLD_TRANSPOSED);
    struct normfuse_flat weight, bias = {0}, out_weight, out_bias;
    struct weight_shape shape = {0};
    normfuse_status status;
    if ((status = normfuse_check_fold_tensors(call, tensors)) != NORMFUSE_OK ||
        (status = flat_on_cpu(&weight, "conv_weight", conv_weight)) != NORMFUSE_OK ||
        (conv_bias != NULL && (status = flat_on_cpu(&bias, "conv_bias", conv_bias)) != NORMFUSE_OK) ||
        (status = flat_on_cpu(&out_weight, "new_weight", new_weight)) != NORMFUSE_OK ||
        (status = flat_on_cpu(&out_bias, "new_bias", new_bias)) != NORMFUSE_OK ||
        (status = check_weight(&shape, conv_weight, new_weight, transposed)) != NORMFUSE_OK)
        return status;
    const int64_t channels = shape.channels;
    if (out_bias.elements != channels)
        return refuse_channels("new_bias", out_bias.elements, channels);
    if (conv_bias != NULL && bias.elements != channels)
        return refuse_channels("conv_bias", bias.elements, channels);

    struct normfuse_parameter mean, variance, scale = {0}, shift = {0};
    const struct {
        const char *name;
        const normfuse_tensor *tensor;
        struct normfuse_parameter *parameter;
    } parameters[] = {{"tensors.running_mean", tensors->running_mean, &mean},
                      {"tensors.running_var", tensors->running_var, &variance},
                      {"tensors.weight", tensors->weight, &scale},
                      {"tensors.bias", tensors->bias, &shift}};
    for (int i = 0; i < 4; i++) {
        if (parameters[i].tensor == NULL)
            continue;
        if (parameters[i].tensor->device.device_type != NORMFUSE_CPU)
            return normfuse_refuse(NORMFUSE_UNSUPPORTED, "%s: %s is not on the CPU", call, parameters[i].name);
        status =
            normfuse_channel_tensor(parameters[i].parameter, call, parameters[i].name, parameters[i].tensor, channels);
        if (status != NORMFUSE_OK)
            return status;
        if (channels == 0)
            continue;
        const struct bytes read = bytes_of_parameter(parameters[i].parameter, channels);
        if (out_weight.elements != 0 && meet(bytes_of(&out_weight), read))
            return refuse_overlap("new_weight", parameters[i].name);
        if (meet(bytes_of(&out_bias), read))
            return refuse_overlap("new_bias", parameters[i].name);
    }
    if (out_weight.elements != 0) {
        if (meets_in_part(&out_weight, &weight))
            return refuse_overlap("new_weight", "conv_weight");
        if (conv_bias != NULL && meet(bytes_of(&out_weight), bytes_of(&bias)))
            return refuse_overlap("new_weight", "conv_bias");
        if (meet(bytes_of(&out_weight), bytes_of(&out_bias)))
            return refuse_overlap("new_weight", "new_bias");
        if (meet(bytes_of(&out_bias), bytes_of(&weight)))
            return refuse_overlap("new_bias", "conv_weight");
    }
    if (conv_bias != NULL && channels != 0 && meets_in_part(&out_bias, &bias))
        return refuse_overlap("new_bias", "conv_bias");

    const int64_t in_bytes = (int64_t)normfuse_type_bytes(weight.type),
                  out_bytes = (int64_t)normfuse_type_bytes(out_weight.type);
    for (int64_t o = 0; o < channels; o++) {
        const double factor = value_of(&scale, o, 1.0) / sqrt(value_of(&variance, o, 0.0) + eps);
        for (int64_t i = 0; i < shape.outer && out_weight.elements != 0; i++)
            for (int64_t k = 0, at = (i * channels + o) * shape.inner; k < shape.inner; k++, at++)
                normfuse_store(out_weight.data + at * out_bytes, out_weight.type,
                               normfuse_load(weight.data + at * in_bytes, weight.type) * factor);
        const struct normfuse_parameter old_bias = {bias.data, 0, 1, bias.type};
        normfuse_store(out_bias.data + o * (int64_t)normfuse_type_bytes(out_bias.type), out_bias.type,
                       fma(value_of(&old_bias, o, 0.0) - value_of(&mean, o, 0.0), factor, value_of(&shift, o, 0.0)));
    }
    return NORMFUSE_OK;
}

normfuse_status normfuse_batch_norm_fold(const normfuse_tensors *tensors, double eps, uint32_t flags,
                                         const normfuse_tensor *conv_weight, const normfuse_tensor *conv_bias,
                                         const normfuse_tensor *new_weight, const normfuse_tensor *new_bias)
{
    const struct normfuse_caller caller = normfuse_enter();
    const normfuse_status status = fold(tensors, eps, flags, conv_weight, conv_bias, new_weight, new_bias);
    normfuse_leave(&caller);
    return status;
}
