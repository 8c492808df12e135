/* SPDX-License-Identifier: MIT
 *
 * isa_scalar.c - the passes on scalar; its compiler flags are set for this file alone (CMakeLists.txt). */
#include "cpu/vec_scalar.h"
#define NORMFUSE_NO_INLINE_FORMS
#define ISA scalar
#define USABLE 1
#include "cpu/isa.inl"
