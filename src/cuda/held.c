/* SPDX-License-Identifier: MIT
 *
 * held.c - which norms the body `held` takes, with which geometry, in how many microseconds: device/held.cuh. */
#include "tiling.h"
#include <stdio.h>
#include <stdlib.h>

enum { MAX_PARTS = 16, MAX_KEPT = 48, MAX_ROWS_SUMMED = 128, RESERVE = 1024 };

/* A candidate. */
struct geometry {
    struct tiling t;
    bool by_rows, in_grid;
    int64_t resident; /* blocks of a multiprocessor */
    int64_t slab_sets, at_once, kept;
    int64_t ring_at, sums_at, shared;
    int ahead;
};

/* NULL: it may be held; else why not. */
static const char *describe(const struct shape *shape, struct tiling *t)
{
    const struct normfuse_problem *const p = shape->problem;
    const int64_t bytes = (int64_t)normfuse_type_bytes(p->type), d = group_of(p);
    *t = (struct tiling){0};
    if (normfuse_cuda_has_columns(p)) {
        normfuse_cuda_tile_columns(p, true, t);
        if (p->sets == NORMFUSE_SETS_BATCH && !t->joins_samples)
            return "samples are apart";
        if (t->folded > 1 && p->c * t->folded > 256 * t->vector)
            return "a block has not all of the rows that are walked as one";
    } else {
        normfuse_cuda_tile_rows(p, t);
        const bool is_group = p->sets == NORMFUSE_SETS_GROUP;
        t->joins_samples = !is_group;
        t->rows = is_group ? d : p->n;
        t->row_stride = is_group ? p->x.channel : p->x.batch;
        t->slab_stride = p->x.channel * d;
        t->sample_stride = is_group ? p->x.batch : 0;
        t->slabs = is_group ? p->n * p->groups : p->c;
    }
    return t->strided || t->vector * bytes < 8 ? "vectors are of single elements" : NULL;
}

static bool keeps_dz(const struct normfuse_problem *p)
{
    return p->activation != NORMFUSE_IDENTITY && is_dz_exact(p);
}

/* That pass beside what is kept, of the walk that sums and of the one that writes; device/held.cuh. */
static int64_t passing_of(const struct shape *shape, bool writes)
{
    const struct normfuse_problem *const p = shape->problem;
    const bool backward = shape->direction == BACKWARD;
    const bool behind = backward ? reads_post(shape) && (!writes || !keeps_dz(p)) : p->post_add.data != NULL && writes;
    return (p->pre_add.data != NULL && !writes) + behind + (reads_du(shape) && writes);
}

/* Registers of a thread, about: what NVRTC 13.5 gives the bodies on sm_90a. */
static int64_t registers_of(const struct shape *shape, const struct geometry *g)
{
    static const int64_t of[2][2] = {{60, 92}, {80, 128}};
    const int64_t registers = of[shape->direction][g->t.by_columns];
    return shape->value_bytes == 8 ? 2 * registers : registers;
}

/* Returns why a multiprocessor has no room for it. */
static const char *place_memory(const struct shape *shape, struct geometry *g)
{
    enum { RESERVED_OF_BLOCK = 1 << 10 }; /* of a multiprocessor, whose rest one block may have */
    const struct tiling *const t = &g->t;
    const bool backward = shape->direction == BACKWARD;
    const int64_t value = (int64_t)shape->value_bytes;
    const int64_t slot = t->vector * (int64_t)normfuse_type_bytes(shape->problem->type) * t->threads;
    const int64_t passing = maximum(passing_of(shape, false), passing_of(shape, true));
    g->ahead = (int)maximum(2, 8 / (shape->tensors + passing_of(shape, false)));
    g->ring_at = g->kept * shape->tensors * slot;
    g->sums_at = g->ring_at + g->ahead * passing * slot;
    const int64_t sent = value * (backward ? 2 : 4) * g->slab_sets;
    int64_t sums = sent * (1 + (t->parts > 1 && !g->in_grid ? 2 * t->parts : 0)) + 4 * value * g->slab_sets;
    if (t->by_columns) {
        const int64_t columns = t->across * t->vector, numbers = backward && shape->problem->dslope.data != NULL ? 3 : 2;
        sums += value * (numbers * down_of(t) + 2) * columns + 24 * columns + 32;
    } else if (g->by_rows) {
        sums += t->part_rows * value * (6 + 3 * maximum(1, t->across / 32));
    }
    g->shared = g->sums_at + sums;
    if (g->shared + RESERVE > (int64_t)shape->device->shared_per_block)
        return "a block holds less";
    const int64_t by_memory = ((int64_t)shape->device->shared_per_block + RESERVED_OF_BLOCK) / (g->shared + RESERVED_OF_BLOCK + RESERVE);
    const int64_t by_registers = 65536 / (registers_of(shape, g) * t->threads);
    g->resident = minimum(by_memory, by_registers); /* of which there are more than 60 a thread, and so few threads */
    return g->resident < 1 ? "a block has more registers than a multiprocessor" : NULL;
}

/* Rows of a slab for threads and blocks. Returns why they cannot have it. */
static const char *share_rows(const struct shape *shape, struct geometry *g)
{
    struct tiling *const t = &g->t;
    const int64_t vectors = row_vectors(t);
    g->by_rows = t->rows > 1 && shape->problem->sets == NORMFUSE_SETS_GROUP;
    t->lanes = t->threads;
    t->blocks_wide = 1;
    g->slab_sets = 1;
    t->next_rows = t->next_vectors = 0;
    t->part_rows = t->rows;
    t->part_vectors = vectors;
    if (t->parts > 1 && (t->rows % t->parts == 0 || t->rows >= 4 * t->parts)) {
        t->next_rows = t->part_rows = divide_up(t->rows, t->parts);
        if (t->next_rows * (t->parts - 1) >= t->rows)
            return "parts would be empty";
    } else if (t->parts > 1) {
        t->next_vectors = t->part_vectors = divide_up(vectors, t->parts);
        if (t->next_vectors * (t->parts - 1) >= t->columns / t->vector)
            return "parts would be empty";
    }
    /* Of all widths that of the fewest steps, and of these the widest. */
    g->kept = INT64_MAX;
    for (int64_t across = 1; across <= t->threads && across < 2 * t->part_vectors; across *= 2) {
        const int64_t steps = divide_up(t->part_vectors, across);
        const int64_t kept = steps * divide_up(t->part_rows, t->threads / across);
        if (kept <= g->kept) {
            g->kept = kept;
            t->across = across;
            t->steps = steps;
        }
    }
    t->row_step = down_of(t);
    return g->kept > MAX_KEPT ? "a thread would hold too much" : NULL;
}

/* `width` vectors of a row. */
static const char *share_columns(const struct shape *shape, struct geometry *g, int64_t width)
{
    struct tiling *const t = &g->t;
    const struct normfuse_problem *const p = shape->problem;
    const int64_t d = group_of(p);
    t->across = width;
    t->lanes = t->threads = whole_warps(width * (t->threads / width));
    t->blocks_wide = divide_up(t->columns / t->vector, width);
    t->slabs = t->samples * t->blocks_wide;
    g->slab_sets = t->folded > 1 ? p->c / d : divide_up(width * t->vector, d);
    t->next_rows = t->part_rows = divide_up(t->rows, t->parts);
    t->row_step = down_of(t);
    g->kept = divide_up(t->part_rows, t->row_step);
    return t->next_rows * (t->parts - 1) >= t->rows ? "parts would be empty"
           : g->kept > MAX_KEPT                      ? "a thread would hold too much"
                                                     : NULL;
}

/* Blocks that run at the same time; those of a cluster are of one group of multiprocessors, of which there are some of 16
 * or so. */
static int64_t resident_of(const struct shape *shape, const struct geometry *g)
{
    enum { OF_A_GROUP = 16 };
    const int64_t multiprocessors = shape->device->multiprocessors, parts = g->t.parts;
    if (g->in_grid || parts <= 2)
        return g->resident * multiprocessors;
    return multiprocessors / OF_A_GROUP * (OF_A_GROUP * g->resident / parts) * parts;
}

static int64_t turns_of(const struct geometry *g)
{
    return divide_up(g->t.slabs, g->at_once);
}

/* Microseconds: turns, in each of which all blocks read their slabs while they write those before. */
static double cost_of(const struct shape *shape, const struct geometry *g)
{
    static const struct {
        double start, turn, vector, doubling, columns, cluster, part, grid, grid_part; /* latency */
        double hidden, ipc, stretch;
        double instructions[2][2], costly; /* of a vector, and of a value; of a rare activation's value */
    } k = {.start = 2.0, .turn = 1.2, .vector = 0.05, .doubling = 0.08, .columns = 0.6, .cluster = 0.4, .part = 0.08,
           .grid = 1.8, .grid_part = 0.01, .hidden = 0.5, .ipc = 2.2, .stretch = 1.08,
           .instructions = {{90.0, 11.0}, {110.0, 24.0}}, .costly = 12.0};
    const struct normfuse_problem *const p = shape->problem;
    const int d = shape->direction;
    const double multiprocessors = shape->device->multiprocessors, turns = (double)turns_of(g);
    const double blocks = (double)(g->at_once * g->t.parts), filled = (double)g->t.slabs / ((double)g->at_once * turns);
    const double tensors = (double)(shape->tensors + passing_of(shape, false) + passing_of(shape, true) +
                                    results_of(shape));
    const double type_bytes = (double)normfuse_type_bytes(p->type), elements = (double)g->t.vector;
    /* What is adjacent of a row is less than a line, or shares its lines with what other blocks have. */
    const double adjacent = g->t.by_columns && g->t.blocks_wide > 1 ? (double)g->t.across * elements * type_bytes : 1e9;
    const double lines = adjacent >= 256.0 ? 1.0 : adjacent >= 128.0 ? 1.04 : adjacent >= 64.0 ? 1.25 : adjacent >= 32.0 ? 1.7 : 2.6;
    const double reach = fmin(1.0, blocks * 1.3 / multiprocessors);
    const double memory = k.stretch * lines * shape->tensor_bytes * tensors / (shape->policy->bytes_a_microsecond * reach);
    const bool costly = p->activation == NORMFUSE_SILU || is_rare(p->activation);
    const double of_vector = k.instructions[d][0] + elements * (k.instructions[d][1] + k.costly * costly);
    const double wide = (double)(g->t.across * down_of(&g->t)) / (double)g->t.threads; /* threads that have something */
    const double vectors = (double)(g->t.slabs * g->t.parts) * (double)(g->kept * g->t.threads) / wide;
    const double warps = fmin((double)g->resident * blocks / (multiprocessors * (double)g->resident), (double)g->resident) *
                         (double)g->t.threads / 32.0;
    const double ipc = fmin(k.ipc, 0.09 * warps);
    const double arithmetic = vectors / 32.0 * of_vector / (fmin(blocks, multiprocessors) * ipc * 1750.0);
    double wait = k.turn + k.vector * (double)g->kept + k.doubling * log2((double)g->t.threads / 32.0);
    if (g->t.by_columns)
        wait += k.columns;
    if (g->in_grid)
        wait += k.grid + k.grid_part * (double)g->t.parts;
    else if (g->t.parts > 1)
        wait += k.cluster + k.part * (double)g->t.parts;
    const double later = turns > 1.0 && g->resident > 1 ? k.hidden * wait / (double)g->resident : wait;
    return k.start + wait + (turns - 1.0) * later + fmax(memory, arithmetic) / fmin(1.0, filled + 1e-9) + 0.25 * fmin(memory, arithmetic);
}

static void fill(const struct shape *shape, const struct geometry *g, struct step *step)
{
    const struct normfuse_problem *const p = shape->problem;
    const struct tiling *const t = &g->t;
    const bool backward = shape->direction == BACKWARD, is_group = p->sets == NORMFUSE_SETS_GROUP;
    const bool wants = backward && (shape->wants_gradients || p->dslope.data != NULL);
    const bool is_direct = wants && !is_group && p->dslope.data == NULL && !is_modulated(p);
    const bool updates = p->has_running_momentum && !is_group;
    const int64_t d = group_of(p);
    struct normfuse_cuda_signature *const of = &step->signature;
    const bool has_own_channels = g->by_rows && t->next_rows > 0;
    *step = (struct step){.launch = {.threads = (uint32_t)t->threads,
                                     .grid = g->at_once * t->parts,
                                     .shared = (size_t)g->shared,
                                     .cooperative = g->in_grid,
                                     .cluster = g->in_grid || t->parts == 1 ? 0 : (uint32_t)t->parts},
                          .parts = (int32_t)t->parts,
                          .finds_gradients = is_direct,
                          .sums = {.by_channel = !is_group,
                                   .slots = is_direct || has_own_channels ? 1 : (int32_t)t->parts}};
    *of = normfuse_cuda_signature_of(NORMFUSE_BODY_held, backward, p);
    of->reduces = of->applies = 1;
    of->statistics = NORMFUSE_STATISTICS_GROUP;
    of->parameters = t->by_columns ? NORMFUSE_PARAMETERS_OF_COLUMN
                     : g->by_rows  ? NORMFUSE_PARAMETERS_OF_ROW
                                   : NORMFUSE_PARAMETERS_OF_GROUP;
    of->statistics_of_groups = t->by_columns && d > 1;
    of->exchanges = g->in_grid       ? NORMFUSE_EXCHANGE_IN_GRID
                    : t->parts == 1 ? NORMFUSE_EXCHANGE_IN_BLOCK
                                    : NORMFUSE_EXCHANGE_IN_CLUSTER;
    of->ahead = g->ahead;
    of->resident = (int32_t)g->resident;
    of->gradients = is_direct ? NORMFUSE_GRADIENTS_DIRECT : wants ? NORMFUSE_GRADIENTS_OF_SAMPLES : NORMFUSE_GRADIENTS_NONE;
    of->updates_running = updates;
    of->keeps_statistics = p->has_running_momentum && is_group;
    if (!updates)
        of->running_mean = of->running_var = 0;
    if (!is_direct)
        of->dweight = of->dbias = 0;
    normfuse_cuda_sign_tiling(p, t, of);
    of->walks = turns_of(g) > 1;
    struct normfuse_stream_arguments *const a = &step->stream;
    *a = normfuse_cuda_tiling_arguments(p, t);
    a->by_sample_slabs = divisor_of(is_group ? p->groups : p->c);
    a->slab_channels = t->by_columns ? 1 : (int32_t)d;
    a->sums_are_of_samples = is_group;
    a->sum_parts = !has_own_channels;
    a->joined_rows = (int32_t)t->folded;
    a->call.sum_slots = step->sums.slots;
    a->kept = (int32_t)g->kept;
    a->slab_sets = (int32_t)g->slab_sets;
    a->ring_at = (int32_t)g->ring_at;
    a->sums_at = (int32_t)g->sums_at;
    a->at_once = (int32_t)g->at_once;
    a->turns = (int32_t)turns_of(g);
    step->messages = g->in_grid ? (size_t)(2 * g->at_once * t->parts * g->slab_sets * (int64_t)shape->value_bytes *
                                           (backward ? 2 : 4))
                                : 0;
}

static double draw(uint64_t seed, const struct geometry *g)
{
    const int64_t of[] = {g->t.threads, g->t.across, g->t.parts, g->t.blocks_wide, g->in_grid, g->kept};
    return draw_geometry(seed, of, sizeof of / sizeof *of);
}

/* Keeps the cheaper of both. Returns why the candidate is none. */
static const char *try(const struct shape *shape, struct geometry *g, struct geometry *best, double *lowest)
{
    const char *const reason = place_memory(shape, g);
    if (reason != NULL)
        return reason;
    if (g->t.slabs * g->t.parts >= INT32_MAX)
        return "blocks are too many";
    /* As few of the slabs at a time as make as many turns. */
    g->at_once = minimum(minimum(g->t.slabs, g->in_grid ? MAX_BLOCK_GROUPS : INT32_MAX), resident_of(shape, g) / g->t.parts);
    if (g->at_once < 1)
        return "its blocks are not resident together";
    g->at_once = divide_up(g->t.slabs, turns_of(g));
    const uint64_t drawn = normfuse_cuda_choice()->drawn;
    const double cost = cost_of(shape, g);
    if ((drawn != 0 ? draw(drawn, g) : cost) < *lowest) {
        *lowest = drawn != 0 ? draw(drawn, g) : cost;
        *best = *g;
    }
    return NULL;
}

static const char *refuse(const struct shape *shape)
{
    const struct normfuse_problem *const p = shape->problem;
    const bool both = shape->direction == FORWARD
                          ? (p->phases & NORMFUSE_PHASE_STATISTICS) != 0 && p->y.data != NULL
                          : has_both_phases(p);
    return p->sets == NORMFUSE_SETS_NONE ? "there are no norm groups" : !both ? "statistics or sums are given" : NULL;
}

static const char *configure(const struct shape *shape, struct step *step)
{
    const struct normfuse_problem *const p = shape->problem;
    struct tiling t;
    const char *reason = refuse(shape);
    if (reason == NULL)
        reason = describe(shape, &t);
    if (reason != NULL)
        return reason;
    struct geometry best = {0};
    double lowest = INFINITY;
    /* Blocks that share a slab: those of a cluster, or (below 0) of the grid. */
    static const int16_t ways[] = {1, 2, 4, 8, 16, -2, -4, -6, -8, -12, -16, -22, -33, -44, -66, -132, -264};
    enum { WAYS = sizeof ways / sizeof *ways };
    const int64_t unit = t.folded > 1 ? t.columns / t.vector : common_multiple(group_of(p), t.vector) / t.vector;
    for (int64_t threads = 128; threads <= 1024; threads *= 2) {
        for (int way = 0; way < WAYS; way++) {
            const bool in_grid = ways[way] < 0;
            if ((in_grid && !shape->has_grid_barriers) || (way > 0 && !in_grid && !shape->device->clusters))
                continue;
            for (int64_t width = t.by_columns ? unit : 1; width <= (t.by_columns ? minimum(threads, t.columns / t.vector) : 1);
                 width = maximum(width + unit, width * 2 / unit * unit)) {
                struct geometry g = {.t = t, .in_grid = in_grid};
                g.t.threads = threads;
                g.t.parts = in_grid ? -ways[way] : ways[way];
                const char *why = t.by_columns ? share_columns(shape, &g, width) : share_rows(shape, &g);
                if (why == NULL)
                    why = try(shape, &g, &best, &lowest);
                if (why != NULL)
                    reason = why;
            }
        }
    }
    if (lowest == INFINITY)
        return reason != NULL ? reason : "no blocks hold a norm group";
    if (getenv("HACK_DUMP"))
        fprintf(stderr, "GEO %s bwd=%d cols=%d byrows=%d threads=%d across=%d parts=%d grid=%d at_once=%d kept=%d resident=%d slabs=%d shared=%d steps=%d partrows=%d sets=%d ahead=%d cost=%.2f bytes=%.0f\n", p->name, shape->direction, best.t.by_columns, best.by_rows, (int)best.t.threads, (int)best.t.across, (int)best.t.parts, best.in_grid, (int)best.at_once, (int)best.kept, (int)best.resident, (int)best.t.slabs, (int)best.shared, (int)best.t.steps, (int)best.t.part_rows, (int)best.slab_sets, best.ahead, cost_of(shape, &best), shape->bytes);
    fill(shape, &best, step);
    step->microseconds = lowest;
    return NULL;
}

const struct schedule normfuse_cuda_held = {.name = "held", .configure = configure};
