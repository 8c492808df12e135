/* SPDX-License-Identifier: MIT
 *
 * xla.c - the operators as handlers of XLA's foreign function interface, in plain C. Shapes of results, gradients and
 * the rules of vmap and of sharding are in Python (python/normfuse/jax).
 *
 * XLA calls a handler with buffers and named attributes. The structs below are the part of XLA's stable C interface
 * (version 0.1 and later) that is used here, declared by ourselves: each begins with its own size, and a struct of XLA
 * that is smaller than ours is refused.
 *
 * Attributes are two arrays, s64 `integers` and f64 `reals`, which together are a `struct attributes`.
 *
 * f64 buffers of a program that runs without f64 are u32 with a last axis of 2. Running statistics that are an input
 * and an output share a buffer. CUDA: a result behind `outputs` is scratch memory. */
#include "huge_pages.h"

#include "xla.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "package.h"

/* ---- XLA's interface ------------------------------------------------------------------------------------------- */

enum { EXTENSION_METADATA = 1 };
enum { TYPE_U32 = 8, TYPE_F16 = 10, TYPE_F32 = 11, TYPE_F64 = 12, TYPE_BF16 = 16, TYPE_S64 = 5 };
enum { BUFFER = 1, ATTRIBUTE_ARRAY = 1 };
enum { ERROR_INVALID_ARGUMENT = 3, ERROR_RESOURCE_EXHAUSTED = 8, ERROR_UNIMPLEMENTED = 12, ERROR_INTERNAL = 13 };
enum { COMMAND_BUFFER_COMPATIBLE = 1 };
enum { STAGE_EXECUTE = 3 };

struct xla_extension {
    size_t struct_size;
    int type;
    struct xla_extension *next;
};

struct xla_version {
    size_t struct_size;
    struct xla_extension *extensions;
    int major, minor;
};

struct xla_metadata {
    size_t struct_size;
    struct xla_version version; /* written: the one that this file is for */
    uint32_t traits;            /* written */
};

struct xla_metadata_extension {
    struct xla_extension base;
    struct xla_metadata *metadata;
};

struct xla_buffer {
    size_t struct_size;
    struct xla_extension *extensions;
    int dtype;
    void *data;
    int64_t rank;
    int64_t *sizes;
};

struct xla_buffers { /* of arguments and of results */
    size_t struct_size;
    struct xla_extension *extensions;
    int64_t size;
    int *types;
    struct xla_buffer **buffers;
};

struct xla_array {
    int dtype;
    size_t size; /* elements */
    void *data;
};

struct xla_attributes { /* sorted by their names */
    size_t struct_size;
    struct xla_extension *extensions;
    int64_t size;
    int *types;
    void *names;
    void **values;
};

struct xla_error_arguments {
    size_t struct_size;
    struct xla_extension *extensions;
    const char *message; /* copied */
    int code;
};

struct xla_error_destroy_arguments {
    size_t struct_size;
    struct xla_extension *extensions;
    void *error;
};

struct xla_stream_arguments {
    size_t struct_size;
    struct xla_extension *extensions;
    void *context;
    void *stream; /* out */
};

struct xla_schedule_arguments {
    size_t struct_size;
    struct xla_extension *extensions;
    void *context;
    void (*task)(void *data);
    void *data;
};

struct xla_threads_arguments {
    size_t struct_size;
    struct xla_extension *extensions;
    void *context;
    int64_t *threads; /* out */
};

struct xla_device_arguments {
    size_t struct_size;
    struct xla_extension *extensions;
    void *context;
    int32_t device; /* out */
};

/* Functions return NULL, or an error that the caller owns. */
struct xla_api {
    size_t struct_size;
    struct xla_extension *extensions;
    struct xla_version version;
    const void *internal;
    void *(*error_create)(struct xla_error_arguments *);
    void *error_get_message;
    void (*error_destroy)(struct xla_error_destroy_arguments *);
    void *handler_register;
    void *(*stream_get)(struct xla_stream_arguments *);
    void *type_register, *context_get, *state_set, *state_get, *memory_allocate, *memory_free;
    void *(*schedule)(struct xla_schedule_arguments *);
    void *(*threads)(struct xla_threads_arguments *);
    void *future_create, *future_set_available, *future_set_error, *run_id_get;
    void *(*device_get)(struct xla_device_arguments *); /* since jaxlib 0.5.1 */
};

struct xla_frame {
    size_t struct_size;
    struct xla_extension *extensions;
    const struct xla_api *api;
    void *context;
    int stage;
    struct xla_buffers arguments, results;
    struct xla_attributes attributes;
};

/* True if XLA's struct has the field, so that it may be read. */
#define HAS(pointer, field)                                                                                            \
    ((pointer)->struct_size >= offsetof(__typeof__(*(pointer)), field) + sizeof((pointer)->field))

/* ---- a call ---------------------------------------------------------------------------------------------------- */

/* The order of normfuse_tensors. */
enum {
#define SLOT(number, member, kind) number,
#include "slots.def"
#undef SLOT
    SLOTS
};
_Static_assert(sizeof(normfuse_tensors) == offsetof(normfuse_tensors, x) + SLOTS * sizeof(void *),
               "every tensor has a slot");
_Static_assert(offsetof(normfuse_tensors, dslope) == offsetof(normfuse_tensors, x) + DSLOPE * sizeof(void *),
               "slots are in the order of normfuse_tensors");

enum { MAX_ON_ONE_THREAD = 16384 }; /* elements, which the library gives to one thread however many there are */

#define BIT(slot) (INT64_C(1) << (slot))
static const int64_t big = BIT(X) | BIT(PRE_ADD) | BIT(POST_ADD) | BIT(Y) | BIT(U) | BIT(DY) | BIT(DU) | BIT(DX) |
                           BIT(DPOST_ADD);

/* The number of the lowest bit of a mask that has one. */
static int lowest(int64_t mask)
{
    return __builtin_ctzll((unsigned long long)mask);
}

/* Values of the attributes' `call`; python/normfuse/jax/_call.py has the same numbers. */
enum call {
    GROUP_NORM_FORWARD,
    GROUP_NORM_BACKWARD,
    BATCH_NORM_FORWARD,
    BATCH_NORM_BACKWARD,
    AFFINE_FORWARD,
    AFFINE_BACKWARD,
    CHANNEL_NORM_FORWARD,
    CHANNEL_NORM_BACKWARD,
    BATCH_NORM_STATS,
    BATCH_NORM_APPLY,
    BATCH_NORM_BACKWARD_SUMS,
    BATCH_NORM_BACKWARD_APPLY,
    STATS_MERGE, /* inputs: STATS, outputs: STATS */
    SUMS_MERGE,  /* inputs: SUMS, outputs: SUMS */
    CALLS
};

struct described {
    normfuse_tensor tensor;
    int64_t sizes[NORMFUSE_MAX_AXES], strides[NORMFUSE_MAX_AXES];
};

static void *error(const struct xla_api *api, int code, const char *message)
{
    struct xla_error_arguments arguments = {sizeof arguments, NULL, message, code};
    return api->error_create(&arguments);
}

static void forget_error(const struct xla_api *api, void *failure)
{
    struct xla_error_destroy_arguments arguments = {sizeof arguments, NULL, failure};
    api->error_destroy(&arguments);
}

static void *error_of(const struct xla_api *api, normfuse_status status)
{
    const char *text = normfuse_last_error();
    if (text[0] == '\0')
        text = normfuse_status_text(status);
    const int code = status < 20                      ? ERROR_INVALID_ARGUMENT
                     : status == NORMFUSE_UNSUPPORTED ? ERROR_UNIMPLEMENTED
                     : status < 50 && status >= 40    ? ERROR_RESOURCE_EXHAUSTED
                                                      : ERROR_INTERNAL;
    return error(api, code, text);
}

/* The attributes; python/normfuse/jax/_call.py writes them in this order. */
struct attributes {
    /* integers */
    int64_t call;            /* an `enum call` */
    int64_t inputs, outputs; /* a bit for each tensor of normfuse_tensors, x the lowest; buffers come in that order */
    int64_t channels_last;   /* 1: big tensors have the axes N, spatial, C */
    int64_t groups, flags, activation, set_values, statistics, eps_kind; /* as in the options */
    /* reals */
    double eps, momentum, act_param; /* as in the options */
};

static bool read_array(const struct xla_attributes *from, int at, int dtype, void *to, size_t bytes)
{
    const struct xla_array *const array = from->values[at];
    if (from->types[at] != ATTRIBUTE_ARRAY || array->dtype != dtype || array->size * 8 != bytes)
        return false;
    memcpy(to, array->data, bytes);
    return true;
}

static bool read_attributes(const struct xla_attributes *from, struct attributes *to)
{
    enum { INTEGERS = offsetof(struct attributes, eps), REALS = sizeof *to - INTEGERS };
    return from->size == 2 && read_array(from, 0, TYPE_S64, to, INTEGERS) &&
           read_array(from, 1, TYPE_F64, &to->eps, REALS) && to->call >= 0 && to->call < CALLS;
}

/* The buffer as a tensor. False: a dtype or a number of axes that no operator takes. */
static bool describe(struct described *described, const struct xla_buffer *buffer, bool channels_last,
                     normfuse_device device)
{
    int64_t rank = buffer->rank;
    normfuse_dtype dtype = {2, 0, 1};
    switch (buffer->dtype) {
    case TYPE_F16: dtype.bits = 16; break;
    case TYPE_F32: dtype.bits = 32; break;
    case TYPE_F64: dtype.bits = 64; break;
    case TYPE_BF16: dtype = (normfuse_dtype){4, 16, 1}; break;
    case TYPE_U32:
        if (rank < 1 || buffer->sizes[rank - 1] != 2)
            return false;
        dtype.bits = 64;
        rank--;
        break;
    default: return false;
    }
    if (rank > NORMFUSE_MAX_AXES)
        return false;
    uint64_t stride = 1; /* sizes that are too many are the library's to refuse */
    for (int64_t a = rank - 1; a >= 0; a--) {
        const int64_t to = !channels_last || a == 0 ? a : a == rank - 1 ? 1 : a + 1;
        described->sizes[to] = buffer->sizes[a];
        described->strides[to] = (int64_t)stride;
        stride *= (uint64_t)buffer->sizes[a];
    }
    described->tensor = (normfuse_tensor){.data = buffer->data, .device = device, .ndim = (int32_t)rank, .dtype = dtype,
                                          .shape = described->sizes, .strides = described->strides};
    return true;
}

/* Describes the buffers of the slots in `mask`, and puts the tensors there. NULL, or what is wrong with them. */
static const char *take(const struct xla_buffers *buffers, int64_t mask, bool channels_last, normfuse_device device,
                        struct described *described, normfuse_tensors *tensors)
{
    const normfuse_tensor **const slots = &tensors->x;
    int64_t taken = 0;
    for (int64_t left = mask; left != 0; left &= left - 1, taken++) {
        const int slot = lowest(left);
        if (slot >= SLOTS || taken == buffers->size || buffers->types[taken] != BUFFER ||
            !HAS(buffers->buffers[taken], sizes))
            return "normfuse: fewer buffers than the attributes say, or of another kind";
        if (!describe(&described[taken], buffers->buffers[taken], channels_last && (big & BIT(slot)) != 0, device))
            return "normfuse: a buffer of a dtype or a number of axes that no operator takes";
        slots[slot] = &described[taken].tensor;
    }
    return NULL;
}

/* ---- XLA's threads --------------------------------------------------------------------------------------------- */

/* The library's tasks on XLA's threads: a second pool would compete with them for the cores. The caller takes part, so
 * that no call waits for a thread that XLA does not have; a helper that comes late finds no task left, and the last of
 * them frees the memory. */
struct shared_tasks {
    void (*task)(void *context, int64_t i);
    void *context;
    int64_t tasks;
    atomic_int_fast64_t next, done, holders;
    pthread_mutex_t mutex; /* for the caller to sleep on */
    pthread_cond_t is_done;
};

struct pool {
    const struct xla_api *api;
    void *context;
    int64_t threads;
};

static void run_shared(struct shared_tasks *shared)
{
    for (;;) {
        const int64_t i = atomic_fetch_add(&shared->next, 1);
        if (i >= shared->tasks)
            return;
        shared->task(shared->context, i);
        if (atomic_fetch_add(&shared->done, 1) + 1 == shared->tasks) {
            pthread_mutex_lock(&shared->mutex);
            pthread_cond_signal(&shared->is_done);
            pthread_mutex_unlock(&shared->mutex);
        }
    }
}

static void let_go(struct shared_tasks *shared)
{
    if (atomic_fetch_sub(&shared->holders, 1) != 1)
        return;
    pthread_cond_destroy(&shared->is_done);
    pthread_mutex_destroy(&shared->mutex);
    free(shared);
}

static void help(void *data)
{
    run_shared(data);
    let_go(data);
}

static void wait_for_all(struct shared_tasks *shared)
{
    enum { LOOKS = 2000 }; /* some microseconds: the tasks that still run are nearly done */
    for (int i = 0; i < LOOKS; i++)
        if (atomic_load(&shared->done) == shared->tasks)
            return;
    pthread_mutex_lock(&shared->mutex);
    while (atomic_load(&shared->done) < shared->tasks)
        pthread_cond_wait(&shared->is_done, &shared->mutex);
    pthread_mutex_unlock(&shared->mutex);
}

static void parallel_for(void *data, int64_t tasks, void (*task)(void *context, int64_t i), void *context)
{
    const struct pool *const pool = data;
    struct shared_tasks *const shared = tasks > 1 ? malloc(sizeof *shared) : NULL;
    if (shared == NULL) {
        for (int64_t i = 0; i < tasks; i++)
            task(context, i);
        return;
    }
    shared->task = task;
    shared->context = context;
    shared->tasks = tasks;
    atomic_init(&shared->next, 0);
    atomic_init(&shared->done, 0);
    atomic_init(&shared->holders, 1);
    pthread_mutex_init(&shared->mutex, NULL);
    pthread_cond_init(&shared->is_done, NULL);
    const int64_t helpers = (pool->threads < tasks ? pool->threads : tasks) - 1;
    for (int64_t i = 0; i < helpers; i++) {
        atomic_fetch_add(&shared->holders, 1);
        struct xla_schedule_arguments arguments = {sizeof arguments, NULL, pool->context, help, shared};
        void *const refused = pool->api->schedule(&arguments);
        if (refused != NULL) { /* then this thread does the rest */
            forget_error(pool->api, refused);
            let_go(shared);
            break;
        }
    }
    run_shared(shared);
    wait_for_all(shared);
    let_go(shared);
}

/* If XLA has no threads to give, the library uses its own. */
static void use_threads(const struct xla_frame *frame, struct pool *pool, normfuse_exec *exec)
{
    if (!HAS(frame->api, threads) || frame->api->threads == NULL || frame->api->schedule == NULL)
        return;
    *pool = (struct pool){frame->api, frame->context, 0};
    struct xla_threads_arguments arguments = {sizeof arguments, NULL, frame->context, &pool->threads};
    void *const refused = frame->api->threads(&arguments);
    if (refused != NULL) {
        forget_error(frame->api, refused);
        return;
    }
    exec->parallel_for = parallel_for;
    exec->pool = pool;
    exec->threads = pool->threads > 1024 ? 1024 : (int32_t)pool->threads;
}

static int64_t elements_of(const struct xla_buffer *buffer)
{
    int64_t elements = 1;
    for (int64_t a = 0; a < buffer->rank; a++)
        elements *= buffer->sizes[a];
    return elements;
}

/* ---- handlers -------------------------------------------------------------------------------------------------- */

/* For an operation on CUDA: XLA's stream, the device, scratch memory and sync memory. NULL, or an error. */
static void *use_stream(const struct xla_frame *frame, normfuse_device *device, normfuse_exec *exec)
{
    const struct xla_api *const api = frame->api;
    if (!HAS(api, device_get) || api->device_get == NULL)
        return error(api, ERROR_UNIMPLEMENTED, "normfuse: this jaxlib does not say which device it calls for");
    struct xla_device_arguments of_device = {sizeof of_device, NULL, frame->context, 0};
    void *failure = api->device_get(&of_device);
    struct xla_stream_arguments of_stream = {sizeof of_stream, NULL, frame->context, NULL};
    if (failure == NULL)
        failure = api->stream_get(&of_stream);
    if (failure != NULL)
        return failure;
    *device = (normfuse_device){NORMFUSE_CUDA, of_device.device};
    exec->stream = of_stream.stream;
    /* While XLA captures a command buffer this is memory of that graph's own. */
    exec->sync = normfuse_stream_sync(device->device_id, exec->stream, &exec->sync_bytes);
    return NULL;
}

static void use_scratch(const struct xla_buffers *results, int64_t outputs, normfuse_exec *exec)
{
    const int64_t count = __builtin_popcountll((unsigned long long)outputs);
    if (results->size <= count)
        return;
    const struct xla_buffer *const scratch = results->buffers[count];
    exec->scratch = scratch->data;
    exec->scratch_bytes = 1;
    for (int64_t a = 0; a < scratch->rank; a++)
        exec->scratch_bytes *= (size_t)scratch->sizes[a];
}

static normfuse_status enqueue(const struct attributes *given, const normfuse_tensors *tensors,
                               const normfuse_exec *exec)
{
    const uint32_t flags = (uint32_t)given->flags;
    const int32_t activation = (int32_t)given->activation;
    const normfuse_group_norm_options group_norm = {
        .struct_bytes = sizeof group_norm, .flags = flags, .groups = given->groups, .eps = given->eps,
        .activation = activation, .act_param = given->act_param, .momentum = given->momentum,
        .set_values = given->set_values};
    const normfuse_batch_norm_options batch_norm = {
        .struct_bytes = sizeof batch_norm, .flags = flags, .eps = given->eps, .activation = activation,
        .act_param = given->act_param, .momentum = given->momentum, .set_values = given->set_values};
    const normfuse_channel_norm_options channel_norm = {
        .struct_bytes = sizeof channel_norm, .flags = flags, .groups = given->groups, .eps = given->eps,
        .statistics = (int32_t)given->statistics, .eps_kind = (int32_t)given->eps_kind, .activation = activation,
        .act_param = given->act_param};
    const normfuse_affine_options affine = {.struct_bytes = sizeof affine, .flags = flags, .activation = activation,
                                            .act_param = given->act_param};
    switch (given->call) {
    case GROUP_NORM_FORWARD: return normfuse_group_norm_forward(&group_norm, tensors, exec);
    case GROUP_NORM_BACKWARD: return normfuse_group_norm_backward(&group_norm, tensors, exec);
    case BATCH_NORM_FORWARD: return normfuse_batch_norm_forward(&batch_norm, tensors, exec);
    case BATCH_NORM_BACKWARD: return normfuse_batch_norm_backward(&batch_norm, tensors, exec);
    case BATCH_NORM_STATS: return normfuse_batch_norm_stats(&batch_norm, tensors, exec);
    case BATCH_NORM_APPLY: return normfuse_batch_norm_apply(&batch_norm, tensors, exec);
    case BATCH_NORM_BACKWARD_SUMS: return normfuse_batch_norm_backward_sums(&batch_norm, tensors, exec);
    case BATCH_NORM_BACKWARD_APPLY: return normfuse_batch_norm_backward_apply(&batch_norm, tensors, exec);
    case CHANNEL_NORM_FORWARD: return normfuse_channel_norm_forward(&channel_norm, tensors, exec);
    case CHANNEL_NORM_BACKWARD: return normfuse_channel_norm_backward(&channel_norm, tensors, exec);
    case AFFINE_FORWARD: return normfuse_affine_forward(&affine, tensors, exec);
    default: return normfuse_affine_backward(&affine, tensors, exec);
    }
}

/* Running statistics are updated where they are: XLA gave the output the input's memory. Eagerly and on the CPU it may
 * not have; then they are copied. */
static bool share_running(const normfuse_tensors *inputs, const normfuse_tensors *outputs, normfuse_device device)
{
    for (int i = 0; i < 2; i++) {
        const normfuse_tensor *const from = (&inputs->running_mean)[i], *const to = (&outputs->running_mean)[i];
        if (from == NULL || from == to || from->data == to->data)
            continue;
        if (device.device_type != NORMFUSE_CPU || from->ndim != 1 || to->ndim != 1 || from->shape[0] != to->shape[0] ||
            from->dtype.bits != to->dtype.bits)
            return false;
        memcpy(to->data, from->data, (size_t)from->shape[0] * from->dtype.bits / 8);
    }
    return true;
}

static void *run(const struct xla_frame *frame, normfuse_device device)
{
    const struct xla_api *const api = frame->api;
    struct attributes attributes;
    if (!read_attributes(&frame->attributes, &attributes))
        return error(api, ERROR_INVALID_ARGUMENT, "normfuse: attributes are not those of this version");
    const int64_t call = attributes.call, inputs = attributes.inputs, outputs = attributes.outputs;
    normfuse_exec exec = {.struct_bytes = sizeof exec};
    if (device.device_type == NORMFUSE_CUDA) {
        void *const failure = use_stream(frame, &device, &exec);
        if (failure != NULL)
            return failure;
        use_scratch(&frame->results, outputs, &exec);
    }
    struct described described[2][SLOTS];
    normfuse_tensors given = {.struct_bytes = sizeof given};
    const char *problem = take(&frame->arguments, inputs, attributes.channels_last != 0, device, described[0], &given);
    normfuse_tensors tensors = given;
    if (problem == NULL)
        problem = take(&frame->results, outputs, attributes.channels_last != 0, device, described[1], &tensors);
    if (problem != NULL)
        return error(api, ERROR_INVALID_ARGUMENT, problem);
    struct pool pool;
    if (device.device_type == NORMFUSE_CPU) {
        for (int64_t left = outputs & big; left != 0; left &= left - 1)
            normfuse_advise_huge_pages((&tensors.x)[lowest(left)]);
        if (elements_of(frame->arguments.buffers[0]) > MAX_ON_ONE_THREAD)
            use_threads(frame, &pool, &exec);
        else
            exec.threads = 1;
    }

    normfuse_status status;
    if (call == STATS_MERGE || call == SUMS_MERGE) {
        const int64_t mask = BIT(call == STATS_MERGE ? STATS : SUMS);
        if (inputs != mask || outputs != mask)
            return error(api, ERROR_INVALID_ARGUMENT, "normfuse: a merge has one input and one output");
        status = call == STATS_MERGE ? normfuse_stats_merge(given.stats, tensors.stats, &exec)
                                     : normfuse_sums_merge(given.sums, tensors.sums, &exec);
        return status == NORMFUSE_OK ? NULL : error_of(api, status);
    }
    if (!share_running(&given, &tensors, device))
        return error(api, ERROR_INTERNAL, "normfuse: running statistics do not share the memory of their update");
    status = enqueue(&attributes, &tensors, &exec);
    return status == NORMFUSE_OK ? NULL : error_of(api, status);
}

/* At registration XLA asks what a handler needs. */
static bool answer(const struct xla_frame *frame, uint32_t traits)
{
    for (struct xla_extension *extension = frame->extensions; extension != NULL; extension = extension->next) {
        if (extension->type != EXTENSION_METADATA)
            continue;
        struct xla_metadata *const metadata = ((struct xla_metadata_extension *)extension)->metadata;
        if (!HAS(metadata, traits))
            return true; /* XLA refuses a handler that answers nothing */
        metadata->version.major = 0;
        metadata->version.minor = 1;
        metadata->traits = traits;
        return true;
    }
    return false;
}

static void *handle(const struct xla_frame *frame, int32_t device_type, uint32_t traits)
{
    if (answer(frame, traits))
        return NULL;
    if (!HAS(frame->api, error_destroy))
        return NULL; /* not even an error can be made; every version of XLA has these functions */
    if (!HAS(frame, attributes) || !HAS(&frame->arguments, buffers) || !HAS(&frame->results, buffers) ||
        !HAS(&frame->attributes, values) || !HAS(frame->api, stream_get))
        return error(frame->api, ERROR_UNIMPLEMENTED, "normfuse: this jaxlib's foreign function interface is too old");
    if (frame->stage != STAGE_EXECUTE)
        return error(frame->api, ERROR_UNIMPLEMENTED, "normfuse: handlers have the stage execute alone");
    return run(frame, (normfuse_device){device_type, 0});
}

void *normfuse_xla_cpu(void *frame)
{
    return handle(frame, NORMFUSE_CPU, 0);
}

/* The launched kernels depend on shapes and attributes alone. */
void *normfuse_xla_cuda(void *frame)
{
    return handle(frame, NORMFUSE_CUDA, COMMAND_BUFFER_COMPATIBLE);
}
