/* SPDX-License-Identifier: MIT
 *
 * schedules.c - tries the schedules; see schedules.h. */
#include "schedules.h"

#include <stdio.h>
#include <string.h>

const struct schedule *const normfuse_cuda_schedules[] = {&normfuse_cuda_single, &normfuse_cuda_held,
                                                          &normfuse_cuda_stream, NULL};

struct normfuse_cuda_choice *normfuse_cuda_choice(void)
{
    static _Thread_local struct normfuse_cuda_choice choice;
    return &choice;
}

bool normfuse_cuda_hold(const struct shape *shape, struct step *best)
{
    const char *const only = normfuse_cuda_choice()->only, *const call = shape->problem->name;
    const struct schedule *taken = NULL;
    double lowest = INFINITY;
    for (const struct schedule *const *list = normfuse_cuda_schedules; *list != NULL; list++) {
        struct step step;
        const bool is_other = is_of_single(shape->problem) && *list != &normfuse_cuda_single;
        const char *const reason = is_other ? "`single` alone computes it" : (*list)->configure(shape, &step);
        const bool is_only = only != NULL && strcmp((*list)->name, only) == 0;
        const double time = reason != NULL ? INFINITY : is_only ? -1.0 : step.microseconds;
        if (shape->explains && reason != NULL)
            fprintf(stderr, "normfuse: plan: %s: %s: refused: %s\n", call, (*list)->name, reason);
        else if (shape->explains)
            fprintf(stderr, "normfuse: plan: %s: %s: %.1f us\n", call, (*list)->name, step.microseconds);
        if (time < lowest) {
            lowest = time;
            taken = *list;
            if (taken != &normfuse_cuda_stream)
                *best = step;
        }
    }
    normfuse_cuda_choice()->taken = taken != NULL ? taken->name : NULL;
    return taken != NULL && taken != &normfuse_cuda_stream;
}
