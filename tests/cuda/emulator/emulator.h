/* SPDX-License-Identifier: MIT
 *
 * emulator.h - runs launches of the kernels on the CPU. C and C++. */
#ifndef NORMFUSE_EMULATOR_H
#define NORMFUSE_EMULATOR_H

#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The symbol of a kernel's shared object that was compiled at run time, by the name normfuse_emulated_kernel (ptx.h).
 * */
struct emulated_kernel {
    const char *name;
    void (*call)(const void *parameter);
    char *variables, *variables_end; /* shared ones */
};

struct emulated_launch {
    const struct emulated_kernel *specialized;
    const char *name;
    const void *parameter;
    unsigned blocks, threads, cluster; /* cluster: blocks of one, at least 1 */
    size_t shared;
    bool cooperative;
};

/* To its end. What a GPU would not do ends the process with a line that names kernel, block and thread. */
void emulator_run(const struct emulated_launch *launch);
/* Between pages that may not be touched, and full of bytes 0xff; NULL: there is no memory. */
void *emulator_allocate(size_t bytes);
void emulator_free(void *memory);

#ifdef __cplusplus
}
#endif

#endif
