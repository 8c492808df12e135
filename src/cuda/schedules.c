/* SPDX-License-Identifier: MIT
 *
 * schedules.c - tries the schedules; see schedules.h. */
#include "schedules.h"

#include <stdio.h>
#include <string.h>

enum normfuse_cuda_kernel normfuse_cuda_kernel_for(const struct shape *shape, enum normfuse_cuda_schedule schedule)
{
    const struct normfuse_problem *const p = shape->problem;
    const bool holds = schedule == NORMFUSE_SCHEDULE_split;
    if (shape->additions && holds)
        schedule = NORMFUSE_SCHEDULE_additions;
    else if (shape->additions && schedule == NORMFUSE_SCHEDULE_grid_pipeline)
        schedule = NORMFUSE_SCHEDULE_grid_additions;
    else if (shape->additions && schedule == NORMFUSE_SCHEDULE_grid_pipeline_batch)
        schedule = NORMFUSE_SCHEDULE_batch_additions;
    else if (shape->unaligned && !p->columns && holds)
        schedule = NORMFUSE_SCHEDULE_unaligned;
    return normfuse_cuda_kernel_of(p->columns, schedule, shape->direction == BACKWARD, p->type, shape->elements > 1);
}

int normfuse_cuda_tensors_of(const struct shape *shape)
{
    return 1 + (shape->problem->pre_add.data != NULL) + (shape->direction == BACKWARD) + reads_du(shape) +
           reads_post(shape);
}

int normfuse_cuda_results_of(const struct shape *shape)
{
    const struct normfuse_problem *const p = shape->problem;
    return shape->direction == FORWARD ? 1 + (p->u.data != NULL) : (p->dx.data != NULL) + (p->dpost_add.data != NULL);
}

struct normfuse_cuda_geometry *normfuse_cuda_begin_step(struct step *step)
{
    *step =
        (struct step){.variant = step->variant,
                      .geometry = {.parts = 1, .passes = 1, .block_groups = 1, .parts_a_sample = 1}};
    return &step->geometry;
}

/* `additions` has more instructions a value than the memory leaves time for: over rows, where vectors may be unaligned,
 * with rare derivatives, and of 16 bits most. */
struct shape normfuse_cuda_shape_held(const struct shape *given)
{
    struct shape shape = *given;
    const bool columns = given->problem->columns, backward = given->direction == BACKWARD;
    const double of_columns = backward && is_rare(given->problem->activation) ? 1.7 : 1.15;
    shape.elements = (int)(16 / normfuse_type_bytes(given->problem->type));
    const double stretch = columns ? of_columns : !backward ? 1.6 : shape.elements > 4 ? 1.5 : 1.35;
    shape.unaligned = !columns;
    const int tensors = normfuse_cuda_tensors_of(given) + rereads_post(given) + normfuse_cuda_results_of(given);
    shape.bytes = stretch * given->tensor_bytes * tensors;
    return shape;
}

int32_t normfuse_cuda_passing_of(const struct shape *shape)
{
    const struct normfuse_problem *const p = shape->problem;
    if (!shape->additions)
        return 0;
    const bool one = p->pre_add.data != NULL || reads_post(shape);
    return (int32_t)maximum(one, rereads_post(shape) + reads_du(shape));
}

const char *normfuse_cuda_refused(const struct schedule *schedule, const struct shape *shape)
{
    const struct normfuse_problem *const p = shape->problem;
    const int lacks = ~schedule->needs, needs = schedule->needs;
    const bool given = p->sets == NORMFUSE_SETS_NONE;
    return (lacks & IS_GENERAL) && shape->device->general_alone       ? "the GPU has the general kernels alone"
           : (lacks & TAKES_GIVEN) && given                           ? "there are no norm groups"
           : (lacks & TAKES_BIAS) && p->pre_bias.data != NULL         ? "it adds no pre_bias"
           : (lacks & TAKES_PRELU) && p->activation == NORMFUSE_PRELU ? "it has no slopes of prelu"
           : (needs & NEEDS_PLAIN) && !shape->plain && !((needs & TAKES_ADDITIONS) && shape->additions)
               ? "it takes plain tensors"
           : schedule->refuse != NULL ? schedule->refuse(shape)
                                      : NULL;
}

bool normfuse_cuda_takes(const struct schedule *schedule, const struct shape *shape)
{
    struct step step = {0};
    return normfuse_cuda_refused(schedule, shape) == NULL && schedule->configure(shape, &step) == NULL;
}

/* Of the variants of a schedule the cheapest. Returns why there is none. */
static const char *try_schedule(const struct schedule *schedule, const struct shape *given, struct step *found,
                                double *lowest)
{
    const char *reason = normfuse_cuda_refused(schedule, given);
    if (reason != NULL)
        return reason;
    const bool adds = (schedule->needs & TAKES_ADDITIONS) && given->additions;
    const struct shape held = adds ? normfuse_cuda_shape_held(given) : *given, *const shape = &held;
    struct step step = {0};
    for (int variant = 0; variant < maximum(1, schedule->variants); variant++) {
        step.variant = variant;
        const char *const why = schedule->configure != NULL ? schedule->configure(shape, &step) : NULL;
        if (why != NULL) {
            reason = why;
            continue;
        }
        const double time = schedule->estimate(shape, &step);
        if (time < *lowest) {
            *lowest = time;
            *found = step;
        }
    }
    return *lowest < INFINITY ? NULL : reason != NULL ? reason : "no variant runs on this device";
}

double normfuse_cuda_estimate_once(const struct shape *shape, const struct step *step)
{
    const struct normfuse_cuda_geometry *const g = &step->geometry;
    /* Forward a warp of each block reads what all blocks of its norm group found, and joins it: 1x24x651x168 f32 with
     * two groups, 132 blocks each, 14.3 us, 1x256x64x64 with 32 8.4. */
    const double part_wait = shape->direction == FORWARD ? 0.03 : 0.0;
    const double slots = (double)maximum(1, resident_blocks(shape, step)), blocks = (double)step->launch.grid;
    const double waves = ceil(blocks / slots), filled = waves < 4.0 && waves > 1.0 ? blocks / (waves * slots) : 1.0;
    double time = shape->bytes / (shape->policy->bytes_a_microsecond * reach_of(shape, blocks, slots) * filled) +
                  normfuse_cuda_start[shape->direction];
    if (g->exchange == NORMFUSE_EXCHANGE_CLUSTER)
        time += normfuse_cuda_cluster_wait;
    if (g->exchange == NORMFUSE_EXCHANGE_GRID)
        time += shape->policy->grid_wait[shape->direction] * (double)divide_up(g->all_block_groups, g->block_groups) +
                part_wait * g->parts;
    return time;
}

struct normfuse_cuda_choice *normfuse_cuda_choice(void)
{
    static _Thread_local struct normfuse_cuda_choice choice;
    return &choice;
}

bool normfuse_cuda_hold(const struct shape *given, struct step *best)
{
    struct shape shape = *given;
    const bool columns = shape.problem->columns;
    const struct schedule *const *list = columns ? normfuse_cuda_columns_schedules : normfuse_cuda_rows_schedules;
    const struct schedule *taken = NULL;
    struct step step;
    shape.has_pipeline = columns && normfuse_cuda_takes(&normfuse_cuda_grid_pipeline, &shape);
    const double twice = normfuse_cuda_stream.estimate(&shape, NULL);
    double lowest = INFINITY, of_taken = INFINITY;
    const char *const only = normfuse_cuda_choice()->only;
    for (; *list != NULL; list++) {
        const struct schedule *const schedule = *list;
        if (lowest <= 0.0 && schedule != &normfuse_cuda_single && !shape.explains && only == NULL)
            continue;
        double own = INFINITY;
        const char *const reason = try_schedule(schedule, &shape, &step, &own);
        const bool is_only = only != NULL && strcmp(schedule->name, only) == 0;
        /* No order holds where two passes take less. The last one, `single`, is compared by its time with what is taken. */
        const bool in_order = schedule->in_order && 0.95 * own <= twice, is_last = schedule == &normfuse_cuda_single;
        const double time = reason != NULL ? INFINITY : is_only ? -1.0 : in_order ? 0.0 : own;
        if (shape.explains && reason != NULL)
            fprintf(stderr, "normfuse: plan: %s: %s: refused: %s\n", shape.problem->name, schedule->name, reason);
        else if (shape.explains)
            fprintf(stderr, "normfuse: plan: %s: %s: %.1f us%s\n", shape.problem->name, schedule->name, own,
                    in_order ? ", taken before all below" : "");
        /* Where one block of another kernel has a norm group of rows, that is what `single` is for. */
        const bool is_its = !columns && taken != NULL && taken->configure != NULL && best->geometry.parts == 1;
        if (is_last && lowest >= 0.0 ? time < (is_its ? INFINITY : of_taken) : time < lowest) {
            lowest = time;
            of_taken = own;
            taken = schedule;
            *best = step;
        }
    }
    normfuse_cuda_choice()->taken = taken != NULL ? taken->name : NULL;
    return taken != NULL && taken->configure != NULL;
}
