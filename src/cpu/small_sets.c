/* SPDX-License-Identifier: MIT
 *
 * small_sets.c - group norms whose sets have few values: many sets at a time, in the L1 cache, read once and written once
 * (kernels.h says what is computed there). What a set costs is then a few dozen instructions, not the calls, joins and
 * coefficients per channel of pieces.c and bundles.c (docs/decisions/0014). */
#include "cpu/plan.h"

/* `sets` groups from `first` on, of samples [n, n + samples): tiles of samples [begin, end), then the next groups. */
struct small_tile {
    int64_t n, samples, first, sets, begin, end;
};

/* A row of a tile follows itself in memory. */
static bool is_adjacent(const struct plan *plan, const struct normfuse_view *v)
{
    const struct normfuse_problem *p = plan->p;
    if (p->columns)
        return v->channel == 1 || p->c == 1;
    return (v->position == 1 || p->s == 1) && (v->channel == p->s || p->c == 1);
}

bool normfuse_small_sets_plan(struct plan *plan, const struct normfuse_view *const *views, size_t count)
{
    const struct normfuse_problem *p = plan->p;
    const int64_t d = plan->group_channels, values = d * p->s;
    const int32_t whole = plan->backward ? NORMFUSE_PHASE_BACKWARD_SUMS | NORMFUSE_PHASE_BACKWARD_APPLY
                                         : NORMFUSE_PHASE_STATISTICS | NORMFUSE_PHASE_APPLY;
    if (p->sets != NORMFUSE_SETS_GROUP || p->phases != whole || p->stats || p->sums || !plan->reduce ||
        values > SMALL_SET_CHANNEL_VALUES)
        return false;
    /* A costly activation of rows that end inside vectors is made in a stage; rows of whole vectors need no entry for each value. */
    const bool is_costly = p->activation > NORMFUSE_LEAKY_RELU;
    const bool is_ragged = is_costly && p->s % SPREAD_MOMENTS != 0 && (plan->backward || values <= 2 * SMALL_SET_FEW);
    const bool is_row = !is_costly && plan->backward && d == 1 && p->s == SMALL_SET_LONG_WIDTH;
    const int64_t width = is_ragged || (values <= SMALL_SET_FEW && !is_row) ? SMALL_SET_LONG_WIDTH : SMALL_SET_WIDTH;
    const bool is_summed = is_ragged && p->s > SPREAD_MOMENTS && !plan->is_double; /* has few sums beside its values */
    if (p->s > (p->columns ? SMALL_SET_ROWS : width) || (p->s > 1 && !is_summed && values > SMALL_SET_VALUES))
        return false;
    plan->staged = plan->add;
    for (size_t i = 0; i < count; i++)
        plan->staged |= views[i]->data && !is_adjacent(plan, views[i]);
    plan->small_rows = p->columns ? p->s : 1;
    plan->small_width = p->columns ? d : values;
    plan->small_repeat = p->columns ? 1 : p->s;
    plan->small_summed = plan->small_repeat > SPREAD_MOMENTS ? p->s : 1;
    const int64_t most = p->columns && !plan->backward ? SMALL_SET_SAMPLE : SMALL_SET_TILE;
    plan->small_at_once = larger(1, smaller(plan->groups, most / values));
    if (plan->small_rows > 1 && plan->small_at_once < plan->groups) { /* whole cache lines of a row */
        int64_t line = 1;
        while (line * d % SMALL_SET_LINE != 0)
            line *= 2;
        plan->small_at_once = larger(smaller(plan->small_at_once, line), plan->small_at_once / line * line);
    }
    plan->small_samples = larger(
        1, smaller(p->n, smaller(CHUNK_ROWS / plan->small_rows, SMALL_SET_TILE / (plan->small_at_once * values))));
    return true;
}

/* ---- between tensors and the L1 cache ---------------------------------------------------------------------------------- */

static int64_t values_of(const struct plan *plan, const struct small_tile *t)
{
    return t->samples * plan->small_rows * t->sets * plan->small_width;
}

/* How many values of a tile follow one another in a tensor: a row, a sample's rows, or all. */
static int64_t adjacent_values(const struct plan *plan, const struct normfuse_view *v, const struct small_tile *t)
{
    int64_t values = t->sets * plan->small_width;
    if (plan->small_rows > 1) {
        if (v->position != values)
            return values;
        values *= plan->small_rows;
    }
    return t->samples > 1 && v->batch == values ? values * t->samples : values;
}

static char *address_of(const struct plan *plan, const struct normfuse_view *v, const struct small_tile *t, int64_t row)
{
    const int64_t sample = t->n + row / plan->small_rows, position = row % plan->small_rows;
    const int64_t channel = t->first * plan->group_channels;
    return v->data + (sample * v->batch + channel * v->channel + position * v->position) * (ptrdiff_t)plan->type_bytes;
}

/* A row of a tile from a view that is not adjacent into the stage, or back. */
static void copy_row(const struct plan *plan, const struct normfuse_view *v, const struct small_tile *t, char *at,
                     char *stage, bool to_stage)
{
    const size_t bytes = plan->type_bytes;
    const int64_t channels = t->sets * plan->group_channels, s = plan->small_repeat;
    if (plan->p->columns) {
        normfuse_copy_strided(to_stage ? stage : at, to_stage ? 1 : v->channel, to_stage ? at : stage,
                              to_stage ? v->channel : 1, channels, bytes);
        return;
    }
    for (int64_t c = 0; c < channels; c++, stage += (size_t)s * bytes, at += v->channel * (ptrdiff_t)bytes)
        normfuse_copy_strided(to_stage ? stage : at, to_stage ? 1 : v->position, to_stage ? at : stage,
                              to_stage ? v->position : 1, s, bytes);
}

/* Bytes from a tile's value to the next one's. */
static ptrdiff_t to_next(const struct plan *plan, const struct normfuse_view *v, const struct small_tile *t)
{
    const int64_t samples = t->n + t->samples < t->end ? t->samples : t->begin - t->n;
    const int64_t channels = samples > 0 ? 0 : t->sets * plan->group_channels;
    return (samples * v->batch + channels * v->channel) * (ptrdiff_t)plan->type_bytes;
}

static void load(const struct plan *plan, const struct small_worker *w, const struct normfuse_view *v,
                 const struct small_tile *t, void *to, bool onto)
{
    const bool staged = !is_adjacent(plan, v);
    const int64_t row = t->sets * plan->small_width, stretch = staged ? row : adjacent_values(plan, v, t),
                  all = values_of(plan, t);
    const ptrdiff_t ahead = staged || !onto ? 0 : to_next(plan, v, t); /* x and dy: see `prefetch` */
    for (int64_t i = 0; i < all; i += stretch) {
        char *at = address_of(plan, v, t, i / row);
        if (staged)
            copy_row(plan, v, t, at, w->stage, true);
        plan->pass->load(staged ? w->stage : at, (char *)to + (size_t)i * plan->real_bytes, (size_t)stretch, onto, ahead);
    }
}

static void store(const struct plan *plan, const struct small_worker *w, const struct normfuse_view *v,
                  const struct small_tile *t, const void *from, bool stream)
{
    const bool staged = !is_adjacent(plan, v);
    const int64_t row = t->sets * plan->small_width, stretch = staged ? row : adjacent_values(plan, v, t),
                  all = values_of(plan, t);
    for (int64_t i = 0; i < all; i += stretch) {
        char *at = address_of(plan, v, t, i / row);
        plan->pass->store((const char *)from + (size_t)i * plan->real_bytes, staged ? w->stage : at, (size_t)stretch,
                          stream && !staged);
        if (staged)
            copy_row(plan, v, t, at, w->stage, false);
    }
}

/* Makes s prefetch a tensor's places of this tile, or of the next one; none, or streamed ones: what is in the cache. */
static void prefetch(const struct plan *plan, const struct small_worker *w, struct normfuse_small_sets *s,
                     const struct normfuse_view *v, const struct small_tile *t, bool next)
{
    const bool is_none = !v->data || !is_adjacent(plan, v) || (plan->stream && !next);
    const ptrdiff_t bytes = is_none ? 0 : (ptrdiff_t)plan->type_bytes;
    s->ahead = is_none ? w->u : address_of(plan, v, t, 0) + (next ? to_next(plan, v, t) : 0);
    s->ahead_sample = v->batch * bytes;
    s->ahead_row = v->position * bytes;
    s->ahead_value = bytes;
}

/* u less what its set has in `bases`, rounded once: u itself would be rounded, too. Doubles have u. */
static void add_bias(const struct plan *plan, const struct small_worker *w, const struct small_tile *t, bool about_means)
{
    enum { AT_ONCE = 256 };
    const struct normfuse_parameter *const bias = &plan->p->pre_bias;
    const int64_t width = plan->small_width, row = t->sets * width, c = t->first * plan->group_channels;
    double biases[AT_ONCE];
    for (int64_t set = 0; set < t->samples * t->sets; set++) {
        const int64_t n = set / t->sets, j = set % t->sets;
        double base = 0; /* doubles; else the mean, or where that is unknown one of the values, near it */
        if (!plan->is_double)
            base = about_means ? w->mean[set]
                               : (double)(float)((double)((float *)w->u)[n * plan->small_rows * row + j * width] +
                                                 pre_bias_of(plan, t->n + n, c + j * plan->group_channels));
        w->bases[set] = isfinite(base) ? base : 0;
    }
    for (int64_t from = 0, count; from < row; from += count) {
        const int64_t j = from / width;
        count = smaller(AT_ONCE, (j + 1) * width - from);
        for (int64_t n = 0; n < t->samples; n++) {
            for (int64_t i = 0; i < count && (n == 0 || bias->batch); i++)
                biases[i] = pre_bias_of(plan, t->n + n, c + (from + i) / plan->small_repeat);
            const double base = w->bases[n * t->sets + j];
            for (int64_t r = n * plan->small_rows; r < (n + 1) * plan->small_rows; r++) {
                if (plan->is_double) {
                    double *u = (double *)w->u + r * row + from;
                    for (int64_t i = 0; i < count; i++)
                        u[i] += biases[i];
                } else {
                    float *u = (float *)w->u + r * row + from;
                    for (int64_t i = 0; i < count; i++)
                        u[i] = (float)((double)u[i] + (biases[i] - base));
                }
            }
        }
    }
}

/* about_means: less the sets' means, which are 0 then. */
static void load_u(const struct plan *plan, const struct small_worker *w, const struct small_tile *t, bool about_means)
{
    const struct normfuse_problem *p = plan->p;
    load(plan, w, &p->x, t, w->u, false);
    if (p->pre_bias.data)
        add_bias(plan, w, t, about_means);
    for (int64_t i = 0; i < t->samples * t->sets && p->pre_bias.data && about_means; i++)
        w->mean[i] -= w->bases[i];
    if (!plan->add)
        return;
    load(plan, w, &p->pre_add, t, w->u, true);
    plan->pass->store(w->u, w->stage, (size_t)values_of(plan, t), false);
    plan->pass->load(w->stage, w->u, (size_t)values_of(plan, t), false, 0);
    if (p->u.data)
        store(plan, w, &p->u, t, w->u, false);
}

/* ---- parameters ---------------------------------------------------------------------------------------------------------- */

/* True where samples have parameters, or gradients of them, of their own. */
static bool is_per_sample(const struct normfuse_problem *p)
{
    return p->scale.data || p->shift.data || has_sample_parameters(p);
}

/* `count` values for each of their channel's `repeat` values of a row, from value `at` on. */
static void store_repeated(const struct plan *plan, void *restrict to, int64_t at, const double *values, int64_t count)
{
    const bool is_plain = plan->small_repeat == 1 && !plan->is_double;
    for (int64_t c = 0; is_plain && c < count; c++) /* by vectors */
        ((float *)to)[at + c] = (float)values[c];
    for (int64_t c = is_plain ? count : 0; c < count; c++)
        for (int64_t i = 0; i < plan->small_repeat; i++)
            store_real(plan, to, at++, values[c]);
}

static void fill_parameters(const struct plan *plan, struct small_worker *w, const struct small_tile *t)
{
    enum { AT_ONCE = 128 };
    const struct normfuse_problem *p = plan->p;
    const int64_t c0 = t->first * plan->group_channels, channels = t->sets * plan->group_channels;
    const bool is_plain = !p->weight.batch && !p->bias.batch && !p->scale.data && !p->shift.data;
    if (is_plain) {
        store_repeated(plan, w->weight, 0, plan->weight + c0, channels);
        store_repeated(plan, w->bias, 0, plan->bias + c0, channels);
    }
    for (int64_t c = 0, count; c < channels && (!is_plain || p->slope.data); c += count) {
        double weight[AT_ONCE], bias[AT_ONCE], slope[AT_ONCE];
        count = smaller(AT_ONCE, channels - c);
        for (int64_t i = 0, of = c0 + c; i < count; i++, of++) {
            slope[i] = load_parameter(&p->slope, 0, of, 0);
            const double gain = 1 + load_parameter(&p->scale, t->n, of, 0);
            weight[i] = weight_of(plan, t->n, of) * gain;
            bias[i] = bias_of(plan, t->n, of) * gain + load_parameter(&p->shift, t->n, of, 0);
        }
        if (p->slope.data)
            store_repeated(plan, w->prelu_slope, c * plan->small_repeat, slope, count);
        if (is_plain)
            continue;
        store_repeated(plan, w->weight, c * plan->small_repeat, weight, count);
        store_repeated(plan, w->bias, c * plan->small_repeat, bias, count);
    }
}

static double sum_of_channel(const double *sums, int64_t c, int64_t repeat)
{
    return repeat == 1 ? sums[c] : sum_in_lanes(sums + c * repeat, repeat);
}

/* Gradients of parameters over a block of samples, or over the one sample t->n. */
static void store_gradients(const struct plan *plan, const struct small_worker *w, const struct small_tile *t)
{
    const struct normfuse_problem *p = plan->p;
    const int64_t c0 = t->first * plan->group_channels, count = t->sets * plan->group_channels;
    double *dbias = plan->sums_samples ? plan->sample_sums + 2 * (t->n / plan->block_samples * p->c) : NULL,
           *dweight = dbias ? dbias + p->c : NULL;
    const int64_t sums = plan->small_repeat / plan->small_summed; /* of a channel */
    const bool is_plain = dbias && !p->scale.data && !p->dscale.data && !p->dshift.data && !plan->sums_slopes;
    for (int64_t c = 0; is_plain && c < count; c++) {
        dbias[c0 + c] += sum_of_channel(w->bias_so_far, c, sums);
        dweight[c0 + c] += sum_of_channel(w->weight_so_far, c, sums);
    }
    for (int64_t c = c0; !is_plain && c < c0 + count; c++) {
        const double all = sum_of_channel(w->bias_so_far, c - c0, sums);
        const double centred = sum_of_channel(w->weight_so_far, c - c0, sums);
        if (dbias) {
            const double gain = 1 + load_parameter(&p->scale, t->n, c, 0);
            dbias[c] += gain * all;
            dweight[c] += gain * centred;
        } else {
            store_parameter(&p->dweight, t->n, c, centred);
            store_parameter(&p->dbias, t->n, c, all);
        }
        if (plan->sums_slopes)
            slope_sums_of(plan, t->n)[c] += sum_of_channel(w->slope_so_far, c - c0, plan->small_repeat);
        if (p->dscale.data)
            store_parameter(&p->dscale, t->n, c, weight_of(plan, t->n, c) * centred + bias_of(plan, t->n, c) * all);
        if (p->dshift.data)
            store_parameter(&p->dshift, t->n, c, all);
    }
}

/* ---- tiles ------------------------------------------------------------------------------------------------------------- */

static struct normfuse_small_sets sets_of(const struct plan *plan, const struct small_worker *w,
                                          const struct small_tile *t)
{
    return (struct normfuse_small_sets){.samples = (size_t)t->samples,
                                        .rows = (size_t)plan->small_rows,
                                        .sets = (size_t)t->sets,
                                        .n = (size_t)plan->small_width,
                                        .summed = (size_t)plan->small_summed,
                                        .u = w->u,
                                        .weight = w->weight,
                                        .bias = w->bias,
                                        .shift = w->shift,
                                        .sum = w->sum,
                                        .square = w->square,
                                        .rstd = w->rstd,
                                        .rest = w->rest,
                                        .slope = w->slope,
                                        .offset = w->offset,
                                        .columns = {w->columns[0], w->columns[1], w->columns[2]}};
}

/* The i-th set's moments in double: the slow way for values that f32 cannot square. */
static struct moments moments_in_double(const struct plan *plan, const struct small_worker *w,
                                        const struct small_tile *t, int64_t i)
{
    const int64_t n = plan->small_width, pitch = t->sets * n;
    const float *u = (const float *)w->u + i / t->sets * plan->small_rows * pitch + i % t->sets * n;
    struct moments m = {(double)(plan->small_rows * n), 0, 0};
    for (int sweep = 0; sweep < 2; sweep++) {
        double sum = 0;
        for (int64_t r = 0; r < plan->small_rows; r++)
            for (int64_t j = 0; j < n; j++) {
                const double v = (double)u[r * pitch + j] - m.mean;
                sum += sweep ? v * v : v;
            }
        *(sweep ? &m.m2 : &m.mean) = sweep ? sum : sum / m.count;
    }
    return m;
}

/* Mean and M2 of the i-th set; inverse: 1 over its values. */
static struct moments moments_of(const struct plan *plan, const struct small_worker *w, const struct small_tile *t,
                                 int64_t i, double inverse)
{
    const double k = load_real(plan, w->shift, i), sum = load_real(plan, w->sum, i),
                 square = load_real(plan, w->square, i);
    if (!plan->is_double && out_of_range(k, sum, square))
        return moments_in_double(plan, w, t, i);
    const double m2 = square - sum * sum * inverse;
    return (struct moments){(double)(plan->small_rows * plan->small_width), k + sum * inverse, m2 < 0 ? 0 : m2};
}

void normfuse_small_store_statistics(const struct plan *plan, struct small_worker *w, int64_t sets)
{
    const double *restrict mean = w->mean, *restrict rstd = w->double_rstd;
    if (plan->is_double) {
        memcpy(w->shift, mean, (size_t)sets * 8);
        memcpy(w->rstd, rstd, (size_t)sets * 8);
        memset(w->rest, 0, (size_t)sets * 8);
        return;
    }
    float *restrict shift = w->shift, *restrict narrow_rstd = w->rstd, *restrict rest = w->rest;
    for (int64_t i = 0; i < sets; i++) {
        shift[i] = (float)mean[i];
        narrow_rstd[i] = (float)rstd[i];
        rest[i] = (float)(((double)shift[i] - mean[i]) * rstd[i]);
    }
}

/* Rows of a parameter per set: `count` values from (n, g) on. */
static void store_row(const struct normfuse_parameter *q, int64_t n, int64_t g, const double *values, int64_t count)
{
    if (q->data && q->type == NORMFUSE_F32 && q->channel == 1) {
        float *to = (float *)(void *)q->data + n * q->batch + g;
        for (int64_t j = 0; j < count; j++)
            to[j] = (float)values[j];
        return;
    }
    for (int64_t j = 0; q->data && j < count; j++)
        store_parameter(q, n, g + j, values[j]);
}

/* Mean, M2 and rstd of all sets of a tile, and what the caller wants of them. */
static void finish_sets(const struct plan *plan, struct small_worker *w, const struct small_tile *t)
{
    const struct normfuse_problem *p = plan->p;
    const double count = (double)(plan->small_rows * plan->small_width), inverse = 1 / count, eps = p->eps;
    const int64_t sets = t->samples * t->sets;
    double *restrict mean = w->mean, *restrict m2 = w->m2, *restrict rstd = w->double_rstd;
    for (int64_t i = 0; i < sets; i++) {
        const struct moments m = moments_of(plan, w, t, i, inverse);
        mean[i] = m.mean + (p->pre_bias.data ? w->bases[i] : 0);
        m2[i] = m.m2;
    }
    for (int64_t i = 0; i < sets; i++) /* by vectors */
        rstd[i] = 1 / sqrt(m2[i] * inverse + eps);
    normfuse_small_store_statistics(plan, w, sets);
    for (int64_t n = 0, i = 0; n < t->samples; n++, i += t->sets) {
        store_row(&p->mean, t->n + n, t->first, mean + i, t->sets);
        store_row(&p->rstd, t->n + n, t->first, rstd + i, t->sets);
        double *sum =
            plan->updates_running ? plan->sample_sums + 2 * (t->n / plan->block_samples * p->c) + t->first : NULL;
        for (int64_t j = 0; sum && j < t->sets; j++) {
            sum[j] += mean[i + j];
            sum[p->c + j] += m2[i + j] / (count - 1);
        }
    }
}

/* z through the activation, or with a gradient that. */
static void activate(const struct plan *plan, const struct small_worker *w, const struct small_tile *t, void *gradient)
{
    const struct normfuse_problem *p = plan->p;
    const size_t values = (size_t)round_up(values_of(plan, t), 16);
    if (p->slope.data)
        plan->small->prelu(w->prelu_slope, w->z, gradient, plan->sums_slopes ? w->sum_slope : NULL,
                           (size_t)(t->samples * plan->small_rows), (size_t)(t->sets * plan->small_width));
    else if (gradient)
        plan->small->activate_gradient(p->activation, p->act_param, gradient, w->z, values);
    else
        plan->small->activate(p->activation, p->act_param, w->z, values);
}

static void forward_tile(const struct plan *plan, struct small_worker *w, const struct small_tile *t)
{
    const struct normfuse_problem *p = plan->p;
    struct normfuse_small_sets s = sets_of(plan, w, t);
    load_u(plan, w, t, false);
    prefetch(plan, w, &s, &p->y, t, false);
    plan->small->moments(&s);
    finish_sets(plan, w, t);
    if (!p->y.data) /* u alone is requested */
        return;
    if (p->pre_bias.data) {
        load_u(plan, w, t, true);
        normfuse_small_store_statistics(plan, w, t->samples * t->sets);
    }
    s.z = w->z;
    prefetch(plan, w, &s, &p->x, t, true);
    plan->small->normalize(&s);
    if (p->post_add.data)
        load(plan, w, &p->post_add, t, w->z, true);
    activate(plan, w, t, NULL);
    store(plan, w, &p->y, t, w->z, plan->stream);
}

static void backward_tile(const struct plan *plan, struct small_worker *w, const struct small_tile *t)
{
    const struct normfuse_problem *p = plan->p;
    struct normfuse_small_sets s = sets_of(plan, w, t);
    load(plan, w, &p->dy, t, w->gradient, false);
    for (int64_t n = 0, i = 0; n < t->samples; n++)
        for (int64_t j = 0; j < t->sets; j++, i++) {
            w->mean[i] = load_parameter(&p->mean, t->n + n, t->first + j, 0);
            w->double_rstd[i] = load_parameter(&p->rstd, t->n + n, t->first + j, 1);
        }
    load_u(plan, w, t, true);
    normfuse_small_store_statistics(plan, w, t->samples * t->sets);
    const bool needs_z = p->activation != NORMFUSE_IDENTITY;
    s.normalized = w->normalized;
    s.z = needs_z && !p->from_y ? w->z : NULL;
    prefetch(plan, w, &s, &p->x, t, true);
    plan->small->normalize(&s);
    if (needs_z) {
        if (p->post_add.data) /* y itself where that is given */
            load(plan, w, &p->post_add, t, w->z, !p->from_y);
        activate(plan, w, t, w->gradient);
    }
    s.gradient = w->gradient;
    s.sum_bias = w->sum_bias;
    s.sum_weight = w->sum_weight;
    prefetch(plan, w, &s, &p->dy, t, true);
    plan->small->sums(&s);
    if (plan->apply) {
        for (int64_t i = 0; i < t->samples * t->sets; i++) {
            const double factor = -w->double_rstd[i] / (double)plan->set_values;
            store_real(plan, w->slope, i, factor * load_real(plan, w->square, i));
            store_real(plan, w->offset, i, factor * load_real(plan, w->sum, i));
        }
        s.dx = w->u;
        prefetch(plan, w, &s, &p->dx, t, false);
        plan->small->dx(&s);
        if (p->du.data)
            load(plan, w, &p->du, t, w->u, true);
    }
    if (p->dpost_add.data)
        store(plan, w, &p->dpost_add, t, w->gradient, false);
    if (plan->apply)
        store(plan, w, &p->dx, t, w->u, plan->stream);
}

/* ---- a task ---------------------------------------------------------------------------------------------------------------- */

/* Samples [n, end) of a block: f32 sums of channels are those of at most CHUNK_ROWS rows, whose number depends on shapes alone. */
static void walk_block(const struct plan *plan, struct small_worker *w, struct small_tile t, int64_t end)
{
    const int64_t columns = t.sets * plan->small_width, chunk = larger(1, CHUNK_ROWS / plan->small_rows);
    const int64_t sums = columns / plan->small_summed;
    const struct small_tile block = t;
    if (plan->backward) {
        memset(w->bias_so_far, 0, (size_t)sums * 8);
        memset(w->weight_so_far, 0, (size_t)sums * 8);
        if (plan->sums_slopes)
            memset(w->slope_so_far, 0, (size_t)columns * 8);
    }
    for (int64_t n = t.n; n < end; n += chunk) {
        if (plan->backward) {
            memset(w->sum_bias, 0, (size_t)sums * plan->real_bytes);
            memset(w->sum_weight, 0, (size_t)sums * plan->real_bytes);
            if (plan->sums_slopes)
                memset(w->sum_slope, 0, (size_t)columns * plan->real_bytes);
        }
        for (t.n = n; t.n < smaller(n + chunk, end); t.n += t.samples) {
            t.samples = smaller(plan->small_samples, smaller(n + chunk, end) - t.n);
            (plan->backward ? backward_tile : forward_tile)(plan, w, &t);
        }
        if (plan->backward) {
            plan->column->accumulate(w->sum_bias, w->bias_so_far, (size_t)sums, 1);
            plan->column->accumulate(w->sum_weight, w->weight_so_far, (size_t)sums, 1);
            if (plan->sums_slopes)
                plan->column->accumulate(w->sum_slope, w->slope_so_far, (size_t)columns, 1);
        }
    }
    if (plan->backward)
        store_gradients(plan, w, &block);
}

void normfuse_small_sets_walk(const struct plan *plan, struct worker *worker, int64_t begin, int64_t end, int64_t first,
                              int64_t last)
{
    struct small_worker *w = &worker->small;
    const bool per_sample = is_per_sample(plan->p);
    const int64_t step = per_sample ? 1 : plan->block_samples;
    for (int64_t g = first; g < last; g += plan->small_at_once) {
        struct small_tile t = {.first = g, .sets = smaller(plan->small_at_once, last - g), .begin = begin, .end = end};
        for (t.n = begin; t.n < end; t.n += step) {
            if (per_sample || t.n == begin)
                fill_parameters(plan, w, &t);
            walk_block(plan, w, t, smaller(t.n + step, end));
        }
    }
}
