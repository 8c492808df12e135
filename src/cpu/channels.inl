/* SPDX-License-Identifier: MIT
 *
 * channels.inl - norm over channels where the positions of a channel are adjacent (kernels.h says what each function does).
 * Included once per compute type, behind activation.inl, with R, RT, V, W and OP as passes.inl has them.
 *
 * A position is a lane: what is computed of it does not depend on where in a vector it lies. Rows are whole vectors; lanes
 * behind position n hold anything, and are left out of sums over positions. */
#define REAL(name) CAT3(channels_##name, RT, ISA)
#define LOAD_R(p) CAT(OP(load_), RT)(p)
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

static void REAL(sums)(const struct normfuse_channels *s)
{
    R *sums = s->sum, *squares = s->square;
    for (size_t p = 0; p < s->width && !s->continues; p += W) {
        STORE_R(sums + p, OP(set1)(0));
        STORE_R(squares + p, OP(set1)(0));
    }
    for (size_t r = 0; r < s->channels; r++) {
        const R *g = (const R *)s->gradient + r * s->pitch, *h = (const R *)s->tile + r * s->pitch;
        const V weight = OP(set1)(((const R *)s->weight)[r]);
        V of_bias = OP(set1)(0), of_weight = of_bias;
        for (size_t p = 0; p < s->width; p += W) {
            const size_t n = p < s->positions ? s->positions - p : 0;
            const V gradient = OP(leading)(LOAD_R(g + p), n), normalized = OP(leading)(LOAD_R(h + p), n);
            const V scaled = OP(mul)(gradient, weight);
            of_bias = OP(add)(of_bias, gradient);
            of_weight = OP(fma)(gradient, normalized, of_weight);
            STORE_R(sums + p, OP(add)(LOAD_R(sums + p), scaled));
            STORE_R(squares + p, OP(fma)(scaled, normalized, LOAD_R(squares + p)));
        }
        ((R *)s->sum_bias)[r] = OP(hsum)(of_bias);
        ((R *)s->sum_weight)[r] = OP(hsum)(of_weight);
    }
}

#undef REAL
#undef LOAD_R
#undef STORE_R
#undef BODY
