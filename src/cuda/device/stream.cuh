/* SPDX-License-Identifier: MIT
 *
 * stream.cuh - the body `stream`: tensors pass through slots of each thread in shared memory, which copies fill some vectors
 * ahead. A kernel reduces (sums go to memory, where a later kernel joins them), applies (from statistics that are given), or
 * does both at once where no statistics are to be found. walk.cuh says what a slab is, and how threads share it. */
#include "walk.cuh"

namespace {

/* ---- tensors through slots ---------------------------------------------------------------------------------------- */

/* Which tensors a walk reads. */
template <bool sums, bool writes> struct reading {
    static constexpr bool x = !backward || sums || has_statistics || activation != IDENTITY;
    static constexpr bool dy = backward;
    static constexpr bool before = pre_add && x;
    static constexpr bool behind = backward ? reads_post : post_add && writes;
    static constexpr bool more = du && writes;
    static constexpr int of_dy = x, of_before = of_dy + dy, of_behind = of_before + before,
                         of_more = of_behind + behind, count = of_more + more;
};

struct vectors {
    raw_vector x, dy, before, behind, more;
};

template <typename Reading> struct pipeline {
    const place &at;
    raw_vector *const slots; /* [D][tensors][threads] */

    __device__ __forceinline__ pipeline(const place &at, char *dynamic)
        : at(at), slots(reinterpret_cast<raw_vector *>(dynamic) + threadIdx.x)
    {
    }
    __device__ __forceinline__ raw_vector *slot(int turn, int tensor) const
    {
        return slots + (turn * Reading::count + tensor) * threads;
    }
    __device__ __forceinline__ void request(const cursor &of, int turn) const
    {
        const normfuse_stream_arguments &a = at.a;
        const int64_t bytes = of.element * bytes_of(type);
        const auto one = [&](int tensor, const char *from) { copy_ahead(slot(turn, tensor), from + bytes, of.has); };
        if constexpr (Reading::x)
            one(0, a.x);
        if constexpr (Reading::dy)
            one(Reading::of_dy, a.dy);
        if constexpr (Reading::before)
            one(Reading::of_before, a.call.pre_add);
        if constexpr (Reading::behind)
            one(Reading::of_behind, a.call.post_add);
        if constexpr (Reading::more)
            one(Reading::of_more, a.call.du);
    }
    __device__ __forceinline__ vectors receive(int turn) const
    {
        vectors of = {};
        if constexpr (Reading::x)
            of.x = *slot(turn, 0);
        if constexpr (Reading::dy)
            of.dy = *slot(turn, Reading::of_dy);
        if constexpr (Reading::before)
            of.before = *slot(turn, Reading::of_before);
        if constexpr (Reading::behind)
            of.behind = *slot(turn, Reading::of_behind);
        if constexpr (Reading::more)
            of.more = *slot(turn, Reading::of_more);
        return of;
    }
    /* work(cursor, vectors) for each vector that the thread has; `begun`: requests are made already. */
    template <typename Work> __device__ __forceinline__ void walk(cursor &following, Work work) const
    {
        cursor now(at);
        int turn = 0;
#pragma unroll 1
        while (!now.is_over()) {
            await_older_copies<D - 1>();
            const vectors of = receive(turn);
            if (now.has)
                work(now, of);
            request(following, turn);
            commit_copies();
            following.next();
            now.next();
            turn = turn + 1 == D ? 0 : turn + 1;
        }
    }
    __device__ __forceinline__ void begin(cursor &following) const
    {
#pragma unroll 1
        for (int turn = 0; turn < D; turn++) {
            request(following, turn);
            commit_copies();
            following.next();
        }
    }
};

/* ---- forward ------------------------------------------------------------------------------------------------------ */

template <typename Tensors>
__device__ __forceinline__ void reduce_forward(const place &at, char *dynamic, const requested_weights &weights,
                                               const Tensors &tensors, cursor &following)
{
    const normfuse_stream_arguments &a = at.a;
    constexpr int sums = by_columns ? W : 2;
    R of_bias[weight_values];
    weights.of_pre_bias[0].receive(of_bias, R(0));
    const pivots pivot(at, of_bias);
    R first[sums], second[sums];
    int count = 0;
    each<sums>([&](int i) { first[i] = second[i] = R(0); });
    tensors.walk(following, [&](const cursor &of, const vectors &read) {
        R u[W];
        unpack_u(read.x, read.before, of_bias, u);
        if constexpr (stores_u)
            store(of, a.call.u, u);
        if constexpr (by_columns)
            count++;
        each<W>([&](int j) {
            const bool counts = of.at.has_element(of.first_column, j);
            const R distance = counts ? u[j] - pivot.of[weight_value(j)] : R(0);
            first[j % sums] += distance;
            second[j % sums] = fma(distance, distance, second[j % sums]);
            if constexpr (!by_columns)
                count += counts;
        });
    });
    if constexpr (!by_columns) {
        const moments of_slab = join_moments<lanes>(first, second, count);
        if (at.exists && at.tx == 0 && at.ty == 0)
            store_triple(at, at.slab, 0, 1, (double)of_slab.count,
                         (double)pivot.of[0] + (double)of_slab.mean + (centre_has_bias ? (double)of_bias[0] : 0.0),
                         (double)of_slab.squares);
    } else {
        await_older_copies<0>();
        __syncthreads(); /* slots are read no more */
        const column_sums *const pieces_of_block = join_columns(at, dynamic, pivot, of_bias, first, second, count).sums;
        each_subgroup(at, a.subgroup, [&](int column, int c, int copy) {
            double all = 0.0, mean_of = 0.0, squares = 0.0;
            const double base = pieces_of_block[column / piece].of[1];
            for (int k = 0; k < a.joined_rows; k++)
                for (int i = 0; i < a.subgroup / piece; i++) {
                    const column_sums &of = pieces_of_block[(column + k * a.call.channels) / piece + i];
                    all += of.of[0];
                    mean_of += of.of[0] > 0.0 ? of.of[0] * (of.of[1] - base) : 0.0;
                }
            mean_of = all > 0.0 ? (double)((R)mean_of / (R)all) : 0.0;
            for (int k = 0; k < a.joined_rows; k++)
                for (int i = 0; i < a.subgroup / piece; i++) {
                    const column_sums &of = pieces_of_block[(column + k * a.call.channels) / piece + i];
                    const double apart = of.of[1] - base - mean_of;
                    squares += of.of[0] > 0.0 ? of.of[2] + of.of[0] * apart * apart : 0.0;
                }
            store_triple(at, c, copy, a.subgroup, all, base + mean_of, squares);
        });
    }
}

/* ---- given statistics ------------------------------------------------------------------------------------------- */

/* Requests ahead of the tensors: weights, mean and rstd of each set; a backward's totals. */
struct requested_statistics {
    requested<mean, weight_values, packed_statistics> of_mean;
    requested<rstd, weight_values, packed_statistics> of_rstd;
    double found[weight_values][2];
    raw<F64, 2> totals[weight_values];

    __device__ __forceinline__ void request(const place &at)
    {
        if constexpr (!has_statistics)
            return;
        const normfuse_stream_arguments &a = at.a;
        const int sample = a.sets_are_of_samples ? at.sample : 0;
        const auto group = [&](int i) { return at.group_of(at.channel(0, i)); };
        if constexpr (backward) {
            of_mean.request(a.call.mean, sample, group, at.exists);
            of_rstd.request(a.call.rstd, sample, group, at.exists);
        }
        each<weight_values>([&](int i) {
            const int64_t set = at.exists ? at.set_of(at.channel(0, i)) : 0;
            if constexpr (!backward && applies)
                each<2>([&](int k) { found[i][k] = a.call.statistics[set * 3 + k]; });
            if constexpr (backward && applies)
                load_shared_by_many(at.exists, totals[i], reinterpret_cast<const char *>(a.totals + set * 2));
        });
    }
    __device__ __forceinline__ void receive(const requested_weights &weights, const normfuse_call_arguments &call,
                                            centres &centre, rstds &rstd_of) const
    {
        if constexpr (!has_statistics) {
            receive_given(weights, call, centre, rstd_of);
        } else {
            double mean_of[weight_values];
            R of_bias[weight_values];
            weights.of_pre_bias[0].receive(of_bias, R(0));
            if constexpr (backward) {
                of_mean.receive(mean_of, 0.0);
                of_rstd.receive(rstd_of[0], R(1));
            } else {
                each<weight_values>([&](int i) {
                    mean_of[i] = found[i][0];
                    rstd_of[0][i] = (R)found[i][1];
                });
            }
            each<weight_values>([&](int i) { centre.set(0, i, mean_of[i], centre_has_bias ? of_bias[i] : R(0)); });
        }
    }
};

template <typename Tensors>
__device__ __forceinline__ void apply_forward(const place &at, const requested_weights &weights,
                                              const requested_statistics &given, const Tensors &tensors,
                                              cursor &following)
{
    const normfuse_stream_arguments &a = at.a;
    centres centre;
    rstds rstd_of;
    coefficients weighed;
    given.receive(weights, a.call, centre, rstd_of);
    weigh(weights, centre, rstd_of, a.call, weighed);
    R of_bias[weight_values];
    weights.of_pre_bias[0].receive(of_bias, R(0));
    constexpr R half = halves_z ? R(0.5) : R(1);
    each<weight_values>([&](int i) {
        weighed.by[0][i] *= half;
        weighed.offset[0][i] *= half;
    });
    tensors.walk(following, [&](const cursor &of, const vectors &read) {
        R u[W], more[W];
        unpack_u(read.x, read.before, of_bias, u);
        if constexpr (stores_u)
            store(of, a.call.u, u);
        if constexpr (post_add)
            unpack<type, W>(read.behind, more);
        each<W>([&](int j) {
            const int i = weight_value(j);
            R z = fma(centre.of(u[j], 0, 0, j), weighed.by[0][i], weighed.offset[0][i]);
            if constexpr (post_add)
                z = halves_z ? fma(more[j], R(0.5), z) : z + more[j];
            u[j] = activate(z, weighed.p[0][i]);
        });
        store(of, a.out, u);
    });
}

/* ---- backward ----------------------------------------------------------------------------------------------------- */

/* The threads' sums become pairs in memory. */
template <int = 0>
__device__ __forceinline__ void store_sums(const place &at, char *dynamic, const centres &centre, sums_of_dz &of)
{
    const normfuse_stream_arguments &a = at.a;
    constexpr int numbers = sums_slopes ? 3 : 2;
    /* About the mean itself. */
    each<weight_values>([&](int i) { of.centred[i] = fma(-centre.left(0, i), of.plain[i], of.centred[i]); });
    if constexpr (!by_columns) {
        __shared__ R of_warps[threads / 32 * numbers];
        R all[numbers];
        all[0] = of.plain[0];
        all[1] = of.centred[0];
        if constexpr (sums_slopes)
            all[2] = of.of_slope[0];
        sum_threads<numbers, lanes>(all, of_warps);
        if (at.exists && at.tx == 0 && at.ty == 0)
            store_pair(at, at.slab, 0, (double)all[0], (double)all[1], sums_slopes ? (double)all[numbers - 1] : 0.0);
    } else {
        await_older_copies<0>();
        __syncthreads(); /* slots are read no more */
        const column_sums *const columns = join_columns<numbers>(at, dynamic, of);
        each_subgroup(at, 1, [&](int column, int c, int copy) {
            double all[3] = {0.0, 0.0, 0.0};
            for (int k = 0; k < a.joined_rows; k++)
                each<3>([&](int i) { all[i] += columns[column + k * a.call.channels].of[i]; });
            store_pair(at, c, copy, all[0], all[1], all[2]);
        });
    }
}

template <bool sums, bool writes>
__device__ __forceinline__ void walk_backward(const place &at, char *dynamic, const requested_weights &weights,
                                              const requested_statistics &given,
                                              const pipeline<reading<sums, writes>> &tensors, cursor &following)
{
    const normfuse_stream_arguments &a = at.a;
    using read_of = reading<sums, writes>;
    centres centre;
    rstds rstd_of;
    coefficients weighed;
    given.receive(weights, a.call, centre, rstd_of);
    weigh(weights, centre, rstd_of, a.call, weighed);
    /* dx = by dz + by_x (u - mean) + level */
    R by_x[weight_values], level[weight_values];
    if constexpr (writes && has_statistics) {
        const R portion = sizeof(R) == 8 ? R(1.0 / a.set_values) : (R)a.call.share;
        each<weight_values>([&](int i) {
            double total[2];
            unpack<F64, 2>(given.totals[i], total);
            const R plain = (R)total[0], centred = (R)total[1];
            by_x[i] = -(centred * rstd_of[0][i]) * (rstd_of[0][i] * portion);
            level[i] = -plain * portion - by_x[i] * centre.left(0, i);
        });
    }
    R of_bias[weight_values];
    weights.of_pre_bias[0].receive(of_bias, R(0));
    constexpr R half = halves_z ? R(0.5) : R(1);
    sums_of_dz all;
    each<weight_values>([&](int i) { all.plain[i] = all.centred[i] = all.of_slope[i] = R(0); });
    tensors.walk(following, [&](const cursor &of, const vectors &read) {
        R u[W], dz[W], more[W];
        unpack<type, W>(read.dy, dz);
        if constexpr (read_of::x)
            unpack_u(read.x, read.before, of_bias, u);
        if constexpr (read_of::behind)
            unpack<type, W>(read.behind, more);
        each<W>([&](int j) {
            const int i = weight_value(j);
            const bool counts = of.at.has_element(of.first_column, j);
            R distance = R(0);
            if constexpr (read_of::x)
                distance = centre.of(u[j], 0, 0, j);
            R &g = dz[j];
            if constexpr (activation != IDENTITY) {
                R z;
                if constexpr (read_of::behind && from_y) {
                    z = more[j];
                } else {
                    z = fma(distance, weighed.by[0][i] * half, weighed.offset[0][i] * half);
                    if constexpr (read_of::behind)
                        z = halves_z ? fma(more[j], R(0.5), z) : z + more[j];
                }
                if constexpr (sums && sums_slopes)
                    all.of_slope[i] += z > R(0) || !counts ? R(0) : g * z;
                g = differentiate(g, z, weighed.p[0][i]);
                if constexpr (halves_z)
                    g *= R(0.5);
            }
            if constexpr (sums) {
                all.plain[i] += counts ? g : R(0);
                all.centred[i] = counts ? fma(g, distance, all.centred[i]) : all.centred[i];
            }
            u[j] = distance;
        });
        if constexpr (dpost_add)
            store(of, a.call.dpost_add, dz);
        if constexpr (writes && writes_out) {
            if constexpr (read_of::more)
                unpack<type, W>(read.more, more);
            each<W>([&](int j) {
                const int i = weight_value(j);
                R value = weighed.by[0][i] * dz[j];
                if constexpr (has_statistics)
                    value = fma(weighed.by[0][i], dz[j], fma(by_x[i], u[j], level[i]));
                if constexpr (read_of::more)
                    value += more[j];
                dz[j] = value;
            });
            store(of, a.out, dz);
        }
    });
    if constexpr (sums)
        store_sums(at, dynamic, centre, all);
}

} // namespace

/* ---- the kernel --------------------------------------------------------------------------------------------------- */

extern "C" __global__ void __launch_bounds__(threads, resident)
    NORMFUSE_KERNEL(const __grid_constant__ normfuse_stream_arguments a)
{
    NORMFUSE_DYNAMIC_SHARED(dynamic);
    follow_kernel();
    char *const memory = reinterpret_cast<char *>(dynamic);
    const place at(a, a.backwards ? (int)(gridDim.x - 1 - blockIdx.x) : (int)blockIdx.x);
    constexpr bool sums = reduces != 0, writes = applies != 0;
    const pipeline<reading<sums, writes>> tensors(at, memory);
    cursor following(at);
    tensors.begin(following);
    requested_weights weights;
    requested_statistics given;
    weights.request_of_channels(at, at.sample);
    weights.request_of_sample(at, at.sample, at.exists);
    given.request(at);
    if constexpr (backward)
        walk_backward<sums, writes>(at, memory, weights, given, tensors, following);
    else if constexpr (sums)
        reduce_forward(at, memory, weights, tensors, following);
    else
        apply_forward(at, weights, given, tensors, following);
}
