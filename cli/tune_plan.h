/* SPDX-License-Identifier: MIT
 *
 * tune_plan.h - what the planner says of a timed problem on a GPU, and how one of its schedules is made to run: by a
 * tuning that forbids all others. Through the library's own parts, which only the static library has; nothing here runs
 * a kernel. */
#ifndef NORMFUSE_CLI_TUNE_PLAN_H
#define NORMFUSE_CLI_TUNE_PLAN_H

#include "bench.h"
#include "tune_rows.h"

enum { TUNE_SCHEDULES_MAX = 16 };

/* The rows of a problem, without times: one for each schedule that takes it, in the planner's order. Fewer than two:
 * there is no choice. The tensors of `bench` need addresses, and its exec sync memory. What holds then is the last
 * schedule; tune_release ends that. */
int tune_ask(const struct bench *bench, const char *problem, int32_t capability,
             struct tune_row rows[static TUNE_SCHEDULES_MAX]);
/* Makes calls of this layout and direction run by one schedule, until the next tuning. */
void tune_force(const struct tune_row *row);
/* Back to the built-in tables. */
void tune_release(void);
/* Plans the call of `bench` anew by what was loaded, or with nothing loaded by the built-in table of a device. NULL: no
 * schedule holds it. */
const char *tune_taken(const struct bench *bench, int32_t capability, const char *gpu);

/* The problems that `normfuse tune` measures, a line each; to NULL. */
extern const char *const tune_problems[];

#endif
