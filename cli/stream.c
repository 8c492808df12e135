/* SPDX-License-Identifier: MIT
 *
 * stream.c - blocks of samples from and to .npy files. */
#include "stream.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "numbers.h"
#include "report.h"

/* The most of a file that a copy looks at in one go. */
static const int64_t COPY_WINDOW_BYTES = INT64_C(64) << 20;

int64_t stream_sample_elements(const struct stream_shape *shape)
{
    int64_t product = 1;
    for (int32_t i = 1; i < shape->ndim; i++)
        product *= shape->sizes[i];
    return product;
}

bool stream_shapes_equal(const struct stream_shape *a, const struct stream_shape *b)
{
    return a->ndim == b->ndim && memcmp(a->sizes, b->sizes, (size_t)a->ndim * sizeof a->sizes[0]) == 0;
}

/* The sizes in the order of the file's axes. */
static void file_sizes(const struct stream_shape *shape, int64_t out[NORMFUSE_MAX_AXES])
{
    memcpy(out, shape->sizes, sizeof shape->sizes);
    if (!shape->channels_last)
        return;
    for (int32_t i = 2; i < shape->ndim; i++)
        out[i - 1] = shape->sizes[i];
    out[shape->ndim - 1] = shape->sizes[1];
}

void stream_shape_text(char *out, size_t out_bytes, const struct stream_shape *shape)
{
    int64_t sizes[NORMFUSE_MAX_AXES];
    file_sizes(shape, sizes);
    npy_shape_text(out, out_bytes, shape->ndim, sizes);
}

void stream_reserve(void **memory, size_t *memory_bytes, size_t bytes)
{
    size_t rounded = (bytes + 64) / 64 * 64;
    if (*memory && *memory_bytes >= rounded)
        return;
    free(*memory);
    *memory = rounded > bytes ? aligned_alloc(64, rounded) : NULL;
    *memory_bytes = rounded;
    if (!*memory)
        report_failure("memory", "%zu bytes for a block are not to be had; --block-bytes makes blocks smaller", bytes);
}

static normfuse_tensor make_tensor(const struct stream_shape *shape, normfuse_type type, void *data, int64_t count,
                                   normfuse_axes *axes)
{
    int64_t sizes[NORMFUSE_MAX_AXES];
    memcpy(sizes, shape->sizes, sizeof sizes);
    sizes[0] = count;
    return shape->channels_last ? normfuse_tensor_channels_last(data, type, shape->ndim, sizes, axes)
                                : normfuse_tensor_contiguous(data, type, shape->ndim, sizes, axes);
}

/* ---- inputs ----------------------------------------------------------------------------------------------------- */

/* In Fortran order the first axis is the fastest: the same memory as row-major when at most one axis is longer than 1.
 * */
static bool order_matters(const struct npy_header *header)
{
    int long_axes = 0;
    for (int32_t i = 0; i < header->ndim; i++)
        long_axes += header->shape[i] > 1;
    return header->fortran && long_axes > 1 && header->elements > 0;
}

void stream_input_open(struct stream_input *input, const char *path, const char *argument, bool bf16,
                       bool channels_last)
{
    char error[512];
    *input = (struct stream_input){.path = path, .argument = argument, .count = -1};
    if (!npy_open(&input->file, path, error, sizeof error))
        report_failure(path, "%s: %s", argument, error);
    const struct npy_header *header = &input->file.header;
    if (header->kind == 'f')
        input->type = header->item_bytes == 8   ? NORMFUSE_F64
                      : header->item_bytes == 4 ? NORMFUSE_F32
                                                : NORMFUSE_F16;
    else if (bf16)
        input->type = NORMFUSE_BF16;
    else
        report_failure(path, "%s: dtype '%s' is read only as bf16, with dtype=bf16", argument, header->descr);
    if (header->ndim < 1 || header->ndim > NORMFUSE_MAX_AXES)
        report_failure(path, "%s: rank %d is not supported: at least 1 and at most %d axes", argument, header->ndim,
                       NORMFUSE_MAX_AXES);
    input->shape.ndim = header->ndim;
    input->shape.channels_last = channels_last && header->ndim > 2;
    memcpy(input->shape.sizes, header->shape, (size_t)header->ndim * sizeof header->shape[0]);
    if (input->shape.channels_last) {
        input->shape.sizes[1] = header->shape[header->ndim - 1];
        for (int32_t i = 2; i < header->ndim; i++)
            input->shape.sizes[i] = header->shape[i - 1];
    }
    input->direct = !header->swapped && !order_matters(header) && header->data_offset % header->item_bytes == 0;
}

static const void *map_or_fail(struct stream_input *input, int64_t offset, int64_t bytes)
{
    const void *data = npy_map(&input->window, &input->file, offset, (size_t)bytes);
    if (!data)
        report_failure(input->path, "%s: cannot be mapped into memory: %s", input->argument, strerror(errno));
    return data;
}

static void swap_items(void *data, size_t items, size_t item_bytes)
{
    if (item_bytes == 2) {
        uint16_t *values = data;
        for (size_t i = 0; i < items; i++)
            values[i] = __builtin_bswap16(values[i]);
    } else if (item_bytes == 4) {
        uint32_t *values = data;
        for (size_t i = 0; i < items; i++)
            values[i] = __builtin_bswap32(values[i]);
    } else {
        uint64_t *values = data;
        for (size_t i = 0; i < items; i++)
            values[i] = __builtin_bswap64(values[i]);
    }
}

static void copy_row_major(struct stream_input *input, int64_t first, int64_t bytes)
{
    char *out = input->copy;
    int64_t offset = input->file.header.data_offset +
                     first * stream_sample_elements(&input->shape) * input->file.header.item_bytes;
    for (int64_t done = 0; done < bytes;) {
        int64_t part = bytes - done < COPY_WINDOW_BYTES ? bytes - done : COPY_WINDOW_BYTES;
        memcpy(out + done, map_or_fail(input, offset + done, part), (size_t)part);
        done += part;
    }
    npy_unmap(&input->window);
}

static void scatter(char *out, const char *in, int64_t count, int64_t out_stride_bytes, size_t item_bytes)
{
    for (int64_t i = 0; i < count; i++)
        memcpy(out + i * out_stride_bytes, in + i * (int64_t)item_bytes, item_bytes);
}

/* Samples [first, first + count) of a file whose first axis is the fastest. The file is a row of N values for every
 * place in a sample, places in Fortran order; each row's part goes to that place of every sample. */
static void copy_fortran(struct stream_input *input, int64_t first, int64_t count)
{
    const struct npy_header *header = &input->file.header;
    int64_t item = header->item_bytes, n = header->shape[0];
    int64_t places = header->elements / n;
    int64_t row_bytes = n * item;
    int64_t index[NPY_MAX_AXES] = {0}, stride[NPY_MAX_AXES];
    int64_t product = 1;
    for (int32_t axis = header->ndim - 1; axis > 0; axis--) {
        stride[axis] = product;
        product *= header->shape[axis];
    }
    int64_t rows = COPY_WINDOW_BYTES / row_bytes;
    rows = rows < 1 ? 1 : rows;
    int64_t target = 0;
    for (int64_t place = 0; place < places; place += rows) {
        int64_t part = places - place < rows ? places - place : rows;
        const char *in = map_or_fail(input, header->data_offset + place * row_bytes + first * item,
                                     (part - 1) * row_bytes + count * item);
        for (int64_t i = 0; i < part; i++) {
            scatter((char *)input->copy + target * item, in + i * row_bytes, count, places * item, (size_t)item);
            /* The next place: the first axis of the sample counts fastest. */
            for (int32_t axis = 1; axis < header->ndim; axis++) {
                target += stride[axis];
                if (++index[axis] < header->shape[axis])
                    break;
                target -= stride[axis] * header->shape[axis];
                index[axis] = 0;
            }
        }
    }
    npy_unmap(&input->window);
}

const normfuse_tensor *stream_input_block(struct stream_input *input, int64_t first, int64_t count)
{
    if (input->count == count && input->first == first)
        return &input->tensor;
    const struct npy_header *header = &input->file.header;
    int64_t elements = count * stream_sample_elements(&input->shape);
    int64_t bytes = elements * header->item_bytes;
    void *data;
    if (input->direct && elements > 0) {
        int64_t offset = header->data_offset + first * (bytes / count);
        /* The tensors of one struct serve inputs and outputs; this one is only read. */
        const void *mapped = map_or_fail(input, offset, bytes);
        memcpy(&data, &mapped, sizeof data);
    } else {
        stream_reserve(&input->copy, &input->copy_bytes, (size_t)bytes);
        data = input->copy;
        if (elements > 0) {
            if (order_matters(header))
                copy_fortran(input, first, count);
            else
                copy_row_major(input, first, bytes);
            if (header->swapped)
                swap_items(data, (size_t)elements, (size_t)header->item_bytes);
        }
    }
    input->first = first;
    input->count = count;
    input->tensor = make_tensor(&input->shape, input->type, data, count, &input->axes);
    return &input->tensor;
}

/* ---- outputs ---------------------------------------------------------------------------------------------------- */

void stream_output_open(struct stream_output *output, const char *path, normfuse_type type, const char *descr,
                        const struct stream_shape *shape)
{
    static const char *const descrs[] = {
        [NORMFUSE_F64] = "<f8", [NORMFUSE_F32] = "<f4", [NORMFUSE_F16] = "<f2", [NORMFUSE_BF16] = "<u2"};
    char header[NPY_WRITTEN_HEADER_BYTES];
    int64_t sizes[NORMFUSE_MAX_AXES];
    if (!descr)
        descr = descrs[type];
    *output = (struct stream_output){
        .type = type, .shape = *shape, .swapped = npy_swapped(descr)};
    file_sizes(shape, sizes);
    size_t header_bytes = npy_write_header(header, descr, shape->ndim, sizes);
    int64_t bytes;
    if (__builtin_mul_overflow(shape->sizes[0], stream_sample_elements(shape), &bytes) ||
        __builtin_mul_overflow(bytes, (int64_t)number_bytes(type), &bytes) ||
        __builtin_add_overflow(bytes, (int64_t)header_bytes, &bytes))
        report_failure(path, "cannot be written: its bytes are more than 2^63");
    output->output = output_open(path, bytes);
    output_write(output->output, header, header_bytes);
}

const normfuse_tensor *stream_output_block(struct stream_output *output, int64_t count)
{
    size_t elements = (size_t)(count * stream_sample_elements(&output->shape));
    stream_reserve(&output->buffer, &output->buffer_bytes, elements * number_bytes(output->type));
    output->count = count;
    output->tensor = make_tensor(&output->shape, output->type, output->buffer, count, &output->axes);
    return &output->tensor;
}

/* Appends the first `items` of the buffer, which it leaves in the file's byte order. */
static void append_buffer(struct stream_output *output, size_t items)
{
    size_t item_bytes = number_bytes(output->type);
    if (output->swapped)
        swap_items(output->buffer, items, item_bytes);
    output_write(output->output, output->buffer, items * item_bytes);
}

void stream_output_flush(struct stream_output *output)
{
    append_buffer(output, (size_t)(output->count * stream_sample_elements(&output->shape)));
}

void stream_output_write(struct stream_output *output, const void *values, int64_t count)
{
    size_t bytes = (size_t)count * number_bytes(output->type);
    stream_reserve(&output->buffer, &output->buffer_bytes, bytes);
    memcpy(output->buffer, values, bytes);
    append_buffer(output, (size_t)count);
}

void stream_output_write_f64(struct stream_output *output, const double *values, int64_t count)
{
    stream_reserve(&output->buffer, &output->buffer_bytes, (size_t)count * number_bytes(output->type));
    for (int64_t i = 0; i < count; i++)
        number_store(output->buffer, output->type, i, values[i]);
    append_buffer(output, (size_t)count);
}
