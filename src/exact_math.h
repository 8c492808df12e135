/* SPDX-License-Identifier: MIT
 *
 * exact_math.h - refuses to be compiled with flags that let the compiler change results: sums would have another order
 * on each instruction set, NaN and infinity would not be seen, and signs of zeros would be lost. CMakeLists.txt asks
 * the same of the flags that it is given, and of those that define no macro. */
#ifndef NORMFUSE_EXACT_MATH_H
#define NORMFUSE_EXACT_MATH_H

#if defined(__FAST_MATH__) || defined(__ASSOCIATIVE_MATH__) || defined(__RECIPROCAL_MATH__) || \
    defined(__NO_SIGNED_ZEROS__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__)
#error "normfuse must be compiled without -ffast-math, -Ofast and what they are made of: they change results."
#endif

#endif
