/* SPDX-License-Identifier: MIT
 *
 * held.cuh - the body `held`: a norm group is held in the shared memory of a block, of a cluster, or of all blocks of the
 * grid, and read once. Copies fill the slots of each thread; what is added passes through others, some vectors ahead.
 * walk.cuh says what a slab is: here one norm group, or some channels of a sample or of all samples.
 *
 *   reduce     held values u, or x and dy, to sums of the thread, then of the block
 *   exchange   sums of blocks to those of norm groups
 *   apply      held values to results
 *
 * Blocks of the grid may have several slabs in turn (`walks`): where one has written a result, a vector of its next slab
 * follows. */
#include "walk.cuh"

namespace {

constexpr int kept_tensors = 1 + backward;
/* dz takes the place of dy where that is the same numbers. */
constexpr bool keeps_dz = backward && activation != IDENTITY &&
                          (bytes_of(type) >= 4 || activation == RELU || activation == RELU6);
constexpr bool finds_dz_again = backward && activation != IDENTITY && !keeps_dz;
constexpr bool in_cluster = exchanges == NORMFUSE_EXCHANGE_IN_CLUSTER, in_grid = exchanges == NORMFUSE_EXCHANGE_IN_GRID;
constexpr int numbers_sent = backward ? 2 : 4; /* sums; or distance of the mean from the slab's pivot, squares, count */
constexpr bool has_groups = by_rows || statistics_of_groups; /* of several channels, whose weights differ */
constexpr bool sends_weighed = backward && has_groups;

/* ---- tensors ------------------------------------------------------------------------------------------------------ */

/* Tensors that pass beside what is kept, in a walk that sums or in one that writes. */
template <bool writes>
using passes = passing<false, false, pre_add && !writes,
                       backward ? reads_post && (!writes || finds_dz_again) : post_add && writes, du && writes>;

struct memory_of_thread {
    const place &at;
    raw_vector *const kept, *const ring;

    __device__ __forceinline__ memory_of_thread(const place &at, char *dynamic)
        : at(at), kept(reinterpret_cast<raw_vector *>(dynamic) + threadIdx.x),
          ring(reinterpret_cast<raw_vector *>(dynamic + at.a.ring_at) + threadIdx.x)
    {
    }
    __device__ __forceinline__ raw_vector &slot(int vector_of_thread, int tensor) const
    {
        return kept[(vector_of_thread * kept_tensors + tensor) * threads];
    }
    __device__ __forceinline__ void request_kept(const cursor &of, int vector_of_thread) const
    {
        const normfuse_stream_arguments &a = at.a;
        const int64_t bytes = of.element * bytes_of(type);
        const bool wanted = of.has && vector_of_thread < a.kept;
        copy_ahead(&slot(vector_of_thread, 0), a.x + bytes, wanted);
        if constexpr (backward)
            copy_ahead(&slot(vector_of_thread, 1), a.dy + bytes, wanted);
    }
    template <bool writes> __device__ __forceinline__ pipeline<passes<writes>> passing_tensors() const
    {
        return {at, ring};
    }
    /* The first copies of a walk; `keeps`: those of what is kept are not requested yet. */
    template <bool writes> __device__ __forceinline__ void begin(cursor &following, bool keeps) const
    {
#pragma unroll 1
        for (int turn = 0; turn < (!keeps && passes<writes>::count == 0 ? 0 : D); turn++) {
            if (keeps)
                request_kept(following, turn);
            passing_tensors<writes>().request(following, turn);
            commit_copies();
            following.next();
        }
    }
    __device__ __forceinline__ vectors kept_vectors(int vector_of_thread) const
    {
        vectors of = {};
        of.x = slot(vector_of_thread, 0);
        if constexpr (backward)
            of.dy = slot(vector_of_thread, 1);
        return of;
    }
    /* The walk that sums: work(cursor, vectors, vector of the thread); between(row that follows) behind each row, by whole
     * warps in step. */
    template <typename Work, typename Between>
    __device__ __forceinline__ void walk_held(cursor &following, bool keeps, Work work, Between between) const
    {
        constexpr bool some_pass = passes<false>::count > 0;
        cursor now(at);
        int turn = 0, vector_of_thread = 0;
        if (walks && !keeps)
            await_older_copies<0>();
#pragma unroll 1
        while (!now.is_over()) {
            if (some_pass || !walks || keeps)
                await_older_copies<D - 1>();
            vectors of = kept_vectors(vector_of_thread);
            passing_tensors<false>().receive(of, turn);
            if (now.has)
                work(now, of, vector_of_thread);
            if (some_pass || !walks || keeps) {
                if (!walks || keeps)
                    request_kept(following, vector_of_thread + D);
                passing_tensors<false>().request(following, turn);
                commit_copies();
                following.next();
                turn = turn + 1 == D ? 0 : turn + 1;
            }
            now.next();
            vector_of_thread++;
            if (now.step == 0)
                between(now.row);
        }
    }
    /* The walk that writes: work(cursor, vectors). The slab that is `next` takes the place of what is read. */
    template <typename Work>
    __device__ __forceinline__ void walk_results(cursor &following, cursor &next, Work work) const
    {
        constexpr bool some_pass = passes<true>::count > 0;
        cursor now(at);
        int turn = 0, vector_of_thread = 0;
#pragma unroll 1
        while (!now.is_over()) {
            if constexpr (some_pass)
                await_older_copies<D - 1>();
            vectors of = kept_vectors(vector_of_thread);
            passing_tensors<true>().receive(of, turn);
            if (now.has)
                work(now, of);
            if constexpr (some_pass) {
                passing_tensors<true>().request(following, turn);
                following.next();
                turn = turn + 1 == D ? 0 : turn + 1;
            }
            if constexpr (walks) {
                request_kept(next, vector_of_thread);
                next.next();
            }
            if constexpr (some_pass || walks)
                commit_copies();
            now.next();
            vector_of_thread++;
        }
    }
};

/* ---- rows that have weights of their own -------------------------------------------------------------------------- */

/* Entries of each row of the part, in shared memory: its values' weight, and its sums. */
struct row_of_weights {
    R near, rest, by, offset, p, bias;
};
constexpr int row_entries = across < 32 ? 1 : across / 32; /* threads that leave sums of a row */
struct sums_of_row {
    R plain, centred, of_slope;
};

/* A row of the part in the place of the thread's. */
struct place_of_row {
    const normfuse_stream_arguments &a;
    int c;
    bool exists;

    __device__ __forceinline__ int channel(int, int) const
    {
        return c;
    }
    __device__ __forceinline__ bool has_weights(int) const
    {
        return exists;
    }
};

/* ---- shared memory ------------------------------------------------------------------------------------------------- */

/* Behind what is kept and what passes; held.c has the same sum. */
struct sums_of_block {
    row_of_weights *rows;    /* [rows of the part] */
    sums_of_row *of_rows;    /* [rows of the part][row_entries] */
    message<numbers_sent> *own;   /* [norm groups] */
    message<numbers_sent> *of_all; /* in a cluster: [part][norm group] */
    message<4> *found;       /* [norm groups]: near and rest of the pivot; then of the mean, and rstd; or sums */
    char *of_columns;        /* join_columns */

    __device__ __forceinline__ sums_of_block(const normfuse_stream_arguments &a, char *dynamic)
    {
        const int rows_of_part = by_rows ? a.part_rows : 0;
        own = reinterpret_cast<message<numbers_sent> *>(dynamic + a.sums_at);
        of_all = own + a.slab_sets;
        found = reinterpret_cast<message<4> *>(of_all + (in_cluster ? a.parts * a.slab_sets : 0));
        rows = reinterpret_cast<row_of_weights *>(found + a.slab_sets);
        of_rows = reinterpret_cast<sums_of_row *>(rows + rows_of_part);
        of_columns = reinterpret_cast<char *>(rows);
    }
};

struct meeting {
    const place &at;
    const sums_of_block &of;
    uint64_t &mailbox;
    int turn;

    /* The sums of every block of the slab, in `own`, are there for all of them. */
    __device__ __forceinline__ void exchange() const
    {
        const normfuse_stream_arguments &a = at.a;
        constexpr int words = (int)sizeof(message<numbers_sent>) / 8;
        __syncthreads();
        if constexpr (in_cluster) {
#if __CUDA_ARCH__ >= 900
            await_open_mailboxes();
#pragma unroll 1
            for (int i = (int)threadIdx.x; i < a.slab_sets * words * a.parts; i += threads) {
                const int to = i / (a.slab_sets * words), word = i - to * (a.slab_sets * words);
                send(mailbox, reinterpret_cast<uint64_t *>(in_shared(at.part)) + word, to,
                     reinterpret_cast<const uint64_t *>(of.own)[word]);
            }
            await_mailbox(mailbox, 0);
#endif
        } else if constexpr (in_grid) {
            uint32_t *const barrier = a.barriers + slab_of_grid() * 16;
            uint32_t before = 0;
            if (threadIdx.x == 0)
                before = load_relaxed(barrier);
            message<numbers_sent> *const to = in_memory(at.part);
            for (int i = (int)threadIdx.x; i < a.slab_sets * words; i += threads)
                store_past_l1(reinterpret_cast<uint64_t *>(to) + i, reinterpret_cast<const uint64_t *>(of.own)[i]);
            __syncthreads();
            if (threadIdx.x == 0) {
                add_release(barrier, at.part == 0 ? 0x80000000u - (uint32_t)(a.parts - 1) : 1u);
                await_flip(barrier, before);
            }
            __syncthreads();
        }
    }
    __device__ __forceinline__ message<numbers_sent> *in_shared(int part) const
    {
        return of.of_all + part * at.a.slab_sets;
    }
    __device__ __forceinline__ int slab_of_grid() const
    {
        return divide((int)blockIdx.x, at.a.by_parts);
    }
    __device__ __forceinline__ message<numbers_sent> *in_memory(int part) const
    {
        const normfuse_stream_arguments &a = at.a;
        return reinterpret_cast<message<numbers_sent> *>(a.messages) +
               ((turn % 2 * (int64_t)(gridDim.x / (unsigned)a.parts) + slab_of_grid()) * a.parts + part) * a.slab_sets;
    }
    __device__ __forceinline__ message<numbers_sent> found_by(int part, int set) const
    {
        if constexpr (in_cluster)
            return in_shared(part)[set];
        if constexpr (in_grid) {
            constexpr int words = (int)sizeof(message<numbers_sent>) / 8;
            union {
                message<numbers_sent> of;
                uint64_t bits[words];
            } read;
            each<words>([&](int i) {
                read.bits[i] = load_past_l1(reinterpret_cast<const uint64_t *>(in_memory(part) + set) + i);
            });
            return read.of;
        }
        return of.own[set];
    }
    /* work(norm group of the slab, lane, exists). */
    static constexpr int set_lanes = by_columns ? 8 : 32;
    template <typename Work> __device__ __forceinline__ void each_set(Work work) const
    {
        each_item<threads, set_lanes>(at.a.slab_sets, work);
    }
};

/* The norm group of a column of the block, of those that the slab has. */
__device__ __forceinline__ int set_of_column(const place &at, int column)
{
    const normfuse_stream_arguments &a = at.a;
    if constexpr (!statistics_of_groups)
        return folded ? at.channel_of_column(at.wide * block_columns + column) : column;
    return folded ? at.group_of(at.channel_of_column(at.wide * block_columns + column)) : divide(column, a.by_group);
}
/* The first channel of such a norm group. */
__device__ __forceinline__ int channel_of_set(const place &at, int set)
{
    if constexpr (!by_columns)
        return at.slab * at.a.slab_channels;
    const int first = folded ? 0 : at.wide * block_columns;
    return first + set * (statistics_of_groups ? (int)at.a.by_group.divisor : 1);
}
/* work(piece of the block) for every piece of a norm group that the lane has. */
template <typename Work>
__device__ __forceinline__ void each_piece_of_set(const place &at, int set, int lane, int lanes_of_set, Work work)
{
    const normfuse_stream_arguments &a = at.a;
    const int channels = statistics_of_groups ? (int)a.by_group.divisor : 1;
#pragma unroll 1
    for (int copy = 0; copy < a.joined_rows; copy++)
#pragma unroll 1
        for (int i = lane; i < channels / piece; i += lanes_of_set)
            work((copy * a.call.channels + set * channels) / piece + i);
}

/* ---- forward ------------------------------------------------------------------------------------------------------- */

/* Every thread has the weights of its columns, of the slab, or of the rows that it comes to. */
struct weights_of_thread {
    coefficients weighed;
    centres centre;

    __device__ __forceinline__ void take(const row_of_weights &row)
    {
        centre.near[0][0] = row.near;
        centre.rest[0][0] = row.rest;
        weighed.by[0][0] = row.by;
        weighed.offset[0][0] = row.offset;
        weighed.p[0][0] = row.p;
    }
};

/* `knows`: statistics are found. Else near and rest are of the pivot. */
template <bool knows>
__device__ __forceinline__ void weigh_rows(const place &at, const sums_of_block &of, double mean_of, R rstd_of)
{
    const normfuse_stream_arguments &a = at.a;
    const int first = at.part * a.next_rows, count = min(a.part_rows, a.rows - first);
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < count; i += threads) {
        const place_of_row row = {a, at.slab * a.slab_channels + first + i, true};
        requested_weights weights;
        weights.request_of_channels(row, at.sample);
        weights.request_of_sample(row, at.sample, true);
        R of_bias[weight_values];
        weights.of_pre_bias[0].receive(of_bias, R(0));
        weights_of_thread own;
        own.centre.set(0, 0, mean_of, centre_has_bias ? of_bias[0] : R(0));
        row_of_weights &to = of.rows[i];
        to.near = own.centre.near[0][0];
        to.rest = own.centre.rest[0][0];
        to.bias = of_bias[0];
        if constexpr (knows) {
            rstds by;
            by[0][0] = rstd_of;
            weigh(weights, own.centre, by, a.call, own.weighed);
            own.weighed.halve();
            to.by = own.weighed.by[0][0];
            to.offset = own.weighed.offset[0][0];
            to.p = own.weighed.p[0][0];
        }
    }
    __syncthreads();
}

/* `passed`: the walk that writes, whose first copies are requested here. */
template <int = 0>
__device__ __forceinline__ void reduce_forward(const place &at, const memory_of_thread &tensors, cursor &following,
                                               const sums_of_block &of, const meeting &by,
                                               const requested_weights &weights, cursor &passed)
{
    const normfuse_stream_arguments &a = at.a;
    R of_bias[weight_values];
    if constexpr (!by_rows)
        weights.of_pre_bias[0].receive(of_bias, R(0));
    const pivots pivot(at, of_bias);
    if constexpr (by_rows && pre_bias != 0)
        weigh_rows<false>(at, of, (double)pivot.of[0], R(1));
    const int first_row = at.part * a.next_rows;
    sums_of_u sums;
    tensors.walk_held(following, by.turn == 0, [&](const cursor &where, const vectors &read, int vector_of_thread) {
        R u[W], near[weight_values], rest[weight_values];
        each<weight_values>([&](int i) {
            near[i] = pivot.of[i];
            rest[i] = R(0);
        });
        if constexpr (by_rows && pre_bias != 0) {
            const row_of_weights &row = of.rows[where.row - first_row];
            of_bias[0] = row.bias;
            if constexpr (centre_has_bias) {
                near[0] = row.near;
                rest[0] = row.rest;
            }
        }
        unpack_u(read.x, read.before, of_bias, u);
        if constexpr (rounds_u)
            tensors.slot(vector_of_thread, 0) = pack<type, W>(u);
        sums.add(at, where.first_column, [&](int j) {
            const R distance = u[j] - near[weight_value(j)];
            return by_rows && centre_has_bias ? distance - rest[0] : distance;
        });
    }, [](int) {});
    tensors.begin<true>(passed, false);

    /* The block's sums of each norm group, about a pivot that all its blocks know, which stays in `found` until statistics
     * take its place. */
    const auto leave = [&](int set, double base, const message<4> &sums_of_set) {
        const R near = (R)base;
        of.own[set] = sums_of_set;
        of.found[set] = {{near, (R)(base - (double)near), R(0), R(0)}};
    };
    if constexpr (!by_columns) {
        const moments of_block = join_moments<threads>(sums);
        if (threadIdx.x == 0)
            leave(0, (double)pivot.of[0] + (centre_has_bias && !by_rows ? (double)of_bias[0] : 0.0),
                  {{of_block.mean, of_block.squares, of_block.count, R(0)}});
    } else {
        const joined_pieces joined = join_columns(at, of.of_columns, pivot, of_bias, sums);
        by.each_set([&](int set, int lane, bool exists) {
            const int channels = statistics_of_groups ? (int)a.by_group.divisor : 1;
            const message<2> row = joined.first_columns[set * channels / piece];
            const double base = (double)row.numbers[0] + (double)row.numbers[1];
            double all[2] = {0.0, 0.0};
            each_piece_of_set(at, set, lane, meeting::set_lanes, [&](int of_block) {
                const column_sums &from = joined.sums[of_block];
                all[0] += from.of[0];
                all[1] += from.of[0] > 0.0 ? from.of[0] * (from.of[1] - base) : 0.0;
            });
            sum_lanes<2, meeting::set_lanes>(all);
            const double mean_of = all[0] > 0.0 ? (double)((R)all[1] / (R)all[0]) : 0.0;
            double squares[1] = {0.0};
            each_piece_of_set(at, set, lane, meeting::set_lanes, [&](int of_block) {
                const column_sums &from = joined.sums[of_block];
                const double apart = from.of[1] - base - mean_of;
                squares[0] += from.of[0] > 0.0 ? from.of[2] + from.of[0] * apart * apart : 0.0;
            });
            sum_lanes<1, meeting::set_lanes>(squares);
            if (exists && lane == 0)
                leave(set, base, {{(R)mean_of, (R)squares[0], (R)all[0], R(0)}});
        });
    }
}

template <int = 0>
__device__ __forceinline__ void apply_forward(const place &at, const memory_of_thread &tensors, cursor &passed,
                                              const sums_of_block &of, const meeting &by,
                                              const requested_weights &weights, cursor &next)
{
    const normfuse_stream_arguments &a = at.a;
    const int first_row = at.part * a.next_rows;
    R of_bias[weight_values];
    if constexpr (!by_rows)
        weights.of_pre_bias[0].receive(of_bias, R(0));
    by.each_set([&](int set, int lane, bool exists) {
        const int c = channel_of_set(at, set);
        const bool stores = exists && lane == 0 && at.part == 0 && at.slab_exists && c < a.call.channels;
        running_statistics running;
        running.request(a.call, c, stores);
        R all[2] = {R(0), R(0)};
#pragma unroll 1
        for (int part = lane; part < a.parts; part += meeting::set_lanes) {
            const message<numbers_sent> from = by.found_by(part, set);
            all[0] += from.numbers[2];
            all[1] = fma(from.numbers[2], from.numbers[0], all[1]);
        }
        sum_lanes<2, meeting::set_lanes>(all);
        const R distance = all[1] / all[0];
        R squares[1] = {R(0)};
#pragma unroll 1
        for (int part = lane; part < a.parts; part += meeting::set_lanes) {
            const message<numbers_sent> from = by.found_by(part, set);
            const R apart = from.numbers[0] - distance;
            squares[0] += fma(from.numbers[2] * apart, apart, from.numbers[1]);
        }
        sum_lanes<1, meeting::set_lanes>(squares);
        const double mean_of =
            (double)of.found[set].numbers[0] + (double)of.found[set].numbers[1] + (double)distance;
        const R variance = squares[0] / all[0];
        const R rstd_of = inverse_root(variance + (sizeof(R) == 8 ? (R)a.call.eps_of_double : (R)a.call.eps));
        __syncwarp();
        if (exists && lane == 0) {
            const R near = (R)mean_of;
            of.found[set] = {{near, (R)(mean_of - (double)near), rstd_of, R(0)}};
            if (stores)
                store_statistics(a.call, a.sets_are_of_samples ? at.sample : 0, at.group_of(c), c, mean_of, variance,
                                 rstd_of, running);
        }
    });
    __syncthreads();

    weights_of_thread own;
    const auto mean_and_rstd = [&](int set, R &rstd_of) {
        const message<4> from = of.found[set];
        rstd_of = from.numbers[2];
        return (double)from.numbers[0] + (double)from.numbers[1];
    };
    if constexpr (by_rows) {
        R rstd_of;
        const double mean_of = mean_and_rstd(0, rstd_of);
        weigh_rows<true>(at, of, mean_of, rstd_of);
    } else {
        rstds rstd_of;
        each<weight_values>([&](int i) {
            const int set = by_columns ? set_of_column(at, at.tx * W + i) : 0;
            own.centre.set(0, i, mean_and_rstd(by_columns && !at.exists ? 0 : set, rstd_of[0][i]),
                           centre_has_bias ? of_bias[i] : R(0));
        });
        weigh(weights, own.centre, rstd_of, a.call, own.weighed);
        own.weighed.halve();
    }
    tensors.walk_results(passed, next, [&](const cursor &where, const vectors &read) {
        R u[W], more[W];
        unpack<type, W>(read.x, u);
        if constexpr (by_rows)
            own.take(of.rows[where.row - first_row]);
        if constexpr (stores_u)
            store(where, a.call.u, u);
        if constexpr (post_add)
            unpack<type, W>(read.behind, more);
        each<W>([&](int j) {
            const int i = weight_value(j);
            const R z = z_of(own.centre.of(u[j], 0, 0, j), own.weighed.by[0][i], own.weighed.offset[0][i], more, j);
            u[j] = activate(z, own.weighed.p[0][i]);
        });
        store(where, a.out, u);
    });
}

/* ---- backward ------------------------------------------------------------------------------------------------------ */

/* Sums of a row that ends: of the threads that have some of it. */
__device__ __forceinline__ void leave_row(const place &at, const sums_of_block &of, int row, R left, sums_of_dz &all)
{
    R sums[3] = {all.plain[0], fma(-left, all.plain[0], all.centred[0]), sums_slopes ? all.of_slope[0] : R(0)};
    constexpr int lanes_of_row = across < 32 ? across : 32;
    sum_lanes<3, lanes_of_row>(sums);
    if (at.tx % lanes_of_row == 0 && row < at.row_end) {
        sums_of_row &to = of.of_rows[(row - at.part * at.a.next_rows) * row_entries + at.tx / lanes_of_row];
        to = {sums[0], sums[1], sums[2]};
    }
    all = sums_of_dz();
}

/* Results for later kernels, or the caller, from a channel's sums: dweight and dbias, or a pair. */
__device__ __forceinline__ void emit(const place &at, int c, double plain, double centred, double of_slope, R rstd_of)
{
    if constexpr (gradients == NORMFUSE_GRADIENTS_DIRECT) {
        if (at.part == 0) {
            store_gradient<dweight>(at.a.call.dweight, 0, c, centred * (double)rstd_of, at.a.call.accumulate);
            store_gradient<dbias>(at.a.call.dbias, 0, c, plain, at.a.call.accumulate);
        }
    } else if constexpr (gradients == NORMFUSE_GRADIENTS_OF_SAMPLES) {
        store_pair(at, c, 0, plain, centred, of_slope);
    }
}

/* A slab's facts that threads know before its sums. Rows with weights of their own: those are in shared memory. */
struct known_backward {
    weights_of_thread own;
    rstds rstd_of;
    R of_bias[weight_values];

    __device__ __forceinline__ known_backward(const place &at, const sums_of_block &of,
                                              const requested_weights &weights)
    {
        const normfuse_stream_arguments &a = at.a;
        constexpr int mean_values = by_columns ? W : 1;
        const int saved_sample = a.sets_are_of_samples ? at.sample : 0;
        requested<mean, mean_values, packed_statistics> of_mean;
        requested<rstd, mean_values, packed_statistics> of_rstd;
        const auto group = [&](int i) { return at.group_of(at.channel(0, i)); };
        of_mean.request(a.call.mean, saved_sample, group, at.exists);
        of_rstd.request(a.call.rstd, saved_sample, group, at.exists);
        double mean_of[mean_values];
        of_mean.receive(mean_of, 0.0);
        of_rstd.receive(rstd_of[0], R(1));
        if constexpr (by_rows) {
            weigh_rows<true>(at, of, mean_of[0], rstd_of[0][0]);
        } else {
            weights.of_pre_bias[0].receive(of_bias, R(0));
            each<weight_values>([&](int i) { own.centre.set(0, i, mean_of[i], centre_has_bias ? of_bias[i] : R(0)); });
            weigh(weights, own.centre, rstd_of, a.call, own.weighed);
            own.weighed.halve();
        }
    }
    /* dz of a vector, in the place of dy. */
    template <typename OnSlope>
    __device__ __forceinline__ void find_dz(const R (&u)[W], const vectors &read, R (&dz)[W], OnSlope on_slope) const
    {
        R more[W];
        if constexpr (reads_post)
            unpack<type, W>(read.behind, more);
        each<W>([&](int j) {
            const int i = weight_value(j);
            dz[j] = dz_of(dz[j], own.centre.of(u[j], 0, 0, j), own.weighed.by[0][i], own.weighed.offset[0][i],
                          own.weighed.p[0][i], more, j,
                          [&](R z) { on_slope(j, z > R(0) ? R(0) : dz[j] * z); });
        });
    }
};

/* The block's sums, to `own`, and what later kernels get of its channels. */
template <int = 0>
__device__ __forceinline__ void leave_rows(const place &at, const sums_of_block &of, const known_backward &known)
{
    const normfuse_stream_arguments &a = at.a;
    const int first_row = at.part * a.next_rows;
    __shared__ R of_warps[threads / 32 * 2];
    __syncthreads();
    R total[2] = {R(0), R(0)};
    const int rows_here = max(min(a.part_rows, a.rows - first_row), 0);
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < rows_here; i += threads) {
        double sums[3] = {0.0, 0.0, 0.0};
        each<row_entries>([&](int k) {
            const sums_of_row &from = of.of_rows[i * row_entries + k];
            sums[0] += (double)from.plain;
            sums[1] += (double)from.centred;
            sums[2] += (double)from.of_slope;
        });
        total[0] = fma(of.rows[i].by, (R)sums[0], total[0]);
        total[1] = fma(of.rows[i].by, (R)sums[1], total[1]);
        if (at.slab_exists)
            emit(at, at.slab * a.slab_channels + first_row + i, sums[0], sums[1], sums[2], known.rstd_of[0][0]);
    }
    sum_threads<2, threads>(total, of_warps);
    if (threadIdx.x == 0)
        of.own[0] = {{total[0] * (R(1) / half), total[1] * (R(1) / half)}};
}
template <int = 0>
__device__ __forceinline__ void leave_slab(const place &at, const sums_of_block &of, const known_backward &known,
                                           const sums_of_dz &all)
{
    const message<3> total = join_slab(all);
    if (threadIdx.x > 0)
        return;
    of.own[0] = {{total.numbers[0], total.numbers[1]}};
    if constexpr (gradients == NORMFUSE_GRADIENTS_OF_SAMPLES)
        if (at.slab_exists)
            emit(at, at.slab, (double)total.numbers[0], (double)total.numbers[1], (double)total.numbers[2],
                 known.rstd_of[0][0]);
}
template <int = 0>
__device__ __forceinline__ void leave_columns(const place &at, const sums_of_block &of, const meeting &by,
                                              const known_backward &known, const sums_of_dz &all)
{
    const normfuse_stream_arguments &a = at.a;
    column_sums *const columns = join_columns(at, of.of_columns, all);
    if constexpr (gradients == NORMFUSE_GRADIENTS_OF_SAMPLES)
        if (at.slab_exists)
            each_subgroup(at, 1, [&](int column, int c, int) {
                double sums[3] = {0.0, 0.0, 0.0};
                for (int k = 0; k < a.joined_rows; k++)
                    each<3>([&](int i) { sums[i] += columns[column + k * a.call.channels].of[i]; });
                emit(at, c, sums[0], sums[1], sums[2], R(1));
            });
    if constexpr (statistics_of_groups) {
        /* Weighed, in the place of the sums: a column's thread has its weights. */
        __syncthreads();
        if (at.ty == 0 && at.tx < across)
            each<W>([&](int j) {
                column_sums &to = columns[at.tx * W + j];
                const double weight_of = (double)known.own.weighed.by[0][j] * (1.0 / (double)half);
                to.of[0] *= at.exists ? weight_of : 0.0;
                to.of[1] *= at.exists ? weight_of : 0.0;
            });
        __syncthreads();
    }
    by.each_set([&](int set, int lane, bool exists) {
        double sums[2] = {0.0, 0.0};
        each_piece_of_set(at, set, lane, meeting::set_lanes, [&](int column) {
            each<2>([&](int i) { sums[i] += columns[column].of[i]; });
        });
        sum_lanes<2, meeting::set_lanes>(sums);
        if (exists && lane == 0)
            of.own[set] = {{(R)sums[0], (R)sums[1]}};
    });
}

template <int = 0>
__device__ __forceinline__ void reduce_backward(const place &at, const memory_of_thread &tensors, cursor &following,
                                                const sums_of_block &of, const meeting &by, known_backward &known,
                                                cursor &passed)
{
    const normfuse_stream_arguments &a = at.a;
    const int first_row = at.part * a.next_rows;
    weights_of_thread &own = known.own;
    sums_of_dz all;
    int row = at.first_row; /* whose sums `all` has */
    if constexpr (by_rows)
        if (row < at.row_end)
            own.take(of.rows[row - first_row]);
    tensors.walk_held(following, by.turn == 0, [&](const cursor &where, const vectors &read, int vector_of_thread) {
        R u[W], dz[W];
        if constexpr (by_rows && pre_bias != 0)
            known.of_bias[0] = of.rows[where.row - first_row].bias;
        unpack_u(read.x, read.before, known.of_bias, u);
        if constexpr (rounds_u)
            tensors.slot(vector_of_thread, 0) = pack<type, W>(u);
        unpack<type, W>(read.dy, dz);
        R of_slope[W];
        each<W>([&](int j) { of_slope[j] = R(0); });
        known.find_dz(u, read, dz, [&](int j, R value) { of_slope[j] = value; });
        if constexpr (keeps_dz)
            tensors.slot(vector_of_thread, 1) = pack<type, W>(dz);
        each<W>([&](int j) {
            const int i = weight_value(j);
            const bool counts = at.has_element(where.first_column, j);
            const R distance = own.centre.of(u[j], 0, 0, j);
            all.add(i, dz[j], distance, counts);
            if constexpr (sums_slopes)
                all.of_slope[i] += counts ? of_slope[j] : R(0);
        });
    }, [&](int now) {
        /* Between rows, whole warps in step. */
        if constexpr (by_rows) {
            leave_row(at, of, row, own.centre.left(0, 0), all);
            row = now;
            if (row < at.row_end)
                own.take(of.rows[row - first_row]);
        }
    });
    tensors.begin<true>(passed, false);

    if constexpr (!by_rows)
        all.move_to_mean(own.centre);
    if constexpr (by_rows)
        leave_rows(at, of, known);
    else if constexpr (by_columns)
        leave_columns(at, of, by, known, all);
    else
        leave_slab(at, of, known, all);
}

template <int = 0>
__device__ __forceinline__ void apply_backward(const place &at, const memory_of_thread &tensors, cursor &passed,
                                               const sums_of_block &of, const meeting &by, known_backward &known,
                                               cursor &next)
{
    const normfuse_stream_arguments &a = at.a;
    const int first_row = at.part * a.next_rows;
    weights_of_thread &own = known.own;
    const rstds &rstd_of = known.rstd_of;
    by.each_set([&](int set, int lane, bool exists) {
        R sums[2] = {R(0), R(0)};
#pragma unroll 1
        for (int part = lane; part < a.parts; part += meeting::set_lanes) {
            const message<numbers_sent> from = by.found_by(part, set);
            each<2>([&](int i) { sums[i] += from.numbers[i]; });
        }
        sum_lanes<2, meeting::set_lanes>(sums);
        if (exists && lane == 0)
            of.found[set] = {{sums[0], sums[1], R(0), R(0)}};
    });
    __syncthreads();

    /* dx = by dz + by_x (u - mean) + level */
    const R portion = sizeof(R) == 8 ? R(1.0 / a.set_values) : (R)a.call.share;
    R by_x[weight_values], level[weight_values];
    each<weight_values>([&](int i) {
        const message<4> total = of.found[!by_columns || !at.exists ? 0 : set_of_column(at, at.tx * W + i)];
        R weight_of = R(1);
        if constexpr (!sends_weighed)
            weight_of = own.weighed.by[0][i] * (R(1) / half);
        by_x[i] = -(weight_of * total.numbers[1] * rstd_of[0][i]) * (rstd_of[0][i] * portion);
        level[i] = -weight_of * total.numbers[0] * portion;
        if constexpr (!by_rows)
            level[i] -= by_x[i] * own.centre.left(0, i);
    });
    if constexpr (gradients == NORMFUSE_GRADIENTS_DIRECT) {
        if constexpr (by_columns) {
            if (at.ty == 0 && at.exists && (!folded || at.column < a.call.channels))
                each<W>([&](int j) {
                    const int set = set_of_column(at, at.tx * W + j);
                    if (!folded || at.column + j < a.call.channels)
                        emit(at, at.channel(0, j), (double)of.found[set].numbers[0], (double)of.found[set].numbers[1],
                             0.0, rstd_of[0][j]);
                });
        } else if (threadIdx.x == 0 && at.slab_exists) {
            emit(at, at.slab, (double)of.found[0].numbers[0], (double)of.found[0].numbers[1], 0.0, rstd_of[0][0]);
        }
    }
    tensors.walk_results(passed, next, [&](const cursor &where, const vectors &read) {
        R u[W], dz[W], more[W];
        unpack<type, W>(read.x, u);
        unpack<type, W>(read.dy, dz);
        R left = R(0);
        if constexpr (by_rows) {
            own.take(of.rows[where.row - first_row]);
            left = by_x[0] * own.centre.left(0, 0);
        }
        if constexpr (finds_dz_again)
            known.find_dz(u, read, dz, [](int, R) {});
        if constexpr (dpost_add)
            store(where, a.call.dpost_add, dz);
        if constexpr (writes_out) {
            if constexpr (passes<true>::more)
                unpack<type, W>(read.more, more);
            each<W>([&](int j) {
                const int i = weight_value(j);
                const R distance = own.centre.of(u[j], 0, 0, j);
                R value = fma(own.weighed.by[0][i] * (R(1) / half), dz[j], fma(by_x[i], distance, level[i] - left));
                if constexpr (passes<true>::more)
                    value += more[j];
                dz[j] = value;
            });
            store(where, a.out, dz);
        }
    });
}

template <int = 0>
__device__ __forceinline__ void hold(const normfuse_stream_arguments &a, char *memory, uint64_t &mailbox)
{
    const sums_of_block of(a, memory);
#pragma unroll 1
    for (int turn = 0; turn < (walks ? a.turns : 1); turn++) {
        const place at(a, (int)(blockIdx.x + turn * gridDim.x)), of_next(a, (int)(blockIdx.x + (turn + 1) * gridDim.x));
        const memory_of_thread tensors(at, memory);
        const meeting by = {at, of, mailbox, turn};
        cursor following(at), passed(at), next(of_next);
        if (walks && turn > 0)
            __syncthreads(); /* what the turn before has left is read no more */
        tensors.begin<false>(following, turn == 0);
        requested_weights weights;
        if constexpr (!by_rows) {
            weights.request_of_channels(at, at.sample);
            weights.request_of_sample(at, at.sample, at.exists);
        }
        if constexpr (backward) {
            known_backward known(at, of, weights);
            reduce_backward(at, tensors, following, of, by, known, passed);
            by.exchange();
            apply_backward(at, tensors, passed, of, by, known, next);
        } else {
            reduce_forward(at, tensors, following, of, by, weights, passed);
            by.exchange();
            apply_forward(at, tensors, passed, of, by, weights, next);
        }
    }
}

} // namespace

/* ---- the kernel ---------------------------------------------------------------------------------------------------- */

extern "C" __global__ void __launch_bounds__(threads, resident)
    NORMFUSE_KERNEL(const __grid_constant__ normfuse_stream_arguments a)
{
    NORMFUSE_DYNAMIC_SHARED(dynamic);
    __shared__ uint64_t mailbox;
    follow_kernel();
#if __CUDA_ARCH__ >= 900
    if constexpr (in_cluster) {
        open_mailbox(mailbox, a.parts * a.slab_sets * (int)sizeof(message<numbers_sent>));
        announce_mailboxes();
    }
#endif
    hold(a, reinterpret_cast<char *>(dynamic), mailbox);
}
