/* SPDX-License-Identifier: MIT
 *
 * floor_device.h - the benchmark's floor on a GPU: several ways to move the bytes that an operator must move, of which
 * the fastest is the floor. */
#ifndef NORMFUSE_BENCH_FLOOR_DEVICE_H
#define NORMFUSE_BENCH_FLOOR_DEVICE_H

#include <stdbool.h>
#include <stddef.h>

#include "floor_streams.h"

enum { FLOOR_WAYS_MAX = 4 };

/* Compiles and loads the kernels; the device is open; false: device_error() says why. */
bool floor_device_open(void);

/* How many ways there are to move so many tensors, and what each is called. */
int floor_device_ways(int reads, int writes);
const char *floor_device_name(int reads, int writes, int way);

/* Enqueues it: every output becomes the exclusive or of the inputs. Pointers are 16-byte aligned. */
bool floor_device_move(int way, const struct floor_streams *streams, size_t bytes);

#endif
