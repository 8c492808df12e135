/* SPDX-License-Identifier: MIT
 *
 * columns_forward.cu - statistics and results where channels are adjacent (NHWC): the kernels of columns_forward.cuh.
 */
#include "columns_forward.cuh"

__host__ __device__ constexpr int most_registers(column_tile tile, int pack, int bytes)
{
    return tile == COLUMNS_PASSING && bytes < 8 ? 64 : pack > 1 || bytes == 8 ? 128 : 96;
}
__host__ __device__ constexpr column_tile tile_of(int kept)
{
    return kept == 6 ? COLUMNS_ANY : kept == 12 ? COLUMNS_PASSING : COLUMNS_SHARED;
}

#define COLUMNS_FORWARD(picture, direction, type, pack, kept)                                                          \
    extern "C" __global__ void __maxnreg__(most_registers(tile_of(kept), pack, sizeof(type)))                          \
        normfuse_##picture##_##direction##_##type##_##pack##x##kept(const __grid_constant__ normfuse_cuda_arguments a) \
    {                                                                                                                  \
        columns_forward<type, pack, kept, tile_of(kept)>(a);                                                           \
    }
NORMFUSE_CUDA_COLUMNS_FORWARD(COLUMNS_FORWARD)
