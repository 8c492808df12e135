/* SPDX-License-Identifier: MIT
 *
 * columns_held.cuh - what the kernels over columns with a file of their own have in common: a thread requests the
 * parameters of its own channels, whole vectors of them, while its data are on their way; its vectors of a tensor in
 * registers; and what becomes of the vectors of a sample, wherever they are held. */
#ifndef NORMFUSE_CUDA_COLUMNS_HELD_CUH
#define NORMFUSE_CUDA_COLUMNS_HELD_CUH

#include "columns.cuh"

/* Where a thread is in its block: the same channels in each of its rows. */
struct thread_place {
    int beside, column;   /* its first row and its vector of a row */
    int groups[2], split; /* of the block: that of the thread's first `split` channels, and of the others */

    __device__ __forceinline__ void find(const normfuse_cuda_columns &a)
    {
        beside = divide((int)threadIdx.x, a.by_width);
        column = (int)threadIdx.x - beside * a.width;
    }
    __device__ __forceinline__ bool has_rows(const normfuse_cuda_columns &a) const
    {
        return beside < a.at_once;
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

/* As load_parameter(), of adjacent channels. */
template <int V> __device__ __forceinline__ channel_words<V> request_channels(const char *data, int c, int type)
{
    using half = typename half_type<V>::type;
    const bool singles = type == NORMFUSE_F32;
    const half *const first = reinterpret_cast<const half *>(data + c * (singles ? 4 : 2));
    const half *const second = first + (singles ? 1 : 0);
    return {{__ldca(first), __ldca(second)}};
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

/* weight (1 + scale) and bias (1 + scale) + shift of the thread's channels; not `modulated`: weight and bias. */
template <int V, bool modulated = true> struct channel_parameters {
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
    __device__ __forceinline__ void receive(const normfuse_cuda_columns &a, float (&slope)[V], float (&offset)[V]) const
    {
        each<V>([&](int i) {
            slope[i] = 1.0f;
            offset[i] = 0.0f;
        });
        if (a.weight)
            receive_channels<V>(weight, type_of(a, COLUMNS_WEIGHT), slope);
        if (a.bias)
            receive_channels<V>(bias, type_of(a, COLUMNS_BIAS), offset);
        float more[V];
        if (modulated && a.scale) {
            receive_channels<V>(scale, type_of(a, COLUMNS_SCALE), more);
            each<V>([&](int i) {
                slope[i] *= 1.0f + more[i];
                offset[i] *= 1.0f + more[i];
            });
        }
        if (modulated && a.shift) {
            receive_channels<V>(shift, type_of(a, COLUMNS_SHIFT), more);
            each<V>([&](int i) { offset[i] += more[i]; });
        }
    }
};

/* What a holder adds to a vector, and makes of it beside y or dx: nothing. */
struct no_additions {
    template <typename T, int V> __device__ __forceinline__ const uint4 &with_x(const uint4 &vector) const
    {
        return vector;
    }
    template <typename T, int V> __device__ __forceinline__ nothing_added after(float) const
    {
        return {};
    }
    template <typename T, int V> __device__ __forceinline__ void keep_dz(const float (&)[V]) const
    {
    }
    template <typename T, int V> __device__ __forceinline__ void give_dz(const float (&)[V], float) const
    {
    }
    template <typename T, int V> __device__ __forceinline__ void add_du(float (&)[V]) const
    {
    }
};

/* Up to K vectors of x and, of two tensors, of dy, of every at_once-th row. */
template <int K, int tensors> struct held_rows {
    const normfuse_cuda_columns &a;
    int left;            /* rows from the thread's first on; not above 0: the thread has none */
    const unsigned at;   /* bytes from the sample's beginning to the thread's first vector */
    const unsigned step; /* from one row of the thread to the next */
    const float act_param;
    uint4 held[K][tensors];

    __device__ __forceinline__ held_rows(const normfuse_cuda_columns &a, int left, unsigned at)
        : a(a), left(left), at(at), step((unsigned)a.at_once * a.row_bytes), act_param(a.act_param)
    {
    }
    /* Of sample n. */
    __device__ __forceinline__ void request(int n)
    {
        const char *x = a.x + n * a.batch_bytes + at, *dy = a.dy + n * a.batch_bytes + at;
        walk([&](int k) {
            NORMFUSE_LOAD_UINT4(held[k][0], x);
            x += step;
            if (tensors > 1) {
                NORMFUSE_LOAD_UINT4(held[k][tensors - 1], dy);
                dy += step;
            }
        });
    }
    /* work(k) */
    template <typename Work> __device__ __forceinline__ void walk(Work work) const
    {
        walk_rows<0, K>(left, a.at_once, work);
    }
    template <typename Work> __device__ __forceinline__ void choose_derivative(Work work) const
    {
        choose_activation<false>(a.activation, work);
    }
    /* The same of results: holders may have what the derivative made. */
    template <typename Work> __device__ __forceinline__ void choose_gradient(Work work) const
    {
        choose_derivative(work);
    }
    /* work(vectors, first, second, additions), which adds to both. */
    template <int V, typename Work>
    __device__ __forceinline__ void sum(float (&first)[V], float (&second)[V], Work work) const
    {
        walk([&](int k) { work(held[k], first, second, no_additions()); });
    }
    /* Vectors are held, not what the sums made of them. */
    __device__ __forceinline__ void forget()
    {
        each<K>([&](int k) { each<tensors>([&](int i) { compiler_barrier(held[k][i]); }); });
    }
    /* work(vectors, place, additions) for the sample from `to` on. A pipeline has to know whether it is
     * the last one. */
    template <typename Work> __device__ __forceinline__ void store(char *to, bool /* is_last */, Work work) const
    {
        to += at;
        walk([&](int k) {
            work(held[k], to, no_additions());
            to += step;
        });
    }
};

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

/* SiLU and what takes as much of z has half of it, and its coefficients are half as large. */
template <typename T> __device__ __forceinline__ float factor_of(int activation)
{
    return takes_half<sizeof(T) == 2>(activation) ? 0.5f : 1.0f;
}

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

/* What dx takes of x - mean and what else, of a group's weighted sums of dy' and of dy' (x - mean). */
__device__ __forceinline__ float2 gradient_of_group(float sum, float product, float rest, float rstd, float share)
{
    product -= rest * sum;
    const float of_x = -(product * rstd) * (rstd * share);
    return make_float2(of_x, -sum * share - of_x * rest);
}

/* dx = slope dy' + of_x (x - mean) + level */
template <typename T, int V, typename Factors, typename Levels, typename Additions = no_additions>
__device__ __forceinline__ void store_gradient(const float (&slope)[V], const Factors &of_x, const Levels &level,
                                               float (&x)[V], const float (&dy)[V], char *to, Additions additions = {})
{
    each<V>([&](int i) { x[i] = fmaf(slope[i], dy[i], fmaf(of_x[i], x[i], level[i])); });
    additions.template add_du<T, V>(x);
    store_vector<T, V>(to, 0, make_vector<T, V>(x));
}

/* y of what a holder has of a sample: held_rows, or a pipeline's tile_consumer. Results are stored from `to` on. */
template <typename T, int V, typename Holder, typename Parameters, typename Values>
__device__ __forceinline__ void store_results(const normfuse_cuda_columns &a, Holder &holder,
                                              const Parameters &parameters, const Values &means, const Values &rests,
                                              const Values &rstds, char *to, bool is_last)
{
    float slope[V], offset[V];
    parameters.receive(a, slope, offset);
    const float factor = factor_of<T>(a.activation);
    centre<V>(slope, offset, rests, rstds, factor);
    holder.forget();
    choose_activation<true>(a.activation, [&](auto chosen) {
        holder.store(to, is_last, [&](const uint4 *vectors, char *to_vector, auto additions) {
            store_vector<T, V>(to_vector, 0,
                               result_of<T, V>(chosen, a.activation, a.act_param, *vectors, means, slope, offset,
                                               additions.template after<T, V>(factor)));
        });
    });
}

/* dx of what a holder has of a sample. join(slope, first, second, factor, of_x, level) makes of the thread's sums of
 * dy' and of dy' (x - mean) what dx takes of x - mean and what else; false: the thread has none to store. */
template <typename T, int V, typename Holder, typename Parameters, typename Values, typename Join>
__device__ __forceinline__ void store_gradients(const normfuse_cuda_columns &a, Holder &holder,
                                                const Parameters &parameters, const Values &means, const Values &rests,
                                                const Values &rstds, char *to, bool is_last, Join join)
{
    float slope[V], offset[V], first[V] = {}, second[V] = {};
    parameters.receive(a, slope, offset);
    const float factor = factor_of<T>(a.activation);
    centre<V>(slope, offset, rests, rstds, factor);
    const channel_derivative<T, V, Values> differentiate = {a.activation, holder.act_param, means, slope, offset};
    holder.choose_derivative([&](auto chosen) {
        holder.sum(first, second, [&](const uint4 *vectors, float (&of_dy)[V], float (&of_both)[V], auto additions) {
            float x[V], dy[V];
            differentiate(chosen, additions.template with_x<T, V>(vectors[0]), vectors[1], x, dy, 0,
                          additions.template after<T, V>(factor));
            add_products(x, dy, of_dy, of_both);
            additions.template keep_dz<T, V>(dy);
        });
    });
    Values of_x, level;
    if (!join(slope, first, second, factor, of_x, level))
        return;
    holder.forget();
    holder.choose_gradient([&](auto chosen) {
        holder.store(to, is_last, [&](const uint4 *vectors, char *to_vector, auto additions) {
            float x[V], dy[V];
            differentiate(chosen, vectors[0], vectors[1], x, dy, 0, additions.template after<T, V>(factor));
            additions.template give_dz<T, V>(dy, factor);
            store_gradient<T, V>(slope, of_x, level, x, dy, to_vector, additions);
        });
    });
}

/* ---- sums of a group --------------------------------------------------------------------------------------------- */

/* As append in join.cuh, by the hardware's reciprocal. */
__device__ __forceinline__ void append_near(moments<float> &to, const moments<float> &next)
{
    const float count = to.count + next.count, share = next.count * reciprocal(fmaxf(count, 1.0f));
    const float distance = next.mean - to.mean;
    to.mean += distance * share;
    to.squares += next.squares + distance * distance * to.count * share;
    to.count = count;
}

/* A thread's sums about values of its own, the first of its first group and the last of the other, and what these came
 * to so far. */
template <typename T, int V> struct side_moments {
    const thread_place &place;
    side_values about;
    float sum[V] = {}, square[V] = {};
    moments<float> found[2] = {};
    int rows = 0;

    __device__ __forceinline__ void begin(const uint4 &vector)
    {
        float value[V];
        unpack<T, V>(vector, value);
        about.of[0] = value[0];
        about.of[1] = value[V - 1];
    }
    __device__ __forceinline__ void add(const uint4 &vector)
    {
        rows++;
        add_squares<T, V>(vector, about, sum, square);
    }
    /* Of the sums in so many rows. */
    __device__ __forceinline__ moments<float> of_side(int side, float rows) const
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
    __device__ __forceinline__ void fold()
    {
        each<2>([&](int side) { append_near(found[side], of_side(side, (float)rows)); });
        each<V>([&](int i) { sum[i] = square[i] = 0.0f; });
        rows = 0;
    }
    __device__ __forceinline__ float4 entry(int side, const moments<float> &of) const
    {
        return make_float4(about.of[side], of.mean, of.squares, of.count);
    }
};

/* What threads found of a group: a value that each sums about, its mean less that, squares about the mean, and how many
 * values these are; they become the mean less `base`, and squares about it, of so many `values`. */
template <int held>
__device__ __forceinline__ float2 join_entries(const float4 *entries, int lane, int count, int lanes, float base,
                                               float values)
{
    return join_means<held, 1>(
        count, lane, lanes,
        [&](int i) {
            const float4 entry = entries[i];
            return make_float3((entry.x - base) + entry.y, entry.z, entry.w);
        },
        [](const float3 &part, int) { return part.z; }, [&](float sum) { return sum * reciprocal(values); });
}

/* In shared memory: two sums of each thread in a group, and of each row of threads and channel, one after the other. */
struct block_sums {
    float2 *entries;
    float *plain, *centred;
};

/* What a thread found, for the block: of each of its groups by the slopes, and where parameters want gradients
 * (`gives`) of its channels, `factor` times. */
template <int V>
__device__ __forceinline__ void write_thread_sums(const normfuse_cuda_columns &a, const thread_place &place,
                                                  const float (&slope)[V], float (&first)[V], float (&second)[V],
                                                  float factor, bool gives, const block_sums &sums)
{
    float2 found[2] = {};
    each<V>([&](int i) {
        const bool is_first = i < place.split;
        found[0].x += is_first ? slope[i] * first[i] : 0.0f;
        found[0].y += is_first ? slope[i] * second[i] : 0.0f;
        found[1].x += is_first ? 0.0f : slope[i] * first[i];
        found[1].y += is_first ? 0.0f : slope[i] * second[i];
    });
    sums.entries[place.entry(a, 0)] = found[0];
    if (place.split < V)
        sums.entries[place.entry(a, 1)] = found[1];
    if (gives) {
        const int at = (place.beside * a.width + place.column) * V;
        multiply(first, second, factor);
        write_values<V>(sums.plain + at, first);
        write_values<V>(sums.centred + at, second);
    }
}

/* Of four channels what every step-th row of the block found, one row after the other. */
__device__ __forceinline__ void sum_rows(const block_sums &sums, int quad, int quads, int first, int rows, int step,
                                         float (&sum)[4], float (&product)[4])
{
#pragma unroll 4
    for (int row = first; row < rows; row += step) {
        float one[4], other[4];
        read_values<4>(sums.plain + 4 * (row * quads + quad), one);
        read_values<4>(sums.centred + 4 * (row * quads + quad), other);
        each<4>([&](int i) {
            sum[i] += one[i];
            product[i] += other[i];
        });
    }
}

#endif
