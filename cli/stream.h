/* SPDX-License-Identifier: MIT
 *
 * stream.h - tensors in .npy files, a block of samples at a time.
 *
 * A block of an input is a window of the mapped file where the file's order is one that the library takes, and a copy
 * in row-major order of the file's axes otherwise (Fortran order, big-endian, data that is not aligned). A block of an
 * output is a buffer that is appended to the file. Each holds memory for one block only, so a file may be larger than
 * memory. Every function ends the program with a message when something is wrong. */
#ifndef NORMFUSE_CLI_STREAM_H
#define NORMFUSE_CLI_STREAM_H

#include <stdbool.h>
#include <stdint.h>

#include "normfuse.h"
#include "npy.h"
#include "output.h"

/* A tensor's description. The sizes are N, C, spatial, or those of a parameter; channels_last says the order of axes in
 * the file. Blocks are cut along the first axis. */
struct stream_shape {
    int32_t ndim;
    int64_t sizes[NORMFUSE_MAX_AXES];
    bool channels_last;
};

int64_t stream_sample_elements(const struct stream_shape *shape);
bool stream_shapes_equal(const struct stream_shape *a, const struct stream_shape *b);
/* The sizes as the file spells them. */
void stream_shape_text(char *out, size_t out_bytes, const struct stream_shape *shape);

struct stream_input {
    const char *path;
    const char *argument; /* "--weight", for messages */
    struct npy_file file;
    normfuse_type type;
    struct stream_shape shape;
    bool direct; /* blocks are windows of the file */
    struct npy_window window;
    void *copy;
    size_t copy_bytes;
    int64_t first, count; /* the block that is loaded; count -1: none */
    normfuse_axes axes;
    normfuse_tensor tensor;
};

/* Opens the file; integers of two bytes and V2 are bf16 where `bf16` allows them. The shape is that of the file, read
 * with the channels in the last axis or the second. */
void stream_input_open(struct stream_input *input, const char *path, const char *argument, bool bf16,
                       bool channels_last);

/* Samples [first, first + count) as a tensor, valid until the next call for this input. */
const normfuse_tensor *stream_input_block(struct stream_input *input, int64_t first, int64_t count);

struct stream_output {
    struct output *output;
    normfuse_type type;
    bool swapped; /* the file's byte order is not this machine's */
    struct stream_shape shape;
    void *buffer;
    size_t buffer_bytes;
    int64_t count; /* samples of the block */
    normfuse_axes axes;
    normfuse_tensor tensor;
};

/* descr NULL: that of the type. */
void stream_output_open(struct stream_output *output, const char *path, normfuse_type type, const char *descr,
                        const struct stream_shape *shape);

/* Memory for the next count samples. */
const normfuse_tensor *stream_output_block(struct stream_output *output, int64_t count);

/* Appends the block to the file. */
void stream_output_flush(struct stream_output *output);

/* Appends count values of the file's type. */
void stream_output_write(struct stream_output *output, const void *values, int64_t count);

/* Appends values[0..count), rounded to the file's type. */
void stream_output_write_f64(struct stream_output *output, const double *values, int64_t count);

/* 64-byte aligned memory, at least one byte of it; *memory grows and keeps nothing. */
void stream_reserve(void **memory, size_t *memory_bytes, size_t bytes);

#endif
