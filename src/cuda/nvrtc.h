/* SPDX-License-Identifier: MIT
 *
 * nvrtc.h - the functions of NVRTC that the library calls. Declared here, since NVRTC is found at run time and the
 * build needs no part of it. */
#ifndef NORMFUSE_CUDA_NVRTC_H
#define NORMFUSE_CUDA_NVRTC_H

#include <stddef.h>

typedef struct _nvrtcProgram *nvrtcProgram;
/* Values of nvrtcResult, a C enum, that the library tells apart. */
enum { NVRTC_SUCCESS = 0, NVRTC_ERROR_OUT_OF_MEMORY = 1, NVRTC_ERROR_INVALID_OPTION = 5, NVRTC_ERROR_COMPILATION = 6 };

#define NORMFUSE_NVRTC_LIST(ENTRY)                                                                                     \
    ENTRY(int, nvrtcVersion, (int *major, int *minor))                                                                 \
    ENTRY(const char *, nvrtcGetErrorString, (int result))                                                             \
    ENTRY(int, nvrtcCreateProgram,                                                                                     \
          (nvrtcProgram *program, const char *text, const char *name, int headers, const char *const *header_texts,   \
           const char *const *header_names))                                                                           \
    ENTRY(int, nvrtcDestroyProgram, (nvrtcProgram *program))                                                           \
    ENTRY(int, nvrtcCompileProgram, (nvrtcProgram program, int count, const char *const *options))                     \
    ENTRY(int, nvrtcGetCUBINSize, (nvrtcProgram program, size_t *bytes))                                               \
    ENTRY(int, nvrtcGetCUBIN, (nvrtcProgram program, char *code))                                                      \
    ENTRY(int, nvrtcGetProgramLogSize, (nvrtcProgram program, size_t *bytes))                                          \
    ENTRY(int, nvrtcGetProgramLog, (nvrtcProgram program, char *log))

#endif
