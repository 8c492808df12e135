/* SPDX-License-Identifier: MIT
 *
 * hash.h - SHA-256 (FIPS 180-4). */
#ifndef NORMFUSE_CUDA_HASH_H
#define NORMFUSE_CUDA_HASH_H

#include <stddef.h>
#include <stdint.h>

enum { NORMFUSE_DIGEST_BYTES = 32 };

struct normfuse_hash {
    uint32_t state[8];
    uint64_t bytes; /* so far */
    unsigned char block[64];
};

void normfuse_hash_begin(struct normfuse_hash *hash);
void normfuse_hash_add(struct normfuse_hash *hash, const void *data, size_t bytes);
void normfuse_hash_end(struct normfuse_hash *hash, unsigned char digest[static NORMFUSE_DIGEST_BYTES]);

#endif
