/* SPDX-License-Identifier: MIT
 *
 * isa_avx2.c - the passes on avx2; its compiler flags are set for this file alone (CMakeLists.txt). */
#include <cpuid.h>
#include <stdbool.h>

#include "cpu/vec_avx2.h"

/* Not by __builtin_cpu_supports: clang before 15 does not know the name. */
static bool has_f16c(void)
{
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

#define ISA avx2
#define USABLE (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c())
#include "cpu/isa.inl"
