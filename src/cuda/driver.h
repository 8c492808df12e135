/* SPDX-License-Identifier: MIT
 *
 * driver.h - the entry points of the CUDA driver that the library calls: all there are, and none that allocates,
 * copies or waits. loader.c looks them up by name; tests put functions of their own in their place. */
#ifndef NORMFUSE_CUDA_DRIVER_H
#define NORMFUSE_CUDA_DRIVER_H

#include <cuda.h>

#include "loader.h"

/* cuda.h maps some names to versioned ones (cuCtxPushCurrent_v2) by macros. They expand here too, so the member, its
 * type and the name that is looked up are always those of one version. */
#define NORMFUSE_CUDA_DRIVER_LIST(ENTRY)                                                                               \
    ENTRY(cuDriverGetVersion) ENTRY(cuInit) ENTRY(cuGetErrorString)                                                    \
    ENTRY(cuDeviceGetCount) ENTRY(cuDeviceGet) ENTRY(cuDeviceGetName) ENTRY(cuDeviceGetAttribute)                      \
    ENTRY(cuDevicePrimaryCtxRetain) ENTRY(cuDevicePrimaryCtxRelease)                                                   \
    ENTRY(cuCtxGetCurrent) ENTRY(cuCtxGetDevice) ENTRY(cuCtxPushCurrent) ENTRY(cuCtxPopCurrent)                        \
    ENTRY(cuThreadExchangeStreamCaptureMode)                                                                           \
    ENTRY(cuLibraryLoadData) ENTRY(cuLibraryUnload) ENTRY(cuLibraryGetKernel)                                          \
    ENTRY(cuKernelGetFunction) ENTRY(cuKernelGetAttribute) ENTRY(cuKernelSetAttribute) ENTRY(cuFuncLoad)               \
    ENTRY(cuLaunchKernelEx)

struct normfuse_cuda_driver {
#define NORMFUSE_CUDA_DRIVER_MEMBER(name) __typeof__(&name) name;
    NORMFUSE_CUDA_DRIVER_LIST(NORMFUSE_CUDA_DRIVER_MEMBER)
#undef NORMFUSE_CUDA_DRIVER_MEMBER
};

/* For specialize.c: loads machine code, of which the driver keeps a copy, and its kernel of this name into the context
 * that a call of this thread would use. */
CUresult normfuse_cuda_load_code(const struct normfuse_cuda_device *device, const void *code, const char *name,
                                 CUkernel *kernel);
/* The status of a kernel that could not be loaded, and its words. */
normfuse_status normfuse_cuda_refuse_kernels(const char *call, const struct normfuse_cuda_device *device,
                                             const char *kernel, CUresult result);

/* For tests: forgets everything known of the driver, and takes `driver` in place of libcuda.so.1 from now on; NULL:
 * that one again. No other call of the library may be running. */
void normfuse_cuda_use_driver(const struct normfuse_cuda_driver *driver);

#endif
