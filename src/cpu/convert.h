/* SPDX-License-Identifier: MIT
 *
 * convert.h - one value of a 16-bit type from and to f32, rounded to nearest even, as the vector conversions do it
 * (NaNs become quiet and keep their upper payload bits). */
#ifndef NORMFUSE_CONVERT_H
#define NORMFUSE_CONVERT_H

#include <stdint.h>
#include <string.h>

static inline float normfuse_bits_f32(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }
static inline uint32_t normfuse_f32_bits(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }

static inline float normfuse_bf16_to_f32(uint16_t h) { return normfuse_bits_f32((uint32_t)h << 16); }

static inline uint16_t normfuse_f32_to_bf16(float f)
{
    uint32_t u = normfuse_f32_bits(f);
    if ((u & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)((u >> 16) | 0x40u);
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

static inline float normfuse_f16_to_f32(uint16_t h)
{
    const uint32_t sign = (uint32_t)(h & 0x8000u) << 16, magnitude = h & 0x7fffu;
    if (magnitude > 0x7c00u)
        return normfuse_bits_f32(sign | 0x7fc00000u | (magnitude << 13));
    if (magnitude == 0x7c00u)
        return normfuse_bits_f32(sign | 0x7f800000u);
    if (magnitude < 0x0400u) /* subnormal: exact in f32 */
        return normfuse_bits_f32(sign | normfuse_f32_bits((float)magnitude * 0x1p-24f));
    return normfuse_bits_f32(sign | ((magnitude << 13) + ((127u - 15u) << 23)));
}

static inline uint16_t normfuse_f32_to_f16(float f)
{
    const uint32_t u = normfuse_f32_bits(f), sign = (u >> 16) & 0x8000u, magnitude = u & 0x7fffffffu;
    if (magnitude > 0x7f800000u)
        return (uint16_t)(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
    if (magnitude >= 0x477ff000u) /* 65520 and above round to infinity */
        return (uint16_t)(sign | 0x7c00u);
    if (magnitude < 0x38800000u) /* below 2^-14: adding 0.5 rounds at 2^-24, f16's subnormal step */
        return (uint16_t)(sign | (normfuse_f32_bits(normfuse_bits_f32(magnitude) + 0.5f) - 0x3f000000u));
    return (uint16_t)(sign | ((magnitude + 0xfffu + ((magnitude >> 13) & 1u) - ((127u - 15u) << 23)) >> 13));
}

#endif
