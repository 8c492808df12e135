/* SPDX-License-Identifier: MIT
 *
 * numbers.h - doubles from and to arrays of the four dtypes, one element at a time. */
#ifndef NORMFUSE_CLI_NUMBERS_H
#define NORMFUSE_CLI_NUMBERS_H

#include <stddef.h>
#include <stdint.h>

#include "normfuse.h"

size_t number_bytes(normfuse_type type);
double number_load(const void *data, normfuse_type type, int64_t i);

/* Rounds once, to nearest even; values too large become infinite. */
void number_store(void *data, normfuse_type type, int64_t i, double value);

#endif
