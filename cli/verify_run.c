/* SPDX-License-Identifier: MIT
 *
 * verify_run.c - the calls of the library that a problem stands for: whole, sharded, in parts, on the CPU and on the
 * device; and what they left alone. */
#define _GNU_SOURCE
#include "verify_work.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device.h"
#include "operator_call.h"

enum { SHARDS = 3 };

const char *const verify_tensor_names[TENSORS] = {
    "x", "pre_add", "post_add", "weight", "bias", "scale", "shift", "y", "u", "mean", "rstd", "running_mean",
    "running_var", "dy", "du", "dx", "dweight", "dbias", "dscale", "dshift", "dpost_add", "stats", "sums",
    "pre_bias", "dpre_bias", "slope", "dslope"
};

/* ---- what is found -------------------------------------------------------------------------------------------- */

enum verify_outcome verify_conclude(struct verify_result *result,
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
enum verify_outcome verify_conclude_refused(struct verify_result *result)
{
    return verify_conclude(result, VERIFY_REFUSED, "%s: %s", normfuse_status_text(result->status),
                           normfuse_last_error());
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

/* Calls an operator that shards have, too, with the options `own`. */
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
                                            .momentum = VERIFY_RUNNING_MOMENTUM,
                                            .batches_seen = options->cumulative ? VERIFY_BATCHES_SEEN : 0,
                                            .set_values = what->set_values };
        CALL(batch_norm)
    }
    normfuse_group_norm_options own = { .struct_bytes = sizeof own,
                                        .flags = flags,
                                        .groups = work->groups,
                                        .eps = line->eps,
                                        .activation = line->activation,
                                        .act_param = line->act_param,
                                        .momentum = VERIFY_RUNNING_MOMENTUM,
                                        .batches_seen = options->cumulative ? VERIFY_BATCHES_SEEN : 0,
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
static const unsigned forward_inputs = 1u << X | 1u << PRE_ADD | 1u << PRE_BIAS | 1u << POST_ADD | 1u << WEIGHT |
                                       1u << BIAS | 1u << SCALE | 1u << SHIFT | 1u << SLOPE | 1u << RUNNING_MEAN |
                                       1u << RUNNING_VAR;
static const unsigned forward_outputs = 1u << Y | 1u << U | 1u << MEAN | 1u << RSTD;
static const unsigned running_statistics = 1u << RUNNING_MEAN | 1u << RUNNING_VAR;
static const unsigned backward_inputs = 1u << X | 1u << PRE_ADD | 1u << PRE_BIAS | 1u << POST_ADD | 1u << WEIGHT |
                                        1u << BIAS | 1u << SCALE | 1u << SHIFT | 1u << MEAN | 1u << RSTD |
                                        1u << RUNNING_MEAN | 1u << RUNNING_VAR | 1u << Y | 1u << DY | 1u << SLOPE;
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
        status = call_library(work, backward ? BACKWARD_APPLY : APPLY, &arguments.tensors, verify_largest_set(work),
                              false);
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
            wrong = verify_tensor_names[name];
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
            return verify_conclude_refused(result);
        static char *sync; /* of all problems */
        if (!sync)
            sync = device_allocate(work->sync_bytes + GUARD_BYTES);
        work->sync = sync;
        if (!sync || !device_fill(work->sync, 0, work->sync_bytes) ||
            !device_fill(work->sync + work->sync_bytes, UNTOUCHED, GUARD_BYTES))
            return verify_conclude(result, VERIFY_NO_MEMORY, "%s", device_error());
    }
    if (!make_mirrors(work) || !upload_mirrors(work))
        return verify_conclude(result, VERIFY_NO_MEMORY, "%s", device_error());
    result->status = call_operator(work);
    if (result->status != NORMFUSE_OK)
        return verify_conclude_refused(result);
    if (!device_wait())
        return verify_conclude(result, VERIFY_FAILED, "%s", device_error());
    work->image = download_image(work);
    if (!work->image)
        return verify_conclude(result, VERIFY_FAILED, "the results could not be read: %s", device_error());
    const char *wrong = find_changed_room(work, work->image);
    if (wrong)
        return verify_conclude(result, VERIFY_FAILED, "%s", wrong);
    if (options->twice) {
        work->rooms_used = 0;
        if (!upload_mirrors(work) || call_operator(work) != NORMFUSE_OK || !device_wait())
            return verify_conclude(result, VERIFY_FAILED, "the second run: %s %s", normfuse_last_error(),
                                   device_error());
        if ((wrong = find_difference(work)))
            return verify_conclude(result, VERIFY_FAILED, "%s: a second run gives other bits", wrong);
    }
    if (options->graph) {
        work->rooms_used = 0;
        if (!device_record_begin())
            return verify_conclude(result, VERIFY_FAILED, "%s", device_error());
        result->status = call_operator(work);
        struct device_graph *graph = device_record_end();
        if (result->status != NORMFUSE_OK || !graph) {
            device_graph_free(graph);
            return verify_conclude(result, VERIFY_FAILED, "under capture: %s %s", normfuse_last_error(),
                                   device_error());
        }
        for (int i = 0; i < 2 && !wrong; i++) {
            if (!upload_mirrors(work) || !device_replay(graph) || !device_wait())
                wrong = device_error();
            else
                wrong = find_difference(work);
        }
        device_graph_free(graph);
        if (wrong)
            return verify_conclude(result, VERIFY_FAILED, "%s: a replayed graph gives other bits", wrong);
    }
    for (int name = 0; name < TENSORS; name++)
        if (work->buffers[name].base)
            memcpy(work->buffers[name].base, work->image + work->buffers[name].at, work->buffers[name].bytes);
    return VERIFY_PASSED;
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
            work->buffers[name].sum = verify_sum_of(&work->buffers[name]);
}

/* The name of a tensor whose surroundings, or which itself though an input, were changed; NULL when all is well.
 * Destroys the tensors. */
const char *verify_find_changed(struct work *work)
{
    for (int name = 0; name < TENSORS; name++) {
        struct buffer *buffer = &work->buffers[name];
        if (!buffer->base)
            continue;
        if (!is_written(work, name)) {
            if (verify_sum_of(buffer) != buffer->sum)
                return verify_tensor_names[name];
            continue;
        }
        verify_fill_bytes(buffer, UNTOUCHED);
        if (!is_untouched(buffer->base, buffer->bytes))
            return verify_tensor_names[name];
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
        return verify_conclude_refused(result);
    if (!work->options->twice)
        return VERIFY_PASSED;
    for (int name = 0; name < TENSORS; name++) {
        struct buffer *buffer = &work->buffers[name];
        if (!buffer->base || !is_written(work, name))
            continue;
        buffer->sum = verify_sum_of(buffer);
        if (buffer->is_output)
            verify_clear_output(work, (enum tensor_name)name);
        else
            verify_fill_generated(work, (enum tensor_name)name);
    }
    work->threads = work->options->threads == 1 ? OTHER_THREADS : 1;
    result->status = call_operator(work);
    if (result->status != NORMFUSE_OK)
        return verify_conclude_refused(result);
    for (int name = 0; name < TENSORS; name++) {
        const struct buffer *buffer = &work->buffers[name];
        if (buffer->base && is_written(work, name) && verify_sum_of(buffer) != buffer->sum)
            return verify_conclude(result, VERIFY_FAILED, "%s: a second run, threads=%d, gives other bits",
                                   verify_tensor_names[name], (int)work->threads);
    }
    return VERIFY_PASSED;
}

enum verify_outcome verify_run(struct work *work)
{
    sum_inputs(work);
    return work->on_device ? run_on_device(work) : run_on_cpu(work);
}
