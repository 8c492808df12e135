/* SPDX-License-Identifier: MIT
 *
 * run.h - what ran on a CUDA device; the calls themselves are in problem.h. */
#ifndef NORMFUSE_CUDA_RUN_H
#define NORMFUSE_CUDA_RUN_H

#include "loader.h"

/* What this thread's last call launched: "runs_forward_f32_4x8 cluster=2", joined by " + ". */
const char *normfuse_last_kernels(void);

#endif
