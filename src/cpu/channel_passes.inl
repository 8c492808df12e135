/* SPDX-License-Identifier: MIT
 *
 * channel_passes.inl - norm over channels between tensors of one dtype and the compute type (kernels.h says what each
 * function does). The end of passes.inl, whose names it uses.
 *
 * Under columns a position's values are read where they are, once from memory and then from the L1 cache. A norm group is
 * summed by itself: its value i belongs to lane i % (2*W), and vectors end with it. Under rows a position is a lane. */

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

/* Sums of x - shift and, where wanted, of its square; out of line in plain C, for its size. */
#if defined(NORMFUSE_NO_INLINE_FORMS)
static __attribute__((noinline))
#else
BODY
#endif
void FN(sums_of_group)(const T *x, size_t n, size_t readable, R shift, double *sum, double *square, bool squares)
{
    const V k = OP(set1)(shift), zero = OP(set1)(0);
    *sum = *square = 0;
    for (size_t i = 0; i < n;) {
        const size_t end = n - i < NORMFUSE_SMALL_CHUNK ? n : i + NORMFUSE_SMALL_CHUNK;
        V sum0 = zero, sum1 = zero, square0 = zero, square1 = zero;
        for (; i + 2 * W <= end; i += 2 * W) {
            const V d0 = OP(sub)(LOAD(x + i), k), d1 = OP(sub)(LOAD(x + i + W), k);
            sum0 = OP(add)(sum0, d0);
            sum1 = OP(add)(sum1, d1);
            if (squares) {
                square0 = OP(fma)(d0, d0, square0);
                square1 = OP(fma)(d1, d1, square1);
            }
        }
        for (bool second = false; i < end; i += end - i < W ? end - i : W, second = true) {
            const V d = OP(leading)(OP(sub)(FN(values_at)(x + i, end - i, readable - i), k), end - i);
            if (second) {
                sum1 = OP(add)(sum1, d);
                square1 = OP(fma)(d, d, square1);
            } else {
                sum0 = OP(add)(sum0, d);
                square0 = OP(fma)(d, d, square0);
            }
        }
        *sum += (double)OP(hsum)(OP(add)(sum0, sum1));
        if (squares)
            *square += (double)OP(hsum)(OP(add)(square0, square1));
    }
}

static void FN(moments_of_positions)(const struct normfuse_channels *s)
{
    const size_t n = s->channels;
    R *shift = s->shift, *sums = s->sum, *squares = s->square;
    for (size_t r = 0, at = 0; r < s->positions; r++) {
        const T *x = (const T *)s->x + (ptrdiff_t)r * s->x_stride;
        size_t readable = FN(readable_from)(s, r, s->x_stride);
        for (size_t j = 0; j < s->groups; j++, at++, x += n, readable -= n) {
            double sum = 0, square = 0;
            R k = 0;
            if (s->centred) {
                FN(sums_of_group)(x, n, readable, 0, &sum, &square, false);
                const R mean = (R)(sum / (double)n);
                k = mean - mean == 0 ? mean : 0;
            }
            FN(sums_of_group)(x, n, readable, k, &sum, &square, true);
            shift[at] = k;
            sums[at] = (R)sum;
            squares[at] = (R)square;
        }
    }
}

/* The activation is a uniform branch: loops of their own would be 40 KB of the library. */
static void FN(apply_to_positions)(const struct normfuse_channels *arguments)
{
    const struct normfuse_channels local = *arguments, *s = &local;
    const size_t n = s->channels;
    const bool is_silu = s->activation == NORMFUSE_SILU;
    for (size_t r = 0, at = 0; r < s->positions; r++) {
        const T *x = (const T *)s->x + (ptrdiff_t)r * s->x_stride;
        const T *post_add = s->post_add && !s->z ? (const T *)s->post_add + (ptrdiff_t)r * s->post_add_stride : NULL;
        T *y = s->z ? NULL : (T *)s->y + (ptrdiff_t)r * s->y_stride;
        R *z = s->z ? (R *)s->z + r * s->groups * n : NULL;
        const R *weight = s->weight, *bias = s->bias;
        const size_t readable = FN(readable_from)(s, r, s->x_stride);
        for (size_t j = 0, c = 0; j < s->groups; j++, at++) {
            const OP(normalization) of = OP(normalization_of)(s->shift, s->rstd, s->rest, at);
            const size_t end = c + n;
            for (; c + W <= end; c += W) {
                AHEAD(x + c, s->ahead);
                V v = OP(fma)(OP(normalized)(LOAD(x + c), of), LOAD_R(weight + c), LOAD_R(bias + c));
                if (z) {
                    STORE_R(z + c, v);
                    continue;
                }
                if (post_add)
                    v = OP(add)(v, LOAD(post_add + c));
                if (is_silu)
                    v = OP(activation)(NORMFUSE_SILU, v, v);
                FN(write)(y + c, v, W, s->stream);
            }
            if (c < end) { /* of z */
                const V h = OP(normalized)(FN(values_at)(x + c, end - c, readable - c), of);
                STORE_R(z + c, OP(fma)(h, LOAD_R(weight + c), LOAD_R(bias + c)));
            }
            c = end;
        }
    }
}

static void FN(sums_of_positions)(const struct normfuse_channels *arguments)
{
    const struct normfuse_channels local = *arguments, *s = &local;
    const size_t n = s->channels;
    const V zero = OP(set1)(0);
    for (size_t r = 0, at = 0; r < s->positions; r++) {
        const T *x = (const T *)s->x + (ptrdiff_t)r * s->x_stride;
        const R *gradient = (const R *)s->gradient + (ptrdiff_t)r * s->gradient_stride, *weight = s->weight,
                *bias = s->bias;
        R *const kept = s->kept ? (R *)s->kept + r * s->groups * n : NULL;
        R *sum_bias = s->sum_bias, *sum_weight = s->sum_weight;
        const size_t readable = FN(readable_from)(s, r, s->x_stride), real = FN(readable_from)(s, r, s->gradient_stride);
        for (size_t j = 0, c = 0; j < s->groups; j++, at++) {
            const OP(normalization) of = OP(normalization_of)(s->shift, s->rstd, s->rest, at);
            double all = 0, all_squares = 0;
            for (const size_t group_end = c + n; c < group_end;) {
                const size_t end = group_end - c < NORMFUSE_SMALL_CHUNK ? group_end : c + NORMFUSE_SMALL_CHUNK;
                V sum0 = zero, sum1 = zero, square0 = zero, square1 = zero; /* those of odd and even vectors change places */
                for (; c < end; c += end - c < W ? end - c : W) {
                    const size_t m = end - c;
                    AHEAD(x + c, s->ahead);
                    AHEAD(gradient + c, s->ahead_gradient);
                    const V h = OP(leading)(OP(normalized)(FN(values_at)(x + c, m, readable - c), of), m);
                    V g = OP(leading)(FN(reals_at)(gradient + c, m, real - c), m);
                    if (kept) {
                        const V z = OP(fma)(h, LOAD_R(weight + c), LOAD_R(bias + c));
                        g = OP(leading)(OP(activation_gradient)(NORMFUSE_SILU, z, g, z), m);
                        FN(store_sum)(kept + c, g, m < W ? m : W);
                    }
                    const V scaled = OP(leading)(OP(mul)(g, LOAD_R(weight + c)), m); /* a weight behind the last one may be NaN */
                    STORE_R(sum_bias + c, OP(add)(LOAD_R(sum_bias + c), g));
                    STORE_R(sum_weight + c, OP(fma)(g, h, LOAD_R(sum_weight + c)));
                    const V sum = OP(add)(sum0, scaled), square = OP(fma)(scaled, h, square0);
                    sum0 = sum1;
                    square0 = square1;
                    sum1 = sum;
                    square1 = square;
                }
                all += (double)OP(hsum)(OP(add)(sum0, sum1));
                all_squares += (double)OP(hsum)(OP(add)(square0, square1));
            }
            ((R *)s->sum)[at] = (R)all;
            ((R *)s->square)[at] = (R)all_squares;
        }
    }
}

static void FN(dx_of_positions)(const struct normfuse_channels *arguments)
{
    const struct normfuse_channels local = *arguments, *s = &local;
    const size_t n = s->channels;
    for (size_t r = 0, at = 0; r < s->positions; r++) {
        const T *x = (const T *)s->x + (ptrdiff_t)r * s->x_stride, *du = (const T *)s->post_add;
        const R *gradient = (const R *)s->gradient + (ptrdiff_t)r * s->gradient_stride, *weight = s->weight;
        T *dx = s->z ? NULL : (T *)s->y + (ptrdiff_t)r * s->y_stride;
        R *z = s->z ? (R *)s->z + r * s->groups * n : NULL;
        const size_t readable = FN(readable_from)(s, r, s->x_stride), real = FN(readable_from)(s, r, s->gradient_stride);
        if (du)
            du += (ptrdiff_t)r * s->post_add_stride;
        for (size_t j = 0, c = 0; j < s->groups; j++, at++) {
            const OP(normalization) of = OP(normalization_of)(s->shift, s->rstd, s->rest, at);
            const V slope = OP(set1)(((const R *)s->slope)[at]), offset = OP(set1)(((const R *)s->offset)[at]);
            for (const size_t end = c + n; c < end; c += end - c < W ? end - c : W) {
                const V h = OP(normalized)(FN(values_at)(x + c, end - c, readable - c), of);
                const V g = FN(reals_at)(gradient + c, end - c, real - c);
                const V v = OP(fma)(of.rstd, OP(mul)(g, LOAD_R(weight + c)), OP(fma)(slope, h, offset));
                if (z)
                    STORE_R(z + c, v);
                else
                    FN(write)(dx + c, du ? OP(add)(v, LOAD(du + c)) : v, W, s->stream);
            }
        }
    }
}

/* ---- channels: rows ---- */

BODY void FN(load_channel)(const struct normfuse_channels *s, size_t r, const int32_t loads)
{
    const T *x = (const T *)s->x + (ptrdiff_t)r * s->x_stride;
    R *u = (R *)s->tile + r * s->pitch, *sums = loads == NORMFUSE_LOAD_SQUARES ? s->square : s->sum;
    R *z = s->z ? (R *)s->z + r * s->z_pitch : NULL;
    const V zero = OP(set1)(0), weight = OP(set1)(((const R *)s->weight)[r]), bias = OP(set1)(((const R *)s->bias)[r]);
    const bool starts = r == 0 && !s->continues;
    const size_t whole = s->positions / W * W, width = s->width;
    for (size_t p = 0; p < width; p += W) {
        AHEAD_L2(x + p, s->ahead);
        V v = p < whole ? LOAD(x + p) : p < s->positions ? LOAD_PART(x + p, s->positions - p, zero) : zero;
        if (loads == NORMFUSE_LOAD_NORMALIZED) {
            v = OP(normalized)(v, OP(normalization_at)(s->shift, s->rstd, s->rest, p));
            if (z)
                STORE_R(z + p, OP(fma)(v, weight, bias));
        } else {
            const V sum = starts ? zero : LOAD_R(sums + p);
            STORE_R(sums + p, loads == NORMFUSE_LOAD_SQUARES ? OP(fma)(v, v, sum) : OP(add)(sum, v));
        }
        STORE_R(u + p, v);
    }
}

static void FN(load_channels)(const struct normfuse_channels *arguments)
{
    const struct normfuse_channels local = *arguments, *s = &local;
    for (size_t r = 0; r < s->channels; r++)
        switch (s->loads) {
        case NORMFUSE_LOAD_SUMS: FN(load_channel)(s, r, NORMFUSE_LOAD_SUMS); break;
        case NORMFUSE_LOAD_SQUARES: FN(load_channel)(s, r, NORMFUSE_LOAD_SQUARES); break;
        default: FN(load_channel)(s, r, NORMFUSE_LOAD_NORMALIZED);
        }
}

/* MAKE(p, n) gives the values at positions [p, p + n) of a row, which are written to y, or whole to z. */
#define FOR_EACH_POSITION(y, z, MAKE)                                                          \
    do {                                                                                       \
        const size_t n = z ? s->width : s->positions, head = s->stream && !z ? FN(head)(y, n) : 0; \
        const size_t lines = s->stream && !z ? head + (n - head) / LINE * LINE : 0;            \
        for (size_t p = 0, m; p < n; p += m) {                                                 \
            m = (p < head ? head : n) - p;                                                     \
            m = m < W ? m : W;                                                                 \
            const V v = MAKE(p, m);                                                            \
            if (z)                                                                             \
                STORE_R(z + p, v);                                                             \
            else                                                                               \
                FN(write)(y + p, v, m, p >= head && p < lines);                                \
        }                                                                                      \
    } while (0)

BODY V FN(y_of_channel)(const struct normfuse_channels *s, const R *u, const T *post_add, size_t p, size_t n, V weight,
                        V bias)
{
    const V h = OP(normalized)(LOAD_R(u + p), OP(normalization_at)(s->shift, s->rstd, s->rest, p));
    V z = OP(fma)(h, weight, bias);
    if (post_add)
        z = OP(add)(z, FN(load_values)(post_add + p, n, z));
    return s->activation == NORMFUSE_SILU && !s->z ? OP(activation)(NORMFUSE_SILU, z, z) : z;
}

static void FN(apply_to_channels)(const struct normfuse_channels *arguments)
{
    const struct normfuse_channels local = *arguments, *s = &local;
    for (size_t r = 0; r < s->channels; r++) {
        const R *u = (const R *)s->tile + r * s->pitch;
        const T *post_add = s->post_add && !s->z ? (const T *)s->post_add + (ptrdiff_t)r * s->post_add_stride : NULL;
        T *y = s->z ? NULL : (T *)s->y + (ptrdiff_t)r * s->y_stride;
        R *z = s->z ? (R *)s->z + r * s->z_pitch : NULL;
        const V weight = OP(set1)(((const R *)s->weight)[r]), bias = OP(set1)(((const R *)s->bias)[r]);
#define Y_OF_CHANNEL(p, n) FN(y_of_channel)(s, u, post_add, p, n, weight, bias)
        FOR_EACH_POSITION(y, z, Y_OF_CHANNEL);
#undef Y_OF_CHANNEL
    }
}

BODY V FN(dx_of_channel)(const struct normfuse_channels *s, const R *g, const R *h, const T *du, size_t p, size_t n,
                         V weight)
{
    const V rest = OP(fma)(LOAD_R((const R *)s->slope + p), LOAD_R(h + p), LOAD_R((const R *)s->offset + p));
    const V v = OP(fma)(LOAD_R((const R *)s->factor + p), OP(mul)(LOAD_R(g + p), weight), rest);
    return du ? OP(add)(v, FN(load_values)(du + p, n, v)) : v;
}

static void FN(dx_of_channels)(const struct normfuse_channels *arguments)
{
    const struct normfuse_channels local = *arguments, *s = &local;
    for (size_t r = 0; r < s->channels; r++) {
        const R *g = (const R *)s->gradient + r * s->pitch, *h = (const R *)s->tile + r * s->pitch;
        const T *du = s->post_add && !s->z ? (const T *)s->post_add + (ptrdiff_t)r * s->post_add_stride : NULL;
        T *dx = s->z ? NULL : (T *)s->y + (ptrdiff_t)r * s->y_stride;
        R *z = s->z ? (R *)s->z + r * s->z_pitch : NULL;
        const V weight = OP(set1)(((const R *)s->weight)[r]);
#define DX_OF_CHANNEL(p, n) FN(dx_of_channel)(s, g, h, du, p, n, weight)
        FOR_EACH_POSITION(dx, z, DX_OF_CHANNEL);
#undef DX_OF_CHANNEL
    }
}
#undef FOR_EACH_POSITION
