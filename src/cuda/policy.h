/* SPDX-License-Identifier: MIT
 *
 * policy.h - what the planner knows of each kind of GPU: figures that were measured, by compute capability. Figures
 * that all GPUs have so far, measured on an H200, stand where they are used. */
#ifndef NORMFUSE_CUDA_POLICY_H
#define NORMFUSE_CUDA_POLICY_H

#include <stdint.h>

struct normfuse_cuda_policy {
    int32_t capability; /* the least that this row is for */
    /* Rows. Of two figures the first is of forwards. */
    int32_t part_bytes[2];       /* that a block holds at most before a norm group is shared */
    int32_t small_part_bytes[2]; /* the same of blocks of 128 threads, where a cluster of them holds it; 0: never */
    int32_t small_set_bytes; /* below which small blocks are better than few large ones */
    double min_round_bytes;      /* of x that a block of the whole grid holds, where the grid goes round */
    double cycles_a_microsecond; /* of a multiprocessor, about */
    size_t shared_a_block;       /* for two blocks a multiprocessor */
    /* Columns. */
    size_t resident_bytes; /* that a multiprocessor holds, registers and shared memory together */
    double alone;          /* one block a multiprocessor: nothing overlaps its waiting */
    /* Both. */
    double bytes_a_microsecond, l2_bytes_a_microsecond;
    double grid_wait[2];     /* microseconds, once the whole grid waits */
    double twice[2];         /* what reading twice takes: times the floor, */
    double twice_wait[2][2]; /* and microseconds: rows, columns */
    double twice_wide; /* the same of channels that are norm groups of their own, where a block has not all of them */
};

/* Best first: the first row whose capability the device has. What each figure was measured on is in
 * docs/decisions/0011-cuda.md. */
static const struct normfuse_cuda_policy normfuse_cuda_policies[] = {
    {.capability = 90,                     /* H200, 2026-11-21 */
     .part_bytes = {136 << 10, 136 << 10}, /* batch norm 128x1024x32x32: 4 blocks of 131 KB 304 us, 8 of 66 KB 361 */
     .small_part_bytes = {0, 68 << 10},    /* 256x512x56x56 backward: 6 blocks of 128 threads 1448 us, 3 of 256 1546 */
     .small_set_bytes = 64 << 10, /* 128x256x28x28 backward: 128 threads 134 us, 96 138, 160 152, 448 214 */
     .min_round_bytes = 48e3,
     .cycles_a_microsecond = 1800,
     .shared_a_block = 112 << 10,
     .resident_bytes = 340 << 10,
     .bytes_a_microsecond = 4.2e6,
     .l2_bytes_a_microsecond = 1.2e6, /* batch norm 4x512x28x28 f16 NHWC: 16 parts 10.2 us, 33 parts 13.7 */
     .alone = 1.15,                   /* 256x512x56x56 bf16 NHWC: clusters of 512 threads 499 us, of 256 454 */
     /* 2x640x32x32 f16 NHWC: 8.1 us, clusters 8.1; 2x320x64x64 backward 20.6, clusters 19.2 */
     .grid_wait = {2.5, 7.5},
     .twice = {1.62, 1.70},
     .twice_wide = 0.95, /* batch norm 256x2048x7x7 NHWC: 58 us, held 63; backward 84, held 93 */
     /* 1x256x512x512 f16 NHWC 121 and 186 us; rows: 2x320x8x8 f16 6.8 and 10.2, 32x256x28x28 26.5 and 45.4 */
     .twice_wait = {{7.0, 13.0}, {12.0, 28.0}}},
    {.capability = 0, /* nothing was measured: less memory on the chip, no clusters, slower memory */
     .part_bytes = {64 << 10, 64 << 10},
     .small_part_bytes = {0, 0},
     .small_set_bytes = 32 << 10,
     .min_round_bytes = 24e3,
     .cycles_a_microsecond = 1400,
     .shared_a_block = 48 << 10,
     .resident_bytes = 150 << 10,
     .bytes_a_microsecond = 1.5e6,
     .l2_bytes_a_microsecond = 0.7e6,
     .alone = 1.08,
     .grid_wait = {4.0, 6.0},
     .twice = {1.62, 1.85},
     .twice_wide = 1.15,
     .twice_wait = {{12.0, 60.0}, {12.0, 60.0}}},
};

/* What every kernel of columns takes beside the memory's time, in microseconds: 2x1280x16x16 f16 4.0 us, of bytes and
 * clusters 1.8; backward 6.3 and 2.8. What the blocks of a cluster wait for one another: batch norm 32x2048x7x7 f16
 * NHWC, clusters of 8 14.4 us, the grid 12.2. */
static const double normfuse_cuda_start[2] = {1.3, 2.6}, normfuse_cuda_cluster_wait = 3.5;

/* Parts of a channel that a kernel's last block adds to gradients, where a later kernel would. 16x640x32x32 f16 NCHW,
 * 16 parts, 34 us, by the last block 50; one part, 16x256x14x14, 12.4 and 9.5. */
enum { NORMFUSE_CUDA_PARTS_OF_LAST = 2 };

static inline const struct normfuse_cuda_policy *normfuse_cuda_policy(int32_t capability)
{
    const struct normfuse_cuda_policy *policy = normfuse_cuda_policies;
    while (capability < policy->capability)
        policy++;
    return policy;
}

#endif
