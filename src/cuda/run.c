/* SPDX-License-Identifier: MIT
 *
 * run.c - a problem on a CUDA device. A call is a few steps, each a kernel with its geometry: tiles that keep what they
 * read on the chip where that is possible, else tiles that only sum and tiles that read again, and the small kernels of
 * finish.cu between and after them. Nothing here waits, allocates or touches device memory. */
#include "run.h"

#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "policy.h"

enum { MOST_STEPS = 5, FORWARD = 0, BACKWARD = 1, MOST_CLUSTER = 16 };

/* Sets that meet at a time: each has a ticket on a line of its own, of 16 words. */
enum { MOST_TEAMS = NORMFUSE_CUDA_TICKET_WORDS / 16 };

struct step {
    enum normfuse_cuda_kernel kernel;
    struct normfuse_cuda_geometry geometry;
    int32_t phases, source;
    uint32_t threads, cluster;
    uint32_t without_packs; /* threads of the last warp, where that has other work */
    int32_t at_once;        /* rows, and what else a schedule of columns has: kernels.h */
    union normfuse_cuda_of_schedule of;
    int64_t blocks;
    size_t shared;
    bool cooperative, needs_tickets;
    bool of_dpost_add; /* what goes on from dz: the step before it wrote that there */
};

struct plan {
    struct step steps[MOST_STEPS];
    int count;
    /* Bytes of each part of scratch; 0: not there. */
    size_t partials, statistics, sums, totals;
    struct normfuse_cuda_geometry sums_geometry; /* of the tiles that wrote the sums */
};

static int64_t divide_up(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static int64_t most(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

static uint32_t whole_warps(int64_t threads)
{
    return (uint32_t)(divide_up(most(threads, 1), 32) * 32);
}

/* ---- which kernel ------------------------------------------------------------------------------------------------ */

/* What few networks have: plain kernels that keep packs lack the derivatives, which cost too many registers, and
 * columns_elementwise.cu and columns_lanes.cu both directions. */
static bool is_rare(int32_t activation)
{
    return activation == NORMFUSE_GELU || activation == NORMFUSE_GELU_TANH || activation == NORMFUSE_ELU ||
           activation == NORMFUSE_MISH;
}

/* ---- what a call is, to the planner ------------------------------------------------------------------------------ */

struct task {
    const struct normfuse_problem *problem;
    const struct normfuse_cuda_device *device;
    const struct normfuse_cuda_policy *policy;
    bool has_tickets;
    int direction;
    bool wide;          /* packs of 16 bytes, whole ones */
    bool ragged;        /* packs of 16 bytes that rows begin and end inside of: where the tensors allow no others */
    int pack;           /* elements of one */
    int32_t abreast;    /* columns: rows that are walked as one, so that they are whole packs */
    bool uneven;        /* these and samples do not end together, which tiles that keep nothing can bear */
    bool narrowed;      /* element by element, where those go by packs */
    size_t value_bytes; /* of what is computed in */
    bool plain;         /* packs of 16 bytes of singles or halves, nothing is added, the tensors are alike */
    bool compact;       /* what columns_cluster.cu does: groups, plain, parameters that can be read in packs */
    bool few_rows; /* what columns_lanes.cu does, if rows are few: groups of packs or in packs, plain, not modulated */
    bool batch;    /* what columns_grid_pipeline_batch.cu does: batch norm, the same */
    bool known;    /* what columns_elementwise.cu does: evaluation and affine, the same */
    bool added;    /* and of what has an addition before the activation */
    bool wants_gradients; /* the parameters' */
    int tensors;          /* that a tile keeps: x, or x and dy */
    size_t pack_bytes;
    double bytes; /* that must move at least */
};

static enum normfuse_cuda_kernel kernel_of(const struct task *task, enum normfuse_cuda_schedule schedule)
{
    const struct normfuse_problem *const p = task->problem;
    return normfuse_cuda_kernel_of(p->columns, schedule, task->direction == BACKWARD, p->type, task->pack > 1);
}

/* Vectors of each tensor that a thread of this schedule's kernel holds, or has on their way. */
static int vectors_of(const struct task *task, enum normfuse_cuda_schedule schedule)
{
    return normfuse_cuda_kernel_table[kernel_of(task, schedule)].vectors;
}

static enum normfuse_cuda_schedule schedule_of(const struct step *step)
{
    return normfuse_cuda_kernel_table[step->kernel].schedule;
}

/* One block a multiprocessor, which hold samples together; the kernel finds the parameters' gradients, too. */
static bool holds_grid(const struct step *step)
{
    const enum normfuse_cuda_schedule schedule = schedule_of(step);
    return schedule == NORMFUSE_SCHEDULE_grid_registers || schedule == NORMFUSE_SCHEDULE_grid_pipeline ||
           schedule == NORMFUSE_SCHEDULE_grid_pipeline_batch;
}

/* A cluster that has the blocks of all samples, and so the parameters' gradients. */
static bool finds_gradients(const struct step *step)
{
    return schedule_of(step) == NORMFUSE_SCHEDULE_cluster && step->of.cluster.samples > 0;
}

/* Blocks that go from sample to sample. */
static bool spans_samples(const struct step *step, bool columns)
{
    const enum normfuse_cuda_schedule schedule = schedule_of(step);
    return columns && (schedule == NORMFUSE_SCHEDULE_lanes || schedule == NORMFUSE_SCHEDULE_lanes_rows);
}

static int views_of(const struct normfuse_problem *p, const struct normfuse_view **views)
{
    const struct normfuse_view *const all[] = {&p->x,  &p->pre_add, &p->post_add, &p->y,        &p->u,
                                               &p->dy, &p->du,      &p->dx,       &p->dpost_add};
    int count = 0;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i]->data != NULL)
            views[count++] = all[i];
    return count;
}

static int64_t common_multiple(int64_t a, int64_t b)
{
    int64_t x = a, y = b;
    while (y != 0) {
        const int64_t t = x % y;
        x = y;
        y = t;
    }
    return a / x * b;
}

/* How many rows have to be walked as one so that every tensor can be read and written in packs of 16 bytes: one, or
 * under columns the fewest adjacent ones that are whole packs; 0 where that is impossible. `uneven`: though samples
 * begin and end inside of packs. */
static int32_t rows_abreast(const struct normfuse_problem *p, int pack, bool uneven)
{
    enum { MOST_PACKS = 512 }; /* of rows abreast, which a block has whole */
    int64_t abreast = 1;
    if (p->columns && p->c % pack != 0) {
        abreast = common_multiple(p->c, pack) / p->c;
        if ((p->s % abreast != 0 && !uneven) || p->c * abreast / pack > MOST_PACKS)
            return 0;
    } else if (uneven || (!p->columns && p->s % pack != 0)) {
        return 0;
    }
    const struct normfuse_view *views[9];
    const int count = views_of(p, views);
    for (int i = 0; i < count; i++) {
        const struct normfuse_view *const view = views[i];
        if ((uintptr_t)view->data % 16 != 0 || (view->batch % pack != 0 && !uneven) ||
            (!p->columns    ? view->position != 1 || view->channel % pack != 0
             : abreast == 1 ? view->channel != 1 || view->position % pack != 0
                            : view->channel != 1 || view->position != p->c))
            return 0;
    }
    return (int32_t)abreast;
}

/* Of rows abreast at once, so that a lane that joins what threads found has no more of it one after the other than
 * docs/numerics.md says: of 16 threads and, forward, as many channels of a group. Each pack holds pieces of several,
 * and single channels where rows begin inside of packs. */
static int64_t most_at_once(const struct task *task, int64_t group)
{
    const bool forward = task->direction == FORWARD;
    if (task->abreast <= 1)
        return INT64_MAX;
    const int64_t in_lane = forward ? 16 + least(group, 16) : 16;
    const int64_t pieces = !forward ? 1 : task->uneven ? group : common_multiple(group, task->pack) / task->pack;
    return in_lane / task->abreast * 32 / pieces;
}

/* Whether all tensors have the same strides and what a block counts bytes through is below 2^31 of them: a set, or
 * under columns a sample, or all samples that one reads through. */
static bool are_alike(const struct normfuse_problem *p, bool all_samples)
{
    const struct normfuse_view *views[9];
    const int count = views_of(p, views);
    for (int i = 1; i < count; i++)
        if (views[i]->batch != views[0]->batch || views[i]->channel != views[0]->channel ||
            views[i]->position != views[0]->position)
            return false;
    if (count == 0) /* empty ones may have no memory */
        return true;
    const struct normfuse_view *const x = views[0];
    if (x->batch < 0 || x->channel < 0 || x->position < 0)
        return false;
    const bool by_batch = p->columns ? all_samples : p->sets == NORMFUSE_SETS_BATCH;
    const double most_channels = p->columns                       ? (double)p->c
                                 : p->sets == NORMFUSE_SETS_GROUP ? (double)(p->c / p->groups)
                                 : p->sets == NORMFUSE_SETS_BATCH ? 1.0
                                                                  : (double)p->c;
    const double elements = (by_batch ? (double)p->n * (double)x->batch : 0.0) + most_channels * (double)x->channel +
                            (double)p->s * (double)x->position;
    return elements * (double)normfuse_type_bytes(p->type) < 2147483648.0;
}

/* Of `pack` elements: how many packs that are aligned in memory a row can touch. Where in its first pack it begins is a
 * multiple of what divides the strides and the pack. */
static int64_t ragged_spans(const struct normfuse_problem *p, int pack)
{
    const int64_t places = p->x.batch | p->x.channel | pack;
    return divide_up(p->s + pack - (places & -places), pack);
}

/* Whether such packs are possible (the tensors are alike), and carry more than one element each. */
static bool allows_ragged_packs(const struct normfuse_problem *p, int pack)
{
    const struct normfuse_view *views[9];
    const int count = views_of(p, views);
    for (int i = 0; i < count; i++)
        if ((uintptr_t)views[i]->data % 16 != 0 || views[i]->position != 1)
            return false;
    return !p->columns && 2 * p->s >= 3 * ragged_spans(p, pack);
}

/* Whether a thread can read a parameter of its pack's channels at once. */
static bool is_packed(const struct normfuse_parameter *of, int pack)
{
    const int64_t bytes = of->data != NULL ? (int64_t)normfuse_type_bytes(of->type) : 0;
    const int64_t aligned = bytes * pack < 16 ? bytes * pack : 16;
    return of->data == NULL || (of->type != NORMFUSE_F64 && of->channel == 1 && (intptr_t)of->data % aligned == 0 &&
                                of->batch * bytes % aligned == 0);
}

static bool is_packed_or_double(const struct normfuse_parameter *of, int pack)
{
    return is_packed(of, pack) || (of->type == NORMFUSE_F64 && of->channel == 1 && (intptr_t)of->data % 16 == 0);
}

/* Whether the `count` values of a sample are adjacent. */
static bool is_contiguous(const struct normfuse_parameter *of, int64_t count)
{
    return of->data == NULL || of->channel == 1 || count == 1;
}

/* Whether no pack has channels of more than two groups. */
static bool has_at_most_two_groups_a_pack(int64_t group, int pack)
{
    for (int64_t first = 0; first % group != 0 || first == 0; first += pack)
        if ((first + pack - 1) / group - first / group > 1)
            return false;
    return true;
}

static bool takes_all_samples(const struct normfuse_problem *p)
{
    if (p->sets == NORMFUSE_SETS_NONE)
        return p->weight.batch == 0 && p->bias.batch == 0 && p->dweight.batch == 0 && p->dbias.batch == 0 &&
               p->scale.data == NULL && p->shift.data == NULL && p->dscale.data == NULL && p->dshift.data == NULL;
    return p->sets == NORMFUSE_SETS_BATCH;
}

/* Columns whose samples all count together, and whose rows are one stride apart from one sample to the next as well,
 * become one sample of more positions. */
static void unite_samples(struct normfuse_problem *p)
{
    if (!p->columns || p->n <= 1 || !takes_all_samples(p) || (double)p->n * (double)p->s > 2e9)
        return;
    struct normfuse_view *const views[] = {&p->x,  &p->pre_add, &p->post_add, &p->y,        &p->u,
                                           &p->dy, &p->du,      &p->dx,       &p->dpost_add};
    const int count = (int)(sizeof views / sizeof *views);
    for (int i = 0; i < count; i++)
        if (views[i]->data != NULL && p->s > 1 && views[i]->batch != views[i]->position * p->s)
            return;
    for (int i = 0; i < count; i++) {
        if (p->s == 1)
            views[i]->position = views[i]->batch;
        views[i]->batch = 0;
    }
    p->s *= p->n;
    p->n = 1;
}

/* Strides of one row are those of `from` rows abreast and become those of `to`. */
static void walk_abreast(struct normfuse_problem *p, int32_t from, int32_t to)
{
    struct normfuse_view *const views[] = {&p->x,  &p->pre_add, &p->post_add, &p->y,        &p->u,
                                           &p->dy, &p->du,      &p->dx,       &p->dpost_add};
    for (size_t i = 0; i < sizeof views / sizeof *views; i++)
        views[i]->position = views[i]->position / from * to;
}

static int32_t exponent_of(int64_t value)
{
    int32_t bits = 0;
    while ((INT64_C(1) << bits) < value)
        bits++;
    return bits;
}

static struct normfuse_cuda_divisor divisor(int64_t value)
{
    struct normfuse_cuda_divisor by = {.divisor = (uint32_t)most(1, value)};
    by.shift = (uint32_t)exponent_of(by.divisor);
    by.multiplier = (uint32_t)((UINT64_C(1) << 32) * ((UINT64_C(1) << by.shift) - by.divisor) / by.divisor + 1);
    return by;
}

/* Once everything else is known. */
static void set_divisors(const struct normfuse_problem *p, uint32_t threads, struct normfuse_cuda_geometry *g)
{
    g->by_parts = divisor(g->parts);
    g->by_groups = divisor(p->groups);
    g->by_spans = divisor(g->spans);
    g->by_outer = divisor(g->outer);
    g->by_width = divisor(g->width);
    g->by_blocks_wide = divisor(g->blocks_wide);
    g->by_group = divisor(g->group);
    g->by_parts_a_sample = divisor(g->parts_a_sample);
    const int64_t at_once = g->width > 0 ? (int64_t)threads / g->width : 1;
    g->by_rows_at_once = divisor(at_once);
    g->by_row_step = divisor(at_once * (g->interleaved ? g->parts_a_sample : 1));
}

/* What the kernels count in 32 bits. */
static bool is_countable(int64_t value)
{
    return value < INT32_MAX - (1 << 24);
}

/* ---- runs -------------------------------------------------------------------------------------------------------- */

static struct normfuse_cuda_geometry runs_geometry(const struct task *task)
{
    const struct normfuse_problem *const p = task->problem;
    struct normfuse_cuda_geometry g = {.parts = 1, .passes = 1, .teams = 1, .sets_a_block = 1, .parts_a_sample = 1};
    g.spans = (int32_t)(task->ragged ? ragged_spans(p, task->pack) : p->s / task->pack);
    g.outer = (int32_t)(p->sets == NORMFUSE_SETS_GROUP   ? p->c / p->groups
                        : p->sets == NORMFUSE_SETS_BATCH ? p->n
                                                         : p->c);
    g.sets = (int32_t)(p->sets == NORMFUSE_SETS_GROUP   ? p->n * p->groups
                       : p->sets == NORMFUSE_SETS_BATCH ? p->c
                                                        : p->n);
    const int64_t rows = (int64_t)g.outer * g.spans;
    g.rows = is_countable(rows) ? (int32_t)rows : 0;
    g.part_rows = g.rows;
    g.group = p->sets == NORMFUSE_SETS_GROUP ? g.outer : 1;
    g.sums_by_channel = p->sets == NORMFUSE_SETS_BATCH;
    return g;
}

/* A kernel that keeps nothing: a thread walks any number of packs. */
static bool streams(const struct task *task, enum normfuse_cuda_schedule kept)
{
    return kept == NORMFUSE_SCHEDULE_elementwise || kept == NORMFUSE_SCHEDULE_elementwise_residual ||
           (kept == NORMFUSE_SCHEDULE_unaligned && task->problem->columns) ||
           (kept == NORMFUSE_SCHEDULE_two_pass && (task->problem->columns || task->direction == FORWARD));
}

/* What passes goes through a ring of each thread in shared memory. */
static bool has_rings(const struct task *task, enum normfuse_cuda_schedule kept)
{
    return task->problem->columns && (kept == NORMFUSE_SCHEDULE_unaligned || kept == NORMFUSE_SCHEDULE_two_pass);
}

/* Fills in what follows from parts, threads and rows; false where the block's shared memory does not suffice. */
static bool settle_runs(const struct task *task, struct step *step, enum normfuse_cuda_schedule kept, int64_t part_rows,
                        uint32_t threads)
{
    struct normfuse_cuda_geometry *const g = &step->geometry;
    const struct normfuse_problem *const p = task->problem;
    const int registers = vectors_of(task, kept);
    const int64_t each = divide_up(part_rows, threads), warps = threads / 32;
    const bool by_sample = p->sets == NORMFUSE_SETS_BATCH;

    step->kernel = kernel_of(task, kept);
    step->threads = threads;
    g->passes = 1;
    g->part_rows = (int32_t)part_rows;
    g->parts = (int32_t)divide_up(g->rows, part_rows);
    g->segment_rows = (int32_t)(task->direction == FORWARD ? each : 32 * each);
    g->kept_shared = streams(task, kept) ? 0 : (int32_t)most(0, each - registers);
    if (g->kept_shared > 0 && task->pack == 1)
        return false;
    const int64_t touched = by_sample ? 1 : least(g->outer, (part_rows - 1) / g->spans + 2);
    g->coefficients = (int32_t)touched;
    g->channels_a_segment = task->direction == BACKWARD ? (by_sample ? 1 : (g->segment_rows - 1) / g->spans + 2) : 0;
    g->sum_slots = by_sample ? g->parts : (int32_t)least(g->parts, (g->spans - 1) / part_rows + 2);
    step->blocks = (int64_t)g->sets * g->parts;
    const int64_t numbers = task->direction == FORWARD ? 4 * touched : 4 * touched + 2 * warps * g->channels_a_segment;
    step->shared = (size_t)task->tensors * 16 * (size_t)g->kept_shared * threads + (size_t)numbers * task->value_bytes;
    return step->shared + 2048 <= task->device->shared_per_block;
}

/* The same task element by element. */
static struct task narrowed(const struct task *task)
{
    struct task narrow = *task;
    narrow.wide = narrow.ragged = narrow.plain = narrow.uneven = false;
    narrow.pack = narrow.abreast = 1;
    narrow.pack_bytes = normfuse_type_bytes(task->problem->type);
    return narrow;
}

/* Sets so small that each segment of a warp holds one: of at most 128 elements, where packs are ragged, so a warp that
 * has one to itself would gain nothing by packs. */
static bool plan_many_sets(const struct task *task, struct step *step)
{
    struct normfuse_cuda_geometry *const g = &step->geometry;
    if (task->ragged || (task->wide && task->problem->type == NORMFUSE_F64)) {
        struct task general = narrowed(task);
        /* Ragged for their derivative alone. */
        general.wide = task->ragged && rows_abreast(task->problem, task->pack, false) == 1;
        if (general.wide) {
            general.pack = task->pack;
            general.pack_bytes = task->pack_bytes;
        }
        const struct normfuse_cuda_geometry given = *g;
        *g = runs_geometry(&general);
        if (g->rows > 0 && normfuse_tune("RAGGED", 1) == 1 && plan_many_sets(&general, step))
            return true;
        *g = given;
        return false;
    }
    const struct normfuse_problem *const p = task->problem;
    const int least_packs = vectors_of(task, NORMFUSE_SCHEDULE_lanes);
    const int32_t lane_bits = exponent_of(divide_up(g->rows, least_packs));
    if (lane_bits > 5 || (int64_t)g->sets << lane_bits < INT64_C(1024) * task->device->processors)
        return false;
    g->lane_bits = lane_bits;
    const uint32_t threads = 128;
    const bool by_sample = p->sets == NORMFUSE_SETS_BATCH;
    step->kernel = kernel_of(task, NORMFUSE_SCHEDULE_lanes);
    step->threads = threads;
    g->sets_a_block = (int32_t)(threads >> g->lane_bits);
    g->segment_rows = (int32_t)g->rows;
    g->coefficients = g->sets_a_block * (by_sample ? 1 : (int32_t)g->outer);
    g->channels_a_segment = by_sample ? 1 : (int32_t)g->outer;
    g->sum_slots = 1;
    step->blocks = divide_up(g->sets, g->sets_a_block);
    step->shared =
        (size_t)(task->direction == FORWARD ? 4 * g->coefficients
                                            : 4 * g->coefficients + 2 * g->sets_a_block * g->channels_a_segment) *
        task->value_bytes;
    return true;
}

/* What all blocks of the grid read or write in a round, in microseconds a tensor. */
static double microseconds_a_round(const struct task *task, const struct step *step)
{
    return (double)step->blocks * (double)step->geometry.part_rows * (double)task->pack_bytes /
           task->policy->bytes_a_microsecond;
}

/* `teams` sets at a time, with all blocks of the grid resident, two a processor. */
static bool plan_grid_of_runs(const struct task *task, struct step *step, enum normfuse_cuda_schedule kept,
                              uint32_t threads, int64_t teams)
{
    const struct normfuse_cuda_device *const device = task->device;
    const struct normfuse_cuda_policy *const policy = task->policy;
    struct step trial = *step;
    trial.geometry = runs_geometry(task);
    trial.cluster = 0;
    const int64_t blocks = 2 * (int64_t)device->processors / teams;
    if (!task->has_tickets || teams > MOST_TEAMS || blocks < 2 || blocks > trial.geometry.rows ||
        !settle_runs(task, &trial, kept, divide_up(trial.geometry.rows, blocks), threads) ||
        trial.shared > policy->shared_a_block)
        return false;
    trial.blocks = teams * trial.geometry.parts;
    /* Each round waits for all of its blocks: parts of a few KB take longer than reading twice (1x96x523x527, whose
     * rows allow no packs: 2375 us against 700). */
    const bool rounds = teams < trial.geometry.sets;
    if (rounds && (double)trial.geometry.part_rows * (double)task->pack_bytes < policy->least_round_bytes)
        return false;
    if ((int64_t)normfuse_cuda_blocks_per_processor(device, trial.kernel, threads, trial.shared) * device->processors <
        trial.blocks)
        return false;
    trial.geometry.teams = (int32_t)teams;
    trial.geometry.exchange = NORMFUSE_EXCHANGE_GRID;
    trial.cooperative = trial.needs_tickets = true;
    trial.geometry.late_blocks = device->processors;
    if (rounds)
        trial.geometry.late_cycles = (int32_t)normfuse_tune(
            "LATE", (int64_t)(microseconds_a_round(task, &trial) * task->tensors * policy->cycles_a_microsecond));
    *step = trial;
    return true;
}

/* As many sets at a time as take the least time in all. */
static bool plan_rounds_of_runs(const struct task *task, struct step *step, enum normfuse_cuda_schedule kept,
                                uint32_t threads)
{
    const int64_t sets = step->geometry.sets, only = normfuse_tune("TEAMS", 0);
    double least_time = INFINITY;
    struct step fit = {0};
    for (int64_t teams = least(sets, 2 * task->device->processors); teams >= 1; teams--) {
        struct step trial = *step;
        if ((only != 0 && teams != only) || !plan_grid_of_runs(task, &trial, kept, threads, teams))
            continue;
        const double round = microseconds_a_round(task, &trial) * (task->tensors + 1) + task->policy->round_wait;
        const double time = (double)divide_up(sets, teams) * round;
        if (time < least_time) {
            least_time = time;
            fit = trial;
        }
    }
    if (least_time < INFINITY)
        *step = fit;
    return least_time < INFINITY;
}

/* Keeps each set on the chip, in one block or several. */
static bool plan_kept_runs(const struct task *task, struct step *step)
{
    const struct normfuse_cuda_policy *const policy = task->policy;
    const struct normfuse_cuda_device *const device = task->device;
    const enum normfuse_cuda_schedule small = task->ragged  ? NORMFUSE_SCHEDULE_unaligned
                                              : task->plain ? NORMFUSE_SCHEDULE_two_pass
                                                            : NORMFUSE_SCHEDULE_general;
    const int32_t few = vectors_of(task, small);
    step->geometry = runs_geometry(task);
    if (step->geometry.rows == 0)
        return false;
    if (plan_many_sets(task, step))
        return true;

    struct normfuse_cuda_geometry *const g = &step->geometry;
    const double row_bytes = (double)((int64_t)task->pack_bytes * task->tensors);
    /* One block: as few threads as the registers of the small kernel allow, or twice as many where blocks are few. */
    const int64_t wanted = g->sets < 4 * device->processors ? most(1, few / 2) : few;
    const int64_t most_threads = normfuse_tune("FEW", policy->few_threads[task->direction]);
    const int64_t set_bytes = (int64_t)((double)g->rows * row_bytes);
    const int64_t blocks_wanted = 2 * device->processors;
    int64_t parts = divide_up(set_bytes, policy->part_bytes[task->direction]);
    if (g->sets * parts < blocks_wanted)
        parts = most(parts, least(divide_up(blocks_wanted, g->sets), set_bytes / policy->least_part_bytes));
    parts = normfuse_tune("PARTS", parts);

    if (parts <= 1 && task->plain) {
        const enum normfuse_cuda_schedule whole = task->ragged ? NORMFUSE_SCHEDULE_unaligned : NORMFUSE_SCHEDULE_block;
        const int64_t each = vectors_of(task, whole);
        /* Of few sizes the one with most sets on a processor at once, where its last wave is no emptier; of as many,
         * the largest. */
        const int32_t *const sizes = policy->whole_threads[task->direction];
        const int64_t widest = normfuse_tune("WHOLE", sizes[0]);
        int64_t most_blocks = 0;
        double best = 0.0;
        struct step fit = {0};
        for (int i = 0; i < NORMFUSE_CUDA_WHOLE_SIZES && sizes[i] > 0; i++) {
            const int64_t size = i == 0 ? widest : sizes[i];
            const int64_t threads = least(size, whole_warps(divide_up(g->rows, each)));
            struct step trial = *step;
            if (size > widest || !settle_runs(task, &trial, whole, g->rows, (uint32_t)threads) ||
                trial.shared > (size_t)normfuse_tune("WHOLE_SHARED", (int64_t)policy->shared_a_block))
                continue;
            const int64_t blocks =
                normfuse_cuda_blocks_per_processor(device, trial.kernel, trial.threads, trial.shared);
            const double waves = blocks > 0 ? (double)trial.blocks / (double)(blocks * device->processors) : INFINITY;
            const double filled = waves / ceil(waves);
            if (blocks > most_blocks && filled >= 0.9 * best) {
                most_blocks = blocks;
                best = filled;
                fit = trial;
            }
        }
        if (fit.threads > 0) {
            *step = fit;
            return true;
        }
        parts = 1;
    } else if (parts <= 1) {
        const int64_t threads = whole_warps(divide_up(g->rows, wanted));
        if (threads <= most_threads && settle_runs(task, step, small, g->rows, (uint32_t)threads) &&
            step->geometry.kept_shared == 0)
            return true;
        if (whole_warps(divide_up(g->rows, few)) <= most_threads &&
            settle_runs(task, step, small, g->rows, whole_warps(divide_up(g->rows, few))))
            return true;
        parts = 1;
    }
    const enum normfuse_cuda_schedule kept = task->ragged  ? NORMFUSE_SCHEDULE_unaligned
                                             : task->plain ? NORMFUSE_SCHEDULE_split
                                                           : NORMFUSE_SCHEDULE_general;
    uint32_t threads = (uint32_t)normfuse_tune("THREADS", policy->many_threads[task->direction]);
    /* One block a set: no more threads than registers are wanted for; fewer, and more blocks beside one another, where
     * sets are small. */
    if (parts == 1 && task->plain)
        threads = (uint32_t)least(threads, whole_warps(divide_up(g->rows, vectors_of(task, kept))));
    if (set_bytes <= policy->small_set_bytes)
        threads = (uint32_t)least(threads, 128);
    if (parts >= 4 && plan_grid_of_runs(task, step, kept, threads, g->sets))
        return true;
    const int64_t tuned = normfuse_tune("CLUSTER", policy->most_cluster[task->direction]);
    const int64_t most_cluster = device->clusters ? least(NORMFUSE_CUDA_RUN_CLUSTER, tuned) : 1;
    /* The backward has more to do between reading and writing: more and smaller blocks side by side. */
    const int64_t small_bytes = policy->small_part_bytes[task->direction];
    if (parts > 1 && small_bytes > 0 && divide_up(set_bytes, small_bytes) <= most_cluster &&
        normfuse_tune("PARTS", 0) == 0) {
        parts = most(parts, divide_up(set_bytes, small_bytes));
        threads = (uint32_t)normfuse_tune("THREADS", 128);
    }
    struct step fit = {0};
    int64_t least_time = INT64_MAX;
    for (int64_t cluster = parts; cluster <= most_cluster && cluster <= g->rows; cluster++) {
        struct step trial = *step;
        if (!settle_runs(task, &trial, kept, divide_up(g->rows, cluster), threads))
            continue;
        if (trial.shared > policy->shared_a_block && cluster < most_cluster)
            continue;
        if (cluster > 1) {
            /* Parts that round away would leave blocks of the cluster without rows. */
            trial.geometry.parts = (int32_t)cluster;
            if (task->problem->sets == NORMFUSE_SETS_BATCH)
                trial.geometry.sum_slots = trial.geometry.parts;
            trial.blocks = (int64_t)g->sets * cluster;
            trial.cluster = (uint32_t)cluster;
            trial.geometry.exchange = NORMFUSE_EXCHANGE_CLUSTER;
            const struct normfuse_cuda_launch launch = {.kernel = trial.kernel,
                                                        .grid = (uint32_t)cluster,
                                                        .threads = trial.threads,
                                                        .cluster = trial.cluster,
                                                        .shared = trial.shared};
            if (normfuse_cuda_resident_clusters(device, &launch) == 0)
                continue;
        }
        /* Few waves of blocks: the last one should not be half empty. */
        const int64_t resident =
            most(1, (int64_t)normfuse_cuda_blocks_per_processor(device, trial.kernel, trial.threads, trial.shared) *
                        device->processors);
        const int64_t waves = divide_up(trial.blocks, resident), time = waves * trial.geometry.part_rows;
        if (time < least_time) {
            least_time = time;
            fit = trial;
        }
        if (waves > 3 || cluster == 1 || normfuse_tune("PARTS", 0) != 0)
            break;
    }
    if (least_time < INT64_MAX) {
        *step = fit;
        return true;
    }
    return plan_rounds_of_runs(task, step, kept, threads);
}

static int64_t policy_slots(const struct task *task, bool sums)
{
    return task->policy->passing_slots[task->problem->columns][task->direction][sums];
}

/* Tiles that only sum, or that only write from statistics that are known. */
static bool plan_passing_runs(const struct task *task, struct step *step, bool sums)
{
    step->geometry = runs_geometry(task);
    struct normfuse_cuda_geometry *const g = &step->geometry;
    if (g->rows == 0)
        return false;
    if (!sums && plan_many_sets(task, step))
        return true;
    const enum normfuse_cuda_schedule small = task->ragged  ? NORMFUSE_SCHEDULE_unaligned
                                              : task->plain ? NORMFUSE_SCHEDULE_two_pass
                                                            : NORMFUSE_SCHEDULE_general;
    const bool stream = streams(task, small);
    /* Packs in shared memory are asked for with the others: more in flight for each wait. */
    const int64_t more = task->pack > 1 && !stream ? normfuse_tune("SLOTS", policy_slots(task, sums)) : 0;
    const int64_t slots = vectors_of(task, small) + more;
    const int64_t threads = least(normfuse_tune("PASSING", task->policy->passing_threads[stream && !sums]),
                                  whole_warps(divide_up(g->rows, slots)));
    const int64_t tile_rows = threads * slots;
    const int64_t tiles = divide_up(g->rows, tile_rows);
    /* Forward sums go on in registers from tile to tile. */
    int64_t passes = 1;
    if (stream) {
        const int64_t waves = normfuse_tune(sums ? "SUM_WAVES" : "WAVES", task->policy->passing_waves[0][sums]);
        const int64_t resident =
            (int64_t)normfuse_cuda_blocks_per_processor(task->device, kernel_of(task, small), (uint32_t)threads, 1024) *
            task->device->processors;
        passes = tiles * g->sets / (waves * most(1, resident));
        passes = most(1, least(least(passes, tiles), sums ? 128 / slots : normfuse_tune("PASSES", 2)));
    } else if (sums && task->direction == FORWARD) {
        passes = most(1, least(most(1, 128 / slots), tiles * g->sets / (8 * (int64_t)task->device->processors)));
    }
    /* Sums have no coefficients to keep, whatever the number of channels. */
    while (!settle_runs(task, step, small, stream && !sums ? tile_rows * passes : tile_rows, (uint32_t)threads)) {
        if (sums || passes == 1)
            return false;
        passes /= 2;
    }
    g->part_rows = (int32_t)least(tile_rows * passes, INT32_MAX / 4);
    g->segment_rows = (int32_t)(task->direction == FORWARD ? slots : 32 * slots);
    g->passes = (int32_t)passes;
    g->parts = (int32_t)divide_up(g->rows, g->part_rows);
    if (task->problem->sets == NORMFUSE_SETS_BATCH)
        g->sum_slots = g->parts;
    step->blocks = (int64_t)g->sets * g->parts;
    g->backwards = !sums;
    return true;
}

/* ---- columns ----------------------------------------------------------------------------------------------------- */

/* Packs of what is walked as a row, and how many of them a block can have: as few as hold whole groups, times any
 * number, or of rows abreast all. */
static int64_t packs_of_row(const struct task *task)
{
    return task->problem->c * task->abreast / task->pack;
}

static int64_t packs_of_unit(const struct task *task, int64_t group)
{
    return task->abreast > 1 ? packs_of_row(task) : common_multiple(group, task->pack) / task->pack;
}

/* `width` packs a block; `group` channels are joined in it. */
static struct normfuse_cuda_geometry columns_geometry(const struct task *task, int64_t width, int64_t group)
{
    const struct normfuse_problem *const p = task->problem;
    struct normfuse_cuda_geometry g = {.parts = 1, .passes = 1, .teams = 1, .sets_a_block = 1, .parts_a_sample = 1};
    g.width = (int32_t)width;
    g.blocks_wide = (int32_t)divide_up(packs_of_row(task), width);
    g.all_samples = takes_all_samples(p);
    g.abreast = task->abreast;
    g.row_channels = (int32_t)(p->c * task->abreast);
    g.row_values = (int32_t)(group * task->abreast);
    /* A sample begins up to all but one elements into its first pack. */
    g.rows =
        (int32_t)(task->uneven ? divide_up(p->s * p->c + task->pack - 1, p->c * task->abreast) : p->s / task->abreast);
    g.sets = (int32_t)(g.all_samples ? g.blocks_wide : p->n * g.blocks_wide);
    g.group = (int32_t)group;
    g.sums_by_channel = g.all_samples;
    return g;
}

/* `joins`: the kernel sums. */
static bool settle_columns(const struct task *task, struct step *step, enum normfuse_cuda_schedule kept,
                           int64_t part_rows, uint32_t threads, int32_t cluster, bool joins)
{
    struct normfuse_cuda_geometry *const g = &step->geometry;
    const struct normfuse_problem *const p = task->problem;
    const int registers = vectors_of(task, kept);
    const int64_t at_once = (int64_t)threads / g->width;
    step->kernel = kernel_of(task, kept);
    step->threads = threads;
    g->passes = 1;
    g->part_rows = (int32_t)part_rows;
    g->parts_a_sample = (int32_t)divide_up(g->rows, part_rows);
    g->parts = g->all_samples ? (int32_t)(p->n * g->parts_a_sample) : g->parts_a_sample;
    g->kept_shared = streams(task, kept) ? 0 : (int32_t)most(0, divide_up(part_rows, at_once) - registers);
    if (g->kept_shared > 0 && !task->wide)
        return false;
    const int64_t channels = (int64_t)g->width * task->pack;
    int64_t groups = channels / g->group;
    g->group_bits = g->channel_bits = g->piece_bits = 0;
    while (g->group_bits < 5 && groups / g->abreast << (g->group_bits + 1) <= threads)
        g->group_bits++;
    while (g->channel_bits < 5 && channels / g->abreast << (g->channel_bits + 1) <= threads)
        g->channel_bits++;
    while (!task->uneven && g->group % (2 << g->piece_bits) == 0 && 2 << g->piece_bits <= task->pack)
        g->piece_bits++;
    /* Once more, for rows that begin inside of packs. */
    if (task->uneven)
        groups += groups / g->abreast;
    g->by_pieces = divisor(g->group >> g->piece_bits);
    g->by_set_channels = divisor(p->sets == NORMFUSE_SETS_GROUP ? p->c / p->groups : 1);
    g->sum_slots = g->parts;
    step->blocks = (int64_t)g->sets * g->parts;
    /* Shared memory, as the kernels part it: packs; then words of the type computed in, and doubles. */
    const int64_t stride = channels + channels % 2, in_cluster = cluster > 1 ? groups * cluster : 0;
    int64_t words, doubles = 0;
    const bool rings = has_rings(task, kept);
    size_t packs = (size_t)task->tensors * 16 * (size_t)(rings ? registers : g->kept_shared) * threads;
    if (task->direction == BACKWARD) {
        words = 4 * groups + 4 * stride + 2 * at_once * channels + 2 * channels + 2 * groups + 2 * in_cluster;
    } else if (joins) {
        const bool modulated = p->scale.data != NULL || p->shift.data != NULL;
        const size_t pieces = (size_t)(4 * at_once * (task->pack >> g->piece_bits) * g->width) * task->value_bytes;
        /* Rings are done with when sums are joined. */
        packs = rings ? (packs > pieces ? packs : pieces) : packs + pieces;
        words = 4 * groups;
        words += (modulated ? 4 : 3) * stride + 2 * in_cluster;
        doubles = groups + groups % 2;
    } else {
        words = 3 * stride;
    }
    step->shared = packs + (size_t)words * task->value_bytes + (size_t)doubles * sizeof(double);
    return step->shared + 1024 <= task->device->shared_per_block;
}

/* The packs of a row that have channels of one group, at most. */
static int64_t most_packs_of_group(const struct task *task, int64_t groups, int64_t group)
{
    int64_t packs = 0;
    for (int64_t i = 0; i < groups; i++)
        packs = most(packs, ((i + 1) * group - 1) / task->pack - i * group / task->pack + 1);
    return packs;
}

/* The same for a compact kernel, with threads for as few rows each as a block has room for, or as `few` as can be: more
 * blocks then share a processor. False where it is not made for this. */
static bool settle_compact(const struct task *task, struct step *step, int64_t parts, bool few)
{
    enum { MOST_ENTRIES = 20 }; /* that a lane joins, by docs/numerics.md */
    struct normfuse_cuda_geometry *const g = &step->geometry;
    const struct normfuse_problem *const p = task->problem;
    const int64_t channels = (int64_t)g->width * task->pack, groups = channels / g->group;
    const int64_t part_rows = divide_up(g->rows, parts);
    if (!task->compact || groups > 32 || packs_of_row(task) % g->width != 0 || (parts - 1) * part_rows >= g->rows)
        return false;
    g->lane_bits = 5;
    while (groups << g->lane_bits > 32)
        g->lane_bits--;
    const int64_t packs = most_packs_of_group(task, groups, g->group);
    const bool gives = task->direction == BACKWARD && task->wants_gradients;
    const int64_t most_threads = normfuse_tune("THREADS", task->policy->column_threads) - (gives ? 32 : 0);
    const int64_t at_most = least(most_threads / g->width, (MOST_ENTRIES << g->lane_bits) / packs);
    if (at_most == 0)
        return false;
    const int64_t kept = vectors_of(task, NORMFUSE_SCHEDULE_cluster), slots = divide_up(part_rows, at_most);
    if (slots > kept || (few && slots == kept))
        return false;
    const int64_t at_once = divide_up(part_rows, few ? kept : slots);
    const uint32_t threads = whole_warps(g->width * at_once);
    const int32_t lane_bits = g->lane_bits;
    /* The blocks of all samples in one cluster, where that is small enough and nothing is asked for of each sample. */
    const bool modulates =
        p->scale.data != NULL || p->shift.data != NULL || p->dscale.data != NULL || p->dshift.data != NULL;
    const int64_t most_cluster = task->device->clusters ? MOST_CLUSTER : 1;
    const int64_t samples = gives && !modulates && p->n * parts <= most_cluster ? p->n : 0;
    const int64_t cluster = parts * most(1, samples);
    if (!settle_columns(task, step, NORMFUSE_SCHEDULE_cluster, part_rows, threads, (int32_t)cluster, true) ||
        g->kept_shared > 0)
        return false;
    g->lane_bits = lane_bits;
    step->at_once = (int32_t)at_once;
    step->of.cluster = (struct normfuse_cuda_cluster){(int32_t)samples, divisor(cluster), divisor(at_once)};
    const struct normfuse_cluster_layout layout =
        task->direction == FORWARD
            ? normfuse_lay_out_cluster_forward(g->width, (int32_t)groups, step->at_once, (int32_t)parts)
            : normfuse_lay_out_cluster_backward(g->width, (int32_t)channels, (int32_t)groups, step->at_once,
                                                (int32_t)parts, samples > 0 ? (int32_t)cluster : 0, gives);
    step->shared = (size_t)layout.bytes;
    /* The sums of channels are a warp's of their own. */
    step->without_packs = gives ? 32 : 0;
    step->threads += step->without_packs;
    if (cluster > 1) {
        step->cluster = (uint32_t)cluster;
        g->exchange = NORMFUSE_EXCHANGE_CLUSTER;
    }
    return step->shared + 1024 <= task->device->shared_per_block;
}

/* Many samples of few rows, from one to the next; fails where a part of a warp does not hold a group. */
static bool settle_short(const struct task *task, struct step *step)
{
    enum { THREADS = 256, MOST_SUMMED = 128 }; /* rows of a thread in its sums of channels, by docs/numerics.md */
    struct normfuse_cuda_geometry *const g = &step->geometry;
    const struct normfuse_problem *const p = task->problem;
    if (!task->few_rows || p->n > INT32_MAX / 8)
        return false;
    const int64_t d = p->c / p->groups, packs = most(1, d / task->pack);
    const enum normfuse_cuda_schedule kept =
        p->s == 1 && d >= task->pack ? NORMFUSE_SCHEDULE_lanes : NORMFUSE_SCHEDULE_lanes_rows;
    const int64_t most_rows = vectors_of(task, kept);
    const int64_t samples_at_a_time = vectors_of(task, NORMFUSE_SCHEDULE_lanes_rows) / most_rows;
    int lane_bits = 0, row_bits = 0;
    while (INT64_C(1) << lane_bits < packs)
        lane_bits++;
    while (most_rows << row_bits < p->s && row_bits <= 5)
        row_bits++;
    /* 256x1024x7x7 with 64 groups, 16 rows beside one another of 2 packs: 23.6 us, compact 20.5. */
    if (lane_bits + row_bits > (row_bits > 3 ? 4 : 5))
        return false;
    const int64_t lanes = INT64_C(1) << (lane_bits + row_bits), segments = THREADS / lanes;
    const int64_t units = packs_of_row(task) / packs, blocks_wide = divide_up(units, segments);
    const int64_t units_here = divide_up(units, blocks_wide), samples = segments / units_here;
    *g = columns_geometry(task, units_here * packs, d);
    step->kernel = kernel_of(task, kept);
    step->threads = THREADS;
    step->at_once = 1 << row_bits;
    step->of.lanes =
        (struct normfuse_cuda_lanes){(int32_t)samples, (int32_t)units, divisor(units_here), divisor(lanes)};
    const int64_t channels = units_here * packs * task->pack;
    step->shared = task->direction == BACKWARD && task->wants_gradients
                       ? (size_t)normfuse_lay_out_lanes((int32_t)samples, step->at_once, (int32_t)channels).bytes
                       : 0;
    g->blocks_wide = (int32_t)blocks_wide;
    g->lane_bits = lane_bits;
    g->sets_a_block = (int32_t)samples;
    const int64_t resident =
        (int64_t)normfuse_cuda_blocks_per_processor(task->device, step->kernel, step->threads, step->shared) *
        task->device->processors;
    const int64_t rounds = divide_up(p->n, samples * samples_at_a_time);
    const int64_t rows_of_thread = divide_up(p->s, INT64_C(1) << row_bits);
    int64_t parts = most(1, normfuse_tune("WAVES", 1) * resident / blocks_wide);
    if (step->shared > 0)
        parts = most(parts, divide_up(p->n * rows_of_thread, samples * MOST_SUMMED));
    parts = least(parts, rounds);
    /* Few samples: forward each has a block of its own before all processors have one, backward one cluster has all. */
    if (task->direction == FORWARD ? rounds * blocks_wide < task->device->processors : p->n <= MOST_CLUSTER)
        return false;
    g->parts = g->parts_a_sample = g->sum_slots = (int32_t)parts;
    g->sums_by_channel = 1;
    g->by_pieces = g->by_set_channels = divisor(d);
    step->blocks = blocks_wide * parts;
    return resident > 0;
}

/* Shared memory of a grid pipeline. */
static int64_t bytes_of_grid(const struct task *task, const struct normfuse_cuda_geometry *g, int64_t stages,
                             int64_t at_once, bool gives)
{
    const int32_t channels = g->width * task->pack, groups = (int32_t)task->problem->groups, rows = (int32_t)at_once;
    const bool backward = task->direction == BACKWARD;
    return task->batch ? normfuse_lay_out_batch((int32_t)stages, channels, rows, backward).bytes
           : backward
               ? normfuse_lay_out_grid_backward((int32_t)stages, g->width, channels, groups, rows, true, gives).bytes
               : normfuse_lay_out_grid_forward((int32_t)stages, g->width, groups, rows).bytes;
}

/* Group norm by the whole grid, a block a processor, `rounds` samples one after the other, or batch norm. */
static bool settle_grid(const struct task *task, struct step *step, int64_t rounds)
{
    /* Entries that a lane joins, by docs/numerics.md; values that a thread sums before it joins them to what it had;
     * what the kernels have in shared memory beside what is asked for. */
    enum { MOST_STAGES = 32, MOST_ENTRIES = 20, LANES = 8, MOST_SUMMED = 64, MOST_TILES = 200, STATIC_BYTES = 1024 };
    struct normfuse_cuda_geometry *const g = &step->geometry;
    const struct normfuse_problem *const p = task->problem;
    const bool gives = task->direction == BACKWARD && task->wants_gradients;
    const bool modulates =
        p->scale.data != NULL || p->shift.data != NULL || p->dscale.data != NULL || p->dshift.data != NULL;
    const int64_t teams = divide_up(p->n, rounds), groups = p->groups;
    const int64_t most_threads = normfuse_tune("GRID_THREADS", task->policy->grid_threads);
    if (!(task->compact || task->batch) || !task->has_tickets || !task->device->clusters || p->x.position != p->c ||
        teams >= MOST_TEAMS || task->device->processors / teams < 2 || (task->direction == BACKWARD && modulates) ||
        g->width > most_threads)
        return false;
    int64_t parts = task->device->processors / teams, part_rows = divide_up(g->rows, parts);
    const int64_t at_once = least(most_threads / g->width, part_rows);
    const uint32_t consumers = whole_warps(at_once * g->width);
    int64_t joined; /* of a group, by a lane */
    const int64_t channels = (int64_t)g->width * task->pack, row_bytes = g->width * 16;
    if (task->batch) {
        g->lane_bits = 0;
        while (g->lane_bits < 5 && channels << (g->lane_bits + 1) <= consumers)
            g->lane_bits++;
        joined = divide_up(at_once, INT64_C(1) << g->lane_bits);
    } else {
        joined = divide_up(most_packs_of_group(task, groups, g->group) * at_once, LANES);
    }
    if (joined > MOST_ENTRIES)
        return false;
    const int64_t beside_ring = bytes_of_grid(task, g, 0, at_once, gives);
    const int64_t room = (int64_t)task->device->shared_per_block - STATIC_BYTES - beside_ring;
    const int64_t slots =
        least(normfuse_tune("TILE", task->policy->grid_tile[task->direction]), divide_up(part_rows, at_once));
    const int64_t tile_rows = slots * at_once, stage_bytes = tile_rows * row_bytes * task->tensors;
    int64_t tiles = divide_up(part_rows, tile_rows);
    const int64_t stages = least(least(tiles, MOST_STAGES), room / stage_bytes);
    /* What a thread joins one after the other, in each tile and then of tiles, is bounded by docs/numerics.md. */
    if (stages < least(tiles, 2) || tiles > (task->direction == FORWARD ? 16 * (MOST_SUMMED / slots) : MOST_TILES))
        return false;
    struct normfuse_cuda_grid *const of = &step->of.grid;
    of->interleaved = stages < tiles && teams == 1;
    if (of->interleaved) {
        const int64_t all = divide_up(g->rows, tile_rows);
        tiles = divide_up(all, parts);
        part_rows = tiles * tile_rows;
        of->first_parts = (int32_t)(all - (tiles - 1) * parts);
        of->lacking_rows = (int32_t)(all * tile_rows - g->rows);
    } else {
        parts = divide_up(g->rows, part_rows);
        of->first_parts = (int32_t)parts;
        of->lacking_rows = (int32_t)(parts * part_rows - g->rows);
    }
    step->kernel =
        kernel_of(task, task->batch ? NORMFUSE_SCHEDULE_grid_pipeline_batch : NORMFUSE_SCHEDULE_grid_pipeline);
    step->threads = consumers + 32;
    step->without_packs = 32;
    g->part_rows = (int32_t)part_rows;
    g->parts = g->parts_a_sample = (int32_t)parts;
    g->teams = (int32_t)teams;
    step->at_once = (int32_t)at_once;
    of->teams = (int32_t)teams;
    of->small_part_rows = (int32_t)(part_rows - tile_rows);
    of->stages = (int32_t)stages;
    of->chunk_tiles = (int32_t)most(1, MOST_SUMMED / slots);
    /* What is read again last, since it is in L2 still; of much more than that some of what is protected is lost. */
    const int64_t turn_bytes = teams * parts * stage_bytes;
    of->soon = (tiles - stages) * turn_bytes <= task->policy->l2_again_bytes
                   ? (int32_t)((normfuse_tune("SOON", 32) << 20) / turn_bytes)
                   : 0;
    g->by_pieces = divisor(g->group);
    g->by_set_channels = divisor(task->batch ? 1 : p->c / p->groups);
    of->by_tile = divisor(tile_rows);
    of->by_turn = divisor(parts * tile_rows);
    step->shared = (size_t)bytes_of_grid(task, g, stages * stage_bytes, at_once, gives);
    step->blocks = teams * parts;
    g->exchange = NORMFUSE_EXCHANGE_GRID;
    step->cooperative = step->needs_tickets = true;
    /* Batch norm joins what the gradients need anyway. */
    g->sums_by_channel = gives || task->batch;
    g->sum_slots = task->batch ? 0 : (int32_t)step->blocks;
    g->contributors = gives && !task->batch ? (int32_t)step->blocks : 0;
    return (int64_t)normfuse_cuda_blocks_per_processor(task->device, step->kernel, step->threads, step->shared) *
               task->device->processors >=
           step->blocks;
}

/* The backward of group norm of all samples at once, a block a processor, whose threads keep all packs in registers. */
static bool settle_spread(const struct task *task, struct step *step)
{
    enum { MOST_ENTRIES = 20, LANES = 8 }; /* entries that a lane joins, by docs/numerics.md */
    struct normfuse_cuda_geometry *const g = &step->geometry;
    const struct normfuse_problem *const p = task->problem;
    const bool gives = task->wants_gradients;
    const bool modulates =
        p->scale.data != NULL || p->shift.data != NULL || p->dscale.data != NULL || p->dshift.data != NULL;
    const int64_t most_threads = task->policy->grid_threads;
    const int64_t channels = (int64_t)g->width * task->pack, groups = p->groups;
    if (task->direction == FORWARD || !task->compact || !task->has_tickets || !task->device->clusters || modulates ||
        p->activation == NORMFUSE_HARDSWISH || p->activation == NORMFUSE_RELU6 || p->mean.type > NORMFUSE_F32 ||
        p->rstd.type > NORMFUSE_F32 || p->n >= MOST_TEAMS || 2 * p->n > task->device->processors ||
        g->width > most_threads)
        return false;
    const int64_t part_rows = divide_up(g->rows, task->device->processors / p->n);
    const int64_t slots = divide_up(part_rows, least(most_threads / g->width, part_rows));
    const int64_t at_once = divide_up(part_rows, slots), parts = divide_up(g->rows, part_rows);
    if (parts < 2 || slots > vectors_of(task, NORMFUSE_SCHEDULE_grid_registers) ||
        divide_up(most_packs_of_group(task, groups, g->group) * at_once, LANES) > MOST_ENTRIES)
        return false;
    step->kernel = kernel_of(task, NORMFUSE_SCHEDULE_grid_registers);
    step->threads = whole_warps(at_once * g->width);
    step->shared = (size_t)normfuse_lay_out_grid_backward(0, g->width, (int32_t)channels, (int32_t)groups,
                                                          (int32_t)at_once, false, gives)
                       .bytes;
    g->part_rows = (int32_t)part_rows;
    g->parts = g->parts_a_sample = (int32_t)parts;
    g->teams = (int32_t)p->n;
    step->at_once = (int32_t)at_once;
    step->of.grid.teams = (int32_t)p->n;
    g->by_pieces = g->by_set_channels = divisor(g->group);
    step->blocks = p->n * parts;
    g->exchange = NORMFUSE_EXCHANGE_GRID;
    step->cooperative = step->needs_tickets = true;
    g->sums_by_channel = gives;
    g->sum_slots = (int32_t)step->blocks;
    g->contributors = gives ? (int32_t)step->blocks : 0;
    return (int64_t)normfuse_cuda_blocks_per_processor(task->device, step->kernel, step->threads, step->shared) *
               task->device->processors >=
           step->blocks;
}

/* Microseconds that it takes. */
static double cost_of_spread(const struct task *task)
{
    return task->bytes * task->policy->spread_stretch / task->policy->bytes_a_microsecond +
           task->policy->spread_meeting;
}

/* The same. */
static double cost_of_grid(const struct task *task, const struct step *step)
{
    const struct normfuse_cuda_policy *const policy = task->policy;
    const struct normfuse_cuda_geometry *const g = &step->geometry;
    const double rounds = (double)divide_up(task->problem->n, g->teams);
    const double tiles = ceil((double)g->part_rows / step->of.grid.by_tile.divisor);
    const double again = fmax(0.0, tiles - step->of.grid.stages) / tiles;
    /* Of what moves at least, the part that is read. */
    const double reads = task->direction == FORWARD ? 1.0 / 2.0 : 2.0 / 3.0;
    const double busy =
        (double)step->blocks / task->device->processors * (double)task->problem->n / (rounds * g->teams);
    const double channels = (double)g->width * task->pack;
    return task->bytes * (policy->grid_stretch[task->direction] + reads * policy->grid_again[task->direction] * again) /
               (policy->bytes_a_microsecond * busy) +
           policy->grid_meeting[task->direction] + channels * policy->grid_channel[task->direction] +
           (task->batch ? policy->grid_batch[task->direction] + channels * policy->grid_batch_channel[task->direction]
                        : 0.0) +
           policy->grid_round[task->direction] * (rounds - 1.0) / g->teams;
}

/* The fewest rounds in which the ring holds the samples' parts; if none does, a sample at a time. */
static bool plan_grid(const struct task *task, struct step *best)
{
    const struct normfuse_problem *const p = task->problem;
    const int64_t only_rounds = normfuse_tune("ROUNDS", 0);
    struct step step;
    for (int64_t rounds = only_rounds ? only_rounds : 1; rounds <= p->n; rounds++) {
        if (rounds > 1 && !only_rounds && divide_up(p->n, rounds) == divide_up(p->n, rounds - 1))
            continue;
        step =
            (struct step){.phases = best->phases,
                          .source = best->source,
                          .geometry = columns_geometry(task, packs_of_row(task), task->batch ? 1 : p->c / p->groups)};
        if (settle_grid(task, &step, rounds) &&
            ((int64_t)step.of.grid.stages * step.of.grid.by_tile.divisor >= step.geometry.part_rows ||
             step.geometry.teams == 1 || only_rounds)) {
            *best = step;
            return true;
        }
    }
    return false;
}

/* Of a step, those that run at the same time. */
static int64_t resident_blocks(const struct task *task, const struct step *step)
{
    if (step->cluster > 1) {
        const struct normfuse_cuda_launch launch = {.kernel = step->kernel,
                                                    .grid = step->cluster,
                                                    .threads = step->threads,
                                                    .cluster = step->cluster,
                                                    .shared = step->shared};
        return (int64_t)normfuse_cuda_resident_clusters(task->device, &launch) * step->cluster;
    }
    return (int64_t)normfuse_cuda_blocks_per_processor(task->device, step->kernel, step->threads, step->shared) *
           task->device->processors;
}

/* Microseconds that a way of keeping sets would take: the memory's time, longer where blocks are few or rows narrow,
 * and what the blocks wait for one another. */
static double cost_of_columns(const struct task *task, const struct step *step)
{
    const struct normfuse_cuda_policy *const policy = task->policy;
    const struct normfuse_cuda_geometry *const g = &step->geometry;
    const int32_t a_processor =
        normfuse_cuda_blocks_per_processor(task->device, step->kernel, step->threads, step->shared);
    const int64_t slots = resident_blocks(task, step);
    if (slots == 0)
        return INFINITY;
    const double width_bytes = (double)g->width * (double)task->pack_bytes;
    double stretch = 1.0;
    for (int i = 0; i < NORMFUSE_CUDA_WIDTHS; i++)
        if (width_bytes < policy->widths[i].bytes && g->blocks_wide > 1) {
            stretch = policy->widths[i].stretch;
            break;
        }
    const double waves = ceil((double)step->blocks / (double)slots);
    const double busy = (double)step->blocks / (waves * (double)slots);
    /* Half of the processors draw most of the bandwidth. */
    const double reach = fmin(1.0, fmin((double)step->blocks, (double)slots) * 1.3 / task->device->processors);
    const double filled = waves < 4.0 ? fmax(busy, a_processor > 1 ? 0.8 : busy) : 1.0;
    double time = task->bytes / (policy->bytes_a_microsecond * reach * filled) * stretch;
    if (schedule_of(step) != NORMFUSE_SCHEDULE_cluster && waves < 4.0)
        time *= policy->columns_stretch[task->direction];
    if (a_processor == 1 && waves > 1.0)
        time *= policy->alone;
    /* A cluster starts where all of its blocks find room at once, so the others wait. */
    if (step->cluster > 1 && waves > 1.0)
        time *= 1.0 + policy->cluster_gap[task->direction] * step->cluster;
    /* A kernel for the parameters' gradients, where neither a cluster nor a last block finds them. */
    const int64_t parts_of_channel = (g->sums_by_channel ? 1 : task->problem->n) * g->sum_slots;
    if (task->wants_gradients && !finds_gradients(step) &&
        ((schedule_of(step) == NORMFUSE_SCHEDULE_cluster) || parts_of_channel > policy->most_parts_of_last[1]))
        time += policy->gradients_wait;
    time += policy->columns_start[task->direction];
    if (schedule_of(step) == NORMFUSE_SCHEDULE_cluster)
        return time + (step->cluster > 1
                           ? policy->compact_wait[0] + policy->compact_wait[1] * step->cluster * step->cluster +
                                 policy->compact_wave * (waves - 1.0)
                           : 0.0);
    time += policy->not_compact[task->direction];
    if (g->exchange == NORMFUSE_EXCHANGE_CLUSTER)
        time += (policy->cluster_wait + policy->cluster_block * step->cluster) * (waves < 2.0 ? 1.0 : 0.18 * waves);
    if (g->exchange == NORMFUSE_EXCHANGE_GRID) {
        const double rounds = (double)divide_up(g->sets, g->teams);
        const double groups = (double)g->width * task->pack / g->row_values;
        const double pair = 2.0 * (double)task->value_bytes;
        if (rounds > 1.0)
            time *= policy->grid_rounds; /* all processors read, then all write */
        time += policy->grid_wait[task->direction] * rounds +
                (double)step->blocks * g->parts * groups * pair * rounds / policy->l2_bytes_a_microsecond;
    }
    return time;
}

/* Packs of a row that a block of passing tiles has at most: rows of 1 KB are as fast as longer ones, and each channel
 * that is a set of its own takes shared memory. */
static int64_t widest_of(int64_t group)
{
    return group == 1 ? 64 : 256;
}

static bool plan_kept_columns(const struct task *task, struct step *best)
{
    const struct normfuse_problem *const p = task->problem;
    const struct normfuse_cuda_policy *const policy = task->policy;
    const int64_t packs = packs_of_row(task), d = p->sets == NORMFUSE_SETS_GROUP ? p->c / p->groups : 1;
    const int64_t unit = packs_of_unit(task, d);
    const double wide = d == 1 && packs > widest_of(d) ? policy->twice_wide : 1.0;
    double lowest = task->bytes * policy->twice[task->direction] * wide / policy->bytes_a_microsecond +
                    policy->twice_wait[task->direction];
    bool found = false;
    struct step of_short = {.phases = best->phases, .source = best->source};
    if (normfuse_tune("SHORT", 1) && settle_short(task, &of_short)) {
        *best = of_short;
        return true;
    }
    const int64_t only_width = normfuse_tune("WIDTH", 0), only_parts = normfuse_tune("PARTS", 0);
    const int64_t only_exchange = normfuse_tune("EXCHANGE", -1);
    if (only_width || only_parts || only_exchange >= 0)
        lowest = INFINITY;

    /* Where the grid can work from rings it does not keep packs in registers: 2x320x128x128 f16 20.0 us for 24.3. */
    struct step from_ring = {.phases = best->phases, .source = best->source};
    const int64_t grid_wanted = normfuse_tune("GRID", 1);
    const bool has_ring = grid_wanted && plan_grid(task, &from_ring);
    for (int64_t units = 1; (units - 1) * unit < packs; units *= 2) {
        const int64_t width = least(units * unit, packs);
        if (width > 512 || (only_width && width != only_width))
            continue;
        for (int32_t way = 0; way < 16; way++) {
            /* One block, clusters of 2 to 16, the grid with all it holds; and the same with twice as many threads. */
            static const int32_t clusters[] = {1, 2, 4, 8, 16, 0, 0, 0, 1, 2, 4, 8, 16, 0, 0, 0};
            const bool grid = way % 8 >= 5;
            const int64_t most_threads = normfuse_tune("THREADS", policy->column_threads << way / 8);
            const int64_t at_most = least(most(1, most_threads / width), most_at_once(task, d));
            if ((grid && (!task->has_tickets || (has_ring && !task->batch))) ||
                (!grid && clusters[way] > 1 && !task->device->clusters))
                continue;
            if (only_exchange >= 0 && only_exchange != (grid ? 2 : clusters[way] > 1 ? 1 : 0))
                continue;
            struct step step = {
                .phases = best->phases, .source = best->source, .geometry = columns_geometry(task, width, d)};
            struct normfuse_cuda_geometry *const g = &step.geometry;
            if (g->all_samples && p->n > 1)
                continue;
            int64_t parts = grid ? 0 : clusters[way];
            if (grid) {
                /* Teams of as many blocks as share a processor's shared memory once, twice or four times. */
                const int64_t resident = (int64_t)task->device->processors * (INT64_C(1) << (way % 8 - 5));
                const int64_t teams = least(g->sets, resident);
                parts = resident / teams;
                int64_t fewer = teams;
                /* Fewer teams of more blocks until a part fits. */
                while (fewer > 1 && divide_up(g->rows, parts) * width * 16 * task->tensors >
                                        (int64_t)policy->resident_bytes >> (way % 8 - 5)) {
                    fewer = (fewer + 1) / 2;
                    parts = resident / fewer;
                }
                g->teams = (int32_t)fewer;
            }
            if (only_parts && parts != only_parts)
                continue;
            if (parts > g->rows || parts < 1)
                continue;
            /* No more threads than it takes for each to have as many rows as it has anyway: fewer sums to join. */
            const int64_t part_rows = divide_up(g->rows, parts), slots = divide_up(part_rows, at_most);
            const int64_t at_once = normfuse_tune("BALANCE", 1) ? divide_up(part_rows, slots) : at_most;
            const uint32_t threads = whole_warps(width * at_once);
            const enum normfuse_cuda_schedule kept = task->plain ? NORMFUSE_SCHEDULE_split : NORMFUSE_SCHEDULE_general;
            const struct step blank = step;
            /* Few threads first where blocks wait for one another: 2x1280x16x16 backward 6.2 us, as many as can be 6.7.
             */
            const bool compact = !grid && settle_compact(task, &step, parts, (way >= 8) != (parts > 1));
            if (!compact && normfuse_tune("COMPACT", 1) == 2)
                continue;
            if (!compact) {
                step = blank;
                if (!settle_columns(task, &step, kept, part_rows, threads, grid ? 1 : (int32_t)parts, true))
                    continue;
            }
            if (!grid && g->parts != parts) {
                g->parts = g->parts_a_sample = g->sum_slots = (int32_t)parts;
                step.blocks = (int64_t)g->sets * parts;
            }
            if (grid) {
                if (g->parts < 2 || g->teams > MOST_TEAMS)
                    continue;
                g->exchange = NORMFUSE_EXCHANGE_GRID;
                step.cooperative = step.needs_tickets = true;
                step.blocks = (int64_t)g->teams * g->parts;
                if ((int64_t)normfuse_cuda_blocks_per_processor(task->device, step.kernel, threads, step.shared) *
                        task->device->processors <
                    step.blocks)
                    continue;
            } else if (parts > 1 && !compact) {
                g->exchange = NORMFUSE_EXCHANGE_CLUSTER;
                step.cluster = (uint32_t)parts;
            }
            const double time = cost_of_columns(task, &step) * (task->narrowed ? policy->narrow[task->direction] : 1.0);
            if (time < lowest) {
                lowest = time;
                *best = step;
                found = true;
            }
        }
    }
    /* What clusters do at once, with the gradients, waits less than the whole grid: 1x256x64x64 f16 backward 7.9 us for
     * 9.1, 2x2560x8x8 5.2 for 8.0; in two waves 2x640x32x32 12.1 for 9.4. */
    const bool at_once = task->direction == BACKWARD && found && (schedule_of(best) == NORMFUSE_SCHEDULE_cluster) &&
                         best->blocks <= resident_blocks(task, best) &&
                         (!task->wants_gradients || finds_gradients(best));
    const double of_ring = has_ring && !at_once ? cost_of_grid(task, &from_ring) : INFINITY;
    if (has_ring && (grid_wanted == 2 || of_ring < lowest)) {
        lowest = of_ring;
        *best = from_ring;
        found = true;
    }
    struct step spread = {.phases = best->phases, .source = best->source, .geometry = columns_geometry(task, packs, d)};
    const int64_t spread_wanted = normfuse_tune("SPREAD", 1);
    if (spread_wanted && settle_spread(task, &spread) &&
        (spread_wanted == 2 || (!at_once && cost_of_spread(task) < lowest))) {
        *best = spread;
        found = true;
    }
    return found;
}

/* Blocks of `width` packs, whose sums are joined over `group` channels. */
static bool plan_passing_width(const struct task *task, struct step *step, bool sums, int64_t width, int64_t group,
                               int64_t more)
{
    const struct normfuse_problem *const p = task->problem;
    const struct normfuse_cuda_policy *const policy = task->policy;
    const bool known = task->known || task->added;
    const enum normfuse_cuda_schedule small = task->known    ? NORMFUSE_SCHEDULE_elementwise
                                              : task->added  ? NORMFUSE_SCHEDULE_elementwise_residual
                                              : task->uneven ? NORMFUSE_SCHEDULE_unaligned
                                              : task->plain  ? NORMFUSE_SCHEDULE_two_pass
                                                             : NORMFUSE_SCHEDULE_general;
    const int64_t slots = vectors_of(task, small) + (task->plain || task->added ? 0 : more);
    step->geometry = columns_geometry(task, width, group);
    struct normfuse_cuda_geometry *const g = &step->geometry;
    const int64_t at_most = sums || task->direction == BACKWARD ? most_at_once(task, group) : INT64_MAX;
    /* Where rows are parted among blocks those are larger, if their rings find room. */
    const bool parted = g->blocks_wide > 1 && task->plain;
    int64_t most_threads = normfuse_tune("PASSING", known         ? policy->known_threads[task->direction]
                                                    : task->plain ? policy->passing_column_threads[parted]
                                                                  : 256);
    uint32_t threads;
    for (;; most_threads = policy->passing_column_threads[0]) {
        threads = whole_warps(width * least(most(1, most_threads / width), at_most));
        if (settle_columns(task, step, small, threads / width * slots, threads, 1, sums))
            break;
        if (most_threads <= policy->passing_column_threads[0])
            return false;
    }
    const int64_t at_once = threads / width, tile_rows = at_once * slots, tiles = divide_up(g->rows, tile_rows);
    const int64_t resident =
        most(1, (int64_t)normfuse_cuda_blocks_per_processor(task->device, step->kernel, threads, step->shared) *
                    task->device->processors);
    /* More than one tile to a block spreads what it does once; several waves of blocks even out when they end. Of sums,
     * where all blocks are there at once, each takes the rows that come after those of the one before it. */
    const int64_t waves =
        normfuse_tune(sums ? "SUM_WAVES" : "WAVES", known && !sums    ? policy->known_waves[task->direction]
                                                    : parted && !sums ? policy->parted_waves
                                                                      : policy->passing_waves[task->direction][sums]);
    int64_t passes = most(1, tiles * g->sets / (waves * resident));
    /* A thread's sums grow no longer than docs/numerics.md says. */
    passes = least(passes, sums          ? most(1, 128 / slots)
                           : task->added ? normfuse_tune("PASSES", policy->added_passes[task->direction])
                           : task->known ? normfuse_tune("PASSES", policy->known_passes[task->direction])
                                         : normfuse_tune("PASSES", 4));
    g->part_rows = (int32_t)least(tile_rows * passes, INT32_MAX / 4);
    if (sums && streams(task, small) && normfuse_tune("INTERLEAVE", 1)) {
        const int64_t parts = most(divide_up(g->rows, 128 * at_once),
                                   least(tiles, most(1, waves * resident / (g->sets * (g->all_samples ? p->n : 1)))));
        g->part_rows = (int32_t)(divide_up(divide_up(g->rows, parts), at_once) * at_once);
        passes = divide_up(g->part_rows, tile_rows);
        g->interleaved = 1;
    }
    g->passes = (int32_t)passes;
    g->parts_a_sample = (int32_t)divide_up(g->rows, g->part_rows);
    g->parts = g->all_samples ? (int32_t)(p->n * g->parts_a_sample) : g->parts_a_sample;
    g->sum_slots = g->parts;
    step->blocks = (int64_t)g->sets * g->parts;
    g->backwards = !sums;
    return true;
}

static bool plan_passing_columns(const struct task *task, struct step *step, bool sums)
{
    const struct normfuse_problem *const p = task->problem;
    /* Nothing is joined over a group where results or sums of single channels are all there is. */
    const bool of_groups = p->sets == NORMFUSE_SETS_GROUP && !task->added;
    const int64_t packs = packs_of_row(task), d = of_groups ? p->c / p->groups : 1;
    const int64_t unit = packs_of_unit(task, d);
    const int64_t more = task->wide ? normfuse_tune("SLOTS", policy_slots(task, sums)) : 0;
    const bool joins = p->sets != NORMFUSE_SETS_NONE && !task->added && (sums || task->direction == BACKWARD);
    const int64_t widest = widest_of(d);
    int64_t width = least(packs, widest);
    if (packs > widest && unit <= 512)
        width = most(1, widest / unit) * unit;
    if (unit <= 512 || packs <= widest) {
        /* Of rows that begin inside of packs a lane would have too much of a large group: a later kernel joins it. */
        const int64_t group = !joins ? width * task->pack : most_at_once(task, d) > 0 ? d : 1;
        if (plan_passing_width(task, step, sums, width, group, more) ||
            plan_passing_width(task, step, sums, width, group, 0))
            return true;
    }
    if (task->abreast > 1) {
        const struct task narrow = narrowed(task);
        return plan_passing_columns(&narrow, step, sums);
    }
    /* A group too wide for a block's shared memory: its channels are joined by a later kernel. */
    for (width = least(packs, 64); width >= 1; width /= 2)
        if (plan_passing_width(task, step, sums, width, joins ? 1 : width * task->pack, 0))
            return true;
    return false;
}

/* ---- the steps of a call ----------------------------------------------------------------------------------------- */

/* One of finish.cu, over `items` sets or channels that have at most `parts` parts each to join. */
static struct step *add_small(struct plan *plan, const struct normfuse_cuda_geometry *geometry,
                              enum normfuse_cuda_kernel kernel, int64_t items, int64_t parts)
{
    /* A warp each, several to a block; a block each where a warp would go round often. */
    const bool many = parts > 256;
    struct step *const step = &plan->steps[plan->count++];
    *step = (struct step){.kernel = kernel, .threads = many ? 256 : 128, .blocks = many ? items : divide_up(items, 4)};
    step->geometry = *geometry;
    step->geometry.lanes = many ? 256 : 32;
    step->geometry.totals_blocks = 0;
    return step;
}

/* The totals of `sets` sets, the parameters' gradients, or both. */
static void add_gradients(struct plan *plan, const struct normfuse_problem *p, int64_t sets, bool wants_gradients)
{
    const struct normfuse_cuda_geometry *const g = &plan->sums_geometry;
    const int64_t slots = most(1, g->sum_slots), samples = g->sums_by_channel ? 1 : p->n;
    const int64_t of_set = p->sets == NORMFUSE_SETS_GROUP ? p->c / p->groups * slots : slots;
    const int64_t parts = most(sets > 0 ? of_set : 0, wants_gradients ? samples * slots : 0);
    struct step *const step = add_small(plan, g, NORMFUSE_CUDA_gradients, sets, parts);
    const int64_t a_block = (int64_t)step->threads / step->geometry.lanes;
    step->geometry.totals_blocks = (int32_t)step->blocks;
    if (wants_gradients)
        step->blocks += divide_up(p->c, a_block);
}

/* Whether the last block that has parts of a channel finds the parameters' gradients: few parts, since one thread adds
 * them, and a word of sync memory to count blocks in. Spares a kernel, 2 us on the device and 3 on the host. */
static bool lets_last_block_finish(const struct task *task, struct step *step)
{
    struct normfuse_cuda_geometry *const g = &step->geometry;
    const struct normfuse_problem *const p = task->problem;
    const bool by_batch = p->sets == NORMFUSE_SETS_BATCH;
    const int64_t samples = g->sums_by_channel ? 1 : p->n;
    const int64_t most_parts = task->policy->most_parts_of_last[p->columns];
    const int64_t contributors = samples * g->parts, counters = by_batch ? p->c : p->groups;
    /* Where blocks go round, each set would be counted once more, and its writes waited for. */
    const bool rounds = g->exchange == NORMFUSE_EXCHANGE_GRID && g->teams < g->sets;
    if (rounds || g->sets_a_block > 1 || (schedule_of(step) == NORMFUSE_SCHEDULE_cluster) ||
        spans_samples(step, p->columns) || samples * g->sum_slots > normfuse_tune("LAST", most_parts) ||
        (contributors > 1 && (!task->has_tickets || counters > NORMFUSE_CUDA_COUNTERS)))
        return false;
    g->contributors = (int32_t)contributors;
    return true;
}

static bool plan_tile(const struct task *task, struct plan *plan, int32_t phases, int32_t source, bool keeps)
{
    struct step *const step = &plan->steps[plan->count];
    *step = (struct step){0};
    const int32_t first = NORMFUSE_PHASE_STATISTICS | NORMFUSE_PHASE_BACKWARD_SUMS;
    const bool sums = (phases & first) != 0;
    bool found;
    struct task general = *task;
    if (keeps && task->uneven) {
        general = narrowed(task);
        general.narrowed = true;
        task = &general;
    } else if (keeps && task->problem->columns && task->direction == BACKWARD && is_rare(task->problem->activation)) {
        general.plain = general.compact = general.few_rows = general.batch = false;
        task = &general;
    }
    if (task->problem->columns)
        found = keeps ? plan_kept_columns(task, step) : plan_passing_columns(task, step, sums && !(phases & ~first));
    else
        found = keeps ? plan_kept_runs(task, step) : plan_passing_runs(task, step, sums && !(phases & ~first));
    if (!found)
        return false;
    step->phases = phases;
    step->source = source;
    set_divisors(task->problem, step->threads - step->without_packs, &step->geometry);
    plan->count++;
    return true;
}

static size_t rounded(size_t bytes)
{
    return (bytes + 63) / 64 * 64;
}

/* Whether columns_elementwise.cu takes what is added before the activation, and is the faster way: nothing else is
 * added, the tensors are alike. In a gradient dz must go to memory without loss, as what is added gets it. */
static bool takes_addition(const struct normfuse_problem *p, const struct task *task)
{
    const int32_t *const from = task->policy->added_bytes[task->direction];
    const double least_bytes = (double)normfuse_tune("ADDED", from[p->sets == NORMFUSE_SETS_BATCH]);
    if (!p->columns || p->type == NORMFUSE_F64 || task->abreast != 1 || p->post_add.data == NULL ||
        p->pre_add.data != NULL || p->du.data != NULL || is_rare(p->activation) ||
        !are_alike(p, takes_all_samples(p)) || !is_packed(&p->weight, task->pack) || !is_packed(&p->bias, task->pack) ||
        !is_packed(&p->scale, task->pack) || !is_packed(&p->shift, task->pack) ||
        (p->evaluate && (!is_packed(&p->running_mean, task->pack) || !is_packed(&p->running_var, task->pack))))
        return false;
    if (p->sets == NORMFUSE_SETS_NONE)
        return true;
    if ((double)p->n * (double)p->c * (double)p->s * (double)normfuse_type_bytes(p->type) < least_bytes)
        return false;
    const int32_t both = NORMFUSE_PHASE_BACKWARD_SUMS | NORMFUSE_PHASE_BACKWARD_APPLY;
    const bool exact = p->type == NORMFUSE_F32 || p->activation == NORMFUSE_IDENTITY ||
                       p->activation == NORMFUSE_RELU || p->activation == NORMFUSE_RELU6;
    return task->direction == FORWARD
               ? p->y.data != NULL
               : (p->phases & both) == both && p->dx.data != NULL && p->dpost_add.data != NULL && exact;
}

/* x alone, or x and dz, are left to walk: with nothing added. */
static struct task without_addition(const struct task *task, const struct normfuse_problem *rest)
{
    struct task plain = *task;
    plain.problem = rest;
    plain.plain = true;
    plain.added = false;
    return plain;
}

static void go_on_from_dz(struct normfuse_problem *p)
{
    p->dy = p->dpost_add;
    p->post_add.data = p->dpost_add.data = NULL;
    p->activation = NORMFUSE_IDENTITY;
}

static bool make_plan(const struct normfuse_problem *p, const struct normfuse_cuda_device *device, bool has_tickets,
                      struct plan *plan)
{
    *plan = (struct plan){.count = 0};
    struct task task = {
        .problem = p, .device = device, .policy = normfuse_cuda_policy(device->capability), .has_tickets = has_tickets};
    const int32_t backward = NORMFUSE_PHASE_BACKWARD_SUMS | NORMFUSE_PHASE_BACKWARD_APPLY;
    task.direction = (p->phases & backward) != 0 ? BACKWARD : FORWARD;
    task.tensors = task.direction == FORWARD ? 1 : 2;
    task.value_bytes = p->type == NORMFUSE_F64 ? 8 : 4;
    task.pack = (int)(16 / normfuse_type_bytes(p->type));
    /* Doubles have kernels with packs of one element only under columns. */
    task.plain = p->type != NORMFUSE_F64 && p->pre_add.data == NULL && p->post_add.data == NULL && p->du.data == NULL &&
                 p->dpost_add.data == NULL && are_alike(p, takes_all_samples(p));
    task.abreast = p->type == NORMFUSE_F64 && p->columns ? 0 : rows_abreast(p, task.pack, false);
    const int64_t d = p->sets == NORMFUSE_SETS_GROUP ? p->c / p->groups : 1;
    if (task.abreast > 1 && (normfuse_tune("ABREAST", 1) == 0 || most_at_once(&task, d) == 0))
        task.abreast = 0;
    if (task.abreast == 0 && task.plain && normfuse_tune("UNEVEN", 1)) {
        task.abreast = rows_abreast(p, task.pack, true);
        task.uneven = task.abreast > 0;
    }
    task.wide = task.abreast > 0;
    /* Under runs the plain kernels of whole packs lack derivatives that those of ragged ones have. */
    const bool lacks_derivative = !p->columns && task.direction == BACKWARD && is_rare(p->activation);
    task.ragged = (!task.wide || (lacks_derivative && p->sets != NORMFUSE_SETS_NONE)) && task.plain &&
                  allows_ragged_packs(p, task.pack) && normfuse_tune("RAGGED", 1) != 0;
    task.wide = task.wide && !task.ragged;
    task.plain = task.plain && (task.ragged || (task.wide && !lacks_derivative));
    if (!task.wide)
        task.abreast = 1;
    if (!task.wide && !task.ragged)
        task.pack = 1;
    task.compact =
        p->columns && task.wide && task.plain && task.abreast == 1 && p->sets == NORMFUSE_SETS_GROUP &&
        !p->has_running_momentum && has_at_most_two_groups_a_pack(d, task.pack) && is_packed(&p->weight, task.pack) &&
        is_packed(&p->bias, task.pack) && is_packed(&p->scale, task.pack) && is_packed(&p->shift, task.pack) &&
        is_contiguous(&p->mean, p->groups) && is_contiguous(&p->rstd, p->groups) && normfuse_tune("COMPACT", 1);
    task.few_rows = p->columns && task.wide && task.plain && task.abreast == 1 && p->sets == NORMFUSE_SETS_GROUP &&
                    !p->has_running_momentum && d > 0 && (d % task.pack == 0 || task.pack % d == 0) &&
                    is_packed(&p->weight, task.pack) && is_packed(&p->bias, task.pack) && p->scale.data == NULL &&
                    p->shift.data == NULL && p->dscale.data == NULL && p->dshift.data == NULL &&
                    is_contiguous(&p->mean, p->groups) && is_contiguous(&p->rstd, p->groups) &&
                    (task.direction == FORWARD || ((p->mean.type == NORMFUSE_F32 || p->mean.type == NORMFUSE_F64) &&
                                                   p->rstd.type == NORMFUSE_F32)) &&
                    !is_rare(p->activation);
    task.batch =
        p->columns && task.wide && task.plain && task.abreast == 1 && p->sets == NORMFUSE_SETS_BATCH && p->n == 1 &&
        is_packed(&p->weight, task.pack) && is_packed(&p->bias, task.pack) && p->scale.data == NULL &&
        p->shift.data == NULL &&
        (task.direction == FORWARD || (is_packed_or_double(&p->mean, task.pack) && is_packed(&p->rstd, task.pack)));
    task.known = p->columns && task.wide && task.plain && task.abreast == 1 && p->sets == NORMFUSE_SETS_NONE &&
                 is_packed(&p->weight, task.pack) && is_packed(&p->bias, task.pack) &&
                 is_packed(&p->scale, task.pack) && is_packed(&p->shift, task.pack) &&
                 (!p->evaluate || (is_packed(&p->running_mean, task.pack) && is_packed(&p->running_var, task.pack))) &&
                 !is_rare(p->activation) && normfuse_tune("KNOWN", 1);
    task.pack_bytes = (size_t)task.pack * normfuse_type_bytes(p->type);
    task.added = task.wide && !task.plain && takes_addition(p, &task);
    const bool empty = p->n == 0 || p->s == 0;
    if (!is_countable(p->n) || !is_countable(p->c) || !is_countable(p->s / task.pack * (p->columns ? task.pack : 1)) ||
        !is_countable(p->n * (p->sets == NORMFUSE_SETS_GROUP ? p->groups : 1)))
        return false;
    task.bytes = (double)p->n * (double)p->c * (double)p->s * (double)normfuse_type_bytes(p->type) *
                 (task.direction == FORWARD ? 2.0 : 3.0);
    const int64_t sets = p->sets == NORMFUSE_SETS_GROUP ? p->n * p->groups : p->c;
    const struct normfuse_cuda_geometry nothing = {.group = p->sets == NORMFUSE_SETS_GROUP ? (int32_t)(p->c / p->groups)
                                                                                           : 1};
    const int32_t given = p->evaluate ? NORMFUSE_SOURCE_RUNNING : NORMFUSE_SOURCE_NONE;

    if (task.direction == FORWARD) {
        const bool statistics = (p->phases & NORMFUSE_PHASE_STATISTICS) != 0;
        const bool applies = (p->phases & NORMFUSE_PHASE_APPLY) != 0;
        const bool instance = p->has_running_momentum && p->sets == NORMFUSE_SETS_GROUP;
        if (p->sets == NORMFUSE_SETS_NONE)
            return empty || p->y.data == NULL || plan_tile(&task, plan, NORMFUSE_PHASE_APPLY, given, false);
        bool kept = false;
        if (statistics && applies && p->y.data != NULL && !empty)
            kept = !task.added && normfuse_tune("KEEP", 1) &&
                   plan_tile(&task, plan, NORMFUSE_PHASE_STATISTICS | NORMFUSE_PHASE_APPLY, 0, true);
        if (!kept) {
            const struct normfuse_cuda_geometry *summed = &nothing;
            const struct task of_x = task.added ? without_addition(&task, p) : task;
            if (statistics && !empty) {
                if (!plan_tile(&of_x, plan, NORMFUSE_PHASE_STATISTICS, 0, false))
                    return false;
                summed = &plan->steps[plan->count - 1].geometry;
                const int64_t split = nothing.group / summed->group;
                plan->partials = (size_t)(sets * split * summed->parts) * 24;
            }
            if (sets > 0)
                add_small(plan, summed, NORMFUSE_CUDA_statistics, sets,
                          statistics ? nothing.group / summed->group * summed->parts : 1);
            if (applies && p->y.data != NULL && !empty) {
                if (!plan_tile(&task, plan, NORMFUSE_PHASE_APPLY, NORMFUSE_SOURCE_SCRATCH, false))
                    return false;
                plan->statistics = (size_t)sets * sizeof(struct normfuse_cuda_statistics);
            }
        } else if (plan->steps[0].needs_tickets) {
            const struct step *const step = &plan->steps[0];
            const int64_t groups = p->columns ? (int64_t)step->geometry.width * task.pack / step->geometry.group : 1;
            plan->partials = (size_t)(2 * step->geometry.teams * groups * step->geometry.parts) * 24;
        }
        if (instance && sets > 0) {
            add_small(plan, &nothing, NORMFUSE_CUDA_running, p->c, p->n);
            plan->statistics = (size_t)sets * sizeof(struct normfuse_cuda_statistics);
        }
        return true;
    }

    const bool sums = (p->phases & NORMFUSE_PHASE_BACKWARD_SUMS) != 0;
    const bool wants_dx =
        (p->phases & NORMFUSE_PHASE_BACKWARD_APPLY) != 0 && (p->dx.data != NULL || p->dpost_add.data != NULL);
    const bool gives_sums = !(p->phases & NORMFUSE_PHASE_BACKWARD_APPLY);
    bool wants_gradients = gives_sums || p->dweight.data != NULL || p->dbias.data != NULL || p->dscale.data != NULL ||
                           p->dshift.data != NULL;
    task.wants_gradients = wants_gradients;
    const bool centred = p->sets != NORMFUSE_SETS_NONE;
    const int32_t source = centred ? NORMFUSE_SOURCE_SAVED : given;
    const int32_t both = NORMFUSE_PHASE_BACKWARD_SUMS | NORMFUSE_PHASE_BACKWARD_APPLY;
    plan->sums_geometry = nothing;
    if (!empty) {
        bool kept = false;
        if (wants_dx && !centred && sums) {
            /* dx needs no sums: one reading in any case. */
            kept = plan_tile(&task, plan, wants_gradients ? both : NORMFUSE_PHASE_BACKWARD_APPLY, source, false);
            if (!kept)
                return false;
            plan->sums_geometry = plan->steps[0].geometry;
        } else if (wants_dx && centred && sums) {
            kept = !task.added && normfuse_tune("KEEP", 1) && plan_tile(&task, plan, both, source, true);
            if (kept) {
                struct step *const step = &plan->steps[0];
                plan->sums_geometry = step->geometry;
                const int64_t groups =
                    p->columns ? (int64_t)step->geometry.width * task.pack / step->geometry.group : 1;
                if (step->needs_tickets)
                    plan->partials = (size_t)(2 * step->geometry.teams * groups * step->geometry.parts) * 16;
                if (wants_gradients &&
                    (finds_gradients(step) || holds_grid(step) || lets_last_block_finish(&task, step)))
                    wants_gradients = false;
            }
        }
        if (!kept) {
            if (sums && (wants_dx || wants_gradients || p->dpost_add.data != NULL)) {
                if (!plan_tile(&task, plan, NORMFUSE_PHASE_BACKWARD_SUMS, source, false))
                    return false;
                plan->sums_geometry = plan->steps[0].geometry;
            }
            if (wants_dx) {
                if (centred) {
                    add_gradients(plan, p, sets, wants_gradients);
                    wants_gradients = false;
                    plan->totals = (size_t)sets * 16;
                }
                struct normfuse_problem rest = *p;
                struct task of_dz = task;
                if (task.added && centred) {
                    go_on_from_dz(&rest);
                    of_dz = without_addition(&task, &rest);
                }
                if (!plan_tile(&of_dz, plan, NORMFUSE_PHASE_BACKWARD_APPLY, source, false))
                    return false;
                plan->steps[plan->count - 1].of_dpost_add = task.added && centred;
            }
        }
        if (sums && (wants_gradients || plan->totals || plan->steps[0].geometry.contributors > 0))
            plan->sums =
                (size_t)((plan->sums_geometry.sums_by_channel ? 1 : p->n) * p->c * plan->sums_geometry.sum_slots) * 16;
    } else if (sums && wants_gradients) {
        plan->sums = 64; /* none are read: every channel has no parts */
        plan->sums_geometry.sum_slots = 0;
        plan->sums_geometry.sums_by_channel = p->sets == NORMFUSE_SETS_BATCH;
    }
    if (wants_gradients)
        add_gradients(plan, p, 0, true);
    return true;
}

/* A call is planned twice, for its scratch and to run, and those of a network come again and again: planning takes some
 * 20 us, which a network of more layers than are remembered pays at every layer. So all threads together remember the
 * last plans, and each its own last one, which it need not lock. Of a pointer what the plan depends on is compared. */
enum { PLANS_KEPT = 1024, PLACES_OF_A_PLAN = 8 };

struct known_plan {
    struct normfuse_problem key;
    uint64_t device; /* its serial number; 0: nothing is known here */
    bool has_tickets, found;
    struct plan plan;
};

static struct {
    pthread_mutex_t mutex;
    struct known_plan *plans[PLANS_KEPT]; /* each in one of a few places after that of its hash */
    unsigned next;                        /* of these, the one that is given up where all are taken */
} remembered = {.mutex = PTHREAD_MUTEX_INITIALIZER};

static struct normfuse_problem key_of(const struct normfuse_problem *problem)
{
    static const char places[17];
    struct normfuse_problem key;
    memset(&key, 0, sizeof key); /* padding is compared, too */
    key.name = problem->name;
    key.sets = problem->sets;
    key.phases = problem->phases;
    key.type = problem->type;
    key.columns = problem->columns;
    key.has_running_momentum = problem->has_running_momentum;
    key.activation = problem->activation;
    key.n = problem->n;
    key.c = problem->c;
    key.s = problem->s;
    key.groups = problem->groups;
    key.evaluate = problem->evaluate;
    key.device = problem->device;
    const struct normfuse_view *const from[] = {&problem->x,  &problem->pre_add, &problem->post_add,
                                                &problem->y,  &problem->u,       &problem->dy,
                                                &problem->du, &problem->dx,      &problem->dpost_add};
    struct normfuse_view *const to[] = {&key.x,  &key.pre_add, &key.post_add, &key.y,        &key.u,
                                        &key.dy, &key.du,      &key.dx,       &key.dpost_add};
    for (size_t i = 0; i < sizeof to / sizeof *to; i++)
        if (from[i]->data != NULL)
            *to[i] = (struct normfuse_view){(char *)(uintptr_t)(places + 1 + (uintptr_t)from[i]->data % 16),
                                            from[i]->batch, from[i]->channel, from[i]->position};
    const struct normfuse_parameter *const given[] = {&problem->weight, &problem->bias,         &problem->scale,
                                                      &problem->shift,  &problem->dweight,      &problem->dbias,
                                                      &problem->dscale, &problem->dshift,       &problem->mean,
                                                      &problem->rstd,   &problem->running_mean, &problem->running_var};
    struct normfuse_parameter *const kept[] = {&key.weight,  &key.bias,  &key.scale,        &key.shift,
                                               &key.dweight, &key.dbias, &key.dscale,       &key.dshift,
                                               &key.mean,    &key.rstd,  &key.running_mean, &key.running_var};
    for (size_t i = 0; i < sizeof kept / sizeof *kept; i++) {
        if (given[i]->data != NULL) {
            kept[i]->data = (char *)(uintptr_t)(places + 1 + (uintptr_t)given[i]->data % 16);
            kept[i]->channel = given[i]->channel;
            kept[i]->type = given[i]->type;
        }
        kept[i]->batch = given[i]->batch;
    }
    return key;
}

static uint64_t hash_of(const struct normfuse_problem *key)
{
    const char *const bytes = (const char *)key;
    uint64_t hash = 0, word;
    for (size_t i = 0; i + sizeof word <= sizeof *key; i += sizeof word) {
        memcpy(&word, bytes + i, sizeof word);
        hash = (hash ^ word) * UINT64_C(0x9e3779b97f4a7c15);
        hash ^= hash >> 29;
    }
    return hash;
}

static bool is_of(const struct known_plan *known, const struct normfuse_problem *key, uint64_t device, bool has_tickets)
{
    return known->device == device && known->has_tickets == has_tickets && memcmp(&known->key, key, sizeof *key) == 0;
}

static bool recall(struct known_plan *known, uint64_t hash, const struct normfuse_problem *key, uint64_t device,
                   bool has_tickets)
{
    bool found = false;
    pthread_mutex_lock(&remembered.mutex);
    for (unsigned i = 0; i < PLACES_OF_A_PLAN && !found; i++) {
        const struct known_plan *const here = remembered.plans[(hash + i) % PLANS_KEPT];
        found = here != NULL && is_of(here, key, device, has_tickets);
        if (found)
            *known = *here;
    }
    pthread_mutex_unlock(&remembered.mutex);
    return found;
}

/* Nothing is remembered where there is no memory. */
static void remember(const struct known_plan *known, uint64_t hash)
{
    struct known_plan *mine = malloc(sizeof *mine);
    if (mine == NULL)
        return;
    *mine = *known;
    pthread_mutex_lock(&remembered.mutex);
    struct known_plan **place = NULL;
    for (unsigned i = 0; i < PLACES_OF_A_PLAN && place == NULL; i++)
        if (remembered.plans[(hash + i) % PLANS_KEPT] == NULL)
            place = &remembered.plans[(hash + i) % PLANS_KEPT];
    if (place == NULL)
        place = &remembered.plans[(hash + remembered.next++ % PLACES_OF_A_PLAN) % PLANS_KEPT];
    struct known_plan *const before = *place;
    *place = mine;
    pthread_mutex_unlock(&remembered.mutex);
    free(before);
}

void normfuse_cuda_plans_after_fork(void)
{
    pthread_mutex_init(&remembered.mutex, NULL);
}

/* NULL: none fits. *is_certain: not for want of an answer from the driver, which may give it to the next call. */
static const struct plan *plan_of(const struct normfuse_problem *problem, const struct normfuse_cuda_device *device,
                                  bool has_tickets, bool *is_certain)
{
    static _Thread_local struct known_plan last;
    *is_certain = true;
    const struct normfuse_problem key = key_of(problem);
    if (!is_of(&last, &key, device->serial, has_tickets)) {
        const uint64_t hash = hash_of(&key);
        if (!recall(&last, hash, &key, device->serial, has_tickets)) {
            last.key = key;
            last.device = device->serial;
            last.has_tickets = has_tickets;
            (void)normfuse_cuda_lacks_answers();
            last.found = make_plan(problem, device, has_tickets, &last.plan);
            *is_certain = !normfuse_cuda_lacks_answers();
            if (*is_certain)
                remember(&last, hash);
            else
                last.device = 0;
        }
    }
    return last.found ? &last.plan : NULL;
}

static size_t scratch_of(const struct plan *plan)
{
    return rounded(plan->partials) + rounded(plan->statistics) + rounded(plan->sums) + rounded(plan->totals);
}

/* ---- launching --------------------------------------------------------------------------------------------------- */

/* What ran last on this thread: put into words only when somebody asks, which takes longer than to launch. */
struct launched {
    enum normfuse_cuda_kernel kernel;
    uint32_t threads;
    int64_t blocks;
    uint32_t cluster;
    int32_t phases, exchange, parts, passes, kept_shared;
};
static _Thread_local struct launched last_launched[MOST_STEPS];
static _Thread_local int last_count;

static void note(const struct step *step)
{
    const struct normfuse_cuda_geometry *const g = &step->geometry;
    last_launched[last_count++] =
        (struct launched){step->kernel, step->threads, step->blocks, step->cluster, step->phases,
                          g->exchange,  g->parts,      g->passes,    g->kept_shared};
}

const char *normfuse_last_kernels(void)
{
    static _Thread_local char text[512];
    text[0] = '\0';
    for (int i = 0; i < last_count; i++) {
        const struct launched *const ran = &last_launched[i];
        const size_t at = strlen(text), room = sizeof text - at;
        const char *const joint = at == 0 ? "" : " + ";
        if (room < 96)
            break;
        if (ran->phases == 0)
            snprintf(text + at, room, "%s%s", joint,
                     normfuse_cuda_kernel_table[ran->kernel].name + strlen("normfuse_"));
        else
            snprintf(text + at, room, "%s%s %" PRId64 "x%" PRIu32 "%s%" PRId32 " kept=%d+%" PRId32, joint,
                     normfuse_cuda_kernel_table[ran->kernel].name + strlen("normfuse_"), ran->blocks, ran->threads,
                     ran->exchange == NORMFUSE_EXCHANGE_CLUSTER ? " cluster="
                     : ran->exchange == NORMFUSE_EXCHANGE_GRID  ? " grid="
                                                                : " parts=",
                     ran->exchange == NORMFUSE_EXCHANGE_CLUSTER ? (int32_t)ran->cluster : ran->parts, ran->passes,
                     ran->kept_shared);
    }
    return text;
}

/* Asked once: the environment is searched word by word. */
static bool verbose(void)
{
    static _Atomic int known; /* 0: not yet */
    int said = atomic_load_explicit(&known, memory_order_relaxed);
    if (said == 0) {
        const char *const value = getenv("NORMFUSE_VERBOSE");
        said = value != NULL && strstr(value, "dispatch") != NULL ? 1 : -1;
        atomic_store_explicit(&known, said, memory_order_relaxed);
    }
    return said > 0;
}

static void describe_columns(const struct normfuse_problem *p, const struct step *step,
                             struct normfuse_cuda_columns *columns)
{
    const struct normfuse_cuda_geometry *const g = &step->geometry;
    const int64_t bytes = (int64_t)normfuse_type_bytes(p->type);
    const struct normfuse_parameter *const parameters[] = {&p->weight, &p->bias, &p->scale,
                                                           &p->shift,  &p->mean, &p->rstd};
    *columns = (struct normfuse_cuda_columns){
        .x = p->x.data,
        .dy = p->dy.data,
        .out = p->dy.data != NULL ? p->dx.data : p->y.data,
        .batch_bytes = p->x.batch * bytes,
        .row_bytes = (uint32_t)(p->x.position * bytes),
        .rows = g->rows,
        .part_rows = g->part_rows,
        .at_once = step->at_once,
        .width = g->width,
        .group = g->group,
        .groups = (int32_t)((int64_t)g->width * 16 / bytes / g->group),
        .lane_bits = g->lane_bits,
        .parts = g->parts,
        .by_blocks_wide = g->by_blocks_wide,
        .by_width = g->by_width,
        .by_group = g->by_group,
        .by_parts = g->by_parts,
        .weight = p->weight.data,
        .bias = p->bias.data,
        .scale = p->scale.data,
        .shift = p->shift.data,
        .scale_batch = p->scale.data != NULL ? p->scale.batch * (int64_t)normfuse_type_bytes(p->scale.type) : 0,
        .shift_batch = p->shift.data != NULL ? p->shift.batch * (int64_t)normfuse_type_bytes(p->shift.type) : 0,
        .mean = p->mean.data,
        .rstd = p->rstd.data,
        .mean_batch = p->mean.batch,
        .rstd_batch = p->rstd.batch,
        .activation = p->activation,
        .act_param = (float)p->act_param,
        .eps = (float)p->eps,
        .share = 1.0f / (float)p->set_values,
        .n = (int32_t)p->n,
        .of = step->of,
    };
    for (int i = 0; i < 6; i++)
        columns->types |= parameters[i]->data != NULL ? (uint32_t)parameters[i]->type << 2 * i : 0;
}

normfuse_status normfuse_cuda_run(const struct normfuse_problem *problem, const normfuse_exec *exec)
{
    const struct normfuse_cuda_device *device;
    normfuse_status status = normfuse_cuda_device(problem->name, problem->device.device_id, &device);
    if (status != NORMFUSE_OK)
        return status;
    const bool has_tickets = exec != NULL && exec->sync != NULL;
    struct normfuse_problem united = *problem;
    unite_samples(&united);
    bool is_certain;
    const struct plan *const plan = plan_of(&united, device, has_tickets, &is_certain);
    if (plan == NULL && !is_certain)
        return normfuse_refuse(NORMFUSE_DEVICE_ERROR,
                               "%s: device %" PRId32 ", %s, does not say how many blocks it holds", problem->name,
                               device->ordinal, device->name);
    if (plan == NULL)
        return normfuse_refuse(NORMFUSE_UNSUPPORTED, "%s: no geometry of any kernel fits these sizes on %s",
                               problem->name, device->name);

    /* It may be another plan than the one that was asked about its scratch: see plan_of. */
    if (scratch_of(plan) > (exec != NULL && exec->scratch != NULL ? exec->scratch_bytes : 0))
        return normfuse_refuse(NORMFUSE_SCRATCH, "%s: exec.scratch is smaller than the %zu bytes that this call needs",
                               problem->name, scratch_of(plan));

    struct normfuse_cuda_arguments arguments;
    char *scratch = exec != NULL ? exec->scratch : NULL;
    arguments.problem = united;
    arguments.partials = plan->partials ? (double *)(void *)scratch : NULL;
    scratch += rounded(plan->partials);
    arguments.statistics = plan->statistics ? (struct normfuse_cuda_statistics *)(void *)scratch : NULL;
    scratch += rounded(plan->statistics);
    arguments.sums = plan->sums ? (double *)(void *)scratch : NULL;
    scratch += rounded(plan->sums);
    arguments.totals = plan->totals ? (double *)(void *)scratch : NULL;
    arguments.tickets = has_tickets ? exec->sync : NULL;

    last_count = 0;
    int32_t abreast = 1;
    for (int i = 0; i < plan->count; i++) {
        const struct step *const step = &plan->steps[i];
        note(step);
        if (step->blocks == 0)
            continue;
        if (step->blocks > INT32_MAX)
            return normfuse_refuse(NORMFUSE_UNSUPPORTED, "%s: %" PRId64 " blocks are more than a grid has",
                                   problem->name, step->blocks);
        if (step->source == NORMFUSE_SOURCE_SCRATCH && united.u.data != NULL &&
            (problem->phases & NORMFUSE_PHASE_STATISTICS) != 0) {
            /* The sum was written, perhaps over what it is the sum of. */
            arguments.problem.x = arguments.problem.u;
            arguments.problem.pre_add.data = NULL;
        }
        if (step->of_dpost_add)
            go_on_from_dz(&arguments.problem);
        if (step->geometry.abreast > 0 && step->geometry.abreast != abreast) {
            walk_abreast(&arguments.problem, abreast, step->geometry.abreast);
            abreast = step->geometry.abreast;
        }
        arguments.geometry = step->geometry;
        if ((schedule_of(step) == NORMFUSE_SCHEDULE_cluster) || holds_grid(step) || spans_samples(step, united.columns))
            describe_columns(&arguments.problem, step, &arguments.columns);
        arguments.phases = step->phases;
        arguments.source = step->source;
        const struct normfuse_cuda_launch launch = {
            .kernel = step->kernel,
            .grid = (uint32_t)step->blocks,
            .threads = step->threads,
            .cluster = step->cluster,
            .shared = step->shared,
            .cooperative = step->cooperative,
            .dependent = i > 0 && device->capability >= 90,
            .arguments = &arguments,
        };
        status = normfuse_cuda_launch(problem->name, device, exec != NULL ? exec->stream : NULL, &launch);
        if (status != NORMFUSE_OK)
            return status;
    }
    if (verbose())
        fprintf(stderr, "normfuse: dispatch: %s: %s\n", problem->name, normfuse_last_kernels());
    return NORMFUSE_OK;
}

size_t normfuse_cuda_scratch_bytes(const struct normfuse_problem *problem, const normfuse_exec *exec)
{
    const struct normfuse_cuda_device *device;
    if (normfuse_cuda_device(problem->name, problem->device.device_id, &device) != NORMFUSE_OK)
        return 0;
    struct normfuse_problem united = *problem;
    unite_samples(&united);
    size_t needed = 0;
    bool is_certain;
    const struct plan *plan = plan_of(&united, device, true, &is_certain);
    if (plan != NULL)
        needed = scratch_of(plan);
    if (exec == NULL || exec->sync == NULL) {
        plan = plan_of(&united, device, false, &is_certain);
        if (plan != NULL && scratch_of(plan) > needed)
            needed = scratch_of(plan);
    }
    return needed;
}

normfuse_status normfuse_cuda_merge(const struct normfuse_flat *in, const struct normfuse_flat *out, int32_t width,
                                    int32_t ordinal, const normfuse_exec *exec)
{
    const char *const call = width == 3 ? "stats_merge" : "sums_merge";
    const struct normfuse_cuda_device *device;
    const normfuse_status status = normfuse_cuda_device(call, ordinal, &device);
    if (status != NORMFUSE_OK || out->elements == 0)
        return status;
    const struct normfuse_cuda_merge_arguments arguments = {(const double *)(const void *)in->data,
                                                            (double *)(void *)out->data, in->elements / out->elements,
                                                            out->elements, width};
    const struct normfuse_cuda_launch launch = {.kernel = NORMFUSE_CUDA_merge,
                                                .grid = (uint32_t)divide_up(out->elements / width, 128),
                                                .threads = 128,
                                                .arguments = &arguments};
    return normfuse_cuda_launch(call, device, exec != NULL ? exec->stream : NULL, &launch);
}
