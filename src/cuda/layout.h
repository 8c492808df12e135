/* SPDX-License-Identifier: MIT
 *
 * layout.h - what each schedule parts the dynamic shared memory of a block into: byte offsets, and the whole. Kernels
 * place their arrays by it, the planner requests `bytes`, tests check both. C and CUDA C. */
#ifndef NORMFUSE_CUDA_LAYOUT_H
#define NORMFUSE_CUDA_LAYOUT_H

#include <stdbool.h>
#include <stdint.h>

#if defined(__CUDACC__)
#define NORMFUSE_LAYOUT static __host__ __device__ __forceinline__
#else
#define NORMFUSE_LAYOUT static inline
#endif

enum {
    NORMFUSE_VECTOR_BYTES = 16
};

/* Sums of groups in the cluster and grid schedules: an entry for each vector, and one more for each group whose
 * channels begin inside of one; of each row that the threads have at once. */
NORMFUSE_LAYOUT int32_t normfuse_group_entries(int32_t width, int32_t groups, int32_t at_once)
{
    return (width + groups) * at_once;
}

/* cluster. Forward entries are float4, backward float2. */
struct normfuse_cluster_layout {
    int32_t plain, centred; /* backward, where gradients are wanted: two floats of each row and channel */
    int32_t ranks;          /* of each block of the cluster, the channels that this one adds up: 2 float4 for 4 */
    int32_t parts;          /* of each block that has a part of a group: float2 */
    int32_t bytes;
};

NORMFUSE_LAYOUT struct normfuse_cluster_layout normfuse_lay_out_cluster_forward(int32_t width, int32_t groups,
                                                                                int32_t at_once, int32_t parts)
{
    struct normfuse_cluster_layout at = {0};
    at.parts = 16 * normfuse_group_entries(width, groups, at_once);
    at.bytes = at.parts + 8 * groups * parts;
    return at;
}

/* `ranks`: 0 where the blocks of all samples are not in one cluster. */
NORMFUSE_LAYOUT struct normfuse_cluster_layout normfuse_lay_out_cluster_backward(int32_t width, int32_t channels,
                                                                                 int32_t groups, int32_t at_once,
                                                                                 int32_t parts, int32_t ranks,
                                                                                 bool gradients)
{
    struct normfuse_cluster_layout at = {0};
    const int32_t of_rows = gradients ? 4 * at_once * channels : 0;
    at.plain = 16 * ((normfuse_group_entries(width, groups, at_once) + 1) / 2);
    at.centred = at.plain + of_rows;
    at.ranks = at.centred + of_rows;
    at.parts = at.ranks + (ranks > 0 ? 32 * ((channels / 4 + ranks - 1) / ranks) * ranks : 0);
    at.bytes = at.parts + 8 * groups * parts;
    return at;
}

/* grid_pipeline; `stages`: bytes of the stages, which come first. */
struct normfuse_grid_layout {
    int32_t plain, centred; /* as above */
    int32_t entries;        /* forward float4, backward float2 */
    int32_t groups;         /* of each group a float4; backward two float2, of this sample and the next */
    int32_t totals; /* backward: of each group a float2 */
    int32_t bytes;
};

/* `channels`: 0 where parameters want no gradients, and forward. */
NORMFUSE_LAYOUT struct normfuse_grid_layout normfuse_lay_out_grid(int32_t stages, int32_t width, int32_t groups,
                                                                  int32_t at_once, int32_t channels, bool backward)
{
    struct normfuse_grid_layout at = {0};
    at.plain = stages;
    at.centred = at.plain + 4 * at_once * channels;
    at.entries = at.centred + 4 * at_once * channels;
    at.groups = at.entries + (backward ? 8 : 16) * normfuse_group_entries(width, groups, at_once);
    at.totals = at.groups + 16 * groups;
    at.bytes = at.totals + (backward ? 8 * groups : 0);
    return at;
}

/* grid_pipeline_batch. A channel has a float4, backward a float2. */
struct normfuse_batch_layout {
    int32_t channels;
    int32_t entries; /* float2 of each channel and row at once, one more where these are even: no conflicts of banks */
    int32_t counts;  /* forward: a float of each row at once */
    int32_t bytes;
};

NORMFUSE_LAYOUT struct normfuse_batch_layout normfuse_lay_out_batch(int32_t stages, int32_t channels, int32_t at_once,
                                                                    bool backward)
{
    struct normfuse_batch_layout at = {0};
    at.channels = stages;
    at.entries = at.channels + (backward ? 8 : 16) * channels;
    at.counts = at.entries + 8 * channels * (at_once | 1);
    at.bytes = at.counts + (backward ? 0 : 16 * ((at_once + 3) / 4));
    return at;
}

#endif
