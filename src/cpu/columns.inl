/* SPDX-License-Identifier: MIT
 *
 * columns.inl - sums per column, from the compute type to double. Included once per compute type with
 *   R            float or double
 *   REAL(name)   name_f32 or name_f64
 *   FROM, TO     8 doubles from and to an array of R
 * The arrays are padded to whole vectors: entries past the last column may be read and written. */

/* One sum per column of an array whose rows of `columns` entries were summed apart (plan.c: folded rows). */
static inline __attribute__((always_inline)) vd REAL(folded)(const R *in, size_t columns, size_t rows)
{
    vd sum = FROM(in);
    for (size_t r = 1; r < rows; r++)
        sum = vd_add(sum, FROM(in + r * columns));
    return sum;
}

/* to[c] += the sum of from[c], from[columns + c], ... */
static void REAL(accumulate)(const void *from, double *to, size_t columns, size_t rows)
{
    const R *in = from;
    for (size_t c = 0; c < columns; c += 8)
        vd_store_f64(to + c, vd_add(vd_load_f64(to + c), REAL(folded)(in + c, columns, rows)));
}

/* Joins the sums of n rows of the tensor, which lie in `rows` rows of `columns` entries, onto moments of `before` rows,
 * column by column (Chan, Golub and LeVeque 1979); the shifts of the first row of entries become the means of the n rows.
 * False, and nothing changed, where sums overflowed or may have lost digits. */
static bool REAL(join_columns)(void *shift, const void *sum, const void *square, double *mean, double *m2,
                               size_t columns, size_t rows, double n, double before)
{
    const R *sums = sum, *squares = square;
    R *shifts = shift;
    const vd zero = vd_set1(0), one = vd_set1(1), inverse = vd_set1(1 / n), minus_inverse = vd_set1(-1 / n);
    if (sizeof(R) == sizeof(float)) {
        static const double lanes[8] = {0, 1, 2, 3, 4, 5, 6, 7};
        vd bad = zero;
        for (size_t c = 0; c < columns; c += 8) {
            const vd s = REAL(folded)(sums + c, columns, rows), q = REAL(folded)(squares + c, columns, rows);
            const vd k = FROM(shifts + c), kk = vd_mul(k, k);
            const vd tiny = vd_select_lt(kk, vd_set1(0x1p-60), vd_select_lt(zero, kk, one, zero), zero);
            const vd small = vd_select_lt(zero, vd_fma(s, s, q), one, tiny);
            const vd lost = vd_select_lt(q, vd_set1(0x1p-90), small, zero),
                     overflowed = vd_select_lt(q, vd_set1(3e38), zero, one);
            /* lanes past the last column hold anything, and must not choose the way that is taken */
            bad = vd_add(bad, vd_select_lt(vd_load_f64(lanes), vd_set1((double)(columns - c)),
                                           vd_add(lost, overflowed), zero));
        }
        if (vd_hsum(bad) != 0)
            return false;
    }
    const vd weight = vd_set1(n / (before + n)), cross = vd_set1(before * (n / (before + n)));
    for (size_t c = 0; c < columns; c += 8) {
        const vd s = REAL(folded)(sums + c, columns, rows), q = REAL(folded)(squares + c, columns, rows);
        const vd chunk_mean = vd_fma(s, inverse, FROM(shifts + c));
        const vd exact = vd_fma(vd_mul(s, s), minus_inverse, q), chunk_m2 = vd_select_lt(exact, zero, zero, exact);
        if (before > 0) {
            const vd old = vd_load_f64(mean + c), delta = vd_sub(chunk_mean, old);
            vd_store_f64(mean + c, vd_fma(delta, weight, old));
            vd_store_f64(m2 + c, vd_add(vd_load_f64(m2 + c), vd_fma(vd_mul(delta, delta), cross, chunk_m2)));
        } else {
            vd_store_f64(mean + c, chunk_mean);
            vd_store_f64(m2 + c, chunk_m2);
        }
        TO(shifts + c, chunk_mean);
    }
    return true;
}

/* Sums of norm groups of n values become their statistics: mean and m2 hold sums of u - shift and of its square, and
 * then the mean and the sum of squares about it; u is normalized as (u - shift)*rstd + rest. False, and nothing
 * changed, where an f32 sum of squares overflowed or may have lost digits. */
static bool REAL(statistics)(const struct normfuse_norm_groups *s)
{
    static const double lanes[8] = {0, 1, 2, 3, 4, 5, 6, 7};
    R *shift = s->shift, *rstd = s->rstd, *rest = s->rest;
    const vd zero = vd_set1(0), one = vd_set1(1), inverse = vd_set1(1 / s->n);
    vd bad = zero;
    for (size_t i = 0; i < s->sets && sizeof(R) == sizeof(float); i += 8) {
        const vd square = vd_load_f64(s->m2 + i), is_large = vd_select_lt(square, vd_set1(3e38), zero, one);
        const vd is_out = vd_select_le(vd_set1(0x1p-90), square, is_large, one);
        bad = vd_add(bad, vd_select_lt(vd_load_f64(lanes), vd_set1((double)(s->sets - i)), is_out, zero));
    }
    if (vd_hsum(bad) != 0)
        return false;
    for (size_t i = 0; i < (s->sets + 15) / 16 * 16; i += 8) { /* and lanes of positions behind the last one */
        const vd sum = s->centred ? vd_load_f64(s->mean + i) : zero;
        const vd mean = s->centred ? vd_fma(sum, inverse, FROM(shift + i)) : zero;
        vd m2 = vd_fma(vd_mul(sum, sum), vd_neg(inverse), vd_load_f64(s->m2 + i));
        m2 = vd_select_lt(m2, zero, zero, m2);
        const vd root = s->eps_added ? vd_sqrt(vd_fma(m2, inverse, vd_set1(s->eps)))
                                     : vd_max(vd_set1(s->eps), vd_sqrt(m2));
        const vd of_one = vd_div(s->eps_added ? one : vd_set1(sqrt(s->n)), root);
        vd_store_f64(s->mean + i, mean);
        vd_store_f64(s->m2 + i, m2);
        vd_store_f64(s->double_rstd + i, of_one);
        TO(shift + i, mean);
        TO(rstd + i, of_one);
        TO(rest + i, vd_mul(vd_sub(FROM(shift + i), mean), of_one));
    }
    return true;
}

#undef R
#undef REAL
#undef FROM
#undef TO
