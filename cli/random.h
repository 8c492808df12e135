/* SPDX-License-Identifier: MIT
 *
 * random.h - random problems over everything that the library does: the same ones for the same seed on every machine. */
#ifndef NORMFUSE_CLI_RANDOM_H
#define NORMFUSE_CLI_RANDOM_H

#include "problem_line.h"

/* The limits that x's bytes may have. */
enum { RANDOM_LEAST_BYTES = 16384 };
#define RANDOM_MOST_BYTES (INT64_C(1) << 40)

/* Problem `index` of the list that `seed` names; lists of any length begin alike. The bytes of x are log-uniform
 * between the two given, and met within an eighth. Even problems are forwards, odd ones backwards; all are on the CPU.
 *
 * No statistics, parameter or gradient has more than one value for each RANDOM_VALUES of x: the floor of a benchmark,
 * which counts the tensors of x's size alone, stays a floor that can be reached. */
enum { RANDOM_VALUES = 16 };
struct problem_line random_problem(uint64_t seed, int64_t index, int64_t least_bytes, int64_t most_bytes);

/* Gives some of these problems act=prelu, in place of the activation that they have, by draws of its own. */
void random_prelu(struct problem_line *line, uint64_t seed, int64_t index);

/* Makes a channel norm of some of these problems, by draws of its own: those whose channels leave a norm group
 * RANDOM_VALUES. What benchmarks draw for a GPU stays what it was. */
void random_channel_norm(struct problem_line *line, uint64_t seed, int64_t index);

/* Adds pre_bias to some of these problems, by draws of its own: random_problem's list is what benchmarks were measured
 * on, and stays as it is. */
void random_pre_bias(struct problem_line *line, uint64_t seed, int64_t index);

#endif
