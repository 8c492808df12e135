/* SPDX-License-Identifier: MIT
 *
 * verify_compare.c - the outputs beside the double reference, set by set (what shares statistics), and what belongs to
 * whole channels after that. Only one set at a time (one a thread) is held in double. */
#define _GNU_SOURCE
#include "verify_work.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const double double_unit = 0x1p-53;

/* ---- sets ----------------------------------------------------------------------------------------------------- */

/* The place of a set's values. */
struct extent {
    int64_t n, c, s, rows, channels, positions;
};

static struct extent extent_of(const struct work *work, int64_t set)
{
    const int64_t lot = set / work->group_sets;
    if (work->set_is_group)
        return (struct extent){lot / work->groups, lot % work->groups * work->group_channels, set % work->group_sets,
                               1, work->group_channels, work->set_is_position ? 1 : work->s};
    return (struct extent){ 0, set, 0, work->n, 1, work->s };
}

/* The place of a norm group's saved statistics: row and column. */
static int64_t statistic_column(const struct work *work, int64_t set)
{
    return work->set_is_group ? set % (work->groups * work->group_sets) : set;
}

/* Arithmetic of operators other than group norm. */
static struct tolerance_arithmetic arithmetic_of_channels(const struct work *work, const struct extent *extent)
{
    const bool ambiguous = work->c == 1 || work->s == 1;
    return tolerance_arithmetic(work->line->device, work->line->type, work->line->channels_last, ambiguous,
                                extent->rows, extent->channels, extent->positions);
}

static struct tolerance_arithmetic arithmetic_of(const struct work *work, const struct extent *extent)
{
    const bool ambiguous = work->c == 1 || work->s == 1;
    if (work->set_is_position && !work->on_device)
        return tolerance_channels(work->line->type, work->line->channels_last, ambiguous, extent->channels,
                                  work->n * work->s);
    /* CUDA takes positions as samples of one value a channel. */
    struct tolerance_arithmetic arithmetic =
        work->set_is_position
            ? tolerance_arithmetic(work->line->device, work->line->type, true, true, 1, extent->channels, 1)
            : arithmetic_of_channels(work, extent);
    arithmetic.parameter_additions = arithmetic.additions;
    arithmetic.parameter_joins = arithmetic.joins;
    if (work->set_is_group && !arithmetic.on_cuda)
        tolerance_small_sets(&arithmetic, work->line->channels_last && !ambiguous, extent->channels, extent->positions);
    arithmetic.parameter_additions = arithmetic.additions;
    return arithmetic;
}

/* The set's values of a big tensor, dense. */
static void load_set(const struct work *work, enum tensor_name name, const struct extent *extent, double *values)
{
    const struct buffer *buffer = &work->buffers[name];
    for (int64_t row = 0; row < extent->rows; row++)
        for (int64_t channel = 0; channel < extent->channels; channel++) {
            double *to = values + (row * extent->channels + channel) * extent->positions;
            int64_t n = extent->n + row, c = extent->c + channel;
            if (!buffer->overwritten) {
                reference_load_strided(to, verify_element(buffer, n, c, extent->s), buffer->type, extent->positions,
                                       buffer->position);
                continue;
            }
            const struct sample sample = verify_sample_of(work, name, n);
            for (int64_t s = 0; s < extent->positions; s++)
                to[s] = reference_round(verify_generated(work, &sample, c, extent->s + s), buffer->type);
        }
}

/* u; `more` is room for a tensor that is added. */
static void load_u(const struct work *work, const struct extent *extent, double *u, double *more)
{
    load_set(work, X, extent, u);
    bool adds = work->at[PRE_ADD] != NULL;
    bool rounds = adds || work->at[U] || work->set_is_position ||
                  (work->line->op == BATCH_NORM && work->line->sample_bias && !work->evaluates);
    if (!adds && !work->at[PRE_BIAS])
        return;
    if (adds)
        load_set(work, PRE_ADD, extent, more);
    for (int64_t pair = 0; pair < extent->rows * extent->channels; pair++) {
        int64_t n = extent->n + pair / extent->channels, c = extent->c + pair % extent->channels;
        double pre_bias = verify_parameter_value(work, PRE_BIAS, n, c, 0);
        for (int64_t i = pair * extent->positions; i < (pair + 1) * extent->positions; i++)
            u[i] = reference_add(u[i], pre_bias, adds ? more[i] : 0, rounds, work->line->type);
    }
}

/* A thread's share: every threads-th group of a sample, or set: gradients of a channel are one thread's. */
struct share {
    struct work *work;
    bool (*each)(struct share *share, int64_t set);
    int index, threads;
    double *room; /* ARRAYS arrays of the largest set, then PAIR_ARRAYS of its pairs */
    int64_t set_values, pairs;
    struct tally tally;
    pthread_t thread;
    bool started;
};

enum { ARRAYS_FORWARD = 2, ARRAYS_BACKWARD = 6, PAIR_INPUTS = 5, PAIR_ARRAYS = PAIR_INPUTS + 11 };

static double *array(const struct share *share, int index)
{
    return share->room + index * share->set_values;
}

static void *run_share(void *argument)
{
    struct share *share = argument;
    const int64_t each = share->work->group_sets;
    for (int64_t lot = share->index; each && lot < share->work->sets / each; lot += share->threads)
        for (int64_t set = lot * each; set < (lot + 1) * each; set++)
            share->each(share, set);
    return NULL;
}

static void join_tally(struct tally *total, const struct tally *part)
{
    if (part->budget_used > total->budget_used) {
        total->budget_used = part->budget_used;
        total->got = part->got;
        total->want = part->want;
        total->tensor = part->tensor;
        memcpy(total->index, part->index, sizeof total->index);
    }
    total->compared += part->compared;
    total->beyond += part->beyond;
    total->unbounded += part->unbounded;
    total->hash += part->hash;
}

static bool for_each_set(struct work *work, bool (*each)(struct share *, int64_t), struct tally *tally)
{
    struct share shares[MAX_REFERENCE_THREADS];
    int threads = verify_thread_count(work);
    if (threads > work->sets)
        threads = work->sets > 1 ? (int)work->sets : 1;
    int64_t set_values = verify_largest_set(work), pairs = work->set_is_group ? work->group_channels : work->n;
    if (set_values * work->sets < 4096)
        threads = 1;
    int arrays = work->line->backward ? ARRAYS_BACKWARD : ARRAYS_FORWARD;
    bool good = true;
    for (int i = 0; i < threads; i++) {
        shares[i] = (struct share){ .work = work, .each = each, .index = i, .threads = threads };
        shares[i].set_values = set_values;
        shares[i].pairs = pairs;
        shares[i].room = malloc((size_t)(arrays * set_values + PAIR_ARRAYS * pairs + 1) * sizeof(double));
        good = good && shares[i].room;
    }
    for (int i = 1; i < threads && good; i++)
        shares[i].started = pthread_create(&shares[i].thread, NULL, run_share, &shares[i]) == 0;
    for (int i = 0; i < threads && good; i++)
        if (!shares[i].started)
            run_share(&shares[i]);
    for (int i = 0; i < threads; i++) {
        if (shares[i].started)
            pthread_join(shares[i].thread, NULL);
        free(shares[i].room);
        if (tally)
            join_tally(tally, &shares[i].tally);
    }
    return good;
}

/* The statistics of x, and for a backward the saved ones that the library is given. */
static bool make_statistics(struct share *share, int64_t set)
{
    struct work *work = share->work;
    struct set_record *record = &work->records[set];
    struct extent extent = extent_of(work, set);
    int64_t count = extent.rows * extent.channels * extent.positions;
    double *u = array(share, 0);
    record->mean = 0;
    record->rstd = 1;
    if (work->evaluates) {
        record->mean = verify_parameter_value(work, RUNNING_MEAN, 0, extent.c, 0);
        record->rstd = reference_rstd(verify_parameter_value(work, RUNNING_VAR, 0, extent.c, 1), work->line->eps);
        record->tolerance.rstd = 4 * double_unit;
    }
    if (!work->has_statistics)
        return true;
    load_u(work, &extent, u, array(share, 1));
    const bool of_squares = work->line->statistics == NORMFUSE_MEAN_SQUARE;
    record->statistics =
        (of_squares ? reference_squares : reference_statistics)(u, extent.rows * extent.channels, extent.positions);
    record->mean = count ? record->statistics.mean : 0;
    double variance = count ? record->statistics.m2 / record->statistics.count : 0;
    record->rstd = reference_rstd(variance, work->line->eps);
    if (work->line->eps_kind == NORMFUSE_EPS_OF_NORM)
        record->rstd = reference_rstd_of_norm((double)count, count ? record->statistics.m2 : 0, work->line->eps);
    if (!work->line->backward) {
        bool columns = work->line->channels_last;
        struct tolerance_arithmetic arithmetic = arithmetic_of(work, &extent);
        enum verify_data data = work->options->data;
        /* an even number of positions: then every shift is 4; shards may have an odd one */
        arithmetic.exact_sums =
            data == VERIFY_CONSTANT ||
            (data == VERIFY_EXACT && work->s % 2 == 0 && !work->on_device && !work->options->sharded);
        /* on the CPU shards begin pieces where one call would not */
        if (count > 0 && (work->on_device || (!work->set_is_position && !work->options->sharded)))
            arithmetic.drift = tolerance_drift(&arithmetic, columns, u, extent.rows, extent.channels, extent.positions,
                                               record->mean);
        record->tolerance = work->set_is_position
                                ? tolerance_channel_statistics(&arithmetic, record->statistics.count, record->mean,
                                                               record->statistics.m2, work->line->eps,
                                                               work->line->statistics, work->line->eps_kind)
                                : tolerance_statistics(&arithmetic, record->statistics.count, record->mean,
                                                       record->statistics.m2, work->line->eps);
        return true;
    }
    int64_t row = work->set_is_group ? extent.n : 0, column = statistic_column(work, set);
    const struct buffer *mean = &work->buffers[MEAN], *rstd = &work->buffers[RSTD];
    if (work->at[MEAN]) {
        reference_store(verify_element(mean, row, column, 0), mean->type, record->mean);
        record->mean = reference_round(record->mean, mean->type);
    }
    reference_store(verify_element(rstd, row, column, 0), rstd->type, record->rstd);
    record->rstd = reference_round(record->rstd, rstd->type);
    record->is_clamped = work->line->eps_kind == NORMFUSE_EPS_OF_NORM && work->line->eps > 0 &&
                         record->rstd >= reference_round(sqrt((double)count) / work->line->eps, rstd->type);
    return true;
}

/* ---- comparing ------------------------------------------------------------------------------------------------ */

/* A value that would round past the largest one may be infinite. */
static bool may_overflow(normfuse_type type, double want, double budget)
{
    double largest = tolerance_largest(type);
    return fabs(want) + budget >= largest * (1 + tolerance_unit(type) / 2);
}

static void add_to_hash(struct share *share, int64_t set, int64_t row, enum tensor_name name, int64_t n, int64_t c,
                        int64_t s, double got)
{
    uint64_t bits = 0x7FF8000000000000u;
    if (!isnan(got))
        memcpy(&bits, &got, sizeof bits);
    uint64_t hash = verify_mix(verify_mix(bits + (uint64_t)name) ^ verify_mix(((uint64_t)row * 0x9E3779B97F4A7C15u) ^
                                                         ((uint64_t)c * 0xD1B54A32D192ED03u + (uint64_t)s)));
    share->tally.hash += verify_mix(hash + (uint64_t)n * 0x8CB92BA72F3D8DD7u);
    if (share->work->options->set_hashes && set >= 0)
        share->work->options->set_hashes[set] += hash;
}

/* position -1: the element's number is c; row and hash coordinates as given. */
static void compare(struct share *share, int64_t set, int64_t row, enum tensor_name name, int64_t n, int64_t c,
                    int64_t s, double want, double budget)
{
    struct work *work = share->work;
    struct tally *tally = &share->tally;
    const struct buffer *buffer = work->at[name];
    double got = reference_load(verify_element(buffer, n, c, s), buffer->type);
    if (work->options->hashes)
        add_to_hash(share, set, row, name, n, c, s, got);
    if (work->options->bits_only)
        return;
    tally->compared++;
    double used;
    if (isnan(want))
        used = isnan(got) ? 0 : (double)INFINITY;
    else if (!(budget < (double)INFINITY)) {
        tally->unbounded++;
        used = 0;
    } else if (got == want)
        used = 0;
    else if (isinf(got) && may_overflow(buffer->type, want, budget) && signbit(got) == signbit(want))
        used = 0;
    else if (isinf(want) && fabs(got) >= tolerance_largest(buffer->type) * (1 - tolerance_unit(buffer->type)) &&
             signbit(got) == signbit(want))
        used = 0;
    else
        used = isnan(got) || budget <= 0 ? (double)INFINITY : fabs(got - want) / budget;
    if (!(used <= 1))
        tally->beyond++;
    if (used > tally->budget_used || !tally->tensor) {
        tally->budget_used = used;
        tally->tensor = verify_tensor_names[name];
        tally->got = got;
        tally->want = want;
        if (buffer->is_big)
            snprintf(tally->index, sizeof tally->index, "%lld,%lld,%lld", (long long)n, (long long)c, (long long)s);
        else if (buffer->is_sample_wise)
            snprintf(tally->index, sizeof tally->index, "%lld,%lld", (long long)n, (long long)c);
        else
            snprintf(tally->index, sizeof tally->index, "%lld", (long long)c);
    }
}

/* The same of a value whose error before it is stored is `error`. */
static void compare_stored(struct share *share, int64_t set, int64_t row, enum tensor_name name, int64_t n, int64_t c,
                           int64_t s, double want, double error)
{
    normfuse_type type = share->work->at[name]->type;
    if (error == 0) /* then there is one right element */
        compare(share, set, row, name, n, c, s, reference_round(want, type), 0);
    else
        compare(share, set, row, name, n, c, s, want, tolerance_stored(type, want, error));
}

/* State that the loops over elements share. */
struct view {
    struct extent extent;
    struct reference_set set;
    struct tolerance_arithmetic arithmetic;
    struct tolerance_affine affine; /* of the current pair */
};

/* Loads parameters into the pairs' arrays and sets up the reference. */
static void open_set(struct share *share, int64_t set, struct view *view)
{
    struct work *work = share->work;
    const struct set_record *record = &work->records[set];
    view->extent = extent_of(work, set);
    const struct extent *extent = &view->extent;
    int arrays = work->line->backward ? ARRAYS_BACKWARD : ARRAYS_FORWARD;
    double *pairs = array(share, arrays);
    double *weight = pairs, *bias = pairs + share->pairs, *scale = pairs + 2 * share->pairs,
           *shift = pairs + 3 * share->pairs, *slope = pairs + 4 * share->pairs;
    for (int64_t row = 0; row < extent->rows; row++)
        for (int64_t channel = 0; channel < extent->channels; channel++) {
            int64_t pair = row * extent->channels + channel, n = extent->n + row, c = extent->c + channel;
            slope[pair] = verify_parameter_value(work, SLOPE, n, work->line->one_slope ? 0 : c, work->parameter);
            weight[pair] = verify_parameter_value(work, WEIGHT, n, c, 1);
            bias[pair] = verify_parameter_value(work, BIAS, n, c, 0);
            scale[pair] = verify_parameter_value(work, SCALE, n, c, 0);
            shift[pair] = verify_parameter_value(work, SHIFT, n, c, 0);
        }
    view->set = (struct reference_set){ .rows = extent->rows,
                                        .channels = extent->channels,
                                        .positions = extent->positions,
                                        .activation = work->line->activation,
                                        .parameter = work->parameter,
                                        .u = array(share, 0),
                                        .weight = weight,
                                        .bias = bias,
                                        .scale = scale,
                                        .shift = shift,
                                        .slope = slope,
                                        .mean = record->mean,
                                        .rstd = record->rstd,
                                        .has_statistics = work->has_statistics,
                                        .is_root_mean_square = work->line->statistics == NORMFUSE_MEAN_SQUARE,
                                        .is_clamped = record->is_clamped,
                                        .set_values = (double)(extent->rows * extent->channels * extent->positions) };
    view->arithmetic = arithmetic_of(work, extent);
    view->affine = (struct tolerance_affine){ .mean = record->mean,
                                              .mean_error = record->tolerance.mean,
                                              .gain_error = record->tolerance.rstd,
                                              .has_post_add = work->at[POST_ADD] != NULL };
}

static void open_pair(struct view *view, int64_t pair)
{
    const struct reference_set *set = &view->set;
    view->affine.gain = set->rstd * set->weight[pair] * (1 + set->scale[pair]);
    view->affine.offset = set->bias[pair] * (1 + set->scale[pair]) + set->shift[pair];
    view->affine.offset_parts = fabs(set->bias[pair] * (1 + set->scale[pair])) + fabs(set->shift[pair]);
}

static double z_error(const struct view *view, int64_t index, double z)
{
    if (view->set.y)
        return 0;
    double z0 = view->set.post_add ? z - view->set.post_add[index] : z;
    return tolerance_z(&view->arithmetic, &view->affine, view->set.u[index] - view->set.mean, z0, z);
}

static bool compare_forward(struct share *share, int64_t set)
{
    struct work *work = share->work;
    struct view view;
    open_set(share, set, &view);
    const struct extent *extent = &view.extent;
    double *u = array(share, 0), *post_add = array(share, 1);
    load_u(work, extent, u, post_add);
    if (work->at[U])
        for (int64_t row = 0; row < extent->rows; row++)
            for (int64_t channel = 0; channel < extent->channels; channel++)
                for (int64_t s = 0; s < extent->positions; s++)
                    compare(share, set, row, U, extent->n + row, extent->c + channel, extent->s + s,
                            u[(row * extent->channels + channel) * extent->positions + s], 0);
    const struct set_record *record = &work->records[set];
    int64_t count = extent->rows * extent->channels * extent->positions;
    if (work->at[RSTD] && count) {
        int64_t n = work->set_is_group ? extent->n : 0, column = statistic_column(work, set);
        if (work->at[MEAN])
            compare_stored(share, set, 0, MEAN, n, column, 0, record->mean, record->tolerance.mean);
        compare_stored(share, set, 0, RSTD, n, column, 0, record->rstd,
                       fabs(record->rstd) * record->tolerance.rstd);
    }
    if (!work->at[Y])
        return true;
    if (work->at[POST_ADD]) {
        load_set(work, POST_ADD, extent, post_add);
        view.set.post_add = post_add;
    }
    for (int64_t row = 0; row < extent->rows; row++)
        for (int64_t channel = 0; channel < extent->channels; channel++) {
            int64_t pair = row * extent->channels + channel;
            open_pair(&view, pair);
            for (int64_t s = 0; s < extent->positions; s++) {
                double want = 0, error = 0;
                if (!work->options->bits_only) {
                    double z = reference_z(&view.set, row, channel, s);
                    want = reference_activation(work->line->activation, view.set.slope[pair], z);
                    error = tolerance_activation(&view.arithmetic, work->line->activation, view.set.slope[pair], z,
                                                 want, z_error(&view, pair * extent->positions + s, z));
                }
                compare_stored(share, set, row, Y, extent->n + row, extent->c + channel, extent->s + s, want, error);
            }
        }
    return true;
}

static bool compare_backward(struct share *share, int64_t set)
{
    struct work *work = share->work;
    const int32_t activation = work->line->activation;
    struct view view;
    open_set(share, set, &view);
    const struct extent *extent = &view.extent;
    struct reference_set *reference = &view.set;
    double *u = array(share, 0), *dy = array(share, 1), *post_add = array(share, 2), *dz = array(share, 3);
    double *dz_error = array(share, 4), *dx = array(share, 5);
    double *pairs = array(share, ARRAYS_BACKWARD) + PAIR_INPUTS * share->pairs;
    double *dweight = pairs, *dbias = pairs + share->pairs, *dscale = pairs + 2 * share->pairs,
           *dshift = pairs + 3 * share->pairs, *sum_error = pairs + 4 * share->pairs,
           *centred_error = pairs + 5 * share->pairs, *sum_size = pairs + 6 * share->pairs,
           *centred_size = pairs + 7 * share->pairs, *dslope = pairs + 8 * share->pairs,
           *slope_size = pairs + 9 * share->pairs, *slope_sum_error = pairs + 10 * share->pairs;
    double unit = view.arithmetic.unit;
    load_u(work, extent, u, dy);
    load_set(work, DY, extent, dy);
    reference->dy = dy;
    if (work->at[POST_ADD]) {
        load_set(work, POST_ADD, extent, post_add);
        reference->post_add = post_add;
    } else if (work->at[Y]) {
        load_set(work, Y, extent, post_add);
        reference->y = post_add;
    }
    struct reference_gradients gradients = { dz, NULL, dweight, dbias, NULL, dshift, NULL };
    if (!work->options->bits_only) {
        gradients.dx = work->at[DX] ? dx : NULL;
        gradients.dscale = work->at[DSCALE] ? dscale : NULL;
        gradients.dslope = work->at[DSLOPE] ? dslope : NULL;
        reference_backward(reference, &gradients);
    }
    double gain_sum_error = 0, gain_centred_error = 0, mean_dz = 0, mean_dz_normalized = 0;
    /* a chunk's sums, the product of dy and the slope, and the centring of u */
    double growth = tolerance_growth(view.arithmetic.additions + 3 + view.arithmetic.gradient_roundings, unit) +
                    view.arithmetic.joins * double_unit;
    double parameter_growth =
        tolerance_growth(view.arithmetic.parameter_additions + 3 + view.arithmetic.gradient_roundings, unit) +
        view.arithmetic.parameter_joins * double_unit;
    double shift_error = view.arithmetic.shift_unit * fabs(reference->mean);
    const double coefficients = view.arithmetic.coefficient_roundings * unit;
    for (int64_t row = 0; row < extent->rows && !work->options->bits_only; row++)
        for (int64_t channel = 0; channel < extent->channels; channel++) {
            int64_t pair = row * extent->channels + channel;
            open_pair(&view, pair);
            double size = 0, size_centred = 0, error = 0, error_centred = 0, size_slope = 0, error_slope = 0;
            for (int64_t s = 0; s < extent->positions; s++) {
                int64_t index = pair * extent->positions + s;
                double slope_error = 0;
                if (activation != NORMFUSE_IDENTITY) {
                    double z = reference_z(reference, row, channel, s);
                    double of_z = z_error(&view, index, z);
                    slope_error =
                        tolerance_slope(&view.arithmetic, activation, reference->slope[pair], z, of_z) *
                            fabs(dy[index]) +
                        unit * fabs(dz[index]) + view.arithmetic.tiny;
                    size_slope += z > 0 ? 0 : fabs(dy[index] * z);
                    error_slope += (z > of_z ? 0 : of_z * fabs(dy[index])) + view.arithmetic.tiny;
                }
                dz_error[index] = slope_error;
                double shifted = tolerance_shifted(&view.arithmetic, &view.affine, u[index] - reference->mean);
                size += fabs(dz[index]);
                size_centred += fabs(dz[index]) * shifted;
                error += slope_error;
                error_centred += slope_error * shifted;
            }
            sum_size[pair] = size;
            centred_size[pair] = size_centred;
            sum_error[pair] = 1.01 * (parameter_growth * size + error);
            centred_error[pair] =
                1.01 * (parameter_growth * size_centred + error_centred) + shift_error * sum_error[pair];
            slope_size[pair] = size_slope;
            slope_sum_error[pair] = 1.01 * (parameter_growth * size_slope + error_slope);
            const double of_group = 1.01 * (growth * size + error);
            double factor = fabs(1 + reference->scale[pair]), weight = reference->weight[pair];
            gain_sum_error += factor * fabs(weight) * of_group;
            gain_centred_error += factor * fabs(weight) *
                                  (1.01 * (growth * size_centred + error_centred) + shift_error * of_group);
            mean_dz += dbias[pair] * weight;
            mean_dz_normalized += dweight[pair] * weight;
        }
    if (reference->is_clamped)
        mean_dz_normalized = gain_centred_error = 0;
    if (reference->is_root_mean_square)
        mean_dz = gain_sum_error = 0;
    /* dx = gain*dz + q*(u - k) + r */
    double rstd = reference->rstd, q = 0, r = 0, q_error = 0, r_error = 0;
    if (work->has_statistics) {
        double count = reference->set_values;
        double centred_mean_error = rstd * gain_centred_error / count;
        q = rstd * rstd * fabs(mean_dz_normalized) / count;
        q_error = rstd * rstd * centred_mean_error + coefficients * q;
        r = rstd * fabs(mean_dz) / count + shift_error * q;
        r_error = rstd * gain_sum_error / count + shift_error * rstd * rstd * centred_mean_error + coefficients * r;
    }
    double *du = post_add; /* done with */
    if (work->at[DPOST_ADD] || work->at[DX]) {
        if (work->at[DU])
            load_set(work, DU, extent, du);
        for (int64_t row = 0; row < extent->rows; row++)
            for (int64_t channel = 0; channel < extent->channels; channel++) {
                int64_t pair = row * extent->channels + channel, n = extent->n + row, c = extent->c + channel;
                open_pair(&view, pair);
                double gain = fabs(view.affine.gain);
                for (int64_t s = 0; s < extent->positions; s++) {
                    int64_t index = pair * extent->positions + s;
                    if (work->at[DPOST_ADD])
                        compare_stored(share, set, row, DPOST_ADD, n, c, extent->s + s, dz[index], dz_error[index]);
                    if (!work->at[DX])
                        continue;
                    double shifted = tolerance_shifted(&view.arithmetic, &view.affine, u[index] - reference->mean);
                    double parts = gain * fabs(dz[index]) + shifted * q + r;
                    double error = gain * (dz_error[index] + coefficients * fabs(dz[index])) +
                                   shifted * (q_error + 2 * unit * q) + r_error + unit * (shifted * q + r) +
                                   unit * fabs(dx[index]);
                    if (view.arithmetic.is_double)
                        error += 16 * unit * parts;
                    double want = dx[index];
                    if (work->at[DU]) {
                        want += du[index];
                        error += unit * fabs(want);
                    }
                    error = 1.01 * error + view.arithmetic.tiny * (4 + shifted + fabs(dz[index]));
                    compare_stored(share, set, row, DX, n, c, extent->s + s, want, error);
                }
            }
    }
    /* of sums over all samples: in double, and in a thread that goes on from one to the next */
    double samples = (double)(work->n * work->group_sets) * double_unit;
    if (work->set_is_group && (!work->set_is_position || work->on_device)) {
        const int64_t positions = work->set_is_position ? 1 : work->s, rows = work->n * work->group_sets;
        bool columns = work->line->channels_last || positions == 1;
        samples += tolerance_growth(tolerance_sample_additions(&view.arithmetic, columns, rows, positions), unit);
    }
    for (int64_t pair = 0; pair < extent->rows * extent->channels; pair++) {
        int64_t n = extent->n + pair / extent->channels, c = extent->c + pair % extent->channels;
        double factor = fabs(1 + reference->scale[pair]), weight = fabs(reference->weight[pair]);
        double bias = fabs(reference->bias[pair]);
        double noise = 16 * double_unit;
        double dweight_error = factor * rstd * (centred_error[pair] + noise * centred_size[pair]);
        double dbias_error = factor * (sum_error[pair] + noise * sum_size[pair]);
        const double dscale_error = weight * rstd * (centred_error[pair] + noise * centred_size[pair]) +
                                    bias * (sum_error[pair] + noise * sum_size[pair]);
        int64_t at = work->set_is_group ? n * work->c + c : c;
        if (work->set_is_position) { /* sums over positions: compare_sample_gradients */
            if (work->at[DSCALE])
                work->dscale[at] += dscale[pair], work->dscale_error[at] += dscale_error;
            work->dshift[at] += dshift[pair];
            work->dshift_error[at] += sum_error[pair];
        } else {
            if (work->at[DSCALE])
                compare_stored(share, set, 0, DSCALE, n, c, 0, dscale[pair], dscale_error);
            if (work->at[DSHIFT])
                compare_stored(share, set, 0, DSHIFT, n, c, 0, dshift[pair], sum_error[pair]);
        }
        if (work->at[DSLOPE])
            work->dslope[at] += dslope[pair];
        /* one slope has the sums of all channels, in double */
        work->dslope_error[at] +=
            slope_sum_error[pair] + (noise + samples + (double)work->c * double_unit) * slope_size[pair];
        if (work->line->op == AFFINE && work->line->per_sample) {
            if (work->at[DWEIGHT])
                compare_stored(share, set, 0, DWEIGHT, n, c, 0, dweight[pair], dweight_error);
            if (work->at[DBIAS])
                compare_stored(share, set, 0, DBIAS, n, c, 0, dbias[pair], dbias_error);
            continue;
        }
        work->dweight[at] += dweight[pair];
        work->dbias[at] += dbias[pair];
        work->dweight_error[at] += dweight_error + samples * factor * rstd * centred_size[pair];
        work->dbias_error[at] += dbias_error + samples * factor * sum_size[pair];
    }
    return true;
}

/* dscale and dshift where a sample's channel is of many sets. */
static void compare_sample_gradients(struct share *share)
{
    struct work *work = share->work;
    for (int64_t at = 0; at < work->n * work->c; at++) {
        if (work->at[DSCALE])
            compare_stored(share, -1, 0, DSCALE, at / work->c, at % work->c, 0, work->dscale[at],
                           work->dscale_error[at]);
        if (work->at[DSHIFT])
            compare_stored(share, -1, 0, DSHIFT, at / work->c, at % work->c, 0, work->dshift[at],
                           work->dshift_error[at]);
    }
}

/* dweight and dbias of whole channels. */
static void compare_channel_gradients(struct share *share)
{
    struct work *work = share->work;
    if (work->line->op == AFFINE && work->line->per_sample)
        return;
    for (int64_t c = 0; c < work->c; c++) {
        long double dweight = 0, dbias = 0;
        double dweight_error = 0, dbias_error = 0;
        for (int64_t n = 0; n < (work->set_is_group ? work->n : 1); n++) {
            dweight += work->dweight[n * work->c + c];
            dbias += work->dbias[n * work->c + c];
            dweight_error += work->dweight_error[n * work->c + c];
            dbias_error += work->dbias_error[n * work->c + c];
        }
        if (work->at[DWEIGHT])
            compare_stored(share, -1, 0, DWEIGHT, 0, c, 0, (double)dweight, dweight_error);
        if (work->at[DBIAS])
            compare_stored(share, -1, 0, DBIAS, 0, c, 0, (double)dbias, dbias_error);
    }
}

static void compare_slopes(struct share *share)
{
    struct work *work = share->work;
    int64_t rows = work->set_is_group ? work->n : 1, channels = work->line->one_slope ? work->c : 1;
    for (int64_t c = 0; c < (work->line->one_slope ? 1 : work->c); c++) {
        long double dslope = 0;
        double error = 0;
        for (int64_t n = 0; n < rows; n++)
            for (int64_t i = c; i < c + channels; i++) {
                dslope += work->dslope[n * work->c + i];
                error += work->dslope_error[n * work->c + i];
            }
        compare_stored(share, -1, 0, DSLOPE, 0, c, 0, (double)dslope, error);
    }
}

/* dpre_bias: the sum of dx as it was written. */
static void compare_sum_of_dx(struct share *share)
{
    struct work *work = share->work;
    const struct buffer *dx = work->at[DX];
    const bool by_sample = work->line->sample_bias;
    const struct extent extent = { 0, 0, 0, by_sample ? 1 : work->n, 1, work->s };
    const struct tolerance_arithmetic arithmetic = arithmetic_of_channels(work, &extent);
    const double growth = tolerance_growth(arithmetic.additions + arithmetic.gradient_roundings, arithmetic.unit) +
                          (arithmetic.joins + (double)work->n) * double_unit;
    for (int64_t pair = 0; pair < (by_sample ? work->n : 1) * work->c; pair++) {
        const int64_t c = pair % work->c;
        long double sum = 0;
        double size = 0;
        for (int64_t row = 0; row < extent.rows; row++)
            for (int64_t s = 0; s < work->s; s++) {
                const double value = reference_load(verify_element(dx, pair / work->c + row, c, s), dx->type);
                sum += value;
                size += fabs(value);
            }
        compare_stored(share, -1, 0, DPRE_BIAS, pair / work->c, c, 0, (double)sum, 1.01 * growth * size);
    }
}

/* Running statistics: batch norm's channel, or the mean over the samples of instance norm's. */
static void compare_running(struct share *share)
{
    struct work *work = share->work;
    double momentum = work->options->cumulative ? 1 / (double)(VERIFY_BATCHES_SEEN + 1) : VERIFY_RUNNING_MOMENTUM;
    int64_t samples = work->set_is_group ? work->n : 1;
    for (int64_t c = 0; c < work->c; c++) {
        long double mean = 0, variance = 0;
        double mean_error = 0, variance_error = 0, mean_size = 0;
        for (int64_t n = 0; n < samples; n++) {
            const struct set_record *record = &work->records[work->set_is_group ? n * work->groups + c : c];
            double divisor = record->statistics.count - 1;
            mean += record->statistics.mean;
            mean_size += fabs(record->statistics.mean);
            variance += record->statistics.m2 / divisor;
            mean_error += record->tolerance.mean;
            variance_error += record->tolerance.m2 / divisor;
        }
        double new_mean = (double)(mean / samples), new_variance = (double)(variance / samples);
        mean_error = (mean_error + (double)samples * double_unit * mean_size) / (double)samples;
        variance_error = variance_error / (double)samples + (double)samples * double_unit * new_variance;
        struct {
            enum tensor_name name;
            double value, error;
        } both[] = { { RUNNING_MEAN, new_mean, mean_error }, { RUNNING_VAR, new_variance, variance_error } };
        for (int i = 0; i < 2; i++) {
            const struct sample sample = verify_sample_of(work, both[i].name, 0);
            double old = reference_round(verify_generated(work, &sample, c, 0), work->at[both[i].name]->type);
            double want = reference_running(old, both[i].value, momentum);
            double unit = work->line->type == NORMFUSE_F64 ? double_unit : 0x1p-24;
            double steps = 4 * unit * ((1 - momentum) * fabs(old) + momentum * fabs(both[i].value));
            compare_stored(share, -1, 0, both[i].name, 0, c, 0, want, momentum * both[i].error + steps);
        }
    }
}

/* ---- all of it ------------------------------------------------------------------------------------------------ */

bool verify_make_statistics(struct work *work)
{
    return for_each_set(work, make_statistics, NULL);
}

bool verify_compare(struct work *work, struct tally *tally)
{
    const bool backward = work->line->backward;
    struct share last = { .work = work };
    if (!for_each_set(work, backward ? compare_backward : compare_forward, &last.tally))
        return false;
    if (backward)
        compare_channel_gradients(&last);
    if (backward && work->set_is_position)
        compare_sample_gradients(&last);
    if (work->at[DPRE_BIAS])
        compare_sum_of_dx(&last);
    if (work->at[DSLOPE])
        compare_slopes(&last);
    if (work->options->running && work->n * work->s > 0)
        compare_running(&last);
    *tally = last.tally;
    return true;
}
