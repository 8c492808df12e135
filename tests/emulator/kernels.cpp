/* SPDX-License-Identifier: MIT
 *
 * kernels.cpp - the kernels by their numbers. */
#include "kernels.h"

extern "C" {
#define DECLARE(layout, schedule, direction, type, elements, vectors, registers)                                       \
    void NORMFUSE_KERNEL_NAME(layout, schedule, direction, type, elements, vectors);
NORMFUSE_KERNELS(DECLARE)
#undef DECLARE
}

template <void (*kernel)(normfuse_cuda_arguments)> static void call(const void *arguments)
{
    kernel(*static_cast<const normfuse_cuda_arguments *>(arguments));
}

namespace emulator {

extern void (*const kernels[])(const void *);
void (*const kernels[NORMFUSE_CUDA_KERNELS])(const void *) = {
#define ROW(layout, schedule, direction, type, elements, vectors, registers)                                           \
    call<normfuse_##layout##_##schedule##_##direction##_##type##_##elements##x##vectors>,
    NORMFUSE_KERNELS(ROW)
#undef ROW
};

} // namespace emulator
