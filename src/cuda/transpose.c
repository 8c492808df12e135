/* SPDX-License-Identifier: MIT
 *
 * transpose.c - see transpose.h. */
#include "transpose.h"

#include "schedules.h"

/* A tile's bytes: enough on their way on each multiprocessor, and few where a tensor is small, so that all of them have
 * some. What shared memory six blocks of a multiprocessor can have. */
enum { TILE_BYTES = 16 << 10, SMALL_TILE_BYTES = 4 << 10, SMALL_BYTES = 4 << 20, PLANE_BYTES = 28 << 10 };

/* ---- strides ---------------------------------------------------------------------------------------------------- */

/* Strides on an axis of one element do not count. */
static bool has_strides(const struct normfuse_problem *p, const struct normfuse_view *view,
                        const struct normfuse_view *as)
{
    return (p->n == 1 || view->batch == as->batch) && (p->c == 1 || view->channel == as->channel) &&
           (p->s == 1 || view->position == as->position);
}

/* By the rules of struct normfuse_view. */
static struct normfuse_view strides_of(const struct normfuse_problem *p, bool columns, int64_t batch, int64_t channel,
                                       int64_t position)
{
    return (struct normfuse_view){.batch = p->n > 1 ? batch : 0,
                                  .channel = p->c > 1 ? channel : columns,
                                  .position = p->s > 1 ? position : !columns};
}

/* Those of a tensor without gaps. */
static struct normfuse_view packed(const struct normfuse_problem *p, bool columns)
{
    return strides_of(p, columns, p->c * p->s, columns ? 1 : p->s, columns ? p->c : 1);
}

/* Elements from the first to the last of a tensor, and it. */
static int64_t span_of(const struct normfuse_problem *p, const struct normfuse_view *as)
{
    return (p->n - 1) * as->batch + (p->c - 1) * as->channel + (p->s - 1) * as->position + 1;
}

/* Of x's strides and those of both layouts the ones that most tensors have; x's only where samples follow one another
 * with few gaps, since scratch memory has them, too. */
static struct normfuse_view choose_strides(const struct normfuse_problem *p, struct normfuse_view *const views[VIEWS],
                                           bool *columns)
{
    const struct normfuse_view candidates[] = {strides_of(p, p->columns, p->x.batch, p->x.channel, p->x.position),
                                               packed(p, p->columns), packed(p, !p->columns)};
    const int64_t of_sample = (p->c - 1) * p->x.channel + (p->s - 1) * p->x.position;
    const bool takes_x = (p->n == 1 || p->x.batch > of_sample) && span_of(p, &p->x) / 2 < p->n * p->c * p->s;
    int chosen = -1, most = -1;
    for (int i = !takes_x; i < 3; i++) {
        int count = 0;
        for (int k = 0; k < VIEWS; k++)
            count += views[k]->data != NULL && has_strides(p, views[k], &candidates[i]);
        if (count > most) {
            most = count;
            chosen = i;
        }
    }
    *columns = p->columns != (chosen == 2);
    return candidates[chosen];
}

/* ---- tiles ------------------------------------------------------------------------------------------------------ */

/* An axis of elements, and the strides of both tensors on it. */
struct axis {
    int64_t size, from, to;
};
static const struct axis one = {1, 0, 0};

/* Axes whose elements follow one another in both tensors become one. */
static void unite(struct axis axes[3])
{
    for (int i = 0; i < 18; i++) { /* twice, since two may be one only once another two are */
        struct axis *const inner = &axes[i / 3 % 3], *const outer = &axes[i % 3];
        if (inner == outer || outer->size == 1 || inner->size == 1 || outer->from != inner->from * inner->size ||
            outer->to != inner->to * inner->size)
            continue;
        inner->size *= outer->size;
        *outer = one;
    }
}

/* The axis from `first` on with the shortest stride, though not 0, of more than one element goes to axes[first]. */
static void bring_nearest(struct axis axes[3], int first, bool to)
{
    int64_t shortest = INT64_MAX;
    for (int i = first; i < 3; i++) {
        const int64_t stride = to ? axes[i].to : axes[i].from, length = stride < 0 ? -stride : stride;
        if (axes[i].size > 1 && length > 0 && length < shortest) {
            const struct axis nearest = axes[i];
            shortest = length;
            axes[i] = axes[first];
            axes[first] = nearest;
        }
    }
}

/* As many as fit, whole multiples where they are more. */
static int64_t share_of(int64_t room, int64_t size, int64_t multiple)
{
    return minimum(size, maximum(multiple, room / multiple * multiple));
}

/* How a tile is cut from axes of more than 2^31 elements even, and read and written: see transpose.cu. Returns its
 * blocks. */
static int64_t cut(struct normfuse_cuda_copy *copy, const struct normfuse_problem *p, struct axis axes[3])
{
    const int64_t bytes = (int64_t)normfuse_type_bytes(p->type), vector = 16 / bytes, line = 128 / bytes;
    const int64_t all = axes[0].size * axes[1].size * axes[2].size;
    const int64_t room = (all * bytes < SMALL_BYTES ? SMALL_TILE_BYTES : TILE_BYTES) / bytes;
    const int64_t in_plane = PLANE_BYTES / bytes;
    unite(axes);
    bring_nearest(axes, 0, false);
    /* Where the destination's nearest axis is another one, it is the next. */
    struct axis by_to[3] = {axes[0], axes[1], axes[2]};
    bring_nearest(by_to, 0, true);
    const bool straight = by_to[0].from == axes[0].from && by_to[0].to == axes[0].to;
    bring_nearest(axes, 1, true);
    const struct axis a = axes[0], b = axes[1], outer = axes[2];

    const bool from_aligned = (uintptr_t)copy->from % 16 == 0 && a.from == 1 && outer.from % vector == 0;
    const bool to_aligned = (uintptr_t)copy->to % 16 == 0 && (straight ? a.to : b.to) == 1 && outer.to % vector == 0;
    bool from_vectors = from_aligned && a.size % vector == 0 && b.from % vector == 0;
    bool to_vectors = to_aligned && (straight ? a.size % vector == 0 && b.to % vector == 0
                                              : b.size % vector == 0 && a.to % vector == 0);
    /* Rows that are no whole vectors, though the plane of them is. */
    const bool whole = !straight && a.size * b.size % vector == 0;
    bool from_plane = whole && !from_vectors && from_aligned && b.from == a.size &&
                      a.size <= in_plane / minimum(b.size, line / 2);
    bool to_plane = whole && !to_vectors && to_aligned && a.to == b.size &&
                    b.size <= in_plane / minimum(a.size, line / 2);
    int64_t tile_a, tile_b, side = 1;
    while (4 * side * side <= room)
        side *= 2;
    if (straight) {
        tile_a = minimum(a.size, room);
        tile_b = minimum(b.size, room / tile_a);
        from_vectors = to_vectors = from_vectors && to_vectors;
    } else if (from_plane) {
        tile_a = a.size;
        tile_b = share_of(room / a.size, b.size, a.size <= in_plane / line ? line : line / 2);
    } else if (to_plane) {
        tile_b = b.size;
        tile_a = share_of(room / b.size, a.size, b.size <= in_plane / line ? line : line / 2);
    } else {
        tile_a = minimum(a.size, side);
        tile_b = share_of(room / tile_a, b.size, vector);
        if (tile_b == b.size)
            tile_a = share_of(room / tile_b, a.size, vector);
    }
    from_plane = from_plane && tile_a == a.size;
    to_plane = to_plane && tile_b == b.size && (tile_a == a.size || tile_a % vector == 0);
    const bool is_plane = tile_a == a.size && tile_b == b.size;
    const int64_t tile_outer = is_plane ? minimum(outer.size, maximum(1, room / (tile_a * tile_b))) : 1;
    const int64_t tiles_a = divide_up(a.size, tile_a), tiles_b = divide_up(b.size, tile_b);
    /* An odd number of words, or of doubles. */
    const int64_t word = bytes == 2 ? 2 : 1, pitch = from_plane ? tile_a : (divide_up(tile_a, word) | 1) * word;
    from_vectors = from_vectors || from_plane;
    to_vectors = to_vectors || to_plane;
    copy->outer = outer.size;
    copy->b = b.size;
    copy->a = a.size;
    copy->from_outer = outer.from;
    copy->from_b = b.from;
    copy->from_a = a.from;
    copy->to_outer = outer.to;
    copy->to_b = b.to;
    copy->to_a = a.to;
    copy->shared = straight ? 0 : (int32_t)(tile_outer * tile_b * pitch * bytes);
    copy->tile_outer = (int32_t)tile_outer;
    copy->tile_b = (int32_t)tile_b;
    copy->tile_a = (int32_t)tile_a;
    copy->pitch = (int32_t)pitch;
    copy->straight = straight;
    copy->from_vectors = from_vectors;
    copy->to_vectors = to_vectors;
    copy->from_plane = from_plane;
    copy->to_plane = to_plane;
    copy->by_tiles_a = normfuse_cuda_divisor_of(tiles_a);
    copy->by_tiles_b = normfuse_cuda_divisor_of(tiles_b);
    copy->by_tile_a = normfuse_cuda_divisor_of(tile_a);
    copy->by_tile_b = normfuse_cuda_divisor_of(tile_b);
    copy->by_read = normfuse_cuda_divisor_of(
        divide_up(from_plane ? tile_a * tile_b : tile_a, from_vectors ? vector : 1));
    copy->by_write = normfuse_cuda_divisor_of(divide_up(to_plane ? tile_a * tile_b : tile_b, to_vectors ? vector : 1));
    return tiles_a * tiles_b * divide_up(outer.size, tile_outer);
}

/* False: it has more blocks than a grid. */
static bool add_copy(struct normfuse_cuda_transpose_arguments *copies, const struct normfuse_problem *p,
                     const struct normfuse_view *from, const struct normfuse_view *to)
{
    struct axis axes[3] = {{p->n, from->batch, to->batch},
                           {p->c, from->channel, to->channel},
                           {p->s, from->position, to->position}};
    for (int i = 0; i < 3; i++)
        if (axes[i].size == 1)
            axes[i] = one;
    struct normfuse_cuda_copy *const copy = &copies->copies[copies->count++];
    copy->from = from->data;
    copy->to = to->data;
    copy->first_block = (int32_t)copies->blocks;
    copies->blocks += cut(copy, p, axes);
    return copies->blocks <= INT32_MAX;
}

/* ---- a call ----------------------------------------------------------------------------------------------------- */

bool normfuse_cuda_transpose(struct normfuse_problem *p, char *scratch, struct transposed *transposed)
{
    struct normfuse_view *views[VIEWS];
    bool same = true;
    transposed->before.count = transposed->after.count = 0;
    transposed->before.blocks = transposed->after.blocks = 0;
    transposed->bytes = 0;
    normfuse_cuda_views(p, views);
    for (int i = 1; i < VIEWS; i++)
        same = same && (views[i]->data == NULL || (views[i]->batch == p->x.batch && views[i]->channel == p->x.channel &&
                                                   views[i]->position == p->x.position));
    if (same || normfuse_is_empty(p))
        return true;
    bool columns;
    struct normfuse_view strides = choose_strides(p, views, &columns);
    const size_t bytes = ((size_t)span_of(p, &strides) * normfuse_type_bytes(p->type) + 63) / 64 * 64;
    if (bytes > SIZE_MAX / 2 / VIEWS)
        return false;
    for (int i = 0; i < VIEWS; i++) {
        struct normfuse_view *const view = views[i], given = *view;
        if (given.data == NULL)
            continue;
        strides.data = given.data;
        if (!has_strides(p, view, &strides)) {
            const bool is_output = view == &p->y || view == &p->u || view == &p->dx || view == &p->dpost_add;
            strides.data = scratch + transposed->bytes;
            transposed->bytes += bytes;
            if (!add_copy(is_output ? &transposed->after : &transposed->before, p, is_output ? &strides : &given,
                          is_output ? &given : &strides))
                return false;
        }
        *view = strides;
    }
    p->columns = columns;
    return true;
}
