/* SPDX-License-Identifier: MIT
 *
 * fma.c - fused multiply-add of floats by sums of doubles, for the table in plain C: libm's is a call for each value. */
#include <stdint.h>
#include <string.h>

#include "cpu/kernels.h"

/* The product is exact in double. Where the sum is not, its last bit becomes 1 (rounding to odd), so that rounding to float
 * afterwards rounds as once (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008). */
static inline float fma_of(float a, float b, float c)
{
    const double product = (double)a * (double)b, sum = product + (double)c;
    const double part = sum - product, error = (product - (sum - part)) + ((double)c - part); /* Knuth's; NaN where sum is infinite */
    uint64_t bits, sign;
    memcpy(&bits, &sum, 8);
    memcpy(&sign, &error, 8);
    const uint64_t is_even = (bits & 1) - 1, away = 1 - ((bits ^ sign) >> 63) * 2;
    const uint64_t is_inexact = (uint64_t)0 - (uint64_t)((error < 0) | (error > 0));
    bits += is_even & is_inexact & away;
    double odd;
    memcpy(&odd, &bits, 8);
    return (float)odd;
}

void normfuse_fma(const float *a, const float *b, float *restrict c)
{
    for (int i = 0; i < 16; i++)
        c[i] = fma_of(a[i], b[i], c[i]);
}
