/* SPDX-License-Identifier: MIT
 *
 * problems.h - the problems that a command is about: those that its words name, or with --random those that are drawn.
 * Commands that draw have the options below, in this order, before their own. */
#ifndef NORMFUSE_CLI_PROBLEMS_H
#define NORMFUSE_CLI_PROBLEMS_H

#include <stddef.h>

#include "arguments.h"
#include "problem_line.h"

enum { PROBLEMS_RANDOM, PROBLEMS_SEED, PROBLEMS_MIN_BYTES, PROBLEMS_MAX_BYTES, PROBLEMS_LIST, PROBLEMS_OPTIONS };

/* seed: what else --seed does, after "Draw". */
#define PROBLEMS_OPTION_TABLE(seed)                                                                                    \
    [PROBLEMS_RANDOM] = {"random", 'r', "N",                                                                           \
                         "Draw N problems, half of them backwards, in place of naming them; the same ones on every "   \
                         "machine."},                                                                                  \
    [PROBLEMS_SEED] = {"seed", 's', "N", seed},                                                                        \
    [PROBLEMS_MIN_BYTES] = {"min-bytes", 0, "BYTES", "Draw tensors of at least this size (64KiB)."},                   \
    [PROBLEMS_MAX_BYTES] = {"max-bytes", 0, "BYTES", "Draw tensors of at most this size (256MiB)."},                   \
    [PROBLEMS_LIST] = {"list", 'l', NULL, "Print the problems, one a line, and do nothing with them."}

struct problems {
    struct problem_line *lines; /* allocated */
    size_t count;               /* at least one */
    bool drawn;
    int64_t seed, least_bytes, most_bytes;
};

/* Ends the program with a usage error for words that are wrong, with 3 for an @file that cannot be read or holds a line
 * that is wrong, and after --list. draws_pre_bias: --random draws pre_bias, too; for_gpu: what is
 * drawn for a GPU, whatever the device. */
struct problems problems_read(const struct arguments *arguments, bool draws_pre_bias, bool for_gpu);

#endif
