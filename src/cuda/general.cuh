/* SPDX-License-Identifier: MIT
 *
 * general.cuh - what takes every call: both layouts, any alignment and activation, and all additions, at the
 * cost of the tensors that move. A unit is one channel of a sample (rows), or the channels of a vector or word
 * (columns); a few threads, its lanes, share it and walk the positions in turn, so that a thread's channels are the
 * same all the way and what it knows and sums of them stays in registers.
 *
 * A norm takes two passes: one kernel sums, a later one joins what its blocks found, and another writes results. */
#ifndef NORMFUSE_CUDA_GENERAL_CUH
#define NORMFUSE_CUDA_GENERAL_CUH

#include "columns.cuh"
#include "gradients.cuh"

/* The part of a tensor that a block has, and the thread's share of it. */
template <typename T, int V, bool columns> struct general_tile {
    static constexpr int channels = V; /* of a unit */
    static constexpr bool whole = V <= 2;
    int part;                /* of the parts of the sums */
    int first_channel, here; /* of the block; with rows folded, of all of them together */
    int unit, lane;          /* in the block; of those that share the unit */
    int n, samples, row;     /* the first sample and row (position), and how many */
    int each, count;         /* rows of the thread, of a sample and of all */
    /* Vectors: elements of the one that the sample begins in that are before it; where the thread has that one 0, else
     * -1; elements of its last one that are of the sample. */
    int lead, first_edge, finish;
    int joined; /* copies of a channel, where the block has all of them: it joins these */
    bool active;

    __device__ __forceinline__ explicit general_tile(const normfuse_cuda_arguments &a)
    {
        const normfuse_cuda_geometry &g = a.geometry;
        const int block = (int)(g.backwards ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
        /* Blocks that exchange follow one another by part; others by width, as memory does. */
        const bool by_width = columns && (!whole || g.interleaved);
        const normfuse_cuda_divisor &inner = by_width ? g.by_blocks_wide : g.by_parts,
                                    &outer = by_width ? g.by_parts : g.by_blocks_wide;
        const int of_inner = divide(block, inner), of_sample = divide(of_inner, outer);
        const int in_inner = block - of_inner * (int)inner.divisor;
        const int in_outer = of_inner - of_sample * (int)outer.divisor;
        part = by_width ? in_outer : in_inner;
        const int stretch = divide(part, g.by_parts_a_sample), chunk = part - stretch * g.parts_a_sample;
        n = g.all_samples ? stretch * g.part_samples : of_sample;
        samples = g.all_samples ? min(g.part_samples, (int)a.problem.n - n) : 1;
        first_channel = (by_width ? in_inner : in_outer) * g.width * channels;
        here = min(g.width * channels, (columns ? g.row_channels : (int)a.problem.c) - first_channel);
        joined = columns && g.blocks_wide == 1 ? g.folded : 1;
        const int lanes = g.unit_lanes;
        if constexpr (columns) {
            lane = divide((int)threadIdx.x, g.by_width);
            unit = (int)threadIdx.x - lane * g.width;
        } else {
            unit = divide((int)threadIdx.x, g.by_rows_at_once);
            lane = (int)threadIdx.x - unit * lanes;
        }
        active = lane < lanes && unit < g.width && unit * channels < here;
        /* Rows of vectors may be dealt out in turn. */
        const bool in_turn = !whole && g.interleaved;
        row = chunk * (in_turn ? lanes : g.part_rows) + lane;
        int own_rows = g.rows, rest = 0;
        if constexpr (!whole) {
            lead = (int)(n * a.problem.x_batch) & (V - 1);
            rest = g.rest + lead - channel();
            own_rows = g.whole_rows + (rest > 0);
            if (rest > g.row_channels) {
                rest -= g.row_channels;
                own_rows++;
            }
        }
        const normfuse_cuda_divisor &step = whole ? g.by_rows_at_once : g.by_row_step;
        const int rows = (in_turn ? own_rows : min(own_rows, (chunk + 1) * g.part_rows)) - row;
        each = active && rows > 0 ? divide(rows + (int)step.divisor - 1, step) : 0;
        count = each * samples;
        if constexpr (!whole) {
            first_edge = row == 0 && channel() == 0 && lead > 0 ? 0 : -1;
            const bool is_last = rest > 0 && row + (each - 1) * (int)step.divisor == own_rows - 1;
            finish = is_last && rest < V ? rest : V;
        }
    }
    __device__ __forceinline__ int channel() const
    {
        return first_channel + unit * channels;
    }
    /* Vectors: elements of the thread's k-th one that are of the sample. */
    __device__ __forceinline__ int begin_of(int k) const
    {
        return k == first_edge ? lead : 0;
    }
    __device__ __forceinline__ int end_of(int k) const
    {
        return k == count - 1 ? finish : V;
    }
    __device__ __forceinline__ bool is_edge(int k) const
    {
        return k == first_edge || (k == count - 1 && finish < V);
    }
    __device__ __forceinline__ bool has_edges() const
    {
        return !whole && count > 0 && (first_edge == 0 || finish < V);
    }
    /* How many values the thread has of its i-th channel. */
    __device__ __forceinline__ int count_of(int i) const
    {
        return has_edges() ? count - (first_edge == 0 && i < lead) - (i >= finish) : count;
    }
    /* Channels that the block has sums of; copies that are not joined count. */
    __device__ __forceinline__ int summed(const normfuse_cuda_arguments &a) const
    {
        return joined > 1 ? (int)a.problem.c : here;
    }
    /* Where the block has such a copy of the i-th of these. */
    __device__ __forceinline__ int place_of(const normfuse_cuda_arguments &a, int i, int copy) const
    {
        int place = i + copy * (int)a.problem.c;
        if constexpr (!whole)
            if (joined > 1) {
                place += lead;
                place -= place >= a.geometry.row_channels ? a.geometry.row_channels : 0;
            }
        return place;
    }
    /* The channel of the block's i-th, and which copy of it that is where rows are folded. */
    __device__ __forceinline__ int channel_at(const normfuse_cuda_arguments &a, int i, int &copy) const
    {
        int c = first_channel + i;
        copy = 0;
        if constexpr (columns && V > 1) {
            if constexpr (!whole) {
                c -= lead;
                c += c < 0 ? a.geometry.row_channels : 0;
            }
            for (; c >= (int)a.problem.c; c -= (int)a.problem.c)
                copy++;
        }
        return c;
    }
};

/* Doubles, whose functions are long, have one loop for all activations. */
template <typename R> constexpr bool has_one_loop = sizeof(R) == 8;

/* The tensors that a walk reads. */
enum general_tensor { GENERAL_X, GENERAL_PRE_ADD, GENERAL_POST_ADD, GENERAL_DY, GENERAL_DU };

/* What a loop knows when it is compiled. */
template <bool value> struct choice {
    static constexpr bool constant = value;
};

/* What is worked on together: B elements or words, of which the last of a thread may have fewer, or a vector, in parts
 * of H values. The values of a word follow one another, so that value i of part h is of the thread's channel (h H + i)
 * % V. */
template <typename T, int V, int B> struct general_results {
    static constexpr int H = V > values_a_part ? values_a_part : B * V;
    raw<T, V> of[B];

    __device__ __forceinline__ void put(int h, const compute<T> (&values)[H])
    {
        if constexpr (V > 2) {
            pack_part<T, V>(of[0], h, values);
        } else {
#pragma unroll
            for (int k = 0; k < B; k++) {
                compute<T> own[V];
                each<V>([&](int i) { own[i] = values[k * V + i]; });
                of[k] = make_vector<T, V>(own);
            }
        }
    }
    __device__ __forceinline__ void take(int h, compute<T> (&values)[H]) const
    {
        if constexpr (V > 2) {
            unpack_part<T, V>(of[0], h, values);
        } else {
#pragma unroll
            for (int k = 0; k < B; k++) {
                compute<T> own[V];
                unpack<T, V>(of[k], own);
#pragma unroll
                for (int i = 0; i < V; i++)
                    values[k * V + i] = own[i];
            }
        }
    }
};

/* The loader: K at a time, through registers. */
template <typename T, int V, int K, bool columns, int N, bool vectors = (V > 2)> struct general_loader {
    static constexpr int B = K, H = B * V, parts = 1;
    static constexpr bool fast = sizeof(T) == 2;
    using results = general_results<T, V, B>;
    struct batch {
        results of[N];
        int64_t at, step; /* bytes from a tensor's first element to the first vector, and from one to the next */
        int count;

        __device__ __forceinline__ void take(int tensor, int h, compute<T> (&values)[H]) const
        {
            of[tensor].take(h, values);
        }
        __device__ __forceinline__ static constexpr bool is_edge()
        {
            return false;
        }
        __device__ __forceinline__ static constexpr bool has(int)
        {
            return true;
        }
        __device__ __forceinline__ void store(int, char *data, const results &found) const
        {
            if (!data)
                return;
            char *to = data + at;
#pragma unroll
            for (int k = 0; k < B; k++, to += step)
                if (k < count)
                    store_vector<T, V>(to, 0, found.of[k]);
        }
    };

    const normfuse_cuda_arguments &a;
    const general_tile<T, V, columns> &tile;
    const char *from[N]; /* nullptr: not read */
    bool adds;           /* others than x and dy are read */
    batch held;
    /* Of what is requested next, as `at` and `step` of a batch. */
    int64_t at, step, jump;
    int left, of_sample; /* vectors of the sample */

    __device__ __forceinline__ general_loader(const normfuse_cuda_arguments &arguments,
                                              const general_tile<T, V, columns> &of_thread)
        : a(arguments), tile(of_thread)
    {
    }
    __device__ __forceinline__ void find()
    {
        const normfuse_view x = a.problem.x();
        const int64_t row = x.position * (int64_t)sizeof(T);
        at = (tile.n * x.batch + tile.channel() * x.channel) * (int64_t)sizeof(T) + tile.row * row;
        step = a.geometry.unit_lanes * row;
        jump = x.batch * (int64_t)sizeof(T) - (tile.each - 1) * step;
        left = of_sample = tile.each;
        /* A batch is of one sample: many of few positions are walked as one. */
        if (!columns && of_sample == 1) {
            step = jump;
            left = of_sample = tile.samples;
        }
        if constexpr (V > 1) {
            make_opaque(step);
            make_opaque(jump);
        }
    }
    /* What every call reads is not asked for at each vector. */
    static __device__ __forceinline__ constexpr bool always_reads(int i)
    {
        return i == GENERAL_X || i == GENERAL_DY;
    }
    template <typename Work> __device__ __forceinline__ void each_read(Work work) const
    {
#pragma unroll
        for (int i = 0; i < N; i++)
            if (always_reads(i))
                work(i);
        if (adds) {
#pragma unroll
            for (int i = 0; i < N; i++)
                if (!always_reads(i) && from[i])
                    work(i);
        }
    }
    /* The next batch, all of it of one sample. Through the L1: neighbours share its sectors. */
    __device__ __forceinline__ void request()
    {
        held.at = at;
        held.step = step;
        held.count = min(left, B);
        each_read([&](int i) {
#pragma unroll
            for (int k = 0; k < B; k++)
                request_where(k < held.count, held.of[i].of[k], from[i] + held.at + k * held.step);
        });
        left -= held.count;
        at += (held.count - 1) * step + (left == 0 ? jump : step);
        left = left == 0 ? of_sample : left;
    }
    /* Begins at the first one; a thread that has none holds zeros. */
    __device__ __forceinline__ void open()
    {
        find();
        adds = false;
#pragma unroll
        for (int i = 0; i < N; i++) {
            adds = adds || (!always_reads(i) && from[i]);
#pragma unroll
            for (int k = 0; k < B; k++)
                held.of[i].of[k] = raw<T, V>();
        }
        request();
    }
    template <typename Work> __device__ __forceinline__ void choose(bool, Work work) const
    {
        work(choice<false>());
    }
    /* Of each of the thread's channels a value of its own. */
    template <typename Take> __device__ __forceinline__ void first_values(compute<T> (&values)[V], Take take) const
    {
        compute<T> found[H];
        take(held, 0, found);
        each<V>([&](int i) { values[i] = found[i]; });
    }
    /* Calls work(batch) for each, in order. What a batch lacks are the thread's first ones of x and pre_add, whose
     * derivative is a number if the set's are, and 0. */
    template <typename Alone, typename Work> __device__ __forceinline__ void walk(Alone, Work work)
    {
        const raw<T, V> first_x = held.of[GENERAL_X].of[0], first_added = held.of[GENERAL_PRE_ADD].of[0];
#pragma unroll 1
        for (int left_of_all = tile.count; left_of_all > 0;) {
            if (held.count < B)
                each_read([&](int i) {
#pragma unroll
                    for (int k = 0; k < B; k++)
                        if (k >= held.count)
                            held.of[i].of[k] = i == GENERAL_X         ? first_x
                                               : i == GENERAL_PRE_ADD ? first_added
                                                                      : zero_vector<T, V>();
                });
            work(held);
            left_of_all -= held.count;
            if (left_of_all > 0)
                request();
        }
    }
    __device__ __forceinline__ void store_edges(int, char *) const
    {
    }
};

/* Vectors of 16 bytes one at a time, of one sample, through K slots of the thread in shared memory. Where samples and
 * vectors do not begin together the thread's first and last vector may have elements of others: such edges are rare,
 * and their results wait until all others are stored. */
template <typename T, int V, int K, bool columns, int N> struct general_loader<T, V, K, columns, N, true> {
    static constexpr int H = values_a_part, parts = V / H, RESULTS = 2;
    static constexpr bool fast = sizeof(T) == 2;
    using results = general_results<T, V, 1>;
    using tile_of_thread = general_tile<T, V, columns>;
    using edge_results = uint4[RESULTS][2]; /* of the thread's first vector and of its last */
    template <bool alone> struct batch_of {
        const uint4 *slot;
        const int (&places)[N];
        const tile_of_thread &tile;
        edge_results &of_edges;
        unsigned at;
        int k;

        __device__ __forceinline__ void take(int tensor, int h, compute<T> (&values)[H]) const
        {
            unpack_part<T, V>(slot[places[tensor]], h, values);
        }
        __device__ __forceinline__ bool is_edge() const
        {
            return !alone && tile.is_edge(k);
        }
        /* Whether the thread's i-th channel is the sample's here. */
        __device__ __forceinline__ bool has(int i) const
        {
            return i >= tile.begin_of(k) && i < tile.end_of(k);
        }
        __device__ __forceinline__ void store(int result, char *data, const results &found) const
        {
            if (!data)
                return;
            if (is_edge())
                of_edges[result][k != tile.first_edge] = found.of[0];
            else
                store_vector<T, V>(data + bytes_of(at), 0, found.of[0]);
        }
    };

    const normfuse_cuda_arguments &a;
    const tile_of_thread &tile;
    const char *from[N];  /* nullptr: not read */
    int places[N];        /* of the tensors in a slot */
    bool adds, alone;     /* others than x and dy are read; neither these nor edges, by the warp */
    unsigned first, step; /* vectors from a tensor's first one to the thread's, and from one of these to the next */
    edge_results &of_edges;

    __device__ __forceinline__ static edge_results &edges_in_shared()
    {
        __shared__ edge_results edges;
        return edges;
    }
    __device__ __forceinline__ general_loader(const normfuse_cuda_arguments &arguments, const tile_of_thread &of_thread)
        : a(arguments), tile(of_thread), of_edges(edges_in_shared())
    {
    }
    static __device__ __forceinline__ constexpr bool always_reads(int i)
    {
        return i == GENERAL_X || i == GENERAL_DY;
    }
    static __device__ __forceinline__ int64_t bytes_of(unsigned vector)
    {
        return (int64_t)((uint64_t)vector * sizeof(uint4));
    }
    __device__ __forceinline__ uint4 *slot(int k) const
    {
        NORMFUSE_DYNAMIC_SHARED(dynamic);
        return dynamic + threadIdx.x + k * a.geometry.general.slot;
    }
    template <bool alone> __device__ __forceinline__ void request(uint4 *to, int k, unsigned at) const
    {
        const auto copy = [&](int i) {
            if (!alone && k == tile.count - 1)
                copy_before(to + places[i], from[i] + bytes_of(at), tile.finish * (int)sizeof(T));
            else
                copy_ahead(to + places[i], from[i], bytes_of(at));
        };
        if (k < tile.count) {
#pragma unroll
            for (int i = 0; i < N; i++)
                if (always_reads(i))
                    copy(i);
            if (!alone && adds) {
#pragma unroll
                for (int i = 0; i < N; i++)
                    if (!always_reads(i) && from[i])
                        copy(i);
            }
        }
        commit_copies();
    }
    __device__ __forceinline__ void open()
    {
        const normfuse_view x = a.problem.x();
        first = (unsigned)((tile.n * x.batch + (tile.channel() - tile.lead) + tile.row * x.position) / V);
        step = a.geometry.by_row_step.divisor * (unsigned)(x.position / V);
        make_opaque(step);
        adds = false;
        int place = 0;
#pragma unroll
        for (int i = 0; i < N; i++) {
            adds = adds || (!always_reads(i) && from[i]);
            places[i] = place;
            place += always_reads(i) || from[i] ? (int)blockDim.x : 0;
        }
        alone = !__any_sync(full_mask, adds || tile.has_edges());
        unsigned at = first;
        if (alone) {
#pragma unroll
            for (int k = 0; k < K; k++, at += step)
                request<true>(slot(k), k, at);
        } else {
#pragma unroll 1
            for (int k = 0; k < K; k++, at += step)
                request<false>(slot(k), k, at);
        }
    }
    /* Whether x, and backward dy, are all that is read, dx or y all that is written, and the warp has no edges. `more`:
     * another result is written. */
    template <typename Work> __device__ __forceinline__ void choose(bool more, Work work) const
    {
        if (alone && !more)
            work(choice<true>());
        else
            work(choice<false>());
    }
    /* Of the first vector, and of the second where the first is an edge. */
    template <typename Take> __device__ __forceinline__ void first_values(compute<T> (&values)[V], Take take) const
    {
        each<V>([&](int i) { values[i] = 0.0f; });
#pragma unroll 1
        for (int k = min(tile.count, 2) - 1; k >= 0; k--) {
            if (k > 0 && tile.first_edge < 0)
                continue;
            wait_for_older_copies<K - 2>();
            const batch_of<false> from_slot = {slot(k), places, tile, of_edges, first, k};
            each<parts>([&](int h) {
                compute<T> found[H];
                take(from_slot, h, found);
                each<H>([&](int i) { values[h * H + i] = from_slot.has(h * H + i) ? found[i] : values[h * H + i]; });
            });
        }
    }
    template <typename Alone, typename Work> __device__ __forceinline__ void walk(Alone, Work work) const
    {
        NORMFUSE_DYNAMIC_SHARED(dynamic);
        const int of_slot = a.geometry.general.slot, behind = K * of_slot;
        unsigned next = first + K * step;
        int place = 0;
#pragma unroll 1
        for (int left = tile.count; left > 0; left--) {
            uint4 *const to = dynamic + threadIdx.x + place;
            wait_for_older_copies<K - 1>();
            work(batch_of<Alone::constant>{to, places, tile, of_edges, next - K * step, tile.count - left});
            request<Alone::constant>(to, tile.count - left + K, next);
            next += step;
            place += of_slot;
            place = place == behind ? 0 : place;
        }
    }
    __device__ __forceinline__ void store_edges(int result, char *data) const
    {
        if (!data || tile.count == 0)
            return;
        const unsigned last = first + (unsigned)(tile.count - 1) * step;
        if (tile.first_edge == 0)
            store_range<T>(data + bytes_of(first), of_edges[result][0], tile.lead, tile.end_of(0));
        if (tile.finish < V && (tile.count > 1 || tile.first_edge != 0))
            store_range<T>(data + bytes_of(last), of_edges[result][1], 0, tile.finish);
    }
};

/* The values of part `h` of a batch as they are normalized: x with what is added to it, rounded. */
template <typename Loader, typename Batch, typename R, int H>
__device__ __forceinline__ void values_of_x(const Batch &from, bool adds, int h, R (&u)[H])
{
    from.take(GENERAL_X, h, u);
    if (adds) {
        R more[H];
        from.take(GENERAL_PRE_ADD, h, more);
        each<H>([&](int i) { more[i] += u[i]; });
        typename Loader::results rounded;
        rounded.put(h, more);
        rounded.take(h, u);
    }
}

/* Where a block's entry is in shared memory. Threads of vectors have some each, one after the other: a warp's would be
 * in the same banks. */
template <int V> __device__ __forceinline__ int spread(int entry)
{
    return V > 2 ? entry ^ (((entry >> 3) ^ (entry >> 6) ^ (entry >> 9)) & (NORMFUSE_SPREAD - 1)) : entry;
}

/* What a block knows of a channel: z = (x - mean) * slope + offset, `rest` of the mean. */
template <typename R> struct alignas(16) general_channel {
    R slope, offset, mean, rest;
};

/* All that is read of a channel's parameters is requested before the first is used. */
template <typename T>
__device__ __forceinline__ general_channel<compute<T>> know_channel(const normfuse_cuda_arguments &a, int n, int c)
{
    using R = compute<T>;
    const normfuse_cuda_problem &p = a.problem;
    const int set = p.sets == NORMFUSE_SETS_GROUP ? divide(c, a.geometry.by_set_channels) : c;
    const requested_value weight = request_parameter(p.weight(), n, c), bias = request_parameter(p.bias(), n, c);
    requested_value scale = {0, 0}, shift = {0, 0}, added = {0, 0};
    if (p.scale().data || p.shift().data || p.pre_bias().data) {
        scale = request_parameter(p.scale(), n, c);
        shift = request_parameter(p.shift(), n, c);
        added = request_parameter(p.pre_bias(), n, c);
    }
    const requested_set statistics(a, n, set, c);
    const R more = p.scale().data ? R(1) + receive<R>(scale, p.scale().type) : R(1);
    general_channel<R> of = {p.weight().data ? receive<R>(weight, p.weight().type) * more : more,
                             p.bias().data ? receive<R>(bias, p.bias().type) * more : R(0), R(0), R(0)};
    if (p.shift().data)
        of.offset += receive<R>(shift, p.shift().type);
    of.slope = statistics.scale(of.slope, p.eps) * statistics.rstd<R>();
    double mean = statistics.mean();
    double left = 0.0;
    if (p.pre_bias().data)
        mean = add_exactly(mean, -(double)receive<R>(added, p.pre_bias().type), left);
    split_mean<T>(mean, of.mean, of.rest);
    of.rest += (R)left;
    of.offset -= of.rest * of.slope;
    return of;
}

/* Of all channels of the block what know_channel gives, and the slopes of prelu. */
template <typename T, int V, bool columns>
__device__ __forceinline__ void know_channels(const normfuse_cuda_arguments &a, const general_tile<T, V, columns> &tile,
                                              general_channel<compute<T>> *channels, compute<T> *of_prelu)
{
    using R = compute<T>;
    for (int i = (int)threadIdx.x; i < tile.summed(a); i += (int)blockDim.x) {
        int copy;
        const int c = tile.joined > 1 ? i : tile.channel_at(a, i, copy);
        const general_channel<R> of = know_channel<T>(a, tile.n, c);
        const bool is_prelu = a.problem.activation == NORMFUSE_PRELU;
        const R slope = is_prelu ? parameter<R>(a.problem.slope(), 0, c, R(0)) : R(0);
        for (copy = 0; copy < tile.joined; copy++) {
            const int place = tile.place_of(a, i, copy);
            channels[spread<V>(place)] = of;
            if (is_prelu)
                of_prelu[place] = slope;
        }
    }
}

/* The thread's channels, slope and offset times `factor`. */
template <typename R, int W>
__device__ __forceinline__ void recall_channels(const general_channel<R> *channels, int first, R factor, R (&slope)[W],
                                                R (&offset)[W], R (&mean)[W])
{
#pragma unroll
    for (int i = 0; i < W; i++) {
        const general_channel<R> of = channels[spread<W>(first + i)];
        slope[i] = of.slope * factor;
        offset[i] = of.offset * factor;
        mean[i] = of.mean;
    }
}

#endif
