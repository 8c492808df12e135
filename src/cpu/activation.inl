/* SPDX-License-Identifier: MIT
 *
 * activation.inl - the activations and their derivatives on vectors, written once for every instruction set and both
 * compute types. Included after a vec_<isa>.h with R, V and OP as passes.inl has them, and OF_DOUBLE where R is double.
 * Bounds: docs/numerics.md, "activations". Polynomials in f32 are minimax fits of our own (Lawson's iteration on
 * Chebyshev nodes, then rounded to f32); in f64 e^r is Taylor's, of degree 13. */

/* Called, with vectors of two registers in memory, gelu takes twice as long (AVX2). Plain C stays small. */
#if defined(NORMFUSE_NO_INLINE_FORMS)
#define FORMULA static inline
#else
#define FORMULA static inline __attribute__((always_inline))
#endif
#define C(x) OP(set1)((R)(x))

/* ln2 in two parts, the first with zeros at its end. MAGIC + n has n in its low bits. Below EXP_LEAST e^z would be
 * subnormal and is 0; at SIGMOID_LEAST e^-z is infinite, and 1/(1 + e^-z) is normal above SIGMOID_FAR; tanh(log(1 + e^z))
 * is 1 from MISH_FAR on, and e^(-x^2/2) is 0 from GELU_FAR on. */
#if defined(OF_DOUBLE)
#define MAGIC 0x1.8p52
#define LOG2_E 0x1.71547652b82fep+0
#define LN2_HIGH 0x1.62e42fee00000p-1
#define LN2_LOW 0x1.a39ef35793c76p-33
#define EXP_LEAST (-709)
#define SIGMOID_LEAST (-710)
#define SIGMOID_MOST 708
#define SIGMOID_FAR (-707)
#define MISH_FAR 40
#define GELU_FAR 40
#else
#define MAGIC 0x1.8p23f
#define LOG2_E 0x1.715476p+0f
#define LN2_HIGH 0x1.62e400p-1f
#define LN2_LOW 0x1.7f7d1cp-20f
#define EXP_LEAST (-88)
#define SIGMOID_LEAST (-89)
#define SIGMOID_MOST 88
#define SIGMOID_FAR (-87)
#define MISH_FAR 20
#define GELU_FAR 13.25
#endif

/* P of e^r = 1 + r + r^2*P(r), |r| <= ln2/2; error of P in f32: below 0.06 * 2^-24, in f64 2^-58. */
FORMULA V OP(exp_polynomial)(V r)
{
#if defined(OF_DOUBLE)
    static const double inverse_factorials[] = {1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880,
                                                1.0 / 40320,     1.0 / 5040,     1.0 / 720,     1.0 / 120,
                                                1.0 / 24,        1.0 / 6,        1.0 / 2};
    V p = C(1.0 / 6227020800);
    for (size_t i = 0; i < sizeof inverse_factorials / sizeof *inverse_factorials; i++)
        p = OP(fma)(p, r, C(inverse_factorials[i]));
    return p;
#else
    V p = OP(fma)(r, C(0x1.6a21aap-10f), C(0x1.123b6cp-7f));
    p = OP(fma)(p, r, C(0x1.5558fcp-5f));
    p = OP(fma)(p, r, C(0x1.555490p-3f));
    return OP(fma)(p, r, C(0x1.fffffcp-2f));
#endif
}

/* e^z within 1 ulp for z <= -EXP_LEAST; 0 where the result would be subnormal. NaN gives NaN. e^z = 2^n * e^r. */
FORMULA V OP(exp_parts)(V z, V *scale) /* e^r - 1 and 2^n */
{
    z = OP(max)(C(EXP_LEAST), z);
    const V t = OP(fma)(z, C(LOG2_E), C(MAGIC)), n = OP(sub)(t, C(MAGIC));
    const V r = OP(fma)(n, C(-LN2_LOW), OP(fma)(n, C(-LN2_HIGH), z));
    *scale = OP(pow2)(t);
    return OP(fma)(OP(mul)(r, r), OP(exp_polynomial)(r), r);
}

FORMULA V OP(exp)(V z)
{
    V scale;
    const V m = OP(exp_parts)(z, &scale);
    return OP(fma)(m, scale, scale);
}

FORMULA V OP(expm1)(V z)
{
    V scale;
    const V m = OP(exp_parts)(z, &scale);
    return OP(fma)(m, scale, OP(sub)(scale, C(1)));
}

/* 1 + e^-z for silu and gelu_tanh, where z/(1 + e^-z) is cheaper than a sigmoid that serves both signs (6.4 against 8.2 ns
 * for 16 values and their bf16 stores on Zen 4). Where e^-z is infinite, the quotient is 0; *e is e^-z. */
FORMULA V OP(sigmoid_divisor)(V z, V *e)
{
    const V clamped = OP(min)(C(SIGMOID_MOST), OP(max)(C(SIGMOID_LEAST), z));
    const V t = OP(fma)(clamped, C(-LOG2_E), C(MAGIC)), n = OP(sub)(t, C(MAGIC));
    const V minus_r = OP(fma)(n, C(LN2_LOW), OP(fma)(n, C(LN2_HIGH), clamped)); /* of e^-z = 2^n * e^r */
#if defined(OF_DOUBLE)
    const V r = OP(neg)(minus_r), p = OP(add)(OP(fma)(OP(mul)(r, r), OP(exp_polynomial)(r), r), C(1));
#else
    V p = OP(fma)(minus_r, C(0x1.6a21aap-10f), C(-0x1.123b6cp-7f));
    p = OP(fma)(p, minus_r, C(0x1.5558fcp-5f));
    p = OP(fma)(p, minus_r, C(-0x1.555490p-3f));
    p = OP(fma)(p, minus_r, C(0x1.fffffcp-2f));
    p = OP(fma)(p, minus_r, C(-1));
    p = OP(fma)(p, minus_r, C(1));
#endif
    const V scale = OP(pow2)(t);
    *e = OP(mul)(p, scale); /* exact, or inf: p itself, since p - 1 may be negative */
    return OP(fma)(p, scale, C(1));
}

/* Phi(-x), 0 <= x <= GELU_FAR, of the normal distribution, with a small relative error, and *density = e^(-x^2/2). In f64 by
 * libm's erfc, value by value. In f32 it is e^(-x^2/2) * t*P(t), t = 1/(1 + 0.35*x): relative error of t*P(t) below
 * 2.3 * 2^-24. The rounding of x^2 is carried along, or it would cost x^2/2 ulp: -x^2 = square - rest. */
#if defined(OF_DOUBLE)
static __attribute__((noinline)) V OP(phi_tail)(V x, V *density)
{
    double lanes[sizeof(V) / sizeof(double)], densities[sizeof(V) / sizeof(double)];
    OP(store_f64)(lanes, x);
    for (size_t i = 0; i < sizeof(V) / sizeof(double); i++) {
        densities[i] = exp(-0.5 * lanes[i] * lanes[i]);
        lanes[i] = 0.5 * erfc(lanes[i] * 0.70710678118654752440);
    }
    *density = OP(load_f64)(densities);
    return OP(load_f64)(lanes);
}
#else
FORMULA V OP(phi_tail)(V x, V *density)
{
    const V square = OP(mul)(x, OP(neg)(x)), rest = OP(fma)(x, x, square);
    const V scale = OP(fma)(square, C(0.5f * LOG2_E), C(MAGIC)), n = OP(sub)(scale, C(MAGIC));
    const V r = OP(sub)(OP(fma)(n, C(-2 * LN2_LOW), OP(fma)(n, C(-2 * LN2_HIGH), square)), rest);
    V e = OP(fma)(r, C(0x1.6a21aap-16f), C(0x1.123b6cp-12f)); /* exp_polynomial of r/2 */
    e = OP(fma)(e, r, C(0x1.5558fcp-9f));
    e = OP(fma)(e, r, C(0x1.555490p-6f));
    e = OP(fma)(e, r, C(0x1.fffffcp-4f));
    e = OP(fma)(e, r, C(0.5));
    e = OP(mul)(OP(fma)(e, r, C(1.0)), OP(pow2)(scale));
    const V t = OP(div)(C(1.0), OP(fma)(x, C(0.35), C(1.0)));
    V p = OP(fma)(t, C(-0x1.dd8614p-6f), C(0x1.26da32p-3f));
    p = OP(fma)(p, t, C(-0x1.05d990p-2f));
    p = OP(fma)(p, t, C(0x1.45fc58p-3f));
    p = OP(fma)(p, t, C(-0x1.7a9e22p-6f));
    p = OP(fma)(p, t, C(0x1.b028dcp-4f));
    p = OP(fma)(p, t, C(0x1.ead5eep-4f));
    p = OP(fma)(p, t, C(0x1.1e6fe6p-3f));
    p = OP(fma)(p, t, C(0x1.1df1d4p-3f));
    *density = e;
    return OP(mul)(OP(mul)(p, t), e);
}
#endif

/* 2u of gelu_tanh = z*sigmoid(2u), u = sqrt(2/pi)*(z + 0.044715*z^3), since (1 + tanh(u))/2 = sigmoid(2u). */
FORMULA V OP(gelu_tanh_argument)(V z)
{
    const V cubic = OP(mul)(OP(mul)(z, z), C(0.07135481627260024877)); /* 2*sqrt(2/pi)*0.044715 */
    return OP(mul)(z, OP(add)(cubic, C(1.59576912160573071176)));      /* 2*sqrt(2/pi) */
}

/* mish = z*tanh(log(1 + e^z)) = z*w/(w + 2), w = e^z*(e^z + 2); far out the quotient is 1. */
FORMULA V OP(mish_exp)(V z)
{
    return OP(exp)(OP(min)(C(MISH_FAR), z));
}

FORMULA V OP(activation)(int32_t activation, V param, V z)
{
    const V zero = C(0.0), one = C(1.0);
    V other;
    switch (activation) {
    case NORMFUSE_RELU: return OP(max)(zero, z);
    case NORMFUSE_LEAKY_RELU:
    case NORMFUSE_PRELU: return OP(select_le)(z, zero, OP(mul)(z, param), z);
    case NORMFUSE_RELU6: return OP(max)(zero, OP(min)(C(6.0), z));
    case NORMFUSE_SILU: return OP(div)(z, OP(sigmoid_divisor)(z, &other));
    case NORMFUSE_GELU: { /* z*Phi(z) = max(0, z) - x*Phi(-x) */
        const V x = OP(min)(C(GELU_FAR), OP(abs)(z));
        return OP(fma)(OP(neg)(x), OP(phi_tail)(x, &other), OP(max)(zero, z));
    }
    case NORMFUSE_GELU_TANH: return OP(div)(z, OP(sigmoid_divisor)(OP(gelu_tanh_argument)(z), &other));
    case NORMFUSE_HARDSWISH: {
        const V gate = OP(max)(zero, OP(fma)(z, C(1.0 / 6.0), C(0.5)));
        return OP(mul)(z, OP(min)(one, gate));
    }
    case NORMFUSE_ELU: return OP(select_le)(z, zero, OP(mul)(param, OP(expm1)(z)), z);
    case NORMFUSE_MISH: {
        const V e = OP(mish_exp)(z), w = OP(mul)(e, OP(add)(e, C(2.0)));
        return OP(mul)(z, OP(div)(w, OP(add)(w, C(2.0))));
    }
    default: return z;
    }
}

/* dy*act'(z). Derivatives at kinks are PyTorch's: relu'(0) = relu6'(0) = relu6'(6) = 0, leaky_relu'(0) = prelu'(0) = slope,
 * elu'(0) = alpha. What they are at NaN stands in activations.def. */
FORMULA V OP(activation_gradient)(int32_t activation, V param, V dy, V z)
{
    const V zero = C(0.0), one = C(1.0);
    V other;
    switch (activation) {
    case NORMFUSE_RELU: return OP(select_le)(z, zero, zero, dy);
    case NORMFUSE_LEAKY_RELU:
    case NORMFUSE_PRELU: return OP(select_le)(z, zero, OP(mul)(dy, param), dy);
    case NORMFUSE_RELU6: return OP(select_le)(z, zero, zero, OP(select_le)(C(6.0), z, zero, dy));
    case NORMFUSE_SILU: {
        /* s*(1 + z*(1 - s)), 1 - s = e*s, but 1 where e may be infinite */
        const V s = OP(div)(one, OP(sigmoid_divisor)(z, &other));
        const V complement = OP(select_lt)(C(SIGMOID_FAR), z, OP(mul)(other, s), one);
        return OP(mul)(dy, OP(mul)(s, OP(fma)(z, complement, one)));
    }
    case NORMFUSE_GELU: {
        /* Phi(z) + z*e^(-z^2/2)/sqrt(2*pi) */
        const V tail = OP(phi_tail)(OP(min)(C(GELU_FAR), OP(abs)(z)), &other);
        const V phi = OP(select_lt)(z, zero, tail, OP(sub)(one, tail));
        return OP(mul)(dy, OP(fma)(OP(mul)(z, C(0.39894228040143267794)), other, phi));
    }
    case NORMFUSE_GELU_TANH: {
        /* s + z*s*(1 - s)*(2u)', (2u)' = 2*sqrt(2/pi)*(1 + 3*0.044715*z^2). Far out s*(1 - s) is 0 and z^3 may be
         * infinite: there the second term is dropped, not 0*inf. */
        const V argument = OP(gelu_tanh_argument)(z), s = OP(div)(one, OP(sigmoid_divisor)(argument, &other));
        const V complement = OP(select_lt)(C(SIGMOID_FAR), argument, OP(mul)(other, s), one);
        const V slope = OP(fma)(OP(mul)(z, z), C(0.21406444881780074633), C(1.59576912160573071176));
        const V term = OP(mul)(OP(mul)(z, slope), OP(mul)(s, complement));
        return OP(mul)(dy, OP(add)(s, OP(select_lt)(C(20.0), OP(abs)(z), zero, term)));
    }
    case NORMFUSE_HARDSWISH: {
        const V slope = OP(fma)(z, C(1.0 / 3.0), C(0.5));
        const V inner = OP(select_lt)(z, C(3.0), OP(mul)(dy, slope), dy);
        return OP(select_le)(z, C(-3.0), zero, inner);
    }
    case NORMFUSE_ELU: return OP(select_lt)(zero, z, dy, OP(mul)(dy, OP(mul)(param, OP(exp)(z))));
    case NORMFUSE_MISH: {
        /* t + z*t', t = w/(w + 2), t' = 4e(1 + e)/(w + 2)^2 */
        const V e = OP(mish_exp)(z), w = OP(mul)(e, OP(add)(e, C(2.0)));
        const V inverse = OP(div)(one, OP(add)(w, C(2.0)));
        const V slope = OP(mul)(OP(mul)(OP(mul)(C(4.0), e), OP(add)(one, e)), OP(mul)(inverse, inverse));
        return OP(mul)(dy, OP(fma)(z, OP(select_lt)(C(MISH_FAR), z, zero, slope), OP(mul)(w, inverse)));
    }
    default: return dy;
    }
}

/* dy*z where z is not above 0, else 0: what a value adds to the gradient of prelu's slope. */
FORMULA V OP(slope_gradient)(V dy, V z)
{
    return OP(select_lt)(C(0.0), z, C(0.0), OP(mul)(dy, z));
}

#undef FORMULA
#undef C
#undef MAGIC
#undef LOG2_E
#undef LN2_HIGH
#undef LN2_LOW
#undef EXP_LEAST
#undef SIGMOID_LEAST
#undef SIGMOID_MOST
#undef SIGMOID_FAR
#undef MISH_FAR
#undef GELU_FAR
