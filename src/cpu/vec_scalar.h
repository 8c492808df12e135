/* SPDX-License-Identifier: MIT
 *
 * vec_scalar.h - the vector layer in plain C: vf is 16 floats, vd is 8 doubles. It defines what every other vec_<isa>.h
 * computes, bit for bit: one IEEE operation a lane, fused multiply-add only where written, sums in the order of
 * vf_hsum and vd_hsum.
 *
 *   vf_load_T, vf_store_T          16 values of T at any element-aligned address
 *   vf_stream_T                    the same past the cache; the address is aligned to 16 values
 *   vf_load_part_T(p, n, fill)     p[0..n), n < 16, other lanes fill; never touches p[n]
 *   vf_store_part_T(p, v, n)       p[0..n)
 *   VF_HAS_MASKS                   parts cost what whole vectors do
 *   vf_select_lt(a, b, x, y)       a < b ? x : y; vf_select_le alike: false for a NaN
 *   vf_max(a, b), vf_min(a, b)     a > b ? a : b, a < b ? a : b: b where one is NaN
 *   vf_pow2(t)                     2^n where t = 1.5 * 2^23 + n, -127 <= n <= 128 (0 for -127, inf for 128)
 *   vd_pow2(t)                     2^n where t = 1.5 * 2^52 + n, -1023 <= n <= 1024, alike */
#ifndef NORMFUSE_VEC_SCALAR_H
#define NORMFUSE_VEC_SCALAR_H

#include <float.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "cpu/convert.h"

_Static_assert(FLT_EVAL_METHOD == 0, "floats are rounded after each operation");

enum { VF_HAS_MASKS = 0 };

typedef struct { float l[16]; } vf;
typedef struct { double l[8]; } vd;

#define VF_LANES(expression)               \
    do {                                   \
        for (int i = 0; i < 16; i++) {     \
            expression;                    \
        }                                  \
    } while (0)
#define VD_LANES(expression)               \
    do {                                   \
        for (int i = 0; i < 8; i++) {      \
            expression;                    \
        }                                  \
    } while (0)

static inline vf vf_set1(float a) { vf r; VF_LANES(r.l[i] = a); return r; }
static inline vf vf_add(vf a, vf b) { VF_LANES(a.l[i] += b.l[i]); return a; }
static inline vf vf_sub(vf a, vf b) { VF_LANES(a.l[i] -= b.l[i]); return a; }
static inline vf vf_mul(vf a, vf b) { VF_LANES(a.l[i] *= b.l[i]); return a; }
static inline vf vf_div(vf a, vf b) { VF_LANES(a.l[i] /= b.l[i]); return a; }
static inline vf vf_fma(vf a, vf b, vf c) { VF_LANES(c.l[i] = fmaf(a.l[i], b.l[i], c.l[i])); return c; }
static inline vf vf_max(vf a, vf b) { VF_LANES(a.l[i] = a.l[i] > b.l[i] ? a.l[i] : b.l[i]); return a; }
static inline vf vf_min(vf a, vf b) { VF_LANES(a.l[i] = a.l[i] < b.l[i] ? a.l[i] : b.l[i]); return a; }
static inline vf vf_neg(vf a) { VF_LANES(a.l[i] = -a.l[i]); return a; }
static inline vf vf_abs(vf a) { VF_LANES(a.l[i] = fabsf(a.l[i])); return a; }
static inline vf vf_select_lt(vf a, vf b, vf x, vf y) { VF_LANES(x.l[i] = a.l[i] < b.l[i] ? x.l[i] : y.l[i]); return x; }
static inline vf vf_select_le(vf a, vf b, vf x, vf y) { VF_LANES(x.l[i] = a.l[i] <= b.l[i] ? x.l[i] : y.l[i]); return x; }
static inline vf vf_pow2(vf t)
{
    VF_LANES(uint32_t u; memcpy(&u, &t.l[i], 4); u = (u << 23) + 0x3f800000u; memcpy(&t.l[i], &u, 4));
    return t;
}
static inline float vf_hsum(vf a)
{
    for (int h = 8; h; h /= 2)
        for (int i = 0; i < h; i++)
            a.l[i] += a.l[i + h];
    return a.l[0];
}
static inline void vf_fence(void) {}

static inline vf vf_load_part_f32(const float *p, size_t n, vf fill) { for (size_t i = 0; i < n; i++) fill.l[i] = p[i]; return fill; }
static inline void vf_store_part_f32(float *p, vf v, size_t n) { for (size_t i = 0; i < n; i++) p[i] = v.l[i]; }
static inline vf vf_load_part_f16(const uint16_t *p, size_t n, vf fill) { for (size_t i = 0; i < n; i++) fill.l[i] = normfuse_f16_to_f32(p[i]); return fill; }
static inline void vf_store_part_f16(uint16_t *p, vf v, size_t n) { for (size_t i = 0; i < n; i++) p[i] = normfuse_f32_to_f16(v.l[i]); }
static inline vf vf_load_part_bf16(const uint16_t *p, size_t n, vf fill) { for (size_t i = 0; i < n; i++) fill.l[i] = normfuse_bf16_to_f32(p[i]); return fill; }
static inline void vf_store_part_bf16(uint16_t *p, vf v, size_t n) { for (size_t i = 0; i < n; i++) p[i] = normfuse_f32_to_bf16(v.l[i]); }
static inline vf vf_load_f32(const float *p) { return vf_load_part_f32(p, 16, vf_set1(0)); }
static inline vf vf_load_f16(const uint16_t *p) { return vf_load_part_f16(p, 16, vf_set1(0)); }
static inline vf vf_load_bf16(const uint16_t *p) { return vf_load_part_bf16(p, 16, vf_set1(0)); }
static inline void vf_store_f32(float *p, vf v) { vf_store_part_f32(p, v, 16); }
static inline void vf_store_f16(uint16_t *p, vf v) { vf_store_part_f16(p, v, 16); }
static inline void vf_store_bf16(uint16_t *p, vf v) { vf_store_part_bf16(p, v, 16); }
static inline void vf_stream_f32(float *p, vf v) { vf_store_f32(p, v); }
static inline void vf_stream_f16(uint16_t *p, vf v) { vf_store_f16(p, v); }
static inline void vf_stream_bf16(uint16_t *p, vf v) { vf_store_bf16(p, v); }

static inline vd vd_set1(double a) { vd r; VD_LANES(r.l[i] = a); return r; }
static inline vd vd_add(vd a, vd b) { VD_LANES(a.l[i] += b.l[i]); return a; }
static inline vd vd_sub(vd a, vd b) { VD_LANES(a.l[i] -= b.l[i]); return a; }
static inline vd vd_mul(vd a, vd b) { VD_LANES(a.l[i] *= b.l[i]); return a; }
static inline vd vd_fma(vd a, vd b, vd c) { VD_LANES(c.l[i] = fma(a.l[i], b.l[i], c.l[i])); return c; }
static inline vd vd_div(vd a, vd b) { VD_LANES(a.l[i] /= b.l[i]); return a; }
static inline vd vd_max(vd a, vd b) { VD_LANES(a.l[i] = a.l[i] > b.l[i] ? a.l[i] : b.l[i]); return a; }
static inline vd vd_min(vd a, vd b) { VD_LANES(a.l[i] = a.l[i] < b.l[i] ? a.l[i] : b.l[i]); return a; }
static inline vd vd_neg(vd a) { VD_LANES(a.l[i] = -a.l[i]); return a; }
static inline vd vd_abs(vd a) { VD_LANES(a.l[i] = fabs(a.l[i])); return a; }
static inline vd vd_select_le(vd a, vd b, vd x, vd y) { VD_LANES(x.l[i] = a.l[i] <= b.l[i] ? x.l[i] : y.l[i]); return x; }
static inline vd vd_pow2(vd t)
{
    VD_LANES(uint64_t u; memcpy(&u, &t.l[i], 8); u = (u << 52) + 0x3ff0000000000000u; memcpy(&t.l[i], &u, 8));
    return t;
}
static inline double vd_hsum(vd a)
{
    for (int h = 4; h; h /= 2)
        for (int i = 0; i < h; i++)
            a.l[i] += a.l[i + h];
    return a.l[0];
}
static inline vd vd_from_f32(const float *p) { vd r; VD_LANES(r.l[i] = (double)p[i]); return r; }
static inline void vd_to_f32(float *p, vd v) { VD_LANES(p[i] = (float)v.l[i]); }
static inline vd vd_select_lt(vd a, vd b, vd x, vd y) { VD_LANES(x.l[i] = a.l[i] < b.l[i] ? x.l[i] : y.l[i]); return x; }
static inline vd vd_load_part_f64(const double *p, size_t n, vd fill) { for (size_t i = 0; i < n; i++) fill.l[i] = p[i]; return fill; }
static inline void vd_store_part_f64(double *p, vd v, size_t n) { for (size_t i = 0; i < n; i++) p[i] = v.l[i]; }
static inline vd vd_load_f64(const double *p) { return vd_load_part_f64(p, 8, vd_set1(0)); }
static inline void vd_store_f64(double *p, vd v) { vd_store_part_f64(p, v, 8); }
static inline void vd_stream_f64(double *p, vd v) { vd_store_f64(p, v); }

#endif
