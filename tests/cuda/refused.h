/* SPDX-License-Identifier: MIT
 *
 * refused.h - what a call that is refused returns and says. */
#ifndef NORMFUSE_TESTS_REFUSED_H
#define NORMFUSE_TESTS_REFUSED_H

#include <string.h>

#include "harness.h"
#include "normfuse.h"

#define REFUSED(wanted, status, ...) refused(__LINE__, wanted, status, (const char *[]){__VA_ARGS__, NULL})

/* The status, and a message with every one of these words. */
static inline void refused(int line, normfuse_status wanted, normfuse_status status, const char *const *words)
{
    CHECK(status == wanted, "line %d: status %d, not %d: %s", line, (int)status, (int)wanted, normfuse_last_error());
    for (; *words != NULL; words++)
        CHECK(strstr(normfuse_last_error(), *words) != NULL, "line %d: '%s' is not in: %s", line, *words,
              normfuse_last_error());
}

#endif
