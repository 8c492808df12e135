/* SPDX-License-Identifier: MIT
 *
 * mirror.c - see mirror.h. */
#include "mirror.h"

#include <stdint.h>
#include <string.h>

#include "device.h"
#include "report.h"

#define MEMBER(field) (1u << ((offsetof(normfuse_tensors, field) - offsetof(normfuse_tensors, x)) / sizeof(void *)))

/* Written whole. */
static const unsigned big_outputs = MEMBER(y) | MEMBER(u) | MEMBER(dx) | MEMBER(dpost_add);
/* Written, or added to. */
static const unsigned small_outputs = MEMBER(mean) | MEMBER(rstd) | MEMBER(dweight) | MEMBER(dbias) | MEMBER(dscale) |
                                      MEMBER(dshift) | MEMBER(stats) | MEMBER(sums) | MEMBER(dpre_bias) |
                                      MEMBER(dslope);
static const unsigned running_statistics = MEMBER(running_mean) | MEMBER(running_var);

static void need(const struct mirror *mirror, bool good)
{
    if (!good)
        report_failure(mirror->name, "%s", device_error());
}

static void accept(const struct mirror *mirror, normfuse_status status)
{
    if (status != NORMFUSE_OK)
        report_failure(mirror->name, "device=cuda: %s: %s", normfuse_status_text(status), normfuse_last_error());
}

static void reserve(const struct mirror *mirror, struct mirror_memory *memory, size_t bytes)
{
    if (memory->data && bytes <= memory->bytes)
        return;
    device_free(memory->data);
    memory->bytes = bytes;
    memory->data = device_allocate(bytes);
    if (!memory->data)
        report_failure(mirror->name, "%s: a block of samples is too large for the device; --block-bytes makes it "
                       "smaller", device_error());
}

void mirror_open(struct mirror *mirror, const char *name, normfuse_exec *exec)
{
    mirror->name = name;
    accept(mirror, normfuse_prepare(0));
    need(mirror, device_open());
    exec->stream = device_stream();
    accept(mirror, normfuse_sync_bytes(0, &exec->sync_bytes));
    reserve(mirror, &mirror->sync, exec->sync_bytes);
    need(mirror, device_fill(mirror->sync.data, 0, exec->sync_bytes));
    exec->sync = mirror->sync.data;
}

static const normfuse_tensor *member(const normfuse_tensors *tensors, int index)
{
    const normfuse_tensor *tensor;
    memcpy(&tensor, (const char *)tensors + offsetof(normfuse_tensors, x) + (size_t)index * sizeof tensor,
           sizeof tensor);
    return tensor;
}

static size_t tensor_bytes(const normfuse_tensor *tensor)
{
    size_t bytes = tensor->dtype.bits / 8;
    for (int32_t i = 0; i < tensor->ndim; i++)
        bytes *= (size_t)tensor->shape[i];
    return bytes;
}

normfuse_tensors mirror_upload(struct mirror *mirror, const normfuse_tensors *tensors)
{
    normfuse_tensors moved = *tensors;
    for (int i = 0; i < MIRROR_TENSORS; i++) {
        const normfuse_tensor *host = member(tensors, i), *device = &mirror->tensors[i];
        if (!host)
            continue;
        size_t bytes = tensor_bytes(host);
        reserve(mirror, &mirror->memory[i], bytes);
        mirror->tensors[i] = *host;
        mirror->tensors[i].data = mirror->memory[i].data;
        mirror->tensors[i].device.device_type = NORMFUSE_CUDA;
        if (!(big_outputs >> i & 1))
            need(mirror, device_upload(mirror->memory[i].data, host->data, bytes));
        memcpy((char *)&moved + offsetof(normfuse_tensors, x) + (size_t)i * sizeof device, &device, sizeof device);
    }
    return moved;
}

void mirror_scratch(struct mirror *mirror, size_t bytes, normfuse_exec *exec)
{
    reserve(mirror, &mirror->scratch, bytes);
    exec->scratch = mirror->scratch.data;
    exec->scratch_bytes = bytes;
}

void mirror_download(struct mirror *mirror, const normfuse_tensors *tensors, bool running_updated)
{
    unsigned written = big_outputs | small_outputs | (running_updated ? running_statistics : 0);
    need(mirror, device_wait());
    for (int i = 0; i < MIRROR_TENSORS; i++) {
        const normfuse_tensor *host = member(tensors, i);
        if (host && (written >> i & 1))
            need(mirror, device_download(host->data, mirror->memory[i].data, tensor_bytes(host)));
    }
}
