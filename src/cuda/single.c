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
    int64_t outer_stride, inner_groups; /* of_call: samples of the call, and norm groups of one */
    bool is_spread;  /* columns are spread over blocks */
    bool per_sample; /* weights are a sample's own */
    bool of_call;    /* norm groups are of samples of the call, samples are positions or tiles of them */
    bool is_tiled;   /* columns are positions; the threads of a row have those of a tile */
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
    if (p->sets == NORMFUSE_SETS_POSITION) {
        const bool last = p->columns;
        *m = (struct matrix){.statistics = last ? NORMFUSE_STATISTICS_GROUP : NORMFUSE_STATISTICS_COLUMN,
                             .parameters = last ? NORMFUSE_PARAMETERS_OF_COLUMN : NORMFUSE_PARAMETERS_OF_ROW,
                             .rows = last ? 1 : d,
                             .columns = last ? d : p->s,
                             .values = p->set_values,
                             .row_stride = last ? 0 : p->x.channel,
                             .group_stride = last ? d : p->x.channel * d,
                             .sample_stride = last ? p->x.position : 0,
                             .groups = p->n * p->groups,
                             .samples = last ? p->s : 1,
                             .group_channels = d,
                             .outer_stride = p->x.batch,
                             .inner_groups = p->groups,
                             .of_call = true,
                             .is_tiled = !last};
        return NULL;
    }
    *m = (struct matrix){.statistics = none ? p->evaluate ? NORMFUSE_STATISTICS_RUNNING : NORMFUSE_STATISTICS_NONE
                                            : NORMFUSE_STATISTICS_GROUP,
                         .values = p->set_values,
                         .groups = p->c,
                         .samples = 1,
                         .group_channels = 1,
                         .inner_groups = 1,
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
    const int64_t bytes = (int64_t)normfuse_type_bytes(p->type), y_bytes = (int64_t)normfuse_type_bytes(p->y_type);
    const uintptr_t places = (uintptr_t)p->x.data | (uintptr_t)p->pre_add.data | (uintptr_t)p->u.data |
                             (uintptr_t)p->du.data | (uintptr_t)p->dx.data;
    const uintptr_t y_places = (uintptr_t)p->y.data | (uintptr_t)p->post_add.data | (uintptr_t)p->dy.data |
                               (uintptr_t)p->dpost_add.data;
    int64_t strides = columns;
    if (m->rows > 1)
        strides |= m->row_stride;
    if (m->groups > 1 && !m->is_spread)
        strides |= m->group_stride;
    if (m->samples > 1)
        strides |= m->sample_stride;
    if (m->of_call && p->n > 1)
        strides |= m->outer_stride;
    int64_t elements = 16 / maximum(bytes, y_bytes);
    while (elements > 1 && (strides % elements != 0 || places % (uintptr_t)(elements * bytes) != 0 ||
                            y_places % (uintptr_t)(elements * y_bytes) != 0))
        elements /= 2;
    return elements;
}

/* The next number of vectors that a kernel has room for: a kernel for each number would be as many compilations. Of
 * positions 5, too: of 144 and 160 channels four threads have as many. */
static int64_t room_for(int64_t vectors, bool of_positions)
{
    static const int64_t rooms[] = {1, 2, 3, 4, 6, 8, 12, 16, 24, 32};
    if (of_positions && vectors == 5)
        return 5;
    for (size_t i = 0; i < sizeof rooms / sizeof *rooms; i++)
        if (vectors <= rooms[i])
            return rooms[i];
    return 0;
}

/* A candidate: how a norm group is given to threads. */
struct geometry {
    int64_t vector, lanes, across, beside, sample_bits, parts, walkers;
    bool aligned;
    /* Derived from these. */
    int64_t part_rows, part_columns, next_rows, next_columns;
    int64_t held_rows, held_columns, blocks;
    bool exact, exchanges;
};

static int64_t block_columns(const struct geometry *g)
{
    return g->across * g->held_columns * g->vector;
}

static bool walks_samples(const struct matrix *m, const struct geometry *g)
{
    return g->walkers << g->sample_bits < m->samples;
}

/* Tiles of positions that follow one another: their vectors lie in shared memory, this tile's and the next one's, but for
 * short vectors: device/single.cuh. */
static bool has_slots(const struct shape *shape, const struct matrix *m, const struct geometry *g)
{
    return m->is_tiled && walks_samples(m, g) && g->vector * (int64_t)normfuse_type_bytes(shape->problem->type) >= 8;
}

/* Values of a thread: its registers hold them, or weights of its rows. */
static int64_t max_values(const struct shape *shape, const struct matrix *m, const struct geometry *g)
{
    if (has_slots(shape, m, g))
        return shape->direction == FORWARD ? 24 * g->vector : 12 * g->vector;
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

/* Norm over channels: of adjacent ones a norm group is one row, and positions are samples. */
static bool is_of_positions(const struct matrix *m)
{
    return m->is_tiled || (m->rows == 1 && m->statistics == NORMFUSE_STATISTICS_GROUP &&
                           m->parameters == NORMFUSE_PARAMETERS_OF_COLUMN);
}

/* Sums of dz are wanted for a parameter's gradient, not those of dz * (u - mean) alone. */
static bool sums_dz(const struct normfuse_problem *p)
{
    return p->dbias.data != NULL || p->dscale.data != NULL || p->dshift.data != NULL || !has_both_phases(p);
}

/* Registers of a block that walks over positions: its vectors and the next ones, weights as they are in memory, and
 * values. The kernel is compiled for as many blocks of a multiprocessor as have these. */
static double registers_of_walk(const struct shape *shape, const struct matrix *m, const struct geometry *g)
{
    const struct normfuse_problem *const p = shape->problem;
    const bool backward = shape->direction == BACKWARD;
    const double columns = (double)(g->held_columns * g->vector), value = (double)shape->value_bytes / 4.0;
    const double centred = p->statistics != NORMFUSE_MEAN_SQUARE;
    double of_weight = value * backward * (1 + sums_dz(p));
#define WORDS(name) of_weight += p->name.data != NULL ? (double)normfuse_type_bytes(p->name.type) / 4.0 : 0.0;
    WORDS(weight) WORDS(bias) WORDS(scale) WORDS(shift) WORDS(pre_bias) WORDS(slope)
#undef WORDS
    const double places = g->vector < 4 ? 3.0 * (double)(g->held_rows * g->held_columns) : 0.0;
    if (has_slots(shape, m, g))
        return 30.0 + places +
               (double)g->held_rows * (of_weight + 0.5 + 1.8 * backward + 1.2 * centred * value) +
               columns * value * (2.0 + 3.0 * backward + centred * (2.0 + backward));
    const double of_value = 2.0 * shape->tensors * (double)normfuse_type_bytes(p->type) / 4.0 + value * (1.0 + centred);
    return 22.0 + places + (double)g->held_rows * columns * of_value + weights_of(m, g) * of_weight +
           (m->is_tiled ? columns * value * (1.0 + 2.0 * centred + 2.0 * backward) : 0.0);
}

/* Registers of a thread, about: fitted to what NVRTC 13.0 gave 600 signatures on sm_90a. */
static double registers_of(const struct shape *shape, const struct matrix *m, const struct geometry *g)
{
    if (is_of_positions(m) && walks_samples(m, g))
        return registers_of_walk(shape, m, g);
    static const struct {
        double word, value, weight; /* of the vectors as they are in memory, of their values, of a weight */
    } registers[2] = {{0.88, 0.44, 2.0}, {1.33, 1.3, 3.9}};
    const double elements = (double)(g->held_rows * g->held_columns * g->vector);
    const double words = elements * (double)normfuse_type_bytes(shape->problem->type) / 4.0;
    const double values = elements * (double)shape->value_bytes / 4.0;
    const int d = shape->direction;
    /* A block that walks over samples keeps the sums of its channels, and requests the next sample ahead. */
    const double kept = d == BACKWARD && walks_samples(m, g) ? registers[d].word * words + 2.0 * weights_of(m, g) : 0.0;
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
        else if (m->parameters != NORMFUSE_PARAMETERS_OF_COLUMN && g->aligned && !m->is_tiled)
            g->part_columns = g->next_columns = divide_up(divide_up(m->columns, g->parts), g->vector) * g->vector;
        else
            return "a norm group is not that many parts";
        if (g->next_rows * (g->parts - 1) >= m->rows || g->next_columns * (g->parts - 1) >= m->columns)
            return "parts would be empty";
    }
    const int64_t before = g->aligned ? 0 : g->vector - 1;
    const bool is_piece = m->is_spread || m->is_tiled;
    const int64_t row_vectors = divide_up(is_piece ? g->across * g->vector : g->part_columns + before, g->vector);
    if (is_piece)
        g->part_columns = g->across * g->vector;
    g->held_columns = room_for(divide_up(row_vectors, g->across), is_of_positions(m));
    g->held_rows = room_for(divide_up(g->part_rows, down), is_of_positions(m));
    if (g->held_columns == 0 || g->held_rows == 0 ||
        g->held_columns * g->held_rows * g->vector > max_values(shape, m, g))
        return "a thread would hold too much";
    const int64_t samples_beside = INT64_C(1) << g->sample_bits, groups_beside = g->beside / samples_beside;
    /* Parts of a channel, one after the other, where it has gradients: docs/numerics.md. */
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
        is_piece ? m->columns % block_columns(g) == 0
                     : block_columns(g) == g->part_columns &&
                           g->part_columns * (g->next_columns > 0 ? g->parts : 1) == m->columns;
    g->exact = g->aligned && fills_rows && fills_columns &&
               (walks_samples(m, g) || g->walkers * samples_beside == m->samples) &&
               (m->is_spread || m->groups % groups_beside == 0);
    g->exchanges =
        g->parts > 1 && m->statistics != NORMFUSE_STATISTICS_NONE && m->statistics != NORMFUSE_STATISTICS_RUNNING;
    return registers_of(shape, m, g) > 1.15 * fmin(255.0, 65536.0 / (double)maximum(256, g->lanes * g->beside))
               ? "a thread would hold too much"
               : NULL;
}

/* True if one block of those that share a norm group has the sums of all of a channel. */
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
    if (m->of_call)
        return NORMFUSE_GRADIENTS_OF_SAMPLES_NORMALIZED;
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

/* Bytes of the vectors of a tile and of the next one, where blocks walk over tiles. */
static int64_t bytes_of_slots(const struct shape *shape, const struct matrix *m, const struct geometry *g)
{
    if (!has_slots(shape, m, g))
        return 0;
    const struct normfuse_problem *const p = shape->problem;
    const bool backward = shape->direction == BACKWARD;
    const int64_t of_x = 1 + (p->pre_add.data != NULL) + reads_du(shape), of_y = backward + reads_post(shape);
    return 2 * g->lanes * g->held_rows * g->vector *
           (of_x * (int64_t)normfuse_type_bytes(p->type) + of_y * (int64_t)normfuse_type_bytes(p->y_type));
}

/* Bytes of dynamic shared memory, as single.cuh parts it. */
static int64_t shared_of(const struct shape *shape, const struct matrix *m, const struct geometry *g, int32_t gradients)
{
    enum { MAX_PARTS = 16 };
    const int64_t value = (int64_t)shape->value_bytes, down = g->lanes / g->across, columns = block_columns(g);
    int64_t bytes = 0;
    if (m->statistics == NORMFUSE_STATISTICS_COLUMN)
        bytes = value * (2 * down * (columns + 4) + columns * (4 + (g->exchanges ? 2 * MAX_PARTS : 0)));
    else if (g->exchanges)
        bytes = value * 2 * MAX_PARTS;
    if (gradients != NORMFUSE_GRADIENTS_NONE) {
        const bool by_columns = m->parameters == NORMFUSE_PARAMETERS_OF_COLUMN;
        const int64_t weights = by_columns                                       ? down * columns
                                : m->parameters == NORMFUSE_PARAMETERS_OF_ROW ? g->held_rows * down
                                                                                 : 1;
        bytes = maximum(bytes, value * g->beside * weights * (shape->problem->dslope.data != NULL ? 3 : 2));
    }
    return bytes + bytes_of_slots(shape, m, g);
}

/* Registers that the compiler gives a thread at most. */
static double max_registers(const struct geometry *g)
{
    return fmin(255.0, 65536.0 / fmax(256.0, (double)(g->lanes * g->beside)));
}

/* Blocks that a multiprocessor has at once. */
static double resident_blocks(const struct shape *shape, const struct matrix *m, const struct geometry *g,
                              int64_t shared)
{
    const double threads = (double)(g->lanes * g->beside);
    const double registers = 8.0 * ceil(fmax(24.0, fmin(registers_of(shape, m, g), max_registers(g))) / 8.0);
    const double by_shared = floor(227.0 * 1024.0 / (double)(shared + 1024));
    /* A quarter of a multiprocessor has whole warps; a kernel of small blocks spills if more of them are expected. */
    const double by_registers = is_of_positions(m) ? floor(4.0 * floor(512.0 / registers) / (threads / 32.0))
                                                   : floor(65536.0 / (threads * registers));
    return fmax(1.0, fmin(fmin(by_registers, by_shared), fmin(32.0, floor(2048.0 / threads))));
}

/* Figures of what a thread does: of a value (forward, backward), more where the activation is costly or rows are
 * unaligned, of the thread, of a vector, of a weight, of a register that it has not. */
struct instructions {
    double value[2], costly, edges, thread[2], vector, weight, spilled;
};

static double instructions_of(const struct shape *shape, const struct matrix *m, const struct geometry *g,
                              const struct instructions *k, double weights)
{
    const int32_t activation = shape->problem->activation;
    const int d = shape->direction;
    const double vectors = (double)(g->held_rows * g->held_columns), elements = (double)g->vector;
    const bool is_costly = activation == NORMFUSE_SILU || is_rare(activation);
    return k->thread[d] +
           vectors * (k->vector +
                      elements * k->value[d] * (1.0 + k->costly * is_costly) * (1.0 + k->edges * !g->aligned)) +
           k->weight * weights + k->spilled * fmax(0.0, registers_of(shape, m, g) - max_registers(g));
}

/* Microseconds until the blocks of a cluster have each other's sums. */
static double wait_for_cluster(const struct geometry *g)
{
    return g->exchanges ? 0.642 + 0.0214 * (double)g->parts : 0.0;
}

/* Microseconds. The first blocks of the multiprocessors wait for what a thread does, for the block, for those that
 * share a norm group, and for memory. Of those that follow, waits and memory's time overlap where a multiprocessor has
 * several blocks at once. The figures are fitted to 2000 geometries of 190 problems on an H200, together with those of
 * `held`: what is taken takes 1.06 of the fastest. */
static double cost_of(const struct shape *shape, const struct matrix *m, const struct geometry *g, int32_t gradients,
                      int64_t shared)
{
    static const struct instructions work = {.value = {2.3, 4.44}, .costly = 1.31, .edges = 2.46,
                                             .thread = {85.5, 81.7}, .vector = 10.3, .weight = 9.06, .spilled = 10.7};
    static const struct {
        double instruction, warp, columns, column_rows, column_bytes, join; /* latency */
        double issued, sectors, narrow[2], bandwidth, results, gang, overlap, start, sample, later;
    } k = {.instruction = 0.00472, .warp = 0.0394, .columns = 0.167, .column_rows = 0.119, .column_bytes = 0.000108,
           .join = 0.0195, .issued = 0.000295, .sectors = 0.731, .narrow = {0.00494, 0.00894}, .bandwidth = 1.495,
           .results = 0.24, .gang = 0.0352, .overlap = 1.533, .start = 0.961, .sample = 0.712, .later = 1.22};
    const struct normfuse_problem *const p = shape->problem;
    const double multiprocessors = shape->device->multiprocessors;
    const double bytes = (double)normfuse_type_bytes(p->type), down = (double)(g->lanes / g->across);
    const double resident = resident_blocks(shape, m, g, shared), elements = (double)g->vector;
    const double instructions = instructions_of(
        shape, m, g, &work, m->parameters == NORMFUSE_PARAMETERS_OF_GROUP ? 0.0 : weights_of(m, g));
    const double warps = ceil((double)(g->lanes * g->beside) / 32.0);
    double wait = k.instruction * instructions;
    if (g->lanes > 32)
        wait += k.warp * (warps - 1.0);
    wait += wait_for_cluster(g);
    if (m->statistics == NORMFUSE_STATISTICS_COLUMN)
        wait += k.columns + k.column_rows * down / 32.0 + k.column_bytes * (double)shared;
    const double samples = (double)divide_up(divide_up(m->samples, INT64_C(1) << g->sample_bits), g->walkers);
    wait *= 1.0 + k.sample * (samples - 1.0);
    const double arithmetic = k.issued * samples * (double)g->blocks * warps / multiprocessors * instructions;
    /* Adjacent values of a row are read in sectors of 32 bytes, and the less is adjacent the slower is memory. */
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
    const double transfer = moved * (1.0 + k.sectors * (sectors - 1.0) + narrow) / bandwidth;
    const double memory = stretch * sqrt(transfer * transfer + arithmetic * arithmetic);
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

/* Microseconds of the kernel that joins what blocks have of a channel's sums, of a norm over channels. */
static double join_later(const struct shape *shape, const struct matrix *m, const struct geometry *g,
                         int32_t gradients)
{
    const double slots = (double)(has_whole_channels(shape, m, g) ? 1 : g->parts) * (double)g->walkers *
                         (double)(m->of_call ? shape->problem->n : 1);
    return is_direct(gradients)
               ? 0.0
               : 1.6 + 32.0 * slots * (double)shape->problem->c / (0.86 * shape->policy->bytes_a_microsecond);
}

/* Microseconds of a norm over adjacent channels: the positions of a block come one after the other. Memory, instructions
 * and these waits overlap, since the next position is on its way, or another block begins with it. */
static double cost_of_positions(const struct shape *shape, const struct matrix *m, const struct geometry *g,
                                int32_t gradients, int64_t shared)
{
    static const struct instructions work = {.value = {2.32, 3.27}, .costly = 0.86, .thread = {39.0, 59.0},
                                             .vector = 13.6, .weight = 6.0, .spilled = 26.0};
    static const struct {
        double begin, instruction, block_doubling, join, round_trip; /* latency */
        double throughput, sectors, narrow, bandwidth, start;
    } k = {.begin = 0.064, .instruction = 0.0045, .block_doubling = 0.081, .join = 0.0102, .round_trip = 0.9,
           .throughput = 0.000365, .sectors = 1.05, .narrow = 1.2, .bandwidth = 0.86, .start = 1.36};
    const struct normfuse_problem *const p = shape->problem;
    const double multiprocessors = shape->device->multiprocessors, elements = (double)g->vector;
    const double bytes = (double)normfuse_type_bytes(p->type), down = (double)(g->lanes / g->across);
    const bool walks = walks_samples(m, g);
    const double instructions = instructions_of(shape, m, g, &work, walks ? 0.0 : weights_of(m, g));
    double latency = k.begin + k.instruction * instructions;
    if (g->lanes > 32)
        latency += k.block_doubling * log2((double)g->lanes / 32.0);
    latency += wait_for_cluster(g);
    const double blocks = (double)g->blocks, at_once = resident_blocks(shape, m, g, shared) * multiprocessors;
    const double samples = (double)divide_up(divide_up(m->samples, INT64_C(1) << g->sample_bits), g->walkers);
    const double arithmetic =
        k.throughput * samples * blocks * ceil((double)(g->lanes * g->beside) / 32.0) / multiprocessors * instructions;
    const int64_t groups_beside = minimum(m->groups, g->beside >> g->sample_bits);
    const bool adjoins =
        groups_beside == m->groups && (m->samples == 1 || m->sample_stride == m->groups * m->columns);
    const double adjacent = adjoins ? (double)((m->groups * m->columns) << g->sample_bits) * bytes
                                    : fmin((double)g->across * elements, (double)m->columns) * bytes;
    const double sectors = 32.0 * ceil(adjacent / 32.0) / adjacent;
    const double moved = shape->tensor_bytes * (tensors_of(shape) + results_of(shape));
    const double narrow = adjoins ? 0.0 : k.narrow * fmin(1.0, moved / 40e6) * fmin(1.0, 128.0 / adjacent);
    const double bandwidth = k.bandwidth * shape->policy->bytes_a_microsecond;
    const double memory = moved * (1.0 + k.sectors * (sectors - 1.0) + narrow) / bandwidth;
    const double step = walks ? fmax(k.round_trip, latency) : k.round_trip + latency;
    const double chain = (samples * ceil(blocks / at_once) - 1.0) * step;
    /* Sums of channels that the threads of a block join one after the other, and that a later kernel joins. */
    const double joined =
        gradients == NORMFUSE_GRADIENTS_NONE ? 0.0 : k.join * (double)(INT64_C(1) << g->sample_bits) * down;
    return k.start + latency + sqrt(memory * memory + arithmetic * arithmetic + chain * chain) + joined +
           join_later(shape, m, g, gradients);
}

/* Microseconds of a norm over channels where a block has tiles of positions, fitted to 321 geometries of 58 problems on
 * an H200: what is taken takes 1.03 of the fastest. */
static double cost_of_tiles(const struct shape *shape, const struct matrix *m, const struct geometry *g,
                            int32_t gradients, int64_t shared)
{
    static const struct {
        double values, backward, centred, block_doubling, rows, cluster, round_trip; /* latency */
        double arithmetic, narrow, crowd, gang, bandwidth, start;
    } k = {.values = 0.0034, .backward = 0.254, .centred = 0.8, .block_doubling = 0.168, .rows = 0.14, .cluster = 0.157,
           .round_trip = 1.41, .arithmetic = 0.00137, .narrow = 0.0733,
           .crowd = 0.0349, /* of a third block of a multiprocessor, and so on: memory has more rows at once */
           .gang = 1.81,    /* clusters do not walk */
           .bandwidth = 1.04, .start = 1.33};
    const double multiprocessors = shape->device->multiprocessors, blocks = (double)g->blocks;
    const double resident = resident_blocks(shape, m, g, shared), warps = fmax(1.0, (double)g->lanes / 32.0);
    /* A vector costs as much as four values more. */
    const double values = (double)(g->held_rows * (g->vector + 4)) *
                          (1.0 + k.backward * (shape->direction == BACKWARD)) *
                          (1.0 + k.centred * (shape->problem->statistics != NORMFUSE_MEAN_SQUARE));
    double latency =
        k.values * values + k.block_doubling * log2(warps) + k.rows * (double)(g->lanes / g->across) / 32.0;
    latency += g->exchanges ? k.cluster + wait_for_cluster(g) : 0.0;
    const double samples = (double)divide_up(m->samples, g->walkers);
    const double chain = ceil(blocks / (resident * multiprocessors)) * (samples * latency + k.round_trip);
    const double each = fmax(1.0, blocks / multiprocessors); /* blocks of a multiprocessor */
    const double arithmetic = k.arithmetic * samples * each * warps * values;
    const double row = (double)(g->across * g->vector) * (double)normfuse_type_bytes(shape->problem->type);
    const double narrow = 256.0 / row - 1.0;
    const double memory = shape->tensor_bytes * (tensors_of(shape) + results_of(shape)) /
                          (k.bandwidth * shape->policy->bytes_a_microsecond * fmin(1.0, blocks / multiprocessors)) *
                          (g->parts > 1 ? k.gang : 1.0) *
                          (1.0 + k.narrow * narrow * narrow + k.crowd * fmax(0.0, fmin(resident, each) - 2.0));
    return k.start + sqrt(memory * memory + arithmetic * arithmetic + chain * chain) +
           join_later(shape, m, g, gradients);
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
#define SET(name) to->name = (int32_t)g->name;
    SET(vector) SET(aligned) SET(lanes) SET(across) SET(held_columns) SET(held_rows) SET(exact)
#undef SET
    to->threads = (int32_t)(g->lanes * g->beside);
    to->walks = walks_samples(m, g);
    to->split = g->parts > 1;
    to->shared_by_cluster = g->exchanges;
    to->exchanges = g->exchanges ? NORMFUSE_EXCHANGE_IN_CLUSTER : NORMFUSE_EXCHANGE_IN_BLOCK;
    to->joins_beside = g->sample_bits > 0;
    to->packed_parameters = packed;
    to->per_sample = m->per_sample;
    to->updates_running = updates;
    to->positions = m->of_call;
    to->packed_statistics = m->is_tiled && is_packed(&p->mean, g->vector, p->s) && is_packed(&p->rstd, g->vector, p->s);
    to->keeps_statistics = p->has_running_momentum && p->sets == NORMFUSE_SETS_GROUP;
    to->gradients = gradients;
    to->sums_dz = gradients != NORMFUSE_GRADIENTS_NONE && sums_dz(p);
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
        .sums = {.by_channel = !of_samples && !is_direct(gradients) && !m->of_call,
                 .slots = is_direct(gradients) ? 1 : part_slots * (int32_t)(of_samples ? 1 : g->walkers)}};
    make_signature(shape, m, g, gradients, &step->signature);
    if (is_of_positions(m) && walks_samples(m, g))
        step->signature.resident = (int32_t)resident_blocks(shape, m, g, (int64_t)step->launch.shared);
    step->single = (struct normfuse_single_arguments){
        .sample_stride = m->sample_stride,
        .group_stride = m->is_spread ? block_columns(g) : m->group_stride,
        .row_stride = m->row_stride,
        .outer_stride = m->outer_stride,
        .by_parts = divisor_of(g->parts),
        .by_walkers = divisor_of(g->walkers),
        .by_inner_groups = divisor_of(m->inner_groups),
        .groups = (int32_t)(m->is_spread ? divide_up(m->columns, block_columns(g)) : m->groups),
        .group_channels = (int32_t)(m->is_spread ? block_columns(g) : m->group_channels),
        .call = {.channel_groups = (int32_t)(p->sets == NORMFUSE_SETS_GROUP ? p->groups : p->c),
                 .channels = (int32_t)p->c,
                 .sum_slots = step->sums.slots,
                 .part_slots = part_slots,
                 .values = (float)m->values,
                 .share = 1.0f / (float)m->values},
    };
#define SET(from, name) step->single.name = (int32_t)(from)->name;
    SET(m, rows) SET(m, columns) SET(m, samples) SET(g, part_rows) SET(g, part_columns) SET(g, next_rows)
    SET(g, next_columns) SET(g, parts) SET(g, walkers) SET(g, sample_bits)
#undef SET
}

static const char *refuse(const struct shape *shape)
{
    static const double MAX_GIVEN_BYTES[] = {128 << 20, 16 << 20};
    const struct normfuse_problem *const p = shape->problem;
    const bool both = (p->phases & (NORMFUSE_PHASE_STATISTICS | NORMFUSE_PHASE_BACKWARD_SUMS)) != 0 ||
                      p->sets == NORMFUSE_SETS_NONE;
    if (!both)
        return "statistics or sums are given";
    if (p->sets == NORMFUSE_SETS_NONE && shape->direction == BACKWARD && !has_both_phases(p))
        return "sums are given";
    /* Sums of very many rows are better found by few long blocks: affine 34x8192x6x4x2 NHWC 71 us, in few blocks 48. So
     * are results of very large tensors: affine 64x256x64x64 151 us, in few blocks 133. */
    if (p->sets == NORMFUSE_SETS_NONE && shape->bytes > MAX_GIVEN_BYTES[shape->direction])
        return "`stream` has few long blocks for it";
    return NULL;
}

static double draw(uint64_t seed, const struct matrix *m, const struct geometry *g)
{
    const int64_t of[] = {m->rows,  m->columns,     m->samples, g->vector,  g->lanes, g->across,
                          g->beside, g->sample_bits, g->parts,   g->walkers, g->aligned};
    return draw_geometry(seed, of, sizeof of / sizeof *of);
}

static void set_tile(struct matrix *m, int64_t positions)
{
    m->sample_stride = positions;
    m->samples = divide_up(m->columns, positions);
}

/* The next number of blocks that take turns with samples: half, or of positions one less on each multiprocessor. */
static int64_t fewer_walkers(const struct shape *shape, const struct matrix *m, int64_t walkers)
{
    const int64_t each = maximum(1, shape->device->multiprocessors / m->groups);
    if (!is_of_positions(m) || walkers <= each)
        return divide_up(walkers, 2);
    return minimum(32 * each, (divide_up(walkers, each) - 1) * each);
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
    const bool may_be_unaligned = whole < widest && m.parameters != NORMFUSE_PARAMETERS_OF_COLUMN && !m.is_tiled &&
                                  are_aligned(p, 16) && m.columns >= widest;
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
                    (!m.is_tiled && across * vector * bytes < minimum(32, m.columns * bytes)))
                    continue;
                for (int64_t threads = maximum(32, lanes);
                     threads <= maximum(lanes, lanes <= 32 ? MAX_THREADS_BESIDE : 0); threads *= 2) {
                    const int64_t beside = threads / lanes;
                    if (beside > 1 && (m.is_spread || m.is_tiled))
                        continue;
                    if (m.is_tiled)
                        set_tile(&m, across * vector);
                    for (int64_t bits = 0; INT64_C(1) << bits <= beside; bits++) {
                        if (bits > 0 && (INT64_C(1) << (bits - 1)) >= m.samples)
                            break;
                        if (is_of_positions(&m) && beside >> bits >= 2 * m.groups)
                            continue; /* half of a block's threads would have no norm group */
                        const int64_t turns = divide_up(m.samples, INT64_C(1) << bits);
                        for (int64_t parts = 1; parts <= max_parts; parts *= 2) {
                            if (parts > 1 && (lanes < 64 || beside > 1))
                                break;
                            for (int64_t walkers = turns; walkers >= 1;
                                 walkers = fewer_walkers(shape, &m, walkers)) {
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
                                    const double cost =
                                        drawn != 0             ? draw(drawn, &m, &g)
                                        : m.is_tiled           ? cost_of_tiles(shape, &m, &g, gradients, shared)
                                        : is_of_positions(&m) ? cost_of_positions(shape, &m, &g, gradients, shared)
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
    if (m.is_tiled)
        set_tile(&m, block_columns(&best));
    fill(shape, &m, &best, step);
    step->microseconds = lowest;
    return NULL;
}

const struct schedule normfuse_cuda_single = {.name = "single", .configure = configure};
