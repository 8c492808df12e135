/* SPDX-License-Identifier: MIT
 *
 * tuning.c - the tunings: see tuning.h. One that is loaded is published by one atomic pointer and only read from then
 * on, so that plans take no lock. A file has the lines that `normfuse tune --help` shows; empty ones and those that
 * begin with # say nothing. */
#include "tuning.h"

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "schedules.h"
#include "tuning_tables.h"

enum { MAX_LINES = 64, LINE_BYTES = 256 }; /* more than two for each schedule of each layout */

struct loaded {
    struct normfuse_cuda_tuning tuning;
    struct loaded *before; /* kept, since another thread may plan by it */
    struct normfuse_cuda_tuning_line lines[MAX_LINES];
};

static _Atomic(const struct normfuse_cuda_tuning *) current;
static _Atomic(struct loaded *) all;
static _Atomic(bool) environment_is_read;

const struct normfuse_cuda_tuning *normfuse_cuda_loaded_tuning(void)
{
    return atomic_load_explicit(&current, memory_order_acquire);
}

void normfuse_cuda_use_tuning(const struct normfuse_cuda_tuning *tuning)
{
    atomic_store_explicit(&current, tuning, memory_order_release);
    atomic_store(&environment_is_read, true);
}

const struct normfuse_cuda_tuning *normfuse_cuda_tuning_of(const struct normfuse_cuda_tuning *loaded,
                                                           const struct normfuse_cuda_device *device)
{
    if (loaded != NULL && loaded->capability == device->capability)
        return loaded;
    const struct normfuse_cuda_tuning *nearest = tables;
    for (size_t i = 0; i < sizeof tables / sizeof *tables; i++) {
        if (strstr(device->name, tables[i].gpu) != NULL)
            return &tables[i];
        if (abs(tables[i].capability - device->capability) < abs(nearest->capability - device->capability))
            nearest = &tables[i];
    }
    return nearest;
}

const struct normfuse_cuda_tuning_line *normfuse_cuda_tuning_line_of(const struct normfuse_cuda_tuning *tuning,
                                                                     const char *schedule, bool columns, bool backward)
{
    const uint16_t code = normfuse_cuda_schedule_code(schedule);
    for (int32_t i = 0; i < tuning->count; i++) {
        const struct normfuse_cuda_tuning_line *const line = &tuning->lines[i];
        if (line->columns == columns && line->backward == backward && line->schedule == code)
            return line;
    }
    return NULL;
}

/* ---- files ---------------------------------------------------------------------------------------------------- */

/* Whether the text goes on with this word, which is then behind *text. */
static bool takes(const char **text, const char *word)
{
    const size_t length = strlen(word);
    const bool is_there = strncmp(*text, word, length) == 0;
    *text += is_there ? length : 0;
    return is_there;
}

/* A number with digits and a point, whatever the locale; NAN: none is there. */
static double take_number(const char **text)
{
    const bool is_negative = takes(text, "-");
    double value = 0.0, unit = 1.0, each = 1.0; /* of digits before the point, or behind it */
    int digits = 0;
    for (;; ++*text) {
        if (**text >= '0' && **text <= '9') {
            value = 10.0 * value + (**text - '0');
            unit *= each;
            digits++;
        } else if (**text == '.' && each == 1.0) {
            each = 10.0;
        } else {
            return digits == 0 ? (double)NAN : (is_negative ? -value : value) / unit;
        }
    }
}

/* What follows "schedule ". NULL: taken; else why not. */
static const char *take_schedule(const char *text, struct loaded *loaded)
{
    const bool columns = takes(&text, "columns ");
    if (!columns && !takes(&text, "rows "))
        return "the layout is neither rows nor columns";
    const bool backward = takes(&text, "backward ");
    if (!backward && !takes(&text, "forward "))
        return "the direction is neither forward nor backward";
    const struct schedule *const *list = columns ? normfuse_cuda_columns_schedules : normfuse_cuda_rows_schedules;
    /* Names have spaces, and may begin alike. */
    const char *rest = text;
    while (*list != NULL && !(takes(&rest, (*list)->name) && takes(&rest, " start "))) {
        rest = text;
        list++;
    }
    if (*list == NULL)
        return "no schedule of this layout has the name, or no start follows it";
    struct normfuse_cuda_tuning *const tuning = &loaded->tuning;
    if (normfuse_cuda_tuning_line_of(tuning, (*list)->name, columns, backward) != NULL)
        return "the schedule has a line already";
    const double start = take_number(&rest), factor = takes(&rest, " factor ") ? take_number(&rest) : (double)NAN;
    if (isnan(start) || isnan(factor) || *rest != '\0')
        return "it must end in: start NUMBER factor NUMBER";
    if (!(fabs(start) <= 1e6 && factor >= 0.01 && factor <= 100.0))
        return "start must be in -1000000 to 1000000, factor in 0.01 to 100";
    loaded->lines[tuning->count++] = (struct normfuse_cuda_tuning_line){
        normfuse_cuda_schedule_code((*list)->name), columns, backward, (float)start, (float)factor};
    return NULL;
}

static const char *take_line(const char *text, int number, struct loaded *loaded, bool *ended)
{
    struct normfuse_cuda_tuning *const tuning = &loaded->tuning;
    if (number == 1)
        return strcmp(text, "normfuse tuning 1") == 0 ? NULL : "it is not: normfuse tuning 1";
    if (*text == '\0' || *text == '#')
        return NULL;
    if (*ended)
        return "something follows the end";
    if (takes(&text, "schedule "))
        return take_schedule(text, loaded);
    if (takes(&text, "gpu ")) {
        strncpy(tuning->gpu, text, sizeof tuning->gpu - 1);
        return NULL;
    }
    if (takes(&text, "capability ")) {
        const double capability = take_number(&text);
        tuning->capability = capability > 0.0 && capability < 1000.0 ? (int32_t)(10.0 * capability + 0.5) : 0;
        return *text == '\0' && tuning->capability > 0 ? NULL : "it is not a capability such as 9.0";
    }
    *ended = strcmp(text, "end") == 0;
    return !*ended                                             ? "it begins with none of gpu, capability, schedule, end"
           : tuning->gpu[0] == '\0' || tuning->capability == 0 ? "gpu or capability is missing"
                                                               : NULL;
}

static normfuse_status read_tuning(const char *call, const char *path, struct loaded *loaded)
{
    FILE *const file = fopen(path, "re");
    if (file == NULL)
        return normfuse_refuse(NORMFUSE_BAD_ARGUMENT, "%s: %.300s cannot be opened", call, path);
    loaded->tuning.lines = loaded->lines;
    char text[LINE_BYTES];
    const char *reason = NULL;
    bool ended = false;
    int number = 1;
    for (; reason == NULL && fgets(text, sizeof text, file) != NULL; number += reason == NULL) {
        size_t length = strlen(text);
        const bool is_whole = length < sizeof text - 1;
        while (length > 0 && strchr(" \r\n", text[length - 1]) != NULL)
            text[--length] = '\0';
        reason = is_whole ? take_line(text, number, loaded, &ended) : "the line is too long";
    }
    fclose(file);
    if (reason == NULL && !ended)
        reason = "the file ends before its line: end";
    return reason == NULL
               ? NORMFUSE_OK
               : normfuse_refuse(NORMFUSE_BAD_ARGUMENT, "%s: %.300s, line %d: %s", call, path, number, reason);
}

normfuse_status normfuse_cuda_load_tuning(const char *call, const char *path)
{
    if (path == NULL) {
        normfuse_cuda_use_tuning(NULL);
        return NORMFUSE_OK;
    }
    int state;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &state);
    struct loaded *loaded = calloc(1, sizeof *loaded), *same = atomic_load(&all);
    normfuse_status status = loaded == NULL
                                 ? normfuse_refuse(NORMFUSE_OUT_OF_MEMORY, "%s: no memory for a tuning", call)
                                 : read_tuning(call, path, loaded);
    /* What was loaded before and says the same: plans are remembered by it, and memory does not grow. */
    while (status == NORMFUSE_OK && same != NULL &&
           (strcmp(same->tuning.gpu, loaded->tuning.gpu) != 0 || same->tuning.capability != loaded->tuning.capability ||
            memcmp(same->lines, loaded->lines, sizeof same->lines) != 0))
        same = same->before;
    if (status == NORMFUSE_OK && same == NULL) {
        loaded->before = atomic_load(&all);
        while (!atomic_compare_exchange_weak(&all, &loaded->before, loaded))
            continue;
        same = loaded;
        loaded = NULL;
    }
    free(loaded);
    if (status == NORMFUSE_OK)
        normfuse_cuda_use_tuning(&same->tuning);
    pthread_setcancelstate(state, NULL);
    return status;
}

normfuse_status normfuse_cuda_tuning_of_environment(bool reports)
{
    if (atomic_load_explicit(&environment_is_read, memory_order_acquire))
        return NORMFUSE_OK;
    const char *const path = getenv("NORMFUSE_TUNING");
    const normfuse_status status =
        path != NULL && *path != '\0' ? normfuse_cuda_load_tuning("NORMFUSE_TUNING", path) : NORMFUSE_OK;
    if (status != NORMFUSE_OK && !reports)
        return status;
    /* Of several threads one says it. */
    return atomic_exchange(&environment_is_read, true) ? NORMFUSE_OK : status;
}
