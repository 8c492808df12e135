/* SPDX-License-Identifier: MIT
 *
 * kernels.h - what host and kernels agree on: which kernels there are and what each is given. Included by C and by
 * CUDA C. A kernel's name in the module is normfuse_<name>. */
#ifndef NORMFUSE_CUDA_KERNELS_H
#define NORMFUSE_CUDA_KERNELS_H

#include <stdint.h>

/* KERNEL(name): one line for each; the .cu file that defines it is named by its first two words. */
#define NORMFUSE_CUDA_KERNEL_LIST(KERNEL) KERNEL(merge)

enum normfuse_cuda_kernel {
#define NORMFUSE_CUDA_KERNEL_ID(name) NORMFUSE_CUDA_##name,
    NORMFUSE_CUDA_KERNEL_LIST(NORMFUSE_CUDA_KERNEL_ID)
#undef NORMFUSE_CUDA_KERNEL_ID
        NORMFUSE_CUDA_KERNELS
};

/* What normfuse_sync_bytes answers for every device. */
enum { NORMFUSE_CUDA_SYNC_BYTES = 65536 };

#endif
