/* SPDX-License-Identifier: MIT
 *
 * affine_call.h - the call of a problem line's channel affine. */
#ifndef NORMFUSE_CLI_AFFINE_CALL_H
#define NORMFUSE_CLI_AFFINE_CALL_H

#include "problem_line.h"

/* With `scratch_bytes` it asks for the scratch memory of the call instead. */
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

#endif
