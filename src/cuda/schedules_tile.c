/* SPDX-License-Identifier: MIT
 *
 * schedules_tile.c - the schedule of small norm groups of a few rows of adjacent values, of both layouts. */
#include "schedules.h"

/* What the kernel takes the tensors for: `samples` times `rows` rows of `columns` adjacent values. */
struct view {
    int64_t samples, rows, columns;
    int64_t sample, row;            /* strides */
    int64_t group, channel_columns; /* columns of a norm group, of a channel */
    int64_t length; /* not 0: a norm group is so many adjacent values, which are cut into rows of a block's width */
};

/* `width`: of rows that a norm group is cut into. */
static struct view view_of(const struct normfuse_problem *p, int64_t width)
{
    const int64_t d = group_of(p);
    if (p->columns)
        return (struct view){p->n, p->s, p->c, p->x.batch, p->x.position, d, 1, 0};
    if (p->sets == NORMFUSE_SETS_BATCH)
        return (struct view){1, p->n, p->c * p->s, 0, p->x.batch, p->s, p->s, 0};
    if (d > 1)
        return (struct view){p->n, 1, p->c * p->s, p->x.batch, 0, d * p->s, p->s, 0};
    return (struct view){p->n, divide_up(p->s, width), p->c * width, p->x.batch, width, width, width, p->s};
}

static const char *refuse(const struct shape *shape)
{
    const struct normfuse_problem *const p = shape->problem;
    const struct view view = view_of(p, p->s);
    const bool is_adjacent = p->columns ? p->c == 1 || p->x.channel == 1
                                        : (p->s == 1 || p->x.position == 1) && (p->c == 1 || p->x.channel == p->s);
    if (!shape->short_offsets || !is_adjacent)
        return "channels, or positions of a sample, are not adjacent, or a block's are 2^31 bytes or more";
    /* 2x640x32x32 f16 5.5 us, here 10.0, backward 12.0, 23.7; 4x384x542 f16 4.2, 10.6; 2048x256x2x2 f16 17.6, 17.1. */
    if (shape->compact)
        return "others have vectors of 16 bytes for it";
    if (p->sets == NORMFUSE_SETS_BATCH && (is_modulated(p) || (p->columns && p->n > 1)))
        return "samples of batch norm are apart, or count each for itself";
    if (view.rows == 1 && view.length == 0)
        return "a norm group is one row";
    return (double)view.columns * (double)view.samples < INT32_MAX ? NULL : "blocks are too many";
}

/* Variants: widths of blocks times sizes of clusters times threads. */
enum { WIDTHS = 5, CLUSTERS = 5, THREADS = 4 };

static const char *configure(const struct shape *shape, struct step *step)
{
    enum { SLOTS_AT_ONCE = 4 };
    static const int64_t widths[WIDTHS] = {8, 16, 32, 64, 128}, threads_of[THREADS] = {64, 128, 256, 512};
    const int variant = step->variant;
    const int64_t parts = INT64_C(1) << variant % CLUSTERS, threads = threads_of[variant / CLUSTERS % THREADS];
    const struct view view = view_of(shape->problem, minimum(threads, shape->problem->s));
    const int64_t wanted = view.length > 0 ? 1 : widths[variant / CLUSTERS / THREADS], all = view.columns / view.group;
    const int64_t sets = minimum(maximum(1, wanted / view.group), all);
    const int64_t width = sets * view.group, at_once = minimum(threads / width, divide_up(view.rows, parts));
    if (parts > 1 && !shape->device->clusters)
        return "the device is older than 9.0";
    if (variant >= CLUSTERS * THREADS && sets == minimum(maximum(1, wanted / 2 / view.group), all))
        return "a narrower block has as many norm groups";
    if (sets > 32 || at_once == 0)
        return "a norm group is wider than a block, or a warp has too many";
    const int64_t part_rows = divide_up(view.rows, parts), slots = divide_up(part_rows, at_once);
    if (slots > vectors_of(shape, NORMFUSE_SCHEDULE_tile))
        return "registers do not hold its rows";
    if ((parts - 1) * part_rows >= view.rows)
        return "rows are fewer than blocks";
    const bool gives = shape->wants_gradients, by_channels = view.group == view.channel_columns;
    const int64_t samples = samples_of_cluster(shape, view.samples, parts), ranks = parts * maximum(1, samples);
    const int64_t blocks_wide = divide_up(view.columns, width), of_width = width / view.channel_columns;
    const int64_t bytes = (int64_t)normfuse_type_bytes(shape->problem->type);
    struct normfuse_cuda_geometry *const g = begin_step(step);
    struct normfuse_cuda_tile *const tile = &step->tile;
    step->launch.kernel = kernel_of(shape, NORMFUSE_SCHEDULE_tile);
    step->launch.threads = whole_warps(width * at_once);
    step->finds_gradients = samples > 0;
#define OF_VIEW(name) .name = (int32_t)view.name,
#define SET(name) .name = (int32_t)name,
    *tile = (struct normfuse_cuda_tile){
        OF_VIEW(rows) OF_VIEW(length) OF_VIEW(columns) OF_VIEW(group) OF_VIEW(channel_columns)
        SET(part_rows) SET(at_once) SET(width) SET(sets) SET(parts) SET(samples) SET(by_channels) SET(gives)
        .batch_bytes = view.sample * bytes,
        .tile_bytes = (view.length > 0 ? view.length : width) * bytes,
        .row_bytes = view.row * bytes,
        .slots = (int32_t)(divide_up(slots, SLOTS_AT_ONCE) * SLOTS_AT_ONCE),
        .lane_bits = lane_bits_of(sets, 32),
        .channel_bits = lane_bits_of(of_width, step->launch.threads),
        .by_ranks = divisor_of(ranks),
        .by_group = divisor_of(view.group),
        .by_channel_columns = divisor_of(view.channel_columns),
    };
#undef SET
#undef OF_VIEW
#define SAME(name) g->name = tile->name;
    SAME(rows) SAME(part_rows) SAME(width) SAME(lane_bits) SAME(parts)
#undef SAME
    g->blocks_wide = (int32_t)blocks_wide;
    g->group = (int32_t)group_of(shape->problem);
    g->all_block_groups = (int32_t)(view.samples * blocks_wide);
    g->all_samples = g->sums_by_channel = shape->problem->sets == NORMFUSE_SETS_BATCH;
    g->sum_slots = by_channels ? 1 : g->parts;
    step->launch.grid = view.samples * blocks_wide * parts;
    exchange_by_cluster(step, ranks);
    /* Shared memory: what each thread found, forward 4 values, backward 2, and once more where norm groups have several
     * channels; what the blocks of the cluster send one another of norm groups, and the first one of channels. */
    const int64_t values = shape->direction == BACKWARD ? 2 : 4;
    const int64_t senders = by_channels ? samples : samples > 0 ? ranks : 0;
    const int64_t found = width * at_once * (shape->direction == BACKWARD && !by_channels ? 2 : 1);
    const int64_t sent = (parts > 1 ? sets * parts : 0) + (senders > 1 ? of_width * senders : 0);
    step->launch.shared = (size_t)(values * (found + sent)) * shape->value_bytes;
    if (step->launch.shared + 1024 > shape->device->shared_per_block)
        return "shared memory does not hold its sums";
    return resident_blocks(shape, step) > 0 ? NULL : "no cluster of these blocks is resident";
}

/* Microseconds: one warp by itself, and as long again for each further one that its scheduler has; clusters meet; what
 * moves. The figures are fitted to 474 variants of 200 problems on an H200: the root of the mean square of the
 * logarithms is 13 %, and what is taken by them is 2 % slower than the best variant. */
static double estimate(const struct shape *shape, const struct step *step)
{
    enum { SCHEDULERS = 4 };
    static const struct {
        double first, value, joined;                   /* of one warp, of its threads' values, of what a lane joins */
        double further, further_value, further_joined; /* the same of each further one */
        double wave;                                   /* of `first`, for each further wave of blocks */
    } warp[2] = {{1.66, 0.031, 0.081, 0.286, 0.0, 0.036, 0.01}, {1.56, 0.018, 0.016, 0.25, 0.0, 0.0, 1.15}};
    const struct normfuse_cuda_tile *const tile = &step->tile;
    const int d = shape->direction;
    const double blocks = (double)step->launch.grid, multiprocessors = shape->device->multiprocessors;
    const double waves = ceil(blocks / (double)resident_blocks(shape, step));
    const double further = fmax(0.0, blocks * (step->launch.threads / 32.0) / (SCHEDULERS * multiprocessors) - 1.0);
    const double values =
        (double)divide_up(tile->part_rows, tile->at_once) * (is_rare(shape->problem->activation) ? 1.7 : 1.0);
    /* Lanes of a warp read sums of several norm groups from the same banks of shared memory, 128 bytes at a time. */
    const int64_t in_phase = d == FORWARD ? 8 : 16, of_group = (int64_t)tile->group * tile->at_once;
    const int64_t conflicts =
        minimum(maximum(1, in_phase >> tile->lane_bits), minimum(in_phase, of_group & -of_group));
    const double joined =
        (double)divide_up(of_group, INT64_C(1) << tile->lane_bits) * (1.0 + 0.69 * ((double)conflicts - 1.0));
    const double first = warp[d].first + warp[d].value * values + warp[d].joined * joined;
    const double others =
        further * (warp[d].further + warp[d].further_value * values + warp[d].further_joined * joined);
    const double meet = step->launch.cluster > 1 ? (0.34 + 0.116 * step->launch.cluster) * (1.0 + 0.78 * (waves - 1.0)) : 0.0;
    const double later = tile->gives && tile->samples == 0 ? 3.0 : 0.0;
    const double row = (double)tile->width * (double)normfuse_type_bytes(shape->problem->type);
    const double wasted = step->geometry.blocks_wide > 1 ? 1.0 + 11.0 / row : 1.0;
    return 1.3 + shape->bytes * wasted / 3.8e6 + first * (1.0 + warp[d].wave * (waves - 1.0)) + others + meet + later;
}

/* Batch norm of rows of a few values, which others have by vectors that belong to several: 64x2808x6 f16 28.2 us, here
 * 6.7. Instance norm with additions or of few channels: 16x3x6400 f32 with post_add 8.4, 5.0. */
static const char *refuse_rows(const struct shape *shape)
{
    enum { MAX_POSITIONS = 64, MAX_BYTES = 16 << 20 };
    const struct normfuse_problem *const p = shape->problem;
    const bool pays = p->sets == NORMFUSE_SETS_BATCH ? p->s <= MAX_POSITIONS
                                                     : has_additions(p) || p->n * p->c < shape->device->multiprocessors;
    if (!pays || shape->bytes > MAX_BYTES)
        return "others have vectors of 16 bytes for it";
    return refuse(shape);
}

#define TILE .name = "tile", .variants = WIDTHS * CLUSTERS * THREADS, .configure = configure, .estimate = estimate
const struct schedule normfuse_cuda_tile = {TILE, .refuse = refuse};
const struct schedule normfuse_cuda_tile_rows = {TILE, .refuse = refuse_rows, .in_order = true};
