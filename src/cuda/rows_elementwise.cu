/* SPDX-License-Identifier: MIT
 *
 * rows_elementwise.cu - what needs no sum of a set where positions are adjacent (NCHW): evaluation and affine, results
 * and gradients from given statistics, and the sums of each channel. A tensor without gaps is one run of vectors,
 * whatever rows (the positions of a channel of a sample) they are of: a vector may have the end of a row and the
 * beginning of others. So threads read and write whole vectors next to one another, however long rows are and wherever
 * they begin, and additions are further streams of the same places. */
#include "gradients.cuh"
#include "rows.cuh"

/* Of a row: z = (x - shift) * slope + offset; shift + rest is the mean. `slope_of_prelu` is its activation's. */
struct run_row {
    float shift, slope, offset, slope_of_prelu;
};
/* dx = slope * dz + share * (x - shift) + level */
struct run_change {
    float share, level;
};

/* What a row sums to, or a part of it. Forward of x - shift its values and squares, and that shift, the mean of the first
 * values that a warp has of the row, so that squares do not cancel. Backward dz, dz * (x - shift), and what the slope of
 * prelu gets. */
struct run_sums {
    float plain, centred, other;
};

/* The row that a vector begins in, of the block's, and how many values are left of it from there on. */
struct row_place {
    int row, left;

    /* Of an element of the block's first row, or behind it. */
    __device__ __forceinline__ row_place(const normfuse_cuda_arguments &a, int element)
    {
        find(a, element);
    }
    __device__ __forceinline__ void find(const normfuse_cuda_arguments &a, int element)
    {
        row = divide(element, a.geometry.by_spans);
        left = a.geometry.spans - (element - row * a.geometry.spans);
    }
};

/* The vectors of a block: each warp has a run of `each` times 32 of them. A thread's go through K places of its own in
 * shared memory, of each of the N tensors that are read. */
template <typename T, int V, int K, int N> struct row_run {
    static constexpr int H = values_a_part, elements = V;
    const normfuse_cuda_arguments &a;
    const normfuse_cuda_problem &p;
    const int tile, each, lane, warp;
    const int64_t first;       /* element of the tensor */
    const int stop;            /* elements of the block */
    const int first_row, lead; /* that the first element is in, as its element `lead` */
    const int rows;            /* of which the block has elements */
    const int64_t gap;         /* elements between a sample and the next one */
    const char *from[N];
    int present;         /* a bit of each tensor that is read */
    int place[N], apart; /* of a vector's tensors in shared memory, and from one vector of the thread to the next */
    int element;         /* of the block, of the thread's first vector */

    __device__ __forceinline__ row_run(const normfuse_cuda_arguments &a, const char *const (&tensors)[N])
        : a(a), p(a.problem), tile((int)(a.geometry.backwards ? gridDim.x - 1 - blockIdx.x : blockIdx.x)),
          each(a.geometry.segment_rows), lane((int)threadIdx.x & 31), warp((int)threadIdx.x >> 5),
          first((int64_t)tile * a.geometry.part_rows),
          stop((int)min((int64_t)a.geometry.part_rows, p.n * p.c * p.s - first)), first_row((int)(first / p.s)),
          lead((int)(first - first_row * p.s)), rows(divide(lead + stop - 1, a.geometry.by_spans) + 1),
          gap(p.n > 1 ? p.x_batch - p.c * p.s : 0)
    {
        apart = present = 0;
#pragma unroll
        for (int i = 0; i < N; i++) {
            from[i] = tensors[i];
            present |= from[i] ? 1 << i : 0;
            place[i] = apart;
            apart += from[i] ? (int)blockDim.x : 0;
        }
        element = (warp * each * 32 + lane) * V;
        make_opaque(present);
    }
    __device__ __forceinline__ bool reads(int tensor) const
    {
        return (present & 1 << tensor) != 0;
    }
    __device__ __forceinline__ uint4 *slot(int k) const
    {
        NORMFUSE_DYNAMIC_SHARED(dynamic);
        return dynamic + threadIdx.x + k % K * apart;
    }
    /* Where a vector is in each tensor. Where samples are apart none has values of two. */
    __device__ __forceinline__ int64_t byte_of(int at) const
    {
        int64_t element = first + at;
        if (gap != 0)
            element += gap * divide(first_row + divide(lead + at, a.geometry.by_spans), a.geometry.by_outer);
        return element * (int)sizeof(T);
    }
    /* The thread's k-th vector, where it has one, into the place of the one that is K before. */
    __device__ __forceinline__ void request(int k) const
    {
        const int at = element + k * 32 * V;
        if (k < each && at < stop) {
            uint4 *const to = slot(k);
            const int64_t bytes = byte_of(at);
            const int own = (stop - at) * (int)sizeof(T);
#pragma unroll
            for (int i = 0; i < N; i++) {
                if (!reads(i))
                    continue;
                if (own >= 16)
                    copy_ahead(to + place[i], from[i], bytes);
                else
                    copy_before(to + place[i], from[i] + bytes, own);
            }
        }
        commit_copies();
    }
    __device__ __forceinline__ void request_first() const
    {
#pragma unroll 1
        for (int k = 0; k < K; k++)
            request(k);
    }
    /* work(slot, element, place), as long as a thread of the warp has a vector. */
    template <typename Work> __device__ __forceinline__ void walk(Work work) const
    {
        int at = element;
        row_place of(a, lead + min(at, stop - 1));
#pragma unroll 1
        for (int k = 0; k < each && at - lane * V < stop; k++) {
            wait_for_older_copies<K - 1>();
            work(slot(k), at, of);
            request(k + K);
            at += 32 * V;
            of.left -= 32 * V;
            if (of.left <= 0)
                of.find(a, lead + min(at, stop - 1));
        }
    }
    /* Of each row work(i, n, c), shared out among threads. */
    template <typename Work> __device__ __forceinline__ void share_rows(Work work) const
    {
#pragma unroll 1
        for (int i = (int)threadIdx.x; i < rows; i += (int)blockDim.x) {
            const int n = divide(first_row + i, a.geometry.by_outer);
            work(i, n, first_row + i - n * a.geometry.outer);
        }
    }
    /* rstd of the row's set, or 1; `rest` of its mean. */
    __device__ __forceinline__ run_row know(int n, int c, float factor, float &rest, float &rstd) const
    {
        const int set = p.sets == NORMFUSE_SETS_BATCH ? c : divide(c, a.geometry.by_set_channels);
        const requested_set statistics(a, n, set, c);
        requested_value bias = {0, 0}, prelu = {0, 0};
        if (p.pre_bias().data || p.activation == NORMFUSE_PRELU) {
            bias = request_at_once(p.pre_bias(), n * p.pre_bias().batch + c * p.pre_bias().channel);
            prelu = request_at_once(p.slope(), c * p.slope().channel, p.activation == NORMFUSE_PRELU);
        }
        const requested_weights weights = request_weights(p, n, c, true);
        double mean = statistics.mean();
        float slope, offset;
        weigh(p, weights, slope, offset);
        rstd = statistics.rstd<float>();
        slope = statistics.scale(slope, p.eps) * rstd;
        /* pre_bias is a part of the mean. */
        if (p.pre_bias().data)
            mean -= (double)receive<float>(bias, p.pre_bias().type);
        const float shift = (float)mean;
        rest = (float)(mean - (double)shift);
        return {shift, slope * factor, (offset - rest * slope) * factor,
                p.activation == NORMFUSE_PRELU ? receive<float>(prelu, p.slope().type) : 0.0f};
    }
    /* u of x and pre_add, rounded. */
    __device__ __forceinline__ static void add_vectors(uint4 &x, const uint4 &other)
    {
        float value[V], more[V];
        unpack<T, V>(x, value);
        unpack<T, V>(other, more);
#pragma unroll
        for (int i = 0; i < V; i++)
            value[i] += more[i];
        x = make_vector<T, V>(value);
    }
    __device__ __forceinline__ void store(char *data, int at, const uint4 &vector) const
    {
        char *const to = data + byte_of(at);
        if (at + V <= stop)
            store_vector<T, V>(to, 0, vector);
        else
            store_range<T>(to, vector, 0, stop - at);
    }
};

/* What the vectors of a warp sum to, row by row. A lane that a row ends in writes what all lanes found of it. */
template <bool slopes> struct warp_sums {
    run_sums open; /* the lane's, of the row that has not ended */

    __device__ __forceinline__ static void add(run_sums &to, const run_sums &more)
    {
        to.plain += more.plain;
        to.centred += more.centred;
        if (slopes)
            to.other += more.other;
    }
    __device__ __forceinline__ static run_sums of_lanes(const run_sums &own)
    {
        return {sum_lanes(own.plain, 32), sum_lanes(own.centred, 32), slopes ? sum_lanes(own.other, 32) : 0.0f};
    }
    __device__ __forceinline__ static run_sums of_lane_before(const run_sums &own, int distance)
    {
        return {__shfl_up_sync(full_mask, own.plain, distance), __shfl_up_sync(full_mask, own.centred, distance),
                slopes ? __shfl_up_sync(full_mask, own.other, distance) : 0.0f};
    }
    /* Of all lanes from the last one that a row ends in, up to this one. */
    __device__ __forceinline__ static float sum_to_lane(float value, unsigned ending)
    {
        const int lane = (int)threadIdx.x & 31;
        const unsigned up_to_here = ending & (full_mask >> (31 - lane));
        const int last = up_to_here ? 31 - __clz((int)up_to_here) : 0;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const float other = __shfl_up_sync(full_mask, value, distance);
            value += lane - distance >= last ? other : 0.0f;
        }
        return value;
    }
    /* Of the lane's vector what `first` and `second` sum to, the row that it begins in and the next one; `ends`: the
     * first ends in it, so that all that was found of it is written to `to`. */
    __device__ __forceinline__ void take(run_sums first, const run_sums &second, bool ends, run_sums *to)
    {
        const unsigned ending = __ballot_sync(full_mask, ends);
        const int lane = (int)threadIdx.x & 31;
        const run_sums before = of_lanes(open);
        if (lane == 0)
            add(first, before);
        run_sums found = {ends ? second.plain : first.plain, ends ? second.centred : first.centred,
                          ends ? second.other : first.other};
        open = ending >> lane > 1 ? run_sums{0.0f, 0.0f, 0.0f} : found;
        found = {sum_to_lane(found.plain, ending), sum_to_lane(found.centred, ending),
                 slopes ? sum_to_lane(found.other, ending) : 0.0f};
        const run_sums other = of_lane_before(found, 1);
        if (lane > 0)
            add(first, other);
        if (ends)
            *to = first;
    }
};

/* What the block's warps found of its i-th row: work(sums, of so many values). `ended`: of the warp that a row ends in;
 * `open`: of each warp, of the row that goes on behind it. */
template <typename Run, typename Work>
static __device__ __forceinline__ void each_part(const Run &of, int i, const run_sums *ended, const run_sums *open,
                                                 Work work)
{
    const int64_t begin = i * of.p.s - of.lead, end = begin + of.p.s;
    const int of_warp = of.each * 32 * Run::elements;
    for (int w = 0; w < (int)blockDim.x / 32; w++) {
        const int behind = min(of.stop, (w + 1) * of_warp);
        const int count = (int)(min(end, (int64_t)behind) - max(begin, (int64_t)w * of_warp));
        if (count > 0)
            work(end <= behind ? ended[i] : open[w], count);
    }
}

/* Which of a row's parts is this block's; `others`: how many parts come behind it, all of which are nothing. */
struct row_part {
    int index, others;

    template <typename Run> __device__ __forceinline__ row_part(const Run &of, int i)
    {
        const normfuse_cuda_geometry &g = of.a.geometry;
        const int64_t begin = (of.first_row + i) * of.p.s;
        /* Where rows have several parts, part_rows is a power of two. */
        index = g.sum_slots > 1 ? (int)(of.tile - (begin >> (31 - __clz(g.part_rows)))) : 0;
        others = begin + of.p.s <= of.first + of.stop ? g.sum_slots - 1 - index : 0;
    }
};

/* x, pre_add, post_add */
template <typename T, int V, int K> struct forward_run : row_run<T, V, K, 3> {
    enum { X, PRE_ADD, POST_ADD };
    using run = row_run<T, V, K, 3>;
    using run::a, run::p, run::stop, run::place, run::H;

    __device__ __forceinline__ explicit forward_run(const normfuse_cuda_arguments &a)
        : run(a, {a.problem.x().data, a.problem.pre_add().data,
                  a.phases & NORMFUSE_PHASE_STATISTICS ? nullptr : a.problem.post_add().data})
    {
    }
    /* u of a vector, which may be wanted. */
    __device__ __forceinline__ uint4 load(const uint4 *slot, int element, bool writes_u) const
    {
        uint4 x = slot[place[X]];
        if (this->reads(PRE_ADD)) {
            run::add_vectors(x, slot[place[PRE_ADD]]);
            if (writes_u)
                this->store(p.u().data, element, x);
        }
        return x;
    }
    /* Of one vector; `cut`: rows may begin inside of it. */
    template <bool cut, typename Chosen>
    __device__ __forceinline__ void store_results(Chosen chosen, const uint4 *slot, int element, row_place at,
                                                  const run_row *known, float factor, bool writes_u) const
    {
        if (element >= stop)
            return;
        const uint4 x = load(slot, element, writes_u);
        uint4 out;
        run_row row = known[at.row];
        each<V / H>([&](int h) {
            float z[H], slope_of_prelu[H];
            unpack_part<T, V>(x, h, z);
            each<H>([&](int i) {
                if (cut && at.left == h * H + i) {
                    at.left += a.geometry.spans;
                    at.row++;
                    row = known[at.row];
                }
                z[i] = fmaf(z[i] - row.shift, row.slope, row.offset);
                slope_of_prelu[i] = row.slope_of_prelu;
            });
            if (this->reads(POST_ADD)) {
                float more[H];
                unpack_part<T, V>(slot[place[POST_ADD]], h, more);
                each<H>([&](int i) { z[i] = fmaf(more[i], factor, z[i]); });
            }
            if constexpr (Chosen::constant == NORMFUSE_PRELU)
                each<H>([&](int i) { z[i] = z[i] > 0.0f ? z[i] : slope_of_prelu[i] * z[i]; });
            else
                activate<sizeof(T) == 2>(z, chosen, p.activation, (float)p.act_param);
            pack_part<T, V>(out, h, z);
        });
        this->store(p.y().data, element, out);
    }
    /* Moments of the rows, or of their parts, to memory, those of a set adjacent. */
    __device__ __forceinline__ void store_moments(const run_sums *ended, const run_sums *open) const
    {
        const int slots = a.geometry.sum_slots;
        this->share_rows([&](int i, int n, int c) {
            moments<double> all = {0.0, 0.0, 0.0};
            each_part(*this, i, ended, open, [&](const run_sums &found, int count) {
                const float mean = found.plain / (float)count;
                append(all, {(double)count, (double)found.other + (double)mean,
                             (double)(found.centred - found.plain * mean)});
            });
            const row_part part(*this, i);
            const int64_t row = p.sets == NORMFUSE_SETS_BATCH ? c * p.n + n : this->first_row + i;
            double *triple = a.partials + (row * slots + part.index) * TRIPLE;
            triple[0] = all.count;
            triple[1] = all.mean + (double)parameter<float>(p.pre_bias(), n, c, 0.0f);
            triple[2] = all.squares;
            for (int k = 0; k < part.others; k++) {
                triple += TRIPLE;
                triple[0] = triple[1] = triple[2] = 0.0;
            }
        });
    }
    __device__ __forceinline__ void find_moments(run_sums *ended, run_sums *open, bool writes_u) const
    {
        warp_sums<false> met = {};
        float shift = 0.0f;     /* of the row that has not ended: the mean of its first values here, */
        bool has_shift = false; /* if it began before this vector */
        const int lane = this->lane, spans = a.geometry.spans;
        this->walk([&](const uint4 *slot, int element, const row_place &at) {
            const bool exists = element < stop;
            float value[V] = {};
            if (exists)
                unpack<T, V>(load(slot, element, writes_u), value);
            const int here = min(32 * V, stop - (element - lane * V));
            const bool is_cut = __any_sync(full_mask, at.left <= V);
            const auto sum = [&](int from, int to, float about, run_sums &of) {
                each<V>([&](int i) {
                    const float distance = value[i] - about;
                    if (exists && i >= from && i < to) {
                        of.plain += distance;
                        of.centred += distance * distance;
                    }
                });
            };
            if (!has_shift && !is_cut) {
                const float near = __shfl_sync(full_mask, value[0], 0);
                run_sums all = {};
                sum(0, V, near, all);
                shift = near + sum_lanes(all.plain, 32) / (float)here;
                has_shift = true;
            }
            if (!is_cut) {
                run_sums own = {};
                sum(0, V, shift, own);
                met.add(met.open, own);
                return;
            }
            /* Means first, of what each row has here, about a value of its own: another row may have larger ones, or no
             * numbers. Then sums about these. */
            const bool ends = exists && at.left <= V;
            const unsigned ending = __ballot_sync(full_mask, ends), from_here = ending >> lane;
            const unsigned ended_before = ending & ((1u << lane) - 1);
            const float of_warp = has_shift ? shift : __shfl_sync(full_mask, value[0], 0);
            /* The first value of the row that begins in the lane's vector, or behind it. */
            float begun = __shfl_down_sync(full_mask, value[0], 1);
            each<V>([&](int i) {
                int left = at.left;
                make_opaque(left); /* else the compiler would have the values in local memory, to find one of them */
                begun = i == left ? value[i] : begun;
            });
            const float begun_before = __shfl_sync(full_mask, begun, ended_before ? 31 - __clz((int)ended_before) : 0);
            const float near = ended_before ? begun_before : of_warp;
            run_sums first = {}, second = {};
            sum(0, at.left, near, first);
            sum(at.left, V, begun, second);
            const float found = met.sum_to_lane(ends ? second.plain : first.plain, ending);
            const float before = __shfl_up_sync(full_mask, found, 1);
            const float to_end = ends && lane > 0 ? first.plain + before : ends ? first.plain : found;
            const float of_first = __shfl_sync(full_mask, to_end, from_here ? lane + __ffs((int)from_here) - 1 : 31);
            const unsigned behind = from_here >> 1;
            const float of_next = __shfl_sync(full_mask, to_end, behind ? lane + __ffs((int)behind) : 31);
            const float of_open = __shfl_sync(full_mask, found, 31);
            const int next = lane * V + at.left; /* where the second row begins, in what the warp has here */
            const float mean = near + of_first / (float)(min(next, here) - max(next - spans, 0));
            const float mean_of_next =
                begun + (behind ? of_next : of_open) / (float)max(min(next + spans, here) - next, 1);
            first = second = {};
            sum(0, at.left, mean, first);
            sum(at.left, V, mean_of_next, second);
            /* What the row that ends first had before is about its own shift. */
            const bool goes_on = exists && has_shift && ended_before == 0;
            const float moved = goes_on ? mean - shift : 0.0f;
            const int mine = exists ? min(at.left, V) : 0;
            first.centred += moved * (2.0f * first.plain + (float)mine * moved);
            first.plain += (float)mine * moved;
            met.take(first, second, ends, ended + at.row);
            if (ends)
                ended[at.row].other = goes_on ? shift : mean;
            shift = __shfl_sync(full_mask, ends ? mean_of_next : mean, 31);
            has_shift = __shfl_sync(full_mask, at.left, 31) != V;
        });
        run_sums all = met.of_lanes(met.open);
        all.other = shift;
        if (lane == 0)
            open[this->warp] = all;
    }
};

template <typename T, int V, int K, normfuse_cuda_schedule schedule>
__device__ __forceinline__ void rows_forward(const normfuse_cuda_arguments &a)
{
    admit_next_kernel();
    constexpr bool fast = sizeof(T) == 2;
    const normfuse_cuda_problem &p = a.problem;
    const forward_run<T, V, K> of(a);
    request_early(a, [&] { of.request_first(); });
    NORMFUSE_DYNAMIC_SHARED(dynamic);
    const normfuse_run_layout layout =
        normfuse_lay_out_run(of.apart * K * 16, a.geometry.coefficients, (int)blockDim.x / 32, false);
    if (a.phases & NORMFUSE_PHASE_STATISTICS) {
        run_sums *const ended = in_shared<run_sums>(dynamic, layout.ended);
        run_sums *const open = in_shared<run_sums>(dynamic, layout.open);
        of.find_moments(ended, open, p.u().data != nullptr);
        __syncthreads();
        of.store_moments(ended, open);
        return;
    }
    run_row *const known = in_shared<run_row>(dynamic, layout.rows);
    const float factor = takes_half<fast>(p.activation) ? 0.5f : 1.0f;
    of.share_rows([&](int i, int n, int c) {
        float rest, rstd;
        known[i] = of.know(n, c, factor, rest, rstd);
    });
    __syncthreads();
    const bool writes_u = p.u().data && p.pre_add().data && !(p.phases() & NORMFUSE_PHASE_STATISTICS);
    choose_any_activation(p.activation, [&](auto chosen) {
        of.walk([&](const uint4 *slot, int element, const row_place &at) {
            if (__any_sync(full_mask, at.left < V))
                of.template store_results<true>(chosen, slot, element, at, known, factor, writes_u);
            else
                of.template store_results<false>(chosen, slot, element, at, known, factor, writes_u);
        });
    });
}

/* What a block knows of its rows. */
struct known_rows {
    const run_row *rows;
    const run_change *changes;
};

/* x, dy, pre_add, post_add, du */
template <typename T, int V, int K> struct backward_run : row_run<T, V, K, 5> {
    enum { X, DY, PRE_ADD, POST_ADD, DU };
    using run = row_run<T, V, K, 5>;
    using run::a, run::p, run::stop, run::place, run::H;
    const bool sums, centred, writes_dx, writes_dz;

    __device__ __forceinline__ static bool applies(const normfuse_cuda_arguments &a)
    {
        return (a.phases & NORMFUSE_PHASE_BACKWARD_APPLY) != 0;
    }
    __device__ __forceinline__ explicit backward_run(const normfuse_cuda_arguments &a)
        : run(a, {a.problem.x().data, a.problem.dy().data, a.problem.pre_add().data,
                  a.problem.activation != NORMFUSE_IDENTITY ? a.problem.post_add().data : nullptr,
                  applies(a) && a.problem.dx().data ? a.problem.du().data : nullptr}),
          sums(a.sums && (a.phases & NORMFUSE_PHASE_BACKWARD_SUMS) != 0), centred(p.sets != NORMFUSE_SETS_NONE),
          writes_dx(applies(a) && p.dx().data),
          writes_dz(p.dpost_add().data &&
                    (applies(a) || a.geometry.stores_dz || !(p.phases() & NORMFUSE_PHASE_BACKWARD_APPLY)))
    {
    }
    /* Of one vector, whose sums are added to `first`, of the row that it begins in, and to `second`; `cut`: a row may
     * begin inside of it, but no third one. */
    template <bool cut, typename Chosen>
    __device__ __forceinline__ void store_gradients(Chosen chosen, const uint4 *slot, int element, const row_place &at,
                                                    const known_rows &known, float factor, run_sums &first,
                                                    run_sums &second) const
    {
        constexpr bool fast = sizeof(T) == 2, is_prelu = Chosen::constant == NORMFUSE_PRELU;
        if (element >= stop)
            return;
        uint4 x = slot[place[X]], out, out_dz;
        const uint4 dy_vector = slot[place[DY]];
        if (this->reads(PRE_ADD))
            run::add_vectors(x, slot[place[PRE_ADD]]);
        const run_row row = known.rows[at.row], next = known.rows[at.row + cut];
        const run_change change = known.changes[at.row], next_change = known.changes[at.row + cut];
        each<V / H>([&](int h) {
            float u[H], dy[H], z[H], of_slope[H];
            unpack_part<T, V>(x, h, u);
            unpack_part<T, V>(dy_vector, h, dy);
            const auto is_first = [&](int i) { return !cut || h * H + i < at.left; };
            each<H>([&](int i) {
                u[i] -= is_first(i) ? row.shift : next.shift;
                z[i] = fmaf(u[i], is_first(i) ? row.slope : next.slope, is_first(i) ? row.offset : next.offset);
            });
            if (this->reads(POST_ADD)) {
                float more[H];
                unpack_part<T, V>(slot[place[POST_ADD]], h, more);
                each<H>([&](int i) { z[i] = p.from_y() ? more[i] : fmaf(more[i], factor, z[i]); });
            }
            if constexpr (is_prelu) {
                each<H>([&](int i) {
                    of_slope[i] = z[i] > 0.0f ? 0.0f : dy[i] * z[i];
                    const float slope = is_first(i) ? row.slope_of_prelu : next.slope_of_prelu;
                    dy[i] = z[i] <= 0.0f ? slope * dy[i] : dy[i];
                });
            } else {
                differentiate_by<fast>(dy, z, chosen, p.activation, (float)p.act_param);
            }
            if (sums) {
                each<H>([&](int i) {
                    const float product = dy[i] * u[i];
                    if (is_first(i)) {
                        first.plain += dy[i];
                        first.centred += product;
                        if constexpr (is_prelu)
                            first.other += of_slope[i];
                    } else {
                        second.plain += dy[i];
                        second.centred += product;
                        if constexpr (is_prelu)
                            second.other += of_slope[i];
                    }
                });
            }
            if (writes_dz) {
                each<H>([&](int i) { z[i] = dy[i] * factor; });
                pack_part<T, V>(out_dz, h, z);
            }
            if (writes_dx) {
                each<H>([&](int i) {
                    const float share = is_first(i) ? change.share : next_change.share;
                    const float level = is_first(i) ? change.level : next_change.level;
                    const float rest = centred ? fmaf(share, u[i], level) : 0.0f;
                    dy[i] = fmaf(is_first(i) ? row.slope : next.slope, dy[i], rest);
                });
                if (this->reads(DU)) {
                    unpack_part<T, V>(slot[place[DU]], h, z);
                    each<H>([&](int i) { dy[i] += z[i]; });
                }
                pack_part<T, V>(out, h, dy);
            }
        });
        if (writes_dz)
            this->store(p.dpost_add().data, element, out_dz);
        if (writes_dx)
            this->store(p.dx().data, element, out);
    }
};

/* Sums of the rows, or of their parts, to memory. */
template <typename Run>
static __device__ __forceinline__ void store_sums(const Run &of, const run_sums *ended, const run_sums *open,
                                                  const float *rests, float factor)
{
    const normfuse_cuda_arguments &a = of.a;
    double2 *const pairs = reinterpret_cast<double2 *>(a.sums);
    double2 *const slopes = a.problem.dslope().data ? reinterpret_cast<double2 *>(sums_of_slopes(a)) : nullptr;
    for (int i = (int)threadIdx.x; i < of.rows; i += (int)blockDim.x) {
        run_sums all = {};
        each_part(of, i, ended, open, [&](const run_sums &found, int) { warp_sums<true>::add(all, found); });
        const row_part part(of, i);
        int64_t at = (int64_t)(of.first_row + i) * a.geometry.sum_slots + part.index;
        pairs[at] = {(double)(all.plain * factor), (double)((all.centred - rests[i] * all.plain) * factor)};
        if (slopes)
            slopes[at] = {(double)all.other, 0.0};
        for (int k = 0; k < part.others; k++) {
            at++;
            pairs[at] = {0.0, 0.0};
            if (slopes)
                slopes[at] = {0.0, 0.0};
        }
    }
}

template <typename T, int V, int K, normfuse_cuda_schedule schedule>
__device__ __forceinline__ void rows_backward(const normfuse_cuda_arguments &a)
{
    admit_next_kernel();
    constexpr bool fast = sizeof(T) == 2;
    const normfuse_cuda_problem &p = a.problem;
    const normfuse_cuda_geometry &g = a.geometry;
    const backward_run<T, V, K> of(a);
    request_early(a, [&] { of.request_first(); });
    NORMFUSE_DYNAMIC_SHARED(dynamic);
    const normfuse_run_layout layout =
        normfuse_lay_out_run(of.apart * K * 16, g.coefficients, (int)blockDim.x / 32, true);
    run_row *const rows = in_shared<run_row>(dynamic, layout.rows);
    run_change *const changes = in_shared<run_change>(dynamic, layout.changes);
    float *const rests = in_shared<float>(dynamic, layout.rests);
    run_sums *const ended = in_shared<run_sums>(dynamic, layout.ended);
    run_sums *const open = in_shared<run_sums>(dynamic, layout.open);
    const float factor = takes_half<fast>(p.activation) ? 0.5f : 1.0f;
    of.share_rows([&](int i, int n, int c) {
        float rstd;
        rows[i] = of.know(n, c, factor, rests[i], rstd);
        run_change change = {0.0f, 0.0f};
        if (of.centred && of.writes_dx) {
            const int set = p.sets == NORMFUSE_SETS_BATCH ? c : n * p.groups + divide(c, g.by_set_channels);
            const double2 total = reinterpret_cast<const double2 *>(a.totals)[set];
            const float portion = 1.0f / (float)p.set_values;
            change.share = -((float)total.y * rstd) * (rstd * portion);
            change.level = -(float)total.x * portion - change.share * rests[i];
        }
        changes[i] = change;
    });
    __syncthreads();
    choose_any_activation(p.activation, [&](auto chosen) {
        const known_rows known = {rows, changes};
        warp_sums<decltype(chosen)::constant == NORMFUSE_PRELU> met = {{0.0f, 0.0f, 0.0f}};
        of.walk([&](const uint4 *slot, int element, const row_place &at) {
            run_sums first = {}, second = {};
            if (!__any_sync(full_mask, at.left <= V)) {
                of.template store_gradients<false>(chosen, slot, element, at, known, factor, met.open, second);
            } else {
                of.template store_gradients<true>(chosen, slot, element, at, known, factor, first, second);
                if (of.sums)
                    met.take(first, second, element < of.stop && at.left <= V, ended + at.row);
            }
        });
        if (of.sums) {
            const run_sums all = met.of_lanes(met.open);
            if (of.lane == 0)
                open[of.warp] = all;
        }
    });
    if (!of.sums)
        return;
    __syncthreads();
    store_sums(of, ended, open, rests, factor);
}

NORMFUSE_KERNELS_ROWS_ELEMENTWISE(NORMFUSE_INSTANCE)
