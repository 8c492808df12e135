/* SPDX-License-Identifier: MIT
 *
 * tune_fit.h - from rows to the two numbers of each schedule: start and factor, by which the planner corrects the
 * schedule's own estimate. Needs no GPU.
 *
 * The regret of a problem is the time of the schedule that is taken over the least time measured, less 1. What is made
 * small is the regret, not the error of estimates: of a schedule that is never the fastest the estimate may be wrong.
 */
#ifndef NORMFUSE_CLI_TUNE_FIT_H
#define NORMFUSE_CLI_TUNE_FIT_H

#include "tune_rows.h"

enum { TUNE_LINES_MAX = 64 };

struct tune_line {
    char schedule[TUNE_SCHEDULE_BYTES];
    bool columns, backward;
    bool is_written; /* false: the rules of the planner hold for this layout and direction, since they lose less, */
    bool keeps_rule; /* or for this schedule, which is taken in order and was measured on too few problems */
    double start, factor;
    int problems;                       /* that it was measured on, */
    int taken_before, taken_after;      /* and that take it without the tuning, and with it */
    double error_before, error_after;   /* geometric mean of how far estimates are off, less 1 */
    double regret_before, regret_after; /* geometric mean over the problems that take it */
};

struct tune_regret {
    double mean, worst; /* geometric mean; greatest */
    char worst_problem[PROBLEM_NAME_BYTES];
};

struct tune_fit {
    struct tune_line lines[TUNE_LINES_MAX];
    int count, problems;
    struct tune_regret before, after;
};

/* Of rows of one GPU. NULL, or what is wrong. */
const char *tune_fit(const struct tune_row *rows, size_t count, struct tune_fit *fit);

/* Which row of each problem is taken, given the schedule's name: adds up regrets. */
struct tune_sum {
    double logs, worst;
    int problems;
    char worst_problem[PROBLEM_NAME_BYTES];
};
/* `first` is the first row of a problem; `schedule` what takes it. False: the schedule was not measured there. */
bool tune_sum_add(struct tune_sum *sum, const struct tune_row *rows, size_t count, size_t first, const char *schedule);
struct tune_regret tune_sum_regret(const struct tune_sum *sum);
/* Whether no row before this one is of its problem. */
bool tune_is_first(const struct tune_row *rows, size_t row);

#endif
