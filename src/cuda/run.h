/* SPDX-License-Identifier: MIT
 *
 * run.h - what the CUDA backend tells the program and the tests beyond the public interface. */
#ifndef NORMFUSE_CUDA_RUN_H
#define NORMFUSE_CUDA_RUN_H

/* The kernels that the last call of this thread launched, in words; "" before the first. Valid until its next call. */
const char *normfuse_last_kernels(void);

#endif
