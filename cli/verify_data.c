/* SPDX-License-Identifier: MIT
 *
 * verify_data.c - the tensors of a problem: their memory, with guards around it, and the data that fill them. */
#define _GNU_SOURCE
#include "verify_work.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "device.h"

/* ---- data ----------------------------------------------------------------------------------------------------- */

/* The seed of the values of a tensor's sample. */
static uint64_t sample_seed(uint64_t seed, enum tensor_name name, int64_t n)
{
    uint64_t h = verify_mix(seed * 0x9E3779B97F4A7C15u + (uint64_t)name + 1);
    return verify_mix(h + (uint64_t)n * 0xD1B54A32D192ED03u);
}

/* The sum of four uniform numbers: mean 0, sigma 1, at most 3.47. */
static double bell(uint64_t of_sample, int64_t c, int64_t s)
{
    uint64_t h = verify_mix(of_sample + (uint64_t)c * 0x8CB92BA72F3D8DD7u + (uint64_t)s * 0x9E3779B97F4A7C15u);
    int64_t sum = (int64_t)((h & 0xFFFF) + (h >> 16 & 0xFFFF) + (h >> 32 & 0xFFFF) + (h >> 48));
    return (double)(sum - 131070) * 2.6429e-05;
}

static double data_scale(const struct work *work)
{
    bool half = work->line->type == NORMFUSE_F16;
    switch (work->options->data) {
    case VERIFY_HUGE: return half ? 1e4 : 1e30;
    case VERIFY_TINY: return half ? 1e-4 : 1e-30;
    case VERIFY_LARGE_MEAN: return 0.01;
    case VERIFY_WIDE: return 12;
    default: return 1;
    }
}

static double data_mean(const struct work *work)
{
    switch (work->options->data) {
    case VERIFY_LARGE_MEAN: return 100;
    case VERIFY_CONSTANT: return 3;
    case VERIFY_EXACT: return 4;
    default: return 0.25 * data_scale(work);
    }
}

/* x and pre_bias of doubles, whose sum the reference would round and the library does not: sums of these are exact. */
static double coarse(const struct work *work, double value)
{
    const struct problem_line *line = work->line;
    if (line->type != NORMFUSE_F64 || !(line->pre_bias || line->sample_bias))
        return value;
    double grid = ldexp(1, ilogb(data_scale(work)) - 20);
    return rint(value / grid) * grid;
}

/* A value of the tensor before it is rounded to its type; of a sample whose seed is known. n counts from the bigger batch's
 * first sample. */
static double generated_at(const struct work *work, enum tensor_name name, uint64_t of_sample, int64_t n, int64_t c,
                           int64_t s)
{
    double value = bell(of_sample, c, s);
    enum verify_data data = work->options->data;
    bool bounded = work->line->activation == NORMFUSE_RELU6; /* whose kinks are to be on both sides of z */
    switch (name) {
    case X:
        if (data == VERIFY_CONSTANT)
            return 3;
        if (data == VERIFY_EXACT)
            return (work->set_is_group ? c * work->s + s : n * work->s + s) % 2 ? 4.5 : 3.5;
        if ((data == VERIFY_NAN || data == VERIFY_INF) && n == 0 && c == 0 && s == 0)
            return data == VERIFY_NAN ? (double)NAN : (double)INFINITY;
        return coarse(work, data_mean(work) + data_scale(work) * value);
    case PRE_ADD: return data == VERIFY_CONSTANT || data == VERIFY_EXACT ? 8 : data_scale(work) * value;
    case PRE_BIAS: return data == VERIFY_CONSTANT || data == VERIFY_EXACT ? 2 : coarse(work, data_scale(work) * value);
    case RUNNING_MEAN: return data_mean(work) + 0.1 * data_scale(work) * value;
    case RUNNING_VAR: return data_scale(work) * data_scale(work) * (0.5 + fabs(value));
    case WEIGHT: return (bounded ? 3 : 1) + 0.25 * value;
    case BIAS: return (bounded ? 3 : 0) + 0.25 * value;
    case SCALE:
    case SHIFT: return 0.25 * value;
    case SLOPE: return 0.25 + 0.25 * value;
    case Y: /* a backward's input: of any z, of which the gradients ask nothing */
        return reference_activation(work->line->activation, work->parameter, bounded ? 3 + 3 * value : value);
    default: return value;
    }
}

/* The value that is drawn for u where that stands in x's place. */
static double generated_u(const struct work *work, double x, int64_t n, int64_t c, int64_t s)
{
    const struct problem_line *line = work->line;
    const uint64_t seed = work->options->seed;
    double pre_add = 0, pre_bias = 0;
    if (line->pre_add)
        pre_add = reference_round(generated_at(work, PRE_ADD, sample_seed(seed, PRE_ADD, n), n, c, s), line->type);
    if (line->pre_bias || line->sample_bias) {
        const int64_t of = line->sample_bias ? n : 0;
        pre_bias = reference_round(generated_at(work, PRE_BIAS, sample_seed(seed, PRE_BIAS, of), of, c, 0),
                                   line->weight_type);
    }
    return reference_add(reference_round(x, line->type), pre_bias, pre_add, true, line->type);
}

struct sample verify_sample_of(const struct work *work, enum tensor_name name, int64_t n)
{
    if (work->buffers[name].is_sample_wise)
        n += work->options->first_sample;
    return (struct sample){ name, n, sample_seed(work->options->seed, name, n) };
}

double verify_generated(const struct work *work, const struct sample *sample, int64_t c, int64_t s)
{
    double value = generated_at(work, sample->name, sample->seed, sample->n, c, s);
    return sample->name == X && work->gives_u ? generated_u(work, value, sample->n, c, s) : value;
}

/* ---- memory --------------------------------------------------------------------------------------------------- */

static bool make_buffer(struct buffer *buffer, normfuse_type type, int64_t elements, bool misaligned)
{
    size_t element_bytes = reference_type_bytes(type);
    buffer->type = type;
    buffer->bytes = ((size_t)elements + (misaligned ? 1 : 0)) * element_bytes + 2 * GUARD_BYTES;
    buffer->bytes = (buffer->bytes + 63) / 64 * 64;
    buffer->base = aligned_alloc(64, buffer->bytes);
    if (!buffer->base)
        return false;
    memset(buffer->base, UNTOUCHED, buffer->bytes);
    buffer->data = buffer->base + GUARD_BYTES + (misaligned ? element_bytes : 0);
    return true;
}

/* But for statistics, which a forward writes. */
static bool is_output(const struct work *work, enum tensor_name name)
{
    return (name == Y && !work->line->backward) || name == U || (name >= DX && name != PRE_BIAS && name != SLOPE);
}

/* A tensor with x's shape. */
static bool make_big(struct work *work, enum tensor_name name)
{
    const struct verify_options *options = work->options;
    struct buffer *buffer = &work->buffers[name];
    bool expanded = options->expanded && (name == DY || name == DU || name == PRE_ADD || name == POST_ADD);
    int64_t more_samples = options->slice_batch ? 2 : 0, more_channels = options->slice_channels ? 3 : 0;
    int64_t channels = work->c + more_channels;
    int64_t elements = (expanded ? 1 : work->n + more_samples) * channels * work->s;
    const bool of_y = name == Y || name == DY || name == POST_ADD || name == DPOST_ADD;
    if (!make_buffer(buffer, of_y ? problem_line_y_type(work->line) : work->line->type, elements, options->misaligned))
        return false;
    bool channels_last = name == X ? work->line->channels_last
                                   : problem_line_channels_last(work->line, is_output(work, name));
    buffer->n = work->n;
    buffer->c = work->c;
    buffer->s = work->s;
    buffer->batch = expanded ? 0 : channels * work->s;
    buffer->channel = channels_last ? 1 : work->s;
    buffer->position = channels_last ? channels : 1;
    buffer->is_big = buffer->is_sample_wise = true;
    buffer->is_dense = !more_samples && !more_channels && !expanded;
    if (elements > 0)
        buffer->data = verify_element(buffer, more_samples / 2, more_channels / 3, 0);
    int32_t ndim = work->line->ndim;
    memcpy(buffer->axes.shape, work->line->sizes, sizeof buffer->axes.shape);
    buffer->axes.strides[0] = buffer->batch;
    buffer->axes.strides[1] = buffer->channel;
    ptrdiff_t stride = buffer->position;
    for (int32_t axis = ndim - 1; axis >= 2; axis--) {
        buffer->axes.strides[axis] = stride;
        stride *= work->line->sizes[axis];
    }
    buffer->tensor = normfuse_tensor_contiguous(buffer->data, buffer->type, ndim, buffer->axes.shape, &buffer->axes);
    ptrdiff_t strides[NORMFUSE_MAX_AXES] = { buffer->batch, buffer->channel };
    stride = buffer->position;
    for (int32_t axis = ndim - 1; axis >= 2; axis--) {
        strides[axis] = stride;
        stride *= work->line->sizes[axis];
    }
    for (int32_t axis = 0; axis < ndim; axis++)
        buffer->axes.strides[axis] = strides[axis];
    buffer->tensor.strides = buffer->axes.strides;
    work->at[name] = buffer;
    return true;
}

/* [rows, columns], or [columns] where rows is NO_ROWS. */
static bool make_small(struct work *work, enum tensor_name name, normfuse_type type, int64_t rows, int64_t columns,
                       bool may_be_strided)
{
    struct buffer *buffer = &work->buffers[name];
    int64_t stride = may_be_strided && work->options->strided_parameters ? 3 : 1;
    bool has_rows = rows != NO_ROWS;
    int64_t real_rows = has_rows ? rows : 1;
    if (!make_buffer(buffer, type, real_rows * columns * stride, work->options->misaligned))
        return false;
    buffer->n = real_rows;
    buffer->c = columns;
    buffer->s = 1;
    buffer->channel = stride;
    buffer->batch = columns * stride;
    buffer->is_sample_wise = has_rows;
    int64_t sizes[2] = { has_rows ? rows : columns, columns };
    buffer->tensor = normfuse_tensor_contiguous(buffer->data, type, has_rows ? 2 : 1, sizes, &buffer->axes);
    if (stride > 1) {
        buffer->axes.strides[0] = has_rows ? buffer->batch : stride;
        buffer->axes.strides[1] = stride;
        buffer->tensor.strides = buffer->axes.strides;
    }
    work->at[name] = buffer;
    return true;
}

int verify_thread_count(const struct work *work)
{
    int threads = work->options->reference_threads ? work->options->reference_threads : 2;
    return threads > MAX_REFERENCE_THREADS ? MAX_REFERENCE_THREADS : threads;
}

/* A part of a tensor: rows [from, to) of those that lie one after the other. */
struct filling {
    const struct work *work;
    enum tensor_name name;
    int64_t from, to;
    pthread_t thread;
    bool started;
};

static void *fill_rows(void *argument)
{
    const struct filling *filling = argument;
    const struct buffer *buffer = &filling->work->buffers[filling->name];
    bool by_position = buffer->channel < buffer->position;
    int64_t rows = by_position ? buffer->s : buffer->c, columns = by_position ? buffer->c : buffer->s;
    for (int64_t i = filling->from; i < filling->to; i++) {
        const int64_t n = i / rows, row = i % rows;
        const struct sample sample = verify_sample_of(filling->work, filling->name, n);
        for (int64_t j = 0; j < columns; j++) {
            const int64_t c = by_position ? j : row, s = by_position ? row : j;
            reference_store(verify_element(buffer, n, c, s), buffer->type,
                            verify_generated(filling->work, &sample, c, s));
        }
    }
    return NULL;
}

void verify_fill_generated(const struct work *work, enum tensor_name name)
{
    enum { VALUES_WORTH_THREADS = 1 << 15 };
    const struct buffer *buffer = &work->buffers[name];
    struct filling fillings[MAX_REFERENCE_THREADS];
    int64_t of_sample = buffer->channel < buffer->position ? buffer->s : buffer->c;
    /* If all samples are one in memory it has the last one's values, of however many threads. */
    int64_t samples = buffer->batch == 0 && buffer->n > 1 ? 1 : buffer->n;
    int64_t first = (buffer->n - samples) * of_sample, rows = samples * of_sample;
    int threads = samples * buffer->c * buffer->s < VALUES_WORTH_THREADS ? 1 : verify_thread_count(work);
    for (int i = 0; i < threads; i++) {
        fillings[i] =
            (struct filling){work, name, first + rows * i / threads, first + rows * (i + 1) / threads, 0, false};
        fillings[i].started = i && pthread_create(&fillings[i].thread, NULL, fill_rows, &fillings[i]) == 0;
    }
    for (int i = 0; i < threads; i++)
        if (!fillings[i].started)
            fill_rows(&fillings[i]);
    for (int i = 0; i < threads; i++)
        if (fillings[i].started)
            pthread_join(fillings[i].thread, NULL);
}

void verify_fill_bytes(const struct buffer *buffer, int byte)
{
    size_t element_bytes = reference_type_bytes(buffer->type);
    if (buffer->is_dense) {
        memset(buffer->data, byte, (size_t)(buffer->n * buffer->c * buffer->s) * element_bytes);
        return;
    }
    for (int64_t n = 0; n < buffer->n; n++)
        for (int64_t c = 0; c < buffer->c; c++)
            for (int64_t s = 0; s < buffer->s; s++)
                memset(verify_element(buffer, n, c, s), byte, element_bytes);
}

/* Fills an output with the bytes that it has before a call. */
void verify_clear_output(const struct work *work, enum tensor_name name)
{
    const struct verify_options *options = work->options;
    bool is_added_to = (options->accumulate && (name == DWEIGHT || name == DBIAS || name == DPRE_BIAS)) ||
                       ((options->accumulate || options->sharded) && name == DSLOPE);
    verify_fill_bytes(&work->buffers[name], is_added_to ? 0 : UNWRITTEN);
}

/* A checksum of a tensor and the guards around it, in lanes that a CPU multiplies at once. */
uint64_t verify_sum_of(const struct buffer *buffer)
{
    enum { LANES = 4 };
    uint64_t sums[LANES] = { 1, 2, 3, 4 }, sum = 0;
    for (size_t at = 0; at < buffer->bytes; at += sizeof sums) {
        uint64_t words[LANES];
        memcpy(words, buffer->base + at, sizeof words);
        for (int lane = 0; lane < LANES; lane++) {
            sums[lane] = (sums[lane] ^ words[lane]) * 0x9E3779B97F4A7C15u;
            sums[lane] ^= sums[lane] >> 32;
        }
    }
    for (int lane = 0; lane < LANES; lane++)
        sum = verify_mix(sum + sums[lane]);
    return sum;
}

/* One value of a tensor as it was before the call. */
static double value_before(const struct work *work, enum tensor_name name, int64_t n, int64_t c, int64_t s)
{
    const struct buffer *buffer = &work->buffers[name];
    if (buffer->overwritten) {
        const struct sample sample = verify_sample_of(work, name, n);
        return reference_round(verify_generated(work, &sample, c, s), buffer->type);
    }
    return reference_load(verify_element(buffer, n, c, s), buffer->type);
}

/* A parameter's value; absent where the tensor is. */
double verify_parameter_value(const struct work *work, enum tensor_name name, int64_t n, int64_t c, double absent)
{
    if (!work->at[name])
        return absent;
    const struct buffer *buffer = &work->buffers[name];
    return value_before(work, name, buffer->is_sample_wise ? n : 0, c, 0);
}

void verify_free(struct work *work)
{
    for (int name = 0; name < TENSORS; name++) {
        free(work->buffers[name].base);
        device_free(work->buffers[name].mirror);
    }
    for (size_t i = 0; i < work->room_count; i++)
        device_free(work->rooms[i].data);
    free(work->rooms);
    free(work->image);
    free(work->records);
    free(work->dweight);
    free(work->scratch);
    free(work->statistics);
}

static bool is_left_out(const struct work *work, unsigned bit)
{
    return (work->options->left_out & bit) != 0;
}

/* Marks `name` as living in the memory of `other`. */
static void put_into(struct work *work, enum tensor_name name, enum tensor_name other)
{
    work->at[name] = &work->buffers[other];
    work->buffers[other].overwritten = true;
}

/* Every tensor of the call, filled. */
bool verify_make_tensors(struct work *work)
{
    const struct verify_options *options = work->options;
    const struct problem_line *line = work->line;
    bool backward = line->backward, good = true;
    bool per_sample = line->op == AFFINE && line->per_sample;
    normfuse_type statistics_type = line->type == NORMFUSE_F64 ? NORMFUSE_F64 : NORMFUSE_F32;
    normfuse_type mean_type = options->f64_mean ? NORMFUSE_F64 : statistics_type;
    normfuse_type gradient_type = options->accumulate ? NORMFUSE_F64 : line->weight_type;
    int64_t parameter_rows = per_sample ? work->n : NO_ROWS, statistics_rows = work->set_is_group ? work->n : NO_ROWS;

    good = good && make_big(work, X);
    if (line->pre_add && !work->gives_u)
        good = good && make_big(work, PRE_ADD);
    int64_t bias_rows = line->sample_bias ? work->n : NO_ROWS;
    bool has_bias = line->pre_bias || line->sample_bias;
    if (has_bias && !work->gives_u)
        good = good && make_small(work, PRE_BIAS, line->weight_type, bias_rows, work->c, true);
    if (line->post_add)
        good = good && make_big(work, options->from_y ? Y : POST_ADD);
    if (!options->no_weight)
        good = good && make_small(work, WEIGHT, line->weight_type, parameter_rows, work->c, true);
    if (!options->no_bias)
        good = good && make_small(work, BIAS, line->weight_type, parameter_rows, work->c, true);
    if (line->scale_shift) {
        good = good && make_small(work, SCALE, line->weight_type, work->n, work->c, true);
        good = good && make_small(work, SHIFT, line->weight_type, work->n, work->c, true);
    }
    const int64_t slopes = line->one_slope ? 1 : work->c;
    if (line->activation == NORMFUSE_PRELU)
        good = good && make_small(work, SLOPE, line->weight_type, NO_ROWS, slopes, true);
    if (work->has_statistics && (backward || !is_left_out(work, VERIFY_SAVED))) {
        const int64_t entries = work->groups * work->group_sets;
        if (line->statistics != NORMFUSE_MEAN_SQUARE)
            good = good && make_small(work, MEAN, mean_type, statistics_rows, entries, false);
        good = good && make_small(work, RSTD, statistics_type, statistics_rows, entries, false);
    }
    if (work->evaluates || options->running) {
        good = good && make_small(work, RUNNING_MEAN, line->weight_type, NO_ROWS, work->c, true);
        good = good && make_small(work, RUNNING_VAR, line->weight_type, NO_ROWS, work->c, true);
    }
    if (!good)
        return false;
    if (!backward) {
        if (!is_left_out(work, VERIFY_Y)) {
            if (options->in_place && !(line->write_u && !line->pre_add))
                put_into(work, Y, X);
            else
                good = good && make_big(work, Y);
        }
        if (line->write_u) {
            if (options->in_place)
                put_into(work, U, line->pre_add ? PRE_ADD : X);
            else
                good = good && make_big(work, U);
        }
    } else {
        good = good && make_big(work, DY);
        if (line->write_u)
            good = good && make_big(work, DU);
        if (!is_left_out(work, VERIFY_DX)) {
            if (options->in_place)
                put_into(work, DX, DY);
            else
                good = good && make_big(work, DX);
        }
        /* Each shard along S has a part of it. */
        bool is_whole = !options->sharded || (!work->set_is_group && line->sample_bias);
        if (has_bias && work->at[DX] && is_whole && !is_left_out(work, VERIFY_DPRE_BIAS))
            good = good && make_small(work, DPRE_BIAS, gradient_type, bias_rows, work->c, true);
        if (!options->no_weight && !is_left_out(work, VERIFY_DWEIGHT))
            good = good && make_small(work, DWEIGHT, gradient_type, parameter_rows, work->c, true);
        if (!options->no_bias && !is_left_out(work, VERIFY_DBIAS))
            good = good && make_small(work, DBIAS, gradient_type, parameter_rows, work->c, true);
        if (line->scale_shift && !is_left_out(work, VERIFY_DSCALE))
            good = good && make_small(work, DSCALE, line->weight_type, work->n, work->c, true);
        if (line->scale_shift && !is_left_out(work, VERIFY_DSHIFT))
            good = good && make_small(work, DSHIFT, line->weight_type, work->n, work->c, true);
        if (line->activation == NORMFUSE_PRELU && !is_left_out(work, VERIFY_DSLOPE))
            good = good &&
                   make_small(work, DSLOPE, options->sharded ? NORMFUSE_F64 : gradient_type, NO_ROWS, slopes, true);
        if (line->post_add && !is_left_out(work, VERIFY_DPOST_ADD)) {
            if (options->in_place && !work->at[DX] && !options->sharded)
                put_into(work, DPOST_ADD, DY);
            else
                good = good && make_big(work, DPOST_ADD);
        }
    }
    if (!good)
        return false;
    for (int name = 0; name < TENSORS; name++) {
        struct buffer *buffer = &work->buffers[name];
        if (!buffer->base)
            continue;
        bool is_statistics = name == MEAN || name == RSTD;
        buffer->is_output = is_output(work, (enum tensor_name)name) || (is_statistics && !backward);
        if (buffer->is_output)
            verify_clear_output(work, (enum tensor_name)name);
        else if (!is_statistics)
            verify_fill_generated(work, (enum tensor_name)name);
    }
    return true;
}

int64_t verify_largest_set(const struct work *work)
{
    return work->set_is_position ? work->group_channels
           : work->set_is_group  ? work->group_channels * work->s
                                 : work->n * work->s;
}
