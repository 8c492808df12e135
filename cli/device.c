/* SPDX-License-Identifier: MIT
 *
 * device.c - see device.h. */
#define _GNU_SOURCE
#include "device.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct device_facts facts;
static char error_text[512];
static int32_t chosen;

void device_choose(int32_t ordinal)
{
    chosen = ordinal;
}

int32_t device_ordinal(void)
{
    return chosen;
}

const struct device_facts *device_facts(void)
{
    return &facts;
}

const char *device_error(void)
{
    return error_text;
}

#ifdef NORMFUSE_HAVE_CUDA

#include <ctype.h>
#include <dlfcn.h>
#include <time.h>

#include "driver_functions.h"
#include "report.h"
#include "src/cuda/compile.h"

#define ENTRY_POINTS(ENTRY)                                                                                            \
    ENTRY(cuInit)                                                                                                      \
    ENTRY(cuGetErrorString)                                                                                            \
    ENTRY(cuDriverGetVersion)                                                                                          \
    ENTRY(cuDeviceGet)                                                                                                 \
    ENTRY(cuDeviceGetName)                                                                                             \
    ENTRY(cuDeviceGetAttribute)                                                                                        \
    ENTRY(cuDeviceTotalMem)                                                                                            \
    ENTRY(cuDevicePrimaryCtxRetain)                                                                                    \
    ENTRY(cuCtxSetCurrent)                                                                                             \
    ENTRY(cuMemAlloc)                                                                                                  \
    ENTRY(cuMemFree)                                                                                                   \
    ENTRY(cuMemcpyHtoDAsync)                                                                                           \
    ENTRY(cuMemcpyDtoHAsync)                                                                                           \
    ENTRY(cuMemcpyDtoDAsync)                                                                                           \
    ENTRY(cuMemsetD8Async)                                                                                             \
    ENTRY(cuStreamCreate)                                                                                              \
    ENTRY(cuStreamQuery)                                                                                               \
    ENTRY(cuStreamBeginCapture)                                                                                        \
    ENTRY(cuStreamEndCapture)                                                                                          \
    ENTRY(cuGraphInstantiateWithFlags)                                                                                 \
    ENTRY(cuGraphLaunch)                                                                                               \
    ENTRY(cuGraphDestroy)                                                                                              \
    ENTRY(cuGraphExecDestroy)                                                                                          \
    ENTRY(cuEventCreate)                                                                                               \
    ENTRY(cuEventRecord)                                                                                               \
    ENTRY(cuEventElapsedTime)                                                                                          \
    ENTRY(cuModuleLoadData)                                                                                            \
    ENTRY(cuModuleGetFunction)                                                                                         \
    ENTRY(cuLaunchKernel)

static struct {
#define MEMBER(name) __typeof__(name) *name;
    ENTRY_POINTS(MEMBER)
#undef MEMBER
} driver;

#define TEXT_OF(name) #name
#define TEXT(name) TEXT_OF(name)

static CUstream stream;
static CUevent clock_events[2];
static CUmodule module;
static bool is_open;
static char work_name[512];

struct device_graph {
    CUgraphExec executable;
};

__attribute__((format(printf, 1, 2))) static bool fail(const char *format, ...)
{
    va_list list;
    int length = snprintf(error_text, sizeof error_text, "%s: ", facts.name[0] ? facts.name : "CUDA");
    va_start(list, format);
    vsnprintf(error_text + length, sizeof error_text - (size_t)length, format, list);
    va_end(list);
    return false;
}

static bool check(CUresult result, const char *what)
{
    const char *text = NULL;
    if (result == CUDA_SUCCESS)
        return true;
    if (!driver.cuGetErrorString || driver.cuGetErrorString(result, &text) != CUDA_SUCCESS || !text)
        text = "unknown error";
    return fail("%s: %s (%d)", what, text, (int)result);
}

/* CHECK(cuInit(0)) */
#define CHECK(call) check(driver.call, #call)

static bool load_driver(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library)
        return fail("no driver: %s", dlerror());
    void *symbol;
#define LOOK_UP(name)                                                                                                  \
    if (!(symbol = dlsym(library, TEXT(name))))                                                                        \
        return fail("the driver is too old: it has no %s", TEXT(name));                                                \
    memcpy(&driver.name, &symbol, sizeof symbol);
    ENTRY_POINTS(LOOK_UP)
#undef LOOK_UP
    return true;
}

/* The kernel module's version, where the system shows it: the first word that looks like one. */
static void read_driver_version(int cuda)
{
    char line[256] = "", version[32] = "";
    FILE *file = fopen("/proc/driver/nvidia/version", "r");
    if (file) {
        if (!fgets(line, sizeof line, file))
            line[0] = 0;
        fclose(file);
    }
    char *rest = line;
    for (char *word; (word = strtok_r(rest, " \t\n", &rest));)
        if (isdigit((unsigned char)word[0]) && strchr(word, '.')) {
            snprintf(version, sizeof version, "%.25s, ", word);
            break;
        }
    snprintf(facts.driver, sizeof facts.driver, "%sCUDA %d.%d", version, cuda / 1000, cuda % 1000 / 10);
}

bool device_open(void)
{
    CUdevice device;
    CUcontext context;
    int version = 0, major = 0, minor = 0, l2 = 0;
    if (is_open)
        return true;
    if (!load_driver() || !CHECK(cuInit(0)) || !CHECK(cuDriverGetVersion(&version)) ||
        !CHECK(cuDeviceGet(&device, chosen)) || !CHECK(cuDeviceGetName(facts.name, sizeof facts.name, device)) ||
        !CHECK(cuDeviceTotalMem(&facts.memory_bytes, device)) ||
        !CHECK(cuDeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device)) ||
        !CHECK(cuDeviceGetAttribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device)) ||
        !CHECK(cuDeviceGetAttribute(&l2, CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, device)))
        return false;
    facts.capability = 10 * major + minor;
    facts.l2_bytes = (size_t)l2;
    read_driver_version(version);
    is_open = CHECK(cuDevicePrimaryCtxRetain(&context, device)) && CHECK(cuCtxSetCurrent(context)) &&
              CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING)) &&
              CHECK(cuEventCreate(&clock_events[0], CU_EVENT_DEFAULT)) &&
              CHECK(cuEventCreate(&clock_events[1], CU_EVENT_DEFAULT));
    return is_open;
}

/* ---- memory ----------------------------------------------------------------------------------------------------- */

static CUdeviceptr address(const void *data)
{
    return (CUdeviceptr)(uintptr_t)data;
}

void *device_allocate(size_t bytes)
{
    CUdeviceptr data = 0;
    if (!check(driver.cuMemAlloc(&data, bytes ? bytes : 1), "memory"))
        return NULL;
    return (void *)(uintptr_t)data;
}

void device_free(void *data)
{
    if (data)
        (void)CHECK(cuMemFree(address(data)));
}

void *device_stream(void)
{
    return stream;
}

bool device_send(void *to, const void *from, size_t bytes)
{
    return !bytes || CHECK(cuMemcpyHtoDAsync(address(to), from, bytes, stream));
}

bool device_upload(void *to, const void *from, size_t bytes)
{
    return !bytes || (device_send(to, from, bytes) && device_wait());
}

bool device_download(void *to, const void *from, size_t bytes)
{
    return !bytes || (CHECK(cuMemcpyDtoHAsync(to, address(from), bytes, stream)) && device_wait());
}

bool device_copy(void *to, const void *from, size_t bytes)
{
    return !bytes || CHECK(cuMemcpyDtoDAsync(address(to), address(from), bytes, stream));
}

bool device_fill(void *to, int byte, size_t bytes)
{
    return !bytes || CHECK(cuMemsetD8Async(address(to), (unsigned char)byte, bytes, stream));
}

void device_name_work(const char *name)
{
    snprintf(work_name, sizeof work_name, "%s", name);
}

static double seconds_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

bool device_wait(void)
{
    const double begin = seconds_now();
    CUresult result;
    while ((result = driver.cuStreamQuery(stream)) == CUDA_ERROR_NOT_READY) {
        const double waited = seconds_now() - begin;
        if (waited > DEVICE_WAIT_SECONDS) {
            fflush(stdout);
            fprintf(stderr, "FAIL: the GPU has not finished in %d s: %s\n", DEVICE_WAIT_SECONDS, work_name);
            _Exit(CODE_FILE);
        }
        if (waited > 1e-3)
            nanosleep(&(struct timespec){.tv_nsec = 50000}, NULL);
    }
    return check(result, "cuStreamQuery");
}

/* ---- graphs and time -------------------------------------------------------------------------------------------- */

bool device_record_begin(void)
{
    /* Thread local: what would break a capture in a caller's program breaks this one. */
    return CHECK(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
}

struct device_graph *device_record_end(void)
{
    CUgraph recorded = NULL;
    if (!CHECK(cuStreamEndCapture(stream, &recorded)))
        return NULL;
    struct device_graph *graph = malloc(sizeof *graph);
    if (!graph || !CHECK(cuGraphInstantiateWithFlags(&graph->executable, recorded, 0))) {
        free(graph);
        graph = NULL;
    }
    (void)CHECK(cuGraphDestroy(recorded));
    return graph;
}

bool device_replay(struct device_graph *graph)
{
    return CHECK(cuGraphLaunch(graph->executable, stream));
}

void device_graph_free(struct device_graph *graph)
{
    if (graph)
        (void)CHECK(cuGraphExecDestroy(graph->executable));
    free(graph);
}

bool device_clock_start(void)
{
    return CHECK(cuEventRecord(clock_events[0], stream));
}

double device_clock_stop(void)
{
    float milliseconds = 0;
    if (!CHECK(cuEventRecord(clock_events[1], stream)) || !device_wait() ||
        !CHECK(cuEventElapsedTime(&milliseconds, clock_events[0], clock_events[1])))
        return -1;
    return (double)milliseconds * 1e3;
}

/* ---- kernels ---------------------------------------------------------------------------------------------------- */

bool device_load(const char *name, const char *text)
{
    struct normfuse_cuda_compilation compilation = {
        .text = text, .name = name, .capability = facts.capability, .driver = normfuse_cuda_driver_version()};
    if (module)
        return true;
    if (!normfuse_cuda_find_compiled(&compilation))
        normfuse_cuda_compile(&compilation);
    if (compilation.status != NORMFUSE_OK)
        return fail("%s", compilation.problem);
    const bool is_loaded = CHECK(cuModuleLoadData(&module, compilation.code.bytes));
    free(compilation.code.bytes);
    return is_loaded;
}

bool device_launch(const char *kernel, uint32_t blocks, uint32_t threads, void **arguments)
{
    CUfunction function;
    return check(driver.cuModuleGetFunction(&function, module, kernel), kernel) &&
           check(driver.cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, 0, stream, arguments, NULL), kernel);
}

#else

static bool absent(void)
{
    snprintf(error_text, sizeof error_text, "this program was built without CUDA");
    return false;
}

bool device_open(void)
{
    return absent();
}

void *device_allocate(size_t bytes)
{
    (void)bytes;
    (void)absent();
    return NULL;
}

void device_free(void *data)
{
    (void)data;
}

void *device_stream(void)
{
    return NULL;
}

bool device_send(void *to, const void *from, size_t bytes)
{
    (void)to, (void)from, (void)bytes;
    return absent();
}

bool device_upload(void *to, const void *from, size_t bytes)
{
    (void)to, (void)from, (void)bytes;
    return absent();
}

bool device_download(void *to, const void *from, size_t bytes)
{
    (void)to, (void)from, (void)bytes;
    return absent();
}

bool device_copy(void *to, const void *from, size_t bytes)
{
    (void)to, (void)from, (void)bytes;
    return absent();
}

bool device_fill(void *to, int byte, size_t bytes)
{
    (void)to, (void)byte, (void)bytes;
    return absent();
}

void device_name_work(const char *name)
{
    (void)name;
}

bool device_wait(void)
{
    return absent();
}

bool device_record_begin(void)
{
    return absent();
}

struct device_graph *device_record_end(void)
{
    (void)absent();
    return NULL;
}

bool device_replay(struct device_graph *graph)
{
    (void)graph;
    return absent();
}

void device_graph_free(struct device_graph *graph)
{
    (void)graph;
}

bool device_clock_start(void)
{
    return absent();
}

double device_clock_stop(void)
{
    (void)absent();
    return -1;
}

bool device_load(const char *name, const char *text)
{
    (void)name, (void)text;
    return absent();
}

bool device_launch(const char *kernel, uint32_t blocks, uint32_t threads, void **arguments)
{
    (void)kernel, (void)blocks, (void)threads, (void)arguments;
    return absent();
}

#endif
