/* SPDX-License-Identifier: MIT
 *
 * mirror.h - the tensors of one call, copied to the GPU and back. Tensors are dense. Memory of the device is kept from
 * call to call. Every function ends the program with a message when something is wrong; `name` is what the work is
 * about. */
#ifndef NORMFUSE_CLI_MIRROR_H
#define NORMFUSE_CLI_MIRROR_H

#include <stdbool.h>
#include <stddef.h>

#include "normfuse.h"

enum { MIRROR_TENSORS = (sizeof(normfuse_tensors) - offsetof(normfuse_tensors, x)) / sizeof(normfuse_tensor *) };

struct mirror_memory {
    void *data;
    size_t bytes;
};

struct mirror {
    const char *name;
    struct mirror_memory memory[MIRROR_TENSORS], scratch, sync;
    normfuse_tensor tensors[MIRROR_TENSORS];
};

/* Opens the GPU; exec gets its stream and sync memory. */
void mirror_open(struct mirror *mirror, const char *name, normfuse_exec *exec);

/* The tensors of the call on the device. Outputs that the call only writes are not copied. */
normfuse_tensors mirror_upload(struct mirror *mirror, const normfuse_tensors *tensors);

/* Scratch of so many bytes in exec. */
void mirror_scratch(struct mirror *mirror, size_t bytes, normfuse_exec *exec);

/* Waits for the call and copies what it wrote into `tensors`; running statistics only where it updates them. */
void mirror_download(struct mirror *mirror, const normfuse_tensors *tensors, bool running_updated);

#endif
