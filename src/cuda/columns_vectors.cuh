/* SPDX-License-Identifier: MIT
 *
 * columns_vectors.cuh - how threads of split, additions, two_pass and unaligned over columns request their vectors and
 * store results, and what a block knows of its channels; both directions. */
#ifndef NORMFUSE_CUDA_COLUMNS_VECTORS_CUH
#define NORMFUSE_CUDA_COLUMNS_VECTORS_CUH

#include "additions.cuh"
#include "columns.cuh"

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

/* Results, one row of the thread after the other; those of edges wait in shared memory until the others are stored. */
template <typename T, int V, bool unaligned_samples> struct column_results {
    const column_edges<T, V, unaligned_samples> &edges;
    uint4 *const of_edges;
    column_cursor<T, V> to;
    char *const first;

    __device__ __forceinline__ column_results(char *data, const normfuse_view &x, const column_place &place, int row,
                                              const column_edges<T, V, unaligned_samples> &edges, uint4 *of_edges)
        : edges(edges), of_edges(of_edges), to(data, x, place, row, edges.lead()), first(to.base + to.at)
    {
        if constexpr (unaligned_samples)
            to.at += edges.skipped() - (unsigned)edges.edges() * place.step;
    }
    __device__ __forceinline__ void store(const raw<T, V> &vector, const column_place &place, int left)
    {
        bool is_edge = false;
        if constexpr (unaligned_samples) {
            is_edge = left > edges.whole;
            if (is_edge)
                of_edges[edges.result(edges.count - left)] = vector;
        }
        if (!is_edge)
            to.store(vector);
        to.advance(place);
    }
    __device__ __forceinline__ void store_edges() const
    {
        if constexpr (unaligned_samples)
#pragma unroll 1
            for (int k = 0; k < edges.edges(); k++)
                store_range<T>(first + edges.at(k), of_edges[edges.result(k)], edges.begin(k), edges.finish(k));
    }
};

/* Calls work(slot) for each of the thread's `count` rows: `shared` slots first, which are negative, then K that are
 * known when compiling. What a thread does not have it does not walk through. */
template <int K, typename Work> __device__ __forceinline__ void walk(int count, int shared, Work work)
{
#pragma unroll 1
    for (int k = 0; k < min(shared, count); k++)
        work(-1 - k);
    ::walk_rows<0, K>(count - shared, 1, work);
}

/* A thread's vectors of so many tensors. `holds`: K of each in registers, and behind them what slots of shared memory
 * hold, which are negative; else all go through a pipeline of K slots. Where the kernel `adds`, what it adds passes behind
 * the slots. */
template <typename T, int V, int K, int tensors, bool holds, bool adds> struct column_vectors {
    using cursors = column_cursor<T, V>[tensors];
    const normfuse_cuda_problem &p;
    const int threads = (int)blockDim.x;
    const int slots; /* of shared memory */
    passing_tensors<adds> passing;
    int64_t begin = 0; /* of what adds: bytes from a tensor's first element to the thread's first vector */
    row_vectors<tensors> held[holds && K > 0 ? K : 1];

    __device__ __forceinline__ explicit column_vectors(const normfuse_cuda_arguments &a)
        : p(a.problem), slots(holds ? a.geometry.held_shared : tensors > 1 ? K : 0),
          passing(&shared(slots, 0), a.geometry.passing)
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
        each<(holds ? K : 0)>([&](int k) { each<tensors>([&](int i) { compiler_barrier(held[k].of[i]); }); });
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
    /* The next vectors into a slot of the pipeline. */
    __device__ __forceinline__ void copy(cursors &from, const column_place &place, int slot) const
    {
        each<tensors>([&](int i) { copy_ahead(&shared(slot, i), from[i].base + from[i].at, 0); });
        each<tensors>([&](int i) { from[i].advance(place); });
    }
    template <typename Edges>
    __device__ __forceinline__ void open_pipeline(cursors &from, const column_place &place, const Edges &edges) const
    {
        each<K>([&](int slot) {
            if (slot >= edges.edges() && slot < edges.count)
                copy(from, place, slot);
            commit_copies();
        });
    }
    /* work(vectors, slot, left) for each row of the thread. Of vectors that are read once, `left` before the end, as
     * many are on their way as the pipeline has slots. Where blocks begin with more than a load or two, as here,
     * registers did worse: 1x64x2039x1021 bf16 221 us for 210, backward 338 for 328; a warp has six counters for what
     * it waits for, and two loads on one are waited for together. */
    template <typename Work>
    __device__ __forceinline__ void walk_rows(cursors &from, const column_place &place, int count, int shared_slots,
                                              Work work)
    {
        if constexpr (adds) {
            const auto copy = copy_passing(place, count);
#pragma unroll 1
            for (int slot = 0; slot < count; slot++) {
                passing.await();
                work(read_shared(slot), slot, 0);
                passing.advance(slot, copy);
            }
            return;
        }
        if constexpr (holds) {
            walk<K>(count, shared_slots, [&](int slot) { work(read(slot), slot, 0); });
            return;
        }
        int slot = 0;
#pragma unroll 1
        for (int left = count; left > 0; left--) {
            wait_for_older_copies<K - 1>();
            const row_vectors<tensors> vectors = read_shared(slot);
            if (left > K)
                copy(from, place, slot);
            commit_copies();
            work(vectors, slot, left);
            slot = slot + 1 == K ? 0 : slot + 1;
        }
    }
    /* All that is held, or the first of the pipeline; where the thread's first and last vector have elements of others,
     * zeros in their place, or where x is alone values that the thread has of the same channels, so that their distance
     * from the first ones is 0. */
    template <bool unaligned_samples, typename Edges>
    __device__ __forceinline__ void request(cursors &from, const column_place &place, const Edges &edges,
                                            int shared_slots, bool is_loaded)
    {
        if constexpr (unaligned_samples) {
            char *first[tensors];
            uint4 fill = make_uint4(0, 0, 0, 0);
            each<tensors>([&](int i) {
                first[i] = from[i].base + from[i].at;
                from[i].at += edges.skipped();
            });
            if (tensors == 1 && edges.edges() > 0 && edges.whole > 0)
                fill = from[0].load();
            open_pipeline(from, place, edges);
            if (tensors == 1 && edges.edges() > 0 && edges.whole == 0)
                fill = load_range<T>(first[0] + edges.at(1), 0, edges.finish(), fill);
#pragma unroll 1
            for (int k = 0; k < edges.edges(); k++)
                each<tensors>([&](int i) {
                    const uint4 vector = load_range<T>(first[i] + edges.at(k), edges.begin(k), edges.finish(k), fill);
                    shared(k, i) = vector;
                    if (tensors == 1)
                        fill = vector;
                });
        } else if constexpr (!holds) {
            open_pipeline(from, place, edges);
        } else if (!is_loaded) {
            begin = from[0].base + from[0].at - p.x().data;
            walk<K>(edges.count, shared_slots, [&](int slot) { load(from, place, slot); });
        }
    }
};

/* The channels and norm groups of a block, and what shared memory has of them, in this order behind the vectors. What
 * follows from the geometry is found here, not ahead of all loops and loads. */
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
        here = min(channels, (int)p.c - first_channel);
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
    /* Where statistics are given, what threads need of each channel, by one: those of a block have each many times.
     * Backward also what the mean leaves out, in place of shifts, and of groups that are `centred` rstd. */
    template <typename T, bool backward> __device__ __forceinline__ void know_given(int later, bool centred) const
    {
        const int n = backward && g.all_samples ? 0 : this->n;
#pragma unroll 1
        for (int i = (int)threadIdx.x; i < here; i += step) {
            const int c = first_channel + i;
            float rstd = 1.0f, rounded, rest;
            double mean = 0.0;
            const float scale = 1.0f + parameter<float>(p.scale(), n, c, 0.0f);
            float slope = parameter<float>(p.weight(), n, c, 1.0f) * scale;
            const float offset =
                parameter<float>(p.bias(), n, c, 0.0f) * scale + parameter<float>(p.shift(), n, c, 0.0f);
            if (a.source == NORMFUSE_SOURCE_RUNNING) {
                mean = parameter<double>(p.running_mean(), 0, c, 0.0);
                rstd = scaled_by_running(p, c, backward ? 1.0f : slope);
            } else if (backward && a.source == NORMFUSE_SOURCE_SAVED) {
                const int set = divide(c, g.by_set_channels);
                rstd = parameter<float>(p.rstd(), n, set, 1.0f);
                mean = parameter<double>(p.mean(), n, set, 0.0);
            } else if (!backward && a.source == NORMFUSE_SOURCE_SCRATCH) {
                const int set = p.sets == NORMFUSE_SETS_BATCH ? c : n * p.groups + divide(c, g.by_set_channels);
                rstd = (float)a.statistics[set].rstd;
                mean = a.statistics[set].mean;
            }
            /* Weight over a running root is rounded once, but backward rstd is needed alone. */
            slope = !backward && a.source == NORMFUSE_SOURCE_RUNNING ? rstd : slope * rstd;
            split_mean<T>(mean - (double)parameter<float>(p.pre_bias(), n, c, 0.0f), rounded, rest);
            in_all_rows(first_place(i, later, here), here, channels, [&](int at) {
                of_channels.means[at] = rounded;
                of_channels.slopes[at] = slope;
                of_channels.offsets[at] = offset - rest * slope;
                if (backward)
                    of_channels.shifts[at] = rest;
            });
            if (backward && centred)
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
