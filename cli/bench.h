/* SPDX-License-Identifier: MIT
 *
 * bench.h - what the benchmark on the CPU (bench.c) and on a GPU (bench_device.c) share: the tensors of a problem, the
 * call, and what is printed of it. */
#ifndef NORMFUSE_CLI_BENCH_H
#define NORMFUSE_CLI_BENCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "floor_streams.h"
#include "normfuse.h"
#include "problem_line.h"

enum { BENCH_BIG_MAX = FLOOR_READS_MAX + FLOOR_WRITES_MAX };
enum bench_small {
    BENCH_WEIGHT,
    BENCH_BIAS,
    BENCH_SCALE,
    BENCH_SHIFT,
    BENCH_MEAN,
    BENCH_RSTD,
    BENCH_RUNNING_MEAN,
    BENCH_RUNNING_VAR,
    BENCH_DWEIGHT,
    BENCH_DBIAS,
    BENCH_DSCALE,
    BENCH_DSHIFT,
    BENCH_PRE_BIAS,
    BENCH_DPRE_BIAS,
    BENCH_SLOPE,
    BENCH_DSLOPE,
    BENCH_SMALLS
};

/* One problem. A set is the big tensors of one call, those of x's size: first what the call must read, then what it
 * writes. The floor moves the same ones. */
struct bench {
    struct problem_line line;
    normfuse_exec exec;
    size_t tensor_bytes, tensor_stride; /* of a big tensor */
    int reads, writes;
    char *arena; /* all sets */
    size_t arena_bytes;
    int64_t sets, next_set;
    void *small_data[BENCH_SMALLS];
    size_t small_bytes[BENCH_SMALLS];
    normfuse_axes small_axes[BENCH_SMALLS];
    normfuse_tensor smalls[BENCH_SMALLS];
    normfuse_axes big_axes[2]; /* channels-first, channels-last */
    normfuse_tensor big[BENCH_BIG_MAX];
    normfuse_tensors tensors;
};

struct bench_result {
    int64_t samples;
    double median_us, p10_us, p90_us, floor_us;
    /* on a GPU */
    double host_us;         /* of the call, until all is enqueued */
    char kernel[256];       /* which ran */
    const char *floor_name; /* which way of moving bytes was the fastest */
};

/* Sizes, and big tensors without data, of a problem; tensor_stride is a multiple of `alignment`. */
void bench_describe(struct bench *bench, const struct problem_line *line, const char *name, size_t alignment);
/* The parameters and statistics, in host memory; then `tensors` are those of the timed call. */
void bench_make_smalls(struct bench *bench);
/* The tensors of the next call, or for the floor. */
struct floor_streams bench_take_set(struct bench *bench);
/* Bytes that are read and written. */
double bench_bytes(const struct bench *bench);
/* mean and rstd of u alone. */
normfuse_tensors bench_statistics_tensors(const struct bench *bench);
bool bench_is_training(const struct problem_line *line);
/* Makes the call, or with scratch_bytes asks only for what it needs. */
normfuse_status bench_call(const struct bench *bench, const normfuse_tensors *tensors, bool backward,
                           size_t *scratch_bytes);

/* Values like those that networks see: bell-shaped, other ones for another salt. */
struct bench_filling {
    char *out;
    normfuse_type type;
    uint64_t salt;
    const void *table;
};
enum { BENCH_TABLE_VALUES = 4096 };
void bench_make_table(normfuse_type type, double *table);
void bench_fill(void *filling, size_t begin, size_t end);

double bench_now_us(void);
/* Sorts values. */
void bench_sort(double *values, int64_t count);
double bench_quantile(const double *sorted, int64_t count, double part);

/* ---- bench_device.c --------------------------------------------------------------------------------------------- */

/* Opens the GPU, or ends the program, and takes the memory that the largest of the problems with device=cuda needs.
 * There is one. */
void bench_device_open(const struct problem_line *lines, size_t count, bool warm);
/* Times a problem with device=cuda. samples 0: as many as the default time allows. */
void bench_device(struct bench *bench, const struct problem_line *line, const char *name, int64_t samples, bool warm,
                  struct bench_result *result);

#endif
