/* SPDX-License-Identifier: MIT
 *
 * rows.cuh - how threads walk the tile of a block when positions are adjacent; kernels.h has the picture. Forward and
 * backward share it. */
#ifndef NORMFUSE_CUDA_ROWS_CUH
#define NORMFUSE_CUDA_ROWS_CUH

#include "activation.cuh"
#include "additions.cuh"
#include "body.cuh"
#include "join.cuh"

/* Of a block: policy.h has none larger. */
constexpr int max_row_warps = 16;

/* Where the grid goes round, the two blocks of a multiprocessor would read, wait and write at the same time: the second
 * one begins later, so that one reads while the other writes. */
__device__ __forceinline__ void begin_staggered(const normfuse_cuda_geometry &g)
{
    if (g.stagger_cycles > 0 && (int)blockIdx.x >= g.staggered_blocks) {
        const int64_t begin = clock64();
        while (clock64() - begin < g.stagger_cycles)
            ;
    }
}

/* First sample and channel of a set. */
__device__ __forceinline__ void begin_of(const normfuse_cuda_arguments &a, int set, int &n, int &c)
{
    if (a.problem.sets == NORMFUSE_SETS_GROUP) {
        n = divide(set, a.geometry.by_groups);
        c = (set - n * (int)a.problem.groups) * a.geometry.outer;
    } else {
        const bool by_sample = a.problem.sets == NORMFUSE_SETS_BATCH;
        n = by_sample ? 0 : set;
        c = by_sample ? set : 0;
    }
}

struct row_block : block_turns {
    using block_turns::block_turns;

    /* Before all else; blocks of a cluster send one another so many numbers each. */
    __device__ __forceinline__ void open(const normfuse_cuda_geometry &g, cluster_mailbox &mailbox, int numbers) const
    {
        if (exchange == NORMFUSE_EXCHANGE_CLUSTER)
            open_only_mailbox(mailbox, g.parts * numbers * (int)sizeof(double));
        if (exchange == NORMFUSE_EXCHANGE_GRID)
            begin_staggered(g);
    }
    /* The first sample and channel of the next set, whose vectors take the places of those that were read. Whether
     * there is one. */
    __device__ __forceinline__ bool find_next(const normfuse_cuda_arguments &a, int &n, int &c) const
    {
        const bool has = has_next(a.geometry);
        if (has)
            begin_of(a, set + a.geometry.block_groups, n, c);
        return has;
    }
};

/* Where a thread's vectors are: from `index` on, `step` apart, up to `end`; all of a set are counted through. */
struct row_vectors {
    int set, n, c;
    int first_outer; /* the stretch that the block begins in */
    int index, end, step;
};

/* Which elements of a vector are its stretch's: element i is element `first` + i of the stretch, where it has that
 * many.
 */
template <int V, bool unaligned> struct row_elements {
    int first, stretch;

    __device__ __forceinline__ int begin() const
    {
        return unaligned ? max(0, -first) : 0;
    }
    __device__ __forceinline__ int end() const
    {
        return unaligned ? max(0, min(V, stretch - first)) : V;
    }
    __device__ __forceinline__ int count() const
    {
        return end() - begin();
    }
    __device__ __forceinline__ bool are_all() const
    {
        return count() == V;
    }
    /* By a bit of one mask: a comparison for each would be two instructions. */
    __device__ __forceinline__ bool has(int i) const
    {
        return !unaligned || (~0u << begin() & ~(~0u << end()) & 1u << i) != 0;
    }
};

/* One tensor as a thread sees it: the first element of the set, and what leads from one stretch to the next.
 * Sets are below 2^31 bytes, so that one place of 32 bits is found for all tensors.
 *
 * `unaligned`: vectors are aligned in memory, wherever a stretch begins. Its first and last ones hold elements of
 * others, and its very last may hold none of its own; `data` is then the vector that the set begins in, `lead` bytes
 * into it. All tensors begin with a vector, so that a place in one is the place in all.
 */
template <typename T, int V, bool unaligned> struct row_tensor {
    char *data;
    int64_t outer; /* bytes */
    unsigned lead;

    __device__ __forceinline__ row_tensor(const normfuse_cuda_arguments &a, const normfuse_view &view, int n, int c)
    {
        const int64_t offset = ((int64_t)n * view.batch + (int64_t)c * view.channel) * (int64_t)sizeof(T);
        data = view.data + offset;
        outer = (a.problem.sets == NORMFUSE_SETS_BATCH ? view.batch : view.channel) * (int64_t)sizeof(T);
        lead = 0;
        if constexpr (unaligned) {
            lead = (unsigned)offset % 16;
            data -= lead;
        }
    }
    /* Unaligned: bytes from `data` to a vector and to the first element of a stretch. */
    __device__ __forceinline__ unsigned place(const normfuse_cuda_geometry &g, int index, int stretch) const
    {
        if (!unaligned)
            return 0;
        return (start(stretch) & ~15u) + (unsigned)(index - stretch * g.spans) * 16;
    }
    __device__ __forceinline__ unsigned start(int stretch) const
    {
        return lead + (unsigned)stretch * (unsigned)outer;
    }
    __device__ __forceinline__ char *at(const normfuse_cuda_geometry &g, int index, int stretch) const
    {
        if constexpr (unaligned)
            return data + place(g, index, stretch);
        const unsigned gap = (unsigned)outer - (unsigned)g.spans * (unsigned)(sizeof(T) * V);
        return data + ((unsigned)index * (unsigned)(sizeof(T) * V) + (unsigned)stretch * gap);
    }
};

/* Never an element of another stretch: someone else may be writing it. */
template <typename T, int V, bool unaligned>
__device__ __forceinline__ void store_own(char *data, const raw<T, V> &vector, const row_elements<V, unaligned> &own)
{
    if (own.are_all()) {
        store_vector<T, V>(data, 0, vector);
        return;
    }
    if constexpr (unaligned) {
        /* One address with offsets: the compiler would find that of each element again. */
        data = opaque(data);
        const unsigned words[4] = {vector.x, vector.y, vector.z, vector.w};
        each<V>([&](int i) {
            if (own.has(i)) {
                if constexpr (sizeof(T) == 2)
                    store_vector<T, 1>(data, i, (unsigned short)(words[i / 2] >> (i % 2 * 16)));
                else
                    store_vector<T, 1>(data, i, __uint_as_float(words[i]));
            }
        });
    }
}

/* What the warps of a block found, to all of them: join(of_lane) joins the lanes of a warp, one for each. */
template <typename Sums, typename Join>
__device__ __forceinline__ Sums join_warps(Sums *of_warps, const Sums &of_warp, Join join)
{
    if (threadIdx.x % 32 == 0)
        of_warps[threadIdx.x / 32] = of_warp;
    __syncthreads();
    Sums of_lane = {};
    if (threadIdx.x % 32 < blockDim.x / 32)
        of_lane = of_warps[threadIdx.x % 32];
    return join(of_lane);
}

/* What both directions know: `vectors` of one set after another, of N tensors. `additions` has all vectors in shared memory, through which what is added passes. */
template <typename T, int V, int K, int N, normfuse_cuda_schedule schedule> struct row_kernel {
    using R = compute<T>;
    static constexpr bool split = schedule == NORMFUSE_SCHEDULE_split,
                          adds = schedule == NORMFUSE_SCHEDULE_additions,
                          unaligned = adds || schedule == NORMFUSE_SCHEDULE_unaligned, fast = sizeof(T) == 2;
    static constexpr int registers = K > 0 ? K : 1;
    using tensor = row_tensor<T, V, unaligned>;
    const normfuse_cuda_arguments &a;
    const normfuse_cuda_problem &p;
    const normfuse_cuda_geometry &g;
    const bool by_sample;
    const int shared; /* slots of shared memory that the thread has beside K of registers */
    row_block block;
    row_vectors vectors;
    mutable passing_tensors<adds> passing;

    __device__ __forceinline__ explicit row_kernel(const normfuse_cuda_arguments &a)
        : a(a), p(a.problem), g(a.geometry), by_sample(p.sets == NORMFUSE_SETS_BATCH), shared(g.held_shared),
          block(a), passing(&place_of_slot(shared, 0), g.passing)
    {
    }
    __device__ __forceinline__ tensor of(const normfuse_view &view) const
    {
        return tensor(a, view, vectors.n, vectors.c);
    }
    __device__ __forceinline__ int stretch_of(int index) const
    {
        return divide(index, g.by_spans);
    }
    /* Whether all elements of a vector are of its stretch, whose first vector and last two are not asked. */
    __device__ __forceinline__ bool is_inside(int index) const
    {
        const int within = index - stretch_of(index) * g.spans;
        return !unaligned || (within != 0 && within < g.spans - 2);
    }
    /* Which elements of a vector are of its stretch: the same in all tensors, so x says it. */
    __device__ __forceinline__ row_elements<V, unaligned> elements_of(int index) const
    {
        row_elements<V, unaligned> found = {0, V};
        if (!is_inside(index)) {
            const int stretch = stretch_of(index), within = index - stretch * g.spans;
            const int before = (int)(of(p.x()).start(stretch) % 16 / (unsigned)sizeof(T));
            found = {within * V - before, (int)p.s};
        }
        return found;
    }
    /* The forward has one store for all vectors: where rows are short and most vectors are at an end, threads of a warp
     * that part take 1.18 times as long (group norm 83x2048x41 bf16). */
    __device__ __forceinline__ void store(char *data, const raw<T, V> &vector, int index) const
    {
        if (N > 1 && is_inside(index))
            store_vector<T, V>(data, 0, vector);
        else
            store_own<T, V, unaligned>(data, vector, elements_of(index));
    }
    /* The thread's place in shared memory for a vector of one of the tensors. */
    __device__ __forceinline__ uint4 &place_of_slot(int slot, int which) const
    {
        NORMFUSE_DYNAMIC_SHARED(dynamic);
        return dynamic[(N * slot + which) * (int)blockDim.x + (int)threadIdx.x];
    }
    __device__ __forceinline__ uint4 *behind_slots() const
    {
        NORMFUSE_DYNAMIC_SHARED(dynamic);
        return dynamic + (N * shared + (adds ? passing.ahead * g.passing : 0)) * (int)blockDim.x;
    }

    /* The forward deals vectors to the threads of a block in turn. The backward, which has to know what each channel
     * sums to, gives each warp adjacent ones, so that a warp meets few channels. */
    __device__ __forceinline__ void find_vectors()
    {
        vectors.set = block.set;
        vectors.end = min(g.rows, (block.part + 1) * g.part_rows);
        const int first = block.part * g.part_rows;
        if (N == 1) {
            vectors.step = (int)blockDim.x;
            vectors.index = first + (int)threadIdx.x;
        } else {
            vectors.step = 32;
            const int of_warp = first + ((int)threadIdx.x >> 5) * g.segment_rows;
            vectors.index = of_warp + ((int)threadIdx.x & 31);
            vectors.end = min(vectors.end, of_warp + g.segment_rows);
        }
        vectors.first_outer = stretch_of(first);
        begin_of(a, vectors.set, vectors.n, vectors.c);
    }
    /* Unaligned vectors may reach beyond the tensors' end, in bytes from their `data` (2^32 - 1 where that is further). */
    __device__ __forceinline__ unsigned end_of(const tensor &x) const
    {
        const int64_t last = (p.n - 1 - vectors.n) * p.x().batch + (p.c - 1 - vectors.c) * p.x().channel;
        return (unsigned)min((int64_t)x.lead + (last + p.s) * (int64_t)sizeof(T), (int64_t)0xffffffff);
    }
    /* Of a vector that the tensors' end cuts what there is, and zeros. */
    __device__ __forceinline__ static uint4 load_cut(const char *data, unsigned place, unsigned end)
    {
        const int elements = end > place ? (int)((end - place) / (unsigned)sizeof(T)) : 0;
        return load_range<T>(data + place, 0, elements, make_uint4(0, 0, 0, 0));
    }
    /* What passes; passing_tensors::request says how. */
    __device__ __forceinline__ auto copy_passing() const
    {
        const tensor x = of(p.x());
        const unsigned end = end_of(x);
        return [this, x, end](int i, auto one) {
            const int index = vectors.index + i * vectors.step;
            if (index < vectors.end) {
                const unsigned place = x.place(g, index, stretch_of(index));
                if (place + 16 <= end)
                    one([&](uint4 *to, const char *data) { copy_ahead(to, data + place, 0); });
                else
                    one([&](uint4 *to, const char *data) { *to = load_cut(data, place, end); });
            }
        };
    }
    __device__ __forceinline__ void pass(const normfuse_view &one, const normfuse_view &other) const
    {
        if constexpr (adds)
            passing.open(one.data ? of(one).data : nullptr, other.data ? of(other).data : nullptr, copy_passing());
    }
    /* work(i, index) for each slot in shared memory while more(index), what passes behind it. */
    template <typename More, typename Work>
    __device__ __forceinline__ void walk_shared(More more, Work work) const
    {
        const auto copy = [&] {
            if constexpr (adds)
                return copy_passing();
            else
                return 0;
        }();
        int index = vectors.index;
        compiler_barrier(index);
#pragma unroll 1
        for (int k = 0; k < shared && more(index); k++) {
            if constexpr (adds)
                passing.await();
            work(k, index);
            if constexpr (adds)
                passing.advance(k, copy);
            index += vectors.step;
        }
    }
    /* The thread's vectors: `shared` into shared memory, which may have been requested, the others into registers;
     * `straight`: by loads without branches. */
    template <bool straight>
    __device__ __forceinline__ void load(bool is_requested, const tensor (&from)[N], raw<T, V> (&held)[N][registers]) const
    {
        /* They have what is before that, and nothing after. */
        unsigned end = 0;
        if constexpr (unaligned)
            end = end_of(from[0]);
        const auto is_cut = [&](unsigned place) { return unaligned && place + 16 > end; };
        int index = vectors.index;
#pragma unroll 1
        for (int k = 0; k < shared; k++) {
            if (!is_requested && index < vectors.end) {
                const int stretch = stretch_of(index);
                const unsigned place = from[0].place(g, index, stretch);
                each<N>([&](int m) {
                    if (!is_cut(place))
                        copy_once(&place_of_slot(k, m), from[m].at(g, index, stretch), 0);
                    else
                        place_of_slot(k, m) = load_cut(from[m].data, place, end);
                });
            }
            index += vectors.step;
        }
        unsigned furthest = 0;
        each<K>([&](int k) {
            const int stretch = stretch_of(index);
            if constexpr (straight) {
                each<N>([&](int m) {
                    load_vector_where<T, V>(index < vectors.end, held[m][k], from[m].at(g, index, stretch));
                });
            } else if (index < vectors.end) {
                const unsigned place = from[0].place(g, index, stretch);
                furthest = max(furthest, place);
                if (!is_cut(place))
                    each<N>([&](int m) { held[m][k] = load_vector<T, V>(from[m].at(g, index, stretch), 0); });
            }
            index += vectors.step;
        });
        if constexpr (unaligned) {
            /* Once all others have been requested: these are waited for. */
            if (is_cut(furthest)) {
                index = vectors.index + shared * vectors.step;
                each<K>([&](int k) {
                    const unsigned place = from[0].place(g, index, stretch_of(index));
                    if (index < vectors.end && is_cut(place))
                        each<N>([&](int m) { held[m][k] = load_cut(from[m].data, place, end); });
                    index += vectors.step;
                });
            }
        }
    }
    /* work(i, n, c) for each channel that the block touches, shared out among its threads from `first` on. */
    template <typename Work> __device__ __forceinline__ void share_channels(int first, Work work) const
    {
#pragma unroll 1
        for (int i = first; i < g.coefficients; i += (int)blockDim.x) {
            const int n = vectors.n;
            int c = vectors.c;
            if (!by_sample) {
                if (vectors.first_outer + i >= g.outer)
                    break;
                c += vectors.first_outer + i;
            }
            work(i, n, c);
        }
    }
    /* What is added to a vector: the `which`-th tensor that passes, or from memory. */
    __device__ __forceinline__ void read_added(const tensor &from, int which, int index, R (&values)[V]) const
    {
        if constexpr (adds)
            unpack<T, V>(passing.at(which), values);
        else
            unpack<T, V>(load_vector<T, V>(from.at(g, index, stretch_of(index)), 0), values);
    }
    /* x becomes x with pre_add, rounded, in the vectors that walk(work) calls work(x, index) for. */
    template <typename Walk> __device__ __forceinline__ void add_residual(Walk walk) const
    {
        const tensor other = of(p.pre_add());
        walk([&](raw<T, V> &vector, int index) {
            R value[V], residual[V];
            unpack<T, V>(vector, value);
            read_added(other, 0, index, residual);
            each<V>([&](int i) { value[i] += residual[i]; });
            vector = make_vector<T, V>(value);
        });
    }
    /* What join(what all blocks of a set send one another, whether that is in shared memory) finds; `alone` where there
     * is one block. meanwhile() is done while they are on their way. Of the grid one warp asks: where each did, 132
     * blocks of 16 wanted the same lines of the L2. */
    template <int numbers, typename Found, typename Meanwhile, typename Join>
    __device__ __forceinline__ Found exchange_sums(cluster_mailbox &mailbox, double *of_parts,
                                                   const double (&own)[numbers], const Found &alone,
                                                   Meanwhile meanwhile, Join join) const
    {
        const int part = block.part;
        if (block.exchange == NORMFUSE_EXCHANGE_CLUSTER) {
            await_open_mailboxes();
            if ((int)threadIdx.x < g.parts)
                each<numbers>([&](int i) { send(mailbox, of_parts + numbers * part + i, (int)threadIdx.x, own[i]); });
            meanwhile();
            await_mailbox(mailbox);
            return join(of_parts, true);
        }
        if (block.exchange == NORMFUSE_EXCHANGE_GRID) {
            __shared__ Found of_first_warp;
            double *const places = block.template parts_of<double>(a, numbers);
            if (threadIdx.x == 0)
                each<numbers>([&](int i) { places[numbers * part + i] = own[i]; });
            arrive_at_block_group(block.grid_barrier(a), part, g.parts);
            meanwhile();
            if (threadIdx.x < 32) {
                if (threadIdx.x == 0)
                    await_grid_barrier(block.grid_barrier(a), grid_barrier_before());
                __syncwarp();
                const Found found = join(places, false);
                if (threadIdx.x == 0)
                    of_first_warp = found;
            }
            __syncthreads();
            return of_first_warp;
        }
        return alone;
    }
};

#endif
