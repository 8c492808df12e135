/* SPDX-License-Identifier: MIT
 *
 * launch.h - what ran on a CUDA device; the calls themselves are in problem.h. */
#ifndef NORMFUSE_CUDA_LAUNCH_H
#define NORMFUSE_CUDA_LAUNCH_H

#include "loader.h"

/* What this thread's last call launched: "rows_split_forward_f32_4x22 8192x256 cluster=2 kept=22+3", with " + ". */
const char *normfuse_last_kernels(void);

/* For the child of a fork, which may have been made while a thread held the lock of the plans. */
void normfuse_cuda_plans_after_fork(void);

#endif
