/* SPDX-License-Identifier: MIT
 *
 * tiling.c - see tiling.h. */
#include "tiling.h"

bool normfuse_cuda_has_columns(const struct normfuse_problem *p)
{
    return p->columns && (p->c == 1 || p->x.channel == 1);
}

void normfuse_cuda_tile_columns(const struct normfuse_problem *p, bool in_one_block, struct tiling *t)
{
    enum { MAX_VECTORS = 256 };
    const int64_t bytes = (int64_t)normfuse_type_bytes(p->type);
    const bool adjoins = p->n == 1 || p->x.batch == p->s * p->x.position;
    t->by_columns = t->aligned = true;
    t->joins_samples = takes_all_samples(p) && adjoins && is_countable(p->n * p->s);
    t->samples = t->joins_samples ? 1 : p->n;
    t->sample_stride = t->samples > 1 ? p->x.batch : 0;
    const int64_t rows = t->joins_samples ? p->n * p->s : p->s;
    const bool is_run = rows == 1 || p->x.position == p->c; /* no gaps */
    for (t->vector = 16 / bytes;; t->vector /= 2) {
        const int64_t w = t->vector;
        t->folded = common_multiple(p->c, w) / p->c;
        const bool fits = w == 1 || (are_aligned(p, (unsigned)(w * bytes)) && t->sample_stride % w == 0);
        const bool has_whole_rows = p->c * t->folded <= MAX_VECTORS * w;
        if (fits && (t->folded == 1 ? w == 1 || rows == 1 || p->x.position % w == 0
                                    : is_run && rows * p->c % w == 0 && is_countable(p->c * t->folded) &&
                                          (has_whole_rows || !in_one_block)))
            break;
    }
    t->rows = rows / t->folded; /* which divides it: W divides rows c, and W / folded is what c and W have in common */
    t->columns = p->c * t->folded;
    t->row_stride = p->x.position * t->folded;
    t->column_stride = 1;
}

void normfuse_cuda_tile_rows(const struct normfuse_problem *p, struct tiling *t)
{
    enum { MAX_JOINED = 2048 }; /* vectors of a row: longer ones have blocks of their own */
    const int64_t bytes = (int64_t)normfuse_type_bytes(p->type), widest = 16 / bytes;
    t->strided = p->s > 1 && p->x.position != 1;
    t->folded = 1;
    t->columns = p->s;
    t->column_stride = p->x.position;
    t->slab_stride = p->x.channel;
    t->joins_samples = takes_all_samples(p) && (p->n == 1 || p->s <= MAX_JOINED * widest);
    t->rows = t->joins_samples ? p->n : 1;
    t->row_stride = t->joins_samples ? p->x.batch : 0;
    t->sample_stride = t->joins_samples ? 0 : p->x.batch;
    t->samples = t->joins_samples ? 1 : p->n;
    t->slabs = t->samples * p->c;
    const int64_t strides = t->columns | (p->n > 1 ? p->x.batch : 0) | (p->c > 1 ? p->x.channel : 0);
    t->vector = t->strided ? 1 : widest;
    while (t->vector > 1 && (strides % t->vector != 0 || !are_aligned(p, (unsigned)(t->vector * bytes))))
        t->vector /= 2;
    t->aligned = t->strided || t->vector == widest || !are_aligned(p, 16) || 2 * p->s < widest;
    if (!t->aligned)
        t->vector = widest;
}

int64_t normfuse_cuda_threads_across(int64_t vectors, int64_t most)
{
    int64_t fewest = INT64_MAX, found = 1;
    for (int64_t across = 1; across <= most && across < 2 * vectors; across *= 2)
        fewest = minimum(fewest, divide_up(vectors, across) * across);
    for (int64_t across = 1; across <= most && across < 2 * vectors; across *= 2)
        if (7 * divide_up(vectors, across) * across <= 8 * fewest)
            found = across;
    return found;
}

void normfuse_cuda_sign_tiling(const struct normfuse_problem *p, const struct tiling *t,
                               struct normfuse_cuda_signature *to)
{
#define SET(name) to->name = (int32_t)t->name;
    SET(vector) SET(aligned) SET(threads) SET(lanes) SET(across) SET(strided)
#undef SET
    to->piece = (int32_t)piece_of(p, t);
    to->folded = t->folded > 1;
    const bool may_be_packed = t->by_columns && t->folded == 1 && t->vector > 1;
#define PACKED(name) && (to->name == 0 || is_packed(&p->name, t->vector, t->vector))
    to->packed_parameters = may_be_packed PACKED(weight) PACKED(bias) PACKED(scale) PACKED(shift) PACKED(pre_bias)
        PACKED(slope) PACKED(running_mean) PACKED(running_var);
    to->packed_statistics = may_be_packed && group_of(p) == 1 PACKED(mean) PACKED(rstd);
#undef PACKED
}

struct normfuse_stream_arguments normfuse_cuda_tiling_arguments(const struct normfuse_problem *p,
                                                                const struct tiling *t)
{
    const bool is_group = p->sets == NORMFUSE_SETS_GROUP;
    struct normfuse_stream_arguments of = {
        .row_jump = t->row_step * t->row_stride,
        .slab_channels = 1,
        .by_parts = divisor_of(t->parts),
        .by_blocks_wide = divisor_of(t->blocks_wide),
        .by_row_step = divisor_of(t->row_step),
        .by_sample_slabs = divisor_of(p->c),
        .by_channels = divisor_of(p->c),
        .by_group = divisor_of(group_of(p)),
        .by_subgroup = divisor_of(1),
        .sets_are_of_samples = is_group,
        .sums_are_of_samples = !t->joins_samples,
        .subgroup = 1,
        .joined_rows = 1,
        .copies = 1,
        .sum_parts = 1,
        .set_values = (double)p->set_values,
        .call = {.values = (float)p->set_values,
                 .share = 1.0f / (float)p->set_values,
                 .channel_groups = (int32_t)(is_group ? p->groups : p->c),
                 .channels = (int32_t)p->c,
                 .sum_slots = 1},
    };
#define SET(type, name) of.name = (type)t->name;
    SET(int64_t, sample_stride) SET(int64_t, slab_stride) SET(int64_t, row_stride) SET(int64_t, column_stride)
    SET(int32_t, rows) SET(int32_t, columns) SET(int32_t, parts) SET(int32_t, next_rows) SET(int32_t, part_rows)
    SET(int32_t, row_step) SET(int32_t, next_vectors) SET(int32_t, part_vectors) SET(int32_t, steps)
    SET(int32_t, slabs) SET(int32_t, samples) SET(int32_t, blocks_wide)
#undef SET
    return of;
}
