/* SPDX-License-Identifier: MIT
 *
 * pieces.c - the reduce and the apply part of one piece: tiles in place or through a copy, the passes over them, the sums of
 * chunks and their joins. */
#include "cpu/plan.h"

#include <math.h>

/* ---- tiles ------------------------------------------------------------------------------------------------------- */

static ptrdiff_t row_stride(const struct plan *plan, const struct normfuse_view *v, const struct tile *t)
{
    const struct normfuse_problem *p = plan->p;
    if (!p->columns)
        return plan->batch && !t->across ? v->batch : v->channel;
    return p->s > 1 ? v->position : v->batch;
}

static char *element(const struct plan *plan, const struct normfuse_view *v, const struct tile *t)
{
    return v->data + (t->n * v->batch + t->c * v->channel + t->s * v->position) * (ptrdiff_t)plan->type_bytes;
}

/* Address of row r of a tile when rows may lie in several samples. */
static char *row_address(const struct plan *plan, const struct normfuse_view *v, const struct tile *t, int64_t r)
{
    const struct normfuse_problem *p = plan->p;
    if (!p->columns)
        return element(plan, v, t) + r * row_stride(plan, v, t) * (ptrdiff_t)plan->type_bytes;
    const int64_t flat = t->s + r;
    const struct tile at = {.n = t->n + flat / p->s, .c = t->c, .s = flat % p->s};
    return element(plan, v, &at);
}

/* Strides in bytes; four values are read before one is written. */
static inline __attribute__((always_inline)) void copy_values(char *to, ptrdiff_t to_stride, const char *from,
                                                              ptrdiff_t from_stride, int64_t n, const size_t bytes)
{
    int64_t i = 0;
    for (; i + 4 <= n; i += 4, to += 4 * to_stride, from += 4 * from_stride) {
        uint64_t a, b, c, d;
        memcpy(&a, from, bytes);
        memcpy(&b, from + from_stride, bytes);
        memcpy(&c, from + 2 * from_stride, bytes);
        memcpy(&d, from + 3 * from_stride, bytes);
        memcpy(to, &a, bytes);
        memcpy(to + to_stride, &b, bytes);
        memcpy(to + 2 * to_stride, &c, bytes);
        memcpy(to + 3 * to_stride, &d, bytes);
    }
    for (; i < n; i++, to += to_stride, from += from_stride)
        memcpy(to, from, bytes);
}

void normfuse_copy_strided(char *to, ptrdiff_t to_stride, const char *from, ptrdiff_t from_stride, int64_t n,
                           size_t bytes)
{
    if (to_stride == 1 && from_stride == 1) {
        memcpy(to, from, (size_t)n * bytes);
        return;
    }
    to_stride *= (ptrdiff_t)bytes;
    from_stride *= (ptrdiff_t)bytes;
    switch (bytes) { /* constant sizes become single moves */
    case 2: copy_values(to, to_stride, from, from_stride, n, 2); break;
    case 4: copy_values(to, to_stride, from, from_stride, n, 4); break;
    default: copy_values(to, to_stride, from, from_stride, n, 8); break;
    }
}

/* Row r of a tile to a stage, or back. */
static void copy_row(const struct plan *plan, const struct normfuse_view *v, const struct tile *t, int64_t r,
                     char *stage, bool to_stage)
{
    const struct normfuse_problem *p = plan->p;
    const size_t bytes = plan->type_bytes;
    char *at = row_address(plan, v, t, r);
    const ptrdiff_t inner = p->columns && plan->spread == 1 ? (p->c > 1 ? v->channel : 1)
                            : plan->spread > 1 || p->s > 1  ? v->position
                                                            : 1;
    const int64_t n = plan->spread > 1 ? plan->spread : t->width;
    for (int64_t i = 0; i < t->width; i += n, at += v->channel * (ptrdiff_t)bytes, stage += (size_t)n * bytes)
        normfuse_copy_strided(to_stage ? stage : at, to_stage ? 1 : inner, to_stage ? at : stage, to_stage ? inner : 1,
                              n, bytes);
}

/* The tile of an input, in place or copied to the stage; *stride is between its rows. */
static const void *input(const struct plan *plan, const struct normfuse_view *v, const struct tile *t, char *stage,
                         ptrdiff_t *stride)
{
    if (direct(plan, v)) {
        *stride = row_stride(plan, v, t);
        return element(plan, v, t);
    }
    for (int64_t r = 0; r < t->rows; r++)
        copy_row(plan, v, t, r, stage + (size_t)(r * t->width) * plan->type_bytes, true);
    *stride = t->width;
    return stage;
}

/* The place that a tile of an output is written to: itself, or the stage, which scatter() copies out. */
static void *output(const struct plan *plan, const struct normfuse_view *v, const struct tile *t, char *stage,
                    ptrdiff_t *stride)
{
    if (direct(plan, v)) {
        *stride = row_stride(plan, v, t);
        return element(plan, v, t);
    }
    *stride = t->width;
    return stage;
}

static void scatter(const struct plan *plan, const struct normfuse_view *v, const struct tile *t, char *stage)
{
    if (v->data && !direct(plan, v))
        for (int64_t r = 0; r < t->rows; r++)
            copy_row(plan, v, t, r, stage + (size_t)(r * t->width) * plan->type_bytes, false);
}

/* Runs a pass on a tile; rows that are taken as one: whole ones, then what is left of one. */
static void run_tile(const struct plan *plan, normfuse_pass_function pass, const struct normfuse_pass *whole)
{
    if (plan->folded == 1) {
        pass(whole);
        return;
    }
    struct normfuse_pass s = *whole;
    const size_t folded = (size_t)plan->folded, width = s.n, rest = s.rows % folded, b = plan->type_bytes;
    ptrdiff_t *strides[] = {&s.x_stride, &s.dy_stride,        &s.post_add_stride, &s.du_stride,
                            &s.y_stride, &s.dpost_add_stride, &s.kept_stride};
    for (size_t i = 0; i < sizeof strides / sizeof *strides; i++)
        *strides[i] *= (ptrdiff_t)folded;
    s.rows /= folded;
    s.n = width * folded;
    if (s.rows)
        pass(&s);
    if (rest) {
        const size_t done = s.rows * s.n * b;
        s.x = s.x ? (const char *)s.x + done : NULL;
        s.dy = s.dy ? (const char *)s.dy + done : NULL;
        s.post_add = s.post_add ? (const char *)s.post_add + done : NULL;
        s.du = s.du ? (const char *)s.du + done : NULL;
        s.y = s.y ? (char *)s.y + done : NULL;
        s.dpost_add = s.dpost_add ? (char *)s.dpost_add + done : NULL;
        s.kept = s.kept ? (char *)s.kept + s.rows * s.n * plan->real_bytes : NULL;
        s.rows = 1;
        s.n = width * rest;
        pass(&s);
    }
}

static const void *at_real(const struct plan *plan, const void *array, int64_t i)
{
    return array ? (const char *)array + (size_t)i * plan->real_bytes : NULL;
}

static const struct team *team_of(const struct plan *plan, const struct worker *w)
{
    return plan->teams_of_one ? &w->own : &plan->shared;
}

/* The place of a tile's first value among those of its bundle that are held for the apply part, *stride from row to row: a
 * bundle's values, or rows, follow one another. */
static int64_t place_in_bundle(const struct plan *plan, const struct tile *t, ptrdiff_t *stride)
{
    const struct normfuse_problem *p = plan->p;
    const int64_t n = plan->batch ? t->n : 0, sample = plan->bundle_channels * plan->spread * p->s; /* values of one, whatever is adjacent */
    if (p->columns) {
        *stride = sample / p->s;
        return (n * p->s + t->s) * *stride;
    }
    *stride = t->across_values || (plan->batch && !t->across) ? plan->bundle_channels * p->s : p->s;
    return (n * plan->bundle_channels + t->c % plan->bundle_channels) * p->s + t->s;
}

/* The tile of u: x, or x + pre_add, rounded; `first` is the part of the call that makes it. A call: inlined
 * it is 1 KB, five times. */
static __attribute__((noinline)) const void *input_u(const struct plan *plan, struct worker *w, const struct tile *t,
                                                     bool first, ptrdiff_t *stride)
{
    const struct normfuse_problem *p = plan->p;
    if (!plan->add)
        return input(plan, &p->x, t, w->stage[0], stride);
    if (p->u.data && !first)
        return input(plan, &p->u, t, w->stage[0], stride);
    ptrdiff_t held_stride = 0;
    char *const held =
        plan->held_u ? team_of(plan, w)->u + (size_t)place_in_bundle(plan, t, &held_stride) * plan->type_bytes : NULL;
    if (held && !first) {
        *stride = held_stride;
        return held;
    }
    struct normfuse_pass s = {.rows = (size_t)t->rows, .n = (size_t)t->width};
    s.x = input(plan, &p->x, t, w->stage[0], &s.x_stride);
    s.dy = input(plan, &p->pre_add, t, w->stage[4], &s.dy_stride);
    if (p->u.data)
        s.y = output(plan, &p->u, t, w->stage[0], &s.y_stride);
    else {
        s.y = held ? held : w->stage[0];
        s.y_stride = held ? held_stride : t->width;
    }
    if (s.x_stride == t->width && s.dy_stride == t->width && s.y_stride == t->width) { /* short rows cost most of a vector each */
        s.n *= s.rows;
        s.rows = 1;
    }
    plan->pass->add(&s);
    scatter(plan, &p->u, t, w->stage[0]);
    *stride = s.y_stride;
    return s.y;
}

/* ---- pieces ------------------------------------------------------------------------------------------------------ */

/* The tile at (segment, offset) of a bundle: rows: `rows` segments of `width` values; columns: `rows` rows. */
static struct tile tile_at(const struct plan *plan, int64_t bundle, int64_t segment, int64_t offset, int64_t rows,
                           int64_t width)
{
    struct tile t = {.rows = rows, .width = width};
    if (plan->p->columns) {
        t.n = plan->batch ? segment + offset / larger(1, plan->length) : sample_of(plan, bundle);
        t.c = first_channel(plan, bundle);
        t.s = plan->batch ? offset % larger(1, plan->length) : offset;
    } else if (plan->batch) {
        t.n = segment;
        t.c = bundle * plan->bundle_groups;
        t.s = offset;
    } else {
        t.n = sample_of(plan, bundle);
        t.c = group_of(plan, bundle) * plan->group_channels + segment;
        t.s = offset;
    }
    return t;
}

/* Bytes from what is read of a tile, rows `stride` apart, to what the apply part prefetches while it stores: the same tile of
 * the next bundle in a tensor, or where it is the first to read the tile what comes soon; 0: nothing. */
static ptrdiff_t ahead_of(const struct plan *plan, const struct normfuse_view *v, const struct tile *t, int64_t next,
                          const void *read, ptrdiff_t stride)
{
    if (!plan->reduce)
        return NORMFUSE_PREFETCH_BYTES;
    if (next < 0 || plan->apply_staged || stride != row_stride(plan, v, t))
        return 0;
    const struct normfuse_problem *p = plan->p;
    struct tile to = *t;
    if (!plan->batch)
        to.n = next / plan->sample_bundles;
    if (p->columns)
        to.c += first_channel(plan, next) - first_channel(plan, next - 1);
    else
        to.c += (group_of(plan, next) - group_of(plan, next - 1)) * plan->group_channels;
    return element(plan, v, &to) - (const char *)read;
}

/* ---- joining statistics ------------------------------------------------------------------------------------------ */

/* Chan, Golub and LeVeque 1979. An empty side leaves the other's bits alone. */
static struct moments join(struct moments a, struct moments b)
{
    if (a.count == 0)
        return b;
    if (b.count == 0)
        return a;
    const double count = a.count + b.count, delta = b.mean - a.mean;
    return (struct moments){count, a.mean + delta * (b.count / count),
                            a.m2 + b.m2 + delta * delta * (a.count * b.count / count)};
}

/* One value of u as the passes see it, of tensors that are not f64. */
static double value_u(const struct plan *plan, int64_t n, int64_t c, int64_t s)
{
    const struct normfuse_problem *p = plan->p;
    const struct tile at = {.n = n, .c = c, .s = s};
    if (!plan->add)
        return normfuse_load(element(plan, &p->x, &at), p->type);
    if (p->u.data) /* written by now; u may be x or pre_add */
        return normfuse_load(element(plan, &p->u, &at), p->type);
    const float u = (float)normfuse_load(element(plan, &p->x, &at), p->type) +
                    (float)normfuse_load(element(plan, &p->pre_add, &at), p->type);
    char rounded[8];
    normfuse_store(rounded, p->type, (double)u);
    return normfuse_load(rounded, p->type);
}

/* The moments of rows x width values from channel, or column of the tile, c on in double: the slow way for values that f32 cannot square. */
static struct moments moments_in_double(const struct plan *plan, const struct tile *t, int64_t c, int64_t rows,
                                        int64_t width)
{
    const struct normfuse_problem *p = plan->p;
    struct moments m = {(double)rows * (double)width, 0, 0};
    for (int sweep = 0; sweep < 2; sweep++) {
        double sum = 0;
        for (int64_t r = 0; r < rows; r++)
            for (int64_t i = 0; i < width; i++) {
                double v;
                if (p->columns)
                    v = plan->spread > 1 ? value_u(plan, t->n + r, t->c + (c + i) / plan->spread, (c + i) % plan->spread)
                                         : value_u(plan, t->n + (t->s + r) / p->s, t->c + c + i, (t->s + r) % p->s);
                else if (plan->batch)
                    v = value_u(plan, t->n + r, c, t->s + i);
                else
                    v = value_u(plan, t->n, c + r, t->s + i);
                sum += sweep ? (v - m.mean) * (v - m.mean) : v;
            }
        *(sweep ? &m.m2 : &m.mean) = sweep ? sum : sum / m.count;
    }
    return m;
}

/* Rows of a tile under columns: few where it goes through a copy. */
static int64_t rows_of_tile(const struct plan *plan, int64_t otherwise)
{
    if (!plan->staged)
        return otherwise;
    return larger(plan->folded,
                  STAGE_VALUES / larger(1, plan->bundle_channels * plan->spread) / plan->folded * plan->folded);
}

/* ---- reduce: moments --------------------------------------------------------------------------------------------- */

/* k of the j-th of several sets; 0 where a mean is none. */
static void store_shift(const struct plan *plan, struct worker *w, int64_t j, double k)
{
    store_real(plan, w->shift, j, isfinite(k) ? k : 0);
}

/* The moments of t's rows of `width` values from channel, or column of the tile, c on, whose sums are the j-th. */
static struct moments moments_of_chunk(const struct plan *plan, const struct worker *w, const struct tile *t, int64_t c,
                                       int64_t width, int64_t j)
{
    const double k = load_real(plan, w->shift, j), sum = load_real(plan, w->sum, j),
                 square = load_real(plan, w->square, j);
    if (!plan->is_double && out_of_range(k, sum, square))
        return moments_in_double(plan, t, c, t->rows, width);
    const double values = (double)(t->rows * width), m2 = square - sum * sum / values;
    return (struct moments){values, k + sum / values, m2 < 0 ? 0 : m2};
}

/* Finds the moments of one chunk each of `count` sets of channels, `apart` channels from one to the next; t is the first
 * one's chunk. last[] are the moments of the chunks before, then of these. A call: inlined it is 3 KB, twice. */
static __attribute__((noinline)) void chunk_of_rows(const struct plan *plan, struct worker *w, const struct tile *t,
                                                    int64_t count, int64_t apart, struct moments *last)
{
    const struct normfuse_problem *p = plan->p;
    ptrdiff_t stride;
    const void *u = input_u(plan, w, t, true, &stride);
    struct normfuse_pass s = {
        .x = u, .x_stride = stride, .k = w->shift, .sum = w->sum, .square = w->square, .sets = (size_t)count};
    s.set_stride = apart * p->x.channel;
    const bool first = last[0].count == 0;
    double sampled = 0;
    if (first) { /* the mean of the first values: then the chunk's variance keeps its digits */
        s.rows = (size_t)smaller(t->rows, divide_up(SHIFT_VALUES, t->width));
        s.n = (size_t)smaller(t->width, SHIFT_VALUES);
        sampled = (double)(s.rows * s.n);
        memset(w->shift, 0, (size_t)count * plan->real_bytes);
        plan->pass->moments_rows(&s);
    }
    for (int64_t j = 0; j < count; j++)
        store_shift(plan, w, j, first ? load_real(plan, w->sum, j) / sampled : last[j].mean);
    s.rows = (size_t)t->rows;
    s.n = (size_t)t->width;
    plan->pass->moments_rows(&s);
    for (int64_t j = 0; j < count; j++)
        last[j] = moments_of_chunk(plan, w, t, t->c + j * apart, t->width, j);
}

/* Values of a row that are summed at once: the row cut evenly into chunks. */
static int64_t chunk_width(int64_t length)
{
    if (length <= CHUNK_VALUES)
        return length;
    return round_up(divide_up(length, divide_up(length, CHUNK_VALUES)), 32);
}

/* The moments of x are those of x + pre_bias but for the mean. */
static struct moments with_bias(const struct plan *plan, struct moments of_x, int64_t n, int64_t c)
{
    of_x.mean += pre_bias_of(plan, n, c);
    return of_x;
}

/* Moments of channels with a bias each: chunk by chunk of as many channels as there is room for. */
static struct moments moments_of_channels(const struct plan *plan, struct worker *w, int64_t bundle,
                                          const struct piece *piece)
{
    struct moments all = {0, 0, 0}, last[MAX_BUNDLED];
    const int64_t at_once = plan->all_direct ? MAX_BUNDLED : 1;
    for (int64_t r = 0; r < piece->segments; r += at_once) {
        const int64_t count = smaller(at_once, piece->segments - r), width = chunk_width(piece->length);
        for (int64_t j = 0; j < count; j++)
            last[j].count = 0;
        for (int64_t at = 0; at < piece->length; at += width) {
            const struct tile t =
                tile_at(plan, bundle, piece->segment + r, piece->start + at, 1, smaller(width, piece->length - at));
            chunk_of_rows(plan, w, &t, count, 1, last);
            for (int64_t j = 0; j < count; j++)
                all = join(all, with_bias(plan, last[j], t.n, t.c + j));
        }
    }
    return all;
}

static void moments_of_piece_rows(const struct plan *plan, struct worker *w, struct bundle_state *state, int64_t bundle,
                                  int64_t index)
{
    const struct piece piece = piece_of(plan, index);
    const int64_t channels = groups_in(plan, bundle);
    const int64_t at_once = plan->add ? 1 : channels; /* a sum u is a tile of its own */
    struct moments all[MAX_BUNDLED], last[MAX_BUNDLED];
    for (int64_t j = 0; j < channels; j++)
        all[j] = last[j] = (struct moments){0, 0, 0};
    const bool biased = plan->p->pre_bias.data != NULL, by_channel = biased && plan->group_channels > 1;
    for (int64_t j = 0; by_channel && j < channels; j++) {
        const struct piece of_group = {piece.segment + j * plan->group_channels, piece.segments, piece.start,
                                       piece.length};
        all[j] = moments_of_channels(plan, w, bundle, &of_group);
    }
    if (!by_channel) {
        const int64_t width = chunk_width(piece.length), rows = CHUNK_VALUES / width;
        for (int64_t r = 0; r < piece.segments; r += rows)
            for (int64_t at = 0; at < piece.length; at += width)
                for (int64_t j = 0; j < channels; j += at_once) {
                    struct tile t = tile_at(plan, bundle, piece.segment + r, piece.start + at,
                                            smaller(rows, piece.segments - r), smaller(width, piece.length - at));
                    t.c += j * plan->group_channels;
                    chunk_of_rows(plan, w, &t, at_once, plan->group_channels, last + j);
                    for (int64_t i = j; i < j + at_once; i++)
                        all[i] = join(all[i], biased ? with_bias(plan, last[i], t.n, t.c + i - j) : last[i]);
                }
    }
    double *partial = state->partials + index * 2 * plan->entries;
    for (int64_t j = 0; j < channels; j++) {
        partial[j] = all[j].mean;
        partial[plan->entries + j] = all[j].m2;
    }
}

/* Adds the moments of the rows [offset, offset + rows) of a bundle, column by column, onto w->sum and w->square. */
static void sum_rows(const struct plan *plan, struct worker *w, int64_t bundle, int64_t segment, int64_t offset,
                     int64_t rows, bool first)
{
    const int64_t c = columns_of(plan, bundle), maximum = rows_of_tile(plan, rows);
    for (int64_t r = 0; r < rows; r += maximum) {
        const struct tile t = tile_at(plan, bundle, segment, offset + r, smaller(maximum, rows - r), c);
        struct normfuse_pass s = {
            .rows = (size_t)t.rows, .n = (size_t)c, .k = w->shift, .sum = w->sum, .square = w->square};
        s.x = input_u(plan, w, &t, first, &s.x_stride);
        run_tile(plan, plan->pass->moments_columns, &s);
    }
}

static void clear_sums(const struct plan *plan, struct worker *w)
{
    memset(w->sum, 0, (size_t)plan->coefficients * plan->real_bytes);
    memset(w->square, 0, (size_t)plan->coefficients * plan->real_bytes);
    if (plan->sums_slopes)
        memset(w->slope_sum, 0, (size_t)plan->coefficients * plan->real_bytes);
}

/* One double per channel of an array of the compute type, the rows that were taken as one added up. */
static void fold(const struct plan *plan, const void *array, int64_t channels, double *out)
{
    memset(out, 0, (size_t)channels * 8);
    plan->column->accumulate(array, out, (size_t)channels, (size_t)plan->folded);
}

/* The shifts for the next sums: the means, or 0 where there is none. */
static void store_shifts(const struct plan *plan, struct worker *w, const double *means, int64_t channels)
{
    for (int64_t c = 0; c < channels; c++)
        store_shift(plan, w, c, means[c]);
    repeat_folded(plan, w->shift, channels);
}

/* Joins the sums of a chunk of `rows` rows onto the columns' moments; `before` rows went before it. The shifts become
 * the chunk's means. */
static void join_columns(const struct plan *plan, struct worker *w, const struct tile *t, double before, int64_t rows)
{
    const int64_t channels = t->width;
    if (plan->column->join(w->shift, w->sum, w->square, w->mean, w->m2, (size_t)channels, (size_t)plan->folded,
                           (double)rows, before)) {
        repeat_folded(plan, w->shift, channels);
        return;
    }
    const double n = (double)rows, inverse = 1 / n, weight = n / (before + n), cross = before * weight;
    double *restrict sum = w->sum64, *restrict square = w->square64, *restrict mean = w->mean, *restrict m2 = w->m2;
    const float *k = w->shift;
    fold(plan, w->sum, channels, sum);
    fold(plan, w->square, channels, square);
    for (int64_t c = 0; c < channels; c++) {
        const bool is_exact = !out_of_range((double)k[c], sum[c], square[c]);
        const struct moments exact = is_exact ? (struct moments){0, 0, 0} : moments_in_double(plan, t, c, rows, 1);
        const double m = square[c] - sum[c] * sum[c] * inverse;
        square[c] = !is_exact ? exact.m2 : m < 0 ? 0 : m;
        sum[c] = is_exact ? (double)k[c] + sum[c] * inverse : exact.mean;
    }
    if (before > 0) {
        for (int64_t c = 0; c < channels; c++) {
            const double delta = sum[c] - mean[c];
            mean[c] += delta * weight;
            m2[c] += square[c] + delta * delta * cross;
        }
    } else {
        memcpy(mean, sum, (size_t)channels * 8);
        memcpy(m2, square, (size_t)channels * 8);
    }
    store_shifts(plan, w, sum, channels);
}

static void moments_of_piece_columns(const struct plan *plan, struct worker *w, struct bundle_state *state,
                                     int64_t bundle, int64_t index)
{
    const struct piece piece = piece_of(plan, index);
    const int64_t rows = piece.segments * piece.length, channels = columns_of(plan, bundle);
    double *partial = state->partials + index * 2 * plan->entries;
    const int64_t sampled = smaller(rows, SHIFT_ROWS * plan->folded);
    memset(w->shift, 0, (size_t)plan->coefficients * plan->real_bytes);
    clear_sums(plan, w);
    /* u may take x's place, and rows are read twice: write all of u first */
    const bool writes_u = plan->add && plan->p->u.data;
    if (writes_u)
        sum_rows(plan, w, bundle, piece.segment, piece.start, rows, true);
    clear_sums(plan, w);
    sum_rows(plan, w, bundle, piece.segment, piece.start, sampled, !writes_u);
    fold(plan, w->sum, channels, w->sum64);
    for (int64_t c = 0; c < channels; c++)
        w->sum64[c] /= (double)sampled;
    store_shifts(plan, w, w->sum64, channels);
    for (int64_t r = 0; r < rows; r += plan->chunk_rows) {
        const int64_t chunk = smaller(plan->chunk_rows, rows - r);
        clear_sums(plan, w);
        sum_rows(plan, w, bundle, piece.segment, piece.start + r, chunk, !writes_u);
        const struct tile t = tile_at(plan, bundle, piece.segment, piece.start + r, chunk, channels);
        join_columns(plan, w, &t, (double)r, chunk);
    }
    if (plan->p->pre_bias.data) {
        const struct tile t = tile_at(plan, bundle, piece.segment, piece.start, 0, 0);
        for (int64_t c = 0; c < channels; c++)
            w->mean[c] += pre_bias_of(plan, t.n, t.c + c / plan->spread);
    }
    /* the columns of a group, or of a channel, have equal counts: their mean is the mean of means */
    const int64_t d = plan->batch ? plan->spread : plan->group_channels;
    if (d == 1) {
        memcpy(partial, w->mean, (size_t)channels * 8);
        memcpy(partial + plan->entries, w->m2, (size_t)channels * 8);
        return;
    }
    for (int64_t g = 0; g < channels / d; g++) {
        double mean = 0, m2 = 0, between = 0;
        for (int64_t c = g * d; c < (g + 1) * d; c++) {
            mean += w->mean[c];
            m2 += w->m2[c];
        }
        mean /= (double)d;
        for (int64_t c = g * d; c < (g + 1) * d; c++)
            between += (w->mean[c] - mean) * (w->mean[c] - mean);
        partial[g] = mean;
        partial[plan->entries + g] = m2 + between * (double)rows;
    }
}

/* ---- reduce: backward sums --------------------------------------------------------------------------------------- */

/* Arguments of every pass over a tile but the moments; coefficients from entry `i` on. `first`: see input_u. */
static struct normfuse_pass pass_of_tile(const struct plan *plan, struct worker *w, const struct coefficients *c,
                                         const struct tile *t, int64_t i, bool first)
{
    const struct normfuse_problem *p = plan->p;
    struct normfuse_pass s = {.rows = (size_t)t->rows,
                              .n = (size_t)t->width,
                              .k = at_real(plan, c->k, i),
                              .a = p->from_y ? NULL : at_real(plan, c->a, i),
                              .b = at_real(plan, c->b, i),
                              .coefficient_step = (size_t)(t->across ? plan->spread : plan->coefficient_step),
                              .activation = p->activation,
                              .act_param = p->act_param,
                              .slope = p->slope.data ? at_real(plan, c->slope, i) : NULL};
    s.x = input_u(plan, w, t, first, &s.x_stride);
    if (plan->backward)
        s.dy = input(plan, &p->dy, t, w->stage[1], &s.dy_stride);
    if (p->post_add.data)
        s.post_add = input(plan, &p->post_add, t, w->stage[2], &s.post_add_stride);
    return s;
}

/* The place where dy' of a tile is kept. */
static void keep_tile(const struct plan *plan, const struct worker *w, const struct tile *t, struct normfuse_pass *s)
{
    if (plan->kept_values)
        s->kept = team_of(plan, w)->kept + (size_t)place_in_bundle(plan, t, &s->kept_stride) * plan->real_bytes;
}

static void sums_of_tile(const struct plan *plan, struct worker *w, const struct bundle_state *state,
                         const struct tile *t, int64_t i)
{
    const struct coefficients *c = &state->c;
    const struct normfuse_problem *p = plan->p;
    struct normfuse_pass s = pass_of_tile(plan, w, c, t, i, true);
    s.sum = w->sum;
    s.square = w->square;
    s.slope_sum = plan->sums_slopes ? w->slope_sum : NULL;
    s.sum_per_row = !plan->batch || t->across;
    keep_tile(plan, w, t, &s);
    const bool gives_dx = plan->apply && !plan->dependent;
    if (gives_dx) {
        s.p = at_real(plan, c->p, i);
        s.y = output(plan, &p->dx, t, w->stage[4], &s.y_stride);
        s.stream = plan->stream && direct(plan, &p->dx);
        if (p->du.data)
            s.du = input(plan, &p->du, t, w->stage[3], &s.du_stride);
    }
    if (p->dpost_add.data && (gives_dx || !plan->apply))
        s.dpost_add = output(plan, &p->dpost_add, t, w->stage[5], &s.dpost_add_stride);
    run_tile(plan, p->columns ? plan->pass->dot2_columns : plan->pass->dot2_rows, &s);
    if (s.y)
        scatter(plan, &p->dx, t, w->stage[4]);
    if (s.dpost_add)
        scatter(plan, &p->dpost_add, t, w->stage[5]);
}

static void dx_of_tile(const struct plan *plan, struct worker *w, const struct bundle_state *state,
                       const struct tile *t, int64_t i, int64_t next)
{
    const struct normfuse_problem *p = plan->p;
    const struct coefficients *c = &state->c;
    struct normfuse_pass s = pass_of_tile(plan, w, c, t, i, !plan->reduce);
    keep_tile(plan, w, t, &s);
    s.p = at_real(plan, c->p, i);
    s.q = plan->none ? NULL : at_real(plan, c->q, i);
    s.r = plan->none ? NULL : at_real(plan, c->r, i);
    if (p->du.data)
        s.du = input(plan, &p->du, t, w->stage[3], &s.du_stride);
    s.y = output(plan, &p->dx, t, w->stage[4], &s.y_stride);
    s.stream = plan->stream && direct(plan, &p->dx);
    if (p->dpost_add.data)
        s.dpost_add = output(plan, &p->dpost_add, t, w->stage[5], &s.dpost_add_stride);
    s.ahead_x = ahead_of(plan, &p->x, t, next, s.x, s.x_stride);
    s.ahead_dy = ahead_of(plan, &p->dy, t, next, s.dy, s.dy_stride);
    run_tile(plan, p->columns || t->across_values ? plan->pass->affine2_columns : plan->pass->affine2_rows, &s);
    scatter(plan, &p->dx, t, w->stage[4]);
    scatter(plan, &p->dpost_add, t, w->stage[5]);
}

static void add_reals(const struct plan *plan, const void *from, double *restrict to, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        to[i] += load_real(plan, from, i);
}

static void sums_of_piece_rows(const struct plan *plan, struct worker *w, struct bundle_state *state, int64_t bundle,
                               int64_t index)
{
    const struct piece piece = piece_of(plan, index);
    const int64_t channels = groups_in(plan, bundle), part = plan->parts > 1 ? index % plan->parts : 0;
    /* sums are per channel, so a bundle of groups is one of more channels */
    const int64_t bundles = plan->batch ? channels : 1,
                  segments = plan->batch ? piece.segments : channels * piece.segments;
    /* of a batch: the piece's channels; else the channels of a part */
    const int64_t entries = plan->batch ? plan->entries : plan->bundle_channels;
    double *sums = state->partials + (plan->batch ? index : part) * plan->partial_sums * entries +
                   (plan->batch ? 0 : piece.segment);
    const void *const of_rows[] = {w->sum, w->square, w->slope_sum};
    for (int64_t i = 0; i < plan->partial_sums; i++)
        memset(sums + i * entries, 0, (size_t)(plan->batch ? entries : segments) * 8);
    const int64_t width = chunk_width(piece.length);
    /* of a batch: one channel's samples, or of few samples one sample's channels */
    const bool across = plan->batch && channels > 1 && segments < SPREAD_SAMPLES && width == piece.length;
    const int64_t rows = across ? 1 : CHUNK_VALUES / width;
    for (int64_t r = 0; r < segments; r += rows)
        for (int64_t at = 0; at < piece.length; at += width)
            for (int64_t j = 0; j < (across ? 1 : bundles); j++) {
                struct tile t =
                    tile_at(plan, bundle, piece.segment + r, piece.start + at,
                            across ? channels : smaller(rows, segments - r), smaller(width, piece.length - at));
                t.across = across;
                t.c += j;
                sums_of_tile(plan, w, state, &t, plan->batch ? j * plan->spread : piece.segment + r);
                for (int64_t i = 0; i < plan->partial_sums; i++)
                    add_reals(plan, of_rows[i], sums + i * entries + (plan->batch ? j : r),
                              across || !plan->batch ? t.rows : 1);
            }
}

static void sums_of_piece_columns(const struct plan *plan, struct worker *w, struct bundle_state *state, int64_t bundle,
                                  int64_t index)
{
    const struct piece piece = piece_of(plan, index);
    const int64_t rows = piece.segments * piece.length, channels = columns_of(plan, bundle);
    const void *const of_rows[] = {w->sum, w->square, w->slope_sum};
    double *const of_columns[] = {w->mean, w->m2, w->slopes};
    for (int64_t j = 0; j < plan->partial_sums; j++)
        memset(of_columns[j], 0, (size_t)channels * 8);
    const int64_t maximum = rows_of_tile(plan, plan->chunk_rows);
    for (int64_t r = 0; r < rows; r += plan->chunk_rows) {
        const int64_t chunk = smaller(plan->chunk_rows, rows - r);
        clear_sums(plan, w);
        for (int64_t q = 0; q < chunk; q += maximum) {
            const struct tile t =
                tile_at(plan, bundle, piece.segment, piece.start + r + q, smaller(maximum, chunk - q), channels);
            sums_of_tile(plan, w, state, &t, 0);
        }
        for (int64_t j = 0; j < plan->partial_sums; j++)
            plan->column->accumulate(of_rows[j], of_columns[j], (size_t)channels, (size_t)plan->folded);
    }
    double *sums = state->partials + index * plan->partial_sums * plan->entries;
    for (int64_t j = 0; j < plan->partial_sums; j++, sums += plan->entries) {
        if (plan->spread == 1) {
            memcpy(sums, of_columns[j], (size_t)channels * 8);
            continue;
        }
        for (int64_t c = 0; c < channels; c += plan->spread)
            sums[c / plan->spread] = sum_in_lanes(of_columns[j] + c, plan->spread);
    }
}

void normfuse_reduce_piece(const struct plan *plan, struct worker *w, struct bundle_state *state, int64_t bundle,
                           int64_t index)
{
    if (plan->backward)
        (plan->p->columns ? sums_of_piece_columns : sums_of_piece_rows)(plan, w, state, bundle, index);
    else
        (plan->p->columns ? moments_of_piece_columns : moments_of_piece_rows)(plan, w, state, bundle, index);
}

/* ---- apply ------------------------------------------------------------------------------------------------------- */

static void y_of_tile(const struct plan *plan, struct worker *w, const struct bundle_state *state, const struct tile *t,
                      int64_t i, int64_t next)
{
    const struct normfuse_problem *p = plan->p;
    struct normfuse_pass s = pass_of_tile(plan, w, &state->c, t, i, !plan->reduce);
    if (!p->y.data) /* u alone is requested */
        return;
    s.y = output(plan, &p->y, t, w->stage[4], &s.y_stride);
    s.stream = plan->stream && direct(plan, &p->y);
    s.ahead_x = ahead_of(plan, &p->x, t, next, s.x, s.x_stride);
    run_tile(plan, p->columns || t->across_values ? plan->pass->affine_columns : plan->pass->affine_rows, &s);
    scatter(plan, &p->y, t, w->stage[4]);
}

static void apply_tile(const struct plan *plan, struct worker *w, const struct bundle_state *state,
                       const struct tile *t, int64_t i, int64_t next)
{
    if (plan->backward)
        dx_of_tile(plan, w, state, t, i, next);
    else
        y_of_tile(plan, w, state, t, i, next);
}

void normfuse_apply_piece(const struct plan *plan, struct worker *w, const struct bundle_state *state, int64_t bundle,
                          int64_t index, int64_t next)
{
    const struct piece piece = piece_of(plan, index);
    if (plan->p->columns) {
        const int64_t rows = piece.segments * piece.length,
                      maximum = plan->apply_staged ? rows_of_tile(plan, rows) : rows;
        for (int64_t r = 0; r < rows; r += maximum) {
            const struct tile t = tile_at(plan, bundle, piece.segment, piece.start + r, smaller(maximum, rows - r),
                                          columns_of(plan, bundle));
            apply_tile(plan, w, state, &t, 0, next);
        }
        return;
    }
    if (plan->spread > 1) {
        struct tile t = tile_at(plan, bundle, piece.segment, 0, piece.segments, groups_in(plan, bundle) * plan->spread);
        t.across_values = true;
        apply_tile(plan, w, state, &t, 0, next);
        return;
    }
    if (plan->batch && plan->bundle_groups > 1) { /* a bundle's rows are short: whole */
        for (int64_t r = 0; r < piece.segments; r++) {
            struct tile t =
                tile_at(plan, bundle, piece.segment + r, piece.start, groups_in(plan, bundle), piece.length);
            t.across = true;
            apply_tile(plan, w, state, &t, 0, next);
        }
        return;
    }
    const int64_t width = plan->apply_staged ? smaller(piece.length, STAGE_VALUES) : piece.length;
    const int64_t segments = groups_in(plan, bundle) * piece.segments,
                  rows = plan->apply_staged ? larger(1, STAGE_VALUES / width) : segments;
    for (int64_t r = 0; r < segments; r += rows)
        for (int64_t at = 0; at < piece.length; at += width) {
            const struct tile t = tile_at(plan, bundle, piece.segment + r, piece.start + at,
                                          smaller(rows, segments - r), smaller(width, piece.length - at));
            apply_tile(plan, w, state, &t, plan->batch ? 0 : piece.segment + r, next);
        }
}
