/* SPDX-License-Identifier: MIT
 *
 * signature.c - what a signature has of the call, and its kernel's name. */
#include "signature.h"

#include <stdio.h>

#include "../problem.h"
#include "device/arguments.h"

const char *normfuse_cuda_signature_name(const struct normfuse_cuda_signature *signature,
                                         char name[static NORMFUSE_KERNEL_NAME_BYTES])
{
#define BODY(name) #name,
    static const char *const bodies[] = {NORMFUSE_BODY_LIST(BODY)};
#undef BODY
    static const char *const types[] = {
        [NORMFUSE_F64] = "f64", [NORMFUSE_F32] = "f32", [NORMFUSE_F16] = "f16", [NORMFUSE_BF16] = "bf16"};
    static const char *const works[] = {
        [NORMFUSE_WORK_SHARES] = "shares",   [NORMFUSE_WORK_STATISTICS] = "statistics",
        [NORMFUSE_WORK_RUNNING] = "running", [NORMFUSE_WORK_PARTS] = "parts",
        [NORMFUSE_WORK_GRADIENTS] = "gradients", [NORMFUSE_WORK_MERGE] = "merge"};
    const char *const direction = signature->backward ? "backward" : "forward";
    if (signature->body == NORMFUSE_BODY_transpose)
        snprintf(name, NORMFUSE_KERNEL_NAME_BYTES, "normfuse_%s_%s", bodies[signature->body], types[signature->type]);
    else
        snprintf(name, NORMFUSE_KERNEL_NAME_BYTES, "normfuse_%s_%s_%s", bodies[signature->body],
                 signature->body == NORMFUSE_BODY_finish ? works[signature->work] : direction, types[signature->type]);
    return name;
}

int32_t normfuse_cuda_code_of(const struct normfuse_parameter *parameter)
{
    return parameter->data != NULL ? 1 + parameter->type : 0;
}

struct normfuse_cuda_signature normfuse_cuda_signature_of(enum normfuse_cuda_body body, bool backward,
                                                          const struct normfuse_problem *p)
{
#define CODE(name) .name = normfuse_cuda_code_of(&p->name),
    return (struct normfuse_cuda_signature){
        .body = (int32_t)body,
        .backward = backward,
        .type = p->type,
        .y_type = p->y_type,
        .activation = p->activation,
        .mean_square = p->statistics == NORMFUSE_MEAN_SQUARE,
        .eps_of_norm = p->eps_kind == NORMFUSE_EPS_OF_NORM,
        .rounds_pre_bias = p->rounds_pre_bias && p->pre_bias.data != NULL,
        .pre_add = p->pre_add.data != NULL,
        .post_add = p->post_add.data != NULL,
        .stores_u = !backward && p->u.data != NULL,
        .du = backward && p->du.data != NULL && p->dx.data != NULL,
        .dpost_add = backward && p->dpost_add.data != NULL,
        .from_y = p->from_y,
        .writes_out = (backward ? p->dx.data : p->y.data) != NULL,
        CODE(weight) CODE(bias) CODE(scale) CODE(shift) CODE(pre_bias) CODE(mean) CODE(rstd)
        CODE(running_mean) CODE(running_var) CODE(dweight) CODE(dbias)
        .slope = p->activation == NORMFUSE_PRELU ? normfuse_cuda_code_of(&p->slope) : 0,
        .sums_slopes = backward && p->dslope.data != NULL,
    };
#undef CODE
}
