/* SPDX-License-Identifier: MIT
 *
 * channels.inl - norm over channels in the compute type: where the positions of a channel are adjacent, and short rows of
 * channels (kernels.h says what each function does).
 * Included once per compute type, behind activation.inl, with R, RT, V, W and OP as passes.inl has them.
 *
 * A position is a lane: what is computed of it does not depend on where in a vector it lies. Rows are whole vectors; lanes
 * behind position n hold anything, and are left out of sums over positions. */
#define REAL(name) CAT3(channels_##name, RT, ISA)
#define LOAD_R(p) CAT(OP(load_), RT)(p)
#define LOAD_PART_R(p, n) CAT(OP(load_part_), RT)(p, n, OP(set1)(0))
#define STORE_R(p, v) CAT(OP(store_), RT)(p, v)
#define BODY static inline __attribute__((always_inline))

/* Two vectors of positions in step: a sum waits for the one before it. The second one is the first again where there is none. */
static void REAL(moments)(const struct normfuse_channels *s)
{
    const R *u = s->tile, *shift = s->shift;
    R *sums = s->sum, *squares = s->square;
    for (size_t p = 0; p < s->width; p += 2 * W) {
        const size_t q = p + W < s->width ? p + W : p;
        V sum0 = OP(set1)(0), sum1 = sum0, square0 = sum0, square1 = sum0;
        const V k0 = LOAD_R(shift + p), k1 = LOAD_R(shift + q);
        for (size_t r = 0; r < s->channels; r++) {
            const V d0 = OP(sub)(LOAD_R(u + r * s->pitch + p), k0), d1 = OP(sub)(LOAD_R(u + r * s->pitch + q), k1);
            sum0 = OP(add)(sum0, d0);
            sum1 = OP(add)(sum1, d1);
            square0 = OP(fma)(d0, d0, square0);
            square1 = OP(fma)(d1, d1, square1);
        }
        STORE_R(squares + p, square0);
        STORE_R(squares + q, square1);
        STORE_R(sums + p, sum0);
        STORE_R(sums + q, sum1);
    }
}

/* The n leading values of a vector at p, and 0 in the lanes behind them; n may be more than W. */
BODY V REAL(leading_at)(const R *p, size_t n) { return n >= W ? LOAD_R(p) : n ? LOAD_PART_R(p, n) : OP(set1)(0); }

/* Sums over channels go on in memory, those over positions in vectors, where lanes behind the last position count as 0. */
BODY void REAL(sums_of)(const struct normfuse_channels *s, size_t from, size_t to, const bool is_silu)
{
    const V zero = OP(set1)(0);
    const ptrdiff_t ahead = s->ahead, ahead_dy = s->ahead_dy;
    const R *shift = s->shift, *rstd = s->rstd, *rest = s->rest;
    R *sums = s->sum, *squares = s->square;
    for (size_t r = from; r < to; r++) {
        const R *x = (const R *)s->x + (ptrdiff_t)r * s->x_stride, *dy = (const R *)s->dy + (ptrdiff_t)r * s->dy_stride;
        R *tile = (R *)s->tile + r * s->pitch, *gradient = (R *)s->gradient + r * s->pitch;
        const V weight = OP(set1)(((const R *)s->weight)[r]), bias = OP(set1)(((const R *)s->bias)[r]);
        const bool starts = r == 0 && !s->continues;
        V of_bias = zero, of_weight = zero;
        for (size_t p = 0; p < s->width; p += W) {
            const size_t n = p < s->positions ? s->positions - p : 0;
            if (ahead) /* to the L2 cache: so many rows are under way that the L1 cache cannot hold */
                __builtin_prefetch((const char *)(x + p) + ahead, 0, 2);
            if (ahead_dy)
                __builtin_prefetch((const char *)(dy + p) + ahead_dy, 0, 2);
            const OP(normalization) of = OP(normalization_at)(shift, rstd, rest, p);
            const V h = OP(leading)(OP(normalized)(REAL(leading_at)(x + p, n), of), n);
            V g = REAL(leading_at)(dy + p, n);
            if (is_silu) {
                const V z = OP(fma)(h, weight, bias);
                g = OP(activation_gradient)(NORMFUSE_SILU, z, g, z);
            }
            const V scaled = OP(mul)(g, weight);
            of_bias = OP(add)(of_bias, g);
            of_weight = OP(fma)(g, h, of_weight);
            STORE_R(sums + p, OP(add)(starts ? zero : LOAD_R(sums + p), scaled));
            STORE_R(squares + p, OP(fma)(scaled, h, starts ? zero : LOAD_R(squares + p)));
            STORE_R(tile + p, h);
            STORE_R(gradient + p, g);
        }
        ((R *)s->sum_bias)[r] = OP(hsum)(of_bias);
        ((R *)s->sum_weight)[r] = OP(hsum)(of_weight);
    }
}
static void REAL(sums)(const struct normfuse_channels *s, size_t from, size_t to)
{
    REAL(sums_of)(s, from, to, false);
}
#if defined(NORMFUSE_SHORT_ROWS)
static void REAL(sums_silu)(const struct normfuse_channels *s, size_t from, size_t to)
{
    REAL(sums_of)(s, from, to, true);
}

/* ---- short rows: columns ---- */

/* Norm groups of at most 2*W values, which lie one after the other. The lanes of W norm groups are added up together,
 * in the order of channel_passes.inl. `two`: a norm group ends in its second vector. Vectors are whole: a value behind a
 * norm group counts as 0, and the next norm group overwrites what is written there. */
static __attribute__((noinline)) V REAL(hsums)(const V v[W]) { return OP(hsums)(v); }

struct REAL(row) {
    V first, second;
};

/* Rows of an array whose vectors end within it. */
BODY size_t REAL(whole_rows)(size_t rows, size_t n, const bool two)
{
    const size_t last = ((two ? 2 * W : W) + n - 1) / n;
    return rows < last ? 0 : rows - last + 1;
}

/* The row at p; is_end: its vectors end behind its array. */
BODY struct REAL(row) REAL(row_at)(const R *p, size_t n, bool is_end, const bool two)
{
    const V zero = OP(set1)(0);
    if (is_end)
        return (struct REAL(row)){n < W ? LOAD_PART_R(p, n) : LOAD_R(p),
                                  !two        ? zero
                                  : n < 2 * W ? LOAD_PART_R(p + W, n - W)
                                              : LOAD_R(p + W)};
    return (struct REAL(row)){LOAD_R(p), two ? LOAD_R(p + W) : zero};
}

/* Its values, and 0 in lanes behind them. */
BODY struct REAL(row) REAL(within)(struct REAL(row) v, V limit, const bool two)
{
    static const R lanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    V *const last = two ? &v.second : &v.first;
    *last = OP(select_lt)(LOAD_R(lanes), limit, *last, OP(set1)(0));
    return v;
}

/* Prefetches the row that lies `ahead` bytes behind p. */
BODY void REAL(prefetch_row)(const R *p, ptrdiff_t ahead, const bool two)
{
    if (!ahead)
        return;
    __builtin_prefetch((const char *)p + ahead, 0, 3);
    if (two)
        __builtin_prefetch((const char *)(p + W) + ahead, 0, 3);
}

BODY struct REAL(row) REAL(normalized_row)(struct REAL(row) v, OP(normalization) of, const bool two)
{
    return (struct REAL(row)){OP(normalized)(v.first, of), two ? OP(normalized)(v.second, of) : v.second};
}

BODY void REAL(store_row)(R *p, V first, V second, const bool two)
{
    STORE_R(p, first);
    if (two)
        STORE_R(p + W, second);
}

BODY void REAL(moments_of_short_rows)(const struct normfuse_channels *s, size_t from, size_t to, const bool two)
{
    const size_t n = s->channels, rows = to * s->groups, whole = REAL(whole_rows)(s->positions * s->groups, n, two);
    const V limit = OP(set1)((R)(two ? n - W : n)), all = OP(set1)((R)n), zero = OP(set1)(0);
    R *shift = s->shift, *sum = s->sum, *square = s->square;
    V sums[W], squares[W];
    for (size_t at = from * s->groups; at < rows; at += W) {
        const size_t count = rows - at < W ? rows - at : W;
        const R *x = (const R *)s->x + at * n;
        for (size_t i = 0; i < W && s->centred; i++) {
            const size_t row = i < count ? i : count - 1;
            struct REAL(row) v = REAL(row_at)(x + row * n, n, at + row >= whole, two);
            v = REAL(within)(v, limit, two);
            sums[i] = two ? OP(add)(v.first, v.second) : v.first;
        }
        const V mean = s->centred ? OP(div)(REAL(hsums)(sums), all) : zero;
        STORE_R(shift + at, OP(select_le)(OP(sub)(mean, mean), zero, mean, zero)); /* 0 for what is not finite */
        for (size_t i = 0; i < W; i++) {
            const size_t row = i < count ? i : count - 1;
            REAL(prefetch_row)(x + row * n, s->ahead, two);
            const V k = OP(set1)(shift[at + row]);
            struct REAL(row) d = REAL(row_at)(x + row * n, n, at + row >= whole, two);
            d = REAL(within)((struct REAL(row)){OP(sub)(d.first, k), OP(sub)(d.second, k)}, limit, two);
            sums[i] = two ? OP(add)(d.first, d.second) : d.first;
            const V product = OP(mul)(d.first, d.first);
            squares[i] = two ? OP(add)(product, OP(mul)(d.second, d.second)) : product;
        }
        STORE_R(sum + at, OP(add)(REAL(hsums)(sums), zero)); /* not -0 */
        STORE_R(square + at, REAL(hsums)(squares));
    }
}

BODY void REAL(apply_to_short_rows)(const struct normfuse_channels *s, size_t from, size_t to, const bool two)
{
    const size_t n = s->channels, rows = to * s->groups, whole = REAL(whole_rows)(s->positions * s->groups, n, two);
    const size_t first = from * s->groups;
    const R *x = (const R *)s->x + first * n, *weight = s->weight, *bias = s->bias;
    R *z = (R *)s->z + first * n;
    for (size_t at = first, c = 0; at < rows; at++, x += n, z += n) {
        const struct REAL(row) h = REAL(normalized_row)(REAL(row_at)(x, n, at >= whole, two),
                                                        OP(normalization_of)(s->shift, s->rstd, s->rest, at), two);
        REAL(store_row)(z, OP(fma)(h.first, LOAD_R(weight + c), LOAD_R(bias + c)),
                        OP(fma)(h.second, LOAD_R(weight + c + W), LOAD_R(bias + c + W)), two);
        c = c + n < s->groups * n ? c + n : 0;
    }
}

BODY void REAL(sums_of_short_rows)(const struct normfuse_channels *s, size_t from, size_t to, const bool two)
{
    const size_t n = s->channels, whole = REAL(whole_rows)(s->positions * s->groups, n, two);
    const V limit = OP(set1)((R)(two ? n - W : n)), zero = OP(set1)(0);
    V sums[W], squares[W];
    for (size_t i = 0; i < W; i++)
        sums[i] = squares[i] = zero;
    for (size_t r = from; r < to; r += W) {
        const size_t count = to - r < W ? to - r : W;
        for (size_t j = 0; j < s->groups; j++) {
            R *const sum_bias = (R *)s->sum_bias + j * n, *const sum_weight = (R *)s->sum_weight + j * n;
            const struct REAL(row) weight =
                REAL(within)(REAL(row_at)((const R *)s->weight + j * n, n, false, two), limit, two);
            struct REAL(row) of_bias = REAL(row_at)(sum_bias, n, false, two),
                             of_weight = REAL(row_at)(sum_weight, n, false, two);
            for (size_t i = 0, at = r * s->groups + j; i < count; i++, at += s->groups) {
                REAL(prefetch_row)((const R *)s->x + at * n, s->ahead, two);
                REAL(prefetch_row)((const R *)s->gradient + at * n, s->ahead_dy, two);
                struct REAL(row) h = REAL(row_at)((const R *)s->x + at * n, n, at >= whole, two);
                struct REAL(row) g = REAL(row_at)((const R *)s->gradient + at * n, n, at >= whole, two);
                h = REAL(normalized_row)(h, OP(normalization_of)(s->shift, s->rstd, s->rest, at), two);
                h = REAL(within)(h, limit, two);
                g = REAL(within)(g, limit, two);
                of_bias = (struct REAL(row)){OP(add)(of_bias.first, g.first), OP(add)(of_bias.second, g.second)};
                of_weight = (struct REAL(row)){OP(fma)(g.first, h.first, of_weight.first),
                                               OP(fma)(g.second, h.second, of_weight.second)};
                const V scaled = OP(mul)(g.first, weight.first), product = OP(mul)(scaled, h.first);
                const V second = OP(mul)(g.second, weight.second);
                sums[i] = two ? OP(add)(scaled, second) : scaled;
                squares[i] = two ? OP(add)(product, OP(mul)(second, h.second)) : product;
            }
            REAL(store_row)(sum_bias, of_bias.first, of_bias.second, two);
            REAL(store_row)(sum_weight, of_weight.first, of_weight.second, two);
            R sum[W], square[W];
            STORE_R(sum, OP(add)(REAL(hsums)(sums), zero)); /* not -0 */
            STORE_R(square, OP(add)(REAL(hsums)(squares), zero));
            for (size_t i = 0, at = r * s->groups + j; i < count; i++, at += s->groups) {
                ((R *)s->sum)[at] = sum[i];
                ((R *)s->square)[at] = square[i];
            }
        }
    }
}

BODY void REAL(dx_of_short_rows)(const struct normfuse_channels *s, size_t from, size_t to, const bool two)
{
    const size_t n = s->channels, rows = to * s->groups, whole = REAL(whole_rows)(s->positions * s->groups, n, two);
    const size_t first = from * s->groups;
    const R *x = (const R *)s->x + first * n, *gradient = (const R *)s->gradient + first * n, *weight = s->weight;
    R *z = (R *)s->z + first * n;
    for (size_t at = first, c = 0; at < rows; at++, x += n, gradient += n, z += n) {
        const OP(normalization) of = OP(normalization_of)(s->shift, s->rstd, s->rest, at);
        const V slope = OP(set1)(((const R *)s->slope)[at]), offset = OP(set1)(((const R *)s->offset)[at]);
        const struct REAL(row) h = REAL(normalized_row)(REAL(row_at)(x, n, at >= whole, two), of, two);
        const struct REAL(row) g = REAL(row_at)(gradient, n, at >= whole, two);
        REAL(store_row)(z, OP(fma)(of.rstd, OP(mul)(g.first, LOAD_R(weight + c)), OP(fma)(slope, h.first, offset)),
                        OP(fma)(of.rstd, OP(mul)(g.second, LOAD_R(weight + c + W)), OP(fma)(slope, h.second, offset)),
                        two);
        c = c + n < s->groups * n ? c + n : 0;
    }
}

#define SHORT_PASS(name)                                                                        \
    static void REAL(short_##name)(const struct normfuse_channels *arguments, size_t from, size_t to) \
    {                                                                                           \
        const struct normfuse_channels local = *arguments, *s = &local;                         \
        if (s->channels > W)                                                                    \
            REAL(name##_short_rows)(s, from, to, true);                                         \
        else                                                                                    \
            REAL(name##_short_rows)(s, from, to, false);                                        \
    }
SHORT_PASS(moments_of)
SHORT_PASS(apply_to)
SHORT_PASS(sums_of)
SHORT_PASS(dx_of)
#undef SHORT_PASS
#endif

#undef REAL
#undef LOAD_R
#undef LOAD_PART_R
#undef STORE_R
#undef BODY
