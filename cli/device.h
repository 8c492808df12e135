/* SPDX-License-Identifier: MIT
 *
 * device.h - all that the program needs of a GPU: the first one that CUDA shows, or the one chosen, its memory, one stream, graphs, timing
 * and the benchmark's own kernels. Through the driver, which is looked up at run time: the program starts on machines
 * without it. The library under test has its own way to the driver; both share the device's primary context.
 *
 * Functions give false (NULL, a negative time) when the driver refuses; device_error() then says what and where. One
 * thread at a time. */
#ifndef NORMFUSE_CLI_DEVICE_H
#define NORMFUSE_CLI_DEVICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct device_facts {
    char name[128];
    char driver[64];    /* "580.95.05, CUDA 13.0" */
    int32_t capability; /* 10 * major + minor */
    size_t l2_bytes, memory_bytes;
};

/* Which device is opened, of those that CUDA shows; before that. 0 without it. */
void device_choose(int32_t ordinal);
int32_t device_ordinal(void);
/* Opens the device; again: nothing. */
bool device_open(void);
/* The device that is open. */
const struct device_facts *device_facts(void);
/* The last failure, the device's name in front; "" before the first. */
const char *device_error(void);

/* 256-byte aligned; at least one byte. */
void *device_allocate(size_t bytes);
void device_free(void *data); /* waits for the device; NULL is allowed */

/* The stream that everything below goes through, a CUstream that does not wait for the default one. */
void *device_stream(void);
/* Return when the bytes are there. */
bool device_upload(void *to, const void *from, size_t bytes);
bool device_download(void *to, const void *from, size_t bytes);
/* Enqueue. What is sent stays as it is until the device was waited for. */
bool device_send(void *to, const void *from, size_t bytes);
bool device_copy(void *to, const void *from, size_t bytes);
bool device_fill(void *to, int byte, size_t bytes);
/* Waits for all that was enqueued; here what went wrong in a kernel shows. A kernel whose threads wait for one another
 * never ends, and its memory can be neither read nor freed: after DEVICE_WAIT_SECONDS the process ends with exit code 3
 * and a line on standard error that names the work. */
enum { DEVICE_WAIT_SECONDS = 60 };
bool device_wait(void);
void device_name_work(const char *name);

/* Between the two, what is enqueued is recorded instead of run; nothing that waits or allocates is allowed. */
struct device_graph;
bool device_record_begin(void);
struct device_graph *device_record_end(void);
bool device_replay(struct device_graph *graph);
void device_graph_free(struct device_graph *graph);

/* Microseconds that the device took for what was enqueued between the two. */
bool device_clock_start(void);
double device_clock_stop(void);

/* Compiles, by NVRTC or from the library's cache, and loads the benchmark's kernels; again: nothing. `text` includes no
 * header. The device is open. */
bool device_load(const char *name, const char *text);
/* One of these kernels. */
bool device_launch(const char *kernel, uint32_t blocks, uint32_t threads, void **arguments);

#endif
