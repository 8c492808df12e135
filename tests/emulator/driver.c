/* SPDX-License-Identifier: MIT
 *
 * driver.c - with fake_driver.c and fake_gpu.c a libcuda.so.1 whose memory is the CPU's and whose kernels run: a launch
 * has ended when it returns. Captures are refused, since what they replay would have to be run again. */
#include <stdlib.h>
#include <string.h>

#include "emulator.h"
#include "fake_driver.h"

/* fake_driver.c notes a launch in memory of the thread, which kernels take for shared variables. */
static void run(const struct fake_launch *noted, const void *parameter)
{
    const struct emulated_launch launch = {.kernel = (int)noted->kernel,
                                           .name = noted->name,
                                           .parameter = parameter,
                                           .blocks = noted->grid,
                                           .threads = noted->threads,
                                           .cluster = noted->cluster > 1 ? noted->cluster : 1,
                                           .shared = noted->shared,
                                           .cooperative = noted->cooperative};
    emulator_run(&launch);
}

/* Of capability 9.0, but small, so that kernels of the whole grid have few threads. One that a cluster of 16 fits. */
__attribute__((constructor(200))) static void begin(void)
{
    const char *const multiprocessors = getenv("NORMFUSE_EMULATED_MULTIPROCESSORS");
    fake_driver_reset();
    (void)fake_driver_read_registers(NORMFUSE_KERNEL_LIMITS);
    fake_driver.device[0].name = "emulated GPU";
    fake_driver.device[0].multiprocessors = multiprocessors != NULL ? atoi(multiprocessors) : 16;
    fake_driver.run = run;
}

static void *at(CUdeviceptr memory)
{
    return (void *)(uintptr_t)memory;
}

CUresult cuMemAlloc(CUdeviceptr *memory, size_t bytes)
{
    void *const made = emulator_allocate(bytes);
    *memory = (CUdeviceptr)(uintptr_t)made;
    return made != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemFree(CUdeviceptr memory)
{
    emulator_free(at(memory));
    return CUDA_SUCCESS;
}

CUresult cuMemsetD8Async(CUdeviceptr memory, unsigned char value, size_t bytes, CUstream stream)
{
    (void)stream;
    memset(at(memory), value, bytes);
    return CUDA_SUCCESS;
}

CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void *from, size_t bytes, CUstream stream)
{
    (void)stream;
    memcpy(at(to), from, bytes);
    return CUDA_SUCCESS;
}

CUresult cuMemcpyDtoHAsync(void *to, CUdeviceptr from, size_t bytes, CUstream stream)
{
    (void)stream;
    memcpy(to, at(from), bytes);
    return CUDA_SUCCESS;
}

CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream)
{
    (void)stream;
    memmove(at(to), at(from), bytes);
    return CUDA_SUCCESS;
}

CUresult cuStreamBeginCapture(CUstream stream, CUstreamCaptureMode mode)
{
    (void)stream, (void)mode;
    return CUDA_ERROR_NOT_SUPPORTED;
}
