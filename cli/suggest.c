/* SPDX-License-Identifier: MIT
 *
 * suggest.c - the nearest name: see suggest.h. */
#include "suggest.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>

/* Longer words are no typing errors of names. */
enum { MAX_LETTERS = 32 };

static int small(char c)
{
    return tolower((unsigned char)c);
}

static int least(int a, int b)
{
    return a < b ? a : b;
}

/* Edits between a and b by the rows of the usual table; a swap looks two rows back. */
static int edits(const char *a, size_t a_bytes, const char *b, size_t b_bytes)
{
    int rows[3][MAX_LETTERS + 1];
    for (size_t j = 0; j <= b_bytes; j++)
        rows[0][j] = (int)j;
    for (size_t i = 1; i <= a_bytes; i++) {
        int *const row = rows[i % 3], *const above = rows[(i + 2) % 3], *const two_above = rows[(i + 1) % 3];
        row[0] = (int)i;
        for (size_t j = 1; j <= b_bytes; j++) {
            row[j] = least(least(above[j], row[j - 1]) + 1, above[j - 1] + (small(a[i - 1]) != small(b[j - 1])));
            if (i > 1 && j > 1 && small(a[i - 1]) == small(b[j - 2]) && small(a[i - 2]) == small(b[j - 1]))
                row[j] = least(row[j], two_above[j - 2] + 1);
        }
    }
    return rows[a_bytes % 3][b_bytes];
}

const char *suggest_nearest(const char *text, size_t bytes, const char *const *names, int count)
{
    const char *nearest = NULL;
    int fewest = MAX_LETTERS;
    if (bytes == 0 || bytes > MAX_LETTERS)
        return NULL;
    for (int i = 0; i < count; i++) {
        const size_t name_bytes = strlen(names[i]);
        if (name_bytes > MAX_LETTERS)
            continue;
        const int allowed = (int)(bytes > name_bytes ? bytes : name_bytes) / 3;
        const int needed = edits(text, bytes, names[i], name_bytes);
        if (needed < fewest && needed <= (allowed > 1 ? allowed : 1)) {
            fewest = needed;
            nearest = names[i];
        }
    }
    return nearest;
}

const char *suggest_words(const char *prefix, const char *text, size_t bytes, const char *const *names, int count)
{
    static _Thread_local char words[2 * MAX_LETTERS + 24];
    const char *const nearest = suggest_nearest(text, bytes, names, count);
    words[0] = '\0';
    if (nearest != NULL)
        (void)snprintf(words, sizeof words, ", did you mean %s%s?", prefix, nearest);
    return words;
}
