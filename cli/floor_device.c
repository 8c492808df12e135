/* SPDX-License-Identifier: MIT
 *
 * floor_device.c - see floor_device.h. The text of the kernels, floor_cuda.cu, is part of the program. */
#include "floor_device.h"

#include <stdint.h>

#include "device.h"

struct way {
    const char *name;
    uint64_t vectors; /* that a thread moves; 0: the driver's copy */
};

#define WAY(reads, writes, vectors) {"floor_" #reads "r" #writes "w_" #vectors, vectors}
#define WAYS(reads, writes, some, many) {WAY(reads, writes, 1), WAY(reads, writes, some), WAY(reads, writes, many)}

/* By reads - 1 and writes - 1, as floor_cuda.cu has them; one to one there is the driver's, too. */
static const struct way ways[FLOOR_READS_MAX][FLOOR_WRITES_MAX][FLOOR_WAYS_MAX] = {
    {{WAY(1, 1, 1), WAY(1, 1, 8), WAY(1, 1, 16), {"driver_copy", 0}}, WAYS(1, 2, 8, 16)},
    {WAYS(2, 1, 8, 16), WAYS(2, 2, 8, 16)},
    {WAYS(3, 1, 4, 8), WAYS(3, 2, 4, 8)},
    {WAYS(4, 1, 4, 8), WAYS(4, 2, 4, 8)}};

enum { VECTOR_BYTES = 16 };

__asm__(".section .rodata\n"
        "normfuse_floor_text:\n"
        ".incbin \"" NORMFUSE_FLOOR_FOLDER "/floor_streams.h\"\n"
        ".incbin \"" NORMFUSE_FLOOR_FOLDER "/floor_cuda.cu\"\n"
        ".byte 0\n"
        ".previous\n");
extern const char normfuse_floor_text[];

bool floor_device_open(void)
{
    return device_load("normfuse_floor", normfuse_floor_text);
}

int floor_device_ways(int reads, int writes)
{
    return reads == 1 && writes == 1 ? FLOOR_WAYS_MAX : FLOOR_WAYS_MAX - 1;
}

const char *floor_device_name(int reads, int writes, int way)
{
    return ways[reads - 1][writes - 1][way].name;
}

bool floor_device_move(int way, const struct floor_streams *streams, size_t bytes)
{
    const struct way *chosen = &ways[streams->reads - 1][streams->writes - 1][way];
    if (!chosen->vectors)
        return device_copy(streams->out[0], streams->in[0], bytes);
    uint32_t threads = chosen->vectors == 1 ? 512 : 256;
    uint64_t vectors = bytes / VECTOR_BYTES, tile = threads * chosen->vectors;
    uint32_t rest = (uint32_t)(bytes % VECTOR_BYTES);
    uint64_t blocks = (vectors + tile - 1) / tile;
    struct floor_streams copy = *streams;
    void *arguments[] = {&copy, &vectors, &rest};
    return device_launch(chosen->name, (uint32_t)(blocks ? blocks : 1), threads, arguments);
}
