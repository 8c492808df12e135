/* SPDX-License-Identifier: MIT
 *
 * driver.c - runs a problem on the CPU: cuts it into pieces, joins their sums, schedules them on threads.
 *
 * The work is a sequence of sets (what shares statistics, or one sample where nothing does). Each set has a reduce part
 * (moments; backward: sums), a join, and an apply part. Sets are cut into pieces and pieces into chunks by shape alone,
 * and everything is joined in one fixed order, so threads and instruction sets cannot change a bit.
 *
 * A team of threads walks the sets in order, one step a set: apply piece p of set s, then reduce piece p of set s + 1,
 * whose values the apply part has asked for ahead of time (prefetch), so that reads from memory overlap the stores.
 * Where sets are small each thread is a team of its own over a range of sets; where they are large all threads are one
 * team. A step waits for the set before it to be joined; that never deadlocks, whatever runs the threads, since pieces
 * are claimed in order and a claimed piece waits for nothing but steps already claimed. */
#include <math.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cpu/kernels.h"
#include "cpu/machine.h"
#include "cpu/threads.h"
#include "problem.h"
#include "scalar.h"

enum {
    CHUNK_VALUES = 4096,      /* longest f32 sum under runs: 128 additions a lane */
    CHUNK_ROWS = 128,         /* longest f32 sum under columns */
    SHIFT_VALUES = 64,        /* a piece's first shift is the mean of so many values, */
    SHIFT_ROWS = 8,           /* or rows */
    PIECE_VALUES = 32768,     /* one piece under runs: small enough that a sample feeds all cores */
    COLUMN_PIECE_VALUES = 65536, /* under columns, where each piece costs a join of all channels */
    BATCH_PIECE_VALUES = 131072, /* under columns without groups: partial sums stay below 1/32 of what was read */
    STAGE_VALUES = 4096,      /* tiles that go through a copy */
    MOST_WIDE_COLUMNS = 2048, /* while sums and coefficients stay in the L1 cache */
    WIDE_COLUMNS = 128,       /* columns that a row of few channels is widened to, by taking several rows as one */
    BUNDLE_BYTES = 32768,     /* of one sample that a bundle should have */
    MOST_BUNDLED = 16,
    MOST_SPREAD = 4096,       /* values of a row with spread coefficients */
    SHORT_RUN_BYTES = 1024,
    BLOCK_VALUES = 65536,     /* samples whose weight gradients are summed before they are joined */
    TASKS_PER_THREAD = 8,     /* ranges of sets: long enough to pipeline, short enough to balance */
    STACK_BYTES = 12288,      /* scratch of small problems */
    ALIGNMENT = 64,
    COLOUR = 1344 /* between arrays: a store and a load that agree in the low 12 bits of their addresses wait for each
                     other, and arrays of 1024 channels would all agree (moments_columns: 4.3 against 2.9 ns for 16) */
};

/* ---- the plan: shape first, machine second ---------------------------------------------------------------------- */

struct coefficients {
    void *k, *a, *b, *p, *q, *r; /* compute type */
};

struct slot {
    double *partials;
    struct coefficients c;
};

/* A part of the threads that works on the same sets. */
struct team {
    struct slot slot[2]; /* set s uses slot s & 1 */
    double *sums;        /* backward, while a set is joined: per channel the sum of dy', then that of dy'*(u - mean) */
};

/* What one thread needs for itself. */
struct worker {
    struct team own;        /* where each thread is a team */
    void *shift, *sum, *square; /* compute type: per column, or per run */
    double *mean, *m2;      /* columns: the piece so far */
    double *sum64, *square64; /* columns: a chunk's sums per channel */
    char *stage[6];         /* tiles of x or u, pre_add or dy, post_add, du, y, dpost_add */
};

struct tile {
    int64_t n, c, s;    /* where it starts */
    bool across;        /* batch norm under runs: rows are the channels of one sample, not one channel's samples */
    bool across_values; /* under runs: a row is all values of a set's channels in one sample */
    int64_t rows, width; /* rows: runs, or positions; width: values of a run, or channels */
    int64_t flat;       /* columns: index of the first row over all samples of the set */
};

struct plan {
    const struct normfuse_problem *p;
    const struct normfuse_table *table;
    const struct normfuse_passes *pass;
    const struct normfuse_column_functions *column;
    bool backward, reduce, apply, dependent; /* dependent: apply needs what reduce gives */
    bool batch, none, wide_type;             /* sets are channels; there are no sets; compute type is double */
    bool add;                                /* u = x + pre_add */
    bool constant;                           /* every set has the same coefficients */
    bool updates_running;
    bool stream;
    bool all_direct; /* every view can be walked in place */
    bool staged;     /* tiles are small: some go through a copy */
    size_t type_bytes, real_bytes;

    int64_t sets, groups, group_channels;
    int64_t segments, length;  /* of a set: runs and their values, or samples and their rows */
    int64_t parts, part, segments_per_piece, pieces;
    int64_t widen;             /* rows taken as one */
    int64_t bundle;            /* under runs: adjacent channels of batch norm, or groups of one chunk each, that are one set here: memory
                                  is walked in long stretches, and small ones share the calls of passes */
    int64_t set_channels;      /* of one sample, in a set (bundle) under runs */
    int64_t sample_sets;       /* sets that one sample has, where sets are not channels */
    int64_t entries;           /* statistics of a set */
    int64_t spread;            /* batch norm, runs that are short and share cache lines: coefficients are repeated for each of so many
                                  values, and a set's channels are applied as one row (61x1031x13x13 bf16: 6.6 copy floors to
                                  1.95); 1: not */
    int64_t chunk_rows;
    int64_t coefficients;      /* entries of each array of struct coefficients */
    int64_t coefficient_step;
    int64_t partial_doubles;
    int64_t block_samples, blocks;
    int64_t set_values;

    /* memory */
    double *weight, *bias;     /* [C] in double */
    double *sample_sums;       /* [blocks][C][2]: weight gradients, or the running statistics of instance norm */
    struct worker *workers;
    struct team shared;
    _Atomic int32_t *claims;   /* shared team: [sets + 1][threads] next piece of each thread's range */
    _Atomic int32_t *finished; /* [sets + 1] pieces done */
    _Atomic int32_t *ready;    /* [sets + 1] joined */
    _Atomic int64_t next_task;
    int32_t threads;
    bool teams_of_one;
    bool ahead; /* the apply part asks for the next set's values */
    bool back_and_forth; /* a set outgrows the cache: every step walks it the other way, from what was read last */
    int64_t tasks, sets_per_task, group_ranges, blocks_per_task;
};

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
static int64_t round_up(int64_t a, int64_t b) { return divide_up(a, b) * b; }
static int64_t power_of_two_below(int64_t a) { int64_t p = 1; while (p <= a / 2) p *= 2; return p; }

/* Rows taken as one so that a row of few channels fills vectors and whole cache lines. */
static int64_t widening(int64_t c)
{
    if (c < 1)
        return 1;
    int64_t w = 1;
    while ((w * c) % 32 != 0 || w * c < WIDE_COLUMNS) /* 32: a cache line of 16-bit values */
        w *= 2;
    return c < WIDE_COLUMNS || w * c <= MOST_WIDE_COLUMNS ? w : 1;
}

static int64_t rows_of_chunk(int64_t c, int64_t widen)
{
    const int64_t rows = 2 * BLOCK_VALUES / larger(c, 1) / 4 * 4;
    return widen * larger(16, smaller(CHUNK_ROWS, rows));
}

/* Cuts segments of `length` into pieces of about `target`, aligned where one is cut inside. */
static void cut(int64_t segments, int64_t length, int64_t target, int64_t align, int64_t *parts, int64_t *part,
                int64_t *segments_per_piece, int64_t *pieces)
{
    target = larger(target, 1);
    *parts = 1;
    *part = length;
    *segments_per_piece = 1;
    if (length > target) {
        *part = smaller(length, round_up(divide_up(length, divide_up(length, target)), align));
        *parts = divide_up(length, *part);
    } else if (length > 0) {
        *segments_per_piece = power_of_two_below(target / length);
    }
    *pieces = *parts > 1 ? segments * *parts : divide_up(segments, *segments_per_piece);
}

static int64_t samples_of_block(int64_t c, int64_t s)
{
    const int64_t values = larger(c * s, 1);
    int64_t samples = larger(divide_up(BLOCK_VALUES, values), divide_up(64, larger(s, 1)));
    if (values >= BLOCK_VALUES && s >= 64)
        samples = 1;
    int64_t block = 1;
    while (block < samples)
        block *= 2;
    return block;
}

int64_t normfuse_cpu_sample_quantum(int64_t c, int64_t s, bool columns)
{
    int64_t parts, part, segments, pieces;
    const int64_t widen = widening(c);
    if (columns)
        cut(1, s, divide_up(BATCH_PIECE_VALUES, larger(c, 1)), widen * 4, &parts, &part, &segments, &pieces);
    else
        cut(1, s, PIECE_VALUES, 64, &parts, &part, &segments, &pieces);
    return larger(segments, samples_of_block(c, s));
}

static bool same_view(const struct normfuse_view *a, const struct normfuse_view *b) { return a->data == b->data; }

/* A view can be walked in place: adjacent along the picture's rows, and its rows evenly spaced where a tile spans
 * samples or several rows are taken as one. */
static bool direct(const struct plan *plan, const struct normfuse_view *v)
{
    const struct normfuse_problem *p = plan->p;
    if (plan->all_direct)
        return true;
    if (!p->columns)
        return v->position == 1 || p->s == 1;
    if (v->channel != 1 && p->c != 1)
        return false;
    if (plan->widen > 1 && p->s > 1 && v->position != p->c)
        return false;
    if (plan->batch && p->n > 1 && v->batch != (p->s > 1 ? v->position * p->s : v->batch))
        return false;
    if (plan->batch && plan->widen > 1 && p->n > 1 && v->batch != p->s * p->c)
        return false;
    return true;
}

static ptrdiff_t row_stride(const struct plan *plan, const struct normfuse_view *v, const struct tile *t)
{
    const struct normfuse_problem *p = plan->p;
    if (!p->columns)
        return plan->batch && !t->across ? v->batch : v->channel;
    return p->s > 1 ? v->position : v->batch;
}

/* Under runs: the adjacent channels of batch norm, or groups of one sample, that are taken as one set. */
static int64_t bundle_of(const struct plan *plan)
{
    const struct normfuse_problem *p = plan->p;
    const int64_t values = larger(1, p->s * plan->group_channels);
    if (plan->none || plan->staged || (!plan->batch && (p->s == 0 || values > CHUNK_VALUES))) /* groups: of one chunk */
        return 1;
    return larger(1, smaller(smaller(MOST_BUNDLED, plan->groups), BUNDLE_BYTES / (values * (int64_t)plan->type_bytes)));
}

static void make_plan(struct plan *plan, const struct normfuse_problem *p, const normfuse_exec *exec)
{
    const struct normfuse_machine *machine = normfuse_machine_known();
    memset(plan, 0, sizeof *plan);
    plan->p = p;
    plan->table = normfuse_table_chosen();
    plan->pass = &plan->table->of[p->type];
    plan->column = &plan->table->columns[p->type == NORMFUSE_F64];
    plan->type_bytes = normfuse_type_bytes(p->type);
    plan->wide_type = p->type == NORMFUSE_F64;
    plan->real_bytes = plan->wide_type ? 8 : 4;
    plan->batch = p->sets == NORMFUSE_SETS_BATCH;
    plan->none = p->sets == NORMFUSE_SETS_NONE;
    plan->backward = (p->phases & (NORMFUSE_PHASE_BACKWARD_SUMS | NORMFUSE_PHASE_BACKWARD_APPLY)) != 0;
    plan->add = p->pre_add.data != NULL;
    plan->constant = plan->none && !p->weight.batch && !p->bias.batch && !p->scale.data && !p->shift.data;
    plan->updates_running = p->has_running_momentum && (!p->stats || (p->phases & NORMFUSE_PHASE_APPLY));
    plan->set_values = p->set_values;
    if (plan->backward) {
        const bool wanted = p->dweight.data || p->dbias.data || p->dscale.data || p->dshift.data || p->sums;
        const bool dx = p->dx.data && (p->phases & NORMFUSE_PHASE_BACKWARD_APPLY);
        plan->dependent = dx && !plan->none;
        plan->apply = dx;
        plan->reduce = (p->phases & NORMFUSE_PHASE_BACKWARD_SUMS) && (wanted || plan->dependent || (p->dpost_add.data && !dx));
    } else {
        plan->reduce = (p->phases & NORMFUSE_PHASE_STATISTICS) != 0;
        plan->apply = (p->phases & NORMFUSE_PHASE_APPLY) && (p->y.data || (p->u.data && !plan->reduce));
        plan->dependent = plan->apply && plan->reduce;
    }

    plan->groups = plan->none ? 1 : plan->batch ? p->c : p->groups;
    plan->group_channels = plan->none ? p->c : p->c / larger(plan->groups, 1);
    plan->widen = p->columns ? widening(p->c) : 1;
    const struct normfuse_view *views[] = {&p->x, &p->pre_add, &p->post_add, &p->y, &p->u, &p->dy, &p->du, &p->dx, &p->dpost_add};
    for (size_t i = 0; i < sizeof views / sizeof *views; i++)
        if (views[i]->data && !direct(plan, views[i]))
            plan->staged = true;
    plan->all_direct = !plan->staged;
    if (p->columns) {
        plan->sets = plan->batch ? 1 : p->n;
        plan->segments = plan->batch ? p->n : 1;
        plan->length = p->s;
        plan->chunk_rows = rows_of_chunk(p->c, plan->widen);
        plan->coefficients = p->c * plan->widen;
        cut(plan->segments, plan->length, divide_up(plan->batch ? BATCH_PIECE_VALUES : COLUMN_PIECE_VALUES, larger(p->c, 1)),
            plan->widen * 4, &plan->parts, &plan->part, &plan->segments_per_piece, &plan->pieces);
        plan->bundle = plan->sample_sets = 1;
        plan->entries = plan->batch || plan->backward ? p->c : plan->groups;
        plan->partial_doubles = 2 * plan->entries * plan->pieces;
    } else {
        plan->segments = plan->batch ? p->n : plan->group_channels;
        plan->length = p->s;
        plan->bundle = bundle_of(plan);
        plan->entries = plan->bundle;
        plan->set_channels = plan->bundle * plan->group_channels;
        plan->sample_sets = plan->none ? 1 : divide_up(plan->groups, plan->bundle);
        plan->sets = plan->batch ? plan->sample_sets : p->n * plan->sample_sets;
        plan->coefficients = plan->set_channels;
        plan->coefficient_step = plan->batch ? 0 : 1;
        cut(plan->segments, plan->length, PIECE_VALUES, 64, &plan->parts, &plan->part, &plan->segments_per_piece,
            &plan->pieces);
        plan->partial_doubles = plan->backward && !plan->batch ? 2 * plan->set_channels * plan->parts : 2 * plan->entries * plan->pieces;
    }
    plan->block_samples = samples_of_block(p->c, p->s);
    plan->blocks = plan->batch ? 0 : divide_up(p->n, plan->block_samples);

    plan->spread = 1;
    if (plan->batch && !p->columns && plan->apply && plan->all_direct && p->s > 1 && plan->coefficients > 1 &&
        p->s * (int64_t)plan->type_bytes < SHORT_RUN_BYTES && p->s * (int64_t)plan->type_bytes % ALIGNMENT != 0 &&
        plan->coefficients * p->s <= MOST_SPREAD && plan->parts == 1) {
        bool adjacent = true;
        for (size_t i = 0; i < sizeof views / sizeof *views; i++)
            adjacent = adjacent && (!views[i]->data || views[i]->channel == p->s);
        if (adjacent)
            plan->spread = p->s;
    }
    if (plan->add && !(p->u.data && direct(plan, &p->u)))
        plan->staged = true;

    /* How it is run changes no bits. */
    const int64_t values = p->n * p->c * p->s;
    const int32_t most = exec && exec->threads > 0 ? exec->threads : normfuse_threads_default();
    plan->threads = (int32_t)larger(1, smaller(most, values / PIECE_VALUES));
    const int64_t bytes = values * (int64_t)plan->type_bytes, l2 = machine->l2_bytes ? machine->l2_bytes : 1 << 20;
    const struct normfuse_view *out = plan->backward ? &p->dx : &p->y;
    const bool in_place = same_view(out, &p->x) || same_view(out, &p->dy) || same_view(out, &p->pre_add) ||
                          same_view(out, &p->post_add) || same_view(out, &p->du);
    /* rows that share cache lines are written in part by ordinary stores, which the streaming ones wait for */
    const int64_t row_bytes = (p->columns ? plan->widen * p->c : plan->spread > 1 ? 0 : p->s) * (int64_t)plan->type_bytes;
    const bool shares_lines = row_bytes % ALIGNMENT != 0 &&
                              (p->columns ? p->c * (int64_t)plan->type_bytes < 4096 : row_bytes < SHORT_RUN_BYTES);
    /* a streaming store keeps y out of the caches, where what comes next may want a small one */
    plan->stream = bytes > 2 * l2 && !in_place && !shares_lines;

    const int64_t set_bytes = plan->sets ? bytes / plan->sets * (plan->backward ? 2 : 1) : 0;
    /* each thread holds the set that it applies and the next one */
    const int64_t share = larger(l2 / 2, machine->llc_bytes / (4 * plan->threads));
    if (plan->batch) {
        plan->sets_per_task = p->columns ? 1 : larger(larger(1, BLOCK_VALUES / larger(1, p->n * p->s * plan->bundle)), plan->sets / TASKS_PER_THREAD / plan->threads);
        plan->group_ranges = 1;
        plan->tasks = divide_up(plan->sets, plan->sets_per_task);
    } else {
        /* a task is a block of samples and a range of groups, so that it alone owns their entries of sample_sums */
        const int64_t groups = plan->sample_sets;
        const int64_t wanted = divide_up(4 * plan->threads, larger(plan->blocks, 1));
        plan->group_ranges = larger(1, smaller(groups, wanted));
        plan->sets_per_task = divide_up(groups, plan->group_ranges);
        plan->group_ranges = divide_up(groups, plan->sets_per_task);
        plan->blocks_per_task = plan->group_ranges > 1 ? 1 : larger(1, plan->blocks / TASKS_PER_THREAD / plan->threads);
        plan->tasks = divide_up(plan->blocks, plan->blocks_per_task) * plan->group_ranges;
    }
    /* asking ahead helps where a thread computes for longer than it waits: docs/decisions/0004 */
    const bool busy = plan->type_bytes == 2 || p->activation > NORMFUSE_LEAKY_RELU;
    plan->ahead = (p->columns ? busy : plan->batch || !plan->backward) && !plan->staged;
    plan->back_and_forth = set_bytes > l2 * plan->threads;
    plan->teams_of_one = plan->threads == 1 || (set_bytes <= share && plan->tasks >= 2 * plan->threads);
    if (!plan->reduce && plan->threads > 1) { /* pieces do not wait for one another */
        plan->teams_of_one = false;
    }
}

/* ---- memory ------------------------------------------------------------------------------------------------------ */

/* Hands out aligned pieces of one block; with base NULL only counts. */
struct arena {
    char *base;
    size_t used;
};

static void *take(struct arena *arena, int64_t count, size_t bytes)
{
    const size_t at = arena->used;
    arena->used += ((size_t)count * bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; /* whole vectors, for columns.inl */
    if ((size_t)count * bytes >= 1024)
        arena->used += COLOUR;
    return arena->base ? arena->base + at : NULL;
}

static void lay_out_team(const struct plan *plan, struct team *team, struct arena *arena)
{
    for (int i = 0; i < 2; i++) {
        struct slot *slot = &team->slot[i];
        slot->partials = take(arena, plan->reduce ? plan->partial_doubles : 0, 8);
        void **arrays[] = {&slot->c.k, &slot->c.a, &slot->c.b, &slot->c.p, &slot->c.q, &slot->c.r};
        for (int j = 0; j < (plan->backward ? 6 : 3); j++)
            *arrays[j] = take(arena, plan->coefficients * plan->spread, plan->real_bytes);
    }
    team->sums = take(arena, 2 * (plan->p->columns ? plan->p->c : plan->set_channels), 8);
}

/* Lays everything out in scratch; returns the bytes. */
static size_t lay_out(struct plan *plan, char *base)
{
    struct arena arena = {base, 0};
    const struct normfuse_problem *p = plan->p;
    const int64_t width = p->columns ? p->c * plan->widen : 0;
    plan->weight = take(&arena, p->weight.batch ? 0 : p->c, 8);
    plan->bias = take(&arena, p->bias.batch ? 0 : p->c, 8);
    plan->sample_sums = take(&arena, plan->blocks * p->c * 2 * (plan->reduce || plan->updates_running ? 1 : 0), 8);
    plan->workers = take(&arena, plan->threads, sizeof *plan->workers);
    for (int32_t i = 0; i < plan->threads; i++) {
        struct worker local, *worker = base ? &plan->workers[i] : &local;
        memset(worker, 0, sizeof *worker);
        if (plan->teams_of_one || !plan->reduce)
            lay_out_team(plan, &worker->own, &arena);
        const int64_t sums = p->columns ? width : CHUNK_VALUES;
        if (plan->reduce) {
            worker->shift = take(&arena, p->columns ? width : plan->bundle, plan->real_bytes);
            worker->sum = take(&arena, p->columns || plan->backward ? sums : plan->bundle, plan->real_bytes);
            worker->square = take(&arena, p->columns || plan->backward ? sums : plan->bundle, plan->real_bytes);
            worker->mean = take(&arena, p->columns ? p->c : 0, 8);
            worker->m2 = take(&arena, p->columns ? p->c : 0, 8);
            worker->sum64 = take(&arena, p->columns ? p->c : 0, 8);
            worker->square64 = take(&arena, p->columns ? p->c : 0, 8);
        }
        /* bundles go through a copy of u where that is not written out */
        const int64_t stage = larger(STAGE_VALUES, p->columns ? width : plan->bundle > 1 ? plan->set_channels * p->s : 0);
        for (int j = 0; j < 6; j++)
            worker->stage[j] = take(&arena, plan->staged ? stage : 0, plan->type_bytes);
    }
    if (!plan->teams_of_one) {
        if (plan->reduce)
            lay_out_team(plan, &plan->shared, &arena);
        plan->claims = take(&arena, plan->reduce ? (plan->sets + 1) * plan->threads : 0, 4);
        plan->finished = take(&arena, plan->reduce ? plan->sets + 1 : 0, 4);
        plan->ready = take(&arena, plan->reduce ? plan->sets + 1 : 0, 4);
    }
    return arena.used + ALIGNMENT;
}

/* ---- values of any type ------------------------------------------------------------------------------------------ */

static double get_parameter(const struct normfuse_parameter *q, int64_t n, int64_t c, double absent)
{
    return q->data ? normfuse_load(q->data + (n * q->batch + c * q->channel) * (ptrdiff_t)normfuse_type_bytes(q->type), q->type) : absent;
}

static void put_parameter(const struct normfuse_parameter *q, int64_t n, int64_t c, double v)
{
    if (q->data)
        normfuse_store(q->data + (n * q->batch + c * q->channel) * (ptrdiff_t)normfuse_type_bytes(q->type), q->type, v);
}

static void add_parameter(const struct normfuse_problem *p, const struct normfuse_parameter *q, int64_t c, double v)
{
    put_parameter(q, 0, c, p->accumulate ? get_parameter(q, 0, c, 0) + v : v);
}

/* A parameter per channel as doubles. */
static void to_double(const struct normfuse_parameter *q, double *out, int64_t count, double absent)
{
    if (!q->data || q->type != NORMFUSE_F32 || q->channel != 1) {
        for (int64_t c = 0; c < count; c++)
            out[c] = get_parameter(q, 0, c, absent);
        return;
    }
    const float *in = (const float *)(const void *)q->data;
    for (int64_t c = 0; c < count; c++)
        out[c] = (double)in[c];
}

static double get_real(const struct plan *plan, const void *array, int64_t i)
{
    return plan->wide_type ? ((const double *)array)[i] : (double)((const float *)array)[i];
}

static void put_real(const struct plan *plan, void *array, int64_t i, double v)
{
    if (plan->wide_type)
        ((double *)array)[i] = v;
    else
        ((float *)array)[i] = (float)v;
}

static double weight_of(const struct plan *plan, int64_t n, int64_t c)
{
    return plan->p->weight.batch ? get_parameter(&plan->p->weight, n, c, 1) : plan->weight[c];
}

static double bias_of(const struct plan *plan, int64_t n, int64_t c)
{
    return plan->p->bias.batch ? get_parameter(&plan->p->bias, n, c, 0) : plan->bias[c];
}

/* ---- tiles ------------------------------------------------------------------------------------------------------- */

static char *element(const struct plan *plan, const struct normfuse_view *v, const struct tile *t)
{
    return v->data + (t->n * v->batch + t->c * v->channel + t->s * v->position) * (ptrdiff_t)plan->type_bytes;
}

/* Address of row r of a tile when rows may lie in several samples. */
static char *row_address(const struct plan *plan, const struct normfuse_view *v, const struct tile *t, int64_t r)
{
    const struct normfuse_problem *p = plan->p;
    if (!p->columns)
        return element(plan, v, t) + r * row_stride(plan, v, t) * (ptrdiff_t)plan->type_bytes;
    const int64_t flat = t->s + r;
    const struct tile at = {.n = t->n + flat / p->s, .c = t->c, .s = flat % p->s};
    return element(plan, v, &at);
}

static void copy_strided(char *to, ptrdiff_t to_stride, const char *from, ptrdiff_t from_stride, int64_t n, size_t bytes)
{
    if (to_stride == 1 && from_stride == 1) {
        memcpy(to, from, (size_t)n * bytes);
        return;
    }
    to_stride *= (ptrdiff_t)bytes;
    from_stride *= (ptrdiff_t)bytes;
    for (int64_t i = 0; i < n; i++, to += to_stride, from += from_stride)
        switch (bytes) { /* constant sizes become single moves */
        case 2: memcpy(to, from, 2); break;
        case 4: memcpy(to, from, 4); break;
        default: memcpy(to, from, 8); break;
        }
}

static ptrdiff_t inner_stride(const struct plan *plan, const struct normfuse_view *v)
{
    return plan->p->columns ? (plan->p->c > 1 ? v->channel : 1) : (plan->p->s > 1 ? v->position : 1);
}

/* The tile of an input, in place or copied to the stage; *stride is between its rows. */
static const void *input(const struct plan *plan, const struct normfuse_view *v, const struct tile *t, char *stage,
                         ptrdiff_t *stride)
{
    if (direct(plan, v)) {
        *stride = row_stride(plan, v, t);
        return element(plan, v, t);
    }
    for (int64_t r = 0; r < t->rows; r++)
        copy_strided(stage + (size_t)(r * t->width) * plan->type_bytes, 1, row_address(plan, v, t, r), inner_stride(plan, v),
                     t->width, plan->type_bytes);
    *stride = t->width;
    return stage;
}

/* Where a tile of an output is to be written: itself, or the stage, which scatter() copies out. */
static void *output(const struct plan *plan, const struct normfuse_view *v, const struct tile *t, char *stage, ptrdiff_t *stride)
{
    if (direct(plan, v)) {
        *stride = row_stride(plan, v, t);
        return element(plan, v, t);
    }
    *stride = t->width;
    return stage;
}

static void scatter(const struct plan *plan, const struct normfuse_view *v, const struct tile *t, const char *stage)
{
    if (v->data && !direct(plan, v))
        for (int64_t r = 0; r < t->rows; r++)
            copy_strided(row_address(plan, v, t, r), inner_stride(plan, v), stage + (size_t)(r * t->width) * plan->type_bytes, 1,
                         t->width, plan->type_bytes);
}

/* The tile of u: x, or x + pre_add, rounded; `first` is the part of the call that writes u out. */
static const void *input_u(const struct plan *plan, struct worker *w, const struct tile *t, bool first, ptrdiff_t *stride)
{
    const struct normfuse_problem *p = plan->p;
    if (!plan->add)
        return input(plan, &p->x, t, w->stage[0], stride);
    if (p->u.data && !first)
        return input(plan, &p->u, t, w->stage[0], stride);
    struct normfuse_pass s = {.rows = (size_t)t->rows, .n = (size_t)t->width};
    s.x = input(plan, &p->x, t, w->stage[0], &s.x_stride);
    s.dy = input(plan, &p->pre_add, t, w->stage[4], &s.dy_stride);
    if (p->u.data)
        s.y = output(plan, &p->u, t, w->stage[0], &s.y_stride);
    else {
        s.y = w->stage[0];
        s.y_stride = t->width;
    }
    plan->pass->add(&s);
    scatter(plan, &p->u, t, w->stage[0]);
    *stride = s.y_stride;
    return s.y;
}

/* Runs a pass on a tile under columns, widened: whole wide rows, then what is left of one. */
static void run_columns(const struct plan *plan, normfuse_pass_function pass, struct normfuse_pass s)
{
    const size_t widen = (size_t)plan->widen, width = s.n, rest = s.rows % widen, b = plan->type_bytes;
    if (widen == 1) {
        pass(&s);
        return;
    }
    ptrdiff_t *strides[] = {&s.x_stride, &s.dy_stride, &s.post_add_stride, &s.du_stride, &s.y_stride, &s.dpost_add_stride};
    for (size_t i = 0; i < sizeof strides / sizeof *strides; i++)
        *strides[i] *= (ptrdiff_t)widen;
    s.rows /= widen;
    s.n = width * widen;
    if (s.rows)
        pass(&s);
    if (rest) {
        const size_t done = s.rows * s.n * b;
        s.x = s.x ? (const char *)s.x + done : NULL;
        s.dy = s.dy ? (const char *)s.dy + done : NULL;
        s.post_add = s.post_add ? (const char *)s.post_add + done : NULL;
        s.du = s.du ? (const char *)s.du + done : NULL;
        s.y = s.y ? (char *)s.y + done : NULL;
        s.dpost_add = s.dpost_add ? (char *)s.dpost_add + done : NULL;
        s.rows = 1;
        s.n = width * rest;
        pass(&s);
    }
}

/* Wider rows are walked in blocks of columns. Blocks of 1024 would keep sums and coefficients in the L1 cache, but break
 * the linear stream: batch norm 8x2048x28x28 channels-last took 2.75 copy floors with them, 2.15 so. */
enum { COLUMN_BLOCK = 4096 };

static const void *at_real(const struct plan *plan, const void *array, int64_t i)
{
    return array ? (const char *)array + (size_t)i * plan->real_bytes : NULL;
}

static void run_tile(const struct plan *plan, normfuse_pass_function pass, const struct normfuse_pass *whole)
{
    if (!plan->p->columns) {
        pass(whole);
        return;
    }
    const int64_t width = (int64_t)whole->n;
    if (width <= COLUMN_BLOCK) {
        run_columns(plan, pass, *whole);
        return;
    }
    for (int64_t c = 0; c < width; c += COLUMN_BLOCK) {
        struct normfuse_pass s = *whole;
        const size_t skip = (size_t)c * plan->type_bytes;
        s.n = (size_t)smaller(COLUMN_BLOCK, width - c);
        s.x = s.x ? (const char *)s.x + skip : NULL;
        s.dy = s.dy ? (const char *)s.dy + skip : NULL;
        s.post_add = s.post_add ? (const char *)s.post_add + skip : NULL;
        s.du = s.du ? (const char *)s.du + skip : NULL;
        s.y = s.y ? (char *)s.y + skip : NULL;
        s.dpost_add = s.dpost_add ? (char *)s.dpost_add + skip : NULL;
        s.k = at_real(plan, s.k, c);
        s.a = at_real(plan, s.a, c);
        s.b = at_real(plan, s.b, c);
        s.p = at_real(plan, s.p, c);
        s.q = at_real(plan, s.q, c);
        s.r = at_real(plan, s.r, c);
        s.sum = s.sum ? (char *)s.sum + (size_t)c * plan->real_bytes : NULL;
        s.square = s.square ? (char *)s.square + (size_t)c * plan->real_bytes : NULL;
        pass(&s);
    }
}

/* ---- pieces ------------------------------------------------------------------------------------------------------ */

/* What a piece covers: `segments` whole segments from `segment`, or `length` of one from `start`. */
struct piece {
    int64_t segment, segments, start, length;
};

static struct piece piece_of(const struct plan *plan, int64_t index)
{
    if (plan->parts > 1) {
        const int64_t start = index % plan->parts * plan->part;
        return (struct piece){index / plan->parts, 1, start, smaller(plan->part, plan->length - start)};
    }
    const int64_t segment = index * plan->segments_per_piece;
    return (struct piece){segment, smaller(plan->segments_per_piece, plan->segments - segment), 0, plan->length};
}

static int64_t sample_of(const struct plan *plan, int64_t set)
{
    return plan->batch ? 0 : set / plan->sample_sets;
}

/* The first channel of batch norm, or group, of a set. */
static int64_t group_of(const struct plan *plan, int64_t set)
{
    if (plan->p->columns || plan->none)
        return 0;
    return (plan->batch ? set : set % plan->sample_sets) * plan->bundle;
}

/* The tile at (segment, offset) of a set: under runs `rows` segments of `width` values, under columns `rows` rows. */
static struct tile tile_at(const struct plan *plan, int64_t set, int64_t segment, int64_t offset, int64_t rows, int64_t width)
{
    struct tile t = {.rows = rows, .width = width};
    if (plan->p->columns) {
        t.n = plan->batch ? segment + offset / larger(1, plan->length) : set;
        t.s = plan->batch ? offset % larger(1, plan->length) : offset;
    } else if (plan->batch) {
        t.n = segment;
        t.c = set * plan->bundle;
        t.s = offset;
    } else {
        t.n = sample_of(plan, set);
        t.c = group_of(plan, set) * plan->group_channels + segment;
        t.s = offset;
    }
    return t;
}

/* Channels of batch norm, or groups, that a set under runs holds. */
static int64_t bundled(const struct plan *plan, int64_t set)
{
    return plan->bundle == 1 ? 1 : smaller(plan->bundle, plan->groups - group_of(plan, set));
}

/* Bytes from a tile of a set to the same tile of the next set, which the apply part asks for while it stores; 0: none. */
static ptrdiff_t ahead_of(const struct plan *plan, const struct normfuse_view *v, const struct tile *t, int64_t next)
{
    if (next < 0 || plan->staged)
        return 0;
    const struct normfuse_problem *p = plan->p;
    struct tile to = *t;
    if (!plan->batch)
        to.n = next / plan->sample_sets;
    if (!p->columns)
        to.c += (group_of(plan, next) - group_of(plan, next - 1)) * plan->group_channels;
    return element(plan, v, &to) - element(plan, v, t);
}

/* ---- joining statistics ------------------------------------------------------------------------------------------ */

struct moments {
    double count, mean, m2;
};

/* Chan, Golub and LeVeque 1979. An empty side leaves the other's bits alone. */
static struct moments join(struct moments a, struct moments b)
{
    if (a.count == 0)
        return b;
    if (b.count == 0)
        return a;
    const double count = a.count + b.count, delta = b.mean - a.mean;
    return (struct moments){count, a.mean + delta * (b.count / count),
                            a.m2 + b.m2 + delta * delta * (a.count * b.count / count)};
}

/* The squares of a chunk overflowed f32, or may have lost digits below its smallest normal number. Sums of 0 are those of
 * a constant unless k is so small that a neighbouring value's square would vanish too. columns.inl has the same rule. */
static bool out_of_range(double k, double sum, double square)
{
    return !(square < 3e38) || (square < 0x1p-90 && (square != 0 || sum != 0 || (k != 0 && fabs(k) < 0x1p-30)));
}

/* One value of u as the passes see it. */
static double value_u(const struct plan *plan, int64_t n, int64_t c, int64_t s)
{
    const struct normfuse_problem *p = plan->p;
    const struct tile at = {.n = n, .c = c, .s = s};
    if (!plan->add)
        return normfuse_load(element(plan, &p->x, &at), p->type);
    if (p->u.data) /* written by now; u may be x or pre_add */
        return normfuse_load(element(plan, &p->u, &at), p->type);
    const float u = (float)normfuse_load(element(plan, &p->x, &at), p->type) + (float)normfuse_load(element(plan, &p->pre_add, &at), p->type);
    char rounded[8];
    normfuse_store(rounded, p->type, (double)u);
    return normfuse_load(rounded, p->type);
}

/* The moments of rows x width values of channel c in double: the slow way for values that f32 cannot square. */
static struct moments moments_wide(const struct plan *plan, const struct tile *t, int64_t c, int64_t rows, int64_t width)
{
    const struct normfuse_problem *p = plan->p;
    struct moments m = {(double)rows * (double)width, 0, 0};
    for (int sweep = 0; sweep < 2; sweep++) {
        double sum = 0;
        for (int64_t r = 0; r < rows; r++)
            for (int64_t i = 0; i < width; i++) {
                double v;
                if (p->columns)
                    v = value_u(plan, t->n + (t->s + r) / p->s, c, (t->s + r) % p->s);
                else if (plan->batch)
                    v = value_u(plan, t->n + r, c, t->s + i);
                else
                    v = value_u(plan, t->n, c + r, t->s + i);
                sum += sweep ? (v - m.mean) * (v - m.mean) : v;
            }
        if (sweep)
            m.m2 = sum;
        else
            m.mean = sum / m.count;
    }
    return m;
}

/* Rows of a tile under columns: few where it goes through a copy. */
static int64_t rows_of_tile(const struct plan *plan, int64_t otherwise)
{
    if (!plan->staged)
        return otherwise;
    return larger(plan->widen, STAGE_VALUES / larger(1, plan->p->c) / plan->widen * plan->widen);
}

/* ---- reduce: moments --------------------------------------------------------------------------------------------- */

/* Adds the moments of one chunk each of `count` adjacent channels or groups onto all[]; t is the first one's chunk. last[]
 * are the moments of the chunks before, then of these. */
static void chunk_runs(const struct plan *plan, struct worker *w, const struct tile *t, int64_t count, struct moments *last,
                       struct moments *all)
{
    const struct normfuse_problem *p = plan->p;
    ptrdiff_t stride;
    const void *u = input_u(plan, w, t, true, &stride);
    struct normfuse_pass s = {.x = u, .x_stride = stride, .k = w->shift, .sum = w->sum, .square = w->square, .sets = (size_t)count};
    s.set_stride = plan->group_channels * p->x.channel;
    const bool first = last[0].count == 0;
    double values;
    if (first) { /* the mean of the first values: then the chunk's variance keeps its digits */
        s.rows = (size_t)smaller(t->rows, divide_up(SHIFT_VALUES, t->width));
        s.n = (size_t)smaller(t->width, SHIFT_VALUES);
        values = (double)(s.rows * s.n);
        memset(w->shift, 0, (size_t)count * plan->real_bytes);
        plan->pass->moments_runs(&s);
    }
    for (int64_t j = 0; j < count; j++) {
        const double k = first ? get_real(plan, w->sum, j) / values : last[j].mean;
        put_real(plan, w->shift, j, isfinite(k) ? k : 0);
    }
    s.rows = (size_t)t->rows;
    s.n = (size_t)t->width;
    values = (double)(s.rows * s.n);
    plan->pass->moments_runs(&s);
    for (int64_t j = 0; j < count; j++) {
        const double k = get_real(plan, w->shift, j), sum = get_real(plan, w->sum, j), square = get_real(plan, w->square, j);
        if (!plan->wide_type && out_of_range(k, sum, square)) {
            last[j] = moments_wide(plan, t, t->c + j * plan->group_channels, t->rows, t->width);
        } else {
            const double m2 = square - sum * sum / values;
            last[j] = (struct moments){values, k + sum / values, m2 < 0 ? 0 : m2};
        }
        all[j] = join(all[j], last[j]);
    }
}

/* Values of a run that are summed at once: the run cut evenly into chunks. */
static int64_t chunk_width(int64_t length)
{
    if (length <= CHUNK_VALUES)
        return length;
    return round_up(divide_up(length, divide_up(length, CHUNK_VALUES)), 32);
}

static void moments_of_piece_runs(const struct plan *plan, struct worker *w, struct slot *slot, int64_t set, int64_t index)
{
    const struct piece piece = piece_of(plan, index);
    const int64_t channels = bundled(plan, set), at_once = plan->add ? 1 : channels; /* a sum u is a tile of its own */
    struct moments all[MOST_BUNDLED], last[MOST_BUNDLED];
    for (int64_t j = 0; j < channels; j++)
        all[j] = last[j] = (struct moments){0, 0, 0};
    if (piece.length > 0) {
        const int64_t width = chunk_width(piece.length), rows = CHUNK_VALUES / width;
        for (int64_t r = 0; r < piece.segments; r += rows)
            for (int64_t at = 0; at < piece.length; at += width)
                for (int64_t j = 0; j < channels; j += at_once) {
                    struct tile t = tile_at(plan, set, piece.segment + r, piece.start + at, smaller(rows, piece.segments - r),
                                            smaller(width, piece.length - at));
                    t.c += j * plan->group_channels;
                    chunk_runs(plan, w, &t, at_once, last + j, all + j);
                }
    }
    double *partial = slot->partials + index * 2 * plan->entries;
    for (int64_t j = 0; j < channels; j++) {
        partial[j] = all[j].mean;
        partial[plan->entries + j] = all[j].m2;
    }
}

/* Adds the moments of the rows [offset, offset + rows) of a set, column by column, onto w->sum and w->square. */
static void sum_rows(const struct plan *plan, struct worker *w, int64_t set, int64_t segment, int64_t offset, int64_t rows, bool first)
{
    const int64_t c = plan->p->c, most = rows_of_tile(plan, rows);
    for (int64_t r = 0; r < rows; r += most) {
        const struct tile t = tile_at(plan, set, segment, offset + r, smaller(most, rows - r), c);
        struct normfuse_pass s = {.rows = (size_t)t.rows, .n = (size_t)c, .k = w->shift, .sum = w->sum, .square = w->square};
        s.x = input_u(plan, w, &t, first, &s.x_stride);
        run_tile(plan, plan->pass->moments_columns, &s);
    }
}

static void clear_sums(const struct plan *plan, struct worker *w)
{
    memset(w->sum, 0, (size_t)plan->coefficients * plan->real_bytes);
    memset(w->square, 0, (size_t)plan->coefficients * plan->real_bytes);
}

/* One double per channel of an array of the compute type, the rows that were taken as one added up. */
static void fold(const struct plan *plan, const void *array, double *out)
{
    const int64_t channels = plan->p->c;
    for (int64_t c = 0; c < channels; c++)
        out[c] = 0;
    for (int64_t from = 0; from < plan->coefficients; from += channels) {
        if (plan->wide_type) {
            const double *in = (const double *)array + from;
            for (int64_t c = 0; c < channels; c++)
                out[c] += in[c];
        } else {
            const float *in = (const float *)array + from;
            for (int64_t c = 0; c < channels; c++)
                out[c] += (double)in[c];
        }
    }
}

/* The shifts for the next sums: the means, or 0 where there is none. */
static void set_shifts(const struct plan *plan, struct worker *w, const double *means)
{
    const int64_t channels = plan->p->c;
    for (int64_t to = 0; to < plan->coefficients; to += channels) {
        if (plan->wide_type) {
            double *out = (double *)w->shift + to;
            for (int64_t c = 0; c < channels; c++)
                out[c] = means[c] - means[c] == 0 ? means[c] : 0;
        } else {
            float *out = (float *)w->shift + to;
            for (int64_t c = 0; c < channels; c++)
                out[c] = means[c] - means[c] == 0 ? (float)means[c] : 0;
        }
    }
}

/* Repeats the channels' entries for rows that are taken as one. */
static void widen_entries(const struct plan *plan, void *array)
{
    const size_t bytes = (size_t)plan->p->c * plan->real_bytes;
    for (int64_t i = 1; i < plan->widen; i++)
        memcpy((char *)array + (size_t)i * bytes, array, bytes);
}

/* Joins the sums of a chunk of `rows` rows onto the columns' moments; `before` rows went before it. The shifts become
 * the chunk's means. */
static void join_columns(const struct plan *plan, struct worker *w, const struct tile *t, double before, int64_t rows)
{
    const int64_t channels = plan->p->c;
    if (plan->column->join(w->shift, w->sum, w->square, w->mean, w->m2, (size_t)channels, (size_t)plan->widen, (double)rows, before)) {
        widen_entries(plan, w->shift);
        return;
    }
    const double n = (double)rows, inverse = 1 / n, weight = n / (before + n), cross = before * weight;
    double *restrict sum = w->sum64, *restrict square = w->square64, *restrict mean = w->mean, *restrict m2 = w->m2;
    int bad = 0;
    fold(plan, w->sum, sum);
    fold(plan, w->square, square);
    for (int64_t c = 0; c < channels; c++)
        bad |= out_of_range(get_real(plan, w->shift, c), sum[c], square[c]);
    if (plan->wide_type) {
        const double *k = w->shift;
        for (int64_t c = 0; c < channels; c++) {
            const double m = square[c] - sum[c] * sum[c] * inverse;
            square[c] = m < 0 ? 0 : m;
            sum[c] = k[c] + sum[c] * inverse;
        }
    } else {
        const float *k = w->shift;
        for (int64_t c = 0; c < channels; c++) {
            const bool wide = bad && out_of_range((double)k[c], sum[c], square[c]);
            const double m = square[c] - sum[c] * sum[c] * inverse;
            square[c] = m < 0 ? 0 : m;
            sum[c] = (double)k[c] + sum[c] * inverse;
            if (wide) {
                const struct moments exact = moments_wide(plan, t, c, rows, 1);
                sum[c] = exact.mean;
                square[c] = exact.m2;
            }
        }
    }
    if (before > 0) {
        for (int64_t c = 0; c < channels; c++) {
            const double delta = sum[c] - mean[c];
            mean[c] += delta * weight;
            m2[c] += square[c] + delta * delta * cross;
        }
    } else {
        memcpy(mean, sum, (size_t)channels * 8);
        memcpy(m2, square, (size_t)channels * 8);
    }
    set_shifts(plan, w, sum);
}

static void moments_of_piece_columns(const struct plan *plan, struct worker *w, struct slot *slot, int64_t set, int64_t index)
{
    const struct normfuse_problem *p = plan->p;
    const struct piece piece = piece_of(plan, index);
    const int64_t rows = piece.segments * piece.length, channels = p->c;
    double *partial = slot->partials + index * 2 * (plan->batch ? channels : plan->groups);

    const int64_t sampled = smaller(rows, SHIFT_ROWS * plan->widen);
    memset(w->shift, 0, (size_t)plan->coefficients * plan->real_bytes);
    clear_sums(plan, w);
    if (rows == 0) {
        memset(w->mean, 0, (size_t)channels * 8);
        memset(w->m2, 0, (size_t)channels * 8);
    }
    /* u may take x's place, and rows are read twice: write all of u first */
    const bool writes_u = plan->add && plan->p->u.data;
    if (writes_u)
        sum_rows(plan, w, set, piece.segment, piece.start, rows, true);
    clear_sums(plan, w);
    sum_rows(plan, w, set, piece.segment, piece.start, sampled, !writes_u);
    fold(plan, w->sum, w->sum64);
    for (int64_t c = 0; c < channels; c++)
        w->sum64[c] /= (double)sampled;
    set_shifts(plan, w, w->sum64);
    for (int64_t r = 0; r < rows; r += plan->chunk_rows) {
        const int64_t chunk = smaller(plan->chunk_rows, rows - r);
        clear_sums(plan, w);
        sum_rows(plan, w, set, piece.segment, piece.start + r, chunk, !writes_u);
        const struct tile t = tile_at(plan, set, piece.segment, piece.start + r, chunk, channels);
        join_columns(plan, w, &t, (double)r, chunk);
    }
    if (plan->batch) {
        memcpy(partial, w->mean, (size_t)channels * 8);
        memcpy(partial + channels, w->m2, (size_t)channels * 8);
        return;
    }
    /* the columns of a group have equal counts: their mean is the mean of means */
    const int64_t d = plan->group_channels;
    for (int64_t g = 0; g < plan->groups; g++) {
        double mean = 0, m2 = 0, between = 0;
        for (int64_t c = g * d; c < (g + 1) * d; c++) {
            mean += w->mean[c];
            m2 += w->m2[c];
        }
        mean /= (double)d;
        for (int64_t c = g * d; c < (g + 1) * d; c++)
            between += (w->mean[c] - mean) * (w->mean[c] - mean);
        partial[g] = mean;
        partial[plan->groups + g] = m2 + between * (double)rows;
    }
}

/* ---- reduce: backward sums --------------------------------------------------------------------------------------- */

/* What every pass over a tile but the moments is given; coefficients from entry `i` on. `first`: see input_u. */
static struct normfuse_pass pass_of_tile(const struct plan *plan, struct worker *w, const struct coefficients *c, const struct tile *t,
                                         int64_t i, bool first)
{
    const struct normfuse_problem *p = plan->p;
    struct normfuse_pass s = {.rows = (size_t)t->rows,
                              .n = (size_t)t->width,
                              .k = at_real(plan, c->k, i),
                              .a = at_real(plan, c->a, i),
                              .b = at_real(plan, c->b, i),
                              .coefficient_step = (size_t)(t->across ? 1 : plan->coefficient_step),
                              .activation = p->activation,
                              .act_param = p->act_param};
    s.x = input_u(plan, w, t, first, &s.x_stride);
    if (plan->backward)
        s.dy = input(plan, &p->dy, t, w->stage[1], &s.dy_stride);
    if (p->post_add.data)
        s.post_add = input(plan, &p->post_add, t, w->stage[2], &s.post_add_stride);
    return s;
}

static void sums_of_tile(const struct plan *plan, struct worker *w, const struct coefficients *c, const struct tile *t, int64_t i)
{
    const struct normfuse_problem *p = plan->p;
    struct normfuse_pass s = pass_of_tile(plan, w, c, t, i, true);
    s.sum = w->sum;
    s.square = w->square;
    s.sum_per_row = !plan->batch;
    const bool gives_dx = plan->apply && !plan->dependent;
    if (gives_dx) {
        s.p = at_real(plan, c->p, i);
        s.y = output(plan, &p->dx, t, w->stage[4], &s.y_stride);
        s.stream = plan->stream && direct(plan, &p->dx);
        if (p->du.data)
            s.du = input(plan, &p->du, t, w->stage[3], &s.du_stride);
    }
    if (p->dpost_add.data && (gives_dx || !plan->apply))
        s.dpost_add = output(plan, &p->dpost_add, t, w->stage[5], &s.dpost_add_stride);
    run_tile(plan, p->columns ? plan->pass->dot2_columns : plan->pass->dot2_runs, &s);
    if (s.y)
        scatter(plan, &p->dx, t, w->stage[4]);
    if (s.dpost_add)
        scatter(plan, &p->dpost_add, t, w->stage[5]);
}

static void dx_of_tile(const struct plan *plan, struct worker *w, const struct coefficients *c, const struct tile *t, int64_t i,
                       int64_t next)
{
    const struct normfuse_problem *p = plan->p;
    struct normfuse_pass s = pass_of_tile(plan, w, c, t, i, true);
    s.p = at_real(plan, c->p, i);
    s.q = plan->none ? NULL : at_real(plan, c->q, i);
    s.r = plan->none ? NULL : at_real(plan, c->r, i);
    if (p->du.data)
        s.du = input(plan, &p->du, t, w->stage[3], &s.du_stride);
    s.y = output(plan, &p->dx, t, w->stage[4], &s.y_stride);
    s.stream = plan->stream && direct(plan, &p->dx);
    if (p->dpost_add.data)
        s.dpost_add = output(plan, &p->dpost_add, t, w->stage[5], &s.dpost_add_stride);
    s.ahead_x = ahead_of(plan, &p->x, t, next);
    s.ahead_dy = ahead_of(plan, &p->dy, t, next);
    run_tile(plan, p->columns || t->across_values ? plan->pass->affine2_columns : plan->pass->affine2_runs, &s);
    scatter(plan, &p->dx, t, w->stage[4]);
    scatter(plan, &p->dpost_add, t, w->stage[5]);
}

static void sums_of_piece_runs(const struct plan *plan, struct worker *w, struct slot *slot, int64_t set, int64_t index)
{
    const struct piece piece = piece_of(plan, index);
    const int64_t channels = bundled(plan, set), part = plan->parts > 1 ? index % plan->parts : 0;
    /* sums are per channel, so a bundle of groups is one of more channels */
    const int64_t bundles = plan->batch ? channels : 1, segments = plan->batch ? piece.segments : channels * piece.segments;
    double *partial = slot->partials + (plan->batch ? index * 2 * plan->entries : 2 * (piece.segment * plan->parts + part));
    memset(partial, 0, (size_t)(2 * (plan->batch ? plan->entries : segments)) * 8);
    if (piece.length == 0)
        return;
    const int64_t width = chunk_width(piece.length), rows = CHUNK_VALUES / width;
    for (int64_t r = 0; r < segments; r += rows)
        for (int64_t at = 0; at < piece.length; at += width)
            for (int64_t j = 0; j < bundles; j++) {
                struct tile t = tile_at(plan, set, piece.segment + r, piece.start + at, smaller(rows, segments - r),
                                        smaller(width, piece.length - at));
                t.c += j;
                sums_of_tile(plan, w, &slot->c, &t, plan->batch ? j * plan->spread : piece.segment + r);
                if (plan->batch) {
                    partial[j] += get_real(plan, w->sum, 0);
                    partial[plan->entries + j] += get_real(plan, w->square, 0);
                    continue;
                }
                for (int64_t i = 0; i < t.rows; i++) {
                    partial[2 * (r + i) * plan->parts] += get_real(plan, w->sum, i);
                    partial[2 * (r + i) * plan->parts + 1] += get_real(plan, w->square, i);
                }
            }
}

static void sums_of_piece_columns(const struct plan *plan, struct worker *w, struct slot *slot, int64_t set, int64_t index)
{
    const struct piece piece = piece_of(plan, index);
    const int64_t rows = piece.segments * piece.length, channels = plan->p->c;
    memset(w->mean, 0, (size_t)channels * 8);
    memset(w->m2, 0, (size_t)channels * 8);
    const int64_t most = rows_of_tile(plan, plan->chunk_rows);
    for (int64_t r = 0; r < rows; r += plan->chunk_rows) {
        const int64_t chunk = smaller(plan->chunk_rows, rows - r);
        clear_sums(plan, w);
        for (int64_t q = 0; q < chunk; q += most) {
            const struct tile t = tile_at(plan, set, piece.segment, piece.start + r + q, smaller(most, chunk - q), channels);
            sums_of_tile(plan, w, &slot->c, &t, 0);
        }
        plan->column->accumulate(w->sum, w->mean, (size_t)channels, (size_t)plan->widen);
        plan->column->accumulate(w->square, w->m2, (size_t)channels, (size_t)plan->widen);
    }
    memcpy(slot->partials + index * 2 * channels, w->mean, (size_t)channels * 8);
    memcpy(slot->partials + (index * 2 + 1) * channels, w->m2, (size_t)channels * 8);
}

static void reduce_piece(const struct plan *plan, struct worker *w, struct slot *slot, int64_t set, int64_t index)
{
    if (plan->backward)
        (plan->p->columns ? sums_of_piece_columns : sums_of_piece_runs)(plan, w, slot, set, index);
    else
        (plan->p->columns ? moments_of_piece_columns : moments_of_piece_runs)(plan, w, slot, set, index);
}

/* ---- apply ------------------------------------------------------------------------------------------------------- */

static void y_of_tile(const struct plan *plan, struct worker *w, const struct coefficients *c, const struct tile *t, int64_t i,
                      int64_t next)
{
    const struct normfuse_problem *p = plan->p;
    struct normfuse_pass s = pass_of_tile(plan, w, c, t, i, !plan->reduce);
    if (!p->y.data) /* u alone was asked for */
        return;
    s.y = output(plan, &p->y, t, w->stage[4], &s.y_stride);
    s.stream = plan->stream && direct(plan, &p->y);
    s.ahead_x = ahead_of(plan, &p->x, t, next);
    run_tile(plan, p->columns || t->across_values ? plan->pass->affine_columns : plan->pass->affine_runs, &s);
    scatter(plan, &p->y, t, w->stage[4]);
}

static void apply_tile(const struct plan *plan, struct worker *w, const struct slot *slot, const struct tile *t, int64_t i,
                       int64_t next)
{
    (plan->backward ? dx_of_tile : y_of_tile)(plan, w, &slot->c, t, i, next);
}

/* next: the set whose same piece is reduced afterwards, or -1. */
static void apply_piece(const struct plan *plan, struct worker *w, const struct slot *slot, int64_t set, int64_t index, int64_t next)
{
    const struct piece piece = piece_of(plan, index);
    if (plan->p->columns) {
        const int64_t rows = piece.segments * piece.length, most = rows_of_tile(plan, rows);
        for (int64_t r = 0; r < rows; r += most) {
            const struct tile t = tile_at(plan, set, piece.segment, piece.start + r, smaller(most, rows - r), plan->p->c);
            apply_tile(plan, w, slot, &t, 0, next);
        }
        return;
    }
    if (piece.length == 0)
        return;
    if (plan->spread > 1) {
        struct tile t = tile_at(plan, set, piece.segment, 0, piece.segments, bundled(plan, set) * plan->spread);
        t.across_values = true;
        apply_tile(plan, w, slot, &t, 0, next);
        return;
    }
    if (plan->batch && plan->bundle > 1) { /* a bundle's runs are short: whole */
        for (int64_t r = 0; r < piece.segments; r++) {
            struct tile t = tile_at(plan, set, piece.segment + r, piece.start, bundled(plan, set), piece.length);
            t.across = true;
            apply_tile(plan, w, slot, &t, 0, next);
        }
        return;
    }
    const int64_t width = plan->staged ? smaller(piece.length, STAGE_VALUES) : piece.length;
    const int64_t segments = bundled(plan, set) * piece.segments, rows = plan->staged ? larger(1, STAGE_VALUES / width) : segments;
    for (int64_t r = 0; r < segments; r += rows)
        for (int64_t at = 0; at < piece.length; at += width) {
            const struct tile t = tile_at(plan, set, piece.segment + r, piece.start + at, smaller(rows, segments - r),
                                          smaller(width, piece.length - at));
            apply_tile(plan, w, slot, &t, plan->batch ? 0 : piece.segment + r, next);
        }
}

/* ---- per set: coefficients before, results after ----------------------------------------------------------------- */

/* One set under runs, one channel or group under columns: which statistics it has. */
struct statistics {
    double mean, rstd;
};

static struct statistics saved(const struct plan *plan, int64_t n, int64_t g)
{
    const struct normfuse_problem *p = plan->p;
    return (struct statistics){get_parameter(&p->mean, n, g, 0), get_parameter(&p->rstd, n, g, 1)};
}

static struct statistics running(const struct plan *plan, int64_t c)
{
    const struct normfuse_problem *p = plan->p;
    if (!p->evaluate)
        return (struct statistics){0, 1}; /* affine */
    return (struct statistics){get_parameter(&p->running_mean, 0, c, 0), 1 / sqrt(get_parameter(&p->running_var, 0, c, 1) + p->eps)};
}

/* k, a, b of channels [c, c + count) of sample n, which share statistics: z = (x - k)*a + b. They are entries
 * [i, i + count). */
static void put_forward(const struct plan *plan, struct coefficients *co, int64_t i, int64_t n, int64_t c, int64_t count,
                        struct statistics st)
{
    const struct normfuse_problem *p = plan->p;
    const double k = plan->wide_type ? st.mean : (double)(float)st.mean, rest = k - st.mean;
    if (!plan->wide_type && !p->scale.data && !p->shift.data && !p->weight.batch && !p->bias.batch) {
        const double *restrict weight = plan->weight + c, *restrict bias = plan->bias + c;
        float *restrict out_k = (float *)co->k + i, *restrict out_a = (float *)co->a + i, *restrict out_b = (float *)co->b + i;
        for (int64_t j = 0; j < count; j++) {
            const double gain = st.rstd * weight[j];
            out_k[j] = (float)k;
            out_a[j] = (float)gain;
            out_b[j] = (float)(bias[j] + rest * gain);
        }
        return;
    }
    for (int64_t j = 0; j < count; j++) {
        const double gain = st.rstd * weight_of(plan, n, c + j);
        double a = gain, b = bias_of(plan, n, c + j) + rest * gain;
        if (p->scale.data) {
            const double scale = 1 + get_parameter(&p->scale, n, c + j, 0);
            a *= scale;
            b *= scale;
        }
        if (p->shift.data)
            b += get_parameter(&p->shift, n, c + j, 0);
        put_real(plan, co->k, i + j, k);
        put_real(plan, co->a, i + j, a);
        put_real(plan, co->b, i + j, b);
    }
}

/* Repeats the entries of `count` channels for each of their values. */
static void spread_entries(const struct plan *plan, void *array, int64_t count)
{
    for (int64_t c = count - 1; c >= 0; c--)
        if (plan->wide_type) {
            double *out = (double *)array + c * plan->spread, v = ((double *)array)[c];
            for (int64_t i = 0; i < plan->spread; i++)
                out[i] = v;
        } else {
            float *out = (float *)array + c * plan->spread, v = ((float *)array)[c];
            for (int64_t i = 0; i < plan->spread; i++)
                out[i] = v;
        }
}

static struct moments given_stats(const struct plan *plan, int64_t n, int64_t g)
{
    const double *t = plan->p->stats + 3 * (plan->batch ? g : n * plan->groups + g);
    return (struct moments){t[0], t[1], t[2]};
}

static struct statistics from_moments(const struct plan *plan, struct moments m)
{
    const double rstd = 1 / sqrt((m.count > 0 ? m.m2 / m.count : 0) + plan->p->eps);
    return (struct statistics){m.mean, rstd};
}

/* Which statistics channel c of sample n is normalized with, where they are known beforehand. */
static struct statistics known(const struct plan *plan, int64_t n, int64_t c)
{
    if (plan->none)
        return running(plan, c);
    const int64_t g = plan->batch ? c : c / plan->group_channels;
    return plan->backward ? saved(plan, plan->batch ? 0 : n, g) : from_moments(plan, given_stats(plan, n, g));
}

static void backward_coefficients(const struct plan *plan, struct coefficients *co, const double *sums, int64_t set);

/* What a set holds: channels [first, first + count), in groups of d that share statistics, the first of them g. */
struct extent {
    int64_t n, first, count, d, groups, g;
};

static struct extent extent_of(const struct plan *plan, int64_t set)
{
    const struct normfuse_problem *p = plan->p;
    const int64_t d = plan->batch || plan->none ? 1 : plan->group_channels;
    struct extent e = {.n = sample_of(plan, set), .d = d};
    e.g = plan->none || p->columns ? 0 : group_of(plan, set);
    e.first = plan->none ? 0 : e.g * d;
    e.count = plan->none || p->columns ? p->c : bundled(plan, set) * d;
    e.groups = e.count / larger(1, d);
    return e;
}

/* Fills what a set's reduce or apply part needs and is known before its reduce part: k, a, b where the statistics are
 * given, and p of dx. Where the sums are given too (sharded backward), all of it. */
static void prepare(const struct plan *plan, struct slot *slot, double *sums, int64_t set)
{
    const struct normfuse_problem *p = plan->p;
    if (!plan->backward && plan->reduce)
        return;
    const struct extent e = extent_of(plan, set);
    for (int64_t j = 0; j < e.groups; j++)
        put_forward(plan, &slot->c, j * e.d, e.n, e.first + j * e.d, e.d, known(plan, e.n, e.first + j * e.d));
    if (plan->backward)
        memcpy(slot->c.p, slot->c.a, (size_t)e.count * plan->real_bytes);
    void *arrays[] = {slot->c.k, slot->c.a, slot->c.b, slot->c.p};
    for (int j = 0; j < (plan->backward ? 4 : 3); j++)
        if (p->columns)
            widen_entries(plan, arrays[j]);
        else if (plan->spread > 1)
            spread_entries(plan, arrays[j], e.count);
    if (plan->backward && plan->apply && !plan->reduce && !plan->none) {
        const double *given = p->sums + 2 * (plan->batch ? e.first : e.n * p->c + e.first);
        for (int64_t i = 0; i < e.count; i++) {
            sums[i] = given[2 * i];
            sums[e.count + i] = given[2 * i + 1];
        }
        backward_coefficients(plan, &slot->c, sums, set);
    }
}

/* q, r of dx = p*dy' + q*(x - k) + r from the sums of the set's channels. */
static void backward_coefficients(const struct plan *plan, struct coefficients *co, const double *sums, int64_t set)
{
    const struct normfuse_problem *p = plan->p;
    const struct extent e = extent_of(plan, set);
    const double m = (double)plan->set_values;
    const bool plain = !p->scale.data && !p->weight.batch;
    for (int64_t j = 0; j < e.groups; j++) {
        const struct statistics st = known(plan, e.n, e.first + j * e.d);
        const double k = plan->wide_type ? st.mean : (double)(float)st.mean;
        const double *all_of = sums + j * e.d, *centred_of = sums + e.count + j * e.d, *weight = plan->weight + e.first + j * e.d;
        double all = 0, centred = 0;
        for (int64_t i = 0; i < e.d; i++) {
            const int64_t c = e.first + j * e.d + i;
            const double gain = plain ? weight[i] : weight_of(plan, e.n, c) * (1 + get_parameter(&p->scale, e.n, c, 0));
            all += gain * all_of[i];
            centred += gain * centred_of[i];
        }
        const double q = -(st.rstd * st.rstd) * (st.rstd * (centred / m)), r = -st.rstd * (all / m) + q * (k - st.mean);
        for (int64_t i = j * e.d; i < (j + 1) * e.d; i++) {
            put_real(plan, co->q, i, q);
            put_real(plan, co->r, i, r);
        }
    }
    if (p->columns) {
        widen_entries(plan, co->q);
        widen_entries(plan, co->r);
    } else if (plan->spread > 1) {
        spread_entries(plan, co->q, e.count);
        spread_entries(plan, co->r, e.count);
    }
}

static void update_running(const struct normfuse_problem *p, int64_t c, double mean, double unbiased)
{
    const double momentum = p->momentum;
    put_parameter(&p->running_mean, 0, c, (1 - momentum) * get_parameter(&p->running_mean, 0, c, 0) + momentum * mean);
    put_parameter(&p->running_var, 0, c, (1 - momentum) * get_parameter(&p->running_var, 0, c, 1) + momentum * unbiased);
}

/* Writes what a set's (or group's) moments give to the caller. Sample sums: instance norm's running statistics. */
static void put_statistics(const struct plan *plan, int64_t n, int64_t g, struct moments m, struct statistics st, bool give_stats)
{
    const struct normfuse_problem *p = plan->p;
    if (give_stats) {
        double *t = p->stats + 3 * (plan->batch ? g : n * plan->groups + g);
        t[0] = m.count;
        t[1] = m.mean;
        t[2] = m.m2;
        return;
    }
    put_parameter(&p->mean, n, g, st.mean);
    put_parameter(&p->rstd, n, g, st.rstd);
    if (plan->updates_running && m.count > 0) {
        const double unbiased = m.m2 / (m.count - 1);
        if (plan->batch) {
            update_running(p, g, m.mean, unbiased);
        } else {
            double *sum = plan->sample_sums + 2 * (n / plan->block_samples * p->c + g);
            sum[0] += m.mean;
            sum[1] += unbiased;
        }
    }
}

/* Joins the moments of a set's pieces, in order, onto mean and m2, which have `before` values each; gives how many they
 * have then. */
static double join_pieces(const struct plan *plan, const struct slot *slot, int64_t entries, double before, double *restrict mean,
                          double *restrict m2)
{
    const double values = plan->p->columns && !plan->batch ? (double)plan->group_channels : 1;
    for (int64_t index = 0; index < plan->pieces; index++) {
        const struct piece piece = piece_of(plan, index);
        const double count = (double)(piece.segments * piece.length) * values;
        const double *restrict part_mean = slot->partials + index * 2 * plan->entries, *restrict part_m2 = part_mean + plan->entries;
        if (count == 0)
            continue;
        if (before == 0) {
            memcpy(mean, part_mean, (size_t)entries * 8);
            memcpy(m2, part_m2, (size_t)entries * 8);
        } else {
            const double weight = count / (before + count), cross = before * weight;
            for (int64_t j = 0; j < entries; j++) {
                const double delta = part_mean[j] - mean[j];
                mean[j] += delta * weight;
                m2[j] += part_m2[j] + delta * delta * cross;
            }
        }
        before += count;
    }
    return before;
}

static void finish_forward(const struct plan *plan, struct team *team, struct slot *slot, int64_t set)
{
    const struct normfuse_problem *p = plan->p;
    const struct extent e = extent_of(plan, set);
    const bool give_stats = p->stats && !(p->phases & NORMFUSE_PHASE_APPLY);
    double *mean = team->sums, *m2 = team->sums + e.groups, count = 0;
    memset(mean, 0, (size_t)(2 * e.groups) * 8);
    if (give_stats && p->accumulate)
        for (int64_t j = 0; j < e.groups; j++) {
            const struct moments m = given_stats(plan, e.n, e.g + j);
            count = m.count;
            mean[j] = m.mean;
            m2[j] = m.m2;
        }
    count = join_pieces(plan, slot, e.groups, count, mean, m2);
    for (int64_t j = 0; j < e.groups; j++) {
        const struct moments m = {count, mean[j], m2[j]};
        const struct statistics st = from_moments(plan, m);
        put_statistics(plan, e.n, e.g + j, m, st, give_stats);
        if (plan->apply)
            put_forward(plan, &slot->c, j * e.d, e.n, e.first + j * e.d, e.d, st);
    }
    void *arrays[] = {slot->c.k, slot->c.a, slot->c.b};
    for (int j = 0; plan->apply && j < 3; j++)
        if (p->columns)
            widen_entries(plan, arrays[j]);
        else if (plan->spread > 1)
            spread_entries(plan, arrays[j], e.count);
}

static void finish_backward(const struct plan *plan, struct team *team, struct slot *slot, int64_t set)
{
    const struct normfuse_problem *p = plan->p;
    const struct extent e = extent_of(plan, set);
    double *all = team->sums, *centred = team->sums + e.count;
    const bool give_sums = p->sums && !(p->phases & NORMFUSE_PHASE_BACKWARD_APPLY);
    double *given = give_sums ? p->sums + 2 * (plan->batch ? e.first : e.n * p->c + e.first) : NULL;

    memset(all, 0, (size_t)(2 * e.count) * 8);
    if (p->columns) {
        for (int64_t index = 0; index < plan->pieces; index++) {
            const double *partial = slot->partials + index * 2 * p->c;
            for (int64_t i = 0; i < 2 * e.count; i++)
                all[i] += partial[i];
        }
    } else if (plan->batch) {
        for (int64_t index = 0; index < plan->pieces; index++)
            for (int64_t i = 0; i < e.count; i++) {
                all[i] += slot->partials[index * 2 * plan->entries + i];
                centred[i] += slot->partials[(index * 2 + 1) * plan->entries + i];
            }
    } else {
        for (int64_t i = 0; i < e.count; i++)
            for (int64_t part = 0; part < plan->parts; part++) {
                all[i] += slot->partials[2 * (i * plan->parts + part)];
                centred[i] += slot->partials[2 * (i * plan->parts + part) + 1];
            }
    }

    double *block_sums = plan->batch ? NULL : plan->sample_sums + 2 * (e.n / plan->block_samples * p->c);
    const bool weights = !give_sums && !plan->batch && !p->weight.batch && !p->dweight.batch && !p->bias.batch && !p->dbias.batch;
    for (int64_t j = 0; j < e.groups; j++) {
        const struct statistics st = known(plan, e.n, e.first + j * e.d);
        const double k = plan->wide_type ? st.mean : (double)(float)st.mean, rest = k - st.mean;
        for (int64_t i = j * e.d; i < (j + 1) * e.d; i++) {
            const int64_t c = e.first + i;
            centred[i] += rest * all[i]; /* the passes subtracted k, the mean in f32 */
            if (give_sums) {
                given[2 * i] = p->accumulate ? given[2 * i] + all[i] : all[i];
                given[2 * i + 1] = p->accumulate ? given[2 * i + 1] + centred[i] : centred[i];
                continue;
            }
            const double dweight = st.rstd * centred[i];
            if (weights && !p->scale.data) {
                block_sums[2 * c] += all[i];
                block_sums[2 * c + 1] += dweight;
            } else if (plan->batch) {
                add_parameter(p, &p->dweight, c, dweight);
                add_parameter(p, &p->dbias, c, all[i]);
            } else if (weights) {
                const double gain = 1 + get_parameter(&p->scale, e.n, c, 0);
                block_sums[2 * c] += gain * all[i];
                block_sums[2 * c + 1] += gain * dweight;
            } else {
                put_parameter(&p->dweight, e.n, c, dweight);
                put_parameter(&p->dbias, e.n, c, all[i]);
            }
            if (p->dscale.data)
                put_parameter(&p->dscale, e.n, c, weight_of(plan, e.n, c) * dweight + bias_of(plan, e.n, c) * all[i]);
            if (p->dshift.data)
                put_parameter(&p->dshift, e.n, c, all[i]);
        }
    }
    if (plan->dependent)
        backward_coefficients(plan, &slot->c, team->sums, set);
}

static void finish(const struct plan *plan, struct team *team, int64_t set)
{
    struct slot *slot = &team->slot[set & 1];
    if (plan->backward)
        finish_backward(plan, team, slot, set);
    else
        finish_forward(plan, team, slot, set);
}

/* After all sets: the sums over samples, in order. */
static void finish_samples(const struct plan *plan)
{
    const struct normfuse_problem *p = plan->p;
    const bool gradients = plan->backward && plan->reduce && !p->sums && (p->dweight.data || p->dbias.data) && !p->dweight.batch && !p->dbias.batch;
    if (plan->batch || (!gradients && !plan->updates_running))
        return;
    for (int64_t c = 0; c < p->c; c++) {
        double first = 0, second = 0;
        if (gradients && p->accumulate) {
            first = get_parameter(&p->dbias, 0, c, 0);
            second = get_parameter(&p->dweight, 0, c, 0);
        }
        for (int64_t b = 0; b < plan->blocks; b++) {
            first += plan->sample_sums[2 * (b * p->c + c)];
            second += plan->sample_sums[2 * (b * p->c + c) + 1];
        }
        if (gradients) {
            put_parameter(&p->dbias, 0, c, first);
            put_parameter(&p->dweight, 0, c, second);
        } else if (p->n > 0) {
            update_running(p, c, first / (double)p->n, second / (double)p->n);
        }
    }
}

/* ---- schedules --------------------------------------------------------------------------------------------------- */

/* One thread walks sets [first, last). */
static void walk_alone(const struct plan *plan, struct worker *w, int64_t first, int64_t last)
{
    const bool forward = !plan->back_and_forth;
    struct team *team = &w->own;
    for (int64_t set = first - 1; set < last; set++) {
        const bool reduces = plan->reduce && set + 1 < last, applies = plan->apply && (plan->dependent || !plan->reduce) && set >= first;
        struct slot *now = &team->slot[set & 1], *then = &team->slot[(set + 1) & 1];
        const int64_t next = reduces && plan->ahead ? set + 1 : -1;
        /* two slots: with coefficients that never change, two sets fill both */
        if (applies && !plan->reduce && !(plan->constant && set >= first + 2))
            prepare(plan, now, team->sums, set);
        if (reduces && !(plan->constant && set + 1 >= first + 2))
            prepare(plan, then, team->sums, set + 1);
        for (int64_t i = 0; i < plan->pieces; i++) {
            const int64_t index = forward || (set & 1) ? i : plan->pieces - 1 - i;
            if (applies)
                apply_piece(plan, w, now, set, index, next);
            if (reduces)
                reduce_piece(plan, w, then, set + 1, index);
        }
        if (reduces)
            finish(plan, team, set + 1);
    }
}

static void spin_until(_Atomic int32_t *flag)
{
    for (int spin = 0; !atomic_load_explicit(flag, memory_order_acquire); spin++)
        if (spin > 1000)
            sched_yield();
}

/* All threads walk all sets; this is thread t. */
static void walk_together(struct plan *plan, int32_t t)
{
    struct worker *w = &plan->workers[t];
    struct team *team = &plan->shared;
    const int64_t pieces = plan->pieces;
    const int32_t threads = plan->threads;
    for (int64_t set = -1; set < plan->sets; set++) {
        const bool reduces = set + 1 < plan->sets, applies = plan->dependent && set >= 0;
        if (!reduces && !applies)
            break;
        if (set >= 0)
            spin_until(&plan->ready[set]);
        struct slot *now = &team->slot[set & 1], *then = &team->slot[(set + 1) & 1];
        _Atomic int32_t *claims = plan->claims + (set + 1) * threads;
        for (int32_t j = 0; j < threads; j++) {
            /* its own range first, whose values are in its cache; then what slower threads have not begun */
            const int32_t owner = (t + j) % threads;
            const int64_t begin = pieces * owner / threads, end = pieces * (owner + 1) / threads;
            for (;;) {
                const int64_t claimed = atomic_fetch_add_explicit(&claims[owner], 1, memory_order_relaxed);
                if (begin + claimed >= end)
                    break;
                const int64_t index = !plan->back_and_forth || (set & 1) ? begin + claimed : end - 1 - claimed;
                if (applies)
                    apply_piece(plan, w, now, set, index, reduces && plan->ahead ? set + 1 : -1);
                if (reduces) {
                    reduce_piece(plan, w, then, set + 1, index);
                    if (atomic_fetch_add_explicit(&plan->finished[set + 1], 1, memory_order_acq_rel) == pieces - 1) {
                        finish(plan, team, set + 1);
                        if (set + 2 < plan->sets && !(plan->constant && set >= 0))
                            prepare(plan, &team->slot[set & 1], team->sums, set + 2);
                        atomic_store_explicit(&plan->ready[set + 1], 1, memory_order_release);
                    }
                }
            }
        }
    }
}

/* Pieces that wait for nothing: any thread takes any. */
static void walk_pieces(struct plan *plan, int32_t t)
{
    struct worker *w = &plan->workers[t];
    const int64_t all = plan->sets * plan->pieces;
    const int64_t grain = larger(1, smaller(all / (8 * plan->threads), 64));
    int64_t prepared = -1;
    for (;;) {
        const int64_t from = atomic_fetch_add_explicit(&plan->next_task, grain, memory_order_relaxed);
        if (from >= all)
            return;
        for (int64_t i = from; i < smaller(all, from + grain); i++) {
            const int64_t set = i / plan->pieces;
            if (prepared < 0 || (set != prepared && !plan->constant)) {
                prepare(plan, &w->own.slot[0], w->own.sums, set);
                prepared = set;
            }
            apply_piece(plan, w, &w->own.slot[0], set, i % plan->pieces, -1);
        }
    }
}

static void run_thread(void *context, int64_t t)
{
    struct plan *plan = context;
    const struct normfuse_problem *p = plan->p;
    if (!plan->teams_of_one) {
        if (plan->reduce)
            walk_together(plan, (int32_t)t);
        else
            walk_pieces(plan, (int32_t)t);
    } else {
        for (;;) {
            const int64_t task = atomic_fetch_add_explicit(&plan->next_task, 1, memory_order_relaxed);
            if (task >= plan->tasks)
                break;
            struct worker *w = &plan->workers[t];
            if (plan->batch) {
                walk_alone(plan, w, task * plan->sets_per_task, smaller(plan->sets, (task + 1) * plan->sets_per_task));
                continue;
            }
            const int64_t block = task / plan->group_ranges, range = task % plan->group_ranges;
            const int64_t first = block * plan->blocks_per_task * plan->block_samples;
            const int64_t last = smaller(p->n, first + plan->blocks_per_task * plan->block_samples);
            const int64_t groups = plan->sample_sets;
            if (plan->group_ranges == 1) {
                walk_alone(plan, w, first * groups, last * groups);
            } else {
                for (int64_t n = first; n < last; n++)
                    walk_alone(plan, w, n * groups + range * plan->sets_per_task,
                               n * groups + smaller(groups, (range + 1) * plan->sets_per_task));
            }
        }
    }
    if (plan->stream)
        plan->table->fence();
}

/* What the apply part of a sharded forward writes beside y: once, before the threads. */
static void put_given_statistics(const struct plan *plan)
{
    const struct normfuse_problem *p = plan->p;
    for (int64_t n = 0; n < (plan->batch ? 1 : p->n); n++)
        for (int64_t g = 0; g < plan->groups; g++) {
            const struct moments m = given_stats(plan, n, g);
            put_statistics(plan, n, g, m, from_moments(plan, m), false);
        }
}

/* The parameter gradients of a sharded backward: from the given sums. */
static void put_given_gradients(const struct plan *plan)
{
    const struct normfuse_problem *p = plan->p;
    for (int64_t c = 0; c < p->c; c++) {
        double dweight = p->accumulate ? get_parameter(&p->dweight, 0, c, 0) : 0;
        double dbias = p->accumulate ? get_parameter(&p->dbias, 0, c, 0) : 0;
        for (int64_t n = 0; n < (plan->batch ? 1 : p->n); n++) {
            const struct statistics st = known(plan, n, c);
            const double *sums = p->sums + 2 * (plan->batch ? c : n * p->c + c);
            const double gain = 1 + get_parameter(&p->scale, n, c, 0);
            dbias += gain * sums[0];
            dweight += gain * st.rstd * sums[1];
            put_parameter(&p->dscale, n, c, weight_of(plan, n, c) * st.rstd * sums[1] + bias_of(plan, n, c) * sums[0]);
            put_parameter(&p->dshift, n, c, sums[0]);
        }
        put_parameter(&p->dweight, 0, c, dweight);
        put_parameter(&p->dbias, 0, c, dbias);
    }
}

size_t normfuse_cpu_scratch_bytes(const struct normfuse_problem *problem, const normfuse_exec *exec)
{
    struct plan plan;
    make_plan(&plan, problem, exec);
    return lay_out(&plan, NULL);
}

normfuse_status normfuse_cpu_run(const struct normfuse_problem *p, const normfuse_exec *exec)
{
    struct plan plan;
    make_plan(&plan, p, exec);
    const size_t bytes = lay_out(&plan, NULL);
    _Alignas(ALIGNMENT) char stack[STACK_BYTES];
    char *allocated = NULL, *base = exec ? exec->scratch : NULL;
    if (base) {
        if (exec->scratch_bytes < bytes)
            return normfuse_refuse(NORMFUSE_SCRATCH, "%s: exec.scratch_bytes is %zu, %zu are needed", p->name, exec->scratch_bytes, bytes);
    } else if (bytes <= sizeof stack) {
        base = stack;
    } else {
        base = allocated = aligned_alloc(ALIGNMENT, (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
        if (!base)
            return normfuse_refuse(NORMFUSE_OUT_OF_MEMORY, "%s: no memory for %zu bytes of scratch", p->name, bytes);
    }
    lay_out(&plan, base);

    const struct normfuse_machine *machine = normfuse_machine_known();
    if (machine->verbose_dispatch)
        fprintf(stderr, "normfuse: %s -> cpu %s, %d %s%s%s%s\n", p->name, plan.table->isa, plan.threads,
                plan.threads == 1 ? "thread" : "threads",
                plan.teams_of_one ? ", one set a thread" : plan.reduce ? ", threads share sets" : ", pieces",
                plan.stream ? ", streaming stores" : "", machine->capped ? " (capped by NORMFUSE_MAX_ISA)" : "");

    if (!p->weight.batch)
        to_double(&p->weight, plan.weight, p->c, 1);
    if (!p->bias.batch)
        to_double(&p->bias, plan.bias, p->c, 0);
    if (plan.reduce || plan.updates_running)
        memset(plan.sample_sums, 0, (size_t)(plan.blocks * p->c * 2) * 8);
    if (!plan.reduce && !plan.backward && !plan.none)
        put_given_statistics(&plan);
    if (plan.backward && !(p->phases & NORMFUSE_PHASE_BACKWARD_SUMS))
        put_given_gradients(&plan);

    if ((plan.reduce || plan.apply) && plan.sets > 0) {
        if (!plan.teams_of_one && plan.reduce) {
            for (int64_t i = 0; i < (plan.sets + 1) * plan.threads; i++)
                atomic_init(&plan.claims[i], 0);
            for (int64_t i = 0; i <= plan.sets; i++) {
                atomic_init(&plan.finished[i], 0);
                atomic_init(&plan.ready[i], 0);
            }
            prepare(&plan, &plan.shared.slot[0], plan.shared.sums, 0);
        }
        atomic_init(&plan.next_task, 0);
        if (plan.threads == 1)
            run_thread(&plan, 0);
        else if (exec && exec->parallel_for)
            exec->parallel_for(exec->pool, plan.threads, run_thread, &plan);
        else
            normfuse_threads_run(plan.threads, run_thread, &plan);
    }
    finish_samples(&plan);
    free(allocated);
    return NORMFUSE_OK;
}
