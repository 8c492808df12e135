/* SPDX-License-Identifier: MIT
 *
 * fuzz_problem_line.c - fuzz target of the spelling of problems, and of the operators' values: any bytes as a file of
 * problems, and as one case of tests/cases. What is accepted has a name that reads back as the same problem. A small
 * case is run, and every value compared with the reference (cli/verify.h); another number of threads gives its bits. */
#define _GNU_SOURCE
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "problem_line.h"
#include "tests/ref/reference.h"
#include "verify.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { MAX_WORDS = 64, MOST_VALUES = 1 << 17, MAX_THREADS = 8 };

static void require(bool condition, const char *what, const char *detail)
{
    if (condition)
        return;
    fprintf(stderr, "%s: %s\n", what, detail);
    abort();
}

static double parameter(const struct problem_line *line)
{
    return line->has_act_param ? line->act_param : reference_default_parameter(line->activation);
}

static void check_name(const struct problem_line *line)
{
    char name[PROBLEM_NAME_BYTES], again_name[PROBLEM_NAME_BYTES], error[400];
    require(problem_line_name(line, name, sizeof name) < sizeof name, "a long name", name);
    char *words[] = {name};
    struct problem_line again;
    require(problem_line_parse(words, 1, &again, error, sizeof error) == 1, name, error);
    problem_line_name(&again, again_name, sizeof again_name);
    require(strcmp(name, again_name) == 0, name, again_name);
    require(again.op == line->op && again.ndim == line->ndim && again.groups == line->groups &&
                memcmp(again.sizes, line->sizes, (size_t)line->ndim * sizeof line->sizes[0]) == 0 &&
                again.type == line->type && again.weight_type == line->weight_type &&
                again.channels_last == line->channels_last && again.activation == line->activation &&
                parameter(&again) == parameter(line) && again.evaluate == line->evaluate &&
                again.per_sample == line->per_sample && again.eps == line->eps && again.backward == line->backward &&
                again.device == line->device && again.pre_add == line->pre_add && again.write_u == line->write_u &&
                again.post_add == line->post_add && again.scale_shift == line->scale_shift,
            name, "reads back as another problem");
}

static void check_file(const uint8_t *data, size_t size)
{
    static int descriptor = -1;
    static char path[64];
    if (descriptor < 0) {
        descriptor = memfd_create("fuzz", 0);
        snprintf(path, sizeof path, "@/proc/self/fd/%d", descriptor);
    }
    require(descriptor >= 0 && ftruncate(descriptor, 0) == 0 && pwrite(descriptor, data, size, 0) == (ssize_t)size,
            "a file", "cannot be written");
    struct problem_line *lines;
    size_t count;
    char *arguments[] = {path};
    const char *const failure = problem_lines_read(1, arguments, &lines, &count);
    require(failure == NULL || (failure[0] != 0 && lines == NULL && count == 0), "a refused file", "without a message");
    for (size_t i = 0; i < count; i++)
        check_name(&lines[i]);
    free(lines);
}

/* The bounds are of values that a layer has: where eps or act_param leaves the range of f32 there are none. */
static bool is_ordinary(const struct problem_line *line)
{
    return fabs(line->eps) <= 1e3 && fabs(line->act_param) <= 1e3;
}

static void check_case(char *text)
{
    char *words[MAX_WORDS], *state, error[400];
    size_t count = 0;
    struct verify_options options = {0};
    for (char *word = strtok_r(text, " ", &state); word && count < MAX_WORDS; word = strtok_r(NULL, " ", &state)) {
        if (word[0] != '+' || !verify_option(&options, word))
            words[count++] = word;
    }
    struct problem_line line;
    if (count == 0 || problem_line_parse(words, count, &line, error, sizeof error) != count)
        return;
    int64_t values = 1;
    for (int a = 0; a < line.ndim; a++)
        if (__builtin_mul_overflow(values, line.sizes[a] ? line.sizes[a] : 1, &values) || values > MOST_VALUES)
            return;
    if (line.device != NORMFUSE_CPU || !is_ordinary(&line) || options.threads < 0 || options.threads > MAX_THREADS)
        return;
    struct verify_result result;
    options.reference_threads = 1;
    options.twice = true;
    const enum verify_outcome outcome = verify_problem(&line, &options, &result);
    char name[PROBLEM_NAME_BYTES];
    problem_line_name(&line, name, sizeof name);
    require(outcome != VERIFY_FAILED, name, result.message);
    require(outcome != VERIFY_REFUSED || result.message[0] != 0, name, "refused without a message");
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    check_file(data, size);
    char *const text = malloc(size + 1);
    require(text != NULL, "no memory", "");
    memcpy(text, data, size);
    text[size] = 0;
    check_case(text);
    free(text);
    return 0;
}
