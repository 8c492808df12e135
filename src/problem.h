/* SPDX-License-Identifier: MIT
 *
 * problem.h - tensors and options, checked, as one of two pictures of memory. api.c fills it, a backend runs it; a
 * backend knows nothing of operator names.
 *
 *   rows      positions of a channel are adjacent (NCHW): a set of values that share statistics is R rows
 *   columns   channels of a position are adjacent (NHWC): a set is D adjacent columns over rows
 */
#ifndef NORMFUSE_PROBLEM_H
#define NORMFUSE_PROBLEM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "normfuse.h"

/* The values that share statistics. */
enum normfuse_sets {
    NORMFUSE_SETS_NONE,  /* statistics are given (running) or there are none (affine) */
    NORMFUSE_SETS_GROUP, /* the values of one sample and one group of channels */
    NORMFUSE_SETS_BATCH, /* the values of one channel */
    NORMFUSE_SETS_POSITION /* the values of one position and one group of channels */
};

/* The phases of a call; forward is STATISTICS | APPLY, a sharded one does either. */
enum normfuse_phase {
    NORMFUSE_PHASE_STATISTICS = 1,          /* moments of u */
    NORMFUSE_PHASE_APPLY = 2,               /* y */
    NORMFUSE_PHASE_BACKWARD_SUMS = 4,       /* sums of dy' and dy' * (u - mean) */
    NORMFUSE_PHASE_BACKWARD_APPLY = 8       /* dx and the gradients of the parameters */
};

/* A big tensor: element (n, c, s) is at data[n*batch + c*channel + s*position], in elements; the spatial axes are one.
 * data NULL: absent. On axes of size 1 the stride is 0, but for the picture's contiguous axis, where it is 1. */
struct normfuse_view {
    char *data;
    ptrdiff_t batch, channel, position;
};

/* A parameter: element (n, c) is at data[n*batch + c*channel]; batch is 0 when it has no N axis, channel where all
 * channels have one. data NULL: absent or without elements. */
struct normfuse_parameter {
    char *data;
    ptrdiff_t batch, channel;
    int32_t type; /* normfuse_type */
};

enum { NORMFUSE_MEMO_WORDS = 288 };

struct normfuse_problem {
    const char *name; /* "group_norm forward", for messages */
    uint64_t *memo; /* NULL, or a backend's words of calls that differ in addresses alone, 0 in the first such call */
    enum normfuse_sets sets;
    int32_t phases;
    int32_t type;   /* of the big tensors, but */
    int32_t y_type; /* of y, dy, post_add and dpost_add: SETS_POSITION may have another one, of the same compute type */
    bool columns; /* the picture, chosen by x: views whose position (rows) or channel (columns) stride is 1 are walked in
                     place, others through a transposing copy of a tile */
    bool accumulate; /* stats, sums, dweight and dbias */
    bool accumulate_pre_bias, accumulate_slope; /* dpre_bias, dslope */
    bool rounds_pre_bias; /* CUDA: u is rounded where pre_bias alone is added, too */
    bool has_running_momentum; /* running statistics are to be updated */
    bool from_y; /* backward: post_add is the forward's y, and act'(z) follows from it alone */
    int32_t activation;
    double act_param;
    double eps;
    int32_t statistics, eps_kind; /* SETS_POSITION */
    double momentum;
    int64_t n, c, s;
    int64_t groups;     /* SETS_GROUP, SETS_POSITION: as given; SETS_BATCH, SETS_NONE: c */
    int64_t set_values; /* divisor of the backward's means */

    struct normfuse_view x, pre_add, post_add, y, u, dy, du, dx, dpost_add;
    struct normfuse_parameter weight, bias, scale, shift, pre_bias;
    /* weight and bias, with their gradients, are [N, C]; pre_bias is. All samples may have the same, at a distance of
     * 0. */
    bool weights_samples, biases_samples;
    struct normfuse_parameter dweight, dbias, dscale, dshift, dpre_bias;
    struct normfuse_parameter slope, dslope; /* NORMFUSE_PRELU's, both [C] or both [1] */
    /* mean, rstd: (n, g) at n*batch + g*channel; SETS_BATCH: batch 0; SETS_POSITION: (n, g, s) is s behind that. With
     * SETS_NONE and `evaluate` the statistics are running_mean and running_var. */
    bool evaluate;
    struct normfuse_parameter mean, rstd, running_mean, running_var;
    double *stats; /* triples; STATISTICS without APPLY writes them, APPLY without STATISTICS reads them */
    double *sums;  /* pairs per (n, c) or c, likewise */

    normfuse_device device; /* of every tensor */
};

/* ---- problem.c ------------------------------------------------------------------------------------------------ */

enum normfuse_call {
    NORMFUSE_CALL_FORWARD,
    NORMFUSE_CALL_BACKWARD,
    NORMFUSE_CALL_STATS,
    NORMFUSE_CALL_APPLY,
    NORMFUSE_CALL_BACKWARD_SUMS,
    NORMFUSE_CALL_BACKWARD_APPLY,
    NORMFUSE_CALL_FORWARD_SCRATCH, /* takes the tensors of forward, stats and apply */
    NORMFUSE_CALL_BACKWARD_SCRATCH /* likewise */
};

/* Check everything about a call's options and tensors and say it as a problem. Read no element but the counts of
 * merged stats. */
normfuse_status normfuse_group_norm_problem(struct normfuse_problem *problem, enum normfuse_call call,
                                            const normfuse_group_norm_options *options,
                                            const normfuse_tensors *tensors);
normfuse_status normfuse_batch_norm_problem(struct normfuse_problem *problem, enum normfuse_call call,
                                            const normfuse_batch_norm_options *options,
                                            const normfuse_tensors *tensors);
normfuse_status normfuse_channel_norm_problem(struct normfuse_problem *problem, enum normfuse_call call,
                                              const normfuse_channel_norm_options *options,
                                              const normfuse_tensors *tensors);
normfuse_status normfuse_affine_problem(struct normfuse_problem *problem, enum normfuse_call call,
                                        const normfuse_affine_options *options, const normfuse_tensors *tensors);
/* x alone, of which neither data nor statistics nor the number of samples matter: c, s, type, columns and device are
 * set, and n, to 1 at least. */
normfuse_status normfuse_shape_problem(struct normfuse_problem *problem, const char *name, const normfuse_tensor *x);

/* A row-major tensor of 1 to 8 axes. */
struct normfuse_flat {
    char *data;
    int64_t elements;
    int32_t type;
};
/* `call` and `argument` are for the message. */
normfuse_status normfuse_flat_tensor(struct normfuse_flat *flat, const char *call, const char *argument,
                                     const normfuse_tensor *tensor);
/* A parameter of c channels: [c], any strides. */
normfuse_status normfuse_channel_tensor(struct normfuse_parameter *parameter, const char *call, const char *argument,
                                        const normfuse_tensor *tensor, int64_t c);
normfuse_status normfuse_check_struct(const char *call, const char *argument, uint32_t struct_bytes,
                                      size_t known_bytes);
/* That both running statistics are there, and beside them at most weight and bias. */
normfuse_status normfuse_check_fold_tensors(const char *call, const normfuse_tensors *tensors);

/* ---- status.c ------------------------------------------------------------------------------------------------- */

/* Sets this thread's last error (printf format) and returns status. */
__attribute__((format(printf, 2, 3))) normfuse_status normfuse_refuse(normfuse_status status, const char *format, ...);

/* ---- small helpers -------------------------------------------------------------------------------------------- */

static inline size_t normfuse_type_bytes(int32_t type)
{
    return type == NORMFUSE_F64 ? 8 : type == NORMFUSE_F32 ? 4 : 2;
}

/* True if the big tensors have no element. Their sizes may be vast all the same, and nothing may loop over them. */
static inline bool normfuse_is_empty(const struct normfuse_problem *problem)
{
    return problem->n == 0 || problem->c == 0 || problem->s == 0;
}

#endif
