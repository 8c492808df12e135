/* SPDX-License-Identifier: MIT
 *
 * columns_unaligned.cu - both directions where channels are adjacent and samples begin and end inside of vectors: C,
 * the positions or both are odd, or as good as. What holds nothing, with vectors that are aligned in memory; element by
 * element 61x193x13x13 bf16 batch norm took 35.7 us for 16.5, backward 56 for 24. Kernels of their own, since what is
 * requested at the edges cost all shapes up to 20 % in those for whole vectors. */
#include "columns_backward.cuh"
#include "columns_forward.cuh"

NORMFUSE_KERNELS_COLUMNS_UNALIGNED(NORMFUSE_INSTANCE)
