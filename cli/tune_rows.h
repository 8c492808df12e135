/* SPDX-License-Identifier: MIT
 *
 * tune_rows.h - rows of `normfuse tune`: how long one schedule took for one problem. In a file each is a JSON object on
 * one line. */
#ifndef NORMFUSE_CLI_TUNE_ROWS_H
#define NORMFUSE_CLI_TUNE_ROWS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "problem_line.h"

enum { TUNE_NAME_BYTES = 64, TUNE_SCHEDULE_BYTES = 20 };

struct tune_row {
    char problem[PROBLEM_NAME_BYTES];
    char schedule[TUNE_SCHEDULE_BYTES];
    char gpu[TUNE_NAME_BYTES];
    int32_t capability;     /* 90 */
    bool columns, backward; /* of the schedule */
    bool in_order;          /* without a tuning taken before the schedules in later rows of the problem */
    bool taken;             /* without a tuning it is what the problem takes */
    double us, estimate;    /* measured; the schedule's own estimate */
    char driver[TUNE_NAME_BYTES], version[TUNE_NAME_BYTES], date[TUNE_NAME_BYTES];
};

struct tune_rows {
    struct tune_row *rows; /* allocated; those of a problem in the order in which the planner asks schedules */
    size_t count;
};

/* Appends a row. False: there is no memory. */
bool tune_rows_add(struct tune_rows *rows, const struct tune_row *row);
/* Appends those of a file. NULL, or what is wrong, with the line: valid until the next call. */
const char *tune_rows_read(const char *path, struct tune_rows *rows);
/* The line of a row, with its end. Returns its length. */
size_t tune_row_text(const struct tune_row *row, char *text, size_t bytes);

#endif
