/* SPDX-License-Identifier: MIT
 *
 * scalar.h - one value of any dtype to and from double. Loads are exact; stores round once, to nearest even, whatever
 * the rounding mode for the 16-bit types. */
#ifndef NORMFUSE_SCALAR_H
#define NORMFUSE_SCALAR_H

#include <stdint.h>
#include <string.h>

#include "exact_math.h"
#include "normfuse.h"

/* The bits of the 16-bit type of `precision` significant bits and smallest normal exponent `min_exponent`. Rounding in
 * two steps, through f32, would be wrong for values that f32 rounds onto a midpoint. */
static inline uint16_t normfuse_round_to_16(double value, int precision, int min_exponent)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    const uint16_t sign = (uint16_t)(bits >> 63 << 15);
    const uint16_t infinity = (uint16_t)(0x7fff >> (precision - 1) << (precision - 1));
    const uint64_t fraction = bits & UINT64_C(0xfffffffffffff);
    const int field = (int)(bits >> 52 & 0x7ff);
    if (field == 0x7ff && fraction != 0)
        return (uint16_t)(sign | infinity | 1u << (precision - 2) | fraction >> (53 - precision));

    const int exponent = field - 1023;
    int shift = 53 - precision;
    if (exponent >= min_exponent) { /* a carry counts the exponent up; what is too large is infinity */
        const uint64_t magnitude = bits & ~(UINT64_C(1) << 63), below_half = (UINT64_C(1) << (shift - 1)) - 1;
        const uint64_t nearest = magnitude + below_half + (magnitude >> shift & 1);
        const uint64_t normal = (nearest >> shift) - ((uint64_t)(min_exponent + 1022) << (precision - 1));
        return (uint16_t)(sign | (normal < infinity ? normal : infinity));
    }
    shift += min_exponent - exponent;
    if (shift > 54) /* below half of the smallest subnormal */
        return sign;
    const uint64_t significand = fraction | (uint64_t)(field != 0) << 52;
    const uint64_t remainder = significand & ((UINT64_C(1) << shift) - 1), half = UINT64_C(1) << (shift - 1);
    uint64_t rounded = significand >> shift;
    rounded += remainder > half || (remainder == half && (rounded & 1) != 0);
    return (uint16_t)(sign | rounded);
}

static inline double normfuse_load(const void *address, int32_t type)
{
    switch (type) {
    case NORMFUSE_F64: {
        double value;
        memcpy(&value, address, sizeof value);
        return value;
    }
    case NORMFUSE_F32: {
        float value;
        memcpy(&value, address, sizeof value);
        return (double)value;
    }
    case NORMFUSE_BF16: {
        uint16_t half;
        memcpy(&half, address, sizeof half);
        const uint32_t bits = (uint32_t)half << 16;
        float value;
        memcpy(&value, &bits, sizeof value);
        return (double)value;
    }
    default: {
        uint16_t half;
        memcpy(&half, address, sizeof half);
        const uint64_t sign = (uint64_t)(half >> 15) << 63, fraction = half & 0x3ff;
        const unsigned field = half >> 10 & 31;
        if (field == 0)
            return (sign != 0 ? -0x1p-24 : 0x1p-24) * (double)fraction;
        const uint64_t exponent = field == 31 ? 0x7ff : field + (1023 - 15);
        const uint64_t bits = sign | exponent << 52 | fraction << 42;
        double value;
        memcpy(&value, &bits, sizeof value);
        return value;
    }
    }
}

static inline void normfuse_store(void *address, int32_t type, double value)
{
    if (type == NORMFUSE_F64) {
        memcpy(address, &value, sizeof value);
    } else if (type == NORMFUSE_F32) {
        const float rounded = (float)value;
        memcpy(address, &rounded, sizeof rounded);
    } else {
        const uint16_t rounded =
            type == NORMFUSE_F16 ? normfuse_round_to_16(value, 11, -14) : normfuse_round_to_16(value, 8, -126);
        memcpy(address, &rounded, sizeof rounded);
    }
}

#endif
