/* SPDX-License-Identifier: MIT
 *
 * tune_fit.c - see tune_fit.h. Layouts and directions share nothing, so each of the four is fitted alone: by coordinate
 * descent on the regret, smoothed so that small steps show, with a little of the squared error of estimates, which
 * decides where no choice does. */
#include "tune_fit.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A fit that gains less, on problems that it was not made of, says more of the problems than of the GPU. */
static const double gain_least = 0.01;
enum { FOLDS = 5 };
static const double factor_least = 0.2, factor_most = 5.0, start_least = -20.0, start_most = 50.0;

/* ---- regret ----------------------------------------------------------------------------------------------------- */

bool tune_is_first(const struct tune_row *rows, size_t row)
{
    for (size_t i = 0; i < row; i++)
        if (strcmp(rows[i].problem, rows[row].problem) == 0)
            return false;
    return true;
}

bool tune_sum_add(struct tune_sum *sum, const struct tune_row *rows, size_t count, size_t first, const char *schedule)
{
    double best = (double)INFINITY, taken = 0;
    for (size_t i = first; i < count; i++)
        if (strcmp(rows[i].problem, rows[first].problem) == 0) {
            best = fmin(best, rows[i].us);
            if (strcmp(rows[i].schedule, schedule) == 0)
                taken = rows[i].us;
        }
    if (taken <= 0)
        return false;
    sum->problems++;
    sum->logs += log(taken / best);
    if (taken / best - 1 > sum->worst || sum->problems == 1) {
        sum->worst = taken / best - 1;
        memcpy(sum->worst_problem, rows[first].problem, sizeof sum->worst_problem);
    }
    return true;
}

struct tune_regret tune_sum_regret(const struct tune_sum *sum)
{
    struct tune_regret regret = {.mean = sum->problems ? expm1(sum->logs / sum->problems) : 0, .worst = sum->worst};
    memcpy(regret.worst_problem, sum->worst_problem, sizeof regret.worst_problem);
    return regret;
}

/* ---- one layout and direction ----------------------------------------------------------------------------------- */

struct seen {
    const struct tune_row *row;
    int line; /* of the group */
};

struct group {
    struct tune_line *lines; /* those of the fit that are this group's */
    int line_count;
    struct seen *seen; /* by problems */
    int *first;        /* of each problem, and of the end */
    int problems;
};

/* What the planner makes of a line and a schedule's own estimate. */
static double time_of(const struct tune_line *line, double estimate)
{
    return line->keeps_rule ? 1e-3 : fmax(1e-3, line->start + line->factor * estimate);
}

static double least_us(const struct group *group, int problem)
{
    double us = (double)INFINITY;
    for (int i = group->first[problem]; i < group->first[problem + 1]; i++)
        us = fmin(us, group->seen[i].row->us);
    return us;
}

/* The row of a problem that is taken by the lines. */
static const struct tune_row *taken_by_lines(const struct group *group, int problem)
{
    const struct tune_row *taken = NULL;
    double least = (double)INFINITY;
    for (int i = group->first[problem]; i < group->first[problem + 1]; i++) {
        const double time = time_of(&group->lines[group->seen[i].line], group->seen[i].row->estimate);
        if (time < least) {
            least = time;
            taken = group->seen[i].row;
        }
    }
    return taken;
}

/* And by the planner's rules; the rows of a file may say of none that it is. */
static const struct tune_row *taken_by_rules(const struct group *group, int problem)
{
    for (int i = group->first[problem]; i < group->first[problem + 1]; i++)
        if (group->seen[i].row->taken)
            return group->seen[i].row;
    return NULL;
}

/* What is made small. A schedule whose time is as many times the least as exp(softness) counts a third of that. */
static double objective(const struct group *group)
{
    const double softness = 0.04, of_errors = 0.02;
    double regrets = 0, errors = 0;
    for (int problem = 0; problem < group->problems; problem++) {
        const double best = log(least_us(group, problem));
        double least = (double)INFINITY, weights = 0, regret = 0;
        for (int i = group->first[problem]; i < group->first[problem + 1]; i++)
            least = fmin(least, time_of(&group->lines[group->seen[i].line], group->seen[i].row->estimate));
        for (int i = group->first[problem]; i < group->first[problem + 1]; i++) {
            const struct seen *const seen = &group->seen[i];
            const double time = time_of(&group->lines[seen->line], seen->row->estimate), us = log(seen->row->us);
            const double weight = exp((log(least) - log(time)) / softness), error = log(time) - us;
            weights += weight;
            regret += weight * (us - best);
            errors += error * error;
        }
        regret /= weights;
        regrets += regret + 2 * regret * regret; /* a great one counts more: the worst is bounded, too */
    }
    return regrets / group->problems + of_errors * errors / group->first[group->problems];
}

/* Changes one line by a step where that is possible and better. */
static bool improve(const struct group *group, struct tune_line *line, double by_factor, double by_start, double *least)
{
    const struct tune_line before = *line;
    line->factor = fmin(fmax(line->factor * exp(by_factor), factor_least), factor_most);
    line->start = fmin(fmax(line->start + by_start, start_least), start_most);
    const double now = objective(group);
    if (now < *least - 1e-9) {
        *least = now;
        return true;
    }
    *line = before;
    return false;
}

static double descend(const struct group *group)
{
    enum { ROUNDS = 40 };
    const double start_us = 8; /* of a whole step */
    double least = objective(group);
    for (double step = 0.5; step > 0.004; step /= 2)
        for (int round = 0, better = 1; better && round < ROUNDS; round++) {
            better = 0;
            for (int i = 0; i < group->line_count; i++)
                for (int f = -1; f <= 1 && !group->lines[i].keeps_rule; f++)
                    for (int s = -1; s <= 1; s++)
                        /* Of few problems no start: it would say of small ones what a large one did. */
                        if ((f || s) && (s == 0 || group->lines[i].problems > 2))
                            better |= improve(group, &group->lines[i], f * step, s * step * start_us, &least);
        }
    return least;
}

/* Factors that are right in the mean. */
static void begin(const struct group *group, bool by_errors)
{
    for (int i = 0; i < group->line_count; i++) {
        double logs = 0;
        for (int j = 0; j < group->first[group->problems]; j++)
            if (group->seen[j].line == i)
                logs += log(group->seen[j].row->us / group->seen[j].row->estimate);
        group->lines[i].start = 0;
        int rows = 0;
        for (int j = 0; j < group->first[group->problems]; j++)
            rows += group->seen[j].line == i;
        group->lines[i].factor =
            by_errors && rows > 0 ? fmin(fmax(exp(logs / rows), factor_least), factor_most) : 1;
    }
}

static void sum_group(const struct group *group, bool by_lines, struct tune_sum *sum)
{
    for (int problem = 0; problem < group->problems; problem++) {
        const struct tune_row *const taken = by_lines ? taken_by_lines(group, problem) : taken_by_rules(group, problem);
        const double best = least_us(group, problem), ratio = taken ? taken->us / best : 1;
        sum->problems++;
        sum->logs += log(ratio);
        if (ratio - 1 > sum->worst || sum->problems == 1) {
            sum->worst = ratio - 1;
            memcpy(sum->worst_problem, group->seen[group->first[problem]].row->problem, sizeof sum->worst_problem);
        }
    }
}

/* Fills in what is printed of a line. */
static void describe(const struct group *group, int number, bool is_better)
{
    struct tune_line *const line = &group->lines[number];
    double before = 0, after = 0, of_rules = 0, of_lines = 0;
    for (int problem = 0; problem < group->problems; problem++) {
        const struct tune_row *const by_rules = taken_by_rules(group, problem);
        const struct tune_row *const by_lines = is_better ? taken_by_lines(group, problem) : by_rules;
        const double best = least_us(group, problem);
        for (int i = group->first[problem]; i < group->first[problem + 1]; i++) {
            const struct tune_row *const row = group->seen[i].row;
            if (group->seen[i].line != number)
                continue;
            before += fabs(log(row->estimate / row->us));
            after += fabs(log((line->is_written ? time_of(line, row->estimate) : row->estimate) / row->us));
            line->taken_before += row == by_rules;
            line->taken_after += row == by_lines;
            of_rules += row == by_rules ? log(row->us / best) : 0;
            of_lines += row == by_lines ? log(row->us / best) : 0;
        }
    }
    line->error_before = expm1(before / line->problems);
    line->error_after = expm1(after / line->problems);
    line->regret_before = line->taken_before ? expm1(of_rules / line->taken_before) : 0;
    line->regret_after = line->taken_after ? expm1(of_lines / line->taken_after) : 0;
}

/* The lines that fit a group's problems best. */
static void fit_lines(const struct group *group)
{
    struct tune_line by_errors[TUNE_LINES_MAX];
    begin(group, true);
    const double from_errors = descend(group);
    memcpy(by_errors, group->lines, (size_t)group->line_count * sizeof *by_errors);
    begin(group, false);
    if (from_errors <= descend(group))
        memcpy(group->lines, by_errors, (size_t)group->line_count * sizeof *by_errors);
    /* As they are written. */
    for (int i = 0; i < group->line_count; i++) {
        group->lines[i].start = round(group->lines[i].start * 100) / 100;
        group->lines[i].factor = round(group->lines[i].factor * 1000) / 1000;
    }
}

/* The group's problems of one fold, or all others, in memory of the caller's: as much as the group's own. */
static struct group part_of(const struct group *group, int fold, bool others, struct seen *seen, int *first)
{
    struct group part = {.lines = group->lines, .line_count = group->line_count, .seen = seen, .first = first};
    int at = 0;
    for (int problem = 0; problem < group->problems; problem++)
        if ((problem % FOLDS == fold) != others) {
            const int count = group->first[problem + 1] - group->first[problem];
            memcpy(seen + at, group->seen + group->first[problem], (size_t)count * sizeof *seen);
            first[part.problems++] = at;
            at += count;
        }
    first[part.problems] = at;
    return part;
}

/* What lines lose that are fitted to four fifths of the problems, on the other fifth. Infinite without memory. */
static double loss_on_others(const struct group *group)
{
    const int rows = group->first[group->problems];
    struct seen *const seen = malloc((size_t)(rows + 1) * sizeof *seen);
    int *const first = malloc((size_t)(group->problems + 1) * sizeof *first);
    struct tune_sum sum = {0};
    for (int fold = 0; seen && first && fold < FOLDS; fold++) {
        const struct group fitted = part_of(group, fold, true, seen, first);
        if (fitted.problems == 0)
            continue;
        fit_lines(&fitted);
        const struct group rest = part_of(group, fold, false, seen, first);
        sum_group(&rest, true, &sum);
    }
    const double loss = seen && first ? sum.logs : (double)INFINITY;
    free(seen);
    free(first);
    return loss;
}

static void fit_group(struct group *group, struct tune_sum *before, struct tune_sum *after)
{
    struct tune_sum by_rules = {0};
    sum_group(group, false, &by_rules);
    const bool is_better = loss_on_others(group) < by_rules.logs - gain_least * group->problems;
    fit_lines(group);
    for (int i = 0; i < group->line_count; i++) {
        group->lines[i].is_written = is_better && !group->lines[i].keeps_rule;
        describe(group, i, is_better);
    }
    sum_group(group, false, before);
    sum_group(group, is_better, after);
}

/* The lines of one layout and direction, and its rows by problems. */
static const char *collect(const struct tune_row *rows, size_t count, bool columns, bool backward, struct tune_fit *fit,
                           struct group *group)
{
    group->lines = &fit->lines[fit->count];
    int at = 0;
    for (size_t first = 0; first < count; first++) {
        if (rows[first].columns != columns || rows[first].backward != backward || !tune_is_first(rows, first))
            continue;
        group->first[group->problems++] = at;
        for (size_t i = first; i < count; i++) {
            if (strcmp(rows[i].problem, rows[first].problem) != 0)
                continue;
            if (rows[i].columns != columns || rows[i].backward != backward)
                return "a problem has rows of two layouts or directions";
            int line = 0;
            while (line < group->line_count && strcmp(group->lines[line].schedule, rows[i].schedule) != 0)
                line++;
            if (line == group->line_count) {
                if (fit->count + group->line_count == TUNE_LINES_MAX)
                    return "there are too many schedules";
                group->lines[line] = (struct tune_line){.columns = columns, .backward = backward};
                memcpy(group->lines[line].schedule, rows[i].schedule, sizeof rows[i].schedule);
                group->line_count++;
            }
            for (int j = group->first[group->problems - 1]; j < at; j++)
                if (group->seen[j].line == line)
                    return "a problem has two rows of one schedule";
            group->lines[line].problems++;
            group->seen[at++] = (struct seen){&rows[i], line};
        }
    }
    group->first[group->problems] = at;
    enum { FEW_PROBLEMS = 3 };
    for (int i = 0; i < at; i++)
        if (group->seen[i].row->in_order && group->lines[group->seen[i].line].problems < FEW_PROBLEMS)
            group->lines[group->seen[i].line].keeps_rule = true;
    return NULL;
}

const char *tune_fit(const struct tune_row *rows, size_t count, struct tune_fit *fit)
{
    struct tune_sum before = {0}, after = {0};
    *fit = (struct tune_fit){0};
    for (size_t i = 1; i < count; i++)
        if (strcmp(rows[i].gpu, rows[0].gpu) != 0 || rows[i].capability != rows[0].capability)
            return "the rows are of two GPUs";
    struct seen *const seen = malloc((count + 1) * sizeof *seen);
    int *const first = malloc((count + 1) * sizeof *first);
    const char *wrong = count == 0 ? "there are no rows" : seen && first ? NULL : "there is no memory";
    for (int i = 0; i < 4 && !wrong; i++) {
        struct group group = {.seen = seen, .first = first};
        wrong = collect(rows, count, i & 2, i & 1, fit, &group);
        if (wrong || group.problems == 0)
            continue;
        fit_group(&group, &before, &after);
        fit->count += group.line_count;
        fit->problems += group.problems;
    }
    free(seen);
    free(first);
    fit->before = tune_sum_regret(&before);
    fit->after = tune_sum_regret(&after);
    return wrong;
}
