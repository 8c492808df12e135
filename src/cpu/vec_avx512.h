/* SPDX-License-Identifier: MIT
 *
 * vec_avx512.h - the vector layer (contract: vec_scalar.h) on AVX-512 F, BW, DQ and VL, and BF16 where the including file
 * is compiled for it: one register each. */
#ifndef NORMFUSE_VEC_AVX512_H
#define NORMFUSE_VEC_AVX512_H

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

#include "cpu/convert.h"

#if defined(__AVX512BF16__)
enum { VF_HAS_MASKS = 1, VF_ROUNDS_BF16 = 0 };
#else
enum { VF_HAS_MASKS = 1, VF_ROUNDS_BF16 = 1 };
#endif

typedef __m512 vf;
typedef __m512d vd;

static inline vf vf_set1(float a) { return _mm512_set1_ps(a); }
static inline vf vf_add(vf a, vf b) { return _mm512_add_ps(a, b); }
static inline vf vf_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
static inline vf vf_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
static inline vf vf_div(vf a, vf b) { return _mm512_div_ps(a, b); }
static inline vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
static inline vf vf_max(vf a, vf b) { return _mm512_max_ps(a, b); }
static inline vf vf_min(vf a, vf b) { return _mm512_min_ps(a, b); }
static inline vf vf_neg(vf a) { return _mm512_xor_ps(a, _mm512_set1_ps(-0.0f)); }
static inline vf vf_abs(vf a) { return _mm512_andnot_ps(_mm512_set1_ps(-0.0f), a); }
static inline vf vf_select_lt(vf a, vf b, vf x, vf y) { return _mm512_mask_mov_ps(y, _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), x); }
static inline vf vf_select_le(vf a, vf b, vf x, vf y) { return _mm512_mask_mov_ps(y, _mm512_cmp_ps_mask(a, b, _CMP_LE_OQ), x); }
static inline vf vf_pow2(vf t)
{
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_slli_epi32(_mm512_castps_si512(t), 23), _mm512_set1_epi32(0x3f800000)));
}
static inline float vf_hsum(vf a)
{
    __m256 s8 = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 s4 = _mm_add_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
    __m128 s2 = _mm_add_ps(s4, _mm_movehl_ps(s4, s4));
    return _mm_cvtss_f32(_mm_add_ss(s2, _mm_shuffle_ps(s2, s2, 1)));
}
/* Halves of four vectors are added, then quarters: quarter i of the result is of the vector i. */
static inline vf vf_add_quarters(vf a, vf b, vf c, vf d)
{
    const vf ab = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    const vf cd = _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xee));
    return _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
}
static inline vf vf_add_pairs(vf a, vf b) /* of each quarter, first of a and then of b */
{
    const __m512d c = _mm512_castps_pd(a), d = _mm512_castps_pd(b);
    return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(c, d)), _mm512_castpd_ps(_mm512_unpackhi_pd(c, d)));
}
static inline vf vf_hsums(const vf v[16])
{
    const vf a = vf_add_pairs(vf_add_quarters(v[0], v[4], v[8], v[12]), vf_add_quarters(v[1], v[5], v[9], v[13]));
    const vf b = vf_add_pairs(vf_add_quarters(v[2], v[6], v[10], v[14]), vf_add_quarters(v[3], v[7], v[11], v[15]));
    return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd));
}
static inline void vf_fence(void) { _mm_sfence(); }

static inline __mmask16 vf_first(size_t n) { return (__mmask16)((1u << n) - 1u); }
static inline vf vf_load_f32(const float *p) { return _mm512_loadu_ps(p); }
static inline void vf_store_f32(float *p, vf v) { _mm512_storeu_ps(p, v); }
static inline void vf_stream_f32(float *p, vf v) { _mm512_stream_ps(p, v); }
static inline vf vf_load_part_f32(const float *p, size_t n, vf fill) { return _mm512_mask_loadu_ps(fill, vf_first(n), p); }
static inline void vf_store_part_f32(float *p, vf v, size_t n) { _mm512_mask_storeu_ps(p, vf_first(n), v); }

static inline vf vf_widen_bf16(__m256i h) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16)); }
static inline __m256i vf_narrow_bf16(vf f)
{
#if defined(__AVX512BF16__)
    /* The instruction takes subnormals for 0; without one in the vector its bits are ours. */
    if (__builtin_expect(_mm512_fpclass_ps_mask(f, 0x20) == 0, 1))
        return (__m256i)_mm512_cvtneps_pbh(f);
#endif
    __m512i u = _mm512_castps_si512(f), upper = _mm512_srli_epi32(u, 16);
    __m512i odd = _mm512_and_si512(upper, _mm512_set1_epi32(1));
    __m512i r = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd), 16);
    r = _mm512_mask_or_epi32(r, _mm512_cmp_ps_mask(f, f, _CMP_UNORD_Q), upper, _mm512_set1_epi32(0x40));
    return _mm512_cvtepi32_epi16(r);
}
static inline vf vf_load_bf16(const uint16_t *p) { return vf_widen_bf16(_mm256_loadu_si256((const __m256i *)p)); }
static inline void vf_store_bf16(uint16_t *p, vf v) { _mm256_storeu_si256((__m256i *)p, vf_narrow_bf16(v)); }
static inline void vf_stream_bf16(uint16_t *p, vf v) { _mm256_stream_si256((__m256i *)p, vf_narrow_bf16(v)); }
static inline vf vf_load_part_bf16(const uint16_t *p, size_t n, vf fill)
{
    return _mm512_mask_mov_ps(fill, vf_first(n), vf_widen_bf16(_mm256_maskz_loadu_epi16(vf_first(n), p)));
}
static inline void vf_store_part_bf16(uint16_t *p, vf v, size_t n) { _mm256_mask_storeu_epi16(p, vf_first(n), vf_narrow_bf16(v)); }

static inline __m256i vf_narrow_f16(vf f) { return _mm512_cvtps_ph(f, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
static inline vf vf_load_f16(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
static inline void vf_store_f16(uint16_t *p, vf v) { _mm256_storeu_si256((__m256i *)p, vf_narrow_f16(v)); }
static inline void vf_stream_f16(uint16_t *p, vf v) { _mm256_stream_si256((__m256i *)p, vf_narrow_f16(v)); }
static inline vf vf_load_part_f16(const uint16_t *p, size_t n, vf fill)
{
    return _mm512_mask_mov_ps(fill, vf_first(n), _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(vf_first(n), p)));
}
static inline void vf_store_part_f16(uint16_t *p, vf v, size_t n) { _mm256_mask_storeu_epi16(p, vf_first(n), vf_narrow_f16(v)); }

static inline vd vd_set1(double a) { return _mm512_set1_pd(a); }
static inline vd vd_add(vd a, vd b) { return _mm512_add_pd(a, b); }
static inline vd vd_sub(vd a, vd b) { return _mm512_sub_pd(a, b); }
static inline vd vd_mul(vd a, vd b) { return _mm512_mul_pd(a, b); }
static inline vd vd_fma(vd a, vd b, vd c) { return _mm512_fmadd_pd(a, b, c); }
static inline vd vd_sqrt(vd a) { return _mm512_sqrt_pd(a); }
static inline vd vd_div(vd a, vd b) { return _mm512_div_pd(a, b); }
static inline vd vd_max(vd a, vd b) { return _mm512_max_pd(a, b); }
static inline vd vd_min(vd a, vd b) { return _mm512_min_pd(a, b); }
static inline vd vd_neg(vd a) { return _mm512_xor_pd(a, _mm512_set1_pd(-0.0)); }
static inline vd vd_abs(vd a) { return _mm512_andnot_pd(_mm512_set1_pd(-0.0), a); }
static inline vd vd_select_le(vd a, vd b, vd x, vd y) { return _mm512_mask_mov_pd(y, _mm512_cmp_pd_mask(a, b, _CMP_LE_OQ), x); }
static inline vd vd_pow2(vd t)
{
    return _mm512_castsi512_pd(_mm512_add_epi64(_mm512_slli_epi64(_mm512_castpd_si512(t), 52), _mm512_set1_epi64(0x3ff0000000000000)));
}
static inline double vd_hsum(vd a)
{
    __m256d s4 = _mm256_add_pd(_mm512_castpd512_pd256(a), _mm512_extractf64x4_pd(a, 1));
    __m128d s2 = _mm_add_pd(_mm256_castpd256_pd128(s4), _mm256_extractf128_pd(s4, 1));
    return _mm_cvtsd_f64(_mm_add_sd(s2, _mm_unpackhi_pd(s2, s2)));
}
static inline vd vd_from_f32(const float *p) { return _mm512_cvtps_pd(_mm256_loadu_ps(p)); }
static inline void vd_to_f32(float *p, vd v) { _mm256_storeu_ps(p, _mm512_cvtpd_ps(v)); }
static inline vd vd_select_lt(vd a, vd b, vd x, vd y) { return _mm512_mask_mov_pd(y, _mm512_cmp_pd_mask(a, b, _CMP_LT_OQ), x); }
static inline __mmask8 vd_first(size_t n) { return (__mmask8)((1u << n) - 1u); }
static inline vd vd_load_f64(const double *p) { return _mm512_loadu_pd(p); }
static inline void vd_store_f64(double *p, vd v) { _mm512_storeu_pd(p, v); }
static inline void vd_stream_f64(double *p, vd v) { _mm512_stream_pd(p, v); }
static inline vd vd_load_part_f64(const double *p, size_t n, vd fill) { return _mm512_mask_loadu_pd(fill, vd_first(n), p); }
static inline void vd_store_part_f64(double *p, vd v, size_t n) { _mm512_mask_storeu_pd(p, vd_first(n), v); }

#endif
