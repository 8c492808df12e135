/* SPDX-License-Identifier: MIT
 *
 * described_gpu.c - see described_gpu.h. */
#include "described_gpu.h"

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#if defined(NORMFUSE_HAVE_CUDA)
#include "src/cuda/driver.h"

struct gpu {
    int capability, multiprocessors, shared_per_block;
    const char *name;
};

/* One GPU of each generation, the one that most have; what a kernel is compiled for depends on no other of these figures. */
static const struct gpu gpus[] = {
    {80, 108, 163 << 10, "NVIDIA A100"},           {86, 82, 99 << 10, "NVIDIA GeForce RTX 3090"},
    {89, 128, 99 << 10, "NVIDIA GeForce RTX 4090"}, {90, 132, 227 << 10, "NVIDIA H200"},
    {100, 148, 227 << 10, "NVIDIA B200"},          {120, 170, 99 << 10, "NVIDIA GeForce RTX 5090"}};
enum { GPUS = sizeof gpus / sizeof *gpus };
static const struct gpu *gpu;

/* Handles are addresses in here; nothing is stored in them. */
static char handle[2];
#define CONTEXT ((CUcontext)(void *)&handle[0])
#define KERNEL ((CUkernel)(void *)&handle[1])

static CUresult get_version(int *version)
{
    *version = 13990; /* NVRTC may be of any version that the library looks for */
    return CUDA_SUCCESS;
}

static CUresult init(unsigned flags)
{
    (void)flags;
    return CUDA_SUCCESS;
}

static CUresult get_error(CUresult result, const char **text)
{
    (void)result;
    *text = "a GPU that is not there";
    return CUDA_SUCCESS;
}

static CUresult get_count(int *count)
{
    *count = 1;
    return CUDA_SUCCESS;
}

static CUresult get_device(CUdevice *device, int ordinal)
{
    *device = ordinal;
    return CUDA_SUCCESS;
}

static CUresult get_name(char *name, int bytes, CUdevice device)
{
    (void)device;
    snprintf(name, (size_t)bytes, "%s", gpu->name);
    return CUDA_SUCCESS;
}

static CUresult get_attribute(int *value, CUdevice_attribute attribute, CUdevice device)
{
    (void)device;
    switch ((int)attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = gpu->capability / 10; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = gpu->capability % 10; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = gpu->multiprocessors; break;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR:
        *value = gpu->capability % 10 != 0 || gpu->capability == 120 ? 1536 : 2048;
        break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = gpu->shared_per_block; break;
    case CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH: *value = gpu->capability >= 90; break;
    default: return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

static CUresult retain(CUcontext *context, CUdevice device)
{
    (void)device;
    *context = CONTEXT;
    return CUDA_SUCCESS;
}

static CUresult release(CUdevice device)
{
    (void)device;
    return CUDA_SUCCESS;
}

static CUresult get_context(CUcontext *context)
{
    *context = CONTEXT;
    return CUDA_SUCCESS;
}

static CUresult get_device_of_context(CUdevice *device)
{
    *device = 0;
    return CUDA_SUCCESS;
}

static CUresult push_context(CUcontext context)
{
    (void)context;
    return CUDA_SUCCESS;
}

static CUresult exchange_mode(CUstreamCaptureMode *mode)
{
    (void)mode;
    return CUDA_SUCCESS;
}

static CUresult load_library(CUlibrary *library, const void *code, CUjit_option *jit_options, void **jit_values,
                             unsigned jit_count, CUlibraryOption *options, void **values, unsigned count)
{
    (void)code, (void)jit_options, (void)jit_values, (void)jit_count, (void)options, (void)values, (void)count;
    *library = (CUlibrary)(void *)&handle[1];
    return CUDA_SUCCESS;
}

static CUresult unload_library(CUlibrary library)
{
    (void)library;
    return CUDA_SUCCESS;
}

static CUresult get_kernel(CUkernel *kernel, CUlibrary library, const char *name)
{
    (void)library, (void)name;
    *kernel = KERNEL;
    return CUDA_SUCCESS;
}

static CUresult get_function(CUfunction *function, CUkernel kernel)
{
    *function = (CUfunction)(void *)kernel;
    return CUDA_SUCCESS;
}

static CUresult get_kernel_attribute(int *value, CUfunction_attribute attribute, CUkernel kernel, CUdevice device)
{
    (void)attribute, (void)kernel, (void)device;
    *value = 0;
    return CUDA_SUCCESS;
}

static CUresult set_kernel_attribute(CUfunction_attribute attribute, int value, CUkernel kernel, CUdevice device)
{
    (void)attribute, (void)value, (void)kernel, (void)device;
    return CUDA_SUCCESS;
}

static CUresult load_function(CUfunction function)
{
    (void)function;
    return CUDA_SUCCESS;
}

static CUresult launch(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra)
{
    (void)config, (void)function, (void)parameters, (void)extra;
    return CUDA_ERROR_NOT_SUPPORTED;
}

static const struct normfuse_cuda_driver driver = {
    .cuDriverGetVersion = get_version,
    .cuInit = init,
    .cuGetErrorString = get_error,
    .cuDeviceGetCount = get_count,
    .cuDeviceGet = get_device,
    .cuDeviceGetName = get_name,
    .cuDeviceGetAttribute = get_attribute,
    .cuDevicePrimaryCtxRetain = retain,
    .cuDevicePrimaryCtxRelease = release,
    .cuCtxGetCurrent = get_context,
    .cuCtxGetDevice = get_device_of_context,
    .cuCtxPushCurrent = push_context,
    .cuCtxPopCurrent = get_context,
    .cuThreadExchangeStreamCaptureMode = exchange_mode,
    .cuLibraryLoadData = load_library,
    .cuLibraryUnload = unload_library,
    .cuLibraryGetKernel = get_kernel,
    .cuKernelGetFunction = get_function,
    .cuKernelGetAttribute = get_kernel_attribute,
    .cuKernelSetAttribute = set_kernel_attribute,
    .cuFuncLoad = load_function,
    .cuLaunchKernelEx = launch,
};

bool described_gpu_use(const char *capability)
{
    for (int i = 0; i < GPUS; i++) {
        char name[16];
        snprintf(name, sizeof name, "%d.%d", gpus[i].capability / 10, gpus[i].capability % 10);
        if (strcmp(name, capability) != 0)
            continue;
        gpu = &gpus[i];
        normfuse_cuda_use_driver(&driver);
        return true;
    }
    return false;
}

const char *described_gpu_names(void)
{
    static char names[64 * GPUS];
    size_t at = 0;
    for (int i = 0; i < GPUS; i++)
        at += (size_t)snprintf(names + at, sizeof names - at, "%s%d.%d (%s)", i > 0 ? ", " : "",
                               gpus[i].capability / 10, gpus[i].capability % 10, gpus[i].name);
    return names;
}

#else

bool described_gpu_use(const char *capability)
{
    (void)capability;
    return false;
}

const char *described_gpu_names(void)
{
    return "none: normfuse was built without CUDA";
}

#endif
