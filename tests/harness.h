/* SPDX-License-Identifier: MIT
 *
 * harness.h - what a test program needs: checks that count, and the closing line. */
#ifndef NORMFUSE_TESTS_HARNESS_H
#define NORMFUSE_TESTS_HARNESS_H

#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>

static int harness_passed, harness_failed, harness_skipped;

/* Counts one check; a failed one prints its message (printf format). Returns `passed`. */
__attribute__((format(printf, 4, 5))) static inline bool harness_check(bool passed, const char *file, int line,
                                                                       const char *format, ...)
{
    if (passed) {
        harness_passed++;
        return true;
    }
    harness_failed++;
    va_list arguments;
    va_start(arguments, format);
    printf("FAIL %s:%d ", file, line);
    vprintf(format, arguments);
    printf("\n");
    va_end(arguments);
    return false;
}

#define CHECK(condition, ...) harness_check((condition), __FILE__, __LINE__, __VA_ARGS__)

__attribute__((format(printf, 1, 2))) static inline void harness_skip(const char *format, ...)
{
    harness_skipped++;
    va_list arguments;
    va_start(arguments, format);
    printf("skipped: ");
    vprintf(format, arguments);
    printf("\n");
    va_end(arguments);
}

/* The exit status of the program. */
static inline int harness_close(void)
{
    printf("%d passed, %d failed, %d skipped\n", harness_passed, harness_failed, harness_skipped);
    return harness_failed != 0;
}

#endif
