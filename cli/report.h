/* SPDX-License-Identifier: MIT
 *
 * report.h - how the program ends: its exit codes and its messages. Nothing here returns but report_finish. */
#ifndef NORMFUSE_CLI_REPORT_H
#define NORMFUSE_CLI_REPORT_H

#include <stdnoreturn.h>

#include "normfuse.h"

/* A contract with the scripts that call the program. */
enum { CODE_OK = 0, CODE_CHECK_FAILED = 1, CODE_USAGE = 2, CODE_FILE = 3 };

/* "normfuse COMMAND: message", where to find help, exit 2. command may be NULL. */
__attribute__((format(printf, 2, 3))) noreturn void report_usage(const char *command, const char *format, ...);

/* "normfuse: NAME: message", exit 3. name is the file, or what stands in its place. */
__attribute__((format(printf, 2, 3))) noreturn void report_failure(const char *name, const char *format, ...);

/* The library refused: its last error with the name in front. A refused option is a usage error, all else is 3. */
noreturn void report_refusal(const char *command, const char *name, normfuse_status status);

/* Shows text as the terminal's last line in place of what was shown before; NULL takes it away. */
void report_progress(const char *text);

/* Flushes standard output and returns code, or fails when the output did not take everything. */
int report_finish(int code);

/* Fails at once when standard output is closed or full. For use after a line of a long run. */
void report_flush(void);

#endif
