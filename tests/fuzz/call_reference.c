/* SPDX-License-Identifier: MIT
 *
 * call_reference.c - see call_reference.h. A channel norm is computed as what it is, the group norm of samples without
 * positions: each position is a row. Errors are worst cases of roundings in the arithmetic of the tensors, of fewer
 * than SUM_ROUNDINGS on the way into a sum and ROUNDINGS elsewhere, carried along with each value; these bounds are
 * wider than those of docs/numerics.md, and find what is wrong rather than what is inexact. */
#include "call_reference.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/ref/reference.h"
#include "tests/ref/tolerance.h"

enum { ROUNDINGS = 64, SUM_ROUNDINGS = 256 };
#define LARGE 1e12L

typedef long double real;

enum { MAXIMUM_EXTENT = 1 << 20 }; /* of samples, channels, groups and their products, which loops walk */

/* A value and how far from it one may be. */
struct inexact {
    real value, error;
};

struct view {
    unsigned char *first; /* NULL: absent */
    normfuse_type type;
    ptrdiff_t batch, channel, position; /* in elements */
    int64_t positions;                  /* a row is one of so many of a sample */
};

struct work {
    const struct call *call;
    uint32_t present;
    int64_t n, c, s, groups, channels; /* of a group */
    int64_t positions;                 /* channel norm: n are the positions of all samples, so many of each; else 1 */
    bool batch, none, evaluates, backward;
    bool rounds, squares, clamps; /* channel norm: u is a tensor; NORMFUSE_MEAN_SQUARE; NORMFUSE_EPS_OF_NORM */
    real unit, tiny; /* of the arithmetic */
    struct view in[SLOTS], out[SLOTS];
    real *u, *size; /* [n, c, s]; size: of what u is made of */
    struct inexact *z, *dz;
    struct inexact *mean, *rstd, *sum, *product; /* [n, c]; sum of dz, of dz * (u - mean); rstd's error is relative */
    struct difference *difference;
    int64_t *compared;
    bool agrees;
};

static struct view view_of(const normfuse_tensor *tensor, int slot, int64_t c)
{
    struct view view = {(unsigned char *)tensor->data + tensor->byte_offset, type_of(tensor), 0, 0, 0, 1};
    const int64_t *const strides = tensor->strides;
    if (is_big(slot)) {
        view.batch = strides[0];
        view.channel = strides[1];
        view.position = tensor->ndim > 2 ? strides[tensor->ndim - 1] : 0;
    } else if (tensor->ndim == 1) {
        view.channel = tensor->shape[0] == 1 && c != 1 ? 0 : strides[0]; /* one slope for all channels */
    } else {
        view.batch = strides[0];
        view.channel = strides[1];
        view.position = tensor->ndim > 2 ? strides[2] : 0;
    }
    for (int a = 0; a < tensor->ndim; a++)
        if (tensor->shape[a] == 0)
            view.first = NULL; /* it has no element to read */
    return view;
}

static unsigned char *element(const struct view *view, int64_t n, int64_t c, int64_t s)
{
    const int64_t sample = n / view->positions, position = n % view->positions + s;
    return view->first + (sample * view->batch + c * view->channel + position * view->position) *
                             (ptrdiff_t)reference_type_bytes(view->type);
}

static real load(const struct view *view, int64_t n, int64_t c, int64_t s, real absent)
{
    return view->first == NULL ? absent : (real)reference_load(element(view, n, c, s), view->type);
}

static int64_t at(const struct work *w, int64_t n, int64_t c, int64_t s)
{
    return (n * w->c + c) * w->s + s;
}

static bool is_given(const struct work *w, int slot)
{
    return w->present >> slot & 1;
}

/* One result beside what it should be, stored in its type. */
static void check(struct work *w, int slot, int64_t n, int64_t c, int64_t s, struct inexact want)
{
    const struct view *const view = &w->out[slot];
    const real unit = (real)tolerance_unit(view->type);
    const real stored = (real)tolerance_stored(view->type, 0, 0);
    const real bound = want.error * 1.01L + 2 * unit * fabsl(want.value) + stored + w->tiny;
    if (view->first == NULL || !isfinite(want.value) || !(bound < LARGE) ||
        fabsl(want.value) + bound > fminl(LARGE, 0.5L * (real)tolerance_largest(view->type)))
        return;
    const double got = reference_load(element(view, n, c, s), view->type);
    ++*w->compared;
    if (!(fabsl((real)got - want.value) <= bound) && w->agrees) {
        w->agrees = false;
        *w->difference = (struct difference){slot, n, c, s, got, (double)want.value, (double)bound};
    }
}

/* ---- what is normalized --------------------------------------------------------------------------------------- */

static real in_arithmetic(const struct work *w, real value)
{
    return w->in[X].type == NORMFUSE_F64 ? (real)(double)value : (real)(float)value;
}

/* A u that is a tensor has been rounded, and the call goes on with what it wrote. */
static void find_u(struct work *w)
{
    const bool adds = is_given(w, PRE_ADD) || is_given(w, PRE_BIAS);
    const bool of_samples = is_given(w, PRE_BIAS) && w->in[PRE_BIAS].batch != 0;
    const bool rounds = is_given(w, PRE_ADD) || (adds && (is_given(w, U) || w->rounds)) || (w->batch && of_samples);
    const normfuse_type type = w->in[X].type;
    for (int64_t n = 0; n < w->n; n++)
        for (int64_t c = 0; c < w->c; c++)
            for (int64_t s = 0; s < w->s; s++) {
                const real x = load(&w->in[X], n, c, s, 0), bias = in_arithmetic(w, load(&w->in[PRE_BIAS], n, c, 0, 0));
                const int64_t i = at(w, n, c, s);
                w->u[i] = x + bias;
                w->size[i] = fabsl(x) + fabsl(bias);
                if (!rounds)
                    continue;
                const real sum = in_arithmetic(w, in_arithmetic(w, x + bias) + load(&w->in[PRE_ADD], n, c, s, 0));
                unsigned char rounded[8];
                reference_store(rounded, type, (double)sum);
                w->u[i] = (real)reference_load(rounded, type);
                check(w, U, n, c, s, (struct inexact){w->u[i], 0});
                if (w->out[U].first != NULL)
                    w->u[i] = load(&w->out[U], n, c, s, 0);
                w->size[i] = fabsl(w->u[i]);
            }
}

/* ---- statistics ----------------------------------------------------------------------------------------------- */

struct moments {
    real count;
    struct inexact mean, m2;
};

/* The sums of the values of sample n (all, of a batch) in `channels` channels from `first` on. */
static struct moments moments_of(const struct work *w, int64_t n, int64_t first, int64_t channels)
{
    const int64_t begin = w->batch ? 0 : n, end = w->batch ? w->n : n + 1;
    struct moments m = {.count = (real)((end - begin) * channels * w->s)};
    if (m.count == 0)
        return m;
    real sum = 0, largest = 0, deviation = 0;
#define EACH                                                                                                           \
    for (int64_t k = begin; k < end; k++)                                                                              \
        for (int64_t c = first; c < first + channels; c++)                                                             \
            for (int64_t s = 0; s < w->s; s++)
    EACH
    {
        sum += w->u[at(w, k, c, s)];
        largest = fmaxl(largest, w->size[at(w, k, c, s)]);
    }
    m.mean.value = w->squares ? 0 : sum / m.count;
    EACH
    {
        const real off = w->u[at(w, k, c, s)] - m.mean.value;
        m.m2.value += off * off;
        deviation = fmaxl(deviation, fabsl(off));
    }
#undef EACH
    m.mean.error = w->squares ? 0 : w->unit * (SUM_ROUNDINGS * deviation + 8 * largest);
    m.m2.error = m.count * (w->unit * SUM_ROUNDINGS * deviation * deviation + m.mean.error * m.mean.error);
    return m;
}

/* Chan, Golub and LeVeque 1979. */
static struct moments joined(struct moments a, struct moments b)
{
    if (a.count == 0 || b.count == 0)
        return a.count == 0 ? b : a;
    const real all = a.count + b.count, apart = b.mean.value - a.mean.value;
    const real error = a.mean.error + b.mean.error + 0x1p-50L * (fabsl(a.mean.value) + fabsl(b.mean.value));
    return (struct moments){all,
                            {a.mean.value + apart * b.count / all, error},
                            {a.m2.value + b.m2.value + apart * apart * a.count * b.count / all,
                             a.m2.error + b.m2.error + 0x1p-50L * (a.m2.value + b.m2.value) +
                                 (2 * fabsl(apart) + error) * error * fminl(a.count, b.count)}};
}

/* True if no intermediate result overflows or loses digits: tensors that share memory may hold anything. */
static bool is_ordinary(const struct work *w)
{
    for (int slot = 0; slot < SLOTS; slot++) {
        const struct view *const view = &w->in[slot];
        const bool pairs = slot == MEAN || slot == RSTD || slot == STATS || slot == SUMS;
        const int64_t n = view->batch == 0 ? 1 : w->batch && pairs ? 1 : w->n;
        const int64_t c = view->channel == 0 ? 1 : pairs && slot != SUMS && !w->batch ? w->groups : w->c;
        const int64_t s = is_big(slot) ? w->s : slot == STATS ? 3 : slot == SUMS ? 2 : 1;
        for (int64_t i = 0; view->first != NULL && i < n * c * s; i++) {
            const real size = fabsl(load(view, i / s / c, i / s % c, i % s, 0));
            if (size != 0 && !(size >= 1e-12L && size <= 1e9L))
                return false;
        }
    }
    return true;
}

/* A count that is none, of tensors that share memory, is a NaN, with which nothing is compared. */
static struct moments load_moments(const struct view *view, int64_t row, int64_t group)
{
    const real count = load(view, row, group, 0, 0);
    return (struct moments){count == 0 || count >= 1 ? count : (real)NAN,
                            {load(view, row, group, 1, 0), 0},
                            {load(view, row, group, 2, 0), 0}};
}

static struct inexact rstd_of(const struct work *w, struct moments m)
{
    if (w->clamps) {
        const real eps = (real)w->call->eps, relative = m.m2.error / fmaxl(m.m2.value, eps * eps);
        return (struct inexact){sqrtl(m.count) / fmaxl(sqrtl(m.m2.value), eps),
                                m.count != 0 && relative < 0.25L ? relative + 8 * w->unit : (real)INFINITY};
    }
    const real var = m.count != 0 ? m.m2.value / m.count : 0, error = m.count != 0 ? m.m2.error / m.count : 0;
    const real under_root = var + (real)w->call->eps, relative = error / under_root;
    return (struct inexact){1 / sqrtl(under_root),
                            relative < 0.25L ? relative + 8 * w->unit : (real)INFINITY}; /* relative */
}

static void check_running(struct work *w, int64_t c, struct inexact mean, struct inexact var)
{
    const struct call *const call = w->call;
    const real momentum =
        (call->flags & NORMFUSE_CUMULATIVE) != 0 ? 1 / ((real)call->batches_seen + 1) : (real)call->momentum;
    const struct inexact new[] = {mean, var};
    for (int i = 0; i < 2; i++) {
        const int slot = i == 0 ? RUNNING_MEAN : RUNNING_VAR;
        const real old = load(&w->in[slot], 0, c, 0, 0), now = new[i].value;
        check(w, slot, 0, c, 0,
              (struct inexact){(1 - momentum) * old + momentum * now,
                               fabsl(momentum) * new[i].error +
                                   ROUNDINGS * w->unit * ((1 + fabsl(momentum)) * fabsl(old) + fabsl(momentum * now))});
    }
}

/* mean and rstd of every sample and channel; and what a forward writes of them. */
static void find_statistics(struct work *w)
{
    const unsigned call = w->call->call;
    const bool makes = call == FORWARD || call == STATS_OF || call == APPLY;
    const int64_t rows = w->batch ? 1 : w->n, groups = w->batch ? w->c : w->groups;
    const int64_t channels = w->batch ? 1 : w->channels;
    if (w->none) {
        for (int64_t n = 0; n < w->n; n++)
            for (int64_t c = 0; c < w->c; c++) {
                const real var = load(&w->in[RUNNING_VAR], 0, c, 0, 1);
                w->mean[n * w->c + c].value = w->evaluates ? load(&w->in[RUNNING_MEAN], 0, c, 0, 0) : 0;
                w->rstd[n * w->c + c].value = w->evaluates ? 1 / sqrtl(var + (real)w->call->eps) : 1;
            }
        return;
    }
    struct inexact *const new_mean = calloc((size_t)w->c + 1, sizeof *new_mean),
                         *const new_var = calloc((size_t)w->c + 1, sizeof *new_var);
    for (int64_t row = 0; row < rows; row++)
        for (int64_t g = 0; g < groups; g++) {
            struct inexact mean = {load(&w->in[MEAN], row, g, 0, 0), 0}, rstd = {load(&w->in[RSTD], row, g, 0, 0), 0};
            if (makes) {
                struct moments m = call == APPLY ? load_moments(&w->in[STATS], row, g)
                                                 : moments_of(w, row, g * channels, channels);
                if (call == STATS_OF) {
                    if ((w->call->flags & NORMFUSE_ACCUMULATE) != 0)
                        m = joined(load_moments(&w->in[STATS], row, g), m);
                    check(w, STATS, row, g, 0, (struct inexact){m.count, 0});
                    check(w, STATS, row, g, 1, m.mean);
                    check(w, STATS, row, g, 2, m.m2);
                    continue;
                }
                mean = m.count != 0 ? m.mean : (struct inexact){0, 0};
                if (isnan(m.count))
                    mean.value = m.count;
                rstd = rstd_of(w, m);
                check(w, MEAN, row, g, 0, mean);
                check(w, RSTD, row, g, 0, (struct inexact){rstd.value, rstd.error * fabsl(rstd.value)});
                const real samples = (real)rows;
                if (g < w->c && is_given(w, RUNNING_MEAN)) { /* a group is a channel */
                    new_mean[g].value += mean.value / samples;
                    new_mean[g].error += mean.error / samples;
                    new_var[g].value += m.m2.value / (m.count - 1) / samples;
                    new_var[g].error += m.m2.error / (m.count - 1) / samples;
                }
            }
            for (int64_t n = w->batch ? 0 : row; n < (w->batch ? w->n : row + 1); n++)
                for (int64_t c = g * channels; c < (g + 1) * channels; c++) {
                    w->mean[n * w->c + c] = mean;
                    w->rstd[n * w->c + c] = rstd;
                }
        }
    const bool updates = is_given(w, RUNNING_MEAN) && (call == FORWARD || call == APPLY) && rows > 0 &&
                         (call == APPLY || w->n * w->s > 0);
    for (int64_t c = 0; updates && c < w->c; c++)
        check_running(w, c, new_mean[c], new_var[c]);
    free(new_mean);
    free(new_var);
}

/* ---- z, y, dz ------------------------------------------------------------------------------------------------- */

static double parameter_of(const struct work *w, int64_t c)
{
    if (w->call->activation == NORMFUSE_PRELU)
        return (double)load(&w->in[SLOPE], 0, c, 0, 0);
    return (w->call->flags & NORMFUSE_HAS_ACT_PARAM) != 0 ? w->call->act_param
                                                           : reference_default_parameter(w->call->activation);
}

static void find_z(struct work *w)
{
    for (int64_t n = 0; n < w->n; n++)
        for (int64_t c = 0; c < w->c; c++) {
            const struct inexact mean = w->mean[n * w->c + c], rstd = w->rstd[n * w->c + c];
            const real gain = 1 + load(&w->in[SCALE], n, c, 0, 0), weight = load(&w->in[WEIGHT], n, c, 0, 1) * gain;
            const real bias = load(&w->in[BIAS], n, c, 0, 0) * gain, shift = load(&w->in[SHIFT], n, c, 0, 0);
            const real slope = fabsl(rstd.value * weight);
            for (int64_t s = 0; s < w->s; s++) {
                const int64_t i = at(w, n, c, s);
                const real post = load(&w->in[POST_ADD], n, c, s, 0), off = w->u[i] - mean.value;
                w->z[i].value = off * rstd.value * weight + bias + shift + post;
                w->z[i].error = ROUNDINGS * w->unit * (slope * (w->size[i] + fabsl(mean.value)) + fabsl(bias) +
                                                       fabsl(shift) + fabsl(post)) +
                                slope * mean.error + slope * fabsl(off) * rstd.error;
                if (w->backward && is_given(w, Y))
                    w->z[i] = (struct inexact){load(&w->in[Y], n, c, s, 0), 0};
            }
        }
}

/* The most that the activation grows, and its derivative, per unit of z. */
static real steepest(double parameter)
{
    return fmaxl(1.5L, fabsl((real)parameter));
}

static struct inexact y_of(const struct work *w, struct inexact z, double parameter)
{
    const real y = (real)reference_activation(w->call->activation, parameter, (double)z.value);
    return (struct inexact){y, steepest(parameter) * z.error + ROUNDINGS * w->unit * fabsl(y) * (1 + fabsl(z.value))};
}

/* Near a kink either side's derivative may be taken. */
static struct inexact dz_of(const struct work *w, struct inexact z, double parameter, real dy)
{
    const int activation = w->call->activation;
    const real slope = (real)reference_slope(activation, parameter, (double)z.value);
    const bool zero = activation == NORMFUSE_RELU || activation == NORMFUSE_LEAKY_RELU ||
                      activation == NORMFUSE_RELU6 || activation == NORMFUSE_ELU || activation == NORMFUSE_PRELU;
    const bool other = activation == NORMFUSE_RELU6 || activation == NORMFUSE_HARDSWISH;
    const real kink = activation == NORMFUSE_RELU6 ? 6 : 3;
    real error = 2 * steepest(parameter) * z.error + ROUNDINGS * w->unit * (fabsl(slope) + 1);
    if (activation == NORMFUSE_IDENTITY)
        error = 0;
    else if ((zero && fabsl(z.value) <= z.error) || (other && fabsl(fabsl(z.value) - kink) <= z.error))
        error += 1 + fabsl((real)parameter);
    return (struct inexact){dy * slope, fabsl(dy) * error + ROUNDINGS * w->unit * fabsl(dy * slope)};
}

/* ---- backward ------------------------------------------------------------------------------------------------- */

static void add(struct inexact *to, struct inexact value, real roundings)
{
    to->value += value.value;
    to->error += value.error + roundings * fabsl(value.value);
}

static struct inexact times(struct inexact value, real factor)
{
    return (struct inexact){value.value * factor, value.error * fabsl(factor)};
}

/* dz, and its sums over the positions of each sample and channel. */
static void find_sums(struct work *w)
{
    const real roundings = SUM_ROUNDINGS * w->unit;
    for (int64_t n = 0; n < w->n; n++)
        for (int64_t c = 0; c < w->c; c++) {
            const int64_t pair = n * w->c + c;
            const real mean = w->mean[pair].value;
            for (int64_t s = 0; s < w->s; s++) {
                const int64_t i = at(w, n, c, s);
                w->dz[i] = dz_of(w, w->z[i], parameter_of(w, c), load(&w->in[DY], n, c, s, 0));
                add(&w->sum[pair], w->dz[i], roundings);
                struct inexact product = times(w->dz[i], w->u[i] - mean);
                product.error += roundings * fabsl(w->dz[i].value) * (w->size[i] + fabsl(mean));
                add(&w->product[pair], product, roundings);
                check(w, DPOST_ADD, n, c, s, w->dz[i]);
            }
        }
    if (w->call->call != BACKWARD_APPLY)
        return;
    for (int64_t n = 0; n < w->n; n++) /* those of all shards */
        for (int64_t c = 0; c < w->c; c++) {
            const int64_t row = w->batch ? 0 : n;
            w->sum[n * w->c + c] = (struct inexact){load(&w->in[SUMS], row, c, 0, 0), 0};
            w->product[n * w->c + c] = (struct inexact){load(&w->in[SUMS], row, c, 1, 0), 0};
        }
}

/* The addend of a tensor that is [C], to what it holds. */
static void check_gradient(struct work *w, int slot, int64_t n, int64_t c, struct inexact gradient)
{
    if ((w->call->flags & NORMFUSE_ACCUMULATE) != 0 && w->in[slot].batch == 0 && slot != DSCALE && slot != DSHIFT)
        add(&gradient, (struct inexact){load(&w->in[slot], n, c, 0, 0), 0}, ROUNDINGS * w->unit);
    check(w, slot, n, c, 0, gradient);
}

static void check_parameters(struct work *w)
{
    const bool sums_of_all = w->batch && w->call->call == BACKWARD_APPLY;
    const real roundings = ROUNDINGS * w->unit;
    for (int64_t c = 0; c < w->c; c++) {
        struct inexact dweight = {0, 0}, dbias = {0, 0}, dscale = {0, 0}, dshift = {0, 0};
        if (sums_of_all) { /* with or without samples here */
            dweight = times((struct inexact){load(&w->in[SUMS], 0, c, 1, 0), 0}, load(&w->in[RSTD], 0, c, 0, 0));
            dbias.value = load(&w->in[SUMS], 0, c, 0, 0);
        }
        for (int64_t n = 0; n < w->n && !sums_of_all; n++) {
            const int64_t pair = n * w->c + c;
            const real gain = 1 + load(&w->in[SCALE], n, c, 0, 0), rstd = w->rstd[pair].value;
            const struct inexact sum = w->sum[pair], product = times(w->product[pair], rstd);
            if (n % w->positions == 0)
                dscale = dshift = (struct inexact){0, 0};
            add(&dscale, times(product, load(&w->in[WEIGHT], n, c, 0, 1)), roundings);
            add(&dscale, times(sum, load(&w->in[BIAS], n, c, 0, 0)), roundings);
            add(&dshift, sum, 0);
            if ((n + 1) % w->positions == 0) {
                check_gradient(w, DSCALE, n, c, dscale);
                check_gradient(w, DSHIFT, n, c, dshift);
            }
            if (w->out[DWEIGHT].batch != 0 || w->out[DBIAS].batch != 0) {
                check_gradient(w, DWEIGHT, n, c, product);
                check_gradient(w, DBIAS, n, c, sum);
            } else {
                add(&dweight, times(product, gain), roundings);
                add(&dbias, times(sum, gain), roundings);
            }
        }
        if (w->out[DWEIGHT].batch == 0 && w->out[DBIAS].batch == 0) {
            check_gradient(w, DWEIGHT, 0, c, dweight);
            check_gradient(w, DBIAS, 0, c, dbias);
        }
    }
}

static void check_sums(struct work *w)
{
    const int64_t rows = w->batch ? 1 : w->n;
    const bool continues = (w->call->flags & NORMFUSE_ACCUMULATE) != 0;
    for (int64_t row = 0; row < rows; row++)
        for (int64_t c = 0; c < w->c; c++) {
            struct inexact sum = {0, 0}, product = {0, 0};
            if (continues) {
                sum.value = load(&w->in[SUMS], row, c, 0, 0);
                product.value = load(&w->in[SUMS], row, c, 1, 0);
            }
            for (int64_t n = w->batch ? 0 : row; n < (w->batch ? w->n : row + 1); n++) {
                add(&sum, w->sum[n * w->c + c], 0);
                add(&product, w->product[n * w->c + c], 0);
            }
            check(w, SUMS, row, c, 0, sum);
            check(w, SUMS, row, c, 1, product);
        }
}

static void check_slopes(struct work *w)
{
    const bool is_one = w->out[DSLOPE].channel == 0 && w->c != 1;
    struct inexact all = {0, 0};
    for (int64_t c = 0; c < w->c; c++) {
        struct inexact sum = {0, 0};
        for (int64_t n = 0; n < w->n; n++)
            for (int64_t s = 0; s < w->s; s++) {
                const struct inexact z = w->z[at(w, n, c, s)];
                const real dy = load(&w->in[DY], n, c, s, 0);
                add(&sum, (struct inexact){z.value > 0 ? 0 : dy * z.value, fabsl(dy) * z.error},
                    SUM_ROUNDINGS * w->unit);
            }
        if (is_one)
            add(&all, sum, 0);
        else
            check_gradient(w, DSLOPE, 0, c, sum);
    }
    if (is_one)
        check_gradient(w, DSLOPE, 0, 0, all);
}

/* True if the norm that a given rstd is of was clamped, so that rstd is a constant. */
static bool is_clamped(const struct work *w, real rstd)
{
    const double eps = w->call->eps, bound = sqrt((double)w->channels) / eps;
    return w->clamps && eps > 0 && rstd >= (real)(w->in[RSTD].type == NORMFUSE_F64 ? bound : (double)(float)bound);
}

static void check_dx(struct work *w)
{
    const real roundings = ROUNDINGS * w->unit;
    const int64_t channels = w->none || w->batch ? 1 : w->channels;
    const real own = (real)(w->batch ? w->n * w->s : channels * w->s);
    const real values = w->call->call == BACKWARD_APPLY && w->call->set_values != 0 ? (real)w->call->set_values : own;
    for (int64_t n = 0; n < w->n; n++)
        for (int64_t c = 0; c < w->c; c++) {
            const int64_t pair = n * w->c + c, first = c / channels * channels;
            const real mean = w->mean[pair].value, rstd = w->rstd[pair].value;
            struct inexact level = {0, 0}, tilt = {0, 0}; /* means of g and of g * normalized, g = dz * weight */
            for (int64_t k = first; !w->none && k < first + channels; k++) {
                const bool all = w->batch && w->call->call != BACKWARD_APPLY;
                for (int64_t row = all ? 0 : n; row < (all ? w->n : n + 1); row++) {
                    const real of = load(&w->in[WEIGHT], row, k, 0,
                                         1) * (1 + load(&w->in[SCALE], row, k, 0, 0)) / values;
                    if (!w->squares)
                        add(&level, times(w->sum[row * w->c + k], of), roundings);
                    if (!is_clamped(w, rstd))
                        add(&tilt, times(w->product[row * w->c + k], of * rstd), roundings);
                }
            }
            const real weight = load(&w->in[WEIGHT], n, c, 0, 1) * (1 + load(&w->in[SCALE], n, c, 0, 0));
            for (int64_t s = 0; s < w->s; s++) {
                const int64_t i = at(w, n, c, s);
                const real normalized = (w->u[i] - mean) * rstd, du = load(&w->in[DU], n, c, s, 0);
                struct inexact dx = {0, 0};
                add(&dx, times(w->dz[i], weight * rstd), roundings);
                add(&dx, times(level, -rstd), roundings);
                add(&dx, times(tilt, -rstd * normalized), roundings);
                add(&dx, (struct inexact){du, 0}, roundings);
                dx.error += fabsl(tilt.value * rstd * rstd) * roundings * (w->size[i] + fabsl(mean));
                check(w, DX, n, c, s, dx);
            }
        }
}

/* The sum of dx as it was written. */
static void check_pre_bias(struct work *w)
{
    const bool of_samples = w->out[DPRE_BIAS].batch != 0;
    for (int64_t c = 0; c < w->c; c++) {
        struct inexact all = {0, 0}, sum = {0, 0};
        for (int64_t n = 0; n < w->n; n++) {
            if (n % w->positions == 0)
                sum = (struct inexact){0, 0};
            for (int64_t s = 0; s < w->s; s++)
                add(&sum, (struct inexact){load(&w->out[DX], n, c, s, 0), 0}, SUM_ROUNDINGS * w->unit);
            if ((n + 1) % w->positions != 0)
                continue;
            if (of_samples)
                check_gradient(w, DPRE_BIAS, n, c, sum);
            add(&all, sum, 0);
        }
        if (!of_samples)
            check_gradient(w, DPRE_BIAS, 0, c, all);
    }
}

/* ---- a call ---------------------------------------------------------------------------------------------------- */

static void check_call(struct work *w)
{
    const unsigned call = w->call->call;
    find_u(w);
    find_statistics(w);
    if (call == STATS_OF)
        return;
    find_z(w);
    if (!w->backward) {
        for (int64_t n = 0; n < w->n; n++)
            for (int64_t c = 0; c < w->c; c++)
                for (int64_t s = 0; s < w->s; s++)
                    check(w, Y, n, c, s, y_of(w, w->z[at(w, n, c, s)], parameter_of(w, c)));
        return;
    }
    find_sums(w);
    if (is_given(w, DSLOPE) && call != BACKWARD_APPLY)
        check_slopes(w);
    if (call == BACKWARD_SUMS) {
        check_sums(w);
        return;
    }
    check_parameters(w);
    check_dx(w);
    if (is_given(w, DPRE_BIAS))
        check_pre_bias(w);
}

bool call_reference_agrees(const struct call *call, uint32_t present, const normfuse_tensor *before,
                           const normfuse_tensor *after, struct difference *difference, int64_t *compared)
{
    struct work w = {.call = call, .present = present, .difference = difference, .compared = compared, .agrees = true};
    const normfuse_tensor *const x = &before[X];
    w.n = x->shape[0];
    w.c = x->shape[1];
    w.s = 1;
    for (int32_t a = 2; a < x->ndim; a++)
        w.s *= x->shape[a];
    w.positions = 1;
    if (call->operator == CHANNEL) {
        w.positions = w.s > 0 ? w.s : 1;
        w.n *= w.s;
        w.s = 1;
    }
    for (int slot = 0; slot < SLOTS; slot++)
        if (present >> slot & 1) {
            w.in[slot] = view_of(&before[slot], slot, w.c);
            w.out[slot] = view_of(&after[slot], slot, w.c);
            w.in[slot].positions = w.out[slot].positions = w.positions;
        }
    w.rounds = call->operator == CHANNEL;
    w.squares = w.rounds && call->statistics == NORMFUSE_MEAN_SQUARE;
    w.clamps = w.rounds && call->eps_kind == NORMFUSE_EPS_OF_NORM;
    w.evaluates = (call->flags & NORMFUSE_EVALUATE) != 0;
    w.none = call->operator == AFFINE || w.evaluates;
    w.batch = call->operator == BATCH && !w.none;
    w.backward = call->call == BACKWARD || call->call == BACKWARD_SUMS || call->call == BACKWARD_APPLY;
    w.groups = call->operator == GROUP || w.rounds ? call->groups : w.c;
    w.channels = w.groups > 0 ? w.c / w.groups : 0;
    /* A tensor without elements may have 2^40 samples or channels: nothing of it is stored, and loops would not end. */
    if (w.n > MAXIMUM_EXTENT || w.c > MAXIMUM_EXTENT || w.n * w.c > MAXIMUM_EXTENT || w.groups > MAXIMUM_EXTENT)
        return true;
    if (!is_ordinary(&w))
        return true;
    w.unit = w.in[X].type == NORMFUSE_F64 ? 0x1p-53L : 0x1p-24L;
    w.tiny = w.in[X].type == NORMFUSE_F64 ? 0x1p-1000L : 0x1p-120L;
    const size_t values = (size_t)(w.n * w.c * w.s) + 1, pairs = (size_t)(w.n * w.c) + 1;
    w.u = calloc(values, sizeof *w.u);
    w.size = calloc(values, sizeof *w.size);
    w.z = calloc(values, sizeof *w.z);
    w.dz = calloc(values, sizeof *w.dz);
    w.mean = calloc(pairs, sizeof *w.mean);
    w.rstd = calloc(pairs, sizeof *w.rstd);
    w.sum = calloc(pairs, sizeof *w.sum);
    w.product = calloc(pairs, sizeof *w.product);
    check_call(&w);
    free(w.u);
    free(w.size);
    free(w.z);
    free(w.dz);
    free(w.mean);
    free(w.rstd);
    free(w.sum);
    free(w.product);
    return w.agrees;
}
