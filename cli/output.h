/* SPDX-License-Identifier: MIT
 *
 * output.h - output files that appear whole or not at all.
 *
 * A regular file is written without a name, where the file system has such files, else beside its place under a
 * temporary one. outputs_commit names and renames all of them once everything is written. Until then any way out of
 * the program leaves nothing: failure, exit, a mapped input that shrinks, and any signal; SIGKILL leaves temporary
 * names. A file that replaces another has its permissions, without setuid, setgid and sticky bits.
 *
 * Symbolic links are followed, one that leads to nothing too. What exists and is no regular file (a pipe, a device) is
 * written to directly; so are the process's own open files (/dev/stdout, /dev/fd/3), whatever they are, where they
 * stand: at their end when they were opened to append. */
#ifndef NORMFUSE_CLI_OUTPUT_H
#define NORMFUSE_CLI_OUTPUT_H

#include <stdbool.h>
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

/* Puts all outputs in place; to_disk: returns when they and their names are on the disk. */
void outputs_commit(bool to_disk);

#endif
