/* SPDX-License-Identifier: MIT
 *
 * report.c - messages and exit codes. */
#include "report.h"

#include <errno.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool progress_shown;

void report_progress(const char *text)
{
    if (text || progress_shown)
        fprintf(stderr, "\r\x1b[K%s", text ? text : "");
    progress_shown = text != NULL;
    fflush(stderr);
}

void report_usage(const char *command, const char *format, ...)
{
    va_list list;
    va_start(list, format);
    fprintf(stderr, "normfuse%s%s: ", command ? " " : "", command ? command : "");
    vfprintf(stderr, format, list);
    va_end(list);
    fprintf(stderr, "\nTry 'normfuse%s%s --help'.\n", command ? " " : "", command ? command : "");
    exit(CODE_USAGE);
}

void report_failure(const char *name, const char *format, ...)
{
    va_list list;
    report_progress(NULL);
    va_start(list, format);
    fprintf(stderr, "normfuse: %s: ", name);
    vfprintf(stderr, format, list);
    va_end(list);
    fputc('\n', stderr);
    exit(CODE_FILE);
}

void report_refusal(const char *command, const char *name, normfuse_status status)
{
    const char *reason = normfuse_last_error();
    if (!reason[0])
        reason = normfuse_status_text(status);
    if (status == NORMFUSE_BAD_ARGUMENT)
        report_usage(command, "%s: %s", name, reason);
    report_failure(name, "%s", reason);
}

void report_flush(void)
{
    errno = 0;
    if (fflush(stdout) || ferror(stdout)) {
        if (!errno) { /* an earlier write failed, as those of musl do: another one fails alike, and says why */
            clearerr(stdout);
            putchar('\n');
            fflush(stdout);
        }
        const char *reason = errno ? strerror(errno) : "write error";
        fprintf(stderr, "normfuse: standard output: %s\n", reason);
        /* The rest of the buffer cannot be written, and exit() would try again. */
        fclose(stdout);
        exit(CODE_FILE);
    }
}

int report_finish(int code)
{
    report_flush();
    return code;
}
