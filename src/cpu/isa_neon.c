/* SPDX-License-Identifier: MIT
 *
 * isa_neon.c - the passes on neon; its compiler flags are set for this file alone (CMakeLists.txt). */
#include "cpu/vec_neon.h"
#define ISA neon
#define USABLE 1
#include "cpu/isa.inl"
