/* SPDX-License-Identifier: MIT
 *
 * pipeline.cuh - a block's rows of a tensor over columns through a pipeline in shared memory, which one thread fills by
 * bulk copies: rows that are adjacent in memory are one stretch of it. */
#ifndef NORMFUSE_CUDA_PIPELINE_CUH
#define NORMFUSE_CUDA_PIPELINE_CUH

#include "columns_held.cuh"
#include "gradients.cuh"

constexpr int max_stages = 32;

/* Barriers of a block. */
enum { SUMS_ARE_THERE = 1, MEETING_OF_CONSUMERS, PIPELINE_IS_OPEN, CHANNELS_ARE_KNOWN, CHANNELS_ARE_PUT };

/* A stage is full when the bytes that its producer announced are there, empty when every warp is done with it. */
struct pipeline_barriers {
    uint64_t full[max_stages], empty[max_stages];
};

/* The block's part of each of its samples: tiles of tile_vectors vectors, of which the sample's last may be shorter,
 * that are adjacent or, of samples that are read again, take turns with those of the other blocks, so that all blocks
 * are near one another. Tile t lies in stage t % stages whenever it is there. */
struct grid_part {
    int block_group, part, tiles, tile_vectors, stages;
    int vectors; /* from the block's first one to the end of its part, or of the sample */
    int apart;   /* vectors from one tile to the next */
    unsigned at; /* bytes from the beginning of a sample */

    __device__ __forceinline__ explicit grid_part(const normfuse_cuda_columns &a)
    {
        block_group = divide((int)blockIdx.x, a.by_parts);
        part = (int)blockIdx.x - block_group * a.parts;
        const int tile_rows = (int)a.of.grid.by_tile.divisor,
                  first = part * (a.of.grid.interleaved ? tile_rows : a.part_rows);
        const int rows = a.rows - first;
        stages = a.of.grid.stages;
        tile_vectors = tile_rows * a.width;
        const bool turns = a.of.grid.interleaved;
        tiles = turns ? divide(rows + a.parts * tile_rows - 1, a.of.grid.by_turn)
                      : divide(min(rows, a.part_rows) + tile_rows - 1, a.of.grid.by_tile);
        vectors = (turns ? rows : min(rows, a.part_rows)) * a.width;
        apart = turns ? a.parts * tile_vectors : tile_vectors;
        at = (unsigned)first * a.row_bytes;
    }
    __device__ __forceinline__ int vectors_of(int tile) const
    {
        return min(tile_vectors, vectors - tile * apart);
    }
    __device__ __forceinline__ unsigned place_of(int tile) const
    {
        return at + (unsigned)(tile * apart) * 16u;
    }
    /* Tiles that are not there any more when all were summed. */
    __device__ __forceinline__ int tiles_read_again() const
    {
        return max(0, tiles - stages);
    }
};

/* One bit a stage: the parity that its barrier is waited for with next. */
struct stage_parities {
    unsigned bits = 0;

    __device__ __forceinline__ void await_stage(uint64_t (&barriers)[max_stages], int stage)
    {
        await(barriers[stage], bits >> stage & 1);
        bits ^= 1u << stage;
    }
};

/* The producer's warp. It opens the pipeline, where consumers meet it at PIPELINE_IS_OPEN, which it does not wait for;
 * then its first thread requests tiles, each of `tensors` tensors. */
template <int tensors> struct tile_producer {
    const normfuse_cuda_columns &a;
    pipeline_barriers &barriers;
    uint4 *pipeline;
    const grid_part &own;
    const char *from[tensors]; /* the sample */
    stage_parities free;
    unsigned used = 0; /* stages that were filled before */
    l2_policies policies;

    __device__ __forceinline__ tile_producer(const normfuse_cuda_columns &a, pipeline_barriers &barriers,
                                             uint4 *pipeline, const grid_part &own, int lane)
        : a(a), barriers(barriers), pipeline(pipeline), own(own)
    {
        if (lane < a.of.grid.stages) {
            open_barrier(barriers.full[lane], 1);
            open_barrier(barriers.empty[lane], (int)blockDim.x / 32 - 1);
        }
        announce_barriers();
        __syncwarp();
        announce(PIPELINE_IS_OPEN, (int)blockDim.x);
    }
    __device__ __forceinline__ void fill(int tile, int stage, uint64_t policy)
    {
        if (used >> stage & 1)
            free.await_stage(barriers.empty, stage);
        used |= 1u << stage;
        const unsigned bytes = (unsigned)own.vectors_of(tile) * 16;
        expect_bytes(barriers.full[stage], tensors * bytes);
        each<tensors>([&](int i) {
            copy_bulk(pipeline + (stage * tensors + i) * own.tile_vectors, from[i] + own.place_of(tile), bytes,
                      barriers.full[stage], policy);
        });
    }
    __device__ __forceinline__ void fill_all(int n)
    {
        from[0] = a.x + n * a.batch_bytes;
        if (tensors > 1)
            from[tensors - 1] = a.dy + n * a.batch_bytes;
        const int again = own.tiles_read_again();
        int stage = 0;
#pragma unroll 1
        for (int tile = 0; tile < own.tiles; tile++) {
            fill(tile, stage, tile < again && tile >= again - a.of.grid.l2_tiles ? policies.last : policies.first);
            stage = stage + 1 == own.stages ? 0 : stage + 1;
        }
    }
    /* `dz`: in the place of dy; nullptr: dy itself. */
    __device__ __forceinline__ void fill_again(const char *dz = nullptr)
    {
        const int again = own.tiles_read_again();
        if (tensors > 1 && dz)
            from[tensors - 1] = dz;
        int stage = again > 0 ? (again - 1) % own.stages : 0;
#pragma unroll 1
        for (int tile = again - 1; tile >= 0; tile--) {
            fill(tile, stage, policies.first);
            stage = stage == 0 ? own.stages - 1 : stage - 1;
        }
    }
};

/* The others. */
template <int tensors> struct tile_consumer {
    static constexpr int at_a_time = 4 / tensors;
    const normfuse_cuda_columns &a;
    pipeline_barriers &barriers;
    uint4 *pipeline;
    const grid_part &own;
    const thread_place &place;
    const float act_param = a.act_param;
    const int step = a.at_once * a.width;                             /* vectors of all threads */
    const int first = place.has_rows(a) ? (int)threadIdx.x : 1 << 30; /* the thread's first of adjacent rows */
    stage_parities here = {};

    __device__ __forceinline__ tile_consumer(const normfuse_cuda_arguments &all, pipeline_barriers &barriers,
                                             uint4 *pipeline, const grid_part &own, const thread_place &place)
        : a(all.columns), barriers(barriers), pipeline(pipeline), own(own), place(place)
    {
    }
    /* Of the next sample. */
    __device__ __forceinline__ void begin(int)
    {
    }
    __device__ __forceinline__ void leave(int stage)
    {
        __syncwarp();
        if (threadIdx.x % 32 == 0)
            arrive(barriers.empty[stage]);
    }
    /* work(tile, its stage) for all tiles. */
    template <typename Work> __device__ __forceinline__ void walk_sums(Work work)
    {
        const int again = own.tiles_read_again();
        int stage = 0;
#pragma unroll 1
        for (int tile = 0; tile < own.tiles; tile++) {
            here.await_stage(barriers.full, stage);
            work(tile, stage);
            if (tile < again)
                leave(stage);
            stage = stage + 1 == own.stages ? 0 : stage + 1;
        }
    }
    /* Where all tiles are there, in the order in which the next sample's come; else the last first. */
    template <typename Work> __device__ __forceinline__ void walk_results(bool is_last, Work work)
    {
        const int again = own.tiles_read_again();
        int tile = again > 0 ? own.tiles - 1 : 0, stage = again > 0 ? tile % own.stages : 0;
#pragma unroll 1
        for (int left = own.tiles; left > 0; left--) {
            if (tile < again)
                here.await_stage(barriers.full, stage);
            work(tile, stage);
            if (again > 0 || !is_last)
                leave(stage);
            if (again > 0) {
                tile--;
                stage = stage == 0 ? own.stages - 1 : stage - 1;
            } else {
                tile++;
                stage++;
            }
        }
    }
    /* work(vectors, place) for each of the thread's places of a tile, `at_a_time` of them on their way together: the
     * vector of x, or those of x and dy. */
    template <typename Work> __device__ __forceinline__ void walk_vectors(int tile, int stage, Work work) const
    {
        using in_place = row_vectors<tensors>;
        const uint4 *const from = pipeline + tensors * stage * own.tile_vectors;
        const auto read = [&](int i) {
            in_place here;
            each<tensors>([&](int k) { here.of[k] = from[k * own.tile_vectors + i]; });
            return here;
        };
        const int vectors = own.vectors_of(tile);
        int i = first;
#pragma unroll 1
        for (; i + (at_a_time - 1) * step < vectors; i += at_a_time * step) {
            in_place here[at_a_time];
            each<at_a_time>([&](int k) { here[k] = read(i + k * step); });
            each<at_a_time>([&](int k) { work(here[k].of, i + k * step); });
        }
#pragma unroll 1
        for (; i < vectors; i += step)
            work(read(i).of, i);
    }
    /* Of the thread's first vector found.begin, of each found.add, and after so many tiles found.fold. */
    template <typename Found> __device__ __forceinline__ void sum_moments(Found &found)
    {
        int until_fold = a.of.grid.chunk_tiles;
        walk_sums([&](int tile, int stage) {
            if (tile == 0 && first < own.vectors_of(tile))
                found.begin(pipeline[stage * own.tile_vectors + first]);
            walk_vectors(tile, stage, [&](const uint4 *vector, int) { found.add(*vector); });
            if (--until_fold == 0 || tile + 1 == own.tiles) {
                found.fold();
                until_fold = a.of.grid.chunk_tiles;
            }
        });
    }
    /* As those of held_rows; sums are of each tile, then of tiles, so that none is long. */
    template <typename Work> __device__ __forceinline__ void choose_derivative(Work work) const
    {
        choose_activation<false>(a.activation, work);
    }
    /* The same of results. */
    template <typename Work> __device__ __forceinline__ void choose_gradient(Work work) const
    {
        choose_derivative(work);
    }
    /* work(tile, stage, sums of the tile, and the others) */
    template <int V, typename Work>
    __device__ __forceinline__ void sum_tiles(float (&first)[V], float (&second)[V], Work work)
    {
        walk_sums([&](int tile, int stage) {
            float of_tile[V] = {}, other_of_tile[V] = {};
            work(tile, stage, of_tile, other_of_tile);
            each<V>([&](int k) {
                first[k] += of_tile[k];
                second[k] += other_of_tile[k];
            });
        });
    }
    template <int V, typename Work>
    __device__ __forceinline__ void sum(float (&first)[V], float (&second)[V], Work work)
    {
        sum_tiles(first, second, [&](int tile, int stage, float (&of_tile)[V], float (&other_of_tile)[V]) {
            walk_vectors(tile, stage,
                         [&](const uint4 *vectors, int) { work(vectors, of_tile, other_of_tile, no_additions()); });
        });
    }
    __device__ __forceinline__ void forget() const
    {
    }
    template <typename Work> __device__ __forceinline__ void store(char *to, bool is_last, Work work)
    {
        walk_results(is_last, [&](int tile, int stage) {
            char *const to_tile = to + own.place_of(tile);
            walk_vectors(tile, stage,
                         [&](const uint4 *vectors, int i) { work(vectors, to_tile + i * 16, no_additions()); });
        });
    }
};

/* Whether the backward goes on from dz, which is exact in the tensors' type: it takes the place of dy in tiles that
 * stay, and others are read again from dpost_add. */
__device__ __forceinline__ bool goes_on_from_dz(const normfuse_cuda_problem &p, const grid_part &own)
{
    return p.post_add().data && p.activation != NORMFUSE_IDENTITY &&
           normfuse_is_dz_exact(p.type() == NORMFUSE_F32 ? 4 : 2, p.activation) &&
           (own.tiles_read_again() == 0 || p.dpost_add().data);
}

/* Consumers of tiles to which something is added, which comes beside them through registers: of two tensors at a time,
 * the vectors of the next tile are on their way. With the sums these are pre_add, backward alone, and post_add; with
 * results du and post_add. x with pre_add takes the place of x. */
template <int tensors> struct adding_consumer : tile_consumer<tensors> {
    enum { slots = NORMFUSE_CUDA_PASSING_AHEAD };
    using consumer = tile_consumer<tensors>;
    using consumer::a, consumer::own, consumer::first, consumer::step;
    const normfuse_cuda_problem &p;
    const bool reads_post, from_dz;
    int64_t sample = 0; /* bytes from a tensor's first element */
    const char *post_from = nullptr, *other_from = nullptr;
    uint4 post[slots] = {}, other[slots] = {};

    __device__ __forceinline__ adding_consumer(const normfuse_cuda_arguments &all, pipeline_barriers &barriers,
                                               uint4 *pipeline, const grid_part &own, const thread_place &place)
        : consumer(all, barriers, pipeline, own, place), p(all.problem),
          reads_post(p.post_add().data && (tensors == 1 || a.activation != NORMFUSE_IDENTITY)),
          from_dz(tensors > 1 && goes_on_from_dz(p, own))
    {
    }
    __device__ __forceinline__ void begin(int n)
    {
        sample = n * a.batch_bytes;
    }
    /* What is added to the thread's k-th vector of a tile, `at` bytes from the first element; in shared memory that is
     * `x`, and backward `dy`. */
    struct additions {
        const adding_consumer &of;
        int k;
        uint4 &x, &dy;
        int64_t at;

        /* x with pre_add. */
        template <typename T, int V> __device__ __forceinline__ uint4 with_x(const uint4 &vector) const
        {
            if (!of.p.pre_add().data)
                return vector;
            float value[V], more[V];
            unpack<T, V>(vector, value);
            unpack<T, V>(of.other[k], more);
            each<V>([&](int i) { value[i] += more[i]; });
            return x = make_vector<T, V>(value);
        }
        template <typename T, int V> __device__ __forceinline__ vector_added<T, V> after(float factor) const
        {
            return {of.post[k], factor, of.reads_post, tensors > 1 && of.p.from_y()};
        }
        /* dz with the sums, where the backward goes on from it; else with results. */
        template <typename T, int V> __device__ __forceinline__ void keep_dz(const float (&dz)[V]) const
        {
            if (!of.from_dz)
                return;
            dy = make_vector<T, V>(dz);
            if (of.p.dpost_add().data)
                store_vector<T, V>(of.p.dpost_add().data + at, 0, dy);
        }
        template <typename T, int V> __device__ __forceinline__ void give_dz(const float (&dy)[V], float factor) const
        {
            if (of.from_dz || !of.p.dpost_add().data)
                return;
            float dz[V];
            each<V>([&](int i) { dz[i] = dy[i] * factor; });
            store_vector<T, V>(of.p.dpost_add().data + at, 0, make_vector<T, V>(dz));
        }
        template <typename T, int V> __device__ __forceinline__ void add_du(float (&x)[V]) const
        {
            if (!of.p.du().data)
                return;
            float more[V];
            unpack<T, V>(of.other[k], more);
            each<V>([&](int i) { x[i] += more[i]; });
        }
    };
    __device__ __forceinline__ void request(int tile, int k)
    {
        const int i = first + k * step;
        const bool exists = tile >= 0 && tile < own.tiles && i < own.vectors_of(tile);
        const int64_t at = own.place_of(tile) + (int64_t)i * NORMFUSE_VECTOR_BYTES;
        load_uint4_where(exists && post_from, post[k], post_from + at);
        if (tensors > 1)
            load_uint4_where(exists && other_from, other[k], other_from + at);
    }
    __device__ __forceinline__ void open(int tile, bool takes_post, const char *of_other)
    {
        post_from = takes_post ? p.post_add().data + sample : nullptr;
        other_from = of_other ? of_other + sample : nullptr;
        each<slots>([&](int k) { request(tile, k); });
    }
    /* What results need first, before the sums are joined. */
    __device__ __forceinline__ void open_results()
    {
        open(own.tiles_read_again() > 0 ? own.tiles - 1 : 0, reads_post && !from_dz, p.du().data);
    }
    /* work(vectors, place, additions) for each of the thread's places of a tile, after which comes tile `next`. */
    template <typename Work> __device__ __forceinline__ void walk_vectors(int tile, int stage, int next, Work work)
    {
        uint4 *const from = this->pipeline + tensors * stage * own.tile_vectors;
        const int vectors = own.vectors_of(tile);
        row_vectors<tensors> here[slots] = {};
        each<slots>([&](int k) {
            const int i = first + k * step;
            if (i < vectors)
                each<tensors>([&](int t) { here[k].of[t] = from[t * own.tile_vectors + i]; });
        });
        each<slots>([&](int k) {
            const int i = first + k * step;
            if (i < vectors)
                work(here[k].of, i,
                     additions{*this, k, from[i], from[(tensors - 1) * own.tile_vectors + i],
                               sample + own.place_of(tile) + (int64_t)i * NORMFUSE_VECTOR_BYTES});
            request(next, k);
        });
    }
    template <typename Found> __device__ __forceinline__ void sum_moments(Found &found)
    {
        consumer::sum_moments(found);
        open_results();
    }
    template <typename Work> __device__ __forceinline__ void choose_gradient(Work work) const
    {
        choose_activation<false>(from_dz ? NORMFUSE_IDENTITY : a.activation, work);
    }
    template <int V, typename Work>
    __device__ __forceinline__ void sum(float (&first)[V], float (&second)[V], Work work)
    {
        open(0, reads_post, p.pre_add().data);
        this->sum_tiles(first, second, [&](int tile, int stage, float (&of_tile)[V], float (&other_of_tile)[V]) {
            walk_vectors(tile, stage, tile + 1, [&](const uint4 *vectors, int, const additions &added) {
                work(vectors, of_tile, other_of_tile, added);
            });
            if (from_dz || p.pre_add().data)
                admit_bulk_copies();
        });
        open_results();
    }
    template <typename Work> __device__ __forceinline__ void store(char *to, bool is_last, Work work)
    {
        const int onwards = own.tiles_read_again() > 0 ? -1 : 1;
        this->walk_results(is_last, [&](int tile, int stage) {
            char *const to_tile = to + own.place_of(tile);
            walk_vectors(tile, stage, tile + onwards, [&](const uint4 *vectors, int i, const additions &added) {
                work(vectors, to_tile + i * 16, added);
            });
        });
    }
};
template <normfuse_cuda_schedule schedule>
constexpr bool adds_to_tiles =
    schedule == NORMFUSE_SCHEDULE_grid_additions || schedule == NORMFUSE_SCHEDULE_batch_additions;
template <int tensors, bool adds> struct consumer_of {
    using type = tile_consumer<tensors>;
};
template <int tensors> struct consumer_of<tensors, true> {
    using type = adding_consumer<tensors>;
};
template <int tensors, normfuse_cuda_schedule schedule>
using consumer_for = typename consumer_of<tensors, adds_to_tiles<schedule>>::type;

/* ---- what blocks exchange ---------------------------------------------------------------------------------------- */

/* A grid barrier; what it says before is requested while data arrive, and known to thread 0. */
struct grid_meeting {
    uint32_t *barrier, before = 0;

    __device__ __forceinline__ explicit grid_meeting(uint32_t *barrier) : barrier(barrier)
    {
        if (threadIdx.x == 0)
            before = look_at_grid_barrier(barrier);
    }
    /* The consumers of a block: the first `parts` blocks arrive, and all wait for these. */
    __device__ __forceinline__ void meet_blocks(int part, int parts, int consumers) const
    {
        meet(MEETING_OF_CONSUMERS, consumers);
        if (threadIdx.x == 0) {
            if (part < parts)
                add_release(barrier, grid_barrier_share(part, parts));
            await_grid_barrier(barrier, before);
        }
        meet(MEETING_OF_CONSUMERS, consumers);
    }
};

/* Every lanes-th of `left` pairs, `apart` from one to the next, that other blocks wrote; zeros where there are no more.
 */
template <int lanes, int held>
__device__ __forceinline__ void request_parts(const float2 *from, int apart, int left, float2 (&parts)[held])
{
    each<held>([&](int k) {
        parts[k] = make_float2(0.0f, 0.0f);
        if (k * lanes < left)
            parts[k] = __ldcg(from + k * lanes * apart);
    });
}

/* What some parts found of number(k) values each: their mean less what all know, and squares about it. */
template <int held, typename Number>
__device__ __forceinline__ void append_parts(moments<float> &to, const float2 (&found)[held], Number number)
{
    moments<float> next = {};
    each<held>([&](int k) {
        next.count += number(k);
        next.mean += number(k) * found[k].x;
    });
    next.mean *= reciprocal(next.count);
    each<held>([&](int k) {
        const float distance = found[k].x - next.mean;
        next.squares += found[k].y + number(k) * distance * distance;
    });
    append_near(to, next);
}

/* How many values a part has of `channels` channels. The first blocks may have a tile more than the others; the last of
 * these what is left of its last one, which is counted whole, then taken back. */
struct values_of_parts {
    float first, other, lacking;

    __device__ __forceinline__ values_of_parts(const normfuse_cuda_columns &a, int channels)
    {
        first = (float)a.part_rows * (float)channels;
        other = (float)a.of.grid.small_part_rows * (float)channels;
        lacking = (float)a.of.grid.lacking_rows * (float)channels;
    }
    __device__ __forceinline__ float part(const normfuse_cuda_columns &a, int i) const
    {
        return (i < a.of.grid.first_parts ? first : other) - (i == a.of.grid.first_parts - 1 ? lacking : 0.0f);
    }
};

/* Bulk copies came with capability 9.0; no kernel of these is launched below. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define NORMFUSE_PIPELINE_INSTANCE(layout, schedule, direction, type, elements, vectors, registers)                    \
    NORMFUSE_KERNEL(layout, schedule, direction, type, elements, vectors, registers)                                   \
    {                                                                                                                  \
        __trap();                                                                                                      \
    }
#else
#define NORMFUSE_PIPELINE_INSTANCE NORMFUSE_INSTANCE
#endif

#endif
