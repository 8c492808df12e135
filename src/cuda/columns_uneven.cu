/* SPDX-License-Identifier: MIT
 *
 * columns_uneven.cu - both directions where channels are adjacent and samples begin and end inside of packs: C, the
 * positions or both are odd, or as good as. What keeps nothing, with packs that are aligned in memory; element by
 * element 61x193x13x13 bf16 batch norm took 35.7 us for 16.5, backward 56 for 24. Kernels of their own, since what is
 * asked for at the edges cost all shapes up to 20 % in those for whole packs. */
#include "columns_backward.cuh"
#include "columns_forward.cuh"

enum { registers_forward = 64, registers_backward = 80 };

#define COLUMNS_UNEVEN(picture, direction, type, pack, kept)                                                           \
    extern "C" __global__ void __maxnreg__(registers_##direction)                                                      \
        normfuse_##picture##_##direction##_##type##_##pack##x##kept(const __grid_constant__ normfuse_cuda_arguments a) \
    {                                                                                                                  \
        columns_##direction<type, pack, kept, COLUMNS_UNEVEN>(a);                                                      \
    }
NORMFUSE_CUDA_COLUMNS_UNEVEN(COLUMNS_UNEVEN)
