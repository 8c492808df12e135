/* SPDX-License-Identifier: MIT
 *
 * driver.h - the functions of the CUDA driver that the library calls. The library looks them up by name at run time and
 * links to none. loader.c's are in a table, in whose place tests put functions of their own; none of them allocates,
 * copies or waits. bindings/stream_sync.c's follow. */
#ifndef NORMFUSE_CUDA_DRIVER_H
#define NORMFUSE_CUDA_DRIVER_H

#include "driver_types.h"
#include "loader.h"

/* Drivers of an older major version of CUDA are refused; of later ones, those that lack a function. */
enum { NORMFUSE_CUDA_DRIVER_MAJOR = 12 };

/* The driver has the current version of these functions under other names. */
#define cuCtxPopCurrent cuCtxPopCurrent_v2
#define cuCtxPushCurrent cuCtxPushCurrent_v2
#define cuDevicePrimaryCtxRelease cuDevicePrimaryCtxRelease_v2
#define cuMemAlloc cuMemAlloc_v2
#define cuMemFree cuMemFree_v2
#define cuStreamDestroy cuStreamDestroy_v2

CUresult cuDriverGetVersion(int *version);
CUresult cuInit(unsigned int flags);
CUresult cuGetErrorString(CUresult result, const char **text);
CUresult cuDeviceGetCount(int *count);
CUresult cuDeviceGet(CUdevice *device, int ordinal);
CUresult cuDeviceGetName(char *name, int bytes, CUdevice device);
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device);
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device);
CUresult cuDevicePrimaryCtxRelease(CUdevice device);
CUresult cuCtxGetCurrent(CUcontext *context);
CUresult cuCtxGetDevice(CUdevice *device);
CUresult cuCtxPushCurrent(CUcontext context);
CUresult cuCtxPopCurrent(CUcontext *context);
CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode);
CUresult cuLibraryLoadData(CUlibrary *library, const void *code, CUjit_option *jit_options, void **jit_values,
                           unsigned int jit_count, CUlibraryOption *options, void **values, unsigned int count);
CUresult cuLibraryUnload(CUlibrary library);
CUresult cuLibraryGetKernel(CUkernel *kernel, CUlibrary library, const char *name);
CUresult cuKernelGetFunction(CUfunction *function, CUkernel kernel);
CUresult cuKernelGetAttribute(int *value, CUfunction_attribute attribute, CUkernel kernel, CUdevice device);
CUresult cuKernelSetAttribute(CUfunction_attribute attribute, int value, CUkernel kernel, CUdevice device);
CUresult cuFuncLoad(CUfunction function);
CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra);

/* Functions of bindings/stream_sync.c. */
CUresult cuCtxGetId(CUcontext context, unsigned long long *id);
CUresult cuMemAlloc(CUdeviceptr *memory, size_t bytes);
CUresult cuMemFree(CUdeviceptr memory);
CUresult cuMemAllocAsync(CUdeviceptr *memory, size_t bytes, CUstream stream);
CUresult cuMemFreeAsync(CUdeviceptr memory, CUstream stream);
CUresult cuMemsetD8Async(CUdeviceptr memory, unsigned char value, size_t bytes, CUstream stream);
CUresult cuStreamCreate(CUstream *stream, unsigned int flags);
CUresult cuStreamDestroy(CUstream stream);
CUresult cuStreamSynchronize(CUstream stream);
CUresult cuStreamGetId(CUstream stream, unsigned long long *id);
/* The version of CUDA 11.3 and 12, which newer drivers have too. */
CUresult cuStreamGetCaptureInfo_v2(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *captured,
                                   const CUgraphNode **dependencies, size_t *count);
CUresult cuUserObjectCreate(CUuserObject *object, void *context, CUhostFn destroy, unsigned int references,
                            unsigned int flags);
CUresult cuUserObjectRelease(CUuserObject object, unsigned int references);
CUresult cuGraphRetainUserObject(CUgraph graph, CUuserObject object, unsigned int references, unsigned int flags);

/* loader.c's. */
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
