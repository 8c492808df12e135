/* SPDX-License-Identifier: MIT
 *
 * plugin.c - a shared object that uses the library, for unload.c: one call in two threads. Gives an address in the
 * library. */
#include <normfuse.h>

const void *consumer_run(void)
{
    enum { LENGTH = 1 << 17 };
    static float x[LENGTH];
    const int64_t sizes[] = {1, 1, LENGTH};
    normfuse_axes axes;
    const normfuse_tensor tensor = normfuse_tensor_contiguous(x, NORMFUSE_F32, 3, sizes, &axes);
    const normfuse_group_norm_options options = {.struct_bytes = sizeof options, .groups = 1, .eps = 1e-5};
    const normfuse_tensors tensors = {.struct_bytes = sizeof tensors, .x = &tensor, .y = &tensor};
    const normfuse_exec exec = {.struct_bytes = sizeof exec, .threads = 2};
    return normfuse_group_norm_forward(&options, &tensors, &exec) == NORMFUSE_OK ? normfuse_version() : NULL;
}
