/* SPDX-License-Identifier: MIT
 *
 * schedules_tile.c - the schedule of small norm groups of a few rows of adjacent values, of both layouts. */
#include "schedules.h"

/* Whether a set, or a channel where there are none, has rows of all samples; not where samples have parameters of their
 * own. */
static bool joins_samples(const struct normfuse_problem *p)
{
    const int64_t apart = p->weight.batch | p->bias.batch | p->dweight.batch | p->dbias.batch;
    return p->sets == NORMFUSE_SETS_BATCH || (p->sets == NORMFUSE_SETS_NONE && p->n > 1 && apart == 0);
}

/* What the kernel takes the tensors for: rows of adjacent columns; `width`: of rows that a norm group is cut into. */
static struct normfuse_cuda_tile tile_of(const struct normfuse_problem *p, int64_t width)
{
    enum { SHORT = 64 };
    const int64_t bytes = (int64_t)normfuse_type_bytes(p->type);
    const int32_t c = (int32_t)p->c, s = (int32_t)p->s, w = (int32_t)width;
    if (p->columns)
        return (struct normfuse_cuda_tile){.rows = s, .columns = c, .group = (int32_t)group_of(p), .channel_columns = 1,
                                           .batch_bytes = p->x.batch * bytes, .row_bytes = p->x.position * bytes};
    if (joins_samples(p))
        return (struct normfuse_cuda_tile){.rows = (int32_t)p->n, .columns = c * s, .group = s, .channel_columns = s,
                                           .row_bytes = p->x.batch * bytes};
    /* A block has several channels of few positions: affine of samples 5x608x4x4 bf16 backward 7.4 us, so 4.6. */
    if (p->sets == NORMFUSE_SETS_NONE && s <= SHORT)
        return (struct normfuse_cuda_tile){.rows = 1, .columns = c * s, .group = s, .channel_columns = s,
                                           .batch_bytes = p->x.batch * bytes};
    return (struct normfuse_cuda_tile){.rows = (int32_t)divide_up(s, w), .length = s, .columns = c * w, .group = w,
                                       .channel_columns = w, .batch_bytes = p->x.batch * bytes, .row_bytes = w * bytes};
}

/* Of which blocks have a part each. */
static int64_t samples_of(const struct normfuse_problem *p)
{
    return !p->columns && joins_samples(p) ? 1 : p->n;
}

static const char *refuse(const struct shape *shape)
{
    const struct normfuse_problem *const p = shape->problem;
    const bool joins = joins_samples(p);
    const bool is_adjacent = p->columns ? p->c == 1 || p->x.channel == 1
                                        : (p->s == 1 || p->x.position == 1) && (p->c == 1 || p->x.channel == p->s);
    if (!shape->short_offsets || !is_adjacent)
        return "values are not adjacent, or a block's are 2^31 bytes or more";
    /* 2x640x32x32 f16 5.5 us, here 10.0, backward 12.0, 23.7; 4x384x542 f16 4.2, 10.6; 2048x256x2x2 f16 17.6, 17.1. */
    if (fits_cluster(shape))
        return "others have vectors of 16 bytes for it";
    if (p->sets == NORMFUSE_SETS_NONE && is_modulated(p))
        return "it has no scale and shift";
    if (joins && p->columns && p->n > 1)
        return "samples are apart";
    if (p->columns ? p->s == 1 : joins ? p->n == 1 : group_of(p) > 1)
        return "a norm group is one row";
    return (double)p->c * (double)(p->columns ? 1 : p->s) * (double)samples_of(p) < INT32_MAX ? NULL
                                                                                              : "blocks are too many";
}

/* Variants: widths of blocks times sizes of clusters times threads. */
enum { WIDTHS = 5, CLUSTERS = 5, THREADS = 4 };

static const char *configure(const struct shape *shape, struct step *step)
{
    enum { SLOTS_AT_ONCE = 4 };
    static const int64_t widths[WIDTHS] = {8, 16, 32, 64, 128}, threads_of[THREADS] = {64, 128, 256, 512};
    const struct normfuse_problem *const p = shape->problem;
    const int variant = step->variant;
    const int64_t parts = INT64_C(1) << variant % CLUSTERS, threads = threads_of[variant / CLUSTERS % THREADS];
    struct normfuse_cuda_geometry *const g = normfuse_cuda_begin_step(step);
    struct normfuse_cuda_tile *const tile = &step->tile;
    *tile = tile_of(p, minimum(threads, p->s));
    const int64_t wanted = tile->length > 0 ? 1 : widths[variant / CLUSTERS / THREADS];
    const int64_t all = tile->columns / tile->group, sets = minimum(maximum(1, wanted / tile->group), all);
    const int64_t width = sets * tile->group, at_once = minimum(threads / width, divide_up(tile->rows, parts));
    if (variant >= CLUSTERS * THREADS && sets == minimum(maximum(1, wanted / 2 / tile->group), all))
        return "a narrower block has as many norm groups";
    const int64_t part_rows = divide_up(tile->rows, parts), slots = divide_up(part_rows, maximum(1, at_once));
    if (sets > 32 || at_once == 0 || slots > vectors_of(shape, NORMFUSE_SCHEDULE_tile) ||
        (parts - 1) * part_rows >= tile->rows)
        return "such blocks do not hold its rows, or are more than these";
    /* Slopes of prelu are summed by channel. */
    const bool by_channels = tile->group == tile->channel_columns && p->dslope.data == NULL;
    const bool gives = shape->wants_gradients;
    /* Results of given statistics wait for no sum; where parameters are of single samples, each finds its gradients. */
    const bool given = p->sets == NORMFUSE_SETS_NONE, joins = !given || shape->direction == BACKWARD;
    const int64_t samples = joins ? exchange_of_samples(shape, step, given ? 1 : samples_of(p), parts) : 0;
    const int64_t ranks = parts * maximum(1, samples);
    const int64_t blocks_wide = divide_up(tile->columns, width), of_width = width / tile->channel_columns;
    step->launch.kernel = normfuse_cuda_kernel_for(shape, NORMFUSE_SCHEDULE_tile);
    step->launch.threads = whole_warps(width * at_once);
    step->launch.grid = samples_of(p) * blocks_wide * parts;
#define SET(name) tile->name = (int32_t)name;
    SET(part_rows) SET(at_once) SET(width) SET(sets) SET(parts) SET(samples) SET(by_channels) SET(gives)
#undef SET
    tile->tile_bytes = (tile->length > 0 ? tile->length : width) * (int64_t)normfuse_type_bytes(p->type);
    tile->slots = (int32_t)(divide_up(slots, SLOTS_AT_ONCE) * SLOTS_AT_ONCE);
    tile->lane_bits = lane_bits_of(sets, 32);
    tile->channel_bits = lane_bits_of(of_width, step->launch.threads);
    tile->by_ranks = divisor_of(ranks);
    tile->by_blocks_wide = divisor_of(blocks_wide);
#define BY(name) tile->by_##name = divisor_of(tile->name);
    BY(parts) BY(width) BY(group) BY(channel_columns)
#undef BY
#define SAME(name) g->name = tile->name;
    SAME(rows) SAME(part_rows) SAME(width) SAME(lane_bits) SAME(parts)
#undef SAME
    g->blocks_wide = (int32_t)blocks_wide;
    g->group = (int32_t)group_of(p);
    g->all_block_groups = (int32_t)(samples_of(p) * blocks_wide);
    g->all_samples = g->sums_by_channel = joins_samples(p);
    g->sum_slots = by_channels ? 1 : g->parts;
    /* Shared memory: what each thread found, forward 4 values, backward 2, and once more where norm groups have several
     * channels; what the blocks of the cluster send one another of norm groups, and the first one of channels. */
    const int64_t values = shape->direction == BACKWARD ? 2 : 4;
    const int64_t senders = by_channels ? samples : samples > 0 ? ranks : 0;
    const int64_t found = width * at_once * (shape->direction == BACKWARD && !by_channels ? 2 : 1);
    const int64_t sent = (parts > 1 ? sets * parts : 0) + (senders > 1 ? of_width * senders : 0);
    step->launch.shared = (size_t)(values * (found + sent)) * shape->value_bytes;
    return resident_blocks(shape, step) > 0 ? NULL : "its blocks are not resident together";
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
    const int64_t conflicts = minimum(maximum(1, in_phase >> tile->lane_bits), minimum(in_phase, of_group & -of_group));
    const double joined =
        (double)divide_up(of_group, INT64_C(1) << tile->lane_bits) * (1.0 + 0.69 * ((double)conflicts - 1.0));
    const double first = warp[d].first + warp[d].value * values + warp[d].joined * joined;
    const double others =
        further * (warp[d].further + warp[d].further_value * values + warp[d].further_joined * joined);
    /* Doubles have fewer units: batch norm 63x6144x2x7 NHWC forward 119 us, in two passes 93. */
    const double doubles = d == FORWARD && shape->problem->type == NORMFUSE_F64 ? 1.6 : 1.0;
    const double cluster = step->launch.cluster;
    const double meet = cluster > 1.0 ? (0.34 + 0.116 * cluster) * (1.0 + 0.78 * (waves - 1.0)) : 0.0;
    const double later = tile->gives && tile->samples == 0 ? 3.0 : 0.0;
    const double row = (double)tile->width * (double)normfuse_type_bytes(shape->problem->type);
    const double wasted = step->geometry.blocks_wide > 1 ? 1.0 + 11.0 / row : 1.0;
    return 1.3 + shape->bytes * wasted / 3.8e6 + first * (1.0 + warp[d].wave * (waves - 1.0)) + others * doubles +
           meet + later;
}

/* Batch norm of rows of a few values, which others have by vectors that belong to several: 64x2808x6 f16 28.2 us, here
 * 6.7. Instance norm with additions or of few channels: 16x3x6400 f32 with post_add 8.4, 5.0. */
static const char *refuse_rows(const struct shape *shape)
{
    /* Many rows of whole vectors are faster in `block`: 45x845x4x12 f16 8.8 us, here 16; 23x384x64 6.0, 5.5. */
    enum { MAX_POSITIONS = 64, MAX_WHOLE = 2048, MAX_BYTES = 16 << 20 };
    const struct normfuse_problem *const p = shape->problem;
    const bool has_others = p->s > MAX_POSITIONS || (shape->wide && shape->plain && p->n * p->s > MAX_WHOLE);
    const bool few =
        has_additions(p) || p->activation == NORMFUSE_PRELU || p->n * p->c < shape->device->multiprocessors;
    const bool pays = p->sets == NORMFUSE_SETS_BATCH ? !has_others : few || p->sets == NORMFUSE_SETS_NONE;
    if (!pays || shape->bytes > MAX_BYTES)
        return "others have vectors of 16 bytes for it";
    return refuse(shape);
}

#define TILE                                                                                                           \
    .name = "tile", .needs = TAKES_GIVEN | TAKES_PRELU, .variants = WIDTHS * CLUSTERS * THREADS,                       \
    .configure = configure, .estimate = estimate
const struct schedule normfuse_cuda_tile = {TILE, .refuse = refuse};
const struct schedule normfuse_cuda_tile_rows = {TILE, .refuse = refuse_rows, .in_order = true};
