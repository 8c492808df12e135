/* SPDX-License-Identifier: MIT
 *
 * test_cuda_plans.c - what must hold of any choice of kernels and geometry, over drawn problems and GPUs, against a
 * driver without a GPU (fake_driver.h). A launch's signature is read out of the text that was compiled, its sizes out
 * of its arguments: every element of every tensor falls to one thread of one launch, which takes it for what it is;
 * every place in scratch memory that a later kernel reads is written by one block; grids and clusters are what the
 * device can hold, and blocks that wait for one another are resident together; scratch is used within what was asked
 * for; and no value goes a longer way through sums than tests/ref/tolerance.c says. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stdlib.h>
#include <string.h>

#include "cli/operator_call.h"
#include "cuda/loader.h"
#include "cuda/schedules.h"
#include "fake_driver.h"
#include "harness.h"
#include "normfuse.h"
#include "tolerance.h"

static const struct normfuse_cuda_device *device_of(int32_t ordinal)
{
    const struct normfuse_cuda_device *device = NULL;
    const normfuse_status status = normfuse_cuda_device("test", ordinal, &device);
    CHECK(status == NORMFUSE_OK, "device %d: %d %s", (int)ordinal, (int)status, normfuse_last_error());
    return status == NORMFUSE_OK ? device : NULL;
}

static uint64_t random_state = 20260102;

static int64_t random_below(int64_t count)
{
    random_state ^= random_state << 13, random_state ^= random_state >> 7, random_state ^= random_state << 17;
    return (int64_t)((random_state >> 11) % (uint64_t)count);
}

/* Sizes of all magnitudes, often near a power of two. */
static int64_t random_size(int max_bits)
{
    const int64_t power = INT64_C(1) << random_below(max_bits + 1);
    const int64_t size = random_below(3) == 0 ? power + random_below(3) - 1 : power + random_below(power);
    return size < 1 ? 1 : size;
}

struct plan_case {
    char name[200];
    enum problem_operator op;
    int64_t sizes[3], groups;
    normfuse_type type;
    bool channels_last, backward, has_sync, misaligned,
        sliced; /* sliced: of channels-last tensors with more channels */
    bool residual; /* before the activation */
    bool summed, in_place; /* pre_add, and forward u, backward du; u over x */
    int32_t activation;
    /* of a sample: the call is channel norm, and sizes are those of group norm of its positions; or 0 */
    int64_t positions;
    int32_t statistics, eps_kind;
};

static size_t scratch_address_bytes;
static int too_large, too_wide, slope_launches;
static int finish_launches[NORMFUSE_WORK_MERGE + 1]; /* of the body `finish`, by its work */
static int single_launches, single_parts, single_walks, single_unaligned, single_sums, single_tiled,
    single_outers; /* of the body `single` */
static int stream_launches, held_launches, held_clusters, held_grids, held_turns, held_rows, walk_folded,
    walk_unaligned, walk_proofs; /* of `stream` and `held` */
static const uintptr_t scratch_address = (uintptr_t)0x7f8000000000;

static int64_t up(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static int64_t levels(int64_t adding)
{
    int64_t count = 0;
    while (INT64_C(1) << count < adding)
        count++;
    return count;
}

/* x / divisor as the kernels do it: `by` is a divisor of theirs. */
static bool divides_by(uint32_t divisor, uint32_t multiplier, uint32_t shift)
{
    for (int i = 0; i < 40; i++) {
        const uint32_t near = (uint32_t)random_below(2000) * divisor;
        const uint32_t x = (i < 20 ? (uint32_t)random_below(INT32_MAX) : near - (i & 1)) & INT32_MAX;
        const uint32_t high = (uint32_t)((uint64_t)x * multiplier >> 32);
        if ((high + x) >> shift != x / divisor)
            return false;
    }
    return true;
}
#define divides(by) divides_by((by)->divisor, (by)->multiplier, (by)->shift)

static size_t end_of(const void *part, size_t bytes)
{
    return part != NULL ? (size_t)((uintptr_t)part - scratch_address) + bytes : 0;
}


static bool is_power_of_two(int64_t value)
{
    return value > 0 && (value & (value - 1)) == 0;
}

/* ---- the body `single` ------------------------------------------------------------------------------------------- */

/* The elements that share statistics with element (n, c), and where these are. */
static int64_t set_of_element(const struct plan_case *test, int64_t n, int64_t c)
{
    return test->op == GROUP_NORM ? n * test->groups + c / (test->sizes[1] / test->groups) : c;
}
static int64_t place_of_statistics(const struct plan_case *test, int64_t n, int64_t c)
{
    const int64_t set = set_of_element(test, n, c), positions = test->positions;
    if (positions == 0)
        return set;
    return (n / positions * test->groups + set % test->groups) * positions + n % positions;
}

/* A launch of it, and where the tensors of the call have their elements. */
struct single {
    const struct plan_case *test;
    const struct fake_launch *launch;
    struct normfuse_cuda_signature of;
    struct normfuse_single_arguments a;
    int64_t down, beside, block_columns;
    bool is_spread, has_statistics;
    int64_t batch, channel, position, extent; /* strides, and one past the last element */
};

static bool is_tiled(const struct single *s)
{
    return s->of.statistics == NORMFUSE_STATISTICS_COLUMN && s->of.parameters == NORMFUSE_PARAMETERS_OF_ROW;
}

/* The place of element i of the call, by sample, channel and position. */
static int64_t memory_of(const struct single *s, int64_t i)
{
    const int64_t *const sizes = s->test->sizes;
    if (s->test->positions > 0 && !s->test->channels_last)
        return i;
    return i / (sizes[1] * sizes[2]) * s->batch + i / sizes[2] % sizes[1] * s->channel + i % sizes[2] * s->position;
}

/* The sample and channel of a place in memory; the sample of channel norm is a position of all samples. */
static void element_at(const struct single *s, int64_t place, int64_t *n, int64_t *c)
{
    const struct plan_case *const test = s->test;
    const int64_t rest = place % s->batch;
    *n = place / s->batch;
    *c = test->channels_last ? rest % s->position : rest / s->channel;
    if (test->positions > 0 && !test->channels_last) {
        *n = place / (test->sizes[1] * test->positions) * test->positions + place % test->positions;
        *c = place / test->positions % test->sizes[1];
    }
}

/* The block and thread that work is about, of one sample; as `place` in device/single.cuh. */
struct single_place {
    int64_t block, rank, group, outer, channel, walker, of_sample, tx, ty, rows, columns, own;
    bool has_group;
};

static struct single_place place_in_single(const struct single *s, int64_t block, int64_t thread)
{
    const struct normfuse_single_arguments *const a = &s->a;
    struct single_place at = {.block = block};
    const int64_t turn = block / a->parts, slot = thread / s->of.lanes, of_group = thread % s->of.lanes;
    at.rank = block % a->parts;
    at.group = turn / a->walkers;
    at.walker = turn % a->walkers;
    if (s->beside > 1) {
        at.of_sample = slot & ((1 << a->sample_bits) - 1);
        at.group = at.group * (s->beside >> a->sample_bits) + (slot >> a->sample_bits);
    }
    at.has_group = s->beside == 1 || at.group < a->groups;
    at.tx = of_group % s->of.across;
    at.ty = of_group / s->of.across;
    const int64_t first_row = at.rank * a->next_rows, first_column = at.rank * a->next_columns;
    const int64_t rows = a->rows - first_row,
                  columns = a->columns - first_column - (s->is_spread ? at.group * s->block_columns : 0);
    at.rows = rows < a->part_rows ? rows : a->part_rows;
    at.columns = columns < a->part_columns ? columns : a->part_columns;
    const int64_t inner_groups = a->by_inner_groups.divisor;
    at.outer = s->of.positions ? at.group / inner_groups : 0;
    const int64_t inner = at.group - at.outer * inner_groups;
    at.channel = (s->of.positions ? inner : at.group) * a->group_channels;
    at.own = at.outer * a->outer_stride + (s->of.positions ? inner : at.group) * a->group_stride +
             first_row * a->row_stride + first_column;
    return at;
}

/* The places of the sums of a channel: which block writes each place, and that each is written. */
struct single_sums {
    int32_t *writer; /* 1 + the block; 0: none yet */
    int64_t count;
};

/* False: something was wrong, and said. */
static bool note_sums(const struct single *s, const struct single_place *at, int64_t sample, int64_t channel,
                      const struct single_sums *sums)
{
    const struct normfuse_single_arguments *const a = &s->a;
    const bool by_sample = s->of.gradients == NORMFUSE_GRADIENTS_OF_SAMPLES;
    const int64_t part = a->call.part_slots > 1 ? at->rank : 0;
    const int64_t slot = by_sample ? part : at->walker * a->call.part_slots + part;
    const int64_t of_sample = by_sample ? sample : s->of.positions ? at->outer : 0;
    const int64_t index = (of_sample * a->call.channels + channel) * a->call.sum_slots + slot;
    if (slot >= a->call.sum_slots || index >= sums->count)
        return CHECK(false, "%s: sums of channel %lld are beyond their places", s->test->name, (long long)channel);
    /* Blocks of a cluster that know the totals of all: the first one writes these. */
    const bool is_known = a->call.part_slots == 1 && s->of.shared_by_cluster != 0 && s->of.sums_slopes == 0;
    const int64_t writer = 1 + at->block - (is_known ? at->rank : 0);
    const int32_t before = sums->writer[index];
    sums->writer[index] = (int32_t)writer;
    return before == 0 || before == (int32_t)writer ||
           CHECK(false, "%s: blocks %d and %lld write the same sums of channel %lld", s->test->name, before - 1,
                 (long long)writer - 1, (long long)channel);
}

/* In `seen`, one a place in memory: how many threads have it. Ends at the first thing that is wrong. */
static void count_owners_of_single(const struct single *s, unsigned char *seen, const struct single_sums *sums)
{
    const struct normfuse_single_arguments *const a = &s->a;
    const struct plan_case *const test = s->test;
    const int64_t vector = s->of.vector, at_once = s->beside > 1 ? INT64_C(1) << a->sample_bits : 1;
#define HOLDS(condition)                                                                                               \
    if (!(condition)) {                                                                                                \
        CHECK(false, "%s: %s: not %s", test->name, s->launch->name, #condition);                                       \
        return;                                                                                                        \
    }
    for (int64_t i = 0; i < (int64_t)s->launch->grid * s->launch->threads; i++) {
        const struct single_place at = place_in_single(s, i / s->launch->threads, i % s->launch->threads);
        int64_t sample = at.walker * at_once + at.of_sample, columns = at.columns;
        HOLDS(s->of.exact == 0 || (at.has_group && (s->of.walks != 0 || sample < a->samples)));
        for (; at.has_group && sample < a->samples; sample += s->of.walks ? a->walkers * at_once : a->samples)
            for (int64_t k = 0; k < (int64_t)s->of.held_rows * s->of.held_columns; k++) {
                if (is_tiled(s))
                    columns = least(a->part_columns, a->columns - sample * a->part_columns);
                const int64_t row = at.ty + k / s->of.held_columns * s->down;
                const int64_t row_begin = sample * a->sample_stride + at.own + row * a->row_stride;
                const int64_t before = s->of.aligned ? 0 : row_begin & (vector - 1);
                const int64_t first = (at.tx + k % s->of.held_columns * s->of.across) * vector - before;
                const bool has = row < at.rows && first < columns;
                HOLDS(s->of.exact == 0 || has);
                if (!has)
                    continue;
                HOLDS((row_begin + first) % vector == 0);
                for (int64_t j = 0; j < vector; j++) {
                    const int64_t column = first + j, place = row_begin + column;
                    if (s->of.aligned == 0 && (column < 0 || column >= columns))
                        continue;
                    HOLDS(place >= 0 && place < s->extent);
                    seen[place]++;
                    int64_t n, c;
                    element_at(s, place, &n, &c);
                    const int64_t of = at.channel +
                                       (s->of.parameters == NORMFUSE_PARAMETERS_OF_ROW ? at.rank * a->next_rows + row
                                        : s->of.parameters == NORMFUSE_PARAMETERS_OF_COLUMN
                                            ? at.rank * a->next_columns + column
                                            : 0);
                    HOLDS(of == c);
                    const int64_t set = s->of.statistics == NORMFUSE_STATISTICS_COLUMN ? of : at.group;
                    const int64_t of_sample = is_tiled(s) ? at.group : sample,
                                  of_set = is_tiled(s) ? sample * a->part_columns + column : set;
                    HOLDS(!s->has_statistics || s->of.mean == 0 ||
                          of_sample * a->call.mean.sample + of_set * a->call.mean.channel ==
                              place_of_statistics(test, n, c));
                    if (sums->count > 0 && !note_sums(s, &at, sample, of, sums))
                        return;
                }
            }
    }
#undef HOLDS
}

/* Roundings on a value's longest way into a sum: in a thread, lanes of a warp, warps, blocks; and the distance, the
 * product and the quotients, 6. */
static double longest_way_in_single(const struct single *s, bool of_gradients)
{
    const struct normfuse_single_arguments *const a = &s->a;
    const int64_t lanes = s->of.lanes, vector = s->of.vector;
    const int64_t thread_rows = up(a->part_rows, s->down);
    const int64_t thread_columns = least(vector * s->of.held_columns, a->part_columns);
    /* Adding the nothing that other threads have rounds nothing; those of a row are adjacent. */
    const int64_t busy_rows = least(a->part_rows, s->down),
                  busy = busy_rows > 1 ? busy_rows * s->of.across : least(lanes, up(a->part_columns, vector));
    const int64_t warps = up(busy, 32), of_warps = warps <= 1 ? 0 : lanes <= 256 ? warps - 1 : levels(warps);
    const int64_t of_block = levels(least(busy, 32)) + of_warps;
    const int64_t at_once = INT64_C(1) << a->sample_bits;
    const int64_t samples = of_gradients ? up(a->samples, at_once * a->walkers) - 1 : 0;
    const bool by_row = s->of.parameters == NORMFUSE_PARAMETERS_OF_ROW,
               by_column = s->of.parameters == NORMFUSE_PARAMETERS_OF_COLUMN;
    if (s->of.statistics == NORMFUSE_STATISTICS_COLUMN) {
        int64_t column_lanes = 1;
        while (column_lanes < 32 && column_lanes * 2 <= s->down && column_lanes * 2 * s->block_columns <= s->of.threads)
            column_lanes *= 2;
        return (double)(thread_rows + up(s->down, column_lanes) + levels(column_lanes) +
                        (s->of.shared_by_cluster ? a->parts : 0) + 6);
    }
    /* A channel's additions: its values in a thread, then the sums of samples; those of threads in double, but for
     * lanes of a row and the threads of a group of one channel. */
    if (of_gradients && (by_row || by_column))
        return (double)((by_row ? thread_columns + levels(s->of.across) : thread_rows) + samples + 6);
    /* Forward in two sums, which are then one. */
    const int64_t in_thread = !s->of.backward ? up(thread_rows * thread_columns, 2) + 1
                              : by_row        ? thread_columns + s->of.held_rows
                              : by_column     ? thread_rows + thread_columns
                                              : thread_rows * thread_columns;
    const int64_t of_cluster = !s->of.shared_by_cluster ? 0 : s->of.backward ? 5 : 4 + 3;
    return (double)(in_thread + of_block + of_cluster + samples + 6);
}

/* Bytes of dynamic shared memory that the kernel places: vectors of two tiles, where it walks over these; behind them sums
 * of columns, or what the blocks of a cluster send one another; and sums of channels, in their place. */
static int64_t shared_of_single(const struct single *s)
{
    const int64_t value = s->of.type == NORMFUSE_F64 ? 8 : 4, parts = s->of.shared_by_cluster ? 16 : 0;
    const bool by_row = s->of.parameters == NORMFUSE_PARAMETERS_OF_ROW,
               by_column = s->of.parameters == NORMFUSE_PARAMETERS_OF_COLUMN;
    int64_t bytes = 2 * value * parts;
    if (s->of.statistics == NORMFUSE_STATISTICS_COLUMN)
        bytes = value * (2 * s->down * (s->block_columns + 4) + s->block_columns * (3 + 1 + 2 * parts));
    const int64_t weights = by_column ? s->down * s->block_columns : by_row ? s->of.held_rows * s->down : 1;
    const int64_t of_channels =
        s->of.gradients != NORMFUSE_GRADIENTS_NONE ? s->beside * weights * (s->of.sums_slopes ? 3 : 2) * value : 0;
    const int64_t x_bytes = (int64_t)normfuse_type_bytes(s->of.type),
                  y_bytes = (int64_t)normfuse_type_bytes(s->of.y_type);
    const bool reads_post = s->of.post_add && (!s->of.backward || s->of.activation != NORMFUSE_IDENTITY);
    const int64_t tile = x_bytes * (1 + (s->of.pre_add != 0) + (s->of.du != 0)) + y_bytes * (s->of.backward + reads_post);
    const bool has_tiles = is_tiled(s) && s->of.walks && s->of.vector * x_bytes >= 8;
    return (of_channels > bytes ? of_channels : bytes) +
           (has_tiles ? 2 * s->of.threads * s->of.held_rows * s->of.held_columns * s->of.vector * tile : 0);
}

/* Every element of the tensors has one thread, which takes it for what it is; blocks, shared memory and clusters are
 * within the device's limits; every sum that a later kernel reads is written by one block. */
static void check_single(const struct plan_case *test, const struct fake_launch *launch,
                         const struct normfuse_cuda_device *device, const struct tolerance_arithmetic *arithmetic)
{
    enum { STATIC_SHARED = 2048, MAX_ELEMENTS = 60000, MAX_THREADS = 2000000, MAX_CLUSTER_BLOCKS = 16 };
    struct single s = {.test = test, .launch = launch, .of = fake_driver_signature((int)launch->kernel)};
    const struct normfuse_single_arguments *const a = &s.a;
    const int64_t *const sizes = test->sizes;
    memcpy(&s.a, launch->arguments, sizeof s.a);
#define HOLDS(condition)                                                                                               \
    if (!(condition))                                                                                                  \
    CHECK(false, "%s: %s: not %s", test->name, launch->name, #condition)
    s.down = s.of.lanes / s.of.across;
    s.beside = s.of.threads / s.of.lanes;
    s.block_columns = (int64_t)s.of.across * s.of.held_columns * s.of.vector;
    s.has_statistics =
        s.of.statistics == NORMFUSE_STATISTICS_GROUP || s.of.statistics == NORMFUSE_STATISTICS_COLUMN;
    s.is_spread =
        s.of.parameters == NORMFUSE_PARAMETERS_OF_COLUMN && s.of.statistics != NORMFUSE_STATISTICS_GROUP;
    s.channel = test->channels_last ? 1 : sizes[2];
    s.position = test->channels_last ? sizes[1] + (test->sliced ? 8 : 0) : 1;
    s.batch = sizes[2] * (test->channels_last ? s.position : sizes[1]);
    s.extent = (sizes[0] - 1) * s.batch + (sizes[1] - 1) * s.channel + (sizes[2] - 1) * s.position + 1;

    HOLDS(s.of.body == NORMFUSE_BODY_single && s.of.backward == test->backward && s.of.type == (int32_t)test->type);
    HOLDS(s.of.positions == 0 || (test->positions > 0 && divides(&a->by_inner_groups)));
    HOLDS(test->positions < 2 || test->channels_last || sizes[1] == 1 || s.of.positions != 0);
    HOLDS(s.of.activation == test->activation && s.has_statistics == (test->op != AFFINE));
    HOLDS(s.of.pre_add == test->summed && s.of.stores_u == (test->summed && !test->backward) &&
          s.of.du == (test->summed && test->backward) && s.of.post_add == test->residual);
    HOLDS(s.of.dpost_add == (test->residual && test->backward) && s.of.writes_out == 1);
    HOLDS(s.of.mean_square == (test->statistics == NORMFUSE_MEAN_SQUARE) &&
          s.of.eps_of_norm == (test->eps_kind == NORMFUSE_EPS_OF_NORM));
    /* Threads. */
    HOLDS((int32_t)launch->threads == s.of.threads && s.of.threads % 32 == 0 && s.of.threads <= 1024);
    HOLDS((s.of.lanes & (s.of.lanes - 1)) == 0 && (s.of.across & (s.of.across - 1)) == 0 && s.of.across <= s.of.lanes);
    HOLDS(s.of.threads % s.of.lanes == 0 && (s.beside & (s.beside - 1)) == 0 &&
          INT64_C(1) << a->sample_bits <= s.beside);
    HOLDS(s.of.lanes <= 32 || s.beside == 1); /* whole blocks, or parts of a warp, meet */
    HOLDS(s.of.parameters != NORMFUSE_PARAMETERS_OF_ROW || !s.of.backward || s.of.across <= 32);
    HOLDS(s.of.parameters != NORMFUSE_PARAMETERS_OF_COLUMN || s.of.aligned != 0);
    HOLDS(!s.is_spread || s.beside == 1);
    HOLDS((s.of.joins_beside != 0) == (a->sample_bits > 0));
    /* Vectors. */
    const int64_t vector_bytes = s.of.vector * (int64_t)normfuse_type_bytes(s.of.type);
    HOLDS(s.of.y_type == (int32_t)test->type);
    const void *const tensors[] = {a->x,       a->dy,     a->out,           a->call.pre_add, a->call.post_add,
                                   a->call.du, a->call.u, a->call.dpost_add};
    HOLDS(vector_bytes <= 16 && (s.of.vector & (s.of.vector - 1)) == 0);
    for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++)
        HOLDS((uintptr_t)tensors[i] % (uintptr_t)vector_bytes == 0);
    /* Blocks. */
    HOLDS(!launch->cooperative && launch->cluster == (s.of.shared_by_cluster ? (uint32_t)a->parts : 0u));
    HOLDS(launch->cluster == 0 || (device->clusters && a->parts <= MAX_CLUSTER_BLOCKS));
    HOLDS((s.of.split != 0) == (a->parts > 1) && (s.of.split != 0 || s.of.shared_by_cluster == 0));
    HOLDS(!s.has_statistics || (s.of.shared_by_cluster != 0) == (a->parts > 1));
    HOLDS(a->next_rows == 0 || a->next_columns == 0);
    HOLDS((a->parts > 1) == (a->next_rows > 0 || a->next_columns > 0));
    HOLDS((int64_t)launch->shared >= shared_of_single(&s));
    HOLDS(launch->shared + STATIC_SHARED <= device->shared_per_block);
    HOLDS((int32_t)a->by_parts.divisor == a->parts && divides(&a->by_parts));
    HOLDS((int32_t)a->by_walkers.divisor == a->walkers && divides(&a->by_walkers));
    /* Whatever the size: rows, columns, groups and samples are all somebody's. */
    const int64_t turns = (int64_t)launch->grid / a->parts, group_blocks = turns / a->walkers;
    HOLDS(turns * a->parts == (int64_t)launch->grid && group_blocks * a->walkers == turns);
    HOLDS(s.down * s.of.held_rows >= a->part_rows);
    HOLDS(s.block_columns >= a->part_columns + (s.of.aligned ? 0 : s.of.vector - 1));
    HOLDS((int64_t)a->next_rows * (a->parts - 1) + a->part_rows >= a->rows &&
          (int64_t)a->next_rows * (a->parts - 1) < a->rows && a->part_rows >= a->next_rows);
    HOLDS(is_tiled(&s) ? (int64_t)a->samples * a->part_columns >= a->columns &&
                             (int64_t)(a->samples - 1) * a->part_columns < a->columns
          : s.is_spread
              ? group_blocks * s.block_columns >= a->columns
              : (int64_t)a->next_columns * (a->parts - 1) + a->part_columns >= a->columns &&
                    (int64_t)a->next_columns * (a->parts - 1) < a->columns && a->part_columns >= a->next_columns);
    HOLDS(s.is_spread || group_blocks * (s.beside >> a->sample_bits) >= a->groups);
    HOLDS((s.of.walks != 0) == (((int64_t)a->walkers << a->sample_bits) < a->samples));
    HOLDS(((int64_t)(a->walkers - 1) << a->sample_bits) < a->samples);
    HOLDS(a->call.channels == sizes[1]);
    const double values = test->op == GROUP_NORM ? (double)(sizes[1] / test->groups) * (double)sizes[2]
                                        : (double)sizes[0] * (double)sizes[2];
    HOLDS(!s.has_statistics || (a->call.values == (float)values && a->call.share == 1.0f / a->call.values));
    /* Sums for a later kernel. */
    const bool leaves_sums =
        s.of.gradients != NORMFUSE_GRADIENTS_NONE && s.of.gradients != NORMFUSE_GRADIENTS_DIRECT;
    const bool by_sample = s.of.gradients == NORMFUSE_GRADIENTS_OF_SAMPLES;
    struct single_sums sums = {
        .count = leaves_sums ? (by_sample        ? a->samples
                                : s.of.positions ? a->groups / (int64_t)a->by_inner_groups.divisor
                                                 : 1) * (int64_t)a->call.channels * a->call.sum_slots : 0};
    HOLDS(test->backward == (s.of.gradients != NORMFUSE_GRADIENTS_NONE)); /* dweight is always wanted */
    HOLDS(!leaves_sums ||
          (a->call.sums != NULL && end_of(a->call.sums, (size_t)sums.count * 16) <= scratch_address_bytes));
    HOLDS(!leaves_sums || s.of.sums_slopes == 0 ||
          end_of(a->call.slope_sums, (size_t)sums.count * 16) <= scratch_address_bytes);
    const int64_t elements = sizes[0] * sizes[1] * sizes[2], held = (int64_t)s.of.held_rows * s.of.held_columns;
    if (s.extent <= MAX_ELEMENTS && (int64_t)launch->grid * launch->threads * held <= MAX_THREADS) {
        unsigned char *const seen = calloc((size_t)s.extent, 1);
        sums.writer = calloc((size_t)sums.count + 1, sizeof *sums.writer);
        int64_t right = 0, all = 0, empty = 0;
        if (seen == NULL || sums.writer == NULL)
            abort();
        count_owners_of_single(&s, seen, &sums);
        for (int64_t i = 0; i < s.extent; i++)
            all += seen[i];
        for (int64_t i = 0; i < elements; i++)
            right += seen[memory_of(&s, i)] == 1;
        for (int64_t i = 0; i < sums.count; i++)
            empty += sums.writer[i] == 0;
        CHECK(right == elements && all == elements, "%s: %s: %lld of %lld elements have one thread, %lld are held",
              test->name, launch->name, (long long)right, (long long)elements, (long long)all);
        CHECK(empty == 0, "%s: %s: %lld of %lld sums are not written", test->name, launch->name, (long long)empty,
              (long long)sums.count);
        free(seen);
        free(sums.writer);
    }
    single_launches++;
    single_parts += a->parts > 1;
    single_walks += s.of.walks;
    single_unaligned += s.of.aligned == 0;
    single_sums += leaves_sums;
    single_tiled += is_tiled(&s);
    single_outers += s.of.positions && a->groups > (int32_t)a->by_inner_groups.divisor;
    for (int gradients = !s.has_statistics; gradients < 1 + (s.of.gradients != NORMFUSE_GRADIENTS_NONE); gradients++) {
        const double way = longest_way_in_single(&s, gradients != 0);
        const double more =
            gradients ? tolerance_sample_additions(arithmetic, test->channels_last || sizes[2] == 1, sizes[0], sizes[2])
                      : 0.0;
        CHECK(way <= arithmetic->additions + more, "%s: %s: a value meets %.0f roundings, tolerance.c says %.0f",
              test->name, launch->name, way, arithmetic->additions + more);
    }
#undef HOLDS
}

/* ---- the bodies `stream` and `held` ------------------------------------------------------------------------------ */

/* A launch of one of them, and where the tensors of the call have their elements. */
struct walk {
    const struct plan_case *test;
    const struct fake_launch *launch;
    struct normfuse_cuda_signature of;
    struct normfuse_stream_arguments a;
    int64_t down, beside, block_columns, value; /* value: bytes of what is computed in */
    bool is_held, by_columns, by_rows, has_statistics;
    int64_t batch, channel, position, extent; /* strides, and one past the last element */
};

/* A block and a thread of it; as `place` in device/walk.cuh. In later turns a block is as many further as the grid has.
 * */
struct walk_place {
    int64_t block, thread, part, wide, sample, slab, tx, ty, column;
    int64_t first_row, row_end, first_vector, vector_end, begin;
    bool slab_exists, exists;
};

static struct walk_place place_in_walk(const struct walk *w, int64_t block, int64_t thread)
{
    const struct normfuse_stream_arguments *const a = &w->a;
    struct walk_place at = {.block = block, .thread = thread};
    const int64_t of_grid = a->backwards ? (int64_t)w->launch->grid - 1 - block : block;
    at.tx = thread % w->of.lanes % w->of.across;
    at.ty = thread % w->of.lanes / w->of.across;
    if (w->by_columns) {
        int64_t of_sample = 0;
        if (w->is_held) {
            at.part = of_grid % a->parts;
            of_sample = of_grid / a->parts;
            at.slab_exists = of_sample < a->slabs;
            of_sample = at.slab_exists ? of_sample : 0;
        } else {
            at.part = of_grid / a->blocks_wide % a->parts;
            of_sample = of_grid / a->blocks_wide / a->parts * a->blocks_wide + of_grid % a->blocks_wide;
            at.slab_exists = true;
        }
        at.sample = of_sample / a->blocks_wide;
        at.wide = of_sample % a->blocks_wide;
        at.column = at.wide * w->block_columns + at.tx * w->of.vector;
        at.exists = at.slab_exists && thread < w->of.across * w->down && at.column < a->columns;
        at.begin = at.sample * a->sample_stride;
        at.first_row = at.part * a->next_rows + at.ty;
        at.row_end = a->part_rows > 0 ? least(a->rows, at.part * a->next_rows + a->part_rows) : a->rows;
        return at;
    }
    const int64_t of_all = of_grid / a->parts * w->beside + thread / w->of.lanes;
    const int64_t sample_slabs = a->by_sample_slabs.divisor;
    at.part = of_grid % a->parts;
    at.slab_exists = at.exists = of_all < a->slabs;
    at.sample = at.exists ? of_all / sample_slabs : 0;
    at.slab = at.exists ? of_all % sample_slabs : 0;
    at.begin = at.sample * a->sample_stride + at.slab * a->slab_stride;
    at.first_row = at.part * a->next_rows + at.ty;
    at.row_end = at.exists ? least(a->rows, at.part * a->next_rows + a->part_rows) : 0;
    at.first_vector = at.part * a->next_vectors + at.tx;
    at.vector_end = at.part * a->next_vectors + a->part_vectors;
    return at;
}

static int64_t channel_of_column(const struct walk *w, int64_t column)
{
    return w->of.folded ? column % w->a.call.channels : column;
}

static int64_t set_of_channel(const struct walk *w, const struct walk_place *at, int64_t c)
{
    return (w->a.sets_are_of_samples ? at->sample * w->a.call.channel_groups : 0) + c / w->a.by_group.divisor;
}

/* Places that one block each must write: triples of norm groups, pairs of channels, gradients. */
struct written {
    int32_t *writer; /* 1 + the block; 0: none yet */
    int64_t count;
};

static bool note_written(const struct walk *w, struct written *to, int64_t index, int64_t block, const char *what)
{
    if (index < 0 || index >= to->count)
        return CHECK(false, "%s: %s: %s %lld is beyond its %lld places", w->test->name, w->launch->name, what,
                     (long long)index, (long long)to->count);
    const int32_t before = to->writer[index];
    to->writer[index] = (int32_t)(1 + block);
    return before == 0 || CHECK(false, "%s: %s: blocks %d and %lld write %s %lld", w->test->name, w->launch->name,
                                before - 1, (long long)block, what, (long long)index);
}

/* The sums that a block leaves, of the slab that it has in a turn. `triples`, `pairs` and `gradients` may have no
 * places. */
struct left_by_walk {
    struct written triples, pairs, gradients;
};

static bool note_pair(const struct walk *w, const struct walk_place *at, int64_t c, int64_t copy,
                      struct left_by_walk *to)
{
    const struct normfuse_stream_arguments *const a = &w->a;
    if (w->of.gradients == NORMFUSE_GRADIENTS_DIRECT)
        return at->part != 0 || note_written(w, &to->gradients, c, at->block, "gradient");
    const int64_t channel = (a->sums_are_of_samples ? at->sample * a->call.channels : 0) + c;
    const int64_t index = channel * a->call.sum_slots + at->part * a->sum_parts * a->copies + copy;
    return note_written(w, &to->pairs, index, at->block, "pair");
}

static bool note_triple(const struct walk *w, const struct walk_place *at, int64_t c, int64_t of_group, int64_t copy,
                        struct left_by_walk *to)
{
    const struct normfuse_stream_arguments *const a = &w->a;
    const int64_t part = (a->sets_are_of_samples ? 0 : at->sample * a->parts) + at->part;
    const int64_t slot = (of_group * a->part_slots + part) * a->copies + copy, set = set_of_channel(w, at, c);
    if (slot >= a->set_triples)
        return CHECK(false, "%s: %s: a norm group has no place %lld", w->test->name, w->launch->name, (long long)slot);
    return note_written(w, &to->triples, set * a->set_triples + slot, at->block, "triple");
}

/* False: something was wrong, and said. `leaves_pairs`, or triples. */
static bool note_what_is_left(const struct walk *w, const struct walk_place *first, bool leaves_pairs,
                              struct left_by_walk *to)
{
    const struct normfuse_stream_arguments *const a = &w->a;
#define HOLDS(condition)                                                                                               \
    if (!(condition))                                                                                                  \
        return CHECK(false, "%s: %s: not %s", w->test->name, w->launch->name, #condition);
    if (w->by_columns) {
        if (!first->slab_exists)
            return true;
        const int64_t width = least(w->block_columns, a->columns - first->wide * w->block_columns);
        const int64_t all = a->joined_rows > 1 ? a->call.channels : width;
        const int64_t subgroup = leaves_pairs ? 1 : a->subgroup;
        for (int64_t column = 0; column < all; column += subgroup) {
            const int64_t of_row = first->wide * w->block_columns + column, c = channel_of_column(w, of_row);
            const int64_t copy = w->of.folded && a->joined_rows == 1 ? of_row / a->call.channels : 0;
            /* Columns that are joined are this block's, of one norm group. */
            HOLDS(column + subgroup - 1 + (a->joined_rows - 1) * (int64_t)a->call.channels < width);
            HOLDS(c % a->by_group.divisor % subgroup == 0 && a->by_group.divisor % subgroup == 0);
            HOLDS(copy < a->copies);
            if (leaves_pairs ? !note_pair(w, first, c, copy, to)
                             : !note_triple(w, first, c, c % a->by_group.divisor / subgroup, copy, to))
                return false;
        }
        return true;
    }
    for (int64_t thread = 0; thread < w->launch->threads; thread += w->of.lanes) {
        struct walk_place at = *first;
        if (w->beside > 1)
            at = place_in_walk(w, first->block, thread);
        if (!at.slab_exists)
            continue;
        const int64_t rows = w->by_rows ? least(a->part_rows, a->rows - at.part * a->next_rows) : 1;
        for (int64_t i = 0; i < rows; i++) {
            const int64_t c = at.slab * a->slab_channels + (w->by_rows ? at.part * a->next_rows + i : 0);
            if (leaves_pairs ? !note_pair(w, &at, c, 0, to) : !note_triple(w, &at, c, c % a->by_group.divisor, 0, to))
                return false;
        }
    }
    return true;
#undef HOLDS
}

/* In `seen`, one a place in memory: how many threads have it. Ends at the first thing that is wrong. */
static void count_owners_of_walk(const struct walk *w, unsigned char *seen, struct left_by_walk *left)
{
    const struct normfuse_stream_arguments *const a = &w->a;
    const struct plan_case *const test = w->test;
    const int64_t vector = w->of.vector;
    const bool leaves_triples = w->of.reduces && !w->is_held && !w->of.backward;
    const bool leaves_pairs = w->of.reduces && w->of.backward &&
                              (!w->is_held || w->of.gradients != NORMFUSE_GRADIENTS_NONE);
#define HOLDS(condition)                                                                                               \
    if (!(condition)) {                                                                                                \
        CHECK(false, "%s: %s: not %s", test->name, w->launch->name, #condition);                                       \
        return;                                                                                                        \
    }
    for (int64_t block = 0; block < (w->is_held ? a->turns : 1) * (int64_t)w->launch->grid; block++) {
        const struct walk_place first = place_in_walk(w, block, 0);
        int64_t steps_of_warp = 0;
        if ((leaves_triples && !note_what_is_left(w, &first, false, left)) ||
            (leaves_pairs && !note_what_is_left(w, &first, true, left)))
            return;
        for (int64_t thread = 0; thread < w->launch->threads; thread++) {
            const struct walk_place at = place_in_walk(w, block, thread);
            /* Threads of a warp that leave sums of their rows together go on together. */
            const int64_t ahead = w->by_rows && w->of.across < 32 ? at.ty % (32 / w->of.across) : 0;
            int64_t steps = 0;
            for (int64_t row = at.first_row; row - ahead < at.row_end; row += a->row_step) {
                const int64_t row_begin = at.begin + row * a->row_stride;
                for (int64_t step = 0; step < (w->by_columns ? 1 : a->steps); step++, steps++) {
                    const int64_t of_row = at.first_vector + step * w->of.across;
                    const int64_t column =
                        w->by_columns ? at.column : of_row * vector - (w->of.aligned ? 0 : row_begin & (vector - 1));
                    const bool has = w->by_columns ? at.exists && row < at.row_end
                                                   : row < at.row_end && of_row < at.vector_end && column < a->columns;
                    if (!has)
                        continue;
                    const int64_t element = row_begin + (w->of.strided ? column * a->column_stride : column);
                    HOLDS(w->of.strided || element % vector == 0);
                    for (int64_t j = 0; j < vector; j++) {
                        const int64_t place = element + j;
                        if (!w->of.aligned && (column + j < 0 || column + j >= a->columns))
                            continue;
                        HOLDS(place >= 0 && place < w->extent);
                        seen[place]++;
                        const int64_t n = place / w->batch, rest = place % w->batch;
                        const int64_t c = test->channels_last ? rest % w->position : rest / w->channel;
                        const int64_t of = w->by_columns ? channel_of_column(w, column + j)
                                                         : at.slab * a->slab_channels + (w->by_rows ? row : 0);
                        HOLDS(of == c);
                        HOLDS(
                            !w->has_statistics ||
                            set_of_channel(w, &at, of) ==
                                set_of_element(test, n, c));
                        HOLDS(!w->by_rows ||
                              (row >= at.part * a->next_rows && row < at.part * a->next_rows + a->part_rows));
                    }
                }
            }
            HOLDS(!w->is_held || steps <= a->kept);
            HOLDS(!w->by_rows || thread % 32 == 0 || steps == steps_of_warp);
            steps_of_warp = steps;
            if (!w->is_held || !w->by_columns || !at.exists)
                continue;
            /* A column's norm group is one that the block has, which has this channel's statistics. */
            for (int64_t j = 0; j < vector; j++) {
                const int64_t c = channel_of_column(w, at.column + j),
                              d = w->of.statistics_of_groups ? a->by_group.divisor : 1;
                const int64_t set = w->of.folded ? c / d : (at.tx * vector + j) / d;
                const int64_t first_channel = (w->of.folded ? 0 : at.wide * w->block_columns) + set * d;
                HOLDS(set < a->slab_sets && first_channel / d == c / d && first_channel % d == 0);
            }
        }
    }
#undef HOLDS
}

/* True if a tensor is read beside x and dy: ahead of the activation. */
static bool adds_post(const struct normfuse_cuda_signature *of)
{
    return of->post_add && (!of->backward || of->activation != NORMFUSE_IDENTITY);
}

static bool keeps_dz_exactly(const struct normfuse_cuda_signature *of)
{
    return of->type == NORMFUSE_F64 || of->type == NORMFUSE_F32 || of->activation == NORMFUSE_IDENTITY ||
           of->activation == NORMFUSE_RELU || of->activation == NORMFUSE_RELU6;
}

/* Tensors that go through slots: `stream`'s; those that pass beside what `held` keeps. As in device/stream.cuh and
 * device/held.cuh. */
static int64_t tensors_in_slots(const struct walk *w)
{
    const struct normfuse_cuda_signature *const of = &w->of;
    if (!w->is_held) {
        const bool x = !of->backward || of->reduces || w->has_statistics || of->activation != NORMFUSE_IDENTITY;
        const bool behind = of->backward ? adds_post(of) : of->post_add && of->applies;
        return x + of->backward + (of->pre_add && x) + behind + (of->du && of->applies);
    }
    const bool again = of->backward && !keeps_dz_exactly(of);
    const int64_t sums = (of->pre_add != 0) + (of->backward && adds_post(of));
    const int64_t writes = (of->backward ? adds_post(of) && again : of->post_add) + (of->du != 0);
    return sums > writes ? sums : writes;
}

static int64_t in_16s(int64_t bytes)
{
    return up(bytes, 16) * 16;
}

/* Bytes of what the threads of a block found of its columns, and of what these become: join_columns. */
static int64_t bytes_of_columns(const struct walk *w)
{
    const int64_t numbers = w->of.backward && w->of.sums_slopes ? 3 : 2;
    const int64_t columns = w->block_columns / w->of.piece, of_threads = w->value * numbers * w->down * columns;
    return 24 * columns + (w->of.backward ? in_16s(of_threads) : of_threads + 2 * w->value * columns);
}

/* Bytes of dynamic shared memory that the kernel places: slots, and sums in their place or behind them. */
static int64_t shared_of_walk(const struct walk *w)
{
    const struct normfuse_stream_arguments *const a = &w->a;
    const int64_t slot = w->of.vector * (int64_t)normfuse_type_bytes(w->of.type) * w->of.threads;
    const int64_t slots = w->of.ahead * tensors_in_slots(w) * slot;
    if (!w->is_held) {
        const int64_t sums = w->by_columns && w->of.reduces ? bytes_of_columns(w) : 0;
        return slots > sums ? slots : sums;
    }
    const int64_t kept = a->kept * (1 + w->of.backward) * slot, message = w->value * (w->of.backward ? 2 : 4);
    const bool in_cluster = w->of.exchanges == NORMFUSE_EXCHANGE_IN_CLUSTER;
    if (a->ring_at < kept || a->sums_at < a->ring_at + slots || a->ring_at % 16 != 0 || a->sums_at % 16 != 0)
        return INT64_MAX;
    const int64_t exchanged = a->slab_sets * (message * (1 + (in_cluster ? a->parts : 0)) + 4 * w->value);
    const int64_t row_entries = w->of.across < 32 ? 1 : w->of.across / 32;
    const int64_t own = w->by_columns ? bytes_of_columns(w)
                        : w->by_rows  ? a->part_rows * w->value * (6 + 3 * row_entries)
                                      : 0;
    return a->sums_at + exchanged + own;
}

/* Bytes of static shared memory: sums of warps, and the mailbox. */
static int64_t static_shared_of_walk(const struct walk *w)
{
    const int64_t warps = w->of.threads / 32;
    return w->by_columns ? 8 : 8 + w->value * warps * (!w->of.backward ? 4 : w->of.sums_slopes ? 3 : 2);
}

/* Roundings on a value's longest way into a sum: in a thread, lanes of a warp, warps, blocks; and the distance, the
 * product and the quotients, 6. What is joined in double rounds nothing that counts. */
static double longest_way_in_walk(const struct walk *w)
{
    const struct normfuse_stream_arguments *const a = &w->a;
    const int64_t set_lanes = w->by_columns ? 8 : 32, vector = w->of.vector;
    const bool exchanges = w->is_held && a->parts > 1;
    const int64_t of_parts = !exchanges ? 0 : up(a->parts, set_lanes) + levels(set_lanes) + (w->of.backward ? 0 : 3);
    if (w->by_columns) {
        const int64_t rows = a->part_rows > 0 ? up(a->part_rows, a->row_step) : up(a->rows, a->row_step);
        int64_t lanes = 1;
        while (lanes < 32 && lanes * 2 <= w->down && lanes * 2 * w->block_columns <= w->of.threads * w->of.piece)
            lanes *= 2;
        /* A piece: its additions, and the differences of pivots and means. */
        const int64_t of_piece = w->of.piece > 1 ? w->of.piece + 4 : 0;
        return (double)(rows + of_piece + up(w->down, lanes) + levels(lanes) + of_parts + 6);
    }
    const int64_t lanes = w->of.lanes, rows = up(a->part_rows, w->down), vectors = rows * a->steps;
    /* Adding the nothing that other threads have rounds nothing. */
    const int64_t busy = least(lanes, (int64_t)a->part_vectors * a->part_rows), warps = up(busy, 32);
    const int64_t of_block = levels(least(busy, 32)) + (warps <= 1 ? 0 : lanes <= 256 ? warps - 1 : levels(warps));
    if (w->by_rows && w->of.backward) /* rows in a thread, then those of the part in double or one after the other */
        return (double)(a->steps * vector + levels(w->of.across < 32 ? w->of.across : 32) +
                        up(a->part_rows, w->of.threads) + of_block + of_parts + 6);
    /* The elements of other rows in a vector count as nothing. */
    const int64_t values = rows * least(a->steps * vector, a->columns);
    const int64_t in_thread = w->of.backward ? values
                              : vector > 1   ? least(vectors * (vector / 2) + 1, values)
                                             : vectors;
    return (double)(in_thread + of_block + of_parts + 6);
}

/* The sums that the last kernel left for a later one: triples of a norm group; slots of a channel, of each sample. */
static struct {
    int64_t triples, slots;
    bool of_samples;
} sums_left;

/* Every element of the tensors has one thread, which takes it for what it is; every place that a later kernel reads is
 * written by one block, and no other; shared memory, clusters, grids and scratch are within their limits. */
static void check_walk(const struct plan_case *test, const struct fake_launch *launch,
                       const struct normfuse_cuda_device *device, const struct tolerance_arithmetic *arithmetic)
{
    enum {
        MAX_ELEMENTS = 60000,
        MAX_STEPS_WALKED = 2000000,
        MAX_CLUSTER_BLOCKS = 16,
        MIN_REGISTERS = 40,
        RESERVED = 1024
    };
    struct walk w = {.test = test, .launch = launch, .of = fake_driver_signature((int)launch->kernel)};
    const struct normfuse_stream_arguments *const a = &w.a;
    const int64_t *const sizes = test->sizes;
    memcpy(&w.a, launch->arguments, sizeof w.a);
#define HOLDS(condition)                                                                                               \
    if (!(condition))                                                                                                  \
    CHECK(false, "%s: %s: not %s", test->name, launch->name, #condition)
    w.is_held = w.of.body == NORMFUSE_BODY_held;
    w.by_columns = w.of.parameters == NORMFUSE_PARAMETERS_OF_COLUMN;
    w.by_rows = w.of.parameters == NORMFUSE_PARAMETERS_OF_ROW;
    w.has_statistics = w.of.statistics == NORMFUSE_STATISTICS_GROUP;
    w.down = w.of.lanes / w.of.across;
    w.beside = w.of.threads / w.of.lanes;
    w.block_columns = (int64_t)w.of.across * w.of.vector;
    w.value = w.of.type == NORMFUSE_F64 ? 8 : 4;
    w.channel = test->channels_last ? 1 : sizes[2];
    w.position = test->channels_last ? sizes[1] + (test->sliced ? 8 : 0) : 1;
    w.batch = sizes[2] * (test->channels_last ? w.position : sizes[1]);
    w.extent = (sizes[0] - 1) * w.batch + (sizes[1] - 1) * w.channel + (sizes[2] - 1) * w.position + 1;

    HOLDS(w.of.backward == test->backward && w.of.type == (int32_t)test->type);
    HOLDS(w.has_statistics == (test->op != AFFINE));
    HOLDS(w.of.reduces || w.of.applies);
    HOLDS(!w.is_held || (w.of.reduces && w.of.applies && w.of.activation == test->activation));
    HOLDS(w.is_held || !w.has_statistics || !(w.of.reduces && w.of.applies));
    HOLDS((w.of.exchanges == NORMFUSE_EXCHANGE_THROUGH_MEMORY) == !w.is_held);
    HOLDS(w.of.applies == w.of.writes_out && (!w.of.applies || launch->grid > 0));
    /* dz goes on to a second pass where it is the same numbers. */
    HOLDS(!(w.of.reduces && !w.of.applies && w.of.dpost_add) || keeps_dz_exactly(&w.of));
    HOLDS(w.of.ahead >= 2);
    HOLDS(w.of.piece >= 1 && w.of.vector % w.of.piece == 0 && (w.of.piece == 1 || (w.by_columns && !w.of.backward)));
    HOLDS((int32_t)a->by_group.divisor % w.of.piece == 0 && (w.is_held || a->subgroup % w.of.piece == 0));
    /* Threads. */
    HOLDS((int32_t)launch->threads == w.of.threads && w.of.threads % 32 == 0 && w.of.threads <= 1024);
    if (w.by_columns) {
        HOLDS(w.of.lanes == w.of.threads && w.of.across <= w.of.threads && w.of.aligned && !w.of.strided);
    } else {
        HOLDS(is_power_of_two(w.of.lanes) && is_power_of_two(w.of.across) && w.of.across <= w.of.lanes);
        HOLDS(w.of.threads % w.of.lanes == 0 && (w.of.lanes <= 32 || w.beside == 1));
        HOLDS(!w.is_held || w.beside == 1);
    }
    /* Vectors. */
    const int64_t vector_bytes = w.of.vector * (int64_t)normfuse_type_bytes(w.of.type);
    const void *const tensors[] = {a->x, a->dy, a->out, a->call.pre_add, a->call.post_add, a->call.du, a->call.u,
                                   a->call.dpost_add};
    HOLDS(vector_bytes <= 16 && is_power_of_two(w.of.vector) && (!w.of.strided || w.of.vector == 1));
    for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++)
        HOLDS((uintptr_t)tensors[i] % (uintptr_t)vector_bytes == 0);
    /* Shared memory, registers. */
    const int64_t shared = shared_of_walk(&w), of_block = (int64_t)launch->shared + static_shared_of_walk(&w);
    const struct fake_device *const limits = &fake_driver.device[0];
    HOLDS((int64_t)launch->shared >= shared);
    HOLDS(of_block <= (int64_t)device->shared_per_block);
    HOLDS(w.of.resident >= 1 && w.of.resident * w.of.threads <= limits->threads_per_multiprocessor);
    HOLDS(65536 / (w.of.resident * w.of.threads) >= MIN_REGISTERS);
    if (w.is_held)
        HOLDS(w.of.resident * (of_block + RESERVED) <= limits->shared_per_multiprocessor);
    /* Blocks. */
    const bool in_grid = w.of.exchanges == NORMFUSE_EXCHANGE_IN_GRID,
               in_cluster = w.of.exchanges == NORMFUSE_EXCHANGE_IN_CLUSTER;
    HOLDS(launch->cooperative == in_grid && launch->cluster == (in_cluster ? (uint32_t)a->parts : 0u));
    HOLDS(!in_cluster || (device->clusters && a->parts >= 2 && a->parts <= MAX_CLUSTER_BLOCKS));
    HOLDS(w.of.exchanges != NORMFUSE_EXCHANGE_IN_BLOCK || a->parts == 1);
    HOLDS(!in_grid || (test->has_sync && (int32_t)launch->grid <= w.of.resident * device->multiprocessors));
    HOLDS(!in_grid || ((int64_t)launch->grid / a->parts * 64 <= NORMFUSE_CUDA_GRID_BARRIER_WORDS * 4 &&
                       (uintptr_t)a->barriers % 64 == 0 && a->barriers != NULL));
    if (w.is_held) {
        const int64_t at_once = (int64_t)launch->grid / a->parts;
        HOLDS((int64_t)launch->grid == at_once * a->parts && w.of.walks == (a->turns > 1) &&
              (in_grid || a->turns == 1));
        HOLDS(at_once * a->turns >= a->slabs && at_once * (a->turns - 1) < a->slabs);
        HOLDS(a->kept >= (w.by_columns ? 1 : a->steps) * up(a->part_rows, a->row_step));
        HOLDS(a->row_step == w.down && a->part_rows > 0);
    }
    /* Whatever the size: rows, columns, slabs and samples are all somebody's. */
    HOLDS(a->row_jump == a->row_step * a->row_stride);
    const bool in_turn = a->part_rows == 0; /* rows are dealt out to parts */
    HOLDS(in_turn ? w.by_columns && a->next_rows == w.down && a->row_step == w.down * a->parts
                  : (int64_t)a->part_rows + (int64_t)a->next_rows * (a->parts - 1) >= a->rows || a->next_rows == 0);
    HOLDS(in_turn || a->next_rows == 0 || (int64_t)a->next_rows * (a->parts - 1) < a->rows);
    HOLDS(in_turn || a->part_rows >= a->next_rows);
    if (w.by_columns) {
        HOLDS((int64_t)a->blocks_wide * w.block_columns >= a->columns &&
              (int64_t)(a->blocks_wide - 1) * w.block_columns < a->columns);
        HOLDS(w.is_held ? a->slabs == a->samples * a->blocks_wide
                        : (int64_t)launch->grid == (int64_t)a->blocks_wide * a->samples * a->parts);
        HOLDS(!w.of.reduces || up(in_turn ? a->rows : a->part_rows, a->row_step) <= 128);
        HOLDS(!w.is_held ||
              (!w.of.folded &&
               a->slab_sets * (w.of.statistics_of_groups ? (int64_t)a->by_group.divisor : 1) <= w.block_columns) ||
              (w.of.folded && a->blocks_wide == 1 && (int64_t)a->joined_rows * a->call.channels <= w.block_columns));
    } else {
        const int64_t row_vectors = up(a->columns + (w.of.aligned ? 0 : w.of.vector - 1), w.of.vector);
        HOLDS((int64_t)a->steps * w.of.across >= a->part_vectors);
        HOLDS(a->next_vectors == 0 ? a->part_vectors >= row_vectors
                                   : a->next_rows == 0 && a->part_vectors >= a->next_vectors &&
                                         (int64_t)a->next_vectors * (a->parts - 1) + a->part_vectors >= row_vectors &&
                                         (int64_t)a->next_vectors * (a->parts - 1) < row_vectors);
        HOLDS(a->parts == 1 || a->next_rows > 0 || a->next_vectors > 0);
        HOLDS(w.is_held || (int64_t)launch->grid == up(a->slabs, w.beside) * a->parts);
        HOLDS(!w.of.reduces || (int64_t)a->steps * up(a->part_rows, w.down) * vector_bytes <= 48 * 16);
    }
    HOLDS((int32_t)a->by_parts.divisor == a->parts && divides(&a->by_parts) && divides(&a->by_blocks_wide));
    HOLDS((int32_t)a->by_blocks_wide.divisor == a->blocks_wide && (int32_t)a->by_row_step.divisor == a->row_step);
    HOLDS(divides(&a->by_row_step) && divides(&a->by_sample_slabs) && divides(&a->by_channels) &&
          divides(&a->by_group) && divides(&a->by_subgroup) && (int32_t)a->by_subgroup.divisor == a->subgroup);
    HOLDS(a->call.channels == sizes[1] && (int64_t)a->by_channels.divisor == sizes[1]);
    const double values = test->op == GROUP_NORM ? (double)(sizes[1] / test->groups) * (double)sizes[2]
                                        : (double)sizes[0] * (double)sizes[2];
    HOLDS(!w.has_statistics || (a->set_values == values && a->call.values == (float)values &&
                                a->call.share == 1.0f / a->call.values));
    /* Scratch: parts one after the other, within what was asked for. */
    const int64_t sets = test->op == GROUP_NORM ? sizes[0] * test->groups : sizes[1];
    struct left_by_walk left = {.triples = {.count = 0}};
    if (!w.is_held && w.of.reduces && !w.of.backward)
        left.triples.count = sets * a->set_triples;
    if (w.of.reduces && w.of.backward && w.of.gradients == NORMFUSE_GRADIENTS_DIRECT)
        left.gradients.count = sizes[1];
    else if (w.of.reduces && w.of.backward)
        left.pairs.count = (a->sums_are_of_samples ? sizes[0] : 1) * (int64_t)a->call.channels * a->call.sum_slots;
    HOLDS(test->backward ? !w.is_held || w.of.gradients != NORMFUSE_GRADIENTS_NONE
                         : w.of.gradients == NORMFUSE_GRADIENTS_NONE); /* dweight is always wanted */
    size_t used = end_of(a->triples, left.triples.count > 0 ? (size_t)left.triples.count * 24 : 0);
    if (in_grid)
        used = end_of(a->messages, (size_t)((w.of.walks ? 2 : 1) * (int64_t)launch->grid * a->slab_sets * w.value *
                                            (w.of.backward ? 2 : 4)));
    HOLDS((left.triples.count == 0 || a->triples != NULL) && (!in_grid || a->messages != NULL));
    HOLDS(a->call.statistics == NULL || end_of(a->call.statistics, 0) >= used);
    used = a->call.statistics != NULL ? end_of(a->call.statistics, (size_t)sets * 24) : used;
    HOLDS(left.pairs.count == 0 || (a->call.sums != NULL && end_of(a->call.sums, 0) >= used));
    if (left.pairs.count > 0)
        used = end_of(w.of.sums_slopes ? a->call.slope_sums : a->call.sums, (size_t)left.pairs.count * 16);
    HOLDS(!w.of.sums_slopes || end_of(a->call.slope_sums, 0) >= end_of(a->call.sums, (size_t)left.pairs.count * 16));
    HOLDS(a->totals == NULL || end_of(a->totals, 0) >= used);
    used = a->totals != NULL ? end_of(a->totals, (size_t)sets * 16) : used;
    CHECK(used <= scratch_address_bytes, "%s: %s: %zu bytes of scratch used, %zu asked for", test->name, launch->name,
          used, scratch_address_bytes);
    HOLDS(w.is_held || !w.has_statistics || !w.of.applies ||
          (w.of.backward ? a->totals != NULL : a->call.statistics != NULL));
    if (w.of.reduces) {
        sums_left.triples = w.is_held ? 0 : a->set_triples;
        sums_left.slots = a->call.sum_slots;
        sums_left.of_samples = a->sums_are_of_samples;
    }
    const int64_t elements = sizes[0] * sizes[1] * sizes[2];
    const int64_t of_all = (int64_t)launch->grid * launch->threads;
    const int64_t walked = of_all * (w.is_held ? (int64_t)a->turns * a->kept : up(elements / w.of.vector, of_all) + 1);
    if (w.extent <= MAX_ELEMENTS && walked <= MAX_STEPS_WALKED) {
        struct written *const all[] = {&left.triples, &left.pairs, &left.gradients};
        unsigned char *const seen = calloc((size_t)w.extent, 1);
        int64_t right = 0, held = 0, empty = 0, places = 0;
        if (seen == NULL)
            abort();
        for (size_t i = 0; i < sizeof all / sizeof *all; i++)
            if ((all[i]->writer = calloc((size_t)all[i]->count + 1, sizeof *all[i]->writer)) == NULL)
                abort();
        count_owners_of_walk(&w, seen, &left);
        for (int64_t i = 0; i < w.extent; i++)
            held += seen[i];
        for (int64_t i = 0; i < elements; i++)
            right += seen[i / (sizes[1] * sizes[2]) * w.batch + i / sizes[2] % sizes[1] * w.channel +
                          i % sizes[2] * w.position] == 1;
        for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
            for (int64_t k = 0; k < all[i]->count; k++)
                empty += all[i]->writer[k] == 0;
            places += all[i]->count;
            free(all[i]->writer);
        }
        CHECK(right == elements && held == elements, "%s: %s: %lld of %lld elements have one thread, %lld are walked",
              test->name, launch->name, (long long)right, (long long)elements, (long long)held);
        CHECK(empty == 0, "%s: %s: %lld of %lld places are not written", test->name, launch->name, (long long)empty,
              (long long)places);
        free(seen);
        walk_proofs++;
    }
    held_launches += w.is_held;
    stream_launches += !w.is_held;
    held_clusters += in_cluster;
    held_grids += in_grid;
    held_turns += w.is_held && a->turns > 1;
    walk_folded += w.of.folded;
    walk_unaligned += !w.of.aligned;
    held_rows += w.by_rows;
    if (w.of.reduces) {
        const double way = longest_way_in_walk(&w);
        CHECK(way <= arithmetic->additions, "%s: %s: a value meets %.0f roundings, tolerance.c says %.0f", test->name,
              launch->name, way, arithmetic->additions);
    }
#undef HOLDS
}

/* ---- the body `finish` ------------------------------------------------------------------------------------------- */

/* Each item has its threads, and memory that was asked for. */
static void check_finish(const struct plan_case *test, const struct fake_launch *launch)
{
    const struct normfuse_cuda_signature of = fake_driver_signature((int)launch->kernel);
    struct normfuse_finish_arguments a;
    memcpy(&a, launch->arguments, sizeof a);
#define HOLDS(condition)                                                                                               \
    if (!(condition))                                                                                                  \
    CHECK(false, "%s: %s: not %s", test->name, launch->name, #condition)
    const int64_t threads = (int64_t)launch->threads, grid = launch->grid;
    const int64_t samples = test->sizes[0], channels = test->sizes[1];
    const int64_t sets = test->op == GROUP_NORM ? samples * test->groups : channels;
    HOLDS(threads % 32 == 0 && threads <= NORMFUSE_FINISH_THREADS && launch->cluster <= 1 && !launch->cooperative);
    HOLDS(is_power_of_two(a.lanes) && threads % a.lanes == 0);
    HOLDS(a.samples == samples || a.samples == 1 || /* samples that count together may be one */
          (test->positions > 0 && a.samples == samples / test->positions &&
           of.gradients == NORMFUSE_GRADIENTS_OF_SAMPLES_NORMALIZED));
    HOLDS(a.channels == channels);
    HOLDS(of.statistics == (test->op == GROUP_NORM   ? NORMFUSE_STATISTICS_GROUP
                            : test->op == BATCH_NORM ? NORMFUSE_STATISTICS_CHANNEL
                                            : NORMFUSE_STATISTICS_NONE));
    HOLDS(divides(&a.by_groups) && divides(&a.by_set_channels));
    HOLDS(test->op != GROUP_NORM ||
          (a.by_groups.divisor == test->groups && a.by_set_channels.divisor * test->groups == channels));
    if (of.work != NORMFUSE_WORK_GRADIENTS)
        HOLDS(grid * threads >= (int64_t)a.items * a.lanes);
    finish_launches[of.work]++;
    if (of.work == NORMFUSE_WORK_SHARES) {
        const int64_t shares = a.by_shares.divisor;
        HOLDS(divides(&a.by_shares) && a.items == sets * shares && shares * a.share >= a.triples);
        HOLDS(end_of(a.sums, (size_t)(sets * a.triples) * 24) <= scratch_address_bytes);
    } else if (of.work == NORMFUSE_WORK_STATISTICS) {
        HOLDS(a.items == sets && (int64_t)a.joined * a.share >= a.triples &&
              (int64_t)(a.joined - 1) * a.share < a.triples);
        HOLDS(sums_left.triples == a.triples);
        HOLDS(end_of(a.sums, (size_t)(sets * a.triples) * 24) <= scratch_address_bytes);
        HOLDS(of.keeps_statistics == 0 || (end_of(a.sums, (size_t)(sets * a.triples) * 24) <= end_of(a.statistics, 0) &&
                                           end_of(a.statistics, (size_t)sets * 24) <= scratch_address_bytes));
    } else {
        const bool by_sample = of.gradients == NORMFUSE_GRADIENTS_OF_SAMPLES ||
                               of.gradients == NORMFUSE_GRADIENTS_OF_SAMPLES_NORMALIZED;
        const int64_t all = (by_sample ? a.samples : 1) * channels * a.slot_stride;
        HOLDS(divides(&a.by_slots) && a.slots <= a.slot_stride && (int32_t)a.by_slots.divisor == a.slots);
        HOLDS(end_of(a.sums, (size_t)all * 16) <= scratch_address_bytes);
        HOLDS(of.gradients != NORMFUSE_GRADIENTS_NORMALIZED || test->op == GROUP_NORM);
        HOLDS(of.work != NORMFUSE_WORK_PARTS || (a.items == all / a.slot_stride && a.slots > 1));
    }
    if (of.work == NORMFUSE_WORK_GRADIENTS) {
        const bool finds = (of.dweight | of.dbias | of.dscale | of.dshift | of.writes_shard) != 0;
        const int64_t before = of.dslope ? a.slopes.first_block : grid;
        HOLDS(of.totals ? a.items == sets && a.totals_blocks * threads >= (int64_t)a.items * a.lanes
                        : a.totals_blocks == 0);
        HOLDS(of.totals == 0 || (a.totals != NULL && end_of(a.totals, (size_t)sets * 16) <= scratch_address_bytes));
        HOLDS(finds ? (before - a.totals_blocks) * threads >= channels * a.gradient_lanes &&
                          threads % a.gradient_lanes == 0 && is_power_of_two(a.gradient_lanes)
                    : before == a.totals_blocks);
        HOLDS(of.totals != 0 || finds || of.dslope != 0);
        if (of.dslope) {
            /* All pairs, once, of channels or of what these left. */
            const struct normfuse_finish_slopes *const slopes = &a.slopes;
            const int64_t pairs = (int64_t)slopes->items * slopes->outers * slopes->by_slots.divisor;
            const int64_t all =
                (of.gradients == NORMFUSE_GRADIENTS_OF_SAMPLES ||
                         of.gradients == NORMFUSE_GRADIENTS_OF_SAMPLES_NORMALIZED
                     ? a.samples
                     : 1) * channels * a.slot_stride;
            slope_launches++;
            HOLDS((grid - before) * threads >= (int64_t)slopes->items * slopes->lanes);
            HOLDS(threads % slopes->lanes == 0 && is_power_of_two(slopes->lanes) && divides(&slopes->by_slots));
            HOLDS(pairs == all || pairs == channels);
            HOLDS(slopes->leaves || slopes->items == (a.dslope.channel == 0 ? 1 : channels));
            HOLDS(end_of(a.slope_sums, (size_t)all * 16) <= scratch_address_bytes);
        }
    }
#undef HOLDS
}

static void check_launch(const struct plan_case *test, const struct fake_launch *launch,
                         const struct normfuse_cuda_device *device, const struct tolerance_arithmetic *arithmetic)
{
    switch (fake_driver_signature(launch->kernel).body) {
    case NORMFUSE_BODY_finish: check_finish(test, launch); break;
    case NORMFUSE_BODY_single: check_single(test, launch, device, arithmetic); break;
    case NORMFUSE_BODY_stream:
    case NORMFUSE_BODY_held: check_walk(test, launch, device, arithmetic); break;
    default: CHECK(false, "%s: %s", test->name, launch->name);
    }
}

static normfuse_status call_plan_case(const struct plan_case *test, const normfuse_tensors *tensors,
                                      const normfuse_exec *exec, size_t *bytes)
{
    const struct problem_line line = {
        .op = test->positions > 0 ? CHANNEL_NORM : test->op, .groups = test->groups, .eps = 1e-5,
        .statistics = test->statistics, .eps_kind = test->eps_kind, .activation = test->activation};
    return operator_call(&line, test->backward, tensors, exec, bytes);
}

static void run_plan_case(struct plan_case *test, const struct normfuse_cuda_device *device)
{
    static const char *const types[] = {"f64", "f32", "f16", "bf16"};
    const int64_t *const sizes = test->sizes;
    const int64_t of_positions[] = {test->positions > 0 ? sizes[0] / test->positions : 0, sizes[1], test->positions};
    const int64_t *const given = test->positions > 0 ? of_positions : sizes;
    snprintf(test->name, sizeof test->name, "%s %lldx%lldx%lld groups=%lld %s %s act=%d %s%s%s%s on %s by %s%s",
             test->positions > 0 ? "positions" : problem_operator_name(test->op), (long long)sizes[0],
             (long long)sizes[1], (long long)sizes[2],
             (long long)test->groups, types[test->type], test->channels_last ? "nhwc" : "nchw", (int)test->activation,
             test->backward ? "bwd" : "fwd", test->has_sync ? " sync" : "",
             test->misaligned ? " misaligned"
             : test->sliced   ? " sliced"
                              : "",
             test->residual                   ? " post_add"
             : test->summed && test->backward ? " pre_add du"
             : test->summed && test->in_place ? " pre_add u=x"
             : test->summed                   ? " pre_add u"
                                              : "",
             device->name, normfuse_cuda_choice()->only != NULL ? normfuse_cuda_choice()->only : "any",
             normfuse_cuda_choice()->drawn ? " of any geometry" : "");
    const size_t value = (size_t)normfuse_type_bytes((int32_t)test->type);
    const uintptr_t base = (uintptr_t)0x100000000000, gap = (uintptr_t)1 << 42;
    enum { BIG = 5, SMALL = 7 };
    normfuse_axes axes[BIG + SMALL];
    normfuse_tensor big[BIG], small[SMALL];
    for (int i = 0; i < BIG; i++) {
        void *const data = (void *)(base + (uintptr_t)(i < 3 ? i : 7 + i) * gap + (test->misaligned ? value : 0));
        big[i] = test->channels_last ? normfuse_tensor_channels_last(data, test->type, 3, given, &axes[i])
                                     : normfuse_tensor_contiguous(data, test->type, 3, given, &axes[i]);
        big[i].device = (normfuse_device){NORMFUSE_CUDA, 0};
        if (test->sliced) {
            axes[i].strides[2] = given[1] + 8;
            axes[i].strides[0] = given[2] * axes[i].strides[2];
        }
    }
    const int64_t sets = test->op == BATCH_NORM ? sizes[1] : sizes[0] * test->groups;
    for (int i = 0; i < SMALL; i++) {
        void *const data = (void *)(base + (uintptr_t)(i < 5 ? 3 + i : 7 + i) * gap);
        const bool is_saved = i == 1 || i == 2;
        const normfuse_type saved = test->type == NORMFUSE_F64 ? NORMFUSE_F64 : NORMFUSE_F32;
        small[i] = normfuse_tensor_contiguous(data, is_saved ? saved : test->type, 1, is_saved ? &sets : &sizes[1],
                                              &axes[BIG + i]);
        small[i].device = (normfuse_device){NORMFUSE_CUDA, 0};
    }
    normfuse_tensors tensors = {.struct_bytes = sizeof tensors, .x = &big[0], .weight = &small[0]};
    if (test->op != AFFINE) {
        tensors.mean = test->statistics == NORMFUSE_MEAN_SQUARE ? NULL : &small[1];
        tensors.rstd = &small[2];
    }
    if (test->backward) {
        tensors.dy = &big[1];
        tensors.dx = &big[2];
        tensors.dweight = &small[3];
        tensors.dbias = NULL;
    } else {
        tensors.y = &big[1];
    }
    if (test->residual) {
        tensors.post_add = &big[3];
        if (test->backward)
            tensors.dpost_add = &big[4];
    }
    if (test->summed) {
        tensors.pre_add = &big[3];
        *(test->backward ? &tensors.du : &tensors.u) = test->in_place && !test->backward ? &big[0] : &big[4];
    }
    if (test->activation == NORMFUSE_PRELU) {
        tensors.slope = &small[5];
        tensors.dslope = test->backward ? &small[6] : NULL;
    }
    normfuse_exec exec = {.struct_bytes = sizeof exec};
    if (test->has_sync) {
        exec.sync = (void *)(base + 9 * gap);
        exec.sync_bytes = NORMFUSE_CUDA_SYNC_BYTES;
    }
    scratch_address_bytes = 0;
    normfuse_status status = call_plan_case(test, &tensors, &exec, &scratch_address_bytes);
    if (!CHECK(status == NORMFUSE_OK, "%s: scratch bytes: %s", test->name, normfuse_last_error()))
        return;
    exec.scratch = scratch_address_bytes ? (void *)scratch_address : NULL;
    exec.scratch_bytes = scratch_address_bytes;
    fake_driver.launches = 0;
    sums_left.triples = sums_left.slots = 0;
    status = call_plan_case(test, &tensors, &exec, NULL);
    /* Sets of about 2^31 vectors are more than the kernels count; everything smaller has a geometry. */
    const int64_t set_values = sizes[2] * (test->op == GROUP_NORM   ? sizes[1] / test->groups
                                           : test->op == BATCH_NORM ? sizes[0]
                                           : sizes[0] > sizes[1] ? sizes[0]
                                                                 : sizes[1]);
    if (status == NORMFUSE_UNSUPPORTED && set_values > INT32_MAX - (1 << 24)) {
        too_large++;
        return;
    }
    /* Registers hold norm groups of so many channels of any type, and more of most. */
    enum { MOST_CHANNELS = 4096, MOST_CHANNELS_FIRST = 1024 };
    if (status == NORMFUSE_UNSUPPORTED && test->positions > 0 &&
        set_values > (test->channels_last ? MOST_CHANNELS : MOST_CHANNELS_FIRST) &&
        strstr(normfuse_last_error(), "too large to be held") != NULL) {
        too_wide++;
        return;
    }
    if (!CHECK(status == NORMFUSE_OK, "%s: %s", test->name, normfuse_last_error()))
        return;
    CHECK(fake_driver.launches > 0, "%s: nothing was launched", test->name);
    const int64_t rows = test->op == GROUP_NORM ? 1 : sizes[0],
                  channels = test->op == GROUP_NORM ? sizes[1] / test->groups : 1;
    const struct tolerance_arithmetic arithmetic = tolerance_arithmetic(
        NORMFUSE_CUDA, test->type, test->channels_last, sizes[1] == 1 || sizes[2] == 1, rows, channels, sizes[2]);
    for (int i = 0; i < fake_driver.launches && i < FAKE_LAUNCHES; i++) {
        check_launch(test, &fake_driver.launch[i], device, &arithmetic);
        CHECK(fake_driver.launch[i].dependent == (i > 0 && device->capability >= 90),
              "%s: kernel %d of the call %s what ran before it", test->name, i,
              fake_driver.launch[i].dependent ? "does not wait for" : "waits for");
    }
}

/* One copy of device/transpose.cuh: tiles that are all of the tensor, vectors that are aligned in memory, shared memory
 * that holds a tile, and memory that is no other copy's: of the call's scratch, or for an input that of one of
 * `outputs`. */
static void check_copy(const char *name, const struct fake_launch *launch, const struct normfuse_transpose_copy *copy,
                       int64_t bytes, int64_t elements, bool is_output, uintptr_t outputs[2], size_t *scratch_used)
{
#define HOLDS(condition)                                                                                               \
    if (!(condition))                                                                                                  \
    CHECK(false, "%s: %s: not %s", name, launch->name, #condition)
    const int64_t vector = 16 / bytes;
    HOLDS(copy->outer.size * copy->b.size * copy->a.size == elements);
    HOLDS(copy->tile_outer >= 1 && copy->tile_b >= 1 && copy->tile_a >= 1);
    HOLDS(copy->tile_outer <= copy->outer.size && copy->tile_b <= copy->b.size && copy->tile_a <= copy->a.size);
    HOLDS(copy->tile_outer == 1 || (copy->tile_b == copy->b.size && copy->tile_a == copy->a.size));
    HOLDS(copy->by_tiles_a.divisor == up(copy->a.size, copy->tile_a) &&
          copy->by_tiles_b.divisor == up(copy->b.size, copy->tile_b));
    HOLDS(copy->by_tile_a.divisor == (uint32_t)copy->tile_a && copy->by_tile_b.divisor == (uint32_t)copy->tile_b);
    HOLDS(divides(&copy->by_tiles_a) && divides(&copy->by_tiles_b) && divides(&copy->by_tile_a) &&
          divides(&copy->by_tile_b) && divides(&copy->by_read) && divides(&copy->by_write));
    /* Rows of the source, and of the destination: `ends` elements beside one another, others apart. */
    const bool straight = copy->straight;
    HOLDS(!straight || (!copy->from_plane && !copy->to_plane && copy->from_vectors == copy->to_vectors));
    const int64_t read = copy->from_plane ? (int64_t)copy->tile_a * copy->tile_b : copy->tile_a;
    const int64_t written = copy->to_plane ? (int64_t)copy->tile_a * copy->tile_b : copy->tile_b;
    HOLDS(copy->by_read.divisor == up(read, copy->from_vectors ? vector : 1));
    HOLDS(straight || copy->by_write.divisor == up(written, copy->to_vectors ? vector : 1));
    HOLDS(!copy->from_plane || (copy->from_vectors && copy->tile_a == copy->a.size && copy->b.from == copy->a.size));
    HOLDS(!copy->to_plane || (copy->to_vectors && copy->tile_b == copy->b.size && copy->a.to == copy->b.size));
    if (copy->from_vectors) {
        HOLDS((uintptr_t)copy->from % 16 == 0 && copy->a.from == 1 && copy->outer.from % vector == 0);
        HOLDS(copy->from_plane ? copy->a.size * copy->b.size % vector == 0 &&
                                     (copy->tile_b == copy->b.size || read % vector == 0)
                               : copy->a.size % vector == 0 && copy->b.from % vector == 0 &&
                                     (copy->tile_a == copy->a.size || copy->tile_a % vector == 0));
    }
    const int64_t nearest = straight ? copy->a.to : copy->b.to, apart = straight ? copy->b.to : copy->a.to;
    const int64_t size = straight ? copy->a.size : copy->b.size, tile = straight ? copy->tile_a : copy->tile_b;
    if (copy->to_vectors) {
        HOLDS((uintptr_t)copy->to % 16 == 0 && nearest == 1 && copy->outer.to % vector == 0);
        HOLDS(copy->to_plane ? copy->a.size * copy->b.size % vector == 0 &&
                                   (copy->tile_a == copy->a.size || written % vector == 0)
                             : size % vector == 0 && apart % vector == 0 && (tile == size || tile % vector == 0));
    }
    if (!straight) {
        HOLDS(copy->pitch >= copy->tile_a && (!copy->from_plane || copy->pitch == copy->tile_a));
        HOLDS(copy->from_plane || copy->pitch * bytes % 8 == 4 || copy->pitch * bytes % 16 == 8);
        HOLDS((size_t)(copy->tile_outer * copy->tile_b) * (size_t)(copy->pitch * bytes) <= launch->shared);
        HOLDS(launch->shared <= 48 << 10);
    }
    /* The far one of the two is the caller's. */
    const uintptr_t here = (uintptr_t)(is_output ? copy->from : copy->to);
    for (int k = 0; k < 2 && !is_output; k++)
        if (here == outputs[k]) {
            outputs[k] = 0;
            return;
        }
    const int64_t last = is_output ? (copy->outer.size - 1) * copy->outer.from + (copy->b.size - 1) * copy->b.from +
                                         (copy->a.size - 1) * copy->a.from
                                   : (copy->outer.size - 1) * copy->outer.to + (copy->b.size - 1) * copy->b.to +
                                         (copy->a.size - 1) * copy->a.to;
    HOLDS(here >= scratch_address + *scratch_used);
    *scratch_used = (size_t)(here - scratch_address) + (size_t)((last + 1) * bytes);
    HOLDS(*scratch_used <= scratch_address_bytes);
    /* A tensor of other strides is read and written no further than it has elements. */
    const int64_t blocks =
        up(copy->a.size, copy->tile_a) * up(copy->b.size, copy->tile_b) * up(copy->outer.size, copy->tile_outer);
    HOLDS(copy->first_block + blocks <= launch->grid);
#undef HOLDS
}

static bool is_copy(const struct fake_launch *launch)
{
    return strncmp(launch->name, "normfuse_transpose", strlen("normfuse_transpose")) == 0;
}

static void check_copies(const char *name, const struct fake_launch *launch, normfuse_type type, int64_t elements,
                         bool are_outputs, uintptr_t outputs[2], int *copies, size_t *scratch_used)
{
    struct normfuse_transpose_arguments a;
    const int64_t bytes = (int64_t)normfuse_type_bytes((int32_t)type);
    const struct normfuse_cuda_signature of = fake_driver_signature((int)launch->kernel);
    memcpy(&a, launch->arguments, sizeof a);
    CHECK(of.body == NORMFUSE_BODY_transpose && (int64_t)normfuse_type_bytes(of.type) == bytes &&
              launch->threads == NORMFUSE_TRANSPOSE_THREADS &&
              !launch->cooperative && launch->cluster <= 1 && launch->grid == a.blocks && a.count >= 1 &&
              a.count <= NORMFUSE_TRANSPOSE_COPIES && a.copies[0].first_block == 0,
          "%s: %s of %d copies, %lld blocks", name, launch->name, a.count, (long long)a.blocks);
    *copies += a.count;
    for (int i = 0; i < a.count; i++) {
        check_copy(name, launch, &a.copies[i], bytes, elements, are_outputs, outputs, scratch_used);
        const struct normfuse_transpose_copy *const copy = &a.copies[i];
        const int64_t end = copy->first_block + up(copy->a.size, copy->tile_a) * up(copy->b.size, copy->tile_b) *
                                                    up(copy->outer.size, copy->tile_outer);
        CHECK(end == (i + 1 < a.count ? a.copies[i + 1].first_block : (int64_t)launch->grid), "%s: %s: copy %d", name,
              launch->name, i);
    }
}

/* Tensors of a channel affine in either layout, with gaps or without. */
static void test_transposes(void)
{
    enum { BIG = 5 };
    fake_driver_reset();
    fake_driver.notes_arguments = true;
    fake_driver_use();
    const uintptr_t base = (uintptr_t)0x100000000000, gap = (uintptr_t)1 << 42;
    int copied = 0, flipped = 0, of_outputs = 0, held = 0;
    for (int i = 0; i < 6000 && device_of(0) != NULL; i++) {
        const normfuse_type type = (normfuse_type)random_below(4);
        const bool backward = random_below(2) != 0, residual = random_below(3) == 0;
        int64_t sizes[3] = {random_size(6), random_size(i % 2 ? 12 : 7), random_size(i % 3 ? 8 : 14)};
        if (i % 5 == 0)
            sizes[2] = (7 + random_below(30)) * (7 + random_below(30)); /* of few vectors */
        for (int axis = 0; axis < 3; axis++)
            sizes[axis] = sizes[axis] < 1 || random_below(8) == 0 ? 1 : sizes[axis];
        char name[160];
        int length = snprintf(name, sizeof name, "affine %lldx%lldx%lld type %d %s%s", (long long)sizes[0],
                              (long long)sizes[1], (long long)sizes[2], (int)type, backward ? "bwd" : "fwd",
                              residual ? " post_add" : "");
        normfuse_axes axes[BIG + 2];
        normfuse_tensor big[BIG], small[2];
        int others = 0;
        bool is_sliced = false;
        for (int k = 0; k < BIG; k++) {
            void *const data = (void *)(base + (uintptr_t)k * gap + (random_below(6) == 0 ? 16 : 0) +
                                        (random_below(12) == 0 ? normfuse_type_bytes((int32_t)type) : 0));
            const bool last = random_below(2) != 0;
            const int64_t more = random_below(4) == 0 ? 1 + random_below(9) : 0;
            big[k] = last ? normfuse_tensor_channels_last(data, type, 3, sizes, &axes[k])
                          : normfuse_tensor_contiguous(data, type, 3, sizes, &axes[k]);
            big[k].device = (normfuse_device){NORMFUSE_CUDA, 0};
            if (last)
                axes[k].strides[2] += more;
            axes[k].strides[0] = (sizes[1] + more) * sizes[2];
            is_sliced = is_sliced || (k == 0 && more > 0);
            length += snprintf(name + length, sizeof name - (size_t)length, " %c%d", last ? 'l' : 'f', (int)more);
        }
        const int over = random_below(4) != 0 ? 1 : backward ? 2 * (int)random_below(2) : 0;
        big[1] = big[over]; /* the output: in place, or its own memory */
        for (int k = 0; k < 2; k++) {
            small[k] = normfuse_tensor_contiguous((void *)(base + (uintptr_t)(BIG + k) * gap), NORMFUSE_F32, 1,
                                                  &sizes[1], &axes[BIG + k]);
            small[k].device = (normfuse_device){NORMFUSE_CUDA, 0};
        }
        normfuse_tensors tensors = {.struct_bytes = sizeof tensors, .x = &big[0], .weight = &small[0]};
        const normfuse_affine_options options = {.struct_bytes = sizeof options, .activation = NORMFUSE_RELU};
        normfuse_exec exec = {.struct_bytes = sizeof exec};
        *(backward ? &tensors.dx : &tensors.y) = &big[1];
        if (backward) {
            tensors.dy = &big[2];
            tensors.dweight = &small[1];
        }
        if (residual)
            tensors.post_add = &big[3];
        if (residual && backward)
            tensors.dpost_add = &big[4];
        const normfuse_tensor *const present[] = {tensors.y, tensors.dx, tensors.dy, tensors.post_add,
                                                  tensors.dpost_add};
        for (int k = 0; k < BIG; k++)
            for (int axis = 0; present[k] != NULL && axis < 3; axis++)
                if (sizes[axis] > 1 && present[k]->strides[axis] != axes[0].strides[axis]) {
                    others++;
                    break;
                }
        scratch_address_bytes = 0;
        size_t *const bytes = &scratch_address_bytes;
        normfuse_status status = backward ? normfuse_affine_backward_scratch_bytes(&options, &tensors, &exec, bytes)
                                          : normfuse_affine_forward_scratch_bytes(&options, &tensors, &exec, bytes);
        exec.scratch = scratch_address_bytes ? (void *)scratch_address : NULL;
        exec.scratch_bytes = scratch_address_bytes;
        fake_driver.launches = 0;
        if (status == NORMFUSE_OK)
            status = backward ? normfuse_affine_backward(&options, &tensors, &exec)
                              : normfuse_affine_forward(&options, &tensors, &exec);
        if (!CHECK(status == NORMFUSE_OK, "%s: %s", name, normfuse_last_error()))
            continue;
        int copies = 0;
        size_t scratch_used = 0;
        const normfuse_tensor *const output = backward ? tensors.dx : tensors.y;
        uintptr_t outputs[2] = {over == 1 ? (uintptr_t)output->data : 0,
                                tensors.dpost_add ? (uintptr_t)tensors.dpost_add->data : 0};
        const int64_t elements = sizes[0] * sizes[1] * sizes[2];
        const int last = fake_driver.launches - 1;
        const bool before = is_copy(&fake_driver.launch[0]), after = last > 0 && is_copy(&fake_driver.launch[last]);
        if (before)
            check_copies(name, &fake_driver.launch[0], type, elements, false, outputs, &copies, &scratch_used);
        const int copies_before = copies;
        if (after)
            check_copies(name, &fake_driver.launch[last], type, elements, true, outputs, &copies, &scratch_used);
        held += over == 1 && outputs[0] == 0;
        for (int k = 0; k <= last; k++)
            CHECK(fake_driver.launch[k].dependent == (k > 0), "%s: kernel %d of %d", name, k, last + 1);
        CHECK(others == 0 ? copies == 0 : copies >= 1 && (copies <= others || is_sliced), "%s: %d copies of %d tensors",
              name, copies, others);
        copied += copies > 0;
        flipped += others > copies;
        of_outputs += copies > copies_before;
    }
    CHECK(copied > 2000 && flipped > 300 && of_outputs > 500 && held > 1000,
          "%d calls copied, %d fewer tensors, %d outputs, %d inputs to an output's memory", copied, flipped, of_outputs,
          held);
}

/* The i-th of random problems, some of them of kinds that the others seldom are. */
static struct plan_case draw_plan_case(int i)
{
    static const enum problem_operator operators[] = {GROUP_NORM, BATCH_NORM, AFFINE};
    struct plan_case test = {.op = operators[random_below(5) % 3]};
    test.type = (normfuse_type)random_below(4);
    test.channels_last = random_below(2) != 0;
    test.backward = random_below(2) != 0;
    test.has_sync = random_below(3) != 0;
    test.misaligned = random_below(6) == 0;
    test.sliced = test.channels_last && random_below(6) == 0;
    int maximum = i % 3 == 0 ? 12 : 31;
    for (int axis = 0; axis < 3; axis++) {
        const int limit[] = {12, i % 50 == 0 ? 17 : 12, 24};
        test.sizes[axis] = random_below(8) == 0 ? 1 : random_size(maximum < limit[axis] ? maximum : limit[axis]);
        for (int64_t rest = test.sizes[axis]; rest > 1; rest /= 2)
            maximum--;
        maximum = maximum < 1 ? 1 : maximum;
    }
    if (random_below(2))
        test.sizes[1] = up(test.sizes[1], 8) * 8;
    if (i % 12 == 9) { /* over columns, of samples or tensors that a whole GPU keeps, or nearly */
        test.op = i / 12 % 2 ? BATCH_NORM : GROUP_NORM;
        test.channels_last = test.has_sync = true;
        test.misaligned = test.sliced = false;
        test.type = (normfuse_type)(1 + random_below(3));
        test.sizes[0] = 1 + random_below(5);
        test.sizes[1] = 8 * (1 + random_below(160));
        test.sizes[2] = 1 + random_below(INT64_C(30000000) / (test.sizes[0] * test.sizes[1]));
    } else if (i % 12 == 7) { /* the same, backward, of what all registers hold */
        test.op = GROUP_NORM;
        test.backward = test.channels_last = test.has_sync = true;
        test.misaligned = test.sliced = false;
        test.type = (normfuse_type)(1 + random_below(3));
        test.sizes[0] = 1 + random_below(16);
        test.sizes[1] = 32 * (1 + random_below(40));
        test.sizes[2] = 1 + random_below(INT64_C(3000000) / (test.sizes[0] * test.sizes[1]));
    } else if (i % 12 == 8) { /* the same, of many samples of few rows */
        test.op = GROUP_NORM;
        test.channels_last = true;
        test.misaligned = test.sliced = false;
        test.type = (normfuse_type)(1 + random_below(3));
        test.sizes[0] = 1 + random_below(5000);
        test.sizes[1] = 8 * (1 + random_below(64));
        test.sizes[2] = 1 + random_below(i % 24 == 8 ? 64 : 1);
    } else if (i % 12 == 10) { /* of norm groups whose values are adjacent and few */
        test.op = GROUP_NORM;
        test.sliced = false;
        test.sizes[0] = 1 + random_below(i % 24 == 10 ? 300000 : 300);
        test.sizes[1] = 1 + random_below(700);
        test.sizes[2] = 1 + (random_below(2) ? 0 : random_below(40));
    }
    test.groups = 1;
    if (test.op == GROUP_NORM)
        do
            test.groups = random_below(4) == 0 ? 1 : 1 + random_below(test.sizes[1] < 64 ? test.sizes[1] : 64);
        while (test.sizes[1] % test.groups != 0);
    if (test.op == BATCH_NORM && test.sizes[0] * test.sizes[2] == 1)
        test.sizes[2] = 2; /* training refuses one value a channel */
    test.activation = random_below(2) ? NORMFUSE_IDENTITY : (int32_t)random_below(NORMFUSE_PRELU + 1);
    test.residual = (i % 12 < 7 || i % 12 > 9) && random_below(6) == 0;
    test.summed = !test.residual && test.op != AFFINE && i % 5 == 0;
    test.in_place = i % 10 == 0;
    return test;
}

/* GPUs that differ in what plans depend on. `small`: of few multiprocessors, whose norm groups soon are too large. */
static void use_gpu(int which)
{
    static const struct {
        const char *name;
        int capability, multiprocessors, threads, shared;
        bool clusters;
    } gpus[] = {{"NVIDIA H200", 90, 132, 2048, 233472, true},  {"NVIDIA A100", 80, 108, 2048, 167936, false},
                {"NVIDIA L4", 89, 58, 1536, 102400, false},    {"NVIDIA RTX 5090", 120, 170, 1536, 102400, true},
                {"a small H200", 90, 4, 2048, 233472, true},   {"a small L4", 89, 2, 1536, 102400, false}};
    fake_driver_reset();
    fake_driver.notes_arguments = true;
    fake_driver.device[0].name = gpus[which].name;
    fake_driver.device[0].capability = gpus[which].capability;
    fake_driver.device[0].multiprocessors = gpus[which].multiprocessors;
    fake_driver.device[0].threads_per_multiprocessor = gpus[which].threads;
    fake_driver.device[0].shared_per_multiprocessor = gpus[which].shared;
    fake_driver.device[0].shared_per_block = gpus[which].shared - 1024;
    fake_driver.device[0].clusters = gpus[which].clusters;
    fake_driver_use();
}
enum { GPUS = 6, SMALL_H200 = 4 };

static int cases_of_gpu = 600;

/* The planner's own choice. */
static void test_plans(void)
{
    for (int gpu = 0; gpu < GPUS; gpu++) {
        use_gpu(gpu);
        const struct normfuse_cuda_device *const device = device_of(0);
        for (int i = 0; i < cases_of_gpu && device != NULL; i++) {
            struct plan_case test = draw_plan_case(i);
            run_plan_case(&test, device);
        }
    }
}

/* Each schedule takes every call that it does not refuse, with its own geometry and with any that it has. */
static void test_plans_of_each_schedule(void)
{
    enum { ENOUGH = 200 };
    struct normfuse_cuda_choice *const choice = normfuse_cuda_choice();
    for (const struct schedule *const *list = normfuse_cuda_schedules; *list != NULL; list++)
        for (int drawn = 0; drawn < 2; drawn++)
            for (int gpu = 0; gpu < GPUS; gpu++) {
                int taken = 0;
                use_gpu(gpu);
                const struct normfuse_cuda_device *const device = device_of(0);
                for (int i = 0; i < cases_of_gpu / 2 && device != NULL; i++) {
                    struct plan_case test = draw_plan_case(i);
                    choice->only = (*list)->name;
                    choice->drawn = drawn ? 1 + (uint64_t)random_below(INT32_MAX) : 0;
                    choice->taken = NULL;
                    run_plan_case(&test, device);
                    taken += choice->taken != NULL && strcmp(choice->taken, (*list)->name) == 0;
                }
                CHECK(taken > ENOUGH * cases_of_gpu / 2500, "%s%s was taken %d times on %s", (*list)->name,
                      drawn ? " of any geometry" : "", taken, fake_driver.device[0].name);
            }
    *choice = (struct normfuse_cuda_choice){.only = NULL};
}

/* Norm over channels: group norm of positions, but for where its statistics are. */
static void test_plans_of_positions(void)
{
    int squares = 0, of_norm = 0;
    for (int gpu = 0; gpu < GPUS; gpu++) {
        use_gpu(gpu);
        const struct normfuse_cuda_device *const device = device_of(0);
        for (int i = 0; i < cases_of_gpu / 5 && device != NULL; i++) {
            const int64_t samples = random_below(2) ? 1 : 1 + random_below(20);
            struct plan_case test = {.op = GROUP_NORM,
                                     .type = (normfuse_type)random_below(4),
                                     .channels_last = random_below(2) != 0,
                                     .backward = random_below(2) != 0,
                                     .misaligned = random_below(6) == 0,
                                     .sliced = random_below(6) == 0,
                                     .residual = i % 5 == 1,
                                     .summed = i % 5 == 0,
                                     .positions = random_below(8) == 0 ? 1 : random_size(i % 3 == 0 ? 21 : 9),
                                     .groups = 1,
                                     .activation = random_below(2) ? NORMFUSE_SILU
                                     : (int32_t)random_below(NORMFUSE_PRELU + 1),
                                     .statistics = random_below(3) ? NORMFUSE_MEAN_SQUARE : NORMFUSE_MEAN_AND_VARIANCE,
                                     .eps_kind = random_below(2) ? NORMFUSE_EPS_OF_NORM : NORMFUSE_EPS_ADDED};
            test.sizes[0] = samples * test.positions;
            test.sizes[1] = random_below(3) == 0 ? random_size(12) : 8 * (1 + random_below(160));
            test.sizes[2] = 1;
            test.sliced = test.sliced && test.channels_last;
            while (random_below(2) && test.sizes[1] % (2 * test.groups) == 0)
                test.groups *= 2;
            run_plan_case(&test, device);
            squares += test.statistics == NORMFUSE_MEAN_SQUARE;
            of_norm += test.eps_kind == NORMFUSE_EPS_OF_NORM;
        }
    }
    CHECK(single_tiled > cases_of_gpu / 4 && single_outers > cases_of_gpu / 10, "%d with tiles, %d of several samples",
          single_tiled, single_outers);
    CHECK(squares > cases_of_gpu / 2 && of_norm > cases_of_gpu / 4 && too_wide < cases_of_gpu / 50,
          "%d mean squares, %d norms, %d too wide", squares, of_norm, too_wide);
}

/* Problems that norm over channels has no kernels for, and neighbours that it has. */
static void test_refused_positions(void)
{
    static const struct {
        const char *reason; /* NULL: it is taken */
        int64_t sizes[3], groups, gap; /* gap: elements between samples */
        bool channels_first, backward, scale, biases, wide, squares, mixed;
    } cases[] = {
        {NULL, {2, 24, 35}, 1, 0, .scale = false},
        {NULL, {2, 24, 35}, 1, 0, .channels_first = true},
        {NULL, {2, 1, 35}, 1, 0, .channels_first = true},
        {NULL, {2, 24, 35}, 1, 8, .scale = false},
        {NULL, {2, 24, 35}, 3, 8, .channels_first = true, .backward = true},
        {NULL, {2, 24, 1}, 1, 8, .scale = false},
        {NULL, {2, 24, 35}, 3, 0, .backward = true},
        {NULL, {2, 24, 35}, 1, 0, .scale = true, .backward = true},
        {NULL, {1, 24, 35}, 1, 0, .scale = true, .backward = true},
        {NULL, {35, 24, 1}, 1, 0, .scale = true, .backward = true},
        {NULL, {2, 24, 35}, 1, 0, .biases = true},
        {NULL, {2, 24, 35}, 1, 0, .wide = true},
        {NULL, {2, 24, 35}, 1, 0, .wide = true, .channels_first = true, .backward = true},
        {NULL, {2, 24, 35}, 1, 0, .wide = true, .mixed = true},
        {NULL, {2, 1 << 16, 35}, 1, 0, .scale = false},
        {"too large to be held", {2, 1 << 24, 35}, 1, 0, .squares = true},
        {"too large to be held", {2, 1 << 24, 35}, 1, 0, .squares = true, .backward = true},
        {"too large to be held", {2, 1 << 24, 35}, 1, 0, .channels_first = true},
    };
    use_gpu(0);
    for (size_t i = 0; i < sizeof cases / sizeof *cases && device_of(0) != NULL; i++) {
        normfuse_axes axes[8];
        normfuse_tensor big[3], small[5];
        const int64_t *const sizes = cases[i].sizes, sets = sizes[0] * sizes[2] * cases[i].groups;
        const uintptr_t base = (uintptr_t)0x100000000000, gap = (uintptr_t)1 << 42;
        for (int k = 0; k < 8; k++) {
            normfuse_tensor *const of = k < 3 ? &big[k] : &small[k - 3];
            void *const data = (void *)(base + (uintptr_t)k * gap);
            if (k >= 3)
                *of = normfuse_tensor_contiguous(data, NORMFUSE_F32, k == 3 ? 2 : 1,
                                                 k == 3 ? sizes : k == 4 ? &sizes[1] : &sets, &axes[k]);
            else if (cases[i].channels_first)
                *of = normfuse_tensor_contiguous(data, NORMFUSE_BF16, 3, sizes, &axes[k]);
            else
                *of = normfuse_tensor_channels_last(data, NORMFUSE_BF16, 3, sizes, &axes[k]);
            if (k < 3)
                axes[k].strides[0] += cases[i].gap;
            if (k == 1 && cases[i].mixed)
                *of = normfuse_tensor_contiguous(data, NORMFUSE_F32, 3, sizes, &axes[k]);
            of->device = (normfuse_device){NORMFUSE_CUDA, 0};
        }
        if (cases[i].wide)
            big[1].dtype = small[1].dtype;
        normfuse_tensors tensors = {.struct_bytes = sizeof tensors, .x = &big[0], .weight = &small[1],
                                    .rstd = &small[3]};
        tensors.mean = cases[i].squares ? NULL : &small[2];
        *(cases[i].backward ? &tensors.dy : &tensors.y) = &big[1];
        if (cases[i].backward)
            tensors.dx = &big[2];
        if (cases[i].scale)
            tensors.scale = &small[0];
        if (cases[i].biases)
            tensors.pre_bias = &small[0];
        const struct problem_line line = {.op = CHANNEL_NORM,
                                          .groups = cases[i].groups,
                                          .eps = 1e-5,
                                          .statistics = cases[i].squares ? NORMFUSE_MEAN_SQUARE
                                          : NORMFUSE_MEAN_AND_VARIANCE};
        normfuse_exec exec = {.struct_bytes = sizeof exec, .scratch = (void *)scratch_address,
                              .scratch_bytes = SIZE_MAX / 4};
        fake_driver.launches = 0;
        const normfuse_status status = operator_call(&line, cases[i].backward, &tensors, &exec, NULL);
        if (cases[i].reason == NULL)
            CHECK(status == NORMFUSE_OK && fake_driver.launches > 0, "case %zu: %s", i, normfuse_last_error());
        else
            CHECK(status == NORMFUSE_UNSUPPORTED && strstr(normfuse_last_error(), cases[i].reason) != NULL &&
                      fake_driver.launches == 0, "case %zu, %s: %d %s", i, cases[i].reason, (int)status,
                      normfuse_last_error());
    }
}

/* That the proofs above were of everything there is. */
static void test_variety(void)
{
    const int some = cases_of_gpu / 25;
    CHECK(single_launches > 10 * some && single_parts > some && single_walks > some && single_unaligned > some &&
              single_sums > some,
          "single was launched %d times, %d of several blocks a norm group, %d from sample to sample, %d with "
          "unaligned rows, "
          "%d with sums for a later kernel",
          single_launches, single_parts, single_walks, single_unaligned, single_sums);
    CHECK(stream_launches > 10 * some && held_launches > 10 * some && held_clusters > some && held_grids > some &&
              held_turns > some && held_rows > some,
          "stream was launched %d times, held %d, %d of these in clusters, %d in grids, %d in turns, %d by rows",
          stream_launches, held_launches, held_clusters, held_grids, held_turns, held_rows);
    CHECK(walk_folded > some && walk_unaligned > some && walk_proofs > 10 * some,
          "rows were folded %d times and unaligned %d times; element by element were proven %d", walk_folded,
          walk_unaligned, walk_proofs);
    CHECK(slope_launches > some / 2, "the gradients of slopes were launched %d times", slope_launches);
    CHECK(finish_launches[NORMFUSE_WORK_SHARES] > 0 && finish_launches[NORMFUSE_WORK_STATISTICS] > 5 * some &&
              finish_launches[NORMFUSE_WORK_PARTS] > 0 && finish_launches[NORMFUSE_WORK_GRADIENTS] > 10 * some,
          "shares %d, statistics %d, parts %d, gradients %d", finish_launches[NORMFUSE_WORK_SHARES],
          finish_launches[NORMFUSE_WORK_STATISTICS], finish_launches[NORMFUSE_WORK_PARTS],
          finish_launches[NORMFUSE_WORK_GRADIENTS]);
    if (too_large > 0)
        harness_skip("%d problems with norm groups of 2^31 vectors or more were refused", too_large);
}

/* Strides of parameters are 32 bits of what kernels are given. */
static void test_long_strides(void)
{
    const int64_t sizes[] = {2, 3, 40};
    fake_driver_reset();
    fake_driver_use();
    for (int is_long = 0; is_long < 2; is_long++)
        for (int backward = 0; backward < 2; backward++) {
            normfuse_axes axes[3];
            normfuse_tensor big[2], weight;
            for (int i = 0; i < 2; i++) {
                big[i] =
                    normfuse_tensor_contiguous((void *)((uintptr_t)(i + 1) << 44), NORMFUSE_F32, 3, sizes, &axes[i]);
                big[i].device = (normfuse_device){NORMFUSE_CUDA, 0};
            }
            weight = normfuse_tensor_contiguous((void *)((uintptr_t)3 << 44), NORMFUSE_F32, 1, &sizes[1], &axes[2]);
            weight.device = big[0].device;
            axes[2].strides[0] = (int64_t)INT32_MAX + is_long;
            const normfuse_tensors tensors = {.struct_bytes = sizeof tensors,
                                              .x = &big[0],
                                              .y = backward ? NULL : &big[1],
                                              .dy = backward ? &big[0] : NULL,
                                              .dx = backward ? &big[1] : NULL,
                                              .weight = &weight};
            const struct plan_case test = {.op = AFFINE, .backward = backward != 0};
            const normfuse_status status = call_plan_case(&test, &tensors, NULL, NULL);
            if (is_long)
                CHECK(status == NORMFUSE_UNSUPPORTED &&
                          strstr(normfuse_last_error(), "no geometry of any kernel") != NULL,
                      "%s", normfuse_last_error());
            else
                CHECK(status == NORMFUSE_OK, "%s", normfuse_last_error());
        }
}


/* test_cuda_plans [--problems N]: random problems of each GPU that the planner chooses for. */
int main(int count, char **arguments)
{
    if (count > 2 && strcmp(arguments[1], "--problems") == 0)
        cases_of_gpu = atoi(arguments[2]);
    setenv("NORMFUSE_NVRTC", NORMFUSE_FAKE_NVRTC, 1);
    setenv("NORMFUSE_CACHE_DIR", "", 1);
    test_plans();
    test_plans_of_each_schedule();
    test_plans_of_positions();
    test_refused_positions();
    test_variety();
    test_transposes();
    test_long_strides();
    normfuse_cuda_use_driver(NULL);
    return harness_close();
}
