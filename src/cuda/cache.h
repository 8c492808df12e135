/* SPDX-License-Identifier: MIT
 *
 * cache.h - machine code on disk: a folder with one file a kernel. A file appears whole, by rename, and carries a hash of
 * its content. Folder and files must belong to this user or to root, be writable by nobody else, and be no symbolic
 * links. Whatever is wrong with them, a call goes on without: it compiles. */
#ifndef NORMFUSE_CUDA_CACHE_H
#define NORMFUSE_CUDA_CACHE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "hash.h"

/* A kernel's key: a hash of all that is known before it is compiled. */
struct normfuse_cuda_key {
    unsigned char digest[NORMFUSE_DIGEST_BYTES];
};

/* Machine code of one kernel. */
struct normfuse_cuda_code {
    unsigned char *bytes; /* to be freed */
    size_t count;
    int32_t compiler;           /* the version of NVRTC that made it, 1000 * major + 10 * minor: 12080 */
    int32_t registers, stack; /* of a thread: registers, and bytes of local memory (spills, arrays). -1: not known */
};

enum { NORMFUSE_CACHE_PATH_BYTES = 4096 };

/* NORMFUSE_CACHE_DIR, $XDG_CACHE_HOME/normfuse or ~/.cache/normfuse. Returns false and an empty path where there is
 * none: NORMFUSE_CACHE_DIR is empty, or no other variable is set. */
bool normfuse_cuda_cache_path(char path[static NORMFUSE_CACHE_PATH_BYTES]);

/* False: the cache has no such kernel, or cannot be used. */
bool normfuse_cuda_cache_read(const struct normfuse_cuda_key *key, struct normfuse_cuda_code *code);

/* NULL, or why the kernel was not stored. Afterwards files above 256 MiB are gone, the longest unused ones. Called in a
 * thread that blocks signals: a file larger than the process may write raises SIGXFSZ. */
const char *normfuse_cuda_cache_write(const struct normfuse_cuda_key *key, const struct normfuse_cuda_code *code);

/* How many kernels and bytes it holds. NULL, or why it cannot be used; a folder that is not there yet can be used. */
const char *normfuse_cuda_cache_count(int64_t *kernels, int64_t *bytes);

#endif
