/* SPDX-License-Identifier: MIT
 *
 * columns_cluster.cu - group norm over adjacent channels (NHWC) of samples so small that a call takes as long as what
 * each warp does once: its threads hold what a block has, and at most a cluster of blocks holds a group. Instructions
 * are what counts, by samples of the program counter: some 1400 that a warp goes through once took 4 us. So all that is
 * read is requested at once, a thread brings its own channels' parameters along, and every warp joins the whole block's
 * sums for itself, so that the block meets once. Lanes stand for groups: those of the i-th group are the 2^lane_bits
 * from i << lane_bits on, and a thread has what it needs of a group from one of them. */
#include "columns_parameters.cuh"
#include "gradients.cuh"

/* Of the sums of its group, how many a lane reads once. */
constexpr int held_entries = 8;

struct cluster_place {
    int rank, part, n, first_channel; /* of the block */
    int rows;                         /* of the part */
    int beside, column;               /* the thread's first row and its vector in the block */
    int left;                  /* rows of the part from the thread's first on; not above 0: the thread has none */
    unsigned at;               /* bytes from the sample's beginning to the thread's first vector */
    int groups[2], split;      /* of the block: that of the thread's first `split` channels, and of the others */
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
        beside = divide((int)threadIdx.x, a.by_width);
        column = (int)threadIdx.x - beside * a.width;
        left = beside < a.at_once ? rows - beside : 0;
        at =
            (unsigned)(first_row + beside) * a.row_bytes + (unsigned)(first_channel + column * V) * (unsigned)sizeof(T);
    }
    /* What is not needed to request the vectors. */
    template <int V> __device__ __forceinline__ void find_groups(const normfuse_cuda_columns &a)
    {
        int own = column;
        compiler_barrier(own);
        groups[0] = divide(own * V, a.by_group);
        split = min(V, (groups[0] + 1) * a.group - own * V);
        groups[1] = min(groups[0] + 1, a.groups - 1);
        lane = (int)threadIdx.x % 32;
        group = lane >> a.lane_bits;
        of_group = lane - (group << a.lane_bits);
        has_group = group < a.groups;
    }
    /* What the lanes of the thread's two groups know. */
    __device__ __forceinline__ void broadcast(const normfuse_cuda_columns &a, float value, float (&of)[2]) const
    {
        of[0] = __shfl_sync(full_mask, value, groups[0] << a.lane_bits);
        of[1] = __shfl_sync(full_mask, value, groups[1] << a.lane_bits);
    }
    /* In shared memory each group has the sums of its vectors beside one another. A vector of two groups has a place in
     * both, so every group begins one vector further on than its first. */
    __device__ __forceinline__ int entry(const normfuse_cuda_columns &a, int side) const
    {
        return (column + groups[side] + (side == 1 && groups[1] == groups[0] ? 1 : 0)) * a.at_once + beside;
    }
    template <int V>
    __device__ __forceinline__ void entries_of_lane(const normfuse_cuda_columns &a, int &first, int &count) const
    {
        const int own = has_group ? group : 0, channel = own * a.group, vector = channel / V;
        first = (vector + own) * a.at_once;
        count = has_group ? ((channel + a.group - 1) / V - vector + 1) * a.at_once : 0;
    }
};

template <typename T, int V, int K> __device__ __forceinline__ void cluster_forward(const normfuse_cuda_arguments &all)
{
    follow_kernel();
    const normfuse_cuda_columns &a = all.columns;
    constexpr bool fast = sizeof(T) == 2;
    NORMFUSE_DYNAMIC_SHARED(dynamic);
    __shared__ cluster_mailbox mailbox;
    /* What a thread found in a group: a value that it sums about, its mean less that, squares about the mean, and how
     * many values these are. */
    const normfuse_cluster_layout at = normfuse_lay_out_cluster_forward(a.width, a.groups, a.at_once, a.parts);
    float4 *const entries = reinterpret_cast<float4 *>(dynamic);
    float2 *const of_parts = in_shared<float2>(dynamic, at.parts);

    cluster_place place = {};
    place.find<T, V>(a);
    const char *const sample = a.x + place.n * a.batch_bytes, *from = sample + place.at;
    const unsigned step = (unsigned)a.at_once * a.row_bytes;
    uint4 held[K];
    const auto load = [&](int k) {
        held[k] = load_vector<T, V>(from, 0);
        from += step;
    };
    walk_rows<0, K>(place.left, a.at_once, load);
    place.find_groups<V>(a);
    channel_parameters<V> parameters;
    parameters.request(a, place.n, place.first_channel + place.column * V);
    raw<T, 1> requested_base = raw<T, 1>();
    if (a.parts > 1) {
        /* A value of the group that all of its blocks know: its first. */
        requested_base = load_vector<T, 1>(sample, place.first_channel + (place.has_group ? place.group : 0) * a.group);
        open_only_mailbox(mailbox, a.groups * a.parts * (int)sizeof(float2));
    }

    /* ---- sums, about values of the thread's own: the first of its first group and the last of the other ---- */
    float about[2] = {0.0f, 0.0f}, sum[V] = {}, square[V] = {};
    if (place.left > 0) {
        float value[V];
        unpack<T, V>(held[0], value);
        about[0] = value[0];
        about[1] = value[V - 1];
        const auto sum_up = [&](int k) {
            unpack<T, V>(held[k], value);
#pragma unroll
            for (int i = 0; i < V; i++) {
                const float distance = value[i] - (i < place.split ? about[0] : about[1]);
                sum[i] += distance;
                square[i] += distance * distance;
            }
        };
        walk_rows<0, K>(place.left, a.at_once, sum_up);
    }
    if (place.beside < a.at_once) {
        const float own_rows = (float)divide(max(0, place.left) + a.at_once - 1, a.of.cluster.by_at_once);
        float of[2] = {0.0f, 0.0f}, squares[2] = {0.0f, 0.0f};
#pragma unroll
        for (int i = 0; i < V; i++) {
            const int side = i < place.split ? 0 : 1;
            of[0] += side == 0 ? sum[i] : 0.0f;
            of[1] += side == 0 ? 0.0f : sum[i];
            squares[0] += side == 0 ? square[i] : 0.0f;
            squares[1] += side == 0 ? 0.0f : square[i];
        }
#pragma unroll
        for (int side = 0; side < 2; side++) {
            const float count = own_rows * (float)(side == 0 ? place.split : V - place.split);
            if (side == 0 || place.split < V) {
                const float mean = of[side] * reciprocal(fmaxf(count, 1.0f));
                entries[place.entry(a, side)] = make_float4(about[side], mean, squares[side] - of[side] * mean, count);
            }
        }
    }
    __syncthreads();

    /* ---- the statistics of the groups: first means, less `base`, then squares about them, which cannot cancel ---- */
    const int lanes = 1 << a.lane_bits;
    int first, count;
    place.entries_of_lane<V>(a, first, count);
    float base = entries[first].x;
    if (a.parts > 1) {
        float first_value[1];
        unpack<T, 1>(requested_base, first_value);
        base = first_value[0];
    }
    float means[held_entries], found[held_entries], counts[held_entries], mean = 0.0f, squares = 0.0f;
#pragma unroll
    for (int k = 0; k < held_entries; k++) {
        const int i = place.of_group + (k << a.lane_bits);
        float4 entry = make_float4(base, 0.0f, 0.0f, 0.0f);
        if (i < count)
            entry = entries[first + i];
        means[k] = (entry.x - base) + entry.y;
        found[k] = entry.z;
        counts[k] = entry.w;
        mean += counts[k] * means[k];
    }
    const int rest_of_lane = place.of_group + (held_entries << a.lane_bits);
#pragma unroll 1
    for (int i = rest_of_lane; i < count; i += lanes) {
        const float4 entry = entries[first + i];
        mean += entry.w * ((entry.x - base) + entry.y);
    }
    mean = sum_few(mean, lanes) * reciprocal((float)(place.rows * a.group));
#pragma unroll
    for (int k = 0; k < held_entries; k++) {
        const float distance = means[k] - mean;
        squares += found[k] + counts[k] * distance * distance;
    }
#pragma unroll 1
    for (int i = rest_of_lane; i < count; i += lanes) {
        const float4 entry = entries[first + i];
        const float distance = ((entry.x - base) + entry.y) - mean;
        squares += entry.z + entry.w * distance * distance;
    }
    squares = sum_few(squares, lanes);
    if (a.parts > 1) {
        await_open_mailboxes();
        if (threadIdx.x < 32 && place.has_group)
            for (int other = place.of_group; other < a.parts; other += lanes)
                send(mailbox, of_parts + place.group * a.parts + place.part, place.rank - place.part + other,
                     make_float2(mean, squares));
        await_mailbox(mailbox);
        const float2 *const of_group = of_parts + (place.has_group ? place.group : 0) * a.parts;
        const auto number = [&](int i) { return (float)(min(a.part_rows, a.rows - i * a.part_rows) * a.group); };
        mean = squares = 0.0f;
#pragma unroll 2
        for (int i = place.of_group; i < a.parts; i += lanes)
            mean += number(i) * of_group[i].x;
        mean = sum_few(mean, lanes) * a.share;
#pragma unroll 2
        for (int i = place.of_group; i < a.parts; i += lanes) {
            const float distance = of_group[i].x - mean;
            squares += of_group[i].y + number(i) * distance * distance;
        }
        squares = sum_few(squares, lanes);
    }
    const float rstd = inverse_root(squares * a.share + a.eps);
    float rounded, rest;
    split_sum<T>(base, mean, rounded, rest);

    /* ---- results ---- */
    float rests[2], rstds[2], slope[V], offset[V];
    place.broadcast(a, rounded, about);
    place.broadcast(a, rest, rests);
    place.broadcast(a, rstd, rstds);
    parameters.receive(a, slope, offset);
    const float factor = takes_half<fast, true>(a.activation) ? 0.5f : 1.0f;
#pragma unroll
    for (int i = 0; i < V; i++) {
        const int side = i < place.split ? 0 : 1;
        slope[i] *= (side == 0 ? rstds[0] : rstds[1]) * factor;
        offset[i] = offset[i] * factor - (side == 0 ? rests[0] : rests[1]) * slope[i];
    }
    if (place.part == 0 && threadIdx.x >= blockDim.x - 32 && place.has_group && place.of_group == 0) {
        const int set = divide(place.first_channel, a.by_group) + place.group;
        if (a.mean)
            store_value<double>(a.mean, place.n * a.mean_batch + set, type_of(a, COLUMNS_MEAN),
                                (double)base + (double)mean);
        if (a.rstd)
            store_value<float>(a.rstd, place.n * a.rstd_batch + set, type_of(a, COLUMNS_RSTD), rstd);
    }
#pragma unroll
    for (int k = 0; k < K; k++)
        compiler_barrier(held[k]);
    char *to = a.out + place.n * a.batch_bytes + place.at;
    choose_activation<true, true>(a.activation, [&](auto chosen) {
        const auto give = [&](int k) {
            float z[V];
            unpack<T, V>(held[k], z);
#pragma unroll
            for (int i = 0; i < V; i++)
                z[i] = fmaf(z[i] - (i < place.split ? about[0] : about[1]), slope[i], offset[i]);
            activate<fast, true>(z, chosen, a.activation, a.act_param);
            store_vector<T, V>(to, 0, make_vector<T, V>(z));
            to += step;
        };
        walk_rows<0, K>(place.left, a.at_once, give);
    });
}

/* ---- backward ---------------------------------------------------------------------------------------------------- */

/* The last warp's, beside the others, which write dx: the block's sums of channels, and what the parameters get of
 * them. Four channels a lane. Where the cluster has all samples each block adds for some channels what the others send
 * it: every fourth of its channels' quads for a cluster of four. Else the sums go to memory, where the last block that
 * has any of them adds, or a later kernel. */
template <int V>
static __device__ __forceinline__ void finish_channels(const normfuse_cuda_arguments &all, const cluster_place &place,
                                                       cluster_mailbox &mailbox, float4 *of_ranks, const float4 *plain,
                                                       const float4 *centred, float rest, float rstd)
{
    const normfuse_cuda_columns &a = all.columns;
    const normfuse_problem &p = all.problem;
    const int channels = a.width * V, quads = channels / 4, ranks = (int)a.of.cluster.by_ranks.divisor;
    const int owned = (quads + ranks - 1 - place.rank) / ranks; /* quads that this block adds up */
    /* Few channels leave lanes for several rows. */
    const int beside = quads > 16 ? 32 : quads > 8 ? 16 : quads > 4 ? 8 : quads > 2 ? 4 : quads;
#pragma unroll 1
    for (int round = 0; round < quads; round += beside) {
        const int quad = min(round + (place.lane & (beside - 1)), quads - 1);
        float sum[4] = {}, product[4] = {};
#pragma unroll 4
        for (int row = place.lane / beside; row < a.at_once; row += 32 / beside) {
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
        for (int distance = beside; distance < 32; distance *= 2) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                sum[i] += __shfl_xor_sync(full_mask, sum[i], distance);
                product[i] += __shfl_xor_sync(full_mask, product[i], distance);
            }
        }
        const bool is_own = place.lane < beside && round + place.lane < quads;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int of = divide(4 * quad + i, a.by_group) << a.lane_bits;
            product[i] -= __shfl_sync(full_mask, rest, of) * sum[i];
            if (a.of.cluster.samples)
                product[i] *= __shfl_sync(full_mask, rstd, of);
        }
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
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int64_t channel = (int64_t)place.n * p.c + place.first_channel + 4 * quad + i;
                reinterpret_cast<double2 *>(all.sums)[channel * all.geometry.sum_slots + place.part] =
                    make_double2((double)sum[i], (double)product[i]);
            }
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
            put_gradient(p, p.dweight, 0, c, weight);
            put_gradient(p, p.dbias, 0, c, bias);
        }
        return;
    }
}

template <typename T, int V, int K> __device__ __forceinline__ void cluster_backward(const normfuse_cuda_arguments &all)
{
    follow_kernel();
    const normfuse_cuda_columns &a = all.columns;
    constexpr bool fast = sizeof(T) == 2;
    NORMFUSE_DYNAMIC_SHARED(dynamic);
    __shared__ cluster_mailbox mailbox, channel_mailbox;
    const int channels = a.width * V, ranks = (int)a.of.cluster.by_ranks.divisor;
    const bool gives = a.of.cluster.samples != 0 || all.sums != nullptr;
    /* Two sums of each thread in a group; of each row and channel, one after the other; of each block that has parts of
     * a group; of each block of the cluster the channels that this one adds up. */
    const normfuse_cluster_layout at = normfuse_lay_out_cluster_backward(
        a.width, channels, a.groups, a.at_once, a.parts, a.of.cluster.samples ? ranks : 0, gives);
    float2 *const entries = reinterpret_cast<float2 *>(dynamic);
    float *const of_plain = in_shared<float>(dynamic, at.plain);
    float *const of_centred = in_shared<float>(dynamic, at.centred);
    float4 *const of_ranks = in_shared<float4>(dynamic, at.ranks);
    float2 *const of_parts = in_shared<float2>(dynamic, at.parts);

    cluster_place place = {};
    place.find<T, V>(a);
    const int64_t sample = place.n * a.batch_bytes + place.at;
    const char *x_from = a.x + sample, *dy_from = a.dy + sample;
    const unsigned step = (unsigned)a.at_once * a.row_bytes;
    uint4 held_x[K], held_dy[K];
    const auto load = [&](int k) {
        held_x[k] = load_vector<T, V>(x_from, 0);
        held_dy[k] = load_vector<T, V>(dy_from, 0);
        x_from += step;
        dy_from += step;
    };
    walk_rows<0, K>(place.left, a.at_once, load);
    place.find_groups<V>(a);
    const int set = divide(place.first_channel, a.by_group) + (place.has_group ? place.group : 0);
    const double saved_mean = load_value<double>(a.mean, place.n * a.mean_batch + set, type_of(a, COLUMNS_MEAN));
    const float rstd = load_value<float>(a.rstd, place.n * a.rstd_batch + set, type_of(a, COLUMNS_RSTD));
    channel_parameters<V> parameters;
    parameters.request(a, place.n, place.first_channel + place.column * V);
    if (ranks > 1) {
        const int owned = (channels / 4 + ranks - 1 - place.rank) / ranks;
        open_mailbox(mailbox, a.groups * a.parts * (int)sizeof(float2));
        open_mailbox(channel_mailbox, a.of.cluster.samples ? 2 * owned * ranks * (int)sizeof(float4) : 0);
        announce_mailboxes();
    }

    float mean, rest, about[2], rests[2], rstds[2], slope[V], offset[V];
    split_mean<T>(saved_mean, mean, rest);
    place.broadcast(a, mean, about);
    place.broadcast(a, rest, rests);
    place.broadcast(a, rstd, rstds);
    parameters.receive(a, slope, offset);
    const float factor = takes_half<fast, true>(a.activation) ? 0.5f : 1.0f;
#pragma unroll
    for (int i = 0; i < V; i++) {
        slope[i] *= (i < place.split ? rstds[0] : rstds[1]) * factor;
        offset[i] = offset[i] * factor - (i < place.split ? rests[0] : rests[1]) * slope[i];
    }
    /* x becomes x - mean and dy what came through the activation, for SiLU twice that. */
    const auto differentiate = [&](auto chosen, float(&x)[V], float(&dy)[V]) {
#pragma unroll
        for (int i = 0; i < V; i++)
            x[i] -= i < place.split ? about[0] : about[1];
        if (decltype(chosen)::constant != NORMFUSE_IDENTITY) {
            float z[V];
#pragma unroll
            for (int i = 0; i < V; i++)
                z[i] = fmaf(x[i], slope[i], offset[i]);
            differentiate_by<fast>(dy, z, chosen, a.activation, a.act_param);
        }
    };

    /* ---- sums ---- */
    float first[V] = {}, second[V] = {};
    choose_activation<true, false>(a.activation, [&](auto chosen) {
        const auto sum_up = [&](int k) {
            float x[V], dy[V];
            unpack<T, V>(held_x[k], x);
            unpack<T, V>(held_dy[k], dy);
            differentiate(chosen, x, dy);
#pragma unroll
            for (int i = 0; i < V; i++) {
                first[i] += dy[i];
                second[i] += dy[i] * x[i];
            }
        };
        walk_rows<0, K>(place.left, a.at_once, sum_up);
    });
    if (place.beside < a.at_once) {
        float2 found[2] = {};
#pragma unroll
        for (int i = 0; i < V; i++) {
            const bool is_first = i < place.split;
            found[0].x += is_first ? slope[i] * first[i] : 0.0f;
            found[0].y += is_first ? slope[i] * second[i] : 0.0f;
            found[1].x += is_first ? 0.0f : slope[i] * first[i];
            found[1].y += is_first ? 0.0f : slope[i] * second[i];
        }
        entries[place.entry(a, 0)] = found[0];
        if (place.split < V)
            entries[place.entry(a, 1)] = found[1];
        if (gives) {
            const int at = place.beside * channels + place.column * V;
#pragma unroll
            for (int i = 0; i < V; i++) {
                first[i] *= factor;
                second[i] *= factor;
            }
            write_values<V>(of_plain + at, first);
            write_values<V>(of_centred + at, second);
        }
    }
    __syncthreads();
    if (ranks > 1)
        await_open_mailboxes();
    if (gives && threadIdx.x >= blockDim.x - 32) {
        finish_channels<V>(all, place, channel_mailbox, of_ranks, reinterpret_cast<const float4 *>(of_plain),
                           reinterpret_cast<const float4 *>(of_centred), rest, rstd);
        return;
    }

    /* ---- the totals of the groups ---- */
    const int lanes = 1 << a.lane_bits;
    int begin, count;
    place.entries_of_lane<V>(a, begin, count);
    float sum = 0.0f, product = 0.0f;
#pragma unroll
    for (int k = 0; k < held_entries; k++) {
        const int i = place.of_group + (k << a.lane_bits);
        float2 entry = make_float2(0.0f, 0.0f);
        if (i < count)
            entry = entries[begin + i];
        sum += entry.x;
        product += entry.y;
    }
#pragma unroll 4
    for (int i = place.of_group + (held_entries << a.lane_bits); i < count; i += lanes) {
        sum += entries[begin + i].x;
        product += entries[begin + i].y;
    }
    sum = sum_few(sum, lanes);
    product = sum_few(product, lanes);
    if (a.parts > 1) {
        if (threadIdx.x < 32 && place.has_group)
            for (int other = place.of_group; other < a.parts; other += lanes)
                send(mailbox, of_parts + place.group * a.parts + place.part, place.rank - place.part + other,
                     make_float2(sum, product));
        await_mailbox(mailbox);
        const float2 *const of_group = of_parts + (place.has_group ? place.group : 0) * a.parts;
        sum = product = 0.0f;
#pragma unroll 2
        for (int i = place.of_group; i < a.parts; i += lanes) {
            sum += of_group[i].x;
            product += of_group[i].y;
        }
        sum = sum_few(sum, lanes);
        product = sum_few(product, lanes);
    }
    product -= rest * sum;
    const float centred = -(product * rstd) * (rstd * a.share), plain = -sum * a.share - centred * rest;

    /* ---- results ---- */
    float of_x[2], level[2];
    place.broadcast(a, centred, of_x);
    place.broadcast(a, plain, level);
#pragma unroll
    for (int k = 0; k < K; k++) {
        compiler_barrier(held_x[k]);
        compiler_barrier(held_dy[k]);
    }
    char *to = a.out + sample;
    choose_activation<true, false>(a.activation, [&](auto chosen) {
        const auto give = [&](int k) {
            float x[V], dy[V];
            unpack<T, V>(held_x[k], x);
            unpack<T, V>(held_dy[k], dy);
            differentiate(chosen, x, dy);
#pragma unroll
            for (int i = 0; i < V; i++)
                x[i] = fmaf(slope[i], dy[i],
                            fmaf(i < place.split ? of_x[0] : of_x[1], x[i], i < place.split ? level[0] : level[1]));
            store_vector<T, V>(to, 0, make_vector<T, V>(x));
            to += step;
        };
        walk_rows<0, K>(place.left, a.at_once, give);
    });
}

#define INSTANCE(layout, schedule, direction, type, elements, vectors, threads, registers)                             \
    NORMFUSE_KERNEL(layout, schedule, direction, type, elements, vectors, registers)                                   \
    {                                                                                                                  \
        cluster_##direction<type, elements, vectors>(a);                                                               \
    }
NORMFUSE_KERNELS_COLUMNS_CLUSTER(INSTANCE)
