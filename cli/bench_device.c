/* SPDX-License-Identifier: MIT
 *
 * bench_device.c - `normfuse bench` with device=cuda: graphs of calls on rotating tensors, replayed in turn with graphs
 * of the ways to move the same bytes.
 *
 * One graph holds a call for each set (several rounds of them where calls are short), so a replay reads nothing that an
 * earlier call left in the L2, and launches cost what they cost in a captured model. */
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench.h"
#include "device.h"
#include "floor_device.h"
#include "numbers.h"
#include "report.h"
#include "src/cuda/loader.h"

enum {
    ALIGNMENT = 256,
    CALLS_MOST = 4096, /* of a graph, and sets: instantiating more takes longer than it tells */
    WAYS_MOST = 1 + FLOOR_WAYS_MAX
};

/* In a library without CUDA. */
__attribute__((weak)) const char *normfuse_last_kernels(void)
{
    return "";
}

static const char *problem_name;

static void need(bool good)
{
    if (!good)
        report_failure(problem_name, "%s", device_error());
}

static void accept(normfuse_status status)
{
    if (status != NORMFUSE_OK)
        report_failure(problem_name, "%s: %s", normfuse_status_text(status), normfuse_last_error());
}

/* The memory of the largest problem, kept for all of them. */
static char *arena;

/* ---- tensors ---------------------------------------------------------------------------------------------------- */

static void choose_sets(struct bench *bench, bool warm)
{
    const int64_t least_bytes = INT64_C(240) << 20;
    int64_t rotated = 4 * (int64_t)device_facts()->l2_bytes;
    int64_t tensor = bench->tensor_bytes ? (int64_t)bench->tensor_bytes : 1;
    if (rotated < least_bytes)
        rotated = least_bytes;
    /* x alone fills the L2 four times: what is written may be kept elsewhere or not at all. */
    int64_t wanted = (rotated + tensor - 1) / tensor;
    wanted = wanted < 2 ? 2 : wanted > CALLS_MOST ? CALLS_MOST : wanted;
    bench->sets = warm ? 1 : wanted;
    size_t set_bytes = bench->tensor_stride * (size_t)(bench->reads + bench->writes);
    if (__builtin_mul_overflow(set_bytes, (size_t)bench->sets, &bench->arena_bytes) ||
        bench->arena_bytes > device_facts()->memory_bytes)
        report_failure(problem_name, "%" PRId64 " sets of %zu bytes are more than the memory of %s%s", bench->sets,
                       set_bytes, device_facts()->name, warm ? "" : "; --warm needs one");
}

void bench_device_open(const struct problem_line *lines, size_t count, bool warm)
{
    static char name[PROBLEM_NAME_BYTES];
    size_t most = 0;
    bool opened = false;
    for (size_t i = 0; i < count; i++) {
        struct bench bench;
        if (lines[i].device != NORMFUSE_CUDA)
            continue;
        problem_line_name(&lines[i], name, sizeof name);
        problem_name = name;
        if (!opened) {
            accept(normfuse_prepare(device_ordinal()));
            need(device_open() && floor_device_open());
            opened = true;
        }
        bench_describe(&bench, &lines[i], name, ALIGNMENT);
        choose_sets(&bench, warm);
        most = bench.arena_bytes > most ? bench.arena_bytes : most;
    }
    arena = device_allocate(most);
    need(arena != NULL);
}

/* The same numbers in every set, made of one piece of them. */
static void fill_sets(struct bench *bench)
{
    enum { PIECE_BYTES = 16 << 20 };
    double table[BENCH_TABLE_VALUES];
    size_t bytes = bench->tensor_bytes, piece = bytes < PIECE_BYTES ? bytes : PIECE_BYTES;
    size_t set_bytes = bench->tensor_stride * (size_t)(bench->reads + bench->writes);
    char *host = malloc(piece + 1);
    if (!host)
        report_failure("memory", "%s", strerror(errno));
    bench_make_table(bench->line.type, table);
    need(device_fill(bench->arena, 0, bench->arena_bytes));
    for (int i = 0; i < bench->reads; i++) {
        struct bench_filling filling = {.out = host,
                                        .type = bench->line.type,
                                        .salt = (uint64_t)i * 1000003,
                                        .table = table};
        char *first = bench->arena + (size_t)i * bench->tensor_stride;
        bench_fill(&filling, 0, piece);
        need(device_upload(first, host, piece));
        for (size_t done = piece; done < bytes;) {
            size_t more = bytes - done < done ? bytes - done : done;
            need(device_copy(first + done, first, more));
            done += more;
        }
        for (int64_t set = 1; set < bench->sets; set++)
            need(device_copy(first + (size_t)set * set_bytes, first, bytes));
    }
    need(device_wait());
    free(host);
}

static void upload_smalls(struct bench *bench)
{
    bench_make_smalls(bench);
    for (int i = 0; i < BENCH_SMALLS; i++) {
        if (!bench->small_data[i])
            continue;
        void *host = bench->small_data[i];
        bench->small_data[i] = device_allocate(bench->small_bytes[i]);
        need(bench->small_data[i] && device_upload(bench->small_data[i], host, bench->small_bytes[i]));
        bench->smalls[i].data = bench->small_data[i];
        bench->smalls[i].device = (normfuse_device){NORMFUSE_CUDA, device_ordinal()};
        free(host);
    }
}

static void take_memory(struct bench *bench)
{
    normfuse_exec *exec = &bench->exec;
    size_t bytes = 0;
    exec->stream = device_stream();
    accept(normfuse_sync_bytes(device_ordinal(), &exec->sync_bytes));
    exec->sync = device_allocate(exec->sync_bytes);
    need(exec->sync && device_fill(exec->sync, 0, exec->sync_bytes));
    bench_take_set(bench);
    if (bench->line.backward && bench_is_training(&bench->line)) {
        const normfuse_tensors tensors = bench_statistics_tensors(bench);
        accept(bench_call(bench, &tensors, false, &bytes));
    }
    exec->scratch_bytes = bytes;
    accept(bench_call(bench, &bench->tensors, bench->line.backward, &bytes));
    if (bytes > exec->scratch_bytes)
        exec->scratch_bytes = bytes;
    exec->scratch = device_allocate(exec->scratch_bytes);
    need(exec->scratch != NULL);
}

static void make_bench(struct bench *bench, const struct problem_line *line, bool warm)
{
    bench_describe(bench, line, problem_name, ALIGNMENT);
    choose_sets(bench, warm);
    bench->arena = arena;
    fill_sets(bench);
    upload_smalls(bench);
    take_memory(bench);
    if (line->backward && bench_is_training(line)) {
        const normfuse_tensors tensors = bench_statistics_tensors(bench);
        accept(bench_call(bench, &tensors, false, NULL));
    }
    need(device_wait());
}

static void free_bench(struct bench *bench)
{
    device_free(bench->exec.sync);
    device_free(bench->exec.scratch);
    for (int i = 0; i < BENCH_SMALLS; i++)
        device_free(bench->small_data[i]);
}

/* ---- timing ----------------------------------------------------------------------------------------------------- */

/* The calls that are timed: the operator, then the ways to move its bytes. */
struct timed {
    const char *name;
    struct device_graph *graph;
    double *us; /* of one call, a sample each */
};

/* way -1: the operator. */
static void enqueue(struct bench *bench, int way)
{
    const struct floor_streams streams = bench_take_set(bench);
    if (way < 0)
        accept(bench_call(bench, &bench->tensors, bench->line.backward, NULL));
    else
        need(floor_device_move(way, &streams, bench->tensor_bytes));
}

static struct device_graph *record(struct bench *bench, int way, int64_t calls)
{
    bench->next_set = 0;
    need(device_record_begin());
    for (int64_t i = 0; i < calls; i++)
        enqueue(bench, way);
    struct device_graph *graph = device_record_end();
    need(graph != NULL);
    return graph;
}

static double time_replay(struct device_graph *graph)
{
    need(device_clock_start() && device_replay(graph));
    double us = device_clock_stop();
    need(us >= 0);
    return us;
}

/* The median time of a call, from entry to enqueued, with room in the stream. */
static double time_host(struct bench *bench)
{
    enum { CALLS = 200, AT_ONCE = 50 };
    double us[CALLS];
    for (int i = 0; i < CALLS; i++) {
        if (i % AT_ONCE == 0)
            need(device_wait());
        bench_take_set(bench);
        double begin = bench_now_us();
        normfuse_status status = bench_call(bench, &bench->tensors, bench->line.backward, NULL);
        us[i] = bench_now_us() - begin;
        accept(status);
    }
    need(device_wait());
    bench_sort(us, CALLS);
    return bench_quantile(us, CALLS, 0.5);
}

/* How many calls a graph holds: one a set, and more where a replay would be too short for the clock. */
static int64_t choose_calls(struct bench *bench)
{
    const double replay_us = 200;
    int64_t calls = bench->sets;
    struct device_graph *graph = record(bench, -1, calls);
    (void)time_replay(graph);
    double us = time_replay(graph);
    device_graph_free(graph);
    if (us < replay_us)
        calls *= us > 0 ? (int64_t)ceil(replay_us / us) : CALLS_MOST;
    return calls > CALLS_MOST ? CALLS_MOST : calls;
}

static void measure(struct bench *bench, int64_t samples_wanted, struct bench_result *result)
{
    enum { SAMPLES_LEAST = 15, SAMPLES_MOST = 100 };
    const double warm_up_us = 40e3, usual_us = 300e3; /* of all that is timed */
    int timed_count = 1 + floor_device_ways(bench->reads, bench->writes);
    int64_t most = samples_wanted ? samples_wanted : SAMPLES_MOST, count = 0;
    double *us = malloc((size_t)timed_count * (size_t)most * sizeof *us);
    if (!us)
        report_failure("memory", "%s", strerror(errno));
    /* The first call, outside a graph: it shows what is refused, and by what it is run. */
    enqueue(bench, -1);
    snprintf(result->kernel, sizeof result->kernel, "%s", normfuse_last_kernels());
    need(device_wait());
    result->host_us = time_host(bench);
    int64_t calls = choose_calls(bench);
    struct timed timed[WAYS_MOST];
    for (int i = 0; i < timed_count; i++)
        timed[i] = (struct timed){.name = i ? floor_device_name(bench->reads, bench->writes, i - 1) : "",
                                  .graph = record(bench, i - 1, calls),
                                  .us = us + i * most};
    double spent = 0;
    while (spent < warm_up_us) /* clocks and address translations settle */
        for (int i = 0; i < timed_count; i++)
            spent += time_replay(timed[i].graph);
    for (spent = 0; count < most && (samples_wanted || count < SAMPLES_LEAST || spent < usual_us); count++)
        for (int i = 0; i < timed_count; i++) {
            double replay = time_replay(timed[i].graph);
            timed[i].us[count] = replay / (double)calls;
            spent += replay;
        }
    for (int i = 0; i < timed_count; i++) {
        device_graph_free(timed[i].graph);
        bench_sort(timed[i].us, count);
    }
    result->samples = count;
    result->median_us = bench_quantile(timed[0].us, count, 0.5);
    result->p10_us = bench_quantile(timed[0].us, count, 0.1);
    result->p90_us = bench_quantile(timed[0].us, count, 0.9);
    result->floor_us = (double)INFINITY;
    for (int i = 1; i < timed_count; i++) {
        double median = bench_quantile(timed[i].us, count, 0.5);
        if (median < result->floor_us) {
            result->floor_us = median;
            result->floor_name = timed[i].name;
        }
    }
    free(us);
}

void bench_device(struct bench *bench, const struct problem_line *line, const char *name, int64_t samples, bool warm,
                  struct bench_result *result)
{
    problem_name = name;
    *result = (struct bench_result){.floor_name = ""};
    make_bench(bench, line, warm);
    measure(bench, samples, result);
    free_bench(bench);
}
