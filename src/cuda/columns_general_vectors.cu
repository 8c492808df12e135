/* SPDX-License-Identifier: MIT
 *
 * columns_general_vectors.cu - the two passes of the general kernels over columns in vectors of 16 bytes. */
#include "general_backward.cuh"
#include "general_forward.cuh"

#define INSTANCE(layout, schedule, direction, type, elements, vectors, registers)                                      \
    NORMFUSE_KERNEL(layout, schedule, direction, type, elements, vectors, registers)                                   \
    {                                                                                                                  \
        general_##direction<type, elements, vectors, true>(a);                                                         \
    }
NORMFUSE_KERNELS_GENERAL_VECTORS(INSTANCE)
