/* SPDX-License-Identifier: MIT
 *
 * columns_forward.cu - statistics and results where channels are adjacent (NHWC): the kernels of columns_forward.cuh.
 */
#include "columns_forward.cuh"

#define INSTANCE(layout, schedule, direction, type, elements, vectors, threads, registers)                             \
    NORMFUSE_KERNEL(layout, schedule, direction, type, elements, vectors, registers)                                   \
    {                                                                                                                  \
        columns_forward<type, elements, vectors, NORMFUSE_SCHEDULE_##schedule>(a);                                     \
    }
NORMFUSE_KERNELS_COLUMNS_FORWARD(INSTANCE)
