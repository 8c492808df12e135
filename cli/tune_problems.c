/* SPDX-License-Identifier: MIT
 *
 * tune_problems.c - the problems that `normfuse tune` measures. Of both layouts and directions, f16 and f32, plain and
 * with additions; norm groups from a few KB to a tensor; tensors from 80 KB to 1 GiB. A problem takes about two seconds
 * with all its schedules; those with one schedule are left out. */
#include "tune_plan.h"

#include <stddef.h>

#define BOTH(problem) problem, problem " dir=bwd"

/* clang-format off */
const char *const tune_problems[] = {
    /* rows: norm groups that a block holds, that blocks share, and that are larger than the chip */
    BOTH("group_norm 2x320x8x8 groups=32 dtype=f16 act=silu device=cuda"),
    BOTH("group_norm 8x256x14x14 groups=32 device=cuda"),
    BOTH("group_norm 32x256x28x28 groups=32 device=cuda"),
    BOTH("group_norm 128x256x28x28 groups=32 dtype=f16 device=cuda"),
    BOTH("group_norm 4x512x64x64 groups=32 dtype=f16 act=silu device=cuda"),
    BOTH("group_norm 2x320x128x128 groups=32 dtype=f16 act=silu device=cuda"),
    BOTH("group_norm 1x128x512x512 groups=32 device=cuda"),
    BOTH("group_norm 1x64x512x512 groups=4 dtype=f16 device=cuda"),
    BOTH("group_norm 64x512x64x64 groups=32 device=cuda"),
    BOTH("group_norm 2048x256x4x4 groups=64 device=cuda"),
    BOTH("group_norm 256x512x7x7 groups=128 dtype=f16 device=cuda"),
    BOTH("instance_norm 512x512x8x8 device=cuda"),
    BOTH("instance_norm 8x64x128x128 device=cuda"),
    BOTH("batch_norm 32x512x28x28 device=cuda"),
    BOTH("batch_norm 16x64x112x112 dtype=f16 device=cuda"),
    BOTH("batch_norm 64x256x56x56 device=cuda"),
    BOTH("batch_norm 256x2048x7x7 dtype=f16 device=cuda"),
    BOTH("batch_norm 64x1024x14x14 dtype=bf16 act=relu +post_add device=cuda"),
    BOTH("batch_norm 64x384x6x6 act=silu device=cuda"),
    /* rows with additions */
    BOTH("group_norm 16x256x32x32 groups=32 act=relu +pre_add device=cuda"),
    BOTH("group_norm 2x320x64x64 groups=32 dtype=f16 act=silu +post_add device=cuda"),
    BOTH("batch_norm 32x256x28x28 dtype=f16 act=relu +post_add device=cuda"),
    /* columns */
    BOTH("group_norm 2x1280x8x8 groups=32 dtype=f16 layout=nhwc act=silu device=cuda"),
    BOTH("group_norm 2x640x32x32 groups=32 dtype=f16 layout=nhwc act=silu device=cuda"),
    BOTH("group_norm 8x320x32x32 groups=32 layout=nhwc device=cuda"),
    BOTH("group_norm 2x320x128x128 groups=32 dtype=f16 layout=nhwc act=silu device=cuda"),
    BOTH("group_norm 64x256x28x28 groups=32 dtype=f16 layout=nhwc device=cuda"),
    BOTH("group_norm 8x640x64x64 groups=32 layout=nhwc act=silu device=cuda"),
    BOTH("group_norm 1x256x512x512 groups=32 dtype=f16 layout=nhwc act=silu device=cuda"),
    BOTH("group_norm 8x128x512x512 groups=32 layout=nhwc device=cuda"),
    BOTH("batch_norm 32x64x56x56 dtype=f16 layout=nhwc device=cuda"),
    BOTH("batch_norm 32x512x28x28 layout=nhwc device=cuda"),
    BOTH("batch_norm 256x2048x7x7 dtype=f16 layout=nhwc device=cuda"),
    BOTH("batch_norm 256x64x112x112 dtype=f16 layout=nhwc device=cuda"),
    BOTH("group_norm 4096x512 groups=32 dtype=f16 layout=nhwc device=cuda"),
    BOTH("group_norm 16384x1024 groups=64 layout=nhwc device=cuda"),
    BOTH("group_norm 2048x256x2x2 groups=32 dtype=f16 layout=nhwc device=cuda"),
    /* columns with additions */
    BOTH("group_norm 8x320x32x32 groups=32 dtype=f16 layout=nhwc act=silu +pre_add device=cuda"),
    BOTH("group_norm 4x320x32x32 groups=32 dtype=f16 layout=nhwc act=silu +post_add device=cuda"),
    BOTH("batch_norm 64x512x28x28 dtype=bf16 layout=nhwc act=relu +post_add device=cuda"),
    NULL};
/* clang-format on */
