/* SPDX-License-Identifier: MIT
 *
 * schedules_rows.c - the schedules of rows (NCHW), in order of preference, and their two passes. */
#include "schedules.h"

static struct normfuse_cuda_geometry *begin_rows(const struct shape *shape, struct step *step)
{
    const struct normfuse_problem *const p = shape->problem;
    struct normfuse_cuda_geometry *const g = normfuse_cuda_begin_step(step);
    const bool none = p->sets == NORMFUSE_SETS_NONE;
    g->sums_by_channel = p->sets == NORMFUSE_SETS_BATCH;
    g->spans = (int32_t)(shape->unaligned ? unaligned_spans(p, shape->elements) : p->s / shape->elements);
    g->group = (int32_t)group_of(p);
    g->outer = (int32_t)(none ? p->c : g->sums_by_channel ? p->n : g->group);
    g->all_block_groups = (int32_t)(none ? p->n : sets_of(p));
    const int64_t rows = (int64_t)g->outer * g->spans;
    g->rows = g->part_rows = is_countable(rows) ? (int32_t)rows : 0;
    return g;
}

/* Fills in what follows from parts, threads and rows; false where the block's shared memory does not suffice. */
static bool settle_rows(const struct shape *shape, struct step *step, int64_t part_rows, uint32_t threads)
{
    struct normfuse_cuda_geometry *const g = &step->geometry;
    const int64_t each = divide_up(part_rows, threads), warps = threads / 32;
    const bool forward = shape->direction == FORWARD, by_sample = g->sums_by_channel;
    step->launch.kernel = normfuse_cuda_kernel_for(shape, NORMFUSE_SCHEDULE_split);
    step->launch.threads = threads;
    g->part_rows = (int32_t)part_rows;
    g->parts = (int32_t)divide_up(g->rows, part_rows);
    g->segment_rows = (int32_t)(forward ? each : 32 * each);
    g->held_shared = (int32_t)maximum(0, each - vectors_of(shape, NORMFUSE_SCHEDULE_split));
    g->passing = normfuse_cuda_passing_of(shape);
    g->coefficients = by_sample ? 1 : (int32_t)minimum(g->outer, (part_rows - 1) / g->spans + 2);
    g->channels_a_segment = forward ? 0 : by_sample ? 1 : (g->segment_rows - 1) / g->spans + 2;
    g->sum_slots = by_sample ? g->parts : (int32_t)minimum(g->parts, (g->spans - 1) / part_rows + 2);
    step->launch.grid = (int64_t)g->all_block_groups * g->parts;
    const int64_t numbers = 4 * (int64_t)g->coefficients + 2 * warps * g->channels_a_segment;
    step->launch.shared =
        (size_t)shape->tensors * 16 * (size_t)g->held_shared * threads + passing_bytes(shape, threads) +
        (size_t)numbers * shape->value_bytes;
    return step->launch.shared + 2048 <= shape->device->shared_per_block;
}

/* Of kernels that have no vectors in registers, where a value takes more instructions. */
static bool holds_in_shared_memory(const struct shape *shape)
{
    return shape->unaligned || has_additions(shape->problem);
}

/* Threads that a norm group of so many vectors leaves work for: each has what registers hold. Of unaligned ones, which
 * are in shared memory, a thread has some, and fewer where that would leave multiprocessors with few warps: group norm
 * 13x959x4 in seven groups, of 160 threads in the place of 64, 3.4 us for 4.9. */
static int64_t threads_wanted(const struct shape *shape, const struct normfuse_cuda_geometry *g)
{
    enum { ENOUGH = 512 }; /* a multiprocessor; with 1024 instance norm 1x1009x592 f16 backward 11.4 us, 7.8 */
    static const int64_t of_unaligned[2] = {9, 6};
    const int64_t few = ENOUGH * (int64_t)shape->device->multiprocessors / maximum(1, g->all_block_groups) / 32 * 32;
    const int64_t held = shape->unaligned ? of_unaligned[shape->direction] : vectors_of(shape, NORMFUSE_SCHEDULE_split);
    const int64_t fewest = minimum(g->rows, minimum(few, holds_in_shared_memory(shape) ? 512 : 256));
    return whole_warps(maximum(divide_up(g->rows, held), fewest));
}

/* What all blocks of the grid read or write in a round, in microseconds a tensor. */
static double microseconds_a_round(const struct shape *shape, const struct step *step)
{
    return (double)step->launch.grid * (double)step->geometry.part_rows * vector_bytes(shape) /
           shape->policy->bytes_a_microsecond;
}

/* Of norm groups that one block cannot hold, or that are too few. The backward has more to do between reading and
 * writing, so its clusters are of more and smaller blocks, side by side. */
struct split {
    int64_t parts;                /* blocks a norm group; 1: it may be one block's */
    int64_t cluster, max_cluster; /* the same in clusters, at least and at most */
    uint32_t threads, cluster_threads;
};

static struct split begin_split(const struct shape *shape, struct step *step)
{
    const struct normfuse_cuda_geometry *const g = begin_rows(shape, step);
    const struct normfuse_cuda_policy *const policy = shape->policy;
    const int d = shape->direction;
    const int64_t set_bytes = (int64_t)((double)g->rows * vector_bytes(shape) * shape->tensors);
    const int64_t small = divide_up(set_bytes, maximum(1, policy->small_part_bytes[d]));
    const int64_t max_cluster = shape->device->clusters ? NORMFUSE_CUDA_ROW_CLUSTER : 1;
    const int64_t multiprocessors = shape->device->multiprocessors, blocks_wanted = 2 * multiprocessors;
    int64_t parts = maximum(1, divide_up(set_bytes, policy->part_bytes[d]));
    /* A norm group that one block holds is shared where most multiprocessors would have no block, and parts are not too
     * small: group norm 25x192x64x24 bf16 in six
     * groups 26.6, 15.5; 3x24x6444 f32 9.2, 12.4; 4x2x11768 f16 6.6, 5.3. */
    const int64_t min_part_bytes = holds_in_shared_memory(shape) ? 16 << 10 : 32 << 10;
    const int64_t fewest_blocks = 4 * set_bytes > 3 * policy->part_bytes[d]        ? blocks_wanted
                                  : d == BACKWARD && holds_in_shared_memory(shape) ? multiprocessors
                                                                                   : multiprocessors / 2;
    if (g->all_block_groups * parts < fewest_blocks)
        parts = maximum(parts, minimum(divide_up(blocks_wanted, g->all_block_groups), set_bytes / min_part_bytes));
    /* Fewer threads, and more blocks beside one another, where sets are small; of one block a set no more than
     * registers are wanted for. */
    int64_t threads = set_bytes <= policy->small_set_bytes ? 128 : 256;
    if (parts == 1)
        threads = minimum(threads, threads_wanted(shape, g));
    const bool is_small = parts > 1 && policy->small_part_bytes[d] > 0 && small <= max_cluster;
    return (struct split){parts, is_small ? maximum(parts, small) : parts, max_cluster, (uint32_t)threads,
                          is_small ? 128 : (uint32_t)threads};
}

static const char *refuse(const struct shape *shape)
{
    struct step step = {0};
    if (shape->direction == BACKWARD && shape->problem->pre_bias.data != NULL && shape->elements == 8)
        return "with 16 bits it has no registers for pre_bias";
    return begin_rows(shape, &step)->rows == 0 ? "a norm group has more vectors than the kernels count" : NULL;
}

/* `block_groups` norm groups at a time, with all blocks of the grid resident, two a multiprocessor. */
static bool settle_grid(const struct shape *shape, struct step *step, uint32_t threads, int64_t block_groups)
{
    const struct normfuse_cuda_policy *const policy = shape->policy;
    const int32_t multiprocessors = shape->device->multiprocessors;
    struct normfuse_cuda_geometry *const g = begin_rows(shape, step);
    const int64_t blocks = minimum(2 * (int64_t)multiprocessors / block_groups, most_blocks(shape, g->rows, threads));
    if (!shape->has_grid_barriers || block_groups > MAX_BLOCK_GROUPS || blocks < 2 || blocks > g->rows ||
        !settle_rows(shape, step, divide_up(g->rows, blocks), threads) ||
        step->launch.shared > policy->shared_a_block)
        return false;
    step->launch.grid = block_groups * g->parts;
    /* Each round waits for all of its blocks: parts of a few KB take longer than reading twice (1x96x523x527, whose
     * rows allow no vectors: 2375 us against 700). */
    const bool rounds = block_groups < g->all_block_groups;
    if (rounds && (double)g->part_rows * vector_bytes(shape) < policy->min_round_bytes)
        return false;
    g->block_groups = (int32_t)block_groups;
    g->staggered_blocks = multiprocessors;
    if (rounds)
        g->stagger_cycles =
            (int32_t)(microseconds_a_round(shape, step) * shape->tensors * policy->cycles_a_microsecond);
    return exchange_by_grid(shape, step) == NULL;
}

static const char *configure_grid(const struct shape *shape, struct step *step)
{
    const struct split split = begin_split(shape, step);
    const int64_t sets = step->geometry.all_block_groups;
    return split.parts < 4                                 ? "fewer blocks hold a norm group"
           : settle_grid(shape, step, split.threads, sets) ? NULL
                                                           : "its blocks are not resident together";
}

/* As many norm groups at a time as take the least time in all. */
static const char *configure_rounds(const struct shape *shape, struct step *step)
{
    /* The values of so few meet more roundings from block to block than docs/numerics.md says. */
    enum { FEW_VECTORS = 32 };
    static const double ROUND_WAIT = 7.5; /* microseconds that each round takes beside its bytes */
    const struct split split = begin_split(shape, step);
    const int64_t sets = step->geometry.all_block_groups, most = minimum(sets, 2 * shape->device->multiprocessors);
    if (step->geometry.rows < FEW_VECTORS)
        return "a norm group is small";
    double min_time = INFINITY;
    /* One or two at a time lose: 1x512x16x180x320 bf16, one, 1148 us, two passes 691. */
    for (int64_t block_groups = most; block_groups >= (sets <= 2 ? 1 : 3); block_groups--) {
        struct step trial = {0};
        if (!settle_grid(shape, &trial, split.cluster_threads, block_groups))
            continue;
        const double round = microseconds_a_round(shape, &trial) * (shape->tensors + 1) + ROUND_WAIT;
        const double time = (double)divide_up(sets, block_groups) * round;
        if (time < min_time) {
            min_time = time;
            *step = trial;
        }
    }
    return min_time < INFINITY ? NULL : "the grid does not hold three at a time, or the only ones";
}

/* A block, or a cluster of few, with vectors in shared memory, too. */
static const char *configure_cluster(const struct shape *shape, struct step *step)
{
    const struct split split = begin_split(shape, step);
    const struct normfuse_cuda_geometry *const g = &step->geometry;
    struct step fit = {0};
    int64_t min_time = INT64_MAX;
    for (int64_t cluster = split.cluster; cluster <= split.max_cluster && cluster <= g->rows; cluster++) {
        struct step trial = *step;
        if (!settle_rows(shape, &trial, divide_up(g->rows, cluster), split.cluster_threads) ||
            (trial.launch.shared > shape->policy->shared_a_block && cluster < split.max_cluster))
            continue;
        const int64_t resident = maximum(1, resident_blocks(shape, &trial));
        if (cluster > 1) {
            /* Parts that round away would leave blocks of the cluster without rows. */
            trial.geometry.parts = (int32_t)cluster;
            if (g->sums_by_channel)
                trial.geometry.sum_slots = trial.geometry.parts;
            trial.launch.grid = (int64_t)g->all_block_groups * cluster;
            exchange_by_cluster(&trial, cluster);
            if (resident_blocks(shape, &trial) == 0)
                continue;
        }
        /* Few waves of blocks: the last one should not be half empty. */
        const int64_t waves = divide_up(trial.launch.grid, resident), time = waves * trial.geometry.part_rows;
        if (time < min_time) {
            min_time = time;
            fit = trial;
        }
        if (waves > 3 || cluster == 1)
            break;
    }
    *step = fit;
    if (min_time == INT64_MAX)
        return "no cluster has room for a norm group";
    /* 4x512x64x64 f16 in clusters 22.6 us, by the grid 15.9; 2x320x128x128 25.4, 18.1. Backwards are about the same. */
    struct step rounds = {0};
    return shape->direction == FORWARD && fit.launch.cluster > 1 && configure_rounds(shape, &rounds) == NULL &&
                   normfuse_cuda_estimate_once(shape, &rounds) < 0.95 * normfuse_cuda_estimate_once(shape, &fit)
               ? "the whole grid takes less"
               : NULL;
}

/* A rare derivative is a call for each vector: group norm 35x1472x22x39x12 bf16 with mish, 64 groups, backward 2270 us;
 * in two passes 1.7 times the floor of 741. */
static double estimate(const struct shape *shape, const struct step *step)
{
    const bool calls = shape->direction == BACKWARD && is_rare(shape->problem->activation);
    double stretch = calls ? 2.2 : 1.0;
    if (is_of(step, OF(additions))) {
        /* Blocks that have a multiprocessor alone, large clusters, rounds: group norm 3x3072x172x76 f16 + pre_add, alone,
         * 546 us, in two passes 411; batch norm 256x512x28x28 bf16 + post_add, H200, in rounds 241, in two passes 211. */
        const struct normfuse_cuda_geometry *const g = &step->geometry;
        const int64_t resident = resident_blocks(shape, step), multiprocessors = shape->device->multiprocessors;
        if (shape->direction == BACKWARD) {
            /* Few warps leave the multiprocessor idle, and each end of a row takes instructions: times the memory's time
             * batch norm 3x3072x63x168 + post_add, 16 warps, 1.7; 256x1024x14x14, 8 warps, 2.8; 256x2048x7x7 3.3. */
            const double warps = (double)(resident * step->launch.threads) / (32.0 * (double)multiprocessors);
            stretch *= (1.0 + 6.0 / g->spans) * fmax(1.0, sqrt(20.0 / warps));
        } else if (2 * resident < 3 * multiprocessors && step->launch.grid > resident) {
            stretch *= 1.4;
        }
        if (step->launch.cluster > 5)
            stretch *= 1.2;
        if (g->exchange == NORMFUSE_EXCHANGE_GRID && g->block_groups < g->all_block_groups)
            stretch *= 1.12;
    }
    /* Backward a warp joins the sums of each row that ends in it: 7x663x2x1x4, one group, f16 96 rows, 25.6 us. */
    enum { FEW_ROWS = 16 };
    const double rows = (double)step->geometry.segment_rows / step->geometry.spans;
    const double joins = shape->direction == BACKWARD ? 0.2 * fmax(0.0, rows - FEW_ROWS) : 0.0;
    /* Each end of a row takes instructions, those of batch norm twice as many: forward 139x8192x5x2 bf16 146 us, in two
     * passes 78. */
    static const double end[2] = {2.5e-5, 5e-5};
    const double ends = end[shape->direction] * (double)shape->problem->n * (double)shape->problem->c *
                        (shape->problem->sets == NORMFUSE_SETS_BATCH ? 2.0 : 1.0);
    return normfuse_cuda_estimate_once(shape, step) * stretch + joins + ends;
}

#define SPLIT                                                                                                          \
    .needs = NEEDS_PLAIN | TAKES_BIAS | TAKES_ADDITIONS, .refuse = refuse, .estimate = estimate, .in_order = true
static const struct schedule grid = {.name = "grid", .configure = configure_grid, SPLIT},
                             cluster = {.name = "cluster", .configure = configure_cluster, SPLIT},
                             rounds = {.name = "grid in rounds", .configure = configure_rounds, SPLIT};

const struct schedule *const normfuse_cuda_rows_schedules[] = {
    &normfuse_cuda_stacked, &grid,
    &cluster, &rounds, &normfuse_cuda_stream, &normfuse_cuda_held, &normfuse_cuda_single, NULL};
