/* SPDX-License-Identifier: MIT
 *
 * signature.h - what a kernel is compiled for: integer constants that are a function of the call and of the GPU alone.
 * A kernel is text, src/cuda/device/<body>.cuh, compiled at run time with these constants ahead of it. Sizes are no
 * part of a signature; they are arguments. */
#ifndef NORMFUSE_CUDA_SIGNATURE_H
#define NORMFUSE_CUDA_SIGNATURE_H

#include <stdbool.h>
#include <stdint.h>

/* The bodies: files of src/cuda/device/ that define a kernel. */
#define NORMFUSE_BODY_LIST(BODY) BODY(single) BODY(stream) BODY(held) BODY(finish) BODY(transpose)
#define NORMFUSE_BODY(name) NORMFUSE_BODY_##name,
enum normfuse_cuda_body { NORMFUSE_BODY_LIST(NORMFUSE_BODY) NORMFUSE_BODIES };
#undef NORMFUSE_BODY

/* The constants, by the names that bodies know them by: signature::type. */
#define NORMFUSE_SIGNATURE_LIST(FIELD)                                                                                 \
    FIELD(body) /* enum normfuse_cuda_body */                                                                          \
    FIELD(backward) /* 0 or 1, as what has no other word here */                                                       \
    FIELD(type) /* normfuse_type */                                                                                    \
    FIELD(y_type) /* single: of y, dy, post_add and dpost_add */                                                       \
    FIELD(activation) /* normfuse_activation */                                                                        \
    FIELD(statistics) /* NORMFUSE_STATISTICS_*, arguments.h */                                                         \
    FIELD(parameters) /* NORMFUSE_PARAMETERS_* */                                                                      \
    FIELD(vector) /* elements of a load */                                                                             \
    FIELD(aligned) /* rows are whole vectors */                                                                        \
    FIELD(threads) /* of a block */                                                                                    \
    FIELD(lanes) /* threads that share a norm group */                                                                 \
    FIELD(across) /* threads of these that share a row */                                                              \
    FIELD(held_columns) /* vectors of a row that a thread holds */                                                     \
    FIELD(held_rows) /* rows that a thread has */                                                                      \
    FIELD(exact) /* every vector of every thread exists */                                                             \
    FIELD(reduces) /* stream: sums go to memory */                                                                     \
    FIELD(applies) /* stream: results are written */                                                                   \
    FIELD(exchanges) /* held: NORMFUSE_EXCHANGE_* */                                                                   \
    FIELD(piece) /* stream, held, channels last: adjacent channels of a vector that are of one norm group, 1 to 8 */            \
    FIELD(statistics_of_groups) /* held, channels last: norm groups have several channels */                           \
    FIELD(resident) /* blocks that a multiprocessor has at once, at least; 0: single, not said */                     \
    FIELD(ahead) /* stream, held: vectors of a thread that are on their way */                                               \
    FIELD(folded) /* stream, held: several rows are walked as one */                                                         \
    FIELD(strided) /* stream: values of a row are not adjacent */                                                      \
    FIELD(walks) /* a block has several samples, one after the other */                                                \
    FIELD(split) /* several blocks share a norm group */                                                               \
    FIELD(shared_by_cluster) /* and exchange what they found */                                                        \
    FIELD(joins_beside) /* norm groups beside one another in a block are samples of the same channels */               \
    FIELD(packed_parameters) /* parameters of adjacent channels are read in vectors */                                 \
    FIELD(packed_statistics) /* saved means and rstds are too */                                                       \
    FIELD(per_sample) /* weights are a sample's own */                                                                 \
    FIELD(positions) /* single: samples are positions, or tiles of them; norm groups are of samples of the call */      \
    FIELD(mean_square) /* single: the mean is 0, and squares are of u itself */                                        \
    FIELD(eps_of_norm) /* single: eps is the least norm, not added under the root */                                   \
    FIELD(rounds_pre_bias) /* single: u is rounded where pre_bias alone is added, too */                               \
    FIELD(pre_add) /* there is such a tensor, and so on */                                                             \
    FIELD(post_add)                                                                                                    \
    FIELD(stores_u)                                                                                                    \
    FIELD(du)                                                                                                          \
    FIELD(dpost_add)                                                                                                   \
    FIELD(from_y) /* post_add is y */                                                                                  \
    FIELD(writes_out) /* y, or dx */                                                                                   \
    FIELD(weight) /* 0: none, else 1 + normfuse_type; and so on */                                                     \
    FIELD(bias)                                                                                                        \
    FIELD(scale)                                                                                                       \
    FIELD(shift)                                                                                                       \
    FIELD(pre_bias)                                                                                                    \
    FIELD(slope)                                                                                                       \
    FIELD(mean)                                                                                                        \
    FIELD(rstd)                                                                                                        \
    FIELD(running_mean)                                                                                                \
    FIELD(running_var)                                                                                                 \
    FIELD(updates_running) /* running statistics are written */                                                        \
    FIELD(keeps_statistics) /* for the running statistics of a later kernel */                                         \
    FIELD(dweight)                                                                                                     \
    FIELD(dbias)                                                                                                       \
    FIELD(gradients) /* NORMFUSE_GRADIENTS_* */                                                                        \
    FIELD(sums_dz) /* single: for a bias or a shift, beside the sums of weights */                                     \
    FIELD(sums_slopes) /* of prelu */                                                                                  \
    /* finish */                                                                                                       \
    FIELD(work) /* NORMFUSE_WORK_* */                                                                                  \
    FIELD(writes_shard) /* a sharded call ends with it */                                                              \
    FIELD(totals) /* of sets are found */                                                                              \
    FIELD(dscale)                                                                                                      \
    FIELD(dshift)                                                                                                      \
    FIELD(dslope)                                                                                                      \
    FIELD(straight) /* transpose: NORMFUSE_COPIES_* */

#define NORMFUSE_FIELD(name) int32_t name;
struct normfuse_cuda_signature { /* compared as bytes */
    NORMFUSE_SIGNATURE_LIST(NORMFUSE_FIELD)
};
#undef NORMFUSE_FIELD
#define NORMFUSE_FIELD(name) +1
enum { NORMFUSE_SIGNATURE_FIELDS = 0 NORMFUSE_SIGNATURE_LIST(NORMFUSE_FIELD) };
#undef NORMFUSE_FIELD
_Static_assert(sizeof(struct normfuse_cuda_signature) == NORMFUSE_SIGNATURE_FIELDS * sizeof(int32_t),
               "a signature has no padding");

enum { NORMFUSE_KERNEL_NAME_BYTES = 64 };

struct normfuse_problem;
struct normfuse_parameter;

/* A call without its geometry: types, which tensors and parameters there are. The rest is 0. */
struct normfuse_cuda_signature normfuse_cuda_signature_of(enum normfuse_cuda_body body, bool backward,
                                                          const struct normfuse_problem *problem);

/* 0: there is no such parameter, else 1 + its type. */
int32_t normfuse_cuda_code_of(const struct normfuse_parameter *parameter);

/* "normfuse_single_forward_f32", "normfuse_finish_merge_f64", "normfuse_transpose_f16". Kernels of several signatures
 * share a name. */
const char *normfuse_cuda_signature_name(const struct normfuse_cuda_signature *signature,
                                         char name[static NORMFUSE_KERNEL_NAME_BYTES]);

#endif
