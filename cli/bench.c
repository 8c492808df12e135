/* SPDX-License-Identifier: MIT
 *
 * bench.c - `normfuse bench`: times problems beside the copy floor, sample by sample in turn.
 *
 * A set is the tensors of one call. Cold, calls and copies walk through so many sets that what one left in the caches
 * is gone when it is used again; every call and every copy takes the next set. All sets hold the same numbers, so the
 * statistics that a backward is given fit each. */
#define _GNU_SOURCE
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "bench.h"
#include "commands.h"
#include "device.h"
#include "floor.h"
#include "json.h"
#include "numbers.h"
#include "problems.h"
#include "report.h"

#ifndef NORMFUSE_COMMIT
#define NORMFUSE_COMMIT "unknown"
#endif

enum { OPTION_JSON, OPTION_WARM, OPTION_SAMPLES, OPTION_THREADS, OPTION_COUNT };

static const struct option options[OPTION_COUNT] = {
    [OPTION_JSON] = {"json", 'j', NULL, "Print one JSON object a problem, each on one line of standard output."},
    [OPTION_WARM] = {"warm", 'w', NULL, "Use the same tensors again and again, so that what fits in the caches stays "
                     "there. Without it tensors rotate through at least four times the last-level cache (GPU: the "
                     "L2)."},
    [OPTION_SAMPLES] = {"samples", 'n', "N", "Take N samples, however long it takes. Without it: at least 30 where "
                        "10 seconds for the problem allow, and at least 3; on a GPU at least 15."},
    [OPTION_THREADS] = {"threads", 0, "N", "Use N threads, for the copy too. Default: what 'normfuse info' says."},
};

static int bench_main(const struct arguments *arguments);

const struct command bench_command = {
    .name = "bench",
    .summary = "time problems beside the copy floor",
    .synopsis = "bench PROBLEM... [--json] [--warm] [--samples N] [--threads N]\n",
    .description = "Times each problem and, in turn with it, a copy of as many bytes with non-temporal stores\n"
                   "and the same threads: forward, x to y; backward, x and dy read and dx written. The ratio\n"
                   "of the medians says how far the operator is from what the machine's memory allows; it\n"
                   "moves far less than times do from one moment, and one machine, to the next.\n"
                   "\n"
                   "device=cuda: a sample is a replay of a graph that holds a call for each of the sets of\n"
                   "tensors, at least 15 of them after 40 ms of warm-up; the copy is the fastest of the driver's\n"
                   "and several kernels, each replayed in turn with the problem over the same sets.\n"
                   "\n"
                   "A forward has weight and bias and writes the mean and rstd that a backward needs; batch\n"
                   "norm in training updates running statistics too.\n",
    .options = options,
    .option_count = OPTION_COUNT,
    .sections =
        {problem_help, "OUTPUT\n"
                       "    Times are microseconds a call. --json rows have the members problem, op, shape, groups,\n"
                       "    dtype, layout, act, dir, device, isa, threads, cache (cold or warm), samples, median_us,\n"
                       "    p10_us, p90_us, floor_us (the copy's median), ratio (median_us / floor_us), bytes (the\n"
                       "    least that must move: forward x and y; backward x, dy and dx), gbps (bytes in median_us),\n"
                       "    version, commit, compiler, cpu, and date, in UTC. device=cuda: isa is cuda, threads 0,\n"
                       "    and there are further gpu, driver, cc, kernel (those that the call launched),\n"
                       "    floor_kernel (the fastest copy), host_us (the host's time for one call) and impl.\n"
                       "\n"
                       "EXAMPLES\n"
                       "    normfuse bench group_norm 128x256x28x28 groups=32 --threads 2\n"
                       "    normfuse bench @problems.txt --json > rows.jsonl\n"
                       "    normfuse bench group_norm 2x320x64x64 groups=32 dtype=f16 layout=nhwc device=cuda\n"},
    .main = bench_main,
};

/* ---- one problem in memory -------------------------------------------------------------------------------------- */

/* A table of normal deviates, walked in a scrambled order: quick to make. */
void bench_make_table(normfuse_type type, double *table)
{
    uint64_t state = 1;
    for (int i = 0; i < BENCH_TABLE_VALUES; i++) {
        double sum = 0;
        for (int j = 0; j < 12; j++) {
            state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
            sum += (double)(state >> 11) * 0x1p-53;
        }
        number_store(table, type, i, sum - 6);
    }
}

void bench_fill(void *context, size_t begin, size_t end)
{
    const struct bench_filling *filling = context;
    size_t item = number_bytes(filling->type);
    for (size_t at = begin; at < end; at += item) {
        uint64_t hash = (at / item + filling->salt) * UINT64_C(0x9e3779b97f4a7c15);
        memcpy(filling->out + at, (const char *)filling->table + (hash >> 52) * item, item);
    }
}

bool bench_is_training(const struct problem_line *line)
{
    return line->op != AFFINE && !line->evaluate;
}

static void *allocate(size_t bytes)
{
    size_t rounded = (bytes + 64) / 64 * 64;
    void *data = aligned_alloc(64, rounded);
    if (!data)
        report_failure("memory", "%s", strerror(errno));
    memset(data, 0, rounded);
    return data;
}

static const normfuse_tensor *make_small(struct bench *bench, enum bench_small id, normfuse_type type, int32_t ndim,
                                         const int64_t *sizes, double value, double spread)
{
    int64_t elements = ndim == 2 ? sizes[0] * sizes[1] : sizes[0];
    bench->small_bytes[id] = (size_t)elements * number_bytes(type);
    bench->small_data[id] = allocate(bench->small_bytes[id]);
    for (int64_t i = 0; i < elements; i++)
        number_store(bench->small_data[id], type, i, value + spread * (double)(i % 7 - 3));
    bench->smalls[id] = normfuse_tensor_contiguous(bench->small_data[id], type, ndim, sizes, &bench->small_axes[id]);
    return &bench->smalls[id];
}

void bench_make_smalls(struct bench *bench)
{
    const struct problem_line *line = &bench->line;
    normfuse_tensors *tensors = &bench->tensors;
    const int64_t *sizes = line->sizes;
    bool by_sample = line->op == AFFINE && line->per_sample;
    int32_t ndim = by_sample ? 2 : 1;
    const int64_t *shape = by_sample ? sizes : sizes + 1;
    tensors->weight = make_small(bench, BENCH_WEIGHT, line->weight_type, ndim, shape, 1, 0.0625);
    tensors->bias = make_small(bench, BENCH_BIAS, line->weight_type, ndim, shape, 0, 0.0625);
    if (bench_is_training(line)) {
        const int64_t statistics[2] = {sizes[0], line->op == GROUP_NORM ? line->groups : sizes[1]};
        bool batch = line->op == BATCH_NORM;
        normfuse_type rstd_type = line->type == NORMFUSE_F64 ? NORMFUSE_F64 : NORMFUSE_F32;
        tensors->mean =
            make_small(bench, BENCH_MEAN, NORMFUSE_F64, batch ? 1 : 2, batch ? sizes + 1 : statistics, 0, 0);
        tensors->rstd = make_small(bench, BENCH_RSTD, rstd_type, batch ? 1 : 2, batch ? sizes + 1 : statistics, 1, 0);
    }
    tensors->x = &bench->big[0];
    if (line->op == BATCH_NORM && (line->evaluate || !line->backward)) {
        tensors->running_mean = make_small(bench, BENCH_RUNNING_MEAN, NORMFUSE_F32, 1, sizes + 1, 0, 0.0625);
        tensors->running_var = make_small(bench, BENCH_RUNNING_VAR, NORMFUSE_F32, 1, sizes + 1, 1, 0.0625);
    }
    if (line->backward) {
        tensors->dweight = make_small(bench, BENCH_DWEIGHT, line->weight_type, ndim, shape, 0, 0);
        tensors->dbias = make_small(bench, BENCH_DBIAS, line->weight_type, ndim, shape, 0, 0);
        tensors->dy = &bench->big[1];
        tensors->dx = &bench->big[2];
    } else {
        tensors->y = &bench->big[1];
    }
}

static void choose_sets(struct bench *bench, const char *name, int64_t llc_bytes, bool warm)
{
    size_t set_bytes = bench->tensor_stride * (size_t)bench->big_count;
    if (llc_bytes <= 0)
        llc_bytes = INT64_C(32) << 20;
    int64_t wanted = set_bytes ? (4 * llc_bytes + (int64_t)set_bytes - 1) / (int64_t)set_bytes : 1;
    bench->sets = warm ? 1 : wanted < 2 ? 2 : wanted;
    int64_t memory = (int64_t)sysconf(_SC_PHYS_PAGES) * (int64_t)sysconf(_SC_PAGESIZE);
    if (__builtin_mul_overflow(set_bytes, (size_t)bench->sets, &bench->arena_bytes) ||
        (memory > 0 && bench->arena_bytes > (uint64_t)memory / 10 * 9))
        report_failure(name, "%" PRId64 " sets of %zu bytes are more than this machine's memory%s", bench->sets,
                       set_bytes, warm ? "" : "; --warm needs one");
}

static void make_arena(struct bench *bench, struct floor *floor)
{
    enum { HUGE_PAGE = 2 << 20 };
    size_t bytes = bench->arena_bytes + HUGE_PAGE;
    char *mapped = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED)
        report_failure("memory", "%zu bytes for the tensors: %s", bytes, strerror(errno));
    /* The operator and the copy use the same pages; small ones would cost both address translations. */
    (void)madvise(mapped, bytes, MADV_HUGEPAGE);
    bench->arena = mapped + (HUGE_PAGE - (uintptr_t)mapped % HUGE_PAGE) % HUGE_PAGE;
    bench->mapping = mapped;
    bench->mapping_bytes = bytes;

    double table[BENCH_TABLE_VALUES];
    bench_make_table(bench->line.type, table);
    floor_wake(floor);
    for (int64_t set = 0; set < bench->sets; set++)
        for (int i = 0; i < bench->big_count; i++) {
            struct bench_filling filling = {
                .out = bench->arena + ((size_t)set * (size_t)bench->big_count + (size_t)i) * bench->tensor_stride,
                .type = bench->line.type,
                .salt = (uint64_t)i * 1000003,
                .table = table};
            floor_run(floor, bench->tensor_bytes, bench_fill, &filling);
        }
    floor_rest(floor);
}

void bench_take_set(struct bench *bench)
{
    char *data = bench->arena + (size_t)bench->next_set * (size_t)bench->big_count * bench->tensor_stride;
    bench->next_set = (bench->next_set + 1) % bench->sets;
    for (int i = 0; i < bench->big_count; i++)
        bench->big[i].data = data + (size_t)i * bench->tensor_stride;
}

normfuse_status bench_call(const struct bench *bench, const normfuse_tensors *tensors, bool backward,
                           size_t *scratch_bytes)
{
    const struct problem_line *line = &bench->line;
    const normfuse_exec *exec = &bench->exec;
    uint32_t flags = line->has_act_param ? NORMFUSE_HAS_ACT_PARAM : 0;
    if (line->op == AFFINE) {
        const normfuse_affine_options affine = {.struct_bytes = sizeof affine,
                                                .flags = flags,
                                                .activation = line->activation,
                                                .act_param = line->act_param};
        if (scratch_bytes)
            return backward ? normfuse_affine_backward_scratch_bytes(&affine, tensors, exec, scratch_bytes)
                            : normfuse_affine_forward_scratch_bytes(&affine, tensors, exec, scratch_bytes);
        return backward ? normfuse_affine_backward(&affine, tensors, exec)
                        : normfuse_affine_forward(&affine, tensors, exec);
    }
    if (line->op == BATCH_NORM) {
        const normfuse_batch_norm_options batch = {.struct_bytes = sizeof batch,
                                                   .flags = flags | (line->evaluate ? NORMFUSE_EVALUATE : 0),
                                                   .eps = line->eps,
                                                   .activation = line->activation,
                                                   .act_param = line->act_param,
                                                   .momentum = 0.1};
        if (scratch_bytes)
            return backward ? normfuse_batch_norm_backward_scratch_bytes(&batch, tensors, exec, scratch_bytes)
                            : normfuse_batch_norm_forward_scratch_bytes(&batch, tensors, exec, scratch_bytes);
        return backward ? normfuse_batch_norm_backward(&batch, tensors, exec)
                        : normfuse_batch_norm_forward(&batch, tensors, exec);
    }
    const normfuse_group_norm_options group = {.struct_bytes = sizeof group,
                                               .flags = flags,
                                               .groups = line->groups,
                                               .eps = line->eps,
                                               .activation = line->activation,
                                               .act_param = line->act_param};
    if (scratch_bytes)
        return backward ? normfuse_group_norm_backward_scratch_bytes(&group, tensors, exec, scratch_bytes)
                        : normfuse_group_norm_forward_scratch_bytes(&group, tensors, exec, scratch_bytes);
    return backward ? normfuse_group_norm_backward(&group, tensors, exec)
                    : normfuse_group_norm_forward(&group, tensors, exec);
}

normfuse_tensors bench_statistics_tensors(const struct bench *bench)
{
    return (normfuse_tensors){.struct_bytes = sizeof(normfuse_tensors),
                              .x = &bench->big[0],
                              .mean = bench->tensors.mean,
                              .rstd = bench->tensors.rstd};
}

void bench_describe(struct bench *bench, const struct problem_line *line, const char *name, size_t alignment)
{
    *bench = (struct bench){.line = *line, .big_count = line->backward ? 3 : 2};
    bench->exec.struct_bytes = sizeof bench->exec;
    bench->tensors.struct_bytes = sizeof bench->tensors;
    size_t bytes = number_bytes(line->type);
    for (int32_t i = 0; i < line->ndim; i++)
        if (__builtin_mul_overflow(bytes, (size_t)line->sizes[i], &bytes) || bytes > PTRDIFF_MAX / 4)
            report_failure(name, "the product of the sizes overflows");
    bench->tensor_bytes = bytes;
    bench->tensor_stride = (bytes + alignment - 1) / alignment * alignment;
    for (int i = 0; i < bench->big_count; i++) {
        bench->big[i] =
            line->channels_last
                ? normfuse_tensor_channels_last(NULL, line->type, line->ndim, line->sizes, &bench->big_axes)
                : normfuse_tensor_contiguous(NULL, line->type, line->ndim, line->sizes, &bench->big_axes);
        bench->big[i].device.device_type = line->device;
    }
}

static void make_bench(struct bench *bench, const struct problem_line *line, const char *name, int threads,
                       struct floor *floor, int64_t llc_bytes, bool warm)
{
    enum { ALIGNMENT = 64 };
    bench_describe(bench, line, name, ALIGNMENT);
    bench->exec.threads = threads;
    choose_sets(bench, name, llc_bytes, warm);
    make_arena(bench, floor);
    bench_make_smalls(bench);
    normfuse_status status = NORMFUSE_OK;
    if (line->backward && bench_is_training(line)) {
        const normfuse_tensors tensors = bench_statistics_tensors(bench);
        bench_take_set(bench);
        status = bench_call(bench, &tensors, false, NULL);
    }
    /* The first call, not timed: it shows what is refused and starts the library's threads. */
    bench_take_set(bench);
    if (status == NORMFUSE_OK)
        status = bench_call(bench, &bench->tensors, line->backward, NULL);
    if (status != NORMFUSE_OK)
        report_failure(name, "%s", normfuse_last_error());
}

static void free_bench(struct bench *bench)
{
    munmap(bench->mapping, bench->mapping_bytes);
    for (int i = 0; i < BENCH_SMALLS; i++)
        free(bench->small_data[i]);
}

/* ---- timing ----------------------------------------------------------------------------------------------------- */

double bench_now_us(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec * 1e6 + (double)time.tv_nsec * 1e-3;
}

/* The time of one call, from `repeats` of them. */
static double time_operator(struct bench *bench, int64_t repeats)
{
    double begin = bench_now_us();
    for (int64_t i = 0; i < repeats; i++) {
        bench_take_set(bench);
        (void)bench_call(bench, &bench->tensors, bench->line.backward, NULL); /* the same call was accepted before */
    }
    return (bench_now_us() - begin) / (double)repeats;
}

static double time_floor(struct bench *bench, struct floor *floor, int64_t repeats)
{
    floor_wake(floor);
    double begin = bench_now_us();
    for (int64_t i = 0; i < repeats; i++) {
        bench_take_set(bench);
        if (bench->line.backward)
            floor_combine(floor, bench->big[2].data, bench->big[0].data, bench->big[1].data, bench->tensor_bytes);
        else
            floor_copy(floor, bench->big[1].data, bench->big[0].data, bench->tensor_bytes);
    }
    double time = (bench_now_us() - begin) / (double)repeats;
    floor_rest(floor);
    return time;
}

static int compare_numbers(const void *a, const void *b)
{
    double x, y;
    memcpy(&x, a, sizeof x);
    memcpy(&y, b, sizeof y);
    return (x > y) - (x < y);
}

void bench_sort(double *values, int64_t count)
{
    qsort(values, (size_t)count, sizeof(double), compare_numbers);
}

double bench_quantile(const double *sorted, int64_t count, double part)
{
    double at = part * (double)(count - 1);
    int64_t below = (int64_t)at;
    int64_t above = below + 1 < count ? below + 1 : below;
    return sorted[below] + (at - (double)below) * (sorted[above] - sorted[below]);
}

static struct bench_result measure(struct bench *bench, struct floor *floor, int64_t samples_wanted, double begin_us)
{
    enum { SAMPLES_LEAST = 3, SAMPLES_GOOD = 30, SAMPLES_MOST = 400 };
    /* All that a problem may take, and what it takes when 30 samples are had sooner. */
    const double budget_us = 9e6, usual_us = 1.5e6;
    /* A sample is at least so long: the clock and a wake-up are then no part of it. */
    const double sample_us = 20;

    double first_us = time_operator(bench, 1);
    double second_us = time_operator(bench, 1);
    double floor_us = time_floor(bench, floor, 1);
    double once = first_us < second_us ? first_us : second_us;
    int64_t repeats = once >= sample_us ? 1 : once > 0.02 ? (int64_t)ceil(sample_us / once) : 1000;
    double pair_us = ((first_us > second_us ? first_us : second_us) + floor_us) * (double)repeats;

    int64_t most = samples_wanted ? samples_wanted : SAMPLES_MOST;
    double *operator_us = malloc(2 * (size_t)most * sizeof(double));
    if (!operator_us)
        report_failure("memory", "%s", strerror(errno));
    double *copy_us = operator_us + most;
    int64_t count = 0;
    while (count < most) {
        double spent_us = bench_now_us() - begin_us;
        if (!samples_wanted && count >= SAMPLES_LEAST &&
            (spent_us + pair_us > budget_us || (count >= SAMPLES_GOOD && spent_us > usual_us)))
            break;
        double begin = bench_now_us();
        operator_us[count] = time_operator(bench, repeats);
        copy_us[count] = time_floor(bench, floor, repeats);
        pair_us = bench_now_us() - begin;
        count++;
    }
    bench_sort(operator_us, count);
    bench_sort(copy_us, count);
    struct bench_result result = {.samples = count,
                            .median_us = bench_quantile(operator_us, count, 0.5),
                            .p10_us = bench_quantile(operator_us, count, 0.1),
                            .p90_us = bench_quantile(operator_us, count, 0.9),
                            .floor_us = bench_quantile(copy_us, count, 0.5)};
    free(operator_us);
    return result;
}

/* ---- rows ------------------------------------------------------------------------------------------------------- */

static void print_json(const struct bench *bench, const char *name, const struct bench_result *result,
                       const normfuse_information *info, bool warm)
{
    const struct problem_line *line = &bench->line;
    char shape[128], date[32];
    int length = 0;
    for (int32_t i = 0; i < line->ndim; i++)
        length += snprintf(shape + length, sizeof shape - (size_t)length, "%s%" PRId64, i ? "x" : "", line->sizes[i]);
    time_t now = time(NULL);
    struct tm utc;
    gmtime_r(&now, &utc);
    strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", &utc);
    double bytes = (double)bench->tensor_bytes * bench->big_count;
    bool on_device = line->device == NORMFUSE_CUDA;
    json_open();
    json_string("problem", name);
    json_string("op", problem_operator_name(line->op));
    json_string("shape", shape);
    json_integer("groups", line->groups);
    json_string("dtype", problem_type_name(line->type));
    json_string("layout", line->channels_last ? "nhwc" : "nchw");
    json_string("act", problem_activation_name(line->activation));
    json_string("dir", line->backward ? "bwd" : "fwd");
    json_string("device", on_device ? "cuda" : "cpu");
    json_string("isa", on_device ? "cuda" : info->isa);
    json_integer("threads", bench->exec.threads);
    json_string("cache", warm ? "warm" : "cold");
    json_integer("samples", result->samples);
    json_number("median_us", result->median_us, 3);
    json_number("p10_us", result->p10_us, 3);
    json_number("p90_us", result->p90_us, 3);
    json_number("floor_us", result->floor_us, 3);
    json_number("ratio", result->median_us / result->floor_us, 4);
    json_integer("bytes", (int64_t)bytes);
    json_number("gbps", bytes / result->median_us * 1e-3, 3);
    json_string("version", info->version);
    json_string("commit", NORMFUSE_COMMIT);
    json_string("compiler", info->compiler);
    json_string("cpu", info->cpu);
    if (on_device) {
        const struct device_facts *gpu = device_facts();
        char capability[16];
        snprintf(capability, sizeof capability, "%" PRId32 ".%" PRId32, gpu->capability / 10, gpu->capability % 10);
        json_string("gpu", gpu->name);
        json_string("driver", gpu->driver);
        json_string("cc", capability);
        json_string("kernel", result->kernel);
        json_string("floor_kernel", result->floor_name);
        json_number("host_us", result->host_us, 3);
        json_string("impl", "normfuse");
    }
    json_string("date", date);
    json_close();
}

static void print_row(const struct bench *bench, const char *name, const struct bench_result *result)
{
    double bytes = (double)bench->tensor_bytes * bench->big_count;
    int digits = bench->line.device == NORMFUSE_CUDA ? 2 : 1;
    printf("%11.*f %11.*f %11.*f %11.*f %7.2f %8.2f %8" PRId64 "  %s", digits, result->median_us, digits,
           result->p10_us, digits, result->p90_us, digits, result->floor_us, result->median_us / result->floor_us,
           bytes / result->median_us * 1e-3, result->samples, name);
    if (bench->line.device == NORMFUSE_CUDA)
        printf("  [host %.2f us; %s; floor %s]", result->host_us, result->kernel, result->floor_name);
    putchar('\n');
}

static int bench_main(const struct arguments *arguments)
{
    size_t count;
    struct problem_line *lines = problems_read(arguments, &count);
    normfuse_information info = {.struct_bytes = sizeof info};
    normfuse_status status = normfuse_info(&info);
    if (status != NORMFUSE_OK)
        report_refusal("bench", "normfuse_info", status);
    int threads = (int)arguments_number(arguments, OPTION_THREADS, 1, THREADS_MAX, info.threads);
    int64_t samples = arguments_number(arguments, OPTION_SAMPLES, 1, 1000000, 0);
    bool warm = arguments_has(arguments, OPTION_WARM);
    bool json = arguments_has(arguments, OPTION_JSON);
    const struct problem_line *first_on_device = NULL, *first_on_cpu = NULL;
    for (size_t i = count; i-- > 0;)
        *(lines[i].device == NORMFUSE_CPU ? &first_on_cpu : &first_on_device) = &lines[i];
    char where[256] = "";
    if (first_on_device) {
        char name[512];
        problem_line_name(first_on_device, name, sizeof name);
        bench_device_open(name);
        snprintf(where, sizeof where, "%s, ", device_facts()->name);
    }
    if (first_on_cpu)
        snprintf(where + strlen(where), sizeof where - strlen(where), "%s, %d thread%s, ", info.isa, threads,
                 threads == 1 ? "" : "s");
    struct floor *floor = floor_create(threads);
    if (!floor)
        report_failure("threads", "%d threads cannot be started", threads);
    if (!json)
        printf("%11s %11s %11s %11s %7s %8s %8s  problem (%s%s)\n", "median us", "p10", "p90", "floor us", "ratio",
               "GB/s", "samples", where, warm ? "warm" : "cold");
    for (size_t i = 0; i < count; i++) {
        static struct bench bench;
        char name[512];
        double begin_us = bench_now_us();
        problem_line_name(&lines[i], name, sizeof name);
        struct bench_result result;
        bool on_device = lines[i].device == NORMFUSE_CUDA;
        if (on_device) {
            bench_device(&bench, &lines[i], name, samples, warm, &result);
        } else {
            make_bench(&bench, &lines[i], name, threads, floor, info.llc_bytes, warm);
            result = measure(&bench, floor, samples, begin_us);
        }
        if (json)
            print_json(&bench, name, &result, &info, warm);
        else
            print_row(&bench, name, &result);
        report_flush();
        if (!on_device)
            free_bench(&bench);
    }
    floor_destroy(floor);
    free(lines);
    return CODE_OK;
}
