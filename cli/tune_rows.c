/* SPDX-License-Identifier: MIT
 *
 * tune_rows.c - see tune_rows.h. Of JSON it reads what it writes: one object a line, members that are strings, numbers,
 * true or false. */
#include "tune_rows.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

bool tune_rows_add(struct tune_rows *rows, const struct tune_row *row)
{
    struct tune_row *const more = realloc(rows->rows, (rows->count + 1) * sizeof *more);
    if (!more)
        return false;
    rows->rows = more;
    rows->rows[rows->count++] = *row;
    return true;
}

/* Names of GPUs and drivers are the driver's words. */
static void put_string(char *out, size_t bytes, const char *text)
{
    size_t length = 0;
    for (; *text && length + 1 < bytes; text++)
        out[length++] = *text == '"' || *text == '\\' || (unsigned char)*text < 0x20 ? ' ' : *text;
    out[length] = '\0';
}

size_t tune_row_text(const struct tune_row *row, char *text, size_t bytes)
{
    char gpu[TUNE_NAME_BYTES], driver[TUNE_NAME_BYTES];
    put_string(gpu, sizeof gpu, row->gpu);
    put_string(driver, sizeof driver, row->driver);
    const int length = snprintf(
        text, bytes,
        "{\"problem\":\"%s\",\"layout\":\"%s\",\"dir\":\"%s\",\"schedule\":\"%s\",\"us\":%.3f,\"estimate_us\":%.3f,"
        "\"in_order\":%s,\"taken\":%s,\"gpu\":\"%s\",\"cc\":\"%d.%d\",\"driver\":\"%s\",\"version\":\"%s\","
        "\"date\":\"%s\"}\n",
        row->problem, row->columns ? "columns" : "rows", row->backward ? "bwd" : "fwd", row->schedule, row->us,
        row->estimate, row->in_order ? "true" : "false", row->taken ? "true" : "false", gpu, (int)row->capability / 10,
        (int)row->capability % 10, driver, row->version, row->date);
    return length < 0 ? 0 : (size_t)length < bytes ? (size_t)length : bytes - 1;
}

/* ---- reading ---------------------------------------------------------------------------------------------------- */

static void skip_blanks(const char **at)
{
    *at += strspn(*at, " \t\r\n");
}

static bool take(const char **at, char wanted)
{
    skip_blanks(at);
    const bool is_there = **at == wanted;
    *at += is_there;
    return is_there;
}

/* Behind the opening quote. */
static bool take_string(const char **at, char *text, size_t bytes)
{
    size_t length = 0;
    for (; **at && **at != '"'; ++*at) {
        if (**at == '\\' || length + 1 == bytes)
            return false;
        text[length++] = **at;
    }
    text[length] = '\0';
    return take(at, '"');
}

static bool take_word(const char **at, char *text, size_t bytes)
{
    skip_blanks(at);
    const size_t length = strcspn(*at, ",} \t\r\n");
    if (length == 0 || length >= bytes)
        return false;
    memcpy(text, *at, length);
    text[length] = '\0';
    *at += length;
    return true;
}

static bool is_number(const char *text, double *value)
{
    char *end;
    *value = strtod(text, &end);
    return end != text && *end == '\0' && isfinite(*value) && *value > 0;
}

static bool is_one_of(const char *text, const char *no, const char *yes, bool *value)
{
    *value = strcmp(text, yes) == 0;
    return *value || strcmp(text, no) == 0;
}

/* Members that the fit needs, as bits of what was seen. */
enum { PROBLEM = 1, LAYOUT = 2, DIRECTION = 4, SCHEDULE = 8, US = 16, ESTIMATE = 32, GPU = 64, CAPABILITY = 128 };
enum { NEEDED = 255 };

/* False: the value is not of its kind. Other members are for people. */
static bool take_member(const char *name, const char *value, struct tune_row *row, unsigned *seen)
{
    const struct {
        const char *name;
        char *text;
        size_t bytes;
        unsigned bit;
    } words[] = {{"problem", row->problem, sizeof row->problem, PROBLEM},
                 {"schedule", row->schedule, sizeof row->schedule, SCHEDULE},
                 {"gpu", row->gpu, sizeof row->gpu, GPU},
                 {"driver", row->driver, sizeof row->driver, 0},
                 {"version", row->version, sizeof row->version, 0},
                 {"date", row->date, sizeof row->date, 0}};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (strcmp(name, words[i].name) == 0) {
            *seen |= words[i].bit;
            return snprintf(words[i].text, words[i].bytes, "%s", value) < (int)words[i].bytes &&
                   (value[0] || !words[i].bit);
        }
    double capability;
    if (strcmp(name, "layout") == 0)
        return *seen |= LAYOUT, is_one_of(value, "rows", "columns", &row->columns);
    if (strcmp(name, "dir") == 0)
        return *seen |= DIRECTION, is_one_of(value, "fwd", "bwd", &row->backward);
    if (strcmp(name, "us") == 0)
        return *seen |= US, is_number(value, &row->us);
    if (strcmp(name, "estimate_us") == 0)
        return *seen |= ESTIMATE, is_number(value, &row->estimate);
    if (strcmp(name, "in_order") == 0)
        return is_one_of(value, "false", "true", &row->in_order);
    if (strcmp(name, "taken") == 0)
        return is_one_of(value, "false", "true", &row->taken);
    if (strcmp(name, "cc") == 0) {
        *seen |= CAPABILITY;
        const bool good = is_number(value, &capability) && capability < 1000;
        row->capability = good ? (int32_t)lround(10 * capability) : 0;
        return good;
    }
    return true;
}

/* NULL, or what is wrong. */
static const char *read_row(const char *at, struct tune_row *row)
{
    static char problem[128];
    char name[64], value[PROBLEM_NAME_BYTES];
    unsigned seen = 0;
    *row = (struct tune_row){0};
    if (!take(&at, '{'))
        return "is no JSON object";
    do {
        if (!take(&at, '"') || !take_string(&at, name, sizeof name) || !take(&at, ':') ||
            !(take(&at, '"') ? take_string(&at, value, sizeof value) : take_word(&at, value, sizeof value)))
            return "is no JSON object of strings and numbers";
        if (!take_member(name, value, row, &seen)) {
            snprintf(problem, sizeof problem, "has a member \"%s\" that means nothing", name);
            return problem;
        }
    } while (take(&at, ','));
    if (!take(&at, '}') || (skip_blanks(&at), *at))
        return "is no JSON object of strings and numbers";
    return seen == NEEDED ? NULL : "lacks one of problem, layout, dir, schedule, us, estimate_us, gpu, cc";
}

const char *tune_rows_read(const char *path, struct tune_rows *rows)
{
    static char problem[512];
    char text[2048];
    FILE *const file = fopen(path, "r");
    if (!file) {
        snprintf(problem, sizeof problem, "%s", strerror(errno));
        return problem;
    }
    const char *wrong = NULL;
    int line = 0;
    while (!wrong && fgets(text, sizeof text, file)) {
        struct tune_row row;
        line++;
        const char *rest = text;
        skip_blanks(&rest);
        if (!*rest)
            continue;
        wrong = read_row(text, &row);
        if (!wrong && !tune_rows_add(rows, &row))
            wrong = "does not find memory";
    }
    if (!wrong && ferror(file))
        wrong = "cannot be read";
    fclose(file);
    if (!wrong)
        return NULL;
    snprintf(problem, sizeof problem, "line %d %s", line, wrong);
    return problem;
}
