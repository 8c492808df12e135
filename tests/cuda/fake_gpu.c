/* SPDX-License-Identifier: MIT
 *
 * fake_gpu.c - with fake_driver.c a libcuda.so.1 that the program can open, of one H200 that computes nothing: memory
 * is addresses of nothing, and a replay takes a time that is made up from the kernels of its graph. What is weak has
 * another meaning in tests/cuda/emulator/driver.c. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/driver_functions.h"
#include "fake_driver.h"

struct graph {
    double us;
};

static double clock_us, event_us[2];
static int events;

/* As many blocks are resident as on a real one. Kernels that are compiled at run time are what fake_nvrtc.c makes,
 * which no cache may keep. */
__attribute__((constructor(101))) static void begin(void)
{
#if defined(NORMFUSE_FAKE_NVRTC)
    setenv("NORMFUSE_NVRTC", NORMFUSE_FAKE_NVRTC, 1);
    setenv("NORMFUSE_CACHE_DIR", "", 1);
#endif
    fake_driver_reset();
}

CUresult cuDeviceTotalMem(size_t *bytes, CUdevice device)
{
    (void)device;
    *bytes = (size_t)139 << 30;
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context)
{
    fake_driver_set_context(context);
    return CUDA_SUCCESS;
}

__attribute__((weak)) CUresult cuMemAlloc(CUdeviceptr *memory, size_t bytes)
{
    static uint64_t next = UINT64_C(0x100000000000);
    *memory = next;
    next += (bytes + 511) / 256 * 256;
    return CUDA_SUCCESS;
}

__attribute__((weak)) CUresult cuMemFree(CUdeviceptr memory)
{
    (void)memory;
    return CUDA_SUCCESS;
}

__attribute__((weak)) CUresult cuMemsetD8Async(CUdeviceptr memory, unsigned char value, size_t bytes, CUstream stream)
{
    (void)memory, (void)value, (void)bytes, (void)stream;
    return CUDA_SUCCESS;
}

__attribute__((weak)) CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void *from, size_t bytes, CUstream stream)
{
    (void)to, (void)from, (void)bytes, (void)stream;
    return CUDA_SUCCESS;
}

__attribute__((weak)) CUresult cuMemcpyDtoHAsync(void *to, CUdeviceptr from, size_t bytes, CUstream stream)
{
    (void)from, (void)stream;
    memset(to, 0, bytes);
    return CUDA_SUCCESS;
}

__attribute__((weak)) CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream)
{
    (void)to, (void)from, (void)bytes, (void)stream;
    return CUDA_SUCCESS;
}

CUresult cuStreamQuery(CUstream stream)
{
    (void)stream;
    return CUDA_SUCCESS;
}

__attribute__((weak)) CUresult cuStreamBeginCapture(CUstream stream, CUstreamCaptureMode mode)
{
    (void)stream, (void)mode;
    fake_driver.launches = 0;
    return CUDA_SUCCESS;
}

/* 3 us a kernel, and up to 10 more by its number. */
CUresult cuStreamEndCapture(CUstream stream, CUgraph *captured)
{
    struct graph *const graph = malloc(sizeof *graph);
    (void)stream;
    if (graph == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    const int launches = fake_driver.launches, noted = launches < FAKE_LAUNCHES ? launches : FAKE_LAUNCHES;
    double us = 0;
    for (int i = 0; i < noted; i++)
        us += 3 + fake_driver.launch[i].kernel % 11;
    graph->us = launches > 0 ? us * launches / noted : 1;
    *captured = (CUgraph)(void *)graph;
    return CUDA_SUCCESS;
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec *executable, CUgraph captured, unsigned long long flags)
{
    struct graph *const graph = malloc(sizeof *graph);
    (void)flags;
    if (graph == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *graph = *(const struct graph *)(const void *)captured;
    *executable = (CUgraphExec)(void *)graph;
    return CUDA_SUCCESS;
}

CUresult cuGraphLaunch(CUgraphExec executable, CUstream stream)
{
    (void)stream;
    clock_us += ((const struct graph *)(const void *)executable)->us;
    return CUDA_SUCCESS;
}

CUresult cuGraphDestroy(CUgraph captured)
{
    free(captured);
    return CUDA_SUCCESS;
}

CUresult cuGraphExecDestroy(CUgraphExec executable)
{
    free(executable);
    return CUDA_SUCCESS;
}

CUresult cuEventCreate(CUevent *event, unsigned flags)
{
    (void)flags;
    *event = (CUevent)(void *)&event_us[events++ % 2];
    return CUDA_SUCCESS;
}

CUresult cuEventRecord(CUevent event, CUstream stream)
{
    (void)stream;
    *(double *)(void *)event = clock_us;
    return CUDA_SUCCESS;
}

CUresult cuEventElapsedTime(float *milliseconds, CUevent from, CUevent to)
{
    *milliseconds = (float)((*(double *)(void *)to - *(double *)(void *)from) * 1e-3);
    return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image)
{
    (void)image;
    *module = (CUmodule)(void *)&clock_us;
    return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name)
{
    (void)name;
    *function = (CUfunction)(void *)module;
    return CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunction function, unsigned blocks, unsigned blocks_y, unsigned blocks_z, unsigned threads,
                        unsigned threads_y, unsigned threads_z, unsigned shared, CUstream stream, void **parameters,
                        void **extra)
{
    (void)function, (void)blocks, (void)blocks_y, (void)blocks_z, (void)threads, (void)threads_y, (void)threads_z;
    (void)shared, (void)stream, (void)parameters, (void)extra;
    return CUDA_SUCCESS;
}
