/* SPDX-License-Identifier: MIT
 *
 * columns_forward.cu - statistics and results where channels are adjacent (NHWC): the kernels of columns_forward.cuh.
 */
#include "columns_forward.cuh"

NORMFUSE_KERNELS_COLUMNS_FORWARD(NORMFUSE_INSTANCE)
