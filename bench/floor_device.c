/* SPDX-License-Identifier: MIT
 *
 * floor_device.c - see floor_device.h. The kernels of floor_cuda.cu are part of the program. */
#include "floor_device.h"

#include <stdint.h>

#include "device.h"

struct way {
    const char *name;
    int vectors; /* that a thread moves; 0: the driver's copy */
};

static const struct way copies[] = {
    {"driver_copy", 0}, {"floor_copy_1", 1}, {"floor_copy_8", 8}, {"floor_copy_16", 16}};
static const struct way combinations[] = {{"floor_combine_1", 1}, {"floor_combine_8", 8}, {"floor_combine_16", 16}};

enum { VECTOR_BYTES = 16 };

#ifdef NORMFUSE_FLOOR_IMAGE
__asm__(".section .rodata\n"
        ".balign 64\n"
        "normfuse_floor_image:\n"
        ".incbin \"" NORMFUSE_FLOOR_IMAGE "\"\n"
        ".previous\n");
extern const char normfuse_floor_image[];

bool floor_device_open(void)
{
    return device_load(normfuse_floor_image);
}
#else
bool floor_device_open(void)
{
    return device_open();
}
#endif

int floor_device_ways(bool backward)
{
    return (int)(backward ? sizeof combinations / sizeof *combinations : sizeof copies / sizeof *copies);
}

const char *floor_device_name(bool backward, int way)
{
    return (backward ? combinations : copies)[way].name;
}

bool floor_device_move(int way, void *out, const void *x, const void *dy, size_t bytes)
{
    const struct way *chosen = &(dy ? combinations : copies)[way];
    if (!chosen->vectors)
        return device_copy(out, x, bytes);
    uint32_t threads = chosen->vectors == 1 ? 512 : 256;
    uint64_t vectors = bytes / VECTOR_BYTES, tile = (uint64_t)threads * (uint64_t)chosen->vectors;
    uint32_t rest = (uint32_t)(bytes % VECTOR_BYTES);
    uint64_t blocks = (vectors + tile - 1) / tile;
    void *copy[] = {&out, &x, &vectors, &rest};
    void *combine[] = {&out, &x, &dy, &vectors, &rest};
    return device_launch(chosen->name, (uint32_t)(blocks ? blocks : 1), threads, dy ? combine : copy);
}
