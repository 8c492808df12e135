/* SPDX-License-Identifier: MIT
 *
 * fake_driver.h - a CUDA driver without a GPU, for tests of the host side: devices whose facts are settable, launches
 * that are checked as the driver would check them and written down instead of run. */
#ifndef NORMFUSE_TESTS_FAKE_DRIVER_H
#define NORMFUSE_TESTS_FAKE_DRIVER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cuda/device/arguments.h"
#include "cuda/driver.h"
#include "cuda/signature.h"

enum { FAKE_DEVICES = 4, FAKE_CONTEXTS = 3, FAKE_LAUNCHES = 256, FAKE_ARGUMENT_BYTES = 4096 };
/* Kernels are numbered in the order of their loading. */
enum { FAKE_KERNELS = 16384 };

struct fake_device {
    const char *name;
    int capability; /* 90 */
    int multiprocessors;
    int threads_per_multiprocessor;
    int shared_per_multiprocessor;
    int shared_per_block;
    int shared_reserved;
    int l2_bytes;
    bool clusters;
    CUresult function_result; /* of getting a kernel's function on this device */
    bool is_reset;            /* the primary context is destroyed, until it is retained again */
    /* Settings, and calls so far */
    int dynamic_shared[FAKE_KERNELS]; /* the attribute's value; 48 KB until set */
    bool large_clusters[FAKE_KERNELS];
    int primary_retained;
    int functions_loaded[FAKE_KERNELS]; /* cuFuncLoad */
};

struct fake_launch {
    int kernel;
    const char *name;                /* "normfuse_finish_merge_f64" */
    uint32_t grid, threads, cluster; /* cluster 0: the attribute was not given */
    size_t shared;
    bool cooperative, dependent;
    void *stream;
    int device;
    CUcontext context;
    _Alignas(16) unsigned char arguments[FAKE_ARGUMENT_BYTES];
};

#define FAKE_COUNT(name) FAKE_CALLS_##name,
enum fake_entry { NORMFUSE_CUDA_DRIVER_LIST(FAKE_COUNT) FAKE_ENTRIES };
#undef FAKE_COUNT

struct fake_driver {
    /* Settable */
    int version;          /* 13000 */
    int devices;          /* 1 */
    int init_milliseconds; /* that cuInit takes */
    CUresult init_result; /* and what further calls are made to answer */
    CUresult context_result; /* of asking for the current context */
    CUresult launch_result;
    struct fake_device device[FAKE_DEVICES];
    int fixed_shared[FAKE_KERNELS]; /* statically declared shared memory: 0 */
    const char *missing_kernel;              /* a name that no library has */
    CUresult code_result;                    /* of loading machine code, */
    int code_failures;                       /* so many times; then it succeeds. Below 0: always */
    bool notes_arguments;                    /* of launches: signatures say how many bytes these are */
    bool capturing;                          /* some stream is: what may not be captured is refused, if not relaxed */
    uint64_t capture;                        /* and that every stream asked about is; 0: none */
    void *renewed;                           /* a stream that was destroyed, and made again at its address, */
    int renewals;                            /* so many times */
    int resets;                              /* of all devices: contexts and streams are others, their memory is gone */
    bool is_out_of_memory;
    CUresult user_object_result;
    /* The function that loads machine code as the number-th, and says the kernel's name; NULL: nothing */
    CUresult (*load)(int number, const void *code, char name[64]);
    void (*run)(const struct fake_launch *launch, const void *parameter); /* what runs launches; NULL: nothing */
    /* Events so far */
    int calls[FAKE_ENTRIES];
    int libraries;      /* loaded and not unloaded */
    int loads;          /* of them, all that ever were */
    int allocations;    /* of device memory, that were not freed; each is cleared once, whole, with zeros */
    int pooled;         /* of device memory in a stream's order, that were not freed in the same stream's */
    int streams;        /* created and not destroyed */
    int graph_objects;  /* user objects that captured graphs hold */
    int invalidations;  /* of captures, by what streams under capture may not be asked */
    int launches;  /* all; those from FAKE_LAUNCHES on are counted only */
    struct fake_launch launch[FAKE_LAUNCHES];
};

extern struct fake_driver fake_driver;

/* One H200 at rest, and no context current in this thread. */
void fake_driver_reset(void);
const struct normfuse_cuda_driver *fake_driver_table(void);
/* Makes the library forget what it knew and use this driver, whatever its facts were set to. */
static inline void fake_driver_use(void)
{
    normfuse_cuda_use_driver(fake_driver_table());
}
/* A context of a device: index 0 is the primary one. */
CUcontext fake_driver_context(int device, int index);
/* As if every graph that was captured were destroyed: gives up the user objects they hold. */
void fake_driver_destroy_graphs(void);
/* "normfuse_finish_merge_f64" */
const char *fake_driver_kernel_name(int kernel);
/* The signature that a kernel was compiled for, read from the text that fake_nvrtc.c took for machine code. */
struct normfuse_cuda_signature fake_driver_signature(int kernel);
/* This thread's stack of contexts. */
int fake_driver_depth(void);
/* Makes it this thread's only context; NULL: none. */
void fake_driver_set_context(CUcontext context);

#endif
