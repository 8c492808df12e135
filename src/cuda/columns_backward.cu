/* SPDX-License-Identifier: MIT
 *
 * columns_backward.cu - gradients where channels are adjacent (NHWC): the kernels of columns_backward.cuh. */
#include "columns_backward.cuh"

__host__ __device__ constexpr int most_registers(column_tile tile, int bytes)
{
    return tile == COLUMNS_PASSING && bytes < 8 ? 80 : 128;
}
__host__ __device__ constexpr column_tile tile_of(int kept)
{
    return kept == 3 ? COLUMNS_ANY : kept == 8 ? COLUMNS_PASSING : COLUMNS_SHARED;
}

#define COLUMNS_BACKWARD(picture, direction, type, pack, kept)                                                         \
    extern "C" __global__ void __maxnreg__(most_registers(tile_of(kept), sizeof(type)))                                \
        normfuse_##picture##_##direction##_##type##_##pack##x##kept(const __grid_constant__ normfuse_cuda_arguments a) \
    {                                                                                                                  \
        columns_backward<type, pack, kept, tile_of(kept)>(a);                                                          \
    }
NORMFUSE_CUDA_COLUMNS_BACKWARD(COLUMNS_BACKWARD)
