/* SPDX-License-Identifier: MIT
 *
 * test_reference.c - the reference against what does not depend on it: gradients by central finite differences of its
 * own forward, element conversions by midpoints, activations by values from tables, statistics by exact sums. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/reference.h"

static int passed, failed;

static void check(bool good, const char *what, double got, double want)
{
    if (good) {
        passed++;
    } else {
        failed++;
        printf("FAIL %s: got %.17g want %.17g\n", what, got, want);
    }
}

/* ---- elements ------------------------------------------------------------------------------------------------- */

/* Every 16-bit value survives a round trip, and midpoints between neighbours go to the even one. */
static void test_16_bits(normfuse_type type, const char *name)
{
    long wrong = 0;
    for (unsigned bits = 0; bits < 0x8000; bits++) {
        uint16_t element = (uint16_t)bits, next = (uint16_t)(bits + 1), stored = 0;
        double value = reference_load(&element, type);
        reference_store(&stored, type, value);
        if (isnan(value)) {
            wrong += !isnan(reference_load(&stored, type));
            continue;
        }
        wrong += stored != element;
        reference_store(&stored, type, -value);
        wrong += stored != (element | 0x8000);
        double above = reference_load(&next, type);
        if (isinf(value) || isinf(above))
            continue;
        wrong += !(above > value);
        double middle = (value + above) / 2;
        reference_store(&stored, type, middle);
        wrong += stored != (bits & 1 ? next : element);
        reference_store(&stored, type, nextafter(middle, INFINITY));
        wrong += stored != next;
        reference_store(&stored, type, nextafter(middle, 0));
        wrong += stored != element;
    }
    check(wrong == 0, name, (double)wrong, 0);
}

static void test_elements(void)
{
    test_16_bits(NORMFUSE_F16, "f16 elements");
    test_16_bits(NORMFUSE_BF16, "bf16 elements");
    uint16_t half = 0x3555, brain = 0x4049;
    check(reference_load(&half, NORMFUSE_F16) == 0.333251953125, "f16 0x3555", reference_load(&half, NORMFUSE_F16),
          0.333251953125);
    check(reference_load(&brain, NORMFUSE_BF16) == 3.140625, "bf16 0x4049", reference_load(&brain, NORMFUSE_BF16),
          3.140625);
    check(reference_round(65519.9, NORMFUSE_F16) == 65504, "f16 largest", reference_round(65519.9, NORMFUSE_F16),
          65504);
    check(isinf(reference_round(65520, NORMFUSE_F16)), "f16 overflow", reference_round(65520, NORMFUSE_F16), INFINITY);
    check(reference_round(0.1, NORMFUSE_F32) == (double)0.1f, "f32", reference_round(0.1, NORMFUSE_F32), (double)0.1f);
    /* 1 + 2^-8 is a tie in bf16 and goes to even; the float sum of 1 + 2^-8 and 2^-30 is that tie again. */
    check(reference_add(1 + 0x1p-7, 0, 0x1p-8, true, NORMFUSE_BF16) == 1 + 0x1p-6, "bf16 sum", 0, 0);
    check(reference_add(1, 0x1p-9, 0x1p-9 + 0x1p-20, true, NORMFUSE_BF16) == 1 + 0x1p-7,
          "bf16 sum of three, rounded once", 0, 0);
    check(reference_add(1, 0, 0x1p-60, true, NORMFUSE_F64) == 1, "f64 sum", 0, 0);
    check(reference_add(1, 0x1p-30, 0x1p-30, true, NORMFUSE_F32) == 1, "f32 sum", 0, 0);
}

/* ---- activations ---------------------------------------------------------------------------------------------- */

/* Values computed with 30 digits elsewhere. */
static const struct {
    int activation;
    double parameter, z, value;
} table[] = {
    { NORMFUSE_IDENTITY, 0, -1.5, -1.5 },
    { NORMFUSE_RELU, 0, -1.5, 0 },
    { NORMFUSE_RELU, 0, 1.5, 1.5 },
    { NORMFUSE_LEAKY_RELU, 0.01, -2, -0.02 },
    { NORMFUSE_LEAKY_RELU, 0.01, 2, 2 },
    { NORMFUSE_PRELU, -0.5, -2, 1 },
    { NORMFUSE_PRELU, -0.5, 2, 2 },
    { NORMFUSE_SILU, 0, 1, 0.73105857863000487925 },
    { NORMFUSE_SILU, 0, -1, -0.26894142136999512075 },
    { NORMFUSE_GELU, 0, 1, 0.84134474606854294859 },
    { NORMFUSE_GELU, 0, -1, -0.15865525393145705141 },
    { NORMFUSE_GELU, 0, -5, -1.4332578593959698e-06 },
    { NORMFUSE_GELU_TANH, 0, 1, 0.84119199060827676 },
    { NORMFUSE_GELU_TANH, 0, -1, -0.15880800939172324 },
    { NORMFUSE_HARDSWISH, 0, -4, 0 },
    { NORMFUSE_HARDSWISH, 0, -1, -1.0 / 3 },
    { NORMFUSE_HARDSWISH, 0, 1, 2.0 / 3 },
    { NORMFUSE_HARDSWISH, 0, 4, 4 },
    { NORMFUSE_ELU, 1, -1, -0.63212055882855767840 },
    { NORMFUSE_ELU, 0.5, -1, -0.31606027941427883920 },
    { NORMFUSE_ELU, 1, 1, 1 },
    { NORMFUSE_MISH, 0, 1, 0.86509838826731034694 },
    { NORMFUSE_MISH, 0, -1, -0.30340146137410895 },
    { NORMFUSE_RELU6, 0, -1.5, 0 },
    { NORMFUSE_RELU6, 0, 5.5, 5.5 },
    { NORMFUSE_RELU6, 0, 6.5, 6 },
};

static void test_activations(void)
{
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        double got = reference_activation(table[i].activation, table[i].parameter, table[i].z);
        check(fabs(got - table[i].value) <= 1e-15 * fmax(1e-3, fabs(table[i].value)), "activation", got,
              table[i].value);
    }
    /* Derivatives away from kinks. Central differences err by step^2/6 * |third derivative| (below 3) and
     * 2^-53 * |z| / step. */
    static const double points[] = { -7.5, -3.25, -2.5, -1.25, -0.375, 0.375, 1.25, 2.5, 3.25, 7.5, -20, 20 };
    const double step = 0x1p-17;
    for (int activation = NORMFUSE_IDENTITY; activation <= NORMFUSE_PRELU; activation++) {
        for (size_t i = 0; i < sizeof points / sizeof *points; i++) {
            double z = points[i], parameter = 0.3;
            double want = (reference_activation(activation, parameter, z + step) -
                           reference_activation(activation, parameter, z - step)) /
                          (2 * step);
            double got = reference_slope(activation, parameter, z);
            double bound = 3 * step * step + 8 * 0x1p-53 * fabs(z) / step;
            check(fabs(got - want) <= bound, "slope", got, want);
        }
    }
    /* PyTorch's choice at kinks, and NaN. */
    check(reference_slope(NORMFUSE_RELU, 0, 0) == 0, "relu at 0", 1, 0);
    check(reference_slope(NORMFUSE_RELU, 0, NAN) == 1, "relu at NaN", 0, 1);
    check(reference_slope(NORMFUSE_LEAKY_RELU, 0.25, 0) == 0.25, "leaky_relu at 0", 1, 0.25);
    check(reference_slope(NORMFUSE_PRELU, 0.25, 0) == 0.25, "prelu at 0", 1, 0.25);
    check(reference_slope(NORMFUSE_PRELU, 0.25, NAN) == 1, "prelu at NaN", 0, 1);
    check(reference_slope(NORMFUSE_HARDSWISH, 0, -3) == 0, "hardswish at -3", 1, 0);
    check(reference_slope(NORMFUSE_HARDSWISH, 0, 3) == 1, "hardswish at 3", 0, 1);
    check(reference_slope(NORMFUSE_ELU, 0.5, 0) == 0.5, "elu at 0", 1, 0.5);
    check(reference_slope(NORMFUSE_RELU6, 0, 0) == 0, "relu6 at 0", 1, 0);
    check(reference_slope(NORMFUSE_RELU6, 0, 6) == 0, "relu6 at 6", 1, 0);
    check(reference_slope(NORMFUSE_RELU6, 0, NAN) == 1, "relu6 at NaN", 0, 1);
    for (int activation = NORMFUSE_IDENTITY; activation <= NORMFUSE_PRELU; activation++)
        check(isnan(reference_activation(activation, 0.3, NAN)), "NaN stays", 0, NAN);
    for (int activation = NORMFUSE_RELU; activation <= NORMFUSE_PRELU; activation++) {
        const bool bounded = activation == NORMFUSE_RELU6;
        check(reference_activation(activation, 0.3, 1e30) == (bounded ? 6 : 1e30), "far right", 0, 1e30);
        check(isfinite(reference_slope(activation, 0.3, -1e30)), "slope far left", 0, 0);
        check(reference_slope(activation, 0.3, 1e30) == !bounded, "slope far right", 0, 1);
    }
}

/* ---- statistics ----------------------------------------------------------------------------------------------- */

static void test_statistics(void)
{
    double u[12];
    for (int i = 0; i < 12; i++)
        u[i] = 1000 + (i % 2 ? 0.5 : -0.5);
    struct reference_statistics statistics = reference_statistics(u, 3, 4);
    check(statistics.count == 12, "count", statistics.count, 12);
    check(statistics.mean == 1000, "mean", statistics.mean, 1000);
    check(statistics.m2 == 3, "m2", statistics.m2, 3);
    check(reference_rstd(0.25 - 0.0625, 0.0625) == 2, "rstd", reference_rstd(0.1875, 0.0625), 2);
    check(isinf(reference_rstd(0, 0)) && isnan(reference_rstd(0, -1)), "rstd, IEEE", 0, 0);
    statistics = reference_squares((const double[]){ 3, -4 }, 1, 2);
    check(statistics.mean == 0 && statistics.m2 == 25, "squares", statistics.m2, 25);
    check(reference_rstd_of_norm(4, 25, 1) == 0.4, "rstd of a norm", reference_rstd_of_norm(4, 25, 1), 0.4);
    check(reference_rstd_of_norm(4, 25, 8) == 0.25, "rstd of a clamped norm", reference_rstd_of_norm(4, 25, 8), 0.25);
    check(reference_running(4, 8, 0.25) == 5, "running", reference_running(4, 8, 0.25), 5);
}

/* ---- gradients ------------------------------------------------------------------------------------------------ */

static uint64_t random_state;

/* Uniform in (-1, 1). */
static double random_value(void)
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (double)(int64_t)(random_state >> 11) * 0x1p-52 - 1;
}

enum { MOST_VALUES = 64 };

struct trial {
    struct reference_set set;
    double eps;
    bool of_norm; /* eps is that of reference_rstd_of_norm */
    double u[MOST_VALUES], post_add[MOST_VALUES], dy[MOST_VALUES], du[MOST_VALUES];
    double weight[MOST_VALUES], bias[MOST_VALUES], scale[MOST_VALUES], shift[MOST_VALUES], slope[MOST_VALUES];
};

static void set_statistics(struct trial *trial)
{
    struct reference_set *set = &trial->set;
    if (!set->has_statistics)
        return;
    struct reference_statistics statistics =
        (set->is_root_mean_square ? reference_squares : reference_statistics)(trial->u, set->rows,
                                                                              set->channels * set->positions);
    set->mean = statistics.mean;
    set->rstd = trial->of_norm ? reference_rstd_of_norm(statistics.count, statistics.m2, trial->eps)
                               : reference_rstd(statistics.m2 / statistics.count, trial->eps);
}

/* The scalar whose gradients the backward gives: sum of dy * y + sum of du * u. */
static double loss(struct trial *trial)
{
    const struct reference_set *set = &trial->set;
    set_statistics(trial);
    double y[MOST_VALUES];
    reference_forward(set, y);
    long double sum = 0;
    for (int64_t i = 0; i < set->rows * set->channels * set->positions; i++)
        sum += (long double)trial->dy[i] * y[i] + (set->du ? (long double)trial->du[i] * trial->u[i] : 0);
    return (double)sum;
}

static bool near_kink(const struct trial *trial)
{
    const struct reference_set *set = &trial->set;
    for (int64_t row = 0; row < set->rows; row++)
        for (int64_t channel = 0; channel < set->channels; channel++)
            for (int64_t i = 0; i < set->positions; i++) {
                double z = reference_z(set, row, channel, i);
                if (fabs(z) < 1e-3 || fabs(fabs(z) - 3) < 1e-3)
                    return true;
            }
    return false;
}

/* Compares gradient[i * stride] with the difference quotient of each of values[0..count). */
static void compare(struct trial *trial, double *values, int64_t count, const double *gradient, const char *what)
{
    const double step = 1e-5;
    for (int64_t i = 0; i < count; i++) {
        double value = values[i];
        values[i] = value + step;
        double above = loss(trial);
        values[i] = value - step;
        double below = loss(trial);
        values[i] = value;
        double quotient = (above - below) / (2 * step);
        /* step^2 times third derivatives (below 1e3 here) and the rounding of losses of order 10 divided by the step.
         * */
        double bound = 1e3 * step * step + 100 * 0x1p-53 / step + 1e-9;
        char name[80];
        snprintf(name, sizeof name, "%s[%lld] of %s", what, (long long)i,
                 trial->set.has_statistics ? "normalization" : "affine");
        check(fabs(quotient - gradient[i]) <= bound, name, gradient[i], quotient);
    }
    set_statistics(trial);
}

/* The mean and rstd that a norm group is normalized with. */
enum kind { GIVEN, MEAN_AND_VARIANCE, MEAN_SQUARE, NORM, NORM_OF_CENTRED, CLAMPED, CLAMPED_CENTRED, KINDS };

static void test_gradients(int64_t rows, int64_t channels, int64_t positions, int activation, enum kind kind,
                           bool with_options)
{
    const bool has_statistics = kind != GIVEN;
    struct trial trial = { .eps = kind >= CLAMPED ? 100 : 0.1, .of_norm = kind >= NORM };
    struct reference_set *set = &trial.set;
    int64_t count = rows * channels * positions, pairs = rows * channels;
    random_state = (uint64_t)(activation * 100 + count);
    do {
        for (int i = 0; i < MOST_VALUES; i++) {
            trial.u[i] = 2 * random_value() + 0.5;
            trial.post_add[i] = random_value();
            trial.dy[i] = random_value();
            trial.du[i] = random_value();
            trial.weight[i] = 1 + 0.5 * random_value();
            trial.bias[i] = random_value();
            trial.scale[i] = 0.5 * random_value();
            trial.shift[i] = random_value();
            trial.slope[i] = 0.3 + 0.5 * random_value();
        }
        *set = (struct reference_set){ .rows = rows,
                                       .channels = channels,
                                       .positions = positions,
                                       .activation = activation,
                                       .parameter = 0.3,
                                       .u = trial.u,
                                       .dy = trial.dy,
                                       .mean = 0.3,
                                       .rstd = 1.7,
                                       .has_statistics = has_statistics,
                                       .is_root_mean_square = kind == MEAN_SQUARE || kind == NORM || kind == CLAMPED,
                                       .is_clamped = kind >= CLAMPED,
                                       .set_values = (double)count };
        if (with_options) {
            set->post_add = trial.post_add;
            set->du = trial.du;
            set->weight = trial.weight;
            set->bias = trial.bias;
            set->scale = trial.scale;
            set->shift = trial.shift;
        }
        if (activation == NORMFUSE_PRELU)
            set->slope = trial.slope;
        set_statistics(&trial);
    } while (near_kink(&trial));
    double dz[MOST_VALUES], dx[MOST_VALUES], dweight[MOST_VALUES], dbias[MOST_VALUES], dscale[MOST_VALUES],
        dshift[MOST_VALUES], dslope[MOST_VALUES];
    struct reference_gradients gradients = { dz, dx, dweight, dbias, dscale, dshift, dslope };
    reference_backward(set, &gradients);
    compare(&trial, trial.u, count, dx, "dx");
    if (activation == NORMFUSE_PRELU)
        compare(&trial, trial.slope, pairs, dslope, "dslope");
    if (with_options) {
        compare(&trial, trial.post_add, count, dz, "dpost_add");
        compare(&trial, trial.weight, pairs, dweight, "dweight");
        compare(&trial, trial.bias, pairs, dbias, "dbias");
        compare(&trial, trial.scale, pairs, dscale, "dscale");
        compare(&trial, trial.shift, pairs, dshift, "dshift");
    }
}

int main(void)
{
    test_elements();
    test_activations();
    test_statistics();
    for (int activation = NORMFUSE_IDENTITY; activation <= NORMFUSE_PRELU; activation++) {
        for (int kind = GIVEN; kind <= MEAN_AND_VARIANCE; kind++) {
            test_gradients(1, 3, 5, activation, (enum kind)kind, true);
            test_gradients(3, 1, 7, activation, (enum kind)kind, true);
            test_gradients(1, 1, 11, activation, (enum kind)kind, false);
            test_gradients(2, 3, 4, activation, (enum kind)kind, true);
        }
        for (int kind = MEAN_SQUARE; kind < KINDS; kind++) {
            test_gradients(1, 13, 1, activation, (enum kind)kind, true);
            test_gradients(1, 5, 1, activation, (enum kind)kind, false);
        }
    }
    printf("%d passed, %d failed, 0 skipped\n", passed, failed);
    return failed ? 1 : 0;
}
