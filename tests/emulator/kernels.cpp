/* SPDX-License-Identifier: MIT
 *
 * kernels.cpp - the kernels by their numbers. */
#include "kernels.h"

extern "C" {
#define DECLARE(layout, schedule, direction, type, elements, vectors, registers)                                       \
    void NORMFUSE_KERNEL_NAME(layout, schedule, direction, type, elements, vectors);
NORMFUSE_KERNELS(DECLARE)
#undef DECLARE
void normfuse_shares(normfuse_cuda_arguments);
void normfuse_statistics(normfuse_cuda_arguments);
void normfuse_running(normfuse_cuda_arguments);
void normfuse_gradients(normfuse_cuda_arguments);
void normfuse_parts(normfuse_cuda_arguments);
void normfuse_merge(normfuse_cuda_merge_arguments);
void normfuse_transpose2(normfuse_cuda_transpose_arguments);
void normfuse_transpose4(normfuse_cuda_transpose_arguments);
void normfuse_transpose8(normfuse_cuda_transpose_arguments);
}

template <typename Arguments, void (*kernel)(Arguments)> static void call(const void *arguments)
{
    kernel(*static_cast<const Arguments *>(arguments));
}

namespace emulator {

extern void (*const kernels[])(const void *);
void (*const kernels[NORMFUSE_CUDA_KERNELS])(const void *) = {
#define ROW(layout, schedule, direction, type, elements, vectors, registers)                                           \
    call<normfuse_cuda_arguments,                                                                                      \
         normfuse_##layout##_##schedule##_##direction##_##type##_##elements##x##vectors>,
    NORMFUSE_KERNELS(ROW)
#undef ROW
    call<normfuse_cuda_arguments, normfuse_shares>,
    call<normfuse_cuda_arguments, normfuse_statistics>,
    call<normfuse_cuda_arguments, normfuse_running>,
    call<normfuse_cuda_arguments, normfuse_parts>,
    call<normfuse_cuda_arguments, normfuse_gradients>,
    call<normfuse_cuda_merge_arguments, normfuse_merge>,
    call<normfuse_cuda_transpose_arguments, normfuse_transpose2>,
    call<normfuse_cuda_transpose_arguments, normfuse_transpose4>,
    call<normfuse_cuda_transpose_arguments, normfuse_transpose8>,
};

} // namespace emulator
