/* SPDX-License-Identifier: MIT
 *
 * verify.h - runs one problem through the public interface and compares every element that it writes with the double
 * reference, within the bounds of docs/numerics.md. `normfuse check` and tests/cpu/test_operators.c are made of it.
 *
 * With device=cuda the tensors, guards included, are mirrored on the device before the calls and read back after them,
 * so that everything that holds on the CPU is checked there too.
 *
 * Data are a function of (seed, tensor, n, c, position), so that the same problem in another layout, batch or cut has the
 * same values. */
#ifndef NORMFUSE_VERIFY_H
#define NORMFUSE_VERIFY_H

#include "problem_line.h"

enum verify_data {
    VERIFY_RANDOM,     /* bell-shaped, mean 0.25, sigma 1 */
    VERIFY_LARGE_MEAN, /* mean = 10^4 sigma */
    VERIFY_CONSTANT,   /* 3 everywhere: variance 0 */
    VERIFY_EXACT,      /* 4 - 0.5 and 4 + 0.5 in turn: sums are exact in any order */
    VERIFY_NAN,        /* random, but a NaN in the first set */
    VERIFY_INF,        /* random, but an infinity in the first set */
    VERIFY_HUGE,       /* random times 1e30 (f16: 1e4): squares overflow f32 */
    VERIFY_TINY,       /* random times 1e-30 (f16: 1e-4): squares underflow f32 */
    VERIFY_WIDE        /* random times 12: into the tails of activations */
};

/* Outputs that may be left out. */
enum {
    VERIFY_Y = 1,
    VERIFY_SAVED = 2, /* mean and rstd */
    VERIFY_DX = 4,
    VERIFY_DWEIGHT = 8,
    VERIFY_DBIAS = 16,
    VERIFY_DSCALE = 32,
    VERIFY_DSHIFT = 64,
    VERIFY_DPOST_ADD = 128,
    VERIFY_DPRE_BIAS = 256,
    VERIFY_DSLOPE = 512
};

/* All zero: what the problem line says and nothing else. */
struct verify_options {
    uint64_t seed;
    enum verify_data data;
    unsigned left_out;      /* VERIFY_Y ... */
    bool resum;             /* backward of +u: x, pre_add and pre_bias are given, and not u */
    bool from_y;            /* backward of +post_add: y is given in post_add's place */
    bool no_weight, no_bias;
    bool in_place;          /* y = x, u = pre_add, without that u = x; dx = dy, dpost_add = post_add's own memory */
    bool slice_channels, slice_batch; /* tensors are slices of bigger ones */
    bool expanded;          /* dy, du, pre_add, post_add: one sample, by a stride of 0 every sample's */
    bool misaligned;        /* every tensor one element past an aligned address */
    bool strided_parameters;
    bool f64_mean;          /* saved mean in f64 whatever x is */
    bool running;           /* training: running statistics; with instance norm's they are the means over the batch */
    bool cumulative;        /* running statistics are a cumulative average */
    bool evaluate;          /* instance norm with running statistics */
    bool own_scratch;       /* a caller's scratch, exactly as large as asked for */
    bool sharded;           /* stats, merge, apply; sums, merge, apply: over 3 shards */
    bool accumulate;        /* in parts of normfuse_sample_quantum samples */
    bool no_sync;           /* device=cuda: no sync memory */
    bool twice;             /* a second run gives the same bits: on the CPU with another number of threads, with
                             * device=cuda with the sync memory that the first left */
    bool graph;             /* device=cuda: so do two replays of a graph that the calls were captured into */
    int64_t first_sample;   /* the data are those of a bigger batch from here on */
    int32_t threads;        /* 0: the default */
    void (*parallel_for)(void *pool, int64_t tasks, void (*task)(void *context, int64_t i), void *context);
    void *pool;
    int32_t reference_threads; /* 0: 2 */
    bool hashes;               /* find the result's hash, and those of the sets */
    bool bits_only;            /* run and hash, compare nothing */
    uint64_t *set_hashes;      /* NULL, or one a set: of the elementwise outputs and statistics of each */
};

enum verify_outcome {
    VERIFY_PASSED,
    VERIFY_FAILED,    /* beyond a bound, or memory changed that is not an output's */
    VERIFY_REFUSED,   /* by the library: status and its message */
    VERIFY_NO_MEMORY,
    VERIFY_IMPOSSIBLE /* the options do not go with the operator */
};

struct verify_result {
    enum verify_outcome outcome;
    normfuse_status status;
    double budget_used;   /* the greatest part of a bound used; 1 is all of it */
    char tensor[12];      /* where that was: */
    char index[64];       /* "1,37,5": n, c, position; or an element's number */
    double got, want;
    int64_t compared, beyond;
    int64_t unbounded;    /* elements compared whose bound is infinite */
    uint64_t hash;        /* of every output, whatever its layout, where it is asked for; NaNs are alike */
    char message[320];    /* failed: "y[1,37,5] got .. want .. budget used 412 %"; refused, no memory: why */
};

enum verify_outcome verify_problem(const struct problem_line *line, const struct verify_options *options,
                                   struct verify_result *result);

/* Sets that share statistics: what set_hashes must have room for. Group norm: n * groups + g; others: c. */
int64_t verify_sets(const struct problem_line *line);

/* "+pre_add", "+data=large_mean" onto *options; false: not an option. */
bool verify_option(struct verify_options *options, const char *word);
/* The words of the options that are set. */
void verify_options_name(const struct verify_options *options, char *name, size_t bytes);

#endif
