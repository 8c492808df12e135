/* SPDX-License-Identifier: MIT
 *
 * columns.cuh - how threads walk the tile of a block when channels are adjacent; kernels.h has the picture. A thread
 * has one vector of channels and every RT-th row, RT being the rows that a block of threads covers at once. */
#ifndef NORMFUSE_CUDA_COLUMNS_CUH
#define NORMFUSE_CUDA_COLUMNS_CUH

#include "activation.cuh"
#include "join.cuh"

struct column_place {
    int n, c;                         /* sample (0 where a block group has all as one) and the thread's first channel */
    int first_channel;                /* of the block */
    int first, stop;                  /* the rows of the part */
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
    place.first = of_all * g.part_rows;
    place.stop = min(g.rows, place.first + g.part_rows);
    place.step = (unsigned)place.rows_at_once * (unsigned)a.problem.x().position * (unsigned)sizeof(T);
    make_opaque(place.step);
    return place;
}

/* The thread's place in one tensor, in bytes from `base`. All tensors have the strides of x, and no sample is so large
 * that 32 bits would not do: they share one offset, in one register. */
template <typename T, int V> struct column_cursor {
    char *base;
    unsigned at;

    __device__ __forceinline__ column_cursor(char *data, const normfuse_view &x, const column_place &place, int row)
    {
        base = data + (int64_t)place.n * x.batch * (int64_t)sizeof(T);
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

/* work(k) for each of at most K, of which `left` are left and each takes `step`: one jump at their end. */
template <int k, int K, typename Work> __device__ __forceinline__ void walk_rows(int left, int step, Work &work)
{
    if constexpr (k < K) {
        if (left > 0) {
            work(k);
            walk_rows<k + 1, K>(left - step, step, work);
        }
    }
}

/* What a thread has of a row: vectors of so many tensors. */
template <int tensors> struct row_vectors {
    uint4 of[tensors];
};

/* How many of `slots` vectors the thread has in a tile that begins at `row`. */
__device__ __forceinline__ int slots_of(const normfuse_cuda_arguments &a, const column_place &place, int row, int slots)
{
    const int rows = place.stop - row;
    return !place.active || rows <= 0 ? 0
                                      : min(slots, divide(rows + place.rows_at_once - 1, a.geometry.by_rows_at_once));
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

/* work(place) for each place of a channel or group in `all`: rows folded have each, one after the other. */
template <typename Work> __device__ __forceinline__ void in_all_rows(int i, int count, int all, Work work)
{
#pragma unroll 1
    for (; i < all; i += count)
        work(i);
}

/* The parameters of a block's channels into shared memory. */
__device__ __forceinline__ void stage(const normfuse_cuda_arguments &a, const channel_values &of, int n, int first,
                                      int count, int all, int threads)
{
    const normfuse_cuda_problem &p = a.problem;
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < count; i += threads) {
        const int c = divide(first + i, a.geometry.by_spans);
        const auto request = [&](const normfuse_parameter &from) {
            return from.data ? request_bits<float>(from, n * from.batch + c * from.channel) : bits<float>(0);
        };
        const bits<float> weight = request(p.weight()), bias = request(p.bias()), scale = request(p.scale()),
                          shift = request(p.shift()), added = request(p.pre_bias());
        in_all_rows(i, count, all, [&](int at) {
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

template <typename T, typename Mean>
__device__ __forceinline__ void split_mean(Mean mean, compute<T> &rounded, compute<T> &rest)
{
    using R = compute<T>;
    const R value[1] = {(R)mean};
    R back[1];
    unpack<T, 1>(make_vector<T, 1>(value), back);
    rounded = back[0];
    rest = (R)(mean - (Mean)back[0]);
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
    each<V>([&](int i) {
        if ((i & ((1 << a.geometry.subvector_bits) - 1)) == 0)
            found = groups[divide(of_group + i, a.geometry.by_group)];
        slope[i] *= found.rstd;
        offset[i] -= found.rest * slope[i];
        shift[i] = found.mean;
    });
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

/* ---- the work on a vector's channels ----------------------------------------------------------------------------- */

struct nothing_added {
    template <int H> __device__ __forceinline__ void operator()(float (&)[H], int) const
    {
    }
};

/* A vector that is added to z, `factor` times, or y in the place of z; where it `exists`. */
template <typename T, int V> struct vector_added {
    const uint4 &vector;
    float factor;
    bool exists, replaces;

    template <int H> __device__ __forceinline__ void operator()(float (&z)[H], int h) const
    {
        if (!exists)
            return;
        float more[H];
        unpack_part<T, V>(vector, h, more);
        each<H>([&](int i) { z[i] = replaces ? more[i] : fmaf(more[i], factor, z[i]); });
    }
};

/* The results of a vector of x: (x - means) slope + offset, to which add(z, 0) adds, activated. */
template <typename T, int V, typename Chosen, typename Parameter, typename Means, typename Add = nothing_added>
__device__ __forceinline__ uint4 result_of(Chosen chosen, int activation, const Parameter &act_param,
                                           const uint4 &vector, const Means &means, const float (&slope)[V],
                                           const float (&offset)[V], Add add = {})
{
    float z[V];
    unpack<T, V>(vector, z);
    each<V>([&](int i) { z[i] = fmaf(z[i] - means[i], slope[i], offset[i]); });
    add(z, 0);
    activate<sizeof(T) == 2>(z, chosen, activation, (float)act_param);
    return make_vector<T, V>(z);
}

/* Of part `h` of vectors of x and dy, H values each: x - mean, and what of dy comes through the activation, for SiLU
 * twice that; add(z, h) adds before that. */
template <typename T, int V, typename Means, typename Parameter = float> struct channel_derivative {
    const int &activation;
    const Parameter &act_param;
    const Means &means;
    const float (&slope)[V], (&offset)[V];

    template <typename Chosen, int H, typename Add = nothing_added>
    __device__ __forceinline__ void operator()(Chosen chosen, const uint4 &x_vector, const uint4 &dy_vector,
                                               float (&x)[H], float (&dy)[H], int h = 0, Add add = {}) const
    {
        unpack_part<T, V>(x_vector, h, x);
        unpack_part<T, V>(dy_vector, h, dy);
        each<H>([&](int i) { x[i] -= means[h * H + i]; });
        if (decltype(chosen)::constant != NORMFUSE_IDENTITY) {
            float z[H];
            each<H>([&](int i) { z[i] = fmaf(x[i], slope[h * H + i], offset[h * H + i]); });
            add(z, h);
            differentiate_by<sizeof(T) == 2>(dy, z, chosen, activation, (float)act_param);
        }
    }
};

/* ---- sums of threads -------------------------------------------------------------------------------------------- */

/* Sums of a vector's distances from `about`, and of their squares. */
template <typename T, int V, typename About>
__device__ __forceinline__ void add_squares(const uint4 &vector, const About &about, float (&sum)[V],
                                            float (&square)[V])
{
    float value[V];
    unpack<T, V>(vector, value);
    each<V>([&](int i) {
        const float distance = value[i] - about[i];
        sum[i] += distance;
        square[i] += distance * distance;
    });
}

/* Sums of dy' and of dy' (x - mean), of all channels of the thread or of part `h` of them. */
template <int V, int H>
__device__ __forceinline__ void add_products(const float (&x)[H], const float (&dy)[H], float (&first)[V],
                                             float (&second)[V], int h = 0)
{
    each<H>([&](int i) {
        first[h * H + i] += dy[i];
        second[h * H + i] += dy[i] * x[i];
    });
}

/* Where the activation takes half of z, its coefficients are halved, and so are the sums of twice dy'. */
template <int V> __device__ __forceinline__ void multiply(float (&first)[V], float (&second)[V], float factor)
{
    each<V>([&](int i) {
        first[i] *= factor;
        second[i] *= factor;
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

/* A lane's sums of `count` pairs, read(i) each, every lanes-th: `held` requested at once, then `ahead` at a time. */
template <typename Pair, int ahead, int held = 0, typename Read>
__device__ __forceinline__ Pair add_pairs(int count, int lane, int lanes, Read read)
{
    Pair sum = {};
    each<held>([&](int k) {
        float2 found = make_float2(0.0f, 0.0f);
        if (lane + k * lanes < count)
            found = read(lane + k * lanes);
        sum.x += found.x;
        sum.y += found.y;
    });
#pragma unroll(ahead)
    for (int i = lane + held * lanes; i < count; i += lanes) {
        const float2 found = read(i);
        sum.x += found.x;
        sum.y += found.y;
    }
    return sum;
}

/* The same of all lanes. */
template <int ahead, int held = 0, typename Read>
__device__ __forceinline__ float2 sum_pairs(int count, int lane, int lanes, Read read)
{
    const float2 sum = add_pairs<float2, ahead, held>(count, lane, lanes, read);
    return make_float2(sum_few(sum.x, lanes), sum_few(sum.y, lanes));
}

/* Over `lanes` lanes, of `count` parts, read(i) each, whose x is a mean and whose y are squares about it, of
 * number(part, i) values: first the mean, mean_of(their weighted sum), then squares about it, which cannot cancel.
 * A lane reads its first `held` parts once and the others twice, `ahead` at a time. */
template <int held, int ahead, typename Read, typename Number, typename Mean>
__device__ __forceinline__ float2 join_means(int count, int lane, int lanes, Read read, Number number, Mean mean_of)
{
    decltype(read(0)) parts[held > 0 ? held : 1];
    float mean = 0.0f, squares = 0.0f;
    each<held>([&](int k) {
        parts[k] = {};
        if (lane + k * lanes < count)
            parts[k] = read(lane + k * lanes);
    });
    each<held>([&](int k) { mean += number(parts[k], lane + k * lanes) * parts[k].x; });
#pragma unroll(ahead)
    for (int i = lane + held * lanes; i < count; i += lanes) {
        const auto part = read(i);
        mean += number(part, i) * part.x;
    }
    mean = mean_of(sum_few(mean, lanes));
    const auto add = [&](const auto &part, int i) {
        const float distance = part.x - mean;
        squares += part.y + number(part, i) * distance * distance;
    };
    each<held>([&](int k) { add(parts[k], lane + k * lanes); });
#pragma unroll(ahead)
    for (int i = lane + held * lanes; i < count; i += lanes)
        add(read(i), i);
    return make_float2(mean, sum_few(squares, lanes));
}

/* A block's sums of a channel, to memory. */
__device__ __forceinline__ void store_channel_sums(const normfuse_cuda_arguments &a, int n, int64_t c, int part,
                                                   double sum, double product)
{
    const normfuse_cuda_geometry &g = a.geometry;
    const int64_t channel = (int64_t)(g.sums_by_channel ? 0 : n) * a.problem.c + c;
    reinterpret_cast<double2 *>(a.sums)[channel * g.sum_slots + part] = make_double2(sum, product);
}

/* work(i, sum, product), by one thread, for each channel of a block that has `here` columns: what `beside` threads
 * found of each of its columns, row_channels apart. All threads call. */
template <typename Work>
__device__ __forceinline__ void sum_beside(const normfuse_cuda_arguments &a, const float *plain, const float *centred,
                                           int here, int row_channels, int beside, int bits, Work work)
{
    const normfuse_cuda_divisor &by_spans = a.geometry.by_spans;
    const int spans = (int)by_spans.divisor;
    share_items(divide(here, by_spans), bits, [&](int i, bool exists, int lane, int lanes) {
        const float2 found = sum_pairs<4>(exists ? beside * spans : 0, lane, lanes, [&](int k) {
            const int row = divide(k, by_spans), at = row * (row_channels - spans) + i * spans + k;
            return make_float2(plain[at], centred[at]);
        });
        if (exists && lane == 0)
            work(i, found.x, found.y);
    });
}

#endif
