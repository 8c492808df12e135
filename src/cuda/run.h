/* SPDX-License-Identifier: MIT
 *
 * run.h - a problem on a CUDA device: which kernels, with which geometry, in which order. */
#ifndef NORMFUSE_CUDA_RUN_H
#define NORMFUSE_CUDA_RUN_H

#include "loader.h"

normfuse_status normfuse_cuda_run(const struct normfuse_problem *problem, const normfuse_exec *exec);
/* Enough with and without exec's sync memory. */
size_t normfuse_cuda_scratch_bytes(const struct normfuse_problem *problem, const normfuse_exec *exec);
normfuse_status normfuse_cuda_merge(const struct normfuse_flat *in, const struct normfuse_flat *out, int32_t width,
                                    int32_t ordinal, const normfuse_exec *exec);

/* What this thread's last call launched: "runs_forward_f32_4x8 cluster=2", joined by " + ". */
const char *normfuse_last_kernels(void);

#endif
