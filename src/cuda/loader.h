/* SPDX-License-Identifier: MIT
 *
 * loader.h - the CUDA driver, found at run time: devices, kernels, launches. The library links to no part of CUDA;
 * everything here goes through entry points that loader.c looks up in libcuda.so.1 at the first use. The planner
 * chooses kernels and geometry and knows nothing of the driver beyond this file. */
#ifndef NORMFUSE_CUDA_LOADER_H
#define NORMFUSE_CUDA_LOADER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../problem.h"
#include "signature.h"

/* A device's facts, read once. */
struct normfuse_cuda_device {
    uint64_t serial; /* of this reading, from 1 on: what is remembered of a device is of one */
    int32_t ordinal;
    int32_t driver;          /* as cuDriverGetVersion says it: 13000 */
    int32_t capability;      /* 10 * major + minor: 90 */
    int32_t multiprocessors; /* streaming multiprocessors */
    size_t shared_per_block; /* the most that a kernel can be given */
    bool clusters;           /* capability 90 and later */
    const char *name;
};

enum {
    NORMFUSE_CUDA_GRID_BARRIER_WORDS = 8192, /* of sync memory: 512 barriers, each on a cache line of its own */
    NORMFUSE_CUDA_SYNC_BYTES = 65536         /* what normfuse_sync_bytes answers for every device */
};

/* The device's facts. `call` is for the message. Statuses: NO_DRIVER, OLD_DRIVER, NO_KERNEL, DEVICE_ERROR, BAD_ARGUMENT
 * (no such device). `device` NULL (normfuse_prepare): loads the kernels that are compiled into the current context,
 * too, though a call before has found the device. Thread-safe. */
normfuse_status normfuse_cuda_device(const char *call, int32_t ordinal, const struct normfuse_cuda_device **device);

/* Kernels that a call launches, of which those that are missing are compiled side by side. */
enum { NORMFUSE_MAX_BESIDE = 6 };
struct normfuse_cuda_beside {
    int32_t count;
    const struct normfuse_cuda_signature *signatures[NORMFUSE_MAX_BESIDE];
};

struct normfuse_cuda_launch {
    const struct normfuse_cuda_signature *signature; /* of its kernel */
    const struct normfuse_cuda_beside *beside;       /* the call's kernels, or NULL */
    int64_t grid;              /* blocks, one dimension: below 2^31 */
    uint32_t threads, cluster; /* of a block; blocks of a cluster, 0 or 1: none */
    size_t shared;             /* dynamic shared memory of a block, bytes */
    bool cooperative;          /* refused by the driver unless the whole grid is resident at once */
    bool dependent;            /* programmatic dependent launch: may start before the kernel ahead of it in the stream
                                  has ended; the kernel itself waits where it must */
    const void *arguments;     /* the kernel's one parameter, by value */
};

/* Enqueues on `stream` (a CUstream; NULL: the default stream of the device's context). The first launch of a signature
 * compiles and loads its kernel: statuses of normfuse_cuda_specialized, too. */
normfuse_status normfuse_cuda_launch(const char *call, const struct normfuse_cuda_device *device, void *stream,
                                     const struct normfuse_cuda_launch *launch);

/* The driver's state in words, for normfuse_info: a static string. */
const char *normfuse_cuda_state(void);
/* The driver's version as cuDriverGetVersion says it; 0: there is no driver. */
int32_t normfuse_cuda_driver_version(void);

/* True if NORMFUSE_VERBOSE has a word. The environment is searched once. */
enum { NORMFUSE_VERBOSE_DISPATCH = 1, NORMFUSE_VERBOSE_PLAN = 2, NORMFUSE_VERBOSE_COMPILE = 4 };
bool normfuse_cuda_verbose(int word);

/* Kernels of this thread's last call: "held_forward_f32 8192x256 cluster=2", with " + ". */
const char *normfuse_last_kernels(void);
/* For the child of a fork, which may have been made while a thread held the lock of the plans. */
void normfuse_cuda_plans_after_fork(void);

#endif
