/* SPDX-License-Identifier: MIT
 *
 * torch.h - functions that the Python package normfuse.torch calls. Not installed: the package carries the library that
 * it was built with. */
#ifndef NORMFUSE_TORCH_H
#define NORMFUSE_TORCH_H

#include "normfuse.h"

/* Registers the CPU and CUDA kernels of the operators torch.ops.<name_space>.*, whose schemas exist, through the stable
 * C interface of the libtorch that this process has loaded. NULL, or in one sentence why not; nothing is registered
 * then. Once a process, while the caller holds a lock. The name is copied. */
NORMFUSE_API const char *normfuse_torch_register(const char *name_space);

/* Puts kernels of this library in the place of those that aten's group and batch norms have on the CPU and on CUDA,
 * until normfuse_torch_uninstall. NULL, or in one sentence why not; nothing is overridden then. Both after
 * normfuse_torch_register, while the caller holds a lock. */
NORMFUSE_API const char *normfuse_torch_install(void);
NORMFUSE_API void normfuse_torch_uninstall(void);

#endif
