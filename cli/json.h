/* SPDX-License-Identifier: MIT
 *
 * json.h - one JSON object on one line of standard output, a member at a time. */
#ifndef NORMFUSE_CLI_JSON_H
#define NORMFUSE_CLI_JSON_H

#include <stdint.h>

/* json_open(); json_string("a", "b"); json_integer("n", 1); json_close();  prints  {"a":"b","n":1}  and a newline. */
void json_open(void);
void json_string(const char *name, const char *value); /* value NULL: null */
void json_words(const char *name, const char *value);  /* words separated by spaces, as an array of strings */
void json_integer(const char *name, int64_t value);
void json_number(const char *name, double value, int decimals); /* decimals < 0: all digits; not finite: null */
void json_boolean(const char *name, int value);
void json_close(void);

#endif
