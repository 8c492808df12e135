/* SPDX-License-Identifier: MIT
 *
 * package.h - functions that the bindings and the Python package normfuse call beside normfuse.h. Not installed: the
 * package carries the library that it was built with. */
#ifndef NORMFUSE_PACKAGE_H
#define NORMFUSE_PACKAGE_H

#include <stdint.h>

#include "normfuse.h"

/* The name of an activation, and its act_param where none is given: 0 where it takes none. NULL: there is none of this
 * number. */
NORMFUSE_API const char *normfuse_activation_name(int32_t activation, double *default_param);

/* normfuse_sums_merge where the count of all shards is on the device: each sum times NORMFUSE_PER_VALUE and over the
 * count of its triple of the merged stats (of 0: over 1), for ..._backward_apply with options.set_values =
 * NORMFUSE_PER_VALUE. in: [shards, ..., 2] f64, out: [..., 2], stats: [..., 3] f64, a triple for as many pairs of out
 * each, in order. */
enum { NORMFUSE_PER_VALUE = 2 }; /* a count of 1 is refused, and a power of 2 changes no digit */
NORMFUSE_API normfuse_status normfuse_sums_merge_per_value(const normfuse_tensor *in, const normfuse_tensor *stats,
                                                           const normfuse_tensor *out, const normfuse_exec *exec);

/* exec.sync for calls on `stream` (a CUstream) of a device: one block of memory to a stream outside of graph capture,
 * and one to each stream of each captured graph, handed back when the graph and what was instantiated from it are gone.
 * No block passes from one stream to another, a new one at a destroyed one's address included; the blocks of destroyed
 * streams are freed, a few dozen at a time, which waits for the device. NULL where there is none (a CPU build, an old
 * driver, the per-thread default stream): legal in exec.sync. `bytes` is its size. */
NORMFUSE_API void *normfuse_stream_sync(int32_t device, void *stream, size_t *bytes);

/* The same for exec->stream, with scratch beside it: fills in exec's sync and scratch for calls of the library by this
 * thread until normfuse_stream_release; other threads' calls on the stream wait. NULL where there is none, and exec is
 * as it was: legal in normfuse_stream_release. A call may need more scratch than that: NORMFUSE_SCRATCH. */
NORMFUSE_API void *normfuse_stream_acquire(int32_t device, normfuse_exec *exec);
NORMFUSE_API void normfuse_stream_release(void *acquired);

/* `scratch` becomes exec.scratch for one call on `stream` of a device, for arrays whose library does not allocate for
 * others: from the driver's pool, in the order of the stream, so that it may be freed as soon as the call is enqueued.
 * NULL where there is none. `bytes` is above 0. */
NORMFUSE_API void normfuse_stream_scratch(int32_t device, void *stream, size_t bytes, void **scratch);
NORMFUSE_API void normfuse_stream_scratch_free(int32_t device, void *stream, void *scratch);

#endif
