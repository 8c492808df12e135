/* SPDX-License-Identifier: MIT
 *
 * activate.inl - activations and their derivatives of values in memory, and normalized values. Included after activation.inl, once per compute
 * type.
 *
 * A formula is a chain of some twenty operations, and the hardware looks ahead over two or three vectors of it. Where a
 * vector is one or two registers (VF_IN_PAIRS), two vectors take each operation together (docs/decisions/0012). */
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

#if defined(VF_IN_PAIRS)
#define PAIR static inline __attribute__((always_inline)) OP(pair)
typedef struct { V first, second; } OP(pair);

#define OF_ONE(name) \
    PAIR OP(pair_##name)(OP(pair) a) { return (OP(pair)){OP(name)(a.first), OP(name)(a.second)}; }
#define OF_TWO(name)                                                                                                   \
    PAIR OP(pair_##name)(OP(pair) a, OP(pair) b)                                                                       \
    {                                                                                                                  \
        return (OP(pair)){OP(name)(a.first, b.first), OP(name)(a.second, b.second)};                                   \
    }
#define SELECT(name)                                                                                                   \
    PAIR OP(pair_##name)(OP(pair) a, OP(pair) b, OP(pair) x, OP(pair) y)                                               \
    {                                                                                                                  \
        return (OP(pair)){OP(name)(a.first, b.first, x.first, y.first),                                                \
                          OP(name)(a.second, b.second, x.second, y.second)};                                           \
    }
OF_ONE(neg) OF_ONE(abs) OF_ONE(pow2)
OF_TWO(add) OF_TWO(sub) OF_TWO(mul) OF_TWO(div) OF_TWO(max) OF_TWO(min)
SELECT(select_lt) SELECT(select_le)
#undef OF_ONE
#undef OF_TWO
#undef SELECT
PAIR OP(pair_set1)(R a) { return (OP(pair)){OP(set1)(a), OP(set1)(a)}; }
PAIR OP(pair_fma)(OP(pair) a, OP(pair) b, OP(pair) c)
{
    return (OP(pair)){OP(fma)(a.first, b.first, c.first), OP(fma)(a.second, b.second, c.second)};
}

#undef OP
#undef V
#if defined(OF_DOUBLE)
static inline vd_pair vd_pair_load_f64(const double *p) { return (vd_pair){vd_load_f64(p), vd_load_f64(p + W)}; }
static inline void vd_pair_store_f64(double *p, vd_pair v) { vd_store_f64(p, v.first); vd_store_f64(p + W, v.second); }
#define OP(name) vd_pair_##name
#define V vd_pair
#else
#define OP(name) vf_pair_##name
#define V vf_pair
#endif
#include "cpu/activation.inl"
#undef OP
#undef V
#if defined(OF_DOUBLE)
#define OP(name) vd_##name
#define V vd
#else
#define OP(name) vf_##name
#define V vf
#endif
#undef PAIR
#define LOAD_AT(p, i, j) ((OP(pair)){CAT(OP(load_), RT)((p) + (i)), CAT(OP(load_), RT)((p) + (j))})
#define STORE_AT(p, i, j, v)                    \
    do {                                        \
        const OP(pair) result = v;              \
        CAT(OP(store_), RT)((p) + (i), result.first);  \
        CAT(OP(store_), RT)((p) + (j), result.second); \
    } while (0)
#define FORMULA(name) OP(pair_##name)
enum { OP(step) = 2 * W };
#else
#define LOAD_AT(p, i, j) ((void)(j), CAT(OP(load_), RT)((p) + (i)))
#define STORE_AT(p, i, j, v) CAT(OP(store_), RT)((p) + (i), v)
#define FORMULA(name) OP(name)
enum { OP(step) = W };
#endif

/* n values, a multiple of W; the last vector of an odd number is taken twice. The choice is made once, before the loop. */
#define FOR_EACH_ACTIVATION(CASE)                                                                                  \
    CASE(NORMFUSE_RELU) CASE(NORMFUSE_LEAKY_RELU) CASE(NORMFUSE_SILU) CASE(NORMFUSE_GELU) CASE(NORMFUSE_GELU_TANH) \
    CASE(NORMFUSE_HARDSWISH) CASE(NORMFUSE_ELU) CASE(NORMFUSE_MISH) CASE(NORMFUSE_RELU6)

static __attribute__((noinline)) void OP(activate)(int32_t activation, R parameter, R *z, size_t n)
{
    switch (activation) {
#define CASE(name)                                                                                           \
    case name:                                                                                               \
        for (size_t i = 0; i < n; i += OP(step)) {                                                           \
            const size_t j = i + W < n ? i + W : i;                                                          \
            STORE_AT(z, i, j, FORMULA(activation)(name, FORMULA(set1)(parameter), LOAD_AT(z, i, j)));        \
        }                                                                                                    \
        break;
        FOR_EACH_ACTIVATION(CASE)
#undef CASE
    default: break;
    }
}

static __attribute__((noinline)) void OP(activate_gradient)(int32_t activation, R parameter, R *dy, const R *z,
                                                            size_t n)
{
    switch (activation) {
#define CASE(name)                                                                                                      \
    case name:                                                                                                          \
        for (size_t i = 0; i < n; i += OP(step)) {                                                                      \
            const size_t j = i + W < n ? i + W : i;                                                                     \
            STORE_AT(dy, i, j,                                                                                          \
                     FORMULA(activation_gradient)(name, FORMULA(set1)(parameter), LOAD_AT(dy, i, j), LOAD_AT(z, i, j))); \
        }                                                                                                               \
        break;
        FOR_EACH_ACTIVATION(CASE)
#undef CASE
    default: break;
    }
}

#undef LOAD_AT
#undef STORE_AT
#undef FORMULA
