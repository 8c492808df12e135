/* SPDX-License-Identifier: MIT
 *
 * schedules_lines.c - the schedule of small norm groups whose values are adjacent in memory, of both layouts. */
#include "schedules.h"

enum { MAX_LANES = 512, WARP_BITS = 5, USUAL_VALUES = 4096, VALUES_AT_ONCE = 4 };

static int64_t values_of_line(const struct shape *shape)
{
    return group_of(shape->problem) * shape->problem->s;
}

/* A line as its kernels see it. Those of long lines are of f32. Words are for long lines and for many values, since a
 * thread has twice as many of them: 46x1376x231 f16 backward 85.9 us, in words 55.2; 84x1472x44, 46 groups,
 * f16 46.4, 33.4; 8x1408x40, 88, 11.4, 13.9. For yet more where it has a weight for each: 228002x480 f16 backward 463
 * us, 264; 2608x1888, 32, bf16 with three additions 34.6, 50.4; 34531x384, six, with mish backward 77.7, 91.5. */
struct line {
    enum normfuse_cuda_schedule schedule;
    enum normfuse_cuda_kernel kernel;
    int64_t elements, vectors; /* of a vector; of the line, which may begin and end inside of one */
    int64_t held;              /* vectors of a thread */
};

static struct line line_of(const struct shape *shape)
{
    const struct normfuse_problem *const p = shape->problem;
    const double many = (double)(p->s > 1 ? 1 << 14 : 1 << 17) * shape->device->multiprocessors;
    const bool in_words = normfuse_type_bytes(p->type) == 2 && are_aligned(p, 4) &&
                          (shape->tensor_bytes >= 2.0 * many || values_of_line(shape) > USUAL_VALUES);
    const bool backward = shape->direction == BACKWARD;
    struct line line = {.schedule = NORMFUSE_SCHEDULE_lines, .elements = in_words ? 2 : 1};
    line.vectors = divide_up(values_of_line(shape) + (p->x.batch & (line.elements - 1)), line.elements);
    line.kernel = normfuse_cuda_kernel_of(p->columns, line.schedule, backward, p->type, in_words);
    line.held = normfuse_cuda_kernel_table[line.kernel].vectors;
    if (line.vectors > MAX_LANES * line.held && p->type == NORMFUSE_F32) {
        line.schedule = NORMFUSE_SCHEDULE_lines_long;
        line.kernel = normfuse_cuda_kernel_of(p->columns, line.schedule, backward, p->type, in_words);
        line.held = normfuse_cuda_kernel_table[line.kernel].vectors;
    }
    return line;
}

/* Of x, which all tensors are like. */
static bool is_adjacent(const struct normfuse_problem *p)
{
    const int64_t d = group_of(p);
    if (!p->columns || p->s == 1)
        return (p->columns || p->x.position == 1) && (d == 1 || p->x.channel == p->s);
    return p->groups == 1 && p->x.channel == 1 && p->x.position == p->c;
}

/* Whether other schedules have no vectors of 16 bytes for this, or are slow with them. */
static bool pays(const struct shape *shape)
{
    enum { FEW_VECTORS_OF_SEVERAL = 16, FEW_VALUES = 512, LITTLE_VALUES = 128, LITTLE = 8 << 20 };
    const struct normfuse_problem *const p = shape->problem;
    const bool forward = shape->direction == FORWARD, rows = !p->columns, is_row = rows && group_of(p) == 1;
    const bool adds = has_additions(p) || p->activation == NORMFUSE_PRELU;
    const int64_t values = values_of_line(shape);
    if (is_row && p->s > FEW_VALUES && normfuse_cuda_refused(&normfuse_cuda_tile_rows, shape) == NULL)
        return false;
    /* Vectors are the better way for long rows that are norm groups: 1x2500x200 f16 10.0 us, by vectors 8.0; x100 f32
     * 3.8, 5.8. Of unaligned ones 2x1024x33x17 f16 15.2, 7.2; 18x768x18x6 bf16 10.4, 20.4. */
    /* Of 16 bits parts of warps are, too, where they are many: 226x873x176 f16 138.9 us, by vectors 93.6; 234x1024x32
     * 29.1, 20.6. */
    const bool many = forward && (p->s >= 64 || (p->s >= 32 && shape->tensor_bytes >= LITTLE));
    if (is_row && shape->elements == 8 && !shape->unaligned && many &&
        normfuse_cuda_takes(&normfuse_cuda_lanes_of_rows, shape))
        return false;
    if (is_row && shape->plain)
        return p->s <= (shape->unaligned ? (forward ? FEW_VALUES : 3 * FEW_VALUES / 2) : forward ? 200 : 128);
    /* Of several channels of unaligned vectors: 16x1024x686, 256 groups, bf16 90.1 us, by vectors 30.5; 32x512x49, 32,
     * f16 9.6, 7.3; backward 70x4096x56, 64, bf16 99.5, 80.0; 256x768x8, 8, f16 18.7, 39.2; 160x313x9, one, 12.9, 21.6. */
    const int vector = 16 / (int)normfuse_type_bytes(p->type);
    if (rows && shape->plain && shape->unaligned)
        return forward ? p->s < 4 * vector || values <= FEW_VALUES
                       : p->s < 2 * vector || (p->s < FEW_VECTORS_OF_SEVERAL * vector && values <= 4 * FEW_VALUES);
    /* Additions, and slopes of prelu, over rows: instance norm 18x463x2100 f32 279 us, other ways 130; 2x2016x1078 bf16
     * 40.8, 24.4. */
    if (p->type == NORMFUSE_F64 || (!shape->wide && !(rows && adds)))
        return true;
    /* instance norm 35x512x48x24 with both additions 197 us, by vectors of 16 bytes 94; but little takes one kernel less
     * time than three: 63x3x8x6x16, one group, f16 with both 10.7 us in two passes. In general kernels each sample has
     * blocks of its own, so [33751, 4096] with pre_add takes 8000 us backward there. Short rows:
     * 121x8192x5, eight groups, f32 with post_add backward 65, by vectors 123. */
    if (adds) {
        const double moved = shape->tensor_bytes * (normfuse_cuda_tensors_of(shape) + normfuse_cuda_results_of(shape));
        return values <= FEW_VALUES || (p->columns ? p->s == 1 : p->s < 2 * vector || moved <= LITTLE);
    }
    /* Norm groups of several rows that are little have a block each where parts of a warp are too many for them:
     * 132x832x2x4x3, 416 groups, bf16 68.2 us, by lines 13.0; 24x384x4x4, 96, 5.7, 4.0. */
    if (rows && forward)
        return values <= LITTLE_VALUES && !normfuse_cuda_takes(&normfuse_cuda_lanes_of_rows, shape);
    /* The backward of rows goes through its channels one after the other. */
    if (rows)
        return p->s < FEW_VECTORS_OF_SEVERAL * shape->elements;
    /* Whole blocks for each sample: of rows that are walked as one; and of what `lanes` does not take, since no part of
     * a warp holds a norm group of vectors: 12751x704, two groups, f32 backward 62.8 us, by clusters 335; 8192x1024,
     * four, 64.2, 312. */
    /* Rows of more than 512 vectors are too wide for a block of whole ones, and in two passes each sample has blocks of
     * its own: 256x6144, one group, bf16 242 us, by lines 12; 200x3072 f32 with four backward 32, 17; 37x8192 with two
     * 59, 20. */
    const bool is_wide = p->c > 512 * shape->elements;
    /* And what kernels of vectors have no derivative for: 300x2048, 32 groups, f16 with GELU backward 84.7 us, by lines
     * 26.3; 8x512, four, 11.7, 6.5. */
    const bool lacks_derivative = !forward && is_rare(p->activation);
    const bool is_of_lanes = shape->few_rows && group_of(p) <= 32 * shape->elements;
    return (shape->folded > 1 && values <= FEW_VALUES) ||
           (p->s == 1 && !is_of_lanes &&
            (is_wide || lacks_derivative || p->n > 4 * (int64_t)shape->device->multiprocessors));
}

static const char *refuse(const struct shape *shape)
{
    const struct normfuse_problem *const p = shape->problem;
    if (p->sets != NORMFUSE_SETS_GROUP || p->n > INT32_MAX / 8)
        return "it takes group norm of fewer than 2^28 samples";
    if (!shape->short_offsets || !is_adjacent(p))
        return "values are not adjacent, or a block's are 2^31 bytes or more";
    const struct line line = line_of(shape);
    if (line.vectors > MAX_LANES * line.held)
        return "norm groups are too large, or too few";
    /* 26x617x4x3 f32 NHWC backward 19.7 us, in two passes 15.0. */
    if (values_of_line(shape) > USUAL_VALUES && p->n * p->groups < shape->device->multiprocessors)
        return "norm groups are too large, or too few";
    /* Their sums over samples are of one rstd, not of one scale. */
    if (shape->direction == BACKWARD &&
        (p->dscale.data != NULL || p->dshift.data != NULL || (shape->wants_gradients && p->scale.data != NULL)))
        return "gradients of single samples are wanted";
    return pays(shape) ? NULL : "others have vectors of 16 bytes for it";
}

/* A block of `threads` has `width` adjacent lines of each of `samples` at a time, `rounds` times; `parts` blocks have the
 * same channels. */
struct block {
    int64_t threads, width, samples, blocks_wide, parts, rounds;
    double used; /* the part of its threads that have a line */
};

/* `at_most` parts, of which each has as many rounds; more where a thread would sum too many samples. `evenly`: a thread's
 * words begin in the same place of each of its samples. */
static void part_block(const struct shape *shape, struct block *block, int64_t at_most, bool evenly)
{
    enum { MAX_SUMMED = 128 }; /* samples of a thread in its sums of positions, by docs/numerics.md */
    const int64_t rounds = divide_up(shape->problem->n, block->samples);
    const int64_t fewest = shape->wants_gradients ? divide_up(rounds, MAX_SUMMED) : 1;
    block->parts = divide_up(rounds, divide_up(rounds, minimum(rounds, maximum(fewest, at_most))));
    if (evenly && block->parts * block->samples % 2 != 0 && block->parts < rounds)
        block->parts++;
    block->rounds = divide_up(rounds, block->parts);
}

/* Whether blocks that have all samples of their channels find the gradients. */
static bool spares_kernel(const struct shape *shape, const struct block *block)
{
    return shape->wants_gradients && shape->problem->dslope.data == NULL && block->parts == 1;
}

static int64_t row_bytes(const struct shape *shape, const struct block *block)
{
    return block->width * values_of_line(shape) * (int64_t)normfuse_type_bytes(shape->problem->type);
}

/* Microseconds: of each round, which waits for the memory and moves what it has, of further waves, and of the kernel for
 * the gradients. The figures are fitted to 250 blocks of 64 problems on an H100: what is taken by them is 0.7 % slower
 * than the best. */
static double time_of_block(const struct shape *shape, const struct block *block, int64_t resident, int bits)
{
    static const double ROUND = 0.6, MEETING = 1.0, ADDED = 0.3, WAVE = 1.0, MOVING = 1.25, NARROW = 40.0, IDLE = 0.25,
                        GRADIENTS = 1.5;
    const struct normfuse_problem *const p = shape->problem;
    const double row = (double)row_bytes(shape, block), narrow = 1.0 + NARROW / row * sqrt(NARROW / row);
    const double blocks = (double)(block->blocks_wide * block->parts), running = fmin(blocks, (double)resident);
    const double all = blocks / running, waves = all < 4.0 ? ceil(all) : all;
    const int tensors = normfuse_cuda_tensors_of(shape) + normfuse_cuda_results_of(shape);
    const double moved = running * (double)block->samples * row * narrow * tensors;
    /* The warps of a line meet: 316x907 bf16 backward of six rounds 11.8 us, of four 10.8. */
    const double round = ROUND + (bits > WARP_BITS ? MEETING : 0.0) +
                         ADDED * ((p->pre_add.data != NULL) + reads_post(shape)) +
                         MOVING * moved / shape->policy->bytes_a_microsecond;
    const double sums = 2.0 * 16.0 * (double)(block->parts * p->c); /* bytes, written and read */
    const double gradients = GRADIENTS + sums / shape->policy->l2_bytes_a_microsecond;
    return (waves - 1.0) * WAVE + waves * (double)block->rounds * round * (1.0 + IDLE * (1.0 - block->used)) +
           (shape->wants_gradients && !spares_kernel(shape, block) ? gradients : 0.0);
}

/* The block of the least time: 33 lines of four threads leave half of 128 threads without one. Narrow ones have more
 * samples, and leave fewer sums of each channel. */
static struct block find_block(const struct shape *shape, struct step *step, int bits, size_t bytes_a_thread,
                               bool evenly)
{
    enum { WARP = 32, FEWEST = 64, USUAL = 128, MOST = 256, NARROWEST = 128 };
    static const double gain = 1.03; /* of what is not usual */
    const struct normfuse_problem *const p = shape->problem;
    const int64_t unit = maximum(WARP, INT64_C(1) << bits), usual = maximum(USUAL, unit);
    const bool gives = shape->wants_gradients;
    struct block best = {0};
    double least = INFINITY;
    for (int64_t threads = maximum(FEWEST, unit); threads <= maximum(MOST, unit); threads += unit) {
        step->launch.threads = (uint32_t)threads;
        step->launch.shared = bytes_a_thread * (size_t)threads;
        const int64_t resident = maximum(1, resident_blocks(shape, step));
        for (int64_t lines = threads >> bits; lines > 0; lines = gives ? lines / 2 : 0) {
            struct block block = {.threads = threads, .blocks_wide = divide_up(p->groups, lines)};
            block.width = divide_up(p->groups, block.blocks_wide);
            block.samples = minimum((threads >> bits) / block.width, p->n);
            block.used = (double)(p->groups * block.samples) / (double)(block.blocks_wide * (threads >> bits));
            /* 9175x64, two groups, f16 backward with rows of 128 bytes 15.6 us, of 64 22.1; narrower ones may yet spare the
             * kernel: 24x4096, 256, bf16 11.9, 5.6. */
            const bool is_narrow = lines < threads >> bits && row_bytes(shape, &block) < NARROWEST;
            const int64_t most = minimum(p->n, maximum(1, resident / block.blocks_wide));
            for (int64_t parts = most; parts > 0; parts = gives ? parts / 2 : 0) {
                part_block(shape, &block, parts, evenly);
                if (is_narrow && block.parts > 1)
                    continue;
                const double time = time_of_block(shape, &block, resident, bits) * (threads != usual ? gain : 1.0);
                if (time < least) {
                    least = time;
                    best = block;
                }
            }
        }
    }
    return best;
}

static const char *configure(const struct shape *shape, struct step *step)
{
    enum { FEW_SLOTS = 2, FEW_THREADS = 256 };
    const struct normfuse_problem *const p = shape->problem;
    const struct line line = line_of(shape);
    const int64_t d = group_of(p);
    /* Threads of a line: as few as hold it in `wanted` slots each, within a warp, else in all; more where there are too
     * few lines for the device. */
    const int64_t wanted = p->type == NORMFUSE_F64 ? minimum(4, line.held) : line.held;
    const int64_t few = (int64_t)FEW_THREADS * shape->device->multiprocessors;
    int bits = bits_for(divide_up(line.vectors, line.held));
    bits = (int)maximum(bits, minimum(bits_for(divide_up(line.vectors, wanted)), WARP_BITS));
    while (bits < WARP_BITS && line.vectors > (int64_t)FEW_SLOTS << bits && p->n * p->groups << bits < few)
        bits++;
    const int64_t values = divide_up(line.vectors, INT64_C(1) << bits) * line.elements;
    struct normfuse_cuda_geometry *const g = normfuse_cuda_begin_step(step);
    step->launch.kernel = line.kernel;
    g->segment_rows = (int32_t)(divide_up(values, VALUES_AT_ONCE) * VALUES_AT_ONCE);
    /* A pair for each value; of prelu its slope, and what it adds to the gradient of that. */
    const size_t a_value = p->activation != NORMFUSE_PRELU ? 2 : shape->direction == FORWARD ? 3 : 4;
    const size_t bytes_a_thread = (size_t)(g->segment_rows + 1) * a_value * shape->value_bytes;
    const struct block block = find_block(shape, step, bits, bytes_a_thread, line.elements > 1 && p->x.batch % 2 != 0);
    step->launch.threads = (uint32_t)block.threads;
    step->launch.shared = bytes_a_thread * (size_t)block.threads;
    g->all_block_groups = (int32_t)(p->n * p->groups);
    g->rows = g->part_rows = (int32_t)values_of_line(shape);
    g->lane_bits = bits;
    g->sets_a_block = (int32_t)block.samples;
    g->width = (int32_t)block.width;
    g->blocks_wide = (int32_t)block.blocks_wide;
    g->group = g->outer = (int32_t)d;
    g->spans = (int32_t)p->s;
    g->sums_by_channel = 1;
    g->parts = g->sum_slots = (int32_t)block.parts;
    step->finds_gradients = spares_kernel(shape, &block);
    g->contributors = step->finds_gradients;
    step->launch.grid = block.blocks_wide * block.parts;
    return NULL;
}

const struct schedule normfuse_cuda_lines = {.name = "lines",
                                             .needs = TAKES_PRELU,
                                             .refuse = refuse,
                                             .configure = configure,
                                             .estimate = normfuse_cuda_estimate_once,
                                             .in_order = true};
