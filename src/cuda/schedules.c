/* SPDX-License-Identifier: MIT
 *
 * schedules.c - asks the schedules; see schedules.h. */
#include "schedules.h"

#include <math.h>
#include <stdio.h>

struct normfuse_cuda_divisor normfuse_cuda_divisor_of(int64_t value)
{
    struct normfuse_cuda_divisor by = {.divisor = (uint32_t)most(1, value)};
    while ((INT64_C(1) << by.shift) < by.divisor)
        by.shift++;
    by.multiplier = (uint32_t)((UINT64_C(1) << 32) * ((UINT64_C(1) << by.shift) - by.divisor) / by.divisor + 1);
    return by;
}

int64_t normfuse_cuda_resident_blocks(const struct shape *shape, const struct step *step)
{
    if (step->cluster > 1) {
        const struct normfuse_cuda_launch launch = {.kernel = step->kernel,
                                                    .grid = step->cluster,
                                                    .threads = step->threads,
                                                    .cluster = step->cluster,
                                                    .shared = step->shared};
        return (int64_t)normfuse_cuda_resident_clusters(shape->device, &launch) * step->cluster;
    }
    return (int64_t)normfuse_cuda_blocks_per_processor(shape->device, step->kernel, step->threads, step->shared) *
           shape->device->processors;
}

/* Of the variants of a schedule the cheapest. Returns why there is none. */
static const char *ask(const struct schedule *schedule, const struct shape *shape, const struct step *best,
                       struct step *found, double *lowest)
{
    const int64_t wanted = normfuse_experiment(schedule->name, 1);
    const char *reason = wanted == 0                ? "left out by NORMFUSE_EXPERIMENT"
                         : schedule->refuse != NULL ? schedule->refuse(shape)
                                                    : NULL;
    if (reason == NULL && schedule->yield != NULL && best != NULL)
        reason = schedule->yield(shape, best);
    if (reason != NULL)
        return reason;
    const int variants = schedule->variants != NULL ? schedule->variants(shape) : 1;
    for (int variant = 0; variant < variants; variant++) {
        struct step step = {0};
        const char *const why = schedule->configure != NULL ? schedule->configure(shape, variant, &step) : NULL;
        if (why != NULL) {
            reason = why;
            continue;
        }
        const double time = schedule->estimate != NULL ? schedule->estimate(shape, &step) : 0.0;
        if (time < *lowest) {
            *lowest = time;
            *found = step;
        }
    }
    if (wanted == 2 && *lowest < INFINITY)
        *lowest = -1.0;
    return *lowest < INFINITY ? NULL : reason != NULL ? reason : "no variant runs on this device";
}

bool normfuse_cuda_hold(const struct shape *given, struct step *best)
{
    struct shape shape = *given;
    const bool columns = shape.problem->columns;
    const struct schedule *const *list = columns ? normfuse_cuda_columns_schedules : normfuse_cuda_rows_schedules;
    const struct schedule *const pipeline = &normfuse_cuda_grid_pipeline, *taken = NULL;
    struct step step;
    shape.has_pipeline =
        columns && normfuse_experiment(pipeline->name, 1) != 0 && pipeline->configure(&shape, 0, &step) == NULL;
    double lowest = INFINITY;
    for (; *list != NULL && (lowest > 0.0 || shape.explains); list++) {
        const struct schedule *const schedule = *list;
        double time = INFINITY;
        const char *const reason = ask(schedule, &shape, taken != NULL ? best : NULL, &step, &time);
        if (shape.explains && reason != NULL)
            fprintf(stderr, "normfuse: plan: %s: %s: refused: %s\n", shape.problem->name, schedule->name, reason);
        else if (shape.explains && schedule->estimate == NULL)
            fprintf(stderr, "normfuse: plan: %s: %s: fits\n", shape.problem->name, schedule->name);
        else if (shape.explains)
            fprintf(stderr, "normfuse: plan: %s: %s: %.1f us\n", shape.problem->name, schedule->name, time);
        if (time < lowest) {
            lowest = time;
            taken = schedule;
            *best = step;
        }
    }
    return taken != NULL && taken->configure != NULL;
}
