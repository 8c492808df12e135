/* SPDX-License-Identifier: MIT
 *
 * launch.c - a call on a CUDA device: arguments and launches. Nothing waits, allocates or touches device memory. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "backend.h"
#include "compile.h"
#include "package.h"
#include "schedules.h"
#include "specialize.h"

_Static_assert((int)NORMFUSE_MAX_BESIDE >= (int)MAX_STEPS, "a call's kernels are compiled side by side");

/* The last call's kernels on this thread: put into words only when somebody asks, which takes longer than to launch. */
static _Thread_local struct ran {
    struct normfuse_cuda_signature signature;
    int64_t grid;
    uint32_t threads;
    int32_t phases, parts;
} last_steps[MAX_STEPS + 4]; /* copies before and after the steps, of two types */
static _Thread_local int last_count;

const char *normfuse_last_kernels(void)
{
    enum { WORDS_OF_ONE = 96 };
    static _Thread_local char text[512];
    static const char *const shared_by[] = {[NORMFUSE_EXCHANGE_THROUGH_MEMORY] = "parts",
                                            [NORMFUSE_EXCHANGE_IN_BLOCK] = "parts",
                                            [NORMFUSE_EXCHANGE_IN_CLUSTER] = "cluster",
                                            [NORMFUSE_EXCHANGE_IN_GRID] = "grid"};
    size_t at = 0;
    text[0] = '\0';
    for (int i = 0; i < last_count && sizeof text - at >= WORDS_OF_ONE; i++) {
        const struct ran *const of = &last_steps[i];
        char name[NORMFUSE_KERNEL_NAME_BYTES];
        at += (size_t)snprintf(text + at, sizeof text - at, "%s%s", i == 0 ? "" : " + ",
                               normfuse_cuda_signature_name(&of->signature, name) + strlen("normfuse_"));
        if (of->phases != 0)
            at += (size_t)snprintf(text + at, sizeof text - at, " %" PRId64 "x%" PRIu32 " %s=%d", of->grid, of->threads,
                                   shared_by[of->signature.exchanges], (int)of->parts);
    }
    return text;
}

/* Samples that all count together, of columns or of one channel, whose positions are one stride apart from one sample
 * to the next as well, become one sample of more positions. */
static void unite_samples(struct normfuse_problem *p)
{
    if ((!p->columns && p->c != 1) || p->n <= 1 || !takes_all_samples(p) || (double)p->n * (double)p->s > 2e9 ||
        (p->s > 1 && p->x.batch != p->x.position * p->s))
        return;
    if (p->s == 1)
        p->x.position = p->x.batch;
    p->x.batch = 0;
    p->s *= p->n;
    p->n = 1;
}

/* Norm over channels. Where channels are adjacent, and no parameter or group is a sample's own, it is group norm of
 * samples without positions: those of all samples. Else `single` has it as it is. Returns why it is not here. */
static const char *take_positions(struct normfuse_problem *p)
{
    if (p->sets != NORMFUSE_SETS_POSITION)
        return NULL;
    const bool has_positions = p->s != 1, backward = p->dy.data != NULL, empty = normfuse_is_empty(p);
    const bool of_samples = is_modulated(p) || (p->pre_bias.data != NULL && p->pre_bias.batch != 0);
    const bool channels_last = p->c == 1 || p->x.channel == 1;
    if (p->c == 0 && p->eps_kind == NORMFUSE_EPS_OF_NORM)
        return "there are no channels to take a norm of";
    if (!empty && !channels_last && (!has_positions || p->x.position != 1))
        return "neither channels nor positions of x are adjacent";
    p->rounds_pre_bias = true;
    const bool adjoins = p->n == 1 || (p->x.batch == p->s * p->x.position && p->groups == 1 && !of_samples);
    if (p->c > 0 && has_positions && (!channels_last || !adjoins || (of_samples && backward))) {
        p->columns = channels_last;
        /* By norm group and position; as a body counts these. */
        p->mean.batch = p->rstd.batch = channels_last ? 1 : p->s;
        p->mean.channel = p->rstd.channel = channels_last ? p->s : 1;
        p->set_values = p->c / p->groups;
        return NULL;
    }
    if (has_positions) {
        p->x.batch = p->x.position;
        p->mean.batch = p->rstd.batch = 1;
        p->scale.batch = p->shift.batch = p->pre_bias.batch = 0;
    }
    p->columns = true;
    p->sets = NORMFUSE_SETS_GROUP;
    p->n *= p->s;
    p->s = p->c > 0;
    p->c = p->c > 0 ? p->c : p->groups; /* no channels: of no positions */
    p->set_values = p->c / p->groups;
    return NULL;
}

static struct normfuse_place place_of(const struct normfuse_parameter *of)
{
    return (struct normfuse_place){of->data, (int32_t)of->batch, (int32_t)of->channel};
}

/* The parts of a call's scratch memory, and its sync memory. */
struct scratch {
    double *partials;   /* triples of norm groups, or what blocks of the grid send one another */
    double *statistics; /* of each norm group: mean, rstd, unbiased variance */
    double *sums;       /* pairs of each channel, or of each channel of a sample */
    double *totals;     /* pairs of each norm group: what the backward subtracts */
    uint32_t *grid_barriers;
};

/* Facts that the plan could not know: addresses, and all that may differ from call to call. */
static void describe_call(const struct normfuse_problem *p, const struct step *step,
                          const struct scratch *scratch, struct normfuse_call_arguments *to)
{
#define DATA(name) to->name = p->name.data;
    DATA(pre_add) DATA(post_add) DATA(du) DATA(u) DATA(dpost_add)
#undef DATA
#define PLACE(name) to->name = place_of(&p->name);
    PLACE(weight) PLACE(bias) PLACE(scale) PLACE(shift) PLACE(pre_bias) PLACE(slope) PLACE(mean) PLACE(rstd)
    PLACE(running_mean) PLACE(running_var) PLACE(dweight) PLACE(dbias)
#undef PLACE
    to->sums = scratch->sums;
    to->slope_sums =
        scratch->sums != NULL
            ? scratch->sums + (step->sums.by_channel ? 1 : p->n) * p->c * step->sums.slots * 2
            : NULL;
    to->statistics = scratch->statistics;
    to->accumulate = p->accumulate;
    to->eps = (float)p->eps;
    to->eps_of_double = p->eps;
    to->act_param = (float)p->act_param;
    to->act_param_of_double = p->act_param;
    to->momentum = p->momentum;
    to->unbiased = (double)p->set_values / ((double)p->set_values - 1.0);
    to->clamped_rstd = (double)NAN;
    if (p->eps_kind == NORMFUSE_EPS_OF_NORM && p->eps > 0) {
        const double clamped = sqrt((double)p->set_values) / p->eps;
        if (isfinite(p->type == NORMFUSE_F64 ? clamped : (double)(float)clamped))
            to->clamped_rstd = clamped;
    }
}

/* The parameter of a kernel that is compiled at run time. */
union body_arguments {
    struct normfuse_single_arguments single;
    struct normfuse_stream_arguments stream;
    struct normfuse_finish_arguments finish;
};
static void describe_body(const struct normfuse_problem *p, const struct step *step,
                          const struct scratch *scratch, union body_arguments *to)
{
#define TENSORS(body)                                                                                                  \
    to->body = step->body;                                                                                             \
    to->body.x = p->x.data;                                                                                            \
    to->body.dy = p->dy.data;                                                                                          \
    to->body.out = output_of(p);                                                                                       \
    describe_call(p, step, scratch, &to->body.call);
    if (step->signature.body == NORMFUSE_BODY_single) {
        TENSORS(single)
    } else {
        TENSORS(stream)
        to->stream.triples = scratch->partials;
        to->stream.totals = scratch->totals;
        to->stream.messages = (char *)scratch->partials;
        to->stream.barriers = scratch->grid_barriers;
    }
#undef TENSORS
}

/* The same of the body `finish`. */
static void describe_finish(const struct normfuse_problem *p, const struct step *step,
                            const struct scratch *scratch, struct normfuse_finish_arguments *to)
{
    const bool backward = step->signature.backward != 0;
    const bool sharded = (p->phases & (NORMFUSE_PHASE_STATISTICS | NORMFUSE_PHASE_BACKWARD_SUMS)) == 0;
    *to = step->finish;
#define PLACE(name) to->name = place_of(&p->name);
    PLACE(weight) PLACE(bias) PLACE(scale) PLACE(mean) PLACE(rstd) PLACE(running_mean) PLACE(running_var)
    PLACE(dweight) PLACE(dbias) PLACE(dscale) PLACE(dshift) PLACE(dslope)
#undef PLACE
    to->shard = backward ? p->sums : p->stats;
    to->sums = sharded ? to->shard : backward ? scratch->sums : scratch->partials;
    to->totals = scratch->totals;
    to->statistics = scratch->statistics;
    if (step->signature.dslope != 0)
        to->slope_sums = scratch->sums + (step->signature.gradients == NORMFUSE_GRADIENTS_OF_SAMPLES ||
                                                     p->sets == NORMFUSE_SETS_POSITION
                                                 ? p->n
                                                 : 1) *
                                             p->c * to->slot_stride * 2;
    to->accumulate = p->accumulate;
    to->accumulate_slope = p->accumulate_slope;
    to->eps = p->eps;
    to->momentum = p->momentum;
}

/* Stands for scratch memory that is absent or not known yet; aligned like it. */
static char *const anywhere = (char *)(uintptr_t)64;

static size_t scratch_of(const struct plan *plan)
{
    return rounded(plan->partials) + rounded(plan->statistics) + rounded(plan->sums) + rounded(plan->totals);
}

/* The next part of the scratch memory; NULL: it has no bytes. */
static void *take(char **scratch, size_t bytes)
{
    void *const taken = bytes > 0 ? *scratch : NULL;
    *scratch += rounded(bytes);
    return taken;
}

static bool prepares(const normfuse_exec *exec)
{
    return exec != NULL && (exec->flags & NORMFUSE_PREPARE) != 0;
}

/* Enqueues, or notes the kernel that would be. */
static normfuse_status launch_or_note(const char *call, const struct normfuse_cuda_device *device,
                                      const normfuse_exec *exec, const struct normfuse_cuda_launch *launch)
{
    return prepares(exec) ? normfuse_cuda_note(call, device, launch->signature)
                          : normfuse_cuda_launch(call, device, exec != NULL ? exec->stream : NULL, launch);
}

/* Behind what the call has launched. */
static normfuse_status launch(const struct normfuse_problem *problem, const struct normfuse_cuda_device *device,
                              const normfuse_exec *exec, struct normfuse_cuda_launch launch,
                              const struct normfuse_cuda_signature *signature, const void *arguments)
{
    struct ran *const ran = &last_steps[last_count++];
    launch.dependent = last_count > 1 && device->capability >= 90;
    launch.arguments = arguments;
    launch.signature = signature;
    *ran = (struct ran){.signature = *signature, .grid = launch.grid, .threads = launch.threads};
    if (launch.grid == 0)
        return NORMFUSE_OK;
    if (launch.grid > INT32_MAX)
        return normfuse_refuse(NORMFUSE_UNSUPPORTED, "%s: %" PRId64 " blocks are more than a grid has", problem->name,
                               launch.grid);
    return launch_or_note(problem->name, device, exec, &launch);
}

/* Copies before or after the steps. */
static normfuse_status copy(const struct normfuse_problem *problem, const struct normfuse_cuda_device *device,
                            const normfuse_exec *exec, const struct normfuse_transpose_arguments *copies, int32_t type)
{
    if (copies->count == 0)
        return NORMFUSE_OK;
    struct normfuse_cuda_launch of = {.grid = copies->blocks, .threads = NORMFUSE_TRANSPOSE_THREADS};
    int straight = 0;
    for (int i = 0; i < copies->count; i++) {
        of.shared = (size_t)maximum((int64_t)of.shared, copies->copies[i].shared);
        straight += copies->copies[i].straight;
    }
    /* Any type of so many bytes. */
    const struct normfuse_cuda_signature signature = {
        .body = NORMFUSE_BODY_transpose,
        .type = type == NORMFUSE_BF16 ? NORMFUSE_F16 : type,
        .straight = straight == 0               ? NORMFUSE_COPIES_ACROSS
                    : straight == copies->count ? NORMFUSE_COPIES_STRAIGHT
                                                : NORMFUSE_COPIES_MIXED};
    return launch(problem, device, exec, of, &signature, copies);
}

/* The call as kernels take it: tensors of the same strides, positions and samples united. */
struct prepared {
    struct normfuse_problem united;
    struct transposed transposed;
    const struct normfuse_cuda_device *device;
    const struct plan *plan;
};
_Static_assert(sizeof(struct prepared) <= sizeof(((struct normfuse_prepared *)NULL)->of_backend),
               "NORMFUSE_PREPARED_WORDS");

/* Without its plan. False: its tensors are too large. `reason`: why channel norm is not here, or NULL. */
static bool unite(const struct normfuse_problem *problem, char *scratch, struct prepared *prepared, const char **reason)
{
    prepared->united = *problem;
    const bool fits = normfuse_cuda_transpose(&prepared->united, scratch, &prepared->transposed);
    *reason = take_positions(&prepared->united);
    if (*reason == NULL)
        unite_samples(&prepared->united);
    return fits;
}

static normfuse_status prepare(const struct normfuse_problem *problem, const normfuse_exec *exec,
                               struct normfuse_prepared *of_call)
{
    struct prepared *const prepared = (struct prepared *)(void *)of_call->of_backend;
    const normfuse_status status =
        normfuse_cuda_device(problem->name, problem->device.device_id, &prepared->device);
    if (status != NORMFUSE_OK)
        return status;
    const char *reason;
    char *const scratch = exec != NULL && exec->scratch != NULL && !prepares(exec) ? exec->scratch : anywhere;
    const bool fits = unite(problem, scratch, prepared, &reason);
    if (reason != NULL)
        return normfuse_refuse(NORMFUSE_UNSUPPORTED, "%s: on a CUDA device channel norm does not take this call: %s",
                               problem->name, reason);
    const struct normfuse_problem *const united = &prepared->united;
    const struct transposed *const transposed = &prepared->transposed;
    const bool explains = normfuse_cuda_verbose(NORMFUSE_VERBOSE_PLAN);
    if (explains && transposed->bytes > 0)
        fprintf(stderr, "normfuse: plan: %s: copies %d inputs and %d outputs, for tensors of the same strides\n",
                problem->name, transposed->before[0].count + transposed->before[1].count,
                transposed->after[0].count + transposed->after[1].count);
    const bool has_grid_barriers = exec != NULL && exec->sync != NULL;
    prepared->plan = fits ? normfuse_cuda_plan_of(united, prepared->device, has_grid_barriers, explains) : NULL;
    if (prepared->plan == NULL && is_of_single(united))
        return normfuse_refuse(NORMFUSE_UNSUPPORTED,
                               "%s: on a CUDA device norm groups of %" PRId64 " channels are too large to be held",
                               problem->name, united->set_values);
    if (prepared->plan == NULL)
        return normfuse_refuse(NORMFUSE_UNSUPPORTED, "%s: no geometry of any kernel fits these sizes on %s",
                               problem->name, prepared->device->name);
    of_call->problem = problem;
    of_call->scratch_bytes = transposed->bytes + scratch_of(prepared->plan);
    return NORMFUSE_OK;
}

static normfuse_status launch_steps(const struct prepared *prepared, const struct normfuse_problem *problem,
                                    const normfuse_exec *exec, const struct scratch *parts)
{
    const struct plan *const plan = prepared->plan;
    struct normfuse_problem united = prepared->united;
    struct normfuse_cuda_beside beside = {0};
    for (int i = 0; i < plan->count; i++)
        if (plan->steps[i].launch.grid > 0)
            beside.signatures[beside.count++] = &plan->steps[i].signature;
    normfuse_status status = NORMFUSE_OK;
    for (int i = 0; i < plan->count && status == NORMFUSE_OK; i++) {
        const struct step *const step = &plan->steps[i];
        union body_arguments of_body;
        if (step->goes_on)
            go_on_from_first_pass(&united);
        if (step->signature.body == NORMFUSE_BODY_finish)
            describe_finish(&united, step, parts, &of_body.finish);
        else
            describe_body(&united, step, parts, &of_body);
        struct ran *const ran = &last_steps[last_count];
        struct normfuse_cuda_launch launched = step->launch;
        launched.beside = &beside;
        status = launch(problem, prepared->device, exec, launched, &step->signature, &of_body);
        ran->phases = step->phases;
        ran->parts = step->parts;
    }
    return status;
}

static normfuse_status enqueue(const struct normfuse_prepared *of_call, const normfuse_exec *exec)
{
    const struct prepared *const prepared = (const struct prepared *)(const void *)of_call->of_backend;
    const struct normfuse_problem *const problem = of_call->problem;
    const struct transposed *const transposed = &prepared->transposed;
    char *scratch = exec != NULL && exec->scratch != NULL && !prepares(exec) ? exec->scratch : anywhere;
    scratch += transposed->bytes;
    struct scratch parts;
    parts.partials = take(&scratch, prepared->plan->partials);
    parts.statistics = take(&scratch, prepared->plan->statistics);
    parts.sums = take(&scratch, prepared->plan->sums);
    parts.totals = take(&scratch, prepared->plan->totals);
    parts.grid_barriers = exec != NULL ? exec->sync : NULL;

    last_count = 0;
    normfuse_status status = NORMFUSE_OK;
    for (int i = 0; i < 2 && status == NORMFUSE_OK; i++)
        status = copy(problem, prepared->device, exec, &transposed->before[i], i > 0 ? problem->y_type : problem->type);
    if (status == NORMFUSE_OK)
        status = launch_steps(prepared, problem, exec, &parts);
    for (int i = 0; i < 2 && status == NORMFUSE_OK; i++)
        status = copy(problem, prepared->device, exec, &transposed->after[i], i > 0 ? problem->y_type : problem->type);
    if (status == NORMFUSE_OK && normfuse_cuda_verbose(NORMFUSE_VERBOSE_DISPATCH))
        fprintf(stderr, "normfuse: dispatch: %s: %s\n", problem->name, normfuse_last_kernels());
    return status;
}

static size_t scratch_bytes(const struct normfuse_problem *problem, const normfuse_exec *exec)
{
    struct prepared prepared;
    const char *reason;
    if (normfuse_cuda_device(problem->name, problem->device.device_id, &prepared.device) != NORMFUSE_OK ||
        !unite(problem, anywhere, &prepared, &reason) || reason != NULL)
        return 0;
    size_t needed = 0;
    const bool has_sync = exec != NULL && exec->sync != NULL;
    for (int without = 0; without < (has_sync ? 1 : 2); without++) {
        const struct plan *const plan =
            normfuse_cuda_plan_of(&prepared.united, prepared.device, without == 0, false);
        if (plan != NULL && scratch_of(plan) > needed)
            needed = scratch_of(plan);
    }
    return prepared.transposed.bytes + needed;
}

static normfuse_status merge(const struct normfuse_flat *in, const struct normfuse_flat *stats,
                             const struct normfuse_flat *out, int32_t width, int32_t ordinal,
                             const normfuse_exec *exec)
{
    const char *const call = width == 3 ? "stats_merge" : "sums_merge";
    const struct normfuse_cuda_device *device;
    const normfuse_status status = normfuse_cuda_device(call, ordinal, &device);
    if (status != NORMFUSE_OK || out->elements == 0)
        return status;
    const struct normfuse_merge_arguments arguments = {
        .in = (const double *)(const void *)in->data, .out = (double *)(void *)out->data,
        .shards = in->elements / out->elements, .items = out->elements / width,
        .stats = (const double *)(const void *)stats->data, .factor = NORMFUSE_PER_VALUE,
        .share = stats->data == NULL ? 1 : out->elements / 2 / (stats->elements / 3)};
    const struct normfuse_cuda_signature signature = {
        .body = NORMFUSE_BODY_finish, .work = NORMFUSE_WORK_MERGE, .type = NORMFUSE_F64, .backward = width == 2};
    const struct normfuse_cuda_launch launch = {.signature = &signature,
                                                .grid = divide_up(arguments.items, 128),
                                                .threads = 128,
                                                .arguments = &arguments};
    return launch_or_note(call, device, exec, &launch);
}

/* ---- the backend ------------------------------------------------------------------------------------------------ */

static normfuse_status check(const char *call, int32_t ordinal)
{
    const struct normfuse_cuda_device *device;
    return normfuse_cuda_device(call, ordinal, &device);
}

static void describe(normfuse_information *info)
{
    info->cuda = normfuse_cuda_state();
}

static normfuse_status compile(const char *call, int32_t ordinal, void (*progress)(void *, int32_t, int32_t),
                               void *context)
{
    const struct normfuse_cuda_device *device;
    normfuse_status status = normfuse_cuda_device(call, ordinal, NULL);
    if (status == NORMFUSE_OK)
        status = normfuse_cuda_device(call, ordinal, &device);
    return status != NORMFUSE_OK ? status : normfuse_cuda_prepare_noted(call, device, progress, context);
}

static void describe_compiler(normfuse_compiler_information *info)
{
    normfuse_cuda_describe_compiler(normfuse_cuda_driver_version(), info);
}

const struct normfuse_backend normfuse_cuda_backend = {.device_type = NORMFUSE_CUDA,
                                                       .sync_bytes = NORMFUSE_CUDA_SYNC_BYTES,
                                                       .check = check,
                                                       .prepare = prepare,
                                                       .enqueue = enqueue,
                                                       .scratch_bytes = scratch_bytes,
                                                       .merge = merge,
                                                       .describe = describe,
                                                       .compile = compile,
                                                       .use_compiler = normfuse_cuda_use_compiler,
                                                       .describe_compiler = describe_compiler};
