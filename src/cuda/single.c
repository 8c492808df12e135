/* SPDX-License-Identifier: MIT
 *
 * single.c - which calls the body `single` takes, with which geometry, in how many microseconds: device/single.cuh. */
#include "schedules.h"

/* A norm group as rows of adjacent values, and where the others are. Strides are in elements. */
struct matrix {
    int32_t statistics, parameters; /* as in the signature */
    int64_t rows, columns, values;
    int64_t row_stride, group_stride, sample_stride;
    int64_t groups, samples, group_channels;
    bool is_spread;  /* columns are spread over blocks */
    bool per_sample; /* weights are a sample's own */
};

static bool has_samples_of_their_own(const struct normfuse_problem *p)
{
    return (p->weight.batch | p->bias.batch | p->dweight.batch | p->dbias.batch) != 0;
}

static bool has_parameters_of_samples(const struct normfuse_problem *p)
{
    return has_samples_of_their_own(p) || is_modulated(p) || (p->pre_bias.data != NULL && p->pre_bias.batch != 0);
}

/* Returns why the call is none of these. */
static const char *describe(const struct normfuse_problem *p, struct matrix *m)
{
    const int64_t d = group_of(p);
    const bool none = p->sets == NORMFUSE_SETS_NONE;
    const bool apart = none && has_parameters_of_samples(p); /* samples are walked one after the other */
    const bool joins_samples = p->sets == NORMFUSE_SETS_BATCH || (none && !apart);
    const bool is_adjacent = p->columns ? p->c == 1 || p->x.channel == 1 : p->s == 1 || p->x.position == 1;
    if (!is_adjacent)
        return "values are not adjacent";
    *m = (struct matrix){.statistics = none ? p->evaluate ? NORMFUSE_STATISTICS_RUNNING : NORMFUSE_STATISTICS_NONE
                                            : NORMFUSE_STATISTICS_GROUP,
                         .values = p->set_values,
                         .groups = p->c,
                         .samples = 1,
                         .group_channels = 1,
                         .per_sample = has_samples_of_their_own(p)};
    if (!p->columns && joins_samples) {
        m->rows = p->n;
        m->row_stride = p->x.batch;
    } else if (!p->columns) {
        m->rows = d;
        m->row_stride = p->x.channel;
        m->parameters = d > 1 ? NORMFUSE_PARAMETERS_OF_ROW : NORMFUSE_PARAMETERS_OF_GROUP;
        m->groups = p->c / d;
        m->group_channels = d;
    } else {
        m->rows = p->s;
        m->row_stride = p->x.position;
        m->parameters = NORMFUSE_PARAMETERS_OF_COLUMN;
    }
    if (!p->columns) {
        m->columns = p->s;
        m->group_stride = p->x.channel * d;
    } else if (p->sets == NORMFUSE_SETS_GROUP && (d > 1 || is_of_single(p))) {
        m->columns = m->group_stride = m->group_channels = d;
        m->groups = p->groups;
    } else {
        m->columns = p->c;
        m->is_spread = true;
        m->statistics = none ? m->statistics : NORMFUSE_STATISTICS_COLUMN;
    }
    if (p->columns && joins_samples && p->n > 1)
        return "samples are apart";
    if (!joins_samples) {
        m->samples = p->n;
        m->sample_stride = p->x.batch;
    }
    return NULL;
}

/* Elements of the widest vector that all rows of all tensors are whole numbers of. */
static int64_t whole_vector(const struct normfuse_problem *p, const struct matrix *m, int64_t columns)
{
    const int64_t bytes = (int64_t)normfuse_type_bytes(p->type);
    uintptr_t places = 0;
#define PLACE(name) places |= (uintptr_t)p->name.data;
    NORMFUSE_CUDA_TENSORS(PLACE)
#undef PLACE
    int64_t strides = columns;
    if (m->rows > 1)
        strides |= m->row_stride;
    if (m->groups > 1 && !m->is_spread)
        strides |= m->group_stride;
    if (m->samples > 1)
        strides |= m->sample_stride;
    int64_t elements = 16 / bytes;
    while (elements > 1 && (strides % elements != 0 || places % (uintptr_t)(elements * bytes) != 0))
        elements /= 2;
    return elements;
}

/* Whether a thread reads parameters of so many adjacent channels at once. */
static bool is_packed(const struct normfuse_parameter *of, int64_t elements, int64_t group_channels)
{
    const int64_t bytes = (int64_t)normfuse_type_bytes(of->type), at_once = minimum(16, bytes * elements);
    return of->data == NULL ||
           (of->channel == 1 && (intptr_t)of->data % at_once == 0 && of->batch * bytes % at_once == 0 &&
            group_channels * bytes % at_once == 0);
}

/* The next number of vectors that a kernel has room for: a kernel for each number would be as many compilations. */
static int64_t room_for(int64_t vectors)
{
    static const int64_t rooms[] = {1, 2, 3, 4, 6, 8, 12, 16, 24, 32};
    for (size_t i = 0; i < sizeof rooms / sizeof *rooms; i++)
        if (vectors <= rooms[i])
            return rooms[i];
    return 0;
}

/* A candidate: how a norm group is given to threads. */
struct geometry {
    int64_t vector, lanes, across, beside, sample_bits, parts, walkers;
    bool aligned;
    /* What follows from these. */
    int64_t part_rows, part_columns, next_rows, next_columns;
    int64_t held_rows, held_columns, blocks;
    bool exact, exchanges;
};

static int64_t block_columns(const struct geometry *g)
{
    return g->across * g->held_columns * g->vector;
}

/* Values of a thread that its registers hold. */
static int64_t max_values(const struct shape *shape)
{
    const int64_t value_bytes = (int64_t)shape->value_bytes, bytes = (int64_t)normfuse_type_bytes(shape->problem->type);
    if (shape->direction == FORWARD)
        return bytes == 2 ? 64 : 128 / value_bytes;
    return bytes == 2 ? 32 : 96 / value_bytes;
}

/* Sets of weights that a thread has. */
static double weights_of(const struct matrix *m, const struct geometry *g)
{
    return (double)(m->parameters == NORMFUSE_PARAMETERS_OF_COLUMN ? g->held_columns * g->vector
                    : m->parameters == NORMFUSE_PARAMETERS_OF_ROW  ? g->held_rows
                                                                   : 1);
}

/* Registers of a thread, about: fitted to what NVRTC 13.0 gave 600 signatures on sm_90a. */
static double registers_of(const struct shape *shape, const struct matrix *m, const struct geometry *g)
{
    static const struct {
        double word, value, weight; /* of the vectors as they are in memory, of their values, of a weight */
    } registers[2] = {{0.88, 0.44, 2.0}, {1.33, 1.3, 3.9}};
    const double elements = (double)(g->held_rows * g->held_columns * g->vector);
    const double words = elements * (double)normfuse_type_bytes(shape->problem->type) / 4.0;
    const double values = elements * (double)shape->value_bytes / 4.0;
    const int d = shape->direction;
    /* A block that walks over samples keeps the sums of its channels, and requests the next sample ahead. */
    const bool walks = g->walkers << g->sample_bits < m->samples;
    const double kept = d == BACKWARD && walks ? registers[d].word * words + 2.0 * weights_of(m, g) : 0.0;
    return 27.0 + registers[d].word * words + registers[d].value * values +
           registers[d].weight * weights_of(m, g) + kept;
}

/* Returns why it does not hold a norm group. */
static const char *complete(const struct shape *shape, const struct matrix *m, struct geometry *g)
{
    enum { MAX_SUMMED = 128 };
    const int64_t down = g->lanes / g->across;
    g->part_rows = m->rows;
    g->part_columns = m->columns;
    if (g->parts > 1) {
        if (m->rows > 1 && (m->rows >= g->parts * down || m->parameters != NORMFUSE_PARAMETERS_OF_GROUP ||
                            m->columns < g->parts * g->across * g->vector))
            g->part_rows = g->next_rows = divide_up(m->rows, g->parts);
        else if (m->parameters != NORMFUSE_PARAMETERS_OF_COLUMN && g->aligned)
            g->part_columns = g->next_columns = divide_up(divide_up(m->columns, g->parts), g->vector) * g->vector;
        else
            return "a norm group is not that many parts";
        if (g->next_rows * (g->parts - 1) >= m->rows || g->next_columns * (g->parts - 1) >= m->columns)
            return "parts would be empty";
    }
    const int64_t before = g->aligned ? 0 : g->vector - 1;
    const int64_t row_vectors = divide_up(m->is_spread ? g->across * g->vector : g->part_columns + before, g->vector);
    if (m->is_spread)
        g->part_columns = g->across * g->vector;
    g->held_columns = room_for(divide_up(row_vectors, g->across));
    g->held_rows = room_for(divide_up(g->part_rows, down));
    if (g->held_columns == 0 || g->held_rows == 0 ||
        g->held_columns * g->held_rows * g->vector > max_values(shape))
        return "a thread would hold too much";
    const int64_t samples_beside = INT64_C(1) << g->sample_bits, groups_beside = g->beside / samples_beside;
    /* Of a channel, one after the other, where it has gradients: docs/numerics.md. */
    const int64_t samples = divide_up(m->samples, samples_beside * g->walkers);
    if (shape->direction == BACKWARD && samples > 1 &&
        samples + g->held_rows * g->held_columns * g->vector > MAX_SUMMED)
        return "a thread would sum too many samples";
    const int64_t group_blocks =
        m->is_spread ? divide_up(m->columns, block_columns(g)) : divide_up(m->groups, groups_beside);
    g->blocks = group_blocks * g->walkers * g->parts;
    if (g->blocks >= INT32_MAX)
        return "blocks are too many";
    const bool fills_rows =
        down * g->held_rows == g->part_rows && g->part_rows * (g->next_rows > 0 ? g->parts : 1) == m->rows;
    const bool fills_columns =
        m->is_spread ? m->columns % block_columns(g) == 0
                     : block_columns(g) == g->part_columns &&
                           g->part_columns * (g->next_columns > 0 ? g->parts : 1) == m->columns;
    g->exact = g->aligned && fills_rows && fills_columns && g->walkers * samples_beside == m->samples &&
               (m->is_spread || m->groups % groups_beside == 0);
    g->exchanges =
        g->parts > 1 && m->statistics != NORMFUSE_STATISTICS_NONE && m->statistics != NORMFUSE_STATISTICS_RUNNING;
    return registers_of(shape, m, g) > 1.15 * fmin(255.0, 65536.0 / (double)maximum(256, g->lanes * g->beside))
               ? "a thread would hold too much"
               : NULL;
}

/* Whether one block of those that share a norm group has the sums of all of a channel. */
static bool has_whole_channels(const struct shape *shape, const struct matrix *m, const struct geometry *g)
{
    const bool knows_totals = g->exchanges && shape->problem->dslope.data == NULL &&
                              (m->parameters == NORMFUSE_PARAMETERS_OF_GROUP ||
                               m->statistics == NORMFUSE_STATISTICS_COLUMN);
    return g->parts == 1 || knows_totals || (m->parameters == NORMFUSE_PARAMETERS_OF_ROW && g->next_rows > 0);
}

static int32_t gradients_of(const struct shape *shape, const struct matrix *m, const struct geometry *g)
{
    const struct normfuse_problem *const p = shape->problem;
    if (shape->direction == FORWARD || (!shape->wants_gradients && p->dslope.data == NULL))
        return NORMFUSE_GRADIENTS_NONE;
    if (is_modulated(p) || m->per_sample)
        return NORMFUSE_GRADIENTS_OF_SAMPLES;
    const bool has_samples = g->walkers == 1 && m->statistics != NORMFUSE_STATISTICS_COLUMN;
    const bool has_parts = has_whole_channels(shape, m, g);
    if ((has_samples || m->samples == 1) && has_parts && p->dslope.data == NULL)
        return NORMFUSE_GRADIENTS_DIRECT;
    const bool is_group = p->sets == NORMFUSE_SETS_GROUP;
    const bool each_sample = m->samples > 1 && g->sample_bits == 0 && g->walkers == m->samples;
    if (each_sample || (is_group && m->statistics == NORMFUSE_STATISTICS_COLUMN))
        return NORMFUSE_GRADIENTS_OF_SAMPLES;
    return is_group ? NORMFUSE_GRADIENTS_NORMALIZED : NORMFUSE_GRADIENTS_OF_CHANNELS;
}

static bool is_direct(int32_t gradients)
{
    return gradients == NORMFUSE_GRADIENTS_DIRECT || gradients == NORMFUSE_GRADIENTS_NONE;
}

/* Bytes of dynamic shared memory, as single.cuh parts it. */
static int64_t shared_of(const struct shape *shape, const struct matrix *m, const struct geometry *g, int32_t gradients)
{
    enum { MAX_PARTS = 16 };
    const int64_t value = (int64_t)shape->value_bytes, down = g->lanes / g->across, columns = block_columns(g);
    int64_t bytes = 0;
    if (m->statistics == NORMFUSE_STATISTICS_COLUMN)
        bytes = value * columns * (2 * down + 4 + (g->exchanges ? 2 * MAX_PARTS : 0) + 1);
    else if (g->exchanges)
        bytes = value * 2 * MAX_PARTS;
    if (gradients != NORMFUSE_GRADIENTS_NONE) {
        const bool by_columns = m->parameters == NORMFUSE_PARAMETERS_OF_COLUMN;
        const int64_t weights = by_columns                                       ? down * columns
                                : m->parameters == NORMFUSE_PARAMETERS_OF_ROW ? g->held_rows * down
                                                                                 : 1;
        bytes = maximum(bytes, value * g->beside * weights * (shape->problem->dslope.data != NULL ? 3 : 2));
    }
    return bytes;
}

/* Microseconds. The first blocks of the multiprocessors wait for what a thread does, for the block, for those that share a
 * norm group, and for memory. Of those that follow, waits and memory's time overlap where a multiprocessor has several
 * blocks at once. The figures are fitted to 2000 geometries of 190 problems on an H200, together with those of `held`:
 * what is taken takes 1.06 of the fastest. */
static double cost_of(const struct shape *shape, const struct matrix *m, const struct geometry *g, int32_t gradients,
                      int64_t shared)
{
    static const struct {
        double value[2], costly, edges, thread[2], vector, weight, spilled; /* instructions; two: forward and backward */
        double instruction, warp, cluster, cluster_block, columns, column_rows, column_bytes, join; /* latency */
        double issued, sectors, narrow[2], bandwidth, results, gang, overlap, start, sample, later;
    } k = {.value = {2.3, 4.14},
           .costly = 1.12,
           .edges = 2.73,
           .thread = {74.1, 70.7},
           .vector = 11.0,
           .weight = 9.1,
           .spilled = 13.0,
           .instruction = 0.00465,
           .warp = 0.0377,
           .cluster = 0.703,
           .cluster_block = 0.0206,
           .columns = 0.17,
           .column_rows = 0.111,
           .column_bytes = 0.000097,
           .join = 0.017,
           .issued = 0.000303,
           .sectors = 0.738,
           .narrow = {0.00514, 0.00915},
           .bandwidth = 1.455,
           .results = 0.236,
           .gang = 0.0362,
           .overlap = 1.51,
           .start = 1.0,
           .sample = 0.791,
           .later = 1.2};
    const struct normfuse_problem *const p = shape->problem;
    const int d = shape->direction;
    const double threads = (double)(g->lanes * g->beside), multiprocessors = shape->device->multiprocessors;
    const double bytes = (double)normfuse_type_bytes(p->type), down = (double)(g->lanes / g->across);
    const double wanted = registers_of(shape, m, g), most = fmin(255.0, 65536.0 / fmax(256.0, threads));
    const double registers = 8.0 * ceil(fmax(24.0, fmin(wanted, most)) / 8.0);
    const double by_shared = floor(227.0 * 1024.0 / (double)(shared + 1024));
    const double resident =
        fmax(1.0, fmin(fmin(floor(65536.0 / (threads * registers)), by_shared), fmin(32.0, floor(2048.0 / threads))));
    const double vectors = (double)(g->held_rows * g->held_columns), elements = (double)g->vector;
    const bool is_costly = p->activation == NORMFUSE_SILU || is_rare(p->activation);
    const double instructions =
        k.thread[d] +
        vectors * (k.vector + elements * k.value[d] * (1.0 + k.costly * is_costly) * (1.0 + k.edges * !g->aligned)) +
        k.weight * (m->parameters == NORMFUSE_PARAMETERS_OF_GROUP ? 0.0 : weights_of(m, g)) +
        k.spilled * fmax(0.0, wanted - most);
    const double warps = ceil(threads / 32.0);
    double wait = k.instruction * instructions;
    if (g->lanes > 32)
        wait += k.warp * (warps - 1.0);
    if (g->exchanges)
        wait += k.cluster + k.cluster_block * (double)g->parts;
    if (m->statistics == NORMFUSE_STATISTICS_COLUMN)
        wait += k.columns + k.column_rows * down / 32.0 + k.column_bytes * (double)shared;
    const double samples = (double)divide_up(divide_up(m->samples, INT64_C(1) << g->sample_bits), g->walkers);
    wait *= 1.0 + k.sample * (samples - 1.0);
    const double arithmetic = k.issued * samples * (double)g->blocks * warps / multiprocessors * instructions;
    /* What is adjacent of a row is read in sectors of 32 bytes, and the less is adjacent the slower is memory. */
    const double columns = m->is_spread ? INFINITY : (double)m->columns;
    const bool of_columns = m->parameters == NORMFUSE_PARAMETERS_OF_COLUMN;
    const bool adjoins = m->row_stride == m->columns && g->held_columns == 1 && elements * (double)g->across >= columns;
    const double adjacent = adjoins ? (double)g->across * elements * down * bytes
                                    : fmin((double)g->across * elements, columns) * bytes;
    const double sectors = (32.0 * ceil(adjacent / 32.0) + (g->aligned ? 0.0 : 16.0)) / adjacent;
    const double moved = shape->tensor_bytes * (tensors_of(shape) + results_of(shape));
    /* Small tensors lie in the L2, to which it is all the same. */
    const double narrow = of_columns && adjoins
                              ? 0.0
                              : k.narrow[of_columns] * fmin(1.0, moved / 40e6) * (fmax(1.0, 8192.0 / adjacent) - 1.0);
    const double shared_by = g->exchanges ? k.gang * log2((double)g->parts) : 0.0;
    const double stretch = (1.0 + shared_by) * (1.0 + k.results * (results_of(shape) - 1));
    const double bandwidth = k.bandwidth * shape->policy->bytes_a_microsecond;
    const double memory =
        stretch * hypot(moved * (1.0 + k.sectors * (sectors - 1.0) + narrow) / bandwidth, arithmetic);
    const double turns = fmax(1.0, ceil((double)g->blocks / (resident * multiprocessors)));
    const double overlap = resident > 1.0 ? k.overlap : 1.0;
    const double further = (turns - 1.0) * pow(pow(memory / turns, overlap) + pow(wait, overlap), 1.0 / overlap);
    /* Sums of channels that the threads of a block join one after the other, once. */
    const bool joins = gradients != NORMFUSE_GRADIENTS_NONE && m->statistics != NORMFUSE_STATISTICS_COLUMN &&
                       (of_columns || g->sample_bits > 0);
    const double joined = joins ? (double)(INT64_C(1) << g->sample_bits) * (of_columns ? down : 1.0) : 0.0;
    /* Sums that a later kernel joins go to memory and back. */
    const double slots = (has_whole_channels(shape, m, g) ? 1.0 : (double)g->parts) *
                         (double)(gradients == NORMFUSE_GRADIENTS_OF_SAMPLES ? m->samples : g->walkers);
    const double to_memory =
        is_direct(gradients) ? 0.0 : k.later + 32.0 * slots * (double)p->c / shape->policy->bytes_a_microsecond;
    return k.start + wait + memory / turns + further + k.join * joined + to_memory;
}

static void make_signature(const struct shape *shape, const struct matrix *m, const struct geometry *g,
                           int32_t gradients, struct normfuse_cuda_signature *to)
{
    const struct normfuse_problem *const p = shape->problem;
    const bool backward = shape->direction == BACKWARD, given = m->statistics == NORMFUSE_STATISTICS_NONE ||
                                                                m->statistics == NORMFUSE_STATISTICS_RUNNING;
    const bool updates = p->has_running_momentum && p->sets == NORMFUSE_SETS_BATCH;
    const bool by_columns = m->parameters == NORMFUSE_PARAMETERS_OF_COLUMN;
    bool packed = by_columns;
#define PACKED(name) packed = packed && is_packed(&p->name, g->vector, m->is_spread ? g->vector : m->group_channels);
    PACKED(weight) PACKED(bias) PACKED(scale) PACKED(shift) PACKED(pre_bias) PACKED(slope)
    if (p->evaluate) {
        PACKED(running_mean) PACKED(running_var)
    }
    if (backward && m->statistics == NORMFUSE_STATISTICS_COLUMN) {
        PACKED(mean) PACKED(rstd)
    }
#undef PACKED
    *to = normfuse_cuda_signature_of(NORMFUSE_BODY_single, backward, p);
    to->statistics = m->statistics;
    to->parameters = m->parameters;
    to->vector = (int32_t)g->vector;
    to->aligned = g->aligned;
    to->threads = (int32_t)(g->lanes * g->beside);
    to->lanes = (int32_t)g->lanes;
    to->across = (int32_t)g->across;
    to->held_columns = (int32_t)g->held_columns;
    to->held_rows = (int32_t)g->held_rows;
    to->exact = g->exact;
    to->walks = g->walkers << g->sample_bits < m->samples;
    to->split = g->parts > 1;
    to->shared_by_cluster = g->exchanges;
    to->exchanges = g->exchanges ? NORMFUSE_EXCHANGE_IN_CLUSTER : NORMFUSE_EXCHANGE_IN_BLOCK;
    to->joins_beside = g->sample_bits > 0;
    to->packed_parameters = packed;
    to->per_sample = m->per_sample;
    to->updates_running = updates;
    to->keeps_statistics = p->has_running_momentum && p->sets == NORMFUSE_SETS_GROUP;
    to->gradients = gradients;
    if (given)
        to->mean = to->rstd = 0;
    if (!p->evaluate && !updates)
        to->running_mean = to->running_var = 0;
    if (gradients != NORMFUSE_GRADIENTS_DIRECT)
        to->dweight = to->dbias = 0;
}

static void fill(const struct shape *shape, const struct matrix *m, const struct geometry *g, struct step *step)
{
    const struct normfuse_problem *const p = shape->problem;
    const int32_t gradients = gradients_of(shape, m, g);
    const bool of_samples = gradients == NORMFUSE_GRADIENTS_OF_SAMPLES;
    const int32_t part_slots = has_whole_channels(shape, m, g) ? 1 : (int32_t)g->parts;
    *step = (struct step){
        .launch = {.threads = (uint32_t)(g->lanes * g->beside),
                   .grid = g->blocks,
                   .shared = (size_t)shared_of(shape, m, g, gradients),
                   .cluster = g->exchanges ? (uint32_t)g->parts : 0},
        .parts = (int32_t)g->parts,
        .finds_gradients = gradients == NORMFUSE_GRADIENTS_DIRECT,
        .sums = {.by_channel = !of_samples && !is_direct(gradients),
                 .slots = is_direct(gradients) ? 1 : part_slots * (int32_t)(of_samples ? 1 : g->walkers)}};
    make_signature(shape, m, g, gradients, &step->signature);
    step->single = (struct normfuse_single_arguments){
        .sample_stride = m->sample_stride,
        .group_stride = m->is_spread ? block_columns(g) : m->group_stride,
        .row_stride = m->row_stride,
        .rows = (int32_t)m->rows,
        .columns = (int32_t)m->columns,
        .part_rows = (int32_t)g->part_rows,
        .part_columns = (int32_t)g->part_columns,
        .next_rows = (int32_t)g->next_rows,
        .next_columns = (int32_t)g->next_columns,
        .parts = (int32_t)g->parts,
        .walkers = (int32_t)g->walkers,
        .by_parts = divisor_of(g->parts),
        .by_walkers = divisor_of(g->walkers),
        .groups = (int32_t)(m->is_spread ? divide_up(m->columns, block_columns(g)) : m->groups),
        .samples = (int32_t)m->samples,
        .sample_bits = (int32_t)g->sample_bits,
        .group_channels = (int32_t)(m->is_spread ? block_columns(g) : m->group_channels),
        .call = {.channel_groups = (int32_t)(p->sets == NORMFUSE_SETS_GROUP ? p->groups : p->c),
                 .channels = (int32_t)p->c,
                 .sum_slots = step->sums.slots,
                 .part_slots = part_slots,
                 .values = (float)m->values,
                 .share = 1.0f / (float)m->values},
    };
}

static const char *refuse(const struct shape *shape)
{
    static const double MAX_GIVEN_BYTES = 16 << 20;
    const struct normfuse_problem *const p = shape->problem;
    const bool both = (p->phases & (NORMFUSE_PHASE_STATISTICS | NORMFUSE_PHASE_BACKWARD_SUMS)) != 0 ||
                      p->sets == NORMFUSE_SETS_NONE;
    if (!both)
        return "statistics or sums are given";
    if (p->sets == NORMFUSE_SETS_NONE && shape->direction == BACKWARD && !has_both_phases(p))
        return "sums are given";
    /* Sums of very many rows are better found by few long blocks: affine 34x8192x6x4x2 NHWC 71 us, in few blocks 48. */
    if (p->sets == NORMFUSE_SETS_NONE && shape->direction == BACKWARD && shape->bytes > MAX_GIVEN_BYTES)
        return "`stream` has few long blocks for it";
    return NULL;
}

static double draw(uint64_t seed, const struct matrix *m, const struct geometry *g)
{
    const int64_t of[] = {m->rows,  m->columns,     m->samples, g->vector,  g->lanes, g->across,
                          g->beside, g->sample_bits, g->parts,   g->walkers, g->aligned};
    return draw_geometry(seed, of, sizeof of / sizeof *of);
}

static const char *configure(const struct shape *shape, struct step *step)
{
    enum { MAX_LANES = 512, MAX_THREADS_BESIDE = 256, MAX_PARTS = 16, MAX_BLOCKS_OF_GIVEN = 256 };
    const struct normfuse_problem *const p = shape->problem;
    struct matrix m;
    const char *reason = refuse(shape);
    if (reason == NULL)
        reason = describe(p, &m);
    if (reason != NULL)
        return reason;
    const int64_t bytes = (int64_t)normfuse_type_bytes(p->type);
    const int64_t whole = whole_vector(p, &m, m.columns), widest = 16 / bytes;
    const bool may_be_unaligned =
        whole < widest && m.parameters != NORMFUSE_PARAMETERS_OF_COLUMN && are_aligned(p, 16) && m.columns >= widest;
    const bool given = p->sets == NORMFUSE_SETS_NONE;
    const int64_t max_parts = given ? MAX_BLOCKS_OF_GIVEN : shape->device->clusters ? MAX_PARTS : 1;
    double lowest = INFINITY;
    struct geometry best = {0};
    for (int unaligned = 0; unaligned <= may_be_unaligned; unaligned++) {
        const int64_t vector = unaligned ? widest : whole;
        const int64_t row_vectors = divide_up(m.columns + (unaligned ? vector - 1 : 0), vector);
        for (int64_t lanes = 1; lanes <= MAX_LANES; lanes *= 2) {
            for (int64_t across = 1; across <= lanes && across < 2 * row_vectors; across *= 2) {
                if ((m.parameters == NORMFUSE_PARAMETERS_OF_ROW && across > 32 && shape->direction == BACKWARD) ||
                    (m.rows == 1 && across < minimum(lanes, row_vectors)) ||
                    across * vector * bytes < minimum(32, m.columns * bytes))
                    continue;
                for (int64_t threads = maximum(32, lanes);
                     threads <= maximum(lanes, lanes <= 32 ? MAX_THREADS_BESIDE : 0); threads *= 2) {
                    const int64_t beside = threads / lanes;
                    if (beside > 1 && m.is_spread)
                        continue;
                    for (int64_t bits = 0; INT64_C(1) << bits <= beside; bits++) {
                        if (bits > 0 && (INT64_C(1) << (bits - 1)) >= m.samples)
                            break;
                        const int64_t turns = divide_up(m.samples, INT64_C(1) << bits);
                        for (int64_t parts = 1; parts <= max_parts; parts *= 2) {
                            if (parts > 1 && (lanes < 64 || beside > 1))
                                break;
                            for (int64_t walkers = turns; walkers >= 1; walkers = divide_up(walkers, 2)) {
                                struct geometry g = {.vector = vector,
                                                     .lanes = lanes,
                                                     .across = across,
                                                     .beside = beside,
                                                     .sample_bits = bits,
                                                     .parts = parts,
                                                     .walkers = walkers,
                                                     .aligned = !unaligned};
                                const bool walks = walkers < turns;
                                if (walks && (parts > 1 || m.per_sample))
                                    break;
                                const char *const why = complete(shape, &m, &g);
                                if (why == NULL) {
                                    const int32_t gradients = gradients_of(shape, &m, &g);
                                    const int64_t shared = shared_of(shape, &m, &g, gradients);
                                    const uint64_t drawn = normfuse_cuda_choice()->drawn;
                                    const double cost = drawn != 0 ? draw(drawn, &m, &g)
                                                                   : cost_of(shape, &m, &g, gradients, shared);
                                    if (shared + 2048 <= (int64_t)shape->device->shared_per_block && cost < lowest) {
                                        lowest = cost;
                                        best = g;
                                    }
                                } else {
                                    reason = why;
                                }
                                if (walkers == 1)
                                    break;
                            }
                        }
                    }
                }
            }
        }
    }
    if (lowest == INFINITY)
        return reason != NULL ? reason : "no threads hold a norm group";
    fill(shape, &m, &best, step);
    step->microseconds = lowest;
    return NULL;
}

const struct schedule normfuse_cuda_single = {.name = "single", .configure = configure};
