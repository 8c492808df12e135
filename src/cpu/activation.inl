/* SPDX-License-Identifier: MIT
 *
 * activation.inl - the activations and their derivatives on vf, written once for every instruction set. Included after a
 * vec_<isa>.h. Bounds: docs/numerics.md, "activations". Polynomials are minimax fits of our own (Lawson's iteration on
 * Chebyshev nodes, then rounded to f32). */

/* Called, with vectors of two registers in memory, gelu takes twice as long (AVX2). Plain C stays small. */
#if defined(NORMFUSE_NO_INLINE_FORMS)
#define FORMULA static inline
#else
#define FORMULA static inline __attribute__((always_inline))
#endif

/* e^z for z <= 88, within 1 ulp; 0 below -87.68 (the result would be subnormal). NaN gives NaN.
 * e^z = 2^n * e^r, |r| <= ln2/2: e^r = 1 + r + r^2*P(r), |error of P| < 0.06 * 2^-24. */
FORMULA vf vf_exp_parts(vf z, vf *scale) /* e^r - 1 and 2^n */
{
    const vf magic = vf_set1(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    z = vf_max(vf_set1(-88.0f), z);
    const vf t = vf_fma(z, vf_set1(0x1.715476p+0f), magic);
    const vf n = vf_sub(t, magic);
    vf r = vf_fma(n, vf_set1(-0x1.62e400p-1f), z); /* ln2 in two parts, the first with zeros at its end */
    r = vf_fma(n, vf_set1(-0x1.7f7d1cp-20f), r);
    vf p = vf_fma(r, vf_set1(0x1.6a21aap-10f), vf_set1(0x1.123b6cp-7f));
    p = vf_fma(p, r, vf_set1(0x1.5558fcp-5f));
    p = vf_fma(p, r, vf_set1(0x1.555490p-3f));
    p = vf_fma(p, r, vf_set1(0x1.fffffcp-2f));
    *scale = vf_pow2(t);
    return vf_fma(vf_mul(r, r), p, r);
}

FORMULA vf vf_exp(vf z)
{
    vf scale;
    const vf m = vf_exp_parts(z, &scale);
    return vf_fma(m, scale, scale);
}

FORMULA vf vf_expm1(vf z)
{
    vf scale;
    const vf m = vf_exp_parts(z, &scale);
    return vf_fma(m, scale, vf_sub(scale, vf_set1(1.0f)));
}

/* 1 + e^-z for silu and gelu_tanh, where z/(1 + e^-z) is cheaper than a sigmoid that serves both signs (6.4 against 8.2 ns
 * for 16 values and their bf16 stores on Zen 4). Past 88.4 e^-z is infinite, the quotient 0; *e is e^-z. */
FORMULA vf vf_silu_divisor(vf z, vf *e)
{
    const vf magic = vf_set1(12582912.0f);
    const vf clamped = vf_min(vf_set1(88.0f), vf_max(vf_set1(-89.0f), z));
    const vf t = vf_fma(clamped, vf_set1(-0x1.715476p+0f), magic);
    const vf n = vf_sub(t, magic);
    vf r = vf_fma(n, vf_set1(0x1.62e400p-1f), clamped); /* -r of e^-z = 2^n * e^r */
    r = vf_fma(n, vf_set1(0x1.7f7d1cp-20f), r);
    vf p = vf_fma(r, vf_set1(0x1.6a21aap-10f), vf_set1(-0x1.123b6cp-7f));
    p = vf_fma(p, r, vf_set1(0x1.5558fcp-5f));
    p = vf_fma(p, r, vf_set1(-0x1.555490p-3f));
    p = vf_fma(p, r, vf_set1(0x1.fffffcp-2f));
    p = vf_fma(p, r, vf_set1(-1.0f));
    p = vf_fma(p, r, vf_set1(1.0f));
    *e = vf_mul(p, vf_pow2(t)); /* not by fma: 2^128 is inf, and p - 1 may be negative */
    return vf_add(vf_set1(1.0f), *e);
}

/* Phi(z), the normal distribution, with a small relative error in both tails, and *density = e^(-z^2/2).
 * Phi(-x) = e^(-x^2/2) * t*P(t), t = 1/(1 + 0.35*x), x >= 0: relative error of t*P(t) below 2.3 * 2^-24. The rounding
 * of z^2 is carried along, or it would cost x^2/2 ulp. */
FORMULA vf vf_phi(vf z, vf *density)
{
    const vf x = vf_abs(z), half = vf_set1(-0.5f);
    const vf square = vf_mul(x, x), rest = vf_fma(x, x, vf_neg(square));
    const vf e0 = vf_exp(vf_mul(half, square));
    /* past 88 e0 is 0 and rest may be inf - inf */
    const vf e = vf_select_lt(x, vf_set1(14.0f), vf_fma(vf_mul(half, rest), e0, e0), e0);
    const vf t = vf_div(vf_set1(1.0f), vf_fma(x, vf_set1(0.35f), vf_set1(1.0f)));
    vf p = vf_fma(t, vf_set1(-0x1.dd8614p-6f), vf_set1(0x1.26da32p-3f));
    p = vf_fma(p, t, vf_set1(-0x1.05d990p-2f));
    p = vf_fma(p, t, vf_set1(0x1.45fc58p-3f));
    p = vf_fma(p, t, vf_set1(-0x1.7a9e22p-6f));
    p = vf_fma(p, t, vf_set1(0x1.b028dcp-4f));
    p = vf_fma(p, t, vf_set1(0x1.ead5eep-4f));
    p = vf_fma(p, t, vf_set1(0x1.1e6fe6p-3f));
    p = vf_fma(p, t, vf_set1(0x1.1df1d4p-3f));
    const vf tail = vf_mul(vf_mul(p, t), e);
    *density = e;
    return vf_select_lt(z, vf_set1(0.0f), tail, vf_sub(vf_set1(1.0f), tail));
}

/* 2u of gelu_tanh = z*sigmoid(2u), u = sqrt(2/pi)*(z + 0.044715*z^3), since (1 + tanh(u))/2 = sigmoid(2u). */
static inline vf vf_gelu_tanh_argument(vf z)
{
    const vf cubic = vf_mul(vf_mul(z, z), vf_set1(0.0713548162726f)); /* 2*sqrt(2/pi)*0.044715 */
    return vf_mul(z, vf_add(cubic, vf_set1(1.5957691216057f)));      /* 2*sqrt(2/pi) */
}

/* mish = z*tanh(log(1 + e^z)) = z*w/(w + 2), w = e^z*(e^z + 2); past 20 the quotient is 1 in f32. */
FORMULA vf vf_mish_exp(vf z)
{
    return vf_exp(vf_min(vf_set1(20.0f), z));
}

FORMULA vf vf_activation(int32_t activation, vf param, vf z)
{
    const vf zero = vf_set1(0.0f), one = vf_set1(1.0f);
    vf other;
    switch (activation) {
    case NORMFUSE_RELU: return vf_select_lt(z, zero, zero, z);
    case NORMFUSE_LEAKY_RELU: return vf_select_le(z, zero, vf_mul(z, param), z);
    case NORMFUSE_RELU6: return vf_select_lt(z, zero, zero, vf_select_lt(vf_set1(6.0f), z, vf_set1(6.0f), z));
    case NORMFUSE_SILU: return vf_div(z, vf_silu_divisor(z, &other));
    case NORMFUSE_GELU: return vf_mul(z, vf_phi(z, &other));
    case NORMFUSE_GELU_TANH: return vf_div(z, vf_silu_divisor(vf_gelu_tanh_argument(z), &other));
    case NORMFUSE_HARDSWISH: {
        vf gate = vf_fma(z, vf_set1(1.0f / 6.0f), vf_set1(0.5f));
        gate = vf_select_lt(gate, zero, zero, gate);
        gate = vf_select_lt(one, gate, one, gate);
        return vf_mul(z, gate);
    }
    case NORMFUSE_ELU: return vf_select_le(z, zero, vf_mul(param, vf_expm1(z)), z);
    case NORMFUSE_MISH: {
        const vf e = vf_mish_exp(z), w = vf_mul(e, vf_add(e, vf_set1(2.0f)));
        return vf_mul(z, vf_div(w, vf_add(w, vf_set1(2.0f))));
    }
    default: return z;
    }
}

/* dy*act'(z). Derivatives at kinks are PyTorch's: relu'(0) = relu6'(0) = relu6'(6) = 0, leaky_relu'(0) = slope,
 * elu'(0) = alpha. */
FORMULA vf vf_activation_gradient(int32_t activation, vf param, vf dy, vf z)
{
    const vf zero = vf_set1(0.0f), one = vf_set1(1.0f);
    vf other;
    switch (activation) {
    case NORMFUSE_RELU: return vf_select_le(z, zero, zero, dy);
    case NORMFUSE_LEAKY_RELU: return vf_select_le(z, zero, vf_mul(dy, param), dy);
    case NORMFUSE_RELU6: return vf_select_le(z, zero, zero, vf_select_le(vf_set1(6.0f), z, zero, dy));
    case NORMFUSE_SILU: {
        /* s*(1 + z*(1 - s)), 1 - s = e*s, but 1 where e may be infinite */
        const vf s = vf_div(one, vf_silu_divisor(z, &other));
        const vf complement = vf_select_lt(vf_set1(-87.0f), z, vf_mul(other, s), one);
        return vf_mul(dy, vf_mul(s, vf_fma(z, complement, one)));
    }
    case NORMFUSE_GELU: {
        const vf phi = vf_phi(z, &other); /* Phi(z) + z*e^(-z^2/2)/sqrt(2*pi) */
        return vf_mul(dy, vf_fma(vf_mul(z, vf_set1(0.3989422804014f)), other, phi));
    }
    case NORMFUSE_GELU_TANH: {
        /* s + z*s*(1 - s)*(2u)', (2u)' = 2*sqrt(2/pi)*(1 + 3*0.044715*z^2). Far out s*(1 - s) is 0 and z^3 may be
         * infinite: there the second term is dropped, not 0*inf. */
        const vf s = vf_div(one, vf_silu_divisor(vf_gelu_tanh_argument(z), &other));
        const vf slope = vf_fma(vf_mul(z, z), vf_set1(0.2140644488178f), vf_set1(1.5957691216057f));
        const vf term = vf_mul(vf_mul(z, slope), vf_mul(s, vf_mul(other, s)));
        return vf_mul(dy, vf_add(s, vf_select_lt(vf_set1(20.0f), vf_abs(z), zero, term)));
    }
    case NORMFUSE_HARDSWISH: {
        const vf slope = vf_fma(z, vf_set1(1.0f / 3.0f), vf_set1(0.5f));
        const vf inner = vf_select_lt(z, vf_set1(3.0f), vf_mul(dy, slope), dy);
        return vf_select_le(z, vf_set1(-3.0f), zero, inner);
    }
    case NORMFUSE_ELU: return vf_select_le(z, zero, vf_mul(dy, vf_mul(param, vf_exp(z))), dy);
    case NORMFUSE_MISH: {
        /* t + z*t', t = w/(w + 2), t' = 4e(1 + e)/(w + 2)^2 */
        const vf e = vf_mish_exp(z), w = vf_mul(e, vf_add(e, vf_set1(2.0f)));
        const vf inverse = vf_div(one, vf_add(w, vf_set1(2.0f)));
        const vf slope = vf_mul(vf_mul(vf_mul(vf_set1(4.0f), e), vf_add(one, e)), vf_mul(inverse, inverse));
        return vf_mul(dy, vf_fma(z, vf_select_lt(vf_set1(20.0f), z, zero, slope), vf_mul(w, inverse)));
    }
    default: return dy;
    }
}

/* The same on n values in memory, a multiple of 16. The choice is made once, before the loop. */
#define FOR_EACH_ACTIVATION(CASE)                                                                                        \
    CASE(NORMFUSE_RELU) CASE(NORMFUSE_LEAKY_RELU) CASE(NORMFUSE_SILU) CASE(NORMFUSE_GELU) CASE(NORMFUSE_GELU_TANH)       \
    CASE(NORMFUSE_HARDSWISH) CASE(NORMFUSE_ELU) CASE(NORMFUSE_MISH) CASE(NORMFUSE_RELU6)

static __attribute__((noinline)) void vf_activate(int32_t activation, float parameter, float *z, size_t n)
{
    const vf param = vf_set1(parameter);
    switch (activation) {
#define CASE(name)                                                             \
    case name:                                                                 \
        for (size_t i = 0; i < n; i += 16)                                     \
            vf_store_f32(z + i, vf_activation(name, param, vf_load_f32(z + i))); \
        break;
        FOR_EACH_ACTIVATION(CASE)
#undef CASE
    default: break;
    }
}

static __attribute__((noinline)) void vf_activate_gradient(int32_t activation, float parameter, float *dy, const float *z, size_t n)
{
    const vf param = vf_set1(parameter);
    switch (activation) {
#define CASE(name)                                                                                              \
    case name:                                                                                                  \
        for (size_t i = 0; i < n; i += 16)                                                                      \
            vf_store_f32(dy + i, vf_activation_gradient(name, param, vf_load_f32(dy + i), vf_load_f32(z + i))); \
        break;
        FOR_EACH_ACTIVATION(CASE)
#undef CASE
    default: break;
    }
}

/* In double through libm, value by value: f64 is for exactness, not speed. */
static inline vd vd_activation(int32_t activation, vd param, vd z)
{
    (void)activation, (void)param;
    return z; /* f64 has no loops with an activation: all go through a stage */
}
static inline vd vd_activation_gradient(int32_t activation, vd param, vd dy, vd z)
{
    (void)activation, (void)param, (void)z;
    return dy;
}
static void vd_activate(int32_t activation, double parameter, double *z, size_t n)
{
    for (size_t i = 0; i < n; i++)
        z[i] = normfuse_activation_f64(activation, parameter, z[i]);
}
static void vd_activate_gradient(int32_t activation, double parameter, double *dy, const double *z, size_t n)
{
    for (size_t i = 0; i < n; i++)
        dy[i] = normfuse_activation_gradient_f64(activation, parameter, dy[i], z[i]);
}
