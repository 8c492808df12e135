/* SPDX-License-Identifier: MIT
 *
 * floor_device.h - the benchmark's floor on a GPU: several ways to move the bytes that an operator must move, of which
 * the fastest is the floor. */
#ifndef NORMFUSE_BENCH_FLOOR_DEVICE_H
#define NORMFUSE_BENCH_FLOOR_DEVICE_H

#include <stdbool.h>
#include <stddef.h>

enum { FLOOR_WAYS_MAX = 4 };

/* Loads the kernels; false: device_error() says why. */
bool floor_device_open(void);

/* How many ways there are, and what each is called. */
int floor_device_ways(bool backward);
const char *floor_device_name(bool backward, int way);

/* Enqueues out = x; with dy: reads both and writes out. Pointers are 16-byte aligned. */
bool floor_device_move(int way, void *out, const void *x, const void *dy, size_t bytes);

#endif
