/* SPDX-License-Identifier: MIT
 *
 * plan.c - makes the plan of a problem: how it is cut, by shape alone, and how it is run on this machine, which changes no bits;
 * and lays out its memory. */
#include "cpu/plan.h"
#include "cpu/run.h"

#include "cpu/machine.h"
#include "cpu/threads.h"

/* Rows taken as one so that a row of few channels fills vectors and whole cache lines. */
static int64_t rows_folded(int64_t c)
{
    if (c < 1)
        return 1;
    int64_t w = 1;
    while ((w * c) % 32 != 0 || w * c < FOLDED_COLUMNS) /* 32: a cache line of 16-bit values */
        w *= 2;
    return c < FOLDED_COLUMNS || w * c <= MAX_FOLDED_COLUMNS ? w : 1;
}

static int64_t rows_of_chunk(int64_t c, int64_t folded)
{
    const int64_t rows = 2 * BLOCK_VALUES / larger(c, 1) / 4 * 4;
    return folded * larger(16, smaller(CHUNK_ROWS, rows));
}

/* Cuts segments of `length` into pieces of about `target`, aligned where one is cut inside. */
static void cut(int64_t segments, int64_t length, int64_t target, int64_t align, int64_t *parts, int64_t *part,
                int64_t *segments_per_piece, int64_t *pieces)
{
    target = larger(target, 1);
    *parts = 1;
    *part = length;
    *segments_per_piece = 1;
    if (length > target) {
        *part = smaller(length, round_up(divide_up(length, divide_up(length, target)), align));
        *parts = divide_up(length, *part);
    } else if (length > 0) {
        *segments_per_piece = power_of_two_below(target / length);
    }
    *pieces = *parts > 1 ? segments * *parts : divide_up(segments, *segments_per_piece);
}

/* Samples, a power of two, that have `target` values at least, and rows enough. */
static int64_t samples_of(int64_t target, int64_t c, int64_t s, size_t type_bytes)
{
    const int64_t rows = type_bytes == 2 ? BLOCK_ROWS : BLOCK_ROWS / 2;
    const int64_t samples = larger(divide_up(target, larger(c * s, 1)), divide_up(rows, larger(s, 1)));
    int64_t block = 1;
    while (block < samples)
        block *= 2;
    return block;
}

int64_t normfuse_samples_of_block(int64_t c, int64_t s, size_t type_bytes)
{
    return samples_of(BLOCK_VALUES, c, s, type_bytes);
}

/* So few samples that repeating coefficients takes longer than it gains. */
static bool has_few_samples(const struct normfuse_problem *p)
{
    return p->n < larger(SPREAD_SAMPLES, p->s / SPREAD_SHARE);
}

/* Columns that a channel has: each of the few values of its rows, where sets are channels, or nothing. */
static int64_t spreading(const struct normfuse_problem *p)
{
    const bool shared = !p->weights_samples;
    const int64_t maximum =
        p->sets == NORMFUSE_SETS_BATCH && p->phases & (NORMFUSE_PHASE_STATISTICS | NORMFUSE_PHASE_APPLY)
            ? SPREAD_MOMENTS
            : SPREAD_WIDTH;
    const bool by_channel = p->sets == NORMFUSE_SETS_BATCH || p->sets == NORMFUSE_SETS_NONE;
    /* A forward has no sums that must be cut alike for all numbers of samples. */
    const bool evaluates = p->sets == NORMFUSE_SETS_NONE && p->phases == NORMFUSE_PHASE_APPLY;
    const bool few = evaluates && p->n <= larger(1, p->s / (2 * SPREAD_SHARE));
    return !p->columns && by_channel && shared && p->s > 1 && p->s <= maximum && !few ? p->s : 1;
}

/* Channels of a bundle under columns, so few that its coefficients and sums stay in the cache: of those that are `spread` columns each. */
static int64_t channels_of_bundle(int64_t c, int64_t spread, int64_t rows)
{
    /* few rows: or there was one piece for all threads */
    const bool few = c * spread < 2 * BUNDLE_COLUMNS && rows <= FEW_BUNDLE_ROWS;
    int64_t columns = few ? FEW_BUNDLE_COLUMNS : BUNDLE_COLUMNS, bundles = 2;
    if (c * spread < 2 * columns)
        return c;
    while (few && bundles * columns < c * spread) /* as many for each thread */
        bundles *= 2;
    columns = few ? divide_up(c * spread, bundles) : columns;
    return round_up(divide_up(columns, spread), 32);
}
/* The same where groups of d stay together. */
static int64_t channels_of_groups(int64_t c, int64_t d)
{
    return c < 2 * BUNDLE_COLUMNS ? c : larger(1, BUNDLE_COLUMNS / d) * d;
}

static int64_t rows_of_batch_piece(int64_t columns, size_t type_bytes)
{
    return larger(divide_up(BATCH_PIECE_VALUES, larger(columns, 1)), type_bytes == 2 ? PIECE_ROWS : PIECE_ROWS / 2);
}

/* Samples of a piece of a batch's columns, of any type: parts that are multiples of it are cut alike. */
static int64_t samples_of_piece(int64_t c, int64_t s, int64_t spread)
{
    int64_t parts, part, segments, pieces;
    cut(1, s / spread, rows_of_batch_piece(c * spread, 2), rows_folded(c * spread) * 4, &parts, &part, &segments,
        &pieces);
    return segments;
}

int64_t normfuse_cpu_sample_quantum(int64_t c, int64_t s, bool columns)
{
    int64_t parts, part, segments, pieces;
    if (columns)
        return larger(samples_of_piece(c, s, 1), normfuse_samples_of_block(c, s, 2));
    cut(1, s, PIECE_VALUES, 64, &parts, &part, &segments, &pieces);
    if ((s > 1 && s <= SPREAD_WIDTH) || (s == 1 && c == 1))
        segments = larger(segments, samples_of_piece(c, s, s)); /* both are powers of two */
    return larger(segments, normfuse_samples_of_block(c, s, 2));
}

static bool same_view(const struct normfuse_view *a, const struct normfuse_view *b) { return a->data == b->data; }

/* Under rows: the adjacent channels of batch norm, or groups of one sample, that are taken as one bundle. */
static int64_t bundle_groups_of(const struct plan *plan)
{
    const struct normfuse_problem *p = plan->p;
    const int64_t values = larger(1, p->s * plan->group_channels);
    if (plan->none || plan->staged || (!plan->batch && values > CHUNK_VALUES)) /* groups: of one chunk */
        return 1;
    return larger(1, smaller(smaller(MAX_BUNDLED, plan->groups), BUNDLED_BYTES / (values * (int64_t)plan->type_bytes)));
}

void normfuse_plan_say(struct plan *plan, const struct normfuse_problem *p, int64_t spread)
{
    memset((char *)plan + sizeof plan->seen, 0, sizeof *plan - sizeof plan->seen);
    plan->p = p;
    plan->spread = spread;
    plan->type_bytes = normfuse_type_bytes(p->type);
    plan->is_double = p->type == NORMFUSE_F64;
    plan->real_bytes = plan->is_double ? 8 : 4;
    plan->none = p->sets == NORMFUSE_SETS_NONE;
    plan->constant = plan->none && !(p->pre_bias.data && p->biases_samples) && !p->weights_samples && !p->scale.data &&
                     !p->shift.data;
    /* Samples that share all coefficients, and are small, are walked as the rows of a batch are. */
    const bool is_shared = plan->constant && !has_sample_parameters(p) && (p->columns || plan->spread > 1) &&
                           (p->s <= SPREAD_WIDTH || normfuse_samples_of_block(p->c, p->s, 4) > 1);
    plan->batch = p->sets == NORMFUSE_SETS_BATCH || is_shared;
    plan->backward = (p->phases & (NORMFUSE_PHASE_BACKWARD_SUMS | NORMFUSE_PHASE_BACKWARD_APPLY)) != 0;
    plan->add = p->pre_add.data != NULL;
    plan->updates_running = p->has_running_momentum && (!p->stats || (p->phases & NORMFUSE_PHASE_APPLY));
    plan->set_values = p->set_values;
    if (plan->backward) {
        const bool wanted =
            p->dweight.data || p->dbias.data || p->dscale.data || p->dshift.data || p->dslope.data || p->sums;
        const bool dx = p->dx.data && (p->phases & NORMFUSE_PHASE_BACKWARD_APPLY);
        plan->dependent = dx && !plan->none;
        plan->apply = dx;
        plan->reduce =
            (p->phases & NORMFUSE_PHASE_BACKWARD_SUMS) && (wanted || plan->dependent || (p->dpost_add.data && !dx));
    } else {
        plan->reduce = (p->phases & NORMFUSE_PHASE_STATISTICS) != 0;
        plan->apply = (p->phases & NORMFUSE_PHASE_APPLY) && (p->y.data || (p->u.data && !plan->reduce));
        plan->dependent = plan->apply && plan->reduce;
    }

    plan->sums_slopes = plan->backward && plan->reduce && p->dslope.data;
    plan->partial_sums = plan->sums_slopes ? 3 : 2;
    plan->groups = plan->none ? 1 : plan->batch ? p->c : p->groups;
    plan->group_channels = plan->none ? p->c : p->c / larger(plan->groups, 1);
}

static int64_t values_of_bundle(const struct plan *plan)
{
    const struct normfuse_problem *p = plan->p;
    return plan->bundle_channels * (p->columns ? plan->spread : 1) * p->s * (plan->batch ? p->n : 1);
}

/* True where so many bytes for each value of a bundle stay in the caches from the reduce to the apply part, and all
 * scratch within 1/share of what a call may need. */
static bool may_hold(struct plan *plan, size_t bytes, int share)
{
    const struct normfuse_machine *machine = normfuse_machine_known();
    const struct normfuse_problem *p = plan->p;
    const int64_t l2 = machine->l2_bytes ? machine->l2_bytes : 1 << 20;
    const int64_t held = values_of_bundle(plan) * (int64_t)bytes * (plan->teams_of_one ? plan->threads : 1);
    const double most =
        SCRATCH_BYTES + (double)(p->n * p->c * p->s * (p->columns ? plan->spread : 1)) * (double)plan->type_bytes / 16;
    const double left = most / share - (double)normfuse_plan_lay_out(plan, NULL, 0) - 2 * COLOUR * plan->threads;
    return held <= larger(l2 * plan->threads, machine->llc_bytes / 2) && (double)held <= left;
}

int64_t normfuse_plan_see(struct plan *plan, const struct normfuse_problem *problem)
{
    plan->seen = *problem;
    /* Groups of [N, C] are rows of adjacent values: sums of a column have one value each. */
    if (problem->s == 1 && problem->sets == NORMFUSE_SETS_GROUP && problem->x.channel == 1)
        plan->seen.columns = false;
    /* Values of one channel, one a sample: a column of them. */
    if (problem->s == 1 && problem->c == 1 && problem->sets == NORMFUSE_SETS_NONE)
        plan->seen.columns = true;
    const int64_t spread = spreading(problem);
    if (spread > 1) {
        plan->seen.columns = true;
        plan->seen.s = 1;
    }
    return spread;
}

void normfuse_plan_make(struct plan *plan, const struct normfuse_problem *problem, const normfuse_exec *exec)
{
    const struct normfuse_machine *machine = normfuse_machine_known();
    const int64_t spread = normfuse_plan_see(plan, problem);
    const struct normfuse_problem *const p = &plan->seen;
    normfuse_plan_say(plan, p, spread);
    plan->table = normfuse_table_chosen();
    plan->pass = plan->table->of[p->type];
    plan->column = &plan->table->columns[p->type == NORMFUSE_F64];
    plan->small = &plan->table->small_sets[p->type == NORMFUSE_F64];
    if (p->sets == NORMFUSE_SETS_POSITION) {
        normfuse_channels_plan(plan, exec);
        return;
    }
    plan->bundle_channels = plan->batch || plan->none
                                ? channels_of_bundle(p->c, spread, p->n * p->s)
                                : channels_of_groups(p->c, plan->group_channels);
    plan->folded = p->columns ? rows_folded(plan->bundle_channels * spread) : 1;
    if (!plan->batch) /* a sample's rows */
        plan->folded = smaller(plan->folded, power_of_two_below(larger(1, p->s)));
    const struct normfuse_view *const views[] = {&p->x,  &p->pre_add, &p->post_add, &p->y,        &p->u,
                                                 &p->dy, &p->du,      &p->dx,       &p->dpost_add};
    for (size_t i = 0; i < sizeof views / sizeof *views; i++)
        if (views[i]->data && !direct(plan, views[i]))
            plan->staged = true;
    plan->all_direct = !plan->staged;
    plan->small_sets = normfuse_small_sets_plan(plan, views, sizeof views / sizeof *views);
    if (plan->small_sets) {
        plan->bundles = p->n * plan->groups;
        plan->sample_bundles = plan->groups;
        plan->bundle_groups = 1;
    } else if (p->columns) {
        const int64_t columns = plan->bundle_channels * spread;
        plan->sample_bundles = divide_up(p->c, plan->bundle_channels);
        plan->bundles = plan->batch ? plan->sample_bundles : p->n * plan->sample_bundles;
        plan->constant = plan->constant && plan->sample_bundles == 1;
        plan->segments = plan->batch ? p->n : 1;
        plan->length = p->s;
        /* not by the columns of a bundle, whose number depends on a batch's rows */
        plan->chunk_rows = rows_of_chunk(smaller(p->c * spread, BUNDLE_COLUMNS), plan->folded);
        plan->coefficients = columns * plan->folded;
        int64_t rows = divide_up(COLUMN_PIECE_VALUES, larger(columns, 1));
        if (plan->batch)
            rows = rows_of_batch_piece(p->c * spread, plan->type_bytes);
        else if (16 * columns * (p->s / rows) > PARTIAL_BYTES)
            rows = larger(rows, PIECE_ROWS);
        cut(plan->segments, plan->length, rows, plan->folded * 4, &plan->parts, &plan->part, &plan->segments_per_piece,
            &plan->pieces);
        plan->bundle_groups = 1;
        plan->entries = plan->batch || plan->backward || plan->none ? plan->bundle_channels
                                                                    : plan->bundle_channels / plan->group_channels;
        plan->partial_doubles = plan->partial_sums * plan->entries * plan->pieces;
    } else {
        plan->segments = plan->batch ? p->n : plan->group_channels;
        plan->length = p->s;
        plan->bundle_groups = bundle_groups_of(plan);
        plan->entries = plan->bundle_groups;
        plan->bundle_channels = plan->bundle_groups * plan->group_channels;
        plan->sample_bundles = plan->none ? 1 : divide_up(plan->groups, plan->bundle_groups);
        plan->bundles = plan->batch ? plan->sample_bundles : p->n * plan->sample_bundles;
        plan->coefficients = plan->bundle_channels;
        plan->coefficient_step = plan->batch ? 0 : 1;
        cut(plan->segments, plan->length, PIECE_VALUES, 64, &plan->parts, &plan->part, &plan->segments_per_piece,
            &plan->pieces);
        plan->partial_doubles =
            plan->partial_sums *
            (plan->backward && !plan->batch ? plan->bundle_channels * plan->parts : plan->entries * plan->pieces);
    }
    plan->sums_samples =
        !plan->batch && (plan->backward ? plan->reduce && !p->weights_samples &&
                                              !(p->sums && !(p->phases & NORMFUSE_PHASE_BACKWARD_APPLY))
                                        : plan->updates_running);
    const bool sums = plan->sums_samples || plan->sums_slopes;
    plan->block_samples = sums ? samples_of(GROUP_BLOCK_VALUES, p->c, p->s, plan->type_bytes)
                               : power_of_two_below(larger(1, PIECE_VALUES / larger(1, p->c * p->s)));
    plan->blocks = plan->batch ? 0 : divide_up(p->n, plan->block_samples);

    if (plan->add && !(p->u.data && direct(plan, &p->u)) && !plan->small_sets)
        plan->staged = true;
    if (plan->batch && !p->columns && plan->apply && !plan->staged && p->s > 1 &&
        !has_few_samples(p) && plan->coefficients > 1 &&
        p->s * (int64_t)plan->type_bytes < SHORT_ROW_BYTES && p->s * (int64_t)plan->type_bytes % ALIGNMENT != 0 &&
        plan->coefficients * p->s <= SPREAD_ROW && plan->parts == 1) {
        bool adjacent = true; /* tiles of all samples, which no stage holds */
        for (size_t i = 0; i < sizeof views / sizeof *views; i++)
            adjacent = adjacent && (!views[i]->data || views[i]->channel == p->s);
        if (adjacent)
            plan->spread = p->s;
    }

    /* How it is run changes no bits. */
    const int64_t values = problem->n * problem->c * problem->s;
    const int64_t requested = exec && exec->threads > 0 ? exec->threads : normfuse_threads_default();
    const int64_t maximum = smaller(requested, NORMFUSE_MAX_THREADS);
    plan->threads = (int32_t)larger(1, smaller(maximum, values * (plan->backward ? 2 : 1) / THREAD_VALUES));
    const int64_t bytes = values * (int64_t)plan->type_bytes, l2 = machine->l2_bytes ? machine->l2_bytes : 1 << 20;
    const struct normfuse_view *out = plan->backward ? &p->dx : &p->y;
    const bool in_place = same_view(out, &p->x) || same_view(out, &p->dy) || same_view(out, &p->pre_add) ||
                          same_view(out, &p->post_add) || same_view(out, &p->du);
    /* rows that share cache lines are written in part by ordinary stores, which the streaming ones wait for */
    const int64_t row_bytes = (plan->small_sets   ? 0
                               : p->columns       ? plan->folded * p->c * spread
                               : plan->spread > 1 ? 0
                                                  : p->s) *
                              (int64_t)plan->type_bytes;
    const bool shares_lines = row_bytes % ALIGNMENT != 0 && row_bytes < (p->columns ? 4096 : SHORT_ROW_BYTES);
    /* a streaming store keeps y out of the caches, where what comes next may want a small one */
    plan->stream = bytes > 2 * l2 && !in_place && !shares_lines;

    const int64_t bundle_bytes = plan->bundles ? bytes / plan->bundles * (plan->backward ? 2 : 1) : 0;
    /* each thread holds the bundle that it applies and the next one */
    const int64_t share = larger(l2 / 2, machine->llc_bytes / (4 * plan->threads));
    if (plan->batch) {
        const int64_t together = larger(1, BLOCK_VALUES / larger(1, p->n * p->s * plan->bundle_groups));
        plan->bundles_per_task = p->columns
                                     ? 1
                                     : smaller(larger(together, plan->bundles / TASKS_PER_THREAD / plan->threads),
                                               divide_up(plan->bundles, plan->threads));
        plan->group_ranges = 1;
        plan->tasks = divide_up(plan->bundles, plan->bundles_per_task);
    } else {
        /* a task is a block of samples and a range of groups, so that it alone owns their entries of sample_sums */
        const int64_t groups = plan->sample_bundles;
        if (plan->small_sets && !sums && plan->threads > 1) {
            plan->block_samples = smaller(plan->block_samples, power_of_two_below(larger(1, p->n / (4 * plan->threads))));
            plan->blocks = divide_up(p->n, plan->block_samples);
        }
        const int64_t wanted =
            plan->small_sets && plan->threads == 1 ? 1 : divide_up(4 * plan->threads, larger(plan->blocks, 1));
        plan->group_ranges = larger(1, smaller(groups, wanted));
        plan->bundles_per_task = divide_up(groups, plan->group_ranges);
        const int64_t tiles = plan->small_sets ? divide_up(groups, plan->small_at_once) : 0;
        if (plan->small_sets && plan->blocks * tiles < 4 * plan->threads) /* as many for each thread */
            plan->small_at_once = divide_up(groups, round_up(tiles, plan->threads));
        if (plan->small_sets) /* whole tiles */
            plan->bundles_per_task = smaller(groups, round_up(plan->bundles_per_task, plan->small_at_once));
        plan->group_ranges = divide_up(groups, plan->bundles_per_task);
        plan->blocks_per_task = plan->group_ranges > 1 ? 1 : larger(1, plan->blocks / TASKS_PER_THREAD / plan->threads);
        plan->tasks = divide_up(plan->blocks, plan->blocks_per_task) * plan->group_ranges;
    }
    if (plan->tasks == 1 && plan->pieces <= 1 && plan->reduce) /* a team would take turns */
        plan->threads = 1;
    const bool busy =
        p->activation > NORMFUSE_LEAKY_RELU && p->activation != NORMFUSE_RELU6 && p->activation != NORMFUSE_PRELU;
    plan->back_and_forth = bundle_bytes > l2 * plan->threads;
    /* threads that share a bundle of one piece would wait for one another */
    const int64_t enough = plan->pieces == 1 ? plan->threads : 2 * plan->threads;
    plan->teams_of_one = plan->threads == 1 || plan->small_sets || (bundle_bytes <= share && plan->tasks >= enough);
    if (!plan->reduce && plan->threads > 1) /* pieces do not wait for one another */
        plan->teams_of_one = false;
    const bool in_two = plan->dependent && plan->reduce && !plan->small_sets;
    if (in_two && plan->backward && busy && p->activation != NORMFUSE_HARDSWISH && !p->from_y &&
        may_hold(plan, plan->real_bytes, 1))
        plan->kept_values = values_of_bundle(plan);
    if (in_two && plan->add && !p->u.data && may_hold(plan, plan->type_bytes, 2))
        plan->held_u = values_of_bundle(plan);
    plan->apply_staged = plan->staged && !(plan->held_u && plan->all_direct);
    /* prefetching helps where a thread computes for longer than it waits: docs/decisions/0004 */
    plan->ahead = (p->columns ? busy || plan->type_bytes == 2 : plan->batch || !plan->backward) && !plan->apply_staged;
}

/* ---- memory ------------------------------------------------------------------------------------------------------ */

void *normfuse_take(struct arena *arena, int64_t count, size_t bytes)
{
    const size_t at = arena->used;
    size_t all;
    arena->overflows |= __builtin_mul_overflow((size_t)count, bytes, &all) || all > SIZE_MAX - ALIGNMENT - COLOUR;
    all = (all + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT + (all >= 1024 ? COLOUR : 0); /* whole vectors, for columns.inl */
    arena->overflows |= __builtin_add_overflow(at, all, &arena->used);
    if (arena->overflows || arena->used > arena->room)
        arena->base = NULL;
    return arena->base ? arena->base + at : NULL;
}

/* A call: eleven copies of it were 5 KB. */
static __attribute__((noinline)) bool is_copied(const struct plan *plan, const struct normfuse_view *view)
{
    return view->data && !direct(plan, view);
}

static void lay_out_team(const struct plan *plan, struct team *team, struct arena *arena)
{
    for (int i = 0; i < 2; i++) {
        struct bundle_state *state = &team->state[i];
        if (i >= plan->bundles)
            break; /* one bundle fills one state */
        state->partials = normfuse_take(arena, plan->reduce ? plan->partial_doubles : 0, 8);
        void **arrays[] = {&state->c.k, &state->c.a, &state->c.b, &state->c.p, &state->c.q, &state->c.r};
        for (int j = 0; j < (plan->backward ? 6 : 3); j++)
            *arrays[j] =
                normfuse_take(arena, plan->coefficients * (plan->p->columns ? 1 : plan->spread), plan->real_bytes);
        if (plan->p->slope.data)
            state->c.slope =
                normfuse_take(arena, plan->coefficients * (plan->p->columns ? 1 : plan->spread), plan->real_bytes);
    }
    team->kept = normfuse_take(arena, plan->kept_values, plan->real_bytes);
    team->u = normfuse_take(arena, plan->held_u, plan->type_bytes);
    team->sums = normfuse_take(arena, 2 * plan->bundle_channels, 8);
    team->rstd = normfuse_take(arena, plan->bundle_channels, 8);
    team->rest = normfuse_take(arena, plan->bundle_channels, 8);
}

static void lay_out_small_worker(const struct plan *plan, struct small_worker *w, struct arena *arena)
{
    const int64_t room = 16; /* a vector is read and written behind each array */
    const int64_t columns = plan->small_at_once * plan->small_width, sets = plan->small_at_once * plan->small_samples;
    const int64_t values = columns * plan->small_rows * plan->small_samples;
    void **of_values[] = {&w->u, &w->z, &w->normalized, &w->gradient};
    for (int i = 0; i < (plan->backward ? 4 : 2); i++)
        *of_values[i] = normfuse_take(arena, values + room, plan->real_bytes);
    w->stage = normfuse_take(arena, plan->staged ? values : 0, plan->type_bytes);
    const int64_t sums = plan->backward ? columns / plan->small_summed + room : 0;
    void **of_columns[] = {&w->weight, &w->bias, &w->sum_bias, &w->sum_weight};
    for (int i = 0; i < 4; i++)
        *of_columns[i] = normfuse_take(arena, i < 2 ? columns + room : sums, plan->real_bytes);
    for (int i = 0; plan->small_rows > 1 && i < 3; i++)
        w->columns[i] = normfuse_take(arena, columns + room, plan->real_bytes);
    w->bias_so_far = normfuse_take(arena, sums, 8);
    w->weight_so_far = normfuse_take(arena, sums, 8);
    w->prelu_slope = normfuse_take(arena, plan->p->slope.data ? columns + room : 0, plan->real_bytes);
    w->sum_slope = normfuse_take(arena, plan->sums_slopes ? columns + room : 0, plan->real_bytes);
    w->slope_so_far = normfuse_take(arena, plan->sums_slopes ? columns + room : 0, 8);
    void **of_sets[] = {&w->shift, &w->sum, &w->square, &w->rstd, &w->rest, &w->slope, &w->offset};
    for (int i = 0; i < (plan->backward ? 7 : 5); i++)
        *of_sets[i] = normfuse_take(arena, sets + room, plan->real_bytes);
    w->mean = normfuse_take(arena, sets, 8);
    w->m2 = normfuse_take(arena, sets, 8);
    w->double_rstd = normfuse_take(arena, sets, 8);
    w->bases = normfuse_take(arena, plan->p->pre_bias.data ? sets : 0, 8);
}

size_t normfuse_plan_lay_out(struct plan *plan, char *base, size_t room)
{
    struct arena arena = {room < ALIGNMENT ? NULL : base, room - ALIGNMENT, 0, false};
    const struct normfuse_problem *p = plan->p;
    const int64_t columns = p->columns ? plan->bundle_channels * plan->spread : 0, width = columns * plan->folded;
    plan->weight = normfuse_take(&arena, p->weight.batch ? 0 : p->c, 8);
    plan->bias = normfuse_take(&arena, p->bias.batch ? 0 : p->c, 8);
    plan->sample_sums =
        normfuse_take(&arena, plan->sums_samples ? (plan->blocks + (plan->channel ? 1 : 0)) * p->c * 2 : 0, 8);
    plan->slope_sums = normfuse_take(&arena, plan->sums_slopes ? (plan->batch ? 1 : plan->blocks) * p->c : 0, 8);
    plan->workers = normfuse_take(&arena, plan->threads, sizeof *plan->workers);
    for (int32_t i = 0; i < plan->threads; i++) {
        struct worker local, *worker = arena.base ? &plan->workers[i] : &local;
        memset(worker, 0, sizeof *worker);
        if (plan->channel) {
            normfuse_channels_lay_out(plan, &worker->small, &arena);
            continue;
        }
        if (plan->small_sets) {
            lay_out_small_worker(plan, &worker->small, &arena);
            continue;
        }
        if (plan->teams_of_one || !plan->reduce)
            lay_out_team(plan, &worker->own, &arena);
        const int64_t sums = p->columns ? width : CHUNK_VALUES;
        if (plan->reduce) {
            const int64_t at_once = p->pre_bias.data ? MAX_BUNDLED : plan->bundle_groups;
            worker->shift = normfuse_take(&arena, p->columns ? width : at_once, plan->real_bytes);
            worker->sum = normfuse_take(&arena, p->columns || plan->backward ? sums : at_once, plan->real_bytes);
            worker->square = normfuse_take(&arena, p->columns || plan->backward ? sums : at_once, plan->real_bytes);
            worker->slope_sum = normfuse_take(&arena, plan->sums_slopes ? sums : 0, plan->real_bytes);
            worker->slopes = normfuse_take(&arena, plan->sums_slopes ? columns : 0, 8);
            worker->mean = normfuse_take(&arena, columns, 8);
            worker->m2 = normfuse_take(&arena, columns, 8);
            worker->sum64 = normfuse_take(&arena, columns, 8);
            worker->square64 = normfuse_take(&arena, columns, 8);
        }
        /* bundles go through a copy of u where that is not written out */
        const int64_t stage = larger(STAGE_VALUES, p->columns                ? width
                                                   : plan->bundle_groups > 1 ? plan->bundle_channels * p->s
                                                                             : 0);
        const bool copied[] = {plan->add || is_copied(plan, &p->x) || is_copied(plan, &p->u),
                               is_copied(plan, &p->dy),
                               is_copied(plan, &p->post_add),
                               is_copied(plan, &p->du),
                               is_copied(plan, &p->pre_add) || is_copied(plan, &p->y) || is_copied(plan, &p->dx),
                               is_copied(plan, &p->dpost_add)};
        for (int j = 0; j < 6; j++)
            worker->stage[j] = normfuse_take(&arena, plan->staged && copied[j] ? stage : 0, plan->type_bytes);
    }
    if (!plan->teams_of_one) {
        if (plan->reduce)
            lay_out_team(plan, &plan->shared, &arena);
        plan->claims = normfuse_take(&arena, plan->reduce ? (plan->bundles + 1) * plan->threads : 0, 4);
        plan->finished = normfuse_take(&arena, plan->reduce ? plan->bundles + 1 : 0, 4);
        plan->ready = normfuse_take(&arena, plan->reduce ? plan->bundles + 1 : 0, 4);
    }
    return arena.overflows || arena.used > SIZE_MAX - ALIGNMENT ? SIZE_MAX : arena.used + ALIGNMENT;
}
