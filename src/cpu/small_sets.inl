/* SPDX-License-Identifier: MIT
 *
 * small_sets.inl - sets of few values, many at a time, in the L1 cache (kernels.h says what each function does). Included
 * once per compute type, behind activation.inl, with R, RT, V, W and OP as passes.inl has them.
 *
 * Rows lie in memory without gaps. Vectors are whole: what is read behind a set counts as 0, and what is written behind one is
 * written again by the next one, since sets are walked in the order of memory. A set of one row is summed by itself: its value i
 * belongs to lane i % (2*W). Sets of several rows are summed column by column, and the columns of a set then alike. */
#define REAL(name) CAT3(small_##name, RT, ISA)
#define LOAD_R(p) CAT(OP(load_), RT)(p)
#define STORE_R(p, v) CAT(OP(store_), RT)(p, v)
#define BODY static inline __attribute__((always_inline))

/* Prefetches are to the L2 cache: the tile's own arrays fill the L1 cache. */
BODY const char *REAL(ahead_of)(const struct normfuse_small_sets *s, size_t sample, size_t row, size_t column)
{
    return s->ahead + (ptrdiff_t)sample * s->ahead_sample + (ptrdiff_t)row * s->ahead_row +
           (ptrdiff_t)column * s->ahead_value;
}
#define AHEAD(at, i) __builtin_prefetch((at) + (ptrdiff_t)(i) * s->ahead_value, 0, 2)

/* Onto the sums of x - k and of its square: n values. */
BODY void REAL(add_moments)(const R *x, size_t n, V k, V *sum, V *square)
{
    const V d = OP(leading)(OP(sub)(LOAD_R(x), k), n);
    *sum = OP(add)(*sum, d);
    *square = OP(fma)(d, d, *square);
}

/* Sums of a set: of chunks of at most NORMFUSE_SMALL_CHUNK values in its lanes, then in double. */
struct REAL(lanes) {
    V sum[2], square[2];
};

BODY struct REAL(lanes) REAL(cleared)(void)
{
    const V zero = OP(set1)(0);
    return (struct REAL(lanes)){{zero, zero}, {zero, zero}};
}

BODY void REAL(collect)(struct REAL(lanes) *l, double *sum, double *square)
{
    *sum += (double)OP(hsum)(OP(add)(l->sum[0], l->sum[1]));
    *square += (double)OP(hsum)(OP(add)(l->square[0], l->square[1]));
    *l = REAL(cleared)();
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
    const V zero = OP(set1)(0), x0 = OP(leading)(LOAD_R(x), n), x1 = more ? OP(leading)(LOAD_R(x + W), more) : zero;
    const R mean = (R)((double)OP(hsum)(OP(add)(x0, x1)) * inverse), shift = mean - mean == 0 ? mean : 0;
    const V k = OP(set1)(shift), d0 = OP(leading)(OP(sub)(x0, k), n),
            d1 = more ? OP(leading)(OP(sub)(x1, k), more) : zero;
    *sum = OP(hsum)(OP(add)(d0, d1));
    *square = OP(hsum)(OP(add)(OP(mul)(d0, d0), OP(mul)(d1, d1)));
    return shift;
}

BODY void REAL(moments_of_set)(const struct normfuse_small_sets *s, const R *x, R shift, const char *ahead, double *to)
{
    const V k = OP(set1)(shift);
    struct REAL(lanes) l = REAL(cleared)();
    to[0] = to[1] = 0;
    for (size_t i = 0, end; i < s->n;) {
        for (end = REAL(chunk_end)(i, s->n); i < end; i += 2 * W) {
            AHEAD(ahead, i);
            AHEAD(ahead, i + W);
            REAL(add_moments)(x + i, end - i, k, &l.sum[0], &l.square[0]);
            if (end - i > W)
                REAL(add_moments)(x + i + W, end - i - W, k, &l.sum[1], &l.square[1]);
        }
        i = end;
        if (s->n > NORMFUSE_SMALL_CHUNK)
            REAL(collect)(&l, &to[0], &to[1]);
    }
    REAL(collect)(&l, &to[0], &to[1]);
}

/* ---- several rows ---- */

/* Sums of x or of x*weight over the n columns of each set: value i in lane i % (2*W). */
static __attribute__((noinline)) void REAL(sums_of_sets)(const R *x, const R *weight, size_t sets, size_t n, R *to)
{
    for (size_t j = 0; n == 1 && j < sets; j += W)
        STORE_R(to + j, weight ? OP(mul)(LOAD_R(x + j), LOAD_R(weight + j)) : LOAD_R(x + j));
    for (size_t j = 0, at = 0; n > 1 && j < sets; j++, at += n) {
        V sum[2] = {OP(set1)(0), OP(set1)(0)};
        for (size_t i = 0; i < n; i += W) {
            const V v = weight ? OP(mul)(LOAD_R(x + at + i), LOAD_R(weight + at + i)) : LOAD_R(x + at + i);
            sum[i / W % 2] = OP(add)(sum[i / W % 2], OP(leading)(v, n - i));
        }
        to[j] = OP(hsum)(OP(add)(sum[0], sum[1]));
    }
}

/* Sets of several rows, each narrower than a vector. */
BODY bool REAL(share_vectors)(const struct normfuse_small_sets *s)
{
    return s->rows > 1 && s->n < W;
}

/* Values of sets, for each of their columns. */
static __attribute__((noinline)) const R *REAL(of_columns)(const struct normfuse_small_sets *s, const void *of_sets,
                                                           size_t sample, void *columns)
{
    const R *from = (const R *)of_sets + sample * s->sets;
    if (s->n == 1)
        return from;
    R *to = columns;
    for (size_t j = 0; j < s->sets; j++, to += s->n)
        for (size_t i = 0; i < s->n; i += W)
            STORE_R(to + i, OP(set1)(from[j]));
    return columns;
}

static void REAL(moments_of_rows)(const struct normfuse_small_sets *s, size_t sample)
{
    const size_t columns = s->sets * s->n;
    const V inverse = OP(set1)((R)(1 / (double)(s->rows * s->n)));
    const R *u = (const R *)s->u + sample * s->rows * columns;
    R *shift = (R *)s->shift + sample * s->sets, *sum = (R *)s->sum + sample * s->sets,
      *square = (R *)s->square + sample * s->sets;
    R *sums = s->columns[0], *squares = s->columns[1];
    for (size_t c = 0; c < columns; c += W) {
        V all = OP(set1)(0);
        for (size_t r = 0; r < s->rows; r++) {
            AHEAD(REAL(ahead_of)(s, sample, r, c), 0);
            all = OP(add)(all, LOAD_R(u + r * columns + c));
        }
        STORE_R(sums + c, all);
    }
    REAL(sums_of_sets)(sums, NULL, s->sets, s->n, sum);
    for (size_t j = 0; j < s->sets; j += W) {
        const V mean = OP(mul)(LOAD_R(sum + j), inverse), zero = OP(set1)(0);
        STORE_R(shift + j, OP(select_le)(OP(sub)(mean, mean), zero, mean, zero)); /* 0 where a mean is none */
    }
    const bool by_set = !REAL(share_vectors)(s);
    const R *k = by_set ? NULL : REAL(of_columns)(s, s->shift, sample, s->columns[2]);
    for (size_t j = 0; j < (by_set ? s->sets : 1); j++)
        for (size_t c = j * s->n; c < (by_set ? (j + 1) * s->n : columns); c += W) {
            const V about = by_set ? OP(set1)(shift[j]) : LOAD_R(k + c);
            V all = OP(set1)(0), products = all;
            for (size_t r = 0; r < s->rows; r++) {
                const V d = OP(sub)(LOAD_R(u + r * columns + c), about);
                all = OP(add)(all, d);
                products = OP(fma)(d, d, products);
            }
            STORE_R(sums + c, all);
            STORE_R(squares + c, products);
        }
    REAL(sums_of_sets)(sums, NULL, s->sets, s->n, sum);
    REAL(sums_of_sets)(squares, NULL, s->sets, s->n, square);
}

static void REAL(normalize_rows)(const struct normfuse_small_sets *s, size_t sample)
{
    const size_t columns = s->sets * s->n, start = sample * s->rows * columns;
    const R *u = (const R *)s->u + start, *weight = s->weight, *bias = s->bias;
    const R *k = REAL(of_columns)(s, s->shift, sample, s->columns[0]),
            *rstd = REAL(of_columns)(s, s->rstd, sample, s->columns[1]);
    const R *rest = REAL(of_columns)(s, s->rest, sample, s->columns[2]);
    R *normalized = s->normalized ? (R *)s->normalized + start : NULL, *z = s->z ? (R *)s->z + start : NULL;
    for (size_t at = 0, r = 0; r < s->rows; r++, at += columns)
        for (size_t c = 0; c < columns; c += W) {
            AHEAD(REAL(ahead_of)(s, sample, r, c), 0);
            const V h = OP(normalized)(LOAD_R(u + at + c), OP(normalization_at)(k, rstd, rest, c));
            if (normalized)
                STORE_R(normalized + at + c, h);
            if (z)
                STORE_R(z + at + c, OP(fma)(h, LOAD_R(weight + c), LOAD_R(bias + c)));
        }
}

static void REAL(sums_of_rows)(const struct normfuse_small_sets *s, size_t sample)
{
    const size_t columns = s->sets * s->n, start = sample * s->rows * columns;
    const R *g = (const R *)s->gradient + start, *h = (const R *)s->normalized + start, *weight = s->weight;
    R *sum_bias = s->sum_bias, *sum_weight = s->sum_weight, *sums = s->columns[0], *products = s->columns[1];
    for (size_t c = 0; c < columns; c += W) {
        V sum = OP(set1)(0), product = sum;
        for (size_t r = 0; r < s->rows; r++) {
            AHEAD(REAL(ahead_of)(s, sample, r, c), 0);
            const V gradient = LOAD_R(g + r * columns + c);
            sum = OP(add)(sum, gradient);
            product = OP(fma)(gradient, LOAD_R(h + r * columns + c), product);
        }
        STORE_R(sums + c, sum);
        STORE_R(products + c, product);
        STORE_R(sum_bias + c, OP(add)(LOAD_R(sum_bias + c), sum));
        STORE_R(sum_weight + c, OP(add)(LOAD_R(sum_weight + c), product));
    }
    REAL(sums_of_sets)(sums, weight, s->sets, s->n, (R *)s->sum + sample * s->sets);
    REAL(sums_of_sets)(products, weight, s->sets, s->n, (R *)s->square + sample * s->sets);
}

/* ---- what the table has ---- */

static void REAL(moments)(const struct normfuse_small_sets *s)
{
    R *shift = s->shift;
    const double inverse = 1 / (double)s->n;
    double sums[2];
    for (size_t sample = 0, at = 0; sample < s->samples; sample++) {
        if (s->rows > 1) {
            REAL(moments_of_rows)(s, sample);
            continue;
        }
        for (size_t j = 0; j < s->sets; j++, at++) {
            const R *x = (const R *)s->u + at * s->n;
            const char *ahead = REAL(ahead_of)(s, sample, 0, j * s->n);
            if (s->n <= 2 * W) {
                AHEAD(ahead, 0);
                shift[at] = REAL(moments_of_short_set)(s, x, inverse, (R *)s->sum + at, (R *)s->square + at);
                continue;
            }
            REAL(moments_of_set)(s, x, 0, ahead, sums);
            const R mean = (R)(sums[0] * inverse);
            shift[at] = mean - mean == 0 ? mean : 0;
            REAL(moments_of_set)(s, x, shift[at], ahead, sums);
            ((R *)s->sum)[at] = (R)sums[0];
            ((R *)s->square)[at] = (R)sums[1];
        }
    }
}

static void REAL(normalize)(const struct normfuse_small_sets *s)
{
    const R *x = s->u, *weight = s->weight, *bias = s->bias;
    R *normalized = s->normalized, *z = s->z;
    for (size_t sample = 0; sample < s->samples; sample++) {
        if (REAL(share_vectors)(s)) {
            REAL(normalize_rows)(s, sample);
            continue;
        }
        for (size_t r = 0, at = sample * s->rows * s->sets * s->n; r < s->rows; r++)
            for (size_t j = 0, c = 0; j < s->sets; j++, at += s->n, c += s->n) {
                const size_t set = sample * s->sets + j;
                const OP(normalization) of = OP(normalization_of)(s->shift, s->rstd, s->rest, set);
                const char *ahead = REAL(ahead_of)(s, sample, r, c);
                for (size_t i = 0; i < s->n; i += W) {
                    AHEAD(ahead, i);
                    const V h = OP(normalized)(LOAD_R(x + at + i), of);
                    if (normalized)
                        STORE_R(normalized + at + i, h);
                    if (z)
                        STORE_R(z + at + i, OP(fma)(h, LOAD_R(weight + c + i), LOAD_R(bias + c + i)));
                }
            }
    }
}

/* Onto the sums of gradient*weight and of its product with the normalized value: n values. */
BODY void REAL(add_products)(const R *g, const R *weight, const R *h, size_t n, V *sum, V *square)
{
    const V scaled = OP(leading)(OP(mul)(LOAD_R(g), LOAD_R(weight)), n), normalized = OP(leading)(LOAD_R(h), n);
    *sum = OP(add)(*sum, scaled);
    *square = OP(fma)(scaled, normalized, *square);
}

/* Onto the sums of gradients and of their products with normalized values: n values. */
BODY void REAL(add_gradients)(const R *g, const R *h, size_t n, V *sum, V *product)
{
    const V gradient = OP(leading)(LOAD_R(g), n);
    *sum = OP(add)(*sum, gradient);
    *product = OP(fma)(gradient, OP(leading)(LOAD_R(h), n), *product);
}

/* Sums of a sample whose channels are `summed` values of a row each: those of a set are of its channels'. */
static __attribute__((noinline)) void REAL(sums_of_channels)(const struct normfuse_small_sets *s, size_t sample)
{
    const size_t channels = s->n / s->summed, start = sample * s->sets * s->n;
    const R *g = (const R *)s->gradient + start, *h = (const R *)s->normalized + start, *weight = s->weight;
    R *sum_bias = s->sum_bias, *sum_weight = s->sum_weight;
    const char *ahead = REAL(ahead_of)(s, sample, 0, 0);
    for (size_t j = sample * s->sets; j < (sample + 1) * s->sets; j++) {
        double all = 0, products = 0;
        for (size_t c = 0; c < channels; c++, g += s->summed, h += s->summed, weight += s->summed) {
            struct REAL(lanes) l = REAL(cleared)();
            for (size_t i = 0, n; i < s->summed; i += 2 * W) {
                n = s->summed - i;
                AHEAD(ahead, i);
                AHEAD(ahead, i + W);
                REAL(add_gradients)(g + i, h + i, n, &l.sum[0], &l.square[0]);
                if (n > W)
                    REAL(add_gradients)(g + i + W, h + i + W, n - W, &l.sum[1], &l.square[1]);
            }
            const R sum = OP(hsum)(OP(add)(l.sum[0], l.sum[1])), product = OP(hsum)(OP(add)(l.square[0], l.square[1]));
            ahead += (ptrdiff_t)s->summed * s->ahead_value;
            *sum_bias++ += sum;
            *sum_weight++ += product;
            all += (double)*weight * (double)sum;
            products += (double)*weight * (double)product;
        }
        ((R *)s->sum)[j] = (R)all;
        ((R *)s->square)[j] = (R)products;
    }
}

static void REAL(sums)(const struct normfuse_small_sets *s)
{
    const size_t columns = s->sets * s->n;
    for (size_t sample = 0, at = 0; sample < s->samples; sample++) {
        if (s->rows > 1 || s->summed > 1) {
            (s->rows > 1 ? REAL(sums_of_rows) : REAL(sums_of_channels))(s, sample);
            continue;
        }
        const R *g = (const R *)s->gradient + sample * columns, *h = (const R *)s->normalized + sample * columns,
                *weight = s->weight;
        R *sum_bias = s->sum_bias, *sum_weight = s->sum_weight;
        const char *ahead = REAL(ahead_of)(s, sample, 0, 0);
        for (size_t c = 0; c < columns; c += W) {
            AHEAD(ahead, c);
            const V gradient = OP(leading)(LOAD_R(g + c), columns - c),
                    normalized = OP(leading)(LOAD_R(h + c), columns - c);
            STORE_R(sum_bias + c, OP(add)(LOAD_R(sum_bias + c), gradient));
            STORE_R(sum_weight + c, OP(fma)(gradient, normalized, LOAD_R(sum_weight + c)));
        }
        for (size_t j = 0; j < s->sets; j++, at++, g += s->n, h += s->n, weight += s->n) {
            double sum = 0, square = 0;
            struct REAL(lanes) l = REAL(cleared)();
            for (size_t i = 0, end; i < s->n;) {
                for (end = REAL(chunk_end)(i, s->n); i < end; i += 2 * W) {
                    REAL(add_products)(g + i, weight + i, h + i, end - i, &l.sum[0], &l.square[0]);
                    if (end - i > W)
                        REAL(add_products)(g + i + W, weight + i + W, h + i + W, end - i - W, &l.sum[1], &l.square[1]);
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
}

BODY V REAL(dx_of)(V gradient, V weight, V normalized, V rstd, V slope, V offset)
{
    return OP(fma)(rstd, OP(mul)(gradient, weight), OP(fma)(slope, normalized, offset));
}

static void REAL(dx)(const struct normfuse_small_sets *s)
{
    const size_t columns = s->sets * s->n;
    const R *g = s->gradient, *h = s->normalized, *weight = s->weight;
    R *dx = s->dx;
    for (size_t sample = 0, at = 0; sample < s->samples; sample++) {
        if (REAL(share_vectors)(s)) {
            const R *rstd = REAL(of_columns)(s, s->rstd, sample, s->columns[0]),
                    *slope = REAL(of_columns)(s, s->slope, sample, s->columns[1]);
            const R *offset = REAL(of_columns)(s, s->offset, sample, s->columns[2]);
            for (size_t r = 0; r < s->rows; r++, at += columns)
                for (size_t c = 0; c < columns; c += W) {
                    AHEAD(REAL(ahead_of)(s, sample, r, c), 0);
                    STORE_R(dx + at + c, REAL(dx_of)(LOAD_R(g + at + c), LOAD_R(weight + c), LOAD_R(h + at + c),
                                                     LOAD_R(rstd + c), LOAD_R(slope + c), LOAD_R(offset + c)));
                }
            continue;
        }
        for (size_t r = 0; r < s->rows; r++)
            for (size_t j = 0, c = 0; j < s->sets; j++, at += s->n, c += s->n) {
                const size_t set = sample * s->sets + j;
                const V rstd = OP(set1)(((const R *)s->rstd)[set]), slope = OP(set1)(((const R *)s->slope)[set]);
                const V offset = OP(set1)(((const R *)s->offset)[set]);
                const char *ahead = REAL(ahead_of)(s, sample, r, c);
                for (size_t i = 0; i < s->n; i += W) {
                    AHEAD(ahead, i);
                    STORE_R(dx + at + i, REAL(dx_of)(LOAD_R(g + at + i), LOAD_R(weight + c + i), LOAD_R(h + at + i),
                                                     rstd, slope, offset));
                }
            }
    }
}

static void REAL(prelu)(const void *slope, void *z, void *gradient, void *sum_slope, size_t rows, size_t n)
{
    static const R lanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const V lane = LOAD_R(lanes);
    R *out = gradient ? gradient : z, *sums = sum_slope;
    for (size_t r = 0; r < rows; r++)
        for (size_t c = 0; c < n; c += W) {
            const R *in = (const R *)z + r * n + c;
            R *to = out + r * n + c;
            const V v = LOAD_R(in), old = LOAD_R(to), p = LOAD_R((const R *)slope + c);
            if (sums)
                STORE_R(sums + c, OP(add)(LOAD_R(sums + c), OP(leading)(OP(slope_gradient)(old, v), n - c)));
            const V result =
                gradient ? OP(activation_gradient)(NORMFUSE_PRELU, p, old, v) : OP(activation)(NORMFUSE_PRELU, p, v);
            STORE_R(to, OP(select_lt)(lane, OP(set1)((R)(n - c)), result, old)); /* the next row's values stay */
        }
}

#undef AHEAD
#undef REAL
#undef LOAD_R
#undef STORE_R
#undef BODY
