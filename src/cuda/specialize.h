/* SPDX-License-Identifier: MIT
 *
 * specialize.h - kernels of signatures, compiled and loaded when a call first needs them. */
#ifndef NORMFUSE_CUDA_SPECIALIZE_H
#define NORMFUSE_CUDA_SPECIALIZE_H

#include <stdbool.h>
#include <stdint.h>

#include "driver.h"
#include "loader.h"
#include "signature.h"

/* The kernel, ready to launch on the device. One that is loaded is found without a lock. Otherwise it comes from the
 * cache or from NVRTC, once, however many threads want it; `call` is for the message. Kernels of `beside`, which may be
 * NULL, are compiled side by side with it; their failures are not this one's. A failure is remembered only where
 * compiling the same text again would fail again. Statuses: NO_COMPILER, NO_KERNEL, OUT_OF_MEMORY, DEVICE_ERROR. */
normfuse_status normfuse_cuda_specialized(const char *call, const struct normfuse_cuda_device *device,
                                          const struct normfuse_cuda_signature *signature,
                                          const struct normfuse_cuda_beside *beside, CUkernel *kernel);

/* NULL: it is not loaded. */
CUkernel normfuse_cuda_find_specialized(const struct normfuse_cuda_device *device,
                                        const struct normfuse_cuda_signature *signature);

/* Notes a signature for normfuse_cuda_prepare_noted. OUT_OF_MEMORY. */
normfuse_status normfuse_cuda_note(const char *call, const struct normfuse_cuda_device *device,
                                   const struct normfuse_cuda_signature *signature);

/* Compiles and loads what was noted of the device and is not loaded yet, on as many threads as the pool has.
 * `progress`, if given, is called by this thread, with how many of all are compiled. The status is that of the first
 * one that failed; all are tried. */
normfuse_status normfuse_cuda_prepare_noted(const char *call, const struct normfuse_cuda_device *device,
                                            void (*progress)(void *context, int32_t done, int32_t all), void *context);

/* Calls with(device, kernel) for every loaded kernel of the device until one fails. */
CUresult normfuse_cuda_load_specialized(const struct normfuse_cuda_device *device,
                                        CUresult (*load)(const struct normfuse_cuda_device *, CUkernel));

/* For the child of a fork: what another thread of the parent compiled, nobody compiles here. */
void normfuse_cuda_specialized_after_fork(void);

/* For tests: no kernel is loaded any more. No other call of the library may be running. */
void normfuse_cuda_forget_specialized(void);

#endif
