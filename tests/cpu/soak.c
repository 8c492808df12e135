/* SPDX-License-Identifier: MIT
 *
 * soak.c - random small calls from several threads for a long time: every result has the bits of the first one, and
 * memory does not grow.
 *
 *   soak [--calls N] [--threads N] [--seed N] [--device cpu|cuda]
 *
 * Problems are drawn from the seed. Each is compared with the double reference (cli/verify.h), then run alone: these
 * are its bits. On the CPU threads call in different ways: through the built-in pool, through their own, with
 * their own scratch, and from children of a fork. On a GPU they share 8 streams, where graphs are replayed beside eager
 * calls and captured anew while others call. Memory is read between batches: after the first ones it may grow by less
 * than 1 MiB. */
#define _GNU_SOURCE
#include <errno.h>
#include <inttypes.h>
#include <malloc.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cli/device.h"
#include "cli/operator_call.h"
#include "cli/verify.h"
#include "harness.h"
#include "normfuse.h"
#include "ref/reference.h"

#if defined(NORMFUSE_HAVE_CUDA)
#include <dlfcn.h>

#include "cli/driver_functions.h"
#endif

enum {
    JOBS = 160,
    STREAMS = 8,
    MAX_THREADS = 16,
    MAX_CALL_THREADS = 4, /* of one call */
    BATCHES = 20,
    WARM_BATCHES = 4,
    CALLS_PER_FORK = 500, /* of a thread that forks */
    CALLS_OF_CHILD = 20,
    SLOTS = 16, /* results of a stream, compared together; the first GRAPHS are written by graphs */
    GRAPHS = 8,
    LARGE_VALUES = 1 << 16, /* two threads or more */
    STUCK_SECONDS = 60,
    GUARD_BYTES = 256,
    UNWRITTEN = 0xAB,
    MAX_GROWTH = 1 << 20
};

static bool on_cuda;
static _Atomic int64_t calls_left, calls_done;
static _Atomic int failures;

__attribute__((format(printf, 1, 2))) static void fail(const char *format, ...)
{
    if (atomic_fetch_add(&failures, 1) >= 20)
        return; /* the first ones tell */
    va_list list;
    va_start(list, format);
    char text[500];
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    printf("FAIL %s\n", text);
    fflush(stdout);
}

/* Calls that wait for ever end the program. */
static void watch(int signal_number)
{
    static int64_t seen = -1;
    static const char text[] = "FAIL no call has ended for a minute\n0 passed, 1 failed, 0 skipped\n";
    (void)signal_number;
    const int64_t now = atomic_load(&calls_done);
    if (now == seen) {
        (void)!write(STDOUT_FILENO, text, sizeof text - 1);
        _exit(1);
    }
    seen = now;
    alarm(STUCK_SECONDS);
}

/* The program's first GPU. */
static void need(bool good)
{
    if (good)
        return;
    fail("%s", device_error());
    harness_failed++;
    exit(harness_close());
}

/* ---- random numbers --------------------------------------------------------------------------------------------- */

static uint64_t next(uint64_t *state)
{
    *state += 0x9E3779B97F4A7C15u;
    uint64_t h = *state;
    h = (h ^ h >> 30) * 0xBF58476D1CE4E5B9u;
    h = (h ^ h >> 27) * 0x94D049BB133111EBu;
    return h ^ h >> 31;
}

static int64_t below(uint64_t *state, int64_t bound)
{
    return (int64_t)(next(state) % (uint64_t)bound);
}

/* ---- jobs ------------------------------------------------------------------------------------------------------- */

/* A problem and its inputs, which all threads read. Results lie together: y or dx, then mean and rstd or dweight and
 * dbias. */
struct job {
    struct problem_line line;
    char name[200];
    char *in; /* on the device */
    size_t in_at[7], out_at[4]; /* x, dy, weight, bias, mean, rstd, end; results, end */
    normfuse_type statistic_type;
    size_t scratch_bytes;
    char *want[2]; /* a GPU's bits may differ without sync memory and with it: [1], which the CPU does not have */
};

static struct job jobs[JOBS];
static size_t most_out_bytes, most_scratch_bytes;

static size_t aligned(size_t bytes)
{
    return (bytes + 63) / 64 * 64;
}

/* Mostly a few hundred values, now and then enough for several threads. */
static struct problem_line draw_line(uint64_t *state)
{
    const enum problem_operator op = (enum problem_operator)below(state, 4);
    struct problem_line line = problem_line_default(op);
    line.ndim = 2 + (int32_t)below(state, 4);
    line.sizes[0] = 1 + below(state, 4);
    line.sizes[1] = 1 + below(state, 24);
    int64_t values = line.sizes[0] * line.sizes[1];
    for (int a = 2; a < line.ndim; a++)
        values *= line.sizes[a] = 1 + below(state, line.ndim == 3 ? 40 : 6);
    if (below(state, 24) == 0)
        line.sizes[line.ndim == 2 ? 0 : line.ndim - 1] *= (LARGE_VALUES + below(state, LARGE_VALUES)) / values + 1;
    if (op == BATCH_NORM)
        line.sizes[0]++; /* more than one value a channel */
    do
        line.groups = op == GROUP_NORM ? 1 + below(state, line.sizes[1]) : op == INSTANCE_NORM ? line.sizes[1] : 0;
    while (op == GROUP_NORM && line.sizes[1] % line.groups != 0);
    line.type = (normfuse_type)below(state, 4);
    line.weight_type = (normfuse_type)below(state, 4);
    line.channels_last = below(state, 2);
    line.activation = (int32_t)below(state, NORMFUSE_PRELU + 1);
    line.act_param = reference_default_parameter(line.activation);
    line.evaluate = op == BATCH_NORM && below(state, 4) == 0;
    line.per_sample = op == AFFINE && below(state, 2);
    line.backward = below(state, 2);
    line.device = on_cuda ? NORMFUSE_CUDA : NORMFUSE_CPU;
    return line;
}

struct call {
    normfuse_tensor x, dy, y, weight, bias, dweight, dbias, mean, rstd, slope;
    normfuse_axes axes[10];
    normfuse_tensors tensors;
};

static normfuse_tensor small_tensor(const struct job *job, void *data, normfuse_type type, int64_t rows, int64_t count,
                                    normfuse_axes *axes)
{
    normfuse_tensor tensor =
        rows != 0 ? normfuse_tensor_contiguous(data, type, 2, (int64_t[]){rows, count}, axes)
                  : normfuse_tensor_contiguous(data, type, 1, &count, axes);
    tensor.device.device_type = job->line.device;
    return tensor;
}

static normfuse_tensor big_tensor(const struct job *job, void *data, normfuse_axes *axes)
{
    const struct problem_line *const line = &job->line;
    normfuse_tensor tensor =
        (line->channels_last ? normfuse_tensor_channels_last
                             : normfuse_tensor_contiguous)(data, line->type, line->ndim, line->sizes, axes);
    tensor.device.device_type = line->device;
    return tensor;
}

static int64_t statistics_of(const struct problem_line *line)
{
    return line->op == AFFINE ? 0 : line->op == BATCH_NORM ? line->sizes[1] : line->sizes[0] * line->groups;
}

/* The tensors of a call that writes to `out`. */
static void bind(struct call *call, const struct job *job, char *out)
{
    const struct problem_line *const line = &job->line;
    const int64_t c = line->sizes[1], sets = statistics_of(line), rows = line->per_sample ? line->sizes[0] : 0;
    call->x = big_tensor(job, job->in + job->in_at[0], &call->axes[0]);
    call->dy = big_tensor(job, job->in + job->in_at[1], &call->axes[1]);
    call->weight = small_tensor(job, job->in + job->in_at[2], line->weight_type, rows, c, &call->axes[2]);
    call->bias = small_tensor(job, job->in + job->in_at[3], line->weight_type, rows, c, &call->axes[3]);
    call->y = big_tensor(job, out + job->out_at[0], &call->axes[4]);
    call->tensors = (normfuse_tensors){
        .struct_bytes = sizeof call->tensors, .x = &call->x, .weight = &call->weight, .bias = &call->bias};
    if (line->activation == NORMFUSE_PRELU) { /* the biases' first values */
        call->slope = small_tensor(job, job->in + job->in_at[3], line->weight_type, 0, c, &call->axes[9]);
        call->tensors.slope = &call->slope;
    }
    if (line->backward) {
        call->dweight = small_tensor(job, out + job->out_at[1], line->weight_type, rows, c, &call->axes[5]);
        call->dbias = small_tensor(job, out + job->out_at[2], line->weight_type, rows, c, &call->axes[6]);
        call->tensors.dy = &call->dy;
        call->tensors.dx = &call->y;
        call->tensors.dweight = &call->dweight;
        *(call->tensors.slope && rows == 0 ? &call->tensors.dslope : &call->tensors.dbias) = &call->dbias;
    } else {
        call->tensors.y = &call->y;
    }
    if (line->op == AFFINE)
        return;
    const bool given = line->backward || line->evaluate;
    call->mean = small_tensor(job, given ? job->in + job->in_at[4] : out + job->out_at[1], job->statistic_type, 0, sets,
                              &call->axes[7]);
    call->rstd = small_tensor(job, given ? job->in + job->in_at[5] : out + job->out_at[2], job->statistic_type, 0, sets,
                              &call->axes[8]);
    *(line->evaluate ? &call->tensors.running_mean : &call->tensors.mean) = &call->mean;
    *(line->evaluate ? &call->tensors.running_var : &call->tensors.rstd) = &call->rstd;
}

static normfuse_status invoke(const struct job *job, const struct call *call, const normfuse_exec *exec, size_t *bytes)
{
    return operator_call(&job->line, job->line.backward, &call->tensors, exec, bytes);
}

static void *allocate(size_t bytes)
{
    void *data = on_cuda ? device_allocate(bytes) : aligned_alloc(64, aligned(bytes + 1));
    if (on_cuda)
        need(data != NULL);
    else if (data == NULL)
        abort();
    return data;
}

static void give_back(void *data)
{
    if (on_cuda)
        device_free(data);
    else
        free(data);
}

/* One call of a job, from the main thread, into memory of its own. */
static void run_alone(const struct job *job, bool with_sync, char *results)
{
    struct call call;
    const size_t bytes = job->out_at[3];
    char *const out = allocate(bytes), *const scratch = job->scratch_bytes ? allocate(job->scratch_bytes) : NULL;
    size_t sync_bytes = 0;
    if (with_sync)
        CHECK(normfuse_sync_bytes(0, &sync_bytes) == NORMFUSE_OK, "%s", normfuse_last_error());
    char *const sync = with_sync ? allocate(sync_bytes) : NULL;
    if (with_sync)
        need(device_fill(sync, 0, sync_bytes));
    memset(results, UNWRITTEN, bytes);
    if (on_cuda)
        need(device_upload(out, results, bytes));
    else
        memcpy(out, results, bytes);
    bind(&call, job, out);
    const normfuse_exec exec = {.struct_bytes = sizeof exec,
                                .stream = on_cuda ? device_stream() : NULL,
                                .scratch = scratch,
                                .scratch_bytes = job->scratch_bytes,
                                .threads = 1,
                                .sync = sync,
                                .sync_bytes = sync_bytes};
    CHECK(invoke(job, &call, &exec, NULL) == NORMFUSE_OK, "%s: %s", job->name, normfuse_last_error());
    if (on_cuda)
        need(device_download(results, out, bytes));
    else
        memcpy(results, out, bytes);
    give_back(sync);
    give_back(scratch);
    give_back(out);
}

static void make_job(struct job *job, uint64_t *state)
{
    job->line = draw_line(state);
    const struct problem_line *const line = &job->line;
    problem_line_name(line, job->name, sizeof job->name);
    struct verify_result result;
    const struct verify_options options = {.seed = next(state), .reference_threads = 1};
    CHECK(verify_problem(line, &options, &result) == VERIFY_PASSED, "%s: %s", job->name, result.message);

    job->statistic_type = line->type == NORMFUSE_F64 ? NORMFUSE_F64 : NORMFUSE_F32;
    size_t big = reference_type_bytes(line->type), small = reference_type_bytes(line->weight_type);
    for (int a = 0; a < line->ndim; a++)
        big *= (size_t)line->sizes[a];
    big = aligned(big);
    small = aligned(small * (size_t)(line->sizes[1] * (line->per_sample ? line->sizes[0] : 1)));
    const size_t saved = aligned(reference_type_bytes(job->statistic_type) * (size_t)statistics_of(line));
    const size_t in[] = {big, big, small, small, saved, saved}, out[] = {big, line->backward ? small : saved};
    for (int i = 0; i < 6; i++)
        job->in_at[i + 1] = job->in_at[i] + in[i];
    for (int i = 0; i < 3; i++)
        job->out_at[i + 1] = job->out_at[i] + out[i > 0];

    char *const values = malloc(job->in_at[6]);
    char *const again = malloc(job->out_at[3]);
    if (!values || !again)
        abort();
    for (int part = 0; part < 6; part++) {
        const normfuse_type type = part < 2 ? line->type : part < 4 ? line->weight_type : job->statistic_type;
        for (size_t at = job->in_at[part]; at < job->in_at[part + 1]; at += reference_type_bytes(type)) {
            const double random = (double)(next(state) >> 11) * 0x1p-53;
            reference_store(values + at, type, part == 5 ? 0.5 + random : part == 4 ? 0.1 * random : 2 * random - 0.9);
        }
    }
    job->in = allocate(job->in_at[6]);
    if (on_cuda)
        need(device_upload(job->in, values, job->in_at[6]));
    else
        memcpy(job->in, values, job->in_at[6]);
    free(values);

    struct call call;
    char *const out_memory = allocate(job->out_at[3]);
    bind(&call, job, out_memory);
    for (int32_t count = 1; count <= MAX_CALL_THREADS; count++) {
        const normfuse_exec exec = {.struct_bytes = sizeof exec, .threads = count};
        size_t bytes = 0;
        CHECK(invoke(job, &call, &exec, &bytes) == NORMFUSE_OK, "%s: %s", job->name, normfuse_last_error());
        if (bytes > job->scratch_bytes)
            job->scratch_bytes = bytes;
    }
    give_back(out_memory);
    for (int with_sync = 0; with_sync <= on_cuda; with_sync++) {
        job->want[with_sync] = malloc(job->out_at[3]);
        if (!job->want[with_sync])
            abort();
        run_alone(job, with_sync, job->want[with_sync]);
        run_alone(job, with_sync, again);
        CHECK(memcmp(job->want[with_sync], again, job->out_at[3]) == 0, "%s: a second call alone has other bits",
              job->name);
    }
    free(again);
    if (job->out_at[3] > most_out_bytes)
        most_out_bytes = job->out_at[3];
    if (job->scratch_bytes > most_scratch_bytes)
        most_scratch_bytes = job->scratch_bytes;
}

/* ---- a pool that is not the library's --------------------------------------------------------------------------- */

enum { WORKERS = 2 };

struct pool {
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    pthread_t workers[WORKERS];
    void (*task)(void *context, int64_t i);
    void *context;
    int64_t next, tasks, finished;
    bool ends;
};

/* Runs tasks while there are any; the mutex is held, but for their length. */
static void work(struct pool *pool)
{
    while (pool->next < pool->tasks) {
        const int64_t i = pool->next++;
        pthread_mutex_unlock(&pool->mutex);
        pool->task(pool->context, i);
        pthread_mutex_lock(&pool->mutex);
        if (++pool->finished == pool->tasks)
            pthread_cond_broadcast(&pool->changed);
    }
}

static void *work_until_end(void *argument)
{
    struct pool *const pool = argument;
    pthread_mutex_lock(&pool->mutex);
    while (!pool->ends) {
        work(pool);
        pthread_cond_wait(&pool->changed, &pool->mutex);
    }
    pthread_mutex_unlock(&pool->mutex);
    return NULL;
}

static void parallel_for(void *argument, int64_t tasks, void (*task)(void *context, int64_t i), void *context)
{
    struct pool *const pool = argument;
    pthread_mutex_lock(&pool->mutex);
    pool->task = task;
    pool->context = context;
    pool->next = pool->finished = 0;
    pool->tasks = tasks;
    pthread_cond_broadcast(&pool->changed);
    work(pool);
    while (pool->finished < pool->tasks)
        pthread_cond_wait(&pool->changed, &pool->mutex);
    pool->tasks = 0;
    pthread_mutex_unlock(&pool->mutex);
}

static void open_pool(struct pool *pool)
{
    *pool = (struct pool){.mutex = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};
    for (int i = 0; i < WORKERS; i++)
        if (pthread_create(&pool->workers[i], NULL, work_until_end, pool) != 0)
            abort();
}

static void close_pool(struct pool *pool)
{
    pthread_mutex_lock(&pool->mutex);
    pool->ends = true;
    pthread_cond_broadcast(&pool->changed);
    pthread_mutex_unlock(&pool->mutex);
    for (int i = 0; i < WORKERS; i++)
        pthread_join(pool->workers[i], NULL);
}

/* ---- threads on the CPU ----------------------------------------------------------------------------------------- */

struct caller {
    int index;
    uint64_t random;
    int64_t calls;
    char *out, *scratch;
    struct pool pool;
    pthread_t thread;
    /* on a GPU */
    struct lane *lanes[STREAMS];
    int lane_count;
};

/* One random call, compared with the first of its problem. */
static bool call_once(struct caller *caller, bool has_pool)
{
    const struct job *const job = &jobs[below(&caller->random, JOBS)];
    const size_t bytes = job->out_at[3];
    struct call call;
    memset(caller->out, UNWRITTEN, bytes + GUARD_BYTES);
    bind(&call, job, caller->out);
    normfuse_exec exec = {.struct_bytes = sizeof exec};
    exec.threads = has_pool + (int32_t)below(&caller->random, MAX_CALL_THREADS + !has_pool);
    if (has_pool) {
        exec.parallel_for = parallel_for;
        exec.pool = &caller->pool;
    }
    if (caller->index % 4 == 2 && exec.threads != 0) {
        exec.scratch = caller->scratch;
        exec.scratch_bytes = job->scratch_bytes;
    }
    if (invoke(job, &call, exec.threads == 0 ? NULL : &exec, NULL) != NORMFUSE_OK) {
        fail("%s: thread %d: %s", job->name, caller->index, normfuse_last_error());
        return false;
    }
    size_t at = 0;
    while (at < bytes && caller->out[at] == job->want[0][at])
        at++;
    if (at < bytes) {
        fail("%s: thread %d, %d threads: byte %zu of %zu differs from the first call", job->name, caller->index,
             (int)exec.threads, at, bytes);
        return false;
    }
    for (at = bytes; at < bytes + GUARD_BYTES; at++)
        if ((unsigned char)caller->out[at] != UNWRITTEN) {
            fail("%s: thread %d: wrote past its results", job->name, caller->index);
            return false;
        }
    return true;
}

/* A child of this thread, while others call. */
static void fork_once(struct caller *caller)
{
    const pid_t child = fork();
    if (child == 0) {
        signal(SIGALRM, SIG_DFL);
        alarm(STUCK_SECONDS);
        int wrong = 0;
        for (int i = 0; i < CALLS_OF_CHILD; i++)
            wrong += !call_once(caller, false);
        _exit(wrong != 0);
    }
    int status = 0;
    while (child > 0 && waitpid(child, &status, 0) < 0 && errno == EINTR)
        continue;
    if (child < 0 || !WIFEXITED(status) || WEXITSTATUS(status) != 0)
        fail("thread %d: a child of fork: %s %d", caller->index,
             child < 0 ? "errno" : WIFSIGNALED(status) ? "signal" : "exit status",
             child < 0 ? errno : WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
    atomic_fetch_add(&calls_done, CALLS_OF_CHILD);
    next(&caller->random);
}

static void *call_on_cpu(void *argument)
{
    struct caller *const caller = argument;
    const bool has_pool = caller->index % 4 == 1, forks = caller->index % 4 == 3;
    if (has_pool)
        open_pool(&caller->pool);
    while (atomic_fetch_sub(&calls_left, 1) > 0) {
#if !defined(__SANITIZE_THREAD__)
        if (forks && ++caller->calls % CALLS_PER_FORK == 0)
            fork_once(caller);
#else
        (void)forks;
#endif
        call_once(caller, has_pool);
        atomic_fetch_add(&calls_done, 1);
    }
    if (has_pool)
        close_pool(&caller->pool);
    return NULL;
}

/* ---- streams ---------------------------------------------------------------------------------------------------- */

#if defined(NORMFUSE_HAVE_CUDA)

#define ENTRY_POINTS(ENTRY)                                                                                            \
    ENTRY(cuCtxGetCurrent)                                                                                             \
    ENTRY(cuCtxSetCurrent)                                                                                             \
    ENTRY(cuMemGetInfo)                                                                                                \
    ENTRY(cuMemcpyDtoHAsync)                                                                                           \
    ENTRY(cuMemsetD8Async)                                                                                             \
    ENTRY(cuStreamCreate)                                                                                              \
    ENTRY(cuStreamSynchronize)                                                                                         \
    ENTRY(cuStreamBeginCapture)                                                                                        \
    ENTRY(cuStreamEndCapture)                                                                                          \
    ENTRY(cuGraphInstantiateWithFlags)                                                                                 \
    ENTRY(cuGraphLaunch)                                                                                               \
    ENTRY(cuGraphDestroy)                                                                                              \
    ENTRY(cuGraphExecDestroy)

static struct {
#define MEMBER(name) __typeof__(name) *name;
    ENTRY_POINTS(MEMBER)
#undef MEMBER
} driver;

static CUcontext context;

#define TEXT_OF(name) #name
#define TEXT(name) TEXT_OF(name)

/* A call of the driver that must succeed: nothing after one that does not would mean anything. */
#define NEED(call)                                                                                                     \
    do {                                                                                                               \
        const CUresult result_ = driver.call;                                                                          \
        if (result_ != CUDA_SUCCESS) {                                                                                 \
            printf("FAIL %s: %d\n0 passed, 1 failed, 0 skipped\n", #call, (int)result_);                               \
            fflush(stdout);                                                                                            \
            _exit(1);                                                                                                  \
        }                                                                                                              \
    } while (0)

/* A stream and what its calls write to, in order. */
struct lane {
    CUstream stream;
    CUdeviceptr results; /* SLOTS of most_out_bytes + GUARD_BYTES */
    char *read;
    void *scratch, *sync;
    size_t sync_bytes;
    const struct job *graph_jobs[GRAPHS];
    CUgraphExec graphs[GRAPHS];
};

static struct lane lanes[STREAMS];

static size_t slot_bytes(void)
{
    return aligned(most_out_bytes + GUARD_BYTES);
}

/* Enqueues one call that writes to a slot. */
static bool enqueue(struct lane *lane, const struct job *job, int slot, bool with_sync)
{
    struct call call;
    bind(&call, job, (char *)(uintptr_t)lane->results + (size_t)slot * slot_bytes());
    const normfuse_exec exec = {.struct_bytes = sizeof exec,
                                .stream = lane->stream,
                                .scratch = lane->scratch,
                                .scratch_bytes = most_scratch_bytes,
                                .sync = with_sync ? lane->sync : NULL,
                                .sync_bytes = with_sync ? lane->sync_bytes : 0};
    const bool good = invoke(job, &call, &exec, NULL) == NORMFUSE_OK;
    if (!good)
        fail("%s: %s", job->name, normfuse_last_error());
    return good;
}

static void capture(struct lane *lane, int slot, const struct job *job)
{
    CUgraph graph;
    if (lane->graphs[slot])
        NEED(cuGraphExecDestroy(lane->graphs[slot]));
    lane->graph_jobs[slot] = job;
    NEED(cuStreamBeginCapture(lane->stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
    enqueue(lane, job, slot, true);
    NEED(cuStreamEndCapture(lane->stream, &graph));
    NEED(cuGraphInstantiateWithFlags(&lane->graphs[slot], graph, 0));
    NEED(cuGraphDestroy(graph));
}

static void open_lanes(uint64_t *state)
{
    void *const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    void *symbol = NULL;
#define LOOK_UP(name)                                                                                                  \
    need(library && (symbol = dlsym(library, TEXT(name))));                                                            \
    memcpy(&driver.name, &symbol, sizeof symbol);
    ENTRY_POINTS(LOOK_UP)
#undef LOOK_UP
    NEED(cuCtxGetCurrent(&context));
    for (int i = 0; i < STREAMS; i++) {
        struct lane *const lane = &lanes[i];
        NEED(cuStreamCreate(&lane->stream, CU_STREAM_NON_BLOCKING));
        lane->results = (CUdeviceptr)(uintptr_t)allocate(SLOTS * slot_bytes());
        lane->read = malloc(SLOTS * slot_bytes());
        lane->scratch = allocate(most_scratch_bytes);
        CHECK(normfuse_sync_bytes(0, &lane->sync_bytes) == NORMFUSE_OK, "%s", normfuse_last_error());
        lane->sync = allocate(lane->sync_bytes);
        NEED(cuMemsetD8Async((CUdeviceptr)(uintptr_t)lane->sync, 0, lane->sync_bytes, lane->stream));
        for (int slot = 0; slot < GRAPHS; slot++)
            capture(lane, slot, &jobs[below(state, JOBS)]);
    }
}

static void compare_slot(const struct lane *lane, int slot, const struct job *job, bool with_sync)
{
    const char *const got = lane->read + (size_t)slot * slot_bytes();
    const size_t bytes = job->out_at[3];
    size_t at = 0;
    while (at < bytes && got[at] == job->want[with_sync][at])
        at++;
    if (at < bytes)
        fail("%s: stream %td, %s: byte %zu of %zu differs from the first call", job->name, lane - lanes,
             slot < GRAPHS ? "a graph" : "an eager call", at, bytes);
    for (at = bytes; at < bytes + GUARD_BYTES; at++)
        if ((unsigned char)got[at] != UNWRITTEN) {
            fail("%s: stream %td: wrote past its results", job->name, lane - lanes);
            break;
        }
}

/* Graphs and eager calls in turn, on all streams of this thread; then every slot is compared. */
static void *call_on_cuda(void *argument)
{
    struct caller *const caller = argument;
    NEED(cuCtxSetCurrent(context));
    while (atomic_fetch_sub(&calls_left, SLOTS * caller->lane_count) > 0) {
        const struct job *ran[STREAMS][SLOTS];
        bool with_sync[STREAMS][SLOTS];
        for (int i = 0; i < caller->lane_count; i++) {
            struct lane *const lane = caller->lanes[i];
            capture(lane, (int)below(&caller->random, GRAPHS), &jobs[below(&caller->random, JOBS)]);
            NEED(cuMemsetD8Async(lane->results, UNWRITTEN, SLOTS * slot_bytes(), lane->stream));
        }
        for (int slot = 0; slot < SLOTS; slot++)
            for (int i = 0; i < caller->lane_count; i++) {
                struct lane *const lane = caller->lanes[i];
                const int at = slot % 2 ? slot / 2 : SLOTS - 1 - slot / 2;
                if (at < GRAPHS) {
                    NEED(cuGraphLaunch(lane->graphs[at], lane->stream));
                } else {
                    ran[i][at] = &jobs[below(&caller->random, JOBS)];
                    with_sync[i][at] = below(&caller->random, 4) != 0;
                    enqueue(lane, ran[i][at], at, with_sync[i][at]);
                }
            }
        for (int i = 0; i < caller->lane_count; i++) {
            struct lane *const lane = caller->lanes[i];
            for (int slot = 0; slot < GRAPHS; slot++)
                ran[i][slot] = lane->graph_jobs[slot];
            for (int slot = 0; slot < SLOTS; slot++) {
                const size_t at = (size_t)slot * slot_bytes();
                NEED(cuMemcpyDtoHAsync(lane->read + at, lane->results + at, ran[i][slot]->out_at[3] + GUARD_BYTES,
                                       lane->stream));
            }
            NEED(cuStreamSynchronize(lane->stream));
            for (int slot = 0; slot < SLOTS; slot++)
                compare_slot(lane, slot, ran[i][slot], slot < GRAPHS || with_sync[i][slot]);
        }
        atomic_fetch_add(&calls_done, SLOTS * caller->lane_count);
    }
    return NULL;
}

static size_t device_bytes_used(void)
{
    size_t left = 0, all = 0;
    NEED(cuMemGetInfo(&left, &all));
    return all - left;
}

#else
struct lane {
    int unused;
};
static struct lane lanes[STREAMS];

static void open_lanes(uint64_t *state)
{
    (void)state;
}

static void *call_on_cuda(void *argument)
{
    return argument;
}

static size_t device_bytes_used(void)
{
    return 0;
}
#endif

/* ---- memory ----------------------------------------------------------------------------------------------------- */

struct memory {
    int64_t resident, allocated, device;
};

static struct memory memory_now(void)
{
    struct memory memory = {0};
    long pages = 0;
#if defined(__GLIBC__)
    malloc_trim(0);
#if __GLIBC_PREREQ(2, 33)
    const struct mallinfo2 info = mallinfo2();
    memory.allocated = (int64_t)(info.uordblks + info.hblkhd);
#endif
#endif
    FILE *const file = fopen("/proc/self/statm", "r");
    if (file && fscanf(file, "%*s %ld", &pages) == 1)
        memory.resident = (int64_t)pages * sysconf(_SC_PAGESIZE);
    if (file)
        fclose(file);
    if (on_cuda)
        memory.device = (int64_t)device_bytes_used();
    return memory;
}

static void check_growth(const char *what, int64_t before, int64_t after)
{
    printf("# %s: %" PRId64 " KiB after the first batches, %+" PRId64 " KiB since\n", what, before >> 10,
           (after - before) / 1024);
    CHECK(after - before < MAX_GROWTH, "%s grew by %" PRId64 " bytes", what, after - before);
}

/* ---- the program ------------------------------------------------------------------------------------------------ */

static int usage(void)
{
    fprintf(stderr, "usage: soak [--calls N] [--threads N] [--seed N] [--device cpu|cuda]\n");
    return 2;
}

int main(int count, char **arguments)
{
    int64_t calls = 1000000;
    int threads = 4;
    uint64_t seed = 1;
    for (int i = 1; i + 1 < count; i += 2) {
        const char *const value = arguments[i + 1];
        char *end = NULL;
        const long long number = strtoll(value, &end, 10);
        const bool is_number = *value && !*end && number > 0;
        if (strcmp(arguments[i], "--calls") == 0 && is_number)
            calls = number;
        else if (strcmp(arguments[i], "--threads") == 0 && is_number && number <= MAX_THREADS)
            threads = (int)number;
        else if (strcmp(arguments[i], "--seed") == 0 && is_number)
            seed = (uint64_t)number;
        else if (strcmp(arguments[i], "--device") == 0 && (strcmp(value, "cpu") == 0 || strcmp(value, "cuda") == 0))
            on_cuda = value[1] == 'u';
        else
            return usage();
    }
    if (count % 2 == 0)
        return usage();
    if (on_cuda && !device_open()) {
        harness_skip("soak on a GPU: %s", device_error());
        return harness_close();
    }
#if defined(__SANITIZE_THREAD__)
    harness_skip("fork with threads: ThreadSanitizer cannot follow a child that starts threads");
#endif

#if defined(__GLIBC__)
    /* Free memory goes back at once, in every thread's arena; malloc_trim does so in the first one only. */
    mallopt(M_MMAP_THRESHOLD, 1 << 17);
    mallopt(M_TRIM_THRESHOLD, 0);
    mallopt(M_TOP_PAD, 0);
#endif
    uint64_t random = seed;
    for (int i = 0; i < JOBS; i++)
        make_job(&jobs[i], &random);
    if (harness_failed)
        return harness_close();
    printf("# %d problems checked against the reference\n", JOBS);
    fflush(stdout);
    if (on_cuda)
        open_lanes(&random);

    static struct caller callers[MAX_THREADS];
    for (int i = 0; i < threads; i++) {
        callers[i].index = i;
        callers[i].random = next(&random);
        if (!on_cuda) {
            callers[i].out = aligned_alloc(64, aligned(most_out_bytes + GUARD_BYTES));
            callers[i].scratch = aligned_alloc(64, aligned(most_scratch_bytes + 1));
            if (!callers[i].out || !callers[i].scratch)
                abort();
            memset(callers[i].out, 0, most_out_bytes + GUARD_BYTES); /* resident from the first */
            memset(callers[i].scratch, 0, most_scratch_bytes);
        }
    }
    for (int i = 0; i < STREAMS; i++)
        callers[i % threads].lanes[callers[i % threads].lane_count++] = &lanes[i];

    signal(SIGALRM, watch);
    alarm(STUCK_SECONDS);
    struct memory before = {0};
    for (int batch = 0; batch < BATCHES; batch++) {
        if (batch == WARM_BATCHES)
            before = memory_now();
        atomic_store(&calls_left, calls * (batch + 1) / BATCHES - calls * batch / BATCHES);
        for (int i = 0; i < threads; i++)
            if (pthread_create(&callers[i].thread, NULL, on_cuda ? call_on_cuda : call_on_cpu, &callers[i]) != 0)
                abort();
        for (int i = 0; i < threads; i++)
            pthread_join(callers[i].thread, NULL);
    }
    const struct memory after = memory_now();
#if defined(__SANITIZE_THREAD__)
    harness_skip("resident memory: most of it is ThreadSanitizer's own, which grows");
#else
    if (on_cuda) /* +37 MiB in 100,000 calls, of which malloc knows nothing: the driver's, for graphs */
        harness_skip("resident memory: the driver's grows by %" PRId64 " KiB",
                     (after.resident - before.resident) / 1024);
    else
        check_growth("resident memory", before.resident, after.resident);
#endif
    if (after.allocated)
        check_growth("allocated memory", before.allocated, after.allocated);
    else
        harness_skip("allocated memory: this C library does not say how much that is");
    if (on_cuda)
        check_growth("memory of the GPU", before.device, after.device);
    printf("# %" PRId64 " calls\n", atomic_load(&calls_done));
    harness_failed += atomic_load(&failures);
    harness_passed += (int)(atomic_load(&calls_done) - atomic_load(&failures));
    for (int i = 0; i < JOBS; i++) {
        give_back(jobs[i].in);
        free(jobs[i].want[0]);
        free(jobs[i].want[1]);
    }
    return harness_close();
}
