/* SPDX-License-Identifier: MIT
 *
 * tiling.h - how a call is parted for the bodies `stream` and `held`: device/walk.cuh has the picture. */
#ifndef NORMFUSE_CUDA_TILING_H
#define NORMFUSE_CUDA_TILING_H

#include "schedules.h"

/* A slab, and how threads share it; strides are in elements. */
struct tiling {
    bool by_columns, strided, aligned, joins_samples;
    int64_t vector, folded;
    int64_t rows, columns, row_stride, column_stride;
    int64_t slabs, samples, slab_stride, sample_stride;
    int64_t threads, lanes, across, parts, blocks_wide;
    int64_t next_rows, part_rows, row_step, next_vectors, part_vectors, steps;
};

static inline int64_t down_of(const struct tiling *t)
{
    return t->lanes / t->across;
}

static inline int64_t row_vectors(const struct tiling *t)
{
    return divide_up(t->columns + (t->aligned ? 0 : t->vector - 1), t->vector);
}

/* True if a slab's columns are channels, which a thread has vectors of. */
bool normfuse_cuda_has_columns(const struct normfuse_problem *p);
/* Channels last: the widest vectors that all tensors allow, of as many rows folded as are whole ones. `in_one_block`:
 * of rows folded, a block has all columns. */
void normfuse_cuda_tile_columns(const struct normfuse_problem *p, bool in_one_block, struct tiling *t);
/* Channels first, slabs of a channel of a sample, or of all samples. */
void normfuse_cuda_tile_rows(const struct normfuse_problem *p, struct tiling *t);
/* The widest power of two of threads, `most` of them at most, that have so many vectors in the fewest steps, or nearly.
 * */
int64_t normfuse_cuda_threads_across(int64_t vectors, int64_t most);

/* Adjacent channels of a vector whose statistics a thread joins: all vectors have them in one norm group. */
static inline int64_t piece_of(const struct normfuse_problem *p, const struct tiling *t)
{
    return t->by_columns && p->dy.data == NULL ? common_divisor(group_of(p), t->vector) : 1;
}

/* The tiling's fields of a signature, and whether parameters are read in vectors. */
void normfuse_cuda_sign_tiling(const struct normfuse_problem *p, const struct tiling *t,
                               struct normfuse_cuda_signature *to);
/* The kernel's arguments of it. */
struct normfuse_stream_arguments normfuse_cuda_tiling_arguments(const struct normfuse_problem *p,
                                                                const struct tiling *t);

#endif
