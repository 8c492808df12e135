/* SPDX-License-Identifier: MIT
 *
 * policy.h - what the planner knows of each kind of GPU: figures that were measured, by compute capability.
 */
#ifndef NORMFUSE_CUDA_POLICY_H
#define NORMFUSE_CUDA_POLICY_H

#include <stdint.h>
#include <stdlib.h>

enum { NORMFUSE_CUDA_WIDTHS = 7, NORMFUSE_CUDA_WHOLE_SIZES = 4 };

struct normfuse_cuda_policy {
    int32_t capability; /* the least that this row is for */
    /* Runs. */
    int32_t part_bytes[2];       /* that a block keeps at most before a set is shared: forward, backward */
    int32_t small_part_bytes[2]; /* the same of blocks of 128 threads, where a cluster of them holds a set; 0: never */
    int32_t least_part_bytes;    /* below which sharing a set costs more than it gains */
    int32_t many_threads[2];     /* of a block that shares a set, at most */
    /* Of a block that holds a set by itself, most first; 0: no more. */
    int32_t whole_threads[2][NORMFUSE_CUDA_WHOLE_SIZES];
    int32_t small_set_bytes; /* below which small blocks are better than few large ones */
    int32_t most_cluster[2];
    int32_t passing_threads[2];        /* rows: of tiles that are not kept; forward results */
    int32_t passing_column_threads[2]; /* columns: the same; where blocks have parts of rows */
    int32_t passing_waves[2][2];       /* of blocks at least: forward, backward; applying, summing */
    int32_t known_threads[2], known_passes[2], known_waves[2]; /* columns_elementwise.cu: at most; at least */
    int32_t added_passes[2];                                   /* and with an addition before the activation: */
    int32_t added_bytes[2][2]; /* of a tensor, from which on that is the faster way: forward, backward; of batch norm */
    int32_t parted_waves;      /* where blocks have parts of rows, applying */
    int32_t passing_slots[2][2];   /* rows: vectors in shared memory of tiles that are not kept: forward, backward;
                                      applying, summing */
    int32_t most_parts_of_last[2]; /* of a channel, that the tile kernel's last block adds: rows, columns */
    double least_round_bytes;      /* of x that a block of the whole grid keeps, where the grid goes round */
    double round_wait;             /* microseconds that each round takes beside its bytes */
    double cycles_a_microsecond;   /* of a multiprocessor, about */
    size_t shared_a_block;         /* for two blocks a multiprocessor */
    /* Columns. */
    int32_t column_threads;
    size_t resident_bytes; /* that a multiprocessor keeps, registers and shared memory together */
    struct {
        double bytes, stretch; /* rows narrower than this take so much longer */
    } widths[NORMFUSE_CUDA_WIDTHS];
    double bytes_a_microsecond, l2_bytes_a_microsecond;
    double alone;          /* one block a multiprocessor: nothing overlaps its waiting */
    double cluster_gap[2]; /* for each block of a cluster, where more than one wave of them runs */
    double grid_rounds;    /* the whole grid, more than once */
    double cluster_wait, cluster_block, grid_wait[2]; /* microseconds; cluster_block: for each block of a cluster */
    double compact_wait[2];    /* of compact kernels: that a cluster takes, and the square of its blocks */
    double compact_wave;       /* each further wave of their clusters */
    double columns_stretch[2]; /* of other kernels, in few waves of blocks: times the memory's time */
    double columns_start[2];   /* what every kernel takes beside the memory's time, */
    double not_compact[2];     /* and what others than the compact ones take longer */
    double gradients_wait;     /* a kernel after this one */
    /* By the whole grid from a pipeline: threads that sum, vectors of a tile for each; how many times the memory's time
     * it takes, of what is read again beside that, and microseconds that blocks wait for one another, once, for batch
     * norm once more, where no kernel for gradients follows, and for each further round of one sample. */
    int32_t grid_threads, grid_tile[2];
    double grid_stretch[2], grid_again[2], grid_meeting[2], grid_round[2];
    double grid_channel[2], grid_batch[2], grid_batch_channel[2]; /* for each channel; for batch norm; and there */
    double spread_stretch, spread_meeting;                        /* the same where threads keep all vectors */
    int64_t l2_again_bytes;         /* that is read again, above which the L2 is not told what to keep */
    double twice[2];         /* what reading twice takes: times the floor, */
    double twice_wait[2][2]; /* and microseconds: rows, columns */
    double twice_wide; /* the same of channels that are sets of their own, where a block has not all of them */
};

/* Figures that all GPUs have so far: measured on an H200, or of schedules that no other GPU has. */
#define NORMFUSE_CUDA_POLICY_OF_ALL                                                                                    \
    .least_part_bytes = 16 << 10,                                                                                      \
    .many_threads = {256, 256}, /* affine 64x256x64x64 backward: 128 220 us, 256 260; forward, of two tiles: 64 132.2, \
                                   128 133.7, 256 142 */                                                               \
        .passing_threads = {128, 64}, /* Batch norm NHWC 256x64x112x112: 128 331 us, 256 333, 512 330; 256x2048x7x7:   \
                                       * 256 64 us, 512 58; backward 105, in two waves 89, and of 512 84 */            \
        .passing_column_threads =                                                                                      \
            {256, 512}, /* Affine 64x256x64x64 bf16 NHWC: 256 threads, 1 tile 67.4 us, 2 69.5, 128 threads 68.3;       \
                         * backward 512 threads, 8 tiles 110 us, 4 121, 1 138, 256 threads 126 */                      \
        .known_threads = {256, 512}, .known_passes = {1, 8},                                                           \
    .known_waves = {4, 2}, /* bf16 NHWC with ReLU, 256x256x56x56, forward: 1 tile 426 us, 2 421, 4 430, 8 434; batch   \
                            * norm 634, 476, 460, 462; backward: 805, 774, 783, 787; batch norm 756, 728, 730, 737 */  \
        .added_passes =                                                                                                \
            {4, 8}, /* The same, and what the general kernels take: 16x1024x14x14 15.2 us, 12.3;                       \
                     * 16x512x28x28 20.5, 20.6; backward 25.7, 23.4; 39.1, 51.2; batch norm 64x1024x14x14 52.8, 50.4;  \
                     * 64x512x28x28 98.6, 110; backward 4x512x28x28 23.6, 23.6; 16x1024x14x14 26.4, 32.7 */            \
        .added_bytes = {{8 << 20, 40 << 20}, {6 << 20, 4 << 20}}, .parted_waves = 2,                                   \
    .passing_waves = {{4, 1}, {4, 1}},                                                                                 \
    /* 1x256x512x512 NHWC backward: sums in 1 wave 174 us, 2 177 */ /* Backward, a later kernel for the                \
                                                                     * gradients and the last block: NCHW              \
                                                                     * 16x640x32x32 f16, 16 parts, 34 us               \
                                                                     * and 50; 128x1024x32x32, 8 parts, 444            \
                                                                     * and 476; 6x1312x12x20 f16 25 and 32;            \
                                                                     * 2x320x128x128 f16 36.6 and 36.1; one            \
                                                                     * part, 16x256x14x14 f16, 12.4                    \
                                                                     * and 9.5. NHWC 8x640x16x16, 8                    \
                                                                     * parts: 11.9 and 17.9; 2x1280x8x8, 2             \
                                                                     * parts: 8.8 and 8.8 */                           \
        .most_parts_of_last = {2, 2}, /* 1x128x1024x1024 f16 NCHW: 4 sets at a time 188 us, 6 209; batch norm          \
                                       * 16x64x112x112 backward: 22 67 us, 26 71, 18 72 */                             \
        .round_wait = 7.5, .column_threads = 256, /* Copies of column blocks beside whole rows. */                     \
        .widths = {{20, 5.0}, {40, 2.8}, {80, 1.9}, {150, 1.45}, {250, 1.25}, {500, 1.12}, {1000, 1.04}},              \
    .cluster_gap = {0.016, 0.1}, /* 256x512x56x56 bf16 NHWC: clusters of 8 450 us, of 16 487, twice 635 */             \
        .grid_rounds = 1.8,      /* the same: 941 us */                                                                \
        .cluster_wait = 3.5,     /* batch norm 32x2048x7x7 f16 NHWC: clusters of 8 14.4 us, the grid 12.2 */           \
        .cluster_block = 0.05,                                                                                         \
    /* 2x640x32x32 f16 NHWC: clusters of 2 8.6 us, of 4 8.4, of 8 8.1 */ /* f16 NHWC with SiLU:                        \
                                                                          * 2x1280x8x8 3.0 us,                         \
                                                                          * clusters 3.8, not                          \
                                                                          * compact 5.0; backward 4.7                  \
                                                                          * and 8.7; 2x1280x16x16 4.0                  \
                                                                          * and 6.3, backward 6.2                      \
                                                                          * and 10.8; 2x640x32x32 in                   \
                                                                          * clusters of 4 6.1, of 8 5.9,               \
                                                                          * of 16 6.7 */                               \
        .compact_wait = {1.0, 0.006},                                                                                  \
    .gradients_wait = 2.0, .compact_wave = 2.8,                                                                        \
    /* 8x320x32x32 f16, one wave, 7.6 us; 8x640x32x32, five, 21.7 */ /* f16 NHWC: 8x1920x32x32 32.0 us, the            \
                                                                      * pipeline 27.7; backward 4x960x32x32 27.2       \
                                                                      * and 15.2, 8x1920x16x16 19.2 and 17.8           \
                                                                      */                                               \
        .columns_stretch = {1.2, 1.4},                                                                                 \
    .columns_start = {1.3, 2.6},   /* 2x1280x16x16 f16: 4.0 us, of bytes and clusters 1.8; backward 6.3 and 2.8 */     \
        .not_compact = {2.2, 4.3}, /* f16 NHWC with SiLU: 2x320x64x64 backward, one block of 320 threads a             \
                                    * multiprocessor, 13.6 us, of 256 13.9, of 160 14.6, two of 160 15.2; tiles of 4   \
                                    * vectors 13.6, of 2 14.1, of 8 13.5; 1x256x512x512 of 4 110.3, of 8 109.3 */      \
        .grid_threads = 320,                                                                                           \
    .grid_tile = {8, 4}, /* 2x320x128x128 20.8 and 36.1 us, 1x256x512x512 109 and 168, 8x128x512x512 bf16 443 and 653  \
                          * (twice 409 and 630), 256x512x56x56 bf16 backward 800. Batch norm f16 NHWC:                 \
                          * 256x2048x7x7 50.5 (clusters 58.3), 32x512x28x28 backward 41 (twice 60), 32x64x56x56 17.5   \
                          * (registers over the grid 22.4), backward 24 (39) */                                        \
        .grid_stretch = {1.22, 1.15}, .grid_again = {0.85, 0.85}, .grid_meeting = {5.5, 8.0},                          \
    .grid_channel = {0.0, 0.0013}, /* f16 backward: 1x320x32x32 8.8 us, 1x2560x16x16 14.3 */                           \
        .grid_batch = {2.0, 0.5},  /* f16 NHWC: 4x64x56x56 9.8 us, 4x2048x7x7 14.0; backward 13.0 and 13.6 */          \
        .grid_batch_channel = {0.0022,                                                                                 \
                               0.0007}, /* f16 NHWC with SiLU, backward: 2x640x32x32 9.4 us, clusters 12.1;            \
                                         * 2x320x64x64 12.8, from pipelines 13.4; 1x256x32x32 7.5, a cluster 5.1 */    \
        .spread_stretch = 1.4,                                                                                         \
    .spread_meeting = 6.9, /* 8x128x512x512 bf16: 402 and 637 us, twice 409 and 640; 256x512x56x56 488, clusters 440;  \
                            * backward 8x960x64x64 f16 97, twice 129 */                                                \
        .grid_round = {8.5, 5.5}, /* f16 NHWC: batch norm 256x2048x7x7 50 us, 46.7 with 32 MB kept, backward 73.0      \
                                   * and 70.3; 1x256x512x512 108.1 and 104.4; backward 1x128x1024x1024 322 and 336,    \
                                   * batch norm 256x64x112x112 483 and 495 */                                          \
        .l2_again_bytes = 200 << 20

/* Best first: the first row whose capability the device has. What each figure was measured on is in
 * docs/decisions/0011-cuda.md. */
static const struct normfuse_cuda_policy normfuse_cuda_policies[] = {
    {.capability = 90,                     /* H200, 2026-11-21 */
     .part_bytes = {136 << 10, 136 << 10}, /* batch norm 128x1024x32x32: 4 blocks of 131 KB 304 us, 8 of 66 KB 361 */
     .small_part_bytes = {0, 68 << 10},    /* 256x512x56x56 backward: 6 blocks of 128 threads 1448 us, 3 of 256 1546 */
     /* Forward 128x256x28x28: 224 threads that keep 7 vectors 55 us, 96 that keep 20 62; batch norm 32x512x28x28: 448
      * threads 33.7 us, 320 34.9, 256 38.0; 64x1024x14x14: 224 36.0, 448 38.2. Backward 128x256x28x28: 128 threads,
      * five blocks on a multiprocessor, 99 us, 160 102.6, 192 113, 256 127.6; batch norm 64x1024x14x14, two of any: 256
      * 63, 160 67.7 */
     .whole_threads = {{448, 224}, {256, 192, 160, 128}},
     .small_set_bytes = 64 << 10, /* 128x256x28x28 backward: 128 threads 134 us, 96 138, 160 152, 448 214 */
     .most_cluster = {8, 8},
     .passing_slots = {{0, 8}, {8, 8}},
     .least_round_bytes = 48e3,
     .cycles_a_microsecond = 1800,
     .shared_a_block = 112 << 10,
     .resident_bytes = 340 << 10,
     .bytes_a_microsecond = 4.2e6,
     .l2_bytes_a_microsecond = 1.2e6, /* batch norm 4x512x28x28 f16 NHWC: 16 parts 10.2 us, 33 parts 13.7 */
     .alone = 1.15,                   /* 256x512x56x56 bf16 NHWC: clusters of 512 threads 499 us, of 256 454 */
     /* 2x640x32x32 f16 NHWC: 8.1 us, clusters 8.1; 2x320x64x64 backward 20.6, clusters 19.2 */
     .grid_wait = {2.5, 7.5},
     .twice = {1.62, 1.70},
     .twice_wide = 0.95, /* batch norm 256x2048x7x7 NHWC: 58 us, kept 63; backward 84, kept 93 */
     /* 1x256x512x512 f16 NHWC 121 and 186 us, 8x128x512x512 bf16 411 and 641; rows: 2x320x8x8 f16 9.0, 4x512x64x64
      * 20.9 */
     .twice_wait = {{9.0, 28.0}, {12.0, 28.0}},
     NORMFUSE_CUDA_POLICY_OF_ALL},
    {.capability = 0, /* nothing was measured: less memory on the chip, no clusters, slower memory */
     .part_bytes = {64 << 10, 64 << 10},
     .small_part_bytes = {0, 0},
     .whole_threads = {{256, 224}, {256, 192, 160, 128}},
     .small_set_bytes = 32 << 10,
     .most_cluster = {1, 1},
     .passing_slots = {{0, 4}, {4, 4}},
     .least_round_bytes = 24e3,
     .cycles_a_microsecond = 1400,
     .shared_a_block = 48 << 10,
     .resident_bytes = 150 << 10,
     .bytes_a_microsecond = 1.5e6,
     .l2_bytes_a_microsecond = 0.7e6,
     .alone = 1.08,
     .grid_wait = {4.0, 6.0},
     .twice = {1.62, 1.85},
     .twice_wide = 1.15,
     .twice_wait = {{12.0, 60.0}, {12.0, 60.0}},
     NORMFUSE_CUDA_POLICY_OF_ALL},
};

static inline const struct normfuse_cuda_policy *normfuse_cuda_policy(int32_t capability)
{
    const struct normfuse_cuda_policy *policy = normfuse_cuda_policies;
    while (capability < policy->capability)
        policy++;
    return policy;
}

/* For measuring alternatives: in a build with NORMFUSE_EXPERIMENTS the environment variable NORMFUSE_EXPERIMENT_NAME
 * overrules a choice. */
static inline int64_t normfuse_experiment(const char *name, int64_t chosen)
{
#if defined(NORMFUSE_EXPERIMENTS)
    enum { PREFIX = 20 };
    char variable[64] = "NORMFUSE_EXPERIMENT_";
    for (int i = 0; name[i] != '\0' && i < 40; i++) {
        variable[PREFIX + i] = name[i];
        variable[PREFIX + 1 + i] = '\0';
    }
    const char *const value = getenv(variable);
    return value != NULL ? strtoll(value, NULL, 10) : chosen;
#else
    (void)name;
    return chosen;
#endif
}

#endif
