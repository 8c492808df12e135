/* SPDX-License-Identifier: MIT
 *
 * transpose.c - the copies of tensors that have not the strides of the others; see schedules.h. The body
 * device/transpose.cuh copies. */
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

/* Strides of a tensor without gaps. */
static struct normfuse_view packed(const struct normfuse_problem *p, bool columns)
{
    return strides_of(p, columns, p->c * p->s, columns ? 1 : p->s, columns ? p->c : 1);
}

/* Elements from the first to the last of a tensor, and it. */
static int64_t span_of(const struct normfuse_problem *p, const struct normfuse_view *as)
{
    return (p->n - 1) * as->batch + (p->c - 1) * as->channel + (p->s - 1) * as->position + 1;
}

/* The strides that most tensors have, of x's and those of both layouts; x's only where samples follow one another
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

static const struct normfuse_transpose_axis one = {1, 0, 0}; /* of one element */

/* Axes whose elements follow one another in both tensors become one. */
static void unite(struct normfuse_transpose_axis axes[3])
{
    for (int i = 0; i < 18; i++) { /* twice, since two may be one only once another two are */
        struct normfuse_transpose_axis *const inner = &axes[i / 3 % 3], *const outer = &axes[i % 3];
        if (inner == outer || outer->size == 1 || inner->size == 1 || outer->from != inner->from * inner->size ||
            outer->to != inner->to * inner->size)
            continue;
        inner->size *= outer->size;
        *outer = one;
    }
}

/* A stride's length; 0, where elements are repeated, is the longest. */
static int64_t magnitude(int64_t stride)
{
    return stride == 0 ? INT64_MAX : stride < 0 ? -stride : stride;
}

/* The axis of axes[from..3) with the shortest stride, of the destination or of the source, goes to axes[from]. */
static void bring_nearest(struct normfuse_transpose_axis axes[3], int from, bool to)
{
    for (int i = from + 1; i < 3; i++)
        if (magnitude(to ? axes[i].to : axes[i].from) < magnitude(to ? axes[from].to : axes[from].from)) {
            const struct normfuse_transpose_axis nearer = axes[i];
            axes[i] = axes[from];
            axes[from] = nearer;
        }
}

/* As many as fit; where they are more, multiples of a power of two. */
static int64_t share_of(int64_t room, int64_t size, int64_t multiple)
{
    return minimum(size, maximum(multiple, room & -multiple));
}

/* How a tile is cut from the axes, and read and written: see device/transpose.cuh. Returns its blocks. */
static __attribute__((noinline)) int64_t cut(struct normfuse_transpose_copy *copy, int64_t bytes)
{
    const struct normfuse_transpose_axis *const a = &copy->a, *const b = &copy->b, *const outer = &copy->outer;
    const int64_t vector = 16 / bytes, line = 128 / bytes, rest = vector - 1, in_plane = PLANE_BYTES / bytes;
    const bool is_small = a->size * b->size * outer->size * bytes < SMALL_BYTES;
    const int64_t room = (is_small ? SMALL_TILE_BYTES : TILE_BYTES) / bytes;
    const bool straight = magnitude(a->to) < magnitude(b->to);
    const struct normfuse_transpose_axis *const near = straight ? a : b, *const apart = straight ? b : a;
    const bool from_aligned = (uintptr_t)copy->from % 16 == 0 && a->from == 1 && (outer->from & rest) == 0;
    const bool to_aligned = (uintptr_t)copy->to % 16 == 0 && near->to == 1 && (outer->to & rest) == 0;
    const bool from_vectors = from_aligned && ((a->size | b->from) & rest) == 0;
    const bool to_vectors = to_aligned && ((near->size | apart->to) & rest) == 0;
    /* Rows that are no whole vectors, though the plane of them is. */
    const bool whole = !straight && (a->size * b->size & rest) == 0;
    bool from_plane = whole && !from_vectors && from_aligned && b->from == a->size &&
                      a->size <= in_plane / minimum(b->size, line / 2);
    bool to_plane = whole && !to_vectors && to_aligned && a->to == b->size &&
                    b->size <= in_plane / minimum(a->size, line / 2);
    int64_t tile_a, tile_b, side = 1;
    while (4 * side * side <= room)
        side *= 2;
    if (straight) {
        tile_a = minimum(a->size, room);
        tile_b = minimum(b->size, room / tile_a);
    } else if (from_plane) {
        tile_a = a->size;
        tile_b = share_of(room / tile_a, b->size, tile_a <= in_plane / line ? line : line / 2);
    } else if (to_plane) {
        tile_b = b->size;
        tile_a = share_of(room / tile_b, a->size, tile_b <= in_plane / line ? line : line / 2);
    } else {
        tile_a = minimum(a->size, side);
        tile_b = share_of(room / tile_a, b->size, vector);
        if (tile_b == b->size)
            tile_a = share_of(room / tile_b, a->size, vector);
    }
    to_plane = to_plane && tile_b == b->size && (tile_a == a->size || (tile_a & rest) == 0);
    const bool is_plane = tile_a == a->size && tile_b == b->size;
    const int64_t of_tile = tile_a * tile_b;
    const int64_t tile_outer = is_plane ? minimum(outer->size, maximum(1, room / of_tile)) : 1;
    const int64_t tiles_a = divide_up(a->size, tile_a), tiles_b = divide_up(b->size, tile_b);
    /* An odd number of words, or of doubles. */
    const int64_t word = bytes == 2 ? 2 : 1, pitch = from_plane ? tile_a : (divide_up(tile_a, word) | 1) * word;
    copy->shared = straight ? 0 : (int32_t)(tile_outer * tile_b * pitch * bytes);
    copy->from_vectors = straight ? from_vectors && to_vectors : from_vectors || from_plane;
    copy->to_vectors = straight ? copy->from_vectors : to_vectors || to_plane;
#define SET(name) copy->name = (int32_t)name;
    SET(tile_a) SET(tile_b) SET(tile_outer) SET(pitch) SET(straight) SET(from_plane) SET(to_plane)
#undef SET
#define BY(name, value) copy->by_##name = divisor_of(value);
    BY(tiles_a, tiles_a) BY(tiles_b, tiles_b) BY(tile_a, tile_a) BY(tile_b, tile_b)
    BY(read, divide_up(from_plane ? of_tile : tile_a, copy->from_vectors ? vector : 1))
    BY(write, divide_up(to_plane ? of_tile : tile_b, copy->to_vectors ? vector : 1))
#undef BY
    return tiles_a * tiles_b * divide_up(outer->size, tile_outer);
}

/* False: it has more blocks than a grid. */
static __attribute__((noinline)) bool add_copy(struct normfuse_transpose_arguments *copies, int64_t bytes,
                                               const struct normfuse_problem *p, const struct normfuse_view *from,
                                               const struct normfuse_view *to)
{
    struct normfuse_transpose_axis axes[3] = {{p->n, from->batch, to->batch},
                                         {p->c, from->channel, to->channel},
                                         {p->s, from->position, to->position}};
    for (int i = 0; i < 3; i++)
        if (axes[i].size == 1)
            axes[i] = one;
    unite(axes);
    bring_nearest(axes, 0, false);
    bring_nearest(axes, 1, true);
    struct normfuse_transpose_copy *const copy = &copies->copies[copies->count++];
    copy->from = from->data;
    copy->to = to->data;
    copy->a = axes[0];
    copy->b = axes[1];
    copy->outer = axes[2];
    copy->first_block = (int32_t)copies->blocks;
    copies->blocks += cut(copy, bytes);
    return copies->blocks <= INT32_MAX;
}

/* ---- a call ----------------------------------------------------------------------------------------------------- */

/* y and its like, of another type than x. */
static bool has_other_type(const struct normfuse_problem *p, const struct normfuse_view *view)
{
    return p->y_type != p->type && (view == &p->y || view == &p->dy || view == &p->post_add || view == &p->dpost_add);
}

/* The memory of an output of these strides and the input's type, if a copy of the input may lie there: the call writes
 * the output over each of its elements (problem.c's in_place), and it is no other tensor's. A shard's halves have one
 * size of scratch memory, and not the same outputs. */
static char *memory_of_output(struct normfuse_problem *p, struct normfuse_view *const views[VIEWS],
                              const struct normfuse_view *input, const struct normfuse_view *strides)
{
    const bool backward = p->dy.data != NULL;
    struct normfuse_view *const outputs[] = {backward ? &p->dx : &p->y, &p->dpost_add};
    const bool takes[] = {backward ? input == &p->dy || input == &p->x || input == &p->du : true, input == &p->dy};
    for (int i = 0; i < 2; i++) {
        int tensors = 0;
        for (int k = 0; k < VIEWS; k++)
            tensors += views[k]->data == outputs[i]->data;
        if (has_other_type(p, input) != has_other_type(p, outputs[i]))
            continue;
        if (takes[i] && tensors == 1 && has_strides(p, outputs[i], strides) && p->stats == NULL && p->sums == NULL)
            return outputs[i]->data;
    }
    return NULL;
}

bool normfuse_cuda_transpose(struct normfuse_problem *p, char *scratch, struct transposed *transposed)
{
#define PLACE(name) &p->name,
    struct normfuse_view *const views[VIEWS] = {NORMFUSE_CUDA_TENSORS(PLACE)};
#undef PLACE
    bool same = true;
    for (int i = 0; i < 2; i++) {
        transposed->before[i].count = transposed->after[i].count = 0;
        transposed->before[i].blocks = transposed->after[i].blocks = 0;
    }
    transposed->bytes = 0;
    for (int i = 1; i < VIEWS; i++)
        same = same && (views[i]->data == NULL || has_strides(p, views[i], &p->x));
    if (same || normfuse_is_empty(p))
        return true;
    bool columns;
    struct normfuse_view strides = choose_strides(p, views, &columns);
    const size_t span = (size_t)span_of(p, &strides);
    if (span > SIZE_MAX / 32 / VIEWS)
        return false;
    for (int i = 0; i < VIEWS; i++) {
        struct normfuse_view *const view = views[i], given = *view;
        if (given.data == NULL)
            continue;
        strides.data = given.data;
        if (!has_strides(p, view, &strides)) {
            const bool is_y = has_other_type(p, view);
            const bool is_output = view == &p->y || view == &p->u || view == &p->dx || view == &p->dpost_add;
            strides.data = is_output ? NULL : memory_of_output(p, views, view, &strides);
            if (strides.data == NULL) {
                strides.data = scratch + transposed->bytes;
                transposed->bytes += rounded(span * normfuse_type_bytes(is_y ? p->y_type : p->type));
            }
            if (!add_copy(is_output ? &transposed->after[is_y] : &transposed->before[is_y],
                          (int64_t)normfuse_type_bytes(is_y ? p->y_type : p->type), p, is_output ? &strides : &given,
                          is_output ? &given : &strides))
                return false;
        }
        *view = strides;
    }
    p->columns = columns;
    return true;
}
