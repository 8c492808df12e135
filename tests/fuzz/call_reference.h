/* SPDX-License-Identifier: MIT
 *
 * call_reference.h - what a call of any operator writes, in long double and naive loops over whole tensors, with how
 * far the results may be from it. Shares nothing with the library but the public header. */
#ifndef NORMFUSE_FUZZ_CALL_REFERENCE_H
#define NORMFUSE_FUZZ_CALL_REFERENCE_H

#include <stdbool.h>
#include <stdint.h>

#include "normfuse.h"

/* In the order of normfuse_tensors. */
enum {
#define SLOT(number, member, kind) number,
#include "slots.def"
#undef SLOT
    SLOTS
};
enum { GROUP, BATCH, AFFINE, CHANNEL };
/* In the order of enum normfuse_call. */
enum { FORWARD, BACKWARD, STATS_OF, APPLY, BACKWARD_SUMS, BACKWARD_APPLY, FORWARD_SCRATCH, BACKWARD_SCRATCH };

#define BIT(slot) (UINT32_C(1) << (slot))

/* A call of any operator: what their options have in common. */
struct call {
    unsigned operator, call;
    uint32_t options_bytes_more, flags;
    int64_t groups;
    double eps;
    int32_t activation, reserved, statistics, eps_kind;
    double act_param, momentum;
    int64_t batches_seen, set_values;
};

static inline normfuse_type type_of(const normfuse_tensor *tensor)
{
    return tensor->dtype.code == 4    ? NORMFUSE_BF16
           : tensor->dtype.bits == 64 ? NORMFUSE_F64
           : tensor->dtype.bits == 32 ? NORMFUSE_F32
                                      : NORMFUSE_F16;
}

static inline bool is_big(int slot)
{
    return slot <= POST_ADD || slot == Y || slot == U || (slot >= DY && slot <= DX) || slot == DPOST_ADD;
}

/* An element that is further from the reference than it may be. */
struct difference {
    int slot;
    int64_t n, c, s; /* or of statistics the norm group, and the number in a triple or pair */
    double got, want, bound;
};

/* True if a call that took tensors with the values of `before` and left those of `after` computed what it should. Both
 * are of the same sizes and strides, each in memory of its own, spatial axes as one; mean and rstd are [rows, groups]
 * (channel norm: [N, groups, positions]), stats [rows, groups, 3], sums [rows, C, 2]. Values are ordinary: where a
 * result is not finite, or may be anything, it is not compared. *compared counts those that are. */
bool call_reference_agrees(const struct call *call, uint32_t present, const normfuse_tensor *before,
                           const normfuse_tensor *after, struct difference *difference, int64_t *compared);

#endif
