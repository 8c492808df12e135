/* SPDX-License-Identifier: MIT
 *
 * vec_avx2.h - the vector layer (contract: vec_scalar.h) on AVX2, FMA and F16C: vf is two, vd two registers. */
#ifndef NORMFUSE_VEC_AVX2_H
#define NORMFUSE_VEC_AVX2_H

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "cpu/convert.h"

/* Parts of vectors are called for: in every loop they would be 145 KB of code. */
#define VF_CALLED static __attribute__((noinline))

enum { VF_HAS_MASKS = 0, VF_ROUNDS_BF16 = 1 };

typedef struct { __m256 lo, hi; } vf;
typedef struct { __m256d lo, hi; } vd;

static inline vf vf_set1(float a) { __m256 r = _mm256_set1_ps(a); return (vf){r, r}; }
static inline vf vf_add(vf a, vf b) { return (vf){_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
static inline vf vf_sub(vf a, vf b) { return (vf){_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
static inline vf vf_mul(vf a, vf b) { return (vf){_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
static inline vf vf_div(vf a, vf b) { return (vf){_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
static inline vf vf_fma(vf a, vf b, vf c) { return (vf){_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
static inline vf vf_max(vf a, vf b) { return (vf){_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
static inline vf vf_min(vf a, vf b) { return (vf){_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
static inline vf vf_neg(vf a) { __m256 m = _mm256_set1_ps(-0.0f); return (vf){_mm256_xor_ps(a.lo, m), _mm256_xor_ps(a.hi, m)}; }
static inline vf vf_abs(vf a) { __m256 m = _mm256_set1_ps(-0.0f); return (vf){_mm256_andnot_ps(m, a.lo), _mm256_andnot_ps(m, a.hi)}; }
static inline vf vf_select_lt(vf a, vf b, vf x, vf y)
{
    return (vf){_mm256_blendv_ps(y.lo, x.lo, _mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ)),
                _mm256_blendv_ps(y.hi, x.hi, _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ))};
}
static inline vf vf_select_le(vf a, vf b, vf x, vf y)
{
    return (vf){_mm256_blendv_ps(y.lo, x.lo, _mm256_cmp_ps(a.lo, b.lo, _CMP_LE_OQ)),
                _mm256_blendv_ps(y.hi, x.hi, _mm256_cmp_ps(a.hi, b.hi, _CMP_LE_OQ))};
}
static inline __m256 vf_pow2_half(__m256 t)
{
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_slli_epi32(_mm256_castps_si256(t), 23), _mm256_set1_epi32(0x3f800000)));
}
static inline vf vf_pow2(vf t) { return (vf){vf_pow2_half(t.lo), vf_pow2_half(t.hi)}; }
static inline float vf_hsum8(__m256 s8)
{
    __m128 s4 = _mm_add_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
    __m128 s2 = _mm_add_ps(s4, _mm_movehl_ps(s4, s4));
    return _mm_cvtss_f32(_mm_add_ss(s2, _mm_shuffle_ps(s2, s2, 1)));
}
static inline float vf_hsum(vf a) { return vf_hsum8(_mm256_add_ps(a.lo, a.hi)); }
/* Halves of two vectors are added, then quarters: half i of the result is of the vector i. */
static inline __m256 vf_add_quarters(vf a, vf b)
{
    const __m256 c = _mm256_add_ps(a.lo, a.hi), d = _mm256_add_ps(b.lo, b.hi);
    return _mm256_add_ps(_mm256_permute2f128_ps(c, d, 0x20), _mm256_permute2f128_ps(c, d, 0x31));
}
static inline __m256 vf_add_pairs(__m256 a, __m256 b) /* of each half, first of a and then of b */
{
    const __m256d c = _mm256_castps_pd(a), d = _mm256_castps_pd(b);
    return _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(c, d)), _mm256_castpd_ps(_mm256_unpackhi_pd(c, d)));
}
static inline __m256 vf_hsums8(const vf v[8])
{
    const __m256 a = vf_add_pairs(vf_add_quarters(v[0], v[4]), vf_add_quarters(v[1], v[5]));
    const __m256 b = vf_add_pairs(vf_add_quarters(v[2], v[6]), vf_add_quarters(v[3], v[7]));
    return _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x88), _mm256_shuffle_ps(a, b, 0xdd));
}
static inline vf vf_hsums(const vf v[16]) { return (vf){vf_hsums8(v), vf_hsums8(v + 8)}; }
static inline void vf_fence(void) { _mm_sfence(); }

static inline vf vf_load_f32(const float *p) { return (vf){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void vf_store_f32(float *p, vf v) { _mm256_storeu_ps(p, v.lo); _mm256_storeu_ps(p + 8, v.hi); }
static inline void vf_stream_f32(float *p, vf v) { _mm256_stream_ps(p, v.lo); _mm256_stream_ps(p + 8, v.hi); }
static inline __m256i vf_mask8(ptrdiff_t n) /* lanes below n */
{
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n < 8 ? (int)n : 8), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
static inline vf vf_load_part_f32(const float *p, size_t n, vf fill)
{
    const __m256i lo = vf_mask8((ptrdiff_t)n), hi = vf_mask8((ptrdiff_t)n - 8);
    return (vf){_mm256_blendv_ps(fill.lo, _mm256_maskload_ps(p, lo), _mm256_castsi256_ps(lo)),
                _mm256_blendv_ps(fill.hi, _mm256_maskload_ps(p + 8, hi), _mm256_castsi256_ps(hi))};
}
/* Halves, quarters: a masked store is many instructions inside (Zen: 42). */
VF_CALLED void vf_store_first(float *p, __m256 lo, __m256 hi, size_t n)
{
    if (n & 8) {
        _mm256_storeu_ps(p, lo);
        p += 8;
        lo = hi;
    }
    __m128 left = _mm256_castps256_ps128(lo);
    if (n & 4) {
        _mm_storeu_ps(p, left);
        p += 4;
        left = _mm256_extractf128_ps(lo, 1);
    }
    if (n & 2) {
        _mm_storel_pi((__m64 *)(void *)p, left);
        p += 2;
        left = _mm_movehl_ps(left, left);
    }
    if (n & 1)
        _mm_store_ss(p, left);
}
static inline void vf_store_part_f32(float *p, vf v, size_t n) { vf_store_first(p, v.lo, v.hi, n); }

static inline __m256 vf_widen_bf16(__m128i h) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16)); }
static inline __m256i vf_round_bf16(__m256 f) /* the bf16 in the low half of each 32 bits; of no NaN */
{
    const __m256i u = _mm256_castps_si256(f), odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    return _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd), 16);
}
VF_CALLED __m256i vf_round_nan_bf16(__m256 f) /* of any value */
{
    const __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(_mm256_castps_si256(f), 16), _mm256_set1_epi32(0x40));
    return _mm256_blendv_epi8(vf_round_bf16(f), quiet, _mm256_castps_si256(_mm256_cmp_ps(f, f, _CMP_UNORD_Q)));
}
static inline __m256i vf_narrow_bf16(vf v)
{
    __m256i lo = vf_round_bf16(v.lo), hi = vf_round_bf16(v.hi);
    if (__builtin_expect(_mm256_movemask_ps(_mm256_cmp_ps(v.lo, v.hi, _CMP_UNORD_Q)) != 0, 0)) {
        lo = vf_round_nan_bf16(v.lo);
        hi = vf_round_nan_bf16(v.hi);
    }
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(lo, hi), 0xd8);
}
static inline vf vf_load_bf16(const uint16_t *p)
{
    return (vf){vf_widen_bf16(_mm_loadu_si128((const __m128i *)p)), vf_widen_bf16(_mm_loadu_si128((const __m128i *)(p + 8)))};
}
static inline void vf_store_bf16(uint16_t *p, vf v) { _mm256_storeu_si256((__m256i *)p, vf_narrow_bf16(v)); }
static inline void vf_stream_bf16(uint16_t *p, vf v) { _mm256_stream_si256((__m256i *)p, vf_narrow_bf16(v)); }

static inline __m256i vf_narrow_f16(vf v)
{
    return _mm256_set_m128i(_mm256_cvtps_ph(v.hi, _MM_FROUND_TO_NEAREST_INT), _mm256_cvtps_ph(v.lo, _MM_FROUND_TO_NEAREST_INT));
}
static inline vf vf_load_f16(const uint16_t *p)
{
    return (vf){_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 8)))};
}
static inline void vf_store_f16(uint16_t *p, vf v) { _mm256_storeu_si256((__m256i *)p, vf_narrow_f16(v)); }
static inline void vf_stream_f16(uint16_t *p, vf v) { _mm256_stream_si256((__m256i *)p, vf_narrow_f16(v)); }

/* The first n of 16 values of 16 bits, n > 0, others 0: pairs by mask, and the last one by itself. */
VF_CALLED __m256i vf_load_part_16(const uint16_t *p, size_t n)
{
    const __m256i lanes = _mm256_setr_epi16(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m256i pairs = _mm256_maskload_epi32((const int *)(const void *)p, vf_mask8((ptrdiff_t)(n / 2)));
    const __m256i is_last = _mm256_cmpeq_epi16(lanes, _mm256_set1_epi16((short)(n - 1)));
    return _mm256_blendv_epi8(pairs, _mm256_set1_epi16((short)p[n - 1]), is_last);
}
VF_CALLED void vf_store_part_16(uint16_t *p, __m256i v, size_t n)
{
    __m128i left = _mm256_castsi256_si128(v);
    if (n & 8) {
        _mm_storeu_si128((__m128i *)(void *)p, left);
        p += 8;
        left = _mm256_extracti128_si256(v, 1);
    }
    if (n & 4) {
        _mm_storel_epi64((__m128i *)(void *)p, left);
        p += 4;
        left = _mm_unpackhi_epi64(left, left);
    }
    if (n & 2) {
        const int pair = _mm_cvtsi128_si32(left);
        memcpy(p, &pair, 4);
        p += 2;
        left = _mm_srli_si128(left, 4);
    }
    if (n & 1)
        *p = (uint16_t)_mm_extract_epi16(left, 0);
}
static inline vf vf_fill(vf v, size_t n, vf fill)
{
    const __m256i lo = vf_mask8((ptrdiff_t)n), hi = vf_mask8((ptrdiff_t)n - 8);
    return (vf){_mm256_blendv_ps(fill.lo, v.lo, _mm256_castsi256_ps(lo)), _mm256_blendv_ps(fill.hi, v.hi, _mm256_castsi256_ps(hi))};
}
static inline vf vf_load_part_bf16(const uint16_t *p, size_t n, vf fill)
{
    const __m256i v = vf_load_part_16(p, n);
    return vf_fill((vf){vf_widen_bf16(_mm256_castsi256_si128(v)), vf_widen_bf16(_mm256_extracti128_si256(v, 1))}, n, fill);
}
static inline void vf_store_part_bf16(uint16_t *p, vf v, size_t n) { vf_store_part_16(p, vf_narrow_bf16(v), n); }
static inline vf vf_load_part_f16(const uint16_t *p, size_t n, vf fill)
{
    const __m256i v = vf_load_part_16(p, n);
    return vf_fill((vf){_mm256_cvtph_ps(_mm256_castsi256_si128(v)), _mm256_cvtph_ps(_mm256_extracti128_si256(v, 1))}, n, fill);
}
static inline void vf_store_part_f16(uint16_t *p, vf v, size_t n) { vf_store_part_16(p, vf_narrow_f16(v), n); }

static inline vd vd_set1(double a) { __m256d r = _mm256_set1_pd(a); return (vd){r, r}; }
static inline vd vd_add(vd a, vd b) { return (vd){_mm256_add_pd(a.lo, b.lo), _mm256_add_pd(a.hi, b.hi)}; }
static inline vd vd_sub(vd a, vd b) { return (vd){_mm256_sub_pd(a.lo, b.lo), _mm256_sub_pd(a.hi, b.hi)}; }
static inline vd vd_mul(vd a, vd b) { return (vd){_mm256_mul_pd(a.lo, b.lo), _mm256_mul_pd(a.hi, b.hi)}; }
static inline vd vd_fma(vd a, vd b, vd c) { return (vd){_mm256_fmadd_pd(a.lo, b.lo, c.lo), _mm256_fmadd_pd(a.hi, b.hi, c.hi)}; }
static inline vd vd_sqrt(vd a) { return (vd){_mm256_sqrt_pd(a.lo), _mm256_sqrt_pd(a.hi)}; }
static inline vd vd_div(vd a, vd b) { return (vd){_mm256_div_pd(a.lo, b.lo), _mm256_div_pd(a.hi, b.hi)}; }
static inline vd vd_max(vd a, vd b) { return (vd){_mm256_max_pd(a.lo, b.lo), _mm256_max_pd(a.hi, b.hi)}; }
static inline vd vd_min(vd a, vd b) { return (vd){_mm256_min_pd(a.lo, b.lo), _mm256_min_pd(a.hi, b.hi)}; }
static inline vd vd_neg(vd a) { __m256d m = _mm256_set1_pd(-0.0); return (vd){_mm256_xor_pd(a.lo, m), _mm256_xor_pd(a.hi, m)}; }
static inline vd vd_abs(vd a) { __m256d m = _mm256_set1_pd(-0.0); return (vd){_mm256_andnot_pd(m, a.lo), _mm256_andnot_pd(m, a.hi)}; }
static inline vd vd_select_le(vd a, vd b, vd x, vd y)
{
    return (vd){_mm256_blendv_pd(y.lo, x.lo, _mm256_cmp_pd(a.lo, b.lo, _CMP_LE_OQ)),
                _mm256_blendv_pd(y.hi, x.hi, _mm256_cmp_pd(a.hi, b.hi, _CMP_LE_OQ))};
}
static inline __m256d vd_pow2_4(__m256d t)
{
    const __m256i exponent = _mm256_slli_epi64(_mm256_castpd_si256(t), 52);
    return _mm256_castsi256_pd(_mm256_add_epi64(exponent, _mm256_set1_epi64x(0x3ff0000000000000)));
}
static inline vd vd_pow2(vd t) { return (vd){vd_pow2_4(t.lo), vd_pow2_4(t.hi)}; }
static inline double vd_hsum4(__m256d s4)
{
    __m128d s2 = _mm_add_pd(_mm256_castpd256_pd128(s4), _mm256_extractf128_pd(s4, 1));
    return _mm_cvtsd_f64(_mm_add_sd(s2, _mm_unpackhi_pd(s2, s2)));
}
static inline double vd_hsum(vd a) { return vd_hsum4(_mm256_add_pd(a.lo, a.hi)); }
static inline vd vd_from_f32(const float *p) { return (vd){_mm256_cvtps_pd(_mm_loadu_ps(p)), _mm256_cvtps_pd(_mm_loadu_ps(p + 4))}; }
static inline void vd_to_f32(float *p, vd v) { _mm_storeu_ps(p, _mm256_cvtpd_ps(v.lo)); _mm_storeu_ps(p + 4, _mm256_cvtpd_ps(v.hi)); }
static inline vd vd_select_lt(vd a, vd b, vd x, vd y)
{
    return (vd){_mm256_blendv_pd(y.lo, x.lo, _mm256_cmp_pd(a.lo, b.lo, _CMP_LT_OQ)),
                _mm256_blendv_pd(y.hi, x.hi, _mm256_cmp_pd(a.hi, b.hi, _CMP_LT_OQ))};
}
static inline vd vd_load_f64(const double *p) { return (vd){_mm256_loadu_pd(p), _mm256_loadu_pd(p + 4)}; }
static inline void vd_store_f64(double *p, vd v) { _mm256_storeu_pd(p, v.lo); _mm256_storeu_pd(p + 4, v.hi); }
static inline void vd_stream_f64(double *p, vd v) { _mm256_stream_pd(p, v.lo); _mm256_stream_pd(p + 4, v.hi); }
static inline vf vd_as_floats(vd v) { return (vf){_mm256_castpd_ps(v.lo), _mm256_castpd_ps(v.hi)}; }
static inline vd vd_load_part_f64(const double *p, size_t n, vd fill) /* as twice as many floats */
{
    const vf v = vf_load_part_f32((const float *)(const void *)p, 2 * n, vd_as_floats(fill));
    return (vd){_mm256_castps_pd(v.lo), _mm256_castps_pd(v.hi)};
}
static inline void vd_store_part_f64(double *p, vd v, size_t n) { vf_store_part_f32((float *)(void *)p, vd_as_floats(v), 2 * n); }

#endif
