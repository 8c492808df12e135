/* SPDX-License-Identifier: MIT
 *
 * held.c - which norms the body `held` takes, with which geometry, in how many microseconds: device/held.cuh. */
#include "tiling.h"

enum { MAX_KEPT = 48, MAX_SUMMED = 22, MIN_SET_VALUES = 64, MAX_ROWS_SUMMED = 128, RESERVE = 1024 };

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
    int64_t sums = sent * (1 + (t->parts > 1 && !g->in_grid ? t->parts : 0)) + 4 * value * g->slab_sets;
    if (t->by_columns) {
        const int64_t columns = t->across * t->vector / piece_of(shape->problem, t);
        const int64_t numbers = backward && shape->problem->dslope.data != NULL ? 3 : 2;
        sums += value * (numbers * down_of(t) + 2) * columns + 24 * columns + 32;
    } else if (g->by_rows) {
        sums += t->part_rows * value * (6 + 3 * maximum(1, t->across / 32));
    }
    g->shared = g->sums_at + sums;
    if (g->shared + RESERVE > (int64_t)shape->device->shared_per_block)
        return "a block holds less";
    const int64_t by_memory =
        ((int64_t)shape->device->shared_per_block + RESERVED_OF_BLOCK) / (g->shared + RESERVED_OF_BLOCK + RESERVE);
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
    t->across = normfuse_cuda_threads_across(t->part_vectors, t->threads);
    t->steps = divide_up(t->part_vectors, t->across);
    g->kept = t->steps * divide_up(t->part_rows, t->threads / t->across);
    t->row_step = down_of(t);
    /* Forwards sum in two sums in turn, backwards in one: docs/numerics.md. */
    return g->kept > (shape->direction == BACKWARD ? MAX_SUMMED : MAX_KEPT) ? "a thread would hold too much" : NULL;
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

/* Blocks that run at the same time. A cluster is within one of the parts of the chip: those of an H200, by what it says
 * of clusters of 8 and 16. */
static int64_t resident_of(const struct shape *shape, const struct geometry *g)
{
    enum { PARTS = 8 };
    static const int64_t multiprocessors[PARTS] = {18, 18, 18, 16, 16, 16, 16, 14};
    const int64_t all = shape->device->multiprocessors, parts = g->t.parts;
    int64_t clusters = all <= multiprocessors[0] ? g->resident * all / parts : 0; /* a small chip is one part */
    for (int i = 0; i < PARTS && all > multiprocessors[0]; i++)
        clusters += g->resident * (multiprocessors[i] * all / 132) / parts;
    return g->in_grid || parts == 1 ? g->resident * all : clusters * parts;
}

static int64_t turns_of(const struct geometry *g)
{
    return divide_up(g->t.slabs, g->at_once);
}

/* Microseconds. In the first turn of the multiprocessors blocks wait for their threads, for each other, and for memory.
 * Later, waits and memory's time overlap the more the more blocks a multiprocessor has. Fitted to 1990 geometries of
 * 210 problems on an H200, together with those of `single`. */
static double cost_of(const struct shape *shape, const struct geometry *g)
{
    static const struct {
        double start, vector, warp, set, columns, piece, cluster, part, grid, grid_part, gradients; /* latency */
        double reach, lines[2], bandwidth, gang;                                                    /* memory */
        double value[2], costly, of_warp, mix, overlap;                                             /* cycles */
    } k = {.start = 2.08, .vector = 0.112, .warp = 0.0235, .set = 0.053, .columns = 1.23, .piece = 0.631,
           .cluster = 0.654, .part = 0.0488, .grid = 1.81, .grid_part = 0.0846, .gradients = 1.66, .reach = 4.46,
           .lines = {0.000708, 0.000313}, .bandwidth = 1.543, .gang = 0.0359, .value = {0.879, 1.617}, .costly = 1.4,
           .of_warp = 164.0, .mix = 0.768, .overlap = 0.0684};
    const struct normfuse_problem *const p = shape->problem;
    const double multiprocessors = shape->device->multiprocessors, blocks = (double)(g->t.slabs * g->t.parts);
    const bool in_cluster = g->t.parts > 1 && !g->in_grid;
    const bool is_costly = p->activation == NORMFUSE_SILU || is_rare(p->activation);
    const double at_once =
        fmin(blocks, (double)(g->in_grid ? g->at_once * g->t.parts : resident_of(shape, g)));
    const double tensors =
        (double)(shape->tensors + passing_of(shape, false) + passing_of(shape, true) + results_of(shape));
    const double type_bytes = (double)normfuse_type_bytes(p->type), elements = (double)g->t.vector;
    const double narrow = fmax(1.0, 2048.0 / ((double)g->t.across * elements * type_bytes));
    const double lines = 1.0 + k.lines[g->t.by_columns] * (narrow * narrow - 1.0);
    const double reach = fmin(1.0, at_once * k.reach / multiprocessors);
    const double bandwidth = k.bandwidth * shape->policy->bytes_a_microsecond * reach;
    const double memory = lines * shape->tensor_bytes * tensors / bandwidth;
    const double warps = (double)g->t.threads / 32.0;
    const double of_values = (double)g->kept * elements * k.value[shape->direction] * (1.0 + k.costly * is_costly);
    const double arithmetic = blocks * warps * (of_values + k.of_warp) / (fmin(at_once, multiprocessors) * 1750.0);
    double wait = k.vector * (double)g->kept + k.warp * warps + k.set * (double)g->slab_sets;
    if (g->t.by_columns)
        wait += piece_of(p, &g->t) > 1 ? k.columns * k.piece : k.columns;
    if (g->in_grid)
        wait += k.grid + k.grid_part * (double)g->t.parts;
    else if (in_cluster)
        wait += k.cluster + k.part * (double)g->t.parts;
    const double moved = pow(pow(memory, k.mix) + pow(arithmetic, k.mix), 1.0 / k.mix) *
                         (1.0 + (in_cluster ? k.gang * log2((double)g->t.parts) : 0.0));
    const double turns = ceil(blocks / at_once), overlap = fmin(8.0, 1.0 + k.overlap * ((double)g->resident - 1.0));
    const double further = (turns - 1.0) * pow(pow(moved / turns, overlap) + pow(wait, overlap), 1.0 / overlap);
    const bool has_gradients =
        shape->direction == BACKWARD && shape->wants_gradients && p->sets == NORMFUSE_SETS_GROUP;
    return k.start + wait + moved / turns + further + (has_gradients ? k.gradients : 0.0);
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
    of->gradients = is_direct ? NORMFUSE_GRADIENTS_DIRECT
                    : wants   ? NORMFUSE_GRADIENTS_OF_SAMPLES
                              : NORMFUSE_GRADIENTS_NONE;
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
    a->turns = (int32_t)turns_of(g);
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
    step->messages = g->in_grid ? (size_t)((of->walks ? 2 : 1) * g->at_once * t->parts * g->slab_sets *
                                           (int64_t)shape->value_bytes * (backward ? 2 : 4))
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
    if (resident_of(shape, g) < g->t.parts)
        return "its blocks are not resident together";
    g->at_once = g->t.slabs;
    if (g->in_grid)
        g->at_once = minimum(minimum(g->at_once, resident_of(shape, g) / g->t.parts), MAX_BLOCK_GROUPS);
    g->at_once = divide_up(g->t.slabs, turns_of(g)); /* as few as make as many turns */
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
    return p->sets == NORMFUSE_SETS_NONE    ? "there are no norm groups"
           : !both                          ? "statistics or sums are given"
           : p->set_values < MIN_SET_VALUES ? "norm groups are small"
                                            : NULL;
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
    static const int16_t ways[] = {1,   2,   4,   8,   16,  -2,  -4,  -6,  -8,  -10, -11,  -12,
                                   -13, -14, -16, -18, -20, -22, -26, -33, -44, -66, -132, -264};
    enum { WAYS = sizeof ways / sizeof *ways };
    const int64_t unit = t.folded > 1 ? t.columns / t.vector : common_multiple(group_of(p), t.vector) / t.vector;
    for (int64_t threads = 128; threads <= 512; threads *= 2) {
        for (int way = 0; way < WAYS; way++) {
            const bool in_grid = ways[way] < 0;
            if ((in_grid && !shape->has_grid_barriers) || (way > 0 && !in_grid && !shape->device->clusters))
                continue;
            for (int64_t width = t.by_columns ? unit : 1;
                 width <= (t.by_columns ? minimum(threads, t.columns / t.vector) : 1);
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
    fill(shape, &best, step);
    step->microseconds = lowest;
    return NULL;
}

const struct schedule normfuse_cuda_held = {.name = "held", .configure = configure};
