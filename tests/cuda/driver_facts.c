/* SPDX-License-Identifier: MIT
 *
 * driver_facts.c - see driver_facts.h. Compiled twice: for the project's headers, and with NORMFUSE_TEST_CUDA_H for
 * cuda.h. */
#include <stddef.h>

#if defined(NORMFUSE_TEST_CUDA_H)
#include <cuda.h>
#define FACTS facts_of_cuda_h
#else
#include "cli/driver_functions.h"
#define FACTS facts_of_ours
#endif

#include "driver_facts.h"

#define VALUE(name) {#name, (long long)(name), ""},
#define SIZE(type) {"sizeof " #type, (long long)sizeof(type), ""},
#define OFFSET(type, member) {#type "." #member, (long long)offsetof(type, member), ""},
#define TEXT(name) #name
/* cuEventElapsedTime is left out: newer headers have a later version of it. */
#define FUNCTION(name) {#name, 0, TEXT(name)},

const struct driver_fact FACTS[] = {
    VALUE(CUDA_SUCCESS) VALUE(CUDA_ERROR_INVALID_VALUE) VALUE(CUDA_ERROR_OUT_OF_MEMORY)
    VALUE(CUDA_ERROR_NOT_INITIALIZED) VALUE(CUDA_ERROR_STUB_LIBRARY) VALUE(CUDA_ERROR_NO_DEVICE)
    VALUE(CUDA_ERROR_INVALID_DEVICE) VALUE(CUDA_ERROR_INVALID_IMAGE) VALUE(CUDA_ERROR_INVALID_CONTEXT)
    VALUE(CUDA_ERROR_NO_BINARY_FOR_GPU) VALUE(CUDA_ERROR_INVALID_PTX) VALUE(CUDA_ERROR_JIT_COMPILER_NOT_FOUND)
    VALUE(CUDA_ERROR_UNSUPPORTED_PTX_VERSION) VALUE(CUDA_ERROR_JIT_COMPILATION_DISABLED)
    VALUE(CUDA_ERROR_INVALID_SOURCE) VALUE(CUDA_ERROR_INVALID_HANDLE) VALUE(CUDA_ERROR_NOT_FOUND)
    VALUE(CUDA_ERROR_NOT_READY) VALUE(CUDA_ERROR_ILLEGAL_ADDRESS) VALUE(CUDA_ERROR_CONTEXT_IS_DESTROYED)
    VALUE(CUDA_ERROR_LAUNCH_FAILED) VALUE(CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE)
    VALUE(CUDA_ERROR_NOT_SUPPORTED) VALUE(CUDA_ERROR_SYSTEM_DRIVER_MISMATCH)
    VALUE(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED) VALUE(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)
    VALUE(CUDA_ERROR_INVALID_CLUSTER_SIZE) VALUE(CUDA_ERROR_UNKNOWN)
    VALUE(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT) VALUE(CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)
    VALUE(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR)
    VALUE(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) VALUE(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)
    VALUE(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR)
    VALUE(CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR)
    VALUE(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
    VALUE(CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK) VALUE(CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH)
    VALUE(CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES) VALUE(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)
    VALUE(CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED) VALUE(CU_STREAM_CAPTURE_MODE_GLOBAL)
    VALUE(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL) VALUE(CU_STREAM_CAPTURE_MODE_RELAXED)
    VALUE(CU_STREAM_CAPTURE_STATUS_NONE) VALUE(CU_STREAM_CAPTURE_STATUS_ACTIVE)
    VALUE(CU_STREAM_CAPTURE_STATUS_INVALIDATED) VALUE(CU_STREAM_NON_BLOCKING) VALUE(CU_EVENT_DEFAULT)
    VALUE(CU_USER_OBJECT_NO_DESTRUCTOR_SYNC) VALUE(CU_GRAPH_USER_OBJECT_MOVE)
    VALUE(CU_LAUNCH_ATTRIBUTE_COOPERATIVE) VALUE(CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)
    VALUE(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION) VALUE(CU_JIT_MAX_REGISTERS)
    VALUE(CU_LIBRARY_HOST_UNIVERSAL_FUNCTION_AND_DATA_TABLE)
    VALUE((uintptr_t)CU_STREAM_LEGACY) VALUE((uintptr_t)CU_STREAM_PER_THREAD)
    SIZE(CUdevice) SIZE(CUdeviceptr) SIZE(cuuint64_t) SIZE(CUresult) SIZE(CUdevice_attribute) SIZE(CUfunction_attribute)
    SIZE(CUstreamCaptureMode) SIZE(CUstreamCaptureStatus) SIZE(CUjit_option) SIZE(CUlibraryOption)
    SIZE(CUlaunchAttributeID) SIZE(CUlaunchAttributeValue) SIZE(CUlaunchAttribute) SIZE(CUlaunchConfig)
    OFFSET(CUlaunchAttribute, id) OFFSET(CUlaunchAttribute, value) OFFSET(CUlaunchAttributeValue, cooperative)
    OFFSET(CUlaunchAttributeValue, clusterDim.x) OFFSET(CUlaunchAttributeValue, clusterDim.y)
    OFFSET(CUlaunchAttributeValue, clusterDim.z) OFFSET(CUlaunchAttributeValue, programmaticStreamSerializationAllowed)
    OFFSET(CUlaunchConfig, gridDimX) OFFSET(CUlaunchConfig, gridDimY) OFFSET(CUlaunchConfig, gridDimZ)
    OFFSET(CUlaunchConfig, blockDimX) OFFSET(CUlaunchConfig, blockDimY) OFFSET(CUlaunchConfig, blockDimZ)
    OFFSET(CUlaunchConfig, sharedMemBytes) OFFSET(CUlaunchConfig, hStream) OFFSET(CUlaunchConfig, attrs)
    OFFSET(CUlaunchConfig, numAttrs)
    FUNCTION(cuDriverGetVersion) FUNCTION(cuInit) FUNCTION(cuGetErrorString) FUNCTION(cuDeviceGetCount)
    FUNCTION(cuDeviceGet) FUNCTION(cuDeviceGetName) FUNCTION(cuDeviceGetAttribute)
    FUNCTION(cuDevicePrimaryCtxRetain) FUNCTION(cuDevicePrimaryCtxRelease) FUNCTION(cuCtxGetCurrent)
    FUNCTION(cuCtxGetDevice) FUNCTION(cuCtxPushCurrent) FUNCTION(cuCtxPopCurrent)
    FUNCTION(cuThreadExchangeStreamCaptureMode) FUNCTION(cuLibraryLoadData) FUNCTION(cuLibraryUnload)
    FUNCTION(cuLibraryGetKernel) FUNCTION(cuKernelGetFunction) FUNCTION(cuKernelGetAttribute)
    FUNCTION(cuKernelSetAttribute) FUNCTION(cuFuncLoad) FUNCTION(cuLaunchKernelEx) FUNCTION(cuCtxGetId)
    FUNCTION(cuMemAlloc) FUNCTION(cuMemFree) FUNCTION(cuMemAllocAsync) FUNCTION(cuMemFreeAsync)
    FUNCTION(cuMemsetD8Async) FUNCTION(cuStreamCreate) FUNCTION(cuStreamDestroy) FUNCTION(cuStreamSynchronize)
    FUNCTION(cuStreamGetId) FUNCTION(cuStreamGetCaptureInfo_v2) FUNCTION(cuUserObjectCreate)
    FUNCTION(cuUserObjectRelease) FUNCTION(cuGraphRetainUserObject) FUNCTION(cuDeviceTotalMem)
    FUNCTION(cuDevicePrimaryCtxReset) FUNCTION(cuCtxSetCurrent) FUNCTION(cuCtxSynchronize)
    FUNCTION(cuMemGetInfo) FUNCTION(cuMemcpyHtoDAsync) FUNCTION(cuMemcpyDtoHAsync) FUNCTION(cuMemcpyDtoDAsync)
    FUNCTION(cuStreamQuery) FUNCTION(cuStreamBeginCapture) FUNCTION(cuStreamEndCapture)
    FUNCTION(cuGraphInstantiateWithFlags) FUNCTION(cuGraphLaunch) FUNCTION(cuGraphDestroy)
    FUNCTION(cuGraphExecDestroy) FUNCTION(cuEventCreate) FUNCTION(cuEventRecord) FUNCTION(cuModuleLoadData)
    FUNCTION(cuModuleGetFunction) FUNCTION(cuFuncSetAttribute) FUNCTION(cuLaunchKernel)
    {NULL, 0, ""}};

#if defined(NORMFUSE_TEST_CUDA_H)
/* The project's functions, of cuda.h's types: the compiler refuses one that cuda.h declares otherwise. Macros whose
 * spelling alone differs go first. */
#undef cuMemcpyDtoDAsync
#undef cuMemcpyDtoHAsync
#undef cuMemcpyHtoDAsync
#undef cuStreamBeginCapture
#define NORMFUSE_CUDA_DRIVER_TYPES_H
#include "cli/driver_functions.h"
#endif
