/* SPDX-License-Identifier: MIT
 *
 * plan.h - how a problem is cut and laid out in memory, and what the files that run it share:
 *
 *   plan.c        makes the plan: shape first, machine second
 *   pieces.c      the reduce and the apply part of a piece: tiles, passes, chunks and their joins
 *   bundles.c     what a bundle needs before and gives after: coefficients, statistics, gradients of parameters
 *   small_sets.c  norm groups of few values, many at a time
 *   channels.c    norm over the channels of a position
 *   driver.c      schedules pieces on threads */
#ifndef NORMFUSE_CPU_PLAN_H
#define NORMFUSE_CPU_PLAN_H

#include <math.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "cpu/kernels.h"
#include "problem.h"
#include "scalar.h"

enum {
    CHUNK_VALUES = 4096,      /* longest f32 sum under rows: 128 additions a lane */
    CHUNK_ROWS = 128,         /* longest f32 sum under columns */
    SHIFT_VALUES = 64,        /* a piece's first shift is the mean of so many values, */
    SHIFT_ROWS = 8,           /* or rows */
    PIECE_VALUES = 32768,     /* one piece under rows: small enough that a sample feeds all cores */
    THREAD_VALUES = 16384,    /* of a forward, half as many of a backward, pay for waking a thread */
    COLUMN_PIECE_VALUES = 65536, /* under columns, where each piece costs a join of all channels */
    BATCH_PIECE_VALUES = 131072, /* under columns without groups */
    PIECE_ROWS = 256,         /* of 16-bit values, half as many of others: partial sums, 16 bytes a channel, are 1/32 of what was read, */
    PARTIAL_BYTES = 131072,   /* unless they are few */
    BLOCK_ROWS = 128,         /* likewise, of a block of samples, at least: 1/16 */
    STAGE_VALUES = 4096,      /* tiles that go through a copy */
    MAX_FOLDED_COLUMNS = 2048, /* while sums and coefficients stay in the L1 cache */
    FOLDED_COLUMNS = 128,     /* columns that several rows of few channels are folded into */
    BUNDLED_BYTES = 32768,    /* of one sample that a bundle of small norm groups should have */
    MAX_BUNDLED = 16,
    SPREAD_WIDTH = 64,        /* values of a row that are columns where sets are channels, or nothing; */
    SPREAD_MOMENTS = 16,      /* where these have moments */
    SPREAD_ROW = 4096,        /* values of adjacent rows that are applied as one */
    SPREAD_SAMPLES = 4,       /* of a batch, at least, and one for each SPREAD_SHARE values of a row: */
    SPREAD_SHARE = 12,        /* with fewer, repeating coefficients takes longer than it gains */
    BUNDLE_COLUMNS = 2048,    /* that channels, or groups, are taken as one bundle, where there are twice as many, */
    FEW_BUNDLE_COLUMNS = 512, /* or channels of */
    FEW_BUNDLE_ROWS = 256,    /* so few rows */
    SHORT_ROW_BYTES = 1024,
    BLOCK_VALUES = 65536,     /* samples whose weight gradients are summed before they are joined; */
    GROUP_BLOCK_VALUES = 8192, /* of norm groups fewer: each block is a task of its own */
    TASKS_PER_THREAD = 8,     /* ranges of bundles: long enough to pipeline, short enough to balance */
    SMALL_SET_VALUES = 8192,  /* most values of a set that is taken with others, */
    SMALL_SET_CHANNEL_VALUES = 16384, /* of [N, C], */
    SMALL_SET_TILE = 2048,    /* values that are in the L1 cache at once where sets are smaller */
    SMALL_SET_WIDTH = 31,     /* rows: most values of a channel, */
    SMALL_SET_LONG_WIDTH = 64, /* or so many where a set has at most */
    SMALL_SET_FEW = 256,      /* values; columns: */
    SMALL_SET_ROWS = 16,      /* most rows, */
    SMALL_SET_SAMPLE = 4096,  /* values of a sample that are taken at once, in a forward, */
    SMALL_SET_LINE = 32,      /* of which whole multiples of so many values are taken at once */
    SCRATCH_BYTES = 1048576,  /* and 1/16 of the tensor's bytes: as much scratch as dy' may be kept in */
    STACK_BYTES = 20480,      /* scratch of small problems */
    ALIGNMENT = 64,
    COLOUR = 1344 /* between arrays: a store and a load that agree in the low 12 bits of their addresses wait for each
                     other, and arrays of 1024 channels would all agree (moments_columns: 4.3 against 2.9 ns for 16) */
};

/* ---- the plan: shape first, machine second ---------------------------------------------------------------------- */

struct coefficients {
    void *k, *a, *b, *p, *q, *r, *slope; /* compute type; the last with prelu */
};

struct bundle_state {
    double *partials;
    struct coefficients c;
};

/* A part of the threads that works on the same bundles. */
struct team {
    struct bundle_state state[2]; /* bundle b uses state b & 1 */
    char *kept;          /* compute type: dy' of the bundle that is reduced, until it is applied, where plan->kept_values. One for two
                            bundles: a piece is applied before the next bundle's same piece is reduced */
    char *u;             /* likewise u, in x's type, where plan->held_u */
    double *sums;        /* backward, at the join of a bundle: per channel the sum of dy', then of dy'*(u - mean) */
    double *rstd, *rest; /* of the bundle that is prepared or finished, per channel; rest: what k is more than the mean */
};

/* Memory of one thread for small sets: per value of a tile; of a row; of a set. The compute type where void. */
/* Norm over channels: channels [first, first + channels) of positions [s, s + count) of sample n; rows: of one group. */
struct channel_part {
    int64_t n, s, count, group, first, channels;
    int64_t half; /* columns: of arrays of the tile */
};

struct small_worker {
    void *u, *normalized, *z, *gradient;
    void *weight, *bias, *sum_bias, *sum_weight;
    double *bias_so_far, *weight_so_far; /* sum_bias and sum_weight of the block's chunks before */
    void *prelu_slope, *sum_slope; /* with prelu: per value of a row */
    double *slope_so_far;
    void *columns[3];                    /* sets of several rows: per value of a row, for a while */
    void *shift, *sum, *square, *rstd, *rest, *slope, *offset;
    double *mean, *m2, *double_rstd;
    double *bases; /* with pre_bias: what u of a set is less */
    void *biases;  /* norm over channels: pre_bias of each channel */
    char *stage;   /* of the tensors' type: u while it is rounded */
    char *source;  /* norm over channels, of x's type: u of a tile where that is a sum, or x's values are apart */
    struct channel_part last; /* norm over channels: the tile whose results are to be written; count 0: none, and */
    struct {
        void *shift, *rstd, *rest, *slope, *offset;
    } before; /* its statistics and coefficients */
};

/* Memory of one thread. */
struct worker {
    struct team own;        /* where each thread is a team */
    void *shift, *sum, *square, *slope_sum; /* compute type: per column, or per row */
    double *mean, *m2, *slopes; /* columns: the piece so far */
    double *sum64, *square64; /* columns: a chunk's sums per channel */
    char *stage[6];         /* tiles of x or u, pre_add or dy, post_add, du, y, dpost_add */
    struct small_worker small;
};

struct tile {
    int64_t n, c, s;    /* where it starts */
    bool across_values; /* under rows: a row is all values of a bundle's channels in one sample */
    bool across;        /* batch norm under rows: rows are the channels of one sample, not one channel's samples */
    int64_t rows, width; /* rows: channels, or positions; width: positions, or channels */
};

struct plan {
    struct normfuse_problem seen; /* the problem, in the picture that is walked */
    const struct normfuse_problem *p;
    const struct normfuse_table *table;
    const struct normfuse_passes *pass;
    const struct normfuse_column_functions *column;
    const struct normfuse_small_set_functions *small;
    const struct normfuse_channel_functions *channel; /* not NULL: norm over channels (channels.c), which of what follows uses what
                                                         is said there */
    bool backward, reduce, apply, dependent; /* dependent: apply needs what reduce gives */
    bool batch, none, is_double;             /* sets are channels; there are no sets; compute type is double */
    bool add;                                /* u = x + pre_add; pre_bias is a part of the mean */
    bool constant;                           /* every bundle has the same coefficients */
    bool updates_running;
    bool sums_samples; /* into sample_sums */
    bool sums_slopes;  /* into slope_sums */
    bool stream;
    bool all_direct; /* every view can be walked in place */
    bool staged;     /* tiles are small: some go through a copy, */
    bool apply_staged; /* in the apply part, too */
    bool small_sets; /* many sets are taken at a time (small_sets.c): none of what follows up to block_samples is used but
                        bundles, groups, group_channels and sample_bundles */
    size_t type_bytes, real_bytes;

    int64_t bundles, groups, group_channels;
    int64_t segments, length;  /* of a bundle: rows and their values, or samples and theirs */
    int64_t parts, part, segments_per_piece, pieces;
    int64_t folded;            /* rows taken as one */
    int64_t bundle_groups;     /* under rows: adjacent channels of batch norm, or groups of one chunk each, that are one bundle: memory
                                  is walked in long stretches, and small ones share the calls of passes */
    int64_t bundle_channels;   /* most channels of a bundle, of one sample */
    int64_t sample_bundles;    /* bundles that one sample has; where `batch`: all */
    int64_t entries;           /* statistics of a bundle */
    int64_t spread;            /* under columns: short rows of channels that share nothing with others; a sample is a row, and each value of a
                                  channel a column, whose sums and coefficients are the channel's. Under rows, that share cache lines: so
                                  is it applied (61x1031x13x13 bf16: 6.6 copy floors to 1.95). 1: not */
    int64_t chunk_rows;
    int64_t coefficients;      /* entries of each array of struct coefficients */
    int64_t coefficient_step;
    int64_t partial_sums;      /* arrays of partial sums: two, or with those of slopes three */
    int64_t partial_doubles;
    int64_t block_samples, blocks;
    int64_t small_rows, small_width;   /* of a small set: rows, values of each */
    int64_t small_repeat;              /* values of a row that one channel has */
    int64_t small_summed;              /* of these, as many as have one sum of a backward: one, or all where they fill a vector */
    int64_t small_at_once;             /* sets of one sample, and */
    int64_t small_samples;             /* samples, that are taken at once */
    bool short_rows;          /* norm over channels, columns: norm groups of at most two vectors, taken in f32 */
    int64_t positions;        /* norm over channels: most of a tile, */
    int64_t sample_positions; /* of a sample as given: blocks are block_samples samples, or each of its `parts` of `part` positions, */
    int64_t statistic_step;   /* from a position's statistics to the next one's, */
    bool by_sample;           /* and whether samples have parameters or gradients of their own */
    int64_t set_values;
    int64_t kept_values; /* of a bundle whose dy' the backward's sums leave for dx, where an activation costs more than that; 0: none */
    int64_t held_u;      /* of a bundle whose u, a sum that is not written out, the reduce part leaves for the apply part; 0: none */

    /* memory */
    double *weight, *bias;     /* [C] in double */
    double *sample_sums;       /* [blocks][C][2]: weight gradients, or the running statistics of instance norm */
    double *slope_sums;        /* [blocks][C]; of a batch [C] */
    struct worker *workers;
    struct team shared;
    _Atomic int32_t *claims;   /* shared team: [bundles + 1][threads] next piece of each thread's range */
    _Atomic int32_t *finished; /* [bundles + 1] pieces done */
    _Atomic int32_t *ready;    /* [bundles + 1] joined */
    _Atomic int64_t next_task;
    int32_t threads;
    bool teams_of_one;
    bool ahead; /* the apply part prefetches the next bundle's values */
    bool back_and_forth; /* a bundle outgrows the cache: every step walks it the other way, from what was read last */
    int64_t tasks, bundles_per_task, group_ranges, blocks_per_task;
    size_t bytes; /* of memory, and where it is laid out; NULL: nowhere that lasts */
    char *base;
    struct worker worker; /* a memo's, of its one thread, as it is laid out */
};

/* True where a sample has weights or gradients of its own. */
static inline bool has_sample_parameters(const struct normfuse_problem *p)
{
    return p->weights_samples || p->dscale.data || p->dshift.data;
}

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t round_up(int64_t a, int64_t b) { return divide_up(a, b) * b; }
static inline int64_t power_of_two_below(int64_t a) { int64_t p = 1; while (p <= a / 2) p *= 2; return p; }

/* A view can be walked in place: adjacent along the picture's rows, and its rows evenly spaced where a tile spans
 * samples or several rows are taken as one. */
static inline bool direct(const struct plan *plan, const struct normfuse_view *v)
{
    const struct normfuse_problem *p = plan->p;
    if (plan->all_direct)
        return true;
    if (!p->columns)
        return v->position == 1 || p->s == 1;
    if (plan->spread > 1)
        return v->position == 1 && (v->channel == plan->spread || p->c == 1) &&
               (plan->folded == 1 || p->n == 1 || v->batch == p->c * plan->spread);
    if (v->channel != 1 && p->c != 1)
        return false;
    if (plan->folded > 1 && p->s > 1 && v->position != p->c)
        return false;
    if (plan->batch && p->n > 1 && v->batch != (p->s > 1 ? v->position * p->s : v->batch))
        return false;
    if (plan->batch && plan->folded > 1 && p->n > 1 && v->batch != p->s * p->c)
        return false;
    return true;
}

/* ---- values of the compute type ------------------------------------------------------------------------------------ */

static inline double load_real(const struct plan *plan, const void *array, int64_t i)
{
    return plan->is_double ? ((const double *)array)[i] : (double)((const float *)array)[i];
}

static inline void store_real(const struct plan *plan, void *array, int64_t i, double v)
{
    if (plan->is_double)
        ((double *)array)[i] = v;
    else
        ((float *)array)[i] = (float)v;
}

/* ---- parameters -------------------------------------------------------------------------------------------------- */

static inline double load_parameter(const struct normfuse_parameter *q, int64_t n, int64_t c, double absent)
{
    return q->data ? normfuse_load(q->data + (n * q->batch + c * q->channel) * (ptrdiff_t)normfuse_type_bytes(q->type),
                                   q->type)
                   : absent;
}

static inline void store_parameter(const struct normfuse_parameter *q, int64_t n, int64_t c, double v)
{
    if (q->data)
        normfuse_store(q->data + (n * q->batch + c * q->channel) * (ptrdiff_t)normfuse_type_bytes(q->type), q->type, v);
}

static inline double weight_of(const struct plan *plan, int64_t n, int64_t c)
{
    return plan->p->weight.batch || !plan->weight ? load_parameter(&plan->p->weight, n, c, 1) : plan->weight[c];
}

static inline double bias_of(const struct plan *plan, int64_t n, int64_t c)
{
    return plan->p->bias.batch || !plan->bias ? load_parameter(&plan->p->bias, n, c, 0) : plan->bias[c];
}

/* In the compute type. */
static inline double pre_bias_of(const struct plan *plan, int64_t n, int64_t c)
{
    const double bias = load_parameter(&plan->p->pre_bias, n, c, 0);
    return plan->is_double ? bias : (double)(float)bias;
}

/* The sum of n values: value i in lane i % 8, lanes do not wait for one another. */
static inline double sum_in_lanes(const double *values, int64_t n)
{
    double sum[8] = {0};
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        for (int l = 0; l < 8; l++)
            sum[l] += values[i + l];
    for (int l = 0; i < n; i++, l++)
        sum[l] += values[i];
    return ((sum[0] + sum[4]) + (sum[1] + sum[5])) + ((sum[2] + sum[6]) + (sum[3] + sum[7]));
}

/* ---- bundles and pieces ------------------------------------------------------------------------------------------ */

struct moments {
    double count, mean, m2;
};

/* The squares of a chunk overflowed f32, or may have lost digits below its smallest normal number. Sums of 0 are those of
 * a constant unless k is so small that a neighbouring value's square would vanish too. columns.inl has the same rule. */
static inline bool out_of_range(double k, double sum, double square)
{
    return !(square < 3e38) || (square < 0x1p-90 && (square != 0 || sum != 0 || (k != 0 && fabs(k) < 0x1p-30)));
}

/* A piece covers `segments` whole segments from `segment`, or `length` of one from `start`. */
struct piece {
    int64_t segment, segments, start, length;
};

static inline struct piece piece_of(const struct plan *plan, int64_t index)
{
    if (plan->parts > 1) {
        const int64_t start = index % plan->parts * plan->part;
        return (struct piece){index / plan->parts, 1, start, smaller(plan->part, plan->length - start)};
    }
    const int64_t segment = index * plan->segments_per_piece;
    return (struct piece){segment, smaller(plan->segments_per_piece, plan->segments - segment), 0, plan->length};
}

/* The slopes' sums of sample n. */
static inline double *slope_sums_of(const struct plan *plan, int64_t n)
{
    return plan->slope_sums + (plan->batch ? 0 : n / plan->block_samples * plan->p->c);
}

static inline int64_t sample_of(const struct plan *plan, int64_t bundle)
{
    return plan->batch ? 0 : bundle / plan->sample_bundles;
}

/* The first channel of batch norm, or group, of a bundle. */
static inline int64_t group_of(const struct plan *plan, int64_t bundle)
{
    if (plan->p->columns || plan->none)
        return 0;
    return (plan->batch ? bundle : bundle % plan->sample_bundles) * plan->bundle_groups;
}

/* Channels of batch norm, or groups, that a bundle under rows holds. */
static inline int64_t groups_in(const struct plan *plan, int64_t bundle)
{
    return plan->bundle_groups == 1 ? 1 : smaller(plan->bundle_groups, plan->groups - group_of(plan, bundle));
}

/* Channels of a bundle under columns, the first of them, and columns. */
static inline int64_t first_channel(const struct plan *plan, int64_t bundle)
{
    return (plan->batch ? bundle : bundle % plan->sample_bundles) * plan->bundle_channels;
}
static inline int64_t channels_of(const struct plan *plan, int64_t bundle)
{
    return smaller(plan->bundle_channels, plan->p->c - first_channel(plan, bundle));
}
static inline int64_t columns_of(const struct plan *plan, int64_t bundle)
{
    return channels_of(plan, bundle) * plan->spread;
}

/* Repeats the columns' entries for rows that are taken as one. */
static inline void repeat_folded(const struct plan *plan, void *array, int64_t columns)
{
    const size_t bytes = (size_t)columns * plan->real_bytes;
    for (int64_t i = 1; i < plan->folded; i++)
        memcpy((char *)array + (size_t)i * bytes, array, bytes);
}

/* plan.c */
/* Hands out aligned pieces of one block; with base NULL only counts. */
struct arena {
    char *base; /* NULL: nothing is placed (any more), but counted */
    size_t room; /* bytes at base */
    size_t used;
    bool overflows;
};
void *normfuse_take(struct arena *arena, int64_t count, size_t bytes);
/* Samples, a power of two, whose weight gradients are summed before they are joined; blocks of norm groups divide it. */
int64_t normfuse_samples_of_block(int64_t c, int64_t s, size_t type_bytes);
/* The task of a call: the first fields of the plan behind `seen`, up to all_direct, and its groups. */
void normfuse_plan_say(struct plan *plan, const struct normfuse_problem *p, int64_t spread);
/* `seen`, which alone has addresses of the call's. Returns the columns that a channel has. */
int64_t normfuse_plan_see(struct plan *plan, const struct normfuse_problem *p);
/* All of it; the problem is not empty. */
void normfuse_plan_make(struct plan *plan, const struct normfuse_problem *p, const normfuse_exec *exec);
/* Lays everything out in `room` bytes of scratch; with base NULL only counts. Returns the bytes that it takes, SIZE_MAX
 * where they overflow. Where they are more than `room`, nothing is to be read there. */
size_t normfuse_plan_lay_out(struct plan *plan, char *base, size_t room);

/* pieces.c */
/* n elements of `bytes` bytes; strides in elements. */
void normfuse_copy_strided(char *to, ptrdiff_t to_stride, const char *from, ptrdiff_t from_stride, int64_t n,
                           size_t bytes);
/* next: the bundle whose same piece is reduced afterwards, or -1. */
void normfuse_reduce_piece(const struct plan *plan, struct worker *w, struct bundle_state *state, int64_t bundle,
                           int64_t index);
void normfuse_apply_piece(const struct plan *plan, struct worker *w, const struct bundle_state *state, int64_t bundle,
                          int64_t index, int64_t next);

/* small_sets.c */
/* True where a problem's sets are taken many at a time; then also plans how. The plan says what is to be done. views: all `count` of the problem. */
bool normfuse_small_sets_plan(struct plan *plan, const struct normfuse_view *const *views, size_t count);
/* Small sets [first, last) of samples [begin, end), which are whole blocks. */
void normfuse_small_sets_walk(const struct plan *plan, struct worker *w, int64_t begin, int64_t end, int64_t first,
                              int64_t last);

/* The means and rstds of `sets` norm groups as elements are normalized with them: (u - shift)*rstd + rest, the shift being the mean in
 * the compute type. */
void normfuse_small_store_statistics(const struct plan *plan, struct small_worker *w, int64_t sets);

/* channels.c */
/* The rest of a plan that says what is to be done. */
void normfuse_channels_plan(struct plan *plan, const normfuse_exec *exec);
void normfuse_channels_lay_out(const struct plan *plan, struct small_worker *w, struct arena *arena);
/* Before a thread's first block; one block; after its last one; after all of them. */
void normfuse_channels_begin(const struct plan *plan, struct small_worker *w);
void normfuse_channels_walk(const struct plan *plan, struct small_worker *w, int64_t block);
void normfuse_channels_end(const struct plan *plan, struct small_worker *w);
void normfuse_channels_finish(const struct plan *plan);
/* The statistics of an empty problem. */
void normfuse_channels_store_empty(const struct normfuse_problem *p);

/* bundles.c */
/* Weight and bias per channel, in double: once, before the threads. */
void normfuse_read_parameters(const struct plan *plan);
/* Fills what a bundle's reduce or apply part needs and is known before its reduce part: k, a, b where the statistics
 * are given, and p of dx. Where the sums are given too (sharded backward), all of it. */
void normfuse_prepare_bundle(const struct plan *plan, const struct team *team, struct bundle_state *state,
                             int64_t bundle);
/* Joins the partial sums of a bundle: what the caller wants of them, and the coefficients of its apply part. */
void normfuse_finish_bundle(const struct plan *plan, struct team *team, int64_t bundle);
/* After all bundles: the sums over samples, in order. */
void normfuse_finish_samples(const struct plan *plan);
/* Before and after all bundles: the sums of dslope. */
void normfuse_begin_slopes(const struct plan *plan);
void normfuse_finish_slopes(const struct plan *plan);
/* Results of the apply part of a sharded forward beside y: once, before the threads. */
void normfuse_store_given_statistics(const struct plan *plan);
/* The parameter gradients of a sharded backward: from the given sums. */
void normfuse_store_given_gradients(const struct plan *plan);
/* All that an empty problem writes; the plan says what is to be done and has no memory. */
void normfuse_store_empty(const struct plan *plan);

#endif
