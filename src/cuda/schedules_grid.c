/* SPDX-License-Identifier: MIT
 *
 * schedules_grid.c - columns: the whole grid holds samples, one block a multiprocessor. */
#include "schedules.h"

enum {
    /* 2x320x64x64 f16 NHWC with SiLU backward, one block of 320 a multiprocessor 13.6 us, two of 160 15.2. */
    GRID_THREADS = 320,
    L2_KEPT_BYTES = 32 << 20,   /* that the L2 is to keep */
    L2_AGAIN_BYTES = 200 << 20, /* that is read again, above which the L2 may keep what it likes */
    MAX_ENTRIES = 20,           /* that a lane joins, by docs/numerics.md; */
    GROUP_LANES = 8             /* of a group */
};

/* Shared memory of a block, `stages` bytes of which are a pipeline's. */
static int64_t bytes_of_grid(const struct shape *shape, const struct normfuse_cuda_geometry *g, int64_t stages,
                             int64_t at_once)
{
    const int32_t channels = g->width * shape->elements, groups = (int32_t)shape->problem->groups,
                  rows = (int32_t)at_once;
    const bool backward = shape->direction == BACKWARD;
    return shape->batch ? normfuse_lay_out_batch((int32_t)stages, channels, rows, backward).bytes
                        : normfuse_lay_out_grid((int32_t)stages, g->width, groups, rows,
                                                shape->wants_gradients ? channels : 0, backward)
                              .bytes;
}

static const char *refuse_pipeline(const struct shape *shape)
{
    const struct normfuse_problem *const p = shape->problem;
    return !shape->device->clusters          ? "the device is older than 9.0"
           : !shape->has_grid_barriers       ? "there is no sync memory"
           : !(shape->tiled || shape->batch) ? "it takes whole vectors, with parameters that can be read in vectors"
           : p->x.position != p->c           ? "rows are not adjacent in memory"
           : shape->direction == BACKWARD && is_modulated(p)        ? "it has no gradient of scale and shift"
           : shape->direction == FORWARD && p->pre_add.data != NULL ? "forward nothing is added to x"
           : output_of(p) == NULL                                   ? "it writes y or dx"
                                                                    : NULL;
}

/* Entries of a group or, of batch norm, of a channel that a lane joins. */
static int64_t joined_entries(const struct shape *shape, const struct normfuse_cuda_geometry *g, int64_t at_once)
{
    return shape->batch ? divide_up(at_once, INT64_C(1) << g->lane_bits)
                        : divide_up(max_vectors_of_group(shape, g->group) * at_once, GROUP_LANES);
}

/* The sums of the samples' blocks meet through the grid. */
static const char *share_grid(const struct shape *shape, struct step *step, int64_t block_groups, int64_t parts,
                              int64_t part_rows, int64_t at_once)
{
    struct normfuse_cuda_geometry *const g = &step->geometry;
    const bool gives = shape->wants_gradients;
    g->part_rows = (int32_t)part_rows;
    g->parts = g->parts_a_sample = (int32_t)parts;
    g->block_groups = step->of.grid.block_groups = (int32_t)block_groups;
    g->by_subvectors = divisor_of(g->group);
    step->at_once = (int32_t)at_once;
    step->launch.grid = block_groups * parts;
    /* Batch norm joins what the gradients need anyway. */
    step->finds_gradients = true;
    g->sums_by_channel = gives || shape->batch;
    g->sum_slots = shape->batch ? 0 : (int32_t)step->launch.grid;
    g->contributors = gives && !shape->batch ? (int32_t)step->launch.grid : 0;
    return exchange_by_grid(shape, step);
}

/* Group norm by the whole grid, a block a multiprocessor, `rounds` samples one after the other, or batch norm. */
static bool settle_grid(const struct shape *shape, struct step *step, int64_t rounds)
{
    /* A block has all vectors of a row. */
    const struct normfuse_problem *const p = shape->problem;
    struct normfuse_cuda_geometry *const g = begin_columns(shape, step, vectors_of_row(shape), group_of(p));
    /* Values that a thread sums before it joins them to what it had; what the kernels have in shared memory beside what
     * is requested. */
    enum { MAX_STAGES = 32, MAX_SUMMED = 64, MAX_TILES = 160, STATIC_BYTES = 1024 };
    /* Vectors of a tile for each thread: 2x320x64x64 f16 NHWC with SiLU backward of 4 13.6 us, of 2 14.1, of 8 13.5. */
    static const int32_t tile_slots[2] = {8, 4};
    const int64_t block_groups = divide_up(p->n, rounds);
    int64_t parts = shape->device->multiprocessors / block_groups;
    if (block_groups >= MAX_BLOCK_GROUPS || parts < 2 || g->width > GRID_THREADS)
        return false;
    int64_t part_rows = divide_up(g->rows, parts);
    const int64_t at_once = minimum(GRID_THREADS / g->width, part_rows);
    const uint32_t consumers = whole_warps(at_once * g->width);
    if (shape->batch)
        g->lane_bits = lane_bits_of((int64_t)g->width * shape->elements, consumers);
    if (joined_entries(shape, g, at_once) > MAX_ENTRIES)
        return false;
    const int64_t room = (int64_t)shape->device->shared_per_block - STATIC_BYTES - bytes_of_grid(shape, g, 0, at_once);
    const int64_t max_slots = shape->additions ? NORMFUSE_CUDA_PASSING_AHEAD : tile_slots[shape->direction];
    const int64_t slots = minimum(max_slots, divide_up(part_rows, at_once));
    const int64_t tile_rows = slots * at_once, stage_bytes = tile_rows * g->width * 16 * shape->tensors;
    int64_t tiles = divide_up(part_rows, tile_rows);
    const int64_t stages = minimum(minimum(tiles, MAX_STAGES), room / stage_bytes);
    /* What a thread joins one after the other, in each tile and then of tiles, is bounded by docs/numerics.md. */
    if (stages < minimum(tiles, p->pre_add.data != NULL ? tiles : 2) ||
        tiles > (shape->direction == FORWARD ? 16 * (MAX_SUMMED / slots) : MAX_TILES))
        return false;
    struct normfuse_cuda_grid *const of = &step->of.grid;
    of->interleaved = stages < tiles && block_groups == 1;
    const int64_t all = divide_up(g->rows, tile_rows);
    if (of->interleaved) {
        tiles = divide_up(all, parts);
        part_rows = tiles * tile_rows;
    } else {
        parts = divide_up(g->rows, part_rows);
    }
    of->first_parts = (int32_t)(of->interleaved ? all - (tiles - 1) * parts : parts);
    of->lacking_rows = (int32_t)((of->interleaved ? all * tile_rows : parts * part_rows) - g->rows);
    step->launch.kernel =
        normfuse_cuda_kernel_for(shape, shape->batch ? NORMFUSE_SCHEDULE_grid_pipeline_batch
                                                     : NORMFUSE_SCHEDULE_grid_pipeline);
    step->launch.threads = consumers + 32;
    step->without_vectors = 32;
    of->small_part_rows = (int32_t)(part_rows - tile_rows);
    of->stages = (int32_t)stages;
    of->chunk_tiles = (int32_t)maximum(1, MAX_SUMMED / slots);
    /* What is read again last, since it is in L2 still; of much more than that some of what is protected is lost. */
    const int64_t turn_bytes = block_groups * parts * stage_bytes;
    of->l2_tiles = (tiles - stages) * turn_bytes <= L2_AGAIN_BYTES ? (int32_t)(L2_KEPT_BYTES / turn_bytes) : 0;
    of->by_tile = divisor_of(tile_rows);
    of->by_turn = divisor_of(parts * tile_rows);
    step->launch.shared = (size_t)bytes_of_grid(shape, g, stages * stage_bytes, at_once);
    return share_grid(shape, step, block_groups, parts, part_rows, at_once) == NULL;
}

/* The fewest rounds in which the pipeline holds the samples' parts; if none does, a sample at a time. */
static const char *configure_pipeline(const struct shape *shape, struct step *step)
{
    const int64_t n = shape->problem->n;
    for (int64_t rounds = 1; rounds <= n; rounds++)
        if ((rounds == 1 || divide_up(n, rounds) < divide_up(n, rounds - 1)) && settle_grid(shape, step, rounds) &&
            ((int64_t)step->of.grid.stages * step->of.grid.by_tile.divisor >= step->geometry.part_rows ||
             step->geometry.block_groups == 1))
            return NULL;
    return "no number of samples at a time fits the stages";
}

/* Blocks join the groups of a sample so many at a time, 8 lanes each, first what their threads and then what all parts
 * found: group norm 1x928x2254 f32 NHWC of 464 groups 40.3 us, by `split` 14.5; 2x2016x9x10x22 f16 of 288
 * backward 53.3, 36.2. */
static double estimate_joins(const struct shape *shape, const struct step *step)
{
    enum { PARTS_AT_ONCE = 72 };
    static const double begin = 0.15, sweep = 0.9; /* microseconds */
    const int64_t at_once = (int64_t)(step->launch.threads - step->without_vectors) / GROUP_LANES;
    const int64_t turns = divide_up(shape->problem->groups, at_once) - 1;
    return shape->batch ? 0.0
                        : (double)turns * (begin + sweep * (double)divide_up(step->geometry.parts, PARTS_AT_ONCE));
}

/* The memory's time, what is read again, and what blocks wait for one another. */
static double estimate_pipeline(const struct shape *shape, const struct step *step)
{
    /* Times the memory's time, all and what is read again beside that; microseconds that blocks wait for one another,
     * for each channel, for batch norm once more and for its channels, and for each further round of one sample. */
    static const double AGAIN = 0.85;
    /* For each further round of any: 142x96x2x6x4 bf16 NHWC backward, three, 14.3 us, in `cluster` 8.7. */
    static const double ROUND = 1.2;
    /* Where something is added, times all of it, and microseconds: 128x1024x14x14 bf16 NHWC 74.2 us, in two
     * passes 87.7; backward 130 and 146; 32x1024x14x14 26.6, in `split` 24.6. */
    static const struct {
        double factor, wait;
    } added[2] = {{1.0, 1.8}, {1.2, 0.0}};
    static const struct {
        double stretch, wait, channel, batch, batch_channel, round;
    } of[2] = {{1.22, 5.5, 0.0, 2.0, 0.0022, 8.5}, {1.15, 8.0, 0.0013, 0.5, 0.0007, 5.5}};
    const int d = shape->direction;
    const struct normfuse_cuda_geometry *const g = &step->geometry;
    const double n = (double)shape->problem->n, rounds = (double)divide_up(shape->problem->n, g->block_groups);
    const double tiles = ceil((double)g->part_rows / step->of.grid.by_tile.divisor);
    const double again = fmax(0.0, tiles - step->of.grid.stages) / tiles;
    /* Of what moves at least, the part that is read twice: post_add where dz is not left. */
    const double moved = normfuse_cuda_tensors_of(shape) + normfuse_cuda_results_of(shape);
    const bool rereads = d == BACKWARD && reads_post(shape) && !stores_dz(shape, true, false);
    const double reads = (shape->tensors + rereads) / moved, bytes = shape->tensor_bytes * moved;
    const double busy = (double)step->launch.grid / shape->device->multiprocessors * n / (rounds * g->block_groups);
    const double channels = (double)g->width * shape->elements;
    const double time = bytes * (of[d].stretch + reads * AGAIN * again) / (shape->policy->bytes_a_microsecond * busy) +
                        of[d].wait + channels * of[d].channel +
                        (shape->batch ? of[d].batch + channels * of[d].batch_channel : 0.0) +
                        (of[d].round / g->block_groups + ROUND) * (rounds - 1.0) + rounds * estimate_joins(shape, step);
    return shape->additions ? time * added[d].factor + added[d].wait : time;
}

const struct schedule normfuse_cuda_grid_pipeline = {.name = "grid_pipeline",
                                                     .needs = TAKES_ADDITIONS,
                                                     .refuse = refuse_pipeline,
                                                     .configure = configure_pipeline,
                                                     .estimate = estimate_pipeline};
