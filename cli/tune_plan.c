/* SPDX-License-Identifier: MIT
 *
 * tune_plan.c - see tune_plan.h. */
#include "tune_plan.h"

#ifdef NORMFUSE_HAVE_CUDA

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "report.h"
#include "src/cuda/schedules.h"

/* Tunings that were in force: none is ever freed, since plans are remembered by their addresses. */
struct kept {
    struct kept *before;
    struct normfuse_cuda_tuning tuning;
    struct normfuse_cuda_tuning_line lines[];
};
static struct kept *all_kept;

/* Takes a copy: what is planned by it is planned anew. */
static void use(int32_t capability, const struct normfuse_cuda_tuning_line *lines, int32_t count)
{
    struct kept *const kept = malloc(sizeof *kept + (size_t)count * sizeof *lines);
    if (!kept)
        report_failure("memory", "%s", strerror(errno));
    *kept = (struct kept){.before = all_kept, .tuning = {"measuring", capability, count, kept->lines}};
    if (count > 0)
        memcpy(kept->lines, lines, (size_t)count * sizeof *lines);
    all_kept = kept;
    normfuse_cuda_use_tuning(&kept->tuning);
}

void tune_release(void)
{
    normfuse_cuda_use_tuning(NULL);
}

/* What holds the call of `bench`, planned by what is in force; a schedule NULL: nothing. */
static struct normfuse_cuda_choice plan(const struct bench *bench)
{
    size_t bytes;
    normfuse_cuda_last_choice()->schedule = NULL;
    if (bench_call(bench, &bench->tensors, bench->line.backward, &bytes) != NORMFUSE_OK)
        report_failure("tune", "%s", normfuse_last_error());
    return *normfuse_cuda_last_choice();
}

void tune_force(const struct tune_row *row)
{
    struct normfuse_cuda_tuning_line lines[TUNE_SCHEDULES_MAX] = {0};
    const struct schedule *const *list = row->columns ? normfuse_cuda_columns_schedules : normfuse_cuda_rows_schedules;
    int32_t count = 0;
    for (; list[count] != NULL && count < TUNE_SCHEDULES_MAX; count++) {
        struct normfuse_cuda_tuning_line *const line = &lines[count];
        line->schedule = normfuse_cuda_schedule_code(list[count]->name);
        line->columns = row->columns;
        line->backward = row->backward;
        line->start = strcmp(list[count]->name, row->schedule) == 0 ? 0.0f : (float)NORMFUSE_CUDA_FORBIDDEN;
        line->factor = 1.0f;
    }
    use(row->capability, lines, count);
}

int tune_ask(const struct bench *bench, const char *problem, int32_t capability,
             struct tune_row rows[static TUNE_SCHEDULES_MAX])
{
    use(capability, NULL, 0);
    const struct normfuse_cuda_choice usual = plan(bench);
    if (!usual.schedule)
        return 0;
    const struct schedule *const *list = usual.columns ? normfuse_cuda_columns_schedules : normfuse_cuda_rows_schedules;
    int count = 0;
    for (; *list != NULL && count < TUNE_SCHEDULES_MAX; list++) {
        struct tune_row *const row = &rows[count];
        *row = (struct tune_row){.capability = capability,
                                 .columns = usual.columns,
                                 .backward = bench->line.backward,
                                 .in_order = (*list)->in_order,
                                 .taken = *list != NULL && strcmp((*list)->name, usual.schedule) == 0};
        strncpy(row->problem, problem, sizeof row->problem - 1);
        strncpy(row->schedule, (*list)->name, sizeof row->schedule - 1);
        tune_force(row);
        const struct normfuse_cuda_choice forced = plan(bench);
        row->estimate = forced.estimate;
        count += forced.schedule != NULL && strcmp(forced.schedule, row->schedule) == 0;
    }
    return count;
}

const char *tune_taken(const struct bench *bench, int32_t capability, const char *gpu)
{
    const struct normfuse_cuda_tuning *const loaded = normfuse_cuda_loaded_tuning();
    const struct normfuse_cuda_device device = {.capability = capability, .name = gpu};
    const struct normfuse_cuda_tuning *const held = normfuse_cuda_tuning_of(loaded, &device);
    use(capability, held->lines, held->count);
    const char *const schedule = plan(bench).schedule;
    normfuse_cuda_use_tuning(loaded);
    return schedule;
}

#else

int tune_ask(const struct bench *bench, const char *problem, int32_t capability,
             struct tune_row rows[static TUNE_SCHEDULES_MAX])
{
    (void)bench, (void)problem, (void)capability, (void)rows;
    return 0;
}

void tune_force(const struct tune_row *row)
{
    (void)row;
}

void tune_release(void)
{
}

const char *tune_taken(const struct bench *bench, int32_t capability, const char *gpu)
{
    (void)bench, (void)capability, (void)gpu;
    return NULL;
}

#endif
