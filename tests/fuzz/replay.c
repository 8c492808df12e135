/* SPDX-License-Identifier: MIT
 *
 * replay.c - runs a fuzz target without a fuzzing engine: replay_fuzz_calls tests/fuzz/fuzz_calls.txt. Such a text has
 * one input a line, with \xNN for any byte, \n for a newline and \\ for a backslash; lines that begin with "# " are
 * comments. A finding ends the program: the last line that it names is the one. With --raw each file is an input, as
 * fuzzing engines leave them; --random N [SEED] makes N inputs of random bytes, the same ones every time. Three of four
 * have few of the choices by which inputs are refused. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "harness.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
/* The last words of a target that has any. */
__attribute__((weak)) void fuzz_report(void);

enum { MOST_BYTES = 1 << 20 };

static int hex_digit(char c)
{
    return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* In place; the length, or -1. */
static int64_t unescape(char *line)
{
    char *to = line;
    for (const char *from = line; *from; from++) {
        if (*from != '\\') {
            *to++ = *from;
            continue;
        }
        from++;
        if (*from == '\\') {
            *to++ = '\\';
        } else if (*from == 'n') {
            *to++ = '\n';
        } else if (*from == 'x' && hex_digit(from[1]) >= 0 && hex_digit(from[2]) >= 0) {
            *to++ = (char)(hex_digit(from[1]) * 16 + hex_digit(from[2]));
            from += 2;
        } else {
            return -1;
        }
    }
    return to - line;
}

int main(int count, char **arguments)
{
    static char text[MOST_BYTES];
    if (count > 2 && strcmp(arguments[1], "--random") == 0) {
        const long inputs = strtol(arguments[2], NULL, 10);
        uint64_t state = 88172645463325252u + 2 * (count > 3 ? strtoull(arguments[3], NULL, 10) : 0);
        for (long i = 0; i < inputs; i++) {
            uint8_t bytes[1024];
            for (size_t at = 0; at < sizeof bytes; at++) {
                state ^= state << 13, state ^= state >> 7, state ^= state << 17;
                bytes[at] = (uint8_t)(state >> 32);
                if (i % 4 != 0 && bytes[at] % 64 == 63)
                    bytes[at]--;
            }
            LLVMFuzzerTestOneInput(bytes, 1 + state % sizeof bytes);
            harness_passed++;
        }
        if (fuzz_report != NULL)
            fuzz_report();
        return harness_close();
    }
    const bool raw = count > 1 && strcmp(arguments[1], "--raw") == 0;
    for (int i = raw ? 2 : 1; i < count; i++) {
        FILE *const file = fopen(arguments[i], "rb");
        if (file == NULL) {
            CHECK(false, "%s cannot be opened", arguments[i]);
            continue;
        }
        if (raw) {
            printf("%s\n", arguments[i]);
            fflush(stdout);
            const size_t size = fread(text, 1, sizeof text, file);
            LLVMFuzzerTestOneInput((const uint8_t *)text, size);
            harness_passed++;
        }
        for (int number = 1; !raw && fgets(text, sizeof text, file); number++) {
            text[strcspn(text, "\n")] = 0;
            if (!text[0] || strncmp(text, "# ", 2) == 0)
                continue;
            printf("%s:%d\n", arguments[i], number);
            fflush(stdout);
            const int64_t size = unescape(text);
            if (CHECK(size >= 0, "%s:%d: a backslash that begins no byte", arguments[i], number))
                LLVMFuzzerTestOneInput((const uint8_t *)text, (size_t)size);
        }
        fclose(file);
    }
    return harness_close();
}
