/* SPDX-License-Identifier: MIT
 *
 * general_columns.cu - the general kernels over columns. */
#include "general_backward.cuh"
#include "general_forward.cuh"

#define INSTANCE(layout, schedule, direction, type, elements, vectors, registers)                                      \
    NORMFUSE_KERNEL(layout, schedule, direction, type, elements, vectors, registers)                                   \
    {                                                                                                                  \
        general_##direction<type, elements, vectors, true>(a);                                                         \
    }
NORMFUSE_KERNELS_GENERAL_COLUMNS(INSTANCE)
