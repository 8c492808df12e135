/* SPDX-License-Identifier: MIT
 *
 * verify.c - see verify.h. Order of work: lay out memory and fill it (verify_data.c), call the library (verify_run.c),
 * run the reference, bound it and compare (verify_compare.c), then look at the memory around the tensors. */
#define _GNU_SOURCE
#include "verify_work.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device.h"

/* ---- the whole ------------------------------------------------------------------------------------------------ */

static const char *impossible(const struct problem_line *line, const struct verify_options *options)
{
    bool grouped = line->op == GROUP_NORM || line->op == INSTANCE_NORM;
    bool evaluates = line->evaluate || options->evaluate;
    if (line->device == NORMFUSE_CPU && (options->no_sync || options->graph))
        return "+no_sync and +graph need device=cuda";
    if (options->resum && !(line->backward && line->write_u))
        return "+resum is of a backward with +u";
    if (options->from_y && !(line->backward && line->post_add))
        return "+from_y is of a backward with +post_add";
    if (!line->backward && (options->left_out & VERIFY_Y) && (line->op == AFFINE || evaluates))
        return "+no_y leaves nothing to write";
    if (options->evaluate && line->op != INSTANCE_NORM)
        return "+evaluate is instance norm's";
    if (options->running && (line->backward || evaluates || (line->op != INSTANCE_NORM && line->op != BATCH_NORM)))
        return "+running is a training forward's of batch and instance norm";
    if (options->cumulative && !options->running)
        return "+cumulative needs +running";
    if (options->in_place &&
        (problem_line_is_mixed(line) || options->expanded || problem_line_y_type(line) != line->type))
        return "+inplace needs one layout and one dtype, and no sample that is every one's";
    if (options->sharded &&
        (line->op == AFFINE || line->op == CHANNEL_NORM || evaluates || (grouped && line->ndim < 3)))
        return "+sharded is of statistics, and of group norm with a spatial axis";
    if (options->accumulate && !line->backward && (line->op != BATCH_NORM || evaluates))
        return "+accumulate is backward's, and batch norm's in training";
    if (options->accumulate && (line->per_sample || options->sharded))
        return "+accumulate goes with neither per=sample nor +sharded";
    return NULL;
}

int64_t verify_sets(const struct problem_line *line)
{
    bool grouped = line->op == GROUP_NORM || line->op == INSTANCE_NORM;
    int64_t positions = 1;
    for (int32_t axis = 2; axis < line->ndim; axis++)
        positions *= line->sizes[axis];
    if (line->op == CHANNEL_NORM)
        return line->sizes[0] * line->groups * positions;
    return grouped ? line->sizes[0] * line->groups : line->sizes[1];
}

static enum verify_outcome verify_work(struct work *work)
{
    struct verify_result *result = work->result;
    bool backward = work->line->backward;
    work->records = calloc((size_t)work->sets + 1, sizeof *work->records);
    if (!work->records || !verify_make_tensors(work))
        return verify_conclude(result, VERIFY_NO_MEMORY, "no memory for the tensors");
    if (backward) {
        int64_t entries = work->set_is_group ? work->n * work->c : work->c;
        work->dweight = calloc((size_t)(10 * entries) + 1, sizeof(double));
        if (!work->dweight)
            return verify_conclude(result, VERIFY_NO_MEMORY, "no memory for the gradients");
        work->dweight_error = work->dweight + entries;
        work->dbias = work->dweight_error + entries;
        work->dbias_error = work->dbias + entries;
        work->dslope = work->dbias_error + entries;
        work->dslope_error = work->dslope + entries;
        work->dscale = work->dslope_error + entries;
        work->dscale_error = work->dscale + entries;
        work->dshift = work->dscale_error + entries;
        work->dshift_error = work->dshift + entries;
    }
    if ((backward || !work->options->bits_only) && !verify_make_statistics(work))
        return verify_conclude(result, VERIFY_NO_MEMORY, "no memory for the reference");
    const enum verify_outcome outcome = verify_run(work);
    if (outcome != VERIFY_PASSED)
        return outcome;
    struct tally tally = {.compared = 0};
    if (!verify_compare(work, &tally))
        return verify_conclude(result, VERIFY_NO_MEMORY, "no memory for the reference");
    result->budget_used = tally.budget_used;
    result->got = tally.got;
    result->want = tally.want;
    result->compared = tally.compared;
    result->beyond = tally.beyond;
    result->unbounded = tally.unbounded;
    result->hash = tally.hash;
    snprintf(result->tensor, sizeof result->tensor, "%s", tally.tensor ? tally.tensor : "");
    snprintf(result->index, sizeof result->index, "%s", tally.index);
    const char *changed = verify_find_changed(work);
    if (changed)
        return verify_conclude(result, VERIFY_FAILED, "%s: memory that is not an output was changed", changed);
    if (tally.beyond)
        return verify_conclude(result, VERIFY_FAILED, "%s[%s] got %.9g want %.9g budget used %.3g %%", result->tensor,
                               result->index, tally.got, tally.want, 100 * tally.budget_used);
    return result->outcome = VERIFY_PASSED;
}

enum verify_outcome verify_problem(const struct problem_line *line, const struct verify_options *options,
                                   struct verify_result *result)
{
    *result = (struct verify_result){ .status = NORMFUSE_OK };
    const char *reason = impossible(line, options);
    if (reason)
        return verify_conclude(result, VERIFY_IMPOSSIBLE, "%s", reason);
    struct work work = { .line = line, .options = options, .result = result, .n = line->sizes[0], .c = line->sizes[1] };
    work.on_device = line->device == NORMFUSE_CUDA;
    if (work.on_device) {
        result->status = normfuse_prepare(0);
        if (result->status != NORMFUSE_OK)
            return verify_conclude_refused(result);
        if (!device_open()) {
            result->status = NORMFUSE_DEVICE_ERROR;
            return verify_conclude(result, VERIFY_REFUSED, "%s", device_error());
        }
        char name[512];
        const int length = (int)problem_line_name(line, name, sizeof name);
        verify_options_name(options, name + length, sizeof name - (size_t)length);
        device_name_work(name);
    }
    work.s = 1;
    for (int32_t axis = 2; axis < line->ndim; axis++)
        work.s *= line->sizes[axis];
    work.set_is_position = line->op == CHANNEL_NORM;
    work.set_is_group = line->op == GROUP_NORM || line->op == INSTANCE_NORM || work.set_is_position;
    work.group_sets = work.set_is_position ? work.s : 1;
    work.groups = work.set_is_group ? line->groups : work.c;
    if (work.groups < 1 && work.c > 0)
        return verify_conclude(result, VERIFY_IMPOSSIBLE, "groups is missing");
    work.group_channels = work.set_is_group && work.groups ? work.c / work.groups : 1;
    work.sets = verify_sets(line);
    work.evaluates = line->evaluate || options->evaluate;
    work.threads = options->threads;
    work.gives_u = line->backward && line->write_u && !options->resum;
    work.has_statistics = line->op != AFFINE && !work.evaluates;
    work.parameter = line->has_act_param ? line->act_param : reference_default_parameter(line->activation);
    if (line->type != NORMFUSE_F64)
        work.parameter = (double)(float)work.parameter;
    if (options->set_hashes)
        memset(options->set_hashes, 0, (size_t)work.sets * sizeof *options->set_hashes);
    enum verify_outcome outcome = verify_work(&work);
    verify_free(&work);
    return outcome;
}

/* ---- words ---------------------------------------------------------------------------------------------------- */

static const struct {
    const char *word;
    size_t offset;
} flag_words[] = {
    { "+resum", offsetof(struct verify_options, resum) },
    { "+from_y", offsetof(struct verify_options, from_y) },
    { "+no_weight", offsetof(struct verify_options, no_weight) },
    { "+no_bias", offsetof(struct verify_options, no_bias) },
    { "+inplace", offsetof(struct verify_options, in_place) },
    { "+slice_c", offsetof(struct verify_options, slice_channels) },
    { "+slice_n", offsetof(struct verify_options, slice_batch) },
    { "+expanded", offsetof(struct verify_options, expanded) },
    { "+misaligned", offsetof(struct verify_options, misaligned) },
    { "+strided", offsetof(struct verify_options, strided_parameters) },
    { "+f64_mean", offsetof(struct verify_options, f64_mean) },
    { "+running", offsetof(struct verify_options, running) },
    { "+cumulative", offsetof(struct verify_options, cumulative) },
    { "+evaluate", offsetof(struct verify_options, evaluate) },
    { "+scratch", offsetof(struct verify_options, own_scratch) },
    { "+sharded", offsetof(struct verify_options, sharded) },
    { "+accumulate", offsetof(struct verify_options, accumulate) },
    { "+no_sync", offsetof(struct verify_options, no_sync) },
    { "+twice", offsetof(struct verify_options, twice) },
    { "+graph", offsetof(struct verify_options, graph) },
};

static const struct {
    const char *word;
    unsigned bit;
} output_words[] = {
    { "+no_y", VERIFY_Y },           { "+no_saved", VERIFY_SAVED },   { "+no_dx", VERIFY_DX },
    { "+no_dweight", VERIFY_DWEIGHT }, { "+no_dbias", VERIFY_DBIAS }, { "+no_dscale", VERIFY_DSCALE },
    { "+no_dshift", VERIFY_DSHIFT }, { "+no_dpost_add", VERIFY_DPOST_ADD }, { "+no_dpre_bias", VERIFY_DPRE_BIAS },
    { "+no_dslope", VERIFY_DSLOPE },
};

static const char *const data_words[] = { "random", "large_mean", "constant", "exact", "nan", "inf", "huge", "tiny",
                                          "wide" };

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

bool verify_option(struct verify_options *options, const char *word)
{
    for (size_t i = 0; i < COUNT(flag_words); i++)
        if (strcmp(word, flag_words[i].word) == 0) {
            *(bool *)((char *)options + flag_words[i].offset) = true;
            return true;
        }
    for (size_t i = 0; i < COUNT(output_words); i++)
        if (strcmp(word, output_words[i].word) == 0) {
            options->left_out |= output_words[i].bit;
            return true;
        }
    char *end;
    if (strncmp(word, "+data=", 6) == 0) {
        for (size_t i = 0; i < COUNT(data_words); i++)
            if (strcmp(word + 6, data_words[i]) == 0) {
                options->data = (enum verify_data)i;
                return true;
            }
        return false;
    }
    if (strncmp(word, "+seed=", 6) == 0) {
        options->seed = strtoull(word + 6, &end, 10);
        return word[6] && !*end;
    }
    if (strncmp(word, "+threads=", 9) == 0) {
        options->threads = (int32_t)strtol(word + 9, &end, 10);
        return word[9] && !*end;
    }
    return false;
}

void verify_options_name(const struct verify_options *options, char *name, size_t bytes)
{
    size_t length = 0;
    if (bytes)
        name[0] = 0;
#define APPEND(...)                                                                                                    \
    do {                                                                                                               \
        int more = snprintf(length < bytes ? name + length : NULL, length < bytes ? bytes - length : 0, __VA_ARGS__);  \
        length += more > 0 ? (size_t)more : 0;                                                                         \
    } while (0)
    for (size_t i = 0; i < COUNT(flag_words); i++)
        if (*(const bool *)((const char *)options + flag_words[i].offset))
            APPEND(" %s", flag_words[i].word);
    for (size_t i = 0; i < COUNT(output_words); i++)
        if (options->left_out & output_words[i].bit)
            APPEND(" %s", output_words[i].word);
    if (options->data != VERIFY_RANDOM)
        APPEND(" +data=%s", data_words[options->data]);
    if (options->threads)
        APPEND(" +threads=%d", (int)options->threads);
    if (options->seed)
        APPEND(" +seed=%llu", (unsigned long long)options->seed);
#undef APPEND
}
