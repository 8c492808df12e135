/* SPDX-License-Identifier: MIT
 *
 * walk.cuh - how the threads of the bodies `stream` and `held` share a slab and walk through it.
 *
 * A *slab* is a matrix of rows of adjacent values:
 *   channels first   a slab is a channel of a sample, of one row; a channel of all samples, each of which is a row; or
 *                    (held) a norm group, each channel of which is a row
 *   channels last    a slab is a sample, or all samples; a row is a position, and columns are channels
 * Channels first, `lanes` threads share a slab, `across` of them a row, and `beside` slabs are side by side in a block.
 * Channels last, a thread has the channels of one vector and walks down the rows: its weights and sums stay in registers.
 * If channels are no whole vectors, several rows are folded to one, whose columns are the channels again and again.
 *
 * If rows are no whole vectors (`aligned` is 0), vectors are those that are aligned in memory, and a row's first and last
 * one have elements of others, which are neither counted nor written. `strided`: values of a row are not adjacent, and a
 * vector is one of them. */
#ifndef NORMFUSE_DEVICE_WALK_CUH
#define NORMFUSE_DEVICE_WALK_CUH

#include "activation.cuh"
#include "exchange.cuh"
#include "parameters.cuh"

using namespace signature;

namespace {

constexpr int W = vector, D = ahead;
constexpr bool by_columns = parameters == NORMFUSE_PARAMETERS_OF_COLUMN,
               by_rows = parameters == NORMFUSE_PARAMETERS_OF_ROW;
constexpr bool has_statistics = statistics == NORMFUSE_STATISTICS_GROUP;
constexpr int beside = threads / lanes; /* slabs of a block */
constexpr int down = lanes / across; /* rows that threads have at once */
constexpr int block_columns = across * W;
constexpr bool shares_slab = exchanges != NORMFUSE_EXCHANGE_THROUGH_MEMORY; /* blocks find its statistics together */

/* One set of weights: of the slab or of a row, or of each column of the thread's vector. */
constexpr int weight_sets = 1, weight_values = by_columns ? W : 1;
constexpr int centre_sets = 1, centre_values = weight_values;
constexpr bool many_centres = true, many_rstds = true;
__device__ __forceinline__ constexpr int weight_set(int, int)
{
    return 0;
}
__device__ __forceinline__ constexpr int weight_value(int j)
{
    return by_columns ? j : 0;
}
__device__ __forceinline__ constexpr int centre_set(int, int)
{
    return 0;
}
__device__ __forceinline__ constexpr int centre_value(int j)
{
    return weight_value(j);
}

#include "algebra.cuh"

/* ---- places ------------------------------------------------------------------------------------------------------- */

struct place {
    const normfuse_stream_arguments &a;
    int part, wide; /* of the parts of a slab; of the blocks that share its columns */
    int sample, slab;
    int tx, ty;
    int column; /* channels last: of the thread's vector */
    int first_row, row_end, first_vector, vector_end; /* of the thread: rows, and vectors of a row */
    int64_t begin; /* element of the slab's first value */
    bool slab_exists;
    bool exists; /* the thread has something of it */

    __device__ __forceinline__ place(const normfuse_stream_arguments &a, int block) : a(a)
    {
        const int thread = (int)threadIdx.x % lanes;
        tx = thread % across;
        ty = thread / across;
        if constexpr (by_columns) {
            if constexpr (shares_slab) {
                const int of_all = divide(block, a.by_parts);
                part = block - of_all * a.parts;
                slab_exists = of_all < a.slabs;
                sample = slab_exists ? divide(of_all, a.by_blocks_wide) : 0;
                wide = slab_exists ? of_all - sample * a.blocks_wide : 0;
            } else {
                const int of_rows = divide(block, a.by_blocks_wide);
                wide = block - of_rows * a.blocks_wide;
                sample = divide(of_rows, a.by_parts);
                part = of_rows - sample * a.parts;
                slab_exists = true;
            }
            slab = 0;
            column = wide * block_columns + tx * W;
            exists = slab_exists && thread < across * down && column < a.columns;
            begin = sample * a.sample_stride;
            first_row = part * a.next_rows + ty;
            row_end = end_of_rows();
            first_vector = vector_end = 0;
        } else {
            const int turn = divide(block, a.by_parts);
            part = block - turn * a.parts;
            wide = column = 0;
            const int of_all = turn * beside + (int)threadIdx.x / lanes;
            slab_exists = exists = of_all < a.slabs;
            sample = exists ? divide(of_all, a.by_sample_slabs) : 0;
            slab = exists ? of_all - sample * (int)a.by_sample_slabs.divisor : 0;
            begin = sample * a.sample_stride + slab * a.slab_stride;
            first_row = part * a.next_rows + ty;
            row_end = exists ? min(a.rows, part * a.next_rows + a.part_rows) : 0;
            first_vector = part * a.next_vectors + tx;
            vector_end = part * a.next_vectors + a.part_vectors;
        }
    }
    /* Channels last: behind the last row of this part. */
    __device__ __forceinline__ int end_of_rows() const
    {
        return a.part_rows > 0 ? min(a.rows, part * a.next_rows + a.part_rows) : a.rows;
    }
    __device__ __forceinline__ int channel_of_column(int of_column) const
    {
        return folded ? of_column - divide(of_column, a.by_channels) * a.call.channels : of_column;
    }
    __device__ __forceinline__ int channel(int, int i) const
    {
        return by_columns ? channel_of_column(column + i) : slab * a.slab_channels;
    }
    __device__ __forceinline__ bool has_weights(int) const
    {
        return exists;
    }
    /* The group of channel c, in its sample. */
    __device__ __forceinline__ int group_of(int c) const
    {
        return divide(c, a.by_group);
    }
    /* The index among all sets, of its statistics and totals. */
    __device__ __forceinline__ int64_t set_of(int c) const
    {
        return (a.sets_are_of_samples ? (int64_t)sample * a.call.channel_groups : 0) + group_of(c);
    }
    /* An element of a vector that has some of the row. */
    __device__ __forceinline__ bool has_element(int first_column, int j) const
    {
        return aligned ? true : first_column + j >= 0 && first_column + j < a.columns;
    }
    /* The first row that a thread of the block has in the slab, and its first value there. */
    __device__ __forceinline__ int64_t first_of_part() const
    {
        const int64_t row_begin = begin + (int64_t)(part * a.next_rows) * a.row_stride;
        if constexpr (by_columns)
            return row_begin + column;
        const int vectors = part * a.next_vectors * W - (aligned ? 0 : (int)row_begin & (W - 1));
        return row_begin + max(vectors, 0) * (strided ? a.column_stride : 1);
    }
};

/* The vectors of a thread, one after the other. All threads that share rows take the same number of steps. */
struct cursor {
    const place &at;
    int row, step;
    int vector_of_row, first_column;
    int64_t row_begin, element; /* of the vector in every tensor */
    bool has;

    __device__ __forceinline__ explicit cursor(const place &at) : at(at), row(at.first_row), step(0)
    {
        row_begin = at.begin + (int64_t)row * at.a.row_stride;
        if constexpr (by_columns)
            element = row_begin + at.column;
        vector_of_row = at.first_vector;
        find();
    }
    __device__ __forceinline__ void find()
    {
        if constexpr (by_columns) {
            first_column = at.column;
            has = at.exists && row < at.row_end;
        } else {
            first_column = vector_of_row * W - (aligned ? 0 : (int)row_begin & (W - 1));
            element = row_begin + (strided ? first_column * at.a.column_stride : (int64_t)first_column);
            has = row < at.row_end && vector_of_row < at.vector_end && first_column < at.a.columns;
        }
    }
    __device__ __forceinline__ void next()
    {
        if constexpr (by_columns) {
            row += at.a.row_step;
            element += at.a.row_jump;
        } else if (++step < at.a.steps) {
            vector_of_row += across;
        } else {
            step = 0;
            row += at.a.row_step;
            row_begin += at.a.row_jump;
            vector_of_row = at.first_vector;
        }
        find();
    }
    /* Threads of a warp that leave sums of their rows together go on together. */
    __device__ __forceinline__ bool is_over() const
    {
        return row - (by_rows && across < 32 ? at.ty % (32 / across) : 0) >= at.row_end;
    }
};

/* The elements of the vector that are the row's. */
__device__ __forceinline__ void store(const cursor &of, char *tensor, const R (&numbers)[W])
{
    char *const to = tensor + of.element * bytes_of(type);
    if (aligned || (of.first_column >= 0 && of.first_column + W <= of.at.a.columns)) {
        store_whole(to, pack<type, W>(numbers));
        return;
    }
    each<W>([&](int j) {
        if (of.at.has_element(of.first_column, j))
            store_number<type>(to, j, numbers[j]);
    });
}

/* x + pre_bias + pre_add, rounded where that is a tensor; else x. */
__device__ __forceinline__ void unpack_u(const raw_vector &x, const raw_vector &added,
                                         const R (&of_bias)[weight_values], R (&numbers)[W])
{
    unpack<type, W>(x, numbers);
    if constexpr (rounds_u) {
        add_to_x(numbers, added, of_bias);
        const raw_vector u = pack<type, W>(numbers);
        unpack<type, W>(u, numbers);
    }
}

/* ---- tensors through slots ---------------------------------------------------------------------------------------- */

/* Which tensors pass through slots: x, dy, what is added before the norm, behind it, and to dx. */
template <bool has_x, bool has_dy, bool has_before, bool has_behind, bool has_more> struct passing {
    static constexpr bool x = has_x, dy = has_dy, before = has_before, behind = has_behind, more = has_more;
    static constexpr int of_dy = x, of_before = of_dy + dy, of_behind = of_before + before,
                         of_more = of_behind + behind, count = of_more + more;
};

struct vectors {
    raw_vector x, dy, before, behind, more;
};

template <typename Passing> struct pipeline {
    const place &at;
    raw_vector *const slots; /* the thread's first of [D][tensors][threads] */

    __device__ __forceinline__ raw_vector *slot(int turn, int tensor) const
    {
        return slots + (turn * Passing::count + tensor) * threads;
    }
    __device__ __forceinline__ void request(const cursor &of, int turn) const
    {
        const normfuse_stream_arguments &a = at.a;
        const int64_t bytes = of.element * bytes_of(type);
        const auto one = [&](int tensor, const char *from) { copy_ahead(slot(turn, tensor), from + bytes, of.has); };
        if constexpr (Passing::x)
            one(0, a.x);
        if constexpr (Passing::dy)
            one(Passing::of_dy, a.dy);
        if constexpr (Passing::before)
            one(Passing::of_before, a.call.pre_add);
        if constexpr (Passing::behind)
            one(Passing::of_behind, a.call.post_add);
        if constexpr (Passing::more)
            one(Passing::of_more, a.call.du);
    }
    __device__ __forceinline__ void receive(vectors &of, int turn) const
    {
        if constexpr (Passing::x)
            of.x = *slot(turn, 0);
        if constexpr (Passing::dy)
            of.dy = *slot(turn, Passing::of_dy);
        if constexpr (Passing::before)
            of.before = *slot(turn, Passing::of_before);
        if constexpr (Passing::behind)
            of.behind = *slot(turn, Passing::of_behind);
        if constexpr (Passing::more)
            of.more = *slot(turn, Passing::of_more);
    }
};

/* ---- sums of a block's columns ------------------------------------------------------------------------------------ */

/* A thread joins its adjacent columns of one norm group first: a *piece* of them, which a forward then has in their place. */
constexpr int pieces = W / piece, block_pieces = block_columns / piece;
constexpr int piece_lanes = lanes_that_join(threads, block_pieces, down);

/* Rows of a column that the threads of each ty have. */
struct shared_rows {
    int each, rest;

    __device__ __forceinline__ shared_rows(const place &at, int of_column)
    {
        const int rows = of_column < at.a.columns ? max(at.end_of_rows() - at.part * at.a.next_rows, 0) : 0;
        each = divide(rows, at.a.by_row_step);
        rest = rows - each * at.a.row_step;
    }
    __device__ __forceinline__ R of(int ty) const
    {
        return (R)(each + (ty < rest));
    }
};

/* The block's sums of a column, or piece: count, mean and squares of a forward; sums of dz, of dz (u - mean), and of a
 * slope of a backward. */
struct column_sums {
    double of[3];
};

/* The channels of a block: those of its columns; where it has all of several folded rows, each once. A *subgroup* is
 * adjacent channels of one group that the block has, whose statistics are joined here. work(first column, channel, copy);
 * join the columns first + i + k * channels for i below `subgroup` and k below joined_rows. */
template <typename Work> __device__ __forceinline__ void each_subgroup(const place &at, int subgroup, Work work)
{
    const normfuse_stream_arguments &a = at.a;
    const int all = a.joined_rows > 1 ? a.call.channels : min(block_columns, a.columns - at.wide * block_columns);
#pragma unroll 1
    for (int column = (int)threadIdx.x * subgroup; column < all; column += threads * subgroup) {
        const int of_row = at.wide * block_columns + column;
        work(column, at.channel_of_column(of_row), folded && a.joined_rows == 1 ? divide(of_row, a.by_channels) : 0);
    }
}

__device__ __forceinline__ void store_triple(const place &at, int c, int copy, int subgroup, double count,
                                             double mean_of, double squares)
{
    const normfuse_stream_arguments &a = at.a;
    const int group = at.group_of(c), of_group = divide(c - group * (int)a.by_group.divisor, a.by_subgroup);
    const int64_t part = (a.sets_are_of_samples ? 0 : (int64_t)at.sample * a.parts) + at.part;
    const int64_t slot = (of_group * (int64_t)a.part_slots + part) * a.copies + copy;
    double *const triple = a.triples + (at.set_of(c) * a.set_triples + slot) * 3;
    triple[0] = count;
    triple[1] = mean_of;
    triple[2] = squares;
}

__device__ __forceinline__ void store_pair(const place &at, int c, int copy, double plain, double centred,
                                           double of_slope)
{
    const normfuse_stream_arguments &a = at.a;
    const int64_t channel = (a.sums_are_of_samples ? (int64_t)at.sample * a.call.channels : 0) + c;
    const int64_t index = channel * a.call.sum_slots + at.part * a.sum_parts * a.copies + copy;
    reinterpret_cast<double2 *>(a.call.sums)[index] = make_double2(plain, centred);
    if constexpr (sums_slopes)
        reinterpret_cast<double2 *>(a.call.slope_sums)[index] = make_double2(of_slope, 0.0);
}

/* A value near those of u, which all threads that join their sums have: the first one of the slab or of each column,
 * there or, where u may be written over that, in the block's part. */
struct pivots {
    R of[weight_values];

    __device__ __forceinline__ pivots(const place &at, const R (&of_bias)[weight_values])
    {
        const int64_t bytes = (shares_slab ? at.begin + at.column : at.first_of_part()) * bytes_of(type);
        if constexpr (by_columns) {
            const bool wanted = at.exists && (shares_slab || at.part * at.a.next_rows < at.row_end);
            raw_vector x = {}, added = {};
            R numbers[W];
            load_shared_by_many(wanted, x, at.a.x + bytes);
            if constexpr (pre_add)
                load_shared_by_many(wanted, added, at.a.call.pre_add + bytes);
            unpack_u(x, added, of_bias, numbers);
            each<W>([&](int j) { of[j] = numbers[j]; });
        } else {
            raw_element x = {}, added = {};
            R number[1], more[1];
            load_shared_by_many(at.exists, x, at.a.x + bytes);
            if constexpr (pre_add)
                load_shared_by_many(at.exists, added, at.a.call.pre_add + bytes);
            unpack<type, 1>(x, number);
            if constexpr (rounds_u && pre_bias != 0 && !by_rows)
                number[0] += of_bias[0];
            if constexpr (pre_add) {
                unpack<type, 1>(added, more);
                number[0] += more[0];
            }
            /* A value that u has: of equal ones the variance is 0. */
            if constexpr (rounds_u)
                unpack<type, 1>(pack<type, 1>(number), number);
            of[0] = number[0];
        }
        if constexpr (stores_u && !shares_slab)
            __syncthreads();
    }
};

/* ---- what a thread has found ---------------------------------------------------------------------------------------- */

/* Moments of values of u: how many, their mean about the pivot, and the sum of squares about that mean. */
struct moments {
    R count, mean, squares;
};

/* The thread's sums of distances from a pivot and of their squares, of each column, or of all in two sums in turn; and the
 * values of one that these are of. */
struct sums_of_u {
    static constexpr int sums = by_columns ? W : 2;
    R first[sums] = {}, second[sums] = {};
    int count = 0;

    /* distance(j): of each element of a vector. */
    template <typename Distance>
    __device__ __forceinline__ void add(const place &at, int first_column, Distance distance)
    {
        if constexpr (by_columns)
            count++;
        each<W>([&](int j) {
            const bool counts = at.has_element(first_column, j);
            const R of = counts ? distance(j) : R(0);
            first[j % sums] += of;
            second[j % sums] = fma(of, of, second[j % sums]);
            if constexpr (!by_columns)
                count += counts;
        });
    }
};

/* Moments of the values that `lanes` threads have. */
template <int lanes> __device__ __forceinline__ moments join_moments(const sums_of_u &of)
{
    __shared__ R of_warps[2][threads / 32 * 2];
    R all[2] = {of.first[0] + of.first[1], (R)of.count};
    const R own_mean = of.count > 0 ? all[0] / (R)of.count : R(0);
    R squares[1] = {fma(-all[0], own_mean, of.second[0] + of.second[1])};
    sum_threads<2, lanes>(all, of_warps[0]);
    const R mean = all[1] > R(0) ? all[0] / all[1] : R(0), apart = own_mean - mean;
    squares[0] = fma((R)of.count * apart, apart, squares[0]);
    sum_threads<1, lanes>(squares, of_warps[1]);
    return {all[1], mean, squares[0]};
}

/* The thread's sums of dz, of dz (u - mean), and of what prelu's slope gets. */
struct sums_of_dz {
    R plain[weight_values] = {}, centred[weight_values] = {}, of_slope[weight_values] = {};

    __device__ __forceinline__ void add(int i, R dz, R distance, bool counts)
    {
        plain[i] += counts ? dz : R(0);
        centred[i] = counts ? fma(dz, distance, centred[i]) : centred[i];
    }
    /* Distances were from the centre: now from the mean itself. */
    __device__ __forceinline__ void move_to_mean(const centres &centre)
    {
        each<weight_values>([&](int i) { centred[i] = fma(-centre.left(0, i), plain[i], centred[i]); });
    }
};
constexpr int numbers_of_dz = sums_slopes ? 3 : 2;

/* A slab's, of all its lanes. */
template <int = 0> __device__ __forceinline__ message<3> join_slab(const sums_of_dz &of)
{
    __shared__ R of_warps[threads / 32 * numbers_of_dz];
    R all[numbers_of_dz];
    all[0] = of.plain[0];
    all[1] = of.centred[0];
    if constexpr (sums_slopes)
        all[2] = of.of_slope[0];
    sum_threads<numbers_of_dz, lanes>(all, of_warps);
    return {{all[0], all[1], sums_slopes ? all[numbers_of_dz - 1] : R(0)}};
}

/* ---- sums of columns ---------------------------------------------------------------------------------------------- */

/* The sums of a block's threads of its columns, one after the other in shared memory where nothing else is. */
struct joined_pieces {
    column_sums *sums;               /* of each piece: count, mean and squares */
    const message<2> *first_columns; /* pivot and bias of its first column */
};

template <int values>
__device__ __forceinline__ joined_pieces join_columns(const place &at, char *memory, const pivots &pivot,
                                                      const R (&of_bias)[values], const sums_of_u &of)
{
    /* Sums of threads, then of pieces, whose pivots and biases go with these. */
    message<2> *const of_threads = reinterpret_cast<message<2> *>(memory);
    message<2> *const first_columns = of_threads + down * block_pieces; /* pivots and biases */
    column_sums *const sums_of_pieces = reinterpret_cast<column_sums *>(first_columns + block_pieces);
    const R rows_of_thread = (R)of.count, share = of.count > 0 ? R(1) / rows_of_thread : R(0);
    if (at.ty < down)
        each<pieces>([&](int p) {
            const int j = p * piece;
            R means[piece], mean_of = R(0), squares = R(0); /* about the first column's pivot */
            each<piece>([&](int i) {
                const R own = quotient(of.first[j + i], rows_of_thread, share);
                means[i] = i == 0 ? own : (pivot.of[j + i] - pivot.of[j]) + own;
                if constexpr (centre_has_bias)
                    means[i] += of_bias[j + i] - of_bias[j];
                mean_of += means[i];
                squares += fma(-of.first[j + i], own, of.second[j + i]);
            });
            mean_of *= R(1) / piece;
            if constexpr (piece > 1)
                each<piece>([&](int i) {
                    const R apart = means[i] - mean_of;
                    squares = fma(rows_of_thread * apart, apart, squares);
                });
            of_threads[at.ty * block_pieces + at.tx * pieces + p] = {{mean_of, squares}};
            if (at.ty == 0)
                first_columns[at.tx * pieces + p] = {{pivot.of[j], centre_has_bias ? of_bias[j] : R(0)}};
        });
    __syncthreads();
    each_item<threads, piece_lanes>(block_pieces, [&](int of_block, int lane, bool exists) {
        const shared_rows rows(at, at.wide * block_columns + of_block * piece);
        R all[2] = {R(0), R(0)};
#pragma unroll 4
        for (int ty = lane; ty < down; ty += piece_lanes) {
            all[0] = fma(rows.of(ty), of_threads[ty * block_pieces + of_block].numbers[0], all[0]);
            all[1] += rows.of(ty);
        }
        sum_lanes<2, piece_lanes>(all);
        const R mean_of = all[1] > R(0) ? all[0] / all[1] : R(0);
        R squares[1] = {R(0)};
#pragma unroll 4
        for (int ty = lane; ty < down; ty += piece_lanes) {
            const message<2> of = of_threads[ty * block_pieces + of_block];
            const R apart = of.numbers[0] - mean_of;
            squares[0] += fma(rows.of(ty) * R(piece) * apart, apart, of.numbers[1]);
        }
        sum_lanes<1, piece_lanes>(squares);
        if (lane == 0 && exists) {
            const message<2> of = first_columns[of_block];
            sums_of_pieces[of_block] = {{(double)all[1] * piece,
                                         (double)of.numbers[0] + (double)mean_of + (double)of.numbers[1],
                                         (double)squares[0]}};
        }
    });
    __syncthreads();
    return {sums_of_pieces, first_columns};
}

template <int numbers = numbers_of_dz>
__device__ __forceinline__ column_sums *join_columns(const place &at, char *memory, const sums_of_dz &of)
{
    message<numbers> *const of_threads = reinterpret_cast<message<numbers> *>(memory);
    column_sums *const columns = reinterpret_cast<column_sums *>(
        memory + (down * block_columns * (int)sizeof(message<numbers>) + 15) / 16 * 16);
    if (at.ty < down)
        each<W>([&](int j) {
            message<numbers> &to = of_threads[at.ty * block_columns + at.tx * W + j];
            to.numbers[0] = of.plain[j];
            to.numbers[1] = of.centred[j];
            if constexpr (sums_slopes)
                to.numbers[2] = of.of_slope[j];
        });
    __syncthreads();
    each_item<threads, piece_lanes>(block_pieces, [&](int column, int lane, bool exists) {
        R all[numbers];
        each<numbers>([&](int i) { all[i] = R(0); });
#pragma unroll 4
        for (int ty = lane; ty < down; ty += piece_lanes)
            each<numbers>([&](int i) { all[i] += of_threads[ty * block_columns + column].numbers[i]; });
        sum_lanes<numbers, piece_lanes>(all);
        if (lane == 0 && exists)
            columns[column] = {{(double)all[0], (double)all[1], sums_slopes ? (double)all[numbers - 1] : 0.0}};
    });
    __syncthreads();
    return columns;
}

} // namespace

#endif
