/* SPDX-License-Identifier: MIT
 *
 * merge.cu - temporary: a kernel for the build to have one. */
#include "kernels.h"

struct merge {
    double *out;
};

extern "C" __global__ void __launch_bounds__(128) normfuse_merge(const __grid_constant__ struct merge merge)
{
    merge.out[threadIdx.x] = 0;
}
