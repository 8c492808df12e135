/* SPDX-License-Identifier: MIT
 *
 * activate.inl - activations and their derivatives of values in memory, and normalized values. Included after activation.inl, once per compute
 * type. */
#define VALUE static inline __attribute__((always_inline)) V OP

/* The first n lanes of v, the others 0; out of line in plain C, for its size. */
#if defined(NORMFUSE_NO_INLINE_FORMS)
static __attribute__((noinline)) V OP(some)(V v, size_t n)
#else
VALUE(some)(V v, size_t n)
#endif
{
    static const R lanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return OP(select_lt)(CAT(OP(load_), RT)(lanes), OP(set1)((R)n), v, OP(set1)(0));
}
VALUE(leading)(V v, size_t n) { return n >= W ? v : OP(some)(v, n); }

/* Statistics that normalize a value: those of norm group i for all lanes, or from entry i on each lane's own. */
typedef struct { V k, rstd, rest; } OP(normalization);
static inline __attribute__((always_inline)) OP(normalization)
    OP(normalization_of)(const R *k, const R *rstd, const R *rest, size_t i)
{
    return (OP(normalization)){OP(set1)(k[i]), OP(set1)(rstd[i]), OP(set1)(rest[i])};
}
static inline __attribute__((always_inline)) OP(normalization)
    OP(normalization_at)(const R *k, const R *rstd, const R *rest, size_t i)
{
    return (OP(normalization)){CAT(OP(load_), RT)(k + i), CAT(OP(load_), RT)(rstd + i), CAT(OP(load_), RT)(rest + i)};
}
VALUE(normalized)(V v, OP(normalization) of) { return OP(fma)(OP(sub)(v, of.k), of.rstd, of.rest); }
#undef VALUE

/* n values, a multiple of W. The choice is made once, before the loop. */
#define FOR_EACH_ACTIVATION(CASE)                                                                                  \
    CASE(NORMFUSE_RELU) CASE(NORMFUSE_LEAKY_RELU) CASE(NORMFUSE_SILU) CASE(NORMFUSE_GELU) CASE(NORMFUSE_GELU_TANH) \
    CASE(NORMFUSE_HARDSWISH) CASE(NORMFUSE_ELU) CASE(NORMFUSE_MISH) CASE(NORMFUSE_RELU6)

#define LOAD_R(p) CAT(OP(load_), RT)(p)
#define STORE_R(p, v) CAT(OP(store_), RT)(p, v)
static __attribute__((noinline)) void OP(activate)(int32_t activation, double parameter, void *values, size_t n)
{
    R *const z = values;
    switch (activation) {
#define CASE(name)                                                                                           \
    case name:                                                                                               \
        for (size_t i = 0; i < n; i += W)                                                                    \
            STORE_R(z + i, OP(activation)(name, OP(set1)((R)parameter), LOAD_R(z + i)));                     \
        break;
        FOR_EACH_ACTIVATION(CASE)
#undef CASE
    default: break;
    }
}

static __attribute__((noinline)) void OP(activate_gradient)(int32_t activation, double parameter, void *gradient,
                                                            const void *values, size_t n)
{
    R *const dy = gradient;
    const R *const z = values;
    switch (activation) {
#define CASE(name)                                                                                                      \
    case name:                                                                                                          \
        for (size_t i = 0; i < n; i += W)                                                                               \
            STORE_R(dy + i, OP(activation_gradient)(name, OP(set1)((R)parameter), LOAD_R(dy + i), LOAD_R(z + i)));      \
        break;
        FOR_EACH_ACTIVATION(CASE)
#undef CASE
    default: break;
    }
}

#undef LOAD_R
#undef STORE_R
