/* SPDX-License-Identifier: MIT
 *
 * isa_avx2.c - the passes on avx2; its compiler flags are set for this file alone (CMakeLists.txt). */
#include "cpu/vec_avx2.h"
#define ISA avx2
#define USABLE (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
#include "cpu/isa.inl"
