/* SPDX-License-Identifier: MIT
 *
 * mpi_group_norm.c - group norm with SiLU of images that MPI ranks hold in strips of rows, forward and backward.
 *
 *     mpicc -std=c11 mpi_group_norm.c -o mpi_group_norm $(pkg-config --cflags --libs normfuse)
 *     mpirun -n 4 ./mpi_group_norm
 *
 * Forward: one MPI_Allgather of three doubles for each norm group. Backward: one of two doubles for each channel of
 * each sample. Every rank merges in rank order, so all ranks have the same bits. Every rank also computes the whole
 * image, and compares: the largest difference must be below the bound of docs/numerics.md. Strips differ in size; from
 * three ranks on that of rank 1 is empty, and it takes part in both gathers like the others. */
#include <math.h>
#include <mpi.h>
#include <normfuse.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { N = 2, C = 12, H = 37, W = 24, GROUPS = 4, PAIRS = N * C, SETS = N * GROUPS };

static int rank, ranks;

static void stop(const char *what, const char *why)
{
    fprintf(stderr, "rank %d: %s: %s\n", rank, what, why);
    MPI_Abort(MPI_COMM_WORLD, 1);
    exit(1);
}

static void check(normfuse_status status, const char *what)
{
    if (status != NORMFUSE_OK)
        stop(what, normfuse_last_error());
}

static double *doubles(size_t count)
{
    double *const memory = calloc(count + 1, sizeof *memory);
    if (memory == NULL)
        stop("memory", "there is none");
    return memory;
}

/* The first row of the strip of rank r; that of rank r + 1 is behind its last. */
static int first_row(int r)
{
    if (ranks > 2 && r > 0)
        r--; /* rank 1 begins where rank 0 does, and rank 0 has the rows of both */
    const int strips = ranks > 2 ? ranks - 1 : ranks;
    return r * H / strips;
}

/* A tensor with the axes and the memory that it needs. */
struct held {
    normfuse_tensor tensor;
    normfuse_axes axes;
    double *data;
};

static void hold(struct held *held, int32_t ndim, const int64_t *sizes)
{
    size_t count = 1;
    for (int32_t a = 0; a < ndim; a++)
        count *= (size_t)sizes[a];
    held->data = doubles(count);
    held->tensor = normfuse_tensor_contiguous(held->data, NORMFUSE_F64, ndim, sizes, &held->axes);
}

#define HOLD(held, ...)                                                                                                \
    hold(held, (int32_t)(sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t)), (const int64_t[]){__VA_ARGS__})

/* x, dy and results of some rows of the images. */
struct images {
    struct held x, y, dy, dx, mean, rstd, dweight, dbias;
    int first, rows;
};

static void make_images(struct images *images, int first, int rows)
{
    images->first = first;
    images->rows = rows;
    struct held *const big[] = {&images->x, &images->y, &images->dy, &images->dx};
    for (int i = 0; i < 4; i++)
        HOLD(big[i], N, C, rows, W);
    HOLD(&images->mean, N, GROUPS);
    HOLD(&images->rstd, N, GROUPS);
    HOLD(&images->dweight, C);
    HOLD(&images->dbias, C);
    for (int i = 0; i < PAIRS; i++)
        for (int r = 0; r < rows; r++)
            for (int w = 0; w < W; w++) {
                const int at = (i * rows + r) * W + w;
                const double place = (i * H + first + r) * W + w;
                images->x.data[at] = 3 + 0.05 * (first + r) + sin(0.37 * place); /* strips differ in their mean */
                images->dy.data[at] = cos(0.11 * place);
            }
}

static double largest(double value)
{
    double all = 0;
    MPI_Allreduce(&value, &all, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    return all;
}

/* True if all ranks hold the bytes of rank 0. */
static int is_same(const double *values, size_t count)
{
    double *const first = doubles(count);
    memcpy(first, values, count * sizeof *first);
    MPI_Bcast(first, (int)count, MPI_DOUBLE, 0, MPI_COMM_WORLD);
    const double differs = memcmp(first, values, count * sizeof *first) != 0;
    free(first);
    return largest(differs) == 0;
}

/* The largest difference of a strip's values to those of the whole image. */
static double difference(const double *strip, const double *whole, const struct images *of)
{
    double worst = 0;
    for (int i = 0; i < PAIRS; i++)
        for (int k = 0; k < of->rows * W; k++)
            worst = fmax(worst, fabs(strip[i * of->rows * W + k] - whole[(i * H + of->first) * W + k]));
    return worst;
}

static int report(const char *name, double worst, double bound)
{
    worst = largest(worst);
    const int good = worst <= bound; /* false for NaN */
    if (rank == 0)
        printf("%-8s differs from the whole image by at most %.2g, bound %.2g%s\n", name, worst, bound,
               good ? "" : ": FAILED");
    return good;
}

int main(int count, char **words)
{
    MPI_Init(&count, &words);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);

    struct images strip, whole;
    make_images(&strip, first_row(rank), (rank + 1 < ranks ? first_row(rank + 1) : H) - first_row(rank));
    make_images(&whole, 0, H);
    struct held weight, bias, stats, merged, every_stats, sums, merged_sums, every_sums;
    HOLD(&weight, C);
    HOLD(&bias, C);
    for (int c = 0; c < C; c++) {
        weight.data[c] = 0.5 + 0.1 * c;
        bias.data[c] = 0.2 * c - 1;
    }
    HOLD(&stats, N, GROUPS, 3);
    HOLD(&merged, N, GROUPS, 3);
    HOLD(&every_stats, ranks, N, GROUPS, 3);
    HOLD(&sums, N, C, 2);
    HOLD(&merged_sums, N, C, 2);
    HOLD(&every_sums, ranks, N, C, 2);

    normfuse_group_norm_options options = {
        .struct_bytes = sizeof options, .groups = GROUPS, .eps = 1e-5, .activation = NORMFUSE_SILU};

    /* Forward: statistics of the strip, one gather, the merge in rank order, y of the strip. */
    const normfuse_tensors of_strip = {.struct_bytes = sizeof of_strip, .x = &strip.x.tensor, .stats = &stats.tensor};
    check(normfuse_group_norm_stats(&options, &of_strip, NULL), "stats");
    MPI_Allgather(stats.data, SETS * 3, MPI_DOUBLE, every_stats.data, SETS * 3, MPI_DOUBLE, MPI_COMM_WORLD);
    check(normfuse_stats_merge(&every_stats.tensor, &merged.tensor, NULL), "stats_merge");
    const normfuse_tensors apply = {.struct_bytes = sizeof apply,
                                    .x = &strip.x.tensor,
                                    .y = &strip.y.tensor,
                                    .weight = &weight.tensor,
                                    .bias = &bias.tensor,
                                    .mean = &strip.mean.tensor,
                                    .rstd = &strip.rstd.tensor,
                                    .stats = &merged.tensor};
    check(normfuse_group_norm_apply(&options, &apply, NULL), "apply");

    /* Backward: sums of the strip, one gather, the merge in rank order, dx of the strip. With merged sums dweight and
     * dbias are those of the whole images, the same on every rank: nothing else is to be sent or added. */
    normfuse_tensors back = {.struct_bytes = sizeof back,
                             .x = &strip.x.tensor,
                             .dy = &strip.dy.tensor,
                             .weight = &weight.tensor,
                             .bias = &bias.tensor,
                             .mean = &strip.mean.tensor,
                             .rstd = &strip.rstd.tensor,
                             .sums = &sums.tensor};
    check(normfuse_group_norm_backward_sums(&options, &back, NULL), "backward_sums");
    MPI_Allgather(sums.data, PAIRS * 2, MPI_DOUBLE, every_sums.data, PAIRS * 2, MPI_DOUBLE, MPI_COMM_WORLD);
    check(normfuse_sums_merge(&every_sums.tensor, &merged_sums.tensor, NULL), "sums_merge");
    back.sums = &merged_sums.tensor;
    back.dx = &strip.dx.tensor;
    back.dweight = &strip.dweight.tensor;
    back.dbias = &strip.dbias.tensor;
    options.set_values = (int64_t)merged.data[0]; /* the count: of the whole image, not of the strip */
    check(normfuse_group_norm_backward_apply(&options, &back, NULL), "backward_apply");

    /* The whole images in one call of each direction. */
    options.set_values = 0;
    const normfuse_tensors forward = {.struct_bytes = sizeof forward,
                                      .x = &whole.x.tensor,
                                      .y = &whole.y.tensor,
                                      .weight = &weight.tensor,
                                      .bias = &bias.tensor,
                                      .mean = &whole.mean.tensor,
                                      .rstd = &whole.rstd.tensor};
    check(normfuse_group_norm_forward(&options, &forward, NULL), "forward of the whole");
    const normfuse_tensors backward = {.struct_bytes = sizeof backward,
                                       .x = &whole.x.tensor,
                                       .dy = &whole.dy.tensor,
                                       .weight = &weight.tensor,
                                       .bias = &bias.tensor,
                                       .mean = &whole.mean.tensor,
                                       .rstd = &whole.rstd.tensor,
                                       .dx = &whole.dx.tensor,
                                       .dweight = &whole.dweight.tensor,
                                       .dbias = &whole.dbias.tensor};
    check(normfuse_group_norm_backward(&options, &backward, NULL), "backward of the whole");

    /* The bound of docs/numerics.md, for rows of f64: u = 2^-53, m roundings on the way into a chunk's sum, J chunks
     * and pieces, T the squares about the shift. `values` is a norm group's. Both results are within it, so their
     * difference is within twice as much. Of the backward a majorant: its error, and how far mean and rstd move it. */
    const double u = 0x1p-53, values = (double)C / GROUPS * H * W, m = 128 + 4096.0 / W + 5,
                 joins = 16 + values / 256 + ranks;
    double y_bound = 0, dx_bound = 0, parameter_bound = 0;
    for (int i = 0; i < PAIRS; i++) {
        const int set = i / C * GROUPS + i % C / (C / GROUPS);
        const double mean = whole.mean.data[set], rstd = whole.rstd.data[set], gain = fabs(weight.data[i % C]) * rstd;
        const double m2 = values * (1 / (rstd * rstd) - options.eps), g = (m + 2) * u / (1 - (m + 2) * u);
        const double shift = 70 * u * fabs(mean), t = 129 * m2 + 2 * values * shift * shift;
        const double mean_error = g * sqrt(t / values) + 2 * joins * u * (fabs(mean) + sqrt(t / values));
        const double m2_error = g * (3 * t + 2 * sqrt(m2 * t)) + 8 * joins * u * m2 +
                                8 * fabs(mean) * u * sqrt(values * joins * m2) + joins * u * u * values * mean * mean;
        const double rho = sqrt(1 / (1 - m2_error / values * rstd * rstd)) - 1 + 4 * u;
        double widest = 0;
        for (int k = 0; k < H * W; k++)
            widest = fmax(widest, fabs(whole.x.data[i * H * W + k] - mean));
        const double z = gain * widest + fabs(bias.data[i % C]);
        const double z_error = gain * (mean_error + widest * rho) +
                               2 * u * gain * (widest + mean_error + u * fabs(mean)) +
                               u * (fabs(bias.data[i % C]) + u * fabs(mean * gain)) + u * z +
                               8 * u * (gain * widest + fabs(bias.data[i % C]) + z);
        /* SiLU: its steepest slope, 6 roundings */
        y_bound = fmax(y_bound, 2 * 1.01 * (1.0999 * z_error + 6 * u * z + u * z));
        /* |dy| is at most 1 */
        const double steep = 2 * pow(1 + fabs(weight.data[i % C]), 2) * pow(1 + widest * rstd, 3);
        const double moved = 8 * steep * (mean_error * rstd + rho + g + joins * u);
        dx_bound = fmax(dx_bound, 2 * rstd * moved);
        parameter_bound = fmax(parameter_bound, 2 * N * H * W * moved);
    }

    int good = report("y", difference(strip.y.data, whole.y.data, &strip), y_bound);
    good &= report("dx", difference(strip.dx.data, whole.dx.data, &strip), dx_bound);
    double dweight = 0, dbias = 0;
    for (int c = 0; c < C; c++) {
        dweight = fmax(dweight, fabs(strip.dweight.data[c] - whole.dweight.data[c]));
        dbias = fmax(dbias, fabs(strip.dbias.data[c] - whole.dbias.data[c]));
    }
    good &= report("dweight", dweight, parameter_bound);
    good &= report("dbias", dbias, parameter_bound);
    int same = is_same(merged.data, SETS * 3);
    same &= is_same(strip.mean.data, SETS);
    same &= is_same(strip.rstd.data, SETS);
    same &= is_same(merged_sums.data, PAIRS * 2);
    same &= is_same(strip.dweight.data, C);
    same &= is_same(strip.dbias.data, C);
    if (rank == 0)
        printf("%d ranks: statistics, sums and parameter gradients have %s\n", ranks,
               same ? "the same bits on every rank" : "different bits: FAILED");
    MPI_Finalize();
    return good && same ? 0 : 1;
}
