/* SPDX-License-Identifier: MIT
 *
 * bundles.c - what belongs to a bundle: its coefficients before the apply part, and what its sums give the caller. */
#include "cpu/plan.h"

#include <math.h>

/* ---- parameters ---------------------------------------------------------------------------------------------------- */

static void add_parameter(const struct normfuse_problem *p, const struct normfuse_parameter *q, int64_t c, double v)
{
    store_parameter(q, 0, c, p->accumulate ? load_parameter(q, 0, c, 0) + v : v);
}

/* Entries (n, first) to (n, first + count) of a parameter as doubles. */
static void to_double(const struct normfuse_parameter *q, int64_t n, int64_t first, double *restrict out, int64_t count,
                      double absent)
{
    if (!q->data || q->type != NORMFUSE_F32 || q->channel != 1) {
        for (int64_t c = 0; c < count; c++)
            out[c] = load_parameter(q, n, first + c, absent);
        return;
    }
    const float *in = (const float *)(const void *)q->data + n * q->batch + first;
    for (int64_t c = 0; c < count; c++)
        out[c] = (double)in[c];
}

void normfuse_read_parameters(const struct plan *plan)
{
    const struct normfuse_problem *p = plan->p;
    if (!p->weight.batch)
        to_double(&p->weight, 0, 0, plan->weight, p->c, 1);
    if (!p->bias.batch)
        to_double(&p->bias, 0, 0, plan->bias, p->c, 0);
}

/* ---- per bundle: coefficients before, results after -------------------------------------------------------------- */

/* Statistics of a norm group. */
struct statistics {
    double mean, rstd;
};

/* Repeats the entries of `count` channels for each of their columns, and those for rows that are taken as one. */
static void repeat_entries(const struct plan *plan, void *array, int64_t count)
{
    const int64_t spread = plan->spread;
    for (int64_t c = count - 1; spread > 1 && c >= 0; c--)
        if (plan->is_double) {
            double *out = (double *)array + c * spread, v = ((double *)array)[c];
            for (int64_t i = 0; i < spread; i++)
                out[i] = v;
        } else {
            float *out = (float *)array + c * spread, v = ((float *)array)[c];
            for (int64_t i = 0; i < spread; i++)
                out[i] = v;
        }
    repeat_folded(plan, array, count * spread);
}

static struct moments given_stats(const struct plan *plan, int64_t n, int64_t g)
{
    const double *t = plan->p->stats + 3 * (plan->batch ? g : n * plan->groups + g);
    return (struct moments){t[0], t[1], t[2]};
}

static struct statistics from_moments(const struct plan *plan, struct moments m)
{
    const double rstd = 1 / sqrt((m.count > 0 ? m.m2 / m.count : 0) + plan->p->eps);
    return (struct statistics){m.mean, rstd};
}

/* Which statistics channel c of sample n is normalized with, where they are given. */
static struct statistics given_statistics(const struct plan *plan, int64_t n, int64_t c)
{
    const struct normfuse_problem *p = plan->p;
    const int64_t g = plan->batch || plan->none ? c : c / plan->group_channels, of = plan->batch ? 0 : n;
    if (plan->none && !p->evaluate)
        return (struct statistics){0, 1}; /* affine */
    if (plan->none)
        return (struct statistics){load_parameter(&p->running_mean, 0, c, 0),
                                   1 / sqrt(load_parameter(&p->running_var, 0, c, 1) + p->eps)};
    if (plan->backward)
        return (struct statistics){load_parameter(&p->mean, of, g, 0), load_parameter(&p->rstd, of, g, 1)};
    return from_moments(plan, given_stats(plan, n, g));
}

/* A bundle's channels [first, first + count), in groups of d that share statistics, the first of them g. */
struct extent {
    int64_t n, first, count, d, groups, g;
};

static struct extent extent_of(const struct plan *plan, int64_t bundle)
{
    const struct normfuse_problem *p = plan->p;
    const int64_t d = plan->batch || plan->none ? 1 : plan->group_channels;
    struct extent e = {.n = sample_of(plan, bundle), .d = d};
    if (p->columns) {
        e.first = first_channel(plan, bundle);
        e.count = channels_of(plan, bundle);
        e.g = e.first / d;
    } else {
        e.g = plan->none ? 0 : group_of(plan, bundle);
        e.first = e.g * d;
        e.count = plan->none ? p->c : groups_in(plan, bundle) * d;
    }
    e.groups = e.count / larger(1, d);
    return e;
}

/* The value that the passes subtract in channel c: the mean of x, which pre_bias is a part of, in their type; and what that is more
 * than the mean. A difference of doubles is exact with what it leaves out (Knuth). */
static double k_of(const struct plan *plan, double mean, int64_t n, int64_t c, double *rest)
{
    if (!plan->p->pre_bias.data) {
        const double rounded = plan->is_double ? mean : (double)(float)mean;
        *rest = rounded - mean;
        return rounded;
    }
    const double bias = pre_bias_of(plan, n, c), of_x = mean - bias, part = of_x - mean;
    const double k = plan->is_double ? of_x : (double)(float)of_x;
    *rest = (k - of_x) - ((mean - (of_x - part)) - (bias + part));
    return k;
}

/* The statistics of a bundle's j-th group, for each of its channels. */
static void store_group(const struct plan *plan, const struct team *team, struct coefficients *co,
                        const struct extent *e, int64_t j, struct statistics st)
{
    double k = 0, rest = 0;
    for (int64_t i = j * e->d; i < (j + 1) * e->d; i++) {
        if (i == j * e->d || plan->p->pre_bias.data)
            k = k_of(plan, st.mean, e->n, e->first + i, &rest);
        store_real(plan, co->k, i, k);
        team->rstd[i] = st.rstd;
        team->rest[i] = rest;
    }
}

/* Given statistics of a bundle's channels. */
static void store_given(const struct plan *plan, const struct team *team, struct coefficients *co,
                        const struct extent *e)
{
    const struct normfuse_problem *p = plan->p;
    if (e->d > 1 || p->pre_bias.data || !(plan->none ? p->evaluate : plan->backward)) {
        for (int64_t j = 0; j < e->groups; j++)
            store_group(plan, team, co, e, j, given_statistics(plan, e->n, e->first + j * e->d));
        return;
    }
    double *restrict rstd = team->rstd, *restrict rest = team->rest; /* plain loops, which are vectorized */
    to_double(plan->none ? &p->running_mean : &p->mean, e->n, e->first, rest, e->count, 0);
    to_double(plan->none ? &p->running_var : &p->rstd, e->n, e->first, rstd, e->count, 1);
    for (int64_t i = 0; plan->none && i < e->count; i++)
        rstd[i] = 1 / sqrt(rstd[i] + p->eps);
    for (int64_t i = 0; i < e->count; i++) {
        const double mean = rest[i], k = plan->is_double ? mean : (double)(float)mean;
        store_real(plan, co->k, i, k);
        rest[i] = k - mean;
    }
}

/* a, b of a bundle's channels: z = (x - k)*a + b. */
static void store_forward(const struct plan *plan, const struct team *team, struct coefficients *co,
                          const struct extent *e)
{
    const struct normfuse_problem *p = plan->p;
    const double *restrict rstd = team->rstd, *restrict rest = team->rest;
    if (!plan->is_double && !p->scale.data && !p->shift.data && !p->weight.batch && !p->bias.batch) {
        const double *restrict weight = plan->weight + e->first, *restrict bias = plan->bias + e->first;
        float *restrict a = co->a, *restrict b = co->b;
        for (int64_t i = 0; i < e->count; i++) {
            const double gain = rstd[i] * weight[i];
            a[i] = (float)gain;
            b[i] = (float)(bias[i] + rest[i] * gain);
        }
        return;
    }
    for (int64_t i = 0; i < e->count; i++) {
        const int64_t c = e->first + i;
        const double gain = rstd[i] * weight_of(plan, e->n, c), scale = 1 + load_parameter(&p->scale, e->n, c, 0);
        store_real(plan, co->a, i, gain * scale);
        store_real(plan, co->b, i,
                   (bias_of(plan, e->n, c) + rest[i] * gain) * scale + load_parameter(&p->shift, e->n, c, 0));
    }
}

/* q, r of dx = p*dy' + q*(x - k) + r from the sums of the bundle's channels. */
static void backward_coefficients(const struct plan *plan, const struct team *team, struct coefficients *co,
                                  const struct extent *e)
{
    const struct normfuse_problem *p = plan->p;
    const double m = (double)plan->set_values;
    const bool plain = !p->scale.data && !p->weight.batch;
    for (int64_t j = 0; j < e->count; j += e->d) {
        const double *all_of = team->sums + j, *centred_of = all_of + e->count, *weight = plan->weight + e->first + j;
        double all[4] = {0}, centred[4] = {0}; /* value i in sum i % 4: sums that do not wait for one another */
        int64_t i = 0;
        for (; plain && i + 4 <= e->d; i += 4)
            for (int l = 0; l < 4; l++) {
                all[l] += weight[i + l] * all_of[i + l];
                centred[l] += weight[i + l] * centred_of[i + l];
            }
        for (; i < e->d; i++) {
            const int64_t c = e->first + j + i;
            const double gain = plain ? weight[i] : weight_of(plan, e->n, c) * (1 + load_parameter(&p->scale, e->n, c, 0));
            all[i % 4] += gain * all_of[i];
            centred[i % 4] += gain * centred_of[i];
        }
        const double rstd = team->rstd[j];
        const double q = -(rstd * rstd) * (rstd * (((centred[0] + centred[1]) + (centred[2] + centred[3])) / m));
        const double level = -rstd * (((all[0] + all[1]) + (all[2] + all[3])) / m);
        for (i = j; i < j + e->d; i++) {
            store_real(plan, co->q, i, q);
            store_real(plan, co->r, i, level + q * team->rest[i]);
        }
    }
    if (p->columns || plan->spread > 1) {
        repeat_entries(plan, co->q, e->count);
        repeat_entries(plan, co->r, e->count);
    }
}

/* prelu's slopes of a bundle's channels. */
static void store_slopes(const struct plan *plan, struct coefficients *co, const struct extent *e)
{
    if (!plan->p->slope.data)
        return;
    for (int64_t i = 0; i < e->count; i++)
        store_real(plan, co->slope, i, load_parameter(&plan->p->slope, 0, e->first + i, 0));
    if (plan->p->columns || plan->spread > 1)
        repeat_entries(plan, co->slope, e->count);
}

void normfuse_prepare_bundle(const struct plan *plan, const struct team *team, struct bundle_state *state,
                             int64_t bundle)
{
    const struct normfuse_problem *p = plan->p;
    if (!plan->backward && plan->reduce)
        return;
    const struct extent e = extent_of(plan, bundle);
    store_given(plan, team, &state->c, &e);
    store_forward(plan, team, &state->c, &e);
    if (plan->backward)
        memcpy(state->c.p, state->c.a, (size_t)e.count * plan->real_bytes);
    void *arrays[] = {state->c.k, state->c.p, state->c.a, state->c.b};
    const int count = plan->backward && p->activation == NORMFUSE_IDENTITY ? 2 : 4; /* without an activation no z */
    for (int j = 0; j < count && (p->columns || plan->spread > 1); j++)
        if (arrays[j])
            repeat_entries(plan, arrays[j], e.count);
    store_slopes(plan, &state->c, &e);
    if (plan->backward && plan->apply && !plan->reduce && !plan->none) {
        const double *given = p->sums + 2 * (plan->batch ? e.first : e.n * p->c + e.first);
        for (int64_t i = 0; i < e.count; i++) {
            team->sums[i] = given[2 * i];
            team->sums[e.count + i] = given[2 * i + 1];
        }
        backward_coefficients(plan, team, &state->c, &e);
    }
}

static void update_running(const struct normfuse_problem *p, int64_t c, double mean, double unbiased)
{
    const double momentum = p->momentum;
    store_parameter(&p->running_mean, 0, c, (1 - momentum) * load_parameter(&p->running_mean, 0, c, 0) + momentum * mean);
    store_parameter(&p->running_var, 0, c,
                    (1 - momentum) * load_parameter(&p->running_var, 0, c, 1) + momentum * unbiased);
}

/* Writes what a norm group's moments give to the caller. Sample sums: instance norm's running statistics. */
static void store_statistics(const struct plan *plan, int64_t n, int64_t g, struct moments m, struct statistics st,
                             bool writes_stats)
{
    const struct normfuse_problem *p = plan->p;
    if (writes_stats) {
        double *t = p->stats + 3 * (plan->batch ? g : n * plan->groups + g);
        t[0] = m.count;
        t[1] = m.mean;
        t[2] = m.m2;
        return;
    }
    store_parameter(&p->mean, n, g, st.mean);
    store_parameter(&p->rstd, n, g, st.rstd);
    if (plan->updates_running && m.count > 0) {
        const double unbiased = m.m2 / (m.count - 1);
        if (plan->batch) {
            update_running(p, g, m.mean, unbiased);
        } else {
            double *sum = plan->sample_sums + 2 * (n / plan->block_samples * p->c) + g;
            sum[0] += m.mean;
            sum[p->c] += unbiased;
        }
    }
}

/* Joins the moments of a bundle's pieces, in order, onto mean and m2, which have `before` values each; gives how many
 * they have then. */
static double join_pieces(const struct plan *plan, const struct bundle_state *state, int64_t entries, double before,
                          double *restrict mean, double *restrict m2)
{
    const double values = (double)(!plan->p->columns ? 1 : plan->batch ? plan->spread : plan->group_channels);
    for (int64_t index = 0; index < plan->pieces; index++) {
        const struct piece piece = piece_of(plan, index);
        const double count = (double)(piece.segments * piece.length) * values;
        const double *restrict part_mean = state->partials + index * 2 * plan->entries;
        const double *restrict part_m2 = part_mean + plan->entries;
        if (before == 0) {
            memcpy(mean, part_mean, (size_t)entries * 8);
            memcpy(m2, part_m2, (size_t)entries * 8);
        } else {
            const double weight = count / (before + count), cross = before * weight;
            for (int64_t j = 0; j < entries; j++) {
                const double delta = part_mean[j] - mean[j];
                mean[j] += delta * weight;
                m2[j] += part_m2[j] + delta * delta * cross;
            }
        }
        before += count;
    }
    return before;
}

static void finish_forward(const struct plan *plan, const struct team *team, struct bundle_state *state, int64_t bundle)
{
    const struct normfuse_problem *p = plan->p;
    const struct extent e = extent_of(plan, bundle);
    const bool writes_stats = p->stats && !(p->phases & NORMFUSE_PHASE_APPLY);
    double *mean = team->sums, *m2 = team->sums + e.groups, count = 0;
    memset(mean, 0, (size_t)(2 * e.groups) * 8);
    if (writes_stats && p->accumulate)
        for (int64_t j = 0; j < e.groups; j++) {
            const struct moments m = given_stats(plan, e.n, e.g + j);
            count = m.count;
            mean[j] = m.mean;
            m2[j] = m.m2;
        }
    count = join_pieces(plan, state, e.groups, count, mean, m2);
    for (int64_t j = 0; j < e.groups; j++) {
        const struct moments m = {count, mean[j], m2[j]};
        const struct statistics st = from_moments(plan, m);
        store_statistics(plan, e.n, e.g + j, m, st, writes_stats);
        if (plan->apply)
            store_group(plan, team, &state->c, &e, j, st);
    }
    if (!plan->apply)
        return;
    store_forward(plan, team, &state->c, &e);
    void *arrays[] = {state->c.k, state->c.a, state->c.b};
    for (int j = 0; j < 3 && (p->columns || plan->spread > 1); j++)
        repeat_entries(plan, arrays[j], e.count);
    store_slopes(plan, &state->c, &e);
}

/* The partial sums of a bundle's slopes, in order, onto those of its channels. */
static void join_slopes(const struct plan *plan, const struct bundle_state *state, const struct extent *e)
{
    const bool by_piece = plan->p->columns || plan->batch;
    const int64_t entries = by_piece ? plan->entries : plan->bundle_channels;
    double *restrict to = slope_sums_of(plan, e->n) + e->first;
    for (int64_t index = 0; index < (by_piece ? plan->pieces : plan->parts); index++) {
        const double *restrict from = state->partials + (index * plan->partial_sums + 2) * entries;
        for (int64_t i = 0; i < e->count; i++)
            to[i] += from[i];
    }
}

static void finish_backward(const struct plan *plan, const struct team *team, struct bundle_state *state, int64_t bundle)
{
    const struct normfuse_problem *p = plan->p;
    const struct extent e = extent_of(plan, bundle);
    double *restrict all = team->sums, *restrict centred = team->sums + e.count;
    const double *restrict rstd = team->rstd, *restrict rest = team->rest;
    const bool writes_sums = p->sums && !(p->phases & NORMFUSE_PHASE_BACKWARD_APPLY);
    double *given = writes_sums ? p->sums + 2 * (plan->batch ? e.first : e.n * p->c + e.first) : NULL;

    memset(all, 0, (size_t)(2 * e.count) * 8);
    /* Sums that go on from an earlier call's, where nothing but pieces is added to them. */
    const bool continues = p->accumulate && plan->batch && (plan->none || (plan->is_double && writes_sums));
    for (int64_t i = 0; continues && i < e.count; i++) {
        all[i] = writes_sums ? given[2 * i] : load_parameter(&p->dbias, 0, e.first + i, 0);
        centred[i] = writes_sums ? given[2 * i + 1] : load_parameter(&p->dweight, 0, e.first + i, 0);
    }
    /* An evaluation's sums are scaled piece by piece: so are they where they go on from an earlier call's. */
    const bool is_scaled = plan->batch && plan->none && p->evaluate;
    if (is_scaled) {
        for (int64_t i = 0; i < e.count; i++)
            for (int64_t index = 0; index < plan->pieces; index++) {
                const double *partial = state->partials + index * plan->partial_sums * plan->entries;
                all[i] += partial[i];
                centred[i] += rstd[i] * (partial[plan->entries + i] + rest[i] * partial[i]);
            }
    } else {
        const bool by_piece = p->columns || plan->batch;
        const int64_t entries = by_piece ? plan->entries : plan->bundle_channels;
        for (int64_t index = 0; index < (by_piece ? plan->pieces : plan->parts); index++) {
            const double *restrict first = state->partials + index * plan->partial_sums * entries;
            const double *restrict second = first + entries;
            for (int64_t i = 0; i < e.count; i++) {
                all[i] += first[i];
                centred[i] += second[i];
            }
        }
    }

    if (plan->sums_slopes)
        join_slopes(plan, state, &e);
    for (int64_t i = 0; !is_scaled && i < e.count; i++)
        centred[i] += rest[i] * all[i]; /* the passes subtracted k, not the mean */
    double *block_sums = plan->sums_samples ? plan->sample_sums + 2 * (e.n / plan->block_samples * p->c) : NULL;
    if (block_sums && !p->scale.data && !p->dscale.data && !p->dshift.data) {
        double *restrict dbias = block_sums + e.first, *restrict dweight = dbias + p->c;
        for (int64_t i = 0; i < e.count; i++) {
            dbias[i] += all[i];
            dweight[i] += rstd[i] * centred[i];
        }
    } else {
        for (int64_t i = 0; i < e.count; i++) {
            const int64_t c = e.first + i;
            if (writes_sums) {
                given[2 * i] = p->accumulate && !continues ? given[2 * i] + all[i] : all[i];
                given[2 * i + 1] = p->accumulate && !continues ? given[2 * i + 1] + centred[i] : centred[i];
                continue;
            }
            const double dweight = is_scaled ? centred[i] : rstd[i] * centred[i];
            if (plan->batch && continues) {
                store_parameter(&p->dweight, 0, c, dweight);
                store_parameter(&p->dbias, 0, c, all[i]);
            } else if (plan->batch) {
                add_parameter(p, &p->dweight, c, dweight);
                add_parameter(p, &p->dbias, c, all[i]);
            } else if (block_sums) {
                const double gain = 1 + load_parameter(&p->scale, e.n, c, 0);
                block_sums[c] += gain * all[i];
                block_sums[p->c + c] += gain * dweight;
            } else {
                store_parameter(&p->dweight, e.n, c, dweight);
                store_parameter(&p->dbias, e.n, c, all[i]);
            }
            if (p->dscale.data)
                store_parameter(&p->dscale, e.n, c, weight_of(plan, e.n, c) * dweight + bias_of(plan, e.n, c) * all[i]);
            if (p->dshift.data)
                store_parameter(&p->dshift, e.n, c, all[i]);
        }
    }
    if (plan->dependent)
        backward_coefficients(plan, team, &state->c, &e);
}

void normfuse_finish_bundle(const struct plan *plan, struct team *team, int64_t bundle)
{
    struct bundle_state *state = &team->state[bundle & 1];
    if (plan->backward)
        finish_backward(plan, team, state, bundle);
    else
        finish_forward(plan, team, state, bundle);
}

void normfuse_finish_samples(const struct plan *plan)
{
    const struct normfuse_problem *p = plan->p;
    const bool gradients = plan->backward && plan->reduce && !p->sums && (p->dweight.data || p->dbias.data) &&
                           !p->dweight.batch && !p->dbias.batch;
    if (!plan->sums_samples || (!gradients && !plan->updates_running))
        return;
    for (int64_t c = 0; c < p->c; c++) {
        double first = 0, second = 0;
        if (gradients && p->accumulate) {
            first = load_parameter(&p->dbias, 0, c, 0);
            second = load_parameter(&p->dweight, 0, c, 0);
        }
        for (int64_t b = 0; b < plan->blocks; b++) {
            first += plan->sample_sums[2 * b * p->c + c];
            second += plan->sample_sums[(2 * b + 1) * p->c + c];
        }
        if (gradients) {
            store_parameter(&p->dbias, 0, c, first);
            store_parameter(&p->dweight, 0, c, second);
        } else if (p->n > 0) {
            update_running(p, c, first / (double)p->n, second / (double)p->n);
        }
    }
}

void normfuse_begin_slopes(const struct plan *plan)
{
    const struct normfuse_problem *p = plan->p;
    const bool continues = p->accumulate_slope && plan->batch && p->dslope.channel != 0; /* with the bits of one call */
    for (int64_t i = 0; i < (plan->batch ? 1 : plan->blocks) * p->c; i++)
        plan->slope_sums[i] = continues ? load_parameter(&p->dslope, 0, i, 0) : 0;
}

void normfuse_finish_slopes(const struct plan *plan)
{
    const struct normfuse_problem *p = plan->p;
    const struct normfuse_parameter *q = &p->dslope;
    const bool is_one = q->channel == 0, adds = p->accumulate_slope && !(plan->batch && !is_one);
    const int64_t blocks = plan->batch ? 1 : plan->blocks, channels = is_one ? p->c : 1;
    for (int64_t c = 0; c < (is_one ? 1 : p->c); c++) {
        double sum = adds ? load_parameter(q, 0, c, 0) : 0;
        for (int64_t b = 0; b < blocks; b++)
            for (int64_t i = c; i < c + channels; i++)
                sum += plan->slope_sums[b * p->c + i];
        store_parameter(q, 0, c, sum);
    }
}

void normfuse_store_given_statistics(const struct plan *plan)
{
    const struct normfuse_problem *p = plan->p;
    for (int64_t n = 0; n < (plan->batch ? 1 : p->n); n++)
        for (int64_t g = 0; g < plan->groups; g++) {
            const struct moments m = given_stats(plan, n, g);
            store_statistics(plan, n, g, m, from_moments(plan, m), false);
        }
}

void normfuse_store_given_gradients(const struct plan *plan)
{
    const struct normfuse_problem *p = plan->p;
    for (int64_t c = 0; c < p->c; c++) {
        /* A single addend keeps the sign of its zero, as it does in one call. */
        const double nothing = plan->batch ? -0.0 : 0.0;
        double dweight = p->accumulate ? load_parameter(&p->dweight, 0, c, 0) : nothing;
        double dbias = p->accumulate ? load_parameter(&p->dbias, 0, c, 0) : nothing;
        for (int64_t n = 0; n < (plan->batch ? 1 : p->n); n++) {
            const struct statistics st = given_statistics(plan, n, c);
            const double *sums = p->sums + 2 * (plan->batch ? c : n * p->c + c);
            const double gain = 1 + load_parameter(&p->scale, n, c, 0);
            dbias += gain * sums[0];
            dweight += gain * st.rstd * sums[1];
            store_parameter(&p->dscale, n, c, weight_of(plan, n, c) * st.rstd * sums[1] + bias_of(plan, n, c) * sums[0]);
            store_parameter(&p->dshift, n, c, sums[0]);
        }
        store_parameter(&p->dweight, 0, c, dweight);
        store_parameter(&p->dbias, 0, c, dbias);
    }
}

/* ---- problems without elements ------------------------------------------------------------------------------------- */

/* Statistics over nothing, or those that were merged from other shards. */
static void store_empty_statistics(const struct plan *plan)
{
    const struct normfuse_problem *p = plan->p;
    const bool given = !(p->phases & NORMFUSE_PHASE_STATISTICS);
    const int64_t samples = plan->batch ? 1 : p->n;
    for (int64_t g = 0; g < plan->groups; g++) {
        double mean = 0, unbiased = 0;
        bool any = !plan->batch;
        for (int64_t n = 0; n < samples; n++) {
            const struct moments m = given ? given_stats(plan, n, g) : (struct moments){0, 0, 0};
            const struct statistics st = from_moments(plan, m);
            store_parameter(&p->mean, n, g, st.mean);
            store_parameter(&p->rstd, n, g, st.rstd);
            if (m.count > 0) {
                any = true;
                mean += m.mean;
                unbiased += m.m2 / (m.count - 1);
            }
        }
        if (plan->updates_running && any && samples > 0)
            update_running(p, g, mean / (double)samples, unbiased / (double)samples);
    }
}

static void store_zeros(const struct plan *plan, const struct normfuse_parameter *q, bool per_sample)
{
    if (!q->data)
        return;
    for (int64_t n = 0; n < (per_sample ? plan->p->n : 1); n++)
        for (int64_t c = 0; c < plan->p->c; c++)
            store_parameter(q, n, c, 0);
}

void normfuse_store_empty(const struct plan *plan)
{
    const struct normfuse_problem *p = plan->p;
    const size_t samples = plan->batch ? 1 : (size_t)p->n;
    if (!plan->backward) {
        if (!(p->phases & NORMFUSE_PHASE_APPLY) && p->stats) {
            if (!p->accumulate)
                memset(p->stats, 0, samples * (size_t)plan->groups * 3 * sizeof *p->stats);
        } else if (p->sets == NORMFUSE_SETS_POSITION) {
            normfuse_channels_store_empty(p);
        } else if (!plan->none) {
            store_empty_statistics(plan);
        }
        return;
    }
    if (p->dslope.data && (p->phases & NORMFUSE_PHASE_BACKWARD_SUMS) && !p->accumulate_slope)
        for (int64_t c = 0; c < (p->dslope.channel == 0 ? 1 : p->c); c++)
            store_parameter(&p->dslope, 0, c, 0);
    if (!(p->phases & NORMFUSE_PHASE_BACKWARD_SUMS)) {
        normfuse_store_given_gradients(plan);
    } else if (!(p->phases & NORMFUSE_PHASE_BACKWARD_APPLY)) {
        if (!p->accumulate && p->sums)
            memset(p->sums, 0, samples * (size_t)p->c * 2 * sizeof *p->sums);
    } else {
        if (!p->accumulate) {
            store_zeros(plan, &p->dweight, p->dweight.batch != 0);
            store_zeros(plan, &p->dbias, p->dbias.batch != 0);
        }
        store_zeros(plan, &p->dscale, true);
        store_zeros(plan, &p->dshift, true);
    }
}
