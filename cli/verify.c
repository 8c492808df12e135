/* SPDX-License-Identifier: MIT
 *
 * verify.c - see verify.h. Order of work: lay out memory and fill it, call the library, then set by set (what shares
 * statistics) run the reference, bound it and compare; last what belongs to whole channels, and the memory around the
 * tensors. Only one set at a time (one a thread) is held in double. */
#define _GNU_SOURCE
#include "verify.h"

#include <math.h>
#include <pthread.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device.h"
#include "operator_call.h"
#include "tests/ref/reference.h"
#include "tests/ref/tolerance.h"

enum {
    GUARD_BYTES = 512,
    UNTOUCHED = 0xA5, /* what surrounds tensors */
    UNWRITTEN = 0xFF, /* what outputs hold before the call: a NaN in every type */
    SHARDS = 3,
    MAX_REFERENCE_THREADS = 16
};

static const double double_unit = 0x1p-53;

enum tensor_name {
    X, PRE_ADD, POST_ADD, WEIGHT, BIAS, SCALE, SHIFT, Y, U, MEAN, RSTD, RUNNING_MEAN, RUNNING_VAR, DY, DU,
    DX, DWEIGHT, DBIAS, DSCALE, DSHIFT, DPOST_ADD, STATS, SUMS, PRE_BIAS, DPRE_BIAS, SLOPE, DSLOPE,
    TENSORS
};

static const char *const tensor_names[TENSORS] = {
    "x", "pre_add", "post_add", "weight", "bias", "scale", "shift", "y", "u", "mean", "rstd", "running_mean",
    "running_var", "dy", "du", "dx", "dweight", "dbias", "dscale", "dshift", "dpost_add", "stats", "sums",
    "pre_bias", "dpre_bias", "slope", "dslope"
};

/* A tensor in memory of its own, with guards around it. Element (n, c, s) is at data + (n*batch + c*channel +
 * s*position) elements. */
struct buffer {
    char *base;
    size_t bytes;
    char *data;
    char *mirror; /* base's counterpart on the device; NULL: on the CPU */
    size_t at;    /* its bytes in an image of the device */
    normfuse_type type;
    int64_t n, c, s;
    ptrdiff_t batch, channel, position;
    bool is_big, is_sample_wise; /* has x's shape; has an axis N */
    bool overwritten;            /* an output was put into it: what it held is known from the generator only */
    bool is_output, is_dense;
    uint64_t sum;                /* of an input before the call; of what a first run left */
    normfuse_tensor tensor;
    normfuse_axes axes;
};

/* Results of one thread of the comparison. */
struct tally {
    double budget_used, got, want;
    const char *tensor;
    char index[64];
    int64_t compared, beyond, unbounded;
    uint64_t hash;
};

/* Per set: what the reference says of its statistics, and the bounds. */
struct set_record {
    struct reference_statistics statistics;
    double mean, rstd; /* what it is normalized with */
    bool is_clamped;   /* rstd is the most that eps of a norm allows */
    struct tolerance_statistics tolerance;
};

struct work {
    const struct problem_line *line;
    const struct verify_options *options;
    struct verify_result *result;
    int64_t n, c, s;
    int64_t groups, group_channels, sets;
    bool set_is_group;   /* of one sample; otherwise of one channel over all samples */
    bool set_is_position; /* a group's channels at one position; a group's positions are adjacent sets */
    int64_t group_sets;   /* of a sample's group: 1, or its positions */
    bool has_statistics; /* made of x; not given and not absent */
    bool evaluates;
    bool gives_u; /* in x's place, without pre_add and pre_bias */
    double parameter;
    struct buffer buffers[TENSORS];
    const struct buffer *at[TENSORS]; /* NULL: absent. In place: another's buffer */
    struct set_record *records;
    double momentum;
    /* gradients of whole channels: value and bound, [N, C] for groups, [C] otherwise */
    double *dweight, *dweight_error, *dbias, *dbias_error, *dslope, *dslope_error;
    double *dscale, *dscale_error, *dshift, *dshift_error; /* of a sample's channels, where these have many sets */
    char *scratch;
    size_t scratch_bytes;
    double *statistics; /* of shards and parts */
    int32_t threads;    /* of a call */
    bool on_device;
    char *sync;
    size_t sync_bytes;
    struct device_room *rooms; /* in the order that calls ask for them, again in each run */
    size_t room_count, rooms_used;
    size_t image_bytes; /* of all mirrors */
    char *image;        /* what the first run left on the device */
};

/* Memory of the device beside the tensors: scratch, statistics of shards. GUARD_BYTES follow. */
struct device_room {
    char *data;
    size_t bytes;
};

static const double running_momentum = 0.125;
static const int64_t batches_seen = 4;

/* ---- data ----------------------------------------------------------------------------------------------------- */

static uint64_t mix(uint64_t h)
{
    h ^= h >> 30;
    h *= 0xBF58476D1CE4E5B9u;
    h ^= h >> 27;
    h *= 0x94D049BB133111EBu;
    return h ^ h >> 31;
}

/* The seed of the values of a tensor's sample. */
static uint64_t sample_seed(uint64_t seed, enum tensor_name name, int64_t n)
{
    uint64_t h = mix(seed * 0x9E3779B97F4A7C15u + (uint64_t)name + 1);
    return mix(h + (uint64_t)n * 0xD1B54A32D192ED03u);
}

/* The sum of four uniform numbers: mean 0, sigma 1, at most 3.47. */
static double bell(uint64_t of_sample, int64_t c, int64_t s)
{
    uint64_t h = mix(of_sample + (uint64_t)c * 0x8CB92BA72F3D8DD7u + (uint64_t)s * 0x9E3779B97F4A7C15u);
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
static double generated_at(const struct work *work, enum tensor_name name, uint64_t of_sample, int64_t n, int64_t c, int64_t s)
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
        pre_bias = reference_round(generated_at(work, PRE_BIAS, sample_seed(seed, PRE_BIAS, of), of, c, 0), line->weight_type);
    }
    return reference_add(reference_round(x, line->type), pre_bias, pre_add, true, line->type);
}

/* A sample of a tensor. */
struct sample {
    enum tensor_name name;
    int64_t n;
    uint64_t seed;
};

static struct sample sample_of(const struct work *work, enum tensor_name name, int64_t n)
{
    if (work->buffers[name].is_sample_wise)
        n += work->options->first_sample;
    return (struct sample){ name, n, sample_seed(work->options->seed, name, n) };
}

static double generated(const struct work *work, const struct sample *sample, int64_t c, int64_t s)
{
    double value = generated_at(work, sample->name, sample->seed, sample->n, c, s);
    return sample->name == X && work->gives_u ? generated_u(work, value, sample->n, c, s) : value;
}

/* ---- memory --------------------------------------------------------------------------------------------------- */

static char *element(const struct buffer *buffer, int64_t n, int64_t c, int64_t s)
{
    return buffer->data + (n * buffer->batch + c * buffer->channel + s * buffer->position) *
                              (ptrdiff_t)reference_type_bytes(buffer->type);
}

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
        buffer->data = element(buffer, more_samples / 2, more_channels / 3, 0);
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
enum { NO_ROWS = -1 };

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

static int thread_count(const struct work *work)
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
        const struct sample sample = sample_of(filling->work, filling->name, n);
        for (int64_t j = 0; j < columns; j++) {
            const int64_t c = by_position ? j : row, s = by_position ? row : j;
            reference_store(element(buffer, n, c, s), buffer->type, generated(filling->work, &sample, c, s));
        }
    }
    return NULL;
}

static void fill_generated(const struct work *work, enum tensor_name name)
{
    enum { VALUES_WORTH_THREADS = 1 << 15 };
    const struct buffer *buffer = &work->buffers[name];
    struct filling fillings[MAX_REFERENCE_THREADS];
    int64_t of_sample = buffer->channel < buffer->position ? buffer->s : buffer->c;
    /* If all samples are one in memory it has the last one's values, of however many threads. */
    int64_t samples = buffer->batch == 0 && buffer->n > 1 ? 1 : buffer->n;
    int64_t first = (buffer->n - samples) * of_sample, rows = samples * of_sample;
    int threads = samples * buffer->c * buffer->s < VALUES_WORTH_THREADS ? 1 : thread_count(work);
    for (int i = 0; i < threads; i++) {
        fillings[i] = (struct filling){ work, name, first + rows * i / threads, first + rows * (i + 1) / threads, 0, false };
        fillings[i].started = i && pthread_create(&fillings[i].thread, NULL, fill_rows, &fillings[i]) == 0;
    }
    for (int i = 0; i < threads; i++)
        if (!fillings[i].started)
            fill_rows(&fillings[i]);
    for (int i = 0; i < threads; i++)
        if (fillings[i].started)
            pthread_join(fillings[i].thread, NULL);
}

static void fill_bytes(const struct buffer *buffer, int byte)
{
    size_t element_bytes = reference_type_bytes(buffer->type);
    if (buffer->is_dense) {
        memset(buffer->data, byte, (size_t)(buffer->n * buffer->c * buffer->s) * element_bytes);
        return;
    }
    for (int64_t n = 0; n < buffer->n; n++)
        for (int64_t c = 0; c < buffer->c; c++)
            for (int64_t s = 0; s < buffer->s; s++)
                memset(element(buffer, n, c, s), byte, element_bytes);
}

/* Fills an output with the bytes that it has before a call. */
static void clear_output(const struct work *work, enum tensor_name name)
{
    const struct verify_options *options = work->options;
    bool is_added_to = (options->accumulate && (name == DWEIGHT || name == DBIAS || name == DPRE_BIAS)) ||
                       ((options->accumulate || options->sharded) && name == DSLOPE);
    fill_bytes(&work->buffers[name], is_added_to ? 0 : UNWRITTEN);
}

/* A checksum of a tensor and the guards around it, in lanes that a CPU multiplies at once. */
static uint64_t sum_of(const struct buffer *buffer)
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
        sum = mix(sum + sums[lane]);
    return sum;
}

/* One value of a tensor as it was before the call. */
static double value_before(const struct work *work, enum tensor_name name, int64_t n, int64_t c, int64_t s)
{
    const struct buffer *buffer = &work->buffers[name];
    if (buffer->overwritten) {
        const struct sample sample = sample_of(work, name, n);
        return reference_round(generated(work, &sample, c, s), buffer->type);
    }
    return reference_load(element(buffer, n, c, s), buffer->type);
}

/* A parameter's value; absent where the tensor is. */
static double parameter_value(const struct work *work, enum tensor_name name, int64_t n, int64_t c, double absent)
{
    if (!work->at[name])
        return absent;
    const struct buffer *buffer = &work->buffers[name];
    return value_before(work, name, buffer->is_sample_wise ? n : 0, c, 0);
}

static void free_buffers(struct work *work)
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
static bool make_tensors(struct work *work)
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
            good = good && make_small(work, DSLOPE, options->sharded ? NORMFUSE_F64 : gradient_type, NO_ROWS, slopes, true);
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
            clear_output(work, (enum tensor_name)name);
        else if (!is_statistics)
            fill_generated(work, (enum tensor_name)name);
    }
    return true;
}

/* ---- sets ----------------------------------------------------------------------------------------------------- */

/* The place of a set's values. */
struct extent {
    int64_t n, c, s, rows, channels, positions;
};

static struct extent extent_of(const struct work *work, int64_t set)
{
    const int64_t lot = set / work->group_sets;
    if (work->set_is_group)
        return (struct extent){ lot / work->groups, lot % work->groups * work->group_channels, set % work->group_sets, 1,
                                work->group_channels, work->set_is_position ? 1 : work->s };
    return (struct extent){ 0, set, 0, work->n, 1, work->s };
}

/* The place of a norm group's saved statistics: row and column. */
static int64_t statistic_column(const struct work *work, int64_t set)
{
    return work->set_is_group ? set % (work->groups * work->group_sets) : set;
}

/* Arithmetic of operators other than group norm. */
static struct tolerance_arithmetic arithmetic_of_channels(const struct work *work, const struct extent *extent)
{
    const bool ambiguous = work->c == 1 || work->s == 1;
    return tolerance_arithmetic(work->line->device, work->line->type, work->line->channels_last, ambiguous, extent->rows,
                                extent->channels, extent->positions);
}

static struct tolerance_arithmetic arithmetic_of(const struct work *work, const struct extent *extent)
{
    const bool ambiguous = work->c == 1 || work->s == 1;
    if (work->set_is_position && !work->on_device)
        return tolerance_channels(work->line->type, work->line->channels_last, ambiguous, extent->channels,
                                  work->n * work->s);
    /* CUDA takes positions as samples of one value a channel. */
    struct tolerance_arithmetic arithmetic =
        work->set_is_position
            ? tolerance_arithmetic(work->line->device, work->line->type, true, true, 1, extent->channels, 1)
            : arithmetic_of_channels(work, extent);
    arithmetic.parameter_additions = arithmetic.additions;
    arithmetic.parameter_joins = arithmetic.joins;
    if (work->set_is_group && !arithmetic.on_cuda)
        tolerance_small_sets(&arithmetic, work->line->channels_last && !ambiguous, extent->channels, extent->positions);
    arithmetic.parameter_additions = arithmetic.additions;
    return arithmetic;
}

/* The set's values of a big tensor, dense. */
static void load_set(const struct work *work, enum tensor_name name, const struct extent *extent, double *values)
{
    const struct buffer *buffer = &work->buffers[name];
    for (int64_t row = 0; row < extent->rows; row++)
        for (int64_t channel = 0; channel < extent->channels; channel++) {
            double *to = values + (row * extent->channels + channel) * extent->positions;
            int64_t n = extent->n + row, c = extent->c + channel;
            if (!buffer->overwritten) {
                reference_load_strided(to, element(buffer, n, c, extent->s), buffer->type, extent->positions,
                                       buffer->position);
                continue;
            }
            const struct sample sample = sample_of(work, name, n);
            for (int64_t s = 0; s < extent->positions; s++)
                to[s] = reference_round(generated(work, &sample, c, extent->s + s), buffer->type);
        }
}

/* u; `more` is room for a tensor that is added. */
static void load_u(const struct work *work, const struct extent *extent, double *u, double *more)
{
    load_set(work, X, extent, u);
    bool adds = work->at[PRE_ADD] != NULL;
    bool rounds = adds || work->at[U] || work->set_is_position || (work->line->op == BATCH_NORM && work->line->sample_bias && !work->evaluates);
    if (!adds && !work->at[PRE_BIAS])
        return;
    if (adds)
        load_set(work, PRE_ADD, extent, more);
    for (int64_t pair = 0; pair < extent->rows * extent->channels; pair++) {
        int64_t n = extent->n + pair / extent->channels, c = extent->c + pair % extent->channels;
        double pre_bias = parameter_value(work, PRE_BIAS, n, c, 0);
        for (int64_t i = pair * extent->positions; i < (pair + 1) * extent->positions; i++)
            u[i] = reference_add(u[i], pre_bias, adds ? more[i] : 0, rounds, work->line->type);
    }
}

static int64_t largest_set(const struct work *work)
{
    return work->set_is_position ? work->group_channels
           : work->set_is_group  ? work->group_channels * work->s
                                 : work->n * work->s;
}

/* A thread's share: every threads-th group of a sample, or set: gradients of a channel are one thread's. */
struct share {
    struct work *work;
    bool (*each)(struct share *share, int64_t set);
    int index, threads;
    double *room; /* ARRAYS arrays of the largest set, then PAIR_ARRAYS of its pairs */
    int64_t set_values, pairs;
    struct tally tally;
    pthread_t thread;
    bool started;
};

enum { ARRAYS_FORWARD = 2, ARRAYS_BACKWARD = 6, PAIR_INPUTS = 5, PAIR_ARRAYS = PAIR_INPUTS + 11 };

static double *array(const struct share *share, int index)
{
    return share->room + index * share->set_values;
}

static void *run_share(void *argument)
{
    struct share *share = argument;
    const int64_t each = share->work->group_sets;
    for (int64_t lot = share->index; each && lot < share->work->sets / each; lot += share->threads)
        for (int64_t set = lot * each; set < (lot + 1) * each; set++)
            share->each(share, set);
    return NULL;
}

static void join_tally(struct tally *total, const struct tally *part)
{
    if (part->budget_used > total->budget_used) {
        total->budget_used = part->budget_used;
        total->got = part->got;
        total->want = part->want;
        total->tensor = part->tensor;
        memcpy(total->index, part->index, sizeof total->index);
    }
    total->compared += part->compared;
    total->beyond += part->beyond;
    total->unbounded += part->unbounded;
    total->hash += part->hash;
}

static bool for_each_set(struct work *work, bool (*each)(struct share *, int64_t), struct tally *tally)
{
    struct share shares[MAX_REFERENCE_THREADS];
    int threads = thread_count(work);
    if (threads > work->sets)
        threads = work->sets > 1 ? (int)work->sets : 1;
    int64_t set_values = largest_set(work), pairs = work->set_is_group ? work->group_channels : work->n;
    if (set_values * work->sets < 4096)
        threads = 1;
    int arrays = work->line->backward ? ARRAYS_BACKWARD : ARRAYS_FORWARD;
    bool good = true;
    for (int i = 0; i < threads; i++) {
        shares[i] = (struct share){ .work = work, .each = each, .index = i, .threads = threads };
        shares[i].set_values = set_values;
        shares[i].pairs = pairs;
        shares[i].room = malloc((size_t)(arrays * set_values + PAIR_ARRAYS * pairs + 1) * sizeof(double));
        good = good && shares[i].room;
    }
    for (int i = 1; i < threads && good; i++)
        shares[i].started = pthread_create(&shares[i].thread, NULL, run_share, &shares[i]) == 0;
    for (int i = 0; i < threads && good; i++)
        if (!shares[i].started)
            run_share(&shares[i]);
    for (int i = 0; i < threads; i++) {
        if (shares[i].started)
            pthread_join(shares[i].thread, NULL);
        free(shares[i].room);
        if (tally)
            join_tally(tally, &shares[i].tally);
    }
    return good;
}

/* The statistics of x, and for a backward the saved ones that the library is given. */
static bool make_statistics(struct share *share, int64_t set)
{
    struct work *work = share->work;
    struct set_record *record = &work->records[set];
    struct extent extent = extent_of(work, set);
    int64_t count = extent.rows * extent.channels * extent.positions;
    double *u = array(share, 0);
    record->mean = 0;
    record->rstd = 1;
    if (work->evaluates) {
        record->mean = parameter_value(work, RUNNING_MEAN, 0, extent.c, 0);
        record->rstd = reference_rstd(parameter_value(work, RUNNING_VAR, 0, extent.c, 1), work->line->eps);
        record->tolerance.rstd = 4 * double_unit;
    }
    if (!work->has_statistics)
        return true;
    load_u(work, &extent, u, array(share, 1));
    const bool of_squares = work->line->statistics == NORMFUSE_MEAN_SQUARE;
    record->statistics =
        (of_squares ? reference_squares : reference_statistics)(u, extent.rows * extent.channels, extent.positions);
    record->mean = count ? record->statistics.mean : 0;
    double variance = count ? record->statistics.m2 / record->statistics.count : 0;
    record->rstd = reference_rstd(variance, work->line->eps);
    if (work->line->eps_kind == NORMFUSE_EPS_OF_NORM)
        record->rstd = reference_rstd_of_norm((double)count, count ? record->statistics.m2 : 0, work->line->eps);
    if (!work->line->backward) {
        bool columns = work->line->channels_last;
        struct tolerance_arithmetic arithmetic = arithmetic_of(work, &extent);
        enum verify_data data = work->options->data;
        /* an even number of positions: then every shift is 4; shards may have an odd one */
        arithmetic.exact_sums =
            data == VERIFY_CONSTANT ||
            (data == VERIFY_EXACT && work->s % 2 == 0 && !work->on_device && !work->options->sharded);
        /* on the CPU shards begin pieces where one call would not */
        if (count > 0 && (work->on_device || (!work->set_is_position && !work->options->sharded)))
            arithmetic.drift = tolerance_drift(&arithmetic, columns, u, extent.rows, extent.channels, extent.positions,
                                               record->mean);
        record->tolerance =
            work->set_is_position
                ? tolerance_channel_statistics(&arithmetic, record->statistics.count, record->mean, record->statistics.m2,
                                               work->line->eps, work->line->statistics, work->line->eps_kind)
                : tolerance_statistics(&arithmetic, record->statistics.count, record->mean, record->statistics.m2,
                                       work->line->eps);
        return true;
    }
    int64_t row = work->set_is_group ? extent.n : 0, column = statistic_column(work, set);
    const struct buffer *mean = &work->buffers[MEAN], *rstd = &work->buffers[RSTD];
    if (work->at[MEAN]) {
        reference_store(element(mean, row, column, 0), mean->type, record->mean);
        record->mean = reference_round(record->mean, mean->type);
    }
    reference_store(element(rstd, row, column, 0), rstd->type, record->rstd);
    record->rstd = reference_round(record->rstd, rstd->type);
    record->is_clamped = work->line->eps_kind == NORMFUSE_EPS_OF_NORM && work->line->eps > 0 &&
                         record->rstd >= reference_round(sqrt((double)count) / work->line->eps, rstd->type);
    return true;
}

/* ---- what is found -------------------------------------------------------------------------------------------- */

__attribute__((format(printf, 3, 4))) static enum verify_outcome conclude(struct verify_result *result,
                                                                          enum verify_outcome outcome,
                                                                          const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(result->message, sizeof result->message, format, arguments);
    va_end(arguments);
    return result->outcome = outcome;
}

/* By the library. */
static enum verify_outcome conclude_refused(struct verify_result *result)
{
    return conclude(result, VERIFY_REFUSED, "%s: %s", normfuse_status_text(result->status), normfuse_last_error());
}

static bool is_untouched(const char *bytes, size_t count)
{
    return !count || ((unsigned char)bytes[0] == UNTOUCHED && memcmp(bytes, bytes + 1, count - 1) == 0);
}

/* ---- the library ---------------------------------------------------------------------------------------------- */

enum call { FORWARD, BACKWARD, STATS_OF, APPLY, BACKWARD_SUMS, BACKWARD_APPLY };

struct library_call {
    enum call call;
    const normfuse_tensors *tensors;
    int64_t set_values;
    bool accumulate;
};

/* Of an operator that shards have, too. */
#define CALL(op)                                                                                                       \
    if (scratch_bytes)                                                                                                 \
        return forward ? normfuse_##op##_forward_scratch_bytes(&own, tensors, exec, scratch_bytes)                     \
                       : normfuse_##op##_backward_scratch_bytes(&own, tensors, exec, scratch_bytes);                   \
    switch (what->call) {                                                                                              \
    case FORWARD: return normfuse_##op##_forward(&own, tensors, exec);                                                 \
    case BACKWARD: return normfuse_##op##_backward(&own, tensors, exec);                                               \
    case STATS_OF: return normfuse_##op##_stats(&own, tensors, exec);                                                  \
    case APPLY: return normfuse_##op##_apply(&own, tensors, exec);                                                     \
    case BACKWARD_SUMS: return normfuse_##op##_backward_sums(&own, tensors, exec);                                     \
    default: return normfuse_##op##_backward_apply(&own, tensors, exec);                                               \
    }

/* Makes the call, or with scratch_bytes asks only for what it needs. */
static normfuse_status invoke(const struct work *work, const struct library_call *what, const normfuse_exec *exec,
                              size_t *scratch_bytes)
{
    const struct problem_line *line = work->line;
    const struct verify_options *options = work->options;
    const normfuse_tensors *tensors = what->tensors;
    bool forward = what->call == FORWARD || what->call == STATS_OF || what->call == APPLY;
    uint32_t flags = (line->has_act_param ? NORMFUSE_HAS_ACT_PARAM : 0) |
                     (what->accumulate ? NORMFUSE_ACCUMULATE : 0) | (work->evaluates ? NORMFUSE_EVALUATE : 0) |
                     (options->cumulative && !work->evaluates ? NORMFUSE_CUMULATIVE : 0);
    if (line->op == AFFINE)
        return affine_call(line, flags, forward, tensors, exec, scratch_bytes);
    if (line->op == CHANNEL_NORM)
        return channel_norm_call(line, flags, forward, tensors, exec, scratch_bytes);
    if (line->op == BATCH_NORM) {
        normfuse_batch_norm_options own = { .struct_bytes = sizeof own,
                                            .flags = flags,
                                            .eps = line->eps,
                                            .activation = line->activation,
                                            .act_param = line->act_param,
                                            .momentum = running_momentum,
                                            .batches_seen = options->cumulative ? batches_seen : 0,
                                            .set_values = what->set_values };
        CALL(batch_norm)
    }
    normfuse_group_norm_options own = { .struct_bytes = sizeof own,
                                        .flags = flags,
                                        .groups = work->groups,
                                        .eps = line->eps,
                                        .activation = line->activation,
                                        .act_param = line->act_param,
                                        .momentum = running_momentum,
                                        .batches_seen = options->cumulative ? batches_seen : 0,
                                        .set_values = what->set_values };
    CALL(group_norm)
#undef CALL
}

/* Memory of the device for this place in the run: made in the first one, found again in later ones, which may be
 * captured. */
static char *take_room(struct work *work, size_t bytes, int byte)
{
    if (work->rooms_used == work->room_count) {
        struct device_room *rooms = realloc(work->rooms, (work->room_count + 1) * sizeof *rooms);
        if (!rooms)
            return NULL;
        work->rooms = rooms;
        rooms[work->room_count] = (struct device_room){ device_allocate(bytes + GUARD_BYTES), bytes };
        if (!rooms[work->room_count].data)
            return NULL;
        work->room_count++;
    }
    const struct device_room *room = &work->rooms[work->rooms_used++];
    if (room->bytes != bytes || !device_fill(room->data, byte, bytes) ||
        !device_fill(room->data + bytes, UNTOUCHED, GUARD_BYTES))
        return NULL;
    return room->data;
}

/* The statistics or sums of shards, every byte of them `byte`. */
static double *make_sharded_memory(struct work *work, int64_t values, int byte)
{
    size_t bytes = (size_t)(values + 1) * sizeof(double);
    if (work->on_device)
        return (double *)(void *)take_room(work, bytes, byte);
    free(work->statistics);
    work->statistics = malloc(bytes);
    if (work->statistics)
        memset(work->statistics, byte, bytes);
    return work->statistics;
}

static normfuse_exec make_exec(const struct work *work)
{
    normfuse_exec exec = { .struct_bytes = sizeof exec,
                           .threads = work->threads,
                           .parallel_for = work->options->parallel_for,
                           .pool = work->options->pool };
    if (work->on_device) {
        exec.stream = device_stream();
        exec.sync = work->sync;
        exec.sync_bytes = work->sync_bytes;
    }
    return exec;
}

static normfuse_status call_library(struct work *work, enum call call, const normfuse_tensors *tensors,
                                    int64_t set_values, bool accumulate)
{
    const struct library_call what = { call, tensors, set_values, accumulate };
    normfuse_exec exec = make_exec(work);
    if (work->on_device || (work->options->own_scratch && (call == FORWARD || call == BACKWARD))) {
        size_t bytes = 0;
        normfuse_status status = invoke(work, &what, &exec, &bytes);
        if (status != NORMFUSE_OK)
            return status;
        if (work->on_device) {
            exec.scratch = take_room(work, bytes, UNWRITTEN);
        } else {
            free(work->scratch);
            work->scratch_bytes = bytes;
            work->scratch = aligned_alloc(64, (bytes + GUARD_BYTES + 63) / 64 * 64);
            if (work->scratch)
                memset(work->scratch, UNTOUCHED, bytes + GUARD_BYTES);
            exec.scratch = work->scratch;
        }
        if (!exec.scratch)
            return NORMFUSE_OUT_OF_MEMORY;
        exec.scratch_bytes = bytes;
    }
    return invoke(work, &what, &exec, NULL);
}

/* The tensors of a call; of some, a part along an axis. */
struct arguments {
    normfuse_tensors tensors;
    normfuse_tensor part[TENSORS];
    normfuse_axes axes[TENSORS];
};

static const normfuse_tensor **member(normfuse_tensors *tensors, enum tensor_name name)
{
    switch (name) {
    case X: return &tensors->x;
    case PRE_ADD: return &tensors->pre_add;
    case POST_ADD: return &tensors->post_add;
    case WEIGHT: return &tensors->weight;
    case BIAS: return &tensors->bias;
    case SCALE: return &tensors->scale;
    case SHIFT: return &tensors->shift;
    case Y: return &tensors->y;
    case U: return &tensors->u;
    case MEAN: return &tensors->mean;
    case RSTD: return &tensors->rstd;
    case RUNNING_MEAN: return &tensors->running_mean;
    case RUNNING_VAR: return &tensors->running_var;
    case DY: return &tensors->dy;
    case DU: return &tensors->du;
    case DX: return &tensors->dx;
    case DWEIGHT: return &tensors->dweight;
    case DBIAS: return &tensors->dbias;
    case DSCALE: return &tensors->dscale;
    case DSHIFT: return &tensors->dshift;
    case DPOST_ADD: return &tensors->dpost_add;
    case STATS: return &tensors->stats;
    case PRE_BIAS: return &tensors->pre_bias;
    case DPRE_BIAS: return &tensors->dpre_bias;
    case SLOPE: return &tensors->slope;
    case DSLOPE: return &tensors->dslope;
    default: return &tensors->sums;
    }
}

static const unsigned pre = 1u << PRE_ADD | 1u << PRE_BIAS;
static const unsigned forward_inputs = 1u << X | 1u << PRE_ADD | 1u << PRE_BIAS | 1u << POST_ADD | 1u << WEIGHT | 1u << BIAS |
                                       1u << SCALE | 1u << SHIFT | 1u << SLOPE | 1u << RUNNING_MEAN | 1u << RUNNING_VAR;
static const unsigned forward_outputs = 1u << Y | 1u << U | 1u << MEAN | 1u << RSTD;
static const unsigned running_statistics = 1u << RUNNING_MEAN | 1u << RUNNING_VAR;
static const unsigned backward_inputs = 1u << X | 1u << PRE_ADD | 1u << PRE_BIAS | 1u << POST_ADD | 1u << WEIGHT | 1u << BIAS |
                                        1u << SCALE | 1u << SHIFT | 1u << MEAN | 1u << RSTD | 1u << RUNNING_MEAN |
                                        1u << RUNNING_VAR | 1u << Y | 1u << DY | 1u << SLOPE;
static const unsigned parameter_gradients = 1u << DWEIGHT | 1u << DBIAS | 1u << DSCALE | 1u << DSHIFT;
static const unsigned input_gradients = 1u << DX | 1u << DPRE_BIAS;
/* Gradients that are made together with a backward's sums. */
static const unsigned elementwise_gradients = 1u << DPOST_ADD | 1u << DSLOPE;

/* Takes the tensors of `names` that exist, [from, from + count) along `axis` of those that have it (axis 0: all that
 * have samples; axis 2: big ones). axis -1: whole. */
static void take(const struct work *work, struct arguments *arguments, unsigned names, int axis, int64_t from,
                 int64_t count)
{
    memset(arguments, 0, sizeof *arguments);
    arguments->tensors.struct_bytes = sizeof arguments->tensors;
    for (int name = 0; name < TENSORS; name++) {
        const struct buffer *buffer = work->at[name];
        if (!(names >> name & 1) || !buffer)
            continue;
        normfuse_tensor *part = &arguments->part[name];
        *part = buffer->tensor;
        if ((axis == 0 && buffer->is_sample_wise) || (axis == 2 && buffer->is_big)) {
            memcpy(&arguments->axes[name], &buffer->axes, sizeof buffer->axes);
            arguments->axes[name].shape[axis] = count;
            if (!part->strides) { /* row-major */
                int64_t stride = 1;
                for (int32_t a = part->ndim - 1; a >= 0; a--) {
                    arguments->axes[name].strides[a] = stride;
                    stride *= buffer->axes.shape[a];
                }
            }
            part->shape = arguments->axes[name].shape;
            part->strides = arguments->axes[name].strides;
            part->data = (char *)part->data + from * arguments->axes[name].strides[axis] *
                                                  (ptrdiff_t)reference_type_bytes(buffer->type);
        }
        *member(&arguments->tensors, (enum tensor_name)name) = part;
    }
}

/* Sums or statistics of shards, f64, [shards, sets of values, width]. */
struct shard_values {
    double *values;
    normfuse_tensor tensor;
    normfuse_axes axes;
};

static void describe(const struct work *work, struct shard_values *part, double *values, int64_t shards, int64_t rows,
                     int64_t columns, int64_t width)
{
    int64_t sizes[4];
    int32_t ndim = 0;
    if (shards)
        sizes[ndim++] = shards;
    if (rows != NO_ROWS)
        sizes[ndim++] = rows;
    sizes[ndim++] = columns;
    sizes[ndim++] = width;
    part->values = values;
    part->tensor = normfuse_tensor_contiguous(values, NORMFUSE_F64, ndim, sizes, &part->axes);
    part->tensor.device.device_type = work->line->device;
}

/* One call a shard, merged between. The applying call of shard 0 alone gets what belongs to the whole: the others
 * would write the same. dslope is a shard's: all add to it. */
static normfuse_status call_sharded(struct work *work)
{
    bool backward = work->line->backward;
    int axis = work->set_is_group ? 2 : 0;
    int64_t length = work->line->sizes[axis], cut[SHARDS + 1] = { 0, length / 3, length / 2, length };
    int64_t rows = work->set_is_group ? work->n : NO_ROWS, columns = backward ? work->c : work->groups;
    int64_t width = backward ? 2 : 3, values = (rows == NO_ROWS ? 1 : rows) * columns * width;
    bool adds = work->at[DSLOPE] != NULL;
    double *memory = make_sharded_memory(work, (SHARDS + 1) * values, adds ? 0 : UNWRITTEN);
    if (!memory)
        return NORMFUSE_OUT_OF_MEMORY;
    normfuse_status status = NORMFUSE_OK;
    struct arguments arguments;
    struct shard_values all, merged, shard;
    describe(work, &all, memory, SHARDS, rows, columns, width);
    describe(work, &merged, memory + SHARDS * values, 0, rows, columns, width);
    enum tensor_name carrier = backward ? SUMS : STATS;
    unsigned first = backward ? backward_inputs | elementwise_gradients : 1u << X | pre | 1u << U;
    for (int i = 0; i < SHARDS && status == NORMFUSE_OK; i++) {
        take(work, &arguments, first, axis, cut[i], cut[i + 1] - cut[i]);
        describe(work, &shard, memory + i * values, 0, rows, columns, width);
        *member(&arguments.tensors, carrier) = &shard.tensor;
        status = call_library(work, backward ? BACKWARD_SUMS : STATS_OF, &arguments.tensors, 0, adds);
    }
    normfuse_exec exec = make_exec(work);
    if (status == NORMFUSE_OK)
        status = backward ? normfuse_sums_merge(&all.tensor, &merged.tensor, work->on_device ? &exec : NULL)
                          : normfuse_stats_merge(&all.tensor, &merged.tensor, work->on_device ? &exec : NULL);
    unsigned second = backward ? backward_inputs | 1u << DU | input_gradients : forward_inputs | 1u << Y;
    unsigned whole = backward ? parameter_gradients : running_statistics | 1u << MEAN | 1u << RSTD;
    for (int i = 0; i < SHARDS && status == NORMFUSE_OK; i++) {
        unsigned names = i == 0 ? second | whole : backward ? second : second & ~running_statistics;
        /* x or pre_add may hold u by now: what was written out is what is normalized */
        bool has_u = !backward && work->at[U];
        take(work, &arguments, has_u ? (names & ~pre) | 1u << U : names, axis, cut[i],
             cut[i + 1] - cut[i]);
        if (has_u) {
            arguments.tensors.x = arguments.tensors.u;
            arguments.tensors.u = NULL;
        }
        *member(&arguments.tensors, carrier) = &merged.tensor;
        status = call_library(work, backward ? BACKWARD_APPLY : APPLY, &arguments.tensors, largest_set(work), false);
    }
    return status;
}

/* In parts of the sample quantum. Batch norm accumulates statistics or sums and applies them to the whole; the others
 * accumulate dweight and dbias. */
static normfuse_status call_in_parts(struct work *work)
{
    bool backward = work->line->backward, batch = work->line->op == BATCH_NORM && work->has_statistics;
    int64_t quantum;
    normfuse_status status = normfuse_sample_quantum(&work->buffers[X].tensor, &quantum);
    if (status != NORMFUSE_OK)
        return status;
    int64_t width = backward ? 2 : 3;
    double *memory = make_sharded_memory(work, work->c * width, 0);
    if (!memory)
        return NORMFUSE_OUT_OF_MEMORY;
    struct shard_values total;
    describe(work, &total, memory, 0, NO_ROWS, work->c, width);
    struct arguments arguments;
    enum tensor_name carrier = backward ? SUMS : STATS;
    unsigned first = backward ? backward_inputs | elementwise_gradients : 1u << X | pre | 1u << U;
    if (!batch)
        first = backward_inputs | 1u << DU | input_gradients | elementwise_gradients | parameter_gradients;
    for (int64_t at = 0; at < work->n && status == NORMFUSE_OK;) {
        int64_t count = at ? 2 * quantum : quantum;
        if (count > work->n - at)
            count = work->n - at;
        take(work, &arguments, first, 0, at, count);
        if (batch)
            *member(&arguments.tensors, carrier) = &total.tensor;
        status = call_library(work, !batch ? BACKWARD : backward ? BACKWARD_SUMS : STATS_OF, &arguments.tensors, 0,
                              true);
        at += count;
    }
    if (batch && status == NORMFUSE_OK) {
        unsigned second = backward ? backward_inputs | 1u << DU | input_gradients | parameter_gradients
                                   : forward_inputs | 1u << Y | 1u << MEAN | 1u << RSTD;
        bool has_u = !backward && work->at[U];
        take(work, &arguments, has_u ? (second & ~pre) | 1u << U : second, -1, 0, 0);
        if (has_u) {
            arguments.tensors.x = arguments.tensors.u;
            arguments.tensors.u = NULL;
        }
        *member(&arguments.tensors, carrier) = &total.tensor;
        status = call_library(work, backward ? BACKWARD_APPLY : APPLY, &arguments.tensors, 0, false);
    }
    return status;
}

static normfuse_status call_plain(struct work *work)
{
    struct arguments arguments;
    unsigned names = work->line->backward
                         ? backward_inputs | 1u << DU | input_gradients | elementwise_gradients | parameter_gradients
                         : forward_inputs | forward_outputs;
    take(work, &arguments, names, -1, 0, 0);
    return call_library(work, work->line->backward ? BACKWARD : FORWARD, &arguments.tensors, 0, false);
}

static normfuse_status call_operator(struct work *work)
{
    return work->options->sharded ? call_sharded(work)
           : work->options->accumulate ? call_in_parts(work)
                                       : call_plain(work);
}

/* ---- on the device -------------------------------------------------------------------------------------------- */

/* A counterpart of every buffer, at the same distance from an aligned address, to which the tensors then point. */
static bool make_mirrors(struct work *work)
{
    for (int name = 0; name < TENSORS; name++) {
        struct buffer *buffer = &work->buffers[name];
        if (!buffer->base)
            continue;
        buffer->mirror = device_allocate(buffer->bytes);
        if (!buffer->mirror)
            return false;
        buffer->at = work->image_bytes;
        work->image_bytes += buffer->bytes;
        buffer->tensor.data = buffer->mirror + (buffer->data - buffer->base);
        buffer->tensor.device.device_type = NORMFUSE_CUDA;
    }
    return true;
}

static bool upload_mirrors(const struct work *work)
{
    for (int name = 0; name < TENSORS; name++) {
        const struct buffer *buffer = &work->buffers[name];
        if (buffer->base && !device_send(buffer->mirror, buffer->base, buffer->bytes))
            return false;
    }
    return true;
}

/* All mirrors, then what follows each room and the sync memory: gathered on the device, since each download waits. */
static char *download_image(const struct work *work)
{
    static struct device_room gathered;
    const size_t bytes = work->image_bytes + (work->room_count + 1) * GUARD_BYTES;
    if (gathered.bytes < bytes) {
        device_free(gathered.data);
        gathered = (struct device_room){ device_allocate(bytes), bytes };
        if (!gathered.data)
            gathered.bytes = 0;
    }
    char *image = gathered.data ? malloc(bytes) : NULL;
    if (!image)
        return NULL;
    char *guards = gathered.data + work->image_bytes;
    bool good = true;
    for (int name = 0; name < TENSORS && good; name++) {
        const struct buffer *buffer = &work->buffers[name];
        good = !buffer->base || device_copy(gathered.data + buffer->at, buffer->mirror, buffer->bytes);
    }
    for (size_t i = 0; i < work->room_count && good; i++)
        good = device_copy(guards + i * GUARD_BYTES, work->rooms[i].data + work->rooms[i].bytes, GUARD_BYTES);
    guards += work->room_count * GUARD_BYTES;
    good = good && (work->sync ? device_copy(guards, work->sync + work->sync_bytes, GUARD_BYTES)
                               : device_fill(guards, UNTOUCHED, GUARD_BYTES));
    if (good && device_download(image, gathered.data, bytes))
        return image;
    free(image);
    return NULL;
}

/* The rooms' and the sync memory's ends are as they were. */
static const char *find_changed_room(const struct work *work, const char *image)
{
    for (size_t i = 0; i <= work->room_count; i++)
        if (!is_untouched(image + work->image_bytes + i * GUARD_BYTES, GUARD_BYTES))
            return i < work->room_count ? "scratch or statistics: memory behind them was changed"
                                        : "sync memory: memory behind it was changed";
    return NULL;
}

/* The device's bytes against those that the first run left. */
static const char *find_difference(const struct work *work)
{
    char *now = download_image(work);
    if (!now)
        return "results that cannot be read";
    const char *wrong = find_changed_room(work, now);
    for (int name = 0; name < TENSORS && !wrong; name++) {
        const struct buffer *buffer = &work->buffers[name];
        if (buffer->base && memcmp(now + buffer->at, work->image + buffer->at, buffer->bytes) != 0)
            wrong = tensor_names[name];
    }
    free(now);
    return wrong;
}

/* Runs the calls on fresh tensors and leaves the results in the host's buffers. */
static enum verify_outcome run_on_device(struct work *work)
{
    struct verify_result *result = work->result;
    const struct verify_options *options = work->options;
    if (!options->no_sync) {
        result->status = normfuse_sync_bytes(0, &work->sync_bytes);
        if (result->status != NORMFUSE_OK)
            return conclude_refused(result);
        static char *sync; /* of all problems */
        if (!sync)
            sync = device_allocate(work->sync_bytes + GUARD_BYTES);
        work->sync = sync;
        if (!sync || !device_fill(work->sync, 0, work->sync_bytes) ||
            !device_fill(work->sync + work->sync_bytes, UNTOUCHED, GUARD_BYTES))
            return conclude(result, VERIFY_NO_MEMORY, "%s", device_error());
    }
    if (!make_mirrors(work) || !upload_mirrors(work))
        return conclude(result, VERIFY_NO_MEMORY, "%s", device_error());
    result->status = call_operator(work);
    if (result->status != NORMFUSE_OK)
        return conclude_refused(result);
    if (!device_wait())
        return conclude(result, VERIFY_FAILED, "%s", device_error());
    work->image = download_image(work);
    if (!work->image)
        return conclude(result, VERIFY_FAILED, "the results could not be read: %s", device_error());
    const char *wrong = find_changed_room(work, work->image);
    if (wrong)
        return conclude(result, VERIFY_FAILED, "%s", wrong);
    if (options->twice) {
        work->rooms_used = 0;
        if (!upload_mirrors(work) || call_operator(work) != NORMFUSE_OK || !device_wait())
            return conclude(result, VERIFY_FAILED, "the second run: %s %s", normfuse_last_error(), device_error());
        if ((wrong = find_difference(work)))
            return conclude(result, VERIFY_FAILED, "%s: a second run gives other bits", wrong);
    }
    if (options->graph) {
        work->rooms_used = 0;
        if (!device_record_begin())
            return conclude(result, VERIFY_FAILED, "%s", device_error());
        result->status = call_operator(work);
        struct device_graph *graph = device_record_end();
        if (result->status != NORMFUSE_OK || !graph) {
            device_graph_free(graph);
            return conclude(result, VERIFY_FAILED, "under capture: %s %s", normfuse_last_error(), device_error());
        }
        for (int i = 0; i < 2 && !wrong; i++) {
            if (!upload_mirrors(work) || !device_replay(graph) || !device_wait())
                wrong = device_error();
            else
                wrong = find_difference(work);
        }
        device_graph_free(graph);
        if (wrong)
            return conclude(result, VERIFY_FAILED, "%s: a replayed graph gives other bits", wrong);
    }
    for (int name = 0; name < TENSORS; name++)
        if (work->buffers[name].base)
            memcpy(work->buffers[name].base, work->image + work->buffers[name].at, work->buffers[name].bytes);
    return VERIFY_PASSED;
}

/* ---- comparing ------------------------------------------------------------------------------------------------ */

/* A value that would round past the largest one may be infinite. */
static bool may_overflow(normfuse_type type, double want, double budget)
{
    double largest = tolerance_largest(type);
    return fabs(want) + budget >= largest * (1 + tolerance_unit(type) / 2);
}

static void add_to_hash(struct share *share, int64_t set, int64_t row, enum tensor_name name, int64_t n, int64_t c,
                        int64_t s, double got)
{
    uint64_t bits = 0x7FF8000000000000u;
    if (!isnan(got))
        memcpy(&bits, &got, sizeof bits);
    uint64_t hash = mix(mix(bits + (uint64_t)name) ^ mix(((uint64_t)row * 0x9E3779B97F4A7C15u) ^
                                                         ((uint64_t)c * 0xD1B54A32D192ED03u + (uint64_t)s)));
    share->tally.hash += mix(hash + (uint64_t)n * 0x8CB92BA72F3D8DD7u);
    if (share->work->options->set_hashes && set >= 0)
        share->work->options->set_hashes[set] += hash;
}

/* position -1: the element's number is c; row and hash coordinates as given. */
static void compare(struct share *share, int64_t set, int64_t row, enum tensor_name name, int64_t n, int64_t c,
                    int64_t s, double want, double budget)
{
    struct work *work = share->work;
    struct tally *tally = &share->tally;
    const struct buffer *buffer = work->at[name];
    double got = reference_load(element(buffer, n, c, s), buffer->type);
    if (work->options->hashes)
        add_to_hash(share, set, row, name, n, c, s, got);
    if (work->options->bits_only)
        return;
    tally->compared++;
    double used;
    if (isnan(want))
        used = isnan(got) ? 0 : (double)INFINITY;
    else if (!(budget < (double)INFINITY)) {
        tally->unbounded++;
        used = 0;
    } else if (got == want)
        used = 0;
    else if (isinf(got) && may_overflow(buffer->type, want, budget) && signbit(got) == signbit(want))
        used = 0;
    else if (isinf(want) && fabs(got) >= tolerance_largest(buffer->type) * (1 - tolerance_unit(buffer->type)) &&
             signbit(got) == signbit(want))
        used = 0;
    else
        used = isnan(got) || budget <= 0 ? (double)INFINITY : fabs(got - want) / budget;
    if (!(used <= 1))
        tally->beyond++;
    if (used > tally->budget_used || !tally->tensor) {
        tally->budget_used = used;
        tally->tensor = tensor_names[name];
        tally->got = got;
        tally->want = want;
        if (buffer->is_big)
            snprintf(tally->index, sizeof tally->index, "%lld,%lld,%lld", (long long)n, (long long)c, (long long)s);
        else if (buffer->is_sample_wise)
            snprintf(tally->index, sizeof tally->index, "%lld,%lld", (long long)n, (long long)c);
        else
            snprintf(tally->index, sizeof tally->index, "%lld", (long long)c);
    }
}

/* The same of a value whose error before it is stored is `error`. */
static void compare_stored(struct share *share, int64_t set, int64_t row, enum tensor_name name, int64_t n, int64_t c,
                           int64_t s, double want, double error)
{
    normfuse_type type = share->work->at[name]->type;
    if (error == 0) /* then there is one right element */
        compare(share, set, row, name, n, c, s, reference_round(want, type), 0);
    else
        compare(share, set, row, name, n, c, s, want, tolerance_stored(type, want, error));
}

/* State that the loops over elements share. */
struct view {
    struct extent extent;
    struct reference_set set;
    struct tolerance_arithmetic arithmetic;
    struct tolerance_affine affine; /* of the current pair */
};

/* Loads parameters into the pairs' arrays and sets up the reference. */
static void open_set(struct share *share, int64_t set, struct view *view)
{
    struct work *work = share->work;
    const struct set_record *record = &work->records[set];
    view->extent = extent_of(work, set);
    const struct extent *extent = &view->extent;
    int arrays = work->line->backward ? ARRAYS_BACKWARD : ARRAYS_FORWARD;
    double *pairs = array(share, arrays);
    double *weight = pairs, *bias = pairs + share->pairs, *scale = pairs + 2 * share->pairs,
           *shift = pairs + 3 * share->pairs, *slope = pairs + 4 * share->pairs;
    for (int64_t row = 0; row < extent->rows; row++)
        for (int64_t channel = 0; channel < extent->channels; channel++) {
            int64_t pair = row * extent->channels + channel, n = extent->n + row, c = extent->c + channel;
            slope[pair] = parameter_value(work, SLOPE, n, work->line->one_slope ? 0 : c, work->parameter);
            weight[pair] = parameter_value(work, WEIGHT, n, c, 1);
            bias[pair] = parameter_value(work, BIAS, n, c, 0);
            scale[pair] = parameter_value(work, SCALE, n, c, 0);
            shift[pair] = parameter_value(work, SHIFT, n, c, 0);
        }
    view->set = (struct reference_set){ .rows = extent->rows,
                                        .channels = extent->channels,
                                        .positions = extent->positions,
                                        .activation = work->line->activation,
                                        .parameter = work->parameter,
                                        .u = array(share, 0),
                                        .weight = weight,
                                        .bias = bias,
                                        .scale = scale,
                                        .shift = shift,
                                        .slope = slope,
                                        .mean = record->mean,
                                        .rstd = record->rstd,
                                        .has_statistics = work->has_statistics,
                                        .is_root_mean_square = work->line->statistics == NORMFUSE_MEAN_SQUARE,
                                        .is_clamped = record->is_clamped,
                                        .set_values = (double)(extent->rows * extent->channels * extent->positions) };
    view->arithmetic = arithmetic_of(work, extent);
    view->affine = (struct tolerance_affine){ .mean = record->mean,
                                              .mean_error = record->tolerance.mean,
                                              .gain_error = record->tolerance.rstd,
                                              .has_post_add = work->at[POST_ADD] != NULL };
}

static void open_pair(struct view *view, int64_t pair)
{
    const struct reference_set *set = &view->set;
    view->affine.gain = set->rstd * set->weight[pair] * (1 + set->scale[pair]);
    view->affine.offset = set->bias[pair] * (1 + set->scale[pair]) + set->shift[pair];
    view->affine.offset_parts = fabs(set->bias[pair] * (1 + set->scale[pair])) + fabs(set->shift[pair]);
}

static double z_error(const struct view *view, int64_t index, double z)
{
    if (view->set.y)
        return 0;
    double z0 = view->set.post_add ? z - view->set.post_add[index] : z;
    return tolerance_z(&view->arithmetic, &view->affine, view->set.u[index] - view->set.mean, z0, z);
}

static bool compare_forward(struct share *share, int64_t set)
{
    struct work *work = share->work;
    struct view view;
    open_set(share, set, &view);
    const struct extent *extent = &view.extent;
    double *u = array(share, 0), *post_add = array(share, 1);
    load_u(work, extent, u, post_add);
    if (work->at[U])
        for (int64_t row = 0; row < extent->rows; row++)
            for (int64_t channel = 0; channel < extent->channels; channel++)
                for (int64_t s = 0; s < extent->positions; s++)
                    compare(share, set, row, U, extent->n + row, extent->c + channel, extent->s + s,
                            u[(row * extent->channels + channel) * extent->positions + s], 0);
    const struct set_record *record = &work->records[set];
    int64_t count = extent->rows * extent->channels * extent->positions;
    if (work->at[RSTD] && count) {
        int64_t n = work->set_is_group ? extent->n : 0, column = statistic_column(work, set);
        if (work->at[MEAN])
            compare_stored(share, set, 0, MEAN, n, column, 0, record->mean, record->tolerance.mean);
        compare_stored(share, set, 0, RSTD, n, column, 0, record->rstd,
                       fabs(record->rstd) * record->tolerance.rstd);
    }
    if (!work->at[Y])
        return true;
    if (work->at[POST_ADD]) {
        load_set(work, POST_ADD, extent, post_add);
        view.set.post_add = post_add;
    }
    for (int64_t row = 0; row < extent->rows; row++)
        for (int64_t channel = 0; channel < extent->channels; channel++) {
            int64_t pair = row * extent->channels + channel;
            open_pair(&view, pair);
            for (int64_t s = 0; s < extent->positions; s++) {
                double want = 0, error = 0;
                if (!work->options->bits_only) {
                    double z = reference_z(&view.set, row, channel, s);
                    want = reference_activation(work->line->activation, view.set.slope[pair], z);
                    error = tolerance_activation(&view.arithmetic, work->line->activation, view.set.slope[pair], z,
                                                 want, z_error(&view, pair * extent->positions + s, z));
                }
                compare_stored(share, set, row, Y, extent->n + row, extent->c + channel, extent->s + s, want, error);
            }
        }
    return true;
}

static bool compare_backward(struct share *share, int64_t set)
{
    struct work *work = share->work;
    const int32_t activation = work->line->activation;
    struct view view;
    open_set(share, set, &view);
    const struct extent *extent = &view.extent;
    struct reference_set *reference = &view.set;
    double *u = array(share, 0), *dy = array(share, 1), *post_add = array(share, 2), *dz = array(share, 3);
    double *dz_error = array(share, 4), *dx = array(share, 5);
    double *pairs = array(share, ARRAYS_BACKWARD) + PAIR_INPUTS * share->pairs;
    double *dweight = pairs, *dbias = pairs + share->pairs, *dscale = pairs + 2 * share->pairs,
           *dshift = pairs + 3 * share->pairs, *sum_error = pairs + 4 * share->pairs,
           *centred_error = pairs + 5 * share->pairs, *sum_size = pairs + 6 * share->pairs,
           *centred_size = pairs + 7 * share->pairs, *dslope = pairs + 8 * share->pairs,
           *slope_size = pairs + 9 * share->pairs, *slope_sum_error = pairs + 10 * share->pairs;
    double unit = view.arithmetic.unit;
    load_u(work, extent, u, dy);
    load_set(work, DY, extent, dy);
    reference->dy = dy;
    if (work->at[POST_ADD]) {
        load_set(work, POST_ADD, extent, post_add);
        reference->post_add = post_add;
    } else if (work->at[Y]) {
        load_set(work, Y, extent, post_add);
        reference->y = post_add;
    }
    struct reference_gradients gradients = { dz, NULL, dweight, dbias, NULL, dshift, NULL };
    if (!work->options->bits_only) {
        gradients.dx = work->at[DX] ? dx : NULL;
        gradients.dscale = work->at[DSCALE] ? dscale : NULL;
        gradients.dslope = work->at[DSLOPE] ? dslope : NULL;
        reference_backward(reference, &gradients);
    }
    double gain_sum_error = 0, gain_centred_error = 0, mean_dz = 0, mean_dz_normalized = 0;
    /* a chunk's sums, the product of dy and the slope, and the centring of u */
    double growth = tolerance_growth(view.arithmetic.additions + 3 + view.arithmetic.gradient_roundings, unit) + view.arithmetic.joins * double_unit;
    double parameter_growth = tolerance_growth(view.arithmetic.parameter_additions + 3 + view.arithmetic.gradient_roundings, unit) +
                              view.arithmetic.parameter_joins * double_unit;
    double shift_error = view.arithmetic.shift_unit * fabs(reference->mean);
    const double coefficients = view.arithmetic.coefficient_roundings * unit;
    for (int64_t row = 0; row < extent->rows && !work->options->bits_only; row++)
        for (int64_t channel = 0; channel < extent->channels; channel++) {
            int64_t pair = row * extent->channels + channel;
            open_pair(&view, pair);
            double size = 0, size_centred = 0, error = 0, error_centred = 0, size_slope = 0, error_slope = 0;
            for (int64_t s = 0; s < extent->positions; s++) {
                int64_t index = pair * extent->positions + s;
                double slope_error = 0;
                if (activation != NORMFUSE_IDENTITY) {
                    double z = reference_z(reference, row, channel, s);
                    double of_z = z_error(&view, index, z);
                    slope_error =
                        tolerance_slope(&view.arithmetic, activation, reference->slope[pair], z, of_z) *
                            fabs(dy[index]) +
                        unit * fabs(dz[index]) + view.arithmetic.tiny;
                    size_slope += z > 0 ? 0 : fabs(dy[index] * z);
                    error_slope += (z > of_z ? 0 : of_z * fabs(dy[index])) + view.arithmetic.tiny;
                }
                dz_error[index] = slope_error;
                double shifted = tolerance_shifted(&view.arithmetic, &view.affine, u[index] - reference->mean);
                size += fabs(dz[index]);
                size_centred += fabs(dz[index]) * shifted;
                error += slope_error;
                error_centred += slope_error * shifted;
            }
            sum_size[pair] = size;
            centred_size[pair] = size_centred;
            sum_error[pair] = 1.01 * (parameter_growth * size + error);
            centred_error[pair] = 1.01 * (parameter_growth * size_centred + error_centred) + shift_error * sum_error[pair];
            slope_size[pair] = size_slope;
            slope_sum_error[pair] = 1.01 * (parameter_growth * size_slope + error_slope);
            const double of_group = 1.01 * (growth * size + error);
            double factor = fabs(1 + reference->scale[pair]), weight = reference->weight[pair];
            gain_sum_error += factor * fabs(weight) * of_group;
            gain_centred_error += factor * fabs(weight) *
                                  (1.01 * (growth * size_centred + error_centred) + shift_error * of_group);
            mean_dz += dbias[pair] * weight;
            mean_dz_normalized += dweight[pair] * weight;
        }
    if (reference->is_clamped)
        mean_dz_normalized = gain_centred_error = 0;
    if (reference->is_root_mean_square)
        mean_dz = gain_sum_error = 0;
    /* dx = gain*dz + q*(u - k) + r */
    double rstd = reference->rstd, q = 0, r = 0, q_error = 0, r_error = 0;
    if (work->has_statistics) {
        double count = reference->set_values;
        double centred_mean_error = rstd * gain_centred_error / count;
        q = rstd * rstd * fabs(mean_dz_normalized) / count;
        q_error = rstd * rstd * centred_mean_error + coefficients * q;
        r = rstd * fabs(mean_dz) / count + shift_error * q;
        r_error = rstd * gain_sum_error / count + shift_error * rstd * rstd * centred_mean_error + coefficients * r;
    }
    double *du = post_add; /* done with */
    if (work->at[DPOST_ADD] || work->at[DX]) {
        if (work->at[DU])
            load_set(work, DU, extent, du);
        for (int64_t row = 0; row < extent->rows; row++)
            for (int64_t channel = 0; channel < extent->channels; channel++) {
                int64_t pair = row * extent->channels + channel, n = extent->n + row, c = extent->c + channel;
                open_pair(&view, pair);
                double gain = fabs(view.affine.gain);
                for (int64_t s = 0; s < extent->positions; s++) {
                    int64_t index = pair * extent->positions + s;
                    if (work->at[DPOST_ADD])
                        compare_stored(share, set, row, DPOST_ADD, n, c, extent->s + s, dz[index], dz_error[index]);
                    if (!work->at[DX])
                        continue;
                    double shifted = tolerance_shifted(&view.arithmetic, &view.affine, u[index] - reference->mean);
                    double parts = gain * fabs(dz[index]) + shifted * q + r;
                    double error = gain * (dz_error[index] + coefficients * fabs(dz[index])) + shifted * (q_error + 2 * unit * q) +
                                   r_error + unit * (shifted * q + r) + unit * fabs(dx[index]);
                    if (view.arithmetic.is_double)
                        error += 16 * unit * parts;
                    double want = dx[index];
                    if (work->at[DU]) {
                        want += du[index];
                        error += unit * fabs(want);
                    }
                    error = 1.01 * error + view.arithmetic.tiny * (4 + shifted + fabs(dz[index]));
                    compare_stored(share, set, row, DX, n, c, extent->s + s, want, error);
                }
            }
    }
    /* of sums over all samples: in double, and in a thread that goes on from one to the next */
    double samples = (double)(work->n * work->group_sets) * double_unit;
    if (work->set_is_group && (!work->set_is_position || work->on_device)) {
        const int64_t positions = work->set_is_position ? 1 : work->s, rows = work->n * work->group_sets;
        bool columns = work->line->channels_last || positions == 1;
        samples += tolerance_growth(tolerance_sample_additions(&view.arithmetic, columns, rows, positions), unit);
    }
    for (int64_t pair = 0; pair < extent->rows * extent->channels; pair++) {
        int64_t n = extent->n + pair / extent->channels, c = extent->c + pair % extent->channels;
        double factor = fabs(1 + reference->scale[pair]), weight = fabs(reference->weight[pair]);
        double bias = fabs(reference->bias[pair]);
        double noise = 16 * double_unit;
        double dweight_error = factor * rstd * (centred_error[pair] + noise * centred_size[pair]);
        double dbias_error = factor * (sum_error[pair] + noise * sum_size[pair]);
        const double dscale_error = weight * rstd * (centred_error[pair] + noise * centred_size[pair]) +
                                    bias * (sum_error[pair] + noise * sum_size[pair]);
        int64_t at = work->set_is_group ? n * work->c + c : c;
        if (work->set_is_position) { /* sums over positions: compare_sample_gradients */
            if (work->at[DSCALE])
                work->dscale[at] += dscale[pair], work->dscale_error[at] += dscale_error;
            work->dshift[at] += dshift[pair];
            work->dshift_error[at] += sum_error[pair];
        } else {
            if (work->at[DSCALE])
                compare_stored(share, set, 0, DSCALE, n, c, 0, dscale[pair], dscale_error);
            if (work->at[DSHIFT])
                compare_stored(share, set, 0, DSHIFT, n, c, 0, dshift[pair], sum_error[pair]);
        }
        if (work->at[DSLOPE])
            work->dslope[at] += dslope[pair];
        /* one slope has the sums of all channels, in double */
        work->dslope_error[at] += slope_sum_error[pair] + (noise + samples + (double)work->c * double_unit) * slope_size[pair];
        if (work->line->op == AFFINE && work->line->per_sample) {
            if (work->at[DWEIGHT])
                compare_stored(share, set, 0, DWEIGHT, n, c, 0, dweight[pair], dweight_error);
            if (work->at[DBIAS])
                compare_stored(share, set, 0, DBIAS, n, c, 0, dbias[pair], dbias_error);
            continue;
        }
        work->dweight[at] += dweight[pair];
        work->dbias[at] += dbias[pair];
        work->dweight_error[at] += dweight_error + samples * factor * rstd * centred_size[pair];
        work->dbias_error[at] += dbias_error + samples * factor * sum_size[pair];
    }
    return true;
}

/* dscale and dshift where a sample's channel is of many sets. */
static void compare_sample_gradients(struct share *share)
{
    struct work *work = share->work;
    for (int64_t at = 0; at < work->n * work->c; at++) {
        if (work->at[DSCALE])
            compare_stored(share, -1, 0, DSCALE, at / work->c, at % work->c, 0, work->dscale[at], work->dscale_error[at]);
        if (work->at[DSHIFT])
            compare_stored(share, -1, 0, DSHIFT, at / work->c, at % work->c, 0, work->dshift[at], work->dshift_error[at]);
    }
}

/* dweight and dbias of whole channels. */
static void compare_channel_gradients(struct share *share)
{
    struct work *work = share->work;
    if (work->line->op == AFFINE && work->line->per_sample)
        return;
    for (int64_t c = 0; c < work->c; c++) {
        long double dweight = 0, dbias = 0;
        double dweight_error = 0, dbias_error = 0;
        for (int64_t n = 0; n < (work->set_is_group ? work->n : 1); n++) {
            dweight += work->dweight[n * work->c + c];
            dbias += work->dbias[n * work->c + c];
            dweight_error += work->dweight_error[n * work->c + c];
            dbias_error += work->dbias_error[n * work->c + c];
        }
        if (work->at[DWEIGHT])
            compare_stored(share, -1, 0, DWEIGHT, 0, c, 0, (double)dweight, dweight_error);
        if (work->at[DBIAS])
            compare_stored(share, -1, 0, DBIAS, 0, c, 0, (double)dbias, dbias_error);
    }
}

static void compare_slopes(struct share *share)
{
    struct work *work = share->work;
    int64_t rows = work->set_is_group ? work->n : 1, channels = work->line->one_slope ? work->c : 1;
    for (int64_t c = 0; c < (work->line->one_slope ? 1 : work->c); c++) {
        long double dslope = 0;
        double error = 0;
        for (int64_t n = 0; n < rows; n++)
            for (int64_t i = c; i < c + channels; i++) {
                dslope += work->dslope[n * work->c + i];
                error += work->dslope_error[n * work->c + i];
            }
        compare_stored(share, -1, 0, DSLOPE, 0, c, 0, (double)dslope, error);
    }
}

/* dpre_bias: the sum of dx as it was written. */
static void compare_sum_of_dx(struct share *share)
{
    struct work *work = share->work;
    const struct buffer *dx = work->at[DX];
    const bool by_sample = work->line->sample_bias;
    const struct extent extent = { 0, 0, 0, by_sample ? 1 : work->n, 1, work->s };
    const struct tolerance_arithmetic arithmetic = arithmetic_of_channels(work, &extent);
    const double growth = tolerance_growth(arithmetic.additions + arithmetic.gradient_roundings, arithmetic.unit) +
                          (arithmetic.joins + (double)work->n) * double_unit;
    for (int64_t pair = 0; pair < (by_sample ? work->n : 1) * work->c; pair++) {
        const int64_t c = pair % work->c;
        long double sum = 0;
        double size = 0;
        for (int64_t row = 0; row < extent.rows; row++)
            for (int64_t s = 0; s < work->s; s++) {
                const double value = reference_load(element(dx, pair / work->c + row, c, s), dx->type);
                sum += value;
                size += fabs(value);
            }
        compare_stored(share, -1, 0, DPRE_BIAS, pair / work->c, c, 0, (double)sum, 1.01 * growth * size);
    }
}

/* Running statistics: batch norm's channel, or the mean over the samples of instance norm's. */
static void compare_running(struct share *share)
{
    struct work *work = share->work;
    double momentum = work->options->cumulative ? 1 / (double)(batches_seen + 1) : running_momentum;
    int64_t samples = work->set_is_group ? work->n : 1;
    for (int64_t c = 0; c < work->c; c++) {
        long double mean = 0, variance = 0;
        double mean_error = 0, variance_error = 0, mean_size = 0;
        for (int64_t n = 0; n < samples; n++) {
            const struct set_record *record = &work->records[work->set_is_group ? n * work->groups + c : c];
            double divisor = record->statistics.count - 1;
            mean += record->statistics.mean;
            mean_size += fabs(record->statistics.mean);
            variance += record->statistics.m2 / divisor;
            mean_error += record->tolerance.mean;
            variance_error += record->tolerance.m2 / divisor;
        }
        double new_mean = (double)(mean / samples), new_variance = (double)(variance / samples);
        mean_error = (mean_error + (double)samples * double_unit * mean_size) / (double)samples;
        variance_error = variance_error / (double)samples + (double)samples * double_unit * new_variance;
        struct {
            enum tensor_name name;
            double value, error;
        } both[] = { { RUNNING_MEAN, new_mean, mean_error }, { RUNNING_VAR, new_variance, variance_error } };
        for (int i = 0; i < 2; i++) {
            const struct sample sample = sample_of(work, both[i].name, 0);
            double old = reference_round(generated(work, &sample, c, 0), work->at[both[i].name]->type);
            double want = reference_running(old, both[i].value, momentum);
            double unit = work->line->type == NORMFUSE_F64 ? double_unit : 0x1p-24;
            double steps = 4 * unit * ((1 - momentum) * fabs(old) + momentum * fabs(both[i].value));
            compare_stored(share, -1, 0, both[i].name, 0, c, 0, want, momentum * both[i].error + steps);
        }
    }
}

/* ---- memory around tensors ------------------------------------------------------------------------------------ */

/* True if a call writes into a buffer, or may: running statistics. */
static bool is_written(const struct work *work, int name)
{
    const struct buffer *buffer = &work->buffers[name];
    return buffer->is_output || buffer->overwritten ||
           ((name == RUNNING_MEAN || name == RUNNING_VAR) && work->options->running);
}

static void sum_inputs(struct work *work)
{
    for (int name = 0; name < TENSORS; name++)
        if (work->buffers[name].base && !is_written(work, name))
            work->buffers[name].sum = sum_of(&work->buffers[name]);
}

/* The name of a tensor whose surroundings, or which itself though an input, were changed; NULL when all is well.
 * Destroys the tensors. */
static const char *find_changed(struct work *work)
{
    for (int name = 0; name < TENSORS; name++) {
        struct buffer *buffer = &work->buffers[name];
        if (!buffer->base)
            continue;
        if (!is_written(work, name)) {
            if (sum_of(buffer) != buffer->sum)
                return tensor_names[name];
            continue;
        }
        fill_bytes(buffer, UNTOUCHED);
        if (!is_untouched(buffer->base, buffer->bytes))
            return tensor_names[name];
    }
    if (work->scratch && !is_untouched(work->scratch + work->scratch_bytes, GUARD_BYTES))
        return "scratch";
    return NULL;
}

/* ---- on the CPU ----------------------------------------------------------------------------------------------- */

/* Makes the call, and with +twice once more on fresh tensors, in one thread where it had several and in three where it
 * had one. */
static enum verify_outcome run_on_cpu(struct work *work)
{
    enum { OTHER_THREADS = 3 };
    struct verify_result *result = work->result;
    result->status = call_operator(work);
    if (result->status != NORMFUSE_OK)
        return conclude_refused(result);
    if (!work->options->twice)
        return VERIFY_PASSED;
    for (int name = 0; name < TENSORS; name++) {
        struct buffer *buffer = &work->buffers[name];
        if (!buffer->base || !is_written(work, name))
            continue;
        buffer->sum = sum_of(buffer);
        if (buffer->is_output)
            clear_output(work, (enum tensor_name)name);
        else
            fill_generated(work, (enum tensor_name)name);
    }
    work->threads = work->options->threads == 1 ? OTHER_THREADS : 1;
    result->status = call_operator(work);
    if (result->status != NORMFUSE_OK)
        return conclude_refused(result);
    for (int name = 0; name < TENSORS; name++) {
        const struct buffer *buffer = &work->buffers[name];
        if (buffer->base && is_written(work, name) && sum_of(buffer) != buffer->sum)
            return conclude(result, VERIFY_FAILED, "%s: a second run, threads=%d, gives other bits", tensor_names[name],
                            (int)work->threads);
    }
    return VERIFY_PASSED;
}

/* ---- the whole ------------------------------------------------------------------------------------------------ */

static const char *impossible(const struct problem_line *line, const struct verify_options *options)
{
    bool grouped = line->op == GROUP_NORM || line->op == INSTANCE_NORM;
    bool evaluates = line->evaluate || options->evaluate;
    if (line->device == NORMFUSE_CPU && (options->no_sync || options->graph))
        return "+no_sync and +graph need device=cuda";
    if (options->resum && !(line->backward && line->write_u))
        return "+resum is of a backward with +u";
    if (options->from_y && !(line->backward && line->post_add))
        return "+from_y is of a backward with +post_add";
    if (!line->backward && (options->left_out & VERIFY_Y) && (line->op == AFFINE || evaluates))
        return "+no_y leaves nothing to write";
    if (options->evaluate && line->op != INSTANCE_NORM)
        return "+evaluate is instance norm's";
    if (options->running && (line->backward || evaluates || (line->op != INSTANCE_NORM && line->op != BATCH_NORM)))
        return "+running is a training forward's of batch and instance norm";
    if (options->cumulative && !options->running)
        return "+cumulative needs +running";
    if (options->in_place && (problem_line_is_mixed(line) || options->expanded || problem_line_y_type(line) != line->type))
        return "+inplace needs one layout and one dtype, and no sample that is every one's";
    if (options->sharded && (line->op == AFFINE || line->op == CHANNEL_NORM || evaluates || (grouped && line->ndim < 3)))
        return "+sharded is of statistics, and of group norm with a spatial axis";
    if (options->accumulate && !line->backward && (line->op != BATCH_NORM || evaluates))
        return "+accumulate is backward's, and batch norm's in training";
    if (options->accumulate && (line->per_sample || options->sharded))
        return "+accumulate goes with neither per=sample nor +sharded";
    return NULL;
}

int64_t verify_sets(const struct problem_line *line)
{
    bool grouped = line->op == GROUP_NORM || line->op == INSTANCE_NORM;
    int64_t positions = 1;
    for (int32_t axis = 2; axis < line->ndim; axis++)
        positions *= line->sizes[axis];
    if (line->op == CHANNEL_NORM)
        return line->sizes[0] * line->groups * positions;
    return grouped ? line->sizes[0] * line->groups : line->sizes[1];
}

static enum verify_outcome verify_work(struct work *work)
{
    struct verify_result *result = work->result;
    const struct verify_options *options = work->options;
    bool backward = work->line->backward;
    work->records = calloc((size_t)work->sets + 1, sizeof *work->records);
    if (!work->records || !make_tensors(work))
        return conclude(result, VERIFY_NO_MEMORY, "no memory for the tensors");
    if (backward) {
        int64_t entries = work->set_is_group ? work->n * work->c : work->c;
        work->dweight = calloc((size_t)(10 * entries) + 1, sizeof(double));
        if (!work->dweight)
            return conclude(result, VERIFY_NO_MEMORY, "no memory for the gradients");
        work->dweight_error = work->dweight + entries;
        work->dbias = work->dweight_error + entries;
        work->dbias_error = work->dbias + entries;
        work->dslope = work->dbias_error + entries;
        work->dslope_error = work->dslope + entries;
        work->dscale = work->dslope_error + entries;
        work->dscale_error = work->dscale + entries;
        work->dshift = work->dscale_error + entries;
        work->dshift_error = work->dshift + entries;
    }
    if ((backward || !options->bits_only) && !for_each_set(work, make_statistics, NULL))
        return conclude(result, VERIFY_NO_MEMORY, "no memory for the reference");
    sum_inputs(work);
    enum verify_outcome outcome = work->on_device ? run_on_device(work) : run_on_cpu(work);
    if (outcome != VERIFY_PASSED)
        return outcome;
    struct share last = { .work = work };
    if (!for_each_set(work, backward ? compare_backward : compare_forward, &last.tally))
        return conclude(result, VERIFY_NO_MEMORY, "no memory for the reference");
    if (backward)
        compare_channel_gradients(&last);
    if (backward && work->set_is_position)
        compare_sample_gradients(&last);
    if (work->at[DPRE_BIAS])
        compare_sum_of_dx(&last);
    if (work->at[DSLOPE])
        compare_slopes(&last);
    if (options->running && work->n * work->s > 0)
        compare_running(&last);
    const struct tally *tally = &last.tally;
    result->budget_used = tally->budget_used;
    result->got = tally->got;
    result->want = tally->want;
    result->compared = tally->compared;
    result->beyond = tally->beyond;
    result->unbounded = tally->unbounded;
    result->hash = tally->hash;
    snprintf(result->tensor, sizeof result->tensor, "%s", tally->tensor ? tally->tensor : "");
    snprintf(result->index, sizeof result->index, "%s", tally->index);
    const char *changed = find_changed(work);
    if (changed)
        return conclude(result, VERIFY_FAILED, "%s: memory that is not an output was changed", changed);
    if (tally->beyond)
        return conclude(result, VERIFY_FAILED, "%s[%s] got %.9g want %.9g budget used %.3g %%", result->tensor,
                        result->index, tally->got, tally->want, 100 * tally->budget_used);
    return result->outcome = VERIFY_PASSED;
}

enum verify_outcome verify_problem(const struct problem_line *line, const struct verify_options *options,
                                   struct verify_result *result)
{
    *result = (struct verify_result){ .status = NORMFUSE_OK };
    const char *reason = impossible(line, options);
    if (reason)
        return conclude(result, VERIFY_IMPOSSIBLE, "%s", reason);
    struct work work = { .line = line, .options = options, .result = result, .n = line->sizes[0], .c = line->sizes[1] };
    work.on_device = line->device == NORMFUSE_CUDA;
    if (work.on_device) {
        result->status = normfuse_prepare(0);
        if (result->status != NORMFUSE_OK)
            return conclude_refused(result);
        if (!device_open()) {
            result->status = NORMFUSE_DEVICE_ERROR;
            return conclude(result, VERIFY_REFUSED, "%s", device_error());
        }
        char name[512];
        const int length = (int)problem_line_name(line, name, sizeof name);
        verify_options_name(options, name + length, sizeof name - (size_t)length);
        device_name_work(name);
    }
    work.s = 1;
    for (int32_t axis = 2; axis < line->ndim; axis++)
        work.s *= line->sizes[axis];
    work.set_is_position = line->op == CHANNEL_NORM;
    work.set_is_group = line->op == GROUP_NORM || line->op == INSTANCE_NORM || work.set_is_position;
    work.group_sets = work.set_is_position ? work.s : 1;
    work.groups = work.set_is_group ? line->groups : work.c;
    if (work.groups < 1 && work.c > 0)
        return conclude(result, VERIFY_IMPOSSIBLE, "groups is missing");
    work.group_channels = work.set_is_group && work.groups ? work.c / work.groups : 1;
    work.sets = verify_sets(line);
    work.evaluates = line->evaluate || options->evaluate;
    work.threads = options->threads;
    work.gives_u = line->backward && line->write_u && !options->resum;
    work.has_statistics = line->op != AFFINE && !work.evaluates;
    work.parameter = line->has_act_param ? line->act_param : reference_default_parameter(line->activation);
    if (line->type != NORMFUSE_F64)
        work.parameter = (double)(float)work.parameter;
    if (options->set_hashes)
        memset(options->set_hashes, 0, (size_t)work.sets * sizeof *options->set_hashes);
    enum verify_outcome outcome = verify_work(&work);
    free_buffers(&work);
    return outcome;
}

/* ---- words ---------------------------------------------------------------------------------------------------- */

static const struct {
    const char *word;
    size_t offset;
} flag_words[] = {
    { "+resum", offsetof(struct verify_options, resum) },
    { "+from_y", offsetof(struct verify_options, from_y) },
    { "+no_weight", offsetof(struct verify_options, no_weight) },
    { "+no_bias", offsetof(struct verify_options, no_bias) },
    { "+inplace", offsetof(struct verify_options, in_place) },
    { "+slice_c", offsetof(struct verify_options, slice_channels) },
    { "+slice_n", offsetof(struct verify_options, slice_batch) },
    { "+expanded", offsetof(struct verify_options, expanded) },
    { "+misaligned", offsetof(struct verify_options, misaligned) },
    { "+strided", offsetof(struct verify_options, strided_parameters) },
    { "+f64_mean", offsetof(struct verify_options, f64_mean) },
    { "+running", offsetof(struct verify_options, running) },
    { "+cumulative", offsetof(struct verify_options, cumulative) },
    { "+evaluate", offsetof(struct verify_options, evaluate) },
    { "+scratch", offsetof(struct verify_options, own_scratch) },
    { "+sharded", offsetof(struct verify_options, sharded) },
    { "+accumulate", offsetof(struct verify_options, accumulate) },
    { "+no_sync", offsetof(struct verify_options, no_sync) },
    { "+twice", offsetof(struct verify_options, twice) },
    { "+graph", offsetof(struct verify_options, graph) },
};

static const struct {
    const char *word;
    unsigned bit;
} output_words[] = {
    { "+no_y", VERIFY_Y },           { "+no_saved", VERIFY_SAVED },   { "+no_dx", VERIFY_DX },
    { "+no_dweight", VERIFY_DWEIGHT }, { "+no_dbias", VERIFY_DBIAS }, { "+no_dscale", VERIFY_DSCALE },
    { "+no_dshift", VERIFY_DSHIFT }, { "+no_dpost_add", VERIFY_DPOST_ADD }, { "+no_dpre_bias", VERIFY_DPRE_BIAS },
    { "+no_dslope", VERIFY_DSLOPE },
};

static const char *const data_words[] = { "random", "large_mean", "constant", "exact", "nan", "inf", "huge", "tiny",
                                          "wide" };

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

bool verify_option(struct verify_options *options, const char *word)
{
    for (size_t i = 0; i < COUNT(flag_words); i++)
        if (strcmp(word, flag_words[i].word) == 0) {
            *(bool *)((char *)options + flag_words[i].offset) = true;
            return true;
        }
    for (size_t i = 0; i < COUNT(output_words); i++)
        if (strcmp(word, output_words[i].word) == 0) {
            options->left_out |= output_words[i].bit;
            return true;
        }
    char *end;
    if (strncmp(word, "+data=", 6) == 0) {
        for (size_t i = 0; i < COUNT(data_words); i++)
            if (strcmp(word + 6, data_words[i]) == 0) {
                options->data = (enum verify_data)i;
                return true;
            }
        return false;
    }
    if (strncmp(word, "+seed=", 6) == 0) {
        options->seed = strtoull(word + 6, &end, 10);
        return word[6] && !*end;
    }
    if (strncmp(word, "+threads=", 9) == 0) {
        options->threads = (int32_t)strtol(word + 9, &end, 10);
        return word[9] && !*end;
    }
    return false;
}

void verify_options_name(const struct verify_options *options, char *name, size_t bytes)
{
    size_t length = 0;
    if (bytes)
        name[0] = 0;
#define APPEND(...)                                                                                                    \
    do {                                                                                                               \
        int more = snprintf(length < bytes ? name + length : NULL, length < bytes ? bytes - length : 0, __VA_ARGS__);  \
        length += more > 0 ? (size_t)more : 0;                                                                         \
    } while (0)
    for (size_t i = 0; i < COUNT(flag_words); i++)
        if (*(const bool *)((const char *)options + flag_words[i].offset))
            APPEND(" %s", flag_words[i].word);
    for (size_t i = 0; i < COUNT(output_words); i++)
        if (options->left_out & output_words[i].bit)
            APPEND(" %s", output_words[i].word);
    if (options->data != VERIFY_RANDOM)
        APPEND(" +data=%s", data_words[options->data]);
    if (options->threads)
        APPEND(" +threads=%d", (int)options->threads);
    if (options->seed)
        APPEND(" +seed=%llu", (unsigned long long)options->seed);
#undef APPEND
}
