/* SPDX-License-Identifier: MIT
 *
 * backends.c - the backends that this library was built with. */
#include "backend.h"

const struct normfuse_backend *const normfuse_backends[] = {
    &normfuse_cpu_backend,
#if defined(NORMFUSE_HAVE_CUDA)
    &normfuse_cuda_backend,
#endif
    NULL};

const struct normfuse_backend *normfuse_backend_of(int32_t type)
{
    for (int i = 0; normfuse_backends[i] != NULL; i++)
        if (normfuse_backends[i]->device_type == type)
            return normfuse_backends[i];
    return NULL;
}
