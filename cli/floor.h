/* SPDX-License-Identifier: MIT
 *
 * floor.h - the copy floor of the benchmark: how fast this machine moves the bytes that an operator must move, with
 * non-temporal stores (x86-64 and aarch64; plain ones elsewhere) and a given number of threads. No operator that reads
 * its input from memory and writes its output there is faster.
 *
 * The threads are kept, and are spinning when a timed call begins: starting them is no part of the floor. */
#ifndef NORMFUSE_BENCH_FLOOR_H
#define NORMFUSE_BENCH_FLOOR_H

#include <stddef.h>

#include "floor_streams.h"

struct floor;

/* NULL: no memory or no threads. The caller is one of the threads. */
struct floor *floor_create(int threads);
void floor_destroy(struct floor *floor);

/* Between the two the other threads spin; outside they sleep and take no time from anyone. */
void floor_wake(struct floor *floor);
void floor_rest(struct floor *floor);

/* Runs task(context, begin, end) for contiguous parts of [0, bytes), cut at multiples of 64, one a thread. Between
 * floor_wake and floor_rest. */
void floor_run(struct floor *floor, size_t bytes, void (*task)(void *context, size_t begin, size_t end),
               void *context);

/* Reads and writes every stream: one to four in, one or two out. All pointers are 64-byte aligned. */
void floor_move(struct floor *floor, const struct floor_streams *streams, size_t bytes);

#endif
