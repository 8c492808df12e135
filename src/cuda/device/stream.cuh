/* SPDX-License-Identifier: MIT
 *
 * stream.cuh - the body `stream`: tensors pass through slots of each thread in shared memory, which copies fill some vectors
 * ahead. A kernel reduces (sums go to memory, where a later kernel joins them), applies (from statistics that are given), or
 * does both at once where no statistics are to be found. walk.cuh says what a slab is, and how threads share it. */
#include "walk.cuh"

namespace {

/* ---- tensors through slots ---------------------------------------------------------------------------------------- */

/* Which tensors a walk reads. */
template <bool sums> constexpr bool reads_x = !backward || sums || has_statistics || activation != IDENTITY;
template <bool sums, bool writes>
using reading = passing<reads_x<sums>, backward != 0, pre_add && reads_x<sums>,
                        backward ? reads_post : post_add && writes, du && writes>;

template <typename Reading> struct reader : pipeline<Reading> {
    using pipeline<Reading>::at;

    /* work(cursor, vectors) for each vector that the thread has; `begun`: requests are made already. */
    template <typename Work> __device__ __forceinline__ void walk(cursor &following, Work work) const
    {
        cursor now(at);
        int turn = 0;
#pragma unroll 1
        while (!now.is_over()) {
            await_older_copies<D - 1>();
            vectors of = {};
            this->receive(of, turn);
            if (now.has)
                work(now, of);
            this->request(following, turn);
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
            this->request(following, turn);
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
    R of_bias[weight_values];
    weights.of_pre_bias[0].receive(of_bias, R(0));
    const pivots pivot(at, of_bias);
    sums_of_u sums;
    tensors.walk(following, [&](const cursor &of, const vectors &read) {
        R u[W];
        unpack_u(read.x, read.before, of_bias, u);
        if constexpr (stores_u)
            store(of, a.call.u, u);
        sums.add(at, of.first_column, [&](int j) { return u[j] - pivot.of[weight_value(j)]; });
    });
    if constexpr (!by_columns) {
        const moments of_slab = join_moments<lanes>(sums);
        if (at.exists && at.tx == 0 && at.ty == 0)
            store_triple(at, at.slab, 0, 1, (double)of_slab.count,
                         (double)pivot.of[0] + (double)of_slab.mean + (centre_has_bias ? (double)of_bias[0] : 0.0),
                         (double)of_slab.squares);
    } else {
        await_older_copies<0>();
        __syncthreads(); /* slots are read no more */
        const column_sums *const pieces_of_block = join_columns(at, dynamic, pivot, of_bias, sums).sums;
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
    weighed.halve();
    tensors.walk(following, [&](const cursor &of, const vectors &read) {
        R u[W], more[W];
        unpack_u(read.x, read.before, of_bias, u);
        if constexpr (stores_u)
            store(of, a.call.u, u);
        if constexpr (post_add)
            unpack<type, W>(read.behind, more);
        each<W>([&](int j) {
            const int i = weight_value(j);
            const R z = z_of(centre.of(u[j], 0, 0, j), weighed.by[0][i], weighed.offset[0][i], more, j);
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
    of.move_to_mean(centre);
    if constexpr (!by_columns) {
        const message<3> all = join_slab(of);
        if (at.exists && at.tx == 0 && at.ty == 0)
            store_pair(at, at.slab, 0, (double)all.numbers[0], (double)all.numbers[1], (double)all.numbers[2]);
    } else {
        await_older_copies<0>();
        __syncthreads(); /* slots are read no more */
        const column_sums *const columns = join_columns(at, dynamic, of);
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
                                              const reader<reading<sums, writes>> &tensors, cursor &following)
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
    sums_of_dz all;
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
            g = dz_of(g, distance, weighed.by[0][i] * half, weighed.offset[0][i] * half, weighed.p[0][i], more, j,
                      [&](R z) {
                          if constexpr (sums && sums_slopes)
                              all.of_slope[i] += z > R(0) || !counts ? R(0) : g * z;
                      });
            if constexpr (sums)
                all.add(i, g, distance, counts);
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
    const reader<reading<sums, writes>> tensors = {{at, reinterpret_cast<raw_vector *>(memory) + threadIdx.x}};
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
