/* SPDX-License-Identifier: MIT
 *
 * kernels.h - the passes over memory, and the table that each instruction set exports. A pass sees one block of memory:
 * `rows` rows of n adjacent values. Under rows a row is (a part of) a channel and has one coefficient; under columns a
 * row is a position and each of its n columns has one.
 *
 * Coefficients and sums are of the compute type: float, or double for f64 tensors. Passes never touch memory past
 * the n values of a row. y may be any of the inputs, with the same stride. */
#ifndef NORMFUSE_CPU_KERNELS_H
#define NORMFUSE_CPU_KERNELS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "exact_math.h"

/* Bytes that the first pass over a tensor prefetches ahead: the hardware's prefetches end with each page. */
enum { NORMFUSE_PREFETCH_BYTES = 2048 };

/* The arguments of every pass; each reads those that its comment in the list below names. Strides are in elements,
 * between rows. */
struct normfuse_pass {
    const void *x, *dy, *post_add, *du;
    void *y, *dpost_add;
    ptrdiff_t x_stride, dy_stride, post_add_stride, du_stride, y_stride, dpost_add_stride;
    size_t rows, n;
    /* z = (x - k)*a + b [+ post_add]; a NULL, in a backward: z = post_add, which is y then. Runs: entry r*coefficient_step is
     * row r's; columns: entry c is column c's */
    const void *k, *a, *b;
    /* dx = p*dy' + (q*(x - k) + r) [+ du], indexed likewise */
    const void *p, *q, *r;
    size_t coefficient_step;
    /* dy' in the compute type, whose rows are kept_stride apart, or NULL: dot2 writes it, affine2 reads it in the place of dy and z */
    void *kept;
    ptrdiff_t kept_stride;
    /* dot2 under rows: sums are per row (true) or one over all rows (false) */
    bool sum_per_row;
    void *sum, *square; /* added to under columns, overwritten under rows */
    /* moments under rows: so many sets, each with a k, a sum and a square of its own; rows of the next one are set_stride on */
    size_t sets;
    ptrdiff_t set_stride;
    int32_t activation;
    double act_param;
    const void *slope; /* NORMFUSE_PRELU: act_param of each row or column, indexed as k */
    void *slope_sum;   /* dot2 of NORMFUSE_PRELU, where not NULL: sum of dy*z where z is not above 0, like sum */
    bool stream;      /* affine passes: write y past the cache, */
    ptrdiff_t ahead_x, ahead_dy; /* and prefetch what is so many bytes from each x and dy that is read; 0: nothing */
};

/* PASS(name, what it does) */
#define NORMFUSE_FOR_EACH_PASS(PASS)                                                                                  \
    PASS(moments_rows)    /* sum = sum of x - k, square = sum of (x - k)^2, over all rows of a set */                \
    PASS(moments_columns) /* the same per column */                                                                  \
    PASS(affine_rows)     /* y = act(z) */                                                                           \
    PASS(affine_columns)                                                                                             \
    PASS(dot2_rows)       /* sum = sum of dy', square = sum of dy'*(x - k); dy' = dy*act'(z); where not NULL writes     \
                             dpost_add = dy' and y = p*dy' [+ du] */                                                 \
    PASS(dot2_columns)                                                                                               \
    PASS(affine2_rows)    /* y = p*dy' + (q*(x - k) + r) [+ du]; q NULL: y = p*dy' [+ du]; writes dpost_add */          \
    PASS(affine2_columns)                                                                                            \
    PASS(add)             /* y = x + dy, rounded */

/* A tile of norm over channels: `positions` positions of `groups` norm groups of `channels` channels. Under columns strides are
 * between positions; under rows they are between channels, groups is 1, and a position is a lane. Arrays of the compute type have
 * room for a vector behind their end. */
struct normfuse_channels {
    size_t positions, groups, channels;
    const void *x, *post_add;           /* of the tensors' type, x of sums of rows of the compute type; post_add: or du, or NULL */
    void *y, *z;                        /* y or dx; z not NULL: in its place in the compute type, of no activation and addition */
    ptrdiff_t x_stride, post_add_stride, y_stride;
    const void *dy;                     /* compute type; columns: NULL, or of position_gradients; rows: of sums */
    void *gradient;                     /* compute type */
    ptrdiff_t dy_stride, gradient_stride;
    void *tile;                         /* rows, compute type: channels `pitch` apart, a multiple of 16 */
    size_t pitch, width;                /* width: positions and the lanes behind them, a multiple of 16 */
    size_t z_pitch;                     /* rows: of z; where it is less than width, a row ends with the next one's beginning */
    bool continues;                     /* rows: sums over channels go on from those of the channels before */
    bool centred, stream;               /* columns, stream: y and its stride are multiples of 64 bytes */
    ptrdiff_t ahead, ahead_dy;          /* prefetches what is so many bytes behind x, and dy or else gradient; 0: nothing */
    const void *weight, *bias;          /* compute type, per channel */
    void *sum_bias, *sum_weight;
    void *shift, *sum, *square;         /* compute type, per norm group; rows: per position */
    const void *rstd, *rest, *slope, *offset;
};

/* PASS(name, what it does to positions, or channels, [from, to) of a tile): norm over channels; h = (x - shift)*rstd + rest.
 * Names that end with z write z, in the compute type: norm groups may end inside a vector, and nothing is added. */
#define NORMFUSE_FOR_EACH_CHANNEL_PASS(PASS)                                                                          \
    PASS(position_shifts)    /* columns: shift = mean, or 0 where not centred */                                      \
    PASS(position_moments)   /* sum and square of x - shift and its square */                                         \
    PASS(position_y)         /* y = h*weight + bias [+ post_add]; channels is a multiple of 16 */                     \
    PASS(position_z)                                                                                                  \
    PASS(position_sums)      /* as sums below, sum_bias and sum_weight added to */                                    \
    PASS(position_dx)        /* y = rstd*(gradient*weight) + (slope*h + offset) [+ post_add] */                       \
    PASS(position_dx_z)                                                                                               \
    PASS(channel_sums)       /* rows: tile = x; sum, or where not centred square, over the channels */                \
    PASS(channel_y)          /* of the tile of x */                                                                   \
    PASS(channel_z)                                                                                                   \
    PASS(channel_dx)         /* of the tile of h */                                                                   \
    PASS(channel_dx_z)
/* NULL of f64, and in plain C, which stay small: SiLU takes the way of other activations. */
#define NORMFUSE_FOR_EACH_SILU_PASS(PASS)                                                                             \
    PASS(position_y_silu) PASS(channel_y_silu)                                                                        \
    PASS(position_gradients) /* gradient = dy*SiLU'(h*weight + bias) */

typedef void (*normfuse_channel_pass_function)(const struct normfuse_channels *, size_t from, size_t to);
typedef void (*normfuse_pass_function)(const struct normfuse_pass *);

struct normfuse_passes {
#define PASS(name) normfuse_pass_function name;
    NORMFUSE_FOR_EACH_PASS(PASS)
#undef PASS
#define PASS(name) normfuse_channel_pass_function name;
    NORMFUSE_FOR_EACH_CHANNEL_PASS(PASS)
    NORMFUSE_FOR_EACH_SILU_PASS(PASS)
#undef PASS
    /* n adjacent values to the compute type, or onto what is there; prefetches what is so many bytes behind each. `to` has room
     * for whole vectors. */
    void (*load)(const void *from, void *to, size_t n, bool onto, ptrdiff_t ahead);
    /* and back, rounded; stream: past the cache */
    void (*store)(const void *from, void *to, size_t n, bool stream);
};

/* Many sets of few values in the L1 cache, in the compute type (small_sets.inl). `samples` samples of `rows` rows of `sets` x n
 * adjacent values; a set has n values of each row of a sample. Every array has room for a vector behind its end, and none that is
 * written is another's, but dx may be u. */
struct normfuse_small_sets {
    size_t samples, rows, sets, n, summed;
    const void *u, *gradient;                 /* per value */
    void *normalized, *z, *dx;
    const void *weight, *bias;                /* per value of a row, the same for all rows and samples */
    void *sum_bias, *sum_weight;              /* per `summed` values of a row */
    void *shift, *sum, *square;               /* per set, sample by sample */
    const void *rstd, *rest, *slope, *offset;
    void *columns[3];                         /* several rows: room per value of a row */
    const char *ahead; /* each function prefetches a place beside a value: so many bytes to the next sample, row, value */
    ptrdiff_t ahead_sample, ahead_row, ahead_value;
};

enum { NORMFUSE_SMALL_CHUNK = 4096 }; /* longest f32 sum: 128 additions a lane */

struct normfuse_small_set_functions {
    /* shift = mean of the set as a sum gives it; sum, square: of u - shift and (u - shift)^2 */
    void (*moments)(const struct normfuse_small_sets *);
    /* normalized = (u - shift)*rstd + rest; z = normalized*weight + bias; either may be NULL */
    void (*normalize)(const struct normfuse_small_sets *);
    /* sum_bias += gradient, sum_weight += gradient*normalized over rows and samples; per set sum of gradient*weight, square of
     * gradient*weight*normalized */
    void (*sums)(const struct normfuse_small_sets *);
    /* dx = rstd*(gradient*weight) + (slope*normalized + offset) */
    void (*dx)(const struct normfuse_small_sets *);
    /* n values, a multiple of 16 */
    void (*activate)(int32_t activation, double parameter, void *z, size_t n);
    void (*activate_gradient)(int32_t activation, double parameter, void *gradient, const void *z, size_t n);
    /* NORMFUSE_PRELU of `rows` rows of n adjacent values, whose slopes are those of a row; gradient not NULL: of it, and
     * sum_slope, where not NULL, += gradient*z where z is not above 0, over the rows */
    void (*prelu)(const void *slope, void *z, void *gradient, void *sum_slope, size_t rows, size_t n);
};

enum { NORMFUSE_CHANNEL_CHUNK = 128 }; /* most rows of one f32 sum */

struct normfuse_channel_functions {
    /* sum and square of tile - shift and of its square over the channels */
    void (*moments)(const struct normfuse_channels *);
    /* of channels [from, to), x and dy of the compute type: tile = h, gradient = dy, for dx; per position sum of
     * gradient*weight, square of gradient*weight*h; per channel sum_bias = sum of gradient, sum_weight of gradient*h, over the
     * positions. x may be the tile, and dy the gradient. */
    normfuse_channel_pass_function sums;
    normfuse_channel_pass_function sums_silu; /* gradient = dy*SiLU'(h*weight + bias); NULL of f64, and in plain C */
    /* The passes of columns, with the same bits, over norm groups of at most 32 values of f32: x and gradient have no
     * gaps, and z is written. NULL of f64, and in plain C, which stays small. */
    normfuse_channel_pass_function short_moments, short_apply, short_sums, short_dx;
};

/* Norm groups of n values each; the arrays have room for a vector behind their end. */
struct normfuse_norm_groups {
    void *shift, *rstd, *rest; /* compute type */
    double *mean, *m2, *double_rstd;
    size_t sets;
    double n, eps;
    bool centred, eps_added;   /* eps_added: to the variance; otherwise it is the minimum of the norm */
};

/* Sums per column, from the compute type to double: columns.inl. */
struct normfuse_column_functions {
    void (*accumulate)(const void *from, double *to, size_t columns, size_t rows);
    bool (*join)(void *shift, const void *sum, const void *square, double *mean, double *m2, size_t columns,
                 size_t rows, double n, double before);
    /* sums of norm groups to their statistics; false: f32 cannot hold one's squares, and nothing has changed */
    bool (*statistics)(const struct normfuse_norm_groups *);
};

struct normfuse_table {
    const char *isa;
    bool (*usable)(void);             /* this CPU and its OS have the instructions */
    void (*fence)(void);              /* orders streaming stores before what follows */
    const struct normfuse_column_functions *columns; /* [2]: compute type float, double */
    const struct normfuse_small_set_functions *small_sets; /* [2] likewise */
    const struct normfuse_channel_functions *channels;     /* [2] likewise */
    const struct normfuse_passes *of[4];             /* by normfuse_type */
};

/* c = a*b + c of 16 values, rounded once, on machines without the instruction: fma.c. */
void normfuse_fma(const float *a, const float *b, float *c);

/* Tables compiled for this architecture, best first, NULL at the end. */
extern const struct normfuse_table *const normfuse_tables[];
/* The one that runs: the first usable one under the cap of NORMFUSE_MAX_ISA. */
const struct normfuse_table *normfuse_table_chosen(void);

/* Functions that one table takes from another. */
extern const struct normfuse_column_functions normfuse_columns_avx512[2];
extern const struct normfuse_small_set_functions normfuse_small_sets_avx512[2];
extern const struct normfuse_channel_functions normfuse_channels_avx512[2];
extern const struct normfuse_passes normfuse_passes_f64_avx512, normfuse_passes_f32_avx512, normfuse_passes_f16_avx512;

extern const struct normfuse_table normfuse_table_scalar, normfuse_table_avx2, normfuse_table_avx512,
    normfuse_table_avx512bf16, normfuse_table_neon;

#endif
