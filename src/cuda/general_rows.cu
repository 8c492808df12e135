/* SPDX-License-Identifier: MIT
 *
 * general_rows.cu - the general kernels over rows. */
#include "general_backward.cuh"
#include "general_forward.cuh"

#define INSTANCE(layout, schedule, direction, type, elements, vectors, registers)                                      \
    NORMFUSE_KERNEL(layout, schedule, direction, type, elements, vectors, registers)                                   \
    {                                                                                                                  \
        general_##direction<type, elements, vectors, false>(a);                                                        \
    }
NORMFUSE_KERNELS_GENERAL_ROWS(INSTANCE)
