/* SPDX-License-Identifier: MIT
 *
 * check.c - `normfuse check`: problems against the double-precision reference. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "commands.h"
#include "json.h"
#include "problems.h"
#include "report.h"
#include "verify.h"

enum { OPTION_THREADS = PROBLEMS_OPTIONS, OPTION_JSON, OPTION_COUNT };

static const struct option options[OPTION_COUNT] = {
    PROBLEMS_OPTION_TABLE("Make the inputs from this number, and draw with it (default 1)."),
    [OPTION_THREADS] = {"threads", 0, "N", "Use at most N threads. Results do not depend on it."},
    [OPTION_JSON] = {"json", 'j', NULL, "Print one JSON object a problem, each on one line of standard output."},
};

static int check_main(const struct arguments *arguments);

const struct command check_command = {
    .name = "check",
    .summary = "compare problems with the double-precision reference",
    .synopsis = "check PROBLEM... [--seed N] [--threads N] [--json] [--list]\n"
                "check --random N [device=cuda] [--min-bytes BYTES] [--max-bytes BYTES] [--seed N]\n",
    .description = "Runs each problem on random inputs and compares every element of every output with naive\n"
                   "loops in double precision. The error that an element may have is computed from the problem\n"
                   "and its data (docs/numerics.md), not chosen. The line printed says which part of it the\n"
                   "worst element used, and in which output. The GPU's results (device=cuda) are compared the\n"
                   "same way, with the bounds of its own arithmetic.\n"
                   "\n"
                   "Outputs hold NaNs before the call. Memory around the tensors, and inputs, must not change.\n"
                   "A second run, on the CPU with another number of threads, must give the same bits.\n"
                   "\n"
                   "--random draws the problems of normfuse bench --random, and pre_bias besides. Several\n"
                   "processes share many problems by their seeds: --random 1000 with --seed 1 to 5 are 5000\n"
                   "problems.\n",
    .options = options,
    .option_count = OPTION_COUNT,
    .sections =
        {problem_help, "OUTPUT\n"
                       "    A line a problem: ok or FAIL, the part of the error budget used, the output it was used\n"
                       "    in, and the problem; a failure says which element, and how to see it again. --json rows\n"
                       "    have the members problem, ok, budget_used (1 is all of it), tensor, index, got, want,\n"
                       "    compared, beyond (elements), seed, isa, threads, and message (null when it is ok).\n"
                       "    After --random a closing line, or row with the members summary (random), seed, problems,\n"
                       "    failed, budget_used (the greatest), worst_problem, min_bytes, max_bytes.\n"
                       "\n"
                       "EXAMPLES\n"
                       "    normfuse check group_norm 2x320x64x64 groups=32 dtype=bf16 act=silu\n"
                       "    normfuse check 'batch_norm 8x64x28x28' 'batch_norm 8x64x28x28 dir=bwd' --seed 7\n"
                       "    normfuse check group_norm 2x320x64x64 groups=32 dtype=f16 layout=nhwc device=cuda\n"
                       "    normfuse check @problems.txt --json\n"
                       "    normfuse check --random 1000 --seed 5 --max-bytes 64MiB device=cuda\n"},
    .main = check_main,
};

static void print_json(const char *name, bool on_device, const struct verify_result *result, uint64_t seed,
                       int threads, const normfuse_information *info)
{
    bool passed = result->outcome == VERIFY_PASSED;
    json_open();
    json_string("problem", name);
    json_boolean("ok", passed);
    json_number("budget_used", result->budget_used, 6);
    json_string("tensor", result->tensor);
    json_string("index", result->index);
    json_number("got", result->got, -1);
    json_number("want", result->want, -1);
    json_integer("compared", result->compared);
    json_integer("beyond", result->beyond);
    json_integer("seed", (int64_t)seed);
    json_string("isa", on_device ? "cuda" : info->isa);
    json_integer("threads", threads);
    json_string("message", passed ? NULL : result->message);
    json_close();
}

static void print_line(const char *name, const struct verify_result *result, uint64_t seed)
{
    bool passed = result->outcome == VERIFY_PASSED;
    printf("%-4s %6.1f %% %-9s %s", passed ? "ok" : "FAIL", result->budget_used * 100, result->tensor, name);
    if (!passed)
        printf(": %s  repro: normfuse check %s --seed %" PRIu64, result->message, name, seed);
    putchar('\n');
}

/* The end of --random. */
struct summary {
    size_t failed;
    double budget_used;
    char worst[PROBLEM_NAME_BYTES];
};

static void print_summary(const struct problems *problems, const struct summary *summary, bool json)
{
    if (!json) {
        printf("%zu random problems, seed %" PRId64 ": %zu failed, at most %.1f %% of a budget used, by %s\n",
               problems->count, problems->seed, summary->failed, summary->budget_used * 100, summary->worst);
        return;
    }
    json_open();
    json_string("summary", "random");
    json_integer("seed", problems->seed);
    json_integer("problems", (int64_t)problems->count);
    json_integer("failed", (int64_t)summary->failed);
    json_number("budget_used", summary->budget_used, 6);
    json_string("worst_problem", summary->worst);
    json_integer("min_bytes", problems->least_bytes);
    json_integer("max_bytes", problems->most_bytes);
    json_close();
}

static int check_main(const struct arguments *arguments)
{
    struct problems problems = problems_read(arguments, true, false);
    bool json = arguments_has(arguments, OPTION_JSON);
    normfuse_information info = {.struct_bytes = sizeof info};
    normfuse_status status = normfuse_info(&info);
    if (status != NORMFUSE_OK)
        report_refusal("check", "normfuse_info", status);
    struct verify_options verify = {
        .seed = (uint64_t)problems.seed,
        .twice = true,
        .threads = (int32_t)arguments_number(arguments, OPTION_THREADS, 1, THREADS_MAX, info.threads)};
    verify.reference_threads = verify.threads;
    struct summary summary = {.budget_used = -1};
    for (size_t i = 0; i < problems.count; i++) {
        const struct problem_line *line = &problems.lines[i];
        char name[PROBLEM_NAME_BYTES];
        struct verify_result result = {.outcome = VERIFY_FAILED};
        problem_line_name(line, name, sizeof name);
        (void)verify_problem(line, &verify, &result);
        if (result.outcome != VERIFY_PASSED && result.outcome != VERIFY_FAILED)
            report_failure(name, "%s", result.message);
        if (json)
            print_json(name, line->device == NORMFUSE_CUDA, &result, verify.seed, verify.threads, &info);
        else
            print_line(name, &result, verify.seed);
        report_flush();
        summary.failed += result.outcome == VERIFY_FAILED;
        if (result.budget_used > summary.budget_used) {
            summary.budget_used = result.budget_used;
            memcpy(summary.worst, name, sizeof name);
        }
    }
    if (problems.drawn)
        print_summary(&problems, &summary, json);
    free(problems.lines);
    return report_finish(summary.failed ? CODE_CHECK_FAILED : CODE_OK);
}
