/* SPDX-License-Identifier: MIT
 *
 * bench_page.h - the page of `normfuse bench --html`: the machine, a roofline and the rows, in one file that fetches
 * nothing and has no program in it. */
#ifndef NORMFUSE_CLI_BENCH_PAGE_H
#define NORMFUSE_CLI_BENCH_PAGE_H

#include <stdbool.h>
#include <stddef.h>

#include "arguments.h"
#include "bench.h"
#include "output.h"

/* One problem, timed. */
struct bench_row {
    const struct problem_line *line;
    double bytes; /* that the floor moves */
    struct bench_result result;
};

/* The rows of one direction and device: what `normfuse bench --random` prints at its end. */
struct bench_summary {
    int64_t problems;
    double geomean, p90, worst; /* of the ratios */
    double over_us;             /* the greatest median_us - 4 * floor_us */
    const struct problem_line *worst_line;
};

/* false: there is no row. Ends the program without memory. */
bool bench_summarize(const struct bench_row *rows, size_t count, int32_t device, bool backward,
                     struct bench_summary *summary);

struct bench_page {
    const struct arguments *arguments;
    const normfuse_information *info;
    const struct bench_row *rows;
    size_t count;
    const char *commit, *date;
    int threads;
    bool warm;
};

void bench_page_write(struct output *output, const struct bench_page *page);

#endif
