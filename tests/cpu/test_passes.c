/* SPDX-License-Identifier: MIT
 *
 * test_passes.c - every table this CPU can run gives the bits of the scalar table in every pass, for every dtype and
 * activation, at lengths 1 to 200 and odd large ones, at unaligned addresses, between guard pages; and the f32
 * activations keep their published bounds. */
#define _GNU_SOURCE
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "cpu/convert.h"
#include "cpu/kernels.h"
#include "harness.h"
#include "normfuse.h"

static const char *const type_names[] = {"f64", "f32", "f16", "bf16"};
static const size_t type_bytes[] = {8, 4, 2, 2};

static uint64_t random_state = 88172645463325252u;

static double uniform(void) /* in [-1, 1) */
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (double)(random_state >> 11) * 0x1p-52 - 1;
}

/* A buffer whose bytes end at an unmapped page (at_end) or begin after one. */
struct guarded {
    char *data;
    void *map;
    size_t map_bytes;
};

static struct guarded guarded_new(size_t bytes, bool at_end)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), inside = (bytes + page - 1) / page * page;
    struct guarded g = {.map_bytes = inside + 2 * page};
    g.map = mmap(NULL, g.map_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (g.map == MAP_FAILED || mprotect(g.map, page, PROT_NONE) ||
        mprotect((char *)g.map + page + inside, page, PROT_NONE)) {
        perror("guard pages");
        exit(1);
    }
    g.data = (char *)g.map + page + (at_end ? inside - bytes : 0);
    return g;
}

static void guarded_free(struct guarded g) { munmap(g.map, g.map_bytes); }

static void put(char *at, int type, double v)
{
    const float f = (float)v;
    uint16_t h;
    switch (type) {
    case NORMFUSE_F64: memcpy(at, &v, 8); break;
    case NORMFUSE_F32: memcpy(at, &f, 4); break;
    case NORMFUSE_F16: h = normfuse_f32_to_f16(f); memcpy(at, &h, 2); break;
    default: h = normfuse_f32_to_bf16(f); memcpy(at, &h, 2); break;
    }
}

static void fill(char *data, int type, size_t count, double centre, double spread)
{
    for (size_t i = 0; i < count; i++)
        put(data + i * type_bytes[type], type, centre + spread * uniform());
}

enum { MAX_COEFFICIENTS = 256, ACTIVATIONS = NORMFUSE_PRELU + 1 };

struct inputs {
    struct guarded x, dy, post_add, du, y[2], dpost_add[2], kept[2];
    double coefficients[7][MAX_COEFFICIENTS]; /* of the compute type, in place */
    double sums[2][3][MAX_COEFFICIENTS];
};

static void real_fill(void *array, int type, size_t count, double centre, double spread)
{
    fill(array, type == NORMFUSE_F64 ? NORMFUSE_F64 : NORMFUSE_F32, count, centre, spread);
}

struct shape {
    size_t rows, n, stride;
};

static const char *const pass_names[] = {
#define PASS(name) #name,
    NORMFUSE_FOR_EACH_PASS(PASS)
#undef PASS
};
enum { PASSES = sizeof pass_names / sizeof *pass_names };

static normfuse_pass_function pass_of(const struct normfuse_table *table, int type, int pass)
{
    normfuse_pass_function functions[PASSES];
    memcpy(functions, table->of[type], sizeof functions);
    return functions[pass];
}

/* One pass on both tables over the same inputs. `extras`: with every addition; 2: a backward whose post_add is y. */
static void compare(const struct normfuse_table *table, int type, int pass, struct shape shape, int32_t activation,
                    int extras, bool stream, bool at_end)
{
    const size_t bytes = (shape.rows > 0 ? (shape.rows - 1) * shape.stride + shape.n : 0) * type_bytes[type];
    const bool columns = strstr(pass_names[pass], "columns") != NULL;
    const size_t kept_bytes = bytes / type_bytes[type] * (type == NORMFUSE_F64 ? 8 : 4);
    const bool keeps = shape.rows % 3 == 1 && shape.n > 16 && strchr(pass_names[pass], '2'); /* dot2, affine2 */
    const bool from_y = extras == 2 && strncmp(pass_names[pass], "affine_", 7) != 0;
    /* rows of two sets, where there may be */
    const size_t sets = strcmp(pass_names[pass], "moments_rows") == 0 && shape.rows % 2 == 0 ? 2 : 1;
    struct inputs in;
    struct guarded *inputs[] = {&in.x, &in.dy, &in.post_add, &in.du};
    for (int i = 0; i < 4; i++) {
        *inputs[i] = guarded_new(bytes, at_end);
        fill(inputs[i]->data, type, bytes / type_bytes[type], i == 0 ? 3 : 0, 2);
    }
    for (int side = 0; side < 2; side++) {
        in.y[side] = guarded_new(bytes, at_end);
        in.dpost_add[side] = guarded_new(bytes, at_end);
        memset(in.y[side].data, 0x5a, bytes);
        memset(in.dpost_add[side].data, 0x5a, bytes);
        in.kept[side] = guarded_new(kept_bytes, at_end);
        const uint64_t seed = random_state;
        real_fill(in.kept[side].data, type, kept_bytes / (type == NORMFUSE_F64 ? 8 : 4), 0, 2);
        if (!side)
            random_state = seed;
    }
    for (int i = 0; i < 7; i++)
        real_fill(in.coefficients[i], type, MAX_COEFFICIENTS, i == 0 ? 3 : 0.5, 1);
    memset(in.sums, 0, sizeof in.sums);
    for (int which = 0; which < 3; which++) /* column passes add to what is there */
        real_fill(in.sums[0][which], type, MAX_COEFFICIENTS, 0, 1);
    memcpy(in.sums[1], in.sums[0], sizeof in.sums[0]);

    for (int side = 0; side < 2; side++) {
        const ptrdiff_t stride = (ptrdiff_t)shape.stride;
        const struct normfuse_pass s = {
            .x = in.x.data, .dy = in.dy.data, .post_add = extras ? in.post_add.data : NULL,
            .du = extras ? in.du.data : NULL,
            .y = in.y[side].data, .dpost_add = extras ? in.dpost_add[side].data : NULL,
            .x_stride = stride, .dy_stride = stride, .post_add_stride = stride, .du_stride = stride, .y_stride = stride,
            .dpost_add_stride = stride, .rows = shape.rows / sets, .n = shape.n,
            .sets = sets, .set_stride = (ptrdiff_t)(shape.rows / sets) * stride,
            .k = in.coefficients[0], .a = from_y ? NULL : in.coefficients[1], .b = in.coefficients[2],
            .p = in.coefficients[3], .q = extras && activation % 2 ? NULL : in.coefficients[4], .r = in.coefficients[5],
            .coefficient_step = columns ? 0 : shape.rows % 2, .sum_per_row = shape.rows % 2,
            .sum = in.sums[side][0], .square = in.sums[side][1],
            .slope = activation == NORMFUSE_PRELU ? in.coefficients[6] : NULL,
            .slope_sum = activation == NORMFUSE_PRELU && extras < 2 ? in.sums[side][2] : NULL,
            .activation = activation, .act_param = 0.25, .stream = stream, .kept = keeps ? in.kept[side].data : NULL,
            .kept_stride = stride};
        pass_of(side ? table : &normfuse_table_scalar, type, pass)(&s);
        (side ? table : &normfuse_table_scalar)->fence();
    }
    CHECK(memcmp(in.y[0].data, in.y[1].data, bytes) == 0 &&
          memcmp(in.dpost_add[0].data, in.dpost_add[1].data, bytes) == 0 &&
              memcmp(in.sums[0], in.sums[1], sizeof in.sums[0]) == 0 &&
              memcmp(in.kept[0].data, in.kept[1].data, kept_bytes) == 0,
          "%s %s %s: rows %zu, n %zu, stride %zu, activation %d, extras %d, stream %d, at the %s of its pages",
          table->isa,
          type_names[type], pass_names[pass], shape.rows, shape.n, shape.stride, (int)activation, extras, stream,
          at_end ? "end" : "start");
    for (int i = 0; i < 4; i++)
        guarded_free(*inputs[i]);
    for (int side = 0; side < 2; side++) {
        guarded_free(in.y[side]);
        guarded_free(in.dpost_add[side]);
        guarded_free(in.kept[side]);
    }
}

static void compare_all(const struct normfuse_table *table)
{
    for (int type = 0; type < 4; type++)
        for (int pass = 0; pass < PASSES; pass++) {
            const bool columns = strstr(pass_names[pass], "columns") != NULL;
            for (size_t n = 1; n <= 200; n++) /* at_end leaves odd lengths unaligned */
                compare(table, type, pass, (struct shape){1 + n % 6, n, n + n % 3}, (int32_t)(n % ACTIVATIONS),
                        n % 4 == 3 ? 1 + (int)n / 4 % 2 : 0, n % 5 == 1, n % 2);
            for (int32_t activation = 0; activation < ACTIVATIONS; activation++)
                for (int options = 0; options < 12; options++)
                    compare(table, type, pass, (struct shape){7, 77, 80}, activation, options % 3, options / 3 & 1,
                            options / 6);
            if (!columns) {
                compare(table, type, pass, (struct shape){1, 4096, 4096}, 0, false, true, true);
                compare(table, type, pass, (struct shape){2, 12345, 12345}, 3, false, true, true);
                compare(table, type, pass, (struct shape){3, 2017, 2048}, 0, false, false, false);
            } else {
                compare(table, type, pass, (struct shape){129, 256, 256}, 0, false, true, true);
                compare(table, type, pass, (struct shape){67, 255, 257}, 3, false, true, true);
            }
        }
}

/* ---- sums per column, joined ---- */

/* The same sums through both tables; what lies past the last column differs and must not matter. */
static void compare_columns(const struct normfuse_table *table)
{
    enum { MAX_COLUMNS = 70, MAX_ROWS = 4, VALUES = MAX_COLUMNS * MAX_ROWS + 8, OUT = MAX_COLUMNS + 8 };
    for (int wide = 0; wide < 2; wide++)
        for (size_t columns = 1; columns <= MAX_COLUMNS; columns++)
            for (int options = 0; options < 4; options++) {
                const int type = wide ? NORMFUSE_F64 : NORMFUSE_F32;
                const size_t rows = columns % MAX_ROWS + 1, all = columns * rows, bytes = type_bytes[type];
                const double before = options & 1 ? 384 : 0;
                static double sum[2][VALUES], square[2][VALUES], shift[2][VALUES], mean[2][OUT], m2[2][OUT], to[2][OUT];
                real_fill(sum[0], type, all, 0, 20);
                real_fill(square[0], type, all, 100, 50);
                real_fill(shift[0], type, all, 1, 1);
                fill((char *)mean[0], NORMFUSE_F64, columns, 1, 1);
                fill((char *)m2[0], NORMFUSE_F64, columns, 100, 50);
                fill((char *)to[0], NORMFUSE_F64, columns, 0, 1);
                memcpy(sum[1], sum[0], sizeof sum[0]);
                memcpy(square[1], square[0], sizeof square[0]);
                memcpy(shift[1], shift[0], sizeof shift[0]);
                memcpy(mean[1], mean[0], sizeof mean[0]);
                memcpy(m2[1], m2[0], sizeof m2[0]);
                memcpy(to[1], to[0], sizeof to[0]);
                bool joined[2];
                for (int side = 0; side < 2; side++) {
                    void *arrays[] = {sum[side], square[side], shift[side]};
                    for (int i = 0; i < 3; i++)
                        memset((char *)arrays[i] + all * bytes, side ? 0xff : 0, 8 * bytes); /* NaN or 0 */
                    if (options & 2) /* the last column's squares overflowed */
                        put((char *)square[side] + (columns - 1) * bytes, type, 1e300);
                    const struct normfuse_column_functions *f = &(side ? table : &normfuse_table_scalar)->columns[wide];
                    f->accumulate(sum[side], to[side], columns, rows);
                    joined[side] = f->join(shift[side], sum[side], square[side], mean[side], m2[side], columns, rows,
                                           128, before);
                }
                CHECK(joined[0] == joined[1] && joined[0] == (wide || !(options & 2)),
                      "%s %s: %zu columns in %zu rows, joined: %d, %d",
                      table->isa, type_names[type], columns, rows, joined[0], joined[1]);
                CHECK(memcmp(to[0], to[1], columns * 8) == 0 && memcmp(mean[0], mean[1], columns * 8) == 0 &&
                          memcmp(m2[0], m2[1], columns * 8) == 0 && memcmp(shift[0], shift[1], columns * bytes) == 0,
                      "%s %s: %zu columns in %zu rows, %g rows before", table->isa, type_names[type], columns, rows,
                      before);
            }
}

/* ---- small sets ---- */

/* n values to the compute type, also onto what is there, and back, between guard pages. */
static void compare_moves(const struct normfuse_table *table)
{
    enum { MOST = 200, ROOM = MOST + 16 };
    for (int type = 0; type < 4; type++)
        for (size_t n = 1; n <= MOST; n++)
            for (int options = 0; options < 4; options++) {
                const bool at_end = options & 1, second = options & 2; /* onto, and past the cache */
                static double real[2][ROOM];
                const size_t bytes = n * type_bytes[type], real_bytes = type == NORMFUSE_F64 ? 8 : 4;
                struct guarded from = guarded_new(bytes, at_end),
                                      to[2] = {guarded_new(bytes, at_end), guarded_new(bytes, at_end)};
                fill(from.data, type, n, 0, 3);
                real_fill(real[0], type, ROOM, 1, 1);
                memcpy(real[1], real[0], sizeof real[0]);
                for (int side = 0; side < 2; side++) {
                    const struct normfuse_table *t = side ? table : &normfuse_table_scalar;
                    t->of[type]->load(from.data, real[side], n, second, n % 3 ? 0 : 4096);
                    t->of[type]->store(real[side], to[side].data, n, second);
                    t->fence();
                }
                CHECK(memcmp(real[0], real[1], n * real_bytes) == 0 && memcmp(to[0].data, to[1].data, bytes) == 0,
                      "%s %s: %zu values moved, options %d", table->isa, type_names[type], n, options);
                CHECK(second || memcmp(from.data, to[1].data, bytes) == 0, "%s %s: %zu values do not come back",
                      table->isa, type_names[type], n);
                guarded_free(from);
                guarded_free(to[0]);
                guarded_free(to[1]);
            }
}

enum { SMALL_VALUES = 20000, SMALL_SETS = 40, SMALL_ARRAYS = 10, SMALL_COLUMNS = 6, SMALL_PER_SET = 7,
       SMALL_ROOM = 16 };

/* The bytes behind the values differ and must not matter. */
static void compare_small_sets(const struct normfuse_table *table)
{
    static const struct {
        size_t samples, rows, sets, n;
    } shapes[] = {{3, 1, 4, 1}, {2, 1, 3, 5}, {5, 1, 1, 16}, {2, 1, 2, 17}, {1, 1, 3, 31}, {2, 1, 2, 33},
                  {1, 1, 1, 300}, {2, 3, 3, 24},
                  {1, 2, 2, 40}, {1, 7, 5, 8}, {2, 5, 20, 1}, {3, 4, 6, 3}, {1, 6, 1, 300}, {1, 1, 2, 4097},
                      {1, 1, 1, 9000}, {2, 1, 1, 8192}};
    static double values[2][SMALL_ARRAYS][SMALL_VALUES + SMALL_ROOM],
        per_set[2][SMALL_PER_SET][SMALL_SETS + SMALL_ROOM], room[3][SMALL_VALUES + SMALL_ROOM];
    for (int wide = 0; wide < 2; wide++)
        for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
            const int type = wide ? NORMFUSE_F64 : NORMFUSE_F32;
            const size_t bytes = wide ? 8 : 4, columns = shapes[i].sets * shapes[i].n,
                                 all = shapes[i].samples * shapes[i].rows * columns;
            const size_t sets = shapes[i].samples * shapes[i].sets;
            for (int side = 0; side < 2; side++) {
                const uint64_t seed = random_state;
                for (int j = 0; j < SMALL_ARRAYS; j++) { /* the last ones are those of columns */
                    const size_t n = j < SMALL_ARRAYS - SMALL_COLUMNS ? all : columns;
                    real_fill(values[side][j], type, n, 0.5, 2);
                    memset((char *)values[side][j] + n * bytes, side ? 0xff : 0, SMALL_ROOM * bytes); /* NaN or 0 */
                }
                for (int j = 0; j < SMALL_PER_SET; j++) {
                    real_fill(per_set[side][j], type, sets, 0.5, 1);
                    memset((char *)per_set[side][j] + sets * bytes, side ? 0xff : 0, SMALL_ROOM * bytes);
                }
                if (!side)
                    random_state = seed;
                double(*v)[SMALL_VALUES + SMALL_ROOM] = values[side], (*p)[SMALL_SETS + SMALL_ROOM] = per_set[side];
                const struct normfuse_small_sets s = {
                    .samples = shapes[i].samples, .rows = shapes[i].rows, .sets = shapes[i].sets, .n = shapes[i].n,
                    .u = v[0], .gradient = v[1], .normalized = v[2], .z = v[3], .dx = v[0],
                    .weight = v[4], .bias = v[5], .sum_bias = v[6], .sum_weight = v[7],
                    .shift = p[0], .sum = p[1], .square = p[2], .rstd = p[3], .rest = p[4], .slope = p[5],
                    .offset = p[6], .columns = {room[0], room[1], room[2]}};
                const struct normfuse_small_set_functions *f = &(side ? table
                                                                 : &normfuse_table_scalar)->small_sets[wide];
                const size_t whole = (all + 15) / 16 * 16;
                f->moments(&s);
                f->normalize(&s);
                memset((char *)v[3] + all * bytes, 0, (whole - all) * bytes);
                f->activate((int32_t)(i % NORMFUSE_PRELU), 0.25, v[3], whole);
                f->activate_gradient((int32_t)(i % NORMFUSE_PRELU), 0.25, v[1], v[3], whole);
                const size_t rows = shapes[i].samples * shapes[i].rows;
                f->prelu(v[8], v[1], NULL, NULL, rows, columns);
                f->prelu(v[8], v[3], v[1], i % 3 ? v[9] : NULL, rows, columns);
                f->sums(&s);
                f->dx(&s);
            }
            for (int j = 0; j < SMALL_ARRAYS; j++)
                CHECK(memcmp(values[0][j], values[1][j],
                             (j < SMALL_ARRAYS - SMALL_COLUMNS ? all : columns) * bytes) == 0,
                      "%s %s: %zu x %zu x %zu x %zu, array %d", table->isa, type_names[type], shapes[i].samples,
                      shapes[i].rows, shapes[i].sets, shapes[i].n, j);
            for (int j = 0; j < SMALL_PER_SET; j++)
                CHECK(memcmp(per_set[0][j], per_set[1][j], sets * bytes) == 0,
                      "%s %s: %zu x %zu x %zu x %zu, of sets %d", table->isa,
                      type_names[type], shapes[i].samples, shapes[i].rows, shapes[i].sets, shapes[i].n, j);
        }
}

enum { LANES_MOST = 512, ROWS_MOST = 130, CHANNEL_VALUES = ROWS_MOST * 128, LANE_ARRAYS = 7, CHANNEL_REALS = 3 };

/* A tile of norm over channels, on one side. */
struct channel_arrays {
    /* x, post_add, y, of the dtype: nothing is behind their last value */
    struct guarded tensors[4];
    double reals[CHANNEL_REALS][CHANNEL_VALUES + 16]; /* gradient, tile, z */
    double per_channel[4][ROWS_MOST + 16], per_set[LANE_ARRAYS][LANES_MOST + 16];
};

/* The gradient through SiLU of z, or (to_y) y = SiLU(z + post_add), row by row. */
static void silu_by_steps(const struct normfuse_table *table, int type, const struct normfuse_channels *s, bool columns,
                          bool to_y)
{
    const struct normfuse_passes *const pass = table->of[type];
    const struct normfuse_small_set_functions *const small = &table->small_sets[type == NORMFUSE_F64];
    const size_t real_bytes = type == NORMFUSE_F64 ? 8 : 4, values = s->groups * s->channels * s->positions,
                 rows = columns ? 1 : s->channels, row = columns ? values : s->positions,
                 apart = columns ? values : s->pitch, whole = (row + 15) / 16 * 16;
    static double z[CHANNEL_VALUES + 16], gradient[CHANNEL_VALUES + 16];
    struct normfuse_channels of_z = *s;
    of_z.z = z;
    (columns ? pass->position_z : pass->channel_z)(&of_z, 0, columns ? s->positions : s->channels);
    for (size_t r = 0; r < rows; r++) {
        char *const at = (char *)z + r * apart * real_bytes, *const g = (char *)s->gradient + r * apart * real_bytes;
        const size_t offset = r * row * type_bytes[type];
        if (!to_y) {
            memcpy(gradient, g, row * real_bytes);
            memset((char *)gradient + row * real_bytes, 0, (whole - row) * real_bytes);
            small->activate_gradient(NORMFUSE_SILU, 0, gradient, at, whole);
            memcpy(g, gradient, row * real_bytes);
            continue;
        }
        pass->load((const char *)s->post_add + offset, at, row, true, 0);
        small->activate(NORMFUSE_SILU, 0, at, whole);
        pass->store(at, (char *)s->y + offset, row, false);
    }
}

/* Every pass over positions (columns: rows are channels of `groups` norm groups), or over channels (rows). short_rows: those of
 * short rows, where the table has them. Passes that only some tables have are compared with their steps. */
static void run_channels(const struct normfuse_table *table, int type, struct channel_arrays *a,
                         struct normfuse_channels s, bool columns, bool short_rows, bool silu)
{
    const struct normfuse_channel_functions *const f = &table->channels[type == NORMFUSE_F64];
    struct normfuse_passes passes = *table->of[type], *const pass = &passes;
    const bool writes = !short_rows && (!columns || s.channels % 16 == 0);
    const size_t rows = columns ? s.positions : s.channels, half = short_rows ? 0 : rows / 2;
    if (short_rows && f->short_moments) {
        pass->position_moments = f->short_moments;
        pass->position_z = f->short_apply;
        pass->position_sums = f->short_sums;
        pass->position_dx_z = f->short_dx;
    }
    s.x = a->tensors[0].data;
    s.gradient = a->reals[0];
    s.tile = a->reals[1];
    s.weight = a->per_channel[0];
    s.bias = a->per_channel[1];
    s.sum_bias = a->per_channel[2];
    s.sum_weight = a->per_channel[3];
    s.shift = a->per_set[0];
    s.sum = a->per_set[1];
    s.square = a->per_set[2];
    s.rstd = a->per_set[3];
    s.rest = a->per_set[4];
    s.slope = a->per_set[5];
    s.offset = a->per_set[6];
    s.z = NULL;
/* In two steps, as tiles take turns. */
#define RUN(pass)            \
    do {                     \
        (pass)(&s, 0, half); \
        (pass)(&s, half, rows); \
    } while (0)
    if (columns) {
        RUN(pass->position_shifts);
        RUN(pass->position_moments);
    } else {
        RUN(pass->channel_sums);
        f->moments(&s);
    }
    s.y = a->tensors[2].data;
    s.post_add = silu ? a->tensors[1].data : NULL;
    if (writes && silu && !pass->position_y_silu)
        silu_by_steps(table, type, &s, columns, true);
    else if (writes && silu)
        RUN(columns ? pass->position_y_silu : pass->channel_y_silu);
    else if (writes)
        RUN(columns ? pass->position_y : pass->channel_y);
    table->fence();
    s.z = a->reals[2];
    RUN(columns ? pass->position_z : pass->channel_z);
    s.dy = s.gradient;
    s.dy_stride = s.gradient_stride;
    if (silu && (columns ? !pass->position_gradients : !f->sums_silu))
        silu_by_steps(table, type, &s, columns, false);
    else if (silu && columns)
        RUN(pass->position_gradients);
    if (!columns) {
        s.x = s.tile;
        s.x_stride = (ptrdiff_t)s.pitch;
    }
    if (columns)
        RUN(pass->position_sums);
    else
        RUN(silu && f->sums_silu ? f->sums_silu : f->sums);
    s.z = NULL;
    s.y = a->tensors[3].data;
    if (writes)
        RUN(columns ? pass->position_dx : pass->channel_dx);
    table->fence();
    s.z = a->reals[2];
    RUN(columns ? pass->position_dx_z : pass->channel_dx_z);
#undef RUN
}

/* Norm over channels, both ways; what lies behind values of the compute type differs, and must not matter. */
static void compare_channels(const struct normfuse_table *table)
{
    static const struct {
        size_t channels, groups, positions;
        bool columns;
    } shapes[] = {{1, 1, 1, false}, {3, 1, 5, false}, {5, 1, 16, false}, {2, 1, 17, false}, {96, 1, 48, false},
                  {7, 1, 33, false}, {128, 1, 80, false}, {130, 1, 100, false}, {4, 1, 511, false}, {3, 1, 512, false},
                  {1, 1, 3, true}, {3, 2, 5, true}, {16, 1, 7, true}, {24, 1, 37, true}, {8, 2, 20, true},
                  {24, 3, 11, true}, {31, 1, 9, true},
                      {32, 4, 3, true},
                  {33, 1, 6, true}, {96, 1, 20, true}, {130, 1, 5, true}, {48, 2, 9, true}};
    static struct channel_arrays arrays[2];
    for (int type = 0; type < 4; type++)
        for (size_t i = 0; i < 3 * sizeof shapes / sizeof *shapes; i++) {
            const size_t channels = shapes[i / 3].channels, groups = shapes[i / 3].groups,
                                    positions = shapes[i / 3].positions;
            const bool columns = shapes[i / 3].columns, second = i % 3 == 1, short_rows = i % 3 == 2;
            if (short_rows && !(columns && channels <= 32 && type == NORMFUSE_F32))
                continue;
            const int real = type == NORMFUSE_F64 ? NORMFUSE_F64 : NORMFUSE_F32;
            const size_t bytes = type_bytes[type], real_bytes = type_bytes[real], all = channels * groups * positions;
            const size_t pitch = (positions + 15) / 16 * 16, sets = columns ? groups * positions : positions;
            const size_t rows = columns ? 1 : channels, row = columns ? all : positions, apart = columns ? all : pitch;
            for (int side = 0; side < 2; side++) {
                struct channel_arrays *const a = &arrays[side];
                const uint64_t seed = random_state;
                for (int j = 0; j < 4; j++) {
                    a->tensors[j] = guarded_new(all * bytes, true);
                    fill(a->tensors[j].data, type, all, 0.5, 2);
                }
                for (int j = 0; j < CHANNEL_REALS; j++)
                    for (size_t r = 0; r < rows; r++) {
                        char *const to = (char *)a->reals[j] + r * apart * real_bytes;
                        real_fill(to, real, row, 0.5, 2);
                        /* NaN or 0 */
                        memset(to + row * real_bytes, side ? 0xff : 0, (apart - row + (columns ? 16 : 0)) * real_bytes);
                    }
                for (int j = 0; j < 4; j++) {
                    real_fill(a->per_channel[j], real, channels * groups, 0.5, 1);
                    memset((char *)a->per_channel[j] + channels * groups * real_bytes, side && j < 2 ? 0xff : 0,
                           16 * real_bytes);
                }
                for (int j = 0; j < LANE_ARRAYS; j++) {
                    real_fill(a->per_set[j], real, sets, 0.5, 1);
                    memset((char *)a->per_set[j] + sets * real_bytes, side ? 0xff : 0, 16 * real_bytes);
                }
                if (!side)
                    random_state = seed;
                const ptrdiff_t stride = (ptrdiff_t)(columns ? channels * groups : positions);
                const bool lines = !columns ||
                                   ((channels * groups * bytes) % 64 == 0 && (uintptr_t)a->tensors[2].data % 64 == 0 &&
                                                (uintptr_t)a->tensors[3].data % 64 == 0);
                run_channels(side ? table : &normfuse_table_scalar, type, a,
                             (struct normfuse_channels){.positions = positions, .groups = groups, .channels = channels,
                                                        .x_stride = stride,
                                                        .post_add_stride = stride, .y_stride = stride,
                                                        .gradient_stride =
                                                            (ptrdiff_t)(columns ? channels * groups : pitch),
                                                        .pitch = pitch, .z_pitch = pitch, .width = pitch,
                                                        .centred = columns ? !second && groups != 2 : true,
                                                        .stream = second && lines,
                                                        .ahead = second ? 512 : 0},
                             columns, short_rows, second);
            }
            for (int j = 0; j < 4; j++)
                CHECK(memcmp(arrays[0].tensors[j].data, arrays[1].tensors[j].data, all * bytes) == 0,
                      "%s %s: %zu x %zu channels, %zu positions, %s, tensor %d",
                      table->isa, type_names[type], groups, channels, positions, columns ? "columns" : "rows", j);
            for (int j = 0; j < CHANNEL_REALS; j++)
                for (size_t r = 0; r < rows; r++)
                    CHECK(memcmp((char *)arrays[0].reals[j] + r * apart * real_bytes,
                                 (char *)arrays[1].reals[j] + r * apart * real_bytes, row * real_bytes) == 0,
                          "%s %s: %zu x %zu channels, %zu positions, %s, reals %d, row %zu", table->isa,
                          type_names[type], groups, channels, positions, columns ? "columns" : "rows", j, r);
            for (int j = 0; j < 4; j++)
                CHECK(memcmp(arrays[0].per_channel[j], arrays[1].per_channel[j], channels * groups * real_bytes) == 0,
                      "%s %s: %zu x %zu channels, %zu positions, %s, of channels %d", table->isa, type_names[type],
                      groups, channels, positions, columns ? "columns" : "rows", j);
            for (int j = 0; j < LANE_ARRAYS; j++)
                CHECK(memcmp(arrays[0].per_set[j], arrays[1].per_set[j], sets * real_bytes) == 0,
                      "%s %s: %zu x %zu channels, %zu positions, %s, of sets %d", table->isa, type_names[type], groups,
                      channels, positions, columns ? "columns" : "rows", j);
            for (int side = 0; side < 2; side++)
                for (int j = 0; j < 4; j++)
                    guarded_free(arrays[side].tensors[j]);
        }
}

/* ---- conversions ---- */

/* Every 16-bit value through load and store comes back (a NaN quiet), and f32 values around every rounding border of
 * f16 and bf16 are rounded alike by all tables. */
static void compare_conversions(const struct normfuse_table *table)
{
    enum { COUNT = 65536 };
    static uint16_t from[COUNT], to[2][COUNT];
    const float one = 1, zero = 0;
    for (int type = NORMFUSE_F16; type <= NORMFUSE_BF16; type++) {
        for (int i = 0; i < COUNT; i++)
            from[i] = (uint16_t)i;
        for (int side = 0; side < 2; side++) {
            const struct normfuse_pass s = {.x = from, .y = to[side], .rows = 1, .n = COUNT, .k = &zero, .a = &one,
                                            .b = &zero};
            (side ? table : &normfuse_table_scalar)->of[type]->affine_rows(&s);
        }
        CHECK(memcmp(to[0], to[1], sizeof to[0]) == 0, "%s %s: every value converted alike", table->isa,
              type_names[type]);
        int wrong = 0;
        for (int i = 0; i < COUNT; i++) {
            const bool nan = (i & 0x7fff) > (type == NORMFUSE_F16 ? 0x7c00 : 0x7f80);
            wrong += !nan && to[1][i] != i && (i & 0x7fff) != 0; /* -0 + 0 is 0 */
        }
        CHECK(wrong == 0, "%s %s: %d values changed by 1*x + 0", table->isa, type_names[type], wrong);
        /* x + dy in f32 then rounded: sums of random pairs reach all borders */
        for (int round = 0; round < 16; round++) {
            static uint16_t other[COUNT];
            for (int i = 0; i < COUNT; i++) {
                other[i] = (uint16_t)((unsigned)i * 40503u + (unsigned)round * 977u);
                if ((other[i] & 0x7fff) > (type == NORMFUSE_F16 ? 0x7c00 : 0x7f80) ||
                    (i & 0x7fff) > (type == NORMFUSE_F16 ? 0x7c00 : 0x7f80))
                    other[i] = 0;
            }
            for (int side = 0; side < 2; side++) {
                const struct normfuse_pass s = {.x = from, .dy = other, .y = to[side], .rows = 1, .n = COUNT};
                (side ? table : &normfuse_table_scalar)->of[type]->add(&s);
            }
            int differ = 0;
            for (int i = 0; i < COUNT; i++) {
                const uint16_t limit = type == NORMFUSE_F16 ? 0x7c00 : 0x7f80;
                differ += to[0][i] != to[1][i] && !((to[0][i] & 0x7fff) > limit && (to[1][i] & 0x7fff) > limit);
            }
            CHECK(differ == 0, "%s %s: %d sums rounded differently", table->isa, type_names[type], differ);
        }
    }
}

/* ---- fused multiply-add ---- */

/* libm's bits for any floats, for products near 1, and for sums that lie at or next to the middle of two floats. */
static void check_fma(void)
{
    long wrong = 0;
    for (int round = 0; round < 60000; round++) {
        float a[16], b[16], c[16], want[16];
        for (int i = 0; i < 16; i++) {
            uint32_t bits[3];
            for (int j = 0; j < 3; j++) {
                (void)uniform();
                bits[j] = (uint32_t)(random_state >> 20);
                if (j < 2 && round % 4)
                    bits[j] = (bits[j] & 0x83ffffffu) | 0x3c000000u;
            }
            a[i] = normfuse_bits_f32(bits[0]);
            b[i] = normfuse_bits_f32(bits[1]);
            c[i] = round % 4 == 2 ? -a[i] * b[i] : round % 4 == 3
                   ? (float)ldexp((double)a[i] * (double)b[i], (int)(bits[2] % 27)) : normfuse_bits_f32(bits[2]);
            /* (1 + s)(1 - s)/2 of c's last digit: next to the middle, nearer than a double tells */
            if (round % 8 == 5) {
                const float least = 0x1p-23f * (float)(1 + bits[0] % 64);
                a[i] = 0x1p-12f * (1 + least);
                b[i] = 0x1p-12f * (1 - least);
                c[i] = normfuse_bits_f32(0x3f800000u | (bits[2] & 0x7fffffu));
            }
            want[i] = fmaf(a[i], b[i], c[i]);
        }
        normfuse_fma(a, b, c);
        for (int i = 0; i < 16; i++)
            wrong += memcmp(&want[i], &c[i], sizeof c[i]) != 0 && !(isnan(want[i]) && isnan(c[i]));
    }
    CHECK(wrong == 0, "fused multiply-add: %ld of 960000 are not libm's", wrong);
}

/* ---- activations ---- */

static long double exact(int32_t activation, long double z)
{
    const long double s = 1 / (1 + expl(-z));
    switch (activation) {
    case NORMFUSE_SILU: return z * s;
    case NORMFUSE_GELU: return z * 0.5L * erfcl(-z * sqrtl(0.5L));
    case NORMFUSE_GELU_TANH: return z / (1 + expl(-2 * sqrtl(2 / acosl(-1)) * (z + 0.044715L * z * z * z)));
    case NORMFUSE_HARDSWISH: return z * fminl(fmaxl(z + 3, 0), 6) / 6;
    case NORMFUSE_ELU: return z > 0 ? z : 0.25L * expm1l(z);
    case NORMFUSE_RELU6: return fminl(fmaxl(z, 0), 6);
    case NORMFUSE_MISH: return z * tanhl(log1pl(expl(fminl(z, 60))) + fmaxl(z - 60, 0));
    default: return z;
    }
}

/* The bounds of docs/numerics.md: relative to act(z) plus an absolute part in units of 2^-24. */
static const struct {
    int32_t activation;
    double relative, absolute;
} bounds[] = {{NORMFUSE_SILU, 5, 0}, {NORMFUSE_GELU, 8, 0}, {NORMFUSE_GELU_TANH, 5, 6}, {NORMFUSE_HARDSWISH, 2, 1},
              {NORMFUSE_ELU, 6, 0}, {NORMFUSE_MISH, 8, 0},
             {NORMFUSE_RELU6, 0, 0}};

static void check_activations(void)
{
    enum { COUNT = 400000 };
    static float z[COUNT], y[COUNT];
    for (int i = 0; i < COUNT; i++) /* dense around 0, out to where e^z leaves f32's normal range */
        z[i] = i < COUNT / 2 ? (float)(8 * uniform()) : (float)(86 * uniform() * uniform());
    for (size_t b = 0; b < sizeof bounds / sizeof *bounds; b++) {
        const float one = 1, zero = 0;
        const struct normfuse_pass s = {.x = z, .y = y, .rows = 1, .n = COUNT, .k = &zero, .a = &one, .b = &zero,
                                        .activation = bounds[b].activation, .act_param = 0.25};
        normfuse_table_chosen()->of[NORMFUSE_F32]->affine_rows(&s);
        double worst = 0;
        float at = 0;
        for (int i = 0; i < COUNT; i++) {
            const double want = (double)exact(bounds[b].activation, z[i]);
            const double budget = (bounds[b].relative * fabs(want) + bounds[b].absolute) * 0x1p-24 + 0x1p-120;
            const double used = fabs((double)y[i] - want) / budget;
            if (!(used <= worst)) {
                worst = used;
                at = z[i];
            }
        }
        CHECK(worst <= 1, "activation %d: %.0f %% of its error budget at %a", (int)bounds[b].activation, 100 * worst,
              (double)at);
        printf("activation %d: %.0f %% of its error budget\n", (int)bounds[b].activation, 100 * worst);
    }
}

int main(void)
{
    char ran[64] = "", not_run[64] = "";
    for (const struct normfuse_table *const *t = normfuse_tables; *t; t++) {
        char *list = (*t)->usable() ? ran : not_run;
        snprintf(list + strlen(list), 64 - strlen(list), " %s", (*t)->isa);
        if (!(*t)->usable()) {
            harness_skip("table %s: compiled, but this CPU cannot run it", (*t)->isa);
            continue;
        }
        if (*t != &normfuse_table_scalar) {
            compare_all(*t);
            compare_columns(*t);
            compare_moves(*t);
            compare_small_sets(*t);
            compare_channels(*t);
            compare_conversions(*t);
        }
    }
    printf("tables run:%s; compiled and not run:%s\n", ran, *not_run ? not_run : " none");
    check_fma();
    check_activations();
    return harness_close();
}
