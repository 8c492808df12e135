/* SPDX-License-Identifier: MIT
 *
 * transpose.cu - tensors of other strides than a call's kernels take, copied before and after them. transpose.c says
 * which, and cuts each into tiles; a block has one.
 *
 * A tile is read along axis a, the source's nearest elements, into shared memory, and written along axis b, the
 * destination's. Where both are the same axis no element goes through shared memory. A side is read or written in
 * vectors of 16 bytes where its rows are whole ones, or where the whole plane of a and b is adjacent (7x7 positions of
 * 16 bits: rows of 98 bytes) and the tile has all of its rows; else by elements. */
#include "join.cuh"
#include "vector.cuh"

struct transpose_place {
    int64_t outer, b, a;
    int left_outer, left_b, left_a; /* of the tile: what is there of each */
};

__device__ __forceinline__ transpose_place place_of(const normfuse_cuda_copy &c, int tile)
{
    const int of_a = divide(tile, c.by_tiles_a), of_b = divide(of_a, c.by_tiles_b);
    transpose_place place;
    place.a = (int64_t)(tile - of_a * (int)c.by_tiles_a.divisor) * c.tile_a;
    place.b = (int64_t)(of_a - of_b * (int)c.by_tiles_b.divisor) * c.tile_b;
    place.outer = (int64_t)of_b * c.tile_outer;
    place.left_a = (int)min((int64_t)c.tile_a, c.a.size - place.a);
    place.left_b = (int)min((int64_t)c.tile_b, c.b.size - place.b);
    place.left_outer = (int)min((int64_t)c.tile_outer, c.outer.size - place.outer);
    return place;
}

template <typename Vector> __device__ __forceinline__ void put(void *to, const Vector &vector)
{
    *reinterpret_cast<Vector *>(to) = vector;
}

template <typename T> __device__ __forceinline__ void hold(T *tile, int at, const raw<T, 1> &element)
{
    put(tile + at, element);
}
/* By words or doubles: rows of the tile are an odd number of these apart, so that what a warp reads and writes across
 * rows lies in different banks. */
template <typename T> __device__ __forceinline__ void hold(T *tile, int at, const uint4 &vector)
{
    if constexpr (sizeof(T) == 8) {
        put(tile + at, make_uint2(vector.x, vector.y));
        put(tile + at + 1, make_uint2(vector.z, vector.w));
    } else {
        unsigned *const to = reinterpret_cast<unsigned *>(tile + at);
        to[0] = vector.x;
        to[1] = vector.y;
        to[2] = vector.z;
        to[3] = vector.w;
    }
}

/* Of each vector (V > 1) or element of the tile in the source, K of a thread on their way at a time:
 * work(place_of(its sample, row and element in the tile), vector). */
template <typename T, int V, int K, typename Place, typename Work>
__device__ __forceinline__ void read_tile(const normfuse_cuda_copy &c, const transpose_place &place, Place place_of,
                                          Work work)
{
    const char *const from =
        c.from + (place.outer * c.outer.from + place.b * c.b.from + place.a * c.a.from) * (int64_t)sizeof(T);
    const int rows = c.tile_outer * (c.from_plane ? 1 : c.tile_b), items = rows * (int)c.by_read.divisor;
    const int end_b = c.from_plane ? 1 : place.left_b, end_a = c.from_plane ? place.left_b * c.tile_a : place.left_a;
#pragma unroll 1
    for (int first = (int)threadIdx.x; first < items; first += K * (int)blockDim.x) {
        raw<T, V> vectors[K];
        decltype(place_of(0, 0, 0)) places[K];
        unsigned found = 0; /* a bit for each */
#pragma unroll
        for (int k = 0; k < K; k++) {
            const int item = first + k * (int)blockDim.x, row = divide(item, c.by_read);
            const int a = (item - row * (int)c.by_read.divisor) * V;
            const int outer = c.from_plane ? row : divide(row, c.by_tile_b);
            const int b = c.from_plane ? 0 : row - outer * c.tile_b;
            const bool has = item < items && outer < place.left_outer && b < end_b && a < end_a;
            const char *const at = from + (outer * c.outer.from + b * c.b.from + a * c.a.from) * (int64_t)sizeof(T);
            vectors[k] = raw<T, V>();
            if constexpr (V > 1)
                load_uint4_where(has, vectors[k], at);
            else
                load_where(has, vectors[k], at);
            places[k] = place_of(outer, b, a);
            found |= (unsigned)has << k;
        }
#pragma unroll
        for (int k = 0; k < K; k++)
            if (found >> k & 1)
                work(places[k], vectors[k]);
    }
}

template <typename T, int V>
__device__ __forceinline__ void write_tile(const normfuse_cuda_copy &c, const transpose_place &place, const T *tile)
{
    char *const to = c.to + (place.outer * c.outer.to + place.b * c.b.to + place.a * c.a.to) * (int64_t)sizeof(T);
    const int rows = c.tile_outer * (c.to_plane ? 1 : c.tile_a), items = rows * (int)c.by_write.divisor;
    const raw<T, 1> *const held = reinterpret_cast<const raw<T, 1> *>(tile);
#pragma unroll 1
    for (int item = (int)threadIdx.x; item < items; item += (int)blockDim.x) {
        const int row = divide(item, c.by_write), element = (item - row * (int)c.by_write.divisor) * V;
        const int outer = c.to_plane ? row : divide(row, c.by_tile_a);
        int a = c.to_plane ? divide(element, c.by_tile_b) : row - outer * c.tile_a;
        int b = c.to_plane ? element - a * c.tile_b : element;
        if (outer >= place.left_outer || a >= place.left_a || b >= place.left_b)
            continue;
        const int64_t at = outer * c.outer.to + (c.to_plane ? (int64_t)element : a * c.a.to + b * c.b.to);
        raw<T, 1> elements[V];
#pragma unroll
        for (int i = 0; i < V; i++) {
            elements[i] = held[(outer * c.tile_b + b) * c.pitch + a];
            b++;
            if (c.to_plane && b == c.tile_b) {
                b = 0;
                a++;
            }
        }
        char *const address = to + at * (int64_t)sizeof(T);
        if constexpr (V == 1)
            put(address, elements[0]);
        else if constexpr (sizeof(T) == 2)
            put(address,
                make_uint4(elements[0] | (unsigned)elements[1] << 16, elements[2] | (unsigned)elements[3] << 16,
                           elements[4] | (unsigned)elements[5] << 16, elements[6] | (unsigned)elements[7] << 16));
        else
            put(address, make_vector<T, V>(elements));
    }
}

/* A tile of the copy that the block is of. T: any type of so many bytes. */
template <typename T> __device__ __forceinline__ void transpose(const normfuse_cuda_transpose_arguments &a)
{
    follow_kernel();
    constexpr int V = 16 / (int)sizeof(T), ahead = 4;
    NORMFUSE_DYNAMIC_SHARED(dynamic);
    T *const tile = reinterpret_cast<T *>(dynamic);
    /* From the last block to the first: what is read next, and what was written last, is in L2. */
    const int block = (int)(gridDim.x - 1 - blockIdx.x);
    int i = 0;
    while (i + 1 < a.count && block >= a.copies[i + 1].first_block)
        i++;
    const normfuse_cuda_copy &c = a.copies[i];
    const transpose_place place = place_of(c, block - c.first_block);
    const auto read = [&](auto place_of, auto work) {
        if (c.from_vectors)
            read_tile<T, V, ahead>(c, place, place_of, work);
        else
            read_tile<T, 1, ahead>(c, place, place_of, work);
    };
    if (c.straight) {
        char *const to = c.to + (place.outer * c.outer.to + place.b * c.b.to + place.a * c.a.to) * (int64_t)sizeof(T);
        read([&](int outer, int b, int a) { return outer * c.outer.to + b * c.b.to + a * c.a.to; },
             [&](int64_t at, const auto &vector) { put(to + at * (int64_t)sizeof(T), vector); });
        return;
    }
    read([&](int outer, int b, int a) { return (outer * c.tile_b + b) * c.pitch + a; },
         [&](int at, const auto &vector) { hold<T>(tile, at, vector); });
    __syncthreads();
    if (c.to_vectors)
        write_tile<T, V>(c, place, tile);
    else
        write_tile<T, 1>(c, place, tile);
}

#define INSTANCE(name, type)                                                                                           \
    extern "C" __global__ void __maxnreg__(40)                                               \
        normfuse_##name(const __grid_constant__ normfuse_cuda_transpose_arguments a)                                   \
    {                                                                                                                  \
        transpose<type>(a);                                                                                            \
    }
INSTANCE(transpose2, f16)
INSTANCE(transpose4, f32)
INSTANCE(transpose8, f64)
