/* SPDX-License-Identifier: MIT
 *
 * run.h - a call on the CPU: driver.c, plan.c. */
#ifndef NORMFUSE_CPU_RUN_H
#define NORMFUSE_CPU_RUN_H

#include "problem.h"

normfuse_status normfuse_cpu_run(const struct normfuse_problem *problem, const normfuse_exec *exec);
size_t normfuse_cpu_scratch_bytes(const struct normfuse_problem *problem, const normfuse_exec *exec);
/* See normfuse_sample_quantum. */
int64_t normfuse_cpu_sample_quantum(int64_t c, int64_t s, bool columns);

#endif
