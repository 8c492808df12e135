/* SPDX-License-Identifier: MIT
 *
 * single.cuh - the body `single`: a norm group is held in registers by lanes of a warp, by a block or by a small cluster,
 * and read once.
 *
 * A norm group is a matrix of rows of adjacent values:
 *   batch norm, channels first     a row is a sample, a column a position; the group has one weight
 *   group norm, channels first     a row is a channel, a column a position; a row has one weight
 *   group norm, channels last      a row is a position, a column a channel of the group; a column has one weight
 *   norm over channels             channels last, that of one row: positions are samples; channels first, a row is a
 *                                  channel, a column a position, which has statistics of its own: tiles of positions
 *                                  are samples. Norm groups of the call's samples lie beside one another (`positions`)
 *   batch norm, channels last      a row is a position, a column a channel, which has statistics of its own; blocks have
 *                                  some of the columns each
 *   evaluation and affine          one of the first or the last
 * `lanes` threads share a norm group, `across` of them the columns and the others rows; each has held_rows x held_columns
 * vectors of `vector` adjacent elements. Where rows are no whole vectors (`aligned` is 0) vectors are those that are aligned
 * in memory, and a row's first and last one have elements of others, which are neither counted nor written.
 *
 * A call goes through four steps: prologue (held values u, or x - mean and dz), reduce, exchange, epilogue. */
#include "activation.cuh"
#include "exchange.cuh"
#include "parameters.cuh"

using namespace signature;

namespace {

constexpr int W = vector, KX = held_columns, KY = held_rows;
constexpr int beside = threads / lanes; /* norm groups of a block */
constexpr int down = lanes / across;    /* threads that share a column */
constexpr bool of_columns = statistics == NORMFUSE_STATISTICS_COLUMN;
constexpr bool has_statistics = of_columns || statistics == NORMFUSE_STATISTICS_GROUP;
/* Columns of one matrix are spread over blocks. */
constexpr bool spread = parameters == NORMFUSE_PARAMETERS_OF_COLUMN && statistics != NORMFUSE_STATISTICS_GROUP;
constexpr int block_columns = across * KX * W;
/* Sets of weights that a thread has. */
constexpr int weight_rows = parameters == NORMFUSE_PARAMETERS_OF_ROW ? KY : 1;
constexpr int weight_columns = parameters == NORMFUSE_PARAMETERS_OF_COLUMN ? KX : 1;
constexpr int weight_values = parameters == NORMFUSE_PARAMETERS_OF_COLUMN ? W : 1;
constexpr int weight_sets = weight_rows * weight_columns;
/* Columns have statistics, rows weights: norm over channels, channels first. */
constexpr bool tiled = of_columns && parameters == NORMFUSE_PARAMETERS_OF_ROW;
/* Centres: of each column, of each weight where a bias is a part of them, else one. */
constexpr bool many_centres = !tiled && (of_columns || centre_has_bias || statistics == NORMFUSE_STATISTICS_RUNNING);
constexpr int column_sets = of_columns ? KX : 1, column_values = of_columns ? W : 1;
constexpr int centre_sets = many_centres ? weight_sets : column_sets,
              centre_values = many_centres ? weight_values : column_values;

__device__ __forceinline__ constexpr int weight_set(int ky, int kx)
{
    return parameters == NORMFUSE_PARAMETERS_OF_ROW ? ky : parameters == NORMFUSE_PARAMETERS_OF_COLUMN ? kx : 0;
}
__device__ __forceinline__ constexpr int weight_value(int j)
{
    return parameters == NORMFUSE_PARAMETERS_OF_COLUMN ? j : 0;
}
__device__ __forceinline__ constexpr int centre_set(int ky, int kx)
{
    return many_centres ? weight_set(ky, kx) : tiled ? kx : 0;
}
__device__ __forceinline__ constexpr int centre_value(int j)
{
    return many_centres ? weight_value(j) : tiled ? j : 0;
}

constexpr bool many_rstds = !tiled && (of_columns || statistics == NORMFUSE_STATISTICS_RUNNING);

#include "algebra.cuh"

/* A thread's vectors of a tile that is followed by others lie in shared memory, twice: this tile's, and the next one's,
 * which are on their way. Registers have no room for both. Short vectors stay in registers: each would be a copy. */
constexpr bool in_slots = tiled && walks && vector * bytes_of(type) >= 8;
template <int of_type> struct slots {
    using vectors = raw<of_type, W>;
    static constexpr int bytes = KY * KX * threads * (int)sizeof(vectors);
    struct row {
        vectors *first;
        __device__ __forceinline__ vectors &operator[](int kx) const
        {
            return first[kx * threads];
        }
    };
    vectors *first;
    __device__ __forceinline__ row operator[](int ky) const
    {
        return {first + ky * KX * threads};
    }
};
/* y, dy and post_add may have another type than x. */
template <int of_type>
using held_of = typename choose<in_slots, slots<of_type>, raw<of_type, vector>[KY][KX]>::type;
using held = held_of<type>;
using held_y = held_of<y_type>;

/* The next slots of `memory`, one after the other for the tensors of a tile. */
template <int of_type> __device__ __forceinline__ void take_slots(slots<of_type> &to, char *&memory)
{
    to.first = reinterpret_cast<typename slots<of_type>::vectors *>(memory) + threadIdx.x;
    memory += slots<of_type>::bytes;
}
template <typename Vectors> __device__ __forceinline__ void take_slots(Vectors &, char *&)
{
}
/* Into registers, or by a copy into its slot. */
template <bool once, typename Raw>
__device__ __forceinline__ void request_vector(bool wanted, Raw &to, const char *from)
{
    if constexpr (in_slots) {
        if (wanted)
            copy_ahead(&to, from, true);
        else
            to = {};
    } else {
        to = {};
        if constexpr (once)
            load_once(wanted, to, from);
        else
            load_shared_by_many(wanted, to, from);
    }
}
/* Entries of the norm group, of each weight, or of each column. */
using group_rstds = R[tiled ? KX : many_rstds ? weight_sets : 1][tiled ? W : many_rstds ? weight_values : 1];

/* A thread's place. */
struct place {
    const normfuse_single_arguments &a;
    int rank, group, walker; /* of the block; its first norm group, here the thread's */
    int outer;               /* positions: the norm group's sample of the call */
    int of_sample;           /* the thread's sample beside the block's first one */
    int thread, tx, ty;      /* among those that share the norm group */
    int rows, columns;       /* that the block has of it */
    int64_t first;           /* element of the norm group's first value in sample 0; of the block's first value: */
    int64_t own;
    bool has_group;

    __device__ __forceinline__ place(const normfuse_single_arguments &a) : a(a)
    {
        int turn = (int)blockIdx.x;
        rank = 0;
        if constexpr (split) {
            turn = divide((int)blockIdx.x, a.by_parts);
            rank = (int)blockIdx.x - turn * a.parts;
        }
        group = divide(turn, a.by_walkers);
        walker = turn - group * a.walkers;
        const int slot = (int)threadIdx.x / lanes;
        of_sample = 0;
        if constexpr (beside > 1) {
            of_sample = slot & ((1 << a.sample_bits) - 1);
            group = group * (beside >> a.sample_bits) + (slot >> a.sample_bits);
        }
        has_group = beside == 1 || group < a.groups;
        thread = (int)threadIdx.x % lanes;
        tx = thread % across;
        ty = thread / across;
        outer = outer_of(group);
        first = outer * a.outer_stride + (int64_t)(group - outer * (int)a.by_inner_groups.divisor) * a.group_stride;
        const int first_row = rank * a.next_rows, first_column = rank * a.next_columns;
        rows = min(a.part_rows, a.rows - first_row);
        columns = min(a.part_columns, a.columns - first_column - (spread ? group * block_columns : 0));
        own = first + first_row * a.row_stride + first_column;
    }
    __device__ __forceinline__ int outer_of(int group) const
    {
        return positions ? divide(group, a.by_inner_groups) : 0;
    }
    /* That parameters and sums of samples are of. */
    __device__ __forceinline__ int64_t sample_of(int64_t sample) const
    {
        return positions ? outer : sample;
    }
    /* The columns of a tile. */
    __device__ __forceinline__ void turn_to(int sample)
    {
        if constexpr (tiled)
            columns = min(a.part_columns, a.columns - sample * a.part_columns);
    }
    /* The thread's slot. */
    __device__ __forceinline__ int row(int ky) const
    {
        return ty + ky * down;
    }
    /* Elements by which the first vector of a row begins before it. */
    __device__ __forceinline__ int before(int64_t row_begin) const
    {
        return aligned ? 0 : (int)row_begin & (W - 1);
    }
    __device__ __forceinline__ int column(int kx, int begins_before) const
    {
        return (tx + kx * across) * W - begins_before;
    }
    __device__ __forceinline__ bool has(int ky, int first_column) const
    {
        return exact ? true : has_group && row(ky) < rows && first_column < columns;
    }
    /* An element of a vector that has some of the row. */
    __device__ __forceinline__ bool has_element(int first_column, int j) const
    {
        return aligned ? true : first_column + j >= 0 && first_column + j < columns;
    }
    /* The norm group's first channel. */
    __device__ __forceinline__ int channel() const
    {
        return (group - outer * (int)a.by_inner_groups.divisor) * a.group_channels;
    }
    /* A set of weights. */
    __device__ __forceinline__ int channel(int set) const
    {
        return channel() + (parameters == NORMFUSE_PARAMETERS_OF_ROW      ? rank * a.next_rows + row(set)
                            : parameters == NORMFUSE_PARAMETERS_OF_COLUMN ? rank * a.next_columns + column(set, 0)
                                                                          : 0);
    }
    __device__ __forceinline__ int channel(int set, int i) const
    {
        return channel(set) + i;
    }
    __device__ __forceinline__ bool has_weights(int set) const
    {
        if constexpr (parameters == NORMFUSE_PARAMETERS_OF_ROW)
            return exact ? true : has_group && row(set) < rows;
        else if constexpr (parameters == NORMFUSE_PARAMETERS_OF_COLUMN)
            return exact ? true : has_group && column(set, 0) < columns;
        else
            return exact ? true : has_group;
    }
    /* work(ky, kx, first column, element of a tensor) */
    template <typename Work> __device__ __forceinline__ void each_vector(int64_t sample, Work work) const
    {
        each<KY>([&](int ky) {
            const int64_t row_begin = sample * a.sample_stride + own + row(ky) * a.row_stride;
            each<KX>([&](int kx) {
                const int first_column = column(kx, before(row_begin));
                work(ky, kx, first_column, row_begin + first_column);
            });
        });
    }
    template <int of_type = type>
    __device__ __forceinline__ void request(const char *tensor, int64_t sample, bool wanted, held_of<of_type> &to) const
    {
        each_vector(sample, [&](int ky, int kx, int first_column, int64_t element) {
            const bool loads = exact ? wanted : wanted && has(ky, first_column);
            request_vector<aligned != 0>(loads, to[ky][kx], tensor + element * bytes_of(of_type));
        });
    }
    /* vector_of(ky, kx): what is stored. In registers all of it is found first: the slots' threads have no room for that. */
    template <int of_type = type, typename Vectors>
    __device__ __forceinline__ void store(char *tensor, int64_t sample, bool wanted, Vectors vector_of) const
    {
        raw<of_type, W> vectors[KY][KX];
        if constexpr (!in_slots)
            each<KY>([&](int ky) { each<KX>([&](int kx) { vectors[ky][kx] = vector_of(ky, kx); }); });
        each_vector(sample, [&](int ky, int kx, int first_column, int64_t element) {
            if constexpr (in_slots)
                vectors[ky][kx] = vector_of(ky, kx);
            if (!wanted || !has(ky, first_column))
                return;
            char *const at = tensor + element * bytes_of(of_type);
            if (aligned || (first_column >= 0 && first_column + W <= columns)) {
                store_whole(at, vectors[ky][kx]);
                return;
            }
            R numbers[W];
            unpack<of_type, W>(vectors[ky][kx], numbers);
            each<W>([&](int j) {
                if (has_element(first_column, j))
                    store_number<of_type>(at, j, numbers[j]);
            });
        });
    }
};

/* ---- statistics --------------------------------------------------------------------------------------------------- */

constexpr int warps = threads / 32;
/* Sums of warps: of the first and the second sum of a forward; of backwards and of mean squares, which sum once, in
 * turn; and of slopes. */
struct shared_memory {
    R of_warps[3][2 * warps];
};

/* Values that a block of a cluster has of a norm group. */
__device__ __forceinline__ R values_of(const normfuse_single_arguments &a, int rank)
{
    return (R)min(a.part_rows, a.rows - rank * a.next_rows) * (R)min(a.part_columns, a.columns - rank * a.next_columns);
}

struct exchange {
    shared_memory &shared;
    char *dynamic;     /* behind it, dynamic shared memory */
    uint64_t &mailbox; /* of a cluster */
    int turn;          /* samples before this one */
};

/* 1 / values of a norm group, rounded once. */
__device__ __forceinline__ R share_of_values(const normfuse_single_arguments &a)
{
    return sizeof(R) == 8 ? R(1) / (R)a.call.values : (R)a.call.share;
}

/* From its mean square, or variance. */
__device__ __forceinline__ R rstd_of_group(const normfuse_call_arguments &call, R variance)
{
    if constexpr (!eps_of_norm)
        return inverse_root(variance + (sizeof(R) == 8 ? (R)call.eps_of_double : (R)call.eps));
    const R found = inverse_root(variance), most = (R)call.clamped_rstd;
    return found > most ? most : found;
}

/* Statistics of one norm group: about the group's first value, then squares about the mean, which cannot cancel; of mean squares,
 * about 0 alone. */
template <int = 0>
__device__ __forceinline__ void find_group_statistics(const place &at, const exchange &by, const held &x,
                                                      const requested_weights &weights, R pivot, int64_t sample,
                                                      bool wanted, centres &centre, group_rstds &rstd_of)
{
    const normfuse_single_arguments &a = at.a;
    running_statistics running;
    running.request(a.call, at.channel(), at.thread == 0 && at.rank == 0 && wanted);
    R of_bias[weight_sets][weight_values];
    /* Distances from the pivot are those of u: a channel's bias is taken off first. */
    if constexpr (centre_has_bias)
        each<weight_sets>([&](int set) {
            weights.of_pre_bias[set].receive(of_bias[set], R(0));
            each<weight_values>([&](int i) { centre.set(set, i, (double)pivot, of_bias[set][i]); });
        });
    else
        centre.near[0][0] = pivot;
    const auto numbers_of = [&](int ky, int kx, R(&numbers)[W]) { unpack<type, W>(x[ky][kx], numbers); };
    /* In two sums, in turn: half of the roundings one after the other. */
    const auto sum_over_values = [&](auto term) {
        R sums[2] = {R(0), R(0)};
        at.each_vector(sample, [&](int ky, int kx, int first_column, int64_t) {
            if (!at.has(ky, first_column))
                return;
            R numbers[W];
            numbers_of(ky, kx, numbers);
            each<W>([&](int j) {
                R &sum = sums[((ky * KX + kx) * W + j) % 2];
                const R next = term(centre.of(numbers[j], ky, kx, j), sum);
                sum = at.has_element(first_column, j) ? next : sum;
            });
        });
        return sums[0] + sums[1];
    };

    R sums[1] = {R(0)};
    if constexpr (!mean_square) {
        sums[0] = sum_over_values([](R distance, R sum) { return sum + distance; });
        sum_threads<1, lanes>(sums, by.shared.of_warps[0]);
    }
    const R count = shared_by_cluster ? values_of(a, at.rank) : (R)a.call.values;
    const R share = shared_by_cluster ? R(1) / count : share_of_values(a);
    R distance = mean_square ? R(0) : quotient(sums[0], count, share); /* from the pivot to the mean */
    const auto move_centre = [&]() {
        if constexpr (mean_square) {
            centre.near[0][0] = centre.rest[0][0] = R(0);
        } else if constexpr (centre_has_bias) {
            each<weight_sets>([&](int set) {
                each<weight_values>(
                    [&](int i) { centre.set(set, i, (double)pivot + (double)distance, of_bias[set][i]); });
            });
        } else {
            const R near = pivot + distance, back = near - pivot;
            centre.near[0][0] = near;
            centre.rest[0][0] = (pivot - (near - back)) + (distance - back);
        }
    };
    move_centre();
    sums[0] = sum_over_values([](R of, R sum) { return fma(of, of, sum); });
    sum_threads<1, lanes>(sums, by.shared.of_warps[mean_square && walks ? by.turn % 2 : 1]);
    R squares = sums[0];
    if constexpr (!centre_has_bias && !mean_square) /* they were about the centre, not the mean */
        squares = fma(-count * centre.rest[0][0], centre.rest[0][0], squares);

    if constexpr (shared_by_cluster) {
        message<2> *const entries = reinterpret_cast<message<2> *>(by.dynamic);
        exchange_messages(by.mailbox, entries, at.rank, a.parts, {{distance, squares}});
        const int lane = (int)threadIdx.x % 32;
        const bool exists = lane < a.parts;
        const R count_of = exists ? values_of(a, lane) : R(0), of = exists ? entries[lane].numbers[0] : R(0);
        R all[1] = {count_of * of};
        sum_lanes<1, 16>(all);
        distance = quotient(all[0], (R)a.call.values, share_of_values(a));
        const R apart = of - distance;
        all[0] = exists ? fma(count_of * apart, apart, entries[lane].numbers[1]) : R(0);
        sum_lanes<1, 16>(all);
        /* Lanes of the second half have nothing. */
        squares = __shfl_sync(full_mask, all[0], 0);
        distance = __shfl_sync(full_mask, distance, 0);
        move_centre();
    }
    const R variance = quotient(squares, (R)a.call.values, share_of_values(a));
    rstd_of[0][0] = rstd_of_group(a.call, variance);
    if (at.thread == 0 && at.rank == 0 && wanted)
        store_statistics(a.call, sample, at.group, at.channel(), (double)pivot + (double)distance, variance,
                         rstd_of[0][0], running);
}


/* ---- columns that have statistics of their own -------------------------------------------------------------------- */

constexpr int column_lanes = lanes_that_join(threads, block_columns, down);

/* Adjacent numbers from and to shared memory, 16 bytes at once. */
constexpr int type_of_R = sizeof(R) == 8 ? F64 : F32;
template <int N> __device__ __forceinline__ void store_numbers(R *to, const R (&numbers)[N])
{
    constexpr int at_once = least(N, 16 / (int)sizeof(R));
    each<N / at_once>([&](int i) {
        R some[at_once];
        each<at_once>([&](int j) { some[j] = numbers[i * at_once + j]; });
        reinterpret_cast<raw<type_of_R, at_once> *>(to)[i] = pack<type_of_R, at_once>(some);
    });
}
template <int N> __device__ __forceinline__ void load_numbers(R (&numbers)[N], const R *from)
{
    constexpr int at_once = least(N, 16 / (int)sizeof(R));
    each<N / at_once>([&](int i) {
        R some[at_once];
        unpack<type_of_R, at_once>(reinterpret_cast<const raw<type_of_R, at_once> *>(from)[i], some);
        each<at_once>([&](int j) { numbers[i * at_once + j] = some[j]; });
    });
}

/* Behind one another in dynamic shared memory; single.c has the same sum. Rows of the threads' numbers begin in other
 * banks, since the lanes that join a column read one column of several rows. */
struct column_memory {
    static constexpr int row = block_columns + 4;
    R *of_threads;         /* [2][down][row]; mean squares have the second number alone */
    R *totals;             /* [3][block_columns]: near and rest of the mean, and rstd; or sums */
    R *pivots;             /* [block_columns] */
    message<2> *of_blocks; /* [parts][block_columns] */

    __device__ __forceinline__ column_memory(char *dynamic)
    {
        of_threads = reinterpret_cast<R *>(dynamic);
        totals = of_threads + 2 * down * row;
        pivots = totals + 3 * block_columns;
        of_blocks = reinterpret_cast<message<2> *>(pivots + block_columns);
    }
    __device__ __forceinline__ R &of_thread(int number, int ty, int column) const
    {
        return of_threads[(number * down + ty) * row + column];
    }
    __device__ __forceinline__ R &total(int number, int column) const
    {
        return totals[number * block_columns + column];
    }
};

/* work(column, lane, exists) for the columns of the block. */
template <typename Work> __device__ __forceinline__ void each_column(Work work)
{
    each_item<threads, column_lanes>(block_columns, work);
}

/* Rows that the threads of one ty have. */
__device__ __forceinline__ int rows_of_thread(int rows, int ty)
{
    return rows > ty ? (rows - ty - 1) / down + 1 : 0;
}

/* Sums of each column from the blocks of a cluster, sent to all of them. */
template <int = 0>
__device__ __forceinline__ void exchange_columns(const place &at, const exchange &by, const column_memory &memory)
{
#if __CUDA_ARCH__ >= 900
    await_open_mailboxes();
    each_column([&](int column, int lane, bool exists) {
        if (!exists || column >= at.columns)
            return;
        const message<2> sent = {{memory.total(0, column), memory.total(1, column)}};
        for (int to = lane; to < at.a.parts; to += column_lanes)
            send_message(by.mailbox, memory.of_blocks + at.rank * block_columns + column, to, sent);
    });
    __syncwarp(); /* all lanes have read what the first one of a column will write over */
    await_mailbox(by.mailbox, 0);
#endif
}

/* Means and squares of the columns of each thread, about the first row, or (mean squares) about 0; and that. */
template <int = 0>
__device__ __forceinline__ void leave_columns(const place &at, const column_memory &memory, const held &x,
                                              const raw_vector (&first_row)[KX])
{
    R pivot[KX][W];
    each<KX>([&](int kx) {
        unpack<type, W>(first_row[kx], pivot[kx]);
        if constexpr (mean_square)
            each<W>([&](int j) { pivot[kx][j] = R(0); });
    });
    const int own_rows = rows_of_thread(at.rows, at.ty);
    const R own_share = own_rows > 0 ? R(1) / (R)own_rows : R(0);
    each<KX>([&](int kx) {
        R mean_of[W], squares[W];
        each<W>([&](int j) { mean_of[j] = squares[j] = R(0); });
        each<KY>([&](int ky) {
            R numbers[W];
            unpack<type, W>(x[ky][kx], numbers);
            if (!mean_square && at.row(ky) < at.rows)
                each<W>([&](int j) { mean_of[j] += numbers[j] - pivot[kx][j]; });
        });
        each<W>([&](int j) { mean_of[j] *= own_share; });
        if constexpr (in_slots && !mean_square)
            __syncwarp(); /* the compiler reads the values again: kept, they are 96 registers more */
        each<KY>([&](int ky) {
            R numbers[W];
            unpack<type, W>(x[ky][kx], numbers);
            if (at.row(ky) < at.rows)
                each<W>([&](int j) {
                    const R of = (numbers[j] - pivot[kx][j]) - mean_of[j];
                    squares[j] = fma(of, of, squares[j]);
                });
        });
        const int column = at.column(kx, 0);
        if constexpr (!mean_square)
            store_numbers(&memory.of_thread(0, at.ty, column), mean_of);
        store_numbers(&memory.of_thread(1, at.ty, column), squares);
        if (at.ty == 0)
            store_numbers(memory.pivots + column, pivot[kx]);
    });
}

/* Statistics of columns. */
template <int = 0>
__device__ __forceinline__ void
find_column_statistics(const place &at, const exchange &by, const held &x, const requested_weights &weights,
                       const raw_vector (&first_row)[KX], int64_t sample, centres &centre, group_rstds &rstd_of)
{
    const normfuse_single_arguments &a = at.a;
    const column_memory memory(by.dynamic);
    leave_columns(at, memory, x, first_row);
    __syncthreads();
    /* The block's statistics, about the pivot. */
    each_column([&](int column, int lane, bool exists) {
        const R count = (R)at.rows;
        R all[1] = {R(0)};
        R mean_of = R(0);
        if constexpr (!mean_square) {
            for (int ty = lane; ty < down; ty += column_lanes)
                all[0] = fma((R)rows_of_thread(at.rows, ty), memory.of_thread(0, ty, column), all[0]);
            sum_lanes<1, column_lanes>(all);
            mean_of = quotient(all[0], count, R(1) / count);
            all[0] = R(0);
        }
        for (int ty = lane; ty < down; ty += column_lanes) {
            const R apart = mean_square ? R(0) : memory.of_thread(0, ty, column) - mean_of;
            all[0] += fma((R)rows_of_thread(at.rows, ty) * apart, apart, memory.of_thread(1, ty, column));
        }
        sum_lanes<1, column_lanes>(all);
        if (lane == 0 && exists) {
            memory.total(0, column) = mean_of;
            memory.total(1, column) = all[0];
        }
    });
    if constexpr (shared_by_cluster) {
        __syncthreads();
        exchange_columns(at, by, memory);
    }
    each_column([&](int column, int lane, bool exists) {
        running_statistics running;
        running.request(a.call, at.channel() + column, lane == 0 && exists && column < at.columns && at.rank == 0);
        R distance = memory.total(0, column), squares = memory.total(1, column);
        if constexpr (shared_by_cluster) {
            R sum = R(0);
            squares = R(0);
            for (int part = 0; part < a.parts; part++)
                sum = fma((R)min(a.part_rows, a.rows - part * a.next_rows),
                          memory.of_blocks[part * block_columns + column].numbers[0], sum);
            distance = quotient(sum, (R)a.call.values, share_of_values(a));
            for (int part = 0; part < a.parts; part++) {
                const message<2> of = memory.of_blocks[part * block_columns + column];
                const R apart = of.numbers[0] - distance;
                squares += fma((R)min(a.part_rows, a.rows - part * a.next_rows) * apart, apart, of.numbers[1]);
            }
        }
        if (lane != 0 || !exists || column >= at.columns)
            return;
        const R variance = quotient(squares, (R)a.call.values, share_of_values(a));
        const R found = rstd_of_group(a.call, variance);
        const int channel = at.channel() + (tiled ? 0 : column);
        double of_bias = 0.0;
        if constexpr (centre_has_bias)
            of_bias = (double)load_parameter<pre_bias, R>(a.call.pre_bias, sample, channel);
        const double of_x = (double)memory.pivots[column] + (double)distance;
        if (at.rank == 0)
            store_statistics(a.call, tiled ? at.group : sample, tiled ? (int)sample * a.part_columns + column : channel,
                             channel, of_x + of_bias, variance, found, running);
        const R near = (R)of_x;
        memory.total(0, column) = near;
        memory.total(1, column) = (R)(of_x - (double)near);
        memory.total(2, column) = found;
    });
    __syncthreads();
    each<KX>([&](int kx) {
        if constexpr (!mean_square) {
            load_numbers(centre.near[kx], &memory.total(0, at.column(kx, 0)));
            load_numbers(centre.rest[kx], &memory.total(1, at.column(kx, 0)));
        }
        load_numbers(rstd_of[kx], &memory.total(2, at.column(kx, 0)));
    });
}

/* ---- forward ------------------------------------------------------------------------------------------------------ */

/* Sums of each weight: of dz, of dz * (u - mean) * rstd, of what prelu's slope gets. */
struct channel_sums {
    R plain[weight_sets][weight_values], normalized[weight_sets][weight_values], of_slope[weight_sets][weight_values];

    __device__ __forceinline__ void clear()
    {
        each<weight_sets>([&](int set) {
            each<weight_values>([&](int i) { plain[set][i] = normalized[set][i] = of_slope[set][i] = R(0); });
        });
    }
};

/* A thread's values of one sample. */
struct requested_sample {
    held x, of_pre_add;
    held_y post;
    raw_element first_x, first_pre_add; /* the norm group's first value, and the bias that u has in it */
    requested<rounds_pre_bias && !mean_square ? pre_bias : 0, 1> first_bias;
    raw_vector first_row[KX], first_row_added[KX]; /* columns: the matrix's first row */

    __device__ __forceinline__ void take(char *&memory)
    {
        take_slots(x, memory);
        if constexpr (pre_add)
            take_slots(of_pre_add, memory);
        if constexpr (reads_post)
            take_slots(post, memory);
    }
    __device__ __forceinline__ void request(const place &at, int64_t sample, bool wanted)
    {
        const normfuse_single_arguments &a = at.a;
        at.request(a.x, sample, wanted, x);
        if constexpr (pre_add)
            at.request(a.call.pre_add, sample, wanted, of_pre_add);
        const int64_t first = (sample * a.sample_stride + at.first) * bytes_of(type);
        if constexpr (!backward && statistics == NORMFUSE_STATISTICS_GROUP && !mean_square) {
            first_x = first_pre_add = {};
            load_shared_by_many(wanted && at.has_group, first_x, a.x + first);
            if constexpr (pre_add)
                load_shared_by_many(wanted && at.has_group, first_pre_add, a.call.pre_add + first);
        }
        if constexpr (!backward && !mean_square && (tiled || statistics == NORMFUSE_STATISTICS_GROUP))
            first_bias.request(a.call.pre_bias, at.sample_of(sample), [&](int) { return at.channel(); },
                               wanted && at.has_group);
        if constexpr (!backward && !mean_square && of_columns)
            each<KX>([&](int kx) {
                const bool has = wanted && (exact || at.column(kx, 0) < at.columns);
                const int64_t from = first + at.column(kx, 0) * bytes_of(type);
                first_row[kx] = first_row_added[kx] = {};
                load_shared_by_many(has, first_row[kx], a.x + from);
                if constexpr (pre_add)
                    load_shared_by_many(has, first_row_added[kx], a.call.pre_add + from);
            });
    }
    /* Registers have room for it only when the sample is worked on. */
    __device__ __forceinline__ void request_late(const place &at, int64_t sample, bool wanted)
    {
        if constexpr (reads_post)
            at.template request<y_type>(at.a.call.post_add, sample, wanted, post);
    }
    /* u in the place of x. */
    __device__ __forceinline__ void add(const requested_weights &weights)
    {
        if constexpr (rounds_u) {
            each<KX>([&](int kx) {
                each<KY>([&](int ky) { add_to(x[ky][kx], of_pre_add[ky][kx], weights, weight_set(ky, kx)); });
                if constexpr (of_columns && !tiled)
                    add_to(first_row[kx], first_row_added[kx], weights, weight_set(0, kx));
            });
            if constexpr (tiled && !backward && !mean_square) { /* the first row's own bias */
                R of_bias[1] = {R(0)}, of_values[weight_values];
                first_bias.receive(of_bias, R(0));
                each<weight_values>([&](int i) { of_values[i] = of_bias[0]; });
                each<KX>([&](int kx) { add_to(first_row[kx], first_row_added[kx], of_values); });
            }
        }
    }
    static __device__ __forceinline__ void add_to(raw_vector &to, const raw_vector &added,
                                                  const requested_weights &weights, int set)
    {
        R of_bias[weight_values];
        weights.of_pre_bias[set].receive(of_bias, R(0));
        add_to(to, added, of_bias);
    }
    static __device__ __forceinline__ void add_to(raw_vector &to, const raw_vector &added,
                                                  const R (&of_bias)[weight_values])
    {
        R numbers[W];
        unpack<type, W>(to, numbers);
        add_to_x(numbers, added, of_bias);
        to = pack<type, W>(numbers);
    }
    /* A value near those of u, which all threads of the norm group have: its first one, but for a bias that is a part of the
     * mean. */
    __device__ __forceinline__ R pivot() const
    {
        R number[1] = {R(0)}, more[1] = {R(0)}, of_bias[1] = {R(0)};
        if constexpr (mean_square)
            return R(0);
        unpack<type, 1>(first_x, number);
        if constexpr (rounds_pre_bias) {
            first_bias.receive(of_bias, R(0));
            number[0] += of_bias[0];
        }
        if constexpr (pre_add) {
            unpack<type, 1>(first_pre_add, more);
            return number[0] + more[0];
        }
        return number[0];
    }
};

/* Rows have weights and columns rstds: they are weighed without these, which their values are multiplied by. */
template <int = 0>
__device__ __forceinline__ void weigh_values(const requested_weights &weights, const centres &centre,
                                             const group_rstds &rstd_of, const normfuse_call_arguments &call,
                                             coefficients &of)
{
    if constexpr (!tiled) {
        weigh(weights, centre, rstd_of, call, of);
        return;
    }
    centres none;
    each<centre_sets>([&](int set) {
        each<centre_values>([&](int i) { none.near[set][i] = none.rest[set][i] = R(0); });
    });
    const R one[1][1] = {{R(1)}};
    weigh(weights, none, one, call, of);
}

/* The factor of a row's weight: the distance from the column's mean, by its rstd. */
__device__ __forceinline__ R normalized_of(const centres &centre, const group_rstds &rstd_of, R x, int ky, int kx,
                                           int j)
{
    const R distance = centre.of(x, ky, kx, j);
    if constexpr (!tiled)
        return distance;
    return (mean_square ? distance : distance - centre.rest[centre_set(ky, kx)][centre_value(j)]) *
           rstd_of[tiled ? kx : 0][tiled ? j : 0];
}

template <int = 0>
__device__ __forceinline__ void work_on(const place &at, const exchange &by, int64_t sample, bool wanted,
                                        requested_sample &of, const requested_weights &weights, channel_sums &)
{
    const normfuse_single_arguments &a = at.a;
    of.add(weights);
    if constexpr (!in_slots)
        of.request_late(at, sample, wanted);
    centres centre;
    group_rstds rstd_of;
    if constexpr (of_columns)
        find_column_statistics(at, by, of.x, weights, of.first_row, sample, centre, rstd_of);
    else if constexpr (statistics == NORMFUSE_STATISTICS_GROUP)
        find_group_statistics(at, by, of.x, weights, of.pivot(), sample, wanted && at.has_group, centre, rstd_of);
    else
        receive_given(weights, a.call, centre, rstd_of);
    /* After the statistics: u may be in the place of what others read for these. */
    if constexpr (stores_u)
        at.store(a.call.u, sample, wanted, [&](int ky, int kx) { return of.x[ky][kx]; });
    coefficients weighed;
    weigh_values(weights, centre, rstd_of, a.call, weighed);
    if constexpr (writes_out) {
        weighed.halve();
        at.template store<y_type>(a.out, sample, wanted, [&](int ky, int kx) {
            R numbers[W], more[W];
            unpack<type, W>(of.x[ky][kx], numbers);
            if constexpr (reads_post)
                unpack<y_type, W>(of.post[ky][kx], more);
            const int set = weight_set(ky, kx);
            each<W>([&](int j) {
                const int i = weight_value(j);
                const R z = z_of(normalized_of(centre, rstd_of, numbers[j], ky, kx, j), weighed.by[set][i],
                                 weighed.offset[set][i], more, j);
                numbers[j] = activate(z, weighed.p[set][i]);
            });
            return pack<y_type, W>(numbers);
        });
    }
}

/* ---- backward ----------------------------------------------------------------------------------------------------- */

/* Columns with statistics of their own: the threads that have joined their sums write them. */
constexpr bool writes_columns = of_columns && !tiled && gradients != NORMFUSE_GRADIENTS_NONE && !sums_slopes;
constexpr bool by_rows = parameters == NORMFUSE_PARAMETERS_OF_ROW,
               by_columns = parameters == NORMFUSE_PARAMETERS_OF_COLUMN;
/* Sums that the threads of the block, or of a norm group, have of a weight are joined through shared memory. */
constexpr int entries_of_weight = by_columns ? down : 1;
constexpr int block_weights = by_columns ? block_columns : by_rows ? KY * down : 1;

template <int = 0>
__device__ __forceinline__ void emit(const place &at, int64_t sample, int channel, double plain, double normalized,
                                     double of_slope)
{
    const normfuse_single_arguments &a = at.a;
    if constexpr (gradients == NORMFUSE_GRADIENTS_DIRECT) {
        store_gradient<dweight>(a.call.dweight, 0, channel, normalized, a.call.accumulate);
        store_gradient<dbias>(a.call.dbias, 0, channel, plain, a.call.accumulate);
    } else {
        const int part = a.call.part_slots > 1 ? at.rank : 0;
        constexpr bool by_sample = gradients == NORMFUSE_GRADIENTS_OF_SAMPLES;
        const int slot = by_sample ? part : at.walker * a.call.part_slots + part;
        const int64_t index = ((by_sample || positions ? sample * a.call.channels : 0) +
                               channel) * a.call.sum_slots + slot;
        reinterpret_cast<double2 *>(a.call.sums)[index] = make_double2(plain, normalized);
        if constexpr (sums_slopes)
            reinterpret_cast<double2 *>(a.call.slope_sums)[index] = make_double2(of_slope, 0.0);
    }
}

/* The threads' sums of the block's weights become the sums of channels. Those of samples beside one another too where gradients
 * are of channels. `dynamic`: [beside][entries_of_weight][block_weights] of message<3 or 2>. */
template <int = 0>
__device__ __forceinline__ void finish_channels(const place &at, char *dynamic, int64_t sample, bool wanted,
                                                channel_sums &of)
{
    constexpr bool joins_samples = gradients != NORMFUSE_GRADIENTS_OF_SAMPLES;
    constexpr int numbers = sums_slopes ? 3 : 2;
    if constexpr (by_rows)
        each<weight_sets>([&](int set) {
            R sums[3] = {of.plain[set][0], of.normalized[set][0], of.of_slope[set][0]};
            sum_lanes<3, across>(sums);
            of.plain[set][0] = sums[0];
            of.normalized[set][0] = sums[1];
            of.of_slope[set][0] = sums[2];
        });
    /* Totals of a norm group are known to all blocks of its cluster. */
    const bool is_owner =
        by_columns || (by_rows ? at.tx == 0 : at.thread == 0 && (!shared_by_cluster || sums_slopes || at.rank == 0));
    if constexpr (sums_slopes && shared_by_cluster && !by_columns && !by_rows)
        if (at.rank > 0) /* but for those of slopes */
            of.plain[0][0] = of.normalized[0][0] = R(0);
    /* Whoever has all of a channel writes it. */
    if constexpr (!by_columns && (!joins_samples || !joins_beside)) {
        if (is_owner && wanted)
            each<weight_sets>([&](int set) {
                if (at.has_weights(set))
                    emit(at, at.sample_of(sample), at.channel(set), (double)of.plain[set][0],
                         (double)of.normalized[set][0], (double)of.of_slope[set][0]);
            });
        return;
    }
    message<numbers> *const entries = reinterpret_cast<message<numbers> *>(dynamic);
    const int slot = (int)threadIdx.x / lanes;
    __syncthreads(); /* who reads what was there has done so */
    if (is_owner)
        each<weight_sets>([&](int set) {
            each<weight_values>([&](int i) {
                const int index = by_columns ? at.column(set, 0) + i : by_rows ? at.row(set) : 0;
                const int entry = by_columns ? at.ty : 0;
                message<numbers> &to = entries[(slot * entries_of_weight + entry) * block_weights + index];
                const bool has = wanted && at.has_weights(set);
                to.numbers[0] = has ? of.plain[set][i] : R(0);
                to.numbers[1] = has ? of.normalized[set][i] : R(0);
                if constexpr (sums_slopes)
                    to.numbers[2] = has ? of.of_slope[set][i] : R(0);
            });
        });
    __syncthreads();
    const normfuse_single_arguments &a = at.a;
    const int samples = joins_samples && joins_beside ? 1 << a.sample_bits : 1;
    const int sets_of_samples = joins_samples && joins_beside ? beside >> a.sample_bits : beside;
    constexpr int item_lanes = by_columns && beside == 1 ? column_lanes : 1;
#pragma unroll 1
    for (int first = 0; first < sets_of_samples * block_weights; first += threads / item_lanes) {
        const int item = first + (int)threadIdx.x / item_lanes, lane = (int)threadIdx.x % item_lanes;
        const bool exists = item < sets_of_samples * block_weights;
        const int set = exists ? item / block_weights : 0, index = exists ? item - set * block_weights : 0;
        double sums[3] = {0.0, 0.0, 0.0};
        for (int i = lane; i < samples * entries_of_weight; i += item_lanes) {
            const message<numbers> &from = entries[(set * samples * entries_of_weight + i) * block_weights + index];
            each<numbers>([&](int k) { sums[k] += (double)from.numbers[k]; });
        }
#pragma unroll
        for (int distance = item_lanes / 2; distance > 0; distance /= 2)
            each<numbers>([&](int k) { sums[k] += __shfl_xor_sync(full_mask, sums[k], distance); });
        if (lane != 0 || !exists)
            continue;
        /* The thread's own block; `set` is the norm group, or the norm group and sample, beside others. */
        int group = at.group, of_sample = 0;
        if constexpr (beside > 1) {
            const int own_slot = (int)threadIdx.x / lanes, bits = a.sample_bits;
            group += ((set * samples) >> bits) - (own_slot >> bits);
            of_sample = samples > 1 ? 0 : (set & ((1 << bits) - 1)) - (own_slot & ((1 << bits) - 1));
        }
        const int at_row = by_rows ? at.rank * a.next_rows + index : 0,
                  at_column = by_columns ? at.rank * a.next_columns + index : 0;
        const bool has = group < a.groups && (by_rows ? index < at.rows : by_columns ? index < at.columns : true) &&
                         (samples > 1 || sample + of_sample < a.samples);
        const int outer = at.outer_of(group), inner = group - outer * (int)a.by_inner_groups.divisor;
        if (has)
            emit(at, positions ? outer : sample + of_sample, inner * a.group_channels + at_row + at_column, sums[0],
                 sums[1], sums[2]);
    }
}

constexpr int mean_sets = tiled ? KX : many_rstds ? weight_sets : 1,
              mean_values = tiled ? W : many_rstds ? weight_values : 1;

struct requested_backward {
    requested_sample of;
    held_y dy;
    held of_du;
    requested<mean, mean_values, (tiled ? packed_statistics : packed_parameters) != 0> of_mean[mean_sets];
    requested<rstd, mean_values, (tiled ? packed_statistics : packed_parameters) != 0> of_rstd[mean_sets];

    __device__ __forceinline__ void take(char *&memory)
    {
        of.take(memory);
        take_slots(dy, memory);
        if constexpr (du)
            take_slots(of_du, memory);
    }
    __device__ __forceinline__ void request_late(const place &at, int64_t sample, bool wanted)
    {
        of.request_late(at, sample, wanted);
        if constexpr (du)
            at.request(at.a.call.du, sample, wanted, of_du);
    }
    __device__ __forceinline__ void request(const place &at, int64_t sample, bool wanted)
    {
        const normfuse_single_arguments &a = at.a;
        if constexpr (has_statistics)
            each<mean_sets>([&](int set) {
                if constexpr (tiled) { /* of a position */
                    const auto position = [&](int i) { return (int)sample * a.part_columns + at.column(set, 0) + i; };
                    const bool has = wanted && (exact || at.column(set, 0) < at.columns);
                    of_mean[set].request(a.call.mean, at.group, position, has);
                    of_rstd[set].request(a.call.rstd, at.group, position, has);
                    return;
                }
                const int index = of_columns ? at.channel(set) : at.group;
                const bool has = wanted && (of_columns ? at.has_weights(set) : exact || at.has_group);
                of_mean[set].request(a.call.mean, sample, [&](int i) { return index + i; }, has);
                of_rstd[set].request(a.call.rstd, sample, [&](int i) { return index + i; }, has);
            });
        of.request(at, sample, wanted);
        at.template request<y_type>(a.dy, sample, wanted, dy);
    }
};

/* dz of values in slots is found again from these, unless registers have room for it and it takes long. */
constexpr bool keeps_dz = !in_slots || (activation != 0 && KY * KX * W * (int)sizeof(R) <= 128);

/* A thread's sums of one sample: of dz, of dz * (u - mean), and of slopes; `tiled`, of each column those weighed by the
 * rows' weights, too. And what follows from the totals: dx = by dz + by_x (u - mean) + level, of the norm group or of each
 * column. */
struct sample_backward {
    centres centre;
    group_rstds rstd_of;
    coefficients weighed;
    R dz[keeps_dz ? KY : 1][keeps_dz ? KX : 1][W]; /* in the place of dy */
    R plain[weight_sets][weight_values], centred[weight_sets][weight_values], of_slope[weight_sets][weight_values];
    R of_column[2][tiled ? KX : 1][tiled ? W : 1];
    R by_x[column_sets][column_values], level[column_sets][column_values];

    template <int = 0>
    __device__ __forceinline__ void find_centres(const normfuse_single_arguments &a, const requested_backward &given,
                                                 const requested_weights &weights)
    {
        if constexpr (has_statistics) {
            each<centre_sets>([&](int set) {
                const int of_mean = of_columns ? set : 0;
                double mean_of[mean_values];
                R of_bias[weight_values] = {};
                given.of_mean[of_mean].receive(mean_of, 0.0);
                given.of_rstd[of_mean].receive(rstd_of[of_mean], R(1));
                if constexpr (centre_has_bias)
                    weights.of_pre_bias[set].receive(of_bias, R(0));
                each<centre_values>([&](int i) {
                    centre.set(set, i, mean_of[of_columns ? i : 0], centre_has_bias ? of_bias[weight_value(i)] : R(0));
                });
            });
        } else {
            receive_given(weights, a.call, centre, rstd_of);
        }
        weigh_values(weights, centre, rstd_of, a.call, weighed);
    }
    /* dz of a vector, and the distances of its values from the mean; on_slope(j, z) before element j's dz is found. */
    template <typename OnSlope>
    __device__ __forceinline__ void find_dz(const requested_backward &given, int ky, int kx, R (&distance)[W],
                                            R (&found)[W], OnSlope on_slope) const
    {
        R numbers[W], more[W];
        unpack<type, W>(given.of.x[ky][kx], numbers);
        unpack<y_type, W>(given.dy[ky][kx], found);
        if constexpr (reads_post)
            unpack<y_type, W>(given.of.post[ky][kx], more);
        const int set = weight_set(ky, kx);
        each<W>([&](int j) {
            const int i = weight_value(j);
            distance[j] = normalized_of(centre, rstd_of, numbers[j], ky, kx, j);
            found[j] = dz_of(found[j], distance[j], weighed.by[set][i] * half, weighed.offset[set][i] * half,
                             weighed.p[set][i], more, j, [&](R z) { on_slope(j, z); });
        });
    }
    /* dz of a vector for the results. */
    __device__ __forceinline__ void receive_dz(const requested_backward &given, int ky, int kx, R (&to)[W]) const
    {
        R distance[W];
        if constexpr (!keeps_dz)
            find_dz(given, ky, kx, distance, to, [](int, R) {});
        else
            each<W>([&](int j) { to[j] = dz[keeps_dz ? ky : 0][keeps_dz ? kx : 0][j]; });
    }
    template <int = 0>
    __device__ __forceinline__ void find_sums(const place &at, int64_t sample, const requested_backward &given)
    {
        constexpr bool sums = gradients != NORMFUSE_GRADIENTS_NONE || (has_statistics && writes_out);
        /* Its own: what is written through `this` would be a branch for each element. */
        struct {
            R plain[weight_sets][weight_values], centred[weight_sets][weight_values];
            R of_slope[weight_sets][weight_values], of_column[2][tiled ? KX : 1][tiled ? W : 1];
        } all = {};
        at.each_vector(sample, [&](int ky, int kx, int first_column, int64_t) {
            const int set = weight_set(ky, kx);
            const bool has = at.has(ky, first_column);
            R distance[W], g[W];
            find_dz(given, ky, kx, distance, g, [&](int j, R z) {
                const bool counts = has && at.has_element(first_column, j);
                if constexpr (sums_slopes)
                    all.of_slope[set][weight_value(j)] += z > R(0) || !counts ? R(0) : g[j] * z;
            });
            each<W>([&](int j) {
                const int i = weight_value(j);
                if constexpr (keeps_dz)
                    dz[keeps_dz ? ky : 0][keeps_dz ? kx : 0][j] = g[j];
                if constexpr (sums) {
                    const bool counts = exact && aligned ? true : has && at.has_element(first_column, j);
                    all.plain[set][i] += counts ? g[j] : R(0);
                    all.centred[set][i] = counts ? fma(g[j], distance[j], all.centred[set][i]) : all.centred[set][i];
                    if constexpr (tiled) {
                        auto &to = all.of_column;
                        const R by_weight = counts ? weighed.by[set][i] * g[j] : R(0);
                        to[0][kx][j] += by_weight;
                        to[1][kx][j] = counts ? fma(by_weight, distance[j], to[1][kx][j]) : to[1][kx][j];
                    }
                }
            });
        });
        /* About the mean itself. */
        if constexpr (sums && !mean_square && !tiled)
            each<weight_sets>([&](int set) {
                each<weight_values>([&](int i) {
                    all.centred[set][i] = fma(-centre.left(set, i), all.plain[set][i], all.centred[set][i]);
                });
            });
        each<weight_sets>([&](int set) {
            each<weight_values>([&](int i) {
                plain[set][i] = all.plain[set][i];
                centred[set][i] = all.centred[set][i];
                of_slope[set][i] = all.of_slope[set][i];
            });
        });
        if constexpr (tiled)
            each<2>([&](int k) {
                each<KX>([&](int kx) { each<W>([&](int j) { of_column[k][kx][j] = all.of_column[k][kx][j]; }); });
            });
    }
    /* To the sums of channels. */
    template <int = 0>
    __device__ __forceinline__ void add_to_channels(const place &at, const exchange &by, int64_t sample, bool wanted,
                                                    channel_sums &all) const
    {
        channel_sums found;
        const auto rstd_for = [&](int set, int i) {
            if constexpr (tiled || gradients == NORMFUSE_GRADIENTS_OF_SAMPLES ||
                          gradients == NORMFUSE_GRADIENTS_OF_CHANNELS)
                return R(1); /* tiled: they are; else the kernel that joins them multiplies by it */
            else if constexpr (statistics == NORMFUSE_STATISTICS_GROUP)
                return rstd_of[0][0];
            else if constexpr (statistics == NORMFUSE_STATISTICS_RUNNING)
                return rstd_of[many_rstds ? set : 0][many_rstds ? i : 0];
            else
                return R(1);
        };
        each<weight_sets>([&](int set) {
            each<weight_values>([&](int i) {
                const R normalized = centred[set][i] * rstd_for(set, i);
                if constexpr (gradients == NORMFUSE_GRADIENTS_OF_SAMPLES) {
                    found.plain[set][i] = plain[set][i];
                    found.normalized[set][i] = normalized;
                    found.of_slope[set][i] = of_slope[set][i];
                } else {
                    if constexpr (sums_dz)
                        all.plain[set][i] += wanted ? plain[set][i] : R(0);
                    all.normalized[set][i] += wanted ? normalized : R(0);
                    all.of_slope[set][i] += wanted ? of_slope[set][i] : R(0);
                }
            });
        });
        if constexpr (gradients == NORMFUSE_GRADIENTS_OF_SAMPLES)
            finish_channels(at, by.dynamic, sample, wanted, found);
    }
    template <int = 0>
    __device__ __forceinline__ void join_columns(const place &at, const exchange &by, int64_t sample)
    {
        const normfuse_single_arguments &a = at.a;
        const R portion = share_of_values(a);
        const column_memory memory(by.dynamic);
        each<KX>([&](int kx) {
            const auto leave = [&](int number, const auto &sums) {
                store_numbers(&memory.of_thread(number, at.ty, at.column(kx, 0)), sums);
            };
            if constexpr (!tiled) {
                leave(0, plain[tiled ? 0 : kx]);
                leave(1, centred[tiled ? 0 : kx]);
            } else {
                if constexpr (!mean_square)
                    leave(0, of_column[0][tiled ? kx : 0]);
                leave(1, of_column[1][tiled ? kx : 0]);
            }
        });
        __syncthreads();
        const auto store_totals = [&](int column, bool stores, const R(&total)[2]) {
            if (stores)
                each<2>([&](int i) { memory.total(i, column) = total[i]; });
        };
        each_column([&](int column, int lane, bool exists) {
            R total[2] = {R(0), R(0)};
            for (int ty = lane; ty < down; ty += column_lanes)
                each<2>([&](int i) { total[i] += mean_square && i == 0 ? R(0) : memory.of_thread(i, ty, column); });
            sum_lanes<2, column_lanes>(total);
            store_totals(column, lane == 0 && exists, total);
        });
        if constexpr (shared_by_cluster) {
            __syncthreads();
            exchange_columns(at, by, memory);
            each_column([&](int column, int lane, bool exists) {
                R total[2] = {R(0), R(0)};
                for (int part = 0; part < a.parts; part++)
                    each<2>([&](int i) { total[i] += memory.of_blocks[part * block_columns + column].numbers[i]; });
                store_totals(column, lane == 0 && exists, total);
            });
        }
        __syncthreads();
        each<KX>([&](int kx) {
            R total[2][W];
            each<2>([&](int i) { load_numbers(total[i], &memory.total(i, at.column(kx, 0))); });
            each<W>([&](int j) {
                if constexpr (tiled) { /* of dz weighed and multiplied by the distance times rstd */
                    const R r = rstd_of[tiled ? kx : 0][tiled ? j : 0];
                    by_x[kx][j] = eps_of_norm && r >= (R)a.call.clamped_rstd ? R(0) : -total[1][j] * portion * r;
                    level[kx][j] = mean_square ? R(0) : -total[0][j] * portion * r;
                    return;
                }
                if constexpr (writes_columns) {
                    plain[kx][j] = total[0][j];
                    centred[kx][j] = total[1][j];
                }
                const int set = tiled ? 0 : kx, i = tiled ? 0 : j;
                by_x[kx][j] = -weighed.by[set][i] * (total[1][j] * rstd_of[set][i]) * (rstd_of[set][i] * portion);
                level[kx][j] = -weighed.by[set][i] * total[0][j] * portion - by_x[kx][j] * centre.left(set, i);
            });
        });
        if constexpr (writes_columns)
            if (at.ty == 0 && at.rank == 0)
                each<KX>([&](int kx) {
                    each<W>([&](int j) {
                        if (exact || at.column(kx, 0) + j < at.columns)
                            emit(at, sample, at.channel(kx) + j, (double)plain[kx][j],
                                 (double)(gradients == NORMFUSE_GRADIENTS_OF_SAMPLES ? centred[kx][j]
                                                                                     : centred[kx][j] * rstd_of[kx][j]),
                                 0.0);
                    });
                });
    }
    template <int = 0> __device__ __forceinline__ void join_group(const place &at, const exchange &by)
    {
        const normfuse_single_arguments &a = at.a;
        const R portion = share_of_values(a);
        constexpr bool weighs_first = parameters != NORMFUSE_PARAMETERS_OF_GROUP;
        R total[2] = {R(0), R(0)};
        each<weight_sets>([&](int set) {
            each<weight_values>([&](int i) {
                total[0] = weighs_first ? fma(weighed.by[set][i], plain[set][i], total[0]) : plain[set][i];
                total[1] = weighs_first ? fma(weighed.by[set][i], centred[set][i], total[1]) : centred[set][i];
            });
        });
        if constexpr (mean_square && !shared_by_cluster) { /* the level is 0 */
            R of_squares[1] = {total[1]};
            sum_threads<1, lanes>(of_squares, by.shared.of_warps[walks ? by.turn % 2 : 0]);
            total[1] = of_squares[0];
        } else {
            sum_threads<2, lanes>(total, by.shared.of_warps[walks ? by.turn % 2 : 0]);
        }
        if constexpr (shared_by_cluster) {
            message<2> *const entries = reinterpret_cast<message<2> *>(by.dynamic);
            exchange_messages(by.mailbox, entries, at.rank, a.parts, {{total[0], total[1]}});
            const int lane = (int)threadIdx.x % 32;
            each<2>([&](int i) { total[i] = lane < a.parts ? entries[lane].numbers[i] : R(0); });
            sum_lanes<2, 32>(total);
        }
        if constexpr (!weighs_first) {
            plain[0][0] = total[0];
            centred[0][0] = total[1];
            total[0] *= weighed.by[0][0];
            total[1] *= weighed.by[0][0];
        }
        by_x[0][0] = -(total[1] * rstd_of[0][0]) * (rstd_of[0][0] * portion);
        if constexpr (eps_of_norm) { /* a norm that was clamped does not depend on u */
            const R most = (R)a.call.clamped_rstd;
            by_x[0][0] = rstd_of[0][0] >= most ? R(0) : by_x[0][0];
        }
        level[0][0] = mean_square
                          ? R(0)
                          : -total[0] * portion - (centre_has_bias ? R(0) : by_x[0][0] * centre.rest[0][0]);
    }
    template <int = 0> __device__ __forceinline__ void join_totals(const place &at, const exchange &by, int64_t sample)
    {
        if constexpr (of_columns) {
            join_columns(at, by, sample);
        } else if constexpr (statistics == NORMFUSE_STATISTICS_GROUP) {
            join_group(at, by);
        } else if constexpr (gradients != NORMFUSE_GRADIENTS_NONE && parameters == NORMFUSE_PARAMETERS_OF_GROUP) {
            R total[2] = {plain[0][0], centred[0][0]};
            sum_threads<2, lanes>(total, by.shared.of_warps[walks ? by.turn % 2 : 0]);
            plain[0][0] = total[0];
            centred[0][0] = total[1];
        }
        if constexpr (sums_slopes && parameters == NORMFUSE_PARAMETERS_OF_GROUP) {
            R total[1] = {of_slope[0][0]};
            sum_threads<1, lanes>(total, by.shared.of_warps[2]);
            of_slope[0][0] = total[0];
        }
    }
    template <int = 0>
    __device__ __forceinline__ void write(const place &at, int64_t sample, bool wanted,
                                          const requested_backward &given) const
    {
        at.store(at.a.out, sample, wanted, [&](int ky, int kx) {
            R numbers[W], more[W], g[W];
            unpack<type, W>(given.of.x[ky][kx], numbers);
            receive_dz(given, ky, kx, g);
            if constexpr (du)
                unpack<type, W>(given.of_du[ky][kx], more);
            const int set = weight_set(ky, kx);
            each<W>([&](int j) {
                const int i = weight_value(j);
                const int s = of_columns ? kx : 0, v = of_columns ? j : 0;
                R value;
                if constexpr (has_statistics)
                    value = fma(weighed.by[set][i], tiled ? g[j] * rstd_of[tiled ? kx : 0][tiled ? j : 0] : g[j],
                                fma(by_x[s][v], normalized_of(centre, rstd_of, numbers[j], ky, kx, j), level[s][v]));
                else
                    value = weighed.by[set][i] * g[j];
                if constexpr (du)
                    value += more[j];
                numbers[j] = value;
            });
            return pack<type, W>(numbers);
        });
    }
};

template <int = 0>
__device__ __forceinline__ void work_on(const place &at, const exchange &by, int64_t sample, bool wanted,
                                        requested_backward &given, const requested_weights &weights, channel_sums &all)
{
    const normfuse_single_arguments &a = at.a;
    given.of.add(weights);
    if constexpr (!in_slots)
        given.request_late(at, sample, wanted);
    sample_backward found;
    found.find_centres(a, given, weights);
    found.find_sums(at, sample, given);
    if constexpr (dpost_add)
        at.template store<y_type>(a.call.dpost_add, sample, wanted, [&](int ky, int kx) {
            R dz[W];
            found.receive_dz(given, ky, kx, dz);
            return pack<y_type, W>(dz);
        });
    /* Before the threads wait for their totals, where these are not what is summed. */
    constexpr bool sums_channels = gradients != NORMFUSE_GRADIENTS_NONE && !writes_columns;
    constexpr bool sums_early =
        walks && parameters != NORMFUSE_PARAMETERS_OF_GROUP && gradients != NORMFUSE_GRADIENTS_OF_SAMPLES;
    if constexpr (sums_early && sums_channels)
        found.add_to_channels(at, by, sample, wanted, all);
    found.join_totals(at, by, sample);
    if constexpr (!sums_early && sums_channels)
        found.add_to_channels(at, by, sample, wanted, all);
    if constexpr (writes_out)
        found.write(at, sample, wanted, given);
}

} // namespace

/* ---- the kernel --------------------------------------------------------------------------------------------------- */

extern "C" __global__ void __launch_bounds__(threads, resident)
    NORMFUSE_KERNEL(const __grid_constant__ normfuse_single_arguments a)
{
    NORMFUSE_DYNAMIC_SHARED(dynamic);
    __shared__ shared_memory shared;
    __shared__ uint64_t mailbox;
    follow_kernel();
    place at(a);
    at.turn_to(at.walker);
    exchange by = {shared, reinterpret_cast<char *>(dynamic), mailbox, 0};
    if constexpr (shared_by_cluster) {
#if __CUDA_ARCH__ >= 900
        open_mailbox(mailbox, a.parts * (of_columns ? at.columns : 1) * (int)sizeof(message<2>));
        announce_mailboxes();
#endif
    }
    const int at_once = beside > 1 ? 1 << a.sample_bits : 1;
    requested_weights weights;
    channel_sums all;
    all.clear();
    if constexpr (!per_sample)
        weights.request_of_channels(at, 0);
    if constexpr (of_samples && positions)
        weights.request_of_sample(at, at.outer, true);
    int sample = at.walker * at_once + at.of_sample;
    using requested_tensors = choose<backward != 0, requested_backward, requested_sample>::type;
    requested_tensors given, next;
    char *memory = by.dynamic;
    if constexpr (in_slots) {
        given.take(memory);
        next.take(memory);
        by.dynamic = memory;
    }
    const auto request = [&](requested_tensors &to, int of_sample, bool wanted) {
        to.request(at, of_sample, wanted);
        if constexpr (in_slots) {
            to.request_late(at, of_sample, wanted);
            commit_copies();
        }
    };
    request(given, sample, (exact && !walks) || sample < a.samples);
    if constexpr (!walks) {
        const bool wanted = exact || sample < a.samples;
        if constexpr (per_sample)
            weights.request_of_channels(at, wanted ? sample : 0);
        if constexpr (of_samples && !positions)
            weights.request_of_sample(at, wanted ? sample : 0, wanted);
        work_on(at, by, sample, wanted, given, weights, all);
    } else {
        /* The next sample's values are on their way while this one's are worked on. */
#pragma unroll 1
        for (int first = at.walker * at_once; first < a.samples; first += a.walkers * at_once) {
            const bool wanted = sample < a.samples;
            const int following = sample + a.walkers * at_once;
            at.turn_to(following);
            request(next, following, following < a.samples);
            at.turn_to(sample);
            if constexpr (in_slots)
                await_older_copies<1>();
            if constexpr (of_samples && !positions)
                weights.request_of_sample(at, wanted ? sample : 0, wanted);
            work_on(at, by, sample, wanted, given, weights, all);
            const requested_tensors done = given;
            given = next;
            next = done;
            sample = following;
            by.turn++;
        }
    }
    if constexpr (backward && gradients != NORMFUSE_GRADIENTS_NONE && gradients != NORMFUSE_GRADIENTS_OF_SAMPLES &&
                  !writes_columns)
        finish_channels(at, by.dynamic, 0, true, all);
}
