/* SPDX-License-Identifier: MIT
 *
 * bench_problem.c - the tensors of a timed problem and its call; see bench.h. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "bench.h"
#include "device.h"
#include "numbers.h"
#include "operator_call.h"
#include "report.h"

/* A table of normal deviates, walked in a scrambled order: quick to make. */
void bench_make_table(normfuse_type type, double *table)
{
    uint64_t state = 1;
    for (int i = 0; i < BENCH_TABLE_VALUES; i++) {
        double sum = 0;
        for (int j = 0; j < 12; j++) {
            state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
            sum += (double)(state >> 11) * 0x1p-53;
        }
        number_store(table, type, i, sum - 6);
    }
}

void bench_fill(void *context, size_t begin, size_t end)
{
    const struct bench_filling *filling = context;
    size_t item = number_bytes(filling->type);
    for (size_t at = begin; at < end; at += item) {
        uint64_t hash = (at / item + filling->salt) * UINT64_C(0x9e3779b97f4a7c15);
        memcpy(filling->out + at, (const char *)filling->table + (hash >> 52) * item, item);
    }
}

bool bench_is_training(const struct problem_line *line)
{
    return line->op != AFFINE && !line->evaluate;
}

static void *allocate(size_t bytes)
{
    size_t rounded = (bytes + 64) / 64 * 64;
    void *data = aligned_alloc(64, rounded);
    if (!data)
        report_failure("memory", "%s", strerror(errno));
    memset(data, 0, rounded);
    return data;
}

static const normfuse_tensor *make_small(struct bench *bench, enum bench_small id, normfuse_type type, int32_t ndim,
                                         const int64_t *sizes, double value, double spread)
{
    int64_t elements = ndim == 2 ? sizes[0] * sizes[1] : sizes[0];
    bench->small_bytes[id] = (size_t)elements * number_bytes(type);
    bench->small_data[id] = allocate(bench->small_bytes[id]);
    for (int64_t i = 0; i < elements; i++)
        number_store(bench->small_data[id], type, i, value + spread * (double)(i % 7 - 3));
    bench->smalls[id] = normfuse_tensor_contiguous(bench->small_data[id], type, ndim, sizes, &bench->small_axes[id]);
    return &bench->smalls[id];
}

void bench_make_smalls(struct bench *bench)
{
    const struct problem_line *line = &bench->line;
    normfuse_tensors *tensors = &bench->tensors;
    const int64_t *sizes = line->sizes;
    bool by_sample = line->op == AFFINE && line->per_sample;
    int32_t ndim = by_sample ? 2 : 1;
    const int64_t *shape = by_sample ? sizes : sizes + 1;
    tensors->weight = make_small(bench, BENCH_WEIGHT, line->weight_type, ndim, shape, 1, 0.0625);
    tensors->bias = make_small(bench, BENCH_BIAS, line->weight_type, ndim, shape, 0, 0.0625);
    if (line->scale_shift) {
        tensors->scale = make_small(bench, BENCH_SCALE, line->weight_type, 2, sizes, 0, 0.0625);
        tensors->shift = make_small(bench, BENCH_SHIFT, line->weight_type, 2, sizes, 0, 0.0625);
    }
    if (line->pre_bias || line->sample_bias) {
        int32_t bias_ndim = line->sample_bias ? 2 : 1;
        const int64_t *bias_shape = line->sample_bias ? sizes : sizes + 1;
        if (!(line->backward && line->write_u))
            tensors->pre_bias = make_small(bench, BENCH_PRE_BIAS, line->weight_type, bias_ndim, bias_shape, 0, 0.0625);
        if (line->backward)
            tensors->dpre_bias = make_small(bench, BENCH_DPRE_BIAS, line->weight_type, bias_ndim, bias_shape, 0, 0);
    }
    if (line->activation == NORMFUSE_PRELU) {
        const int64_t slopes = line->one_slope ? 1 : sizes[1];
        tensors->slope = make_small(bench, BENCH_SLOPE, line->weight_type, 1, &slopes, 0.25, 0.0625);
        if (line->backward)
            tensors->dslope = make_small(bench, BENCH_DSLOPE, line->weight_type, 1, &slopes, 0, 0);
    }
    if (bench_is_training(line)) {
        int64_t statistics[2] = {sizes[0], line->op == GROUP_NORM ? line->groups : sizes[1]};
        if (line->op == CHANNEL_NORM)
            statistics[1] = line->groups;
        for (int32_t axis = 2; axis < line->ndim && line->op == CHANNEL_NORM; axis++)
            statistics[1] *= line->sizes[axis];
        bool batch = line->op == BATCH_NORM;
        normfuse_type rstd_type = line->type == NORMFUSE_F64 ? NORMFUSE_F64 : NORMFUSE_F32;
        normfuse_type mean_type = line->op == CHANNEL_NORM ? rstd_type : NORMFUSE_F64;
        if (line->statistics != NORMFUSE_MEAN_SQUARE)
            tensors->mean =
                make_small(bench, BENCH_MEAN, mean_type, batch ? 1 : 2, batch ? sizes + 1 : statistics, 0, 0);
        tensors->rstd = make_small(bench, BENCH_RSTD, rstd_type, batch ? 1 : 2, batch ? sizes + 1 : statistics, 1, 0);
    }
    if (line->op == BATCH_NORM && (line->evaluate || !line->backward)) {
        tensors->running_mean = make_small(bench, BENCH_RUNNING_MEAN, NORMFUSE_F32, 1, sizes + 1, 0, 0.0625);
        tensors->running_var = make_small(bench, BENCH_RUNNING_VAR, NORMFUSE_F32, 1, sizes + 1, 1, 0.0625);
    }
    if (line->backward) {
        tensors->dweight = make_small(bench, BENCH_DWEIGHT, line->weight_type, ndim, shape, 0, 0);
        tensors->dbias = make_small(bench, BENCH_DBIAS, line->weight_type, ndim, shape, 0, 0);
    }
    if (line->backward && line->scale_shift) {
        tensors->dscale = make_small(bench, BENCH_DSCALE, line->weight_type, 2, sizes, 0, 0);
        tensors->dshift = make_small(bench, BENCH_DSHIFT, line->weight_type, 2, sizes, 0, 0);
    }
}

struct floor_streams bench_take_set(struct bench *bench)
{
    int count = bench->reads + bench->writes;
    char *data = bench->arena + (size_t)bench->next_set * (size_t)count * bench->tensor_stride;
    struct floor_streams streams = {.reads = bench->reads, .writes = bench->writes};
    bench->next_set = (bench->next_set + 1) % bench->sets;
    for (int i = 0; i < count; i++, data += bench->tensor_stride) {
        bench->big[i].data = data;
        if (i < bench->reads)
            streams.in[i] = data;
        else
            streams.out[i - bench->reads] = data;
    }
    return streams;
}

double bench_bytes(const struct bench *bench)
{
    return (double)bench->tensor_bytes * (bench->reads + bench->writes);
}

normfuse_status bench_call(const struct bench *bench, const normfuse_tensors *tensors, bool backward,
                           size_t *scratch_bytes)
{
    return operator_call(&bench->line, backward, tensors, &bench->exec, scratch_bytes);
}

normfuse_tensors bench_statistics_tensors(const struct bench *bench)
{
    return (normfuse_tensors){.struct_bytes = sizeof(normfuse_tensors),
                              .x = bench->tensors.x,
                              .pre_add = bench->tensors.pre_add,
                              .pre_bias = bench->tensors.pre_bias,
                              .mean = bench->tensors.mean,
                              .rstd = bench->tensors.rstd};
}

/* The big tensors of the call, what it reads before what it writes. */
static void choose_tensors(struct bench *bench)
{
    const struct problem_line *line = &bench->line;
    normfuse_tensors *tensors = &bench->tensors;
    const normfuse_tensor *next = bench->big;
    bool needs_post_add = line->post_add && (!line->backward || line->activation != NORMFUSE_IDENTITY);
    tensors->x = next++;
    if (line->backward)
        tensors->dy = next++;
    if (line->pre_add && !(line->backward && line->write_u))
        tensors->pre_add = next++;
    if (needs_post_add)
        tensors->post_add = next++;
    if (line->backward && line->write_u)
        tensors->du = next++;
    bench->reads = (int)(next - bench->big);
    *(line->backward ? &tensors->dx : &tensors->y) = next++;
    if (!line->backward && line->write_u)
        tensors->u = next++;
    if (line->backward && needs_post_add)
        tensors->dpost_add = next++;
    bench->writes = (int)(next - bench->big) - bench->reads;
}

void bench_describe(struct bench *bench, const struct problem_line *line, const char *name, size_t alignment)
{
    *bench = (struct bench){.line = *line};
    bench->exec.struct_bytes = sizeof bench->exec;
    bench->tensors.struct_bytes = sizeof bench->tensors;
    if (problem_line_y_type(line) != line->type)
        report_failure(name, "y_dtype= is not timed: the floor copies tensors of one dtype");
    size_t bytes = number_bytes(line->type);
    for (int32_t i = 0; i < line->ndim; i++)
        if (__builtin_mul_overflow(bytes, (size_t)line->sizes[i], &bytes) || bytes > PTRDIFF_MAX / 4)
            report_failure(name, "the product of the sizes overflows");
    bench->tensor_bytes = bytes;
    bench->tensor_stride = (bytes + alignment - 1) / alignment * alignment;
    choose_tensors(bench);
    for (int i = 0; i < bench->reads + bench->writes; i++) {
        bool channels_last = i == 0 ? line->channels_last : problem_line_channels_last(line, i >= bench->reads);
        normfuse_axes *axes = &bench->big_axes[channels_last];
        bench->big[i] = channels_last
                            ? normfuse_tensor_channels_last(NULL, line->type, line->ndim, line->sizes, axes)
                            : normfuse_tensor_contiguous(NULL, line->type, line->ndim, line->sizes, axes);
        bench->big[i].device.device_type = line->device;
        bench->big[i].device.device_id = line->device == NORMFUSE_CPU ? 0 : device_ordinal();
    }
}
