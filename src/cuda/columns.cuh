/* SPDX-License-Identifier: MIT
 *
 * columns.cuh - how threads walk the tile of a block when channels are adjacent; kernels.h has the picture. A thread
 * has one vector of channels and every RT-th row, RT being the rows that a block of threads covers at once. */
#ifndef NORMFUSE_CUDA_COLUMNS_CUH
#define NORMFUSE_CUDA_COLUMNS_CUH

#include "activation.cuh"
#include "body.cuh"
#include "join.cuh"

struct column_place {
    int n, c;                         /* sample (0 where a block group has all as one) and the thread's first channel */
    int first_channel;                /* of the block */
    int first, stop;                  /* the rows of the part, or what it is from, interleaved with the others */
    int column, beside, rows_at_once; /* the thread's vector in the block, its row among those at once */
    unsigned step;                    /* bytes from one row of the thread to the next */
    bool active;                      /* has a vector at all */
};

template <typename T, int V>
__device__ __forceinline__ column_place place_of(const normfuse_cuda_arguments &a, int block_group, int part)
{
    const normfuse_cuda_geometry &g = a.geometry;
    column_place place;
    const int sample = divide(block_group, g.by_blocks_wide), beside = block_group - sample * g.blocks_wide;
    const int of_sample = g.all_samples ? divide(part, g.by_parts_a_sample) : 0;
    place.n = g.all_samples ? of_sample : sample;
    place.rows_at_once = (int)g.by_rows_at_once.divisor;
    place.beside = divide((int)threadIdx.x, g.by_width);
    place.column = (int)threadIdx.x - place.beside * g.width;
    place.first_channel = beside * g.width * V;
    place.c = place.first_channel + place.column * V;
    place.active = place.beside < place.rows_at_once && place.c < g.row_channels;
    const int of_all = part - of_sample * g.parts_a_sample;
    place.first = of_all * (g.interleaved ? place.rows_at_once : g.part_rows);
    place.stop = g.interleaved ? g.rows : min(g.rows, place.first + g.part_rows);
    place.step = g.by_row_step.divisor * (unsigned)a.problem.x().position * (unsigned)sizeof(T);
    make_opaque(place.step);
    return place;
}

/* The thread's place in one tensor, in bytes from `base`. All tensors have the strides of x, and no sample is so large
 * that 32 bits would not do: they share one offset, in one register. */
template <typename T, int V> struct column_cursor {
    char *base;
    unsigned at;

    __device__ __forceinline__ column_cursor(char *data, const normfuse_view &x,
                                             const column_place &place, int row, int lead = 0)
    {
        base = data + ((int64_t)place.n * x.batch - lead) * (int64_t)sizeof(T);
        /* Else it is found again at each access, by a dozen instructions. */
        base = opaque(base);
        at = ((unsigned)row * (unsigned)x.position + (unsigned)place.c) * (unsigned)sizeof(T);
    }
    /* To the row that the thread has next. */
    __device__ __forceinline__ void advance(const column_place &place)
    {
        at += place.step;
    }
    __device__ __forceinline__ raw<T, V> load() const
    {
        return load_vector<T, V>(base + at, 0);
    }
    __device__ __forceinline__ void store(raw<T, V> vector) const
    {
        store_vector<T, V>(base + at, 0, vector);
    }
};

/* A vector is worked on in parts of four values: those of eight would be as many registers as two vectors more. */
constexpr int values_a_part = 4;

template <typename T, int V>
__device__ __forceinline__ void unpack_part(const raw<T, V> &vector, int part, float (&values)[values_a_part])
{
    if constexpr (V == 8) {
        const float2 low = pair_of(part == 0 ? vector.x : vector.z, T()),
                     high = pair_of(part == 0 ? vector.y : vector.w, T());
        values[0] = low.x;
        values[1] = low.y;
        values[2] = high.x;
        values[3] = high.y;
    } else {
        unpack<T, V>(vector, values);
    }
}

template <typename T, int V>
__device__ __forceinline__ void pack_part(raw<T, V> &vector, int part, const float (&values)[values_a_part])
{
    if constexpr (V == 8) {
        const unsigned low = bits_of(values[0], values[1], T()), high = bits_of(values[2], values[3], T());
        (part == 0 ? vector.x : vector.z) = low;
        (part == 0 ? vector.y : vector.w) = high;
    } else {
        vector = make_vector<T, V>(values);
    }
}

/* How many rows a part has. */
__device__ __forceinline__ int rows_of(const normfuse_cuda_geometry &g, const column_place &place)
{
    const int rows = max(0, place.stop - place.first);
    if (!g.interleaved)
        return rows;
    const int step = (int)g.by_row_step.divisor, whole = divide(rows, g.by_row_step);
    return whole * place.rows_at_once + min(place.rows_at_once, rows - whole * step);
}

/* How many of `slots` vectors the thread has in a tile that begins at `row`. */
__device__ __forceinline__ int slots_of(const normfuse_cuda_arguments &a, const column_place &place, int row, int slots)
{
    const int rows = place.stop - row;
    return !place.active || rows <= 0
               ? 0
               : min(slots, divide(rows + (int)a.geometry.by_row_step.divisor - 1, a.geometry.by_row_step));
}

/* Where wide rows (kernels.h) and samples do not end together: vectors are aligned in memory wherever a sample begins,
 * so its first one may hold elements of the sample before, its last one of the next, and there is none behind the
 * tensor's end. The thread that has such an edge puts what is its own of it in its pipeline ahead of its whole vectors,
 * by single elements, and so do its results leave, after those of the loop: in the loop itself an edge cost all shapes
 * up to 20 %. */
template <typename T, int V, bool allowed> struct column_edges {
    int count, whole; /* vectors of the thread: edges, at most two, and whole ones */
    int marks;        /* one register for what is rarely requested */
    unsigned step;

    __device__ __forceinline__ column_edges(const normfuse_cuda_arguments &a, const column_place &place, int row,
                                            int slots)
    {
        count = whole = slots_of(a, place, row, slots);
        marks = V << 4;
        step = place.step;
        if constexpr (allowed) {
            const normfuse_cuda_problem &p = a.problem;
            const int lead = (int)(place.n * p.x().batch & (V - 1)), width = a.geometry.width;
            const int elements = lead + (int)(p.s * p.c);
            const int vectors = (int)((unsigned)(elements + V - 1) / (unsigned)V);
            column_place own = place;
            own.stop = min(place.stop, divide(vectors - place.column + width - 1, a.geometry.by_width));
            whole = count = slots_of(a, own, row, slots);
            int later = lead, begin = 0, finish = V;
            if (count > 0) {
                const int last = row + (count - 1) * (int)a.geometry.by_row_step.divisor;
                begin = row == 0 && place.column == 0 ? lead : 0;
                finish = V - max(0, (last * width + place.column + 1) * V - elements);
                whole -= count == 1 ? begin > 0 || finish < V : (begin > 0) + (finish < V);
            }
            while (later >= (int)p.c)
                later -= (int)p.c;
            marks = begin | finish << 4 | lead << 8 | later << 12;
            compiler_barrier(marks);
        }
    }
    __device__ __forceinline__ int edges() const
    {
        return allowed ? count - whole : 0;
    }
    /* Where the thread's own elements begin in its first vector and end in its last. */
    __device__ __forceinline__ int begin() const
    {
        return allowed ? marks & 15 : 0;
    }
    __device__ __forceinline__ int finish() const
    {
        return allowed ? marks >> 4 & 15 : V;
    }
    /* Elements of the sample's first vector that are not its own. */
    __device__ __forceinline__ int lead() const
    {
        return allowed ? marks >> 8 & 15 : 0;
    }
    /* Channels that rows begin before their first one. */
    __device__ __forceinline__ int later() const
    {
        return allowed ? marks >> 12 : 0;
    }
    /* Of what rows have one after the other from their first channel on: where a column is in it. */
    __device__ __forceinline__ int of_group(int column, int channels) const
    {
        return column + (later() > 0 ? channels - later() : 0);
    }
    /* Bytes from the thread's first vector to its first whole one. */
    __device__ __forceinline__ unsigned skipped() const
    {
        return begin() > 0 ? step : 0;
    }
    /* The same to edge k, and where its own elements begin and end. */
    __device__ __forceinline__ unsigned at(int k) const
    {
        return k > 0 || begin() == 0 ? (unsigned)(count - 1) * step : 0;
    }
    __device__ __forceinline__ int begin(int k) const
    {
        return k == 0 ? begin() : 0;
    }
    __device__ __forceinline__ int finish(int k) const
    {
        return k + 1 == edges() ? finish() : V;
    }
    /* Where in a block's shared memory its result waits: a sample's beginning, its end. */
    __device__ __forceinline__ int result(int k) const
    {
        return k + (begin() == 0);
    }
};

template <typename T, typename Edges>
__device__ __forceinline__ void store_edges(const Edges &edges, char *first_vector, const uint4 *of_edges)
{
#pragma unroll 1
    for (int k = 0; k < edges.edges(); k++)
        store_range<T>(first_vector + edges.at(k), of_edges[edges.result(k)], edges.begin(k), edges.finish(k));
}

/* A thread's own pipeline in shared memory, for what it reads once: copy(slot) requests the next whole vector,
 * read(slot) makes values of one, work(values, left) is what they are for, `left` vectors before the end. As many are
 * on their way as the pipeline has slots. Where blocks begin with more than a load or two, as here, registers did
 * worse: 1x64x2039x1021 bf16 221 us for 210, backward 338 for 328; a warp has six counters for what it waits for, and
 * two loads on one are waited for together. */
template <int slots, typename Edges, typename Copy>
__device__ __forceinline__ void open_pipeline(const Edges &edges, Copy &copy)
{
    each<slots>([&](int slot) {
        if (slot >= edges.edges() && slot < edges.count)
            copy(slot);
        commit_copies();
    });
}
template <int slots, typename Copy, typename Read, typename Work>
__device__ __forceinline__ void walk_pipeline(int count, Copy &copy, Read read, Work work)
{
    int slot = 0;
#pragma unroll 1
    for (int left = count; left > 0; left--) {
        wait_for_older_copies<slots - 1>();
        auto values = read(slot);
        if (left > slots)
            copy(slot);
        commit_copies();
        work(values, left);
        slot = slot + 1 == slots ? 0 : slot + 1;
    }
}

template <int k, int K, typename Work> __device__ __forceinline__ void walk_held(int count, Work &work)
{
    if constexpr (k < K) {
        if (k < count) {
            work(k);
            walk_held<k + 1, K>(count, work);
        }
    }
}

/* Calls work(slot) for each of the thread's `count` rows: `shared` slots first, which are negative, then K that are
 * known when compiling. What a thread does not have it does not walk through. */
template <int K, typename Work> __device__ __forceinline__ void walk(int count, int shared, Work work)
{
#pragma unroll 1
    for (int k = 0; k < min(shared, count); k++)
        work(-1 - k);
    walk_held<0, K>(count - shared, work);
}

/* ---- parameters ------------------------------------------------------------------------------------------------- */

/* What a block knows of its channels, each an array in shared memory. First as the parameters are: weight, bias, scale
 * and shift, of which absent ones hold nothing. Where a set is one channel, or each channel has statistics of its own,
 * one thread then makes of them what all threads of the channel need: slope, offset, mean (`ready`). */
struct channel_values {
    float *slopes, *offsets, *means, *shifts;
};

/* Behind them, where a forward sums: pre_bias of `channels`. */
__device__ __forceinline__ float *biases_of(const normfuse_cuda_problem &p, const channel_values &of, int channels)
{
    return of.shifts + (p.scale().data || p.shift().data ? channels : 0);
}

__device__ __forceinline__ void weigh(const normfuse_cuda_problem &p, const channel_values &of, int i, float &weight,
                                      float &bias)
{
    const float scale = p.scale().data ? 1.0f + of.means[i] : 1.0f;
    weight = (p.weight().data ? of.slopes[i] : 1.0f) * scale;
    bias = (p.bias().data ? of.offsets[i] : 0.0f) * scale + (p.shift().data ? of.shifts[i] : 0.0f);
}

/* The first place of the i-th of `count` channels, where rows begin `later` channels before their first one. */
__device__ __forceinline__ int first_place(int i, int later, int count)
{
    return i + later - (later > 0 && i + later >= count ? count : 0);
}

/* work(place) for each place of a channel or group in `all`: rows folded have each, one after the other. */
template <typename Work> __device__ __forceinline__ void in_all_rows(int i, int count, int all, Work work)
{
#pragma unroll 1
    for (; i < all; i += count)
        work(i);
}

/* The parameters of a block's channels into shared memory. */
__device__ __forceinline__ void stage(const normfuse_cuda_problem &p, const channel_values &of, int n, int first, int count,
                                      int all, int later, int threads)
{
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < count; i += threads) {
        const int c = first + i;
        const auto request = [&](const normfuse_parameter &from) {
            return from.data ? request_bits<float>(from, n * from.batch + c * from.channel) : bits<float>(0);
        };
        const bits<float> weight = request(p.weight()), bias = request(p.bias()), scale = request(p.scale()),
                          shift = request(p.shift()), added = request(p.pre_bias());
        in_all_rows(first_place(i, later, count), count, all, [&](int at) {
            if (p.weight().data)
                of.slopes[at] = receive<float>(weight, p.weight().type);
            if (p.bias().data)
                of.offsets[at] = receive<float>(bias, p.bias().type);
            if (p.scale().data)
                of.means[at] = receive<float>(scale, p.scale().type);
            if (p.shift().data)
                of.shifts[at] = receive<float>(shift, p.shift().type);
            if (p.pre_bias().data)
                biases_of(p, of, all)[at] = receive<float>(added, p.pre_bias().type);
        });
    }
}

/* Adjacent values, on a boundary of 16 bytes. */
template <int V> __device__ __forceinline__ void read_values(const float *from, float (&to)[V])
{
#pragma unroll
    for (int i = 0; i < V; i += 4) {
        const float4 four = *reinterpret_cast<const float4 *>(from + i);
        to[i] = four.x;
        to[i + 1] = four.y;
        to[i + 2] = four.z;
        to[i + 3] = four.w;
    }
}

template <int V> __device__ __forceinline__ void write_values(float *to, const float (&from)[V])
{
#pragma unroll
    for (int i = 0; i < V; i += 4)
        *reinterpret_cast<float4 *>(to + i) = make_float4(from[i], from[i + 1], from[i + 2], from[i + 3]);
}

/* A mean as it is subtracted: in the tensor's own type, whose distance from x is exact where the two are near, and what
 * that leaves out. */
template <typename R> struct alignas(16) group_statistics {
    R mean, rest, rstd, variance;
};

/* base + more, base in the tensor's own type. */
template <typename T>
__device__ __forceinline__ void split_sum(compute<T> base, compute<T> more, compute<T> &rounded, compute<T> &rest)
{
    using R = compute<T>;
    R left;
    const R sum[1] = {add_exactly(base, more, left)};
    R back[1];
    unpack<T, 1>(make_vector<T, 1>(sum), back);
    rounded = back[0];
    rest = (sum[0] - back[0]) + left;
}

template <typename T> __device__ __forceinline__ void split_mean(double mean, compute<T> &rounded, compute<T> &rest)
{
    using R = compute<T>;
    const R value[1] = {(R)mean};
    R back[1];
    unpack<T, 1>(make_vector<T, 1>(value), back);
    rounded = back[0];
    rest = (R)(mean - (double)back[0]);
}

/* z = (x - shift) * slope + offset for the thread's channels, which begin with the of_group-th of the groups'. */
template <int V>
__device__ __forceinline__ void coefficients_of(const normfuse_cuda_arguments &a, const channel_values &of,
                                                const group_statistics<float> *groups, int column, int of_group,
                                                bool ready, float (&slope)[V], float (&offset)[V], float (&shift)[V])
{
    const normfuse_cuda_problem &p = a.problem;
    if (ready) {
        read_values<V>(of.slopes + column * V, slope);
        read_values<V>(of.offsets + column * V, offset);
        read_values<V>(of.means + column * V, shift);
        return;
    }
    each<V>([&](int i) {
        slope[i] = 1.0f;
        offset[i] = 0.0f;
    });
    if (p.weight().data)
        read_values<V>(of.slopes + column * V, slope);
    if (p.bias().data)
        read_values<V>(of.offsets + column * V, offset);
    if (p.scale().data) {
        read_values<V>(of.means + column * V, shift);
        each<V>([&](int i) {
            slope[i] *= 1.0f + shift[i];
            offset[i] *= 1.0f + shift[i];
        });
    }
    if (p.shift().data) {
        read_values<V>(of.shifts + column * V, shift);
        each<V>([&](int i) { offset[i] += shift[i]; });
    }
    /* Adjacent channels of a subvector are of one group. */
    group_statistics<float> found;
#pragma unroll
    for (int i = 0; i < V; i++) {
        if ((i & ((1 << a.geometry.subvector_bits) - 1)) == 0)
            found = groups[divide(of_group + i, a.geometry.by_group)];
        slope[i] *= found.rstd;
        offset[i] -= found.rest * slope[i];
        shift[i] = found.mean;
    }
    if (p.pre_bias().data) {
        float bias[V];
        read_values<V>(biases_of(p, of, a.geometry.width * V) + column * V, bias);
        each<V>([&](int i) {
            float left;
            shift[i] = add_exactly(shift[i], -bias[i], left);
            offset[i] -= left * slope[i];
        });
    }
}

/* What a thread found of x becomes what it would have found of x with pre_bias: its first values move, the rounding of
 * that goes to the means, which are less these. */
template <typename R, int V> __device__ __forceinline__ void add_bias(const R (&bias)[V], R (&first)[V], R (&mean)[V])
{
    each<V>([&](int i) {
        R left;
        first[i] = add_exactly(first[i], bias[i], left);
        mean[i] += left;
    });
}

/* What a block sends the other blocks of its block group, for each norm group: forward the mean, less a value of the
 * set that all know, and squares about it; backward two sums. */
__device__ __forceinline__ void send(cluster_mailbox &mailbox, float2 *place, int rank, float2 value)
{
    send(mailbox, reinterpret_cast<double *>(place), rank,
         __hiloint2double(__float_as_int(value.y), __float_as_int(value.x)));
}

/* ---- sums of threads -------------------------------------------------------------------------------------------- */

/* Sums of distances from `about`, and of their squares. */
template <int V, typename About>
__device__ __forceinline__ void add_squares(const float (&value)[V], const About &about, float (&sum)[V],
                                            float (&square)[V])
{
    each<V>([&](int i) {
        const float distance = value[i] - about[i];
        sum[i] += distance;
        square[i] += distance * distance;
    });
}
template <typename T, int V, typename About>
__device__ __forceinline__ void add_squares_of(const uint4 &vector, const About &about, float (&sum)[V],
                                               float (&square)[V])
{
    float value[V];
    unpack<T, V>(vector, value);
    add_squares<V>(value, about, sum, square);
}

/* Where the activation takes half of z, its coefficients are halved, and so are the sums of twice dy'. */
template <int V> __device__ __forceinline__ void halve(float (&first)[V], float (&second)[V])
{
    each<V>([&](int i) {
        first[i] *= 0.5f;
        second[i] *= 0.5f;
    });
}

/* What a thread found in a subvector: adjacent channels of its vector that are of one group, as many as any vector and
 * any group have in common. The mean is squares' and less `first`, one of the thread's values. */
template <typename R> struct alignas(16) subvector_sums {
    R first, mean, squares, count;
};

/* Channels into subvectors, in place: two that have met as many values become one, as often as that takes. */
template <typename R, int V>
__device__ __forceinline__ void join_channels(R (&first)[V], R (&mean)[V], R (&squares)[V], R count, int subvector_bits)
{
    R half = R(0.5) * count;
#pragma unroll
    for (int level = 0; 1 << level < V; level++) {
        if (level < subvector_bits) {
#pragma unroll
            for (int i = 0; i < V >> (level + 1); i++) {
                const R distance = (first[2 * i + 1] - first[2 * i]) + (mean[2 * i + 1] - mean[2 * i]);
                squares[i] = (squares[2 * i] + squares[2 * i + 1]) + half * distance * distance;
                mean[i] = mean[2 * i] + R(0.5) * distance;
                first[i] = first[2 * i];
            }
            half *= R(2);
        }
    }
}

/* work(i, sum, product), by one thread, for each of `here` channels of a block: what `beside` threads found of it,
 * row_channels apart. All threads call. */
template <typename Work>
__device__ __forceinline__ void sum_beside(const float *plain, const float *centred, int here, int row_channels,
                                           int beside, int bits, Work work)
{
    share_items(here, bits, [&](int i, bool exists, int lane, int lanes) {
        float sum = 0.0f, product = 0.0f;
#pragma unroll 4
        for (int row = lane; row < (exists ? beside : 0); row += lanes) {
            sum += plain[row * row_channels + i];
            product += centred[row * row_channels + i];
        }
        sum = sum_few(sum, lanes);
        product = sum_few(product, lanes);
        if (exists && lane == 0)
            work(i, sum, product);
    });
}

#endif
