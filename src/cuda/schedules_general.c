/* SPDX-License-Identifier: MIT
 *
 * schedules_general.c - the two passes of the general kernels. general.cuh has the picture. */
#include "schedules.h"

enum {
    THREADS = 256,
    IN_LANE = 16,      /* sums that a lane joins, by docs/numerics.md */
    MAX_VECTORS = 512, /* of rows folded, which a block has whole */
    WIDEST = 64,       /* of others: 1 KB of a row */
    CACHE_LINE_BYTES = 128,
    SMALL_RESERVE = 2048, /* shared memory that a block has beside what layout.h places */
    USEFUL_L2 = 24 << 20  /* bytes of what is read twice that are still there, of which others make use, too */
};

/* Samples that a block's rows are parted by: one where those of all follow one another. */
static int64_t samples_of(const struct normfuse_problem *p)
{
    const bool is_one = p->columns && p->x.batch == p->s * p->x.position && is_countable(p->n * p->s);
    return takes_all_samples(p) && !is_one ? p->n : 1;
}

/* Columns: rows that a block's threads may share. */
static int64_t rows_of(const struct normfuse_problem *p)
{
    return takes_all_samples(p) && samples_of(p) == 1 ? p->n * p->s : p->s;
}

static bool is_one_sample(const struct normfuse_problem *p)
{
    return p->n == 1 || (takes_all_samples(p) && samples_of(p) == 1);
}

/* So many rows walked as one are whole words in all tensors; 0: none are. */
static int32_t words_folded(const struct normfuse_problem *p)
{
    const int64_t folded = 1 + p->c % 2;
    if (!p->columns || normfuse_type_bytes(p->type) != 2 || p->x.channel != 1 || !are_aligned(p, 4) ||
        (p->x.batch % 2 != 0 && !is_one_sample(p)))
        return 0;
    if (folded == 1)
        return p->x.position % 2 == 0;
    return p->x.position == p->c && rows_of(p) % folded == 0 ? (int32_t)folded : 0;
}

/* The same of vectors. Rows without gaps are one stretch, which may begin and end inside of vectors. */
static int32_t vectors_folded(const struct shape *shape)
{
    const struct normfuse_problem *const p = shape->problem;
    const int64_t vector = 16 / (int64_t)normfuse_type_bytes(p->type), folded = common_multiple(p->c, vector) / p->c;
    const bool is_stretch = p->x.position == p->c, begins_in_vectors = p->x.batch % vector != 0 && !is_one_sample(p);
    if (!p->columns || p->type == NORMFUSE_F64 || shape->device->general_alone || p->x.channel != 1 ||
        !are_aligned(p, 16) || p->x.batch < 0 || p->x.position < 0 || p->c * folded > INT32_MAX / 4 ||
        (double)p->n * (double)p->x.batch + (double)p->s * (double)p->x.position > 4e9 * (double)vector ||
        (!is_stretch && (folded > 1 || begins_in_vectors || p->x.position % vector != 0)))
        return 0;
    return (int32_t)folded;
}

/* The shape as these kernels see it: over columns a thread has the channels of a vector, of 16 bytes or a word of two
 * halves, and rows of other numbers of channels are folded to vectors. */
static struct shape general_of(const struct shape *shape)
{
    /* Where no block has whole rows, each row folded has sums of its own: group norm 191x637x17x24 f16 with post_add,
     * 51 of eight, 175 us by words, 276. */
    enum { MIN_ROWS = 128 };
    const struct normfuse_problem *const p = shape->problem;
    struct shape general = narrowed(shape);
    /* Small calls are over before blocks of many channels know these, backwards and forwards whose rows no block has
     * whole: batch norm 18x384x7x14 bf16 + post_add, of given statistics, backward 13.8 us, by words 8.8; 2x695x1496
     * bf16
     * + pre_add 27.8, 20.8. */
    const int32_t of_vectors = vectors_folded(shape), of_words = words_folded(p);
    const int vector = 16 / (int)normfuse_type_bytes(p->type);
    const bool is_joined = (of_vectors == 1 || p->c * of_vectors <= MAX_VECTORS * vector) && samples_of(p) == 1;
    const bool begins_late = (shape->direction == BACKWARD || !is_joined) && is_short_of_waves(shape);
    if (of_vectors > 0 && !begins_late && (is_joined || rows_of(p) >= MIN_ROWS * of_vectors)) {
        general.elements = vector;
        general.folded = of_vectors;
        general.unaligned_samples = p->x.batch % general.elements != 0 && !is_one_sample(p);
    } else if (of_words > 0) {
        general.elements = 2;
        general.folded = of_words;
    }
    return general;
}

/* Whether blocks have whole rows, of several folded, so that they join these. */
static bool has_whole_rows(const struct shape *general)
{
    return general->folded > 1 && !general->in_cache_lines && vectors_of_row(general) <= MAX_VECTORS;
}

/* Where blocks have a part of each row, the results of each begin and end with a cache line: affine 6x615x77282 f16
 * 481 us, then 429. Not of sums: a channel would have as many of each block as rows are folded. */
static void fold_to_cache_lines(struct shape *general)
{
    enum { MIN_ROWS = 64 };
    const struct normfuse_problem *const p = general->problem;
    const int64_t line = CACHE_LINE_BYTES / (int64_t)normfuse_type_bytes(p->type),
                  folded = common_multiple(p->c, line) / p->c;
    const bool begins_with_cache_lines = is_one_sample(p) || p->x.batch % line == 0;
    if (general->elements <= 2 || has_whole_rows(general) || vectors_of_row(general) <= WIDEST ||
        !begins_with_cache_lines || p->x.position != p->c || p->c * folded > INT32_MAX / 4 ||
        rows_of(p) < MIN_ROWS * folded)
        return;
    general->in_cache_lines = true;
    general->folded = (int32_t)folded;
}

static enum normfuse_cuda_schedule schedule_of(const struct shape *general)
{
    return general->elements > 2 ? NORMFUSE_SCHEDULE_general_vectors : NORMFUSE_SCHEDULE_general;
}

static int64_t largest_divisor(int64_t value, int64_t at_most)
{
    int64_t divisor = minimum(value, at_most);
    while (value % divisor != 0)
        divisor--;
    return divisor;
}

/* Vectors of a thread whose values one sum may have, by docs/numerics.md. Over columns each channel has four sums, of
 * words two, of vectors one. */
static int64_t max_vectors(const struct shape *shape)
{
    return shape->problem->columns ? 496 / minimum(shape->elements, 4)
                                   : 24 * (int64_t)(16 / normfuse_type_bytes(shape->problem->type));
}

/* How wide a block is and how many threads share each of its units. `joins`: groups of channels, over columns whole ones
 * (false: they are too wide), over rows also equal shares; `size`: vectors of a row (columns), or threads that share a
 * channel (rows). */
static bool choose_block(const struct shape *shape, struct normfuse_cuda_geometry *g, bool joins, int64_t size)
{
    const struct normfuse_problem *const p = shape->problem;
    const int64_t d = joins ? group_of(p) : 1;
    int64_t rows, all = p->c, width, group = d, lanes;
    if (p->columns) {
        const int64_t elements = rows_of(p) * p->c, wide = p->c * shape->folded;
        rows = divide_up(elements + (shape->unaligned_samples ? shape->elements - 1 : 0), wide);
        g->whole_rows = (int32_t)(elements / wide);
        g->rest = (int32_t)(elements % wide);
        all = vectors_of_row(shape);
        const int64_t unit =
            shape->in_cache_lines ? CACHE_LINE_BYTES / 16 : common_multiple(d, shape->elements) / shape->elements;
        if (unit > THREADS)
            return false;
        /* Equal blocks. */
        const int64_t units = all / unit, max_units = maximum(1, minimum(units, size / unit));
        width = unit * divide_up(units, divide_up(units, max_units));
        lanes = minimum(maximum(1, THREADS / width), maximum(1, rows));
    } else {
        rows = p->s;
        lanes = size;
        while (lanes > 1 && lanes / 2 >= rows)
            lanes /= 2;
        group = largest_divisor(d, maximum(1, THREADS / lanes));
        width = group < d ? group : group * maximum(1, minimum(p->c / group, THREADS / lanes / group));
    }
    set_width(shape, g, all, width, group, rows);
    g->unit_lanes = (int32_t)lanes;
    g->block_groups = g->passes = 1;
    return true;
}

/* Parts: `chunks` of each sample's rows times `stretches` of the samples, where all are walked through. */
static void part_block(const struct shape *shape, struct normfuse_cuda_geometry *g, int64_t chunks, int64_t stretches)
{
    g->part_rows = (int32_t)divide_up(g->rows, maximum(1, chunks));
    g->parts_a_sample = (int32_t)divide_up(g->rows, g->part_rows);
    const int64_t samples = samples_of(shape->problem);
    g->part_samples = (int32_t)divide_up(samples, maximum(1, stretches));
    g->parts = g->parts_a_sample * (int32_t)divide_up(samples, g->part_samples);
    g->sum_slots = g->parts * copies_of(g);
}

static int64_t vectors_of_thread(const struct normfuse_cuda_geometry *g)
{
    return divide_up(g->part_rows, g->unit_lanes) * g->part_samples;
}

static int32_t whole_spreads(int64_t entries)
{
    return (int32_t)(divide_up(entries, NORMFUSE_SPREAD) * NORMFUSE_SPREAD);
}

/* What follows from a block's width, lanes and parts. False: it does not fit. */
static bool settle(const struct shape *shape, struct step *step, bool sums, bool applies)
{
    struct normfuse_cuda_geometry *const g = &step->geometry;
    const struct normfuse_problem *const p = shape->problem;
    const int64_t channels = g->width * (int64_t)shape->elements, groups = channels / g->group;
    const bool backward = shape->direction == BACKWARD;
    step->launch.kernel = normfuse_cuda_kernel_for(shape, schedule_of(shape));
    step->launch.threads = whole_warps((int64_t)g->width * g->unit_lanes);
    step->launch.grid = (int64_t)g->all_block_groups * g->parts;
    const int64_t vectors = vectors_of_thread(g), ahead = vectors_of(shape, schedule_of(shape));
    if (sums && vectors > max_vectors(shape))
        return false;
    const int64_t joined = p->columns && g->blocks_wide == 1 ? g->folded : 1;
    set_joins(shape, g, groups / joined, channels / joined, step->launch.threads,
              p->columns && !shape->unaligned_samples);
    struct normfuse_general_sizes *const of = &g->general;
    const int32_t of_unit = backward ? shape->elements : shape->elements >> g->subvector_bits;
    of->entries = sums ? whole_spreads(g->width * (int64_t)g->unit_lanes * of_unit) : 0;
    of->channels = applies || backward ? whole_spreads(channels) : 0;
    /* Where a kernel sums alone, what it does not read of the tensors. */
    const bool spares = !applies && (backward ? reads_du(shape) : p->post_add.data != NULL);
    const int tensors = normfuse_cuda_tensors_of(shape) - spares;
    of->slot = schedule_of(shape) == NORMFUSE_SCHEDULE_general ? 0 : tensors * (int32_t)step->launch.threads;
    of->pipeline = of->slot * (int32_t)ahead;
    const struct normfuse_general_layout at = normfuse_lay_out_general(of, (int32_t)shape->value_bytes, backward);
    const bool has_slopes = p->activation == NORMFUSE_PRELU && of->channels > 0;
    step->launch.shared = has_slopes ? (size_t)at.slopes + (size_t)of->channels * shape->value_bytes : (size_t)at.bytes;
    return step->launch.shared + SMALL_RESERVE <= shape->device->shared_per_block;
}

static const char *refuse(const struct shape *shape)
{
    return shape->run ? "two_pass does it" : shape->plain ? "others take what nothing is added to" : NULL;
}

/* The `size` of choose_block() where blocks need not have whole norm groups. */
static int64_t size_of_pass(const struct shape *shape)
{
    enum { SECTOR_BYTES = 32 };
    const struct normfuse_problem *const p = shape->problem;
    /* Of rows that do not begin where a sector of memory does, adjacent threads read more. */
    const bool in_sectors = p->x.position * (int64_t)normfuse_type_bytes(p->type) % SECTOR_BYTES == 0;
    if (shape->elements > 2)
        return has_whole_rows(shape) ? vectors_of_row(shape) : WIDEST;
    if (p->columns)
        return maximum(in_sectors ? 32 : 512 / (int64_t)vector_bytes(shape), THREADS / maximum(1, rows_of(p)));
    /* Threads that share a channel have some vectors each. */
    int64_t size = 1;
    while (2 * size <= minimum(THREADS, divide_up(p->s, 8)))
        size *= 2;
    return size;
}

static double estimate(const struct shape *shape, const struct step *step)
{
    (void)step;
    const double reads = shape->tensor_bytes * normfuse_cuda_tensors_of(shape);
    const double writes = shape->tensor_bytes * normfuse_cuda_results_of(shape);
    /* The sums of a forward are of x alone; over rows the factor has that. */
    const bool reads_once = shape->problem->columns && shape->direction == FORWARD && shape->problem->post_add.data != NULL;
    const double first = reads - (reads_once ? shape->tensor_bytes : 0.0);
    const double again = reads <= USEFUL_L2 ? 0.35 : 1.0 - 0.65 * USEFUL_L2 / reads;
    /* Of doubles: batch norm 151x1600x38 NCHW with both additions 277 us, in one kernel 219. */
    const double factor = !shape->problem->columns              ? 2.0
                          : shape->problem->type == NORMFUSE_F64 ? 1.5
                                                                 : 1.15;
    /* Of small problems: 4x320x32x32 f16 NHWC with post_add 12.5 us, backward 20.3. */
    static const double starts[2][2] = {{14.0, 20.0}, {11.5, 22.0}};
    double start = starts[shape->problem->columns][shape->direction];
    /* Few channels leave little to join: 18x8x21x45 f16 NHWC 17.6 us, 7x157x3x5x5 25.2. */
    if (shape->problem->columns && shape->direction == BACKWARD)
        start = fmin(start, 17.0 + 0.05 * (double)shape->problem->c);
    /* A rare derivative is found in both passes: 10x1024x52x22 f32 NHWC with gelu_tanh 119 us, in one kernel, whose few
     * warps wait for it, 171. */
    const double derivative = shape->direction == BACKWARD && is_rare(shape->problem->activation) ? 1.3 : 1.0;
    /* Sums that are joined by a later kernel. */
    const double joined = shape->direction == FORWARD ? 2e-4 * (double)sets_of(shape->problem) : 0.0;
    /* Each sample has blocks of its own, as many as its channels are wide: [199463, 91] bf16 backward 2341 us;
     * 64x4096x4x4, two groups, bf16 with pre_add backward 129, in clusters 44. */
    if (shape->problem->columns && !takes_all_samples(shape->problem)) {
        static const double resident[2] = {768.0, 512.0}, wave[2] = {4.0, 7.0}; /* threads a multiprocessor, us */
        const struct shape general = general_of(shape);
        struct normfuse_cuda_geometry g = {0};
        choose_block(&general, &g, false, size_of_pass(&general));
        const double threads = (double)g.all_block_groups * g.width * g.unit_lanes;
        const double waves = threads / (resident[shape->direction] * shape->device->multiprocessors);
        start += short_waves(shape, waves, wave[shape->direction]);
    }
    return start + joined + (reads + first * again + writes) * factor * derivative /
                       shape->policy->bytes_a_microsecond;
}

const struct schedule normfuse_cuda_general = {
    .name = "general", .needs = TAKES_BIAS | TAKES_PRELU | IS_GENERAL, .refuse = refuse, .estimate = estimate};

/* Some waves of blocks, of threads that have a few vectors at least and no sums of too many. */
static void part_batches(const struct shape *shape, struct normfuse_cuda_geometry *g, bool sums)
{
    const struct normfuse_problem *const p = shape->problem;
    const int64_t samples = samples_of(p), of_sample = divide_up(g->rows, g->unit_lanes);
    const int64_t ahead = vectors_of(shape, NORMFUSE_SCHEDULE_general);
    /* Words of forwards: 28x977x4 f16 evaluation 4.1 us, with 32 of them 4.6. */
    const int64_t fewest = shape->elements > 1 && shape->direction == FORWARD ? 16 : (p->columns ? 4 : 2) * ahead;
    const int64_t max_of_thread = minimum(max_vectors(shape), p->columns ? 256 : 96);
    static const int64_t blocks[2][2] = {{16, 4}, {12, 6}}; /* of results and of sums: a multiprocessor */
    const int64_t blocks_wanted = blocks[p->columns][sums] * shape->device->multiprocessors;
    const int64_t all = of_sample * samples * g->all_block_groups;
    int64_t of_thread =
        maximum(divide_up(all, blocks_wanted), minimum(fewest, divide_up(all, 2 * shape->device->multiprocessors)));
    of_thread = minimum(of_thread, max_of_thread);
    if (of_sample >= of_thread)
        part_block(shape, g, divide_up(of_sample, of_thread), samples);
    else
        part_block(shape, g, 1, divide_up(samples, maximum(1, of_thread / of_sample)));
    while (sums && vectors_of_thread(g) > max_vectors(shape))
        part_block(shape, g, 2 * (int64_t)g->parts_a_sample, samples);
}

/* Whole waves of blocks: of sums as few as can be, of results up to sixteen. A block takes some microseconds before its
 * first result, so threads have a few vectors each, where there are as many. Sums of forwards have a block on each
 * multiprocessor, which is enough for all that memory gives, and a quarter of the parts to join: batch norm
 * 128x2048x7x7 bf16 + add NHWC 64 us, then 51. */
static void part_pipelines(const struct shape *shape, struct step *step, bool sums)
{
    enum { MAX_WAVES = 16 };
    struct normfuse_cuda_geometry *const g = &step->geometry;
    const int64_t few = shape->direction == FORWARD ? 12 : 8, multiprocessors = shape->device->multiprocessors;
    const int64_t samples = samples_of(shape->problem), of_sample = divide_up(g->rows, g->unit_lanes);
    const int64_t fit = maximum(1, resident_blocks(shape, step));
    const int64_t resident = sums && shape->direction == FORWARD ? minimum(fit, multiprocessors) : fit;
    const int64_t all = of_sample * samples * g->all_block_groups;
    /* Little leaves no multiprocessor without a block: evaluation of 8x2048x7x7 bf16 NHWC + post_add 8.3 us, then 6.9;
     * batch norm 43609x6 f16 13.8, 12.4. */
    const int64_t least = all < few * multiprocessors ? 4 : few;
    int64_t waves = sums ? 1 : maximum(1, minimum(MAX_WAVES, all / (4 * few * resident))), parts;
    do {
        parts = minimum(maximum(1, waves++ * resident / g->all_block_groups), divide_up(of_sample * samples, least));
        /* Where few multiprocessors would have one block more than the rest, none has: group norm 2x349x12x24x32 bf16
         * NHWC of one channel each, 192 blocks 28.8 us, 132 26.7. */
        const int64_t blocks = parts * g->all_block_groups, more = blocks % multiprocessors;
        const int64_t fewer = (blocks - more) / g->all_block_groups;
        if (blocks < resident && 8 * more < 5 * multiprocessors &&
            10 * fewer * g->all_block_groups > 9 * (blocks - more))
            parts = fewer;
        part_block(shape, g, maximum(1, parts / samples), samples);
    } while (sums && vectors_of_thread(g) > max_vectors(shape));
    if (sums) /* whole turns */
        part_block(shape, g, divide_up(g->rows, divide_up(g->part_rows, g->unit_lanes) * g->unit_lanes), samples);
}

/* Blocks of so many vectors of a row, or threads that share a channel. */
static bool pass(const struct shape *shape, struct step *step, bool sums, bool applies, int64_t size)
{
    enum { OF_THREAD = 64 }; /* vectors, of which no sum has too many */
    const struct normfuse_problem *const p = shape->problem;
    struct normfuse_cuda_geometry *const g = &step->geometry;
    *step = (struct step){0};
    const bool joins = sums && !applies && p->sets == NORMFUSE_SETS_GROUP && shape->direction == FORWARD &&
                       shape->folded == 1 && !shape->unaligned_samples;
    if (!joins || !choose_block(shape, g, true, size))
        choose_block(shape, g, false, size);
    if (sums && copies_of(g) < g->folded)
        g->unit_lanes = (int32_t)minimum(g->unit_lanes, IN_LANE / g->folded * 32);
    if (shape->elements > 2) {
        /* Fewer threads have room for what passes of many tensors. */
        for (;; g->unit_lanes /= 2) {
            part_block(shape, g, divide_up(g->rows, OF_THREAD * (int64_t)g->unit_lanes), samples_of(p));
            if (settle(shape, step, sums, applies))
                break;
            if (g->unit_lanes == 1)
                return false;
        }
        part_pipelines(shape, step, sums);
    } else {
        part_batches(shape, g, sums);
    }
    g->interleaved = p->columns && (sums || shape->elements <= 2);
    g->backwards = !sums;
    g->stores_dz = stores_dz(shape, sums, applies);
    return settle(shape, step, sums, applies);
}

bool normfuse_cuda_pass_general(const struct shape *given, struct step *step, bool sums, bool applies)
{
    struct shape general = general_of(given);
    if (!sums)
        fold_to_cache_lines(&general);
    int64_t size = size_of_pass(&general);
    while (!pass(&general, step, sums, applies, size)) {
        /* Fewer vectors of a row have room for what passes of them. */
        if (general.elements <= 2 || size < 4)
            return false;
        size = size > WIDEST ? WIDEST : size / 2;
    }
    return true;
}
