/* SPDX-License-Identifier: MIT
 *
 * columns_vectors.cuh - how threads of split and additions over columns request their vectors, and what a block knows
 * of its channels; both directions. */
#ifndef NORMFUSE_CUDA_COLUMNS_VECTORS_CUH
#define NORMFUSE_CUDA_COLUMNS_VECTORS_CUH

#include "additions.cuh"
#include "columns.cuh"

/* Calls work(slot) for each of the thread's `count` rows: `shared` slots first, which are negative, then K that are
 * known when compiling. What a thread does not have it does not walk through. */
template <int K, typename Work> __device__ __forceinline__ void walk(int count, int shared, Work work)
{
#pragma unroll 1
    for (int k = 0; k < min(shared, count); k++)
        work(-1 - k);
    ::walk_rows<0, K>(count - shared, 1, work);
}

/* A thread's vectors of so many tensors: K of each in registers, and behind them what slots of shared memory hold,
 * which are negative. Where the kernel `adds`, what it adds passes behind the slots. */
template <typename T, int V, int K, int tensors, bool adds> struct column_vectors {
    using cursors = column_cursor<T, V>[tensors];
    const normfuse_cuda_problem &p;
    const int threads = (int)blockDim.x;
    const int slots; /* of shared memory */
    passing_tensors<adds> passing;
    int64_t begin = 0; /* of what adds: bytes from a tensor's first element to the thread's first vector */
    row_vectors<tensors> held[K > 0 ? K : 1];

    __device__ __forceinline__ explicit column_vectors(const normfuse_cuda_arguments &a)
        : p(a.problem), slots(a.geometry.held_shared), passing(&shared(slots, 0), a.geometry.passing)
    {
    }
    __device__ __forceinline__ uint4 &shared(int slot, int tensor) const
    {
        NORMFUSE_DYNAMIC_SHARED(dynamic);
        return dynamic[(tensors * slot + tensor) * threads + (int)threadIdx.x];
    }
    __device__ __forceinline__ uint4 *behind() const
    {
        NORMFUSE_DYNAMIC_SHARED(dynamic);
        return dynamic + (tensors * slots + (adds ? passing.ahead * passing.tensors : 0)) * threads;
    }
    /* What passes; passing_tensors::request says how. */
    __device__ __forceinline__ auto copy_passing(const column_place &place, int count) const
    {
        return [at = begin, step = place.step, count](int i, auto one) {
            const int64_t bytes = at + (unsigned)i * step;
            if (i < count)
                one([&](uint4 *to, const char *data) { copy_ahead(to, data, bytes); });
        };
    }
    __device__ __forceinline__ void pass(const normfuse_view &one, const normfuse_view &other,
                                         const column_place &place, int count)
    {
        if constexpr (adds)
            passing.open(one.data, other.data, copy_passing(place, count));
    }
    /* Part `h` of the `which`-th tensor that passes. */
    template <int H> __device__ __forceinline__ void read_added(int which, int h, float (&values)[H]) const
    {
        unpack_part<T, V>(passing.at(which), h, values);
    }
    /* Backward: where dz is exact in the tensors' type it takes the place of dy, and results do not read post_add again;
     * they read du, behind it. */
    __device__ __forceinline__ bool reads_post() const
    {
        return adds && p.post_add().data && p.activation != NORMFUSE_IDENTITY;
    }
    __device__ __forceinline__ bool keeps_dz() const
    {
        return reads_post() && normfuse_is_dz_exact(sizeof(T), p.activation);
    }
    __device__ __forceinline__ void pass_to_gradients(const column_place &place, int count)
    {
        const normfuse_view du = p.dx().data ? p.du() : normfuse_view();
        const bool rereads = reads_post() && !keeps_dz();
        pass(rereads ? p.post_add() : du, rereads ? du : normfuse_view(), place, count);
    }
    template <int H> __device__ __forceinline__ void add_du(int h, float (&x)[H]) const
    {
        if (!adds || !p.du().data)
            return;
        float more[H];
        read_added(reads_post() && !keeps_dz() ? 1 : 0, h, more);
        each<H>([&](int i) { x[i] += more[i]; });
    }
    /* x becomes x with pre_add, rounded. */
    __device__ __forceinline__ void add_to_x(const column_place &place, int count)
    {
        if (!p.pre_add().data)
            return;
        const auto copy = copy_passing(place, count);
#pragma unroll 1
        for (int slot = 0; slot < count; slot++) {
            float value[V], more[V];
            passing.await();
            unpack<T, V>(shared(slot, 0), value);
            read_added(0, 0, more);
            passing.advance(slot, copy);
            each<V>([&](int i) { value[i] += more[i]; });
            shared(slot, 0) = make_vector<T, V>(value);
        }
    }
    /* What is added before the activation, `factor` times, or y in its place. */
    struct added_after {
        const column_vectors &of;
        float factor;

        template <int H> __device__ __forceinline__ void operator()(float (&z)[H], int h) const
        {
            if constexpr (adds) {
                if (!of.p.post_add().data)
                    return;
                float more[H];
                of.read_added(0, h, more);
                const bool replaces = tensors > 1 && of.p.from_y();
                each<H>([&](int i) { z[i] = replaces ? more[i] : fmaf(more[i], factor, z[i]); });
            }
        }
    };
    __device__ __forceinline__ row_vectors<tensors> read_shared(int slot) const
    {
        row_vectors<tensors> found;
        each<tensors>([&](int i) { found.of[i] = shared(slot, i); });
        return found;
    }
    __device__ __forceinline__ row_vectors<tensors> read(int slot) const
    {
        return slot < 0 ? read_shared(-1 - slot) : held[slot < 0 ? 0 : slot];
    }
    /* What was held is not what the sums made of it. */
    __device__ __forceinline__ void forget()
    {
        each<K>([&](int k) { each<tensors>([&](int i) { compiler_barrier(held[k].of[i]); }); });
    }
    __device__ __forceinline__ void load(cursors &from, const column_place &place, int slot)
    {
        each<tensors>([&](int i) {
            if (K == 0 || slot < 0)
                copy_once(&shared(-1 - slot, i), from[i].base + from[i].at, 0);
            else
                held[slot < 0 ? 0 : slot].of[i] = from[i].load();
        });
        each<tensors>([&](int i) { from[i].advance(place); });
    }
    /* work(vectors, slot) for each row of the thread. */
    template <typename Work>
    __device__ __forceinline__ void walk_rows(const column_place &place, int count, int shared_slots, Work work)
    {
        if constexpr (adds) {
            const auto copy = copy_passing(place, count);
#pragma unroll 1
            for (int slot = 0; slot < count; slot++) {
                passing.await();
                work(read_shared(slot), slot);
                passing.advance(slot, copy);
            }
        } else {
            walk<K>(count, shared_slots, [&](int slot) { work(read(slot), slot); });
        }
    }
    __device__ __forceinline__ void request(cursors &from, const column_place &place, int count, int shared_slots,
                                            bool is_loaded)
    {
        if (is_loaded)
            return;
        begin = from[0].base + from[0].at - p.x().data;
        walk<K>(count, shared_slots, [&](int slot) { load(from, place, slot); });
    }
};

/* The channels and norm groups of a block, and what shared memory has of them, in this order behind the vectors. What
 * follows from the geometry is found here, not ahead of all loops and loads. Of rows that are stacked (kernels.h) what is
 * a channel here is a column; parameters and sums are those of its channel, which by_spans finds. */
struct block_channels {
    const normfuse_cuda_arguments &a;
    const normfuse_cuda_problem &p;
    const normfuse_cuda_geometry &g;
    const block_turns &block;
    const column_place &place;
    int n, step, width, at_once, group_bits, subvector_bits;
    int channels, first_channel, here, groups, groups_here;
    group_statistics<float> *of_groups;
    channel_values of_channels;
    float2 *of_parts; /* of each block of a cluster the pair of a group */

    __device__ __forceinline__ block_channels(const normfuse_cuda_arguments &a, const block_turns &block,
                                              const column_place &place, int V)
        : a(a), p(a.problem), g(a.geometry), block(block), place(place), n(place.n), step((int)blockDim.x),
          width(g.width), at_once(place.rows_at_once), group_bits(g.group_bits), subvector_bits(g.subvector_bits)
    {
        find_again(width, at_once, group_bits, subvector_bits, n, step);
        channels = width * V;
        first_channel = place.first_channel;
        here = min(channels, (int)p.c * (int)g.by_spans.divisor - first_channel);
        groups = divide(channels, g.by_group);
        groups_here = divide(here, g.by_group);
    }
    template <typename... Numbers> __device__ __forceinline__ static void find_again(Numbers &...numbers)
    {
        (compiler_barrier(numbers), ...);
    }
    /* hold(i, request(i)) for each group here, of which a thread requests its first ahead of meanwhile(). */
    template <typename Request, typename Meanwhile, typename Hold>
    __device__ __forceinline__ void request_groups(Request request, Meanwhile meanwhile, Hold hold) const
    {
        auto first = decltype(request(0))();
        if ((int)threadIdx.x < groups_here)
            first = request((int)threadIdx.x);
        meanwhile();
        if ((int)threadIdx.x < groups_here)
            hold((int)threadIdx.x, first);
#pragma unroll 1
        for (int i = (int)threadIdx.x + step; i < groups_here; i += step)
            hold(i, request(i));
    }
    /* Backward: what threads need of each channel, by one; those of a block have each many times. What the mean leaves
     * out takes the place of shifts. */
    template <typename T> __device__ __forceinline__ void know_given() const
    {
        const int n = g.all_samples ? 0 : this->n;
#pragma unroll 1
        for (int i = (int)threadIdx.x; i < here; i += step) {
            const int c = divide(first_channel + i, g.by_spans), set = divide(c, g.by_set_channels);
            const auto request = [&](const normfuse_parameter &of, int index) {
                return request_at_once(of, n * of.batch + index * of.channel);
            };
            const requested_value requested_rstd = request(p.rstd(), set), requested_mean = request(p.mean(), set);
            const requested_weights weights = request_weights(p, n, c, true);
            float slope, offset, rounded, rest;
            weigh(p, weights, slope, offset);
            const float rstd = p.rstd().data ? receive<float>(requested_rstd, p.rstd().type) : 1.0f;
            slope *= rstd;
            const double mean = p.mean().data ? receive<double>(requested_mean, p.mean().type) : 0.0;
            split_mean<T>(mean - (double)parameter<float>(p.pre_bias(), n, c, 0.0f), rounded, rest);
            in_all_rows(i, here, channels, [&](int at) {
                of_channels.means[at] = rounded;
                of_channels.slopes[at] = slope;
                of_channels.offsets[at] = offset - rest * slope;
                of_channels.shifts[at] = rest;
            });
            of_groups[divide(i, g.by_group)].rstd = rstd;
        }
    }
    /* What a later exchange needs: mailboxes, or what the grid barrier says before, to thread 0. */
    __device__ __forceinline__ uint32_t open_exchange(cluster_mailbox &mailbox) const
    {
        if (block.exchange == NORMFUSE_EXCHANGE_CLUSTER)
            open_only_mailbox(mailbox, groups_here * g.parts * (int)sizeof(float2));
        return block.exchange == NORMFUSE_EXCHANGE_GRID && threadIdx.x == 0
                   ? look_at_grid_barrier(block.grid_barrier(a))
                   : 0;
    }
    /* What the block found of a group, to all blocks that share it, by the grid through of_grid(); where none does,
     * finish(). */
    template <typename Grid, typename Finish>
    __device__ __forceinline__ void send_part(cluster_mailbox &mailbox, int group, int lane, int lanes, float2 found,
                                              Grid of_grid, Finish finish) const
    {
        if (block.exchange == NORMFUSE_EXCHANGE_CLUSTER) {
            for (int other = lane; other < g.parts; other += lanes)
                send(mailbox, of_parts + group * g.parts + block.part, other, found);
        } else if (lane == 0) {
            if (block.exchange == NORMFUSE_EXCHANGE_GRID)
                of_grid()[group * g.parts + block.part] = found;
            else
                finish();
        }
    }
};

#endif
