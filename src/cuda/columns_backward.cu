/* SPDX-License-Identifier: MIT
 *
 * columns_backward.cu - gradients where channels are adjacent (NHWC): the kernels of columns_backward.cuh. */
#include "columns_backward.cuh"

NORMFUSE_KERNELS_COLUMNS_BACKWARD(NORMFUSE_INSTANCE)
