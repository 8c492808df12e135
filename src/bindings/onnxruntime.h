/* SPDX-License-Identifier: MIT
 *
 * onnxruntime.h - what libnormfuse_onnxruntime.so exports: the function that ONNX Runtime looks for in a library of
 * custom operators. Not installed. */
#ifndef NORMFUSE_ONNXRUNTIME_H
#define NORMFUSE_ONNXRUNTIME_H

#include "normfuse.h"

/* Adds the domain "normfuse" to `options` (OrtSessionOptions). `api_base` is ONNX Runtime's OrtApiBase. NULL, or an
 * OrtStatus that the caller owns. */
NORMFUSE_API void *RegisterCustomOps(void *options, const void *api_base);

#endif
