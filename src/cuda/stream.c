/* SPDX-License-Identifier: MIT
 *
 * stream.c - kernels of the body `stream`: the two passes of a norm that no kernel holds, and calls whose statistics are
 * given. device/stream.cuh has the picture. */
#include "tiling.h"

enum {
    MAX_THREADS = 256,
    WIDEST_SUMS = 64,     /* vectors of a row that a block sums, channels last: 1 KB */
    MAX_ROWS_SUMMED = 124, /* of a thread in one sum, by docs/numerics.md */
    MAX_SUBGROUP = 16
};

/* Vectors of a thread: as many as keep the memory busy and leave each multiprocessor some blocks. */
static int64_t vectors_of_thread(const struct shape *shape, int64_t all, int64_t most)
{
    enum { BLOCKS = 4 };
    int64_t vectors = most;
    while (vectors > 1 && all < vectors * MAX_THREADS * BLOCKS * shape->device->multiprocessors)
        vectors /= 2;
    return vectors;
}

/* Blocks of parts of rows, interleaved where they sum: they are near one another, and what was read last is the end. */
static void share_columns(const struct shape *shape, bool sums, bool applies, struct tiling *t)
{
    enum { ROWS = 32, FEW_ROWS = 4, BLOCKS_OF_SUMS = 3 };
    const int64_t vectors = t->columns / t->vector;
    const bool has_whole_rows = t->folded > 1 && vectors <= MAX_THREADS;
    const int64_t widest = has_whole_rows || !sums ? MAX_THREADS : WIDEST_SUMS;
    t->blocks_wide = divide_up(vectors, widest);
    t->across = divide_up(vectors, t->blocks_wide);
    const int64_t max_down = maximum(1, MAX_THREADS / t->across);
    t->threads = t->lanes = whole_warps(t->across * minimum(max_down, t->rows));
    const int64_t down = down_of(t), base = t->blocks_wide * t->samples;
    if (sums && !applies) {
        const int64_t wanted = BLOCKS_OF_SUMS * shape->device->multiprocessors / maximum(1, base);
        t->parts = maximum(1, minimum(wanted, divide_up(t->rows, down * FEW_ROWS)));
    } else {
        const int64_t rows = vectors_of_thread(shape, t->rows * vectors * t->samples, ROWS);
        t->parts = divide_up(t->rows, down * rows);
    }
    if (sums)
        t->parts = maximum(t->parts, divide_up(t->rows, down * MAX_ROWS_SUMMED));
    t->row_step = down;
    if (sums) {
        t->next_rows = down;
        t->row_step = down * t->parts;
    } else {
        t->next_rows = t->part_rows = divide_up(divide_up(t->rows, t->parts), down) * down;
        t->parts = divide_up(t->rows, t->part_rows);
    }
}

static void share_rows(const struct shape *shape, bool sums, struct tiling *t)
{
    enum { VECTORS = 16, VECTORS_WRITTEN = 8 };
    const int64_t vectors = row_vectors(t);
    const int64_t of_thread =
        vectors_of_thread(shape, t->slabs * t->rows * vectors, sums ? VECTORS : VECTORS_WRITTEN);
    t->across = normfuse_cuda_threads_across(vectors, MAX_THREADS);
    t->steps = divide_up(vectors, t->across);
    t->lanes = t->across;
    while (t->lanes < MAX_THREADS && t->lanes < t->across * t->rows &&
           t->rows * t->steps > down_of(t) * of_thread)
        t->lanes *= 2;
    t->threads = t->lanes > 32 ? t->lanes : 128;
    const int64_t down = down_of(t);
    t->parts = 1;
    t->next_rows = 0;
    t->part_rows = t->rows;
    t->row_step = down;
    t->next_vectors = 0;
    t->part_vectors = vectors;
    if (divide_up(t->rows, down) * t->steps <= of_thread)
        return;
    if (t->rows > 1) {
        t->next_rows = t->part_rows = down * maximum(1, of_thread / t->steps);
        t->parts = divide_up(t->rows, t->part_rows);
    } else {
        t->steps = of_thread;
        t->next_vectors = t->part_vectors = t->across * of_thread;
        t->parts = divide_up(vectors, t->part_vectors);
    }
}

/* The largest divisor of both that one thread may join, of whole pieces. */
static int64_t subgroup_of(int64_t channels, int64_t of_block, int64_t piece)
{
    int64_t found = minimum(MAX_SUBGROUP, common_divisor(channels, of_block)) / piece * piece;
    while (channels % found != 0 || of_block % found != 0)
        found -= piece;
    return found;
}

/* That are walked through. */
static int64_t tensors_walked(const struct normfuse_cuda_signature *of)
{
    const bool has_activation = of->activation != NORMFUSE_IDENTITY;
    const bool reads_x = !of->backward || of->reduces || of->statistics == NORMFUSE_STATISTICS_GROUP || has_activation;
    return reads_x + of->backward + (of->pre_add && reads_x) + of->du +
           (of->post_add && (!of->backward || has_activation));
}

/* True if a first pass writes dz, which the second then goes on from. */
static bool stores_dz(const struct shape *shape, bool sums, bool applies)
{
    const struct normfuse_problem *const p = shape->problem;
    return sums && !applies && shape->direction == BACKWARD && has_both_phases(p) && p->sets != NORMFUSE_SETS_NONE &&
           p->dpost_add.data != NULL && p->pre_add.data == NULL && p->dx.data != NULL && is_dz_exact(p);
}

static struct normfuse_cuda_signature sign(const struct shape *shape, const struct tiling *t, bool sums, bool applies,
                                           bool stores_dz)
{
    const struct normfuse_problem *const p = shape->problem;
    const bool backward = shape->direction == BACKWARD, given = p->sets == NORMFUSE_SETS_NONE;
    struct normfuse_cuda_signature of = normfuse_cuda_signature_of(NORMFUSE_BODY_stream, backward, p);
    of.reduces = sums;
    of.applies = applies;
    of.statistics = !given        ? NORMFUSE_STATISTICS_GROUP
                    : p->evaluate ? NORMFUSE_STATISTICS_RUNNING
                                  : NORMFUSE_STATISTICS_NONE;
    of.parameters = t->by_columns ? NORMFUSE_PARAMETERS_OF_COLUMN : NORMFUSE_PARAMETERS_OF_GROUP;
    of.dweight = of.dbias = 0; /* a later kernel's */
    of.stores_u = of.stores_u && (sums || (p->phases & NORMFUSE_PHASE_STATISTICS) == 0);
    of.sums_slopes = of.sums_slopes && sums;
    if (!p->evaluate)
        of.running_mean = of.running_var = 0;
    if (given || !backward)
        of.mean = of.rstd = 0;
    if (!applies) {
        of.writes_out = of.du = 0;
        of.dpost_add = of.dpost_add && (stores_dz || (p->phases & NORMFUSE_PHASE_BACKWARD_APPLY) == 0);
    }
    if (!applies && !backward) {
        of.activation = NORMFUSE_IDENTITY;
        of.post_add = of.weight = of.bias = of.scale = of.shift = of.slope = 0;
    }
    normfuse_cuda_sign_tiling(p, t, &of);
    /* Registers for so many threads of a multiprocessor. */
    const int64_t resident = shape->value_bytes == 8 ? 512 : t->by_columns && backward ? 768 : 1024;
    of.resident = (int32_t)minimum(resident / t->threads, 16);
    /* 8 vectors of a thread are on their way, of all tensors together. */
    of.ahead = (int32_t)maximum(2, 8 / maximum(1, tensors_walked(&of)));
    return of;
}

/* Bytes of dynamic shared memory: slots, in whose place come what threads and columns have summed. */
static int64_t shared_of(const struct shape *shape, const struct tiling *t, const struct normfuse_cuda_signature *of)
{
    const int64_t bytes = (int64_t)normfuse_type_bytes(shape->problem->type), value = (int64_t)shape->value_bytes;
    const bool backward = of->backward != 0;
    const int64_t slots = of->ahead * tensors_walked(of) * t->threads * t->vector * bytes;
    if (!t->by_columns || !of->reduces)
        return slots;
    const int64_t columns = t->across * t->vector / of->piece, numbers = backward && of->sums_slopes ? 3 : 2;
    const int64_t of_threads = divide_up(value * numbers * down_of(t) * columns, 16) * 16 + 2 * value * columns;
    return maximum(slots, of_threads + 16 + 24 * columns);
}

bool normfuse_cuda_pass(const struct shape *shape, struct step *step, bool sums, bool applies)
{
    const struct normfuse_problem *const p = shape->problem;
    struct tiling t = {0};
    if (is_of_single(p))
        return false;
    if (normfuse_cuda_has_columns(p)) {
        enum { MIN_ROWS = 128 }; /* of a slab that may leave sums of each row folded */
        normfuse_cuda_tile_columns(p, sums && p->s < MIN_ROWS, &t);
        share_columns(shape, sums, applies, &t);
    } else {
        normfuse_cuda_tile_rows(p, &t);
        share_rows(shape, sums, &t);
        t.blocks_wide = 1;
    }
    const int64_t d = group_of(p);
    const int64_t blocks = t.by_columns ? t.blocks_wide * t.samples * t.parts
                                        : divide_up(t.slabs, t.threads / t.lanes) * t.parts;
    if (blocks >= INT32_MAX || !is_countable(t.slabs) || !is_countable(t.rows) || !is_countable(t.columns))
        return false;
    *step = (struct step){.launch = {.threads = (uint32_t)t.threads, .grid = blocks},
                          .parts = (int32_t)t.parts,
                          .stores_dz = stores_dz(shape, sums, applies)};
    step->signature = sign(shape, &t, sums, applies, step->stores_dz);
    step->launch.shared = (size_t)shared_of(shape, &t, &step->signature);
    /* Sums that the blocks leave for a later kernel. */
    const bool has_all_rows = t.folded > 1 && t.blocks_wide == 1;
    const int64_t copies = has_all_rows ? 1 : t.folded, of_samples = t.joins_samples ? 1 : p->n;
    const int64_t block_channels = has_all_rows ? p->c : t.across * t.vector;
    const int64_t subgroup = t.by_columns ? subgroup_of(d, block_channels, piece_of(p, &t)) : 1;
    const int64_t part_slots = t.parts * (p->sets == NORMFUSE_SETS_GROUP ? 1 : of_samples);
    step->sums = (struct sums){.slots = (int32_t)(t.parts * copies), .by_channel = t.joins_samples};
    step->stream = normfuse_cuda_tiling_arguments(p, &t);
    step->stream.backwards = !sums;
    step->stream.by_subgroup = divisor_of(subgroup);
    step->stream.subgroup = (int32_t)subgroup;
    step->stream.set_triples = (int32_t)(d / subgroup * part_slots * copies);
    step->stream.part_slots = (int32_t)part_slots;
    step->stream.joined_rows = has_all_rows ? (int32_t)t.folded : 1;
    step->stream.copies = (int32_t)copies;
    step->stream.call.sum_slots = step->sums.slots;
    return step->launch.shared + 2048 <= shape->device->shared_per_block;
}

/* Microseconds: two passes begin one after the other, with the kernel between them that joins sums, and what the first
 * one read the second reads again. Fitted to 135 calls on an H200, of which the mean error is 16 %. */
static const char *configure(const struct shape *shape, struct step *step)
{
    /* By direction, and channels last. SHORT: bytes for each row of values that are adjacent; SAMPLE: blocks of few
     * rows. */
    static const double NORM[2][2] = {{7.5, 8.75}, {5.25, 7.75}}, STRETCH[2][2] = {{1.08, 1.12}, {1.14, 1.1}};
    static const double GIVEN = 2.65, GRADIENTS = 4.5, EDGES = 1.5, SHORT = 14.0, SAMPLE = 0.0075;
    const struct normfuse_problem *const p = shape->problem;
    const double tensor = shape->tensor_bytes;
    const double reads = tensor * tensors_of(shape), writes = tensor * results_of(shape);
    const bool backward = shape->direction == BACKWARD, given = p->sets == NORMFUSE_SETS_NONE;
    const double first = given      ? 0.0
                         : backward ? reads - tensor * reads_du(shape)
                                    : tensor * (1 + (p->pre_add.data != NULL));
    const bool columns = normfuse_cuda_has_columns(p);
    const int64_t row_bytes = p->s * (int64_t)normfuse_type_bytes(p->type);
    const double edges = columns ? 1.0 : (row_bytes % 16 != 0 ? EDGES : 1.0) * (1.0 + SHORT / (double)row_bytes);
    const double rate = shape->policy->bytes_a_microsecond / (STRETCH[backward][columns] * edges);
    const double of_samples = columns && p->sets == NORMFUSE_SETS_GROUP ? SAMPLE * (double)p->n : 0.0;
    step->microseconds =
        (given ? GIVEN + (backward && shape->wants_gradients ? GRADIENTS : 0.0) : NORM[backward][columns]) +
        of_samples + (first + reads + writes) / rate;
    return NULL;
}

const struct schedule normfuse_cuda_stream = {.name = "stream", .configure = configure};
