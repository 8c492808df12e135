/* SPDX-License-Identifier: MIT
 *
 * general.cuh - what takes every call: both layouts, any alignment and activation, and all additions, at the
 * cost of the tensors that move. A unit is one channel of a sample (rows), or the channels of a vector or word
 * (columns); a few threads, its lanes, share it and walk the positions in turn, so that a thread's channels are the same
 * all the way and what it knows and sums of them stays in registers.
 *
 * A call is one kernel where blocks that exchange their sums have whole norm groups, and else two. In one kernel the
 * tensors are walked twice: the second time from registers where a thread has one batch, or from the L2. */
#ifndef NORMFUSE_CUDA_GENERAL_CUH
#define NORMFUSE_CUDA_GENERAL_CUH

#include "columns.cuh"
#include "gradients.cuh"

/* The part of a tensor that a block has, and the thread's share of it. */
template <typename T, int V, bool columns> struct general_tile {
    static constexpr int channels = V; /* of a unit */
    int rank, part;                    /* of the blocks that exchange; of the parts of the sums */
    int first_channel, here;           /* of the block; with rows folded, of all of them together */
    int unit, lane;                    /* in the block; of those that share the unit */
    int n, samples, row;               /* the first sample and row (position), and how many */
    int each, count;                   /* rows of the thread, of a sample and of all */
    bool active;

    __device__ __forceinline__ explicit general_tile(const normfuse_cuda_arguments &a)
    {
        const normfuse_cuda_geometry &g = a.geometry;
        const int block = (int)(g.backwards ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
        /* Blocks that exchange follow one another by part; others by width, as memory does. */
        const bool by_width = columns && g.interleaved;
        const normfuse_cuda_divisor &inner = by_width ? g.by_blocks_wide : g.by_parts,
                                    &outer = by_width ? g.by_parts : g.by_blocks_wide;
        const int of_inner = divide(block, inner), of_sample = divide(of_inner, outer);
        const int in_inner = block - of_inner * (int)inner.divisor;
        const int in_outer = of_inner - of_sample * (int)outer.divisor;
        part = by_width ? in_outer : in_inner;
        rank = block - divide(block, g.by_joined_blocks) * g.joined_blocks;
        const int stretch = divide(part, g.by_parts_a_sample), chunk = part - stretch * g.parts_a_sample;
        n = g.all_samples ? stretch * g.part_samples : of_sample;
        samples = g.all_samples ? min(g.part_samples, (int)a.problem.n - n) : 1;
        first_channel = (by_width ? in_inner : in_outer) * g.width * channels;
        here = min(g.width * channels, (columns ? g.row_channels : (int)a.problem.c) - first_channel);
        const int lanes = g.unit_lanes;
        if constexpr (columns) {
            lane = divide((int)threadIdx.x, g.by_width);
            unit = (int)threadIdx.x - lane * g.width;
        } else {
            unit = divide((int)threadIdx.x, g.by_rows_at_once);
            lane = (int)threadIdx.x - unit * lanes;
        }
        active = lane < lanes && unit < g.width && unit * channels < here;
        row = chunk * g.part_rows + lane;
        const int rows = min(g.rows, (chunk + 1) * g.part_rows) - row;
        each = active && rows > 0 ? divide(rows + lanes - 1, g.by_rows_at_once) : 0;
        count = each * samples;
    }
    __device__ __forceinline__ int channel() const
    {
        return first_channel + unit * channels;
    }
    /* The channel of the block's i-th, and which copy of it that is where rows are folded. */
    __device__ __forceinline__ int channel_at(const normfuse_cuda_arguments &a, int i, int &copy) const
    {
        int c = first_channel + i;
        copy = 0;
        if constexpr (columns && V > 1)
            for (; c >= (int)a.problem.c; c -= (int)a.problem.c)
                copy++;
        return c;
    }
};

/* Where a thread is in every tensor, in bytes from its first element. */
struct general_place {
    int64_t at, step, jump;
    int left, each; /* vectors, of the sample */

    template <typename T, int V, bool columns>
    __device__ __forceinline__ void find(const normfuse_cuda_arguments &a, const general_tile<T, V, columns> &tile)
    {
        const normfuse_view x = a.problem.x();
        const int64_t row = x.position * (int64_t)sizeof(T);
        at = (tile.n * x.batch + tile.channel() * x.channel) * (int64_t)sizeof(T) + tile.row * row;
        step = a.geometry.unit_lanes * row;
        jump = x.batch * (int64_t)sizeof(T) - (tile.each - 1) * step;
        left = each = tile.each;
        /* A batch is of one sample: many of few positions are walked as one. */
        if (!columns && each == 1) {
            step = jump;
            left = each = tile.samples;
        }
        if constexpr (V > 1) {
            make_opaque(step);
            make_opaque(jump);
        }
    }
    /* Past so many vectors of this sample. */
    __device__ __forceinline__ void advance(int count)
    {
        left -= count;
        at += (count - 1) * step + (left == 0 ? jump : step);
        left = left == 0 ? each : left;
    }
};

/* The tensors that a walk reads. */
enum general_tensor { GENERAL_X, GENERAL_PRE_ADD, GENERAL_POST_ADD, GENERAL_DY, GENERAL_DU };

/* What is worked on together: B elements or words, of which the last of a thread may have fewer. The values of a word
 * follow one another, so that value i is of the thread's channel i % V. */
template <typename T, int V, int B, int N> struct general_batch {
    raw<T, V> of[N][B];
    int64_t at, step; /* bytes from a tensor's first element to the first vector, and from one to the next */
    int count;
};

template <typename T, int V, int B, int M>
__device__ __forceinline__ void unpack_batch(const raw<T, V> (&vectors)[B], compute<T> (&values)[M])
{
#pragma unroll
    for (int k = 0; k < B; k++) {
        compute<T> own[V];
        unpack<T, V>(vectors[k], own);
#pragma unroll
        for (int i = 0; i < V; i++)
            values[k * V + i] = own[i];
    }
}

/* The loader: K at a time, through registers; vectors of 16 bytes one at a time, through K slots of the thread in shared
 * memory. */
template <typename T, int V, int K, bool columns, int N> struct general_loader {
    static constexpr bool pipelines = V > 2;
    static constexpr int B = pipelines ? 1 : K, values = B * V;
    using batch = general_batch<T, V, B, N>;

    const normfuse_cuda_arguments &a;
    const general_tile<T, V, columns> &tile;
    const bool holds;    /* all that the thread has */
    const char *from[N]; /* nullptr: not read */
    general_place next;
    bool adds; /* others than x and dy are read */
    batch held;
    general_place here; /* of a pipeline: where the vector is that is worked on, the first place of its slot, */
    int slot, waiting;  /* and how many vectors have not been requested */

    __device__ __forceinline__ general_loader(const normfuse_cuda_arguments &arguments,
                                              const general_tile<T, V, columns> &of_thread)
        : a(arguments), tile(of_thread), holds(arguments.geometry.general.holds)
    {
    }
    /* What every call reads is not asked for at each vector. */
    static __device__ __forceinline__ constexpr bool always_reads(int i)
    {
        return i == GENERAL_X || i == GENERAL_DY;
    }
    template <typename Work> __device__ __forceinline__ void each_read(Work work) const
    {
#pragma unroll
        for (int i = 0; i < N; i++)
            if (always_reads(i))
                work(i);
        if (adds) {
#pragma unroll
            for (int i = 0; i < N; i++)
                if (!always_reads(i) && from[i])
                    work(i);
        }
    }
    /* The next batch, all of it of one sample. Through the L1: neighbours share its sectors. */
    __device__ __forceinline__ void request()
    {
        held.at = next.at;
        held.step = next.step;
        held.count = min(next.left, B);
        each_read([&](int i) {
#pragma unroll
            for (int k = 0; k < B; k++)
                request_where(k < held.count, held.of[i][k], from[i] + held.at + k * held.step);
        });
        next.advance(held.count);
    }
    /* work(place, i) for each tensor that is read, whose vector of the slot is at that place. */
    template <typename Work> __device__ __forceinline__ void each_place(Work work) const
    {
        NORMFUSE_DYNAMIC_SHARED(dynamic);
        uint4 *place = dynamic + slot + threadIdx.x;
        each_read([&](int i) {
            work(place, i);
            place += blockDim.x;
        });
    }
    /* To the slot after this one. */
    __device__ __forceinline__ void advance_slot()
    {
        slot += a.geometry.general.slot;
        slot = slot == K * a.geometry.general.slot ? 0 : slot;
    }
    __device__ __forceinline__ void request_slot()
    {
        if (waiting > 0) {
            each_place([&](uint4 *place, int i) { copy_ahead(place, from[i], next.at); });
            next.advance(1);
            waiting--;
        }
        commit_copies();
    }
    /* The vector that the thread has first, or comes to; what it has none of stays. */
    __device__ __forceinline__ void await()
    {
        if constexpr (pipelines) {
            wait_for_older_copies<K - 1>();
            if (tile.count > 0)
                each_place([&](const uint4 *place, int i) { held.of[i][0] = *place; });
        }
    }
    /* Begins at the first one; a thread that has none holds zeros. */
    __device__ __forceinline__ void open()
    {
        next.find(a, tile);
        here = next;
        slot = 0;
        waiting = tile.count;
        adds = false;
#pragma unroll
        for (int i = 0; i < N; i++) {
            adds = adds || (!always_reads(i) && from[i]);
#pragma unroll
            for (int k = 0; k < B; k++)
                held.of[i][k] = raw<T, V>();
        }
        if constexpr (pipelines) {
#pragma unroll 1
            for (int k = 0; k < K; k++) {
                request_slot();
                advance_slot();
            }
        } else {
            request();
        }
    }
    /* Calls work(batch) for each, in order. */
    template <typename Work> __device__ __forceinline__ void walk(Work work)
    {
        if constexpr (pipelines)
            walk_slots(work);
        else
            walk_batches(work);
    }
    template <typename Work> __device__ __forceinline__ void walk_slots(Work work)
    {
#pragma unroll 1
        for (int left = tile.count; left > 0; left--) {
            await();
            held.at = here.at;
            held.count = 1;
            here.advance(1);
            request_slot();
            advance_slot();
            work(held);
        }
    }
    /* What a batch lacks are the thread's first ones of x and pre_add, whose derivative is a number if the set's are, and
     * 0. */
    template <typename Work> __device__ __forceinline__ void walk_batches(Work work)
    {
        const raw<T, V> first_x = held.of[GENERAL_X][0], first_added = held.of[GENERAL_PRE_ADD][0];
#pragma unroll 1
        for (int left = tile.count; left > 0;) {
            if (held.count < B)
                each_read([&](int i) {
#pragma unroll
                    for (int k = 0; k < B; k++)
                        if (k >= held.count)
                            held.of[i][k] = i == GENERAL_X         ? first_x
                                            : i == GENERAL_PRE_ADD ? first_added
                                                                   : zero_vector<T, V>();
                });
            work(held);
            left -= held.count;
            if (left > 0)
                request();
        }
    }
};

/* Where results go. */
template <typename T, int V> struct general_result {
    char *data;

    __device__ __forceinline__ general_result(const normfuse_view &view) : data(view.data)
    {
    }
    template <int B, int N, int M>
    __device__ __forceinline__ void store(const general_batch<T, V, B, N> &of, const compute<T> (&values)[M]) const
    {
        if (!data)
            return;
#pragma unroll
        for (int k = 0; k < B; k++) {
            compute<T> own[V];
            each<V>([&](int i) { own[i] = values[k * V + i]; });
            if (k < of.count)
                store_vector<T, V>(data + of.at + k * of.step, 0, make_vector<T, V>(own));
        }
    }
};

/* The values of a batch as they are normalized: x with what is added to it, rounded. */
template <typename T, int V, int B, int N, int M>
__device__ __forceinline__ void values_of_x(const general_batch<T, V, B, N> &from, bool adds, compute<T> (&u)[M])
{
    unpack_batch<T, V>(from.of[GENERAL_X], u);
    if (adds) {
        compute<T> more[M];
        unpack_batch<T, V>(from.of[GENERAL_PRE_ADD], more);
#pragma unroll
        for (int k = 0; k < B; k++) {
            compute<T> own[V];
            each<V>([&](int i) { own[i] = u[k * V + i] + more[k * V + i]; });
            unpack<T, V>(make_vector<T, V>(own), own);
#pragma unroll
            for (int i = 0; i < V; i++)
                u[k * V + i] = own[i];
        }
    }
}

/* What a block knows of a channel: z = (x - mean) * slope + offset, `rest` of the mean. */
template <typename R> struct alignas(16) general_channel {
    R slope, offset, mean, rest;
};

/* All that is read of a channel's parameters is requested before the first is used. */
template <typename T>
__device__ __forceinline__ general_channel<compute<T>> know_channel(const normfuse_cuda_arguments &a, int n, int c,
                                                                    bool backward, bool forward_sums = false)
{
    using R = compute<T>;
    const normfuse_cuda_problem &p = a.problem;
    const int set = p.sets == NORMFUSE_SETS_GROUP ? divide(c, a.geometry.by_set_channels) : c;
    const auto request = [&](const normfuse_parameter &of, int index) {
        return request_at_once(of, n * of.batch + index * of.channel);
    };
    const requested_value weight = request(p.weight(), c), bias = request(p.bias(), c);
    requested_value scale = {0, 0}, shift = {0, 0}, added = {0, 0};
    if (p.scale().data || p.shift().data || p.pre_bias().data) {
        scale = request(p.scale(), c);
        shift = request(p.shift(), c);
        added = request(p.pre_bias(), c);
    }
    const bool saved = backward && a.source == NORMFUSE_SOURCE_SAVED;
    requested_value requested_mean = {0, 0}, requested_rstd = {0, 0};
    if (saved) {
        requested_mean = request(p.mean(), set);
        requested_rstd = request(p.rstd(), set);
    }
    const R more = p.scale().data ? R(1) + receive<R>(scale, p.scale().type) : R(1);
    general_channel<R> of = {p.weight().data ? receive<R>(weight, p.weight().type) * more : more,
                             p.bias().data ? receive<R>(bias, p.bias().type) * more : R(0), R(0), R(0)};
    if (p.shift().data)
        of.offset += receive<R>(shift, p.shift().type);
    double mean = 0.0;
    if (saved) {
        mean = receive<double>(requested_mean, p.mean().type);
        of.slope *= receive<R>(requested_rstd, p.rstd().type);
    } else if (a.source == NORMFUSE_SOURCE_RUNNING) {
        mean = parameter<double>(p.running_mean(), 0, c, 0.0);
        of.slope = scaled_by_running(p, c, of.slope);
    } else if (a.source == NORMFUSE_SOURCE_SCRATCH && !backward) {
        const normfuse_cuda_statistics *const statistics =
            a.statistics + (p.sets == NORMFUSE_SETS_BATCH ? set : n * p.groups + set);
        mean = statistics->mean;
        of.slope *= (R)statistics->rstd;
    }
    double left = 0.0;
    if (p.pre_bias().data)
        mean = add_exactly(mean, -(double)receive<R>(added, p.pre_bias().type), left);
    /* Where statistics are to come, the mean is less pre_bias alone, as it is. */
    if (forward_sums) {
        of.mean = (R)mean;
        return of;
    }
    split_mean<T>(mean, of.mean, of.rest);
    of.rest += (R)left;
    of.offset -= of.rest * of.slope;
    return of;
}

/* Of all channels of the block what know_channel gives, and the slopes of prelu. */
template <typename T, int V, bool columns>
__device__ __forceinline__ void know_channels(const normfuse_cuda_arguments &a, const general_tile<T, V, columns> &tile,
                                              general_channel<compute<T>> *channels, compute<T> *of_prelu,
                                              bool backward, bool forward_sums = false)
{
    using R = compute<T>;
    for (int i = (int)threadIdx.x; i < tile.here; i += (int)blockDim.x) {
        int copy;
        const int c = tile.channel_at(a, i, copy);
        channels[i] = know_channel<T>(a, tile.n, c, backward, forward_sums);
        if (a.problem.activation == NORMFUSE_PRELU)
            of_prelu[i] = parameter<R>(a.problem.slope(), 0, c, R(0));
    }
}

/* The thread's channels, slope and offset times `factor`. */
template <typename R, int W>
__device__ __forceinline__ void recall_channels(const general_channel<R> *channels, int first, R factor, R (&slope)[W],
                                                R (&offset)[W], R (&mean)[W])
{
#pragma unroll
    for (int i = 0; i < W; i++) {
        const general_channel<R> of = channels[first + i];
        slope[i] = of.slope * factor;
        offset[i] = of.offset * factor;
        mean[i] = of.mean;
    }
}

#endif
