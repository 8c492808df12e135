/* SPDX-License-Identifier: MIT
 *
 * tune.c - `normfuse tune`: measures the schedules of the GPU's planner, and writes a tuning file. */
#define _GNU_SOURCE
#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "bench.h"
#include "commands.h"
#include "device.h"
#include "output.h"
#include "random.h"
#include "report.h"
#include "src/cuda/tuning.h"
#include "tune_fit.h"
#include "tune_plan.h"
#include "tune_rows.h"

enum {
    OPTION_OUTPUT,
    OPTION_DEVICE,
    OPTION_SECONDS,
    OPTION_ROWS,
    OPTION_FROM_ROWS,
    OPTION_SOURCE,
    OPTION_LIST,
    OPTION_COUNT
};

static const struct option options[OPTION_COUNT] = {
    [OPTION_OUTPUT] = {"output", 'o', "FILE", "Write the tuning to FILE (normfuse.tuning)."},
    [OPTION_DEVICE] = {"device", 'd', "N", "Measure CUDA device N (0)."},
    [OPTION_SECONDS] = {"seconds", 0, "S", "Take about S seconds (120)."},
    [OPTION_ROWS] = {"rows", 0, "FILE", "Write what was measured to FILE, one JSON object a schedule and problem."},
    [OPTION_FROM_ROWS] = {"from-rows", 0, "FILE",
                          "Measure nothing: take the rows of FILE, and of further files that are "
                          "named as words. Needs no GPU."},
    [OPTION_SOURCE] = {"source", 0, NULL,
                       "Write the library's own tables, a table for each GPU of the rows, in place of a "
                       "tuning file."},
    [OPTION_LIST] = {"list", 'l', NULL, "Print the problems, one a line, and do nothing with them."},
};

static int tune_main(const struct arguments *arguments);

const struct command tune_command = {
    .name = "tune",
    .summary = "measure a GPU's schedules, and write a tuning file",
    .synopsis = "tune [-o FILE] [--device N] [--seconds S] [--rows FILE]\n"
                "tune --from-rows FILE [FILE]... [-o FILE] [--source]\n"
                "tune --list\n",
    .description = "A call on a GPU may be run by several schedules of kernels, and the library takes the one\n"
                   "that it estimates to be the fastest. This command measures how long each takes for a list\n"
                   "of problems, and 80 that are drawn, on the GPU of this machine, in two minutes. It writes a\n"
                   "tuning: for each schedule a start in microseconds and a factor that correct its estimate.\n"
                   "\n"
                   "The library plans by the file where NORMFUSE_TUNING names it, or a program gives it to\n"
                   "normfuse_load_tuning, on GPUs of the same compute capability. Results stay within the\n"
                   "bounds; their last bits may change with the schedule.\n"
                   "\n"
                   "Measure on a quiet GPU. Tensors rotate, so that none is in the L2; the schedules of a\n"
                   "problem are timed in turn, as graphs of calls. Numbers are chosen that make the regret\n"
                   "small: the time of the schedule taken over the least one, less 1. Where numbers that were\n"
                   "fitted to four fifths of the problems lose more on the others than the planner's own rules,\n"
                   "the tuning has no lines for that layout and direction.\n",
    .options = options,
    .option_count = OPTION_COUNT,
    .sections = {"OUTPUT\n"
                 "    A table of the schedules: the problems that each was measured on; how many of them it is\n"
                 "    taken for, how far its estimate is off, and the regret where it is taken, each without the\n"
                 "    tuning and with it. rows are NCHW, columns NHWC. The last line is the regret of all\n"
                 "    problems: geometric mean, and worst.\n"
                 "\n"
                 "    Rows (--rows) have the members problem, layout (rows or columns), dir, schedule, us\n"
                 "    (median), estimate_us (the schedule's own), in_order (without a tuning taken before the\n"
                 "    schedules in later rows of the problem), taken (without a tuning), gpu, cc, driver,\n"
                 "    version and date.\n"
                 "\n"
                 "    A tuning file is text, a line a schedule, and may be edited:\n"
                 "\n"
                 "        normfuse tuning 1\n"
                 "        gpu NVIDIA H200\n"
                 "        capability 9.0\n"
                 "        schedule columns forward split start 0.4 factor 1.07\n"
                 "        end\n"
                 "\n"
                 "EXAMPLES\n"
                 "    normfuse tune -o h200.tuning --rows h200.jsonl\n"
                 "    NORMFUSE_TUNING=h200.tuning normfuse bench @problems.txt\n"
                 "    normfuse tune --from-rows h200.jsonl -o h200.tuning\n"},
    .main = tune_main,
};

/* ---- rows ------------------------------------------------------------------------------------------------------- */

/* Beside the list: problems with every dtype, addition and activation, which nobody chose. */
enum { DRAWN = 80, DRAWN_SEED = 20, DRAWN_LEAST_BYTES = 128 << 10, DRAWN_MOST_BYTES = 192 << 20 };

/* Every problem of the list, and those that are drawn. */
static struct problem_line *read_problems(size_t *count)
{
    struct problem_line *lines;
    size_t words = 0;
    while (tune_problems[words])
        words++;
    char **const copies = calloc(words + 1, sizeof *copies);
    for (size_t i = 0; copies && i < words; i++)
        if (!(copies[i] = strdup(tune_problems[i])))
            report_failure("memory", "%s", strerror(errno));
    if (!copies)
        report_failure("memory", "%s", strerror(errno));
    const char *const wrong = problem_lines_read((int)words, copies, &lines, count);
    if (wrong)
        report_failure("tune", "%s", wrong);
    for (size_t i = 0; i < words; i++)
        free(copies[i]);
    free(copies);
    struct problem_line *const all = realloc(lines, (*count + DRAWN) * sizeof *lines);
    if (!all)
        report_failure("memory", "%s", strerror(errno));
    for (int i = 0; i < DRAWN; i++) {
        all[*count] = random_problem(DRAWN_SEED, i, DRAWN_LEAST_BYTES, DRAWN_MOST_BYTES);
        all[*count].device = NORMFUSE_CUDA;
        ++*count;
    }
    return all;
}

static void force(const void *rows, int way)
{
    tune_force((const struct tune_row *)rows + way);
}

static void show_progress(size_t done, size_t count, const char *name)
{
    static const char full[] = "==============================";
    const int width = (int)sizeof full - 1, filled = (int)(done * (size_t)width / count);
    char text[80];
    if (!isatty(STDERR_FILENO))
        return;
    snprintf(text, sizeof text, "[%.*s%*s] %3d %%  %.36s", filled, full, width - filled, "", (int)(done * 100 / count),
             name);
    report_progress(text);
}

static void add_row(struct tune_rows *rows, const struct tune_row *row)
{
    if (!tune_rows_add(rows, row))
        report_failure("memory", "%s", strerror(errno));
}

static void measure(double seconds, struct tune_rows *rows)
{
    size_t count;
    struct problem_line *const lines = read_problems(&count);
    char date[TUNE_NAME_BYTES], name[PROBLEM_NAME_BYTES];
    const time_t now = time(NULL);
    struct tm utc;
    gmtime_r(&now, &utc);
    strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", &utc);
    bench_device_open(lines, count, false);
    const struct device_facts *const facts = device_facts();
    const double end = bench_now_us() + seconds * 1e6;
    for (size_t i = 0; i < count; i++) {
        static struct bench bench;
        struct tune_row problem[TUNE_SCHEDULES_MAX];
        double us[TUNE_SCHEDULES_MAX];
        problem_line_name(&lines[i], name, sizeof name);
        show_progress(i, count, name);
        tune_release();
        bench_device_make(&bench, &lines[i], name);
        const int ways = tune_ask(&bench, name, facts->capability, problem);
        if (ways > 1) {
            const double left = end - bench_now_us();
            bench_device_ways(&bench, ways, force, problem, left / (double)(count - i), us);
        }
        tune_release();
        bench_device_free(&bench);
        for (int way = 0; ways > 1 && way < ways; way++) {
            struct tune_row *const row = &problem[way];
            /* As they are written, so that a fit of the file is this one. */
            row->us = round(us[way] * 1000) / 1000;
            row->estimate = round(row->estimate * 1000) / 1000;
            snprintf(row->gpu, sizeof row->gpu, "%.63s", facts->name);
            snprintf(row->driver, sizeof row->driver, "%.63s", facts->driver);
            snprintf(row->version, sizeof row->version, "%s", normfuse_version());
            memcpy(row->date, date, sizeof date);
            add_row(rows, row);
        }
    }
    report_progress(NULL);
    free(lines);
}

static void write_rows(struct output *output, const struct tune_rows *rows)
{
    for (size_t i = 0; i < rows->count; i++) {
        char text[2048];
        output_write(output, text, tune_row_text(&rows->rows[i], text, sizeof text));
    }
}

/* ---- tunings ---------------------------------------------------------------------------------------------------- */

__attribute__((format(printf, 2, 3))) static void write_text(struct output *output, const char *format, ...)
{
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    const int length = vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    output_write(output, text, length < (int)sizeof text ? (size_t)length : sizeof text - 1);
}

static void write_tuning(struct output *output, const struct tune_row *row, const struct tune_fit *fit)
{
    write_text(output, "normfuse tuning 1\n# normfuse tune %s, %s, driver %s: %d problems, regret %.1f %% -> %.1f %%\n",
               row->version, row->date, row->driver, fit->problems, 100 * fit->before.mean, 100 * fit->after.mean);
    write_text(output, "gpu %.47s\ncapability %d.%d\n", row->gpu, (int)row->capability / 10, (int)row->capability % 10);
    for (int i = 0; i < fit->count; i++) {
        const struct tune_line *const line = &fit->lines[i];
        if (line->is_written)
            write_text(output, "schedule %s %s %s start %.2f factor %.3f\n", line->columns ? "columns" : "rows",
                       line->backward ? "backward" : "forward", line->schedule, line->start, line->factor);
    }
    write_text(output, "end\n");
}

/* The name without what tells variants of memory and form apart: "NVIDIA H100 80GB HBM3" is a table of all H100. */
static void short_name(const char *gpu, char out[static TUNE_NAME_BYTES])
{
    size_t length = strcspn(gpu, " ");
    length += gpu[length] ? 1 + strcspn(gpu + length + 1, " ") : 0;
    snprintf(out, TUNE_NAME_BYTES, "%.*s", (int)length, gpu);
}

static int written_lines(const struct tune_fit *fit)
{
    int count = 0;
    for (int i = 0; i < fit->count; i++)
        count += fit->lines[i].is_written;
    return count;
}

/* One GPU's rows, and what was fitted to them. */
struct fitted {
    struct tune_rows rows;
    struct tune_fit fit;
};

static void write_source(struct output *output, const struct fitted *fitted, size_t count,
                         const struct arguments *arguments)
{
    write_text(output,
               "/* SPDX-License-Identifier: MIT\n *\n * tuning_tables.h - the built-in tunings, made by\n *\n"
               " *     normfuse tune --from-rows %s",
               arguments->values[OPTION_FROM_ROWS]);
    for (int i = 0; i < arguments->word_count; i++)
        write_text(output, " %s", arguments->words[i]);
    write_text(
        output,
        " --source -o src/cuda/tuning_tables.h\n *\n"
        " * A line is the code of a schedule, whether of columns, whether of backwards, its start and its factor. */\n"
        "/* clang-format off */\n");
    for (size_t gpu = 0; gpu < count; gpu++) {
        const struct tune_fit *const fit = &fitted[gpu].fit;
        const struct tune_row *const row = &fitted[gpu].rows.rows[0];
        if (written_lines(fit) == 0)
            continue;
        write_text(output,
                   "/* %s, driver %s, %s: %d problems, regret %.1f %% -> %.1f %%, worst %.0f %% -> %.0f %% */\n",
                   row->gpu, row->driver, row->date, fit->problems, 100 * fit->before.mean, 100 * fit->after.mean,
                   100 * fit->before.worst, 100 * fit->after.worst);
        write_text(output, "static const struct normfuse_cuda_tuning_line lines_%zu[] = {\n", gpu);
        for (int i = 0; i < fit->count; i++) {
            const struct tune_line *const line = &fit->lines[i];
            if (line->is_written)
                write_text(output, "    {%5u, %d, %d, %.2ff, %.3ff}, /* %s %s %s */\n",
                           (unsigned)normfuse_cuda_schedule_code(line->schedule), line->columns, line->backward,
                           line->start, line->factor, line->columns ? "columns" : "rows",
                           line->backward ? "backward" : "forward", line->schedule);
        }
        write_text(output, "};\n");
    }
    write_text(output, "static const struct normfuse_cuda_tuning tables[] = {\n");
    for (size_t gpu = 0; gpu < count; gpu++) {
        char name[TUNE_NAME_BYTES];
        const int lines = written_lines(&fitted[gpu].fit);
        short_name(fitted[gpu].rows.rows[0].gpu, name);
        write_text(output, "    {\"%.47s\", %d, %d, ", name, (int)fitted[gpu].rows.rows[0].capability, lines);
        write_text(output, lines > 0 ? "lines_%zu},\n" : "NULL},\n", gpu);
    }
    write_text(output, "};\n/* clang-format on */\n");
}

static void print_fit(const struct fitted *fitted)
{
    const struct tune_fit *const fit = &fitted->fit;
    printf("%s\n%-40s %8s %13s %18s %18s\n", fitted->rows.rows[0].gpu, "schedule", "problems", "taken", "error %",
           "regret %");
    for (int i = 0; i < fit->count; i++) {
        const struct tune_line *const line = &fit->lines[i];
        char name[64];
        snprintf(name, sizeof name, "%s %s %s", line->columns ? "columns" : "rows",
                 line->backward ? "backward" : "forward", line->schedule);
        printf("%-40s %8d %5d -> %4d %8.1f -> %6.1f %8.1f -> %6.1f%s\n", name, line->problems, line->taken_before,
               line->taken_after, 100 * line->error_before, 100 * line->error_after, 100 * line->regret_before,
               100 * line->regret_after, line->is_written ? "" : "  (rules hold)");
    }
    printf("%d problems: regret %.2f %% -> %.2f %%, worst %.1f %% -> %.1f %% (%s)\n", fit->problems,
           100 * fit->before.mean, 100 * fit->after.mean, 100 * fit->before.worst, 100 * fit->after.worst,
           fit->after.worst_problem);
}

/* ---- the command ------------------------------------------------------------------------------------------------ */

static void read_rows(const struct arguments *arguments, struct tune_rows *rows)
{
    for (int i = -1; i < arguments->word_count; i++) {
        const char *const path = i < 0 ? arguments->values[OPTION_FROM_ROWS] : arguments->words[i];
        const char *const wrong = tune_rows_read(path, rows);
        if (wrong)
            report_failure(path, "%s", wrong);
    }
    if (rows->count == 0)
        report_failure(arguments->values[OPTION_FROM_ROWS], "holds no rows");
}

/* Parts the rows by GPU. */
static struct fitted *fit_all(const struct tune_rows *rows, size_t *count)
{
    struct fitted *const fitted = calloc(rows->count, sizeof *fitted);
    if (!fitted)
        report_failure("memory", "%s", strerror(errno));
    *count = 0;
    for (size_t i = 0; i < rows->count; i++) {
        size_t gpu = 0;
        while (gpu < *count && strcmp(fitted[gpu].rows.rows[0].gpu, rows->rows[i].gpu) != 0)
            gpu++;
        *count += gpu == *count;
        add_row(&fitted[gpu].rows, &rows->rows[i]);
    }
    for (size_t gpu = 0; gpu < *count; gpu++) {
        const char *const wrong = tune_fit(fitted[gpu].rows.rows, fitted[gpu].rows.count, &fitted[gpu].fit);
        if (wrong)
            report_failure(fitted[gpu].rows.rows[0].gpu, "%s", wrong);
    }
    return fitted;
}

static int tune_main(const struct arguments *arguments)
{
    const bool from_rows = arguments_has(arguments, OPTION_FROM_ROWS), source = arguments_has(arguments, OPTION_SOURCE);
    const int64_t seconds = arguments_number(arguments, OPTION_SECONDS, 1, 86400, 120);
    device_choose((int32_t)arguments_number(arguments, OPTION_DEVICE, 0, INT32_MAX, 0));
    if (arguments->word_count > 0 && !from_rows)
        report_usage("tune", "'%s': it takes no words but files of rows, with --from-rows", arguments->words[0]);
    if (source && !from_rows)
        report_usage("tune", "--source needs --from-rows");
    for (int i = 0; from_rows && i < OPTION_COUNT; i++)
        if ((i == OPTION_DEVICE || i == OPTION_SECONDS || i == OPTION_ROWS) && arguments_has(arguments, i))
            report_usage("tune", "--%s measures, and --from-rows does not", options[i].name);
    if (arguments_has(arguments, OPTION_LIST)) {
        size_t count;
        struct problem_line *const lines = read_problems(&count);
        for (size_t i = 0; i < count; i++) {
            char name[PROBLEM_NAME_BYTES];
            problem_line_name(&lines[i], name, sizeof name);
            puts(name);
        }
        free(lines);
        return report_finish(CODE_OK);
    }
    struct tune_rows rows = {0};
    size_t count;
    if (from_rows)
        read_rows(arguments, &rows);
    else if (!device_open()) /* before files are made */
        report_failure("tune", "%s", device_error());
    const char *const path =
        arguments_has(arguments, OPTION_OUTPUT) ? arguments->values[OPTION_OUTPUT] : "normfuse.tuning";
    struct output *const output = output_open(path, 0);
    struct output *const to_rows =
        arguments_has(arguments, OPTION_ROWS) ? output_open(arguments->values[OPTION_ROWS], 0) : NULL;
    if (!from_rows)
        measure((double)seconds, &rows);
    if (rows.count == 0)
        report_failure("tune", "no problem has two schedules");
    if (to_rows)
        write_rows(to_rows, &rows);
    struct fitted *const fitted = fit_all(&rows, &count);
    if (source)
        write_source(output, fitted, count, arguments);
    else if (count > 1)
        report_failure(path, "the rows are of %s and %s, and a tuning file is of one GPU", fitted[0].rows.rows[0].gpu,
                       fitted[1].rows.rows[0].gpu);
    else
        write_tuning(output, &fitted[0].rows.rows[0], &fitted[0].fit);
    outputs_commit(false);
    for (size_t gpu = 0; gpu < count; gpu++) {
        print_fit(&fitted[gpu]);
        free(fitted[gpu].rows.rows);
    }
    free(fitted);
    free(rows.rows);
    return report_finish(CODE_OK);
}
