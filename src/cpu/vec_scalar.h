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
 *   vf_hsums(v)                    lane i: vf_hsum(v[i]), of 16 vectors; not in plain C
 *   VF_HAS_MASKS                   parts cost what whole vectors do
 *   VF_ROUNDS_BF16                 rounding to bf16 takes about ten instructions
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
#include "cpu/kernels.h"

_Static_assert(FLT_EVAL_METHOD == 0, "floats are rounded after each operation");

enum { VF_HAS_MASKS = 0, VF_ROUNDS_BF16 = 0 };

/* Vectors of 16 bytes, which gcc and clang compile for every machine: on x86-64 they are SSE2's. */
typedef float normfuse_float4 __attribute__((vector_size(16)));
typedef uint32_t normfuse_bits4 __attribute__((vector_size(16)));
typedef double normfuse_double2 __attribute__((vector_size(16)));
typedef uint64_t normfuse_bits2 __attribute__((vector_size(16)));

/* In memory, at any address of an element. */
typedef float normfuse_floats __attribute__((vector_size(16), aligned(4), may_alias));
typedef double normfuse_doubles __attribute__((vector_size(16), aligned(8), may_alias));

typedef struct { normfuse_float4 q[4]; } vf;
typedef struct { normfuse_double2 q[4]; } vd;

/* An expression for each i from 0 to 3, a constant. */
#define QUARTERS(expression)                \
    do {                                    \
        { enum { i = 0 }; expression; }     \
        { enum { i = 1 }; expression; }     \
        { enum { i = 2 }; expression; }     \
        { enum { i = 3 }; expression; }     \
    } while (0)

static inline normfuse_float4 vf_choose(normfuse_bits4 mask, normfuse_float4 x, normfuse_float4 y)
{
    return (normfuse_float4)((mask & (normfuse_bits4)x) | (~mask & (normfuse_bits4)y));
}
static inline normfuse_double2 vd_choose(normfuse_bits2 mask, normfuse_double2 x, normfuse_double2 y)
{
    return (normfuse_double2)((mask & (normfuse_bits2)x) | (~mask & (normfuse_bits2)y));
}

static inline vf vf_set1(float a) { const normfuse_float4 q = {a, a, a, a}; return (vf){{q, q, q, q}}; }
static inline vf vf_add(vf a, vf b) { QUARTERS(a.q[i] += b.q[i]); return a; }
static inline vf vf_sub(vf a, vf b) { QUARTERS(a.q[i] -= b.q[i]); return a; }
static inline vf vf_mul(vf a, vf b) { QUARTERS(a.q[i] *= b.q[i]); return a; }
static inline vf vf_div(vf a, vf b) { QUARTERS(a.q[i] /= b.q[i]); return a; }
static inline vf vf_fma(vf a, vf b, vf c)
{
    normfuse_fma((const float *)&a, (const float *)&b, (float *)&c);
    return c;
}
static inline vf vf_max(vf a, vf b) { QUARTERS(a.q[i] = vf_choose((normfuse_bits4)(a.q[i] > b.q[i]), a.q[i], b.q[i])); return a; }
static inline vf vf_min(vf a, vf b) { QUARTERS(a.q[i] = vf_choose((normfuse_bits4)(a.q[i] < b.q[i]), a.q[i], b.q[i])); return a; }
static inline vf vf_neg(vf a) { QUARTERS(a.q[i] = -a.q[i]); return a; }
static inline vf vf_abs(vf a) { QUARTERS(a.q[i] = (normfuse_float4)((normfuse_bits4)a.q[i] & 0x7fffffffu)); return a; }
static inline vf vf_select_lt(vf a, vf b, vf x, vf y) { QUARTERS(x.q[i] = vf_choose((normfuse_bits4)(a.q[i] < b.q[i]), x.q[i], y.q[i])); return x; }
static inline vf vf_select_le(vf a, vf b, vf x, vf y) { QUARTERS(x.q[i] = vf_choose((normfuse_bits4)(a.q[i] <= b.q[i]), x.q[i], y.q[i])); return x; }
static inline vf vf_pow2(vf t) { QUARTERS(t.q[i] = (normfuse_float4)(((normfuse_bits4)t.q[i] << 23) + 0x3f800000u)); return t; }
static inline float vf_hsum(vf a)
{
    const normfuse_float4 s = (a.q[0] + a.q[2]) + (a.q[1] + a.q[3]);
    return (s[0] + s[2]) + (s[1] + s[3]);
}
static inline void vf_fence(void) {}

/* Lanes as an array, for what is done value by value. */
#define EACH_FIRST(v, n, expression)                    \
    do {                                                \
        float l[16];                                    \
        memcpy(l, &(v), sizeof l);                      \
        for (size_t i = 0; i < (n); i++)                \
            expression;                                 \
        memcpy(&(v), l, sizeof l);                      \
    } while (0)

static inline vf vf_load_part_f32(const float *p, size_t n, vf fill) { memcpy(&fill, p, n * sizeof *p); return fill; }
static inline void vf_store_part_f32(float *p, vf v, size_t n) { memcpy(p, &v, n * sizeof *p); }
static inline vf vf_load_part_f16(const uint16_t *p, size_t n, vf fill) { EACH_FIRST(fill, n, l[i] = normfuse_f16_to_f32(p[i])); return fill; }
static inline void vf_store_part_f16(uint16_t *p, vf v, size_t n) { EACH_FIRST(v, n, p[i] = normfuse_f32_to_f16(l[i])); }
static inline vf vf_load_part_bf16(const uint16_t *p, size_t n, vf fill) { EACH_FIRST(fill, n, l[i] = normfuse_bf16_to_f32(p[i])); return fill; }
static inline void vf_store_part_bf16(uint16_t *p, vf v, size_t n) { EACH_FIRST(v, n, p[i] = normfuse_f32_to_bf16(l[i])); }
static inline vf vf_load_f32(const float *p) { vf v; QUARTERS(v.q[i] = ((const normfuse_floats *)p)[i]); return v; }
static inline vf vf_load_f16(const uint16_t *p) { return vf_load_part_f16(p, 16, vf_set1(0)); }
static inline vf vf_load_bf16(const uint16_t *p) { return vf_load_part_bf16(p, 16, vf_set1(0)); }
static inline void vf_store_f32(float *p, vf v) { QUARTERS(((normfuse_floats *)p)[i] = v.q[i]); }
static inline void vf_store_f16(uint16_t *p, vf v) { vf_store_part_f16(p, v, 16); }
static inline void vf_store_bf16(uint16_t *p, vf v) { vf_store_part_bf16(p, v, 16); }
static inline void vf_stream_f32(float *p, vf v) { vf_store_f32(p, v); }
static inline void vf_stream_f16(uint16_t *p, vf v) { vf_store_f16(p, v); }
static inline void vf_stream_bf16(uint16_t *p, vf v) { vf_store_bf16(p, v); }

static inline vd vd_set1(double a) { const normfuse_double2 q = {a, a}; return (vd){{q, q, q, q}}; }
static inline vd vd_add(vd a, vd b) { QUARTERS(a.q[i] += b.q[i]); return a; }
static inline vd vd_sub(vd a, vd b) { QUARTERS(a.q[i] -= b.q[i]); return a; }
static inline vd vd_mul(vd a, vd b) { QUARTERS(a.q[i] *= b.q[i]); return a; }
static inline vd vd_fma(vd a, vd b, vd c)
{
    for (int i = 0; i < 8; i++)
        c.q[i / 2][i % 2] = fma(a.q[i / 2][i % 2], b.q[i / 2][i % 2], c.q[i / 2][i % 2]);
    return c;
}
static inline vd vd_sqrt(vd a) { QUARTERS(a.q[i] = ((normfuse_double2){sqrt(a.q[i][0]), sqrt(a.q[i][1])})); return a; }
static inline vd vd_div(vd a, vd b) { QUARTERS(a.q[i] /= b.q[i]); return a; }
static inline vd vd_max(vd a, vd b) { QUARTERS(a.q[i] = vd_choose((normfuse_bits2)(a.q[i] > b.q[i]), a.q[i], b.q[i])); return a; }
static inline vd vd_min(vd a, vd b) { QUARTERS(a.q[i] = vd_choose((normfuse_bits2)(a.q[i] < b.q[i]), a.q[i], b.q[i])); return a; }
static inline vd vd_neg(vd a) { QUARTERS(a.q[i] = -a.q[i]); return a; }
static inline vd vd_abs(vd a) { QUARTERS(a.q[i] = (normfuse_double2)((normfuse_bits2)a.q[i] & 0x7fffffffffffffffu)); return a; }
static inline vd vd_select_le(vd a, vd b, vd x, vd y) { QUARTERS(x.q[i] = vd_choose((normfuse_bits2)(a.q[i] <= b.q[i]), x.q[i], y.q[i])); return x; }
static inline vd vd_select_lt(vd a, vd b, vd x, vd y) { QUARTERS(x.q[i] = vd_choose((normfuse_bits2)(a.q[i] < b.q[i]), x.q[i], y.q[i])); return x; }
static inline vd vd_pow2(vd t) { QUARTERS(t.q[i] = (normfuse_double2)(((normfuse_bits2)t.q[i] << 52) + 0x3ff0000000000000u)); return t; }
static inline double vd_hsum(vd a)
{
    const normfuse_double2 s = (a.q[0] + a.q[2]) + (a.q[1] + a.q[3]);
    return s[0] + s[1];
}
static inline vd vd_from_f32(const float *p) { vd r; QUARTERS(r.q[i] = ((normfuse_double2){(double)p[2 * i], (double)p[2 * i + 1]})); return r; }
static inline void vd_to_f32(float *p, vd v) { QUARTERS(p[2 * i] = (float)v.q[i][0]; p[2 * i + 1] = (float)v.q[i][1]); }
static inline vd vd_load_part_f64(const double *p, size_t n, vd fill) { memcpy(&fill, p, n * sizeof *p); return fill; }
static inline void vd_store_part_f64(double *p, vd v, size_t n) { memcpy(p, &v, n * sizeof *p); }
static inline vd vd_load_f64(const double *p) { vd v; QUARTERS(v.q[i] = ((const normfuse_doubles *)p)[i]); return v; }
static inline void vd_store_f64(double *p, vd v) { QUARTERS(((normfuse_doubles *)p)[i] = v.q[i]); }
static inline void vd_stream_f64(double *p, vd v) { vd_store_f64(p, v); }

#endif
