/* SPDX-License-Identifier: MIT
 *
 * problems.h - the problems that the words of a command name. */
#ifndef NORMFUSE_CLI_PROBLEMS_H
#define NORMFUSE_CLI_PROBLEMS_H

#include <stddef.h>

#include "arguments.h"
#include "problem_line.h"

/* At least one; allocated. Ends the program with a usage error for words that are wrong, and with 3 for an @file that
 * cannot be read or holds a line that is wrong. */
struct problem_line *problems_read(const struct arguments *arguments, size_t *count);

#endif
