/* SPDX-License-Identifier: MIT
 *
 * tolerance.c - see tolerance.h; every line is derived in docs/numerics.md. */
#include "tolerance.h"

#include <math.h>

#include "reference.h"

static const double second_order = 1.01;
static const double double_unit = 0x1p-53;

double tolerance_growth(double roundings, double unit)
{
    return roundings * unit / (1 - roundings * unit);
}

double tolerance_unit(normfuse_type type)
{
    switch (type) {
    case NORMFUSE_F64: return 0x1p-53;
    case NORMFUSE_F32: return 0x1p-24;
    case NORMFUSE_F16: return 0x1p-11;
    default: return 0x1p-8;
    }
}

double tolerance_largest(normfuse_type type)
{
    switch (type) {
    case NORMFUSE_F64: return 0x1.fffffffffffffp+1023;
    case NORMFUSE_F32: return 0x1.fffffep+127;
    case NORMFUSE_F16: return 65504;
    default: return 0x1.fep+127;
    }
}

static double smallest_step(normfuse_type type)
{
    switch (type) {
    case NORMFUSE_F64: return 0x1p-1074;
    case NORMFUSE_F32: return 0x1p-149;
    case NORMFUSE_F16: return 0x1p-24;
    default: return 0x1p-133;
    }
}

double tolerance_stored(normfuse_type type, double value, double error)
{
    return error + tolerance_unit(type) * (fabs(value) + error) + smallest_step(type) / 2;
}

/* ---- statistics ----------------------------------------------------------------------------------------------- */

/* numerics.md, "chunks". */
static struct tolerance_arithmetic arithmetic_of(normfuse_type type, bool columns, int64_t rows, int64_t channels,
                                                 int64_t positions)
{
    enum { CHUNK_VALUES = 4096, CHUNK_ROWS = 128, SHIFT_VALUES = 64, SHIFT_ROWS = 8, LANES = 32, TREE = 5,
           SPREAD = 16 };
    struct tolerance_arithmetic arithmetic = { .is_double = type == NORMFUSE_F64, .drift = (double)INFINITY };
    arithmetic.shift_values = columns ? SHIFT_ROWS : SHIFT_VALUES;
    arithmetic.unit = arithmetic.is_double ? 0x1p-53 : 0x1p-24;
    arithmetic.tiny = arithmetic.is_double ? 0x1p-1074 : 0x1p-149;
    double width = (double)positions;
    double per_channel = (double)rows * width, count = per_channel * (double)channels;
    if (columns) {
        arithmetic.additions = fmin(CHUNK_ROWS, per_channel);
        arithmetic.shift_additions = SHIFT_ROWS;
        arithmetic.shift_ratio =
            per_channel <= SHIFT_ROWS ? 1 : fmin(per_channel, CHUNK_ROWS) / SHIFT_ROWS;
        arithmetic.joins = 16 + per_channel / 16 + (double)channels;
    } else if (rows > 1 && channels == 1 && positions > 1 && positions <= SPREAD) {
        /* Each position of a channel is a column. */
        arithmetic.additions = fmin(CHUNK_ROWS, (double)rows);
        arithmetic.shift_additions = SHIFT_ROWS;
        arithmetic.shift_ratio = rows <= SHIFT_ROWS ? 1 : fmin((double)rows, CHUNK_ROWS) / SHIFT_ROWS;
        arithmetic.shift_values = 0;
        arithmetic.joins = 16 + (double)rows / 16 + width;
    } else {
        /* Rows shorter than the lanes fill only some of them. */
        double per_lane = width < LANES ? CHUNK_VALUES / fmax(width, 1) : CHUNK_VALUES / LANES + CHUNK_VALUES / width;
        arithmetic.additions = fmin(per_lane, count) + TREE;
        arithmetic.shift_additions = SHIFT_VALUES + TREE;
        arithmetic.shift_ratio = count <= SHIFT_VALUES ? 1 : fmin(count, CHUNK_VALUES) / SHIFT_VALUES;
        arithmetic.joins = 16 + count / 256;
    }
    arithmetic.shift_unit = arithmetic.is_double ? 0 : arithmetic.unit;
    arithmetic.coefficient_roundings = 1;
    return arithmetic;
}

/* numerics.md, "CUDA": the longest way of a value through the sums of a thread, its block and its set. */
static struct tolerance_arithmetic cuda_arithmetic_of(normfuse_type type, bool columns, int64_t rows, int64_t channels,
                                                      int64_t positions)
{
    enum {
        VECTOR_BYTES = 16,
        ROW_VECTORS = 48,          /* of a thread, where it has all of its values at once */
        PASS_JOINS = 15,         /* of a thread's tiles, one after the other */
        SMALL_SET = 1536,        /* values: one tile and one block */
        GRADIENT_VECTORS = 22,     /* ROW_VECTORS of the backward */
        ROW_THREADS = 512,       /* of a block */
        JOIN = 7,                /* a product, five levels of a tree, a quotient */
        APPEND = 4,              /* that one step of Chan's formula adds */
        COLUMN_ROWS = 128,       /* of a channel, one after the other in a thread */
        COLUMN_THREADS = 16,     /* of a channel, one after the other in a lane */
        COLUMN_CHANNELS = 16,    /* of a group, likewise; where it is wider than 512 more */
        MAX_MULTIPROCESSORS = 192    /* whose grid shares a set: two blocks each for rows, four for columns */
    };
    struct tolerance_arithmetic arithmetic = { .is_double = type == NORMFUSE_F64, .on_cuda = true,
                                               .drift = (double)INFINITY };
    double per_channel = (double)rows * (double)positions, count = per_channel * (double)channels;
    double pack = type == NORMFUSE_F64 ? 2 : type == NORMFUSE_F32 ? 4 : 8, thread, forward, backward;
    if (columns) {
        double lanes = fmax(1, fmin(32, (double)channels / (2 * pack)));
        thread = fmin(COLUMN_ROWS, per_channel);
        arithmetic.thread_additions = thread;
        arithmetic.joined = fmin(COLUMN_THREADS, per_channel) + 2 * JOIN + 4 +
                            fmin(fmax(COLUMN_CHANNELS, ceil((double)channels / 32)), (double)channels);
        arithmetic.joined_last = fmin(per_channel, 4 * MAX_MULTIPROCESSORS / lanes) + JOIN;
        backward = arithmetic.thread_additions + arithmetic.joined;
    } else {
        double lanes = 1;
        while (lanes < 32 && lanes * pack < (double)positions)
            lanes *= 2;
        double parts = fmin(2 * MAX_MULTIPROCESSORS, count);
        thread = fmin(ROW_VECTORS * pack, count);
        /* two sums in turn, then one */
        arithmetic.thread_additions = fmin(ROW_VECTORS * pack / 2, count) + 1;
        arithmetic.joined = 3 + 2 * JOIN;
        if (count > SMALL_SET)
            arithmetic.joined += fmax(APPEND * PASS_JOINS, JOIN + APPEND * ceil(parts / 32));
        backward = fmin(GRADIENT_VECTORS * pack + fmax(GRADIENT_VECTORS + 5, ROW_THREADS / lanes), count) + 10;
    }
    arithmetic.unit = arithmetic.is_double ? 0x1p-53 : 0x1p-24;
    arithmetic.tiny = arithmetic.is_double ? 0x1p-1074 : 0x1p-149;
    forward = arithmetic.thread_additions + arithmetic.joined + arithmetic.joined_last;
    arithmetic.additions = fmax(forward, backward);
    arithmetic.shift_additions = 0; /* the shift is a value */
    arithmetic.shift_ratio = fmax(thread, 1);
    arithmetic.shift_values = 1;
    arithmetic.joins = 16 + count / 256;
    /* columns keep it in the tensor's own type */
    arithmetic.shift_unit = arithmetic.is_double ? 0 : columns ? tolerance_unit(type) : 0x1p-24;
    arithmetic.coefficient_roundings = 8;
    arithmetic.is_stored_half = type == NORMFUSE_F16 || type == NORMFUSE_BF16;
    return arithmetic;
}

/* numerics.md, "small sets". */
void tolerance_small_sets(struct tolerance_arithmetic *arithmetic, bool columns, int64_t channels, int64_t positions)
{
    enum { MOST_VALUES = 8192, MAX_CHANNELS = 16384, MAX_WIDTH = 31, MAX_LONG_WIDTH = 64, FEW = 256, MAX_ROWS = 16,
           CHUNK = 4096, LANES = 32, TREE = 5 };
    const bool by_columns = columns && positions > 1;
    const int64_t width = channels * positions <= FEW ? MAX_LONG_WIDTH : MAX_WIDTH;
    if (channels * positions > (positions == 1 ? MAX_CHANNELS : MOST_VALUES) ||
        positions > (by_columns ? MAX_ROWS : width))
        return;
    const double lanes = arithmetic->is_double ? LANES / 2 : LANES;
    const double additions = by_columns ? (double)positions + ceil((double)channels / lanes)
                             : ceil(fmin((double)(channels * positions), CHUNK) / lanes);
    arithmetic->additions = fmax(arithmetic->additions, additions + TREE + 1);
    arithmetic->shift_additions = fmax(arithmetic->shift_additions, arithmetic->additions);
    arithmetic->coefficient_roundings = 3;
    arithmetic->gradient_roundings = 4;
    arithmetic->small_sets = true;
}

double tolerance_sample_additions(const struct tolerance_arithmetic *arithmetic, bool columns, int64_t samples,
                                  int64_t positions)
{
    enum { FEW_POSITIONS = 128, LINE_POSITIONS = 4096, MAX_ROWS = 128 };
    const bool go_on = arithmetic->on_cuda && positions <= (columns ? FEW_POSITIONS : LINE_POSITIONS);
    if (arithmetic->small_sets)
        return fmin((double)(samples * positions), MAX_ROWS);
    return go_on ? fmin((double)samples, MAX_ROWS) : 0;
}

struct tolerance_arithmetic tolerance_arithmetic(int32_t device, normfuse_type type, bool columns, bool ambiguous,
                                                 int64_t rows, int64_t channels, int64_t positions)
{
    const bool on_cuda = device == NORMFUSE_CUDA;
    struct tolerance_arithmetic arithmetic = on_cuda ? cuda_arithmetic_of(type, columns, rows, channels, positions)
                                                     : arithmetic_of(type, columns, rows, channels, positions);
    if (!ambiguous)
        return arithmetic;
    struct tolerance_arithmetic other = on_cuda ? cuda_arithmetic_of(type, !columns, rows, channels, positions)
                                                : arithmetic_of(type, !columns, rows, channels, positions);
    arithmetic.additions = fmax(arithmetic.additions, other.additions);
    arithmetic.thread_additions = fmax(arithmetic.thread_additions, other.thread_additions);
    arithmetic.joined = fmax(arithmetic.joined, other.joined);
    arithmetic.joined_last = fmax(arithmetic.joined_last, other.joined_last);
    arithmetic.shift_additions = fmax(arithmetic.shift_additions, other.shift_additions);
    arithmetic.shift_ratio = fmax(arithmetic.shift_ratio, other.shift_ratio);
    arithmetic.joins = fmax(arithmetic.joins, other.joins);
    arithmetic.shift_unit = fmax(arithmetic.shift_unit, other.shift_unit);
    if (!on_cuda)
        arithmetic.shift_values = 0;
    return arithmetic;
}

/* A mean of shift_values values or more is a mean of means of less than twice as many, each a difference of two prefix
 * sums that are less than 2 * shift_values apart: so both are among 3 * shift_values from some multiple of it. */
double tolerance_drift(const struct tolerance_arithmetic *arithmetic, bool columns, const double *u, int64_t rows,
                       int64_t channels, int64_t positions, double mean)
{
    enum { MAX_WINDOW = 3 * 64 + 1 };
    int64_t window = arithmetic->shift_values, block = 3 * window + 1;
    if (window == 0 || block > MAX_WINDOW)
        return (double)INFINITY;
    double prefix[MAX_WINDOW], widest = 0;
    if (window == 1) {
        for (int64_t i = 0; i < rows * channels * positions; i++) {
            const double away = fabs(u[i] - mean);
            if (isnan(u[i]))
                return (double)INFINITY;
            widest = away > widest ? away : widest;
        }
        return second_order * widest;
    }
    for (int64_t first = 0; first < (columns ? channels : 1); first++) {
        int64_t step = columns ? channels : 1, pairs = columns ? rows : rows * channels, seen = 0, pair = 0, at = 0;
        int64_t count = pairs * positions;
        prefix[0] = 0;
        for (int64_t i = 0; i < count; i++) {
            prefix[seen + 1] = prefix[seen] + (u[(first + pair * step) * positions + at] - mean);
            seen++;
            if (++at == positions) {
                at = 0;
                pair++;
            }
            if (seen + 1 < block && i + 1 < count)
                continue;
            double low = prefix[0], high = prefix[0];
            for (int64_t k = 1; k <= seen; k++) {
                low = fmin(low, prefix[k]);
                high = fmax(high, prefix[k]);
                if (isnan(prefix[k]))
                    return (double)INFINITY;
            }
            widest = fmax(widest, high - low);
            if (seen + 1 == block) { /* the last two thirds are the next block's first */
                for (int64_t k = 0; k <= 2 * window; k++)
                    prefix[k] = prefix[k + window] - prefix[window];
                seen = 2 * window;
            }
        }
    }
    return second_order * widest / (double)window;
}

/* numerics.md, "mean and variance". */
struct tolerance_statistics tolerance_statistics(const struct tolerance_arithmetic *arithmetic, double count,
                                                 double mean, double m2, double eps)
{
    struct tolerance_statistics tolerance = { 0, 0, 4 * double_unit };
    double joins = arithmetic->joins * double_unit, spread = m2;
    if (!arithmetic->exact_sums) {
        double growth = tolerance_growth(arithmetic->additions + 2, arithmetic->unit);
        double shift_error = second_order * tolerance_growth(arithmetic->shift_additions + 1,
                                                             arithmetic->unit) * fabs(mean);
        double factor = arithmetic->shift_ratio > 1 ? 1 + fmax(2 * arithmetic->shift_ratio, 8) : 1;
        double drift = arithmetic->drift;
        spread = factor * m2 + 2 * count * shift_error * shift_error;
        if (2 * m2 + 4 * count * (drift * drift + shift_error * shift_error) < spread)
            spread = 2 * m2 + 4 * count * (drift * drift + shift_error * shift_error);
        if (arithmetic->shift_values == 1) { /* no rounding of the shift: the two parts add like sides of a triangle */
            double side = sqrt(m2) + sqrt(count) * drift;
            spread = fmin(spread, side * side);
        }
        tolerance.m2 = growth * (3 * spread + 2 * sqrt(m2 * spread)) * second_order +
                       joins * double_unit * count * mean * mean;
        if (arithmetic->on_cuda) { /* joins see differences of means, whose squares are a part of m2 */
            double in_thread = tolerance_growth(arithmetic->thread_additions + 2, arithmetic->unit);
            double below = tolerance_growth(arithmetic->joined + 2, arithmetic->unit);
            double last = tolerance_growth(arithmetic->joined_last + 2, arithmetic->unit);
            growth = in_thread + below + last;
            double across = 2 * sqrt(m2 * spread);
            tolerance.m2 = second_order * (in_thread * (3 * spread + across) + below * (m2 + across) + last * m2 +
                                           growth * growth * spread) +
                           joins * double_unit * count * mean * mean;
        }
        tolerance.mean = growth * sqrt(spread / count) + 2 * joins * fabs(mean);
    }
    tolerance.m2 += 8 * joins * m2 + 8 * fabs(mean) * double_unit * sqrt(count * arithmetic->joins * m2);
    tolerance.mean += 2 * joins * sqrt(spread / count);
    double error = tolerance.m2;
    if (arithmetic->on_cuda && !arithmetic->is_double) {
        /* Squares are f32: those that are too small are lost, and where their sum is too large nothing is known. */
        if (!arithmetic->exact_sums) {
            tolerance.m2 += 4 * count * arithmetic->tiny;
            tolerance.mean += 4 * arithmetic->tiny;
        }
        if (2 * spread >= tolerance_largest(NORMFUSE_F32))
            tolerance.m2 = (double)INFINITY;
        /* The quotient and eps before the sum, then the sum, the root and its inverse. */
        error = tolerance.m2 + 2 * arithmetic->unit * (m2 + count * fabs(eps));
        tolerance.rstd += 4 * arithmetic->unit;
    }
    double variance = m2 / count + eps, below = (m2 - error) / count + eps;
    if (variance > 0 && error > 0)
        tolerance.rstd += below > 0 ? sqrt(variance / below) - 1 : (double)INFINITY;
    else if (error > 0 && (m2 + error) / count + eps >= 0)
        tolerance.rstd = (double)INFINITY;
    return tolerance;
}

/* numerics.md, "norm over channels". */
struct tolerance_arithmetic tolerance_channels(normfuse_type type, bool columns, bool ambiguous, int64_t channels,
                                               int64_t positions)
{
    enum { CHUNK = 4096, LANES = 32, TREE = 5, CHUNK_ROWS = 128, CHUNK_POSITIONS = 128, TILE_POSITIONS = 512,
           TILE_TREE = 4 };
    struct tolerance_arithmetic arithmetic = { .is_double = type == NORMFUSE_F64, .drift = (double)INFINITY };
    const double lanes = arithmetic.is_double ? LANES / 2 : LANES;
    const double of_columns = ceil(fmin((double)channels, CHUNK) / lanes) + TREE + 1;
    const double of_rows = fmin((double)channels, CHUNK_ROWS);
    const double gradients_of_columns = fmin((double)positions, CHUNK_POSITIONS);
    const double gradients_of_rows = fmin((double)positions, TILE_POSITIONS / (lanes / 2) + TILE_TREE);
    arithmetic.unit = arithmetic.is_double ? 0x1p-53 : 0x1p-24;
    arithmetic.tiny = arithmetic.is_double ? 0x1p-1074 : 0x1p-149;
    arithmetic.additions = ambiguous ? fmax(of_columns, of_rows) : columns ? of_columns : of_rows;
    arithmetic.parameter_additions = ambiguous ? fmax(gradients_of_columns, gradients_of_rows)
                                     : columns ? gradients_of_columns
                                               : gradients_of_rows;
    arithmetic.shift_additions = arithmetic.additions;
    arithmetic.shift_ratio = 1;
    arithmetic.joins = 4 + (double)channels / CHUNK_ROWS;
    arithmetic.parameter_joins = 4 + (double)positions;
    arithmetic.shift_unit = arithmetic.is_double ? 0 : arithmetic.unit;
    arithmetic.coefficient_roundings = 3;
    arithmetic.gradient_roundings = 4;
    return arithmetic;
}

struct tolerance_statistics tolerance_channel_statistics(const struct tolerance_arithmetic *arithmetic, double count,
                                                         double mean, double m2, double eps, int32_t statistics,
                                                         int32_t eps_kind)
{
    struct tolerance_statistics tolerance = { 0, 0, 0 };
    if (statistics == NORMFUSE_MEAN_SQUARE)
        tolerance.m2 = m2 * (tolerance_growth(arithmetic->additions + 1,
                                              arithmetic->unit) + arithmetic->joins * double_unit);
    else
        tolerance = tolerance_statistics(arithmetic, count, mean, m2, eps);
    const bool of_norm = eps_kind == NORMFUSE_EPS_OF_NORM;
    double roundings = 6 * double_unit;
    if (arithmetic->on_cuda && !arithmetic->is_double) {
        if (statistics == NORMFUSE_MEAN_SQUARE) { /* of f32, as in tolerance_statistics */
            tolerance.m2 += 4 * count * arithmetic->tiny;
            if (2 * m2 >= tolerance_largest(NORMFUSE_F32))
                tolerance.m2 = (double)INFINITY;
        }
        tolerance.m2 += 2 * arithmetic->unit * (m2 + (of_norm ? 0 : count * fabs(eps)));
        roundings += 4 * arithmetic->unit;
    }
    /* The value under the root, or its square where the norm is taken, and what of it may be lost. */
    const double exact = of_norm ? fmax(m2, eps * eps) : m2 / count + eps;
    const double low = of_norm ? fmax(m2 - tolerance.m2, eps * eps) : (m2 - tolerance.m2) / count + eps;
    const double high = of_norm ? fmax(m2 + tolerance.m2, eps * eps) : (m2 + tolerance.m2) / count + eps;
    tolerance.rstd = roundings;
    if (isinf(tolerance.m2)) /* a norm that eps clamps, too, if squares are more than f32 holds */
        tolerance.rstd = (double)INFINITY;
    else if (exact > 0 && tolerance.m2 > 0)
        tolerance.rstd += low > 0 ? fmax(sqrt(exact / low) - 1, 1 - sqrt(exact / high)) : (double)INFINITY;
    else if (tolerance.m2 > 0 && high >= 0)
        tolerance.rstd = (double)INFINITY;
    return tolerance;
}

/* ---- elements ------------------------------------------------------------------------------------------------- */

/* How far k may be from the mean that it stands for. */
static double shift_rounding(const struct tolerance_arithmetic *arithmetic, const struct tolerance_affine *affine)
{
    return arithmetic->shift_unit * fabs(affine->mean);
}

double tolerance_shifted(const struct tolerance_arithmetic *arithmetic, const struct tolerance_affine *affine,
                         double centred)
{
    return fabs(centred) + affine->mean_error + shift_rounding(arithmetic, affine);
}

/* numerics.md, "affine". */
double tolerance_z(const struct tolerance_arithmetic *arithmetic, const struct tolerance_affine *affine, double centred,
                   double z0, double z)
{
    double gain = fabs(affine->gain), unit = arithmetic->unit;
    double shifted = tolerance_shifted(arithmetic, affine, centred);
    double error = gain * (affine->mean_error + fabs(centred) * affine->gain_error); /* statistics */
    error += (1 + arithmetic->coefficient_roundings) * unit * gain * shifted;        /* u - k, a */
    double parts = arithmetic->on_cuda ? 4 * affine->offset_parts : fabs(affine->offset);
    double rest = (arithmetic->on_cuda ? 3 : 1) * gain * shift_rounding(arithmetic, affine);
    error += unit * (parts + rest);                                                  /* b */
    error += unit * fabs(z0);                                                        /* the fma */
    if (affine->has_post_add)
        error += unit * fabs(z);
    if (arithmetic->is_double) /* the double coefficients' own steps, which f32 does not see; and the reference's */
        error += 8 * unit * (gain * fabs(centred) + affine->offset_parts + fabs(z));
    return second_order * error + arithmetic->tiny * (2 + shifted);
}

/* numerics.md, "activations": relative roundings of each, the steepest slope, the steepest change of the slope away
 * from kinks, kinks and the slope's jump there. */
static double logistic(double z)
{
    return 1 / (1 + exp(-z));
}

static double gelu_tanh_argument(double z)
{
    return 1.59576912160573071176 * (z + 0.044715 * z * z * z);
}

static double computed_activation(int activation, double z, double y)
{
    double size = fabs(y), t;
    switch (activation) {
    case NORMFUSE_PRELU:
    case NORMFUSE_LEAKY_RELU: return 2 * size;
    case NORMFUSE_SILU: return 6 * size;
    case NORMFUSE_GELU: return 20 * size;
    case NORMFUSE_GELU_TANH:
        t = gelu_tanh_argument(z);
        return (6 + 5 * fabs(t) * logistic(-t)) * size;
    case NORMFUSE_HARDSWISH: return fabs(z) < 3.01 ? z * z / 6 + 2 * size : 0;
    case NORMFUSE_ELU: return z > 0 ? 0 : 11 * size;
    case NORMFUSE_MISH: return 9 * size;
    default: return 0;
    }
}

static double computed_slope(int activation, double z, double slope)
{
    double size = fabs(slope), s, t, density;
    switch (activation) {
    case NORMFUSE_PRELU:
    case NORMFUSE_LEAKY_RELU: return size;
    case NORMFUSE_SILU:
        s = logistic(z);
        return 11 * fabs(z) * s * (1 - s) + 5 * s + size;
    case NORMFUSE_GELU:
        density = 0.39894228040143267794 * exp(-0.5 * z * z);
        return 19 * 0.5 * erfc(-z * 0.70710678118654752440) + 8 * fabs(z) * density + size;
    case NORMFUSE_GELU_TANH:
        t = gelu_tanh_argument(z);
        s = logistic(t);
        density = s * logistic(-t);
        return (5 + 5 * fabs(t) * logistic(-t)) * s +
               (17 + 5 * fabs(t)) * (density > 0 ? fabs(z) * density * 1.5957691216 * (1 + 0.134145 * z * z)
                                     : 0) + size;
    case NORMFUSE_HARDSWISH: return fabs(z) < 3.01 ? fabs(z) / 3 + size : 0;
    case NORMFUSE_ELU: return z > 0 ? 0 : 4 * size;
    case NORMFUSE_MISH:
        t = reference_activation(NORMFUSE_MISH, 0, z) / (z == 0 ? 1 : z);
        return 8 * fabs(t) + 26 * fabs(slope - t) + size;
    default: return 0;
    }
}

static double steepest(int activation, double parameter)
{
    switch (activation) {
    case NORMFUSE_SILU: return 1.0999;
    case NORMFUSE_GELU: return 1.1290;
    case NORMFUSE_GELU_TANH: return 1.1292;
    case NORMFUSE_HARDSWISH: return 1.5;
    case NORMFUSE_MISH: return 1.0886;
    case NORMFUSE_PRELU:
    case NORMFUSE_LEAKY_RELU:
    case NORMFUSE_ELU: return fmax(1, fabs(parameter));
    default: return 1;
    }
}

static double steepest_change(int activation, double parameter)
{
    switch (activation) {
    case NORMFUSE_SILU: return 0.5;
    case NORMFUSE_GELU: return 0.7979;
    case NORMFUSE_GELU_TANH: return 0.7979;
    case NORMFUSE_HARDSWISH: return 1.0 / 3;
    case NORMFUSE_MISH: return 0.645;
    case NORMFUSE_ELU: return fabs(parameter);
    default: return 0;
    }
}

static double jump_nearby(int activation, double parameter, double z, double z_error)
{
    if (z_error == 0) /* an exact z is on no other side */
        return 0;
    switch (activation) {
    case NORMFUSE_RELU: return fabs(z) <= z_error ? 1 : 0;
    case NORMFUSE_PRELU:
    case NORMFUSE_LEAKY_RELU:
    case NORMFUSE_ELU: return fabs(z) <= z_error ? fabs(1 - parameter) : 0;
    case NORMFUSE_HARDSWISH: return fabs(fabs(z) - 3) <= z_error ? 0.5 : 0;
    case NORMFUSE_RELU6: return fmin(fabs(z), fabs(z - 6)) <= z_error ? 1 : 0;
    default: return 0;
    }
}

/* The device's forms, in src/cuda/activation.cuh: expf within 2 ulp, erfcf 4, expm1f 1, reciprocals 1; where results
 * are stored in 16 bits __expf within 2 + 1.173 |argument| ulp, tanh.approx within 2^-11, gelu's tail and e^z - 1 of
 * fewer terms. fast_sigmoid is absolute, the others relative. */
static const double fast_sigmoid = 0x1p-12, fast_tail = 0x1p-15, fast_exponential_less_1 = 0x1p-17;

static double cuda_activation(const struct tolerance_arithmetic *arithmetic, int activation, double z, double y,
                              double slope)
{
    /* what z, and y, lose relatively */
    double size = fmax(fabs(y), fabs(z * slope)), unit = arithmetic->unit, half = arithmetic->is_stored_half ? 1 : 0;
    switch (activation) {
    case NORMFUSE_PRELU:
    case NORMFUSE_LEAKY_RELU: return unit * size;
    case NORMFUSE_SILU: return unit * 8 * size + half * fast_sigmoid * fabs(z);
    case NORMFUSE_GELU: return unit * 12 * size + half * fast_tail * fabs(y);
    case NORMFUSE_GELU_TANH: return unit * 14 * size + half * fast_sigmoid * fabs(z);
    case NORMFUSE_HARDSWISH: return unit * 4 * size;
    case NORMFUSE_ELU: return unit * 4 * size + half * fast_exponential_less_1 * fabs(y);
    case NORMFUSE_MISH: return unit * (16 + half * (4 + 2.4 * fmin(fabs(z), 100))) * size;
    default: return 0;
    }
}

static double cuda_slope(const struct tolerance_arithmetic *arithmetic, int activation, double z, double slope)
{
    double unit = arithmetic->unit, size = fabs(slope), s, t, density, steep, half = arithmetic->is_stored_half ? 1 : 0;
    switch (activation) {
    case NORMFUSE_PRELU:
    case NORMFUSE_LEAKY_RELU: return unit * size;
    case NORMFUSE_SILU:
        s = logistic(z);
        return unit * (s * (8 + 10 * fabs(z)) + size) + half * 1.01 * fast_sigmoid * (1 + fabs(z));
    case NORMFUSE_GELU:
        density = 0.39894228040143267794 * exp(-0.5 * z * z);
        s = 0.5 * erfc(-z * 0.70710678118654752440);
        return unit * (12 * s + fabs(z) * density * (20 + z * z + half * (4 + 1.2 * z * z)) + size) +
               half * fast_tail * (s + fabs(z) * density);
    case NORMFUSE_GELU_TANH:
        z = fmax(-12, fmin(12, z));
        t = gelu_tanh_argument(z);
        s = logistic(t);
        steep = fabs(z) * 1.59576912160573071176 * (1 + 0.134145 * z * z);
        return unit * (s * (6 + 5 * fabs(t) * logistic(-t)) * (1 + steep) + 8 * steep * s + 2 * size) +
               half * 1.01 * fast_sigmoid * (1 + steep);
    case NORMFUSE_HARDSWISH: return unit * 4 * size;
    case NORMFUSE_ELU: return unit * (6 + half * 2.4 * fmin(fabs(z), 100)) * size;
    case NORMFUSE_MISH:
        t = fabs(reference_activation(NORMFUSE_MISH, 0, z) / (z == 0 ? 1 : z));
        t = z == 0 ? 0.6 : t;
        s = logistic(z);
        steep = 16 + half * (4 + 2.4 * fmin(fabs(z), 100)); /* roundings of t */
        return unit * (steep * t + fabs(z) * s * (10 * (1 - t * t) + 2 * steep * t * t + 2) + size) +
               half * fast_sigmoid * fabs(z) * (1 - t * t);
    default: return 0;
    }
}

/* exp is flushed to 0 where its result would be subnormal; CUDA's in double is not. */
static double flushed(const struct tolerance_arithmetic *arithmetic, double z)
{
    if (arithmetic->is_double && arithmetic->on_cuda)
        return 0x1p-1060;
    return (arithmetic->is_double ? 0x1p-1020 : 0x1p-124) * (1 + fabs(z));
}

double tolerance_activation(const struct tolerance_arithmetic *arithmetic, int activation, double parameter, double z,
                            double y, double z_error)
{
    if (activation == NORMFUSE_IDENTITY)
        return z_error;
    const double exact = reference_slope(activation, parameter, z);
    double slope = fabs(exact) + steepest_change(activation, parameter) * z_error +
                   jump_nearby(activation, parameter, z, z_error);
    double error = fmin(slope, steepest(activation, parameter)) * z_error;
    if (activation == NORMFUSE_RELU || activation == NORMFUSE_RELU6)
        return error;
    if (arithmetic->on_cuda && !arithmetic->is_double)
        return error + flushed(arithmetic, z) + second_order * cuda_activation(arithmetic, activation, z, y, exact);
    double computed = computed_activation(activation, z, y);
    if (arithmetic->is_double) /* libm's and the reference's own */
        computed = 2 * computed + (8 + 4 * z * z) * fabs(y);
    return error + second_order * arithmetic->unit * computed + flushed(arithmetic, z);
}

double tolerance_slope(const struct tolerance_arithmetic *arithmetic, int activation, double parameter, double z,
                       double z_error)
{
    if (activation == NORMFUSE_IDENTITY)
        return 0;
    double error =
        steepest_change(activation, parameter) * z_error + jump_nearby(activation, parameter, z, z_error);
    if (activation == NORMFUSE_RELU || activation == NORMFUSE_RELU6)
        return error;
    double exact = reference_slope(activation, parameter, z);
    if (arithmetic->on_cuda && !arithmetic->is_double)
        return error + flushed(arithmetic, z) + second_order * cuda_slope(arithmetic, activation, z, exact);
    double computed = computed_slope(activation, z, exact);
    if (arithmetic->is_double)
        computed = 2 * computed + 8 * (1 + fabs(z));
    return error + second_order * arithmetic->unit * computed + flushed(arithmetic, z);
}
