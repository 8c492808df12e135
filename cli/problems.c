/* SPDX-License-Identifier: MIT
 *
 * problems.c - problem_lines_read and random_problem with the program's options, messages and codes. */
#include "problems.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "random.h"
#include "report.h"

static struct problem_line *read_words(const struct arguments *arguments, size_t *count)
{
    const char *command = arguments->command->name;
    struct problem_line *lines = NULL;
    if (arguments->word_count == 0)
        report_usage(command, "no problem: %s group_norm 128x256x28x28 groups=32", command);
    const char *error = problem_lines_read(arguments->word_count, arguments->words, &lines, count);
    if (!error && *count > 0)
        return lines;
    if (error == problem_lines_no_memory)
        report_failure("memory", "%s", error);
    for (int i = 0; i < arguments->word_count; i++) {
        const char *path = arguments->words[i] + 1;
        size_t length = strlen(path);
        if (arguments->words[i][0] != '@')
            continue;
        if (!error)
            report_failure(path, "the file holds no problem");
        if (strncmp(error, path, length) == 0 && error[length] == ':')
            report_failure(path, "%s%s", error[length + 1] == ' ' ? "" : "line ",
                           error + length + 1 + (error[length + 1] == ' '));
    }
    report_usage(command, "%s", error ? error : "no problem");
}

static void draw(const struct arguments *arguments, struct problems *problems, bool draws_pre_bias, bool for_gpu)
{
    enum { PROBLEMS_MOST = 10000000 };
    const char *command = arguments->command->name;
    int32_t device = NORMFUSE_CPU;
    for (int i = 0; i < arguments->word_count; i++) {
        struct problem_line line = problem_line_default(AFFINE);
        const char *word = arguments->words[i];
        char error[512];
        if (strncmp(word, "device=", 7) != 0)
            report_usage(command, "'%s': --random takes no problem and no word but device=", word);
        if (problem_line_key(&line, word, error, sizeof error) != 0)
            report_usage(command, "%s", error);
        device = line.device;
    }
    problems->count = (size_t)arguments_number(arguments, PROBLEMS_RANDOM, 1, PROBLEMS_MOST, 0);
    int64_t least = arguments_bytes(arguments, PROBLEMS_MIN_BYTES, INT64_C(64) << 10);
    int64_t most = arguments_bytes(arguments, PROBLEMS_MAX_BYTES, INT64_C(256) << 20);
    if (least < RANDOM_LEAST_BYTES || most > RANDOM_MOST_BYTES || least > most)
        report_usage(command, "--min-bytes %lld, --max-bytes %lld: they must rise and be between %d and %lld",
                     (long long)least, (long long)most, RANDOM_LEAST_BYTES, (long long)RANDOM_MOST_BYTES);
    problems->least_bytes = least;
    problems->most_bytes = most;
    problems->lines = calloc(problems->count, sizeof *problems->lines);
    if (!problems->lines)
        report_failure("memory", "%s", strerror(errno));
    for (size_t i = 0; i < problems->count; i++) {
        problems->lines[i] = random_problem((uint64_t)problems->seed, (int64_t)i, least, most);
        problems->lines[i].device = device;
        /* GPUs refuse some norms over more channels. */
        if ((!for_gpu && device == NORMFUSE_CPU) || problems->lines[i].sizes[1] <= 1024)
            random_channel_norm(&problems->lines[i], (uint64_t)problems->seed, (int64_t)i);
        random_prelu(&problems->lines[i], (uint64_t)problems->seed, (int64_t)i);
        if (draws_pre_bias)
            random_pre_bias(&problems->lines[i], (uint64_t)problems->seed, (int64_t)i);
    }
}

struct problems problems_read(const struct arguments *arguments, bool draws_pre_bias, bool for_gpu)
{
    struct problems problems = {.drawn = arguments_has(arguments, PROBLEMS_RANDOM),
                                .seed = arguments_number(arguments, PROBLEMS_SEED, 0, INT64_MAX, 1)};
    if (problems.drawn)
        draw(arguments, &problems, draws_pre_bias, for_gpu);
    else if (arguments_has(arguments, PROBLEMS_MIN_BYTES) || arguments_has(arguments, PROBLEMS_MAX_BYTES))
        report_usage(arguments->command->name, "--min-bytes and --max-bytes need --random");
    else
        problems.lines = read_words(arguments, &problems.count);
    if (!arguments_has(arguments, PROBLEMS_LIST))
        return problems;
    for (size_t i = 0; i < problems.count; i++) {
        char name[PROBLEM_NAME_BYTES];
        problem_line_name(&problems.lines[i], name, sizeof name);
        puts(name);
    }
    free(problems.lines);
    exit(report_finish(CODE_OK));
}
