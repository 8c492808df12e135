/* SPDX-License-Identifier: MIT
 *
 * passes.inl - the passes of kernels.h, written once. Included once per (instruction set, dtype) with
 *   T, DT         storage type and its suffix (f64, f32, f16, bf16)
 *   R, V, W       compute type (float, double), its vector and the lanes of one
 *   OP(name)      vf_name or vd_name, from the vec_<isa>.h included before
 *   ISA           suffix of the symbols
 *
 * Sums under rows keep 2*W lanes: value i of a row belongs to lane i % (2*W), so every instruction set adds in the same
 * order. Moments take as many rows of at most W values for one as fit the lanes. 64 lanes were tried too: AVX2 then has to
 * walk the data twice, and nothing gains (docs/decisions/0001).
 *
 * The activation is a constant of each loop. What is cheap beside the memory has loops of its own (INLINE_FORMS);
 * whatever else goes through a stage in the L1 cache: z, the activation, results. Additions are uniform branches. Figures:
 * docs/decisions/0012.
 *   INLINE_FORMS(FORM)  FORM(activation) for each that has loops of its own
 *   PRELU_FORMS(FORM)   FORM(NORMFUSE_PRELU) or nothing
 *   FORWARD_SILU_STAGED  1: but the forward of SiLU has none */
#define LOAD(p) CAT(OP(load_), DT)(p)
#define LOAD_PART(p, n, fill) CAT(OP(load_part_), DT)(p, n, fill)
#define STORE(p, v) CAT(OP(store_), DT)(p, v)
#define STORE_PART(p, v, n) CAT(OP(store_part_), DT)(p, v, n)
#define STREAM(p, v) CAT(OP(stream_), DT)(p, v)
#define LOAD_R(p) CAT(OP(load_), RT)(p)
#define LOAD_PART_R(p, n) CAT(OP(load_part_), RT)(p, n, OP(set1)(0))
#define STORE_R(p, v) CAT(OP(store_), RT)(p, v)
#define STORE_PART_R(p, v, n) CAT(OP(store_part_), RT)(p, v, n)
#define FN(name) CAT3(name, DT, ISA)
#define BODY static inline __attribute__((always_inline))
#define AHEAD(p, bytes)                                           \
    do {                                                          \
        if (bytes)                                                \
            __builtin_prefetch((const char *)(p) + (bytes), 0, 3); \
    } while (0)
/* A row of the next tile goes to the L2 cache: so many of them are under way that the L1 cache cannot hold. */
#define AHEAD_L2(p, bytes)                                        \
    do {                                                          \
        if (bytes)                                                \
            __builtin_prefetch((const char *)(p) + (bytes), 0, 2); \
    } while (0)
#define LINE (64 / sizeof(T)) /* values of a cache line: W, or 2*W of 16 bits */
#define TOGETHER 4 /* rows */
#define ROW(type, member, r) ((type)s->member + (ptrdiff_t)(r) * s->CAT(member, _stride))

/* Prefetches what a sum reads NORMFUSE_PREFETCH_BYTES after n values at p. */
BODY void FN(prefetch)(const T *p, size_t n)
{
    for (size_t i = 0; i < n; i += LINE)
        AHEAD(p + i, NORMFUSE_PREFETCH_BYTES);
}

/* A value of x, dy or another input at column i of a row: n == W all lanes, else the first n. */
BODY V FN(load_values)(const T *p, size_t n, V fill)
{
    return n == W ? LOAD(p) : LOAD_PART(p, n, fill);
}

BODY void FN(store_values)(T *p, V v, size_t n)
{
    if (n == W)
        STORE(p, v);
    else
        STORE_PART(p, v, n);
}

BODY void FN(store_sum)(R *p, V v, size_t n)
{
    if (n == W)
        STORE_R(p, v);
    else
        STORE_PART_R(p, v, n);
}

BODY V FN(coefficient)(const void *base, size_t i, size_t n)
{
    const R *p = (const R *)base + i;
    return n == W ? LOAD_R(p) : LOAD_PART_R(p, n);
}

/* ---- moments ---- */

BODY void FN(moments_of_set)(const struct normfuse_pass *s, size_t j)
{
    const V k = OP(set1)(((const R *)s->k)[j]);
    V sum0 = OP(set1)(0), sum1 = sum0, square0 = sum0, square1 = sum0;
    const bool adjacent = s->x_stride == (ptrdiff_t)s->n;
    T copy[2 * W];

    for (size_t r = 0, together = s->n > W ? 1 : 2 * W / s->n; r < s->rows; r += together) {
        const T *x = ROW(const T *, x, r) + (ptrdiff_t)j * s->set_stride;
        together = together < s->rows - r ? together : s->rows - r;
        if (!adjacent && together > 1) {
            for (size_t i = 0; i < together; i++)
                memcpy(copy + i * s->n, ROW(const T *, x, r + i) + (ptrdiff_t)j * s->set_stride, s->n * sizeof(T));
            x = copy;
        }
        const size_t n = together * s->n, body = n / (2 * W) * (2 * W);
        for (size_t i = 0; i < body; i += 2 * W) {
            FN(prefetch)(x + i, 2 * W);
            const V d0 = OP(sub)(LOAD(x + i), k), d1 = OP(sub)(LOAD(x + i + W), k);
            sum0 = OP(add)(sum0, d0);
            sum1 = OP(add)(sum1, d1);
            square0 = OP(fma)(d0, d0, square0);
            square1 = OP(fma)(d1, d1, square1);
        }
        if (body < n) { /* missing lanes hold k: they add 0 */
            const size_t rest = n - body;
            const V d0 = OP(sub)(FN(load_values)(x + body, rest < W ? rest : W, k), k);
            sum0 = OP(add)(sum0, d0);
            square0 = OP(fma)(d0, d0, square0);
            if (rest > W) {
                const V d1 = OP(sub)(LOAD_PART(x + body + W, rest - W, k), k);
                sum1 = OP(add)(sum1, d1);
                square1 = OP(fma)(d1, d1, square1);
            }
        }
    }
    ((R *)s->sum)[j] = OP(hsum)(OP(add)(sum0, sum1));
    ((R *)s->square)[j] = OP(hsum)(OP(add)(square0, square1));
}

static void FN(moments_rows)(const struct normfuse_pass *arguments)
{
    const struct normfuse_pass local = *arguments, *s = &local;
    for (size_t j = 0; j < s->sets; j++)
        FN(moments_of_set)(s, j);
}

/* The sums stay in the L1 cache. One row at a time makes one linear stream, which the hardware prefetches best (Zen 4, 256
 * columns of f32: 31 GB/s; four rows at a time 13; docs/decisions/0003). */
BODY void FN(moments_columns_step)(const struct normfuse_pass *s, size_t r, size_t c, size_t n)
{
    R *sums = (R *)s->sum + c, *squares = (R *)s->square + c;
    const V k = FN(coefficient)(s->k, c, n), d = OP(sub)(FN(load_values)(ROW(const T *, x, r) + c, n, k), k);
    FN(store_sum)(sums, OP(add)(FN(coefficient)(sums, 0, n), d), n);
    FN(store_sum)(squares, OP(fma)(d, d, FN(coefficient)(squares, 0, n)), n);
}

/* Rows r to r + TOGETHER - 1, each column's values added in the order of the rows; prefetches rows `ahead` on. */
BODY void FN(moments_of_rows)(const struct normfuse_pass *s, size_t r, size_t ahead)
{
    size_t c = 0;
    for (; c + LINE <= s->n; c += LINE) {
        for (size_t j = 0; j < TOGETHER; j++) /* addresses of no value are only prefetched, not read */
            __builtin_prefetch(ROW(const T *, x, r + ahead + j) + c, 0, 3);
        for (size_t i = c; i < c + LINE; i += W) {
            R *sums = (R *)s->sum + i, *squares = (R *)s->square + i;
            const V k = FN(coefficient)(s->k, i, W);
            V sum = LOAD_R(sums), square = LOAD_R(squares);
            for (size_t j = 0; j < TOGETHER; j++) {
                const V d = OP(sub)(LOAD(ROW(const T *, x, r + j) + i), k);
                sum = OP(add)(sum, d);
                square = OP(fma)(d, d, square);
            }
            STORE_R(sums, sum);
            STORE_R(squares, square);
        }
    }
    for (size_t n; c < s->n; c += n) {
        n = s->n - c < W ? s->n - c : W;
        for (size_t j = 0; j < TOGETHER; j++)
            FN(moments_columns_step)(s, r + j, c, n);
    }
}

static void FN(moments_columns)(const struct normfuse_pass *arguments)
{
    const struct normfuse_pass local = *arguments, *s = &local;
    size_t r = 0;
    /* Reading 16-bit values is cheap enough for the stores of the sums to matter (docs/decisions/0003, 0010). */
    const size_t bytes = s->n * sizeof(T), ahead = TOGETHER * (4096 / (TOGETHER * bytes) + 1);
    if (sizeof(T) == 2 && (bytes >= 3072 || s->x_stride == (ptrdiff_t)s->n))
        for (; r + TOGETHER <= s->rows; r += TOGETHER)
            FN(moments_of_rows)(s, r, ahead);
    for (; r < s->rows; r++) {
        size_t c = 0;
        for (; c + W <= s->n; c += W) {
            FN(prefetch)(ROW(const T *, x, r) + c, W);
            FN(moments_columns_step)(s, r, c, W);
        }
        if (c < s->n)
            FN(moments_columns_step)(s, r, c, s->n - c);
    }
}

/* ---- stages ---- */

/* `count` rows from `row` on, `width` values of each from `first` on, which are `pitch` apart in a stage: rows shorter than
 * a vector without gaps, or an activation would be computed for many values that are none. */
struct FN(block) {
    size_t row, count, first, width, pitch;
};

/* Values until y is at the start of a cache line: only whole lines are streamed, since one that is written in part by
 * streaming and in part by ordinary stores goes to memory more than once. */
BODY size_t FN(head)(const T *y, size_t n)
{
    const size_t head = (size_t)(-(uintptr_t)y / sizeof(T)) % LINE;
    return head < n ? head : n;
}

/* The block after *at: several short rows, or a part of a long one; `lines`: that ends with a cache line of y. false: none
 * is left. */
BODY bool FN(next_block)(const struct normfuse_pass *s, struct FN(block) *at, bool lines)
{
    at->first += at->width;
    if (at->first >= s->n) {
        at->first = 0;
        at->row += at->count;
    }
    if (at->row >= s->rows)
        return false;
    const size_t pitch = s->n < W ? s->n : (s->n + W - 1) / W * W, left = s->n - at->first;
    at->count = at->first == 0 && pitch <= STAGE ? STAGE / pitch : 1;
    if (at->count > s->rows - at->row)
        at->count = s->rows - at->row;
    at->width = STAGE;
    if (lines && at->first == 0) {
        const size_t head = FN(head)(ROW(const T *, y, at->row), LINE);
        at->width = head ? STAGE - LINE + head : STAGE;
    }
    if (at->width > left || pitch <= STAGE)
        at->width = left;
    at->pitch = s->n < W ? s->n : (at->width + W - 1) / W * W;
    return true;
}

/* ---- affine, affine2 ---- */

/* Coefficients of a row under rows; under columns each step has its own. */
struct FN(coefficients) {
    V k, a, b, p, q, rest, param; /* param: of the activation */
};

BODY struct FN(coefficients)
    FN(coefficients_of_row)(const struct normfuse_pass *s, size_t r, const int pass, const bool columns)
{
    const V zero = OP(set1)(0);
    struct FN(coefficients) of = {zero, zero, zero, zero, zero, zero, OP(set1)((R)s->act_param)};
    if (columns)
        return of;
    const size_t at = r * s->coefficient_step;
    if (s->slope)
        of.param = OP(set1)(((const R *)s->slope)[at]);
    of.k = OP(set1)(((const R *)s->k)[at]);
    if (s->a) {
        of.a = OP(set1)(((const R *)s->a)[at]);
        of.b = OP(set1)(((const R *)s->b)[at]);
    }
    if (pass != AFFINE && s->p)
        of.p = OP(set1)(((const R *)s->p)[at]);
    if (pass == AFFINE2 && s->q) {
        of.q = OP(set1)(((const R *)s->q)[at]);
        of.rest = OP(set1)(((const R *)s->r)[at]);
    }
    return of;
}

/* x - k and z at column i of a row; missing lanes hold x = k. */
BODY V FN(distance)(const struct normfuse_pass *s, size_t r, size_t i, size_t n, struct FN(coefficients) of,
                    const bool columns)
{
    const V k = columns ? FN(coefficient)(s->k, i, n) : of.k;
    return OP(sub)(FN(load_values)(ROW(const T *, x, r) + i, n, k), k);
}
BODY V FN(z)(const struct normfuse_pass *s, size_t r, size_t i, size_t n, V d, struct FN(coefficients) of,
             const bool columns)
{
    V added = d;
    if (s->post_add) {
        added = FN(load_values)(ROW(const T *, post_add, r) + i, n, d);
        if (!s->a)
            return added;
    }
    const V z = columns ? OP(fma)(d, FN(coefficient)(s->a, i, n), FN(coefficient)(s->b, i, n)) : OP(fma)(d, of.a, of.b);
    return s->post_add ? OP(add)(z, added) : z;
}

/* The activation's parameter at column i of a row. */
BODY V FN(param)(const struct normfuse_pass *s, size_t i, size_t n, struct FN(coefficients) of, const bool columns,
                 const int form)
{
    return columns && form == NORMFUSE_PRELU ? FN(coefficient)(s->slope, i, n) : of.param;
}

/* `stream` need not be a constant: a copy of each loop for it would double their code. */
BODY void FN(write)(T *to, V v, size_t n, bool stream)
{
    if (stream)
        STREAM(to, v);
    else
        FN(store_values)(to, v, n);
}

BODY void FN(affine_step)(const struct normfuse_pass *s, size_t r, size_t i, size_t n, struct FN(coefficients) of,
                          const R *staged, const bool columns, const int form, bool stream)
{
    V y;
    if (form == STAGED) {
        y = FN(coefficient)(staged, 0, n);
    } else {
        AHEAD(ROW(const T *, x, r) + i, s->ahead_x);
        const V z = FN(z)(s, r, i, n, FN(distance)(s, r, i, n, of, columns), of, columns);
        y = OP(activation)(form, FN(param)(s, i, n, of, columns, form), z);
    }
    FN(write)(ROW(T *, y, r) + i, y, n, stream);
}

/* dy' at column i; *d is x - k. Missing lanes give dy' = 0 and d = 0. */
BODY V FN(gradient)(const struct normfuse_pass *s, size_t r, size_t i, size_t n, struct FN(coefficients) of,
                    const R *staged, const bool columns, const int form, V *d)
{
    *d = FN(distance)(s, r, i, n, of, columns);
    if (form == STAGED)
        return FN(coefficient)(staged, 0, n);
    const V g = FN(load_values)(ROW(const T *, dy, r) + i, n, OP(set1)(0));
    if (form == NORMFUSE_IDENTITY)
        return g;
    return OP(activation_gradient)(form, FN(param)(s, i, n, of, columns, form), g, FN(z)(s, r, i, n, *d, of, columns));
}

BODY void FN(affine2_step)(const struct normfuse_pass *s, size_t r, size_t i, size_t n, struct FN(coefficients) of,
                           const R *staged, const bool columns, const int form, bool stream)
{
    V d;
    if (form != STAGED || s->kept) {
        AHEAD(ROW(const T *, x, r) + i, s->ahead_x);
        AHEAD(ROW(const T *, dy, r) + i, s->ahead_dy);
    }
    const V g = FN(gradient)(s, r, i, n, of, staged, columns, form, &d),
            p = columns ? FN(coefficient)(s->p, i, n) : of.p;
    V v;
    if (!s->q)
        v = OP(mul)(p, g);
    else if (columns)
        v = OP(fma)(p, g, OP(fma)(FN(coefficient)(s->q, i, n), d, FN(coefficient)(s->r, i, n)));
    else
        v = OP(fma)(p, g, OP(fma)(of.q, d, of.rest));
    if (s->du)
        v = OP(add)(v, FN(load_values)(ROW(const T *, du, r) + i, n, v));
    if (s->dpost_add)
        FN(store_values)(ROW(T *, dpost_add, r) + i, g, n);
    FN(write)(ROW(T *, y, r) + i, v, n, stream);
}

BODY void FN(step)(const struct normfuse_pass *s, size_t r, size_t i, size_t n, struct FN(coefficients) of,
                   const R *staged, const int pass, const bool columns, const int form, bool stream)
{
    if (pass == AFFINE)
        FN(affine_step)(s, r, i, n, of, staged, columns, form, stream);
    else
        FN(affine2_step)(s, r, i, n, of, staged, columns, form, stream);
}

/* Writes z of a block's row into a stage, and for a backward dy beside it. Of prelu, whose slope is a row's or a
 * column's, y and dy'; and what a value adds to the slope's gradient in z's place. Where no other place is to be
 * prefetched, the next block is: it arrives while this one goes through the activation. */
BODY void FN(fill)(const struct normfuse_pass *s, const struct FN(block) *at, size_t r, R *z, R *g, const int pass,
                   const bool columns)
{
    const bool is_part = at->width < s->n;
    const ptrdiff_t rows = is_part ? 0 : (ptrdiff_t)at->count, part = is_part ? STAGE : 0, bytes = sizeof(T);
    const ptrdiff_t ahead_x = s->ahead_x ? s->ahead_x : (rows * s->x_stride + part) * bytes;
    const ptrdiff_t ahead_dy = s->ahead_dy ? s->ahead_dy : (rows * s->dy_stride + part) * bytes;
    const struct FN(coefficients) of = FN(coefficients_of_row)(s, r, pass, columns);
    const bool has_slope = s->slope != NULL;
    V slope = of.param;
    for (size_t i = at->first, end = i + at->width, n; i < end; i += n, z += W, g += W) {
        n = end - i < W ? end - i : W;
        AHEAD(ROW(const T *, x, r) + i, ahead_x);
        V v = FN(z)(s, r, i, n, FN(distance)(s, r, i, n, of, columns), of, columns);
        if (has_slope && columns)
            slope = FN(coefficient)(s->slope, i, n);
        if (pass == AFFINE) {
            STORE_R(z, has_slope ? OP(activation)(NORMFUSE_PRELU, slope, v) : v);
            continue;
        }
        AHEAD(ROW(const T *, dy, r) + i, ahead_dy);
        const V dy = FN(load_values)(ROW(const T *, dy, r) + i, n, OP(set1)(0));
        STORE_R(g, has_slope ? OP(activation_gradient)(NORMFUSE_PRELU, slope, dy, v) : dy);
        STORE_R(z, has_slope ? OP(slope_gradient)(dy, v) : v);
    }
}

/* A block's z, and dy, through the activation: its results in place of z or of dy. */
BODY const R *FN(stage_of)(const struct normfuse_pass *s, const struct FN(block) * at, R *z, R *g, const int pass,
                           const bool columns)
{
    for (size_t j = 0; j < at->count; j++)
        FN(fill)(s, at, at->row + j, z + j * at->pitch, g + j * at->pitch, pass, columns);
    const size_t values = at->count * at->pitch, whole = (values + W - 1) / W * W;
    STORE_R(z + values, OP(set1)(0)); /* whole vectors go through the activation */
    STORE_R(g + values, OP(set1)(0));
    if (pass == AFFINE)
        OP(activate)(s->activation, s->act_param, z, whole);
    else
        OP(activate_gradient)(s->activation, s->act_param, g, z, whole);
    return pass == AFFINE ? z : g;
}

/* Called: inlined into each loop they were 125 KB of the library. */
#define STAGE_OF(name, pass, columns)                                                                                  \
    static __attribute__((noinline)) const R *FN(name)(const struct normfuse_pass *s, const struct FN(block) * at,     \
                                                       R * z, R * g)                                                   \
    {                                                                                                                  \
        return FN(stage_of)(s, at, z, g, pass, columns);                                                               \
    }
STAGE_OF(stage_rows, AFFINE, false)
STAGE_OF(stage_columns, AFFINE, true)
STAGE_OF(stage_backward_rows, DOT2, false)
STAGE_OF(stage_backward_columns, DOT2, true)
#undef STAGE_OF

BODY const R *FN(stage)(const struct normfuse_pass *s, const struct FN(block) *at, R *z, R *g, int pass, bool columns)
{
    if (pass == AFFINE)
        return columns ? FN(stage_columns)(s, at, z, g) : FN(stage_rows)(s, at, z, g);
    return columns ? FN(stage_backward_columns)(s, at, z, g) : FN(stage_backward_rows)(s, at, z, g);
}

/* At most a cache line of a row with an activation, by ordinary stores; `staged`: its results, or NULL. One copy for all
 * loops. */
static __attribute__((noinline)) void FN(edge)(const struct normfuse_pass *s, size_t r, size_t i, size_t end,
                                               const R *staged, int pass, bool columns)
{
    R z[LINE + W], g[LINE + W];
    const struct FN(coefficients) of = FN(coefficients_of_row)(s, r, pass, columns);
    if (!staged) {
        const struct FN(block)
            at = {.row = r, .count = 1, .first = i, .width = end - i, .pitch = (end - i + W - 1) / W * W};
        staged = FN(stage)(s, &at, z, g, pass, columns);
    }
    for (size_t n; i < end; i += n, staged += n) {
        n = end - i < W ? end - i : W;
        FN(step)(s, r, i, n, of, staged, pass, columns, STAGED, false);
    }
}

/* The same with any activation. Without one a step costs less than the call. */
BODY void FN(part)(const struct normfuse_pass *s, size_t r, size_t i, size_t end, struct FN(coefficients) of,
                   const R *staged, const int pass, const bool columns, const int form)
{
    if (form != NORMFUSE_IDENTITY) {
        FN(edge)(s, r, i, end, staged, pass, columns);
        return;
    }
    for (size_t n; i < end; i += n) {
        n = end - i < W ? end - i : W;
        FN(step)(s, r, i, n, of, NULL, pass, columns, NORMFUSE_IDENTITY, false);
    }
}

/* Values [first, end) of a row; `staged` are their results, or NULL. */
BODY void FN(row)(const struct normfuse_pass *s, size_t r, size_t first, size_t end, const R *staged, const int pass,
                  const bool columns, const int form, bool stream)
{
    const struct FN(coefficients) of = FN(coefficients_of_row)(s, r, pass, columns);
    const size_t head = stream ? FN(head)(ROW(const T *, y, r) + first, end - first) : 0, quantum = stream ? LINE : W;
    const size_t body = (end - first - head) / quantum * quantum;
    if (head) {
        FN(part)(s, r, first, first + head, of, staged, pass, columns, form);
        first += head;
        staged = form == STAGED ? staged + head : staged;
    }
    for (size_t i = 0; i < body; i += W)
        FN(step)(s, r, first + i, W, of, form == STAGED ? staged + i : NULL, pass, columns, form, stream);
    if (first + body < end)
        FN(part)(s, r, first + body, end, of, form == STAGED ? staged + body : NULL, pass, columns, form);
}

/* Asks for the cache lines that rows [first, end) share with their neighbours: they are written by ordinary stores, and
 * the streaming stores behind one that misses would wait for it (batch norm 64x1024x14x14: 1.7 copy floors for this pass
 * alone). */
BODY void FN(own_edges)(const struct normfuse_pass *s, size_t first, size_t end)
{
    for (size_t r = first; r < end && r < s->rows; r++) {
        const T *row = ROW(const T *, y, r);
        if ((uintptr_t)row % 64)
            __builtin_prefetch(row, 1, 3);
        if ((uintptr_t)(row + s->n) % 64)
            __builtin_prefetch(row + s->n - 1, 1, 3);
    }
}

BODY void FN(rows)(const struct normfuse_pass *s, const int pass, const bool columns, const int form, bool stream)
{
    if (stream)
        FN(own_edges)(s, 0, 2);
    for (size_t r = 0; r < s->rows; r++) {
        if (stream)
            FN(own_edges)(s, r + 2, r + 3);
        FN(row)(s, r, 0, s->n, NULL, pass, columns, form, stream);
    }
}

BODY void FN(staged_rows)(const struct normfuse_pass *s, const int pass, const bool columns)
{
    R z[STAGE + W], g[STAGE + W]; /* W: a step of a row's last values reads a whole vector */
    struct FN(block) at = {0};
    while (FN(next_block)(s, &at, s->stream)) {
        if (s->stream && at.first == 0)
            FN(own_edges)(s, at.row, at.row + at.count);
        const bool is_kept = pass == AFFINE2 && s->kept;
        const R *staged = is_kept ? NULL : FN(stage)(s, &at, z, g, pass, columns);
        for (size_t j = 0; j < at.count; j++)
            FN(row)
            (s, at.row + j, at.first, at.first + at.width,
             is_kept ? ROW(const R *, kept, at.row + j) + at.first : staged + j * at.pitch, pass, columns, STAGED,
             s->stream);
    }
}

/* Short rows are mostly edges, which cost a call each where there is an activation. */
BODY bool FN(is_mostly_edges)(const struct normfuse_pass *s)
{
    const bool has_edges = s->n % W != 0 || (s->stream && (s->n % LINE != 0 || (uintptr_t)s->y % 64 != 0));
    return s->n < SHORT_ROW && s->activation != NORMFUSE_IDENTITY && has_edges;
}

BODY void FN(elementwise)(const struct normfuse_pass *arguments, const int pass, const bool columns)
{
    const struct normfuse_pass local = *arguments, *s = &local;
    const bool is_staged = FN(is_mostly_edges)(s) || (pass == AFFINE2 && s->kept);
    /* Rows have a parameter each, of either. Under columns prelu has loops of its own; its sums go through a stage: loops for
     * them, too, would be 60 KB of code. */
    const int32_t chosen = !columns && s->activation == NORMFUSE_PRELU ? NORMFUSE_LEAKY_RELU : s->activation;
    switch (is_staged ? STAGED : chosen) {
#define FORM(activation)                                                         \
    case activation:                                                             \
        if (pass == AFFINE && activation == NORMFUSE_SILU && FORWARD_SILU_STAGED) \
            break;                                                               \
        if (!columns && activation == NORMFUSE_PRELU)                            \
            break;                                                               \
        FN(rows)(s, pass, columns, activation, s->stream);                       \
        return;
        INLINE_FORMS(FORM)
        PRELU_FORMS(FORM)
#undef FORM
    default: break;
    }
    FN(staged_rows)(s, pass, columns);
}

static void FN(affine_columns)(const struct normfuse_pass *s) { FN(elementwise)(s, AFFINE, true); }
static void FN(affine2_columns)(const struct normfuse_pass *s) { FN(elementwise)(s, AFFINE2, true); }

/* ---- short rows ---- */

/* Rows that end inside of vectors cost most of a vector each, and a call where there is an activation. Those that follow
 * one another in memory are walked as one under columns, with coefficients that are repeated for every value, a block of
 * memory at a time: shorter ones than a vector, and up to REPEATED_ROW values with an activation; where ends are masked,
 * single values alone (docs/decisions/0013). */
enum { FN(REPEATED) = 2048 / sizeof(R), FN(REPEATED_ROOM) = REPEATED_ROW + FN(REPEATED) + REPEATED_ROW + W };

struct FN(repeated) {
    R k[FN(REPEATED_ROOM)], a[FN(REPEATED_ROOM)], b[FN(REPEATED_ROOM)], p[FN(REPEATED_ROOM)], q[FN(REPEATED_ROOM)],
        r[FN(REPEATED_ROOM)], slope[FN(REPEATED_ROOM)];
};

BODY bool FN(is_repeated)(const struct normfuse_pass *s)
{
    const ptrdiff_t n = (ptrdiff_t)s->n;
    const size_t maximum = VF_HAS_MASKS ? 1 : s->activation == NORMFUSE_IDENTITY ? W : REPEATED_ROW;
    return !s->kept && s->n <= maximum && s->n % W != 0 && s->rows > 1 && s->x_stride == n &&
           (!s->y || s->y_stride == n) && (!s->dy || s->dy_stride == n) && (!s->post_add || s->post_add_stride == n) &&
           (!s->du || s->du_stride == n) && (!s->dpost_add || s->dpost_add_stride == n);
}

/* The entries of values [first, first + count) of the tile: from[REPEATED_ROW] is the first one's. */
static __attribute__((noinline)) const R *FN(repeat)(const struct normfuse_pass *s, const void *entries, R *to,
                                                     size_t first, size_t count)
{
    if (!entries)
        return NULL;
    const R *from = entries;
    if (s->n == 1 && s->coefficient_step == 1)
        return from + first;
    const size_t end = (first + count + s->n - 1) / s->n;
    for (size_t r = first / s->n, next; r < end; r = next) {
        const R entry = from[r * s->coefficient_step];
        for (next = r + 1; next < end && memcmp(&entry, from + next * s->coefficient_step, sizeof entry) == 0; next++)
            continue; /* rows of a group share most entries */
        R *at = to + REPEATED_ROW + r * s->n - first;
        const size_t n = (next - r) * s->n;
        for (size_t i = 0; n <= 4 && i < n; i++)
            at[i] = entry;
        for (size_t i = 0; n > 4 && i < n; i += W) /* what is too much is overwritten by the next rows */
            STORE_R(at + i, OP(set1)(entry));
    }
    return to + REPEATED_ROW;
}

/* Values [first, first + count) of the tile as one row. */
static __attribute__((noinline)) struct normfuse_pass
FN(as_columns)(const struct normfuse_pass *s, struct FN(repeated) * repeated, size_t first, size_t count)
{
    struct normfuse_pass one = *s;
    one.rows = 1;
    one.n = count;
    one.x = (const T *)s->x + first;
    one.y = s->y ? (T *)s->y + first : NULL;
    one.dy = s->dy ? (const T *)s->dy + first : NULL;
    one.post_add = s->post_add ? (const T *)s->post_add + first : NULL;
    one.du = s->du ? (const T *)s->du + first : NULL;
    one.dpost_add = s->dpost_add ? (T *)s->dpost_add + first : NULL;
    one.k = FN(repeat)(s, s->k, repeated->k, first, count);
    const bool needs_z = !s->dy || s->activation != NORMFUSE_IDENTITY;
    one.a = needs_z ? FN(repeat)(s, s->a, repeated->a, first, count) : NULL;
    one.b = one.a ? FN(repeat)(s, s->b, repeated->b, first, count) : NULL;
    one.p = FN(repeat)(s, s->p, repeated->p, first, count);
    one.q = FN(repeat)(s, s->q, repeated->q, first, count);
    one.r = FN(repeat)(s, s->r, repeated->r, first, count);
    one.slope = FN(repeat)(s, s->slope, repeated->slope, first, count);
    return one;
}

static __attribute__((noinline)) void FN(short_rows)(const struct normfuse_pass *s, normfuse_pass_function columns)
{
    struct FN(repeated) repeated;
    const size_t all = s->rows * s->n;
    for (size_t first = 0, count; first < all; first += count) { /* blocks end where cache lines of y do */
        count = FN(REPEATED) - ((uintptr_t)((T *)s->y + first) % 64) / sizeof(T);
        count = count < all - first ? count : all - first;
        const struct normfuse_pass one = FN(as_columns)(s, &repeated, first, count);
        columns(&one);
    }
}

static void FN(affine_rows)(const struct normfuse_pass *s)
{
    if (FN(is_repeated)(s))
        FN(short_rows)(s, FN(affine_columns));
    else
        FN(elementwise)(s, AFFINE, false);
}

static void FN(affine2_rows)(const struct normfuse_pass *s)
{
    if (FN(is_repeated)(s))
        FN(short_rows)(s, FN(affine2_columns));
    else
        FN(elementwise)(s, AFFINE2, false);
}

/* ---- dot2 ---- */

/* Results of dot2 beside its sums: dy' for affine2, dpost_add = dy', and y = p*dy' [+ du], the dx of a set without statistics,
 * while x and dy are at hand. */
BODY void FN(keep)(const struct normfuse_pass *s, size_t r, size_t i, size_t n, V p, V g)
{
    if (s->kept)
        FN(store_sum)(ROW(R *, kept, r) + i, g, n);
    if (s->dpost_add)
        FN(store_values)(ROW(T *, dpost_add, r) + i, g, n);
    if (s->y) {
        T *dx = ROW(T *, y, r) + i;
        V v = OP(mul)(p, g);
        if (s->du)
            v = OP(add)(v, FN(load_values)(ROW(const T *, du, r) + i, n, g));
        if (s->stream && n == W && (uintptr_t)dx % (W * sizeof(T)) == 0)
            STREAM(dx, v);
        else
            FN(store_values)(dx, v, n);
    }
}

/* Sums of a row: value i of a row belongs to lane i % (2*W). */
struct FN(sums) {
    V sum[2], square[2];
};

/* Values [first, end) of a row, onto *sums; first is a multiple of 2*W. */
BODY void FN(dot2_row)(const struct normfuse_pass *s, size_t r, size_t first, size_t end, const R *staged,
                       const int form, struct FN(sums) * sums)
{
    const struct FN(coefficients) of = FN(coefficients_of_row)(s, r, DOT2, false);
    const bool keeps = s->dpost_add || s->y || s->kept;
    V d0, d1;
    size_t i = first;
    for (; i + 2 * W <= end; i += 2 * W) {
        if (form != STAGED) {
            FN(prefetch)(ROW(const T *, x, r) + i, 2 * W);
            FN(prefetch)(ROW(const T *, dy, r) + i, 2 * W);
        }
        const V g0 = FN(gradient)(s, r, i, W, of, form == STAGED ? staged + (i - first) : NULL, false, form, &d0);
        const V g1 = FN(gradient)(s, r, i + W, W, of, form == STAGED ? staged + (i + W - first) : NULL, false, form, &d1);
        sums->sum[0] = OP(add)(sums->sum[0], g0);
        sums->sum[1] = OP(add)(sums->sum[1], g1);
        sums->square[0] = OP(fma)(g0, d0, sums->square[0]);
        sums->square[1] = OP(fma)(g1, d1, sums->square[1]);
        if (keeps) {
            FN(keep)(s, r, i, W, of.p, g0);
            FN(keep)(s, r, i + W, W, of.p, g1);
        }
    }
    for (int j = 0; i < end; i += W, j++) {
        const size_t n = end - i < W ? end - i : W;
        const V g = FN(gradient)(s, r, i, n, of, form == STAGED ? staged + (i - first) : NULL, false, form, &d0);
        if (j == 0) {
            sums->sum[0] = OP(add)(sums->sum[0], g);
            sums->square[0] = OP(fma)(g, d0, sums->square[0]);
        } else {
            sums->sum[1] = OP(add)(sums->sum[1], g);
            sums->square[1] = OP(fma)(g, d0, sums->square[1]);
        }
        if (keeps)
            FN(keep)(s, r, i, n, of.p, g);
    }
}

BODY void FN(dot2_row_ends)(const struct normfuse_pass *s, size_t r, struct FN(sums) *sums)
{
    const V zero = OP(set1)(0);
    if (s->sum_per_row || r + 1 == s->rows) {
        const size_t at = s->sum_per_row ? r : 0;
        ((R *)s->sum)[at] = OP(hsum)(OP(add)(sums->sum[0], sums->sum[1]));
        ((R *)s->square)[at] = OP(hsum)(OP(add)(sums->square[0], sums->square[1]));
        *sums = (struct FN(sums)){{zero, zero}, {zero, zero}};
    }
}

/* A row's values onto the sums of its columns, which stay in the L1 cache. */
BODY void FN(dot2_columns_step)(const struct normfuse_pass *s, size_t r, size_t c, size_t n, const R *staged,
                                const int form)
{
    const struct FN(coefficients) of = FN(coefficients_of_row)(s, r, DOT2, true);
    R *sums = (R *)s->sum + c, *squares = (R *)s->square + c;
    V d;
    const V g = FN(gradient)(s, r, c, n, of, staged, true, form, &d);
    FN(store_sum)(sums, OP(add)(FN(coefficient)(sums, 0, n), g), n);
    FN(store_sum)(squares, OP(fma)(g, d, FN(coefficient)(squares, 0, n)), n);
    if (s->dpost_add || s->y || s->kept)
        FN(keep)(s, r, c, n, s->y ? FN(coefficient)(s->p, c, n) : g, g);
}
BODY void FN(dot2_columns_row)(const struct normfuse_pass *s, size_t r, size_t first, size_t end, const R *staged,
                               const int form)
{
    size_t c = first;
    for (; c + W <= end; c += W) {
        if (form != STAGED) {
            FN(prefetch)(ROW(const T *, x, r) + c, W);
            FN(prefetch)(ROW(const T *, dy, r) + c, W);
        }
        FN(dot2_columns_step)(s, r, c, W, form == STAGED ? staged + (c - first) : NULL, form);
    }
    if (c < end)
        FN(dot2_columns_step)(s, r, c, end - c, form == STAGED ? staged + (c - first) : NULL, form);
}

BODY void FN(slope_row_ends)(const struct normfuse_pass *s, size_t r, struct FN(sums) *slopes)
{
    if (s->slope_sum && (s->sum_per_row || r + 1 == s->rows)) {
        ((R *)s->slope_sum)[s->sum_per_row ? r : 0] = OP(hsum)(OP(add)(slopes->sum[0], slopes->sum[1]));
        slopes->sum[0] = slopes->sum[1] = OP(set1)(0);
    }
}

/* The values that a block's stage has in z's place, onto the sums for the slope's gradient, in the order of dot2's own. */
static __attribute__((noinline)) void FN(sum_slopes)(const struct normfuse_pass *s, const struct FN(block) * at,
                                                     const R *staged, bool columns, struct FN(sums) * lanes)
{
    for (size_t j = 0; j < at->count; j++, staged += at->pitch) {
        const size_t r = at->row + j;
        R *sums = (R *)s->slope_sum + at->first;
        for (size_t i = 0, n; i < at->width; i += n) {
            n = at->width - i < W ? at->width - i : W;
            const V v = FN(coefficient)(staged, i, n);
            if (columns)
                FN(store_sum)(sums + i, OP(add)(FN(coefficient)(sums, i, n), v), n);
            else if (i / W % 2 == 0)
                lanes->sum[0] = OP(add)(lanes->sum[0], v);
            else
                lanes->sum[1] = OP(add)(lanes->sum[1], v);
        }
        if (!columns && at->first + at->width == s->n)
            FN(slope_row_ends)(s, r, lanes);
    }
}

BODY void FN(dot2)(const struct normfuse_pass *arguments, const bool columns)
{
    const struct normfuse_pass local = *arguments, *s = &local;
    const V zero = OP(set1)(0);
    struct FN(sums) sums = {{zero, zero}, {zero, zero}}, slope_sums = sums;
    switch (s->activation) {
#define FORM(activation)                                              \
    case activation:                                                  \
        for (size_t r = 0; r < s->rows; r++) {                        \
            if (columns) {                                            \
                FN(dot2_columns_row)(s, r, 0, s->n, NULL, activation); \
            } else {                                                  \
                FN(dot2_row)(s, r, 0, s->n, NULL, activation, &sums); \
                FN(dot2_row_ends)(s, r, &sums);                       \
            }                                                         \
        }                                                             \
        return;
        INLINE_FORMS(FORM)
#undef FORM
    default: break;
    }
    R z[STAGE + W], g[STAGE + W];
    struct FN(block) at = {0};
    while (FN(next_block)(s, &at, false)) {
        /* Not *s: what calls may have seen is read again after each store (affine leaky_relu backward 1.25 times slower). */
        const R *staged = FN(stage)(arguments, &at, z, g, DOT2, columns);
        if (s->slope_sum)
            FN(sum_slopes)(arguments, &at, z, columns, &slope_sums);
        for (size_t j = 0; j < at.count; j++) {
            const size_t r = at.row + j, end = at.first + at.width;
            if (columns) {
                FN(dot2_columns_row)(s, r, at.first, end, staged + j * at.pitch, STAGED);
            } else {
                FN(dot2_row)(s, r, at.first, end, staged + j * at.pitch, STAGED, &sums);
                if (end == s->n)
                    FN(dot2_row_ends)(s, r, &sums);
            }
        }
    }
}

static void FN(dot2_columns)(const struct normfuse_pass *s) { FN(dot2)(s, true); }

/* A row's sum from those of its columns. */
BODY R FN(sum_of_short_row)(const R *sums, size_t n)
{
    const V zero = OP(set1)(0), second = n > W ? LOAD_PART_R(sums + W, n - W) : zero;
    return OP(hsum)(OP(add)(FN(coefficient)(sums, 0, n < W ? n : W), second));
}

/* Rows that fit the lanes: a value's column has nothing but the value, and a row's sum is that of its lanes. */
static __attribute__((noinline)) void FN(dot2_short_rows)(const struct normfuse_pass *s)
{
    struct FN(repeated) repeated;
    R sum[FN(REPEATED) + W], square[FN(REPEATED) + W], slope_sum[FN(REPEATED) + W];
    const size_t maximum = FN(REPEATED) / s->n;
    for (size_t r = 0, rows; r < s->rows; r += rows) {
        rows = maximum < s->rows - r ? maximum : s->rows - r;
        struct normfuse_pass one = FN(as_columns)(s, &repeated, r * s->n, rows * s->n);
        one.sum = s->n == 1 ? (R *)s->sum + r : sum;
        one.square = s->n == 1 ? (R *)s->square + r : square;
        memset(one.sum, 0, one.n * sizeof(R));
        memset(one.square, 0, one.n * sizeof(R));
        if (s->slope_sum) {
            one.slope_sum = s->n == 1 ? (R *)s->slope_sum + r : slope_sum;
            memset(one.slope_sum, 0, one.n * sizeof(R));
        }
        FN(dot2_columns)(&one);
        for (size_t i = 0; s->n > 1 && i < rows; i++) {
            ((R *)s->sum)[r + i] = FN(sum_of_short_row)(sum + i * s->n, s->n);
            ((R *)s->square)[r + i] = FN(sum_of_short_row)(square + i * s->n, s->n);
            if (s->slope_sum)
                ((R *)s->slope_sum)[r + i] = FN(sum_of_short_row)(slope_sum + i * s->n, s->n);
        }
    }
}

static void FN(dot2_rows)(const struct normfuse_pass *s)
{
    if (s->sum_per_row && s->n < 2 * W && FN(is_repeated)(s))
        FN(dot2_short_rows)(s);
    else
        FN(dot2)(s, false);
}

/* ---- add ---- */

static void FN(add)(const struct normfuse_pass *s)
{
    const V zero = OP(set1)(0);
    for (size_t r = 0; r < s->rows; r++)
        for (size_t i = 0; i < s->n; i += W) {
            const size_t m = s->n - i < W ? s->n - i : W;
            FN(prefetch)(ROW(const T *, x, r) + i, W);
            FN(prefetch)(ROW(const T *, dy, r) + i, W);
            FN(store_values)(ROW(T *, y, r) + i,
                             OP(add)(FN(load_values)(ROW(const T *, x, r) + i, m, zero),
                                     FN(load_values)(ROW(const T *, dy, r) + i, m, zero)), m);
        }
}

/* ---- to and from the compute type ---- */

static void FN(load)(const void *from, void *to, size_t n, bool onto, ptrdiff_t ahead)
{
    const T *in = from;
    R *out = to;
    const size_t whole = n / W * W;
    for (size_t i = 0; i < whole; i += W) {
        AHEAD_L2(in + i, ahead);
        STORE_R(out + i, onto ? OP(add)(LOAD_R(out + i), LOAD(in + i)) : LOAD(in + i));
    }
    if (whole < n) {
        const V v = LOAD_PART(in + whole, n - whole, OP(set1)(0));
        STORE_R(out + whole, onto ? OP(add)(LOAD_R(out + whole), v) : v);
    }
}

static void FN(store)(const void *from, void *to, size_t n, bool stream)
{
    const R *in = from;
    T *out = to;
    const size_t head = stream ? FN(head)(out, n) : 0, lines = stream ? head + (n - head) / LINE * LINE : 0;
    for (size_t i = 0, m; i < head; i += m) {
        m = head - i < W ? head - i : W;
        FN(store_values)(out + i, LOAD_R(in + i), m);
    }
    size_t i = head;
    for (; i < lines; i += W)
        STREAM(out + i, LOAD_R(in + i));
    for (; i + W <= n; i += W)
        STORE(out + i, LOAD_R(in + i));
    if (i < n)
        STORE_PART(out + i, LOAD_R(in + i), n - i);
}

#include "cpu/channel_passes.inl"

#undef LOAD
#undef LOAD_PART
#undef STORE
#undef STORE_PART
#undef STREAM
#undef LOAD_R
#undef LOAD_PART_R
#undef STORE_R
#undef STORE_PART_R
#undef FN
#undef BODY
#undef ROW
#undef LINE
#undef TOGETHER
#undef AHEAD
#undef AHEAD_L2
#undef INLINE_FORMS
#undef PRELU_FORMS
#undef FORWARD_SILU_STAGED
#undef T
#undef DT
