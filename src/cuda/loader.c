/* SPDX-License-Identifier: MIT
 *
 * loader.c - see loader.h. What is found out is published once and only read from then on, so that a launch takes no
 * lock: the driver by one atomic pointer, each device by one atomic flag. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "cuda/loader.h"

#include <dlfcn.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/compile.h"
#include "cuda/driver.h"
#include "cuda/specialize.h"

/* ---- what is known -------------------------------------------------------------------------------------------- */

struct device {
    struct normfuse_cuda_device facts; /* first: a pointer to it is a pointer to the device */
    struct loaded *loaded;
    CUdevice handle;
    _Atomic(bool) ready;
    _Atomic(CUcontext) primary; /* retained at the first call whose thread has no context of this device */
    char name[128];
};

struct loaded {
    normfuse_status status; /* of finding the driver; if not OK, `problem` says why and nothing else is set */
    int32_t version;        /* as cuDriverGetVersion says it: 13000 */
    int32_t devices;        /* 0 where the status is not OK */
    struct device *device;
    struct loaded *before; /* what was found earlier, whose words normfuse_info may have given out */
    char problem[256];
    char state[512];
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static _Atomic(struct loaded *) newest;
static struct normfuse_cuda_driver driver; /* written under the mutex, before any device is found */
static const struct normfuse_cuda_driver *stand_in;
/* Found by a call when there is no memory for more. */
#define NO_MEMORY "no memory for the list of devices"
static struct loaded no_memory = {.status = NORMFUSE_OUT_OF_MEMORY, .problem = NO_MEMORY, .state = NO_MEMORY};

/* A refusal of the driver is the caller's answer. */
#define TRY(call)                                                                                                      \
    do {                                                                                                               \
        const CUresult tried = (call);                                                                                 \
        if (tried != CUDA_SUCCESS)                                                                                     \
            return tried;                                                                                              \
    } while (false)

static const char *error_text(CUresult result)
{
    const char *text = NULL;
    return driver.cuGetErrorString(result, &text) != CUDA_SUCCESS || text == NULL ? "unknown error" : text;
}

/* ---- the driver ----------------------------------------------------------------------------------------------- */

/* Gives `status`; the words are loaded->problem. */
#define FAIL(loaded, status, ...) (snprintf((loaded)->problem, sizeof(loaded)->problem, __VA_ARGS__), (status))

/* Fills `driver`. An old driver lacks functions, but its version is the better reason. */
static normfuse_status find_entries(struct loaded *loaded)
{
    static void *library; /* opened for good; under the mutex */
    const char *missing = NULL;
#define TEXT(name) #name
#define NAME(name) TEXT(name),
    static const char *const names[] = {NORMFUSE_CUDA_DRIVER_LIST(NAME)};
#undef NAME
#undef TEXT
    _Static_assert(sizeof driver == sizeof(void *) * sizeof names / sizeof *names, "it has an address for each name");
    if (stand_in != NULL)
        driver = *stand_in;
    else if (library == NULL && (library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL)) == NULL)
        return FAIL(loaded, NORMFUSE_NO_DRIVER, "no CUDA driver: %s", dlerror());
    for (size_t i = 0; i < sizeof names / sizeof *names && stand_in == NULL; i++) {
        /* ISO C has no cast from an object's to a function's address. */
        void *const address = dlsym(library, names[i]);
        memcpy((char *)&driver + i * sizeof address, &address, sizeof address);
        if (address == NULL && missing == NULL)
            missing = names[i];
    }
    if (driver.cuDriverGetVersion == NULL)
        return FAIL(loaded, NORMFUSE_NO_DRIVER, "no CUDA driver: libcuda.so.1 has no function %s", missing);
    if (driver.cuDriverGetVersion(&loaded->version) != CUDA_SUCCESS)
        loaded->version = 0;
    const int major = loaded->version / 1000, minor = loaded->version % 1000 / 10;
    if (major < NORMFUSE_CUDA_DRIVER_MAJOR)
        return FAIL(loaded, NORMFUSE_OLD_DRIVER,
                    "the CUDA driver is of version %d.%d, this library needs %d.0 or newer", major, minor,
                    (int)NORMFUSE_CUDA_DRIVER_MAJOR);
    return missing == NULL ? NORMFUSE_OK
                           : FAIL(loaded, NORMFUSE_OLD_DRIVER, "the CUDA driver, of version %d.%d, has no function %s",
                                  major, minor, missing);
}

/* 0, and *result, where the driver does not say. */
static int read_attribute(const struct device *device, CUdevice_attribute attribute, CUresult *result)
{
    int value = 0;
    if (*result == CUDA_SUCCESS)
        *result = driver.cuDeviceGetAttribute(&value, attribute, device->handle);
    return value;
}

static normfuse_status find_driver(struct loaded *loaded)
{
    static _Atomic(uint64_t) readings;
    const normfuse_status status = find_entries(loaded);
    if (status != NORMFUSE_OK)
        return status;
    int count = 0;
    CUresult result = driver.cuInit(0);
    if (result == CUDA_ERROR_STUB_LIBRARY)
        return FAIL(loaded, NORMFUSE_NO_DRIVER, "no CUDA driver: libcuda.so.1 is the stub library of a CUDA toolkit");
    if (result == CUDA_SUCCESS)
        result = driver.cuDeviceGetCount(&count);
    /* A driver without devices (CUDA_VISIBLE_DEVICES may hide them) is a driver: every device is refused by name. */
    if (result == CUDA_ERROR_NO_DEVICE || (result == CUDA_SUCCESS && count == 0))
        return NORMFUSE_OK;
    if (result != CUDA_SUCCESS)
        return FAIL(loaded, NORMFUSE_DEVICE_ERROR, "the CUDA driver does not start: %s", error_text(result));
    loaded->device = calloc((size_t)count, sizeof *loaded->device);
    if (loaded->device == NULL)
        return FAIL(loaded, NORMFUSE_OUT_OF_MEMORY, NO_MEMORY);
    for (int32_t i = 0; i < count; i++) {
        struct device *const device = &loaded->device[i];
        device->loaded = loaded;
        result = driver.cuDeviceGet(&device->handle, i);
        if (result == CUDA_SUCCESS)
            result = driver.cuDeviceGetName(device->name, (int)sizeof device->name, device->handle);
#define READ(attribute) read_attribute(device, CU_DEVICE_ATTRIBUTE_##attribute, &result)
        const int capability = 10 * READ(COMPUTE_CAPABILITY_MAJOR) + READ(COMPUTE_CAPABILITY_MINOR);
        device->facts = (struct normfuse_cuda_device){
            .serial = atomic_fetch_add(&readings, 1) + 1,
            .ordinal = i,
            .driver = loaded->version,
            .capability = capability,
            .multiprocessors = READ(MULTIPROCESSOR_COUNT),
            .shared_per_block = (size_t)READ(MAX_SHARED_MEMORY_PER_BLOCK_OPTIN),
            .clusters = READ(CLUSTER_LAUNCH) != 0,
            .name = device->name};
#undef READ
        if (result != CUDA_SUCCESS)
            return FAIL(loaded, NORMFUSE_DEVICE_ERROR, "the driver says of device %" PRId32 ": %s", i,
                        error_text(result));
    }
    loaded->devices = count;
    return NORMFUSE_OK;
}

/* The driver API tells which CUDA it offers, not its own version; a file of the kernel module does, where it is. */
static void describe(struct loaded *loaded)
{
#define SAY(...)                                                                                                       \
    snprintf(loaded->state + strlen(loaded->state), sizeof loaded->state - strlen(loaded->state), __VA_ARGS__)
    if (loaded->status == NORMFUSE_OK) {
        char module[32] = "";
        FILE *const file = stand_in == NULL ? fopen("/sys/module/nvidia/version", "re") : NULL;
        if (file != NULL && fgets(module, (int)sizeof module - 1, file) != NULL)
            module[strcspn(module, "\n")] = ' ';
        if (file != NULL)
            fclose(file);
        SAY("driver %s(CUDA %d.%d), %d device%s", module, loaded->version / 1000, loaded->version % 1000 / 10,
            (int)loaded->devices, loaded->devices == 1 ? "" : "s");
    } else {
        SAY("%s", loaded->problem);
    }
    for (int32_t i = 0; i < loaded->devices; i++) {
        const struct normfuse_cuda_device *const facts = &loaded->device[i].facts;
        SAY("%s%s (%d.%d)", i == 0 ? ": " : ", ", facts->name, (int)facts->capability / 10,
            (int)facts->capability % 10);
    }
#undef SAY
}

static void forget(struct loaded *loaded)
{
    free(loaded->device);
    free(loaded);
}

/* A thread that another one forked beside may have held the locks. */
static void after_fork_in_child(void)
{
    pthread_mutex_init(&mutex, NULL);
    normfuse_cuda_plans_after_fork();
    normfuse_cuda_specialized_after_fork();
}

static bool follows_forks(void)
{
    static _Atomic(bool) is_registered; /* twice does no harm */
    if (!atomic_load(&is_registered))
        atomic_store(&is_registered, pthread_atfork(NULL, NULL, after_fork_in_child) == 0);
    return atomic_load(&is_registered);
}

/* The driver's state. Devices that were found are kept; without any the next call looks again: a driver may be
 * installed or started later, memory may be free. */
static struct loaded *current_driver(void)
{
    struct loaded *loaded = atomic_load_explicit(&newest, memory_order_acquire);
    if (loaded != NULL && loaded->devices > 0)
        return loaded;
    if (!follows_forks())
        return &no_memory;
    int state;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &state);
    pthread_mutex_lock(&mutex);
    loaded = atomic_load_explicit(&newest, memory_order_relaxed);
    if (loaded == NULL || loaded->devices == 0) {
        struct loaded *const now = calloc(1, sizeof *now);
        if (now != NULL) {
            now->status = find_driver(now);
            describe(now);
        }
        if (now == NULL) {
            loaded = &no_memory;
        } else if (loaded != NULL && now->devices == 0 && strcmp(now->state, loaded->state) == 0) {
            forget(now);
        } else {
            now->before = loaded;
            loaded = now;
            atomic_store_explicit(&newest, loaded, memory_order_release);
        }
    }
    pthread_mutex_unlock(&mutex);
    pthread_setcancelstate(state, NULL);
    return loaded;
}

/* ---- contexts ------------------------------------------------------------------------------------------------- */

/* Makes a context of this device current: the caller's, if it is one, else the device's primary one. *pushed says
 * whether leave() has one to take away again. */
static CUresult enter(struct device *device, bool *pushed)
{
    CUcontext current = NULL, other = NULL;
    CUdevice of_current;
    *pushed = false;
    TRY(driver.cuCtxGetCurrent(&current));
    if (current != NULL && driver.cuCtxGetDevice(&of_current) == CUDA_SUCCESS && of_current == device->handle)
        return CUDA_SUCCESS;
    CUcontext primary = atomic_load_explicit(&device->primary, memory_order_acquire);
    if (primary == NULL) {
        TRY(driver.cuDevicePrimaryCtxRetain(&primary, device->handle));
        /* Another thread was first: one reference is enough. */
        if (!atomic_compare_exchange_strong(&device->primary, &other, primary))
            driver.cuDevicePrimaryCtxRelease(device->handle);
    }
    TRY(driver.cuCtxPushCurrent(primary));
    *pushed = true;
    return CUDA_SUCCESS;
}

static void leave(bool pushed)
{
    CUcontext popped;
    if (pushed)
        driver.cuCtxPopCurrent(&popped);
}

/* ---- kernels -------------------------------------------------------------------------------------------------- */

normfuse_status normfuse_cuda_refuse_kernels(const char *call, const struct normfuse_cuda_device *device,
                                             const char *kernel, CUresult result)
{
    static const CUresult lacking[] = {
        CUDA_ERROR_INVALID_IMAGE,          CUDA_ERROR_NO_BINARY_FOR_GPU,        CUDA_ERROR_INVALID_PTX,
        CUDA_ERROR_UNSUPPORTED_PTX_VERSION, CUDA_ERROR_JIT_COMPILATION_DISABLED, CUDA_ERROR_NOT_FOUND,
        CUDA_ERROR_JIT_COMPILER_NOT_FOUND};
    const char *const error = error_text(result);
    const int capability = device->capability;
    for (size_t i = 0; i < sizeof lacking / sizeof *lacking; i++)
        if (result == lacking[i])
            return normfuse_refuse(NORMFUSE_NO_KERNEL,
                                   "%s: no kernel for device %d, %s (compute capability %d.%d): %s: %s",
                                   call, (int)device->ordinal, device->name, capability / 10, capability % 10, kernel,
                                   error);
    if (result == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED || result == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)
        return normfuse_refuse(NORMFUSE_DEVICE_ERROR,
                               "%s: device %d, %s, loads no kernels while a stream is captured: call normfuse_prepare, "
                               "or any operator, before the first capture (%s)",
                               call, (int)device->ordinal, device->name, error);
    if (result == CUDA_ERROR_OUT_OF_MEMORY)
        return normfuse_refuse(NORMFUSE_OUT_OF_MEMORY, "%s: no memory to load the kernels on device %d, %s", call,
                               (int)device->ordinal, device->name);
    return normfuse_refuse(NORMFUSE_DEVICE_ERROR, "%s: device %d, %s, refused %s: %s", call, (int)device->ordinal,
                           device->name, kernel, error);
}

/* Into the current context. */
static CUresult load_kernel(const struct normfuse_cuda_device *device, CUkernel kernel)
{
    CUfunction function;
    (void)device;
    TRY(driver.cuKernelGetFunction(&function, kernel));
    return driver.cuFuncLoad(function);
}

/* Shared memory that a kernel may be given on this device. Set once, since it costs time. */
static CUresult set_limits(const struct device *device, CUkernel kernel)
{
    int fixed = 0;
    TRY(driver.cuKernelGetAttribute(&fixed, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, kernel, device->handle));
    TRY(driver.cuKernelSetAttribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                    (int)device->facts.shared_per_block - fixed, kernel, device->handle));
    if (device->facts.clusters)
        TRY(driver.cuKernelSetAttribute(CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1, kernel,
                                        device->handle));
    return CUDA_SUCCESS;
}

/* While any stream is captured, the driver refuses to load, lest what is captured depend on it, except to threads that
 * say that it does not. False: this one could not. */
static bool relax(CUstreamCaptureMode *mode)
{
    *mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    return driver.cuThreadExchangeStreamCaptureMode(mode) == CUDA_SUCCESS;
}

static void restore(bool is_relaxed, CUstreamCaptureMode mode)
{
    if (is_relaxed)
        (void)driver.cuThreadExchangeStreamCaptureMode(&mode);
}

/* After a device reset destroyed the primary context's contents: retaining it again revives it. */
static bool revives(struct device *device, CUresult result)
{
    CUcontext primary;
    if (result != CUDA_ERROR_CONTEXT_IS_DESTROYED ||
        driver.cuDevicePrimaryCtxRetain(&primary, device->handle) != CUDA_SUCCESS)
        return false;
    atomic_store_explicit(&device->primary, primary, memory_order_release);
    return true;
}

/* A kernel, or (NULL) all that are loaded, into the context that a call of this thread would use. */
static CUresult load_in_context(struct device *device, CUkernel kernel)
{
    bool pushed = false;
    CUresult result = CUDA_SUCCESS;
    for (int attempt = 0; attempt == 0 || (attempt == 1 && revives(device, result)); attempt++) {
        result = enter(device, &pushed);
        if (result == CUDA_SUCCESS)
            result = kernel != NULL ? load_kernel(&device->facts, kernel)
                                    : normfuse_cuda_load_specialized(&device->facts, load_kernel);
        leave(pushed);
    }
    return result;
}

CUresult normfuse_cuda_load_code(const struct normfuse_cuda_device *facts, const void *code, const char *name,
                                 CUkernel *kernel)
{
    struct device *const device = (struct device *)(uintptr_t)facts;
    CUstreamCaptureMode mode;
    CUlibrary library;
    const bool is_relaxed = relax(&mode);
    CUresult result = driver.cuLibraryLoadData(&library, code, NULL, NULL, 0, NULL, NULL, 0);
    if (result == CUDA_SUCCESS) {
        result = driver.cuLibraryGetKernel(kernel, library, name);
        if (result == CUDA_SUCCESS)
            result = load_in_context(device, *kernel);
        if (result == CUDA_SUCCESS)
            result = set_limits(device, *kernel);
        if (result != CUDA_SUCCESS)
            (void)driver.cuLibraryUnload(library);
    }
    restore(is_relaxed, mode);
    return result;
}

/* Under the mutex. The driver loads a kernel into a context at its first launch there, which a graph capture may not
 * survive: this requests it ahead, for the context that a call of this thread would use. */
static normfuse_status load_kernels(const char *call, struct device *device)
{
    const CUresult result = load_in_context(device, NULL);
    if (result != CUDA_SUCCESS)
        return normfuse_cuda_refuse_kernels(call, &device->facts, "its context", result);
    atomic_store_explicit(&device->ready, true, memory_order_release);
    return NORMFUSE_OK;
}

normfuse_status normfuse_cuda_device(const char *call, int32_t ordinal, const struct normfuse_cuda_device **facts)
{
    const bool again = facts == NULL;
    struct loaded *const loaded = current_driver();
    if (loaded->status != NORMFUSE_OK)
        return normfuse_refuse(loaded->status, "%s: %s", call, loaded->problem);
    if (ordinal < 0 || ordinal >= loaded->devices)
        return normfuse_refuse(NORMFUSE_BAD_ARGUMENT,
                               "%s: there is no CUDA device %" PRId32 ": the driver sees %" PRId32, call, ordinal,
                               loaded->devices);
    struct device *const device = &loaded->device[ordinal];
    if (!again)
        *facts = &device->facts;
    if (!again && atomic_load_explicit(&device->ready, memory_order_acquire))
        return NORMFUSE_OK;
    int state;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &state);
    CUstreamCaptureMode mode;
    const bool is_relaxed = relax(&mode);
    pthread_mutex_lock(&mutex);
    normfuse_status status = NORMFUSE_OK;
    if (again || !atomic_load_explicit(&device->ready, memory_order_relaxed))
        status = load_kernels(call, device);
    pthread_mutex_unlock(&mutex);
    restore(is_relaxed, mode);
    pthread_setcancelstate(state, NULL);
    return status;
}

/* ---- launches ------------------------------------------------------------------------------------------------- */

enum { MAX_ATTRIBUTES = 3 };

static CUlaunchConfig configure(const struct normfuse_cuda_launch *launch, CUstream stream,
                                CUlaunchAttribute attributes[static MAX_ATTRIBUTES])
{
    unsigned count = 0;
    if (launch->cluster > 1)
        attributes[count++] = (CUlaunchAttribute){.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
                                                  .value.clusterDim = {launch->cluster, 1, 1}};
    if (launch->cooperative)
        attributes[count++] = (CUlaunchAttribute){.id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE, .value.cooperative = 1};
    if (launch->dependent)
        attributes[count++] = (CUlaunchAttribute){.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
                                                  .value.programmaticStreamSerializationAllowed = 1};
    return (CUlaunchConfig){
        .gridDimX = (unsigned)launch->grid, .gridDimY = 1, .gridDimZ = 1,
        .blockDimX = launch->threads, .blockDimY = 1, .blockDimZ = 1,
        .sharedMemBytes = (unsigned)launch->shared, .hStream = stream, .attrs = attributes, .numAttrs = count};
}

normfuse_status normfuse_cuda_launch(const char *call, const struct normfuse_cuda_device *device, void *stream,
                                     const struct normfuse_cuda_launch *launch)
{
    struct device *const found = (struct device *)(uintptr_t)device;
    CUlaunchAttribute attributes[MAX_ATTRIBUTES];
    const CUlaunchConfig config = configure(launch, (CUstream)stream, attributes);
    /* The kernel's one parameter. The form with a buffer and its size is refused for cooperative launches. */
    void *parameters[] = {(void *)(uintptr_t)launch->arguments};
    char name[NORMFUSE_KERNEL_NAME_BYTES];
    CUkernel kernel = NULL;
    const normfuse_status status =
        normfuse_cuda_specialized(call, device, launch->signature, launch->beside, &kernel);
    if (status != NORMFUSE_OK)
        return status;
    bool pushed;
    CUresult result = enter(found, &pushed);
    /* The driver takes a CUkernel for a CUfunction, which it then finds in the current context. */
    if (result == CUDA_SUCCESS)
        result = driver.cuLaunchKernelEx(&config, (CUfunction)kernel, parameters, NULL);
    leave(pushed);
    if (result == CUDA_SUCCESS)
        return NORMFUSE_OK;
    return normfuse_refuse(NORMFUSE_DEVICE_ERROR,
                           "%s: device %d, %s, refused to launch %s (%" PRId64 " blocks of %" PRIu32
                           " threads, clusters of %" PRIu32 ", %zu bytes of shared memory): %s",
                           call, (int)device->ordinal, device->name,
                           normfuse_cuda_signature_name(launch->signature, name), launch->grid, launch->threads,
                           launch->cluster, launch->shared, error_text(result));
}

/* ---- for normfuse_info and tests ------------------------------------------------------------------------------ */

const char *normfuse_cuda_state(void)
{
    return current_driver()->state;
}

int32_t normfuse_cuda_driver_version(void)
{
    const struct loaded *const loaded = current_driver();
    return loaded->status == NORMFUSE_OK ? loaded->version : 0;
}

bool normfuse_cuda_verbose(int word)
{
    static const struct {
        const char *name;
        int word;
    } words[] = {{"dispatch", NORMFUSE_VERBOSE_DISPATCH},
                 {"plan", NORMFUSE_VERBOSE_PLAN},
                 {"compile", NORMFUSE_VERBOSE_COMPILE}};
    enum { READ = 8 };
    static _Atomic int cached;
    int said = atomic_load_explicit(&cached, memory_order_relaxed);
    if (said == 0) {
        const char *const value = getenv("NORMFUSE_VERBOSE");
        said = READ;
        for (size_t i = 0; value != NULL && i < sizeof words / sizeof *words; i++)
            said |= strstr(value, words[i].name) != NULL ? words[i].word : 0;
        atomic_store_explicit(&cached, said, memory_order_relaxed);
    }
    return (said & word) != 0;
}

void normfuse_cuda_use_driver(const struct normfuse_cuda_driver *wanted)
{
    for (struct loaded *loaded = atomic_exchange(&newest, NULL), *before; loaded != NULL; loaded = before) {
        before = loaded->before;
        forget(loaded);
    }
    normfuse_cuda_forget_specialized();
    stand_in = wanted;
}
