/* SPDX-License-Identifier: MIT
 *
 * run.c - chooses kernels and geometry. Temporary: refuses everything. */
#include "problem.h"

normfuse_status normfuse_cuda_run(const struct normfuse_problem *problem, const normfuse_exec *exec)
{
    (void)exec;
    return normfuse_refuse(NORMFUSE_UNSUPPORTED, "%s: no CUDA kernel yet", problem->name);
}

size_t normfuse_cuda_scratch_bytes(const struct normfuse_problem *problem, const normfuse_exec *exec)
{
    (void)problem;
    (void)exec;
    return 0;
}

normfuse_status normfuse_cuda_merge(const struct normfuse_flat *in, const struct normfuse_flat *out, int32_t width,
                                    int32_t ordinal, const normfuse_exec *exec)
{
    (void)in;
    (void)out;
    (void)ordinal;
    (void)exec;
    return normfuse_refuse(NORMFUSE_UNSUPPORTED, "%s: no CUDA kernel yet", width == 3 ? "stats_merge" : "sums_merge");
}
