/* SPDX-License-Identifier: MIT
 *
 * status.c - what a status says, and what the last refused call of a thread objected to. */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>

#include "problem.h"

static _Thread_local char last_error[512];

const char *normfuse_status_text(normfuse_status status)
{
    switch (status) {
    case NORMFUSE_OK: return "success";
    case NORMFUSE_BAD_ARGUMENT: return "an option is out of range, or a tensor is missing or not taken by this call";
    case NORMFUSE_BAD_SHAPE: return "sizes are negative, overflow, or contradict each other or the options";
    case NORMFUSE_BAD_POINTER: return "a data pointer is NULL or not aligned to its element";
    case NORMFUSE_OVERLAP: return "an output overlaps another tensor other than in a permitted in-place pair";
    case NORMFUSE_UNSUPPORTED: return "a dtype, a device or strides that the library has no kernel for";
    case NORMFUSE_NO_DRIVER: return "no CUDA driver, or the library was built without CUDA";
    case NORMFUSE_OLD_DRIVER: return "the CUDA driver is too old";
    case NORMFUSE_NO_KERNEL: return "the library holds no kernel for this GPU";
    case NORMFUSE_NO_COMPILER: return "NVRTC, which compiles CUDA kernels at run time, is missing or does not fit";
    case NORMFUSE_SCRATCH: return "scratch memory is too small or missing";
    case NORMFUSE_OUT_OF_MEMORY: return "out of memory";
    case NORMFUSE_DEVICE_ERROR: return "the CUDA driver refused a call; outputs are undefined";
    }
    return "unknown status";
}

const char *normfuse_last_error(void)
{
    return last_error;
}

normfuse_status normfuse_refuse(normfuse_status status, const char *format, ...)
{
    const int saved_errno = errno;
    va_list arguments;
    va_start(arguments, format);
    if (vsnprintf(last_error, sizeof last_error, format, arguments) < 0)
        last_error[0] = '\0';
    va_end(arguments);
    errno = saved_errno;
    return status;
}
