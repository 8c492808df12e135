/* SPDX-License-Identifier: MIT
 *
 * compile.h - from a signature, or a text, to machine code: by the cache (cache.h), or by NVRTC, which is found at run
 * time. Knows no driver and needs no GPU. */
#ifndef NORMFUSE_CUDA_COMPILE_H
#define NORMFUSE_CUDA_COMPILE_H

#include <stdbool.h>
#include <stdint.h>

#include "../problem.h"
#include "cache.h"
#include "signature.h"

/* A file of src/cuda/device/, which the build embedded. */
struct normfuse_cuda_text {
    const char *name, *text; /* "single.cuh" */
};

/* Up to a name of NULL. Tests set others. */
extern const struct normfuse_cuda_text *normfuse_cuda_texts;

struct normfuse_cuda_compilation {
    struct normfuse_cuda_signature signature;
    const char *text, *name; /* a text of kernels that includes no file but those above, and its name. NULL: the signature's */
    int32_t capability; /* of the GPU: 90 */
    int32_t driver;     /* as cuDriverGetVersion says it: 13000. NVRTC must not be of a newer major version. 0: it may */
    bool is_anew;       /* whatever the cache holds */
    /* The result: */
    normfuse_status status;
    bool is_final; /* the same again would fail the same */
    bool is_cached;
    struct normfuse_cuda_code code; /* where the status is OK */
    char problem[400];              /* where it is not */
};

/* Fills `compilation` from the cache, and returns whether it could. */
bool normfuse_cuda_find_compiled(struct normfuse_cuda_compilation *compilation);

/* Compiles, and stores the result in the cache. For a thread that blocks signals, with 8 MiB of stack. Statuses: OK,
 * NO_COMPILER, NO_KERNEL (the text does not compile: is_final; or a GPU older than 8.0), OUT_OF_MEMORY. */
void normfuse_cuda_compile(struct normfuse_cuda_compilation *compilation);

/* normfuse_use_compiler. */
normfuse_status normfuse_cuda_use_compiler(const char *call, const char *path);

/* normfuse_compiler_info, but for its checks. */
void normfuse_cuda_describe_compiler(int32_t driver, normfuse_compiler_information *info);

/* For tests: looks for NVRTC anew. No other call of the library may be running. */
void normfuse_cuda_forget_compiler(void);

/* For the child of a fork, which may have been made while a thread held a lock. */
void normfuse_cuda_compiler_after_fork(void);

#endif
