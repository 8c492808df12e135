/* SPDX-License-Identifier: MIT
 *
 * described_gpu.h - a GPU that is not there: a driver that knows the facts of a kind of GPU and runs nothing, so that
 * the library plans and compiles for it. */
#ifndef NORMFUSE_CLI_DESCRIBED_GPU_H
#define NORMFUSE_CLI_DESCRIBED_GPU_H

#include <stdbool.h>

/* Makes the library take such a GPU for the only one. `capability`: "9.0". False: none of those described. */
bool described_gpu_use(const char *capability);
/* "8.0 (NVIDIA A100), ..." */
const char *described_gpu_names(void);

#endif
