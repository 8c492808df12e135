/* SPDX-License-Identifier: MIT
 *
 * operator_call.h - the call that a problem line names. */
#ifndef NORMFUSE_CLI_OPERATOR_CALL_H
#define NORMFUSE_CLI_OPERATOR_CALL_H

#include "problem_line.h"

/* With `scratch_bytes` both ask for the scratch memory of the call instead. Of a channel affine, and a channel norm: */
static inline normfuse_status affine_call(const struct problem_line *line, uint32_t flags, bool forward,
                                          const normfuse_tensors *tensors, const normfuse_exec *exec,
                                          size_t *scratch_bytes)
{
    const normfuse_affine_options affine = {.struct_bytes = sizeof affine,
                                            .flags = flags,
                                            .activation = line->activation,
                                            .act_param = line->act_param};
    if (scratch_bytes)
        return forward ? normfuse_affine_forward_scratch_bytes(&affine, tensors, exec, scratch_bytes)
                       : normfuse_affine_backward_scratch_bytes(&affine, tensors, exec, scratch_bytes);
    return forward ? normfuse_affine_forward(&affine, tensors, exec)
                   : normfuse_affine_backward(&affine, tensors, exec);
}

static inline normfuse_status channel_norm_call(const struct problem_line *line, uint32_t flags, bool forward,
                                                const normfuse_tensors *tensors, const normfuse_exec *exec,
                                                size_t *scratch_bytes)
{
    const normfuse_channel_norm_options channel = {.struct_bytes = sizeof channel,
                                                   .flags = flags,
                                                   .groups = line->groups,
                                                   .eps = line->eps,
                                                   .statistics = line->statistics,
                                                   .eps_kind = line->eps_kind,
                                                   .activation = line->activation,
                                                   .act_param = line->act_param};
    if (scratch_bytes)
        return forward ? normfuse_channel_norm_forward_scratch_bytes(&channel, tensors, exec, scratch_bytes)
                       : normfuse_channel_norm_backward_scratch_bytes(&channel, tensors, exec, scratch_bytes);
    return forward ? normfuse_channel_norm_forward(&channel, tensors, exec)
                   : normfuse_channel_norm_backward(&channel, tensors, exec);
}

/* A call of any operator, with a momentum of 0.1. `backward` is the line's, but for a forward that a backward needs. */
static inline normfuse_status operator_call(const struct problem_line *line, bool backward,
                                            const normfuse_tensors *tensors, const normfuse_exec *exec,
                                            size_t *scratch_bytes)
{
    const uint32_t flags = line->has_act_param ? NORMFUSE_HAS_ACT_PARAM : 0;
    if (line->op == AFFINE)
        return affine_call(line, flags, !backward, tensors, exec, scratch_bytes);
    if (line->op == CHANNEL_NORM)
        return channel_norm_call(line, flags, !backward, tensors, exec, scratch_bytes);
    if (line->op == BATCH_NORM) {
        const normfuse_batch_norm_options batch = {.struct_bytes = sizeof batch,
                                                   .flags = flags | (line->evaluate ? NORMFUSE_EVALUATE : 0),
                                                   .eps = line->eps,
                                                   .activation = line->activation,
                                                   .act_param = line->act_param,
                                                   .momentum = 0.1};
        if (scratch_bytes)
            return backward ? normfuse_batch_norm_backward_scratch_bytes(&batch, tensors, exec, scratch_bytes)
                            : normfuse_batch_norm_forward_scratch_bytes(&batch, tensors, exec, scratch_bytes);
        return backward ? normfuse_batch_norm_backward(&batch, tensors, exec)
                        : normfuse_batch_norm_forward(&batch, tensors, exec);
    }
    const normfuse_group_norm_options group = {.struct_bytes = sizeof group,
                                               .flags = flags,
                                               .groups = line->groups,
                                               .eps = line->eps,
                                               .activation = line->activation,
                                               .act_param = line->act_param};
    if (scratch_bytes)
        return backward ? normfuse_group_norm_backward_scratch_bytes(&group, tensors, exec, scratch_bytes)
                        : normfuse_group_norm_forward_scratch_bytes(&group, tensors, exec, scratch_bytes);
    return backward ? normfuse_group_norm_backward(&group, tensors, exec)
                    : normfuse_group_norm_forward(&group, tensors, exec);
}

#endif
