/* SPDX-License-Identifier: MIT
 *
 * schedules_columns.c - the schedules of columns (NHWC) but for those of the whole grid, and their two passes. */
#include "schedules.h"

enum { THREADS = 256 };

/* How many vectors of a row a block can have: as few as hold whole groups, times any number, or of rows folded all. */
static int64_t vectors_of_unit(const struct shape *shape, int64_t group)
{
    return shape->folded > 1 ? vectors_of_row(shape) : common_multiple(group, shape->elements) / shape->elements;
}

static void part_rows_of(const struct shape *shape, struct step *step, int64_t part_rows)
{
    struct normfuse_cuda_geometry *const g = &step->geometry;
    g->part_rows = (int32_t)part_rows;
    g->parts_a_sample = (int32_t)divide_up(g->rows, part_rows);
    g->parts = g->sum_slots = g->all_samples ? (int32_t)(shape->problem->n * g->parts_a_sample) : g->parts_a_sample;
    step->launch.grid = (int64_t)g->all_block_groups * g->parts;
}

/* `joins`: the kernel sums. */
static bool settle_columns(const struct shape *shape, struct step *step, enum normfuse_cuda_schedule schedule,
                           int64_t part_rows, uint32_t threads, bool joins)
{
    struct normfuse_cuda_geometry *const g = &step->geometry;
    const struct normfuse_problem *const p = shape->problem;
    const int64_t at_once = (int64_t)threads / g->width, channels = (int64_t)g->width * shape->elements;
    const int registers = vectors_of(shape, schedule);
    const bool holds = schedule == NORMFUSE_SCHEDULE_split;
    step->launch.kernel = normfuse_cuda_kernel_for(shape, schedule);
    step->launch.threads = threads;
    part_rows_of(shape, step, part_rows);
    g->held_shared = holds ? (int32_t)maximum(0, divide_up(part_rows, at_once) - registers) : 0;
    const int64_t groups = channels / g->group;
    set_joins(shape, g, groups / g->folded, channels / g->folded / maximum(1, shape->spans), threads, true);
    /* Shared memory, as the kernels part it: vectors; then words of the type computed in, and doubles. */
    const int64_t in_cluster = groups * step->launch.cluster;
    int64_t words = 3 * channels, doubles = 0;
    size_t vectors = (size_t)shape->tensors * 16 * (size_t)g->held_shared * threads;
    if (holds) {
        g->passing = normfuse_cuda_passing_of(shape);
        vectors += passing_bytes(shape, threads);
    }
    if (shape->direction == BACKWARD) {
        words = 6 * groups + (6 + 2 * at_once) * channels + 2 * in_cluster;
    } else if (joins) {
        const bool modulated = p->scale.data != NULL || p->shift.data != NULL, biased = p->pre_bias.data != NULL;
        const size_t subvectors =
            (size_t)(4 * at_once * (shape->elements >> g->subvector_bits) * g->width) * shape->value_bytes;
        vectors += subvectors;
        words = 4 * groups + (3 + modulated + biased) * channels + 2 * in_cluster;
        doubles = groups + groups % 2;
    }
    step->launch.shared = vectors + (size_t)words * shape->value_bytes + (size_t)doubles * sizeof(double);
    return step->launch.shared + 1024 <= shape->device->shared_per_block;
}

/* The kernel `cluster`, with threads for as few rows each as a block has room for, or as few threads as can be: more
 * blocks then share a multiprocessor. Few come first where blocks wait for one another: 2x1280x16x16 backward 6.2 us,
 * as many as can be 6.7. False where it is not made for this. */
static bool settle_cluster(const struct shape *shape, struct step *step, int64_t parts, bool few)
{
    enum { MAX_ENTRIES = 20 }; /* that a lane joins, by docs/numerics.md */
    struct normfuse_cuda_geometry *const g = &step->geometry;
    const int64_t channels = (int64_t)g->width * shape->elements, groups = channels / g->group;
    const int64_t part_rows = divide_up(g->rows, parts);
    if (!fits_cluster(shape) || groups > 32 || vectors_of_row(shape) % g->width != 0 ||
        (parts - 1) * part_rows >= g->rows)
        return false;
    g->lane_bits = lane_bits_of(groups, 32);
    const int64_t vectors = max_vectors_of_group(shape, g->group);
    const bool gives = shape->wants_gradients;
    const int64_t at_most = minimum((THREADS - (gives ? 32 : 0)) / g->width, (MAX_ENTRIES << g->lane_bits) / vectors);
    if (at_most == 0)
        return false;
    const int64_t held = vectors_of(shape, NORMFUSE_SCHEDULE_cluster), slots = divide_up(part_rows, at_most);
    if (slots > held || (few && slots == held))
        return false;
    const int64_t at_once = divide_up(part_rows, few ? held : slots);
    const uint32_t threads = whole_warps(g->width * at_once);
    const int64_t samples = exchange_of_samples(shape, step, shape->problem->n, parts);
    const int64_t cluster = parts * maximum(1, samples);
    (void)settle_columns(shape, step, NORMFUSE_SCHEDULE_cluster, part_rows, threads, true); /* but shared memory */
    step->at_once = (int32_t)at_once;
    step->of.cluster = (struct normfuse_cuda_cluster){(int32_t)samples, divisor_of(cluster), divisor_of(at_once)};
    const struct normfuse_cluster_layout layout =
        shape->direction == FORWARD
            ? normfuse_lay_out_cluster_forward(g->width, (int32_t)groups, step->at_once, (int32_t)parts)
            : normfuse_lay_out_cluster_backward(g->width, (int32_t)channels, (int32_t)groups, step->at_once,
                                                (int32_t)parts, samples > 0 ? (int32_t)cluster : 0, gives);
    step->launch.shared = (size_t)layout.bytes;
    /* The sums of channels are a warp's of their own. */
    step->without_vectors = gives ? 32 : 0;
    step->launch.threads += step->without_vectors;
    return step->launch.shared + 1024 <= shape->device->shared_per_block;
}

/* Microseconds that the kernel of the parameters' gradients takes for the parts of a channel, which a lane adds one
 * after the other. */
static double gradients_time(int64_t parts)
{
    return (double)divide_up(parts, parts > 256 ? 256 : 32);
}

/* Microseconds that a way of keeping sets would take: the memory's time, longer where blocks are few or rows narrow,
 * and what the blocks wait for one another. */
static double estimate(const struct shape *shape, const struct step *step)
{
    /* Copies of column blocks beside whole rows: rows narrower than this take so much longer. */
    static const struct {
        double bytes, stretch;
    } widths[] = {{20, 5.0},   {40, 2.8},   {80, 1.9},    {150, 1.45},
                  {250, 1.25}, {500, 1.12}, {1000, 1.04}, {INFINITY, 1.0}};
    static const double cluster_gap[2] = {0.016, 0.1}; /* a block of a cluster, where there are waves */
    static const double GRID_ROUNDS = 1.8;             /* all multiprocessors read, then all write */
    static const double few_waves[2] = {1.2, 1.4}, more[2] = {2.2, 4.3}; /* of `split`: times the memory's time; us */
    static const double ADDED_WAVES = 1.2, more_of_additions[2] = {2.2, 1.2}; /* of `additions`, the same */
    /* What a wave of `split` takes at least, one or two blocks a multiprocessor that read, wait and write: instance
     * norm 36x1216x9x7 bf16 backward, six waves, 43.1 us, in two passes 21.9; 107x1024x11x3 f16, four, 28.2, in
     * `cluster` 21.2. */
    static const double wave[2] = {4.0, 5.5};
    static const double CLUSTER = 1.0, SQUARE = 0.006, WAVE = 2.8; /* of `cluster`; its blocks squared; each wave */
    static const double GRADIENTS = 2.0;                           /* a kernel for them */
    const struct normfuse_cuda_policy *const policy = shape->policy;
    const struct normfuse_cuda_geometry *const g = &step->geometry;
    struct step alone = *step;
    alone.launch.cluster = 0;
    const int64_t a_multiprocessor = resident_blocks(shape, &alone) / shape->device->multiprocessors;
    const double slots = (double)resident_blocks(shape, step), blocks = (double)step->launch.grid;
    const double cluster = step->launch.cluster;
    const bool is_cluster = is_of(step, OF(cluster));
    const double waves = ceil(blocks / slots), busy = blocks / (waves * slots);
    const double filled = waves < 4.0 ? fmax(busy, a_multiprocessor > 1 ? 0.8 : busy) : 1.0;
    size_t i = g->blocks_wide > 1 ? 0 : sizeof widths / sizeof *widths - 1;
    while ((double)g->width * vector_bytes(shape) >= widths[i].bytes)
        i++;
    double time =
        shape->bytes / (policy->bytes_a_microsecond * reach_of(shape, blocks, slots) * filled) * widths[i].stretch;
    if (!is_cluster && waves < 4.0)
        time *= few_waves[shape->direction];
    else if (shape->additions)
        time *= ADDED_WAVES;
    if (a_multiprocessor == 1 && waves > 1.0)
        time *= policy->alone;
    /* Few warps of `split`: group norm 3x768x10x51x13 bf16 with GELU, six, 57.9 us, in two passes 48.7; 53x256x52x158 f32,
     * 256 groups, eight, 586, 485. */
    const double warps = (double)divide_up((int64_t)fmin(blocks, slots), shape->device->multiprocessors) *
                         step->launch.threads / 32.0;
    if (!is_cluster && !shape->additions)
        time *= fmax(1.0, sqrt(14.0 / warps));
    /* A cluster starts where all of its blocks find room at once, so the others wait. */
    if (waves > 1.0)
        time *= 1.0 + cluster_gap[shape->direction] * cluster;
    /* A kernel for the parameters' gradients, where neither a cluster nor a last block finds them. Nothing hides it
     * behind `cluster`. */
    const int64_t parts_of_channel = (g->sums_by_channel ? 1 : shape->problem->n) * g->sum_slots;
    if (shape->wants_gradients && !step->finds_gradients &&
        (is_cluster || parts_of_channel > NORMFUSE_CUDA_PARTS_OF_LAST))
        time += GRADIENTS + (is_cluster ? 1.0 + gradients_time(parts_of_channel) : 0.0);
    time += normfuse_cuda_start[shape->direction];
    if (is_cluster)
        return time + (cluster > 1.0 ? CLUSTER + SQUARE * cluster * cluster + WAVE * (waves - 1.0) : 0.0);
    time += (shape->additions ? more_of_additions : more)[shape->direction] +
            short_waves(shape, waves, wave[shape->direction]);
    /* A group's sums are in as many places as rows are folded, forward from single channels, which each block joins. */
    if (shape->direction == FORWARD && g->folded > 1)
        time += 0.6 * g->folded * waves;
    if (g->exchange == NORMFUSE_EXCHANGE_CLUSTER)
        time += (normfuse_cuda_cluster_wait + 0.05 * cluster + (cluster > 8.0 ? 4.0 : 0.0)) *
                (waves < 2.0 ? 1.0 : 0.18 * waves);
    if (g->exchange == NORMFUSE_EXCHANGE_GRID) {
        const double rounds = (double)divide_up(g->all_block_groups, g->block_groups);
        const double groups = (double)g->width * shape->elements / g->row_values;
        const double pair = 2.0 * (double)shape->value_bytes;
        if (rounds > 1.0)
            time *= GRID_ROUNDS;
        /* Forward as of no fewer blocks than multiprocessors: batch norm 88x8x11x6 bf16, 12, takes 7.6 us. */
        const double all = shape->direction == FORWARD ? fmax(blocks, shape->device->multiprocessors) : blocks;
        time += policy->grid_wait[shape->direction] * rounds +
                all * (all / g->block_groups) * groups * pair * rounds / policy->l2_bytes_a_microsecond;
    }
    return time;
}

/* Vectors of a row that a block of what passes has at most: rows of 1 KB are as fast as longer ones. */
enum { WIDEST = 64 };

/* Variants of cluster and split: widths of blocks times ways. A way is one block, clusters of 2 to 16, the grid with
 * all it holds in as many blocks as share a multiprocessor's shared memory once, twice or four times; and the same with
 * twice as many threads. */
enum { WIDTHS = 10, WAYS = 16, MAX_WIDTH = 512 };

static const char *configure_variant(const struct shape *shape, struct step *step, bool is_cluster)
{
    const int way = step->variant % WAYS;
    const bool grid = way % 8 >= 5, more_threads = way >= 8;
    const int bits = way % 8 - (grid ? 5 : 0);
    const int64_t d = group_of(shape->problem) * maximum(1, shape->spans);
    const int64_t units = INT64_C(1) << step->variant / WAYS;
    const int64_t unit = vectors_of_unit(shape, d), vectors = vectors_of_row(shape);
    const int64_t width = minimum(units * unit, vectors);
    if (width > MAX_WIDTH || (units - 1) * unit >= vectors)
        return "rows are too wide for a block, or narrower";
    /* Where the grid can work from pipelines it does not hold vectors in registers: 2x320x128x128 f16 20.0 us, 24.3. */
    if (grid && (is_cluster || !shape->has_grid_barriers || (shape->has_pipeline && shape->plain && !shape->batch)))
        return "the grid has no sync memory, or a better schedule";
    struct normfuse_cuda_geometry *const g = begin_columns(shape, step, width, d);
    if (g->all_samples && shape->problem->n > 1)
        return "samples of batch norm are apart";
    int64_t parts = INT64_C(1) << bits; /* blocks a block group */
    if (grid) {
        /* Fewer block groups of more blocks until a part fits. */
        const int64_t resident = (int64_t)shape->device->multiprocessors << bits;
        const int64_t max_rows = ((int64_t)shape->policy->resident_bytes >> bits) / (width * 16 * shape->tensors);
        int64_t block_groups = minimum(g->all_block_groups, resident);
        while (block_groups > 1 && divide_up(g->rows, resident / block_groups) > max_rows)
            block_groups = (block_groups + 1) / 2;
        g->block_groups = (int32_t)block_groups;
        const int64_t at_once = maximum(1, (more_threads ? 2 * THREADS : THREADS) / width);
        parts = minimum(resident / block_groups, maximum(2, most_blocks(shape, g->rows, at_once)));
    }
    if (parts > g->rows)
        return "rows are fewer than blocks";
    struct step other = *step;
    const bool settled = !grid && settle_cluster(shape, &other, parts, more_threads != (parts > 1));
    if (is_cluster) {
        *step = other;
        return settled ? NULL : "registers do not hold whole groups";
    }
    if (settled)
        return "cluster does it better";
    /* No more threads than it takes for each to have as many rows as it has anyway: fewer sums to join. */
    const int64_t max_threads = more_threads ? 2 * THREADS : THREADS;
    const int64_t at_most = minimum(maximum(1, max_threads / width), max_at_once(shape, d));
    const int64_t part_rows = divide_up(g->rows, parts), at_once = divide_up(part_rows, divide_up(part_rows, at_most));
    if (!grid)
        exchange_by_cluster(step, parts);
    if (!settle_columns(shape, step, NORMFUSE_SCHEDULE_split, part_rows, whole_warps(width * at_once), true))
        return "shared memory does not hold it";
    if (!grid) {
        /* Parts that round away would leave blocks of the cluster without rows. */
        g->parts = g->parts_a_sample = g->sum_slots = (int32_t)parts;
        step->launch.grid = (int64_t)g->all_block_groups * parts;
        return NULL;
    }
    if (g->parts < 2 || g->block_groups > MAX_BLOCK_GROUPS)
        return "blocks are too few, or block groups too many";
    step->launch.grid = (int64_t)g->block_groups * g->parts;
    return exchange_by_grid(shape, step);
}

static const char *refuse_cluster(const struct shape *shape)
{
    return fits_cluster(shape) ? NULL
                               : "it takes group norm of plain tensors with parameters that can be read in vectors";
}

static const char *configure_cluster(const struct shape *shape, struct step *step)
{
    return configure_variant(shape, step, true);
}

static const char *configure_split(const struct shape *shape, struct step *step)
{
    return configure_variant(shape, step, false);
}

/* Batch norm over rows as columns: samples become rows of one sample, and the positions of its channels columns, of
 * which a set has so many that are adjacent. NULL: *shape is that, of *problem; else why not. */
static const char *stack(const struct shape *given, struct normfuse_problem *problem, struct shape *shape)
{
    const struct normfuse_problem *const p = given->problem;
    if (p->sets != NORMFUSE_SETS_BATCH || p->s < 2 || p->x.position != 1 || p->x.channel != p->s ||
        (double)p->c * (double)p->s > INT32_MAX / 2)
        return "it takes batch norm of several samples whose channels are adjacent";
    *problem = *p;
    problem->columns = true;
    problem->n = 1;
    problem->c = p->c * p->s;
    problem->s = p->n;
    problem->x = (struct normfuse_view){p->x.data, 0, 1, p->x.batch};
    *shape = *given;
    if (!normfuse_cuda_shape_of(problem, shape) || !(shape->plain || shape->additions) || shape->folded > 1)
        return "samples are no whole vectors, or too large";
    leave_rare_derivatives(shape);
    shape->batch = false; /* columns of a channel have its parameters, which cannot be read in vectors */
    shape->spans = (int32_t)p->s;
    if (shape->additions)
        *shape = normfuse_cuda_shape_held(shape);
    return NULL;
}

/* Of the shape that stack() makes, or that it is made of. Each wave of blocks reads, waits and writes: batch norm
 * 128x2048x7x7 bf16 backward, two waves of two blocks of 256 threads a multiprocessor, or of one of 512, 49 us, four
 * waves 61; 64x1024x14x14 47, 60. */
static double estimate_stacked(const struct shape *shape, const struct step *step)
{
    static const double wave[2] = {4.2, 6.5}, stretch[2] = {1.2, 1.25};
    const struct normfuse_cuda_geometry *const g = &step->geometry;
    const double slots = (double)resident_blocks(shape, step), blocks = (double)step->launch.grid;
    const double rounds = g->exchange == NORMFUSE_EXCHANGE_GRID
                              ? (double)divide_up(g->all_block_groups, g->block_groups)
                              : ceil(blocks / slots);
    const double warps = fmin(blocks, slots) / shape->device->multiprocessors * step->launch.threads / 32.0;
    const double time = shape->bytes * stretch[shape->direction] /
                        (shape->policy->bytes_a_microsecond * reach_of(shape, blocks, slots));
    const double meets = g->exchange == NORMFUSE_EXCHANGE_GRID      ? shape->policy->grid_wait[shape->direction]
                         : g->exchange == NORMFUSE_EXCHANGE_CLUSTER ? 0.3 + 0.1 * step->launch.cluster
                                                                    : 0.0;
    return normfuse_cuda_start[shape->direction] + time * (1.0 + 0.02 * fmax(0.0, 16.0 - warps)) +
           rounds * (wave[shape->direction] + meets);
}

/* Where rows have many ends for what they hold. Of 145 calls those of fewer values or samples take 1.19 of the time of
 * what else there is, those of more than 200 values a row 1.10, of more than 64 that are whole vectors 1.04; the others
 * 0.83. */
static const char *refuse_stacked(const struct shape *shape)
{
    enum { FEW_SAMPLES = 8, FEW_VALUES = 9700 /* of a multiprocessor */, WHOLE = 64, LONG = 200 };
    const struct normfuse_problem *const p = shape->problem;
    const bool is_whole = p->s * (int64_t)normfuse_type_bytes(p->type) % 16 == 0;
    const double values = (double)p->n * (double)p->c * (double)p->s;
    if (p->n < FEW_SAMPLES || values < (double)FEW_VALUES * shape->device->multiprocessors)
        return "it is small";
    return p->s > (is_whole ? WHOLE : LONG) ? "rows are long" : NULL;
}

/* Of all variants of `split` the cheapest. */
static const char *configure_stacked(const struct shape *given, struct step *step)
{
    struct normfuse_problem problem;
    struct shape shape;
    struct step trial = {0};
    double lowest = INFINITY;
    const char *reason = stack(given, &problem, &shape);
    for (int variant = 0; reason == NULL && variant < WIDTHS * WAYS; variant++) {
        trial.variant = variant;
        if (configure_variant(&shape, &trial, false) != NULL)
            continue;
        const double time = estimate_stacked(&shape, &trial);
        if (time < lowest) {
            lowest = time;
            *step = trial;
        }
    }
    step->is_stacked = true;
    return reason != NULL ? reason : lowest < INFINITY ? NULL : "no variant runs on this device";
}

const struct schedule normfuse_cuda_stacked = {.name = "stacked",
                                               .needs = TAKES_BIAS,
                                               .refuse = refuse_stacked,
                                               .configure = configure_stacked,
                                               .estimate = estimate_stacked,
                                               .in_order = true};
#define VARIANTS .variants = WIDTHS * WAYS, .estimate = estimate
static const struct schedule
    cluster = {.name = "cluster", .refuse = refuse_cluster, .configure = configure_cluster, VARIANTS},
    split = {.name = "split",
             .needs = NEEDS_PLAIN | TAKES_BIAS | TAKES_ADDITIONS,
             .configure = configure_split,
             VARIANTS};

const struct schedule *const normfuse_cuda_columns_schedules[] = {
    &cluster, &split, &normfuse_cuda_grid_pipeline, &normfuse_cuda_stream, &normfuse_cuda_held, &normfuse_cuda_single, NULL};
