/* SPDX-License-Identifier: MIT
 *
 * elements.h - the elements of tensors as doubles: a part of reference.h that is called for each value. */
#ifndef NORMFUSE_TEST_ELEMENTS_H
#define NORMFUSE_TEST_ELEMENTS_H

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "normfuse.h"

static inline size_t reference_type_bytes(normfuse_type type)
{
    return type == NORMFUSE_F64 ? 8 : type == NORMFUSE_F32 ? 4 : 2;
}

/* 2^exponent where that is a normal double; products with it are exact, and quicker than ldexp. */
static inline double power_of_two(int exponent)
{
    uint64_t bits = (uint64_t)(exponent + 1023) << 52;
    double power;
    memcpy(&power, &bits, sizeof power);
    return power;
}

/* A 16-bit float with this many bits of exponent and fraction. */
static inline double load_16(uint16_t element, int exponent_bits, int fraction_bits)
{
    const int bias = (1 << (exponent_bits - 1)) - 1, last = (1 << exponent_bits) - 1;
    const int exponent = element >> fraction_bits & last, fraction = element & ((1 << fraction_bits) - 1);
    if (exponent == 0 || exponent == last) {
        const double sign = element >> 15 ? -1.0 : 1.0;
        return exponent == 0 ? sign * fraction * power_of_two(1 - bias - fraction_bits)
               : fraction    ? (double)NAN
                             : sign * (double)INFINITY;
    }
    const uint64_t bits = (uint64_t)(element >> 15) << 63 | (uint64_t)(exponent - bias + 1023) << 52 |
                          (uint64_t)fraction << (52 - fraction_bits);
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint16_t store_16(double value, int exponent_bits, int fraction_bits)
{
    const int bias = (1 << (exponent_bits - 1)) - 1, dropped = 52 - fraction_bits;
    const uint64_t infinity = (((uint64_t)1 << exponent_bits) - 1) << fraction_bits;
    uint64_t bits, size, stored;
    memcpy(&bits, &value, sizeof bits);
    size = bits & ~((uint64_t)1 << 63);
    if (isnan(value)) {
        stored = infinity | (uint64_t)1 << (fraction_bits - 1);
    } else if (size >= (uint64_t)(1 - bias + 1023) << 52) {
        /* Half of what is dropped, and less by one where the last bit that stays is even; a carry counts on. */
        const uint64_t half = ((uint64_t)1 << (dropped - 1)) - 1 + (size >> dropped & 1);
        stored = ((size + half) >> dropped) - ((uint64_t)(1023 - bias) << fraction_bits);
        if (stored > infinity)
            stored = infinity;
    } else { /* subnormals have the spacing of the smallest normals */
        stored = (uint64_t)nearbyint(fabs(value) * power_of_two(fraction_bits - (1 - bias)));
    }
    return (uint16_t)(bits >> 63 << 15 | stored);
}

/* The value of one element, and the element nearest to a value (ties to even, overflow to infinity). */
static inline double reference_load(const void *element, normfuse_type type)
{
    uint16_t bits;
    float single;
    double value;
    switch (type) {
    case NORMFUSE_F64: memcpy(&value, element, sizeof value); return value;
    case NORMFUSE_F32: memcpy(&single, element, sizeof single); return (double)single;
    case NORMFUSE_F16: memcpy(&bits, element, sizeof bits); return load_16(bits, 5, 10);
    default: { /* the upper half of a float */
        memcpy(&bits, element, sizeof bits);
        const uint32_t wide = (uint32_t)bits << 16;
        memcpy(&single, &wide, sizeof single);
        return (double)single;
    }
    }
}

static inline void reference_store(void *element, normfuse_type type, double value)
{
    uint16_t bits;
    float single;
    switch (type) {
    case NORMFUSE_F64: memcpy(element, &value, sizeof value); return;
    case NORMFUSE_F32: single = (float)value; memcpy(element, &single, sizeof single); return;
    case NORMFUSE_F16: bits = store_16(value, 5, 10); break;
    default: bits = store_16(value, 8, 7); break;
    }
    memcpy(element, &bits, sizeof bits);
}

/* A value as it is once stored and loaded. */
static inline double reference_round(double value, normfuse_type type)
{
    double element;
    reference_store(&element, type, value);
    return reference_load(&element, type);
}

/* u = (x + pre_bias) + pre_add: sums in the arithmetic of the type (float for 16 and 32 bits), rounded to the type at
 * the end. Adding 0 changes nothing. rounds false: x + pre_bias, the latter in that arithmetic, as it is. */
static inline double reference_add(double x, double pre_bias, double pre_add, bool rounds, normfuse_type type)
{
    if (type == NORMFUSE_F64)
        return x + pre_bias + pre_add;
    if (!rounds)
        return x + (double)(float)pre_bias;
    return reference_round((double)((float)x + (float)pre_bias + (float)pre_add), type);
}

/* count values at element stride `stride` from `data`, to and from dense doubles. */
static inline void reference_load_strided(double *values, const void *data, normfuse_type type, int64_t count,
                                          ptrdiff_t stride)
{
    const char *element = data;
    const ptrdiff_t step = stride * (ptrdiff_t)reference_type_bytes(type);
    for (int64_t i = 0; i < count; i++)
        values[i] = reference_load(element + i * step, type);
}

static inline void reference_store_strided(void *data, normfuse_type type, const double *values, int64_t count,
                                           ptrdiff_t stride)
{
    char *element = data;
    const ptrdiff_t step = stride * (ptrdiff_t)reference_type_bytes(type);
    for (int64_t i = 0; i < count; i++)
        reference_store(element + i * step, type, values[i]);
}

#endif
