/* SPDX-License-Identifier: MIT
 *
 * problems.c - problem_lines_read with the program's messages and codes. */
#include "problems.h"

#include <string.h>

#include "report.h"

struct problem_line *problems_read(const struct arguments *arguments, size_t *count)
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
