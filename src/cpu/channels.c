/* SPDX-License-Identifier: MIT
 *
 * channels.c - norm over the channels of a position. A tile of positions goes to the compute type in the L1 or L2 cache; its
 * statistics, or sums, and what is made of them are computed there, so that tensors are read once and written once.
 *
 *   columns   a position is a row of C adjacent values; norm groups of at most 32 of them are taken 16 at a time
 *   rows      a position is a lane of rows of adjacent positions, one for each of the D channels of a group: channels.inl
 *
 * Blocks of positions are cut by shape alone. Gradients of parameters are summed tile by tile, then in double over a block, and
 * over the blocks in their order. */
#include "cpu/plan.h"

#include "cpu/machine.h"
#include "cpu/threads.h"

enum {
    ROOM = 16,                /* values behind each array, where a vector is read and written */
    COLUMN_TILE = 3072,       /* values of a tile: columns, and */
    ROW_TILE_BYTES = 786432,  /* bytes of a tile's arrays: rows, in the L2 cache, of positions that are whole multiples of */
    LONG_POSITIONS = 64,      /* 16-bit cache lines, and at most */
    MOST_POSITIONS = 512,     /* so many, since f32 sums over positions are those of a tile */
    FORWARD_BLOCK = 16384,    /* least values of a block without sums, of which a thread has */
    THREAD_BLOCKS = 8,        /* so many where they are large: the first tile of each is not prefetched; with sums */
    BACKWARD_BLOCK = 65536,   /* so many, or */
    BACKWARD_POSITIONS = 256, /* positions: partial sums, 16 bytes a channel, are 1/64 of f32 values */
    APART_POSITIONS = 128,    /* rows of at most so many: x and dy in turn take 1.2 to 1.5 times as long as first dy, then x */
    POSITION_UNIT = 16,       /* lanes of a vector, or two */
    PART_VALUES = 2048,       /* values of a part: rows, in the L1 cache */
    FEW_POSITIONS = 6,        /* rows: of a sample, at most so many are columns: they would be few lanes of a vector */
    STEP_VALUES = 256,        /* values of a step of the passes that take turns */
    AHEAD_BYTES = 4096,       /* columns: prefetched so far ahead */
    SHORT_ROW = 32,           /* columns: values of a norm group that has at most two vectors of f32, and */
    SHORT_TILE = 1536         /* of a tile of them: one is written while the sums of the next one are made */
};

/* ---- the plan ---------------------------------------------------------------------------------------------------------- */

/* True if samples have parameters, or gradients of them, of their own. */
static bool is_by_sample(const struct normfuse_problem *p)
{
    return p->scale.data || p->shift.data || has_sample_parameters(p) || (p->pre_bias.data && p->pre_bias.batch != 0);
}

/* Takes all samples as one whose positions they are, where every tensor is so in memory. Blocks stay what they are. */
static void unite_samples(struct plan *plan)
{
    struct normfuse_problem *p = &plan->seen;
    struct normfuse_view *const views[] = {&p->x,  &p->pre_add, &p->post_add, &p->y,        &p->u,
                                           &p->dy, &p->du,      &p->dx,       &p->dpost_add};
    const size_t count = sizeof views / sizeof *views;
    plan->statistic_step = 1;
    plan->sample_positions = p->s;
    if (plan->by_sample || (p->s > 1 && (!p->columns || p->groups > 1)))
        return;
    for (size_t i = 0; i < count && p->s > 1; i++)
        if (views[i]->data && views[i]->batch != p->s * views[i]->position)
            return;
    if (p->s == 1) {
        for (size_t i = 0; i < count; i++)
            views[i]->position = views[i]->batch;
        plan->statistic_step = p->groups;
    }
    p->s *= p->n;
    p->n = 1;
}

static bool is_compute_type(const struct plan *plan, int32_t type)
{
    return type == (plan->is_double ? NORMFUSE_F64 : NORMFUSE_F32);
}

/* True if passes take x in the compute type: where it lies, or from w->u. */
static bool takes_real_x(const struct plan *plan)
{
    return plan->short_rows || (plan->backward && !plan->seen.columns);
}

/* True where passes do not read x where it lies: w->source has a tile. */
static bool has_source(const struct plan *plan)
{
    const struct normfuse_problem *p = &plan->seen;
    return plan->add || (!takes_real_x(plan) && (p->columns ? p->x.channel : p->x.position) != 1);
}

/* Positions of a tile of rows: long stretches of memory. */
static int64_t positions_of_rows(const struct plan *plan)
{
    const int64_t arrays = 2 + has_source(plan); /* in a forward one is the next tile of x */
    const int64_t positions = ROW_TILE_BYTES / (arrays * (int64_t)plan->real_bytes * plan->group_channels),
                  s = plan->seen.s;
    if (s <= MOST_POSITIONS && s <= 2 * positions) /* rows that are whole need no lines of others */
        return round_up(s, POSITION_UNIT);
    const int64_t unit = positions < LONG_POSITIONS ? POSITION_UNIT : LONG_POSITIONS;
    const int64_t most = larger(POSITION_UNIT, smaller(MOST_POSITIONS, positions / unit * unit));
    return round_up(divide_up(s, divide_up(s, most)), unit);
}

void normfuse_channels_plan(struct plan *plan, const normfuse_exec *exec)
{
    const struct normfuse_machine *machine = normfuse_machine_known();
    const struct normfuse_problem *const p = &plan->seen;
    const int64_t samples = p->n, c = p->c, values = samples * c * p->s;
    plan->channel = &plan->table->channels[plan->is_double];
    plan->by_sample = is_by_sample(p);
    if (p->s > 1 && p->s <= FEW_POSITIONS)
        plan->seen.columns = true;
    plan->add = p->pre_add.data || p->pre_bias.data;
    unite_samples(plan);
    const int64_t s = plan->sample_positions;
    const bool is_short = p->columns && plan->group_channels <= SHORT_ROW;
    plan->short_rows = is_short && plan->channel->short_moments;
    plan->positions = p->columns ? larger(1, smaller((is_short ? SHORT_TILE : COLUMN_TILE) / c, NORMFUSE_CHANNEL_CHUNK))
                                 : positions_of_rows(plan);
    const struct normfuse_view *const views[] = {&p->x,  &p->pre_add, &p->post_add, &p->y,        &p->u,
                                                 &p->dy, &p->du,      &p->dx,       &p->dpost_add};
    plan->staged = plan->add;
    for (size_t i = 0; i < sizeof views / sizeof *views; i++)
        plan->staged |= views[i]->data && (p->columns ? views[i]->channel : views[i]->position) != 1;
    const bool wanted = p->dweight.data || p->dbias.data || p->dscale.data || p->dshift.data;
    plan->sums_samples = plan->backward && wanted;
    plan->reduce = true;
    plan->apply = plan->backward ? p->dx.data != NULL : p->y.data != NULL;
    plan->bundles = 1;
    plan->teams_of_one = true;
    const int64_t requested = exec && exec->threads > 0 ? exec->threads : normfuse_threads_default();
    plan->threads = (int32_t)larger(1, smaller(smaller(requested, NORMFUSE_MAX_THREADS), values / PIECE_VALUES));
    /* Blocks of a forward, which has no sums over them, change no bits. */
    const int64_t share = values / (THREAD_BLOCKS * plan->threads), least = FORWARD_BLOCK, most = 16 * FORWARD_BLOCK;
    const int64_t block = plan->backward ? larger(BACKWARD_BLOCK / c, BACKWARD_POSITIONS)
                                         : larger(least, smaller(most, share)) / c;
    plan->part = round_up(larger(1, block), plan->positions);
    plan->parts = divide_up(s, plan->part);
    /* divides normfuse_cpu_sample_quantum */
    plan->block_samples = plan->parts > 1  ? 1
                          : plan->backward ? normfuse_samples_of_block(c, s, plan->type_bytes)
                                           : larger(1, plan->part / s);
    plan->blocks = divide_up(samples, plan->block_samples) * plan->parts;
    plan->tasks = plan->blocks;

    /* How it is run changes no bits. */
    const struct normfuse_view *const out = plan->backward ? &p->dx : &p->y;
    const char *const inputs[] = {p->x.data, p->dy.data, p->pre_add.data, p->post_add.data, p->du.data};
    bool in_place = false;
    for (size_t i = 0; i < sizeof inputs / sizeof *inputs; i++)
        in_place |= out->data == inputs[i];
    const int64_t type_bytes = (int64_t)normfuse_type_bytes(plan->backward ? p->type : p->y_type),
                  l2 = machine->l2_bytes ? machine->l2_bytes : 1 << 20;
    const bool is_whole = !p->columns && p->s <= plan->positions && out->position == 1 && out->channel == p->s; /* rows go as one */
    const bool is_one = p->columns && out->channel == 1 && out->position == c;
    const int64_t row_bytes = type_bytes * (is_one ? c * p->s : p->columns ? c : is_whole ? c * p->s : p->s);
    plan->stream =
        values * type_bytes > 2 * l2 && !in_place && (row_bytes % ALIGNMENT == 0 || row_bytes >= SHORT_ROW_BYTES);
}

/* Values from a row of a tile to the next one, channels of a part, and norm groups with the lanes of whole vectors. */
static int64_t pitch_of(const struct plan *plan)
{
    return plan->p->columns ? plan->p->c : round_up(smaller(plan->positions, plan->p->s), POSITION_UNIT);
}
static int64_t channels_of_part(const struct plan *plan)
{
    int64_t channels = NORMFUSE_CHANNEL_CHUNK;
    while (channels > 1 && channels * pitch_of(plan) > PART_VALUES)
        channels /= 2;
    return smaller(channels, plan->group_channels);
}
/* Values of an array of a tile: columns have two of them, for the tile that is summed and the one before. */
static int64_t values_of_half(const struct plan *plan)
{
    return smaller(plan->positions, plan->p->s) * pitch_of(plan) + ROOM;
}
static int64_t sets_of(const struct plan *plan, int64_t count)
{
    return plan->p->columns ? count * plan->groups : round_up(count, POSITION_UNIT);
}

void normfuse_channels_lay_out(const struct plan *plan, struct small_worker *w, struct arena *arena)
{
    const struct normfuse_problem *p = plan->p;
    const int64_t count = smaller(plan->positions, p->s), pitch = pitch_of(plan), sets = sets_of(plan, count) + ROOM;
    const int64_t values = p->columns ? 2 * values_of_half(plan) : plan->group_channels * pitch + ROOM;
    const int64_t channels = p->c + ROOM;
    const size_t y_bytes = normfuse_type_bytes(p->y_type);
    void **of_values[] = {&w->u, &w->z, &w->gradient};
    for (int i = 0; i < (plan->backward ? 3 : 2); i++) {
        const int64_t of_z = p->columns ? values_of_half(plan) : channels_of_part(plan) * pitch + ROOM;
        *of_values[i] = normfuse_take(arena, i == 1 ? of_z : values, plan->real_bytes);
    }
    w->source = normfuse_take(arena, has_source(plan) ? values : 0, plan->type_bytes);
    w->stage = normfuse_take(arena, plan->staged ? larger(pitch, count) + ROOM : 0,
                             plan->type_bytes > y_bytes ? plan->type_bytes : y_bytes);
    void **of_channels[] = {&w->weight, &w->bias, &w->biases, &w->sum_bias, &w->sum_weight};
    for (int i = 0; i < (plan->backward ? 5 : 3); i++)
        *of_channels[i] = normfuse_take(arena, channels, plan->real_bytes);
    w->bias_so_far = normfuse_take(arena, plan->backward ? channels : 0, 8);
    w->weight_so_far = normfuse_take(arena, plan->backward ? channels : 0, 8);
    w->prelu_slope = normfuse_take(arena, p->slope.data ? larger(channels, sets) : 0, plan->real_bytes);
    w->sum_slope = normfuse_take(arena, plan->sums_slopes ? larger(channels, sets) : 0, plan->real_bytes);
    w->slope_so_far = normfuse_take(arena, plan->sums_slopes ? channels : 0, 8);
    void **of_sets[] = {&w->sum,          &w->square,      &w->shift, &w->rstd,   &w->rest,         &w->before.shift,
                        &w->before.rstd,  &w->before.rest, &w->slope, &w->offset, &w->before.slope, &w->before.offset};
    for (int i = 0; i < (plan->backward ? 12 : 8); i++)
        *of_sets[i] = normfuse_take(arena, sets, plan->real_bytes);
    w->mean = normfuse_take(arena, sets, 8);
    w->m2 = normfuse_take(arena, sets, 8);
    w->double_rstd = normfuse_take(arena, sets, 8);
}

/* ---- between tensors and the tile ---------------------------------------------------------------------------------------- */

/* Rows of a part, and the values before it in an array of the tile. */
static int64_t rows_of(const struct plan *plan, const struct channel_part *t)
{
    return plan->p->columns ? t->count : t->channels;
}
static int64_t values_before(const struct plan *plan, const struct channel_part *t)
{
    return plan->p->columns ? t->half * values_of_half(plan) : t->first * pitch_of(plan);
}

/* The beginning of a part in a tensor. */
static char *tile_at(const struct plan *plan, const struct normfuse_view *v, const struct channel_part *t, int32_t type)
{
    return v->data +
           (t->n * v->batch + (t->group * plan->group_channels + t->first) * v->channel + t->s * v->position) *
               (ptrdiff_t)normfuse_type_bytes(type);
}

/* Elements between the values of a row of a tile, and between rows. */
static ptrdiff_t inner_of(const struct plan *plan, const struct normfuse_view *v)
{
    return plan->p->columns ? v->channel : v->position;
}
static ptrdiff_t outer_of(const struct plan *plan, const struct normfuse_view *v)
{
    return plan->p->columns ? v->position : v->channel;
}

static int64_t width_of(const struct plan *plan, int64_t count)
{
    return plan->p->columns ? plan->p->c : count;
}

static bool is_direct(const struct plan *plan, const struct normfuse_view *v, const struct channel_part *t)
{
    return inner_of(plan, v) == 1 || width_of(plan, t->count) == 1;
}

/* Bytes from what is read to what is prefetched: the next rows of it, or those of the next tile. */
static ptrdiff_t ahead_of(const struct plan *plan, const struct normfuse_view *v, const struct channel_part *t,
                          ptrdiff_t bytes)
{
    const ptrdiff_t outer = outer_of(plan, v);
    if (plan->p->columns)
        return divide_up(AHEAD_BYTES, plan->p->c * bytes) * outer * bytes;
    const int64_t first = t->group * plan->group_channels + t->first;
    const ptrdiff_t to_next_tile = t->count * v->position - first * outer;
    return (first + t->channels < plan->p->c ? channels_of_part(plan) * outer : to_next_tile) * bytes;
}

/* Moves a part, row by row, or as one where it is one in memory: to the compute type, onto what is there, or back. */
static void move(const struct plan *plan, const struct small_worker *w, const struct normfuse_view *v,
                 const struct channel_part *t, int32_t type, void *values, int64_t pitch, bool is_load, bool onto,
                 bool stream)
{
    const struct normfuse_problem *p = plan->p;
    const struct normfuse_passes *const pass = plan->table->of[type];
    const ptrdiff_t bytes = (ptrdiff_t)normfuse_type_bytes(type), inner = inner_of(plan, v), outer = outer_of(plan, v);
    const int64_t whole = p->columns ? pitch : round_up(t->count, POSITION_UNIT);
    int64_t rows = rows_of(plan, t), width = width_of(plan, t->count);
    const bool direct = is_direct(plan, v, t);
    const ptrdiff_t ahead = ahead_of(plan, v, t, bytes);
    if (direct && outer == width && pitch == width) {
        width *= rows;
        rows = 1;
    }
    char *const start = tile_at(plan, v, t, type);
    for (int64_t r = 0; r < rows; r++) {
        char *const at = start + r * outer * bytes, *const stage = direct ? at : w->stage;
        char *const to = (char *)values + (size_t)(r * pitch) * plan->real_bytes;
        if (is_load) {
            if (!direct)
                normfuse_copy_strided(stage, 1, at, inner, width, (size_t)bytes);
            pass->load(stage, to, (size_t)width, onto, direct ? ahead : 0);
            if (!p->columns && !onto && width < whole)
                memset(to + (size_t)width * plan->real_bytes, 0, (size_t)(whole - width) * plan->real_bytes);
        } else {
            pass->store(to, stage, (size_t)width, stream && direct);
            if (!direct)
                normfuse_copy_strided(at, inner, stage, 1, width, (size_t)bytes);
        }
    }
}

static void load(const struct plan *plan, const struct small_worker *w, const struct normfuse_view *v,
                 const struct channel_part *t, int32_t type, void *to, int64_t pitch, bool onto)
{
    move(plan, w, v, t, type, to, pitch, true, onto, false);
}

static void store(const struct plan *plan, const struct small_worker *w, const struct normfuse_view *v,
                  const struct channel_part *t, int32_t type, void *from, int64_t pitch, bool stream)
{
    move(plan, w, v, t, type, from, pitch, false, false, stream);
}

/* Entry i of an array of the compute type; NULL of one that the call does not need. */
static void *real_at(const struct plan *plan, void *array, int64_t i)
{
    return array == NULL ? NULL : (char *)array + (size_t)i * plan->real_bytes;
}

/* biases: of the tile's sample, in the compute type. */
static void add_bias(const struct plan *plan, const struct small_worker *w, const struct channel_part *t)
{
    const int64_t pitch = pitch_of(plan), rows = rows_of(plan, t), first = t->group * plan->group_channels + t->first;
    void *const part = real_at(plan, w->u, values_before(plan, t));
    const bool columns = plan->p->columns;
    for (int64_t r = 0; r < rows; r++) {
        if (plan->is_double) {
            const double *biases = (const double *)w->biases + first;
            double *u = (double *)part + r * pitch;
            for (int64_t i = 0; i < pitch; i++)
                u[i] += columns ? biases[i] : biases[r];
        } else {
            const float *biases = (const float *)w->biases + first;
            float *u = (float *)part + r * pitch;
            for (int64_t i = 0; i < pitch; i++)
                u[i] += columns ? biases[i] : biases[r];
        }
    }
}

/* Parameters of all channels, in the compute type. */
static void fill_parameters(const struct plan *plan, struct small_worker *w, int64_t n)
{
    const struct normfuse_problem *p = plan->p;
    for (int64_t c = 0; c < p->c; c++) {
        const double gain = 1 + load_parameter(&p->scale, n, c, 0);
        store_real(plan, w->weight, c, weight_of(plan, n, c) * gain);
        store_real(plan, w->bias, c, bias_of(plan, n, c) * gain + load_parameter(&p->shift, n, c, 0));
        if (p->pre_bias.data)
            store_real(plan, w->biases, c, load_parameter(&p->pre_bias, n, c, 0));
        if (p->slope.data && p->columns)
            store_real(plan, w->prelu_slope, c, load_parameter(&p->slope, 0, c, 0));
    }
    /* Vectors read behind them, and a sum of subnormal numbers takes 150 cycles. */
    memset(real_at(plan, w->weight, p->c), 0, ROOM * plan->real_bytes);
    memset(real_at(plan, w->bias, p->c), 0, ROOM * plan->real_bytes);
}

/* True if the pass that sums takes dy through the activation, and leaves that for dx. */
static bool activates_in_sums(const struct plan *plan)
{
    const struct normfuse_problem *p = plan->p;
    return !plan->short_rows && p->activation == NORMFUSE_SILU && plan->pass->position_gradients && !p->post_add.data &&
           !p->dpost_add.data;
}

/* True if dy goes through the activation of z, which a pass of its own makes. */
static bool makes_z(const struct plan *plan)
{
    const struct normfuse_problem *p = plan->p;
    return plan->backward && p->activation != NORMFUSE_IDENTITY && !activates_in_sums(plan) && !p->from_y;
}

/* True where passes read x where it lies. Short rows are without gaps; other rows make z of the tile. */
static bool reads_x(const struct plan *plan, const struct channel_part *t)
{
    const struct normfuse_problem *p = plan->p;
    return !plan->add && is_direct(plan, &p->x, t) &&
           (!takes_real_x(plan) ||
            (is_compute_type(plan, p->type) && (plan->short_rows ? p->x.position == p->c : !makes_z(plan))));
}

/* Arguments of the passes over a part; x is u of the tensors' type: in place, or in w->source. One by one: a structure that is
 * copied costs as much as the passes over a short part. */
static __attribute__((noinline)) void pass_part(const struct plan *plan, const struct small_worker *w,
                                                const struct channel_part *t, struct normfuse_channels *s)
{
    const struct normfuse_problem *p = plan->p;
    const int64_t first = t->group * plan->group_channels + t->first, pitch = pitch_of(plan),
                  before = values_before(plan, t);
    const bool is_direct_x = reads_x(plan, t);
    s->positions = (size_t)t->count;
    s->groups = p->columns ? (size_t)plan->groups : 1;
    s->channels = (size_t)t->channels;
    s->x = is_direct_x          ? tile_at(plan, &p->x, t, p->type)
           : takes_real_x(plan) ? (char *)w->u + before * (ptrdiff_t)plan->real_bytes
                                : w->source + before * (ptrdiff_t)plan->type_bytes;
    s->x_stride = is_direct_x ? outer_of(plan, &p->x) : pitch;
    s->ahead = is_direct_x ? ahead_of(plan, &p->x, t, (ptrdiff_t)plan->type_bytes) : 0;
    s->post_add = NULL;
    s->y = s->z = NULL;
    s->gradient = real_at(plan, w->gradient, before);
    s->gradient_stride = pitch;
    s->dy = NULL;
    s->ahead_dy = 0;
    s->tile = real_at(plan, w->u, before);
    s->pitch = s->z_pitch = (size_t)pitch;
    s->width = (size_t)sets_of(plan, t->count);
    s->continues = t->first % NORMFUSE_CHANNEL_CHUNK != 0;
    s->centred = p->statistics == NORMFUSE_MEAN_AND_VARIANCE;
    s->stream = false;
    s->weight = real_at(plan, w->weight, first);
    s->bias = real_at(plan, w->bias, first);
    s->sum_bias = plan->backward ? real_at(plan, w->sum_bias, first) : NULL;
    s->sum_weight = plan->backward ? real_at(plan, w->sum_weight, first) : NULL;
    s->shift = w->shift;
    s->sum = w->sum;
    s->square = w->square;
    s->rstd = w->rstd;
    s->rest = w->rest;
    s->slope = w->slope;
    s->offset = w->offset;
}

/* A sum, or what does not lie value by value, to w->source: u as it is rounded. */
static void gather_u(const struct plan *plan, const struct small_worker *w, const struct channel_part *t)
{
    const struct normfuse_problem *p = plan->p;
    const int64_t rows = rows_of(plan, t), pitch = pitch_of(plan), before = values_before(plan, t);
    const ptrdiff_t bytes = (ptrdiff_t)plan->type_bytes;
    char *const source = w->source + before * bytes;
    void *const u = real_at(plan, w->u, before);
    if (plan->add || (takes_real_x(plan) && !reads_x(plan, t)))
        load(plan, w, &p->x, t, p->type, u, pitch, false);
    if (!plan->add) {
        for (int64_t r = 0; r < rows && !takes_real_x(plan) && !is_direct(plan, &p->x, t); r++)
            normfuse_copy_strided(source + r * pitch * bytes, 1,
                                  tile_at(plan, &p->x, t, p->type) + r * outer_of(plan, &p->x) * bytes,
                                  inner_of(plan, &p->x), width_of(plan, t->count), (size_t)bytes);
        return;
    }
    if (p->pre_bias.data)
        add_bias(plan, w, t);
    if (p->pre_add.data)
        load(plan, w, &p->pre_add, t, p->type, u, pitch, true);
    for (int64_t r = 0; r < rows; r++)
        plan->pass->store(real_at(plan, u, r * pitch), source + r * pitch * bytes, (size_t)width_of(plan, t->count),
                          false);
    if (p->u.data)
        store(plan, w, &p->u, t, p->type, u, pitch, false);
    if (takes_real_x(plan))
        plan->pass->load(source, u, (size_t)(rows * pitch), false, 0);
}

/* True if rows of y or dx are adjacent and share cache lines: they are streamed as one. */
static bool is_packed(const struct plan *plan, const struct normfuse_view *v, const struct channel_part *t, int32_t type)
{
    return !plan->p->columns && plan->stream && is_direct(plan, v, t) && v->channel == t->count &&
           t->count * (ptrdiff_t)normfuse_type_bytes(type) % ALIGNMENT != 0;
}

/* Values between the rows of z, of which v is made. */
static int64_t z_pitch_of(const struct plan *plan, const struct normfuse_view *v, const struct channel_part *t,
                          int32_t type)
{
    return is_packed(plan, v, t, type) ? t->count : pitch_of(plan);
}

/* True if passes write y or dx themselves: vectors of columns end with norm groups, and streams are of whole cache lines. */
static bool writes(const struct plan *plan, const struct normfuse_view *v, const struct channel_part *t)
{
    if (plan->short_rows || !is_direct(plan, v, t) || is_packed(plan, v, t, plan->p->type))
        return false;
    const ptrdiff_t line = ALIGNMENT / (ptrdiff_t)plan->type_bytes;
    const bool has_lines = (uintptr_t)v->data % ALIGNMENT == 0 && v->position % line == 0 && v->batch % line == 0 &&
                           plan->p->c % line == 0;
    return !plan->p->columns || (plan->group_channels % 16 == 0 && (!plan->stream || has_lines));
}

static void write_to(const struct plan *plan, struct normfuse_channels *s, const struct normfuse_view *v,
                     const struct channel_part *t)
{
    s->y = tile_at(plan, v, t, plan->p->type);
    s->y_stride = outer_of(plan, v);
    s->stream = plan->stream;
}

static void add_from(const struct plan *plan, struct normfuse_channels *s, const struct normfuse_view *v,
                     const struct channel_part *t)
{
    s->post_add = v->data ? tile_at(plan, v, t, plan->p->type) : NULL;
    s->post_add_stride = outer_of(plan, v);
}

/* ---- statistics ------------------------------------------------------------------------------------------------------------ */

/* w->sum and w->square, of the compute type, to w->mean and w->m2, or onto them. */
static void gather(const struct plan *plan, struct small_worker *w, int64_t sets, bool onto, bool sums, bool squares)
{
    if (!onto) {
        memset(w->mean, 0, (size_t)sets * 8);
        memset(w->m2, 0, (size_t)sets * 8);
    }
    if (sums)
        plan->column->accumulate(w->sum, w->mean, (size_t)sets, 1);
    if (squares)
        plan->column->accumulate(w->square, w->m2, (size_t)sets, 1);
}

/* The last channels of a sum in the compute type, or of the norm group. */
static bool ends_chunk(const struct plan *plan, const struct channel_part *t)
{
    const int64_t end = t->first + t->channels;
    return plan->p->columns || end % NORMFUSE_CHANNEL_CHUNK == 0 || end == plan->group_channels;
}

/* The sums of a part in the compute type, to w->mean and w->m2, or onto those of the channels before. */
static void gather_part(const struct plan *plan, struct small_worker *w, const struct channel_part *t, bool sums,
                        bool squares)
{
    if (ends_chunk(plan, t))
        gather(plan, w, sets_of(plan, t->count), t->first >= NORMFUSE_CHANNEL_CHUNK, sums, squares);
}

/* Rows: the same shift and sums as columns, of a tile that has been read. */
static void centre_tile(const struct plan *plan, struct small_worker *w, const struct channel_part *t)
{
    const int64_t sets = sets_of(plan, t->count);
    for (int64_t i = 0; i < sets; i++) {
        const double mean = w->mean[i] / (double)plan->group_channels;
        store_real(plan, w->shift, i, isfinite((float)mean) || (plan->is_double && isfinite(mean)) ? mean : 0);
    }
    struct channel_part chunk = *t;
    for (; chunk.first < plan->group_channels; chunk.first += NORMFUSE_CHANNEL_CHUNK) {
        chunk.channels = smaller(NORMFUSE_CHANNEL_CHUNK, plan->group_channels - chunk.first);
        struct normfuse_channels s;
        pass_part(plan, w, &chunk, &s);
        plan->channel->moments(&s);
        gather(plan, w, sets, chunk.first > 0, true, true);
    }
}

/* The same of set i in double, about its mean: the slow way for values that f32 cannot square. */
static struct moments moments_in_double(const struct plan *plan, const struct small_worker *w,
                                        const struct channel_part *t, int64_t i)
{
    struct normfuse_channels passed, *const s = &passed;
    pass_part(plan, w, t, s);
    const int64_t d = plan->group_channels, step = plan->p->columns ? 1 : s->x_stride;
    const int64_t first = plan->p->columns ? i / plan->groups * s->x_stride + i % plan->groups * d : i;
    const int32_t type = plan->short_rows ? NORMFUSE_F32 : plan->p->type;
    const ptrdiff_t bytes = (ptrdiff_t)normfuse_type_bytes(type);
    const char *const x = (const char *)s->x + first * bytes;
    struct moments m = {(double)d, 0, 0};
    for (int sweep = s->centred ? 0 : 1; sweep < 2; sweep++) {
        double sum = 0;
        for (int64_t j = 0; j < d; j++) {
            const double v = normfuse_load(x + j * step * bytes, type) - m.mean;
            sum += sweep ? v * v : v;
        }
        *(sweep ? &m.m2 : &m.mean) = sweep ? sum : sum / m.count;
    }
    return m;
}

static int64_t valid_sets(const struct plan *plan, const struct channel_part *t)
{
    return plan->p->columns ? t->count * plan->groups : t->count;
}

/* The statistics of a tile's norm groups, from or to the caller's array. */
static void move_statistics(const struct plan *plan, const struct normfuse_parameter *q, const struct channel_part *t,
                            double *values, bool is_load)
{
    const ptrdiff_t bytes = (ptrdiff_t)normfuse_type_bytes(q->type);
    const int64_t groups = plan->p->columns ? plan->groups : 1, step = plan->statistic_step;
    char *const first =
        q->data + (t->n * q->batch + (plan->p->columns ? 0 : t->group) * q->channel + t->s * step) * bytes;
    float *const reals = groups == 1 && step == 1 && q->type == NORMFUSE_F32 ? (float *)(void *)first : NULL;
    for (int64_t i = 0; reals && is_load && i < t->count; i++) /* by vectors */
        values[i] = (double)reals[i];
    for (int64_t i = 0; reals && !is_load && i < t->count; i++)
        reals[i] = (float)values[i];
    for (int64_t i = 0; !reals && i < t->count; i++) {
        char *at = first + i * step * bytes;
        for (int64_t g = 0; g < groups; g++, at += q->channel * bytes, values++) {
            if (is_load)
                *values = normfuse_load(at, q->type);
            else
                normfuse_store(at, q->type, *values);
        }
    }
}

/* Lanes behind the last position: of no meaning, but numbers. */
static void clear_rest(const struct plan *plan, struct small_worker *w, const struct channel_part *t)
{
    for (int64_t i = valid_sets(plan, t); i < sets_of(plan, t->count); i++)
        w->mean[i] = w->double_rstd[i] = 0;
}

static double rstd_of(const struct normfuse_problem *p, double count, double m2)
{
    if (p->eps_kind == NORMFUSE_EPS_ADDED)
        return 1 / sqrt((count > 0 ? m2 / count : 0) + p->eps);
    const double norm = sqrt(m2);
    return sqrt(count) / (norm < p->eps ? p->eps : norm);
}

/* The statistics of a tile where f32 cannot hold the squares of a norm group. */
static void finish_slowly(const struct plan *plan, struct small_worker *w, const struct channel_part *t)
{
    const struct normfuse_problem *p = plan->p;
    const bool is_centred = p->statistics == NORMFUSE_MEAN_AND_VARIANCE;
    const double count = (double)plan->group_channels;
    for (int64_t i = 0; i < valid_sets(plan, t); i++) {
        const double k = is_centred ? load_real(plan, w->shift, i) : 0, sum = is_centred ? w->mean[i] : 0,
                     square = w->m2[i];
        struct moments m = {count, k + sum / count, square - sum * sum / count};
        if (is_centred ? out_of_range(k, sum, square) : !(square < 3e38 && square >= 0x1p-90))
            m = moments_in_double(plan, w, t, i);
        w->mean[i] = m.mean;
        w->m2[i] = m.m2 < 0 ? 0 : m.m2;
        w->double_rstd[i] = rstd_of(p, count, w->m2[i]);
    }
    clear_rest(plan, w, t);
    normfuse_small_store_statistics(plan, w, sets_of(plan, t->count));
}

static void finish_statistics(const struct plan *plan, struct small_worker *w, const struct channel_part *t)
{
    const struct normfuse_problem *p = plan->p;
    const bool is_centred = p->statistics == NORMFUSE_MEAN_AND_VARIANCE;
    if (!p->columns && is_centred)
        centre_tile(plan, w, t);
    const struct normfuse_norm_groups s = {.shift = w->shift,
                                           .rstd = w->rstd,
                                           .rest = w->rest,
                                           .mean = w->mean,
                                           .m2 = w->m2,
                                           .double_rstd = w->double_rstd,
                                           .sets = (size_t)valid_sets(plan, t),
                                           .n = (double)plan->group_channels,
                                           .eps = p->eps,
                                           .centred = is_centred,
                                           .eps_added = p->eps_kind == NORMFUSE_EPS_ADDED};
    if (!plan->column->statistics(&s))
        finish_slowly(plan, w, t);
    if (p->mean.data)
        move_statistics(plan, &p->mean, t, w->mean, false);
    if (p->rstd.data)
        move_statistics(plan, &p->rstd, t, w->double_rstd, false);
}

/* ---- results -------------------------------------------------------------------------------------------------------------- */

/* prelu of rows: the slope of each is another one. */
static void prelu_rows(const struct plan *plan, const struct small_worker *w, const struct channel_part *t,
                       void *gradient, int64_t pitch)
{
    const struct normfuse_parameter *slope = &plan->p->slope;
    const int64_t first = t->group * plan->group_channels + t->first;
    for (int64_t row = 0; row < t->channels; row++) {
        const double value = load_parameter(slope, 0, first + row, 0);
        for (int64_t i = 0; i < pitch; i++)
            store_real(plan, w->prelu_slope, i, value);
        if (plan->sums_slopes)
            memset(w->sum_slope, 0, (size_t)pitch * plan->real_bytes);
        plan->small->prelu(w->prelu_slope, real_at(plan, w->z, row * pitch),
                           gradient ? real_at(plan, gradient, row * pitch) : NULL,
                           plan->sums_slopes ? w->sum_slope : NULL, 1, (size_t)t->count);
        for (int64_t i = 0; plan->sums_slopes && i < t->count; i++)
            w->slope_so_far[first + row] += load_real(plan, w->sum_slope, i);
    }
}

/* z of a part through the activation, or with a gradient that. */
static void activate(const struct plan *plan, const struct small_worker *w, const struct channel_part *t,
                     void *gradient, int64_t pitch)
{
    const struct normfuse_problem *p = plan->p;
    const int64_t rows = rows_of(plan, t), width = round_up(width_of(plan, t->count), 16);
    if (p->slope.data && p->columns) {
        plan->small->prelu(w->prelu_slope, w->z, gradient, plan->sums_slopes ? w->sum_slope : NULL, (size_t)t->count,
                           (size_t)p->c);
        return;
    }
    if (p->slope.data) {
        prelu_rows(plan, w, t, gradient, pitch);
        return;
    }
    const bool is_one = p->columns || pitch <= width;
    const size_t values = (size_t)(is_one ? round_up(rows * pitch, 16) : width);
    for (int64_t at = 0; at < rows * pitch; at += is_one ? rows * pitch : pitch) {
        if (gradient)
            plan->small->activate_gradient(p->activation, p->act_param, real_at(plan, gradient, at),
                                           real_at(plan, w->z, at), values);
        else
            plan->small->activate(p->activation, p->act_param, real_at(plan, w->z, at), values);
    }
}

/* Arguments for the results of a tile that has been summed. */
static void pass_results(const struct plan *plan, const struct small_worker *w, const struct channel_part *t,
                         struct normfuse_channels *s)
{
    pass_part(plan, w, t, s);
    s->shift = w->before.shift;
    s->rstd = w->before.rstd;
    s->rest = w->before.rest;
    s->slope = w->before.slope;
    s->offset = w->before.offset;
}

/* rstd from which on the norm was clamped: infinite where it never is. */
static double clamped_rstd(const struct plan *plan)
{
    const struct normfuse_problem *p = plan->p;
    if (p->eps_kind != NORMFUSE_EPS_OF_NORM || !(p->eps > 0))
        return (double)INFINITY;
    const double most = sqrt((double)plan->group_channels) / p->eps;
    return p->rstd.type == NORMFUSE_F64 ? most : (double)(float)most;
}

/* The coefficients of dx. */
static void finish_gradients(const struct plan *plan, struct small_worker *w, const struct channel_part *t)
{
    const double clamped = clamped_rstd(plan), inverse = 1 / (double)plan->group_channels;
    const bool is_centred = plan->p->statistics == NORMFUSE_MEAN_AND_VARIANCE;
    const int64_t sets = sets_of(plan, t->count);
    for (int64_t i = 0; i < sets; i++) {
        const double factor = -w->double_rstd[i] * inverse;
        store_real(plan, w->slope, i, w->double_rstd[i] >= clamped && clamped < (double)INFINITY ? 0 : factor * w->m2[i]);
        store_real(plan, w->offset, i, is_centred ? factor * w->mean[i] : 0);
    }
    if (plan->p->columns)
        return;
    const int64_t first = t->group * plan->group_channels;
    for (int64_t c = first; c < first + plan->group_channels; c++) {
        w->bias_so_far[c] += load_real(plan, w->sum_bias, c);
        w->weight_so_far[c] += load_real(plan, w->sum_weight, c);
    }
}

/* The given statistics. */
static void begin_backward(const struct plan *plan, struct small_worker *w, const struct channel_part *t)
{
    memset(w->mean, 0, (size_t)valid_sets(plan, t) * 8);
    if (plan->p->mean.data)
        move_statistics(plan, &plan->p->mean, t, w->mean, true);
    move_statistics(plan, &plan->p->rstd, t, w->double_rstd, true);
    clear_rest(plan, w, t);
    normfuse_small_store_statistics(plan, w, sets_of(plan, t->count));
}

/* The gradient of a pass: dy is read where it lies, if the first pass that takes it needs nothing else. Rows have it in the tile
 * for dx. */
static void pass_gradient(const struct plan *plan, const struct channel_part *t, struct normfuse_channels *s,
                          bool is_sum)
{
    const struct normfuse_problem *p = plan->p;
    const bool activates = activates_in_sums(plan), is_identity = p->activation == NORMFUSE_IDENTITY;
    const bool fits = p->columns ? !plan->short_rows || p->dy.position == p->c : pitch_of(plan) > APART_POSITIONS;
    const bool is_direct_dy = is_compute_type(plan, p->y_type) && (activates || is_identity) && !p->dpost_add.data &&
                              fits && is_direct(plan, &p->dy, t);
    if (!p->columns || (is_sum && activates)) {
        s->dy = is_direct_dy ? tile_at(plan, &p->dy, t, p->y_type) : s->gradient;
        s->dy_stride = is_direct_dy ? outer_of(plan, &p->dy) : s->gradient_stride;
    } else if (is_direct_dy && is_identity) {
        s->gradient = tile_at(plan, &p->dy, t, p->y_type);
        s->gradient_stride = p->dy.position;
    }
    s->ahead_dy = is_direct_dy ? ahead_of(plan, &p->dy, t, (ptrdiff_t)plan->real_bytes) : 0;
}

/* y or dx of a part: true if the pass writes it; w->z is left to finish_results otherwise. */
static bool begin_results(const struct plan *plan, const struct small_worker *w, const struct channel_part *t,
                          struct normfuse_channels *s)
{
    const struct normfuse_problem *p = plan->p;
    const struct normfuse_view *const out = plan->backward ? &p->dx : &p->y,
                               *const added = plan->backward ? &p->du : &p->post_add;
    const int32_t type = plan->backward ? p->type : p->y_type;
    pass_results(plan, w, t, s);
    if (plan->backward)
        pass_gradient(plan, t, s, false);
    const bool has_pass = plan->backward || p->activation == NORMFUSE_IDENTITY ||
                          (p->activation == NORMFUSE_SILU && plan->pass->position_y_silu != NULL);
    const bool is_fused = has_pass && type == p->type && writes(plan, out, t) &&
                          (!added->data || is_direct(plan, added, t));
    if (is_fused) {
        write_to(plan, s, out, t);
        add_from(plan, s, added, t);
    } else {
        s->z = w->z;
        s->z_pitch = (size_t)z_pitch_of(plan, out, t, type);
    }
    if (s->ahead && p->columns) /* of the next tile */
        s->ahead += t->count * s->x_stride * (ptrdiff_t)plan->type_bytes;
    return is_fused;
}

static void finish_results(const struct plan *plan, struct small_worker *w, const struct channel_part *t, int64_t pitch)
{
    const struct normfuse_problem *p = plan->p;
    const struct normfuse_view *const added = plan->backward ? &p->du : &p->post_add;
    const int32_t type = plan->backward ? p->type : p->y_type;
    if (added->data)
        load(plan, w, added, t, type, w->z, pitch, true);
    if (!plan->backward)
        activate(plan, w, t, NULL, pitch);
    store(plan, w, plan->backward ? &p->dx : &p->y, t, type, w->z, pitch, plan->stream);
}

/* ---- tiles ------------------------------------------------------------------------------------------------------------------ */

/* Passes over a tile: the results of the tile before, and of the next one what its sums are about, and they. */
struct passes {
    normfuse_channel_pass_function results, first, sums;
};

static struct passes passes_of(const struct plan *plan, const struct normfuse_channels *results,
                               const struct normfuse_channels *sums)
{
    const struct normfuse_passes *const pass = plan->pass;
    const struct normfuse_channel_functions *const channel = plan->channel;
    const bool is_z = results->z != NULL, is_silu = plan->p->activation == NORMFUSE_SILU;
    if (plan->short_rows)
        return plan->backward ? (struct passes){channel->short_dx, NULL, channel->short_sums}
                              : (struct passes){channel->short_apply, NULL, channel->short_moments};
    if (plan->p->columns && plan->backward)
        return (struct passes){is_z ? pass->position_dx_z : pass->position_dx,
                               sums->dy ? pass->position_gradients : NULL, pass->position_sums};
    if (plan->p->columns)
        return (struct passes){is_z      ? pass->position_z
                               : is_silu ? pass->position_y_silu
                                         : pass->position_y,
                               pass->position_shifts, pass->position_moments};
    if (plan->backward)
        return (struct passes){is_z ? pass->channel_dx_z : pass->channel_dx, NULL,
                               activates_in_sums(plan) ? channel->sums_silu : channel->sums};
    return (struct passes){is_z      ? pass->channel_z
                           : is_silu ? pass->channel_y_silu
                                     : pass->channel_y,
                           NULL, pass->channel_sums};
}

/* Runs the passes row by row in turn, so that memory is read and written while sums are made; either has no positions where there is
 * none. What sums are about is made a step before them: a processor looks no farther ahead. */
static void run_passes(const struct plan *plan, const struct normfuse_channels *results,
                       const struct normfuse_channels *sums)
{
    const struct passes run = passes_of(plan, results, sums);
    const bool columns = plan->p->columns;
    const size_t last = columns || results->positions == 0 ? results->positions : results->channels,
                 next = columns || sums->positions == 0 ? sums->positions : sums->channels,
                 all = last > next ? last : next;
    const size_t step = plan->short_rows ? all : (size_t)larger(1, STEP_VALUES / pitch_of(plan));
    if (run.first && next > 0)
        run.first(sums, 0, step < next ? step : next);
    for (size_t from = 0, to = step; from < all; from = to, to += step) {
        if (from < last)
            run.results(results, from, to < last ? to : last);
        if (run.first && to < next)
            run.first(sums, to, to + step < next ? to + step : next);
        if (from < next)
            run.sums(sums, from, to < next ? to : next);
    }
}

/* dy of a part through the activation, unless sums do that. */
static void load_gradient(const struct plan *plan, struct small_worker *w, const struct channel_part *t,
                          struct normfuse_channels *s)
{
    const struct normfuse_problem *p = plan->p;
    const int64_t pitch = pitch_of(plan);
    void *const gradient = real_at(plan, w->gradient, values_before(plan, t));
    if (s->dy ? s->dy == gradient : s->gradient == gradient)
        load(plan, w, &p->dy, t, p->y_type, gradient, pitch, false);
    if (makes_z(plan)) {
        s->z = w->z;
        if (p->columns)
            (plan->short_rows ? plan->channel->short_apply : plan->pass->position_z)(s, 0, s->positions);
        else
            plan->pass->channel_z(s, 0, s->channels);
    }
    if (p->activation != NORMFUSE_IDENTITY && !activates_in_sums(plan)) {
        if (p->post_add.data) /* y itself where that is given */
            load(plan, w, &p->post_add, t, p->y_type, w->z, pitch, !p->from_y);
        activate(plan, w, t, gradient, pitch);
    }
    if (p->dpost_add.data)
        store(plan, w, &p->dpost_add, t, p->y_type, gradient, pitch, false);
}

/* Writes the results of a part, and sums the same part of the next tile: in turn, where the results need no other pass and the
 * tile takes x as it is. Sums per norm group go to w->mean and w->m2; those of gradients per channel are of the tile (rows), or are
 * added to those of its positions before (columns). */
static void take_part(const struct plan *plan, struct small_worker *w, const struct channel_part *last,
                      const struct channel_part *next)
{
    const struct normfuse_problem *p = plan->p;
    struct normfuse_channels sums = {0}, results = {0};
    const struct normfuse_channels none = {0};
    if (plan->apply && last->count > 0) {
        const bool is_fused = begin_results(plan, w, last, &results);
        if (!is_fused || !next || (!p->columns && !reads_x(plan, next))) {
            run_passes(plan, &results, &none);
            if (!is_fused)
                finish_results(plan, w, last, (int64_t)results.z_pitch);
            results.positions = 0;
        }
    }
    if (!next)
        return;
    gather_u(plan, w, next);
    pass_part(plan, w, next, &sums);
    if (!plan->backward) {
        run_passes(plan, &results, &sums);
        gather_part(plan, w, next, p->columns || sums.centred, p->columns || !sums.centred);
        return;
    }
    pass_gradient(plan, next, &sums, true);
    if (!p->columns && sums.dy == sums.gradient) { /* results read the tile */
        run_passes(plan, &results, &none);
        results.positions = 0;
    }
    load_gradient(plan, w, next, &sums);
    run_passes(plan, &results, &sums);
    gather_part(plan, w, next, true, true);
}

/* Takes the next tile, where there is one, part by part. Its statistics and coefficients are those of the tile before from then
 * on. */
static void take_tile(const struct plan *plan, struct small_worker *w, const struct channel_part *tile)
{
    struct channel_part last = w->last, next = tile ? *tile : last;
    next.half = 1 - last.half;
    if (tile && plan->backward)
        begin_backward(plan, w, &next);
    const int64_t step = plan->p->columns ? plan->group_channels : channels_of_part(plan);
    for (int64_t first = 0; first < plan->group_channels; first += step) {
        last.first = next.first = first;
        last.channels = next.channels = smaller(step, plan->group_channels - first);
        take_part(plan, w, &last, tile ? &next : NULL);
    }
    w->last = (struct channel_part){0};
    if (!tile)
        return;
    next.first = 0;
    next.channels = plan->group_channels;
    if (plan->backward)
        finish_gradients(plan, w, &next);
    else
        finish_statistics(plan, w, &next);
    void **const of_tile[] = {&w->shift, &w->rstd, &w->rest, &w->slope, &w->offset},
                 **const before[] = {&w->before.shift, &w->before.rstd, &w->before.rest, &w->before.slope,
                                     &w->before.offset};
    for (int i = 0; i < 5; i++) {
        void *const array = *of_tile[i];
        *of_tile[i] = *before[i];
        *before[i] = array;
    }
    w->last = next;
}

/* ---- gradients of parameters ------------------------------------------------------------------------------------------------- */

static void clear_sums(const struct plan *plan, struct small_worker *w, bool of_tile)
{
    const size_t c = (size_t)plan->p->c;
    memset(of_tile ? w->sum_bias : w->bias_so_far, 0, c * (of_tile ? plan->real_bytes : 8));
    memset(of_tile ? w->sum_weight : w->weight_so_far, 0, c * (of_tile ? plan->real_bytes : 8));
    if (plan->sums_slopes)
        memset(of_tile ? w->sum_slope : w->slope_so_far, 0, c * (of_tile ? plan->real_bytes : 8));
}

/* f32 sums of columns, over at most NORMFUSE_CHANNEL_CHUNK positions, onto those of the block. */
static void flush_columns(const struct plan *plan, struct small_worker *w)
{
    const size_t c = (size_t)plan->p->c;
    plan->column->accumulate(w->sum_bias, w->bias_so_far, c, 1);
    plan->column->accumulate(w->sum_weight, w->weight_so_far, c, 1);
    if (plan->sums_slopes)
        plan->column->accumulate(w->sum_slope, w->slope_so_far, c, 1);
    clear_sums(plan, w, true);
}

/* The sums of a sample and channel: onto those of dbias and dweight, and to dscale and dshift. */
static void add_sample(const struct plan *plan, int64_t n, int64_t c, double all, double centred, double *dbias,
                       double *dweight)
{
    const struct normfuse_problem *p = plan->p;
    const double gain = 1 + load_parameter(&p->scale, n, c, 0);
    *dbias += gain * all;
    *dweight += gain * centred;
    store_parameter(&p->dshift, n, c, all);
    if (p->dscale.data)
        store_parameter(&p->dscale, n, c, weight_of(plan, n, c) * centred + bias_of(plan, n, c) * all);
}

/* The walk's sums, of sample n or of the whole block, onto the block's sums. Of samples in parts these are added up at the end. */
static void add_to_block(const struct plan *plan, struct small_worker *w, int64_t block, int64_t n)
{
    const int64_t channels = plan->p->c;
    double *const dbias = plan->sample_sums + 2 * block * channels, *const dweight = dbias + channels;
    for (int64_t c = 0; c < channels && plan->sums_samples; c++) {
        if (plan->by_sample && plan->parts == 1) {
            add_sample(plan, n, c, w->bias_so_far[c], w->weight_so_far[c], &dbias[c], &dweight[c]);
        } else {
            dbias[c] += w->bias_so_far[c];
            dweight[c] += w->weight_so_far[c];
        }
    }
    for (int64_t c = 0; c < channels && plan->sums_slopes; c++)
        plan->slope_sums[block * channels + c] += w->slope_so_far[c];
    clear_sums(plan, w, false);
}

void normfuse_channels_finish(const struct plan *plan)
{
    const struct normfuse_problem *p = plan->p;
    if (!plan->sums_samples)
        return;
    double *const dbias = plan->sample_sums + 2 * plan->blocks * p->c, *const dweight = dbias + p->c;
    for (int64_t c = 0; c < p->c; c++) {
        dbias[c] = p->accumulate ? load_parameter(&p->dbias, 0, c, 0) : 0;
        dweight[c] = p->accumulate ? load_parameter(&p->dweight, 0, c, 0) : 0;
    }
    const bool joins_parts = plan->by_sample && plan->parts > 1;
    for (int64_t b = 0; b < plan->blocks; b++) {
        double *const all = plan->sample_sums + 2 * b * p->c, *const centred = all + p->c;
        const bool continues = joins_parts && b % plan->parts > 0, ends = !joins_parts || (b + 1) % plan->parts == 0;
        for (int64_t c = 0; c < p->c; c++) {
            if (continues) { /* the part before, of the same sample */
                all[c] = all[c - 2 * p->c] + all[c];
                centred[c] = centred[c - 2 * p->c] + centred[c];
            }
            if (joins_parts && ends) {
                add_sample(plan, b / plan->parts, c, all[c], centred[c], &dbias[c], &dweight[c]);
            } else if (ends) {
                dbias[c] += all[c];
                dweight[c] += centred[c];
            }
        }
    }
    for (int64_t c = 0; c < p->c; c++) {
        store_parameter(&p->dbias, 0, c, dbias[c]);
        store_parameter(&p->dweight, 0, c, dweight[c]);
    }
}

/* ---- a task ------------------------------------------------------------------------------------------------------------------ */

void normfuse_channels_begin(const struct plan *plan, struct small_worker *w)
{
    w->last = (struct channel_part){0};
    if (!plan->by_sample)
        fill_parameters(plan, w, 0);
    if (plan->backward) {
        clear_sums(plan, w, false);
        clear_sums(plan, w, true);
    }
}

void normfuse_channels_end(const struct plan *plan, struct small_worker *w)
{
    if (w->last.count > 0)
        take_tile(plan, w, NULL);
}

void normfuse_channels_walk(const struct plan *plan, struct small_worker *w, int64_t block)
{
    const struct normfuse_problem *p = plan->p;
    const int64_t sample = plan->sample_positions,
                  from = block / plan->parts * plan->block_samples * sample + block % plan->parts * plan->part;
    const int64_t end = plan->parts > 1 ? smaller(from + plan->part, (block / plan->parts + 1) * sample)
                                        : smaller(p->n * p->s, from + plan->block_samples * sample);
    struct channel_part t = {.n = -1, .channels = plan->group_channels};
    for (int64_t at = from, chunk = from + NORMFUSE_CHANNEL_CHUNK; at < end; at += t.count) {
        if (plan->by_sample && at / p->s != t.n) {
            normfuse_channels_end(plan, w);
            fill_parameters(plan, w, at / p->s);
        }
        t.n = at / p->s;
        t.s = at % p->s;
        t.count = smaller(smaller(plan->positions, p->s - t.s),
                          (plan->backward && p->columns ? smaller(chunk, end) : end) - at);
        for (t.group = 0; t.group < (p->columns ? 1 : plan->groups); t.group++)
            take_tile(plan, w, &t);
        if (!plan->backward)
            continue;
        const bool ends_sample = plan->by_sample && t.s + t.count == p->s, ends = at + t.count == end;
        if (p->columns && (at + t.count == chunk || ends_sample || ends)) {
            flush_columns(plan, w);
            chunk = at + t.count + NORMFUSE_CHANNEL_CHUNK;
        }
        if (ends_sample || ends)
            add_to_block(plan, w, block, t.n);
    }
}

void normfuse_channels_store_empty(const struct normfuse_problem *p)
{
    const struct normfuse_parameter *const both[] = {&p->mean, &p->rstd};
    const double values[] = {0, rstd_of(p, 0, 0)};
    for (int i = 0; i < 2; i++)
        for (int64_t j = 0; both[i]->data && j < p->n * p->groups * p->s; j++)
            normfuse_store(both[i]->data + j * (ptrdiff_t)normfuse_type_bytes(both[i]->type), both[i]->type, values[i]);
}
