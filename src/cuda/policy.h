/* SPDX-License-Identifier: MIT
 *
 * policy.h - what the choice of kernels knows of each kind of GPU: figures that were measured, by compute capability. */
#ifndef NORMFUSE_CUDA_POLICY_H
#define NORMFUSE_CUDA_POLICY_H

#include <stdint.h>
#include <stdlib.h>

enum { NORMFUSE_CUDA_WIDTHS = 5 };

struct normfuse_cuda_policy {
    int32_t capability; /* the least that this row is for */
    /* Runs. */
    int32_t part_bytes[2];  /* that a block keeps at most before a set is shared: forward, backward */
    int32_t least_part_bytes; /* below which sharing a set costs more than it gains */
    int32_t few_threads[2];   /* a block of the kernels that keep few packs, at most */
    int32_t many_threads[2];
    int32_t small_set_bytes; /* below which small blocks are better than few large ones */
    int32_t most_cluster[2];
    int32_t passing_threads;        /* runs: of tiles that are not kept */
    int32_t passing_slots[2][2][2]; /* packs in shared memory of such tiles: runs, columns; forward, backward; applying,
                                       summing */
    double least_round_bytes; /* of x that a block of the whole grid keeps, where the grid goes round */
    size_t shared_a_block;    /* for two blocks a processor */
    /* Columns. */
    int32_t column_threads;
    size_t resident_bytes;    /* that a processor keeps, registers and shared memory together */
    struct {
        double bytes, stretch; /* rows narrower than this take so much longer */
    } widths[NORMFUSE_CUDA_WIDTHS];
    double bytes_a_microsecond, l2_bytes_a_microsecond;
    double alone;        /* one block a processor: nothing overlaps its waiting */
    double cluster_gap[2]; /* for each block of a cluster, where more than one wave of them runs */
    double grid_rounds;    /* the whole grid, more than once */
    double cluster_wait, cluster_block, grid_wait, twice_wait; /* microseconds; cluster_block: for each block of a cluster */
};

static const struct normfuse_cuda_policy normfuse_cuda_policies[] = {
    /* H200 */
    {90, {136 << 10, 136 << 10}, 16 << 10, {64, 64}, {256, 256}, 64 << 10, {8, 4}, 128, {{{0, 8}, {8, 8}}, {{16, 8}, {0, 8}}}, 48e3, 112 << 10,
     256, 340 << 10, {{80, 1.9}, {150, 1.45}, {250, 1.25}, {500, 1.12}, {1000, 1.04}},
     4.2e6, 5.0e6, 1.08, {0.1, 0.2}, 1.8, 0.6, 0.45, 4.0, 5.0},
    {0, {64 << 10, 64 << 10}, 16 << 10, {64, 64}, {256, 256}, 32 << 10, {1, 1}, 128, {{{0, 4}, {4, 4}}, {{4, 4}, {0, 4}}}, 24e3, 48 << 10,
     256, 150 << 10, {{80, 1.9}, {150, 1.45}, {250, 1.25}, {500, 1.12}, {1000, 1.04}},
     1.5e6, 3.0e6, 1.08, {0.1, 0.2}, 1.8, 0.6, 0.45, 4.0, 5.0},
};

static inline const struct normfuse_cuda_policy *normfuse_cuda_policy(int32_t capability)
{
    const struct normfuse_cuda_policy *policy = normfuse_cuda_policies;
    while (capability < policy->capability)
        policy++;
    return policy;
}

/* For measuring alternatives: a build with NORMFUSE_TUNING lets the environment overrule a choice. */
static inline int64_t normfuse_tune(const char *name, int64_t chosen)
{
#if defined(NORMFUSE_TUNING)
    char variable[64] = "NORMFUSE_TUNE_";
    for (int i = 0; name[i] != '\0' && i < 40; i++) {
        variable[14 + i] = name[i];
        variable[15 + i] = '\0';
    }
    const char *const value = getenv(variable);
    return value != NULL ? strtoll(value, NULL, 10) : chosen;
#else
    (void)name;
    return chosen;
#endif
}

#endif
