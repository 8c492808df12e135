/* SPDX-License-Identifier: MIT
 *
 * transpose.h - the tensors of a call that have not the strides of the others: kernels take tensors of the same strides
 * alone, so these are copied, inputs before a call's kernels and outputs after them. transpose.cu copies. */
#ifndef NORMFUSE_CUDA_TRANSPOSE_H
#define NORMFUSE_CUDA_TRANSPOSE_H

#include "loader.h"

struct transposed {
    struct normfuse_cuda_transpose_arguments before, after; /* of a call's kernels */
    size_t bytes; /* of scratch, whose beginning it is */
};

/* Makes the strides of all tensors the same, by as few copies as can be: x's, or those of either layout without gaps.
 * Tensors that are copied then lie in `scratch`, of which nothing is read here. False: they are too large to be copied.
 */
bool normfuse_cuda_transpose(struct normfuse_problem *problem, char *scratch, struct transposed *transposed);

#endif
