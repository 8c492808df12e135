/* SPDX-License-Identifier: MIT
 *
 * api.c - the entry points of the operators: check, say it as a problem, hand it to the device's backend. And the
 * helpers that make tensors. */
#include <inttypes.h>
#include <stdlib.h>

#include "backend.h"
#include "caller.h"

/* ---- backends ------------------------------------------------------------------------------------------------- */

static normfuse_status check_exec(const struct normfuse_problem *problem, const normfuse_exec *exec)
{
    if (exec == NULL)
        return NORMFUSE_OK;
    const normfuse_status status = normfuse_check_struct(problem->name, "exec", exec->struct_bytes, sizeof *exec);
    if (status != NORMFUSE_OK)
        return status;
    if ((exec->flags & ~(uint32_t)NORMFUSE_PREPARE) != 0)
        return normfuse_refuse(NORMFUSE_BAD_ARGUMENT, "%s: exec.flags is 0x%" PRIx32 ", must be 0 or NORMFUSE_PREPARE",
                               problem->name, exec->flags);
    if (exec->reserved != 0)
        return normfuse_refuse(NORMFUSE_BAD_ARGUMENT, "%s: exec.reserved is %" PRId32 ", must be 0", problem->name,
                               exec->reserved);
    if (exec->threads < 0)
        return normfuse_refuse(NORMFUSE_BAD_ARGUMENT, "%s: exec.threads is %" PRId32 ", must not be negative",
                               problem->name, exec->threads);
    if ((uintptr_t)exec->scratch % 64 != 0)
        return normfuse_refuse(NORMFUSE_BAD_POINTER, "%s: exec.scratch is not aligned to 64 bytes", problem->name);
    return NORMFUSE_OK;
}

/* The backend of a problem's device, which is ready. */
static normfuse_status find_backend(const struct normfuse_problem *problem, const struct normfuse_backend **backend)
{
    *backend = normfuse_backend_of(problem->device.device_type);
    if (*backend == NULL)
        return normfuse_refuse(NORMFUSE_NO_DRIVER,
                               "%s: tensors.x is on a CUDA device, and this library was built without CUDA",
                               problem->name);
    return (*backend)->check != NULL ? (*backend)->check(problem->name, problem->device.device_id) : NORMFUSE_OK;
}

/* Backends take pre_bias as a part of the mean: not where u is rounded, nor where one channel has a bias for each of
 * the samples that count together. Norm over channels rounds u itself. */
static bool takes_pre_bias(const struct normfuse_problem *problem)
{
    if (problem->sets == NORMFUSE_SETS_POSITION)
        return true;
    return problem->pre_add.data == NULL && problem->u.data == NULL &&
           (problem->sets != NORMFUSE_SETS_BATCH || !problem->biases_samples);
}

/* ---- parts ------------------------------------------------------------------------------------------------------ */

/* The problems that a backend runs for one call, in this order. */
struct parts {
    struct normfuse_problem of[3];
    int count;
    size_t u_bytes; /* of scratch, before that of the parts */
};

static struct normfuse_problem affine_of(const struct normfuse_problem *problem, int32_t phases)
{
    return (struct normfuse_problem){.name = problem->name,
                                     .sets = NORMFUSE_SETS_NONE,
                                     .phases = phases,
                                     .type = problem->type,
                                     .y_type = problem->type,
                                     .columns = problem->columns,
                                     .activation = NORMFUSE_IDENTITY,
                                     .n = problem->n,
                                     .c = problem->c,
                                     .s = problem->s,
                                     .groups = problem->c,
                                     .set_values = 1,
                                     .device = problem->device};
}

/* True if u may be written there, to be overwritten by what is made of it. */
static bool holds_u(const struct normfuse_view *view, const struct normfuse_view *x)
{
    return view->data != NULL && view->batch == x->batch && view->channel == x->channel &&
           view->position == x->position;
}

/* u as the result of a channel affine, x + pre_bias + pre_add, then the call on u: u is written to the caller's, or to
 * y or dx in passing, or to scratch memory. */
static void make_u(struct parts *parts, struct normfuse_problem *rest, char *scratch)
{
    struct normfuse_problem *const affine = &parts->of[parts->count++];
    *affine = affine_of(rest, NORMFUSE_PHASE_APPLY);
    affine->x = rest->x;
    affine->bias = rest->pre_bias;
    affine->weights_samples = rest->biases_samples;
    affine->post_add = rest->pre_add;
    if (rest->u.data != NULL) {
        affine->y = rest->u;
    } else if (holds_u(&rest->y, &rest->x) && rest->y.data != rest->post_add.data) {
        affine->y = rest->y;
    } else if (holds_u(&rest->dx, &rest->x) && rest->dx.data != rest->dy.data && rest->dx.data != rest->du.data) {
        affine->y = rest->dx;
    } else {
        const ptrdiff_t c = (ptrdiff_t)rest->c, s = (ptrdiff_t)rest->s;
        affine->y = (struct normfuse_view){scratch, c * s, rest->columns ? 1 : s, rest->columns ? c : 1};
        parts->u_bytes = ((size_t)(rest->n * rest->c * rest->s) * normfuse_type_bytes(rest->type) + 255) / 256 * 256;
    }
    rest->memo = NULL;
    rest->x = affine->y;
    rest->pre_add = rest->u = (struct normfuse_view){0};
    rest->pre_bias = (struct normfuse_parameter){0};
}

/* scratch: where u is where no tensor is for it. */
static struct parts parts_of(const struct normfuse_problem *problem, char *scratch)
{
    struct parts parts = {.count = 0};
    struct normfuse_problem rest = *problem;
    if (problem->pre_bias.data != NULL && !takes_pre_bias(problem) && !normfuse_is_empty(problem))
        make_u(&parts, &rest, scratch);
    parts.of[parts.count++] = rest;
    if (problem->dpre_bias.data != NULL && (problem->phases & NORMFUSE_PHASE_BACKWARD_APPLY) != 0) {
        /* The sum of dx is dbias of a channel affine whose dy it is. */
        struct normfuse_problem *const sum = &parts.of[parts.count++];
        *sum = affine_of(problem, NORMFUSE_PHASE_BACKWARD_SUMS | NORMFUSE_PHASE_BACKWARD_APPLY);
        sum->accumulate = problem->accumulate_pre_bias;
        sum->x = sum->dy = problem->dx;
        sum->dbias = problem->dpre_bias;
        sum->weights_samples = problem->dpre_bias.batch != 0;
    }
    return parts;
}

/* Stands for scratch memory that is absent or not known yet; aligned like it. */
static char *const anywhere = (char *)(uintptr_t)64;

static size_t parts_scratch_bytes(const struct normfuse_backend *backend, const struct parts *parts,
                                  const normfuse_exec *exec)
{
    size_t most = 0;
    for (int i = 0; i < parts->count; i++) {
        const size_t bytes = backend->scratch_bytes(&parts->of[i], exec);
        most = bytes > most ? bytes : most;
    }
    return most > SIZE_MAX - parts->u_bytes ? SIZE_MAX : most + parts->u_bytes;
}

static bool prepares(const normfuse_exec *exec)
{
    return exec != NULL && (exec->flags & NORMFUSE_PREPARE) != 0;
}

static normfuse_status check_scratch(const struct normfuse_problem *problem, const normfuse_exec *exec, size_t needed,
                                     bool allocates)
{
    const bool given = exec != NULL && exec->scratch != NULL;
    if (prepares(exec))
        return NORMFUSE_OK;
    if (!given && needed > 0 && !allocates)
        return normfuse_refuse(NORMFUSE_SCRATCH,
                               "%s: exec.scratch is NULL, this call needs %zu bytes on device %" PRId32, problem->name,
                               needed, problem->device.device_id);
    if (given && exec->scratch_bytes < needed)
        return normfuse_refuse(NORMFUSE_SCRATCH, "%s: exec.scratch_bytes is %zu, this call needs %zu", problem->name,
                               exec->scratch_bytes, needed);
    return NORMFUSE_OK;
}

static normfuse_status run_one(const struct normfuse_backend *backend, const struct normfuse_problem *problem,
                               const normfuse_exec *exec)
{
    struct normfuse_prepared prepared;
    normfuse_status status = backend->prepare(problem, exec, &prepared);
    if (status == NORMFUSE_OK)
        status = check_scratch(problem, exec, prepared.scratch_bytes, backend->on_host);
    return status != NORMFUSE_OK ? status : backend->enqueue(&prepared, exec);
}

/* The scratch memory of all parts is checked before the first of them writes anything. */
static normfuse_status run_parts(const struct normfuse_backend *backend, const struct normfuse_problem *problem,
                                 const normfuse_exec *exec)
{
    if (problem->pre_bias.data == NULL && problem->dpre_bias.data == NULL)
        return run_one(backend, problem, exec); /* one part: struct parts is 5 KB */
    char *scratch = prepares(exec) ? anywhere : exec != NULL ? exec->scratch : NULL;
    struct parts parts = parts_of(problem, scratch);
    normfuse_exec of_parts;
    void *allocated = NULL;
    normfuse_status status = NORMFUSE_OK;
    if (parts.count > 1 && (scratch != NULL || !backend->on_host))
        status = check_scratch(problem, exec, parts_scratch_bytes(backend, &parts, exec), backend->on_host);
    if (status != NORMFUSE_OK)
        return status;
    if (parts.u_bytes > 0 && scratch != NULL && !prepares(exec)) {
        of_parts = *exec;
        of_parts.scratch = scratch + parts.u_bytes;
        of_parts.scratch_bytes -= parts.u_bytes;
        exec = &of_parts;
    } else if (parts.u_bytes > 0 && scratch == NULL) { /* on the host */
        allocated = malloc(parts.u_bytes);
        if (allocated == NULL)
            return normfuse_refuse(NORMFUSE_OUT_OF_MEMORY, "%s: no memory for %zu bytes of scratch", problem->name,
                                   parts.u_bytes);
        parts = parts_of(problem, allocated);
    }
    for (int i = 0; i < parts.count && status == NORMFUSE_OK; i++)
        status = run_one(backend, &parts.of[i], exec);
    free(allocated);
    return status;
}

static normfuse_status check_sync(const struct normfuse_backend *backend, const struct normfuse_problem *problem,
                                  const normfuse_exec *exec)
{
    if (backend->sync_bytes == 0 || exec == NULL || exec->sync == NULL)
        return NORMFUSE_OK;
    if ((uintptr_t)exec->sync % 64 != 0)
        return normfuse_refuse(NORMFUSE_BAD_POINTER, "%s: exec.sync is not aligned to 64 bytes", problem->name);
    if (exec->sync_bytes < backend->sync_bytes)
        return normfuse_refuse(NORMFUSE_SCRATCH, "%s: exec.sync_bytes is %zu, normfuse_sync_bytes says %zu",
                               problem->name, exec->sync_bytes, backend->sync_bytes);
    return NORMFUSE_OK;
}

/* True if there is no element and no result over none: statistics, sums, gradients of parameters. */
static bool writes_nothing(const struct normfuse_problem *problem)
{
    const int32_t forward = NORMFUSE_PHASE_STATISTICS | NORMFUSE_PHASE_APPLY;
    if (!normfuse_is_empty(problem))
        return false;
    if ((problem->phases & forward) != 0)
        return problem->mean.data == NULL && problem->rstd.data == NULL && !problem->has_running_momentum &&
               (problem->stats == NULL || (problem->phases & NORMFUSE_PHASE_APPLY) != 0);
    return problem->dweight.data == NULL && problem->dbias.data == NULL && problem->dscale.data == NULL &&
           problem->dshift.data == NULL && problem->dpre_bias.data == NULL && problem->dslope.data == NULL &&
           (problem->sums == NULL || (problem->phases & NORMFUSE_PHASE_BACKWARD_APPLY) != 0);
}

static normfuse_status run(const struct normfuse_problem *problem, const normfuse_exec *exec)
{
    const struct normfuse_backend *backend;
    normfuse_status status = check_exec(problem, exec);
    if (status == NORMFUSE_OK)
        status = find_backend(problem, &backend);
    if (status == NORMFUSE_OK)
        status = check_sync(backend, problem, exec);
    if (status != NORMFUSE_OK || writes_nothing(problem) || (prepares(exec) && backend->on_host))
        return status;
    return run_parts(backend, problem, exec);
}

/* The most that the whole call or either half of it needs. */
static normfuse_status scratch_bytes(const struct normfuse_problem *problem, const normfuse_exec *exec, size_t *bytes)
{
    if (bytes == NULL)
        return normfuse_refuse(NORMFUSE_BAD_ARGUMENT, "%s: bytes is NULL", problem->name);
    const struct normfuse_backend *backend;
    normfuse_status status = check_exec(problem, exec);
    if (status == NORMFUSE_OK)
        status = find_backend(problem, &backend);
    if (status != NORMFUSE_OK)
        return status;
    *bytes = 0;
    const int32_t first = NORMFUSE_PHASE_STATISTICS | NORMFUSE_PHASE_BACKWARD_SUMS;
    const int32_t phases[] = {problem->phases, problem->phases & first, problem->phases & ~first};
    for (int i = 0; i < 3; i++) {
        struct normfuse_problem part = *problem;
        part.phases = phases[i];
        part.memo = NULL;
        if (i == 1) /* the first half has no result that u may be in */
            part.y = part.dx = (struct normfuse_view){0};
        if (phases[i] == 0 || writes_nothing(&part))
            continue;
        const struct parts parts = parts_of(&part, anywhere);
        const size_t needed = parts_scratch_bytes(backend, &parts, exec);
        if (needed > *bytes)
            *bytes = needed;
    }
    if (*bytes == SIZE_MAX)
        return normfuse_refuse(NORMFUSE_OUT_OF_MEMORY, "%s: the bytes of scratch overflow", problem->name);
    return NORMFUSE_OK;
}

/* ---- operators ------------------------------------------------------------------------------------------------ */

/* The rest of a call once its arguments are checked. `bytes`: the answer of a ..._scratch_bytes. */
static normfuse_status answer(normfuse_status checked, const struct normfuse_problem *problem, enum normfuse_call call,
                              const normfuse_exec *exec, size_t *bytes, const struct normfuse_caller *caller)
{
    normfuse_status status = checked;
    if (status == NORMFUSE_OK)
        status = call < NORMFUSE_CALL_FORWARD_SCRATCH ? run(problem, exec) : scratch_bytes(problem, exec, bytes);
    normfuse_leave(caller);
    return status;
}

/* Every operator has the same functions, and norms that shards have those of shards, too. */
#define ENTRY(operator, name, call)                                                                                    \
    normfuse_status normfuse_##operator##_##name(const normfuse_##operator##_options *options,                         \
                                                 const normfuse_tensors *tensors, const normfuse_exec *exec)           \
    {                                                                                                                  \
        return operator(NORMFUSE_CALL_##call, options, tensors, exec, NULL);                                           \
    }
#define SCRATCH_ENTRY(operator, name, call)                                                                            \
    normfuse_status normfuse_##operator##_##name(const normfuse_##operator##_options *options,                         \
                                                 const normfuse_tensors *tensors, const normfuse_exec *exec,           \
                                                 size_t *bytes)                                                        \
    {                                                                                                                  \
        return operator(NORMFUSE_CALL_##call, options, tensors, exec, bytes);                                          \
    }
#define OPERATOR(operator)                                                                                             \
    static normfuse_status operator(enum normfuse_call call, const normfuse_##operator##_options *options,             \
                                    const normfuse_tensors *tensors, const normfuse_exec *exec, size_t *bytes)         \
    {                                                                                                                  \
        const struct normfuse_caller caller = normfuse_enter();                                                        \
        struct normfuse_problem problem;                                                                               \
        const normfuse_status checked = normfuse_##operator##_problem(&problem, call, options, tensors);               \
        return answer(checked, &problem, call, exec, bytes, &caller);                                                  \
    }                                                                                                                  \
    ENTRY(operator, forward, FORWARD)                                                                                  \
    ENTRY(operator, backward, BACKWARD)                                                                                \
    SCRATCH_ENTRY(operator, forward_scratch_bytes, FORWARD_SCRATCH)                                                    \
    SCRATCH_ENTRY(operator, backward_scratch_bytes, BACKWARD_SCRATCH)
#define SHARDED_OPERATOR(operator)                                                                                     \
    OPERATOR(operator)                                                                                                 \
    ENTRY(operator, stats, STATS)                                                                                      \
    ENTRY(operator, apply, APPLY)                                                                                      \
    ENTRY(operator, backward_sums, BACKWARD_SUMS)                                                                      \
    ENTRY(operator, backward_apply, BACKWARD_APPLY)

SHARDED_OPERATOR(group_norm)
SHARDED_OPERATOR(batch_norm)
OPERATOR(channel_norm)
OPERATOR(affine)
#undef SHARDED_OPERATOR
#undef OPERATOR
#undef SCRATCH_ENTRY
#undef ENTRY

static normfuse_status sample_quantum(const normfuse_tensor *x, int64_t *samples)
{
    struct normfuse_problem problem;
    const normfuse_status status = normfuse_shape_problem(&problem, "sample_quantum", x);
    if (status != NORMFUSE_OK)
        return status;
    if (samples == NULL)
        return normfuse_refuse(NORMFUSE_BAD_ARGUMENT, "%s: samples is NULL", problem.name);
    const struct normfuse_backend *backend;
    const normfuse_status found = find_backend(&problem, &backend);
    if (found != NORMFUSE_OK)
        return found;
    const bool any = normfuse_is_empty(&problem) || backend->sample_quantum == NULL;
    *samples = any ? 1 : backend->sample_quantum(problem.c, problem.s, problem.columns);
    return NORMFUSE_OK;
}

normfuse_status normfuse_sample_quantum(const normfuse_tensor *x, int64_t *samples)
{
    const struct normfuse_caller caller = normfuse_enter();
    const normfuse_status status = sample_quantum(x, samples);
    normfuse_leave(&caller);
    return status;
}

/* ---- CUDA devices --------------------------------------------------------------------------------------------- */

/* NULL, with the status and its message: this library was built without CUDA. */
static const struct normfuse_backend *find_cuda(const char *call, normfuse_status without, normfuse_status *status)
{
    const struct normfuse_backend *const backend = normfuse_backend_of(NORMFUSE_CUDA);
    *status = backend != NULL ? NORMFUSE_OK : normfuse_refuse(without, "%s: this library was built without CUDA", call);
    return backend;
}

static normfuse_status prepare(const char *call, int32_t device, void (*progress)(void *, int32_t, int32_t),
                               void *context)
{
    normfuse_status status;
    const struct normfuse_backend *const cuda = find_cuda(call, NORMFUSE_NO_DRIVER, &status);
    if (cuda == NULL)
        return status;
    const struct normfuse_caller caller = normfuse_enter();
    status = cuda->compile(call, device, progress, context);
    normfuse_leave(&caller);
    return status;
}

normfuse_status normfuse_prepare(int32_t device)
{
    return prepare("normfuse_prepare", device, NULL, NULL);
}

normfuse_status normfuse_prepare_with(int32_t device, void (*progress)(void *context, int32_t done, int32_t all),
                                      void *context)
{
    return prepare("normfuse_prepare_with", device, progress, context);
}

normfuse_status normfuse_use_compiler(const char *path)
{
    if (path == NULL)
        return normfuse_refuse(NORMFUSE_BAD_ARGUMENT, "normfuse_use_compiler: path is NULL");
    normfuse_status status;
    const struct normfuse_backend *const cuda = find_cuda("normfuse_use_compiler", NORMFUSE_UNSUPPORTED, &status);
    if (cuda == NULL)
        return status;
    const struct normfuse_caller caller = normfuse_enter();
    status = cuda->use_compiler("normfuse_use_compiler", path);
    normfuse_leave(&caller);
    return status;
}

normfuse_status normfuse_compiler_info(normfuse_compiler_information *info)
{
    if (info == NULL)
        return normfuse_refuse(NORMFUSE_BAD_ARGUMENT, "normfuse_compiler_info: info is NULL");
    normfuse_status status = normfuse_check_struct("normfuse_compiler_info", "info", info->struct_bytes, sizeof *info);
    if (status != NORMFUSE_OK)
        return status;
    const struct normfuse_backend *const cuda = find_cuda("normfuse_compiler_info", NORMFUSE_UNSUPPORTED, &status);
    if (cuda == NULL)
        return status;
    const struct normfuse_caller caller = normfuse_enter();
    cuda->describe_compiler(info);
    normfuse_leave(&caller);
    return NORMFUSE_OK;
}

normfuse_status normfuse_sync_bytes(int32_t device, size_t *bytes)
{
    if (bytes == NULL)
        return normfuse_refuse(NORMFUSE_BAD_ARGUMENT, "normfuse_sync_bytes: bytes is NULL");
    normfuse_status status;
    const struct normfuse_backend *const cuda = find_cuda("normfuse_sync_bytes", NORMFUSE_NO_DRIVER, &status);
    if (cuda == NULL)
        return status;
    if (device < 0)
        return normfuse_refuse(NORMFUSE_BAD_ARGUMENT,
                               "normfuse_sync_bytes: device is %" PRId32 ", must not be negative", device);
    *bytes = cuda->sync_bytes;
    return NORMFUSE_OK;
}

/* ---- tensors -------------------------------------------------------------------------------------------------- */

static normfuse_tensor make_tensor(void *data, normfuse_type type, int32_t ndim, const int64_t *sizes,
                                   normfuse_axes *axes, bool channels_last)
{
    static const normfuse_dtype dtypes[] = {[NORMFUSE_F64] = {2, 64, 1},
                                            [NORMFUSE_F32] = {2, 32, 1},
                                            [NORMFUSE_F16] = {2, 16, 1},
                                            [NORMFUSE_BF16] = {4, 16, 1}};
    normfuse_tensor tensor = {.data = data, .device = {NORMFUSE_CPU, 0}};
    if ((unsigned)type < sizeof dtypes / sizeof *dtypes)
        tensor.dtype = dtypes[type];
    if (ndim < 1 || ndim > NORMFUSE_MAX_AXES || sizes == NULL || axes == NULL)
        return tensor;
    tensor.ndim = ndim;
    tensor.shape = axes->shape;
    tensor.strides = axes->strides;
    /* From the axis that is innermost in memory outwards: the last one, or C before the spatial ones. Products may
     * wrap here: operators refuse such sizes before they look at strides. */
    uint64_t stride = 1;
    const int32_t channel_axis = channels_last && ndim > 2 ? 1 : -1;
    if (channel_axis == 1) {
        axes->strides[1] = 1;
        stride = (uint64_t)sizes[1];
    }
    for (int32_t a = ndim - 1; a >= 0; a--) {
        axes->shape[a] = sizes[a];
        if (a == channel_axis)
            continue;
        axes->strides[a] = (int64_t)stride;
        stride *= (uint64_t)sizes[a];
    }
    return tensor;
}

normfuse_tensor normfuse_tensor_contiguous(void *data, normfuse_type type, int32_t ndim, const int64_t *sizes,
                                           normfuse_axes *axes)
{
    return make_tensor(data, type, ndim, sizes, axes, false);
}

normfuse_tensor normfuse_tensor_channels_last(void *data, normfuse_type type, int32_t ndim, const int64_t *sizes,
                                              normfuse_axes *axes)
{
    return make_tensor(data, type, ndim, sizes, axes, true);
}

/* ---- version and machine -------------------------------------------------------------------------------------- */

#define TEXT(number) #number
#define VERSION(major, minor, patch) TEXT(major) "." TEXT(minor) "." TEXT(patch)

const char *normfuse_version(void)
{
    return VERSION(NORMFUSE_VERSION_MAJOR, NORMFUSE_VERSION_MINOR, NORMFUSE_VERSION_PATCH);
}

#if defined(__clang__)
#define COMPILER "clang " __clang_version__
#else
#define COMPILER "gcc " __VERSION__
#endif
#ifndef NORMFUSE_COMPILER_FLAGS
#define NORMFUSE_COMPILER_FLAGS ""
#endif

normfuse_status normfuse_info(normfuse_information *info)
{
    if (info == NULL)
        return normfuse_refuse(NORMFUSE_BAD_ARGUMENT, "normfuse_info: info is NULL");
    if (info->struct_bytes != sizeof *info)
        return normfuse_refuse(NORMFUSE_BAD_ARGUMENT, "normfuse_info: info->struct_bytes is %u, this library's is %zu",
                               info->struct_bytes, sizeof *info);
    const struct normfuse_caller caller = normfuse_enter();
    info->version = normfuse_version();
    info->compiler = COMPILER " " NORMFUSE_COMPILER_FLAGS;
    info->cuda = "not built";
    for (int i = 0; normfuse_backends[i] != NULL; i++)
        normfuse_backends[i]->describe(info);
    normfuse_leave(&caller);
    return NORMFUSE_OK;
}
