/* SPDX-License-Identifier: MIT
 *
 * channel_passes.inl - norm over channels between tensors of one dtype and the compute type (kernels.h says what each
 * function does). The end of passes.inl, whose names it uses.
 *
 * Under columns a position's values are read where they are, once from memory and then from the L1 cache. A norm group is
 * summed by itself: its value i belongs to lane i % (2*W), and vectors end with it. Under rows a position is a lane. */

/* Out of line in plain C, for its size. */
#if defined(NORMFUSE_NO_INLINE_FORMS)
#define PART static __attribute__((noinline))
#else
#define PART BODY
#endif

/* A vector at p, of whose values n are a norm group's and `readable` are in memory; lanes behind the norm group hold anything. */
PART V FN(values_at)(const T *p, size_t n, size_t readable)
{
    return n >= W || readable >= W ? LOAD(p) : LOAD_PART(p, n, OP(set1)(0));
}
PART V FN(reals_at)(const R *p, size_t n, size_t readable)
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

/* Sums of x - shift and, where wanted, of its square. */
PART void FN(sums_of_group)(const T *x, size_t n, size_t readable, R shift, double *sum, double *square, bool squares)
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

/* Norm group `at` of position r, for each of positions [from, to): `c` is its first channel, `end` the one behind it. */
#define FOR_EACH_NORM_GROUP(s)                                                                          \
    for (size_t r = from, at = from * (s)->groups, n = (s)->channels; r < to; r++)                      \
        for (size_t c = 0, end = n; c < (s)->groups * n; c = end, end += n, at++)

/* The mean of each norm group, which its values are taken about. */
static void FN(position_shifts)(const struct normfuse_channels *s, size_t from, size_t to)
{
    FOR_EACH_NORM_GROUP(s)
    {
        double sum = 0, none;
        if (s->centred)
            FN(sums_of_group)((const T *)s->x + (ptrdiff_t)r * s->x_stride + c, n,
                              FN(readable_from)(s, r, s->x_stride) - c, 0, &sum, &none, false);
        const R mean = (R)(sum / (double)n);
        ((R *)s->shift)[at] = mean - mean == 0 ? mean : 0;
    }
}

static void FN(position_moments)(const struct normfuse_channels *s, size_t from, size_t to)
{
    FOR_EACH_NORM_GROUP(s)
    {
        double sum, square;
        FN(sums_of_group)((const T *)s->x + (ptrdiff_t)r * s->x_stride + c, n,
                          FN(readable_from)(s, r, s->x_stride) - c, ((const R *)s->shift)[at], &sum, &square, true);
        ((R *)s->sum)[at] = (R)sum;
        ((R *)s->square)[at] = (R)square;
    }
}

/* y, or where is_z is true z, whose norm groups may end inside a vector. */
BODY void FN(apply_to_positions)(const struct normfuse_channels *s, size_t from, size_t to, const bool is_z,
                                 const bool is_silu)
{
    const R *weight = s->weight, *bias = s->bias;
    const bool stream = s->stream;
    const ptrdiff_t ahead = s->ahead;
    FOR_EACH_NORM_GROUP(s)
    {
        const OP(normalization) of = OP(normalization_of)(s->shift, s->rstd, s->rest, at);
        const T *x = (const T *)s->x + (ptrdiff_t)r * s->x_stride;
        const T *post_add = is_z || !s->post_add ? NULL : (const T *)s->post_add + (ptrdiff_t)r * s->post_add_stride;
        T *y = is_z ? NULL : (T *)s->y + (ptrdiff_t)r * s->y_stride;
        R *z = is_z ? (R *)s->z + r * s->groups * n : NULL;
        const size_t readable = FN(readable_from)(s, r, s->x_stride);
        for (size_t m; c < end; c += m) {
            m = is_z && end - c < W ? end - c : W;
            AHEAD(x + c, ahead);
            const V h = OP(normalized)(is_z ? FN(values_at)(x + c, m, readable - c) : LOAD(x + c), of);
            V v = OP(fma)(h, LOAD_R(weight + c), LOAD_R(bias + c));
            if (is_z) {
                STORE_R(z + c, v);
                continue;
            }
            if (post_add)
                v = OP(add)(v, LOAD(post_add + c));
            if (is_silu)
                v = OP(activation)(NORMFUSE_SILU, v, v);
            FN(write)(y + c, v, W, stream);
        }
    }
}
static void FN(position_y)(const struct normfuse_channels *s, size_t from, size_t to)
{
    FN(apply_to_positions)(s, from, to, false, false);
}
#if defined(NORMFUSE_SILU_PASSES)
static void FN(position_y_silu)(const struct normfuse_channels *s, size_t from, size_t to)
{
    FN(apply_to_positions)(s, from, to, false, true);
}
#endif
static void FN(position_z)(const struct normfuse_channels *s, size_t from, size_t to)
{
    FN(apply_to_positions)(s, from, to, true, false);
}

#if defined(NORMFUSE_SILU_PASSES)
static void FN(position_gradients)(const struct normfuse_channels *s, size_t from, size_t to)
{
    const R *weight = s->weight, *bias = s->bias;
    const ptrdiff_t ahead = s->ahead, ahead_dy = s->ahead_dy;
    FOR_EACH_NORM_GROUP(s)
    {
        const OP(normalization) of = OP(normalization_of)(s->shift, s->rstd, s->rest, at);
        const T *x = (const T *)s->x + (ptrdiff_t)r * s->x_stride;
        const R *dy = (const R *)s->dy + (ptrdiff_t)r * s->dy_stride;
        R *gradient = (R *)s->gradient + (ptrdiff_t)r * s->gradient_stride;
        const size_t readable = FN(readable_from)(s, r, s->x_stride), real = FN(readable_from)(s, r, s->dy_stride);
        for (size_t m; c < end; c += m) {
            m = end - c < W ? end - c : W;
            AHEAD(x + c, ahead);
            AHEAD(dy + c, ahead_dy);
            const V h = OP(normalized)(FN(values_at)(x + c, m, readable - c), of);
            const V z = OP(fma)(h, LOAD_R(weight + c), LOAD_R(bias + c));
            const V g = OP(activation_gradient)(NORMFUSE_SILU, z, FN(reals_at)(dy + c, m, real - c), z);
            FN(store_sum)(gradient + c, g, m);
        }
    }
}
#endif

static void FN(position_sums)(const struct normfuse_channels *s, size_t from, size_t to)
{
    const V zero = OP(set1)(0);
    const R *weight = s->weight;
    R *sum_bias = s->sum_bias, *sum_weight = s->sum_weight;
    const ptrdiff_t ahead = s->dy ? 0 : s->ahead, ahead_dy = s->dy ? 0 : s->ahead_dy; /* if no pass has read them */
    FOR_EACH_NORM_GROUP(s)
    {
        const OP(normalization) of = OP(normalization_of)(s->shift, s->rstd, s->rest, at);
        const T *x = (const T *)s->x + (ptrdiff_t)r * s->x_stride;
        const R *gradient = (const R *)s->gradient + (ptrdiff_t)r * s->gradient_stride;
        const size_t readable = FN(readable_from)(s, r, s->x_stride), real = FN(readable_from)(s, r, s->gradient_stride);
        double all = 0, all_squares = 0;
        while (c < end) {
            const size_t chunk = end - c < NORMFUSE_SMALL_CHUNK ? end : c + NORMFUSE_SMALL_CHUNK;
            V sum0 = zero, sum1 = zero, square0 = zero, square1 = zero; /* those of odd and even vectors change places */
            for (size_t m; c < chunk; c += m) {
                m = chunk - c < W ? chunk - c : W;
                AHEAD(x + c, ahead);
                AHEAD(gradient + c, ahead_dy);
                const V h = OP(leading)(OP(normalized)(FN(values_at)(x + c, m, readable - c), of), m);
                const V g = OP(leading)(FN(reals_at)(gradient + c, m, real - c), m);
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

BODY void FN(dx_to_positions)(const struct normfuse_channels *s, size_t from, size_t to, const bool is_z)
{
    const R *weight = s->weight;
    const bool stream = s->stream;
    FOR_EACH_NORM_GROUP(s)
    {
        const OP(normalization) of = OP(normalization_of)(s->shift, s->rstd, s->rest, at);
        const V slope = OP(set1)(((const R *)s->slope)[at]), offset = OP(set1)(((const R *)s->offset)[at]);
        const T *x = (const T *)s->x + (ptrdiff_t)r * s->x_stride;
        const T *du = is_z || !s->post_add ? NULL : (const T *)s->post_add + (ptrdiff_t)r * s->post_add_stride;
        const R *gradient = (const R *)s->gradient + (ptrdiff_t)r * s->gradient_stride;
        T *dx = is_z ? NULL : (T *)s->y + (ptrdiff_t)r * s->y_stride;
        R *z = is_z ? (R *)s->z + r * s->groups * n : NULL;
        const size_t readable = FN(readable_from)(s, r, s->x_stride), real = FN(readable_from)(s, r, s->gradient_stride);
        for (size_t m; c < end; c += m) {
            m = is_z && end - c < W ? end - c : W;
            const V h = OP(normalized)(is_z ? FN(values_at)(x + c, m, readable - c) : LOAD(x + c), of);
            const V g = is_z ? FN(reals_at)(gradient + c, m, real - c) : LOAD_R(gradient + c);
            const V v = OP(fma)(of.rstd, OP(mul)(g, LOAD_R(weight + c)), OP(fma)(slope, h, offset));
            if (is_z)
                STORE_R(z + c, v);
            else
                FN(write)(dx + c, du ? OP(add)(v, LOAD(du + c)) : v, W, stream);
        }
    }
}
static void FN(position_dx)(const struct normfuse_channels *s, size_t from, size_t to)
{
    FN(dx_to_positions)(s, from, to, false);
}
static void FN(position_dx_z)(const struct normfuse_channels *s, size_t from, size_t to)
{
    FN(dx_to_positions)(s, from, to, true);
}
#undef FOR_EACH_NORM_GROUP

/* ---- channels: rows ---- */

/* Values at positions [p, p + W) of a row of n, 0 behind the last one. */
PART V FN(position_values)(const T *x, size_t p, size_t n)
{
    return p + W <= n ? LOAD(x + p) : p < n ? LOAD_PART(x + p, n - p, OP(set1)(0)) : OP(set1)(0);
}

static void FN(channel_sums)(const struct normfuse_channels *s, size_t from, size_t to)
{
    const bool centred = s->centred;
    const size_t n = s->positions, width = s->width;
    const ptrdiff_t ahead = s->ahead;
    R *sums = centred ? s->sum : s->square;
    for (size_t r = from; r < to; r++) {
        const T *x = (const T *)s->x + (ptrdiff_t)r * s->x_stride;
        R *u = (R *)s->tile + r * s->pitch;
        const bool starts = r == 0 && !s->continues;
        for (size_t p = 0; p < width; p += W) {
            AHEAD_L2(x + p, ahead);
            const V v = FN(position_values)(x, p, n), sum = starts ? OP(set1)(0) : LOAD_R(sums + p);
            STORE_R(sums + p, centred ? OP(add)(sum, v) : OP(fma)(v, v, sum));
            STORE_R(u + p, v);
        }
    }
}

/* MAKE(p, n) gives the values at positions [p, p + n) of a row, which are written to y, or whole to z. */
#define FOR_EACH_POSITION(y, z, is_z, MAKE)                                                          \
    do {                                                                                             \
        const size_t n = is_z ? s->width : s->positions, head = s->stream && !is_z ? FN(head)(y, n) : 0; \
        const size_t lines = s->stream && !is_z ? head + (n - head) / LINE * LINE : 0;               \
        for (size_t p = 0, m; p < n; p += m) {                                                       \
            m = (p < head ? head : n) - p;                                                           \
            m = m < W ? m : W;                                                                       \
            const V v = MAKE(p, m);                                                                  \
            if (is_z)                                                                                \
                STORE_R(z + p, v);                                                                   \
            else                                                                                     \
                FN(write)(y + p, v, m, p >= head && p < lines);                                      \
        }                                                                                            \
    } while (0)

BODY V FN(y_of_z)(V z, const T *post_add, size_t n, const bool is_silu)
{
    if (post_add)
        z = OP(add)(z, FN(load_values)(post_add, n, z));
    return is_silu ? OP(activation)(NORMFUSE_SILU, z, z) : z;
}
BODY void FN(apply_to_channels)(const struct normfuse_channels *s, size_t from, size_t to, const bool is_z,
                                const bool is_silu)
{
    const R *shift = s->shift, *rstd = s->rstd, *rest = s->rest;
    for (size_t r = from; r < to; r++) {
        const R *u = (const R *)s->tile + r * s->pitch;
        const T *post_add = s->post_add && !is_z ? (const T *)s->post_add + (ptrdiff_t)r * s->post_add_stride : NULL;
        T *y = is_z ? NULL : (T *)s->y + (ptrdiff_t)r * s->y_stride;
        R *z = is_z ? (R *)s->z + r * s->z_pitch : NULL;
        const V weight = OP(set1)(((const R *)s->weight)[r]), bias = OP(set1)(((const R *)s->bias)[r]);
#define Z(p) OP(fma)(OP(normalized)(LOAD_R(u + p), OP(normalization_at)(shift, rstd, rest, p)), weight, bias)
#define Y(p, n) FN(y_of_z)(Z(p), post_add ? post_add + p : NULL, n, is_silu)
        FOR_EACH_POSITION(y, z, is_z, Y);
#undef Y
#undef Z
    }
}
static void FN(channel_y)(const struct normfuse_channels *s, size_t from, size_t to)
{
    FN(apply_to_channels)(s, from, to, false, false);
}
#if defined(NORMFUSE_SILU_PASSES)
static void FN(channel_y_silu)(const struct normfuse_channels *s, size_t from, size_t to)
{
    FN(apply_to_channels)(s, from, to, false, true);
}
#endif
static void FN(channel_z)(const struct normfuse_channels *s, size_t from, size_t to)
{
    FN(apply_to_channels)(s, from, to, true, false);
}

BODY void FN(dx_to_channels)(const struct normfuse_channels *s, size_t from, size_t to, const bool is_z)
{
    const R *rstd = s->rstd, *slope = s->slope, *offset = s->offset;
    for (size_t r = from; r < to; r++) {
        const R *g = (const R *)s->gradient + (ptrdiff_t)r * s->gradient_stride, *h = (const R *)s->tile + r * s->pitch;
        const T *du = s->post_add && !is_z ? (const T *)s->post_add + (ptrdiff_t)r * s->post_add_stride : NULL;
        T *dx = is_z ? NULL : (T *)s->y + (ptrdiff_t)r * s->y_stride;
        R *z = is_z ? (R *)s->z + r * s->z_pitch : NULL;
        const V weight = OP(set1)(((const R *)s->weight)[r]);
#define REST(p) OP(fma)(LOAD_R(slope + p), LOAD_R(h + p), LOAD_R(offset + p))
#define DX(p, n) \
    FN(y_of_z)(OP(fma)(LOAD_R(rstd + p), OP(mul)(LOAD_R(g + p), weight), REST(p)), du ? du + p : NULL, n, false)
        FOR_EACH_POSITION(dx, z, is_z, DX);
#undef DX
#undef REST
    }
}
static void FN(channel_dx)(const struct normfuse_channels *s, size_t from, size_t to)
{
    FN(dx_to_channels)(s, from, to, false);
}
static void FN(channel_dx_z)(const struct normfuse_channels *s, size_t from, size_t to)
{
    FN(dx_to_channels)(s, from, to, true);
}
#undef FOR_EACH_POSITION
#undef PART
