/* SPDX-License-Identifier: MIT
 *
 * transpose.cuh - the body `transpose`: tensors of other strides than a call's kernels take, copied before and after
 * them. transpose.c says which, and cuts each into tiles; a block has one. signature::type: any of so many bytes.
 *
 * A tile is read along axis a, the source's nearest elements, into shared memory, and written along axis b, the
 * destination's. Where both are the same axis no element goes through shared memory. A side is read or written in
 * vectors of 16 bytes where its rows are whole ones, or where the whole plane of a and b is adjacent (7x7 positions of
 * 16 bits: rows of 98 bytes) and the tile has all of its rows; else by elements. */
#include "exchange.cuh"

namespace {

constexpr int straight = signature::straight, type = signature::type, bytes = bytes_of(type), W = 16 / bytes;
using element = raw<type, 1>;

struct place {
    int64_t outer, b, a;
    int left_outer, left_b, left_a; /* of the tile: what is there of each */

    __device__ __forceinline__ place(const normfuse_transpose_copy &c, int tile)
    {
        const int of_a = divide(tile, c.by_tiles_a), of_b = divide(of_a, c.by_tiles_b);
        a = (int64_t)(tile - of_a * (int)c.by_tiles_a.divisor) * c.tile_a;
        b = (int64_t)(of_a - of_b * (int)c.by_tiles_b.divisor) * c.tile_b;
        outer = (int64_t)of_b * c.tile_outer;
        left_a = (int)min((int64_t)c.tile_a, c.a.size - a);
        left_b = (int)min((int64_t)c.tile_b, c.b.size - b);
        left_outer = (int)min((int64_t)c.tile_outer, c.outer.size - outer);
    }
    __device__ __forceinline__ char *destination(const normfuse_transpose_copy &c) const
    {
        return c.to + (outer * c.outer.to + b * c.b.to + a * c.a.to) * bytes;
    }
};

template <typename Vector> __device__ __forceinline__ void store(void *to, const Vector &vector)
{
    *reinterpret_cast<Vector *>(to) = vector;
}

/* By words or doubles: rows of the tile are an odd number of these apart, so that what a warp reads and writes across
 * rows lies in different banks. */
__device__ __forceinline__ void hold(element *to, const uint4 &vector)
{
    if constexpr (bytes == 8) {
        store(to, make_uint2(vector.x, vector.y));
        store(to + 1, make_uint2(vector.z, vector.w));
    } else {
        each<4>([&](int i) { reinterpret_cast<unsigned *>(to)[i] = word(vector, i); });
    }
}
__device__ __forceinline__ void hold(element *to, const element &one)
{
    *to = one;
}

/* Each vector (V > 1) or element of the tile in the source goes to `held`, or straight to the destination; several of a
 * thread are on their way at a time. */
template <bool is_straight, int V>
__device__ __forceinline__ void read_tile(const normfuse_transpose_copy &c, const place &tile, element *held)
{
    constexpr int ahead = 4;
    const char *const from = c.from + (tile.outer * c.outer.from + tile.b * c.b.from + tile.a * c.a.from) * bytes;
    char *const to = tile.destination(c);
    const int rows = c.tile_outer * (c.from_plane ? 1 : c.tile_b), items = rows * (int)c.by_read.divisor;
    const int end_b = c.from_plane ? 1 : tile.left_b, end_a = c.from_plane ? tile.left_b * c.tile_a : tile.left_a;
#pragma unroll 1
    for (int first = (int)threadIdx.x; first < items; first += ahead * (int)blockDim.x) {
        raw<type, V> vectors[ahead];
        typename choose<is_straight, int64_t, int>::type places[ahead];
        unsigned found = 0; /* a bit for each */
        each<ahead>([&](int k) {
            const int item = first + k * (int)blockDim.x, row = divide(item, c.by_read);
            const int a = (item - row * (int)c.by_read.divisor) * V;
            const int outer = c.from_plane ? row : divide(row, c.by_tile_b);
            const int b = c.from_plane ? 0 : row - outer * c.tile_b;
            const bool has = item < items && outer < tile.left_outer && b < end_b && a < end_a;
            vectors[k] = {};
            load_once(has, vectors[k], from + (outer * c.outer.from + b * c.b.from + a * c.a.from) * bytes);
            if constexpr (is_straight)
                places[k] = outer * c.outer.to + b * c.b.to + a * c.a.to;
            else
                places[k] = (outer * c.tile_b + b) * c.pitch + a;
            found |= (unsigned)has << k;
        });
        each<ahead>([&](int k) {
            if (!(found >> k & 1))
                return;
            if constexpr (is_straight)
                store(to + places[k] * bytes, vectors[k]);
            else
                hold(held + places[k], vectors[k]);
        });
    }
}

template <bool is_straight>
__device__ __forceinline__ void read_tile(const normfuse_transpose_copy &c, const place &tile, element *held)
{
    if (c.from_vectors)
        read_tile<is_straight, W>(c, tile, held);
    else
        read_tile<is_straight, 1>(c, tile, held);
}

template <int V>
__device__ __forceinline__ void write_tile(const normfuse_transpose_copy &c, const place &tile, const element *held)
{
    char *const to = tile.destination(c);
    const int rows = c.tile_outer * (c.to_plane ? 1 : c.tile_a), items = rows * (int)c.by_write.divisor;
#pragma unroll 1
    for (int item = (int)threadIdx.x; item < items; item += (int)blockDim.x) {
        const int row = divide(item, c.by_write), first = (item - row * (int)c.by_write.divisor) * V;
        const int outer = c.to_plane ? row : divide(row, c.by_tile_a);
        int a = c.to_plane ? divide(first, c.by_tile_b) : row - outer * c.tile_a;
        int b = c.to_plane ? first - a * c.tile_b : first;
        if (outer >= tile.left_outer || a >= tile.left_a || b >= tile.left_b)
            continue;
        const int64_t at = outer * c.outer.to + (c.to_plane ? (int64_t)first : a * c.a.to + b * c.b.to);
        element elements[V];
        each<V>([&](int i) {
            elements[i] = held[(outer * c.tile_b + b) * c.pitch + a];
            b++;
            if (c.to_plane && b == c.tile_b) {
                b = 0;
                a++;
            }
        });
        constexpr int words = bytes < 4 ? 1 : bytes / 4; /* of an element */
        raw<type, V> vector;
        each<(V * bytes + 3) / 4>([&](int i) {
            if constexpr (V == 1)
                vector = elements[0];
            else if constexpr (bytes == 2)
                set_word(vector, i, word(elements[2 * i], 0) | word(elements[2 * i + 1], 0) << 16);
            else
                set_word(vector, i, word(elements[i / words], i % words));
        });
        store(to + at * bytes, vector);
    }
}

} // namespace

/* Six blocks of a multiprocessor: 40 registers. */
extern "C" __global__ void __launch_bounds__(NORMFUSE_TRANSPOSE_THREADS, 6)
    NORMFUSE_KERNEL(const __grid_constant__ normfuse_transpose_arguments a)
{
    follow_kernel();
    NORMFUSE_DYNAMIC_SHARED(dynamic);
    element *const held = reinterpret_cast<element *>(dynamic);
    /* From the last block to the first: what is read next, and what was written last, is in L2. */
    const int block = (int)(gridDim.x - 1 - blockIdx.x);
    int i = 0;
    while (i + 1 < a.count && block >= a.copies[i + 1].first_block)
        i++;
    const normfuse_transpose_copy &c = a.copies[i];
    const place tile(c, block - c.first_block);
    if (straight == NORMFUSE_COPIES_STRAIGHT || (straight == NORMFUSE_COPIES_MIXED && c.straight)) {
        read_tile<true>(c, tile, held);
        return;
    }
    if (straight == NORMFUSE_COPIES_STRAIGHT)
        return;
    read_tile<false>(c, tile, held);
    __syncthreads();
    if (c.to_vectors)
        write_tile<W>(c, tile, held);
    else
        write_tile<1>(c, tile, held);
}
