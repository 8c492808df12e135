/* SPDX-License-Identifier: MIT
 *
 * channel_passes.inl - norm over channels between tensors of one dtype and the compute type (kernels.h says what each
 * function does). The end of passes.inl, whose names it uses.
 *
 * Under columns a position's values are read where they are, once from memory and then from the L1 cache. A norm group is
 * summed by itself: its value i belongs to lane i % (2*W), and vectors end with it. Under rows a position is a lane. */

/* The first n lanes of v, the others 0. */
BODY V FN(first)(V v, size_t n)
{
    static const R lanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return n >= W ? v : OP(select_lt)(LOAD_R(lanes), OP(set1)((R)n), v, OP(set1)(0));
}

/* A vector at p, of whose values n are a norm group's and `readable` are in memory; lanes behind the norm group hold anything. */
BODY V FN(values_at)(const T *p, size_t n, size_t readable)
{
    return n >= W || readable >= W ? LOAD(p) : LOAD_PART(p, n, OP(set1)(0));
}
BODY V FN(reals_at)(const R *p, size_t n, size_t readable)
{
    return n >= W || readable >= W ? LOAD_R(p) : LOAD_PART_R(p, n);
}

/* ---- positions: columns ---- */

/* Values from position r's first one to the end of those that lie one after the other. */
BODY size_t FN(readable_from)(const struct normfuse_channels *s, size_t r, ptrdiff_t stride)
{
    const size_t row = s->groups * s->channels;
    return stride == (ptrdiff_t)row ? (s->positions - r) * row : row;
}

/* Onto the sum of x - k, and of its square where wanted. */
BODY void FN(add_distances)(const T *x, size_t n, size_t readable, V k, V *sum, V *square, const bool squares)
{
    const V d = FN(first)(OP(sub)(FN(values_at)(x, n, readable), k), n);
    *sum = OP(add)(*sum, d);
    if (squares)
        *square = OP(fma)(d, d, *square);
}

BODY void FN(sums_of_group)(const T *x, size_t n, size_t readable, R shift, double *sum, double *square, const bool squares)
{
    const V k = OP(set1)(shift), zero = OP(set1)(0);
    *sum = *square = 0;
    for (size_t i = 0; i < n;) {
        const size_t end = n - i < NORMFUSE_SMALL_CHUNK ? n : i + NORMFUSE_SMALL_CHUNK;
        V sum0 = zero, sum1 = zero, square0 = zero, square1 = zero;
        for (; i + 2 * W <= end; i += 2 * W) {
            FN(add_distances)(x + i, W, W, k, &sum0, &square0, squares);
            FN(add_distances)(x + i + W, W, W, k, &sum1, &square1, squares);
        }
        if (i < end)
            FN(add_distances)(x + i, end - i, readable - i, k, &sum0, &square0, squares);
        if (i + W < end)
            FN(add_distances)(x + i + W, end - i - W, readable - i - W, k, &sum1, &square1, squares);
        i = end;
        *sum += (double)OP(hsum)(OP(add)(sum0, sum1));
        if (squares)
            *square += (double)OP(hsum)(OP(add)(square0, square1));
    }
}

/* The same of at most 2*W values about their mean, which is returned. */
BODY R FN(sums_of_short_group)(const T *x, size_t n, size_t readable, double inverse, R *sum, R *square)
{
    const V zero = OP(set1)(0), x0 = FN(first)(FN(values_at)(x, n, readable), n);
    const V x1 = n > W ? FN(first)(FN(values_at)(x + W, n - W, readable - W), n - W) : zero;
    const R mean = (R)((double)OP(hsum)(OP(add)(x0, x1)) * inverse), shift = mean - mean == 0 ? mean : 0;
    const V k = OP(set1)(shift), d0 = FN(first)(OP(sub)(x0, k), n), d1 = n > W ? FN(first)(OP(sub)(x1, k), n - W) : zero;
    *sum = OP(hsum)(OP(add)(d0, d1));
    *square = OP(hsum)(OP(add)(OP(mul)(d0, d0), OP(mul)(d1, d1)));
    return shift;
}

static void FN(moments_of_positions)(const struct normfuse_channels *s)
{
    const size_t n = s->channels;
    const double inverse = 1 / (double)n;
    R *shift = s->shift, *sums = s->sum, *squares = s->square;
    for (size_t r = 0, at = 0; r < s->positions; r++) {
        const T *x = (const T *)s->x + (ptrdiff_t)r * s->x_stride;
        size_t readable = FN(readable_from)(s, r, s->x_stride);
        for (size_t j = 0; j < s->groups; j++, at++, x += n, readable -= n) {
            double sum, square;
            if (s->centred && n <= 2 * W) {
                shift[at] = FN(sums_of_short_group)(x, n, readable, inverse, sums + at, squares + at);
                continue;
            }
            R k = 0;
            if (s->centred) {
                FN(sums_of_group)(x, n, readable, 0, &sum, &square, false);
                const R mean = (R)(sum * inverse);
                k = mean - mean == 0 ? mean : 0;
            }
            FN(sums_of_group)(x, n, readable, k, &sum, &square, true);
            shift[at] = k;
            sums[at] = (R)sum;
            squares[at] = (R)square;
        }
    }
}

BODY void FN(apply_to_positions_as)(const struct normfuse_channels *s, const int form, const bool to_z)
{
    const size_t n = s->channels;
    const V parameter = OP(set1)((R)s->act_param);
    for (size_t r = 0, at = 0; r < s->positions; r++) {
        const T *x = (const T *)s->x + (ptrdiff_t)r * s->x_stride, *post_add = (const T *)s->post_add;
        T *y = (T *)s->y + (to_z ? 0 : (ptrdiff_t)r * s->y_stride);
        R *z = (R *)s->z + (to_z ? r * s->groups * n : 0);
        const R *weight = s->weight, *bias = s->bias;
        size_t readable = FN(readable_from)(s, r, s->x_stride);
        if (post_add)
            post_add += (ptrdiff_t)r * s->post_add_stride;
        for (size_t j = 0, c = 0; j < s->groups; j++, at++) {
            const V k = OP(set1)(((const R *)s->shift)[at]), rstd = OP(set1)(((const R *)s->rstd)[at]);
            const V rest = OP(set1)(((const R *)s->rest)[at]);
            for (const size_t end = c + n; c < end; c += end - c < W ? end - c : W) {
                AHEAD(x + c, s->ahead);
                const V h = OP(fma)(OP(sub)(FN(values_at)(x + c, end - c, readable - c), k), rstd, rest);
                const V v = OP(fma)(h, LOAD_R(weight + c), LOAD_R(bias + c));
                if (to_z)
                    STORE_R(z + c, v);
                else
                    FN(write)(y + c, OP(activation)(form, parameter, post_add ? OP(add)(v, LOAD(post_add + c)) : v), W, s->stream);
            }
        }
    }
}

static void FN(apply_to_positions)(const struct normfuse_channels *arguments)
{
    const struct normfuse_channels local = *arguments, *s = &local;
    if (s->z)
        FN(apply_to_positions_as)(s, NORMFUSE_IDENTITY, true);
    else if (s->activation == NORMFUSE_SILU)
        FN(apply_to_positions_as)(s, NORMFUSE_SILU, false);
    else
        FN(apply_to_positions_as)(s, NORMFUSE_IDENTITY, false);
}

static void FN(sums_of_positions)(const struct normfuse_channels *arguments)
{
    const struct normfuse_channels local = *arguments, *s = &local;
    const size_t n = s->channels;
    const V zero = OP(set1)(0);
    for (size_t r = 0, at = 0; r < s->positions; r++) {
        const T *x = (const T *)s->x + (ptrdiff_t)r * s->x_stride;
        const R *gradient = (const R *)s->gradient + (ptrdiff_t)r * s->gradient_stride, *weight = s->weight;
        R *sum_bias = s->sum_bias, *sum_weight = s->sum_weight;
        const size_t readable = FN(readable_from)(s, r, s->x_stride), real = FN(readable_from)(s, r, s->gradient_stride);
        for (size_t j = 0, c = 0; j < s->groups; j++, at++) {
            const V k = OP(set1)(((const R *)s->shift)[at]), rstd = OP(set1)(((const R *)s->rstd)[at]);
            const V rest = OP(set1)(((const R *)s->rest)[at]);
            double sum = 0, square = 0;
            for (const size_t group_end = c + n; c < group_end;) {
                const size_t end = group_end - c < NORMFUSE_SMALL_CHUNK ? group_end : c + NORMFUSE_SMALL_CHUNK;
                V sums[2] = {zero, zero}, squares[2] = {zero, zero};
                for (size_t lane = 0; c < end; c += end - c < W ? end - c : W, lane ^= 1) {
                    const size_t m = end - c;
                    AHEAD(x + c, s->ahead);
                    AHEAD(gradient + c, s->ahead_gradient);
                    const V h = FN(first)(OP(fma)(OP(sub)(FN(values_at)(x + c, m, readable - c), k), rstd, rest), m);
                    const V g = FN(first)(FN(reals_at)(gradient + c, m, real - c), m);
                    const V scaled = FN(first)(OP(mul)(g, LOAD_R(weight + c)), m); /* a weight behind the last one may be NaN */
                    STORE_R(sum_bias + c, OP(add)(LOAD_R(sum_bias + c), g));
                    STORE_R(sum_weight + c, OP(fma)(g, h, LOAD_R(sum_weight + c)));
                    sums[lane] = OP(add)(sums[lane], scaled);
                    squares[lane] = OP(fma)(scaled, h, squares[lane]);
                }
                sum += (double)OP(hsum)(OP(add)(sums[0], sums[1]));
                square += (double)OP(hsum)(OP(add)(squares[0], squares[1]));
            }
            ((R *)s->sum)[at] = (R)sum;
            ((R *)s->square)[at] = (R)square;
        }
    }
}

BODY void FN(dx_of_positions_as)(const struct normfuse_channels *s, const bool to_z)
{
    const size_t n = s->channels;
    for (size_t r = 0, at = 0; r < s->positions; r++) {
        const T *x = (const T *)s->x + (ptrdiff_t)r * s->x_stride, *du = (const T *)s->post_add;
        const R *gradient = (const R *)s->gradient + (ptrdiff_t)r * s->gradient_stride, *weight = s->weight;
        T *dx = (T *)s->y + (to_z ? 0 : (ptrdiff_t)r * s->y_stride);
        R *z = (R *)s->z + (to_z ? r * s->groups * n : 0);
        const size_t readable = FN(readable_from)(s, r, s->x_stride), real = FN(readable_from)(s, r, s->gradient_stride);
        if (du)
            du += (ptrdiff_t)r * s->post_add_stride;
        for (size_t j = 0, c = 0; j < s->groups; j++, at++) {
            const V k = OP(set1)(((const R *)s->shift)[at]), rstd = OP(set1)(((const R *)s->rstd)[at]);
            const V rest = OP(set1)(((const R *)s->rest)[at]), slope = OP(set1)(((const R *)s->slope)[at]);
            const V offset = OP(set1)(((const R *)s->offset)[at]);
            for (const size_t end = c + n; c < end; c += end - c < W ? end - c : W) {
                const V h = OP(fma)(OP(sub)(FN(values_at)(x + c, end - c, readable - c), k), rstd, rest);
                const V g = FN(reals_at)(gradient + c, end - c, real - c);
                const V v = OP(fma)(rstd, OP(mul)(g, LOAD_R(weight + c)), OP(fma)(slope, h, offset));
                if (to_z)
                    STORE_R(z + c, v);
                else
                    FN(write)(dx + c, du ? OP(add)(v, LOAD(du + c)) : v, W, s->stream);
            }
        }
    }
}

static void FN(dx_of_positions)(const struct normfuse_channels *arguments)
{
    const struct normfuse_channels local = *arguments, *s = &local;
    if (s->z)
        FN(dx_of_positions_as)(s, true);
    else
        FN(dx_of_positions_as)(s, false);
}

/* ---- channels: rows ---- */

static void FN(load_channels)(const struct normfuse_channels *arguments)
{
    const struct normfuse_channels local = *arguments, *s = &local;
    const R *shift = s->shift, *rstd = s->rstd, *rest = s->rest;
    for (size_t r = 0; r < s->channels; r++) {
        const T *x = (const T *)s->x + (ptrdiff_t)r * s->x_stride;
        R *u = (R *)s->tile + r * s->pitch, *sums = s->loads == NORMFUSE_LOAD_SQUARES ? s->square : s->sum;
        R *z = s->z ? (R *)s->z + r * s->pitch : NULL;
        const V weight = OP(set1)(((const R *)s->weight)[r]), bias = OP(set1)(((const R *)s->bias)[r]);
        for (size_t p = 0; p < s->pitch; p += W) {
            AHEAD(x + p, s->ahead);
            V v = p + W <= s->positions ? LOAD(x + p) : p < s->positions ? LOAD_PART(x + p, s->positions - p, OP(set1)(0)) : OP(set1)(0);
            if (s->loads == NORMFUSE_LOAD_NORMALIZED) {
                v = OP(fma)(OP(sub)(v, LOAD_R(shift + p)), LOAD_R(rstd + p), LOAD_R(rest + p));
                if (z)
                    STORE_R(z + p, OP(fma)(v, weight, bias));
            } else {
                const V sum = r == 0 ? OP(set1)(0) : LOAD_R(sums + p);
                STORE_R(sums + p, s->loads == NORMFUSE_LOAD_SQUARES ? OP(fma)(v, v, sum) : OP(add)(sum, v));
            }
            STORE_R(u + p, v);
        }
    }
}

/* Writes v at position p, of a row whose whole cache lines are [head, lines): the first n lanes. */
BODY void FN(write_position)(T *y, size_t p, size_t n, V v, bool stream)
{
    if (stream)
        STREAM(y + p, v);
    else
        FN(store_values)(y + p, v, n);
}

/* BODY_OF(p, n) makes the values at positions [p, p + n) of a row from y on and writes them. */
#define FOR_EACH_POSITION(y, BODY_OF)                                                                     \
    do {                                                                                                  \
        const size_t head = s->stream ? FN(head)(y, s->positions) : 0;                                    \
        const size_t lines = s->stream ? head + (s->positions - head) / LINE * LINE : 0;                  \
        for (size_t p = 0, m; p < s->positions; p += m) {                                                 \
            const size_t end = p < head ? head : s->positions;                                            \
            const bool is_line = p >= head && p < lines;                                                  \
            m = end - p < W ? end - p : W;                                                                \
            FN(write_position)(y, p, m, BODY_OF(p, m), is_line);                                          \
        }                                                                                                 \
    } while (0)

BODY V FN(y_of_channel)(const struct normfuse_channels *s, const R *u, const T *post_add, size_t p, size_t n, V weight, V bias,
                        V parameter, const int form)
{
    const V h = OP(fma)(OP(sub)(LOAD_R(u + p), LOAD_R((const R *)s->shift + p)), LOAD_R((const R *)s->rstd + p),
                        LOAD_R((const R *)s->rest + p));
    V z = OP(fma)(h, weight, bias);
    if (post_add)
        z = OP(add)(z, FN(load_values)(post_add + p, n, z));
    return OP(activation)(form, parameter, z);
}

BODY void FN(apply_to_channels_as)(const struct normfuse_channels *s, const int form)
{
    const V parameter = OP(set1)((R)s->act_param);
    for (size_t r = 0; r < s->channels; r++) {
        const R *u = (const R *)s->tile + r * s->pitch;
        const T *post_add = s->post_add ? (const T *)s->post_add + (ptrdiff_t)r * s->post_add_stride : NULL;
        T *y = (T *)s->y + (ptrdiff_t)r * s->y_stride;
        const V weight = OP(set1)(((const R *)s->weight)[r]), bias = OP(set1)(((const R *)s->bias)[r]);
        if (s->z) {
            for (size_t p = 0; p < s->pitch; p += W)
                STORE_R((R *)s->z + r * s->pitch + p, FN(y_of_channel)(s, u, NULL, p, W, weight, bias, parameter, NORMFUSE_IDENTITY));
            continue;
        }
#define Y_OF_CHANNEL(p, n) FN(y_of_channel)(s, u, post_add, p, n, weight, bias, parameter, form)
        FOR_EACH_POSITION(y, Y_OF_CHANNEL);
#undef Y_OF_CHANNEL
    }
}

static void FN(apply_to_channels)(const struct normfuse_channels *arguments)
{
    const struct normfuse_channels local = *arguments, *s = &local;
    if (s->activation == NORMFUSE_SILU)
        FN(apply_to_channels_as)(s, NORMFUSE_SILU);
    else
        FN(apply_to_channels_as)(s, NORMFUSE_IDENTITY);
}

BODY V FN(dx_of_channel)(const struct normfuse_channels *s, const R *g, const R *h, const T *du, size_t p, size_t n, V weight)
{
    const V rest = OP(fma)(LOAD_R((const R *)s->slope + p), LOAD_R(h + p), LOAD_R((const R *)s->offset + p));
    const V v = OP(fma)(LOAD_R((const R *)s->rstd + p), OP(mul)(LOAD_R(g + p), weight), rest);
    return du ? OP(add)(v, FN(load_values)(du + p, n, v)) : v;
}

static void FN(dx_of_channels)(const struct normfuse_channels *arguments)
{
    const struct normfuse_channels local = *arguments, *s = &local;
    for (size_t r = 0; r < s->channels; r++) {
        const R *g = (const R *)s->gradient + r * s->pitch, *h = (const R *)s->tile + r * s->pitch;
        const T *du = s->post_add ? (const T *)s->post_add + (ptrdiff_t)r * s->post_add_stride : NULL;
        T *dx = (T *)s->y + (ptrdiff_t)r * s->y_stride;
        const V weight = OP(set1)(((const R *)s->weight)[r]);
        if (s->z) {
            for (size_t p = 0; p < s->pitch; p += W)
                STORE_R((R *)s->z + r * s->pitch + p, FN(dx_of_channel)(s, g, h, NULL, p, W, weight));
            continue;
        }
#define DX_OF_CHANNEL(p, n) FN(dx_of_channel)(s, g, h, du, p, n, weight)
        FOR_EACH_POSITION(dx, DX_OF_CHANNEL);
#undef DX_OF_CHANNEL
    }
}
#undef FOR_EACH_POSITION
