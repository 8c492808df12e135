/* SPDX-License-Identifier: MIT
 *
 * problem_line.h - the one spelling of a problem, used by the program, the case files, failure messages and benchmark
 * rows:  group_norm 128x256x28x28 groups=32 dtype=f32 layout=nchw act=silu dir=fwd +post_add
 * Sizes are always N, C, spatial, whatever the layout. docs: `normfuse --help`. */
#ifndef NORMFUSE_PROBLEM_LINE_H
#define NORMFUSE_PROBLEM_LINE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "normfuse.h"

/* Room for every problem_line_name. */
enum { PROBLEM_NAME_BYTES = 512 };

enum problem_operator { GROUP_NORM, INSTANCE_NORM, BATCH_NORM, AFFINE, CHANNEL_NORM };

struct problem_line {
    enum problem_operator op;
    int32_t ndim;
    int64_t sizes[NORMFUSE_MAX_AXES];
    int64_t groups; /* group_norm, channel_norm: as given; instance_norm: C; others: 0 */
    normfuse_type type, weight_type;
    bool has_y_type; /* channel_norm y_dtype: of y, dy, post_add and dpost_add */
    normfuse_type y_type;
    bool channels_last;
    int32_t activation;
    bool has_act_param;
    double act_param;
    bool evaluate;   /* batch_norm mode=eval */
    bool per_sample; /* affine per=sample */
    double eps;
    int32_t statistics, eps_kind; /* channel_norm: stat=rms, eps_kind=norm */
    bool backward;
    int32_t device; /* NORMFUSE_CPU, NORMFUSE_CUDA */
    bool pre_add;     /* +pre_add */
    bool pre_bias;    /* +pre_bias: [C]; the backward writes dpre_bias */
    bool sample_bias; /* +pre_bias=sample: the same of [N, C] */
    bool write_u;     /* +u: the forward writes u; the backward is given u in place of what it is the sum of, and du */
    bool post_add;    /* +post_add: the backward writes dpost_add */
    bool scale_shift; /* +scale: scale and shift; group, instance and channel norm */
    bool one_slope;   /* +one_slope: act=prelu has a slope [1], not [C] */
    /* Which tensors of x's sizes, but not x, have the other layout: +mixed: all; +mixed=inputs, +mixed=outputs. */
    bool mixed, mixed_inputs, mixed_outputs;
};

/* Reads words[0..count): an operator, its sizes, then key=value and +addition words; stops at the next operator's name.
 * Returns how many words it took, or 0 with a message in error[0..error_bytes) that names the word and the rule. A
 * single word that holds spaces (a quoted problem) is split first. */
size_t problem_line_parse(char *const *words, size_t count, struct problem_line *line, char *error,
                          size_t error_bytes);

/* The key=value words alone, onto *line as it stands (for `run`, whose sizes come from the file). 0: taken; 1: not a
 * key of the operator; 2: a bad value (message in error). */
int problem_line_key(struct problem_line *line, const char *word, char *error, size_t error_bytes);

/* A line with every default set. */
struct problem_line problem_line_default(enum problem_operator op);

/* True if u is another tensor than x. */
static inline bool problem_line_adds(const struct problem_line *line)
{
    return line->pre_add || line->pre_bias || line->sample_bias;
}

static inline normfuse_type problem_line_y_type(const struct problem_line *line)
{
    return line->has_y_type ? line->y_type : line->type;
}

static inline bool problem_line_is_mixed(const struct problem_line *line)
{
    return line->mixed || line->mixed_inputs || line->mixed_outputs;
}

/* True if a tensor of x's sizes, but not x, is channels-last. */
static inline bool problem_line_channels_last(const struct problem_line *line, bool is_output)
{
    return line->channels_last != (line->mixed || (is_output ? line->mixed_outputs : line->mixed_inputs));
}

/* The name of a problem: its defaults left out. Returns the length, as snprintf. */
size_t problem_line_name(const struct problem_line *line, char *name, size_t bytes);

/* Every problem of the arguments: words, quoted problems and @file (one problem a line, # comments, blank lines).
 * *lines is allocated. Returns NULL, or a static or formatted message (file and line included). */
extern const char problem_lines_no_memory[]; /* the message when there was no memory */
const char *problem_lines_read(int count, char *const *arguments, struct problem_line **lines, size_t *lines_count);

const char *problem_operator_name(enum problem_operator op);
const char *problem_type_name(normfuse_type type);
const char *problem_activation_name(int32_t activation);

#endif
