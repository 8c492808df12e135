/* SPDX-License-Identifier: MIT
 *
 * floor_streams.h - what a floor moves: tensors of one size, some of them read and the others written. A kernel of
 * floor_cuda.cu takes it as it is. */
#ifndef NORMFUSE_BENCH_FLOOR_STREAMS_H
#define NORMFUSE_BENCH_FLOOR_STREAMS_H

enum { FLOOR_READS_MAX = 4, FLOOR_WRITES_MAX = 2 };

struct floor_streams {
    const char *in[FLOOR_READS_MAX];
    char *out[FLOOR_WRITES_MAX];
    int reads, writes;
};

#endif
