/* SPDX-License-Identifier: MIT
 *
 * small_sets.inl - sets of few values, many at a time, in the L1 cache (kernels.h says what each function does). Included
 * once per compute type, behind activation.inl, with R, RT, V, W and OP as passes.inl has them.
 *
 * Rows of sets lie in memory without gaps. Vectors are whole: what is read behind a set counts as 0, and what is written behind
 * one is written again by the next one, since sets are walked in the order of memory. Value i of a set's row belongs to lane
 * i % (2*W) of its sums. */
#define REAL(name) CAT3(small_##name, RT, ISA)
#define LOAD_R(p) CAT(OP(load_), RT)(p)
#define STORE_R(p, v) CAT(OP(store_), RT)(p, v)
#define BODY static inline __attribute__((always_inline))

/* The first n lanes of v, the others 0. */
BODY V REAL(first)(V v, size_t n)
{
    static const R lanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return n >= W ? v : OP(select_lt)(LOAD_R(lanes), OP(set1)((R)n), v, OP(set1)(0));
}

/* Onto the sums of x - k and of its square: n values. */
BODY void REAL(add_moments)(const R *x, size_t n, V k, V *sum, V *square)
{
    const V d = REAL(first)(OP(sub)(LOAD_R(x), k), n);
    *sum = OP(add)(*sum, d);
    *square = OP(fma)(d, d, *square);
}

/* Sums of a set: of chunks of at most NORMFUSE_SMALL_CHUNK values in its lanes, then in double. */
struct REAL(lanes) {
    V sum[2], square[2];
};

BODY void REAL(clear)(struct REAL(lanes) *l)
{
    const V zero = OP(set1)(0);
    *l = (struct REAL(lanes)){{zero, zero}, {zero, zero}};
}

BODY void REAL(collect)(struct REAL(lanes) *l, double *sum, double *square)
{
    *sum += (double)OP(hsum)(OP(add)(l->sum[0], l->sum[1]));
    *square += (double)OP(hsum)(OP(add)(l->square[0], l->square[1]));
    REAL(clear)(l);
}

/* A row's chunk that begins at value i ends there. */
BODY size_t REAL(chunk_end)(size_t i, size_t n)
{
    return n - i < NORMFUSE_SMALL_CHUNK ? n : i + NORMFUSE_SMALL_CHUNK;
}

/* The same of one row of at most 2*W values, without a loop: sum of u - shift and of its square for the mean of the values as shift,
 * which is returned. */
BODY R REAL(moments_of_short_set)(const struct normfuse_small_sets *s, const R *x, double inverse, R *sum, R *square)
{
    const size_t n = s->n, more = n > W ? n - W : 0;
    const V zero = OP(set1)(0), x0 = REAL(first)(LOAD_R(x), n), x1 = more ? REAL(first)(LOAD_R(x + W), more) : zero;
    const R mean = (R)((double)OP(hsum)(OP(add)(x0, x1)) * inverse), shift = mean - mean == 0 ? mean : 0;
    const V k = OP(set1)(shift), d0 = REAL(first)(OP(sub)(x0, k), n), d1 = more ? REAL(first)(OP(sub)(x1, k), more) : zero;
    *sum = OP(hsum)(OP(add)(d0, d1));
    *square = OP(hsum)(OP(add)(OP(mul)(d0, d0), OP(mul)(d1, d1)));
    return shift;
}

BODY void REAL(moments_of_set)(const struct normfuse_small_sets *s, const R *x, R shift, double *sum, double *square)
{
    const V k = OP(set1)(shift);
    struct REAL(lanes) l;
    REAL(clear)(&l);
    *sum = *square = 0;
    for (size_t r = 0; r < s->rows; r++, x += s->sets * s->n)
        for (size_t i = 0, end; i < s->n;) {
            for (end = REAL(chunk_end)(i, s->n); i < end; i += 2 * W) {
                REAL(add_moments)(x + i, end - i, k, &l.sum[0], &l.square[0]);
                if (end - i > W)
                    REAL(add_moments)(x + i + W, end - i - W, k, &l.sum[1], &l.square[1]);
            }
            i = end;
            if (s->n > NORMFUSE_SMALL_CHUNK)
                REAL(collect)(&l, sum, square);
        }
    REAL(collect)(&l, sum, square);
}

static void REAL(moments)(const struct normfuse_small_sets *s)
{
    R *shift = s->shift;
    const bool is_short = s->rows == 1 && s->n <= 2 * W;
    const double inverse = 1 / (double)(s->rows * s->n);
    double sum, square;
    for (size_t sample = 0, at = 0; sample < s->samples; sample++)
        for (size_t j = 0; j < s->sets; j++, at++) {
            const R *x = (const R *)s->u + sample * s->rows * s->sets * s->n + j * s->n;
            if (is_short) {
                shift[at] = REAL(moments_of_short_set)(s, x, inverse, (R *)s->sum + at, (R *)s->square + at);
                continue;
            }
            REAL(moments_of_set)(s, x, 0, &sum, &square);
            const R mean = (R)(sum * inverse);
            shift[at] = mean - mean == 0 ? mean : 0;
            REAL(moments_of_set)(s, x, shift[at], &sum, &square);
            ((R *)s->sum)[at] = (R)sum;
            ((R *)s->square)[at] = (R)square;
        }
}

static void REAL(normalize)(const struct normfuse_small_sets *s)
{
    const R *x = s->u, *weight = s->weight, *bias = s->bias;
    R *normalized = s->normalized, *z = s->z;
    for (size_t sample = 0; sample < s->samples; sample++)
        for (size_t r = 0; r < s->rows; r++)
            for (size_t j = 0, c = 0; j < s->sets; j++) {
                const size_t set = sample * s->sets + j;
                const V k = OP(set1)(((const R *)s->shift)[set]), rstd = OP(set1)(((const R *)s->rstd)[set]);
                const V rest = OP(set1)(((const R *)s->rest)[set]);
                for (size_t i = 0; i < s->n; i += W) {
                    const V h = OP(fma)(OP(sub)(LOAD_R(x + i), k), rstd, rest);
                    if (normalized)
                        STORE_R(normalized + i, h);
                    if (z)
                        STORE_R(z + i, OP(fma)(h, LOAD_R(weight + c + i), LOAD_R(bias + c + i)));
                }
                c += s->n;
                x += s->n;
                normalized = normalized ? normalized + s->n : NULL;
                z = z ? z + s->n : NULL;
            }
}

BODY void REAL(add_products)(const R *g, const R *h, size_t n, V *sum, V *square)
{
    const V gradient = REAL(first)(LOAD_R(g), n), normalized = REAL(first)(LOAD_R(h), n);
    *sum = OP(add)(*sum, gradient);
    *square = OP(fma)(gradient, normalized, *square);
}

static void REAL(sums)(const struct normfuse_small_sets *s)
{
    const size_t columns = s->sets * s->n;
    const R *weight = s->weight;
    R *sum_bias = s->sum_bias, *sum_weight = s->sum_weight, *scaled = s->scaled;
    const R *g = s->gradient, *h = s->normalized;
    for (size_t row = 0; row < s->samples * s->rows; row++, g += columns, h += columns, scaled += columns)
        for (size_t c = 0; c < columns; c += W) {
            const V gradient = REAL(first)(LOAD_R(g + c), columns - c), normalized = REAL(first)(LOAD_R(h + c), columns - c);
            STORE_R(sum_bias + c, OP(add)(LOAD_R(sum_bias + c), gradient));
            STORE_R(sum_weight + c, OP(fma)(gradient, normalized, LOAD_R(sum_weight + c)));
            STORE_R(scaled + c, OP(mul)(gradient, LOAD_R(weight + c)));
        }
    for (size_t sample = 0, at = 0; sample < s->samples; sample++)
        for (size_t j = 0; j < s->sets; j++, at++) {
            const size_t start = sample * s->rows * columns + j * s->n;
            double sum = 0, square = 0;
            struct REAL(lanes) l;
            REAL(clear)(&l);
            g = (const R *)s->scaled + start;
            h = (const R *)s->normalized + start;
            for (size_t r = 0; r < s->rows; r++, g += columns, h += columns)
                for (size_t i = 0, end; i < s->n;) {
                    for (end = REAL(chunk_end)(i, s->n); i < end; i += 2 * W) {
                        REAL(add_products)(g + i, h + i, end - i, &l.sum[0], &l.square[0]);
                        if (end - i > W)
                            REAL(add_products)(g + i + W, h + i + W, end - i - W, &l.sum[1], &l.square[1]);
                    }
                    i = end;
                    if (s->n > NORMFUSE_SMALL_CHUNK)
                        REAL(collect)(&l, &sum, &square);
                }
            REAL(collect)(&l, &sum, &square);
            ((R *)s->sum)[at] = (R)sum;
            ((R *)s->square)[at] = (R)square;
        }
}

static void REAL(dx)(const struct normfuse_small_sets *s)
{
    const R *g = s->scaled, *h = s->normalized;
    R *dx = s->dx;
    for (size_t sample = 0; sample < s->samples; sample++)
        for (size_t r = 0; r < s->rows; r++)
            for (size_t j = 0; j < s->sets; j++, g += s->n, h += s->n, dx += s->n) {
                const size_t set = sample * s->sets + j;
                const V rstd = OP(set1)(((const R *)s->rstd)[set]), slope = OP(set1)(((const R *)s->slope)[set]);
                const V offset = OP(set1)(((const R *)s->offset)[set]);
                for (size_t i = 0; i < s->n; i += W)
                    STORE_R(dx + i, OP(fma)(rstd, LOAD_R(g + i), OP(fma)(slope, LOAD_R(h + i), offset)));
            }
}

static void REAL(activate)(int32_t activation, double parameter, void *z, size_t n)
{
    OP(activate)(activation, (R)parameter, z, n);
}

static void REAL(activate_gradient)(int32_t activation, double parameter, void *gradient, const void *z, size_t n)
{
    OP(activate_gradient)(activation, (R)parameter, gradient, z, n);
}

#undef REAL
#undef LOAD_R
#undef STORE_R
#undef BODY
