/* SPDX-License-Identifier: MIT
 *
 * driver.c - with fake_driver.c and fake_gpu.c a libcuda.so.1 whose memory is the CPU's and whose kernels run: a launch
 * has ended when it returns. Captures are refused, since what they replay would have to be run again. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dlfcn.h>
#include <elf.h>
#include <stdlib.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "cli/driver_functions.h"
#include "emulator.h"
#include "fake_driver.h"

static const struct emulated_kernel *specialized[FAKE_KERNELS];

/* The end of a shared object is in its first bytes: what it says of its sections comes last. */
static size_t bytes_of(const void *code)
{
    Elf64_Ehdr header;
    memcpy(&header, code, sizeof header);
    return (size_t)header.e_shoff + (size_t)header.e_shnum * header.e_shentsize;
}

/* A shared object of nvrtc.c is opened as a file, under a name that no other has: by its name a second one would be the
 * first one. */
static CUresult load(int number, const void *code, char name[64])
{
    char path[] = "/tmp/normfuse-kernel-XXXXXX";
    const int file = mkstemp(path);
    Dl_info own;
    if (file < 0)
        return CUDA_ERROR_OUT_OF_MEMORY;
    const size_t bytes = bytes_of(code);
    const bool is_written = write(file, code, bytes) == (ssize_t)bytes;
    close(file);
    /* It calls functions of this library. */
    if (dladdr((void *)&fake_driver, &own) != 0)
        (void)dlopen(own.dli_fname, RTLD_NOW | RTLD_NOLOAD | RTLD_GLOBAL);
    void *const library = is_written ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
    unlink(path);
    specialized[number] = library != NULL ? dlsym(library, "normfuse_emulated_kernel") : NULL;
    if (specialized[number] == NULL) {
        fprintf(stderr, "emulator: a kernel that was compiled at run time is not taken: %s\n", dlerror());
        return CUDA_ERROR_INVALID_IMAGE;
    }
    snprintf(name, 64, "%s", specialized[number]->name);
    return CUDA_SUCCESS;
}

/* fake_driver.c notes a launch in memory of the thread, which kernels take for shared variables. */
static void run(const struct fake_launch *noted, const void *parameter)
{
    const struct emulated_launch launch = {.specialized = specialized[noted->kernel],
                                           .name = noted->name,
                                           .parameter = parameter,
                                           .blocks = noted->grid,
                                           .threads = noted->threads,
                                           .cluster = noted->cluster > 1 ? noted->cluster : 1,
                                           .shared = noted->shared,
                                           .cooperative = noted->cooperative};
    emulator_run(&launch);
}

/* A GPU of capability 9.0, but small, so that kernels of the whole grid have few threads. One that a cluster of 16
 * fits. */
__attribute__((constructor(200))) static void begin(void)
{
    const char *const multiprocessors = getenv("NORMFUSE_EMULATED_MULTIPROCESSORS");
    fake_driver_reset();
    fake_driver.device[0].name = "emulated GPU";
    fake_driver.device[0].multiprocessors = multiprocessors != NULL ? atoi(multiprocessors) : 16;
    fake_driver.load = load;
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
