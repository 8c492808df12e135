/* SPDX-License-Identifier: MIT
 *
 * backend.h - the functions that each kind of device offers. api.c and merge.c find a backend by the type of a tensor's
 * device, and know no backend by its name. */
#ifndef NORMFUSE_BACKEND_H
#define NORMFUSE_BACKEND_H

#include "problem.h"

/* A call that is ready to be enqueued: what a backend found out about it, once. */
enum { NORMFUSE_PREPARED_WORDS = 672 };
struct normfuse_prepared {
    const struct normfuse_problem *problem;
    size_t scratch_bytes; /* that exec must have; 0 where exec has no scratch and the backend allocates it */
    uint64_t of_backend[NORMFUSE_PREPARED_WORDS];
};

struct normfuse_backend {
    int32_t device_type; /* NORMFUSE_CPU, NORMFUSE_CUDA */
    /* Calls run on the host: scratch memory is allocated where exec has none, and no kernel is compiled. */
    bool on_host;
    size_t sync_bytes; /* of exec.sync; 0: sync memory is not read */

    /* NORMFUSE_OK: the device of this number exists and is ready. */
    normfuse_status (*check)(const char *call, int32_t ordinal);
    /* The problem, and the scratch and sync memory of exec, stay where they are until the call is enqueued. */
    normfuse_status (*prepare)(const struct normfuse_problem *problem, const normfuse_exec *exec,
                               struct normfuse_prepared *prepared);
    /* Only the last call that this thread prepared. */
    normfuse_status (*enqueue)(const struct normfuse_prepared *prepared, const normfuse_exec *exec);
    /* Scratch bytes that are enough for the call, with the sync memory of exec or, if it has none, with any. */
    size_t (*scratch_bytes)(const struct normfuse_problem *problem, const normfuse_exec *exec);
    /* Joins shards of `width` doubles an entry: triples of stats or pairs of sums. in: shards of out's size, in order.
     * stats: of sums per value (see package.h); its data is NULL elsewhere. NULL: the host does. */
    normfuse_status (*merge)(const struct normfuse_flat *in, const struct normfuse_flat *stats,
                             const struct normfuse_flat *out, int32_t width, int32_t ordinal,
                             const normfuse_exec *exec);
    /* normfuse_sample_quantum; NULL: 1. */
    int64_t (*sample_quantum)(int64_t c, int64_t s, bool columns);
    /* Fills in the backend's members of normfuse_info. */
    void (*describe)(normfuse_information *info);

    /* Backends that compile kernels, NULL elsewhere: normfuse_prepare_with, normfuse_use_compiler,
     * normfuse_compiler_info but for its checks. */
    normfuse_status (*compile)(const char *call, int32_t ordinal,
                               void (*progress)(void *context, int32_t done, int32_t all), void *context);
    normfuse_status (*use_compiler)(const char *call, const char *path);
    void (*describe_compiler)(normfuse_compiler_information *info);
};

extern const struct normfuse_backend normfuse_cpu_backend;
#if defined(NORMFUSE_HAVE_CUDA)
extern const struct normfuse_backend normfuse_cuda_backend;
#endif
/* backends.c: all that this library was built with, NULL at the end. */
extern const struct normfuse_backend *const normfuse_backends[];
/* NULL: this library was built without. */
const struct normfuse_backend *normfuse_backend_of(int32_t type);

#endif
