/* SPDX-License-Identifier: MIT
 *
 * fake_driver.c - see fake_driver.h. The functions have the driver's own names, so that this file is also what a
 * libcuda.so.1 for tests is made of. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "fake_driver.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

struct fake_driver fake_driver;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
/* Handles are addresses in here; nothing is ever stored in them. */
static char contexts[FAKE_DEVICES][FAKE_CONTEXTS], kernels[FAKE_KERNELS], libraries[FAKE_KERNELS];
static char names[FAKE_KERNELS][64];
static struct normfuse_cuda_signature signatures[FAKE_KERNELS];
static _Thread_local CUcontext stack[8];
static _Thread_local int depth;
static _Thread_local CUstreamCaptureMode capture_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
static struct {
    CUhostFn destroy;
    void *context;
    bool is_in_graph;
} user_objects[64];
static char graph;

static void called(enum fake_entry entry)
{
    pthread_mutex_lock(&mutex);
    fake_driver.calls[entry]++;
    pthread_mutex_unlock(&mutex);
}

#define CALLED(name) called(FAKE_CALLS_##name)

CUcontext fake_driver_context(int device, int index)
{
    return (CUcontext)(void *)&contexts[device][index];
}

const char *fake_driver_kernel_name(int kernel)
{
    return names[kernel];
}

int fake_driver_depth(void)
{
    return depth;
}

void fake_driver_set_context(CUcontext context)
{
    depth = context != NULL;
    stack[0] = context;
}

static int device_of(CUcontext context)
{
    for (int device = 0; device < FAKE_DEVICES; device++)
        for (int index = 0; index < FAKE_CONTEXTS; index++)
            if (fake_driver_context(device, index) == context)
                return device;
    return -1;
}

/* -1: there is no context, or one that is no context at all. */
static int current_device(void)
{
    return depth > 0 ? device_of(stack[depth - 1]) : -1;
}

/* True if the current context is one that a device reset destroyed. */
static bool is_destroyed(void)
{
    const int device = current_device();
    pthread_mutex_lock(&mutex);
    const bool is_reset = device >= 0 && fake_driver.device[device].is_reset;
    pthread_mutex_unlock(&mutex);
    return is_reset && stack[depth - 1] == fake_driver_context(device, 0);
}

/* Calls that may not be part of a graph. */
static bool is_refused_by_capture(void)
{
    return fake_driver.capturing && capture_mode != CU_STREAM_CAPTURE_MODE_RELAXED;
}

static int kernel_of(const void *handle)
{
    const char *const kernel = handle;
    return kernel >= kernels && kernel < kernels + FAKE_KERNELS ? (int)(kernel - kernels) : -1;
}

void fake_driver_reset(void)
{
    fake_driver = (struct fake_driver){.version = 13000, .devices = 1};
    for (int i = 0; i < FAKE_DEVICES; i++) {
        struct fake_device *const device = &fake_driver.device[i];
        *device = (struct fake_device){.name = "NVIDIA H200",
                                       .capability = 90,
                                       .multiprocessors = 132,
                                       .threads_per_multiprocessor = 2048,
                                       .shared_per_multiprocessor = 233472,
                                       .shared_per_block = 232448,
                                       .shared_reserved = 1024,
                                       .l2_bytes = 60 << 20,
                                       .clusters = true};
        for (int k = 0; k < FAKE_KERNELS; k++)
            device->dynamic_shared[k] = 48 << 10;
    }
    fake_driver_set_context(NULL);
}

#define ENTRY(name) name,
static const struct normfuse_cuda_driver table = {NORMFUSE_CUDA_DRIVER_LIST(ENTRY)};
#undef ENTRY

const struct normfuse_cuda_driver *fake_driver_table(void)
{
    return &table;
}

/* ---- driver and devices --------------------------------------------------------------------------------------- */

CUresult cuDriverGetVersion(int *version)
{
    CALLED(cuDriverGetVersion);
    *version = fake_driver.version;
    return CUDA_SUCCESS;
}

CUresult cuInit(unsigned flags)
{
    CALLED(cuInit);
    nanosleep(&(struct timespec){.tv_nsec = fake_driver.init_milliseconds * 1000000L}, NULL);
    return flags == 0 ? fake_driver.init_result : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGetErrorString(CUresult result, const char **text)
{
    static _Thread_local char buffer[32];
    CALLED(cuGetErrorString);
    snprintf(buffer, sizeof buffer, "fake error %d", (int)result);
    *text = buffer;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *count)
{
    CALLED(cuDeviceGetCount);
    *count = fake_driver.devices;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
    CALLED(cuDeviceGet);
    *device = ordinal;
    return ordinal >= 0 && ordinal < fake_driver.devices ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDeviceGetName(char *name, int bytes, CUdevice device)
{
    CALLED(cuDeviceGetName);
    snprintf(name, (size_t)bytes, "%s", fake_driver.device[device].name);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice ordinal)
{
    CALLED(cuDeviceGetAttribute);
    const struct fake_device *const device = &fake_driver.device[ordinal];
    switch ((int)attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = device->capability / 10; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = device->capability % 10; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = device->multiprocessors; break;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: *value = device->threads_per_multiprocessor; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = device->shared_per_block; break;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: *value = device->l2_bytes; break; /* read by the program alone */
    case CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH: *value = device->clusters; break;
    default: return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

/* ---- contexts ------------------------------------------------------------------------------------------------- */

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
    CALLED(cuDevicePrimaryCtxRetain);
    /* The driver's takes long enough for threads to meet in it. */
    nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
    pthread_mutex_lock(&mutex);
    fake_driver.device[device].primary_retained++;
    fake_driver.device[device].is_reset = false;
    pthread_mutex_unlock(&mutex);
    *context = fake_driver_context(device, 0);
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease(CUdevice device)
{
    CALLED(cuDevicePrimaryCtxRelease);
    pthread_mutex_lock(&mutex);
    fake_driver.device[device].primary_retained--;
    pthread_mutex_unlock(&mutex);
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context)
{
    CALLED(cuCtxGetCurrent);
    *context = depth > 0 ? stack[depth - 1] : NULL;
    return fake_driver.context_result;
}

CUresult cuCtxGetId(CUcontext context, unsigned long long *id)
{
    const int device = device_of(context);
    if (device < 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    const int index = (int)((char *)(void *)context - contexts[device]);
    *id = 1 + (unsigned long long)((fake_driver.resets * FAKE_DEVICES + device) * FAKE_CONTEXTS + index);
    return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *device)
{
    CALLED(cuCtxGetDevice);
    *device = current_device();
    return *device >= 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

CUresult cuCtxPushCurrent(CUcontext context)
{
    CALLED(cuCtxPushCurrent);
    if (device_of(context) < 0 || depth == (int)(sizeof stack / sizeof *stack))
        return CUDA_ERROR_INVALID_CONTEXT;
    stack[depth++] = context;
    return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent(CUcontext *context)
{
    CALLED(cuCtxPopCurrent);
    if (depth == 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    *context = stack[--depth];
    return CUDA_SUCCESS;
}

/* ---- captures, memory, streams -------------------------------------------------------------------------------- */

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode)
{
    CALLED(cuThreadExchangeStreamCaptureMode);
    const CUstreamCaptureMode before = capture_mode;
    capture_mode = *mode;
    *mode = before;
    return CUDA_SUCCESS;
}

CUresult cuStreamGetCaptureInfo_v2(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *captured,
                                   const CUgraphNode **dependencies, size_t *count)
{
    (void)stream;
    (void)dependencies;
    (void)count;
    *status = fake_driver.capture != 0 ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
    *id = fake_driver.capture;
    *captured = fake_driver.capture != 0 ? (CUgraph)(void *)&graph : NULL;
    return CUDA_SUCCESS;
}

CUresult cuStreamGetId(CUstream stream, unsigned long long *id)
{
    unsigned long long context;
    if (fake_driver.capture != 0) {
        fake_driver.invalidations++;
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    if (depth == 0 || cuCtxGetId(stack[depth - 1], &context) != CUDA_SUCCESS)
        return CUDA_ERROR_INVALID_CONTEXT;
    const int renewals = stream != NULL && stream == fake_driver.renewed ? fake_driver.renewals : 0;
    *id = (uintptr_t)stream << 24 | (unsigned long long)renewals << 8 | context;
    return CUDA_SUCCESS;
}

/* Memory, of ones until it is cleared. `bytes` is a multiple of 256. fake_gpu.c has other memory. */
__attribute__((weak)) CUresult cuMemAlloc(CUdeviceptr *memory, size_t bytes)
{
    if (current_device() < 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (is_refused_by_capture())
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    char *const made = fake_driver.is_out_of_memory ? NULL : aligned_alloc(256, bytes);
    if (made == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    memset(made, 1, bytes);
    fake_driver.allocations++;
    *memory = (CUdeviceptr)(uintptr_t)made;
    return CUDA_SUCCESS;
}

__attribute__((weak)) CUresult cuMemFree(CUdeviceptr memory)
{
    if (current_device() < 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (is_refused_by_capture())
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    free((void *)(uintptr_t)memory);
    fake_driver.allocations--;
    return CUDA_SUCCESS;
}

/* Memory in a stream's order, as part of a graph if it is captured: behind a pack that says which stream. */
CUresult cuMemAllocAsync(CUdeviceptr *memory, size_t bytes, CUstream stream)
{
    if (current_device() < 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    char *const made = fake_driver.is_out_of_memory ? NULL : aligned_alloc(256, (bytes + 511) / 256 * 256);
    if (made == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    memcpy(made, &stream, sizeof stream);
    fake_driver.pooled++;
    *memory = (CUdeviceptr)(uintptr_t)(made + 256);
    return CUDA_SUCCESS;
}

CUresult cuMemFreeAsync(CUdeviceptr memory, CUstream stream)
{
    if (current_device() < 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    char *const made = (char *)(uintptr_t)memory - 256;
    if (memcmp(made, &stream, sizeof stream) != 0)
        return CUDA_ERROR_INVALID_VALUE;
    free(made);
    fake_driver.pooled--;
    return CUDA_SUCCESS;
}

__attribute__((weak)) CUresult cuMemsetD8Async(CUdeviceptr memory, unsigned char value, size_t bytes, CUstream stream)
{
    memset((void *)(uintptr_t)memory, value, bytes);
    return stream != NULL ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
}

CUresult cuStreamCreate(CUstream *stream, unsigned flags)
{
    fake_driver.streams++;
    *stream = (CUstream)(void *)&fake_driver.streams;
    return flags == CU_STREAM_NON_BLOCKING ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuStreamSynchronize(CUstream stream)
{
    (void)stream;
    return is_refused_by_capture() ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS;
}

CUresult cuStreamDestroy(CUstream stream)
{
    (void)stream;
    fake_driver.streams--;
    return CUDA_SUCCESS;
}

CUresult cuUserObjectCreate(CUuserObject *object, void *context, CUhostFn destroy, unsigned references, unsigned flags)
{
    if (references != 1 || flags != CU_USER_OBJECT_NO_DESTRUCTOR_SYNC)
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < sizeof user_objects / sizeof *user_objects; i++)
        if (user_objects[i].destroy == NULL) {
            user_objects[i].destroy = destroy;
            user_objects[i].context = context;
            *object = (CUuserObject)(void *)&user_objects[i];
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_OUT_OF_MEMORY;
}

static void destroy_user_object(size_t i)
{
    const CUhostFn destroy = user_objects[i].destroy;
    fake_driver.graph_objects -= user_objects[i].is_in_graph;
    user_objects[i].destroy = NULL;
    user_objects[i].is_in_graph = false;
    destroy(user_objects[i].context);
}

static size_t user_object(CUuserObject object)
{
    size_t i = 0;
    while ((void *)object != (void *)&user_objects[i])
        i++;
    return i;
}

CUresult cuUserObjectRelease(CUuserObject object, unsigned count)
{
    destroy_user_object(user_object(object));
    return count == 1 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGraphRetainUserObject(CUgraph captured, CUuserObject object, unsigned count, unsigned flags)
{
    if ((void *)captured != (void *)&graph || count != 1 || flags != CU_GRAPH_USER_OBJECT_MOVE)
        return CUDA_ERROR_INVALID_VALUE;
    if (fake_driver.user_object_result != CUDA_SUCCESS)
        return fake_driver.user_object_result;
    user_objects[user_object(object)].is_in_graph = true;
    fake_driver.graph_objects++;
    return CUDA_SUCCESS;
}

void fake_driver_destroy_graphs(void)
{
    for (size_t i = 0; i < sizeof user_objects / sizeof *user_objects; i++)
        if (user_objects[i].is_in_graph)
            destroy_user_object(i);
}

/* ---- kernels -------------------------------------------------------------------------------------------------- */

struct normfuse_cuda_signature fake_driver_signature(int kernel)
{
    return signatures[kernel];
}

/* 0 where the text has no such constant. */
static int32_t constant_of(const char *text, const char *name)
{
    const char *const at = strstr(text, name);
    return at != NULL ? (int32_t)strtol(at + strlen(name), NULL, 10) : 0;
}

/* Machine code is what fake_nvrtc.c makes of a text. */
static CUresult load(CUlibrary *library, const void *code)
{
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&mutex);
    if (fake_driver.code_failures != 0) {
        fake_driver.code_failures--;
        result = fake_driver.code_result;
    } else if (fake_driver.loads == FAKE_KERNELS) {
        result = CUDA_ERROR_OUT_OF_MEMORY;
    } else {
        const int number = fake_driver.loads;
        if (fake_driver.load != NULL) {
            result = fake_driver.load(number, code, names[number]);
        } else {
            struct normfuse_cuda_signature *const of = &signatures[number];
#define CONSTANT(name) of->name = constant_of(code, "    " #name " = ");
            NORMFUSE_SIGNATURE_LIST(CONSTANT)
#undef CONSTANT
        }
        if (result == CUDA_SUCCESS) {
            *library = (CUlibrary)(void *)&libraries[number];
            fake_driver.loads++;
            fake_driver.libraries++;
        }
    }
    pthread_mutex_unlock(&mutex);
    return result;
}

CUresult cuLibraryLoadData(CUlibrary *library, const void *code, CUjit_option *jit_options, void **jit_values,
                           unsigned jit_count, CUlibraryOption *options, void **values, unsigned count)
{
    (void)jit_options;
    (void)jit_values;
    (void)options;
    (void)values;
    CALLED(cuLibraryLoadData);
    if (is_refused_by_capture())
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (memcmp(code, "\177ELF", 4) != 0 || jit_count != 0 || count != 0)
        return CUDA_ERROR_INVALID_IMAGE;
    return load(library, code);
}

CUresult cuLibraryUnload(CUlibrary library)
{
    CALLED(cuLibraryUnload);
    pthread_mutex_lock(&mutex);
    (void)library;
    fake_driver.libraries--;
    pthread_mutex_unlock(&mutex);
    return CUDA_SUCCESS;
}

CUresult cuLibraryGetKernel(CUkernel *kernel, CUlibrary library, const char *name)
{
    CALLED(cuLibraryGetKernel);
    const int number = (int)((const char *)(const void *)library - libraries);
    if ((fake_driver.missing_kernel != NULL && strcmp(name, fake_driver.missing_kernel) == 0) ||
        (fake_driver.load != NULL && strcmp(name, names[number]) != 0))
        return CUDA_ERROR_NOT_FOUND;
    snprintf(names[number], sizeof *names, "%s", name);
    *kernel = (CUkernel)(void *)&kernels[number];
    return CUDA_SUCCESS;
}

CUresult cuKernelGetFunction(CUfunction *function, CUkernel kernel)
{
    CALLED(cuKernelGetFunction);
    const int device = current_device();
    if (device < 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (is_destroyed())
        return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    if (kernel_of(kernel) < 0)
        return CUDA_ERROR_INVALID_HANDLE;
    *function = (CUfunction)(void *)kernel;
    return fake_driver.device[device].function_result;
}

CUresult cuFuncLoad(CUfunction function)
{
    CALLED(cuFuncLoad);
    const int device = current_device(), kernel = kernel_of(function);
    if (device < 0 || kernel < 0)
        return CUDA_ERROR_INVALID_HANDLE;
    if (is_refused_by_capture())
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    pthread_mutex_lock(&mutex);
    fake_driver.device[device].functions_loaded[kernel]++;
    pthread_mutex_unlock(&mutex);
    return CUDA_SUCCESS;
}

CUresult cuKernelGetAttribute(int *value, CUfunction_attribute attribute, CUkernel handle, CUdevice device)
{
    (void)device;
    CALLED(cuKernelGetAttribute);
    const int kernel = kernel_of(handle);
    if (kernel < 0 || attribute != CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)
        return CUDA_ERROR_INVALID_VALUE;
    *value = fake_driver.fixed_shared[kernel];
    return CUDA_SUCCESS;
}

CUresult cuKernelSetAttribute(CUfunction_attribute attribute, int value, CUkernel handle, CUdevice ordinal)
{
    CALLED(cuKernelSetAttribute);
    const int kernel = kernel_of(handle);
    struct fake_device *const device = &fake_driver.device[ordinal];
    if (kernel < 0)
        return CUDA_ERROR_INVALID_HANDLE;
    if (attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) {
        if (value < 0 || value > device->shared_per_block - fake_driver.fixed_shared[kernel])
            return CUDA_ERROR_INVALID_VALUE;
        device->dynamic_shared[kernel] = value;
        return CUDA_SUCCESS;
    }
    if (attribute != CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED || !device->clusters)
        return CUDA_ERROR_INVALID_VALUE;
    device->large_clusters[kernel] = value != 0;
    return CUDA_SUCCESS;
}

/* ---- launches ------------------------------------------------------------------------------------------------ */

static int smaller(int a, int b)
{
    return a < b ? a : b;
}

/* Blocks of one multiprocessor, of kernels that were compiled to have the registers for so many. */
static int resident(const struct fake_device *device, int kernel, int threads, size_t dynamic)
{
    const int shared = (int)dynamic + fake_driver.fixed_shared[kernel];
    if (threads <= 0 || threads > 1024 || dynamic > (size_t)device->dynamic_shared[kernel])
        return 0;
    const int blocks = smaller(32, device->threads_per_multiprocessor / threads);
    return smaller(blocks, device->shared_per_multiprocessor / (shared + device->shared_reserved));
}

/* Reads the attributes into `launch`, and refuses what the driver refuses. */
static CUresult read_config(struct fake_launch *launch, const CUlaunchConfig *config, CUfunction function)
{
    const int ordinal = current_device(), kernel = kernel_of(function);
    if (ordinal < 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (is_destroyed())
        return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    if (kernel < 0)
        return CUDA_ERROR_INVALID_HANDLE;
    const struct fake_device *const device = &fake_driver.device[ordinal];
    *launch = (struct fake_launch){.kernel = kernel,
                                   .name = fake_driver_kernel_name(kernel),
                                   .grid = config->gridDimX,
                                   .threads = config->blockDimX,
                                   .shared = config->sharedMemBytes,
                                   .stream = (void *)config->hStream,
                                   .device = ordinal,
                                   .context = stack[depth - 1]};
    for (unsigned i = 0; i < config->numAttrs; i++) {
        const CUlaunchAttribute *const attribute = &config->attrs[i];
        if (attribute->id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) {
            if (attribute->value.clusterDim.y != 1 || attribute->value.clusterDim.z != 1)
                return CUDA_ERROR_INVALID_CLUSTER_SIZE;
            launch->cluster = attribute->value.clusterDim.x;
        } else if (attribute->id == CU_LAUNCH_ATTRIBUTE_COOPERATIVE) {
            launch->cooperative = attribute->value.cooperative != 0;
        } else if (attribute->id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION) {
            launch->dependent = attribute->value.programmaticStreamSerializationAllowed != 0;
        } else {
            return CUDA_ERROR_INVALID_VALUE;
        }
    }
    if (config->gridDimY != 1 || config->gridDimZ != 1 || config->blockDimY != 1 || config->blockDimZ != 1)
        return CUDA_ERROR_INVALID_VALUE;
    if (launch->grid == 0 || launch->grid > INT32_MAX ||
        resident(device, kernel, (int)launch->threads, launch->shared) == 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (launch->cluster != 0 && (!device->clusters || launch->grid % launch->cluster != 0 ||
                                 launch->cluster > (device->large_clusters[kernel] ? 16u : 8u)))
        return CUDA_ERROR_INVALID_CLUSTER_SIZE;
    return CUDA_SUCCESS;
}

/* The arguments that device/arguments.h gives a kernel. */
static size_t argument_bytes_of(const struct normfuse_cuda_signature *of)
{
    return of->body == NORMFUSE_BODY_single      ? sizeof(struct normfuse_single_arguments)
           : of->body == NORMFUSE_BODY_stream || of->body == NORMFUSE_BODY_held
               ? sizeof(struct normfuse_stream_arguments)
           : of->body == NORMFUSE_BODY_transpose ? sizeof(struct normfuse_transpose_arguments)
           : of->work == NORMFUSE_WORK_MERGE     ? sizeof(struct normfuse_merge_arguments)
                                                 : sizeof(struct normfuse_finish_arguments);
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra)
{
    CALLED(cuLaunchKernelEx);
    static _Thread_local struct fake_launch launch;
    CUresult result = read_config(&launch, config, function);
    if (result != CUDA_SUCCESS)
        return result;
    const struct fake_device *const device = &fake_driver.device[launch.device];
    const uint32_t blocks =
        (uint32_t)(resident(device, launch.kernel, (int)launch.threads, launch.shared) * device->multiprocessors);
    if (launch.cooperative && launch.grid > blocks)
        return CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE;
    /* The form with a buffer is refused for cooperative launches by the driver itself. */
    if (parameters == NULL || parameters[0] == NULL || extra != NULL)
        return CUDA_ERROR_INVALID_VALUE;
    if (fake_driver.notes_arguments)
        memcpy(launch.arguments, parameters[0], argument_bytes_of(&signatures[launch.kernel]));
    if (fake_driver.launch_result != CUDA_SUCCESS)
        return fake_driver.launch_result;
    pthread_mutex_lock(&mutex);
    if (fake_driver.launches < FAKE_LAUNCHES)
        fake_driver.launch[fake_driver.launches] = launch;
    fake_driver.launches++;
    pthread_mutex_unlock(&mutex);
    if (fake_driver.run != NULL)
        fake_driver.run(&launch, parameters[0]);
    return CUDA_SUCCESS;
}
