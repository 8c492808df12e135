/* SPDX-License-Identifier: MIT
 *
 * test_cuda.c - what case files cannot ask of a GPU: captured graphs, several streams, devices and host threads at
 * once, kernels that fill the grid against one another and beside a foreign kernel, memory that is missing, tensors of
 * more than 2^31 elements, and the host's time per call.
 *
 *   test_cuda            every test; without a GPU all are skipped
 *   test_cuda --probe    exit status 0 where a call works, else 3 and the reason
 *   test_cuda --fresh    the capture in a process that has run nothing before; a test of its own process
 *   test_cuda --plant    every result gets one wrong byte: each comparison must fail
 *
 * Results are compared bit for bit with those of the same call alone; whether those are right is test_operators'. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "cli/driver_functions.h"
#include "cli/operator_call.h"
#include "cli/problem_line.h"
#include "cuda/compile.h"
#include "cuda/schedules.h"
#include "harness.h"
#include "normfuse.h"
#include "reference.h"
#include "tolerance.h"

__asm__(".section .rodata\n"
        "normfuse_test_text:\n"
        ".incbin \"" NORMFUSE_TEST_TEXT "\"\n"
        ".byte 0\n"
        ".previous\n");
extern const char normfuse_test_text[];

/* ---- the driver ------------------------------------------------------------------------------------------------- */

#define ENTRY_POINTS(ENTRY)                                                                                            \
    ENTRY(cuInit)                                                                                                      \
    ENTRY(cuGetErrorString)                                                                                            \
    ENTRY(cuDeviceGet)                                                                                                 \
    ENTRY(cuDeviceGetCount)                                                                                            \
    ENTRY(cuDeviceGetName)                                                                                             \
    ENTRY(cuDeviceGetAttribute)                                                                                        \
    ENTRY(cuDevicePrimaryCtxRetain)                                                                                    \
    ENTRY(cuDevicePrimaryCtxReset)                                                                                     \
    ENTRY(cuCtxSetCurrent)                                                                                             \
    ENTRY(cuCtxGetCurrent)                                                                                             \
    ENTRY(cuCtxSynchronize)                                                                                            \
    ENTRY(cuMemGetInfo)                                                                                                \
    ENTRY(cuMemAlloc)                                                                                                  \
    ENTRY(cuMemFree)                                                                                                   \
    ENTRY(cuMemcpyHtoDAsync)                                                                                           \
    ENTRY(cuMemcpyDtoHAsync)                                                                                           \
    ENTRY(cuMemsetD8Async)                                                                                             \
    ENTRY(cuStreamCreate)                                                                                              \
    ENTRY(cuStreamDestroy)                                                                                             \
    ENTRY(cuStreamSynchronize)                                                                                         \
    ENTRY(cuStreamBeginCapture)                                                                                        \
    ENTRY(cuStreamEndCapture)                                                                                          \
    ENTRY(cuGraphInstantiateWithFlags)                                                                                 \
    ENTRY(cuGraphLaunch)                                                                                               \
    ENTRY(cuGraphDestroy)                                                                                              \
    ENTRY(cuGraphExecDestroy)                                                                                          \
    ENTRY(cuModuleLoadData)                                                                                            \
    ENTRY(cuModuleGetFunction)                                                                                         \
    ENTRY(cuFuncSetAttribute)                                                                                          \
    ENTRY(cuLaunchKernel)

static struct {
#define MEMBER(name) __typeof__(name) *name;
    ENTRY_POINTS(MEMBER)
#undef MEMBER
} driver;

enum { MAX_DEVICES = 2 };
static CUcontext contexts[MAX_DEVICES];
static CUmodule module; /* on device 0 */
static int devices, multiprocessors;

#define TEXT_OF(name) #name
#define TEXT(name) TEXT_OF(name)

/* NULL, or why there is no GPU. */
static const char *open_driver(void)
{
    static char reason[200];
    CUdevice device;
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL), *symbol;
    if (!library)
        return "there is no CUDA driver (libcuda.so.1)";
#define LOOK_UP(name)                                                                                                  \
    if (!(symbol = dlsym(library, TEXT(name))))                                                                        \
        return "the driver lacks " TEXT(name);                                                                         \
    memcpy(&driver.name, &symbol, sizeof symbol);
    ENTRY_POINTS(LOOK_UP)
#undef LOOK_UP
    CUresult result = driver.cuInit(0);
    if (result != CUDA_SUCCESS || driver.cuDeviceGetCount(&devices) != CUDA_SUCCESS || devices == 0) {
        snprintf(reason, sizeof reason, "the driver sees no GPU (cuInit: %d)", (int)result);
        return reason;
    }
    for (int i = 0; i < devices && i < MAX_DEVICES; i++)
        if (driver.cuDeviceGet(&device, i) != CUDA_SUCCESS ||
            driver.cuDevicePrimaryCtxRetain(&contexts[i], device) != CUDA_SUCCESS)
            return "a device's context was refused";
    if (driver.cuCtxSetCurrent(contexts[0]) != CUDA_SUCCESS || driver.cuDeviceGet(&device, 0) != CUDA_SUCCESS ||
        driver.cuDeviceGetAttribute(&multiprocessors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device) != CUDA_SUCCESS)
        return "device 0 cannot be used";
    return NULL;
}

/* A call of the driver that must succeed; the program ends where one does not, since nothing after it would mean
 * anything. */
#define NEED(call) need(driver.call, #call, __LINE__)
static void need(CUresult result, const char *what, int line)
{
    const char *text = NULL;
    if (result == CUDA_SUCCESS)
        return;
    if (driver.cuGetErrorString(result, &text) != CUDA_SUCCESS || !text)
        text = "unknown error";
    CHECK(false, "line %d: %s: %s (%d); the tests after it were not run", line, what, text, (int)result);
    exit(harness_close());
}

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* Kernels that wait for one another for ever end the program with a failure that says so. */
static const char *volatile watched = "";
static void bark(int signal_number)
{
    (void)signal_number;
    static const char start[] = "FAIL test_cuda.c: no progress, kernels wait for one another: ";
    static const char end[] = "\n0 passed, 1 failed, 0 skipped\n";
    (void)!write(STDOUT_FILENO, start, sizeof start - 1);
    (void)!write(STDOUT_FILENO, watched, strlen(watched));
    (void)!write(STDOUT_FILENO, end, sizeof end - 1);
    _exit(1);
}
static void watch(const char *what, unsigned for_seconds)
{
    fflush(stdout);
    watched = what;
    signal(SIGALRM, bark);
    alarm(for_seconds);
}

/* The kernels of this file, onto device 0. */
static void load_kernels(void)
{
    struct normfuse_cuda_compilation compilation = {
        .text = normfuse_test_text, .name = "test_cuda_kernels", .driver = normfuse_cuda_driver_version()};
    int major, minor;
    NEED(cuDeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 0));
    NEED(cuDeviceGetAttribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 0));
    compilation.capability = 10 * major + minor;
    normfuse_cuda_compile(&compilation);
    if (compilation.status != NORMFUSE_OK) {
        CHECK(false, "%s; the tests after it were not run", compilation.problem);
        exit(harness_close());
    }
    NEED(cuModuleLoadData(&module, compilation.code.bytes));
    free(compilation.code.bytes);
}

/* ---- jobs ------------------------------------------------------------------------------------------------------- */

/* A problem on a device, with its own stream, scratch and sync memory. Results lie together in `out`. */
struct job {
    const char *name;
    struct problem_line line;
    int device;
    CUstream stream;
    normfuse_exec exec;
    normfuse_tensors tensors;
    normfuse_tensor x, dy, y, weight, bias, mean, rstd, dweight, dbias;
    normfuse_axes axes[9];
    CUdeviceptr in, out, scratch, sync;
    size_t out_bytes;
    char *want;
};

enum { POISON = 0xAB };

static void *pointer(CUdeviceptr address)
{
    return (void *)(uintptr_t)address;
}

static normfuse_status call(const struct job *job, const normfuse_exec *exec, size_t *bytes)
{
    return operator_call(&job->line, job->line.backward, &job->tensors, exec, bytes);
}

static bool planted;

static bool run(const struct job *job)
{
    static size_t wrong;
    normfuse_status status = call(job, &job->exec, NULL);
    if (planted && job->out) {
        wrong++;
        NEED(cuMemsetD8Async(job->out + wrong * 977 % (job->out_bytes / 2), (unsigned char)wrong, 1, job->stream));
    }
    return CHECK(status == NORMFUSE_OK, "%s: %s: %s", job->name, normfuse_status_text(status), normfuse_last_error());
}

static size_t aligned(size_t bytes)
{
    return (bytes + 255) / 256 * 256;
}

static normfuse_tensor big_tensor(const struct job *job, CUdeviceptr data, bool channels_last, normfuse_axes *axes)
{
    const struct problem_line *line = &job->line;
    void *const at = pointer(data);
    normfuse_tensor tensor = channels_last
                                 ? normfuse_tensor_channels_last(at, line->type, line->ndim, line->sizes, axes)
                                 : normfuse_tensor_contiguous(at, line->type, line->ndim, line->sizes, axes);
    tensor.device = (normfuse_device){NORMFUSE_CUDA, job->device};
    return tensor;
}

static normfuse_tensor small_tensor(const struct job *job, CUdeviceptr data, normfuse_type type, int64_t count,
                                    normfuse_axes *axes)
{
    normfuse_tensor tensor = normfuse_tensor_contiguous(pointer(data), type, 1, &count, axes);
    tensor.device = (normfuse_device){NORMFUSE_CUDA, job->device};
    return tensor;
}

static void parse(struct job *job, const char *name)
{
    char copy[256], error[200] = "", *word = copy;
    snprintf(copy, sizeof copy, "%s", name);
    if (!CHECK(problem_line_parse(&word, 1, &job->line, error, sizeof error) > 0, "%s: %s", name, error))
        exit(harness_close());
    job->name = name;
}

static void poison(const struct job *job)
{
    NEED(cuMemsetD8Async(job->out, POISON, job->out_bytes, job->stream));
}

static void wait_for(const struct job *job)
{
    NEED(cuStreamSynchronize(job->stream));
}

static char *results(const struct job *job)
{
    char *bytes = malloc(job->out_bytes);
    if (!bytes)
        abort();
    NEED(cuMemcpyDtoHAsync(bytes, job->out, job->out_bytes, job->stream));
    wait_for(job);
    return bytes;
}

static bool same_bits(const struct job *job, const char *where)
{
    char *got = results(job);
    size_t at = 0;
    while (at < job->out_bytes && got[at] == job->want[at])
        at++;
    free(got);
    return CHECK(at == job->out_bytes, "%s: %s: byte %zu of %zu of the results differs from the call alone", job->name,
                 where, at, job->out_bytes);
}

/* Makes a job whose tensors hold data of its own, without calling its operator. */
static void make(struct job *job, const char *name, int device, bool with_sync)
{
    *job = (struct job){.device = device};
    parse(job, name);
    const struct problem_line *line = &job->line;
    NEED(cuCtxSetCurrent(contexts[device]));
    NEED(cuStreamCreate(&job->stream, CU_STREAM_NON_BLOCKING));
    int64_t elements = 1;
    for (int32_t i = 0; i < line->ndim; i++)
        elements *= line->sizes[i];
    const int64_t channels = line->sizes[1];
    const int64_t sets = line->op == BATCH_NORM ? channels : line->op == AFFINE ? 0 : line->sizes[0] * line->groups;
    const size_t value = reference_type_bytes(line->type), statistic = line->type == NORMFUSE_F64 ? 8 : 4;
    const normfuse_type statistic_type = line->type == NORMFUSE_F64 ? NORMFUSE_F64 : NORMFUSE_F32;
    const size_t big = aligned((size_t)elements * value), small = aligned((size_t)channels * value);
    const size_t saved = aligned((size_t)(sets + 1) * statistic);

    /* x, dy, weight, bias, mean, rstd; the results: y or dx, then mean and rstd or dweight and dbias */
    const size_t in_bytes = 2 * big + 2 * small + 2 * saved;
    char *host = malloc(in_bytes);
    if (!host)
        abort();
    uint64_t state = 88172645463325252u;
    const size_t both = 2 * big + 2 * small;
    const size_t parts[] = {0, big, 2 * big, 2 * big + small, both, both + saved, in_bytes};
    for (int part = 0; part < 6; part++) {
        const normfuse_type type = part < 4 ? line->type : statistic_type;
        const size_t step = part < 4 ? value : statistic;
        for (size_t at = parts[part]; at + step <= parts[part + 1]; at += step) {
            state ^= state << 13, state ^= state >> 7, state ^= state << 17;
            const double random = (double)(state >> 11) * 0x1p-53;
            reference_store(host + at, type, part == 5 ? 0.5 + random : part == 4 ? 0.1 * random : 2 * random - 0.9);
        }
    }
    NEED(cuMemAlloc(&job->in, in_bytes));
    NEED(cuMemcpyHtoDAsync(job->in, host, in_bytes, job->stream));
    job->out_bytes = big + 2 * (line->backward ? small : saved);
    NEED(cuMemAlloc(&job->out, job->out_bytes));
    poison(job);
    wait_for(job);
    free(host);

    const bool of_inputs = problem_line_channels_last(line, false), of_outputs = problem_line_channels_last(line, true);
    job->x = big_tensor(job, job->in, line->channels_last, &job->axes[0]);
    job->dy = big_tensor(job, job->in + parts[1], of_inputs, &job->axes[1]);
    job->weight = small_tensor(job, job->in + parts[2], line->type, channels, &job->axes[2]);
    job->bias = small_tensor(job, job->in + parts[3], line->type, channels, &job->axes[3]);
    job->y = big_tensor(job, job->out, of_outputs, &job->axes[4]);
    job->tensors = (normfuse_tensors){
        .struct_bytes = sizeof job->tensors, .x = &job->x, .weight = &job->weight, .bias = &job->bias};
    const CUdeviceptr results_at[] = {job->out + big, job->out + big + (line->backward ? small : saved)};
    if (line->backward) {
        job->dweight = small_tensor(job, results_at[0], line->type, channels, &job->axes[5]);
        job->dbias = small_tensor(job, results_at[1], line->type, channels, &job->axes[6]);
        job->tensors.dy = &job->dy;
        job->tensors.dx = &job->y;
        job->tensors.dweight = &job->dweight;
        job->tensors.dbias = &job->dbias;
    } else {
        job->tensors.y = &job->y;
    }
    if (line->op != AFFINE) {
        job->mean =
            small_tensor(job, line->backward ? job->in + parts[4] : results_at[0], statistic_type, sets, &job->axes[7]);
        job->rstd =
            small_tensor(job, line->backward ? job->in + parts[5] : results_at[1], statistic_type, sets, &job->axes[8]);
        job->tensors.mean = &job->mean;
        job->tensors.rstd = &job->rstd;
    }
    job->exec = (normfuse_exec){.struct_bytes = sizeof job->exec, .stream = job->stream};
    if (with_sync) {
        CHECK(normfuse_sync_bytes(device, &job->exec.sync_bytes) == NORMFUSE_OK, "%s", normfuse_last_error());
        NEED(cuMemAlloc(&job->sync, job->exec.sync_bytes));
        NEED(cuMemsetD8Async(job->sync, 0, job->exec.sync_bytes, job->stream));
        job->exec.sync = pointer(job->sync);
    }
    wait_for(job);
    normfuse_status status = call(job, &job->exec, &job->exec.scratch_bytes);
    CHECK(status == NORMFUSE_OK, "%s: scratch bytes: %s", name, normfuse_last_error());
    if (job->exec.scratch_bytes) {
        NEED(cuMemAlloc(&job->scratch, job->exec.scratch_bytes));
        NEED(cuMemsetD8Async(job->scratch, 0xFF, job->exec.scratch_bytes, job->stream));
        job->exec.scratch = pointer(job->scratch);
    }
    wait_for(job);
}

/* The results of the call alone, twice. */
static void settle(struct job *job)
{
    NEED(cuCtxSetCurrent(contexts[job->device]));
    run(job);
    job->want = results(job);
    poison(job);
    run(job);
    same_bits(job, "a second call");
    bool touched = false;
    for (size_t i = 0; i < job->out_bytes && !touched; i++)
        touched = (unsigned char)job->want[i] != POISON;
    CHECK(touched, "%s: nothing was written", job->name);
}

/* The sync memory is ready for another call: the grid barriers' counts are 0 again (their top bit tells barriers
 * apart). */
static void drop(struct job *job)
{
    NEED(cuCtxSetCurrent(contexts[job->device]));
    if (job->sync) {
        uint32_t *grid_barriers = malloc(job->exec.sync_bytes);
        if (!grid_barriers)
            abort();
        NEED(cuMemcpyDtoHAsync(grid_barriers, job->sync, job->exec.sync_bytes, job->stream));
        wait_for(job);
        size_t wrong = 0;
        for (size_t i = 0; i < job->exec.sync_bytes / 4; i++)
            wrong += (grid_barriers[i] & 0x7fffffffu) != 0;
        CHECK(wrong == 0, "%s: %zu words of the sync memory were left unready", job->name, wrong);
        free(grid_barriers);
        NEED(cuMemFree(job->sync));
    }
    if (job->scratch)
        NEED(cuMemFree(job->scratch));
    NEED(cuMemFree(job->in));
    NEED(cuMemFree(job->out));
    NEED(cuStreamDestroy(job->stream));
    free(job->want);
}

/* One of each way to keep a set, both pictures, both directions. */
static const char *const kinds[] = {
    "group_norm 4x64x32x32 groups=8 act=silu",
    "group_norm 4x64x32x32 groups=8 act=silu dir=bwd",
    "group_norm 4x64x32x32 groups=8 dtype=bf16 layout=nhwc act=silu",
    "group_norm 4x64x32x32 groups=8 dtype=bf16 layout=nhwc act=silu dir=bwd",
    "group_norm 1x4x40000 groups=2",
    "group_norm 1x4x40000 groups=2 dir=bwd",
    "batch_norm 8x12x50x50 layout=nhwc",
    "batch_norm 8x12x50x50 layout=nhwc dir=bwd",
    "batch_norm 16x3x100x100 act=relu",
    "batch_norm 16x3x100x100 act=relu dir=bwd",
    "affine 4x32x33x33 act=gelu",
    "affine 4x32x33x33 act=gelu dir=bwd",
    "batch_norm 8x64x14x14 dtype=bf16 layout=nhwc dir=bwd +mixed=inputs",
    "instance_norm 4x96x9x9 dir=bwd +mixed=outputs",
};
enum { KINDS = sizeof kinds / sizeof *kinds };

/* Norm groups that blocks of the whole grid hold. */
static const char *const grids[] = {
    "group_norm 1x64x256x256 groups=4",
    "group_norm 1x64x192x192 groups=1 dir=bwd",
    "group_norm 1x64x256x256 groups=1 layout=nhwc",
    "batch_norm 2x3x500000 act=relu",
};
enum { GRIDS = sizeof grids / sizeof *grids };

/* ---- graphs ----------------------------------------------------------------------------------------------------- */

static CUgraphExec capture(struct job *job)
{
    CUgraph graph;
    CUgraphExec executable;
    NEED(cuStreamBeginCapture(job->stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    run(job);
    NEED(cuStreamEndCapture(job->stream, &graph));
    NEED(cuGraphInstantiateWithFlags(&executable, graph, 0));
    NEED(cuGraphDestroy(graph));
    return executable;
}

static void test_graphs(void)
{
    for (int i = 0; i < KINDS + GRIDS; i++) {
        struct job job;
        make(&job, i < KINDS ? kinds[i] : grids[i - KINDS], 0, true);
        settle(&job);
        poison(&job);
        wait_for(&job);
        CUgraphExec graph = capture(&job);
        char *now = results(&job);
        CHECK((unsigned char)now[0] == POISON && (unsigned char)now[job.out_bytes / 2] == POISON,
              "%s: capturing ran something", job.name);
        free(now);
        for (int replay = 0; replay < 3; replay++) {
            poison(&job);
            NEED(cuGraphLaunch(graph, job.stream));
            same_bits(&job, "a replayed graph");
        }
        NEED(cuGraphExecDestroy(graph));
        drop(&job);
    }
}

/* In a process whose first call is under capture, as normfuse_prepare allows. */
static void fresh_capture(void)
{
    for (int i = 0; i < KINDS; i++) {
        struct job job;
        if (i == 0)
            CHECK(normfuse_prepare(0) == NORMFUSE_OK, "%s", normfuse_last_error());
        make(&job, kinds[i], 0, true);
        CUgraphExec graph = capture(&job);
        NEED(cuGraphLaunch(graph, job.stream));
        job.want = results(&job);
        poison(&job);
        run(&job);
        same_bits(&job, "a call after the graph that was captured first");
        NEED(cuGraphExecDestroy(graph));
        drop(&job);
    }
}

static void test_fresh_capture(void)
{
    char self[4096], command[4200];
    const ssize_t length = readlink("/proc/self/exe", self, sizeof self - 1);
    if (!CHECK(length > 0, "/proc/self/exe cannot be read"))
        return;
    self[length] = 0;
    snprintf(command, sizeof command, "'%s' --fresh", self);
    fflush(stdout);
    CHECK(system(command) == 0, "%s failed", command);
}

/* ---- several at once -------------------------------------------------------------------------------------------- */

static void test_streams(void)
{
    struct job jobs[KINDS];
    for (int i = 0; i < KINDS; i++) {
        make(&jobs[i], kinds[i], 0, i % 3 != 2);
        settle(&jobs[i]);
    }
    watch("streams", 60);
    for (int round = 0; round < 40; round++)
        for (int i = 0; i < KINDS; i++)
            run(&jobs[i]);
    for (int i = 0; i < KINDS; i++)
        same_bits(&jobs[i], "beside other streams");
    alarm(0);
    for (int i = 0; i < KINDS; i++)
        drop(&jobs[i]);
}

static void check_is_grid(struct job *job)
{
    run(job);
    CHECK(strstr(normfuse_last_kernels(), " grid=") != NULL,
          "%s: not a kernel whose blocks wait in a grid, so this test says nothing: %s", job->name,
          normfuse_last_kernels());
    wait_for(job);
}

/* Each pair of kernels that need the whole GPU, on two streams. If the blocks of both were resident in part, they would
 * wait for ever. */
static void test_grids(void)
{
    normfuse_cuda_choice()->only = "held"; /* two passes may take less */
    for (int a = 0; a < GRIDS; a++)
        for (int b = a; b < GRIDS; b++) {
            struct job jobs[2];
            char text[300];
            make(&jobs[0], grids[a], 0, true);
            make(&jobs[1], grids[b], 0, true);
            snprintf(text, sizeof text, "'%s' and '%s' on two streams", grids[a], grids[b]);
            watch(text, 60);
            for (int i = 0; i < 2; i++) {
                settle(&jobs[i]);
                check_is_grid(&jobs[i]);
            }
            for (int round = 0; round < 100; round++) {
                run(&jobs[0]);
                run(&jobs[1]);
            }
            same_bits(&jobs[0], "against another whole grid");
            same_bits(&jobs[1], "against another whole grid");
            alarm(0);
            drop(&jobs[0]);
            drop(&jobs[1]);
        }
    normfuse_cuda_choice()->only = NULL;
}

static void spin(CUstream stream, uint32_t blocks, uint32_t threads, uint32_t shared, uint64_t nanoseconds)
{
    CUfunction function;
    unsigned long long time = nanoseconds;
    void *arguments[] = {&time};
    NEED(cuModuleGetFunction(&function, module, "test_spin"));
    NEED(cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, (int)shared));
    NEED(cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, shared, stream, arguments, NULL));
}

/* A kernel that is not ours holds all multiprocessors, half of them, or a little of each, and comes and goes. */
static void test_foreign(void)
{
    static const struct {
        const char *what;
        uint32_t blocks_by_half, threads, shared;
    } foreign[] = {
        {"every processor full", 4, 1024, 0},
        {"half of the multiprocessors full", 1, 1024, 200 << 10},
        {"some of every processor's shared memory taken", 2, 64, 100 << 10},
        {"more blocks than fit at once", 32, 1024, 0},
    };
    CUstream stream;
    NEED(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    for (int way = 0; way < (int)(sizeof foreign / sizeof *foreign); way++)
        for (int i = 0; i < KINDS + GRIDS; i++) {
            struct job job;
            make(&job, i < KINDS ? kinds[i] : grids[i - KINDS], 0, i % 2 == 0 || i >= KINDS);
            settle(&job);
            watch(job.name, 60);
            for (int round = 0; round < 8; round++) {
                poison(&job);
                /* Before the call, and between two of them. */
                spin(stream, foreign[way].blocks_by_half * (uint32_t)multiprocessors / 2, foreign[way].threads,
                     foreign[way].shared, 200000);
                run(&job);
                spin(stream, foreign[way].blocks_by_half * (uint32_t)multiprocessors / 2, foreign[way].threads,
                     foreign[way].shared, 50000);
                run(&job);
            }
            same_bits(&job, foreign[way].what);
            NEED(cuStreamSynchronize(stream));
            alarm(0);
            drop(&job);
        }
    NEED(cuStreamDestroy(stream));
}

/* Kernels whose sets are shared by a few blocks, with more blocks than the GPU holds: on many streams, beside kernels
 * that need the whole grid and a foreign one, each block must still find the others of its set. */
static void test_shared_sets(void)
{
    normfuse_cuda_choice()->only = "held"; /* two passes may take less */
    static const char *const pairs[] = {"group_norm 34x8x200000 groups=8",
                                        "group_norm 34x64x128x128 groups=8 dtype=bf16 dir=bwd"};
    enum { JOBS = 10, ALL_PAIRS = 8 };
    struct job jobs[JOBS];
    CUstream stream;
    NEED(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    watch("shared sets on many streams", 100);
    for (int i = 0; i < JOBS; i++) {
        make(&jobs[i], i < ALL_PAIRS ? pairs[i % 2] : grids[i - ALL_PAIRS], 0, true);
        settle(&jobs[i]);
        if (i < ALL_PAIRS)
            continue;
        check_is_grid(&jobs[i]);
        printf("# %s: %s\n", jobs[i].name, normfuse_last_kernels());
    }
    for (int round = 0; round < 40; round++) {
        if (round % 2)
            spin(stream, 2 * (uint32_t)multiprocessors, 1024, 0, 100000);
        for (int i = 0; i < JOBS; i++)
            run(&jobs[i]);
    }
    for (int i = 0; i < JOBS; i++)
        same_bits(&jobs[i], "shared by a few blocks beside others");
    NEED(cuStreamSynchronize(stream));
    alarm(0);
    for (int i = 0; i < JOBS; i++)
        drop(&jobs[i]);
    NEED(cuStreamDestroy(stream));
    normfuse_cuda_choice()->only = NULL;
}

static void test_devices(void)
{
    if (devices < 2) {
        harness_skip("two devices: there is one");
        return;
    }
    struct job jobs[2][KINDS];
    for (int device = 0; device < 2; device++)
        for (int i = 0; i < KINDS; i++) {
            make(&jobs[device][i], kinds[i], device, true);
            settle(&jobs[device][i]);
        }
    /* Calls for both while device 0's context is current, which must stay so. */
    NEED(cuCtxSetCurrent(contexts[0]));
    for (int i = 0; i < KINDS; i++)
        for (int device = 0; device < 2; device++) {
            CUcontext current = NULL;
            run(&jobs[device][i]);
            NEED(cuCtxGetCurrent(&current));
            CHECK(current == contexts[0], "%s: the call left another context current", kinds[i]);
        }
    for (int device = 0; device < 2; device++)
        for (int i = 0; i < KINDS; i++) {
            NEED(cuCtxSetCurrent(contexts[device]));
            same_bits(&jobs[device][i], "beside another device");
        }
    for (int i = 0; i < KINDS; i++)
        CHECK(memcmp(jobs[0][i].want, jobs[1][i].want, jobs[0][i].out_bytes) == 0,
              "%s: two devices give different bits (of one model they should not)", kinds[i]);
    for (int device = 0; device < 2; device++)
        for (int i = 0; i < KINDS; i++)
            drop(&jobs[device][i]);
    NEED(cuCtxSetCurrent(contexts[0]));
}

struct thread_task {
    struct job *job;
    int refused;
};

static void *call_in_thread(void *argument)
{
    struct thread_task *task = argument;
    /* No context is current in a new thread: the library uses the device's primary one. */
    for (int i = 0; i < 200; i++)
        task->refused += call(task->job, &task->job->exec, NULL) != NORMFUSE_OK;
    return NULL;
}

static void test_host_threads(void)
{
    struct job jobs[KINDS];
    struct thread_task tasks[KINDS];
    pthread_t threads[KINDS];
    for (int i = 0; i < KINDS; i++) {
        make(&jobs[i], kinds[i], 0, true);
        settle(&jobs[i]);
        tasks[i] = (struct thread_task){.job = &jobs[i]};
    }
    watch("host threads", 60);
    for (int i = 0; i < KINDS; i++)
        if (pthread_create(&threads[i], NULL, call_in_thread, &tasks[i]))
            abort();
    for (int i = 0; i < KINDS; i++) {
        pthread_join(threads[i], NULL);
        CHECK(tasks[i].refused == 0, "%s: %d of 200 calls of a thread were refused", kinds[i], tasks[i].refused);
    }
    for (int i = 0; i < KINDS; i++)
        same_bits(&jobs[i], "beside other host threads");
    alarm(0);
    for (int i = 0; i < KINDS; i++)
        drop(&jobs[i]);
}

/* ---- memory that is missing ------------------------------------------------------------------------------------- */

static void test_refused(void)
{
    int needing = 0;
    for (int i = 0; i < KINDS + GRIDS; i++) {
        struct job job;
        make(&job, i < KINDS ? kinds[i] : grids[i - KINDS], 0, true);
        normfuse_exec exec = job.exec;
        exec.sync_bytes--;
        CHECK(call(&job, &exec, NULL) == NORMFUSE_SCRATCH, "%s: sync memory that is too small was taken", job.name);
        /* The halves of a sharded call may need scratch that the whole call does not. */
        exec = job.exec;
        exec.scratch = NULL;
        size_t needed = 0;
        const normfuse_status status = call(&job, &exec, NULL);
        if (status != NORMFUSE_OK) {
            const char *const said = strstr(normfuse_last_error(), "needs ");
            needing++;
            CHECK(status == NORMFUSE_SCRATCH && said && sscanf(said, "needs %zu", &needed) == 1 &&
                      needed <= job.exec.scratch_bytes,
                  "%s: %zu bytes of scratch asked for: %s", job.name, job.exec.scratch_bytes, normfuse_last_error());
            exec = job.exec;
            exec.scratch_bytes = needed - 1;
            CHECK(call(&job, &exec, NULL) == NORMFUSE_SCRATCH, "%s: scratch that is too small was taken", job.name);
        } else {
            poison(&job);
        }
        job.want = results(&job);
        size_t changed = 0;
        for (size_t at = 0; at < job.out_bytes; at++)
            changed += (unsigned char)job.want[at] != POISON;
        CHECK(changed == 0, "%s: a refused call changed %zu bytes", job.name, changed);
        drop(&job);
    }
    CHECK(needing > 0, "no problem of this test needs scratch");
}

/* ---- more than 2^31 elements ------------------------------------------------------------------------------------ */

enum { PERIOD = 1 << 16 };

struct pattern {
    uint16_t *bits;
    CUdeviceptr data;
    int64_t channels;
};

static void upload_pattern(struct pattern *pattern)
{
    const size_t bytes = (size_t)(pattern->channels * PERIOD) * 2;
    NEED(cuMemAlloc(&pattern->data, bytes));
    NEED(cuMemcpyHtoDAsync(pattern->data, pattern->bits, bytes, NULL));
    NEED(cuCtxSynchronize());
}

static struct pattern random_pattern(int64_t channels, uint64_t state, double offset)
{
    struct pattern pattern = {.channels = channels, .bits = malloc((size_t)(channels * PERIOD) * 2)};
    if (!pattern.bits)
        abort();
    for (int64_t i = 0; i < channels * PERIOD; i++) {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        const double bell = (double)(state & 0xFFFF) + (double)(state >> 16 & 0xFFFF) + (double)(state >> 32 & 0xFFFF);
        reference_store(&pattern.bits[i], NORMFUSE_BF16, offset + (bell - 98304) / 32768);
    }
    upload_pattern(&pattern);
    return pattern;
}

static double at(const struct pattern *pattern, int64_t i)
{
    return reference_load(&pattern->bits[i], NORMFUSE_BF16);
}

/* Positions repeat every PERIOD in every sample, so results do, too, and the reference is that of one period. */
static void test_huge(const char *name)
{
    struct job job = {0};
    parse(&job, name);
    const struct problem_line *line = &job.line;
    int64_t positions = line->sizes[2], samples = line->sizes[0], channels = line->sizes[1];
    const int64_t elements = samples * channels * positions;
    const size_t bytes = (size_t)elements * 2;
    size_t free_bytes = 0, all_bytes = 0;
    CHECK(elements > INT64_C(1) << 31 && positions % PERIOD == 0, "%s: not a problem for this test", name);
    NEED(cuMemGetInfo(&free_bytes, &all_bytes));
    const int tensors = 3 + line->mixed_inputs; /* a copy of dy is in scratch */
    if (free_bytes < (size_t)tensors * bytes + (UINT64_C(1) << 30)) {
        harness_skip("%s: %.1f GB of the GPU's memory are free, %.1f are needed", name, (double)free_bytes / 1e9,
                     1e-9 * tensors * (double)bytes + 1.1);
        return;
    }
    const double begin = seconds();
    NEED(cuStreamCreate(&job.stream, CU_STREAM_NON_BLOCKING));
    struct pattern x = random_pattern(channels, 88172645463325252u, 0.5);
    struct pattern dy = random_pattern(channels, 1234567891u, 0.1);
    CUdeviceptr x_data, dy_data = 0, y_data, found;
    NEED(cuMemAlloc(&x_data, bytes));
    NEED(cuMemAlloc(&y_data, bytes));
    NEED(cuMemAlloc(&found, 16));
    if (line->backward)
        NEED(cuMemAlloc(&dy_data, bytes));
    NEED(cuMemsetD8Async(y_data, POISON, bytes, job.stream));
    CUfunction fill, compare;
    NEED(cuModuleGetFunction(&fill, module, "test_fill"));
    NEED(cuModuleGetFunction(&compare, module, "test_compare"));
    unsigned long long counts[] = {(unsigned long long)elements, (unsigned long long)channels,
                                   (unsigned long long)positions, PERIOD};
    int last = line->channels_last, dy_last = problem_line_channels_last(line, false);
    for (int k = 0; k < 1 + line->backward; k++) {
        void *arguments[] = {k ? &dy_data : &x_data, k ? &dy.data : &x.data, &counts[0], &counts[1], &counts[2],
                             &counts[3], k ? &dy_last : &last};
        NEED(cuLaunchKernel(fill, 16 * (uint32_t)multiprocessors, 1, 1, 512, 1, 1, 0, job.stream, arguments, NULL));
    }

    /* The reference, and its bounds (docs/numerics.md). */
    const bool by_channel = line->op == BATCH_NORM;
    const int64_t groups = by_channel ? channels : line->groups, together = by_channel ? 1 : channels / groups;
    const int64_t sets = by_channel ? channels : samples * groups;
    const double repeats = (double)(positions / PERIOD) * (by_channel ? (double)samples : 1);
    float *statistics = calloc((size_t)(2 * sets), sizeof *statistics);
    double *means = calloc((size_t)(8 * groups), sizeof *means);
    if (!statistics || !means)
        abort();
    double *rstds = means + groups, *m2s = means + 2 * groups, *drifts = means + 3 * groups;
    double *plain = means + 4 * groups, *centred = means + 5 * groups, *plain_size = means + 6 * groups;
    double *centred_size = means + 7 * groups;
    const double period_count = (double)(together * PERIOD);
    for (int64_t g = 0; g < groups; g++) {
        const int64_t from = g * together * PERIOD, to = (g + 1) * together * PERIOD;
        for (int64_t i = from; i < to; i++)
            means[g] += at(&x, i) / period_count;
        for (int64_t i = from; i < to; i++) {
            m2s[g] += (at(&x, i) - means[g]) * (at(&x, i) - means[g]);
            drifts[g] = fmax(drifts[g], fabs(at(&x, i) - means[g]));
        }
        rstds[g] = 1 / sqrt(m2s[g] / period_count + line->eps);
        if (line->backward) { /* the library is given these, rounded */
            means[g] = reference_round(means[g], NORMFUSE_F32);
            rstds[g] = reference_round(rstds[g], NORMFUSE_F32);
        }
        for (int64_t i = from; i < to && line->backward; i++) {
            const double d = at(&x, i) - means[g], g_y = at(&dy, i);
            plain[g] += g_y / period_count;
            centred[g] += g_y * d / period_count;
            plain_size[g] += fabs(g_y) / period_count;
            centred_size[g] += fabs(g_y * d) / period_count;
        }
    }
    for (int64_t set = 0; set < sets; set++) {
        statistics[set] = (float)means[set % groups];
        statistics[sets + set] = (float)rstds[set % groups];
    }
    CUdeviceptr saved;
    NEED(cuMemAlloc(&saved, (size_t)(2 * sets) * sizeof *statistics));
    if (line->backward)
        NEED(cuMemcpyHtoDAsync(saved, statistics, (size_t)(2 * sets) * sizeof *statistics, job.stream));

    job.x = big_tensor(&job, x_data, line->channels_last, &job.axes[0]);
    job.y = big_tensor(&job, y_data, line->channels_last, &job.axes[1]);
    job.dy = big_tensor(&job, dy_data, dy_last, &job.axes[2]);
    job.mean = small_tensor(&job, saved, NORMFUSE_F32, sets, &job.axes[3]);
    job.rstd = small_tensor(&job, saved + (size_t)sets * sizeof *statistics, NORMFUSE_F32, sets, &job.axes[4]);
    job.tensors =
        (normfuse_tensors){.struct_bytes = sizeof job.tensors, .x = &job.x, .mean = &job.mean, .rstd = &job.rstd};
    if (line->backward) {
        job.tensors.dy = &job.dy;
        job.tensors.dx = &job.y;
    } else {
        job.tensors.y = &job.y;
    }
    job.exec = (normfuse_exec){.struct_bytes = sizeof job.exec, .stream = job.stream};
    (void)normfuse_sync_bytes(0, &job.exec.sync_bytes);
    NEED(cuMemAlloc(&job.sync, job.exec.sync_bytes));
    NEED(cuMemsetD8Async(job.sync, 0, job.exec.sync_bytes, job.stream));
    job.exec.sync = pointer(job.sync);
    CHECK(call(&job, &job.exec, &job.exec.scratch_bytes) == NORMFUSE_OK, "%s: %s", name, normfuse_last_error());
    NEED(cuMemAlloc(&job.scratch, job.exec.scratch_bytes + 1));
    job.exec.scratch = pointer(job.scratch);
    run(&job);
    if (planted)
        NEED(cuMemsetD8Async(y_data + (bytes / 4 * 3 | 1), 0x7e, 1, job.stream));
    wait_for(&job);

    /* One period of the results against the reference, */
    struct pattern y = {.channels = channels, .bits = malloc((size_t)(channels * PERIOD) * 2)};
    uint16_t *raw = malloc((size_t)(channels * PERIOD) * 2);
    if (!y.bits || !raw)
        abort();
    if (last) {
        NEED(cuMemcpyDtoHAsync(raw, y_data, (size_t)(channels * PERIOD) * 2, job.stream));
    } else {
        for (int64_t c = 0; c < channels; c++)
            NEED(cuMemcpyDtoHAsync(raw + c * PERIOD, y_data + (size_t)(c * positions) * 2, PERIOD * 2, job.stream));
    }
    wait_for(&job);
    int64_t beyond = 0;
    double used = 0;
    for (int64_t c = 0; c < channels; c++) {
        const int64_t g = c / together;
        const double count = period_count * repeats, mean = means[g], rstd = rstds[g], u = 0x1p-24;
        struct tolerance_arithmetic arithmetic = tolerance_arithmetic(NORMFUSE_CUDA, NORMFUSE_BF16, last, channels == 1,
                                                                      by_channel ? samples : 1, together, positions);
        arithmetic.drift = drifts[g];
        const struct tolerance_statistics statistic =
            tolerance_statistics(&arithmetic, count, mean, m2s[g] * repeats, line->eps);
        const struct tolerance_affine affine = {
            .gain = rstd, .mean = mean, .mean_error = statistic.mean, .gain_error = statistic.rstd};
        const double growth = tolerance_growth(arithmetic.additions + 3, u) + arithmetic.joins * 0x1p-53;
        const double plain_error = growth * plain_size[g];
        const double shift_error = arithmetic.shift_unit * fabs(mean);
        const double centred_error =
            growth * (centred_size[g] + shift_error * plain_size[g]) + shift_error * plain_error;
        for (int64_t s = 0; s < PERIOD; s++) {
            y.bits[c * PERIOD + s] = raw[last ? s * channels + c : c * PERIOD + s];
            const double d = at(&x, c * PERIOD + s) - mean, got = at(&y, c * PERIOD + s);
            double want = d * rstd, error;
            if (line->backward) {
                const double g_y = at(&dy, c * PERIOD + s), h = fabs(d) + shift_error;
                const double q = rstd * rstd * rstd * centred[g];
                want = rstd * (g_y - plain[g]) - q * d;
                error =
                    rstd * plain_error + h * rstd * rstd * rstd * centred_error +
                    (2 + arithmetic.coefficient_roundings) * u * (rstd * (fabs(g_y) + fabs(plain[g])) + fabs(q) * h);
            } else {
                error = tolerance_z(&arithmetic, &affine, d, want, want);
            }
            const double bound = tolerance_stored(NORMFUSE_BF16, want, error);
            used = fmax(used, fabs(got - want) / bound);
            beyond += !(fabs(got - want) <= bound);
        }
    }
    CHECK(beyond == 0, "%s: %" PRId64 " of %" PRId64 " values of the first period are wrong; %.3g of the bound", name,
          beyond, channels * PERIOD, used);
    /* and all the others against it. */
    upload_pattern(&y);
    unsigned long long differing[] = {0, ~0ull};
    NEED(cuMemcpyHtoDAsync(found, differing, sizeof differing, job.stream));
    void *arguments[] = {&y_data, &y.data, &counts[0], &counts[1], &counts[2], &counts[3], &last, &found};
    NEED(cuLaunchKernel(compare, 16 * (uint32_t)multiprocessors, 1, 1, 512, 1, 1, 0, job.stream, arguments, NULL));
    NEED(cuMemcpyDtoHAsync(differing, found, sizeof differing, job.stream));
    wait_for(&job);
    CHECK(differing[0] == 0, "%s: %llu elements differ from the same ones a period before, the first is %llu", name,
          differing[0], differing[1]);
    printf("# %s: %.2f of the bound, %.1f s, %s\n", name, used, seconds() - begin, normfuse_last_kernels());
    const CUdeviceptr memory[] = {x_data, y_data,  dy_data, found,    saved,
                                  x.data, dy.data, y.data,  job.sync, job.scratch};
    for (size_t i = 0; i < sizeof memory / sizeof *memory; i++)
        if (memory[i])
            NEED(cuMemFree(memory[i]));
    NEED(cuStreamDestroy(job.stream));
    free(x.bits), free(dy.bits), free(y.bits), free(raw), free(statistics), free(means);
}

static void test_more_than_31_bits(void)
{
    static const char *const problems[] = {
        "group_norm 1x2x1073807360 groups=1 dtype=bf16",
        "group_norm 1x2x1073807360 groups=1 dtype=bf16 dir=bwd",
        "group_norm 2x8x134283264 groups=1 dtype=bf16 layout=nhwc",
        "group_norm 2x8x134283264 groups=1 dtype=bf16 layout=nhwc dir=bwd",
        "batch_norm 33x8x8388608 dtype=bf16",
        "batch_norm 33x8x8388608 dtype=bf16 dir=bwd",
        "batch_norm 33x8x8388608 dtype=bf16 layout=nhwc",
        "batch_norm 33x8x8388608 dtype=bf16 layout=nhwc dir=bwd",
        "batch_norm 33x8x8388608 dtype=bf16 layout=nhwc dir=bwd +mixed=inputs",
        "group_norm 2100x16x65536 groups=8 dtype=bf16",
        "group_norm 2100x16x65536 groups=8 dtype=bf16 layout=nhwc dir=bwd",
    };
    for (size_t i = 0; i < sizeof problems / sizeof *problems; i++)
        test_huge(problems[i]);
}

/* ---- tensors without elements ----------------------------------------------------------------------------------- */

/* A call over nothing writes what it writes on the CPU. */
static void test_empty(void)
{
    enum { N = 3, C = 4, VALUES = N * C, OUTPUTS = 4 };
    static const struct {
        int64_t n, c, s, groups;
        bool batch, backward;
    } cases[] = {{N, C, 0, 2, false, false}, {N, 0, 5, 2, false, false}, {N, C, 0, 2, false, true},
                 {0, C, 5, 2, false, true},  {N, C, 0, 0, true, false},  {0, C, 5, 0, true, false},
                 {0, C, 5, 0, true, true}};
    CUdeviceptr memory;
    NEED(cuMemAlloc(&memory, 4096));
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        float results[2][OUTPUTS][VALUES];
        for (int on_device = 0; on_device < 2; on_device++) {
            float *const host = &results[on_device][0][0];
            for (int k = 0; k < OUTPUTS * VALUES; k++)
                host[k] = 7;
            const CUdeviceptr there = memory + 256;
            NEED(cuMemcpyHtoDAsync(there, host, sizeof results[0], NULL));
            NEED(cuStreamSynchronize(NULL));
            float *const data = on_device ? pointer(there) : host;
            const normfuse_device device = {on_device ? NORMFUSE_CUDA : NORMFUSE_CPU, 0};
            const bool batch = cases[i].batch, backward = cases[i].backward;
            const int64_t sizes[] = {cases[i].n, cases[i].c, cases[i].s}, sets[] = {cases[i].n, cases[i].groups},
                          channels[] = {cases[i].c};
            normfuse_axes of_x, axes[OUTPUTS];
            normfuse_tensor x = normfuse_tensor_contiguous(NULL, NORMFUSE_F32, 3, sizes, &of_x), out[OUTPUTS], saved;
            for (int k = 0; k < OUTPUTS; k++) {
                const bool of_sets = !batch && !backward && k < 2, of_samples = backward && k >= 2;
                out[k] = normfuse_tensor_contiguous(data + k * VALUES, NORMFUSE_F32, of_sets || of_samples ? 2 : 1,
                                                    of_sets      ? sets
                                                    : of_samples ? sizes
                                                                 : channels,
                                                    &axes[k]);
                out[k].device = device;
            }
            normfuse_axes of_saved;
            saved = normfuse_tensor_contiguous(data, NORMFUSE_F32, batch ? 1 : 2, batch ? channels : sets, &of_saved);
            x.device = saved.device = device;
            normfuse_tensors tensors = {.struct_bytes = sizeof tensors, .x = &x};
            if (!backward) {
                tensors.y = &x;
                tensors.mean = &out[0];
                tensors.rstd = &out[1];
                tensors.running_mean = batch ? &out[2] : NULL;
                tensors.running_var = batch ? &out[3] : NULL;
            } else {
                saved.data = on_device ? pointer(there + sizeof results[0]) : data; /* not read */
                tensors.mean = tensors.rstd = &saved;
                tensors.dy = tensors.dx = &x;
                tensors.dweight = &out[0];
                tensors.dbias = &out[1];
                tensors.dscale = batch ? NULL : &out[2];
                tensors.dshift = batch ? NULL : &out[3];
                if (!on_device)
                    saved.data = results[1];
            }
            const normfuse_exec exec = {.struct_bytes = sizeof exec,
                                        .scratch = on_device ? pointer(memory + 2048) : NULL,
                                        .scratch_bytes = 2048};
            const normfuse_group_norm_options group = {
                .struct_bytes = sizeof group, .groups = cases[i].groups, .eps = 1e-5};
            const normfuse_batch_norm_options of_batch = {
                .struct_bytes = sizeof of_batch, .eps = 1e-5, .momentum = 0.5};
            const normfuse_status status = batch ? (backward ? normfuse_batch_norm_backward
                                                             : normfuse_batch_norm_forward)(&of_batch, &tensors, &exec)
                                                 : (backward ? normfuse_group_norm_backward
                                                             : normfuse_group_norm_forward)(&group, &tensors, &exec);
            CHECK(status == NORMFUSE_OK, "empty case %zu: %s", i, normfuse_last_error());
            NEED(cuCtxSynchronize());
            if (on_device) {
                NEED(cuMemcpyDtoHAsync(host, there, sizeof results[0], NULL));
                NEED(cuStreamSynchronize(NULL));
                if (planted)
                    host[0] += 1;
            }
        }
        double worst = 0;
        for (int k = 0; k < OUTPUTS * VALUES; k++) {
            const double cpu = (double)(&results[0][0][0])[k], gpu = (double)(&results[1][0][0])[k];
            worst = fabs(gpu - cpu) <= 1e-6 * fabs(cpu) ? worst : INFINITY;
        }
        CHECK(worst == 0, "empty case %zu: other results than on the CPU", i);
    }
    NEED(cuMemFree(memory));
}

/* ---- a device reset -------------------------------------------------------------------------------------------- */

/* All that was in the context is gone. The kernels are loaded again, ahead of a capture too. */
static void test_reset(void)
{
    struct job job;
    make(&job, kinds[0], 0, true);
    settle(&job);
    char *const want = job.want;
    job.want = NULL;
    drop(&job);
    CUdevice device;
    NEED(cuDeviceGet(&device, 0));
    NEED(cuCtxSetCurrent(NULL));
    NEED(cuDevicePrimaryCtxReset(device));
    CHECK(normfuse_prepare(0) == NORMFUSE_OK, "prepare: %s", normfuse_last_error());
    NEED(cuDevicePrimaryCtxRetain(&contexts[0], device));
    NEED(cuCtxSetCurrent(contexts[0]));
    make(&job, kinds[0], 0, true);
    job.want = want;
    const CUgraphExec graph = capture(&job);
    NEED(cuGraphLaunch(graph, job.stream));
    wait_for(&job);
    same_bits(&job, "a graph after a device reset");
    NEED(cuGraphExecDestroy(graph));
    drop(&job);
}

/* ---- the host's time -------------------------------------------------------------------------------------------- */

static void test_host_time(void)
{
    static const char *const small[] = {
        "group_norm 2x64x16x16 groups=8 dtype=f16 layout=nhwc act=silu",
        "group_norm 2x64x16x16 groups=8 dtype=f16 layout=nhwc act=silu dir=bwd",
        "batch_norm 4x16x8x8",
        "batch_norm 4x16x8x8 dir=bwd",
        "affine 2x16x8x8",
        "affine 2x16x8x8 dir=bwd",
        "group_norm 1x320x64x64 groups=32 dtype=f16 layout=nhwc",
    };
    for (size_t i = 0; i < sizeof small / sizeof *small; i++) {
        struct job job;
        make(&job, small[i], 0, true);
        settle(&job);
        double best = INFINITY;
        for (int round = 0; round < 50; round++) {
            /* Few enough that the driver's queue does not fill. */
            const double begin = seconds();
            for (int k = 0; k < 100; k++)
                run(&job);
            best = fmin(best, (seconds() - begin) / 100);
            wait_for(&job);
        }
        printf("# host time per call %.2f us: %s\n", best * 1e6, small[i]);
        CHECK(best < 50e-6, "%s: a call takes the host %.1f us: it waits for something", small[i], best * 1e6);
        drop(&job);
    }
}

/* ---- the whole -------------------------------------------------------------------------------------------------- */

static void timed(const char *name, void (*test)(void))
{
    const double begin = seconds();
    const int before = harness_passed + harness_failed;
    NEED(cuCtxSetCurrent(contexts[0]));
    test();
    printf("%s: %d checks, %.1f s\n", name, harness_passed + harness_failed - before, seconds() - begin);
    fflush(stdout);
}

int main(int count, char **arguments)
{
    const char *const mode = count > 1 ? arguments[1] : "";
    const char *reason = open_driver();
    if (strcmp(mode, "--probe") == 0) {
        if (!reason && normfuse_prepare(0) != NORMFUSE_OK)
            reason = normfuse_last_error();
        if (reason) {
            printf("%s\n", reason);
            return 3;
        }
        struct job job;
        make(&job, kinds[0], 0, true);
        run(&job);
        wait_for(&job);
        char name[128] = "";
        NEED(cuDeviceGetName(name, sizeof name, 0));
        printf("%s, %d multiprocessors, %d device%s: a call works\n", name, multiprocessors, devices,
               devices == 1 ? "" : "s");
        return harness_failed ? 3 : 0;
    }
    if (reason) {
        harness_skip("every test on a GPU: %s", reason);
        return harness_close();
    }
    if (strcmp(mode, "--fresh") == 0) {
        fresh_capture();
        return harness_close();
    }
    planted = strcmp(mode, "--plant") == 0;
    load_kernels();
    timed("graphs", test_graphs);
    timed("capture as the first call of a process", test_fresh_capture);
    timed("streams", test_streams);
    timed("whole grids at once", test_grids);
    timed("beside a foreign kernel", test_foreign);
    timed("pairs of blocks", test_shared_sets);
    timed("devices", test_devices);
    timed("host threads", test_host_threads);
    timed("refused memory", test_refused);
    timed("more than 2^31 elements", test_more_than_31_bits);
    timed("tensors without elements", test_empty);
    timed("the host's time", test_host_time);
    timed("a device reset", test_reset); /* the last: nothing of before can be used */
    return harness_close();
}
