/* SPDX-License-Identifier: MIT
 *
 * vec_neon.h - the vector layer (contract: vec_scalar.h) on AArch64's Advanced SIMD: four registers each. Streaming
 * stores are ordinary ones: the intrinsics offer no non-temporal form that gcc and clang share. */
#ifndef NORMFUSE_VEC_NEON_H
#define NORMFUSE_VEC_NEON_H

#include <arm_neon.h>
#include <stddef.h>
#include <stdint.h>

#include "cpu/convert.h"

enum { VF_HAS_MASKS = 0, VF_ROUNDS_BF16 = 0 };

typedef struct { float32x4_t q[4]; } vf;
typedef struct { float64x2_t q[4]; } vd;

#define Q4(expression)                \
    do {                              \
        for (int i = 0; i < 4; i++) { \
            expression;               \
        }                             \
    } while (0)

static inline vf vf_set1(float a) { vf r; Q4(r.q[i] = vdupq_n_f32(a)); return r; }
static inline vf vf_add(vf a, vf b) { Q4(a.q[i] = vaddq_f32(a.q[i], b.q[i])); return a; }
static inline vf vf_sub(vf a, vf b) { Q4(a.q[i] = vsubq_f32(a.q[i], b.q[i])); return a; }
static inline vf vf_mul(vf a, vf b) { Q4(a.q[i] = vmulq_f32(a.q[i], b.q[i])); return a; }
static inline vf vf_div(vf a, vf b) { Q4(a.q[i] = vdivq_f32(a.q[i], b.q[i])); return a; }
static inline vf vf_fma(vf a, vf b, vf c) { Q4(c.q[i] = vfmaq_f32(c.q[i], a.q[i], b.q[i])); return c; }
static inline vf vf_max(vf a, vf b) { Q4(a.q[i] = vbslq_f32(vcgtq_f32(a.q[i], b.q[i]), a.q[i], b.q[i])); return a; }
static inline vf vf_min(vf a, vf b) { Q4(a.q[i] = vbslq_f32(vcltq_f32(a.q[i], b.q[i]), a.q[i], b.q[i])); return a; }
static inline vf vf_neg(vf a) { Q4(a.q[i] = vnegq_f32(a.q[i])); return a; }
static inline vf vf_abs(vf a) { Q4(a.q[i] = vabsq_f32(a.q[i])); return a; }
static inline vf vf_select_lt(vf a, vf b, vf x, vf y) { Q4(x.q[i] = vbslq_f32(vcltq_f32(a.q[i], b.q[i]), x.q[i], y.q[i])); return x; }
static inline vf vf_select_le(vf a, vf b, vf x, vf y) { Q4(x.q[i] = vbslq_f32(vcleq_f32(a.q[i], b.q[i]), x.q[i], y.q[i])); return x; }
static inline vf vf_pow2(vf t)
{
    Q4(t.q[i] = vreinterpretq_f32_u32(vaddq_u32(vshlq_n_u32(vreinterpretq_u32_f32(t.q[i]), 23), vdupq_n_u32(0x3f800000u))));
    return t;
}
static inline float vf_hsum(vf a)
{
    const float32x4_t s4 = vaddq_f32(vaddq_f32(a.q[0], a.q[2]), vaddq_f32(a.q[1], a.q[3]));
    const float32x2_t s2 = vadd_f32(vget_low_f32(s4), vget_high_f32(s4));
    return vget_lane_f32(s2, 0) + vget_lane_f32(s2, 1);
}
static inline void vf_fence(void) {}

static inline vf vf_load_f32(const float *p) { vf r; Q4(r.q[i] = vld1q_f32(p + 4 * i)); return r; }
static inline vf vf_hsums(const vf v[16])
{
    float sums[16];
    for (int i = 0; i < 16; i++)
        sums[i] = vf_hsum(v[i]);
    return vf_load_f32(sums);
}
static inline void vf_store_f32(float *p, vf v) { Q4(vst1q_f32(p + 4 * i, v.q[i])); }
static inline vf vf_load_bf16(const uint16_t *p)
{
    vf r;
    Q4(r.q[i] = vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(vld1_u16(p + 4 * i)), 16)));
    return r;
}
static inline void vf_store_bf16(uint16_t *p, vf v)
{
    Q4(const uint32x4_t u = vreinterpretq_u32_f32(v.q[i]); const uint32x4_t upper = vshrq_n_u32(u, 16);
       const uint32x4_t odd = vandq_u32(upper, vdupq_n_u32(1));
       const uint32x4_t r = vshrq_n_u32(vaddq_u32(vaddq_u32(u, vdupq_n_u32(0x7fff)), odd), 16);
       const uint32x4_t quiet = vorrq_u32(upper, vdupq_n_u32(0x40));
       vst1_u16(p + 4 * i, vmovn_u32(vbslq_u32(vceqq_f32(v.q[i], v.q[i]), r, quiet))));
}
static inline vf vf_load_f16(const uint16_t *p)
{
    vf r;
    Q4(r.q[i] = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i))));
    return r;
}
static inline void vf_store_f16(uint16_t *p, vf v) { Q4(vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(v.q[i])))); }
static inline void vf_stream_f32(float *p, vf v) { vf_store_f32(p, v); }
static inline void vf_stream_f16(uint16_t *p, vf v) { vf_store_f16(p, v); }
static inline void vf_stream_bf16(uint16_t *p, vf v) { vf_store_bf16(p, v); }

/* Tails go through the stack. The fill is an f32 that 16 bits may not hold, so lanes are merged after widening. */
static inline vf vf_merge(vf v, size_t n, vf fill)
{
    float a[16], b[16];
    vf_store_f32(a, v);
    vf_store_f32(b, fill);
    memcpy(b, a, n * 4);
    return vf_load_f32(b);
}
static inline vf vf_load_part_f32(const float *p, size_t n, vf fill) { float t[16]; vf_store_f32(t, fill); memcpy(t, p, n * 4); return vf_load_f32(t); }
static inline void vf_store_part_f32(float *p, vf v, size_t n) { float t[16]; vf_store_f32(t, v); memcpy(p, t, n * 4); }
static inline vf vf_load_part_bf16(const uint16_t *p, size_t n, vf fill) { uint16_t t[16] = {0}; memcpy(t, p, n * 2); return vf_merge(vf_load_bf16(t), n, fill); }
static inline void vf_store_part_bf16(uint16_t *p, vf v, size_t n) { uint16_t t[16]; vf_store_bf16(t, v); memcpy(p, t, n * 2); }
static inline vf vf_load_part_f16(const uint16_t *p, size_t n, vf fill) { uint16_t t[16] = {0}; memcpy(t, p, n * 2); return vf_merge(vf_load_f16(t), n, fill); }
static inline void vf_store_part_f16(uint16_t *p, vf v, size_t n) { uint16_t t[16]; vf_store_f16(t, v); memcpy(p, t, n * 2); }

static inline vd vd_set1(double a) { vd r; Q4(r.q[i] = vdupq_n_f64(a)); return r; }
static inline vd vd_add(vd a, vd b) { Q4(a.q[i] = vaddq_f64(a.q[i], b.q[i])); return a; }
static inline vd vd_sub(vd a, vd b) { Q4(a.q[i] = vsubq_f64(a.q[i], b.q[i])); return a; }
static inline vd vd_mul(vd a, vd b) { Q4(a.q[i] = vmulq_f64(a.q[i], b.q[i])); return a; }
static inline vd vd_fma(vd a, vd b, vd c) { Q4(c.q[i] = vfmaq_f64(c.q[i], a.q[i], b.q[i])); return c; }
static inline vd vd_sqrt(vd a) { Q4(a.q[i] = vsqrtq_f64(a.q[i])); return a; }
static inline vd vd_div(vd a, vd b) { Q4(a.q[i] = vdivq_f64(a.q[i], b.q[i])); return a; }
static inline vd vd_max(vd a, vd b) { Q4(a.q[i] = vbslq_f64(vcgtq_f64(a.q[i], b.q[i]), a.q[i], b.q[i])); return a; }
static inline vd vd_min(vd a, vd b) { Q4(a.q[i] = vbslq_f64(vcltq_f64(a.q[i], b.q[i]), a.q[i], b.q[i])); return a; }
static inline vd vd_neg(vd a) { Q4(a.q[i] = vnegq_f64(a.q[i])); return a; }
static inline vd vd_abs(vd a) { Q4(a.q[i] = vabsq_f64(a.q[i])); return a; }
static inline vd vd_select_le(vd a, vd b, vd x, vd y) { Q4(x.q[i] = vbslq_f64(vcleq_f64(a.q[i], b.q[i]), x.q[i], y.q[i])); return x; }
static inline vd vd_pow2(vd t)
{
    const uint64x2_t one = vdupq_n_u64(0x3ff0000000000000u);
    Q4(t.q[i] = vreinterpretq_f64_u64(vaddq_u64(vshlq_n_u64(vreinterpretq_u64_f64(t.q[i]), 52), one)));
    return t;
}
static inline double vd_hsum(vd a)
{
    const float64x2_t s2 = vaddq_f64(vaddq_f64(a.q[0], a.q[2]), vaddq_f64(a.q[1], a.q[3]));
    return vgetq_lane_f64(s2, 0) + vgetq_lane_f64(s2, 1);
}
static inline vd vd_from_f32(const float *p) { vd r; Q4(r.q[i] = vcvt_f64_f32(vld1_f32(p + 2 * i))); return r; }
static inline void vd_to_f32(float *p, vd v) { Q4(vst1_f32(p + 2 * i, vcvt_f32_f64(v.q[i]))); }
static inline vd vd_select_lt(vd a, vd b, vd x, vd y) { Q4(x.q[i] = vbslq_f64(vcltq_f64(a.q[i], b.q[i]), x.q[i], y.q[i])); return x; }
static inline vd vd_load_f64(const double *p) { vd r; Q4(r.q[i] = vld1q_f64(p + 2 * i)); return r; }
static inline void vd_store_f64(double *p, vd v) { Q4(vst1q_f64(p + 2 * i, v.q[i])); }
static inline void vd_stream_f64(double *p, vd v) { vd_store_f64(p, v); }
static inline vd vd_load_part_f64(const double *p, size_t n, vd fill) { double t[8]; vd_store_f64(t, fill); memcpy(t, p, n * 8); return vd_load_f64(t); }
static inline void vd_store_part_f64(double *p, vd v, size_t n) { double t[8]; vd_store_f64(t, v); memcpy(p, t, n * 8); }

#endif
