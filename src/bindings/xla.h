/* SPDX-License-Identifier: MIT
 *
 * xla.h - what the Python package normfuse.jax hands to XLA. Not installed: the package carries the library that it was
 * built with. */
#ifndef NORMFUSE_XLA_H
#define NORMFUSE_XLA_H

#include "normfuse.h"

/* Handlers of XLA's foreign function interface for arrays on the CPU and on CUDA. XLA calls them; `frame` is its
 * XLA_FFI_CallFrame. NULL, or an XLA_FFI_Error that the caller owns. src/bindings/xla.c says which attributes they
 * take. */
NORMFUSE_API void *normfuse_xla_cpu(void *frame);
NORMFUSE_API void *normfuse_xla_cuda(void *frame);

#endif
