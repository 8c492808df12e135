/* SPDX-License-Identifier: MIT
 *
 * signature.h - what a kernel is compiled for: integer constants that are a function of the call and of the GPU alone.
 * A kernel is text, src/cuda/device/<body>.cuh, compiled at run time with these constants ahead of it. Sizes are no
 * part of a signature; they are arguments. */
#ifndef NORMFUSE_CUDA_SIGNATURE_H
#define NORMFUSE_CUDA_SIGNATURE_H

#include <stdint.h>

/* The bodies: files of src/cuda/device/ that define a kernel. */
#define NORMFUSE_BODY_LIST(BODY) BODY(single)
#define NORMFUSE_BODY(name) NORMFUSE_BODY_##name,
enum normfuse_cuda_body { NORMFUSE_BODY_LIST(NORMFUSE_BODY) NORMFUSE_BODIES };
#undef NORMFUSE_BODY

/* The constants, by the names that bodies know them by: signature::type. */
#define NORMFUSE_SIGNATURE_LIST(FIELD)                                                                                 \
    FIELD(body)       /* enum normfuse_cuda_body */                                                                    \
    FIELD(backward)   /* 0 or 1 */                                                                                     \
    FIELD(type)       /* normfuse_type */                                                                              \
    FIELD(activation) /* normfuse_activation */

#define NORMFUSE_FIELD(name) int32_t name;
struct normfuse_cuda_signature { /* compared as bytes */
    NORMFUSE_SIGNATURE_LIST(NORMFUSE_FIELD)
};
#undef NORMFUSE_FIELD
#define NORMFUSE_FIELD(name) +1
enum { NORMFUSE_SIGNATURE_FIELDS = 0 NORMFUSE_SIGNATURE_LIST(NORMFUSE_FIELD) };
#undef NORMFUSE_FIELD
_Static_assert(sizeof(struct normfuse_cuda_signature) == NORMFUSE_SIGNATURE_FIELDS * sizeof(int32_t),
               "a signature has no padding");

enum { NORMFUSE_KERNEL_NAME_BYTES = 64 };

/* "normfuse_single_forward_f32". Kernels of several signatures share a name. */
const char *normfuse_cuda_signature_name(const struct normfuse_cuda_signature *signature,
                                         char name[static NORMFUSE_KERNEL_NAME_BYTES]);

#endif
