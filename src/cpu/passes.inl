/* SPDX-License-Identifier: MIT
 *
 * passes.inl - the passes of kernels.h, written once. Included once per (instruction set, dtype) with
 *   T, DT         storage type and its suffix (f64, f32, f16, bf16)
 *   R, V, W       compute type (float, double), its vector and the lanes of one
 *   OP(name)      vf_name or vd_name, from the vec_<isa>.h included before
 *   ISA           suffix of the symbols
 *
 * Sums under runs keep 2*W lanes: value i of a row belongs to lane i % (2*W), so every instruction set adds in the same
 * order. 64 lanes were tried too: AVX2 then has to walk the data twice, and nothing gains (docs/decisions/0001).
 *
 * Each body has three forms, chosen by a constant that the compiler folds: plain (identity, nothing added), silu (for
 * diffusion models; nothing added) and any, where activation and additions are uniform run-time branches. The branches
 * predict; what they cost is in docs/decisions/0002. */
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
#define LINE (64 / sizeof(T)) /* values of a cache line: W, or 2*W of 16 bits */
#define TOGETHER 4 /* rows */
#define ROW(type, member, r) ((type)s->member + (ptrdiff_t)(r) * s->CAT(member, _stride))

/* A value of x, dy or another input at column i of a row: n == W all lanes, else the first n. */
BODY V FN(get)(const T *p, size_t n, V fill)
{
    return n == W ? LOAD(p) : LOAD_PART(p, n, fill);
}

BODY void FN(put)(T *p, V v, size_t n)
{
    if (n == W)
        STORE(p, v);
    else
        STORE_PART(p, v, n);
}

BODY void FN(put_sum)(R *p, V v, size_t n)
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
    const size_t n = s->n, body = n / (2 * W) * (2 * W);

    for (size_t r = 0; r < s->rows; r++) {
        const T *x = ROW(const T *, x, r) + (ptrdiff_t)j * s->set_stride;
        for (size_t i = 0; i < body; i += 2 * W) {
            const V d0 = OP(sub)(LOAD(x + i), k), d1 = OP(sub)(LOAD(x + i + W), k);
            sum0 = OP(add)(sum0, d0);
            sum1 = OP(add)(sum1, d1);
            square0 = OP(fma)(d0, d0, square0);
            square1 = OP(fma)(d1, d1, square1);
        }
        if (body < n) { /* missing lanes hold k: they add 0 */
            const size_t rest = n - body;
            const V d0 = OP(sub)(FN(get)(x + body, rest < W ? rest : W, k), k);
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

static void FN(moments_runs)(const struct normfuse_pass *arguments)
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
    const V k = FN(coefficient)(s->k, c, n), d = OP(sub)(FN(get)(ROW(const T *, x, r) + c, n, k), k);
    FN(put_sum)(sums, OP(add)(FN(coefficient)(sums, 0, n), d), n);
    FN(put_sum)(squares, OP(fma)(d, d, FN(coefficient)(squares, 0, n)), n);
}

/* Rows r to r + TOGETHER - 1, each column's values added in the order of the rows. */
BODY void FN(moments_of_rows)(const struct normfuse_pass *s, size_t r, const bool wide)
{
    const size_t block = TOGETHER * s->n, ahead = block > 4096 / sizeof(T) ? block : 4096 / sizeof(T);
    const T *x = ROW(const T *, x, r);
    size_t c = 0;
    for (; c + LINE <= s->n; c += LINE) {
        for (size_t j = 0; j < TOGETHER; j++) /* addresses of no value are only asked for, not read */
            __builtin_prefetch(wide ? ROW(const T *, x, r + TOGETHER + j) + c : x + c * TOGETHER + j * LINE + ahead, 0, 3);
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
    /* Reading 16-bit values is cheap enough for the stores of the sums to matter. Rows that follow one another are asked
     * for in the order of memory, wide ones as they are read (docs/decisions/0003, 0010). */
    if (sizeof(T) == 2) {
        const bool wide = s->n * sizeof(T) >= 3072;
        if (wide)
            for (; r + TOGETHER <= s->rows; r += TOGETHER)
                FN(moments_of_rows)(s, r, true);
        else if (s->x_stride == (ptrdiff_t)s->n)
            for (; r + TOGETHER <= s->rows; r += TOGETHER)
                FN(moments_of_rows)(s, r, false);
    }
    for (; r < s->rows; r++) {
        size_t c = 0;
        for (; c + W <= s->n; c += W)
            FN(moments_columns_step)(s, r, c, W);
        if (c < s->n)
            FN(moments_columns_step)(s, r, c, s->n - c);
    }
}

/* ---- affine ---- */

BODY void FN(affine_step)(const struct normfuse_pass *s, size_t r, size_t i, size_t n, V k, V a, V b, const bool columns,
                          const int form, const bool stream)
{
    const T *x = ROW(const T *, x, r) + i;
    T *y = ROW(T *, y, r) + i;

    if (columns) {
        k = FN(coefficient)(s->k, i, n);
        a = FN(coefficient)(s->a, i, n);
        b = FN(coefficient)(s->b, i, n);
    }
    AHEAD(x, s->ahead_x);
    V z = OP(fma)(OP(sub)(FN(get)(x, n, k), k), a, b);
    if (form == ANY && s->post_add)
        z = OP(add)(z, FN(get)(ROW(const T *, post_add, r) + i, n, k));
    if (form != PLAIN)
        z = OP(activation)(form == SILU ? NORMFUSE_SILU : s->activation, OP(set1)((R)s->act_param), z);
    if (stream)
        STREAM(y, z);
    else
        FN(put)(y, z, n);
}

/* Values until y is at the start of a cache line: only whole lines are streamed, since one that is written in part by
 * streaming and in part by ordinary stores goes to memory more than once. */
BODY size_t FN(head)(const T *y, size_t n)
{
    const size_t head = (size_t)(-(uintptr_t)y / sizeof(T)) % LINE;
    return head < n ? head : n;
}

/* Asks for the cache lines that a row shares with its neighbours: they are written by ordinary stores, and the streaming
 * stores behind one that misses would wait for it (batch norm 64x1024x14x14: 1.7 copy floors for this pass alone). */
BODY void FN(own_edges)(const T *row, size_t n)
{
    if ((uintptr_t)row % 64)
        __builtin_prefetch(row, 1, 3);
    if ((uintptr_t)(row + n) % 64)
        __builtin_prefetch(row + n - 1, 1, 3);
}

/* Columns [i, end) of a row, without streaming. One copy for all forms: few values come here, and the bits are the same. */
static __attribute__((noinline)) void FN(affine_edge)(const struct normfuse_pass *s, size_t r, size_t i, size_t end, bool columns)
{
    const size_t step = columns ? 0 : r * s->coefficient_step;
    const V k = OP(set1)(((const R *)s->k)[step]), a = OP(set1)(((const R *)s->a)[step]), b = OP(set1)(((const R *)s->b)[step]);
    for (size_t m; i < end; i += m) {
        m = end - i < W ? end - i : W;
        FN(affine_step)(s, r, i, m, k, a, b, columns, ANY, false);
    }
}

BODY void FN(affine_body)(const struct normfuse_pass *s, const bool columns, const int form, const bool stream)
{
    for (size_t r = 0; stream && r < 2 && r < s->rows; r++)
        FN(own_edges)(ROW(const T *, y, r), s->n);
    for (size_t r = 0; r < s->rows; r++) {
        const size_t step = columns ? 0 : r * s->coefficient_step, n = s->n;
        const V zero = OP(set1)(0);
        const V k = columns ? zero : OP(set1)(((const R *)s->k)[step]);
        const V a = columns ? zero : OP(set1)(((const R *)s->a)[step]);
        const V b = columns ? zero : OP(set1)(((const R *)s->b)[step]);
        if (stream && r + 2 < s->rows)
            FN(own_edges)(ROW(const T *, y, r + 2), n);
        size_t i = 0;
        if (stream) {
            const size_t head = FN(head)(ROW(const T *, y, r), n), body = head + (n - head) / LINE * LINE;
            if (head)
                FN(affine_edge)(s, r, 0, head, columns);
            for (i = head; i < body; i += W)
                FN(affine_step)(s, r, i, W, k, a, b, columns, form, true);
            if (body < n)
                FN(affine_edge)(s, r, body, n, columns);
            continue;
        }
        for (; i + W <= n; i += W)
            FN(affine_step)(s, r, i, W, k, a, b, columns, form, false);
        if (i < n)
            FN(affine_step)(s, r, i, n - i, k, a, b, columns, form, false);
    }
}

BODY void FN(affine)(const struct normfuse_pass *arguments, const bool columns)
{
    const struct normfuse_pass local = *arguments, *s = &local;
    if (s->activation == NORMFUSE_SILU && !s->post_add)
        s->stream ? FN(affine_body)(s, columns, SILU, true) : FN(affine_body)(s, columns, SILU, false);
    else if (s->activation != NORMFUSE_IDENTITY || s->post_add)
        s->stream ? FN(affine_body)(s, columns, ANY, true) : FN(affine_body)(s, columns, ANY, false);
    else
        s->stream ? FN(affine_body)(s, columns, PLAIN, true) : FN(affine_body)(s, columns, PLAIN, false);
}

static void FN(affine_runs)(const struct normfuse_pass *s) { FN(affine)(s, false); }
static void FN(affine_columns)(const struct normfuse_pass *s) { FN(affine)(s, true); }

/* ---- dot2 and affine2 ---- */

/* dy' at column i; *d is x - k. Missing lanes give dy' = 0 and d = 0. */
BODY V FN(gradient)(const struct normfuse_pass *s, size_t r, size_t i, size_t n, V k, V a, V b, const int form, V *d)
{
    const T *x = ROW(const T *, x, r) + i, *dy = ROW(const T *, dy, r) + i;
    const V zero = OP(set1)(0);
    V g = FN(get)(dy, n, zero);
    *d = OP(sub)(FN(get)(x, n, k), k);
    if (form == SILU || (form == ANY && s->activation != NORMFUSE_IDENTITY)) {
        V z = OP(fma)(*d, a, b);
        if (form == ANY && s->post_add)
            z = OP(add)(z, FN(get)(ROW(const T *, post_add, r) + i, n, zero));
        g = OP(activation_gradient)(form == SILU ? NORMFUSE_SILU : s->activation, OP(set1)((R)s->act_param), g, z);
    }
    return g;
}

/* What dot2 writes beside its sums: dpost_add = dy', and y = p*dy' [+ du], the dx of a set without statistics, while x and
 * dy are at hand. */
BODY void FN(keep)(const struct normfuse_pass *s, size_t r, size_t i, size_t n, V p, V g)
{
    if (s->dpost_add)
        FN(put)(ROW(T *, dpost_add, r) + i, g, n);
    if (s->y) {
        T *dx = ROW(T *, y, r) + i;
        V v = OP(mul)(p, g);
        if (s->du)
            v = OP(add)(v, FN(get)(ROW(const T *, du, r) + i, n, g));
        if (s->stream && n == W && (uintptr_t)dx % (W * sizeof(T)) == 0)
            STREAM(dx, v);
        else
            FN(put)(dx, v, n);
    }
}

BODY void FN(dot2_runs_body)(const struct normfuse_pass *s, const int form)
{
    const V zero = OP(set1)(0);
    V sum0 = zero, sum1 = zero, square0 = zero, square1 = zero;
    const size_t n = s->n;

    for (size_t r = 0; r < s->rows; r++) {
        const size_t step = r * s->coefficient_step;
        const V k = OP(set1)(((const R *)s->k)[step]);
        const V a = form != PLAIN ? OP(set1)(((const R *)s->a)[step]) : zero, b = form != PLAIN ? OP(set1)(((const R *)s->b)[step]) : zero;
        const V p = form == ANY && s->y ? OP(set1)(((const R *)s->p)[step]) : zero;
        size_t i = 0;
        V d0, d1;
        for (; i + 2 * W <= n; i += 2 * W) {
            const V g0 = FN(gradient)(s, r, i, W, k, a, b, form, &d0);
            const V g1 = FN(gradient)(s, r, i + W, W, k, a, b, form, &d1);
            sum0 = OP(add)(sum0, g0);
            sum1 = OP(add)(sum1, g1);
            square0 = OP(fma)(g0, d0, square0);
            square1 = OP(fma)(g1, d1, square1);
            if (form == ANY) {
                FN(keep)(s, r, i, W, p, g0);
                FN(keep)(s, r, i + W, W, p, g1);
            }
        }
        for (int j = 0; i < n; i += W, j++) {
            const size_t m = n - i < W ? n - i : W;
            const V g = FN(gradient)(s, r, i, m, k, a, b, form, &d0);
            if (j == 0) {
                sum0 = OP(add)(sum0, g);
                square0 = OP(fma)(g, d0, square0);
            } else {
                sum1 = OP(add)(sum1, g);
                square1 = OP(fma)(g, d0, square1);
            }
            if (form == ANY)
                FN(keep)(s, r, i, m, p, g);
        }
        if (s->sum_per_row || r + 1 == s->rows) {
            const size_t at = s->sum_per_row ? r : 0;
            ((R *)s->sum)[at] = OP(hsum)(OP(add)(sum0, sum1));
            ((R *)s->square)[at] = OP(hsum)(OP(add)(square0, square1));
            sum0 = sum1 = square0 = square1 = zero;
        }
    }
}

static void FN(dot2_runs)(const struct normfuse_pass *arguments)
{
    const struct normfuse_pass local = *arguments, *s = &local;
    if (s->activation == NORMFUSE_SILU && !s->post_add && !s->dpost_add && !s->y)
        FN(dot2_runs_body)(s, SILU);
    else if (s->activation != NORMFUSE_IDENTITY || s->dpost_add || s->y)
        FN(dot2_runs_body)(s, ANY);
    else
        FN(dot2_runs_body)(s, PLAIN);
}

BODY void FN(dot2_columns_step)(const struct normfuse_pass *s, size_t r, size_t c, size_t n, const int form)
{
    R *sums = (R *)s->sum + c, *squares = (R *)s->square + c;
    const V zero = OP(set1)(0), k = FN(coefficient)(s->k, c, n);
    const V a = form != PLAIN ? FN(coefficient)(s->a, c, n) : zero, b = form != PLAIN ? FN(coefficient)(s->b, c, n) : zero;
    V d;
    const V g = FN(gradient)(s, r, c, n, k, a, b, form, &d);
    FN(put_sum)(sums, OP(add)(FN(coefficient)(sums, 0, n), g), n);
    FN(put_sum)(squares, OP(fma)(g, d, FN(coefficient)(squares, 0, n)), n);
    if (form == ANY)
        FN(keep)(s, r, c, n, s->y ? FN(coefficient)(s->p, c, n) : zero, g);
}

BODY void FN(dot2_columns_body)(const struct normfuse_pass *s, const int form)
{
    for (size_t r = 0; r < s->rows; r++) {
        size_t c = 0;
        for (; c + W <= s->n; c += W)
            FN(dot2_columns_step)(s, r, c, W, form);
        if (c < s->n)
            FN(dot2_columns_step)(s, r, c, s->n - c, form);
    }
}

static void FN(dot2_columns)(const struct normfuse_pass *arguments)
{
    const struct normfuse_pass local = *arguments, *s = &local;
    if (s->activation == NORMFUSE_SILU && !s->post_add && !s->dpost_add && !s->y)
        FN(dot2_columns_body)(s, SILU);
    else if (s->activation != NORMFUSE_IDENTITY || s->dpost_add || s->y)
        FN(dot2_columns_body)(s, ANY);
    else
        FN(dot2_columns_body)(s, PLAIN);
}

BODY void FN(affine2_step)(const struct normfuse_pass *s, size_t r, size_t i, size_t n, V k, V a, V b, V p, V q, V rest,
                           const bool columns, const int form, const bool stream)
{
    T *dx = ROW(T *, y, r) + i;
    V d;
    if (columns) {
        k = FN(coefficient)(s->k, i, n);
        p = FN(coefficient)(s->p, i, n);
        if (form != PLAIN) {
            a = FN(coefficient)(s->a, i, n);
            b = FN(coefficient)(s->b, i, n);
        }
        if (form != ANY || s->q) {
            q = FN(coefficient)(s->q, i, n);
            rest = FN(coefficient)(s->r, i, n);
        }
    }
    AHEAD(ROW(const T *, x, r) + i, s->ahead_x);
    AHEAD(ROW(const T *, dy, r) + i, s->ahead_dy);
    const V g = FN(gradient)(s, r, i, n, k, a, b, form, &d);
    V v;
    if (form == ANY) {
        v = s->q ? OP(fma)(p, g, OP(fma)(q, d, rest)) : OP(mul)(p, g);
        if (s->du)
            v = OP(add)(v, FN(get)(ROW(const T *, du, r) + i, n, k));
        if (s->dpost_add)
            FN(put)(ROW(T *, dpost_add, r) + i, g, n);
    } else {
        v = OP(fma)(p, g, OP(fma)(q, d, rest));
    }
    if (stream)
        STREAM(dx, v);
    else
        FN(put)(dx, v, n);
}

static __attribute__((noinline)) void FN(affine2_edge)(const struct normfuse_pass *s, size_t r, size_t i, size_t end, bool columns)
{
    const size_t step = columns ? 0 : r * s->coefficient_step;
    const V k = OP(set1)(((const R *)s->k)[step]), a = OP(set1)(((const R *)s->a)[step]), b = OP(set1)(((const R *)s->b)[step]);
    const V p = OP(set1)(((const R *)s->p)[step]), q = s->q ? OP(set1)(((const R *)s->q)[step]) : k;
    const V rest = s->q ? OP(set1)(((const R *)s->r)[step]) : k;
    for (size_t m; i < end; i += m) {
        m = end - i < W ? end - i : W;
        FN(affine2_step)(s, r, i, m, k, a, b, p, q, rest, columns, ANY, false);
    }
}

BODY void FN(affine2_body)(const struct normfuse_pass *s, const bool columns, const int form, const bool stream)
{
    const V zero = OP(set1)(0);
    for (size_t r = 0; stream && r < 2 && r < s->rows; r++)
        FN(own_edges)(ROW(const T *, y, r), s->n);
    for (size_t r = 0; r < s->rows; r++) {
        const size_t step = columns ? 0 : r * s->coefficient_step, n = s->n;
        V k = zero, a = zero, b = zero, p = zero, q = zero, rest = zero;
        if (!columns) {
            k = OP(set1)(((const R *)s->k)[step]);
            p = OP(set1)(((const R *)s->p)[step]);
            if (form != PLAIN) {
                a = OP(set1)(((const R *)s->a)[step]);
                b = OP(set1)(((const R *)s->b)[step]);
            }
            if (form != ANY || s->q) {
                q = OP(set1)(((const R *)s->q)[step]);
                rest = OP(set1)(((const R *)s->r)[step]);
            }
        }
        if (stream && r + 2 < s->rows)
            FN(own_edges)(ROW(const T *, y, r + 2), n);
        size_t i = 0;
        if (stream) {
            const size_t head = FN(head)(ROW(const T *, y, r), n), body = head + (n - head) / LINE * LINE;
            if (head)
                FN(affine2_edge)(s, r, 0, head, columns);
            for (i = head; i < body; i += W)
                FN(affine2_step)(s, r, i, W, k, a, b, p, q, rest, columns, form, true);
            if (body < n)
                FN(affine2_edge)(s, r, body, n, columns);
            continue;
        }
        for (; i + W <= n; i += W)
            FN(affine2_step)(s, r, i, W, k, a, b, p, q, rest, columns, form, false);
        if (i < n)
            FN(affine2_step)(s, r, i, n - i, k, a, b, p, q, rest, columns, form, false);
    }
}

BODY void FN(affine2)(const struct normfuse_pass *arguments, const bool columns)
{
    const struct normfuse_pass local = *arguments, *s = &local;
    const bool more = s->post_add || s->du || s->dpost_add || !s->q;
    if (s->activation == NORMFUSE_SILU && !more)
        s->stream ? FN(affine2_body)(s, columns, SILU, true) : FN(affine2_body)(s, columns, SILU, false);
    else if (s->activation != NORMFUSE_IDENTITY || more)
        s->stream ? FN(affine2_body)(s, columns, ANY, true) : FN(affine2_body)(s, columns, ANY, false);
    else
        s->stream ? FN(affine2_body)(s, columns, PLAIN, true) : FN(affine2_body)(s, columns, PLAIN, false);
}

static void FN(affine2_runs)(const struct normfuse_pass *s) { FN(affine2)(s, false); }
static void FN(affine2_columns)(const struct normfuse_pass *s) { FN(affine2)(s, true); }

/* ---- add ---- */

static void FN(add)(const struct normfuse_pass *s)
{
    const V zero = OP(set1)(0);
    for (size_t r = 0; r < s->rows; r++)
        for (size_t i = 0; i < s->n; i += W) {
            const size_t m = s->n - i < W ? s->n - i : W;
            const V u = OP(add)(FN(get)(ROW(const T *, x, r) + i, m, zero), FN(get)(ROW(const T *, dy, r) + i, m, zero));
            FN(put)(ROW(T *, y, r) + i, u, m);
        }
}

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
#undef T
#undef DT
