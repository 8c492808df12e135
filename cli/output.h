/* SPDX-License-Identifier: MIT
 *
 * output.h - output files that appear whole or not at all.
 *
 * Each is written beside its final place under a temporary name; outputs_commit renames all of them once everything is
 * written. Until then any way out of the program but SIGKILL (failure, exit, SIGINT, SIGTERM, SIGHUP, a mapped input
 * that shrinks) removes the temporaries. Something that exists and is no regular file (a pipe, /dev/stdout, /dev/null)
 * is written to directly. */
#ifndef NORMFUSE_CLI_OUTPUT_H
#define NORMFUSE_CLI_OUTPUT_H

#include <stddef.h>
#include <stdint.h>

enum { OUTPUTS_MAX = 16 };

struct output;

/* Ends the program (exit 3) when the file cannot be written. total_bytes are reserved at once, so that a full disk is
 * found before the work. Two outputs with one path must be excluded by the caller. */
struct output *output_open(const char *path, int64_t total_bytes);

/* The name of a file that need not exist, so that two spellings of one file compare equal. Allocated; NULL when the
 * folder does not exist. */
char *output_canonical(const char *path);

/* Appends. Ends the program (exit 3) on a full disk, a closed pipe or any other failure. */
void output_write(struct output *output, const void *data, size_t bytes);

/* Puts all outputs in place. */
void outputs_commit(void);

#endif
