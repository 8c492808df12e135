/* SPDX-License-Identifier: MIT
 *
 * columns_parameters.cuh - what the kernels over columns with a file of their own have in common: a thread requests the
 * parameters of its own channels, whole vectors of them, while its data are on their way. */
#ifndef NORMFUSE_CUDA_COLUMNS_PARAMETERS_CUH
#define NORMFUSE_CUDA_COLUMNS_PARAMETERS_CUH

#include "columns.cuh"

/* Where a thread is in its block: the same channels in each of its rows. */
struct thread_place {
    int beside, column;   /* its first row and its vector of a row */
    int groups[2], split; /* of the block: that of the thread's first `split` channels, and of the others */

    __device__ __forceinline__ void find_column(const normfuse_cuda_columns &a)
    {
        beside = divide((int)threadIdx.x, a.by_width);
        column = (int)threadIdx.x - beside * a.width;
    }
    template <int V> __device__ __forceinline__ void find_groups(const normfuse_cuda_columns &a, int own)
    {
        groups[0] = divide(own * V, a.by_group);
        split = min(V, (groups[0] + 1) * a.group - own * V);
        groups[1] = min(groups[0] + 1, a.groups - 1);
    }
    /* In shared memory each group has the sums of its vectors beside one another. A vector of two groups has a place in
     * both, so every group begins one vector further on than its first. */
    __device__ __forceinline__ int entry(const normfuse_cuda_columns &a, int side) const
    {
        return (column + groups[side] + (side == 1 && groups[1] == groups[0] ? 1 : 0)) * a.at_once + beside;
    }
};
template <int V>
__device__ __forceinline__ void entries_of_group(const normfuse_cuda_columns &a, int group, int &begin, int &count)
{
    const int channel = group * a.group, vector = channel / V;
    begin = (vector + group) * a.at_once;
    count = ((channel + a.group - 1) / V - vector + 1) * a.at_once;
}

/* A number for each of the thread's channels, of their group: as an array of V has one for each. */
struct side_values {
    float of[2];
    int split;

    __device__ __forceinline__ float operator[](int i) const
    {
        return i < split ? of[0] : of[1];
    }
};
template <int S> struct lane_values {
    const float (&of)[S];

    __device__ __forceinline__ float operator[](int i) const
    {
        return of[S == 1 ? 0 : i];
    }
};

enum columns_parameter { COLUMNS_WEIGHT, COLUMNS_BIAS, COLUMNS_SCALE, COLUMNS_SHIFT, COLUMNS_MEAN, COLUMNS_RSTD };

__device__ __forceinline__ int type_of(const normfuse_cuda_columns &a, columns_parameter which)
{
    return (int)(a.types >> 2 * which & 3);
}

/* The thread's channels of a parameter as they are in memory: halves of a vector of floats, or a vector of 16 bits and
 * the same again, since whatever is loaded in a branch is waited for at the branch's end. */
template <int V> struct half_type {
    using type = uint4;
};
template <> struct half_type<4> {
    using type = uint2;
};
template <int V> struct channel_words {
    typename half_type<V>::type of[2];
};

/* Where many blocks request the same, one after the other, L1 answers: lines of L2 that all multiprocessors want take
 * longer than what is wanted (`shared`; evaluation of 64x256x56x56 f16 100 us for 52). */
template <int V, bool shared = false>
__device__ __forceinline__ channel_words<V> request_channels(const char *data, int c, int type)
{
    using half = typename half_type<V>::type;
    const bool singles = type == NORMFUSE_F32;
    const half *const first = reinterpret_cast<const half *>(data + c * (singles ? 4 : 2));
    const half *const second = first + (singles ? 1 : 0);
    if (shared)
        return {{__ldg(first), __ldg(second)}};
    return {{__ldcg(first), __ldcg(second)}};
}

template <int V>
__device__ __forceinline__ void receive_channels(const channel_words<V> &words, int type, float (&values)[V])
{
    unsigned of[V];
    each<2>([&](int i) {
        of[i * V / 2] = words.of[i].x;
        of[i * V / 2 + 1] = words.of[i].y;
        if constexpr (V == 8) {
            of[i * V / 2 + 2] = words.of[i].z;
            of[i * V / 2 + 3] = words.of[i].w;
        }
    });
    if (type == NORMFUSE_F32) {
        each<V>([&](int i) { values[i] = __uint_as_float(of[i]); });
        return;
    }
    each<V / 2>([&](int i) {
        const float2 pair = type == NORMFUSE_F16 ? pair_of(of[i], f16()) : pair_of(of[i], bf16());
        values[2 * i] = pair.x;
        values[2 * i + 1] = pair.y;
    });
}

/* weight (1 + scale) and bias (1 + scale) + shift of the thread's channels. */
template <int V> struct channel_parameters {
    channel_words<V> weight, bias, scale, shift;

    __device__ __forceinline__ void request_weights(const normfuse_cuda_columns &a, int c)
    {
        /* Absent ones are read where x is. */
        weight = request_channels<V>(a.weight ? a.weight : a.x, a.weight ? c : 0, type_of(a, COLUMNS_WEIGHT));
        bias = request_channels<V>(a.bias ? a.bias : a.x, a.bias ? c : 0, type_of(a, COLUMNS_BIAS));
    }
    __device__ __forceinline__ void request_modulation(const normfuse_cuda_columns &a, int n, int c)
    {
        if (a.scale)
            scale = request_channels<V>(a.scale + n * a.scale_batch, c, type_of(a, COLUMNS_SCALE));
        if (a.shift)
            shift = request_channels<V>(a.shift + n * a.shift_batch, c, type_of(a, COLUMNS_SHIFT));
    }
    __device__ __forceinline__ void request(const normfuse_cuda_columns &a, int n, int c)
    {
        request_weights(a, c);
        request_modulation(a, n, c);
    }
    __device__ __forceinline__ void receive_weights(const normfuse_cuda_columns &a, float (&slope)[V],
                                                    float (&offset)[V]) const
    {
        each<V>([&](int i) {
            slope[i] = 1.0f;
            offset[i] = 0.0f;
        });
        if (a.weight)
            receive_channels<V>(weight, type_of(a, COLUMNS_WEIGHT), slope);
        if (a.bias)
            receive_channels<V>(bias, type_of(a, COLUMNS_BIAS), offset);
    }
    __device__ __forceinline__ void receive(const normfuse_cuda_columns &a, float (&slope)[V], float (&offset)[V]) const
    {
        receive_weights(a, slope, offset);
        if (a.scale) {
            float more[V];
            receive_channels<V>(scale, type_of(a, COLUMNS_SCALE), more);
            each<V>([&](int i) {
                slope[i] *= 1.0f + more[i];
                offset[i] *= 1.0f + more[i];
            });
        }
        if (a.shift) {
            float more[V];
            receive_channels<V>(shift, type_of(a, COLUMNS_SHIFT), more);
            each<V>([&](int i) { offset[i] += more[i]; });
        }
    }
};

/* work(k) for the rows that the thread has: one jump at their end. */
template <int k, int K, typename Work> __device__ __forceinline__ void walk_rows(int left, int at_once, Work &work)
{
    if constexpr (k < K) {
        if (left > 0) {
            work(k);
            walk_rows<k + 1, K>(left - at_once, at_once, work);
        }
    }
}

/* A saved statistic as it is in memory, f32 or f64, requested without a branch, whose end would wait for it. */
struct saved_statistic {
    float single = 0.0f;
    double twice = 0.0;

    __device__ __forceinline__ void request(const char *data, int64_t element, int type)
    {
        load_statistic<NORMFUSE_F32, NORMFUSE_F64>(single, twice, data + element * 4, data + element * 8, type);
    }
    __device__ __forceinline__ double receive(int type) const
    {
        return type == NORMFUSE_F64 ? twice : (double)single;
    }
};

/* The statistics of a norm group, to memory. */
__device__ __forceinline__ void store_group(const normfuse_cuda_columns &a, int n, int group, double mean, float rstd)
{
    if (a.mean)
        store_value<double>(a.mean, n * a.mean_batch + group, type_of(a, COLUMNS_MEAN), mean);
    if (a.rstd)
        store_value<float>(a.rstd, n * a.rstd_batch + group, type_of(a, COLUMNS_RSTD), rstd);
}

/* ---- the work on a vector's channels ----------------------------------------------------------------------------- */

/* Weight and bias become what x less the rounded mean is weighed by, `factor` times; the rests are of the mean. */
template <int V, typename Rests, typename Rstds>
__device__ __forceinline__ void centre(float (&slope)[V], float (&offset)[V], const Rests &rests, const Rstds &rstds,
                                       float factor)
{
    each<V>([&](int i) {
        slope[i] *= rstds[i] * factor;
        offset[i] = offset[i] * factor - rests[i] * slope[i];
    });
}

template <typename T, int V, typename Chosen, typename Means>
__device__ __forceinline__ void store_result(const normfuse_cuda_columns &a, Chosen chosen, const uint4 &vector,
                                             const Means &means, const float (&slope)[V], const float (&offset)[V],
                                             char *to)
{
    float z[V];
    unpack<T, V>(vector, z);
    each<V>([&](int i) { z[i] = fmaf(z[i] - means[i], slope[i], offset[i]); });
    activate<sizeof(T) == 2, true>(z, chosen, a.activation, a.act_param);
    store_vector<T, V>(to, 0, make_vector<T, V>(z));
}

/* x becomes x - mean and dy what came through the activation, for SiLU twice that. */
template <bool fast, int V, typename Chosen, typename Means>
__device__ __forceinline__ void differentiate_channels(int activation, float act_param, Chosen chosen,
                                                       const Means &means, const float (&slope)[V],
                                                       const float (&offset)[V], float (&x)[V], float (&dy)[V])
{
    each<V>([&](int i) { x[i] -= means[i]; });
    if (decltype(chosen)::constant != NORMFUSE_IDENTITY) {
        float z[V];
        each<V>([&](int i) { z[i] = fmaf(x[i], slope[i], offset[i]); });
        differentiate_by<fast>(dy, z, chosen, activation, act_param);
    }
}

/* Sums of dy' and of dy' (x - mean). */
template <int V>
__device__ __forceinline__ void add_products(const float (&x)[V], const float (&dy)[V], float (&first)[V],
                                             float (&second)[V])
{
    each<V>([&](int i) {
        first[i] += dy[i];
        second[i] += dy[i] * x[i];
    });
}

/* dx = slope dy' + of_x (x - mean) + level */
template <typename T, int V, typename Factors, typename Levels>
__device__ __forceinline__ void store_gradient(const float (&slope)[V], const Factors &of_x, const Levels &level,
                                               float (&x)[V], const float (&dy)[V], char *to)
{
    each<V>([&](int i) { x[i] = fmaf(slope[i], dy[i], fmaf(of_x[i], x[i], level[i])); });
    store_vector<T, V>(to, 0, make_vector<T, V>(x));
}

/* ---- sums of a group --------------------------------------------------------------------------------------------- */

/* What a thread found in one of its groups, in `rows` rows: sums about a value of its own, and of squares. */
template <int V>
__device__ __forceinline__ moments<float> moments_of_side(const thread_place &place, int side, const float (&sum)[V],
                                                          const float (&square)[V], float rows)
{
    float all = 0.0f, squares = 0.0f;
    each<V>([&](int i) {
        const bool is_own = (i < place.split) == (side == 0);
        all += is_own ? sum[i] : 0.0f;
        squares += is_own ? square[i] : 0.0f;
    });
    const float count = rows * (float)(side == 0 ? place.split : V - place.split);
    const float mean = all * reciprocal(fmaxf(count, 1.0f));
    return {count, mean, squares - all * mean};
}

/* What threads found of a group: a value that each sums about, its mean less that, squares about the mean, and how many
 * values these are. Every lanes-th of `count` entries is this lane's, `held` of them read once. First the mean less
 * `base`, then squares about it, which cannot cancel. */
template <int held>
__device__ __forceinline__ float2 join_entries(const float4 *entries, int lane, int count, int lanes, float base,
                                               float values)
{
    float means[held], found[held], counts[held], mean = 0.0f, squares = 0.0f;
    each<held>([&](int k) {
        const int i = lane + k * lanes;
        float4 entry = make_float4(base, 0.0f, 0.0f, 0.0f);
        if (i < count)
            entry = entries[i];
        means[k] = (entry.x - base) + entry.y;
        found[k] = entry.z;
        counts[k] = entry.w;
        mean += counts[k] * means[k];
    });
#pragma unroll 1
    for (int i = lane + held * lanes; i < count; i += lanes) {
        const float4 entry = entries[i];
        mean += entry.w * ((entry.x - base) + entry.y);
    }
    mean = sum_few(mean, lanes) * reciprocal(values);
    each<held>([&](int k) {
        const float distance = means[k] - mean;
        squares += found[k] + counts[k] * distance * distance;
    });
#pragma unroll 1
    for (int i = lane + held * lanes; i < count; i += lanes) {
        const float4 entry = entries[i];
        const float distance = ((entry.x - base) + entry.y) - mean;
        squares += entry.z + entry.w * distance * distance;
    }
    return make_float2(mean, sum_few(squares, lanes));
}

/* What a thread found, for the block: of each of its groups by the slopes, and where parameters want gradients
 * (`gives`) of its channels, `factor` times. */
template <int V>
__device__ __forceinline__ void write_thread_sums(const normfuse_cuda_columns &a, const thread_place &place,
                                                  const float (&slope)[V], float (&first)[V], float (&second)[V],
                                                  float factor, bool gives, int channels, float2 *entries,
                                                  float *of_plain, float *of_centred)
{
    float2 found[2] = {};
    each<V>([&](int i) {
        const bool is_first = i < place.split;
        found[0].x += is_first ? slope[i] * first[i] : 0.0f;
        found[0].y += is_first ? slope[i] * second[i] : 0.0f;
        found[1].x += is_first ? 0.0f : slope[i] * first[i];
        found[1].y += is_first ? 0.0f : slope[i] * second[i];
    });
    entries[place.entry(a, 0)] = found[0];
    if (place.split < V)
        entries[place.entry(a, 1)] = found[1];
    if (gives) {
        const int at = place.beside * channels + place.column * V;
        each<V>([&](int i) {
            first[i] *= factor;
            second[i] *= factor;
        });
        write_values<V>(of_plain + at, first);
        write_values<V>(of_centred + at, second);
    }
}

/* Of four channels what every step-th row of the block found, one row after the other. */
__device__ __forceinline__ void sum_rows(const float4 *plain, const float4 *centred, int quad, int quads, int first,
                                         int rows, int step, float (&sum)[4], float (&product)[4])
{
#pragma unroll 4
    for (int row = first; row < rows; row += step) {
        const float4 one = plain[row * quads + quad], other = centred[row * quads + quad];
        sum[0] += one.x;
        sum[1] += one.y;
        sum[2] += one.z;
        sum[3] += one.w;
        product[0] += other.x;
        product[1] += other.y;
        product[2] += other.z;
        product[3] += other.w;
    }
}

#endif
