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
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "bench.h"
#include "bench_page.h"
#include "commands.h"
#include "device.h"
#include "floor.h"
#include "json.h"
#include "numbers.h"
#include "problems.h"
#include "report.h"

enum { ALIGNMENT = 64 };

#ifndef NORMFUSE_COMMIT
#define NORMFUSE_COMMIT "unknown"
#endif

enum { OPTION_JSON = PROBLEMS_OPTIONS, OPTION_WARM, OPTION_SAMPLES, OPTION_THREADS, OPTION_HTML, OPTION_COUNT };

static const struct option options[OPTION_COUNT] = {
    PROBLEMS_OPTION_TABLE("Draw with this number (default 1)."),
    [OPTION_JSON] = {"json", 'j', NULL, "Print one JSON object a problem, each on one line of standard output."},
    [OPTION_WARM] = {"warm", 'w', NULL, "Use the same tensors again and again, so that what fits in the caches stays "
                     "there. Without it tensors rotate through at least four times the last-level cache (GPU: the "
                     "L2)."},
    [OPTION_SAMPLES] = {"samples", 'n', "N", "Take N samples, however long it takes. Without it: at least 30 where "
                        "10 seconds for the problem allow, and at least 3; with --random 15 where 1.5 seconds allow. "
                        "On a GPU: at least 15."},
    [OPTION_THREADS] = {"threads", 0, "N", "Use N threads, for the copy too. Default: what 'normfuse info' says."},
    [OPTION_HTML] = {"html", 0, "FILE", "Also write a page to FILE: the machine, a roofline, and the rows with the "
                     "numbers of --json. It is one file, which needs no network, and appears when all problems are "
                     "timed, or at Ctrl-C with those that are."},
};

static int bench_main(const struct arguments *arguments);

const struct command bench_command = {
    .name = "bench",
    .summary = "time problems beside the copy floor",
    .synopsis = "bench PROBLEM... [--json] [--warm] [--samples N] [--threads N] [--html FILE]\n"
                "         [--list]\n"
                "bench --random N [device=cuda] [--min-bytes BYTES] [--max-bytes BYTES] [--seed N]\n",
    .description = "Times each problem and, in turn with it, the floor: as many tensors of x's size as the\n"
                   "problem must read and write, moved with non-temporal stores and the same threads. The\n"
                   "ratio of the medians says how far the operator is from what the machine's memory allows.\n"
                   "It changes far less than times do from one moment, and one machine, to the next.\n"
                   "\n"
                   "    forward    reads x [pre_add] [post_add]                writes y [u]\n"
                   "    backward   reads x [pre_add] dy [post_add] [+u: du]    writes dx [dpost_add]\n"
                   "\n"
                   "A backward with +u is given the u that the forward wrote, in place of x and pre_add. One\n"
                   "without an activation needs no post_add, whose gradient then is dy.\n"
                   "\n"
                   "device=cuda: a sample is a replay of a graph that holds a call for each of the sets of\n"
                   "tensors. At least 15 samples follow 40 ms of warm-up. The copy is the fastest of the\n"
                   "driver's and several kernels, each replayed in turn with the problem over the same sets.\n"
                   "\n"
                   "A forward has weight and bias and writes the mean and rstd that a backward needs. Batch\n"
                   "norm in training updates running statistics, too.\n"
                   "\n"
                   "--random draws problems over everything that the library does: every operator, dtype,\n"
                   "layout, activation and addition, tensors log-uniform between two sizes, zero to three\n"
                   "spatial axes. A problem's line is one that bench and check take again.\n",
    .options = options,
    .option_count = OPTION_COUNT,
    .sections =
        {problem_help, "OUTPUT\n"
                       "    Times are microseconds a call. --json rows have the members problem, op, shape, groups,\n"
                       "    dtype, layout, act, dir, device, isa, threads, cache (cold or warm), samples, median_us,\n"
                       "    p10_us, p90_us, floor_us (the floor's median), ratio (median_us / floor_us), bytes\n"
                       "    (that the floor moves), gbps (bytes in median_us), version, commit, compiler, cpu, and\n"
                       "    date, in UTC. device=cuda: isa is cuda, threads 0, and there are further gpu, driver,\n"
                       "    cc, kernel (those that the call launched), floor_kernel (the fastest one), host_us (the\n"
                       "    host's time for one call) and impl.\n"
                       "\n"
                       "    --random ends with a line, or row, for each direction, with the members summary\n"
                       "    (random), seed, dir, problems, geomean, p90 and worst (of the ratios), worst_problem,\n"
                       "    over_us (the greatest median_us - 4 * floor_us), min_bytes, max_bytes, device, isa,\n"
                       "    threads, cache, commit, cpu, date; device=cuda: gpu.\n"
                       "\n"
                       "EXAMPLES\n"
                       "    normfuse bench group_norm 128x256x28x28 groups=32 --threads 2\n"
                       "    normfuse bench @problems.txt --json > rows.jsonl\n"
                       "    normfuse bench @problems.txt --html report.html\n"
                       "    normfuse bench group_norm 2x320x64x64 groups=32 dtype=f16 layout=nhwc device=cuda\n"
                       "    normfuse bench --random 150 --seed 3 --min-bytes 1MiB --max-bytes 64MiB --json\n"},
    .main = bench_main,
};

/* ---- one problem in memory -------------------------------------------------------------------------------------- */

/* Bytes that may be taken without swapping; 0: the system does not say. */
static uint64_t available_memory(void)
{
    FILE *file = fopen("/proc/meminfo", "r");
    char entry[128];
    uint64_t kib = 0;
    while (file && fgets(entry, sizeof entry, file) && sscanf(entry, "MemAvailable: %" SCNu64, &kib) != 1)
        kib = 0;
    if (file)
        fclose(file);
    return kib * 1024;
}

static void choose_sets(struct bench *bench, const char *name, int64_t llc_bytes, bool warm)
{
    size_t set_bytes = bench->tensor_stride * (size_t)(bench->reads + bench->writes);
    if (llc_bytes <= 0)
        llc_bytes = INT64_C(32) << 20;
    int64_t wanted = set_bytes ? (4 * llc_bytes + (int64_t)set_bytes - 1) / (int64_t)set_bytes : 1;
    bench->sets = warm ? 1 : wanted < 2 ? 2 : wanted;
    if (__builtin_mul_overflow(set_bytes, (size_t)bench->sets, &bench->arena_bytes))
        report_failure(name, "the sizes of %" PRId64 " sets overflow", bench->sets);
}

/* The memory of the largest problem, kept for all of them: on a huge page's boundary in a mapping. */
static char *arena;

/* Ends the program before the first problem is timed if one of them does not fit. */
static void open_arena(const struct problem_line *lines, size_t count, int64_t llc_bytes, bool warm)
{
    enum { HUGE_PAGE = 2 << 20 };
    uint64_t memory = available_memory() / 10 * 9;
    size_t most = 0;
    for (size_t i = 0; i < count; i++) {
        struct bench bench;
        char name[PROBLEM_NAME_BYTES];
        if (lines[i].device != NORMFUSE_CPU)
            continue;
        problem_line_name(&lines[i], name, sizeof name);
        bench_describe(&bench, &lines[i], name, ALIGNMENT);
        choose_sets(&bench, name, llc_bytes, warm);
        if (memory && bench.arena_bytes > memory)
            report_failure(name, "%" PRId64 " sets of %zu bytes are more than this machine's free memory%s", bench.sets,
                           bench.arena_bytes / (size_t)bench.sets, warm ? "" : "; --warm needs one");
        most = bench.arena_bytes > most ? bench.arena_bytes : most;
    }
    size_t bytes = most + HUGE_PAGE;
    char *mapped = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED)
        report_failure("memory", "%zu bytes for the tensors: %s", bytes, strerror(errno));
    /* The operator and the copy use the same pages; small ones would cost both address translations. */
    (void)madvise(mapped, bytes, MADV_HUGEPAGE);
    arena = mapped + (HUGE_PAGE - (uintptr_t)mapped % HUGE_PAGE) % HUGE_PAGE;
}

static void fill_arena(struct bench *bench, struct floor *floor)
{
    int count = bench->reads + bench->writes;
    double table[BENCH_TABLE_VALUES];
    bench_make_table(bench->line.type, table);
    floor_wake(floor);
    for (int64_t set = 0; set < bench->sets; set++)
        for (int i = 0; i < count; i++) {
            struct bench_filling filling = {
                .out = bench->arena + ((size_t)set * (size_t)count + (size_t)i) * bench->tensor_stride,
                .type = bench->line.type,
                .salt = (uint64_t)i * 1000003,
                .table = table};
            floor_run(floor, bench->tensor_bytes, bench_fill, &filling);
        }
    floor_rest(floor);
}

static void make_bench(struct bench *bench, const struct problem_line *line, const char *name, int threads,
                       struct floor *floor, int64_t llc_bytes, bool warm)
{
    bench_describe(bench, line, name, ALIGNMENT);
    bench->exec.threads = threads;
    choose_sets(bench, name, llc_bytes, warm);
    bench->arena = arena;
    fill_arena(bench, floor);
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
    for (int i = 0; i < BENCH_SMALLS; i++)
        free(bench->small_data[i]);
}

/* ---- interruption ------------------------------------------------------------------------------------------------ */

static volatile sig_atomic_t interrupted;
static struct sigaction before_bench;

/* The first Ctrl-C ends the measurement, a second one the program. */
static void interrupt(int number)
{
    if (interrupted) {
        (void)sigaction(number, &before_bench, NULL);
        (void)raise(number);
    }
    interrupted = 1;
}

static void catch_interrupt(void)
{
    struct sigaction action = {.sa_handler = interrupt, .sa_flags = SA_RESTART};
    (void)sigemptyset(&action.sa_mask);
    (void)sigaction(SIGINT, NULL, &before_bench);
    if (before_bench.sa_handler != SIG_IGN)
        (void)sigaction(SIGINT, &action, NULL);
}

/* Ends the program as an interrupted one where there was a Ctrl-C. */
static void pass_interrupt_on(size_t finished, size_t count)
{
    if (!interrupted)
        return;
    fprintf(stderr, "normfuse bench: interrupted, %zu of %zu problems are timed\n", finished, count);
    (void)sigaction(SIGINT, &before_bench, NULL);
    (void)raise(SIGINT);
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
        const struct floor_streams streams = bench_take_set(bench);
        floor_move(floor, &streams, bench->tensor_bytes);
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

/* All that a problem may take, and what it takes when `samples` are had sooner. */
struct effort {
    int64_t samples;
    double usual_us, budget_us;
};
static const struct effort named_effort = {30, 1.5e6, 9e6}, drawn_effort = {15, 0.4e6, 1.5e6};

static struct bench_result measure(struct bench *bench, struct floor *floor, const struct effort *effort,
                                   int64_t samples_wanted, double begin_us)
{
    enum { SAMPLES_LEAST = 3, SAMPLES_MOST = 400 };
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
    while (count < most && (!interrupted || count == 0)) {
        double spent_us = bench_now_us() - begin_us;
        if (!samples_wanted && count >= SAMPLES_LEAST &&
            (spent_us + pair_us > effort->budget_us || (count >= effort->samples && spent_us > effort->usual_us)))
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

static void format_date(char *date, size_t bytes)
{
    time_t now = time(NULL);
    struct tm utc;
    gmtime_r(&now, &utc);
    strftime(date, bytes, "%Y-%m-%dT%H:%M:%SZ", &utc);
}

static void print_json(const struct bench *bench, const char *name, const struct bench_result *result,
                       const normfuse_information *info, bool warm)
{
    const struct problem_line *line = &bench->line;
    char shape[128], date[32];
    int length = 0;
    for (int32_t i = 0; i < line->ndim; i++)
        length += snprintf(shape + length, sizeof shape - (size_t)length, "%s%" PRId64, i ? "x" : "", line->sizes[i]);
    format_date(date, sizeof date);
    double bytes = bench_bytes(bench);
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
    double bytes = bench_bytes(bench);
    int digits = bench->line.device == NORMFUSE_CUDA ? 2 : 1;
    printf("%11.*f %11.*f %11.*f %11.*f %7.2f %8.2f %8" PRId64 "  %s", digits, result->median_us, digits,
           result->p10_us, digits, result->p90_us, digits, result->floor_us, result->median_us / result->floor_us,
           bytes / result->median_us * 1e-3, result->samples, name);
    if (bench->line.device == NORMFUSE_CUDA)
        printf("  [host %.2f us; %s; floor %s]", result->host_us, result->kernel, result->floor_name);
    putchar('\n');
}

/* ---- what was drawn ---------------------------------------------------------------------------------------------- */

bool bench_summarize(const struct bench_row *rows, size_t count, int32_t device, bool backward,
                     struct bench_summary *summary)
{
    double *ratios = malloc(count * sizeof *ratios), logs = 0;
    if (!ratios)
        report_failure("memory", "%s", strerror(errno));
    *summary = (struct bench_summary){.over_us = -(double)INFINITY};
    for (const struct bench_row *row = rows; row < rows + count; row++) {
        if (row->line->backward != backward || row->line->device != device)
            continue;
        double ratio = row->result.median_us / row->result.floor_us;
        ratios[summary->problems++] = ratio;
        logs += log(ratio);
        summary->over_us = fmax(summary->over_us, row->result.median_us - 4 * row->result.floor_us);
        if (!summary->worst_line || ratio > summary->worst) {
            summary->worst = ratio;
            summary->worst_line = row->line;
        }
    }
    if (summary->problems > 0) {
        bench_sort(ratios, summary->problems);
        summary->geomean = exp(logs / (double)summary->problems);
        summary->p90 = bench_quantile(ratios, summary->problems, 0.9);
    }
    free(ratios);
    return summary->problems > 0;
}

static void print_summary(const struct problems *problems, const struct bench_row *rows, bool backward, int threads,
                          const normfuse_information *info, bool warm, bool json)
{
    bool on_device = rows[0].line->device == NORMFUSE_CUDA; /* all of them are drawn for one device */
    struct bench_summary summary;
    if (!bench_summarize(rows, problems->count, rows[0].line->device, backward, &summary))
        return;
    const char *direction = backward ? "bwd" : "fwd";
    char name[PROBLEM_NAME_BYTES], date[32];
    problem_line_name(summary.worst_line, name, sizeof name);
    if (!json) {
        printf("random seed %" PRId64 ", %" PRId64 " %s: geometric mean %.2f, p90 %.2f, worst %.2f: %s\n",
               problems->seed, summary.problems, direction, summary.geomean, summary.p90, summary.worst, name);
        return;
    }
    format_date(date, sizeof date);
    json_open();
    json_string("summary", "random");
    json_integer("seed", problems->seed);
    json_string("dir", direction);
    json_integer("problems", summary.problems);
    json_number("geomean", summary.geomean, 4);
    json_number("p90", summary.p90, 4);
    json_number("worst", summary.worst, 4);
    json_string("worst_problem", name);
    json_number("over_us", summary.over_us, 3);
    json_integer("min_bytes", problems->least_bytes);
    json_integer("max_bytes", problems->most_bytes);
    json_string("device", on_device ? "cuda" : "cpu");
    json_string("isa", on_device ? "cuda" : info->isa);
    json_integer("threads", on_device ? 0 : threads);
    json_string("cache", warm ? "warm" : "cold");
    json_string("commit", NORMFUSE_COMMIT);
    json_string("cpu", info->cpu);
    if (on_device)
        json_string("gpu", device_facts()->name);
    json_string("date", date);
    json_close();
}

static int bench_main(const struct arguments *arguments)
{
    struct problems problems = problems_read(arguments, false, false);
    const struct problem_line *lines = problems.lines;
    size_t count = problems.count;
    normfuse_information info = {.struct_bytes = sizeof info};
    normfuse_status status = normfuse_info(&info);
    if (status != NORMFUSE_OK)
        report_refusal("bench", "normfuse_info", status);
    int threads = (int)arguments_number(arguments, OPTION_THREADS, 1, THREADS_MAX, info.threads);
    int64_t samples = arguments_number(arguments, OPTION_SAMPLES, 1, 1000000, 0);
    bool warm = arguments_has(arguments, OPTION_WARM);
    bool json = arguments_has(arguments, OPTION_JSON);
    struct output *page = arguments_has(arguments, OPTION_HTML) ? output_open(arguments->values[OPTION_HTML], 0) : NULL;
    bool any_on_device = false, any_on_cpu = false;
    for (size_t i = 0; i < count; i++)
        *(lines[i].device == NORMFUSE_CPU ? &any_on_cpu : &any_on_device) = true;
    char where[256] = "";
    if (any_on_device) {
        bench_device_open(lines, count, warm);
        snprintf(where, sizeof where, "%s, ", device_facts()->name);
    }
    if (any_on_cpu) {
        open_arena(lines, count, info.llc_bytes, warm);
        snprintf(where + strlen(where), sizeof where - strlen(where), "%s, %d thread%s, ", info.isa, threads,
                 threads == 1 ? "" : "s");
    }
    struct floor *floor = floor_create(threads);
    if (!floor)
        report_failure("threads", "%d threads cannot be started", threads);
    struct bench_row *rows = calloc(count, sizeof *rows);
    if (!rows)
        report_failure("memory", "%s", strerror(errno));
    if (!json)
        printf("%11s %11s %11s %11s %7s %8s %8s  problem (%s%s)\n", "median us", "p10", "p90", "floor us", "ratio",
               "GB/s", "samples", where, warm ? "warm" : "cold");
    const bool shows_progress = isatty(STDERR_FILENO) && count > 1;
    size_t finished = 0;
    catch_interrupt();
    for (; finished < count; finished++) {
        static struct bench bench;
        const size_t i = finished;
        char name[PROBLEM_NAME_BYTES], progress[PROBLEM_NAME_BYTES + 48];
        double begin_us = bench_now_us();
        problem_line_name(&lines[i], name, sizeof name);
        if (shows_progress) {
            snprintf(progress, sizeof progress, "%zu/%zu %s", i + 1, count, name);
            report_progress(progress);
        }
        struct bench_result result;
        bool on_device = lines[i].device == NORMFUSE_CUDA;
        if (on_device) {
            bench_device(&bench, &lines[i], name, samples, warm, &result);
        } else {
            make_bench(&bench, &lines[i], name, threads, floor, info.llc_bytes, warm);
            result = measure(&bench, floor, problems.drawn ? &drawn_effort : &named_effort, samples,
                             problems.drawn ? bench_now_us() : begin_us);
        }
        report_progress(NULL);
        if (interrupted) /* this problem's samples are too few */
            break;
        if (json)
            print_json(&bench, name, &result, &info, warm);
        else
            print_row(&bench, name, &result);
        report_flush();
        rows[i] = (struct bench_row){&lines[i], bench_bytes(&bench), result};
        if (!on_device)
            free_bench(&bench);
    }
    for (int backward = 0; problems.drawn && finished == count && backward < 2; backward++)
        print_summary(&problems, rows, backward, threads, &info, warm, json);
    if (finished == 0)
        pass_interrupt_on(finished, count);
    if (page) {
        char date[32];
        format_date(date, sizeof date);
        const struct bench_page contents = {arguments, &info, rows, finished, NORMFUSE_COMMIT, date, threads, warm};
        bench_page_write(page, &contents);
        report_flush();
        outputs_commit(false);
    }
    pass_interrupt_on(finished, count);
    floor_destroy(floor);
    free(rows);
    free(problems.lines);
    return report_finish(CODE_OK);
}
