/* SPDX-License-Identifier: MIT
 *
 * json.c - writes JSON objects. */
#include "json.h"

#include <inttypes.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

static bool first_member;

static void print_string(const char *text, size_t length)
{
    putchar('"');
    for (size_t i = 0; i < length; i++) {
        unsigned char byte = (unsigned char)text[i];
        if (byte == '"' || byte == '\\')
            printf("\\%c", byte);
        else if (byte < 0x20 || byte == 0x7f)
            printf("\\u%04x", byte);
        else
            putchar(byte);
    }
    putchar('"');
}

static void print_name(const char *name)
{
    if (!first_member)
        putchar(',');
    first_member = false;
    print_string(name, strlen(name));
    putchar(':');
}

void json_open(void)
{
    putchar('{');
    first_member = true;
}

void json_string(const char *name, const char *value)
{
    print_name(name);
    if (value)
        print_string(value, strlen(value));
    else
        printf("null");
}

void json_words(const char *name, const char *value)
{
    print_name(name);
    putchar('[');
    for (const char *word = value + strspn(value, " "); *word;) {
        size_t length = strcspn(word, " ");
        print_string(word, length);
        word += length;
        word += strspn(word, " ");
        if (*word)
            putchar(',');
    }
    putchar(']');
}

void json_integer(const char *name, int64_t value)
{
    print_name(name);
    printf("%" PRId64, value);
}

void json_number(const char *name, double value, int decimals)
{
    print_name(name);
    if (!isfinite(value))
        printf("null");
    else if (decimals < 0)
        printf("%.17g", value);
    else
        printf("%.*f", decimals, value);
}

void json_boolean(const char *name, int value)
{
    print_name(name);
    printf(value ? "true" : "false");
}

void json_close(void)
{
    puts("}");
}
