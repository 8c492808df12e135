/* SPDX-License-Identifier: MIT
 *
 * isa_avx512.c - the passes on avx512; its compiler flags are set for this file alone (CMakeLists.txt). */
#include "cpu/vec_avx512.h"
#define NORMFUSE_ALL_INLINE_FORMS
#define ISA avx512
#define USABLE                                                                                                         \
    (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&  \
     __builtin_cpu_supports("avx512dq"))
#include "cpu/isa.inl"
