/* SPDX-License-Identifier: MIT
 *
 * columns_backward.cu - gradients where channels are adjacent (NHWC): the kernels of columns_backward.cuh. */
#include "columns_backward.cuh"

#define INSTANCE(layout, schedule, direction, type, elements, vectors, threads, registers)                             \
    NORMFUSE_KERNEL(layout, schedule, direction, type, elements, vectors, registers)                                   \
    {                                                                                                                  \
        columns_backward<type, elements, vectors, NORMFUSE_SCHEDULE_##schedule>(a);                                    \
    }
NORMFUSE_KERNELS_COLUMNS_BACKWARD(INSTANCE)
