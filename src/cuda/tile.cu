/* SPDX-License-Identifier: MIT
 *
 * tile.cu - norm groups that are few rows of adjacent values each, one element a load: small calls, where what a warp
 * does once takes longer than the memory, and whatever has no vectors of 16 bytes. Every addition, any alignment.
 *
 * What a block has is a tile: `width` adjacent columns, whole norm groups of `group` columns each, of part_rows rows.
 * Columns (NHWC): a column is a channel, a row a position. Rows (NCHW), batch norm: a column is a position of a
 * channel, `channel_columns` of them each, a row is a sample. A thread has one column and every at_once-th row, all in
 * registers, so what it weighs its values by it requests once. Each warp joins the block's sums for itself, so the
 * block meets once; the blocks of a cluster send one another what they found.
 *
 * Lanes stand for norm groups when sums are joined: those of the i-th are the 2^lane_bits from i << lane_bits on. A
 * thread without a column or a row has zeros, goes through the same shuffles and barriers, and stores nothing. */
#include "gradients.cuh"
#include "rows.cuh"
#include "single.cuh"

/* out = act(out), or, of a derivative, out *= act'(z). The rare activations are long: their slots go
 * through memory of the thread, so that there is one loop over them and not as many copies as registers would need. */
template <bool fast, bool derivative, typename R, int K>
__device__ __forceinline__ void activate_slots(int used, R (&z)[K], R (&out)[K], int activation, R p)
{
    choose_activation<true, true>(activation, [&](auto chosen) {
        constexpr int constant = decltype(chosen)::constant;
        constexpr bool rare = constant < 0;
        R held_z[rare ? K : 1], held[rare ? K : 1];
        if (derivative && constant == NORMFUSE_IDENTITY)
            return;
        if (rare)
            in_slots<K>(used, [&](int k) {
                held_z[rare ? k : 0] = z[k];
                held[rare ? k : 0] = out[k];
            });
        const R factor = takes_half<fast, true>(constant) ? R(0.5) : R(1);
#pragma unroll(rare ? 1 : K / slots_at_once)
        for (int begin = 0; begin < K; begin += slots_at_once) {
            if (begin >= used)
                break;
            R few_z[slots_at_once], few[slots_at_once];
            each<slots_at_once>([&](int i) {
                few_z[i] = rare ? held_z[rare ? begin + i : 0] : z[begin + i] * factor;
                few[i] = rare ? held[rare ? begin + i : 0] : out[begin + i] * factor;
            });
            if constexpr (derivative)
                differentiate_by<fast>(few, few_z, chosen, activation, p);
            else
                activate<fast, true>(few, chosen, activation, p);
            each<slots_at_once>([&](int i) { (rare ? held[rare ? begin + i : 0] : out[begin + i]) = few[i]; });
        }
        if (rare)
            in_slots<K>(used, [&](int k) { out[k] = held[rare ? k : 0]; });
    });
}

/* Those values that the thread has, `step` bytes apart. */
template <typename T, int K, typename Step, typename Has>
__device__ __forceinline__ void store_slots(int used, char *to, Step step, const compute<T> (&values)[K], Has has)
{
    in_slots<K>(used, [&](int k) {
        if (has(k))
            store_number<T>(to, values[k]);
        to += step;
    });
}

/* What is known of some values: about + mean is their mean, squares are about that. */
template <typename R> struct __align__(4 * sizeof(R)) tile_entry
{
    R about, mean, squares, count;
};
template <typename R> struct __align__(2 * sizeof(R)) tile_sums
{
    R plain, centred;
};

struct tile_place {
    const normfuse_cuda_tile &a;
    int rank, part, n, first;  /* of the block: its number in the cluster and of its norm groups' parts, its sample, its
                                  first column */
    int beside, column, own;   /* the thread's first row; its column and norm group in the block */
    int left;                  /* rows of the block from the thread's first on; not above 0: the thread has none */
    int values;                /* of a norm group that the block has */
    int lane, group, of_group; /* the lane's norm group and its number among that group's lanes */
    bool has_group;            /* it is one of the tensor's */
    int64_t at;                /* bytes from the tensor's beginning to the thread's first value */

    __device__ __forceinline__ tile_place(const normfuse_cuda_tile &a, int value_bytes) : a(a)
    {
        const int cluster = divide((int)blockIdx.x, a.by_ranks), samples = divide(cluster, a.by_blocks_wide);
        rank = (int)blockIdx.x - cluster * (int)a.by_ranks.divisor;
        const int of_cluster = divide(rank, a.by_parts);
        part = rank - of_cluster * a.parts;
        n = samples + of_cluster;
        first = (cluster - samples * (int)a.by_blocks_wide.divisor) * a.width;
        const int first_row = part * a.part_rows;
        beside = divide((int)threadIdx.x, a.by_width);
        column = (int)threadIdx.x - beside * a.width;
        /* The last row of a line that is cut into rows may end early. */
        const int past = a.length ? divide(a.length - column + a.width - 1, a.by_width) : a.rows;
        const bool has = beside < a.at_once && first + column < a.columns;
        left = has ? min(a.part_rows, past - first_row) - beside : 0;
        values = a.length ? min(a.length - first_row * a.width, a.part_rows * a.width)
                          : min(a.rows - first_row, a.part_rows) * a.group;
        at = n * a.batch_bytes + (cluster - samples * (int)a.by_blocks_wide.divisor) * a.tile_bytes +
             (first_row + beside) * a.row_bytes + column * (int64_t)value_bytes;
    }
    __device__ __forceinline__ void find_groups()
    {
        own = divide(column, a.by_group);
        lane = (int)threadIdx.x % 32;
        group = lane >> a.lane_bits;
        of_group = lane - (group << a.lane_bits);
        has_group = group < a.sets && first + group * a.group < a.columns;
    }
    /* Of the lane's norm group: its number in the sample. */
    __device__ __forceinline__ int set() const
    {
        return divide(first, a.by_group) + (has_group ? group : 0);
    }
    /* Of the thread's column. */
    __device__ __forceinline__ int channel() const
    {
        return divide(first + column, a.by_channel_columns);
    }
    __device__ __forceinline__ bool has(int slot) const
    {
        return slot * a.at_once < left;
    }
    /* What the lanes of the thread's norm group know. */
    template <typename R> __device__ __forceinline__ R broadcast(R value) const
    {
        return __shfl_sync(full_mask, value, own << a.lane_bits);
    }
    /* In shared memory a norm group has what its threads found side by side. */
    __device__ __forceinline__ int entry() const
    {
        return column * a.at_once + beside;
    }
    /* A thread's values of a tensor, and of a second one, requested together. What is loaded in a branch is waited for
     * at its end, so there are two ways and not one end for every slots_at_once: 32x500x250 f16 NHWC 24.5 us, so 48.6;
     * and 16 loads where 4 are wanted cost 0.4 us. */
    template <typename Raw, int K>
    __device__ __forceinline__ void request(const char *data, Raw (&values)[K], const char *other = nullptr,
                                            Raw (*others)[K] = nullptr) const
    {
        const int64_t step = a.at_once * a.row_bytes;
        int64_t from = at;
        const auto request_slot = [&](int k) {
            load_where(has(k), values[k], data + from);
            if (others)
                load_where(has(k), (*others)[k], other + from);
            from += step;
        };
        if (a.slots == slots_at_once)
            each<slots_at_once>(request_slot);
        else
            each<K>(request_slot);
    }
    template <typename T, int K>
    __device__ __forceinline__ void store(char *data, const compute<T> (&values)[K]) const
    {
        store_slots<T>(a.slots, data + at, a.at_once * a.row_bytes, values, [&](int k) { return has(k); });
    }
    /* The lane's norm group: first the mean, then squares about it, which cannot cancel. */
    template <typename R>
    __device__ __forceinline__ tile_entry<R> join(const tile_entry<R> *entries, int count, R values) const
    {
        constexpr int held = 4; /* of the lane's, read once */
        const int lanes = 1 << a.lane_bits;
        const R about = entries[0].about;
        R mean = R(0), squares = R(0), means[held], found[held], counts[held];
        each<held>([&](int k) {
            const int i = of_group + k * lanes;
            const tile_entry<R> one = i < count ? entries[i] : tile_entry<R>{about, R(0), R(0), R(0)};
            means[k] = (one.about - about) + one.mean;
            found[k] = one.squares;
            counts[k] = one.count;
            mean += counts[k] * means[k];
        });
#pragma unroll 4
        for (int i = of_group + held * lanes; i < count; i += lanes)
            mean += entries[i].count * ((entries[i].about - about) + entries[i].mean);
        mean = sum_few(mean, lanes);
        mean = quotient(mean, values, R(1) / values);
        each<held>([&](int k) { squares += found[k] + counts[k] * (means[k] - mean) * (means[k] - mean); });
#pragma unroll 4
        for (int i = of_group + held * lanes; i < count; i += lanes) {
            const R distance = ((entries[i].about - about) + entries[i].mean) - mean;
            squares += entries[i].squares + entries[i].count * distance * distance;
        }
        return {about, mean, sum_few(squares, lanes), values};
    }
};

/* Of the lane's norm group, or channel where there are none: about + rest is the mean. */
template <typename R> struct tile_statistics {
    R about, rest;
    double rstd;
};

/* Statistics that a call gives: saved ones; where there are no norm groups the running ones, or for affine none. */
struct given_statistics {
    const bool saved;
    const normfuse_parameter centre, spread;
    const requested_value of_centre, of_spread;

    __device__ __forceinline__ given_statistics(const normfuse_cuda_problem &p, const tile_place &place, bool wanted)
        : saved(p.sets != NORMFUSE_SETS_NONE), centre(saved ? p.mean() : p.running_mean()),
          spread(saved ? p.rstd() : p.running_var()), of_centre(request(centre, place, wanted)),
          of_spread(request(spread, place, wanted))
    {
    }
    __device__ __forceinline__ static requested_value request(const normfuse_parameter &of, const tile_place &place,
                                                              bool wanted)
    {
        return request_parameter(of, place.n, place.set(), wanted);
    }
    template <typename R>
    __device__ __forceinline__ tile_statistics<R> receive(const normfuse_cuda_problem &p) const
    {
        const double mean = ::receive<double>(of_centre, centre.type);
        const R about = (R)mean;
        double rstd = 1.0;
        if (saved)
            rstd = (double)::receive<R>(of_spread, spread.type);
        else if (p.evaluate())
            rstd = 1.0 / sqrt((spread.data ? ::receive<double>(of_spread, spread.type) : 1.0) + p.eps);
        return {about, (R)(mean - (double)about), rstd};
    }
};

/* Of the thread's column: z = (x - about) * slope + offset. */
template <typename R> struct tile_column {
    R about, slope, offset;

    template <typename Requested>
    __device__ __forceinline__ tile_column(const normfuse_cuda_problem &p, const tile_place &place,
                                           const Requested &weights, const tile_statistics<R> &of)
        : about(place.broadcast(of.about))
    {
        const R rest = place.broadcast(of.rest);
        weigh(p, weights, slope, offset);
        slope = (R)((double)slope * place.broadcast(of.rstd));
        offset -= rest * slope;
    }
};

/* A struct into the same place of another block's shared memory. */
template <typename S>
__device__ __forceinline__ void send_struct(cluster_mailbox &mailbox, S *place, int rank, const S &value)
{
    const double *const words = reinterpret_cast<const double *>(&value);
    each<(int)(sizeof(S) / 8)>([&](int i) { send(mailbox, reinterpret_cast<double *>(place) + i, rank, words[i]); });
}

/* Of the thread's column. */
struct tile_weights : requested_weights {
    const normfuse_cuda_problem &p;
    const bool is_prelu;
    requested_value slope; /* of prelu */

    __device__ __forceinline__ tile_weights(const normfuse_cuda_problem &p, const tile_place &place)
        : p(p), is_prelu(place.a.is_prelu)
    {
        const auto request = [&](const normfuse_parameter &of) {
            return request_parameter(of, place.n, place.channel(), place.left > 0);
        };
        weight = request(p.weight());
        bias = request(p.bias());
        scale = shift = slope = {0, 0};
        if (place.a.asks_more) {
            scale = request(p.scale());
            shift = request(p.shift());
            slope = request(p.slope());
        }
    }
    /* Prelu is leaky_relu with its channel's slope. */
    __device__ __forceinline__ int activation() const
    {
        return is_prelu ? (int)NORMFUSE_LEAKY_RELU : p.activation;
    }
    template <typename R> __device__ __forceinline__ R act_param() const
    {
        return is_prelu ? receive<R>(slope, p.slope().type) : (R)p.act_param;
    }
};

/* ---- forward ---------------------------------------------------------------------------------------------------- */

/* Of the values of all blocks that share the lane's norm group; written where the call wants them. */
template <typename T, int K>
__device__ __forceinline__ tile_statistics<compute<T>> find_statistics(const normfuse_cuda_arguments &all,
                                                                       const tile_place &place,
                                                                       cluster_mailbox &mailbox,
                                                                       const compute<T> (&x)[K])
{
    using R = compute<T>;
    const normfuse_cuda_tile &a = all.tile;
    const normfuse_cuda_problem &p = all.problem;
    NORMFUSE_DYNAMIC_SHARED(dynamic);
    tile_entry<R> *const entries = reinterpret_cast<tile_entry<R> *>(dynamic), *const of_parts =
                                                                                   entries + a.width * a.at_once;
    /* About the thread's first value; then about its mean. */
    const R own_about = x[0];
    R sum = R(0), squares = R(0), own_count = R(0);
    in_slots<K>(a.slots, [&](int k) {
        if (place.has(k)) {
            sum += x[k] - own_about;
            own_count += R(1);
        }
    });
    const R own_mean = sum / max(own_count, R(1));
    in_slots<K>(a.slots, [&](int k) {
        const R distance = (x[k] - own_about) - own_mean;
        if (place.has(k))
            squares += distance * distance;
    });
    if (place.beside < a.at_once)
        entries[place.entry()] = {own_about, own_mean, squares, own_count};
    __syncthreads();

    const int lanes = 1 << a.lane_bits, of_set = a.group * a.at_once, slot = place.has_group ? place.group : 0;
    tile_entry<R> all_of = place.join(entries + slot * of_set, of_set, (R)place.values);
    if (a.parts > 1) {
        await_open_mailboxes();
        if (threadIdx.x < 32 && place.group < a.sets)
            for (int other = place.of_group; other < a.parts; other += lanes)
                send_struct(mailbox, of_parts + place.group * a.parts + place.part, other, all_of);
        await_mailbox(mailbox);
        all_of = place.join(of_parts + slot * a.parts, a.parts, (R)p.set_values);
    }
    const R variance = quotient(all_of.squares, (R)p.set_values, R(1) / (R)p.set_values);
    const R rstd = inverse_root(variance + (R)p.eps);
    /* By one warp of the block that speaks for the norm groups. */
    if (place.part == 0 && threadIdx.x >= blockDim.x - 32 && place.has_group && place.of_group == 0) {
        const bool by_channel = p.sets == NORMFUSE_SETS_BATCH;
        const int set = place.set();
        const double mean = (double)all_of.about + (double)all_of.mean;
        const double of_running =
            store_statistics(all, place.n, set, by_channel ? set : (int64_t)place.n * p.groups + set, mean, variance,
                             rstd, (double)p.set_values);
        if (p.has_running_momentum() && by_channel)
            update_running<R>(p, set, mean, of_running);
    }
    const R about = all_of.about + all_of.mean, back = about - all_of.about;
    return {about, (all_of.about - (about - back)) + (all_of.mean - back), (double)rstd};
}

template <typename T, int K> __device__ __forceinline__ void tile_forward(const normfuse_cuda_arguments &all)
{
    follow_kernel();
    using R = compute<T>;
    constexpr bool fast = sizeof(T) == 2;
    const normfuse_cuda_tile &a = all.tile;
    const normfuse_cuda_problem &p = all.problem;
    const bool is_given = p.sets == NORMFUSE_SETS_NONE;
    __shared__ cluster_mailbox mailbox;

    tile_place place(a, (int)sizeof(T));
    raw<T, 1> requested_x[K], more[K];
    place.request(a.x, requested_x);
    if (a.pre_add)
        place.request(a.pre_add, more);
    place.find_groups();
    const given_statistics given(p, place, is_given);
    const tile_weights weights(p, place);
    if (!is_given && a.parts > 1)
        open_only_mailbox(mailbox, a.sets * a.parts * (int)sizeof(tile_entry<R>));

    R x[K];
    in_slots<K>(a.slots, [&](int k) { x[k] = number_of<T>(requested_x[k]); });
    if (a.pre_add) {
        in_slots<K>(a.slots, [&](int k) { x[k] = rounded_sum<T>(x[k], number_of<T>(more[k])); });
        if (a.u)
            place.store<T>(a.u, x);
    }
    if (a.post_add)
        place.request(a.post_add, more);
    const tile_statistics<R> of =
        is_given ? given.receive<R>(p) : find_statistics<T>(all, place, mailbox, x);

    const tile_column<R> own(p, place, weights, of);
    in_slots<K>(a.slots, [&](int k) {
        x[k] = fma(x[k] - own.about, own.slope, own.offset);
        if (a.post_add)
            x[k] += number_of<T>(more[k]);
    });
    activate_slots<fast, false>(a.slots, x, x, weights.activation(), weights.act_param<R>());
    place.store<T>(a.out, x);
}

/* ---- backward --------------------------------------------------------------------------------------------------- */

/* Where the blocks of one cluster have all samples they send the sums of their channels to its first one, each to a
 * place of its own, which adds them; else these go to memory, where a later kernel does, as do those of prelu's slopes.
 */
template <typename R> struct channel_mailbox {
    cluster_mailbox &mailbox;
    tile_sums<R> *places; /* of each channel one for each of `senders` */
    int senders;
    double *sums; /* memory */
};

/* One thread, of one channel of the block. */
template <typename R>
__device__ __forceinline__ void finish_channel(const normfuse_cuda_arguments &all, const tile_place &place,
                                               const channel_mailbox<R> &gradients, int channel, double plain,
                                               double centred, R rstd)
{
    const normfuse_cuda_tile &a = all.tile;
    const normfuse_cuda_problem &p = all.problem;
    const int c = divide(place.first, a.by_channel_columns) + channel;
    if (a.samples == 0) {
        const int64_t slots = all.geometry.sum_slots;
        reinterpret_cast<double2 *>(
            gradients.sums)[((int64_t)place.n * p.c + c) * slots + (slots > 1 ? place.part : 0)] =
            make_double2(plain, centred);
    } else if (gradients.senders > 1) {
        send_struct(gradients.mailbox,
                    gradients.places + channel * gradients.senders + (a.by_channels ? place.n : place.rank), 0,
                    tile_sums<R>{(R)plain, (R)(centred * (double)rstd)});
    } else {
        write_gradient(p, p.dweight(), place.n, c, centred * (double)rstd);
        write_gradient(p, p.dbias(), place.n, c, plain);
    }
}

/* By the block that the others sent to. */
template <typename R>
__device__ __forceinline__ void add_channels(const normfuse_cuda_arguments &all, const tile_place &place,
                                             const channel_mailbox<R> &gradients, int channels)
{
    const normfuse_cuda_problem &p = all.problem;
    const int channel = (int)threadIdx.x;
    await_mailbox(gradients.mailbox);
    if (channel >= channels)
        return;
    double plain = 0.0, normalized = 0.0;
    for (int i = 0; i < gradients.senders; i++) {
        plain += (double)gradients.places[channel * gradients.senders + i].plain;
        normalized += (double)gradients.places[channel * gradients.senders + i].centred;
    }
    const int c = divide(place.first, all.tile.by_channel_columns) + channel;
    write_gradient(p, p.dweight(), 0, c, normalized);
    write_gradient(p, p.dbias(), 0, c, plain);
}

/* The sums of the block's channels, where a norm group has several: of columns and rows, by as many lanes of a warp to
 * a channel as the block has threads for. */
template <typename R>
__device__ __forceinline__ void finish_channels(const normfuse_cuda_arguments &all, const tile_place &place,
                                                const channel_mailbox<R> &gradients, const tile_sums<R> *found,
                                                int channels, R rest, R rstd)
{
    const normfuse_cuda_tile &a = all.tile;
    const int of_channel = a.channel_columns * a.at_once, lanes = 1 << a.channel_bits;
    const int channel = (int)threadIdx.x >> a.channel_bits, of = (int)threadIdx.x & (lanes - 1);
    const bool has = channel < channels;
    double plain = 0.0, centred = 0.0;
    if (has)
        for (int i = of; i < of_channel; i += lanes) {
            const tile_sums<R> one = found[channel * of_channel + i];
            plain += (double)one.plain;
            centred += (double)one.centred;
        }
    plain = sum_lanes(plain, lanes);
    centred = sum_lanes(centred, lanes);
    const int from = (has ? divide(channel * a.channel_columns, a.by_group) : 0) << a.lane_bits;
    rest = __shfl_sync(full_mask, rest, from);
    rstd = __shfl_sync(full_mask, rstd, from);
    if (has && of == 0)
        finish_channel(all, place, gradients, channel, plain, centred - (double)rest * plain, rstd);
}

template <typename T, int K> __device__ __forceinline__ void tile_backward(const normfuse_cuda_arguments &all)
{
    follow_kernel();
    using R = compute<T>;
    constexpr bool fast = sizeof(T) == 2;
    const normfuse_cuda_tile &a = all.tile;
    const normfuse_cuda_problem &p = all.problem;
    NORMFUSE_DYNAMIC_SHARED(dynamic);
    __shared__ cluster_mailbox mailbox, gradient_mailbox;
    tile_sums<R> *const entries = reinterpret_cast<tile_sums<R> *>(dynamic),
                        *const of_columns = entries + a.width * a.at_once,
                        *const of_parts = of_columns + (a.by_channels ? 0 : a.width * a.at_once);
    channel_mailbox<R> gradients = {gradient_mailbox, of_parts + (a.parts > 1 ? a.sets * a.parts : 0),
                                    a.by_channels ? a.samples : (int)a.by_ranks.divisor, all.sums};
    const int ranks = (int)a.by_ranks.divisor;
    const bool has_post = a.post_add && p.activation != NORMFUSE_IDENTITY;

    tile_place place(a, (int)sizeof(T));
    raw<T, 1> requested_x[K], requested_dy[K], more[K];
    place.request(a.x, requested_x, a.dy, &requested_dy);
    if (a.pre_add)
        place.request(a.pre_add, more);
    place.find_groups();
    const given_statistics given(p, place, true);
    const tile_weights weights(p, place);
    const int channels = divide(min(a.width, a.columns - place.first), a.by_channel_columns);
    const bool is_first = place.rank == 0 && a.samples > 0 && gradients.senders > 1;
    if (ranks > 1) {
        open_mailbox(mailbox, a.parts > 1 ? a.sets * a.parts * (int)sizeof(tile_sums<R>) : 0);
        open_mailbox(gradient_mailbox, is_first ? channels * gradients.senders * (int)sizeof(tile_sums<R>) : 0);
        announce_mailboxes();
    }

    R x[K], dy[K];
    in_slots<K>(a.slots, [&](int k) {
        x[k] = number_of<T>(requested_x[k]);
        dy[k] = number_of<T>(requested_dy[k]);
    });
    if (a.pre_add)
        in_slots<K>(a.slots, [&](int k) { x[k] = rounded_sum<T>(x[k], number_of<T>(more[k])); });
    if (has_post)
        place.request(a.post_add, more);
    const tile_statistics<R> of = given.receive<R>(p);
    const R rest_of = of.rest, rstd_of = (R)of.rstd;
    const tile_column<R> own(p, place, weights, of);

    /* x becomes x - about, and dy what came through the activation. */
    R z[K];
    in_slots<K>(a.slots, [&](int k) {
        x[k] -= own.about;
        z[k] = fma(x[k], own.slope, own.offset);
        if (has_post)
            z[k] = a.from_y ? number_of<T>(more[k]) : z[k] + number_of<T>(more[k]);
    });
    R of_slope = R(0);
    if (weights.is_prelu)
        in_slots<K>(a.slots, [&](int k) { of_slope += z[k] > R(0) || !place.has(k) ? R(0) : dy[k] * z[k]; });
    activate_slots<fast, true>(a.slots, z, dy, weights.activation(), weights.act_param<R>());
    if (a.du)
        place.request(a.du, more);
    if (a.dpost_add)
        place.store<T>(a.dpost_add, dy);
    tile_sums<R> found = {R(0), R(0)};
    in_slots<K>(a.slots, [&](int k) {
        if (place.has(k)) {
            found.plain += dy[k];
            found.centred += dy[k] * x[k];
        }
    });
    /* Where a norm group is one channel its slope comes later, and its sums are those of the channel. */
    const R by = a.by_channels ? R(1) : own.slope;
    if (place.beside < a.at_once) {
        entries[place.entry()] = {by * found.plain, by * found.centred};
        if (!a.by_channels)
            of_columns[place.entry()] = found;
    }
    __syncthreads();

    const int lanes = 1 << a.lane_bits, of_set = a.group * a.at_once, slot = place.has_group ? place.group : 0;
    const auto join = [&](const tile_sums<R> *from, int count) {
        tile_sums<R> total = {R(0), R(0)};
#pragma unroll 4
        for (int i = place.of_group; i < count; i += lanes) {
            total.plain += from[i].plain;
            total.centred += from[i].centred;
        }
        return tile_sums<R>{sum_few(total.plain, lanes), sum_few(total.centred, lanes)};
    };
    tile_sums<R> total = join(entries + slot * of_set, of_set);
    if (ranks > 1)
        await_open_mailboxes();
    if (a.parts > 1 && threadIdx.x < 32 && place.group < a.sets)
        for (int other = place.of_group; other < a.parts; other += lanes)
            send_struct(mailbox, of_parts + place.group * a.parts + place.part, place.rank - place.part + other, total);
    if (a.gives && !a.by_channels)
        finish_channels<R>(all, place, gradients, of_columns, channels, rest_of, rstd_of);
    if (a.parts > 1) {
        await_mailbox(mailbox);
        total = join(of_parts + slot * a.parts, a.parts);
    }
    total.centred -= rest_of * total.plain;
    if (a.gives && a.by_channels && place.part == 0 && threadIdx.x >= blockDim.x - 32 && place.has_group &&
        place.of_group == 0)
        finish_channel<R>(all, place, gradients, place.group, (double)total.plain, (double)total.centred, rstd_of);

    if (a.out) {
        /* dx = slope dz + by_x (x - about) + level */
        const R portion = R(1) / (R)p.set_values;
        const R by_x_of = -(total.centred * rstd_of) * (rstd_of * portion);
        const R level_of = -total.plain * portion - by_x_of * rest_of, later = a.by_channels ? own.slope : R(1);
        const R by_x = later * place.broadcast(by_x_of), level = later * place.broadcast(level_of);
        in_slots<K>(a.slots, [&](int k) {
            /* Not 0 times sums, which may be infinite. */
            x[k] = given.saved ? fma(own.slope, dy[k], fma(by_x, x[k], level)) : own.slope * dy[k];
            if (a.du)
                x[k] += number_of<T>(more[k]);
        });
        place.store<T>(a.out, x);
    }
    if (a.gives && is_first)
        add_channels(all, place, gradients, channels);
    if (a.sums_slopes) {
        gradients.sums = sums_of_slopes(all);
        __syncthreads();
        if (place.beside < a.at_once)
            of_columns[place.entry()] = {of_slope, R(0)};
        __syncthreads();
        finish_channels<R>(all, place, gradients, of_columns, channels, R(0), R(0));
    }
}

#define INSTANCE(layout, schedule, direction, type, elements, vectors, threads, registers)                             \
    NORMFUSE_KERNEL(layout, schedule, direction, type, elements, vectors, registers)                                   \
    {                                                                                                                  \
        tile_##direction<type, vectors>(a);                                                                            \
    }
NORMFUSE_KERNELS_TILE(INSTANCE)
