/* SPDX-License-Identifier: MIT
 *
 * commands.h - the subcommands. */
#ifndef NORMFUSE_CLI_COMMANDS_H
#define NORMFUSE_CLI_COMMANDS_H

#include "arguments.h"

extern const struct command info_command, run_command, check_command, bench_command, compile_command;

/* How a problem is spelled, for the help of the commands that take one. */
extern const char problem_help[];

enum { THREADS_MAX = 4096 };

#endif
