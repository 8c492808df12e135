/* SPDX-License-Identifier: MIT
 *
 * columns_cluster.cu - group norm over adjacent channels (NHWC) of samples so small that a call takes as long as what
 * each warp does once: its threads hold what a block has, and at most a cluster of blocks holds a group. Instructions
 * are what counts, by samples of the program counter: some 1400 that a warp goes through once took 4 us. So all that is
 * read is requested at once, a thread brings its own channels' parameters along, and every warp joins the whole block's
 * sums for itself, so that the block meets once. Lanes stand for groups: those of the i-th group are the 2^lane_bits
 * from i << lane_bits on, and a thread has what it needs of a group from one of them. */
#include "columns_held.cuh"
#include "gradients.cuh"

/* Of the sums of its group, how many a lane reads once. */
constexpr int held_entries = 8;

struct cluster_place : thread_place {
    int rank, part, n, first_channel; /* of the block */
    int rows;                         /* of the part */
    int left;                  /* rows of the part from the thread's first on; not above 0: the thread has none */
    unsigned at;               /* bytes from the sample's beginning to the thread's first vector */
    int lane, group, of_group; /* the lane's group and its number among that group's lanes */
    bool has_group;

    template <typename T, int V> __device__ __forceinline__ void find(const normfuse_cuda_columns &a)
    {
        const int cluster = divide((int)blockIdx.x, a.of.cluster.by_ranks), samples = divide(cluster, a.by_blocks_wide);
        rank = (int)blockIdx.x - cluster * (int)a.of.cluster.by_ranks.divisor;
        const int of_cluster = divide(rank, a.by_parts);
        part = rank - of_cluster * a.parts;
        n = samples * max(1, a.of.cluster.samples) + of_cluster;
        first_channel = (cluster - samples * (int)a.by_blocks_wide.divisor) * a.width * V;
        const int first_row = part * a.part_rows;
        rows = min(a.part_rows, a.rows - first_row);
        thread_place::find(a);
        left = has_rows(a) ? rows - beside : 0;
        at =
            (unsigned)(first_row + beside) * a.row_bytes + (unsigned)(first_channel + column * V) * (unsigned)sizeof(T);
    }
    /* What is not needed to request the vectors. */
    template <int V> __device__ __forceinline__ void find_groups(const normfuse_cuda_columns &a)
    {
        int own = column;
        compiler_barrier(own);
        thread_place::find_groups<V>(a, own);
        lane = (int)threadIdx.x % 32;
        group = lane >> a.lane_bits;
        of_group = lane - (group << a.lane_bits);
        has_group = group < a.groups;
    }
    /* What the lanes of the thread's two groups know. */
    __device__ __forceinline__ side_values broadcast(const normfuse_cuda_columns &a, float value) const
    {
        return {{__shfl_sync(full_mask, value, groups[0] << a.lane_bits),
                 __shfl_sync(full_mask, value, groups[1] << a.lane_bits)},
                split};
    }
    template <int V>
    __device__ __forceinline__ void entries_of_lane(const normfuse_cuda_columns &a, int &first, int &count) const
    {
        entries_of_group<V>(a, has_group ? group : 0, first, count);
        count = has_group ? count : 0;
    }
};

/* What the block found of the lane's group, to all blocks that share it: what each of them found. */
__device__ __forceinline__ const float2 *exchange(const normfuse_cuda_columns &a, const cluster_place &place,
                                                  cluster_mailbox &mailbox, float2 *of_parts, float2 found)
{
    if (threadIdx.x < 32 && place.has_group)
        for (int other = place.of_group; other < a.parts; other += 1 << a.lane_bits)
            send(mailbox, of_parts + place.group * a.parts + place.part, place.rank - place.part + other, found);
    await_mailbox(mailbox);
    return of_parts + (place.has_group ? place.group : 0) * a.parts;
}

/* ---- forward ----------------------------------------------------------------------------------------------------- */

template <typename T, int V, int K, normfuse_cuda_schedule>
__device__ __forceinline__ void columns_forward(const normfuse_cuda_arguments &all)
{
    follow_kernel();
    const normfuse_cuda_columns &a = all.columns;
    NORMFUSE_DYNAMIC_SHARED(dynamic);
    __shared__ cluster_mailbox mailbox;
    const normfuse_cluster_layout at = normfuse_lay_out_cluster_forward(a.width, a.groups, a.at_once, a.parts);
    float4 *const entries = reinterpret_cast<float4 *>(dynamic);
    float2 *const of_parts = in_shared<float2>(dynamic, at.parts);

    cluster_place place = {};
    place.find<T, V>(a);
    const char *const sample = a.x + place.n * a.batch_bytes;
    held_rows<K, 1> rows(a, place.left, place.at);
    rows.request(place.n);
    place.find_groups<V>(a);
    channel_parameters<V> parameters;
    parameters.request_weights(a, place.first_channel + place.column * V);
    parameters.request_modulation(a, place.n, place.first_channel + place.column * V);
    raw<T, 1> requested_base = raw<T, 1>();
    if (a.parts > 1) {
        /* A value of the group that all of its blocks know: its first. */
        requested_base = load_vector<T, 1>(sample, place.first_channel + (place.has_group ? place.group : 0) * a.group);
        open_only_mailbox(mailbox, a.groups * a.parts * (int)sizeof(float2));
    }

    if (place.has_rows(a)) {
        side_moments<T, V> own = {place, {{}, place.split}};
        if (place.left > 0) {
            own.begin(rows.held[0][0]);
            rows.walk([&](int k) { own.add(rows.held[k][0]); });
        }
        const float own_rows = (float)divide(max(0, place.left) + a.at_once - 1, a.of.cluster.by_at_once);
        each<2>([&](int side) {
            if (side == 0 || place.split < V)
                entries[place.entry(a, side)] = own.entry(side, own.of_side(side, own_rows));
        });
    }
    __syncthreads();

    /* ---- the statistics of the groups ---- */
    int first, count;
    place.entries_of_lane<V>(a, first, count);
    float base = entries[first].x;
    if (a.parts > 1) {
        float first_value[1];
        unpack<T, 1>(requested_base, first_value);
        base = first_value[0];
    }
    float2 found = join_entries<held_entries>(entries + first, place.of_group, count, 1 << a.lane_bits, base,
                                              (float)(place.rows * a.group));
    if (a.parts > 1) {
        await_open_mailboxes();
        const float2 *const of_group = exchange(a, place, mailbox, of_parts, found);
        found = join_means<0, 2>(
            a.parts, place.of_group, 1 << a.lane_bits, [&](int i) { return of_group[i]; },
            [&](float2, int i) { return (float)(min(a.part_rows, a.rows - i * a.part_rows) * a.group); },
            [&](float sum) { return sum * a.share; });
    }
    const float rstd = inverse_root(found.y * a.share + a.eps);
    float rounded, rest;
    split_sum<T>(base, found.x, rounded, rest);

    /* ---- results ---- */
    const side_values means = place.broadcast(a, rounded), rests = place.broadcast(a, rest),
                      rstds = place.broadcast(a, rstd);
    if (place.part == 0 && threadIdx.x >= blockDim.x - 32 && place.has_group && place.of_group == 0)
        store_group(a, place.n, divide(place.first_channel, a.by_group) + place.group, (double)base + (double)found.x,
                    rstd);
    store_results<T, V>(a, rows, parameters, means, rests, rstds, a.out + place.n * a.batch_bytes, true);
}

/* ---- backward ---------------------------------------------------------------------------------------------------- */

/* The last warp's, beside the others, which write dx: the block's sums of channels, and what the parameters get of
 * them. Four channels a lane. Where the cluster has all samples each block adds for some channels what the others send
 * it: every fourth of its channels' quads for a cluster of four. Else the sums go to memory, where the last block that
 * has any of them adds, or a later kernel. */
template <int V>
static __device__ __forceinline__ void finish_channels(const normfuse_cuda_arguments &all, const cluster_place &place,
                                                       cluster_mailbox &mailbox, float4 *of_ranks,
                                                       const block_sums &sums, float rest, float rstd)
{
    const normfuse_cuda_columns &a = all.columns;
    const normfuse_cuda_problem &p = all.problem;
    const int channels = a.width * V, quads = channels / 4, ranks = (int)a.of.cluster.by_ranks.divisor;
    const int owned = (quads + ranks - 1 - place.rank) / ranks; /* quads that this block adds up */
    /* Few channels leave lanes for several rows. */
    const int beside = quads > 16 ? 32 : quads > 8 ? 16 : quads > 4 ? 8 : quads > 2 ? 4 : quads;
#pragma unroll 1
    for (int round = 0; round < quads; round += beside) {
        const int quad = min(round + (place.lane & (beside - 1)), quads - 1);
        float sum[4] = {}, product[4] = {};
        sum_rows(sums, quad, quads, place.lane / beside, a.at_once, 32 / beside, sum, product);
        for (int distance = beside; distance < 32; distance *= 2) {
            each<4>([&](int i) {
                sum[i] += __shfl_xor_sync(full_mask, sum[i], distance);
                product[i] += __shfl_xor_sync(full_mask, product[i], distance);
            });
        }
        const bool is_own = place.lane < beside && round + place.lane < quads;
        each<4>([&](int i) {
            const int of = divide(4 * quad + i, a.by_group) << a.lane_bits;
            product[i] -= __shfl_sync(full_mask, rest, of) * sum[i];
            if (a.of.cluster.samples)
                product[i] *= __shfl_sync(full_mask, rstd, of);
        });
        if (!is_own)
            continue;
        if (a.of.cluster.samples) {
            const int owner = quad % ranks;
            float4 *const there = of_ranks + 2 * (quad / ranks * ranks + place.rank);
            const float4 one = make_float4(sum[0], sum[1], sum[2], sum[3]);
            const float4 other = make_float4(product[0], product[1], product[2], product[3]);
            if (ranks > 1) {
                send_four(mailbox, there, owner, one);
                send_four(mailbox, there + 1, owner, other);
            } else {
                there[0] = one;
                there[1] = other;
            }
        } else {
            each<4>([&](int i) {
                store_channel_sums(all, place.n, place.first_channel + 4 * quad + i, place.part, sum[i], product[i]);
            });
        }
    }
    if (a.of.cluster.samples) {
        if (ranks > 1)
            await_mailbox(mailbox);
        __syncwarp();
        const float *const from = reinterpret_cast<const float *>(of_ranks);
#pragma unroll 1
        for (int i = place.lane; i < 4 * owned; i += 32) {
            double weight = 0.0, bias = 0.0;
            for (int rank = 0; rank < ranks; rank++) {
                const float *const quad = from + 8 * (i / 4 * ranks + rank) + i % 4;
                bias += (double)quad[0];
                weight += (double)quad[4];
            }
            const int c = place.first_channel + 4 * (i / 4 * ranks + place.rank) + i % 4;
            write_gradient(p, p.dweight(), 0, c, weight);
            write_gradient(p, p.dbias(), 0, c, bias);
        }
    }
}

template <typename T, int V, int K, normfuse_cuda_schedule>
__device__ __forceinline__ void columns_backward(const normfuse_cuda_arguments &all)
{
    follow_kernel();
    const normfuse_cuda_columns &a = all.columns;
    NORMFUSE_DYNAMIC_SHARED(dynamic);
    __shared__ cluster_mailbox mailbox, channel_mailbox;
    const int channels = a.width * V, ranks = (int)a.of.cluster.by_ranks.divisor;
    const bool gives = a.of.cluster.samples != 0 || all.sums != nullptr;
    /* Two sums of each thread in a group; of each row and channel, one after the other; of each block that has parts of
     * a group; of each block of the cluster the channels that this one adds up. */
    const normfuse_cluster_layout at = normfuse_lay_out_cluster_backward(
        a.width, channels, a.groups, a.at_once, a.parts, a.of.cluster.samples ? ranks : 0, gives);
    const block_sums sums = {reinterpret_cast<float2 *>(dynamic), in_shared<float>(dynamic, at.plain),
                             in_shared<float>(dynamic, at.centred)};
    float4 *const of_ranks = in_shared<float4>(dynamic, at.ranks);
    float2 *const of_parts = in_shared<float2>(dynamic, at.parts);

    cluster_place place = {};
    place.find<T, V>(a);
    held_rows<K, 2> rows(a, place.left, place.at);
    rows.request(place.n);
    place.find_groups<V>(a);
    const int set = divide(place.first_channel, a.by_group) + (place.has_group ? place.group : 0);
    const double saved_mean = load_value<double>(a.mean, place.n * a.mean_batch + set, type_of(a, COLUMNS_MEAN));
    const float rstd = load_value<float>(a.rstd, place.n * a.rstd_batch + set, type_of(a, COLUMNS_RSTD));
    channel_parameters<V> parameters;
    parameters.request_weights(a, place.first_channel + place.column * V);
    parameters.request_modulation(a, place.n, place.first_channel + place.column * V);
    if (ranks > 1) {
        const int owned = (channels / 4 + ranks - 1 - place.rank) / ranks;
        open_mailbox(mailbox, a.groups * a.parts * (int)sizeof(float2));
        open_mailbox(channel_mailbox, a.of.cluster.samples ? 2 * owned * ranks * (int)sizeof(float4) : 0);
        announce_mailboxes();
    }

    float mean, rest;
    split_mean<T>(saved_mean, mean, rest);
    const side_values means = place.broadcast(a, mean), rests = place.broadcast(a, rest),
                      rstds = place.broadcast(a, rstd);
    const auto join = [&](auto &slope, auto &first, auto &second, float factor, auto &of_x, auto &level) {
        if (place.has_rows(a))
            write_thread_sums<V>(a, place, slope, first, second, factor, gives, sums);
        __syncthreads();
        if (ranks > 1)
            await_open_mailboxes();
        if (gives && threadIdx.x >= blockDim.x - 32) {
            finish_channels<V>(all, place, channel_mailbox, of_ranks, sums, rest, rstd);
            return false;
        }
        /* ---- the totals of the groups ---- */
        int begin, count;
        place.entries_of_lane<V>(a, begin, count);
        const int lanes = 1 << a.lane_bits;
        float2 found =
            sum_pairs<4, held_entries>(count, place.of_group, lanes, [&](int i) { return sums.entries[begin + i]; });
        if (a.parts > 1) {
            const float2 *const of_group = exchange(a, place, mailbox, of_parts, found);
            found = sum_pairs<2>(a.parts, place.of_group, lanes, [&](int i) { return of_group[i]; });
        }
        const float2 of_gradient = gradient_of_group(found.x, found.y, rest, rstd, a.share);
        of_x = place.broadcast(a, of_gradient.x);
        level = place.broadcast(a, of_gradient.y);
        return true;
    };
    store_gradients<T, V>(a, rows, parameters, means, rests, rstds, a.out + place.n * a.batch_bytes, true, join);
}

NORMFUSE_KERNELS_COLUMNS_CLUSTER(NORMFUSE_INSTANCE)
