/* SPDX-License-Identifier: MIT
 *
 * numbers.c - the dtypes' formats. */
#include "numbers.h"

#include <math.h>

/* A 16-bit float is a sign, an exponent with this bias (also the largest exponent) and so many bits of mantissa. */
struct format {
    int mantissa_bits, bias;
};

static struct format format_of(normfuse_type type)
{
    return type == NORMFUSE_F16 ? (struct format){10, 15} : (struct format){7, 127};
}

size_t number_bytes(normfuse_type type)
{
    return type == NORMFUSE_F64 ? 8 : type == NORMFUSE_F32 ? 4 : 2;
}

static double from_16_bits(unsigned bits, struct format format)
{
    int exponent = (int)(bits & 0x7fff) >> format.mantissa_bits;
    int mantissa = (int)(bits & ((1u << format.mantissa_bits) - 1));
    double value;
    if (exponent == 2 * format.bias + 1)
        value = mantissa ? (double)NAN : (double)INFINITY;
    else if (exponent == 0)
        value = ldexp(mantissa, 1 - format.bias - format.mantissa_bits);
    else
        value = ldexp(mantissa + (1 << format.mantissa_bits), exponent - format.bias - format.mantissa_bits);
    return bits & 0x8000 ? -value : value;
}

static uint16_t to_16_bits(double value, struct format format)
{
    int infinity = (2 * format.bias + 1) << format.mantissa_bits;
    int sign = signbit(value) ? 0x8000 : 0;
    if (isnan(value))
        return (uint16_t)(sign | infinity | 1 << (format.mantissa_bits - 1));
    double magnitude = fabs(value);
    if (isinf(magnitude))
        return (uint16_t)(sign | infinity);
    if (magnitude == 0)
        return (uint16_t)sign;
    int exponent;
    (void)frexp(magnitude, &exponent);
    exponent--; /* magnitude is 1.f * 2^exponent */
    int least = 1 - format.bias;
    if (exponent < least)
        exponent = least; /* denormal: the unit stays */
    if (exponent > format.bias)
        return (uint16_t)(sign | infinity);
    /* In units of the last place; a carry out of the mantissa runs into the exponent, and up to infinity, as it should.
     * */
    double units = nearbyint(ldexp(magnitude, format.mantissa_bits - exponent));
    int bits = (int)units + ((exponent - least) << format.mantissa_bits);
    return (uint16_t)(sign | bits);
}

double number_load(const void *data, normfuse_type type, int64_t i)
{
    if (type == NORMFUSE_F64)
        return ((const double *)data)[i];
    if (type == NORMFUSE_F32)
        return (double)((const float *)data)[i];
    return from_16_bits(((const uint16_t *)data)[i], format_of(type));
}

void number_store(void *data, normfuse_type type, int64_t i, double value)
{
    if (type == NORMFUSE_F64)
        ((double *)data)[i] = value;
    else if (type == NORMFUSE_F32)
        ((float *)data)[i] = (float)value;
    else
        ((uint16_t *)data)[i] = to_16_bits(value, format_of(type));
}
