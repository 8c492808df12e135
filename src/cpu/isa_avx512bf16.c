/* SPDX-License-Identifier: MIT
 *
 * isa_avx512bf16.c - the passes on AVX-512 with its bf16 conversion; compiler flags are set for this file alone
 * (CMakeLists.txt). */
#include "cpu/vec_avx512.h"
#define NORMFUSE_REST_OF avx512
#define ISA avx512bf16
#define USABLE                                                                                                           \
    (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&     \
     __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bf16"))
#include "cpu/isa.inl"
